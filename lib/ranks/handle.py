"""The caller's side of a pool: its keeper, the connections to its ranks, and the folder that they share."""

import contextlib
import fcntl
import importlib.util
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lib.ranks import forkserver, mpi_launch
from lib.ranks.failure import RankFailure

KEEPER = str(Path(__file__).with_name("keeper.py"))
# torch._dynamo, because the first step of any optimizer imports it; the others because ranks, or most modules, do
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"),
    *("psutil", "numpy", "einops", "jaxtyping", "yaml"),
)
START_LIMIT_S = 90.0


@dataclass
class Worker:
    """One rank's process, as the caller knows it."""

    rank: int
    pid: int
    connection: Connection


@dataclass
class Handle:
    """A keeper and what belongs to it.

    A forked child may use its parent's keeper while the parent waits for the child.
    """

    backend: str
    max_ranks: int
    owner: int = field(default_factory=os.getpid)
    tag: str = ""
    n_tasks: int = 0
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        mpiexec = _require(self.backend)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        if len(str(self.folder)) > 90:  # a socket's path has about a hundred characters
            self.folder.rmdir()
            self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))
        self.address = str(self.folder / "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.listen(16)
        ours, theirs = socket.socketpair()
        with theirs, open(self.folder / "keeper", "w") as log:
            self.process = self._start_keeper(mpiexec, theirs.fileno(), log.fileno())
        self.control = Connection(ours.detach())

    def _start_keeper(self, mpiexec: str, control: int, log: int) -> "subprocess.Popen[bytes] | forkserver.Forked":
        """Start the keeper; if this process came from a fork server, as a fork of it,
        which saves seconds of imports.
        """
        arguments = [self.backend, mpiexec, str(self.folder / "mpiexec")]
        server = os.environ.get(forkserver.VARIABLE)
        if server and self.backend == "gloo":
            request = forkserver.Request(
                program=KEEPER, arguments=arguments, folder=os.getcwd(), environment=_environment(), preload=PRELOADED
            )
            with contextlib.suppress(OSError):
                return forkserver.ask(server, request, log, [control])
        return subprocess.Popen(
            [sys.executable, "-P", KEEPER, *arguments, str(control)],
            pass_fds=[control],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(),
        )

    def log(self, name: str) -> str:
        """What the keeper or mpiexec has printed."""
        with contextlib.suppress(OSError):
            return (self.folder / name).read_text(errors="replace").strip()
        return ""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the pool: processes that share it take turns."""
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # ---- commands to the keeper, and its events ----

    def tell(self, *command: object) -> None:
        try:
            self.control.send_bytes(pickle.dumps(command))
        except OSError:
            raise self.broken("the process that keeps the ranks has ended") from None

    def hear(self, timeout_s: float) -> tuple[Any, ...]:
        """The keeper's next event about our ranks; () if none came in time.

        Raises:
            RankFailure: the keeper has ended.
        """
        try:
            while self.control.poll(timeout_s):
                event: tuple[Any, ...] = pickle.loads(self.control.recv_bytes())
                if event[1] == self.tag:
                    return event
        except (EOFError, OSError):
            raise self.broken("the process that keeps the ranks has ended") from None
        return ()

    def hear_of(self, kind: str) -> tuple[Any, ...]:
        """The keeper's next event of this kind; skips others."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            event = self.hear(1.0)
            if event and event[0] == kind:
                return event
        raise self.broken(f"the process that keeps the ranks gave no {kind!r} in {START_LIMIT_S:g} s")

    def broken(self, message: str) -> RankFailure:
        said = self.log("keeper")
        return RankFailure(f"{message}{': ' + said[-2000:] if said else ''}", kind="missing")

    # ---- ranks ----

    def ready(self) -> None:
        """Return when the next task can begin at once. The caller must hold the pool."""
        if self.backend == "mpi":
            self.connect(self.max_ranks)
        else:
            self.tell("answer", self.tag)
            self.hear_of("answer")

    def connect(self, n_ranks: int) -> list[Worker]:
        """Processes for the next task, warm ones if there are any."""
        if self.workers and self.backend == "mpi" and self.n_tasks < 200:
            self.tell("reuse", self.tag, os.getpid())
            if self.hear_of("world")[2]:
                self.n_tasks += 1
                return self.workers[:n_ranks]
        self.drop()
        self.n_tasks = 1
        self._start(self.max_ranks if self.backend == "mpi" else n_ranks)
        if self.backend == "mpi":
            self.tell("reuse", self.tag, os.getpid())
            self.hear_of("world")
        return self.workers[:n_ranks]

    def _start(self, n_ranks: int) -> None:
        """New processes.

        MPI's once failed to come, and once failed in ``MPI_Init``, for no known reason, so they get a second start,
        which ends those of the first.
        """
        limits_s = [START_LIMIT_S / 2, START_LIMIT_S] if self.backend == "mpi" else [START_LIMIT_S]
        for limit_s in limits_s:
            self.tag = uuid.uuid4().hex
            self.tell("start", self.tag, n_ranks, os.getpid(), self.address)
            deadline = time.monotonic() + limit_s
            workers: list[Worker] = []
            while len(workers) < n_ranks and isinstance(came := self._accept(n_ranks, deadline), Worker):
                workers.append(came)
            if len(workers) == n_ranks:
                self.workers = sorted(workers, key=lambda worker: worker.rank)
                return
        why = came or f"the ranks did not start within {sum(limits_s):g} s"
        raise self.broken(f"{why} {self.log('mpiexec')}")

    def _accept(self, n_ranks: int, deadline: float) -> Worker | str:
        """The next rank that has started; if they ended, a sentence that says so; at the deadline, an empty one."""
        while time.monotonic() < deadline:
            ready = wait([self.listener, self.control], timeout=1.0)
            if self.control in ready and (event := self.hear(0)) and event[0] == "exit":
                return f"the ranks ended while they were started (status {event[3]})"
            if self.listener not in ready:
                continue
            connection = Connection(self.listener.accept()[0].detach())
            with contextlib.suppress(EOFError, OSError):
                tag, rank, pid, world_size = pickle.loads(connection.recv_bytes())
                if tag == self.tag and world_size == n_ranks:
                    return Worker(rank, pid, connection)
                if tag == self.tag:
                    raise RankFailure(
                        f"mpiexec started worlds of {world_size} rank instead of one of {n_ranks}: "
                        "it belongs to another "
                        "MPI than the one that mpi4py has loaded"
                    )
        return ""

    def drop(self) -> None:
        """Forget the connections to the ranks."""
        for worker in self.workers:
            worker.connection.close()
        self.workers = []

    def end_ranks(self) -> None:
        """End every rank and everything that the ranks started; return when they are gone."""
        self.drop()
        self.tell("end", self.tag)
        self.hear_of("ended")

    def close(self) -> None:
        """End the keeper, and with it every rank. Does nothing in a process that did not make the keeper."""
        if os.getpid() != self.owner:
            return
        self.drop()
        self.control.close()
        self.listener.close()
        if not self.tag:
            self.process.kill()  # it has started no process, and may still be importing
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _require(backend: str) -> str:
    """The path of mpiexec, empty for gloo.

    Raises:
        RankFailure: something that the backend needs is missing.
    """
    if not hasattr(os, "fork") or not hasattr(socket, "AF_UNIX"):
        raise RankFailure("ranks need a system with fork: Linux, macOS, or WSL on Windows")
    if backend == "gloo":
        return ""
    if importlib.util.find_spec("mpi4py") is None:
        raise RankFailure("mpi4py is missing: python -m pip install mpi4py mpich")
    try:
        return mpi_launch.mpiexec()
    except FileNotFoundError as error:
        raise RankFailure(str(error)) from None


def _environment() -> dict[str, str]:
    """An environment in which a fork is safe (no threads before it) and gloo finds its peers without a network."""
    environment = {k: v for k, v in mpi_launch.mpi_environment().items() if k != forkserver.VARIABLE}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", mpi_launch.loopback())
    return environment
