"""Weights of four bits: back to float32, and the launch of chapter 20's kernel."""

import functools

from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton

__all__ = ["dequantize_int4", "launch_int4_matmul"]


def dequantize_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weights ``[N, K]``, float32: ``(q - zero) * scale``, with each group's scale and zero point."""
    levels = q.float().unflatten(1, (scale.shape[1], -1))
    return ((levels - zero[..., None].float()) * scale[..., None]).flatten(1)


@functools.cache
def _tuned(kernel, largest: int):
    """The kernel with Triton's autotuner around it, which times these tiles at the first call for
    each shape of the weights.
    """
    configs = [
        triton.Config({"TILE_N": tile_n, "TILE_K": tile_k}, num_warps=warps, num_stages=stages)
        for tile_n in (16, 32, 64)
        for tile_k in {min(largest, 64), largest}
        for warps, stages in ((2, 3), (4, 3), (4, 5))
    ]
    return triton.autotune(configs, key=["N", "K", "TILE_M"])(kernel)


@triton.jit
def one_row_kernel(
    x, packed, scale, zero, out, N, K, TILE_N: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """A row times packed weights, without tensor cores, whose tiles it would leave almost empty;
    one program for TILE_N columns.

    Every weight is used once, so what counts is how many bytes are on their way:
    a step asks for GROUPS groups of TILE_N columns.
    A group's levels are summed first, and its scale and zero point applied to the sum: s (sum of q x - z sum of x).
    """
    columns = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    pairs = x.to(tl.pointer_type(tl.uint32))  # two numbers of x beside each other, as in a byte
    within = tl.arange(0, GROUP // 2)
    total = tl.zeros([TILE_N], tl.float32)
    for start in range(0, K // GROUP, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = group < K // GROUP
        inside = (columns < N)[:, None] & known[None, :]
        at = group[:, None] * (GROUP // 2) + within[None, :]
        byte = tl.load(packed + (columns * (K // 2))[:, None, None] + at[None, :, :], mask=inside[:, :, None], other=0)
        pair = tl.load(pairs + at, mask=known[:, None], other=0)
        even = (pair & 0xFFFF).to(tl.uint16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        odd = (pair >> 16).to(tl.uint16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        sums = tl.sum((byte & 15).to(tl.float32) * even[None, :, :] + (byte >> 4).to(tl.float32) * odd[None, :, :], 2)
        of_scale = (columns * (K // GROUP))[:, None] + group[None, :]
        factor = tl.load(scale + of_scale, mask=inside, other=0.0)
        origin = tl.load(zero + of_scale, mask=inside, other=0).to(tl.float32)
        total += tl.sum(factor * (sums - origin * tl.sum(even + odd, 1)[None, :]), 1)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=columns < N)


@functools.cache
def _one_row_tuned():
    """The kernel for one row with Triton's autotuner around it."""
    configs = [
        triton.Config({"TILE_N": n, "GROUPS": groups}, num_warps=warps)
        for n in (1, 2, 4, 8)
        for groups in (8, 16, 32)
        for warps in (2, 4, 8)
        if 32 <= n * groups <= 256
    ]
    return triton.autotune(configs, key=["N", "K", "GROUP"])(one_row_kernel)


def launch_one_row(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Launch `one_row_kernel` for a row of 16 bits and groups whose size is a power of two: ``[1, K] x [N,
    K / 2] -> [1, N]``.
    """
    k, n = x.shape[1], len(packed)
    out, x = x.new_empty(1, n), x.contiguous()
    x = x if x.data_ptr() % 4 == 0 else x.clone()  # it is read four bytes at a time
    arguments = x, packed, scale.contiguous(), zero.contiguous(), out, n, k
    if INTERPRETED:
        one_row_kernel[(triton.cdiv(n, 4),)](*arguments, TILE_N=4, GROUPS=2, GROUP=k // scale.shape[1])
    else:
        grid = lambda tiles: (triton.cdiv(n, tiles["TILE_N"]),)
        _one_row_tuned()[grid](*arguments, GROUP=k // scale.shape[1])
    return out


def launch_int4_matmul(kernel, x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, always: bool = False) -> Tensor:
    """Launch a kernel that multiplies rows with packed four-bit weights: ``[M, K] x [N, K / 2] -> [M, N]``.

    On a GPU a single row of 16 bits goes to `one_row_kernel` instead, unless ``always`` is set.

    Args:
        kernel: Takes x, packed, scale, zero, out, M, N, K, the group size, and the constants TILE_M, TILE_N, TILE_K.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (m, k), n = x.shape, len(packed)
    out = x.new_empty(m, n)
    group = k // scale.shape[1]
    if not (always or INTERPRETED) and m == 1 and x.element_size() == 2 and group & (group - 1) == 0 and group >= 32:
        return launch_one_row(x, packed, scale, zero)
    tile_k = min(group & -group, 128)  # the largest power of two that divides the group
    if tile_k < 2 or (not INTERPRETED and tile_k < 32):
        raise ValueError(f"groups of {group}: expected a multiple of {2 if INTERPRETED else 32}")
    arguments = x.contiguous(), packed, scale.contiguous(), zero.contiguous(), out, m, n, k, group
    if INTERPRETED:
        kernel[(triton.cdiv(m, 16), triton.cdiv(n, 32))](*arguments, TILE_M=16, TILE_N=32, TILE_K=min(tile_k, 64))
    else:
        tile_m = 16 if m <= 16 else 64
        grid = lambda tiles: (triton.cdiv(m, tile_m), triton.cdiv(n, tiles["TILE_N"]))
        _tuned(kernel, tile_k)[grid](*arguments, TILE_M=tile_m)
    return out
