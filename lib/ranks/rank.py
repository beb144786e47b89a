"""One warm process that runs tasks. It imports nothing of the project before a task says where the project is.

``python -P rank.py ADDRESS TAG`` under mpiexec serves until its connection closes;
the keeper of the gloo ranks calls `serve` in each process that it forks.
"""

import contextlib
import importlib
import os
import pickle
import runpy
import signal
import sys
import sysconfig
from multiprocessing.connection import Client
from typing import Any

end_with_parent = runpy.run_path(os.path.join(os.path.dirname(__file__), "processes.py"))["end_with_parent"]


def serve(address: str, tag: str, rank: int, world_size: int) -> None:
    """Connect, then run each task that arrives; never returns."""
    try:
        connection = Client(address, "AF_UNIX")
        open(f"{os.path.dirname(address)}/rank-{os.getpid()}", "w").close()
        connection.send_bytes(pickle.dumps((tag, rank, os.getpid(), world_size)))
        environment, is_fresh = dict(os.environ), True
        while True:
            header = pickle.loads(connection.recv_bytes())
            _enter(header, environment)
            if not is_fresh:
                _forget_ours()
            is_fresh = False
            from lib.ranks.task import run_task

            connection.send_bytes(run_task(header, rank))
            if header["backend"] == "gloo":
                connection.recv_bytes()  # the other ranks may need this one until all have finished
    except (EOFError, OSError):
        os._exit(0)


def _enter(header: dict[str, Any], environment: dict[str, str]) -> None:
    """Adopt the caller's environment, folder and path."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(header["env"])
    with contextlib.suppress(OSError):
        os.chdir(header["cwd"])
    sys.path[:] = header["path"]
    importlib.invalidate_caches()


def _forget_ours() -> None:
    """Forget imports of files that may have changed since.

    A process that has run no task has none, and is not asked: a fork would copy the memory of every module for it.
    """
    for name, module in list(sys.modules.items()):
        if _libraries.get(name) is not module and _is_ours(name, module):
            del sys.modules[name]
    _libraries.update(sys.modules)


_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_INSTALLED = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _is_ours(name: str, module: object) -> bool:
    """Whether a module belongs neither to Python nor to an installed library."""
    if name.split(".")[0] in ("lib", "solutions", "tests", "__ranks_main__"):
        return True
    facts = getattr(module, "__dict__", {})
    places = [facts.get("__file__"), *(facts["__path__"] if isinstance(facts.get("__path__"), list) else [])]
    files = [place for place in places if isinstance(place, str) and not any(x in place for x in _LIBRARIES)]
    return name != "__main__" and any(not os.path.realpath(file).startswith(_INSTALLED) for file in files)


# modules of Python and of libraries; asking about each of them again would cost a rank a tenth of a second
_libraries = {name: module for name, module in sys.modules.items() if not _is_ours(name, module)}


def _watched(folder: str) -> None:
    """Fork, and continue in the child; this process waits for it, and writes how it died into ``death-PID``.

    If the child itself were mpiexec's process, mpiexec would end the other ranks when it dies. If it dies before the
    caller of its task knows it, mpiexec handles that.
    """
    end_with_parent()
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        return
    status = os.waitpid(pid, 0)[1]
    if status and os.path.exists(f"{folder}/rank-{pid}"):
        with open(f"{folder}/death-{pid}", "w") as file:
            file.write(f"{status}\n")
        signal.pause()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    _watched(os.path.dirname(sys.argv[1]))
    from mpi4py import MPI

    del os.environ["TMPDIR"]  # it was for MPI itself
    if theirs := os.environ.pop("RANKS_TMPDIR"):
        os.environ["TMPDIR"] = theirs
    serve(sys.argv[1], sys.argv[2], MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
