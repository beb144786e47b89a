"""Pictures of chapter 18: a block whose sequence is cut, heads exchanged for positions,
and three ways to deal out a sequence.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib.given.show.parallel import arrow, box
from lib.given.show.plots import COLOURS, GREY


def draw_sequence_block() -> Figure:
    """A transformer block on two ranks with sequence parallelism:
    only between gather and scatter is the sequence whole.
    """
    fig, ax = plt.subplots(figsize=(6.4, 3.9))
    for y, colour in ((2.75, COLOURS[0]), (2.45, COLOURS[1])):
        ax.plot([0.2, 13.2], [y, y], color=colour, linewidth=2.2)
        arrow(ax, (13.2, y), (13.6, y), colour)
    for left, text, split in ((0.6, "attention", "heads\n{}"), (7.0, "feed-forward", "features\n{}")):
        for y, colour, half in ((0.85, COLOURS[0], "first half"), (-0.85, COLOURS[1], "second half")):
            box(ax, left, y, "norm", colour, (1.1, 0.8))
            arrow(ax, (left + 0.55, 0.8 * y), (left + 1.15, 0.5 * y))
            box(ax, left + 3.25, y, split.format(half), colour, (2.1, 1.2))
            arrow(ax, (left + 1.75, 0.4 * y), (left + 2.2, 0.6 * y))
            arrow(ax, (left + 4.3, 0.6 * y), (left + 4.6, 0.4 * y))
        arrow(ax, (left, 2.4), (left, 1.3))
        _upright(ax, left + 1.45, "gather")
        _upright(ax, left + 4.9, "scatter")
        arrow(ax, (left + 4.9, 0.75), (left + 4.9, 2.3))
        ax.plot(left + 4.9, 2.6, "o", markersize=15, markerfacecolor="none", markeredgecolor=GREY)
        ax.text(left + 4.9, 2.58, "+", ha="center", va="center")
        ax.text(left + 3.25, 1.8, text, ha="center", va="center")
    ax.text(0.2, 3.15, "residual stream, [B, T/2, C] on each rank", va="center")
    for y, words in (
        (-2.0, "gather: forward all-gather, backward reduce-scatter"),
        (-2.6, "scatter: forward reduce-scatter, backward all-gather"),
    ):
        ax.text(0.0, y, words, va="center", color=COLOURS[2])
    ax.set(xlim=(-0.3, 13.8), ylim=(-2.9, 3.5))
    ax.axis("off")
    return fig


def _upright(ax: Axes, x: float, text: str) -> None:
    """A green box with its text from bottom to top."""
    box(ax, x, 0.0, "", COLOURS[2], (0.6, 1.5))
    ax.text(x, 0.0, text, ha="center", va="center", rotation=90)


def draw_exchange(n_ranks: int = 4) -> Figure:
    """Positions by heads, before and after Ulysses's exchange: first a rank has some rows, then some columns."""
    fig, ax = plt.subplots(figsize=(6.4, 3.1))
    for left, title, by_row in ((0.0, "some positions, all heads", True), (8.0, "all positions, some heads", False)):
        for i in range(n_ranks):
            for j in range(n_ranks):
                owner = i if by_row else j
                corner = (left + j, n_ranks - 1 - i)
                ax.add_patch(Rectangle(corner, 1, 1, facecolor=COLOURS[owner], alpha=0.45, edgecolor=GREY))
                ax.text(corner[0] + 0.5, corner[1] + 0.5, f"{i},{j}", ha="center", va="center")
        ax.text(left + n_ranks / 2, n_ranks + 0.35, title, ha="center", va="center")
        for r in range(n_ranks):
            at = (left - 0.15, n_ranks - 0.5 - r) if by_row else (left + r + 0.5, -0.4)
            ax.text(
                *at,
                f"rank {r}" if by_row else str(r),
                ha="right" if by_row else "center",
                va="center",
                color=COLOURS[r],
            )
    arrow(ax, (4.6, 2.4), (7.4, 2.4), COLOURS[2])
    arrow(ax, (7.4, 1.4), (4.6, 1.4), COLOURS[2])
    for y, text in ((2.75, "heads_to_sequence"), (1.05, "sequence_to_heads")):
        ax.text(6.0, y, text, ha="center", va="center", color=COLOURS[2], fontsize=9.5)
    ax.set(xlim=(-1.6, 12.2), ylim=(-0.8, n_ranks + 0.8), aspect="equal")
    ax.axis("off")
    return fig


