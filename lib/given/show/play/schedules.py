"""A pipeline's schedules side by side: who works when, how long stages wait, and how many micro-batches they keep."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from lib.given.parallel import pipeline
from lib.given.show.play import timelines
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, Point, boxes, label, line, number, rect, tag
from lib.given.show.tokens import Html

Timeline = Callable[[int, int], Sequence[Any]]
"""From stages and micro-batches to what each stage does: ``Work`` of chapter 13, or ``Box``."""

GIVEN: dict[str, Timeline] = {
    "GPipe": partial(pipeline.simulate, pipeline.gpipe),
    "1F1B": partial(pipeline.simulate, pipeline.one_forward_one_backward),
    "interleaved, 2 chunks": timelines.interleaved,
    "zero bubble (ZB-H1)": timelines.zero_bubble,
}
LEFT, TOP, ROWS = 22, 26, 176
KINDS = {"F": ("forward", BLUE), "B": ("backward", ORANGE), "W": ("weights' gradients", GREEN)}
ALT = "A row for each stage of a pipeline with a box for each forward and backward of a micro-batch; empty is where a stage waits."


def schedules(timelines_of: Mapping[str, Timeline] | None = None) -> Html:
    """Schedules for 2, 4 and 8 stages and 1 to 16 micro-batches.

    Args:
        timelines_of: For each schedule's name a function that gives what every stage does when, or raises a ``ValueError`` where
            the schedule does not exist; GPipe, 1F1B, interleaved and zero bubble unless given.
    """
    return figure(timelines_of or GIVEN)()


def figure(timelines_of: Mapping[str, Timeline]) -> Figure:
    @cache
    def work(name: str, n_stages: int, n_micro: int) -> Sequence[Any] | ValueError:
        try:
            return timelines_of[name](n_stages, n_micro)
        except ValueError as error:
            return error

    def draw(name: str, n_stages: int, n_micro: int) -> str:
        drawn = work(name, n_stages, n_micro)
        if isinstance(drawn, ValueError):
            return label(WIDTH / 2, TOP + 40, str(drawn), kind="middle")
        others = [work(other, n_stages, n_micro) for other in timelines_of]  # one scale for all, to compare them
        longest = max(w.end for one in others if not isinstance(one, ValueError) for w in one)
        return _rows(drawn, n_stages, (WIDTH - LEFT) / longest)

    def legend(name: str) -> str:
        drawn = work(name, 2, 2)
        return _legend(set() if isinstance(drawn, ValueError) else {w.kind for w in drawn})

    def say(name: str, n_stages: int, n_micro: int) -> str:
        drawn = work(name, n_stages, n_micro)
        size = f"{name}, {n_stages} stages, {n_micro} micro-batch{'es' if n_micro > 1 else ''}"
        if isinstance(drawn, ValueError):
            return f"{size}: {drawn}."
        kept = most_kept(drawn)
        return (
            f"{size}: a step takes {max(w.end for w in drawn):g} forwards of a stage, and stages wait {idle_share(drawn):.1%} "
            f"of it. Stage 0 keeps the activations of {kept:g} micro-batch{'es' if kept != 1 else ''} at most."
        )

    schedule = Control(name="schedule", label="schedule", values=[*timelines_of], kind="choice", still=1)
    stages = Control(name="stages", label="stages", values=(2, 4, 8), start=1, still=1)
    micro = Control(name="micro", label="micro-batches", values=(1, 2, 4, 8, 16), start=3, still=3)
    return Figure(
        name="schedules",
        alt=ALT,
        height=TOP + ROWS + 24,
        controls=[schedule, stages, micro],
        layers=[layer(legend, schedule), layer(_names, stages), layer(draw, schedule, stages, micro)],
        sentences=[layer(say, schedule, stages, micro)],
    )


def idle_share(work: Sequence[Any]) -> float:
    """The share of all stages' time, from the first start to the last end, in which they wait."""
    n_stages, end = 1 + max(w.stage for w in work), max(w.end for w in work)
    return 1 - sum(w.end - w.start for w in work) / (n_stages * end)


def most_kept(work: Sequence[Any], stage: int = 0) -> float:
    """The most micro-batches whose activations a stage keeps, from a forward's end to the end of the last part of its backward.

    A chunk of a stage that has several counts as its share of a micro-batch.
    """
    mine = [w for w in work if w.stage == stage]
    last = "W" if any(w.kind == "W" for w in mine) else "B"
    n_chunks = 1 + max(getattr(w, "chunk", 0) for w in mine)
    changes = sorted((w.end, 1 if w.kind == "F" else -1) for w in mine if w.kind in ("F", last))
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most / n_chunks


def _legend(kinds: set[str]) -> str:
    drawn = []
    for x, kind in zip((LEFT, 110, 206), [kind for kind in KINDS if kind in kinds], strict=False):
        text, colour = KINDS[kind]
        drawn += [rect(x, 3, 12, 12, fill=colour, fill_opacity="0.7"), label(x + 17, 13, text)]
    start = (LEFT, TOP + ROWS + 5)
    return (
        "".join(drawn)
        + line(start, (WIDTH, start[1]), kind="grid")
        + label(WIDTH, start[1] + 12, "time", kind="end small")
    )


def _names(n_stages: int) -> str:
    row = _row(n_stages)
    return "".join(label(LEFT - 8, TOP + (s + 0.5) * row + 4, str(s), kind="end small") for s in range(n_stages))


def _row(n_stages: int) -> float:
    return min(40.0, ROWS / n_stages)


def _rows(work: Sequence[Any], n_stages: int, unit: float) -> str:
    """All boxes, one path for those that look alike, and the micro-batches' numbers where there is room."""
    row = _row(n_stages)
    corners: dict[tuple[str, int, float], list[Point]] = defaultdict(list)
    numbers = []
    for w in work:
        x, y, width = LEFT + w.start * unit, TOP + w.stage * row, (w.end - w.start) * unit
        corners[w.kind, getattr(w, "chunk", 0), round(width, 3)].append((x, y))
        if width > 6.5 * len(str(w.micro_batch)) + 2:
            numbers.append((x + width / 2, y + row / 2 + 3, w.micro_batch))
    paths = [
        tag("path", d=boxes(at, width - 0.8, row - 3), fill=KINDS[kind][1], kind=f"box{chunk}")
        for (kind, chunk, width), at in corners.items()
    ]
    written = "".join(f"<text x='{number(x)}' y='{number(y)}'>{n}</text>" for x, y, n in numbers)
    return "".join(paths) + f"<g class='numbers'>{written}</g>"
