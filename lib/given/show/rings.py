"""Pictures of chapter 9: what each rank has after each step of a ring, and who sends to whom in a tree."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lib.given.show.plots import COLOURS, GREY

State = list[list[frozenset[int]]]


def ring_states(n_ranks: int) -> list[State]:
    """For each moment, rank and chunk, the ranks whose numbers are in that chunk. The first moment is before the first step."""
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
    """A grid of ranks and chunks at the start and after each step s. The darker a cell, the more ranks are in it; a frame marks what just arrived."""
    states = ring_states(n_ranks)
    fig, axes = plt.subplots(1, len(states), figsize=(8.0, 2.1), sharey=True)
    cmap = plt.get_cmap("Blues")
    for moment, (ax, state) in enumerate(zip(axes, states, strict=True)):
        for rank in range(n_ranks):
            for chunk in range(n_ranks):
                n = len(state[rank][chunk])
                new = moment > 0 and chunk == (rank - moment) % n_ranks
                edge, width, z = (COLOURS[1], 2.2, 3) if new else (GREY, 0.5, 2)
                box = plt.Rectangle((chunk + 0.06, rank + 0.06), 0.88, 0.88, edgecolor=edge, linewidth=width, zorder=z)
                box.set_facecolor(cmap(0.12 + 0.75 * n / n_ranks))
                ax.add_patch(box)
                ax.text(chunk + 0.5, rank + 0.52, str(n), ha="center", va="center", fontsize=8, zorder=4,
                        color="white" if n > n_ranks / 2 else "black")  # fmt: skip
        phase, step = divmod(moment - 1, n_ranks - 1)
        title = "start" if moment == 0 else f"{('reduce-scatter', 'all-gather')[phase]}\ns = {step}"
        ax.set(xlim=(0, n_ranks), ylim=(n_ranks, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(title, fontsize=8)
        ax.set_xlabel("chunk", fontsize=8)
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set_visible(False)
    axes[0].set_yticks([r + 0.5 for r in range(n_ranks)], [f"rank {r}" for r in range(n_ranks)])
    return fig


def draw_tree(n_ranks: int = 8) -> Figure:
    """Who sends to whom in each round of a binomial tree from rank 0. Ranks that have the array are coloured."""
    fig, ax = plt.subplots(figsize=(6.6, 2.9))
    n_rounds = (n_ranks - 1).bit_length()
    for moment in range(n_rounds + 1):
        for rank in range(n_ranks):
            has = rank < 2**moment
            ax.plot(
                rank, moment, "o", markersize=17, color=COLOURS[0] if has else "none", markeredgecolor=GREY, zorder=3
            )
            ax.text(rank, moment, str(rank), ha="center", va="center", color="white" if has else GREY, zorder=4)
        for rank in range(2**moment if moment < n_rounds else 0):
            if rank + 2**moment < n_ranks:
                arrow = {"arrowstyle": "->", "color": COLOURS[1], "lw": 1.8, "shrinkA": 9, "shrinkB": 9}
                ax.annotate("", (rank + 2**moment, moment + 1), (rank, moment), arrowprops=arrow)
    ax.set(ylim=(n_rounds + 0.4, -0.4), yticks=range(n_rounds + 1), xticks=[], xlabel="rank")
    ax.set_yticklabels(["start", *(f"after round {k}" for k in range(n_rounds))])
    ax.grid(False)
    return fig
