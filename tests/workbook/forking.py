"""A process that has imported pytest and torch, and runs each pytest that it is asked for in a fork of itself.

``python -P forking.py SOCKET``: a fork imports the book that it is told, as a new process would, and takes no seconds to start.
"""

import atexit
import ctypes
import importlib
import os
import runpy
import signal
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Listener

PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch._dynamo", "numpy", "einops", "jaxtyping", "yaml", "psutil", "regex"),
    *("pytest", "_pytest.main", "xdist.plugin", "pytest_timeout", "rich.table", "safetensors.torch"),
)
EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins are among what was imported beforehand


def ask(where: str, arguments: list[str], cwd: str, env: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of ``python -m pytest ARGUMENTS``."""
    with Client(where, "AF_UNIX") as connection:
        connection.send((arguments, cwd, env))
        return connection.recv()


def serve(where: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends when the tests do
    for name in PRELOADED:
        importlib.import_module(name)
    with Listener(where, "AF_UNIX") as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as connection, tempfile.TemporaryFile() as output:
                request = connection.recv()
                pid = os.fork()
                if pid == 0:
                    _run(output, *request)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                output.seek(0)
                connection.send((status, output.read().decode(errors="replace")))


def _run(output, arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    status = 3
    try:
        os.setsid()
        os.chdir(cwd)
        os.environ.clear()
        # the toy books use none of the plugins, and they cost time
        os.environ.update(env, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        sys.path.insert(0, cwd)
        sys.argv = ["pytest", *arguments]
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        runpy.run_path(f"{cwd}/lib/ranks/seed.py")["plant"]()
        import pytest

        status = int(pytest.main([*arguments, *EARLY]))
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> None:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
