"""The programs for real runs: every strategy is one process's training, a killed run goes on,
and each wrong request is one line.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lib.bench.ladder import PEAK_FLOPS
from lib.given.models.gpus import SHEETS
from lib.given.models.scaling import CARDS
from lib.ranks import pool
from lib.ranks.mpi_launch import mpi_environment, mpiexec
from lib.runs.engine import signals, state
from lib.runs.engine.arguments import make_parser
from lib.runs.engine.log import Moment, as_json, peak_flops, read_log, send
from lib.runs.engine.request import parse
from lib.runs.engine.start import set_up
from lib.runs.engine.strategies import clip_in_update, divides_gradients, make_optimizer
from lib.runs.engine.tasks import GPT2Task
from lib.runs.engine.world import World, _first_host, _slurm_port, choose_device, find_world, share_no_gpu
from lib.runs.flags import UsageError
from solutions import training
from tests.house.runs import runs_programs as programs

if sys.platform != "win32":
    import resource

ROOT = Path(__file__).resolve().parents[3]
VIT = "vit --batch 12 --steps 4 --data synthetic --items 40 --warmup 1"
GPT2 = "gpt2 --batch 4 --steps 4 --data synthetic --items 20 --length 16 --warmup 1"
MODELS = {"vit": VIT, "gpt2": GPT2}
WAYS = [
    f"--strategy {strategy} --engine {engine}" for strategy in ("ddp", "fsdp", "tp") for engine in ("ours", "torch")
]
CPU = torch.device("cpu")
LONG_S = 120.0  # of a launch on a machine that does other things too


def parse_flags(flags: list[str]):
    return parse(make_parser("lib.runs.train_x", ["tiny"], "items", ""), flags)


def train(*commands: str) -> None:
    """In this process."""
    for result in programs.run_all(0, 1, list(commands)):
        assert result == (0, "")


def on_ranks(function, *args, n_ranks: int = 2) -> None:
    """On gloo ranks; every program succeeds on each."""
    values = pool("gloo").run(function, *args, n_ranks=n_ranks, time_limit_s=LONG_S).values
    assert all(result == (0, "") for results in values for result in results), values


def curve(log: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step; a step that stands twice is an error."""
    lines = read_log(log)
    found = {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}
    assert len(found) == len(lines), [line["step"] for line in lines]
    return found


def same(log: Path, expected: dict, rtol: float = 2e-4) -> None:
    found = curve(log)
    assert list(found) == list(expected), log
    for step, pair in found.items():
        assert pair == pytest.approx(expected[step], rel=rtol), (log.name, step)


@pytest.mark.time_limit(200)
def test_every_strategy_and_engine_trains_as_one_process_does(tmp_path):
    train(*(f"{command} --log {tmp_path / name}" for name, command in MODELS.items()))
    alone = {name: curve(tmp_path / name) for name in MODELS}
    commands, tolerance = [], {}
    for i, way in enumerate(WAYS):
        for name, command in MODELS.items():
            log = f"{name}{i}"
            commands.append(f"{command} {way} --log {tmp_path / log}")
            tolerance[log] = 2e-4
            # fsdp sums its gradients in the dtype that it computes in: float16 overflows at first, and skips steps
            low, more = ("float16", "--accumulate 2") if i in (0, 4) else ("bf16", "")
            if (name == "vit") == (i < 4):
                commands.append(f"{command} {way} --precision {low} {more} --log {tmp_path / log}.low")
                tolerance[f"{log}.low"] = 0.1
        commands.append(f"{VIT} {way} --accumulate 2 --path plain --log {tmp_path}/vit{i}.plain")
        tolerance[f"vit{i}.plain"] = 2e-4
    on_ranks(programs.run_all, commands)
    for log, rtol in tolerance.items():
        same(tmp_path / log, alone[log.partition(".")[0][:-1]], rtol)


@pytest.mark.time_limit(60)
def test_one_process_accumulates_and_takes_the_plain_path_and_low_precision(tmp_path):
    variants = ["", "--engine torch", "--accumulate 3", "--path plain", "--path plain --engine torch --accumulate 2"]
    low = [
        f"--precision {p} {path}"
        for p in ("bf16", "float16")
        for path in ("", "--path plain", "--path plain --engine torch")
    ]
    train(*(f"{VIT} {variant} --log {tmp_path / str(i)}" for i, variant in enumerate([*variants, *low])))
    for i in range(1, len(variants) + len(low)):
        same(tmp_path / str(i), curve(tmp_path / "0"), 2e-4 if i < len(variants) else 0.1)


