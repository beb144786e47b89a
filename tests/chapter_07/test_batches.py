"""TokenBatches, graded: what it gives out, to whom, once each, and where it goes on."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

training = graded("training")

WINDOWS, CONTRACT = "equation (7.7)", "the contract of exercise 7.6"


def take(batches, n: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The next n batches as lists."""
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in (next(batches) for _ in range(n))]


def firsts(batches, n: int) -> list[int]:
    """The first token of every window of the next n batches: with tokens 0, 1, 2, ... its place."""
    return [row[0] for inputs, _ in take(batches, n) for row in inputs]


def test_TokenBatches_by_hand():
    case("tokens 0 to 11, batch=2, length=2: five windows, and the third batch takes the last and, again, the first")
    batches = training.TokenBatches(list(range(12)), 2, 2)
    expected = [
        ([[0, 1], [2, 3]], [[1, 2], [3, 4]]),
        ([[4, 5], [6, 7]], [[5, 6], [7, 8]]),
        ([[8, 9], [0, 1]], [[9, 10], [1, 2]]),
        ([[2, 3], [4, 5]], [[3, 4], [5, 6]]),
    ]
    expect_equal(take(batches, 4), expected, name="batches", read=WINDOWS)


def test_TokenBatches_gives_int64_rows_that_can_be_viewed():
    case("tokens 0 to 30, batch=3, length=4")
    inputs, targets = next(training.TokenBatches(torch.arange(31), 3, 4))
    expect_close(inputs, torch.arange(12).view(3, 4), name="inputs", read=WINDOWS)
    expect_close(targets, torch.arange(1, 13).view(3, 4), name="targets", read=WINDOWS)
    expect_true(inputs.is_contiguous() and targets.is_contiguous(), "inputs and targets should be contiguous")


def test_TokenBatches_is_an_iterator():
    case("iter() does not begin anew: one batch by next, one by a for loop")
    batches = training.TokenBatches(range(100), 1, 3)
    found = firsts(batches, 1)
    for inputs, _ in batches:
        found.append(inputs[0, 0].item())
        break
    expect_equal([*found, *firsts(iter(batches), 1)], [0, 3, 6], name="first tokens", read=CONTRACT)


@pytest.mark.parametrize(
    ("n_tokens", "batch", "length", "world_size"), [(13, 1, 4, 3), (31, 2, 3, 2), (50, 3, 2, 4), (7, 1, 1, 1)]
)
@pytest.mark.parametrize("seed", [None, 0, 5])
def test_TokenBatches_uses_every_window_once_an_epoch(n_tokens, batch, length, world_size, seed):
    case(f"tokens 0 to {n_tokens - 1}, batch={batch}, length={length}, {world_size} ranks, seed={seed}: three epochs")
    n = (n_tokens - 1) // length
    ranks = [
        training.TokenBatches(list(range(n_tokens)), batch, length, r, world_size, seed) for r in range(world_size)
    ]
    expect_equal(ranks[0].n_windows, n, name="n_windows", read=CONTRACT)
    given = []
    while len(given) < 3 * n:
        for one in ranks:
            given += firsts(one, 1)
    for epoch in range(3):
        once = sorted(given[epoch * n : (epoch + 1) * n])
        expected = list(range(0, n * length, length))
        expect_equal(once, expected, name=f"first tokens of epoch {epoch}, sorted", read=WINDOWS)


def test_TokenBatches_gives_ranks_different_windows():
    case("tokens 0 to 24, batch=2, length=2, 3 ranks: the windows of two steps")
    found = [firsts(training.TokenBatches(range(25), 2, 2, rank, 3), 2) for rank in range(3)]
    expected = [[0, 2, 12, 14], [4, 6, 16, 18], [8, 10, 20, 22]]
    expect_equal(found, expected, name="first tokens of each rank", read=WINDOWS)


def test_TokenBatches_shuffles_anew_each_epoch():
    case("61 tokens, length=1, seed=3 twice and seed=4: two epochs of 60")
    one, same, other = (firsts(training.TokenBatches(range(61), 10, 1, seed=seed), 12) for seed in (3, 3, 4))
    read = f"{CONTRACT}, under seed"
    expect_equal(same, one, name="first tokens, the second time", read=read)
    expect_true(one[:60] != list(range(60)), "with a seed the windows still come in order", read=read)
    expect_true(one[:60] != one[60:], "both epochs have the same order", read=read)
    expect_true(one[:60] != other[:60], "seeds 3 and 4 give the same order", read=read)
    expect_true(one[60:] != other[:60], "epoch 1 of seed 3 is epoch 0 of seed 4: mix seed and epoch", read=read)


