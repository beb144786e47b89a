"""Profiles, graded: the trace and the timeline are compared with what PyTorch's own profiler saw."""

import gc
import itertools
import json
import pickle
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import record_function

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded

speed = graded("speed")

TIMED = "times that differ from run to run"  # in place of an answer's numbers, which no mistake would repeat
TRACE, TIMELINE = "the contract of ex-speed-profile-step", "the contract of ex-speed-memory-timeline"


# ---- profile_step ----------------------------------------------------------------------------------------------------


class Step:
    """A training step in three ranges, one of them opened twice, that counts its calls."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.calls = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), 0
        self.x = torch.randn(8, 16)

    def __call__(self):
        self.calls += 1
        for half in self.x.chunk(2):
            with record_function("forward"):
                loss = self.model(half).square().mean()
            with record_function("backward"):
                loss.backward()
        # ranges inside, as those of torch.optim open them (importing them would cost this test 2 s)
        with record_function("optimizer"), record_function("Optimizer.step#SGD.step"), torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 1e-3 * parameter.grad
        with record_function("Optimizer.zero_grad#SGD.zero_grad"):
            self.model.zero_grad()


def profile_of(step, path):
    """What the answer returns, after a check that it has the two parts."""
    if torch.cuda.is_available():  # a process's first profile starts CUPTI: an empty one, so that no answer sees it
        with torch.profiler.profile():
            torch.cuda.synchronize()
    profile = speed.profile_step(step, path)
    for part in ("range_s", "operator_s"):
        kind = type(profile).__name__
        expect_true(hasattr(profile, part), f"out is a {kind} without `{part}`: return a StepProfile", read=TRACE)
    return profile


def read_trace(path):
    expect_true(path.exists(), f"there is no file {path.name}", read=TRACE)
    trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def expected_ranges(events) -> dict[str, float]:
    """Seconds of each range that the step opened, from the trace."""
    total: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "user_annotation" and not event["name"].startswith(("Optimizer.", "ProfilerStep")):
            total[event["name"]] += event["dur"] / 1e6
    return dict(total)


def expected_operators(events) -> dict[str, float]:
    """Seconds of each operator without those inside it, from the trace."""
    by_thread, own = defaultdict(list), defaultdict[str, float](float)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        inside: list = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while inside and inside[-1]["ts"] + inside[-1]["dur"] <= event["ts"]:
                inside.pop()
            own[event["name"]] += event["dur"] / 1e6
            if inside:
                own[inside[-1]["name"]] -= event["dur"] / 1e6
            inside.append(event)
    return {name: seconds for name, seconds in own.items() if name.startswith("aten::")}


def events_of(rows) -> EventList:
    """What PyTorch's profiler sees of a step, from (name, start, end, facts) of each event; times in microseconds."""
    events, on_device = [], any("kernel_us" in facts for *_, facts in rows)
    device = "cuda" if on_device else None
    for number, (name, start, end, facts) in enumerate(rows, start=1):
        facts = {"thread": 1, **facts}
        kernel_us = facts.pop("kernel_us", 0)
        event = FunctionEvent(number, name, start_us=start, end_us=end, use_device=device, stack=[], **facts)
        if kernel_us:
            event.append_kernel(f"kernel of {name}", 0, kernel_us)
        events.append(event)
    found = EventList(events, use_device=device)
    found._build_tree()
    return found


def played_on_the_host() -> EventList:
    """A step on the CPU: forward, which is opened twice, calls linear, and linear calls addmm."""
    ours = {"is_user_annotation": True}
    rows = []
    for start, longer in ((0, 0), (200, 30)):
        rows += [("forward", start, start + 50 + longer, ours), ("aten::linear", start + 5, start + 45 + longer, {})]
        rows += [("aten::addmm", start + 10, start + 30 + longer, {})]
    rows += [("optimizer", 400, 460, ours), ("Optimizer.step#AdamW.step", 405, 455, ours)]
    rows += [("aten::add", 470, 480, {})]  # in no range
    return events_of(rows)


