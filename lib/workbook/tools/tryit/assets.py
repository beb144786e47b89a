"""The files that the site serves for an exercise on a page: the kit, the browser's Python and the two scripts."""

import json
import shutil
from pathlib import Path

from lib.workbook.book.catalog import ROOT
from lib.workbook.tools.tryit import kit, python

HERE = Path(__file__).parent
STATIC = ROOT / "_build" / "tryit"
"""A folder like _static; it is there when the last build had a Python for the browser."""
SCRIPTS = ("page.js", "worker.mjs")
EXERCISES = ("merge_pair",)


def write(into: Path = STATIC) -> None:
    """Write the files anew; without a Python for the browser, say so and leave none: the page shows a recorded run."""
    shutil.rmtree(into, ignore_errors=True)
    try:
        source = python.folder()
    except python.NotFetched as error:
        print(f"No Python for the browser ({error}): the front page shows a recorded run instead of its exercise.")
        return
    shutil.copytree(source, into / "tryit" / "python")
    for name in SCRIPTS:
        shutil.copy(HERE / name, into / "tryit" / name)
    for name in EXERCISES:
        (into / "tryit" / f"{name}.json").write_text(json.dumps(kit.make(name)), encoding="utf-8")
    print(f"The front page's exercise runs in the browser; the first check of it loads {n_bytes(into) / 1e6:.1f} MB.")


def folders() -> list[str]:
    """What Sphinx copies into _static besides the book's own: this folder, if the last build made it."""
    return [str(STATIC)] if STATIC.exists() else []


def n_bytes(folder: Path = STATIC) -> int:
    """What a page loads at the first check."""
    return sum(path.stat().st_size for path in (folder / "tryit").rglob("*") if path.suffix not in (".txt", ".js"))
