import math
import re

import numpy as np
import pytest
import torch

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_09 import programs

mpi = graded("mpi")
ARTICLE = [39, 72, 129, 42]
SCATTER, TREE, RING, COST, MEAN = (f"eq-mpi-{n}" for n in range(1, 6))
pytestmark = pytest.mark.time_limit(30)


def ranks_text(n_ranks):
    return f"{n_ranks} rank{'s' * (n_ranks != 1)}"


PAIRED = "4 ranks in pairs by comm.Split: 3 and 1, 2 and 0, the greater is rank 0 of its pair"


def numbers_of(text):
    """The whole numbers that a message names."""
    return [int(number) for number in re.findall(r"(?<![\d.])-?\d+(?![\d.]*\d)", text)]


def messages(result):
    return [ledger.n_messages for ledger in result.ledgers]


def collectives(result):
    return [ledger.count() - sum(r.to is not None or r.source is not None for r in ledger.records)
            for ledger in result.ledgers]  # fmt: skip


def expect_no_collective(result, read):
    names = [sorted({r.op for r in ledger.records if r.is_collective}) for ledger in result.ledgers]
    expect_equal(names, [[] for _ in names], name="collectives that rank", read=read)
    expect_true(not result.mismatch(), result.mismatch(), answer=result.mismatch(), read=read)


# ---- scatter_scale_average ----


def test_scatter_scale_average_of_the_article(ranks):
    case("4 ranks, values 39 72 129 42 on rank 0; the factor is left at one half, then it is a quarter")
    result = ranks(programs.scattered, [(ARTICLE,), (ARTICLE, 0.25)], n_ranks=4, backend="mpi")
    expect_close(result.values, [[35.25, 17.625]] * 4, name="means on rank", read=SCATTER)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_scatter_scale_average_of_other_values(ranks, n_ranks):
    case(f"{ranks_text(n_ranks)}: factors 2, -1 and 0.3; lists, tuples and arrays; each with one value for a rank")
    values = [2.5, -7.0, 11.0, 0.125][:n_ranks]
    runs = [(values, 2), (tuple(values), -1), (np.array(values), 0.3), ([7] * n_ranks, 0.5)]
    result = ranks(programs.scattered, runs, n_ranks=n_ranks, backend="mpi")
    mean = sum(values) / n_ranks
    expect_close(result.values, [[2 * mean, -mean, 0.3 * mean, 3.5]] * n_ranks, name="means on rank", read=SCATTER)


def test_scatter_scale_average_in_another_communicator(ranks):
    case(f"{PAIRED}; rank 3 has 8 and 20, rank 2 has 40 and 100; factor a quarter")
    values = [None, [1.0, 2.0], [40.0, 100.0], [8.0, 20.0]]
    result = ranks(programs.scattered_in_pairs, values, n_ranks=4, backend="mpi")
    expect_close(result.values, [17.5, 3.5, 17.5, 3.5], name="mean on rank", read=SCATTER)


def test_scatter_scale_average_leaves_its_values(ranks):
    case("4 ranks, the list on rank 0 afterwards")
    result = ranks(programs.kept, list(ARTICLE), n_ranks=4, backend="mpi")
    expect_equal(result.values[0], ARTICLE, name="values on rank 0 afterwards", read=SCATTER)


def test_scatter_scale_average_of_the_wrong_number_of_values(ranks):
    for n_values in (2, 17, 0):
        case(f"3 ranks, a list of {n_values} values: a ValueError on every rank, and no rank waits for ever")
        result = ranks(programs.scattered_wrongly, [1.5] * n_values, n_ranks=3, backend="mpi")
        for rank, text in enumerate(result.values):
            problem = f"rank {rank} raised nothing, expected a ValueError on every rank"
            expect_true(text is not None, problem, answer=result.values, read=SCATTER)
            said = {n_values, 3} <= set(numbers_of(text))
            problem = f"rank {rank} raised {text!r}, expected a message with {n_values} and 3"
            expect_true(said, problem, answer=text, read=SCATTER)


def test_scatter_scale_average_counts_its_collectives(ranks):
    case("4 ranks: one scatter, one reduce, one broadcast (or one scatter, one all-reduce); no barrier")
    result = ranks(programs.scattered, [(ARTICLE,)], n_ranks=4, backend="mpi")
    for ledger in result.ledgers:
        used = [r.op.lower() for r in ledger.records]
        allowed = (["bcast", "reduce", "scatter"], ["allreduce", "scatter"])
        said = f"rank {ledger.rank} calls {', '.join(used) or 'nothing'}, expected scatter, reduce, bcast"
        expect_true(sorted(used) in allowed, said, answer=used, read=SCATTER)


