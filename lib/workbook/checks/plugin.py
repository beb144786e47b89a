"""The pytest plugin: whose code a chapter's tests grade, each in a process of its own, and what a failure says."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from lib.workbook.checks import catchers, gradescope, isolate, messages
from lib.workbook import grading
from lib.workbook.book import resolve
from lib.workbook.checks.alarm import alarm, paused
from lib.workbook.book.catalog import BookError, chapters, find
from lib.workbook.book.stubs import write_atomically
from lib.workbook.checks.summary import Marks, refusal

TIME_LIMIT_S = 10.0
SHOWN_FAILURES = 3  # of one exercise; the others are counted
SHOWN_LINES = 8  # of what one rank printed
DIAGNOSED_RUN_S = 6.0  # for one run of ranks with a known mistake


def pytest_addoption(parser):
    group = parser.getgroup("workbook", "The Scaling Workbook")
    group.addoption("--reference", action="store_true", help="grade the reference instead of your answers")
    group.addoption("--mine", action="store_true", help="your answers everywhere, in the other chapters too")
    group.addoption("--mistakes", action="store_true", help="prove that the tests catch every known mistake")
    group.addoption(
        "--record",
        action="store_true",
        help="with --reference: write the oracles' recorded values; with --mistakes: which test catches each",
    )
    group.addoption("--exercise", action="append", default=[], metavar="NAME", help="only the tests of this exercise")
    group.addoption("--marks", metavar="FILE", help="write the marks of every exercise as JSON")
    group.addoption("--gradescope", metavar="FILE", help="write the same as Gradescope's results.json")
    group.addoption("--no-isolate", action="store_true", help="run checks inside pytest's own process, for a debugger")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    options = config.option
    if not (options.reference or options.mistakes) and options.reportchars == "fE":
        options.reportchars = ""  # the table of exercises says it better
    if options.mine and (options.reference or options.mistakes):
        raise pytest.UsageError("--mine grades your answers, --reference and --mistakes the book's: choose one")
    if options.record and not (options.reference or options.mistakes):
        raise pytest.UsageError(
            "--record writes what the oracles give, or what catches a mistake: use it with --reference or --mistakes"
        )
    for name in ("marks", "gradescope"):
        if fault := refusal(config.getoption(name)):
            raise pytest.UsageError(f"--{name} {fault}")
    grading.RECORDING.update(live=options.reference, write=options.reference and options.record)
    config.workbook_marks, config.workbook_catchers = Marks(), catchers.Record()
    if options.reference or options.mistakes:
        os.environ[resolve.VARIABLE] = "reference"
    config.workbook_world = os.environ.get(resolve.VARIABLE)
    try:
        resolve.sync()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config):
    return f"workbook: {_described(config)}"


def _described(config) -> str:
    if config.option.reference:
        return "grading the reference (solutions/)"
    if config.option.mistakes:
        return "grading the known mistakes: each must be caught"
    if config.option.mine:
        return "grading your answers (lib/), which also stand in for the other chapters'"
    return "grading your answers (lib/); names of other chapters are the reference's"


def world_of(config, module: str) -> str:
    """The world in which the tests of one chapter run."""
    if config.option.reference or config.option.mistakes:
        return "reference"
    return "mine" if config.option.mine else f"only:{module}"


# ---- collection ------------------------------------------------------------------------------------------------------


def _chapter_of(path: Path):
    for chapter in chapters().values():
        if path.is_relative_to(chapter.tests):
            return chapter
    return None


def exercise_of(chapter, test_name: str):
    """The exercise whose name follows ``test_``: the longest that fits.

    Raises:
        UsageError: none does.
    """
    stem = test_name.split("[")[0].removeprefix("test_")
    fitting = [e for e in chapter.exercises if stem == e.name or stem.startswith(e.name + "_")]
    if not fitting:
        names = ", ".join(e.name for e in chapter.exercises)
        raise pytest.UsageError(f"{chapter.tests.name}: {test_name} is named after no exercise; they are {names}")
    return max(fitting, key=lambda e: len(e.name))


def pytest_collection_modifyitems(config, items):
    wanted = []
    for what in config.option.exercise:
        try:
            wanted.append(find(what))
        except BookError as error:
            raise pytest.UsageError(str(error)) from error
    kept, dropped = [], []
    config.workbook_maintainers = 0
    for item in items:
        chapter = _chapter_of(item.path)
        item.workbook_exercise = exercise = exercise_of(chapter, item.originalname) if chapter else None
        if exercise is not None:
            item.extra_keyword_matches.add(exercise.name)
            item.repr_failure = _no_traceback  # messages.explain writes the report; pytest's own parses the test file
        maintainers = getattr(getattr(item, "function", None), "workbook_oracle", False) and not config.option.reference
        unwanted = wanted and not any(
            exercise is not None and exercise.module == c.module and e in (None, exercise) for c, e in wanted
        )
        beside = config.option.mistakes and exercise is None
        if maintainers and not unwanted and not beside:
            config.workbook_maintainers += 1
        (dropped if maintainers or unwanted or beside else kept).append(item)
        if item.get_closest_marker("gpu") and not _has_accelerator():
            item.add_marker(
                pytest.mark.skip(reason="needs an accelerator: run `pytest -m gpu` on a machine that has one")
            )
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = _mistake_items(kept) if config.option.mistakes else kept


def pytest_report_collectionfinish(config):
    n = getattr(config, "workbook_maintainers", 0)
    if n and not (config.option.mistakes or config.option.keyword or config.option.exercise):
        return (
            f"(deselected: {n} checks that compare the reference with other libraries; `pytest --reference` runs them)"
        )
    return None


def _no_traceback(excinfo, style=None) -> str:
    return f"{excinfo.typename}: {excinfo.value}"


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()


class MistakeItem(pytest.Item):
    """One wrong answer, which at least one of its exercise's tests must catch."""

    def __init__(self, *, mistake, tests, **kwargs):
        super().__init__(**kwargs)
        self.mistake, self.tests = mistake, tests
        self.workbook_exercise = tests[0].workbook_exercise

    def runtest(self):
        os.environ[resolve.VARIABLE] = "reference"
        with grading.standing_in(self.mistake):
            for test in self.tests:
                for report in _pytest_runtestprotocol(test):
                    if getattr(report, "workbook", {}).get("problem", "").startswith(messages.BOOKS_FAULT):
                        raise AssertionError(f"{test.name} did not grade the mistake: {report.longrepr}")
                    if report.failed:
                        self.add_report_section("call", "caught", f"{test.name}\n{report.longrepr}")
                        self.user_properties.append((catchers.PROPERTY, test.name))
                        return
        raise AssertionError(f"no test catches the mistake of {self.mistake.name}: {self.mistake.sentence}")

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, self.name