@pytest.mark.time_limit(100)
def test_flat_shards_decay_where_a_whole_model_does_and_keep_nothing_for_it(tmp_path):
    commands = {name: f"{VIT} --lr 0.05 --weight-decay 2 --optimizer {name}" for name in ("sgd", "adamw")}
    for name, command in commands.items():
        train(f"{command} --log {tmp_path / name}", f"{command} --weight-decay 0 --log {tmp_path / 'without'}")
        assert curve(tmp_path / name)[3][0] != pytest.approx(curve(tmp_path / "without")[3][0], rel=1e-3)
    sharded = [f"{command} --strategy fsdp --log {tmp_path / name}.fsdp" for name, command in commands.items()]
    on_ranks(programs.run_fsdp, sharded)
    for name in commands:
        same(tmp_path / f"{name}.fsdp", curve(tmp_path / name))


def run_both_ways(commands, by_collectives, tmp_path):
    """Run commands on ranks by collectives and by copies, with WAY and CK in them replaced by names for each way."""
    for way, program, *more in (
        ("collectives", by_collectives),
        ("copies", programs.run_by_copies, f"{tmp_path}/memory"),
    ):
        named = [f"{c} --averaging {way}".replace("WAY", way).replace("CK", f"ck_{way}") for c in commands]
        on_ranks(program, named, *more)


@pytest.mark.time_limit(100)
def test_copies_average_gradients_as_collectives_do(tmp_path):
    """Bit by bit, because two numbers have one sum, and the norm that clips is computed in the same way."""
    begun = f"{VIT} --strategy ddp --bucket-mb 0.02"
    ways = [f"{begun} --accumulate 2 --clip 0.1", f"{GPT2} --strategy ddp --optimizer muon --bucket-mb 0.01"]
    halves = [f"{begun} --steps 2 --checkpoint {tmp_path}/CK", f"{begun} --checkpoint {tmp_path}/CK"]
    commands = [f"{command} --log {tmp_path}/WAY{i}" for i, command in enumerate([*ways, *halves])]
    run_both_ways(commands, programs.run_all, tmp_path)
    for i in (0, 1, 3):
        assert curve(tmp_path / f"copies{i}") == curve(tmp_path / f"collectives{i}"), commands[i]
    assert list(curve(tmp_path / "copies3")) == [2, 3]


@pytest.mark.time_limit(100)
def test_shards_travel_by_copies_as_by_collectives(tmp_path):
    """In float32 bit by bit: each number is one of two halves' sum. In bf16 copies do not round the mean."""
    begun = f"{VIT} --strategy fsdp --eval-every 2 --held-out 0.2"
    ways = [
        f"{begun} --accumulate 2 --clip 0.1 --weight-decay 0.2 --optimizer adamw",
        f"{GPT2} --strategy fsdp --optimizer muon",
        f"{VIT} --strategy fsdp --precision bf16",
    ]
    halves = [f"{begun} --steps 2 --checkpoint {tmp_path}/CK", f"{begun} --checkpoint {tmp_path}/CK"]
    commands = [f"{command} --log {tmp_path}/WAY{i}" for i, command in enumerate([*ways, *halves])]
    run_both_ways(commands, programs.run_all_fused, tmp_path)
    for i in (0, 1, 4):
        assert curve(tmp_path / f"copies{i}") == curve(tmp_path / f"collectives{i}"), commands[i]
    same(tmp_path / "copies2", curve(tmp_path / "collectives2"), 1e-2)
    assert list(curve(tmp_path / "copies4")) == [2, 3]


@pytest.mark.time_limit(100)
def test_parameters_are_updated_as_their_means_arrive(tmp_path):
    """The norm that clips them is known before: each rank has summed the squares of its part. Added up in this order,
    it has other last bits; without clipping everything has the same.
    """
    kinds = ((VIT, 0.02, 0.1), (GPT2, 100, 0.1), (GPT2, 0.01, 0))
    ways = [f"{p} --strategy ddp --optimizer adamw --bucket-mb {size} --clip {clip}" for p, size, clip in kinds]
    for kind in (programs.run_all_fused, programs.run_by_copies):
        folder = tmp_path / kind.__name__
        logs = [f"{way} --log {folder}/{i}" for i, way in enumerate(ways)]
        on_ranks(kind, logs, *([f"{folder}/memory"] if kind is programs.run_by_copies else []))
    for i, (_, _, clip) in enumerate(kinds):
        collectives = curve(tmp_path / "run_all_fused" / str(i))
        if clip:
            same(tmp_path / "run_by_copies" / str(i), collectives, 1e-5)
        else:
            assert curve(tmp_path / "run_by_copies" / str(i)) == collectives


@pytest.mark.time_limit(100)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_a_compiled_block_is_not_cut_where_ddp_has_a_full_bucket(tmp_path):
    command = f"{VIT} --strategy ddp --engine torch --bucket-mb 0.05"
    assert programs.run_compiled(0, 1, f"{command} --compile --log {tmp_path / 'blocks'}") == [(0, "")]
    train(f"{command} --log {tmp_path / 'plain'}")
    same(tmp_path / "blocks", curve(tmp_path / "plain"))


