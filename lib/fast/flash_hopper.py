"""FlashAttention with roles for a Hopper GPU's warps (warp specialization): one only copies, groups of four only compute.

Read ``lib.fast.flash`` first: the arithmetic is the same. There, Triton decides which warps copy and when they wait for a
product. In Gluon, the language below Triton, the author decides: layouts, shared memory, barriers and waits are all explicit.

A program has two or three groups of warps that compute, its *users*. Each user owns 64 rows (forward, dQ) or 64 keys (dK/dV).
All of them read the same ring of tiles, so each tile comes from memory once for all users. Each place in the ring has two
barriers: ``full`` opens when the copy engine has written all bytes of the tile, ``empty`` when every user has finished with
it. Tile n of a program is at place n % stages, and a barrier's phase, which alternates between 0 and 1, tells the rounds
apart. One more barrier, ``once``, opens when the users' own rows have arrived. Sizes are multiples of 128; callers check that
with ``fits_fast``.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, check_shapes, triton

KNOWN = (
    (3, 6),
    (3, 7),
    (3, 8),
    (3, 9),
)  # versions of Triton that compile this file; Gluon is young, and its names change
PROVEN = ((3, 6),)  # versions whose code passed tests/workbook/test_flash_hopper.py on a GPU

VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else ()
GLUON = not INTERPRETED and VERSION in KNOWN


@dataclass(frozen=True)
class Roles:
    """How one kernel is cut, known when it is compiled; `complete` fills in the fields after ``registers``."""

    users: int  # groups of four warps that compute; 2, or 3 for forward and dQ
    tile: int  # keys (forward, dQ) or rows (dK/dV) in a tile of the ring
    stages: int  # tiles in the ring, 2 or more: the next one arrives before this one is released
    heads_first: bool = False  # forward and dQ: neighbouring programs compute different heads instead of different rows
    early: bool = False  # forward and dQ: the next scores are started before this tile's softmax
    registers: bool = (
        False  # a group's own rows are read from registers, not from shared memory, as left factors of products
    )
    kernel: str = "forward"  # or "dQ", "dK/dV"
    width: int = 0
    group: int = 1  # heads of queries for each head of keys
    causal: bool = False


if GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    fence_async_shared = hopper.fence_async_shared
    copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the first name since Triton 3.9
    copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

    LOG2E, LN2 = gl.constexpr(math.log2(math.e)), gl.constexpr(math.log(2))
    FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

    @gluon.constexpr_function
    def acc(n):
        """Layout of a group's [64, n] float32 accumulator, to which tensor cores add."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])

    @gluon.constexpr_function
    def left(n):
        """Layout of a left factor [64, n] that is read from registers."""
        return gl.DotOperandLayout(operand_index=0, parent=acc(n), k_width=2)

    @gluon.jit
    def _own(shared, CUT: gl.constexpr):
        """A group's own 64 rows as the left factor of products [64, tile]."""
        if CUT.registers:
            return shared.load(left(CUT.tile))
        else:  # noqa: RET505 - Gluon wants both ways written out
            return shared

    # ---- the ring ----------------------------------------------------------------------------------------------------

    @gluon.jit
    def _barriers(CUT: gl.constexpr):
        once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [CUT.stages, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [CUT.stages, 1], mbarrier.MBarrierLayout())
        mbarrier.init(once, count=1)
        for i in gl.static_range(gl.constexpr(CUT.stages)):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CUT.users)
        return once, full, empty

    @gluon.jit
    def _part(used, loaded, CUT: gl.constexpr):
        """Assign roles to the program's warps: users with many registers, and one warp with few registers that loads."""
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        third: gl.constexpr = 2
        if CUT.users == 2:
            gl.warp_specialize(
                [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_load, (loaded, CUT))], [4, 1], [240, 24]
            )
        else:
            gl.warp_specialize(
                [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_use, (third, used, CUT)), (_load, (loaded, CUT))],
                [4, 4, 1], [160, 160, 24],
            )  # fmt: skip

    @gluon.jit
    def _use(user: gl.constexpr, given, CUT: gl.constexpr):
        if CUT.kernel == "forward":
            _use_forward(user, given, CUT)
        elif CUT.kernel == "dQ":
            _use_dq(user, given, CUT)
        else:
            _use_dkdv(user, given, CUT)

    @gluon.jit
    def _load(given, CUT: gl.constexpr):
        if CUT.kernel == "dK/dV":
            _load_for_keys(given, CUT)
        else:
            _load_for_rows(given, CUT)

    @gluon.jit
    def _wait_full(full, n, CUT: gl.constexpr):
        mbarrier.wait(full.index(n % CUT.stages), (n // CUT.stages) & 1)

    @gluon.jit
    def _wait_empty(empty, n, CUT: gl.constexpr):
        """Wait until place n is free. In the first round it is free from the start."""
        mbarrier.wait(empty.index(n % CUT.stages), ((n // CUT.stages) & 1) ^ 1)

    @gluon.jit
    def _let_go(empty, n, CUT: gl.constexpr):
        mbarrier.arrive(empty.index(n % CUT.stages))

    @gluon.jit
    def _begin(factor, shared):
        """Start factor @ shared^T; the result may be read only after a wait."""
        n: gl.constexpr = shared.shape[0]
        zeros = gl.full([64, n], 0.0, gl.float32, acc(n))
        return warpgroup_mma(factor, shared.permute((1, 0)), zeros, use_acc=False, is_async=True)

    @gluon.jit
    def _begin_scores(factor, places, full, n, CUT: gl.constexpr):
        """Start the scores of tile n. The loader brings one tile more than needed, so that even the last one can look ahead."""
        _wait_full(full, n, CUT)
        return _begin(factor, places.index(n % CUT.stages))

    # ---- forward and dQ: a group owns 64 rows, and tiles of keys and values pass by ----------------------------------

    @gluon.jit
    def _place(CUT: gl.constexpr):
        """Head and first row of this program; the longest rows come first."""
        if CUT.heads_first:
            return gl.program_id(0), (gl.num_programs(1) - 1 - gl.program_id(1)) * (64 * CUT.users)
        else:  # noqa: RET505
            return gl.program_id(1), (gl.num_programs(0) - 1 - gl.program_id(0)) * (64 * CUT.users)

    @gluon.jit
    def _n_tiles(end, T, S, CUT: gl.constexpr):
        """Number of tiles that the rows before ``end`` see."""
        if CUT.causal:
            return (gl.minimum(end, T) + S - T + CUT.tile - 1) // CUT.tile
        else:  # noqa: RET505
            return S // CUT.tile

    @gluon.jit
    def _load_for_rows(given, CUT: gl.constexpr):
        rows_in, rows_s, k, v, once, ring, T, S = given
        k_s, v_s, full, empty = ring
        head, start = _place(CUT)
        mbarrier.expect(once, len(rows_in) * CUT.users * 64 * CUT.width * 2)
        for user in gl.static_range(gl.constexpr(CUT.users)):
            at = head * T + gl.minimum(start + 64 * user, T - 64)  # beyond the last row, load rows that nobody uses
            for i in gl.static_range(len(rows_in)):
                copy_in(rows_in[i], [at, 0], once, rows_s[i].index(user))
        base = head // CUT.group * S
        n_tiles = _n_tiles(start + 64 * CUT.users, T, S, CUT)
        for n in range(0, n_tiles + 1):
            at = base + gl.minimum(n, n_tiles - 1) * CUT.tile
            place = n % CUT.stages
            _wait_empty(empty, n, CUT)
            mbarrier.expect(full.index(place), 2 * CUT.tile * CUT.width * 2)
            copy_in(k, [at, 0], full.index(place), k_s.index(place))
            copy_in(v, [at, 0], full.index(place), v_s.index(place))

    @gluon.jit
    def _pass_by(full, empty, n, n_tiles, CUT: gl.constexpr):
        """Release the tiles that only later rows need."""
        for i in range(n, n_tiles):
            _wait_full(full, i, CUT)
            _let_go(empty, i, CUT)

    @gluon.jit
    def _keys(o, l, m, s, query, ring, n, sees, scale2, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of the forward pass. s are its scores; returns those of the next tile too."""
        k_s, v_s, full, empty = ring
        if CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        if MASK:
            cols = n * CUT.tile + gl.arange(0, CUT.tile, gl.SliceLayout(0, acc(CUT.tile)))
            s = gl.where(sees[:, None] >= cols[None, :], s, -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale2)
        weights = gl.exp2(s * scale2 - m_new[:, None])
        decay = gl.exp2(m - m_new)
        l = l * decay + gl.sum(weights, 1)
        weights = gl.convert_layout(weights.to(query.dtype), left(CUT.width))
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, acc(CUT.width)))[:, None]
        o = warpgroup_mma(weights, v_s.index(n % CUT.stages), o, is_async=True)
        if not CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        o, ahead, weights = warpgroup_mma_wait(0, deps=[o, ahead, weights])
        _let_go(empty, n, CUT)
        return o, l, m_new, ahead

    @gluon.jit
    def _use_forward(user: gl.constexpr, given, CUT: gl.constexpr):
        q_s, out, lse, once, ring, T, S, scale2 = given
        k_s, full, empty = ring[0], ring[2], ring[3]
        head, start = _place(CUT)
        mine = start + 64 * user
        n_tiles = _n_tiles(start + 64 * CUT.users, T, S, CUT)
        n = 0
        mbarrier.wait(once, 0)
        if mine < T:
            place, query = q_s.index(user), _own(q_s.index(user), CUT)
            row_layout: gl.constexpr = gl.SliceLayout(1, acc(CUT.tile))
            rows = mine + gl.arange(0, 64, row_layout)
            m = gl.full([64], -float("inf"), gl.float32, row_layout)
            l = gl.full([64], 0.0, gl.float32, row_layout)
            o = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
            s = warpgroup_mma_wait(0, deps=[_begin_scores(query, k_s, full, 0, CUT)])
            whole = (mine + S - T) // CUT.tile if CUT.causal else n_tiles
            for _ in range(0, whole):
                o, l, m, s = _keys(o, l, m, s, query, ring, n, rows, scale2, False, CUT)
                n += 1
            if CUT.causal:
                for _ in range(whole, _n_tiles(mine + 64, T, S, CUT)):
                    o, l, m, s = _keys(o, l, m, s, query, ring, n, rows + S - T, scale2, True, CUT)
                    n += 1
            gl.store(lse + head * T + rows, (m + gl.log2(l)) * LN2)
            place.store((o / gl.convert_layout(l, gl.SliceLayout(1, acc(CUT.width)))[:, None]).to(place.dtype))
            fence_async_shared()
            copy_out(out, [head * T + mine, 0], place)
        _pass_by(full, empty, n, n_tiles, CUT)
        tma.store_wait(0)

    @gluon.jit
    def hopper_forward_kernel(q, k, v, out, lse, T, S, scale2, CUT: gl.constexpr):
        """Like ``fast_forward_kernel``."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], q.layout)
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], k.layout)
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], v.layout)
        once, full, empty = _barriers(CUT)
        ring = (k_s, v_s, full, empty)
        _part((q_s, out, lse, once, ring, T, S, scale2), ((q,), (q_s,), k, v, once, ring, T, S), CUT)

    @gluon.jit
    def _keys_back(dq, s, query, grad, lse2, sums, ring, n, sees, scale2, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of dQ. s are its scores; returns those of the next tile too."""
        k_s, v_s, full, empty = ring
        dp = _begin(grad, v_s.index(n % CUT.stages))
        if CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        weights = gl.exp2(s * scale2 - lse2[:, None])
        if MASK:
            cols = n * CUT.tile + gl.arange(0, CUT.tile, gl.SliceLayout(0, acc(CUT.tile)))
            weights = gl.where(sees[:, None] >= cols[None, :], weights, 0.0)
        dp = warpgroup_mma_wait(1 if CUT.early else 0, deps=[dp])
        ds = gl.convert_layout((weights * (dp - sums[:, None])).to(query.dtype), left(CUT.width))
        dq = warpgroup_mma(ds, k_s.index(n % CUT.stages), dq, is_async=True)
        if not CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        dq, ahead, ds = warpgroup_mma_wait(0, deps=[dq, ahead, ds])
        _let_go(empty, n, CUT)
        return dq, ahead

    @gluon.jit
    def _use_dq(user: gl.constexpr, given, CUT: gl.constexpr):
        q_s, o_s, do_s, out, lse, stats, n_rows, once, ring, T, S, scale2, scale = given
        k_s, full, empty = ring[0], ring[2], ring[3]
        head, start = _place(CUT)
        mine = start + 64 * user
        n_tiles = _n_tiles(start + 64 * CUT.users, T, S, CUT)
        n = 0
        mbarrier.wait(once, 0)
        if mine < T:
            query, grad, output = _own(q_s.index(user), CUT), _own(do_s.index(user), CUT), o_s.index(user)
            row_layout: gl.constexpr = gl.SliceLayout(1, acc(CUT.tile))
            rows = mine + gl.arange(0, 64, row_layout)
            lse2 = gl.load(lse + head * T + rows) * LOG2E
            both = output.load(acc(CUT.width)).to(gl.float32) * do_s.index(user).load(acc(CUT.width)).to(gl.float32)
            sums = gl.convert_layout(gl.sum(both, 1), row_layout)
            gl.store(stats + head * T + rows, lse2)
            gl.store(stats + n_rows + head * T + rows, sums)
            dq = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
            s = warpgroup_mma_wait(0, deps=[_begin_scores(query, k_s, full, 0, CUT)])
            whole = (mine + S - T) // CUT.tile if CUT.causal else n_tiles
            for _ in range(0, whole):
                dq, s = _keys_back(dq, s, query, grad, lse2, sums, ring, n, rows, scale2, False, CUT)
                n += 1
            if CUT.causal:
                for _ in range(whole, _n_tiles(mine + 64, T, S, CUT)):
                    dq, s = _keys_back(dq, s, query, grad, lse2, sums, ring, n, rows + S - T, scale2, True, CUT)
                    n += 1
            output.store((dq * scale).to(output.dtype))
            fence_async_shared()
            copy_out(out, [head * T + mine, 0], output)
        _pass_by(full, empty, n, n_tiles, CUT)
        tma.store_wait(0)

    @gluon.jit
    def hopper_dq_kernel(q, k, v, o, do, dq, lse, stats, n_rows, T, S, scale2, scale, CUT: gl.constexpr):
        """Like ``fast_dq_kernel``; stores stats [2, heads * T] for dK/dV."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], q.layout)
        o_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], q.layout)
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], q.layout)
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], k.layout)
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], v.layout)
        once, full, empty = _barriers(CUT)
        ring = (k_s, v_s, full, empty)
        _part(
            (q_s, o_s, do_s, dq, lse, stats, n_rows, once, ring, T, S, scale2, scale),
            ((q, do, o), (q_s, do_s, o_s), k, v, once, ring, T, S),
            CUT,
        )

    # ---- dK/dV: a group owns 64 keys, and tiles of queries and gradients pass by -------------------------------------

    @gluon.jit
    def _first_row(key, T, S, CUT: gl.constexpr):
        """Start of the first tile that sees key number ``key``, or a later one."""
        if CUT.causal:
            return gl.maximum(key + T - S, 0) // CUT.tile * CUT.tile
        else:  # noqa: RET505
            return 0

    @gluon.jit
    def _load_for_keys(given, CUT: gl.constexpr):
        q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S = given
        q_s, do_s, lse_s, sums_s, full, empty = ring
        head, start = gl.program_id(1), gl.program_id(0) * (64 * CUT.users)
        mbarrier.expect(once, 2 * CUT.users * 64 * CUT.width * 2)
        for user in gl.static_range(gl.constexpr(CUT.users)):
            copy_in(k, [head * S + start + 64 * user, 0], once, k_s.index(user))
            copy_in(v, [head * S + start + 64 * user, 0], once, v_s.index(user))
        first = _first_row(start, T, S, CUT)
        each = (T - first) // CUT.tile
        for n in range(0, CUT.group * each + 1):
            at = (head * CUT.group + gl.minimum(n // each, CUT.group - 1)) * T + first + n % each * CUT.tile
            place = n % CUT.stages
            _wait_empty(empty, n, CUT)
            mbarrier.expect(full.index(place), 2 * CUT.tile * (CUT.width * 2 + 4))
            copy_in(q, [at, 0], full.index(place), q_s.index(place))
            copy_in(stats, [at], full.index(place), lse_s.index(place))
            copy_in(do, [at, 0], full.index(place), do_s.index(place))
            copy_in(stats, [n_rows + at], full.index(place), sums_s.index(place))

    @gluon.jit
    def _queries(dk, dv, s, key, value, ring, n, rows, cols, scale2, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of dK and dV. s are its scores; returns those of the next tile too."""
        q_s, do_s, lse_s, sums_s, full, empty = ring
        place = n % CUT.stages
        query, grad = q_s.index(place), do_s.index(place)
        dp = _begin(value, grad)
        lse2 = lse_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        weights = gl.exp2(s * scale2 - lse2[None, :])
        if MASK:
            weights = gl.where(rows[None, :] >= cols[:, None], weights, 0.0)
        narrow = gl.convert_layout(weights.to(key.dtype), left(CUT.width))
        sums = sums_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        dv = warpgroup_mma(narrow, grad, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = gl.convert_layout((weights * (dp - sums[None, :])).to(key.dtype), left(CUT.width))
        dk = warpgroup_mma(ds, query, dk, is_async=True)
        ahead = _begin_scores(key, q_s, full, n + 1, CUT)
        dk, dv, ahead, narrow, ds = warpgroup_mma_wait(0, deps=[dk, dv, ahead, narrow, ds])
        _let_go(empty, n, CUT)
        return dk, dv, ahead

    @gluon.jit
    def _use_dkdv(user: gl.constexpr, given, CUT: gl.constexpr):
        dk_out, dv_out, k_s, v_s, once, ring, T, S, scale2, scale = given
        q_s, full, empty = ring[0], ring[4], ring[5]
        head, start = gl.program_id(1), gl.program_id(0) * (64 * CUT.users)
        mine = start + 64 * user
        key_place, value_place = k_s.index(user), v_s.index(user)
        cols = mine + gl.arange(0, 64, gl.SliceLayout(1, acc(CUT.tile)))
        rows = S - T + gl.arange(0, CUT.tile, gl.SliceLayout(0, acc(CUT.tile)))
        dk = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        dv = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
        first = _first_row(mine, T, S, CUT)
        whole = _first_row(mine + 64 + CUT.tile - 1, T, S, CUT)
        n = 0
        mbarrier.wait(once, 0)
        key, value = _own(key_place, CUT), _own(value_place, CUT)
        s = warpgroup_mma_wait(0, deps=[_begin_scores(key, q_s, full, 0, CUT)])
        for _ in range(0, CUT.group):
            for _ in range(_first_row(start, T, S, CUT), first, CUT.tile):  # rows that see none of this user's keys
                s = warpgroup_mma_wait(0, deps=[_begin_scores(key, q_s, full, n + 1, CUT)])
                _let_go(empty, n, CUT)
                n += 1
            for row in range(first, whole, CUT.tile):
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows + row, cols, scale2, True, CUT)
                n += 1
            for _ in range(whole, T, CUT.tile):
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows, cols, scale2, False, CUT)
                n += 1
        key_place.store((dk * scale).to(key.dtype))
        value_place.store(dv.to(key.dtype))
        fence_async_shared()
        copy_out(dk_out, [head * S + mine, 0], key_place)
        copy_out(dv_out, [head * S + mine, 0], value_place)
        tma.store_wait(0)

    @gluon.jit
    def hopper_dkdv_kernel(q, k, v, do, dk, dv, stats, n_rows, T, S, scale2, scale, CUT: gl.constexpr):
        """Like ``fast_dkdv_kernel``, with stats as one row."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], q.layout)
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], q.layout)
        lse_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        sums_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], k.layout)
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], k.layout)
        once, full, empty = _barriers(CUT)
        ring = (q_s, do_s, lse_s, sums_s, full, empty)
        _part(
            (dk, dv, k_s, v_s, once, ring, T, S, scale2, scale),
            (q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S),
            CUT,
        )


