"""FlashAttention's walk: one tile of scores exists at a time, and each row keeps a maximum m,
a sum l and an output a.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lib.given.show.play.player import Control, Figure, layer
from lib.given.show.play.svg import BLUE, ORANGE, boxes, label, rect, tag
from lib.given.show.tokens import Html

SIZE, TILE, CELL = 8, 2, 24
LEFT, TOP = 22, 34
COLUMNS = {"m": 244, "l": 280, "a": 318, "o": 356}  # right ends
MASKS = ("none", "causal")
ALT = (
    "A grid of 8 queries by 8 keys in tiles of 2 by 2: the scores of one tile are there, "
    "those of earlier ones are gone. Beside each "
    "row its running maximum m, sum l, weighted sum a of the values, and at the end the output o."
)
Update = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Moment(NamedTuple):
    """After some tiles: the tile that came last, and each row's numbers."""

    tile: tuple[int, int] | None
    m: Tensor
    l: Tensor
    a: Tensor


def tiles(online_softmax_update: Update) -> Html:
    """The forward pass of 8 queries over 8 keys of one value each, in tiles of 2 by 2.

    Args:
        online_softmax_update: Chapter 15's function, which takes each tile into the rows' numbers.
    """
    return figure(online_softmax_update)()


def scores_and_values() -> tuple[Tensor, Tensor]:
    """Scores ``[8, 8]`` with one digit behind the point, already scaled; whole values ``[8, 1]`` from 1 to 9."""
    generator = torch.Generator(device="cpu").manual_seed(15)
    scores = (1.3 * torch.randn(SIZE, SIZE, generator=generator, device="cpu")).mul(10).round().add(0.0) / 10
    return scores, torch.randint(1, 10, (SIZE, 1), generator=generator, device="cpu").float()


def hidden(scores: Tensor, mask: str) -> Tensor:
    """The scores, with -inf where a causal mask hides a key."""
    later = torch.ones(SIZE, SIZE, dtype=torch.bool, device="cpu").triu(1)
    return scores.masked_fill(later, -torch.inf) if mask == "causal" else scores


def moments(online_softmax_update: Update, mask: str) -> list[Moment]:
    """Before the first tile, and after each; tiles above the diagonal are skipped."""
    scores, values = scores_and_values()
    scores = hidden(scores, mask)
    m, l, a = torch.full((SIZE,), -torch.inf), torch.zeros(SIZE), torch.zeros(SIZE, 1)
    found = [Moment(None, m, l, a)]
    for row in range(0, SIZE, TILE):
        for col in range(0, SIZE if mask == "none" else row + TILE, TILE):
            rows, cols = slice(row, row + TILE), slice(col, col + TILE)
            m, l, a = m.clone(), l.clone(), a.clone()
            m[rows], l[rows], a[rows] = online_softmax_update(
                m[rows], l[rows], a[rows], scores[rows, cols], values[cols]
            )
            found.append(Moment((row, col), m, l, a))
    return found


def figure(online_softmax_update: Update) -> Figure:
    walks = {mask: moments(online_softmax_update, mask) for mask in MASKS}

    def draw(mask: str, step: int) -> str:
        walk = walks[mask]
        return _picture(walk, step, mask) if step < len(walk) else ""

    def say(mask: str, step: int) -> str:
        walk = walks[mask]
        return _sentence(walk, step) if step < len(walk) else ""

    mask_ = Control(name="mask", label="mask", values=MASKS, kind="choice")
    counts = [len(walks[mask]) for mask in MASKS]
    step_ = Control(
        name="step", label="tiles taken", values=range(max(counts)), still=4, kind="steps", limit=("mask", counts)
    )
    return Figure(
        name="tiles",
        alt=ALT,
        height=TOP + SIZE * CELL + 30,
        controls=[mask_, step_],
        layers=[layer(_grid), layer(draw, mask_, step_)],
        sentences=[layer(say, mask_, step_)],
    )


