"""Reads the ranks' journals during a run: which rank waits for which, and whether that can ever end."""

import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lib.ranks.ledger import Ledger, Milestone, Record

_FIELDS = {f.name for f in fields(Record)}
_UNLISTED = ("new_group", "probe", "Probe", "mprobe", "Mprobe")  # wait like calls, but move no data


@dataclass
class RankView:
    """The state of one rank, read from its journal. Times are those of `time.monotonic`."""

    rank: int
    path: Path
    began_at: float
    phase: str = "starting"  # then importing, running, returned or raised; the watch sets dead
    phase_at: float = field(default_factory=time.monotonic)
    calls: list[Record] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    open: dict[int, tuple[float, str]] = field(default_factory=dict)  # index of a call: since when, from which line
    failed_in: int | None = None
    n_failed: int = 0
    _offset: int = 0

    def read(self) -> None:
        """Read what the rank has written since the last time."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        for line in new.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind, at = event["event"], event["at"]
        if kind == "begin":
            room = tuple(event["room"]) if event.get("room") else None
            facts = {**event, "group": tuple(event["group"]), "at_s": at - self.began_at, "room": room}
            self.calls.append(Record(**{k: v for k, v in facts.items() if k in _FIELDS}))
        if kind in ("begin", "wait"):
            self.open[event["index"]] = at, event["where"]
        elif kind in ("end", "failed"):
            self.open.pop(event["index"], None)
            self.failed_in = event["index"] if kind == "failed" else None
            self.n_failed += kind == "failed"
        elif kind == "milestone":
            self.milestones.append(Milestone(event["name"], at - self.began_at))
        else:
            self.phase, self.phase_at = kind, at

    @property
    def has_begun(self) -> bool:
        return self._offset > 0

    @property
    def is_starting(self) -> bool:
        return self.phase in ("starting", "importing")

    @property
    def is_over(self) -> bool:
        return self.phase in ("returned", "raised", "dead")

    @property
    def waits_in(self) -> Record | None:
        """The call that the rank is in, or an earlier one whose end it waits for."""
        return self.calls[next(reversed(self.open))] if self.open and not self.is_over else None

    @property
    def waits_since(self) -> float:
        return next(reversed(self.open.values()))[0]

    @property
    def waits_at(self) -> str:
        return next(reversed(self.open.values()))[1]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.rank, [r for r in self.calls if r.op not in _UNLISTED], list(self.milestones))

    def stream(self, name: str) -> list[Record]:
        """The collectives on one communicator, in order: the n-th call of each rank belongs to
        the n-th of every other.
        """
        return [r for r in self.calls if r.stream == name and r.is_collective]

    def counterpart(self, view: "RankView", record: Record) -> Record | None:
        """This rank's call of the collective that ``view`` is in, if this rank has reached it."""
        mine, nth = self.stream(record.stream), view.stream(record.stream).index(record)
        return mine[nth] if nth < len(mine) else None


def blockers(view: RankView, views: list[RankView]) -> set[int]:
    """The ranks that have not yet made the call that ``view`` waits for."""
    record = view.waits_in
    if record is None:
        return set()
    if record.is_collective:
        awaited = set(record.group) - {view.rank}
        if record.root is not None and record.root != view.rank:
            awaited = {record.root}
        return {rank for rank in awaited if views[rank].counterpart(view, record) is None}
    silent = set()
    if record.source is not None and record.source >= 0:
        received = sum(r.source == record.source for r in view.calls[: view.calls.index(record) + 1])
        if sum(r.to == view.rank for r in views[record.source].calls) < received:
            silent.add(record.source)
    if record.to is not None:
        sent = sum(r.to == record.to for r in view.calls[: view.calls.index(record) + 1])
        if sum(r.source in (view.rank, -1) for r in views[record.to].calls) < sent:
            silent.add(record.to)
    if record.source == -1:
        silent |= {v.rank for v in views if v.rank in record.group and v is not view}
    return silent


def stuck(views: list[RankView]) -> set[int]:
    """The ranks that wait for something that can never come. Empty while any rank still computes."""
    waiting = {v.rank for v in views if v.waits_in is not None}
    over = {v.rank for v in views if v.is_over}
    if not waiting or waiting | over != {v.rank for v in views}:
        return set()
    clashing = {v.rank for v in views if v.rank in waiting and _clash(v, views)}
    while True:
        hopeless = over | waiting
        free = {v.rank for v in views if v.rank in waiting - clashing and not _is_blocked(v, views, hopeless)}
        if not free:
            return waiting
        waiting -= free


