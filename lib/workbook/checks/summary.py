"""The marks of a run: one row an exercise, with its state, its first failing case and the next step."""

import tempfile
from pathlib import Path

from lib.workbook.book.catalog import chapters


class Marks:
    """Collects the reports of a run, also those that other processes send."""

    def __init__(self):
        self.rows: dict[tuple[int, str], dict] = {}

    def add(self, report) -> None:
        facts = getattr(report, "workbook", None)
        if facts is None or (report.when != "call" and report.passed):
            return
        exercise = chapters()[facts["module"]].exercise(facts["name"])
        key = (exercise.chapter, exercise.name)
        row = self.rows.setdefault(
            key,
            {k: facts[k] for k in ("chapter", "module", "number", "name", "graded")}
            | {
                "passed": 0,
                "failed": 0,
                "skipped": 0,
                "not_started": 0,
                "problem": "",
                "case": "",
                "next": "",
                "report": "",
            },
        )
        if report.skipped:
            row["skipped"] += 1
        elif report.passed:
            row["passed"] += 1
        elif facts["state"] == "not started":
            row["not_started"] += 1
            row["next"] = row["next"] or facts.get("next", "")
        else:
            row["failed"] += 1
            if row["failed"] == 1:
                row.update(problem=facts.get("problem", ""), case=facts.get("case", ""), report=str(report.longrepr))

    def failed_before(self, exercise) -> int:
        """How many checks of this exercise have failed already; the first had the whole report."""
        return self.rows.get((exercise.chapter, exercise.name), {}).get("failed", 0)

    @staticmethod
    def state(row: dict) -> str:
        """``wrong`` where a check failed, else ``not started`` while a stub is left, else ``passed``."""
        if row["failed"]:
            return "wrong"
        if row["not_started"]:
            return "not started"
        return "passed" if row["passed"] else "skipped"

    def sorted_rows(self) -> list[dict]:
        def order(row):
            return row["chapter"], int(row["number"].split(".")[1])

        return [row | {"state": self.state(row)} for row in sorted(self.rows.values(), key=order)]

    def as_json(self, described: str) -> dict:
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


def describe(row: dict) -> str:
    """What the table says after the state."""
    if row["state"] == "wrong":
        of = row["failed"] + row["passed"] + row["not_started"]
        problem = row["problem"] if len(row["problem"]) <= 100 else row["problem"][:97] + "…"
        return f"{row['failed']} of {of} checks fail: {problem}" + (f" ({row['case']})" if row["case"] else "")
    if row["state"] == "not started":
        done = f"{row['passed']} checks pass already; " if row["passed"] else ""
        return done + row["next"]
    return f"{row['passed']} checks, {row['graded']}" + (f", {row['skipped']} skipped" if row["skipped"] else "")


def refusal(file: str | None) -> str:
    """Why no marks can be written to a file; nothing where they can. Asked before the first check, not after the last."""
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
