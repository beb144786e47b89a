"""All chapters at a glance, and which exercise comes next."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lib.workbook.book.catalog import ROOT, Chapter, Exercise, chapters
from lib.workbook.book.sources import SourceError, read_mine
from lib.workbook.book.stubs import marker_lines, where_it_breaks, write_atomically
from lib.workbook.checks.summary import Row
from lib.workbook.tools import check

CACHE = ROOT / ".workbook" / "progress.json"


def _key(chapter: Chapter) -> str:
    """A digest that changes whenever a chapter has to be graded again."""
    digest = hashlib.sha256()
    for path in (chapter.mine, chapter.reference, *sorted(chapter.tests.glob("*.py"))):
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()[:16]


def states(chapter: Chapter) -> dict[str, Row]:
    """The result of each exercise of a chapter, which is graded again only if one of its files has changed.

    Raises:
        SourceError: the learner's file cannot be read, or has a syntax error; the message names the line.
    """
    try:
        unwritten = marker_lines(read_mine(chapter))
    except SyntaxError as error:
        raise SourceError(where_it_breaks(chapter, error)) from None
    names = [e.name for e in chapter.exercises]
    if all(name in unwritten for name in names):
        return {name: {"state": "not started"} for name in names}
    cached, key = _cached(), _key(chapter)
    if cached.get(chapter.module, {}).get("key") != key:
        rows = {row["name"]: row for row in check.run(chapter.module).rows}
        cached[chapter.module] = {"key": key, "rows": rows}
        write_atomically(CACHE, json.dumps(cached))
    return dict(cached[chapter.module]["rows"])


def _cached() -> dict[str, Any]:
    """The results of the last run; empty if the file is missing or damaged."""
    try:
        return dict(json.loads(CACHE.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Line:
    """One chapter of the overview."""

    chapter: Chapter
    rows: dict[str, Row]
    problem: str = ""


def glance() -> tuple[list[Line], Exercise | None]:
    """Every chapter, and the first exercise that has not passed; stretch exercises do not count."""
    found = []
    for chapter in chapters().values():
        try:
            found.append(Line(chapter, states(chapter)))
        except SourceError as error:
            found.append(Line(chapter, {}, str(error)))
    for line in found:
        for exercise in line.chapter.exercises:
            if exercise.size.weight != "stretch" and line.rows.get(exercise.name, {}).get("state") != "passed":
                return found, exercise
    return found, None
