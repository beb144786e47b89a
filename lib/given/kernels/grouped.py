"""Launch the kernel of chapter 19: which program computes which rows of which expert is worked out on the device."""

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.given.kernels.autocast import factor_dtype
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, MatmulTiles, tl, triton
from lib.given.kernels.once import first_derivative_only

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

__all__ = [
    "check_groups",
    "grouped_tiles",
    "launch_grouped",
    "launch_weight_gradients",
    "tile_of_program",
    "with_gradients",
]


def check_groups(x: Tensor, weights: Tensor, counts: Tensor) -> None:
    """Reject operands that don't fit together; reads counts on a CPU only, so a GPU need not be waited for.

    Raises:
        ValueError: the shapes or dtypes do not fit, or the counts do not add up to the rows; the message shows them.
    """
    fits = x.ndim == 2 and weights.ndim == 3 and counts.ndim == 1
    if not fits or x.shape[1] != weights.shape[1] or len(counts) != len(weights):
        shapes = f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, counts {tuple(counts.shape)}"
        raise ValueError(f"{shapes}: expected [N, C], [E, C, F] and [E]")
    if factor_dtype(x) != factor_dtype(weights) or counts.is_floating_point():
        raise ValueError(
            f"x is {x.dtype}, weights {weights.dtype}, counts {counts.dtype}: expected one dtype, and integers"
        )
    if counts.device.type == "cpu" and (sum(rows := counts.tolist()) != len(x) or min(rows, default=0) < 0):
        raise ValueError(f"counts are {rows}: expected numbers of rows that add up to {len(x)}")


def grouped_tiles(dtype: torch.dtype) -> list[MatmulTiles]:
    """Small tiles for the interpreter; on a GPU, tiles for rows that come in groups of some hundred,
    of which the autotuner takes the quickest.
    """
    if INTERPRETED:
        return [MatmulTiles(16, 32, 16, 3)]
    if dtype == torch.float32:
        return [MatmulTiles(64, 64, 32, 8)]
    wide = [MatmulTiles(128, 256, 64, group, num_warps=8, num_stages=stages) for group, stages in ((8, 3), (16, 4))]
    return [
        *wide,
        MatmulTiles(128, 128, 64, 8, num_warps=8, num_stages=4),
        MatmulTiles(128, 128, 64, 16, num_warps=4, num_stages=4),
    ]


@functools.cache
def _tuned(kernel, dtype: torch.dtype):
    """The kernel with Triton's autotuner around it, which times the tiles at the first call for
    each shape of the weights.
    """
    configs = [
        triton.Config({"TILE_N": t.n, "TILE_K": t.k, "GROUP": t.group}, num_warps=t.num_warps, num_stages=t.num_stages)
        for t in grouped_tiles(dtype)
    ]
    return triton.autotune(configs, key=["C", "F"])(kernel)


@triton.jit
def tile_of_program(GROUP: tl.constexpr):
    """Row and column of this program's tile, in chapter 14's order:
    programs that run together share GROUP tiles of rows, and columns.
    """
    n_rows, n_columns = tl.num_programs(0), tl.num_programs(1)
    program = tl.program_id(0) + tl.program_id(1) * n_rows
    first = program // (GROUP * n_columns) * GROUP
    height = tl.minimum(n_rows - first, GROUP)
    inside = program % (GROUP * n_columns)
    return first + inside % height, inside // height


