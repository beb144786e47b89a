"""A process that has imported the slow libraries, and runs each requested program in a fork of itself.

``python -P forkserver.py SOCKET MODULE...`` imports the modules and listens.
A request is a program (a module, or a file), its arguments, its folder, its environment,
a descriptor for what it prints, and further descriptors that it keeps.
The server replies with the program's process number, and later with its exit status.
It ends the program when the requester's connection closes, for whatever reason.
It imports nothing of the project, so that each program sees the files as they are now.
Linux only.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FORKSERVER"  # tells a forked program where the server is
IDLE_S = 900.0
NUMBER_BYTES = 16  # of a process number or an exit status on a wire


@dataclass(kw_only=True)
class Request:
    """What to run: ``program`` is a module's name or the path of a file; ``fds`` become the last arguments."""

    program: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    preload: tuple[str, ...] = ()  # imported by the server afterwards, for the next such program


class Forked:
    """A program that a server runs, with the part of `subprocess.Popen`'s interface that we use."""

    def __init__(self, wire: socket.socket):
        self.wire = wire
        self.returncode: int | None = None
        try:
            self.pid = int(read(wire, NUMBER_BYTES))
        except EOFError:
            raise ConnectionError("the fork server ended") from None

    def poll(self) -> int | None:
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self.wire], [], [], timeout)[0]:
            self.returncode = -signal.SIGKILL
            with contextlib.suppress(OSError, EOFError):
                self.returncode = int(read(self.wire, NUMBER_BYTES))
            self.wire.close()
        return self.returncode

    def kill(self) -> None:
        """Close the connection; the server then ends the program."""
        if self.returncode is None:
            with contextlib.suppress(OSError):
                self.wire.shutdown(socket.SHUT_WR)


def ask(where: str, request: Request, output: int, fds: Sequence[int] = ()) -> Forked:
    """Ask the server at ``where`` to run a program.

    Raises:
        OSError: there is no server, or it ended before it replied.
    """
    wire = socket.socket(socket.AF_UNIX)
    try:
        wire.connect(where)
        socket.send_fds(wire, [b"!"], [output, *fds])
        data = pickle.dumps(request.__dict__)
        wire.sendall(len(data).to_bytes(8, "big") + data)
        return Forked(wire)
    except BaseException:
        wire.close()
        raise


def start(where: str, modules: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Start a server and wait until it listens.

    Args:
        where: The path of its socket.
        modules: What it imports first.
        settings: Of `subprocess.Popen`.

    Returns:
        Its process. It has ended if the server could not start.
    """
    command = [sys.executable, "-P", str(Path(__file__).resolve()), where, *modules]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, **settings)
    while not os.path.exists(where) and server.poll() is None:
        time.sleep(0.02)
    return server


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(where: str, modules: Sequence[str], idle_s: float = IDLE_S) -> None:
    """Serve until no request has come for a while and nothing runs, or another process took over the socket."""
    _import(modules)
    waiting = f"{where}.{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(waiting)
    listener.listen(64)
    os.replace(waiting, where)
    mine, used_at = os.stat(where).st_ino, time.monotonic()
    running: dict[socket.socket, tuple[int, int]] = {}  # wire of a requester: process id and descriptor of its program
    while running or (time.monotonic() - used_at < idle_s and _is_mine(where, mine)):
        waited: list[Any] = [listener, *running, *(fd for _, fd in running.values())]
        ready = select.select(waited, [], [], 10.0)[0]
        if listener in ready:
            used_at = time.monotonic()
            wire, _ = listener.accept()
            with contextlib.suppress(OSError, EOFError):
                preload = _start(wire, listener, running)
                _import(preload)
        for wire, (pid, process) in list(running.items()):
            if process in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    wire.sendall(framed(status))
            elif wire in ready:  # the requester has gone
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                continue
            used_at = time.monotonic()
            os.close(process)
            wire.close()
            del running[wire]
    if _is_mine(where, mine):
        os.unlink(where)


def _is_mine(where: str, inode: int) -> bool:
    """Whether the socket still belongs to this process and this file's checkout still exists."""
    return os.path.exists(__file__) and os.path.exists(where) and os.stat(where).st_ino == inode


def _import(names: Sequence[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if missing:
        gc.freeze()


def _start(
    wire: socket.socket, listener: socket.socket, running: dict[socket.socket, tuple[int, int]]
) -> tuple[str, ...]:
    """Read a request and fork its program; return the modules to import for the next one."""
    wire.settimeout(10)
    told, fds, *_ = socket.recv_fds(wire, 1, 8)
    if not told:
        wire.close()
        return ()
    size = int.from_bytes(read(wire, 8), "big")
    request = Request(**pickle.loads(read(wire, size)))
    wire.settimeout(None)
    pid = os.fork()
    if pid == 0:
        listener.close()
        for other, (_, process) in running.items():
            other.close()
            os.close(process)
        wire.close()
        _be(request, fds)
    for fd in fds:
        os.close(fd)
    wire.sendall(framed(pid))
    running[wire] = pid, os.pidfd_open(pid)
    return request.preload


def framed(number: int) -> bytes:
    """A number in as many bytes as the other end reads, so that two numbers in a row stay two."""
    return str(number).encode().ljust(NUMBER_BYTES)


def read(wire: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, however many pieces they come in.

    Raises:
        EOFError: the other end hung up before.
    """
    data = b""
    while len(data) < size:
        piece = wire.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _be(request: Request, fds: list[int]) -> None:
    """Run the program, in the fork; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        output, *kept = fds
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        is_file = request.program.endswith(".py")
        ahead = [] if is_file else [request.folder]
        ahead += [entry for entry in request.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:0] = [entry for entry in ahead if entry not in sys.path]
        sys.argv = [request.program, *request.arguments, *map(str, kept)]
        run = runpy.run_path if is_file else runpy.run_module
        run(request.program, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        for text in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                text.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(str(Path(sys.argv[1])), sys.argv[2:])
