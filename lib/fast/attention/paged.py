"""Attention of prompts to keys and values in blocks: many sequences in one launch, without padding or a copy.

A tile holds some queries of one sequence, with all query heads that share a key/value head, so the keys are read once
for all of them. The queries' own keys are in the cache already.
A prompt whose beginning another request computed, or that comes in several parts, needs nothing else.
"""

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lib.fast.parts.packed import pointers
from lib.given.kernels.mode import INTERPRETED, tl, triton

ROWS = 16 if INTERPRETED else 128  # queries times heads in a tile
COLS = 16 if INTERPRETED else 64  # positions that a program reads at a time


class Tiles(NamedTuple):
    """The tiles of a step's prompts, all int64 on the device.

    Attributes:
        tables: ``[B, M]``, each sequence's blocks.
        sequence: Each tile's row of ``tables``.
        row: Index of its first query among all tokens of the step.
        position: Of this query in its sequence.
        n_queries: Queries in the tile; below 0 for one that is padding.
    """

    tables: Int[Tensor, "b m"]
    sequence: Int[Tensor, " n"]
    row: Int[Tensor, " n"]
    position: Int[Tensor, " n"]
    n_queries: Int[Tensor, " n"]


@triton.jit
def prompt_attention_kernel(
    queries, keys, values, key_scales, value_scales, tables, sequences, rows, positions, counts, out, scale, H, M,
    SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, COLS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Causal attention of one tile's queries, of GROUP heads, to their sequence; the grid is (tiles, key heads).

    Args:
        queries, out: Pointers to contiguous ``[N, H, D]``.
        keys, values: Pointers to contiguous ``[n_blocks, SIZE, G, D]``.
        key_scales, value_scales: Pointers to float32 ``[n_blocks, SIZE, G]`` if SCALED: keys and values are in 8 bits.
        tables, sequences, rows, positions, counts: Pointers to the fields of `Tiles`.
        scale: Factor of the scores.
        H, M: Query heads; numbers from one table to the next.
        WIDTH, HEADS, QUERIES, COLS: Powers of two: at least D, at least GROUP, the queries of a tile, the positions
            in a tile of keys.

    Sums are in float32, without TF32. No key beyond a query's own position has an effect.
    """
    tile, g = tl.program_id(0), tl.program_id(1)
    b, row, first, n = (
        tl.load(sequences + tile),
        tl.load(rows + tile),
        tl.load(positions + tile),
        tl.load(counts + tile),
    )
    each, dims = tl.arange(0, HEADS * QUERIES), tl.arange(0, WIDTH)
    query, head = each // HEADS, each % HEADS
    inside = ((query < n) & (head < GROUP))[:, None] & (dims < D)[None, :]
    places = (g * GROUP + head)[:, None] * D + dims[None, :]
    token = (row + query).to(tl.int64)[:, None]
    q = tl.load(queries + token * H * D + places, mask=inside, other=0.0)
    m, total = tl.full([HEADS * QUERIES], -float("inf"), tl.float32), tl.zeros([HEADS * QUERIES], tl.float32)
    acc, length = tl.zeros([HEADS * QUERIES, WIDTH], tl.float32), first + n
    for start in range(0, length, COLS):
        cols = start + tl.arange(0, COLS)
        block = tl.load(tables + b * M + cols // SIZE, mask=cols < length, other=0)
        kv_head = (block * SIZE + cols % SIZE) * (H // GROUP) + g
        where, there = kv_head[:, None] * D + dims[None, :], (cols < length)[:, None] & (dims < D)[None, :]
        key = tl.load(keys + where, mask=there, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if SCALED:
            scores *= tl.load(key_scales + kv_head, mask=cols < length, other=0.0)[None, :]
        scores = tl.where(cols[None, :] <= (first + query)[:, None], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights, decay = tl.exp(scores - m_new[:, None]), tl.exp(m - m_new)
        value = tl.load(values + where, mask=there, other=0.0).to(q.dtype)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(value_scales + kv_head, mask=cols < length, other=0.0)[None, :]
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    total = tl.where(total == 0.0, 1.0, total)  # of a tile that is padding
    tl.store(out + token * H * D + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def heads_of(group: int) -> int:
    """Rows of a tile for the heads of one query: a power of two."""
    return triton.next_power_of_2(group)


def cut(starts: list[int], sizes: list[int], most: int) -> list[list[int]]:
    """The fields of `Tiles`, but for the tables, as lists.

    ``starts`` are the cached positions before each sequence's new tokens, ``sizes`` the new tokens, ``most`` the
    queries of a tile.
    """
    row = 0
    fields: list[list[int]] = [[], [], [], []]
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for first in range(0, size, most):
            for field, value in zip(fields, (i, row + first, start + first, min(most, size - first)), strict=True):
                field.append(value)
        row += size
    return fields


def prompt_attention(queries: Float[Tensor, "n hd"], keys: Any, values: Any, tiles: Tiles) -> Float[Tensor, "n h d"]:
    """Causal attention of queries to their sequences, up to their own positions, in the blocks.

    Keys and values are ``[n_blocks, block_size, G, D]``, tensors or ``Packed``.
    """
    (k, k_scales, largest), (v, v_scales, _) = pointers(keys), pointers(values)
    _, size, n_kv_heads, width = keys.shape
    n_heads = queries.shape[1] // width
    group, out = n_heads // n_kv_heads, queries.new_empty(len(queries), n_heads, width)
    heads = heads_of(group)
    prompt_attention_kernel[(len(tiles.row), n_kv_heads)](
        queries, k, v, k_scales, v_scales, *tiles, out, width**-0.5, n_heads, tiles.tables.shape[1],
        SIZE=size, GROUP=group, D=width, WIDTH=triton.next_power_of_2(width),
        HEADS=heads, QUERIES=max(1, ROWS // heads), COLS=COLS, SCALED=largest > 0,
        num_warps=8 if ROWS == 128 else 4,
    )  # fmt: skip
    return out
