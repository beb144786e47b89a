"""The tokenizer, graded.

The tests train with an implementation of their own that counts everything anew after each merge, so that no exercise
needs another.
"""

import itertools
import random
import sys
from collections import Counter, deque
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import regex
import torch
from torch import Tensor
from torch.nn import functional

from lib.given.data.corpora import language_reference
from lib.workbook.grading import (
    case,
    expect_close,
    expect_equal,
    expect_raises,
    expect_true,
    graded,
    oracle,
    recorded,
    with_peak,
)
from tests.devices import Watch

tokenization = graded("tokenization")

PAIRS, MERGE, PRODUCT, GRADIENT = (f"eq-tokenization-{n}" for n in (1, 2, 4, 5))
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = "<|endoftext|>"
SAMPLE = """The ruler of a kingdom isn't a ruler of letters: they're 26, and he'd never counted them.
He said: "We'll count them tomorrow,   all 26!"  But  the ruler's clerk had   counted already...
\tletters = {"a": 0, "b": 1}\n\n\tfor letter in sorted(letters):\n\t    print(letter, letters[letter])
Le café était fermé; Größe zählt nicht. 王国的统治者数了数字母。 Привет, мир! 🙂🙂 naïve coöperation 3.14159
"""


def split_off(text: str, special_tokens) -> list[str]:
    """The text between the special tokens; the longest of them is found first."""
    if not special_tokens:
        return [text]
    return regex.split("|".join(regex.escape(s) for s in sorted(special_tokens, key=len, reverse=True)), text)


def plain_bpe(text: str, n_merges: int, special_tokens=()) -> list[tuple[bytes, bytes]]:
    """The merges, found as slowly and plainly as possible."""
    counts = Counter(w for part in split_off(text, special_tokens) for w in regex.findall(GPT2_PATTERN, part))
    words = [([bytes([b]) for b in word.encode()], count) for word, count in counts.items()]
    merges = []
    for _ in range(n_merges):
        pairs = Counter[Any]()
        for word, count in words:
            for i in range(len(word) - 1):
                pairs[word[i], word[i + 1]] += count
        if not pairs:
            break
        best = max(pairs.items(), key=lambda item: (item[1], item[0]))[0]
        merges.append(best)
        for word, _ in words:
            i = 0 if best[0] in word else len(word)
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


def as_vocab(merges, special_tokens=()) -> dict[int, bytes]:
    tokens = [bytes([b]) for b in range(256)] + [a + b for a, b in merges] + [s.encode() for s in special_tokens]
    return dict(enumerate(tokens))


@cache
def trained(n_merges: int = 300) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    merges = plain_bpe(SAMPLE * 2 + SAMPLE.lower(), n_merges)
    return as_vocab(merges), merges


def make_tokenizer(special_tokens=()):
    vocab, merges = trained()
    return tokenization.BPETokenizer(dict(vocab), list(merges), list(special_tokens))


def make_text(rng: random.Random, length: int) -> str:
    """Words, spaces, contractions, pieces of special tokens and characters of one to four bytes, at random."""
    atoms = [" ", "  ", "\n", "\t", "'", "'s", "r", "e", "l", "the", "ruler", "26", "!", "é", "王", "🙂", "\u00a0"]
    atoms += ["<|a|>", "<|a|><|b|>", "<|", "|>", "<|b", "a"]
    return "".join(rng.choice(atoms) for _ in range(length))


def expect_same_pieces(tokenizer, chunks: list[str], ids: list[int]) -> None:
    """A stream gives the ids of the whole text; a failure shows what the tokens spell."""
    streamed = list(tokenizer.encode_iterable(chunks))
    if streamed != ids:
        pieces, expected = ([tokenizer.decode([i]) for i in some] for some in (streamed, ids))
        expect_equal(pieces, expected, name="pieces of the stream", answer=streamed, read='"Text to numbers"')
    expect_equal(streamed, ids, name="ids of the stream")


def cut(text: str, rng: random.Random, n_cuts: int) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(n_cuts))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


class TooMany(Exception):
    """More lines were run than a test allows."""


def count_lines(function, *args, limit: int = 10_000_000) -> int:
    """How many lines of Python a call runs; the call is ended when there are more than ``limit``."""
    n_lines = 0

    def trace(frame, event, arg):
        nonlocal n_lines
        n_lines += event == "line"
        if n_lines > limit:
            raise TooMany
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    except TooMany:
        return limit + 1
    finally:
        sys.settrace(before)
    return n_lines


# ---- WordTokenizer ---------------------------------------------------------------------------------------------------


def test_WordTokenizer_by_hand():
    case('the table of "The ruler of a kingdom is a"')
    tokenizer = tokenization.WordTokenizer("The ruler of a kingdom is a")
    expect_equal(tokenizer.encode("The ruler of a kingdom is a"), [5, 4, 3, 0, 2, 1, 0], name="ids")
    found = tokenizer.encode("the kingdom had another ruler")
    expect_equal(found, [5, 2, 6, 7, 4], name="ids")
    expect_equal({type(i).__name__ for i in found}, {"int"}, name="types of the ids", answer=found)


