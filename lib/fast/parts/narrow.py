"""Weights of 4 and of 8 bits, and their products with the rows of a serving step.

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

MANY_ROWS = 64  # above it a wide copy of the weight costs less than its arithmetic
TERMS = 128  # of a float8 product that a program reads at a time
COLUMNS = 32  # of a product of few rows that a program computes


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
def products_of_groups(
    packed, scales, zeros, columns, inside, group, at, low, high, sums, n_groups, GROUP: tl.constexpr
):  # fmt: skip
    """The products of some groups of some rows of levels with those of a row of numbers, added up over the groups.

    A level q becomes 1 + q / 16 by setting four bits of a float32, which is faster than a conversion.
    A group's sum of (1 + q / 16) x is computed first, and what it has too much is taken off.
    """
    column = columns.to(tl.int64) * n_groups
    bytes_at = packed + (column * (GROUP // 2))[:, None, None] + at[None, :, :]
    byte = tl.load(bytes_at, mask=inside[:, :, None], other=0).to(tl.int32)
    first = ((byte << 19) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True)
    second = ((byte << 15) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True)
    found = tl.sum(first * low[None, :, :] + second * high[None, :, :], 2)
    where = column[:, None] + group[None, :]
    origin = tl.load(zeros + where, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scales + where, mask=inside, other=0.0)
    return tl.sum(factor * (16.0 * found - (16.0 + origin) * sums[None, :]), 1)


@triton.jit
def one_int4_row_kernel(
    x, packed, scales, zeros, gain, out, n_columns, n_groups, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    COLS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `lib.fast.parts.rows.one_row_kernel`, for a weight of levels; GROUP numbers share a scale and a zero point.

    Bytes moved: the levels and their scales once. FLOPs: two for each level.
    """
    columns, half = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, GROUP // 2)
    is_column = columns < n_columns
    dtype = out.dtype.element_ty
    first, second = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    if EARLY:
        n_bytes = n_groups * (GROUP // 2)
        ask_for_rows(packed, columns, n_columns, n_bytes, n_bytes, 16)
        if GATED:
            ask_for_rows(packed + n_columns.to(tl.int64) * n_bytes, columns, n_columns, n_bytes, n_bytes, 16)
    wait_for_the_kernel_ahead(EARLY)
    for start in range(0, n_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        known = (group < n_groups)[:, None]
        place, inside = group[:, None] * GROUP + half[None, :], is_column[:, None] & (group < n_groups)[None, :]
        low = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        high = tl.load(x + place + GROUP // 2, mask=known, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(low * low + high * high, 1)
            low *= tl.load(gain + place, mask=known, other=0.0).to(tl.float32)
            high *= tl.load(gain + place + GROUP // 2, mask=known, other=0.0).to(tl.float32)
            low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        sums, at = tl.sum(low + high, 1), group[:, None] * (GROUP // 2) + half[None, :]
        first += products_of_groups(packed, scales, zeros, columns, inside, group, at, low, high, sums, n_groups, GROUP)
        if GATED:
            behind = n_columns + columns
            second += products_of_groups(
                packed, scales, zeros, behind, inside, group, at, low, high, sums, n_groups, GROUP
            )
    scale = tl.rsqrt(tl.sum(squares, 0) / (n_groups * GROUP) + eps) if NORM else 1.0
    found = gate_and_add(first * scale, second * scale, out + columns, is_column, GATED, ADD)
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
        x, weight.numbers, weight.scales, weight.zeros, gain, out, n_columns, weight.scales.shape[1], eps,
        NORM=gain is not None, GATED=gated, ADD=into is not None, COLS=columns, GROUPS=groups, GROUP=weight.group,
        num_warps=warps, **launch_early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def few_rows_kernel(
    x, numbers, scales, zeros, out, n_rows, n_columns, n_terms,
    LEVELS: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of rows of x [n_rows, n_terms] times a tile of a narrow weight [n_columns, n_terms], by tensor cores.

    With LEVELS, TERMS is the size of a group, and the tile's levels are multiplied before the group's scale.
    The grid is (tiles of columns, tiles of rows, parts): a part sums its share of the terms, into out
    [parts, n_rows, n_columns].
    """
    columns, rows = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row, column = columns < n_columns, rows < n_rows, columns.to(tl.int64)
    part, n_parts, n_steps = tl.program_id(2), tl.num_programs(2), tl.cdiv(n_terms, TERMS)
    total, begin, end = tl.zeros([ROWS, COLS], tl.float32), part * n_steps // n_parts, (part + 1) * n_steps // n_parts
    if EARLY:
        row_bytes, step_bytes = n_terms // 2 if LEVELS else n_terms, TERMS // 2 if LEVELS else TERMS
        first = numbers.to(tl.pointer_type(tl.uint8)) + begin * step_bytes
        n_bytes = tl.minimum((end - begin) * step_bytes, row_bytes - begin * step_bytes)
        ask_for_rows(first, columns, n_columns, row_bytes, n_bytes, 8)
    wait_for_the_kernel_ahead(EARLY)
    for step in range(begin, end):
        if LEVELS:
            half = tl.arange(0, TERMS // 2)
            x_at = x + rows[:, None] * n_terms + step * TERMS + half[None, :]
            at = (column * (n_terms // 2))[None, :] + (step * (TERMS // 2) + half)[:, None]
            byte = tl.load(numbers + at, mask=is_column[None, :], other=0)
            origin = tl.load(zeros + column * n_steps + step, mask=is_column, other=0).to(tl.float32)[None, :]
            row = tl.load(x_at, mask=is_row[:, None], other=0.0)
            found = tl.dot(row, ((byte & 15).to(tl.float32) - origin).to(row.dtype), input_precision="ieee")
            row = tl.load(x_at + TERMS // 2, mask=is_row[:, None], other=0.0)
            found = tl.dot(row, ((byte >> 4).to(tl.float32) - origin).to(row.dtype), found, input_precision="ieee")
            total += found * tl.load(scales + column * n_steps + step, mask=is_column, other=0.0)[None, :]
        else:
            terms = step * TERMS + tl.arange(0, TERMS)
            inside = is_column[None, :] & (terms < n_terms)[:, None]
            row = tl.load(x + rows[:, None] * n_terms + terms, mask=is_row[:, None] & (terms < n_terms), other=0.0)
            weight = tl.load(numbers + (column * n_terms)[None, :] + terms[:, None], mask=inside, other=0.0)
            total = tl.dot(row, weight.to(row.dtype), total, input_precision="ieee")
    if not LEVELS:
        total *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
    to = out + (part.to(tl.int64) * n_rows + rows[:, None]) * n_columns + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


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
    x, n, levels = x.contiguous(), weight.n_columns, weight.zeros is not None
    rows = min(64, max(16, triton.next_power_of_2(len(x))))
    tiles = triton.cdiv(n, COLUMNS), triton.cdiv(len(x), rows)
    parts = n_parts(tiles[0] * tiles[1], x.device)
    out = x.new_empty(parts, len(x), n, dtype=torch.float32 if parts > 1 else x.dtype)
    few_rows_kernel[(*tiles, parts)](
        x, *weight, out, len(x), n, weight.n_terms, LEVELS=levels, TERMS=weight.group if levels else TERMS, ROWS=rows,
        COLS=COLUMNS, num_warps=4, num_stages=3, **launch_early(x.device),
    )  # fmt: skip
    return out.sum(0).to(x.dtype) if parts > 1 else out[0]


@functools.cache
def n_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def n_parts(n_programs: int, device: torch.device) -> int:
    """Parts of the terms, a power of two up to 8: as many as give each processor at most three programs."""
    return 1 << min(3, max(0, (3 * n_processors(device) // n_programs).bit_length() - 1))
