"""Grouped products with roles for a Hopper GPU's warps: chapter 19's product, its gradient for the rows,
and that for the matrices.

Read ``lib.fast.attention.flash_hopper`` first: one warp copies and two groups of four compute,
with a ring of tiles between them.
A program computes tiles of 128 rows, 64 for each group, until none is left (a persistent kernel):
while the groups write one tile, the ring already fills with the numbers of the next.
There is a program for each multiprocessor.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.fast.gluon import GLUON, has_roles
from lib.fast.launch import Address, Box, Launch, can_be_read, is_watched, n_programs
from lib.given.kernels import grouped
from lib.given.kernels.autocast import factor_dtype
from lib.given.kernels.mode import tl, triton

ROWS, TERMS = 128, 64  # rows of a tile; terms that are added at a time
LEAST_PRODUCTS = 2**30  # multiplications; a guess, those that were measured to be quicker have 2**36 and more


@dataclass(frozen=True)
class Cut:
    """How a kernel is cut, known when it is compiled."""

    columns: int = 256  # of a tile
    stages: int = 3  # tiles of terms in the ring
    group: int = 8  # tiles of rows that programs share which run together, as in chapter 14
    transposed: bool = False  # the matrices lie in memory as [E, F, C]
    users: int = 2
    parts: int = 2  # a tile has 64 rows for each


@triton.jit
def plan_kernel(counts, table, first_rows, E, n_slots, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr):
    """Find for each tile of rows its expert, its first row and the end of the expert's rows; count the tiles;
    find each expert's first row.

    ``table`` is int32 [1 + 3 n_slots]: the number of tiles, then experts, first rows and ends.
    ``first_rows`` is int32 [E + 1].
    """
    index = tl.arange(0, EXPERTS)
    n = tl.load(counts + index, mask=index < E, other=0).to(tl.int32)
    tiles = (n + M - 1) // M
    ends, tile_ends = tl.cumsum(n, 0), tl.cumsum(tiles, 0)
    slots = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    before = tile_ends[None, :] <= slots[:, None]
    expert = tl.sum(before.to(tl.int32), 1)
    start = tl.sum(tl.where(before, n[None, :], 0), 1)
    begun = tl.sum(tl.where(before, tiles[None, :], 0), 1)
    end = start + tl.sum(tl.where(index[None, :] == expert[:, None], n[None, :], 0), 1)
    inside = slots < n_slots
    tl.store(table + 1 + slots, expert, mask=inside)
    tl.store(table + 1 + n_slots + slots, start + (slots - begun) * M, mask=inside)
    tl.store(table + 1 + 2 * n_slots + slots, end, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(table, tl.sum(tiles, 0))
        tl.store(first_rows, 0)
        tl.store(first_rows + 1 + index, ends, mask=index < E)


if GLUON:
    from lib.fast.gluon import (
        acc,
        as_box,
        barriers,
        copy_in,
        copy_out,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        release,
        tma,
        wait_empty,
        wait_full,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    @gluon.constexpr_function
    def shared_layout(rows, columns):
        return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)

    @gluon.constexpr_function
    def in_rows(columns):
        """Layout in registers in which a warp holds whole stretches of rows: 8 numbers, or 16 bytes, a thread."""
        wide = min(columns // 8, 32)
        return gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])

    @gluon.jit
    def _full_barriers(CUT: gl.constexpr):
        return barriers(CUT.stages, 1)

    @gluon.jit
    def _barriers(CUT: gl.constexpr):
        return _full_barriers(CUT), barriers(CUT.stages, CUT.users)

    @gluon.jit
    def _place(t, n_rows, n_columns, CUT: gl.constexpr):
        """Row and column of tile number t, in chapter 14's order."""
        first = t // (CUT.group * n_columns) * CUT.group
        height = gl.minimum(n_rows - first, CUT.group)
        inside = t % (CUT.group * n_columns)
        return first + inside % height, inside // height

    @gluon.jit
    def _add(left, right, total, n, k, empty, CUT: gl.constexpr):
        """Start a product, and let go of the tile of the one before, which has ended."""
        total = warpgroup_mma(left, right, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(empty.index((n + CUT.stages - 1) % CUT.stages), pred=k > 0)
        return total

    @gluon.jit
    def _end(total, n, empty, CUT: gl.constexpr):
        total = warpgroup_mma_wait(0, deps=[total])
        release(empty, n + CUT.stages - 1, CUT)
        return total

    # ---- rows times matrices -----------------------------------------------------------------------------------------

    @gluon.jit
    def _load_rows(given, CUT: gl.constexpr):
        x, w, table, n_slots, n_columns, n_terms, ring = given
        x_s, w_s, full, empty = ring
        n_tiles = gl.load(table)
        n = 0
        for t in range(gl.program_id(0), n_tiles * n_columns, gl.num_programs(0)):
            i, j = _place(t, n_tiles, n_columns, CUT)
            expert, start = gl.load(table + 1 + i), gl.load(table + 1 + n_slots + i)
            for k in range(0, n_terms):
                place = n % CUT.stages
                wait_empty(empty, n, CUT)
                opens = full.index(place)
                mbarrier.expect(opens, (128 + CUT.columns) * 64 * 2)
                for user in gl.static_range(2):
                    copy_in(x, [0, 0, start + 64 * user, 64 * k], opens, as_box(x_s.index(2 * place + user), x))
                if CUT.transposed:
                    copy_in(w, [0, expert, j * CUT.columns, 64 * k], opens, as_box(w_s.index(place), w))
                else:
                    copy_in(w, [0, expert, 64 * k, j * CUT.columns], opens, as_box(w_s.index(place), w))
                n += 1

    @gluon.jit
    def _use_rows(user: gl.constexpr, given, CUT: gl.constexpr):
        out, address, table, n_slots, n_columns, n_terms, F, out_s, ring = given
        x_s, w_s, full, empty = ring
        own = out_s.index(user)
        n_tiles = gl.load(table)
        n = 0
        for t in range(gl.program_id(0), n_tiles * n_columns, gl.num_programs(0)):
            i, j = _place(t, n_tiles, n_columns, CUT)
            mine = gl.load(table + 1 + n_slots + i) + 64 * user
            end = gl.load(table + 1 + 2 * n_slots + i)
            total = gl.full([64, CUT.columns], 0.0, gl.float32, acc(CUT.columns))
            for k in range(0, n_terms):
                wait_full(full, n, CUT)
                right = w_s.index(n % CUT.stages)
                if CUT.transposed:
                    right = right.permute((1, 0))
                total = _add(x_s.index(n % CUT.stages * 2 + user), right, total, n, k, empty, CUT)
                n += 1
            total = _end(total, n, empty, CUT)
            tma.store_wait(0)
            own.store(total.to(own.dtype))
            if mine + 64 <= end:
                fence_async_shared()
                copy_out(out, [0, 0, mine, j * CUT.columns], as_box(own, out))
            else:
                layout: gl.constexpr = in_rows(CUT.columns)
                rows = mine + gl.arange(0, 64, gl.SliceLayout(1, layout))
                columns = j * CUT.columns + gl.arange(0, CUT.columns, gl.SliceLayout(0, layout))
                inside = (rows < end)[:, None] & (columns < F)[None, :]
                gl.store(address + rows.to(gl.int64)[:, None] * F + columns[None, :], own.load(layout), mask=inside)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=("n_slots", "n_columns", "n_terms"))
    def rows_kernel(x, w, out, address, table, n_slots, n_columns, n_terms, F, CUT: gl.constexpr):
        """The product of sorted rows ``[N, C]`` with their experts' matrices: ``[N, F]``."""
        x_s = gl.allocate_shared_memory(x.dtype, [2 * CUT.stages, 64, 64], shared_layout(64, 64))
        if CUT.transposed:
            w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, CUT.columns, 64], shared_layout(CUT.columns, 64))
        else:
            w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 64, CUT.columns], shared_layout(64, CUT.columns))
        out_s = gl.allocate_shared_memory(x.dtype, [2, 64, CUT.columns], shared_layout(64, CUT.columns))
        full, empty = _barriers(CUT)
        ring = (x_s, w_s, full, empty)
        used = (out, address, table, n_slots, n_columns, n_terms, F, out_s, ring)
        loaded = (x, w, table, n_slots, n_columns, n_terms, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use_rows, (first, used, CUT)), (_use_rows, (second, used, CUT)), (_load_rows, (loaded, CUT))],
            [4, 1],
            [240, 24],
        )

    # ---- transposed rows times gradients -----------------------------------------------------------------------------

    @gluon.jit
    def _load_terms(given, CUT: gl.constexpr):
        x, g, first_rows, E, n_rows, n_columns, ring = given
        x_s, g_s, full, empty = ring
        each = n_rows * n_columns
        n = 0
        for t in range(gl.program_id(0), E * each, gl.num_programs(0)):
            i, j = _place(t % each, n_rows, n_columns, CUT)
            for row in range(gl.load(first_rows + t // each), gl.load(first_rows + t // each + 1), 64):
                place = n % CUT.stages
                wait_empty(empty, n, CUT)
                opens = full.index(place)
                mbarrier.expect(opens, (128 + CUT.columns) * 64 * 2)
                for user in gl.static_range(2):
                    copy_in(x, [0, 0, row, 128 * i + 64 * user], opens, as_box(x_s.index(2 * place + user), x))
                copy_in(g, [0, 0, row, j * CUT.columns], opens, as_box(g_s.index(place), g))
                n += 1

    @gluon.jit
    def _keep(shared, n_rows, columns: gl.constexpr):
        """Put zeros into the rows from ``n_rows`` on, which are another expert's."""
        layout: gl.constexpr = in_rows(columns)
        inside = gl.arange(0, 64, gl.SliceLayout(1, layout)) < n_rows
        values = shared.load(layout)
        shared.store(gl.where(inside[:, None], values, gl.zeros_like(values)))

    @gluon.jit
    def _use_terms(user: gl.constexpr, given, CUT: gl.constexpr):
        out, first_rows, E, n_rows, n_columns, out_s, ring = given
        x_s, g_s, full, empty = ring
        own = out_s.index(user)
        each = n_rows * n_columns
        n = 0
        for t in range(gl.program_id(0), E * each, gl.num_programs(0)):
            i, j = _place(t % each, n_rows, n_columns, CUT)
            first, end = gl.load(first_rows + t // each), gl.load(first_rows + t // each + 1)
            total = gl.full([64, CUT.columns], 0.0, gl.float32, acc(CUT.columns))
            for row in range(first, end, 64):
                wait_full(full, n, CUT)
                left, right = x_s.index(n % CUT.stages * 2 + user), g_s.index(n % CUT.stages)
                if row + 64 > end:  # both users put the same zeros into the tile that they share
                    _keep(left, end - row, 64)
                    _keep(right, end - row, CUT.columns)
                    fence_async_shared()
                total = _add(left.permute((1, 0)), right, total, n, row - first, empty, CUT)
                n += 1
            if first < end:
                total = _end(total, n, empty, CUT)
            tma.store_wait(0)
            own.store(total.to(own.dtype))
            fence_async_shared()
            copy_out(out, [0, t // each, 128 * i + 64 * user, j * CUT.columns], as_box(own, out))
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=("E", "n_rows", "n_columns"))
    def matrices_kernel(x, g, out, first_rows, E, n_rows, n_columns, CUT: gl.constexpr):
        """For each expert the product of its transposed rows ``[N, C]`` with its rows ``[N, F]``: ``[E, C, F]``."""
        x_s = gl.allocate_shared_memory(x.dtype, [2 * CUT.stages, 64, 64], shared_layout(64, 64))
        g_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 64, CUT.columns], shared_layout(64, CUT.columns))
        out_s = gl.allocate_shared_memory(x.dtype, [2, 64, CUT.columns], shared_layout(64, CUT.columns))
        full, empty = _barriers(CUT)
        ring = (x_s, g_s, full, empty)
        used = (out, first_rows, E, n_rows, n_columns, out_s, ring)
        loaded = (x, g, first_rows, E, n_rows, n_columns, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use_terms, (first, used, CUT)), (_use_terms, (second, used, CUT)), (_load_terms, (loaded, CUT))],
            [4, 1],
            [240, 24],
        )


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(x: Tensor, weights: Tensor) -> bool:
    """Whether the kernels with roles take these: 16 bits, a Hopper GPU, a layout that the TMA can read in place,
    and not small.

    Where a compiler or a mode watches, the product's own kernel is what it can see.
    """
    (_, width, columns), inner = weights.shape, weights if weights.stride(-1) == 1 else weights.transpose(1, 2)
    return (
        has_roles(x)
        and not is_watched(x)
        and x.dtype in (torch.bfloat16, torch.float16)
        and len(x) * width * columns >= LEAST_PRODUCTS
        and width % 8 == columns % 8 == 0
        and all(can_be_read(t) and t.data_ptr() % 16 == 0 for t in (x, inner))
    )