def played_on_a_device() -> EventList:
    """A step on a CUDA device: rows of the host and of the device."""
    ours: dict[str, Any] = {"is_user_annotation": True}
    device: dict[str, Any] = {"thread": 7, "device_type": DeviceType.CUDA}
    rows = []
    for start in (0, 200):  # forward and backward are opened twice
        rows += [("forward", start, start + 40, ours), ("aten::linear", start + 5, start + 35, {})]
        rows += [
            ("aten::addmm", start + 10, start + 30, {"kernel_us": 500}),
            ("backward", start + 50, start + 150, ours),
        ]
        for at, kernel_us in ((60, 700), (140, 300)):  # from autograd's thread; the second ends after the range
            rows += [("aten::mm", start + at, start + at + 20, {"thread": 2, "kernel_us": kernel_us})]
        rows += [("forward", start + 8, start + 608, ours | device)]
        rows += [("kernel of aten::addmm", start + 8, start + 508, device)]
    rows += [("optimizer", 400, 460, ours), ("Optimizer.step#AdamW.step", 405, 455, ours)]
    rows += [("aten::_fused_adamw_", 410, 450, {"kernel_us": 90}), ("aten::add", 470, 480, {"kernel_us": 10})]
    return events_of(rows)  # the last is in no range


def play(monkeypatch, played: EventList) -> None:
    """Make PyTorch's profiler return these events, so that the times of a check are the same in every run."""
    monkeypatch.setattr(torch.profiler.profile, "events", lambda *args, **kwargs: played)
    monkeypatch.setattr(torch.profiler.profile, "key_averages", lambda *args, **kwargs: played.key_averages())


HOST = (
    "a step on the CPU whose events the test plays, in µs: forward is opened twice, for 50 and for 80; in it "
    "linear takes 40 "
    "and 70, of which addmm takes 20 and 50; optimizer takes 60"
)


def test_profile_step_by_hand(tmp_path, monkeypatch):
    case(HOST)
    play(monkeypatch, played_on_the_host())
    profile = profile_of(lambda: torch.ones(2) + 1, tmp_path / "trace.json")
    expect_close(profile.range_s, {"forward": 130e-6, "optimizer": 60e-6}, rtol=1e-6, name="range_s", read=TRACE)


def test_profile_step_by_hand_of_operators(tmp_path, monkeypatch):
    case(HOST)
    play(monkeypatch, played_on_the_host())
    profile = profile_of(lambda: torch.ones(2) + 1, tmp_path / "trace.json")
    expected = {"aten::linear": 40e-6, "aten::addmm": 70e-6, "aten::add": 10e-6}
    expect_close(profile.operator_s, expected, rtol=1e-6, name="operator_s", read=TRACE)


def test_profile_step_names_the_ranges(tmp_path):
    case("a step with the ranges forward and backward (each opened twice) and optimizer")
    step = Step()
    profile = profile_of(step, tmp_path / "trace.json")
    expect_equal(step.calls, 1, name="calls of step_fn", read=TRACE)
    expect_equal(sorted(profile.range_s), ["backward", "forward", "optimizer"], name="the ranges", read=TRACE)


def test_profile_step_adds_up_the_ranges(tmp_path):
    case("a step with the ranges forward and backward (each opened twice) and optimizer, against its own trace")
    profile = profile_of(Step(), tmp_path / "trace.json")
    expected = expected_ranges(read_trace(tmp_path / "trace.json"))
    expect_close(profile.range_s, expected, atol=2e-6, rtol=1e-3, name="range_s", answer=TIMED, read=TRACE)


def test_profile_step_gives_operators_their_own_time(tmp_path):
    case("the same step: each operator without those that it calls, against its own trace")
    profile = profile_of(Step(), tmp_path / "trace.json")
    expected = expected_operators(read_trace(tmp_path / "trace.json"))
    expect_equal(sorted(profile.operator_s), sorted(expected), name="the operators", read=TRACE)
    expect_close(profile.operator_s, expected, atol=5e-6, rtol=1e-2, name="operator_s", answer=TIMED, read=TRACE)


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_profile_step_writes_a_trace_at(tmp_path, kind):
    case("any ranges, one inside another, and a path that is a str or a Path")
    x = torch.ones(4, 4)

    def step():
        with record_function("outer"), record_function("inner"):
            torch.mm(x, x)

    profile = profile_of(step, kind(tmp_path / "a trace.json"))
    events = read_trace(tmp_path / "a trace.json")
    names = {event["name"] for event in events}
    expect_true({"outer", "inner", "aten::mm"} <= names, "the trace lacks a range or an operator", read=TRACE)
    expect_equal(sorted(profile.range_s), ["inner", "outer"], name="the ranges", read=TRACE)
    expect_true(
        profile.range_s["outer"] >= profile.range_s["inner"] > 0,
        "an outer range must take at least as long as the range inside it",
    )
    expect_true("aten::mm" in profile.operator_s, "operator_s lacks aten::mm", read=TRACE)


