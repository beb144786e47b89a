"""What the backward passes share that keep something large in memory on the way."""

from typing import Any

import torch
from torch import Tensor


class TakesRoom:
    """A backward pass that allocates memory of its own, or another one where the GPU has too little left.

    Args:
        otherwise: Called with the same tensors in that case; if None, the error is raised.
    """

    is_ready = False  # it needs tensors, not only addresses

    def __init__(self, otherwise: Any = None):
        self.otherwise, self.is_short = otherwise, False

    def __call__(self, q, k, v, o, do, lse, dq, dk, dv) -> None:
        """Fill dq, dk and dv; lse is contiguous."""
        given, room = (q, k, v, o, do, lse, dq, dk, dv), None
        if not (self.is_short or self.is_barred()):
            try:
                room = self.take(q, k, v)
            except torch.OutOfMemoryError:
                if self.otherwise is None:
                    raise
                self.is_short = True  # and is not asked again: PyTorch empties its cache before it gives up
        if room is None:
            self.otherwise(*given)
        else:
            self.run(room, *given)

    def is_barred(self) -> bool:
        """Whether it may not run now, though there is room."""
        return False

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Allocate."""
        raise NotImplementedError

    def run(self, room: Any, *given: Tensor) -> None:
        """Fill dq, dk and dv with what `take` has returned."""
        raise NotImplementedError


def parts_like(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Room for a dK and a dV of each query head."""
    return [torch.empty((*q.shape[:-2], *x.shape[-2:]), dtype=q.dtype, device=q.device) for x in (k, v)]


def add_parts(totals: tuple[Tensor, ...], parts: list[Tensor], apart: int) -> None:
    """Fill dk and dv, which have a head for each ``apart`` heads of the parts."""
    for total, part in zip(totals, parts, strict=True):
        torch.sum(part.unflatten(-3, (-1, apart)), -3, out=total)
