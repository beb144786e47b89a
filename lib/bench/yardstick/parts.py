"""What a step loses on several GPUs, cause by cause: the yardstick's model in ways that each differ in one thing.

``python -m lib.bench.yardstick.parts --ranks 2`` on a machine with that many GPUs writes
``chapters/measurements/yardstick_parts.json`` after each way; ``--tiny`` tries the program on a CPU.
Only our model runs, from random weights, so timm is not needed.
Every step is one CUDA graph: forward, backward and SGD's update, and

- ``alone``: no averaging, and one GPU runs at a time while the others are idle;
- ``beside``: the same graph on all GPUs at once;
- ``in step``: ``beside`` with an all-reduce of one number before the update,
  so that each step waits for the slowest GPU;
- ``averaged``: chapter 10's ``OverlapDDP``;
- ``after``: the same averaging, begun when backward has ended;
- ``averaged bf16``: gradients travel as bf16, half of the bytes, and become float32 again on a stream of their own;
- ``averaged 8 CTAs`` and ``4 CTAs``: NCCL may start only that many thread blocks, so it takes fewer multiprocessors;
- ``averaged copies``: copy engines move the gradients, by ``lib.fast.copies``; ``copies bf16``:
  half as many bytes on the way to the rank that computes the mean; ``copies in turn``: the same,
  and each part is updated when its mean is there.
  In these, ranks wait for each other by a command to the GPU; ``copies kernels``: like ``copies in turn``,
  but a kernel waits, as in ``lib.fast.copies``;
- ``wires``, with the same endings: the averaging of all gradients, and nothing else.

Of some ways it also traces the kernels, and compares each with the same kernel of ``in step``,
in which no averaging disturbs it: apart from the averaging's own,
a step runs the same kernels in the same order in all ways.

A way is recorded, timed and deleted before the next one is recorded,
because two graphs of L/16 at 256 images do not fit on a GPU of 80 GB.
The rounds go through the ways in alternating order.
Before its timed rows each way runs one that is not timed, in which ``nvidia-smi`` reads the GPU's clock and power.
A way that fails is recorded with its error and not tried again;
``--skip CTAs`` leaves out the ways with that word in their names.
Recorded cells of other batches stay.
"""

import argparse
import ctypes
import gc
import math
import multiprocessing
import os
import statistics
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.bench.ddp import covered, merged
from lib.bench.kit import record, seconds_of, slowest, spawn, spread, wait_for
from lib.bench.ladder import Rung, set_tf32
from lib.bench.yardstick.compare import LR, MOMENTUM, N_WARMUP, Cell, PlainTask, cells_of, our_parts, path_of, sgd
from lib.bench.yardstick.replicas import train_step
from lib.ddp import OverlapDDP, average_gradients
from lib.fast.copies import CopyDDP, InTurn, Places, allocate_shared, in_peers_memory
from lib.fast.models import capture
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.flags import ProgramParser, positive, whole

Step = Callable[[], Tensor]
AllReduce = Callable[..., Any]
WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
Kernels = list[tuple[str, int, int]]  # the name of each, its start and its end in nanoseconds, by start
N_CTAS, N_ROWS, ROW_S, PATIENCE_S, N_TRACED = (8, 4), 3, 0.5, 60, 3
UNDISTURBED = "in step"
KINDS = {
    "attention": ("fast_", "hopper_", "statistics_", "stored_", "flash"),
    "products with a GELU": ("gelu_kernel", "slope_kernel"),
    "other products": ("nvjet", "gemm", "cutlass", "splitk"),
    "update": ("multi_tensor",),
    "waiting for the slowest GPU": ("nccl",),
}
OTHERS = "norms, sums, casts and copies"
TRACED = (UNDISTURBED, "averaged", "averaged copies", "averaged copies in turn", "averaged copies kernels")
ALL_REDUCE, SUM = dist.all_reduce, dist.ReduceOp.SUM


