"""The bits of a number, drawn."""

from collections.abc import Mapping
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from lib.given.show.plots import COLOURS, GREY


def bits_of(value: float, exponent_bits: int, mantissa_bits: int) -> str:
    """The bits of the format's number nearest to ``value``: sign, exponent, mantissa. For normal numbers only."""
    size, exponent = Fraction(abs(value)), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    mantissa = round((size - 1) * 2**mantissa_bits)
    exponent, mantissa = exponent + (mantissa >> mantissa_bits), mantissa % 2**mantissa_bits
    stored = exponent + 2 ** (exponent_bits - 1) - 1
    return f"{int(value < 0)}{stored:0{exponent_bits}b}{mantissa:0{mantissa_bits}b}"


def draw_bits(ax: Axes, value: float, formats: Mapping[str, tuple[int, int, bool]]) -> None:
    """Draw a row of squares for each format, filled where the bit is 1; sign,
    exponent and mantissa have their own colours.

    Args:
        ax: The axes to draw on; their frame is removed.
        value: The number to show.
        formats: By name: exponent bits, mantissa bits, and whether the format has infinity.
    """
    for row, (name, (exponent_bits, mantissa_bits, _)) in enumerate(formats.items()):
        for place, bit in enumerate(bits_of(value, exponent_bits, mantissa_bits)):
            colour = COLOURS[1] if place == 0 else COLOURS[0] if place <= exponent_bits else COLOURS[2]
            # align the ends of all exponents, so that the mantissas begin in one column
            left = place - exponent_bits + 8
            fill = colour if bit == "1" else "none"
            ax.add_patch(Rectangle((left + 0.1, -row - 0.4), 0.8, 0.8, facecolor=fill, edgecolor=colour))
        ax.text(-0.3, -row, name, ha="right", va="center")
    for text, middle, hue in (("sign, exponent", 4.5, COLOURS[0]), ("mantissa", 20.5, COLOURS[2])):
        ax.text(middle, 0.9, text, ha="center", color=hue)
    ax.axvline(9, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlim=(-7.5, 32.5), ylim=(-len(formats) + 0.4, 1.5))
    ax.axis("off")
