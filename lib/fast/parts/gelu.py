"""The GELU of ``x + bias`` in one kernel, and the gradients of both in another.

In the middle of an MLP of ViT-L/16 there are, for 256 images, 50,432 rows of 4096 numbers: 413 MB in bf16.
Written as operators, the bias is added at the end of the product before it.
The backward pass then goes over the rows for their gradient, and the compiler computes that gradient a second time,
only to sum it for the bias.
Here the product comes without its bias, and each number crosses the memory bus only as often as it must.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lib.fast.parts.sums import add_rows
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, tl, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

P, TAIL = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""p and the coefficients of Abramowitz and Stegun's formula 7.1.26,
whose error of at most 1.5e-7 is close to float32's rounding.
"""

A, B, C, D, E = (tl.constexpr(coefficient / 2) for coefficient in TAIL)
SLOPE = tl.constexpr(P * 0.5**0.5)
MINUS_HALF_LOG2E = tl.constexpr(-0.5 * math.log2(math.e))
PEAK = tl.constexpr((2 * math.pi) ** -0.5)  # of the normal distribution's density

CUBIC = tl.constexpr(0.044715)  # of the approximation by a tanh, as PyTorch has it
TWO_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))
LINEAR = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))  # of the exponent, in bits


class Tiles(NamedTuple):
    """How a kernel is cut: each program computes ``steps`` tiles of ``rows`` x ``columns``, one below the other."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int = 1  # with more, later tiles are loaded early, through shared memory


FORWARD, BACKWARD = Tiles(8, 512, 1, 4), Tiles(16, 128, 8, 4, 3)

# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _exp2(x, ONE_INSTRUCTION: tl.constexpr):
    """2^x; as one instruction with an error of at most two units in the last place."""
    if ONE_INSTRUCTION:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def _inverse(x, ONE_INSTRUCTION: tl.constexpr):
    """1 / x, as one instruction in the same way."""
    if ONE_INSTRUCTION:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def _bell_and_tail(size, ONE_INSTRUCTION: tl.constexpr):
    """exp(-size^2 / 2), and the factor that turns it into the share of the normal distribution above ``size`` >= 0."""
    bell = _exp2(size * size * MINUS_HALF_LOG2E, ONE_INSTRUCTION)
    t = _inverse(1.0 + SLOPE * size, ONE_INSTRUCTION)
    return bell, t * (A + t * (B + t * (C + t * (D + t * E))))


@triton.jit
def _gelu_and_slope(y, TANH: tl.constexpr, ONE_INSTRUCTION: tl.constexpr):
    """The GELU y s and its derivative s + y s', where s is the share of the normal distribution below y,
    or (1 + tanh) / 2.
    """
    if TANH:
        square = y * y
        power = _exp2(y * (LINEAR + CUBIC * LINEAR * square), ONE_INSTRUCTION)
        s = _inverse(1.0 + power, ONE_INSTRUCTION)
        gelu = y * s
        if ONE_INSTRUCTION:  # for 16 bits
            both = s - s * s
        else:  # s (1 - s) without a difference of almost equal numbers; 0 where s is 0
            both = tl.minimum(power, 1e38) * s * s
        slope = s + both * y * (TWO_ROOT + 3.0 * CUBIC * TWO_ROOT * square)
    else:
        bell, tail = _bell_and_tail(tl.abs(y), ONE_INSTRUCTION)
        share = tl.where(y < 0.0, bell * tail, 1.0 - bell * tail)
        gelu = y * share
        slope = share + y * (PEAK * bell)
    return gelu, slope


@triton.jit
def bias_gelu_forward_kernel(
    x, bias, out, n_rows, n_columns,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, TANH: tl.constexpr,
    ONE_INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """Bytes moved: 1 read and 1 write of the rows.

    About 20 instructions for each number; its bytes take the time of 30.
    """
    n_across = tl.cdiv(n_columns, COLS)
    first = tl.program_id(0) // n_across * ROWS * STEPS
    x += first.to(tl.int64) * n_columns
    out += first.to(tl.int64) * n_columns
    columns = tl.program_id(0) % n_across * COLS + tl.arange(0, COLS)
    shift = tl.load(bias + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
    for start in tl.range(0, ROWS * STEPS, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        at = rows[:, None] * n_columns + columns[None, :]
        inside = (first + rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        y, _ = _gelu_and_slope(y, TANH, ONE_INSTRUCTION)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward_kernel(
    x, bias, d_out, dx, sums, n_rows, n_columns,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, TANH: tl.constexpr,
    ONE_INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """Bytes moved: 2 reads and 1 write of the rows, and a row of float32 sums for each ROWS * STEPS of them."""
    n_across = tl.cdiv(n_columns, COLS)
    first = tl.program_id(0) // n_across * ROWS * STEPS
    x += first.to(tl.int64) * n_columns
    d_out += first.to(tl.int64) * n_columns
    dx += first.to(tl.int64) * n_columns
    columns = tl.program_id(0) % n_across * COLS + tl.arange(0, COLS)
    shift = tl.load(bias + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(0, ROWS * STEPS, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        at = rows[:, None] * n_columns + columns[None, :]
        inside = (first + rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        _, slope = _gelu_and_slope(y, TANH, ONE_INSTRUCTION)
        d *= slope
        total += d
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    sums += (tl.program_id(0) // n_across).to(tl.int64) * n_columns
    tl.store(sums + columns, tl.sum(total, 0), mask=columns < n_columns)


def launch_forward(x: Tensor, bias: Tensor, approximate: str = "none", tiles: Tiles = FORWARD) -> Tensor:
    """The forward kernel's result, contiguous, for the ``x`` and ``bias`` of `bias_gelu`."""
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    _launch(bias_gelu_forward_kernel, tiles, approximate, x, bias, out)
    return out


