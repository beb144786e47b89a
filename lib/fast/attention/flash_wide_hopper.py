"""dV and dS of wide heads with roles for a Hopper GPU's warps: the first kernel of `lib.fast.attention.flash_wide`.

Read ``lib.fast.attention.flash_hopper`` first. A program has 128 keys of a head, 64 for each user; tiles of queries and
of gradients pass by. A user's accumulator of dV takes half of its registers, so it has none for dK, and copies dS out.
"""

import math
from dataclasses import replace

from lib.fast.attention.flash_hopper import Roles, box, complete
from lib.fast.gluon import GLUON
from lib.fast.launch import LENGTHS, Box, Launch, Sizes, grid_by_rows
from lib.given.kernels.tiles import triton

if GLUON:
    from lib.fast.attention.flash_hopper import (
        _barriers,
        _begin,
        _begin_scores,
        _end_row,
        _first_row,
        left,
        tile_layout,
        value_layout,
    )
    from lib.fast.gluon import (
        FLAT,
        acc,
        as_box,
        copy_in,
        copy_out,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        release,
        tma,
        wait_empty,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    @gluon.jit
    def _place_of_keys():
        """Head of keys, counted through all batches, and first key; the first keys, which most see, come first."""
        return gl.program_id(2) * gl.num_programs(0) + gl.program_id(0), gl.program_id(1) * 128

    @gluon.jit
    def _first_stored(start, T, S, CUT: gl.constexpr):
        """The first of the rows for which these 128 keys have a place in dS."""
        if CUT.causal:
            return gl.maximum(start + T - S, 0) // 128 * 128
        else:  # noqa: RET505
            return 0

    @gluon.jit
    def _copy_scores(ds, ds_s, tile, at):
        tma.store_wait(0)  # the previous tile has left the shared memory
        ds_s.store(tile)
        fence_async_shared()
        copy_out(ds, at, as_box(ds_s, ds))

    @gluon.jit
    def _load_wide(given, CUT: gl.constexpr):
        q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S, G, padded = given
        q_s, do_s, lse_s, sums_s, full, empty = ring
        head, start = _place_of_keys()
        b, g = head // G, head % G
        mbarrier.expect(once, 2 * 2 * 64 * (CUT.width + CUT.values))
        for user in gl.static_range(2):
            copy_in(k, [b, g // CUT.apart, start + 64 * user, 0], once, as_box(k_s.index(user), k))
            copy_in(v, [b, g // CUT.apart, start + 64 * user, 0], once, as_box(v_s.index(user), v))
        first = _first_stored(start, T, S, CUT)
        each = (_end_row(T, CUT) - first) // CUT.tile
        for n in range(0, CUT.group * each + 1):
            shared = gl.minimum(n // each, CUT.group - 1)
            row = first + n % each * CUT.tile
            at = (head * CUT.group + shared) * padded + row
            h = g * CUT.group + shared
            place = n % CUT.stages
            wait_empty(empty, n, CUT)
            mbarrier.expect(full.index(place), 2 * CUT.tile * (CUT.width + CUT.values + 4))
            copy_in(q, [b, h, row, 0], full.index(place), as_box(q_s.index(place), q))
            copy_in(stats, [at], full.index(place), lse_s.index(place))
            copy_in(do, [b, h, row, 0], full.index(place), as_box(do_s.index(place), do))
            copy_in(stats, [n_rows + at], full.index(place), sums_s.index(place))

    @gluon.jit
    def _rows_of_wide(dv, s, key, value, ring, n, rows, cols, scale2, put, MASK: gl.constexpr, CUT: gl.constexpr):
        """One tile of dV, and of dS, which is copied out. ``s`` holds its scores; those of the next tile are returned
        too. ``put`` has the descriptor of dS, the shared memory on the way, and where the tile goes.
        """
        q_s, do_s, lse_s, sums_s, full, empty = ring
        place = n % CUT.stages
        grad = do_s.index(place)
        dp = _begin(value, grad)
        lse2 = lse_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        sums = sums_s.index(place).load(gl.SliceLayout(0, acc(CUT.tile)))
        weights = gl.exp2(s * scale2 - lse2[None, :])
        if MASK:
            weights = gl.where(rows[None, :] >= cols[:, None], weights, 0.0)
        narrow = gl.convert_layout(weights.to(key.dtype), left(CUT.values))
        dv = warpgroup_mma(narrow, grad, dv, is_async=True)
        ahead = _begin_scores(key, q_s, full, n + 1, CUT)
        dp = warpgroup_mma_wait(2, deps=[dp])
        _copy_scores(put[0], put[1], (weights * (dp - sums[None, :])).to(key.dtype), put[2])
        dv, ahead, narrow = warpgroup_mma_wait(0, deps=[dv, ahead, narrow])
        release(empty, n, CUT)
        return dv, ahead

    @gluon.jit
    def _use_wide(user: gl.constexpr, given, CUT: gl.constexpr):
        dv_out, ds, k_s, v_s, spare_s, once, ring, T, S, G, scale2 = given
        q_s, full, empty = ring[0], ring[4], ring[5]
        head, start = _place_of_keys()
        b, g = head // G, head % G
        mine = start + 64 * user
        key, value, ds_s = k_s.index(user), v_s.index(user), spare_s.index(user)
        cols = mine + gl.arange(0, 64, gl.SliceLayout(1, acc(CUT.tile)))
        rows = S - T + gl.arange(0, CUT.tile, gl.SliceLayout(0, acc(CUT.tile)))
        dv = gl.full([64, CUT.values], 0.0, gl.float32, acc(CUT.values))
        first = _first_row(mine, T, S, CUT)
        whole = _first_row(mine + 64 + CUT.tile - 1, T, S, CUT)
        n = 0
        mbarrier.wait(once, 0)
        s = warpgroup_mma_wait(0, deps=[_begin_scores(key, q_s, full, 0, CUT)])
        for shared in range(0, CUT.group):
            h = g * CUT.group + shared
            for row in range(_first_stored(start, T, S, CUT), first, CUT.tile):  # rows that see none of these keys
                s = warpgroup_mma_wait(0, deps=[_begin_scores(key, q_s, full, n + 1, CUT)])
                _copy_scores(ds, ds_s, gl.full([64, CUT.tile], 0.0, key.dtype, acc(CUT.tile)), [b, h, mine, row])
                release(empty, n, CUT)
                n += 1
            for row in range(first, whole, CUT.tile):
                put = (ds, ds_s, [b, h, mine, row])
                dv, s = _rows_of_wide(dv, s, key, value, ring, n, rows + row, cols, scale2, put, True, CUT)
                n += 1
            for row in range(whole, _end_row(T, CUT), CUT.tile):
                put = (ds, ds_s, [b, h, mine, row])
                dv, s = _rows_of_wide(dv, s, key, value, ring, n, rows, cols, scale2, put, False, CUT)
                n += 1
        value.store(dv.to(value.dtype))
        fence_async_shared()
        copy_out(dv_out, [b, g, mine, 0], as_box(value, dv_out))
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=(*LENGTHS, "padded"))
    def hopper_wide_kernel(q, k, v, do, dv, ds, stats, n_rows, T, S, G, padded, scale2, CUT: gl.constexpr):
        """Like ``wide_dv_kernel``, with stats as one row."""
        q_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.width], tile_layout(CUT.tile, CUT))
        do_s = gl.allocate_shared_memory(q.dtype, [CUT.stages, CUT.tile, CUT.values], value_layout(CUT.tile, CUT))
        lse_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        sums_s = gl.allocate_shared_memory(gl.float32, [CUT.stages, CUT.tile], stats.layout)
        k_s = gl.allocate_shared_memory(q.dtype, [2, 64, CUT.width], tile_layout(64, CUT))
        v_s = gl.allocate_shared_memory(q.dtype, [2, 64, CUT.values], value_layout(64, CUT))
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CUT.tile], gl.bfloat16)
        spare_s = gl.allocate_shared_memory(q.dtype, [2, 64, CUT.tile], narrow)
        once, full, empty = _barriers(CUT)
        ring = (q_s, do_s, lse_s, sums_s, full, empty)
        used = (dv, ds, k_s, v_s, spare_s, once, ring, T, S, G, scale2)
        loaded = (q, k, v, do, stats, n_rows, k_s, v_s, once, ring, T, S, G, padded)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use_wide, (first, used, CUT)), (_use_wide, (second, used, CUT)), (_load_wide, (loaded, CUT))],
            [4, 1],
            [240, 24],
        )


def hopper_wide(sizes: Sizes, cut: Roles, apart: int = 1) -> Launch:
    """The launch for (q, k, v, do, dv, ds, stats); of a head of keys, dv has ``apart`` parts."""
    cut = replace(complete(cut, "dK/dV", sizes), values=sizes.value_width, group=sizes.group // apart, apart=apart)
    n_groups = sizes.n_heads // cut.group
    args = (
        box(0, cut.tile, cut.width), box(1, 64, cut.width), box(2, 64, cut.values), box(3, cut.tile, cut.values),
        box(4, 64, cut.values), box(5, 64, cut.tile), Box(6, (cut.tile,), FLAT, (2 * sizes.n_rows,)), sizes.n_rows,
        sizes.t, sizes.s, n_groups, sizes.padded, sizes.scale * math.log2(math.e), cut,
    )  # fmt: skip
    grid = grid_by_rows(sizes._replace(n_heads=n_groups), triton.cdiv(sizes.s, 128), True)
    return Launch(hopper_wide_kernel, grid, args, num_warps=4)