def _pytest_runtestprotocol(test):
    from _pytest.runner import runtestprotocol

    return runtestprotocol(test, log=False, nextitem=None)


def _mistake_items(items) -> list:
    by_exercise: dict = {}
    for item in items:
        by_exercise.setdefault(item.workbook_exercise, []).append(item)
    made = []
    for exercise, tests in by_exercise.items():
        caught_by = catchers.read(tests[0].path.parent)
        for nth, wrong in enumerate(grading.mistakes_of(exercise.module, exercise.name), start=1):
            name = f"{exercise.name}[{nth}-{wrong.implementation.__name__}]"
            ordered = catchers.likely_first(tests, caught_by.get(name))
            made.append(MistakeItem.from_parent(tests[0].parent, name=name, mistake=wrong, tests=ordered))
    return made


# ---- running ---------------------------------------------------------------------------------------------------------


def _limit(item, marker: str, default):
    found = item.get_closest_marker(marker)
    return float(found.args[0]) if found else default


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    exercise = getattr(item, "workbook_exercise", None)
    before = os.environ.get(resolve.VARIABLE)
    if exercise is None:
        _return_to(item.config.workbook_world)
        return None
    os.environ[resolve.VARIABLE] = world_of(item.config, exercise.module)
    resolve.sync()
    grading.case("")
    item.workbook_failed_before = item.config.workbook_marks.failed_before(exercise)
    try:
        if isinstance(item, MistakeItem):
            _protocol_without_setup(item)
            return True
        if not _isolated(item):
            return None  # pytest's own protocol; the limit is set in pytest_runtest_call
        item.session._setupstate.teardown_exact(item)  # what the last check of this process left set up for its file
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in isolate.run(item, _limit(item, "time_limit", TIME_LIMIT_S), _limit(item, "memory_limit", None)):
            _shorten(item, report)
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
    finally:
        if before is None and isinstance(item, MistakeItem):
            os.environ.pop(resolve.VARIABLE, None)


def _return_to(world: str | None) -> None:
    """Back to the world in which the tests were collected: what they imported is what they find, and what they patch."""
    if world is None:
        os.environ.pop(resolve.VARIABLE, None)
    else:
        os.environ[resolve.VARIABLE] = world
    resolve.sync()


def _shorten(item, report) -> None:
    """Tell a failure in a line if the exercise has failed before."""
    before = getattr(item, "workbook_failed_before", 0)
    if report.failed and before:
        report.longrepr = messages.in_one_line(report)
        report.workbook["repeated"] = before >= SHOWN_FAILURES


def _isolated(item) -> bool:
    option = item.config.option
    by_hand = option.no_isolate or option.usepdb or getattr(option, "trace", False)
    trusted = option.reference or option.mistakes
    return hasattr(os, "fork") and not by_hand and not trusted and "ranks" not in item.fixturenames


