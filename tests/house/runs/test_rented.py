"""The way to a rented machine, walked with programs that stand in for ssh, rsync, tmux, srun, scontrol and Modal."""

import contextlib
import importlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from lib.given.models.gpus import GPUS
from lib.runs.rent import modal_train, remote

SBATCH = Path(remote.__file__).with_name("slurm.sbatch")
TRAIN = ("lib.runs.train_vit", "--model", "L/16", "--log", "runs/a.jsonl", "--checkpoint", "runs/a.checkpoint")
ODD = ("--data", "it's a $HOME `id`; *", "--note", 'two\nlines "and" \\', "")


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def words(file: Path) -> list[str]:
    """What a stand-in was called with: it writes its arguments with a zero byte after each."""
    return file.read_text().split("\0")[:-1]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


# ---- Slurm


@pytest.fixture
def cluster(tmp_path, tools, monkeypatch):
    """Two hosts of four GPUs, and a job 4242 on them; ``srun`` says what it was called with and ends well."""
    program(
        tools, "scontrol", f'if [ "$1" = show ]; then echo node7; echo node9; else echo "$@" >>{tmp_path}/scontrol; fi'
    )
    program(tools, "srun", f"printf '%s\\0' \"$@\" >{tmp_path}/srun")
    settings = {"SLURM_JOB_ID": 4242, "SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_NUM_NODES": 2,
        "SLURM_GPUS_ON_NODE": 4,
                "SLURM_CPUS_PER_TASK": 32, "SLURM_SUBMIT_DIR": tmp_path, "PYTHON": sys.executable}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def submit(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", SBATCH, *arguments], capture_output=True, text=True, timeout=20)


def test_the_batch_file_is_bash():
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", SBATCH]).returncode == 0


def test_slurm_starts_one_torchrun_a_host(cluster):
    done = submit(*TRAIN, *ODD)
    assert done.returncode == 0, done.stderr
    assert "2 hosts of 4 processes" in done.stdout
    srun, python, *rest = words(cluster / "srun")
    assert (srun, python, rest[:2]) == ("--kill-on-bad-exit=1", sys.executable, ["-m", "torch.distributed.run"])
    asked = get_args_parser().parse_args(rest[2:])  # as torchrun itself understands it
    assert (asked.nnodes, asked.nproc_per_node, asked.max_restarts) == ("2", "4", 3)
    assert (asked.rdzv_backend, asked.rdzv_endpoint, asked.rdzv_id) == ("c10d", "node7:24242", "4242-0")
    assert (asked.log_dir, asked.module, asked.training_script) == ("runs/slurm-4242", True, "lib.runs.train_vit")
    assert asked.training_script_args == [*TRAIN[1:], *ODD]
    assert (cluster / "runs/slurm-4242").is_dir()
    assert not (cluster / "scontrol").exists()


def test_slurm_says_what_is_missing(cluster, monkeypatch):
    done = submit()
    assert done.returncode == 2
    assert "what is to be run?" in done.stderr
    monkeypatch.setenv("PYTHON", "nowhere/python")
    done = submit(*TRAIN)
    assert done.returncode == 2
    assert "no Python at nowhere/python" in done.stderr
    assert not (cluster / "srun").exists()


def test_a_failed_run_fails_the_job(cluster, tools):
    program(tools, "srun", "exit 3")
    assert submit(*TRAIN).returncode == 3
    assert not (cluster / "scontrol").exists()


@pytest.mark.parametrize(
    ("sent", "ends_with", "queued"), [("USR1", 1, True), ("USR1", 75, True), ("USR1", 0, False), ("TERM", 143, False)]
)
def test_only_an_unfinished_run_that_was_warned_is_queued_again(cluster, tools, sent, ends_with, queued):
    waits = (
        f"trap 'echo told >{cluster}/told; exit {ends_with}' TERM; "
        f"echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT >{cluster}/started"
    )
    program(tools, "srun", f"{waits}; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.2; done")
    job = subprocess.Popen(["bash", SBATCH, *TRAIN], start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 15
        while not (cluster / "started").exists() and time.monotonic() < until:
            time.sleep(0.02)
        job.send_signal(getattr(signal, f"SIG{sent}"))
        job.wait(timeout=15)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.stdout.close()
    assert int((cluster / "started").read_text()) < 120  # between the warning and the end of the job
    assert (cluster / "told").exists() == (sent == "USR1")
    assert (cluster / "scontrol").exists() == queued
    if queued:
        assert (cluster / "scontrol").read_text() == "requeue 4242\n"


# ---- SSH


@pytest.fixture
def machine(tmp_path, tools, monkeypatch):
    """A machine behind a stand-in for ssh that runs what it is given in ``machine/``;
    its tmux runs to the end at once.
    """
    home, here = tmp_path / "machine", tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(remote, "ROOT", here)
    program(
        tools,
        "ssh",
        f"for last; do :; done; echo call >>{tmp_path}/ssh\n[ -e {tmp_path}/lost ] && exit 255\ncd {home} "
        '&& eval "$last"',
    )
    program(tools, "rsync", f'printf \'%s\\0\' "$@" >{tmp_path}/rsync; echo "$@" >>{tmp_path}/rsyncs')
    program(tools, "tmux", f"""case $1 in
has-session) test -e {tmp_path}/session;;
list-panes) echo 1;;
new-session) echo new >>{tmp_path}/tmux; for last; do :; done; sh "$last";;
esac""")  # fmt: skip
    program(
        home / remote.FOLDER / ".venv/bin",
        "python",
        f"printf '%s\\0' \"$@\" >{tmp_path}/python; test ! -e {tmp_path}/broken",
    )
    (home / remote.FOLDER / "pyproject.toml").touch()
    os.utime(home / remote.FOLDER / "pyproject.toml", (0, 0))
    (home / remote.FOLDER / ".venv/.ready").touch()
    return tmp_path


def go(*arguments: str, run: tuple[str, ...] = TRAIN) -> int:
    return remote.main(["me@host.example:2222", *arguments, *(["--", *run] if run else [])])


def test_a_dry_run_is_a_script_and_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "ROOT", tmp_path)
    bash = shutil.which("bash")
    monkeypatch.setenv("PATH", "")
    assert go("--dry-run", run=(*TRAIN, *ODD)) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("# ")] == ["# push"] * 3 + [
        "# start",
        "# watch",
        "# pull",
    ]
    for left in (".git", ".venv", "_build"):
        assert f"--exclude={left} " in out
    assert subprocess.run([bash, "-n"], input=out, text=True, capture_output=True).stderr == ""


