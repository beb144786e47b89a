"""Marks of a drawing as SVG text, in the book's mid-tones: legible on a light and on a dark page."""

import html
import math
from collections.abc import Sequence

from lib.given.show.plots import COLOURS

BLUE, ORANGE, GREEN = COLOURS[:3]

Point = tuple[float, float]


def number(value: float) -> str:
    """At most one digit behind the point, which is a tenth of a pixel."""
    return f"{value:.1f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def tag(name: str, text: str | None = None, /, **attributes: float | str) -> str:
    """One element; ``stroke_width=2`` becomes ``stroke-width='2'``, and ``kind`` becomes ``class``."""
    names = {"kind": "class"}
    written = "".join(
        f" {names.get(key, key.replace('_', '-'))}='{value if isinstance(value, str) else number(value)}'"
        for key, value in attributes.items()
    )
    return f"<{name}{written}/>" if text is None else f"<{name}{written}>{html.escape(text, quote=False)}</{name}>"


def rect(x: float, y: float, width: float, height: float, **attributes: float | str) -> str:
    return tag("rect", x=x, y=y, width=width, height=height, **attributes)


def label(x: float, y: float, text: str, **attributes: float | str) -> str:
    """Text whose left end (``kind="middle"``: middle, ``"end"``: right end) is at x, and whose base line is at y."""
    return tag("text", text, x=x, y=y, **attributes)


def line(start: Point, end: Point, **attributes: float | str) -> str:
    return tag("path", d=f"M{number(start[0])} {number(start[1])}L{number(end[0])} {number(end[1])}", **attributes)


def boxes(corners: Sequence[Point], width: float, height: float) -> str:
    """The path ``d`` of many rectangles of one size."""
    w, h = number(width), number(height)
    return "".join(f"M{number(x)} {number(y)}h{w}v{h}h-{w}z" for x, y in corners)


def arrow(start: Point, end: Point, colour: str) -> str:
    """A line that ends in a filled head."""
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    wings = [(end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    head = "L".join(f"{number(x)} {number(y)}" for x, y in (end, *wings))
    neck = (end[0] - 6 * math.cos(angle), end[1] - 6 * math.sin(angle))
    return line(start, neck, stroke=colour, stroke_width=2.5) + tag("path", d=f"M{head}z", fill=colour)
