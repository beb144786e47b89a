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
    """A table of words, each with a number. (Exercise 1.1)

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
        raise NotImplementedError("Exercise 1.1: write WordTokenizer.__init__")

    def encode(self, text: str) -> list[int]:
        """The id of each word; a word never seen before gets the next free id, and keeps it."""
        raise NotImplementedError("Exercise 1.1: write WordTokenizer.encode")

    def decode(self, ids: Iterable[int]) -> str:
        """The words of the ids, with one space between them.

        Raises:
            KeyError: an id that no word has; it names the id.
        """
        raise NotImplementedError("Exercise 1.1: write WordTokenizer.decode")


def count_pairs(word_counts: Mapping[Symbols, int]) -> Counter[Pair]:
    """How often each pair of neighbouring symbols occurs in a text. (Exercise 1.2)

    Size: 10 minutes, difficulty 1, core.

    Args:
        word_counts: Each distinct word, as a tuple of its symbols, with the number of times that the text has it.

    Returns:
        The count of each pair over the whole text: a word that occurs n times counts n times.

    Convention: positions are counted, so ``aaa`` contains the pair ``(a, a)`` twice, although only one can be merged.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``get_stats``.
    """
    raise NotImplementedError("Exercise 1.2: write count_pairs")


def merge_pair(symbols: Sequence[bytes], pair: Pair) -> Symbols:
    """Join every occurrence of a pair into one symbol. (Exercise 1.3)

    Size: 15 minutes, difficulty 2, core.

    Args:
        symbols: The symbols of one word.
        pair: The two neighbours to join.

    Returns:
        The word with its new symbols, as a tuple; ``symbols`` itself is not changed.

    Convention: left to right without overlap, so ``(a, a)`` turns ``aaa`` into ``aa a``.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``merge_vocab``.
    """
    raise NotImplementedError("Exercise 1.3: write merge_pair")


def train_bpe(text: str, vocab_size: int, special_tokens: Sequence[str] = ()) -> tuple[dict[int, bytes], list[Pair]]:
    """Learn a vocabulary by joining the most frequent pair, again and again. (Exercise 1.4)

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
    raise NotImplementedError("Exercise 1.4: write train_bpe")


class BPETokenizer:
    """Byte-pair encoding with a given vocabulary. (Exercise 1.5)

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
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.__init__")

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.encode")

    def encode_iterable(self, chunks: Iterable[str]) -> Iterator[int]:
        """The ids of a text that comes in chunks, yielded one by one, each soon after it is certain.

        Wherever the text is cut, the ids are those of ``encode("".join(chunks))``: words, contractions, runs of spaces
        and special tokens may be split between chunks. Memory does not grow with the text: only the end that is not
        certain yet is kept, and a dictionary of words that is bounded.

        Args:
            chunks: Strings of any size, also empty ones: an open file, a list of lines, blocks.
        """
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.encode_iterable")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            KeyError: an id that is not in the vocabulary; it names the id.
        """
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.decode")


def embed(ids: Integer[Tensor, "..."], weight: Float[Tensor, "v c"]) -> Float[Tensor, "... c"]:
    """The vectors of tokens, as a product of one-hot rows with the table. (Exercise 1.6)

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
    raise NotImplementedError("Exercise 1.6: write embed")
