"""Plausible wrong answers of chapter 1, and the misconception behind each."""

from collections import Counter
from itertools import pairwise

import regex
import torch

from lib.workbook.grading import mistake
from solutions import tokenization as reference
from solutions.tokenization import PRE_TOKEN


def _special_pattern(special_tokens):
    """What splits a text at its special tokens, the longest first, and keeps them."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.compile("(" + ("|".join(map(regex.escape, longest_first)) or "(?!)") + ")")


def _bytes_of(word):
    return tuple(bytes([byte]) for byte in word.encode())


# ---- 1.1 WordTokenizer -----------------------------------------------------------------------------------------------


@mistake("WordTokenizer", "the words are numbered in the order of the text, not in sorted order")
class NumberedAsTheyCome(reference.WordTokenizer):
    def __init__(self, text):
        words = list(dict.fromkeys(text.lower().split()))
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))


@mistake("WordTokenizer", "the words keep the order of a set, which differs from run to run: they are not sorted")
class NumberedAsInASet(reference.WordTokenizer):
    def __init__(self, text):
        words = list(set(text.lower().split()))
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))


@mistake("WordTokenizer", "every new word gets the same id: the table does not remember the first")
class ForgetsNewWords(reference.WordTokenizer):
    def encode(self, text):
        return [self.ids.get(word, len(self.ids)) for word in text.lower().split()]


@mistake("WordTokenizer", "a new word gets an id, but decode does not learn which word that is")
class DecodesFirstWordsOnly(reference.WordTokenizer):
    def encode(self, text):
        return [self.ids.setdefault(word, len(self.ids)) for word in text.lower().split()]


@mistake("WordTokenizer", "The and the are two different words: the text is not put in lower case")
class KeepsCase(reference.WordTokenizer):
    def __init__(self, text):
        words = sorted(set(text.split()))
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))

    def encode(self, text):
        ids = []
        for word in text.split():
            ids.append(self.ids.setdefault(word, len(self.ids)))
            self.words[ids[-1]] = word
        return ids


@mistake("WordTokenizer", "the text is put in lower case in one place but not in the other")
class LowersOnce(reference.WordTokenizer):
    def encode(self, text):
        ids = []
        for word in text.split():
            ids.append(self.ids.setdefault(word, len(self.ids)))
            self.words[ids[-1]] = word
        return ids


@mistake("WordTokenizer", "a new word is put in its sorted place, which changes the ids of other words")
class SortsNewWordsIn(reference.WordTokenizer):
    def encode(self, text):
        words = sorted({*self.ids, *text.lower().split()})
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))
        return [self.ids[word] for word in text.lower().split()]


@mistake("WordTokenizer", "words are looked up in a list, where id -1 is the last word")
class ListOfWords(reference.WordTokenizer):
    def decode(self, ids):
        words = list(self.ids)
        try:
            return " ".join(words[i] for i in ids)
        except IndexError as error:
            raise KeyError(max(ids)) from error


@mistake("WordTokenizer", "the text is cut at single spaces only, not at all white space")
class CutAtSpaces(reference.WordTokenizer):
    def encode(self, text):
        ids = []
        for word in text.lower().split(" "):
            ids.append(self.ids.setdefault(word, len(self.ids)))
            self.words[ids[-1]] = word
        return ids


# ---- 1.2 count_pairs -------------------------------------------------------------------------------------------------


@mistake("count_pairs", "each distinct word counts once, however often the text has it")
def unweighted(word_counts):
    return Counter(pair for symbols in word_counts for pair in pairwise(symbols))


@mistake("count_pairs", "a pair counts only once per word, even if the word has it twice")
def once_a_word(word_counts):
    pairs = Counter()
    for symbols, count in word_counts.items():
        for pair in set(pairwise(symbols)):
            pairs[pair] += count
    return pairs


@mistake("count_pairs", "pairs reach from the end of one word to the start of the next")
def across_words(word_counts):
    pairs = reference.count_pairs(word_counts)
    for left, right in pairwise(symbols for symbols in word_counts if symbols):
        pairs[left[-1], right[0]] += 1
    return pairs


@mistake("count_pairs", "(a, b) and (b, a) are counted as one pair")
def without_order(word_counts):
    pairs = Counter()
    for (left, right), count in reference.count_pairs(word_counts).items():
        pairs[min(left, right), max(left, right)] += count
    return pairs


@mistake("count_pairs", "occurrences that overlap are skipped: positions are counted, not merges")
def without_overlap(word_counts):
    pairs = Counter()
    for symbols, count in word_counts.items():
        last = {}
        for at, pair in enumerate(pairwise(symbols)):
            if last.get(pair) != at - 1:
                pairs[pair] += count
                last[pair] = at
    return pairs


@mistake("count_pairs", "any two symbols of a word count, not only neighbours")
def all_combinations(word_counts):
    pairs = Counter()
    for symbols, count in word_counts.items():
        for at, left in enumerate(symbols):
            for right in symbols[at + 1 :]:
                pairs[left, right] += count
    return pairs


# ---- 1.3 merge_pair --------------------------------------------------------------------------------------------------


@mistake("merge_pair", "only the first occurrence is merged")
def first_only(symbols, pair):
    for at in range(len(symbols) - 1):
        if (symbols[at], symbols[at + 1]) == tuple(pair):
            return (*symbols[:at], pair[0] + pair[1], *symbols[at + 2 :])
    return tuple(symbols)


@mistake("merge_pair", "merges overlap: a symbol is used by two of them")
def overlapping(symbols, pair):
    merged, used = [], False
    for at, symbol in enumerate(symbols):
        if tuple(symbols[at : at + 2]) == tuple(pair):
            merged.append(pair[0] + pair[1])
            used = True
        elif not used:
            merged.append(symbol)
        else:
            used = False
    return tuple(merged)


@mistake("merge_pair", "merged from right to left")
def right_to_left(symbols, pair):
    turned = reference.merge_pair([s[::-1] for s in reversed(symbols)], (pair[1][::-1], pair[0][::-1]))
    return tuple(s[::-1] for s in reversed(turned))


@mistake("merge_pair", "the last symbol is lost when it is not merged")
def loses_the_last(symbols, pair):
    merged, at = [], 0
    while at < len(symbols) - 1:
        if (symbols[at], symbols[at + 1]) == tuple(pair):
            merged.append(pair[0] + pair[1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return tuple(merged)


@mistake(
    "merge_pair",
    "the second symbol of a merged pair comes again: it is not skipped (in a for loop over a range, i += 1 skips nothing)",
)
def skips_nothing(symbols, pair):
    merged = []
    for i in range(len(symbols)):
        if tuple(symbols[i : i + 2]) == tuple(pair):
            merged.append(pair[0] + pair[1])
            i += 1
        else:
            merged.append(symbols[i])
    return tuple(merged)


@mistake("merge_pair", "the joined bytes of two neighbours are compared, so (ab, c) is taken for (a, bc)")
def by_their_bytes(symbols, pair):
    merged, at = [], 0
    while at < len(symbols):
        if b"".join(symbols[at : at + 2]) == pair[0] + pair[1] and at + 1 < len(symbols):
            merged.append(pair[0] + pair[1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return tuple(merged)


@mistake("merge_pair", "the word is joined with spaces and the pair replaced as text: xa b contains a b, too")
def replaced_in_a_text(symbols, pair):
    if not symbols:
        return ()
    return tuple(b" ".join(symbols).replace(b" ".join(pair), b"".join(pair)).split(b" "))


# ---- 1.4 train_bpe ---------------------------------------------------------------------------------------------------


def _train(
    text,
    vocab_size,
    special_tokens=(),
    *,
    order=lambda count, pair: (count, pair),
    weigh=lambda count: count,
    words_of=PRE_TOKEN.findall,
    split=None,
    specials_first=False,
    floor=256,
):
    """The plain way, with one thing that each mistake changes."""
    n_merges = vocab_size - 256 - len(special_tokens)
    if vocab_size < floor + len(special_tokens):
        raise ValueError(
            f"vocab_size {vocab_size} is less than 256 + {len(special_tokens)} = {256 + len(special_tokens)}"
        )
    pieces = split(text) if split else _special_pattern(special_tokens).split(text)[::2]
    counts = Counter(word for piece in pieces for word in words_of(piece))
    words = {_bytes_of(word): weigh(count) for word, count in counts.items()}
    merges = []
    while len(merges) < n_merges and (pairs := reference.count_pairs(words)):
        best = max(pairs, key=lambda pair: order(pairs[pair], pair))
        merges.append(best)
        words = {reference.merge_pair(symbols, best): count for symbols, count in words.items()}
    tokens = [bytes([b]) for b in range(256)]
    learned, specials = [a + b for a, b in merges], [s.encode() for s in special_tokens]
    return dict(enumerate(specials + tokens + learned if specials_first else tokens + learned + specials)), merges


@mistake("train_bpe", "ties go to the pair that was seen first")
def first_seen_wins(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, order=lambda count, pair: count)


@mistake("train_bpe", "ties go to the smaller pair")
def smaller_wins(text, vocab_size, special_tokens=()):
    class Reversed(tuple):
        __lt__, __gt__ = tuple.__gt__, tuple.__lt__

    return _train(text, vocab_size, special_tokens, order=lambda count, pair: (count, Reversed(pair)))


@mistake("train_bpe", "ties compare the joined bytes, where the pair's first symbols should be compared first")
def joined_bytes_compared(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, order=lambda count, pair: (count, pair[0] + pair[1]))


@mistake("train_bpe", "each distinct word counts once, however often the text has it")
def every_word_once(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, weigh=lambda count: 1)


@mistake("train_bpe", "special tokens are treated as text, and merged")
def special_tokens_merged(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, split=lambda text: [text])


@mistake("train_bpe", "special tokens are deleted, so that pairs go across them")
def special_tokens_deleted(text, vocab_size, special_tokens=()):
    return _train(
        text,
        vocab_size,
        special_tokens,
        split=lambda text: ["".join(_special_pattern(special_tokens).split(text)[::2])],
    )


@mistake("train_bpe", "the shortest special token is tried first, so a longer one that begins with it is never found")
def shortest_cut_out(text, vocab_size, special_tokens=()):
    pattern = "|".join(regex.escape(s) for s in sorted(special_tokens, key=len)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "the special tokens are tried as they were given, not the longest first")
def special_tokens_as_given(text, vocab_size, special_tokens=()):
    pattern = "|".join(map(regex.escape, special_tokens)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "special tokens are put into a pattern without escaping, and there | means or")
def special_tokens_as_patterns(text, vocab_size, special_tokens=()):
    pattern = "|".join(sorted(special_tokens, key=len, reverse=True)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "words are cut at white space, and the space before a word is lost")
def cut_at_white_space(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, words_of=str.split)


@mistake("train_bpe", "the text is not cut into words, so tokens span several words")
def not_cut(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, words_of=lambda piece: [piece])


@mistake("train_bpe", "the special tokens take the first ids, before the bytes")
def special_tokens_first(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, specials_first=True)


@mistake("train_bpe", "the special tokens do not count towards vocab_size")
def special_tokens_for_free(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size + len(special_tokens), special_tokens)


@mistake("train_bpe", "a vocab_size that is too small gives a larger vocabulary instead of an error")
def no_error(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, floor=-1000)


@mistake("train_bpe", "all pairs of all words are counted again after each merge")
def counts_anew(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens)


def _train_by_counts(text, vocab_size, special_tokens, *, is_stale=False, merges_nothing=False):
    """Counts that follow the merges, with one thing that each mistake changes."""
    n_merges = vocab_size - 256 - len(special_tokens)
    if n_merges < 0:
        raise ValueError(f"vocab_size {vocab_size} is less than {256 + len(special_tokens)}")
    pieces = _special_pattern(special_tokens).split(text)[::2]
    found = Counter(word for piece in pieces for word in PRE_TOKEN.findall(piece))
    words = {_bytes_of(word): count for word, count in found.items()}
    pairs, merges = reference.count_pairs(words), []
    while len(merges) < n_merges and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] <= 0 and not merges_nothing:
            break
        merges.append(best)
        after = {symbols: reference.merge_pair(symbols, best) for symbols in words}
        for symbols, count in words.items():
            if after[symbols] != symbols:
                for old in () if is_stale else pairwise(symbols):
                    pairs[old] -= count
                for new in pairwise(after[symbols]):
                    pairs[new] += count if not is_stale or best[0] + best[1] in new else 0
        pairs[best] = 0
        words = {after[symbols]: count for symbols, count in words.items()}
    tokens = [bytes([b]) for b in range(256)] + [a + b for a, b in merges] + [s.encode() for s in special_tokens]
    return dict(enumerate(tokens)), merges


@mistake("train_bpe", "the pairs on both sides of a merge keep the counts that they had before it")
def stale_neighbours(text, vocab_size, special_tokens=()):
    return _train_by_counts(text, vocab_size, special_tokens, is_stale=True)


@mistake("train_bpe", "a pair whose count has fallen to 0 is merged: training should stop when no pair is left")
def merges_at_count_0(text, vocab_size, special_tokens=()):
    return _train_by_counts(text, vocab_size, special_tokens, merges_nothing=True)


class _Index:
    """Hint 3's four tables and its loop, in steps, each of which a mistake may take in its own way."""

    def __init__(self, words):
        self.words, self.word_counts = list(words), list(words.values())
        self.counts, self.holders = self.first_counts(words), {}
        for n, symbols in enumerate(self.words):
            for pair in pairwise(symbols):
                self.holders.setdefault(pair, set()).add(n)

    def first_counts(self, words):
        return reference.count_pairs(words)

    def best(self):
        return max(self.counts, key=lambda pair: (self.counts[pair], pair), default=None)

    def pairs_of(self, symbols):
        return list(pairwise(symbols))

    def times(self, n):
        return self.word_counts[n]

    def add_holder(self, pair, n):
        self.holders.setdefault(pair, set()).add(n)

    def merge(self, best):
        for n in sorted(self.holders.get(best, ())):
            before, self.words[n] = self.words[n], reference.merge_pair(self.words[n], best)
            for pair in self.pairs_of(before):
                self.counts[pair] -= self.times(n)
            for pair in self.pairs_of(self.words[n]):
                self.counts[pair] += self.times(n)
                self.add_holder(pair, n)
        self.counts = Counter({pair: count for pair, count in self.counts.items() if count > 0 and pair != best})


