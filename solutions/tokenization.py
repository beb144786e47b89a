"""Text to numbers and back: a table of words, byte-pair encoding, and the embedding of the numbers."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, tee

import regex
import torch
from jaxtyping import Float, Integer
from torch import Tensor

# GPT-2's pre-tokenization: contractions, words, numbers and punctuation each keep the one space before them.
PRE_TOKEN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

Symbols = tuple[bytes, ...]
Pair = tuple[bytes, bytes]


class WordTokenizer:
    """A table of words, each with a number. (Exercise)

    Size: 15 minutes, difficulty 1, warm-up.

    Words are separated by white space and put in lower case. The table begins with the words of a text, in sorted
    order. ``encode`` gives a word that it has never seen the next free id, and remembers it. ``decode`` joins the words
    of the ids with spaces.

    Args:
        text: The text with the first words; the id of each word is its position in their sorted order, from 0.

    Raises:
        KeyError: ``decode`` is given an id that no word has; the error names the id.

    Convention: the table is open. Other tokenizers turn an unknown word into ``<unk>``; this one gives it the next id.

    Source: the word tables of early neural language models, which were closed.
    """

    def __init__(self, text: str):
        ### BEGIN SOLUTION
        words = sorted(set(text.lower().split()))
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))
        ### END SOLUTION

    def encode(self, text: str) -> list[int]:
        """The id of each word; a word never seen before gets the next free id, and keeps it."""
        ### BEGIN SOLUTION
        ids = []
        for word in text.lower().split():
            i = self.ids.setdefault(word, len(self.ids))
            self.words[i] = word
            ids.append(i)
        return ids
        ### END SOLUTION

    def decode(self, ids: Iterable[int]) -> str:
        """The words of the ids, with one space between them.

        Raises:
            KeyError: an id that no word has; it names the id.
        """
        ### BEGIN SOLUTION
        return " ".join(self.words[i] for i in ids)
        ### END SOLUTION


def count_pairs(word_counts: Mapping[Symbols, int]) -> Counter[Pair]:
    """How often each pair of neighbouring symbols occurs in a text. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        word_counts: Each distinct word, as a tuple of its symbols, with the number of times that the text has it.

    Returns:
        The count of each pair over the whole text: a word that occurs n times counts n times.

    Convention: positions are counted, so ``aaa`` contains the pair ``(a, a)`` twice, although only one can be merged.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``get_stats``.
    """
    ### BEGIN SOLUTION
    pairs: Counter[Pair] = Counter()
    for symbols, count in word_counts.items():
        for pair in pairwise(symbols):
            pairs[pair] += count
    return pairs
    ### END SOLUTION


def merge_pair(symbols: Sequence[bytes], pair: Pair) -> Symbols:
    """Join every occurrence of a pair into one symbol. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        symbols: The symbols of one word.
        pair: The two neighbours to join.

    Returns:
        The word with its new symbols, as a tuple; ``symbols`` itself is not changed.

    Convention: left to right without overlap, so ``(a, a)`` turns ``aaa`` into ``aa a``.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``merge_vocab``.
    """
    ### BEGIN SOLUTION
    left, right = pair
    merged: list[bytes] = []
    at = 0
    while at < len(symbols):
        if symbols[at] == left and at + 1 < len(symbols) and symbols[at + 1] == right:
            merged.append(left + right)
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return tuple(merged)
    ### END SOLUTION


### BEGIN SOLUTION
def _special_pattern(special_tokens: Sequence[str]) -> regex.Pattern:
    """A pattern that splits a text at its special tokens and keeps them; it tries the longest first."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.compile("(" + ("|".join(map(regex.escape, longest_first)) or "(?!)") + ")")


def _bytes_of(word: str) -> list[bytes]:
    return [bytes([byte]) for byte in word.encode()]


class _LargestFirst(tuple):
    """An entry of a heap whose largest entry comes out first."""

    __slots__ = ()
    __lt__ = tuple.__gt__  # type: ignore[assignment]


