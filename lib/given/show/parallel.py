"""Pictures of chapters 12 and 13: the flat row and the step of ZeRO-3, and a transformer block cut over two ranks."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from lib.given.show.plots import COLOURS, GREY

SHARED = "#999999"
"""The colour of what every rank holds."""


def cells(ax: Axes, x: float, y: float, colours: Sequence[str], texts: Sequence[str], size: float = 1.0) -> None:
    """A row of squares from ``(x, y)`` to the right, each with its colour and its text."""
    for i, (colour, text) in enumerate(zip(colours, texts, strict=True)):
        ax.add_patch(Rectangle((x + i * size, y), size, size, facecolor=colour, alpha=0.45, edgecolor=GREY))
        ax.text(x + (i + 0.5) * size, y + 0.5 * size, text, ha="center", va="center")


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    """An arrow from one point to another."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13}
    ax.annotate("", end, start, arrowprops=style)


def draw_flat_row() -> Figure:
    """A unit's life: a weight and a bias, their row with padding, a shard on each of four ranks,
    and the views again.
    """
    fig, ax = plt.subplots(figsize=(6.4, 4.6))
    blue, orange, none = COLOURS[0], COLOURS[1], "none"
    of_row = [blue] * 8 + [orange] * 3 + [none]
    of_texts = [f"w{i}" for i in range(8)] + [f"b{i}" for i in range(3)] + ["0"]
    for start in (0, 4):
        cells(ax, 0.0, 8.6 - start / 4, of_row[start : start + 4], of_texts[start : start + 4])
    cells(ax, 8.0, 8.1, of_row[8:11], of_texts[8:11])
    cells(ax, 0.0, 5.6, of_row, of_texts)
    for rank in range(4):
        part = slice(3 * rank, 3 * rank + 3)
        cells(ax, 3.4 * rank - 0.6, 3.1, of_row[part], of_texts[part])
        ax.text(3.4 * rank + 0.9, 2.75, f"rank {rank}", ha="center", va="top")
        arrow(ax, (3 * rank + 1.5, 5.5), (3.4 * rank + 0.9, 4.2))
        arrow(ax, (3.4 * rank + 0.9, 2.15), (3 * rank + 1.5, 1.1))
    cells(ax, 0.0, 0.0, of_row, of_texts)
    for x, y in ((2.0, 7.5), (9.5, 8.0)):
        arrow(ax, (x, y), (x, 6.7))
    for x, y, text in ((4.3, 8.6, "weight [2, 4]"), (11.3, 8.6, "bias [3]"), (12.4, 6.1, "row"), (12.4, 0.5, "full")):
        ax.text(x, y, text, va="center")
    for x, y, text in ((13.2, 4.9, "shard"), (13.2, 1.7, "gather")):
        ax.text(x, y, text, va="center", ha="center", color=COLOURS[2])
    for x, n, name in ((0.0, 8, "view as [2, 4]"), (8.0, 3, "view as [3]"), (11.0, 1, "padding")):
        ax.plot([x + 0.1, x + n - 0.1], [-0.25] * 2, color=GREY, linewidth=1.2)
        ax.text(x + n / 2, -0.5, name, ha="center", va="top")
    ax.set(xlim=(-0.8, 14.4), ylim=(-1.4, 9.8), aspect="equal")
    ax.axis("off")
    return fig


def plan_step(n_units: int = 3, forward: float = 1.6, message: float = 1.0) -> list[tuple[str, str, int, float, float]]:
    """One step of ZeRO-3 over units after a root: ``(lane, what, unit, start, end)``, lane "compute" or "network".

    A message starts when its call was made and the network is free; computing waits for its own gather.
    Backward takes twice a forward.
    """
    work: list[tuple[str, str, int, float, float]] = []
    free = {"compute": 0.0, "network": 0.0}

    def put(lane: str, what: str, unit: int, length: float, after: float = 0.0) -> float:
        start = max(free[lane], after)
        free[lane] = start + length
        work.append((lane, what, unit, start, free[lane]))
        return free[lane]

    there = {1: put("network", "gather", 1, message, put("network", "gather", 0, message))}
    for unit in range(1, n_units + 1):
        begin = max(free["compute"], there[unit])
        if unit < n_units:
            there[unit + 1] = put("network", "gather", unit + 1, message, begin)
        put("compute", "forward", unit, forward, begin)
    put("network", "gather", 0, message, free["compute"] + 0.5)
    there = {n_units: put("network", "gather", n_units, message)}
    for unit in range(n_units, 0, -1):
        begin = max(free["compute"], there[unit])
        if unit > 1:
            there[unit - 1] = put("network", "gather", unit - 1, message, begin)
        end = put("compute", "backward", unit, 2 * forward, begin)
        put("network", "reduce", unit, message, end)
    put("network", "reduce", 0, message)
    return work


