"""A picture of chapter 19: one token's way through a mixture of experts."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from lib.given.show.parallel import arrow, box
from lib.given.show.plots import COLOURS, GREY


def mixture_weights(logits: Sequence[float], k: int) -> tuple[list[float], dict[int, float]]:
    """The probabilities of all experts, and the weights of the k chosen ones, which add up to 1, by expert."""
    exponentials = [math.exp(logit) for logit in logits]
    probabilities = [e / sum(exponentials) for e in exponentials]
    chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[:k]
    return probabilities, {e: probabilities[e] / sum(probabilities[c] for c in chosen) for e in sorted(chosen)}


def draw_mixture(logits: Sequence[float] = (0.2, 1.6, -0.6, 0.8), k: int = 2) -> Figure:
    """One token from left to right: the router's probabilities, the k chosen experts, and their weighted sum."""
    probabilities, weights = mixture_weights(logits, k)
    fig, ax = plt.subplots(figsize=(6.6, 3.4))
    middle = (len(logits) - 1) / 2
    box(ax, 0.0, middle, "token x", COLOURS[0], (1.3, 0.7))
    arrow(ax, (0.65, middle), (1.25, middle), COLOURS[0])
    ax.add_patch(Rectangle((1.3, -0.55), 2.1, len(logits) + 0.1, facecolor="none", edgecolor=GREY))
    ax.text(2.35, len(logits) - 0.1, "router: softmax", ha="center", va="center")
    for expert, probability in enumerate(probabilities):
        y, is_chosen = len(logits) - 1 - expert, expert in weights
        colour = COLOURS[1] if is_chosen else GREY
        ax.add_patch(
            Rectangle((1.45, y - 0.2), 1.2 * probability, 0.4, facecolor=colour, alpha=0.8 if is_chosen else 0.35)
        )
        ax.text(1.55 + 1.2 * probability, y, f"{probability:.2f}", va="center", color=colour)
        style: dict[str, Any] = {
            "linestyle": "-" if is_chosen else ":",
            "facecolor": colour if is_chosen else "none",
            "edgecolor": colour,
        }
        ax.add_patch(Rectangle((4.6, y - 0.32), 1.7, 0.64, alpha=0.5 if is_chosen else 1.0, **style))
        ax.text(5.45, y, f"expert {expert}", ha="center", va="center")
        if is_chosen:
            arrow(ax, (3.4, y), (4.55, y), COLOURS[0])
            ax.text(3.98, y + 0.2, "x", ha="center", va="center", color=COLOURS[0])
            side = 1 if y > middle else -1
            arrow(ax, (6.35, y), (8.05, middle + 0.28 * side), COLOURS[1])
            ax.text(6.5, y + 0.3 * side, f"× {weights[expert]:.2f}", va="center", color=COLOURS[1])
    ax.add_patch(Circle((8.3, middle), 0.33, facecolor="none", edgecolor=COLOURS[1], linewidth=1.6))
    ax.text(8.3, middle, "+", ha="center", va="center", color=COLOURS[1], fontsize=14)
    arrow(ax, (8.65, middle), (9.2, middle), COLOURS[1])
    ax.text(9.3, middle, "y", va="center")
    ax.set(xlim=(-0.8, 9.6), ylim=(-0.7, len(logits) + 0.2))
    ax.axis("off")
    return fig
