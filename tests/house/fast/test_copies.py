"""Means of gradients by copies: through files on CPU processes, and by copy engines between GPUs."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.bench.kit import spawn
from lib.bench.yardstick.parts import waiting_by_command
from lib.fast import copies
from lib.fast.copies import CopyDDP, InTurn, in_peers_memory, lost_rank, share_a_host
from lib.ranks import pool
from tests.house.bench import yardstick_programs


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1,), (33, 2, 1000, 5, 5)])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_mean_whatever_the_length(tmp_path, n_ranks, sizes, sent):
    found = (
        pool("gloo")
        .run(yardstick_programs.mean_by_copies, str(tmp_path), sizes, sent, n_ranks=n_ranks, time_limit_s=40)
        .values
    )
    for got, want in found:
        torch.testing.assert_close(got, want)
    for got, _ in found[1:]:
        torch.testing.assert_close(got, found[0][0], rtol=0, atol=0, msg="ranks differ")


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_no_meeting_is_used_twice_in_a_row(monkeypatch, sent):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(copies, "broadcast_parameters", lambda module: None)
    met, numbers = [], iter(range(9))

    def places(size, dtype, device):
        number = next(numbers)
        return [torch.zeros(size, dtype=dtype) for _ in range(2)], lambda: met.append(number)

    for n_parameters in (1, 2):
        model = torch.nn.ParameterList(torch.zeros(10) for _ in range(n_parameters))
        with yardstick_programs.without_streams():
            wrapped = CopyDDP(model, 0, sent, places)
            for _ in range(3):
                wrapped.finish_gradient_synchronization()
        assert len(met) == 3 * (2 * n_parameters + 1)
        assert all(one != next_one for one, next_one in pairwise(met)), "a signal could be sent before it is cleared"
        met.clear()


def test_a_bucket_is_full_before_the_next_begins():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 1, 9, 1, 3)]
    found = copies.fill_buckets(parameters, 16)
    assert [[p.numel() for p in bucket] for bucket in found] == [[2, 1], [9], [1, 3]]
    assert len(copies.fill_buckets(parameters, 0)) == 5


@pytest.mark.parametrize(
    ("others", "can_read", "expected"),
    [
        ([("b", "ab")], "ab", True),
        ([("c", "cd")], "ab", False),  # a GPU of another host
        ([("b", "b")], "ab", False),  # which sees only itself
        ([("b", "ab")], "a", False),  # not linked
        ([("a", "ab")], "ab", False),  # two ranks on one GPU
        ([], "ab", False),  # nobody to average with
    ],
)
def test_copies_are_for_gpus_that_can_read_each_other(monkeypatch, others, can_read, expected):
    def gather(found, own):
        assert own == ("a", list(can_read))
        found[:] = [own, *((gpu, list(seen)) for gpu, seen in others)]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid="ab"[i]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: "ab"[j] in can_read)
    assert share_a_host(torch.device("cuda", 0)) == expected


def test_a_rank_that_does_not_come_is_named_and_other_errors_are_not(monkeypatch):
    failure = RuntimeError("CUDA error: unspecified launch failure")
    assert lost_rank(failure) is None, "nobody waits in this process"
    monkeypatch.setattr(copies, "patience", [600.0])
    assert "another rank has not come to average gradients for 600 s" in lost_rank(failure)
    assert lost_rank(RuntimeError("CUDA error: invalid argument")) is None


@pytest.mark.time_limit(60)
def test_ranks_train_as_with_collectives_at_the_end_and_in_turn(tmp_path):
    for name in ("collectives", "at the end", "in turn"):
        (tmp_path / name).mkdir()
    found = pool("gloo").run(yardstick_programs.train_through_files, str(tmp_path), n_ranks=2, time_limit_s=40).values
    for mine in found:
        for name in ("at the end", "in turn"):
            torch.testing.assert_close(mine[name], mine["collectives"])
            torch.testing.assert_close(mine[name], found[0][name], rtol=0, atol=0)
        assert mine["twice"].startswith("a second backward before the first one's gradients were used")
        assert mine["averaging"] == 0, "nothing is averaged under no_sync"


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_two
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(
    ("n", "sent", "places"),
    [
        (1001, torch.float32, in_peers_memory),
        (5_000_000, torch.float32, in_peers_memory),
        (5_000_000, torch.bfloat16, waiting_by_command),
    ],
)
def test_gpus_compute_the_mean_that_nccl_computes_also_in_a_graph(tmp_path, n, sent, places):
    n_ranks = torch.cuda.device_count()
    spawn(yardstick_programs.mean_on_gpus, "nccl", n_ranks, n, sent, places, tmp_path, limit_s=100)
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(n_ranks)]
    for pairs in zip(*every, strict=True):
        for got, want in pairs:
            torch.testing.assert_close(got, want)
            assert torch.equal(got, pairs[0][0]), "ranks differ"


@pytest.mark.gpu
@needs_two
@pytest.mark.time_limit(120)
def test_gpus_train_as_with_collectives(tmp_path):
    n_ranks = torch.cuda.device_count()
    spawn(yardstick_programs.train_by_copies, "nccl", n_ranks, 6, tmp_path, limit_s=100)
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(n_ranks)]
    for found in every:
        for name, weights in found.items():
            torch.testing.assert_close(weights, found["collectives"], msg=lambda text, name=name: f"{name}: {text}")
            assert torch.equal(weights, every[0][name]), f"{name}: ranks differ"


@pytest.mark.gpu
@needs_two
@pytest.mark.time_limit(120)
def test_a_rank_that_is_gone_is_missed(tmp_path):
    spawn(yardstick_programs.leave_the_others, "nccl", torch.cuda.device_count(), tmp_path, limit_s=100)
    for path in tmp_path.iterdir():
        assert "another rank has not come to average gradients for 3 s" in path.read_text(), path


def test_each_bucket_is_updated_when_its_means_are_there():
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    seen = []

    def finished():
        for p, mean in ((first, 1.0), (second, 2.0)):
            p.grad = torch.full((2,), mean)
            seen.append([first.tolist(), second.tolist()])
            yield [p]

    model: Any = SimpleNamespace(means=[SimpleNamespace(parameters=[p]) for p in (first, second)], finished=finished)
    optimizer = InTurn(model, partial(torch.optim.SGD, lr=1.0))
    optimizer.step()
    assert seen == [[[0.0, 0.0], [0.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]], "the first waits for nobody"
    assert second.tolist() == [-2.0, -2.0]
    optimizer.zero_grad()
    assert [first.grad, second.grad] == [None, None]
