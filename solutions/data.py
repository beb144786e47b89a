"""From pages to tokens: which text is worth its FLOPs, and how does it reach the model?"""

import functools
import re
import unicodedata
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, UInt64
from torch import Tensor
from torch.nn.functional import embedding_bag

from lib.given.data import pages, parts, shards
from lib.given.data.pages import PRIME, share, text_hash, word_grams
from lib.given.data.parts import Sizes, Texts
from lib.given.data.shards import Folder
from solutions.training import AdamW, cross_entropy


def extract_text(html: str | bytes, max_link_density: float = 0.5) -> str:
    """The text of an HTML page, without its navigation and programs. (Exercise)

    Size: 75 minutes, difficulty 4, core.

    Args:
        html: The page.
            Bytes are UTF-8 or, if they are not, Windows-1252, with U+FFFD for bytes that it does not have.
        max_link_density: Largest share of a line's characters, white space not counted, that may be inside ``a``.

    Returns:
        Lines, joined by a newline, or by an empty line if a block boundary lies anywhere between the two.
        No newline stands at the ends.

        - **Left out**, with all that is inside: ``LEFT_OUT``. Only an end tag of one of these names ends such elements:
          the innermost open one of its name, and what was opened in it. ``</div>`` ends no ``nav``. An element without
          an end tag lasts to the end of the page, but ``<body>`` ends a ``head``.
        - **Blocks**: ``BLOCKS``, and each of ``LISTS`` that is in no other list, begin and end with a block boundary.
        - **Lines**: ``LINES``, and inner lists, begin and end a line.
        - A tag counts where it stands: the end tag of a block, a line or a list that nothing opened is a boundary, too.
        - All other tags vanish without a space; ``td`` and ``th`` put one space between two cells.
        - **Spaces**: a run of space, tab, newline, return, form feed and no-break space becomes one space, and the
          line is stripped. In ``pre`` spaces stay, a newline ends the line, an empty line is a block boundary, and
          only the end of a line is stripped.
        - **Lists**: the first line of a ``li`` that has text begins with two spaces for each list that the ``li`` is
          in (at least one), and "• ".
        - **Links**: a line with a larger share of linked characters than ``max_link_density`` is dropped.
          The "• " does not count.
          Links do not nest: the first ``</a>`` ends all that are open, and no other tag does.
        - Lines without text vanish.

    Source: the first step of CS336's assignment 4.
    Given in ``pages``: ``PageParser`` (``html.parser``), ``Lines``, ``decode`` and ``end_element``.
    Convention: Resiliparse and Trafilatura, which the field uses, guess the main content; these rules only read tags.
    """
    ### BEGIN SOLUTION
    page = _Page(max_link_density)
    page.feed(pages.decode(html))
    page.close()
    page.lines.end_line()
    return str(page.lines)
    ### END SOLUTION


### BEGIN SOLUTION
class _Page(pages.PageParser):
    def __init__(self, max_link_density: float):
        super().__init__()
        self.lines = pages.Lines(max_link_density)
        self.left_out: list[str] = []
        self.lists: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        if tag == "body":
            pages.end_element(self.left_out, "head")
        if tag in pages.LEFT_OUT:
            self.left_out.append(tag)
        if self.left_out:
            return
        self.lines.break_at(tag, bool(self.lists))
        if tag in pages.LISTS:
            self.lists.append(tag)
        elif tag == "li":
            self.lines.items[len(self.lists)] = True
        elif tag in ("td", "th") and self.lines.begun:
            self.lines.add(" ")
        self.lines.n_pre += tag == "pre"
        self.lines.in_link |= tag == "a"

    def handle_endtag(self, tag: str) -> None:
        if self.left_out:
            pages.end_element(self.left_out, tag)
            return
        if tag in pages.LISTS:
            self.lines.end_line()
            pages.end_element(self.lists, tag)
            self.lines.items = {n: waits for n, waits in self.lines.items.items() if n <= len(self.lists)}
        self.lines.break_at(tag, bool(self.lists))
        if tag == "li":
            self.lines.items.pop(len(self.lists), None)
        self.lines.n_pre -= tag == "pre" and self.lines.n_pre > 0
        self.lines.in_link &= tag != "a"

    def handle_data(self, data: str) -> None:
        if not self.left_out:
            self.lines.add(data)


