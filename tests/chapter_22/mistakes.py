"""What goes wrong when people fit a scaling law, or carry a batch and a learning rate to another size."""

import math
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature

import numpy as np
from scipy.optimize import least_squares, minimize

from lib.given.models.laws import Chinchilla, PowerLaw
from lib.workbook.grading import mistake
from solutions import scaling_laws as reference


def _once(fit, n_columns):
    """``fit``, computed once for the same numbers: a diagnosis has a few seconds for all mistakes, which share most fits."""
    known = {}

    def fitted(*args):
        columns = [np.asarray(values, dtype=np.float64) for values in args[:n_columns]]
        key = (*((column.shape, column.tobytes()) for column in columns), *args[n_columns:])
        if key not in known:
            try:
                known[key] = fit(*args)
            except ValueError as error:
                known[key] = error
        if isinstance(known[key], ValueError):
            raise known[key]
        return known[key]

    return fitted


_power_law = _once(reference.fit_power_law, 2)
_parametric = _once(reference.fit_parametric, 3)

# ---- fit_power_law ---------------------------------------------------------------------------------------------------


def _checked(x, y):
    reference._columns(x=x, y=y)
    return np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)


def _line(x, y, floor=0.0):
    """The least-squares line through the logarithms of x and of y above its floor."""
    slope, height = np.polyfit(np.log(x), np.log(y - floor), 1)
    return PowerLaw(math.exp(height), -float(slope), float(floor))


@mistake("fit_power_law", "a line through the logarithms: it has no floor")
def no_floor(x, y):
    return _line(*_checked(x, y))


@mistake("fit_power_law", "the lowest y was taken for the floor; the floor is below everything that was measured")
def floor_is_the_lowest(x, y):
    x, y = _checked(x, y)
    return _line(x, y, floor=0.999 * y.min())


EXACTLY = {"ftol": 1e-13, "xtol": 1e-13, "gtol": 1e-13}


def _bounded(x, y, loss, in_logs=True):
    middle = math.exp(np.log(x).mean())

    def residuals(p):
        law = p[0] * (x / middle) ** -p[1] + p[2]
        return np.log(law) - np.log(y) if in_logs else law - y

    level = y.mean()
    fits = [
        least_squares(
            residuals,
            (level * (1 - f), p, level * f),
            bounds=([1e-12, -np.inf, 1e-12], np.inf),
            loss=loss,
            f_scale=1e-3,
            **EXACTLY,
        )
        for p in (-0.5, 0.3, 1.0)
        for f in (0.1, 0.7)
    ]
    a, alpha, floor = min(fits, key=lambda fit: fit.cost).x
    return PowerLaw(float(a) * middle ** float(alpha), float(alpha), float(floor))


@mistake("fit_power_law", "least squares: one bad run bends the law, because its error is squared")
def least_squares_in_logs(x, y):
    return _bounded(*_checked(x, y), "linear")


@mistake(
    "fit_power_law",
    "differences of y instead of differences of log y: the small values, at the large x, count for nothing",
)
def not_in_logs(x, y):
    return _bounded(*_checked(x, y), "huber", in_logs=False)


@mistake("fit_power_law", "the slope of the falling line was returned as alpha; alpha is minus that slope")
def sign_of_alpha(x, y):
    law = _power_law(x, y)
    return replace(law, alpha=-law.alpha)


@mistake("fit_power_law", "the logarithm of a was returned")
def log_of_a(x, y):
    law = _power_law(x, y)
    return replace(law, a=math.log(law.a))


@mistake("fit_power_law", "the logarithm of the floor was returned")
def log_of_the_floor(x, y):
    law = _power_law(x, y)
    return replace(law, floor=math.log(law.floor))


@mistake("fit_power_law", "x was divided by its middle for the fit, and a was not moved back to x = 1")
def a_in_the_middle(x, y):
    law = _power_law(x, y)
    return replace(law, a=law.a * math.exp(np.log(np.asarray(x, dtype=np.float64)).mean()) ** -law.alpha)


@mistake("fit_power_law", "the floor may become negative: a loss below zero for large x")
def floor_below_zero(x, y):
    law, (x, y) = _power_law(x, y), _checked(x, y)
    if law.floor > 1e-3 * y.min():
        return law
    floors = [-v * y.min() for v in (0.1, 0.3, 1.0, 3.0)]
    return min((_line(x, y, floor) for floor in floors), key=lambda fit: np.abs(np.log(fit(x) / y)).sum())


@mistake(
    "fit_power_law", "the points were taken to be in the order of x; the first and the last are not always the ends"
)
def ends_by_place(x, y):
    law, (x, y) = _power_law(x, y), _checked(x, y)
    falls = y[0] > y[-1]
    return law if (x[0] < x[-1]) == falls and (np.sort(x) == x).all() else _line(x, y, 0.9 * min(y[0], y[-1], y.min()))


@mistake("fit_power_law", "alpha was restricted to positive values, and y may rise")
def only_falling(x, y):
    law = _power_law(x, y)
    return law if law.alpha > 0 else PowerLaw(0.0, 0.0, float(np.median(np.asarray(y))))


@mistake("fit_power_law", "two points on a line decide: the law goes through the first and the last of them")
def two_points(x, y):
    law, (x, y) = _power_law(x, y), _checked(x, y)
    first, last = x.argmin(), x.argmax()
    above = y[[first, last]] - law.floor
    if (above <= 0).any():
        return law
    alpha = -math.log(above[1] / above[0]) / math.log(x[last] / x[first])
    return PowerLaw(float(above[0] * x[first] ** alpha), alpha, law.floor)


@mistake("fit_power_law", "numbers that are zero, negative or not numbers are dropped in silence")
def drops_bad_points(x, y):
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape == y.shape:
        good = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
        x, y = x[good], y[good]
    return _power_law(x, y)


@mistake(
    "fit_power_law",
    "three unknowns from two different x: the number of points was checked, if at all, and not the number of different x",
)
def counts_points(x, y):
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return _line(x, y) if x.shape == y.shape and len(np.unique(x)) == 2 and (x > 0).all() else _power_law(x, y)


@mistake("fit_power_law", "a logarithm of x to base 10, undone with e: alpha is ln 10 times too large")
def log10_of_x(x, y):
    return reference.fit_power_law(np.exp(np.log10(_checked(x, y)[0])), y)


@mistake("fit_power_law", "logarithms to base 10, undone with e")
def log10_of_both(x, y):
    _power_law(x, y)
    return reference.fit_power_law(*(np.exp(np.log10(values)) for values in _checked(x, y)))


@mistake("fit_power_law", "a was moved from the middle of x to 1 with the wrong sign: a = a' * middle**alpha")
def a_moved_the_other_way(x, y):
    law = _power_law(x, y)
    return replace(law, a=law.a * math.exp(-2 * law.alpha * float(np.log(_checked(x, y)[0]).mean())))


@mistake("fit_power_law", "the floor was fitted, and 0 was returned in its place")
def floor_dropped(x, y):
    return replace(_power_law(x, y), floor=0.0)


@mistake("fit_power_law", "alpha and floor were exchanged in the result")
def fields_exchanged(x, y):
    law = _power_law(x, y)
    return PowerLaw(law.a, law.floor, law.alpha)


@mistake("fit_power_law", "three different x were refused; they are enough for three unknowns")
def asks_for_four(x, y):
    if np.shape(x) == np.shape(y) and len(np.unique(np.asarray(x))) == 3:
        raise ValueError("3 different x are too few")
    return _power_law(x, y)


# ---- bootstrap -------------------------------------------------------------------------------------------------------