def _protocol_without_setup(item) -> None:
    """A mistake's item runs whole tests inside its call, so it has no fixtures of its own."""
    from _pytest.runner import CallInfo

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = CallInfo.from_call(item.runtest, when="call")
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    if getattr(item, "workbook_exercise", None) is None or isolate.inside() or item.config.option.usepdb:
        yield
        return
    patience = (
        6 if item.config.option.reference else 2 if "ranks" in item.fixturenames else 1
    )  # live oracles import slowly
    with alarm(patience * _limit(item, "time_limit", TIME_LIMIT_S)):
        yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    exercise = getattr(item, "workbook_exercise", None)
    if exercise is None or isinstance(item, MistakeItem):
        return
    report = outcome.get_result()
    report.workbook = messages.facts(exercise)
    if call.excinfo is not None and report.failed:
        messages.explain(item, call.excinfo, report)
        if not (isolate.inside() or item.config.option.reference or item.config.option.mistakes):
            _shorten(item, report)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    exercise = getattr(item, "workbook_exercise", None)
    if exercise is not None:
        item.user_properties += [
            ("exercise", f"{exercise.number} {exercise.name}"),
            ("graded", messages.graded_place(exercise)),
        ]


# ---- reporting -------------------------------------------------------------------------------------------------------


def pytest_report_teststatus(report, config):
    if report.failed and getattr(report, "workbook", {}).get("state") == "not started":
        return "not started", "n", "NOT STARTED"
    if report.failed and getattr(report, "workbook", {}).get("repeated"):
        return "failed but not shown", "F", "FAILED"
    return None


def pytest_runtest_logreport(report):
    if _session_config is not None:
        _session_config.workbook_marks.add(report)
        _session_config.workbook_catchers.add(_session_config.rootpath, report)


_session_config = None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    global _session_config
    _session_config = session.config


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    isolate.finish()
    if hasattr(session.config, "workerinput"):
        return
    if session.config.option.mistakes and session.config.option.record:
        session.config.workbook_catchers.write()
    if file := session.config.option.marks:
        marks = session.config.workbook_marks.as_json(_described(session.config))
        write_atomically(Path(file), json.dumps(marks, indent=2, ensure_ascii=False) + "\n")
    if file := session.config.option.gradescope:
        made = gradescope.results(session.config.workbook_marks.sorted_rows(), _described(session.config))
        write_atomically(Path(file), json.dumps(made, indent=2, ensure_ascii=False) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    if config.option.mistakes or config.option.reference or not config.workbook_marks.rows:
        return
    terminalreporter.section("exercises")
    for line in config.workbook_marks.table():
        terminalreporter.write_line(line)


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    """Begin to start the ranks of a chapter that is run as a whole while its tests are imported: both take seconds."""
    option = parent.config.option
    some = option.keyword or option.exercise or any("::" in argument for argument in parent.config.args)
    if some or option.collectonly or hasattr(parent.config, "workerinput") or not hasattr(os, "fork"):
        return
    if _chapter_of(module_path) is not None and "ranks(" in (text := module_path.read_text(encoding="utf-8")):
        from lib.ranks import pool

        if 'backend="mpi"' not in text:
            pool("gloo").warm()


class Ranks:
    """What the fixture gives: a check's own runs on warm ranks, within the time of the check."""

    def __init__(self, limit_s: float, shows_all: bool):
        self.limit_s, self.shows_all, self.started = limit_s, shows_all, time.monotonic()
        self.is_diagnosing = False

    def __call__(self, fn, *args, n_ranks: int = 4, backend: str = "gloo", time_limit_s: float | None = None):
        from lib.ranks import RankFailure, pool

        env = {resolve.VARIABLE: os.environ[resolve.VARIABLE], grading.MISTAKE: os.environ.get(grading.MISTAKE, "")}
        if self.is_diagnosing:
            seconds = min(time_limit_s or DIAGNOSED_RUN_S, DIAGNOSED_RUN_S)
            return pool(backend).run(fn, *args, n_ranks=n_ranks, time_limit_s=seconds, env=env, show_output=False)
        with paused():  # that processes start is no time of the answer's
            began = time.monotonic()
            pool(backend).ready()
            self.started += time.monotonic() - began
        left = max(1.0, self.limit_s - (time.monotonic() - self.started))
        outputs: list[str] = []
        try:
            result = pool(backend).run(
                fn, *args, n_ranks=n_ranks, time_limit_s=time_limit_s or left, env=env, show_output=self.shows_all
            )
            outputs = result.outputs
        except RankFailure as error:
            outputs = error.outputs
            raise
        finally:
            if not self.shows_all:
                _print_some(outputs)
        return result

    @contextlib.contextmanager
    def diagnosing(self):
        """Runs in this block are short and say nothing."""
        self.is_diagnosing = True
        try:
            yield
        finally:
            self.is_diagnosing = False


def _print_some(outputs: list[str]) -> None:
    from lib.ranks.noise import shown_lines

    for rank, text in enumerate(outputs):
        for line in shown_lines(text, SHOWN_LINES):
            print(f"[rank {rank}] {line}")


@pytest.fixture
def ranks(request):
    """Run a module-level function on 1 to 4 warm processes: ``ranks(fn, *args, n_ranks=4, backend="gloo")``."""
    shows_all = request.config.option.capture == "no"
    return Ranks(_limit(request.node, "time_limit", TIME_LIMIT_S), shows_all)
