"""Tokens that a reader can see: coloured boxes, and printable bytes."""

import html
from collections.abc import Iterable, Mapping

from matplotlib.patches import Rectangle

from lib.given.show.plots import COLOURS


class Html:
    """HTML, with plain text for places that cannot show HTML."""

    def __init__(self, page: str, text: str):
        self.page, self.text = page, text

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


def readable(token: bytes | str) -> str:
    """A token on one line: a space is ␣, the end of a line ⏎, a tab ⇥; bytes that are not a character are \\x.."""
    text = token if isinstance(token, str) else token.decode("utf-8", errors="backslashreplace")
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def show_tokens(ids: Iterable[int], vocab: Mapping[int, bytes], caption: str = "") -> Html:
    """Each token in a coloured box, with its id when the pointer rests on it.

    Args:
        ids: Token ids, as ``encode`` returns them.
        vocab: Bytes of each id.
        caption: A line above the boxes.
    """
    ids = list(ids)
    return show_pieces([vocab[i] for i in ids], caption, titles=[f"id {i}" for i in ids])


def show_pieces(pieces: Iterable[bytes | str], caption: str = "", titles: Iterable[str] | None = None) -> Html:
    """Each of some bytes or strings in a coloured box, as ``show_tokens`` does it for ids."""
    shown = [readable(piece) for piece in pieces]
    titles = list(titles) if titles is not None else [""] * len(shown)
    boxes = []
    for n, (piece, title) in enumerate(zip(shown, titles, strict=True)):
        colour = COLOURS[n % len(COLOURS)]
        look = (
            f"background:{colour}33;border-bottom:2px solid {colour};padding:0 "
            ".15em;margin-right:1px;white-space:pre-wrap"
        )
        hint = f' title="{html.escape(title)}"' if title else ""
        boxes.append(f'<span style="{look}"{hint}>{html.escape(piece)}</span>')
    start = f'<span style="opacity:.75">{html.escape(caption)} · {len(shown)} tokens</span><br>' if caption else ""
    page = f'<div style="font-family:monospace;line-height:1.9;overflow-wrap:anywhere">{start}{"".join(boxes)}</div>'
    return Html(page, (f"{caption}: " if caption else "") + "|".join(shown))


def draw_merges(ax, steps: Iterable[Iterable[bytes]]) -> None:
    """The merges of a word: one row of boxes per step, from its bytes at the top to its tokens at the bottom.

    Args:
        ax: The axes to draw on; their frame is removed.
        steps: The symbols of the word after each merge.
    """
    steps = [list(step) for step in steps]
    for row, symbols in enumerate(steps):
        left = 0
        new = set(symbols) - set(steps[row - 1]) if row else set()
        for symbol in symbols:
            colour = COLOURS[1] if symbol in new else COLOURS[0]
            corner, width = (left + 0.05, -row - 0.4), len(symbol) - 0.1
            ax.add_patch(Rectangle(corner, width, 0.8, facecolor=colour + "33", edgecolor=colour, linewidth=1.2))
            ax.text(left + len(symbol) / 2, -row, readable(symbol), ha="center", va="center", family="monospace")
            left += len(symbol)
    ax.set(xlim=(0, sum(map(len, steps[0]))), ylim=(-len(steps) + 0.4, 0.6))
    ax.axis("off")


def show_numbers(numbers: Mapping[str, str], heading: str = "your run") -> Html:
    """A table of two columns: what was measured, and the result.

    Args:
        numbers: The name of each measurement, and its value as it should be printed.
        heading: Title of the column of values.
    """
    cell = 'style="text-align:left;padding:.2em 1.2em .2em 0;border-bottom:1px solid rgba(127,127,127,.3)"'
    rows = [
        f"<tr><td {cell}>{html.escape(name)}</td><td {cell}>{html.escape(v)}</td></tr>" for name, v in numbers.items()
    ]
    head = f"<tr><th {cell}></th><th {cell}>{html.escape(heading)}</th></tr>"
    table = (
        '<table style="border-collapse:collapse;margin:1em '
        f'0"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return Html(table, "\n".join(f"{name}: {value}" for name, value in numbers.items()))


def show_text(text: str) -> Html:
    """Text with its own line breaks, wrapped where a line is too long; updating the same display replaces it."""
    style = "white-space:pre-wrap;overflow-wrap:anywhere;margin:.5em 0"
    return Html(f'<pre style="{style}">{html.escape(text)}</pre>', text)
