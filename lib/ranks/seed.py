"""A process forked beforehand that becomes the keeper of a pool, so that nobody waits for the imports of a new one.

Who has imported what ranks need, and nothing of the project, calls `plant` before it goes on; the first pool for gloo of that
process then `grow`s its keeper from the seed. Without a seed a pool starts a process, which imports torch for seconds.
It is loaded by its path, from where nothing of the project may be imported, so it imports nothing of the project itself.
"""

import contextlib
import os
import pickle
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

VARIABLE = "RANKS_SEED"  # pid of the process that may use it, of the seed, and the descriptor by which it is told


def plant(on_growth: Callable[[], object] = lambda: None) -> None:
    """Fork a seed. It is gone when this process is; ``on_growth`` is called in it if it is used."""
    ours, theirs = socket.socketpair()
    owner, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            ours.close()
            _wait(theirs, on_growth)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    os.environ[VARIABLE] = f"{owner},{pid},{ours.detach()}"


def grow(arguments: list[str], control: int, log: int, environment: dict[str, str]) -> "Plant | None":
    """The keeper that is called with ``arguments``, made of this process's seed; None if it has none."""
    owner, pid, fd = map(int, os.environ.pop(VARIABLE, "0,0,0").split(","))
    if owner != os.getpid():
        return None
    with socket.socket(fileno=fd) as wire, contextlib.suppress(OSError):
        socket.send_fds(wire, [b"!"], [control, log])
        with Connection(os.dup(wire.fileno())) as connection:
            connection.send_bytes(pickle.dumps((arguments, environment)))
        return Plant(pid)
    return None


class Plant:
    """As much of `subprocess.Popen` as is asked of a keeper."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and timeout is not None:
            with contextlib.closing(_Descriptor(self.pid)) as process:
                if not process.ends_within(timeout):
                    raise subprocess.TimeoutExpired("keeper", timeout)
        return self._wait(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class _Descriptor:
    """A process that can be waited for with a limit; Linux only, as is everything that plants seeds."""

    def __init__(self, pid: int):
        self.fd = os.pidfd_open(pid)

    def ends_within(self, seconds: float) -> bool:
        import select

        return bool(select.select([self.fd], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self.fd)


def _wait(wire: socket.socket, on_growth: Callable[[], object]) -> None:
    """In the seed: sleep until it is told what to become, then be that; end when nobody can tell it any more."""
    told, fds, *_ = socket.recv_fds(wire, 1, 2)
    if not told:
        os._exit(0)
    on_growth()
    with Connection(wire.detach()) as connection:
        arguments, environment = pickle.loads(connection.recv_bytes())
    control, log = fds
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != control:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    keeper, backend, parent, mpiexec, mpi_log = arguments
    sys.argv = [keeper, backend, str(control), parent, mpiexec, mpi_log]
    runpy.run_path(keeper, run_name="__main__")
    os._exit(0)
