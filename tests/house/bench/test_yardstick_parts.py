"""The program that tells apart what a step loses on several GPUs, on two CPU processes."""

import ctypes
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.bench.kit import spawn
from lib.bench.yardstick import parts as yardstick_parts
from lib.bench.yardstick.compare import Cell
from lib.given.data.record import load
from lib.ranks import pool
from tests.house.bench import yardstick_programs

TRAINING = ["alone", "beside", "in step", "averaged", "after", "averaged bf16"]


def measure(folder, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["yardstick_parts", "--tiny", "--folder", str(folder), *words])
    yardstick_parts.main()
    return load("yardstick_parts", folder)["results"]


@pytest.mark.exhaustive
@pytest.mark.time_limit(120)
def test_every_way_is_timed_on_every_rank(tmp_path, monkeypatch):
    (cell,) = measure(tmp_path, monkeypatch, "--batch", "64")["cells"]
    assert (cell["model"], cell["batch"], cell["n_gpus"], cell["on"]) == ("L/16", 2, 2, "cpu")
    assert sum(cell["gradient_bytes"]) == 4 * sum(p.numel() for p in model_of(cell).parameters())
    assert sorted(cell["ways"]) == sorted([*TRAINING, "wires", "wires bf16"])
    for way in cell["ways"].values():
        rows = way["step_values_s"]
        assert [len(row) for row in rows] == [yardstick_parts.N_ROWS] * 2
        assert [step["n"] for step in way["step_s"]] == [yardstick_parts.N_ROWS] * 2
        assert 0 < max(step["p10"] for step in way["step_s"]) <= way["slowest_step_s"]["p90"]
        assert way["clock_mhz"] == way["power_w"] == [None, None], "nothing is read of a CPU"


def model_of(cell):
    from lib.vit import VisionTransformer

    return VisionTransformer(Cell(model=cell["model"], batch=cell["batch"], tiny=True).config)


@pytest.mark.exhaustive
@pytest.mark.time_limit(120)
def test_other_cells_stay_and_words_leave_ways_out(tmp_path, monkeypatch):
    skipped = ("--skip", "alone,beside,step,after,wires,bf16", "--rounds", "2")
    measure(tmp_path, monkeypatch, "--batch", "256", *skipped)
    cells = measure(tmp_path, monkeypatch, "--batch", "64", *skipped)["cells"]
    assert [(cell["batch"], list(cell["ways"])) for cell in cells] == [(8, ["averaged"]), (2, ["averaged"])]
    assert cells[0]["ways"]["averaged"]["step_s"][1]["n"] == 2 * yardstick_parts.N_ROWS


@pytest.mark.time_limit(60)
def test_each_way_averages_what_its_name_says():
    n_rows = 6
    for found in pool("gloo").run(yardstick_programs.step_each_way, n_ranks=2, time_limit_s=40).values:
        assert {way: found[way] for way in ("alone", "beside", "in step")} == {
            "alone": (0, False), "beside": (0, False), "in step": (1, False)
        }  # fmt: skip
        assert {found[way] for way in ("averaged", "after", "wires")} == {(n_rows, True)}
        assert found["averaged bf16"][1], found
        assert found["wires bf16"][1], found


def test_a_way_that_fails_keeps_its_earlier_rounds():
    good: list[dict[str, Any]] = [{"step_s": [1.0, 2.0], "seen": [[1980.0, 500.0]]}, {"step_s": [3.0, 1.0], "seen": []}]
    found = yardstick_parts.facts_of([good, [good[0], {"error": "RuntimeError: no"}]])
    assert found["error"] == "RuntimeError: no"
    assert found["step_values_s"] == [[1.0, 2.0], [3.0, 1.0]]
    assert (found["slowest_step_s"]["median"], found["clock_mhz"]) == (2.5, [1980.0, None])
    assert yardstick_parts.facts_of([[{"error": "a"}, good[1]]]) == {"error": "a"}


def kernels(*triples):
    """A step's kernels, N_TRACED times: each has a name, a start and an end in microseconds."""
    steps = [[(name, 1000 * start, 1000 * end) for name, start, end in triples]] * yardstick_parts.N_TRACED
    return [(name, a + i * 10**6, b + i * 10**6) for i, step in enumerate(steps) for name, a, b in step]


UNDISTURBED = kernels(("product", 0, 100), ("product", 100, 200), ("norm", 200, 210), ("SGD_multi_tensor", 210, 240))


