"""The marks of a run: a row for each exercise, with its state, its first failing case and the next step."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.workbook.book.catalog import chapters
from lib.workbook.checks.report import CheckReport

if TYPE_CHECKING:
    from _pytest.reports import TestReport

Row = dict[str, Any]  # of an exercise, as `_empty_row` begins it; JSON holds it as it is
NUMBER_OF = {
    "passed": "passed",
    "wrong": "failed",
    "not checked": "unchecked",
    "not run": "not_run",
    "skipped": "skipped",
}


class Marks:
    """Collects the reports of a run, including those that other processes send."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.failures: Counter[tuple[str, str]] = Counter()

    def add(self, report: "TestReport") -> None:
        told = CheckReport.of(report)
        if told is None or (report.when != "call" and report.passed):
            return
        key = (told.module, told.name)
        row = self.rows.setdefault(key, _empty_row(told))
        if report.skipped and told.state != "not run":
            row["skipped"] += 1
            row["why_skipped"] = row["why_skipped"] or _reason(report)
        elif told.state == "not started":
            row["not_started"] += 1
            row["next"] = row["next"] or told.next
        else:
            row[NUMBER_OF[told.state]] += 1
            if told.state in ("wrong", "not checked"):
                self.failures[key] += 1
                if self.failures[key] == 1:
                    printed = "\n".join(text.rstrip() for name, text in report.sections if name.startswith("Captured"))
                    row.update(problem=told.problem, case=told.case, report=told.text(), printed=printed)
            elif told.state == "not run":
                row["problem"] = row["problem"] or told.problem

    def failed_before(self, module: str, name: str) -> int:
        """How many checks of this exercise have failed so far; only the first of them gets a full report."""
        return self.failures[module, name]

    def note_failure(self, module: str, name: str) -> None:
        """Count a failure whose report does not reach this process."""
        self.failures[module, name] += 1

    @staticmethod
    def state(row: Row) -> str:
        """``wrong`` if any check failed; otherwise ``not checked`` or ``not run`` if one
        could not be made, and so on.
        """
        for number, state in (
            ("failed", "wrong"),
            ("unchecked", "not checked"),
            ("not_run", "not run"),
            ("not_started", "not started"),
            ("passed", "passed"),
        ):
            if row[number]:
                return state
        return "skipped"

    def sorted_rows(self) -> list[Row]:
        def order(row: Row) -> tuple[int, int]:
            return row["chapter"], int(row["number"].split(".")[1])

        return [row | {"state": self.state(row)} for row in sorted(self.rows.values(), key=order)]

    def as_json(self, described: str) -> dict[str, Any]:
        rows = self.sorted_rows()
        return {
            "grading": described,
            "passed": sum(r["state"] == "passed" for r in rows),
            "of": len(rows),
            "exercises": rows,
        }

    def table(self) -> list[str]:
        """Plain lines for pytest's summary."""
        rows = self.sorted_rows()
        width = max(len(row["name"]) for row in rows)
        lines = []
        for number in dict.fromkeys(row["chapter"] for row in rows):
            ours = [row for row in rows if row["chapter"] == number]
            title = chapters()[ours[0]["module"]].title
            lines.append(
                f"chapter {number}, {title}: {sum(r['state'] == 'passed' for r in ours)} of {len(ours)} passed"
            )
            lines += [f"  {r['number']:<5} {r['name']:<{width}}  {r['state']:<12} {describe(r)}".rstrip() for r in ours]
        return lines


def describe(row: Row) -> str:
    """The words that follow the state in the table."""
    if row["state"] in ("not run", "not checked"):
        return f"{row['problem']} ({row['case']})" if row["case"] else str(row["problem"])
    if row["state"] == "wrong":
        of = row["failed"] + row["passed"] + row["not_started"] + row["not_run"]
        problem = row["problem"] if len(row["problem"]) <= 100 else row["problem"][:97] + "…"
        left = f", {row['not_run']} not run" if row["not_run"] else ""
        return f"{row['failed']} of {of} checks fail{left}: {problem}" + (f" ({row['case']})" if row["case"] else "")
    if row["state"] == "not started":
        done = f"{row['passed']} checks pass already; " if row["passed"] else ""
        return f"{done}{row['next']}"
    skipped = f", {row['skipped']} skipped ({row['why_skipped']})" if row["skipped"] else ""
    return f"{row['passed']} checks, {row['graded']}{skipped}"


def _reason(report: "TestReport") -> str:
    """Why a check was skipped, without what to do about it, which ``pytest -rs`` shows."""
    assert isinstance(report.longrepr, tuple)
    return report.longrepr[2].removeprefix("Skipped: ").partition(":")[0]


def _empty_row(told: CheckReport) -> Row:
    numbers = dict.fromkeys(("passed", "failed", "unchecked", "not_run", "skipped", "not_started"), 0)
    size = chapters()[told.module].exercise(told.name).size
    facts: Row = {"chapter": told.chapter, "module": told.module, "number": told.number, "name": told.name}
    facts |= {"minutes": size.minutes, "difficulty": size.difficulty, "weight": size.weight}
    texts = dict.fromkeys(("problem", "case", "next", "report", "printed", "why_skipped"), "")
    return {**facts, "graded": told.graded, **numbers, **texts}


def refusal(file: str | None) -> str:
    """Why marks cannot be written to a file; "" if they can. Asked before the first check, so that no run is wasted."""
    if file is None:
        return ""
    path = Path(file)
    if path.is_dir():
        return f"{file} is a folder: expected a file, such as {path / 'marks.json'}"
    if path.exists() and not path.is_file():
        return f"{file} is not a file"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{file}: cannot write into {folder} ({error.strerror})"
