"""A corpus: text gathered, cleaned and divided, a tokenizer learned from it,
and one row of tokens (``lib.runs.corpus``).
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

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
class Document:
    """A text with its place, which decides whether it is held out."""

    place: str
    text: str
    is_code: bool = False


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


def clean(place: str, data: bytes) -> Document | None:
    """A file as a document; None if it holds hardly any English text or code."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    kind = suffix(place)
    if kind in MARKED_UP:
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


def documents_of_packages(
    names: Iterable[str], most: int, longest: int | None, found: list[Source]
) -> Iterator[Document]:
    """Documents of Debian packages, at most ``most`` characters of each; ``found`` gets a `Source` for each package."""
    seen = Seen()
    for name in dict.fromkeys(names):
        with tempfile.TemporaryDirectory() as folder:
            try:
                source = unpacked(name, Path(folder))
            except RuntimeError as error:
                raise RuntimeError(f"--packages {name}: {error}; or read other data, with --dataset") from None
            found.append(source)
            each = sorted(
                files(Path(folder, "tree")), key=lambda item: hashlib.blake2b(item[0].encode(errors="replace")).digest()
            )
        with ProcessPoolExecutor(os.cpu_count()) as workers:
            for cleaned in workers.map(_clean, each, chunksize=64):
                document = cleaned and seen.new_part(cleaned)
                if source.characters >= most:
                    workers.shutdown(wait=False, cancel_futures=True)
                    break
                if document:
                    yield source.add(document, longest)
        print(f"{name}: {source.documents:,} documents, {source.characters / 1e6:.1f} million characters", flush=True)


def _clean(item: tuple[str, bytes]) -> Document | None:
    return clean(*item)


def documents_of_dataset(
    name: str, column: str, limit: int | None, longest: int | None, found: list[Source]
) -> Iterator[Document]:
    """The documents of a file, a folder or a data set of the hub, as chapter 1 streams them."""
    from lib.given.data.corpora import stream_text

    if Path(name).is_file() and not Path(name).stat().st_size:
        raise ValueError(f"--dataset {name} is an empty file: expected documents")
    source = Source(name, "", ["see the data set's card"])
    found.append(source)
    for i, text in enumerate(stream_text(name, column=column, progress=False)):
        if limit is not None and i == limit:
            return
        yield source.add(Document(str(i), text), longest)


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


def _encode(texts: list[str]) -> np.ndarray:
    """Each document's tokens and the end of a document, which no text in a document becomes."""
    tokenizer = _tokenizers[0]
    end = len(tokenizer.vocab)
    return np.fromiter(chain.from_iterable([*tokenizer.encode(text), end] for text in texts), dtype=np.uint16)


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
    """Whether ``--data`` names a folder that this program wrote."""
    return Path(data, "corpus.json").is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """What ``corpus.json`` says.

    Raises:
        ValueError: It is not what this program writes.
    """
    try:
        facts = json.loads((folder / "corpus.json").read_text())
        facts["held_out_tokens"] / facts["tokens"], facts["vocab_size"]
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"{folder / 'corpus.json'} is damaged ({error}): make the corpus again") from None
    return facts


def read_tokens(folder: Path) -> np.ndarray:
    """All tokens of a corpus, the held-out ones last.

    Raises:
        FileNotFoundError: There is no ``tokens.bin``.
        ValueError: Its length is not what ``corpus.json`` says.
    """
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
    """The share of a corpus's tokens that are held out; None if the data are not a corpus."""
    if not is_corpus(data):
        return None
    facts = read_facts(Path(data))
    return facts["held_out_tokens"] / facts["tokens"]


def read_merges(folder: Path) -> list[tuple[bytes, bytes]]:
    """The merges that ``merges.json`` of a corpus holds, in order."""
    rows = json.loads((folder / "merges.json").read_text())
    return [(left.encode("latin-1"), right.encode("latin-1")) for left, right in rows]


def learn_merges(documents: list[Document], characters: int, vocab_size: int) -> list[tuple[bytes, bytes]]:
    """Chapter 1's ``train_bpe`` on documents that are spread over the corpus."""
    from lib.tokenization import train_bpe

    step = max(1, sum(len(d.text) for d in documents) // characters)
    texts = [d.text for d in documents[::step]]
    between = END
    while any(between in text for text in texts):  # what a document holds is learned from, not read as an end
        between = f"<{between}>"
    return train_bpe(between.join(texts), vocab_size, [between])[1]


def write(folder: Path, documents: list[Document], found: list[Source], share: float, sample: int, vocab: int) -> None:
    """Learn the tokenizer on the training documents, and write all files into the folder, ``corpus.json`` last."""
    documents = sorted(
        documents, key=lambda d: hashlib.blake2b(d.place.encode(errors="replace"), person=b"order").digest()
    )
    parts = [[d for d in documents if is_held_out(d.place, share) == held] for held in (False, True)]
    if not all(parts):
        raise ValueError(f"{len(documents)} documents: expected some to train on and some, {share:.1%}, to hold out")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.json").unlink(missing_ok=True)  # the folder is not a corpus until all files are written again
    merges = learn_merges(parts[0], sample, vocab)
    text = json.dumps([[left.decode("latin-1"), right.decode("latin-1")] for left, right in merges])
    (folder / "merges.json").write_text(text)
    counts = []
    with (folder / "tokens.bin").open("wb") as out, ProcessPoolExecutor(initializer=_load, initargs=(merges,)) as pool:
        for part in parts:
            texts = [d.text for d in part]
            rows = pool.map(_encode, [texts[i : i + 64] for i in range(0, len(texts), 64)])
            counts.append(sum(out.write(row.tobytes()) // 2 for row in rows))
    facts: dict[str, Any] = {
        "tokens": sum(counts), "held_out_tokens": counts[1], "vocab_size": 257 + len(merges),
        "documents": len(documents), "characters": sum(len(d.text) for d in documents),
        "sha256": hashlib.sha256((folder / "tokens.bin").read_bytes()).hexdigest(),
        "sources": [asdict(source) for source in found],
    }  # fmt: skip
    unfinished = folder / "corpus.json.part"
    unfinished.write_text(json.dumps(facts, indent=1))
    unfinished.replace(folder / "corpus.json")
    print(
        f"{folder}: {counts[0]:,} tokens to train on and {counts[1]:,} held out, "
        f"of {facts['characters'] / 1e6:.0f} million characters"
    )


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
