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

from lib.given.show.plots import COLOURS, GREY

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


def trace_events(path: str | os.PathLike, cat: str, prefix: str = "") -> list[dict[str, Any]]:
    """The events of one category of a Chrome trace: ``name``, ``start_ms``, ``ms``, and ``depth``, how many it is inside of.

    Args:
        path: The trace.
        cat: "user_annotation" for ranges, "cpu_op" for operators.
        prefix: What the names begin with.
    """
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    found = [e for e in trace["traceEvents"] if e.get("cat") == cat and e["name"].startswith(prefix)]
    found.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    events: list[dict[str, Any]] = []
    ends: list[float] = []
    thread = None
    for e in found:
        if e["tid"] != thread:
            thread, ends = e["tid"], []
        while ends and ends[-1] <= e["ts"]:
            ends.pop()
        events.append({"name": e["name"], "start_ms": e["ts"] / 1e3, "ms": e["dur"] / 1e3, "depth": len(ends)})
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
    ranges = [
        e for e in trace_events(path, "user_annotation") if not e["name"].startswith(("Optimizer.", "ProfilerStep"))
    ]
    operators = [e for e in trace_events(path, "cpu_op", "aten::") if e["depth"] < n_rows]
    start = min(e["start_ms"] for e in ranges + operators)
    whole = max(e["start_ms"] + e["ms"] for e in ranges + operators) - start
    colours = {name: COLOURS[n] for n, names in enumerate(groups.values()) for name in names}
    for e in ranges:
        corner = (e["start_ms"] - start, 0.1)
        ax.add_patch(Rectangle(corner, e["ms"], 0.8, facecolor=f"{GREY}55", edgecolor=GREY))
        if e["ms"] < 0.08 * whole:  # too narrow for its name
            ax.text(corner[0] + e["ms"] + 0.01 * whole, 0.5, e["name"], ha="left", va="center", fontsize=8)
        else:
            ax.text(corner[0] + e["ms"] / 2, 0.5, e["name"], ha="center", va="center", fontsize=8)
    for e in operators:
        corner = (e["start_ms"] - start, -e["depth"] - 0.9)
        ax.add_patch(Rectangle(corner, e["ms"], 0.8, facecolor=colours.get(e["name"], GREY), linewidth=0))
    for n, kind in enumerate([*groups, "other"]):
        ax.plot([], [], color=COLOURS[n] if n < len(groups) else GREY, linewidth=6, label=kind)
    ax.set(xlim=(0, 1.1 * whole), ylim=(-n_rows - 0.1, 1), yticks=[], xlabel="ms since the step began")
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
    history = [e for e in pickle.loads(data)["device_traces"][0] if e["action"] in steps]
    times, totals, total = [], [], 0
    for e in history:
        total += steps[e["action"]] * e["size"]
        times.append((e["time_us"] - history[0]["time_us"]) / 1e6)
        totals.append(total)
    return times, totals
