"""Data on the device: images and rows of tokens, loaded or generated there, and batches of them by index."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lib.fast.models import MEAN, STD, prepare_images
from lib.given.data.corpora import language_reference, load_text, stream_text
from lib.given.data.images import DIGITS_MEAN, DIGITS_STD, Images, has_test_split, load_images, order_of
from lib.runs.data.corpus import (
    has_tokenizer,
    is_corpus,
    is_sharded,
    make_tokenizer,
    read_facts,
    read_merges,
    read_tokens,
)
from lib.runs.engine.options import Options
from lib.runs.flags import UsageError

GRAY_MEAN, GRAY_STD = (DIGITS_MEAN,), (DIGITS_STD,)
N_PICTURES, N_SEQUENCES, PICTURE_SIDE = 50_000, 1024, 32


class Source(Protocol):
    """Items by index."""

    n: int
    n_held_out: int
    n_test: int  # items of the data's own test split, which are the last ones; if there are any, they are held out
    codec: "Codec | None"  # what made the tokens from text
    is_on_host: ClassVar[
        bool
    ]  # ``fetch`` reads files, so it takes indices on the host, where reading them waits for nothing

    @property
    def made_bytes(self) -> int:
        """Bytes of synthetic data, which ``to`` makes."""

    def hold_out(self, n: int) -> None:
        """Take n items out of training: afterwards they have the indices ``self.n`` to ``self.n + n - 1``."""

    def to(self, device: torch.device) -> None:
        """Move the data to the device, or generate it there."""

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the items with these indices, ``[B]`` int64 on the device."""

    def fingerprint(self) -> str | None:
        """A digest of all that a model learns from these data and their tokenizer, read on the host;
        None for random data.
        """


@dataclass
class Pictures:
    """Images and their classes as they were loaded; the model's inputs are computed from them on the device.

    Attributes:
        pictures: ``[n, ch, height, width]``, uint8, or float32 from 0 to 1; None for random ones,
            generated on the device.
        labels: ``[n]``.
        shape: ``(ch, height, width)`` of an image.
        n_classes: Number of classes.
        n: Number of images to train on.
        size: Side of the model's square input, in pixels.
        dtype: Dtype of the model's input.
        seed: Seed of random images, and of the choice of those that are held out.
        n_held_out: Number of further images, which are not trained on.
        n_test: Number of images in the data's own test split, the last of n; if there are any, only they are held out.
        classes: Name of each class.
    """

    pictures: Tensor | None
    labels: Tensor | None
    shape: tuple[int, int, int]
    n_classes: int
    n: int
    size: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    n_held_out: int = 0
    n_test: int = 0
    classes: tuple[str, ...] = ()
    codec: "Codec | None" = None
    is_on_host: ClassVar[bool] = False

    @property
    def made_bytes(self) -> int:
        return 0 if self.pictures is not None else (self.n + self.n_held_out) * (math.prod(self.shape) + 8)

    def hold_out(self, n: int) -> None:
        """Hold out the test split, or, without one, images at random, because data are often sorted by class."""
        if self.n_test:
            self.n, self.n_held_out = self.n - self.n_test, n
            return
        self.n, self.n_held_out = self.n - n, n
        if self.pictures is not None and self.labels is not None:
            order = torch.randperm(self.n + n, generator=torch.Generator().manual_seed(self.seed))
            self.pictures, self.labels = self.pictures[order], self.labels[order]

    def to(self, device: torch.device) -> None:
        if self.pictures is None:
            generator = torch.Generator(device).manual_seed(self.seed)
            made: dict[str, Any] = {"generator": generator, "device": device}
            n = self.n + self.n_held_out
            self.pictures = torch.randint(256, (n, *self.shape), dtype=torch.uint8, **made)
            self.labels = torch.randint(self.n_classes, (n,), **made)
        assert self.labels is not None
        self.pictures, self.labels = self.pictures.to(device), self.labels.to(device)
        mean, std = (MEAN, STD) if self.shape[0] == 3 else (GRAY_MEAN, GRAY_STD)
        self._mean, self._std = (torch.tensor(x, device=device) for x in (mean, std))

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        assert self.pictures is not None
        assert self.labels is not None
        prepared = prepare_images(self.pictures[numbers], self.size, self.dtype, self._mean, self._std)
        return prepared, self.labels[numbers]

    def fingerprint(self) -> str | None:
        if self.pictures is None or self.labels is None:
            return None
        return _digest([self.pictures, self.labels], self.classes)


def _digest(tensors: list[Tensor], beside: object) -> str:
    """Sixteen hexadecimal digits that change with any byte of the tensors and with what ``repr`` shows of the rest."""
    found = hashlib.blake2b(repr(beside).encode(errors="backslashreplace"), digest_size=8)
    for tensor in tensors:
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()