@lru_cache(maxsize=256)
def _layout(rows: int, width: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.bfloat16)


def described(index: int, rows: int, width: int) -> Box:
    """A descriptor that copies boxes of a matrix."""
    return Box(index, (1, 1, rows, width), _layout(rows, width))


@lru_cache(maxsize=256)
def _plan_launch(n_experts: int, n_slots: int, _: tuple[torch.dtype, torch.device]) -> Launch:
    args = (Address(0), Address(1), Address(2), n_experts, n_slots, triton.next_power_of_2(n_experts), 32, ROWS)
    return Launch(plan_kernel, (triton.cdiv(n_slots, 32),), args, num_warps=4)


Plan = tuple[Tensor, Tensor, int]


def plan(counts: Tensor, n_rows: int) -> Plan:
    """The table of `plan_kernel`, the first rows of the experts, and how many tiles the table has room for."""
    n_experts = len(counts)
    n_slots = 8 * triton.cdiv(n_rows, 8 * ROWS) + n_experts  # the same for almost as many rows, and so the same launch
    both = torch.empty(1 + 3 * n_slots + n_experts + 1, dtype=torch.int32, device=counts.device)
    table, first_rows = both[: 1 + 3 * n_slots], both[1 + 3 * n_slots :]
    counts = counts.contiguous()
    counts = counts if counts.data_ptr() % 16 == 0 else counts.clone()  # a launch belongs to one alignment
    _plan_launch(n_experts, n_slots, (counts.dtype, counts.device))(counts, table, first_rows)
    return table, first_rows, n_slots


