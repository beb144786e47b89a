"""Attention to keys in blocks with a window, a soft cap or sinks: for prompts, and for one more token of each sequence.

Chapter 21's kernel and `lib.fast.attention.paged` compute plain attention.
This one has `paged`'s tiles of queries, and cuts what a tile sees into parts, as chapter 21's does.
Blocks in front of a tile's window are not read.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.fast.attention.paged import COLS, Tiles, heads_of
from lib.fast.parts.rows import merge
from lib.given.kernels.mode import tl, triton

FAR = 2**30  # a window that hides nothing


@triton.jit
def variant_attention_kernel(
    q, keys, values, tables, sequences, rows, positions, counts, sinks, o, lse, scale, cap, window, N, H, M,
    SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, COLS: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Causal attention of one tile's queries to one part of what they see; the grid is (tiles, key heads, parts).

    Args:
        q: Pointer to contiguous ``[N, H, D]``.
        keys, values: Pointers to contiguous ``[n_blocks, SIZE, G, D]``.
        tables, sequences, rows, positions, counts: Pointers to the fields of `Tiles`. A count of 0 writes zeros,
            one below 0 nothing.
        sinks: Pointer to ``[H]`` if SUNK: each head's weight without a value, which the first part counts.
        o, lse: Pointers to contiguous float32 ``[parts, N, H, D]`` and ``[parts, N, H]``.
        scale, cap: Factor of the scores; their cap if CAPPED.
        window: How many keys a query sees at most, its own counted.
        N, H, M: Tokens; query heads; numbers from one table to the next.
        WIDTH, HEADS, QUERIES, COLS: Powers of two: at least D, at least GROUP, the queries of a tile, the positions
            in a tile of keys.

    Sums are in float32, without TF32.
    """
    tile, g, part, n_parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    b, row = tl.load(sequences + tile), tl.load(rows + tile)
    first, n = tl.load(positions + tile), tl.load(counts + tile)
    each, dims = tl.arange(0, HEADS * QUERIES), tl.arange(0, WIDTH)
    query, head = each // HEADS, g * GROUP + each % HEADS
    used = (query < tl.where(n == 0, 1, n)) & (each % HEADS < GROUP)
    place = (row + query).to(tl.int64) * H + head
    inside = used[:, None] & (dims < D)[None, :]
    left = tl.load(q + place[:, None] * D + dims[None, :], mask=inside, other=0.0)
    m, total = tl.full([HEADS * QUERIES], -float("inf"), tl.float32), tl.zeros([HEADS * QUERIES], tl.float32)
    if SUNK:
        m = tl.where(part == 0, tl.load(sinks + head, mask=used, other=0.0).to(tl.float32), m)
        total = tl.where(part == 0, 1.0, total)
    acc, at = tl.zeros([HEADS * QUERIES, WIDTH], tl.float32), first + query
    begin = tl.maximum(first - window + 1, 0) // COLS
    n_tiles = tl.cdiv(first + n, COLS) - begin
    for i in range(begin + part * n_tiles // n_parts, begin + (part + 1) * n_tiles // n_parts):
        cols = i * COLS + tl.arange(0, COLS)
        block = tl.load(tables + b * M + cols // SIZE, mask=cols < first + n, other=0)
        where = ((block * SIZE + cols % SIZE) * (H // GROUP) + g)[:, None] * D + dims[None, :]
        there = (cols < first + n)[:, None] & (dims < D)[None, :]
        key = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(left, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            scores = cap - 2.0 * cap / (tl.exp(scores * (2.0 / cap)) + 1.0)  # cap times tanh(scores / cap)
        seen = (cols[None, :] <= at[:, None]) & (cols[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no key yet
        weights, decay = tl.exp(scores - shift[:, None]), tl.exp(m - shift)
        value = tl.load(values + where, mask=there, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    total = tl.where(total == 0.0, 1.0, total)
    place += part.to(tl.int64) * N * H
    tl.store(o + place[:, None] * D + dims[None, :], acc / total[:, None], mask=inside)
    tl.store(lse + place, m + tl.log(total), mask=used)


def variant_attention(
    q: Float[Tensor, "n h d"], keys: Float[Tensor, "blocks size g d"], values: Float[Tensor, "blocks size g d"],
    tiles: Tiles, window: int | None = None, softcap: float | None = None, sinks: Float[Tensor, " h"] | None = None,
    queries: int = 1, n_parts: int = 1,
) -> Float[Tensor, "n h d"]:  # fmt: skip
    """Causal attention of each token to its sequence, up to its own position, in the blocks.

    Args:
        q: Queries.
        keys, values: One layer's blocks, which hold the tokens' own keys and values already.
        tiles: How the queries are cut.
        window: How many keys a query sees at most, its own counted; None: all.
        softcap: Cap of the scores, as in chapter 23's ``grouped_attention``.
        sinks: Of the heads, likewise.
        queries: The most queries of a tile, a power of two.
        n_parts: Parts P of what a tile sees, a power of two.
    """
    (n, n_heads, width), (_, size, n_kv_heads, _) = q.shape, keys.shape
    o = torch.empty(n_parts, n, n_heads, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(n_parts, n, n_heads, dtype=torch.float32, device=q.device)
    group = n_heads // n_kv_heads
    heads = heads_of(group)
    variant_attention_kernel[(len(tiles.row), n_kv_heads, n_parts)](
        q.contiguous(), keys, values, *tiles, q if sinks is None else sinks, o, lse, width**-0.5, softcap or 1.0,
        window or FAR, n, n_heads, tiles.tables.shape[1],
        SIZE=size, GROUP=group, D=width, WIDTH=max(16, triton.next_power_of_2(width)),
        HEADS=heads, QUERIES=max(queries, 16 // heads), COLS=COLS, CAPPED=softcap is not None, SUNK=sinks is not None,
        num_warps=8 if heads * queries >= 128 else 4,
    )  # fmt: skip
    return merge(o, lse, q.dtype)


@triton.jit
def store_kernel(k, v, slots, keys, values, n_columns, COLS: tl.constexpr):
    """Copy a token's keys and values, n_columns numbers each, into its slot; a slot below 0 is not written."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    slot, inside = tl.load(slots + token), columns < n_columns
    if slot >= 0:
        at, to = token * n_columns + columns, slot * n_columns + columns
        tl.store(keys + to, tl.load(k + at, mask=inside, other=0.0), mask=inside)
        tl.store(values + to, tl.load(v + at, mask=inside, other=0.0), mask=inside)


def store(
    k: Float[Tensor, "n g d"], v: Float[Tensor, "n g d"], slots: Int[Tensor, " n"], keys: Any, values: Any
) -> None:
    """Write the keys and values of tokens into a layer's blocks ``[n_blocks, block_size, G, D]``."""
    n_columns = k.shape[1] * k.shape[2]
    store_kernel[(len(k), triton.cdiv(n_columns, 1024))](
        k.contiguous(), v.contiguous(), slots, keys, values, n_columns, COLS=1024
    )