def _train_with(index_of, text, vocab_size, special_tokens):
    n_merges = vocab_size - 256 - len(special_tokens)
    if n_merges < 0:
        raise ValueError(f"vocab_size {vocab_size} is less than {256 + len(special_tokens)}")
    pieces = _special_pattern(special_tokens).split(text)[::2]
    found = Counter(word for piece in pieces for word in PRE_TOKEN.findall(piece))
    index, merges = index_of({_bytes_of(word): count for word, count in found.items()}), []
    while len(merges) < n_merges and (best := index.best()):
        merges.append(best)
        index.merge(best)
    tokens = [bytes([b]) for b in range(256)] + [a + b for a, b in merges] + [s.encode() for s in special_tokens]
    return dict(enumerate(tokens)), merges


@mistake("train_bpe", "ties go to the first pair in the table of counts, in whatever order the updates have put it")
def first_seen_wins_after_updates(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def best(self):
            return max(self.counts, key=self.counts.get, default=None)

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake("train_bpe", "the first counts take each distinct word once; only the updates use how often the text has it")
def counts_words_once_at_first(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def first_counts(self, words):
            return Counter(pair for symbols in words for pair in pairwise(symbols))

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe", "an update subtracts and adds 1 for each word, not the number of times that the text has the word"
)
def updates_by_one(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def times(self, n):
            return 1

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe", "the counts are not updated after a merge, although the pairs on both sides of the merged one change"
)
def counts_of_the_start(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def merge(self, best):
            self.counts.pop(best)

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake("train_bpe", "an update counts a pair once per word, even if the word has it twice")
def updates_distinct_pairs(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def pairs_of(self, symbols):
            return list(dict.fromkeys(pairwise(symbols)))

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe",
    "the words that contain a pair are noted only at the start: a pair that a merge creates has none, so its own merge "
    "changes nothing",
)
def never_notes_new_holders(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def add_holder(self, pair, n):
            pass

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe",
    "a merge replaces the set of words that contain a pair instead of adding to it: words from an earlier merge are lost",
)
def replaces_the_holders(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def merge(self, best):
            fresh, held = {}, self.holders
            self.holders = fresh
            fresh[best] = held.get(best, set())
            super().merge(best)
            self.holders = {**held, **fresh}

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake("train_bpe", "the first word that gets a new pair is noted, the others are not")
def notes_the_first_holder(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def add_holder(self, pair, n):
            self.holders.setdefault(pair, {n})

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe",
    "a new pair is given all words of the merged pair, also those that do not contain it, and its own merge visits them all",
)
def inherits_the_holders(text, vocab_size, special_tokens=()):
    class Index(_Index):
        def merge(self, best):
            self.held = self.holders.get(best, set())
            super().merge(best)

        def add_holder(self, pair, n):
            self.holders[pair] = self.holders.get(pair, set()) | self.held

    return _train_with(Index, text, vocab_size, special_tokens)


@mistake(
    "train_bpe", "words are noted in the form that they had before a merge, and the old forms are counted again later"
)
def counts_old_forms_again(text, vocab_size, special_tokens=()):
    class Index:
        def __init__(self, words):
            self.words, self.counts, self.holders = dict(words), reference.count_pairs(words), {}
            for symbols in self.words:
                for pair in pairwise(symbols):
                    self.holders.setdefault(pair, []).append(symbols)

        def best(self):
            return max(self.counts, key=lambda pair: (self.counts[pair], pair), default=None)

        def merge(self, best):
            for before in self.holders.pop(best, ()):
                after = reference.merge_pair(before, best)
                self.words[after] = count = self.words[before]
                for pair in pairwise(before):
                    self.counts[pair] -= count
                for pair in pairwise(after):
                    self.counts[pair] += count
                    self.holders.setdefault(pair, []).append(after)
            self.counts = Counter({pair: count for pair, count in self.counts.items() if count > 0 and pair != best})

    return _train_with(Index, text, vocab_size, special_tokens)


# ---- 1.5 BPETokenizer ------------------------------------------------------------------------------------------------


class _Tokenizer:
    """A right tokenizer in steps, each of which a mistake may take in its own way."""

    def __init__(self, vocab, merges, special_tokens=()):
        self.right = reference.BPETokenizer(vocab, merges, special_tokens)
        self.vocab, self.merges, self.special_tokens = dict(vocab), list(merges), list(special_tokens)
        for token in self.special_tokens:
            if token.encode() not in self.vocab.values():
                self.vocab[self.next_id()] = token.encode()
        self.ids = {token: i for i, token in self.vocab.items()}
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.special, self.known = self.pattern(), {}

    def next_id(self):
        return max(self.vocab, default=-1) + 1

    def pattern(self):
        return _special_pattern(self.special_tokens)

    def merge_word(self, symbols):
        while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
            symbols = reference.merge_pair(symbols, self.merges[min(known)])
        return symbols

    def ids_of(self, word):
        if word not in self.known:
            self.known[word] = [self.ids[symbol] for symbol in self.merge_word(_bytes_of(word))]
        return self.known[word]

    def words_of(self, piece):
        return PRE_TOKEN.findall(piece)

    def encode(self, text):
        ids = []
        for n, piece in enumerate(self.special.split(text)):
            ids += (
                [self.ids[piece.encode()]] if n % 2 else [i for word in self.words_of(piece) for i in self.ids_of(word)]
            )
        return ids

    def encode_iterable(self, chunks):
        yield from self.right.encode_iterable(chunks)

    def decode(self, ids):
        return self.right.decode(ids)

    n_held = 2  # of the words at the end

    def settled(self, text, longest=None):
        """(token, where it ends, whether it is special) of what no continuation can change."""
        longest = max(map(len, self.special_tokens), default=0) if longest is None else longest
        start, open_from = 0, len(text) - max(longest - 1, 0)
        for match in self.special.finditer(text):
            if match.start() >= open_from:
                break
            yield from ((word[0], word.end(), False) for word in PRE_TOKEN.finditer(text, start, match.start()))
            yield match[0], match.end(), True
            start = match.end()
        words = list(PRE_TOKEN.finditer(text, start, max(start, open_from)))[: -self.n_held]
        yield from ((word[0], word.end(), False) for word in words)

    def stream(self, chunks, waits=True, longest=None, patience=0, is_complete=True):
        """The ids of chunks; what is held is looked at when it has doubled (and ``patience`` more), or at every chunk."""
        buffer, enough = "", patience
        for chunk in chunks:
            buffer += chunk
            if waits and len(buffer) < enough:
                continue
            end = 0
            for token, end, is_special in self.settled(buffer, longest):  # noqa: B007
                yield from [self.ids[token.encode()]] if is_special else self.ids_of_stream(token)
            buffer = buffer[end:]
            enough = patience + 2 * len(buffer)
        yield from self.encode(buffer) if is_complete else ()

    def ids_of_stream(self, word):
        if len(self.known) >= 2000:
            self.known.clear()
        return self.ids_of(word)


@mistake("BPETokenizer", "the longest token that fits is taken from the left; the order of the merges is ignored")
class LongestMatch(_Tokenizer):
    def merge_word(self, symbols):
        word, pieces = b"".join(symbols), []
        while word:
            size = next(n for n in range(len(word), 0, -1) if word[:n] in self.ids)
            pieces.append(word[:size])
            word = word[size:]
        return pieces


@mistake("BPETokenizer", "the leftmost pair that is a merge is joined, whatever its rank")
class LeftmostPair(_Tokenizer):
    def merge_word(self, symbols):
        while pair := next((pair for pair in pairwise(symbols) if pair in self.ranks), None):
            at = list(pairwise(symbols)).index(pair)
            symbols = (*symbols[:at], pair[0] + pair[1], *symbols[at + 2 :])
        return symbols


@mistake("BPETokenizer", "pairs are joined in the order of their ids, not of the merges")
class OrderOfIds(_Tokenizer):
    def merge_word(self, symbols):
        for left, right in sorted(self.merges, key=lambda pair: self.ids[pair[0] + pair[1]]):
            symbols = reference.merge_pair(symbols, (left, right))
        return symbols


@mistake(
    "BPETokenizer", "the list of merges is gone through only once: a pair that a later merge creates is never joined"
)
class GoesThroughTheMergesOnce(_Tokenizer):
    def merge_word(self, symbols):
        for pair in self.merges:
            symbols = reference.merge_pair(symbols, pair)
        return symbols


@mistake("BPETokenizer", "every word goes through the whole list of merges, again and again until none applies")
class GoesThroughAllMerges(_Tokenizer):
    def merge_word(self, symbols):
        before = None
        while symbols != before:
            before = symbols
            for pair in self.merges:
                symbols = reference.merge_pair(symbols, pair)
        return symbols


@mistake("BPETokenizer", "the next id is taken from the length of the vocabulary, not from its largest id")
class NextIdIsTheLength(_Tokenizer):
    def next_id(self):
        return len(self.vocab)


@mistake("BPETokenizer", "pairs are merged across words: the text is not cut by PRE_TOKEN first")
class MergesAcrossWords(_Tokenizer):
    def words_of(self, piece):
        return [piece] if piece else []


@mistake("BPETokenizer", "each token is decoded alone, which breaks characters of several tokens")
class DecodesEachToken(_Tokenizer):
    def decode(self, ids):
        return "".join(self.vocab[i].decode(errors="replace") for i in ids)


@mistake("BPETokenizer", "invalid bytes raise an error, or vanish, instead of becoming U+FFFD")
class IgnoresInvalidBytes(_Tokenizer):
    def decode(self, ids):
        return b"".join(self.vocab[i] for i in ids).decode(errors="ignore")


@mistake("BPETokenizer", "an unknown id is silently left out of the text")
class SkipsUnknownIds(_Tokenizer):
    def decode(self, ids):
        return b"".join(self.vocab.get(i, b"") for i in ids).decode(errors="replace")


@mistake("BPETokenizer", "ids of bytes are taken to be the bytes' values; the vocabulary says what they are")
class BytesAreIds(_Tokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        self.ids |= {bytes([b]): b for b in range(256)}


@mistake("BPETokenizer", "the special tokens are tried as they were given, not the longest first")
class SpecialTokensAsGiven(_Tokenizer):
    def pattern(self):
        return regex.compile("(" + ("|".join(map(regex.escape, self.special_tokens)) or "(?!)") + ")")


class _AsksTheTable(_Tokenizer):
    """Takes a piece for a special token where it is one, and not by its place in the split."""

    def encode(self, text):
        ids = []
        for piece in self.special.split(text):
            is_special = piece in self.special_tokens
            ids += (
                [self.ids[piece.encode()]]
                if is_special
                else [i for w in PRE_TOKEN.findall(piece) for i in self.ids_of(w)]
            )
        return ids


@mistake(
    "BPETokenizer",
    "special tokens are put into the pattern without escaping, and there [SEP] means one of three letters",
)
class SpecialTokensAsPatterns(_AsksTheTable):
    def pattern(self):
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return regex.compile("(" + ("|".join(longest_first) or "(?!)") + ")")


@mistake(
    "BPETokenizer", "without special tokens the pattern is empty, and an empty pattern cuts between all characters"
)
class EmptyPattern(_AsksTheTable):
    def pattern(self):
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")


@mistake("BPETokenizer", "special tokens are encoded like any other text")
class SpecialTokensAsText(_Tokenizer):
    def encode(self, text):
        return [i for word in PRE_TOKEN.findall(text) for i in self.ids_of(word)]


@mistake("BPETokenizer", "special tokens are appended to the vocabulary that was passed in, which changes the caller's")
class ChangesTheGivenVocabulary(_Tokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        vocab.update(self.vocab)


@mistake("BPETokenizer", "each chunk of a stream is encoded alone, so words are cut where the chunks are")
class EncodesEachChunk(_Tokenizer):
    def encode_iterable(self, chunks):
        for chunk in chunks:
            yield from self.encode(chunk)


@mistake("BPETokenizer", "what is left in the buffer after the last chunk is never given")
class DropsTheEnd(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.stream(chunks, is_complete=False)


@mistake("BPETokenizer", "ids wait for a thousand more characters of the stream, although they are certain")
class WaitsTooLong(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.stream(chunks, patience=1000)


@mistake("BPETokenizer", "the whole stream is read and joined before the first id comes out")
class ReadsTheWholeStream(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.encode("".join(chunks))


@mistake("BPETokenizer", "only the last word is held back: a contraction or a run of spaces may join the one before it")
class HoldsOneWordBack(_Tokenizer):
    n_held = 1

    def encode_iterable(self, chunks):
        yield from self.stream(chunks)


@mistake(
    "BPETokenizer", "a special token that is split over two chunks is missed: the end of a chunk is encoded too early"
)
class CutsSpecialTokens(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.stream(chunks, longest=0)


@mistake(
    "BPETokenizer",
    "the certain words are joined and encoded as a text of their own: without what follows, they are cut differently",
)
class EncodesTheJoin(_Tokenizer):
    def encode_iterable(self, chunks):
        buffer, enough = "", 0
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < enough:
                continue
            end = max((end for _, end, _ in self.settled(buffer)), default=0)
            yield from self.right.encode(buffer[:end])
            buffer = buffer[end:]
            enough = 2 * len(buffer)
        yield from self.encode(buffer)


@mistake(
    "BPETokenizer", "the whole buffer is scanned again for every chunk: a long word costs the square of its length"
)
class ScansAgain(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.stream(chunks, waits=False)


@mistake("BPETokenizer", "every word is remembered, even in a stream: the table of words grows with the text")
class KeepsEveryWord(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.stream(chunks)

    def ids_of_stream(self, word):
        return self.ids_of(word)


@mistake("BPETokenizer", "every word is merged again each time it occurs")
class RemembersNothing(_Tokenizer):
    def ids_of(self, word):
        self.known.clear()
        return super().ids_of(word)


# ---- 1.6 embed -------------------------------------------------------------------------------------------------------


@mistake("embed", "the rows are looked up: the values are right, but there is no matrix product")
def looked_up(ids, weight):
    return weight[ids]


@mistake("embed", "the table is detached: the values are right, but no gradient reaches it")
def without_gradient(ids, weight):
    one_hot = torch.nn.functional.one_hot(ids, num_classes=len(weight)).to(weight.dtype)
    return one_hot @ weight.detach()


@mistake("embed", "the one-hot rows are as wide as the largest id, not as the vocabulary")
def width_of_the_largest_id(ids, weight):
    one_hot = torch.nn.functional.one_hot(ids).to(weight.dtype)
    return one_hot @ weight[: one_hot.shape[-1]] if ids.max() < 2 else one_hot @ weight


@mistake("embed", "the columns of the table are taken for tokens: the product sums over the wrong axis")
def wrong_axis(ids, weight):
    one_hot = torch.nn.functional.one_hot(ids, num_classes=weight.shape[1]).to(weight.dtype)
    return one_hot @ weight.T


@mistake("embed", "the result is float32 whatever the table's dtype")
def always_float32(ids, weight):
    one_hot = torch.nn.functional.one_hot(ids, num_classes=len(weight)).float()
    return one_hot @ weight.float()


@mistake("embed", "a token that occurs twice is used once: the one-hot rows are made of the distinct ids")
def distinct_ids(ids, weight):
    one_hot = torch.zeros(*ids.shape, len(weight), dtype=weight.dtype)
    seen = set()
    for at, i in enumerate(ids.flatten().tolist()):
        if i not in seen:
            one_hot.view(-1, len(weight))[at, i] = 1
            seen.add(i)
    return one_hot @ weight
