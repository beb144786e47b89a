"""Explains how a run of ranks failed, to the author of the code that ran."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.ranks.deadlock import RankView, blockers, grouped, message_mismatch, mismatch, ranks_text
from lib.ranks.ledger import Ledger
from lib.ranks.noise import cause
from lib.ranks.places import code_at, innermost, is_user_file, shown

KINDS = ("raised", "died", "deadlock", "time", "missing")
ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|timed out|timeout|gloo.transport|socket",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Where one rank was when the run ended.

    ``status`` is returned, raised, died, waits, computes or starts.
    ``detail`` depends on it: the call that the rank waits in, the last call that it finished before it computes,
    the exception's text, or how the rank died.
    ``where`` is its line of the user's code, and ``code`` the text of that line.
    """

    rank: int
    status: str
    detail: str = ""
    where: str = ""
    code: str = ""
    traceback: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = {"returned": "has returned", "starts": "has not begun", "died": f"died ({self.detail})"}
        said["computes"] = f"is at work, {self.detail}"
        words = said.get(self.status, "")
        if self.status == "raised":
            lost = bool(ECHO.search(self.detail))
            words = "lost its connection to a rank that ended" if lost else f"raised {_first_line(self.detail)}"
        return "  ".join(["", f"rank {self.rank}", *filter(None, [self.where, self.code, words])])


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


class RankFailure(Exception):
    """A run of ranks that failed.

    ``kind`` is "raised", "died", "deadlock" (ranks wait for each other, or call different collectives),
    "time" (a rank still computes at the limit) or "missing" (no fork, no MPI).
    ``rank`` is the rank that caused the failure, and ``error`` its exception, if it could be sent.
    ``per_rank`` says where each rank was; ``ledgers`` and ``outputs`` hold what each rank did and printed until then.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "missing",
        rank: int | None = None,
        per_rank: "Iterable[RankState]" = (),
        **facts: Any,
    ):
        super().__init__(message)
        self.message, self.kind, self.rank = message, kind, rank
        self.per_rank: list[RankState] = list(per_rank)
        self.error: BaseException | None = facts.get("error")
        self.ledgers: list[Ledger] = list(facts.get("ledgers", ()))
        self.outputs: list[str] = list(facts.get("outputs", ()))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
        return _again, (self.message, dict(self.__dict__))


def _again(message: str, facts: dict[str, Any]) -> RankFailure:
    failure = RankFailure(message)
    failure.__dict__.update(facts)
    return failure


@dataclass
class Outcome:
    """How one rank ended: ``status`` is returned, raised or died."""

    status: str
    at: float = field(default_factory=time.monotonic)
    value: bytes | None = None
    error: bytes | None = None
    text: str = ""
    frames: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_echo(self) -> bool:
        """Whether the exception only says that the connection to another rank broke."""
        return self.status == "raised" and bool(ECHO.search(self.text))


def explain(
    views: list[RankView],
    outcomes: dict[int, Outcome],
    stacks: dict[int, Path],
    limit_s: float | None,
    outputs: list[str],
) -> tuple[str, int | None, str, list[RankState]]:
    """Kind, culprit, message and the state of each rank.

    ``limit_s`` is the time limit, if it was reached; ``outputs`` is what each rank and its libraries printed.
    """
    states = [_state(view, outcomes.get(view.rank), stacks[view.rank]) for view in views]
    disagreement = mismatch(views)
    culprit = _culprit(outcomes)
    if culprit is not None:
        kind, lines = _gone(views, outcomes, states, culprit, disagreement, outputs[culprit])
    else:
        kind, lines = _waiting(views, states, limit_s), [_headline(views, states, limit_s)]
        lines += [str(state) for state in states]
    if disagreement and disagreement not in lines[0]:
        lines.append(f"the ranks disagree: {disagreement}")
    return kind, culprit, "\n".join(lines), states


def _state(view: RankView, outcome: Outcome | None, stack: Path) -> RankState:
    record = view.waits_in
    frames = _frames(stack)
    where = innermost(frames)
    if outcome is not None and outcome.status == "raised":
        codes = {at: code for at, _, code in outcome.frames[::-1]}
        where = innermost([*codes])
        trace = tuple(f"{at} in {name}  {code}" if name else f"{at}  {code}" for at, name, code in outcome.frames)
        return RankState(
            rank=view.rank,
            status="raised",
            detail=outcome.text,
            where=where,
            code=codes.get(where, ""),
            traceback=trace,
        )
    if view.phase == "raised":  # the exception itself did not arrive
        return RankState(
            rank=view.rank,
            status="raised",
            detail="an exception, too",
            where=where,
            code=code_at(where),
            traceback=(*frames,),
        )
    if view.phase == "returned" or (outcome is not None and outcome.status == "returned"):
        return RankState(rank=view.rank, status="returned")
    if view.open:
        where = view.waits_at
        record = view.calls[next(reversed(view.open))]
    facts: dict[str, Any] = {"rank": view.rank, "where": where, "code": code_at(where), "traceback": tuple(frames)}
    if outcome is not None:
        inside = f" in {record.with_peer}" if record is not None else ""
        return RankState(status="died", detail=outcome.text + inside, **facts)
    if record is not None:
        return RankState(status="waits", detail=record.with_peer, **facts)
    if view.phase not in ("running", "importing"):
        return RankState(rank=view.rank, status="starts")
    last = view.calls[-1].with_peer if view.calls else ""
    return RankState(status="computes", detail=f"after {last}" if last else "before its first call", **facts)


def _frames(stack: Path) -> list[str]:
    """The user's lines of the main thread, innermost first, from faulthandler's output."""
    try:
        text = stack.read_text(errors="replace")
    except OSError:
        return []
    thread = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    found = re.findall(r'File "(.+)", line (\d+)', thread)
    return [shown(file, int(line)) for file, line in found if is_user_file(file)]


def _culprit(outcomes: dict[int, Outcome]) -> int | None:
    """The rank that caused the failure: the first whose exception is not an echo of another rank's end."""

    bad = {rank: outcome for rank, outcome in outcomes.items() if outcome.status != "returned"}
    if not bad:
        return None
    first = min(bad.values(), key=lambda outcome: (outcome.is_echo, outcome.at))
    return min(rank for rank, outcome in bad.items() if outcome.text == first.text)


