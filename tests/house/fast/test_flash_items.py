"""The lists of items of the backward pass through memory: every tile once, and no program waits for ever."""

import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from lib.fast.attention.flash_items import (
    SCRATCH_BYTES,
    TILE_BYTES,
    Item,
    deal,
    deal_apart,
    n_part_tiles,
    n_tiles_in_memory,
)
from lib.fast.launch import Sizes, grid_by_rows

SIZES = {  # batches, heads, heads that share keys, rows, keys, width; mask
    "heads": Sizes(2, 8, 1, 1024, 1024, 128, True),
    "shared keys": Sizes(1, 12, 4, 900, 1300, 96, True),
    "no mask": Sizes(1, 6, 2, 1100, 700, 128, False),
    "one row": Sizes(3, 2, 1, 1, 130, 128, True),
    "long": Sizes(1, 2, 1, 8192, 8192, 128, True),
}
cases = pytest.mark.parametrize("n_slots", [1, 2, 100])
named = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def dealt(sizes, n_slots, n_programs=7):
    return deal(sizes, n_programs, n_slots * n_part_tiles(sizes))


@named
@cases
def test_each_pair_of_a_query_and_a_key_is_computed_once_for_each_gradient(sizes, n_slots):
    for_keys, for_rows = Counter[Any](), Counter[Any]()
    n_rows, heads = -(-sizes.t // 64), range(sizes.n_batches * sizes.n_heads)
    for item in (item for items in dealt(sizes, n_slots).lists for item in items):
        if item.kind == 0:
            for_keys.update((item.head, item.first, row) for row in range(n_rows))
        else:
            for_rows.update((item.head, row) for row in range(item.first, min(item.first + 4, n_rows)))
    assert for_rows == Counter((head, row) for head in heads for row in range(n_rows))
    assert set(for_keys.values()) == {1}
    seen = {
        (head // sizes.group, block, row)
        for head in heads
        for block in range(-(-sizes.s // 128))
        for row in range(n_rows)
        if not sizes.causal or 128 * block <= min(64 * row + 63, sizes.t - 1) + sizes.s - sizes.t
    }
    assert seen <= set(for_keys)


@named
@cases
def test_the_tiles_of_parts_at_work_fit(sizes, n_slots):
    work = dealt(sizes, n_slots)
    assert work.n_tiles <= n_slots * n_part_tiles(sizes)
    for item in (item for items in work.lists for item in items):
        assert item.base >= 0
        assert item.base + n_part_tiles(sizes) // (1 if item.kind == 0 else sizes.group) <= work.n_tiles


@named
@cases
def test_items_wait_for_all_that_wrote_or_read_their_tiles_before(sizes, n_slots):
    items = [item for items in dealt(sizes, n_slots).lists for item in items]
    n_items = Counter(item.counts for item in items)
    part_of = [item.head // (sizes.group if item.kind else 1) for item in items]
    place_of = {part: item.base // n_part_tiles(sizes) for part, item in zip(part_of, items, strict=True)}
    for part, item in zip(part_of, items, strict=True):
        before = [2 * p + 1 for p in place_of if p < part and place_of[p] == place_of[part]]
        awaited = 2 * part if item.kind else max(before, default=-1)
        assert item.counts == 2 * part + item.kind
        assert (item.waits, item.n_waits) == (awaited, 2 * n_items[awaited])


@named
@cases
@pytest.mark.parametrize("seed", range(3))
def test_no_program_waits_for_ever_whatever_the_times_are(sizes, n_slots, seed):
    work, chance = dealt(sizes, n_slots), random.Random(seed)
    counters: dict[int, int] = defaultdict(int)
    at, n_left = [0] * len(work.lists), sum(map(len, work.lists))
    while n_left:
        ready = [i for i, items in enumerate(work.lists) if at[i] < len(items) and _may_run(items[at[i]], counters)]
        assert ready, "every program waits for another"
        program = chance.choice(ready[: 1 + chance.randrange(len(ready))])
        item = work.lists[program][at[program]]
        counters[item.counts] += 2
        at[program] += 1
        n_left -= 1
    assert max(counters) < work.n_counters


def _may_run(item: Item, counters: dict[int, int]) -> bool:
    return item.waits < 0 or counters[item.waits] >= item.n_waits


def test_the_memory_holds_two_heads_or_none():
    sizes, most = SIZES["long"], 4 * SCRATCH_BYTES
    assert n_tiles_in_memory(sizes, most) == SCRATCH_BYTES // TILE_BYTES > 2 * n_part_tiles(sizes)
    just = sizes._replace(causal=False, t=2**15, s=2**16)
    assert 2 * n_part_tiles(just) * TILE_BYTES == most
    assert n_tiles_in_memory(just, most) == 2 * n_part_tiles(just)
    assert n_tiles_in_memory(just, most - 1) == 0
    assert n_tiles_in_memory(just._replace(s=2**16 + 1), most) == 0
    assert n_tiles_in_memory(just._replace(n_heads=1, t=2**16), most) == n_part_tiles(just._replace(t=2**16))
    assert n_tiles_in_memory(sizes, 0) == 0
    grouped = just._replace(n_heads=8, group=4)
    assert n_tiles_in_memory(grouped, most) == 2 * n_part_tiles(just) < 2 * n_part_tiles(grouped)


@pytest.mark.parametrize(
    ("sizes", "apart"),
    [
        (Sizes(1, 28, 7, 4096, 4096, 128, True), 7),  # 128 items for dK/dV, the longest twice as long as the average
        (Sizes(1, 28, 7, 4096, 4096, 128, False), 1),
        (Sizes(1, 32, 4, 8192, 8192, 128, True), 1),
        (Sizes(1, 16, 16, 4096, 4096, 128, False), 16),
        (Sizes(4, 16, 1, 1024, 1024, 128, True), 1),
    ],
    ids=str,
)
def test_heads_that_share_keys_are_parts_where_they_would_be_few(sizes, apart):
    work, found = deal_apart(sizes, 132, SCRATCH_BYTES // TILE_BYTES)
    assert found == apart
    assert work == deal(sizes._replace(group=sizes.group // apart), 132, SCRATCH_BYTES // TILE_BYTES)


def test_heads_that_share_keys_are_parts_where_dS_of_all_would_take_too_much():
    sizes = Sizes(2, 8, 4, 1024, 1024, 128, True)
    assert deal_apart(sizes, 5, 2 * n_part_tiles(sizes))[1] == 1
    assert deal_apart(sizes, 5, 2 * n_part_tiles(sizes) - 1)[1] == 4


@pytest.mark.parametrize(
    ("n_heads", "grid"),
    [(16, (16, 6, 1)), (192, (32, 6, 6)), (400, (25, 6, 16)), (34, (17, 6, 2)), (71, (71, 6, 1)), (3, (3, 6, 1))],
)
def test_as_many_heads_are_computed_side_by_side_as_share_what_they_read(n_heads, grid):
    sizes = Sizes(1, n_heads, 1, 1024, 1024, 64, True)
    assert grid_by_rows(sizes, 6, True) == grid
    assert grid_by_rows(sizes, 6, False) == (1, 6, n_heads)