def open_pictures(options: Options, channels: int, n_classes: int, size: int) -> Pictures:
    """The images that ``--data`` names, still on the host.

    Args:
        options: Options of the run.
        channels, n_classes, size: Channels, classes and side of synthetic images.

    Raises:
        FileNotFoundError: there is no such data.
        ValueError: a row cannot be read.
        UsageError: the data's own test split has images of another size, or fewer than a batch.
    """
    if options.data == "synthetic":
        side = min(PICTURE_SIDE, size)
        n = options.items or N_PICTURES
        shape = (channels, side, side)
        return Pictures(pictures=None, labels=None, shape=shape, n_classes=n_classes, n=n, seed=options.seed)
    source = "digits" if options.data == "embedded" else options.data
    assert source is not None
    data = load_images(source, image=options.column, limit=options.limit)
    n_test = 0
    if options.eval_every and has_test_split(source):
        test = load_images(source, "test", image=options.column, limit=options.limit)
        n_test, data = len(test), _join(data, test, options)
    pictures, scaled = data.images, (data.images * 255.0).round()
    if torch.equal(scaled / 255.0, pictures):
        pictures = scaled.to(torch.uint8)
    if pictures.shape[1] not in (1, 3):
        raise ValueError(f"{source}: images have {pictures.shape[1]} channels, expected 1 or 3")
    ch, height, width = pictures.shape[1:]
    n_found = len(data.classes)
    shape = (ch, height, width)
    return Pictures(
        pictures=pictures,
        labels=data.labels,
        shape=shape,
        n_classes=n_found,
        n=len(data),
        seed=options.seed,
        n_test=n_test,
        classes=data.classes,
    )


def _join(train: Images, test: Images, options: Options) -> Images:
    """The pictures of both splits, those of the test at the end.

    Raises:
        UsageError: their sizes differ, or the test has fewer pictures than a batch, or a class that training lacks.
    """
    sizes = [tuple(split.images.shape[1:]) for split in (train, test)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"--data {options.data}: the pictures of the test are {sizes[1]} and those to train on "
            f"{sizes[0]} (channels, height, width); expected one size"
        )
    if len(test) < options.batch:
        raise UsageError(
            f"--batch {options.batch}: the test split of --data {options.data} has {len(test)} images; "
            "expected a batch of at most as many"
        )
    classes, labels = train.classes, test.labels
    if classes + test.classes[len(classes) :] == tuple(map(str, range(len(test.classes)))):  # numbers without names
        classes = test.classes
    elif order := order_of(test.classes, classes, f"the test split of --data {options.data}"):
        labels = torch.tensor(order)[labels]
    images = torch.cat([train.images, test.images])
    return Images(images=images, labels=torch.cat([train.labels, labels]), classes=classes)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A tokenizer: text to ids and back.

    Attributes:
        encode: Ids of a text.
        decode: Text of ids from 0 to ``n_tokens - 1``; bytes that are not UTF-8 become U+FFFD.
        n_tokens: Number of ids that it has.
        merges, special_tokens: The parts of chapter 1's tokenizer: no merges if ids are bytes; None for other
            tokenizers.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    n_tokens: int
    merges: Sequence[tuple[bytes, bytes]] | None = None
    special_tokens: Sequence[str] = ()


@dataclass
class Tokens:
    """One long row of tokens, divided into windows; the targets are shifted by one token.

    Attributes:
        tokens: Ids ``[N]``; None for random ones, generated on the device.
        length: Tokens T in a window.
        vocab_size: Vocabulary of random tokens.
        n: Number of windows to train on.
        seed: Seed of random tokens.
        codec: The tokenizer that made the tokens from text; None for random tokens.
        n_held_out: Number of further windows, which are not trained on.
    """

    tokens: Tensor | None
    length: int
    vocab_size: int
    n: int
    seed: int = 0
    codec: Codec | None = None
    n_held_out: int = 0
    n_test: int = 0
    is_on_host: ClassVar[bool] = False

    @property
    def made_bytes(self) -> int:
        return 0 if self.tokens is not None else 4 * (self.n + self.n_held_out) * self.length

    def hold_out(self, n: int) -> None:
        """Hold out the end of the text, in one piece: windows from its middle would continue what was trained on."""
        self.n, self.n_held_out = self.n - n, n

    def to(self, device: torch.device) -> None:
        if self.tokens is None:
            generator = torch.Generator(device).manual_seed(self.seed)
            shape = ((self.n + self.n_held_out) * self.length + 1,)
            self.tokens = torch.randint(self.vocab_size, shape, dtype=torch.int32, generator=generator, device=device)
        self.tokens = self.tokens.to(device)
        self._steps = torch.arange(self.length + 1, device=device)

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        assert self.tokens is not None
        rows = self.tokens[numbers[:, None] * self.length + self._steps].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def fingerprint(self) -> str | None:
        if self.tokens is None:
            return None
        return _digest([self.tokens], self.codec and (self.codec.merges, self.codec.special_tokens))


