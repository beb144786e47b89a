"""Gradients that cannot be differentiated once more, and say so."""

import functools
from collections.abc import Callable
from typing import Any

import torch

NO_SECOND_DERIVATIVE = (
    "there is no second derivative here: the backward pass is a kernel, or a loop over tiles, that autograd cannot look into, "
    "so a gradient of its gradients would silently leave terms out; write the formula with PyTorch's own operators instead"
)


class _Gradients(torch.autograd.Function):
    """What a backward pass gives, as a step of autograd whose own backward pass raises."""

    @staticmethod
    def forward(ctx, backward: Callable, of: Any, n_grads: int, *tensors):  # type: ignore[override]
        return backward(of, *tensors[:n_grads])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def first_derivative_only(backward: Callable) -> Callable:
    """Make the ``backward`` of an autograd Function refuse a second derivative, of everything that it depends on.

    Under ``create_graph=True`` the gradients depend on what arrives from above and on all that ``ctx`` saved. PyTorch's
    ``once_differentiable`` looks at the first alone: where that needs no gradient, as in ``out.sum()``, it refuses nothing.
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled, PyTorch refuses by itself
            return backward(ctx, *grads)
        return _Gradients.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return refusing
