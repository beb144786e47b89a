"""Text: two corpora that are on every machine already, and one function for data sets and for your own files."""

import ast
import csv
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.given.data.folders import files_below

# Each name, and the arguments of `datasets.load_dataset` for it.
CORPORA = {
    "tiny_shakespeare": {
        "path": "text",
        "data_files": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    },
    "openwebtext": {"path": "Skylion007/openwebtext"},
}
KINDS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@functools.cache
def language_reference() -> str:
    """The Python language reference that every Python carries for ``help()``: about 0.45 MB of English and code."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


@functools.cache
def standard_library_docstrings() -> str:
    """The docstrings of the standard library's modules, classes and functions: about 1 MB.

    No module is imported for it.
    """
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if path.stem in sys.stdlib_module_names and not path.stem.startswith("_"):
            nodes = ast.walk(ast.parse(path.read_bytes()))
            found += [doc for node in nodes if isinstance(node, kinds) and (doc := ast.get_docstring(node))]
    return "\n\n".join(found)


def load_text(path: str | os.PathLike) -> str:
    """The text of a file, unchanged, without the byte order mark that some editors put first.

    Raises:
        FileNotFoundError: there is no such file; the message names it and the folder that was searched.
        ValueError: the file is not UTF-8; the message names the file, the row and the byte.
    """
    path = Path(path)
    if not path.is_file():
        why = "it is a folder: stream_text reads folders" if path.is_dir() else f"searched from {Path.cwd()}"
        raise FileNotFoundError(f"no file {path} ({why})")
    data = path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        at = error.start - (data.rfind(b"\n", 0, error.start) + 1)
        raise ValueError(
            f"{path}, row {row}, byte {at} of the row: 0x{data[error.start]:02x} is not UTF-8 ({error.reason}); "
            f"save the file as UTF-8 or convert it with iconv"
        ) from None


def stream_text(
    source: str | os.PathLike,
    *,
    column: str = "text",
    split: str = "train",
    streaming: bool = True,
    progress: bool = True,
) -> Iterator[str]:
    """The documents of a data set or of your own files, one by one.

    Args:
        source: "tiny_shakespeare", "openwebtext", any data set on the Hugging Face hub as "owner/name", a file, or a
            folder of files: .txt or .md (a document a line), .jsonl, .json, .csv, .parquet (a document a row). Hidden
            files and folders, such as ``.ipynb_checkpoints``, are not read.
        column: Where the rows hold their text. Every cell of a .csv is text, also ``null`` and ``2024-01-01``.
        split: Which part of a data set.
        streaming: Read documents while they are used; False first downloads all of them into the cache of ``datasets``.
        progress: Show a bar that counts documents.

    Raises:
        FileNotFoundError: ``source`` is not a corpus, a data set, a file, or a folder with files of these kinds.
        ValueError: a row has no ``column`` or no text in it, or a file is not UTF-8 or damaged; the message names the
            file and the row, counted from 1 in each file, without the head of a .csv.
    """
    files = _files_of(source)
    rows = _rows_of_files(files, column) if files else _rows_of_hub(source, split, streaming)
    if progress:
        from tqdm.auto import tqdm

        rows = tqdm(rows, desc=Path(source).name, unit=" documents")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: {_shown(row)}, expected an object with the column {column!r}")
        if column not in row:
            raise ValueError(f"{where}: no text in column {column!r}; its columns are {sorted(map(str, row))}")
        if not isinstance(text := row[column], str):
            raise ValueError(f"{where}: column {column!r} holds {_shown(text)}, expected text")
        yield text


def _shown(value: Any) -> str:
    """A value and its type for a message, cut where it is long."""
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def _files_of(source: str | os.PathLike) -> list[Path]:
    """The files that a path stands for; none for the name of a data set."""
    path = Path(source)
    if path.is_file():
        if path.suffix not in KINDS:
            raise FileNotFoundError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; {_kinds()}")
        return [path]
    if path.is_dir():
        files = files_below(path, KINDS)
        if not files:
            raise FileNotFoundError(f"{path} holds no file that can be read; {_kinds()}")
        if len({KINDS[p.suffix] for p in files}) > 1:
            raise ValueError(f"{path} holds files of several kinds: {sorted({p.suffix for p in files})}; keep one kind")
        return files
    named = str(source) in CORPORA or (
        str(source).count("/") == 1 and not str(source).startswith((".", "/")) and not path.suffix
    )
    if not named:
        raise FileNotFoundError(
            f"no file or folder {path} (searched from {Path.cwd()}), and no data set: "
            f"those are {', '.join(CORPORA)} or owner/name on the hub"
        )
    return []


def _kinds() -> str:
    return f"the kinds are {', '.join(KINDS)}"


def _rows_of_hub(source: str | os.PathLike, split: str, streaming: bool) -> Iterator[tuple[str, Any]]:
    """("source, row n", the row) for every row of a data set."""
    from datasets import load_dataset

    what = CORPORA.get(str(source), {"path": str(source)})
    rows = load_dataset(**what, split=split, streaming=streaming)
    yield from ((f"{source}, row {n}", row) for n, row in enumerate(rows, start=1))


def _rows_of_files(files: list[Path], column: str) -> Iterator[tuple[str, Any]]:
    """("file, row n", the row) for every row, one file after the other."""
    readers = {"text": _lines, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    for path in files:
        number = 0
        try:
            for number, row in readers[KINDS[path.suffix]](path, column):
                yield f"{path}, row {number}", row
        except UnicodeDecodeError:
            load_text(path)  # raises an error that names the file, the row and the byte
            raise
        except _Damaged as error:
            why, at = (*error.args, number + 1)[:2]
            raise ValueError(f"{path}, row {at}: {why}") from None


class _Damaged(Exception):
    """What is wrong with a row of a file, and its number unless it is the next one."""


def _lines(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        yield from ((n, {"text": line.removesuffix("\n")}) for n, line in enumerate(file, start=1))


def _csv_rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """The rows as the file has them: each cell is a string, whatever it looks like."""
    csv.field_size_limit(2**31 - 1)  # a cell may hold a long document
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            names = next(rows, None)
            if names is None:
                raise ValueError(f"{path} is empty: expected a first row with the names of the columns")
            if names.count(column) > 1:
                raise ValueError(f"{path}: {names.count(column)} columns are called {column!r}; expected one")
            for number, row in enumerate(filter(None, rows), start=1):  # a blank line is no row
                if len(row) != len(names):
                    raise _Damaged(f"{len(row)} cells, expected one for each of the {len(names)} columns {names}")
                yield number, dict(zip(names, row, strict=True))
        except csv.Error as error:
            raise _Damaged(f"{error}, in line {rows.line_num}; a quotation mark inside of a cell is doubled") from None


def _json_rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """The objects of a file, one a line, or of the list that the file holds."""
    with open(path, encoding="utf-8-sig") as file:
        is_list = file.read(4096).lstrip().startswith("[")
        file.seek(0)
        rows = _loaded(file.read(), 1) if is_list else file
        for number, row in enumerate(rows, start=1):
            if not is_list:
                if not row.strip():
                    continue
                row = _loaded(row, number)
            text = row.get(column) if isinstance(row, dict) else None
            if isinstance(text, str) and (half := next((c for c in text if "\ud800" <= c <= "\udfff"), None)):
                why = f"column {column!r} holds \\u{ord(half):04x}, half of a surrogate pair, which is no character"
                raise _Damaged(why, number)
            yield number, row


def _loaded(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"no JSON ({error}); expected an object a line, or one list of objects", number) from None


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            names, number = file.schema_arrow.names, 0
            for batch in file.iter_batches(1024, columns=[column] if column in names else names):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        raise _Damaged(f"the file cannot be read ({' '.join(str(error).split())})") from None