# ---- tree_broadcast ----


def test_tree_broadcast_by_hand(ranks):
    case("3 ranks, root 1; rank r begins with 10 r, 10 r + 1, 10 r + 2, 10 r + 3")
    result = ranks(programs.broadcast_once, 1, n_ranks=3, backend="mpi")
    expect_close(result.values, [np.arange(4) + 10.0] * 3, name="array on rank", read=TREE)
    expect_no_collective(result, TREE)


def test_tree_broadcast_of_another_dtype(ranks):
    case("2 ranks, root 0; rank 0 has 1 2 3, rank 1 has 10 20 30, in float32")
    result = ranks(programs.broadcast_typed, "float32", n_ranks=2, backend="mpi")
    for array, problem in result.values:
        expect_true(not problem, f"{problem}: MPI converts nothing", answer=problem, read=TREE)
        expected = np.array([1, 2, 3], np.float32)
        expect_close(array, expected, name="what is returned", answer=result.values, read=TREE)


@pytest.mark.parametrize("n_ranks", [1, 3, 4])
def test_tree_broadcast_from_every_root(ranks, n_ranks):
    case(f"{ranks_text(n_ranks)}, every root; float32 and float64; vectors, matrices, strided, one number, none")
    kinds = [
        ("flat", 7, "float32"),
        ("flat", 5, "float64"),
        ("every other", 6, "float32"),
        ("transposed", 6, "float64"),
    ]
    kinds += [("columns first", 8, "float32"), ("columns first on odd ranks", 8, "float32")]
    kinds += [("a number", 1, "float64"), ("flat", 0, "float32")]
    result = ranks(programs.broadcast, kinds, range(n_ranks), n_ranks=n_ranks, backend="mpi")
    for found in result.values:
        for i, (ours, theirs, is_same) in enumerate(found):
            kind, n, dtype = kinds[i // n_ranks]
            case(f"{ranks_text(n_ranks)}, root {i % n_ranks}, {n} numbers, {kind}, {dtype}")
            expect_close(ours, theirs, atol=0, rtol=0, name="array", read=TREE)
            expect_true(is_same, "the function did not return the array that it was given", answer=ours, read=TREE)


def test_tree_broadcast_in_another_communicator(ranks):
    case(f"{PAIRED}; from rank 1 of each pair; rank r of the four begins with 10 r, 10 r + 1, 10 r + 2")
    result = ranks(programs.broadcast_in_pairs, n_ranks=4, backend="mpi")
    expected = [np.arange(3) + 10.0 * (rank % 2) for rank in range(4)]
    expect_close(result.values, expected, name="array on rank", read=TREE)


@pytest.mark.parametrize("kind", ["flat", "every other"])
def test_tree_broadcast_of_an_array_that_cannot_be_written(ranks, kind):
    case(f"3 ranks, root 1, whose array is read-only; 6 float32, {kind}")
    result = ranks(programs.broadcast_read_only, kind, n_ranks=3, backend="mpi")
    expect_close(result.values, [np.ones(6, np.float32)] * 3, name="array on rank", read=TREE)


@pytest.mark.parametrize(("n_ranks", "root"), [(2, 1), (3, 2), (4, 0), (4, 3)])
def test_tree_broadcast_counts_its_rounds(ranks, n_ranks, root):
    case(
        f"{ranks_text(n_ranks)}, root {root}: each other rank receives once, in {math.ceil(math.log2(n_ranks))} rounds"
    )
    result = ranks(programs.broadcast_once, root, n_ranks=n_ranks, backend="mpi")
    expect_no_collective(result, TREE)
    sent_to = [[r.to for r in ledger.records if r.to is not None] for ledger in result.ledgers]
    received = [sum(to.count(rank) for to in sent_to) for rank in range(n_ranks)]
    expect_equal(received, [int(rank != root) for rank in range(n_ranks)], name="messages to rank", read=TREE)
    ready, todo = {root: 0}, [root]
    for rank in todo:  # grows while it is walked
        for nth, to in enumerate(sent_to[rank], start=1):
            ready[to] = ready[rank] + nth
            todo.append(to)
    rounds = max(ready.values())
    at_most = math.ceil(math.log2(n_ranks))
    expect_true(rounds <= at_most, f"the last rank has the array after {rounds} rounds, expected {at_most}",
                answer=sent_to, read=TREE)  # fmt: skip
    sizes = {r.n_bytes for ledger in result.ledgers for r in ledger.records if r.to is not None}
    expect_equal(sizes, {32}, name="bytes of a message of 4 float64", read=TREE)


def test_tree_broadcast_of_large_arrays(ranks):
    case("4 ranks, root 2, 8 MB: no send ends before it is received")
    result = ranks(programs.broadcast_large, 1_000_000, 2, n_ranks=4, backend="mpi")
    for rank, found in enumerate(result.values):
        problem = f"rank {rank} has numbers that the sender wrote after its tree_broadcast had returned"
        expect_true(found != "overwritten", problem, answer=result.values, read=TREE)
    expect_equal(result.values, ["right"] * 4, name="array on rank", read=TREE)


def test_tree_broadcast_from_no_rank(ranks):
    roots = (3, -1, 17, -45)
    case("3 ranks; roots 3, -1, 17, -45: a ValueError on every rank")
    result = ranks(programs.broadcast_from_nowhere, roots, n_ranks=3, backend="mpi")
    for rank, texts in enumerate(result.values):
        for root, text in zip(roots, texts, strict=True):
            case(f"3 ranks, root {root}: a ValueError on every rank")
            problem = f"rank {rank} raised nothing, expected a ValueError on every rank"
            expect_true(text is not None, problem, answer=result.values, read=TREE)
            named = numbers_of(text)
            said = root in named and (3 in named or {0, 2} <= set(named))
            problem = f"rank {rank} raised {text!r}, expected a message that names {root} and the 3 ranks"
            expect_true(said, problem, answer=text, read=TREE)


# ---- ring_all_reduce ----


def test_ring_all_reduce_by_hand(ranks):
    case("3 ranks with 1 2 3 4 5 6, ten times it, a hundred times it")
    result = ranks(programs.reduced_once, np.arange(1.0, 7.0), n_ranks=3, backend="mpi")
    expect_close(result.values, [111 * np.arange(1.0, 7.0)] * 3, name="sum on rank", read=RING)
    expect_no_collective(result, RING)


def test_ring_all_reduce_of_a_length_that_does_not_divide(ranks):
    case("3 ranks with 1 2 3 4 5 6 7 8, ten times it, a hundred times it: chunks of 3, 3 and 2")
    result = ranks(programs.reduced_once, np.arange(1.0, 9.0), n_ranks=3, backend="mpi")
    expect_close(result.values, [111 * np.arange(1.0, 9.0)] * 3, name="sum on rank", read=RING)


def test_ring_all_reduce_in_another_communicator(ranks):
    case(f"{PAIRED}; 1 2 3 times 1, 10, 100, 1,000 on ranks 0 to 3 of the four")
    result = ranks(programs.reduced_in_pairs, n_ranks=4, backend="mpi")
    expected = [np.arange(1.0, 4.0) * (1010 if rank % 2 else 101) for rank in range(4)]
    expect_close(result.values, expected, name="sum on rank", read=RING)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ring_all_reduce_of_each_dtype(ranks, dtype):
    case(f"3 ranks with 1 2 3, ten times it, a hundred times it, in {dtype}: one number a chunk")
    result = ranks(programs.reduced_typed, dtype, n_ranks=3, backend="mpi")
    for total, problem in result.values:
        expect_true(not problem, f"{problem}: MPI converts nothing", answer=problem, read=RING)
        expect_close(total, 111 * np.arange(1, 4, dtype=dtype), name="sum", read=RING)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_ring_all_reduce_beside_mpi(ranks, n_ranks):
    case(f"{ranks_text(n_ranks)}; lengths 0 to 9, 101; matrices, strided, one number; float32 and float64")
    kinds = [("flat", n, "float32") for n in (*range(10), 101)] + [("flat", 13, "float64")]
    kinds += [("every other", 6, "float32"), ("transposed", 10, "float64"), ("columns first", 14, "float32")]
    kinds += [("a number", 1, "float64")]
    result = ranks(programs.reduced, kinds, n_ranks=n_ranks, backend="mpi")
    for rank, found in enumerate(result.values):
        for i, (ours, theirs, is_kept) in enumerate(found):
            kind, n, dtype = kinds[i]
            case(f"{ranks_text(n_ranks)}, {n} numbers, {kind}, {dtype}")
            atol = 1e-6 if dtype == "float32" else 1e-14  # sums of up to 4, in another order
            expect_close(ours, theirs, atol=atol, rtol=0, name=f"sum on rank {rank}", read=RING)
            problem = f"rank {rank}: the argument has changed, or the function returned the argument itself"
            expect_true(is_kept, problem, answer=ours, read=RING)
            same = ours.tobytes() == result.values[0][i][0].tobytes()
            problem = f"ranks 0 and {rank} have sums whose last bits differ"
            expect_true(same, problem, answer=[ours, result.values[0][i][0]], read=RING)


@pytest.mark.parametrize(("n_ranks", "n"), [(2, 7), (3, 8), (4, 101), (4, 2)])
def test_ring_all_reduce_counts_its_messages(ranks, n_ranks, n):
    bound = math.ceil(n / n_ranks) * 8
    case(f"{ranks_text(n_ranks)}, {n} float64: {2 * (n_ranks - 1)} messages a rank, none above {bound} bytes")
    result = ranks(programs.reduced_once, np.arange(float(n)), n_ranks=n_ranks, backend="mpi")
    expect_no_collective(result, RING)
    if n >= n_ranks:  # an empty message need not be sent
        expect_equal(messages(result), [2 * (n_ranks - 1)] * n_ranks, name="messages of rank", read=RING)
    else:
        few = all(sent <= 2 * (n_ranks - 1) for sent in messages(result))
        expect_true(few, f"messages of each rank: {messages(result)}", answer=messages(result), read=RING)
    for ledger in result.ledgers:
        sends = [r for r in ledger.records if r.to is not None]
        sizes = [r.n_bytes for r in sends]
        largest = max(sizes, default=0)
        problem = f"rank {ledger.rank} sends {largest} bytes in a message, expected at most {bound}"
        expect_true(largest <= bound, problem, answer=largest, read=RING)
        to, right = {r.to for r in sends}, (ledger.rank + 1) % n_ranks
        said = f"rank {ledger.rank} sends to ranks {sorted(to)}, expected one neighbour, rank {right}"
        expect_true(to <= {right}, said, answer=to, read=RING)
        said = f"rank {ledger.rank} sends messages of {sizes} bytes: lengths of chunks differ by at most one number"
        expect_true(n < n_ranks or largest - min(sizes) <= 8, said, answer=sizes, read=RING)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ring_all_reduce_of_large_arrays(ranks, n_ranks):
    case(f"{ranks_text(n_ranks)}, 4 MB a message: no send ends before it is received")
    result = ranks(programs.reduced_large, n_ranks * 500_000 + 1, n_ranks=n_ranks, backend="mpi")
    for rank, found in enumerate(result.values):
        problem = f"rank {rank} has numbers that its neighbour wrote after its ring_all_reduce had returned"
        expect_true(found != "overwritten", problem, answer=result.values, read=RING)
    expect_equal(result.values, ["right"] * n_ranks, name="sum on rank", read=RING)


# ---- all_reduce_seconds ----


def test_all_reduce_seconds_by_hand():
    case("1,700 bytes, 17 ranks, 1 s a message, 100 bytes/s: a message of all takes 18 s, one of a 17th takes 2 s")
    found = {name: mpi.all_reduce_seconds(1700, 17, 1.0, 100.0, name) for name in ("naive", "tree", "ring")}
    expect_close(found, {"naive": 576.0, "tree": 180.0, "ring": 64.0}, name="seconds", read=COST)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5, 8, 9, 64, 65, 1024, 1025])
