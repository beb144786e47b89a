"""Gradients that can't be differentiated again, and say so."""

import functools
from collections.abc import Callable
from typing import Any

import torch

NO_SECOND_DERIVATIVE = (
    "there is no second derivative here: the backward pass is a kernel, or a loop over tiles, "
    "that autograd cannot look into, "
    "so a gradient of its gradients would silently lack terms; write the formula with PyTorch's own operators instead"
)


class _Gradients(torch.autograd.Function):
    """A backward pass as a step of autograd whose own backward pass raises an error."""

    @staticmethod
    def forward(ctx, backward: Callable, of: Any, n_grads: int, *tensors):  # type: ignore[override]
        return backward(of, *tensors[:n_grads])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def first_derivative_only(backward: Callable) -> Callable:
    """Make the ``backward`` of an autograd Function raise an error when its gradients are differentiated again.

    Under ``create_graph=True`` the gradients depend on the gradient from above and on all tensors that ``ctx`` saved.
    PyTorch's ``once_differentiable`` looks at the first only: if that needs no gradient, as in ``out.sum()``,
    it stays silent.
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # when compiled, PyTorch raises by itself
            return backward(ctx, *grads)
        return _Gradients.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return refusing
