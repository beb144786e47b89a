"""A check in a process of its own: an endless loop, a crash or a flood of memory ends the check and nothing else."""

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback

from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

from lib.workbook import grading
from lib.workbook.checks import messages
from lib.workbook.book import resolve
from lib.workbook.book.catalog import ROOT

MEMORY_LIMIT_MB = 6144.0
_inside = False


def inside() -> bool:
    """Whether this process is the one made for a check."""
    return _inside


class Child:
    """A forked process that runs the tests it is told to, one after the other, until one of them ends it."""

    def __init__(self, session):
        self.config = session.config
        self.world = os.environ.get(resolve.VARIABLE)
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        sys.stdout.flush()
        sys.stderr.flush()
        grading.BOARD = mmap.mmap(-1, 1024)  # shared after the fork
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(session, theirs, self.stacks, self.pipe)
        theirs.close()

    def run(self, item, time_limit_s: float, memory_limit_mb: float | None) -> list[TestReport]:
        """The reports of one test; the child is gone afterwards if the test had to be ended."""
        started = time.time()
        self.pipe.send((item.session.items.index(item), memory_limit_mb is not None, item.workbook_failed_before))
        try:
            ended = self._wait(time_limit_s, memory_limit_mb or MEMORY_LIMIT_MB)
            data, growth_mb = (None, 0.0) if ended else self.pipe.recv()
        except (EOFError, ConnectionError):
            ended, data, growth_mb = "", None, 0.0
        except BaseException:
            self.end()
            raise
        if data is not None and growth_mb <= (memory_limit_mb or MEMORY_LIMIT_MB):
            return [self.config.hook.pytest_report_from_serializable(config=self.config, data=r) for r in data]
        if data is not None:
            ended = f"took {growth_mb:.0f} MB of memory, more than the {memory_limit_mb:g} MB under which it promises to stay"
        elif ended:
            _write_stack(self.pid)
        status = self.end()
        self.stacks.seek(0)
        return [_ended_report(item, ended or _death(status), self.stacks.read().decode(errors="replace"), started)]

    def _wait(self, time_limit_s: float, memory_limit_mb: float) -> str:
        """Why the child has to be ended; empty once it answers."""
        deadline, base = time.monotonic() + time_limit_s, _resident_mb(self.pid)
        while not self.pipe.poll(0.05):
            if time.monotonic() > deadline:
                return f"was not finished after {time_limit_s:g} s, the limit of this check"
            if _resident_mb(self.pid) - base > memory_limit_mb:
                return f"took more than {memory_limit_mb:g} MB of memory, under which it promises to stay"
        return ""

    def end(self) -> int:
        """Kill the child and whatever it started; return its exit status."""
        global _child
        self.pipe.close()
        _kill(self.pid)
        _, status = os.waitpid(self.pid, 0)
        _kill(self.pid)
        _child = None if _child is self else _child
        return status


_child: Child | None = None


def run(item, time_limit_s: float, memory_limit_mb: float | None) -> list[TestReport]:
    """The reports of one test, run in a process of its own or in one that ran only checks of the same chapter."""
    global _child
    if "tmp_path" in item.fixturenames:
        item.config._tmp_path_factory.getbasetemp()  # made here once, not anew in every child
    if _child is not None and (memory_limit_mb is not None or _child.world != os.environ.get(resolve.VARIABLE)):
        _child.end()
    if _child is None:
        _child = Child(item.session)
    return _child.run(item, time_limit_s, memory_limit_mb)


def finish() -> None:
    """End the child that is left when the session is over."""
    if _child is not None and not _inside:
        _child.end()


def _serve(session, pipe, stacks, parents_end) -> None:
    """In the child: run what is asked for, send the reports, and leave without a trace."""
    global _inside
    try:
        _inside = True
        parents_end.close()
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        faulthandler.enable(stacks, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        while True:
            index, measure, failed_before = pipe.recv()
            item = session.items[index]
            item.workbook_failed_before = failed_before
            before = _peak_mb(start_anew=True) if measure else 0.0
            reports = runtestprotocol(item, log=False, nextitem=None)
            growth = _peak_mb() - before if measure else 0.0
            to_data = item.config.hook.pytest_report_to_serializable
            pipe.send(([to_data(config=item.config, report=r) for r in reports], growth))
    except EOFError:
        os._exit(0)
    except BaseException:  # a fault of the machinery's own, to be seen in the report
        faulthandler.dump_traceback(stacks)
        os.write(stacks.fileno(), traceback.format_exc().encode())
        os._exit(1)
    finally:
        os._exit(0)


def _peak_mb(start_anew: bool = False) -> float:
    """The largest resident size of this process in MB, since it was last started anew; 0 where Linux's /proc is missing."""
    try:
        if start_anew:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) / 1024  # type: ignore[index]
    except (OSError, TypeError):
        return 0.0


def _resident_mb(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def _write_stack(pid: int) -> None:
    """Have the child write down where it is; faulthandler does so also while a C call does not return."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"ended Python itself ({name})"
    return f"ended Python itself (exit status {os.WEXITSTATUS(status)})"


def _ended_report(item, why: str, stack: str, started: float) -> TestReport:
    """A failed report for a check that could not make its own."""
    exercise = item.workbook_exercise
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    mine = [
        (file, int(line))
        for file, line, _ in frames
        if file.startswith(str(ROOT / "lib") + os.sep) and "workbook" not in file
    ]
    board = bytes(grading.BOARD or b"").rstrip(b"\0").decode(errors="ignore")
    rows = [("case", board or messages.case_of(item))]
    if mine:
        rows.append(("at", messages.code_line(*mine[0])))
    if "Traceback" in stack:
        rows.append(("the book's", stack[stack.index("Traceback") :].strip()))
    report = TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=messages.layout(exercise, why, rows),
        when="call",
        duration=time.time() - started,
        start=started,
        stop=time.time(),
    )
    told = {"state": "wrong", "problem": why, "case": rows[0][1]}
    report.workbook = messages.facts(exercise) | told  # type: ignore[attr-defined]
    return report
