"""Pictures of attention's shapes: from queries and keys to the output, and from heads to the cache."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lib.given.show.plots import COLOURS, GREY

BLUE, ORANGE = COLOURS[0], COLOURS[1]
EMPTY = "none"


def attention_shapes() -> Figure:
    """Attention of 3 queries to 5 keys, drawn to scale: one query's row is orange from the scores to the output."""
    n_queries, n_keys, width = 3, 5, 4
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(n_queries, width, generator=generator), torch.randn(n_keys, width, generator=generator)
    seen = torch.ones(n_queries, n_keys).tril(n_keys - n_queries).bool()
    weights = (q @ k.T / math.sqrt(width)).masked_fill(~seen, -math.inf).softmax(-1)
    fig, ax = plt.subplots(figsize=(5.2, 4.6))
    plain, row = torch.full((n_queries, width), 0.25), 1
    below = -8.8
    _matrix(ax, 0, 0, plain, "Q", "T", "D", row=row)
    _matrix(ax, 6.4, 0, torch.full((width, n_keys), 0.25), "Kᵀ", "D", "S")
    _matrix(ax, 14, 0, torch.full((n_queries, n_keys), 0.25), "scores", "T", "S", row=row)
    _matrix(ax, 0, below, weights, "weights", "T", "S", row=row, hidden=~seen)
    _matrix(ax, 7.4, below, torch.full((n_keys, width), 0.25), "V", "S", "Dv")
    _matrix(ax, 14, below, plain, "output", "T", "Dv", row=row)
    for x, y, sign in ((4.9, 0, "@"), (12.2, 0, "="), (5.9, below, "@"), (12.2, below, "=")):
        ax.text(x, y - 1.5, sign, ha="center", va="center", fontsize=14)
    ax.plot([16.5, 16.5, 2.5], [-4.3, -6.2, -6.2], color=GREY, linewidth=1)
    ax.add_patch(_arrow((2.5, -6.2), (2.5, below + 1.3)))
    ax.text(9.5, -6.7, "÷ √D, mask, softmax of each row", ha="center", va="center")
    ax.set(xlim=(-1.2, 19.2), ylim=(below - 6, 1.5), aspect="equal")
    ax.axis("off")
    return fig


def heads_and_cache(n_past: int = 3, max_len: int = 7) -> Figure:
    """Two new positions, four query heads and two key/value heads: how widths are cut, and what the cache keeps."""
    n_new, width = 2, 2
    heads = (0.0, 2.8, 9.2, 12.0)  # the left edge of each query head
    fig, ax = plt.subplots(figsize=(5.2, 5.6))
    ax.text(7, 1.1, "queries [T, H·D]: H = 4 heads side by side", ha="center")
    ax.text(7, -5, "split_heads:\n[H, T, D]", ha="center", va="center")
    for head, left in enumerate(heads):
        colour = COLOURS[head // 2]
        _cells(ax, 3 + width * head, 0, n_new, width, colour, 0.35)
        _cells(ax, left, -4, n_new, width, colour, 0.35)
        ax.text(left + 1, -6.6, f"head {head}", ha="center", color=colour)
        ax.add_patch(_arrow((3 + width * head + 1, -2.2), (left + 1, -3.8)))
    top = -9.6
    for group, left in enumerate((1.4, 10.6)):
        colour = COLOURS[group]
        _cells(ax, left, top, n_past, width, colour, 0.12)
        _cells(ax, left, top - n_past, n_new, width, colour, 0.55)
        _cells(ax, left, top - n_past - n_new, max_len - n_past - n_new, width, GREY, 0.0)
        _cells(ax, 5 + width * group, top - n_past, n_new, width, colour, 0.55)
        inner, outer = (5, left + width) if group == 0 else (9, left)
        ax.add_patch(_arrow((inner, top - n_past - 1), (outer, top - n_past - 1)))
        for head in (2 * group, 2 * group + 1):
            ax.add_patch(_arrow((heads[head] + 1, -6.9), (left + 1, top + 0.2)))
    for text, row in (("past", n_past / 2), ("new", n_past + 1), ("free", (n_past + n_new + max_len) / 2)):
        ax.text(1.1, top - row, text, ha="right", va="center")
    ax.text(7, top - n_past + 0.3, "keys [T, G·D]", ha="center")
    ax.text(7, top - max_len - 0.5, "cache: [G, max_len, D] for G = 2", ha="center", va="top")
    ax.set(xlim=(-1.4, 15.4), ylim=(top - max_len - 1.8, 2.2), aspect="equal")
    ax.axis("off")
    return fig


def _matrix(ax, left, top, shades, name, rows, columns, row=None, hidden=None) -> None:
    """A matrix as a grid, its name above it and its sizes at its edges; one row may be orange,
    hidden cells stay empty.
    """
    n, m = shades.shape
    for i in range(n):
        for j in range(m):
            colour = ORANGE if i == row else BLUE
            is_hidden = hidden is not None and bool(hidden[i, j])
            face = EMPTY if is_hidden else (colour, 0.08 + 0.85 * float(shades[i, j]))
            ax.add_patch(Rectangle((left + j, top - i - 1), 1, 1, facecolor=face, edgecolor=colour, linewidth=1))
    ax.text(left + m / 2, top + 0.75, name, ha="center", va="center", fontweight="bold")
    ax.text(left - 0.25, top - n / 2, rows, ha="right", va="center")
    ax.text(left + m / 2, top - n - 0.25, columns, ha="center", va="top")


def _cells(ax, left, top, n_rows, n_columns, colour, strength) -> None:
    for i in range(n_rows):
        for j in range(n_columns):
            corner = (left + j, top - i - 1)
            ax.add_patch(Rectangle(corner, 1, 1, facecolor=(colour, strength), edgecolor=colour, linewidth=1))


def _arrow(start, end) -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=GREY, shrinkA=0, shrinkB=0)
