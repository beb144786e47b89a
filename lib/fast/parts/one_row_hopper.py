"""The product of one row with a large weight of 4-bit levels, by the tensor cores of a Hopper GPU.

Read `lib.fast.parts.one_row` first. Its kernel takes 20 instructions to make eight levels float32 and to multiply
them. By their numbers, an H200 needs three quarters as long for these alone as for reading the levels. Here tensor
cores multiply. Eight instructions turn the bits of eight levels into those of 128 + level in bfloat16. What the 128 and
the level of zero add to a group's product is taken off again, by the sum of the group's numbers in x.

A tensor core multiplies with at least eight columns, and there is one row of x. So each row of the first factor is one
group of a row of the weight, the columns of the second are eight groups of x, and of eight products one is kept: that
of a group with its own part of x.

A program computes several tiles of columns, one after the other. Their levels are copied to a ring of places in shared
memory, some steps before they are used.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.gluon import GLUON, has_roles
from lib.fast.parts.narrow import Narrow, is_large, n_processors
from lib.given.kernels.mode import triton

GROUP, TOGETHER = 128, 8  # numbers that share a scale; groups of x that are multiplied in a step
WARPS, PLACES = 4, 4  # of a program; of its ring
COLUMNS = 2 * WARPS  # that a program computes at a time: a warp's tile has 16 rows, eight groups of each of two columns
PROGRAMS, REGISTERS = 4, 128  # for each processor; for each thread, so that so many programs fit

if GLUON:
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    from lib.fast.gluon import gl, gluon

    copy_into = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # 3.9 renamed it
    N_PAIRS, RING = gl.constexpr(COLUMNS * TOGETHER), gl.constexpr(PLACES)
    TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]))
    LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, TILE.value, 8)) for i in range(2))
    COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0]))  # 16 bytes of levels for a thread
    GROUPS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]))
    LEVELS_AT = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 4, order=[1, 0]))
    GROUPS_AT = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 4, order=[1, 0]))
    SUMS_AT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))

    @gluon.jit
    def _wait_for_the_kernel_ahead():
        """As `early.wait_for_the_kernel_ahead`, in Gluon."""
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _raised(byte):
        """128 + level for the two levels of each byte: those in the low four bits, and those in the high ones."""
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, d, 0x000f000f, 0x43004300, 0xea;
            }""",
            "=r,=r,=r,=r,r", [byte], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip

    @gluon.jit
    def _groups(i, pair, n_columns, n_groups, STEPS: gl.constexpr, GATED: gl.constexpr):
        """Which group of the weight belongs to each pair of a column and a group of x in a program's step i, and
        whether there is one. Gated, two neighbouring columns are one of either half of the weight.
        """
        tile, group = gl.program_id(0) + i // STEPS * gl.num_programs(0), i % STEPS * 8 + pair % 8
        column, half = tile * (N_PAIRS // 8) + pair // 8, 0
        if GATED:
            half, column = column % 2, column // 2
        return (column + half * n_columns) * n_groups + group, (column < n_columns) & (group < n_groups)

    @gluon.jit
    def _copy_levels(i, numbers, levels, n_columns, n_groups, STEPS: gl.constexpr, GATED: gl.constexpr):
        """Start to copy the levels of step i to its place."""
        pair, byte = gl.arange(0, N_PAIRS, gl.SliceLayout(1, COPIED)), gl.arange(0, 64, gl.SliceLayout(0, COPIED))
        group, inside = _groups(i, pair, n_columns, n_groups, STEPS, GATED)
        at = numbers + (group.to(gl.int64) * 64)[:, None] + byte[None, :]
        copy_into(levels.index(i % RING), at, mask=inside[:, None])
        async_copy.commit_group()

    @gluon.jit
    def _store_row(x, gain, x_s, sums_s, n_groups, NORM: gl.constexpr, STEPS: gl.constexpr):
        """Put x, multiplied by gain, and the sum of each of its groups into shared memory.

        Returns the sum of the squares of x.
        """
        group, term = gl.arange(0, 8, gl.SliceLayout(1, GROUPS)), gl.arange(0, 128, gl.SliceLayout(0, GROUPS))
        at = group[:, None] * 128 + term[None, :]
        squares = gl.full([8, 128], 0.0, gl.float32, GROUPS)
        for step in gl.static_range(STEPS):
            known = (step * 8 + group < n_groups)[:, None]
            part = gl.load(x + at + step * 1024, mask=known, other=0.0)
            if NORM:
                wide = part.to(gl.float32)
                squares += wide * wide
                part = wide * gl.load(gain + at + step * 1024, mask=known, other=0.0).to(gl.float32)
            x_s.index(step).store(part.to(gl.bfloat16))
            sums_s.index(step).store(gl.sum(part.to(gl.bfloat16).to(gl.float32), 1))
        return gl.sum(gl.sum(squares, 0), 0)

    @gluon.jit
    def _own(products, HALVES: gl.constexpr):
        """Of products [pairs, 8] the sums of those of a column's groups with the same groups of x, [columns, halves].

        A thread holds the rows r and r + 8 of its warp's 16, so it has both halves of a gated column.
        """
        own, group = gl.arange(0, N_PAIRS, gl.SliceLayout(1, TILE)) % 8, gl.arange(0, 8, gl.SliceLayout(0, TILE))
        kept = gl.sum(gl.where(own[:, None] == group[None, :], products, 0.0), 1)
        return gl.sum(gl.reshape(kept, [N_PAIRS // 8 // HALVES, HALVES, 8]), 2)

    @gluon.jit
    def one_row_of_levels_kernel(
        x, numbers, scales, zeros, gain, out, n_columns, n_groups, eps,
        NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, STEPS: gl.constexpr,
    ):  # fmt: skip
        """As `one_row.one_int4_row_kernel`, for bfloat16 and groups of 128; STEPS: eighths of n_groups, rounded up.

        Bytes moved: the levels and their scales once. FLOPs: sixteen for each level.
        """
        HALVES: gl.constexpr = 2 if GATED else 1
        dtype: gl.constexpr = out.dtype.element_ty
        n_tiles, n_programs = gl.cdiv(n_columns * HALVES, N_PAIRS // 8), gl.num_programs(0)
        levels = gl.allocate_shared_memory(gl.uint8, [RING, N_PAIRS, 64], LEVELS_AT)
        for i in gl.static_range(RING - 1):
            _copy_levels(i, numbers, levels, n_columns, n_groups, STEPS, GATED)
        pair = gl.arange(0, N_PAIRS, gl.SliceLayout(1, TILE))
        group, inside = _groups(0, pair, n_columns, n_groups, STEPS, GATED)
        scale, origin = gl.load(scales + group, mask=inside, other=0.0), gl.load(zeros + group, mask=inside, other=0)
        x_s = gl.allocate_shared_memory(gl.bfloat16, [STEPS, 8, 128], GROUPS_AT)
        sums_s = gl.allocate_shared_memory(gl.float32, [STEPS, 8], SUMS_AT)
        _wait_for_the_kernel_ahead()
        squares = _store_row(x, gain, x_s, sums_s, n_groups, NORM, STEPS)
        factor = gl.rsqrt(squares / (n_groups * 128) + eps) if NORM else 1.0
        zero = gl.full([N_PAIRS, 8], 0.0, gl.float32, TILE)
        i = 0
        for tile in range(gl.program_id(0), n_tiles, n_programs):
            total = zero
            for step in gl.static_range(STEPS):  # a step's scales are read during the one before
                group, inside = _groups(i + 1, pair, n_columns, n_groups, STEPS, GATED)
                next_scale = gl.load(scales + group, mask=inside, other=0.0)
                next_origin = gl.load(zeros + group, mask=inside, other=0)
                async_copy.wait_group(RING - 2)
                low = x_s.index(step).slice(0, 64, dim=1).permute([1, 0]).load(RIGHT)
                high = x_s.index(step).slice(64, 64, dim=1).permute([1, 0]).load(RIGHT)
                low_levels, high_levels = _raised(levels.index(i % RING).load(LEFT))
                _copy_levels(i + RING - 1, numbers, levels, n_columns, n_groups, STEPS, GATED)
                found = mma_v2(high_levels, high, zero) + mma_v2(low_levels, low, zero)
                sums = sums_s.index(step).load(gl.SliceLayout(0, TILE))
                total += scale[:, None] * (found - (128.0 + origin.to(gl.float32))[:, None] * sums[None, :])
                scale, origin, i = next_scale, next_origin, i + 1
            result = _own(total, HALVES) * factor
            if GATED:
                gate, other = gl.split(result)
                gate = gate.to(dtype).to(gl.float32)
                result = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * other.to(dtype).to(gl.float32)
            else:
                result = gl.sum(result, 1)
            columns = tile * (N_PAIRS // 8 // HALVES) + gl.arange(0, N_PAIRS // 8 // HALVES, result.type.layout)
            if ADD:
                known = gl.load(out + columns, mask=columns < n_columns, other=0.0)
                result = result.to(dtype).to(gl.float32) + known.to(gl.float32)
            gl.store(out + columns, result.to(dtype), mask=columns < n_columns)


def fits(x: Tensor, weight: Narrow) -> bool:
    """Whether the kernel takes a row and a weight of levels: on a Hopper GPU, bfloat16, large, in groups of 128."""
    return has_roles(x) and x.dtype == torch.bfloat16 and weight.group == GROUP and is_large(weight)


def one_row_of_levels(
    x: Float[Tensor, "1 k"], weight: Narrow, gain: Tensor | None, eps: float, gated: bool, out: Tensor, add: bool
) -> None:
    """Write the product of one row with a weight of levels to out; with add, add it."""
    n_columns, n_groups = out.shape[1], weight.scales.shape[1]
    tiles = triton.cdiv(weight.n_columns, COLUMNS)
    one_row_of_levels_kernel[(min(PROGRAMS * n_processors(x.device), tiles),)](
        x, *weight, gain, out, n_columns, n_groups, eps, NORM=gain is not None, GATED=gated, ADD=add,
        STEPS=triton.cdiv(n_groups, TOGETHER), num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
