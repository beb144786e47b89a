"""Serving, graded: what a step costs, who owns a block, what it holds, what the next step computes, what a draft gives.

Attention is compared with PyTorch's, counts with PyTorch's counter and the model itself, outputs with chapter 4's
``generate`` and with Transformers'.
Long random scripts are compared with a cache of plain lists, and look for leaks after every operation.
"""

import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from lib.given.kernels import paged
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.captured import CapturedStep, StaticInputs
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.gpus import SHEETS, Sheet
from lib.given.models.llama import LLAMA_2_7B, LLAMA_2_70B, LlamaConfig
from lib.given.models.serving import BlockStore, Chunk, OutOfBlocks, Request, next_logits
from lib.gpt2 import GPT2
from lib.llama import Llama, generate
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.inputs import randn

serving = graded("serving")

STEP, BOUND, PAGE, COPY, ATTEND, PARTS, PREFIX, BUDGET, KEEP, REST, MEAN, STATIC = (
    f"eq-serving-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11)
)
EVICT, SCHEDULE, STEPS = (f"the contract, under {method}" for method in ("evict", "schedule", "step"))
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
RAISES = "the contract: what is a ValueError"
SMALL = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, context_len=64)
WIDE = LlamaConfig(vocab_size=97, dim=24, n_layers=3, n_heads=3, n_kv_heads=3, hidden_dim=40, context_len=64)
ONLY_BYTES, ONLY_FLOPS = Sheet(1e40, 1.0), Sheet(1.0, 1e40)


# ---- decode_seconds --------------------------------------------------------------------------------------------------


def counted(config: LlamaConfig, batch: int, length: int) -> tuple[int, int]:
    """Bytes and FLOPs of a decoding step of chapter 4's model, by its tensors and by PyTorch's counter."""
    model = Llama(config)
    cache = model.make_cache(batch, length)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        if length > 1:
            model(torch.zeros(batch, length - 1, dtype=torch.int64), cache)
        before = flops.get_total_flops()
        model(torch.zeros(batch, 1, dtype=torch.int64), cache)
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "tok_embeddings.weight")
    kept = sum(one.keys.numel() + one.values.numel() for one in cache)
    return 2 * (weights + batch * config.dim + kept), flops.get_total_flops() - before


@pytest.mark.parametrize(("config", "batch", "length"), [(SMALL, 1, 1), (SMALL, 5, 7), (WIDE, 3, 20)])
def test_decode_seconds_bytes(config, batch, length):
    case(f"dim={config.dim} layers={config.n_layers} batch={batch} length={length}, 1 byte/s and endless FLOP/s")
    n_bytes, _ = counted(config, batch, length)
    expect_equal(round(serving.decode_seconds(config, ONLY_BYTES, batch, length)), n_bytes, name="bytes", read=STEP)


@pytest.mark.parametrize(("config", "batch", "length"), [(SMALL, 1, 1), (SMALL, 5, 7), (WIDE, 3, 20)])
def test_decode_seconds_flops(config, batch, length):
    case(f"dim={config.dim} layers={config.n_layers} batch={batch} length={length}, 1 FLOP/s and endless bytes/s")
    _, flops = counted(config, batch, length)
    expect_equal(round(serving.decode_seconds(config, ONLY_FLOPS, batch, length)), flops, name="FLOPs", read=STEP)


def test_decode_seconds_takes_the_longer():
    case("Llama 2 7B on an H100: 1 and 1,000 sequences of one position")
    card = SHEETS["H100"]
    answer = [serving.decode_seconds(LLAMA_2_7B, card, batch, 1) for batch in (1, 1000)]
    n_weights = 6_738_415_616 - 32_000 * 4096
    cached = 2 * 32 * 4096 * 2
    memory = (2 * n_weights + 2 * 4096 + cached) / card.bandwidth
    products = 2 * (n_weights - 65 * 4096) + 4 * 32 * 4096
    expect_close(answer, [memory, 1000 * products / card.peak_flops], rtol=1e-9, name="seconds", read=STEP)


# ---- compute_bound_decode_batch --------------------------------------------------------------------------------------


def searched(config: LlamaConfig, card: Sheet, length: int) -> int:
    """The smallest batch by trying all of them, from the two counts above."""
    (bytes_1, flops_1), (bytes_2, _) = counted(config, 1, length), counted(config, 2, length)
    own = bytes_2 - bytes_1
    return next(b for b in range(1, 100_000) if b * flops_1 / card[0] >= (bytes_1 - own + b * own) / card[1])


@pytest.mark.parametrize(("config", "ratio", "length"), [(SMALL, 20, 1), (SMALL, 9, 5), (WIDE, 30, 2), (SMALL, 21, 1)])
def test_compute_bound_decode_batch_by_search(config, ratio, length):
    case(f"dim={config.dim} layers={config.n_layers} length={length}, {ratio} FLOPs for each byte")
    card = Sheet(float(ratio), 1.0)
    answer = serving.compute_bound_decode_batch(config, card, length)
    expect_equal(answer, searched(config, card, length), read=BOUND)


def test_compute_bound_decode_batch_of_one():
    case("a card with 0.001 FLOP/s for each byte/s: every batch is bound by arithmetic")
    expect_equal(serving.compute_bound_decode_batch(SMALL, Sheet(1e-3, 1.0), 8), 1, read=BOUND)


BORDER = LlamaConfig(vocab_size=32, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=8, context_len=64)


def test_compute_bound_decode_batch_where_both_take_as_long():
    case("4 FLOPs for each byte, 12 positions: 5 sequences' arithmetic takes exactly as long as their memory traffic")
    expect_equal(serving.compute_bound_decode_batch(BORDER, Sheet(4.0, 1.0), 12), 5, read="the contract, under Returns")


def test_compute_bound_decode_batch_that_never_comes_closer():
    case("32 FLOPs for each byte, 4 positions: a sequence brings exactly as much arithmetic as memory traffic")
    expect_equal(serving.compute_bound_decode_batch(BORDER, Sheet(32.0, 1.0), 4), math.inf, read=BOUND)


def test_compute_bound_decode_batch_never():
    case("Llama 2 7B at 4,096 positions on an H100")
    answer = serving.compute_bound_decode_batch(LLAMA_2_7B, SHEETS["H100"], 4096)
    expect_equal(answer, math.inf, read="the contract: math.inf if no batch is large enough")


@pytest.mark.parametrize(("config", "name"), [(LLAMA_2_7B, "7B"), (LLAMA_2_70B, "70B")])
def test_compute_bound_decode_batch_is_the_border(config, name):
    case(f"Llama 2 {name} on an H100, 16 positions; one sequence less, and this many")
    card = SHEETS["H100"]
    batch = serving.compute_bound_decode_batch(config, card, 16)
    weights = 2 * (serving_parameters(config) - config.vocab_size * config.dim)
    own = 2 * config.dim + 4 * config.n_layers * config.n_kv_heads * config.head_dim * 16
    flops = weights - 2 * (2 * config.n_layers + 1) * config.dim + 4 * config.n_layers * config.dim * 16
    bound = [b * flops / card.peak_flops >= (weights + b * own) / card.bandwidth for b in (batch - 1, batch)]
    expect_equal(bound, [False, True], name="bound by arithmetic", answer=batch, read=BOUND)
    expect_equal(type(batch), int, name="type", answer=batch, read="the contract, under Returns")


def serving_parameters(config: LlamaConfig) -> int:
    return {4096: 6_738_415_616, 8192: 68_976_648_192}[config.dim]


# ---- BlockAllocator --------------------------------------------------------------------------------------------------


def test_BlockAllocator_by_hand():
    case("3 blocks, beside another pool of 5: allocate all, share the first, free it twice, allocate again")
    pool, _ = serving.BlockAllocator(3), serving.BlockAllocator(5)
    seen = {"n_free at first": pool.n_free}
    blocks = [pool.allocate() for _ in range(3)]
    seen["n_free when all are allocated"] = pool.n_free
    expect_equal(sorted(blocks), [0, 1, 2], name="blocks", read="the contract")
    expect_equal(pool.share(blocks[0]), blocks[0], name="share(block)", read="the contract, under share")
    seen["users of the first when it is shared"] = pool.n_users[blocks[0]]
    for when in ("freed once", "freed twice"):
        pool.free(blocks[0])
        seen |= {
            f"n_free when it is {when}": pool.n_free,
            f"users of the first when it is {when}": pool.n_users[blocks[0]],
        }
    expected = dict(zip(seen, [3, 0, 2, 0, 1, 1, 0], strict=True))
    expect_equal(seen, expected, name="", read="the contract")
    try:
        last = pool.allocate()
    except OutOfBlocks:
        expect_true(False, "a block that was freed is not handed out again", answer=pool.n_free, read="the contract")
    expect_equal(last, blocks[0], name="the only free block", read="the contract")


def test_BlockAllocator_out_of_blocks():
    case("2 blocks, both in use: allocate")
    pool = serving.BlockAllocator(2)
    pool.allocate(), pool.allocate()
    with expect_raises(OutOfBlocks, "2", read="the contract: the message says how many blocks the pool has"):
        pool.allocate()


@pytest.mark.parametrize("call", ["free", "share"])
def test_BlockAllocator_refuses_what_is_not_in_use(call):
    pool = serving.BlockAllocator(4)
    block = pool.allocate()
    pool.free(block)
    never = next(b for b in range(4) if b != block)
    for wrong, what in (
        (block, "was freed already"),
        (never, "was never allocated"),
        (4, "does not exist"),
        (-1, "does not exist"),
    ):
        case(f"4 blocks: {call} of block {wrong}, which {what}")
        with expect_raises(ValueError, str(wrong), read=RAISES):
            getattr(pool, call)(wrong)
        state = {"n_free": pool.n_free, "n_users": pool.n_users}
        expect_equal(state, {"n_free": 4, "n_users": [0] * 4}, name="", read=RAISES)


def test_BlockAllocator_never_leaks():
    case("3,000 random calls on 7 blocks, compared with a counter after each")
    pool, rng = serving.BlockAllocator(7), random.Random(0)
    users: Counter[int] = Counter()
    for _ in range(3000):
        call = rng.choice(("allocate", "share", "free", "free"))
        if call == "allocate":
            if len(users) == 7:
                with expect_raises(OutOfBlocks, read="the contract"):
                    pool.allocate()
                continue
            block = pool.allocate()
            expect_true(
                users[block] == 0, f"allocate gave block {block}, which is in use", answer=block, read="the contract"
            )
            users[block] = 1
        elif users:
            block = rng.choice(sorted(users))
            getattr(pool, call)(block)
            users[block] += 1 if call == "share" else -1
        users = +users
        expect_equal(pool.n_free, 7 - len(users), name=f"n_free after {call}", read="the contract")
        expect_equal(pool.n_users, [users[b] for b in range(7)], name=f"n_users after {call}", read="the contract")