def test_WordTokenizer_remembers_new_words():
    case('new words in the table of "b a"')
    tokenizer = tokenization.WordTokenizer("b a")
    ids = [tokenizer.encode(text) for text in ("c a d", "d c", "e e C")]
    expect_equal(ids, [[2, 0, 3], [3, 2], [4, 4, 2]], name="ids")
    expect_equal(tokenizer.decode([4, 3, 2, 1, 0]), "e d c b a", name="text")


def test_WordTokenizer_is_cut_at_any_white_space():
    case("tabs, newlines and several spaces")
    tokenizer = tokenization.WordTokenizer("  one\ttwo\n\nthree  ")
    expect_equal(tokenizer.encode("three\n two\t\tone\n"), [1, 2, 0], name="ids")
    expect_equal(tokenizer.encode(" \n "), [], name="ids of white space")
    case('punctuation is a part of its word: the table of "two, one"')
    tokenizer = tokenization.WordTokenizer("two, one")
    expect_equal(tokenizer.encode("one two, two"), [0, 1, 2], name="ids")


@pytest.mark.parametrize("seed", range(3))
def test_WordTokenizer_round_trip(seed):
    case(f"random words, seed {seed}")
    rng = random.Random(seed)
    words = ["".join(rng.choices("abc", k=rng.randrange(1, 4))) for _ in range(60)]
    tokenizer = tokenization.WordTokenizer(" ".join(words[:30]))
    expect_equal(tokenizer.decode(tokenizer.encode(" ".join(words))), " ".join(words), name="text")


def test_WordTokenizer_tables_are_apart():
    case("two tokenizers of empty texts")
    first, second = tokenization.WordTokenizer(""), tokenization.WordTokenizer("")
    expect_equal(first.encode("x y"), [0, 1], name="ids")
    expect_equal(second.encode("y x"), [0, 1], name="ids of the second tokenizer")


@pytest.mark.parametrize("unknown", [99, -1])
def test_WordTokenizer_unknown_id(unknown):
    case(f"decode([0, {unknown}]) with three words")
    tokenizer = tokenization.WordTokenizer("one two three")
    with expect_raises(KeyError, str(unknown)):
        tokenizer.decode([0, unknown])


# ---- count_pairs -----------------------------------------------------------------------------------------------------


def test_count_pairs_by_hand():
    case("low five times, lower twice")
    words = {(b"l", b"o", b"w"): 5, (b"l", b"o", b"w", b"e", b"r"): 2}
    expected = {(b"l", b"o"): 7, (b"o", b"w"): 7, (b"w", b"e"): 2, (b"e", b"r"): 2}
    expect_equal(dict(tokenization.count_pairs(words)), expected, name="counts", read=PAIRS)


def test_count_pairs_is_a_counter():
    case("a pair that is not there")
    counts = tokenization.count_pairs({(b"a", b"b"): 1})
    expect_true(isinstance(counts, Counter), f"gives a {type(counts).__name__}, expected a Counter")
    expect_equal(counts[b"b", b"a"], 0, name="counts[b'b', b'a']", read=PAIRS)


def test_count_pairs_counts_positions():
    case("aaabab three times")
    counts = tokenization.count_pairs({(b"a", b"a", b"a", b"b", b"a", b"b"): 3})
    expected = {(b"a", b"a"): 6, (b"a", b"b"): 6, (b"b", b"a"): 3}
    expect_equal(dict(counts), expected, name="counts", read=PAIRS)


def test_count_pairs_of_merged_symbols():
    case("symbols of several bytes, words of one symbol, no words")
    counts = tokenization.count_pairs({(b"th", b"e"): 3, (b"the",): 9, (b"t", b"he"): 1})
    expect_equal(dict(counts), {(b"th", b"e"): 3, (b"t", b"he"): 1}, name="counts", read=PAIRS)
    expect_equal(dict(tokenization.count_pairs({})), {}, name="counts of no words")


@pytest.mark.parametrize("seed", range(3))
def test_count_pairs_counts_every_place(seed):
    case(f"40 random words, seed {seed}")
    rng = random.Random(seed)
    words = {tuple(rng.choices([b"a", b"b", b"ab"], k=rng.randrange(1, 9))): rng.randrange(1, 9) for _ in range(40)}
    given = dict(words)
    counts = tokenization.count_pairs(words)
    places = sum((len(word) - 1) * count for word, count in words.items())
    expect_equal(sum(counts.values()), places, name="sum of all counts", answer=dict(counts), read=PAIRS)
    expect_equal(words, given, name="word_counts after the call")


# ---- merge_pair ------------------------------------------------------------------------------------------------------