def test_TokenBatches_leaves_the_random_numbers_alone():
    case("seed=0, two epochs; the global generators of PyTorch and NumPy before and after")
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    torch.manual_seed(0)
    one = firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    expect_true(torch.equal(state, torch.get_rng_state()), "PyTorch's global random numbers were used", read=CONTRACT)
    torch.manual_seed(1)
    np.random.seed(1)
    expect_equal(firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40), one, name="first tokens", read=CONTRACT)
    np.random.seed(2)
    numpy_before = np.random.get_state()[1].tolist()
    firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40)
    same = np.random.get_state()[1].tolist() == numpy_before
    expect_true(same, "NumPy's global random numbers were used", read=CONTRACT)
    torch.set_rng_state(torch_before)


@pytest.mark.parametrize("seed", [None, 7])
def test_TokenBatches_goes_on_at_the_exact_batch(seed):
    case(f"23 tokens, batch=2, length=2 (11 windows), seed={seed}: saved after 0 to 13 batches, four more each")
    for done in range(14):
        first = training.TokenBatches(range(23), 2, 2, seed=seed)
        take(first, done)
        state = json.loads(json.dumps(first.state_dict()))
        expected = take(first, 4)
        second = training.TokenBatches(range(23), 2, 2, seed=seed)
        take(second, 3)  # wherever it stands
        second.load_state_dict(state)
        expect_equal(take(second, 4), expected, name=f"batches after {done}", read=CONTRACT)


def test_TokenBatches_state_is_a_copy_and_the_same_on_every_rank():
    case("25 tokens, batch=1, length=2, 3 ranks, seed=1, after two steps")
    ranks = [training.TokenBatches(range(25), 1, 2, rank, 3, 1) for rank in range(3)]
    for one in ranks:
        take(one, 2)
    states = [one.state_dict() for one in ranks]
    expect_equal(states, [states[0]] * 3, name="states", read=f"{CONTRACT}, state_dict")
    take(ranks[0], 1)
    expect_equal(states[0], states[1], name="the state, after one more batch", read=f"{CONTRACT}, state_dict")
    plain = all(value is None or type(value) in (int, str, float, bool) for value in states[0].values())
    expect_true(plain, f"the state should be plain numbers, for weights_only=True: {states[0]}")


@pytest.mark.parametrize("seed", [None, 2])
def test_TokenBatches_goes_on_with_other_ranks(seed):
    case(f"41 tokens, length=2 (20 windows), seed={seed}: 2 ranks of batch 2 for two steps, then 3 ranks of batch 1")
    before = [training.TokenBatches(range(41), 2, 2, rank, 2, seed) for rank in range(2)]
    given = [first for _ in range(2) for one in before for first in firsts(one, 1)]
    after = [training.TokenBatches(range(41), 1, 2, rank, 3, seed) for rank in range(3)]
    for one in after:
        one.load_state_dict(before[0].state_dict())
    given += [first for _ in range(4) for one in after for first in firsts(one, 1)]
    read = f"{CONTRACT}, load_state_dict"
    expect_equal(sorted(given), list(range(0, 40, 2)), name="first tokens of the epoch, sorted", read=read)


def test_TokenBatches_knows_its_epoch():
    case("12 tokens, batch=2, length=2 (5 windows): epoch after 0 to 5 batches")
    batches, found = training.TokenBatches(range(12), 2, 2), []
    for _ in range(6):
        found.append(batches.epoch)
        next(batches)
    expect_equal(found, [0, 0, 0, 1, 1, 2], name="epoch", read=f"{CONTRACT}, under Attributes")


def test_TokenBatches_takes_tokens_of_every_kind(tmp_path):
    array = np.arange(40_000, 40_021, dtype=np.uint16)
    array.tofile(tmp_path / "tokens.bin")
    kinds = {
        "a list": array.tolist(),
        "a tuple": tuple(array.tolist()),
        "an int32 tensor": torch.from_numpy(array.astype(np.int32)),
        "a strided tensor": torch.arange(40_000, 40_042)[::2] // 2 + 20_000,
        "a uint16 array": array,
        "a read-only memmap of uint16": np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r"),
    }
    for name, tokens in kinds.items():
        case(f"{name}: 40000 to 40020, batch=2, length=5")
        inputs, targets = next(training.TokenBatches(tokens, 2, 5))
        expect_close(inputs, torch.arange(40_000, 40_010).view(2, 5), name="inputs", read=f"{CONTRACT}, under Args")
        expect_close(targets, torch.arange(40_001, 40_011).view(2, 5), name="targets", read=f"{CONTRACT}, under Args")
    expect_equal(array[0].item(), 40_000, name="the array afterwards")