def test_the_run_gets_its_arguments_as_they_were_given(machine):
    assert go(run=(*TRAIN, *ODD)) == 0
    asked = get_args_parser().parse_args(words(machine / "python")[2:])
    assert (asked.standalone, asked.nproc_per_node, asked.max_restarts) == (True, "gpu", 3)
    assert [asked.training_script, *asked.training_script_args] == [*TRAIN, *ODD]
    assert words(machine / "rsync")[-2:] == ["me@host.example:scaling-workbook/runs/", "runs/"]
    assert (machine / "here/runs").is_dir()


@pytest.mark.parametrize("marker", ["END OF RUN", "EOF", "'", "$(touch broken)"])
def test_no_line_of_the_command_breaks_out_of_its_script(machine, capsys, marker):
    odd = ("--note", f"one\n{marker}\ntouch broken-out\n{marker}\n")
    assert go(run=(*TRAIN, *odd)) == 0
    assert get_args_parser().parse_args(words(machine / "python")[2:]).training_script_args == [*TRAIN[1:], *odd]
    assert not list((machine / "machine").rglob("broken*"))
    capsys.readouterr()
    assert go("--only", "start", "--dry-run", run=(*TRAIN, *odd)) == 0
    shown = capsys.readouterr().out.replace("ssh -p 2222", f"cd {machine}/machine; true")  # what a reader pastes
    assert subprocess.run(["bash", "-c", shown], capture_output=True, text=True, cwd=machine / "here").stderr == ""
    assert not list(machine.rglob("broken-out"))


