"""Draws how the mistakes of an exercise fail first, and how those that fail alike end a second check.

`lib.workbook.grading.firsts` keeps and reads this record.
"""

import math
from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from lib.workbook.checks import diagnosis
from lib.workbook.grading import firsts
from lib.workbook.grading.likeness import Outcome
from lib.workbook.grading.mistakes import Mistake

AGAIN_ON_RANKS = 4  # times
QUICK_S = 0.1  # what is quicker than this is quick enough


class Recorder:
    """Runs an exercise's mistakes, each once or, for the record, several times on a check."""

    def __init__(self, tests: list[pytest.Function], known: list[Mistake], run: Callable[[pytest.Function], Outcome]):
        self.tests, self.known, self.run, self.trials = tests, known, run, diagnosis.Trials(run)
        self.drawn: dict[tuple[str, str], str] = {}
        self.took_s: dict[str, float] = {}  # by the name of a check, for one run

    def rows(self, wrong: Mistake, test: pytest.Function) -> Iterator[tuple[str, str, str]]:
        """Mistakes (by `firsts.short`), checks and sketches that settle a diagnosis of one that first fails a test."""
        first = self.sketch(wrong, test)
        yield firsts.short(wrong), test.name, first
        if firsts.EXACTLY not in first:
            return  # nothing settles it
        rivals = [m for m in self.known if m.sentence != wrong.sentence and self._may_fail_alike(m, test, first)]
        while rivals and (found := self._apart(wrong, rivals, test)):
            check, others = found
            for one in (wrong, *others):
                yield firsts.short(one), firsts.SECOND + check.name, self.sketch(one, check)
            rivals = [m for m in rivals if m not in others]

    def sketch(self, wrong: Mistake, test: pytest.Function) -> str:
        """How a mistake ends a test: that it varies, if the test ends otherwise when it runs again.

        On ranks, chance decides which of them fails first, so the test is run more often, and may end in several ways.
        What is recorded as varying may do so from process to process only, and stays so.
        """
        if (wrong.key, test.name) not in self.drawn:
            self.drawn[wrong.key, test.name] = self._sketch(wrong, test)
        return self.drawn[wrong.key, test.name]

    def _sketch(self, wrong: Mistake, test: pytest.Function) -> str:
        if _varies(wrong, test):
            return firsts.VARIES
        if (once := self.ending(wrong, test)) == firsts.NOT_COMPARED:
            return once
        again = AGAIN_ON_RANKS if "ranks" in test.fixturenames else 1
        runs = [diagnosis.Trials(self.run).of_mistake(wrong, test) for _ in range(again)]
        return firsts.either([once, *(_ending(one, test) for one in runs)], most=again)

    def ending(self, wrong: Mistake, test: pytest.Function) -> str:
        """How a mistake ends a test once."""
        started = monotonic()
        outcome = self.trials.of_mistake(wrong, test)
        self.took_s[test.name] = max(self.took_s.get(test.name, 0.0), monotonic() - started)
        return _ending(outcome, test)

    def gets_as_far(self, wrong: Mistake, test: pytest.Function) -> bool:
        """Whether a mistake passes what stands before a test; if not, the diagnosis of a failure there drops it.

        Its own item runs these checks, too, so that asking here costs nothing, and it need not run ``test``.
        """
        comparable = diagnosis.comparable(self.tests, test)
        earlier = [check for check in self.tests[: self.tests.index(test)] if check in comparable]
        return all(self.trials.of_mistake(wrong, check).passed for check in earlier)

    def _may_fail_alike(self, wrong: Mistake, test: pytest.Function, first: str) -> bool:
        if not self.gets_as_far(wrong, test) or self.trials.of_mistake(wrong, test).passed:
            return False
        if not (_varies(wrong, test) or firsts.are_like(first, self.ending(wrong, test))):
            return False  # without more runs
        return any(firsts.may_be(self.sketch(wrong, test), way) for way in first.split(firsts.EITHER))

    def _apart(
        self, wrong: Mistake, rivals: list[Mistake], test: pytest.Function
    ) -> tuple[pytest.Function, list[Mistake]] | None:
        """A cheap check that a mistake ends otherwise than as many of its rivals as possible, and those rivals."""
        comparable = diagnosis.comparable(self.tests, test)
        for on_ranks in (False, True):
            checks = [check for check in comparable if ("ranks" in check.fixturenames) == on_ranks]
            once = {c.name: len(_unlike(wrong, rivals, lambda m, c=c: self.ending(m, c))) for c in checks}
            cost = lambda c, once=once: (-once[c.name], math.log2(max(1, self.took_s[c.name] / QUICK_S)) // 1)
            for check in sorted((c for c in checks if once[c.name]), key=cost):
                if found := _unlike(wrong, rivals, lambda m, c=check: self.sketch(m, c)):
                    return check, found
        return None


def _varies(wrong: Mistake, test: pytest.Function) -> bool:
    return firsts.first_failures([wrong]).get(wrong.key) == (test.name, firsts.VARIES)


def _unlike(wrong: Mistake, rivals: list[Mistake], ends: Callable[[Mistake], str]) -> list[Mistake]:
    """The rivals that never end a check as a mistake always does."""
    one = ends(wrong)
    if one != firsts.PASSED and (firsts.EXACTLY not in one or firsts.EITHER in one):
        return []
    return [m for m in rivals if ends(m) != firsts.NOT_COMPARED and not firsts.may_be(ends(m), one)]


def _ending(outcome: Outcome, test: pytest.Function) -> str:
    if outcome.passed:
        return firsts.PASSED
    if not diagnosis.is_diagnosable(outcome) or test.get_closest_marker("memory_limit"):
        return firsts.NOT_COMPARED
    return firsts.sketch(outcome)
