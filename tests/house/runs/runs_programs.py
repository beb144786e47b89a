"""What the ranks of test_runs.py do: the programs of lib.runs, one after the other, as one process each."""

import contextlib
import io
import os
import signal
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from lib.fast.copies import CopyDDP
from lib.fast.shards import FullyShardedByCopies
from lib.linear_attention import GatedDeltaNet
from lib.ranks import milestone
from lib.runs import train_gpt2, train_llama, train_vit
from lib.runs.engine import context, strategies, tasks
from lib.runs.engine.log import Log
from lib.runs.engine.loop import Run
from lib.runs.engine.signals import STATUS
from tests.house.bench.yardstick_programs import in_files, without_streams

PROGRAMS = {"vit": train_vit.main, "gpt2": train_gpt2.main, "llama": train_llama.main}


def run_all(rank: int, world_size: int, commands: list[str]) -> list[tuple[int, str]]:
    """Each command's exit status and what it said on its error stream."""
    results = []
    for command in commands:
        program, *argv = command.split()
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = PROGRAMS[program](["--device", "cpu", *argv, "--quiet"])
        results.append((status, said.getvalue()))
        wait_for_all()
    return results


def run_all_fused(rank: int, world_size: int, commands: list[str]) -> list[tuple[int, str]]:
    """`run_all` with PyTorch's AdamW in one kernel, as on a GPU: it takes no mixture of tensors."""

    class Fused(torch.optim.AdamW):  # a class, so that the engine knows its type
        def __init__(self, *args: Any, **kw: Any):
            super().__init__(*args, **kw | {"fused": True})

    with mock.patch.object(torch.optim, "AdamW", Fused):
        return run_all(rank, world_size, commands)


def run_by_copies(rank: int, world_size: int, commands: list[str], folder: str) -> list[tuple[int, str]]:
    """`run_all` as between GPUs that can read each other's memory, which here lies in files."""
    made = iter(range(len(commands)))

    def through_files(kind: Any) -> Any:
        def wrap(*args: Any, **settings: Any) -> torch.nn.Module:
            own = f"{folder}/{next(made)}"
            os.makedirs(own, exist_ok=True)
            return kind(*args, **settings, places=in_files(own, world_size))

        return wrap

    in_turn = mock.Mock(wraps=strategies.update_in_turn)
    here: dict[str, Any] = {"share_a_host": lambda device: True, "update_in_turn": in_turn}
    here |= {kind.__name__: through_files(kind) for kind in (CopyDDP, FullyShardedByCopies)}
    with mock.patch.multiple(strategies, **here), without_streams():
        results = run_all_fused(rank, world_size, commands)
    assert in_turn.called == any("--strategy ddp --optimizer adamw" in command for command in commands)
    assert next(made, None) is None, "every command's model is wrapped by copies"
    return results


def wait_for_all() -> None:
    """Until no rank is inside of the last run: the next one looks at its folder's lock."""
    if dist.is_initialized():
        dist.barrier()


def asked_and_resumed(
    rank: int, world_size: int, whole: list[str], here: list[str], step: int, reads_late: bool
) -> list[tuple[int, str]]:
    """Runs from end to end; others of which the last rank alone is asked to leave, in the midst of a step,
    and which then go on.

    With ``reads_late`` numbers are read when the next step has been begun, as they are on a GPU.
    """
    set_lr, init = Run.set_lr, Log.__init__

    def ask(self, now: int) -> float:
        if now == step and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_lr(self, now)

    def late(self, options, task, device, *more) -> None:
        init(self, options, task, torch.device("meta") if reads_late else device, *more)

    with mock.patch.object(Run, "set_lr", ask), mock.patch.object(Log, "__init__", late):
        left = run_all(rank, world_size, here)
    last = step + 2 + reads_late
    for status, said in left:
        assert status == STATUS, left
        assert rank > 0 or f"asked to leave after step {last} of" in said, said
    return run_all(rank, world_size, whole) + run_all(rank, world_size, here)


def run_compiled(rank: int, world_size: int, command: str) -> list[tuple[int, str]]:
    """One command whose ``--compile`` traces graphs and makes no kernels of them:
    the optimizer of DDP's graphs would be asked too.
    """
    whole = torch.compile
    eager: Any = lambda function, **settings: whole(function, **{**settings, "backend": "eager"})
    try:
        with mock.patch.object(torch, "compile", eager):
            return run_all(rank, world_size, [command])
    finally:
        tasks._compiled_functions.clear()
        torch._dynamo.reset()


def run_fsdp(rank: int, world_size: int, commands: list[str]) -> list[tuple[int, str]]:
    """Each command; and how many tensors their strategies keep beside the model, which should be none."""
    go, kept = Run.go, list[Any]()

    def go_and_look(self) -> bool:
        is_done = go(self)
        kept.extend(leaf for leaf in tree_leaves(list(vars(self.strategy).values())) if torch.is_tensor(leaf))
        return is_done

    with mock.patch.object(Run, "go", go_and_look):
        return [*run_all(rank, world_size, commands), (len(kept), "")]


def divided_states(rank: int, world_size: int, length: int, dtype: torch.dtype) -> list[tuple[int, str]]:
    """A linear layer on a piece of the sequence for each rank, and the whole layer on the whole sequence."""
    torch.manual_seed(0)
    net = GatedDeltaNet(12, 2, 4, 6, 5, conv_kernel_size=3, chunk_size=4).to(dtype)
    x = torch.randn(2, length, 12, dtype=dtype).requires_grad_()
    seed = torch.randn(2, length, 12, dtype=dtype)
    whole = net(x)
    expected = torch.autograd.grad((whole * seed).sum(), [x, *net.parameters()])
    mine = slice(rank * length // world_size, (rank + 1) * length // world_size)
    milestone("forward")
    piece = context.recur(net, dist.group.WORLD, x[:, mine])
    milestone("backward")
    found = torch.autograd.grad((piece * seed[:, mine]).sum(), [x, *net.parameters()])
    milestone("end")
    for gradient in found:
        dist.all_reduce(gradient)
    exact = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(piece, whole[:, mine], rtol=exact, atol=exact)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=exact, atol=exact)
    return [(0, "")]


class Killed(Exception):
    """Stands for the end of a process."""


def run_until(rank: int, world_size: int, command: str, step: int) -> None:
    """Go on until ``step`` begins, and stop there as a killed process would: without another word."""
    set_lr = Run.set_lr

    def die(self, now: int) -> float:
        if now == step:
            raise Killed
        return set_lr(self, now)

    try:
        with mock.patch.object(Run, "set_lr", die):
            run_all(rank, world_size, [command])
    except Killed:
        return wait_for_all()
    raise AssertionError(f"the run ended before step {step}")


def kill_and_resume(rank: int, world_size: int, commands: list[str], step: int) -> list[tuple[int, str]]:
    """Each run killed at a step and started again."""
    for command in commands:
        run_until(rank, world_size, command, step)
    return run_all(rank, world_size, commands)


def whole_and_killed(
    rank: int, world_size: int, whole: list[str], here: list[str], there: list[str], step: int
) -> list[tuple[int, str]]:
    """Runs from end to end; others killed at a step, of which those that are to go on here do so."""
    for command in there:
        run_until(rank, world_size, command, step)
    return run_all(rank, world_size, whole) + kill_and_resume(rank, world_size, here, step)
