"""What the tests of `lib.fast.shards` run on ranks, of gloo or of NCCL."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lib.fast.copies import MakePlaces, Places
from lib.fast.models import capture
from lib.fast.shards import FullyShardedByCopies
from lib.fsdp import FullySharded
from tests.house.bench.yardstick_programs import generator, in_files, without_streams
from tests.house.fast.ordering import Watch

N_WORDS, DIM = 11, 6


class Block(nn.Module):
    """A layer with a frozen bias, whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=False)


class Words(nn.Module):
    """A model whose root embeds words and compares with the same embedding; two of its blocks share a layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(N_WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].down = self.blocks[0].down

    def forward(self, words: Tensor) -> Tensor:
        """The loss of predicting each next word."""
        x = self.embedding(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return cross_entropy((x @ self.embedding.weight.T).flatten(0, 1).float(), words[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    """This rank's words of a micro-batch."""
    return torch.randint(N_WORDS, (3, 5), generator=generator(100 * step + rank))


def train(wrapped: Any, rank: int, n_steps: int, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights at the end. Each step adds up two backwards, after evaluating the model."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(n_steps):
        with torch.no_grad():
            losses.append(wrapped(batch(-1, rank).to(device)).item())
        for i in range(2):
            loss = wrapped(batch(2 * step + i, rank).to(device))
            loss.backward()
            losses.append(loss.item())
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: values.cpu() for name, values in wrapped.gather_full_params().items()}


def noting(places: MakePlaces, met: list[int], rank: int) -> MakePlaces:
    """The same places, which note each meeting in ``met``; after a meeting one of the ranks sleeps for a moment."""
    numbers = iter(range(99))

    def noted(n: int, dtype: torch.dtype, device: torch.device) -> Places:
        made, meet = places(n, dtype, device)
        number = next(numbers)

        def meet_and_sleep() -> None:
            met.append(number)
            meet()
            time.sleep(0.01 * (len(met) % dist.get_world_size() == rank))

        return made, meet_and_sleep

    return noted


def train_through_files(rank: int, world_size: int, folder: str, param_dtype: torch.dtype | None, n_steps: int) -> Any:
    """What `train` returns for collectives and for copies, and the meetings of the latter."""
    met: list[int] = []
    collectives = train(FullySharded(Words(rank), param_dtype=param_dtype), rank, n_steps, torch.device("cpu"))
    with without_streams():
        places = noting(in_files(folder, world_size), met, rank)
        wrapped = FullyShardedByCopies(Words(rank), param_dtype=param_dtype, places=places)
        return collectives, train(wrapped, rank, n_steps, torch.device("cpu")), met


def go_on_after_errors(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether gradients are those of a fresh model after a forward and a backward that raised;
    and whether a unit that is called alone has the values of the last update.
    """
    with without_streams():
        wrapped: Any = FullyShardedByCopies(Words(0), places=in_files(folder, world_size))
        words = batch(0, rank)

        def fail(*_: Any) -> None:
            raise InterruptedError

        def gradients() -> list[Tensor]:
            wrapped.zero_grad()
            wrapped(words).backward()
            wrapped.finish_gradient_synchronization()
            return [p.grad.clone() for p in wrapped.parameters() if p.requires_grad]

        before, same = gradients(), []
        unit = wrapped.module.blocks[2]
        for register in (unit.register_forward_pre_hook, unit.register_full_backward_hook):
            hook = register(fail)
            try:
                gradients()
                same.append(False)
            except InterruptedError:
                hook.remove()
                same.append(all(map(torch.equal, gradients(), before)))
        with torch.no_grad():
            x = torch.randn(2, DIM, generator=generator(0))
            for p in wrapped.parameters():
                p.mul_(0.5)
            whole = wrapped.gather_full_params()
            up, down = (whole[f"blocks.2.{name}.weight"] for name in ("up", "down"))
            expected = x + torch.tanh(x @ up.T + whole["blocks.2.up.bias"]) @ down.T
            same.append(torch.allclose(unit(x), expected))
        return same


def train_on_gpus(rank: int, device: torch.device, folder: Path, n_steps: int = 6) -> None:
    """On GPUs: the same steps with NCCL's `FullySharded` and, launched and in a graph, by copies; saves by how much
    the weights have changed.
    """
    found = {}
    for dtype in (None, torch.bfloat16):
        for name in ("collectives", "launched", "graph"):
            kind: Any = FullySharded if name == "collectives" else FullyShardedByCopies
            wrapped = kind(Big(rank).to(device), param_dtype=dtype)
            found[f"{name}, {dtype}"] = steps_on_gpu(wrapped, rank, device, n_steps, name == "graph")
    torch.save(found, folder / f"{rank}.pt")


class Big(nn.Module):
    """Units large enough that copies and products take a while on a GPU."""

    def __init__(self, rank: int, dim: int = 1024, n_blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(n_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def steps_on_gpu(wrapped: Any, rank: int, device: torch.device, n_steps: int, in_graph: bool) -> Tensor:
    """By how much some steps have changed the weights, in one row."""
    before = in_one_row(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=torch.tensor(3.0, device=device), fused=True)
    inputs = torch.randn(64, 1024, device=device, generator=torch.Generator(device).manual_seed(rank))

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        for part in inputs.chunk(2):
            loss = wrapped(part)
            loss.backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        return loss.detach()

    n_warmup = 2 if in_graph else 0
    take = capture(step, n_warmup, on_ranks=True) if in_graph else step
    for _ in range(n_steps - n_warmup):
        if rank == 0:
            torch.cuda._sleep(3_000_000)  # the others must wait for the slowest
        take()
    return in_one_row(wrapped) - before


def in_one_row(wrapped: Any) -> Tensor:
    """All weights, on the host."""
    return torch.cat([values.flatten() for values in wrapped.gather_full_params().values()]).cpu()


def watch_steps(rank: int, world_size: int, folder: str, forgotten: str, n_steps: int = 3) -> list[str]:
    """What is not ordered in steps as `train` takes them, each as in a recording of its own."""
    watch = Watch(forgotten)
    with watch.watching():
        wrapped: Any = FullyShardedByCopies(
            Words(rank), param_dtype=torch.bfloat16, places=watch.places(in_files(folder, world_size))
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(n_steps):
            watch.begin_step()
            with torch.no_grad():
                wrapped(batch(step, rank))
            watch.begin_step()
            for i in range(2):
                wrapped(batch(step + i, rank)).backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            watch.end_step()
    return list(dict.fromkeys(watch.complaints))
