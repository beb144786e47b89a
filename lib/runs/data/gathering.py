"""Where the documents of a corpus come from: Debian packages and data sets, cleaned, each with its licences."""

import gzip
import hashlib
import lzma
import re
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import chain, islice
from pathlib import Path

from lib.runs.data.store import Document, batched, make_pool, streamed

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


def unpacked(package: str, folder: Path) -> Source:
    """Download a Debian package and unpack it into the folder, without installing it.

    Raises:
        RuntimeError: There is no apt, or apt cannot find or download the package; the message is apt's own.
    """
    _run(package, folder, "apt-get", "download", "-qq", package)
    deb = min(folder.glob("*.deb"))
    _run(package, folder, "dpkg-deb", "-x", str(deb), "tree")
    version = deb.name.split("_")[1].replace("%3a", ":")
    copyright_ = folder / "tree/usr/share/doc" / package / "copyright"
    text = copyright_.read_text(errors="replace") if copyright_.exists() else ""
    named = re.findall(r"^License: *(\S[^\n]*)", text, re.MULTILINE) or [
        "".join(pair) for pair in LICENCE.findall(text)
    ]
    return Source(package, version, sorted(set(named)) or ["see the package's copyright file"])


def _run(package: str, folder: Path, *command: str) -> None:
    """Run a command of Debian's in the folder; its failure becomes a RuntimeError that names the package."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"package {package}: there is no {command[0]} here; expected Debian or Ubuntu") from None
    if done.returncode:
        why = " ".join(re.findall(r"^E: (.*)", done.stderr, re.MULTILINE)) or " ".join(done.stderr.split())
        raise RuntimeError(f"package {package}: {' '.join(command[:2])} failed: {why}")


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
        for place, start, n in sorted(found, key=lambda item: digest_of(item[0])):
            file.seek(start)
            yield place, file.read(n)


def digest_of(place: str, person: bytes = b"") -> bytes:
    """A hash of a place, by which documents are ordered."""
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

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.ignored: list[str] = []
        self.code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.IGNORED:
            self.ignored.append(tag)
        self.code += tag == "pre"
        if tag in self.BREAKS:
            self.pieces.append("\n\n" if tag[0] in "ph" else "\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.ignored:
            del self.ignored[self.ignored.index(tag) :]
        self.code -= tag == "pre"
        if tag in self.BREAKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
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
        with package_files(name) as (source, each), make_pool() as workers:
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
    named = Path(name).name if Path(name).exists() else name  # where a file lies must not decide what is held out
    return Source(named, "", ["see the data set's card"]), ((str(i), text) for i, text in enumerate(texts))


def documents_of_dataset(
    name: str, column: str, limit: int | None, longest: int | None, found: list[Source]
) -> Iterator[Document]:
    """The documents of a file, a folder or a data set of the hub."""
    source, texts = texts_of_dataset(name, column, limit)
    found.append(source)
    return (source.add(Document(place, text), longest) for place, text in texts)