class InBF16:
    """An all-reduce that sends a float32 tensor as bf16; its result is complete after ``wait``."""

    def __init__(self, tensor: Tensor, op: Any, side: torch.cuda.Stream | None):
        self.narrow, self.side = tensor.to(torch.bfloat16), side  # kept until the side stream has read it
        work = ALL_REDUCE(self.narrow, op=op, async_op=True)
        with torch.cuda.stream(side):
            work.wait()  # the side stream waits, and backward goes on
            tensor.copy_(self.narrow)

    def wait(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)


def in_bf16(device: torch.device) -> AllReduce:
    side = torch.cuda.Stream() if device.type == "cuda" else None
    return lambda tensor, op=SUM, group=None, async_op=False: InBF16(tensor, op, side)


def with_ctas(n: int) -> AllReduce:
    """An all-reduce in a group of all ranks for which NCCL starts at most ``n`` thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = n
    chosen = dist.new_group(backend="nccl", pg_options=options)
    return lambda tensor, op=SUM, group=None, async_op=False: ALL_REDUCE(tensor, op, chosen, async_op)


def sending(step: Step, all_reduce: AllReduce) -> Step:
    """The step with another function in the place of ``dist.all_reduce``."""

    def run() -> Tensor:
        with patch.object(dist, "all_reduce", side_effect=all_reduce) as sent:
            result = step()
        assert sent.called, "the step averages without dist.all_reduce"
        return result

    return run


def gradients(model: nn.Module) -> list[Tensor]:
    """All gradients, or zeros in their place, in the order in which backward makes them ready."""
    parameters = list(model.parameters())[::-1]
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return [p.grad for p in parameters]


def only_averaging(model: OverlapDDP) -> Tensor:
    """All-reduce all gradients; there is nothing to compute."""
    grads = gradients(model)
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    for work in works:
        work.wait()
    return grads[0]


def meeting(signals: list[Tensor], rank: int) -> Callable[[], None]:
    """A function that lets the current stream wait until the streams of all ranks have reached their call of it,
    without a kernel.

    Between two calls the ranks must meet elsewhere: otherwise one could send its next signal before
    another has cleared the last.

    Args:
        signals: For each rank ``n_ranks`` zeros, int32, on its GPU, to which this rank can write. Keep them.
        rank: This process's rank.

    Raises:
        RuntimeError: the driver refuses, here or when the function is called.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    one = torch.ones((), dtype=torch.int32, device=signals[rank].device)
    others = [r for r in range(len(signals)) if r != rank]

    def wait_and_clear(sender: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(signals[rank][sender].data_ptr())
        errors = [
            driver.cuStreamWaitValue32_v2(stream, address, ctypes.c_uint32(1), ctypes.c_uint(WAIT_UNTIL_EQUAL)),
            driver.cuStreamWriteValue32_v2(stream, address, ctypes.c_uint32(0), ctypes.c_uint(0)),
        ]
        if any(errors):
            raise RuntimeError(f"waiting for rank {sender}: the CUDA driver returned the errors {errors}")

    def meet() -> None:
        for other in others:
            signals[other][rank].copy_(one)
        for other in others:
            wait_and_clear(other)

    signals[rank][rank].copy_(one)
    wait_and_clear(rank)  # whether the driver can do it shows before other ranks are involved
    return meet


def waiting_by_command(n: int, dtype: torch.dtype, device: torch.device) -> Places:
    """`allocate_shared`, and a `meeting` of all ranks."""
    places, handle = allocate_shared(n, dtype, device)
    signals = [handle.get_signal_pad(rank, (len(places),), torch.int32) for rank in range(len(places))]
    return places, meeting(signals, handle.rank)


def by_copies(
    model: OverlapDDP,
    batch: tuple[Tensor, Tensor],
    sent: torch.dtype,
    places: Callable[..., Places] = waiting_by_command,
) -> tuple[Step, Step, Step]:
    """Steps whose gradients copy engines average during backward, updated at its end or in turn;
    and the averaging alone.
    """
    copies = CopyDDP(model.get_submodule("module"), 0, sent, places)
    copies.is_paused = True  # in all other ways

    def running(step: Step) -> Step:
        def run() -> Tensor:
            copies.is_paused = False
            try:
                with model.no_sync():
                    return step()
            finally:
                copies.is_paused = True

        return run

    def loss_of() -> Tensor:
        return copies(*batch)

    at_end = train_step(loss_of, sgd(copies.parameters()), copies.finish_gradient_synchronization)
    in_turn = train_step(loss_of, InTurn(copies, sgd))

    def alone() -> Tensor:
        grads = gradients(model)
        list(copies.finished())
        return grads[0]

    return running(at_end), running(in_turn), alone


def make_ways(model: OverlapDDP, batch: tuple[Tensor, Tensor]) -> dict[str, Step]:
    """The step of each way; the last ones need most of NCCL, so a failure there comes when the others are recorded."""
    device, one = batch[0].device, torch.zeros(1, device=batch[0].device)
    optimizer = sgd(model.parameters())

    def unaveraged(finish: Callable[[], Any] = lambda: None) -> Step:
        step = train_step(lambda: model(*batch), optimizer, finish)

        def run() -> Tensor:
            with model.no_sync():
                return step()

        return run

    ways = {"alone": unaveraged(), "beside": unaveraged(), "in step": unaveraged(lambda: dist.all_reduce(one))}
    ways["averaged"] = train_step(lambda: model(*batch), optimizer, model.finish_gradient_synchronization)
    ways |= {"after": unaveraged(lambda: average_gradients(model)), "wires": lambda: only_averaging(model)}
    senders = {"bf16": in_bf16(device)}
    try:
        senders |= {f"{n} CTAs": with_ctas(n) for n in N_CTAS if device.type == "cuda"}
    except Exception:
        traceback.print_exc()
    pairs = [(way, name) for name in senders for way in ("averaged", "wires")]
    ways |= {f"{way} {name}": sending(ways[way], senders[name]) for way, name in pairs}
    if device.type == "cuda":
        try:
            _, ways["averaged copies kernels"], _ = by_copies(model, batch, torch.bfloat16, in_peers_memory)
            ways["averaged copies"], _, ways["wires copies"] = by_copies(model, batch, torch.float32)
            bf16 = by_copies(model, batch, torch.bfloat16)
            ways["averaged copies bf16"], ways["averaged copies in turn"], ways["wires copies bf16"] = bf16
        except RuntimeError:
            traceback.print_exc()
    return ways


def row(step: Step, n: int, device: torch.device) -> float:
    """Seconds of one step on this rank, the mean of ``n`` in a row."""
    return seconds_of(step, device, n)


def watch(step: Step, n: int, device: torch.device) -> list[list[float]]:
    """Run ``n`` steps; return the GPU's clock in MHz and its power in watts,
    read again and again until the steps end.
    """
    for _ in range(n):
        step()
    if device.type != "cuda":
        return []
    end, seen = torch.cuda.Event(), []
    end.record()
    asked = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    asked += ["--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):  # without nvidia-smi there are no readings
        while True:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
            if end.query():
                break
            seen.append([float(x) for x in said.split(",")])
    wait_for(device)
    return seen


def trace(step: Step, n_before: int) -> Kernels:
    """The kernels and copies of the last of some steps on this rank's GPU, which has taken others before,
    as in a timed row.

    None are returned if the profiler has lost some: then nobody knows which belong together.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(n_before + N_TRACED):
            step()
        torch.cuda.synchronize()
    events = traced.profiler.kineto_results.events()
    on_gpu = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    found = sorted(
        ((e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu), key=lambda kernel: kernel[1]
    )
    if len(found) % (n_before + N_TRACED):
        print(f"{len(found)} kernels in {n_before + N_TRACED} equal steps: the profiler has lost some", flush=True)
        return []
    return found[-(len(found) // (n_before + N_TRACED)) * N_TRACED :]


def kind_of(kernel: str) -> str:
    """Which of ``KINDS`` a kernel belongs to, by its name; else ``OTHERS``."""
    for kind, words in KINDS.items():
        if any(word in kernel.lower() for word in words):
            return kind
    return OTHERS


def by_kind(kernels: Kernels) -> dict[str, dict[str, float]]:
    """For each of ``KINDS`` the number of its kernels in a step, and their seconds."""
    found = {kind: {"n": 0.0, "s": 0.0} for kind in [*KINDS, OTHERS]}
    for name, start, end in kernels:
        kind = kind_of(name)
        found[kind]["n"] += 1 / N_TRACED
        found[kind]["s"] += (end - start) * 1e-9 / N_TRACED
    return found


def is_averaging(name: str, computing: set[str]) -> bool:
    """Whether a kernel belongs to the averaging: NCCL's, a copy, or one that a step without averaging does not have."""
    return "nccl" in name.lower() or "memcpy" in name.lower() or name not in computing


def compare(kernels: Kernels, undisturbed: Kernels) -> dict[str, Any]:
    """How much longer kernels take beside the averaging; all seconds are those of one step.

    Args:
        kernels: Those of a way that averages.
        undisturbed: Those of ``in step``, of as many steps.

    Returns:
        ``averaging_s``: how long a kernel or a copy of the averaging is on the GPU, kernels that wait included,
        but not commands that wait; ``exposed_s``: the part of it in which nothing is computed.
        ``beside``: of the kernels that compute while the averaging runs, their number, their seconds,
        and the seconds of the same kernels in ``undisturbed``; of those that take at least half as long again,
        the number and what they lose.
        ``apart``: the same of all other kernels.
        ``longest``: which kernels lose most.
    """
    computing = {name for name, _, _ in undisturbed}
    averaging = merged([(start, end) for name, start, end in kernels if is_averaging(name, computing)])
    computed = [kernel for kernel in kernels if not is_averaging(kernel[0], computing)]
    before: dict[str, list[int]] = {}
    for name, start, end in undisturbed[::-1]:
        before.setdefault(name, []).append(end - start)
    counts, lost = Counter(name for name, _, _ in computed), Counter[str]()
    zeros = {"n": 0.0, "s": 0.0, "undisturbed_s": 0.0, "n_long": 0.0, "lost_by_long_s": 0.0}
    sides = {"beside": dict(zeros), "apart": dict(zeros)}
    same = {name for name, n in counts.items() if n == len(before[name])}
    for name, start, end in computed:
        if name not in same:
            continue
        took, alone = end - start, before[name].pop()
        side = sides["beside" if covered([[start, end]], averaging) > 0 else "apart"]
        is_long = took >= 1.5 * alone
        changes = (1, took * 1e-9, alone * 1e-9, is_long, is_long * (took - alone) * 1e-9)
        for key, change in zip(zeros, changes, strict=True):
            side[key] += change / N_TRACED
        lost[name] += took - alone
    total, hidden = sum(e - s for s, e in averaging), covered(averaging, merged([(s, e) for _, s, e in computed]))
    found = {"averaging_s": total * 1e-9 / N_TRACED, "exposed_s": (total - hidden) * 1e-9 / N_TRACED}
    longest = [
        {"kernel": name[:100], "n": counts[name] / N_TRACED, "lost_s": ns * 1e-9 / N_TRACED}
        for name, ns in lost.most_common(8)
    ]
    return (
        found
        | sides
        | {"n_not_compared": sum(n for name, n in counts.items() if name not in same) / N_TRACED, "longest": longest}
    )


def time_way(
    name: str, step: Step, device: torch.device, meet: Any, undisturbed: Kernels, traced: bool
) -> dict[str, Any]:
    """Record a way as a graph; return this rank's seconds in each row, what was read of its GPU,
    and its kernels' times.

    If ``traced``, the kernels of ``in step`` are put into ``undisturbed``, for the ways that come later.

    Ranks meet on the host: a barrier of NCCL's would keep the GPUs busy that should be idle.
    """
    take = capture(step, 2, on_ranks=True) if device.type == "cuda" else step
    meet.wait(PATIENCE_S)
    n = max(2, math.ceil((ROW_S if device.type == "cuda" else 0) / slowest(row(take, 2, device), device)))
    times, seen = [], []
    for turn in range(dist.get_world_size()) if name == "alone" else [dist.get_rank()]:
        for i in range(1 + N_ROWS):
            meet.wait(PATIENCE_S)
            if turn == dist.get_rank() and i == 0:
                seen = watch(take, 2 * n, device)
            elif turn == dist.get_rank():
                times.append(row(take, n, device))
    meet.wait(PATIENCE_S)
    found: dict[str, Any] = {"step_s": times, "seen": seen}
    if device.type == "cuda" and name in TRACED and traced:
        kernels = trace(take, n)
        if name == UNDISTURBED and kernels:
            undisturbed[:] = kernels
            found["kernels"] = by_kind(kernels)
        elif kernels and undisturbed:
            found["kernels"] = compare(kernels, undisturbed)
    return found


def attempt(
    name: str, step: Step, model: OverlapDDP, device: torch.device, meet: Any, undisturbed: Kernels, traced: bool
) -> list[Any]:
    """Time a way and free its memory; returns what every rank found, or its error."""
    try:
        mine = time_way(name, step, device, meet, undisturbed, traced)
    except Exception as error:
        meet.abort()  # wakes the ranks that wait for this one
        traceback.print_exc()
        mine = {"error": f"{type(error).__name__}: {error}"[:300]}
    model.zero_grad(set_to_none=True)
    gc.collect()
    all_ranks: list[Any] = [None] * dist.get_world_size()
    # Ranks meet before memory is freed, because NCCL first gives up what it had registered.
    dist.all_gather_object(all_ranks, mine)
    if dist.get_rank() == 0:
        meet.reset()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return all_ranks


def facts_of(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A way's entry in the file, from what the ranks found in each round; its lists have one element a rank."""
    failed = [mine["error"] for found in rounds for mine in found if "error" in mine]
    failed.sort(key=lambda error: error.startswith("BrokenBarrier"))  # another rank's error broke the barrier
    facts: dict[str, Any] = {"error": failed[0]} if failed else {}
    whole = [found for found in rounds if not any("error" in mine for mine in found)]
    ranks = list(zip(*whole, strict=True))
    if not ranks:
        return facts
    rows = [[s for mine in rank for s in mine["step_s"]] for rank in ranks]
    read = [[x for mine in rank for x in mine["seen"]] for rank in ranks]
    facts |= {"slowest_step_s": spread([max(s) for s in zip(*rows, strict=True)]), "step_s": [spread(s) for s in rows]}
    for i, key in enumerate(("clock_mhz", "power_w")):
        facts[key] = [statistics.median(x[i] for x in seen) if seen else None for seen in read]
    kernels = [rank[0]["kernels"] for rank in ranks if "kernels" in rank[0]]
    return facts | {"step_values_s": rows} | ({"kernels": kernels} if kernels else {})


def write(rank: int, cell: Cell, name: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """On rank 0, put a cell in its place in the file, and print the way that was timed last."""
    if rank:
        return
    results = load("yardstick_parts", options.folder)["results"]
    others = [c for c in results["cells"] if any(c[k] != found[k] for k in ("model", "batch", "n_gpus"))]
    cells = sorted([*others, found], key=lambda c: (c["model"], -c["batch"], c["n_gpus"]))
    record("yardstick_parts", results | {"cells": cells}, options.folder)
    way = found["ways"][name]
    each = ", ".join(f"{1e3 * s['median']:.2f}" for s in way.get("step_s", ()))
    read = [way[key] for key in ("clock_mhz", "power_w") if any(way.get(key, ()))]
    print(f"{cell}: {name}: each GPU {each} ms; MHz, W {read} {way.get('error', '')}", flush=True)
    if "kernels" in way:
        print(way["kernels"][0], flush=True)


def measure(rank: int, device: torch.device, cell: Cell, options: argparse.Namespace, meet: Any) -> None:
    """Time all ways of a cell in turns; rank 0 records them after each."""
    set_tf32(True)
    task, start = PlainTask("vit", cell.config, str(device), "none"), time.perf_counter()
    parts = our_parts(cell, task.from_peer(task.build("peer", Rung(name=""), None)), path_of(cell))
    torch.manual_seed(2 + rank)
    model = OverlapDDP(parts)
    ways = make_ways(model, task.batch(cell.batch))
    found: dict[str, Any] = {"model": cell.model, "batch": cell.batch, "n_gpus": cell.n_gpus}
    found["on"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found["first_steps_s"] = row(ways["averaged"], N_WARMUP, device) * N_WARMUP  # compiles
    found |= {"gradient_bytes": [p.nbytes for p in model.parameters()], "ways": {}}
    names, begun = [n for n in ways if not set(n.split()) & set((options.skip or "").split(","))], time.perf_counter()
    rounds: dict[str, list[Any]] = {name: [] for name in names}
    undisturbed: Kernels = []
    for turn in range(options.rounds):
        now = time.perf_counter()
        if turn and slowest(now - start + (now - begun) / turn, device) > options.limit:
            break  # one more round might be cut short
        for name in names if turn % 2 == 0 else names[::-1]:
            if "error" not in found["ways"].get(name, {}):
                rounds[name].append(attempt(name, ways[name], model, device, meet, undisturbed, turn == 0))
                found["ways"][name] = facts_of(rounds[name])
                write(rank, cell, name, found, options)


def measure_cell(rank: int, device: torch.device, cell: Cell, options: argparse.Namespace, meet: Any) -> None:
    """Measure a cell; on GPUs the process then leaves at once, because an orderly end of NCCL's groups could hang."""
    try:
        measure(rank, device, cell, options, meet)
        meet.wait(PATIENCE_S)
    except Exception:
        if device.type == "cuda":
            traceback.print_exc()
            os._exit(1)
        raise
    if device.type == "cuda":
        os._exit(0)


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole(1), default=2)
    parser.add_argument("--model", dest="models", default="L/16", choices=("L/16", "H/14", "g/14"))
    parser.add_argument(
        "--batch", type=whole(1), help="only the cell with this many images on each GPU (before --tiny)"
    )
    parser.add_argument("--rounds", type=whole(1), help="default: 2, with --tiny 1")
    parser.add_argument("--skip", help="leave out ways with one of these words, separated by commas")
    parser.add_argument("--limit", type=positive, default=280, help="stop a cell after this many seconds")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: it takes at least 2 to average")
    options.rounds = options.rounds or (1 if options.tiny else 2)
    asked = vars(options) | {"ranks": str(options.ranks), "attention": "quickest", "averaging": "", "blocks": 0}
    cells = [c for c in cells_of(argparse.Namespace(**asked)) if not c.sharded]
    settings = {"optimizer": f"SGD, lr {LR}, momentum {MOMENTUM}", "dtype": "bfloat16", "tiny": options.tiny}
    results: dict[str, Any] = {"settings": settings, "cells": []}
    with suppress(FileNotFoundError):
        kept = load("yardstick_parts", options.folder)["results"]
        results["cells"] = kept["cells"] if kept["settings"] == settings else []
    record("yardstick_parts", results, options.folder)
    for cell in cells:
        meet = multiprocessing.get_context("spawn").Barrier(options.ranks)
        try:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            spawn(measure_cell, backend, options.ranks, cell, options, meet, limit_s=options.limit)
        except Exception as error:
            print(f"{cell}: {error}", flush=True)


if __name__ == "__main__":
    main()
