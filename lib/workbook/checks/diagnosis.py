"""Runs checks again, on the answer and on the known mistakes, so that `looks_like` can compare how they end."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from lib.workbook.checks.alarm import TimeLimit, alarm
from lib.workbook.grading import firsts
from lib.workbook.grading.cases import BOARD
from lib.workbook.grading.likeness import CONFIRMED_BY, FEW, Outcome, looks_like
from lib.workbook.grading.mistakes import Mistake, standing_in

DIAGNOSIS_S = 4.0  # for all known mistakes together
LONG_DIAGNOSIS_S = 20.0  # the same for a check that runs ranks or has a time limit of its own
CONFIRMED_S = 0.6  # to confirm the only mistake that shows, or is recorded with, the answer's own wrong numbers
RUN_S = 90.0  # for one run of one check, whatever it is


def of_one_rank(error: BaseException) -> BaseException:
    """If a run of ranks failed because one rank raised: that rank's exception. Otherwise the error itself."""
    inner = getattr(error, "error", None)
    return inner if hasattr(error, "per_rank") and isinstance(inner, Exception) else error


class Trials:
    """Runs checks again on the answer or on a mistake, silently and within a time limit; each combination runs once."""

    def __init__(self, run: Callable[[pytest.Function], Outcome], limit_s: float = float("inf")):
        self.run, self.started = run, monotonic()
        self.deadline, self.certain, self.longest_s = self.started + limit_s, "", 0.0
        self.n_of_answer = 0  # runs
        self.seen: dict[tuple[str, str], Outcome] = {}

    def of_answer(self, check: pytest.Function) -> Outcome:
        return self._once("", check, contextlib.nullcontext)

    def of_mistake(self, mistake: Mistake, check: pytest.Function) -> Outcome:
        return self._once(mistake.key, check, lambda: standing_in(mistake))

    def know(self, check: pytest.Function, outcome: Outcome, key: str = "") -> None:
        """Store an outcome that is already known."""
        self.seen[key, check.nodeid] = outcome

    def hurry(self, sentence: str, after: int = 0) -> None:
        """Unless it is empty, a sentence is certain enough to be said, if no check speaks against it soon.

        Not before the answer was run ``after`` times.
        """
        self.certain = sentence if self.n_of_answer >= after else ""
        if self.certain:
            self.deadline = min(self.deadline, self.started + CONFIRMED_S)

    def _once(
        self, key: str, check: pytest.Function, in_place: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Outcome:
        if (key, check.nodeid) not in self.seen:
            begun = monotonic()
            left = self.deadline - begun
            if left <= (self.longest_s if self.certain else 0):  # an alarm rings late in a long call of C
                raise TimeLimit("no time is left for a diagnosis")
            with in_place(), silence(), alarm(min(left, RUN_S)):
                outcome = self.run(check)
            self.longest_s = max(self.longest_s, monotonic() - begun)
            self.n_of_answer += not key
            if isinstance(outcome.error, TimeLimit) and monotonic() >= self.deadline:
                raise outcome.error  # pytest has caught it, but it says nothing about the check
            self.seen[key, check.nodeid] = outcome
        return self.seen[key, check.nodeid]


def diagnose(
    failing: pytest.Function,
    first: Outcome,
    checks: list[pytest.Function],
    passed: set[str],
    known: list[Mistake],
    run: Callable[[pytest.Function], Outcome],
    took_s: float = 0.0,
) -> tuple[str, str]:
    """The sentence of the known mistake that an answer makes, within seconds; without one, the reason.

    Args:
        failing: The check that the answer failed first.
        first: How it failed.
        checks: All checks of the exercise, in their order.
        passed: Names of the checks that the answer passed before.
        known: The exercise's mistakes.
        run: Runs a check once more.
        took_s: Seconds that the failing check took.
    """
    with_ranks = "ranks" in failing.fixturenames
    takes_long = with_ranks or failing.get_closest_marker("time_limit")
    trials = Trials(run, LONG_DIAGNOSIS_S if takes_long else DIAGNOSIS_S)
    later = {check.name for check in checks[checks.index(failing) + 1 :]}
    trials.longest_s = took_s
    trials.know(failing, first)
    rivals, others = firsts.candidates(known, failing.name, first, passed | later), comparable(checks, failing)
    for key, check in itertools.product(["", *firsts.first_failures(rivals)], checks):
        if check.name in passed:  # by the rivals too, or they would be ruled out
            trials.know(check, Outcome(None), key)
    try:
        rivals, recorded = firsts.settle(rivals, failing.name, first, others, trials.of_answer)
        if with_ranks and recorded:
            return recorded, ""
        recorded = recorded if first.is_telling else ""
        trials.hurry(recorded)
        hurry = lambda sentence: trials.hurry(sentence or recorded, after=0 if first.is_telling else FEW)
        enough = FEW + sum(check.name in passed for check in others) if recorded else CONFIRMED_BY
        confirmed_by = 0 if with_ranks else min(enough, sum("ranks" not in check.fixturenames for check in others))
        said = looks_like(failing, first, others, rivals, trials.of_answer, trials.of_mistake, confirmed_by, hurry)
    except TimeLimit:
        return trials.certain, "the time is over"
    return said, f"none or several of {len(rivals)} mistakes agree with it"


def comparable(checks: list[pytest.Function], failing: pytest.Function) -> list[pytest.Function]:
    """The checks that tell candidates apart: the quick ones, those without ranks first."""
    quick = [c for c in checks if c is not failing and not c.get_closest_marker("memory_limit")]
    return sorted(quick, key=lambda c: "ranks" in c.fixturenames)


def is_diagnosable(outcome: Outcome) -> bool:
    """Whether mistakes can be compared with this failure: not with a time limit, nor with a package that is missing."""
    error = outcome.error
    return error is not None and not isinstance(error, TimeLimit) and getattr(error, "kind", "deadlock") != "missing"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard everything that this block prints, from Python or from C, and keep the case that the board shows."""
    case = BOARD.case
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        kept = []
        for number in (1, 2):
            with contextlib.suppress(OSError):
                kept.append((os.dup(number), number))
                os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            BOARD.case = case
            for old, number in kept:
                os.dup2(old, number)
                os.close(old)
