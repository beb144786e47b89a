"""``pytest --mistakes``: grades each known mistake as if it were the answer.

A test must catch it, and the diagnosis must name it, with the chapter's record. ``--record`` writes the record.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import CallInfo

from lib.workbook.book.catalog import ROOT, Exercise
from lib.workbook.checks import diagnosis
from lib.workbook.checks.recording import Recorder
from lib.workbook.grading import firsts
from lib.workbook.grading.likeness import Outcome, looks_like
from lib.workbook.grading.mistakes import Mistake, mistakes_of

ROW, OLD = "row of a record", "old record"  # properties of reports


class MistakeItem(pytest.Item):
    """One wrong answer, as a test of its own."""

    def __init__(self, *, mistake: Mistake, tests: list[pytest.Function], recorder: Recorder, **kwargs: Any):
        super().__init__(**kwargs)
        self.mistake, self.tests, self.recorder, self.trials = mistake, tests, recorder, recorder.trials

    def runtest(self) -> None:
        for test in self.tests:
            outcome = self.trials.of_mistake(self.mistake, test)
            if isinstance(outcome.error, Unfit):
                raise AssertionError(f"{test.name} did not grade the mistake: {outcome.error}")
            if not outcome.passed:
                self.add_report_section("call", "caught", f"{test.name}: {outcome.error!r}"[:2000])
                if self.config.option.record:
                    self._record(test)
                else:
                    self._is_named(test, outcome)
                return
        raise AssertionError(f"no test catches the mistake of {self.mistake.name}: {self.mistake.sentence}")

    def _record(self, test: pytest.Function) -> None:
        """Note for the record how the mistake fails first, and how it and its rivals end a second check."""
        wrong, rows = self.mistake, self.recorder.rows(self.mistake, test)
        self.user_properties += [(ROW, (wrong.module, wrong.name, *row)) for row in rows]

    def _is_old(self, test: pytest.Function, outcome: Outcome) -> bool:
        """Whether the record says otherwise how the mistake fails first; the end of the run says so, too."""
        if (known := firsts.first_failures([self.mistake]).get(self.mistake.key)) is None:
            return False
        check, drawn = known
        is_old = check != test.name or not firsts.are_like(drawn, firsts.sketch(outcome)) or self._ends_otherwise()
        if is_old:
            path = firsts.record_path(self.mistake.module).relative_to(ROOT)
            self.user_properties.append((OLD, (str(path), self.mistake.label)))
        return is_old

    def _ends_otherwise(self) -> bool:
        """Whether the mistake ends a second check otherwise than is recorded."""
        named = {test.name: test for test in self.tests}
        return any(
            name not in named or not firsts.are_like(drawn, self.recorder.ending(self.mistake, named[name]))
            for name, drawn in firsts.endings([self.mistake])[self.mistake.key].items()
        )

    def _is_named(self, test: pytest.Function, outcome: Outcome) -> None:
        """Raises AssertionError unless the diagnosis is the mistake's own sentence."""
        if not diagnosis.is_diagnosable(outcome) or test.get_closest_marker("memory_limit"):
            return
        others, said = diagnosis.comparable(self.tests, test), ""
        known, try_answer = self.recorder.known, lambda check: self.trials.of_mistake(self.mistake, check)
        if not self._is_old(test, outcome):
            ruled_out = {other.name for other in self.tests if other is not test}
            known = firsts.candidates(known, test.name, outcome, ruled_out)
            known, said = firsts.settle(known, test.name, outcome, others, try_answer)
        if not said or "ranks" not in test.fixturenames:
            known = [m for m in known if self.recorder.gets_as_far(m, test)]
            said = looks_like(test, outcome, others, known, try_answer, self.trials.of_mistake, confirmed_by=0)
        if said != self.mistake.sentence:
            alike = [m.sentence for m in known if self.trials.of_mistake(m, test).is_like(outcome)]
            raise AssertionError(
                f"{test.name} catches the mistake, but the report does not name it.\n"
                f"  sentence  {self.mistake.sentence}\n  said      {said or 'nothing'}\n"
                f"  case      {outcome.case}\n  failure   {outcome.error!r}"[:1500]
                + f"\n  alike     {alike}"
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class Unfit(Exception):
    """A test could not grade a mistake, and the book is at fault."""


def items(
    tests_by_exercise: dict[Exercise, list[pytest.Function]], run: Callable[[pytest.Function], Outcome]
) -> list[MistakeItem]:
    """One item for each mistake of the exercises whose tests were collected; it tries them in a learner's order."""
    made = []
    for exercise, tests in tests_by_exercise.items():
        tests = [test for test in tests if not test.get_closest_marker("skip")]
        recorder = Recorder(tests, mistakes_of(exercise.module, exercise.name) if tests else [], run)
        for nth, wrong in enumerate(recorder.known, start=1):
            name = f"{exercise.name}[{nth}-{wrong.label}]"  # its code is made when it is tried
            home = tests[0].parent or tests[0].session
            made.append(MistakeItem.from_parent(home, name=name, mistake=wrong, tests=tests, recorder=recorder))
    return made


def scheduler(config: pytest.Config, log: object) -> object:
    """pytest-xdist's scheduler that gives all mistakes of an exercise to one process:
    its `Trials` then run each check once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByExercise(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("[")[0]

    return ByExercise(config, log)


def record(reports: list[pytest.TestReport]) -> list[Path]:
    """Write the records from the reports of all processes, and return its files."""
    return firsts.write([value for one in reports for key, value in one.user_properties if key == ROW])


def told(reports: list[pytest.TestReport]) -> list[str]:
    """A line for each record of which lines are old."""
    found: dict[str, list[str]] = {}
    old: list[Any] = [value for one in reports for key, value in one.user_properties if key == OLD]
    for path, label in old:
        found.setdefault(path, []).append(label)
    return [
        f"{path}: old lines: {len(labels)} ({', '.join(labels[:9])}{', …' * (len(labels) > 9)}); their mistakes were "
        f"diagnosed without them; renew them with: pytest --mistakes --record {Path(path).parent}"
        for path, labels in sorted(found.items())
    ]


def run_item(item: pytest.Item) -> None:
    """A mistake's item runs whole tests inside its call, so it has no fixtures of its own."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = CallInfo.from_call(item.runtest, when="call")
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
