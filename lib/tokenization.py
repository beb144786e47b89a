"""Text to numbers and back: a table of words, byte-pair encoding, and the embedding that reads the numbers."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, tee

import regex
import torch
from jaxtyping import Float, Int
from torch import Tensor

# GPT-2's pre-tokenization: contractions, words, numbers and punctuation each keep the one space before them.
PRE_TOKEN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

Symbols = tuple[bytes, ...]
Pair = tuple[bytes, bytes]


class WordTokenizer:
    """A table of words, each with a number. (Exercise 1.1)

    Words are what white space separates, in lower case. The table begins with the words of a text, in sorted order.
    ``encode`` gives a word that it has never seen the next free id and remembers it; ``decode`` joins the words of the
    ids with spaces.

    Args:
        text: Where the first words come from; the id of each is its position among them, sorted.

    Raises:
        KeyError: ``decode`` meets an id that no word has; the error names it.

    Convention: the table is open. Where other tokenizers answer ``<unk>``, this one gives a new word the next id.

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
    """How often each pair of neighbouring symbols stands in a text. (Exercise 1.2)

    Args:
        word_counts: Each distinct word, as a tuple of its symbols, with how often the text has it.

    Returns:
        The count of each pair over the whole text: a word that occurs n times counts n times.

    Convention: positions are counted, so ``aaa`` holds the pair ``(a, a)`` twice, although only one can be merged.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``get_stats``.
    """
    raise NotImplementedError("Exercise 1.2: write count_pairs")


def merge_pair(symbols: Sequence[bytes], pair: Pair) -> Symbols:
    """Join every occurrence of a pair into one symbol. (Exercise 1.3)

    Args:
        symbols: The symbols of one word.
        pair: The two neighbours to join.

    Returns:
        The word with its new symbols, as a tuple; ``symbols`` is left as it was.

    Convention: left to right without overlap, so ``(a, a)`` turns ``aaa`` into ``aa a``.

    Source: Sennrich et al. (arXiv:1508.07909), algorithm 1, ``merge_vocab``.
    """
    raise NotImplementedError("Exercise 1.3: write merge_pair")


def train_bpe(text: str, vocab_size: int, special_tokens: Sequence[str] = ()) -> tuple[dict[int, bytes], list[Pair]]:
    """Learn a vocabulary by joining the most frequent pair, again and again. (Exercise 1.4)

    The text is cut at its special tokens, and the rest into words by ``PRE_TOKEN``; pairs are counted inside words.
    Pair counts are updated after each merge, not counted anew: a merge costs as much as the words that it changes.
    Finding the best pair may look at all pairs.

    Args:
        text: What to learn from.
        vocab_size: How many tokens to end with: 256 bytes, the special tokens and the merges. Training stops earlier
            when no pair is left.
        special_tokens: Strings that stay whole, the longest that fits winning; no pair is counted inside one or across
            one.

    Returns:
        The vocabulary (id to bytes) and the merges in the order in which they were made.

    Raises:
        ValueError: ``vocab_size`` has no room for the 256 bytes and the special tokens; the error names
            ``vocab_size`` and the least it could be (256 plus the special tokens).

    Convention: ids 0 to 255 are the bytes, then come the merges in order, then the special tokens as given (GPT-2's
    order; others put special tokens first). Of pairs with equal counts the lexicographically greater is merged.

    Source: Sennrich et al. (arXiv:1508.07909), section 3.2; on bytes: GPT-2 (Radford et al. 2019), section 2.2.
    """
    raise NotImplementedError("Exercise 1.4: write train_bpe")


class BPETokenizer:
    """Byte-pair encoding with a given vocabulary. (Exercise 1.5)

    A text is cut at its special tokens first, the longest that fits winning, and the rest into words by ``PRE_TOKEN``.
    Inside a word the pair that comes first in ``merges`` is joined, everywhere in the word, until no pair of the word
    is a merge. ``encode_iterable`` gives the same ids for a text in chunks, wherever they are cut, one by one and as
    soon as they are certain. ``decode`` turns bytes that are not UTF-8 into U+FFFD.

    Args:
        vocab: Bytes of each id; it is left as it was.
        merges: The pairs in the order in which training made them.
        special_tokens: Strings that each become one id; those that ``vocab`` lacks get the next ids (one above the
            largest).

    Raises:
        KeyError: ``decode`` meets an id that is not in the vocabulary; the error names it.

    Cost: a new word costs a look at its own pairs, not at all merges. A word met before costs a look in a dictionary.
        The memory of a stream does not grow with the text, so the table of its words is bounded. A long word that
        arrives in small chunks costs time in proportion to its length: the text that is held back is not scanned again
        at every chunk.

    Convention: the text is not changed (no lower case, no Unicode normalization, no space put in front), so that
    ``decode(encode(text)) == text`` for every text.

    Source: GPT-2 (Radford et al. 2019), section 2.2.
    """

    def __init__(self, vocab: Mapping[int, bytes], merges: Sequence[Pair], special_tokens: Sequence[str] = ()):
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.__init__")

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.encode")

    def encode_iterable(self, chunks: Iterable[str]) -> Iterator[int]:
        """The ids of a text that arrives in pieces, one by one, as soon as they are certain.

        Whatever the cuts, the ids are those of ``encode("".join(chunks))``: words, contractions, runs of spaces and
        special tokens may go across a cut. Only the end that is not certain yet is kept, and a table of words
        that is bounded: memory does not grow with the text.

        Args:
            chunks: Strings: an open file, lines, blocks of any size, empty ones too.
        """
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.encode_iterable")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            KeyError: an id that is not in the vocabulary; it names the id.
        """
        raise NotImplementedError("Exercise 1.5: write BPETokenizer.decode")


def embed(ids: Int[Tensor, "..."], weight: Float[Tensor, "v c"]) -> Float[Tensor, "... c"]:
    """The vectors of tokens, as a product of one-hot rows with the table. (Exercise 1.6)

    Args:
        ids: Token ids, of any shape.
        weight: One row of width C for each of the V tokens.

    Returns:
        The rows of ``weight``, in its dtype. Row i of its gradient sums the gradients of the places that hold token i.

    Source: this chapter's last section; ``torch.nn.functional.embedding`` gives the same without the product.
    """
    raise NotImplementedError("Exercise 1.6: write embed")
