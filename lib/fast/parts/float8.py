"""Chapter 20's delayed scales for a whole model: every matrix is cast to float8 in one pass.

A product sums along the rows of its left factor and the columns of its right one,
and the tensor cores want float8 factors to lie in memory along that sum.
Each matrix of a linear layer is a factor twice, along different dimensions.
With a scale from the tensor itself, a matrix is read for its largest magnitude, read again to be rounded,
and its rounded copy is read to be transposed.
With a scale that is known before the step, one pass is enough: a tile is read, rounded and stored in both orders,
and its largest magnitude is recorded for later steps.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.given.kernels.mode import HAS_TRITON, tl, triton
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.quantized import largest, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSORS = (E4M3, E4M3, E5M2)  # the input, the weight and the gradient of a layer
ROWS, COLUMNS = 64, 128  # a tile of the cast


@triton.jit
def cast_kernel(
    x, scale, out, flipped, amax, M, K, BOUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile of x ``[M, K]``, divided by the scale and rounded, into ``out`` ``[M, K]`` and ``flipped`` ``[K, M]``."""
    factor = tl.load(scale)
    inverse, bound = tl.div_rn(1.0, factor), BOUND * factor
    n_across = tl.cdiv(K, COLUMNS)
    rows = (tl.program_id(0) // n_across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(0) % n_across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    place = rows[:, None] * K + columns[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(value))
    if not (size <= bound):  # few tiles have something to saturate; NaN stays
        size = tl.max(tl.where(tl.abs(value) < float("inf"), tl.abs(value), 0.0))
        value = tl.where(value > bound, bound, tl.where(value < -bound, -bound, value))
    tl.atomic_max(amax, size, sem="relaxed")
    quotient = value * inverse
    rest = tl.fma(quotient, tl.full([ROWS, COLUMNS], -factor, tl.float32), value)
    quotient = tl.fma(rest, tl.full([ROWS, COLUMNS], inverse, tl.float32), quotient)  # as if divided
    tl.store(out + place, quotient.to(out.dtype.element_ty), mask=inside)
    # The tile is transposed after a round trip through memory. Transposed in registers, it would be rounded twice, and
    # Triton 3.6's assembler takes the wrong bytes out of pairs that were just rounded from float32.
    tl.debug_barrier()
    rounded = tl.load(out + place, mask=inside, other=0.0)
    both = (columns < K)[:, None] & (rows < M)[None, :]
    tl.store(flipped + columns[:, None] * M + rows[None, :], tl.trans(rounded), mask=both)


@torch.library.custom_op("scaling_workbook::cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Chapter 20's ``quantize`` of a matrix, the same transposed, and the largest finite magnitude.

    Args:
        x: ``[M, K]``.
        scale: A float32 scalar, as `usable` returns it.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        ``[M, K]`` and ``[K, M]``, contiguous, and a float32 scalar.
    """
    if x.is_cuda and HAS_TRITON and x.numel():
        return launch_cast(x, scale, dtype)
    rounded = (x.float() / scale).clamp(-largest(dtype), largest(dtype)).to(dtype).contiguous()
    return rounded, rounded.T.clone(memory_format=torch.contiguous_format), finite_amax(x)


def launch_cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, stored: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`cast_both` by `cast_kernel`; with ``stored`` float32 the quotients stay as they are, for a test."""
    (m, k), x, amax = x.shape, x.contiguous(), x.new_zeros((), dtype=torch.float32)
    out, flipped = (x.new_empty(shape, dtype=stored or dtype) for shape in ((m, k), (k, m)))
    grid = (triton.cdiv(m, ROWS) * triton.cdiv(k, COLUMNS),)
    cast_kernel[grid](x, scale, out, flipped, amax, m, k, largest(dtype), ROWS, COLUMNS, num_warps=4)
    return out, flipped, amax


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    return x.new_empty(m, k, dtype=dtype), x.new_empty(k, m, dtype=dtype), x.new_empty((), dtype=torch.float32)


def finite_amax(x: Tensor) -> Tensor:
    """The largest finite magnitude, a float32 scalar; 0 if there is none."""
    size = x.float().abs()
    return torch.where(size < torch.inf, size, 0.0).amax() if x.numel() else size.new_zeros(())


@torch.library.custom_op("scaling_workbook::product_of_rows", mutates_args=())
def product_of_rows(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """``(a scale_a) @ (b scale_b).T + bias`` of contiguous float8 ``[M, K]`` and ``[N, K]``,
    as an operator that the compiler leaves alone.
    """
    return scaled_mm(a, b.T, scale_a, scale_b, dtype, fast, bias).contiguous()


@product_of_rows.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


def _cast(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_both`, and the scale: without one, chapter 20's ``absmax_scale`` of x."""
    scale = usable(finite_amax(x) / largest(dtype)) if scale is None else scale
    rounded, flipped, amax = cast_both(x, scale, dtype)
    return rounded, flipped, scale, amax


def usable(scale: Tensor) -> Tensor:
    """The scale, or 1 where it is 0 or so small that its inverse could be infinite."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, known: bool) -> Tensor:
        """The backward pass returns the largest magnitudes of the three tensors as the gradient of ``scales``."""
        of_x, of_weight, of_grad = scales[:, 0].unbind() if known else (None, None, None)
        x8, x8_flipped, scale_x, amax_x = _cast(x, of_x, E4M3)
        w8, w8_flipped, scale_w, amax_w = _cast(weight, of_weight, E4M3)
        ctx.save_for_backward(x8_flipped, w8_flipped, scale_x, scale_w, amax_x, amax_w, of_grad)
        ctx.weight, ctx.bias = weight.dtype, None if bias is None else bias.dtype
        return product_of_rows(x8, w8, scale_x, scale_w, x.dtype, True, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8_flipped, w8_flipped, scale_x, scale_w, amax_x, amax_w, of_grad = ctx.saved_tensors
        g8, g8_flipped, scale_g, amax_g = _cast(grad, of_grad, E5M2)
        dx = product_of_rows(g8, w8_flipped, scale_g, scale_w, grad.dtype, False)
        dw = product_of_rows(g8_flipped, x8_flipped, scale_g, scale_x, ctx.weight, False)
        db = grad.sum(0, dtype=torch.float32).to(ctx.bias) if ctx.needs_input_grad[2] else None
        return dx, dw, db, torch.stack([amax_x, amax_w, amax_g])[:, None].expand(3, 4), None


class DelayedLinear(nn.Module):
    """Chapter 20's ``Float8Linear(linear, "delayed")`` with its history outside of the layer.

    `Scales` keeps the history, so that the compiler need not see it. In the forward product the tensor cores may add up
    in fewer bits than float32 has, as torchao allows them to.

    Args:
        linear: The layer, on the device where it stays; its parameters are used, not copied.

    Attributes:
        scales: ``[3, 4]``: one row each for the scale of the input, the weight and the gradient. A row repeats its
            scale four times, because cuBLAS reads a scale only at a multiple of 16 bytes. The "gradient" of ``scales``
            is not a gradient: it holds the largest magnitudes.
        known: Whether `Scales` has set the scales; until then each tensor is scaled by its own magnitude.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scales = torch.ones(3, 4, device=linear.weight.device, requires_grad=True)
        self.known = False

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """``x @ weight.T + bias`` in the dtype of x."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`forward` with another weight and bias, for layers that are joined."""
        out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, self.scales, self.known)
        return out.reshape(*x.shape[:-1], len(weight))


class Scales:
    """The history of all `DelayedLinear` layers of a model; call `step` after each backward pass, like an optimizer's.

    A step's largest magnitudes arrive as the gradients of the layers' scales, because a gradient is the only thing that
    a compiled backward pass may return for a tensor that it was given.

    Args:
        model: The model.
        history: Number of past steps whose magnitudes are remembered.
    """

    def __init__(self, model: nn.Module, history: int = 16):
        self.layers = [m for m in model.modules() if isinstance(m, DelayedLinear)]
        self.history = history
        self.amax: Tensor | None = None  # [history, layers, 3, 4]

    @torch.no_grad()
    def step(self) -> None:
        """Record the magnitudes, forget the oldest, and set the scales of the next step."""
        used = [layer for layer in self.layers if layer.scales.grad is not None]
        if self.amax is not None and len(used) != self.amax.shape[1]:
            raise RuntimeError(
                f"{len(used)} layers have gradients, {self.amax.shape[1]} had them before: "
                "expected a backward pass of all"
            )
        if not used:
            return
        now = torch.stack([torch.as_tensor(layer.scales.grad) for layer in used])
        if self.amax is None:  # later steps change these in place, so that they can be part of a CUDA graph
            self.amax = now.new_zeros(self.history, *now.shape)
            self.bounds = now.new_tensor([largest(dtype) for dtype in TENSORS])[:, None]
        self.amax.copy_(torch.cat([self.amax[1:], now[None]]))
        torch._foreach_copy_([layer.scales for layer in used], list(usable(self.amax.amax(0) / self.bounds).unbind()))
        for layer in used:
            layer.scales.grad, layer.known = None, True
