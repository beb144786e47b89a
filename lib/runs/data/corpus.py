"""A corpus: documents that are divided, a tokenizer learned from them, and one row of tokens (``lib.runs.corpus``)."""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lib.given.data.shards import open_shards
from lib.runs.data.gathering import Source, digest_of
from lib.runs.data.store import Lines, Store, batched, make_pool, save, streamed

END = "<|endoftext|>"
WORK = "work"
"""Folder of a corpus that is not finished."""
ROWS = 1024
"""Documents of a file of tokens, until they are written as a corpus."""
VOCAB_SIZE = 50_257  # GPT-2's: 256 bytes, 50,000 merges and the end of a document


def is_held_out(place: str, share: float) -> bool:
    """Whether a document is held out: a hash of its place decides,
    so that more sources change nothing for the others.
    """
    return (
        int.from_bytes(hashlib.blake2b(place.encode(errors="replace"), digest_size=4).digest(), "big") < share * 2**32
    )


_tokenizers: list[Any] = []
"""A worker's tokenizer, which it makes once."""


def _load(merges: list[tuple[bytes, bytes]]) -> None:
    _tokenizers.append(make_tokenizer(merges, []))


def _encode(texts: list[str]) -> bytes:
    """Each document's tokens and the end of a document, which no text in a document becomes."""
    tokenizer = _tokenizers[0]
    end = len(tokenizer.vocab)
    row = chain.from_iterable([*tokenizer.encode(text), end] for text in texts)
    return np.fromiter(row, dtype=np.uint16).tobytes()


def make_tokenizer(merges: list[tuple[bytes, bytes]], special_tokens: Sequence[str] = (END,)) -> Any:
    """Chapter 1's tokenizer with these merges, and a token for the end of a document.

    Args:
        merges: The merges of a corpus.
        special_tokens: Empty for the text of a document, in which "<|endoftext|>" is thirteen
            characters like any others.
    """
    from lib.tokenization import BPETokenizer

    vocab = [bytes([i]) for i in range(256)] + [left + right for left, right in merges]
    return BPETokenizer(dict(enumerate(vocab)), merges, special_tokens)


def is_corpus(data: str) -> bool:
    """Whether ``--data`` names a folder that this program, or chapter 26's ``write_shards`` alone, wrote to its end."""
    return Path(data, "corpus.json").is_file() or (is_sharded(Path(data)) and not Path(data, WORK).exists())


def is_sharded(folder: Path) -> bool:
    """Whether the tokens are in chapter 26's shards."""
    return (folder / "manifest.json").is_file()


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder knows what its tokens mean: shards alone do not."""
    return (folder / "corpus.json").is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """What ``corpus.json`` says, or, where there are only shards, their manifest.

    Raises:
        ValueError: It is not what this program writes.
    """
    path = folder / ("corpus.json" if has_tokenizer(folder) else "manifest.json")
    try:
        facts = json.loads(path.read_text())
        for name in ("vocab_size", "held_out_tokens") if has_tokenizer(folder) else ("vocab_size",):
            facts[name] / facts["tokens"]  # both are numbers, and the second is not 0
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is damaged ({error}): make the corpus again") from None
    return facts


def read_tokens(folder: Path) -> np.ndarray:
    """All tokens of a corpus, the held-out ones last.

    Raises:
        FileNotFoundError: There is no ``tokens.bin``.
        ValueError: Its length is not what ``corpus.json`` says.
    """
    if is_sharded(folder):
        return np.concatenate(open_shards(folder)[1])
    path, expected = folder / "tokens.bin", read_facts(folder)["tokens"]
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has a corpus.json but no tokens.bin: make the corpus again")
    if path.stat().st_size != 2 * expected:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, expected 2 for each of the {expected:,} tokens "
            "that corpus.json counts: "
            "make the corpus again"
        )
    return np.fromfile(path, dtype=np.uint16)


def held_out_share(data: str) -> float | None:
    """The share of a corpus's tokens that are held out; None if the data are not a corpus, or do not say."""
    if not is_corpus(data) or not has_tokenizer(Path(data)):
        return None
    facts = read_facts(Path(data))
    return facts["held_out_tokens"] / facts["tokens"]


def read_merges(folder: Path) -> list[tuple[bytes, bytes]]:
    """The merges that ``merges.json`` of a corpus holds, in order."""
    rows = json.loads((folder / "merges.json").read_text())
    return [(left.encode("latin-1"), right.encode("latin-1")) for left, right in rows]


