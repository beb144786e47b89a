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
    ### BEGIN SOLUTION
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    total = tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside)
    tl.store(out + index, total, mask=inside)
    ### END SOLUTION


def vector_add(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Sum of two tensors, computed by a kernel. (Exercise)

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
    ### BEGIN SOLUTION
    out = torch.empty_like(x)
    block = 64 if INTERPRETED else 2048
    vector_add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out
    ### END SOLUTION


# ---- 14.2 ------------------------------------------------------------------------------------------------------------


@triton.jit
def weighted_sum_kernel(x, weight, out, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program i sums ROWS rows of the contiguous matrix at x, BLOCK columns at a time."""
    ### BEGIN SOLUTION
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
        tile = tl.load(x + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        total += tl.sum(tile * w[None, :], axis=1)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < n_rows)
    ### END SOLUTION


@triton.jit
def weighted_sum_backward_kernel(
    x, weight, grad, dx, partial, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program i writes ROWS rows of dx, and their share in the weight's gradient into row i of ``partial``."""
    ### BEGIN SOLUTION
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = tl.load(grad + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
        place = rows[:, None] * width + columns[None, :]
        tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(dx + place, (g[:, None] * w[None, :]).to(dx.dtype.element_ty), mask=inside)
        mine = partial + tl.program_id(0).to(tl.int64) * width + columns
        tl.store(mine, tl.sum(tile * g[:, None], axis=0), mask=columns < width)
    ### END SOLUTION


class WeightedSum(torch.autograd.Function):
    """The two kernels as one step of autograd; x is a contiguous matrix, weight a contiguous vector."""

    @staticmethod
    def forward(ctx, x: Float[Tensor, "n d"], weight: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
        """Launch `weighted_sum_kernel`, and save what the backward pass needs."""
        ### BEGIN SOLUTION
        n_rows, width = x.shape
        ctx.save_for_backward(x, weight)
        ctx.block = block_of(width, 16 if INTERPRETED else 512)
        ctx.rows = rows_of(ctx.block)
        out = x.new_empty(n_rows)
        weighted_sum_kernel[(triton.cdiv(n_rows, ctx.rows),)](
            x, weight, out, n_rows, width, ROWS=ctx.rows, BLOCK=ctx.block
        )
        return out
        ### END SOLUTION

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Float[Tensor, " n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
        """Launch `weighted_sum_backward_kernel`, then add the rows of ``partial``, float32 ``[programs, D]``."""
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        (n_rows, width), n_programs = x.shape, triton.cdiv(x.shape[0], ctx.rows)
        dx, partial = torch.empty_like(x), x.new_empty(n_programs, width, dtype=torch.float32)
        weighted_sum_backward_kernel[(n_programs,)](
            x, weight, grad.contiguous(), dx, partial, n_rows, width, ROWS=ctx.rows, BLOCK=ctx.block
        )
        return dx, partial.sum(0).to(weight.dtype)
        ### END SOLUTION


def weighted_sum(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"]) -> Float[Tensor, "..."]:
    """Sum over the last dimension, each feature times its weight, with a backward pass. (Exercise)

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
    ### BEGIN SOLUTION
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    return WeightedSum.apply(rows, weight.contiguous()).reshape(x.shape[:-1])
    ### END SOLUTION


# ---- 14.3 ------------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x, out, width, row_stride, BLOCK: tl.constexpr):
    """Program i computes row i, which fits into BLOCK.

    Rows of x begin row_stride elements apart, rows of out width apart.
    """
    ### BEGIN SOLUTION
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scores = tl.load(x + row * row_stride + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    largest = tl.max(scores, axis=0)
    weights = tl.exp(scores - tl.where(largest == -float("inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    result = weights / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=columns < width)
    ### END SOLUTION


def softmax_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Softmax of each row of a matrix, in one pass over memory. (Exercise)

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
    ### BEGIN SOLUTION
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        block = block_of(x.shape[1])
        softmax_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=block, num_warps=warps_of(block))
    return out
    ### END SOLUTION


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
    ### BEGIN SOLUTION
    program, n_tiles = tl.program_id(0), tl.cdiv(N, TILE_N)
    first = program // (GROUP * n_tiles) * GROUP
    height = tl.minimum(tl.cdiv(M, TILE_M) - first, GROUP)
    inside_group = program % (GROUP * n_tiles)
    rows = ((first + inside_group % height) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    columns = (inside_group // height * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        k = (start + tl.arange(0, TILE_K)).to(tl.int64)
        a_inside, b_inside = (rows < M)[:, None] & (k < K)[None, :], (k < K)[:, None] & (columns < N)[None, :]
        left = tl.load(a + rows[:, None] * am + k[None, :] * ak, mask=a_inside, other=0.0)
        right = tl.load(b + k[:, None] * bk + columns[None, :] * bn, mask=b_inside, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    place = out + rows[:, None] * N + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])
    ### END SOLUTION


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Product of two matrices, computed in tiles. (Exercise)

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
    ### BEGIN SOLUTION
    tiles = matmul_tiles(a.dtype)
    out = a.new_empty(a.shape[0], b.shape[1])
    (m, k), n = a.shape, b.shape[1]
    matmul_kernel[(triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n),)](
        a, b, out, m, n, k, *a.stride(), *b.stride(),
        TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
    ### END SOLUTION


# ---- 14.5 ------------------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, weight, out, width, row_stride, eps, BLOCK: tl.constexpr):
    """Program i computes row i, which fits into BLOCK.

    Rows of x begin row_stride elements apart, rows of out width apart.
    """
    ### BEGIN SOLUTION
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    v = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / width + eps)
    tl.store(out + row * width + columns, (v * scale * w).to(out.dtype.element_ty), mask=inside)
    ### END SOLUTION


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float = 1e-5) -> Float[Tensor, "... d"]:
    """Chapter 4's RMSNorm, in one pass over memory. (Exercise)

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
    ### BEGIN SOLUTION
    rows, weight = x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        (n_rows, width), block = rows.shape, block_of(rows.shape[1])
        rms_norm_kernel[(n_rows,)](
            rows, weight, out, width, rows.stride(0), eps, BLOCK=block, num_warps=warps_of(block)
        )
    return out
    ### END SOLUTION
