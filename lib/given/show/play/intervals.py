"""Two models on the same questions: two intervals of accuracy, and two of their difference, by the number of
questions.
"""

from collections.abc import Callable, Sequence
from statistics import NormalDist

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line
from lib.given.show.tokens import Html

LEFT, RIGHT = 96, WIDTH - 24
ACCURACIES, DIFFERENCES = (0.6, 0.9), (-0.12, 0.18)
"""The ends of the two axes."""
RIGHT_ANSWERS = 0.7
"""Share of the questions that the weaker model answers correctly."""
ALT = (
    "Above, the intervals of two models' accuracies; below, two intervals of their difference, from different and from "
    "the same questions, beside a line at zero."
)

Wilson = Callable[[int, int], tuple[float, float]]
Paired = Callable[[Sequence[float], Sequence[float]], tuple[float, float, float, float]]


def intervals(
    wilson_interval: Wilson,
    paired_difference: Paired,
    sizes: Sequence[int] = (200, 400, 1000, 2000, 4000, 10_000),
    gains: Sequence[float] = (0.01, 0.02, 0.04),
    apart: Sequence[float] = (0.04, 0.1, 0.2, 0.4),
) -> Html:
    """Intervals that shrink while questions are added.

    Args:
        wilson_interval, paired_difference: Chapter 27's functions.
        sizes: Numbers of questions, multiples of 200.
        gains: By how much one model is better, in whole hundredths.
        apart: Shares of the questions that exactly one of the two models answers correctly.
    """
    return figure(wilson_interval, paired_difference, sizes, gains, apart)()


def scores(n: int, gain: float, apart: float) -> tuple[list[float], list[float]]:
    """Right (1) and wrong (0) answers of the better and of the weaker model to n questions."""
    only_a, only_b, b = (round(n * share) for share in ((apart + gain) / 2, (apart - gain) / 2, RIGHT_ANSWERS))
    kinds = ((b - only_b, 1.0, 1.0), (only_a, 1.0, 0.0), (only_b, 0.0, 1.0), (n - b - only_a, 0.0, 0.0))
    return [x for k, x, _ in kinds for _ in range(k)], [y for k, _, y in kinds for _ in range(k)]


def figure(
    wilson_interval: Wilson,
    paired_difference: Paired,
    sizes: Sequence[int],
    gains: Sequence[float],
    apart: Sequence[float],
) -> Figure:
    def accuracies(n: int, gain: float) -> str:
        drawn = []
        for row, share, colour in ((0, RIGHT_ANSWERS + gain, BLUE), (1, RIGHT_ANSWERS, GREEN)):
            drawn.append(_interval(row, share, wilson_interval(round(share * n), n), ACCURACIES, colour))
        return "".join(drawn)

    def alone(n: int, gain: float) -> str:
        return _interval(3, gain, unpaired(n, gain), DIFFERENCES, "currentColor")

    def paired(n: int, gain: float, share: float) -> str:
        return _interval(4, gain, paired_difference(*scores(n, gain, share))[2:], DIFFERENCES, ORANGE)

    def say(n: int, gain: float, share: float) -> str:
        _, _, low, high = paired_difference(*scores(n, gain, share))
        first, second = unpaired(n, gain)
        ends = "so these questions do not decide" if low <= 0 <= high else "which is more than noise"
        times = ((second - first) / (high - low)) ** 2
        return (
            f"{n:,} questions: one model answers {RIGHT_ANSWERS + gain:.0%}, the other {RIGHT_ANSWERS:.0%}, and on "
            f"{share:.0%} of the questions exactly one of them is right. The difference is {gain * 100:+.0f} points; "
            f"paired, 95 % from {low * 100:+.1f} to {high * 100:+.1f}, {ends}. As if on different questions: "
            f"{first * 100:+.1f} to {second * 100:+.1f}, which takes {times:.1f} times the questions to be as narrow."
        )

    size_ = Control(
        name="questions", label="questions", values=sizes, shown=[f"{n:,}" for n in sizes], start=3, still=3
    )
    gain_ = Control(
        name="gain", label="difference", values=gains, shown=[f"{g * 100:g} points" for g in gains], start=1, still=1
    )
    apart_ = Control(
        name="apart", label="only one of them right", values=apart, shown=[f"{a:.0%}" for a in apart], start=1, still=1
    )
    return Figure(
        name="intervals",
        alt=ALT,
        height=196,
        controls=[size_, gain_, apart_],
        layers=[
            layer(_axes),
            layer(accuracies, size_, gain_),
            layer(alone, size_, gain_),
            layer(paired, size_, gain_, apart_),
        ],
        sentences=[layer(say, size_, gain_, apart_)],
    )


def unpaired(n: int, gain: float) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares, each of n questions of its own."""
    error = sum(p * (1 - p) / n for p in (RIGHT_ANSWERS, RIGHT_ANSWERS + gain)) ** 0.5
    half = NormalDist().inv_cdf(0.975) * error
    return gain - half, gain + half


def _y(row: int) -> float:
    return 16 + 26 * row + 20 * (row > 1)


def _x(value: float, ends: tuple[float, float]) -> float:
    share = (value - ends[0]) / (ends[1] - ends[0])
    return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, share))


def _interval(row: int, at: float, between: Sequence[float], ends: tuple[float, float], colour: str) -> str:
    y, (low, high) = _y(row), (_x(value, ends) for value in between)
    marks = [line((low, y), (high, y), stroke=colour, stroke_width=3)]
    marks += [line((x, y - 6), (x, y + 6), stroke=colour, stroke_width=2) for x in (low, high, _x(at, ends))]
    return "".join(marks)


def _axes() -> str:
    drawn = [label(4, _y(row) + 4, text) for row, text in ((0, "better model"), (1, "weaker model"))]
    drawn += [label(4, _y(row) + 4, text) for row, text in ((3, "apart"), (4, "paired"))]
    for row, ends, ticks, unit in ((2, ACCURACIES, (0.6, 0.7, 0.8, 0.9), " %"), (5, DIFFERENCES, (-0.1, 0, 0.1), "")):
        y = _y(row) - 20 * (row == 2)
        drawn.append(line((LEFT, y - 12), (RIGHT, y - 12), stroke="currentColor"))
        texts = [f"{tick * 100:.0f}{unit}" if unit else f"{tick * 100:+.0f}" for tick in ticks]
        drawn += [label(_x(tick, ends), y + 4, text, kind="middle") for tick, text in zip(ticks, texts, strict=True)]
    drawn.append(line((_x(0, DIFFERENCES), _y(3) - 12), (_x(0, DIFFERENCES), _y(5) - 12), stroke="currentColor"))
    drawn.append(label(RIGHT, _y(5) + 19, "difference in points", kind="end"))
    return "".join(drawn)
