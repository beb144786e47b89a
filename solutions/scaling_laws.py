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
    """Fit ``y = a * x**-alpha + floor`` to points, robustly. (Exercise)

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
    ### BEGIN SOLUTION
    x, y = _columns(x=x, y=y)
    log_a, log_floor, alpha = _fit_terms([x], y, n_starts=2)
    return PowerLaw(math.exp(log_a), float(alpha), math.exp(log_floor))
    ### END SOLUTION


### BEGIN SOLUTION
def _columns(**named) -> list[np.ndarray]:
    """Each argument as float64 ``[n]``, checked."""
    columns = [np.asarray(values, dtype=np.float64) for values in named.values()]
    if len({column.shape for column in columns}) > 1 or columns[0].ndim != 1:
        raise ValueError(
            ", ".join(f"{k} has shape {c.shape}" for k, c in zip(named, columns, strict=True))
            + ": expected one number a point in each"
        )
    for name, column in zip(named, columns, strict=True):
        if not (np.isfinite(column) & (column > 0)).all():
            bad = column[~(np.isfinite(column) & (column > 0))][0]
            raise ValueError(f"{name} contains {bad:g}: expected positive, finite numbers")
    for name, column in list(zip(named, columns, strict=True))[:-1]:
        if len(np.unique(column)) < 3:
            raise ValueError(
                f"{len(np.unique(column))} different values of {name}: a law has as many unknowns, and needs at least 3"
            )
    return columns


def _fit_terms(sizes: list[np.ndarray], y: np.ndarray, n_starts: int) -> np.ndarray:
    """The parameters of ``sum of c_k * size_k**-p_k + constant``.

    Returns the logarithms of the coefficients, the constant's last, then the exponents.
    """
    logs, log_y, k = np.log(sizes), np.log(y), len(sizes)
    centre, which = logs.mean(1), np.eye(k + 1)[:, None]
    slopes = -which[..., :k] * np.vstack([logs - centre[:, None], log_y])[..., None]  # the constant's row is 0
    design = np.concatenate([which.repeat(len(y), 1), slopes], axis=2).reshape(
        -1, 2 * k + 1
    )  # terms are linear in theta

    def objective(theta):
        terms = (design @ theta).reshape(k + 1, -1)
        log_prediction = np.logaddexp.reduce(terms)
        residual = (log_prediction - log_y) / DELTA
        slope = np.minimum(np.maximum(residual, -1), 1)  # of Huber's loss
        shares = slope * np.exp(terms - log_prediction) / DELTA
        return slope @ (residual - slope / 2), shares.ravel() @ design

    best = minimise(objective, _starts(design, log_y, k), n_starts)
    if (np.abs(best[k + 1 :]) > 10).any():
        raise ValueError(f"the points determine no law: an exponent became {np.abs(best[k + 1 :]).max():.3g}")
    best[:k] += best[k + 1 :] * centre
    return best


def _starts(design: np.ndarray, log_y: np.ndarray, k: int) -> Iterator[np.ndarray]:
    """A grid of exponents and of shares that the constant and the terms have at the middle of the points.

    Each is at the best level.
    """
    powers = (-1.0, -0.3, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0) if k == 1 else (0.1, 0.25, 0.5, 1.0)
    splits = [(1.0,)] if k == 1 else [(s, 1 - s) for s in (0.2, 0.5, 0.8)]
    floors = (0.001, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
    for floor, split, exponents in itertools.product(floors, splits, itertools.product(powers, repeat=k)):
        theta = np.array([*(math.log((1 - floor) * part) for part in split), math.log(floor), *exponents])
        theta[: k + 1] += np.median(log_y - np.logaddexp.reduce((design @ theta).reshape(k + 1, -1)))
        yield theta


### END SOLUTION


def bootstrap(
    fit: Callable[..., Any], points: Float[np.ndarray, "n k"], n: int, seed: int, level: float = 0.9
) -> dict[str, tuple[float, float]]:
    """Intervals for the numbers of a fit, from fits to points drawn with replacement. (Exercise)

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
    ### BEGIN SOLUTION
    if n < 1 or not 0 < level < 1:
        raise ValueError(f"n = {n}, level = {level}: expected at least one fit and a level between 0 and 1")
    points, found = np.asarray(points), []
    _numbers(fit, points)
    generator = np.random.default_rng(seed)
    for _ in range(10 * n):
        try:
            found.append(_numbers(fit, points[generator.integers(len(points), size=len(points))]))
        except ValueError:
            continue
        if len(found) == n:
            tails = [(1 - level) / 2, (1 + level) / 2]
            return {name: tuple(np.quantile([f[name] for f in found], tails).tolist()) for name in found[0]}
    raise ValueError(f"the fit failed on {10 * n - len(found)} of {10 * n} draws of the {len(points)} points")
    ### END SOLUTION


### BEGIN SOLUTION
def _numbers(fit: Callable[..., Any], rows: np.ndarray) -> Mapping[str, float]:
    takes = list(signature(fit).parameters.values())
    result = fit(rows) if len(takes) == 1 and takes[0].kind is not Parameter.VAR_POSITIONAL else fit(*rows.T)
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    return result if isinstance(result, Mapping) else {"value": result}


### END SOLUTION


