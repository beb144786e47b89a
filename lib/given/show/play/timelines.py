"""When each stage of a pipeline works on what, under the two schedules that chapter 13 names and does not simulate.

A stage does its list in order, each entry as soon as it is free and its input is there; messages take no time. The unit of time
is a stage's forward; its whole backward takes two.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Entry = tuple[str, int, int]
"""Kind, micro-batch and chunk."""


class Box(NamedTuple):
    """A stage at work: ``kind`` is "F" (forward), "B" (backward) or "W" (the part of backward that gives the weights' gradients)."""

    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float
    chunk: int = 0


def interleaved(n_stages: int, n_micro: int, n_chunks: int = 2) -> list[Box]:
    """Megatron-LM's interleaved 1F1B (arXiv:2104.04473): each stage holds several chunks of layers, 1/n_chunks as long.

    Raises:
        ValueError: the micro-batches are no multiple of the stages.
    """
    if n_micro % n_stages:
        raise ValueError(f"it needs a multiple of {n_stages} micro-batches")
    n_entries = n_micro * n_chunks

    def entry(kind: str, n: int) -> Entry:
        """The n-th forward or backward: as many micro-batches as there are stages, then the next chunk."""
        group, within = divmod(n, n_stages * n_chunks)
        chunk, place = divmod(within, n_stages)
        return kind, group * n_stages + place, chunk if kind == "F" else n_chunks - 1 - chunk

    orders = []
    for stage in range(n_stages):
        ahead = min(n_entries, 2 * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1)
        orders.append([entry("F", n) for n in range(ahead)])
        for n in range(n_entries):
            orders[-1] += [entry("B", n), *([entry("F", ahead + n)] if ahead + n < n_entries else [])]
    return _timeline(orders, n_chunks, {"F": 1 / n_chunks, "B": 2 / n_chunks})


def zero_bubble(n_stages: int, n_micro: int) -> list[Box]:
    """ZB-H1 of Zero Bubble Pipeline Parallelism (arXiv:2401.10241): the weights' gradients fill what would be a bubble.

    Backward is cut in two: B gives the input's gradient, for which the stage before waits, and W the weights', for which nobody
    waits. The later a stage is, the longer it puts its W off, so that no stage keeps more micro-batches than 1F1B's first.
    """
    orders = []
    for stage in range(n_stages):
        ahead = min(n_stages - stage, n_micro)
        order = [("F", m, 0) for m in range(ahead)]
        for m in range(n_micro):
            order.append(("B", m, 0))
            if m >= stage:
                order.append(("W", m - stage, 0))
            if ahead + m < n_micro:
                order.append(("F", ahead + m, 0))
        order += [("W", m, 0) for m in range(max(0, n_micro - stage), n_micro)]
        orders.append(order)
    return _timeline(orders, 1, {"F": 1.0, "B": 1.0, "W": 1.0})


def _timeline(orders: Sequence[list[Entry]], n_chunks: int, seconds: dict[str, float]) -> list[Box]:
    """Every stage's list in order, as early as its inputs allow."""
    n_stages = len(orders)
    done: list[Box] = []
    ends: dict[
        tuple[str, int, int], float
    ] = {}  # kind, micro-batch, place: stages of chunk 0, then of chunk 1, and so on
    free, queues = [0.0] * n_stages, [iter(order) for order in orders]
    heads = [next(queue, None) for queue in queues]
    while any(heads):
        before = len(done)
        for stage, queue in enumerate(queues):
            while (head := heads[stage]) is not None:
                kind, micro_batch, chunk = head
                place = chunk * n_stages + stage
                needs = list(_needs(kind, micro_batch, place, n_stages * n_chunks))
                if any(need not in ends for need in needs):
                    break
                start = max([free[stage], *(ends[need] for need in needs)])
                free[stage] = ends[kind, micro_batch, place] = start + seconds[kind]
                done.append(Box(stage, micro_batch, kind, start, free[stage], chunk))
                heads[stage] = next(queue, None)
        assert len(done) > before, f"no stage can go on: {heads}"
    return done


def _needs(kind: str, micro_batch: int, place: int, n_places: int) -> Iterator[tuple[str, int, int]]:
    """What has to be done before: the neighbour's forward or backward, and on the last place the forward itself."""
    if kind == "F" and place:
        yield "F", micro_batch, place - 1
    if kind == "B":
        yield ("B", micro_batch, place + 1) if place + 1 < n_places else ("F", micro_batch, place)
    if kind == "W":
        yield "B", micro_batch, place
