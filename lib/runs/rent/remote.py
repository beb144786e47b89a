"""A training run on a machine that you reach by SSH: copied there, started, watched, brought back.

    python -m lib.runs.rent.remote me@203.0.113.7:2222 --dry-run -- lib.runs.train_vit --model L/16 --strategy ddp
    python -m lib.runs.rent.remote me@203.0.113.7:2222 -- lib.runs.train_vit --model L/16 --strategy ddp
    python -m lib.runs.rent.remote me@203.0.113.7:2222 --only pull

Each step is a plain rsync or ssh command, printed before it is run. The run lives in tmux on the machine, so it does not end with
the connection. The same command again does what is left to do; on another machine it goes on from the last checkpoint brought back.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lib.runs.engine.options import Parser, whole

ROOT = Path(__file__).parents[3]
FOLDER, RUNS = "scaling-workbook", "runs"
"""The book's folder on the machine; and in it, on both sides, where checkpoints and logs lie: only they come back."""
PROCESSES = ("gpu", "cpu", "auto")
LEFT_HERE = (".git", ".venv", "_build", "notebooks", "__pycache__", ".*_cache", ".workbook", f"/{RUNS}")
RESULTS = (
    ("--checkpoint", ".checkpoint"),
    ("--log", "--log-file", ".jsonl"),
    ("--tensorboard", ".tensorboard"),
    ("--out", ".json"),
)
"""The flags that say where a program writes, and how the name ends that it is given."""
GOES_ON = ("--checkpoint", "--log")
ALWAYS = {
    "lib.runs.train_vit": GOES_ON,
    "lib.runs.train_gpt2": GOES_ON,
    "lib.runs.train_tiny": GOES_ON,
    "lib.runs.train_digits_mpi": ("--out",),
}
"""What each training program is given of them, where it has none."""
BY_MPI, MPI_PROCESSES = ("lib.runs.train_digits_mpi", "lib.runs.hello_parallel"), 4
"""The programs that mpiexec starts, and how many processes of them where no number is given."""
TIME_TO_PULL, FILES_VANISHED, CONNECTION_LOST = 124, 24, {"ssh": (255,), "rsync": (12, 30, 255)}
ADDRESS = re.compile(r"(?P<user>\w[\w.-]*)@(?P<host>\w[\w.-]*|\[[0-9a-fA-F:]+\])(:(?P<port>\d{1,5}))?", re.ASCII)
INSTALL = {"ssh": "apt install openssh-client", "rsync": "apt install rsync, or brew install rsync"}
Command = tuple[list[str], str]
"""A program with its arguments, and the script that it reads, if any."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where to, and with which key."""

    user: str
    host: str
    port: int = 22
    key: Path | None = None

    @property
    def shell(self) -> list[str]:
        """ssh and its options: a new host is noted and a changed one refused; a dead connection is noticed after 90 s."""
        options = ["-p", str(self.port), *(["-i", str(self.key)] if self.key else [])]
        return ["ssh", *options, "-o", "StrictHostKeyChecking=accept-new", "-o", "ServerAliveInterval=30"]

    def ssh(self, script: str) -> Command:
        return [*self.shell, f"{self.user}@{self.host.strip('[]')}", "sh -s"], script

    def rsync(self, *arguments: str) -> Command:
        """What is cut off in the middle waits in a folder of its own: half a checkpoint never stands where a whole one would."""
        return ["rsync", "-az", "--partial-dir=.rsync-partial", "-e", shlex.join(self.shell), *arguments], ""

    def place(self, folder: str) -> str:
        return f"{self.user}@{self.host}:{folder}/"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run: ``program`` is a module of this book and its arguments."""

    program: tuple[str, ...] = ()
    name: str = "workbook"
    processes: str = "gpu"
    every_s: int = 600

    def __post_init__(self):
        if not re.fullmatch(r"\w[\w-]*", self.name, re.ASCII):
            raise ValueError(f"--name {self.name!r}: letters, digits, _ and - only")


def parse_address(text: str, key: str | None = None) -> Machine:
    """``user@host`` or ``user@host:port``, and the key's file.

    Raises:
        ValueError: it is none; or ssh would refuse the key.
    """
    found = ADDRESS.fullmatch(text)
    if not found or not 0 < int(found["port"] or 22) < 65536:
        raise ValueError(f"{text!r} is no address: user@host or user@host:port, for example root@203.0.113.7:22022")
    path = Path(key).expanduser().absolute() if key else None
    if path and not path.is_file():
        raise ValueError(f"there is no key at {path}: ssh-keygen -t ed25519 -f {shlex.quote(str(path))}")
    if path and path.suffix == ".pub":
        raise ValueError(f"{path} is the public half, which the machine gets; --key takes the file without .pub")
    if path and (mode := path.stat().st_mode & 0o777) & 0o077:
        raise ValueError(f"others may read {path} (mode {mode:o}), ssh refuses it: chmod 600 {shlex.quote(str(path))}")
    return Machine(user=found["user"], host=found["host"], port=int(found["port"] or 22), key=path)


def _is_module(name: str) -> bool:
    """Whether the file of a module is here, which is what is copied; nothing is imported."""
    path = Path(__file__).parents[3].joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def with_results(program: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A training program with what it writes under ``runs`` (a checkpoint and a log, or a table), where it has none; any other as it is.

    Raises:
        ValueError: a checkpoint, a log, a table or a folder for TensorBoard elsewhere, which would not come back; or no such module.
    """
    if program and not _is_module(program[0]):
        raise ValueError(f"there is no module {program[0]!r} in this book; expected one such as lib.runs.train_vit")
    for *flags, suffix in RESULTS:
        given = [after for before, after in pairwise(program) if before in flags]
        given += [
            value for flag, equals, value in (part.partition("=") for part in program) if equals and flag in flags
        ]
        for path in map(Path, given):
            if path.parts[:1] != (RUNS,) or ".." in path.parts:
                where = f"{RUNS}/{name}{suffix}"
                raise ValueError(f"{flags[0]} {path}: only what lies in {RUNS}/ comes back, such as {where}")
        if not given and flags[0] in ALWAYS.get(program[0] if program else "", ()):
            program = (*program, flags[0], f"{RUNS}/{name}{suffix}")
    return program


