"""Judges an answer by the checks of a kit, with Python's standard library alone, so that it runs in a browser.

`kit` makes the kit from the repository's files.

Nothing is graded in another way than by ``pytest``: the checks are the chapter's tests, and the expectations, the text
of a failure and the search for the mistake behind it are the book's own.
"""

import base64
import contextlib
import io
import linecache
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

from lib.workbook.checks.alarm import TimeLimit
from lib.workbook.grading.cases import case, current_case
from lib.workbook.grading.expect import Wrong, expect_close, expect_equal, expect_raises, expect_true, is_stub_error
from lib.workbook.grading.likeness import Outcome, looks_like

Tracer = Callable[[FrameType, str, Any], Any]
"""What ``sys.settrace`` takes."""

EXPECTATIONS = (case, expect_close, expect_equal, expect_raises, expect_true)
ANSWER = "<your answer>"
PRINTED = 2000
"""Characters of a failed check's output that a report shows."""


class Check(NamedTuple):
    """One check: its name, which no other check of the exercise has, its test, and the test's arguments."""

    nodeid: str
    test: str
    arguments: dict[str, Any]


class Judge:
    """The checks of one exercise.

    Args:
        kit: What `kit` has made.
        tell: Called with the case that begins, for the page that may have to end this process.
    """

    def __init__(self, kit: dict[str, Any], tell: Callable[[str], None] = lambda case: None):
        self.kit, self.tell, self.printed = kit, tell, io.StringIO()
        self.graded = SimpleNamespace()
        self.checks = [Check(*check) for check in kit["checks"]]
        self.tests: dict[str, Any] = {each.__name__: each for each in EXPECTATIONS}
        self.tests[kit["graded"]] = self.graded
        exec(kit["tests"], self.tests)

    def run(self, check: Check, answer: Any, limit_s: float = float("inf")) -> Outcome:
        """How a check of an answer ends."""
        setattr(self.graded, self.kit["exercise"], answer)
        case("")
        try:
            with time_limit(limit_s):
                self.tests[check.test](**check.arguments)
        except (Exception, TimeLimit, SystemExit) as error:
            return Outcome(error, current_case())
        return Outcome(None, current_case())

    def __call__(self, text: str) -> dict[str, Any]:
        """What the page shows of an answer, as `report` makes it."""
        self.printed = io.StringIO()
        with contextlib.redirect_stdout(self.printed), contextlib.redirect_stderr(self.printed):
            try:
                answer = self.read(text)
            except (Exception, TimeLimit, SystemExit) as error:
                return self.report(*_raised(error, self.kit["limit_s"]), passed=0)
            if not callable(answer):
                return self.report(f"there is no function {self.kit['exercise']}", [], passed=0)
            return self.grade(answer)

    def read(self, text: str) -> Any:
        """The answer: what the text defines under the exercise's name, after the chapter's own first lines."""
        linecache.cache[ANSWER] = (len(text), None, text.splitlines(keepends=True), ANSWER)
        namespace: dict[str, Any] = {"__name__": "answer"}
        exec(self.kit["given"], namespace)
        with time_limit(self.kit["limit_s"]):
            exec(compile(text, ANSWER, "exec"), namespace)
        return namespace.get(self.kit["exercise"])

    def grade(self, answer: Any) -> dict[str, Any]:
        """Run every check, and say what the first failure means."""
        outcomes: dict[str, Outcome] = {}
        for check in self.checks:
            self.tell(check.nodeid)
            outcomes[check.nodeid] = outcome = self.run(check, answer, self.kit["limit_s"])
            if isinstance(outcome.error, TimeLimit):
                break  # the others would take as long
        passed = sum(outcome.passed for outcome in outcomes.values())
        failed = next((check for check in self.checks if not outcomes[check.nodeid].passed), None)
        if failed is None:
            return self.report("", [], passed, state="passed")
        first = outcomes[failed.nodeid]
        if is_stub_error(first.error):
            return self.report("not started", [], passed, state="not started")
        problem, rows, read = _explained(first, self.kit["limit_s"])
        if not isinstance(first.error, TimeLimit) and (said := self.diagnosis(failed, outcomes)):
            rows.append(("looks like", said))
        return self.report(problem, rows, passed, read=read)

    def diagnosis(self, failed: Check, outcomes: dict[str, Outcome]) -> str:
        """The sentence of the mistake that an answer makes; the kit has the outcomes of all mistakes."""
        mistakes = [SimpleNamespace(**mistake) for mistake in self.kit["mistakes"]]
        known: dict[str, dict[str, Outcome]] = pickle.loads(base64.b64decode(self.kit["outcomes"]))
        others = [check for check in self.checks if check != failed and check.nodeid in outcomes]

        def try_answer(check: Check) -> Outcome:
            return outcomes[check.nodeid]

        def try_mistake(mistake: SimpleNamespace, check: Check) -> Outcome:
            return known[mistake.key][check.nodeid]

        return looks_like(failed, outcomes[failed.nodeid], others, mistakes, try_answer, try_mistake)

    def report(
        self, problem: str, rows: list[tuple[str, str]], passed: int, state: str = "wrong", read: str = ""
    ) -> dict[str, Any]:
        return {
            "state": state,
            "problem": problem,
            "rows": rows,
            "read": self.kit["reads"].get(read, self.kit["reads"][""]),
            "passed": passed,
            "total": len(self.checks),
            "printed": self.printed.getvalue()[:PRINTED],
        }


def _explained(outcome: Outcome, limit_s: float) -> tuple[str, list[tuple[str, str]], str]:
    """Problem, rows and label of a failure, in the words of a report in the terminal."""
    error = outcome.error
    assert error is not None
    about = [("case", outcome.case)]
    if isinstance(error, Wrong):
        return error.problem, [("case", error.case), *error.rows], error.read or ""
    problem, rows = _raised(error, limit_s)
    return problem, about + rows, ""


def _raised(error: BaseException, limit_s: float) -> tuple[str, list[tuple[str, str]]]:
    """What an exception says, and the line of the answer that raised it."""
    if isinstance(error, SyntaxError):
        return f"is no valid Python: {error.msg}", [("at", f"line {error.lineno}: {(error.text or '').strip()}")]
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == ANSWER]
    rows = [("at", f"line {frame.lineno}: {frame.line}") for frame in lines[-1:]]
    if isinstance(error, TimeLimit):
        return f"was not finished after {limit_s:g} s, so it was ended: does its loop ever end?", rows
    said = str(error).splitlines() or [""]
    return f"raised {type(error).__name__}{': ' + said[0] if said[0] else ''}", rows


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit at the answer's first step that begins after ``seconds``: a browser's Python has no signals."""
    end = time.monotonic() + seconds

    def in_answer(frame: FrameType, event: str, argument: object) -> Tracer:
        if time.monotonic() > end:
            raise TimeLimit(f"not finished after {seconds:g} s")
        return in_answer

    def enter(frame: FrameType, event: str, argument: object) -> Tracer | None:
        if frame.f_code.co_filename != ANSWER:
            return None
        frame.f_trace_opcodes = True  # ``while True: pass`` has a first line and no second
        return in_answer(frame, event, argument)

    if seconds == float("inf"):
        yield
        return
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