def test_a_key_with_a_space_reaches_rsync_as_one_word(machine):
    key = machine / "my key"
    key.touch(0o600)
    assert go("--key", str(key), "--only", "pull", run=()) == 0
    arguments = words(machine / "rsync")
    assert f"ssh -p 2222 -i '{key}' " in arguments[arguments.index("-e") + 1]


def test_a_run_that_is_running_is_not_started_again(machine, tools, capfd):
    (machine / "session").touch()
    assert go("--only", "start") == 0
    assert not (machine / "tmux").exists()
    assert "workbook is running already" in capfd.readouterr().out


def test_a_lost_connection_and_then_again(machine, capsys):
    (machine / "lost").touch()
    assert go() == 255
    assert "no connection to host.example, port 2222. A run there continues without it" in capsys.readouterr().err
    assert not (machine / "rsyncs").exists()
    (machine / "lost").unlink()
    assert go() == 0
    assert (machine / "tmux").read_text() == "new\n"


def test_results_come_back_while_it_runs(machine, tools):
    (machine / "session").touch()
    name = machine / "machine" / remote.FOLDER / "runs/workbook"
    program(tools, "timeout", f"echo $1 >>{machine}/timeout; test -e {machine}/once && echo 0 >{name}.exit && exit 0\n"
            f": >{machine}/once; exit 124")  # fmt: skip
    name.parent.mkdir()
    assert go("--only", "watch", "pull", "--every", "300", run=()) == 0
    assert (machine / "timeout").read_text() == "300\n300\n"
    assert len((machine / "rsyncs").read_text().splitlines()) == 2  # once between, once at the end


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_no_failure(machine, tools):
    program(tools, "rsync", "exit 24")
    assert go("--only", "pull", run=()) == 0
    program(tools, "rsync", "exit 23")
    assert go("--only", "pull", run=()) == 23


def test_a_run_that_fails_brings_its_log_back(machine, capfd):
    (machine / "broken").touch()
    assert go() == 1
    assert "workbook ended with exit status 1" in capfd.readouterr().out
    assert words(machine / "rsync")[-1] == "runs/"


def test_a_machine_that_was_started_anew_is_noticed(machine, capfd):
    (machine / "machine" / remote.FOLDER / "runs").mkdir()
    assert go("--only", "watch", run=()) == 3
    assert "start it again" in capfd.readouterr().out


def test_a_machine_without_rsync_says_so(machine, tools, capfd):
    for name in ("mkdir", "df"):
        (tools / name).symlink_to(shutil.which(name))
    program(tools, "ssh", f'for last; do :; done; cd {machine}/machine; PATH={tools}/only; eval "$last"')
    program(tools / "only", "tmux", "")
    (tools / "only/sh").symlink_to(shutil.which("sh"))
    assert go("--only", "push", run=()) == 3
    assert "not on this machine: rsync python3. There: apt-get update" in capfd.readouterr().out


@pytest.mark.parametrize(
    "address", ["host", "me@", "@host", "me@host:", "me@host:0", "me@host:70000", "me@ho st", "-oX@host",
    "me@-oProxyCommand=x", "a@b@c", ""]
)  # fmt: skip
def test_what_is_no_address_is_refused(address, capsys):
    with pytest.raises(ValueError, match="is no address: expected user@host or user@host:port"):
        remote.parse_address(address)


def test_addresses():
    assert remote.parse_address("me@host").port == 22
    six = remote.parse_address("me@[2001:db8::1]:2222")
    assert six.ssh("true")[0][-2:] == ["me@2001:db8::1", "sh -s"]
    assert six.place("a") == "me@[2001:db8::1]:a/"


def test_a_key_that_ssh_would_refuse(tmp_path, capsys):
    key = tmp_path / "key"
    assert go("--dry-run", "--key", str(key)) == 2
    assert "there is no key" in capsys.readouterr().err
    key.touch()
    key.chmod(0o644)
    assert go("--dry-run", "--key", str(key)) == 2
    assert f"(mode 644), so ssh refuses it: chmod 600 {key}" in capsys.readouterr().err
    key.chmod(stat.S_IRUSR)
    assert go("--dry-run", "--key", str(key)) == 0


