"""FlashAttention with roles for a Hopper GPU's warps (warp specialization): one only copies,
groups of four only compute.

Read ``lib.fast.attention.flash`` first: the arithmetic is the same.
There, Triton decides which warps copy and when they wait for a product.
In Gluon, the language below Triton, the author decides: layouts, shared memory, barriers and waits are all explicit.

A program has two or three groups of warps that compute, its *users*. Each user owns 64 rows (forward,
dQ) or 64 keys (dK/dV).
All of them read the same ring of tiles, so each tile comes from memory once for all users.
Each place in the ring has two barriers: ``full`` opens when the TMA has written all bytes of the tile,
``empty`` when every user has finished with it.
Tile n of a program is at place n % stages, and a barrier's phase, which alternates between 0 and 1,
tells the rounds apart.
One more barrier, ``once``, opens when the users' own rows have arrived.

The TMA sees each matrix as [batch, heads, tokens, width] with any strides, so nothing is copied beforehand. It fills
what lies beyond the last token with zeros, and does not store there. `Roles.ragged` compiles the masks for the cases in
which this is not enough.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lib.fast.gluon import GLUON
from lib.fast.launch import LENGTHS, Address, Box, Launch, Sizes, grid_by_rows
from lib.given.kernels.tiles import triton


@dataclass(frozen=True)
class Roles:
    """How one kernel is cut, a constant of its compilation; `complete` fills in the fields after ``registers``."""

    users: int  # groups of four warps that compute; 2, or 3 for forward and dQ
    tile: int  # keys (forward, dQ) or rows (dK/dV) in a tile of the ring
    stages: int  # tiles in the ring, 2 or more: the next one arrives before this one is released
    heads_first: bool = False  # forward and dQ: neighbouring programs compute different heads instead of different rows
    early: bool = False  # forward and dQ: the next scores are started before this tile's softmax
    registers: bool = (
        False  # a group's own rows are read from registers, not from shared memory, as left factors of products
    )
    kernel: str = "forward"  # or "dQ", "dK/dV", "stored" (lib.fast.attention.flash_stored)
    width: int = 0
    values: int = 0  # width of tiles of values: as `width`, or narrower in the forward pass and for wide heads
    group: int = 1  # heads of queries for each head of keys
    apart: int = 1  # "stored": heads of queries that share a head of keys, but each with dK and dV of its own
    causal: bool = False
    ragged: bool = False  # lengths that are no multiples of 128, or rows without keys


if GLUON:
    from lib.fast.gluon import (
        FLAT,
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

    LOG2E, LN2 = gl.constexpr(math.log2(math.e)), gl.constexpr(math.log(2))

    @gluon.constexpr_function
    def tile_layout(rows, cut):
        """Layout of a tile [rows, width] of 16-bit numbers in shared memory, from which tensor cores read."""
        return gl.NVMMASharedLayout.get_default_for([rows, cut.width], gl.bfloat16)

    @gluon.constexpr_function
    def value_layout(rows, cut):
        """`tile_layout` of values."""
        return gl.NVMMASharedLayout.get_default_for([rows, cut.values], gl.bfloat16)

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
        return barriers(1, 1).index(0), barriers(CUT.stages, 1), barriers(CUT.stages, CUT.users)

    @gluon.jit
    def _part(used, loaded, CUT: gl.constexpr):
        """Assign roles to the program's warps: users with many registers,
        and one warp with few registers that loads.
        """
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        third: gl.constexpr = 2
        if CUT.users == 2:
            gl.warp_specialize(
                [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_load, (loaded, CUT))], [4, 1], [240, 24]
            )
        else:
            gl.warp_specialize(
                [
                    (_use, (first, used, CUT)),
                    (_use, (second, used, CUT)),
                    (_use, (third, used, CUT)),
                    (_load, (loaded, CUT)),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )

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
    def _begin(factor, shared):
        """Start factor @ shared^T; the result may be read only after a wait."""
        n: gl.constexpr = shared.shape[0]
        zeros = gl.full([64, n], 0.0, gl.float32, acc(n))
        return warpgroup_mma(factor, shared.permute((1, 0)), zeros, use_acc=False, is_async=True)

    @gluon.jit
    def _begin_scores(factor, places, full, n, CUT: gl.constexpr):
        """Start the scores of tile n.

        The loader brings one tile more than needed, so that even the last one can look ahead.
        """
        wait_full(full, n, CUT)
        return _begin(factor, places.index(n % CUT.stages))

    # ---- forward and dQ: a group owns 64 rows, and tiles of keys and values pass by ----------------------------------

    @gluon.jit
    def _place(CUT: gl.constexpr):
        """Head, counted through all batches, and first row of this program (`grid_by_rows`);
        the longest rows come first.
        """
        head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        return head, (gl.num_programs(1) - 1 - gl.program_id(1)) * (64 * CUT.users)

    @gluon.jit
    def _n_tiles(end, T, S, CUT: gl.constexpr):
        """Number of tiles that the rows before ``end`` see."""
        if CUT.causal:
            return gl.maximum(gl.minimum(end, T) + S - T + CUT.tile - 1, 0) // CUT.tile
        else:  # noqa: RET505
            return (S + CUT.tile - 1) // CUT.tile

    @gluon.jit
    def _n_whole(row, n_tiles, T, S, CUT: gl.constexpr):
        """Number of tiles without a hidden key for ``row`` and the rows after it;
        dQ also asks for rows beyond the last one.
        """
        if CUT.causal:
            return gl.minimum(gl.maximum(row + 1 + S - T, 0) // CUT.tile, n_tiles)
        elif CUT.ragged:  # noqa: RET505
            return S // CUT.tile
        else:
            return n_tiles

    @gluon.jit
    def _last_key(rows, T, S, CUT: gl.constexpr):
        """The last key that each row sees."""
        if CUT.causal:
            return rows + S - T
        else:  # noqa: RET505
            return gl.zeros_like(rows) + (S - 1)

    @gluon.jit
    def _load_for_rows(given, CUT: gl.constexpr):
        rows_in, rows_s, k, v, once, ring, T, S, H = given
        k_s, v_s, full, empty = ring
        head, start = _place(CUT)
        b, h = head // H, head % H
        mbarrier.expect(once, len(rows_in) * CUT.users * 64 * CUT.width * 2)
        for user in gl.static_range(gl.constexpr(CUT.users)):
            for i in gl.static_range(len(rows_in)):
                copy_in(rows_in[i], [b, h, start + 64 * user, 0], once, as_box(rows_s[i].index(user), rows_in[i]))
        g = h // CUT.group
        n_tiles = _n_tiles(start + 64 * CUT.users, T, S, CUT)
        for n in range(0, n_tiles + 1):
            at = gl.minimum(n, gl.maximum(n_tiles - 1, 0)) * CUT.tile
            place = n % CUT.stages
            wait_empty(empty, n, CUT)
            mbarrier.expect(full.index(place), 2 * CUT.tile * (CUT.width + CUT.values))
            copy_in(k, [b, g, at, 0], full.index(place), as_box(k_s.index(place), k))
            copy_in(v, [b, g, at, 0], full.index(place), as_box(v_s.index(place), v))

    @gluon.jit
    def _pass_by(full, empty, n, n_tiles, CUT: gl.constexpr):
        """Release the tiles that only later rows need."""
        for i in range(n, n_tiles):
            wait_full(full, i, CUT)
            release(empty, i, CUT)

    @gluon.jit
    def _keys(o, l, m, s, query, ring, n, sees, scale2, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of the forward pass. ``s`` holds its scores; the scores of the next tile are returned too."""
        k_s, v_s, full, empty = ring
        if CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        if MASK:
            cols = n * CUT.tile + gl.arange(0, CUT.tile, gl.SliceLayout(0, acc(CUT.tile)))
            s = gl.where(sees[:, None] >= cols[None, :], s, -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale2)
        shift = m_new
        if MASK and CUT.ragged:
            shift = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no key yet
        weights = gl.exp2(s * scale2 - shift[:, None])
        decay = gl.exp2(m - shift)
        l = l * decay + gl.sum(weights, 1)
        weights = gl.convert_layout(weights.to(query.dtype), left(CUT.values))
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, acc(CUT.values)))[:, None]
        o = warpgroup_mma(weights, v_s.index(n % CUT.stages), o, is_async=True)
        if not CUT.early:
            ahead = _begin_scores(query, k_s, full, n + 1, CUT)
        o, ahead, weights = warpgroup_mma_wait(0, deps=[o, ahead, weights])
        release(empty, n, CUT)
        return o, l, m_new, ahead

    @gluon.jit
    def _use_forward(user: gl.constexpr, given, CUT: gl.constexpr):
        q_s, out, lse, once, ring, T, S, H, scale2 = given
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
            o = gl.full([64, CUT.values], 0.0, gl.float32, acc(CUT.values))
            s = warpgroup_mma_wait(0, deps=[_begin_scores(query, k_s, full, 0, CUT)])
            whole = _n_whole(mine, n_tiles, T, S, CUT)
            for _ in range(0, whole):
                o, l, m, s = _keys(o, l, m, s, query, ring, n, rows, scale2, False, CUT)
                n += 1
            if CUT.causal or CUT.ragged:
                sees = _last_key(rows, T, S, CUT)
                for _ in range(whole, _n_tiles(mine + 64, T, S, CUT)):
                    o, l, m, s = _keys(o, l, m, s, query, ring, n, sees, scale2, True, CUT)
                    n += 1
            if CUT.ragged:
                gl.store(lse + head * T + rows, (m + gl.log2(l)) * LN2, mask=rows < T)
                l = gl.where(l == 0.0, 1.0, l)
            else:
                gl.store(lse + head * T + rows, (m + gl.log2(l)) * LN2)
            if CUT.values != CUT.width:
                place = place.slice(0, CUT.values, dim=1)
            place.store((o / gl.convert_layout(l, gl.SliceLayout(1, acc(CUT.values)))[:, None]).to(place.dtype))
            fence_async_shared()
            copy_out(out, [head // H, head % H, mine, 0], as_box(place, out))
        _pass_by(full, empty, n, n_tiles, CUT)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=LENGTHS)
    def hopper_forward_kernel(q, k, v, out, lse, T, S, H, scale2, CUT: gl.constexpr):
        """Like ``fast_forward_kernel``."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.values], value_layout(CUT.tile, CUT))
        once, full, empty = _barriers(CUT)
        ring = (k_s, v_s, full, empty)
        _part((q_s, out, lse, once, ring, T, S, H, scale2), ((q,), (q_s,), k, v, once, ring, T, S, H), CUT)

    @gluon.jit
    def _keys_back(dq, s, query, grad, lse2, sums, ring, n, sees, scale2, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of dQ. ``s`` holds its scores; the scores of the next tile are returned too."""
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
        release(empty, n, CUT)
        return dq, ahead

    @gluon.jit
    def _use_dq(user: gl.constexpr, given, CUT: gl.constexpr):
        q_s, o_s, do_s, out, lse, stats, n_rows, once, ring, T, S, H, padded, scale2, scale = given
        k_s, full, empty = ring[0], ring[2], ring[3]
        head, start = _place(CUT)
        mine = start + 64 * user
        n_tiles = _n_tiles(start + 64 * CUT.users, T, S, CUT)
        n = 0
        mbarrier.wait(once, 0)
        if mine < padded:
            query, grad, output = _own(q_s.index(user), CUT), _own(do_s.index(user), CUT), o_s.index(user)
            row_layout: gl.constexpr = gl.SliceLayout(1, acc(CUT.tile))
            rows = mine + gl.arange(0, 64, row_layout)
            if CUT.ragged:
                lse2 = gl.load(lse + head * T + rows, mask=rows < T, other=float("inf")) * LOG2E
                lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)  # no keys: all weights become 0
            else:
                lse2 = gl.load(lse + head * T + rows) * LOG2E
            both = output.load(acc(CUT.width)).to(gl.float32) * do_s.index(user).load(acc(CUT.width)).to(gl.float32)
            sums = gl.convert_layout(gl.sum(both, 1), row_layout)
            gl.store(stats + head * padded + rows, lse2)
            gl.store(stats + n_rows + head * padded + rows, sums)
            dq = gl.full([64, CUT.width], 0.0, gl.float32, acc(CUT.width))
            s = warpgroup_mma_wait(0, deps=[_begin_scores(query, k_s, full, 0, CUT)])
            whole = _n_whole(mine, n_tiles, T, S, CUT)
            for _ in range(0, whole):
                dq, s = _keys_back(dq, s, query, grad, lse2, sums, ring, n, rows, scale2, False, CUT)
                n += 1
            if CUT.causal or CUT.ragged:
                sees = _last_key(rows, T, S, CUT)
                for _ in range(whole, _n_tiles(mine + 64, T, S, CUT)):
                    dq, s = _keys_back(dq, s, query, grad, lse2, sums, ring, n, sees, scale2, True, CUT)
                    n += 1
            output.store((dq * scale).to(output.dtype))
            fence_async_shared()
            copy_out(out, [head // H, head % H, mine, 0], as_box(output, out))
        _pass_by(full, empty, n, n_tiles, CUT)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=LENGTHS)
    def hopper_dq_kernel(q, k, v, o, do, dq, lse, stats, n_rows, T, S, H, padded, scale2, scale, CUT: gl.constexpr):
        """Like ``fast_dq_kernel``; stores stats [2, heads * padded] for dK/dV."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        o_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        once, full, empty = _barriers(CUT)
        ring = (k_s, v_s, full, empty)
        _part(
            (q_s, o_s, do_s, dq, lse, stats, n_rows, once, ring, T, S, H, padded, scale2, scale),
            ((q, do, o), (q_s, do_s, o_s), k, v, once, ring, T, S, H),
            CUT,
        )

    # ---- dK/dV: a group owns 64 keys, and tiles of queries and gradients pass by -------------------------------------

    @gluon.jit
    def _first_row(key, T, S, CUT: gl.constexpr):
        """Start of the first tile that sees key number ``key``, or a later one."""
        if CUT.causal:
            first = gl.maximum(key + T - S, 0) // CUT.tile * CUT.tile
            return gl.minimum(first, _end_row(T, CUT)) if CUT.ragged else first
        else:  # noqa: RET505
            return 0

    @gluon.jit
    def _end_row(T, CUT: gl.constexpr):
        """End of the last tile of rows."""
        return (T + CUT.tile - 1) // CUT.tile * CUT.tile if CUT.ragged else T

    @gluon.jit
    def _load_for_keys(given, CUT: gl.constexpr):
        q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S, G, padded = given
        q_s, do_s, lse_s, sums_s, full, empty = ring
        head, start = gl.program_id(1), gl.program_id(0) * (64 * CUT.users)
        b, g = head // G, head % G
        mbarrier.expect(once, 2 * CUT.users * 64 * CUT.width * 2)
        for user in gl.static_range(gl.constexpr(CUT.users)):
            copy_in(k, [b, g, start + 64 * user, 0], once, as_box(k_s.index(user), k))
            copy_in(v, [b, g, start + 64 * user, 0], once, as_box(v_s.index(user), v))
        first = _first_row(start, T, S, CUT)
        each = (_end_row(T, CUT) - first) // CUT.tile
        for n in range(0, CUT.group * each + 1):
            shared = gl.minimum(n // each, CUT.group - 1)
            row = first + n % each * CUT.tile
            at = (head * CUT.group + shared) * padded + row
            h = g * CUT.group + shared
            place = n % CUT.stages
            wait_empty(empty, n, CUT)
            mbarrier.expect(full.index(place), 2 * CUT.tile * (CUT.width * 2 + 4))
            copy_in(q, [b, h, row, 0], full.index(place), as_box(q_s.index(place), q))
            copy_in(stats, [at], full.index(place), lse_s.index(place))
            copy_in(do, [b, h, row, 0], full.index(place), as_box(do_s.index(place), do))
            copy_in(stats, [n_rows + at], full.index(place), sums_s.index(place))

    @gluon.jit
    def _queries(dk, dv, s, key, value, ring, n, rows, cols, scale2, put, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of dK and dV. ``s`` holds its scores; the scores of the next tile are returned too.

        In ``lib.fast.attention.flash_stored`` it also copies dS out.
        ``put`` then holds the descriptor of dS, the shared memory on the way, the tile's number,
        and the number of keys.
        """
        q_s, do_s, lse_s, sums_s, full, empty = ring
        place = n % CUT.stages
        query, grad = q_s.index(place), do_s.index(place)
        dp = _begin(value, grad)
        lse2 = lse_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        weights = gl.exp2(s * scale2 - lse2[None, :])
        if MASK:
            weights = gl.where(rows[None, :] >= cols[:, None], weights, 0.0)
        if CUT.kernel == "stored" and CUT.ragged:
            # keys beyond the last one: infinity * 0 would spoil dQ
            weights = gl.where(cols[:, None] < put[3], weights, 0.0)
        narrow = gl.convert_layout(weights.to(key.dtype), left(CUT.width))
        sums = sums_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        dv = warpgroup_mma(narrow, grad, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = gl.convert_layout((weights * (dp - sums[None, :])).to(key.dtype), left(CUT.width))
        dk = warpgroup_mma(ds, query, dk, is_async=True)
        ahead = _begin_scores(key, q_s, full, n + 1, CUT)
        if CUT.kernel == "stored":
            tma.store_wait(0)  # the previous tile has left the shared memory
            put[1].store(ds)
            fence_async_shared()
            copy_out(put[0], [put[2] * 64, 0], put[1])
        dk, dv, ahead, narrow, ds = warpgroup_mma_wait(0, deps=[dk, dv, ahead, narrow, ds])
        release(empty, n, CUT)
        return dk, dv, ahead

    @gluon.jit
    def _use_dkdv(user: gl.constexpr, given, CUT: gl.constexpr):
        dk_out, dv_out, k_s, v_s, once, ring, T, S, G, scale2, scale = given
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
        nowhere = (0, 0, 0, 0)
        for _ in range(0, CUT.group):
            for _ in range(_first_row(start, T, S, CUT), first, CUT.tile):  # rows that see none of this user's keys
                s = warpgroup_mma_wait(0, deps=[_begin_scores(key, q_s, full, n + 1, CUT)])
                release(empty, n, CUT)
                n += 1
            for row in range(first, whole, CUT.tile):
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows + row, cols, scale2, nowhere, True, CUT)
                n += 1
            for _ in range(whole, _end_row(T, CUT), CUT.tile):
                dk, dv, s = _queries(dk, dv, s, key, value, ring, n, rows, cols, scale2, nowhere, False, CUT)
                n += 1
        key_place.store((dk * scale).to(key.dtype))
        value_place.store(dv.to(key.dtype))
        fence_async_shared()
        copy_out(dk_out, [head // G, head % G, mine, 0], as_box(key_place, dk_out))
        copy_out(dv_out, [head // G, head % G, mine, 0], as_box(value_place, dv_out))
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=LENGTHS)
    def hopper_dkdv_kernel(q, k, v, do, dk, dv, stats, n_rows, T, S, G, padded, scale2, scale, CUT: gl.constexpr):
        """Like ``fast_dkdv_kernel``, with stats as one row."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        lse_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        sums_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        k_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        v_s = gl.allocate_shared_memory(q.dtype, [CUT.users, 64, CUT.width], tile_layout(64, CUT))
        once, full, empty = _barriers(CUT)
        ring = (q_s, do_s, lse_s, sums_s, full, empty)
        _part(
            (dk, dv, k_s, v_s, once, ring, T, S, G, scale2, scale),
            (q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S, G, padded),
            CUT,
        )


# ---- host ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _layout(rows: int, width: int) -> Any:
    """The layout in shared memory of a tile that tensor cores read."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.bfloat16)


def box(index: int, rows: int, width: int) -> Box:
    """A descriptor that copies ``rows`` rows of a head at once."""
    return Box(index, (1, 1, rows, width), _layout(rows, width))


def complete(cut: Roles, kernel: str, sizes: Sizes) -> Roles:
    """Fill in those fields of the cut that its caller does not choose.

    Raises:
        ValueError: the kernel cannot be cut like this.
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
    cut = replace(cut, width=sizes.width, values=sizes.value_width if kernel == "forward" else sizes.width)
    return replace(cut, kernel=kernel, group=sizes.group, causal=sizes.causal, ragged=sizes.ragged)


def hopper_forward(sizes: Sizes, cut: Roles) -> Launch:
    """The launch for (q, k, v, o, lse)."""
    cut = complete(cut, "forward", sizes)
    args = (
        box(0, 64, cut.width), box(1, cut.tile, cut.width), box(2, cut.tile, cut.values), box(3, 64, cut.values),
        Address(4),
        sizes.t, sizes.s, sizes.n_heads, sizes.scale * math.log2(math.e), cut,
    )  # fmt: skip
    return Launch(
        hopper_forward_kernel,
        grid_by_rows(sizes, triton.cdiv(sizes.t, 64 * cut.users), cut.heads_first),
        args,
        num_warps=4,
    )


def hopper_dq(sizes: Sizes, cut: Roles) -> Launch:
    """The launch for (q, k, v, o, do, dq, lse, stats)."""
    cut = complete(cut, "dQ", sizes)
    args = (
        box(0, 64, cut.width), box(1, cut.tile, cut.width), box(2, cut.tile, cut.width),
        *(box(i, 64, cut.width) for i in (3, 4, 5)), Address(6), Address(7), sizes.n_rows,
        sizes.t, sizes.s, sizes.n_heads, sizes.padded, sizes.scale * math.log2(math.e), sizes.scale, cut,
    )  # fmt: skip
    return Launch(
        hopper_dq_kernel,
        grid_by_rows(sizes, triton.cdiv(sizes.padded, 64 * cut.users), cut.heads_first),
        args,
        num_warps=4,
    )


def hopper_dkdv(sizes: Sizes, cut: Roles) -> Launch:
    """The launch for (q, k, v, do, dk, dv, stats)."""
    cut = complete(cut, "dK/dV", sizes)
    n_groups = sizes.n_heads // sizes.group
    args = (
        box(0, cut.tile, cut.width), box(1, 64, cut.width), box(2, 64, cut.width), box(3, cut.tile, cut.width),
        box(4, 64, cut.width), box(5, 64, cut.width), Box(6, (cut.tile,), FLAT, (2 * sizes.n_rows,)), sizes.n_rows,
        sizes.t, sizes.s, n_groups, sizes.padded, sizes.scale * math.log2(math.e), sizes.scale, cut,
    )  # fmt: skip
    grid = (triton.cdiv(sizes.s, 64 * cut.users), sizes.n_batches * n_groups)
    return Launch(hopper_dkdv_kernel, grid, args, num_warps=4)
