"""Record measurements, together with the machine that they were made on."""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).parents[3] / "chapters" / "measurements"
if "--tiny" in sys.argv:  # the program is only tried, so it must not change the book's records
    MEASUREMENTS = Path(tempfile.gettempdir()) / "workbook_trials"
PACKAGES = ("torch", "numpy", "triton", "regex", "tokenizers", "tiktoken", "sentencepiece", "transformers", "mpi4py")


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
        measured: A recorded measurement whose machine and date to keep, if the results come from there and not from this machine.
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


def load(name: str, folder: Path = MEASUREMENTS) -> dict[str, Any]:
    """A recorded measurement: ``results``, ``machine`` and ``date``.

    Raises:
        FileNotFoundError: there is no measurement of that name; the message lists those that exist.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise FileNotFoundError(f"no measurement {name!r}, only {there}; python -m lib.bench.{name} makes it")
    return json.loads(path.read_text(encoding="utf-8"))


def where(measured: dict[str, Any]) -> str:
    """The machine and the date of a measurement in one line, for the caption of a figure or table."""
    m = measured["machine"]
    cards = Counter(m.get("accelerators", []))
    named = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in cards.items())
    on = named or f"{m['cores']} cores of an {m['cpu']}"
    return f"measured on {on}, Python {m['python']}, {measured['date']}"