def test_all_reduce_seconds_of_latency_and_of_bandwidth(n_ranks):
    rounds = sum(2**k < n_ranks for k in range(12))
    latency = {"naive": 2 * (n_ranks - 1), "tree": 2 * rounds, "ring": 2 * (n_ranks - 1)}
    size = {"naive": 2 * (n_ranks - 1), "tree": 2 * rounds, "ring": 2 * (n_ranks - 1) / n_ranks}
    for name in latency:
        case(
            f"{name}, {ranks_text(n_ranks)}, 0 bytes, latency 3e-6 s, 1e9 bytes/s: {latency[name]} messages of "
            "3e-6 s one after the other"
        )
        found = mpi.all_reduce_seconds(0, n_ranks, 3e-6, 1e9, name)
        expect_close(found, 3e-6 * latency[name], atol=1e-15, name="seconds", read=COST)
        case(
            f"{name}, {ranks_text(n_ranks)}, 4e9 bytes, latency 0, 1e9 bytes/s: {size[name]:.4g} times the "
            "array, 4 s each"
        )
        found = mpi.all_reduce_seconds(4e9, n_ranks, 0.0, 1e9, name)
        expect_close(found, 4.0 * size[name], name="seconds", read=COST)


def test_all_reduce_seconds_by_name():
    case("arguments by their names")
    seconds = mpi.all_reduce_seconds(n_bytes=9, n_ranks=2, latency_s=1, bandwidth=4, algorithm="ring")
    expect_close(seconds, 4.25, name="seconds", read=COST)


