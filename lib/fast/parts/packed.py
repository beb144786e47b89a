"""Keys and values in 8 bits, with a scale for each head and position, and the attention of one query that reads them.

A head of 64 numbers takes 64 bytes and 4 for its scale, in place of 128. A kernel multiplies scores and weights by the
scales, one number a position, so it never makes wide keys or values.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.parts.early import ask_for, wait_for_the_kernel_ahead
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
def block_attention_kernel(
    q, keys, values, key_scales, value_scales, tables, lengths, o, lse, scale, H, M,
    SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, SCALED: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As chapter 21's ``paged_attention_kernel``, for a step's queries ``[B, H, D]``; o may have any dtype.

    With SCALED, keys and values are in 8 bits and have scales ``[n_blocks, SIZE, G]``.
    LINES: Lines of memory of a head's key, which are asked for before the query is there; 0 for none.
    The grid is (sequences, key heads, parts).
    """
    b, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = (b * H + g * GROUP + rows[:, None]) * D + dims[None, :]
    inside, length = (rows[:, None] < GROUP) & (dims[None, :] < D), tl.load(lengths + b)
    n_tiles, n_parts = tl.cdiv(length, COLS), tl.num_programs(2)
    begin, end = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
    if EARLY and LINES > 0:
        size: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        line = tl.minimum(128 * tl.arange(0, LINES), D * size - 1)[None, :]
        for tile in range(begin, end):
            cols = tl.minimum(tile * COLS + tl.arange(0, COLS), length - 1)
            head = (tl.load(tables + b * M + cols // SIZE) * SIZE + cols % SIZE) * (H // GROUP) + g
            ask_for((keys + head * D).to(tl.pointer_type(tl.uint8))[:, None] + line)
            ask_for((values + head * D).to(tl.pointer_type(tl.uint8))[:, None] + line)
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
    first = part.to(tl.int64) * tl.num_programs(0) * H
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(o + first * D + at, (acc / total[:, None]).to(o.dtype.element_ty), mask=inside)
    tl.store(lse + first + b * H + g * GROUP + rows, m + tl.log(total), mask=rows < GROUP)
