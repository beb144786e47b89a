"""The backward pass for heads wider than 128 with five products: dS goes through memory.

A program that computes dK and dV together would need more registers than there are, for both accumulators are as wide
as a head. To compute dQ, dK and dV apart, as ``lib.fast.attention.flash`` does otherwise, takes the scores three times:
eight products. Here the first kernel computes dV, and puts dS, the gradients of the scores, into memory in 16 bits:

1. a short kernel computes what is needed of each row: its logsumexp, and the sum of its o * do;
2. dV, and dS [keys, rows] for each query head: the scores, dP, and P^T dO;
3. dK = dS Q, for each key head the sum over the query heads that share it;
4. dQ = dS^T K.

The last two are plain products without masks. So the first one also writes the zeros of hidden pairs, in every tile of
128 keys and 128 rows in which a row sees a key. It is here in Triton's own language, and with roles for warps in
``lib.fast.attention.flash_wide_hopper``, which is faster.
"""

import math
from typing import Any, NamedTuple

import torch

from lib.fast.attention.flash_hopper import Roles
from lib.fast.attention.flash_portable import _place, _tile
from lib.fast.attention.flash_stored import statistics_launch
from lib.fast.attention.flash_wide_hopper import hopper_wide
from lib.fast.attention.room import TakesRoom, add_parts, part_like
from lib.fast.launch import LENGTHS, Box, Launch, Sizes, grid_by_rows
from lib.given.kernels.tiles import INTERPRETED, tl, triton


class Cut(NamedTuple):
    """How a kernel is cut and compiled: rows of queries, columns of keys."""

    rows: int
    cols: int
    warps: int
    stages: int


# The first kernel where `has_roles` holds, with values as wide as keys, and with values of at most half their width.
ROLES, NARROW_ROLES = Roles(2, 32, 2), Roles(2, 32, 3)
# dV and dS, dK, dQ: the fastest on an H200 of some ten cuts each.
CUTS = (Cut(64, 64, 4, 2), Cut(64, 128, 8, 4), Cut(128, 64, 8, 4))
# The same for fewer than FEW_ROWS queries of all heads, with a mask and without: no warps have roles.
FEW, FEW_ROWS = (Cut(32, 64, 4, 3), Cut(64, 64, 4, 4), Cut(64, 64, 4, 4)), (2**15, 2**13)
APART_ROWS = 2**15  # with at most so many, each query head has a dV of its own
SMALL = (Cut(32, 64, 4, 2), Cut(64, 128, 4, 2), Cut(128, 64, 4, 2))  # for the interpreter
BLOCK = tl.constexpr(128)  # rows and keys within which all pairs of dS are written, or none
# Fewest queries and keys of a head, and queries of all heads, for which dS goes through memory.
WIDE_LENGTH, WIDE_ROWS = 512, 2**12
MOST_SHARE = 8  # dS takes at most so small a part of the GPU's memory: an eighth


def stores_wide(sizes: Sizes, memory_bytes: int) -> bool:
    """Whether dS of these sizes goes through memory, on a device with so much of it."""
    is_seen = not sizes.causal or sizes.t <= sizes.s
    is_wide = sizes.width == 256 and sizes.variant.is_plain and sizes.group >= 1
    is_enough = min(sizes.t, sizes.s) >= WIDE_LENGTH and sizes.n_batches * sizes.n_heads * sizes.t >= WIDE_ROWS
    return is_wide and is_seen and is_enough and 2 * sizes.n_rows * sizes.s * MOST_SHARE <= memory_bytes


@triton.jit
def _keys_place(COLS: tl.constexpr):
    """Head of keys, counted through all batches, and first key of this program; the first keys, which most queries
    see, come first.
    """
    return tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1) * COLS


