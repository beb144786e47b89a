"""Time a training step of GPT-2's xl size with each of chapter 10's ways to average gradients, and trace what overlaps.

First run ``python -m lib.bench.all_reduce``, from which the model computes its own bucket size.
Then run ``python -m lib.bench.ddp --ranks 2,4`` on a machine with four GPUs (a minute or two for each number of ranks),
or with ``--tiny`` anywhere.
It starts its ranks itself and writes ``ddp.json`` after each round, in which every strategy takes one step:
one process without communication ("none"), naive, flat, overlapped, buckets of several sizes, and PyTorch's DDP.
Results for other numbers of ranks stay in the file if they come from the same machine and versions.
All strategies share one set of weights.
Products are TF32 and gradients float32, as large as in a plain run; the update is plain SGD.

``python -m lib.bench.ddp --runs 16,64 --ranks 2`` measures something else, and writes ``ddp_runs.json``:
the steps of ``lib.runs.train_gpt2 --model small`` with so many sequences a GPU, in ways that each differ in one thing.
All are in the same processes and take turns.

- ``alone``: ``--strategy single``, each GPU for itself;
- ``by blocks``: the same, compiled block by block as on several GPUs, so that gradients are ready early;
- ``in step``: ``--strategy ddp`` without averaging: only the losses are averaged, so each step waits for the slowest;
- ``copies`` and ``collectives``: ``--strategy ddp`` with gradients averaged by ``lib.fast.copies`` and by NCCL;
- ``torch``: ``--strategy ddp --engine torch``, our kernels under PyTorch's DDP, which has no CUDA graph here.

``--shards 8`` does the same for ``--model xl --strategy fsdp`` and writes ``fsdp_runs.json``,
together with how long the GPU computed and communicated in one traced step of each way.

- ``alone``: ``--strategy single --graph``, the whole model on each GPU;
- ``copies`` and ``collectives``: ``--strategy fsdp --graph``, whose shards and gradients are sent
  by ``lib.fast.shards`` and by NCCL;
- ``launched``: as ``collectives``, but its step is launched from Python;
- ``fully_shard``: ``--engine torch``, our kernels under PyTorch's ``fully_shard``.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lib.bench.all_reduce import fit
from lib.bench.kit import in_turns, machine, record, seconds_of, slowest, spawn, spread, wait_for
from lib.ddp import optimal_bucket_bytes
from lib.demos.ddp import synchronised
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.runs.engine.loop import Run
from lib.runs.engine.mesh import arrange
from lib.runs.engine.request import parse
from lib.runs.engine.start import make_task, set_up
from lib.runs.engine.tasks import GPT2Task
from lib.runs.engine.world import World, find_world
from lib.runs.flags import ProgramParser, positive, whole, wholes
from lib.runs.train_gpt2 import make_gpt2_parser

XL = {"vocab_size": 10_000, "dim": 1600, "n_layers": 48, "n_heads": 25}
TINY = {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 2}
BUCKETS_MB = (1, 10, 30, 100, 300, 1000)
TINY_BUCKETS_MB = (0.01, 0.1, 1)
TRACED_AFTER = {3: ("naive", "overlap"), 4: ("bucket 100", "torch", "bucket 0.1")}
"""After how many rounds which strategies are traced."""
LR = 1e-6
RUN = "--data synthetic --precision bf16 --steps 1000000 --lr 1e-4"
TINY_RUN = f"{RUN} --model tiny --device cpu --path fast"
RUNS = {
    "alone": "--strategy single --compile whole --graph",
    "by blocks": "--strategy single --compile blocks --graph",
    "in step": "--strategy ddp --compile blocks --graph",
    "copies": "--strategy ddp --compile blocks --graph --averaging copies",
    "collectives": "--strategy ddp --compile blocks --graph --averaging collectives",
    "torch": "--strategy ddp --compile blocks --engine torch",
}
"""For each way to train, the flags in which it differs."""
SHARDED_RUNS = {
    "alone": "--strategy single --compile blocks --graph",
    "copies": "--strategy fsdp --compile blocks --graph --averaging copies",
    "collectives": "--strategy fsdp --compile blocks --graph --averaging collectives",
    "launched": "--strategy fsdp --compile blocks --optimizer adamw --averaging collectives",
    "fully_shard": "--strategy fsdp --compile blocks --engine torch",
}


def copy_of(base: nn.Module, config: GPT2Config) -> nn.Module:
    """The same model with parameters of its own that share the storage of ``base``."""
    with torch.device("meta"):
        model = GPT2(config)
    model.load_state_dict(base.state_dict(), assign=True)
    return model


def make_strategies(base: nn.Module, config: GPT2Config, buckets_mb: dict[str, float], largest_mb: float) -> dict:
    """For each strategy its model, the module inside it, and the function to call after backward."""
    kinds: dict[str, tuple] = {name: (name, {}) for name in ("none", "naive", "flat", "overlap")}
    kinds |= {f"bucket {name}": (size, {}) for name, size in buckets_mb.items()}
    kinds["torch"] = ("torch", {})
    kinds["torch tuned"] = ("torch", {"bucket_cap_mb": largest_mb, "gradient_as_bucket_view": True})
    made = {}
    for name, (strategy, options) in kinds.items():
        inner = copy_of(base, config)
        model, finish = synchronised(strategy, inner, **options)
        made[name] = (model, list(inner.parameters()), finish)
    return made


def step(made: tuple, tokens: torch.Tensor) -> None:
    """Forward, backward, averaging and update; then the gradients are freed."""
    model, parameters, finish = made
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    finish()
    with torch.no_grad():
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-LR)
    for p in parameters:
        p.grad = None


def merged(intervals: list[tuple[float, float]], gap: float = 0.0) -> list[list[float]]:
    """The intervals in order; those at most ``gap`` apart are merged into one."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def covered(intervals: list[list[float]], by: list[list[float]]) -> float:
    """Total length of the overlap of two lists of merged intervals."""
    return sum(max(0.0, min(e, f) - max(s, t)) for s, e in intervals for t, f in by)


