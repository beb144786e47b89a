"""Reads and writes the learner's files, with care for encodings, line ends,
and folders or pipes where a module should be.
"""

import inspect
import os
import re
import stat
from pathlib import Path
from typing import Any

from lib.workbook.book.catalog import ROOT, BookError, Chapter

BOM = b"\xef\xbb\xbf"
KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class SourceError(BookError):
    """A learner's file that cannot be read as Python source; the message names the file and the line."""


def read_mine(chapter: Chapter) -> str:
    """The learner's module as text, with newlines as line ends and without a byte order mark.

    Raises:
        SourceError: the file is missing; is a folder, a pipe or a device; cannot be opened;
            or is not UTF-8 (the message then names the line).
    """
    return re.sub(r"\r\n?", "\n", read_exactly(chapter))


def read_exactly(chapter: Chapter) -> str:
    """The learner's module with its own line ends, for code that will write the text back."""
    return decode(chapter.mine, read_bytes(chapter.mine, chapter.module))


def read_bytes(path: Path, module: str | None = None) -> bytes:
    """The bytes of a regular file. Never blocks, as opening a named pipe would.

    Args:
        path: The file.
        module: If ``path`` should be a learner's module, its name, for the advice in the message.

    Raises:
        SourceError: there is no such file, it is not a regular file, or it cannot be opened.
    """
    again = f"`workbook reset {module}` writes its stubs anew" if module else ""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in KINDS if test(mode)), "a device")
            move = f": move it away, then {again}" if again else ""
            raise SourceError(f"{shown(path)} is {kind}, not a file{move}")
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise SourceError(f"{shown(path)} is missing" + (f"; {again}" if again else "")) from None
    except OSError as error:
        raise SourceError(f"{shown(path)} cannot be read: {error.strerror}") from None


def decode(path: Path, data: bytes) -> str:
    """The text of a source file with its own line ends and without a byte order mark.

    Raises:
        SourceError: the file is not UTF-8 or contains a zero byte; the message names the line.
    """
    data = data.removeprefix(BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = _line_number(data[: error.start])
        raise SourceError(
            f"{shown(path)}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}): save the file with the encoding UTF-8"
        ) from None
    if "\0" in text:
        line = _line_number(data[: data.index(b"\0")])
        raise SourceError(
            f"{shown(path)}:{line}: a zero byte, which Python source cannot contain: save the file as UTF-8"
        )
    return text


def _line_number(before: bytes) -> int:
    return len(re.findall(rb"\r\n|\r|\n", before)) + 1


def shown(path: Path) -> str:
    """A path as messages show it: relative to the book if it is inside it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


# ---- writing ---------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """The lines of a source with their line ends, split as Python's parser does (``splitlines``
    also splits at form feeds).
    """
    return _LINE.findall(text)


def line_end(text: str) -> str:
    """The line end that most lines of a source have."""
    crlf = text.count("\r\n")
    return "\r\n" if 2 * crlf > text.count("\n") else "\n"


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` in one step: at every moment, even after a crash, the file is complete, either old or new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_mine(path: Path, text: str) -> None:
    """Write ``text`` as a learner's module; if the old file began with a byte order mark, so does the new one."""
    mark = BOM if path.is_file() and read_bytes(path).startswith(BOM) else b""
    write_bytes(path, mark + text.encode("utf-8"))


def write_stub(path: Path, text: str) -> None:
    """Write a whole stub, with the line ends and the byte order mark (if any) of the file that it replaces."""
    before = read_bytes(path).decode("utf-8", "replace") if path.exists() else ""
    write_mine(path, text.replace("\n", line_end(before)))


# ---- where a definition is -------------------------------------------------------------------------------------------


def provenance(found: Any) -> tuple[Path, int] | None:
    """File and line of a function's or class's definition; None if it has none."""
    found = inspect.unwrap(getattr(found, "fn", found))  # a Triton kernel keeps its function in .fn
    if isinstance(found, type):
        for value in vars(found).values():
            code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if code is not None:
                return Path(code.co_filename), _class_line(Path(code.co_filename), found) or code.co_firstlineno
        return None
    code = getattr(found, "__code__", None)
    return None if code is None else (Path(code.co_filename), code.co_firstlineno)


def _class_line(path: Path, found: type) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    starts = [
        n
        for n, line in enumerate(lines, 1)
        if line.startswith((f"class {found.__name__}(", f"class {found.__name__}:"))
    ]
    return starts[-1] if starts else None
