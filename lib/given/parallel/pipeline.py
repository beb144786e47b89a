"""What a pipeline does: actions and the work that they become, and the simulation of two schedules that chapter 13 uses."""

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


def gpipe(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards, the last micro-batch first."""
    order = list(range(micro_batches))
    return [("F", m) for m in order] + [("B", m) for m in reversed(order)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """First as many forwards as there are stages from this one to the last; from then on backwards and forwards alternate."""
    ahead = min(stages - stage, micro_batches)
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", m))
        if ahead + m < micro_batches:
            order.append(("F", ahead + m))
    return order


def simulate(schedule, stages: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> list[Work]:
    """Run every stage's list in order; each entry starts as soon as the stage is free and its input has arrived.

    The forward of a micro-batch waits for its forward on the previous stage, and its backward for the backward on the next stage (on
    the last stage, for its own forward). Messages take no time.
    """
    todo = [schedule(stage, stages, micro_batches) for stage in range(stages)]
    free, done = [0.0] * stages, []
    ends: dict[tuple[str, int, int], float] = {}
    while any(todo):
        for stage, queue in enumerate(todo):
            while queue:
                kind, m = queue[0]
                needs = ("F", stage - 1) if kind == "F" else ("B", stage + 1) if stage + 1 < stages else ("F", stage)
                is_first = kind == "F" and stage == 0
                if not is_first and (*needs, m) not in ends:
                    break
                start = max(free[stage], 0.0 if is_first else ends[(*needs, m)])
                free[stage] = ends[(kind, stage, m)] = start + (forward if kind == "F" else backward)
                done.append(Work(stage, m, kind, start, free[stage]))
                queue.pop(0)
    return done


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
