"""Kernels in Triton: programs that each own a tile of the result."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.mode import INTERPRETED, block_of, check_tensors, matmul_tiles, rows_of, tl, triton, warps_of
from lib.given.kernels.once import first_derivative_only

# ---- 14.1 ------------------------------------------------------------------------------------------------------------


@triton.jit
def vector_add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Program i adds elements i * BLOCK up to (i + 1) * BLOCK of the vectors at pointers x and y; n elements in all."""


def vector_add(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Sum of two tensors, by a kernel. (Exercise 14.1)

    Args:
        x: Any shape and strides, also empty; float32, float16 or, on a GPU, bfloat16.
        y: Of the same shape, dtype and device.

    Returns:
        x + y in a new contiguous tensor of that shape and dtype. x and y stay as they are. Forward only: the result carries no
        gradient.

    Raises:
        ValueError: the shapes differ (the message shows both), or `check_tensors` refuses.

    Cost: one launch; each element is read once and written once; nothing beside them is touched.
    """
    check_tensors(x, y)
    if x.shape != y.shape:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)}: expected one shape")
    x, y = x.contiguous(), y.contiguous()
    raise NotImplementedError("Exercise 14.1: write vector_add")


# ---- 14.2 ------------------------------------------------------------------------------------------------------------


@triton.jit
def weighted_sum_kernel(x, weight, out, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program i sums ROWS rows of the contiguous matrix at x, BLOCK columns at a time."""


@triton.jit
def weighted_sum_backward_kernel(
    x, weight, grad, dx, partial, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program i writes ROWS rows of dx, and its own row of ``partial``: what these rows give to the weight's gradient."""


class WeightedSum(torch.autograd.Function):
    """The two kernels, as one step of autograd. x comes as a contiguous matrix, weight as a contiguous vector."""

    @staticmethod
    def forward(ctx, x: Float[Tensor, "n d"], weight: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
        """Launch `weighted_sum_kernel`, and save what the backward pass reads."""

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Float[Tensor, " n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
        """Launch `weighted_sum_backward_kernel`; add the rows of ``partial``, float32 ``[programs, D]``."""


def weighted_sum(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"]) -> Float[Tensor, "..."]:
    """Sum of the last dimension, each feature times its weight; with a backward pass. (Exercise 14.2)

    Args:
        x: [..., D], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        weight: [D], any stride, of the same dtype and device.

    Returns:
        [...] in the dtype of x; sums in float32. Differentiable: the gradients are equation (14.3), and the weight's is first
        summed over each tile of rows, then over the tiles, in float32, without atomics.

    Raises:
        ValueError: weight is not [D] (the message shows both shapes), or `check_tensors` refuses.
        RuntimeError: a second derivative is asked for (`first_derivative_only` sees to it).

    Cost: one launch forward, one backward; each element of x is read once in each.
    """
    check_tensors(x, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [..., D] and [D]")
    raise NotImplementedError("Exercise 14.2: write weighted_sum")


# ---- 14.3 ------------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x, out, width, row_stride, BLOCK: tl.constexpr):
    """Program i does row i, which fits into BLOCK numbers; rows of x begin row_stride elements apart, rows of out width."""


def softmax_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Softmax of each row of a matrix, in one pass over memory. (Exercise 14.3)

    Args:
        x: [N, D], any strides, also empty; float32, float16 or, on a GPU, bfloat16. Scores may be -inf.

    Returns:
        [N, D], contiguous, in the dtype of x; computed in float32. Forward only: the result carries no gradient.

    Raises:
        ValueError: x is no matrix, or `check_tensors` refuses.

    Cost: one launch; each element is read once and written once.
    Convention: a row of nothing but -inf gives zeros, as chapter 3's softmax. PyTorch's gives NaN.
    """
    check_tensors(x)
    if x.ndim != 2:
        raise ValueError(f"x {tuple(x.shape)}: expected a matrix [N, D]")
    x = x if x.stride(1) == 1 else x.contiguous()
    raise NotImplementedError("Exercise 14.3: write softmax_rows")


# ---- 14.4 ------------------------------------------------------------------------------------------------------------


@triton.jit
def matmul_kernel(
    a, b, out, M, N, K, am, ak, bk, bn,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of a @ b for each program, in the order of equation (14.5).

    Element (i, j) of a lies am * i + ak * j elements behind the pointer, and of b bk * i + bn * j; out is contiguous.
    """


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Product of two matrices, in tiles. (Exercise 14.4)

    Args:
        a: [M, K], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        b: [K, N], of the same dtype and device, any strides.

    Returns:
        a @ b, contiguous, in the dtype of a; products of float32 are exact to float32 (no TF32), sums are in float32. Forward
        only: the result carries no gradient.

    Raises:
        ValueError: the shapes do not fit (the message shows both), or `check_tensors` refuses.

    Cost: one launch, no copy of a or b. Program p writes the tile of equation (14.5), of the size that `matmul_tiles` gives,
    and reads each element of its rows of a and of its columns of b once.
    """
    check_tensors(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)}: expected [M, K] and [K, N]")
    raise NotImplementedError("Exercise 14.4: write matmul")


# ---- 14.5 ------------------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, weight, out, width, row_stride, eps, BLOCK: tl.constexpr):
    """Program i does row i, which fits into BLOCK numbers; rows of x begin row_stride elements apart, rows of out width."""


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float = 1e-5) -> Float[Tensor, "... d"]:
    """Chapter 4's RMSNorm, in one pass over memory. (Exercise 14.5)

    Args:
        x: [..., D], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        weight: [D], any stride, of the same dtype and device.
        eps: Added to the mean square, under the root.

    Returns:
        Equation (14.6), contiguous, in the shape and dtype of x; everything in float32, and one cast at the end. Forward only:
        the result carries no gradient.

    Raises:
        ValueError: weight is not [D] (the message shows both shapes), or `check_tensors` refuses.

    Cost: one launch; each element of x is read once and written once.
    """
    check_tensors(x, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [..., D] and [D]")
    raise NotImplementedError("Exercise 14.5: write rms_norm")
