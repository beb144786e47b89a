"""What the stages of a pipeline do: actions, the work that they become, and what one can count in it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One entry of a stage's schedule.

    ``kind`` is "F" (forward), "B" (backward; only the gradient of the input if a "W" of the same micro-batch and chunk follows) or
    "W" (the gradients of the weights). ``chunk`` counts the groups of layers that the stage holds.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __post_init__(self):
        if self.kind not in ("F", "B", "W"):
            raise ValueError(f'kind = {self.kind!r}, expected "F", "B" or "W"')

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Work:
    """An action of a stage with its time: ``kind``, ``micro_batch`` and ``chunk`` as in `Action`, ``start`` and ``end`` in seconds."""

    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float
    chunk: int = 0


def idle_share(work: list[Work]) -> float:
    """The share of all stages' time in which they wait, from the first start to the last end."""
    stages, end = 1 + max(w.stage for w in work), max(w.end for w in work)
    return 1 - sum(w.end - w.start for w in work) / (stages * end)


def kept_over_time(work: Sequence[Work], stage: int = 0) -> list[tuple[float, float]]:
    """When the activations that a stage keeps change, and how many micro-batches it keeps from then on.

    A micro-batch counts from its forward's end to the end of the last part of its backward; on a stage of several chunks, each chunk
    counts as its share.
    """
    mine = [w for w in work if w.stage == stage]
    last = "W" if any(w.kind == "W" for w in mine) else "B"
    n_chunks = 1 + max(w.chunk for w in mine)
    changes = sorted((w.end, 1 if w.kind == "F" else -1) for w in mine if w.kind in ("F", last))
    held, levels = 0, [(0.0, 0.0)]
    for time, change in changes:
        held += change
        levels.append((time, held / n_chunks))
    return levels


def most_kept(work: Sequence[Work], stage: int = 0) -> float:
    """The most micro-batches whose activations a stage keeps at one time."""
    return max(held for _, held in kept_over_time(work, stage))


def n_messages(work: Sequence[Work]) -> int:
    """How many activations and gradients cross from one layer group to the next in a step."""
    n_stages, n_chunks = 1 + max(w.stage for w in work), 1 + max(w.chunk for w in work)
    last = n_stages * n_chunks - 1
    places = [(w.kind, w.chunk * n_stages + w.stage) for w in work]
    return sum((kind == "F" and place < last) or (kind == "B" and place > 0) for kind, place in places)
