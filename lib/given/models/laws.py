"""Inputs of chapter 22: what a fit returns, the published constants, and the optimizer that every fit calls."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PowerLaw:
    """``y = a * x**-alpha + floor``; call it with x, a number or an array.

    Attributes:
        a: Height of the falling part at x = 1.
        alpha: Exponent; positive where y falls.
        floor: What is left when x grows without bound.
    """

    a: float
    alpha: float
    floor: float

    def __call__(self, x: Any) -> Any:
        return self.a * np.asarray(x, dtype=np.float64) ** -self.alpha + self.floor


@dataclass(frozen=True)
class Chinchilla:
    """``loss = e + a / N**alpha + b / D**beta``; call it with N and D, numbers or arrays.

    Attributes:
        e: Loss in nats that no size and no amount of data takes away.
        a: Height of the model's term at N = 1.
        b: Height of the data's term at D = 1.
        alpha: Exponent of the parameters N.
        beta: Exponent of the tokens D.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def __call__(self, n_parameters: Any, n_tokens: Any) -> Any:
        n, d = (np.asarray(x, dtype=np.float64) for x in (n_parameters, n_tokens))
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta


HOFFMANN = Chinchilla(e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
"""The constants of the paper (arXiv:2203.15556, equation 10), as it prints them: rounded."""

BESIROGLU = Chinchilla(e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)
"""The constants that a replication found for the points of the paper's figure 4 (arXiv:2404.10102)."""


def minimise(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]], starts: Iterable[Any], n_starts: int
) -> np.ndarray:
    """The best minimum that scipy's L-BFGS-B reaches from the most promising starts.

    Args:
        objective: Returns a value and its gradient for one vector of parameters.
        starts: All starting points.
        n_starts: From how many of them to descend: those with the lowest values.

    Returns:
        The parameters of the lowest minimum.
    """
    from scipy.optimize import minimize

    ranked = sorted((np.asarray(start, dtype=np.float64) for start in starts), key=lambda s: objective(s)[0])
    options = {"maxiter": 2000, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-6}
    found = [minimize(objective, s, jac=True, method="L-BFGS-B", options=options) for s in ranked[:n_starts]]
    return min(found, key=lambda result: result.fun).x
