"""A corpus: text gathered, cleaned and divided, a tokenizer learned from it,
and one row of tokens (``lib.runs.corpus``).
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from lib.given.data.shards import open_shards
from lib.runs.data.store import Document, Lines, Store, batched, save, streamed

PACKAGES = (
    "debian-handbook", "debian-policy", "debian-reference-en", "developers-reference", "emacs-el", "fortunes",
    "git-doc", "gnome-user-docs", "golang-1.19-src", "installation-guide-amd64",
    "libreoffice-help-en-us", "linux-source-6.1", "manpages", "manpages-dev", "nodejs-doc", "openjdk-17-source",
    "perl-doc",
    "postgresql-doc-15", "python-django-doc", "python-pandas-doc", "python-scipy-doc", "python-sklearn-doc",
    "python-sympy-doc", "python3.11-doc", "rust-doc", "sqlite3-doc", "vim-doc",
)  # fmt: skip
PLAIN = {
    "", ".txt", ".md", ".rst", ".dat", ".pod", ".texi", ".tex", ".dict", ".1", ".2", ".3", ".4", ".5", ".6", ".7", ".8",
    ".9",
}  # fmt: skip
CODE = {".c", ".h", ".py", ".go", ".java", ".el", ".pl", ".pm", ".rs", ".js", ".sh", ".s", ".S", ".hs", ".erl"}
MARKED_UP = {".html", ".htm", ".page", ".xhp"}
BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, ValueError,
    RuntimeError,
)  # fmt: skip
"""What reading a damaged archive raises (RuntimeError: a zip with a password). Some are broken on purpose, as tests."""
ARCHIVES = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".tgz")
END = "<|endoftext|>"
WORK = "work"
"""Folder of a corpus that is not finished."""
ROWS = 1024
"""Documents of a file of tokens, until they are written as a corpus."""
VOCAB_SIZE = 50_257  # GPT-2's: 256 bytes, 50,000 merges and the end of a document
LARGEST = 4 * 2**20  # bytes of a file that are read
SHORTEST, BLOCK = 400, 200  # characters: of a document, and of a block that is dropped where it comes again
LICENCE = re.compile(
    r"common-licenses/([A-Z][\w.-]*\w)"
    r"|((?:PostgreSQL|PSF|BSD|MIT|Apache|Vim|Artistic) [Ll]icen[cs]e|[Pp]ublic [Dd]omain)"
)
FOREIGN = re.compile(
    r"/(locale|i18n|translations|po)/"
    r"|[._-](ar|cs|da|de|es|fa|fr|he|id|it|ja|ko|nb|nl|pt|ro|ru|sv|tr|uk|vi|zh)(-[a-z]+|_[A-Z]+)?(\.|/)"
    r"|/(ar|cs|da|de-DE|el|es-ES|fa|fr-FR|id-ID|it-IT|ja-JP|ko-KR|nb-NO|nl-NL|pl-PL|pt-BR|ro-RO|ru-RU|sv|tr-TR|uk"
    r"|vi-VN|zh-CN|zh-TW)/",
    re.IGNORECASE,
)


@dataclass
class Source:
    """Where documents come from, and what was kept of them."""

    name: str
    version: str
    licences: list[str]
    documents: int = 0
    characters: int = 0
    code_characters: int = 0

    def add(self, document: Document, longest: int | None) -> Document:
        """Count a document and keep only its beginning: a file of a million lines would outweigh a thousand others."""
        text = document.text[:longest]
        self.documents += 1
        self.characters += len(text)
        self.code_characters += len(text) * document.is_code
        return Document(f"{self.name}/{document.place}", text, document.is_code)


# ---- gather ----------------------------------------------------------------------------------------------------------


def unpacked(package: str, folder: Path) -> Source:
    """Download a Debian package and unpack it into the folder, without installing it.

    Raises:
        RuntimeError: There is no apt, or apt cannot find or download the package; the message is apt's own.
    """
    for command in (["apt-get", "download", "-qq", package], ["dpkg-deb", "-x", "{deb}", "tree"]):
        debs = sorted(folder.glob("*.deb"))
        words = [word.format(deb=debs[0] if debs else "") for word in command]
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError(f"package {package}: there is no {command[0]} here; expected Debian or Ubuntu") from None
        if done.returncode:
            why = " ".join(re.findall(r"^E: (.*)", done.stderr, re.MULTILINE)) or " ".join(done.stderr.split())
            raise RuntimeError(f"package {package}: {' '.join(command[:2])} failed: {why}")
    version = sorted(folder.glob("*.deb"))[0].name.split("_")[1].replace("%3a", ":")
    copyright_ = folder / "tree/usr/share/doc" / package / "copyright"
    text = copyright_.read_text(errors="replace") if copyright_.exists() else ""
    named = re.findall(r"^License: *(\S[^\n]*)", text, re.MULTILINE) or [
        "".join(pair) for pair in LICENCE.findall(text)
    ]
    return Source(package, version, sorted(set(named)) or ["see the package's copyright file"])


def files(tree: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of text below a folder, with its place there; archives are looked into."""
    for path in sorted(tree.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        place = str(path.relative_to(tree))
        if path.name.endswith(ARCHIVES) or path.suffix == ".zip":
            yield from ((f"{place}/{name}", data) for name, data in _inside(path))
        elif is_text(place):
            try:
                with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                    data = file.read(LARGEST)
            except BROKEN:
                continue
            yield place, data


def in_order(tree: Path, spool: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of text below a folder in the order of a hash of its place: most sources are not read to their end.

    The files are written one after the other into ``spool``, so that only one of them is in memory.
    """
    with spool.open("w+b") as file:
        found = [(place, file.tell(), file.write(data)) for place, data in files(tree)]
        for place, start, n in sorted(found, key=lambda item: _digest_of(item[0])):
            file.seek(start)
            yield place, file.read(n)


def _digest_of(place: str, person: bytes = b"") -> bytes:
    return hashlib.blake2b(place.encode(errors="replace"), person=person).digest()


def _inside(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of text in an archive, as far as it can be read."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in filter(is_text, archive.namelist()):
                    yield name, archive.open(name).read(LARGEST)
        else:
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.isfile() and is_text(member.name) and (file := tar.extractfile(member)):
                        yield member.name, file.read(LARGEST)
    except BROKEN:
        return


def suffix(place: str) -> str:
    """The last suffix, apart from that of a compression."""
    return Path(re.sub(r"\.gz$", "", place)).suffix


def is_text(place: str) -> bool:
    """Whether a file's name says that it is English or code."""
    return suffix(place) in PLAIN | CODE | MARKED_UP and not FOREIGN.search(place)


# ---- clean -----------------------------------------------------------------------------------------------------------


class _Words(HTMLParser):
    """Collects the text of a page, without its navigation and its scripts."""

    IGNORED = ("script", "style", "nav", "head", "footer", "svg", "button", "form")
    BREAKS = (
        "p", "div", "li", "tr", "pre", "h1", "h2", "h3", "h4", "dt", "dd", "br", "section", "table", "item",
        "paragraph",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []
        self.ignored: list[str] = []
        self.code = 0

    def handle_starttag(self, tag, attrs):
        if tag in self.IGNORED:
            self.ignored.append(tag)
        self.code += tag == "pre"
        if tag in self.BREAKS:
            self.pieces.append("\n\n" if tag[0] in "ph" else "\n")

    def handle_endtag(self, tag):
        if tag in self.ignored:
            del self.ignored[self.ignored.index(tag) :]
        self.code -= tag == "pre"
        if tag in self.BREAKS:
            self.pieces.append("\n")

    def handle_data(self, data):
        if not self.ignored:
            self.pieces.append(data if self.code > 0 else re.sub(r"\s+", " ", data))


def clean(place: str, data: bytes, extract: Callable[[str], str] | None = None) -> Document | None:
    """A file as a document; None if it holds hardly any English text or code.

    Args:
        place: Its name tells what it is.
        data: Its bytes.
        extract: What makes text of a page, in place of this module's own.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    kind = suffix(place)
    if extract:
        text = extract(text)
    elif kind in MARKED_UP:
        page = _Words()
        try:
            page.feed(text)
        except AssertionError:  # a declaration that HTML does not know
            return None
        text = "".join(page.pieces)
    elif re.fullmatch(r"\.\d", kind):
        text = re.sub(r"^[.'].*\n|\\f[A-Z]|\\[&-]", "", text, flags=re.MULTILINE)  # a manual page's commands
    text = re.sub(r"[ \t]+$", "", text.replace("\r", ""), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    lines = text.count("\n") + 1
    letters = sum(map(str.isalpha, text[:5000])) / max(1, len(text[:5000]))
    if len(text) < SHORTEST or len(text) / lines > 400 or letters < 0.4 or len(text.encode()) > 1.03 * len(text):
        return None
    return Document(place, text, kind in CODE)


@dataclass
class Seen:
    """Remembers the blocks seen so far: licences head a thousand files, and two packages may bring the same page."""

    blocks: set[bytes] = field(default_factory=set)

    def new_part(self, document: Document) -> Document | None:
        """The document without the blocks that have come before; None if little is left."""
        kept = []
        for block in document.text.split("\n\n"):
            if len(block) >= BLOCK:
                mark = hashlib.blake2b(re.sub(r"\W+", " ", block).encode(), digest_size=8).digest()
                if mark in self.blocks:
                    continue
                self.blocks.add(mark)
            kept.append(block)
        text = "\n\n".join(kept)
        return Document(document.place, text, document.is_code) if len(text) >= SHORTEST else None


@contextmanager
def package_files(name: str) -> Iterator[tuple[Source, Iterator[tuple[str, bytes]]]]:
    """A Debian package, and its files of text in order.

    Raises:
        RuntimeError: There is no apt, or apt cannot find or download the package.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = unpacked(name, Path(folder))
        except RuntimeError as error:
            raise RuntimeError(f"--packages {name}: {error}; or read other data, with --dataset") from None
        yield source, in_order(Path(folder, "tree"), Path(folder, "spool"))
        print(f"{name}: {source.documents:,} documents, {source.characters / 1e6:.1f} million characters", flush=True)


def documents_of_packages(
    names: Iterable[str], most: int, longest: int | None, found: list[Source]
) -> Iterator[Document]:
    """Documents of Debian packages, at most ``most`` characters of each; ``found`` gets a `Source` for each package."""
    seen = Seen()
    for name in dict.fromkeys(names):
        with package_files(name) as (source, each), ProcessPoolExecutor(os.cpu_count()) as workers:
            found.append(source)
            batches = streamed(workers, _clean, batched(each, lambda item: len(item[1])))
            for cleaned in chain.from_iterable(batches):
                document = cleaned and seen.new_part(cleaned)
                if source.characters >= most:
                    batches.close()
                    break
                if document:
                    yield source.add(document, longest)


def _clean(items: list[tuple[str, bytes]]) -> list[Document | None]:
    return [clean(*item) for item in items]


def texts_of_dataset(name: str, column: str, limit: int | None) -> tuple[Source, Iterator[tuple[str, str]]]:
    """A file, a folder or a data set of the hub, and its texts with their numbers, as chapter 1 streams them."""
    from lib.given.data.corpora import stream_text

    if Path(name).is_file() and not Path(name).stat().st_size:
        raise ValueError(f"--dataset {name} is an empty file: expected documents")
    texts = islice(stream_text(name, column=column, progress=False), limit)
    return Source(name, "", ["see the data set's card"]), ((str(i), text) for i, text in enumerate(texts))


def documents_of_dataset(
    name: str, column: str, limit: int | None, longest: int | None, found: list[Source]
) -> Iterator[Document]:
    """The documents of a file, a folder or a data set of the hub."""
    source, texts = texts_of_dataset(name, column, limit)
    found.append(source)
    return (source.add(Document(place, text), longest) for place, text in texts)


# ---- tokens ----------------------------------------------------------------------------------------------------------


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


def make_tokenizer(merges: list[tuple[bytes, bytes]], special_tokens: Sequence[str] = (END,)):
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
        for name in ("vocab_size", *["held_out_tokens"] * has_tokenizer(folder)):
            facts[name] / facts["tokens"]
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
        keys.append(int.from_bytes(_digest_of(d.place, b"order")[:8], "big"))
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
    with ProcessPoolExecutor(initializer=_load, initargs=(merges,)) as pool:
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
        f"{folder}: {counts[0]:,} tokens to train on and {counts[1]:,} held out, "
        f"of {facts['characters'] / 1e6:.0f} million characters"
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
