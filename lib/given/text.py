"""Tokens as a reader can see them: coloured spans, and bytes that print."""

import html
from collections.abc import Iterable, Mapping

from lib.given.plots import COLOURS


class Html:
    """HTML with the plain text that stands for it where there is no HTML."""

    def __init__(self, page: str, text: str):
        self.page, self.text = page, text

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


def readable(token: bytes | str) -> str:
    """A token as one line: a space is ␣, a line's end ⏎, a tab ⇥, and bytes that are no character are \\x..."""
    text = token if isinstance(token, str) else token.decode("utf-8", errors="backslashreplace")
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def show_tokens(ids: Iterable[int], vocab: Mapping[int, bytes], caption: str = "") -> Html:
    """Each token in a box of its own colour, with its id when the pointer rests on it.

    Args:
        ids: Token ids, as ``encode`` gives them.
        vocab: Bytes of each id.
        caption: What stands in front.
    """
    ids = list(ids)
    return show_pieces([vocab[i] for i in ids], caption, titles=[f"id {i}" for i in ids])


def show_pieces(pieces: Iterable[bytes | str], caption: str = "", titles: Iterable[str] | None = None) -> Html:
    """The same for tokens that are given as bytes or strings."""
    shown = [readable(piece) for piece in pieces]
    titles = list(titles) if titles is not None else [""] * len(shown)
    boxes = []
    for n, (piece, title) in enumerate(zip(shown, titles, strict=True)):
        colour = COLOURS[n % len(COLOURS)]
        look = f"background:{colour}33;border-bottom:2px solid {colour};padding:0 .15em;margin-right:1px;white-space:pre-wrap"
        hint = f' title="{html.escape(title)}"' if title else ""
        boxes.append(f'<span style="{look}"{hint}>{html.escape(piece)}</span>')
    start = f'<span style="opacity:.75">{html.escape(caption)} · {len(shown)} tokens</span><br>' if caption else ""
    page = f'<div style="font-family:monospace;line-height:1.9;overflow-wrap:anywhere">{start}{"".join(boxes)}</div>'
    return Html(page, (f"{caption}: " if caption else "") + "|".join(shown))
