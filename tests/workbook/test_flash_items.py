"""The lists of items of the backward pass through memory: every tile once, and no program waits for ever."""

import random
from collections import Counter, defaultdict

import pytest

from lib.fast.flash_items import Item, cut, deal, n_tiles_before
from lib.fast.flash_launch import Sizes

SIZES = {  # batches, heads, heads that share keys, rows, keys, width; mask
    "heads": Sizes(2, 8, 1, 1024, 1024, 128, True),
    "shared keys": Sizes(1, 12, 4, 900, 1300, 96, True),
    "no mask": Sizes(1, 6, 2, 1100, 700, 128, False),
    "one row": Sizes(3, 2, 1, 1, 130, 128, True),
    "long": Sizes(1, 2, 1, 8192, 8192, 128, True),
}
cases = pytest.mark.parametrize("n_tiles", [100, 1000, 2**17])
named = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def dealt(sizes, n_tiles, n_programs=7):
    return deal(sizes, n_programs, n_tiles * 64 * 64 * 2)


@named
@cases
def test_each_pair_of_a_query_and_a_key_is_computed_once_for_each_gradient(sizes, n_tiles):
    for_keys, for_rows = Counter(), Counter()
    for item in (item for items in dealt(sizes, n_tiles).lists for item in items):
        if item.kind == 0:
            for_keys.update((item.head, item.first, row) for row in range(item.begin, item.end))
        else:
            for_rows.update((item.head, row) for row in range(item.first, min(item.first + 4, item.end)))
    n_rows, heads = -(-sizes.t // 64), range(sizes.n_batches * sizes.n_heads)
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
def test_the_tiles_of_parts_at_work_fit_and_do_not_overlap(sizes, n_tiles):
    work = dealt(sizes, n_tiles)
    least = 2 * sizes.group * n_tiles_before(4, sizes._replace(t=256, s=sizes.s + 256) if sizes.causal else sizes)
    assert work.n_tiles <= max(n_tiles, least)
    for item in (item for items in work.lists for item in items):
        each = n_tiles_before(item.end, sizes) - n_tiles_before(item.begin, sizes)
        assert item.base >= 0
        assert item.base + each * (sizes.group if item.kind == 0 else 1) <= work.n_tiles


@named
@cases
@pytest.mark.parametrize("seed", range(3))
def test_no_program_waits_for_ever_whatever_the_times_are(sizes, n_tiles, seed):
    work, chance = dealt(sizes, n_tiles), random.Random(seed)
    counters: dict[int, int] = defaultdict(int)
    at, n_left = [0] * len(work.lists), sum(map(len, work.lists))
    while n_left:
        ready = [i for i, items in enumerate(work.lists) if at[i] < len(items) and _may_run(items[at[i]], counters)]
        assert ready, "every program waits for another"
        program = chance.choice(ready[: 1 + chance.randrange(len(ready))])
        item = work.lists[program][at[program]]
        counters[item.counts] += 2
        counters[item.sums] += 2
        at[program] += 1
        n_left -= 1
    assert max(counters) < work.n_counters


def _may_run(item: Item, counters: dict[int, int]) -> bool:
    waits = item.waits < 0 or counters[item.waits] >= item.n_waits
    return waits and (item.sums < 0 or counters[item.sums] >= item.n_sums)


def test_a_long_head_is_cut_and_a_short_one_is_whole():
    assert [(part.begin, part.end) for part in cut(SIZES["heads"], 2**17)] == [(0, 16)] * 16
    parts = cut(SIZES["long"], 4000)
    rows = [(part.begin, part.end) for part in parts if part.head == 1]
    assert len(rows) > 2
    assert [begin for begin, _ in rows] == [0, *(end for _, end in rows[:-1])]
    assert rows[-1][1] == 128
    assert all(begin % 4 == 0 for begin, _ in rows)