def learning_curve_prediction(
    steps: Sequence[float], losses: Sequence[float], final_step: float
) -> tuple[float, float, float]:
    """Predict where a run will end, from its first part. (Exercise)

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
    ### BEGIN SOLUTION
    if not final_step >= max(steps, default=0):
        raise ValueError(f"final_step = {final_step}: expected the last step, {max(steps)}, or a later one")

    def predict(x, y):
        return float(fit_power_law(x, y)(final_step))

    value = predict(steps, losses)
    low, high = bootstrap(predict, np.column_stack([steps, losses]), n=50, seed=0)["value"]
    return value, low, high
    ### END SOLUTION


def wsd_schedule(step: int, max_lr: float, warmup_steps: int, decay_start: int, max_steps: int) -> float:
    """Learning rate of a step: warm up, stay, decay. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 <= warmup_steps <= decay_start <= max_steps:
        raise ValueError(f"expected 0 <= {warmup_steps = } <= {decay_start = } <= {max_steps = }")
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= max_steps:
        return 0.0
    return max_lr * min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
    ### END SOLUTION


def fit_parametric(
    n_parameters: Float[np.ndarray, " n"],
    n_tokens: Float[np.ndarray, " n"],
    losses: Float[np.ndarray, " n"],
    n_starts: int = 8,
) -> Chinchilla:
    """Fit ``loss = e + a / N**alpha + b / D**beta`` to runs of several sizes and lengths. (Exercise)

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
    ### BEGIN SOLUTION
    n, d, y = _columns(n_parameters=n_parameters, n_tokens=n_tokens, losses=losses)
    if len(y) < 5:
        raise ValueError(f"{len(y)} runs: the law has 5 unknowns, and needs at least 5 runs")
    log_a, log_b, log_e, alpha, beta = _fit_terms([n, d], y, n_starts)
    return Chinchilla(math.exp(log_e), math.exp(log_a), math.exp(log_b), float(alpha), float(beta))
    ### END SOLUTION


def isoflop_minimum(n_parameters: Float[np.ndarray, " n"], losses: Float[np.ndarray, " n"]) -> float:
    """The best size at one amount of compute: the minimum of a parabola in log N. (Exercise)

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
    ### BEGIN SOLUTION
    n, y = _columns(n_parameters=n_parameters, losses=losses)
    curvature, slope, _ = np.polyfit(np.log(n / n.min()), y, 2)
    if curvature <= max(1e-9 * np.ptp(y), 1e-12 * y.max()):  # equal losses leave the rounding error of a line
        raise ValueError(f"the parabola's curvature is {curvature:.3g}: there is a minimum only if it opens upwards")
    best = -slope / (2 * curvature)
    if not 0 <= best <= math.log(n.max() / n.min()):
        at = math.exp(best) * n.min() if best < 700 else math.inf
        raise ValueError(
            f"the minimum at {at:.3g} is outside of the sizes, {n.min():.3g} to {n.max():.3g}: train others"
        )
    return float(math.exp(best) * n.min())
    ### END SOLUTION


def compute_optimal(flops: float, law: Chinchilla) -> tuple[float, float]:
    """The size and the tokens with the lowest loss for a given amount of compute. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 < flops < math.inf:
        raise ValueError(f"flops = {flops}: expected a positive, finite number")
    both = law.alpha + law.beta
    balance = (law.alpha * law.a / (law.beta * law.b)) ** (1 / both)
    n_parameters = balance * (flops / 6) ** (law.beta / both)
    return n_parameters, flops / (6 * n_parameters)
    ### END SOLUTION


def critical_batch_size(
    small_norms: Sequence[float], large_norms: Sequence[float], small: float, large: float
) -> float:
    """The gradient noise scale: the batch at which noise and gradient are equally large. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 < small < large:
        raise ValueError(f"small = {small}, large = {large}: expected 0 < small < large")
    if len(small_norms) == 0 or len(large_norms) == 0:
        raise ValueError(f"{len(small_norms)} small and {len(large_norms)} large norms: expected at least one of each")
    of_small, of_large = (
        float(np.mean(np.asarray(norms, dtype=np.float64) ** 2)) for norms in (small_norms, large_norms)
    )
    signal = (large * of_large - small * of_small) / (large - small)
    noise = (of_small - of_large) / (1 / small - 1 / large)
    if not signal > 0:
        raise ValueError(f"the squared gradient is estimated as {signal:.3g}: average over more gradients")
    return noise / signal
    ### END SOLUTION


def mup_multipliers(width: int, base_width: int, kind: str) -> dict[str, float]:
    """How to change a weight's initialisation, learning rate and output when a model gets wider. (Exercise)

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
    ### BEGIN SOLUTION
    if min(width, base_width) < 1:
        raise ValueError(f"width = {width}, base_width = {base_width}: expected at least 1")
    wider = width / base_width
    multipliers = {
        "input": {"init": 1.0, "lr": 1.0, "output": 1.0},
        "hidden": {"init": wider**-0.5, "lr": 1 / wider, "output": 1.0},
        "output": {"init": 1.0, "lr": 1.0, "output": 1 / wider},
    }
    if kind not in multipliers:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(multipliers)}")
    return multipliers[kind]
    ### END SOLUTION
