"""Keys and values in 8 bits, with a scale for each head and position, and the attention of a captured step's queries,
which reads these or wide ones.

A head of 64 numbers takes 64 bytes and 4 for its scale, in place of 128. A kernel multiplies scores and weights by the
scales, one number a position, so it never makes wide keys or values.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.parts.early import wait_for_the_kernel_ahead
from lib.given.kernels.mode import tl, triton

FORMATS = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}
"""The dtype of each format, and its largest number."""
SCALE = torch.float32


class Packed:
    """Numbers ``[..., D]`` in 8 bits and their scales ``[...]``; an index of tensors gives them in a wider dtype.

    Args:
        numbers, scales: Of the same leading shape.
        dtype: That they are read in.
    """

    def __init__(self, numbers: Tensor, scales: Float[Tensor, "..."], dtype: torch.dtype) -> None:
        self.numbers, self.scales, self.dtype = numbers, scales, dtype
        self.shape, self.device, self.is_cuda = numbers.shape, numbers.device, numbers.is_cuda

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        """With a number, this layer's, still in 8 bits; with a tensor, these blocks, in the wider dtype."""
        found = self.numbers.view(torch.int8)[at].view(self.numbers.dtype), self.scales[at]
        return Packed(*found, self.dtype) if isinstance(at, int) else unpack(*found, self.dtype)

    def write(self, layer: int, slots: Tensor, new: Float[Tensor, "n g d"]) -> None:
        """Store the heads of N positions in N slots of a layer."""
        numbers, scales = pack(new, self.numbers.dtype)
        self.numbers[layer].view(torch.int8).flatten(0, 1)[slots] = numbers.view(torch.int8)
        self.scales[layer].flatten(0, 1)[slots] = scales

    def copy_block(self, block: int, into: int) -> None:
        """Copy a block, in all layers."""
        for x in (self.numbers.view(torch.int8), self.scales):
            x[:, into] = x[:, block]


def pack(x: Float[Tensor, "... d"], dtype: torch.dtype) -> tuple[Tensor, Float[Tensor, "..."]]:
    """Numbers in 8 bits, and scales by which they are to be multiplied: the largest of each D has the format's largest.

    Args:
        x: ``[..., D]``.
        dtype: int8, which is rounded to the nearest integer, or float8_e4m3fn.
    """
    (largest,) = (largest for kind, largest in FORMATS.values() if kind == dtype)
    wide = x.to(SCALE)
    most = wide.abs().amax(-1)
    scales = torch.where(most == 0, 1.0, most / largest)
    wide = wide / scales[..., None]
    return ((wide + 0.5).floor() if dtype == torch.int8 else wide).to(dtype), scales


def unpack(numbers: Tensor, scales: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "... d"]:
    """The numbers that ``pack`` stored, as far as 8 bits hold them."""
    return (numbers.to(SCALE) * scales[..., None]).to(dtype)


def pointers(pool: Any) -> tuple[Tensor, Tensor, float]:
    """What a kernel needs of a layer's keys or values: numbers, scales, and the format's largest number.

    For a plain tensor the last is 0, and the scales are not read.
    """
    if not isinstance(pool, Packed):
        return pool, pool, 0.0
    return pool.numbers, pool.scales, next(most for kind, most in FORMATS.values() if kind == pool.numbers.dtype)


