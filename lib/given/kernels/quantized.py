"""Launch the kernels of chapter 20, and the ranges of the formats that it rounds to."""

import torch
from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, triton

__all__ = ["BLOCK", "FORMATS", "expand_blocks", "largest", "launch_block_matmul", "launch_int4_matmul"]

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
    """A scale for each number of a tensor of ``shape``: as it is if it broadcasts, else each entry for its block of 128 x 128.

    Raises:
        ValueError: it neither broadcasts nor has an entry for each block; the message shows both shapes.
    """
    if all(s in (1, n) for s, n in zip(scale.shape[::-1], shape[::-1], strict=False)) and scale.ndim <= len(shape):
        return scale
    if scale.ndim != 2 or tuple(scale.shape) != tuple(-(-n // BLOCK) for n in shape):
        raise ValueError(
            f"scale {tuple(scale.shape)} for {tuple(shape)}: expected one number, a row, a column, or one for each block"
        )
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def launch_block_matmul(
    kernel, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Launch a kernel that multiplies matrices whose blocks of 128 x 128 have scales.

    Args:
        kernel: Takes a, b, scale_a, scale_b, out, M, N, K, the strides of a and b, and the constants TILE_M, TILE_N and TILE_K, of which
            TILE_K is 128 and the others divide 128. The scales are contiguous, one row for each row of blocks.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    tile = 32 if INTERPRETED else 128
    kernel[(triton.cdiv(m, tile), triton.cdiv(n, tile))](
        a, b, scale_a.contiguous(), scale_b.contiguous(), out, m, n, k, *a.stride(), *b.stride(),
        TILE_M=tile, TILE_N=tile, TILE_K=BLOCK, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


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
    tile_m, tile_n = (16, 32) if INTERPRETED else (16, 64)
    kernel[(triton.cdiv(m, tile_m), triton.cdiv(n, tile_n))](
        x.contiguous(), packed, scale, zero, out, m, n, k, group, TILE_M=tile_m, TILE_N=tile_n, TILE_K=min(group, 64),
    )  # fmt: skip
    return out
