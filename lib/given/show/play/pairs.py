"""Ring attention step by step: which pair of K and V each rank uses, which scores it computes,
and how long the others wait.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lib.given.show.play.player import Control, Figure, layer
from lib.given.show.play.svg import boxes, label, number, rect, tag
from lib.given.show.plots import COLOURS
from lib.given.show.tokens import Html

LEFT, TOP, SIDE = 30, 40, 180
NAME, NOW, NEXT, WORK = (
    234,
    246,
    277,
    306,
)  # of the columns beside the grid: the first's right end, the others' left ends
BOX, BAR, MOST = 20, 52, 6
LAYOUTS = ("no mask", "causal, contiguous", "causal, zigzag")
ALT = (
    "A grid of queries by keys, coloured by the rank that computes each part. Beside it, "
    "a row for each rank: the pair of K and V "
    "that it uses, the pair that is on its way to it, and how much it has to compute in this step."
)
Indices = Callable[[int, int, int], Iterable[Any]]


class Tile(NamedTuple):
    """A chunk of queries and a chunk of keys that a rank multiplies;
    on the diagonal a causal mask leaves half of it.
    """

    query: int
    key: int
    half: bool


def pairs(zigzag_indices: Indices) -> Html:
    """Ring attention on 2 to 6 ranks: without a mask, and causal with two ways to deal out the sequence.

    Args:
        zigzag_indices: Chapter 18's function, which says which positions a rank holds.
    """
    return figure(zigzag_indices)()


def figure(zigzag_indices: Indices) -> Figure:
    def chunks(layout: str, rank: int, n_ranks: int) -> list[int]:
        """The two of 2R chunks that a rank holds."""
        if layout == "causal, zigzag":
            return [int(i) for i in zigzag_indices(2 * n_ranks, rank, n_ranks)]
        return [2 * rank, 2 * rank + 1]

    def tiles(layout: str, n_ranks: int, step: int, rank: int) -> list[Tile]:
        """What a rank computes in step 1, 2, …, R."""
        keys = chunks(layout, (rank - step + 1) % n_ranks, n_ranks)
        found = [Tile(q, k, layout != "no mask" and q == k) for q in chunks(layout, rank, n_ranks) for k in keys]
        return [tile for tile in found if layout == "no mask" or tile.key <= tile.query]

    def grid(layout: str, n_ranks: int) -> str:
        return _frame(n_ranks, [chunks(layout, rank, n_ranks) for rank in range(n_ranks)])

    def draw(layout: str, n_ranks: int, step: int) -> str:
        if step > n_ranks:
            return ""
        drawn = []
        for rank in range(n_ranks):
            past = [tile for s in range(1, step) for tile in tiles(layout, n_ranks, s, rank)]
            now = tiles(layout, n_ranks, step, rank) if step else []
            drawn += [_tiles(past, n_ranks, rank, "0.3"), _tiles(now, n_ranks, rank, "0.95")]
            drawn.append(_row(n_ranks, rank, step, work(now)))
        return "".join(drawn)

    def say(layout: str, n_ranks: int, step: int) -> str:
        if step > n_ranks:
            return ""
        done = [[work(tiles(layout, n_ranks, s, rank)) for rank in range(n_ranks)] for s in range(1, step + 1)]
        return _sentence(n_ranks, done)

    layout_ = Control(name="layout", label="mask and layout", values=LAYOUTS, start=1, still=1, kind="choice")
    ranks_ = Control(name="ranks", label="ranks R", values=range(2, MOST + 1), start=2, still=2)
    step_ = Control(
        name="step",
        label="steps taken",
        values=range(MOST + 1),
        still=2,
        kind="steps",
        limit=("ranks", [n + 1 for n in ranks_.values]),
    )
    return Figure(
        name="pairs",
        alt=ALT,
        height=TOP + SIDE + 22,
        controls=[layout_, ranks_, step_],
        layers=[layer(grid, layout_, ranks_), layer(draw, layout_, ranks_, step_)],
        sentences=[layer(say, layout_, ranks_, step_)],
    )


def work(tiles: Sequence[Tile]) -> float:
    """The scores that are computed, as a multiple of a whole block: all queries of a rank by all keys of a rank."""
    return sum(0.5 if tile.half else 1.0 for tile in tiles) / 4


def _frame(n_ranks: int, held: Sequence[Sequence[int]]) -> str:
    """What no step changes: the grid, and at each row of queries and each column of keys the rank that holds it."""
    cell = SIDE / (2 * n_ranks)
    cuts = [number(i * cell) for i in range(2 * n_ranks + 1)]
    across = "".join(f"M0 {cut}h{SIDE}M{cut} 0v{SIDE}" for cut in cuts)
    drawn = [tag("path", d=across, kind="grid", transform=f"translate({LEFT} {TOP})")]
    drawn += [label(LEFT, 12, "keys of rank"), label(LEFT - 18, TOP + SIDE + 16, "queries of rank, downwards")]
    for rank, mine in enumerate(held):
        for chunk in mine:
            middle = (chunk + 0.5) * cell
            drawn.append(label(LEFT + middle, TOP - 7, str(rank), kind="middle small"))
            drawn.append(label(LEFT - 8, TOP + middle + 4, str(rank), kind="end small"))
        drawn.append(label(NAME, TOP + (rank + 0.5) * SIDE / n_ranks + 4, str(rank), kind="end small"))
    for x, text in ((NAME - 6, "rank"), (NOW + BOX / 2, "K, V"), (NEXT + BOX / 2, "next"), (WORK + BAR / 2, "work")):
        drawn.append(label(x, TOP - 7, text, kind="middle small"))
    return "".join(drawn)


def _tiles(tiles: Sequence[Tile], n_ranks: int, rank: int, opacity: str) -> str:
    """Squares, and triangles where the diagonal cuts a tile in two, in the colour of the rank that computes them."""
    if not tiles:
        return ""
    cell = SIDE / (2 * n_ranks)
    at = [(LEFT + t.key * cell, TOP + t.query * cell) for t in tiles if not t.half]
    path = boxes(at, cell, cell)
    for t in tiles:
        if t.half:
            x, y = LEFT + t.key * cell, TOP + t.query * cell
            path += f"M{number(x)} {number(y)}v{number(cell)}h{number(cell)}z"
    return tag("path", d=path, fill=COLOURS[rank], fill_opacity=opacity)


def _row(n_ranks: int, rank: int, step: int, share: float) -> str:
    """The pair that a rank uses, the one that arrives meanwhile, and the part of a block that it computes."""
    row = SIDE / n_ranks
    y = TOP + rank * row + (row - BOX) / 2
    now = (rank - max(step, 1) + 1) % n_ranks
    drawn = [
        rect(NOW, y, BOX, BOX, fill=COLOURS[now], fill_opacity="0.75"),
        label(NOW + BOX / 2, y + 14, str(now), kind="middle strong"),
    ]  # fmt: skip
    if 0 < step < n_ranks:
        following = (now - 1) % n_ranks
        drawn.append(
            rect(
                NEXT,
                y,
                BOX,
                BOX,
                fill=COLOURS[following],
                fill_opacity="0.2",
                stroke=COLOURS[following],
                stroke_dasharray="3 2",
            )
        )
        drawn.append(label(NEXT + BOX / 2, y + 14, str(following), kind="middle"))
    if step:
        drawn.append(rect(WORK, y, BAR, BOX, kind="grid"))
        drawn.append(rect(WORK, y, BAR * share, BOX, fill=COLOURS[rank], fill_opacity="0.85"))
        if not share:
            drawn.append(label(WORK + BAR / 2, y + 14, "waits", kind="middle small"))
    return "".join(drawn)


def _sentence(n_ranks: int, done: Sequence[Sequence[float]]) -> str:
    """The step in words, from what each rank computed in each step, in blocks."""
    step = len(done)
    if step == 0:
        return (
            f"Start: each of {n_ranks} ranks has its own queries and its own pair of K and V, and has computed nothing."
        )
    passed = sum(max(each) for each in done)
    used = sum(map(sum, done)) / n_ranks
    each = done[-1]
    text = f"Step {step} of {n_ranks}: "
    if step < n_ranks:
        text += "Each rank sends its pair on while it computes. "
    if min(each) == max(each):
        text += f"All ranks compute {_blocks(each[0])}. "
    else:
        text += (
            f"The ranks compute {', '.join(f'{share:g}' for share in each[:-1])} and {_blocks(each[-1])}, "
            "and all wait for the slowest. "
        )
    text += f"So far {_blocks(passed)} of time, {1 - used / passed:.0%} of it spent waiting"
    return text + (f"; the same work in equal parts takes {used:g}." if step == n_ranks else ".")


def _blocks(share: float) -> str:
    return f"{share:g} block{'s' if share != 1 else ''}"
