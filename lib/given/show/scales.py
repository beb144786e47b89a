"""A picture of chapter 20: which numbers of a matrix share a scale."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib.given.show.plots import COLOURS, GREY

GRANULARITIES = {"tensor": (8, 8), "row": (1, 8), "block": (4, 4), "group": (1, 4)}
"""Rows and columns of the numbers of an 8 x 8 matrix that share one scale."""


def scale_of(row: int, column: int, shape: tuple[int, int], size: int = 8) -> int:
    """The number of the scale that an entry of a square matrix has, counted row by row."""
    return row // shape[0] * (size // shape[1]) + column // shape[1]


def draw_granularity(size: int = 8) -> Figure:
    """The same matrix four times: neighbours of one colour share a scale. Below each, how many scales it takes."""
    fig, axes = plt.subplots(1, len(GRANULARITIES), figsize=(6.6, 2.3))
    for ax, (name, shape) in zip(axes, GRANULARITIES.items(), strict=True):
        across = size // shape[1]
        for row in range(size):
            for column in range(size):
                scale = scale_of(row, column, shape, size)
                colour = COLOURS[(scale // across + 2 * (scale % across)) % 4]
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.45, linewidth=0))
        for row in range(0, size, shape[0]):
            for column in range(0, size, shape[1]):
                ax.add_patch(
                    Rectangle((column, row), shape[1], shape[0], facecolor="none", edgecolor=GREY, linewidth=1.2)
                )
        n_scales = size // shape[0] * across
        ax.set(xlim=(-0.1, size + 0.1), ylim=(size + 0.1, -0.1), aspect="equal", title=name)
        ax.text(size / 2, size + 0.8, f"{n_scales} scale{'s' * (n_scales > 1)}", ha="center", va="center")
        ax.axis("off")
    return fig