def _gone(
    views: list[RankView],
    outcomes: dict[int, Outcome],
    states: list[RankState],
    culprit: int,
    disagreement: str,
    output: str,
) -> tuple[str, list[str]]:
    """Kind and message for a rank that raised or died."""
    view, state, outcome = views[culprit], states[culprit], outcomes[culprit]
    if disagreement and (view.failed_in is not None or view.open):
        return "deadlock", [disagreement, *map(str, states)]  # which the backend's own message does not say
    at = f" at {state.where}" if state.where else ""
    unlike = message_mismatch(view, views)
    if outcome.status == "died":
        if not view.open and not at and view.calls:
            at = f" after {view.calls[-1].with_peer} at {view.calls[-1].where}"
        inside = state.detail.removeprefix(outcome.text)
        why = f": {told}" if (told := unlike or cause(output)) else ""
        return "died", [f"rank {culprit} died ({outcome.text}){inside}{at}{why}", *map(str, states)]
    same = [s.rank for s in states if s.status == "raised" and s.detail == state.detail and s.rank != culprit]
    too = f" (so did {ranks_text(same)})" if same else ""
    text = state.detail if "\n" not in state.detail else state.detail.rstrip() + "\n"
    others = [str(s) for s in states if s.rank != culprit and s.rank not in same]
    trace = [f"    {line}" for line in state.traceback]
    if unlike:
        trace.append(f"    {unlike}")
    return "raised", [f"rank {culprit} raised {text},{at}{too}".replace("\n,", "\n").removesuffix(","), *trace, *others]


def _waiting(views: list[RankView], states: list[RankState], limit_s: float | None) -> str:
    """Kind of a run in which no rank raised or died."""
    if any(state.status in ("computes", "starts") for state in states):
        return "time"
    hopeful = limit_s is not None and not mismatch(views) and not any(blockers(v, views) for v in views)
    return "time" if hopeful else "deadlock"


def _headline(views: list[RankView], states: list[RankState], limit_s: float | None) -> str:
    waiting = [s for s in states if s.status == "waits"]
    said = []
    if waiting:
        since = time.monotonic() - max(views[s.rank].waits_since for s in waiting)
        records = [views[s.rank].waits_in for s in waiting]
        streams = {r.stream: r for r in records if r is not None and r.is_collective}
        parts = [f"in {s.detail}" for s in waiting]
        if len(streams) > 1:
            parts = [f"{part} on group {r.stream!r}" for part, r in zip(parts, records, strict=True) if r is not None]
        told = grouped([s.rank for s in waiting], parts, "waits", "wait")
        said.append(f"{told}, for {since:.0f} s")
    for state in states:
        missed = _missed(state.rank, views)
        never = f" and never reached {missed}" if missed else ""
        if state.status == "returned" and waiting:
            said.append(f"rank {state.rank} has returned{never}")
        elif state.status == "computes":
            at = f" at {state.where}" if state.where else ""
            said.append(f"rank {state.rank} is still computing{at}{never}")
        elif state.status == "starts":
            said.append(f"rank {state.rank} has not begun")
    return "; ".join(said) + (f" (the limit is {limit_s:g} s)" if limit_s is not None else "")


def _missed(rank: int, views: list[RankView]) -> str:
    """The call in which another rank waits for this rank; empty if none does."""
    for view in views:
        record = view.waits_in
        if record is not None and rank in blockers(view, views) and record.source != -1:
            if record.is_collective:
                return record.name
            return f"the send to rank {view.rank}" if record.source == rank else f"the receive from rank {view.rank}"
    return ""
