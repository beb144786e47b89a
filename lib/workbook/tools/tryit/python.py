"""The browser's Python: Pyodide, which npm fetches when the site is built, and which the site itself serves."""

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from lib.workbook.book.catalog import ROOT, BookError

PACKAGE = "pyodide@314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
LOADER, LOCK = "pyodide.mjs", "pyodide-lock.json"
COMPRESSED = ("pyodide.asm.mjs", "pyodide.asm.wasm")
LIBRARY = "python_stdlib.zip"
NOTICE = f"""Python for the browser: {PACKAGE} from npm.
https://github.com/pyodide/pyodide, under the Mozilla Public License 2.0.
It contains CPython, https://github.com/python/cpython, under the Python Software Foundation's license.
The files are as they were published, two of them compressed; of the list of packages only its head is kept.
"""
FETCH_S = 300.0


class NotFetched(Exception):
    """Pyodide could not be fetched; the message says why."""


def folder() -> Path:
    """The folder with the files that the site serves. It is made once for each version, and a rebuild fetches nothing.

    Raises:
        NotFetched: npm is missing, or the registry cannot be reached.
        BookError: what npm fetched is not the package that is pinned here.
    """
    found = ROOT / "_build" / PACKAGE.replace("@", "-")
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
            unpack(fetch(Path(scratch)), Path(scratch) / "python")
            (Path(scratch) / "python").rename(found)
    return found


def fetch(into: Path) -> bytes:
    """The package as npm's registry has it."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetched("there is no npm")
    command = [npm, "pack", PACKAGE, "--pack-destination", str(into), "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        raise NotFetched(f"npm was not done after {FETCH_S:g} s") from None
    packed = list(into.glob("*.tgz"))
    if done.returncode or len(packed) != 1:
        raise NotFetched((done.stderr.strip().splitlines() or ["npm says nothing"])[0])
    return packed[0].read_bytes()


def unpack(packed: bytes, into: Path) -> None:
    """Write the files that a page needs; the two large ones are compressed, whatever the server does.

    Raises:
        BookError: the package is another one than the pinned.
    """
    found = f"sha512-{base64.b64encode(hashlib.sha512(packed).digest()).decode()}"
    if found != INTEGRITY:
        raise BookError(f"{PACKAGE} has the integrity {found}, expected {INTEGRITY}")
    into.mkdir()
    archive = into / "package.tgz"
    archive.write_bytes(packed)
    with tarfile.open(archive) as files:
        read = {name: _bytes(files, name) for name in (LOADER, LOCK, LIBRARY, *COMPRESSED)}
    archive.unlink()
    for name in COMPRESSED:
        (into / f"{name}.gz").write_bytes(gzip.compress(read[name], 9, mtime=0))
    for name in (LOADER, LIBRARY):
        (into / name).write_bytes(read[name])
    (into / LOCK).write_text(json.dumps({"info": json.loads(read[LOCK])["info"], "packages": {}}), encoding="utf-8")
    (into / "NOTICE.txt").write_text(NOTICE, encoding="utf-8")


def _bytes(files: tarfile.TarFile, name: str) -> bytes:
    member = files.extractfile(f"package/{name}")
    assert member is not None
    return member.read()
