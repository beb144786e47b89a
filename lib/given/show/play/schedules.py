"""A pipeline's schedules: which stage works on what and when, what the first stage keeps, and what is sent."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from lib.given.parallel.pipeline import Action, Work, idle_share, kept_over_time, most_kept, n_messages
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, Point, boxes, label, line, number, rect, tag
from lib.given.show.plots import COLOURS
from lib.given.show.tokens import Html

Schedule = Callable[[int, int, int], Sequence[Action]]
"""From a stage, the number of stages and the number of micro-batches to the stage's list of actions."""
Simulate = Callable[[list[Sequence[Action]], dict[str, float]], Sequence[Work]]
"""From each stage's list and the seconds of each kind to what was done when."""

LEFT, TOP, ROWS = 22, 26, 176
STRIP, TALL = TOP + ROWS + 38, 44
KINDS = {"F": ("forward", BLUE), "B": ("backward", ORANGE), "W": ("weights' gradients", GREEN)}
ALT = (
    "A row for each stage of a pipeline with a box for each forward and backward of a micro-batch; "
    "empty is where a stage waits. "
    "Below, on the same scale of time, the activations that stage 0 keeps."
)


def schedules(schedule_of: Mapping[str, Schedule], simulate: Simulate) -> Html:
    """Schedules for 2, 4 and 8 stages and 1 to 16 micro-batches.

    Args:
        schedule_of: For each schedule's name a function that gives a stage's list of actions,
            or raises a ``ValueError`` where the schedule does not exist.
        simulate: Chapter 17's function, which tells when each action is done.
    """
    return figure(schedule_of, simulate)()


def timeline(schedule: Schedule, simulate: Simulate, n_stages: int, n_micro: int) -> Sequence[Work]:
    """What every stage does when.

    The unit of time is a stage's forward over all its layers; its whole backward takes two.
    """
    lists = [schedule(stage, n_stages, n_micro) for stage in range(n_stages)]
    actions = [action for one in lists for action in one]
    n_chunks = 1 + max(action.chunk for action in actions)
    is_split = any(action.kind == "W" for action in actions)
    seconds = {"F": 1.0, "B": 1.0 if is_split else 2.0, "W": 1.0}
    return simulate(lists, {kind: time / n_chunks for kind, time in seconds.items()})


def figure(schedule_of: Mapping[str, Schedule], simulate: Simulate) -> Figure:
    @cache
    def work(name: str, n_stages: int, n_micro: int) -> Sequence[Work] | ValueError:
        try:
            return timeline(schedule_of[name], simulate, n_stages, n_micro)
        except ValueError as error:
            return error

    def draw(name: str, n_stages: int, n_micro: int) -> str:
        drawn = work(name, n_stages, n_micro)
        if isinstance(drawn, ValueError):
            return label(WIDTH / 2, TOP + 40, "not with these numbers", kind="middle")
        every = [work(other, n_stages, n_micro) for other in schedule_of]  # one scale for all, to compare them
        others = [one for one in every if not isinstance(one, ValueError)]
        unit = (WIDTH - LEFT) / max(w.end for one in others for w in one)
        height = TALL / max(most_kept(one) for one in others)
        return _rows(drawn, n_stages, unit) + _kept(drawn, unit, height)

    def legend(name: str) -> str:
        drawn = work(name, 2, 2)
        return _legend(set() if isinstance(drawn, ValueError) else {w.kind for w in drawn})

    def say(name: str, n_stages: int, n_micro: int) -> str:
        drawn = work(name, n_stages, n_micro)
        size = f"{name}, {n_stages} stages, {n_micro} micro-batch{'es' if n_micro > 1 else ''}"
        if isinstance(drawn, ValueError):
            return f"{size}: {str(drawn).rstrip('.')}."
        kept = most_kept(drawn)
        return (
            f"{size}: a step takes {max(w.end for w in drawn):g} forwards of a stage, "
            f"and stages wait {idle_share(drawn):.1%} "
            f"of it. Stage 0 keeps the activations of {kept:g} micro-batch{'es' if kept != 1 else ''} at "
            "most, and the stages "
            f"send {n_messages(drawn)} messages."
        )

    schedule = Control(name="schedule", label="schedule", values=[*schedule_of], kind="choice", still=1)
    stages = Control(name="stages", label="stages", values=(2, 4, 8), start=1, still=1)
    micro = Control(name="micro", label="micro-batches", values=(1, 2, 4, 8, 16), start=3, still=3)
    return Figure(
        name="schedules",
        alt=ALT,
        height=STRIP + TALL + 3,
        controls=[schedule, stages, micro],
        layers=[layer(legend, schedule), layer(_names, stages), layer(draw, schedule, stages, micro)],
        sentences=[layer(say, schedule, stages, micro)],
    )


def _legend(kinds: set[str]) -> str:
    drawn = []
    for x, kind in zip((LEFT, 110, 206), [kind for kind in KINDS if kind in kinds], strict=False):
        text, colour = KINDS[kind]
        drawn += [rect(x, 3, 12, 12, fill=colour, fill_opacity="0.7"), label(x + 17, 13, text)]
    for y in (TOP + ROWS + 5, STRIP + TALL):
        drawn.append(line((LEFT, y), (WIDTH, y), kind="grid"))
    drawn.append(label(WIDTH, TOP + ROWS + 17, "time", kind="end small"))
    return "".join(drawn)


def _names(n_stages: int) -> str:
    row = _row(n_stages)
    return "".join(label(LEFT - 8, TOP + (s + 0.5) * row + 4, str(s), kind="end small") for s in range(n_stages))


def _row(n_stages: int) -> float:
    return min(40.0, ROWS / n_stages)


def _rows(work: Sequence[Work], n_stages: int, unit: float) -> str:
    """All boxes, one path for those that look alike, and the micro-batches' numbers where there is room."""
    row = _row(n_stages)
    corners: dict[tuple[str, int, float], list[Point]] = defaultdict(list)
    numbers = []
    for w in work:
        x, y, width = LEFT + w.start * unit, TOP + w.stage * row, (w.end - w.start) * unit
        corners[w.kind, w.chunk % 2, round(width, 3)].append((x, y))
        if width > 6.5 * len(str(w.micro_batch)) + 2:
            numbers.append((x + width / 2, y + row / 2 + 3, w.micro_batch))
    paths = [
        tag("path", d=boxes(at, max(width - 0.8, 0.6), row - 3), fill=KINDS[kind][1], kind=f"box{shade}")
        for (kind, shade, width), at in corners.items()
    ]
    written = "".join(f"<text x='{number(x)}' y='{number(y)}'>{n}</text>" for x, y, n in numbers)
    return "".join(paths) + f"<g class='numbers'>{written}</g>"


def _kept(work: Sequence[Work], unit: float, height: float) -> str:
    """A staircase of what stage 0 keeps, and how high it gets."""
    levels, bottom = kept_over_time(work), STRIP + TALL
    steps = "".join(f"H{number(LEFT + time * unit)}V{number(bottom - held * height)}" for time, held in levels)
    area = tag("path", d=f"M{LEFT} {bottom}{steps}V{bottom}z", fill=COLOURS[3], fill_opacity="0.55")
    return area + label(LEFT, STRIP - 6, f"activations kept by stage 0: at most {most_kept(work):g} micro-batches")
