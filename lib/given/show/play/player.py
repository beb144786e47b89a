"""Figures that one can play with: Python draws every state once, and a short script shows the one that is asked for.

So the numbers of a figure are those of the book's own functions, and the script computes none.
A figure is one fragment of HTML that needs no other file and no network.
Without scripts, and on paper, it is a still.
"""

import html
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lib.given.show.tokens import Html

HERE = Path(__file__).parent
WIDTH = 360
"""Units of a drawing from left to right: at least as many as a telephone has pixels,
so text of 12 units can be read there.
"""


@dataclass(frozen=True, kw_only=True)
class Control:
    """Something that the reader chooses.

    Attributes:
        name, label: What the layers call it; what the reader sees.
        values: What can be chosen.
        shown: The values as text; ``str`` of each unless given.
        start, still: Places among the values, at most the last one: where the control is at first, and in the still.
        kind: "slider", "choice" (a list that opens), or "steps" (a slider with buttons for back, on and play).
        limit: Another control's name, and how many of the values there are for each of that one's.
    """

    name: str
    label: str
    values: Sequence[Any]
    shown: Sequence[str] = ()
    start: int = 0
    still: int = 0
    kind: Literal["slider", "choice", "steps"] = "slider"
    limit: tuple[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for which in ("start", "still"):
            object.__setattr__(self, which, min(getattr(self, which), len(self.values) - 1))

    def text(self, place: int) -> str:
        """The value at a place, as the reader sees it."""
        return self.shown[place] if self.shown else str(self.values[place])


class Layer(NamedTuple):
    """A part of the picture, or of the sentence below it, drawn for every state that it depends on.

    Attributes:
        strides: By how many frames a step of each control moves; controls that do not matter are missing.
        frames: SVG, or a sentence.
    """

    strides: dict[str, int]
    frames: list[str]

    def at(self, state: dict[str, int]) -> str:
        """The frame of a state, which maps each control's name to the place of its value."""
        return self.frames[sum(stride * state[name] for name, stride in self.strides.items())]


def layer(draw: Callable[..., str], *controls: Control) -> Layer:
    """Draw for every combination of the controls' values; ``draw`` gets the values."""
    sizes = [len(control.values) for control in controls]
    strides = {control.name: math.prod(sizes[i + 1 :]) for i, control in enumerate(controls)}
    return Layer(strides, [draw(*values) for values in itertools.product(*(c.values for c in controls))])


def layer_of_sum(draw: Callable[[int], str], one: Control, other: Control) -> Layer:
    """Draw what depends only on the sum of two controls, both of which count 0, 1, 2, …"""
    n_sums = len(one.values) + len(other.values) - 1
    return Layer({one.name: 1, other.name: 1}, [draw(total) for total in range(n_sums)])


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What ``as_html`` needs to write a figure.

    Attributes:
        name: One word, for the style sheet and the tests.
        alt: What the figure shows, in a sentence, for a reader who cannot see it.
        height: Units of the drawing from top to bottom.
        controls: In the order in which they are shown.
        layers: Of the picture; later ones cover earlier ones.
        sentences: Of the text below the picture, one after the other.
    """

    name: str
    alt: str
    height: float
    controls: Sequence[Control]
    layers: Sequence[Layer]
    sentences: Sequence[Layer]
    stills: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.alt.split()) < 6:
            raise ValueError("alt must say in at least six words what the figure shows")
        object.__setattr__(self, "stills", {control.name: control.still for control in self.controls})

    def picture(self, state: dict[str, int]) -> str:
        """The SVG of a state."""
        groups = "".join(f"<g>{part.at(state)}</g>" for part in self.layers)
        box = f"viewBox='0 0 {WIDTH} {self.height:g}'"
        return f"<svg {box} role='img' aria-label='{html.escape(self.alt)}'>{groups}</svg>"

    def sentence(self, state: dict[str, int]) -> str:
        """The text of a state."""
        return " ".join(filter(None, (part.at(state) for part in self.sentences)))

    def __call__(self) -> Html:
        """The figure, for a notebook's page."""
        return Html(as_html(self), f"{self.alt} {self.sentence(self.stills)}")


def as_html(figure: Figure) -> str:
    """One fragment: the still, the controls (hidden until the script runs), the states,
    the script and the style sheet.
    """
    controls = "".join(_control(control) for control in figure.controls)
    data = json.dumps(
        {
            "start": {control.name: control.start for control in figure.controls},
            "controls": [_facts(control) for control in figure.controls],
            "layers": [part._asdict() for part in figure.layers],
            "sentences": [part._asdict() for part in figure.sentences],
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )
    style, script = (HERE / f"play.{kind}" for kind in ("css", "js"))
    return "\n".join(
        [
            f'<figure class="workbook-play workbook-play-{figure.name}">',
            f"<style>{style.read_text(encoding='utf-8')}</style>",
            f'<div class="play-controls" role="group" aria-label="Controls of the figure" hidden>{controls}</div>',
            f'<div class="play-still">{figure.picture(figure.stills)}',
            f'<p class="play-said">{html.escape(figure.sentence(figure.stills), quote=False)}</p></div>',
            f'<script type="application/json">{data.replace("</", "<" + chr(92) + "/")}</script>',
            f"<script>{script.read_text(encoding='utf-8')}</script>",
            "</figure>",
        ]
    )


def _facts(control: Control) -> dict[str, Any]:
    """What the script must know of a control."""
    facts: dict[str, Any] = {"name": control.name, "shown": [control.text(i) for i in range(len(control.values))]}
    if control.limit:
        facts["limit"] = {"by": control.limit[0], "counts": list(control.limit[1])}
    return facts


def _control(control: Control) -> str:
    """A label around its input, so that no ids are needed and several figures on a page cannot be mixed up."""
    text, last = html.escape(control.label), len(control.values) - 1
    if control.kind == "choice":
        options = "".join(f"<option value='{i}'>{html.escape(control.text(i))}</option>" for i in range(last + 1))
        return f"<label>{text} <select data-control='{control.name}'>{options}</select></label>"
    value = f"<b aria-hidden='true'>{html.escape(control.text(control.start))}</b>"
    slider = f"<input type='range' data-control='{control.name}' min='0' max='{last}' value='{control.start}'>"
    whole = f"<label><span>{text} {value}</span>{slider}</label>"
    if control.kind == "slider":
        return whole
    buttons = "".join(
        f"<button type='button' data-{what}='{control.name}'>{word}</button>"
        for what, word in (("back", "Back"), ("next", "Next"), ("play", "Play"))
    )
    return f"<div class='play-steps'>{whole}<div>{buttons}</div></div>"