@pytest.mark.time_limit(200)
def test_a_killed_run_goes_on_bit_for_bit_and_on_another_number_of_ranks(tmp_path):
    ways = [(name, way) for name, way in zip(["vit", "gpt2"] * 3, WAYS, strict=True)]
    ways += [("vit", "--strategy ddp --precision float16"), ("gpt2", "--strategy fsdp --precision float16")]
    begun = {i: f"{MODELS[name]} --steps 4 --save-every 2 {way}" for i, (name, way) in enumerate(ways)}
    whole = [f"{command} --log {tmp_path}/whole{i}" for i, command in begun.items()]
    here = [f"{command} --log {tmp_path}/here{i} --checkpoint {tmp_path}/ck{i}" for i, command in begun.items()]
    # float16 overflows at other steps when other ranks share the batch; the little GPT-2 has two heads;
    # DDP's checkpoint is one process's, which test_mesh.py moves
    there_too = [("fsdp", "vit"), ("fsdp", "gpt2"), ("tp", "vit")]
    wider = [i for i, (name, way) in enumerate(ways) if "float16" not in way and (way.split()[1], name) in there_too]
    there = [f"{begun[i]} --log {tmp_path}/there{i} --checkpoint {tmp_path}/ck_there{i}" for i in wider]
    on_ranks(programs.whole_and_killed, whole, here, there, 3)
    on_ranks(programs.run_all, there, n_ranks=4)
    for i in begun:
        assert curve(tmp_path / f"here{i}") == curve(tmp_path / f"whole{i}"), begun[i]
        assert list(curve(tmp_path / f"here{i}")) == list(range(4))
    for i in wider:
        same(tmp_path / f"there{i}", curve(tmp_path / f"whole{i}"))


@pytest.mark.time_limit(200)
def test_one_rank_that_is_asked_to_leave_takes_all_with_it_and_the_run_goes_on_bit_for_bit(tmp_path):
    ways = {"vit": "--strategy ddp", "gpt2": "--strategy fsdp --engine torch", "vit ": "--strategy tp"}
    commands = [f"{MODELS[name.strip()]} --steps 6 {way}" for name, way in ways.items()]
    commands.append(f"{VIT} --steps 6")
    whole = [f"{command} --log {tmp_path}/whole{i}" for i, command in enumerate(commands)]
    here = [f"{command} --log {tmp_path}/here{i} --checkpoint {tmp_path}/ck{i}" for i, command in enumerate(commands)]
    on_ranks(programs.asked_and_resumed, whole[:3], here[:3], 1, True)
    assert programs.asked_and_resumed(0, 1, whole[3:], here[3:], 1, False) == [(0, "")] * 2
    for i in range(4):
        assert curve(tmp_path / f"here{i}") == curve(tmp_path / f"whole{i}"), commands[i]
        assert list(curve(tmp_path / f"here{i}")) == list(range(6))


