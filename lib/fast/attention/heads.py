"""Split queries, keys and values from one product; in the backward pass join their gradients and sum them for the bias.

Attention returns three gradients, and the backward pass of the product before it needs them side by side. With
PyTorch's operators that is a copy, which the compiler then reads again to sum it for the product's bias. Here one
kernel copies and sums: the product's own bias is detached, and the backward pass of `split_heads` computes the bias's
gradient instead.
"""

from typing import Any

import torch
from torch import Tensor

from lib.fast.parts.sums import add_rows
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, tl, triton

ROWS, COLS, STEPS = 16, 256, 8

# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def join_heads_kernel(
    q, k, v, out, sums, n_rows, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write q, k and v [n_rows, width] side by side into out, and the sums of every ROWS * STEPS rows into sums [*,
    3 * width].
    """
    part, first = tl.program_id(1), tl.program_id(0) * ROWS * STEPS
    source = q
    if part == 1:
        source = k
    elif part == 2:
        source = v
    source += first.to(tl.int64) * width
    out += first.to(tl.int64) * 3 * width + part * width
    columns = tl.program_id(2) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(0, ROWS * STEPS, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (first + rows < n_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(source + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        tl.store(out + rows[:, None] * 3 * width + columns[None, :], x, mask=inside)
        total += x.to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * 3 * width + part * width + columns
    tl.store(sums + at, tl.sum(total, 0), mask=columns < width)


def launch_join(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Join three contiguous ``[..., H, D]`` into one ``[..., 3 * H * D]``, and sum it over all rows in float32."""
    width, n_rows = q.shape[-2] * q.shape[-1], q.shape[:-2].numel()
    out = q.new_empty(*q.shape[:-2], 3 * width)
    n_chunks = triton.cdiv(n_rows, ROWS * STEPS)
    sums = q.new_empty(n_chunks, 3 * width, dtype=torch.float32)
    if n_rows > 0:
        join_heads_kernel[(n_chunks, 3, triton.cdiv(width, COLS))](
            q, k, v, out, sums, n_rows, width, ROWS, COLS, STEPS, num_warps=4
        )
    return out, add_rows(sums)


# ---- as PyTorch and its compiler see it ------------------------------------------------------------------------------


@torch.library.custom_op("scaling_workbook::join_heads", mutates_args=())
def join_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`launch_join` for tensors with any strides, and without a GPU."""
    if HAS_TRITON and not INTERPRETED and q.is_cuda:
        return launch_join(q.contiguous(), k.contiguous(), v.contiguous())
    out = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1)
    return out, out.float().flatten(0, -2).sum(0)


@join_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    width = 3 * q.shape[-2] * q.shape[-1]
    return q.new_empty(*q.shape[:-2], width), q.new_empty(width, dtype=torch.float32)


class SplitHeads(torch.autograd.Function):
    """Forward: three views. Backward: one kernel that joins three gradients and sums them for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, n_heads: int) -> tuple[Tensor, ...]:
        ctx.dtype = bias.dtype
        return x.unflatten(-1, (3, n_heads, -1)).unbind(-3)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, d_bias = join_heads(dq, dk, dv)
        return dx, d_bias.to(ctx.dtype), None


def split_heads(x: Tensor, bias: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of a product's result.

    Args:
        x: ``[..., 3 * H * D]``, the product with a detached ``bias`` added: the bias gets its gradient from here.
        bias: ``[3 * H * D]``.
        n_heads: H.

    Returns:
        Three views ``[..., H, D]``.

    Raises:
        ValueError: a shape is not as above.
    """
    if x.ndim < 2 or bias.shape != x.shape[-1:] or n_heads < 1 or x.shape[-1] % (3 * n_heads):
        raise ValueError(
            f"x {tuple(x.shape)}, bias {tuple(bias.shape)}: expected [..., 3 * H * D] and [3 * H * D] for H = {n_heads}"
        )
    return SplitHeads.apply(x, bias, n_heads)