def _grid() -> str:
    """The cells, the numbers of queries and keys, the values, and the heads of the columns."""
    corners = [
        (LEFT + TILE * CELL * j, TOP + TILE * CELL * i) for i in range(SIZE // TILE) for j in range(SIZE // TILE)
    ]
    drawn = [tag("path", d=boxes(corners, TILE * CELL, TILE * CELL), kind="grid")]
    drawn.append(label(LEFT, 12, "keys"))
    values = scores_and_values()[1].flatten().tolist()
    for n, value in enumerate(values):
        middle = (n + 0.5) * CELL
        drawn.append(label(LEFT + middle, TOP - 6, str(n), kind="middle small"))
        drawn.append(label(LEFT - 6, TOP + middle + 4, str(n), kind="end small"))
        drawn.append(label(LEFT + middle, TOP + SIZE * CELL + 16, f"{value:.0f}", kind="middle small"))
    drawn.append(label(LEFT - 6, TOP + SIZE * CELL + 16, "v", kind="end strong"))
    drawn += [label(x - 8, TOP - 6, name, kind="end strong") for name, x in COLUMNS.items()]
    return "".join(drawn)


def _picture(walk: list[Moment], step: int, mask: str) -> str:
    """Tiles that are gone, the scores of the one that is there, and each row's numbers."""
    gone = [(LEFT + moment.tile[1] * CELL, TOP + moment.tile[0] * CELL) for moment in walk[1:step] if moment.tile]
    drawn = [tag("path", d=boxes(gone, TILE * CELL, TILE * CELL), fill=BLUE, fill_opacity="0.25")]
    now = walk[step]
    if now.tile:
        row, col = now.tile
        drawn.append(_scores(row, col, mask))
        drawn.append(rect(LEFT + SIZE * CELL + 4, TOP + row * CELL, 136, TILE * CELL, kind="line", stroke=ORANGE))
    ends = {moment.tile[0]: i for i, moment in enumerate(walk) if moment.tile}  # the last tile of each row of tiles
    for row in range(SIZE):
        y = TOP + (row + 0.5) * CELL + 4
        m, l, a = now.m[row].item(), now.l[row].item(), now.a[row, 0].item()
        texts = {"m": _signed(m), "l": f"{l:.2f}", "a": f"{a:.2f}", "o": ""}
        if step >= ends[row - row % TILE]:
            texts["o"] = f"{a / l:.2f}"
        drawn += [
            label(COLUMNS[name], y, text, kind="end small strong" if name == "o" else "end small")
            for name, text in texts.items()
        ]
    return "".join(drawn)


def _scores(row: int, col: int, mask: str) -> str:
    """The tile that is on the chip, with its scores; hidden ones stay empty."""
    scores = hidden(scores_and_values()[0], mask)
    drawn = [
        rect(LEFT + col * CELL, TOP + row * CELL, TILE * CELL, TILE * CELL, fill=ORANGE, fill_opacity="0.3",
        stroke=ORANGE, stroke_width=2),
    ]  # fmt: skip
    for i in range(row, row + TILE):
        for j in range(col, col + TILE):
            text = "" if scores[i, j] == -torch.inf else f"{scores[i, j].item() + 0.0:.1f}"
            drawn.append(label(LEFT + (j + 0.5) * CELL, TOP + (i + 0.5) * CELL + 4, text, kind="middle small"))
    return "".join(drawn)


def _signed(value: float) -> str:
    """One digit behind the point, with a minus sign as wide as a plus."""
    return "−∞" if value == -math.inf else f"{value:.1f}".replace("-", "−")


def _sentence(walk: list[Moment], step: int) -> str:
    """What the tile did to its first row."""
    now, before = walk[step], walk[step - 1]
    if now.tile is None:
        return "Start: each row has m = −∞, l = 0 and a = 0, and no score has been computed."
    row, col = now.tile
    text = f"Tile {step} of {len(walk) - 1}: queries {row} and {row + 1}, keys {col} and {col + 1}. In row {row} "
    m, old = now.m[row].item(), before.m[row].item()
    if old == -math.inf:
        text += f"m begins at {_signed(m)}"
    elif m > old:
        text += (
            f"m rises from {_signed(old)} to {_signed(m)}, so the old l and a are multiplied by "
            f"e^({_signed(old - m)}) = {math.exp(old - m):.2f}"
        )
    else:
        text += f"m stays at {_signed(m)}, so the old l and a stay too"
    text += f", and l is {now.l[row].item():.2f}."
    last = step + 1 == len(walk) or walk[step + 1].tile[0] != row  # type: ignore[index]
    return text + (" The rows have seen all their keys: o = a / l." if last else "")
