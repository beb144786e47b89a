"""The backward pass of attention with five products instead of seven: dS goes through memory.

Read ``lib.fast.attention.flash_hopper`` first.
Its two passes, dQ and dK/dV, both compute the scores and dO V^T.
Here dK/dV, which needs dS anyway, also writes it to memory in 16 bits,
and dQ = dS K is a plain product of what was written.
For each pair of a query and a key this saves 4 D operations and moves 4 bytes.

The plain product alone would wait for memory, and dK/dV alone leaves memory idle.
So one kernel does both at once: each of its programs, one a multiprocessor,
works through a list of *items* that the host has made.
An item is dK/dV of 128 keys or dQ of 256 rows.
While some programs compute dK/dV of one head, others compute dQ of the head before.
Counters in memory say what is done, and an item waits for those that it needs.
Every sum has a fixed order, so the same inputs give the same bits.

A *part* of the work is a head of keys with the heads of queries that share it,
or one of these heads apart from the others: then each has a dK and a dV of its own,
and they are added up at the end (`deal_apart`).
The memory for dS holds two parts or more, if there are two.
A part waits until dQ of the part that had its place before is done.
Where dS of two heads of queries takes more than an eighth of the GPU's memory,
``lib.fast.attention.flash`` makes two passes.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lib.fast.attention.flash_hopper import Roles, box
from lib.fast.attention.flash_items import Item, Work, deal_apart
from lib.fast.attention.room import TakesRoom, add_parts, part_like
from lib.fast.gluon import GLUON
from lib.fast.launch import LENGTHS, Address, Box, Launch, Sizes
from lib.given.kernels.tiles import LOG2E, tl, triton

ROWS = 64  # of a program of `statistics_kernel`
STAGES = 4
FIELDS = len(Item._fields)


@triton.jit(do_not_specialize=(*LENGTHS, "n_rows", "padded", "n_counters"))
def statistics_kernel(
    o, do, lse, stats, counters, n_rows, T, H, padded, n_counters, D: tl.constexpr, ROWS: tl.constexpr
):
    """What dK/dV needs of each row, stats [2, heads * padded]: its lse in base 2, and the sum of its o * do.

    A row that lies beyond the last one gets an lse of infinity, so that dK/dV finds weights of 0.
    The counters become 0.
    """
    head, start = tl.program_id(1), tl.program_id(0) * ROWS
    b, h = head // H, head % H
    rows = start + tl.arange(0, ROWS)
    out, grad = o.load([b, h, start, 0]).reshape(ROWS, D), do.load([b, h, start, 0]).reshape(ROWS, D)
    lse2 = tl.load(lse + head * T + rows, mask=rows < T, other=float("inf")) * LOG2E
    tl.store(stats + head * padded + rows, lse2)
    tl.store(stats + n_rows + head * padded + rows, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1))
    if (head == 0) & (start == 0):
        for first in range(0, n_counters, ROWS):
            at = first + tl.arange(0, ROWS)
            tl.store(counters + at, tl.full([ROWS], 0, tl.int32), mask=at < n_counters)


if GLUON:
    from lib.fast.attention.flash_hopper import _barriers, _begin_scores, _queries, tile_layout
    from lib.fast.gluon import (
        FLAT,
        RENAMED,
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

    NEXT = gl.constexpr(FIELDS)  # from an item to the next
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the first name in newer versions of Triton

    # ---- programs that wait for each other ---------------------------------------------------------------------------

    @gluon.jit
    def _execute(instruction: gl.constexpr):
        """Let every thread of this role execute an instruction of PTX; the number that it moves is not used."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        lanes = gl.arange(0, 32 * gl.num_warps(), layout)
        gl.inline_asm_elementwise(instruction, "=r,r", [lanes], gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def fence_memory():
        """Order what the TMA does in the GPU's memory with what other instructions do there."""
        _execute("fence.proxy.async; mov.u32 $0, $1;")

    @gluon.jit
    def wait_for_writes():
        """Wait until all that this group has copied out is in memory, and not only out of its shared memory."""
        _execute("cp.async.bulk.wait_group 0; mov.u32 $0, $1;")
        fence_memory()

    @gluon.jit
    def await_count(counters, i, n):
        """Wait until counter number i is at n; if i is negative, go on at once."""
        if i >= 0:
            seen = gl.atomic_add(counters + i, 0, sem="acquire", scope="gpu")
            while seen < n:
                seen = gl.atomic_add(counters + i, 0, sem="acquire", scope="gpu")
            fence_memory()

    @gluon.jit
    def count(counters, i):
        """Tell other programs that this group's share of an item is in memory."""
        wait_for_writes()
        barrier()
        gl.atomic_add(counters + i, 1, sem="release", scope="gpu")

    @gluon.jit
    def unknown(n):
        """The same number, hidden from the compiler.

        The compiler would otherwise keep in registers what does not change from turn to turn of the loop,
        and there are none left.
        """
        return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [n], gl.int32, is_pure=False, pack=1)

    # ---- where dS lies -----------------------------------------------------------------------------------------------

    @gluon.jit
    def tile_number(j, T, S, CUT: gl.constexpr):
        """Number of tiles [64 keys, 64 rows] of dS before those of the rows from 64 j on, in a head:
        see `n_tiles_before`.
        """
        if CUT.causal:
            return j * (j - 1) // 2 + j * ((S - T + 63) // 64 + 1)
        else:  # noqa: RET505
            return j * ((S + 127) // 128 * 2)

    @gluon.jit
    def _halves(shared, ds):
        """The memory of one tile [64, 128] as two tiles of dS."""
        if RENAMED:
            return shared.reinterpret(ds.dtype, [2, 64, 64], ds.layout)
        else:  # noqa: RET505
            return shared._reinterpret(ds.dtype, [2, 64, 64], ds.layout)

    # ---- dK/dV of 128 keys -------------------------------------------------------------------------------------------

    @gluon.jit
    def _first_tile(key, T, S, CUT: gl.constexpr):
        """The first tile of rows that sees key number ``key`` or a later one."""
        if CUT.causal:
            return gl.minimum(gl.maximum(key + T - S, 0) // 64, (T + 63) // 64)
        else:  # noqa: RET505
            return 0

    @gluon.jit
    def _load_keys(item, n, given, CUT: gl.constexpr):
        q, k, v, do, stats, n_rows, own_s, ring, once, T, S, H, padded = given
        q_s, do_s, lse_s, sums_s, full, empty = ring
        head, start = gl.load(item + 1), gl.load(item + 2) * 128
        G = H // CUT.group
        b, g = head // G, head % G
        mbarrier.expect(once, 4 * 64 * CUT.width * 2)
        for user in gl.static_range(2):
            copy_in(k, [b, g // CUT.apart, start + 64 * user, 0], once, as_box(own_s.index(user), k))
            copy_in(v, [b, g // CUT.apart, start + 64 * user, 0], once, as_box(own_s.index(2 + user), v))
        first = _first_tile(start, T, S, CUT)
        each = (T + 63) // 64 - first
        for i in range(0, CUT.group * each + 1):
            shared = gl.minimum(i // each, CUT.group - 1)
            row = (first + i % each) * 64
            at = (head * CUT.group + shared) * padded + row
            place = n % CUT.stages
            wait_empty(empty, n, CUT)
            opens = full.index(place)
            mbarrier.expect(opens, 2 * 64 * (CUT.width * 2 + 4))
            copy_in(q, [b, g * CUT.group + shared, row, 0], opens, as_box(q_s.index(place), q))
            copy_in(stats, [at], opens, lse_s.index(place))
            copy_in(do, [b, g * CUT.group + shared, row, 0], opens, as_box(do_s.index(place), do))
            copy_in(stats, [n_rows + at], opens, sums_s.index(place))
            n += 1
        return n

    @gluon.jit
    def _own(own_s, user):
        """A user's keys and values in shared memory."""
        place = unknown(user)
        return own_s.index(place), own_s.index(2 + place)

    @gluon.jit
    def _use_keys(user: gl.constexpr, item, n, given, CUT: gl.constexpr):
        dk_out, dv_out, ds, counters, own_s, spare_s, ring, once, T, S, H, scale2, scale = given
        q_s, full, empty = ring[0], ring[4], ring[5]
        mine = gl.load(item + 2) * 128 + 64 * user
        ds_s = _halves(spare_s.index(0), ds).index(user)
        dk = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        dv = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        first, whole, end = _first_tile(mine, T, S, CUT), _first_tile(mine + 127, T, S, CUT), (T + 63) // 64
        await_count(counters, gl.load(item + 4), gl.load(item + 5))
        mbarrier.wait(once, gl.load(item + 7))
        s = warpgroup_mma_wait(0, deps=[_begin_scores(own_s.index(user), q_s, full, n, CUT)])
        at = gl.load(item + 3) + mine // 64
        cols = mine + gl.arange(0, 64, gl.SliceLayout(1, acc(64)))
        rows = S - T + gl.arange(0, 64, gl.SliceLayout(0, acc(64)))
        for _ in range(0, CUT.group):
            for _ in range(_first_tile(mine - 64 * user, T, S, CUT), first):  # rows that see none of this user's keys
                s = warpgroup_mma_wait(0, deps=[_begin_scores(own_s.index(user), q_s, full, n + 1, CUT)])
                release(empty, n, CUT)
                n += 1
            for j in range(first, whole):
                key, value = _own(own_s, user)
                put = (ds, ds_s, at + tile_number(j, T, S, CUT), S)
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows + 64 * j, cols, scale2, put, True, CUT)
                n += 1
            for j in range(whole, end):
                key, value = _own(own_s, user)
                put = (ds, ds_s, at + tile_number(j, T, S, CUT), S)
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows, cols, scale2, put, False, CUT)
                n += 1
            at += tile_number(end, T, S, CUT)
        release(empty, n, CUT)  # the tile that came only so that the last one could look ahead
        key, value, head, G = own_s.index(user), own_s.index(2 + user), gl.load(item + 1), H // CUT.group
        mine = gl.load(item + 2) * 128 + 64 * user
        key.store((dk * scale).to(key.dtype))
        value.store(dv.to(key.dtype))
        fence_async_shared()
        copy_out(dk_out, [head // G, head % G, mine, 0], as_box(key, dk_out))
        copy_out(dv_out, [head // G, head % G, mine, 0], as_box(value, dv_out))
        return n + 1

    # ---- dQ of 256 rows: a stage of the ring has four tiles of dS, two for each user, and one of keys ----------------

    @gluon.jit
    def _n_keys(j, T, S, CUT: gl.constexpr):
        """Number of tiles of keys that any of the rows 64 j to 64 j + 63 sees."""
        n = (S + 63) // 64
        return gl.minimum(j + 1 + (S - T + 63) // 64, n) if CUT.causal else n

    @gluon.jit
    def _load_rows(item, n, given, CUT: gl.constexpr):
        k, ds, counters, own_s, ring, T, S, H = given
        full, empty = ring[4], ring[5]
        head, first, base, last = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3), (T + 63) // 64 - 1
        b, g = head // H, head % H // (CUT.group * CUT.apart)
        await_count(counters, gl.load(item + 4), gl.load(item + 5))
        for i in range(0, _n_keys(gl.minimum(first + 3, last), T, S, CUT)):
            place = n % CUT.stages
            wait_empty(empty, n, CUT)
            opens = full.index(place)
            mbarrier.expect(opens, (4 * 64 + CUT.width) * 64 * 2)
            for half in gl.static_range(2):
                for user in gl.static_range(2):
                    j = gl.minimum(first + 2 * user + half, last)
                    at = base + tile_number(j, T, S, CUT) + gl.minimum(i, _n_keys(j, T, S, CUT) - 1)
                    copy_in(ds, [64 * at, 0], opens, _halves(ring[user].index(place), ds).index(half))
            copy_in(k, [b, g, 64 * i, 0], opens, as_box(own_s.index(place), k))
            n += 1
        return n

    @gluon.jit
    def _add(total, tiles_s, own_s, n, half: gl.constexpr, ds, CUT: gl.constexpr):
        """Start the product of a tile of dS, transposed, and its keys."""
        place = n % CUT.stages
        left = _halves(tiles_s.index(place), ds).index(half).permute((1, 0))
        return warpgroup_mma(left, own_s.index(place), total, is_async=True)

    @gluon.jit
    def _use_rows(user: gl.constexpr, item, n, given, CUT: gl.constexpr):
        out, ds, own_s, spare_s, ring, T, S, H, scale = given
        tiles_s, full, empty = ring[user], ring[4], ring[5]
        head, first, last = gl.load(item + 1), gl.load(item + 2), (T + 63) // 64 - 1
        mine = first + 2 * user
        a = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        b = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        n_both = _n_keys(gl.minimum(mine, last), T, S, CUT)
        for i in range(0, n_both):
            wait_full(full, n, CUT)
            a = _add(a, tiles_s, own_s, n, 0, ds, CUT)
            b = _add(b, tiles_s, own_s, n, 1, ds, CUT)
            a, b = warpgroup_mma_wait(2, deps=[a, b])
            mbarrier.arrive(empty.index((n + CUT.stages - 1) % CUT.stages), pred=i > 0)
            n += 1
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        release(empty, n + CUT.stages - 1, CUT)
        n_lower = _n_keys(gl.minimum(mine + 1, last), T, S, CUT)
        for _ in range(n_both, n_lower):  # the lower half of the rows sees one tile more
            wait_full(full, n, CUT)
            b = warpgroup_mma_wait(0, deps=[_add(b, tiles_s, own_s, n, 1, ds, CUT)])
            release(empty, n, CUT)
            n += 1
        for _ in range(n_lower, _n_keys(gl.minimum(first + 3, last), T, S, CUT)):  # tiles for the other user
            wait_full(full, n, CUT)
            release(empty, n, CUT)
            n += 1
        own = spare_s.index(user)
        own.store((a * scale).to(own.dtype))
        fence_async_shared()
        copy_out(out, [head // H, head % H, 64 * mine, 0], as_box(own, out))
        tma.store_wait(0)
        own.store((b * scale).to(own.dtype))
        fence_async_shared()
        copy_out(out, [head // H, head % H, 64 * (mine + 1), 0], as_box(own, out))
        return n

    # ---- the kernel --------------------------------------------------------------------------------------------------

    @gluon.jit
    def _load(given, CUT: gl.constexpr):
        item, idle, for_keys, for_rows = given
        n = 0
        n_items = 0
        kind = gl.load(item)
        while kind >= 0:
            mbarrier.wait(idle, (n_items & 1) ^ 1)  # until both users have finished with the previous item's memory
            if kind == 0:
                n = _load_keys(item, n, for_keys, CUT)
            else:
                n = _load_rows(item, n, for_rows, CUT)
            n_items += 1
            item += NEXT
            kind = gl.load(item)

    @gluon.jit
    def _use(user: gl.constexpr, given, CUT: gl.constexpr):
        item, idle, counters, for_keys, for_rows = given
        n = 0
        kind = gl.load(item)
        while kind >= 0:
            if kind == 0:
                n = _use_keys(user, item, n, for_keys, CUT)
            else:
                n = _use_rows(user, item, n, for_rows, CUT)
            tma.store_wait(0)
            mbarrier.arrive(idle)
            count(counters, gl.load(item + 6))
            item += NEXT
            kind = gl.load(item)

    @gluon.jit(do_not_specialize=(*LENGTHS, "each", "n_rows", "padded"))
    def stored_backward_kernel(
        q, k, v, do, dq, dk, dv, stats, ds, items, counters, each, n_rows, T, S, H, padded, scale2, scale,
        CUT: gl.constexpr,
    ):  # fmt: skip
        """All gradients.

        ``items`` has ``each`` numbers for each program, its items one after the other, and then -1.
        """
        # a program's own keys and values; for dQ, the ring's tiles of keys, one for each of CUT.stages
        own_s = gl.allocate_shared_memory(q.dtype, [4, 64, CUT.width], tile_layout(64, CUT))
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, 64, CUT.width], tile_layout(64, CUT))
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, 64, CUT.width], tile_layout(64, CUT))
        spare_s = gl.allocate_shared_memory(q.dtype, [2, 64, CUT.width], tile_layout(64, CUT))
        lse_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, 64], stats.layout)
        sums_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, 64], stats.layout)
        once, full, empty = _barriers(CUT)
        idle = barriers(1, 2).index(0)
        ring = (q_s, do_s, lse_s, sums_s, full, empty)
        item = items + gl.program_id(0) * each
        loaded = (
            item, idle, (q, k, v, do, stats, n_rows, own_s, ring, once, T, S, H, padded),
            (k, ds, counters, own_s, ring, T, S, H),
        )  # fmt: skip
        used = (
            item, idle, counters, (dk, dv, ds, counters, own_s, spare_s, ring, once, T, S, H, scale2, scale),
            (dq, ds, own_s, spare_s, ring, T, S, H, scale),
        )  # fmt: skip
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_load, (loaded, CUT))], [4, 1], [240, 24]
        )


# ---- host ------------------------------------------------------------------------------------------------------------


def statistics_launch(sizes: Sizes, n_counters: int) -> Launch:
    """The launch for (o, do, lse, stats, counters)."""
    rows = (1, 1, ROWS, sizes.width)
    args = (
        Box(0, rows), Box(1, rows), Address(2), Address(3), Address(4), sizes.n_rows, sizes.t, sizes.n_heads,
        sizes.padded,
        n_counters, sizes.width, ROWS,
    )  # fmt: skip
    return Launch(statistics_kernel, (sizes.padded // ROWS, sizes.n_batches * sizes.n_heads), args, num_warps=4)


class Dealt(NamedTuple):
    """What stays of a `Work`, for a device."""

    table: torch.Tensor  # [programs, numbers]: the items of each program, one after the other, and then -1
    n_tiles: int
    n_counters: int
    apart: int  # how many parts share a head of keys


def backward_launch(sizes: Sizes, dealt: Dealt) -> Launch:
    """The launch for (q, k, v, do, dq, dk, dv, stats, ds, items, counters)."""
    group, (n_programs, length) = sizes.group // dealt.apart, dealt.table.shape
    cut = Roles(
        2,
        64,
        STAGES,
        kernel="stored",
        width=128,
        group=group,
        apart=dealt.apart,
        causal=sizes.causal,
        ragged=sizes.ragged,
    )
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    args = (
        *(box(i, 64, sizes.width) for i in range(7)), Box(7, (64,), FLAT, (2 * sizes.n_rows,)),
        Box(8, (64, 64), layout, (64 * dealt.n_tiles, 64)), Address(9), Address(10), length,
        sizes.n_rows, sizes.t, sizes.s, sizes.n_heads, sizes.padded, sizes.scale * math.log2(math.e), sizes.scale, cut,
    )  # fmt: skip
    # a cooperative launch starts all programs at once or none: they wait for each other
    return Launch(stored_backward_kernel, (n_programs,), args, num_warps=4, launch_cooperative_grid=True)


def for_device(work: Work, apart: int, device: torch.device) -> Dealt:
    """The lists of items as a table on the device."""
    length = FIELDS * (max(map(len, work.lists)) + 1)
    table = torch.full((len(work.lists), length), -1, dtype=torch.int32)
    for row, items in zip(table, work.lists, strict=True):
        row[: FIELDS * len(items)] = torch.tensor(items, dtype=torch.int32).flatten()
    return Dealt(table.to(device), work.n_tiles, work.n_counters, apart)


@cache  # for ever, because kernels that still run, and CUDA graphs, read the table
def _dealt(sizes: Sizes, n_programs: int, n_tiles: int, device: torch.device) -> Dealt:
    return for_device(*deal_apart(sizes, n_programs, n_tiles), device)


def has_collectives() -> bool:
    """Whether this process communicates with others.

    A collective that occupies some multiprocessors would hold up a cooperative launch.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class StoredBackward(TakesRoom):
    """A backward pass with five products for fixed sizes, on one device. Make it before a CUDA graph is captured.

    Args:
        sizes: Of all tensors.
        device: Where they are.
        n_programs: Number of multiprocessors of the device.
        n_tiles: The most tiles of dS that are in memory at a time.
        otherwise: Called with the same tensors if the device has too little memory for dS,
            or if the process has collectives.

    Raises:
        ValueError: some row has no key, or tiles are not 128 wide.
    """

    def __init__(self, sizes: Sizes, device: torch.device, n_programs: int, n_tiles: int, otherwise: Any = None):
        super().__init__(otherwise)
        if sizes.width != 128 or (sizes.causal and sizes.t > sizes.s):
            raise ValueError(
                f"{sizes.t} rows, {sizes.s} keys, tiles of width {sizes.width}: "
                "expected a key for each row, and width 128"
            )
        self.dealt = _dealt(sizes, n_programs, n_tiles, device)
        self.statistics = statistics_launch(sizes, self.dealt.n_counters)
        self.backward = backward_launch(sizes, self.dealt)
        self.n_ds, self.n_stats = self.dealt.n_tiles * 64 * 64, 2 * sizes.n_rows

    def is_barred(self) -> bool:
        """Whether a collective could hold it up, and there is another way."""
        return self.otherwise is not None and has_collectives()

    def take(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """dS; and dK and dV of each query head, if heads are apart."""
        ds = torch.empty(self.n_ds, dtype=q.dtype, device=q.device)
        return ds, [part_like(q, x) for x in (k, v)] if self.dealt.apart > 1 else []

    def run(self, room: Any, *given: torch.Tensor) -> None:
        """Fill dq, dk and dv."""
        (ds, parts), (q, k, v, o, do, lse, dq, dk, dv) = room, given
        table, _, n_counters, apart = self.dealt
        stats = torch.empty(self.n_stats, dtype=torch.float32, device=q.device)
        counters = torch.empty(n_counters, dtype=torch.int32, device=q.device)
        self.statistics(o, do, lse, stats, counters)
        self.backward(q, k, v, do, dq, *(parts or (dk, dv)), stats, ds, table, counters)
        for total, part in zip((dk, dv), parts, strict=False):
            add_parts(total, part, apart)