def trace(take: Callable[[], object], device: torch.device) -> dict:
    """When the GPU computed and when it communicated, in one step, in milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        take()
        wait_for(device)
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "nccl": []}
    for event in profile.events() or []:
        notes = getattr(event, "is_user_annotation", False) or event.name.startswith(
            ("nccl:", "DistributedData", "Mem")
        )
        waits = "barrier_kernel" in event.name  # of lib.fast.copies and lib.fast.shards
        if event.device_type == torch.autograd.DeviceType.CUDA and not notes and not waits:
            kind = "nccl" if "nccl" in event.name.lower() else "compute"
            spans[kind].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    whole = {kind: merged(found) for kind, found in spans.items()}
    origin = min((start for found in whole.values() for start, _ in found), default=0.0)
    seconds = {kind: sum(end - start for start, end in found) / 1e3 for kind, found in whole.items()}
    coarse = {kind: merged(found, gap=0.1) for kind, found in spans.items()}
    return {
        "intervals_ms": {k: [[round(s - origin, 3), round(e - origin, 3)] for s, e in v] for k, v in coarse.items()},
        "compute_s": seconds["compute"],
        "nccl_s": seconds["nccl"],
        "nccl_hidden_s": covered(whole["nccl"], whole["compute"]) / 1e3,
    }


def predicted_bucket_mb(n_bytes: int, key: str, folder: Path) -> tuple[float, dict] | None:
    """The chapter's best bucket, from what ``lib.bench.all_reduce`` measured with the same number of ranks."""
    try:
        measured = load("all_reduce", folder)["results"]
    except FileNotFoundError:
        return None
    found = measured["all_reduce_s"].get(key)
    if not found:
        return None
    sizes = [float(size) * measured["mb_bytes"] for size in found]
    call_s, bandwidth = fit(sizes, [times["median"] for times in found.values()])
    best = optimal_bucket_bytes(n_bytes, bandwidth, call_s)
    return best / 2**20, {"call_s": call_s, "bandwidth_bytes_per_s": bandwidth, "best_bucket_bytes": best}