# ---- host ------------------------------------------------------------------------------------------------------------


def has_roles(x: Tensor) -> bool:
    """Whether kernels with roles run on x's device: compute capability 9.0 exactly, and a version of Triton in PROVEN."""
    return GLUON and VERSION in PROVEN and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


_compiled: dict[tuple, Any] = {}


def launch(kernel: Any, grid: tuple[int, int], key: tuple, args: tuple, **options: Any) -> None:
    """The same as ``kernel[grid](*args, **options)``, with less work on the host.

    Triton compares every argument with its compiled variants at each launch, which takes longer than a short kernel runs.
    Here ``key`` holds everything that the compiled code depends on. Callers guarantee the rest: sizes, and addresses in
    bytes, are multiples of 16.
    """
    if INTERPRETED:
        kernel[grid](*args, **options)
        return
    key = (kernel, torch.cuda.current_device(), *key)
    if key in _compiled:
        _compiled[key][(*grid, 1)](*args)
    else:
        _compiled[key] = kernel[grid](*args, **options)


@lru_cache(maxsize=64)
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    """The layout of a tile in shared memory that tensor cores read."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _describe(x: Tensor, rows: int) -> Any:
    """A descriptor that copies ``rows`` rows at once."""
    width = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [rows, width], _layout(rows, width, x.dtype))


def complete(cut: Roles, kernel: str, width: int, group: int, is_causal: bool) -> Roles:
    """The cut with the fields that its caller does not choose.

    Raises:
        ValueError: no kernel can be cut like this.
    """
    most = 2 if kernel == "dK/dV" else 3
    if not 2 <= cut.users <= most:
        raise ValueError(f"users = {cut.users}, expected 2{' or 3' if most == 3 else ''} for {kernel}")
    if cut.tile not in (32, 64, 128):
        raise ValueError(f"tile = {cut.tile}, expected 32, 64 or 128")
    if cut.stages < 2:
        raise ValueError(
            f"stages = {cut.stages}, expected 2 or more: the next tile arrives before this one is released"
        )
    if kernel == "dK/dV" and (cut.early or cut.heads_first):
        raise ValueError(f"early = {cut.early}, heads_first = {cut.heads_first}, expected neither for dK/dV")
    return replace(cut, kernel=kernel, width=width, group=group, causal=is_causal)


def _sizes(kernel: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, cut: Roles) -> tuple[int, int, float, Roles]:
    whole = complete(cut, kernel, q.shape[-1], check_shapes(q, k, v), is_causal)
    return q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5, whole


def _grid(q: Tensor, cut: Roles) -> tuple[int, int]:
    n_heads, n = math.prod(q.shape[:-2]), triton.cdiv(q.shape[-2], 64 * cut.users)
    return (n_heads, n) if cut.heads_first else (n, n_heads)


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, cut: Roles) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp [..., T]; q, k, v aligned."""
    t, s, scale, cut = _sizes("forward", q, k, v, is_causal, cut)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    args = (
        _describe(q, 64), _describe(k, cut.tile), _describe(v, cut.tile), _describe(o, 64), lse,
        t, s, scale * math.log2(math.e), cut,
    )  # fmt: skip
    launch(hopper_forward_kernel, _grid(q, cut), (cut, q.dtype), args, num_warps=4)
    return o, lse


