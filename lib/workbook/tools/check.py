"""One check, for the command line and the notebook: run it, collect the marks, show the table."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib.workbook.book.catalog import ROOT, BookError, Chapter, Exercise, Route, find
from lib.workbook.checks import warm
from lib.workbook.checks.summary import Row, describe

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Result:
    """The outcome of a check."""

    status: int
    rows: list[Row] = field(default_factory=list)
    output: str = ""

    @property
    def passed(self) -> set[tuple[str, str]]:
        """Module and name of each exercise that passed."""
        return {(row["module"], row["name"]) for row in self.rows if row["state"] == "passed"}

    @property
    def first_report(self) -> str:
        """The full report of the first exercise that is wrong or could not be checked,
        followed by what its check printed.
        """
        for row in self.rows:
            if row["state"] in ("wrong", "not checked"):
                printed = f"\n\n  printed by this check:\n{row['printed']}" if row["printed"] else ""
                return f"{row['report']}{printed}"
        return ""


def run(what: str, *, mine: bool = False) -> Result:
    """Grade a chapter or an exercise.

    Args:
        what: A number, a module or a graded name: ``2``, ``rope``, ``2.4``, ``apply_rope``.
        mine: Use the learner's own answers for the other chapters too.

    Raises:
        BookError: there is nothing of that name, or the run itself failed; the message contains pytest's output.
    """
    chapter, exercise = find(what)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        status, output = warm.run_pytest(arguments(chapter, exercise, file, mine), ROOT)
        if status not in (0, 1) or not file.exists():
            raise BookError(f"the check of {what} did not run (exit status {status}):\n{output.strip()}")
        rows = json.loads(file.read_text(encoding="utf-8"))["exercises"]
    return Result(status, rows, output)


def run_route(route: Route, *, mine: bool = False) -> Result:
    """Grade the exercises of a route, chapter by chapter.

    Raises:
        BookError: as `run`.
    """
    rows: list[Row] = []
    for chapter in route.chapters:
        result = run(chapter.module, mine=mine)
        chosen = {e.name for e in route.exercises if e.module == chapter.module}
        rows += [row for row in result.rows if row["name"] in chosen]
    status = int(any(row["state"] not in ("passed", "skipped") for row in rows))
    return Result(status, rows)


def arguments(chapter: Chapter, exercise: Exercise | None, marks: Path, mine: bool) -> list[str]:
    given = [os.path.relpath(chapter.tests, ROOT), "-q", "-p", "no:cacheprovider", "--no-prompt", "--marks", str(marks)]
    given += ["--exercise", f"{exercise.module}.{exercise.name}"] if exercise else []
    return given + (["--mine"] if mine else [])


SIGNS = {
    "passed": ("✓", "green"),
    "wrong": ("✗", "red"),
    "not started": ("·", "yellow"),
    "not run": ("…", "magenta"),
    "not checked": ("!", "magenta"),
    "skipped": ("–", "cyan"),
}


def table(rows: list[Row]) -> "Table":
    """A rich table: exercise, state, first failing case, next step."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "exercise", "state", "what the check found, and the next step"):
        shown.add_column(title)
    for row in rows:
        sign, colour = SIGNS[row["state"]]
        shown.add_row(
            Text(sign, colour), f"{row['number']} {row['name']}", Text(row["state"], colour), Text(describe(row))
        )
    return shown
