"""Marks as Gradescope reads them: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""

from lib.workbook.checks.summary import describe


def results(rows: list[dict], described: str) -> dict:
    """The contents of ``results.json``: a test for each exercise, worth one point.

    Args:
        rows: Of `Marks.sorted_rows`.
        described: Whose code was graded, for the head of the page.

    Returns:
        Plain values for JSON. Where nothing was graded there is a total, 0, since Gradescope wants a score somewhere.
        An exercise of which every check was skipped is worth nothing, so that a missing device costs nobody a point.
    """
    made = {"output": described, "output_format": "text", "tests": [_test(row) for row in rows]}
    return made if rows else {"score": 0.0} | made


def _test(row: dict) -> dict:
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
