"""Runs one check: in a child, where it makes the reports and diagnoses the first failure,
or in pytest's own process.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import pytest
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

from lib.ranks.noise import meaningful
from lib.workbook.book import boundary
from lib.workbook.book.catalog import Exercise
from lib.workbook.checks import diagnosis, report
from lib.workbook.checks.alarm import alarm
from lib.workbook.checks.child import peak_mb
from lib.workbook.checks.report import CheckReport, RaisedInAnswer
from lib.workbook.checks.state import Shared, seed_generators
from lib.workbook.checks.summary import Marks
from lib.workbook.grading.cases import BOARD, case
from lib.workbook.grading.likeness import Outcome
from lib.workbook.grading.mistakes import mistakes_of

D = TypeVar("D", float, None)
TIME_LIMIT_S = 10.0
PRINTED_LINES, PRINTED_CHARS = 40, 8000  # of a failed check's output
EXERCISE = pytest.StashKey[Exercise | None]()
OUTCOME = pytest.StashKey[Outcome]()


def limit_of(item: pytest.Item, marker: str, default: D) -> float | D:
    """The value of a test's marker, ``time_limit`` or ``memory_limit``; without the marker, the default."""
    found = item.get_closest_marker(marker)
    return float(found.args[0]) if found else default


class Runner:
    """Runs checks and makes their reports.

    ``is_quiet`` is true while a check runs for a diagnosis only and is not reported.
    """

    def __init__(self, config: pytest.Config, marks: Marks):
        self.config, self.option, self.marks = config, config.option, marks
        self.is_quiet = False
        self.checks: list[pytest.Function] = []  # all that were collected
        self.passed: set[str] = set()  # names of the checks that the answer passed in this child
        self.shared: Shared | None = None  # the shared settings as they were before the check

    def world_of(self, exercise: Exercise) -> str:
        """The world in which an exercise is graded."""
        if self.option.reference or self.option.mistakes:
            return "reference"
        return "mine" if self.option.mine else f"only:{exercise.module}"

    def work(self, index: int) -> Iterator[Any]:
        """Run one check; yield its reports and then, if there is a diagnosis, the same reports with the diagnosis."""
        item = self.checks[index]
        exercise, limit = item.stash[EXERCISE], limit_of(item, "memory_limit", None)
        assert exercise is not None
        if self.option.no_prompt:
            sys.breakpointhook = _no_prompt
        before, self.shared = peak_mb(start_anew=True) if limit else 0.0, Shared()
        try:
            reports = runtestprotocol(item, log=False, nextitem=None)
        except pytest.exit.Exception:
            yield "quit"
            return
        growth, changed = peak_mb() - before if limit else 0.0, self.shared.restore()
        last = next((one for one in reports if one.failed), reports[-1])
        told = CheckReport.of(last) or report.begin(exercise, self.world_of(exercise))
        if limit and growth > limit and not last.failed:
            _fail(last, told, _too_much(growth, limit), [("case", report.case_of(item))])
        elif changed and last.passed:
            _fail(
                last, told, "leaves a setting changed that the whole program shares", [("changed", "\n".join(changed))]
            )
        elif changed and told.state == "wrong":
            told.rows.append(("and changed", "\n".join(changed)))
            told.put_on(last)
        for one in reports:
            one.sections = [(name, _shortened(text)) for name, text in map(_without_noise, one.sections) if text]
        if all(one.passed for one in reports):
            self.passed.add(item.name)
        to_data = self.config.hook.pytest_report_to_serializable
        yield [to_data(config=self.config, report=one) for one in reports]
        if last.failed and told.state == "wrong" and not limit and not changed and self._is_first(exercise):
            said, why = self._diagnosis(item, exercise, sum(one.duration for one in reports))
            if said or self.option.live is not None:
                told.rows.append(("looks like", said) if said else ("not named", why))
                told.put_on(last)
                yield [to_data(config=self.config, report=one) for one in reports]

    def _is_first(self, exercise: Exercise) -> bool:
        """Whether this is the exercise's first failure in this child; only the first one is diagnosed."""
        seen = self.marks.failed_before(exercise.module, exercise.name)
        self.marks.note_failure(exercise.module, exercise.name)
        return seen == 0

    def _diagnosis(self, item: pytest.Function, exercise: Exercise, took_s: float) -> tuple[str, str]:
        """The sentence of the mistake that the answer makes; without one, the reason."""
        outcome = item.stash.get(OUTCOME, None)
        if outcome is None or not diagnosis.is_diagnosable(outcome):
            return "", "nothing to compare"
        checks = [
            i for i in self.checks if i.stash.get(EXERCISE, None) == exercise and not i.get_closest_marker("skip")
        ]
        known = mistakes_of(exercise.module, exercise.name)
        try:
            return diagnosis.diagnose(item, outcome, checks, self.passed, known, self.outcome_of, took_s)
        finally:
            boundary.forget_reference(exercise.module)

    def outcome_of(self, item: pytest.Function) -> Outcome:
        """Run a check once more, silently, and return how it ended."""
        self.is_quiet = True
        case("")
        item.stash[OUTCOME] = Outcome(None)
        try:
            runtestprotocol(item, log=False, nextitem=None)
        finally:
            self.is_quiet = False
            item.session._setupstate.teardown_exact(None)  # an alarm may ring where pytest expects none
            item._request = False  # type: ignore[assignment]
        return item.stash[OUTCOME]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        try:
            with self.shared.streams_stay_open() if self.shared else contextlib.nullcontext():
                return (yield)
        except (
            KeyboardInterrupt,
            SystemExit,
            pytest.skip.Exception,
            pytest.xfail.Exception,
            pytest.exit.Exception,
        ) as end:
            if pyfuncitem.stash.get(EXERCISE, None) is not None and report.learners_frames(end):
                raise RaisedInAnswer(f"{type(end).__name__}: {end}") from end
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Enforce the limits of checks in pytest's own process; in a child, the judge and ``work`` enforce them."""
        if item.stash.get(EXERCISE, None) is None or boundary.role() == "child" or self.option.usepdb:
            return (yield)
        patience = 6 if self.option.reference else 2  # live oracles import slowly
        limit = limit_of(item, "memory_limit", None)
        before = peak_mb(start_anew=True) if limit else 0.0
        with alarm(patience * limit_of(item, "time_limit", TIME_LIMIT_S)):
            result = yield
        if limit and (growth := peak_mb() - before) > limit:
            raise MemoryError(_too_much(growth, limit))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, TestReport, TestReport]:
        made = yield
        exercise = item.stash.get(EXERCISE, None)
        if exercise is None:
            return made
        if call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception):
            item.stash[OUTCOME] = Outcome(diagnosis.of_one_rank(call.excinfo.value), BOARD.case)
        if self.is_quiet:
            return made
        told = report.begin(exercise, self.world_of(exercise))
        if call.excinfo is not None and made.failed:
            report.explain(told, item, call.excinfo.value)
        told.put_on(made)
        return made

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        exercise = item.stash.get(EXERCISE, None)
        if exercise is not None:
            seed_generators()
        if exercise is not None and not self.is_quiet:
            item.user_properties += [
                ("exercise", f"{exercise.number} {exercise.name}"),
                ("graded", report.graded_place(exercise, self.world_of(exercise))),
            ]

    def pytest_enter_pdb(self) -> None:
        """Stop the clock while a person is at the prompt, and give the terminal to the child."""
        if boundary.role() == "child":
            BOARD.at_a_prompt(True)
            take_terminal()

    def pytest_leave_pdb(self) -> None:
        BOARD.at_a_prompt(False)