def test_merge_pair_by_hand():
    case("b a n a n a, pair (a, n)")
    symbols = (b"b", b"a", b"n", b"a", b"n", b"a")
    expect_equal(tokenization.merge_pair(symbols, (b"a", b"n")), (b"b", b"an", b"an", b"a"), name="symbols", read=MERGE)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_merge_pair_without_overlap(n):
    case(f"{'a ' * n}b, pair (a, a)")
    expected = (b"aa",) * (n // 2) + (b"a",) * (n % 2) + (b"b",)
    expect_equal(tokenization.merge_pair((b"a",) * n + (b"b",), (b"a", b"a")), expected, name="symbols", read=MERGE)


def test_merge_pair_joins_symbols_not_bytes():
    case("ab c a bc, pair (a, bc)")
    merged = tokenization.merge_pair((b"ab", b"c", b"a", b"bc"), (b"a", b"bc"))
    expect_equal(merged, (b"ab", b"c", b"abc"), name="symbols", read=MERGE)


def test_merge_pair_joins_whole_symbols():
    case("xa b a bx a b, pair (a, b): xa and bx are other symbols")
    merged = tokenization.merge_pair((b"xa", b"b", b"a", b"bx", b"a", b"b"), (b"a", b"b"))
    expect_equal(merged, (b"xa", b"b", b"a", b"bx", b"ab"), name="symbols", read=MERGE)
    case("all 256 bytes in order, pair (a, b): no byte is free to stand between two symbols")
    symbols = tuple(bytes([byte]) for byte in range(256))
    expected = (*symbols[: ord("a")], b"ab", *symbols[ord("b") + 1 :])
    expect_equal(tokenization.merge_pair(symbols, (b"a", b"b")), expected, name="symbols", read=MERGE)


def test_merge_pair_absent_and_short():
    for symbols in [(), (b"a",), (b"b", b"a"), (b"c", b"a", b"c", b"b")]:
        case(f"{list(symbols)}, pair (a, b)")
        expect_equal(tokenization.merge_pair(list(symbols), (b"a", b"b")), symbols, name="symbols", read=MERGE)


@pytest.mark.parametrize("seed", range(4))
def test_merge_pair_keeps_the_bytes(seed):
    case(f"30 random symbols, seed {seed}")
    symbols = random.Random(seed).choices([b"a", b"b", b"c", b"ab"], k=30)
    given = list(symbols)
    merged = tokenization.merge_pair(symbols, (b"a", b"b"))
    expect_equal(b"".join(merged), b"".join(symbols), name="bytes", answer=merged)
    expect_true((b"a", b"b") not in itertools.pairwise(merged), "the pair is still there", answer=merged, read=MERGE)
    expect_equal(symbols, given, name="symbols after the call")


# ---- train_bpe -------------------------------------------------------------------------------------------------------


def test_train_bpe_by_hand():
    case("ten words: lamp 5, lamps 2, newest 3")
    _, merges = tokenization.train_bpe("lamp lamp lamp lamp lamp lamps lamps newest newest newest", 261)
    expected = [(b"m", b"p"), (b"l", b"a"), (b"la", b"mp"), (b" ", b"lamp"), (b"w", b"e")]
    expect_equal(merges, expected, name="merges", read=MERGE)


def test_train_bpe_vocabulary():
    case("bytes, then merges, then special tokens")
    vocab, merges = tokenization.train_bpe(f"abab{END}abab<|pad|>", 260, [END, "<|pad|>"])
    expect_equal(merges, [(b"a", b"b"), (b"ab", b"ab")], name="merges")
    expect_equal(vocab, as_vocab(merges, [END, "<|pad|>"]), name="vocab")


def test_train_bpe_ties():
    case("ba and ab once each: the greater pair is (b, a)")
    expect_equal(tokenization.train_bpe("ab\nba\ncab\nzba", 257)[1], [(b"b", b"a")], name="merges", read=MERGE)
    case("az and abc once each: (ab, c) is greater than (a, z), although abc is less than az")
    expect_equal(tokenization.train_bpe("ab\nab\nabc\naz", 258)[1], [(b"a", b"b"), (b"ab", b"c")], name="merges")


def test_train_bpe_words_are_not_joined():
    case("a word keeps the space before it, and no pair spans two words")
    _, merges = tokenization.train_bpe("x y x y x y", 300)
    expect_equal(merges, [(b" ", b"y"), (b" ", b"x")], name="merges", read=MERGE)
    case("contractions, numbers and punctuation are words of their own")
    _, merges = tokenization.train_bpe("a1's a1's !?a", 300)
    expected = plain_bpe("a1's a1's !?a", 44)
    expect_equal(merges, expected, name="merges")


def test_train_bpe_special_tokens_are_cut_out():
    case('special token "<|z|>", text "xy<|z|>" nine times, then "<|": no part of "<|z|>" is counted')
    _, merges = tokenization.train_bpe("xy<|z|>" * 9 + "<|", 300, ["<|z|>"])
    expect_equal(merges, [(b"x", b"y"), (b"<", b"|")], name="merges")
    case("no pair goes across a special token")
    _, merges = tokenization.train_bpe("ab.cd.ab.cd", 300, ["."])
    expect_equal(merges, [(b"c", b"d"), (b"a", b"b")], name="merges")
    case('special token "<|z|>", text "ab <|z|> ab": its words are "ab", " " and " ab"')
    _, merges = tokenization.train_bpe("ab <|z|> ab", 300, ["<|z|>"])
    expect_equal(merges, [(b"a", b"b"), (b" ", b"ab")], name="merges")
    case("special tokens <a> and <a><b>: the longer is cut out whole")
    _, merges = tokenization.train_bpe("x<a><b>" * 3, 300, ["<a>", "<a><b>"])
    expect_equal(merges, [], name="merges")
    case("special tokens b, bc and bcde, of the text xbcdexbcde: the longest is cut out whole, whatever their order")
    _, merges = tokenization.train_bpe("xbcdexbcde", 300, ["bc", "bcde", "b"])
    expect_equal(merges, [], name="merges")


def test_train_bpe_stops_when_no_pair_is_left():
    case("abc, room for 44 merges")
    vocab, merges = tokenization.train_bpe("abc", 300 + 1, [END])
    expect_equal(merges, [(b"b", b"c"), (b"a", b"bc")], name="merges")
    expect_equal(len(vocab), 259, name="len(vocab)")
    expect_equal(tokenization.train_bpe("", 300), (as_vocab([]), []), name="(vocab, merges) of no text")


def test_train_bpe_exact_size():
    case("vocab_size=257: the 256 bytes and one special token leave no room for a merge")
    vocab, merges = tokenization.train_bpe("abab", 257, [END])
    expect_equal((merges, len(vocab)), ([], 257), name="(merges, len(vocab))")


def test_train_bpe_vocab_size_too_small():
    case("vocab_size 257, two special tokens")
    with expect_raises(ValueError, "257", "258"):
        tokenization.train_bpe("abab", 257, [END, "<|pad|>"])
    case("vocab_size 255")
    with expect_raises(ValueError, "255", "256"):
        tokenization.train_bpe("abab", 255)


@pytest.mark.parametrize("seed", range(4))
def test_train_bpe_equals_the_plain_way(seed):
    case(f"400 random words of a, b and c, seed {seed}")
    rng = random.Random(seed)
    text = " ".join("".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(400))
    expect_equal(tokenization.train_bpe(text, 256 + 60)[1], plain_bpe(text, 60), name="merges")


def test_train_bpe_on_many_scripts():
    case("French, German, Chinese, Russian, emoji and code")
    expect_equal(tokenization.train_bpe(SAMPLE, 256 + 150)[1], plain_bpe(SAMPLE, 150), name="merges")


def test_train_bpe_on_the_language_reference():
    case("20,000 characters of the Python language reference")
    text = language_reference()[:20_000]
    expect_equal(tokenization.train_bpe(text, 256 + 60)[1], plain_bpe(text, 60), name="merges")


@oracle
@pytest.mark.exhaustive
@pytest.mark.time_limit(240)
def test_train_bpe_on_the_whole_language_reference():
    case("the whole language reference, 744 merges")
    text = language_reference()
    expect_equal(tokenization.train_bpe(text, 1000)[1], plain_bpe(text, 744), name="merges")


@pytest.mark.time_limit(30)
def test_train_bpe_counts_only_what_changed():
    """Three frequent words hold all the merges; no merge touches the 2,048 rare ones."""
    letters = "efghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    frequent = [letters[:16], letters[16:32], letters[32:]]
    rare = ["".join(w) for w in itertools.islice(itertools.product("abcd", repeat=6), 0, None, 2)]
    text = "\n".join(frequent * 1000 + rare)
    case(f"{len(rare)} words that 40 merges do not touch")
    start = count_lines(tokenization.train_bpe, text, 256)
    limit = 40 * len(rare)
    lines = count_lines(tokenization.train_bpe, text, 256 + 40, limit=start + limit) - start
    expect_true(
        lines < limit,
        f"40 merges that change one word each ran more than {limit:,} lines of Python: "
        f"every word is visited again after each merge, although only one has changed",
        answer="recount",
        read='"Write the dictionary"',
    )


@pytest.mark.time_limit(30)
def test_train_bpe_visits_only_words_with_the_pair():
    """The first merge, y+z, changes every word; of the 40 after it, each changes one of three frequent words."""
    letters = "efghijklmnopqrstuvwxABCDEFGHIJKLMNOPQRSTUVWXYZ"
    frequent = ["yz" + letters[at : at + 15] for at in (0, 15, 30)]
    rare = ["yz" + "".join(w) for w in itertools.islice(itertools.product("abcd", repeat=6), 0, None, 2)]
    text = "\n".join(frequent * 1000 + rare)
    case(f"{len(rare)} words that the first merge changes, y+z, and that 40 later merges do not touch")
    start = count_lines(tokenization.train_bpe, text, 257)
    limit = 40 * len(rare)
    lines = count_lines(tokenization.train_bpe, text, 257 + 40, limit=start + limit) - start
    expect_true(
        lines < limit,
        f"40 merges that change one word each ran more than {limit:,} lines of Python: "
        f"words are visited that do not contain the pair",
        answer="visits too many",
        read='"Write the dictionary"',
    )


# ---- BPETokenizer ----------------------------------------------------------------------------------------------------


def hand_made(special_tokens=()):
    merges = [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")]
    return tokenization.BPETokenizer(as_vocab(merges), merges, special_tokens)


def test_BPETokenizer_by_hand():
    case('"the cat ate" with the merges t+h, _+c, _+a, th+e, _a+t')
    tokenizer = hand_made()
    found = tokenizer.encode("the cat ate")
    expect_equal(found, [259, 257, 97, 116, 260, 101], name="ids", read="eq-tokenization-3")
    expect_equal({type(i).__name__ for i in found}, {"int"}, name="types of the ids", answer=found)
    expect_equal(tokenizer.decode([259, 257, 97, 116, 260, 101]), "the cat ate", name="text")
    case('encode_iterable(["the c", "at ate"]) with the same merges: the ids of "the cat ate"')
    expect_same_pieces(tokenizer, ["the c", "at ate"], [259, 257, 97, 116, 260, 101])


def test_BPETokenizer_earliest_merge_first():
    case('"abcd", merges c+d, b+c, a+bc, b+cd, a+b: the first of them joins c and d, and the fourth then b and cd')
    merges = [(b"c", b"d"), (b"b", b"c"), (b"a", b"bc"), (b"b", b"cd"), (b"a", b"b")]
    tokenizer = tokenization.BPETokenizer(as_vocab(merges), merges)
    expect_equal(tokenizer.encode("abcd"), [97, 259], name="ids", read="eq-tokenization-3")


def test_BPETokenizer_until_no_pair_is_a_merge():
    case('"abc", merges a+bc then b+c: joining b+c creates the pair a+bc')
    merges = [(b"a", b"bc"), (b"b", b"c")]
    tokenizer = tokenization.BPETokenizer(as_vocab(merges), merges)
    expect_equal(tokenizer.encode("abc"), [256], name="ids", read="eq-tokenization-3")


def test_BPETokenizer_rank_is_not_id():
    case('"abc", merges b+c then a+b, whose ids run the other way, and bytes whose ids are not their values')
    merges = [(b"b", b"c"), (b"a", b"b")]
    vocab = {0: b"ab", 1: b"bc", **{257 - b: bytes([b]) for b in range(256)}}
    tokenizer = tokenization.BPETokenizer(vocab, merges)
    expect_equal(tokenizer.encode("abc"), [257 - ord("a"), 1], name="ids", read="eq-tokenization-3")
    expect_equal(tokenizer.decode([0, 257 - ord("d")]), "abd", name="text")


def test_BPETokenizer_merges_stay_in_words():
    case('"a b", merges "a"+" " and " "+"b": the first would join two words')
    merges = [(b"a", b" "), (b" ", b"b")]
    tokenizer = tokenization.BPETokenizer(as_vocab(merges), merges)
    expect_equal(tokenizer.encode("a b"), [97, 257], name="ids")


def test_BPETokenizer_empty():
    tokenizer = make_tokenizer()
    case("the empty text")
    expect_equal(tokenizer.encode(""), [], name="ids")
    expect_equal(tokenizer.decode([]), "", name="text")
    case("streams of nothing")
    expect_equal([*tokenizer.encode_iterable([]), *tokenizer.encode_iterable(["", ""])], [], name="ids of the stream")


def test_BPETokenizer_bytes_of_one_character():
    case("🙂 as four bytes, decoded together")
    tokenizer = hand_made()
    expect_equal(tokenizer.encode("🙂"), list("🙂".encode()), name="ids")
    expect_equal(tokenizer.decode(list("é🙂".encode())), "é🙂", name="text")
    case("e and the accent U+0301, two characters of one and two bytes: the text is not changed")
    expect_equal(tokenizer.encode("e\u0301"), [0x65, 0xCC, 0x81], name="ids")
    case("U+D800, half of a surrogate pair")
    with expect_raises(UnicodeEncodeError, read="the contract, under Convention"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("ids", [[0xF0, 0x9F, 0x99], [97, 0xFF, 98], [0xE7, 97], [0x80, 0x80]])
def test_BPETokenizer_decode_replaces_invalid_bytes(ids):
    case(f"decode({ids})")
    expected = bytes(ids).decode("utf-8", errors="replace")
    expect_equal(hand_made().decode(ids), expected, name="text")


@pytest.mark.parametrize("unknown", [5000, -1])
def test_BPETokenizer_unknown_id(unknown):
    case(f"decode([97, {unknown}])")
    with expect_raises(KeyError, str(unknown)):
        hand_made().decode([97, unknown])


def test_BPETokenizer_special_tokens():
    tokenizer = hand_made(["<|h|>"])
    case('the special token "<|h|>", which the vocabulary lacks, is appended; "the<|h|> cat"')
    expect_equal(tokenizer.encode("the<|h|> cat"), [259, 261, 257, 97, 116], name="ids")
    expect_equal(tokenizer.decode([261, 261]), "<|h|><|h|>", name="text")
    case("a special token that the vocabulary has keeps its id (300); the next new one gets 301, one above the largest")
    merges = [(b"<", b"|")]
    vocab = {**as_vocab(merges), 300: b"<|x|>"}
    with_one = tokenization.BPETokenizer(vocab, merges, ["<|x|>", "<|y|>"])
    expect_equal(with_one.encode("<|x|><|y|>"), [300, 301], name="ids")
    case("text that looks like a special token which nobody declared")
    without = tokenization.BPETokenizer(vocab, merges)
    expect_equal(without.encode("<|x|>"), [256, 120, 124, 62], name="ids")


def test_BPETokenizer_longest_special_token_wins():
    for special_tokens in (["<a><b>", "<a>"], ["<a>", "<a><b>"]):
        case(f"special tokens {special_tokens}")
        tokenizer = hand_made(special_tokens)
        one, two = (261 + special_tokens.index(token) for token in ("<a>", "<a><b>"))
        text = "<a><b><a>the<a><c>"
        expected = [two, one, 259, one, *b"<c>"]
        expect_equal(tokenizer.encode(text), expected, name="ids")
        for at in range(len(text) + 1):
            chunks = [text[:at], text[at:]]
            case(f"special tokens {special_tokens}, encode_iterable({chunks})")
            expect_same_pieces(tokenizer, chunks, expected)


def test_BPETokenizer_special_tokens_are_no_patterns():
    case("special tokens [SEP] and a.c")
    tokenizer = hand_made(["[SEP]", "a.c"])
    expect_equal(tokenizer.encode("[SEP]abcSEa.c"), [261, *b"abcSE", 262], name="ids")


def test_BPETokenizer_leaves_its_arguments():
    vocab, special_tokens = as_vocab([]), ["bb", "aaa"]
    merges: list[tuple[bytes, bytes]] = []
    case("vocab and special_tokens after the call")
    tokenization.BPETokenizer(vocab, merges, special_tokens).encode("bbaaa")
    expect_equal((len(vocab), special_tokens), (256, ["bb", "aaa"]), name="(len(vocab), special_tokens)")


@pytest.mark.parametrize("seed", range(3))
def test_BPETokenizer_round_trip(seed):
    rng = random.Random(seed)
    tokenizer = make_tokenizer(["<|a|>", "<|a|><|b|>"])
    for n in range(60):
        text = make_text(rng, n)
        case(f"{n} random pieces, seed {seed}")
        ids = tokenizer.encode(text)
        expect_equal(tokenizer.decode(ids), text, name="text", answer=ids)


@pytest.mark.parametrize("seed", range(4))
def test_BPETokenizer_encode_iterable_wherever_it_is_cut(seed):
    rng = random.Random(seed)
    tokenizer = make_tokenizer(["<|a|>", "<|a|><|b|>", "  r"] if seed % 2 else [])
    for n in range(1, 90):
        text = make_text(rng, rng.randrange(1, 14))
        pieces = cut(text, rng, rng.randrange(1, 6)) if n % 3 else list(text)
        case(f"encode_iterable({pieces})")
        expect_same_pieces(tokenizer, pieces, tokenizer.encode(text))


@pytest.mark.parametrize("text", ["we're we'll", "a  b   \n\n  c", "x \t ", "it's 2026!", "  ", "\n\n \n", "'re'"])
def test_BPETokenizer_encode_iterable_at_every_cut(text):
    tokenizer = make_tokenizer()
    expected = tokenizer.encode(text)
    for at in range(len(text) + 1):
        case(f"encode_iterable({[text[:at], text[at:]]})")
        expect_same_pieces(tokenizer, [text[:at], text[at:]], expected)


def test_BPETokenizer_encode_iterable_is_lazy():
    case("the first 50 ids of a stream of 5,000 lines")
    read = 0

    def lines():
        nonlocal read
        for n in range(5000):
            read += 1
            yield f"the ruler counted {n} letters\n"

    ids = iter(make_tokenizer([END]).encode_iterable(lines()))
    expect_true(read == 0, f"{read} chunks were read before an id was asked for", answer=("eager", read))
    for _ in range(50):
        next(ids)
    expect_true(read <= 100, f"{read} chunks were read to give 50 ids", answer=("eager", read))


def test_BPETokenizer_encode_iterable_gives_ids_as_they_are_certain():
    case("a stream that pauses after its first line")
    seen = []

    def lines():
        yield "the ruler counted all the letters of the kingdom\n"
        seen.append(len(got))
        yield "and then he rested\n"

    got = []
    for i in make_tokenizer([END]).encode_iterable(lines()):
        got.append(i)
    expect_true(seen[0] > 5, f"{seen[0]} ids were given when the first line had been read", answer=got)


def test_BPETokenizer_encode_iterable_holds_little_back():
    case("a stream of 4,000 characters in chunks of 7, with words of at most 9 characters")
    tokenizer, limit = make_tokenizer([END]), 200
    text = ("the ruler counted all 26 letters of the kingdom\n" * 90)[:4000]
    n_read = n_given = held = 0

    def chunks():
        nonlocal n_read, held
        for at in range(0, len(text), 7):
            held = max(held, n_read - n_given)
            n_read += len(text[at : at + 7])
            yield text[at : at + 7]

    for i in tokenizer.encode_iterable(chunks()):
        n_given += len(tokenizer.decode([i]))  # the text is ASCII
    problem = f"held back up to {held:,} characters, of which all but two words were certain (up to {limit} are fine)"
    expect_true(held <= limit, problem, answer="late", read='"Text to numbers"')


@pytest.mark.time_limit(20)
def test_BPETokenizer_encode_iterable_memory():
    case("a stream of 600,000 characters")
    tokenizer = make_tokenizer([END])
    line = "the ruler's clerk had counted 26 letters already; 王国 🙂\n"
    n_chunks = 600_000 // len(line)
    _, peak = with_peak(lambda: deque(tokenizer.encode_iterable(line for _ in range(n_chunks)), maxlen=0))
    problem = f"took {peak // 1000} kB for a stream of 600 kB: memory grows with the stream"
    expect_true(peak < 200_000, problem, answer="grows")


@pytest.mark.time_limit(40)
def test_BPETokenizer_encode_iterable_keeps_few_words():
    n_words = 30_000
    case(f"a stream of {n_words:,} different words")
    tokenizer = hand_made()
    _, peak = with_peak(lambda: deque(tokenizer.encode_iterable(f" {n}" for n in range(n_words)), maxlen=0))
    problem = f"took {peak // 1000:,} kB for {n_words:,} different words: the table of words grows with the stream"
    expect_true(peak < 3_000_000, problem, answer="grows")


class Scans:
    """A pattern that counts the characters it looks through, and ends the call when there are too many."""

    def __init__(self, pattern, limit: int):
        self.pattern, self.limit, self.n = pattern, limit, 0

    def __getattr__(self, name):
        method = getattr(self.pattern, name)
        if not callable(method):
            return method

        def counted(*args, **kwargs):
            given = [*args, *kwargs.values()]
            length = max((len(value) for value in given if isinstance(value, str)), default=0)
            places = [value for value in given if isinstance(value, int)]
            start, end = (places[0] if places else 0), (places[1] if len(places) > 1 else length)
            self.n += max(0, min(end, length) - start)
            if self.n > self.limit:
                raise TooMany
            return method(*args, **kwargs)

        return counted


@contextmanager
def counted_scans(tokenizer, limit: int):
    """Counts what ``PRE_TOKEN`` looks through in the file, or files, that a tokenizer's methods were written in."""
    functions = [f for cls in type(tokenizer).__mro__ for f in vars(cls).values()]
    every = {id(f.__globals__): f.__globals__ for f in functions if hasattr(f, "__globals__")}
    files = [names for names in every.values() if "PRE_TOKEN" in names]
    before = [names["PRE_TOKEN"] for names in files]
    try:
        for names in files:
            names["PRE_TOKEN"] = Scans(names["PRE_TOKEN"], limit)
        yield
    finally:
        for names, pattern in zip(files, before, strict=True):
            names["PRE_TOKEN"] = pattern


@pytest.mark.time_limit(30)
def test_BPETokenizer_encode_iterable_long_word():
    word = "ab" * 10_000
    case(f"one word of {len(word):,} characters, in chunks of 1")
    tokenizer = make_tokenizer()
    expected, ids, limit = tokenizer.encode(word), None, 100 * len(word)
    with suppress(TooMany), counted_scans(tokenizer, limit):
        ids = list(tokenizer.encode_iterable(word))
    problem = f"PRE_TOKEN scanned more than {limit:,} characters: the whole buffer is scanned again at every chunk"
    expect_true(ids is not None, problem, answer="scans again", read="the contract, under Cost")
    expect_equal(ids, expected, name="ids of the stream")


def test_BPETokenizer_looks_at_the_pairs_of_a_word():
    merges = list(itertools.product([bytes([b]) for b in b"abcdefghijklmnopqrst"], repeat=2))
    tokenizer = tokenization.BPETokenizer(as_vocab(merges), merges)
    words = [" " + "".join(letters) for letters in itertools.product("uvwx", repeat=3)]
    case(f"{len(words)} different words of 4 symbols, {len(merges)} merges, none of which they hold")
    limit = 200 * len(words)
    lines = count_lines(tokenizer.encode, "".join(words), limit=limit)
    expect_true(
        lines < limit,
        f"ran more than {limit:,} lines of Python for {len(words)} words: every word goes through all merges",
        answer="all merges",
        read="eq-tokenization-3",
    )


def test_BPETokenizer_remembers_words():
    tokenizer = make_tokenizer()
    text = " counted letters" * 2000
    tokenizer.encode(text)
    case("4,000 words, two of them different, for the second time")
    lines = count_lines(tokenizer.encode, text, limit=200_000)
    expect_true(
        lines < 20 * 4000,
        f"ran {lines if lines <= 200_000 else 'more than 200,000'} lines of Python for 4,000 words that it knew: "
        f"each is merged again",
        answer="no cache",
        read='"Text to numbers"',
    )


def test_BPETokenizer_equals_tiktoken():
    case("a paragraph in many scripts, 300 merges")
    vocab = trained()[0]

    def tiktoken_ids() -> Tensor:
        import tiktoken

        ranks = {token: i for i, token in vocab.items()}
        special = {END: len(vocab)}
        encoding = tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
        return torch.tensor(encoding.encode(SAMPLE + END + SAMPLE.upper(), allowed_special="all"))

    expected = recorded("tiktoken_ids", tiktoken_ids).tolist()
    expect_equal(make_tokenizer([END]).encode(SAMPLE + END + SAMPLE.upper()), expected, name="ids")


@oracle
def test_BPETokenizer_equals_tokenizers():
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from lib.given.data.corpora import standard_library_docstrings

    case("50,000 characters of docstrings")
    vocab, merges = trained()
    letters = bytes_as_letters()
    spelled = {"".join(letters[b] for b in token): i for i, token in vocab.items()}
    pairs = [("".join(letters[b] for b in left), "".join(letters[b] for b in right)) for left, right in merges]
    peer = tokenizers.Tokenizer(models.BPE(vocab=spelled, merges=pairs))
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in (SAMPLE, standard_library_docstrings()[:50_000]):
        expect_equal(make_tokenizer().encode(text), peer.encode(text).ids, name="ids")


def bytes_as_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes: those that print stand for themselves, the others for letters from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printed)
    return {b: chr(b) for b in printed} | {b: chr(256 + n) for n, b in enumerate(others)}


@oracle
@pytest.mark.time_limit(60)
def test_BPETokenizer_of_any_text():
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    tokenizer = make_tokenizer(["<|a|>", "<|a|><|b|>", " '"])
    pieces = st.sampled_from(["<|a|>", "<|", "|><|b|>", "'r", "e", "  ", "\n", " '"]) | st.text(max_size=6)

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(pieces, max_size=10))
    def check(chunks):
        case(f"chunks {chunks}")
        text = "".join(chunks)
        ids = tokenizer.encode(text)
        expect_equal(tokenizer.decode(ids), text, name="text")
        expect_equal(list(tokenizer.encode_iterable(chunks)), ids, name="ids of the stream")

    check()


# ---- embed -----------------------------------------------------------------------------------------------------------


def make_weight(n_tokens: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n_tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_embed_by_hand():
    case("ids [2, 0, 2] of V=3, C=2")
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    out = tokenization.embed(torch.tensor([2, 0, 2]), weight)
    expect_close(out, torch.tensor([[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]), read=PRODUCT)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 5), (3, 1, 4), (0,)])