def launch(folder: str, processes: str | int, program: tuple[str, ...]) -> list[str]:
    """What starts a program on one host, with the Python in ``folder``: mpiexec for those that MPI joins, torchrun for all others."""
    if program and program[0] in BY_MPI:
        n = str(processes) if str(processes).isdecimal() else str(MPI_PROCESSES)
        return [f"{folder}mpiexec", "-n", n, f"{folder}python", "-m", "mpi4py", "-m", *program]
    return torchrun(f"{folder}python", processes, program)


def torchrun(python: str, processes: str | int, program: tuple[str, ...]) -> list[str]:
    """torchrun on one host: so many processes of a module; when one dies, all begin again from the checkpoint.

    Without the ``--`` torchrun would take the program's ``--log`` for a short form of its own ``--log-dir``.
    """
    options = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=3"]
    return [python, "-m", "torch.distributed.run", *options, "-m", "--", *program]


def push(machine: Machine, job: Job) -> list[Command]:
    """Look at the machine; the book without what can be made again; results of an earlier machine, unless newer are there."""
    look = f"""set -eu; missing=
for program in rsync tmux python3; do command -v $program >/dev/null || missing="$missing $program"; done
test -z "$missing" || {{ echo "not on this machine:$missing. There: apt-get update && apt-get install -y$missing"; exit 3; }}
mkdir -p {FOLDER}/{RUNS}; df -h {FOLDER}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv || echo "no GPU here"
"""
    book = machine.rsync(*(f"--exclude={pattern}" for pattern in LEFT_HERE), "./", machine.place(FOLDER))
    return [machine.ssh(look), book, machine.rsync("--update", f"{RUNS}/", machine.place(f"{FOLDER}/{RUNS}"))]


def start(machine: Machine, job: Job) -> list[Command]:
    """An environment that takes the machine's own torch where it fits; then the run, in tmux, unless it is running."""
    name = f"{RUNS}/{job.name}"
    command = launch(".venv/bin/", job.processes, with_results(job.program, job.name))
    run = f"export PYTHONUNBUFFERED=1\n{shlex.join(command)} >>{name}.out 2>&1\necho $? >{name}.exit"
    script = f"""set -eu; cd {FOLDER}
if tmux has-session -t ={job.name} 2>/dev/null; then echo "{job.name} is running already"; exit 0; fi
test .venv/.ready -nt pyproject.toml || {{
  python3 -m venv --system-site-packages .venv
  .venv/bin/python -m pip install --quiet --editable . </dev/null
  touch .venv/.ready
}}
rm -f {name}.exit
printf '%s\\n' {shlex.quote(run)} >{name}.sh
tmux new-session -d -s {job.name} sh {name}.sh
"""
    return [machine.ssh(script)]