@pytest.mark.memory_limit(300)
def test_TokenBatches_reads_a_memmap_as_it_goes(tmp_path):
    case(
        "a file of 256 million uint16 tokens (mostly a hole on the disk), batch=2, length=8: memory is limited to 300 MB"
    )
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(512 * 2**20)
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    inputs, _ = next(training.TokenBatches(tokens, 2, 8))
    expect_close(inputs, torch.zeros(2, 8, dtype=torch.int64), name="inputs", read=f"{CONTRACT}, under Args")


def test_TokenBatches_does_not_alias_the_tokens():
    case("int64 tokens; the inputs are overwritten")
    tokens = np.arange(9)
    inputs, targets = next(training.TokenBatches(tokens, 1, 8))
    inputs.zero_()
    expect_close(targets, torch.arange(1, 9).view(1, 8), name="targets afterwards", read=CONTRACT)
    expect_equal(tokens.tolist(), list(range(9)), name="tokens afterwards", read=CONTRACT)


@pytest.mark.parametrize(
    ("n_tokens", "batch", "length", "world_size"), [(16, 4, 4, 1), (24, 2, 4, 3), (1, 1, 1, 1), (0, 1, 1, 1)]
)
def test_TokenBatches_refuses_too_few_tokens(n_tokens, batch, length, world_size):
    case(f"{n_tokens} tokens, batch={batch}, length={length}, {world_size} ranks")
    needed = world_size * batch * length + 1
    with expect_raises(ValueError, str(n_tokens), str(needed), read=f"{CONTRACT}, under Raises"):
        training.TokenBatches(list(range(n_tokens)), batch, length, 0, world_size)
    case(f"{needed} tokens, batch={batch}, length={length}, {world_size} ranks: just enough")
    found = [firsts(training.TokenBatches(range(needed), batch, length, r, world_size), 1) for r in range(world_size)]
    expect_equal(
        [first for one in found for first in one], list(range(0, needed - 1, length)), name="first tokens", read=WINDOWS
    )


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (1, 1)])
def test_TokenBatches_refuses_a_rank_that_is_not_there(rank, world_size):
    case(f"rank={rank}, world_size={world_size}")
    with expect_raises(ValueError, str(rank), read=f"{CONTRACT}, under Raises"):
        training.TokenBatches(range(100), 1, 2, rank=rank, world_size=world_size)


def test_TokenBatches_refuses_the_state_of_other_data():
    state = training.TokenBatches(range(100), 2, 4, seed=1).state_dict()
    others = [
        ((range(90), 2, 4), 1, ("100", "90")),
        ((range(100), 2, 5), 1, ("4", "5")),
        ((range(100), 2, 4), 2, ("1", "2")),
    ]
    for arguments, seed, mentions in others:
        case(
            f"saved with 100 tokens, length=4, seed=1; now {len(arguments[0])} tokens, length={arguments[2]}, seed={seed}"
        )
        with expect_raises(ValueError, *mentions, read=f"{CONTRACT}, load_state_dict"):
            training.TokenBatches(*arguments, seed=seed).load_state_dict(state)


@oracle
def test_TokenBatches_property_of_an_epoch():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    sizes = (st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40), st.integers(1, 5))

    @settings(max_examples=40, deadline=None)
    @given(*sizes, st.none() | st.integers(0, 9))
    def check(batch, length, world_size, more, epochs, seed):
        n_tokens = batch * length * world_size + 1 + more
        n = (n_tokens - 1) // length
        case(f"{n_tokens} tokens, batch={batch}, length={length}, {world_size} ranks, seed={seed}, {epochs} epochs")
        ranks = [training.TokenBatches(range(n_tokens), batch, length, r, world_size, seed) for r in range(world_size)]
        given_out: list[int] = []
        while len(given_out) < epochs * n:
            for one in ranks:
                given_out += firsts(one, 1)
        counts = Counter(given_out[: epochs * n])
        expect_equal(sorted(counts.items()), [(i * length, epochs) for i in range(n)], name="counts", read=WINDOWS)

    check()
