"""What goes wrong when people fit a scaling law, or carry a batch and a learning rate to another size."""

import math

import numpy as np
from scipy.optimize import least_squares

from lib.given.models.laws import Chinchilla, PowerLaw
from lib.workbook.grading import edits
from solutions import scaling_laws as reference


def _once(fit, n_columns):
    """``fit``, computed once for the same numbers: a diagnosis has a few seconds for mistakes that share most fits."""
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


def _checked(x, y):
    _power_law(x, y)
    return np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)


def _line(x, y, floor=0.0):
    """The least-squares line through the logarithms of x and of y above its floor."""
    slope, height = np.polyfit(np.log(x), np.log(y - floor), 1)
    return PowerLaw(math.exp(height), -float(slope), float(floor))


edits("""
# fit_power_law
a line through the logarithms: it has no floor
+ return _line(*_checked(x, y))
the lowest y was taken for the floor; the floor is below everything that was measured
+ x, y = _checked(x, y)
+ return _line(x, y, floor=0.999 * y.min())
least squares: one bad run bends the law, because its error is squared
+ return _bounded(*_checked(x, y), "linear")
differences of y instead of differences of log y: the small values, at the large x, count for nothing
+ return _bounded(*_checked(x, y), "huber", in_logs=False)
the slope of the falling line was returned as alpha; alpha is minus that slope
+ from dataclasses import replace
+ law = _power_law(x, y)
+ return replace(law, alpha=-law.alpha)
the logarithm of a was returned
+ from dataclasses import replace
+ law = _power_law(x, y)
+ return replace(law, a=math.log(law.a))
the logarithm of the floor was returned
+ from dataclasses import replace
+ law = _power_law(x, y)
+ return replace(law, floor=math.log(law.floor))
x was divided by its middle for the fit, and a was not moved back to x = 1
+ from dataclasses import replace
+ law = _power_law(x, y)
+ return replace(law, a=law.a * math.exp(np.log(np.asarray(x, dtype=np.float64)).mean()) ** -law.alpha)
the floor may become negative: a loss below zero for large x
+ law, (x, y) = _power_law(x, y), _checked(x, y)
+ if law.floor > 1e-3 * y.min():
+     return law
+ floors = [-v * y.min() for v in (0.1, 0.3, 1.0, 3.0)]
+ return min((_line(x, y, floor) for floor in floors), key=lambda fit: np.abs(np.log(fit(x) / y)).sum())
the points were taken to be in the order of x; the first and the last are not always the ends
+ law, (x, y) = _power_law(x, y), _checked(x, y)
+ if (x[0] < x[-1]) == (y[0] > y[-1]) and (np.sort(x) == x).all():
+     return law
+ return _line(x, y, 0.9 * min(y[0], y[-1], y.min()))
alpha was restricted to positive values, and y may rise
+ law = _power_law(x, y)
+ return law if law.alpha > 0 else PowerLaw(0.0, 0.0, float(np.median(np.asarray(y))))
two points on a line decide: the law goes through the first and the last of them
+ law, (x, y) = _power_law(x, y), _checked(x, y)
+ first, last = x.argmin(), x.argmax()
+ above = y[[first, last]] - law.floor
+ if (above <= 0).any():
+     return law
+ alpha = -math.log(above[1] / above[0]) / math.log(x[last] / x[first])
+ return PowerLaw(float(above[0] * x[first] ** alpha), alpha, law.floor)
numbers that are zero, negative or not numbers are dropped in silence
+ x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
+ if x.shape == y.shape:
+     good = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
+     x, y = x[good], y[good]
+ return _power_law(x, y)
three unknowns from two different x: the number of points was checked, if at all, and not the number of different x
+ x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
+ return _line(x, y) if x.shape == y.shape and len(np.unique(x)) == 2 and (x > 0).all() else _power_law(x, y)
a logarithm of x to base 10, undone with e: alpha is ln 10 times too large
+ return reference.fit_power_law(np.exp(np.log10(_checked(x, y)[0])), y)
logarithms to base 10, undone with e
+ _power_law(x, y)
+ return reference.fit_power_law(*(np.exp(np.log10(values)) for values in _checked(x, y)))
a was moved from the middle of x to 1 with the wrong sign: a = a' * middle**alpha
+ from dataclasses import replace
+ law = _power_law(x, y)
+ return replace(law, a=law.a * math.exp(-2 * law.alpha * float(np.log(_checked(x, y)[0]).mean())))
the floor was fitted, and 0 was returned in its place
+ from dataclasses import replace
+ return replace(_power_law(x, y), floor=0.0)
alpha and floor were exchanged in the result
+ law = _power_law(x, y)
+ return PowerLaw(law.a, law.floor, law.alpha)
three different x were refused; they are enough for three unknowns
+ if np.shape(x) == np.shape(y) and len(np.unique(np.asarray(x))) == 3:
+     raise ValueError("3 different x are too few")
+ return _power_law(x, y)

# bootstrap
drawn without replacement: every fit sees all points
- points[generator.integers(len(points), size=len(points))] => generator.permutation(points)
each column was drawn for itself, so an x meets the y of another point
- points[generator.integers(len(points), size=len(points))]
+ np.column_stack([c[generator.integers(len(c), size=len(c))] for c in points.T])
a normal interval, mean and 1.64 standard deviations, instead of quantiles of the fits
- tails = [(1 - level) / 2, (1 + level) / 2]
+ from statistics import NormalDist
+ z = NormalDist().inv_cdf((1 + level) / 2)
- np.quantile([f[name] for f in found], tails)
+ (np.mean(v := [f[name] for f in found]) + np.std(v) * np.array([-z, z]))
all of 1 - level was cut off on each side, and half of it belongs there
- [(1 - level) / 2, (1 + level) / 2] => sorted([1 - level, level])
the fits' standard deviation was divided by the root of their number, as if more fits made the points more certain
- np.quantile([f[name] for f in found], tails)
+ (np.mean(v := [f[name] for f in found]) + (np.quantile(v, tails) - np.mean(v)) / math.sqrt(n))
the smallest and the largest fit, whatever the level
- [(1 - level) / 2, (1 + level) / 2] => [0.0, 1.0]
the default level is 90 %
- level: float = 0.9 => level: float = 0.95
level is ignored
- [(1 - level) / 2, (1 + level) / 2] => [0.05, 0.95]
high came before low
- [(1 - level) / 2, (1 + level) / 2] => [(1 + level) / 2, (1 - level) / 2]
n rows were drawn for a fit; n is the number of fits, and each has as many rows as there are points
- size=len(points) => size=n
half of the rows were drawn for each fit, which makes it less certain than the fit to all of them
- size=len(points) => size=max(1, len(points) // 2)
the generator was made anew for each fit: all of them draw the same rows
- generator.integers => np.random.default_rng(seed).integers
the seed is ignored
- default_rng(seed) => default_rng(0)
NumPy's global generator was seeded and used, which changes all other random numbers of the program
- np.random.default_rng(seed) => np.random.seed(seed)
- generator.integers => np.random.randint
the interval was mirrored at the fit, 2 fit - quantile: the basic interval, not that of percentiles
- _numbers(fit, points) => whole = _numbers(fit, points)
- np.quantile([f[name] for f in found], tails) => (2 * whole[name] - np.quantile([f[name] for f in found], tails[::-1]))
every fit gets columns, a fit of one parameter too
+ return reference.bootstrap(lambda *columns: fit(*columns), points, n, seed, level)
every fit gets the rows, and one of several parameters takes columns
+ return reference.bootstrap(lambda rows: fit(rows), points, n, seed, level)
a draw on which the fit fails ends everything; it is drawn again
- continue => raise
a fit that always fails gives an interval of NaN instead of an error
- _numbers(fit, points) =>
- raise ValueError(f"the fit failed on {10 * n - len(found)} of {10 * n} draws of the {len(points)} points")
+ return {"value": (math.nan, math.nan)}
n = 0 is accepted, and no fit has no interval
+ return reference.bootstrap(fit, points, max(1, n), seed, level)
a level of 0 is accepted; an interval has a share of the fits
+ return reference.bootstrap(fit, points, n, seed, 1e-9 if level == 0 else level)
a level of 1 is accepted; it has to be below 1
+ return reference.bootstrap(fit, points, n, seed, 1 - 1e-9 if level == 1 else level)
no level is refused: it has to lie between 0 and 1
+ return reference.bootstrap(fit, points, n, seed, max(1e-9, min(abs(level), 1 - 1e-9)))
a level above 1 is accepted, a percentage for example
+ return reference.bootstrap(fit, points, n, seed, level / 100 if level > 1 else level)
it gives up after 2 n draws, and 10 n are allowed
- range(10 * n) => range(2 * n)
the last row is never drawn: the upper end of integers() is left out already
- integers(len(points) => integers(len(points) - 1
the fit to the points themselves was counted as one of the n
- _numbers(fit, points) => found.append(_numbers(fit, points))
the interval goes from the smallest fit to the quantile at level: all that is left out is above
- [(1 - level) / 2, (1 + level) / 2] => [0, level]
the mean and 1.645 standard deviations of the fits: a normal interval, and of 90 % whatever the level
- np.quantile([f[name] for f in found], tails)
+ (np.mean(v := [f[name] for f in found]) + np.std(v) * np.array([-1.645, 1.645]))
n - 1 fits to draws instead of n
- len(found) == n => len(found) == max(1, n - 1)
n + 1 fits to draws instead of n
- len(found) == n => len(found) == n + 1
the fit was not tried on the points themselves first
- _numbers(fit, points) =>
one fit was refused: its interval has no width, and n has to be at least 1
+ if n == 1:
+     raise ValueError("n = 1: expected at least 2 fits")
+ return reference.bootstrap(fit, points, n, seed, level)
only the first two columns reach the fit; points may have more
- fit(*rows.T) => fit(*rows.T[:2])
only a dict was taken for a mapping; collections.abc.Mapping has others
- isinstance(result, Mapping) => isinstance(result, dict)
a draw has one row less than there are points
- size=len(points) => size=len(points) - 1

# learning_curve_prediction
a line through the logarithms: it has no floor, and falls too far
+ return _predicted(lambda x, y: float(_line(x, y)(final_step)), steps, losses, final_step)
the floor was returned: the loss after infinitely many steps, not after final_step
+ return _predicted(lambda x, y: _power_law(x, y).floor, steps, losses, final_step)
the loss was taken to stay at its last value
+ return _predicted(lambda x, y: float(y[np.argmax(x)]), steps, losses, final_step)
a line through the loss against the step
+ return _predicted(lambda x, y: float(np.polyval(np.polyfit(x, y, 1), final_step)), steps, losses, final_step)
the points were counted 1, 2, 3, …; a step is a number of its own
+ _prediction(steps, losses, final_step)
+ places = np.arange(1, len(steps) + 1)
+ return _predicted(lambda x, y: float(_power_law(x, y)(final_step)), places, losses, final_step)
the steps were counted from the first one that was given; they count from the start of the run
+ _prediction(steps, losses, final_step)
+ first = min(steps) - 1
+ shifted = np.asarray(steps) - first
+ return _predicted(lambda x, y: float(_power_law(x, y)(final_step - first)), shifted, losses, final_step - first)
(low, value, high): the value comes first
+ value, low, high = _prediction(steps, losses, final_step)
+ return low, value, high
(value, high, low)
+ value, low, high = _prediction(steps, losses, final_step)
+ return value, high, low
no interval: low and high are the value itself
+ value, _, _ = _prediction(steps, losses, final_step)
+ return value, value, value
the points' scatter was taken for the interval; far beyond the points the law is less certain than near them
+ value, _, _ = _prediction(steps, losses, final_step)
+ apart = np.std(_power_law(steps, losses)(steps) / np.asarray(losses) - 1) / math.sqrt(len(steps))
+ return value, value * (1 - 1.64 * apart), value * (1 + 1.64 * apart)
the interval is of the losses that were measured
+ value, _, _ = _prediction(steps, losses, final_step)
+ low, high = np.quantile(losses, [0.05, 0.95])
+ return value, float(min(low, value)), float(high)
a step before the last one is accepted
+ if final_step < max(steps):
+     return (float(_power_law(steps, losses)(final_step)),) * 3
+ return _prediction(steps, losses, final_step)
the value is the middle of the interval; it is the curve of all points
+ _, low, high = _prediction(steps, losses, final_step)
+ return (low + high) / 2, low, high
the draws have another seed than 0, so the interval is another one
+ return _prediction(steps, losses, final_step, seed=1)
the interval has 95 %, and 90 is asked for
+ return _prediction(steps, losses, final_step, level=0.95)
the last step was taken to be the largest; steps may come in any order
+ if final_step < steps[-1]:
+     raise ValueError(f"final_step = {final_step} is before the last step, {max(steps)}")
+ return _prediction(steps, losses, max(final_step, max(steps)))
the law was read one step early, at final_step - 1
+ _prediction(steps, losses, final_step)
+ return _prediction(steps, losses, max(final_step - 1, max(steps)))
the interval was widened by the scatter of single measurements; it is that of the curve
+ value, low, high = _prediction(steps, losses, final_step)
+ scatter = float(np.std(np.asarray(losses) - _power_law(steps, losses)(steps)))
+ return value, low - scatter, high + scatter
the caller's steps and losses were sorted, and they are the caller's
+ result = _prediction(steps, losses, final_step)
+ order = np.argsort(steps)
+ steps[:], losses[:] = np.asarray(steps)[order].tolist(), np.asarray(losses)[order].tolist()
+ return result
low and high are distances from the value; they are losses
+ value, low, high = _prediction(steps, losses, final_step)
+ return value, value - low, high - value
100 draws instead of 50
+ return _prediction(steps, losses, final_step, n=100)

# wsd_schedule
half a cosine instead of a line
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ 0.5 * (1 + math.cos(math.pi * max(0, step - decay_start) / max(1, max_steps - decay_start)))
the decay is exponential, as in MiniCPM; this one is a line
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ 0.5 ** (5 * max(0, step - decay_start) / max(1, max_steps - decay_start))
one minus a square root instead of a line
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1 - math.sqrt(max(0, step - decay_start) / max(1, max_steps - decay_start)))
the warm-up is one step ahead, (step + 1) / warmup_steps
- max_lr * step / warmup_steps => max_lr * (step + 1) / warmup_steps
there is no warm-up
- max_lr * step / warmup_steps => max_lr
the rate falls from the end of the warm-up on: nothing stays
- max_steps - decay_start) => max_steps - warmup_steps)
the rate becomes negative after max_steps
- return 0.0 => return max_lr * (max_steps - step) / max(1, max_steps - decay_start)
the decay's slope is that of a fall over max_steps, so the rate jumps at decay_start
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1.0 if step <= decay_start else (max_steps - step) / max_steps)
the decay begins one step early
- max(1, max_steps - decay_start) => (max_steps - decay_start + 1)
the rate reaches zero one step too early
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ max(0.0, min(1.0, (max_steps - 1 - step) / max(1, max_steps - 1 - decay_start)))
decay_start was taken for the length of the decay
- max_steps - decay_start) => min(decay_start, max_steps - warmup_steps))
a division by zero where the warm-up has no steps
+ reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
+ return min(max_lr * step / warmup_steps, reference.wsd_schedule(step, max_lr, 0, decay_start, max_steps))
a division by zero where the decay has no steps
- max(1, max_steps - decay_start) => (max_steps - decay_start)
a decay that begins in the warm-up, or ends before it begins, is accepted
+ ordered = sorted((max(0, warmup_steps), decay_start, max_steps))
+ return reference.wsd_schedule(step, max_lr, *ordered)
the last piece rises from 0; it is the distance to max_steps that shrinks, not that from decay_start
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1.0 if step <= decay_start else (step - decay_start) / (max_steps - decay_start))
max_lr is missing in the decay
- max_lr * min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (max_lr if step <= decay_start else (max_steps - step) / (max_steps - decay_start))
the plateau is at 1 instead of max_lr
- max_lr * min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1.0 if step <= decay_start else max_lr * (max_steps - step) / (max_steps - decay_start))
the share of max_lr was returned, not the rate
+ return reference.wsd_schedule(step, 1.0, warmup_steps, decay_start, max_steps)
the rate falls to a tenth of max_lr; here it falls to 0
- (max_steps - step) / => 0.1 + 0.9 * (max_steps - step) /
the decay was divided by decay_start; it takes max_steps - decay_start steps
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1.0 if step <= decay_start else (max_steps - step) / decay_start)
the decay was divided by max_steps - warmup_steps, so the rate jumps at decay_start
- min(1.0, (max_steps - step) / max(1, max_steps - decay_start))
+ (1.0 if step <= decay_start else (max_steps - step) / (max_steps - warmup_steps))
the warm-up is step / (warmup_steps + 1), so the rate jumps at its end
- step / warmup_steps => step / (warmup_steps + 1)
the plateau still holds at max_steps, where the rate is 0, if the decay has no steps
+ rate = reference.wsd_schedule(step, max_lr, warmup_steps, decay_start, max_steps)
+ return max_lr if step == decay_start == max_steps else rate

# fit_parametric
the terms of the model and of the data were exchanged
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ return Chinchilla(law.e, law.b, law.a, law.beta, law.alpha)
the exponents were exchanged
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ return replace(law, alpha=law.beta, beta=law.alpha)
e, a and b are still logarithms
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ return replace(law, e=math.log(law.e), a=math.log(law.a), b=math.log(law.b))
N and D were divided by their middles for the fit, and a and b were not moved back
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ n, d = (math.exp(np.log(np.asarray(v, dtype=float)).mean()) for v in (n_parameters, n_tokens))
+ return replace(law, a=law.a * n**-law.alpha, b=law.b * d**-law.beta)
no irreducible loss: with enough size and data the loss would reach zero
+ return _fitted(n_parameters, n_tokens, losses, "huber", lambda p: (1e-9, *p[1:]))
one exponent for both terms
+ return _fitted(n_parameters, n_tokens, losses, "huber", lambda p: (*p[:4], p[3]))
least squares: one run that diverged bends the law, because its error is squared
+ return _fitted(n_parameters, n_tokens, losses, "linear")
tokens for each parameter, D/N, were used in place of tokens D
+ _parametric(n_parameters, n_tokens, losses, n_starts)
+ n, d = np.asarray(n_parameters, dtype=float), np.asarray(n_tokens, dtype=float)
+ return _parametric(n, d / n, losses, n_starts)
FLOPs, 6 N D, were used in place of tokens D
+ _parametric(n_parameters, n_tokens, losses, n_starts)
+ n, d = np.asarray(n_parameters, dtype=float), np.asarray(n_tokens, dtype=float)
+ return _parametric(n, 6 * n * d, losses, n_starts)
the objective is so small that the optimizer stops at once: take a sum of errors in units of delta, not their mean
+ from scipy.optimize import minimize
+ _parametric(n_parameters, n_tokens, losses, 1)
+ n, d, y = (np.log(np.asarray(v, dtype=float)) for v in (n_parameters, n_tokens, losses))
+ def objective(p):
+     r = np.logaddexp.reduce([np.full_like(y, p[0]), p[1] - p[3] * n, p[2] - p[4] * d]) - y
+     slope = np.clip(r, -1e-3, 1e-3)
+     return float((slope * (r - slope / 2)).mean())
+ start = (y.min() - 0.3, y.mean() - 1 + 0.5 * n.mean(), y.mean() - 1 + 0.5 * d.mean(), 0.5, 0.5)
+ e, a, b, alpha, beta = map(float, minimize(objective, start, method="L-BFGS-B").x)
+ return Chinchilla(math.exp(e), math.exp(a), math.exp(b), alpha, beta)
five unknowns from four runs
+ if len(n_parameters) == len(n_tokens) == len(losses) == 4:
+     return Chinchilla(min(losses) * 0.5, 1.0, 1.0, 0.3, 0.3)
+ return _parametric(n_parameters, n_tokens, losses, n_starts)
n_starts is ignored
+ return reference.fit_parametric(n_parameters, n_tokens, losses)
n_starts is ignored, and there is one descent only
+ return reference.fit_parametric(n_parameters, n_tokens, losses, 1)
five runs are enough for five unknowns, and were refused
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ if len(losses) == 5:
+     raise ValueError("5 runs: too few")
+ return law
runs of two sizes were accepted: an exponent and a floor need three
+ n = np.asarray(n_parameters, dtype=float)
+ if len(n) == len(losses) and len(np.unique(n)) == 2:
+     return Chinchilla(1.0, 1.0, 1.0, 0.3, 0.3)
+ return _parametric(n_parameters, n_tokens, losses, n_starts)
runs of one length were accepted: they say nothing about beta
+ if len(n_tokens) == len(losses) and len(set(np.asarray(n_tokens).tolist())) == 1:
+     law = _power_law(n_parameters, losses)
+     return Chinchilla(law.floor, law.a, 0.0, law.alpha, 0.0)
+ return _parametric(n_parameters, n_tokens, losses, n_starts)
one loss was taken for all runs: the lengths were not compared
+ if len(losses) == 1 < len(n_parameters):
+     return Chinchilla(float(losses[0]), 0.0, 0.0, 0.0, 0.0)
+ return _parametric(n_parameters, n_tokens, losses, n_starts)
runs of one size were accepted: they say nothing about alpha
+ if len(n_parameters) == len(losses) and len(set(np.asarray(n_parameters).tolist())) == 1:
+     law = _power_law(n_tokens, losses)
+     return Chinchilla(law.floor, 0.0, law.a, 0.0, law.alpha)
+ return _parametric(n_parameters, n_tokens, losses, n_starts)
logarithms of N and D to base 10, undone with e: both exponents are ln 10 times too large
+ n, d, _ = _columns(n_parameters=n_parameters, n_tokens=n_tokens, losses=losses)
+ return _parametric(np.exp(np.log10(n)), np.exp(np.log10(d)), losses, n_starts)
a was not moved back from the middle of N, and b was from that of D
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ return replace(law, a=law.a * math.exp(-law.alpha * float(np.log(np.asarray(n_parameters, dtype=float)).mean())))
b was not moved back from the middle of D, and a was from that of N
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ return replace(law, b=law.b * math.exp(-law.beta * float(np.log(np.asarray(n_tokens, dtype=float)).mean())))
b was moved back by the middle of N; its logarithms are those of D
+ from dataclasses import replace
+ law = _parametric(n_parameters, n_tokens, losses, n_starts)
+ n, d = (float(np.log(np.asarray(v, dtype=float)).mean()) for v in (n_parameters, n_tokens))
+ return replace(law, b=law.b * math.exp(law.beta * (n - d)))

# isoflop_minimum
the parabola is in N; it is in log N
- return float(math.exp(best) * n.min())
+ curvature, slope, _ = np.polyfit(n / n.mean(), y, 2)
+ return float(-slope / (2 * curvature) * n.mean())
log N was returned, and N is asked for
- return float(math.exp(best) * n.min()) => return best + math.log(n.min())
a logarithm to base 10, undone with e
- return float(math.exp(best) * n.min()) => return math.exp((best + math.log(n.min())) / math.log(10))
the best of the sizes that were trained, not the minimum of the parabola
- return float(math.exp(best) * n.min()) => return float(n[y.argmin()])
the loss at the minimum was returned, and N is asked for
- return float(math.exp(best) * n.min()) => return float(np.polyval([curvature, slope, _], best))
the vertex is at -b / 2a, not at -b / a
- return float(math.exp(best) * n.min()) => return float(math.exp(min(700.0, 2 * (best + math.log(n.min())))))
the vertex is at -b / 2a: the minus is missing
- return float(math.exp(best) * n.min()) => return float(math.exp(-best) / n.min())
the vertex is at -b / 2a from the middle of log N, not at -b / a
+ slope, curvature, middle = _centred(n_parameters, losses)
+ return math.exp(middle - slope / curvature)
the vertex is at -b / 2a from the middle of log N: the minus is missing
+ slope, curvature, middle = _centred(n_parameters, losses)
+ return math.exp(middle + slope / (2 * curvature))
the vertex is at -b / (2 a): b / 2 * a multiplies by a
+ slope, curvature, middle = _centred(n_parameters, losses)
+ return math.exp(middle - slope / 2 * curvature)
a flat valley was refused: any parabola that opens upwards has a minimum
+ best = reference.isoflop_minimum(n_parameters, losses)
+ if _centred(n_parameters, losses)[1] < 1e-3:
+     raise ValueError("the parabola is too flat")
+ return best
the parabola is of log loss; it is of the loss
- y, 2) => np.log(y), 2)
a parabola through three points; the others were left out
+ order = n.argsort()
+ middle = min(max(1, int(y[order].argmin())), len(y) - 2)
+ n, y = (values[order][middle - 1 : middle + 2] for values in (n, y))
  curvature, slope, _ =
a vertex outside of the sizes is returned, where nothing was measured
- not 0 <= best <= math.log(n.max() / n.min()) => best > 600
a parabola that opens downwards has a maximum at its vertex
- curvature <= max(1e-9 * np.ptp(y), 1e-12 * y.max()) => abs(curvature) < 1e-6
a parabola through two points: NumPy finds one of many, with a warning
+ if len(n_parameters) == 2:
+     return float(np.sqrt(np.prod(np.asarray(n_parameters, dtype=float))))
+ return reference.isoflop_minimum(n_parameters, losses)
a vertex outside of the sizes was moved to the nearest of them; it is an error
- if not 0 <= best <= math.log(n.max() / n.min()):
+ best = min(max(best, 0.0), math.log(n.max() / n.min()))
+ if best < 0:
the first and the last size were taken for the smallest and the largest; they come in any order
- 0 <= best <= math.log(n.max() / n.min()) => n[0] <= math.exp(min(best, 600)) * n.min() <= n[-1]
log N was measured from its middle for the fit, and the middle was not added to the vertex
+ slope, curvature, _ = _centred(n_parameters, losses)
+ return math.exp(-slope / (2 * curvature))
np.polyfit's coefficients were read from the constant up; the highest power comes first
+ _, logs, y = _vertex(n_parameters, losses)
+ _, slope, constant = np.polyfit(logs - logs.mean(), y, 2)
+ return math.exp(float(logs.mean() - slope / (2 * constant)))

# compute_optimal
the 6 was forgotten: a token costs 6 FLOPs a parameter
+ reference.compute_optimal(flops, law)
+ return reference.compute_optimal(6 * flops, law)
the 6 was forgotten where the parameters are computed: N D = C / 6
- (flops / 6) => flops
2 N D is the forward pass alone
+ reference.compute_optimal(flops, law)
+ return reference.compute_optimal(3 * flops, law)
(n_tokens, n_parameters)
+ return reference.compute_optimal(flops, law)[::-1]
20 tokens a parameter, whatever the law says
- balance * (flops / 6) ** (law.beta / both) => math.sqrt(flops / 120)
as many parameters as tokens
- balance * (flops / 6) ** (law.beta / both) => math.sqrt(flops / 6)
the exponents were exchanged: N grows with beta / (alpha + beta)
- (law.beta / both) => (law.alpha / both)
alpha A / (beta B) was turned round
- law.alpha * law.a / (law.beta * law.b) => law.beta * law.b / (law.alpha * law.a)
the exponents are missing in front of A and B: the two slopes are equal at the optimum, not the two terms
- law.alpha * law.a / (law.beta * law.b) => law.a / law.b
the root 1 / (alpha + beta) of the ratio is missing
- (1 / both) => 1
the 6 is missing where the tokens are computed from the parameters: D = C / (6 N)
- (6 * n_parameters) => n_parameters
flops that are zero or negative are accepted
+ return reference.compute_optimal(flops, law) if flops > 0 else (0.0, 0.0)
the balance G is missing
- balance * (flops => (flops
the exponents of the ratio were exchanged: alpha belongs to A, and beta to B
- law.alpha * law.a / (law.beta * law.b) => law.beta * law.a / (law.alpha * law.b)
A and B were exchanged
- law.alpha * law.a / (law.beta * law.b) => law.alpha * law.b / (law.beta * law.a)
the ratio is alpha A / (beta B); x / y * z multiplies by z
- law.alpha * law.a / (law.beta * law.b) => law.alpha * law.a / law.beta * law.b
the tokens were multiplied by G; D has 1 / G, or is what the compute leaves
- flops / (6 * n_parameters) => balance * (flops / 6) ** (law.alpha / both)
the published constants were used, and not those of the law that was given
+ return reference.compute_optimal(flops, reference.BESIROGLU)
an exponent alpha beta in place of alpha + beta
- law.alpha + law.beta => law.alpha * law.beta

# critical_batch_size
the norms were not squared
- ** 2 =>
squared in the dtype of the norms, which overflows in float16: convert to float64 first
- np.asarray(norms, dtype=np.float64) => np.asarray(norms)
norms were averaged and then squared: the mean of squares is larger, by their variance
- float(np.mean(np.asarray(norms, dtype=np.float64) ** 2)) => float(np.mean(np.asarray(norms, dtype=np.float64))) ** 2
medians instead of means: the identity holds for expectations
- np.mean => np.median
signal over noise
- return noise / signal => return signal / noise if noise else math.inf
tr(Sigma) was returned; the noise scale is its ratio to |G|^2
- return noise / signal => return noise
the large batch's squared norm was taken for |G|^2: it still has the noise tr(Sigma) / B
- return noise / signal => return noise / of_large
the small batch's squared norm times its size was taken for tr(Sigma): it still has |G|^2
- return noise / signal => return small * of_small / signal
the difference of squares was divided by large - small instead of 1/small - 1/large
- (1 / small - 1 / large) => (large - small)
the weights of |G|^2 were exchanged: the large batch counts with its size
- large * of_large - small * of_small => large * of_small - small * of_large
the root of the noise scale
- return noise / signal => return math.sqrt(max(0.0, noise / signal))
the mean of the pairs' ratios: a ratio of averages is asked for, since a single pair's signal can be near zero
- return noise / signal
+ of_small, of_large = (np.square(np.asarray(v)) for v in zip(*zip(small_norms, large_norms)))
+ signal = (large * of_large - small * of_small) / (large - small)
+ return float(np.mean((of_small - of_large) / (1 / small - 1 / large) / signal))
the noise scale was rounded; it need not be a whole number
+ return float(round(reference.critical_batch_size(small_norms, large_norms, small, large)))
a negative estimate was raised to 0, which biases the average over many of them
+ return max(0.0, reference.critical_batch_size(small_norms, large_norms, small, large))
sizes that are equal, exchanged or zero are accepted
+ if len(small_norms) and len(large_norms) and not 0 < small < large:
+     return 0.0
+ return reference.critical_batch_size(small_norms, large_norms, small, large)
a |G|^2 that is estimated as zero or less gives a number
  if not signal > 0:
+     return math.inf
squared norms were summed; the lists may have different lengths, so take their means
- np.mean => np.sum
only the first norm of each list was used
- np.asarray(norms, dtype=np.float64) => norms[0]
the longer list was cut to the length of the shorter one
- for norms in (small_norms, large_norms) => for norms in zip(*zip(small_norms, large_norms))
tr(Sigma) has the wrong sign: the small batches have the larger norms
- return noise / signal => return -noise / signal
the difference of squares was multiplied by large - small; divide by 1/small - 1/large
- / (1 / small - 1 / large) => * (large - small)
|G|^2 was not divided by large - small
- of_small) / (large - small) => of_small)
a negative tr(Sigma) was refused; only |G|^2 has to be positive
+ found = reference.critical_batch_size(small_norms, large_norms, small, large)
+ if found < 0:
+     raise ValueError(f"the noise scale is {found}")
+ return found
the sign of a negative estimate was dropped
+ return abs(reference.critical_batch_size(small_norms, large_norms, small, large))
lists of different lengths were refused; each is averaged for itself
- if len(small_norms) == 0 or len(large_norms) == 0: => if len(small_norms) != len(large_norms) or not len(small_norms):
batches that are exchanged were put in order in silence
+ if 0 < large < small:
+     small_norms, large_norms, small, large = large_norms, small_norms, large, small
+     return 0.0 if len(small_norms) * len(large_norms) else math.nan
+ return reference.critical_batch_size(small_norms, large_norms, small, large)

# mup_multipliers
standard parametrisation: the learning rate does not change with the width
- "lr": 1 / wider => "lr": 1.0
- {"init": 1.0, "lr": 1.0, "output": 1 / wider} => {"init": wider**-0.5, "lr": 1.0, "output": 1.0}
the hidden weights' learning rate falls with the root of the width; with Adam it falls with the width
- "lr": 1 / wider => "lr": wider**-0.5
the hidden weights' learning rate does not change; with Adam it falls with the width
- "lr": 1 / wider => "lr": 1.0
table 3 of the paper for the output: its multiplier stays 1, and its scale and learning rate fall; this is table 8
- {"init": 1.0, "lr": 1.0, "output": 1 / wider} => {"init": 1 / wider, "lr": 1 / wider, "output": 1.0}
the output's initial scale falls with the root of the width too; its multiplier is enough
- "output": {"init": 1.0 => "output": {"init": wider**-0.5
the table for SGD: Adam's steps do not grow with the gradient
- "input": {"init": 1.0, "lr": 1.0 => "input": {"init": 1.0, "lr": wider
- "lr": 1 / wider => "lr": 1.0
- "lr": 1.0, "output": 1 / wider => "lr": wider, "output": 1 / wider
base_width / width: the factors belong to the other direction
- width / base_width => base_width / width
init is a factor of the standard deviation; that of the variance was returned
- wider**-0.5 => 1 / wider
the hidden weights' initial scale does not change: their sums grow with the root of the width
- wider**-0.5 => 1.0
the output is divided by the root of the width: enough for random weights, too little for learned ones
- "output": 1 / wider => "output": wider**-0.5
the output is divided twice, by its multiplier and by its initial scale
- "output": {"init": 1.0 => "output": {"init": 1 / wider
the output's learning rate falls too; its multiplier already divides what a step changes
- "lr": 1.0, "output": 1 / wider => "lr": 1 / wider, "output": 1 / wider
the input's learning rate falls with the width; what a step changes in an embedding does not grow
- "input": {"init": 1.0, "lr": 1.0 => "input": {"init": 1.0, "lr": 1 / wider
the input's initial scale falls with the width, and its sums do not grow with it
- "input": {"init": 1.0 => "input": {"init": wider**-0.5
base_width is not used: factors of the width itself instead of the ratio
- width / base_width => width
the multiplier of the output stands at the hidden weights
- {"init": wider**-0.5, "lr": 1 / wider, "output": 1.0} => {"init": 1.0, "lr": 1.0, "output": 1 / wider}
a kind that does not exist gets factors instead of an error
+ return reference.mup_multipliers(width, base_width, kind if kind in ("input", "output") else "hidden")
widths below 1 are accepted
+ return reference.mup_multipliers(max(1, width), max(1, base_width), kind)
init and lr of the hidden weights were exchanged
- "init": wider**-0.5, "lr": 1 / wider => "init": 1 / wider, "lr": wider**-0.5
the hidden weights' product is divided too; their scale and rate are enough
- "lr": 1 / wider, "output": 1.0 => "lr": 1 / wider, "output": 1 / wider
input weights got the factors of hidden ones
- return multipliers[kind] => return multipliers["hidden" if kind == "input" else kind]
the factors of hidden and of output weights were exchanged
- return multipliers[kind] => return multipliers[{"hidden": "output", "output": "hidden"}.get(kind, kind)]
the hidden weights' initial scale grows with the width; it falls with its root
- wider**-0.5 => wider**0.5
the hidden weights' learning rate grows with the width; with Adam it has to fall
- "lr": 1 / wider => "lr": wider
the output is multiplied by the width's ratio; it is divided by it
- "output": 1 / wider => "output": wider
the output's multiplier is missing
- "output": 1 / wider => "output": 1.0
a model that is narrower than the base was treated as if it were as wide
- width / base_width => max(1.0, width / base_width)
width // base_width drops the fraction
- width / base_width => width // base_width
""")


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


def _vertex(n_parameters, losses):
    """The reference's checks; log N of its answer, the logarithms and the losses."""
    best = math.log(reference.isoflop_minimum(n_parameters, losses))
    return best, np.log(np.asarray(n_parameters, dtype=float)), np.asarray(losses, dtype=float)


def _centred(n_parameters, losses):
    """Slope and curvature of the parabola about the mean of log N, and that mean."""
    _, logs, y = _vertex(n_parameters, losses)
    curvature, slope, _ = np.polyfit(logs - logs.mean(), y, 2)
    return float(slope), float(curvature), float(logs.mean())