### END SOLUTION


def gopher_quality(
    text: str,
    min_doc_words: int = 50,
    max_doc_words: int = 100_000,
    min_avg_word_length: float = 3,
    max_avg_word_length: float = 10,
    max_symbol_word_ratio: float = 0.1,
    max_bullet_lines_ratio: float = 0.9,
    max_ellipsis_lines_ratio: float = 0.3,
    min_alpha_words_ratio: float = 0.8,
    min_stop_words: int = 2,
) -> str | None:
    """The first of Gopher's quality rules that a text breaks, or None. (Exercise)

    Size: 40 minutes, difficulty 2, core.

    Args:
        text: The document. Its tokens are ``text.split()``; its words, those with a letter or digit (``isalnum``).
        min_doc_words: Fewest words.
        max_doc_words: Most words.
        min_avg_word_length: Least mean of the words' characters.
        max_avg_word_length: Largest mean of the words' characters.
        max_symbol_word_ratio: Most "#" a token and, separately, most "..." and "…" a token, by ``str.count``.
        max_bullet_lines_ratio: Largest share of lines that begin with "•", "-" or "*".
        max_ellipsis_lines_ratio: Largest share of lines that end with "..." or "…".
        min_alpha_words_ratio: Least share of tokens with a letter (``isalpha``).
        min_stop_words: Fewest different words of ``STOP_WORDS`` in ``normalize(text)``.

    Returns:
        None if the text passes, else the name of the first broken rule, in this order.
        A value that equals its limit passes.
        Lines are those of ``splitlines()``, stripped, and blank ones do not count; "......" counts as two ellipses.

        1. "gopher_short_doc": too few words, or none; "gopher_long_doc": too many.
        2. "gopher_below_avg_threshold", "gopher_above_avg_threshold": the mean length of words.
        3. "gopher_too_many_hashes", "gopher_too_many_ellipsis": symbols a token.
        4. "gopher_too_many_bullets", "gopher_too_many_end_ellipsis": shares of lines.
        5. "gopher_below_alpha_threshold": too few tokens with a letter.
        6. "gopher_enough_stop_words": too few stop words.

    Source: Rae and others (arXiv:2112.11446), appendix A; the names are datatrove's.
    """
    ### BEGIN SOLUTION
    tokens = text.split()
    words = [token for token in tokens if any(map(str.isalnum, token))]
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not words or len(words) < min_doc_words:
        return "gopher_short_doc"
    mean_length = sum(map(len, words)) / len(words)
    ellipses = ("...", "…")
    rules = {
        "gopher_long_doc": len(words) > max_doc_words,
        "gopher_below_avg_threshold": mean_length < min_avg_word_length,
        "gopher_above_avg_threshold": mean_length > max_avg_word_length,
        "gopher_too_many_hashes": text.count("#") / len(tokens) > max_symbol_word_ratio,
        "gopher_too_many_ellipsis": sum(map(text.count, ellipses)) / len(tokens) > max_symbol_word_ratio,
        "gopher_too_many_bullets": share(line[0] in "•-*" for line in lines) > max_bullet_lines_ratio,
        "gopher_too_many_end_ellipsis": share(line.endswith(ellipses) for line in lines) > max_ellipsis_lines_ratio,
        "gopher_below_alpha_threshold": share(any(map(str.isalpha, t)) for t in tokens) < min_alpha_words_ratio,
        "gopher_enough_stop_words": len(pages.STOP_WORDS & set(normalize(text))) < min_stop_words,
    }
    return next((name for name, broken in rules.items() if broken), None)
    ### END SOLUTION


