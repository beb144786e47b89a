"""Singular values under Newton-Schulz: the curve that a number of steps draws, and where a gradient's values end."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, number, rect, tag
from lib.given.show.tokens import Html

LEFT, RIGHT, BASE, TOP = 34, WIDTH - 8, 190, 30
DECADES, HIGHEST = 4, 1.4
STEPS = tuple(range(11))
ALT = (
    "A curve from singular values before, on a logarithmic axis from 0.0001 to 1, "
    "to singular values after some steps, from 0 to 1.4, "
    "with a band from 0.68 to 1.14 and a dot for each value of a gradient."
)

After = Callable[..., Tensor]


def spectrum(singular_values_after: After, values: Tensor, coefficients: Mapping[str, Sequence]) -> Html:
    """The singular values of a real gradient, step by step.

    Args:
        singular_values_after: Chapter 25's function.
        values: The gradient's singular values.
        coefficients: Triples, or lists of triples, by name.
    """
    return figure(singular_values_after, values, coefficients)()


def figure(singular_values_after: After, values: Tensor, coefficients: Mapping[str, Sequence]) -> Figure:
    values = values.double() / values.double().norm()
    grid = torch.logspace(-DECADES, 0, 161, dtype=torch.float64)

    def through(x: Tensor, name: str, steps: int) -> Tensor:
        """The polynomials on numbers that are divided already.

        One more value brings their norm to 1, and is dropped.
        """
        ones = torch.stack([x, (1 - x.square()).clamp(min=0).sqrt()], -1)
        return singular_values_after(ones, steps, coefficients[name])[..., 0]

    def curve(name: str, steps: int) -> str:
        after = through(grid, name, steps)
        points = " ".join(f"{number(_x(float(a)))},{number(_y(float(b)))}" for a, b in zip(grid, after, strict=True))
        return tag("polyline", points=points, fill="none", stroke=BLUE, stroke_width=2)

    def dots(name: str, steps: int) -> str:
        after = through(values, name, steps)
        return "".join(
            tag("circle", cx=_x(float(a)), cy=_y(float(b)), r=2.2, fill=GREEN if 0.68 <= b <= 1.14 else ORANGE)
            for a, b in zip(values, after, strict=True)
            if a > 0
        )

    def say(name: str, steps: int) -> str:
        after = through(values, name, steps)
        inside = int(((after >= 0.68) & (after <= 1.14)).sum())
        return (
            f"After {steps} steps {inside} of the gradient's {len(values)} singular values "
            "lie in the band from 0.68 to 1.14; "
            f"the smallest is {float(after.min()):.3g}, the largest {float(after.max()):.3g}."
        )

    names = list(coefficients)
    which = Control(name="coefficients", label="coefficients", values=names, shown=names, kind="choice")
    steps_ = Control(name="steps", label="steps", values=STEPS, start=0, still=5, kind="steps")
    return Figure(
        name="spectrum",
        alt=ALT,
        height=228,
        controls=[which, steps_],
        layers=[layer(_axes), layer(curve, which, steps_), layer(dots, which, steps_)],
        sentences=[layer(say, which, steps_)],
    )


def _x(value: float) -> float:
    return RIGHT + (RIGHT - LEFT) * math.log10(max(value, 10.0**-DECADES)) / DECADES


def _y(value: float) -> float:
    return BASE - (BASE - TOP) * min(max(value, 0.0), HIGHEST) / HIGHEST


def _axes() -> str:
    drawn = [rect(LEFT, _y(1.14), RIGHT - LEFT, _y(0.68) - _y(1.14), fill=GREEN, fill_opacity=0.14)]
    drawn += [
        line((LEFT, BASE), (RIGHT, BASE), stroke="currentColor"),
        line((LEFT, BASE), (LEFT, TOP), stroke="currentColor"),
    ]
    for power in range(-DECADES, 1):
        drawn.append(label(_x(10.0**power), BASE + 15, f"{10.0**power:g}", kind="end" if power == 0 else "middle"))
    for value in (0, 0.5, 1):
        drawn.append(label(LEFT - 5, _y(value) + 4, f"{value:g}", kind="end"))
    drawn += [
        label(LEFT, 16, "after the steps"),
        label(RIGHT, BASE + 31, "before: share of the Frobenius norm", kind="end"),
    ]
    return "".join(drawn)
