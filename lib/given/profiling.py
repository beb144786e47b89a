"""Profiles as pictures, and ranges and a command line for those who have Nsight Systems."""

import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Rectangle

from lib.given.plots import COLOURS

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes two lines into a notebook for each profile


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Name what runs inside: a range in PyTorch's own traces and, where there is CUDA, an NVTX range for ``nsys``.

    Args:
        name: What the range is called.
    """
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_cuda:
            torch.cuda.nvtx.range_pop()


def nsys_command(program: Sequence[str], output: str, python_backtrace: bool = False) -> list[str]:
    """The command line that runs a program under NVIDIA's Nsight Systems.

    Args:
        program: The program and its arguments, as ``["python", "-m", "lib.bench.ladder"]``.
        output: Name of the report, without its ending ``.nsys-rep``.
        python_backtrace: Whether each CUDA call is traced back to its line of Python; slower.

    Returns:
        The words of the command, for ``subprocess.run`` or ``shlex.join``.
    """
    options = ["--trace=cuda,nvtx,osrt", f"--output={output}", "--force-overwrite=true"]
    return ["nsys", "profile", *options, *(["--python-backtrace=cuda"] if python_backtrace else []), *program]


def trace_events(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The events of a Chrome trace that last: ``name``, ``cat``, ``ts_ms`` since the first, ``ms`` and ``depth`` of nesting."""
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    kinds = ("user_annotation", "cpu_op")
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in kinds]
    found.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    start, ends, thread, events = min((e["ts"] for e in found), default=0.0), [], None, []
    for e in found:
        if e["tid"] != thread:
            thread, ends = e["tid"], []
        while ends and ends[-1] <= e["ts"]:
            ends.pop()
        event = {"name": e["name"], "cat": e["cat"], "ts_ms": (e["ts"] - start) / 1e3, "ms": e["dur"] / 1e3}
        events.append(event | {"depth": len(ends), "thread": e["tid"]})
        ends.append(e["ts"] + e["dur"])
    return events


def draw_trace(ax, path: str | os.PathLike, groups: Mapping[str, Sequence[str]], n_rows: int = 2) -> None:
    """A step as a timeline: its ranges in a row at the top, the operators below, coloured by what they are.

    Args:
        ax: The axes to draw on.
        path: A trace that ``profile_step`` wrote.
        groups: Names of operators, as "aten::mm", under a name for each kind; all others are "other".
        n_rows: Rows of operators: those that the step calls, those that they call, and so on.
    """
    events, kinds = trace_events(path), [*groups, "other"]
    is_range = [
        e["cat"] == "user_annotation" and not e["name"].startswith(("Optimizer.", "ProfilerStep")) for e in events
    ]
    ranges = [e for e, yes in zip(events, is_range, strict=True) if yes]
    for e in ranges:
        ax.add_patch(Rectangle((e["ts_ms"], 0.1), e["ms"], 0.8, facecolor="#77777755", edgecolor="#777777"))
        ax.text(e["ts_ms"] + e["ms"] / 2, 0.5, e["name"], ha="center", va="center", fontsize=8)
    inner = [e for e in events if e["cat"] == "cpu_op"]
    floor = min((e["depth"] for e in inner), default=0)
    for e in inner:
        row = e["depth"] - floor
        if row < n_rows:
            kind = next((n for n, (_, names) in enumerate(groups.items()) if e["name"] in names), len(groups))
            colour = COLOURS[kind] if kind < len(groups) else "#777777"
            ax.add_patch(Rectangle((e["ts_ms"], -row - 0.9), e["ms"], 0.8, facecolor=colour, linewidth=0))
    for n, kind in enumerate(kinds):
        ax.plot([], [], color=COLOURS[n] if n < len(groups) else "#777777", linewidth=6, label=kind)
    end = max((e["ts_ms"] + e["ms"] for e in events), default=1.0)
    ax.set(xlim=(0, end), ylim=(-n_rows - 0.1, 1), yticks=[], xlabel="ms since the step began")
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


def memory_curve(path: str | os.PathLike) -> tuple[list[float], list[int]]:
    """Time and bytes alive after each change, from what ``memory_timeline`` wrote.

    Args:
        path: JSON (from a CPU), or the pickle of a CUDA snapshot; one that you made yourself, because a pickle can run code.

    Returns:
        Seconds since the first event, and bytes. In a snapshot only what its history saw is counted.
    """
    data = Path(path).read_bytes()
    if data[:1] == b"{":
        events = json.loads(data)["events"]
        return [e["time_s"] for e in events], [e["total_bytes"] for e in events]
    steps = {"alloc": 1, "free_completed": -1}
    history = [e for e in pickle.loads(data)["device_traces"][0] if e["action"] in steps]  # noqa: S301
    times, totals, total = [], [], 0
    for e in history:
        total += steps[e["action"]] * e["size"]
        times.append((e["time_us"] - history[0]["time_us"]) / 1e6)
        totals.append(total)
    return times, totals
