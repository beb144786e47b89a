"""The pytest plugin: assigns tests to exercises, runs each exercise in a child process of its own,
and writes the reports.

pytest's own process is the judge (`lib.workbook.book.boundary`):
it collects the tests in the reference's world and never runs an answer.
``--reference`` and ``--mistakes`` grade only the book's own code, and therefore run their tests in this process.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.reports import TestReport

from lib.workbook.book import boundary, resolve
from lib.workbook.book.catalog import BookError, Chapter, Exercise, chapters, find
from lib.workbook.book.stubs import untouched, write_atomically
from lib.workbook.checks import gradescope, live, mistakes, report
from lib.workbook.checks.child import MACHINERY, Child, Ended
from lib.workbook.checks.ranks import Ranks, warm_up
from lib.workbook.checks.report import CheckReport
from lib.workbook.checks.runner import EXERCISE, TIME_LIMIT_S, Runner, limit_of, take_terminal
from lib.workbook.checks.summary import Marks, refusal
from lib.workbook.grading.cases import case
from lib.workbook.grading.mistakes import mistakes_of
from lib.workbook.grading.oracles import RECORDING

SHOWN_FAILURES = 3  # of one exercise; the others are only counted
# PyTorch imports these modules, hundreds at a time, when a check first uses them;
# the check's source text shows that it will.
IMPORTED_LATE = {
    ".step()": "torch._dynamo",
    ".step(optimizer)": "torch._dynamo",
    '.to("meta")': "torch._dynamo",
    'torch.device("meta")': "torch._dynamo",
    "autograd.grad(": "torch.fx.experimental.symbolic_shapes",
}
CHECKS = pytest.StashKey["Checks"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workbook", "The Scaling Workbook")
    group.addoption("--reference", action="store_true", help="grade the reference instead of your answers")
    group.addoption("--mine", action="store_true", help="use your answers for the other chapters too")
    group.addoption("--mistakes", action="store_true", help="prove that the tests catch and name every known mistake")
    group.addoption("--live", type=int, metavar="N", help="with --mistakes: time how N of them are diagnosed (0: all)")
    group.addoption("--record", action="store_true", help="record the oracles (with --reference), or first failures")
    group.addoption("--exercise", action="append", default=[], metavar="NAME", help="only the tests of this exercise")
    group.addoption("--marks", metavar="FILE", help="write the marks of every exercise as JSON")
    group.addoption("--gradescope", metavar="FILE", help="write the marks as Gradescope's results.json")
    group.addoption("--no-prompt", action="store_true", help="skip breakpoint(), because nobody sits at a terminal")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if not (options.reference or options.mistakes) and options.reportchars == "fE":
        options.reportchars = ""  # the table of exercises replaces pytest's summary
    if options.mine and (options.reference or options.mistakes):
        raise pytest.UsageError("--mine grades your answers, --reference and --mistakes the book's: choose one")
    if options.record and not (options.reference or options.mistakes):
        raise pytest.UsageError("--record writes the oracles' values with --reference, first failures with --mistakes")
    for name in ("marks", "gradescope"):
        if fault := refusal(config.getoption(name)):
            raise pytest.UsageError(f"--{name} {fault}")
    if not hasattr(os, "fork"):
        raise pytest.UsageError("checks need a system with fork: Linux, macOS, or WSL on Windows")
    RECORDING.update(live=options.reference, write=options.reference and options.record)
    _on_one_thread()
    boundary.become_judge()
    resolve.enter("reference")
    config.stash[CHECKS] = checks = Checks(config)
    config.pluginmanager.register(checks, "workbook-checks")
    config.pluginmanager.register(checks.runner, "workbook-runner")


def _on_one_thread() -> None:
    """Compute on one thread: checks are small, and on a busy machine threads that wait for each
    other take 100 times as long.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_report_header(config: pytest.Config) -> str:
    return f"workbook: {config.stash[CHECKS].described}"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Run a module-level function on 1 to 4 warm processes: ``ranks(fn, *args, n_ranks=4, backend="gloo")``."""
    checks = request.config.stash[CHECKS]
    return Ranks(
        limit_of(request.node, "time_limit", TIME_LIMIT_S), checks.option.capture == "no", checks.runner.is_quiet
    )


@functools.cache
def chapter_of(path: Path) -> Chapter | None:
    """The chapter whose folder of tests a file lies in."""
    return next((chapter for chapter in chapters().values() if path.is_relative_to(chapter.tests)), None)


def exercise_of(chapter: Chapter, test_name: str) -> Exercise:
    """The exercise whose name follows ``test_``; if several fit, the longest.

    Raises:
        UsageError: no exercise fits.
    """
    stem = test_name.split("[")[0].removeprefix("test_")
    fitting = [e for e in chapter.exercises if stem == e.name or stem.startswith(e.name + "_")]
    if not fitting:
        names = ", ".join(e.name for e in chapter.exercises)
        raise pytest.UsageError(
            f"{chapter.tests.name}: {test_name} is named after no exercise; the exercises are {names}"
        )
    return max(fitting, key=lambda e: len(e.name))


class Checks:
    """One session: its options, its marks, and the child that grades the current exercise."""

    def __init__(self, config: pytest.Config):
        self.config, self.option = config, config.option
        self.marks = Marks()
        self.reports: list[TestReport] = []
        self.child: Child | None = None
        self.child_of: tuple[str, str] | None = None  # module and name of the exercise that the child grades
        # by module and exercise ("" for the whole module): why its remaining checks are not run
        self.given_up: dict[tuple[str, str], str] = {}
        # by module and exercise, of those that are still stubs: what the first check told, and so all do
        self.not_started: dict[tuple[str, str], tuple[CheckReport, list[tuple[str, object]]]] = {}
        self.runner = Runner(config, self.marks)
        self.n_maintainers = 0
        self.kept: list[str] = []  # files of marks that are left as they are, because no check was run

    @property
    def is_trusted(self) -> bool:
        """Whether only the book's own code is graded."""
        return bool(self.option.reference or self.option.mistakes)

    @property
    def described(self) -> str:
        if self.option.reference:
            return "grading the reference (solutions/)"
        if self.option.mistakes:
            return "grading the known mistakes: each must be caught and named"
        if self.option.mine:
            return "grading your answers (lib/), in the other chapters too"
        return "grading your answers (lib/); other chapters use the reference"

    # ---- collection --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: object) -> None:
        """If a whole chapter is to run, begin to start its ranks while its tests are imported."""
        some = self.option.keyword or self.option.exercise or any("::" in argument for argument in self.config.args)
        if not (some or self.option.collectonly or hasattr(self.config, "workerinput")) and chapter_of(module_path):
            warm_up([module_path.read_text(encoding="utf-8")])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = []
        for what in self.option.exercise:
            try:
                wanted.append(find(what))
            except BookError as error:
                raise pytest.UsageError(str(error)) from error
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            chapter, exercise = chapter_of(item.path), None
            if chapter is not None and isinstance(item, pytest.Function):
                exercise = exercise_of(chapter, item.originalname)
            item.stash[EXERCISE] = exercise
            if exercise is not None:
                item.extra_keyword_matches.add(exercise.name)
                item.repr_failure = _no_traceback  # type: ignore[method-assign] # `report.explain` writes it
            is_oracle = getattr(getattr(item, "function", None), "workbook_oracle", False)
            maintainers = is_oracle and not self.option.reference
            unwanted = wanted and not any(
                exercise is not None and exercise.module == c.module and e in (None, exercise) for c, e in wanted
            )
            beside = self.option.mistakes and exercise is None
            self.n_maintainers += bool(maintainers and not unwanted and not beside)
            (dropped if maintainers or unwanted or beside else kept).append(item)
            if item.get_closest_marker("gpu") and not _has_accelerator():
                reason = "needs an accelerator: run `pytest -m gpu` on a machine that has one"
                item.add_marker(pytest.mark.skip(reason=reason))
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        items[:] = kept
        self.runner.checks = [item for item in kept if isinstance(item, pytest.Function)]
        if self.option.mistakes:
            by_exercise: dict[Exercise, list[pytest.Function]] = {}
            for check in self.runner.checks:
                by_exercise.setdefault(check.stash[EXERCISE], []).append(check)  # type: ignore[arg-type]
            if self.option.live is None:
                items[:] = mistakes.items(by_exercise, self.runner.outcome_of)
            else:
                items[:] = live.items(by_exercise, self, self.option.live)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> object:
        """Of several processes, one takes all mistakes of an exercise, unless ``--dist`` asks for something else."""
        return mistakes.scheduler(config, log) if self.option.mistakes and self.option.dist == "load" else None

    def pytest_report_collectionfinish(self) -> str | None:
        if self.n_maintainers and not (self.option.mistakes or self.option.keyword or self.option.exercise):
            return (
                f"(left out: {self.n_maintainers} checks that compare the reference with other libraries; "
                "`pytest --reference` runs them)"
            )
        return None

    # ---- running -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if isinstance(item, mistakes.MistakeItem | live.LiveItem):
            mistakes.run_item(item)
            return True
        exercise = item.stash.get(EXERCISE, None)
        case("")
        if exercise is None or self.is_trusted:
            resolve.enter("reference")
            return None  # pytest's own protocol
        if isinstance(item, pytest.Function) and item.get_closest_marker("skip") is None:
            self._grade(item, exercise)
            return True
        return None

    def _grade(self, item: pytest.Function, exercise: Exercise) -> None:
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
            self._note_stub(exercise, reports)
        for one in reports:
            self._count(one)
            item.ihook.pytest_runtest_logreport(report=one)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _note_stub(self, exercise: Exercise, reports: list[TestReport]) -> None:
        """If a check found nothing but the stub: what it reports holds for the exercise's other checks too,
        which then need no child and no ranks.
        """
        for one in reports:
            told = CheckReport.of(one)
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

    # ---- reporting ---------------------------------------------------------------------------------------------------

    def pytest_report_teststatus(self, report: TestReport) -> tuple[str, str, str] | None:
        told = CheckReport.of(report)
        if told is None or (report.when == "teardown" and report.passed):
            return None
        if told.state == "not run":
            return "not run", "-", "NOT RUN"
        if report.failed and told.state == "not started":
            return "not started", "n", "NOT STARTED"
        if report.failed and told.repeated >= SHOWN_FAILURES:
            return "failed, not shown (pytest -v shows all)", "F", "FAILED"
        return None

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        self.marks.add(report)
        if report.user_properties:
            self.reports.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.close_child()
        if hasattr(self.config, "workerinput"):
            return
        if self.option.mistakes and self.option.record:
            mistakes.record(self.reports)
        if (file := self.option.marks) and not self.keeps(file, Path(file).exists()):
            text = json.dumps(self.marks.as_json(self.described), indent=2, ensure_ascii=False)
            write_atomically(Path(file), text + "\n")
        if (file := self.option.gradescope) and not self.keeps(file, False):  # Gradescope wants a score, if of nothing
            text = json.dumps(
                gradescope.results(self.marks.sorted_rows(), self.described), indent=2, ensure_ascii=False
            )
            write_atomically(Path(file), text + "\n")

    def keeps(self, file: str, is_earlier: bool) -> bool:
        """Whether a run leaves a file of marks alone: no check was run, and it only listed them,
        or the marks are an earlier run's.
        """
        if self.marks.rows or not (self.option.collectonly or is_earlier):
            return False
        self.kept.append(file)
        return True

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        for file in self.kept:
            terminalreporter.write_line(f"no check was run: {file} is left as it is")
        if self.option.live is not None:
            terminalreporter.section("known mistakes as answers")
            for line in live.summary(self.reports):
                terminalreporter.write_line(line)
        for line in mistakes.told(self.reports):
            terminalreporter.write_line(line)
        if self.is_trusted or not self.marks.rows:
            return
        terminalreporter.section("exercises")
        for line in self.marks.table():
            terminalreporter.write_line(line)


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


def _no_traceback(excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
    return f"{excinfo.typename}: {resolve.safe_text(excinfo.value)[:1000]}"


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()
