"""Runs a check in a child process, so that an answer can harm no process but its own.

``pytest`` (the judge, see `lib.workbook.book.boundary`) forks a guard, and the guard forks the runner,
which runs the tests of one exercise and sends a report after each test.
The guard only waits.
When the runner ends, or when the judge does (Ctrl-C, a signal, even ``kill -9``: its end of a socket then closes),
the guard kills the runner and every process that the runner started, and then ends itself.
"""

import contextlib
import faulthandler
import gc
import os
import re
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from time import monotonic, sleep
from typing import Any

import psutil

from lib.ranks.forkserver import NUMBER_BYTES, framed, read
from lib.ranks.processes import PATIENCE, adopt_orphans, cpu_seconds, end_descendants, end_with_parent
from lib.workbook.book import boundary, resolve
from lib.workbook.grading.cases import BOARD

MEMORY_LIMIT_MB = 6144.0
MACHINERY = "a fault of the machinery"  # a recorded stack begins with this if the book failed, not the answer
DIAGNOSIS_S = 30.0  # to find the mistake behind a failure; after that the report goes out without a diagnosis


Work = Callable[[int], Iterator[Any]]
"""Runs the check of an index, and yields what is sent back."""


@dataclass(frozen=True)
class Ended:
    """A runner that was ended, or ended on its own, before it could report.

    ``stack`` is what `faulthandler` wrote.
    ``is_time`` says that the time limit passed: the exercise's other checks are then skipped.
    ``in_import`` says that the learner's module was being imported: then the whole chapter is skipped.
    """

    why: str
    stack: str
    case: str
    is_time: bool = False
    in_import: bool = False


