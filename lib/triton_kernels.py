"""Kernels in Triton, in which each program owns a tile of the result."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.mode import INTERPRETED, block_of, check_tensors, matmul_tiles, rows_of, tl, triton, warps_of
from lib.given.kernels.once import first_derivative_only

# ---- 14.1 ------------------------------------------------------------------------------------------------------------


@triton.jit
def vector_add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Program i adds elements i * BLOCK up to (i + 1) * BLOCK of two vectors of n elements.

    X, y and out are pointers.
    """


def vector_add(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Sum of two tensors, computed by a kernel. (Exercise 14.1)

    Size: 20 minutes, difficulty 2, warm-up.

    Args:
        x: Any shape and strides, also empty; float32, float16 or, on a GPU, bfloat16.
        y: The same shape, dtype and device as x.

    Returns:
        x + y in a new contiguous tensor of that shape and dtype; x and y stay unchanged.
        Forward only: the result has no gradient.

    Raises:
        ValueError: the shapes differ (the message shows both), or `check_tensors` raises it.

    Cost: one launch.
        Each element of x and y is read once, each element of the result is written once, and no other memory is
        touched.
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
    """Program i writes ROWS rows of dx, and their share in the weight's gradient into row i of ``partial``."""


class WeightedSum(torch.autograd.Function):
    """The two kernels as one step of autograd; x is a contiguous matrix, weight a contiguous vector."""

    @staticmethod
    def forward(ctx, x: Float[Tensor, "n d"], weight: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
        """Launch `weighted_sum_kernel`, and save what the backward pass needs."""

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Float[Tensor, " n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
        """Launch `weighted_sum_backward_kernel`, then add the rows of ``partial``, float32 ``[programs, D]``."""


def weighted_sum(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"]) -> Float[Tensor, "..."]:
    """Sum over the last dimension, each feature times its weight, with a backward pass. (Exercise 14.2)

    Size: 30 minutes, difficulty 3, core.

    Args:
        x: [..., D], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        weight: [D], any stride, with the dtype and device of x.

    Returns:
        [...] in the dtype of x, summed in float32. Differentiable, with the gradients of equation (14.3). The weight's
        gradient is summed in float32 within each tile of rows first, then over the tiles, without atomics.

    Raises:
        ValueError: weight is not [D] (the message shows both shapes), or `check_tensors` raises it.
        RuntimeError: somebody asks for a second derivative (`first_derivative_only` raises it).

    Cost: one launch in the forward pass and one in the backward pass; each of them reads each element of x once.
    """
    check_tensors(x, weight)
    if weight.ndim != 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [..., D] and [D]")
    raise NotImplementedError("Exercise 14.2: write weighted_sum")


# ---- 14.3 ------------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x, out, width, row_stride, BLOCK: tl.constexpr):
    """Program i computes row i, which fits into BLOCK.

    Rows of x begin row_stride elements apart, rows of out width apart.
    """


def softmax_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Softmax of each row of a matrix, in one pass over memory. (Exercise 14.3)

    Size: 20 minutes, difficulty 3, core.

    Args:
        x: [N, D], any strides, also empty; float32, float16 or, on a GPU, bfloat16. Scores may be -inf.

    Returns:
        [N, D], contiguous, in the dtype of x; computed in float32. Forward only: the result has no gradient.

    Raises:
        ValueError: x is not a matrix, or `check_tensors` raises it.

    Cost: one launch; each element is read once and written once.
    Convention: a row that is all -inf gives zeros, as in chapter 3. PyTorch's softmax returns NaN.
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
    """Each program computes one tile of a @ b, in the order of equation (14.5).

    Element (i, j) is am * i + ak * j elements after the pointer a; in b it is bk * i + bn * j after b. out is
    contiguous.
    """


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Product of two matrices, computed in tiles. (Exercise 14.4)

    Size: 40 minutes, difficulty 4, core.

    Args:
        a: [M, K], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        b: [K, N], any strides, with the dtype and device of a.

    Returns:
        a @ b, contiguous, in the dtype of a. Products of float32 tiles are true float32 (no TF32), sums are in float32.
        Forward only: the result has no gradient.

    Raises:
        ValueError: the shapes do not fit (the message shows both), or `check_tensors` raises it.

    Cost: one launch, and no copy of a or b.
        Program p writes the tile of equation (14.5), whose size `matmul_tiles` chooses, and reads each element of its
        rows of a and of its columns of b once.
    """
    check_tensors(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)}: expected [M, K] and [K, N]")
    raise NotImplementedError("Exercise 14.4: write matmul")


# ---- 14.5 ------------------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, weight, out, width, row_stride, eps, BLOCK: tl.constexpr):
    """Program i computes row i, which fits into BLOCK.

    Rows of x begin row_stride elements apart, rows of out width apart.
    """


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float = 1e-5) -> Float[Tensor, "... d"]:
    """Chapter 4's RMSNorm, in one pass over memory. (Exercise 14.5)

    Size: 30 minutes, difficulty 3, core.

    Args:
        x: [..., D], any strides, also empty; float32, float16 or, on a GPU, bfloat16.
        weight: [D], any stride, with the dtype and device of x.
        eps: Added to the mean square, under the root.

    Returns:
        Equation (14.6), contiguous, with the shape and dtype of x; computed in float32, with one cast at the end.
        Forward only: the result has no gradient.

    Raises:
        ValueError: weight is not [D] (the message shows both shapes), or `check_tensors` raises it.

    Cost: one launch; each element of x is read once and written once.
    """
    check_tensors(x, weight)
    if weight.ndim != 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [..., D] and [D]")
    raise NotImplementedError("Exercise 14.5: write rms_norm")
