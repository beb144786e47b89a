"""Processes that leave nothing behind: they end with their parent, and their descendants end with them."""

import contextlib
import ctypes
import os
import signal
import sys
import time

PATIENCE = 6  # a process that waits may take this many times the limit: a slow machine is not a mistake
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when its parent ends, for any reason. Does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the new parent of orphaned descendants, so that it can end them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill every descendant, also those that appear meanwhile; return when all are gone."""
    import psutil

    while _has_children():
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process's main thread; under load they grow more slowly than wall-clock time."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        pass
    import psutil

    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
