"""Lists of items for the backward pass of ``lib.fast.attention.flash_stored``: what each of its programs computes,
in which order.

Rows of queries and keys are counted in tiles of 64 here.
"""

import heapq
import math
from collections import deque
from typing import NamedTuple

from lib.fast.launch import Sizes

TILE_BYTES = 64 * 64 * 2
SCRATCH_BYTES = 2**31  # for dS; more only where two heads of queries need more
# What an item costs before its first tile, and what dQ costs for a tile of keys, in units of `cost`; timed on an H100.
START, DQ_COST = 12.0, 2.5
# Adding up dK and dV of heads apart: what it costs at all, and how many bytes it moves in a unit of `cost`; estimated.
ADD_START, ADD_BYTES = 14.0, 1.1e6
DQ_SHARE = 0.2  # of the programs compute dQ at a time, while there is dK/dV to compute: more would wait for memory


class Item(NamedTuple):
    """What a program does next, as `stored_backward_kernel` reads it."""

    kind: int  # 0 is dK/dV, 1 is dQ
    head: int  # of keys for dK/dV, of queries for dQ, counted through all batches
    first: int  # dK/dV: which block of 128 keys; dQ: the first of four tiles of rows
    base: int  # the first tile of dS of this head
    waits: int  # the counter to wait for, or -1
    n_waits: int
    counts: int  # the counter that tells that the item is done; each of two users adds 1
    parity: int = 0  # dK/dV: of the number of such items before it in its list


class Work(NamedTuple):
    """Lists of items for all programs, and what memory they need."""

    lists: list[list[Item]]
    n_tiles: int  # of dS
    n_counters: int
    end: float  # when the last program will be done, in units of `cost`


