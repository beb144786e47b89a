"""The process that keeps the ranks of one pool: it starts them, reports how they end, and leaves none behind.

``python -P keeper.py BACKEND MPIEXEC LOG FD``. For gloo it has imported torch and forks a rank in milliseconds; for MPI
it starts mpiexec. It imports nothing of the project, so that a fork sees the project as it is on disk.

Commands: ("start", tag, n_ranks, runner, address), ("reuse", tag, runner), ("finish", tag),
("end", tag), ("answer", tag).
Events: ("answer", tag), ("exit", tag, rank, status), ("world", tag, is_alive), ("ended", tag).
"""

import contextlib
import gc
import importlib
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

PROCESSES = runpy.run_path(str(Path(__file__).with_name("processes.py")))
RANK = str(Path(__file__).with_name("rank.py"))
# torch._dynamo, because the first step of any optimizer imports it (1.4 s); checkpoints, because chapter 12 and every
# run do (0.1 s); the others, because most modules do
PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"),
    *("numpy", "einops", "jaxtyping", "yaml", "pytest"),
)


class Keeper:
    def __init__(self, backend: str, control: Connection, mpiexec: str, log: str):
        self.backend, self.control, self.mpiexec, self.log = backend, control, mpiexec, log
        self.children: dict[int, int | None] = {}  # process: its rank; None for mpiexec
        self.tag, self.runner = "", 0
        self.segments: set[str] = set()  # what MPI would leave in /dev/shm
        self.wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        PROCESSES["adopt_orphans"]()  # of the ranks, so that it can end them
        if backend == "gloo":
            for name in PRELOADED:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        self.serve = runpy.run_path(RANK)
        gc.freeze()

    def keep(self) -> None:
        """Run commands until the process at the other end of the control pipe is gone."""
        parent = os.getppid()
        while os.getppid() == parent:
            ready = wait([self.control, self.wake], timeout=1.0)
            if self.wake in ready:
                os.read(self.wake, 4096)
            self.reap()
            if self.runner and not _lives(self.runner):
                self.end_all()
            if self.control in ready:
                try:
                    command, *rest = pickle.loads(self.control.recv_bytes())
                except (EOFError, OSError):
                    return
                getattr(self, command)(*rest)

    def tell(self, *event: object) -> None:
        with contextlib.suppress(OSError):
            self.control.send_bytes(pickle.dumps(event))

    # ---- commands ----

    def start(self, tag: str, n_ranks: int, runner: int, address: str) -> None:
        self.end_all()
        self.tag, self.runner = tag, runner
        if self.backend == "mpi":
            self.start_mpi(n_ranks, address)
            return
        for rank in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                self.be_rank(rank, n_ranks, address)
            self.children[pid] = rank

    def reuse(self, tag: str, runner: int) -> None:
        alive = self.tag == tag and bool(self.children)
        if alive:
            self.runner = runner
            self.segments = {path for child in psutil.Process().children(True) for path in _shared_memory(child.pid)}
        self.tell("world", tag, alive)

    def finish(self, tag: str) -> None:
        if tag == self.tag:
            self.runner = 0

    def answer(self, tag: str) -> None:
        """Report that everything is imported."""
        self.tell("answer", tag)

    def end(self, tag: str) -> None:
        self.end_all()
        self.tell("ended", tag)

    # ---- processes ----

    def be_rank(self, rank: int, n_ranks: int, address: str) -> None:
        """What a forked child does; never returns."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        PROCESSES["end_with_parent"]()
        self.control.close()
        try:
            self.serve["serve"](address, self.tag, rank, n_ranks)
        except BaseException:
            traceback.print_exc()  # into the keeper's log
        finally:
            os._exit(1)

    def start_mpi(self, n_ranks: int, address: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not re.match(r"PMIX?_(?!MCA)|OMPI_COMM_|HYDI_", k)}
        environment["TMPDIR"] = str(Path(self.log).parent)  # where Open MPI leaves folders
        environment["RANKS_TMPDIR"] = os.environ.get("TMPDIR", "")
        command = [self.mpiexec, "-n", str(n_ranks), sys.executable, "-P", RANK, address, self.tag]
        with open(self.log, "w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.children[process.pid] = None
        process.returncode = 0  # it is reaped below, not by subprocess

    def reap(self) -> None:
        """Report every child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.children:
                    self.tell("exit", self.tag, self.children.pop(pid), status)

    def end_all(self) -> None:
        """End every descendant, and wait until they are gone."""
        self.runner = 0
        PROCESSES["end_descendants"]()
        self.children.clear()
        for path in self.segments:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.segments = set()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _shared_memory(pid: int) -> set[str]:
    """The segments in /dev/shm that an MPI rank has open; MPI leaves them there when it is killed."""
    try:
        return set(
            re.findall(r"/dev/shm/(?:mpich_|sm_segment|vader_segment)\S+", Path(f"/proc/{pid}/maps").read_text())
        )
    except OSError:
        return set()


if __name__ == "__main__":
    backend, mpiexec, log, control = sys.argv[1:]
    keeper = Keeper(backend, Connection(int(control)), mpiexec, log)
    try:
        keeper.keep()
    finally:
        keeper.end_all()
        shutil.rmtree(Path(log).parent, ignore_errors=True)