def watch(machine: Machine, job: Job) -> list[Command]:
    """What the run writes, until it ends or it is time to bring results back (exit status 124)."""
    name = f"{RUNS}/{job.name}"
    script = f"""set -eu; cd {FOLDER}
if tmux has-session -t ={job.name} 2>/dev/null; then
  touch {name}.out
  timeout {job.every_s} tail -n 10 -F --pid="$(tmux list-panes -t ={job.name}: -F '#{{pane_pid}}')" {name}.out
fi
test -e {name}.exit || {{ echo "{job.name} neither runs nor ended by itself: was the machine started anew? start it again"; exit 3; }}
echo "{job.name} ended with exit status $(cat {name}.exit); all it said is in {name}.out"
test "$(cat {name}.exit)" = 0
"""
    return [machine.ssh(script)]


def pull(machine: Machine, job: Job) -> list[Command]:
    """Checkpoints and logs, unless newer ones are here."""
    return [machine.rsync("--update", machine.place(f"{FOLDER}/{RUNS}"), f"{RUNS}/")]


STEPS = {"push": push, "start": start, "watch": watch, "pull": pull}


def _shown(script: str) -> str:
    """A script as a here-document, under a marker that is no line of it."""
    marker = "EOF"
    while marker in script.splitlines():
        marker += "_"
    return f" <<'{marker}'\n{script}{marker}" if script else ""


def run_step(name: str, machine: Machine, job: Job, dry_run: bool) -> int:
    """Print each command of a step and run it; the first that fails ends the step with its exit status."""
    for command, script in STEPS[name](machine, job):
        print(f"# {name}\n{shlex.join(command)}{_shown(script)}", flush=True)
        status = 0 if dry_run else subprocess.run(command, input=script, text=True, cwd=ROOT, check=False).returncode
        if (
            command[0] == "rsync" and status == FILES_VANISHED
        ):  # an old checkpoint, deleted while it was copied: no failure
            status = 0
        if status in CONNECTION_LOST[command[0]]:
            print(f"{name}: no connection to {machine.host}, port {machine.port}. What runs there goes on, and the same "
                  "command again finds it. If the machine is gone, give another's address.", file=sys.stderr)  # fmt: skip
        if status:
            return status
    return 0


def run(names: list[str], machine: Machine, job: Job, dry_run: bool) -> int:
    """The steps in their order; results come back while the run is watched, and also when it fails."""
    for name in [name for name in STEPS if name in names]:
        status = run_step(name, machine, job, dry_run)
        while name == "watch" and status == TIME_TO_PULL:
            status = run_step("pull", machine, job, dry_run) or run_step("watch", machine, job, dry_run)
        if status and name == "watch" and "pull" in names and status not in CONNECTION_LOST["ssh"]:
            run_step("pull", machine, job, dry_run)
        if status:
            return status
    return 0


def processes(text: str) -> str:
    """What torchrun takes for a number of processes, for ``type=``."""
    if text not in PROCESSES and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 1 on, or one of {', '.join(PROCESSES)}")
    return text


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m lib.runs.rent.remote", description="Train on a machine reached by SSH",
                    epilog="after --: the module to run there, and its arguments")  # fmt: skip
    parser.add_argument("address", help="user@host or user@host:port")
    parser.add_argument("--key", help="the private key's file; without it ssh takes its own")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="some of the four steps")
    parser.add_argument("--name", default="workbook", help="of the tmux session, and of the files in runs/")
    parser.add_argument("--processes", type=processes, default="gpu",
                        help=f"how many on the machine; by default one a GPU, and {MPI_PROCESSES} by MPI")  # fmt: skip
    parser.add_argument(
        "--every", type=whole(1), default=600, help="seconds from one bringing back of results to the next"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    try:
        options, program = parser.parse_args(argv[:cut]), tuple(argv[cut + 1 :])
        job = Job(program=program, name=options.name, processes=options.processes, every_s=options.every)
        machine = parse_address(options.address, options.key)
        if "start" in options.only and not with_results(program, job.name):
            raise ValueError("what is to be run? put it after --, for example: -- lib.runs.train_vit --model L/16")
        missing = [] if options.dry_run else [name for name in INSTALL if shutil.which(name) is None]
        if missing:
            raise ValueError("; ".join(f"{name} is not installed here: {INSTALL[name]}" for name in missing))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.dry_run:
        (ROOT / RUNS).mkdir(exist_ok=True)
    try:
        status = run(options.only, machine, job, options.dry_run)
    except KeyboardInterrupt:
        print("\nno longer watched; what runs there goes on, and costs", file=sys.stderr)
        return 130
    if not status and not options.dry_run:
        print(f"done: what came back is in {RUNS}/. The machine costs until you give it back.")
    return status


if __name__ == "__main__":
    sys.exit(main())