class _PairIndex:
    """Pair counts that follow the merges: only the words that contain the merged pair are counted again."""

    def __init__(self, word_counts: Mapping[Symbols, int]):
        self.words, self.word_counts = list(word_counts), list(word_counts.values())
        self.counts = count_pairs(word_counts)
        self.words_with = defaultdict(set)
        for n, symbols in enumerate(self.words):
            for pair in pairwise(symbols):
                self.words_with[pair].add(n)
        self.heap = [_LargestFirst((count, pair)) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> Pair | None:
        """The pair with the highest count; among equal counts, the greatest. None when every word is one symbol."""
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            if count == self.counts[pair]:
                return pair
            if self.counts[pair]:  # the count has fallen since: the pair goes back to its new place
                heapq.heappush(self.heap, _LargestFirst((self.counts[pair], pair)))
        return None

    def merge(self, pair: Pair) -> None:
        """Join the pair everywhere, and bring the counts up to date."""
        grown: set[Pair] = set()
        for n in self.words_with.pop(pair):
            before, count = self.words[n], self.word_counts[n]
            self.words[n] = after = merge_pair(before, pair)
            for old in pairwise(before):
                self.counts[old] -= count
            for new in pairwise(after):
                self.counts[new] += count
                self.words_with[new].add(n)
            grown.update(pairwise(after))
        for new in grown:
            heapq.heappush(self.heap, _LargestFirst((self.counts[new], new)))


### END SOLUTION


def train_bpe(text: str, vocab_size: int, special_tokens: Sequence[str] = ()) -> tuple[dict[int, bytes], list[Pair]]:
    """Learn a vocabulary by joining the most frequent pair, again and again. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    The text is cut at its special tokens, and what is between them is cut into words by ``PRE_TOKEN``. Pairs are
    counted inside words. After a merge the pair counts are updated, not counted again: a merge visits only the words
    that it changes. Finding the best pair may look at all pairs.

    Args:
        text: The text to learn from.
        vocab_size: Size of the vocabulary at the end: 256 bytes, the special tokens and the merges. Training stops
            earlier when no pair is left.
        special_tokens: Strings that are never cut; where several begin at the same place, the longest wins. No
            pair is counted inside of one or across one.

    Returns:
        The vocabulary (id to bytes) and the merges, in the order in which they were made.

    Raises:
        ValueError: ``vocab_size`` has no room for the 256 bytes and the special tokens; the error names
            ``vocab_size`` and the smallest size that would do (256 plus the number of special tokens).

    Convention: ids 0 to 255 are the bytes, then come the merges in order, then the special tokens as given (GPT-2's
    order; others put special tokens first). If several pairs have the highest count, the lexicographically greatest is
    merged.

    Source: Sennrich et al. (arXiv:1508.07909), section 3.2; on bytes: GPT-2 (Radford et al. 2019), section 2.2.
    """
    ### BEGIN SOLUTION
    n_merges = vocab_size - 256 - len(special_tokens)
    if n_merges < 0:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes + {len(special_tokens)} special tokens "
            f"= {256 + len(special_tokens)}"
        )
    pieces = _special_pattern(special_tokens).split(text)[::2]
    word_counts = Counter(chain.from_iterable(map(PRE_TOKEN.findall, pieces)))
    index = _PairIndex({tuple(_bytes_of(word)): count for word, count in word_counts.items()})
    merges: list[Pair] = []
    while len(merges) < n_merges and (pair := index.most_frequent()):
        merges.append(pair)
        index.merge(pair)
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [left + right for left, right in merges]
    tokens += [token.encode() for token in special_tokens]
    return dict(enumerate(tokens)), merges
    ### END SOLUTION


### BEGIN SOLUTION
class _WordIds(dict):
    """The ids of recent words; a word that is not in here yet is merged when it is looked up."""

    def __init__(self, ids: Mapping[bytes, int], ranks: Mapping[Pair, int], max_words: int):
        super().__init__()
        self.ids, self.ranks, self.max_words = ids, ranks, max_words
        self.merges = list(ranks)

    def __missing__(self, word: str) -> list[int]:
        symbols: Sequence[bytes] = _bytes_of(word)
        while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
            symbols = merge_pair(symbols, self.merges[min(known)])
        if len(self) >= self.max_words:
            self.clear()
        self[word] = ids = [self.ids[symbol] for symbol in symbols]
        return ids


def _settled(text: str, special: regex.Pattern, longest: int) -> Iterator[tuple[str, int, bool]]:
    """The pieces of a text (piece, where it ends, whether it is a special token) that no continuation can change.

    A special token may begin in the last ``longest - 1`` characters and end beyond the text. Of the words before those
    characters, the last may grow, and the one before it may become a part of it: ``'`` and ``r`` become ``'re``.
    """
    start, open_from = 0, len(text) - max(longest - 1, 0)
    for match in special.finditer(text):
        if match.start() >= open_from:
            break
        yield from _words(text, start, match.start())
        yield match[0], match.end(), True
        start = match.end()
    words, later = tee(_words(text, start, max(start, open_from)))
    yield from (word for word, _ in zip(words, islice(later, 2, None), strict=False))


def _words(text: str, start: int, end: int) -> Iterator[tuple[str, int, bool]]:
    yield from ((match[0], match.end(), False) for match in PRE_TOKEN.finditer(text, start, end))


### END SOLUTION