def c4_clean(
    text: str, min_num_sentences: int = 5, min_words_per_line: int = 3, max_word_length: int = 1000
) -> tuple[str, str | None]:
    """The lines of a page that C4 keeps, or why it drops the whole page. (Exercise)

    Size: 30 minutes, difficulty 2, core.

    Args:
        text: The page.
        min_num_sentences: Fewest sentences in all lines that are kept.
        min_words_per_line: Fewest tokens (``split()``) of a line.
        max_word_length: Most characters of a token; a line with a longer one is dropped.

    Returns:
        The text, and the reason why the page was dropped; one of the two is always empty or None.

        1. "lorem ipsum" anywhere, in any case: ``("", "lorem_ipsum")``; "{" anywhere: ``("", "curly_bracket")``.
        2. A line (``splitlines()``, stripped) is kept if no token is too long, it has enough tokens, it ends with one
           of ``. ? ! "`` and not with "...", and it holds none of ``BANNED``, in any case.
        3. Sentences of a line: runs of ``.?!``, then any number of ``"')]``, before white space or the end of the
           line; at least 1. Too few in all: ``("", "too_few_sentences")``.
        4. Else the lines, joined by newlines, and None.

    Source: Raffel and others (arXiv:1910.10683), section 2.2.
    """
    ### BEGIN SOLUTION
    if "lorem ipsum" in text.lower():
        return "", "lorem_ipsum"
    if "{" in text:
        return "", "curly_bracket"
    lines = [
        line
        for line in map(str.strip, text.splitlines())
        if line.endswith((".", "?", "!", '"')) and not line.endswith("...")
        if len(line.split()) >= min_words_per_line and max(map(len, line.split())) <= max_word_length
        if not any(phrase in line.lower() for phrase in pages.BANNED)
    ]
    if sum(max(1, len(_SENTENCE_END.findall(line))) for line in lines) < min_num_sentences:
        return "", "too_few_sentences"
    return "\n".join(lines), None
    ### END SOLUTION


### BEGIN SOLUTION
_SENTENCE_END = re.compile(r"""[.?!]+["')\]]*(?=\s|$)""")
### END SOLUTION


def mask_pii(text: str) -> tuple[str, dict[str, int]]:
    """A text with masks in place of e-mail addresses, IPv4 addresses and phone numbers. (Exercise)

    Size: 45 minutes, difficulty 3, core.

    Args:
        text: The document. "Letter" and "digit" below are ASCII ones.

    Returns:
        The masked text, and how many of each were masked: "email", "ip", "phone".
        Rounds of 1, 2 and 3 in this order, until one changes nothing: masking twice changes nothing more.

        1. ``|||EMAIL_ADDRESS|||``: a local part of letters, digits and ``_%+-`` in pieces joined by single dots, after
           none of these characters and no dot; ``@``; two or more labels, joined by dots, of letters, digits and inner
           hyphens, the last of two or more letters; not before a letter, a digit, a hyphen, or a dot and a letter or
           digit.
        2. ``|||IP_ADDRESS|||``: four numbers from 0 to 255 without leading zeros, joined by dots; no letter, digit or
           dot before; no letter, no digit, and no dot with a digit after.
        3. ``|||PHONE_NUMBER|||``: perhaps 1 or +1; 3 digits, perhaps in parentheses; 3 digits; 4 digits; between two
           parts nothing or one space, dot or hyphen; no letter, digit, dot or hyphen before; no letter, no digit, and
           no dot or hyphen with a digit after.

    Convention: patterns find what looks like personal data; names need a model, and a version number may look like an
    address.
    """
    ### BEGIN SOLUTION
    counts, before = dict.fromkeys(pages.MASKS, 0), None
    while text != before:  # a mask may free its neighbour: "2125550101(212)555-0102"
        before = text
        for kind, mask in pages.MASKS.items():
            text, n = re.subn(_PERSONAL[kind], mask, text)
            counts[kind] += n
    return text, counts
    ### END SOLUTION


### BEGIN SOLUTION
_LOCAL, _LABEL = "[A-Za-z0-9_%+-]+", "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_EMAIL = rf"(?<![A-Za-z0-9_%+.-]){_LOCAL}(?:\.{_LOCAL})*@(?:{_LABEL}\.)+[A-Za-z]{{2,}}(?![A-Za-z0-9-]|\.[A-Za-z0-9])"
_IP = rf"(?<![A-Za-z0-9.]){_BYTE}(?:\.{_BYTE}){{3}}(?![A-Za-z0-9]|\.[0-9])"
_DIGITS = r"(?:\([0-9]{3}\)|[0-9]{3})[ .-]?[0-9]{3}[ .-]?[0-9]{4}"
_PHONE = rf"(?<![A-Za-z0-9.-])(?:\+?1[ .-]?)?{_DIGITS}(?![A-Za-z0-9]|[.-][0-9])"
_PERSONAL = {"email": _EMAIL, "ip": _IP, "phone": _PHONE}
### END SOLUTION


