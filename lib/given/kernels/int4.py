"""Weights of four bits: back to float32, and the launch of chapter 20's kernel."""

import functools

from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, triton

__all__ = ["dequantize_int4", "launch_int4_matmul"]


def dequantize_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weights ``[N, K]``, float32: ``(q - zero) * scale``, with each group's scale and zero point."""
    levels = q.float().unflatten(1, (scale.shape[1], -1))
    return ((levels - zero[..., None].float()) * scale[..., None]).flatten(1)


@functools.cache
def _tuned(kernel, largest: int):
    """The kernel with Triton's autotuner around it, which times these tiles at the first call for each shape of the weights."""
    configs = [
        triton.Config({"TILE_N": tile_n, "TILE_K": tile_k}, num_warps=warps, num_stages=stages)
        for tile_n in (16, 32, 64)
        for tile_k in {min(largest, 64), largest}
        for warps, stages in ((2, 3), (4, 3), (4, 5))
    ]
    return triton.autotune(configs, key=["N", "K", "TILE_M"])(kernel)


def launch_int4_matmul(kernel, x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Launch a kernel that multiplies rows with packed four-bit weights: ``[M, K] x [N, K / 2] -> [M, N]``.

    Args:
        kernel: Takes x, packed, scale, zero, out, M, N, K, the group size, and the constants TILE_M, TILE_N, TILE_K.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (m, k), n = x.shape, len(packed)
    out = x.new_empty(m, n)
    group = k // scale.shape[1]
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
