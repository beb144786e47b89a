"""The clocks of RoPE: each pair of features is a hand,
and the angle between query and key depends on their distance only.
"""

import math
from collections.abc import Callable

from torch import Tensor

from lib.given.show.play.player import WIDTH, Control, Figure, layer, layer_of_sum
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, Point, arrow, label, line, number, tag
from lib.given.show.tokens import Html

HEAD_DIM, THETA = 8, 300.0
POSITIONS, DISTANCES = range(33), range(25)
RADIUS, TOP, MIDDLE = 38, 60, 170
SCORES = (290, 44)  # base line of a score of 0, and the height of 1
ALT = (
    "Four clock faces, one for each pair of features, with a hand for the key and one for the query; "
    "below each the angle "
    "between the two; at the bottom the score against the distance."
)


def clocks(rope_frequencies: Callable[..., Tensor]) -> Html:
    """Hands of a small head (D = 8, theta = 300), turned by position.

    Args:
        rope_frequencies: Chapter 2's function, which gives the speed of each hand.
    """
    return figure(rope_frequencies)()


def figure(rope_frequencies: Callable[..., Tensor]) -> Figure:
    speeds = rope_frequencies(HEAD_DIM, theta=THETA).tolist()

    def faces() -> str:
        drawn = []
        for pair, speed in enumerate(speeds):
            x = _x(pair)
            drawn.append(label(x, 14, f"pair {pair}: {speed:.2f}", kind="middle"))
            drawn += [tag("circle", cx=x, cy=y, r=RADIUS, kind="grid") for y in (TOP, MIDDLE)]
        drawn.append(label(4, 120, "the angle between the two hands:"))
        curve = "L".join(f"{number(_score_x(d))} {number(_score_y(score(d)))}" for d in DISTANCES)
        drawn.append(line((30, SCORES[0]), (350, SCORES[0]), kind="grid"))
        drawn.append(tag("path", d=f"M{curve}", stroke=GREEN, stroke_width=2))
        drawn.append(label(4, SCORES[0] - 50, "the score at each distance:"))
        drawn += [label(_score_x(d), SCORES[0] + 34, str(d), kind="middle small") for d in DISTANCES[::8]]
        return "".join(drawn)

    def score(distance: int) -> float:
        """The dot product of two vectors that are alike, of length 1, shared out evenly over the pairs."""
        return sum(math.cos(distance * speed) for speed in speeds) / len(speeds)

    def hands(position: int, colour: str) -> str:
        return "".join(_hand((_x(i), TOP), position * speed, colour) for i, speed in enumerate(speeds))

    def between(distance: int) -> str:
        drawn = []
        for pair, speed in enumerate(speeds):
            at = (_x(pair), MIDDLE)
            drawn.append(_wedge(at, distance * speed))
            drawn.append(label(at[0], MIDDLE + RADIUS + 14, f"{distance * speed:.2f} rad", kind="middle"))
        drawn.append(tag("circle", cx=_score_x(distance), cy=_score_y(score(distance)), r=5, fill=GREEN))
        return "".join(drawn)

    def say(distance: int) -> str:
        angles = ", ".join(f"{distance * speed:.2f}" for speed in speeds)
        return (
            f"Distance {distance}: the hands are {angles} radians apart, "
            f"and the score is {score(distance):.2f}, wherever the key is."
        )

    key = Control(name="key", label="key's position n", values=POSITIONS, start=2, still=2)
    distance = Control(name="distance", label="distance m - n", values=DISTANCES, start=3, still=3)
    key_hands = layer(lambda n: hands(n, ORANGE), key)
    query_hands = layer_of_sum(lambda m: hands(m, BLUE), key, distance)
    return Figure(
        name="clocks",
        alt=ALT,
        height=332,
        controls=[key, distance],
        layers=[layer(faces), key_hands, query_hands, layer(between, distance)],
        sentences=[
            layer(lambda n: f"Key (orange) at position {n},", key),
            layer_of_sum(lambda m: f"query (blue) at position {m}.", key, distance),
            layer(say, distance),
        ],
    )


def _x(pair: int) -> float:
    return WIDTH / 8 * (2 * pair + 1)


def _score_x(distance: int) -> float:
    return 30 + 320 * distance / DISTANCES[-1]


def _score_y(score: float) -> float:
    return SCORES[0] - SCORES[1] * score


def _at(centre: Point, angle: float, radius: float = RADIUS) -> Point:
    """A point on a face: angles go counter-clockwise from three o'clock, as in the chapter."""
    return centre[0] + radius * math.cos(angle), centre[1] - radius * math.sin(angle)


def _hand(centre: Point, angle: float, colour: str) -> str:
    return arrow(centre, _at(centre, angle, RADIUS - 2), colour)


def _wedge(centre: Point, angle: float) -> str:
    """What one hand is ahead of the other, from three o'clock; a full disc after a whole turn, with the rest darker."""
    turns, rest = divmod(angle, 2 * math.pi)
    full = tag("circle", cx=centre[0], cy=centre[1], r=RADIUS, fill=GREEN, fill_opacity="0.25") if turns else ""
    (x0, y0), (x1, y1) = _at(centre, 0), _at(centre, rest)
    arc = f"A{RADIUS} {RADIUS} 0 {int(rest > math.pi)} 0 {number(x1)} {number(y1)}"
    path = f"M{number(centre[0])} {number(centre[1])}L{number(x0)} {number(y0)}{arc}z"
    return full + tag("path", d=path, fill=GREEN, fill_opacity="0.6")