def test_the_signals_are_heeded_inside_only(tmp_path):
    script = f"""
import os, runpy, signal
Signals = runpy.run_path({signals.__file__!r})["Signals"]
def heeded(name):
    with Signals() as signals:
        os.kill(os.getpid(), getattr(signal, name))
        return signals.asked
assert heeded("SIGTERM")
os.environ["SLURM_JOB_ID"] = "7"
assert heeded("SIGTERM") and heeded("SIGUSR1")
del os.environ["SLURM_JOB_ID"]
os.kill(os.getpid(), signal.SIGTERM)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_an_epoch_is_every_item_once_whatever_the_number_of_ranks():
    from lib.training import TokenBatches

    orders = {}
    for n_ranks in (1, 2, 4):
        parts = [TokenBatches(range(25), 8 // n_ranks, 1, rank, n_ranks, seed=3) for rank in range(n_ranks)]
        orders[n_ranks] = [n for _ in range(3) for part in parts for n in next(part)[0][:, 0].tolist()]
    assert orders[1] == orders[2] == orders[4]
    assert sorted(orders[1]) == list(range(24))


# ---- started by torchrun and by mpiexec ----


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WORKBOOK_", "PYTEST_", "RANK", "MASTER_"))}
    return {**mpi_environment(), **env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def signal_rank(process: subprocess.Popen, rank: int, number: int) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that was there for a moment only
            if child.environ().get("RANK") == str(rank):
                os.kill(child.pid, number)
                return
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_nothing_is_trained_twice(tmp_path):
    command = f"{VIT} --steps 60 --save-every 10 --strategy ddp"
    log = tmp_path / "log"
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "lib.runs.train_vit"]
    arguments = [
        *command.split()[1:],
        "--quiet",
        "--device",
        "cpu",
        "--log-file",
        str(log),
        "--checkpoint",
        str(tmp_path / "ck"),
    ]
    with subprocess.Popen(
        [*program, *arguments], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while process.poll() is None and len(read_log(log)) < 13:
                time.sleep(0.02)
            assert process.returncode is None, process.stdout.read()
            signal_rank(process, 1, signal.SIGKILL)
            said = process.communicate(timeout=150)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    on_ranks(programs.run_all, [f"{command} --log {tmp_path / 'whole'}"])
    assert curve(log) == curve(tmp_path / "whole")
    assert list(curve(log)) == list(range(60))
    assert "exitcode: -9" in said or "Signal 9" in said, said


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_ranks_end_when_torchrun_is_killed(tmp_path):
    log = tmp_path / "log"
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    program += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "lib.runs.train_vit", "--device", "cpu", "--quiet"]
    command = [*program, *VIT.split()[1:], "--steps", "100000", "--strategy", "ddp", "--log-file", str(log)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(read_log(log)) < 3:
            time.sleep(0.02)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(ranks, timeout=60)
    assert not [rank.pid for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_torchrun_that_is_asked_to_leave_lets_its_ranks_save_first(tmp_path):
    command = f"{VIT} --steps 80 --strategy ddp --save-every 1000"
    log, checkpoint = tmp_path / "log", tmp_path / "ck" / "checkpoint.pt"
    here = [*command.split()[1:], "--log-file", str(log), "--checkpoint", str(checkpoint.parent)]
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    program += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "-m",
        "lib.runs.train_vit",
        "--device",
        "cpu",
    ]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*program, "--quiet", *here], cwd=ROOT, env=environment(), **out) as process:
        try:
            while process.poll() is None and len(read_log(log)) < 10:
                time.sleep(0.02)
            assert process.returncode is None, process.stdout.read()
            process.terminate()
            said = process.communicate(timeout=150)[0]
        finally:
            process.kill()
    n_done = len(read_log(log))
    assert process.returncode not in (0, 2), said
    assert f"asked to leave after step {n_done} of 80" in said, said
    assert torch.load(checkpoint, weights_only=True)["state"]["step"] == n_done
    on_ranks(programs.run_all, [f"vit {' '.join(here)}", f"{command} --log {tmp_path / 'whole'}"])
    assert curve(log) == curve(tmp_path / "whole")
    assert list(curve(log)) == list(range(80))


@pytest.mark.slow
@pytest.mark.time_limit(100)
@pytest.mark.skipif(sys.platform == "win32", reason="no MPI wheel for Windows: use WSL")
def test_mpiexec_starts_the_ranks_and_each_says_what_is_wrong(tmp_path):
    program = [mpiexec(), "-n", "2", sys.executable, "-m", "lib.runs.train_vit", "--quiet", "--device", "cpu"]
    run: dict[str, Any] = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 90}
    done = subprocess.run([*program, *VIT.split()[1:], "--strategy", "ddp", "--log", str(tmp_path / "mpi")], **run)
    assert done.returncode == 0, done.stderr
    train(f"{VIT} --log {tmp_path / 'alone'}")
    same(tmp_path / "mpi", curve(tmp_path / "alone"))
    done = subprocess.run([*program, "--batch", "7", "--strategy", "ddp"], **run)
    assert done.returncode == 2
    assert done.stderr.count("--batch 7 does not divide into 2 ranks x 1 micro-batches: 7 = 3 x 2 + 1") == 2
    assert "Traceback" not in done.stderr


# ---- what is wrong is one line ----


def refused(capsys, command: str, *words: str) -> None:
    """Status 2, and one line with all these words."""
    program, *argv = command.split()
    assert programs.PROGRAMS[program](argv) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    for word in (f"lib.runs.train_{program}", *words):
        assert word in said[0], (word, said[0])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vit --model L/17", ("'L/17'", "L/16")),
        ("vit --batsch 3", ("--batsch", "--help")),
        ("vit --batch 0", ("--batch", "'0'", "at least 1")),
        ("vit --lr fast", ("--lr", "'fast'")),
        ("vit --lr 1e-4 --min-lr 1e-3", ("0.001", "0.0001")),
        ("vit --batch 9 --accumulate 2", ("--batch 9", "1 ranks x 2 micro-batches", "9 = 4 x 2 + 1")),
        ("vit --batch 2000", ("2000", "1437 images")),
        ("vit --warmup 200 --steps 100", ("--warmup 200", "--steps 100")),
        ("vit --strategy tp --path fast", ("--path fast", "--path plain")),
        ("vit --strategy fsdp --compile whole", ("--compile whole", "blocks")),
        ("vit --strategy ddp --engine torch --compile whole --bucket-mb 0.5", ("--bucket-mb 0.5", "blocks")),
        ("vit --graph --device cpu", ("--graph", "CUDA")),
        ("vit --graph --strategy tp", ("--graph", "tp", "ddp or fsdp")),
        ("vit --averaging copies --strategy tp", ("--averaging copies with --strategy tp", "expected ddp or fsdp")),
        ("vit --averaging copies --strategy fsdp --engine torch", ("fsdp --engine torch", "with --engine ours")),
        ("vit --averaging copies --replicate 2 --shard 2", ("--replicate 2 --shard 2", "expected ddp or fsdp")),
        ("vit --graph --precision float16", ("--graph", "float16", "bf16")),
        ("vit --graph --optimizer ours", ("--graph", "--optimizer ours", "adamw")),
        ("vit --attention flash", ("--attention flash", "float32", "bf16")),
        ("vit --attention cudnn --precision bf16 --path plain", ("--attention cudnn", "--path plain")),
        ("vit --data no/such/folder", ("no/such/folder",)),
        ("vit --image-size 9", ("image_size = 9", "patch_size = 2")),
        ("vit --classes 4", ("--classes 4", "10 classes")),
        ("gpt2 --model huge", ("'huge'", "xl")),
        ("gpt2 --tokenizer gpt2", ("--tokenizer gpt2", "50257", "512")),
        ("gpt2 --data nothing.txt", ("nothing.txt",)),
        ("gpt2 --context 0", ("--context", "'0'")),
        ("gpt2 --strategy tp --engine torch --precision float16", ("float16", "bf16")),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(capsys, command, words):
    refused(capsys, command, *words)


def test_a_place_that_cannot_be_written_to_is_refused_before_the_first_step(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    refused(capsys, f"vit --checkpoint {file}", f"--checkpoint {file}", "cannot create")
    refused(capsys, f"vit --checkpoint {file}/a", f"--checkpoint {file}/a", "cannot create")
    refused(capsys, f"vit --log-file {file}/log", f"--log-file {file}/log", "cannot create")
    refused(capsys, f"vit --log-file {tmp_path}", f"--log-file {tmp_path} is a folder", "log.jsonl")


def test_what_does_not_fit_the_ranks_is_refused_on_each_before_they_meet(capsys, monkeypatch):
    for rank in ("0", "2"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
        refused(capsys, "vit --batch 32 --strategy ddp", "--batch 32", "3 ranks", "32 = 10 x 3 + 2")
        refused(capsys, "vit --batch 30", "--strategy single", "3 were started")
        refused(capsys, "vit --strategy tp", "n_heads = 4", "3 ranks", "4 = 1 x 3 + 1")
        refused(capsys, "gpt2 --model xl --strategy tp --engine torch", "n_heads = 25", "25 = 8 x 3 + 1")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        refused(capsys, "vit --batch 30 --strategy ddp", "3 ranks on this host share 2 GPUs", "at most 2")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        refused(capsys, "vit --batch 30 --strategy ddp --device cuda", "no GPU", "--device cpu")
    monkeypatch.setenv("RANK", "3")
    refused(capsys, "vit", "RANK=3", "from 0 to 2")
    monkeypatch.setenv("RANK", "x")
    refused(capsys, "vit", "RANK='x'", "whole number")


def test_a_checkpoint_of_another_run_is_refused(capsys, tmp_path):
    train(f"{VIT} --steps 2 --checkpoint {tmp_path}")
    with_it = f"--checkpoint {tmp_path} --quiet"
    refused(capsys, f"{VIT} --image-size 12 {with_it}", "image_size = 8", "12")
    refused(capsys, f"{VIT} --batch 8 {with_it}", "batch = 12", "8")
    refused(capsys, f"{VIT} --seed 5 {with_it}", "seed = 0", "5")
    refused(capsys, f"{VIT} --steps 1 --warmup 0 {with_it}", "at step 2", "--steps 1")
    refused(capsys, f"{GPT2} {with_it}", "task = 'ViTTask'", "'GPT2Task'")
    (tmp_path / "checkpoint.pt").write_bytes(b"PK no checkpoint")
    refused(capsys, f"{VIT} {with_it}", "cannot be read", "checkpoint.pt")


def flip(path: Path, place: float) -> None:
    """One bit of a file, at this part of its length."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x40
    path.write_bytes(data)