@triton.jit
def merged(o, lse, row, n_rows, dims, used, D, PARTS: tl.constexpr):
    """The attention of some rows to all positions, from o [PARTS, n_rows, D] to each part and the parts' lse; 0 where
    no part has a position.

    What other programs of the same kernel wrote is in the level 2 cache, so it is read from there.
    """
    largest = tl.full(row.shape, -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        own = tl.load(lse + part * n_rows + row, mask=used, other=-float("inf"), cache_modifier=".cg")
        largest = tl.maximum(largest, own)
    total, mean = tl.zeros(row.shape, tl.float32), tl.zeros([row.shape[0], dims.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        own = tl.load(lse + part * n_rows + row, mask=used, other=-float("inf"), cache_modifier=".cg")
        weight = tl.where(own == -float("inf"), 0.0, tl.exp(own - largest))
        there, at = (dims < D)[None, :] & (weight > 0.0)[:, None], (part * n_rows + row)[:, None] * D + dims[None, :]
        each = tl.load(o + at, mask=there, other=0.0, cache_modifier=".cg")
        mean, total = mean + each * weight[:, None], total + weight
    return mean / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def is_last(arrived, PARTS: tl.constexpr):
    """Whether this program is the last of PARTS that count themselves at ``arrived``, which is 0 before and after.

    The last one may read what the others stored before they called this.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1) == PARTS - 1
    tl.store(arrived, 0, mask=last)
    return last


@triton.jit
def store_mean(mean, own_lse, o, lse, arrived, out, row, n_rows, part, dims, used, D, PARTS: tl.constexpr):
    """Store the attention of some rows to one part of the positions; the last program of PARTS stores that to all in
    out.
    """
    at, inside = row[:, None] * D + dims[None, :], used[:, None] & (dims < D)[None, :]
    if PARTS > 1:
        tl.store(o + part * n_rows * D + at, mean, mask=inside)
        tl.store(lse + part * n_rows + row, own_lse, mask=used)
        if is_last(arrived, PARTS):
            mean = merged(o, lse, row, n_rows, dims, used, D, PARTS)
            tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def block_attention_kernel(
    q, keys, values, key_scales, value_scales, tables, lengths, o, lse, arrived, out, scale, H, M,
    SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As chapter 21's ``paged_attention_kernel``, for a step's queries ``[B, H, D]``; but the last program of a
    sequence's PARTS writes their mean into out ``[B, H, D]``.

    With SCALED, keys and values are in 8 bits and have scales ``[n_blocks, SIZE, G]``.
    o and lse, float32, and the counts ``arrived`` ``[B, G]`` are used if there is more than one part.
    The grid is (sequences, key heads, PARTS).
    """
    b, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = (b * H + g * GROUP + rows[:, None]) * D + dims[None, :]
    inside, length = (rows[:, None] < GROUP) & (dims[None, :] < D), tl.load(lengths + b)
    n_tiles = tl.cdiv(length, COLS)
    begin, end = part * n_tiles // PARTS, (part + 1) * n_tiles // PARTS
    wait_for_the_kernel_ahead(EARLY)
    query = tl.load(q + at, mask=inside, other=0.0)
    m, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in range(begin, end):
        cols = tile * COLS + tl.arange(0, COLS)
        block = tl.load(tables + b * M + cols // SIZE, mask=cols < length, other=0)
        head = (block * SIZE + cols % SIZE) * (H // GROUP) + g
        where, there = head[:, None] * D + dims[None, :], (cols[:, None] < length) & (dims[None, :] < D)
        key = tl.load(keys + where, mask=there, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SCALED:
            scores *= tl.load(key_scales + head, mask=cols < length, other=0.0)[None, :]
        scores = tl.where(cols[None, :] < length, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights, decay = tl.exp(scores - m_new[:, None]), tl.exp(m - m_new)
        value = tl.load(values + where, mask=there, other=0.0).to(query.dtype)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(value_scales + head, mask=cols < length, other=0.0)[None, :]
        acc = tl.dot(weights.to(query.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    total = tl.where(total == 0.0, 1.0, total)
    row, n_rows, count = b * H + g * GROUP + rows, tl.num_programs(0).to(tl.int64) * H, arrived + b * (H // GROUP) + g
    mean, own_lse = acc / total[:, None], m + tl.log(total)
    store_mean(mean, own_lse, o, lse, count, out, row, n_rows, part, dims, rows < GROUP, D, PARTS)