def test_embed_any_shape(shape):
    case(f"ids of shape {list(shape)}, V=11 C=3")
    ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(1))
    weight = make_weight(11, 3)
    expect_close(tokenization.embed(ids, weight), functional.embedding(ids, weight), atol=0, rtol=0, read=PRODUCT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_embed_keeps_the_dtype(dtype):
    case(f"V=5 C=5, {dtype}")
    ids, weight = torch.tensor([[0, 4], [3, 3]]), make_weight(5, 5, dtype=dtype)
    expect_close(tokenization.embed(ids, weight), functional.embedding(ids, weight), atol=0, rtol=0, read=PRODUCT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_embed_takes_ids_of_any_integer_dtype(dtype):
    case(f"ids [2, 0, 2] in {dtype}, V=5 C=3")
    ids, weight = torch.tensor([2, 0, 2]), make_weight(5, 3)
    found = tokenization.embed(ids.to(dtype), weight)
    expect_close(found, functional.embedding(ids, weight), atol=0, rtol=0, read="the contract, under Args")


@pytest.mark.parametrize("seed", range(3))
def test_embed_gradient(seed):
    case(f"30 ids of V=9 C=4 that repeat, float64, seed {seed}")
    ids = torch.randint(8, (5, 6), generator=torch.Generator().manual_seed(seed))
    ours, theirs = (make_weight(9, 4, seed, torch.float64).requires_grad_() for _ in range(2))
    upstream = make_weight(30, 4, seed + 1, torch.float64).view(5, 6, 4)
    functional.embedding(ids, theirs).backward(upstream)
    out = tokenization.embed(ids, ours)
    expect_true(out.requires_grad, "no gradient reaches the table", answer=out, read=GRADIENT)
    out.backward(upstream)
    expect_close(ours.grad, theirs.grad, name="weight.grad", answer=out, read=GRADIENT)


class Products(Watch):
    """Counts the matrix products that run under it."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "mv", "dot", "baddbmm")
        return func(*args, **(kwargs or {}))


def test_embed_is_a_product():
    case("ids [1, 0] of V=3, C=2")
    with Products() as products:
        out = tokenization.embed(torch.tensor([1, 0]), make_weight(3, 2))
    expect_true(products.n > 0, "the rows are right, but no matrix product was made", answer=out, read=PRODUCT)
