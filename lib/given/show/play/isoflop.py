"""Losses of all models that cost equally much: drag the compute,
and see the best size and the best number of tokens move.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from lib.given.models.laws import Chinchilla
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, tag
from lib.given.show.tokens import Html

LEFT, RIGHT, TOP, BASE = 40, WIDTH - 12, 22, 196
LOWEST, HIGHEST = 6.0, 13.0  # log10 of the sizes that are drawn
SMALLEST_LOSS, LARGEST_LOSS = 1.7, 5.0
ALT = (
    "Curves of loss against model size, one for each amount of compute, each with a lowest point; "
    "the chosen one is marked with its optimum."
)

Optimum = Callable[[float, Chinchilla], tuple[float, float]]


def isoflop(
    compute_optimal: Optimum,
    laws: Mapping[str, Chinchilla],
    powers: Sequence[int] = tuple(range(17, 27)),
) -> Html:
    """The curve of one compute among the others, for a chosen law.

    Args:
        compute_optimal: Chapter 22's function, which gives the best size and tokens.
        laws: Laws by name.
        powers: The amounts of compute, as powers of ten.
    """
    return figure(compute_optimal, laws, powers)()


def figure(compute_optimal: Optimum, laws: Mapping[str, Chinchilla], powers: Sequence[int]) -> Figure:
    names = list(laws)

    def others(name: str) -> str:
        return "".join(_curve(laws[name], 10.0**power, "currentColor", 0.25) for power in powers)

    def chosen(name: str, power: int) -> str:
        law, flops = laws[name], 10.0**power
        n, d = compute_optimal(flops, law)
        at = _x(math.log10(n)), _y(float(law(n, d)))
        spot = tag("circle", cx=at[0], cy=at[1], r=4, fill=ORANGE)
        return _curve(law, flops, BLUE, 1) + line(at, (at[0], BASE), stroke=ORANGE, stroke_dasharray="3 3") + spot

    def path(name: str) -> str:
        found = [(compute_optimal(10.0**power, laws[name])) for power in powers]
        spots = [(_x(math.log10(n)), _y(float(laws[name](n, d)))) for n, d in found]
        return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in spots), fill="none", stroke=GREEN)

    def say(name: str, power: int) -> str:
        law = laws[name]
        n, d = compute_optimal(10.0**power, law)
        smaller = float(law(n / 4, 10.0**power / 6 / (n / 4)))
        return (
            f"With 1e{power} FLOPs the best model has {_short(n)} parameters and reads {_short(d)} tokens, "
            f"{d / n:,.1f} for each "
            f"parameter; its loss is {float(law(n, d)):.3f} nats. A model of a quarter of the size, "
            "on four times the tokens, "
            f"costs as much and ends at {smaller:.3f}."
        )

    law_ = Control(name="law", label="law", values=names, shown=names, kind="choice")
    power_ = Control(
        name="compute", label="compute", values=powers, shown=[f"1e{p} FLOPs" for p in powers], start=4, still=4
    )
    return Figure(
        name="isoflop",
        alt=ALT,
        height=232,
        controls=[power_, law_],
        layers=[layer(_axes), layer(others, law_), layer(path, law_), layer(chosen, law_, power_)],
        sentences=[layer(say, law_, power_)],
    )


def _x(log_n: float) -> float:
    return LEFT + (RIGHT - LEFT) * (log_n - LOWEST) / (HIGHEST - LOWEST)


def _y(loss: float) -> float:
    share = math.log(loss / SMALLEST_LOSS) / math.log(LARGEST_LOSS / SMALLEST_LOSS)
    return BASE - (BASE - TOP) * share


def _curve(law: Chinchilla, flops: float, colour: str, opacity: float) -> str:
    """Loss against size at one amount of compute, where it is between the axes."""
    points = []
    for i in range(141):
        log_n = LOWEST + (HIGHEST - LOWEST) * i / 140
        loss = float(law(10**log_n, flops / 6 / 10**log_n))
        if SMALLEST_LOSS < loss < LARGEST_LOSS:
            points.append(f"{_x(log_n):.1f},{_y(loss):.1f}")
    return tag(
        "polyline", points=" ".join(points), fill="none", stroke=colour, stroke_opacity=opacity, stroke_width=1.6
    )


def _axes() -> str:
    drawn = [
        line((LEFT, BASE), (RIGHT, BASE), stroke="currentColor"),
        line((LEFT, TOP), (LEFT, BASE), stroke="currentColor"),
    ]
    for log_n, text in ((6, "1M"), (8, "100M"), (10, "10B"), (12, "1T")):
        drawn.append(label(_x(log_n), BASE + 15, text, kind="middle"))
    for loss in (2, 3, 4):
        drawn.append(label(LEFT - 6, _y(loss) + 4, str(loss), kind="end"))
    drawn += [label(LEFT, TOP - 8, "loss (nats)"), label(RIGHT, BASE + 30, "parameters", kind="end")]
    return "".join(drawn)


def _short(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"
