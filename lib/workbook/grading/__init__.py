"""The tools that tests are written with: graded names, cases, expectations, mistakes and recorded oracles."""

from lib.workbook.grading.cases import case, current_case
from lib.workbook.grading.expect import Wrong, expect_close, expect_equal, expect_raises, expect_true
from lib.workbook.grading.graded import Graded, graded
from lib.workbook.grading.memory import with_peak
from lib.workbook.grading.mistakes import Mistake, edits, mistake, mistakes_of
from lib.workbook.grading.oracles import oracle, recorded

__all__ = [
    "Graded",
    "Mistake",
    "Wrong",
    "case",
    "current_case",
    "edits",
    "expect_close",
    "expect_equal",
    "expect_raises",
    "expect_true",
    "graded",
    "mistake",
    "mistakes_of",
    "oracle",
    "recorded",
    "with_peak",
]