def test_what_is_missing_here(machine, tools, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "rsync" else name)
    assert go() == 2
    assert capsys.readouterr().err == "rsync is not installed here: apt install rsync, or brew install rsync\n"
    assert not (machine / "ssh").exists()


def test_what_makes_no_run(capsys):
    for arguments, run, says in [((), (), "what is to be run?"), (("--name", "a b"), TRAIN, "--name 'a b'"),
                                 ((), ("lib.runs.train_wit",), "no module 'lib.runs.train_wit'"),
                                 (("--processes", "zwei"), TRAIN, "--processes: 'zwei', expected a number"),
                                 (("--evry", "3"), TRAIN, "unrecognized arguments: --evry 3"),
                                 ((), ("lib.runs.train_vit", "--log=/tmp/a"), "only files in runs/ come back"),
                                 ((), ("lib.runs.train_vit", "--log-file", "a"), "--log a: only files in runs/"),
                                 ((), ("lib.runs.train_llama", "--export", "a"), "runs/workbook.export"),
                                 ((), ("lib.runs.train_vit", "--tensorboard", "a"),
                                 "runs/workbook.tensorboard")]:  # fmt: skip
        assert go("--dry-run", *arguments, run=run) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


def test_a_training_program_gets_a_checkpoint_and_a_log():
    given = remote.with_results(("lib.runs.train_vit", "--log=runs/x.jsonl"), "a")
    assert given == ("lib.runs.train_vit", "--log=runs/x.jsonl", "--checkpoint", "runs/a.checkpoint")
    given = remote.with_results(("lib.runs.train_vit", "--log-file", "runs/x", "--checkpoint=runs/y"), "a")
    assert given == ("lib.runs.train_vit", "--log-file", "runs/x", "--checkpoint=runs/y")
    assert remote.with_results(("lib.bench.fsdp",), "a") == ("lib.bench.fsdp",)


def test_every_training_program_is_given_flags_that_it_has(monkeypatch):
    def flags(name: str) -> set[str]:
        def look(parser, *_):
            raise LookupError({flag for action in parser._actions for flag in action.option_strings})

        monkeypatch.setattr("argparse.ArgumentParser.parse_args", look)
        with pytest.raises(LookupError) as found:
            importlib.import_module(name).main()
        return found.value.args[0]

    lib = SBATCH.parents[2]
    programs = {
        f"lib.{path.parent.name}.{path.stem}" for room in ("runs", "demos") for path in (lib / room).glob("train_*.py")
    }
    assert programs == set(remote.ALWAYS)
    for program in programs:
        given = remote.with_results((program,), "a")[1:]
        assert given
        assert set(given[::2]) <= flags(program), program
        assert all(path.startswith("runs/a.") for path in given[1::2])


def test_a_program_that_mpi_joins_is_started_by_mpiexec(machine):
    beside = machine / "machine" / remote.FOLDER / ".venv/bin"
    program(beside, "mpiexec", f"printf '%s\\0' \"$@\" >{machine}/mpiexec")
    assert go(run=("lib.demos.train_digits_mpi", "--steps", "3")) == 0
    asked = ["-m", "mpi4py", "-m", "lib.demos.train_digits_mpi", "--steps", "3", "--out", "runs/workbook.json"]
    assert words(machine / "mpiexec") == ["-n", "4", ".venv/bin/python", *asked]
    assert go("--processes", "2", run=("lib.demos.train_digits_mpi", "--out", "runs/b.json")) == 0
    assert words(machine / "mpiexec") == ["-n", "2", ".venv/bin/python", *asked[:4], "--out", "runs/b.json"]
    plan = modal_train.make_plan(("lib.demos.train_digits_mpi",), count=2)
    assert plan.command == ["mpiexec", "-n", "2", "python", *asked[:4], *asked[6:]]


# ---- Modal


