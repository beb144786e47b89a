"""The product of a single row with a weight, wide or narrow: what a decoding step of one sequence mostly consists of.

The norm before the product, the gate behind it and the residual stream's sum are part of its kernel.
A program reads its first weights into registers before the kernel ahead has ended.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.parts import one_row_hopper
from lib.fast.parts.early import launch_early, wait_for_the_kernel_ahead
from lib.fast.parts.narrow import LONG_ROW, Narrow, is_large
from lib.given.kernels.mode import tl, triton

TILES = {
    "wide": ((4, 2048, 8), (2, 2048, 4), (4, 2048, 4), (8, 512, 4)),
    "float8": ((4, 2048, 4), (4, 512, 2), (4, 2048, 4), (8, 1024, 4)),
    "int4": ((8, 64, 8), (16, 16, 4), (4, 16, 2), (16, 32, 8)),
}
"""Of a product of one row with long rows of the weight, of a gated one, of any other, and of one with a large weight:
the columns of a program, the terms (for int4 the groups) that it reads at a time, and its warps. As measured on an
H200."""


@triton.jit
def gate_and_add(first, second, at, inside, GATED: tl.constexpr, ADD: tl.constexpr):
    """What follows a product, before it is stored at ``at``: with GATED silu of the first times the second, with ADD
    the sum with what is there. Each result is rounded to the dtype of ``at``, as kernels of their own would round it.
    """
    dtype = at.dtype.element_ty
    total = first
    if GATED:
        gate = first.to(dtype).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = gate * second.to(dtype).to(tl.float32)
    if ADD:
        total = total.to(dtype).to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def sum_of_eight(x):
    """x [n, m] with the sum of each eight numbers of a row, which one thread has, in their place."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 2)


