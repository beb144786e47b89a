"""Profiles as pictures; ranges and a command line for Nsight Systems."""

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
    """The events of one category of a Chrome trace: ``name``, ``start_ms``, ``ms``, and ``depth``,
    how many it is inside of.

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


def own_spans(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, beginning and end (ms) of what each operator did itself: its span without those of the operators inside it.

    Args:
        events: As ``trace_events`` gives them.
    """
    spans: list[tuple[str, float, float]] = []
    stack: list[tuple[str, float]] = []  # names and ends, the outermost first
    now = 0.0

    def go_to(moment: float) -> None:
        nonlocal now
        while stack:
            name, end = stack[-1]
            if min(end, moment) > now:
                spans.append((name, now, min(end, moment)))
                now = min(end, moment)
            if end > moment:
                break
            stack.pop()

    for event in events:
        if event["depth"] == 0:  # also the first of another thread
            go_to(float("inf"))
        go_to(event["start_ms"])
        now = event["start_ms"]
        stack.append((event["name"], event["start_ms"] + event["ms"]))
    go_to(float("inf"))
    return spans


def draw_trace(ax, path: str | os.PathLike, groups: Mapping[str, Sequence[str]], n_bins: int = 80) -> None:
    """A step as a timeline: its ranges at the top, and below a row for each kind of operator, filled while it works.

    Args:
        ax: The axes to draw on.
        path: A trace that ``profile_step`` wrote.
        groups: Names of operators, as "aten::mm", under a name for each kind; all others are "other".
        n_bins: Parts into which the step is cut; the height of a bar is the share of its part.
    """
    found = trace_events(path, "user_annotation")
    ranges = [e for e in found if not e["name"].startswith(("Optimizer.", "ProfilerStep"))]
    spans = own_spans(trace_events(path, "cpu_op", "aten::"))
    start = min(*(e["start_ms"] for e in ranges), *(begin for _, begin, _ in spans))
    whole = max(*(e["start_ms"] + e["ms"] for e in ranges), *(end for *_, end in spans)) - start
    kind_of = {name: kind for kind, names in groups.items() for name in names}
    kinds, width = [*groups, "other"], whole / n_bins
    for row, kind in enumerate(kinds):
        own = [(a - start, b - start) for name, a, b in spans if kind_of.get(name, "other") == kind]
        shares = [
            sum(max(0.0, min(b, (n + 1) * width) - max(a, n * width)) for a, b in own) / width for n in range(n_bins)
        ]
        colour, base = COLOURS[row] if row < len(groups) else GREY, -row - 1.0
        ax.bar([n * width for n in range(n_bins)], [0.8 * s for s in shares], width, base, align="edge", color=colour)
        ax.text(1.01 * whole, base + 0.3, f"{sum(b - a for a, b in own) / whole:.0%}", va="center", color=colour)
        ax.axhline(base, color=GREY, linewidth=0.6)
    for e in ranges:
        corner = (e["start_ms"] - start, 0.1)
        ax.add_patch(Rectangle(corner, e["ms"], 0.8, facecolor=f"{GREY}55", edgecolor=GREY))
        if e["ms"] < 0.15 * whole:  # too narrow for its name
            ax.text(corner[0] + e["ms"], 1.0, e["name"], ha="right", va="bottom")
        else:
            ax.text(corner[0] + e["ms"] / 2, 0.5, e["name"], ha="center", va="center")
    ax.set_yticks([0.5, *(-row - 0.7 for row in range(len(kinds)))], ["range", *kinds])
    ax.set(xlim=(0, 1.09 * whole), ylim=(-len(kinds) - 0.1, 1.5), xlabel="ms since the step began")
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


def memory_curve(path: str | os.PathLike) -> tuple[list[float], list[int]]:
    """Time and bytes alive after each change, from what ``memory_timeline`` wrote.

    Args:
        path: JSON (from a CPU), or the pickle of a CUDA snapshot; one that you made yourself,
            because a pickle can run code.

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
