"""A layer norm at the start of a branch, whose backward pass reads the residual stream's gradient once.

A branch of a block computes ``x + out(inner(norm(x)))``.
The gradient of the bias of ``out`` is the sum over all rows of the stream's gradient,
which the norm's backward pass reads as well.
PyTorch's compiler computes the two in different kernels, and so reads the gradient twice.
Here the product ``out`` gets a detached bias, and one kernel sums the bias's gradient while the rows pass by,
along with the sums for the norm's weight and bias.

The bias must be added inside of the product, whose sums are in float32.
Added to a 16-bit stream it does not act by its size: below half of the distance between two numbers it is either lost
or, where the sum before it lies half way between them, decides the rounding.
"""

from typing import Any

import torch
from torch import Tensor

from lib.fast.launch import n_programs
from lib.fast.parts.sums import add_rows
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, tl, triton
from lib.given.kernels.once import NO_SECOND_DERIVATIVE

MOST_BYTES = 2**14  # of a row: nine must fit into shared memory, of three tensors at three stages of a loop

# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def norm_and_bias_backward_kernel(
    x, means, scales, weight, d_out, d_normed, dx, sums, n_rows, n_columns,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the stream's gradient, and the sums of each program's rows into sums [programs, 3, n_columns].

    Programs take rows in turns, so that at any time all of them together read one stretch of memory.
    Bytes moved: 3 reads and 1 write of the rows.
    About 20 FLOPs for each number.
    """
    columns = tl.arange(0, COLS)
    is_column = columns < n_columns
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, COLS], tl.float32)
    of_shift, of_bias = of_weight, of_weight
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < n_rows
        at = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
        inside = is_row[:, None] & is_column[None, :]
        mean = tl.load(means + rows, mask=is_row, other=0.0)
        scale = tl.load(scales + rows, mask=is_row, other=0.0)
        row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        unit = tl.where(is_column[None, :], (row - mean[:, None]) * scale[:, None], 0.0)
        d = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        g = d * factor[None, :]
        g -= (tl.sum(g, 1)[:, None] + unit * tl.sum(g * unit, 1)[:, None]) / n_columns
        tl.store(dx + at, (above + g * scale[:, None]).to(dx.dtype.element_ty), mask=inside)
        of_weight += d * unit
        of_shift += d
        of_bias += above
    sums += tl.program_id(0) * 3 * n_columns + columns
    tl.store(sums, tl.sum(of_weight, 0), mask=is_column)
    tl.store(sums + n_columns, tl.sum(of_shift, 0), mask=is_column)
    tl.store(sums + 2 * n_columns, tl.sum(of_bias, 0), mask=is_column)


def launch_backward(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the stream ``[..., C]``, and the sums ``[3, C]`` for the norm's weight,
    the norm's bias and the product's.
    """
    given = [t.contiguous() for t in (x, mean, scale, weight, d_out, d_normed)]
    n_columns, n_rows = x.shape[-1], x.shape[:-1].numel()
    cols = triton.next_power_of_2(n_columns)
    n_each, n_stages = (4, 5) if cols <= 1024 else (2, 3)  # programs of a multiprocessor, rows under way in each
    n_sums = min(n_rows, n_each * n_programs(x.device) if x.is_cuda else 3)
    dx, sums = torch.empty_like(given[0]), x.new_empty(n_sums, 3, n_columns, dtype=torch.float32)
    if n_sums > 0:
        sizes, n_warps = (n_rows, n_columns, 1, cols, n_stages), min(32, max(2, cols // 512))
        norm_and_bias_backward_kernel[(n_sums,)](*given, dx, sums, *sizes, num_warps=n_warps)
    return dx, add_rows(sums)


def fits(*xs: Tensor) -> bool:
    """Whether the kernel has room for rows of these tensors ``[..., C]``."""
    return all(triton.next_power_of_2(x.shape[-1]) * x.element_size() <= MOST_BYTES for x in xs)


# ---- as PyTorch and its compiler see it ------------------------------------------------------------------------------


@torch.library.custom_op("scaling_workbook::norm_and_bias_backward", mutates_args=())
def norm_and_bias_backward(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """`launch_backward`, also without a GPU."""
    if HAS_TRITON and not INTERPRETED and x.is_cuda and fits(x, d_normed):
        return launch_backward(x, mean, scale, weight, d_out, d_normed)
    unit = (x.float() - mean) * scale
    d, above = d_normed.float(), d_out.float()
    g = d * weight.float()
    g = g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True)
    dx = above + g * scale
    return dx.to(x.dtype).contiguous(), torch.stack([t.flatten(0, -2).sum(0) for t in (d * unit, d, above)])


@norm_and_bias_backward.register_fake
def _(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, d_out: Tensor, d_normed: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(3, x.shape[-1], dtype=torch.float32)


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
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.dtypes = weight.dtype, shift.dtype, bias.dtype
        return x.view_as(x), ((wide - mean) * scale * weight + shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_normed: Tensor) -> tuple:
        dx, sums = norm_and_bias_backward(*ctx.saved_tensors, d_out, d_normed)
        return dx, *(s.to(dtype) for s, dtype in zip(sums.unbind(), ctx.dtypes, strict=True)), None, None


def norm_and_bias(
    x: Tensor, layer: torch.nn.LayerNorm, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize the residual stream, and sum the gradient of the bias of the product with which the branch will end.

    Args:
        x: The stream ``[..., C]``.
        layer: A layer norm over C with weight and bias.
        bias: ``[C]``. The product gets it detached.
        dtype: Dtype of the norm, that of ``x`` by default.

    Returns:
        The stream, to which the branch is added and through which ``bias`` gets its gradient; and ``layer(x)``.
    """
    return NormAndBias.apply(x, layer.weight, layer.bias, bias, layer.eps, dtype or x.dtype)