def _is_blocked(view: RankView, views: list[RankView], hopeless: set[int]) -> bool:
    silent = blockers(view, views)
    record = view.waits_in
    if record is not None and record.source == -1:
        return bool(silent) and silent <= hopeless and not _message_for(view, views)
    return bool(silent & hopeless)


def _message_for(view: RankView, views: list[RankView]) -> bool:
    """Whether a message for the rank is under way: more were sent to it than it received before the present call."""
    sent = sum(r.to == view.rank for v in views for r in v.calls)
    return sent >= sum(r.source is not None for r in view.calls)


def _clash(view: RankView, views: list[RankView]) -> bool:
    record = view.waits_in
    if record is None or not record.is_collective:
        return False
    others = [views[rank].counterpart(view, record) for rank in record.group]
    return any(other is not None and _differ(record, other) for other in others)


def _differ(a: Record, b: Record) -> bool:
    sizes = None not in (a.n_elements, b.n_elements) and (a.n_elements, a.dtype) != (b.n_elements, b.dtype)
    return a.op != b.op or a.root != b.root or sizes


def mismatch(views: list[RankView]) -> str:
    """The first collective on which the ranks disagree, or messages that no rank received; empty if nothing is wrong.

    A call that only some of the ranks have made counts as a disagreement only once all of them have returned.
    """
    streams = dict.fromkeys(r.stream for v in views for r in v.calls if r.is_collective)
    for stream in streams:
        told = _stream_mismatch(stream, views)
        if told:
            return told
    return _untaken(views) if all(v.phase == "returned" for v in views) else ""


def _stream_mismatch(stream: str, views: list[RankView]) -> str:
    calls = {v.rank: v.stream(stream) for v in views if v.stream(stream)}
    members = next(iter(calls.values()))[0].group
    for nth in range(max(map(len, calls.values()))):
        there = {rank: own[nth] for rank, own in calls.items() if nth < len(own)}
        first = next(iter(there.values()))
        if any(_differ(first, other) for other in there.values()):
            parts = [f"{record.shape_of_call} ({record.where})" for record in there.values()]
            return grouped(list(there), parts, "calls", "call")
        if len(there) < len(members) and all(v.phase == "returned" for v in views):
            missing = [rank for rank in members if rank not in there]
            return f"{ranks_text(list(there))} called {first.name} ({first.where}), {ranks_text(missing)} never did"
    return ""


def message_mismatch(view: RankView, views: list[RankView]) -> str:
    """For the receive that ``view`` waits in or failed in: what was sent and what it has room for, if these differ."""
    index = next(reversed(view.open)) if view.open else view.failed_in
    record = None if index is None else view.calls[index]
    if record is None or record.room is None or record.source is None or record.source < 0:
        return ""
    nth = sum(r.source == record.source and r.op not in _UNLISTED for r in view.calls[:index])
    sent = [r for r in views[record.source].calls if r.to == view.rank]
    if any(r.source == -1 for r in view.calls) or nth >= len(sent) or sent[nth].n_elements is None:
        return ""
    there = sent[nth]
    if (there.n_elements, there.dtype) == record.room:
        return ""
    gives = f"rank {record.source} sends {there.n_elements} {there.dtype}".rstrip()
    takes = f"rank {view.rank} receives into {record.room[0]} {record.room[1]}".rstrip()
    return f"{gives} ({there.where}), {takes} ({record.where})"


def _untaken(views: list[RankView]) -> str:
    for view in views:
        if any(r.source == -1 for r in view.calls):
            continue
        for other in views:
            sent = sum(r.to == view.rank for r in other.calls)
            taken = sum(r.source == other.rank for r in view.calls)
            if sent > taken:
                return (
                    f"rank {other.rank} sent rank {view.rank} {_messages(sent)}, and rank {view.rank} received {taken}"
                )
    return ""


def _messages(count: int) -> str:
    return f"{count} message" + "s" * (count != 1)


def ranks_text(ranks: list[int]) -> str:
    """``rank 2``; ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def grouped(ranks: list[int], parts: list[str], verb: str, verbs: str) -> str:
    """``rank 0 calls A, ranks 1 and 2 B``: each different part once, with the ranks that share it."""
    together: dict[str, list[int]] = {}
    for rank, part in zip(ranks, parts, strict=True):
        together.setdefault(part, []).append(rank)
    said = []
    for number, (part, who) in enumerate(together.items()):
        word = "" if number else f" {verb if len(who) == 1 else verbs}"
        said.append(f"{ranks_text(who)}{word} {part}")
    return ", ".join(said)
