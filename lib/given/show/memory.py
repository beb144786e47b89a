"""Attention between a GPU's main memory and its chip, drawn: with whole matrices, and in tiles."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from lib.given.show.plots import COLOURS, GREY

TOP, BOTTOM = 2.55, 0.25  # where the two boxes begin, main memory and the chip
SHADE = "44"  # alpha of a filled shape


def _boxes(ax: Axes, title: str) -> None:
    """The frame of one panel: main memory above, the chip below."""
    for bottom, height, name in ((TOP, 1.75, "main memory"), (BOTTOM, 1.3, "chip")):
        ax.add_patch(Rectangle((0, bottom), 10, height, facecolor="none", edgecolor=GREY, linewidth=1.2))
        ax.text(-0.15, bottom + height / 2, name, rotation=90, ha="right", va="center")
    ax.set(xlim=(-0.7, 10.1), ylim=(0.1, 4.4), title=title)
    ax.axis("off")


def _block(ax: Axes, x: float, y: float, width: float, height: float, label: str, colour: str) -> None:
    """A filled rectangle around its label."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour + SHADE, edgecolor=colour))
    ax.text(x + width / 2, y + height / 2, label, ha="center", va="center")


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})


def draw_whole(ax: Axes) -> None:
    """Standard attention: each of three steps reads matrices from main memory and writes one back."""
    _boxes(ax, "standard: the scores cross four times")
    blue, orange, green = COLOURS[:3]
    matrices = (("Q", 0.35, 0.4, blue), ("K", 1.05, 0.4, blue), ("S", 2.2, 1.3, orange), ("P", 5.3, 1.3, orange))
    for name, x, width, colour in (*matrices, ("V", 7.45, 0.4, blue), ("O", 9.2, 0.4, green)):
        _block(ax, x, TOP + 0.2, width, 1.3, name, colour)
    for name, x in (("$QK^T$", 0.9), ("softmax", 4.1), ("$PV$", 7.3)):
        _block(ax, x, BOTTOM + 0.3, 1.7, 0.7, name, GREY)
    low, high = BOTTOM + 1.05, TOP + 0.15
    reads = ((0.55, 1.2, blue), (1.25, 1.5, blue), (3.2, 4.5, orange), (6.25, 7.55, orange), (7.65, 8.05, blue))
    for above, below, colour in reads:
        _arrow(ax, (above, high), (below, low), colour)
    for below, above, colour in ((2.2, 2.6, orange), (5.3, 5.7, orange), (8.6, 9.4, green)):
        _arrow(ax, (below, low), (above, high), colour)


def draw_tiles(ax: Axes, n_tiles: int = 4) -> None:
    """FlashAttention: a tile of queries stays on the chip, tiles of keys and values pass by,
    the output is written once.
    """
    _boxes(ax, "in tiles: the scores never leave the chip")
    blue, orange, green = COLOURS[:3]
    height = 1.3 / n_tiles
    for name, x, chosen, colour in (
        ("Q", 0.75, 1, blue),
        ("K", 3.3, 2, blue),
        ("V", 4.7, 2, blue),
        ("O", 9.0, 1, green),
    ):
        for i in range(n_tiles):
            fill = colour + SHADE if i == chosen else "none"
            ax.add_patch(Rectangle((x, TOP + 1.5 - (i + 1) * height), 0.6, height, facecolor=fill, edgecolor=colour))
        ax.text(x - 0.12, TOP + 0.85, name, ha="right", va="center")
    for name, x, width, colour in (
        ("tile\nof Q", 0.6, 0.95, blue),
        ("of K", 3.1, 0.95, blue),
        ("of V", 4.5, 0.95, blue),
        ("scores", 6.0, 1.25, orange),
        (r"$m,\ \ell,\ a$", 7.7, 1.3, green),
    ):
        _block(ax, x, BOTTOM + 0.25, width, 0.8, name, colour)
    low, high = BOTTOM + 1.1, TOP + 0.15
    for x, colour in ((1.05, blue), (3.58, blue), (4.98, blue)):
        _arrow(ax, (x, high), (x, low), colour)
    _arrow(ax, (8.4, low), (9.25, high), green)
    for x, text in ((1.2, "once"), (5.15, "one after another"), (9.05, "once")):
        ax.text(x, (low + high) / 2, text, ha="left", va="center")
