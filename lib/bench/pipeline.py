"""Measure pipelines: GPT-2 XL under each schedule, beside PyTorch's pipelining and chapter 12's sharding;
then with checkpoints.

``python -m lib.bench.pipeline --ranks 2`` starts its ranks itself, one for each GPU (about two minutes),
and writes ``chapters/measurements/pipeline.json``.
``--ranks 2 4`` measures both.
``--tiny --device cpu`` tries the program with gloo.
A step is the forward and the backward of all micro-batches, in bfloat16, without an optimizer.
All competitors have the same weights, the same split and the same micro-batches, and take turns in random order.
"""

import argparse
import copy
import gc
import os
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lib.bench.fsdp import use_fused_parts
from lib.bench.kit import record, seconds_of, spread, wait_for
from lib.demos.pipeline import defer, layers_of, next_token_loss
from lib.fsdp import FullySharded
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.pipeline import (
    PipelineStage,
    checkpoint,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    partition_layers,
    run_schedule,
    zero_bubble_schedule,
)
from lib.runs.flags import ProgramParser, whole

DTYPE = torch.bfloat16
N_WARMUP, N_ROUNDS, N_STEPS = 2, 5, 2
XL = GPT2Config(vocab_size=50_304, context_len=1024, dim=1600, n_layers=48, n_heads=25)
TINY = GPT2Config(vocab_size=128, context_len=16, dim=32, n_layers=14, n_heads=2)
SCHEDULES: dict[str, tuple[Callable, str, int]] = {
    "GPipe": (gpipe_schedule, "ScheduleGPipe", 1),
    "1F1B": (one_f_one_b_schedule, "Schedule1F1B", 1),
    "interleaved": (partial(interleaved_schedule, n_chunks=2), "ScheduleInterleaved1F1B", 2),
    "zero bubble": (zero_bubble_schedule, "ScheduleInterleavedZeroBubble", 1),
}
Step = Callable[[], Tensor | None]


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in backward."""

    def __init__(self, layer: nn.Module, call: Callable):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Bench:
    """The model, its micro-batches, and the ways to compute a step, on one rank."""

    def __init__(self, rank: int, n_ranks: int, tiny: bool, device: torch.device):
        self.rank, self.n_ranks, self.device, self.config = rank, n_ranks, device, TINY if tiny else XL
        self.n_micro, self.micro_batch = 4 * n_ranks, 2 if tiny else 4
        torch.manual_seed(0)
        with device:
            self.layers = layers_of(GPT2(self.config).to(DTYPE))
            size = self.n_micro * self.micro_batch, self.config.context_len + 1
            window = torch.randint(self.config.vocab_size, size, generator=torch.Generator(device).manual_seed(0))
        self.inputs, self.targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def costs(self) -> list[float]:
        """Multiplications of each layer for a token; the embeddings only look up."""
        c, t = self.config.dim, self.config.context_len
        return [0, *([12 * c * c + t * c] * self.config.n_layers), c * self.config.vocab_size]

    def my_parts(self, n_chunks: int) -> list[tuple[int, list[nn.Module]]]:
        """This rank's virtual stages with their layers."""
        parts = partition_layers(self.costs(), n_chunks * self.n_ranks)
        mine = [chunk * self.n_ranks + self.rank for chunk in range(n_chunks)]
        return [(g, [self.layers[i] for i in parts[g]]) for g in mine]

    def ours(self, make: Callable, n_chunks: int, every: int = 0, call: Callable = checkpoint) -> Step:
        """A step of ``run_schedule``; with ``every`` = k each k-th block is checkpointed."""
        actions = make(self.rank, self.n_ranks, self.n_micro)
        stages = []
        for g, layers in self.my_parts(n_chunks):
            if any(action.kind == "W" for action in actions):
                layers = [_with_deferred(layer) for layer in layers]
            if every:
                blocks = [i for i, layer in enumerate(layers) if type(layer).__name__ == "Block"][::every]
                layers = [Checkpointed(layer, call) if i in blocks else layer for i, layer in enumerate(layers)]
            stages.append(PipelineStage(nn.Sequential(*layers), g, n_chunks * self.n_ranks))
        inputs, targets = self.inputs.chunk(self.n_micro), self.targets.chunk(self.n_micro)
        return lambda: run_schedule(stages, actions, inputs, targets, next_token_loss)

    def theirs(self, name: str, n_chunks: int) -> Step:
        """A step of a schedule of `torch.distributed.pipelining`."""
        n = n_chunks * self.n_ranks
        made = [(g, nn.Sequential(*layers)) for g, layers in self.my_parts(n_chunks)]
        stages = [pipelining.PipelineStage(module, g, n, self.device) for g, module in made]
        several = n_chunks > 1 or name == "ScheduleInterleavedZeroBubble"
        schedule = getattr(pipelining, name)(stages if several else stages[0], self.n_micro, loss_fn=next_token_loss)
        first, last = self.rank == 0, self.rank == self.n_ranks - 1

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            given = {"target": self.targets, "losses": losses} if last else {}
            schedule.step(*([self.inputs] if first else []), **given)
            return torch.stack(losses).mean() if losses else None

        return step

    def sharded(self) -> Step:
        """A step of chapter 12's ZeRO-3, on this rank's share of the sequences."""
        torch.manual_seed(0)
        with self.device:
            model = GPT2(self.config)
        wrapped = FullySharded(model, param_dtype=DTYPE)
        inputs, targets = (part.chunk(self.n_ranks)[self.rank] for part in (self.inputs, self.targets))

        def step() -> Tensor:
            loss = wrapped(inputs, targets)[1]
            loss.backward()
            wrapped.finish_gradient_synchronization()
            wrapped.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)


