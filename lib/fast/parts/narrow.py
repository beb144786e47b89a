"""Weights of 4 and of 8 bits, and the products of a serving step's rows with these and with wide weights.

A decoding step reads every weight for a few rows, so its time is that of the bytes. These kernels read the narrow
numbers and make them wide in registers: no wide weight is written to memory.
Products of many rows are bound by arithmetic. For them a wide copy of one weight at a time is made.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.fast.parts.early import ask_for_rows, launch_early, wait_for_the_kernel_ahead
from lib.given.kernels.int4 import dequantize_int4
from lib.given.kernels.mode import tl, triton

SOME_ROWS = 16  # up to which a product's parts are small beside its weight
MANY_ROWS = 64  # above it a wide copy of the weight costs less than its arithmetic
COLUMNS = 64  # of a product that a program computes: as many as a tile of the tensor cores has
TERMS = 128  # that it reads at a time; of levels it reads a group


class Tile(NamedTuple):
    """How the programs of a product of few rows share it.

    Attributes:
        stages: Groups of terms that are on their way at a time.
        ask: Bytes of each row of the weight that are asked for before x is there.
        programs: For each processor, at most, where the terms are cut into parts.
        parts: Of the terms, at most, which different programs sum.
        gates: Whether a program of a gated product computes both halves; if not, a kernel of its own gates.
    """

    stages: int
    ask: int
    programs: int
    parts: int
    gates: bool
    columns: int = COLUMNS
    warps: int = 4


TILES = {
    "wide": (Tile(3, 256, 3, 8, False), Tile(3, 256, 3, 4, True)),
    "float8": (Tile(3, 256, 6, 16, False), Tile(4, 512, 3, 4, True)),
    "int4": (Tile(3, 256, 6, 16, False), Tile(4, 512, 3, 8, True)),
}
"""For at most `SOME_ROWS` and for more. As measured on an H200."""


SPECIAL: dict = {}
MAXNREG: dict = {}
PACKED = True


class Narrow(NamedTuple):
    """A weight ``[N, K]`` in chapter 20's formats.

    Attributes:
        numbers: float8_e4m3fn ``[N, K]``, or uint8 ``[N, K / 2]`` with two levels in a byte: one of the first half of a
            group in the low four bits, and that at the same place of the second half in the high ones. So both halves
            are multiplied with numbers that lie side by side.
        scales: float32, ``[N, 1]`` for float8, ``[N, groups]`` for levels.
        zeros: uint8 ``[N, groups]``, the levels of the number 0; None for float8.
    """

    numbers: Tensor
    scales: Float[Tensor, "n g"]
    zeros: Tensor | None

    @property
    def n_columns(self) -> int:
        """N: numbers in a row of the product."""
        return len(self.numbers)

    @property
    def n_terms(self) -> int:
        """K: numbers in a row that is multiplied."""
        return self.numbers.shape[1] * (1 if self.zeros is None else 2)

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.n_terms // self.scales.shape[1]


class NarrowLinear(nn.Module):
    """A linear layer for inference with a narrow weight.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]``, or None.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Narrow, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in (weight._asdict() | {"bias": bias}).items():
            self.register_buffer(name, tensor)

    @property
    def weights(self) -> Narrow:
        """The weight, as the buffers hold it."""
        return Narrow(self.numbers, self.scales, self.zeros)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As a module's, but numbers and scales keep their dtypes: ``model.to(dtype)`` only moves them."""
        device = fn(self.scales.new_empty(0)).device
        for name in Narrow._fields:
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor.to(device))
        self.bias = None if self.bias is None else fn(self.bias)
        return self

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """The product with the weight that ``dense`` makes, in the dtype of x; on a GPU by the kernels."""
        rows = x.reshape(-1, x.shape[-1])
        y = product(rows, self.weights) if x.is_cuda else nn.functional.linear(rows, dense(self.weights, x.dtype))
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def dense(weight: Narrow, dtype: torch.dtype) -> Float[Tensor, "n k"]:
    """The wide weight."""
    if weight.zeros is None:
        return (weight.numbers.float() * weight.scales).to(dtype)
    halves = weight.numbers.unflatten(1, (-1, weight.group // 2))
    levels = torch.cat([halves & 15, halves >> 4], -1).flatten(1)
    return dequantize_int4(levels, weight.scales, weight.zeros).to(dtype)


def join(layers: Sequence[NarrowLinear]) -> Narrow:
    """One weight of several layers, whose buffers become parts of it: no weight is in memory twice."""
    wholes = list[Tensor | None]()
    for name in Narrow._fields:
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is None:
            wholes.append(None)
            continue
        whole = torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)  # it joins no float8
        for layer, part in zip(layers, whole.split([len(part) for part in parts]), strict=True):
            setattr(layer, name, part)
        wholes.append(whole)
    return Narrow(*wholes)  # type: ignore[arg-type]


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
        a, b, c, d = s & 0x78000 | 0x3F800000, t & 0x78000 | 0x3F800000, u & 0x78000 | 0x3F800000, v & 0x78000 | 0x3F800000
        e, f, g, h = s & 0x780000 | 0x3F800000, t & 0x780000 | 0x3F800000, u & 0x780000 | 0x3F800000, v & 0x780000 | 0x3F800000
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
    """As `lib.fast.parts.rows.one_row_kernel`, for a weight of levels; GROUP numbers share a scale and a zero point.

    Bytes moved: the levels and their scales once. FLOPs: two for each level.
    """
    columns, half = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, GROUP // 2)
    is_column, behind, group = columns < n_columns, n_columns + columns, tl.arange(0, GROUPS)
    size: tl.constexpr = GROUP // 8
    dtype = out.dtype.element_ty
    first, second = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    if EARLY:
        n_bytes = n_groups * (GROUP // 2)
        ask_for_rows(words, columns, n_columns, n_bytes, n_bytes, 16)
        if GATED:
            ask_for_rows(words + n_columns.to(tl.int64) * (n_bytes // 4), columns, n_columns, n_bytes, n_bytes, 16)
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
    """As `lib.fast.parts.rows.one_row`; the tile is of columns and groups, and has so many warps."""
    assert weight.zeros is not None
    n_columns, (columns, groups, warps) = weight.n_columns // 2 if gated else weight.n_columns, tile
    out = x.new_empty(1, n_columns) if into is None else into
    one_int4_row_kernel[(triton.cdiv(n_columns, columns),)](
        x, weight.numbers.view(torch.int32), weight.scales, weight.zeros, gain, out, n_columns, weight.scales.shape[1], eps,
        NORM=gain is not None, GATED=gated, ADD=into is not None, COLS=columns, GROUPS=groups, GROUP=weight.group,
        STEPS=triton.cdiv(weight.scales.shape[1], groups),        num_warps=warps, maxnreg=MAXNREG.get(gated), **launch_early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def levels_of(byte, origin, dtype: tl.constexpr, PACKED: tl.constexpr):
    """The two levels of each byte [n, k] minus their origin [n], in dtype.

    In 16 bits, the bits of a power of two and of a level make their sum, without a conversion: 128 + q in bfloat16,
    1024 + q in float16. Its difference from the origin's is exact.
    """
    if PACKED and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, o;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            prmt.b32 o, $5, 0, 0x4140;
            or.b32 o, o, 0x43004300;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            sub.rn.bf16x2 $0, a, o;
            sub.rn.bf16x2 $1, b, o;
            sub.rn.bf16x2 $2, c, o;
            sub.rn.bf16x2 $3, d, o;
            }""", "=r,=r,=r,=r,r,r", [byte, origin[:, None]], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        return low, high
    elif dtype.primitive_bitwidth == 16:
        power: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        wide, shift = byte.to(tl.int16), (origin.to(tl.int16) | power).to(dtype, bitcast=True)
        low, high = ((wide & 15) | power).to(dtype, bitcast=True), ((wide >> 4) | power).to(dtype, bitcast=True)
        return low - shift[:, None], high - shift[:, None]
    else:
        low, high, shift = (byte & 15).to(dtype), (byte >> 4).to(dtype), origin.to(dtype)
        return low - shift[:, None], high - shift[:, None]


@triton.jit
def few_rows_kernel(
    x, numbers, scales, zeros, out, n_rows, n_columns, n_terms,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ASK: tl.constexpr, PACKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [parts, n_rows, n_columns] is x [n_rows, n_terms] times a weight [n_columns, n_terms], by tensor cores.

    The weight is their first operand: it has enough rows to fill their tiles, and may be made wide in registers.
    The grid is (tiles of COLS columns, parts): a part sums its share of the terms.

    With LEVELS, TERMS is the size of a group, whose products are added up before they are multiplied by its scale.
    With SCALED, each column's sum is multiplied by its scale.
    With GATED the weight has twice as many rows, half a tile is of the first n_columns of them and half of the others,
    and out is silu of the first half's product times the second half's; there is one part.
    EVEN: TERMS divides n_terms. ASK: the bytes of each row that are asked for before x is there.
    Bytes moved: the weight once. FLOPs: two for each number of the weight and each row.
    """
    width: tl.constexpr = COLS // 2 if GATED else COLS
    place, rows = tl.arange(0, COLS), tl.arange(0, ROWS)
    columns = tl.program_id(0) * width + place % width
    column = (tl.minimum(columns, n_columns - 1) + place // width * n_columns).to(tl.int64)
    row = tl.minimum(rows, n_rows - 1)[None, :] * n_terms
    n_numbers = n_terms // 2 if LEVELS else n_terms  # of a row of the weight, and of a step
    n_read: tl.constexpr = TERMS // 2 if LEVELS else TERMS
    part, n_parts, n_steps = tl.program_id(1), tl.num_programs(1), tl.cdiv(n_terms, TERMS)
    begin, end = part * n_steps // n_parts, (part + 1) * n_steps // n_parts
    if EARLY:
        size: tl.constexpr = numbers.dtype.element_ty.primitive_bitwidth // 8
        n_bytes = tl.minimum(tl.minimum((end - begin) * n_read, n_numbers - begin * n_read) * size, ASK)
        last = n_columns * (2 if GATED else 1)
        ask_for_rows(numbers + begin * n_read, column, last, n_numbers * size, n_bytes, 8)
    wait_for_the_kernel_ahead(EARLY)
    total = tl.zeros([COLS, ROWS], tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if LEVELS:  # a step's scales are read during the one before
        scale, origin = tl.load(scales + column * n_steps + begin), tl.load(zeros + column * n_steps + begin)
    for step in range(begin, end):
        terms = step * n_read + tl.arange(0, n_read)
        weight_at = numbers + column[:, None] * n_numbers + terms[None, :]
        if LEVELS:
            at = x + row + (step * TERMS + tl.arange(0, n_read))[:, None]
            ahead = column * n_steps + tl.minimum(step + 1, end - 1)
            next_scale, next_origin = tl.load(scales + ahead), tl.load(zeros + ahead)
            low, high = levels_of(tl.load(weight_at), origin, x.dtype.element_ty, PACKED)
            found = tl.dot(low, tl.load(at), input_precision="ieee")
            found = tl.dot(high, tl.load(at + n_read), found, input_precision="ieee")
            total += found * scale[:, None]
            scale, origin = next_scale, next_origin
        else:
            is_term = EVEN | (terms < n_terms)
            weight = tl.load(weight_at, mask=is_term[None, :], other=0.0)
            part_of_x = tl.load(x + row + terms[:, None], mask=is_term[:, None], other=0.0)
            if SCALED:
                weight = weight.to(tl.float32)  # from which float8 is converted faster than to bfloat16
            total = tl.dot(weight.to(part_of_x.dtype), part_of_x, total, input_precision="ieee")
    if SCALED:
        total *= tl.load(scales + column)[:, None]
    if GATED:
        gate, other = tl.split(tl.permute(tl.reshape(total, [2, width, ROWS]), [1, 2, 0]))
        gate = gate.to(dtype).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * other.to(dtype).to(tl.float32)
        columns = tl.program_id(0) * width + tl.arange(0, width)
    to = out + (part.to(tl.int64) * n_rows + rows[None, :]) * n_columns + columns[:, None]
    tl.store(to, total.to(dtype), mask=(rows < n_rows)[None, :] & (columns < n_columns)[:, None])


def tile_of(x: Float[Tensor, "n k"], weight: Tensor | Narrow) -> Tile:
    """The tile of a product of few rows."""
    kind = "wide" if isinstance(weight, Tensor) else "float8" if weight.zeros is None else "int4"
    more = len(x) > SOME_ROWS
    return SPECIAL.get((kind, more, len(weight[0] if isinstance(weight, Narrow) else weight), x.shape[1]), TILES[kind][more])


def few_rows(
    x: Float[Tensor, "n k"], weight: Float[Tensor, "f k"] | Narrow, gated: bool = False
) -> Float[Tensor, "p n f"]:
    """The product of at most `MANY_ROWS` rows with a weight, wide or narrow, in P parts whose sum it is.

    One part has the dtype of x, more are float32. Gated, it is ``silu(first half) * second half``, in one part.
    """
    tile, terms = tile_of(x, weight), TERMS
    numbers, scales, zeros = weight if isinstance(weight, Narrow) else (weight, None, None)
    levels, scaled = zeros is not None, zeros is None and scales is not None
    if isinstance(weight, Narrow) and levels:
        terms = weight.group
    n, n_terms = len(numbers) // 2 if gated else len(numbers), x.shape[1]
    columns = tile.columns
    tiles = triton.cdiv(n, columns // 2 if gated else columns)
    parts = 1 if gated else n_parts(tiles, x.device, tile)
    out = x.new_empty(parts, len(x), n, dtype=torch.float32 if parts > 1 else x.dtype)
    few_rows_kernel[(tiles, parts)](
        x.contiguous(), numbers, scales, zeros, out, len(x), n, n_terms, LEVELS=levels, SCALED=scaled, GATED=gated,
        EVEN=n_terms % terms == 0, TERMS=terms, ROWS=max(8, triton.next_power_of_2(len(x))), COLS=columns,
        ASK=tile.ask, PACKED=PACKED and launch_early(x.device)["EARLY"], num_warps=tile.warps, num_stages=tile.stages, **launch_early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def widen_kernel(numbers, scales, zeros, out, n_terms, LEVELS: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr):
    """out [N, n_terms] is the wide weight; the grid is (N, pieces of COLS bytes of numbers)."""
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    if LEVELS:
        inside, group = places < n_terms // 2, places // (GROUP // 2)
        byte = tl.load(numbers + row * (n_terms // 2) + places, mask=inside, other=0)
        scale = tl.load(scales + row * (n_terms // GROUP) + group, mask=inside, other=0.0)
        origin = tl.load(zeros + row * (n_terms // GROUP) + group, mask=inside, other=0).to(tl.float32)
        to = out + row * n_terms + places + group * (GROUP // 2)
        tl.store(to, (((byte & 15).to(tl.float32) - origin) * scale).to(out.dtype.element_ty), mask=inside)
        high = ((byte >> 4).to(tl.float32) - origin) * scale
        tl.store(to + GROUP // 2, high.to(out.dtype.element_ty), mask=inside)
    else:
        wide = tl.load(numbers + row * n_terms + places, mask=places < n_terms, other=0.0).to(tl.float32)
        wide *= tl.load(scales + row)
        tl.store(out + row * n_terms + places, wide.to(out.dtype.element_ty), mask=places < n_terms)


def widen(weight: Narrow, dtype: torch.dtype) -> Float[Tensor, "n k"]:
    """As ``dense``, by a kernel."""
    out = torch.empty(weight.n_columns, weight.n_terms, dtype=dtype, device=weight.numbers.device)
    widen_kernel[(weight.n_columns, triton.cdiv(weight.numbers.shape[1], 1024))](
        *weight, out, weight.n_terms, LEVELS=weight.zeros is not None, GROUP=weight.group, COLS=1024
    )
    return out


def product(x: Float[Tensor, "m k"], weight: Narrow) -> Float[Tensor, "m n"]:
    """Rows times a narrow weight, by kernels; the terms are added up in float32."""
    if len(x) > MANY_ROWS:
        return nn.functional.linear(x, widen(weight, x.dtype))
    parts = few_rows(x, weight)
    return parts.sum(0).to(x.dtype) if len(parts) > 1 else parts[0]


@functools.cache
def n_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def n_parts(n_tiles: int, device: torch.device, tile: Tile) -> int:
    """Parts of the terms, a power of two: as many as give no processor more programs than the tile allows."""
    return min(tile.parts, 1 << max(0, (tile.programs * n_processors(device) // n_tiles).bit_length() - 1))
