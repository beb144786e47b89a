"""Watches the ranks of one run until all have finished, or none can go on."""

import contextlib
import os
import pickle
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lib.ranks.deadlock import RankView, blockers, stuck
from lib.ranks.failure import Outcome, RankFailure, explain
from lib.ranks.handle import Handle, Worker
from lib.ranks.noise import brief
from lib.ranks.processes import PATIENCE, cpu_seconds

IMPORT_LIMIT_S = 30.0  # before the function is called
SETTLED_S = 2.0  # how long all ranks must wait before we call it a deadlock
GONE_S = 0.5  # the same, if they wait for a rank that has returned
ECHO_S = 1.0  # how much later than its consequences a root cause may arrive
FINISH_S = 0.3  # how long an unblocked rank may go on after another has raised
LATE_S = 3.0  # how long to wait for a rank that has not begun after another has raised: it may raise the same


class Watch:
    """One run: how each rank ended, and where it is until then."""

    def __init__(self, handle: Handle, workers: list[Worker], folder: Path, time_limit_s: float):
        self.handle, self.workers, self.folder, self.time_limit_s = handle, workers, folder, time_limit_s
        self.began_at = time.monotonic()
        self.outcomes: dict[int, Outcome] = {}
        self.computed_before: dict[tuple[int, bool], float] = {}
        self.views = [RankView(w.rank, folder / f"journal-{w.rank}", self.began_at) for w in workers]

    def until_done(self) -> None:
        """Return when every rank has returned.

        Raises:
            RankFailure: a rank raised or died, or they cannot finish, or not in time.
        """
        while len(self.outcomes) < len(self.workers):
            self._receive(0.1)
            self._read()
            if any(outcome.status != "returned" for outcome in self.outcomes.values()):
                self._await_cause()
                raise self._failure(None)
            if self._is_deadlock():
                raise self._failure(None)
            if self._is_over_time():
                raise self._failure(self.time_limit_s)
        self._read()

    def _receive(self, timeout_s: float) -> None:
        """Receive the outcomes that have arrived."""
        awaited = {w.connection: w for w in self.workers if w.rank not in self.outcomes}
        for connection in wait([*awaited, self.handle.control], timeout=timeout_s):
            if connection not in awaited:
                event = self.handle.hear(0)
                if event and event[0] == "exit" and event[2] is not None and event[2] not in self.outcomes:
                    self.outcomes[event[2]] = Outcome("died", text=_death(event[3]))
                continue
            worker = awaited[connection]
            try:
                self.outcomes[worker.rank] = _outcome(pickle.loads(worker.connection.recv_bytes()))
            except (EOFError, OSError):
                self.outcomes[worker.rank] = Outcome("died", text=self._cause_of_death(worker))

    def _cause_of_death(self, worker: Worker) -> str:
        """How a rank ended after its connection closed, as its keeper or its guard reports."""
        note = self.handle.folder / f"death-{worker.pid}"
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            event = self.handle.hear(0.05)
            if event and event[0] == "exit" and event[2] == worker.rank:
                return _death(event[3])
            if event and event[0] == "exit" and event[2] is not None and event[2] not in self.outcomes:
                self.outcomes[event[2]] = Outcome("died", text=_death(event[3]))
            if note.exists() and note.read_text().endswith("\n"):
                return _death(int(note.read_text()))
            if event and event[0] == "exit" and event[2] is None:
                return "mpiexec ended: " + (self.handle.log("mpiexec")[-500:] or _death(event[3]))
        return "it ended without saying why"

    def _read(self) -> None:
        for view in self.views:
            view.read()
            if view.rank in self.outcomes and self.outcomes[view.rank].status == "died":
                view.phase = "dead"

    def _await_cause(self) -> None:
        """Give the rank that caused the failure the time to report it."""
        began = time.monotonic()
        self._receive(0.1)
        self._read()
        while len(self.outcomes) < len(self.workers):
            bad = [outcome for outcome in self.outcomes.values() if outcome.status != "returned"]
            late = any(v.is_starting or (v.is_over and v.rank not in self.outcomes) for v in self.views)
            held_up = all(v.is_over or blockers(v, self.views) for v in self.views)
            patience = LATE_S if late else ECHO_S if all(outcome.is_echo for outcome in bad) else FINISH_S
            if held_up and patience == FINISH_S:
                break
            if time.monotonic() - began >= patience:
                break
            self._receive(0.05)
            self._read()

    def _is_deadlock(self) -> bool:
        """Whether no rank can go on, and this has lasted long enough."""
        hopeless = stuck(self.views)
        if not hopeless:
            return False
        latest = max(v.phase_at if v.is_over else v.waits_since for v in self.views)
        over = {v.rank for v in self.views if v.is_over}
        gone = any(blockers(self.views[rank], self.views) & over for rank in hopeless)
        return time.monotonic() - latest > (GONE_S if gone else SETTLED_S)

    def _is_over_time(self) -> bool:
        """Whether a rank has computed for longer than the limit, or the whole run has taken several times as long."""
        is_starting = any(v.is_starting for v in self.views)
        limit_s = max(IMPORT_LIMIT_S, self.time_limit_s) if is_starting else self.time_limit_s
        begun = [v.phase_at for v in self.views if v.phase == "running"]
        since = self.began_at if is_starting else max(begun, default=time.monotonic())
        computed = [self._computed_s(w, v, is_starting) for w, v in zip(self.workers, self.views, strict=True)]
        took = time.monotonic() - since
        return took > PATIENCE * limit_s or (took > limit_s and max(computed) > limit_s)

    def _computed_s(self, worker: Worker, view: RankView, is_starting: bool) -> float:
        """Seconds for which a rank has computed since it was first seen to start, or to run; 0 once it is over."""
        if view.is_over:
            return 0.0
        now = cpu_seconds(worker.pid)
        return now - self.computed_before.setdefault((worker.rank, is_starting), now)

    def _failure(self, limit_s: float | None) -> RankFailure:
        self._ask_where()
        self._read()
        self._take_late()
        stacks = {w.rank: self.folder / f"stack-{w.rank}" for w in self.workers}
        kind, culprit, message, states = explain(self.views, self.outcomes, stacks, limit_s, self._raw_outputs())
        if kind == "died" and culprit is not None and not self.views[culprit].has_begun:
            message += f"\n{self.handle.log('keeper')[-2000:]}"
        error = _loaded(self.outcomes[culprit].error) if culprit is not None and kind == "raised" else None
        return RankFailure(
            message,
            kind=kind,
            rank=culprit,
            per_rank=states,
            error=error,
            ledgers=[view.ledger for view in self.views],
            outputs=self.outputs(),
        )

    def _take_late(self) -> None:
        """Receive the outcomes of ranks that ended while the others were asked where they are."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(v.is_over and v.rank not in self.outcomes for v in self.views):
            self._receive(0.05)
            self._read()

    def _ask_where(self) -> None:
        """Make every rank that still runs write its stack: a computing rank in Python,
        one inside a C call by faulthandler.
        """
        asked = {}
        for worker, view in zip(self.workers, self.views, strict=True):
            if worker.rank not in self.outcomes and view.phase != "starting":
                asked[worker.pid] = self.folder / f"stack-{worker.rank}"
                _signal(worker.pid, signal.SIGUSR2 if view.open else signal.SIGUSR1)
        began, before, is_late = time.monotonic(), [0] * len(asked), False
        while (sizes := [_size(path) for path in asked.values()]) != before or not all(sizes):
            if time.monotonic() - began > 1.3:
                break
            if time.monotonic() - began > 0.3 and not is_late:
                is_late = True
                for pid, size in zip(asked, sizes, strict=True):
                    if not size:
                        _signal(pid, signal.SIGUSR2)
            before = sizes
            time.sleep(0.05)

    def outputs(self) -> list[str]:
        """What each rank printed, without gloo's own greetings."""
        return [
            "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo]"))
            for text in self._raw_outputs()
        ]

    def _raw_outputs(self) -> list[str]:
        paths = [self.folder / f"output-{worker.rank}" for worker in self.workers]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _outcome(told: dict[str, Any]) -> Outcome:
    if "value" in told:
        return Outcome("returned", value=told["value"])
    text = f"{told['type']}: {brief(told['text'])}".removesuffix(": ")
    return Outcome("raised", error=told["error"], text=text, frames=told["frames"])


def _loaded(error: bytes | None) -> BaseException | None:
    try:
        loaded = pickle.loads(error) if error else None
    except Exception:
        return None
    return loaded if isinstance(loaded, BaseException) else None


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}, {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.WEXITSTATUS(status)}"