@pytest.mark.parametrize("name", ["star", "Ring", ""])
def test_all_reduce_seconds_of_another_algorithm(name):
    case(f"algorithm {name!r}")
    with expect_raises(ValueError, name, "naive", "tree", "ring", read=COST):
        mpi.all_reduce_seconds(8, 2, 1.0, 1.0, name)


def test_all_reduce_seconds_of_another_algorithm_on_one_rank():
    case("algorithm 'star', 1 rank")
    with expect_raises(ValueError, "star", "naive", "tree", "ring", read=COST):
        mpi.all_reduce_seconds(8, 1, 1.0, 1.0, "star")


@pytest.mark.parametrize("n_ranks", [0, -46])
@pytest.mark.parametrize("name", ["naive", "tree", "ring"])
def test_all_reduce_seconds_of_no_ranks(n_ranks, name):
    case(f"{name}, n_ranks = {n_ranks}")
    with expect_raises(ValueError, str(n_ranks), read=COST):
        mpi.all_reduce_seconds(8, n_ranks, 3, 7, name)


@oracle
def test_all_reduce_seconds_keeps_its_laws():
    """Slower parts make it slower in proportion; none is better than the bound, or worse than the naive one."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(deadline=None)
    @given(st.integers(0, 10**12), st.integers(2, 5000), st.floats(1e-7, 1.0), st.floats(1e3, 1e12))
    def check(n_bytes, n_ranks, latency_s, bandwidth):
        ring, tree, naive = (
            mpi.all_reduce_seconds(n_bytes, n_ranks, latency_s, bandwidth, a) for a in ("ring", "tree", "naive")
        )
        assert max(ring, tree) <= naive * (1 + 1e-12)
        assert min(ring, tree) >= 2 * (n_ranks - 1) / n_ranks * n_bytes / bandwidth * (1 - 1e-12)
        slower = mpi.all_reduce_seconds(n_bytes, n_ranks, 2 * latency_s, bandwidth / 2, "ring")
        assert math.isclose(slower, 2 * ring, rel_tol=1e-9)

    check()


# ---- average_gradients_mpi ----


def expect_one_buffer(result, n_bytes):
    """One Allreduce, of the gradients and nothing else."""
    for ledger in result.ledgers:
        used = [r.op for r in ledger.records]
        expect_true(used in (["Allreduce"], ["Iallreduce"]),
                    f"rank {ledger.rank} calls {', '.join(used) or 'nothing'}, expected one Allreduce",
                    answer=used, read=MEAN)  # fmt: skip
        expect_true(ledger.bytes_sent == n_bytes,
                    f"rank {ledger.rank} sends {ledger.bytes_sent} bytes, expected {n_bytes}: only float32 gradients",
                    answer=ledger.bytes_sent, read=MEAN)  # fmt: skip


def test_average_gradients_mpi_by_hand(ranks):
    case("3 ranks, gradients (3, 6), (30, 60), (300, 600) of one parameter, and others of a second")
    grads = [{"a": [3.0 * 10**r, 6.0 * 10**r], "b": [1.0 + r, -5.0 * r]} for r in range(3)]
    result = ranks(programs.averaged, grads, n_ranks=3, backend="mpi")
    mean = {"a": torch.tensor([111.0, 222.0]), "b": torch.tensor([2.0, -5.0])}
    expect_close(result.values, [mean] * 3, name="gradient on rank", read=MEAN)


def test_average_gradients_mpi_where_some_are_none(ranks):
    case("4 ranks; gradients: a on all ranks, b on rank 2 only, c on ranks 0 and 3, d on none")
    grads = [
        {"a": [4.0, r], "b": [8.0, 4.0] if r == 2 else None, "c": [0.0, 2.0 + r] if r in (0, 3) else None, "d": None}
        for r in range(4)
    ]
    result = ranks(programs.averaged, grads, n_ranks=4, backend="mpi")
    mean = {"a": [4.0, 1.5], "b": [2.0, 1.0], "c": [0.0, 1.75], "d": [0.0, 0.0]}
    for rank, found in enumerate(result.values):
        for name, grad in found.items():
            problem = f"{name}.grad is None on rank {rank}, expected the mean {mean[name]}"
            expect_true(grad is not None, problem, answer=[list(grads.values()) for grads in result.values], read=MEAN)
        expect_close(found, {name: torch.tensor(m) for name, m in mean.items()}, name=f"gradient on rank {rank}",
                     read=MEAN)  # fmt: skip
    expect_one_buffer(result, 4 * 2 * 4)


def test_average_gradients_mpi_in_another_communicator(ranks):
    case(f"{PAIRED}; gradients (2, 6) times 1, 10, 100, 1,000 on ranks 0 to 3 of the four")
    result = ranks(programs.averaged_in_pairs, n_ranks=4, backend="mpi")
    expected = [torch.tensor([2.0, 6.0]) * (505 if rank % 2 else 50.5) for rank in range(4)]
    expect_close(result.values, expected, name="gradient on rank", read=MEAN)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_average_gradients_mpi_of_several_dtypes(ranks, n_ranks):
    case(
        f"{ranks_text(n_ranks)}; float32, bfloat16, float64, float16, a tied, a frozen and an empty parameter, a buffer"
    )
    result = ranks(programs.averaged_mixed, n_ranks=n_ranks, backend="mpi")
    for rank, (after, expected, same, changed) in enumerate(result.values):
        expect_close(after, expected, name=f"gradient on rank {rank}", read=MEAN)
        expect_equal(same, dict.fromkeys(same, True), name="is the gradient still the same tensor", read=MEAN)
        expect_true(not changed, f"{changed} on rank {rank}", answer=changed, read=MEAN)
    for ledger in result.ledgers:  # the test's own Allreduces come first
        found = [(r.op, r.n_bytes) for r in ledger.records][len(expected) :]
        said = f"rank {ledger.rank} calls {found or 'nothing'}, expected one Allreduce of 15 float64, 120 bytes"
        expect_true(found in ([("Allreduce", 120)], [("Iallreduce", 120)]), said, answer=found, read=MEAN)


def test_average_gradients_mpi_keeps_its_digits(ranks):
    case("3 ranks; float64 gradients that differ by 2**-40, and float16 gradients of 50,000")
    result = ranks(programs.averaged_precisely, n_ranks=3, backend="mpi")
    wide, half = torch.tensor([1 + 2.0**-40], dtype=torch.float64), torch.tensor([50_000.0], dtype=torch.float16)
    for rank, (found_wide, found_half) in enumerate(result.values):
        expect_close(found_wide - 1, wide - 1, atol=1e-15, rtol=0, name=f"gradient - 1 on rank {rank}", read=MEAN)
        expect_close(found_half, half, name=f"gradient on rank {rank}", read=MEAN)


def test_average_gradients_mpi_of_other_layouts(ranks):
    case("2 ranks; a transposed gradient, and a module without parameters")
    result = ranks(programs.averaged_layouts, n_ranks=2, backend="mpi")
    mean = (torch.arange(6.0).reshape(3, 2) * 1.5).T.contiguous()
    expect_close(result.values, [mean] * 2, name="gradient on rank", read=MEAN)


def test_average_gradients_mpi_makes_four_ranks_one(ranks):
    case("5 steps of gradient descent on batches of 12: on 4 ranks with 3 each, and on 1 rank")
    one, four = (ranks(programs.trained, 5, 12, n_ranks=n, backend="mpi").values for n in (1, 4))
    for rank, weights in enumerate(four):
        expect_close(weights, one[0], atol=1e-10, rtol=0, name=f"weights on rank {rank}", read=MEAN)


def test_average_gradients_mpi_counts_its_messages(ranks):
    case("2 ranks, 3 parameters of 2 float32: one Allreduce of a buffer")
    grads = [{"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}] * 2
    expect_one_buffer(ranks(programs.averaged, grads, n_ranks=2, backend="mpi"), 3 * 2 * 4)
