"""What the ranks of test_graph.py do."""

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lib.bench.ddp import make_run
from lib.fast.models import capture
from lib.runs.engine.loop import Run
from lib.runs.engine.strategies import HybridSharded
from tests.house.runs import runs_programs as programs

N_STEPS = 4
Steps = tuple[list[Tensor], list[Tensor]]
"""What each step returned, and this rank's shards after them."""


def leave() -> None:
    """End this process when all ranks are done: a graph that is left could keep NCCL from ending."""
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


class Recording(TorchDispatchMode):
    """Stands for a recording, in which the host cannot read a number of the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        return function(*args, **(kwargs or {}))


def step_without_the_host(rank: int, world_size: int, flags: str) -> list[float]:
    """What a step returns in which no number is read; the optimizer does nothing, because on a CPU it reads some."""
    run = make_run(f"{flags} --graph --device cpu", 4, torch.device("cpu"))
    run.set_lr(0)
    inputs, targets = run.batch()
    with mock.patch.object(run.optimizer, "step"), Recording():
        numbers = run.plain_step(inputs, targets)
    return numbers.tolist()


def distinct_tokens(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """A batch without a token twice: the embedding's gradient adds up a token's rows in any order."""
    inputs, _ = run.batch()
    chance = torch.Generator().manual_seed(10 * step + run.world.rank)
    tokens = torch.randperm(run.task.config.vocab_size, generator=chance)[: inputs.numel()].view_as(inputs)
    return tokens.to(inputs.device), tokens.roll(1).to(inputs.device)


def steps_of(flags: str, in_graph: bool, device: torch.device) -> Steps:
    """Steps of a run with ``--graph``, recorded or launched one by one, at rates that change."""
    run = make_run(f"{flags} --graph --warmup 2 --steps 9 --length 32", 4, device)
    if in_graph:
        run.record_graph()
    numbers = []
    for step in range(N_STEPS):
        run.set_lr(step)
        numbers.append(run.step(*distinct_tokens(run, step)).cpu())
    shards = [p.detach().cpu() for p in run.parameters]
    del run.step
    return numbers, shards


def launched_and_recorded(rank: int, device: torch.device, flags: list[str], commands: list[str], folder: str) -> None:
    """Save `steps_of` for each run, first launched and then recorded; then run the programs."""
    found: list[list[Steps]] = [[steps_of(one, in_graph, device) for in_graph in (False, True)] for one in flags]
    found.append([copies_of_shards(rank, in_graph, device) for in_graph in (False, True)])
    torch.save(found, f"{folder}/{rank}.pt")
    assert programs.run_all(rank, dist.get_world_size(), commands) == [(0, "")] * len(commands)
    leave()


def copies_of_shards(rank: int, in_graph: bool, device: torch.device) -> Steps:
    """Steps of a model that each rank holds alone, in a group of its own, and whose gradients all of them average."""
    torch.manual_seed(0)
    own = [dist.new_group([i]) for i in range(dist.get_world_size())][rank]
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(device)
    wrapped: Any = HybridSharded(model, list(model), copies=dist.group.WORLD, group=own)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=torch.tensor(0.1, device=device), fused=True)
    inputs = torch.randn(5, 6, device=device, generator=torch.Generator(device).manual_seed(rank))

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        for i in range(2):
            wrapped.begin(i == 1)
            loss = wrapped(inputs[i:]).square().mean()
            loss.backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        return loss.detach()

    n_warmup = 2
    take = capture(step, n_warmup, on_ranks=True) if in_graph else step
    losses = [take().cpu() for _ in range(N_STEPS if in_graph else N_STEPS + n_warmup)]
    return losses[-N_STEPS:], [p.detach().cpu() for p in wrapped.parameters()]
