"""The picture of the whole: one block of a model on several ranks, with the kernel and the bytes of each part."""

import html
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lib.given.show.plots import COLOURS, GREY
from lib.given.show.tokens import Html

GREEN, PURPLE, GOLD = COLOURS[2:5]


class Part(NamedTuple):
    """One step of a block, from the residual stream or back to it.

    Attributes:
        name: What the reader sees in its box.
        on: What each rank has of it: the whole, a part of its own (``share``), or a message to the others (``sum``).
        shares: What is written below the name in each rank's box; a ``sum`` has one box for all ranks.
        kernel: How a device computes it, with the chapter in brackets.
        holds: Bytes of the weights that each rank holds for it.
        writes: Bytes of activations that it writes to each rank's memory.
        sends: Bytes that each rank sends.
    """

    name: str
    on: Literal["whole", "share", "sum"]
    shares: Sequence[str]
    kernel: str
    holds: int = 0
    writes: int = 0
    sends: int = 0


KINDS = {"holds": PURPLE, "writes": GOLD, "sends": GREEN}
"""Colours of the bars; the first two colours are the ranks' own."""

STYLE = f"""<style>
.workbook-block {{display: grid; gap: .3rem .8rem; align-items: center; margin: 1rem 0; line-height: 1.25;
  grid-template-columns: 1.2rem minmax(15rem, 1.4fr) minmax(7rem, .8fr) minmax(10rem, 1fr); font-size: .85em}}
.workbook-block > div {{min-width: 0}}
.workbook-block .rail {{align-self: stretch; position: relative; border-left: 3px solid {GREY};
  margin: -.3rem 0 -.3rem .5rem}}
.workbook-block .rail b {{position: absolute; left: -.77rem; top: calc(50% - .7rem); width: 1.4rem; height: 1.4rem;
  line-height: 1.25rem; text-align: center; border: 2px solid {GREY}; border-radius: 50%;
  background: var(--pst-color-background, white)}}
.workbook-block .ranks {{display: flex; gap: .3rem}}
.workbook-block .ranks span {{flex: 1; padding: .3rem .4rem; border: 1px solid {GREY}; border-radius: .3rem;
  text-align: center; overflow-wrap: anywhere}}
.workbook-block .ranks small {{display: block; font-size: .82em}}
.workbook-block .bytes i {{display: block; height: .35rem; border-radius: .1rem}}
.workbook-block .head {{color: var(--pst-color-text-muted, {GREY})}}
@media (max-width: 700px) {{
  .workbook-block {{grid-template-columns: 1.2rem 1fr 1fr; gap: .2rem .7rem}}
  .workbook-block .rail {{grid-row: span 2; margin: -.2rem 0 -.2rem .5rem}}
  .workbook-block .ranks {{grid-column: 2 / 4}}
  .workbook-block :is(.kernel, .bytes) {{margin-bottom: .5rem; align-self: start}}
}}
</style>"""


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f}\u00a0MB"


def draw_block(parts: Sequence[Part], alt: str) -> Html:
    """A row for each part, from the top down: the stream, each rank's box, the kernel, and bars for the bytes.

    Args:
        parts: The parts in the order in which they run; after a ``sum`` the result is added to the stream.
        alt: What the picture shows, for those who cannot see it.
    """
    longest = max(max(part.holds, part.writes, part.sends) for part in parts)
    head = "".join(f'<div class="head{kind}">{text}</div>' for kind, text in _heads(len(parts[0].shares)))
    rows = "".join(_row(part, longest) for part in parts)
    page = f'{STYLE}<div class="workbook-block" role="group" aria-label="{html.escape(alt)}">{head}{rows}</div>'
    text = "\n".join(f"{part.name}: {part.kernel}; {_amounts(part)}" for part in parts)
    return Html(page, text.replace("\u00a0", " "))


def _heads(n_ranks: int) -> list[tuple[str, str]]:
    ranks = "".join(f"<span style='border:0'>rank {rank}</span>" for rank in range(n_ranks))
    return [(" rail", ""), (" ranks", ranks), (" kernel", "kernel (chapter)"), (" bytes", "bytes on each rank")]


def _row(part: Part, longest: int) -> str:
    joint = "<b>+</b>" if part.on == "sum" else ""
    cells = {
        "rail": joint,
        "ranks": "".join(_box(part, rank, text) for rank, text in enumerate(part.shares)),
        "kernel": html.escape(part.kernel),
        "bytes": _amounts(part) + _bars(part, longest),
    }
    return "".join(f'<div class="{kind}">{text}</div>' for kind, text in cells.items())


def _box(part: Part, rank: int, text: str) -> str:
    colour = {"whole": GREY, "share": COLOURS[rank % len(COLOURS)], "sum": GREEN}[part.on]
    look = f"background:{colour}2e;border-color:{colour}"
    return f'<span style="{look}">{html.escape(part.name)}<small>{html.escape(text)}</small></span>'


def _bytes(part: Part) -> dict[str, int]:
    """The part's bytes by kind, without those that would be 0 MB."""
    return {kind: n for kind in KINDS if (n := getattr(part, kind)) >= 5e5}


def _amounts(part: Part) -> str:
    return ", ".join(f"{kind} {megabytes(n)}" for kind, n in _bytes(part).items())


def _bars(part: Part, longest: int) -> str:
    bars = (f"width:{100 * n / longest:.1f}%;background:{KINDS[kind]}" for kind, n in _bytes(part).items())
    return "".join(f'<i style="{look}"></i>' for look in bars)