def draw_step(n_units: int = 3) -> Figure:
    """Above, what the GPU computes and what the network carries; below, from when to when each unit is whole."""
    work = plan_step(n_units)
    fig, (lanes, whole) = plt.subplots(2, 1, figsize=(6.4, 4.2), sharex=True, height_ratios=(1, 1.25))
    draw_lanes(lanes, work)
    for unit, start, end, ahead in lifetimes(work):
        whole.barh(unit, end - ahead, left=ahead, height=0.7, color=COLOURS[0], alpha=0.6)
        whole.barh(unit, ahead - start, left=start, height=0.7, color=COLOURS[1], alpha=0.6)
    whole.set(ylim=(-0.6, n_units + 0.6), yticks=range(n_units + 1), ylabel="unit", xlabel="time")
    whole.set(xlim=(0, max(end for *_, end in work)), xticks=[])
    whole.set_yticklabels(["root", *map(str, range(1, n_units + 1))])
    for ax in (lanes, whole):
        ax.grid(False)
    return fig


def draw_lanes(ax: Axes, work: Sequence[tuple[str, str, int, float, float]]) -> None:
    """What the GPU computes and what the network carries, a box for each piece of work,
    with the unit's number in it.
    """
    colours = {"forward": COLOURS[0], "backward": COLOURS[0], "gather": COLOURS[1], "reduce": COLOURS[2]}
    for lane, what, unit, start, end in work:
        y, corner = float(lane == "compute"), (start, float(lane == "compute") + 0.1)
        ax.add_patch(Rectangle(corner, end - start, 0.8, facecolor=colours[what], edgecolor=GREY, alpha=0.5))
        text, size = (str(unit), 10.5) if unit else ("root", 9)
        ax.text((start + end) / 2, y + 0.5, text, ha="center", va="center", fontsize=size)
    ax.set(ylim=(0, 2.1), yticks=[0.5, 1.5], yticklabels=["network", "compute"])
    for x, what, text in ((0.0, "gather", "gather"), (0.22, "reduce", "reduce-scatter"), (0.58, "forward", "compute")):
        ax.text(x, 1.06, f"■ {text}", color=colours[what], transform=ax.transAxes)


def lifetimes(work: Sequence[tuple[str, str, int, float, float]]) -> list[tuple[int, float, float, float]]:
    """Of each time that a unit is whole: the unit, from when, until when, and when its use begins."""
    spans = []
    loss = max(end for _, what, _, _, end in work if what == "forward")
    for _, what, unit, start, _ in work:
        if what == "gather" and unit:
            uses = [(s, e) for _, kind, u, s, e in work if u == unit and kind in ("forward", "backward") and s >= start]
            spans.append((unit, start, uses[0][1], uses[0][0]))
        elif what == "gather":
            phase = [
                e for _, kind, _, s, e in work if kind == ("forward" if start < loss else "backward") and s >= start
            ]
            begin = min(s for _, kind, _, s, _ in work if kind in ("forward", "backward") and s >= start)
            spans.append((0, start, max(phase), begin))
    return spans


def box(ax: Axes, x: float, y: float, text: str, colour: str, size: tuple[float, float] = (1.5, 0.8)) -> None:
    """A rounded box around a text, centred at ``(x, y)``."""
    at = (x - size[0] / 2, y - size[1] / 2)
    shape = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch(at, *size, boxstyle=shape, facecolor=colour, edgecolor=GREY, alpha=0.4))
    ax.text(x, y, text, ha="center", va="center")


def draw_region() -> Figure:
    """A feed-forward layer on two ranks: f at the entrance, two branches that never meet, g at the exit."""
    fig, ax = plt.subplots(figsize=(6.4, 3.1))
    stops = (0.5, 1.9, 3.9, 6.0, 8.1, 10.1, 11.5)
    for x, text in zip((0.5, 1.9, 10.1, 11.5), "xfgz", strict=True):
        box(ax, x, 0.0, text, COLOURS[2] if text in "fg" else SHARED, (0.8, 0.8))
    for y, colour, rank in ((1.0, COLOURS[0], 0), (-1.0, COLOURS[1], 1)):
        for x, text in zip(stops[2:5], ("column\nlayer", "GELU", "row\nlayer"), strict=True):
            box(ax, x, y, text, colour, (1.6, 1.05))
        arrow(ax, (2.3, 0.25 * y), (3.1, 0.8 * y))
        arrow(ax, (4.7, y), (5.2, y))
        arrow(ax, (6.8, y), (7.3, y))
        arrow(ax, (8.9, 0.8 * y), (9.7, 0.25 * y))
        ax.text(6.0, 1.75 * y, f"rank {rank}", ha="center", va="center", color=colour)
    for start, end in ((0.9, 1.5), (10.5, 11.1)):
        arrow(ax, (start, 0.0), (end, 0.0))
    for x, text, y in (
        (1.5, "forward: copy", -2.1),
        (1.5, "backward: all-reduce", -2.7),
        (10.3, "forward: all-reduce", -2.1),
        (10.3, "backward: copy", -2.7),
    ):
        ax.text(x, y, text, ha="center", va="center", color=COLOURS[2] if "reduce" in text else GREY)
    ax.set(xlim=(-0.6, 12.6), ylim=(-3.1, 2.2))
    ax.axis("off")
    return fig


