"""Given parts of chapter 21: a kernel that attends to keys in blocks, in parts that are merged, and its launch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton

_SHORTEST_PART = 256
"""Positions below which it does not pay to cut a sequence on a GPU."""


@triton.jit
def paged_attention_kernel(
    q, keys, values, tables, lengths, o, lse, scale, H, M, Q, SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Attention of one sequence's query to one part of its positions; the grid is (sequences, key heads, parts).

    Args:
        q: Pointer to ``[B, H, D]``, whose sequences are Q numbers apart. Query head h reads key head ``h // GROUP``.
        keys, values: Pointers to contiguous ``[n_blocks, SIZE, G, D]``.
        tables: Pointer to int64 ``[B, M]``, each sequence's blocks.
        lengths: Pointer to int64 ``[B]``, each sequence's number of positions.
        o, lse: Pointers to contiguous float32 ``[parts, B, H, D]`` and ``[parts, B, H]``: output and natural
            logsumexp of each part.
        scale: Factor of the scores.
        H, M, Q: Number of query heads; numbers from one table to the next; numbers from one sequence's queries to the
            next.
        WIDTH, ROWS, COLS: Powers of two: at least D, at least GROUP, and the positions in a tile.

    Of P parts, part i has tiles ``i * n // P`` to ``(i + 1) * n // P - 1`` of a sequence's n tiles.
    A part without positions writes 0 and -inf.
    Sums are in float32, without TF32.
    No key or value beyond the sequence's positions is read.
    """
    b, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = (b * H + g * GROUP + rows[:, None]) * D + dims[None, :]
    inside = (rows[:, None] < GROUP) & (dims[None, :] < D)
    query = tl.load(q + at + b * (Q - H * D), mask=inside, other=0.0)
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc, length = tl.zeros([ROWS, WIDTH], tl.float32), tl.load(lengths + b)
    n_tiles, n_parts = tl.cdiv(length, COLS), tl.num_programs(2)
    for tile in range(part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts):
        cols = tile * COLS + tl.arange(0, COLS)
        # The next line is the only thing that paging changes.
        block = tl.load(tables + b * M + cols // SIZE, mask=cols < length, other=0)
        where = ((block * SIZE + cols % SIZE) * (H // GROUP) + g)[:, None] * D + dims[None, :]
        there = (cols[:, None] < length) & (dims[None, :] < D)
        key = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(cols[None, :] < length, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights, decay = tl.exp(scores - m_new[:, None]), tl.exp(m - m_new)
        value = tl.load(values + where, mask=there, other=0.0)
        l = l * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    first = part.to(tl.int64) * tl.num_programs(0) * H
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(o + first * D + at, acc / l[:, None], mask=inside)
    tl.store(lse + first + b * H + g * GROUP + rows, m + tl.log(l), mask=rows < GROUP)


def table_of(cache: Any, sequences: Sequence[int], layer: int = 0) -> tuple[Int[Tensor, "b m"], Int[Tensor, " b"]]:
    """The blocks of some sequences of a paged cache, and their lengths in a layer, on the cache's device.

    Returns:
        ``[B, M]``, int64: each sequence's blocks in order, then block 0 up to the width M of the longest table,
        which is at least 1; ``[B]``, int64: each sequence's number of positions.

    Raises:
        ValueError: there is no sequence with one of these ids; the message names it.
    """
    tables = [cache.tables[i] for i in sequences if i in cache.tables]
    if len(tables) < len(sequences):
        unknown = next(i for i in sequences if i not in cache.tables)
        raise ValueError(f"there is no sequence {unknown}: it was freed already, or never made")
    lengths = [cache.lengths[i][layer] for i in sequences]
    known = getattr(cache, "_table_of", None)  # all layers of a step ask for the same tables
    if known is None or known[0] != (tables, lengths):
        longest = max([1, *map(len, tables)])
        rows = [table + [0] * (longest - len(table)) for table in tables]
        made = (
            torch.tensor(rows, dtype=torch.int64).view(len(tables), longest),
            torch.tensor(lengths, dtype=torch.int64),
        )
        known = (
            ([list(table) for table in tables], lengths),
            (made[0].to(cache.keys.device), made[1].to(cache.keys.device)),
        )
        cache._table_of = known
    return known[1]


def window_of(
    cache: Any, sequences: Sequence[int], window: int, layer: int = 0
) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s d"], Bool[Tensor, "b s"]]:
    """The keys and values that the newest position of each sequence sees through a window.

    Only the blocks that the window touches are gathered.

    Returns:
        Keys and values ``[B, G, S, D]``, 0 where no position is visible; and which of the S are visible.
    """
    table, lengths = table_of(cache, sequences, layer)
    size = cache.block_size
    first = (lengths - window).clamp(min=0) // size
    columns = first[:, None] + torch.arange(min(-(-(window - 1) // size) + 1, table.shape[1]), device=table.device)
    blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    positions = (columns[:, :, None] * size + torch.arange(size, device=table.device)).flatten(1)
    seen = (positions < lengths[:, None]) & (positions >= lengths[:, None] - window)
    k, v = (pool[layer][blocks].flatten(1, 2).masked_fill(~seen[:, :, None, None], 0).transpose(1, 2)
            for pool in (cache.keys, cache.values))  # fmt: skip
    return k, v, seen


def parts_of(batch: int, n_kv_heads: int, longest: int) -> int:
    """Parts that give a GPU about two programs for each of its processors, a power of two;
    1 for sequences too short to cut.
    """
    n_processors = torch.cuda.get_device_properties(0).multi_processor_count
    most = min(2 * n_processors // max(1, batch * n_kv_heads), longest // _SHORTEST_PART)
    return 1 << max(0, most.bit_length() - 1)


def launch_paged(
    q: Float[Tensor, "b h d"], cache: Any, sequences: Sequence[int], layer: int = 0, n_parts: int | None = None
) -> tuple[Float[Tensor, "p b h d"], Float[Tensor, "p b h"]]:
    """Launch ``paged_attention_kernel`` with one program for each sequence, head of keys,
    and part of the sequence's positions.

    Args:
        q: ``[B, H, D]``, a query for each sequence, float32, float16 or bfloat16 (bfloat16 only on a GPU).
        cache, sequences, layer: A paged cache with ``keys``, ``values``, ``tables`` and ``lengths``;
            ids of its sequences; the layer.
        n_parts: Parts P of each sequence, a power of two; by default a number that keeps the GPU busy.

    Returns:
        The output ``[P, B, H, D]`` and natural logsumexp ``[P, B, H]`` of each part, float32;
        0 and -inf for a part without positions.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: ``n_parts`` is not a power of two.
    """
    if not HAS_TRITON:
        raise RuntimeError(NO_TRITON)
    (tables, lengths), keys, values = table_of(cache, sequences, layer), cache.keys[layer], cache.values[layer]
    (batch, n_heads, width), (_, size, n_kv_heads, _) = q.shape, keys.shape
    n_parts = n_parts or parts_of(batch, n_kv_heads, tables.shape[1] * size)
    if n_parts & (n_parts - 1):
        raise ValueError(f"n_parts = {n_parts}: expected a power of two")
    o = torch.empty(n_parts, batch, n_heads, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(n_parts, batch, n_heads, dtype=torch.float32, device=q.device)
    if q.numel():
        paged_attention_kernel[(batch, n_kv_heads, n_parts)](
            q.contiguous(), keys, values, tables, lengths, o, lse, width**-0.5, n_heads, tables.shape[1],
            n_heads * width, SIZE=size, GROUP=n_heads // n_kv_heads, D=width,
            WIDTH=max(16, triton.next_power_of_2(width)),
            ROWS=max(16, triton.next_power_of_2(n_heads // n_kv_heads)), COLS=16 if INTERPRETED else 64,
        )  # fmt: skip
    return o, lse
