"""Plausible wrong answers of chapter 1, and the misconception behind each."""

import heapq
from collections import Counter
from itertools import pairwise

import regex
import torch

from lib.workbook.grading import mistake
from solutions import tokenization as reference

# ---- 1.1 WordTokenizer -----------------------------------------------------------------------------------------------


@mistake("WordTokenizer", "the words are numbered as they come, not in sorted order")
class NumberedAsTheyCome(reference.WordTokenizer):
    def __init__(self, text):
        words = list(dict.fromkeys(text.lower().split()))
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))


@mistake("WordTokenizer", "every new word gets the same id: the table does not remember the first")
class ForgetsNewWords(reference.WordTokenizer):
    def encode(self, text):
        return [self.ids.get(word, len(self.ids)) for word in text.lower().split()]


@mistake("WordTokenizer", "The and the are two words: the text is not put in lower case")
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


@mistake("WordTokenizer", "the text is put in lower case in one place, not in the other")
class LowersOnce(reference.WordTokenizer):
    def encode(self, text):
        ids = []
        for word in text.split():
            ids.append(self.ids.setdefault(word, len(self.ids)))
            self.words[ids[-1]] = word
        return ids


@mistake("WordTokenizer", "a new word is sorted in, which gives other words new ids")
class SortsNewWordsIn(reference.WordTokenizer):
    def encode(self, text):
        words = sorted({*self.ids, *text.lower().split()})
        self.ids = {word: i for i, word in enumerate(words)}
        self.words = dict(enumerate(words))
        return [self.ids[word] for word in text.lower().split()]


@mistake("WordTokenizer", "words are looked up in a list, where id -1 is the last one")
class ListOfWords(reference.WordTokenizer):
    def decode(self, ids):
        words = list(self.ids)
        try:
            return " ".join(words[i] for i in ids)
        except IndexError as error:
            raise KeyError(max(ids)) from error


@mistake("WordTokenizer", "the text is cut at single spaces only")
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


@mistake("count_pairs", "a pair counts once a word, even where the word has it twice")
def once_a_word(word_counts):
    pairs = Counter()
    for symbols, count in word_counts.items():
        for pair in set(pairwise(symbols)):
            pairs[pair] += count
    return pairs


@mistake("count_pairs", "pairs span from the end of a word to the start of the next")
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


@mistake("merge_pair", "i += 1 inside a for loop over a range skips nothing: the second symbol comes again")
def skips_nothing(symbols, pair):
    merged = []
    for i in range(len(symbols)):
        if tuple(symbols[i : i + 2]) == tuple(pair):
            merged.append(pair[0] + pair[1])
            i += 1
        else:
            merged.append(symbols[i])
    return tuple(merged)


@mistake("merge_pair", "the bytes of two neighbours are compared together, so (ab, c) passes for (a, bc)")
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


# ---- 1.4 train_bpe ---------------------------------------------------------------------------------------------------


