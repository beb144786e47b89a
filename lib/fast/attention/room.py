"""What the backward passes share that keep something large in memory on the way."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lib.fast.launch import Address, Launch
from lib.given.kernels.tiles import INTERPRETED, tl, triton

ADDED = 4096  # numbers of a head that a program adds up


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


# ---- gradients of each query head, added up for the head of keys that they share ------------------------------------


def part_like(q: Tensor, x: Tensor) -> Tensor:
    """Room for a gradient of x, keys or values, for each query head."""
    return torch.empty((*q.shape[:-2], *x.shape[-2:]), dtype=q.dtype, device=q.device)


@triton.jit
def add_parts_kernel(part, out, G, S, batch_step, head_step, row_step, D: tl.constexpr, APART: tl.constexpr,
                     ADDED: tl.constexpr):  # fmt: skip
    """out [batch, G, S, D], of any strides, is the sum of APART heads of part [batch, G * APART, S, D] each."""
    head, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    inside = at < S * D
    total = tl.zeros([ADDED], tl.float32)
    for i in tl.static_range(APART):
        total += tl.load(part + (head * APART + i) * S * D + at, mask=inside, other=0.0).to(tl.float32)
    to = out + head // G * batch_step + head % G * head_step + at // D * row_step + at % D
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=64)
def _adding(shape: tuple[int, ...], strides: tuple[int, ...], apart: int, *which: Any) -> Launch:
    """The launch for (part, out) with out of this shape and these strides, and for one dtype and device."""
    n_batches, n_groups, s, d = (1,) * (4 - len(shape)) + shape
    steps = (0,) * (4 - len(strides)) + strides
    args = (Address(0), Address(1), n_groups, s, *steps[:3], d, apart, ADDED)
    grid = triton.cdiv(s * d, ADDED), n_batches * n_groups
    return Launch(add_parts_kernel, grid, args, **({} if INTERPRETED else {"num_warps": 4}))


def add_parts(total: Tensor, part: Tensor, apart: int) -> None:
    """Fill a gradient of keys or values, which has one head for each ``apart`` heads of the part."""
    _adding(tuple(total.shape), total.stride(), apart, total.dtype, total.get_device())(part, total)