# ---- PagedCache ------------------------------------------------------------------------------------------------------

TINY = SimpleNamespace(n_layers=2, n_heads=4, n_kv_heads=2, dim=12)


def make_cache(n_blocks: int = 8, block_size: int = 4, config=TINY):
    return serving.PagedCache(config, n_blocks, block_size)


def new_kv(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(2, n, 3, seed=seed), randn(2, n, 3, seed=1000 + seed)


def both_layers(cache, sequence: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Append other numbers to each of the two layers; returns the first layer's."""
    for layer in (0, 1):
        k, v = new_kv(n, seed)
        cache.append(sequence, layer, k + 10 * layer, v + 10 * layer)
    return new_kv(n, seed)


def expect_content(cache, sequence: int, layer: int, k: Tensor, v: Tensor, read: str = PAGE) -> None:
    """What the tables say is in the cache: neither ``read`` nor ``paged_attention``."""
    table, length = cache.tables[sequence], cache.lengths[sequence][layer]
    expect_equal(length, k.shape[1], name=f"lengths[{sequence}][{layer}]", read=read)
    places = [(table[p // cache.block_size], p % cache.block_size) for p in range(length)]
    for name, pool, expected in (("keys", cache.keys, k), ("values", cache.values, v)):
        vectors = [pool[layer, block, place] for block, place in places]
        found = torch.stack(vectors, 1) if vectors else expected[:, :0]
        expect_close(found, expected, name=f"{name} in layer {layer} of sequence {sequence}", read=read)


def test_PagedCache_by_hand():
    case("blocks of 4; two sequences get 3 + 2 and 6 positions, in turns")
    cache = make_cache()
    a, b = cache.new(), cache.new()
    expect_true(a != b, "two sequences have the same id", answer=(a, b), read=PAGE)
    parts = []
    for sequence, n, seed in ((a, 3, 1), (b, 6, 2), (a, 2, 3)):
        parts.append(both_layers(cache, sequence, n, seed))
    k, v = (torch.cat([parts[0][i], parts[2][i]], 1) for i in (0, 1))
    sizes = {"blocks of the first": len(cache.tables[a]), "blocks of the second": len(cache.tables[b])}
    sizes["free blocks"] = cache.allocator.n_free
    expected = {"blocks of the first": 2, "blocks of the second": 2, "free blocks": 4}
    expect_equal(sizes, expected, name="", read=PAGE)
    for layer in (0, 1):
        expect_content(cache, a, layer, k + 10 * layer, v + 10 * layer)
        expect_content(cache, b, layer, parts[1][0] + 10 * layer, parts[1][1] + 10 * layer)


@pytest.mark.parametrize("config", [SMALL, GPT2Config(vocab_size=64, context_len=32, dim=24, n_layers=3, n_heads=4)])
def test_PagedCache_sizes(config):
    case(f"{type(config).__name__} of {config.n_layers} layers, 5 blocks of 16, float16")
    cache = serving.PagedCache(config, 5, dtype=torch.float16)
    n_kv_heads = getattr(config, "n_kv_heads", config.n_heads)
    shape = (config.n_layers, 5, 16, n_kv_heads, config.dim // config.n_heads)
    shapes = {"keys.shape": tuple(cache.keys.shape), "values.shape": tuple(cache.values.shape)}
    expect_equal(shapes, dict.fromkeys(shapes, shape), name="", read="the contract, under Attributes")
    found = {"keys.dtype": cache.keys.dtype, "free blocks": cache.allocator.n_free}
    expect_equal(found, {"keys.dtype": torch.float16, "free blocks": 5}, name="", read="the contract, under Args")
    sequence = cache.new()
    k = torch.ones(n_kv_heads, 2, config.dim // config.n_heads)
    cache.append(sequence, 1, k, 2 * k)
    expect_equal(cache.lengths[sequence], [0, 2] + [0] * (config.n_layers - 2), name="lengths", read=PAGE)


def test_PagedCache_find_slots():
    case("blocks of 4: slots of positions 2 to 9 of a sequence that has 3")
    cache = make_cache()
    other, sequence = cache.new(), cache.new()
    both_layers(cache, other, 5)
    both_layers(cache, sequence, 3)
    slots = cache.find_slots(sequence, 2, 10)
    table = cache.tables[sequence]
    expect_equal(len(table), 3, name="blocks in the table", read=PAGE)
    expected = [4 * table[p // 4] + p % 4 for p in range(2, 10)]
    expect_equal(list(slots), expected, name="slots", read=PAGE)
    expect_equal(cache.find_slots(sequence, 3, 3), [], name="slots of no positions", read=PAGE)
    expect_equal(len(cache.tables[sequence]), 3, name="blocks in the table afterwards", read=PAGE)


def test_PagedCache_fork_copies_on_write():
    case("blocks of 4; 6 positions, fork, then 1 position more for the fork and 1 for the first")
    cache, copies = make_cache(), []
    copy_block = cache.copy_block
    cache.copy_block = lambda block, into: (copies.append((block, into)), copy_block(block, into))[1]
    a = cache.new()
    k, v = both_layers(cache, a, 6, 1)
    b = cache.fork(a)
    seen = {"free blocks after fork": cache.allocator.n_free, "copies after fork": len(copies)}
    expect_equal(seen, {"free blocks after fork": 6, "copies after fork": 0}, name="", read="the contract, under fork")
    old = list(cache.tables[a])
    more = [both_layers(cache, b, 1, 2), both_layers(cache, a, 1, 3)]
    seen = {
        "whether both still share the first block": cache.tables[a][0] == cache.tables[b][0] == old[0],
        "whether the first keeps its second block": cache.tables[a][1] == old[1],
        "copies": len(copies),
        "free blocks": cache.allocator.n_free,
    }
    expect_equal(seen, dict(zip(seen, [True, True, 1, 5], strict=True)), name="", read=COPY)
    for sequence, (new_k, new_v) in ((b, more[0]), (a, more[1])):
        for layer in (0, 1):
            whole = torch.cat([k, new_k], 1) + 10 * layer, torch.cat([v, new_v], 1) + 10 * layer
            expect_content(cache, sequence, layer, *whole, read=COPY)


def test_PagedCache_fork_at_a_border():
    case("blocks of 4; 8 positions, fork, 1 position more for the fork: nothing needs to be copied")
    cache = make_cache()
    a = cache.new()
    k, v = both_layers(cache, a, 8, 1)
    b = cache.fork(a)
    new_k, new_v = both_layers(cache, b, 1, 2)
    expect_equal(cache.allocator.n_free, 5, name="free blocks", read=COPY)
    expect_content(cache, a, 0, k, v, read=COPY)
    expect_content(cache, b, 0, torch.cat([k, new_k], 1), torch.cat([v, new_v], 1), read=COPY)
    cache.free(a)
    expect_content(cache, b, 1, torch.cat([k, new_k], 1) + 10, torch.cat([v, new_v], 1) + 10, read=COPY)


def test_PagedCache_new_on_shared_blocks():
    case("blocks of 4; a sequence that begins with the first block of another")
    cache = make_cache()
    a = cache.new()
    k, v = both_layers(cache, a, 6, 1)
    b = cache.new(blocks := cache.tables[a][:1])
    found = {"lengths": cache.lengths[b], "free blocks": cache.allocator.n_free}
    expect_equal(found, {"lengths": [4, 4], "free blocks": 6}, name="", read="the contract, under new")
    new_k, new_v = both_layers(cache, b, 2, 2)
    expect_equal(blocks, cache.tables[a][:1], name="the list that was given to new", read="the contract, under new")
    cache.free(a)
    expect_content(
        cache, b, 0, torch.cat([k[:, :4], new_k], 1), torch.cat([v[:, :4], new_v], 1), read="the contract, under new"
    )
    expect_equal(
        cache.allocator.n_free, 6, name="free blocks after the first is freed", read="the contract, under free"
    )


def test_PagedCache_copies_only_what_is_written_to():
    case(
        "blocks of 4; 9 positions in layer 0, fork, then 2 positions in layer 1 of the fork: only its first block "
        "changes"
    )
    cache, (k, v), (new_k, new_v) = make_cache(n_blocks=4), new_kv(9, 1), new_kv(2, 2)
    a = cache.new()
    cache.append(a, 0, k, v)
    b = cache.fork(a)
    try:
        cache.append(b, 1, new_k, new_v)
    except OutOfBlocks:
        free = cache.allocator.n_free
        expect_true(False, f"refused, though 1 copy is needed and {free} block is free", answer=free, read=COPY)
    shared = [x == y for x, y in zip(cache.tables[a], cache.tables[b], strict=True)]
    expect_equal(shared, [False, True, True], name="which blocks are still shared", read=COPY)
    for sequence, layer, keys, values in ((a, 0, k, v), (b, 0, k, v), (b, 1, new_k, new_v)):
        expect_content(cache, sequence, layer, keys, values, read=COPY)


def test_PagedCache_fork_between_two_layers():
    case("blocks of 4; 9 positions in layer 0, fork, then 9 in layer 1 of the fork: each of its blocks is written to")
    cache = make_cache()
    a, (k, v), (new_k, new_v) = cache.new(), new_kv(9, 1), new_kv(9, 2)
    cache.append(a, 0, k, v)
    b = cache.fork(a)
    expect_equal(cache.lengths[b], [9, 0], name="lengths of the fork", read="the contract: the same positions")
    cache.append(b, 1, new_k, new_v)
    shared = [x == y for x, y in zip(cache.tables[a], cache.tables[b], strict=True)]
    found = {"which blocks are still shared": shared, "free blocks": cache.allocator.n_free}
    expect_equal(found, {"which blocks are still shared": [False] * 3, "free blocks": 2}, name="", read=COPY)
    cache.append(a, 1, k, v)
    for sequence, layer, keys, values in ((a, 0, k, v), (a, 1, k, v), (b, 0, k, v), (b, 1, new_k, new_v)):
        expect_content(cache, sequence, layer, keys, values, read=COPY)


def test_PagedCache_takes_what_just_fits():
    case("3 blocks of 4: 6 positions, fork, 2 positions more for the fork, which need the last free block")
    cache = make_cache(n_blocks=3)
    a = cache.new()
    both_layers(cache, a, 6, 1)
    b = cache.fork(a)
    try:
        both_layers(cache, b, 2, 2)
    except OutOfBlocks:
        free = cache.allocator.n_free
        expect_true(False, f"refused, though 1 block is needed and {free} is free", answer=free, read=COPY)
    found = {"lengths": cache.lengths[b], "free blocks": cache.allocator.n_free}
    expect_equal(found, {"lengths": [8, 8], "free blocks": 0}, name="", read=COPY)


def state_of(cache) -> dict:
    tables = {i: list(t) for i, t in cache.tables.items()}
    lengths = {i: list(n) for i, n in cache.lengths.items()}
    return {"tables": tables, "lengths": lengths, "free blocks": cache.allocator.n_free}


def test_PagedCache_a_refused_append_changes_nothing():
    case("3 blocks of 4; 6 positions, fork; 5 positions more need a copy and a block, and 1 is free")
    cache = make_cache(n_blocks=3)
    a = cache.new()
    both_layers(cache, a, 6, 1)
    b = cache.fork(a)
    before, keys = state_of(cache), cache.keys.clone()
    with expect_raises(OutOfBlocks, "2", "1", read="the contract, under find_slots"):
        cache.append(b, 0, *new_kv(5))
    expect_equal(state_of(cache), before, name="", read="the contract, under find_slots")
    expect_close(cache.keys, keys, name="keys", read="the contract, under find_slots")
    both_layers(cache, b, 1, 2)  # what fits is still possible


def test_PagedCache_a_refused_append_without_copies_changes_nothing():
    case("3 blocks of 4; 6 positions; 7 more need 2 blocks, and 1 is free")
    cache = make_cache(n_blocks=3)
    a = cache.new()
    both_layers(cache, a, 6, 1)
    before = state_of(cache)
    with expect_raises(OutOfBlocks, "2", "1", read="the contract, under find_slots"):
        cache.append(a, 0, *new_kv(7))
    expect_equal(state_of(cache), before, name="", read="the contract, under find_slots")


def test_PagedCache_refuses():
    cache = make_cache()
    a, freed = cache.new(), cache.new()
    cache.free(freed)
    k, v = new_kv(3)
    for wrong in ((k[:, :, :2], v), (k[:1], v), (k, v[:, :2]), (k[0], v[0])):
        shapes = " and ".join(str(list(x.shape)) for x in wrong)
        case(f"2 key heads of width 3; append of keys and values of shapes {shapes}")
        with expect_raises(
            ValueError,
            str(list(wrong[0].shape if wrong[1] is v or wrong[0].dim() == 2 else wrong[1].shape)),
            read=RAISES,
        ):
            cache.append(a, 0, *wrong)
    for name, call in (
        ("free", lambda i: cache.free(i)),
        ("fork", lambda i: cache.fork(i)),
        ("append", lambda i: cache.append(i, 0, k, v)),
    ):
        for wrong_id in (freed, 999):
            case(f"{name} of sequence {wrong_id}, which does not exist")
            with expect_raises(ValueError, str(wrong_id), read=RAISES):
                call(wrong_id)
    case("an empty sequence, to which keys and values of wrong shapes were appended: every call was refused")
    found = {"free blocks": cache.allocator.n_free, "lengths": cache.lengths[a]}
    expect_equal(found, {"free blocks": 8, "lengths": [0, 0]}, name="", read="the contract, under append")
    case("two sequences are made and the second is freed; then a third is made: its id")
    expect_true(cache.new() not in (a, freed), "an old id is given again", answer=freed, read="the contract, under new")


def test_PagedCache_never_leaks():
    case("700 random calls on 12 blocks of 3, compared with plain lists after each")
    cache, rng = make_cache(12, 3), random.Random(1)
    model: dict[int, tuple[Tensor, Tensor]] = {}
    for step in range(700):
        call = rng.choice(("new", "append", "append", "append", "fork", "free"))
        if call == "new" and len(model) < 6:
            model[cache.new()] = torch.zeros(2, 0, 3), torch.zeros(2, 0, 3)
        elif model:
            sequence = rng.choice(sorted(model))
            if call == "append":
                before = state_of(cache)
                new = new_kv(rng.randint(1, 5), step)
                try:
                    for layer in (0, 1):
                        cache.append(sequence, layer, *(x + 10 * layer for x in new))
                    keys, values = (torch.cat(pair, 1) for pair in zip(model[sequence], new, strict=True))
                    model[sequence] = keys, values
                except OutOfBlocks:
                    expect_equal(state_of(cache), before, name="", read=COPY)
            elif call == "fork" and len(model) < 6:
                model[cache.fork(sequence)] = model[sequence]
            elif call == "free":
                cache.free(sequence)
                del model[sequence]
        in_use = {block for table in cache.tables.values() for block in table}
        expect_equal(12 - cache.allocator.n_free, len(in_use), name=f"blocks in use after {call} {step}", read=PAGE)
        if step % 20 == 0:
            for i, (k, v) in model.items():
                expect_content(cache, i, 1, k + 10, v + 10)
    for sequence in list(model):
        cache.free(sequence)
    expect_equal(cache.allocator.n_free, 12, name="free blocks after all sequences are freed", read=PAGE)


# ---- paged_attention -------------------------------------------------------------------------------------------------


def stored(lengths, groups=2, width=8, block_size=4, n_layers=2, rubbish=0.0, dtype=torch.float32, device="cpu"):
    """A cache without the learner's, its blocks in random order, and each sequence's plain keys and values ``[G, S,
    D]``.
    """
    config = SimpleNamespace(n_layers=n_layers, n_heads=groups, n_kv_heads=groups, dim=groups * width)
    counts = [-(-n // block_size) for n in lengths]
    n_blocks = sum(counts) + 3
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    shape = (n_layers, n_blocks, block_size, groups, width)
    keys, values = (torch.full(shape, rubbish, dtype=dtype) for _ in range(2))
    tables, plain = {}, {}
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True), 1):
        tables[i], order = order[:count], order[count:]
        k, v = (randn(n_layers, groups, n, width, seed=s + i).to(dtype) for s in (0, 100))
        plain[i] = k, v
        for p in range(n):
            keys[:, tables[i][p // block_size], p % block_size] = k[:, :, p]
            values[:, tables[i][p // block_size], p % block_size] = v[:, :, p]
    cache = BlockStore(config, n_blocks, block_size, dtype, device)
    cache.keys, cache.values, cache.tables = keys.to(device), values.to(device), tables
    cache.lengths = {i: [n] * n_layers for i, n in enumerate(lengths, 1)}
    return cache, plain


def plainly(q: Tensor, plain, sequences, layer: int) -> Tensor:
    """PyTorch's attention for each sequence alone, in float64."""
    out = []
    for query, i in zip(q, sequences, strict=True):
        k, v = (x[layer].double().repeat_interleave(len(query) // x.shape[1], 0) for x in plain[i])
        if k.shape[1] == 0:
            out.append(torch.zeros_like(query))
            continue
        out.append(scaled_dot_product_attention(query.double()[:, None], k, v)[:, 0].to(q.dtype))
    return torch.stack(out)


def test_paged_attention_by_hand():
    case("one head of width 1, blocks of 2; keys log 1, log 2, log 5 with values 8, 16, 32; query 1")
    cache, _ = stored([3], groups=1, width=1, block_size=2, n_layers=1)
    table = cache.tables[1]
    for p, (key, value) in enumerate(((0.0, 8.0), (math.log(2), 16.0), (math.log(5), 32.0))):
        cache.keys[0, table[p // 2], p % 2, 0, 0] = key
        cache.values[0, table[p // 2], p % 2, 0, 0] = value
    answer = serving.paged_attention(torch.ones(1, 1, 1), cache, [1])
    expect_close(answer, torch.tensor([[[25.0]]]), read=ATTEND)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 1), (3, 3)])
def test_paged_attention_ragged(heads, groups, layer):
    case(f"sequences of 5, 1, 13 and 8 positions in blocks of 4, H={heads} G={groups}, layer {layer}")
    cache, plain = stored([5, 1, 13, 8], groups)
    q, sequences = randn(5, heads, 8, seed=7), [3, 1, 4, 2, 3]
    answer = serving.paged_attention(q, cache, sequences, layer)
    expect_close(answer, plainly(q, plain, sequences, layer), read=ATTEND)


def test_paged_attention_in_the_middle_of_a_step():
    case("sequences of 5 and 9 positions in layer 0, and of one less in layer 1, which has not had its turn yet")
    cache, plain = stored([5, 9])
    cache.lengths = {1: [5, 4], 2: [9, 8]}
    before = {i: (k[:, :, :-1], v[:, :, :-1]) for i, (k, v) in plain.items()}
    q = randn(2, 4, 8, seed=7)
    expect_close(serving.paged_attention(q, cache, [1, 2], 1), plainly(q, before, [1, 2], 1), read=ATTEND)


@pytest.mark.parametrize("rubbish", [1e4, math.inf, math.nan])
def test_paged_attention_ignores_what_is_behind_a_sequence(rubbish):
    case(f"sequences of 3 and 6 positions in blocks of 4; everything else in the pool is {rubbish}")
    cache, plain = stored([3, 6], rubbish=rubbish)
    q = randn(2, 4, 8, seed=7)
    answer = serving.paged_attention(q, cache, [1, 2])
    expect_close(answer, plainly(q, plain, [1, 2], 0), read="the contract: whatever a block holds beyond")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_paged_attention_dtypes(dtype):
    case(f"sequences of 5 and 9 positions, {dtype}")
    cache, plain = stored([5, 9], dtype=dtype)
    q = randn(2, 4, 8, seed=7).to(dtype)
    answer = serving.paged_attention(q, cache, [2, 1])
    tolerance = {torch.float64: 1e-9, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    expect_close(answer, plainly(q, plain, [2, 1], 0), atol=tolerance, rtol=tolerance, read=ATTEND)


def test_paged_attention_without_positions():
    case("sequences of 0 and 2 positions")
    cache, plain = stored([0, 2])
    q = randn(2, 4, 8, seed=7)
    expect_close(serving.paged_attention(q, cache, [1, 2]), plainly(q, plain, [1, 2], 0), read="the contract: 0 for")


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(("n_parts", "heads", "groups"), [(1, 4, 2), (2, 4, 2), (4, 3, 1), (8, 2, 2)])
def test_paged_attention_in_parts(n_parts, heads, groups):
    case(f"sequences of 37, 1, 70 and 0 positions in blocks of 4, H={heads} G={groups}, n_parts={n_parts}")
    cache, plain = stored([37, 1, 70, 0], groups, rubbish=math.nan, device=DEVICE)
    q, sequences = randn(4, heads, 8, seed=7), [1, 2, 3, 4]
    answer = serving.paged_attention(q.to(DEVICE), cache, sequences, 1, n_parts=n_parts)
    expect_close(answer.cpu(), plainly(q, plain, sequences, 1), atol=2e-6, rtol=1e-5, read=PARTS)


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_paged_attention_in_parts_has_the_dtype_of_the_queries():
    case("sequences of 5 and 9 positions, float16, n_parts=2")
    cache, plain = stored([5, 9], dtype=torch.float16, device=DEVICE)
    q = randn(2, 4, 8, seed=7).half()
    answer = serving.paged_attention(q.to(DEVICE), cache, [2, 1], n_parts=2)
    expect_equal(answer.dtype, torch.float16, name="dtype", answer=answer, read="the contract, under Returns")
    expect_close(answer.cpu(), plainly(q, plain, [2, 1], 0), atol=5e-3, rtol=5e-3, read=PARTS)


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_paged_attention_in_parts_launches_the_kernel(monkeypatch):
    case("n_parts=4, then n_parts=1, one sequence of 40 positions with 2 key heads: the grid of each launch")
    grids, kernel = [], paged.paged_attention_kernel

    class Watched:
        def __getitem__(self, grid):
            grids.append(tuple(grid))
            return kernel[grid]

    monkeypatch.setattr(paged, "paged_attention_kernel", Watched())
    cache, _ = stored([40], device=DEVICE)
    for n_parts in (4, 1):
        serving.paged_attention(randn(1, 4, 8).to(DEVICE), cache, [1], n_parts=n_parts)
    expect_equal(grids, [(1, 2, 4), (1, 2, 1)], name="grids", read=PARTS)


# ---- PrefixTree ------------------------------------------------------------------------------------------------------


def test_PrefixTree_by_hand():
    case("blocks of 2: abcdef is remembered as blocks 5, 6, 7, and abxy as 5, 8")
    tree = serving.PrefixTree(2)
    new = [tree.insert("abcdef", [5, 6, 7]), tree.insert("abxy", [9, 8]), tree.insert("ab", [4])]
    expect_equal(new, [[5, 6, 7], [8], []], name="new blocks of each insert", read=PREFIX)
    found = {
        text: tree.match(text) for text in ("abcdef", "abcdefgh", "abcd", "abcx", "abxyz", "a", "", "xbcd", "cdef")
    }
    expected = {
        "abcdef": [5, 6, 7], "abcdefgh": [5, 6, 7], "abcd": [5, 6], "abcx": [5], "abxyz": [5, 8], "a": [], "": [],
        "xbcd": [], "cdef": [],
    }  # fmt: skip
    expect_equal(found, expected, name="matches", read=PREFIX)


def test_PrefixTree_of_token_lists():
    case("blocks of 3, tokens as lists; the last two tokens are no whole block")
    tree = serving.PrefixTree(3)
    expect_equal(tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [10, 11]), [10, 11], name="new blocks", read=PREFIX)
    found = [tree.match([1, 2, 3, 4, 5, 6, 7, 9]), tree.match((1, 2, 3, 4, 5))]
    expect_equal(found, [[10, 11], [10]], name="matches", read=PREFIX)
    seen = {"acquired": tree.acquire([1, 2, 3]), "evicted": tree.evict(9)}
    tree.release((1, 2, 3))
    expect_equal(seen, {"acquired": [10], "evicted": [11]}, name="", read=EVICT)


@pytest.mark.parametrize("blocks", [[1], [1, 2, 3]])
def test_PrefixTree_insert_refuses(blocks):
    case(f"7 tokens in blocks of 3 with {len(blocks)} blocks")
    tree = serving.PrefixTree(3)
    with expect_raises(ValueError, "2", str(len(blocks)), read=RAISES):
        tree.insert(list(range(7)), blocks)
    expect_equal(tree.match(list(range(7))), [], name="match afterwards", read=RAISES)


def test_PrefixTree_evicts_the_least_recently_used():
    case("blocks of 1: ab, ac, d; then ab is matched")
    tree = serving.PrefixTree(1)
    tree.insert("ab", [0, 2]), tree.insert("ac", [0, 3]), tree.insert("d", [1])
    tree.match("ab")
    none = {"evict(0)": tree.evict(0), "evict(-2)": tree.evict(-2)}
    expect_equal(none, {"evict(0)": [], "evict(-2)": []}, name="", read=EVICT)
    expect_equal(tree.evict(1), [3], name="evict(1)", read=EVICT)
    expect_equal(tree.evict(9), [1, 2, 0], name="evict(9)", read=EVICT)
    empty = {"match in an empty tree": tree.match("ab"), "evict in an empty tree": tree.evict(1)}
    expect_equal(empty, {when: [] for when in empty}, name="", read=EVICT)


def test_PrefixTree_a_longer_match_uses_the_shorter():
    case("blocks of 1: abc, then de; abc is matched as far as ab only")
    tree = serving.PrefixTree(1)
    tree.insert("abc", [0, 1, 2]), tree.insert("de", [3, 4])
    tree.match("abx")
    expect_equal(
        tree.evict(3),
        [2, 4, 3],
        name="evict(3)",
        read="the contract of ex-serving-prefixtree: match uses the nodes on its path",
    )


def test_PrefixTree_insert_and_acquire_are_uses():
    case("blocks of 1: a, b, c; then a is inserted again and b acquired and released")
    tree = serving.PrefixTree(1)
    for block, token in enumerate("abc"):
        tree.insert(token, [block])
    tree.insert("a", [9])
    tree.acquire("b"), tree.release("b")
    expect_equal(
        tree.evict(3),
        [2, 0, 1],
        name="evict(3)",
        read="the contract of ex-serving-prefixtree: match, insert and acquire",
    )


def test_PrefixTree_never_evicts_what_is_in_use():
    case("blocks of 1: abc and abd; ab is acquired twice, and once in another tree, before")
    tree, other = serving.PrefixTree(1), serving.PrefixTree(1)
    other.insert("ab", [0, 1]), other.acquire("ab")
    tree.insert("abc", [0, 1, 2]), tree.insert("abd", [0, 1, 3])
    seen = {"the first acquire": tree.acquire("ab"), "the second acquire": tree.acquire("ab")}
    seen["evict(9) with two users"] = tree.evict(9)
    for left in ("one user", "none"):
        tree.release("ab")
        seen[f"evict(9) with {left}"] = tree.evict(9)
    expected = dict(zip(seen, [[0, 1], [0, 1], [2, 3], [], [1, 0]], strict=True))
    expect_equal(seen, expected, name="", read=EVICT)


def test_PrefixTree_releases_what_was_acquired():
    case(
        "blocks of 1: abcd is acquired when only ab is known, then abcd is inserted and ab acquired, then abcd released"
    )
    tree = serving.PrefixTree(1)
    tree.insert("ab", [0, 1])
    seen = {"acquire('abcd')": tree.acquire("abcd")}
    tree.insert("abcd", [0, 1, 2, 3])
    seen["acquire('ab')"] = tree.acquire("ab")
    tree.release("abcd")
    seen["evict(9) after release('abcd')"] = tree.evict(9)
    tree.release("ab")
    seen["evict(9) after release('ab')"] = tree.evict(9)
    expected = dict(zip(seen, [[0, 1], [0, 1], [3, 2], [1, 0]], strict=True))
    expect_equal(seen, expected, name="", read="the contract, under release")


def test_PrefixTree_releases_the_oldest_acquire_first():
    case("blocks of 1: acquire ab while only a is known, insert ab, acquire ab again; one release: b is still in use")
    tree = serving.PrefixTree(1)
    tree.insert("a", [5])
    tree.acquire("ab")
    tree.insert("ab", [5, 6])
    tree.acquire("ab")
    tree.release("ab")
    expect_equal(tree.evict(2), [], name="evict(2) after one release", read="the contract, under release")
    tree.release("ab")
    expect_equal(tree.evict(2), [6, 5], name="evict(2) after both releases", read=EVICT)


def test_PrefixTree_refuses_a_second_release():
    case("blocks of 2: release before acquire, and a second release")
    tree = serving.PrefixTree(2)
    tree.insert("abcd", [0, 1])
    with expect_raises(ValueError, read=RAISES):
        tree.release("abcd")
    tree.acquire("abcd"), tree.release("abcd")
    with expect_raises(ValueError, read=RAISES):
        tree.release("abcd")
    expect_equal(tree.evict(2), [1, 0], name="evict(2)", read=EVICT)


def test_PrefixTree_random_scripts():
    case("2,000 random calls on a tree of blocks of 1, compared with a dictionary of prefixes after each")
    tree, rng = serving.PrefixTree(1), random.Random(2)
    known: dict[str, int] = {}
    used: dict[str, int] = {}
    held: list[tuple[str, list[str]]] = []
    n_made = 0
    for clock in range(1, 2001):
        text, call = "".join(rng.choice("ab") for _ in range(rng.randint(0, 5))), rng.randrange(5)
        prefixes = [text[: i + 1] for i in range(len(text))]
        if call == 0:
            blocks = [known.get(p, n_made + i) for i, p in enumerate(prefixes)]
            n_made += len(blocks)
            tree.insert(text, blocks)
            known |= {p: b for p, b in zip(prefixes, blocks, strict=True) if p not in known}
        path = [p for p in prefixes if p in known]
        if call < 3:
            used |= dict.fromkeys(path, clock)
            acquires = call == 2 and all(text != other for other, _ in held)
            answer = tree.acquire(text) if acquires else tree.match(text)
            expect_equal(answer, [known[p] for p in path], name=f"blocks of {text!r}", read=PREFIX)
            held += [(text, path)] if acquires else []
        elif call == 3 and held:
            text, _ = held.pop(rng.randrange(len(held)))
            tree.release(text)
        elif call == 4:
            _check_eviction(tree, known, used, held)


def _check_eviction(tree, known: dict, used: dict, held: list) -> None:
    """One block goes, and the dictionary says which ones may go."""
    busy = {p for _, path in held for p in path}
    leaves = [p for p in known if p not in busy and not any(p + c in known for c in "ab")]
    oldest = min((used[p] for p in leaves), default=None)
    allowed = [known[p] for p in leaves if used[p] == oldest]
    answer = tree.evict(1)
    expect_equal(len(answer), min(1, len(allowed)), name="number of blocks evicted", answer=answer, read=EVICT)
    if answer:
        expect_true(answer[0] in allowed, f"evicted {answer[0]}, expected one of {allowed}", answer=answer, read=EVICT)
        del known[next(p for p in leaves if known[p] == answer[0])]


# ---- Scheduler -------------------------------------------------------------------------------------------------------


def make_requests(*sizes: tuple[int, int]) -> list[Request]:
    return [Request(list(range(n)), new) for n, new in sizes]


def submitted(max_tokens: int, n_blocks: int, block_size: int, *sizes: tuple[int, int]):
    scheduler, requests = serving.Scheduler(max_tokens, n_blocks, block_size), make_requests(*sizes)
    for request in requests:
        scheduler.submit(request)
    return scheduler, requests


def shown(chunks: list[Chunk], requests: list[Request]) -> list[tuple[int, int]]:
    return [(requests.index(chunk.progress.request), chunk.n_tokens) for chunk in chunks]


def run_steps(scheduler, requests, n_steps: int = 10_000) -> list[list[tuple[int, int]]]:
    """The chunks of each step as (request, tokens), with invented new tokens."""
    steps = []
    for _ in range(n_steps):
        if not (scheduler.waiting or scheduler.running):
            break
        chunks = scheduler.schedule()
        steps.append(shown(chunks, requests))
        expect_true(chunks, "a step without chunks, and requests wait or run", answer=steps, read=BUDGET)
        for chunk in chunks:
            scheduler.advance(chunk, 0 if chunk.completes else None)
    return steps


def test_Scheduler_by_hand():
    case("max_tokens=6, plenty of blocks; prompts of 4, 9 and 2 tokens, for 3, 2 and 2 new ones")
    scheduler, requests = submitted(6, 20, 4, (4, 3), (9, 2), (2, 2))
    expected = [[(0, 4), (1, 2)], [(0, 1), (1, 5)], [(0, 1), (1, 2), (2, 2)], [(1, 1), (2, 1)]]
    expect_equal(run_steps(scheduler, requests), expected, name="the steps", read=BUDGET)


def test_Scheduler_decodes_before_prompts():
    case("max_tokens=3; prompts of 7, 1 and 1 tokens for 2, 3 and 2 new ones; the second arrives after one step")
    scheduler, requests = serving.Scheduler(3, 20, 4), make_requests((1, 4), (8, 2), (1, 2))
    scheduler.submit(requests[0])
    steps = []
    for i in range(7):
        steps.append(shown(chunks := scheduler.schedule(), requests))
        for chunk in chunks:
            scheduler.advance(chunk, 0 if chunk.completes else None)
        if i == 0:
            scheduler.submit(requests[1]), scheduler.submit(requests[2])
    expected = [[(0, 1)], [(0, 1), (1, 2)], [(0, 1), (1, 2)], [(0, 1), (1, 2)], [(1, 2), (2, 1)], [(1, 1), (2, 1)], []]
    expect_equal(steps, expected, name="the steps", read=BUDGET)


def test_Scheduler_lists_the_oldest_first():
    case(
        "max_tokens=4; prompts of 1, 6 and 1 tokens for 9, 2 and 2 new ones: whose chunks stand where in each "
        "step's list"
    )
    scheduler, requests = submitted(4, 20, 4, (1, 9), (6, 2), (1, 2))
    order = [[request for request, _ in step] for step in run_steps(scheduler, requests, 4)]
    expected = [[0, 1], [0, 1], [0, 1, 2], [0, 2]]
    expect_equal(order, expected, name="requests of each step", read=SCHEDULE)


def test_Scheduler_admits_in_order():
    case("max_tokens=8, 5 blocks of 2; prompts of 6, 6 and 1: the third would fit, the second does not yet")
    scheduler, requests = submitted(8, 5, 2, (6, 3), (6, 2), (1, 1))
    steps = run_steps(scheduler, requests)
    first, later = (next(i for i, step in enumerate(steps) if any(r == n for r, _ in step)) for n in (1, 2))
    expect_true(first <= later, "the third request was admitted before the second", answer=steps, read=BUDGET)
    expect_equal(steps[0], [(0, 6), (1, 2)], name="the first step", answer=steps, read=BUDGET)


def test_Scheduler_preempts_the_youngest():
    case("max_tokens=12, 4 blocks of 2; prompts of 3, 2 and 2 for 4, 4 and 4 new tokens")
    scheduler, requests = submitted(12, 4, 2, (3, 4), (2, 4), (2, 4))
    steps = run_steps(scheduler, requests)
    expected = [
        [(0, 3), (1, 2), (2, 2)],
        [(0, 1), (1, 1)],
        [(0, 1)],
        [(0, 1)],
        [(1, 4), (2, 3)],
        [(1, 1)],
        [(2, 4)],
        [(2, 1)],
    ]
    expect_equal(steps[:2], expected[:2], name="the first two steps", answer=steps, read=SCHEDULE)
    order = [next(i for i, step in enumerate(steps) for r, _ in step[::-1] if r == last) for last in (0, 1, 2)]
    expect_equal(order, sorted(order), name="order of the first steps", answer=steps, read=SCHEDULE)
    expect_equal(steps, expected, name="the steps", read=SCHEDULE)


def test_Scheduler_preempted_requests_wait_at_the_head():
    case("two of three running requests, which hold 2, 3 and 1 blocks, lose them, and a fourth waits already")
    scheduler, requests = submitted(12, 6, 2, (3, 5), (5, 4), (2, 4), (1, 1))
    scheduler.advance(*first_of(scheduler, requests))
    preempted = [scheduler.preempt() for _ in range(2)]
    youngest = [requests.index(progress.request) for progress in preempted]
    waiting = [requests.index(progress.request) for progress in scheduler.waiting]
    seen: dict[str, object] = {"preempted requests": youngest, "waiting requests": waiting}
    seen |= {"n_cached of those that wait": [p.n_cached for p in scheduler.waiting], "n_free": scheduler.n_free}
    seen["whether the same Progress waits"] = all(progress in scheduler.waiting for progress in preempted)
    expected = dict(zip(seen, [[2, 1], [1, 2, 3], [0, 0, 0], 4, True], strict=True))
    expect_equal(seen, expected, name="", read="the contract, under preempt")


def first_of(scheduler, requests):
    """Run a step, and note all of its chunks but the first, which is returned with its token."""
    chunks = scheduler.schedule()
    for chunk in chunks[1:]:
        scheduler.advance(chunk, 0 if chunk.completes else None)
    return chunks[0], 0 if chunks[0].completes else None


def test_Scheduler_nobody_is_admitted_while_blocks_are_taken():
    case("max_tokens=5, 5 blocks of 2; the second request is preempted: it is not admitted again in the same step")
    scheduler, requests = submitted(5, 5, 2, (4, 3), (5, 2))
    steps = run_steps(scheduler, requests, 3)
    expected = [[(0, 4), (1, 1)], [(0, 1)], [(0, 1), (1, 4)]]
    expect_equal(steps, expected, name="the first three steps", read=SCHEDULE)


def test_Scheduler_submit_refuses_what_never_fits():
    scheduler = serving.Scheduler(8, 4, 4)
    case("4 blocks of 4: 10 tokens and 30 new ones, which need 39 positions")
    with expect_raises(ValueError, "10", "4", read="the contract, under submit"):
        scheduler.submit(Request(list(range(10)), 30))
    case("4 blocks of 4: 10 tokens and 7 new ones need 16 positions; with 8 new ones, 17")
    try:
        scheduler.submit(Request(list(range(10)), 7))
    except ValueError:
        problem = "refused, though 16 positions fit into 4 blocks of 4: the last new token is never cached"
        expect_true(False, problem, answer=scheduler.n_free, read="the contract, under submit")
    with expect_raises(ValueError, "5", "4", read="the contract, under submit"):
        scheduler.submit(Request(list(range(10)), 8))
    expect_equal(len(scheduler.waiting), 1, name="waiting requests", read=RAISES)


def test_Scheduler_submit_refuses_a_request_that_runs():
    case("the same request twice, while it waits and while it runs; afterwards it may come again")
    scheduler, requests = submitted(8, 4, 4, (2, 1))
    with expect_raises(ValueError, read=RAISES):
        scheduler.submit(requests[0])
    run_steps(scheduler, requests)
    scheduler.submit(requests[0])
    expect_equal(run_steps(scheduler, requests), [[(0, 2)]], name="the steps of the second time", read=RAISES)


def test_Scheduler_random_scripts():
    case("100 schedulers, 2,500 random requests, some cancelled: limits after every step, and every request ends")
    rng = random.Random(3)
    for _ in range(100):
        max_tokens, n_blocks, size = rng.randint(1, 12), rng.randint(2, 10), rng.randint(1, 4)
        _drive(serving.Scheduler(max_tokens, n_blocks, size), rng, 25)


def _drive(scheduler, rng: random.Random, n_requests: int) -> None:
    most, open_, n_new = scheduler.n_blocks * scheduler.block_size, {}, 0
    for _ in range(5000):
        if n_new < n_requests and rng.random() < 0.5:
            n_prompt = rng.randint(1, most)
            request = Request([0] * n_prompt, rng.randint(1, most + 1 - n_prompt))
            scheduler.submit(request)
            open_[request], n_new = 0, n_new + 1
        if open_ and rng.random() < 0.03:
            request = rng.choice(list(open_))
            expect_true(scheduler.cancel(request), "cancel did not find a request", answer=0, read=BUDGET)
            del open_[request]
        oldest, chunks = next(iter(open_), None), scheduler.schedule()
        tokens = sum(chunk.n_tokens for chunk in chunks)
        expect_true(tokens <= scheduler.max_tokens, f"a step of {tokens} tokens", answer=tokens, read=BUDGET)
        for progress, blocks in scheduler.running.items():
            n = progress.n_cached + sum(chunk.n_tokens for chunk in chunks if chunk.progress is progress)
            needed = -(-n // scheduler.block_size)
            expect_equal(blocks, needed, name=f"blocks of a request with {n} positions", read=BUDGET)
        expect_true(scheduler.n_free >= 0, f"n_free = {scheduler.n_free}", answer=scheduler.n_free, read=BUDGET)
        took_part = [chunk.progress.request for chunk in chunks]
        expect_true(
            oldest is None or oldest in took_part, "the oldest request is not in the step", answer=tokens, read=BUDGET
        )
        ages = [list(open_).index(request) for request in took_part]
        expect_equal(ages, sorted(ages), name="ages of the requests in a step", read=BUDGET)
        for chunk in chunks:
            token = 1 if chunk.completes else None
            scheduler.advance(chunk, token)
            open_[chunk.progress.request] += token is not None
            if open_[chunk.progress.request] == chunk.progress.request.max_new_tokens:
                del open_[chunk.progress.request]
        if n_new == n_requests and not open_:
            break
    left = {"requests left": len(open_), "free blocks": scheduler.n_free}
    expect_equal(left, {"requests left": 0, "free blocks": scheduler.n_blocks}, name="", read=BUDGET)


# ---- Engine ----------------------------------------------------------------------------------------------------------


def small_model(kind: str = "llama"):
    torch.manual_seed(5)
    gpt2 = GPT2Config(vocab_size=64, context_len=64, dim=32, n_layers=2, n_heads=4)
    model: Llama | GPT2 = Llama(SMALL) if kind == "llama" else GPT2(gpt2)
    for p in model.parameters():
        p.data *= 3 if p.dim() > 1 else 1  # so that the next token is no near tie
    return model.double().eval()


def alone(model, request: Request) -> list[int]:
    """The tokens of a request by itself: chapter 4's generate, or a loop over the whole sequence for GPT-2."""
    if isinstance(model, Llama):
        generator = torch.Generator().manual_seed(request.seed or 0)
        prompt = torch.tensor([request.tokens])
        n, temperature, k, p = request.max_new_tokens, request.temperature, request.top_k, request.top_p
        return [int(t) for t in generate(model, prompt, n, temperature, top_k=k, top_p=p, generator=generator)]
    tokens = list(request.tokens)
    with torch.no_grad():
        for _ in range(request.max_new_tokens):
            logits = model(torch.tensor([tokens]))[0][0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(request.tokens) :]


def random_requests(n: int, seed: int, sampled: bool) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(64) for _ in range(rng.randint(1, 20))],
            rng.randint(1, 10),
            temperature=0.8 if sampled and i % 2 else 0.0,
            seed=i,
            top_p=0.4 if sampled and i % 4 == 1 else None,
            top_k=2 if sampled and i % 4 == 3 else None,
        )
        for i in range(n)
    ]


def collect(requests, events) -> list[list[int]]:
    found: dict[Request, list[int]] = {request: [] for request in requests}
    for request, token in events:
        found[request].append(token)
    return [found[request] for request in requests]


def stepped(engine, n_steps: int) -> list[tuple[Request, int]]:
    """The new tokens of some steps.

    A cache that is full although the scheduler counts free blocks is a wrong answer.
    """
    events = []
    for _ in range(n_steps):
        try:
            events += engine.step()
        except OutOfBlocks:
            text = "a step found too few free blocks in the cache, though the scheduler had counted them"
            expect_true(False, text, answer=len(events), read=STEPS)
    return events


def test_Engine_takes_steps():
    case("prompts of 5 and 3 tokens, max_tokens=6: tokens of each step, and free blocks after it")
    model, requests = small_model(), [Request([1, 2, 3, 4, 5], 2), Request([9, 8, 7], 1)]
    engine = serving.Engine(model, serving.Scheduler(6, 10, 2))
    for request in requests:
        engine.submit(request)
    steps: list[list[int]] = []
    free: dict[str, list[int]] = {"cache": [], "scheduler": []}
    passes: list[int] = []
    model.norm.register_forward_pre_hook(lambda *_: passes.append(len(steps)))
    while engine.is_busy and len(steps) < 10:
        new = engine.step()
        for request, token in new:
            kind = type(request).__name__
            told = f"a token comes with a {kind}, expected the Request"
            expect_true(isinstance(request, Request), told, answer=kind, read=STEPS)
            kind = type(token).__name__
            expect_true(type(token) is int, f"a token is an int, not a {kind}", answer=kind, read=STEPS)
        steps.append([requests.index(request) for request, _ in new])
        free["cache"].append(engine.cache.allocator.n_free)
        free["scheduler"].append(engine.scheduler.n_free)
    expect_equal(steps, [[0], [0, 1]], name="whose tokens each step returned", read=STEPS)
    expect_equal(passes, [0, 1], name="the steps in which the model ran", read=STEPS)
    expected = {"cache": [6, 10], "scheduler": [6, 10]}
    expect_equal(free, expected, name="free blocks after each step", answer=(steps, free), read=STEPS)
    expect_equal(engine.step(), [], name="a step without requests", read=STEPS)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_Engine_gives_what_each_gets_alone(kind):
    case(f"{kind}: 9 greedy requests together, max_tokens=16, 10 blocks of 4")
    model, requests = small_model(kind), random_requests(9, 1, sampled=False)
    engine = serving.Engine(model, serving.Scheduler(16, 10, 4))
    for request in requests:
        engine.submit(request)
    answer = collect(requests, stepped(engine, 300))
    expect_equal(answer, [alone(model, request) for request in requests], name="tokens", read=STEPS)


def test_Engine_gives_twins_the_same_tokens():
    case("2 sampled requests with the same prompt and seed, together; then once more, with another global seed")
    model, runs = small_model(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine = serving.Engine(model, serving.Scheduler(8, 20, 4))
        twins = [Request([3, 1, 4], 8, temperature=1.5, seed=7) for _ in range(2)]
        for request in twins:
            engine.submit(request)
        runs.append(collect(twins, stepped(engine, 20)))
    expect_equal(runs[0][1], runs[0][0], name="tokens of the second twin", answer=runs, read=STEPS)
    expect_equal(runs[1], runs[0], name="tokens of the second run", answer=runs, read=STEPS)
    expect_equal(runs[0][0], alone(model, twins[0]), name="tokens", read=STEPS)


@pytest.mark.parametrize("n_blocks", [40, 8])
def test_Engine_samples_with_each_requests_own_numbers(n_blocks):
    case(
        f"8 requests, half of them sampled, with seeds; {n_blocks} blocks of 4, so that "
        f"{'none is' if n_blocks == 40 else 'some are'} preempted"
    )
    model, requests = small_model(), random_requests(8, 2, sampled=True)
    engine = serving.Engine(model, serving.Scheduler(10, n_blocks, 4))
    for request in requests:
        engine.submit(request)
    answer = collect(requests, stepped(engine, 400))
    expect_equal(answer, [alone(model, request) for request in requests], name="tokens", read=STEPS)


def test_Engine_ends_at_eos():
    case("a request whose third token is its eos_id: it ends there, and its blocks are free")
    model = small_model()
    expected = alone(model, Request([3, 1, 4], 8))
    stop = next(i for i, token in enumerate(expected) if token not in expected[:i] and i >= 1)
    request = Request([3, 1, 4], 8, eos_id=expected[stop])
    engine = serving.Engine(model, serving.Scheduler(8, 8, 4))
    engine.submit(request)
    tokens = [token for _, token in stepped(engine, 10)]
    expect_equal(tokens, expected[: stop + 1], name="tokens", read=STEPS)
    expect_equal(engine.cache.allocator.n_free, 8, name="free blocks", answer=tokens, read=STEPS)


def test_Engine_random_cancellations_never_leak():
    case("40 requests on 9 blocks of 4, some cancelled between steps: blocks of cache and scheduler after every step")
    model, rng = small_model().float(), random.Random(4)
    engine = serving.Engine(model, serving.Scheduler(12, 9, 4))
    waiting, open_, n_tokens = random_requests(40, 4, sampled=True), [], []
    for _ in range(400):
        if waiting and rng.random() < 0.7:
            open_.append(waiting.pop())
            engine.submit(open_[-1])
        if open_ and rng.random() < 0.15:
            engine.cancel(open_.pop(rng.randrange(len(open_))))
        n_tokens.append(len(engine.step()))
        free = engine.cache.allocator.n_free, engine.scheduler.n_free
        expect_equal(free[0], free[1], name="free blocks of the cache", answer=(n_tokens, free), read=STEPS)
        if not waiting and not engine.is_busy:
            break
    seen = {"is_busy": engine.is_busy, "free blocks": engine.cache.allocator.n_free}
    seen["sequences in the cache"] = len(engine.cache.tables)
    expected = dict(zip(seen, [False, 9, 0], strict=True))
    expect_equal(seen, expected, name="", answer=n_tokens, read=STEPS)


# ---- generate_many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_many_gives_what_each_gets_alone(kind):
    case(f"{kind}: 10 requests, max_tokens=14, 9 blocks of 4")
    model, requests = small_model(kind), random_requests(10, 6, sampled=kind == "llama")
    events = list(serving.generate_many(model, requests, serving.Scheduler(14, 9, 4)))
    answer = collect(requests, events)
    expect_equal(
        answer, [alone(model, request) for request in requests], name="tokens", read="the contract, under Yields"
    )


def test_generate_many_runs_requests_together():
    case("4 prompts of one token for 5 new ones, max_tokens=8: the order of the tokens")
    model, requests = small_model(), [Request([i], 5) for i in range(4)]
    events = list(serving.generate_many(model, requests, serving.Scheduler(8, 16, 4)))
    order = [requests.index(request) for request, _ in events]
    expect_equal(
        order,
        [0, 1, 2, 3] * 5,
        name="whose token comes when",
        answer=events_of(requests, events),
        read="the contract, under Yields",
    )


def events_of(requests, events) -> list[tuple[int, int]]:
    return [(requests.index(request), token) for request, token in events]


def test_generate_many_yields_as_tokens_come():
    case(
        "3 requests from a generator; the caller stops after 4 tokens: forward passes so far, and free blocks "
        "afterwards; then once more from a list"
    )
    model, requests = small_model(), [Request([i, 7], 6) for i in range(3)]
    calls, scheduler = [], serving.Scheduler(8, 16, 4)
    hook = model.norm.register_forward_pre_hook(lambda *_: calls.append(1))
    events = serving.generate_many(model, (request for request in requests), scheduler)
    got = list(itertools.islice(events, 4))
    expect_equal(len(got), 4, name="tokens", answer=events_of(requests, got), read="the contract, under Yields")
    seen = {"forward passes": len(calls), "whether blocks are in use": scheduler.n_free < 16}
    events.close()
    hook.remove()
    seen |= {"free blocks afterwards": scheduler.n_free, "running afterwards": len(scheduler.running)}
    seen["waiting afterwards"] = len(scheduler.waiting)
    events = serving.generate_many(model, requests, again := serving.Scheduler(8, 16, 4))
    next(events), events.close()
    seen["free blocks after the list"] = again.n_free
    expected = dict(zip(seen, [2, True, 16, 0, 0, 16], strict=True))
    answer = [events_of(requests, got), seen]
    expect_equal(seen, expected, name="", answer=answer, read="the contract, under Yields")


def test_generate_many_refuses_and_cleans_up():
    case("a good request, then one that cannot fit: an error, and nothing is left in the scheduler")
    model, scheduler = small_model(), serving.Scheduler(8, 4, 4)
    good = Request([1, 2], 3)
    with expect_raises(ValueError, read="the contract, under Yields"):
        list(serving.generate_many(model, [good, Request([1] * 15, 9)], scheduler))
    left = {"waiting requests": len(scheduler.waiting), "running requests": len(scheduler.running)}
    expect_equal(left, dict.fromkeys(left, 0), name="", read="the contract, under Yields")
    with expect_raises(ValueError, "99", read="the contract, under Yields"):
        list(serving.generate_many(model, [Request([99], 3)], scheduler))


def test_generate_many_leaves_the_requests_of_others_alone():
    case(
        "two requests wait in the scheduler already, and one of these is among three: who is still there after the "
        "error"
    )
    model, scheduler = small_model(), serving.Scheduler(8, 16, 4)
    theirs, ours = [Request([5], 3), Request([6], 3)], [Request([1, 2], 3), Request([3], 2)]
    for request in theirs:
        scheduler.submit(request)
    with expect_raises(ValueError, read="the contract, under Yields"):
        list(serving.generate_many(model, [ours[0], theirs[0], ours[1]], scheduler))
    there = {
        f"the other's request {i} is there": scheduler.find(request) is not None for i, request in enumerate(theirs)
    }
    there |= {
        f"this call's request {i} is there": scheduler.find(request) is not None for i, request in enumerate(ours)
    }
    expected = dict(zip(there, [True, True, False, False], strict=True))
    expect_equal(there, expected, name="", read="the contract, under Yields")


def transformers_tokens() -> Tensor:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaForCausalLM

    model, prompts = transformers_model(LlamaForCausalLM)
    rows = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        rows.append(out[0, len(prompt) :])
    return torch.stack(rows)


def transformers_model(factory):
    from transformers import LlamaConfig as TheirConfig

    torch.manual_seed(11)
    config = TheirConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return factory(config).eval(), [[5, 9, 33], [1], list(range(20, 33))]


@oracle
@pytest.mark.time_limit(60)
def test_generate_many_equals_transformers():
    case("3 prompts on Transformers' Llama: its greedy generate of each alone")
    from transformers import LlamaForCausalLM

    from lib.llama import convert_hf_state_dict

    theirs, prompts = transformers_model(LlamaForCausalLM)
    model = Llama(SMALL)
    model.load_state_dict(convert_hf_state_dict(theirs.state_dict(), SMALL))
    requests = [Request(prompt, 8) for prompt in prompts]
    answer = collect(requests, serving.generate_many(model, requests, serving.Scheduler(10, 8, 4)))
    expect_equal(answer, transformers_tokens().tolist(), name="tokens", read="the contract, under Yields")


# ---- speculative_step ------------------------------------------------------------------------------------------------


def distribution(target: Tensor, draft: Tensor, n: int, seed: int = 0) -> Counter[tuple[int, ...]]:
    """How often each beginning of at most two tokens comes out of n steps."""
    generator, target, draft = torch.Generator().manual_seed(seed), target.clone(), draft.clone()
    counts: Counter[tuple[int, ...]] = Counter()
    for drafted in torch.multinomial(draft, n, replacement=True, generator=generator).T:
        counts[tuple(serving.speculative_step(target, draft, drafted, generator).tolist()[:2])] += 1
    return counts


P = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.05, 0.25], [0.2, 0.2, 0.6]])
Q = torch.tensor([[0.6, 0.25, 0.15], [0.15, 0.7, 0.15]])


@pytest.mark.time_limit(30)
def test_speculative_step_has_the_targets_distribution():
    case("k=2 of 3 tokens, 1,500 steps with a fixed seed: how often the first token is 0, 1, 2")
    n = 1500
    counts: Counter[int] = Counter()
    for pair, count in distribution(P, Q, n).items():
        counts[pair[0]] += count
    share = torch.tensor([counts[token] / n for token in range(3)])
    error = 4.5 * (P[0] * (1 - P[0]) / n).sqrt()
    off = (share - P[0]).abs()
    text = f"shares {[round(s, 3) for s in share.tolist()]}, expected {[round(p, 3) for p in P[0].tolist()]}"
    expect_true(bool((off < error).all()), text, answer=share, read=KEEP)


@pytest.mark.time_limit(30)
def test_speculative_step_second_token():
    case("k=2 of 3 tokens, 1,500 steps with a fixed seed: the second token of steps that have one is drawn from row 1")
    counts: Counter[int] = Counter()
    for pair, count in distribution(P, Q, 1500, seed=1).items():
        if len(pair) > 1:
            counts[pair[1]] += count
    n = sum(counts.values())
    share = torch.tensor([counts[token] / max(n, 1) for token in range(3)])
    error = 4.5 * (P[1] * (1 - P[1]) / max(n, 1)).sqrt()
    kept = torch.minimum(P[0], Q[0]).sum().item()
    text = f"shares {[round(s, 3) for s in share.tolist()]}, expected {[round(p, 3) for p in P[1].tolist()]}"
    expect_true(bool(((share - P[1]).abs() < error).all()), text, answer=share, read=REST)
    expect_true(abs(n / 1500 - kept) < 0.058, f"{n / 1500:.3f} of the first drafts are kept, expected {kept:.3f}",
                answer=torch.tensor(n / 1500), read=KEEP)  # fmt: skip


@pytest.mark.time_limit(30)
def test_speculative_step_last_token():
    case("k=1 with a draft equal to the target, 800 steps: always two tokens, the second from the last row")
    counts = distribution(P[:2], P[:1], 800, seed=2)
    lengths: Counter[int] = Counter()
    for pair, count in counts.items():
        lengths[len(pair)] += count
    expect_equal(dict(lengths), {2: 800}, name="steps by number of tokens", read=KEEP)
    share = torch.tensor([sum(c for pair, c in counts.items() if pair[1] == t) / 800 for t in range(3)])
    error = 4.5 * (P[1] * (1 - P[1]) / 800).sqrt()
    text = f"shares {[round(s, 3) for s in share.tolist()]}, expected {[round(p, 3) for p in P[1].tolist()]}"
    expect_true(bool(((share - P[1]).abs() < error).all()), text, answer=share, read=REST)


def one_hot(*tokens: int) -> Tensor:
    return torch.eye(6)[list(tokens)]


@pytest.mark.parametrize(
    ("target", "drafted", "expected"),
    [
        ((3, 1, 4, 1), (3, 1, 4), [3, 1, 4, 1]),
        ((3, 1, 4, 1), (3, 5, 4), [3, 1]),
        ((3, 1, 4, 1), (0, 1, 4), [3]),
        ((2,), (), [2]),
    ],
)
def test_speculative_step_greedy(target, drafted, expected):
    case(f"one-hot rows: the target's tokens are {target}, the drafted ones {drafted}")
    tokens = torch.tensor(drafted, dtype=torch.int64)
    draft = one_hot(*drafted) if drafted else torch.zeros(0, 6)
    answer = serving.speculative_step(one_hot(*target), draft, tokens, torch.Generator().manual_seed(0))
    expect_equal(answer.tolist(), expected, name="tokens", read=KEEP)
    expect_equal(answer.dtype, torch.int64, name="dtype", answer=answer, read="the contract, under Returns")


def test_speculative_step_never_keeps_what_the_target_never_says(monkeypatch):
    case("a draft with p = 0, and uniform numbers that are all 0, the smallest that torch.rand draws")
    for name, zeros in (("rand", torch.zeros), ("rand_like", torch.zeros_like)):
        monkeypatch.setattr(torch, name, lambda *args, _zeros=zeros, generator=None, **more: _zeros(*args, **more))
    target, draft = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    answer = serving.speculative_step(target, draft, torch.tensor([0]), torch.Generator().manual_seed(0))
    expect_equal(answer.tolist(), [2], name="tokens", read=KEEP)


def test_speculative_step_where_p_and_q_differ_by_rounding(monkeypatch):
    case("q = [0.5, 0.5] and p one rounding below, and uniform numbers that are all the largest that torch.rand draws")
    largest = 1 - 2**-24
    for name, ones in (("rand", torch.ones), ("rand_like", torch.ones_like)):
        monkeypatch.setattr(
            torch, name, lambda *args, _ones=ones, generator=None, **more: _ones(*args, **more) * largest
        )
    target, draft = torch.tensor([[0.5 - 2**-25] * 2, [0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    try:
        answer = serving.speculative_step(target, draft, torch.tensor([0]), torch.Generator().manual_seed(0))
    except RuntimeError as error:
        problem = (
            "the draft is not kept, and max(0, p - q) is 0 for all tokens, because p and q differ by rounding only"
        )
        expect_true(False, problem, answer=type(error).__name__, read="the contract, under Returns")
    expect_true(len(answer) in (1, 2), f"{len(answer)} tokens, expected 1 or 2", answer=answer, read=KEEP)


def test_speculative_step_without_a_generator():
    case("20 calls without a generator, k=4 of 50 tokens, three times: with the global seeds 1, 1 and 2")
    target, draft = (randn(n, 50, seed=n).softmax(-1) for n in (5, 4))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        calls = [serving.speculative_step(target, draft, torch.tensor([3, 9, 20, 41])) for _ in range(20)]
        runs.append([call.tolist() for call in calls])
    seen = {
        "whether seed 1 gives the same tokens twice": runs[0] == runs[1],
        "whether seed 2 gives those of seed 1": runs[0] == runs[2],
        "whether all calls give the same": all(call == runs[0][0] for call in runs[0]),
    }
    expected = dict(zip(seen, [True, False, False], strict=True))
    expect_equal(seen, expected, name="", read="the contract, under Args")


def test_speculative_step_uses_the_generator():
    case("two calls with generators of one seed, k=4 of 50 tokens")
    target, draft = (randn(n, 50, seed=n).softmax(-1) for n in (5, 4))
    drafted = torch.tensor([3, 9, 20, 41])
    torch.manual_seed(1)
    first = [
        serving.speculative_step(target, draft, drafted, torch.Generator().manual_seed(s)).tolist() for s in range(20)
    ]
    torch.manual_seed(2)
    again = [
        serving.speculative_step(target, draft, drafted, torch.Generator().manual_seed(s)).tolist() for s in range(20)
    ]
    expect_equal(again, first, name="tokens of 20 calls", read="the contract, under Args")


def test_speculative_step_changes_nothing():
    case("the three arguments after the call")
    target, draft, drafted = P.clone(), Q.clone(), torch.tensor([0, 1])
    for seed in range(10):
        serving.speculative_step(target, draft, drafted, torch.Generator().manual_seed(seed))
    expect_close((target, draft, drafted), (P, Q, torch.tensor([0, 1])), name="arguments", read=REST)


# ---- expected_tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "n_drafted", "expected"),
    [(0.5, 3, 1.875), (0.8, 4, 3.3616), (0.0, 5, 1.0), (1.0, 5, 6.0), (0.3, 0, 1.0), (1, 2, 3.0)],
)
def test_expected_tokens(acceptance, n_drafted, expected):
    case(f"acceptance {acceptance}, {n_drafted} drafted tokens")
    try:
        answer = serving.expected_tokens(acceptance, n_drafted)
    except ValueError:
        expect_true(False, "a probability is refused", answer=acceptance, read=RAISES)
    expect_close(answer, expected, read=MEAN)


def test_expected_tokens_near_one():
    case("acceptance 1 - 1e-12, 4 drafted tokens")
    answer = serving.expected_tokens(1 - 1e-12, 4)
    expect_close(answer, 5.0, rtol=1e-9, read=MEAN)
    told = f"the mean is a {type(answer).__name__}, expected a float"
    expect_true(isinstance(answer, int | float), told, answer=answer, read="the contract, under Returns")


@pytest.mark.parametrize("acceptance", [-0.1, 1.2])
def test_expected_tokens_refuses(acceptance):
    case(f"acceptance {acceptance}")
    with expect_raises(ValueError, (str(acceptance), "acceptance"), read=RAISES):
        serving.expected_tokens(acceptance, 3)


# ---- fill_static_inputs ----------------------------------------------------------------------------------------------


class ListedBlocks(BlockStore):
    """A paged cache without the learner's: blocks are taken in order, and copied if another table has them, too."""

    def __init__(self, config, n_blocks: int = 8, block_size: int = 4):
        super().__init__(config, n_blocks, block_size, torch.float64)
        self.unused = list(range(n_blocks))

    def find_slots(self, sequence: int, start: int, end: int) -> list[int]:
        table, size = self.tables[sequence], self.block_size
        for i in range(start // size, -(-end // size)):
            if i == len(table):
                table.append(self.unused.pop(0))
            elif sum(table[i] in other for other in self.tables.values()) > 1:
                old, table[i] = table[i], self.unused.pop(0)
                self.copy_block(old, table[i])
        return [table[p // size] * size + p % size for p in range(start, end)]

    def admit(self, sequence: int, n: int) -> list[int]:
        """Start a sequence with n positions; returns their slots."""
        self.tables[sequence], self.lengths[sequence] = [], [n] * len(self.keys)
        return self.find_slots(sequence, 0, n)

    def end(self, sequence: int) -> None:
        """Forget a sequence; the next one that needs blocks gets these."""
        del self.lengths[sequence]
        self.unused = self.tables.pop(sequence) + self.unused


def filled(inputs: StaticInputs, cache, sequences: list[int], tokens: list[int]) -> StaticInputs:
    """The buffers after a call, in which each must be where it was, with its shape and dtype."""
    before = {name: (x, x.data_ptr(), list(x.shape), x.dtype) for name, x in vars(inputs).items()}
    serving.fill_static_inputs(inputs, cache, sequences, tokens)
    state = {name: getattr(inputs, name) for name in before}
    moved: list[str] = []
    exchanged: list[str] = []
    for name, (buffer, address, shape, dtype) in before.items():
        now = state[name]
        if not isinstance(now, Tensor):
            told = f"inputs.{name} is now a {type(now).__name__}, which no kernel can read"
            expect_true(False, told, answer=state, read="the contract, under Returns")
        told = f"inputs.{name} is now {list(now.shape)}, and a replay reads {shape}"
        expect_true(list(now.shape) == shape, told, answer=state, read="the contract, under Returns")
        expect_equal(now.dtype, dtype, name=f"inputs.{name}.dtype", answer=state, read="the contract, under Returns")
        if now.data_ptr() != address:
            (exchanged if now is buffer else moved).append(f"inputs.{name}")
    told = f"{', '.join(moved)}: another tensor than before, and a replay reads the memory of the old one"
    expect_true(not moved, told, answer=state, read="the contract, under Returns")
    told = f"{', '.join(exchanged)}: the tensor of before with other memory, and a replay reads the old memory"
    expect_true(not exchanged, told, answer=state, read="the contract, under Returns")
    return inputs


def test_fill_static_inputs_by_hand():
    case("4 rows, blocks of 4: token 30 for a sequence of 6 positions, 40 for one of 4, 50 for a fork of the first")
    cache, inputs = ListedBlocks(TINY), StaticInputs.allocate(4, 3)
    cache.admit(7, 4), cache.admit(5, 6)
    cache.tables[6], cache.lengths[6] = list(cache.tables[5]), [6, 6]
    filled(inputs, cache, [5, 7, 6], [30, 40, 50])
    names = ("tokens", "positions", "slots", "lengths", "tables")
    found: dict[str, list] = {name: getattr(inputs, name).tolist() for name in names}
    found["tables"] = [row[:2] for row in found["tables"][:3]]
    found["lengths in the cache"] = [cache.lengths[i] for i in (5, 7, 6)]
    for name in ("tokens", "positions"):
        padding = found[name].pop()
        told = f"inputs.{name} = {padding} in a row of padding, which the model cannot look up"
        expect_true(0 <= padding < 64, told, answer=found, read=STATIC)
    expected: dict[str, list] = {"tokens": [30, 40, 50], "positions": [6, 4, 6]}
    expected |= {"slots": [14, 16, 10, -1], "lengths": [7, 5, 7, 0]}
    expected |= {"tables": [[1, 3], [0, 4], [1, 2]], "lengths in the cache": [[7, 7], [5, 5], [7, 7]]}
    expect_equal(found, expected, name="", read=STATIC)


def test_fill_static_inputs_for_a_smaller_batch():
    case("4 rows: four sequences of 1, 2, 3 and 4 positions, then only the third")
    cache, inputs = ListedBlocks(TINY), StaticInputs.allocate(4, 3)
    for i in (1, 2, 3, 4):
        cache.admit(i, i)
    filled(inputs, cache, [1, 2, 3, 4], [10, 20, 30, 40])
    filled(inputs, cache, [3], [33])
    found = {"slots": inputs.slots.tolist(), "lengths": inputs.lengths.tolist(), "tokens[0]": int(inputs.tokens[0])}
    expected = {"slots": [20, -1, -1, -1], "lengths": [5, 0, 0, 0], "tokens[0]": 33}
    expect_equal(found, expected, name="", read=STATIC)


def prefill(model, cache, sequence: int, tokens: list[int]) -> None:
    """Compute a prompt without the learner's functions."""
    slots = cache.admit(sequence, len(tokens))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, slots, k, v)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    n = len(tokens)
    next_logits(model, torch.tensor(tokens), torch.arange(n), torch.tensor([n - 1]), attend)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fill_static_inputs_replays_give_the_logits_of_the_plain_model(kind):
    case(f"{kind}, 4 rows: replays for 4, 2, 1, 2 and 4 sequences; one ends, and its blocks go to another")
    model = small_model(kind)
    texts = {i: [(7 * i + 3 * t) % 64 for t in range(n)] for i, n in ((1, 6), (2, 3), (3, 9), (4, 2), (5, 10))}
    cache, inputs = ListedBlocks(model.config, 16), StaticInputs.allocate(4, 8)
    step = CapturedStep(model, cache, inputs)
    for i in (1, 2, 3, 4):
        prefill(model, cache, i, texts[i])
    for n, batch in enumerate(([1, 2, 3, 4], [4, 1], [2], [5, 1], [1, 2, 5, 4]), 1):
        if batch == [2]:
            cache.end(3)
            prefill(model, cache, 5, texts[5])
        tokens = [(11 * i + n) % 64 for i in batch]
        filled(inputs, cache, batch, tokens)
        lengths, longer = [cache.lengths[i] for i in batch], [[len(texts[i]) + 1] * len(cache.keys) for i in batch]
        expect_equal(lengths, longer, name=f"lengths in the cache for replay {n}", answer=lengths, read=STATIC)
        held = cache.keys.clone()
        answer = step.replay()[: len(batch)]
        written = (cache.keys != held).flatten(3).any(-1).any(0).flatten().nonzero().flatten().tolist()
        expected = sorted(cache.tables[i][(m := len(texts[i])) // 4] * 4 + m % 4 for i in batch)
        expect_equal(written, expected, name=f"slots that replay {n} writes to", answer=answer, read=STATIC)
        for i, token in zip(batch, tokens, strict=True):
            texts[i].append(token)
        with torch.no_grad():
            found = [model(torch.tensor([texts[i]])) for i in batch]
        plain = torch.stack([(x if kind == "llama" else x[0])[0, -1] for x in found]).float()
        expect_close(answer, plain, name=f"logits of replay {n}", read=STATIC)


@pytest.mark.parametrize("n", [3, 5])
def test_fill_static_inputs_refuses_a_larger_batch(n):
    case(f"{n} sequences of one position, 2 rows")
    cache, inputs, read = ListedBlocks(TINY), StaticInputs.allocate(2, 3), "the contract, under Raises"
    for i in range(n):
        cache.admit(i, 1)
    with suppress(ValueError):
        serving.fill_static_inputs(inputs, cache, list(range(n)), [9] * n)
    found = {"rows of inputs.tokens": len(inputs.tokens), "lengths in the cache": list(cache.lengths.values())}
    found["tokens"] = inputs.tokens.tolist()
    expected = {"rows of inputs.tokens": 2, "lengths in the cache": [[1, 1]] * n, "tokens": [0, 0]}
    expect_equal(found, expected, name="", read=read)
    with expect_raises(ValueError, str(n), "2", read=read):
        serving.fill_static_inputs(inputs, cache, list(range(n)), [9] * n)