def test_the_dry_run_says_everything_and_imports_no_modal(capsys):
    assert modal_train.main(["--dry-run", "--gpu", "H200", "--count", "4", "--hours", "2", "--", *TRAIN]) == 0
    out = capsys.readouterr().out
    price = 4 * next(card.dollars_per_hour for card in GPUS if card.name == "H200")
    for word in (
        "pyproject",
        "4 x H200",
        "volume",
        "at most 2 h",
        f"${price:.2f}",
        f"${price * 8:.2f}",
        "--model L/16",
        "nothing was",
    ):
        assert word in out
    assert "modal" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "A40"], "--gpu 'A40': expected one of T4"),
        (["--count", "9"], "--count 9: expected 1 to 8"),
        (["--hours", "25"], "at most 24"),
        (["--retries", "11"], "0 to 10"),
        (["--count", "two"], "--count: invalid int value: 'two'"),
    ],
)
def test_what_modal_does_not_rent_is_refused(arguments, says, capsys):
    assert modal_train.main(["--dry-run", *arguments, "--", *TRAIN]) == 2
    assert says in capsys.readouterr().err


def test_without_modal_it_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "modal", None)
    assert modal_train.main(["--", *TRAIN]) == 1
    assert "pip install modal" in capsys.readouterr().err


def test_the_containers_part_keeps_what_was_written_also_when_it_fails(tmp_path):
    kept = []
    modal_train.run_here([sys.executable, "-c", "open('x', 'w')"], str(tmp_path), lambda: kept.append(1))
    assert (tmp_path / "x").exists()
    with pytest.raises(RuntimeError, match="exit status 3"):
        modal_train.run_here([sys.executable, "-c", "raise SystemExit(3)"], str(tmp_path), lambda: kept.append(2))
    assert kept == [1, 2]


def test_the_container_that_is_taken_away_asks_its_program_to_leave_first(tmp_path):
    """The program takes its time, and is not killed."""
    slow = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: "
        "time.sleep(0.5) or pathlib.Path('saved').touch() or exit())"
    )
    slow += "\npathlib.Path('ready').touch(); time.sleep(30)"
    # a shell's background job ignores SIGINT, and passes that on to what it starts; a container does not
    here = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    here += (
        "from lib.runs.rent.modal_train import run_here\nimport pathlib, sys\nrun_here([sys.executable, '-c', "
        f"{slow!r}], {str(tmp_path)!r},"
    )
    here += (
        f" lambda: pathlib.Path({str(tmp_path)!r}, 'kept').write_text(str(pathlib.Path({str(tmp_path)!r}, "
        "'saved').exists())))"
    )
    run: dict[str, Any] = {"cwd": remote.ROOT, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", here], **run) as container:
        try:
            until = time.monotonic() + 60
            while not (tmp_path / "ready").exists() and time.monotonic() < until:
                time.sleep(0.05)
            container.send_signal(signal.SIGINT)
            container.wait(timeout=20)
        finally:
            container.kill()
    assert (tmp_path / "kept").read_text() == "True"


class Recorder:
    """Stands in for the module ``modal``: every call answers with itself and is noted."""

    def __init__(self, calls, name=""):
        self.calls, self.name = calls, name

    def __getattr__(self, name):
        return Recorder(self.calls, f"{self.name}.{name}".lstrip("."))

    def __call__(self, *args, **settings):
        self.calls.append((self.name, args, settings))
        return self


def test_the_app_asks_modal_for_what_the_plan_says(monkeypatch):
    calls: list[Any] = []
    module = types.ModuleType("modal")
    module.__getattr__ = lambda name: Recorder(calls, name)
    monkeypatch.setitem(sys.modules, "modal", module)
    plan = modal_train.make_plan(TRAIN, "H100", count=4, hours=0.5, retries=2)
    modal_train.make_app(plan)
    settings = next(settings for name, _, settings in calls if name == "App.function")
    assert (settings["gpu"], settings["timeout"], list(settings["volumes"])) == ("H100:4", 1800, ["/book/runs"])
    assert ("Retries", (), {"max_retries": 2, "initial_delay": 0.0}) in calls
    train = calls[-1][1][0]
    monkeypatch.setattr(modal_train, "run_here", lambda command, folder, keep: calls.append((command, folder)))
    train()
    assert calls[-1] == (plan.command, "/book")
    asked = get_args_parser().parse_args(plan.command[3:])
    assert (asked.nproc_per_node, [asked.training_script, *asked.training_script_args]) == ("4", [*TRAIN])
