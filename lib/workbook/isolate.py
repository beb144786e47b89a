"""A check in a process of its own: an endless loop, a crash or a flood of memory ends the check and nothing else."""

import contextlib
import faulthandler
import os
import pickle
import re
import select
import signal
import sys
import tempfile
import time

from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

from lib.workbook import messages
from lib.workbook.catalog import ROOT

MEMORY_LIMIT_MB = 6144.0
_inside = False


def inside() -> bool:
    """Whether this process is the one made for a check."""
    return _inside


def run(item, time_limit_s: float, memory_limit_mb: float | None) -> list[TestReport]:
    """The reports of one test, run in a forked process."""
    if "tmp_path" in item.fixturenames:
        item.config._tmp_path_factory.getbasetemp()  # made here once, not anew in every child
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as stacks:
        started = time.time()
        pid = os.fork()
        if pid == 0:
            _child(item, reader, writer, stacks, memory_limit_mb)
        os.close(writer)
        try:
            payload, ended = _watch(pid, reader, time_limit_s, memory_limit_mb or MEMORY_LIMIT_MB)
        except BaseException:
            _kill(pid)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(reader)
        if ended:
            _stack_of(pid)
            _kill(pid)
        _, status = os.waitpid(pid, 0)
        _kill(pid)  # whatever the check itself started
        if payload and not ended:
            reports, growth_mb = pickle.loads(payload)
            reports = [item.config.hook.pytest_report_from_serializable(config=item.config, data=r) for r in reports]
            if memory_limit_mb is None or growth_mb <= memory_limit_mb:
                return reports
            ended = f"took {growth_mb:.0f} MB of memory, more than the {memory_limit_mb:g} MB under which it promises to stay"
        stacks.seek(0)
        text = stacks.read().decode(errors="replace")
        return [_ended_report(item, ended or _death(status), text, started)]


def _child(item, reader: int, writer: int, stacks, memory_limit_mb: float | None) -> None:
    """Run the test, send its reports, and leave without a trace."""
    global _inside
    status = 1
    try:
        _inside = True
        os.close(reader)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        faulthandler.enable(stacks, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        before = _peak_mb(start_anew=True)
        reports = runtestprotocol(item, log=False, nextitem=None)
        growth = _peak_mb() - before
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=r) for r in reports]
        view = memoryview(pickle.dumps((data, growth)))
        while view:
            view = view[os.write(writer, view) :]
        status = 0
    finally:
        os._exit(status)


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


def _watch(pid: int, reader: int, time_limit_s: float, memory_limit_mb: float) -> tuple[bytes, str]:
    """What the child sent, and why it was ended (empty if it finished by itself)."""
    chunks: list[bytes] = []
    deadline = time.monotonic() + time_limit_s
    base = _resident_mb(pid)
    while True:
        if select.select([reader], [], [], 0.05)[0]:
            chunk = os.read(reader, 1 << 20)
            if not chunk:
                return b"".join(chunks), ""
            chunks.append(chunk)
        if time.monotonic() > deadline:
            return b"", f"was not finished after {time_limit_s:g} s, the limit of this check"
        if _resident_mb(pid) - base > memory_limit_mb:
            return b"", f"took more than {memory_limit_mb:g} MB of memory, under which it promises to stay"


def _stack_of(pid: int) -> None:
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
    rows = [("case", messages.case_of(item))]
    if mine:
        rows.append(("at", messages.code_line(*mine[0])))
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
    report.workbook = {**messages.facts(exercise), "state": "wrong", "problem": why, "case": messages.case_of(item)}
    return report