def draw_shares(dealt: dict[str, Sequence[Sequence[int]]]) -> Figure:
    """For each way to deal out a sequence, the causal scores of each rank,
    and below them how many each computes in each step.

    Args:
        dealt: For each way, the positions of each rank.
    """
    fig, axes = plt.subplots(2, len(dealt), figsize=(6.4, 4.0), height_ratios=(1, 0.62))
    for (above, below), (name, shares) in zip(axes.T, dealt.items(), strict=True):
        owner = {position: rank for rank, positions in enumerate(shares) for position in positions}
        length = len(owner)
        for q in range(length):
            above.add_patch(Rectangle((0, q), q + 1, 1, facecolor=COLOURS[owner[q]], alpha=0.7, linewidth=0))
        above.plot([0, length], [0, length], color=GREY, linewidth=0.8)
        above.set(xlim=(0, length), ylim=(length, 0), aspect="equal", xticks=[], yticks=[], title=name, xlabel="key")
        above.grid(False)
        _steps(below, shares)
    axes[0, 0].set(ylabel="query")
    axes[1, 0].set(ylabel="scores")
    return fig


def _steps(ax: Axes, shares: Sequence[Sequence[int]]) -> None:
    """For each step of the ring a bar for each rank: the scores that it computes."""
    n_ranks = len(shares)
    for step in range(n_ranks):
        for rank in range(n_ranks):
            keys = shares[(rank - step) % n_ranks]
            n = sum(k <= q for q in shares[rank] for k in keys)
            ax.bar(step * (n_ranks + 1.5) + rank, n, width=0.9, color=COLOURS[rank], alpha=0.8)
    middles = [step * (n_ranks + 1.5) + (n_ranks - 1) / 2 for step in range(n_ranks)]
    ax.set(xticks=middles, xticklabels=range(1, n_ranks + 1), xlabel="step", ylim=(0, len(shares[0]) ** 2))


def draw_ring_backward(n_ranks: int = 4) -> Figure:
    """Steps by ranks in the backward of ring attention: where pair 0 is, and where the sum of its gradients is.

    Pair 0 is on rank s in step s. The sum leaves a rank one step after the pair, and comes home after the last step.
    """
    fig, ax = plt.subplots(figsize=(6.4, 3.9))
    for step in range(n_ranks + 1):
        y = float(n_ranks - step)
        ax.text(-0.75, y, f"step {step + 1}" if step < n_ranks else "at the end", ha="right", va="center")
        if step < n_ranks:
            box(ax, step, y + 0.17, "pair 0", COLOURS[step], (0.86, 0.3))
        if step < n_ranks - 1:
            arrow(ax, (step + 0.43, y + 0.1), (step + 1.0, y - 0.67), COLOURS[0])
        if step == 0:
            _sum_box(ax, 0, y, "own part waits")
            ax.plot(
                [-0.43, -0.55, -0.55, -0.43],
                [y - 0.24, y - 0.24, -0.24, -0.24],
                color=GREY,
                linewidth=1.2,
                linestyle=":",
            )
        elif step < n_ranks:
            _sum_box(ax, step, y, "sum of " + ", ".join(str(rank) for rank in range(1, step + 1)))
            ends = ((0.43, 0.57), (-0.24, -1.24)) if step < n_ranks - 1 else ((-0.1, 0.43 - step), (-0.41, -1.24))
            (from_x, to_x), (from_y, to_y) = ends
            arrow(ax, (step + from_x, y + from_y), (step + to_x, y + to_y), COLOURS[2])
    _sum_box(ax, 0, 0.0, "all parts")
    for rank in range(n_ranks):
        ax.text(rank, n_ranks + 0.62, f"rank {rank}", ha="center", va="center", color=COLOURS[rank])
    ax.set(xlim=(-1.6, n_ranks - 0.4), ylim=(-0.7, n_ranks + 0.9))
    ax.axis("off")
    return fig


def _sum_box(ax: Axes, x: float, y: float, text: str) -> None:
    """An outlined box, a little below the pair's."""
    ax.add_patch(Rectangle((x - 0.43, y - 0.41), 0.86, 0.34, facecolor="none", edgecolor=COLOURS[2], linewidth=1.6))
    ax.text(x, y - 0.245, text, ha="center", va="center", fontsize=9)
