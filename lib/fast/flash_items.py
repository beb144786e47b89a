"""Lists of items for the backward pass of ``lib.fast.flash_stored``: what each of its programs computes, in which order.

Everything here is counted in tiles: 64 rows of queries, or 64 keys.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from lib.fast.flash_launch import Sizes

TILE_BYTES = 64 * 64 * 2
START, DQ_COST = (
    12.0,
    2.5,
)  # see `cost`; an H100 took 5 us before the first tile of an item, 0.4 us for each unit after it
DQ_SHARE = 0.25  # of the programs compute dQ at a time, while there is dK/dV to compute: more would wait for memory
MORE_PARTS = 4  # where dS of two whole heads does not fit: parts that fit at a time


class Item(NamedTuple):
    """What a program does next, as `stored_backward_kernel` reads it. Rows and keys are counted in tiles of 64."""

    kind: int  # 0 is dK/dV, 1 is dQ
    head: int  # of keys for dK/dV, of queries for dQ, counted through all batches
    first: int  # dK/dV: which block of 128 keys; dQ: the first of four tiles of rows
    begin: int  # rows of the part
    end: int
    base: int  # the first tile of dS of this head and part
    waits: int  # the counter to wait for, or -1
    n_waits: int
    counts: int  # the counter that tells that the item is done; each of two users adds 1
    sums: int = -1  # the counter of these keys' sums in float32
    n_sums: int = 0
    is_last: int = 1  # dK/dV: the last part of these keys, whose sums are the result
    parity: int = 0  # dK/dV: of the number of such items before it in its list


class Part(NamedTuple):
    """Some tiles of rows of the queries of one head of keys."""

    head: int
    begin: int
    end: int


class Work(NamedTuple):
    """Lists of items for all programs, and what memory they need."""

    lists: list[list[Item]]
    n_tiles: int  # of dS
    n_counters: int
    carried: bool  # whether a key's gradients are added up in memory


def n_tiles_before(j: int, sizes: Sizes) -> int:
    """Number of tiles [64 keys, 64 rows] of dS before those of the rows from 64 j on, in a head.

    Under a causal mask only tiles that some row sees have a place. Without one, there is a place for every tile of 128 keys.
    """
    if sizes.causal:
        return j * (j - 1) // 2 + j * (-(-(sizes.s - sizes.t) // 64) + 1)
    return j * (-(-sizes.s // 128) * 2)


def cut(sizes: Sizes, n_tiles: int) -> list[Part]:
    """Whole heads, if dS of two has at most so many tiles; otherwise rows of a head, so that dS of several parts has, or 256 rows."""
    n_heads, n = sizes.n_batches * sizes.n_heads // sizes.group, -(-sizes.t // 64)
    starts = [0]
    if 2 * sizes.group * n_tiles_before(n, sizes) > n_tiles:
        for j in range(4, n, 4):
            part = sizes.group * (n_tiles_before(min(j + 4, n), sizes) - n_tiles_before(starts[-1], sizes))
            if MORE_PARTS * part > n_tiles:
                starts.append(j)
    return [Part(head, *rows) for head in range(n_heads) for rows in pairwise([*starts, n])]


def first_row_tile(key: int, sizes: Sizes) -> int:
    """The first tile of rows that sees a key or a later one."""
    return max(key + sizes.t - sizes.s, 0) // 64 if sizes.causal else 0


def n_key_tiles(j: int, sizes: Sizes) -> int:
    """Number of tiles of keys that any of the rows 64 j to 64 j + 63 sees."""
    n = -(-sizes.s // 64)
    return min(j + 1 - (sizes.t - sizes.s) // 64, n) if sizes.causal else n


def items_of(sizes: Sizes, parts: list[Part], n_slots: int, slot: int) -> Iterator[tuple[list[Item], list[Item]]]:
    """The items of each part, for dK/dV and for dQ."""
    n_blocks = -(-sizes.s // 128)
    n_done: dict[tuple[int, int], int] = {}  # users that have added to the sums of a head's block of keys
    n_dq: list[int] = []  # items for dQ in each part
    carried = any(part.begin > 0 for part in parts)
    n_rows = -(-sizes.t // 64)
    for p, (head, begin, end) in enumerate(parts):
        each, base = n_tiles_before(end, sizes) - n_tiles_before(begin, sizes), p % n_slots * slot
        waits, n_waits = (2 * (p - n_slots) + 1, 2 * n_dq[p - n_slots]) if p >= n_slots else (-1, 0)
        of_keys = []
        for block in range(n_blocks):
            if first_row_tile(128 * block, sizes) < end:
                counter = 2 * len(parts) + head * n_blocks + block if carried else -1
                so_far = n_done.get((head, block), 0)
                n_done[head, block] = so_far + 2
                of_keys.append(
                    Item(0, head, block, begin, end, base, waits, n_waits, 2 * p, counter, so_far, int(end == n_rows))
                )
        of_rows = [
            Item(1, head * sizes.group + i, first, begin, end, base + i * each, 2 * p, 2 * len(of_keys), 2 * p + 1)
            for first in reversed(range(begin, end, 4))
            for i in range(sizes.group)
        ]
        n_dq.append(len(of_rows))
        yield of_keys, of_rows


def cost(item: Item, sizes: Sizes) -> float:
    """How long an item takes, in products of [128, 64] by [64, width]; measured, since dQ waits for memory too."""
    if item.kind == 0:
        return START + sizes.group * 4 * (item.end - max(first_row_tile(128 * item.first, sizes), item.begin))
    return START + DQ_COST * n_key_tiles(min(item.first + 3, item.end - 1), sizes)


def deal(sizes: Sizes, n_programs: int, scratch_bytes: int) -> Work:
    """Cut the work, and give each item to the program that will be free first.

    This plays through what the GPU will do, with the times of `cost`. Whatever the true times are, nothing can wait for ever:
    an item waits only for items that were dealt before it.
    """
    parts = cut(sizes, scratch_bytes // TILE_BYTES)
    slot = max(sizes.group * (n_tiles_before(p.end, sizes) - n_tiles_before(p.begin, sizes)) for p in parts)
    n_slots = max(1, min(len(parts), scratch_bytes // TILE_BYTES // slot))
    todo = list(items_of(sizes, parts, n_slots, slot))
    keys, rows = [deque(a) for a, _ in todo], [deque(b) for _, b in todo]
    keys_end, rows_end = [0.0] * len(parts), [0.0] * len(parts)
    lists: list[list[Item]] = [[] for _ in range(min(n_programs, sum(len(a) + len(b) for a, b in todo)))]
    free = [(0.0, i) for i in range(len(lists))]
    busy: list[float] = []  # when programs will have ended dQ
    at, behind = 0, 0  # the first parts with items left for dK/dV, and for dQ
    while behind < len(parts):
        now, program = heapq.heappop(free)
        # when the next item of either kind could start; infinity if that is not known yet
        for_rows = keys_end[behind] if behind < at else math.inf
        for_keys = math.inf
        if at < len(parts) and (at < n_slots or not rows[at - n_slots]):
            for_keys = rows_end[at - n_slots] if at >= n_slots else 0.0
        n_busy = sum(end > now for end in busy)
        if for_rows <= max(now, for_keys) and (n_busy < DQ_SHARE * n_programs or for_keys > now):
            p, item, start = behind, rows[behind].popleft(), max(now, for_rows)
            rows_end[p] = max(rows_end[p], start + cost(item, sizes))
            busy = [end for end in busy if end > now] + [start + cost(item, sizes)]
        else:
            p, item, start = at, keys[at].popleft(), max(now, for_keys)
            keys_end[p] = max(keys_end[p], start + cost(item, sizes))
        n_before = sum(other.kind == 0 for other in lists[program])
        lists[program].append(item._replace(parity=n_before % 2))
        heapq.heappush(free, (start + cost(item, sizes), program))
        while at < len(parts) and not keys[at]:
            at += 1
        while behind < at and not rows[behind]:
            behind += 1
    carried = any(part.begin > 0 for part in parts)
    n_counters = 2 * len(parts) + (
        -(-sizes.s // 128) * sizes.n_batches * sizes.n_heads // sizes.group if carried else 0
    )
    return Work(lists, n_slots * slot, n_counters, carried)