def hopper_dq(q, k, v, o, do, lse, is_causal: bool, cut: Roles) -> tuple[Tensor, Tensor]:
    """The gradient of q; and for each row, stats [2, ...]: lse in base 2, and the sum of o * do."""
    t, s, scale, cut = _sizes("dQ", q, k, v, is_causal, cut)
    dq, stats = torch.empty_like(q), lse.new_empty((2, *lse.shape))
    args = (
        _describe(q, 64), _describe(k, cut.tile), _describe(v, cut.tile), *(_describe(x, 64) for x in (o, do, dq)),
        lse, stats, lse.numel(), t, s, scale * math.log2(math.e), scale, cut,
    )  # fmt: skip
    launch(hopper_dq_kernel, _grid(q, cut), (cut, q.dtype), args, num_warps=4)
    return dq, stats


def hopper_dkdv(q, k, v, do, stats, is_causal: bool, cut: Roles) -> tuple[Tensor, Tensor]:
    """The gradients of k and v; stats are those that `hopper_dq` returns."""
    t, s, scale, cut = _sizes("dK/dV", q, k, v, is_causal, cut)
    dk, dv, n_rows = torch.empty_like(k), torch.empty_like(v), stats.numel() // 2
    keys, values, d_keys, d_values = (_describe(x, 64) for x in (k, v, dk, dv))
    args = (
        _describe(q, cut.tile), keys, values, _describe(do, cut.tile), d_keys, d_values,
        TensorDescriptor(stats, [2 * n_rows], [1], [cut.tile], FLAT), n_rows, t, s, scale * math.log2(math.e), scale, cut,
    )  # fmt: skip
    grid = (s // (64 * cut.users), math.prod(k.shape[:-2]))
    launch(hopper_dkdv_kernel, grid, (cut, q.dtype), args, num_warps=4)
    return dk, dv
