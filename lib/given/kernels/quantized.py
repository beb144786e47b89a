"""What chapter 20 gives: the ranges of its formats, products of float8 on a GPU,
and a linear layer's step of autograd.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton
from lib.given.kernels.once import first_derivative_only

__all__ = [
    "BLOCK",
    "FORMATS",
    "expand_blocks",
    "has_float8",
    "largest",
    "scaled_mm",
    "tensor_core_product",
    "with_products",
]

BLOCK = 128
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def largest(dtype: torch.dtype) -> float:
    """The largest number of a format: 448 for e4m3fn, 57,344 for e5m2, 127 for int8.

    Raises:
        ValueError: another format.
    """
    if dtype not in FORMATS:
        raise ValueError(f"{dtype}: expected {', '.join(map(str, FORMATS))}")
    return float(torch.iinfo(dtype).max) if dtype == torch.int8 else torch.finfo(dtype).max


def expand_blocks(scale: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A scale for each number of a tensor of ``shape``: as it is if it broadcasts,
    else each entry for its block of 128 x 128.

    Raises:
        ValueError: it neither broadcasts nor has an entry for each block; the message shows both shapes.
    """
    if all(s in (1, n) for s, n in zip(scale.shape[::-1], shape[::-1], strict=False)) and scale.ndim <= len(shape):
        return scale
    if scale.ndim != 2 or tuple(scale.shape) != tuple(-(-n // BLOCK) for n in shape):
        raise ValueError(
            f"scale {tuple(scale.shape)} for {tuple(shape)}: expected one number, a row, a column, "
            "or one for each block"
        )
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def has_float8(a: Tensor) -> bool:
    """Whether ``a`` is float8 and lies on a GPU that multiplies float8 (compute capability 8.9 or higher)."""
    return a.is_cuda and a.dtype != torch.int8 and torch.cuda.get_device_capability(a.device) >= (8, 9)


def tensor_core_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product of float8 matrices on a GPU: by ``torch._scaled_mm``,
    or by `block_matmul_kernel` where blocks have scales.

    On Hopper the tensor cores keep fewer bits of a sum of float8 products than float32 has:
    where results are in the hundreds, they were off by about 0.1.
    """
    if not a.numel() or not b.numel():
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype, device=a.device)
    by_rows = scale_a.shape in ((), (1, 1), (len(a), 1)) and scale_b.shape in ((), (1, 1), (1, b.shape[1]))
    return (scaled_mm if by_rows else launch_block_matmul)(a, b, scale_a, scale_b, out_dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``torch._scaled_mm`` for any shapes and strides, with one scale for each matrix or one for each row of a and
    column of b.

    It wants a row after row, b column after column, and K and N that are multiples of 16,
    so the operands are padded and copied where they are not.
    With scales of rows it returns bfloat16 only: for another dtype the product is computed without them, in float32,
    and then scaled.

    Args:
        fast: Whether the tensor cores may keep their sums in fewer bits than float32 has.
        bias: ``[N]``, is added.
    """
    (m, k), n = a.shape, b.shape[1]
    if bias is not None:
        bias = bias.to(out_dtype)
        if scale_a.numel() * scale_b.numel() > 1 or n % 16 or out_dtype == torch.float32:
            return scaled_mm(a, b, scale_a, scale_b, out_dtype, fast) + bias
    operands = _padded(a, -k % 16, 0).contiguous(), _padded(b.T, -k % 16, -n % 16).contiguous().T
    scales = scale_a.float().expand(m, 1), scale_b.float().expand(1, n)
    if scale_a.numel() == scale_b.numel() == 1:
        one = {"scale_a": scale_a.float().reshape(()), "scale_b": scale_b.float().reshape(())}
        return torch._scaled_mm(*operands, **one, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)[:, :n]
    if out_dtype == torch.bfloat16:
        columns = torch.nn.functional.pad(scales[1], (0, -n % 16), value=1.0)
        by_rows = {"scale_a": scales[0].contiguous(), "scale_b": columns.contiguous()}
        return torch._scaled_mm(*operands, **by_rows, out_dtype=out_dtype, use_fast_accum=fast)[:, :n]
    one = {"scale_a": scale_a.new_ones((), dtype=torch.float32), "scale_b": scale_b.new_ones((), dtype=torch.float32)}
    total = torch._scaled_mm(*operands, **one, out_dtype=torch.float32, use_fast_accum=fast)[:, :n]
    return (total * scales[0] * scales[1]).to(out_dtype)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """The matrix with more columns and rows of zeros; zeros of 8 bits are zeros in every format,
    and not all of PyTorch pads float8.
    """
    if columns == rows == 0:  # even padding by nothing would copy
        return x
    return torch.nn.functional.pad(x.view(torch.int8), (0, columns, 0, rows)).view(x.dtype)


class _LinearProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, product: Callable) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product(x, weight.T, ("x", "weight"), (True, True))

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = ctx.product(grad, weight, ("grad", "weight"), (True, False)) if needs_x else None
        dw = ctx.product(grad.T, x, ("grad", "x"), (not needs_x, False)) if needs_weight else None
        return dx, None if dw is None else dw.to(weight.dtype), None


def with_products(x: Tensor, weight: Tensor, product: Callable) -> Tensor:
    """``x @ weight.T`` as a step of autograd whose three products are ``product(a, b, names, first)``.

    Forward asks for ``x @ weight.T``, with the names ("x", "weight").
    Backward asks for ``grad @ weight``, the gradient of x, with ("grad", "weight"), and for ``grad.T @ x``,
    the gradient of the weight, with ("grad", "x").

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``.
        product: Gets two matrices, what each of them is, and for each whether this is its first product in this step.
    """
    return _LinearProducts.apply(x, weight, product)


@triton.jit
def block_matmul_kernel(
    a, b, scale_a, scale_b, out, M, N, K, am, ak, bk, bn,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile of the product of two matrices whose blocks of 128 x 128 have scales; the grid is (tiles of rows,
    tiles of columns).

    Args:
        a, b, out: Pointers to ``[M, K]`` and ``[K, N]`` of 8 bits, and a contiguous ``[M, N]``.
            Element (i, j) of a is ``am * i + ak * j`` elements after its pointer; of b, ``bk * i + bn * j``.
        scale_a, scale_b: Pointers to contiguous float32 ``[ceil(M / 128), ceil(K / 128)]`` and ``[ceil(K / 128),
            ceil(N / 128)]``.
        TILE_M, TILE_N, TILE_K: Sizes of a tile; TILE_K is 128, the others divide 128.

    Returns:
        Nothing. Each step's product of 128 terms is accumulated in float32 and scaled before it is added.
    """
    rows = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    columns = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    a_scales = scale_a + tl.program_id(0) * TILE_M // 128 * tl.cdiv(K, 128)
    b_scales, n_blocks = scale_b + tl.program_id(1) * TILE_N // 128, tl.cdiv(N, 128)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for block in range(0, tl.cdiv(K, TILE_K)):
        k = (block * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
        a_inside, b_inside = (rows < M)[:, None] & (k < K)[None, :], (k < K)[:, None] & (columns < N)[None, :]
        left = tl.load(a + rows[:, None] * am + k[None, :] * ak, mask=a_inside, other=0.0)
        right = tl.load(b + k[:, None] * bk + columns[None, :] * bn, mask=b_inside, other=0.0)
        factor = tl.load(a_scales + block) * tl.load(b_scales + block * n_blocks)
        total += tl.dot(left, right).to(tl.float32) * factor
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


def launch_block_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product of matrices whose blocks of 128 x 128 have scales, by `block_matmul_kernel`;
    either may have one scale for all blocks.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (m, k), n = a.shape, b.shape[1]
    scale_a = scale_a.expand(-(-m // BLOCK), -(-k // BLOCK))
    scale_b = scale_b.expand(-(-k // BLOCK), -(-n // BLOCK))
    if INTERPRETED and a.dtype != torch.int8:
        a, b = a.half(), b.half()  # exact; the interpreter has no float8
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    tile = 32 if INTERPRETED else 128
    block_matmul_kernel[(triton.cdiv(m, tile), triton.cdiv(n, tile))](
        a, b, scale_a.contiguous(), scale_b.contiguous(), out, m, n, k, *a.stride(), *b.stride(),
        TILE_M=tile, TILE_N=tile, TILE_K=BLOCK, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