def _with_deferred(layer: nn.Module) -> nn.Module:
    """A copy of a layer that has the same parameters, and a ``DeferredLinear`` for each linear layer."""
    copied = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
    defer(copied)
    return copied


class Racer:
    """One way to make a step, and the times of its steps."""

    def __init__(self, bench: Bench, make: Callable[[], Step]):
        self.bench, self.device = bench, bench.device
        self.step, self.times, self.loss = make(), list[float](), None
        for _ in range(N_WARMUP):
            self.loss = self.step()
            bench.clear()
        gc.collect()
        self.peak_bytes = self.peak()

    def peak(self) -> int:
        """Peak bytes of one step beyond what was there before it."""
        if self.device.type != "cuda":
            self.step_anew()
            return 0
        wait_for(self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        wait_for(self.device)
        self.bench.clear()
        return torch.cuda.max_memory_allocated() - before

    def timed(self) -> None:
        """Time several steps in a row, so that none waits for the host's clock."""
        dist.barrier()
        self.times.append(seconds_of(self.step_anew, self.device, N_STEPS))

    def step_anew(self) -> None:
        self.step()
        self.bench.clear()


def race(bench: Bench, makers: dict[str, Callable[[], Step]], n_rounds: int) -> dict[str, Any]:
    """Time all competitors in turns, in an order that is random and the same on all ranks."""
    racers, found = dict[str, Racer](), dict[str, Any]()
    for name, make in makers.items():
        try:
            racers[name] = Racer(bench, make)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{name} does not fit in memory") from error
        if bench.rank == 0:
            print(f"ready: {name}", flush=True)
    draw = random.Random(0)
    for _ in range(n_rounds):
        for name in draw.sample(list(racers), len(racers)):
            racers[name].timed()
    for name, racer in racers.items():
        parts: list = [None] * bench.n_ranks
        dist.all_gather_object(
            parts, (racer.times, racer.peak_bytes, None if racer.loss is None else racer.loss.item())
        )
        times = [max(rank_times) for rank_times in zip(*(times for times, _, _ in parts), strict=True)]
        found[name] = {"step_s": spread(times), "peak_bytes": [peak for _, peak, _ in parts], "loss": parts[-1][2]}
    return found


def measure_ranks(bench: Bench, n_rounds: int) -> dict[str, Any]:
    makers: dict[str, Callable[[], Step]] = {}
    for name, (make, theirs, n_chunks) in SCHEDULES.items():
        makers[f"{name}, ours"] = partial(bench.ours, make, n_chunks)
        makers[f"{name}, PyTorch"] = partial(bench.theirs, theirs, n_chunks)
    for name, every in (("half", 2), ("all", 1)):
        makers[f"1F1B, {name} checkpointed"] = partial(bench.ours, one_f_one_b_schedule, 1, every)
    their_checkpoint = partial(torch_checkpoint, use_reentrant=False)
    makers["1F1B, all checkpointed by PyTorch"] = partial(bench.ours, one_f_one_b_schedule, 1, 1, their_checkpoint)
    makers["sharded"] = bench.sharded
    parts = {v: [[r.start, r.stop] for r in partition_layers(bench.costs(), v * bench.n_ranks)] for v in (1, 2)}
    c = bench.config
    facts: dict[str, Any] = {
        "n_micro": bench.n_micro,
        "micro_batch": bench.micro_batch,
        "context_len": c.context_len,
        "dim": c.dim,
    }
    facts |= {"n_layers": c.n_layers, "vocab_size": c.vocab_size, "parts": {str(v): p for v, p in parts.items()}}
    return facts | {"competitors": race(bench, makers, n_rounds)}


def run_rank(rank: int, n_ranks: int, options: argparse.Namespace, port: int, results: dict) -> None:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=n_ranks)
    use_fused_parts()
    found = measure_ranks(Bench(rank, n_ranks, options.tiny, device), 1 if options.tiny else N_ROUNDS)
    if rank == 0:
        results["ranks"][str(n_ranks)] = found
        record("pipeline", results, options.folder)
        for name, facts in found["competitors"].items():
            gigabytes = [round(peak / 1e9, 2) for peak in facts["peak_bytes"]]
            print(
                f"{n_ranks} {name:34} {1e3 * facts['step_s']['median']:8.1f} ms  {gigabytes} GB  loss {facts['loss']}"
            )
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=[2])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    settings = {"dtype": "bfloat16", "n_warmup": N_WARMUP, "n_rounds": N_ROUNDS, "n_steps": N_STEPS}
    results: dict[str, Any] = {"settings": settings, "ranks": {}}
    for n_ranks in options.ranks:
        mp.spawn(run_rank, (n_ranks, options, free_port(), results), nprocs=n_ranks)
        results = load("pipeline", options.folder)["results"]


if __name__ == "__main__":
    main()