def test_a_flipped_bit_in_a_checkpoint_is_refused(capsys, tmp_path):
    train(
        f"{VIT} --steps 2 --checkpoint {tmp_path}/whole",
        f"{VIT} --steps 2 --strategy fsdp --checkpoint {tmp_path}/parts",
    )
    part = max((tmp_path / "parts/step_00000002").iterdir(), key=lambda path: path.stat().st_size)
    flip(tmp_path / "whole/checkpoint.pt", 0.5)
    flip(part, 0.5)
    refused(capsys, f"{VIT} --checkpoint {tmp_path}/whole --quiet", "checkpoint.pt is damaged: archive/data/")
    refused(
        capsys,
        f"{VIT} --strategy fsdp --checkpoint {tmp_path}/parts --quiet",
        f"is damaged: {part.name} is not what was",
    )
    part.unlink()
    refused(capsys, f"{VIT} --strategy fsdp --checkpoint {tmp_path}/parts --quiet", "cannot be read", part.name)


def test_the_checksums_are_of_every_ranks_file(tmp_path):
    on_ranks(programs.run_all, [f"{VIT} --steps 2 --strategy fsdp --checkpoint {tmp_path}"])
    folder = tmp_path / "step_00000002"
    kept = json.loads((folder / state.STATE).read_text())[state.SUMS]
    assert kept == {path.name: state.checksum(path) for path in folder.glob("*.distcp")}
    assert len(kept) >= 2


