"""What chapter 25's optimizers share: settings that are checked, closures, and one update a parameter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Coefficients = Sequence[float] | Sequence[Sequence[float]]
"""The a, b and c of each step of Newton-Schulz: one triple for all steps, or one a step."""
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
"""The triple of Keller Jordan's Muon, which PyTorch's uses too."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names a setting outside of its range."""
    for name in ("lr", "weight_decay", "eps", "betas", "momentum"):
        given = settings.get(name, 0)
        for value in given if isinstance(given, tuple | list) else (given,):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} = {given}: expected no value below 0")
            if name in ("betas", "momentum") and not value < 1:
                raise ValueError(f"{name} = {given}: expected every value in [0, 1)")
    if not settings.get("beta2_decay", 0) <= 0:
        raise ValueError(f"beta2_decay = {settings['beta2_decay']}: expected at most 0")
    if not settings.get("d", 1) >= 1:
        raise ValueError(f"d = {settings['d']}: expected at least 1")
    if settings.get("adjust_lr_fn") not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn = {settings['adjust_lr_fn']!r}: expected 'original' or 'match_rms_adamw'")


def triples(coefficients: Coefficients, steps: int) -> list[Sequence[float]]:
    """The coefficients of each of ``steps`` steps: one triple repeated, or the first ones of a list of triples.

    Raises:
        ValueError: the list has fewer triples than there are steps; the message names both numbers.
    """
    if len(coefficients) and not isinstance(coefficients[0], Sequence):
        return [coefficients] * steps  # type: ignore[list-item]
    if len(coefficients) < steps:
        raise ValueError(f"steps = {steps}, but there are only {len(coefficients)} triples of coefficients")
    return list(coefficients[:steps])  # type: ignore[arg-type]


class ByParameter(Optimizer):
    """An optimizer that updates one parameter at a time: a subclass writes ``update``.

    Args:
        params: Parameters, or groups: dicts with "params" and the settings that differ from the defaults.
        defaults: The settings by name. Those of every group are checked.
    """

    def __init__(self, params, **defaults: Any):
        check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter whose gradient is not None, and return what ``closure`` returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            self.update_group([p for p in group["params"] if p.grad is not None], group)
        return loss

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient."""
        for parameter in parameters:
            self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change ``parameter`` and its ``state`` in place; called without gradients being recorded.

        Args:
            parameter, gradient: The weight, and its gradient, which stays as it is.
            state: What the optimizer keeps for this weight: an empty dict at its first step.
            group: The settings by name, such as ``group["lr"]``.
        """
        raise NotImplementedError
