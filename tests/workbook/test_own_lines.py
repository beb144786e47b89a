"""Where a report says that an exception arose: the learner's own lines, also where a library wrapped the exception."""

import pytest

from lib.workbook.book.catalog import ROOT
from lib.workbook.checks.report import learners_frames


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_learners_line_is_found_in_a_wrapped_exception(wrapped):
    try:
        compiled = compile("def answer():\n    return 1 / 0\n", str(ROOT / "lib" / "rope.py"), "exec")
        names: dict = {}
        exec(compiled, names)
        try:
            names["answer"]()
        except ZeroDivisionError as error:
            if wrapped:
                raise RuntimeError("a library's own") from error
            raise
    except Exception as error:
        frames = learners_frames(error)
    assert [(f.filename, f.lineno) for f in frames] == [(str(ROOT / "lib" / "rope.py"), 2)]


def test_other_lines_are_not_the_learners():
    assert learners_frames(ValueError("raised nowhere")) == []
