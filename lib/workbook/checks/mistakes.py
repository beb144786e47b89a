"""``pytest --mistakes``: grades each known mistake as if it were the answer.

A test must catch it, as the chapter's record says, and the diagnosis must name it. ``--record`` writes the record.
"""

from pathlib import Path

import pytest
from _pytest.runner import CallInfo

from lib.workbook.book.catalog import ROOT
from lib.workbook.checks import diagnosis
from lib.workbook.grading import firsts
from lib.workbook.grading.likeness import Outcome, looks_like
from lib.workbook.grading.mistakes import Mistake, mistakes_of

FIRST = "first failure"  # a report's property, for the record


class MistakeItem(pytest.Item):
    """One wrong answer, as a test of its own."""

    def __init__(self, *, mistake: Mistake, tests: list, trials, **kwargs):
        super().__init__(**kwargs)
        self.mistake, self.tests, self.trials = mistake, tests, trials

    def runtest(self):
        for test in self.tests:
            outcome = self.trials.of_mistake(self.mistake, test)
            if isinstance(outcome.error, Unfit):
                raise AssertionError(f"{test.name} did not grade the mistake: {outcome.error}")
            if not outcome.passed:
                self.add_report_section("call", "caught", f"{test.name}: {outcome.error!r}"[:2000])
                self._is_recorded(test, outcome)
                if not self.config.option.record:
                    self._is_named(test, outcome)
                return
        raise AssertionError(f"no test catches the mistake of {self.mistake.name}: {self.mistake.sentence}")

    def _is_recorded(self, test, outcome: Outcome) -> None:
        """Raises AssertionError if the chapter's record says otherwise how the mistake fails first."""
        wrong, drawn = self.mistake, firsts.NOT_COMPARED
        if diagnosis.is_diagnosable(outcome) and not test.get_closest_marker("memory_limit"):
            drawn = firsts.sketch(outcome)
        self.user_properties.append((FIRST, (wrong.module, wrong.name, firsts.short(wrong), test.name, drawn)))
        check, known = firsts.first_failures([wrong]).get(wrong.key, (test.name, drawn))
        if not self.config.option.record and (
            check != test.name or (drawn != known and not firsts.are_like(drawn, known))
        ):
            path = firsts.record_path(wrong.module).relative_to(ROOT)
            raise AssertionError(
                f"{path} is old: the mistake fails {test.name} first ({drawn}), not {check}"
                f" ({known})\n  renew it with: pytest --mistakes --record {path.parent} -k {wrong.name}"
            )

    def _is_named(self, test, outcome: Outcome) -> None:
        """Raises AssertionError unless the diagnosis is the mistake's own sentence."""
        if not diagnosis.is_diagnosable(outcome) or test.get_closest_marker("memory_limit"):
            return
        others = diagnosis.comparable(self.tests, test)
        known = mistakes_of(self.mistake.module, self.mistake.name)
        known = firsts.candidates(known, test.name, outcome, {other.name for other in self.tests if other is not test})
        known = [m for m in known if self._gets_as_far(m, test, others)]
        try_answer = lambda check: self.trials.of_mistake(self.mistake, check)
        said = looks_like(test, outcome, others, known, try_answer, self.trials.of_mistake, confirmed_by=0)
        if said != self.mistake.sentence:
            alike = [m.sentence for m in known if self.trials.of_mistake(m, test).is_like(outcome)]
            raise AssertionError(
                f"{test.name} catches the mistake, but the report does not name it.\n"
                f"  sentence  {self.mistake.sentence}\n  said      {said or 'nothing'}\n"
                f"  case      {outcome.case}\n  failure   {outcome.error!r}"[:1500]
                + f"\n  alike     {alike}"
            )

    def _gets_as_far(self, other: Mistake, failing, others: list) -> bool:
        """Whether another mistake passes what this one passed before it failed; if not, the diagnosis would drop it.

        Its own item runs these checks, too, so that asking here costs nothing, and it need not run ``failing``.
        """
        earlier = [check for check in self.tests[: self.tests.index(failing)] if check in others]
        return all(self.trials.of_mistake(other, check).passed for check in earlier)

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, self.name


class Unfit(Exception):
    """A test could not grade a mistake, and the book is at fault."""


def items(tests_by_exercise: dict, run) -> list[MistakeItem]:
    """One item for each mistake of the exercises whose tests were collected; it tries them in a learner's order."""
    made = []
    for exercise, tests in tests_by_exercise.items():
        trials, tests = diagnosis.Trials(run), [test for test in tests if not test.get_closest_marker("skip")]
        for nth, wrong in enumerate(mistakes_of(exercise.module, exercise.name) if tests else [], start=1):
            name = f"{exercise.name}[{nth}-{wrong.label}]"  # its code is made when it is tried
            made.append(MistakeItem.from_parent(tests[0].parent, name=name, mistake=wrong, tests=tests, trials=trials))
    return made


def scheduler(config, log):
    """pytest-xdist's scheduler that gives all mistakes of an exercise to one process:
    its `Trials` then run each check once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByExercise(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("[")[0]

    return ByExercise(config, log)


def record(reports: list) -> list[Path]:
    """Write the record of first failures from the reports of all processes, and return its files."""
    return firsts.write([value for one in reports for key, value in one.user_properties if key == FIRST])


def run_item(item: pytest.Item) -> None:
    """A mistake's item runs whole tests inside its call, so it has no fixtures of its own."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = CallInfo.from_call(item.runtest, when="call")
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