@triton.jit
def _store_queries(
    dv, key, value, q, do, ds, stats, b, h, base, start, low, first, end, scale2,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for at in tl.range(first, end, ROWS):
        at = tl.multiple_of(at, ROWS)
        query = _tile(q, b, h, at, ROWS, D)
        grad = _tile(do, b, h, at, ROWS, D)
        lse2, sums = tl.split(stats.load([0, base + at]).T)
        scores = tl.dot(key, query.T, input_precision="ieee")
        dp = tl.dot(value, grad.T, input_precision="ieee")
        weights = tl.exp2(scores * scale2 - lse2[None, :])
        if MASK:
            weights = tl.where(at + tl.arange(0, ROWS)[None, :] >= low[:, None], weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        d_scores = (weights * (dp - sums[None, :])).to(grad.dtype)
        ds.store([b, h, start, at], d_scores.reshape(1, 1, COLS, ROWS))
    return dv


@triton.jit(do_not_specialize=(*LENGTHS, "padded"))
def wide_dv_kernel(
    q, k, v, do, dv, ds, stats, T, S, G, padded, scale2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """dV of COLS keys of a key head, and their part of dS [batch, heads, S, T] of all heads that share it.

    APART programs share the query heads of a key head; the dv of each is a head of its own.
    """
    head, start = _keys_place(COLS)
    b, g = head // G, head % G
    key = _tile(k, b, g // APART, start, COLS, D)
    value = _tile(v, b, g // APART, start, COLS, D)
    low = start + tl.arange(0, COLS) + T - S  # the first query that sees each key
    acc = tl.zeros([COLS, D], tl.float32)
    first, whole = 0, 0
    if CAUSAL:
        first = tl.maximum(start // BLOCK * BLOCK + T - S, 0) // BLOCK * BLOCK
        whole = tl.minimum(tl.cdiv(tl.maximum(start + COLS - 1 + T - S, 0), ROWS) * ROWS, tl.cdiv(T, ROWS) * ROWS)
    for shared in tl.range(GROUP):
        h, base = g * GROUP + shared, (head * GROUP + shared) * padded
        if CAUSAL:
            acc = _store_queries(
                acc, key, value, q, do, ds, stats, b, h, base, start, low, first, whole, scale2, ROWS, COLS, D, True
            )
        acc = _store_queries(
            acc, key, value, q, do, ds, stats, b, h, base, start, low, whole, T, scale2, ROWS, COLS, D, False
        )
    dv.store([b, g, start, 0], acc.to(key.dtype).reshape(1, 1, COLS, D))


@triton.jit(do_not_specialize=LENGTHS)
def wide_dk_kernel(
    q, dk, ds, T, S, G, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK of COLS keys of a key head."""
    head, start = _keys_place(COLS)
    b, g = head // G, head % G
    acc = tl.zeros([COLS, D], tl.float32)
    first = tl.maximum(start + T - S, 0) // ROWS * ROWS if CAUSAL else 0
    each = tl.cdiv(T - first, ROWS)
    for n in tl.range(GROUP * each):
        h, at = g * GROUP + n // each, first + n % each * ROWS
        tile = ds.load([b, h, start, at]).reshape(COLS, ROWS)
        acc = tl.dot(tile, _tile(q, b, h, at, ROWS, D), acc, input_precision="ieee")
    dk.store([b, g, start, 0], (acc * scale).to(dk.dtype).reshape(1, 1, COLS, D))


@triton.jit(do_not_specialize=LENGTHS)
def wide_dq_kernel(
    k, dq, ds, T, S, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS queries of a head."""
    head, start = _place(ROWS)
    b, h = head // H, head % H
    acc = tl.zeros([ROWS, D], tl.float32)
    end = tl.minimum(start + ROWS + S - T, S) if CAUSAL else S
    for at in tl.range(0, end, COLS):
        tile = ds.load([b, h, at, start]).reshape(COLS, ROWS)
        acc = tl.dot(tile.T, _tile(k, b, h // GROUP, at, COLS, D), acc, input_precision="ieee")
    dq.store([b, h, start, 0], (acc * scale).to(dq.dtype).reshape(1, 1, ROWS, D))


# ---- launches --------------------------------------------------------------------------------------------------------


def _grid_of_keys(sizes: Sizes, cut: Cut) -> tuple[int, int, int]:
    of_keys = sizes._replace(n_heads=sizes.n_heads // sizes.group)
    return grid_by_rows(of_keys, triton.cdiv(sizes.s, cut.cols), True)


def launch_dv(sizes: Sizes, cut: Cut, apart: int = 1) -> Launch:
    """The launch for (q, k, v, do, dv, ds, stats); of a head of keys, dv has ``apart`` parts."""
    sizes = sizes._replace(group=sizes.group // apart)
    rows, cols = (1, 1, cut.rows, sizes.width), (1, 1, cut.cols, sizes.width)
    n_groups = sizes.n_heads // sizes.group
    args = (
        Box(0, rows), Box(1, cols), Box(2, cols), Box(3, rows), Box(4, cols), Box(5, (1, 1, cut.cols, cut.rows)),
        Box(6, (2, cut.rows), flat=(2, sizes.n_rows)), sizes.t, sizes.s, n_groups, sizes.padded,
        sizes.scale * math.log2(math.e), sizes.group, sizes.width, cut.rows, cut.cols, sizes.causal, apart,
    )  # fmt: skip
    return Launch(wide_dv_kernel, _grid_of_keys(sizes, cut), args, **options(cut))


def launch_dk(sizes: Sizes, cut: Cut) -> Launch:
    """The launch for (q, dk, ds)."""
    rows, cols = (1, 1, cut.rows, sizes.width), (1, 1, cut.cols, sizes.width)
    n_groups = sizes.n_heads // sizes.group
    args = (
        Box(0, rows), Box(1, cols), Box(2, (1, 1, cut.cols, cut.rows)), sizes.t, sizes.s, n_groups, sizes.scale,
        sizes.group, sizes.width, cut.rows, cut.cols, sizes.causal,
    )  # fmt: skip
    return Launch(wide_dk_kernel, _grid_of_keys(sizes, cut), args, **options(cut))


def launch_dq(sizes: Sizes, cut: Cut) -> Launch:
    """The launch for (k, dq, ds)."""
    rows, cols = (1, 1, cut.rows, sizes.width), (1, 1, cut.cols, sizes.width)
    args = (
        Box(0, cols), Box(1, rows), Box(2, (1, 1, cut.cols, cut.rows)), sizes.t, sizes.s, sizes.n_heads, sizes.scale,
        sizes.group, sizes.width, cut.rows, cut.cols, sizes.causal,
    )  # fmt: skip
    grid = grid_by_rows(sizes, triton.cdiv(sizes.t, cut.rows), True)
    return Launch(wide_dq_kernel, grid, args, **options(cut))


def options(cut: Cut) -> dict[str, int]:
    """For the compiler; the interpreter takes none."""
    return {} if INTERPRETED else {"num_warps": cut.warps, "num_stages": cut.stages}


class WideBackward(TakesRoom):
    """A backward pass with five products for fixed sizes.

    Args:
        sizes: Of all tensors; see `stores_wide`.
        with_roles: Whether the first kernel gives its warps roles.
        otherwise: Called with the same tensors if the device has too little memory left for dS.
    """

    def __init__(self, sizes: Sizes, with_roles: bool = False, otherwise: Any = None):
        super().__init__(otherwise)
        n_rows = sizes.n_batches * sizes.n_heads * sizes.t
        is_few = n_rows < FEW_ROWS[not sizes.causal]
        for_dv, for_dk, for_dq = SMALL if INTERPRETED else FEW if is_few else CUTS
        self.apart = sizes.group if n_rows <= APART_ROWS else 1
        self.statistics = statistics_launch(sizes, 0)
        roles = NARROW_ROLES if 2 * sizes.value_width <= sizes.width else ROLES
        if with_roles and not is_few:
            self.for_dv = hopper_wide(sizes, roles, self.apart)
        else:
            self.for_dv = launch_dv(sizes, for_dv, self.apart)
        self.for_dk, self.for_dq = launch_dk(sizes, for_dk), launch_dq(sizes, for_dq)
        self.ds_shape = sizes.n_batches, sizes.n_heads, sizes.s, sizes.padded
        self.n_tokens, self.n_stats = sizes.t, 2 * sizes.n_rows

    def take(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dS; and dV of each query head, if heads are apart."""
        # without what lies beyond the last row, which is not written: a load of it gives zeros
        ds = torch.empty(self.ds_shape, dtype=q.dtype, device=q.device)[..., : self.n_tokens]
        return ds, part_like(q, v) if self.apart > 1 else None

    def run(self, room: Any, *given: torch.Tensor) -> None:
        """Fill dq, dk and dv."""
        (ds, part), (q, k, v, o, do, lse, dq, dk, dv) = room, given
        stats = torch.empty(self.n_stats, dtype=torch.float32, device=q.device)
        self.statistics(o, do, lse, stats, stats)
        self.for_dv(q, k, v, do, dv if part is None else part, ds, stats)
        self.for_dk(q, dk, ds)
        self.for_dq(k, dq, ds)
        if part is not None:
            add_parts(dv, part, self.apart)