def _too_much(growth: float, limit: float) -> str:
    return f"used {growth:.0f} MB of memory; the limit of this check is {limit:g} MB"


def _fail(made: TestReport, told: CheckReport, problem: str, rows: list[tuple[str, str]]) -> None:
    """Turn the report of a check that passed into a failure."""
    made.outcome, made.when = "failed", "call"
    told.fill(problem, rows)
    told.put_on(made)


def _without_noise(section: tuple[str, str]) -> tuple[str, str]:
    """A captured section; from stderr, the lines that libraries print about themselves are removed."""
    name, text = section
    return (name, "\n".join(meaningful(text))) if "stderr" in name else section


def _shortened(text: str) -> str:
    """A check's output; if it is long, only its beginning and its end."""
    lines = text[:PRINTED_CHARS].splitlines()
    if len(text) <= PRINTED_CHARS and len(lines) <= PRINTED_LINES:
        return text
    head = "\n".join(line[:500] for line in lines[: PRINTED_LINES // 2])
    tail = "\n".join(line[:500] for line in text[-PRINTED_CHARS:].splitlines()[-PRINTED_LINES // 2 :])
    return f"{head}\n… {len(text)} characters in all (pytest -s shows them) …\n{tail}\n"


def _no_prompt(*args: object, **kwargs: object) -> None:
    print("breakpoint() needs a terminal: run this check with pytest in one", file=sys.stderr)


def take_terminal() -> None:
    """Make this process's group the one that receives the terminal's input."""
    with contextlib.suppress(OSError, ValueError):
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpgrp())
            signal.signal(signal.SIGTTOU, before)
