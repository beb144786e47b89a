"""Launch the kernel of chapter 23: make inputs contiguous, choose tiles and grid, allocate the results."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.fits import check_heads, check_window
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fits_window(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> bool:
    """Whether these tensors are on a GPU and of a kind that the kernel takes.

    Raises:
        ValueError: the window or the heads don't fit, whatever the device; the message shows them.
    """
    check_window(window)
    check_heads(q.shape[1], k.shape[1])
    widths = max(q.shape[-1], v.shape[-1])
    return HAS_TRITON and not INTERPRETED and q.is_cuda and widths <= 256 and q.dtype in DTYPES and bool(q.numel())


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def launch_window(
    kernel, q, k, v, window=None, sinks=None, *, rows=None, cols=None, o=None, lse=None
) -> tuple[Float[Tensor, "b h t dv"], Float[Tensor, "b h t"]]:
    """Launch a forward kernel with a window, with one program for each head and each tile of ``rows`` queries.

    Args:
        kernel: Takes q, k, v, sinks, o, lse, T, S, window, scale, GROUP, D, DV, WIDTH, WIDTH_V, ROWS, COLS.
        q, k, v: ``[B, H, T, D]``, ``[B, G, S, D]`` and ``[B, G, S, Dv]``.
        window: Number of visible keys; None means all up to the query's own.
        sinks: ``[H]``, or None.
        rows, cols: Queries and keys in a tile, powers of two of at least 16; by default they are chosen here.
        o, lse: Contiguous tensors for the results; by default they are allocated here.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (batch, n_heads, n_queries, width), (n_groups, n_keys), width_v = q.shape, k.shape[1:3], v.shape[-1]
    cast = INTERPRETED and q.dtype == torch.bfloat16  # the interpreter cannot multiply bfloat16
    qs, ks, vs = ((x.float() if cast else x).contiguous() for x in (q, k, v))
    tile = 32 if INTERPRETED or q.dtype == torch.float32 or max(width, width_v) > 128 else 64
    out = qs.new_empty(batch, n_heads, n_queries, width_v) if o is None else o
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    sinks = torch.full((n_heads,), -torch.inf, device=q.device) if sinks is None else sinks.float()
    constants = {"GROUP": n_heads // n_groups, "D": width, "DV": width_v}
    constants |= {"WIDTH": _power_of_two(width), "WIDTH_V": _power_of_two(width_v)}
    constants |= {"ROWS": rows or tile, "COLS": cols or tile}
    if q.numel():
        grid = (batch * n_heads, triton.cdiv(n_queries, constants["ROWS"]))
        seen = n_queries + n_keys if window is None else window
        kernel[grid](qs, ks, vs, sinks.repeat(batch), out, lse, n_queries, n_keys, seen, width**-0.5, **constants)
    return out.to(q.dtype), lse