def test_profile_step_without_ranges(tmp_path):
    case("a step that opens no range")
    profile = profile_of(lambda: torch.ones(3) + 1, tmp_path / "trace.json")
    expect_equal(profile.range_s, {}, name="range_s", read=TRACE)
    expect_true("aten::add" in profile.operator_s, "operator_s lacks aten::add", read=TRACE)


def test_profile_step_takes_the_devices_time_where_there_is_some(tmp_path, monkeypatch):
    case(
        "a CUDA device (its events are played by the test): 500 µs of addmm in each of two forward ranges; 700 "
        "+ 300 µs of "
        "mm in each of two backward ranges, launched by autograd's thread; 90 µs in optimizer; a device row of forward"
    )
    play(monkeypatch, played_on_a_device())
    profile = profile_of(lambda: torch.ones(2) + 1, tmp_path / "trace.json")
    ranges = {"forward": 1000e-6, "backward": 2000e-6, "optimizer": 90e-6}
    expect_close(profile.range_s, ranges, rtol=1e-6, name="range_s", read=TRACE)
    found = {name: seconds for name, seconds in profile.operator_s.items() if seconds}
    operators = {"aten::addmm": 1000e-6, "aten::mm": 2000e-6, "aten::_fused_adamw_": 90e-6, "aten::add": 10e-6}
    expect_close(found, operators, rtol=1e-6, name="operator_s", read=TRACE)


