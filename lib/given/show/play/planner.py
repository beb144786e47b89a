"""Chapter 16's planner as a figure: devices, model and memory in, degrees, seconds and bytes out."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from lib.given.models.scaling import Bandwidths, FFNConfig, Plan
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, ORANGE, label, line, rect
from lib.given.show.tokens import Html

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AXES = ("data", "sharded", "tensor", "pipeline")
PARTS = {"compute": BLUE, "sharded": ORANGE, "data": ORANGE, "tensor": ORANGE, "pipeline": ORANGE}
LEFT, LONGEST, TOP = 76, 206, 86
MEMORY_TOP = TOP + 5 * 24 + 14
ALT = (
    "Four boxes with the degrees of data, sharded, tensor and pipeline parallelism; "
    "below them bars of the seconds that each part of "
    "a step takes, and of the memory of a device."
)


def planner(
    plan: Callable[..., Plan],
    models: Mapping[str, FFNConfig],
    links: Bandwidths | Mapping[str, float],
    gpus: Sequence[int] = POWERS,
    memory_gb: Sequence[float] = (24, 40, 80, 141, 192),
) -> Html:
    """The fastest layout that fits, for every choice.

    Args:
        plan: Chapter 16's function, which computes every number of the figure.
        models: Models by name.
        links: Bandwidths, as ``plan`` takes them.
        gpus, memory_gb: How many devices; GB (1e9 bytes) of each.
    """
    return figure(plan, models, links, gpus, memory_gb)()


def figure(
    plan: Callable[..., Plan],
    models: Mapping[str, FFNConfig],
    links: Bandwidths | Mapping[str, float],
    gpus: Sequence[int],
    memory_gb: Sequence[float],
) -> Figure:
    @cache
    def chosen(n: int, model: str, gb: float) -> Plan | str:
        try:
            return plan(models[model], n, gb * 1e9, links)
        except ValueError as error:
            return str(error)

    def draw(n: int, model: str, gb: float) -> str:
        found = chosen(n, model, gb)
        if isinstance(found, str):
            return label(WIDTH / 2, 50, "nothing fits", kind="middle strong")
        return _degrees(found) + _seconds(found) + _memory(found, gb)

    def say(n: int, model: str, gb: float) -> str:
        found = chosen(n, model, gb)
        size = f"{model} on {n} GPU{'s' if n > 1 else ''} of {gb:g} GB"
        if isinstance(found, str):
            return f"{size}: {found}."
        return (
            f"{size}: {found.layout}. A step is predicted to take {_s(found.step_s)}, and a device to hold "
            f"{found.memory_bytes / 1e9:.3g} GB. {found.reasons[0]}. "
            f"For lib.runs it is {found.layout.flags or 'one process'}."
        )

    gpus_ = Control(name="gpus", label="GPUs", values=gpus, start=7, still=7)
    model_ = Control(
        name="model", label="model", values=[*models], kind="choice", start=len(models) - 1, still=len(models) - 1
    )
    memory_ = Control(
        name="memory", label="memory", values=memory_gb, shown=[f"{gb:g} GB" for gb in memory_gb], start=2, still=2
    )
    return Figure(
        name="planner",
        alt=ALT,
        height=MEMORY_TOP + 30,
        controls=[model_, gpus_, memory_],
        layers=[layer(_frame), layer(draw, gpus_, model_, memory_)],
        sentences=[layer(say, gpus_, model_, memory_)],
    )


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _frame() -> str:
    """What no choice changes: boxes and names."""
    drawn = []
    for i, axis in enumerate(AXES):
        x = 4 + 90 * i
        drawn += [rect(x, 4, 76, 54, kind="grid", rx=6), label(x + 38, 20, axis, kind="middle")]
        if i < 3:
            drawn.append(label(x + 83, 38, "×", kind="middle"))
    drawn.append(label(4, TOP - 10, "seconds of a step:"))
    drawn += [label(LEFT - 6, TOP + 24 * i + 14, part, kind="end") for i, part in enumerate(PARTS)]
    drawn.append(label(LEFT - 6, MEMORY_TOP + 14, "memory", kind="end"))
    return "".join(drawn)


def _degrees(found: Plan) -> str:
    return "".join(
        label(42 + 90 * i, 46, str(getattr(found, axis)), kind="middle strong large") for i, axis in enumerate(AXES)
    )


def _seconds(found: Plan) -> str:
    """A bar for each part; the longest fills the width."""
    longest, drawn = max(found.costs[part] for part in PARTS), []
    for i, (part, colour) in enumerate(PARTS.items()):
        y, seconds = TOP + 24 * i, found.costs[part]
        drawn.append(rect(LEFT, y, LONGEST * seconds / longest, 18, fill=colour))
        drawn.append(label(WIDTH - 2, y + 14, _s(seconds) if seconds else "0", kind="end"))
    return "".join(drawn)


def _memory(found: Plan, gb: float) -> str:
    """How full a device is; its end is the dashed line."""
    drawn = rect(LEFT, MEMORY_TOP, LONGEST * found.memory_bytes / (gb * 1e9), 18, fill="#a67c00")
    end = LEFT + LONGEST
    drawn += line((end, MEMORY_TOP - 5), (end, MEMORY_TOP + 23), stroke="currentColor", stroke_dasharray="4 3")
    return drawn + label(WIDTH - 2, MEMORY_TOP + 14, f"{found.memory_bytes / 1e9:.3g} of {gb:g}", kind="end")
