"""Means of gradients by copies: through files on CPU processes, and by copy engines between GPUs."""

import pytest
import torch

from lib.bench.kit import spawn
from lib.bench.yardstick.copies import CopyDDP, InTurn, MeanByCopies, in_peers_memory
from lib.bench.yardstick.parts import waiting_by_command
from lib.ranks import pool
from tests.house.bench import yardstick_programs


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 33, 1000])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_mean_whatever_the_length(tmp_path, n_ranks, n, sent):
    found = (
        pool("gloo")
        .run(yardstick_programs.mean_by_copies, str(tmp_path), n, sent, n_ranks=n_ranks, time_limit_s=40)
        .values
    )
    for got, want in found:
        torch.testing.assert_close(got, want)
    for got, _ in found[1:]:
        torch.testing.assert_close(got, found[0][0], rtol=0, atol=0, msg="ranks differ")


def test_no_meeting_is_used_twice_in_a_row(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    met, numbers = [], iter(range(9))

    def places(size, dtype, device):
        number = next(numbers)
        return [torch.zeros(size, dtype=dtype) for _ in range(2)], lambda: met.append(number)

    mean = MeanByCopies(10, torch.device("cpu"), torch.float32, places)
    for _ in range(3):
        mean(torch.ones(10))
    assert len(met) == 6
    assert all(met[i] != met[i + 1] for i in range(5)), "a signal could be sent again before it is cleared"


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


class Arriving(CopyDDP):
    """A ``CopyDDP`` without processes, whose second parameter's mean arrives first."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.first, self.second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.means = {self.first: None, self.second: None}
        self.seen = []

    def finished(self):
        for p, mean in ((self.second, 2.0), (self.first, 1.0)):
            p.grad = torch.full((2,), mean)
            self.seen.append([q.tolist() for q in self.means])
            yield p


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def test_each_parameter_is_updated_when_its_own_gradient_is_the_mean():
    model = Arriving()
    optimizer = InTurn(model, plain_sgd)
    optimizer.step()
    assert model.seen == [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-2.0, -2.0]]], "the second waits for nobody"
    assert [p.tolist() for p in model.means] == [[-1.0, -1.0], [-2.0, -2.0]]
    optimizer.zero_grad()
    assert [p.grad for p in model.means] == [None, None]


def test_a_gradient_that_nobody_averaged_is_no_silent_loss():
    model = Arriving()
    model.finished = lambda: iter(())
    model.first.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="1 of 2 parameters have gradients that nobody averaged"):
        InTurn(model, plain_sgd).step()