def measure_steps(rank: int, device: torch.device, key: str, options: argparse.Namespace) -> None:
    """Run rounds of one step for each strategy until the time is up; rank 0 records the results after each round."""
    torch.set_float32_matmul_precision("high")
    sizes = TINY if options.tiny else XL
    config = GPT2Config(context_len=options.context, **sizes)
    torch.manual_seed(0)
    with device:
        base = GPT2(config)
    n_bytes = sum(p.nbytes for p in base.parameters())
    buckets = {f"{size:g}": float(size) for size in (TINY_BUCKETS_MB if options.tiny else BUCKETS_MB)}
    model = predicted_bucket_mb(n_bytes, key, options.folder)
    if model is not None:
        buckets["model"] = model[0]
    made = make_strategies(base, config, buckets, 100)
    torch.manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (options.batch, options.context + 1), device=device)
    result: dict = {"n_bytes": n_bytes, "n_tensors": len(list(base.parameters())), "step_s": {}, "trace": {}}
    result |= {"batch": options.batch, "context": options.context, "vocab_size": config.vocab_size, "dim": config.dim}
    result |= {"n_layers": config.n_layers, "dtype": "float32, TF32 products", "model": model and model[1]}
    times: dict[str, list[float]] = {name: [] for name in made}
    began, n_rounds = time.perf_counter(), 0
    while n_rounds < 2 + options.rounds:
        for name, strategy in made.items():
            times[name].append(seconds_of(partial(step, strategy, tokens), device, on_ranks=True))
        n_rounds += 1
        counted = {name: found[2:] for name, found in times.items() if found[2:]}
        result["step_s"] = {name: {**spread(found), "values": found} for name, found in counted.items()}
        if counted and n_rounds in TRACED_AFTER:  # early, so that a time-out keeps them
            result["trace"] |= traces(made, tokens, device, TRACED_AFTER[n_rounds])
        _write(rank, key, result, options.folder)
        if n_rounds > 4 and slowest(time.perf_counter() - began, device) > options.seconds:
            break


def traces(made: dict, tokens: torch.Tensor, device: torch.device, names: tuple[str, ...]) -> dict:
    """Traces of some strategies; every rank takes the steps."""
    return {name: trace(partial(step, made[name], tokens), device) for name in names if name in made}


def kept(options: argparse.Namespace) -> dict:
    """What this machine recorded with these versions for steps of this size, for all numbers of ranks."""
    try:
        before = load("ddp", options.folder)
    except FileNotFoundError:
        return {}
    if before["machine"] != machine():
        return {}
    size = {"batch": options.batch, "context": options.context, "dim": (TINY if options.tiny else XL)["dim"]}
    return {key: found for key, found in before["results"].items() if size.items() <= found.items()}


def _write(rank: int, key: str, result: dict, folder: Path) -> None:
    if rank == 0:
        everything = load("ddp", folder)["results"]
        everything[key] = result
        record("ddp", everything, folder)
        print({name: round(1e3 * found["median"], 1) for name, found in result["step_s"].items()}, flush=True)


# ---- the runs of lib.runs --------------------------------------------------------------------------------------------


def make_run(flags: str, batch: int, device: torch.device) -> Run:
    """A run of ``lib.runs.train_gpt2`` with these flags and so many sequences a GPU, ready for its first step."""
    options = parse(make_gpt2_parser(), flags.split())
    world = World() if options.strategy == "single" else find_world()
    options = arrange(parse(make_gpt2_parser(), [*flags.split(), "--batch", str(batch * world.size)]), world.size)
    task = make_task(options, GPT2Task)
    set_up(options, device)
    return Run(options, task, world, device, task.describe(), False)


def possible_ways(options: argparse.Namespace) -> dict[str, str]:
    """For each way to train, all flags of its run."""
    ways, model = (SHARDED_RUNS, "xl") if options.shards else (RUNS, "small")
    if options.tiny:  # a CPU has no graphs
        plain = {name: flags.replace("--graph", "").split("--compile")[0] for name, flags in ways.items()}
        return {name: f"{TINY_RUN} {flags}" for name, flags in plain.items() if "copies" not in name}
    return {name: f"{RUN} --model {model} {flags}" for name, flags in ways.items()}


def start_runs(options: argparse.Namespace, batch: int, device: torch.device) -> dict[str, Run]:
    """The run of each way, with its step recorded as a graph if it says so."""
    made = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, flags in possible_ways(options).items():
        if options.ways and name not in options.ways.split(","):
            continue
        began = time.perf_counter()
        made[name] = run = make_run(flags, batch, device)
        if name == "in step":
            run.strategy.in_turn = False
            run.strategy.micro_step = lambda is_last, run=run: run.strategy.call.no_sync()  # type: ignore[method-assign]
            run.strategy.finish = lambda: None  # type: ignore[method-assign]
        run.set_lr(0)
        if run.options.graph:
            run.record_graph(pool)
        else:
            for _ in range(3):
                run.step(*run.batch())
        wait_for(device)
        print(f"{name}: {time.perf_counter() - began:.1f} s to its first steps, {run.strategy.opening}", flush=True)
    return made


