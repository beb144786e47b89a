"""Helpers for the tiles of chapter 15: Triton where it is installed, and layouts."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "LN2",
    "LOG2E",
    "NO_TRITON",
    "check_shapes",
    "fold_groups",
    "hide_later",
    "take_tile",
    "tile_slices",
    "tl",
    "triton",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# ---- layouts ---------------------------------------------------------------------------------------------------------


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Number of query heads that share a head of keys; 1 if there is no axis of heads.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit; the message shows them.
    """
    heads, groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    fits = q.ndim == k.ndim >= 2 and k.shape == v.shape and q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1]
    if not fits or q.shape[-1] == 0 or heads % max(groups, 1) or (groups == 0) != (heads == 0):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: expected [..., H, T, D] and twice [..., G, S, D] with D > 0 and H a multiple of G")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: expected one dtype of {names}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}: expected one device")
    return heads // groups if groups else 1


def fold_groups(
    q: Float[Tensor, "*lead t d"], k: Float[Tensor, "*lead_kv s d"], v: Float[Tensor, "*lead_kv s d"]
) -> tuple[Float[Tensor, "n g r t d"], Float[Tensor, "n g 1 s d"], Float[Tensor, "n g 1 s d"]]:
    """Bring any layout to five axes: batch, key/value heads, query heads that share one, tokens, width.

    Raises:
        ValueError: as `check_shapes`.
    """
    shared = check_shapes(q, k, v)
    n, groups = math.prod(k.shape[:-3]), k.shape[-3] if k.ndim > 2 else 1
    queries = q.reshape(n, groups, shared, *q.shape[-2:])
    return queries, k.reshape(n, groups, 1, *k.shape[-2:]), v.reshape(n, groups, 1, *k.shape[-2:])


def tile_slices(length: int) -> list[slice]:
    """Slices that cut a sequence into tiles of a power of two from 16 to 128;
    at least four tiles if it is long enough.
    """
    size = min(128, max(16, 1 << (max(length, 1) - 1).bit_length() >> 2))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def take_tile(x: Float[Tensor, "*lead n d"], tile: slice) -> Float[Tensor, "*lead r d"]:
    """The rows of a tile, as a view.

    Unlike ``x[..., tile, :]`` it also works if PyTorch runs a backward pass for a batch of gradients.
    """
    return x.narrow(-2, tile.start, tile.stop - tile.start)


def hide_later(scores: Float[Tensor, "*lead r c"], position: int) -> Float[Tensor, "*lead r c"]:
    """Put -inf wherever row i of a tile looks beyond the tile's key ``position + i``;
    the tile itself if no row does.
    """
    rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    if position >= len(keys) - 1:
        return scores
    return scores.masked_fill(keys > rows[:, None] + position, -torch.inf)