class Child:
    """The judge's handle on the guard and the runner of one exercise."""

    def __init__(self, world: str, work: Work):
        """Fork both.

        Each call of ``run`` runs ``work(index)`` in the runner; what that yields is sent back piece by piece.
        """
        self.world = world
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the child lives)
        BOARD.at_a_prompt(False)
        BOARD.importing(False)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, theirs = Pipe()
        self.line, line_end = socket.socketpair()
        self.guard = os.fork()
        if self.guard == 0:
            self._leave_after(_guard, self, theirs, line_end, work)
        theirs.close()
        line_end.close()
        try:
            self.runner = int(read(self.line, NUMBER_BYTES))
        except EOFError:  # the guard ended before it forked
            self.runner = 0

    def _leave_after(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in a forked process and never return.

        An exception here is the book's fault, and is recorded as such.
        """
        try:
            function(*arguments)
        except BaseException:
            os.write(self.stacks.fileno(), f"{MACHINERY}\n{traceback.format_exc()}".encode())
        finally:
            os._exit(1)

    def run(self, index: int, time_limit_s: float, memory_limit_mb: float | None) -> Iterator[Any]:
        """Yield what the runner sends for one test; if the runner ended before it sent anything, an `Ended` instead."""
        self.pipe.send(index)
        clock, told_anything = _Clock(self.runner, time_limit_s, memory_limit_mb or MEMORY_LIMIT_MB), False
        while True:
            why = self._wait(clock)
            try:
                said = None if why else self.pipe.recv()
            except (EOFError, ConnectionError):
                said = None
            if said is None:
                if why:
                    _write_stack(self.runner)
                ended = self.end(why, is_time=clock.is_over)
                if not told_anything:  # otherwise only the diagnosis is lost
                    yield ended
                return
            what, data = said
            if what == "done":
                return
            told_anything = True
            clock.diagnosing()
            yield data

    def _wait(self, clock: "_Clock") -> str:
        """Wait for a message from the runner.

        Returns why the runner must be ended, or "" when a message has arrived.
        """
        while not self.pipe.poll(0.02 if clock.is_fresh else 0.1):
            if why := clock.verdict():
                return why
        return ""

    def end(self, why: str = "", is_time: bool = False) -> Ended:
        """Have the guard end everything, and report how the runner ended."""
        self.pipe.close()
        self.line.settimeout(10)
        with contextlib.suppress(OSError):
            if why or not select.select([self.line], [], [], 2.0)[0]:
                self.line.shutdown(socket.SHUT_WR)
        status = b""
        with contextlib.suppress(OSError, EOFError):
            status = read(self.line, NUMBER_BYTES).strip()
        self.line.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.guard, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.guard, signal.SIGKILL)  # in case the guard itself was killed
        self.stacks.seek(0)
        stack = self.stacks.read().decode(errors="replace")
        return Ended(why or _death(status), stack, BOARD.case, is_time, BOARD.importing())

    def close(self) -> None:
        """End a runner whose work is done."""
        self.end("its work is done")


class _Clock:
    """The limits of one check: seconds of computing, several times as many seconds on the wall clock, and memory."""

    def __init__(self, pid: int, limit_s: float, memory_limit_mb: float):
        self.pid, self.limit_s, self.memory_limit_mb = pid, limit_s, memory_limit_mb
        self.started, self.cpu_before = monotonic(), cpu_seconds(pid)
        self.base_mb, self.is_over, self.is_fresh = resident_mb(pid), False, True
        self.deadline = self.started + PATIENCE * limit_s
        self.seen = self.started

    def diagnosing(self) -> None:
        """The report has arrived: from here on, the clock allows only for the diagnosis."""
        self.deadline, self.limit_s = monotonic() + DIAGNOSIS_S, float("inf")

    def verdict(self) -> str:
        """Why the runner must be ended; "" while it is within its limits."""
        now = monotonic()
        if BOARD.at_a_prompt():  # a person at a debugger takes as long as they like
            self.deadline += now - self.seen
        self.seen = now
        self.is_fresh = now - self.started < 1.0
        self.is_over = cpu_seconds(self.pid) - self.cpu_before > self.limit_s or now > self.deadline
        if self.is_over:
            return f"was not finished after {self.limit_s:g} s, the limit of this check"
        if resident_mb(self.pid) - self.base_mb > self.memory_limit_mb:
            return f"used more than {self.memory_limit_mb:g} MB of memory, the limit of this check"
        return ""


def resident_mb(pid: int) -> float:
    """The memory that a process holds now, in MB; 0 if there is no such process."""
    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    return 0.0


def peak_mb(start_anew: bool = False) -> float:
    """The peak memory of this process in MB since the peak was last reset; 0 on systems without Linux's /proc.

    Args:
        start_anew: Reset the peak to the present size first.
    """
    try:
        if start_anew:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) / 1024  # type: ignore[index]
    except (OSError, TypeError):
        return 0.0


def _guard(child: Child, pipe: Connection, line: socket.socket, work: Work) -> None:
    """The guard's program: wait until the runner or the judge has ended, then end every remaining descendant."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    adopt_orphans()
    child.line.close()
    runner = os.fork()
    if runner == 0:
        line.close()
        child._leave_after(_runner, child, pipe, work)
    pipe.close()
    child.pipe.close()
    line.sendall(framed(runner))
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status = b""
    while not status:
        ready: list[object] = select.select([line, ended], [], [], 1.0)[0]  # type: ignore[type-var]
        pid, code = os.waitpid(runner, os.WNOHANG)
        if pid:
            status = framed(code)
        elif line in ready and not line.recv(1):
            break
        if ended in ready:
            os.read(ended, 4096)
    end_descendants()
    with contextlib.suppress(OSError):
        line.sendall(status or b"ended".ljust(NUMBER_BYTES))
    os._exit(0)


def _runner(child: Child, pipe: Connection, work: Work) -> None:
    """The runner's program: run each check that the judge asks for, send its reports,
    and end when the judge hangs up.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    child.pipe.close()
    gc.freeze()  # or a collection would copy all pages that the judge's objects lie on
    boundary.become_child(child.world)
    resolve.enter(child.world)
    resolve.on_import = BOARD.importing
    faulthandler.enable(child.stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, child.stacks, all_threads=True)
    try:
        while True:
            for data in work(pipe.recv()):
                pipe.send(("told", data))
            with contextlib.suppress(Exception):  # whatever the answer has put in its place
                sys.stdout.flush()  # with -s; this process ends without it
            pipe.send(("done", None))
    except (EOFError, ConnectionError):
        os._exit(0)


def _write_stack(pid: int) -> None:
    """Have the runner write its stack into a file. faulthandler can do so even inside a C call that does not return."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        sleep(0.3)


def _death(told: bytes) -> str:
    if not told.isdigit():
        return "ended Python, together with the process that watches over the check"
    status = int(told)
    if os.WIFSIGNALED(status):
        return f"ended Python ({signal.Signals(os.WTERMSIG(status)).name})"
    return f"ended Python (exit status {os.WEXITSTATUS(status)})"
