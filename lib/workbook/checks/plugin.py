"""The pytest plugin: assigns tests to exercises, runs each exercise in a child process of its own,
and writes the reports.

pytest's own process is the judge (`lib.workbook.book.boundary`):
it collects the tests in the reference's world and never runs an answer.
``--reference`` and ``--mistakes`` grade only the book's own code, and therefore run their tests in this process.
"""

import functools
import json
import os
import sys
from pathlib import Path

import pytest
from _pytest.reports import TestReport

from lib.workbook.book import boundary, resolve
from lib.workbook.book.catalog import BookError, Chapter, Exercise, chapters, find
from lib.workbook.book.stubs import write_atomically
from lib.workbook.checks import gradescope, live, mistakes
from lib.workbook.checks.grader import Grader
from lib.workbook.checks.ranks import Ranks, warm_up
from lib.workbook.checks.report import CheckReport
from lib.workbook.checks.runner import EXERCISE, TIME_LIMIT_S, limit_of
from lib.workbook.checks.summary import refusal
from lib.workbook.grading.cases import case
from lib.workbook.grading.oracles import RECORDING

SHOWN_FAILURES = 3  # of one exercise; the others are only counted
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


class Checks(Grader):
    """One session: its options, and what pytest asks of it."""

    def __init__(self, config: pytest.Config):
        super().__init__(config)
        self.reports: list[TestReport] = []
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
            (kept if self._is_wanted(item, _assigned(item), wanted) else dropped).append(item)
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

    def _is_wanted(
        self, item: pytest.Item, exercise: Exercise | None, wanted: list[tuple[Chapter, Exercise | None]]
    ) -> bool:
        """Whether this run is for a check; also counts the oracles that it leaves to maintainers."""
        if self.option.mistakes and exercise is None:
            return False
        if wanted and not any(exercise and exercise.module == c.module and e in (None, exercise) for c, e in wanted):
            return False
        is_oracle = getattr(getattr(item, "function", None), "workbook_oracle", False)
        is_left = is_oracle and not self.option.reference
        self.n_maintainers += is_left
        return not is_left

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
            self.grade(item, exercise)
            return True
        return None

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


def _assigned(item: pytest.Item) -> Exercise | None:
    """The exercise that a check grades, which its stash then holds; None for a test of the book itself."""
    chapter, exercise = chapter_of(item.path), None
    if chapter is not None and isinstance(item, pytest.Function):
        exercise = exercise_of(chapter, item.originalname)
        item.extra_keyword_matches.add(exercise.name)
        item.repr_failure = _no_traceback  # type: ignore[method-assign] # `report.explain` writes the report
    item.stash[EXERCISE] = exercise
    return exercise


def _no_traceback(excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
    return f"{excinfo.typename}: {resolve.safe_text(excinfo.value)[:1000]}"


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()