def draw_block() -> Figure:
    """A whole transformer block on two ranks, from left to right, with its four all-reduces."""
    fig, ax = plt.subplots(figsize=(6.4, 3.6))
    ax.plot([0.2, 13.2], [2.4, 2.4], color=GREY, linewidth=1.6)
    arrow(ax, (13.2, 2.4), (13.6, 2.4))
    for left, text, split in ((0.6, "attention", "heads\n{}"), (7.0, "feed-forward", "features\n{}")):
        arrow(ax, (left, 2.4), (left, 0.45))
        box(ax, left, 0.0, "norm", SHARED, (1.1, 0.8))
        box(ax, left + 1.55, 0.0, "f", COLOURS[2], (0.7, 0.8))
        arrow(ax, (left + 0.55, 0.0), (left + 1.2, 0.0))
        for y, colour, half in ((0.85, COLOURS[0], "first half"), (-0.85, COLOURS[1], "second half")):
            box(ax, left + 3.2, y, split.format(half), colour, (2.1, 1.2))
            arrow(ax, (left + 1.9, 0.2 * y), (left + 2.15, 0.55 * y))
            arrow(ax, (left + 4.25, 0.55 * y), (left + 4.5, 0.2 * y))
        box(ax, left + 4.85, 0.0, "g", COLOURS[2], (0.7, 0.8))
        arrow(ax, (left + 4.85, 0.4), (left + 4.85, 2.15))
        ax.plot(left + 4.85, 2.4, "o", markersize=13, markerfacecolor="none", markeredgecolor=GREY)
        ax.text(left + 4.85, 2.38, "+", ha="center", va="center")
        ax.text(left + 3.2, 1.75, text, ha="center", va="center")
        ax.text(left + 1.55, -1.85, "backward:\nall-reduce", ha="center", va="center", color=COLOURS[2])
        ax.text(left + 4.85, -1.85, "forward:\nall-reduce", ha="center", va="center", color=COLOURS[2])
    ax.text(0.2, 2.75, "residual stream [B, T, C], whole on both ranks", va="center")
    ax.set(xlim=(-0.1, 13.8), ylim=(-2.4, 3.1))
    ax.axis("off")
    return fig


def draw_layouts(specs: dict[str, dict[str, tuple[str | None, ...]]]) -> Figure:
    """For each layout a row: which device of a 2 x 2 mesh holds which block of each tensor,
    with a legend of the devices.
    """
    names = list(next(iter(specs.values())))
    fig, axes = plt.subplots(1 + len(specs), len(names), figsize=(5.2, 7.4), height_ratios=(0.45, *[1] * len(specs)))
    for ax, (x, y) in zip(axes[0], ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
        ax.add_patch(Rectangle((0.25, 0.1), 0.5, 0.5, facecolor=COLOURS[2 * x + y], alpha=0.6))
        ax.text(0.5, 0.72, f"x = {x}, y = {y}", ha="center", va="bottom", fontsize=9.5)
    for row, (layout, by_name) in zip(axes[1:], specs.items(), strict=True):
        for ax, (name, spec) in zip(row, by_name.items(), strict=True):
            blocks(ax, (spec[0], spec[2]) if len(spec) == 3 else spec)
            if layout == next(iter(specs)):
                ax.set_title(name)
        row[0].text(
            -0.12, 0.5, layout.replace("2d ", "2d\n"), rotation=90, ha="center", va="center", transform=row[0].transAxes
        )
    for ax in axes.flat:
        ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        ax.axis("off")
    return fig


def blocks(ax: Axes, spec: Sequence[str | None]) -> None:
    """One matrix in a square: a frame for each block, in it the colours of the devices that hold it,
    and how many they are.
    """
    rows, columns = (2 if axis else 1 for axis in spec)
    for i, j in [(i, j) for i in range(rows) for j in range(columns)]:
        at = {axis: place for axis, place in zip(spec, (i, j), strict=True) if axis}
        owners = [(x, y) for x in (0, 1) for y in (0, 1) if at.get("X", x) == x and at.get("Y", y) == y]
        left, low, width, height = j / columns, 1 - (i + 1) / rows, 1 / columns / len(owners), 1 / rows
        for n, (x, y) in enumerate(owners):
            ax.add_patch(Rectangle((left + n * width, low), width, height, facecolor=COLOURS[2 * x + y], alpha=0.6))
        ax.add_patch(Rectangle((left, low), 1 / columns, height, fill=False, edgecolor=GREY, linewidth=1.8))
        if len(owners) > 1:
            ax.text(left + 0.5 / columns, low + height / 2, f"{len(owners)} x", ha="center", va="center")