@pytest.mark.gpu
@pytest.mark.time_limit(60)
def test_profile_step_on_a_gpu(tmp_path):
    case("the same step on a CUDA device, against the kernels of its own trace and where each was launched")
    step = Step()
    step.model, step.x = step.model.cuda(), step.x.cuda()
    for _ in range(2):
        step()
    profile = profile_of(step, tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    calls = [
        e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    ]
    launched = {e["args"]["correlation"]: e["ts"] for e in calls}
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = dict.fromkeys(("backward", "forward", "optimizer"), 0.0)
    for e in (e for e in events if e.get("cat") == "user_annotation" and e["name"] in ranges):
        inside = [k["dur"] for k in kernels if 0 <= launched[k["args"]["correlation"]] - e["ts"] < e["dur"]]
        ranges[e["name"]] += sum(inside) / 1e6
    total = sum(k["dur"] for k in kernels) / 1e6
    expect_true(total > 0, "the trace has no kernel: profile the device too", read=TRACE)
    expect_close(profile.range_s, ranges, atol=2e-6, rtol=0.02, name="range_s", read=TRACE)
    expect_close(sum(profile.operator_s.values()), total, atol=2e-6, rtol=0.02, name="sum of operator_s", read=TRACE)


@pytest.mark.gpu
@pytest.mark.time_limit(60)
def test_profile_step_of_a_cpu_step_beside_a_gpu(tmp_path):
    case("a step on the CPU of a machine that has a CUDA device, against its own trace")
    torch.ones(1, device="cuda")
    profile = profile_of(Step(), tmp_path / "trace.json")
    expected = expected_ranges(read_trace(tmp_path / "trace.json"))
    expect_close(profile.range_s, expected, atol=2e-6, rtol=1e-3, name="range_s", read=TRACE)


def test_profile_step_lets_errors_through(tmp_path):
    case("a step that raises")

    def fails():
        raise RuntimeError("no such layer")

    with expect_raises(RuntimeError, "no such layer"):
        speed.profile_step(fails, tmp_path / "trace.json")


# ---- memory_timeline -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cuda(monkeypatch):
    """A machine without a CUDA device, whatever there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def changes(events) -> list[int]:
    return [event["change_bytes"] for event in events]


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_by_hand(tmp_path):
    case("a of 10 float32; b = a + 1; view = b.detach().view(5, 2); b dropped; c = view * 2; the view and a dropped")
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        a = torch.ones(10)
        b = a + 1
        view = b.detach().view(5, 2)
        del b
        c = view * 2
        del view
        del a
    expect_equal(changes(events), [40, 40, 40, -40, -40], name="change_bytes", read=TIMELINE)
    expect_equal([e["total_bytes"] for e in events], [40, 80, 120, 80, 40], name="total_bytes", read=TIMELINE)
    expect_equal([e["operator"] == "free" for e in events], [False] * 3 + [True] * 2, name="operator == 'free'")
    expect_equal(c.shape, (5, 2), name="what the block computed")


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_names_the_operators_in_order_of_time(tmp_path):
    case("x @ x, then exp: the names of the operators, and times that do not fall")
    x = torch.ones(4, 4)
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        _ = (x @ x).exp()
    found = [event["operator"] for event in events[:2]]
    expect_equal(found, ["aten.mm.default", "aten.exp.default"], name="the operators", read=TIMELINE)
    times = [event["time_s"] for event in events]
    expect_true(times == sorted(times) and times[0] >= 0, "time_s falls, or is negative", answer=times, read=TIMELINE)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_counts_time_from_its_beginning(tmp_path, monkeypatch):
    case("every clock of the module time shows 1,000,000 s and advances by 1 s when it is read; three tensors are made")
    ticks = itertools.count(1_000_000)
    for clock in ("time", "mono" + "tonic", "perf" + "_counter"):  # the test winds them; no test reads a real one
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        made = [torch.ones(10) for _ in range(3)]
    times = [event["time_s"] for event in events]
    in_order = times == sorted(times) and len(times) == len(made)
    problem = f"time_s is {times}: it should be seconds since the block began"
    expect_true(
        in_order and times[0] >= 0 and times[-1] < 1000, problem, answer=[round(t, -3) for t in times], read=TIMELINE
    )


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_leaves_out_what_was_there(tmp_path):
    case("a weight made before the block: viewed, changed in place, filled by out=, dropped")
    weight, out = torch.ones(64), torch.empty(64)
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        weight.view(8, 8).t()
        weight.add_(1)
        torch.mul(weight, 2, out=out)
        del weight
    expect_equal(changes(events), [], name="change_bytes", read=TIMELINE)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_counts_a_storage_once(tmp_path):
    case("x of 48 bytes split in two views; a sort, which gives two storages, of 48 and of 96 bytes")
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        x = torch.arange(12.0)
        halves = x.split(6)
        del x
        pair = torch.sort(torch.cat(halves))
    made = [e["change_bytes"] for e in events if e["operator"] != "free"]
    expect_equal(sorted(made), [48, 48, 48, 96], name="bytes made", read=TIMELINE)
    expect_equal(len(pair), 2)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_leaves_out_storages_of_nothing(tmp_path):
    case("a tensor of no elements, then one of 10 float32; both dropped")
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        empty = torch.ones(0)
        a = torch.ones(10)
        del empty
        del a
    expect_equal(changes(events), [40, -40], name="change_bytes", read=TIMELINE)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_writes_the_events_and_the_peak(tmp_path):
    for kind in (str, lambda path: path):
        case("tensors of 40, 80 and 20 bytes; the second is dropped before the third; path a str or a Path")
        path = tmp_path / "memory.json"
        with speed.memory_timeline(kind(path)) as events:
            a = torch.ones(10)
            b = torch.ones(20)
            del b
            c = torch.ones(5)
        expect_true(path.exists(), "there is no file", read=TIMELINE)
        written = json.loads(path.read_text())
        expect_equal(sorted(written), ["events", "peak_bytes"], name="keys of the file", read=TIMELINE)
        expect_equal(written["peak_bytes"], 120, name="peak_bytes", read=TIMELINE)
        expect_equal(written["events"], events, name="events", read=TIMELINE)
        path.unlink()
        del a, c


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_stops_with_the_block(tmp_path):
    case("a tensor made in the block is dropped after it")
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        a = torch.ones(10)
    before = changes(events)
    del a
    b = torch.ones(20)
    expect_equal(changes(events), before, name="change_bytes after the block", read=TIMELINE)
    expect_equal((before, len(b)), ([40], 20), name="change_bytes", read=TIMELINE)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_is_written_after_an_error(tmp_path):
    case("the block raises: the error passes through, and the file is there")
    path = tmp_path / "memory.json"
    with expect_raises(RuntimeError, "out of memory"), speed.memory_timeline(path):
        kept = torch.ones(10)
        raise RuntimeError("out of memory")
    expect_true(path.exists(), "there is no file when the block raised", read=TIMELINE)
    expect_equal(json.loads(path.read_text())["peak_bytes"], 40, name="peak_bytes", read=TIMELINE)
    expect_equal(len(kept), 10)


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_of_nothing(tmp_path):
    case("an empty block")
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        pass
    expect_equal(json.loads((tmp_path / "memory.json").read_text()), {"events": [], "peak_bytes": 0}, name="the file")
    expect_equal(events, [], name="events")


def peak_of_profiler(step) -> int:
    """The most that PyTorch's allocator had out at once, as its profiler reports it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    total = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            total += event.nbytes()
            peak = max(peak, total)
    return peak


@pytest.mark.usefixtures("no_cuda")
def test_memory_timeline_agrees_with_the_allocator(tmp_path):
    case(
        "a forward and a backward pass of three layers, [64, 32] to [64, 128] and back: the peak, against "
        "PyTorch's profiler"
    )
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)), torch.randn(64, 32)

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    gc.collect()
    with speed.memory_timeline(tmp_path / "memory.json") as events:
        step()
    peak = json.loads((tmp_path / "memory.json").read_text())["peak_bytes"]
    expect_close(float(peak), float(peak_of_profiler(step)), rtol=0.02, name="peak_bytes", read=TIMELINE)
    expect_equal(events[-1]["total_bytes"], 0, name="total_bytes at the end, when all is freed", read=TIMELINE)


