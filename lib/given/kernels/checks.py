"""What chapter 20 refuses before it computes: sizes that don't fit, levels beyond four bits,
and numbers that are not finite.

Weights and levels are read, so the host waits for a GPU. They are converted once, not in every step of training.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

__all__ = ["check_blocks", "check_history", "check_levels", "check_weights"]


def check_history(history: int) -> None:
    """Reject a history without steps.

    Raises:
        ValueError: ``history`` is below 1; the message shows it.
    """
    if history < 1:
        raise ValueError(f"a history of {history} steps: expected at least 1")


def check_blocks(n: int, size: int) -> None:
    """Reject blocks that don't divide ``n`` numbers evenly.

    Raises:
        ValueError: ``size`` is below 1 or does not divide ``n``; the message shows both.
    """
    if size < 1 or n % size:
        raise ValueError(f"{n} numbers in blocks of {size}: expected a size of at least 1 that divides {n}")


def check_levels(q: Integer[Tensor, "..."]) -> None:
    """Reject levels that need more than four bits.

    Raises:
        ValueError: a level is below 0 or above 15; the message shows it.
    """
    for level in q.aminmax() if q.numel() else ():
        if not 0 <= level <= 15:
            raise ValueError(f"a level is {level}: expected from 0 to 15")


def check_weights(weight: Float[Tensor, "n k"], group_size: int, hessian: Float[Tensor, "k k"] | None = None) -> None:
    """Reject weights that can't be laid onto levels in groups, and a Hessian that can't belong to them.

    Raises:
        ValueError: ``weight`` is no matrix, has groups that `check_blocks` refuses,
            or holds NaN or a number that is infinite in float32; or the Hessian is not ``[K, K]``, not finite,
            not symmetric, or has an eigenvalue so negative that gptq's damping does not make up for it.
    """
    if weight.ndim != 2:
        raise ValueError(f"weights {tuple(weight.shape)}: expected a matrix [N, K]")
    check_blocks(weight.shape[1], group_size)
    _check_finite("the weights", weight)
    if hessian is not None:
        _check_hessian(hessian.detach(), weight.shape[1])


def _check_finite(name: str, x: Tensor) -> None:
    finite = x.detach().float().isfinite()
    if not finite.all():
        raise ValueError(f"{name} contain {x[~finite][0].item()}: expected numbers that are finite in float32")


def _check_hessian(hessian: Tensor, n_columns: int) -> None:
    if hessian.shape != (n_columns, n_columns):
        raise ValueError(f"Hessian {tuple(hessian.shape)} for {n_columns} columns: expected [{n_columns}, {n_columns}]")
    _check_finite("the Hessian's entries", hessian)
    h = hessian.double()
    apart = (h - h.T).abs().max()
    if apart > 0.01 * h.abs().max():
        raise ValueError(f"the Hessian and its transpose differ by {apart:.3g}: expected a symmetric matrix")
    mean = h.diagonal().mean().item()
    damping = 0.01 * (mean if mean > 0 else 1.0)
    if torch.linalg.cholesky_ex(h + damping * torch.eye(n_columns).to(h)).info:
        least = torch.linalg.eigvalsh(h)[0].item()
        raise ValueError(f"the Hessian has the eigenvalue {least:.3g}: expected a sum of x x^T, which has none below 0")
