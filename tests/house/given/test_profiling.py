"""The given half of chapter 8: ranges, a command line, and the reading of traces and timelines."""

import json
import pickle
from contextlib import suppress
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from lib.given.models.sizes import MODEL_SIZES
from lib.given.show.profiles import draw_trace, memory_curve, nsys_command, nvtx_range, own_spans, trace_events


def test_model_sizes_are_the_assignments():
    found = {name: (c.dim, 4 * c.dim, c.n_layers, c.n_heads) for name, c in MODEL_SIZES.items()}
    assert found == {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
    }
    assert {(c.vocab_size, c.context_len) for c in MODEL_SIZES.values()} == {(10_000, 1024)}


def test_nsys_command_puts_the_program_last():
    words = nsys_command(["python", "step.py", "--fast"], "report")
    assert words[:2] == ["nsys", "profile"]
    assert words[-3:] == ["python", "step.py", "--fast"]
    assert "--output=report" in words
    assert "--python-backtrace=cuda" in nsys_command(["python"], "report", python_backtrace=True)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_nvtx_range_closes_what_it_opens(monkeypatch, on_cuda):
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with suppress(ZeroDivisionError), nvtx_range("forward"):
        calls.append("inside")
        _ = 1 / 0
    assert calls == (["forward", "inside", "pop"] if on_cuda else ["inside"])


def event(name, start, duration, cat="cpu_op", thread=1):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": thread}


def test_traces_are_read_and_drawn(tmp_path):
    path = tmp_path / "trace.json"
    events = [event("aten::addmm", 1100, 800), event("aten::linear", 1000, 1000), event("aten::add", 2000, 500)]
    events += [event("forward", 900, 2000, "user_annotation"), event("aten::mm", 1200, 10, thread=2)]
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    found = [(e["name"], e["start_ms"], e["ms"], e["depth"]) for e in trace_events(path, "cpu_op", "aten::")]
    assert found[:2] == [("aten::linear", 1.0, 1.0, 0), ("aten::addmm", 1.1, 0.8, 1)]
    assert found[2:] == [("aten::add", 2.0, 0.5, 0), ("aten::mm", 1.2, 0.01, 0)]
    fig, ax = plt.subplots()
    spans = own_spans(trace_events(path, "cpu_op", "aten::"))
    assert sum(end - begin for name, begin, end in spans if name == "aten::linear") == pytest.approx(0.2)
    assert sum(end - begin for name, begin, end in spans if name == "aten::addmm") == pytest.approx(0.8)
    assert ("aten::mm", 1.2, 1.21) in spans
    draw_trace(ax, path, {"products": ["aten::linear", "aten::addmm"]}, n_bins=10)
    assert len(ax.patches) == 2 * 10 + 1
    assert [text.get_text() for text in ax.texts] == ["50%", "26%", "forward"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["range", "products", "other"]
    plt.close(fig)


def test_memory_curves_come_from_a_timeline_or_a_snapshot(tmp_path):
    timeline, snapshot = tmp_path / "memory.json", tmp_path / "memory.pickle"
    events = [{"time_s": 0.5, "total_bytes": 40}, {"time_s": 0.75, "total_bytes": 0}]
    timeline.write_text(json.dumps({"events": events, "peak_bytes": 40}))
    assert memory_curve(timeline) == ([0.5, 0.75], [40, 0])
    actions = [
        ("alloc", 512),
        ("segment_alloc", 2**21),
        ("alloc", 1024),
        ("free_requested", 512),
        ("free_completed", 512),
    ]
    history = [{"action": a, "size": size, "time_us": 1_000_000 * i} for i, (a, size) in enumerate(actions)]
    snapshot.write_bytes(pickle.dumps({"device_traces": [history], "segments": []}))
    assert memory_curve(snapshot) == ([0.0, 2.0, 4.0], [512, 1536, 1024])