def _train(
    text,
    vocab_size,
    special_tokens=(),
    *,
    order=lambda count, pair: (count, pair),
    weigh=lambda count: count,
    words_of=reference.PRE_TOKEN.findall,
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
    pieces = split(text) if split else reference._special_pattern(special_tokens).split(text)[::2]
    counts = Counter(word for piece in pieces for word in words_of(piece))
    words = {tuple(bytes([b]) for b in word.encode()): weigh(count) for word, count in counts.items()}
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


@mistake("train_bpe", "ties compare the joined bytes, where the pair's first symbol comes first")
def joined_bytes_compared(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, order=lambda count, pair: (count, pair[0] + pair[1]))


@mistake("train_bpe", "each distinct word counts once, however often the text has it")
def every_word_once(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, weigh=lambda count: 1)


@mistake("train_bpe", "special tokens are read as text, and merged")
def special_tokens_merged(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, split=lambda text: [text])


@mistake("train_bpe", "special tokens are deleted, so that pairs go across them")
def special_tokens_deleted(text, vocab_size, special_tokens=()):
    return _train(
        text,
        vocab_size,
        special_tokens,
        split=lambda text: ["".join(reference._special_pattern(special_tokens).split(text)[::2])],
    )


@mistake("train_bpe", "the shortest special token is tried first, so a longer one that begins with it is never found")
def shortest_cut_out(text, vocab_size, special_tokens=()):
    pattern = "|".join(regex.escape(s) for s in sorted(special_tokens, key=len)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "the special tokens are tried as they were given, not the longest first")
def special_tokens_as_given(text, vocab_size, special_tokens=()):
    pattern = "|".join(map(regex.escape, special_tokens)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "special tokens are put into a pattern unescaped, where | means or")
def special_tokens_as_patterns(text, vocab_size, special_tokens=()):
    pattern = "|".join(sorted(special_tokens, key=len, reverse=True)) or "(?!)"
    return _train(text, vocab_size, special_tokens, split=lambda text: regex.split(pattern, text))


@mistake("train_bpe", "words are cut at white space, and the space before a word is lost")
def cut_at_white_space(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, words_of=str.split)


@mistake("train_bpe", "the text is not cut into words, so tokens span several")
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


class _StaleNeighbours(reference._PairIndex):
    """Adds the new pairs, and leaves the neighbours that a merge broke up as they were counted."""

    def merge(self, pair):
        for n in self.words_with.pop(pair):
            self.words[n] = after = reference.merge_pair(self.words[n], pair)
            for new in pairwise(after):
                if pair[0] + pair[1] in new:
                    self.counts[new] += self.word_counts[n]
                    self.words_with[new].add(n)
                    heapq.heappush(self.heap, reference._LargestFirst((self.counts[new], new)))
        self.counts[pair] = 0


@mistake("train_bpe", "the pairs on both sides of a merge keep the counts that they had before it")
def stale_neighbours(text, vocab_size, special_tokens=()):
    pieces = reference._special_pattern(special_tokens).split(text)[::2]
    counts = Counter(word for piece in pieces for word in reference.PRE_TOKEN.findall(piece))
    index = _StaleNeighbours({tuple(reference._bytes_of(word)): count for word, count in counts.items()})
    merges = []
    while len(merges) < vocab_size - 256 - len(special_tokens) and (pair := index.most_frequent()):
        merges.append(pair)
        index.merge(pair)
    tokens = [bytes([b]) for b in range(256)] + [a + b for a, b in merges] + [s.encode() for s in special_tokens]
    return dict(enumerate(tokens)), merges


# ---- 1.5 BPETokenizer ------------------------------------------------------------------------------------------------


class _WithMerge(reference.BPETokenizer):
    """A tokenizer whose words are merged by ``merge_word(symbols)``."""

    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        tokenizer = self

        class Words(reference._WordIds):
            def __missing__(self, word):
                symbols = tokenizer.merge_word(tuple(reference._bytes_of(word)), merges)
                self[word] = ids = [self.ids[symbol] for symbol in symbols]
                return ids

        self._word_ids = Words(self.ids, self._ranks, 100_000)


@mistake("BPETokenizer", "the longest token that fits is taken from the left; the order of the merges is not asked")
class LongestMatch(_WithMerge):
    def merge_word(self, symbols, merges):
        word, pieces = b"".join(symbols), []
        while word:
            size = next(n for n in range(len(word), 0, -1) if word[:n] in self.ids)
            pieces.append(word[:size])
            word = word[size:]
        return pieces


@mistake("BPETokenizer", "the leftmost pair that is a merge is joined, whatever its rank")
class LeftmostPair(_WithMerge):
    def merge_word(self, symbols, merges):
        known = set(merges)
        while pair := next((pair for pair in pairwise(symbols) if pair in known), None):
            at = list(pairwise(symbols)).index(pair)
            symbols = (*symbols[:at], pair[0] + pair[1], *symbols[at + 2 :])
        return symbols


@mistake("BPETokenizer", "pairs are joined in the order of their ids, not of the merges")
class OrderOfIds(_WithMerge):
    def merge_word(self, symbols, merges):
        for left, right in sorted(merges, key=lambda pair: self.ids[pair[0] + pair[1]]):
            symbols = reference.merge_pair(symbols, (left, right))
        return symbols


@mistake("BPETokenizer", "the merges are gone through once: a pair that a later merge makes is not joined")
class GoesThroughTheMergesOnce(_WithMerge):
    def merge_word(self, symbols, merges):
        for pair in merges:
            symbols = reference.merge_pair(symbols, pair)
        return symbols


@mistake("BPETokenizer", "every word goes through all merges, again and again until none is left")
class GoesThroughAllMerges(_WithMerge):
    def merge_word(self, symbols, merges):
        before = None
        while symbols != before:
            before = symbols
            for pair in merges:
                symbols = reference.merge_pair(symbols, pair)
        return symbols


@mistake("BPETokenizer", "the next id is taken from the length of the vocabulary, not from its largest id")
class NextIdIsTheLength(reference.BPETokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        vocab = dict(vocab)
        for token in special_tokens:
            if token.encode() not in vocab.values():
                vocab[len(vocab)] = token.encode()
        super().__init__(vocab, merges, special_tokens)


@mistake("BPETokenizer", "merges are made across words: the text is not cut by PRE_TOKEN first")
class MergesAcrossWords(reference.BPETokenizer):
    def encode(self, text):
        ids = []
        for n, piece in enumerate(self._special.split(text)):
            ids += [self.ids[piece.encode()]] if n % 2 else self._word_ids[piece]
        return ids


@mistake("BPETokenizer", "each token is decoded alone, which breaks characters of several tokens")
class DecodesEachToken(reference.BPETokenizer):
    def decode(self, ids):
        return "".join(self.vocab[i].decode(errors="replace") for i in ids)


@mistake("BPETokenizer", "invalid bytes raise an error, or vanish, instead of becoming U+FFFD")
class IgnoresInvalidBytes(reference.BPETokenizer):
    def decode(self, ids):
        return b"".join(self.vocab[i] for i in ids).decode(errors="ignore")


@mistake("BPETokenizer", "an unknown id is left out of the text without a word")
class SkipsUnknownIds(reference.BPETokenizer):
    def decode(self, ids):
        return b"".join(self.vocab.get(i, b"") for i in ids).decode(errors="replace")


@mistake("BPETokenizer", "ids of bytes are taken to be the bytes' values; the vocabulary says what they are")
class BytesAreIds(_WithMerge):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        self._word_ids.ids = {**self.ids, **{bytes([b]): b for b in range(256)}}

    def merge_word(self, symbols, merges):
        for pair in merges:
            symbols = reference.merge_pair(symbols, pair)
        return symbols


@mistake("BPETokenizer", "the special tokens are tried as they were given, not the longest first")
class SpecialTokensAsGiven(reference.BPETokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        self._special = regex.compile("(" + ("|".join(map(regex.escape, special_tokens)) or "(?!)") + ")")


@mistake("BPETokenizer", "special tokens are put into the pattern as they are: [SEP] there means one of three letters")
class SpecialTokensAsPatterns(reference.BPETokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = regex.compile("(" + ("|".join(longest_first) or "(?!)") + ")")

    def encode(self, text):
        ids = []
        for n, piece in enumerate(self._special.split(text)):
            special = n % 2 and piece.encode() in self.ids
            ids += (
                [self.ids[piece.encode()]]
                if special
                else [i for w in reference.PRE_TOKEN.findall(piece or "") for i in self._word_ids[w]]
            )
        return ids


@mistake("BPETokenizer", "special tokens are encoded like any other text")
class SpecialTokensAsText(reference.BPETokenizer):
    def encode(self, text):
        return [i for word in reference.PRE_TOKEN.findall(text) for i in self._word_ids[word]]


@mistake("BPETokenizer", "special tokens are appended to the vocabulary that was given, which changes the caller's")
class ChangesTheGivenVocabulary(reference.BPETokenizer):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        vocab.update(self.vocab)


@mistake("BPETokenizer", "each chunk of a stream is encoded alone, so words are cut where the chunks are")
class EncodesEachChunk(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        for chunk in chunks:
            yield from self.encode(chunk)


@mistake("BPETokenizer", "the whole stream is read and joined before the first id is given")
class ReadsTheWholeStream(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        yield from self.encode("".join(chunks))


@mistake("BPETokenizer", "only the last word is held back: a contraction or a run of spaces may join the one before it")
class HoldsOneWordBack(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        longest = max(map(len, self.special_tokens), default=1)
        buffer = ""
        for chunk in chunks:
            buffer += chunk
            words = reference.PRE_TOKEN.findall(buffer) if longest == 1 else []
            settled = "".join(words[:-1])
            yield from self.encode(settled)
            buffer = buffer[len(settled) :]
        yield from self.encode(buffer)


@mistake("BPETokenizer", "a special token that two chunks share is not seen: the end of a chunk is settled too early")
class CutsSpecialTokens(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        buffer = ""
        for chunk in chunks:
            buffer += chunk
            end = 0
            for token, end, special in reference._settled(buffer, self._special, 0):  # noqa: B007
                yield from [self.ids[token.encode()]] if special else self._word_ids[token]
            buffer = buffer[end:]
        yield from self.encode(buffer)


@mistake("BPETokenizer", "the certain words are joined and then encoded, without what follows them: the cut changes")
class EncodesTheJoin(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        longest = max(map(len, self.special_tokens), default=0)
        buffer = ""
        for chunk in chunks:
            buffer += chunk
            end = max((end for _, end, _ in reference._settled(buffer, self._special, longest)), default=0)
            yield from self.encode(buffer[:end])
            buffer = buffer[end:]
        yield from self.encode(buffer)


@mistake("BPETokenizer", "the whole buffer is scanned again for every chunk: a long word costs its square")
class ScansAgain(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        longest = max(map(len, self.special_tokens), default=0)
        buffer = ""
        for chunk in chunks:
            buffer += chunk
            end = 0
            for token, end, special in reference._settled(buffer, self._special, longest):  # noqa: B007
                yield from [self.ids[token.encode()]] if special else self._word_ids[token]
            buffer = buffer[end:]
        yield from self.encode(buffer)


@mistake("BPETokenizer", "every word met is kept, in a stream too: its table grows with the text")
class KeepsEveryWord(reference.BPETokenizer):
    def encode_iterable(self, chunks):
        longest = max(map(len, self.special_tokens), default=0)
        buffer, enough, words = "", 0, {}
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < enough:
                continue
            end = 0
            for token, end, special in reference._settled(buffer, self._special, longest):  # noqa: B007
                if not special and token not in words:
                    words[token] = list(self._word_ids[token])
                yield from [self.ids[token.encode()]] if special else words[token]
            buffer = buffer[end:]
            enough = 2 * len(buffer)
        yield from self.encode(buffer)


@mistake("BPETokenizer", "every word is merged anew each time it is met")
class RemembersNothing(reference.BPETokenizer):
    def encode(self, text):
        ids = []
        for n, piece in enumerate(self._special.split(text)):
            if n % 2:
                ids.append(self.ids[piece.encode()])
                continue
            for word in reference.PRE_TOKEN.findall(piece):
                self._word_ids.clear()
                ids += self._word_ids[word]
        return ids


# ---- 1.6 embed -------------------------------------------------------------------------------------------------------


@mistake("embed", "the rows are looked up: the values are right, but no product is made")
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


@mistake("embed", "the columns of the table are taken for tokens: the one-hot rows meet the wrong axis")
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