@dataclass
class Shards:
    """Chapter 26's shards, divided into the same windows as ``Tokens``: only the windows of a batch are read.

    Attributes:
        folder: What ``write_shards`` wrote.
        length: Tokens T in a window.
        codec: The tokenizer that made the tokens from text; None if the folder has none.
        n: Number of windows to train on.
        n_held_out: Number of further windows, which are not trained on.
    """

    folder: Path
    length: int
    codec: Codec | None = None
    n: int = 0
    n_held_out: int = 0
    n_test: int = 0
    is_on_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from lib.data import ShardReader

        self._reader = ShardReader(self.folder, 1, self.length)  # in order: the run chooses the windows
        self.n = self._reader.n_windows

    @property
    def made_bytes(self) -> int:
        return 0

    def hold_out(self, n: int) -> None:
        """Hold out the end of the row, in one piece."""
        self.n, self.n_held_out = self.n - n, n

    def to(self, device: torch.device) -> None:
        self.device = device

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.cat(rows) for rows in zip(*map(self._window, numbers.tolist()), strict=True))
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _window(self, i: int) -> tuple[Tensor, Tensor]:
        self._reader.position = i
        return next(self._reader)

    def fingerprint(self) -> str | None:
        """A digest of the manifest, which holds a digest of each shard, and of the tokenizer."""
        return _digest([], (self._reader.manifest, self.codec and (self.codec.merges, self.codec.special_tokens)))


def open_tokens(options: Options, vocab_size: int, length: int) -> Tokens | Shards:
    """The tokens of the text that ``--data`` names.

    Raises:
        FileNotFoundError: there is no such data.
        ValueError: the text cannot be read, or has too few tokens for one window.
    """
    if options.data == "synthetic":
        n = options.items or N_SEQUENCES
        return Tokens(tokens=None, length=length, vocab_size=vocab_size, n=n, seed=options.seed)
    if is_corpus(options.data or ""):
        return _corpus(Path(str(options.data)), vocab_size, length)
    text = _text(options)
    seen = text[: int(len(text) * (1 - (options.held_out or 0.0)))]
    codec = make_codec(options.tokenizer or "bytes", seen, vocab_size)
    ids = torch.tensor(codec.encode(text), dtype=torch.int32)
    n = (len(ids) - 1) // length
    if n < 1:
        raise ValueError(f"{options.data}: {len(ids)} tokens are too few for one window of {length} and its targets")
    return Tokens(tokens=ids, length=length, vocab_size=vocab_size, n=n, codec=codec)


def _corpus(folder: Path, vocab_size: int, length: int) -> Tokens | Shards:
    """The tokens that ``lib.runs.corpus``, or ``write_shards`` alone, has written into a folder."""
    facts, codec = read_facts(folder), None
    if facts["vocab_size"] > vocab_size:
        raise UsageError(
            f"--data {folder} has {facts['vocab_size']:,} different tokens, "
            f"but the model's vocabulary has {vocab_size:,}: "
            "expected a larger model, or a corpus with a smaller --vocab"
        )
    if has_tokenizer(folder):
        tokenizer = make_tokenizer(merges := read_merges(folder))
        made: dict[str, Any] = {"merges": merges, "special_tokens": tokenizer.special_tokens}
        codec = Codec(encode=tokenizer.encode, decode=tokenizer.decode, n_tokens=facts["vocab_size"], **made)
    if is_sharded(folder):
        return Shards(folder, length, codec)
    ids = torch.from_numpy(read_tokens(folder)).int()
    if (n := (len(ids) - 1) // length) < 1:
        raise ValueError(f"{folder}: {len(ids)} tokens are too few for one window of {length} and its targets")
    return Tokens(tokens=ids, length=length, vocab_size=vocab_size, n=n, codec=codec)


def _text(options: Options) -> str:
    assert options.data is not None
    if options.data == "embedded":
        return language_reference()
    if Path(options.data).suffix in (".txt", ".md") and options.limit is None:
        return load_text(options.data)
    documents = stream_text(options.data, column=options.column or "text", progress=False)
    return "\n".join(islice(documents, options.limit))  # stop there: the hub would send all of it


def make_codec(name: str, text: str, vocab_size: int) -> Codec:
    """A tokenizer by its name: bytes, chapter 1's BPE trained on the text, or GPT-2's own.

    Raises:
        UsageError: the model's vocabulary is too small for it, or a package is missing.
    """
    needed = {"bytes": 256, "bpe": 257, "gpt2": 50_257}[name]
    if vocab_size < needed:
        raise UsageError(
            f"--tokenizer {name} needs {needed} tokens, but the model's vocabulary has {vocab_size}: "
            "expected bytes or bpe"
        )
    if name == "bytes":
        return Codec(
            encode=lambda document: list(document.encode()),
            decode=lambda ids: bytes(ids).decode(errors="replace"),
            n_tokens=256,
            merges=(),
        )
    if name == "bpe":
        from lib.tokenization import BPETokenizer, train_bpe

        vocab, merges = train_bpe(text, min(vocab_size, 4096))
        bpe = BPETokenizer(vocab, merges)
        return Codec(encode=bpe.encode, decode=bpe.decode, n_tokens=len(vocab), merges=merges)
    try:
        import tiktoken
    except ImportError:
        raise UsageError(
            "--tokenizer gpt2 needs the package tiktoken, which is not installed: pip install tiktoken"
        ) from None
    gpt2 = tiktoken.get_encoding("gpt2")
    return Codec(encode=gpt2.encode_ordinary, decode=gpt2.decode, n_tokens=50_257)