@lru_cache(maxsize=256)
def _rows_launch(key: tuple) -> Launch:
    width, columns, n_slots, programs, cut = key
    n_columns = triton.cdiv(columns, cut.columns)
    matrix = (cut.columns, TERMS) if cut.transposed else (TERMS, cut.columns)
    args = (
        described(0, 64, TERMS), described(1, *matrix), described(2, 64, cut.columns), Address(2), Address(3),
        n_slots, n_columns, triton.cdiv(width, TERMS), columns, cut,
    )  # fmt: skip
    return Launch(rows_kernel, (programs,), args, num_warps=4)


def grouped_matmul_fast(
    x: Float[Tensor, "n c"],
    weights: Float[Tensor, "e c f"],
    counts: Int[Tensor, " e"],
    planned: Plan | None = None,
    cut: Cut | None = None,
) -> Float[Tensor, "n f"]:
    """Chapter 19's `grouped_matmul` by `rows_kernel`, for what `fits`; ``planned`` is the `plan` of these counts,
    if there is one.
    """
    (n_rows, width), columns = x.shape, weights.shape[2]
    transposed = weights.stride(2) != 1
    cut = cut or Cut(transposed=transposed)
    table, _, n_slots = planned or plan(counts, n_rows)
    out = x.new_empty(n_rows, columns)
    inner = weights.transpose(1, 2) if transposed else weights
    launch = launches(_rows_launch, (width, columns, n_slots, n_programs(x.device), cut), x, inner, out)
    launch(x, inner, out, table)
    return out


