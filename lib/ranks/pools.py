"""Pools of warm ranks: one for gloo and one for MPI, made on first use."""

import atexit
import importlib
import os
import pickle
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.ranks.deadlock import RankView, mismatch
from lib.ranks.failure import RankFailure
from lib.ranks.handle import Handle, Worker
from lib.ranks.ledger import Ledger
from lib.ranks.noise import meaningful
from lib.ranks.watch import Watch

BACKENDS = ("gloo", "mpi")
MAX_RANKS = 4


@dataclass(frozen=True)
class Result:
    """The result of a run, rank by rank: what the function returned, sent and printed."""

    values: list[Any]
    ledgers: list[Ledger]
    outputs: list[str]
    views: list[RankView]

    def mismatch(self) -> str:
        """The first collective on which the ranks disagreed although all returned, or messages that no rank received.

        Empty if nothing is wrong.
        """
        return mismatch(self.views)


class Pool:
    """Warm processes, four by default, that run a function as the ranks of one world."""

    def __init__(self, backend: str, max_ranks: int = MAX_RANKS):
        self.backend, self.max_ranks = backend, max_ranks
        self._handle: Handle | None = None
        self._lock = threading.RLock()

    def warm(self) -> None:
        """Start the pool without waiting for it. Processes forked after this share it, one at a time.

        Raises:
            RankFailure: fork, mpi4py or mpiexec is missing.
        """
        with self._lock:
            if self._handle is None or (self._handle.owner == os.getpid() and self._handle.process.poll() is not None):
                self.close()
                self._handle = Handle(self.backend, self.max_ranks)

    def ready(self) -> None:
        """Wait until a run can begin at once; the first time, and after a run that ended its ranks, this takes seconds.

        Raises:
            RankFailure: something is missing, or the ranks do not start.
        """
        with self._lock:
            self.warm()
            assert self._handle is not None
            with self._handle.alone():
                self._handle.ready()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        n_ranks: int = 2,
        time_limit_s: float = 10.0,
        env: Mapping[str, str] | None = None,
        show_output: bool = True,
        about: Callable[[], str] | None = None,
    ) -> Result:
        """Call ``function`` on each of ``n_ranks`` ranks and gather what it returns.

        Args:
            function: A function at a module's top level.
                It is called as ``function(rank, world_size, *args)`` on gloo ranks, whose default process group exists,
                and as ``function(comm, *args)`` on MPI ranks.
                Arguments are pickled.
            time_limit_s: Seconds that a rank may compute once all have begun;
                a rank that waits may take six times as long.
                Imports before that have a limit of 30 s of their own.
            env: Set in each rank's environment before anything of the project is imported.
            show_output: Print what the ranks printed, each line with its rank.
            about: A function at a module's top level. A rank whose function raised an exception calls it, and its
                result is the exception's attribute ``about``.

        Raises:
            ValueError: ``n_ranks`` is out of range, or the function cannot be found by its name.
            RankFailure: a rank raised or died, the ranks deadlocked, the time limit passed, or something is missing.
        """
        if not 1 <= n_ranks <= self.max_ranks:
            raise ValueError(f"n_ranks is {n_ranks}: expected 1 to {self.max_ranks}, the size of a pool")
        header = {**_surroundings(), "backend": self.backend, "n_ranks": n_ranks, "time_limit_s": time_limit_s}
        header.update(env=dict(env or {}), function=_named(function), args=pickle.dumps(args))
        header["about"] = None if about is None else _named(about)
        with self._lock:
            self.warm()
            assert self._handle is not None
            with self._handle.alone():
                return self._run(self._handle, header, show_output)

    def _run(self, handle: Handle, header: dict[str, Any], show_output: bool) -> Result:
        folder = handle.folder / uuid.uuid4().hex
        folder.mkdir()
        done, watch = False, None
        try:
            workers = handle.connect(header["n_ranks"])
            watch = Watch(handle, workers, folder, header["time_limit_s"])
            _send(workers, {**header, "folder": str(folder)})
            watch.until_done()
            values = [pickle.loads(watch.outcomes[w.rank].value or b"") for w in workers]
            done = self.backend == "mpi"
            return Result(values, [view.ledger for view in watch.views], watch.outputs(), watch.views)
        finally:
            if watch is not None and show_output:
                _show(watch.outputs())
            if done or (watch is not None and self.backend == "mpi" and _as_new(watch)):
                handle.tell("finish", handle.tag)
            else:
                self._end(handle)
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, handle: Handle) -> None:
        """End the ranks, or, if the keeper itself has ended, the rest of the pool."""
        try:
            handle.end_ranks()
        except RankFailure:
            self.close()

    def close(self) -> None:
        """End the pool's processes. It starts again when it is next used."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


_pools: dict[str, Pool] = {}


def pool(backend: str = "gloo") -> Pool:
    """The pool of this process for ``"gloo"`` or ``"mpi"``.

    Raises:
        ValueError: no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r}: the pools are {' and '.join(BACKENDS)}")
    return _pools.setdefault(backend, Pool(backend))


@atexit.register
def close_all() -> None:
    """End the processes of all pools."""
    for each in _pools.values():
        each.close()


def _renew_locks() -> None:
    """In a forked child, make new locks: one that another thread of the parent held would never be released."""
    for each in _pools.values():
        each._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _surroundings() -> dict[str, Any]:
    return {"path": list(sys.path), "cwd": os.getcwd()}


def _named(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    """Module, qualified name and file by which a rank finds the function."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module is None or "<" in qualname:
        raise ValueError(f"{qualname} must be a function at the top level of a module: ranks find it by its name")
    source = sys.modules.get(module) or importlib.import_module(module)
    file = getattr(source, "__file__", None)
    if module == "__main__" and not file:
        raise ValueError(
            f"{qualname} is defined in a notebook or a shell: put it into a file, from which ranks import it"
        )
    return module, qualname, str(Path(file).resolve()) if file else None


def _send(workers: list[Worker], header: dict[str, Any]) -> None:
    for worker in workers:
        try:
            worker.connection.send_bytes(pickle.dumps(header))
        except OSError:
            continue  # it has died, and its closed connection will show that


def _show(outputs: list[str]) -> None:
    for rank, text in enumerate(outputs):
        for line in meaningful(text):
            print(f"[rank {rank}] {line}")


def _as_new(watch: Watch) -> bool:
    """Whether every rank finished and no call failed or is still under way, so that the ranks can be used again."""
    told = len(watch.outcomes) == len(watch.workers) and all(o.status != "died" for o in watch.outcomes.values())
    return told and not any(v.n_failed or v.open or any(r.is_async for r in v.calls) for v in watch.views)