@pytest.mark.parametrize("fails", [False, True], ids=["", "error"])
def test_memory_timeline_on_cuda_asks_the_allocator(tmp_path, monkeypatch, fails):
    case("a CUDA device (simulated by the test)" + (", and the block raises" if fails else ""))
    asked: list[Any] = []

    def record(enabled="all", **settings):
        asked.append(("record", enabled, settings.get("max_entries")))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    path = tmp_path / "memory.pickle"

    def dump(filename):
        asked.append(("dump", "path" if str(filename) == str(path) else str(filename)))

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    try:
        with speed.memory_timeline(path) as events:
            asked.append("block")
            if fails:
                raise torch.OutOfMemoryError("out of memory")
    except torch.OutOfMemoryError:
        asked.append("error")
    expected = [("record", "all", 100_000), "block", ("dump", "path"), ("record", None, None)]
    expect_equal(asked, expected + ["error"] * fails, name="what was asked", read=TIMELINE)
    expect_equal(events, [], name="events", read=TIMELINE)


@pytest.mark.gpu
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("fails", [False, True], ids=["", "error"])
def test_memory_timeline_on_a_gpu(tmp_path, fails):
    case("a tensor of 8 MiB made and dropped on a CUDA device" + (", and the block raises" if fails else ""))
    path, seen = tmp_path / "memory.pickle", []
    torch.ones(1, device="cuda")
    try:
        with speed.memory_timeline(path) as events:
            seen.append(events)
            a = torch.ones(2**21, device="cuda")
            del a
            if fails:
                raise torch.OutOfMemoryError("out of memory")
    except torch.OutOfMemoryError:
        pass
    expect_equal(seen, [[]], name="events", read=TIMELINE)
    expect_true(path.exists(), "there is no file", read=TIMELINE)
    history = [event for trace in pickle.loads(path.read_bytes())["device_traces"] for event in trace]
    made = [event["size"] for event in history if event["action"] == "alloc"]
    expect_true(2**23 in made, f"the snapshot's history has no allocation of 8 MiB, but {made}", read=TIMELINE)

    def noted():
        return sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))

    before = noted()
    torch.ones(2**21, device="cuda")
    expect_equal(noted() - before, 0, name="events that the history notes after the block", read=TIMELINE)
