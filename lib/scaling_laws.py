"""Scaling laws: fit the loss of small models, predict that of large ones, and choose size, data, batch and rate."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
from jaxtyping import Float

from lib.given.models.laws import BESIROGLU as BESIROGLU
from lib.given.models.laws import HOFFMANN as HOFFMANN
from lib.given.models.laws import Chinchilla, PowerLaw, minimise

DELTA = 1e-3
"""Where Huber's loss turns from a parabola into a line: a relative error of 0.1 %."""


def fit_power_law(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> PowerLaw:
    """Fit ``y = a * x**-alpha + floor`` to points, robustly. (Exercise 22.1)

    Size: 35 minutes, difficulty 3, core.

    Args:
        x: Sizes, tokens or steps ``[n]``: positive; an array, a tensor or a list.
        y: Losses ``[n]``: positive.

    Returns:
        The law that minimises the sum of Huber's losses (``DELTA``) of ``log y - log prediction``.
        ``a`` is positive and ``floor`` is not negative; ``alpha`` is negative where y rises with x.

    Raises:
        ValueError: One of these.

            - x and y differ in length; the message shows the two lengths.
            - A number is not positive and finite; the message shows it.
            - There are fewer than 3 different x; the message shows how many are different.
            - The fitted exponent is outside of -10 to 10: then the points determine no law.

    Source: Hoffmann and others (arXiv:2203.15556), section D.2, for the loss;
        Kaplan and others (arXiv:2001.08361) for the law.
    """
    raise NotImplementedError("Exercise 22.1: write fit_power_law")


def bootstrap(
    fit: Callable[..., Any], points: Float[np.ndarray, "n k"], n: int, seed: int, level: float = 0.9
) -> dict[str, tuple[float, float]]:
    """Intervals for the numbers of a fit, from fits to points drawn with replacement. (Exercise 22.2)

    Size: 30 minutes, difficulty 3, core.

    Args:
        fit: Takes the k columns of the points, as in ``fit(x, y)``.
            If it has only one parameter, it takes the rows ``[n, k]``.
            It returns a dataclass of numbers, a mapping of numbers or one number.
        points: One point a row, ``[n, k]``; a row stays together.
        n: Number of fits, each to as many drawn rows as there are points.
        seed: Seed of the draws, as in ``numpy.random.default_rng(seed)``.
        level: Share of the fits that the interval contains; the rest is left out in equal parts below and above.

    Returns:
        ``(low, high)`` by the name of each field of the fit's result; if that is one number, the name is ``"value"``.
        Rows on which ``fit`` raises a ``ValueError`` are drawn again.

    Raises:
        ValueError: One of these.

            - ``n`` is below 1 or ``level`` is not between 0 and 1; the message shows it.
            - The fit fails on the points themselves.
            - The fit works on fewer than n of the first 10 n draws.

    Source: Efron (1979), "Bootstrap methods: another look at the jackknife"; the percentile interval.
    """
    raise NotImplementedError("Exercise 22.2: write bootstrap")


def learning_curve_prediction(
    steps: Sequence[float], losses: Sequence[float], final_step: float
) -> tuple[float, float, float]:
    """Predict where a run will end, from its first part. (Exercise 22.3)

    Size: 20 minutes, difficulty 3, stretch.

    Args:
        steps: Positive steps at which the loss was measured, after the warm-up and at a constant learning rate.
        losses: The losses at these steps.
        final_step: The step of the prediction, at or after the largest of ``steps``; these may come in any order.

    Returns:
        ``(value, low, high)``: the loss at ``final_step`` by the power law of the steps, and the 90 % interval of this
        prediction from 50 draws with seed 0.

    Raises:
        ValueError: ``final_step`` is before the largest step, or NaN; the message names both.
            Or as for ``fit_power_law``.

    Convention: the interval is for the curve. A single measured loss also scatters around the curve.
    """
    raise NotImplementedError("Exercise 22.3: write learning_curve_prediction")


def wsd_schedule(step: int, max_lr: float, warmup_steps: int, decay_start: int, max_steps: int) -> float:
    """Learning rate of a step: warm up, stay, decay. (Exercise 22.4)

    Size: 15 minutes, difficulty 2, core.

    Args:
        step: Number of the step, from 0.
        max_lr: Rate from ``warmup_steps`` to ``decay_start``, both included.
        warmup_steps: Length of the warm-up, which is a line from 0; may be 0.
        decay_start: Step from which the rate falls in a line.
        max_steps: Step at which it reaches 0, where it stays.

    Returns:
        The rate. If ``decay_start`` is ``max_steps``, the rate of that step is 0.

    Raises:
        ValueError: not ``0 <= warmup_steps <= decay_start <= max_steps``; the message names the three.

    Source: Hu and others, MiniCPM (arXiv:2404.06395), section 4.2;
        the linear decay is that of Hägele and others (arXiv:2405.18392).
    Convention: the decay is a line to 0; MiniCPM decays exponentially.
        Hägele and others prefer one minus a square root.
    """
    raise NotImplementedError("Exercise 22.4: write wsd_schedule")


def fit_parametric(
    n_parameters: Float[np.ndarray, " n"],
    n_tokens: Float[np.ndarray, " n"],
    losses: Float[np.ndarray, " n"],
    n_starts: int = 8,
) -> Chinchilla:
    """Fit ``loss = e + a / N**alpha + b / D**beta`` to runs of several sizes and lengths. (Exercise 22.5)

    Size: 25 minutes, difficulty 3, core.

    Args:
        n_parameters: Sizes N of the runs ``[n]``.
        n_tokens: Tokens D of the runs ``[n]``.
        losses: Their losses ``[n]``.
        n_starts: L-BFGS descends from this many points of a grid, those with the lowest objective.

    Returns:
        The law that minimises the sum of Huber's losses (``DELTA``) of ``log loss - log prediction``.

    Raises:
        ValueError: as for ``fit_power_law``, with 3 different values of N and of D needed.
            Or there are fewer than 5 runs, and the message says how many there are.

    Source: Hoffmann and others (arXiv:2203.15556), equation 3 and section D.2; why the scale of the objective matters:
        Besiroglu and others (arXiv:2404.10102).
    """
    raise NotImplementedError("Exercise 22.5: write fit_parametric")


def isoflop_minimum(n_parameters: Float[np.ndarray, " n"], losses: Float[np.ndarray, " n"]) -> float:
    """The best size at one amount of compute: the minimum of a parabola in log N. (Exercise 22.6)

    Size: 30 minutes, difficulty 3, core.

    Args:
        n_parameters: Sizes N of runs that cost equally many FLOPs ``[n]``.
        losses: Their losses ``[n]``.

    Returns:
        N at the vertex of the least-squares parabola through ``(log N, loss)``.

    Raises:
        ValueError: One of these.

            - There are fewer than 3 different sizes; the message says how many.
            - The parabola opens downwards, or is a line but for rounding.
            - The vertex is outside of the sizes, where nothing was measured; the message shows it and the range.

    Source: Hoffmann and others (arXiv:2203.15556), section 3.2.
    """
    raise NotImplementedError("Exercise 22.6: write isoflop_minimum")


def compute_optimal(flops: float, law: Chinchilla) -> tuple[float, float]:
    """The size and the tokens with the lowest loss for a given amount of compute. (Exercise 22.7)

    Size: 25 minutes, difficulty 3, core.

    Args:
        flops: Compute of the run; a run costs 6 N D.
        law: The loss as a function of N and D.

    Returns:
        ``(n_parameters, n_tokens)``, floats.

    Raises:
        ValueError: ``flops`` is not a positive, finite number; the message names it.

    Source: Hoffmann and others (arXiv:2203.15556), equation 4.
    """
    raise NotImplementedError("Exercise 22.7: write compute_optimal")


def critical_batch_size(
    small_norms: Sequence[float], large_norms: Sequence[float], small: float, large: float
) -> float:
    """The gradient noise scale: the batch at which noise and gradient are equally large. (Exercise 22.8)

    Size: 30 minutes, difficulty 4, core.

    Args:
        small_norms: Norms, not squared, of gradients that are means over batches of ``small`` examples.
        large_norms: The same for batches of ``large`` examples; there may be more or fewer of them.
        small: Size of the small batches.
        large: Size of the large batches.

    Returns:
        The noise scale tr(Sigma) / |G|^2 in examples, from unbiased estimates of both parts, in float64 for any norms.
        It is negative where the larger batches happen to have the larger norms.

    Raises:
        ValueError: One of these.

            - Not ``0 < small < large``; the message names both.
            - A list is empty.
            - The estimate of |G|^2 is NaN or not positive, because the norms are too few or too noisy.

    Source: McCandlish and others (arXiv:1812.06162), section 2.2 and appendix A.1.
    """
    raise NotImplementedError("Exercise 22.8: write critical_batch_size")


def mup_multipliers(width: int, base_width: int, kind: str) -> dict[str, float]:
    """How to change a weight's initialisation, learning rate and output when a model gets wider. (Exercise 22.9)

    Size: 25 minutes, difficulty 4, stretch.

    Args:
        width: Width C of the model.
        base_width: Width at which the initial standard deviations and the learning rate were tuned.
        kind: Which of the weight's dimensions grow.

            - ``"input"``: embeddings, positions, biases and gains, of which at most the output's dimension grows.
            - ``"hidden"``: both dimensions grow.
            - ``"output"``: only the input's dimension grows.

    Returns:
        Factors relative to the base width: ``"init"`` for the initial standard deviation, ``"lr"`` for AdamW's
        learning rate, and ``"output"`` for the product with this weight.

    Raises:
        ValueError: a width is below 1, or ``kind`` is none of the three; the message names it.

    Source: Yang and others (arXiv:2203.03466), table 8.
    Convention: table 3 of the paper moves the output's multiplier into its initialisation and its learning rate.
        The functions that the model computes are the same.
        Table 8 also allows an output weight that is tied to the input's.
    """
    raise NotImplementedError("Exercise 22.9: write mup_multipliers")