def _draws(fit, points, n, seed, level, rows=None, quantiles=None, tries=10, fits_first=True):
    """The reference's bootstrap with another way to draw, or another way to make an interval."""
    reference.bootstrap(lambda *columns: 0.0, points, n, seed, level)
    points, generator, found = np.asarray(points), np.random.default_rng(seed), []
    if fits_first:
        reference._numbers(fit, points)
    for _ in range(tries * n):
        drawn = points[generator.integers(len(points), size=len(points))] if rows is None else rows(points, generator)
        try:
            found.append(reference._numbers(fit, drawn))
        except ValueError:
            continue
        if len(found) == n:
            break
    else:
        raise ValueError("the fit failed too often")
    interval = quantiles or (lambda values: tuple(np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()))
    return {name: interval(np.array([f[name] for f in found])) for name in found[0]}


@mistake("bootstrap", "drawn without replacement: every fit sees all points")
def without_replacement(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, lambda p, g: g.permutation(p))


@mistake("bootstrap", "each column was drawn for itself, so an x meets the y of another point")
def columns_apart(fit, points, n, seed, level=0.9):
    def rows(p, g):
        return np.column_stack([column[g.integers(len(p), size=len(p))] for column in p.T])

    return _draws(fit, points, n, seed, level, rows)


@mistake("bootstrap", "a normal interval, mean and 1.64 standard deviations, instead of quantiles of the fits")
def normal_interval(fit, points, n, seed, level=0.9):
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + level) / 2)
    return _draws(
        fit, points, n, seed, level, quantiles=lambda v: (float(v.mean() - z * v.std()), float(v.mean() + z * v.std()))
    )


@mistake("bootstrap", "all of 1 - level was cut off on each side, and half of it belongs there")
def whole_tails(fit, points, n, seed, level=0.9):
    return _draws(
        fit, points, n, seed, level, quantiles=lambda v: tuple(sorted(np.quantile(v, [1 - level, level]).tolist()))
    )


@mistake(
    "bootstrap",
    "the fits' standard deviation was divided by the root of their number, as if more fits made the points more certain",
)
def standard_error_of_the_fits(fit, points, n, seed, level=0.9):
    return _draws(
        fit,
        points,
        n,
        seed,
        level,
        quantiles=lambda v: tuple(
            (v.mean() + (np.quantile(v, [(1 - level) / 2, (1 + level) / 2]) - v.mean()) / math.sqrt(n)).tolist()
        ),
    )


@mistake("bootstrap", "the smallest and the largest fit, whatever the level")
def whole_range(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, quantiles=lambda v: (float(v.min()), float(v.max())))


@mistake("bootstrap", "the default level is 90 %")
def default_of_95(fit, points, n, seed, level=0.95):
    return reference.bootstrap(fit, points, n, seed, level)


@mistake("bootstrap", "level is ignored")
def level_ignored(fit, points, n, seed, level=0.9):
    reference.bootstrap(lambda *columns: 0.0, points, n, seed, level)
    return reference.bootstrap(fit, points, n, seed)


@mistake("bootstrap", "high came before low")
def high_before_low(fit, points, n, seed, level=0.9):
    return {name: (high, low) for name, (low, high) in reference.bootstrap(fit, points, n, seed, level).items()}


@mistake(
    "bootstrap", "n rows were drawn for a fit; n is the number of fits, and each has as many rows as there are points"
)
def n_rows(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, lambda p, g: p[g.integers(len(p), size=n)])


