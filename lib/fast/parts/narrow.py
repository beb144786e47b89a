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

SOME_ROWS = 16  # up to which the parts of a narrow weight's product are small beside it
MANY_ROWS = 64  # above it a wide copy of the weight costs less than its arithmetic
ROOM = 200_000  # bytes of shared memory
LONG_ROW = 4096  # terms from which a program reads longer pieces of fewer rows
LARGE = 4096  # rows from which a weight with long rows is large
TERMS = 128  # that a program of few rows reads at a time; of levels it reads a group


class Tile(NamedTuple):
    """How the programs of a product of few rows share it.

    Attributes:
        stages: Groups of terms that are on their way at a time, for up to 8, 16, 32 and 64 rows.
        ask: Bytes of each row of the weight that are asked for before x is there.
        programs: For each processor, at most, where the terms are cut into parts.
        parts: Of the terms, at most, which different programs sum.
        columns: Of the product that a program computes, a multiple of the 64 of the tensor cores' tile.
    """

    stages: tuple[int, int, int, int]
    ask: int
    programs: int
    parts: int
    columns: int = 64


THREE, FOUR = (3, 3, 3, 3), (4, 4, 4, 4)
FEW = Tile(THREE, 256, 6, 16)
TILES = {
    "wide": (Tile((4, 4, 5, 4), 512, 1, 3), Tile((8, 7, 6, 4), 512, 1, 4), Tile(FOUR, 256, 1, 4, 128)),
    "float8": (Tile((4, 4, 8, 6), 512, 3, 4), Tile((4, 4, 8, 6), 512, 3, 4), Tile(FOUR, 512, 3, 4)),
    "int4": (Tile(FOUR, 512, 3, 8), Tile(FOUR, 512, 3, 8), Tile((4, 4, 6, 4), 512, 3, 8)),
}
"""Of a product, of one with long rows of the weight, and of a gated one. With a narrow weight, up to `SOME_ROWS`
rows of x have the tile `FEW`, and more than 32 have three stages if the weight is large.

As measured on an H200. It matters whether one program or two fit a processor, and whether the next kernel's fit beside
them, so the best numbers of stages follow no simple rule.
"""


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
            }""",
            "=r,=r,=r,=r,r,r",
            [byte, origin[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low, high
    if dtype.primitive_bitwidth == 16:
        power: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        wide, shift = byte.to(tl.int16), (origin.to(tl.int16) | power).to(dtype, bitcast=True)
        low, high = ((wide & 15) | power).to(dtype, bitcast=True), ((wide >> 4) | power).to(dtype, bitcast=True)
        return low - shift[:, None], high - shift[:, None]
    low, high, shift = (byte & 15).to(dtype), (byte >> 4).to(dtype), origin.to(dtype)
    return low - shift[:, None], high - shift[:, None]


@triton.jit
def few_rows_kernel(
    x, numbers, scales, zeros, out, n_rows, n_columns, n_terms,
    LEVELS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ASK: tl.constexpr, EARLY: tl.constexpr,
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
    row, is_row = rows[None, :] * n_terms, (rows < n_rows)[None, :]
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
            low, high = levels_of(tl.load(weight_at), origin, x.dtype.element_ty, EARLY)
            found = tl.dot(low, tl.load(at, mask=is_row, other=0.0), input_precision="ieee")
            found = tl.dot(high, tl.load(at + n_read, mask=is_row, other=0.0), found, input_precision="ieee")
            total += found * scale[:, None]
            scale, origin = next_scale, next_origin
        else:
            is_term = EVEN | (terms < n_terms)
            weight = tl.load(weight_at, mask=is_term[None, :], other=0.0)
            part_of_x = tl.load(x + row + terms[:, None], mask=is_row & is_term[:, None], other=0.0)
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
    tl.store(to, total.to(dtype), mask=is_row & (columns < n_columns)[:, None])


def tile_of(x: Float[Tensor, "n k"], weight: Tensor | Narrow, gated: bool = False) -> Tile:
    """The tile of a product of few rows."""
    kind = "wide" if isinstance(weight, Tensor) else "float8" if weight.zeros is None else "int4"
    if kind != "wide" and len(x) <= SOME_ROWS:
        return FEW
    has_space = x.element_size() == 2 and has_room(x.device)
    tile = TILES[kind][0 if not has_space else 2 if gated else x.shape[1] >= LONG_ROW]
    return tile if kind == "wide" or not is_large(weight) else tile._replace(stages=(*tile.stages[:3], 3))


def is_large(weight: Tensor | Narrow) -> bool:
    """Whether a weight has many rows and long ones: other tiles read it faster than a small one."""
    numbers, n_terms = (weight.numbers, weight.n_terms) if isinstance(weight, Narrow) else (weight, weight.shape[1])
    return len(numbers) >= LARGE and n_terms >= LONG_ROW


def few_rows(
    x: Float[Tensor, "n k"], weight: Float[Tensor, "f k"] | Narrow, gated: bool = False
) -> Float[Tensor, "p n f"]:
    """The product of at most `MANY_ROWS` rows with a weight, wide or narrow, in P parts whose sum it is.

    One part has the dtype of x, more are float32. Gated, it is ``silu(first half) * second half``, in one part.
    """
    tile, terms = tile_of(x, weight, gated), TERMS
    numbers, scales, zeros = weight if isinstance(weight, Narrow) else (weight, None, None)
    levels, scaled = zeros is not None, zeros is None and scales is not None
    if isinstance(weight, Narrow) and levels:
        terms = weight.group
    n, n_terms = len(numbers) // 2 if gated else len(numbers), x.shape[1]
    tiles = triton.cdiv(n, tile.columns // 2 if gated else tile.columns)
    parts = 1 if gated else n_parts(tiles, x.device, tile)
    out = x.new_empty(parts, len(x), n, dtype=torch.float32 if parts > 1 else x.dtype)
    rows = max(8, triton.next_power_of_2(len(x)))
    stage = terms * (tile.columns * numbers[0].nbytes // n_terms + rows * x.element_size())  # bytes
    stages = min(tile.stages[rows.bit_length() - 4], max(1, shared_memory(x.device) // stage))
    few_rows_kernel[(tiles, parts)](
        x.contiguous(), numbers, scales, zeros, out, len(x), n, n_terms, LEVELS=levels, SCALED=scaled, GATED=gated,
        EVEN=n_terms % terms == 0, TERMS=terms, ROWS=rows, COLS=tile.columns, ASK=tile.ask,
        num_warps=tile.columns // 16, num_stages=stages, **launch_early(x.device),
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
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 0
    sheet = torch.cuda.get_device_properties(device)
    return getattr(sheet, "shared_memory_per_block_optin", 2**16)  # an AMD GPU's sheet has no such number


def has_room(device: torch.device) -> bool:
    """Whether a program may have as much shared memory as on an H100, which the larger tiles take."""
    return shared_memory(device) >= ROOM


@functools.cache
def n_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def n_parts(n_tiles: int, device: torch.device, tile: Tile) -> int:
    """Parts of the terms: as many as give no processor more programs than the tile allows."""
    return min(tile.parts, max(1, tile.programs * n_processors(device) // n_tiles))