class BPETokenizer:
    """Byte-pair encoding with a given vocabulary. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    A text is first cut at its special tokens; where several begin at the same place, the longest wins. What is between
    them is cut into words by ``PRE_TOKEN``. Inside a word, the pair that comes first in ``merges`` is joined,
    everywhere in the word, and this is repeated until no pair of the word is a merge. ``encode_iterable`` yields the
    same ids for a text that comes in chunks, wherever it is cut: one by one, and each soon after it is certain.
    ``decode`` turns bytes that are not UTF-8 into U+FFFD.

    Args:
        vocab: Bytes of each id; it is not changed.
        merges: The pairs in the order in which training made them.
        special_tokens: Strings that each become one id. Those that ``vocab`` lacks get the next ids, beginning one
            above the largest.

    Raises:
        KeyError: ``decode`` is given an id that is not in the vocabulary; the error names the id.

    Cost: encoding a new word looks at the word's own pairs, not at all merges. Encoding a word again takes one look
        into a dictionary. The memory of a stream does not grow with the text, so its dictionary of words must be
        bounded. A long word that comes in small chunks takes time in proportion to its length: the text that is held
        back is not scanned again at every chunk.

    Convention: the text is not changed (no lower case, no Unicode normalization, no space put in front), so
    ``decode(encode(text)) == text`` for every text that UTF-8 can hold. A string of Python may also hold half of a
    surrogate pair (U+D800 to U+DFFF); that is no character, and ``encode`` raises ``UnicodeEncodeError`` for it.

    Source: GPT-2 (Radford et al. 2019), section 2.2.
    """

    def __init__(self, vocab: Mapping[int, bytes], merges: Sequence[Pair], special_tokens: Sequence[str] = ()):
        ### BEGIN SOLUTION
        self.vocab = dict(vocab)
        self.ids = {token: i for i, token in self.vocab.items()}
        self.special_tokens = list(special_tokens or ())
        for token in self.special_tokens:
            if token.encode() not in self.ids:
                self.ids[token.encode()] = i = max(self.vocab, default=-1) + 1
                self.vocab[i] = token.encode()
        self._special = _special_pattern(self.special_tokens)
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._word_ids = _WordIds(self.ids, self._ranks, max_words=100_000)
        ### END SOLUTION

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ### BEGIN SOLUTION
        ids: list[int] = []
        for n, piece in enumerate(self._special.split(text)):
            if n % 2:
                ids.append(self.ids[piece.encode()])
            else:
                ids.extend(chain.from_iterable(map(self._word_ids.__getitem__, PRE_TOKEN.findall(piece))))
        return ids
        ### END SOLUTION

    def encode_iterable(self, chunks: Iterable[str]) -> Iterator[int]:
        """The ids of a text that comes in chunks, yielded one by one, each soon after it is certain.

        Wherever the text is cut, the ids are those of ``encode("".join(chunks))``: words, contractions, runs of spaces
        and special tokens may be split between chunks. Memory does not grow with the text: only the end that is not
        certain yet is kept, and a dictionary of words that is bounded.

        Args:
            chunks: Strings of any size, also empty ones: an open file, a list of lines, blocks.
        """
        ### BEGIN SOLUTION
        longest = max(map(len, self.special_tokens), default=0)
        word_ids = _WordIds(self.ids, self._ranks, max_words=2048)  # its own: half a megabyte at most
        buffer, enough = "", 0
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < enough:  # a word that goes on and on is scanned when it has doubled, not at every chunk
                continue
            end = 0
            for token, end, is_special in _settled(buffer, self._special, longest):  # noqa: B007
                yield from [self.ids[token.encode()]] if is_special else word_ids[token]
            buffer = buffer[end:]
            enough = 2 * len(buffer)
        yield from self.encode(buffer)
        ### END SOLUTION

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            KeyError: an id that is not in the vocabulary; it names the id.
        """
        ### BEGIN SOLUTION
        return b"".join(self.vocab[i] for i in ids).decode(errors="replace")
        ### END SOLUTION


def embed(ids: Integer[Tensor, "..."], weight: Float[Tensor, "v c"]) -> Float[Tensor, "... c"]:
    """The vectors of tokens, as a product of one-hot rows with the table. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        ids: Token ids, of any shape and any integer dtype.
        weight: One row of width C for each of the V tokens.

    Returns:
        The rows of ``weight``, in its dtype.
        In the backward pass, row i of the gradient of ``weight`` is the sum of the
        output's gradients over all places with token i.

    Source: this chapter's last section; ``torch.nn.functional.embedding`` returns the same without the product.
    """
    ### BEGIN SOLUTION
    one_hot = torch.nn.functional.one_hot(ids.long(), num_classes=len(weight))
    return one_hot.to(weight.dtype) @ weight
    ### END SOLUTION