def launch_grouped(
    kernel, x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """Launch a kernel that multiplies the rows of each expert with the expert's matrix.

    The grid has one program for each tile of the result, and some that find nothing to do:
    how many tiles of rows there are depends on ``counts``, which the host does not read,
    so the grid has the largest number that N rows of E experts can have.

    Args:
        kernel: Takes x, weights, out, first_rows, first_tiles, C, F, E, the strides of x and of weights,
            and the constants TILE_M, TILE_N, TILE_K, GROUP and EXPERTS, the power of two that holds E.
            Entry e of ``first_rows`` is the first row of expert e, entry e of ``first_tiles`` its first tile of rows;
            both have an entry more, for the end.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (tiles, *others), (n_rows, width), (n_experts, _, columns) = grouped_tiles(x.dtype), x.shape, weights.shape
    counts = counts.to(torch.int64)
    first_rows = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    first_tiles = torch.cat([counts.new_zeros(1), ((counts + tiles.m - 1) // tiles.m).cumsum(0)])
    out = x.new_empty(n_rows, columns)
    n_tiles = min(n_rows, triton.cdiv(n_rows, tiles.m) + n_experts)
    if out.numel():
        operands = x, weights, out, first_rows, first_tiles, width, columns, n_experts, *x.stride(), *weights.stride()
        constants: dict[str, int] = {"TILE_M": tiles.m, "EXPERTS": triton.next_power_of_2(n_experts)}
        if others:
            _tuned(kernel, x.dtype)[lambda chosen: (n_tiles, triton.cdiv(columns, chosen["TILE_N"]))](
                *operands, **constants
            )
        else:
            constants |= {"TILE_N": tiles.n, "TILE_K": tiles.k, "GROUP": tiles.group}
            kernel[(n_tiles, triton.cdiv(columns, tiles.n))](*operands, **constants)
    return out


@triton.jit
def weight_gradient_kernel(
    x, grad, out, first_rows, C, F, xn, xc, gn, gf,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (i, j, e) computes a tile of the gradient of expert e's matrix; its sum runs over the expert's rows,
    TILE_K at a time.
    """
    i, j = tile_of_program(GROUP)
    expert = tl.program_id(2).to(tl.int64)
    c = (i * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    f = (j * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    end = tl.load(first_rows + expert + 1)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(tl.load(first_rows + expert), end, TILE_K):
        rows = first + tl.arange(0, TILE_K)
        left = tl.load(
            x + c[:, None] * xc + rows[None, :] * xn, mask=(c < C)[:, None] & (rows < end)[None, :], other=0.0
        )
        right = tl.load(
            grad + rows[:, None] * gn + f[None, :] * gf, mask=(rows < end)[:, None] & (f < F)[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (c < C)[:, None] & (f < F)[None, :]
    tl.store(out + expert * C * F + c[:, None] * F + f[None, :], total.to(out.dtype.element_ty), mask=inside)


def launch_weight_gradients(
    x: Float[Tensor, "n c"], grad: Float[Tensor, "n f"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "e c f"]:
    """For each expert the product of its transposed rows of x with its rows of grad;
    zeros for an expert without rows.
    """
    (tiles, *others), (_, width), columns = grouped_tiles(x.dtype), x.shape, grad.shape[1]
    counts = counts.to(torch.int64)
    first_rows = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    out = x.new_empty(len(counts), width, columns)
    operands = x, grad, out, first_rows, width, columns, *x.stride(), *grad.stride()
    if others:
        _tuned(weight_gradient_kernel, x.dtype)[
            lambda chosen: (triton.cdiv(width, tiles.m), triton.cdiv(columns, chosen["TILE_N"]), len(counts))
        ](*operands, TILE_M=tiles.m)
    else:
        grid = (triton.cdiv(width, tiles.m), triton.cdiv(columns, tiles.n), len(counts))
        weight_gradient_kernel[grid](*operands, TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group)
    return out


def _weight_gradients(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float64:
        return launch_weight_gradients(x, grad, counts)
    sizes = counts.tolist()
    return torch.stack([rows.T @ g for rows, g in zip(x.split(sizes), grad.split(sizes), strict=True)])


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, product: Product, of_weights: Product, x: Tensor, weights: Tensor, counts: Tensor
    ) -> Tensor:
        ctx.product, ctx.of_weights = product, of_weights
        ctx.save_for_backward(x, weights, counts)
        return product(x, weights, counts)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        x, weights, counts = ctx.saved_tensors
        dx = ctx.product(grad, weights.transpose(1, 2), counts) if ctx.needs_input_grad[2] else None
        return None, None, dx, ctx.of_weights(x, grad, counts) if ctx.needs_input_grad[3] else None, None


def with_gradients(
    product: Product,
    x: Float[Tensor, "n c"],
    weights: Float[Tensor, "e c f"],
    counts: Int[Tensor, " e"],
    of_weights: Product = _weight_gradients,
) -> Float[Tensor, "n f"]:
    """``product(x, weights, counts)`` as a step of autograd, by equation (19.6).

    The gradient of x is a grouped product again, with every matrix transposed: ``product(grad,
    weights.transpose(1, 2), counts)``.
    The gradient of a matrix is the product of its expert's transposed rows with their gradients:
    ``of_weights(x, grad, counts)``.
    Under autocast both factors are cast to its dtype first, except float64;
    their gradients come back in their own dtypes.
    """
    x, weights = x.to(factor_dtype(x)), weights.to(factor_dtype(weights))
    return _GroupedProduct.apply(product, of_weights, x, weights, counts)
