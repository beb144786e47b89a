"""Launch the kernels of chapter 15: make inputs contiguous, choose tiles and grid, allocate the results."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, NO_TRITON, check_shapes, triton


def _prepare(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, rows: int | None, cols: int | None):
    """The constants that every kernel takes, the number of query heads in all batches, and T, S and scale.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: the head is wider than 256, or the kernels don't support the dtype.
    """
    if not HAS_TRITON:
        raise RuntimeError(f"{NO_TRITON}; or use FlashAttentionTorch")
    width = max(16, 1 << (q.shape[-1] - 1).bit_length())
    if width > 256 or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"width {q.shape[-1]} in {q.dtype}: expected at most 256 in float32, float16 or bfloat16")
    wide = q.dtype == torch.float32 or width > 128
    constants = {
        "GROUP": check_shapes(q, k, v),
        "D": q.shape[-1],
        "WIDTH": width,
        "ROWS": rows or (32 if INTERPRETED or wide else 64),
        "COLS": cols or (32 if INTERPRETED or wide else 64),
        "CAUSAL": is_causal,
    }
    if not INTERPRETED:
        constants |= {"num_warps": 4, "num_stages": 1 if wide else 2}
    return constants, math.prod(q.shape[:-2]), (q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5)


def _readable(*tensors: Tensor) -> list[Tensor]:
    """Contiguous copies, in float32 where the interpreter would have to multiply bfloat16, which it can't."""
    cast = INTERPRETED and tensors[0].dtype == torch.bfloat16
    return [(x.float() if cast and x.dtype == torch.bfloat16 else x).contiguous() for x in tensors]


def _empty(shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor for a result.

    In the interpreter there is spare room after it, so that a store without a mask crashes nothing.
    """
    n = math.prod(shape)
    return like.new_empty(n + (1 << 16) * INTERPRETED, dtype=dtype or like.dtype)[:n].view(shape)


def launch_forward(
    kernel, q, k, v, is_causal=False, *, rows=None, cols=None, o=None, lse=None
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Launch a forward kernel, with one program for each head and each tile of ``rows`` queries.

    Args:
        kernel: Takes q, k, v, o, lse, T, S, scale, GROUP, D, WIDTH, ROWS, COLS, CAUSAL.
        rows, cols: Queries and keys in a tile; by default they are chosen here.
        o, lse: Contiguous tensors for the results; by default they are allocated here.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs = _readable(q, k, v)
    out = _empty(qs.shape, qs) if o is None else o
    lse = _empty(q.shape[:-1], q, torch.float32) if lse is None else lse
    if q.numel():
        grid = (n_heads, triton.cdiv(q.shape[-2], constants["ROWS"]))
        kernel[grid](qs, ks, vs, out, lse, *sizes, **constants)
    return out.to(q.dtype), lse


def launch_backward_dq(
    kernel, q, k, v, o, do, lse, is_causal=False, *, rows=None, cols=None, dq=None, delta=None
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Launch a dQ kernel, with one program for each head and tile of queries; returns dq and delta,
    the row sums of o * do.

    Args:
        kernel: Takes q, k, v, o, do, lse, delta, dq, then the same as the forward kernel.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs, os_, dos = _readable(q, k, v, o, do)
    dq = _empty(qs.shape, qs) if dq is None else dq
    delta = _empty(q.shape[:-1], q, torch.float32) if delta is None else delta
    if q.numel():
        grid = (n_heads, triton.cdiv(q.shape[-2], constants["ROWS"]))
        kernel[grid](qs, ks, vs, os_, dos, lse.contiguous(), delta, dq, *sizes, **constants)
    return dq.to(q.dtype), delta


def launch_backward_dkdv(
    kernel, q, k, v, do, lse, delta, is_causal=False, *, rows=None, cols=None, dk=None, dv=None
) -> tuple[Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """Launch a dK/dV kernel, with one program for each head of keys and tile of keys.

    Args:
        kernel: Takes q, k, v, do, lse, delta, dk, dv, then the same as the forward kernel.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs, dos = _readable(q, k, v, do)
    dk, dv = (_empty(ks.shape, ks) if x is None else x for x in (dk, dv))
    if k.numel():
        grid = (n_heads // constants["GROUP"], triton.cdiv(k.shape[-2], constants["COLS"]))
        kernel[grid](qs, ks, vs, dos, lse.contiguous(), delta.contiguous(), dk, dv, *sizes, **constants)
    return dk.to(k.dtype), dv.to(k.dtype)
