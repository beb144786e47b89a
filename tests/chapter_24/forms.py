"""What the checks of this chapter share: the recurrence in float64, inputs for all forms, a counter of operators."""

from collections import Counter
from typing import Any

import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inputs import randn

DECAYS = ("none", "head", "feature")
FLOAT64: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}


def recurrence(q, k, v, g=None, scale=None, state=None, beta=None) -> tuple[Tensor, Tensor]:
    """Outputs and last state of linear attention, or of the delta rule if there is a beta, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1]).double() if state is None else state.double()
    outputs = [v[:, :0]]
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].double().exp()
            state = state * (decay if decay.ndim == 3 else decay[..., None])[..., None]
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None].double() * (new - (k[:, t, :, None] * state.mT).sum(-1))
        state = state + k[:, t, ..., None] * new[:, :, None]
        outputs.append(scale * (q[:, t, :, None] * state.mT).sum(-1)[:, None])
    return torch.cat(outputs, 1), state


def inputs(length: int, decay: str = "none", batch=2, heads=3, dk=4, dv=5, seed=0, dtype=torch.float64) -> dict:
    """Unit keys and all else that a form takes, by the names of its arguments; every tensor wants a gradient."""
    long = (batch, length, heads)
    found = {"q": randn(*long, dk, seed=seed), "k": F.normalize(randn(*long, dk, seed=seed + 1), dim=-1)}
    found |= {"v": randn(*long, dv, seed=seed + 2), "beta": torch.sigmoid(randn(*long, seed=seed + 3))}
    if decay != "none":
        found["g"] = -0.3 * randn(*(long if decay == "head" else (*long, dk)), seed=seed + 4).abs()
    found["initial_state"] = randn(batch, heads, dk, dv, seed=seed + 5)
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def expected(given: dict, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The recurrence's outputs and state for the arguments of a form."""
    names = {name: x for name, x in given.items() if name != "initial_state"}
    return recurrence(**names, scale=scale, state=given.get("initial_state"))


def gradients(result: tuple[Tensor, Tensor], given: dict) -> dict[str, Tensor]:
    """Gradients of the outputs' and the state's products with fixed random numbers."""
    weights = [randn(*x.shape, seed=9 + i).to(x.dtype) for i, x in enumerate(result)]
    parts = [(x * weight).sum() for x, weight in zip(result, weights, strict=True)]
    total = sum(parts, torch.zeros(()))
    found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(given.items(), found, strict=True)
    }


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators by name, and remembers the most numbers that one of their results has."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        self.names[func._schema.name.removeprefix("aten::")] += 1
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out

    @property
    def n(self) -> int:
        return sum(self.names.values())
