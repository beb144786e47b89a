"""What a run may not do to another one or to its machine: two in one folder, and more memory than there is."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lib.runs import corpus, lock, memory, serve, train_gpt2, train_llama, train_vit
from lib.runs.engine.arguments import make_parser
from lib.runs.engine.places import lock_places
from lib.runs.engine.request import parse
from lib.runs.flags import UsageError
from lib.runs.lock import NAME, FolderLock, closing_lock, refuse_if_held
from lib.runs.serving.engine import build

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
SHORT = ["--quiet", "--device", "cpu", "--steps", "1", "--batch", "2", "--data", "synthetic", "--items", "4"]
PROGRAMS = {"gpt2": train_gpt2.main, "llama": train_llama.main, "vit": train_vit.main}
HOLD = "import sys; from pathlib import Path; from lib.runs.lock import FolderLock\n" \
       "FolderLock(Path(sys.argv[1]), 'x'); print('held', flush=True); sys.stdin.read()"  # fmt: skip
needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the folder ``ck``."""
    (tmp_path / "ck").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "ck")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@needs_locks
def test_a_second_run_is_refused_by_name_and_goes_on_when_the_first_was_killed(holder, tmp_path, capfd):
    folder = tmp_path / "ck"
    before = files_in(tmp_path)
    argv = [
        *SHORT,
        "--checkpoint",
        str(folder),
        "--export",
        str(tmp_path / "model"),
        "--log-file",
        str(tmp_path / "l/x"),
    ]
    assert train_llama.main([arg.replace("model", "out") for arg in argv]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.search(
        rf"--checkpoint {re.escape(str(folder))} is in use by process {holder.pid} on host "
        rf"{re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d",
        said,
    )
    assert files_in(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert train_llama.main(argv) == 0
    assert capfd.readouterr().err == ""
    assert NAME not in files_in(folder)
    assert NAME not in files_in(tmp_path / "model")


@needs_locks
def test_a_corpus_and_an_export_have_locks_too(holder, tmp_path, capfd):
    before = files_in(tmp_path)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert corpus.main([str(tmp_path / "ck"), "--dataset", str(tmp_path / "a.txt")]) == 2
    assert f"in use by process {holder.pid}" in capfd.readouterr().err
    assert train_llama.main([*SHORT, "--export", str(tmp_path / "ck")]) == 2
    assert f"--export {tmp_path / 'ck'} is in use by process {holder.pid}" in capfd.readouterr().err
    assert files_in(tmp_path / "ck") == before


@needs_locks
def test_a_quicker_run_is_told_to_all_ranks(tmp_path):
    parsed = parse(make_parser("x", ["tiny"], "items", ""), ["--checkpoint", str(tmp_path)])
    with ExitStack() as first, ExitStack() as second:
        lock_places(parsed, 0, first)
        with pytest.raises(UsageError, match=f"is in use by process {os.getpid()} on host"):
            lock_places(parsed, 0, second)
        lock_places(parsed, 1, second)  # another rank leaves the lock to rank 0
    with closing_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@needs_locks
def test_checkpoint_and_export_in_one_folder_are_one_lock(tmp_path):
    argv = ["--checkpoint", str(tmp_path), "--export", f"{tmp_path}/."]
    with ExitStack() as held:
        lock_places(parse(make_parser("x", ["tiny"], "items", ""), argv), 0, held)


@needs_locks
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_drive_without_locks_is_a_warning(code, tmp_path, monkeypatch, capfd):
    def refuses(file, kind):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.fcntl, "flock", refuses)
    (tmp_path / NAME).touch()
    refuse_if_held(tmp_path, "--checkpoint ck")
    FolderLock(tmp_path, "--checkpoint ck").release()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("warning: --checkpoint ck: no file lock can be set there")
    assert os.strerror(code) in said


@needs_locks
def test_a_holder_on_another_host_that_left_no_lock_is_a_warning(tmp_path, capfd):
    (tmp_path / NAME).write_text(json.dumps({"host": "elsewhere", "pid": 12, "since": "2026-11-27 10:00:00"}))
    FolderLock(tmp_path, "--checkpoint ck").release()
    assert "process 12 on host elsewhere, since 2026-11-27 10:00:00, has not released it" in capfd.readouterr().err
    (tmp_path / NAME).write_text(json.dumps({"host": socket.gethostname(), "pid": 12, "since": "2026"}))
    FolderLock(tmp_path, "--checkpoint ck").release()
    (tmp_path / NAME).write_text("[half")
    FolderLock(tmp_path, "--checkpoint ck").release()
    assert capfd.readouterr().err == ""


def test_no_module_of_locks_is_a_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lock, "fcntl", None)
    FolderLock(tmp_path, "--checkpoint ck").release()
    assert "this system has no file locks" in capfd.readouterr().err


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "argv", "expected"),
    [
        ("gpt2", "--dim 1000000", r"--dim 1000000 has 24,000,\S+ weights.*384.0 TB.* are free on cpu.*a smaller --dim"),
        ("gpt2", "--n-layers 100000000", r"--n-layers 100000000 has .* weights.*a smaller --n-layers"),
        ("gpt2", "--length 2147483647", r"--length 2147483647 has .* weights.*a smaller --length"),
        ("gpt2", "--n-experts 2000000000", r"--n-experts 2000000000 has .* weights.*a smaller --n-experts"),
        ("gpt2", "--items 2147483647", r"--items 2147483647 synthetic sequences.*549.8 GB.*a smaller --items"),
        ("gpt2", "--items 2000000000 --batch 2000000000", r"--batch 2000000000 in micro-batches.*more --accumulate"),
        ("llama", "--model 70B", r"--model 70B has 68,975,329,280 weights.*1.1 TB.*a smaller --model or more --shard"),
        ("vit", "--image-size 1000000", r"--batch 2 in micro-batches of 2 images.*a smaller --image-size"),
        ("vit", "--dim 64000000", r"--dim 64000000 has .* weights"),
        ("vit", "--items 2147483647", r"--items 2147483647 synthetic images"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_one_line_and_writes_nothing(program, argv, expected, tmp_path, capfd):
    assert PROGRAMS[program]([*SHORT, *argv.split(), "--checkpoint", str(tmp_path / "ck")]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert re.search(expected, said)
    assert not list(tmp_path.iterdir())


ERRORS = {
    "cpu": (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                         "you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate memory)"),
            "40.0 TB more"),
    "overflow": (RuntimeError("Storage size calculation overflowed with sizes=[100000000000, 100]"), "40.0 TB more"),
    "gpu": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of 79 GiB"),
            "21.5 GB more"),
    "numpy": (MemoryError("Unable to allocate 728. TiB for an array with shape (1,)"), "800.4 TB more"),
    "host": (MemoryError(), "more was asked for"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_that_runs_out_in_a_step_is_one_line(program, kind, monkeypatch, capfd):
    error, asked = ERRORS[kind]

    def fails(*_):
        raise error

    monkeypatch.setattr("lib.runs.engine.loop.Run.plain_step", fails)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    assert PROGRAMS[program](SHORT) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert asked in said
    assert "1.0 TB are free" in said
    assert "a smaller --batch, more --accumulate, a smaller --" in said
    assert ("--dim" in said) == (program != "llama")


def test_another_error_keeps_its_traceback(monkeypatch):
    def fails(*_):
        raise RuntimeError("the shapes differ")

    monkeypatch.setattr("lib.runs.engine.loop.Run.plain_step", fails)
    with pytest.raises(RuntimeError, match="the shapes differ"):
        train_llama.main(SHORT)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process is Linux's")
def test_the_limit_of_a_process_counts_as_what_there_is():
    code = (
        "import resource, torch; from lib.runs.memory import free_bytes\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "assert 2**26 < free_bytes(torch.device('cpu')) <= 2**28\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_container_s_limit_counts_too(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "Path", lambda root, name: tmp_path / name)
    assert memory.free_bytes(CPU) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) > 10**6


@pytest.mark.parametrize("argv", ["--blocks 2147483647", "--block-size 2147483647"])
def test_a_cache_that_cannot_fit_is_one_line(argv, capfd):
    assert serve.main(["--model", "tiny", "--device", "cpu", "--port", "0", *argv.split()]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert re.search(
        r"blocks of \d+ positions: at least .* are needed, and .* are free on cpu; expected a smaller --blocks", said
    )


def test_weights_that_cannot_fit_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    with pytest.raises(UsageError) as caught:
        build(serve.make_parser().parse_args(["--model", str(tmp_path), "--device", "cpu"]), Counter())
    said = str(caught.value)
    assert "\n" not in said, said
    assert "weights: at least 1,000 bytes of memory are needed, and 10 bytes are free on cpu" in said


def test_a_corpus_for_which_memory_runs_out_is_one_line(tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(corpus, "write", fails)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert corpus.main([str(tmp_path / "c"), "--dataset", str(tmp_path / "a.txt")]) == 2
    assert "out of memory: more was asked for" in (said := capfd.readouterr().err)
    assert "--longest" in said
