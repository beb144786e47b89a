"""Text: two corpora that are on every machine already, and one function for data sets and for your own files."""

import ast
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Each name, and the arguments of `datasets.load_dataset` for it.
CORPORA = {
    "tiny_shakespeare": {
        "path": "text",
        "data_files": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    },
    "openwebtext": {"path": "Skylion007/openwebtext"},
}
BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@functools.cache
def language_reference() -> str:
    """The Python language reference that every Python carries for ``help()``: about 0.45 MB of English and code."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


@functools.cache
def standard_library_docstrings() -> str:
    """The docstrings of the standard library's modules, classes and functions: about 1 MB. No module is imported for it."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if path.stem in sys.stdlib_module_names and not path.stem.startswith("_"):
            nodes = ast.walk(ast.parse(path.read_bytes()))
            found += [doc for node in nodes if isinstance(node, kinds) and (doc := ast.get_docstring(node))]
    return "\n\n".join(found)


def load_text(path: str | os.PathLike) -> str:
    """The text of a file, unchanged.

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
        return data.decode("utf-8")
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
            folder of files: .txt or .md (a document a line), .jsonl, .json, .csv, .parquet (a document a row).
        column: Where the rows hold their text.
        split: Which part of a data set.
        streaming: Read documents while they are used; False first downloads all of them into the cache of ``datasets``.
        progress: Show a bar that counts documents.

    Raises:
        FileNotFoundError: ``source`` is not a corpus, a data set, a file, or a folder with files of these kinds.
        ValueError: a row has no ``column``, or a file is not UTF-8; the message names the file and the row.
    """
    files = _files_of(source)
    rows = _open_rows(source, files, split, streaming)
    if progress:
        from tqdm.auto import tqdm

        rows = tqdm(rows, desc=Path(source).name, unit=" documents")
    n_rows = 0
    try:
        for row in rows:
            n_rows += 1
            if not isinstance(row.get(column), str):
                where = ", ".join(map(str, files)) or source
                raise ValueError(f"{where}, row {n_rows}: no text in column {column!r}; its columns are {sorted(row)}")
            yield row[column]
    except UnicodeDecodeError:
        for path in files:
            load_text(path)  # raises an error that names the file, the row and the byte
        raise


def _files_of(source: str | os.PathLike) -> list[Path]:
    """The files that a path stands for; none for the name of a data set."""
    path = Path(source)
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise FileNotFoundError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; {_kinds()}")
        return [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in BUILDERS and p.is_file())
        if not files:
            raise FileNotFoundError(f"{path} holds no file that can be read; {_kinds()}")
        if len({BUILDERS[p.suffix] for p in files}) > 1:
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
    return f"the kinds are {', '.join(BUILDERS)}"


def _open_rows(source: str | os.PathLike, files: list[Path], split: str, streaming: bool):
    from datasets import load_dataset

    if files:
        names = [str(path) for path in files]
        return load_dataset(BUILDERS[files[0].suffix], data_files={split: names}, split=split, streaming=streaming)
    what = CORPORA.get(str(source), {"path": str(source)})
    return load_dataset(**what, split=split, streaming=streaming)