def launch_backward(
    x: Tensor, bias: Tensor, d_out: Tensor, approximate: str = "none", tiles: Tiles = BACKWARD
) -> tuple[Tensor, Tensor]:
    """The gradients of both; that of the bias is summed in float32, always in the same order."""
    x, bias, d_out = x.contiguous(), bias.contiguous(), d_out.contiguous()
    dx = torch.empty_like(x)
    n_sums = triton.cdiv(_n_rows(x), tiles.rows * tiles.steps)
    sums = torch.empty(n_sums, len(bias), dtype=torch.float32, device=x.device)
    _launch(bias_gelu_backward_kernel, tiles, approximate, x, bias, d_out, dx, sums)
    return dx, add_rows(sums).to(bias.dtype)


def _n_rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _launch(kernel: Any, tiles: Tiles, approximate: str, *tensors: Tensor) -> None:
    n_rows, n_columns = _n_rows(tensors[0]), tensors[0].shape[-1]
    n_programs = triton.cdiv(n_rows, tiles.rows * tiles.steps) * triton.cdiv(n_columns, tiles.columns)
    one_instruction = torch.version.cuda is not None and not INTERPRETED
    cut = (tiles.rows, tiles.columns, tiles.steps, tiles.stages, approximate == "tanh", one_instruction)
    if n_programs > 0:
        kernel[(n_programs,)](*tensors, n_rows, n_columns, *cut, num_warps=tiles.warps)


# ---- as PyTorch and its compiler see them ----------------------------------------------------------------------------


def _has_kernel(x: Tensor) -> bool:
    return HAS_TRITON and not INTERPRETED and x.is_cuda


@torch.library.custom_op("scaling_workbook::bias_gelu", mutates_args=())
def bias_gelu_op(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """`bias_gelu` without its checks."""
    if _has_kernel(x):
        return launch_forward(x, bias, approximate)
    return F.gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype).contiguous()


@torch.library.custom_op("scaling_workbook::bias_gelu_backward", mutates_args=())
def bias_gelu_backward_op(x: Tensor, bias: Tensor, d_out: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``bias``, in their dtypes."""
    if _has_kernel(x):
        return launch_backward(x, bias, d_out, approximate)
    dx = torch.ops.aten.gelu_backward(d_out.float(), x.float() + bias.float(), approximate=approximate)
    return dx.to(x.dtype).contiguous(), dx.flatten(0, -2).sum(0).to(bias.dtype)


@bias_gelu_op.register_fake
def _(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


@bias_gelu_backward_op.register_fake
def _(x: Tensor, bias: Tensor, d_out: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*bias_gelu_backward_op(*ctx.saved_tensors, d_out, ctx.approximate), None)


bias_gelu_op.register_autograd(_backward, setup_context=_save)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """The GELU of ``x + bias``, computed in float32 with an error of at most 1e-6.

    Args:
        x: ``[..., C]``, a product without its bias; bfloat16, float16 or float32.
        bias: ``[C]``, of any floating-point dtype.
        approximate: "none" or "tanh", as PyTorch's ``gelu`` has it.

    Returns:
        ``[..., C]`` in the dtype of ``x``, contiguous; nan on a GPU where ``x + bias`` is infinite.
        The backward pass keeps ``x`` and ``bias``, and returns gradients in their dtypes.

    Raises:
        ValueError: a shape, a dtype or ``approximate`` is not one of these.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if not bias.dtype.is_floating_point:
        raise ValueError(f"bias is {bias.dtype}, expected a dtype of floating point")
    if x.ndim < 2 or bias.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)}, bias {tuple(bias.shape)}: expected [..., C], two axes or more, and [C]")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate = {approximate!r}: expected 'none' or 'tanh'")
    return bias_gelu_op(x, bias, approximate)