def normalize(text: str) -> list[str]:
    """The words of a text, without what two copies of it often differ in: case, accents, punctuation. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        text: Any text.

    Returns:
        In this order: lower case; Unicode's form NFKD, which takes accents off their letters; combining marks (general
        categories Mn, Mc and Me) removed; every character that is not alphanumeric a space; split.
    """
    ### BEGIN SOLUTION
    text = text.lower()
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in decomposed if not unicodedata.category(c).startswith("M"))
    return re.findall(r"[^\W_]+", text)
    ### END SOLUTION


def deduplicate_lines(documents: Texts, keep: str = "none") -> list[str]:
    """The documents without lines that occur more than once. (Exercise)

    Size: 25 minutes, difficulty 2, core.

    Args:
        documents: Texts. Two lines (``splitlines``) are the same if they are equal once both are stripped.
        keep: "none" drops every occurrence of a line that occurs more than once in all documents together; "first"
            keeps its first one.

    Returns:
        One text a document. Blank lines stay, and a line keeps its own end. A document may become empty.

    Raises:
        ValueError: another ``keep``; the message shows it.

    Cost: a hash a line is kept, and no line.
    """
    ### BEGIN SOLUTION
    if keep not in ("none", "first"):
        raise ValueError(f"keep = {keep!r}: expected 'none' or 'first'")
    counts = Counter(text_hash(line.strip()) for text in documents for line in text.splitlines())
    seen: set[int] = set()

    def stays(line: str) -> bool:
        mark = text_hash(line.strip())
        first = mark not in seen
        seen.add(mark)
        return not line.strip() or counts[mark] == 1 or (keep == "first" and first)

    return ["".join(filter(stays, text.splitlines(keepends=True))) for text in documents]
    ### END SOLUTION


### BEGIN SOLUTION
def _shingles(text: str, n: int) -> set[str]:
    words = normalize(text)
    return set(word_grams(words, min(n, len(words)))) if words else set()


### END SOLUTION


def minhash_signature(
    text: str, n_hashes: int = 128, ngrams: int = 5, seed: int = 0
) -> UInt64[np.ndarray, " n_hashes"]:
    """A few numbers whose agreement estimates how many shingles two texts share. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        text: The document.
        n_hashes: Values in the signature.
        ngrams: Neighbouring words of ``normalize(text)`` in a shingle, joined by a space.
        seed: Seed of the random functions.

    Returns:
        Value i is the least ``(a_i h + b_i) mod PRIME`` over the set of shingles, where h is ``text_hash(shingle, 4)``.
        With ``rng = numpy.random.default_rng(seed)``, ``a = rng.integers(1, 2**32, n_hashes, dtype=uint64)`` and then
        ``b = rng.integers(0, 2**32, n_hashes, dtype=uint64)``; no product overflows.
        A text of fewer words than ``ngrams`` has one shingle, all its words; one without words has PRIME everywhere.

    Cost: memory for some thousand shingles times ``n_hashes``, however long the text.

    Source: Broder (1997), "On the resemblance and containment of documents".
    """
    ### BEGIN SOLUTION
    rng = np.random.default_rng(seed)
    a = rng.integers(1, 2**32, n_hashes, dtype=np.uint64)
    b = rng.integers(0, 2**32, n_hashes, dtype=np.uint64)
    h = np.array([text_hash(shingle, 4) for shingle in _shingles(text, ngrams)], np.uint64)[:, None]
    prime, least = np.uint64(PRIME), np.full(n_hashes, PRIME, np.uint64)
    for start in range(0, len(h), 256):  # parts that stay in the cache
        values = h[start : start + 256] * a + b
        values -= values // prime * prime  # NumPy divides by a constant faster than it takes %
        np.minimum(least, values.min(0), out=least)
    return least
    ### END SOLUTION


