"""Marks in Gradescope's format: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""

from typing import Any

from lib.workbook.checks.summary import Row, describe


def results(rows: list[Row], described: str) -> dict[str, Any]:
    """The contents of ``results.json``: a test for each exercise, worth one point.

    Args:
        rows: As `Marks.sorted_rows` returns them.
        described: Whose code was graded; stands at the top of the page.

    Returns:
        Plain values for JSON.
        If nothing was graded there is a total score of 0, because Gradescope requires a score.
        An exercise whose checks were all skipped is worth 0 points, so that a missing device costs nobody a point.
    """
    made: dict[str, Any] = {"output": described, "output_format": "text", "tests": [_test(row) for row in rows]}
    return made if rows else {"score": 0.0} | made


def _test(row: Row) -> dict[str, Any]:
    passed, skipped = row["state"] == "passed", row["state"] == "skipped"
    test = {
        "name": f"{row['number']} {row['name']}",
        "name_format": "text",
        "number": row["number"],
        "score": float(passed),
        "max_score": float(not skipped),
        "output": row["report"] or f"{row['state']}: {describe(row)}",
        "output_format": "text",
        "tags": [row["module"], row["state"]],
        "visibility": "visible",
        "extra_data": {"state": row["state"], "graded": row["graded"]},
    }
    return test if skipped else test | {"status": "passed" if passed else "failed"}
