"""Bands of a MinHash signature: how many pairs above a threshold are found, and how many below are compared for
nothing.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, rect, tag
from lib.given.show.tokens import Html

LEFT, RIGHT, TOP, BASE = 40, WIDTH - 12, 24, 190
N_PAIRS, N_WORDS = 60, 60
SIMILARITIES = tuple(i / 20 for i in range(1, 20))
ALT = (
    "An S-shaped curve: the share of pairs that are compared, against their similarity, with measured pairs as dots "
    "and a line at the threshold."
)

Signature = Callable[..., np.ndarray]


def bands(
    minhash_signature: Signature,
    n_bands: Sequence[int] = (2, 4, 8, 16, 18, 32),
    n_rows: Sequence[int] = (1, 2, 4, 6, 7, 8, 12),
    thresholds: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9),
) -> Html:
    """The promise of the bands, and what signatures do.

    Args:
        minhash_signature: Chapter 26's function, which signs the measured pairs.
        n_bands, n_rows: What a signature is cut into, and the values of each.
        thresholds: Least similarities of what is called a copy.
    """
    return figure(minhash_signature, n_bands, n_rows, thresholds)()


def promise(similarity: float, n_bands: int, n_rows: int) -> float:
    """Probability that a pair agrees in a whole band: equation (26.3)."""
    return 1 - (1 - similarity**n_rows) ** n_bands


def mean_promise(low: float, high: float, n_bands: int, n_rows: int) -> float:
    """The mean over pairs whose similarities lie evenly between two values."""
    points = [low + (high - low) * (i + 0.5) / 200 for i in range(200)]
    return sum(promise(s, n_bands, n_rows) for s in points) / len(points)


def agreements(minhash_signature: Signature, n_hashes: int) -> np.ndarray:
    """Which values of two signatures agree, for pairs of random words of each similarity: bool ``[s, pairs, n]``."""
    rng = random.Random(0)
    found = np.zeros((len(SIMILARITIES), N_PAIRS, n_hashes), bool)
    for place in np.ndindex(found.shape[:2]):
        both = round(N_WORDS * SIMILARITIES[place[0]])
        words = [f"w{rng.randrange(10**9)}" for _ in range(N_WORDS)]
        half = both + (N_WORDS - both) // 2
        one, two = (
            minhash_signature(" ".join(part), n_hashes, 1) for part in (words[:half], words[:both] + words[half:])
        )
        found[place] = one == two
    return found


def figure(
    minhash_signature: Signature, n_bands: Sequence[int], n_rows: Sequence[int], thresholds: Sequence[float]
) -> Figure:
    agree = cache(lambda: agreements(minhash_signature, max(n_bands) * max(n_rows)))

    def curve(b: int, r: int) -> str:
        points = " ".join(f"{_x(i / 100):.1f},{_y(promise(i / 100, b, r)):.1f}" for i in range(101))
        met = agree()[:, :, : b * r].reshape(len(SIMILARITIES), N_PAIRS, b, r).all(-1).any(-1).mean(-1)
        dots = [tag("circle", cx=_x(s), cy=_y(y), r=3, fill=BLUE) for s, y in zip(SIMILARITIES, met, strict=True)]
        return tag("polyline", points=points, fill="none", stroke=BLUE, stroke_width=1.6) + "".join(dots)

    def halves(threshold: float) -> str:
        at = _x(threshold)
        look = {"fill_opacity": 0.12}
        return (
            rect(LEFT, TOP, at - LEFT, BASE - TOP, fill=ORANGE, **look)
            + rect(at, TOP, RIGHT - at, BASE - TOP, fill=GREEN, **look)
            + line((at, TOP), (at, BASE), stroke="currentColor", stroke_dasharray="4 3")
        )

    def say(threshold: float, b: int, r: int) -> str:
        above, below = mean_promise(threshold, 1, b, r), mean_promise(0, threshold, b, r)
        return (
            f"{b} bands of {r}: {b * r} values in a signature. A pair exactly at {threshold:g} is found with a "
            f"probability of {promise(threshold, b, r):.1%}. Of pairs spread evenly above it, {above:.1%} are found; "
            f"of pairs spread evenly below it, {below:.1%} are compared for nothing."
        )

    bands_ = _control("bands", "bands", n_bands, n_bands.index(16) if 16 in n_bands else 0)
    rows_ = _control("rows", "values in a band", n_rows, n_rows.index(8) if 8 in n_rows else 0)
    threshold_ = _control("threshold", "threshold", thresholds, thresholds.index(0.8) if 0.8 in thresholds else 0)
    return Figure(
        name="bands",
        alt=ALT,
        height=226,
        controls=[bands_, rows_, threshold_],
        layers=[layer(halves, threshold_), layer(_axes), layer(curve, bands_, rows_)],
        sentences=[layer(say, threshold_, bands_, rows_)],
    )


def _control(name: str, text: str, values: Sequence[float], start: int) -> Control:
    return Control(name=name, label=text, values=values, shown=[f"{v:g}" for v in values], start=start, still=start)


def _x(similarity: float) -> float:
    return LEFT + (RIGHT - LEFT) * similarity


def _y(share: float) -> float:
    return BASE - (BASE - TOP) * share


def _axes() -> str:
    drawn = [
        line((LEFT, BASE), (RIGHT, BASE), stroke="currentColor"),
        line((LEFT, TOP), (LEFT, BASE), stroke="currentColor"),
        label(LEFT, TOP - 8, "share of pairs that are compared"),
        label(RIGHT, BASE + 31, "Jaccard similarity", kind="end"),
    ]
    drawn += [label(_x(s), BASE + 15, f"{s:g}", kind="middle") for s in (0, 0.5, 1)]
    drawn += [label(LEFT - 6, _y(s) + 4, f"{s:.0%}", kind="end") for s in (0, 0.5, 1)]
    return "".join(drawn)
