"""What every measuring program does alike: wait for the device, time calls, let competitors take turns,
and record the spread.

PyTorch is imported where it is needed, because a record names the accelerators of programs that use it only.
"""

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lib.given.data.record import MEASUREMENTS

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "numpy", "triton", "regex", "tokenizers", "tiktoken", "sentencepiece", "transformers", "mpi4py",
    "flash-linear-attention",
)  # fmt: skip
Run = Callable[[], Any]
T = TypeVar("T")


# ---- time ------------------------------------------------------------------------------------------------------------


def wait_for(device: "torch.device | str") -> None:
    """Wait until a GPU has done all that it was asked for."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], T], device: "torch.device | str") -> tuple[float, T]:
    """Seconds of one call, from an idle device until it is done, and what the call returns."""
    wait_for(device)
    start = time.perf_counter()
    result = run()
    wait_for(device)
    return time.perf_counter() - start, result


def seconds_of(run: Run, device: "torch.device | str", n: int = 1, on_ranks: bool = False) -> float:
    """Seconds of one call, the mean of ``n`` in a row, until the device is done.

    Args:
        run: What is timed.
        device: Where it computes.
        n: Calls in a row, which do not wait for each other.
        on_ranks: All ranks begin together, and the slowest rank's time is returned on each.
    """

    def calls() -> None:
        for _ in range(n):
            run()

    if on_ranks:
        import torch.distributed as dist

        dist.barrier()
    seconds = timed(calls, device)[0] / n
    return slowest(seconds, device) if on_ranks else seconds


def device_seconds(run: Run, device: "torch.device | str", before: Run | None = None) -> float:
    """Seconds of one call by the device's own clock, or by the host's on a CPU.

    Args:
        run: What is timed.
        device: Where it computes.
        before: Starts other work on a GPU first, so that the host runs ahead, as it does in training.
    """
    import torch

    if torch.device(device).type != "cuda":
        return seconds_of(run, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def times_ms(run: Run, n: int, device: "torch.device | str", n_warmup: int = 1) -> list[float]:
    """Milliseconds of each of ``n`` calls in a row, by the device's own clock; between them nothing waits for a GPU."""
    import torch

    for _ in range(n_warmup):
        run()
    if torch.device(device).type != "cuda":
        return [1e3 * seconds_of(run, device) for _ in range(n)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def in_turns(
    runs: Mapping[str, Run], clock: Callable[[Run], float], n_rounds: int, n_warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of competitors that take turns, in each round in another order, which is the same on all ranks.

    Args:
        runs: The competitors, by name.
        clock: Times one call, such as `seconds_of` or `device_seconds` on a device.
        n_rounds: How many calls of each count.
        n_warmup: How many before them do not.
    """
    chance, names = random.Random(0), list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(n_warmup + n_rounds):
        for name in chance.sample(names, len(names)):
            seconds = clock(runs[name])
            if turn >= n_warmup:
                times[name].append(seconds)
    return times


def measure(
    run: Callable[[], Any], n_repeats: int = 10, n_warmup: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Time a call, in seconds: the median, the 10th and the 90th percentile.

    Args:
        run: What is timed; it waits for the device itself.
        n_repeats: How many calls count.
        n_warmup: How many calls before them do not.
        clock: Gives seconds; ``time.process_time`` counts only what this process computes.
    """
    times = []
    for repeat in range(n_warmup + n_repeats):
        start = clock()
        run()
        if repeat >= n_warmup:
            times.append(clock() - start)
    return spread(times)


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of repeated measurements, and how many there were."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "n": len(values)}


# ---- ranks -----------------------------------------------------------------------------------------------------------


def slowest(seconds: float, device: "torch.device | str") -> float:
    """The largest of all ranks' times."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def spawn(worker: Callable, backend: str, n_ranks: int, *args, limit_s: float = float("inf")) -> None:
    """Run ``worker(rank, device, *args)`` on each of ``n_ranks`` new processes that form a group.

    Raises:
        TimeoutError: they had not finished after ``limit_s`` seconds; they are killed.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        given = (worker, backend, n_ranks, f"file://{folder}/meet", args)
        context = mp.spawn(_run, given, nprocs=n_ranks, join=False)  # type: ignore[no-untyped-call]
        assert context is not None
        end = time.monotonic() + limit_s
        while not context.join(timeout=min(5.0, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{n_ranks} ranks had not finished after {limit_s:.0f} s")


def _run(rank: int, worker: Callable, backend: str, n_ranks: int, meet: str, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1 if not torch.cuda.is_available() else 4)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=meet, rank=rank, world_size=n_ranks, device_id=device if backend == "nccl" else None
    )
    try:
        worker(rank, device, *args)
    finally:
        dist.destroy_process_group()


# ---- the record ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a measurement depends on: the processor, its cores, the accelerator if there is one, the versions."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(),
    }
    torch = sys.modules.get("torch")  # only where the program uses it
    if torch is not None and torch.cuda.is_available():
        found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    """The processor's name, as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def record(
    name: str, results: dict[str, Any], folder: Path = MEASUREMENTS, measured: dict[str, Any] | None = None
) -> Path:
    """Write results with the machine and the date. A reader sees either the complete old file or the complete new one.

    Args:
        name: Name of the file, without its suffix.
        results: Values that JSON can hold; keys end in their unit, as in ``train_s``.
        folder: Folder of the file.
        measured: A recorded measurement whose machine and date to keep,
            if the results come from there and not from this machine.
    """
    path = folder / f"{name}.json"
    kept = measured or {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine()}
    text = json.dumps({"name": name, "date": kept["date"], "machine": kept["machine"], "results": results}, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
    print(f"wrote {path}")
    return path