def measure_runs(rank: int, device: torch.device, options: argparse.Namespace) -> None:
    """Time rows of steps of each way in turns, on each GPU. Rank 0 records the results."""
    for batch in map(int, (options.shards or options.runs).split(",")):
        runs = start_runs(options, batch, device)
        takes = {name: partial(take_step, run) for name, run in runs.items()}
        n_steps = 2 if options.tiny else 3 if options.shards else max(4, 160 // batch)
        times = in_turns(takes, partial(of_this_rank, device=device, n=n_steps), options.rounds, 1)
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, times)
        task = next(iter(runs.values())).task
        found: dict = {"batch": batch, "tokens_per_row": task.per_row, "flops_per_token": task.flops_per_item}
        found["step_values_s"] = {name: [of_rank[name] for of_rank in every] for name in times}
        write_runs(rank, found, options)
        if options.shards:  # the times are written, should the traces take too long
            found["trace"] = {name: seconds_in(trace(take, device)) for name, take in takes.items()}
            write_runs(rank, found, options)
        del takes
        for run in runs.values():
            del run.step
        runs.clear()
        gc.collect()
    dist.barrier()
    wait_for(device)
    if device.type == "cuda":  # the results are written, and NCCL could wait for graphs that are not gone
        sys.stdout.flush()
        os._exit(0)


def seconds_in(traced: dict) -> dict[str, float]:
    """A trace without its intervals."""
    return {name: value for name, value in traced.items() if name.endswith("_s")}


def of_this_rank(take: Callable[[], object], device: torch.device, n: int) -> float:
    """Seconds of a step on this rank, the mean of ``n``; all ranks begin together."""
    dist.barrier()
    return seconds_of(take, device, n)


def take_step(run: Run) -> torch.Tensor:
    """One step of a run on its next batch."""
    return run.step(*run.batch())


def write_runs(rank: int, found: dict, options: argparse.Namespace) -> None:
    """On rank 0, put the results for one batch in their place in a record, and print them."""
    if rank:
        return
    record_name, folder = "fsdp_runs" if options.shards else "ddp_runs", options.folder
    n = len(next(iter(found["step_values_s"].values())))
    try:
        before = load(record_name, folder)
        results = before["results"] if before["machine"] == machine() else {}
    except FileNotFoundError:
        results = {}
    results.setdefault(str(n), {})[str(found["batch"])] = found
    record(record_name, results, folder)
    for name, every in found["step_values_s"].items():
        print(found["batch"], name, *(f"{1e3 * spread(of_rank)['median']:.2f}" for of_rank in every), "ms", flush=True)


def flags() -> argparse.Namespace:
    """What the command line asks for."""
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=wholes, default="2,4")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--batch", type=whole(1), default=4, help="sequences on each rank")
    parser.add_argument("--context", type=whole(1), default=512)
    parser.add_argument("--rounds", type=whole(1), default=10)
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60,
        help="start no further round after this many seconds, for each number of ranks",
    )
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--runs", type=wholes, help="measure lib.runs.train_gpt2 with so many sequences a GPU")
    parser.add_argument("--shards", type=wholes, help="measure sharded runs of --model xl with so many sequences a GPU")
    parser.add_argument("--ways", help="only these ways of a run, with commas between; default: all")
    options = parser.parse_args()
    check_ways(parser, options)
    return options


def check_ways(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a request for two records at once, or for a way that a run does not have."""
    if options.runs and options.shards:
        parser.error(f"--runs {options.runs} with --shards {options.shards}: expected one of the two")
    known = possible_ways(options) if options.runs or options.shards else {}
    for name in options.ways.split(",") if options.ways is not None else ():
        if name not in known:
            expected = f"some of {', '.join(known)}" if known else "--runs or --shards with it"
            parser.error(f"--ways: {name!r}: expected {expected}")


def main() -> None:
    options = flags()
    if options.tiny:
        options.context, options.rounds = 16, 4
    if options.runs or options.shards:
        for n_ranks in map(int, options.ranks.split(",")):
            spawn(measure_runs, options.backend, n_ranks, options)
        return
    record("ddp", kept(options), options.folder)
    for n_ranks in map(int, options.ranks.split(",")):
        spawn(measure_steps, options.backend, n_ranks, f"{options.backend} {n_ranks}", options)


if __name__ == "__main__":
    main()