def test_kernels_beside_the_averaging_are_told_from_the_others():
    with_nccl = kernels(
        ("product", 0, 100), ("ncclAllReduce", 90, 310), ("product", 100, 300), ("norm", 300, 312),
        ("SGD_multi_tensor", 320, 350)
    )  # fmt: skip
    found = yardstick_parts.compare(with_nccl, UNDISTURBED)
    assert found["averaging_s"] == pytest.approx(220e-6)
    assert found["exposed_s"] == pytest.approx(0)
    beside, apart = found["beside"], found["apart"]
    assert (beside["n"], apart["n"]) == (pytest.approx(3), pytest.approx(1))
    assert (beside["s"], beside["undisturbed_s"]) == (pytest.approx(312e-6), pytest.approx(210e-6))
    assert (beside["n_long"], beside["lost_by_long_s"]) == (pytest.approx(1), pytest.approx(100e-6))
    assert (apart["s"], apart["lost_by_long_s"]) == (pytest.approx(30e-6), 0)
    assert found["longest"][0] == {"kernel": "product", "n": 2, "lost_s": pytest.approx(100e-6)}


def test_copies_and_new_kernels_count_as_averaging_and_what_nothing_hides_is_exposed():
    with_copies = kernels(
        ("product", 0, 100), ("Memcpy DtoD", 50, 150), ("product", 100, 200), ("norm", 200, 210), ("mean", 190, 260),
        ("SGD_multi_tensor", 250, 280)
    )  # fmt: skip
    found = yardstick_parts.compare(with_copies, UNDISTURBED)
    assert found["averaging_s"] == pytest.approx(170e-6)
    assert found["exposed_s"] == pytest.approx(40e-6)
    assert found["n_not_compared"] == 0


def test_a_kernel_that_runs_in_other_pieces_is_not_compared():
    in_turn = kernels(
        ("product", 0, 100),
        ("product", 100, 200),
        ("norm", 200, 210),
        *[("SGD_multi_tensor", t, t + 10) for t in (210, 230)],
    )
    found = yardstick_parts.compare(in_turn, UNDISTURBED)
    assert (found["n_not_compared"], found["apart"]["n"]) == (pytest.approx(2), pytest.approx(3))


def test_kinds_of_kernels():
    names = {"nvjet_tst": 100, "gelu_kernel": 50, "fast_dq_kernel": 10, "ncclDevKernel_AllReduce": 7, "triton_red": 5}
    found = yardstick_parts.by_kind(kernels(*[(name, 0, end) for name, end in names.items()]))
    times = {kind: round(1e6 * of["s"]) for kind, of in found.items() if round(of["n"]) == 1}
    assert times == {
        "attention": 10, "products with a GELU": 50, "other products": 100, "waiting for the slowest GPU": 7,
        yardstick_parts.OTHERS: 5,
    }  # fmt: skip


class Driver:
    """The two functions of CUDA's driver that a meeting calls, on memory of the host:
    who would make a stream wait waits itself.
    """

    def __init__(self, error=0):
        self.error = error

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        assert flags.value == 1, "wait until equal, not until at least"
        deadline = time.monotonic() + 10
        while not self.error and ctypes.c_uint32.from_address(address.value).value != value.value:
            assert time.monotonic() < deadline, "nobody sends the signal"
            time.sleep(0)
        return self.error

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        ctypes.c_uint32.from_address(address.value).value = value.value
        return self.error


def meetings_on_a_host(monkeypatch, n_ranks, error=0):
    """For each rank a pair of meetings whose signals lie in the host's memory; and those signals."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(error))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    signals = torch.zeros(2, n_ranks, n_ranks, dtype=torch.int32)
    return [[yardstick_parts.meeting(list(pad), rank) for pad in signals] for rank in range(n_ranks)], signals


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_nobody_leaves_a_meeting_before_all_have_come(monkeypatch, n_ranks):
    meetings, signals = meetings_on_a_host(monkeypatch, n_ranks)
    come = [0] * n_ranks

    def run(rank):
        for n in range(1, 41):
            if n % n_ranks == rank:
                time.sleep(0.001)  # someone else is late each time
            come[rank] = n
            meetings[rank][n % 2]()
            assert min(come) >= n, f"rank {rank} left meeting {n} when the ranks had come to {come}"

    with ThreadPoolExecutor(n_ranks) as threads:
        list(threads.map(run, range(n_ranks)))
    assert not signals.any(), "every signal is cleared"


def test_an_error_of_the_driver_is_not_lost(monkeypatch):
    with pytest.raises(RuntimeError, match=r"waiting for rank 0: the CUDA driver returned the errors \[801, 801\]"):
        meetings_on_a_host(monkeypatch, 2, error=801)


@pytest.mark.gpu
@pytest.mark.time_limit(90)
def test_streams_that_meet_wait_for_each_other_in_every_replay():
    spawn(yardstick_programs.meet_on_streams, "nccl", 1, limit_s=60)
