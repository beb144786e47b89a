"""A simulated pipeline: which stage works on which micro-batch at what time, under two schedules."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One piece of work of a stage: the forward (``kind`` "F") or backward ("B") of micro-batch ``micro_batch``."""

    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


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


def most_in_flight(work: list[Work], stage: int = 0) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    events = sorted((w.end, w.kind == "F", 1 if w.kind == "F" else -1) for w in work if w.stage == stage)
    held = most = 0
    for _, _, change in events:
        held += change
        most = max(most, held)
    return most
