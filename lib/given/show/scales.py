"""Pictures of chapter 20: which numbers of a matrix share a scale, and where GPTQ sends a rounding error."""

from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

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


def steps_of_two(hessian: Float[Tensor, "2 2"], weights: Float[Tensor, " 2"]) -> list[Float[Tensor, " 2"]]:
    """Where GPTQ takes two weights with whole numbers as levels: at first, and after each of its three steps."""
    first, inverse = weights[0].round(), hessian.inverse()
    moved = weights[1] + (first - weights[0]) * inverse[0, 1] / inverse[0, 0]
    return [weights, *(torch.stack([first, w]) for w in (weights[1], moved, moved.round()))]


def draw_error_flow(hessian: Float[Tensor, "2 2"], weights: Float[Tensor, " 2"]) -> Figure:
    """GPTQ twice: a step on a matrix, whose error flows into all columns after it, and the three steps of two weights.

    Args:
        hessian: H of the two inputs.
        weights: The two weights before rounding; their levels are whole numbers.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.4), width_ratios=(1.15, 1))
    _draw_step(left)
    _draw_two_weights(right, hessian, weights)
    return fig


def _draw_step(ax: Axes, rows: int = 4, columns: int = 6, now: int = 2) -> None:
    """The columns of a matrix at the moment when one of them is rounded."""
    for column in range(columns):
        colour = GREY if column < now else COLOURS[1] if column == now else COLOURS[0]
        for row in range(rows):
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.4, edgecolor=GREY, linewidth=0.8))
        if column > now:
            curve = f"arc3,rad=-{0.75 - 0.12 * (column - now):.2f}"
            bend: dict[str, Any] = {"connectionstyle": curve, "arrowstyle": "-|>"}
            ends = (now + 0.5, rows + 0.05), (column + 0.5, rows + 0.05)
            ax.add_patch(FancyArrowPatch(*ends, mutation_scale=11, color=COLOURS[1], **bend))
    ax.text((now + columns) / 2 + 0.2, rows + 1.3, "each moves by $-e_i U_{ij}$", ha="center", va="center")
    names = {
        now / 2: ("done", GREY),
        now + 0.5: ("rounded\nnow", COLOURS[1]),
        (now + 1 + columns) / 2: ("free", COLOURS[0]),
    }
    for x, (text, colour) in names.items():
        ax.text(x, -0.15, text, ha="center", va="top", color=colour)
    ax.set(xlim=(-0.1, columns + 0.1), ylim=(-1.2, rows + 1.8), aspect="equal", title="a matrix, column by column")
    ax.axis("off")


def _draw_two_weights(ax: Axes, hessian: Tensor, weights: Tensor) -> None:
    """Two weights among the levels, over the contours of the error: round, correct, round."""
    places, plain = steps_of_two(hessian, weights), weights.round()
    grid = torch.linspace(-0.9, 1.5, 145)
    d = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1) - weights
    levels = sorted(float((place - weights) @ hessian @ (place - weights)) for place in (places[-1], plain))
    error = torch.einsum("yxi,ij,yxj->yx", d, hessian, d)
    ax.contour(grid, grid, error, levels=levels, colors=[COLOURS[2], GREY], linewidths=1.2)
    ax.plot(*torch.cartesian_prod(torch.arange(2), torch.arange(2)).T, "s", color=GREY, markersize=5)
    for pair, i, text in zip(pairwise(places), (1, 0, 1), ("1 round", "2 correct", "3 round"), strict=True):
        look = {"arrowstyle": "-|>", "color": COLOURS[i], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", _xy(pair[1]), _xy(pair[0]), arrowprops=look)
        sideways = text.startswith("1")
        x, y = ((pair[0] + pair[1]) / 2).tolist()
        where = (x, y - 0.06, "center", "top") if sideways else (x - 0.06, y, "right", "center")
        ax.text(*where[:2], text, color=COLOURS[i], ha=where[2], va=where[3])
    ax.plot(*weights, "o", color=COLOURS[0], markersize=6)
    named = {"start": (weights, (7, -3)), "GPTQ": (places[-1], (7, 6)), "plain": (plain, (-38, -13))}
    for text, (place, offset) in named.items():
        ax.annotate(text, _xy(place), offset, textcoords="offset points")
    ax.set(xlabel="$w_0$", ylabel="$w_1$", aspect="equal", title="two weights", xticks=[0, 1], yticks=[0, 1])


def _xy(place: Tensor) -> tuple[float, float]:
    return float(place[0]), float(place[1])
