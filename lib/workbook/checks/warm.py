"""A warm process that has imported PyTorch and pytest, and forks itself for every check.

Run as a script (``python -P lib/workbook/checks/warm.py SOCKET``), it imports nothing of the book's, so that each fork sees the
files as they are now. Where there is no fork (Windows) and on macOS, whose frameworks do not survive one, a check starts
a fresh process instead.
"""

import hashlib
import mmap
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

HERE = Path(__file__).resolve()
PRELOADED = (
    "torch",
    "numpy",
    "pytest",
    "_pytest.main",
    "einops",
    "jaxtyping",
    "regex",
    "yaml",
    "safetensors.torch",
    "rich.table",
)
# imported once a check has run on ranks: forks of this process then keep the ranks, and need what these import
FOR_RANKS = ("torch.distributed.fsdp", "torch._dynamo", "psutil")
SEED = HERE.parents[2] / "ranks" / "seed.py"
IDLE_S = 1800.0
INHERITED = ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV", "WORKBOOK_ROOT", "WORKBOOK_WORLD")


def can_fork() -> bool:
    return sys.platform == "linux" and hasattr(os, "fork")


# ---- the client's side -----------------------------------------------------------------------------------------------


def address(root: Path) -> str:
    """A socket that only this user, this checkout, this Python and this version of the file share."""
    key = "|".join(
        [str(root), sys.executable, str(HERE.stat().st_mtime_ns), *(os.environ.get(n, "") for n in INHERITED)]
    )
    folder = Path(tempfile.gettempdir()) / f"workbook-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    return str(folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock")


def run_pytest(arguments: list[str], root: Path) -> tuple[int, str]:
    """Exit status and output of ``pytest ARGUMENTS`` in the project, from the warm process where there can be one."""
    if can_fork() and os.environ.get("WORKBOOK_COLD", "") == "":
        connection = _connect(root)
        if connection is not None:
            with connection:
                connection.send(arguments)
                try:
                    return connection.recv()
                except EOFError:
                    pass  # the warm process is gone: do without it
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def _connect(root: Path, patience_s: float = 60.0) -> Connection | None:
    where = address(root)
    try:
        return Client(where, "AF_UNIX")
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    command = [sys.executable, "-P", str(HERE), where]
    with open(where + ".log", "wb") as log:
        server = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return Client(where, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.02)
    return None


# ---- the warm process ------------------------------------------------------------------------------------------------


def serve(where: str) -> None:
    """Answer checks until nobody has asked for half an hour, or another process took over the socket."""
    _import(PRELOADED)
    used_ranks = mmap.mmap(-1, 1)  # shared with the forks
    waiting = f"{where}.{os.getpid()}"
    with Listener(waiting, "AF_UNIX") as listener:
        os.replace(waiting, where)
        mine = os.stat(where).st_ino
        while _asked(listener._listener._socket):  # type: ignore[attr-defined]
            with listener.accept() as connection:
                try:
                    _answer(connection, used_ranks)
                except (EOFError, ConnectionError):
                    continue
            if used_ranks[0] and FOR_RANKS[0] not in sys.modules:
                _import(FOR_RANKS)
            if not os.path.exists(where) or os.stat(where).st_ino != mine:
                return
        os.unlink(where)


def _import(names: tuple[str, ...]) -> None:
    import gc
    import importlib

    for name in names:
        importlib.import_module(name)
    gc.freeze()


def _asked(socket) -> bool:
    """Wait until somebody asks; False after half an hour, or once the checkout that this file belongs to is gone."""
    deadline = time.monotonic() + IDLE_S
    while time.monotonic() < deadline and HERE.exists():
        if select.select([socket], [], [], 30.0)[0]:
            return True
    return False


def _answer(connection: Connection, used_ranks: mmap.mmap) -> None:
    """Fork, run one pytest in the child, send what came of it; end the child when the asker goes away."""
    arguments = connection.recv()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _check(arguments, output, used_ranks)
        done = os.pidfd_open(pid)
        try:
            ready = select.select([done, connection.fileno()], [], [])[0]
            if done not in ready:
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(done)
        output.seek(0)
        connection.send((os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")))


def _check(arguments: list[str], output, used_ranks: mmap.mmap) -> None:
    status = 3
    try:
        os.setsid()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a check needs the book's plugin only, and they cost time
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        if SEED.exists():
            runpy.run_path(str(SEED))["plant"](lambda: used_ranks.__setitem__(0, 1))
        import pytest

        sys.argv = ["pytest", *arguments]
        early = "ignore::pytest.PytestAssertRewriteWarning"  # plugins among what was imported beforehand
        status = int(pytest.main([*arguments, "-W", early]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
