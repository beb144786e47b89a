"""The ring of chapter 9, step by step: which ranks' numbers are in which chunk,
and which chunk each rank has just sent.
"""

import math

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import ORANGE, Point, arrow, boxes, label, rect, tag
from lib.given.show.plots import COLOURS
from lib.given.show.rings import ring_states
from lib.given.show.tokens import Html

HEIGHT, BOX = 346, 20
ALT = (
    "Ranks in a circle, each with a row of chunks; in a chunk there is a stripe for each rank whose "
    "numbers are summed in it. "
    "Arrows show what each rank sends to its right neighbour in a step."
)


def ring(most_ranks: int = 6) -> Html:
    """A ring all-reduce for 2 to ``most_ranks`` ranks (at most 6, one colour each), step by step."""
    return figure(most_ranks)()


def figure(most_ranks: int = 6) -> Figure:
    ranks = Control(name="ranks", label="ranks R", values=range(2, most_ranks + 1), start=2, still=2)
    counts = [2 * (n - 1) + 1 for n in ranks.values]
    step = Control(
        name="step", label="steps taken", values=range(counts[-1]), still=3, kind="steps", limit=("ranks", counts)
    )
    return Figure(
        name="ring",
        alt=ALT,
        height=HEIGHT,
        controls=[ranks, step],
        layers=[layer(ring_at_rest, ranks), layer(draw, ranks, step)],
        sentences=[layer(say, ranks, step)],
    )


def sent(n_ranks: int, rank: int, step: int) -> int:
    """The chunk that a rank sends in step 1, 2, …, by equation (9.3):
    the second phase begins with a chunk that is complete.
    """
    return (rank - step + 1) % n_ranks


def centre(n_ranks: int, rank: int) -> Point:
    """Where a rank is, clockwise from the top."""
    angle = 2 * math.pi * rank / n_ranks - math.pi / 2
    return WIDTH / 2 + 115 * math.cos(angle), HEIGHT / 2 + 132 * math.sin(angle)


def ring_at_rest(n_ranks: int) -> str:
    """What no step changes: the ranks' names, and the outlines and numbers of their chunks."""
    parts = []
    for rank in range(n_ranks):
        left, top, width = _corner(n_ranks, rank)
        parts.append(label(left + n_ranks * width / 2, top - 5, f"rank {rank}", kind="middle"))
        outlines = [(left + chunk * width + 1, top) for chunk in range(n_ranks)]
        parts.append(tag("path", d=boxes(outlines, width - 2, BOX), kind="grid"))
        parts += [label(left + (c + 0.5) * width, top + BOX + 13, str(c), kind="middle small") for c in range(n_ranks)]
    return "".join(parts)


def draw(n_ranks: int, step: int) -> str:
    """All chunks after a number of steps, and the messages of the last one."""
    states = ring_states(n_ranks)
    if step >= len(states):  # a larger ring has more steps
        return ""
    parts = [_stripes(n_ranks, source, states[step]) for source in range(n_ranks)]
    if step:
        parts += [_came_in(n_ranks, rank, step) for rank in range(n_ranks)]
        parts += [_message(n_ranks, rank, sent(n_ranks, rank, step)) for rank in range(n_ranks)]
    phase = "start" if step == 0 else "reduce-scatter" if step < n_ranks else "all-gather"
    parts.append(label(WIDTH / 2, HEIGHT / 2 - 2, phase, kind="middle strong"))
    if step:
        of = f"step {(step - 1) % (n_ranks - 1) + 1} of {n_ranks - 1}"
        parts.append(label(WIDTH / 2, HEIGHT / 2 + 14, of, kind="middle"))
    return "".join(parts)


def _corner(n_ranks: int, rank: int) -> tuple[float, float, float]:
    """Left and top of a rank's row of chunks, and the width of one."""
    width = min(30.0, 100 / n_ranks)
    x, y = centre(n_ranks, rank)
    return x - n_ranks * width / 2, y - BOX / 2, width


def _stripes(n_ranks: int, source: int, state: list[list[frozenset[int]]]) -> str:
    """The stripes of one rank's numbers, in whichever chunks of whichever ranks they are by now."""
    corners = []
    for rank, chunks in enumerate(state):
        left, top, width = _corner(n_ranks, rank)
        stripe = (width - 4) / n_ranks
        corners += [(left + c * width + 2 + source * stripe, top + 1) for c in range(n_ranks) if source in chunks[c]]
    return tag("path", d=boxes(corners, stripe, BOX - 2), fill=COLOURS[source])


def _came_in(n_ranks: int, rank: int, step: int) -> str:
    """A frame around the chunk that a rank has just received."""
    left, top, width = _corner(n_ranks, rank)
    return rect(left + sent(n_ranks, (rank - 1) % n_ranks, step) * width, top - 1, width, BOX + 2, kind="frame")


def _message(n_ranks: int, rank: int, chunk: int) -> str:
    """An arrow to the right neighbour with the number of the chunk; two ranks have two arrows side by side."""
    (x0, y0), (x1, y1) = centre(n_ranks, rank), centre(n_ranks, (rank + 1) % n_ranks)
    long = math.hypot(x1 - x0, y1 - y0)
    out = ((y1 - y0) / long, (x0 - x1) / long)  # a unit to the outside of the ring
    aside = 64 if n_ranks == 2 else 0
    start, end = ((x0 + t * (x1 - x0) + aside * out[0], y0 + t * (y1 - y0) + aside * out[1]) for t in (0.39, 0.63))
    beside = 13 if n_ranks < 5 else -13  # inside where ranks are close to each other
    at = (start[0] + end[0]) / 2 + beside * out[0], (start[1] + end[1]) / 2 + beside * out[1] + 4
    return arrow(start, end, ORANGE) + label(*at, str(chunk), kind="middle strong")


def say(n_ranks: int, step: int) -> str:
    """The step in words."""
    n_steps = 2 * (n_ranks - 1)
    if step > n_steps:
        return ""
    if step == 0:
        return f"Start: each of {n_ranks} ranks has numbers of its own in all {n_ranks} chunks."
    text = f"Step {step} of {n_steps}: rank 0 sends chunk {sent(n_ranks, 0, step)}, and every other rank sends one too."
    if step < n_ranks:
        text += f" Each rank adds what comes in; that chunk is now a sum over {step + 1} ranks."
    else:
        text += " Each rank copies what comes in; that chunk is complete."
    if step == n_ranks - 1:
        text += f" Every rank has one complete chunk, rank 0 chunk {1 % n_ranks}."
    if step == n_steps:
        text += f" Every rank holds the sum, and has sent {n_steps} chunks, {n_steps / n_ranks:.3g} times its array."
    return text
