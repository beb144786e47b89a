"""Where a report says that an exception arose: the learner's own lines, also where a library wrapped the exception."""

import pytest

from lib.workbook.book.catalog import ROOT
from lib.workbook.checks import report
from lib.workbook.checks.report import learners_frames

PLACE = str(ROOT / "lib" / "rope.py")


def error_of(code, wrapped=False):
    """What ``answer()`` raises if this code stands in a learner's file."""
    names: dict = {}
    exec(compile(code, PLACE, "exec"), names)
    try:
        try:
            names["answer"]()
        except Exception as error:
            if wrapped:
                raise RuntimeError("a library's own") from error
            raise
    except Exception as error:
        return error


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_learners_line_is_found_in_a_wrapped_exception(wrapped):
    frames = learners_frames(error_of("def answer():\n    return 1 / 0\n", wrapped))
    assert [(f.filename, f.lineno) for f in frames] == [(PLACE, 2)]


def test_other_lines_are_not_the_learners():
    assert learners_frames(ValueError("raised nowhere")) == []


def test_a_line_with_two_frames_is_shown_once(monkeypatch):
    monkeypatch.setattr(report, "code_line", lambda file, line: f"line {line}")
    error = error_of("def answer():\n    return deeper(sum)\ndef deeper(f):\n    return f(1 / x for x in (1, 0))\n")
    assert [f.lineno for f in learners_frames(error)] == [2, 4, 4]
    assert report._at(error) == [("at", "line 2\nline 4")]