@lru_cache(maxsize=256)
def _matrices_launch(key: tuple) -> Launch:
    width, columns, n_experts, programs, cut = key
    n_rows, n_columns = triton.cdiv(width, ROWS), triton.cdiv(columns, cut.columns)
    args = (
        described(0, TERMS, 64), described(1, TERMS, cut.columns), described(2, 64, cut.columns), Address(3),
        n_experts, n_rows, n_columns, cut,
    )  # fmt: skip
    return Launch(matrices_kernel, (programs,), args, num_warps=4)


def weight_gradients_fast(
    x: Float[Tensor, "n c"],
    grad: Float[Tensor, "n f"],
    counts: Int[Tensor, " e"],
    planned: Plan | None = None,
    cut: Cut | None = None,
) -> Float[Tensor, "e c f"]:
    """The gradient of the matrices by `matrices_kernel`."""
    cut = cut or Cut()
    _, first_rows, _ = planned or plan(counts, len(x))
    out = x.new_empty(len(counts), x.shape[1], grad.shape[1])
    key = (x.shape[1], grad.shape[1], len(counts), n_programs(x.device), cut)
    launches(_matrices_launch, key, x, grad, out)(x, grad, out, first_rows)
    return out


def with_gradients(
    product: grouped.Product, x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """``lib.given.kernels.grouped.with_gradients``, by the kernels with roles where they fit,
    in place of ``product``.
    """
    x, weights = x.to(factor_dtype(x)), weights.to(factor_dtype(weights))
    if not fits(x, weights):
        return grouped.with_gradients(product, x, weights, counts)
    planned = plan(counts, len(x))

    def product_fast(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        return grouped_matmul_fast(_readable(rows, matrices), matrices, counts, planned)

    def of_weights(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
        return weight_gradients_fast(rows, _readable(grad, weights.transpose(1, 2)), counts, planned)

    return grouped.with_gradients(product_fast, x, weights, counts, of_weights)


def _readable(rows: Tensor, matrices: Tensor) -> Tensor:
    """These rows, copied where the TMA cannot read them: the gradient of a sum is one number with strides of 0."""
    return rows if fits(rows, matrices) else rows.clone(memory_format=torch.contiguous_format)


def launches(make: Any, key: tuple, *tensors: Tensor) -> Launch:
    """Return ``make(key)``, a launch that is kept for tensors of the same shapes, strides and dtypes."""
    return _launch(make, key, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors))


@lru_cache(maxsize=256)
def _launch(make: Any, key: tuple, _: tuple) -> Launch:
    return make.__wrapped__(key)