def near_duplicates(
    documents: Texts, threshold: float = 0.8, n_hashes: int = 128, n_bands: int = 16, ngrams: int = 5, seed: int = 0
) -> list[list[int]]:
    """Clusters of documents that share most of their shingles, without comparing all pairs. (Exercise)

    Size: 50 minutes, difficulty 4, core.

    Args:
        documents: Texts.
        threshold: Least Jaccard similarity of two linked documents: shingles in both over shingles in either.
        n_hashes: Values in a signature.
        n_bands: Equal parts into which a signature is cut, each of ``n_hashes / n_bands`` consecutive values.
        ngrams: Words in a shingle.
        seed: Seed of the signatures.

    Returns:
        Clusters of two or more indices, ascending, sorted by their first.
        Two documents whose signatures agree in a whole band are compared, and linked if the similarity of their sets
        of shingles (not its estimate) is at least the threshold. A cluster is all that links connect.
        A document without words is in none.

    Raises:
        ValueError: ``n_hashes`` is no multiple of ``n_bands``; the message names both.

    Cost: documents that are in one cluster already are not compared, so 900 copies cost 899 comparisons; no pair is
    compared twice. Compare with ``parts.jaccard``, so that comparisons can be counted.

    Source: Indyk and Motwani (1998); Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3.
    """
    ### BEGIN SOLUTION
    if n_hashes % n_bands:
        raise ValueError(f"n_hashes = {n_hashes} is no multiple of n_bands = {n_bands}")
    shingles = functools.lru_cache(4096)(lambda i: _shingles(documents[i], ngrams))

    similarity = functools.cache(lambda i, j: parts.jaccard(shingles(i), shingles(j)))
    clusters = parts.Clusters(len(documents))
    for bucket in _buckets(documents, n_hashes, n_bands, ngrams, seed):
        while len(set(map(clusters.find, bucket))) > 1:
            i, *bucket = bucket
            for j in bucket:
                if clusters.find(i) != clusters.find(j) and similarity(i, j) >= threshold:
                    clusters.link(i, j)
    return clusters.lists()
    ### END SOLUTION


### BEGIN SOLUTION
def _buckets(documents: Texts, n_hashes: int, n_bands: int, ngrams: int, seed: int) -> Iterable[list[int]]:
    """Documents whose signatures agree in a whole band."""
    buckets = defaultdict(list)
    for i, text in enumerate(documents):
        signature = minhash_signature(text, n_hashes, ngrams, seed)
        if signature[0] < PRIME:
            for band, values in enumerate(signature.reshape(n_bands, -1)):
                buckets[band, values.tobytes()].append(i)
    return buckets.values()


### END SOLUTION


def contaminated_spans(documents: Iterable[str], evaluation: Iterable[str], n: int = 13) -> list[list[tuple[int, int]]]:
    """The parts of each document that an evaluation text holds, too. (Exercise)

    Size: 25 minutes, difficulty 2, core.

    Args:
        documents: Texts to train on.
        evaluation: Texts of an evaluation, read once. A text of fewer than n words has no n-gram, and none runs across
            two texts.
        n: Words in an n-gram.

    Returns:
        For each document the spans ``(start, end)``, end excluded, in words of ``normalize``, that are covered by
        n-grams of an evaluation text; overlapping and touching ones are merged.

    Cost: a hash for each n-gram of the evaluation is kept, and no text.

    Source: Brown and others (arXiv:2005.14165), appendix C, with n from 8 to 13.
    """
    ### BEGIN SOLUTION
    known = {text_hash(gram) for text in evaluation for gram in word_grams(normalize(text), n)}
    found = []
    for text in documents:
        words = normalize(text)
        covered = np.zeros(len(words) + 2, np.int8)
        for i, gram in enumerate(word_grams(words, n)):
            if text_hash(gram) in known:
                covered[i + 1 : i + n + 1] = 1
        edges = np.flatnonzero(np.diff(covered)).tolist()
        found.append(list(zip(edges[::2], edges[1::2], strict=True)))
    return found
    ### END SOLUTION


