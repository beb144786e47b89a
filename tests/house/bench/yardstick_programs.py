"""What the tests of `lib.bench.yardstick.replicas` and `lib.bench.yardstick.copies` run on ranks,
of gloo or of NCCL.
"""

import itertools
import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

from lib.bench.yardstick.parts import make_ways, meeting
from lib.bench.yardstick.replicas import RowViT, train_step
from lib.fast.copies import CopyDDP, InTurn, in_peers_memory, lost_rank
from lib.fast.models import Path, capture
from lib.given.models.vit import ViTConfig
from solutions.ddp import OverlapDDP
from solutions.fsdp import FullySharded
from solutions.vit import VisionTransformer

CONFIG = ViTConfig(image_size=8, patch_size=4, n_classes=5, dim=16, n_layers=5, n_heads=2, hidden_dim=24)
PATH = Path(short_gelu=True)
IN_BF16 = Path(dtype=torch.bfloat16)


def parts(seed=0, path=PATH):
    torch.manual_seed(seed)
    return RowViT(VisionTransformer(CONFIG), path, 1)


def batch(n=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(5, (n,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_alone(path=PATH, n_steps=3):
    """One process, the whole batch."""
    model, (images, labels) = parts(path=path), batch()
    step = train_step(lambda: model(images, labels), sgd(model.parameters()))
    return [step().item() for _ in range(n_steps)], model.named_values()


def train_on_ranks(rank, world_size, strategy, n_steps=3):
    """Each rank its share of the batch; a rank's own first weights must not count."""
    images, labels = (x.chunk(world_size)[rank] for x in batch())
    path = IN_BF16 if strategy == "sharded, bf16" else PATH
    model = parts(seed=rank, path=path)
    wrapped: Any = (
        OverlapDDP(model)
        if strategy == "data"
        else FullySharded(model, param_dtype=None if path is PATH else path.dtype)
    )
    optimizer = sgd(wrapped.parameters())
    step = train_step(lambda: wrapped(images, labels), optimizer, wrapped.finish_gradient_synchronization)
    losses = []
    for _ in range(n_steps):
        dist.all_reduce(loss := step() / world_size)
        losses.append(loss.item())
    if strategy == "data":
        return losses, model.named_values()
    rows = wrapped.gather_full_params()
    return losses, {n: v for i, p in enumerate(model.parts) for n, v in p.named(rows[f"parts.{i}.row"]).items()}


def step_each_way(rank, world_size):
    """For each way of ``lib.bench.yardstick.parts``: the all-reduces of a step,
    and whether all ranks have its gradients.
    """
    model: Any = OverlapDDP(parts())
    found = {}
    for name, step in make_ways(model, tuple(x.chunk(world_size)[rank] for x in batch())).items():
        with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sent:
            step()
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        every = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(every, mine)
        found[name] = sent.call_count, torch.equal(*every)
    return found


def in_files(folder, world_size):
    """Makes places in files, which all ranks of one machine can read, for want of GPUs."""
    count = itertools.count()

    def places(size, dtype, device):
        number = next(count)
        paths = [f"{folder}/{number}-{rank}" for rank in range(world_size)]
        made = [torch.from_file(path, shared=True, size=size, dtype=dtype) for path in paths]
        dist.barrier()  # who makes a file that was empty writes a byte of zeros at its start
        return made, dist.barrier

    return places


def without_streams():
    """Lets `CopyDDP` run on a CPU, where everything happens in order."""
    streams: Any = {"Stream": MagicMock(), "current_stream": MagicMock(), "stream": lambda stream: nullcontext()}
    return patch.multiple(torch.cuda, **streams)


def mean_by_copies(rank, world_size, folder, sizes, sent):
    """Three means in a row of gradients that differ on each rank, through memory that lies in files;
    and what was expected. In the second round one rank has no gradient of the first parameter.
    """
    got, want = [], []
    with without_streams():
        model = torch.nn.ParameterList(torch.zeros(n) for n in sizes)
        copies = CopyDDP(model, 80 / 2**20, sent, in_files(folder, world_size))
        for seed in range(3):
            every = [torch.randn(sum(sizes), generator=generator(10 * seed + r)) for r in range(world_size)]
            for p, grad in zip(model, every[rank].clone().split(sizes), strict=True):
                p.grad = grad
            if seed == 1:
                every[0][: sizes[0]] = 0
                if rank == 0:
                    model[0].grad = None
            copies.finish_gradient_synchronization()
            got.append(torch.cat([p.grad for p in model]))
            want.append(torch.stack([x.to(sent) for x in every]).float().mean(0))
    return got, want


def generator(seed):
    return torch.Generator().manual_seed(seed)


def train_through_files(rank, world_size, folder, n_steps=3):
    """The weights after steps with ``OverlapDDP``, with ``CopyDDP``, and in turn;
    and what a second backward is told.
    """
    images, labels = (x.chunk(world_size)[rank] for x in batch())
    found = {}
    with without_streams():
        for name in ("collectives", "at the end", "in turn"):
            model = parts(seed=rank)
            places = in_files(f"{folder}/{name}", world_size)
            wrapped: Any = OverlapDDP(model) if name == "collectives" else CopyDDP(model, 0.01, places=places)
            if name == "in turn":
                optimizer, finish = InTurn(wrapped, sgd), lambda: None
            else:
                optimizer, finish = sgd(model.parameters()), wrapped.finish_gradient_synchronization
            step = train_step(lambda w=wrapped: w(images, labels), optimizer, finish)
            for _ in range(n_steps):
                step()
            found[name] = model.named_values()
        wrapped(images, labels).backward()
        loss = wrapped(images, labels)  # completes the round that was left open
        loss.backward(retain_graph=True)
        try:
            loss.backward()
        except RuntimeError as error:
            found["twice"] = str(error)
        with wrapped.no_sync():
            wrapped(images, labels).backward()
        found["averaging"] = len(wrapped.started)
    return found


def train_by_copies(rank, device, n_steps, folder):
    """On GPUs: the same steps with chapter 10's ``OverlapDDP`` and, in several ways, with ``CopyDDP``;
    saves the weights.
    """
    found = {}
    for name in ("collectives", "copies", "in turn", "graph in turn"):
        images, labels = (x.chunk(dist.get_world_size())[rank].to(device) for x in batch(8))
        with device:
            model = parts(seed=rank)
        wrapped: Any = OverlapDDP(model) if name == "collectives" else CopyDDP(model, 0)
        if "in turn" in name:
            optimizer, finish = InTurn(wrapped, sgd), lambda: None
        else:
            optimizer, finish = sgd(model.parameters()), wrapped.finish_gradient_synchronization
        step = train_step(lambda w=wrapped, x=images, y=labels: w(x, y), optimizer, finish)
        n_warmup = 2 if "graph" in name else 0
        step = capture(step, n_warmup, on_ranks=True) if n_warmup else step
        for _ in range(n_steps - n_warmup):
            step()
        found[name] = torch.cat([value.flatten() for value in model.named_values().values()]).cpu()
    torch.save(found, f"{folder}/{rank}.pt")
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # a graph with collectives could keep NCCL from ending


def meet_on_streams(rank, device, n_rounds=4):
    """Two streams of one GPU in the place of two ranks: the first one adds to a number late,
    and the second one reads it.
    """
    signals = torch.zeros(4, 2, dtype=torch.int32, device=device)
    number, seen = torch.zeros(2, device=device)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    meetings = [(meeting(list(signals[:2]), i), meeting(list(signals[2:]), i)) for i in range(2)]

    def take(i):
        meet, meet_again = meetings[i]
        if i == 0:
            torch.cuda._sleep(20_000_000)
            number.add_(1)
        meet()
        if i == 1:
            seen.copy_(number)
        meet_again()

    def run_alone(runs):
        """Load all kernels, which the driver does not do while a stream waits: with every signal sent,
        nothing waits.
        """
        signals.fill_(1)
        torch.cuda.synchronize()
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                run()
            torch.cuda.synchronize()
        signals.zero_()
        number.zero_()
        torch.cuda.synchronize()

    eager = [partial(take, 0), partial(take, 1)]
    run_alone(eager)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for i, graph in enumerate(graphs):
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            take(i)
    for runs in (eager, [graph.replay for graph in graphs]):
        run_alone(runs)
        for turn in range(1, n_rounds + 1):
            for i in (0, 1) if turn == 1 else (1, 0):
                with torch.cuda.stream(streams[i]):
                    runs[i]()
            torch.cuda.synchronize()
            assert seen.item() == turn
            assert not signals.any(), "every signal is cleared"


def mean_on_gpus(rank, device, n, sent, places, folder):
    """On GPUs: means of random gradients by copies, eager and in a graph, beside those of NCCL."""
    model = torch.nn.ParameterList([torch.zeros(n, device=device)])
    copies = CopyDDP(model, 0, sent, places)
    gradient = torch.empty(n, device=device)

    def average():
        model[0].grad = gradient
        copies.finish_gradient_synchronization()
        return model[0].grad

    average()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = average()
    found = []
    for seed in range(6):
        own = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(100 * seed + rank))
        gradient.copy_(own)
        dist.all_reduce(want := own.to(sent).float(), op=dist.ReduceOp.AVG)
        if seed % 2:
            graph.replay()
        else:
            result = average()
        found.append((result.cpu(), want.cpu()))
    torch.save(found, f"{folder}/{rank}.pt")


def leave_the_others(rank, device, folder):
    """On GPUs: the last rank leaves before a mean; each of the others saves what it would tell its user."""
    model = torch.nn.ParameterList([torch.zeros(1000, device=device)])
    copies = CopyDDP(model, places=partial(in_peers_memory, patience_s=3))
    copies.finish_gradient_synchronization()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank < dist.get_world_size() - 1:
        copies.finish_gradient_synchronization()
        try:
            torch.cuda.synchronize()
            said = "nothing"
        except RuntimeError as error:
            said = lost_rank(error) or str(error)
        (folder / str(rank)).write_text(said)
    os._exit(0)
