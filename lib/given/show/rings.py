"""Pictures of chapter 9: what each rank has after each step of a ring, and which rank sends to which in a tree."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib.given.show.plots import COLOURS, GREY

State = list[list[frozenset[int]]]


def ring_states(n_ranks: int) -> list[State]:
    """For each moment, rank and chunk, the ranks whose numbers are in that chunk.

    The first moment is before the first step.
    """
    now: State = [[frozenset({rank})] * n_ranks for rank in range(n_ranks)]
    states = [now]
    for step in range(2 * (n_ranks - 1)):
        after = [list(chunks) for chunks in now]
        for rank in range(n_ranks):
            chunk, right = (rank - step) % n_ranks, (rank + 1) % n_ranks
            after[right][chunk] = now[rank][chunk] | (now[right][chunk] if step < n_ranks - 1 else frozenset())
        now = after
        states.append(now)
    return states


def draw_ring(n_ranks: int = 4) -> Figure:
    """Ranks by chunks at the start and after each step: how many ranks are summed in each chunk;
    framed is what arrived.

    One row of grids for the reduce-scatter, from the start on, and one for the all-gather.
    """
    states = ring_states(n_ranks)
    fig, axes = plt.subplots(2, n_ranks, figsize=(6.6, 4.4))
    places = [*axes[0], *axes[1][: n_ranks - 1]]
    for moment, (ax, state) in enumerate(zip(places, states, strict=True)):
        _draw_state(ax, state, moment)
        phase, step = divmod(moment - 1, n_ranks - 1)
        ax.set_title("start" if moment == 0 else f"{('scatter', 'gather')[phase]}, s = {step}", fontsize=12)
    for row, name in enumerate(("reduce-scatter", "all-gather")):
        axes[row][0].set_yticks([r + 0.5 for r in range(n_ranks)], [f"rank {r}" for r in range(n_ranks)], fontsize=12)
        axes[row][0].set_ylabel(name, fontsize=13)
    legend = axes[1][-1]
    legend.axis("off")
    legend.set(xlim=(0, n_ranks), ylim=(n_ranks, 0), aspect="equal")
    for line, (colour, text) in enumerate(((COLOURS[2], "complete"), (COLOURS[0], "partial sum"))):
        legend.add_patch(Rectangle((0.1, 0.4 + line), 0.6, 0.6, facecolor=colour, alpha=0.9 - 0.5 * line))
        legend.text(0.95, 0.72 + line, text, va="center", fontsize=12)
    legend.add_patch(Rectangle((0.1, 2.4), 0.6, 0.6, facecolor="none", edgecolor=COLOURS[1], linewidth=2.6))
    legend.text(0.95, 2.72, "just arrived", va="center", fontsize=12)
    return fig


def _draw_state(ax: Axes, state: State, moment: int) -> None:
    """A grid of ranks and chunks: blue, darker the more ranks are summed, and green where a chunk is complete."""
    n_ranks = len(state)
    for rank in range(n_ranks):
        for chunk in range(n_ranks):
            n = len(state[rank][chunk])
            is_new = moment > 0 and chunk == (rank - moment) % n_ranks
            colour, strength = (COLOURS[2], 0.9) if n == n_ranks else (COLOURS[0], 0.12 + 0.45 * (n - 1) / n_ranks)
            corner = (chunk + 0.08, rank + 0.08)
            ax.add_patch(Rectangle(corner, 0.84, 0.84, facecolor=colour, alpha=strength, linewidth=0))
            if is_new:
                ax.add_patch(Rectangle(corner, 0.84, 0.84, facecolor="none", edgecolor=COLOURS[1], linewidth=2.6))
            ink = "white" if n == n_ranks else GREY
            ax.text(chunk + 0.5, rank + 0.53, str(n), ha="center", va="center", fontsize=12, weight="bold", color=ink)
    ax.set(xlim=(0, n_ranks), ylim=(n_ranks, 0), aspect="equal", xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def draw_tree(n_ranks: int = 8) -> Figure:
    """Which rank sends to which in each round of a binomial tree from rank 0; coloured ranks have the array."""
    fig, ax = plt.subplots(figsize=(6.4, 3.3))
    n_rounds = (n_ranks - 1).bit_length()
    for moment in range(n_rounds + 1):
        for rank in range(n_ranks):
            has = rank < 2**moment
            ax.plot(
                rank, moment, "o", markersize=21, color=COLOURS[0] if has else "none", markeredgecolor=GREY, zorder=3
            )
            ax.text(
                rank, moment, str(rank), ha="center", va="center", fontsize=12, color="white" if has else GREY, zorder=4
            )
        for rank in range(2**moment if moment < n_rounds else 0):
            if rank + 2**moment < n_ranks:
                arrow = {"arrowstyle": "->", "color": COLOURS[1], "lw": 1.8, "shrinkA": 11, "shrinkB": 11}
                ax.annotate("", (rank + 2**moment, moment + 1), (rank, moment), arrowprops=arrow)
    ax.set(ylim=(n_rounds + 0.4, -0.4), yticks=range(n_rounds + 1), xticks=[], xlabel="rank")
    ax.set_yticklabels(["start", *(f"after round {k}" for k in range(n_rounds))], fontsize=12)
    ax.grid(False)
    return fig