def learn_merges(texts: Sequence[str], n_characters: int, sample: int, vocab: int) -> list[tuple[bytes, bytes]]:
    """Chapter 1's ``train_bpe`` on documents that are spread over the corpus, with about ``sample`` characters."""
    from lib.tokenization import train_bpe

    some = list(texts[:: max(1, n_characters // sample)])
    between = END
    while any(between in text for text in some):  # what a document holds is learned from, not read as an end
        between = f"<{between}>"
    return train_bpe(between.join(some), vocab, [between])[1]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a corpus is written.

    Attributes:
        held_out: Share of the documents that is held out.
        sample: Characters that the tokenizer learns from.
        vocab: Size of the vocabulary.
        shard: Tokens of a shard; None writes one file ``tokens.bin``.
    """

    held_out: float
    sample: int
    vocab: int
    shard: int | None = None


def divided(store: Store, share: float) -> tuple[list[Lines], list[int]]:
    """The documents to train on and those to hold out, in the order of a hash, and the characters of each part.

    Raises:
        ValueError: One of the two has no documents.
    """
    keys, held, sizes = array("Q"), array("b"), array("q")
    for d in store:
        keys.append(int.from_bytes(digest_of(d.place, b"order")[:8], "big"))
        held.append(is_held_out(d.place, share))
        sizes.append(len(d.text))
    order, is_held = np.argsort(np.array(keys), kind="stable"), np.array(held, bool)
    parts = [order[is_held[order] == which] for which in (False, True)]
    if not all(map(len, parts)):
        raise ValueError(f"{len(keys)} documents: expected some to train on and some, {share:.1%}, to hold out")
    lines = store.lines()
    return [lines[part] for part in parts], [int(np.array(sizes)[part].sum()) for part in parts]


def write(folder: Path, store: Store, found: list[Source], form: Form, **beside: Any) -> None:
    """Learn the tokenizer on the training documents, and write all files into the folder, ``corpus.json`` last.

    Args:
        folder: The corpus; what is unfinished is in its folder ``work``.
        store: All documents.
        found: Where they come from.
        form: How the corpus is written.
        beside: Further facts for ``corpus.json``.
    """
    parts, characters = divided(store, form.held_out)
    (folder / "corpus.json").unlink(missing_ok=True)  # the folder is not a corpus until all files are written again
    learned = folder / WORK / "merges.json"
    if not learned.exists():
        merges = learn_merges(parts[0], characters[0], form.sample, form.vocab)
        save(
            learned, json.dumps([[left.decode("latin-1"), right.decode("latin-1")] for left, right in merges]).encode()
        )
    save(folder / "merges.json", learned.read_bytes())
    merges = read_merges(folder)
    with make_pool(_load, merges) as pool:
        rows = [encoded(folder / WORK / name, part, pool) for name, part in zip(("train", "held"), parts, strict=True)]
    counts = [sum(path.stat().st_size // 2 for path in paths) for paths in rows]
    facts: dict[str, Any] = {
        "tokens": sum(counts), "held_out_tokens": counts[1], "vocab_size": 257 + len(merges),
        "documents": sum(map(len, parts)), "characters": sum(characters),
        **write_tokens(folder, list(chain(*rows)), 256 + len(merges), form.shard),
        "sources": [asdict(source) for source in found], **beside,
    }  # fmt: skip
    save(folder / "corpus.json", json.dumps(facts, indent=1).encode())
    print(
        f"{folder}: {counts[0]:,} tokens to train on and {counts[1]:,} held out, of {facts['characters']:,} characters"
    )


def encoded(folder: Path, texts: Lines, pool: Executor) -> list[Path]:
    """Files with the tokens of the texts, in order; those that are finished are not written again."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:06d}.bin" for i in range(-(-len(texts) // ROWS))]
    for i, path in enumerate(paths):
        if not path.exists():
            batches = batched(texts[i * ROWS : (i + 1) * ROWS], len)
            save(path, b"".join(streamed(pool, _encode, batches)))
    return paths


def write_tokens(folder: Path, paths: list[Path], end: int, shard: int | None) -> dict[str, Any]:
    """Write one file, or shards with a manifest, and return what ``corpus.json`` says of it."""
    if shard:
        from lib.data import write_shards

        documents: Any = (ids for path in paths for ids in _documents(path, end))
        write_shards(folder, documents, shard, end + 1, end)
        (folder / "tokens.bin").unlink(missing_ok=True)
        return {}
    (folder / "manifest.json").unlink(missing_ok=True)
    digest = hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as out:
        for path in paths:
            digest.update(data := path.read_bytes())
            out.write(data)
    return {"sha256": digest.hexdigest()}


def _documents(path: Path, end: int) -> Iterator[np.ndarray]:
    """The ids of each document of a file."""
    row = np.fromfile(path, dtype=np.uint16)
    start = 0
    for stop in np.flatnonzero(row == end).tolist():
        yield row[start:stop]
        start = stop + 1


def start_work(folder: Path, request: dict[str, Any]) -> Path:
    """The folder of what is unfinished: what another try of the same request left there stays.

    Args:
        folder: The corpus.
        request: All that decides what the corpus becomes.
    """
    work = folder / WORK
    text = json.dumps(request, indent=1)
    asked = work / "request.json"
    if not asked.exists() or asked.read_text() != text:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        save(asked, text.encode())
    return work


def make_place(folder: Path) -> None:
    """Create the folder first, so that nothing is gathered that could not be written.

    Raises:
        ValueError: It cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot create the folder ({error.strerror}); expected one that can be written to"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}: no permission to write there; expected a folder that can be written to")