def n_tiles_before(j: int, sizes: Sizes) -> int:
    """Number of tiles [64 keys, 64 rows] of dS before those of the rows from 64 j on, in a head of queries.

    Under a causal mask only tiles that some row sees have a place.
    Without one, there is a place for every tile of 128 keys.
    """
    if sizes.causal:
        return j * (j - 1) // 2 + j * (-(-(sizes.s - sizes.t) // 64) + 1)
    return j * (-(-sizes.s // 128) * 2)


def n_row_tiles(sizes: Sizes) -> int:
    """Number of tiles of rows of a head."""
    return -(-sizes.t // 64)


def n_part_tiles(sizes: Sizes) -> int:
    """Tiles of dS of a part: one head of keys, with all heads of queries that share it."""
    return sizes.group * n_tiles_before(n_row_tiles(sizes), sizes)


def n_tiles_in_memory(sizes: Sizes, most_bytes: int) -> int:
    """Number of tiles of dS that may be kept at a time, or 0 if two heads of queries take more than ``most_bytes``.

    Two are the least: one is read while the other is written.
    """
    two = min(2, sizes.n_batches * sizes.n_heads) * n_part_tiles(sizes._replace(group=1))
    return max(two, SCRATCH_BYTES // TILE_BYTES) if two * TILE_BYTES <= most_bytes else 0


def first_row_tile(key: int, sizes: Sizes) -> int:
    """The first tile of rows that sees a key or a later one."""
    return max(key + sizes.t - sizes.s, 0) // 64 if sizes.causal else 0


def n_key_tiles(j: int, sizes: Sizes) -> int:
    """Number of tiles of keys that any of the rows 64 j to 64 j + 63 sees."""
    n = -(-sizes.s // 64)
    return min(j + 1 + -(-(sizes.s - sizes.t) // 64), n) if sizes.causal else n


def items_of(part: int, sizes: Sizes, n_slots: int) -> tuple[list[Item], list[Item]]:
    """The items of a part for dK/dV, which wait for dQ of the part that had its place in memory, and those for dQ."""
    each, base = n_part_tiles(sizes) // sizes.group, part % n_slots * n_part_tiles(sizes)
    # each block of keys is seen, because there are no more rows than keys under a causal mask
    blocks = range(-(-sizes.s // 128))
    firsts = range(0, n_row_tiles(sizes), 4)
    waits, n_waits = (2 * (part - n_slots) + 1, 2 * len(firsts) * sizes.group) if part >= n_slots else (-1, 0)
    for_keys = [Item(0, part, block, base, waits, n_waits, 2 * part) for block in blocks]
    for_rows = [
        Item(1, part * sizes.group + i, first, base + i * each, 2 * part, 2 * len(blocks), 2 * part + 1)
        for first in reversed(firsts)
        for i in range(sizes.group)
    ]
    return for_keys, for_rows


def cost(item: Item, sizes: Sizes) -> float:
    """How long an item takes, in products of [128, 64] by [64, width]; measured, since dQ waits for memory too."""
    if item.kind == 0:
        return START + sizes.group * 4 * (n_row_tiles(sizes) - first_row_tile(128 * item.first, sizes))
    return START + DQ_COST * n_key_tiles(min(item.first + 3, n_row_tiles(sizes) - 1), sizes)


def deal(sizes: Sizes, n_programs: int, n_tiles: int) -> Work:
    """Give each item to the program that will be free first; at most ``n_tiles`` tiles of dS are kept at a time,
    or one part's.

    This plays through what the GPU will do, with the times of `cost`.
    Whatever the true times are, nothing can wait for ever: an item waits only for items that were dealt before it.
    """
    n_parts = sizes.n_batches * sizes.n_heads // sizes.group
    n_slots = max(1, min(n_parts, n_tiles // n_part_tiles(sizes)))
    todo = [items_of(part, sizes, n_slots) for part in range(n_parts)]
    keys, rows = [deque(a) for a, _ in todo], [deque(b) for _, b in todo]
    keys_end, rows_end = [0.0] * n_parts, [0.0] * n_parts
    lists: list[list[Item]] = [[] for _ in range(min(n_programs, sum(len(a) + len(b) for a, b in todo)))]
    n_dealt = [0] * len(lists)  # items for dK/dV in each list
    free = [(0.0, i) for i in range(len(lists))]
    busy: list[float] = []  # when programs will have ended dQ
    at, behind = 0, 0  # the first parts with items left for dK/dV, and for dQ
    while behind < n_parts:
        now, program = heapq.heappop(free)
        # when the next item of either kind could start; infinity if that is not known yet
        for_rows = keys_end[behind] if behind < at else math.inf
        for_keys = math.inf
        if at < n_parts and (at < n_slots or not rows[at - n_slots]):
            for_keys = rows_end[at - n_slots] if at >= n_slots else 0.0
        busy = [end for end in busy if end > now]
        if for_rows <= max(now, for_keys) and (len(busy) < DQ_SHARE * n_programs or for_keys > now):
            item, end = rows[behind].popleft(), max(now, for_rows)
            end += cost(item, sizes)
            rows_end[behind] = max(rows_end[behind], end)
            busy.append(end)
        else:
            item, end = keys[at].popleft(), max(now, for_keys)
            end += cost(item, sizes)
            keys_end[at] = max(keys_end[at], end)
        lists[program].append(item._replace(parity=n_dealt[program] % 2))
        n_dealt[program] += item.kind == 0
        heapq.heappush(free, (end, program))
        while at < n_parts and not keys[at]:
            at += 1
        while behind < at and not rows[behind]:
            behind += 1
    return Work(lists, n_slots * n_part_tiles(sizes), 2 * n_parts, max(end for end, _ in free))


def deal_apart(sizes: Sizes, n_programs: int, n_tiles: int) -> tuple[Work, int]:
    """The shorter work: that of `deal`, or that in which each head of queries is a part with dK and dV of its own.

    Where few key/value heads serve many query heads, there are few items for dK/dV, of very different lengths under a
    causal mask, and most programs wait for the last ones.
    Heads apart have more and shorter items, but their dK and dV must be added.

    Returns:
        The work, and how many parts share a head of keys: 1, or ``sizes.group``.
    """
    apart = sizes._replace(group=1)
    split = deal(apart, n_programs, n_tiles)
    n_groups = sizes.n_batches * sizes.n_heads // sizes.group
    if n_tiles < min(2, n_groups) * n_part_tiles(sizes):
        return split, sizes.group
    whole = split if sizes.group == 1 else deal(sizes, n_programs, n_tiles)
    n_bytes = 2 * 2 * n_groups * (sizes.group + 1) * sizes.s * sizes.head_dim  # of dK and dV, before and after
    if whole.end <= split.end + ADD_START + n_bytes / ADD_BYTES:
        return whole, 1
    return split, sizes.group