class QualityClassifier(parts.TextClassifier):
    """fastText's idea: the mean of the rows that a text's words and pairs of words choose from a table. (Exercise)

    Size: 45 minutes, difficulty 3, core.

    Args:
        labels: Names of the classes.
        n_features: Rows of the table; several n-grams may share one.
        ngrams: Most words in a feature.

    Attributes:
        weight: Parameter ``[n_features, len(labels)]``, zeros at first.
        bias: Parameter ``[len(labels)]``, zeros at first.

    Source: Joulin and others (arXiv:1607.01759), without the hidden layer, and with a hash of this chapter.
    """

    def features(self, text: str) -> Int64[Tensor, " n"]:
        """The row of each feature: all words of ``normalize(text)``, then all pairs of neighbours, up to ``ngrams``.

        In order, with repetitions; ``text_hash`` of the words joined by a space, modulo ``n_features``.
        """
        ### BEGIN SOLUTION
        words = normalize(text)
        grams = [gram for n in range(1, self.ngrams + 1) for gram in word_grams(words, n)]
        return torch.tensor([text_hash(gram) % self.n_features for gram in grams], dtype=torch.int64)
        ### END SOLUTION

    def forward(self, texts: Texts) -> Float[Tensor, "n labels"]:
        """The logits: the mean of the features' rows, or 0 without features, plus the bias."""
        ### BEGIN SOLUTION
        return self._logits([self.features(text) for text in texts])

    def _logits(self, features: list[Tensor]) -> Tensor:
        starts = torch.tensor([0, *accumulate(map(len, features))][:-1], dtype=torch.int64)
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *features])
        device = self.weight.device
        return embedding_bag(rows.to(device), self.weight, starts.to(device), mode="mean") + self.bias
        ### END SOLUTION

    def fit(self, texts: Texts, labels: Texts, steps: int = 100, lr: float = 0.1) -> float:
        """Train on all texts in every step, with chapter 7's ``cross_entropy`` and ``AdamW`` without decay.

        Returns:
            The loss of the last step, computed before its update.

        Raises:
            ValueError: a label that is not one of ``self.labels``; the message shows it.
        """
        ### BEGIN SOLUTION
        targets = self.targets(labels)
        features = [self.features(text) for text in texts]
        optimizer = AdamW(self.parameters(), lr=lr, weight_decay=0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = cross_entropy(self._logits(features), targets)
            loss.backward()
            optimizer.step()
        return loss.item()
        ### END SOLUTION


def plan_mixture(
    sizes: Sizes, budget: float, weights: Sizes | None = None, temperature: float = 1.0, max_epochs: float = 4.0
) -> dict[str, float]:
    """How many tokens to take from each source, none of them too often. (Exercise)

    Size: 35 minutes, difficulty 3, core.

    Args:
        sizes: Tokens of each source.
        budget: Tokens to train on.
        weights: Weight of each source; None takes the sizes.
        temperature: 1 is in proportion to the weights, infinity uniform.
        max_epochs: Most times that a source is read.

    Returns:
        Tokens from each source, in the order of ``sizes``; floats that sum to the budget.
        They are in proportion to ``weights ** (1 / temperature)``, but none is above ``max_epochs`` times its size.
        What a cap cuts off goes to the sources below theirs, in the same proportions, again until none is above.
        A source of weight 0 gets nothing, at any temperature.

    Raises:
        ValueError: a budget above ``max_epochs`` times the sizes of all sources with weight; the message names it.
        ValueError: the names in ``weights`` are not those in ``sizes``; the message shows the ones that differ.
        ValueError: a negative weight, which the message shows, or a ``temperature`` that is not above 0.

    Source: Muennighoff and others (arXiv:2305.16264), four epochs; Chung and others (arXiv:2304.09151), the caps.
    """
    ### BEGIN SOLUTION
    weights = sizes if weights is None else weights
    parts.check_mixture(sizes, budget, weights, temperature, max_epochs)
    taken = dict.fromkeys(sizes, 0.0)
    open_, left = [name for name in sizes if weights[name] > 0], float(budget)
    while open_:
        largest = max(weights[name] for name in open_)
        powers = {name: (weights[name] / largest) ** (1 / temperature) for name in open_}
        shares = {name: left * power / sum(powers.values()) for name, power in powers.items()}
        capped = {name for name in open_ if shares[name] > max_epochs * sizes[name]}
        if not capped:
            return taken | shares
        taken |= {name: float(max_epochs * sizes[name]) for name in capped}
        left -= sum(taken[name] for name in capped)
        open_ = [name for name in open_ if name not in capped]
    return taken
    ### END SOLUTION


def pack_documents(lengths: Sequence[int], row_length: int) -> list[list[tuple[int, int, int]]]:
    """Rows filled by best-fit decreasing: no document is cut without need, and little room is left. (Exercise)

    Size: 35 minutes, difficulty 3, core.

    Args:
        lengths: Tokens of each document.
        row_length: Tokens in a row.

    Returns:
        The pieces ``(document, start, end)`` of each row, in the order in which they were placed.
        Each document is cut into pieces of ``row_length``, the last one shorter; an empty one has none.
        From the longest piece to the shortest (of equals the earlier document, then the earlier start), each goes to
        the row with the least room that is enough (of equals the lowest), else to a new row.

    Cost: 60,000 documents within 8 s, so no search through all rows.

    Source: Ding and others (arXiv:2404.10830).
    """
    ### BEGIN SOLUTION
    pieces = [(i, j, min(n - j, row_length)) for i, n in enumerate(lengths) for j in range(0, n, row_length)]
    rows: list[list[tuple[int, int, int]]] = []
    rooms: list[tuple[int, int]] = []  # (room, row) of all rows that are not full, ascending
    for document, start, length in sorted(pieces, key=lambda piece: -piece[2]):
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            rooms.append((row_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(place)
        rows[row].append((document, start, start + length))
        if room > length:
            insort(rooms, (room - length, row))
    return rows
    ### END SOLUTION


def write_shards(
    folder: Folder, documents: Iterable[Sequence[int]], shard_tokens: int, vocab_size: int, end_id: int
) -> dict:
    """Write documents as one row of tokens that is cut into files, and a manifest that describes them. (Exercise)

    Size: 40 minutes, difficulty 3, core.

    Args:
        folder: Where to write; created if it is missing.
        documents: Ids of each document, in any iterable; read once.
        shard_tokens: Tokens in a file; the last one may have fewer.
        vocab_size: Number of ids.
        end_id: Id that is written after each document.

    Returns:
        The manifest, which is also in ``manifest.json``: "dtype", "vocab_size", "end_id", "documents", "tokens", and
        "shards", a list of "name", "tokens" and "sha256" (of the file, in hexadecimal digits).
        The files are ``shard_00000.bin`` and so on: little-endian, of dtype "uint16" up to a vocabulary of 65,536, else
        "uint32". The row does not end where a file ends.
        Old shards that are not written anew may stay: only those that the manifest names count.
        An old manifest is removed first; the new one is written last, and atomically: whoever sees it sees all shards.

    Raises:
        ValueError: an id that is not from 0 to ``vocab_size - 1``; the message shows it.

    Cost: one shard in memory, however long the row or a document.
    """
    ### BEGIN SOLUTION
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    width, waiting, n_documents = 2 if vocab_size <= 2**16 else 4, bytearray(), 0
    files: list[dict] = []
    for document in documents:
        n_documents += 1
        pieces = (document[i : i + shard_tokens] for i in range(0, len(document), shard_tokens))
        for piece in chain(pieces, [[end_id]]):
            waiting += shards.checked_ids(piece, vocab_size).astype(f"<u{width}").tobytes()
            if len(waiting) >= shard_tokens * width:
                files.append(shards.save_shard(folder, len(files), waiting[: shard_tokens * width], width))
                del waiting[: shard_tokens * width]
    if waiting:
        files.append(shards.save_shard(folder, len(files), waiting, width))
    manifest = {"dtype": f"uint{8 * width}", "vocab_size": vocab_size, "end_id": end_id, "documents": n_documents}
    manifest |= {"tokens": sum(file["tokens"] for file in files), "shards": files}
    return shards.save_manifest(folder, manifest)
    ### END SOLUTION


def shuffled_index(i: int, n: int, seed: int, epoch: int = 0) -> int:
    """Place i of a shuffled order of n things, without a table of the order. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        i: Place, from 0 to n - 1.
        n: Number of things.
        seed: Seed of the order.
        epoch: Each epoch has an order of its own.

    Returns:
        A number from 0 to n - 1, a different one for each i.
        k is the least whole number, at least 1, with ``4**k >= n``. A number of 2k bits is ``left * 2**k + right``.
        Four rounds r = 0, 1, 2, 3 replace ``left, right`` by ``right, left ^ f``, where f is
        ``text_hash(f"{seed},{epoch},{r},{right}") % 2**k``.
        While the result is not below n, the rounds run on it again.

    Raises:
        ValueError: ``i`` is not from 0 to n - 1.

    Source: Luby and Rackoff (1988): four rounds of Feistel's network; Black and Rogaway (2002): walking the cycle.
    """
    ### BEGIN SOLUTION
    if not 0 <= i < n:
        raise ValueError(f"i = {i} is not from 0 to n - 1 = {n - 1}")
    k = max(1, ((n - 1).bit_length() + 1) // 2)
    while True:
        left, right = i >> k, i & (2**k - 1)
        for r in range(4):
            left, right = right, left ^ text_hash(f"{seed},{epoch},{r},{right}") % 2**k
        i = left << k | right
        if i < n:
            return i
    ### END SOLUTION


class ShardReader(shards.TokenWindows):
    """An endless iterator of inputs and targets over the row of tokens in a folder of shards. (Exercise)

    Size: 50 minutes, difficulty 4, core.

    It is chapter 7's ``TokenBatches`` for a row that is in files: the same windows, shift, ranks and epochs.
    With a seed, place p of epoch e is window ``shuffled_index(p, n_windows, seed, e)``.
    ``state_dict`` and ``load_state_dict`` are inherited: ``TokenWindows`` of ``shards``, which is given, has them.

    Args:
        folder: What ``write_shards`` wrote.
        batch: Windows B in a batch of one rank.
        length: Tokens T in a window. Window i has the inputs ``row[i * length : (i + 1) * length]`` of the whole row.
        rank: Index of this rank.
        world_size: Number of ranks that share the row.
        seed: Seed of the shuffles, the same on all ranks; None keeps the order.

    Attributes:
        n_windows: Windows in an epoch, ``(tokens - 1) // length``.
        epoch: Epochs finished by all ranks together: 0 until ``n_windows`` windows have been returned.

    Raises:
        FileNotFoundError: there is no ``manifest.json``.
        ValueError: a shard is missing or has another size than the manifest says; the message names it.
        ValueError: there are fewer than ``world_size * batch * length + 1`` tokens; the message has their number.
        ValueError: ``rank`` is not from 0 to ``world_size - 1``; the message names it.
        ValueError: a loaded state of another ``length``, ``seed`` or manifest; the message names which.

    Cost: files are mapped into memory, and only the tokens of a batch are read.
    """

    def __init__(
        self, folder: Folder, batch: int, length: int, rank: int = 0, world_size: int = 1, seed: int | None = None
    ):
        ### BEGIN SOLUTION
        manifest, self.shards = shards.open_shards(folder)
        super().__init__(manifest["tokens"], batch, length, rank, world_size, seed, shards.manifest_mark(manifest))
        self.ends = list(accumulate(map(len, self.shards)))
        ### END SOLUTION

    def __next__(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """This rank's next inputs and targets: int64 ``[B, T]`` each, contiguous."""
        ### BEGIN SOLUTION
        rows = torch.from_numpy(np.stack([self._window(*place) for place in self.next_places()]))
        return rows[:, :-1].clone(), rows[:, 1:].clone()

    def _window(self, epoch: int, place: int) -> np.ndarray:
        i = place if self.seed is None else shuffled_index(place, self.n_windows, self.seed, epoch)
        start, stop, found = i * self.length, (i + 1) * self.length + 1, []
        while start < stop:
            shard = bisect_right(self.ends, start)
            offset = start - self.ends[shard] + len(self.shards[shard])
            found.append(self.shards[shard][offset : offset + stop - start])
            start += len(found[-1])
        return np.concatenate(found).astype(np.int64)
        ### END SOLUTION
