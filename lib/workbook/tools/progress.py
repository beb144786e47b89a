"""All chapters at a glance, and which exercise comes next."""

import hashlib
import json

from lib.workbook.tools import check
from lib.workbook.book.catalog import ROOT, Chapter, Exercise, chapters
from lib.workbook.book.stubs import marker_lines, write_atomically

CACHE = ROOT / ".workbook" / "progress.json"


def _key(chapter: Chapter) -> str:
    """Changes whenever a chapter would have to be graded anew."""
    digest = hashlib.sha256()
    for path in (chapter.mine, chapter.reference, *sorted(chapter.tests.glob("*.py"))):
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()[:16]


def states(chapter: Chapter) -> dict[str, dict]:
    """The row of each exercise of a chapter; graded anew only where a file changed since the last time."""
    try:
        unwritten = marker_lines(chapter.mine.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        unwritten = {}
    names = [e.name for e in chapter.exercises]
    if all(name in unwritten for name in names):
        return {name: {"state": "not started"} for name in names}
    cached = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    key = _key(chapter)
    if cached.get(chapter.module, {}).get("key") != key:
        rows = {row["name"]: row for row in check.run(chapter.module).rows}
        cached[chapter.module] = {"key": key, "rows": rows}
        write_atomically(CACHE, json.dumps(cached))
    return cached[chapter.module]["rows"]


def glance() -> tuple[list[tuple[Chapter, dict[str, dict]]], Exercise | None]:
    """Every chapter with its rows, and the first exercise (stretches apart) that has not passed."""
    found = [(chapter, states(chapter)) for chapter in chapters().values()]
    for chapter, rows in found:
        for exercise in chapter.exercises:
            if not exercise.stretch and rows.get(exercise.name, {}).get("state") != "passed":
                return found, exercise
    return found, None
