"""Pictures of chapter 17: what the stages of a pipeline do when, and how many micro-batches they keep."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from lib.given.parallel.mail import Message
from lib.given.parallel.pipeline import Work, kept_over_time
from lib.given.show.parallel import cells
from lib.given.show.plots import COLOURS, GREY

KINDS = dict(zip("FBW", COLOURS, strict=False))


def draw_timeline(ax: Axes, work: Sequence[Work], until: float | None = None, height: float = 0.84) -> None:
    """A row for each stage, with a box for each of its actions and the micro-batch's number in it; odd chunks are pale.

    Args:
        ax: The axes to draw on.
        work: What was done when, as ``simulate`` returns it.
        until: Where the axis of time ends; at the last action's end unless given.
        height: Height of a row's boxes; rows are 1 apart.
    """
    end, n_stages = until or max(w.end for w in work), 1 + max(w.stage for w in work)
    for w in work:
        corner, size, colour = (w.start, w.stage - height / 2), (w.end - w.start, height), KINDS[w.kind]
        face = colour + "33" if w.chunk % 2 else colour
        ax.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=GREY, linewidth=0.7))
        if size[0] / end > 0.011 * len(str(w.micro_batch)):
            middle, ink = (w.start + size[0] / 2, w.stage), colour if w.chunk % 2 else "white"
            ax.text(*middle, str(w.micro_batch), ha="center", va="center", fontsize=8.5, color=ink)
    ax.set(xlim=(0, end), ylim=(n_stages - 0.5, -0.5), yticks=range(n_stages), ylabel="stage")
    ax.set_xlabel("time, in forwards of one stage for one micro-batch")
    ax.grid(visible=False)


def draw_timetable(ax: Axes, items: Sequence[Work | Message]) -> None:
    """A timetable of two ranks: their works, and an arrow for each message, numbered in the order of the list."""
    works = [item for item in items if isinstance(item, Work)]
    draw_timeline(ax, works, height=0.44)
    ends = {(w.kind, w.micro_batch, w.stage): w.end for w in works}
    messages = [item for item in items if isinstance(item, Message)]
    for n, (name, sender, receiver) in enumerate(messages, 1):
        down = receiver - sender  # 1 or -1; two messages that pass each other lie side by side
        time, colour = ends[name[0], name[2], sender] - 0.07 * down, KINDS[name[0]]
        tail, tip = (time, sender + 0.24 * down), (time, receiver - 0.24 * down)
        ax.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "color": colour})
        side = "right" if down > 0 else "left"
        ax.text(time - 0.1 * down, 0.5, str(n), ha=side, va="center", fontsize=8.5, color=colour)
    ax.set(ylabel="rank", title=f"one timetable: both ranks go through messages 1 to {len(messages)} in this order")


def draw_deadlock(ax: Axes, works: Sequence[Work]) -> None:
    """Two ranks under 1F1B that send each result as soon as they have it: where both stop, and what each waits for."""
    done = [
        w for w in works if (w.stage, w.kind, w.micro_batch) in {(0, "F", 0), (0, "F", 1), (1, "F", 0), (1, "B", 0)}
    ]
    end = max(w.end for w in works)
    draw_timeline(ax, done, until=end, height=0.44)
    for rank, what in enumerate(("F1", "B0")):
        start = max(w.end for w in done if w.stage == rank)
        box = Rectangle((start, rank - 0.22), end - start, 0.44, facecolor="none", edgecolor=GREY, linestyle="--")
        ax.add_patch(box)
        text = f"sends {what}, and waits until rank {1 - rank} receives it"
        ax.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=9)
    ax.set(xlabel="", ylabel="rank", title="each rank sends as soon as it has a result")


def draw_kept(ax: Axes, work: Sequence[Work], stages: Sequence[int] = (0,), most: float = 0) -> None:
    """For some stages a staircase of the micro-batches whose activations they keep.

    Args:
        ax: The axes to draw on, below a timeline that shares its axis of time.
        work: What was done when.
        stages: The stages to draw.
        most: The least height of the axis, to compare several schedules.
    """
    for stage, colour in zip(stages, (COLOURS[0], COLOURS[3]), strict=False):
        times, held = zip(*kept_over_time(work, stage), strict=True)
        ax.step(times, held, where="post", color=colour, label=f"stage {stage}")
        most = max([most, *held])
    ax.set(ylim=(0, 1.08 * most), ylabel="kept")
    ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))


def draw_chunks(n_layers: int = 16, n_ranks: int = 4, n_chunks: int = 2) -> Figure:
    """The layers of a model in the colour of their rank: one stretch a rank, and below it several chunks a rank."""
    fig, axes = plt.subplots(2, 1, figsize=(6.6, 2.3))
    for ax, v, title in zip(axes, (1, n_chunks), ("one stage a rank", f"{n_chunks} chunks a rank"), strict=True):
        width = n_layers // (n_ranks * v)
        ranks = [layer // width % n_ranks for layer in range(n_layers)]
        cells(ax, 0.0, 0.0, [COLOURS[rank] for rank in ranks], [str(layer) for layer in range(n_layers)])
        for g in range(n_ranks * v):
            middle = (g + 0.5) * width
            ax.text(middle, -0.4, f"rank {g % n_ranks}", ha="center", va="center", color=COLOURS[g % n_ranks])
        ax.set(xlim=(-0.1, n_layers + 0.1), ylim=(-0.8, 1.1), title=title)
        ax.axis("off")
    return fig
