"""Distributed data parallel, graded: on 2 to 4 ranks with gloo, against one process and PyTorch's own DDP.

The programs that run on the ranks are in `programs.py`.
The tests grade the ledger of collectives, not only the numbers.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_10 import programs

ddp = graded("ddp")

SHARES, MEAN, SUMS, HIDDEN, COST, BEST = (f"eq-ddp-{n}" for n in (1, 2, 3, 4, 5, 6))
SENT = "the section 'One start for all'"
ORDER = "the section 'Buckets'"
TURN = "the section 'While backward runs'"
ALONE = "the contract of ex-ddp-average-gradients, under Args: module"
STRIDES = "the section 'The mean', on memory"
SMALL_MB = 200 / 2**20  # a bucket of 200 bytes


# ---- shard_indices ---------------------------------------------------------------------------------------------------


def sampled(n: int, rank: int, world_size: int, epoch=0, seed=0, shuffle=True, drop_last=False) -> list[int]:
    items: Any = range(n)  # of which only the length counts
    sampler: DistributedSampler[Any] = DistributedSampler(
        items, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]), (True, None)])
def test_shard_indices_by_hand(drop_last, expected):
    expected = expected or [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    for rank in range(3):
        case(f"10 items on 3 ranks, rank {rank}, in order, drop_last={drop_last}")
        found = ddp.shard_indices(10, rank, 3, shuffle=False, drop_last=drop_last)
        expect_equal(found, expected[rank], name="indices", read=SHARES)
        types = {type(index).__name__ for index in found}
        expect_equal(types, {"int"}, name="types of the indices", answer=found, read="the contract, under Returns")


def test_shard_indices_shuffled():
    for rank in range(3):
        for epoch, seed in ((0, 0), (1, 0), (0, 5), (7, 3)):
            case(f"10 items on 3 ranks, rank {rank}, shuffled, epoch={epoch}, seed={seed}")
            found = ddp.shard_indices(10, rank, 3, epoch, seed)
            expect_equal(found, sampled(10, rank, 3, epoch, seed), name="indices", read=SHARES)
            types = {type(index).__name__ for index in found}
            expect_equal(types, {"int"}, name="types of the indices", answer=found, read="the contract, under Returns")


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shard_indices_is_the_samplers_order(shuffle, drop_last):
    for n in (0, 1, 2, 3, 7, 8, 64, 101):
        for world_size in (1, 2, 4, 7):
            for rank in {0, world_size - 1}:
                case(f"{n} items on {world_size} ranks, rank {rank}, shuffle={shuffle}, drop_last={drop_last}")
                settings = {"epoch": 2, "seed": 1, "shuffle": shuffle, "drop_last": drop_last}
                found = ddp.shard_indices(n, rank, world_size, **settings)
                expect_equal(found, sampled(n, rank, world_size, **settings), name="indices", read=SHARES)


def test_shard_indices_leaves_the_global_generator_alone():
    case("torch.manual_seed(123), then shard_indices")
    torch.manual_seed(123)
    before = torch.get_rng_state()
    ddp.shard_indices(10, 0, 2)
    after = torch.get_rng_state()
    expect_true(torch.equal(before, after), "the global random state was changed", answer=after, read=SHARES)


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 3), (17, 4), (-85, 4), (0, 0)])
def test_shard_indices_of_no_such_rank(rank, world_size):
    case(f"rank {rank} of {world_size}")
    with expect_raises(ValueError, str(rank), str(world_size), read="the contract, under Raises"):
        ddp.shard_indices(10, rank, world_size)


@oracle
def test_shard_indices_of_any_size():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(deadline=None, max_examples=25, database=None)
    @given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 5), st.booleans(), st.booleans())
    def check(n, world_size, epoch, shuffle, drop_last):
        case(f"{n} items on {world_size} ranks, epoch={epoch}, shuffle={shuffle}, drop_last={drop_last}")
        options = {"epoch": epoch, "shuffle": shuffle, "drop_last": drop_last}
        found = [ddp.shard_indices(n, rank, world_size, **options) for rank in range(world_size)]
        expect_equal(found, [sampled(n, rank, world_size, **options) for rank in range(world_size)], name="indices")
        together = sorted({i for share in found for i in share})
        expect_true(drop_last or together == list(range(n)), "an item was left out", answer=together)

    check()


# ---- broadcast_parameters --------------------------------------------------------------------------------------------


@pytest.mark.time_limit(30)
def test_broadcast_parameters_gives_rank_0s_values(ranks):
    case("tensors of rank + 1 on 3 ranks; `across` is transposed, `hidden` is every 2nd column, not persistent")
    result = ranks(programs.send_parameters, n_ranks=3)
    across = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 11.0]])
    expected = {"narrow": torch.ones(2, dtype=torch.bfloat16), "frozen": torch.tensor(1.0).double()}
    expected |= {"count": torch.tensor(1), "mask": torch.tensor([True, True])}
    expected |= {"across": across, "hidden": torch.ones(2, 2)}
    for rank, (values, moved, trained, grad) in enumerate(result.values):
        case(f"tensors of rank + 1; `across` is transposed, `hidden` is every 2nd column, not persistent; rank {rank}")
        for name, value in expected.items():
            expect_close(values[name], value, name=name, answer=values, read=SENT)
        expect_equal(moved, [], name="tensors with other storage or strides than before", answer=values, read=SENT)
        expect_equal(trained, ["across", "narrow"], name="parameters that require a gradient", answer=values, read=SENT)
        expect_close(grad, torch.ones(2, 3), name="a gradient of the parameter afterwards", answer=values, read=SENT)


@pytest.mark.time_limit(30)
def test_broadcast_parameters_sends_each_tensor_once(ranks):
    case("3 ranks; parameters of 24, 4 and 8 bytes (one of them tied), buffers of 8, 2 and 16")
    sent = [ledger.bytes_sent for ledger in ranks(programs.send_parameters, n_ranks=3).ledgers]
    expect_equal(sent, [62, 0, 0], name="bytes sent by each rank", read=SENT)


@pytest.mark.time_limit(30)
def test_broadcast_parameters_in_a_group(ranks):
    case("4 ranks whose weight is their number; ranks 1 and 3 are a group, and its rank 0 is the world's rank 1")
    result = ranks(programs.send_in_a_group, n_ranks=4)
    expect_equal(result.values, [0.0, 1.0, 2.0, 1.0], name="the weight on each rank", read=SENT)


@pytest.mark.time_limit(30)
def test_broadcast_parameters_of_dtypes_that_gloo_refuses(ranks):
    for names in (["int16"], ["uint16"], ["float8_e4m3fn", "float8_e5m2"]):
        what = f"buffers [r + 1, r + 3] of {', '.join(names)} on ranks r = 0, 1, and an int16 of no dimensions, r + 5"
        case(what)
        for rank, found in enumerate(ranks(programs.send_dtypes, names, n_ranks=2).values):
            case(f"{what}; rank {rank}")
            for name, (dtype, values) in found.items():
                expected = torch.tensor(5.0) if name == "one" else torch.tensor([1.0, 3.0])
                expect_equal(str(dtype), f"torch.{'int16' if name == 'one' else name}", name=f"{name}.dtype", read=SENT)
                expect_close(values, expected, name=name, answer=found, read=SENT)


@oracle
def test_broadcast_parameters_of_expanded_buffers(ranks):
    case("a buffer [2r, 2r + 1] that expand shows in three rows, on ranks r = 0, 1")
    for rows, stride in ranks(programs.send_expanded, n_ranks=2).values:
        expect_close(rows, torch.tensor([[0.0, 1.0]] * 3), name="rows", read=SENT)
        expect_equal(stride, (0, 1), name="strides", read=SENT)


# ---- average_gradients, average_gradients_flat -----------------------------------------------------------------------

A, B = torch.tensor([2.0, 12.0]), torch.arange(6.0).reshape(2, 3)


def check_by_hand(ranks, name: str, used: list[bool], b: Tensor, c: float):
    what = "no gradient missing" if all(used) else "b and c (float64) without one on rank 1"
    case(f"three gradients on 3 ranks, {what}")
    result = ranks(programs.average_loose, name, used, n_ranks=3)
    expected = {"a": A, "b": b, "c": torch.tensor(c).double()}
    for rank, found in enumerate(result.values):
        case(f"gradients a = [1 + r, 2 + 10 r], b (transposed) and c on ranks r = 0, 1, 2, {what}; rank {rank}")
        for key, value in expected.items():
            expect_true(found[key] is not None, f"{key}.grad is None, expected its mean", answer=found, read=MEAN)
            expect_close(found[key], value, name=f"{key}.grad", answer=found[key], read=MEAN)
        left = torch.tensor([5.0 + rank])
        expect_close(found["frozen"], left, name="the old gradient of a frozen parameter", read=ALONE)
    return result


def check_laid_out(ranks, name: str) -> None:
    what = "b.grad = (r + 1) [[0, 1, 2], [3, 4, 5]] on ranks r = 0, 1; not contiguous (transposed in memory) on rank 1"
    case(what)
    for rank, found in enumerate(ranks(programs.average_laid_out, name, n_ranks=2).values):
        case(f"{what}; rank {rank}")
        expect_close(found["b"], 1.5 * B, name="b.grad", read=STRIDES)


def check_group(ranks, name: str) -> None:
    case("4 ranks with gradients [1 + r * r, 4 r]; ranks 1 and 3 are a group, ranks 0 and 2 keep what they have")
    result = ranks(programs.average_in_a_group, name, n_ranks=4)
    expected = [torch.tensor([values]) for values in ([1.0, 0.0], [6.0, 8.0], [5.0, 8.0], [6.0, 8.0])]
    expect_close(result.values, expected, name="the gradient on each rank", read=MEAN)


def whole_batch(n: int, n_steps: int) -> dict[str, Tensor]:
    """One process that sees every item."""
    model = programs.Chain(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(n_steps):
        optimizer.zero_grad()
        model(programs.items(n, seed=step, width=4)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def check_training(ranks, name: str) -> None:
    case("4 ranks with 3 items each, 4 steps")
    result = ranks(programs.train_by_hand, name, 3, 4, n_ranks=4)
    for rank, state in enumerate(result.values):
        case(f"4 ranks with 3 items each, 4 steps, compared with one process with 12; rank {rank}")
        expect_close(state, whole_batch(12, 4), atol=1e-6, rtol=1e-5, name="parameters", read=SUMS)


@pytest.mark.time_limit(30)
def test_average_gradients_by_hand(ranks):
    check_by_hand(ranks, "average_gradients", [True] * 3, 2 * B, 3.0)


@pytest.mark.time_limit(30)
def test_average_gradients_of_any_strides(ranks):
    check_laid_out(ranks, "average_gradients")


@pytest.mark.time_limit(30)
def test_average_gradients_where_a_rank_has_none(ranks):
    result = check_by_hand(ranks, "average_gradients", [True, False, True], 4 / 3 * B, 2.0)
    case("one collective a tensor: 2 float32, (1 frozen), 6 float32 (tied), 1 float64; the last two unused on rank 1")
    expect_equal(result.mismatch(), "", name="what the ranks disagree on", read=MEAN)
    for ledger in result.ledgers:
        calls = [(record.op, record.n_bytes, record.dtype) for record in ledger.records]
        expected = [("all_reduce", n, dtype) for n, dtype in ((8, "float32"), (24, "float32"), (8, "float64"))]
        expect_equal(calls, expected, name="collectives, bytes and dtypes", read=MEAN)


@pytest.mark.time_limit(30)
def test_average_gradients_in_a_group(ranks):
    check_group(ranks, "average_gradients")


@pytest.mark.time_limit(30)
def test_average_gradients_trains_like_one_process(ranks):
    check_training(ranks, "average_gradients")


@pytest.mark.time_limit(30)
def test_average_gradients_of_nothing(ranks):
    case("no backward on any rank: the means are zeros (or None), and no rank waits")
    result = ranks(programs.average_all_unused, "average_gradients", n_ranks=2)
    expect_equal(result.values, [[0.0, 0.0]] * 2, name="sums of the gradients", read=MEAN)


@pytest.mark.time_limit(30)
def test_average_gradients_flat_by_hand(ranks):
    check_by_hand(ranks, "average_gradients_flat", [True] * 3, 2 * B, 3.0)


@pytest.mark.time_limit(30)
def test_average_gradients_flat_of_any_strides(ranks):
    check_laid_out(ranks, "average_gradients_flat")


@pytest.mark.time_limit(30)
def test_average_gradients_flat_where_a_rank_has_none(ranks):
    result = check_by_hand(ranks, "average_gradients_flat", [True, False, True], 4 / 3 * B, 2.0)
    case("one collective a dtype: 2 float32, (1 frozen), 6 float32 (tied), 1 float64; the last two unused on rank 1")
    expect_equal(result.mismatch(), "", name="what the ranks disagree on", read=MEAN)
    for ledger in result.ledgers:
        calls = [(record.op, record.n_bytes, record.dtype) for record in ledger.records]
        expected = [("all_reduce", 32, "float32"), ("all_reduce", 8, "float64")]
        expect_equal(calls, expected, name="collectives, bytes and dtypes", read=MEAN)


@pytest.mark.time_limit(30)
def test_average_gradients_flat_counts_its_collectives(ranks):
    case(
        "3 ranks, no gradient missing: one collective a dtype, 8 float32 (the frozen parameter is left out) and "
        "1 float64"
    )
    for ledger in ranks(programs.average_loose, "average_gradients_flat", [True] * 3, n_ranks=3).ledgers:
        calls = [(record.op, record.n_bytes, record.dtype) for record in ledger.records]
        expected = [("all_reduce", 32, "float32"), ("all_reduce", 8, "float64")]
        expect_equal(calls, expected, name="collectives, bytes and dtypes", read=MEAN)


@pytest.mark.time_limit(30)
def test_average_gradients_flat_in_a_group(ranks):
    check_group(ranks, "average_gradients_flat")


@pytest.mark.time_limit(30)
def test_average_gradients_flat_trains_like_one_process(ranks):
    check_training(ranks, "average_gradients_flat")


# ---- OverlapDDP, BucketedDDP -----------------------------------------------------------------------------------------


def check_step_by_hand(ranks, kind) -> None:
    case("one weight, one step on 3 ranks")
    result = ranks(programs.step_by_hand, kind, n_ranks=3)
    for rank, (start, grad) in enumerate(result.values):
        case(f"one weight of [r + 1, r + 1], gradient [1 + r, 2 + 10 r], ranks r = 0, 1, 2; rank {rank}")
        expect_close(start, torch.ones(1, 2), name="the weight after wrapping", read=SENT)
        expect_close(grad, torch.tensor([[2.0, 12.0]]), name="the gradient", read=MEAN)


def check_wrapped_training(ranks, kind) -> None:
    case("3 ranks, 3 steps; `maybe` is unused on rank 0 from the second on, `never` is never used")
    result = ranks(programs.train, kind, 2, 3, n_ranks=3)
    for rank, (ours, theirs) in enumerate(result.values):
        case(f"3 ranks, 3 steps, different weights on each at first, compared with PyTorch's DDP; rank {rank}")
        expect_close(ours[0], theirs[0], atol=1e-6, rtol=1e-5, name="parameters", answer=ours[0], read=SUMS)
        for name, grad in theirs[1].items():
            expected = torch.zeros_like(ours[0][name]) if grad is None else grad
            if name != "never" and not name.startswith("frozen"):
                expect_close(ours[1][name], expected, atol=1e-6, rtol=1e-5, name=f"{name}.grad", read=SUMS)


def check_means(found, expected: dict[str, Tensor], what: str, read: str) -> None:
    for rank, grads in enumerate(found):
        case(f"{what}; rank {rank}")
        for name, value in expected.items():
            grad = grads[name]
            if name == "never" and grad is None:
                continue
            expect_true(grad is not None, f"{name}.grad is None, expected a mean", answer=grads, read=read)
            expect_close(grad, value, atol=1e-6, rtol=1e-5, name=f"{name}.grad", read=read)
        frozen = [name for name, grad in grads.items() if grad is not None and name.startswith("frozen")]
        expect_equal(frozen, [], name="frozen parameters with a gradient", read=read)


def check_mixed(ranks, kind) -> None:
    what = "tied, frozen, two dtypes; `maybe` (transposed) unused on rank 1, `never` on all"
    case(what)
    kinds, read = (["overlap"], TURN) if kind == "overlap" else ([kind, 1], ORDER)
    result = ranks(programs.mixed, kinds, n_ranks=3)
    expected = programs.mean_of_locals(3, use=lambda rank: rank != 1)
    for found in zip(*result.values, strict=True):
        check_means(found, expected, what, read)
    expect_equal(result.mismatch(), "", name="what the ranks disagree on", read=read)
    if kind == "overlap":
        return
    case("one bucket a dtype: float32 last.*, float64 wide, float32 all others: the float64 bucket is complete first")
    for ledger in result.ledgers:
        records = ledger.records[len(ledger.before("wrapped (1)")) :]
        calls = [(record.n_bytes, record.dtype) for record in records if record.op == "all_reduce"]
        expect_equal(calls, [(112, "float64"), (588, "float32")], name="buckets", read=ORDER)


def check_several(ranks, kind) -> None:
    case("no_sync for a first micro-batch, an exception inside no_sync, a rank without backward, an evaluation")
    result = ranks(programs.several, kind, n_ranks=3)
    what = "two micro-batches on 3 ranks, the first under no_sync, where alone `maybe` is used"
    accumulated, nested, after_an_error, empty, evaluated = zip(*result.values, strict=True)
    for rank, (inside, _) in enumerate(accumulated):
        local = programs.mean_of_locals(1, seeds=lambda _, rank=rank: [rank])
        case(f"{what}: gradients before the second; rank {rank}")
        for name in ("first.weight", "maybe"):
            expect_close(inside[name], local[name], atol=1e-6, name=f"{name}.grad", read=TURN)
    for ledger in result.ledgers:
        n = len(ledger.before("no_sync ends")) - len(ledger.before("wrapped"))
        expect_equal(n, 0, name="collectives under no_sync", read=TURN)
    expected = programs.mean_of_locals(3, seeds=lambda rank: [rank, 10 + rank])
    check_means([after for _, after in accumulated], expected, what, TURN)
    for rank, (inside, ledger) in enumerate(zip(nested, result.ledgers, strict=True)):
        case(f"no_sync() inside no_sync(): two backwards after the end of the inner, inside the outer; rank {rank}")
        n = len(ledger.before("nested ends")) - len(ledger.before("nested begins"))
        expect_equal(n, 0, name="collectives under the outer no_sync", read=TURN)
        expect_close(inside, torch.tensor([[2.0 + 2 * rank, 4.0 + 20 * rank]]), name="the local gradient", read=TURN)
        case(f"one weight: two micro-batches under no_sync, then one outside of it; rank {rank}")
        n = len(ledger.before("third ends")) - len(ledger.before("nested ends"))
        expect_equal(n, 1, name="collectives in the third", read=TURN)
    check_means(after_an_error, programs.mean_of_locals(3), "an exception inside no_sync, then an ordinary step", TURN)
    expected = programs.mean_of_locals(3, n=lambda rank: 0 if rank == 1 else 2)
    check_means(empty, expected, "rank 1 has no items and calls no backward", MEAN)
    for rank, (grad, ledger) in enumerate(zip(evaluated, result.ledgers, strict=True)):
        case(f"one weight: backward, a forward under torch.no_grad(), finish_gradient_synchronization(); rank {rank}")
        n = len(ledger.before("round ends")) - len(ledger.before("round begins"))
        expect_equal(n, 1, name="collectives in the round", read="the contract, under forward")
        expect_close(grad, torch.tensor([[2.0, 12.0]]), name="the gradient", read=MEAN)


def check_interrupted(ranks, kind) -> None:
    turn = "the collective of a waits for b" if kind == "overlap" else "a and b share a bucket"
    what = f"{turn}; an exception after a backward that reached only a: nothing has started; then a step with both"
    case(what)
    by_hand = {"a": torch.tensor([1.5, 7.0]), "b": torch.tensor([3.0])}
    alone = ranks(programs.nothing_started, kind, n_ranks=2).values
    expect_true(None not in alone, "the next step's backward raised a RuntimeError", answer=alone, read=TURN)
    check_means(alone, by_hand, what, TURN)
    places = ("after backward", "in backward", "in backward, early", "on rank 0 after backward")
    case("an exception after backward, in backward, or on rank 0 alone after backward; then ordinary steps")
    others, synced = zip(*ranks(programs.interrupted, kind, places, n_ranks=2).values, strict=True)
    expected = programs.mean_of_locals(2)
    for where, found in zip(places, zip(*others, strict=True), strict=True):
        check_means(found, expected, f"an exception {where}, then two ordinary steps", TURN)
    for rank, (grad, error) in enumerate(synced):
        case(
            f"gradients [1 + r, 2 + 10 r], then a hundred times that, each with its own forward, without "
            f"no_sync; rank {rank}"
        )
        expect_close(grad, 101 * torch.tensor([[1.5, 7.0]]), name="the gradient after both", read=TURN)
        case(f"two forwards, then two backwards in one round without no_sync; rank {rank}")
        expect_true(error is not None, "the second backward raised no RuntimeError", read=TURN)


def check_passthrough(ranks, kind) -> None:
    case("a module with positional, named and variable arguments")
    expected = {
        "is_module": True,
        "call": {"more": (1, "two"), "flip": True, "named": ["mask"], "training": True},
        "eval": False,
        "n_parameters": 2,
        "inner_keys": ["seen", "weight"],
        "keys": ["module.seen", "module.weight"],
        "loads": "<All keys matched successfully>",
    }
    result = ranks(programs.passthrough_and_frozen, kind, n_ranks=2)
    for found in result.values:
        expect_equal(found, expected, name="what the wrapper shows")
    case("nothing to train")
    for ledger in result.ledgers:
        expect_equal(len(ledger.records) - len(ledger.before("wrapped")), 0, name="collectives after wrapping")


def bytes_of(records) -> list[int]:
    return [record.n_bytes for record in records if record.op == "all_reduce"]


def check_overlap(ranks, expected: dict[str | float, list[int]], early: dict[str, int], dtype=torch.float32) -> None:
    case("three linear layers, one step")
    result = ranks(programs.overlap, list(expected), dtype, n_ranks=2)
    layers = "weight and bias of three layers: 96 and 24, 120 and 20, 40 and 8 bytes"
    layers = layers if dtype == torch.float32 else "three layers in float64: 192 and 48, 240 and 40, 80 and 16 bytes"
    for i, (kind, sizes) in enumerate(expected.items()):
        what, read = (
            ("one collective each", TURN) if kind == "overlap" else (f"buckets of {kind * 2**20:.0f} bytes", ORDER)
        )
        what += "" if kind == "overlap" else " (bucket_size_mb = that / 2**20)"
        for ledger in result.ledgers:
            case(f"{layers}; {what}; rank {ledger.rank}")
            skip = len(bytes_of(ledger.before(f"begin ({i})")))
            calls = bytes_of(ledger.before(f"end ({i})"))[skip:]
            expect_equal(calls, sizes, name="bytes of each all_reduce, in order", read=read)
            started = bytes_of(ledger.before(f"backward ends ({i})"))[skip:]
            expect_equal(started, sizes, name="those started before backward ends", answer=started, read=HIDDEN)
            for milestone, n in early.items() if i == 0 else ():
                found = len(bytes_of(ledger.before(f"{milestone} ({i})"))[skip:])
                problem = f"when {milestone}, {found} collectives had been started, expected at least {n}"
                expect_true(found >= n, problem, answer=found, read=HIDDEN)
    for ledger in result.ledgers:
        waits = [record.name for record in ledger.records if record.op == "all_reduce" and not record.is_async]
        expect_equal(waits, [], name="collectives that backward waits for (not async_op)", read=HIDDEN)
    expect_equal(result.mismatch(), "", name="what the ranks disagree on", read=HIDDEN)


@pytest.mark.time_limit(30)
def test_OverlapDDP_by_hand(ranks):
    check_step_by_hand(ranks, "overlap")


@pytest.mark.time_limit(30)
def test_OverlapDDP_starts_each_collective_when_its_gradient_is_ready(ranks):
    early = {"layer 2 is through": 2, "layer 1 is through": 4}
    check_overlap(ranks, {"overlap": [8, 40, 20, 120, 24, 96]}, early)


@pytest.mark.time_limit(30)
def test_OverlapDDP_passes_calls_through(ranks):
    check_passthrough(ranks, "overlap")


@pytest.mark.time_limit(30)
def test_OverlapDDP_of_unused_tied_frozen_and_mixed(ranks):
    check_mixed(ranks, "overlap")


@pytest.mark.time_limit(30)
def test_OverlapDDP_no_sync_and_a_rank_without_items(ranks):
    check_several(ranks, "overlap")


@pytest.mark.time_limit(30)
def test_OverlapDDP_trains_like_pytorchs(ranks):
    check_wrapped_training(ranks, "overlap")


@pytest.mark.time_limit(30)
def test_OverlapDDP_after_an_exception(ranks):
    check_interrupted(ranks, "overlap")


# ---- ddp_overhead_seconds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_buckets", "expected"), [(1, 1.003), (2, 0.506), (2.5, 0.4075), (10, 0.13), (1000, 3.001)])
def test_ddp_overhead_seconds_by_hand(n_buckets, expected):
    case(f"400 bytes at 400 bytes/s, 3 ms a call, {n_buckets} buckets")
    expect_close(ddp.ddp_overhead_seconds(400, 400, 0.003, n_buckets), expected, name="seconds", read=COST)


def test_ddp_overhead_seconds_of_whole_numbers():
    case("6 GB at 200 GB/s, 20 us a call, 60 buckets")
    found = ddp.ddp_overhead_seconds(n_bytes=6 * 10**9, bandwidth=200 * 10**9, call_overhead_s=2e-5, n_buckets=60)
    expect_close(found, 0.0005 + 0.0012, name="seconds", read=COST)
    case("one byte too many for a whole bucket: no rounding")
    expect_close(ddp.ddp_overhead_seconds(11, 2, 0.0, 4), 1.375, name="seconds", read=COST)


@pytest.mark.parametrize(("bandwidth", "expected"), [(1.0, 5.5), (0.25, 20.5), (1e-3, 5000.5)])
def test_ddp_overhead_seconds_of_a_slow_link(bandwidth, expected):
    case(f"10 bytes at {bandwidth:g} bytes/s, 0.25 s a call, 2 buckets: a bandwidth need only be above 0")
    expect_close(ddp.ddp_overhead_seconds(10, bandwidth, 0.25, 2), expected, name="seconds", read=COST)


@pytest.mark.parametrize(
    ("bandwidth", "n_buckets", "named"),
    [(7, 0, "0"), (7, -28, "-28"), (7, 0.625, "0.625"), (0, 2, "0"), (-35, 2, "-35")],
)
def test_ddp_overhead_seconds_refuses(bandwidth, n_buckets, named):
    case(f"bandwidth {bandwidth}, {n_buckets} buckets")
    with expect_raises(ValueError, named, read="the contract, under Raises"):
        ddp.ddp_overhead_seconds(11, bandwidth, 13, n_buckets)


# ---- optimal_bucket_bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_bytes", "bandwidth", "call", "expected"),
    [
        (4 * 10**6, 1000, 0.1, 20_000.0),
        (5e4, 200.0, 0.25, math.sqrt(2.5e6)),
        (800, 1e6, 0.5, 800.0),
        (10**6, 1e9, 0.0, 0.0),
    ],
)
def test_optimal_bucket_bytes_by_hand(n_bytes, bandwidth, call, expected):
    case(f"{n_bytes:g} bytes at {bandwidth:g} bytes/s, {call:g} s a call")
    found = ddp.optimal_bucket_bytes(n_bytes, bandwidth, call)
    expect_close(found, expected, name="bytes", read=BEST)
    expect_equal(type(found).__name__, "float", name="type of the size", read="the contract, under Returns")


def test_optimal_bucket_bytes_is_the_least_overhead():
    for n_bytes, bandwidth, call in ((6e9, 2e11, 2e-5), (4e8, 1e10, 1e-4), (1e6, 1e9, 1e-5)):
        case(f"{n_bytes:g} bytes at {bandwidth:g} bytes/s, {call:g} s a call, beside every number of buckets to 2000")
        costs = [n_bytes / (k * bandwidth) + k * call for k in range(1, 2001)]
        best_k = n_bytes / ddp.optimal_bucket_bytes(n_bytes, bandwidth, call)
        cost = n_bytes / (best_k * bandwidth) + best_k * call
        problem = f"{best_k:.1f} buckets cost {cost:g} s, {min(costs):g} s is possible"
        expect_true(cost <= min(costs) * (1 + 1e-9), problem, answer=best_k, read=BEST)
        expect_true(best_k >= 1, f"{best_k:g} buckets", answer=best_k, read=BEST)


# ---- BucketedDDP -----------------------------------------------------------------------------------------------------


@pytest.mark.time_limit(30)
def test_BucketedDDP_by_hand(ranks):
    check_step_by_hand(ranks, 1.0)


@pytest.mark.parametrize("size", [0, -1.5])
def test_BucketedDDP_of_no_size(size):
    case(f"bucket_size_mb={size}")
    with expect_raises(ValueError, str(size), read=ORDER):
        ddp.BucketedDDP(torch.nn.Linear(1, 1), size)


@pytest.mark.time_limit(30)
def test_BucketedDDP_fills_buckets_in_reverse(ranks):
    early = {"layer 2 is through": 1, "layer 1 is through": 3}
    each = [8, 40, 20, 120, 24, 96]
    expected = {
        67: (just := [48, 20, 120, 24, 96]),
        200: [188, 120],
        1e6: [308],
        1: each,
        49: just,
        48: just,
        119: [68, 120, 24, 96],
    }
    check_overlap(ranks, {n_bytes / 2**20: sizes for n_bytes, sizes in expected.items()}, early)
    check_overlap(ranks, {SMALL_MB: [136, 240, 48, 192]}, {}, torch.float64)


@pytest.mark.time_limit(30)
def test_BucketedDDP_passes_calls_through(ranks):
    check_passthrough(ranks, SMALL_MB)


@pytest.mark.time_limit(30)
def test_BucketedDDP_of_unused_tied_frozen_and_mixed(ranks):
    check_mixed(ranks, SMALL_MB)


@pytest.mark.time_limit(30)
def test_BucketedDDP_no_sync_and_a_rank_without_items(ranks):
    check_several(ranks, SMALL_MB)


@pytest.mark.time_limit(30)
def test_BucketedDDP_trains_like_pytorchs(ranks):
    check_wrapped_training(ranks, SMALL_MB)


@pytest.mark.time_limit(30)
def test_BucketedDDP_after_an_exception(ranks):
    check_interrupted(ranks, SMALL_MB)


@oracle
def test_BucketedDDP_says_that_a_gradient_is_sparse(ranks):
    for kind in ("overlap", SMALL_MB):
        case(f"an embedding with sparse gradients, wrapped: {kind}")
        for said in ranks(programs.sparse, kind, n_ranks=2).values:
            expect_true(said is not None and "sparse" in said, f"the error says {said!r}", answer=said)
