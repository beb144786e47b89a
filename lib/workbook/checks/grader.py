"""Grades a learner's answers: each exercise in a child process of its own, check by check."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
from _pytest.reports import TestReport

from lib.workbook.book.catalog import Exercise, chapters
from lib.workbook.book.stubs import untouched
from lib.workbook.checks import report
from lib.workbook.checks.child import MACHINERY, Child, Ended
from lib.workbook.checks.ranks import warm_up
from lib.workbook.checks.report import CheckReport
from lib.workbook.checks.runner import EXERCISE, TIME_LIMIT_S, Runner, limit_of, take_terminal
from lib.workbook.checks.summary import Marks
from lib.workbook.grading.mistakes import mistakes_of

# PyTorch imports these modules, hundreds at a time, when a check first uses them;
# the check's source text shows that it will.
IMPORTED_LATE = {
    ".step()": "torch._dynamo",
    ".step(optimizer)": "torch._dynamo",
    '.to("meta")': "torch._dynamo",
    'torch.device("meta")': "torch._dynamo",
    "autograd.grad(": "torch.fx.experimental.symbolic_shapes",
}


class Grader:
    """The marks so far, and the child that grades the current exercise."""

    def __init__(self, config: pytest.Config):
        self.config, self.option = config, config.option
        self.marks = Marks()
        self.runner = Runner(config, self.marks)
        self.child: Child | None = None
        self.child_of: tuple[str, str] | None = None  # module and name of the exercise that the child grades
        # by module and exercise ("" for the whole module): why its remaining checks are not run
        self.given_up: dict[tuple[str, str], str] = {}
        # by module and exercise, of those that are still stubs: what the first check told, and so all do
        self.not_started: dict[tuple[str, str], tuple[CheckReport, list[tuple[str, object]]]] = {}

    def grade(self, item: pytest.Function, exercise: Exercise) -> None:
        """Run a check in a child, and log its reports."""
        item.session._setupstate.teardown_exact(item)  # fixtures that an earlier item set up for its file
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        key = (exercise.module, exercise.name)
        why = self.given_up.get(key) or self.given_up.get((exercise.module, ""))
        if why:
            reports = [_not_run(item, report.begin(exercise, self.runner.world_of(exercise)), why)]
        elif key in self.not_started:
            reports = [_made(item, "failed", *self.not_started[key])]
        else:
            reports = self._reports_of(item, exercise)
            self._note(exercise, reports)
        for one in reports:
            self._count(one)
            item.ihook.pytest_runtest_logreport(report=one)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _note(self, exercise: Exercise, reports: list[TestReport]) -> None:
        """If a check found nothing but the stub: what it reports holds for the exercise's other checks too,
        which then need no child and no ranks. After ranks that were not finished in time, no other check is run.
        """
        for one in reports:
            told = CheckReport.of(one)
            if told and told.is_late:
                self.given_up[exercise.module, exercise.name] = "an earlier check was not finished in time"
            if told and told.state == "not started" and exercise.name in _untouched(exercise.module):
                self.not_started[exercise.module, exercise.name] = told, one.user_properties

    def _reports_of(self, item: pytest.Function, exercise: Exercise) -> list[TestReport]:
        reports: list[TestReport] = []
        from_data = self.config.hook.pytest_report_from_serializable
        try:
            for said in self.sent_by_child(item, exercise.module, exercise.name, self.runner.world_of(exercise)):
                if isinstance(said, Ended):
                    return [self._ended(item, exercise, said)]
                if said == "quit":
                    self.close_child()
                    pytest.exit("Quitting debugger", returncode=1)
                reports = [from_data(config=self.config, data=data) for data in said]
        except BaseException:
            self.close_child()
            raise
        finally:
            take_terminal()
        return reports

    def sent_by_child(self, item: pytest.Function, module: str, name: str, world: str) -> Iterator[Any]:
        """Run a check in the child of an answer, which is forked if there is none yet, and yield what it sends."""
        memory_limit = limit_of(item, "memory_limit", None)
        if self.child is not None and (self.child_of != (module, name) or memory_limit is not None):
            self.close_child()
        if self.child is None:
            self._prepare(item)
            self.child, self.child_of = Child(world, self.runner.work), (module, name)
        limit_s = limit_of(item, "time_limit", TIME_LIMIT_S)
        for said in self.child.run(self.runner.checks.index(item), limit_s, memory_limit):
            if isinstance(said, Ended):
                self.child = None
            yield said

    def _prepare(self, item: pytest.Function) -> None:
        """Do once, before the fork, the work that every child would otherwise repeat."""
        if "tmp_path" in item.fixturenames:
            item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if "ranks" in item.fixturenames:
            warm_up([item.path.read_text(encoding="utf-8")])
        same = [i.function for i in self.runner.checks if i.stash.get(EXERCISE, None) == item.stash[EXERCISE]]
        text = "".join(map(inspect.getsource, dict.fromkeys(same)))
        for word, module in IMPORTED_LATE.items():
            if word in text:
                importlib.import_module(module)
        exercise = item.stash[EXERCISE]
        with contextlib.suppress(Exception):  # a fault of the book's, which must not keep it from grading
            for wrong in mistakes_of(exercise.module, exercise.name)[:1] if exercise else []:
                wrong.definitions  # noqa: B018 - it parses the reference, which the others share

    def _ended(self, item: pytest.Function, exercise: Exercise, ended: Ended) -> TestReport:
        """The report of a check whose child ended before it could report;
        also decides which checks are not run any more.
        """
        if ended.is_time or ended.in_import:
            self.given_up[exercise.module, "" if ended.in_import else exercise.name] = (
                f"lib/{exercise.module}.py {ended.why} when it was imported"
                if ended.in_import
                else f"an earlier check {ended.why}"
            )
        told = report.begin(exercise, self.runner.world_of(exercise))
        at = report.frames_of_stack(exercise, ended.stack)
        rows = [("case", ended.case or report.case_of(item)), ("at", at)]
        problem = (
            ended.why
            if not ended.in_import
            else f"cannot be graded: lib/{exercise.module}.py {ended.why} when it was imported"
        )
        if ended.stack.startswith(MACHINERY) and not ended.is_time:
            told.fill(report.BOOKS_FAULT, [*rows, ("because", ended.stack.strip())], state="not checked")
        else:
            told.fill(problem, rows)
        return _made(item, "failed", told)

    def _count(self, one: TestReport) -> None:
        """Shorten a failure to one line if the exercise has failed before, unless -v asks for everything."""
        told = CheckReport.of(one)
        if told is None or not one.failed or self.option.verbose > 0:
            return
        told.repeated = self.marks.failed_before(told.module, told.name)
        told.put_on(one)

    def close_child(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.close()


def _not_run(item: pytest.Function, told: CheckReport, why: str) -> TestReport:
    told.state, told.problem = "not run", why
    path, line = item.location[0], (item.location[1] or 0) + 1
    return _made(item, "skipped", told, longrepr=(path, line, why))


def _made(
    item: pytest.Function,
    outcome: Literal["passed", "failed", "skipped"],
    told: CheckReport,
    user_properties: Sequence[tuple[str, object]] = (),
    longrepr: tuple[str, int, str] | str = "",
) -> TestReport:
    """The report of a check that no child has made."""
    made = TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=outcome,
        longrepr=longrepr,
        when="call",
        user_properties=user_properties,
    )
    told.put_on(made)
    return made


@functools.cache
def _untouched(module: str) -> frozenset[str]:
    return untouched(chapters()[module])
