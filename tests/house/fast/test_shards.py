"""Shards that are gathered and reduced by copies: through files on CPU processes, and by copy engines between GPUs."""

from itertools import pairwise

import pytest
import torch

from lib.bench.kit import spawn
from lib.fast.shards import FullyShardedByCopies
from lib.ranks import pool
from tests.house.fast import shard_programs

N_STEPS = 3


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(("param_dtype", "rtol"), [(None, 1e-5), (torch.bfloat16, 0.05)])
def test_ranks_train_as_with_collectives(tmp_path, n_ranks, param_dtype, rtol):
    found = (
        pool("gloo")
        .run(
            shard_programs.train_through_files,
            str(tmp_path),
            param_dtype,
            N_STEPS,
            n_ranks=n_ranks,
            time_limit_s=40,
        )
        .values
    )
    for (losses, weights), (losses_by_copies, by_copies), met in found:
        torch.testing.assert_close(losses_by_copies, losses, rtol=rtol, atol=rtol)
        torch.testing.assert_close(by_copies, weights, rtol=rtol, atol=rtol)
        n_forwards, n_reduces = 3 * N_STEPS, 2 * N_STEPS * 5  # the root and four blocks
        assert len(met) == 2 * n_forwards + 2 * n_reduces
        assert all(one != following for one, following in pairwise(met)), "a signal could be sent before it is cleared"


@pytest.mark.time_limit(60)
def test_errors_leave_nothing_behind_and_a_unit_may_be_called_alone(tmp_path):
    found = pool("gloo").run(shard_programs.go_on_after_errors, str(tmp_path), n_ranks=2, time_limit_s=40).values
    assert found == [[True, True, True]] * 2


@pytest.mark.time_limit(60)
@pytest.mark.parametrize(
    ("forgotten", "complaint"),
    [
        ("", None),
        ("wait_stream", "does not wait for stream 0"),
        ("wait_event", "is not joined"),
        ("meet", "does not wait for"),
    ],
)
def test_streams_and_meetings_order_every_access(tmp_path, forgotten, complaint):
    found = pool("gloo").run(shard_programs.watch_steps, str(tmp_path), forgotten, n_ranks=2, time_limit_s=40).values
    for complaints in found:
        assert any(complaint in one for one in complaints) if complaint else not complaints, complaints


def test_units_of_several_dtypes_cannot_share_memory(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 1)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"torch\.float(32|64) and in torch\.float(32|64) cannot share memory"):
        FullyShardedByCopies(model)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.time_limit(120)
def test_gpus_train_as_with_collectives_launched_and_in_a_graph(tmp_path):
    n_ranks = torch.cuda.device_count()
    spawn(shard_programs.train_on_gpus, "nccl", n_ranks, tmp_path, limit_s=100)
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(n_ranks)]
    for found in every:
        for name, change in found.items():
            expected = found[f"collectives, {name.split(', ')[1]}"]
            error = (change - expected).norm() / expected.norm()
            assert error < (0.05 if "bfloat16" in name else 1e-3), f"{name}: {error:.1e} of the change is wrong"
