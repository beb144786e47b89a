"""What surrounds the kernels of chapter 15 and is no lesson: imports, layouts, tiles of memory, launches.

Without a GPU the kernels run in Triton's interpreter, which must be asked for before Triton is imported: this module
does it. Without Triton (macOS) the module can be imported all the same, and a launch says what is missing.
"""

import math
import os
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton: Any
tl: Any
try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    class _Absent:
        """Stands where Triton would, so that a file with kernels can be read."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return args[0] if args else self

    triton = tl = _Absent()
    HAS_TRITON = False

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# ---- layouts ---------------------------------------------------------------------------------------------------------


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many query heads share a head of keys; 1 where there is no axis of heads.

    Raises:
        ValueError: the shapes or dtypes do not fit; the message shows them.
    """
    heads, groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    fits = q.ndim == k.ndim >= 2 and k.shape == v.shape and q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1]
    if not fits or heads % max(groups, 1) or (groups == 0) != (heads == 0):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: expected [..., H, T, D] and twice [..., G, S, D] with H a multiple of G")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: expected one dtype")
    return heads // groups if groups else 1


def fold_groups(
    q: Float[Tensor, "*lead t d"], k: Float[Tensor, "*lead_kv s d"], v: Float[Tensor, "*lead_kv s d"]
) -> tuple[Float[Tensor, "n g r t d"], Float[Tensor, "n g 1 s d"], Float[Tensor, "n g 1 s d"]]:
    """Any layout as five axes: batch, heads of keys, query heads that share one, tokens, width.

    Raises:
        ValueError: as `check_shapes`.
    """
    shared = check_shapes(q, k, v)
    n, groups = math.prod(k.shape[:-3]), k.shape[-3] if k.ndim > 2 else 1
    queries = q.reshape(n, groups, shared, *q.shape[-2:])
    return queries, k.reshape(n, groups, 1, *k.shape[-2:]), v.reshape(n, groups, 1, *k.shape[-2:])


def tile_slices(length: int) -> list[slice]:
    """Tiles of a sequence: powers of two from 16 to 128, at least four of them where there is room."""
    size = min(128, max(16, 1 << (max(length, 1) - 1).bit_length() >> 2))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


# ---- tiles in a kernel -----------------------------------------------------------------------------------------------


@triton.jit
def load_tile(pointer, rows, n_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a contiguous [n_rows, D] matrix as a [len(rows), WIDTH] tile; zero outside the matrix."""
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < D)
    return tl.load(pointer + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(pointer, tile, rows, n_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """The opposite of ``load_tile``: what lies outside the matrix is not written."""
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < D)
    tl.store(pointer + rows[:, None] * D + columns[None, :], tile.to(pointer.dtype.element_ty), mask=inside)


# ---- launches --------------------------------------------------------------------------------------------------------


def _prepare(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, rows: int | None, cols: int | None):
    """The arguments that every kernel takes after its tensors, and the number of query heads in all.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: the head is wider than 256, or the dtype is none that the kernels know.
    """
    if not HAS_TRITON:
        raise RuntimeError("Triton is not installed here (it exists for Linux): use FlashAttentionTorch")
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
    """Contiguous, and in a dtype that the interpreter can multiply: it cannot bfloat16."""
    cast = INTERPRETED and tensors[0].dtype == torch.bfloat16
    return [(x.float() if cast and x.dtype == torch.bfloat16 else x).contiguous() for x in tensors]


def launch_forward(
    kernel, q, k, v, is_causal=False, *, rows=None, cols=None, o=None, lse=None
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Run a forward kernel: one program for each head and each tile of ``rows`` queries.

    Args:
        kernel: Takes q, k, v, o, lse, T, S, scale, GROUP, D, WIDTH, ROWS, COLS, CAUSAL.
        rows, cols: Tiles of queries and keys; chosen here unless told.
        o, lse: Where the results go, contiguous; made here unless given.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs = _readable(q, k, v)
    out = torch.empty_like(qs) if o is None else o
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    if q.numel():
        grid = (n_heads, triton.cdiv(q.shape[-2], constants["ROWS"]))
        kernel[grid](qs, ks, vs, out, lse, *sizes, **constants)
    return out.to(q.dtype), lse


def launch_backward_dq(
    kernel, q, k, v, o, do, lse, is_causal=False, *, rows=None, cols=None, dq=None, delta=None
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Run a dQ kernel, one program for each head and tile of queries; returns dq and delta, the row sums of o * do.

    Args:
        kernel: Takes q, k, v, o, do, lse, delta, dq, then as the forward kernel.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs, os_, dos = _readable(q, k, v, o, do)
    dq = torch.empty_like(qs) if dq is None else dq
    delta = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if delta is None else delta
    if q.numel():
        grid = (n_heads, triton.cdiv(q.shape[-2], constants["ROWS"]))
        kernel[grid](qs, ks, vs, os_, dos, lse.contiguous(), delta, dq, *sizes, **constants)
    return dq.to(q.dtype), delta


def launch_backward_dkdv(
    kernel, q, k, v, do, lse, delta, is_causal=False, *, rows=None, cols=None, dk=None, dv=None
) -> tuple[Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """Run a dK/dV kernel, one program for each head of keys and tile of keys.

    Args:
        kernel: Takes q, k, v, do, lse, delta, dk, dv, then as the forward kernel.
    """
    constants, n_heads, sizes = _prepare(q, k, v, is_causal, rows, cols)
    qs, ks, vs, dos = _readable(q, k, v, do)
    dk, dv = (torch.empty_like(ks) if x is None else x for x in (dk, dv))
    if k.numel():
        grid = (n_heads // constants["GROUP"], triton.cdiv(k.shape[-2], constants["COLS"]))
        kernel[grid](qs, ks, vs, dos, lse.contiguous(), delta.contiguous(), dk, dv, *sizes, **constants)
    return dk.to(k.dtype), dv.to(k.dtype)