@triton.jit
def one_row_kernel(
    x, weight, scales, gain, out, n_columns, n_terms, eps,
    SCALED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
    COLS: tl.constexpr, TERMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n_columns] is the product of weight [n_columns, n_terms] and x [n_terms]; a program computes COLS numbers
    of it.

    With SCALED, each row of the weight is multiplied by its scale in scales.
    With NORM, x is first divided by its root mean square and multiplied by gain.
    With GATED the weight has twice as many rows, and out is silu of the first half's product times the second half's.
    With ADD the product is added to out. EVEN: TERMS divides n_terms.
    Bytes moved: the weight once. FLOPs: two for each number of the weight.
    """
    columns, terms = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, TERMS)
    is_column = columns < n_columns
    at = weight + columns.to(tl.int64)[:, None] * n_terms + terms[None, :]
    behind = n_columns.to(tl.int64) * n_terms
    inside = is_column[:, None] & (EVEN | (terms < n_terms))[None, :]
    here = tl.load(at, mask=inside, other=0.0)
    here2 = here
    if GATED:
        here2 = tl.load(at + behind, mask=inside, other=0.0)
    wait_for_the_kernel_ahead(EARLY)
    first, second = tl.zeros([COLS, TERMS // 8], tl.float32), tl.zeros([COLS, TERMS // 8], tl.float32)
    squares = tl.zeros([TERMS], tl.float32)
    dtype = out.dtype.element_ty
    for start in range(0, n_terms, TERMS):  # the weights of a step are read during the one before
        ahead = start + TERMS
        is_term, inside = EVEN | (start + terms < n_terms), is_column[:, None] & (ahead + terms < n_terms)[None, :]
        next_one = tl.load(at + ahead, mask=inside, other=0.0)
        row = tl.load(x + start + terms, mask=is_term, other=0.0).to(tl.float32)
        if NORM:
            squares += row * row
            row = (row * tl.load(gain + start + terms, mask=is_term, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        first += sum_of_eight(here.to(tl.float32) * row[None, :])
        here = next_one
        if GATED:
            next_one = tl.load(at + behind + ahead, mask=inside, other=0.0)
            second += sum_of_eight(here2.to(tl.float32) * row[None, :])
            here2 = next_one
    scale = tl.rsqrt(tl.sum(squares, 0) / n_terms + eps) if NORM else 1.0
    one, two = tl.sum(first, 1) * scale, tl.sum(second, 1) * scale
    if SCALED:
        one *= tl.load(scales + columns, mask=is_column, other=0.0)
        if GATED:
            two *= tl.load(scales + n_columns + columns, mask=is_column, other=0.0)
    tl.store(out + columns, gate_and_add(one, two, out + columns, is_column, GATED, ADD), mask=is_column)


@triton.jit
def groups_ahead(words, scales, zeros, columns, inside, group, at, n_groups, GROUP: tl.constexpr):
    """The levels of some groups of some rows, eight in a word, and their scales and origins."""
    column = columns.to(tl.int64)[None, :] * n_groups
    levels = tl.load(words + (column * (GROUP // 8))[:, :, None] + at[:, None, :], mask=inside[:, :, None], other=0)
    where = column + group[:, None]
    return (
        levels,
        tl.load(scales + where, mask=inside, other=0.0),
        tl.load(zeros + where, mask=inside, other=0).to(tl.float32),
    )


@triton.jit
def four_of(x, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """x [GROUPS, 4 WORDS] as four [GROUPS, WORDS]: every fourth number, from the first, the second, ... on."""
    even, odd = tl.split(tl.reshape(x, [GROUPS, WORDS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def eight_levels(words, PACKED: tl.constexpr):
    """The levels q of each word, as part of a float32, which is faster than a conversion: 1 + q / 256 of the low four
    bits of each byte, 1 + q / 16 of the high ones.
    """
    if PACKED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, u, v;
            shl.b32 s, $8, 15;
            shl.b32 t, $8, 7;
            shr.u32 u, $8, 1;
            shr.u32 v, $8, 9;
            lop3.b32 $0, s, 0x78000, 0x3f800000, 0xea;
            lop3.b32 $1, t, 0x78000, 0x3f800000, 0xea;
            lop3.b32 $2, u, 0x78000, 0x3f800000, 0xea;
            lop3.b32 $3, v, 0x78000, 0x3f800000, 0xea;
            lop3.b32 $4, s, 0x780000, 0x3f800000, 0xea;
            lop3.b32 $5, t, 0x780000, 0x3f800000, 0xea;
            lop3.b32 $6, u, 0x780000, 0x3f800000, 0xea;
            lop3.b32 $7, v, 0x780000, 0x3f800000, 0xea;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r", [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        s, t, u, v = words << 15, words << 7, words >> 1, words >> 9
        a, b, c, d = (
            s & 0x78000 | 0x3F800000,
            t & 0x78000 | 0x3F800000,
            u & 0x78000 | 0x3F800000,
            v & 0x78000 | 0x3F800000,
        )
        e, f, g, h = (
            s & 0x780000 | 0x3F800000,
            t & 0x780000 | 0x3F800000,
            u & 0x780000 | 0x3F800000,
            v & 0x780000 | 0x3F800000,
        )
    return (
        a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True), c.to(tl.float32, bitcast=True),
        d.to(tl.float32, bitcast=True), e.to(tl.float32, bitcast=True), f.to(tl.float32, bitcast=True),
        g.to(tl.float32, bitcast=True), h.to(tl.float32, bitcast=True),
    )  # fmt: skip


@triton.jit
def products_of_groups(
    words, scale, origin, low, high, sums, offset, GROUPS: tl.constexpr, WORDS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """The products of some groups of some rows of levels with those of a row of numbers, added up over the groups.

    The numbers in ``low`` are 16 times those of the row. A group's sum of what `eight_levels` gives times these is
    computed first, and what it has too much is taken off.
    """
    i, j, k, m = four_of(low, GROUPS, WORDS)
    a, b, c, d, e, f, g, h = eight_levels(words, PACKED)
    found = a * i[:, None, :]
    found += b * j[:, None, :]
    found += c * k[:, None, :]
    found += d * m[:, None, :]
    i, j, k, m = four_of(high, GROUPS, WORDS)
    found += e * i[:, None, :]
    found += f * j[:, None, :]
    found += g * k[:, None, :]
    found += h * m[:, None, :]
    return tl.sum(scale * (16.0 * (tl.sum(found, 2) - offset[:, None]) - origin * sums[:, None]), 0)


@triton.jit
def one_int4_row_kernel(
    x, words, scales, zeros, gain, out, n_columns, n_groups, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    COLS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `one_row_kernel`, for a weight of levels; GROUP numbers share a scale and a zero point.

    Bytes moved: the levels and their scales once. FLOPs: two for each level.
    """
    columns, half = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, GROUP // 2)
    is_column, behind, group = columns < n_columns, n_columns + columns, tl.arange(0, GROUPS)
    size: tl.constexpr = GROUP // 8
    dtype = out.dtype.element_ty
    first, second = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    inside = is_column[None, :] & (group < n_groups)[:, None]
    at = group[:, None] * size + tl.arange(0, size)[None, :]
    here, scale, origin = groups_ahead(words, scales, zeros, columns, inside, group, at, n_groups, GROUP)
    if GATED:
        here2, scale2, origin2 = groups_ahead(words, scales, zeros, behind, inside, group, at, n_groups, GROUP)
    wait_for_the_kernel_ahead(EARLY)
    for step in tl.static_range(STEPS):
        known, place = (group < n_groups)[:, None], group[:, None] * GROUP + half[None, :]
        low = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        high = tl.load(x + place + GROUP // 2, mask=known, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(low * low + high * high, 1)
            low *= tl.load(gain + place, mask=known, other=0.0).to(tl.float32)
            high *= tl.load(gain + place + GROUP // 2, mask=known, other=0.0).to(tl.float32)
            low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        sums, low = tl.sum(low + high, 1), low * 16.0
        offset = tl.sum(low + high, 1)
        first += products_of_groups(here, scale, origin, low, high, sums, offset, GROUPS, size, EARLY)
        if GATED:
            second += products_of_groups(here2, scale2, origin2, low, high, sums, offset, GROUPS, size, EARLY)
        if step + 1 < STEPS:
            group += GROUPS
            at += GROUPS * size
            inside = is_column[None, :] & (group < n_groups)[:, None]
            here, scale, origin = groups_ahead(words, scales, zeros, columns, inside, group, at, n_groups, GROUP)
            if GATED:
                here2, scale2, origin2 = groups_ahead(words, scales, zeros, behind, inside, group, at, n_groups, GROUP)
    factor = tl.rsqrt(tl.sum(squares, 0) / (n_groups * GROUP) + eps) if NORM else 1.0
    found = gate_and_add(first * factor, second * factor, out + columns, is_column, GATED, ADD)
    tl.store(out + columns, found, mask=is_column)


def one_int4_row(
    x: Float[Tensor, "1 k"], weight: Narrow, gain: Tensor | None, eps: float, gated: bool, into: Tensor | None,
    tile: tuple[int, int, int],
) -> Float[Tensor, "1 n"]:  # fmt: skip
    """As `one_row`; the tile is of columns and groups, and has so many warps."""
    assert weight.zeros is not None
    n_groups, words = weight.scales.shape[1], weight.numbers.view(torch.int32)
    n_columns, (columns, groups, warps) = weight.n_columns // 2 if gated else weight.n_columns, tile
    out = x.new_empty(1, n_columns) if into is None else into
    if one_row_hopper.fits(x, weight):
        one_row_hopper.one_row_of_levels(x, weight, gain, eps, gated, out, add=into is not None)
        return out
    one_int4_row_kernel[(triton.cdiv(n_columns, columns),)](
        x, words, weight.scales, weight.zeros, gain, out, n_columns, n_groups, eps,
        NORM=gain is not None, GATED=gated, ADD=into is not None, COLS=columns, GROUPS=groups, GROUP=weight.group,
        STEPS=triton.cdiv(n_groups, groups), num_warps=warps, **launch_early(x.device),
    )  # fmt: skip
    return out


def one_row(
    x: Float[Tensor, "1 c"], weight: Float[Tensor, "f c"] | Narrow, gain: Tensor | None = None, eps: float = 0.0,
    gated: bool = False, into: Tensor | None = None,
) -> Float[Tensor, "1 f"]:  # fmt: skip
    """The product of one row with a weight ``[F, C]``; all tensors but a narrow weight are contiguous and of one
    dtype.

    Args:
        x: ``[1, C]``.
        weight: ``[F, C]``, or ``[2 F, C]`` if the product is gated; perhaps narrow.
        gain: ``[C]``; if given, the row is normalised (RMSNorm with ``eps``) and multiplied by it.
        eps: Of the norm.
        gated: Return ``silu(first half) * second half`` of the product.
        into: ``[1, F]``; if given, the product is added to it, in place.
    """
    way = 1 if gated else 3 if is_large(weight) else 0 if x.shape[1] >= LONG_ROW else 2
    if isinstance(weight, Narrow) and weight.zeros is not None:
        return one_int4_row(x, weight, gain, eps, gated, into, TILES["int4"][way])
    wide, scales, _ = weight if isinstance(weight, Narrow) else (weight, None, None)
    n_columns, n_terms = len(wide) // 2 if gated else len(wide), x.shape[1]
    out = x.new_empty(1, n_columns) if into is None else into
    columns, terms, warps = TILES["wide" if scales is None else "float8"][way]
    one_row_kernel[(triton.cdiv(n_columns, columns),)](
        x, wide, scales, gain, out, n_columns, n_terms, eps, SCALED=scales is not None, NORM=gain is not None,
        GATED=gated, ADD=into is not None, EVEN=n_terms % terms == 0, COLS=columns, TERMS=terms, num_warps=warps,
        num_stages=1, **launch_early(x.device),
    )  # fmt: skip
    return out
