"""A layer norm at the start of a branch, whose backward pass reads the residual stream's gradient once.

A branch of a block computes ``x + out(inner(norm(x)))``. The gradient of the bias of ``out`` is the sum over all rows of the stream's
gradient, which the norm's backward pass reads as well. PyTorch's compiler computes the two in different kernels, and so reads the
gradient twice. Here `norm_and_bias` adds the bias to the stream where the branch begins, before ``inner``. The sum is the same,
and one kernel takes it while the rows pass by, along with the sums for the norm's weight and bias.
"""

from typing import Any

import torch
from torch import Tensor

from lib.fast.grouped import n_programs
from lib.fast.sums import add_rows
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, tl, triton
from lib.given.kernels.once import NO_SECOND_DERIVATIVE

MOST_BYTES = 2**14  # of a row: nine must fit into shared memory, of three tensors at three stages of a loop

# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def norm_and_bias_backward_kernel(
    out, bias, means, scales, weight, d_out, d_normed, dx, sums, n_rows, n_columns,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the stream's gradient, and the sums of each program's rows into sums [programs, 3, n_columns].

    Programs take rows in turns, so that at any time all of them together read one stretch of memory. Bytes moved: 3 reads and
    1 write of the rows. About 20 FLOPs for each number.
    """
    columns = tl.arange(0, COLS)
    is_column = columns < n_columns
    added = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, COLS], tl.float32)
    of_shift, of_bias = of_weight, of_weight
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=3):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < n_rows
        at = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
        inside = is_row[:, None] & is_column[None, :]
        mean = tl.load(means + rows, mask=is_row, other=0.0)
        scale = tl.load(scales + rows, mask=is_row, other=0.0)
        x = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) - added[None, :]
        x = tl.where(is_column[None, :], (x - mean[:, None]) * scale[:, None], 0.0)
        d = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        g = d * factor[None, :]
        g -= (tl.sum(g, 1)[:, None] + x * tl.sum(g * x, 1)[:, None]) / n_columns
        tl.store(dx + at, (above + g * scale[:, None]).to(dx.dtype.element_ty), mask=inside)
        of_weight += d * x
        of_shift += d
        of_bias += above
    sums += tl.program_id(0) * 3 * n_columns + columns
    tl.store(sums, tl.sum(of_weight, 0), mask=is_column)
    tl.store(sums + n_columns, tl.sum(of_shift, 0), mask=is_column)
    tl.store(sums + 2 * n_columns, tl.sum(of_bias, 0), mask=is_column)


def launch_backward(
    out: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the stream ``[..., C]``, and the sums ``[3, C]`` for the norm's weight, the norm's bias and ``bias``."""
    given = [t.contiguous() for t in (out, bias, mean, scale, weight, d_out, d_normed)]
    n_columns, n_rows = out.shape[-1], out.shape[:-1].numel()
    cols = triton.next_power_of_2(n_columns)
    rows = 2 if cols <= 1024 else 1
    n_sums = min(triton.cdiv(n_rows, rows), 2 * n_programs(out.device) if out.is_cuda else 3)
    dx, sums = torch.empty_like(given[0]), out.new_empty(n_sums, 3, n_columns, dtype=torch.float32)
    if n_sums > 0:
        n_warps = min(32, max(4, rows * cols // 512))
        norm_and_bias_backward_kernel[(n_sums,)](*given, dx, sums, n_rows, n_columns, rows, cols, num_warps=n_warps)
    return dx, add_rows(sums)


def fits(*xs: Tensor) -> bool:
    """Whether the kernel has room for rows of these tensors ``[..., C]``."""
    return all(triton.next_power_of_2(x.shape[-1]) * x.element_size() <= MOST_BYTES for x in xs)


# ---- as PyTorch and its compiler see it ------------------------------------------------------------------------------


@torch.library.custom_op("scaling_workbook::norm_and_bias_backward", mutates_args=())
def norm_and_bias_backward(
    out: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """`launch_backward`, also without a GPU."""
    if HAS_TRITON and not INTERPRETED and out.is_cuda and fits(out, d_normed):
        return launch_backward(out, bias, mean, scale, weight, d_out, d_normed)
    x = (out.float() - bias.float() - mean) * scale
    d, above = d_normed.float(), d_out.float()
    g = d * weight.float()
    g = g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True)
    dx = above + g * scale
    return dx.to(out.dtype).contiguous(), torch.stack([t.flatten(0, -2).sum(0) for t in (d * x, d, above)])


@norm_and_bias_backward.register_fake
def _(
    out: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor
) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), out.new_empty(3, out.shape[-1], dtype=torch.float32)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


norm_and_bias_backward.register_autograd(_refuse)


class NormAndBias(torch.autograd.Function):
    """Forward: PyTorch's operators, which the compiler joins. Backward: one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shift: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        wide = x if x.dtype == torch.float32 else x.float()
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        normed = ((wide - mean) * scale * weight + shift).to(dtype)
        out = (wide + bias).to(x.dtype)
        ctx.save_for_backward(out, bias, mean, scale, weight)
        ctx.shift_dtype = shift.dtype
        return out, normed

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_normed: Tensor) -> tuple:
        _, bias, _, _, weight = ctx.saved_tensors
        dx, sums = norm_and_bias_backward(*ctx.saved_tensors, d_out, d_normed)
        dtypes = weight.dtype, ctx.shift_dtype, bias.dtype
        return dx, *(s.to(dtype) for s, dtype in zip(sums.unbind(), dtypes, strict=True)), None, None


def norm_and_bias(
    x: Tensor, layer: torch.nn.LayerNorm, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize the residual stream, and add to the stream the bias of the product with which the branch will end.

    Args:
        x: The stream ``[..., C]``.
        layer: A layer norm over C with weight and bias.
        bias: ``[C]``. The caller leaves it out of the product.
        dtype: Dtype of the norm, that of ``x`` by default.

    Returns:
        ``x + bias`` in the dtype of ``x``, and ``layer(x)``.

    The backward pass recovers ``x`` by subtracting the bias from the rounded sum. With a bf16 stream, a bias much larger than
    ``x`` costs precision: at five times ``x``, 1 % in the gradient of the norm's weight.
    """
    return NormAndBias.apply(x, layer.weight, layer.bias, bias, layer.eps, dtype or x.dtype)
