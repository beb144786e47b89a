"""The picture that a link to a page shows: one of the page's figures under the page's title."""

import base64
import html
import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from docutils import nodes

if TYPE_CHECKING:
    from PIL import ImageFont

SIZE = (1200, 630)
"""Width and height in pixels that networks ask for."""
MARGIN, HEAD, FOOT = 60, 150, 70
"""Pixels at the sides, and above and below the figure."""
INK, GREY, ACCENT = "#222222", "#777777", "#1f7fc4"
FIGURE = re.compile(r'<img class="workbook-figure" src="data:image/png;base64,([^"]+)" alt="([^"]*)"')


class Picture(NamedTuple):
    """A figure as it stands on a page: the file's bytes and the description for those who cannot see it."""

    png: bytes
    alt: str


def chosen(doctree: nodes.document, wanted: Collection[str]) -> Picture | None:
    """The figure on a page whose label is in ``wanted``; without one the page's first figure; None if it has none.

    A figure is the last picture before its caption.
    """
    places = {nodes.make_id(label) for label in wanted}  # as Sphinx writes a label into a page
    pictures, last = dict[str, Picture](), None
    for node in doctree.findall():
        if isinstance(node, nodes.raw) and (found := FIGURE.search(node.astext())):
            last = Picture(base64.b64decode(found[1]), html.unescape(found[2]))
        elif last and isinstance(node, nodes.paragraph) and "workbook-caption" in node["classes"]:
            pictures.update(dict.fromkeys(node["ids"], last))
            last = None
    preferred = [picture for place, picture in pictures.items() if place in places]
    return next(iter([*preferred, *pictures.values()]), None)


def card(figure: bytes, title: str, book: str) -> bytes:
    """A figure on white, below the title of its page and above the name of the book, as a PNG file."""
    from PIL import Image, ImageDraw

    picture = Image.open(io.BytesIO(figure)).convert("RGBA")
    room = SIZE[0] - 2 * MARGIN, SIZE[1] - HEAD - FOOT
    scale = min(room[0] / picture.width, room[1] / picture.height)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    whole = Image.new("RGB", SIZE, "white")
    whole.paste(picture, ((SIZE[0] - picture.width) // 2, HEAD + (room[1] - picture.height) // 2), picture)
    draw = ImageDraw.Draw(whole)
    draw.rectangle((0, 0, SIZE[0], 12), fill=ACCENT)
    draw.text((MARGIN, 84), title, fill=INK, font=_font(title, 54), anchor="lm")
    draw.text((SIZE[0] - MARGIN, SIZE[1] - 34), book, fill=GREY, font=_font(book, 26), anchor="rm")
    file = io.BytesIO()
    whole.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _font(text: str, size: int) -> "ImageFont.FreeTypeFont":
    """Matplotlib's own font, as large as ``size`` if the text then fits."""
    import matplotlib
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    width = ImageFont.truetype(path, size).getlength(text)
    return ImageFont.truetype(path, min(size, int(size * (SIZE[0] - 2 * MARGIN) / width)))