def test_a_checkpoint_that_would_run_code_is_refused_without_pytorchs_advice(capsys, tmp_path):
    torch.save({"state": os.system}, tmp_path / "checkpoint.pt")
    refused(
        capsys, f"{VIT} --checkpoint {tmp_path} --quiet", "holds more than tensors and plain values", "posix.system"
    )
    with pytest.raises(pickle.UnpicklingError, match="nothing in it was run") as refusal:
        training.load_checkpoint(tmp_path / "checkpoint.pt", torch.nn.Linear(1, 1), None)
    assert "weights_only" not in str(refusal.value)


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of a file")
@pytest.mark.parametrize("way", ["single", "fsdp", "fsdp --engine torch"])
def test_a_full_disk_names_the_place_and_leaves_the_old_checkpoint_whole(tmp_path, way):
    command = f"{VIT} --strategy {way} --checkpoint {tmp_path}"
    train(f"{command} --steps 2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(state.NotSaved) as refusal:
            programs.run_all(0, 1, [command])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if dist.is_initialized():
            dist.destroy_process_group()
    said = str(refusal.value)
    assert re.match(
        rf"the checkpoint of step 4 could not be written to {tmp_path}: .+\. It needs about [\d.]+ MB, and ", said
    )
    assert f"the previous one, {state.newest(tmp_path)}, is complete" in said
    assert {path: path.read_bytes() for path in before} == before
    train(f"{command} --steps 2")  # it is read, and nothing is left to do


def test_tensorboard_that_is_not_there_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("lib.runs.engine.request.importlib.util.find_spec", lambda name: None)
    refused(capsys, f"vit --tensorboard {tmp_path}", "--tensorboard", "pip install tensorboard")


# ---- the log, the data, the place ----


def test_a_line_of_the_log_says_all(tmp_path):
    (tmp_path / "log").write_text(
        '{"step": 0, "loss": 9}\n{"step": 7, "loss": 9}\n{"step": 1, "lo'
    )  # another run's, cut off
    train(f"{VIT} --peak-tflops 0.001 --log {tmp_path / 'log'}", f"{GPT2} --clip 0 --log {tmp_path / 'text'}")
    assert len((tmp_path / "log.old").read_text().splitlines()) == 3
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    wanted = ["step", "loss", "lr", "grad_norm", "images_per_s", "mfu", "memory_peak_bytes", "memory_told_bytes",
              "ranks", "seconds"]  # fmt: skip
    assert list(lines[0]) == wanted
    assert lines[0]["lr"] == 0.0 < lines[2]["lr"] < lines[1]["lr"] == 1e-3
    assert lines[1]["mfu"] > 0
    assert lines[1]["memory_peak_bytes"] > 2**20
    text = read_log(tmp_path / "text")[-1]
    assert text["grad_norm"] is None
    assert text["mfu"] is None
    assert text["tokens_per_s"] * text["seconds"] == pytest.approx(4 * 16)


def test_the_peak_of_a_card_stands_in_one_place(monkeypatch):
    card = torch.device("cuda", 0)
    for name, precision, wanted in (
        ("NVIDIA H200", "bf16", SHEETS["H200"].peak_flops),
        ("NVIDIA H100 80GB HBM3", "tf32", SHEETS["H100"].tf32_flops),
        ("NVIDIA A100-SXM4-40GB", "float32", SHEETS["A100-40GB"].float32_flops),
        ("NVIDIA H100 PCIe", "bf16", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(parse_flags(["--precision", precision]), card) == wanted
    assert (PEAK_FLOPS, CARDS[-2].peak_flops) == (SHEETS["H200"].peak_flops,) * 2
    number = re.compile(r"\b(989|494\.7|66\.9)")  # of H100 and H200, in any unit
    rooms = [
        path
        for room in ("given", "ranks", "fast", "demos", "runs", "bench")
        for path in (ROOT / "lib" / room).rglob("*.py")
    ]
    assert [path.name for path in rooms if number.search(path.read_text(encoding="utf-8"))] == ["gpus.py"]


def test_a_loss_that_is_not_finite_is_strict_json_and_the_run_goes_on(tmp_path):
    def strict(line: str) -> dict:
        return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON: {line}"))

    log = tmp_path / "log"
    command = f"{VIT} --lr 1e30 --optimizer sgd --warmup 0 --save-every 2 --log {log} --checkpoint {tmp_path / 'ck'}"
    train(f"{command} --steps 2", f"{command} --steps 3")
    lines = [strict(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "not_finite" not in lines[0]
    for line in lines[1:]:
        assert line["loss"] is None
        assert line["grad_norm"] is None
        assert set(line["not_finite"].values()) <= {"nan", "inf"}
        assert set(line["not_finite"]) == {"loss", "grad_norm"}
    log.write_text('{"step": 0, "loss": NaN}\n')  # as it was written once
    assert strict(as_json(read_log(log)[0])) == {"step": 0, "loss": None, "not_finite": {"loss": "nan"}}


def test_real_data_is_learned_and_files_are_read(tmp_path):
    train(f"vit --batch 64 --steps 40 --lr 3e-3 --log {tmp_path / 'digits'}")
    losses = [line["loss"] for line in read_log(tmp_path / "digits")]
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question\n" * 40)
    words = f"gpt2 --batch 4 --length 16 --data {tmp_path / 'words.txt'} --lr 3e-3"
    train(f"{words} --steps 20 --log {tmp_path / 'bytes'}", f"{words} --steps 2 --tokenizer bpe")
    assert curve(tmp_path / "bytes")[19][0] < 0.7 * curve(tmp_path / "bytes")[0][0]


def test_no_more_documents_are_asked_for_than_the_limit(monkeypatch, tmp_path):
    asked = []

    def stream(*_, **__):
        for number in range(100):
            asked.append(number)
            yield "to be or not to be"

    monkeypatch.setattr("lib.runs.engine.sources.stream_text", stream)
    train(f"gpt2 --batch 2 --length 16 --steps 1 --data somewhere --limit 3 --log {tmp_path / 'log'}")
    assert asked == [0, 1, 2]


def test_a_run_that_goes_on_does_what_its_command_says(tmp_path):
    now, was = (
        make_optimizer(
            parse_flags(flags), [{"params": [torch.ones(2, requires_grad=True)], "weight_decay": decay}], CPU
        )
        for flags, decay in ((["--engine", "torch", "--lr", "0.5"], 0.1), (["--engine", "torch", "--lr", "0.2"], 0.3))
    )
    for optimizer in (now, was):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    was.step()
    rate = now.param_groups[0]["lr"] = torch.tensor(0.5)  # as for a CUDA graph
    now.load_state_dict(was.state_dict())
    assert torch.is_tensor(now.param_groups[0]["lr"])
    assert (now.param_groups[0]["lr"], now.param_groups[0]["weight_decay"]) == (rate, 0.1)
    assert now.state_dict()["state"][0]["exp_avg"].equal(was.state_dict()["state"][0]["exp_avg"])
    begun = f"{VIT} --save-every 2 --checkpoint {tmp_path}"
    train(f"{begun} --steps 2", f"{begun} --steps 3 --precision float16", f"{begun} --steps 4 --precision float16")


def test_adamw_clips_the_gradients_that_it_reads():
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2,))]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    ours, plain = (torch.optim.AdamW(parameters, lr=0.1, fused=True) for parameters in (first, second))
    for scale in (1e-3, 1.0, 50.0):
        for a, b in zip(first[:2], second, strict=False):  # the third has no gradient
            a.grad = scale * torch.randn_like(a)
            b.grad = a.grad.clone()
        total = torch.nn.utils.get_total_norm([p.grad for p in first if p.grad is not None])
        norm, wanted = clip_in_update(ours, 1.0, total), torch.nn.utils.clip_grad_norm_(second, 1.0)
        ours.step()
        plain.step()
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(first, second)


def test_adamw_clips_where_the_norm_is_known_and_kernels_are_fused():
    fused, plain = (torch.optim.AdamW([torch.zeros(2)], fused=fused) for fused in (True, False))
    for given, optimizer, wanted in (
        ("", fused, True),
        ("", plain, False),
        ("--path plain", fused, False),
        ("--precision float16", fused, False),
        ("--strategy ddp", fused, True),
        ("--strategy fsdp", fused, True),
        ("--strategy fsdp --engine torch", fused, False),
        ("--strategy tp --path plain", fused, False),
    ):
        options = parse_flags(f"--data synthetic --path fast --precision bf16 {given}".split())
        assert divides_gradients(options, optimizer) == wanted


def test_the_loss_kernel_is_for_bf16_alone():
    for precision, wanted in (("float32", False), ("bf16", True), ("float16", False)):
        task = GPT2Task(parse_flags(["--data", "synthetic", "--precision", precision]))
        assert task.fast_path(torch.device("cuda")).loss_kernel == wanted
        assert not task.fast_path(CPU).loss_kernel


def test_the_kernels_of_a_block_are_for_16_bits_on_a_gpu_and_for_layers_that_are_whole():
    cuda = torch.device("cuda")
    for given, wanted in (("bf16", True), ("float16", True), ("tf32", False), ("bf16 --strategy tp", False)):
        task = GPT2Task(parse_flags(f"--data synthetic --precision {given}".split()))
        assert task.fast_path(cuda).kernels == wanted
        assert not task.fast_path(CPU).kernels


def test_a_recorded_step_takes_products_without_a_workspace(monkeypatch):
    for name in ("set_num_threads", "set_float32_matmul_precision", "use_deterministic_algorithms", "cuda.set_device"):
        monkeypatch.setattr(f"torch.{name}", lambda value: None)
    hopper, older, name, second = (9, 0), (8, 0), "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
    for flags, capability, before, wanted in (
        ("", hopper, None, None),
        ("--graph", hopper, None, ":0:0"),
        ("--graph", older, None, None),
        ("--graph", hopper, ":16:8", ":16:8"),
        ("--graph --deterministic", hopper, None, ":4096:8"),
        ("--graph --strategy ddp", hopper, None, ":0:0"),
    ):
        monkeypatch.setenv(name, before or "")
        monkeypatch.setenv(second, "")
        monkeypatch.delenv(second)
        if before is None:
            monkeypatch.delenv(name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        set_up(parse_flags(["--data", "synthetic", *flags.split()]), torch.device("cuda"))
        assert os.environ.get(name) == wanted, (flags, capability, before)
        assert os.environ.get(second) == ("0" if wanted == ":0:0" else None)


@pytest.mark.gpu
def test_reading_a_number_does_not_wait_for_what_was_started_after_it():
    read = send(torch.ones(1, device="cuda"))
    torch.cuda._sleep(2_000_000_000)
    later = torch.cuda.Event()
    later.record()
    assert read() == [1.0]
    assert not later.query()


def test_a_task_that_sees_one_gpu_takes_it_and_ranks_that_share_one_all_say_so(monkeypatch):
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    world = find_world({**srun, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"})
    assert (world.local_rank, world.local_size) == (1, 2)
    assert find_world({**srun, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}).local_size == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", world) == choose_device("cuda", world) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto", world) == torch.device("cuda", 1)

    def meet(*gpus: str) -> list[str]:
        store = dist.HashStore()

        def one(rank: int) -> str:
            try:
                share_no_gpu(store, World(rank=rank, size=len(gpus)), gpus[rank])
            except UsageError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(gpus)) as threads:
            return list(threads.map(one, range(len(gpus))))

    assert meet("a", "b", "c") == ["", "", ""]
    for said in meet("a", "b", "a"):
        assert "ranks 0, 2 share one GPU (UUID a)" in said


def test_the_place_is_found_from_whatever_started_the_process():
    assert find_world({}) == World()
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_world(torchrun) == World(rank=5, size=8, local_rank=1, local_size=4, launcher="torchrun")
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    assert find_world(slurm) == World(rank=3, size=4, local_rank=1, local_size=2, launcher="Slurm")
    assert find_world({**slurm, **torchrun}).launcher == "torchrun"  # srun started torchrun
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == World()  # a batch script, outside of srun
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert find_world(mpich) == World(rank=1, size=2, local_rank=0, local_size=1, launcher="MPICH")
    assert find_world({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).launcher == "Open MPI"
    assert find_world({**slurm, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "Slurm"  # srun --mpi=pmi2
    assert find_world({**slurm, **mpich}).launcher == "MPICH"  # mpiexec in a step
    hosts = (("n[03-05,9],m", "n03"), ("gpu-a7", "gpu-a7"), ("a,b[1-2]", "a"), ("r[1-2]-n[07-08]-ib,x", "r1-n07-ib"))
    for nodes, first in hosts:
        assert _first_host({"SLURM_STEP_NODELIST": nodes}) == first
    assert _slurm_port({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}) != _slurm_port({"SLURM_JOB_ID": "8"})


def test_a_step_takes_what_the_device_needed_and_not_what_the_host_waited(monkeypatch):
    moments = iter([0.0, 250.0, 375.0])  # ms, of a device that is done with each before the host asks

    class Event:
        def __init__(self, enable_timing):
            self.at = next(moments)

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    begun, first, second = (Moment(torch.device("cuda")) for _ in range(3))
    assert first.seconds_since(begun) == 0.25
    assert second.seconds_since(first) == 0.125