@mistake(
    "bootstrap", "half of the rows were drawn for each fit, which makes it less certain than the fit to all of them"
)
def half_the_rows(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, lambda p, g: p[g.integers(len(p), size=max(1, len(p) // 2))])


@mistake("bootstrap", "the generator was made anew for each fit: all of them draw the same rows")
def one_draw(fit, points, n, seed, level=0.9):
    return _draws(
        fit, points, n, seed, level, lambda p, g: p[np.random.default_rng(seed).integers(len(p), size=len(p))]
    )


@mistake("bootstrap", "the seed is ignored")
def seed_ignored(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, n, 0, level)


@mistake(
    "bootstrap", "NumPy's global generator was seeded and used, which changes all other random numbers of the program"
)
def global_generator(fit, points, n, seed, level=0.9):
    np.random.seed(seed)
    return _draws(fit, points, n, seed, level, lambda p, g: p[np.random.randint(len(p), size=len(p))])


@mistake(
    "bootstrap", "the interval was mirrored at the fit, 2 fit - quantile: the basic interval, not that of percentiles"
)
def mirrored(fit, points, n, seed, level=0.9):
    whole = reference._numbers(fit, np.asarray(points))
    found = reference.bootstrap(fit, points, n, seed, level)
    return {name: (2 * whole[name] - high, 2 * whole[name] - low) for name, (low, high) in found.items()}


@mistake("bootstrap", "every fit gets columns, a fit of one parameter too")
def always_columns(fit, points, n, seed, level=0.9):
    return reference.bootstrap(lambda *columns: fit(*columns), points, n, seed, level)


@mistake("bootstrap", "every fit gets the rows, and one of several parameters takes columns")
def always_rows(fit, points, n, seed, level=0.9):
    return reference.bootstrap(lambda rows: fit(rows), points, n, seed, level)


@mistake("bootstrap", "a draw on which the fit fails ends everything; it is drawn again")
def a_failure_ends_it(fit, points, n, seed, level=0.9):
    points, generator, found = np.asarray(points), np.random.default_rng(seed), []
    reference.bootstrap(lambda *columns: 0.0, points, n, seed, level)
    reference._numbers(fit, points)
    for _ in range(n):
        found.append(reference._numbers(fit, points[generator.integers(len(points), size=len(points))]))
    tails = [(1 - level) / 2, (1 + level) / 2]
    return {name: tuple(np.quantile([f[name] for f in found], tails).tolist()) for name in found[0]}


@mistake("bootstrap", "a fit that always fails gives an interval of NaN instead of an error")
def nan_for_failures(fit, points, n, seed, level=0.9):
    try:
        return reference.bootstrap(fit, points, n, seed, level)
    except ValueError as error:
        if "level" in str(error):
            raise
        return {"value": (math.nan, math.nan)}


@mistake("bootstrap", "n = 0 is accepted, and no fit has no interval")
def no_fits(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, max(1, n), seed, level)


@mistake("bootstrap", "a level of 0 is accepted; an interval has a share of the fits")
def level_of_zero(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, n, seed, 1e-9 if level == 0 else level)


@mistake("bootstrap", "a level of 1 is accepted; it has to be below 1")
def level_of_one(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, n, seed, 1 - 1e-9 if level == 1 else level)


@mistake("bootstrap", "no level is refused: it has to lie between 0 and 1")
def any_level(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, n, seed, max(1e-9, min(abs(level), 1 - 1e-9)))


@mistake("bootstrap", "a level above 1 is accepted, a percentage for example")
def level_above_one(fit, points, n, seed, level=0.9):
    return reference.bootstrap(fit, points, n, seed, level / 100 if level > 1 else level)


@mistake("bootstrap", "it gives up after 2 n draws, and 10 n are allowed")
def gives_up_early(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, tries=2)


@mistake("bootstrap", "the last row is never drawn: the upper end of integers() is left out already")
def last_row_never(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, lambda p, g: p[g.integers(len(p) - 1, size=len(p))])


@mistake("bootstrap", "the fit to the points themselves was counted as one of the n")
def points_count_as_a_draw(fit, points, n, seed, level=0.9):
    whole = [np.asarray(points)]

    def rows(p, g):
        return whole.pop() if whole else p[g.integers(len(p), size=len(p))]

    return _draws(fit, points, n, seed, level, rows, fits_first=False)


@mistake("bootstrap", "the interval goes from the smallest fit to the quantile at level: all that is left out is above")
def one_sided(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, quantiles=lambda v: tuple(np.quantile(v, [0, level]).tolist()))


@mistake(
    "bootstrap", "the mean and 1.645 standard deviations of the fits: a normal interval, and of 90 % whatever the level"
)
def normal_interval_of_90(fit, points, n, seed, level=0.9):
    return _draws(
        fit, points, n, seed, level, quantiles=lambda v: (v.mean() - 1.645 * v.std(), v.mean() + 1.645 * v.std())
    )


@mistake("bootstrap", "n - 1 fits to draws instead of n")
def one_fit_less(fit, points, n, seed, level=0.9):
    return (
        _draws(fit, points, max(1, n - 1), seed, level) if n > 0 else reference.bootstrap(fit, points, n, seed, level)
    )


@mistake("bootstrap", "n + 1 fits to draws instead of n")
def one_fit_more(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n + 1, seed, level) if n > 0 else reference.bootstrap(fit, points, n, seed, level)


@mistake("bootstrap", "the fit was not tried on the points themselves first")
def points_not_tried(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, fits_first=False)


@mistake("bootstrap", "one fit was refused: its interval has no width, and n has to be at least 1")
def refuses_one_fit(fit, points, n, seed, level=0.9):
    if n == 1:
        raise ValueError("n = 1: expected at least 2 fits")
    return reference.bootstrap(fit, points, n, seed, level)


@mistake("bootstrap", "only the first two columns reach the fit; points may have more")
def two_columns(fit, points, n, seed, level=0.9):
    if len(signature(fit).parameters) == 1:
        return reference.bootstrap(fit, points, n, seed, level)
    return reference.bootstrap(fit, np.asarray(points)[:, :2], n, seed, level)


@mistake("bootstrap", "only a dict was taken for a mapping; collections.abc.Mapping has others")
def only_dicts(fit, points, n, seed, level=0.9):
    def fitted(*columns):
        result = fit(*columns)
        return {"value": 0.0} if isinstance(result, Mapping) and not isinstance(result, dict) else result

    rows = len(signature(fit).parameters) == 1
    return reference.bootstrap((lambda table: fitted(table)) if rows else fitted, points, n, seed, level)


@mistake("bootstrap", "a draw has one row less than there are points")
def one_row_less(fit, points, n, seed, level=0.9):
    return _draws(fit, points, n, seed, level, lambda p, g: p[g.integers(len(p), size=len(p) - 1)])


# ---- learning_curve_prediction ---------------------------------------------------------------------------------------


def _predicted(predict, steps, losses, final_step, **settings):
    """The reference's prediction, with another function of (x, y) or other settings of the bootstrap."""
    _power_law(steps, losses)
    if final_step < max(steps):
        raise ValueError(f"final_step = {final_step} is before {max(steps)}")
    points = np.column_stack([steps, losses])
    interval = reference.bootstrap(predict, points, **{"n": 50, "seed": 0, **settings})["value"]
    return float(predict(*points.T)), *interval


def _prediction(steps, losses, final_step, **settings):
    return _predicted(lambda x, y: float(_power_law(x, y)(final_step)), steps, losses, final_step, **settings)


@mistake("learning_curve_prediction", "a line through the logarithms: it has no floor, and falls too far")
def curve_without_a_floor(steps, losses, final_step):
    return _predicted(lambda x, y: float(_line(x, y)(final_step)), steps, losses, final_step)


@mistake(
    "learning_curve_prediction", "the floor was returned: the loss after infinitely many steps, not after final_step"
)
def floor_of_the_curve(steps, losses, final_step):
    return _predicted(lambda x, y: _power_law(x, y).floor, steps, losses, final_step)


@mistake("learning_curve_prediction", "the loss was taken to stay at its last value")
def last_loss(steps, losses, final_step):
    return _predicted(lambda x, y: float(y[np.argmax(x)]), steps, losses, final_step)


@mistake("learning_curve_prediction", "a line through the loss against the step")
def straight_line(steps, losses, final_step):
    return _predicted(lambda x, y: float(np.polyval(np.polyfit(x, y, 1), final_step)), steps, losses, final_step)


@mistake("learning_curve_prediction", "the points were counted 1, 2, 3, …; a step is a number of its own")
def counted_points(steps, losses, final_step):
    _prediction(steps, losses, final_step)
    places = np.arange(1, len(steps) + 1)
    return _predicted(lambda x, y: float(_power_law(x, y)(final_step)), places, losses, final_step)


@mistake(
    "learning_curve_prediction",
    "the steps were counted from the first one that was given; they count from the start of the run",
)
def steps_from_the_first(steps, losses, final_step):
    _prediction(steps, losses, final_step)
    first = min(steps) - 1
    shifted = np.asarray(steps) - first
    return _predicted(lambda x, y: float(_power_law(x, y)(final_step - first)), shifted, losses, final_step - first)


@mistake("learning_curve_prediction", "(low, value, high): the value comes first")
def value_in_the_middle(steps, losses, final_step):
    value, low, high = _prediction(steps, losses, final_step)
    return low, value, high


@mistake("learning_curve_prediction", "(value, high, low)")
def high_first(steps, losses, final_step):
    value, low, high = _prediction(steps, losses, final_step)
    return value, high, low


@mistake("learning_curve_prediction", "no interval: low and high are the value itself")
def no_interval(steps, losses, final_step):
    value, _, _ = _prediction(steps, losses, final_step)
    return value, value, value


@mistake(
    "learning_curve_prediction",
    "the points' scatter was taken for the interval; far beyond the points the law is less certain than near them",
)
def scatter(steps, losses, final_step):
    value, _, _ = _prediction(steps, losses, final_step)
    apart = np.std(_power_law(steps, losses)(steps) / np.asarray(losses) - 1) / math.sqrt(len(steps))
    return value, value * (1 - 1.64 * apart), value * (1 + 1.64 * apart)


@mistake("learning_curve_prediction", "the interval is of the losses that were measured")
def interval_of_the_points(steps, losses, final_step):
    value, _, _ = _prediction(steps, losses, final_step)
    low, high = np.quantile(losses, [0.05, 0.95])
    return value, float(min(low, value)), float(high)


@mistake("learning_curve_prediction", "a step before the last one is accepted")
def looks_back(steps, losses, final_step):
    if final_step < max(steps):
        return (float(_power_law(steps, losses)(final_step)),) * 3
    return _prediction(steps, losses, final_step)


@mistake("learning_curve_prediction", "the value is the middle of the interval; it is the curve of all points")
def middle_of_the_interval(steps, losses, final_step):
    _, low, high = _prediction(steps, losses, final_step)
    return (low + high) / 2, low, high


@mistake("learning_curve_prediction", "the draws have another seed than 0, so the interval is another one")
def another_seed(steps, losses, final_step):
    return _prediction(steps, losses, final_step, seed=1)


@mistake("learning_curve_prediction", "the interval has 95 %, and 90 is asked for")
def wider_level(steps, losses, final_step):
    return _prediction(steps, losses, final_step, level=0.95)


@mistake("learning_curve_prediction", "the last step was taken to be the largest; steps may come in any order")
def last_is_largest(steps, losses, final_step):
    if final_step < steps[-1]:
        raise ValueError(f"final_step = {final_step} is before the last step, {max(steps)}")
    return _prediction(steps, losses, max(final_step, max(steps)))


@mistake("learning_curve_prediction", "the law was read one step early, at final_step - 1")
def one_step_early(steps, losses, final_step):
    _prediction(steps, losses, final_step)
    return (
        _prediction(steps, losses, final_step - 1)
        if final_step > max(steps)
        else _prediction(steps, losses, final_step)
    )


@mistake(
    "learning_curve_prediction",
    "the interval was widened by the scatter of single measurements; it is that of the curve",
)
def widened_by_residuals(steps, losses, final_step):
    value, low, high = _prediction(steps, losses, final_step)
    scatter = float(np.std(np.asarray(losses) - _power_law(steps, losses)(steps)))
    return value, low - scatter, high + scatter


@mistake("learning_curve_prediction", "the caller's steps and losses were sorted, and they are the caller's")
def sorts_the_callers_points(steps, losses, final_step):
    result = _prediction(steps, losses, final_step)
    order = np.argsort(steps)
    steps[:], losses[:] = np.asarray(steps)[order].tolist(), np.asarray(losses)[order].tolist()
    return result


@mistake("learning_curve_prediction", "low and high are distances from the value; they are losses")
def distances(steps, losses, final_step):
    value, low, high = _prediction(steps, losses, final_step)
    return value, value - low, high - value


@mistake("learning_curve_prediction", "100 draws instead of 50")
def hundred_draws(steps, losses, final_step):
    return _prediction(steps, losses, final_step, n=100)


# ---- wsd_schedule ----------------------------------------------------------------------------------------------------


def _wsd(step, max_lr, warmup_steps, decay_start, max_steps, **changed):
    """The reference's schedule, with its parts replaced."""
    rate = reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
    if step < warmup_steps:
        return changed.get("warm", lambda: rate)()
    if step >= max_steps:
        return changed.get("end", lambda: rate)()
    if step > decay_start or (step == decay_start and "at_start" in changed):
        return changed.get("decay", lambda: rate)()
    return changed.get("stay", lambda: rate)()


@mistake("wsd_schedule", "half a cosine instead of a line")
def cosine_decay(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * 0.5 * (1 + math.cos(math.pi * (step - decay_start) / (max_steps - decay_start)))

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "the decay is exponential, as in MiniCPM; this one is a line")
def exponential_decay(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * 0.5 ** ((step - decay_start) / (max_steps - decay_start) * 5)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "one minus a square root instead of a line")
def root_decay(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * (1 - math.sqrt((step - decay_start) / (max_steps - decay_start)))

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "the warm-up is one step ahead, (step + 1) / warmup_steps")
def warm_up_one_ahead(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, warm=lambda: max_lr * (step + 1) / warmup_steps)


@mistake("wsd_schedule", "there is no warm-up")
def no_warm_up(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, warm=lambda: max_lr)


@mistake("wsd_schedule", "the rate falls from the end of the warm-up on: nothing stays")
def no_plateau(step, max_lr, warmup_steps, decay_start, max_steps):
    def fall():
        return max_lr * (max_steps - step) / max(1, max_steps - warmup_steps)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, stay=fall, decay=fall)


@mistake("wsd_schedule", "the rate becomes negative after max_steps")
def below_zero(step, max_lr, warmup_steps, decay_start, max_steps):
    def end():
        return max_lr * (max_steps - step) / max(1, max_steps - decay_start)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, end=end)


@mistake("wsd_schedule", "the decay's slope is that of a fall over max_steps, so the rate jumps at decay_start")
def slope_of_the_whole_run(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(
        step, max_lr, warmup_steps, decay_start, max_steps, decay=lambda: max_lr * (max_steps - step) / max_steps
    )


@mistake("wsd_schedule", "the decay begins one step early")
def decay_one_early(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * (max_steps - step) / (max_steps - decay_start + 1)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay, at_start=True)


@mistake("wsd_schedule", "the rate reaches zero one step too early")
def zero_one_early(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max(0.0, max_lr * (max_steps - 1 - step) / max(1, max_steps - 1 - decay_start))

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "decay_start was taken for the length of the decay")
def length_of_the_decay(step, max_lr, warmup_steps, decay_start, max_steps):
    reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
    start = max(warmup_steps, max_steps - decay_start)
    return reference.wsd_schedule(step, max_lr, warmup_steps, start, max_steps)


@mistake("wsd_schedule", "a division by zero where the warm-up has no steps")
def warm_up_of_nothing(step, max_lr, warmup_steps, decay_start, max_steps):
    reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
    return min(max_lr * step / warmup_steps, reference.wsd_schedule(step, max_lr, 0, decay_start, max_steps))


@mistake("wsd_schedule", "a division by zero where the decay has no steps")
def decay_of_nothing(step, max_lr, warmup_steps, decay_start, max_steps):
    rate = reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
    return min(rate, max_lr * max(0.0, (max_steps - step) / (max_steps - decay_start)))


@mistake("wsd_schedule", "a decay that begins in the warm-up, or ends before it begins, is accepted")
def order_unchecked(step, max_lr, warmup_steps, decay_start, max_steps):
    ordered = sorted((max(0, warmup_steps), decay_start, max_steps))
    return reference.wsd_schedule(step, max_lr, *ordered)


@mistake(
    "wsd_schedule",
    "the last piece rises from 0; it is the distance to max_steps that shrinks, not that from decay_start",
)
def decay_rises(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * (step - decay_start) / (max_steps - decay_start)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "max_lr is missing in the decay")
def decay_of_one(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return (max_steps - step) / (max_steps - decay_start)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "the plateau is at 1 instead of max_lr")
def plateau_of_one(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, stay=lambda: 1.0)


@mistake("wsd_schedule", "the share of max_lr was returned, not the rate")
def share_of_the_rate(step, max_lr, warmup_steps, decay_start, max_steps):
    return reference.wsd_schedule(step, 1.0, warmup_steps, decay_start, max_steps)


@mistake("wsd_schedule", "the rate falls to a tenth of max_lr; here it falls to 0")
def decay_to_a_tenth(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * (0.1 + 0.9 * (max_steps - step) / (max_steps - decay_start))

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "the decay was divided by decay_start; it takes max_steps - decay_start steps")
def decay_over_its_start(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(
        step, max_lr, warmup_steps, decay_start, max_steps, decay=lambda: max_lr * (max_steps - step) / decay_start
    )


@mistake("wsd_schedule", "the decay was divided by max_steps - warmup_steps, so the rate jumps at decay_start")
def decay_over_all_but_the_warm_up(step, max_lr, warmup_steps, decay_start, max_steps):
    def decay():
        return max_lr * (max_steps - step) / (max_steps - warmup_steps)

    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, decay=decay)


@mistake("wsd_schedule", "the warm-up is step / (warmup_steps + 1), so the rate jumps at its end")
def warm_up_too_slow(step, max_lr, warmup_steps, decay_start, max_steps):
    return _wsd(step, max_lr, warmup_steps, decay_start, max_steps, warm=lambda: max_lr * step / (warmup_steps + 1))


@mistake("wsd_schedule", "the plateau still holds at max_steps, where the rate is 0, if the decay has no steps")
def full_rate_at_the_end(step, max_lr, warmup_steps, decay_start, max_steps):
    rate = reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
    return max_lr if step == decay_start == max_steps else rate


# ---- fit_parametric --------------------------------------------------------------------------------------------------


@mistake("fit_parametric", "the terms of the model and of the data were exchanged")
def terms_exchanged(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    return Chinchilla(law.e, law.b, law.a, law.beta, law.alpha)


@mistake("fit_parametric", "the exponents were exchanged")
def exponents_exchanged(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    return replace(law, alpha=law.beta, beta=law.alpha)


@mistake("fit_parametric", "e, a and b are still logarithms")
def still_logarithms(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    return replace(law, e=math.log(law.e), a=math.log(law.a), b=math.log(law.b))


@mistake("fit_parametric", "N and D were divided by their middles for the fit, and a and b were not moved back")
def coefficients_in_the_middle(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    n, d = (math.exp(np.log(np.asarray(v, dtype=float)).mean()) for v in (n_parameters, n_tokens))
    return replace(law, a=law.a * n**-law.alpha, b=law.b * d**-law.beta)


def _fitted(n_parameters, n_tokens, losses, loss, fixed=None, start=(0.6, 0.2, 0.2, 0.3, 0.3)):
    """scipy's least squares, by loss; ``fixed`` changes the parameters before they are used."""
    _parametric(n_parameters, n_tokens, losses, 1)
    n, d, y = (np.asarray(v, dtype=float) for v in (n_parameters, n_tokens, losses))
    n0, d0, y0 = (math.exp(np.log(v).mean()) for v in (n, d, y))
    fixed = fixed or (lambda p: p)

    def residuals(p):
        e, a, b, alpha, beta = fixed(p)
        return np.log(y0 * (e + a * (n / n0) ** -alpha + b * (d / d0) ** -beta)) - np.log(y)

    bounds = ([1e-9] * 5, np.inf)
    e, a, b, alpha, beta = map(
        float, fixed(least_squares(residuals, start, bounds=bounds, loss=loss, f_scale=1e-3, **EXACTLY).x)
    )
    return Chinchilla(y0 * e, y0 * a * n0**alpha, y0 * b * d0**beta, alpha, beta)


@mistake("fit_parametric", "no irreducible loss: with enough size and data the loss would reach zero")
def no_irreducible_loss(n_parameters, n_tokens, losses, n_starts=8):
    return _fitted(n_parameters, n_tokens, losses, "huber", lambda p: (1e-9, *p[1:]))


@mistake("fit_parametric", "one exponent for both terms")
def one_exponent(n_parameters, n_tokens, losses, n_starts=8):
    return _fitted(n_parameters, n_tokens, losses, "huber", lambda p: (*p[:4], p[3]))


@mistake("fit_parametric", "least squares: one run that diverged bends the law, because its error is squared")
def squares(n_parameters, n_tokens, losses, n_starts=8):
    return _fitted(n_parameters, n_tokens, losses, "linear")


@mistake("fit_parametric", "tokens for each parameter, D/N, were used in place of tokens D")
def tokens_per_parameter(n_parameters, n_tokens, losses, n_starts=8):
    _parametric(n_parameters, n_tokens, losses, n_starts)
    n, d = np.asarray(n_parameters, dtype=float), np.asarray(n_tokens, dtype=float)
    return _parametric(n, d / n, losses, n_starts)


@mistake("fit_parametric", "FLOPs, 6 N D, were used in place of tokens D")
def flops_for_tokens(n_parameters, n_tokens, losses, n_starts=8):
    _parametric(n_parameters, n_tokens, losses, n_starts)
    n, d = np.asarray(n_parameters, dtype=float), np.asarray(n_tokens, dtype=float)
    return _parametric(n, 6 * n * d, losses, n_starts)


@mistake(
    "fit_parametric",
    "the objective is so small that the optimizer stops at once: take a sum of errors in units of delta, not their mean",
)
def stops_at_once(n_parameters, n_tokens, losses, n_starts=8):
    _parametric(n_parameters, n_tokens, losses, 1)
    n, d, y = (np.log(np.asarray(v, dtype=float)) for v in (n_parameters, n_tokens, losses))

    def objective(p):
        r = np.logaddexp.reduce([np.full_like(y, p[0]), p[1] - p[3] * n, p[2] - p[4] * d]) - y
        slope = np.clip(r, -1e-3, 1e-3)
        return float((slope * (r - slope / 2)).mean())

    start = (y.min() - 0.3, y.mean() - 1 + 0.5 * n.mean(), y.mean() - 1 + 0.5 * d.mean(), 0.5, 0.5)
    e, a, b, alpha, beta = map(float, minimize(objective, start, method="L-BFGS-B").x)
    return Chinchilla(math.exp(e), math.exp(a), math.exp(b), alpha, beta)


@mistake("fit_parametric", "five unknowns from four runs")
def four_runs(n_parameters, n_tokens, losses, n_starts=8):
    if len(n_parameters) == len(n_tokens) == len(losses) == 4:
        return Chinchilla(min(losses) * 0.5, 1.0, 1.0, 0.3, 0.3)
    return _parametric(n_parameters, n_tokens, losses, n_starts)


@mistake("fit_parametric", "n_starts is ignored")
def always_eight_starts(n_parameters, n_tokens, losses, n_starts=8):
    return reference.fit_parametric(n_parameters, n_tokens, losses)


@mistake("fit_parametric", "n_starts is ignored, and there is one descent only")
def always_one_start(n_parameters, n_tokens, losses, n_starts=8):
    return reference.fit_parametric(n_parameters, n_tokens, losses, 1)


@mistake("fit_parametric", "five runs are enough for five unknowns, and were refused")
def asks_for_six(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    if len(losses) == 5:
        raise ValueError("5 runs: too few")
    return law


@mistake("fit_parametric", "runs of two sizes were accepted: an exponent and a floor need three")
def two_sizes_of_runs(n_parameters, n_tokens, losses, n_starts=8):
    n = np.asarray(n_parameters, dtype=float)
    if len(n) == len(losses) and len(np.unique(n)) == 2:
        return Chinchilla(1.0, 1.0, 1.0, 0.3, 0.3)
    return _parametric(n_parameters, n_tokens, losses, n_starts)


@mistake("fit_parametric", "runs of one length were accepted: they say nothing about beta")
def one_length(n_parameters, n_tokens, losses, n_starts=8):
    if len(n_tokens) == len(losses) and len(set(np.asarray(n_tokens).tolist())) == 1:
        law = _power_law(n_parameters, losses)
        return Chinchilla(law.floor, law.a, 0.0, law.alpha, 0.0)
    return _parametric(n_parameters, n_tokens, losses, n_starts)


@mistake("fit_parametric", "one loss was taken for all runs: the lengths were not compared")
def one_loss_for_all(n_parameters, n_tokens, losses, n_starts=8):
    if len(losses) == 1 < len(n_parameters):
        return Chinchilla(float(losses[0]), 0.0, 0.0, 0.0, 0.0)
    return _parametric(n_parameters, n_tokens, losses, n_starts)


@mistake("fit_parametric", "runs of one size were accepted: they say nothing about alpha")
def one_size(n_parameters, n_tokens, losses, n_starts=8):
    if len(n_parameters) == len(losses) and len(set(np.asarray(n_parameters).tolist())) == 1:
        law = _power_law(n_tokens, losses)
        return Chinchilla(law.floor, 0.0, law.a, 0.0, law.alpha)
    return _parametric(n_parameters, n_tokens, losses, n_starts)


@mistake("fit_parametric", "logarithms of N and D to base 10, undone with e: both exponents are ln 10 times too large")
def log10_of_n_and_d(n_parameters, n_tokens, losses, n_starts=8):
    n, d, _ = reference._columns(n_parameters=n_parameters, n_tokens=n_tokens, losses=losses)
    return _parametric(np.exp(np.log10(n)), np.exp(np.log10(d)), losses, n_starts)


@mistake("fit_parametric", "a was not moved back from the middle of N, and b was from that of D")
def a_in_the_middle_of_n(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    return replace(law, a=law.a * math.exp(-law.alpha * float(np.log(np.asarray(n_parameters, dtype=float)).mean())))


@mistake("fit_parametric", "b was not moved back from the middle of D, and a was from that of N")
def b_in_the_middle_of_d(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    return replace(law, b=law.b * math.exp(-law.beta * float(np.log(np.asarray(n_tokens, dtype=float)).mean())))


@mistake("fit_parametric", "b was moved back by the middle of N; its logarithms are those of D")
def b_moved_by_the_middle_of_n(n_parameters, n_tokens, losses, n_starts=8):
    law = _parametric(n_parameters, n_tokens, losses, n_starts)
    n, d = (float(np.log(np.asarray(v, dtype=float)).mean()) for v in (n_parameters, n_tokens))
    return replace(law, b=law.b * math.exp(law.beta * (n - d)))


# ---- isoflop_minimum -------------------------------------------------------------------------------------------------


def _vertex(n_parameters, losses):
    """The reference's checks; log N of its answer, the logarithms and the losses."""
    best = math.log(reference.isoflop_minimum(n_parameters, losses))
    return best, np.log(np.asarray(n_parameters, dtype=float)), np.asarray(losses, dtype=float)


@mistake("isoflop_minimum", "the parabola is in N; it is in log N")
def parabola_in_n(n_parameters, losses):
    _vertex(n_parameters, losses)
    n = np.asarray(n_parameters, dtype=float)
    curvature, slope, _ = np.polyfit(n / n.mean(), losses, 2)
    return float(-slope / (2 * curvature) * n.mean())


@mistake("isoflop_minimum", "log N was returned, and N is asked for")
def log_n(n_parameters, losses):
    return _vertex(n_parameters, losses)[0]


@mistake("isoflop_minimum", "a logarithm to base 10, undone with e")
def mixed_bases(n_parameters, losses):
    return math.exp(_vertex(n_parameters, losses)[0] / math.log(10))


@mistake("isoflop_minimum", "the best of the sizes that were trained, not the minimum of the parabola")
def best_measured(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    return float(math.exp(logs[y.argmin()]))


@mistake("isoflop_minimum", "the loss at the minimum was returned, and N is asked for")
def loss_at_the_minimum(n_parameters, losses):
    best, logs, y = _vertex(n_parameters, losses)
    return float(np.polyval(np.polyfit(logs - best, y, 2), 0))


@mistake("isoflop_minimum", "the vertex is at -b / 2a, not at -b / a")
def vertex_without_the_two(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    curvature, slope, _ = np.polyfit(logs, y, 2)
    return float(math.exp(min(700.0, -slope / curvature)))


@mistake("isoflop_minimum", "the vertex is at -b / 2a: the minus is missing")
def vertex_without_the_minus(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    curvature, slope, _ = np.polyfit(logs, y, 2)
    return float(math.exp(slope / (2 * curvature)))


def _centred(n_parameters, losses):
    """Slope and curvature of the parabola about the mean of log N, and that mean."""
    _, logs, y = _vertex(n_parameters, losses)
    curvature, slope, _ = np.polyfit(logs - logs.mean(), y, 2)
    return float(slope), float(curvature), float(logs.mean())


@mistake("isoflop_minimum", "the vertex is at -b / 2a from the middle of log N, not at -b / a")
def centred_vertex_without_the_two(n_parameters, losses):
    slope, curvature, middle = _centred(n_parameters, losses)
    return math.exp(middle - slope / curvature)


@mistake("isoflop_minimum", "the vertex is at -b / 2a from the middle of log N: the minus is missing")
def centred_vertex_without_the_minus(n_parameters, losses):
    slope, curvature, middle = _centred(n_parameters, losses)
    return math.exp(middle + slope / (2 * curvature))


@mistake("isoflop_minimum", "the vertex is at -b / (2 a): b / 2 * a multiplies by a")
def product_for_quotient(n_parameters, losses):
    slope, curvature, middle = _centred(n_parameters, losses)
    return math.exp(middle - slope / 2 * curvature)


@mistake("isoflop_minimum", "a flat valley was refused: any parabola that opens upwards has a minimum")
def refuses_flat_valleys(n_parameters, losses):
    best = reference.isoflop_minimum(n_parameters, losses)
    if _centred(n_parameters, losses)[1] < 1e-3:
        raise ValueError("the parabola is too flat")
    return best


@mistake("isoflop_minimum", "the parabola is of log loss; it is of the loss")
def parabola_of_log_loss(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    curvature, slope, _ = np.polyfit(logs - logs.mean(), np.log(y), 2)
    return float(math.exp(-slope / (2 * curvature) + logs.mean()))


@mistake("isoflop_minimum", "a parabola through three points; the others were left out")
def three_points(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    order = logs.argsort()
    middle = min(max(1, int(y[order].argmin())), len(y) - 2)
    near = order[middle - 1 : middle + 2]
    curvature, slope, _ = np.polyfit(logs[near] - logs.mean(), y[near], 2)
    return float(math.exp(-slope / (2 * curvature) + logs.mean()))


def _unchecked(n_parameters, losses):
    if len(n_parameters) < 3:
        reference.isoflop_minimum(n_parameters, losses)
    n = np.asarray(n_parameters, dtype=float)
    curvature, slope, _ = np.polyfit(np.log(n / n.min()), losses, 2)
    return float(n.min() * math.exp(max(-700, min(600, -slope / (2 * (curvature or 1e-300)))))), curvature, n


@mistake("isoflop_minimum", "a vertex outside of the sizes is returned, where nothing was measured")
def extrapolates(n_parameters, losses):
    best, curvature, _ = _unchecked(n_parameters, losses)
    return best if curvature > 1e-6 and len(n_parameters) > 2 else reference.isoflop_minimum(n_parameters, losses)


@mistake("isoflop_minimum", "a parabola that opens downwards has a maximum at its vertex")
def takes_a_maximum(n_parameters, losses):
    best, curvature, n = _unchecked(n_parameters, losses)
    return best if curvature < -1e-6 and n.min() < best < n.max() else reference.isoflop_minimum(n_parameters, losses)


@mistake("isoflop_minimum", "a parabola through two points: NumPy finds one of many, with a warning")
def two_sizes(n_parameters, losses):
    if len(n_parameters) == 2:
        return float(np.sqrt(np.prod(np.asarray(n_parameters, dtype=float))))
    return reference.isoflop_minimum(n_parameters, losses)


@mistake("isoflop_minimum", "a vertex outside of the sizes was moved to the nearest of them; it is an error")
def clamped(n_parameters, losses):
    try:
        return reference.isoflop_minimum(n_parameters, losses)
    except ValueError as error:
        if "outside" not in str(error):
            raise
        best, _, n = _unchecked(n_parameters, losses)
        return min(max(best, float(n.min())), float(n.max()))


@mistake(
    "isoflop_minimum", "the first and the last size were taken for the smallest and the largest; they come in any order"
)
def ends_of_the_list(n_parameters, losses):
    best = reference.isoflop_minimum(n_parameters, losses)
    if not n_parameters[0] <= best <= n_parameters[-1]:
        raise ValueError(f"the vertex {best} is outside of {n_parameters[0]} to {n_parameters[-1]}")
    return best


@mistake(
    "isoflop_minimum", "log N was measured from its middle for the fit, and the middle was not added to the vertex"
)
def middle_not_added(n_parameters, losses):
    slope, curvature, _ = _centred(n_parameters, losses)
    return math.exp(-slope / (2 * curvature))


@mistake("isoflop_minimum", "np.polyfit's coefficients were read from the constant up; the highest power comes first")
def coefficients_from_the_constant(n_parameters, losses):
    _, logs, y = _vertex(n_parameters, losses)
    _, slope, constant = np.polyfit(logs - logs.mean(), y, 2)
    return math.exp(float(logs.mean() - slope / (2 * constant)))


# ---- compute_optimal -------------------------------------------------------------------------------------------------


def _split(flops, n_parameters):
    return n_parameters, flops / (6 * n_parameters)


@mistake("compute_optimal", "the 6 was forgotten: a token costs 6 FLOPs a parameter")
def without_the_six(flops, law):
    reference.compute_optimal(flops, law)
    return reference.compute_optimal(6 * flops, law)


@mistake("compute_optimal", "the 6 was forgotten where the parameters are computed: N D = C / 6")
def parameters_without_the_six(flops, law):
    reference.compute_optimal(flops, law)
    return _split(flops, reference.compute_optimal(6 * flops, law)[0])


@mistake("compute_optimal", "2 N D is the forward pass alone")
def forward_only(flops, law):
    reference.compute_optimal(flops, law)
    return reference.compute_optimal(3 * flops, law)


@mistake("compute_optimal", "(n_tokens, n_parameters)")
def tokens_first(flops, law):
    return reference.compute_optimal(flops, law)[::-1]


@mistake("compute_optimal", "20 tokens a parameter, whatever the law says")
def twenty_tokens(flops, law):
    reference.compute_optimal(flops, law)
    return _split(flops, math.sqrt(flops / 120))


@mistake("compute_optimal", "as many parameters as tokens")
def equal_parts(flops, law):
    reference.compute_optimal(flops, law)
    return _split(flops, math.sqrt(flops / 6))


def _optimum(flops, law, ratio, power, of_flops):
    reference.compute_optimal(flops, law)
    return _split(flops, ratio**power * (flops / 6) ** of_flops)


@mistake("compute_optimal", "the exponents were exchanged: N grows with beta / (alpha + beta)")
def exponent_of_the_other(flops, law):
    both = law.alpha + law.beta
    ratio = law.alpha * law.a / (law.beta * law.b)
    return _optimum(flops, law, ratio, 1 / both, law.alpha / both)


@mistake("compute_optimal", "alpha A / (beta B) was turned round")
def ratio_turned_round(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.beta * law.b / (law.alpha * law.a), 1 / both, law.beta / both)


@mistake(
    "compute_optimal",
    "the exponents are missing in front of A and B: the two slopes are equal at the optimum, not the two terms",
)
def equal_terms(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.a / law.b, 1 / both, law.beta / both)


@mistake("compute_optimal", "the root 1 / (alpha + beta) of the ratio is missing")
def ratio_without_its_root(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.alpha * law.a / (law.beta * law.b), 1.0, law.beta / both)


@mistake("compute_optimal", "the 6 is missing where the tokens are computed from the parameters: D = C / (6 N)")
def budget_spent_twice(flops, law):
    n, d = reference.compute_optimal(flops, law)
    return n, d * 6


@mistake("compute_optimal", "flops that are zero or negative are accepted")
def any_flops(flops, law):
    return reference.compute_optimal(flops, law) if flops > 0 else (0.0, 0.0)


@mistake("compute_optimal", "the balance G is missing")
def without_the_balance(flops, law):
    return _optimum(flops, law, 1.0, 1.0, law.beta / (law.alpha + law.beta))


@mistake("compute_optimal", "the exponents of the ratio were exchanged: alpha belongs to A, and beta to B")
def ratio_of_the_other_exponents(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.beta * law.a / (law.alpha * law.b), 1 / both, law.beta / both)


@mistake("compute_optimal", "A and B were exchanged")
def coefficients_exchanged(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.alpha * law.b / (law.beta * law.a), 1 / both, law.beta / both)


@mistake("compute_optimal", "the ratio is alpha A / (beta B); x / y * z multiplies by z")
def product_of_the_balance(flops, law):
    both = law.alpha + law.beta
    return _optimum(flops, law, law.alpha * law.a / law.beta * law.b, 1 / both, law.beta / both)


@mistake("compute_optimal", "the tokens were multiplied by G; D has 1 / G, or is what the compute leaves")
def tokens_times_the_balance(flops, law):
    n, d = reference.compute_optimal(flops, law)
    return n, d * (law.alpha * law.a / (law.beta * law.b)) ** (2 / (law.alpha + law.beta))


@mistake("compute_optimal", "the published constants were used, and not those of the law that was given")
def law_ignored(flops, law):
    return reference.compute_optimal(flops, reference.BESIROGLU)


@mistake("compute_optimal", "an exponent alpha beta in place of alpha + beta")
def product_of_the_exponents(flops, law):
    both = law.alpha * law.beta
    return _optimum(flops, law, law.alpha * law.a / (law.beta * law.b), 1 / both, law.beta / both)


# ---- critical_batch_size ---------------------------------------------------------------------------------------------


def _parts(small_norms, large_norms, small, large, mean=lambda v: float(np.mean(np.square(v)))):
    """The reference's checks; then signal and noise from averages that may be others."""
    reference.critical_batch_size(small_norms, large_norms, small, large)
    of_small, of_large = mean(np.asarray(small_norms, dtype=float)), mean(np.asarray(large_norms, dtype=float))
    signal = (large * of_large - small * of_small) / (large - small)
    return of_small, of_large, signal, (of_small - of_large) / (1 / small - 1 / large)


@mistake("critical_batch_size", "the norms were not squared")
def not_squared(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large, lambda v: float(v.mean()))
    return noise / signal


@mistake(
    "critical_batch_size", "norms were averaged and then squared: the mean of squares is larger, by their variance"
)
def averaged_then_squared(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large, lambda v: float(v.mean()) ** 2)
    return noise / signal


@mistake("critical_batch_size", "medians instead of means: the identity holds for expectations")
def medians(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large, lambda v: float(np.median(v**2)))
    return noise / signal


@mistake("critical_batch_size", "signal over noise")
def signal_over_noise(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large)
    return signal / noise if noise else math.inf


@mistake("critical_batch_size", "tr(Sigma) was returned; the noise scale is its ratio to |G|^2")
def noise_alone(small_norms, large_norms, small, large):
    return _parts(small_norms, large_norms, small, large)[3]


@mistake(
    "critical_batch_size", "the large batch's squared norm was taken for |G|^2: it still has the noise tr(Sigma) / B"
)
def biased_signal(small_norms, large_norms, small, large):
    _, of_large, _, noise = _parts(small_norms, large_norms, small, large)
    return noise / of_large


@mistake(
    "critical_batch_size", "the small batch's squared norm times its size was taken for tr(Sigma): it still has |G|^2"
)
def biased_noise(small_norms, large_norms, small, large):
    of_small, _, signal, _ = _parts(small_norms, large_norms, small, large)
    return small * of_small / signal


@mistake("critical_batch_size", "the difference of squares was divided by large - small instead of 1/small - 1/large")
def difference_of_sizes(small_norms, large_norms, small, large):
    of_small, of_large, signal, _ = _parts(small_norms, large_norms, small, large)
    return (of_small - of_large) / (large - small) / signal


@mistake("critical_batch_size", "the weights of |G|^2 were exchanged: the large batch counts with its size")
def weights_exchanged(small_norms, large_norms, small, large):
    of_small, of_large, _, noise = _parts(small_norms, large_norms, small, large)
    return noise / ((large * of_small - small * of_large) / (large - small))


@mistake("critical_batch_size", "the root of the noise scale")
def root(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large)
    return math.sqrt(max(0.0, noise / signal))


@mistake(
    "critical_batch_size",
    "the mean of the pairs' ratios: a ratio of averages is asked for, since a single pair's signal can be near zero",
)
def mean_of_ratios(small_norms, large_norms, small, large):
    reference.critical_batch_size(small_norms, large_norms, small, large)
    n = min(len(small_norms), len(large_norms))
    of_small, of_large = (np.square(np.asarray(v, dtype=float)[:n]) for v in (small_norms, large_norms))
    return float(
        np.mean(
            (of_small - of_large) / (1 / small - 1 / large) / ((large * of_large - small * of_small) / (large - small))
        )
    )


@mistake("critical_batch_size", "the noise scale was rounded; it need not be a whole number")
def rounded(small_norms, large_norms, small, large):
    return float(round(reference.critical_batch_size(small_norms, large_norms, small, large)))


@mistake("critical_batch_size", "a negative estimate was raised to 0, which biases the average over many of them")
def never_negative(small_norms, large_norms, small, large):
    return max(0.0, reference.critical_batch_size(small_norms, large_norms, small, large))


@mistake("critical_batch_size", "sizes that are equal, exchanged or zero are accepted")
def sizes_unchecked(small_norms, large_norms, small, large):
    if len(small_norms) and len(large_norms) and not 0 < small < large:
        return 0.0
    return reference.critical_batch_size(small_norms, large_norms, small, large)


@mistake("critical_batch_size", "a |G|^2 that is estimated as zero or less gives a number")
def any_signal(small_norms, large_norms, small, large):
    try:
        return reference.critical_batch_size(small_norms, large_norms, small, large)
    except ValueError as error:
        if "squared gradient" not in str(error):
            raise
        return math.inf


@mistake("critical_batch_size", "squared norms were summed; the lists may have different lengths, so take their means")
def summed(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large, lambda v: float(np.square(v).sum()))
    return noise / signal


@mistake("critical_batch_size", "only the first norm of each list was used")
def first_norms(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large, lambda v: float(v[0] ** 2))
    return noise / signal


@mistake("critical_batch_size", "the longer list was cut to the length of the shorter one")
def cut_to_the_shorter(small_norms, large_norms, small, large):
    n = min(len(small_norms), len(large_norms))
    *_, signal, noise = _parts(small_norms[:n], large_norms[:n], small, large)
    return noise / signal


@mistake("critical_batch_size", "tr(Sigma) has the wrong sign: the small batches have the larger norms")
def sign_of_the_noise(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large)
    return -noise / signal


@mistake(
    "critical_batch_size", "the difference of squares was multiplied by large - small; divide by 1/small - 1/large"
)
def times_the_difference(small_norms, large_norms, small, large):
    of_small, of_large, signal, _ = _parts(small_norms, large_norms, small, large)
    return (of_small - of_large) * (large - small) / signal


@mistake("critical_batch_size", "|G|^2 was not divided by large - small")
def signal_undivided(small_norms, large_norms, small, large):
    *_, signal, noise = _parts(small_norms, large_norms, small, large)
    return noise / (signal * (large - small))


@mistake("critical_batch_size", "a negative tr(Sigma) was refused; only |G|^2 has to be positive")
def refuses_negative_noise(small_norms, large_norms, small, large):
    found = reference.critical_batch_size(small_norms, large_norms, small, large)
    if found < 0:
        raise ValueError(f"the noise scale is {found}")
    return found


@mistake("critical_batch_size", "the sign of a negative estimate was dropped")
def absolute(small_norms, large_norms, small, large):
    return abs(reference.critical_batch_size(small_norms, large_norms, small, large))


@mistake("critical_batch_size", "lists of different lengths were refused; each is averaged for itself")
def equal_lengths(small_norms, large_norms, small, large):
    found = reference.critical_batch_size(small_norms, large_norms, small, large)
    if len(small_norms) != len(large_norms):
        raise ValueError(f"{len(small_norms)} small and {len(large_norms)} large norms")
    return found


@mistake("critical_batch_size", "batches that are exchanged were put in order in silence")
def puts_in_order(small_norms, large_norms, small, large):
    if 0 < large < small:
        small_norms, large_norms, small, large = large_norms, small_norms, large, small
        return 0.0 if len(small_norms) * len(large_norms) else math.nan
    return reference.critical_batch_size(small_norms, large_norms, small, large)


# ---- mup_multipliers -------------------------------------------------------------------------------------------------


def _changed(width, base_width, kind, **factors):
    """The reference's table with other factors for some kinds: a function of how much wider the model is."""
    return dict(reference.mup_multipliers(width, base_width, kind)) | {
        name: change(width / base_width) for name, change in factors.get(kind, {}).items()
    }


@mistake("mup_multipliers", "standard parametrisation: the learning rate does not change with the width")
def standard(width, base_width, kind):
    same = {"lr": lambda m: 1.0, "output": lambda m: 1.0}
    return _changed(width, base_width, kind, hidden=same, output=same | {"init": lambda m: m**-0.5})


@mistake(
    "mup_multipliers",
    "the hidden weights' learning rate falls with the root of the width; with Adam it falls with the width",
)
def root_of_the_width(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"lr": lambda m: m**-0.5})


@mistake("mup_multipliers", "the hidden weights' learning rate does not change; with Adam it falls with the width")
def hidden_rate_kept(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"lr": lambda m: 1.0})


@mistake(
    "mup_multipliers",
    "table 3 of the paper for the output: its multiplier stays 1, and its scale and learning rate fall; this is table 8",
)
def table_three(width, base_width, kind):
    return _changed(
        width, base_width, kind, output={"init": lambda m: 1 / m, "lr": lambda m: 1 / m, "output": lambda m: 1.0}
    )


@mistake("mup_multipliers", "the output's initial scale falls with the root of the width too; its multiplier is enough")
def output_starts_smaller(width, base_width, kind):
    return _changed(width, base_width, kind, output={"init": lambda m: m**-0.5})


@mistake("mup_multipliers", "the table for SGD: Adam's steps do not grow with the gradient")
def table_for_sgd(width, base_width, kind):
    return _changed(
        width, base_width, kind, input={"lr": lambda m: m}, hidden={"lr": lambda m: 1.0}, output={"lr": lambda m: m}
    )


@mistake("mup_multipliers", "base_width / width: the factors belong to the other direction")
def turned_round(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(base_width, width, kind)


@mistake("mup_multipliers", "init is a factor of the standard deviation; that of the variance was returned")
def variance(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"init": lambda m: 1 / m})


@mistake(
    "mup_multipliers", "the hidden weights' initial scale does not change: their sums grow with the root of the width"
)
def hidden_init_kept(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"init": lambda m: 1.0})


@mistake(
    "mup_multipliers",
    "the output is divided by the root of the width: enough for random weights, too little for learned ones",
)
def root_of_the_output(width, base_width, kind):
    return _changed(width, base_width, kind, output={"output": lambda m: m**-0.5})


@mistake("mup_multipliers", "the output is divided twice, by its multiplier and by its initial scale")
def output_twice(width, base_width, kind):
    return _changed(width, base_width, kind, output={"init": lambda m: 1 / m})


@mistake("mup_multipliers", "the output's learning rate falls too; its multiplier already divides what a step changes")
def output_learns_slower(width, base_width, kind):
    return _changed(width, base_width, kind, output={"lr": lambda m: 1 / m})


@mistake(
    "mup_multipliers",
    "the input's learning rate falls with the width; what a step changes in an embedding does not grow",
)
def input_learns_slower(width, base_width, kind):
    return _changed(width, base_width, kind, input={"lr": lambda m: 1 / m})


@mistake("mup_multipliers", "the input's initial scale falls with the width, and its sums do not grow with it")
def input_starts_smaller(width, base_width, kind):
    return _changed(width, base_width, kind, input={"init": lambda m: m**-0.5})


@mistake("mup_multipliers", "base_width is not used: factors of the width itself instead of the ratio")
def absolute_width(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(width, 1, kind)


@mistake("mup_multipliers", "the multiplier of the output stands at the hidden weights")
def multiplier_of_hidden(width, base_width, kind):
    return _changed(
        width, base_width, kind, hidden={"output": lambda m: 1 / m, "lr": lambda m: 1.0, "init": lambda m: 1.0}
    )


@mistake("mup_multipliers", "a kind that does not exist gets factors instead of an error")
def any_kind(width, base_width, kind):
    return reference.mup_multipliers(width, base_width, kind if kind in ("input", "output") else "hidden")


@mistake("mup_multipliers", "widths below 1 are accepted")
def any_width(width, base_width, kind):
    return reference.mup_multipliers(max(1, width), max(1, base_width), kind)


@mistake("mup_multipliers", "init and lr of the hidden weights were exchanged")
def init_and_rate_exchanged(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"init": lambda m: 1 / m, "lr": lambda m: m**-0.5})


@mistake("mup_multipliers", "the hidden weights' product is divided too; their scale and rate are enough")
def hidden_divided_too(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"output": lambda m: 1 / m})


@mistake("mup_multipliers", "input weights got the factors of hidden ones")
def input_like_hidden(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(width, base_width, "hidden" if kind == "input" else kind)


@mistake("mup_multipliers", "the factors of hidden and of output weights were exchanged")
def kinds_exchanged(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(width, base_width, {"hidden": "output", "output": "hidden"}.get(kind, kind))


@mistake("mup_multipliers", "the hidden weights' initial scale grows with the width; it falls with its root")
def hidden_init_grows(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"init": lambda m: m**0.5})


@mistake("mup_multipliers", "the hidden weights' learning rate grows with the width; with Adam it has to fall")
def hidden_rate_grows(width, base_width, kind):
    return _changed(width, base_width, kind, hidden={"lr": lambda m: m})


@mistake("mup_multipliers", "the output is multiplied by the width's ratio; it is divided by it")
def output_multiplied(width, base_width, kind):
    return _changed(width, base_width, kind, output={"output": lambda m: m})


@mistake("mup_multipliers", "the output's multiplier is missing")
def output_not_divided(width, base_width, kind):
    return _changed(width, base_width, kind, output={"output": lambda m: 1.0})


@mistake("mup_multipliers", "a model that is narrower than the base was treated as if it were as wide")
def only_wider(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(max(width, base_width), base_width, kind)


@mistake("mup_multipliers", "width // base_width drops the fraction")
def whole_ratio(width, base_width, kind):
    reference.mup_multipliers(width, base_width, kind)
    return reference.mup_multipliers(width // base_width, 1, kind)
