"""A training run on a machine that you reach by SSH: copy the book there, start the run, watch it, fetch the results.

    python -m lib.runs.rent.remote me@203.0.113.7:2222 --dry-run -- lib.runs.train_vit --model L/16 --strategy ddp
    python -m lib.runs.rent.remote me@203.0.113.7:2222 -- lib.runs.train_vit --model L/16 --strategy ddp
    python -m lib.runs.rent.remote me@203.0.113.7:2222 --only pull

Each step is a plain rsync or ssh command, which is printed before it runs.
On the machine the run lives in tmux, so it survives a lost connection.
Give the same command again to continue; with another machine's address the run continues from the last checkpoint that
was fetched.
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

from lib.runs.flags import Parser, whole

ROOT = Path(__file__).parents[3]
FOLDER, RUNS = "scaling-workbook", "runs"
"""The book's folder on the machine, and the folder in it for checkpoints and logs, which alone is fetched."""
PROCESSES = ("gpu", "cpu", "auto")
LEFT_HERE = (".git", ".venv", "_build", "notebooks", "__pycache__", ".*_cache", ".workbook", f"/{RUNS}")
RESULTS = (
    ("--checkpoint", ".checkpoint"),
    ("--log", "--log-file", ".jsonl"),
    ("--tensorboard", ".tensorboard"),
    ("--export", ".export"),
    ("--out", ".json"),
)
"""The flags that name a program's output files, and the ending of the names that they get by default."""
GOES_ON = ("--checkpoint", "--log")
ALWAYS = {
    "lib.runs.train_vit": GOES_ON,
    "lib.runs.train_gpt2": GOES_ON,
    "lib.runs.train_llama": GOES_ON,
    "lib.demos.train_tiny": GOES_ON,
    "lib.demos.train_digits_mpi": ("--out",),
}
"""The flags that each training program gets if it lacks them."""
BY_MPI, MPI_PROCESSES = ("lib.demos.train_digits_mpi", "lib.demos.hello_parallel"), 4
"""The programs that mpiexec starts, and their default number of processes."""
TIME_TO_PULL, FILES_VANISHED, CONNECTION_LOST = 124, 24, {"ssh": (255,), "rsync": (12, 30, 255)}
ADDRESS = re.compile(r"(?P<user>\w[\w.-]*)@(?P<host>\w[\w.-]*|\[[0-9a-fA-F:]+\])(:(?P<port>\d{1,5}))?", re.ASCII)
INSTALL = {"ssh": "apt install openssh-client", "rsync": "apt install rsync, or brew install rsync"}
Command = tuple[list[str], str]
"""A program with its arguments, and the script on its standard input, if any."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine's address, and the key for it."""

    user: str
    host: str
    port: int = 22
    key: Path | None = None

    @property
    def shell(self) -> list[str]:
        """ssh and its options: accept new hosts, refuse changed ones, and notice a dead connection after 90 s."""
        options = ["-p", str(self.port), *(["-i", str(self.key)] if self.key else [])]
        return ["ssh", *options, "-o", "StrictHostKeyChecking=accept-new", "-o", "ServerAliveInterval=30"]

    def ssh(self, script: str) -> Command:
        return [*self.shell, f"{self.user}@{self.host.strip('[]')}", "sh -s"], script

    def rsync(self, *arguments: str) -> Command:
        """An interrupted transfer stays in a folder of its own,
        so that half a checkpoint never takes the place of a complete one.
        """
        return ["rsync", "-az", "--partial-dir=.rsync-partial", "-e", shlex.join(self.shell), *arguments], ""

    def place(self, folder: str) -> str:
        return f"{self.user}@{self.host}:{folder}/"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run: ``program`` is a module of this book with its arguments."""

    program: tuple[str, ...] = ()
    name: str = "workbook"
    processes: str = "gpu"
    every_s: int = 600

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w-]*", self.name, re.ASCII):
            raise ValueError(f"--name {self.name!r}: expected only letters, digits, _ and -")


def parse_address(text: str, key: str | None = None) -> Machine:
    """Parse ``user@host`` or ``user@host:port``, and check the key's file.

    Raises:
        ValueError: it is no address, or ssh would refuse the key.
    """
    found = ADDRESS.fullmatch(text)
    if not found or not 0 < int(found["port"] or 22) < 65536:
        raise ValueError(
            f"{text!r} is no address: expected user@host or user@host:port, for example root@203.0.113.7:22022"
        )
    path = Path(key).expanduser().absolute() if key else None
    if path and not path.is_file():
        raise ValueError(f"there is no key at {path}: ssh-keygen -t ed25519 -f {shlex.quote(str(path))}")
    if path and path.suffix == ".pub":
        raise ValueError(f"{path} is the public half, which belongs on the machine; expected the file without .pub")
    if path and (mode := path.stat().st_mode & 0o777) & 0o077:
        raise ValueError(
            f"others can read {path} (mode {mode:o}), so ssh refuses it: chmod 600 {shlex.quote(str(path))}"
        )
    return Machine(user=found["user"], host=found["host"], port=int(found["port"] or 22), key=path)


def _is_module(name: str) -> bool:
    """Whether a module's file is in this copy of the book; nothing is imported."""
    path = Path(__file__).parents[3].joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def with_results(program: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Add output files under ``runs`` to a training program that names none (a checkpoint and a log, or a table);
    leave others alone.

    Raises:
        ValueError: an output file is outside of ``runs``, from where it would not be fetched,
            or there is no such module.
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
                raise ValueError(f"{flags[0]} {path}: only files in {RUNS}/ come back; expected, for example, {where}")
        if not given and flags[0] in ALWAYS.get(program[0] if program else "", ()):
            program = (*program, flags[0], f"{RUNS}/{name}{suffix}")
    return program


def start_command(folder: str, processes: str | int, program: tuple[str, ...]) -> list[str]:
    """The command that starts a program on one host with the Python in ``folder``: mpiexec for MPI programs,
    torchrun for all others.
    """
    if program and program[0] in BY_MPI:
        n = str(processes) if str(processes).isdecimal() else str(MPI_PROCESSES)
        return [f"{folder}mpiexec", "-n", n, f"{folder}python", "-m", "mpi4py", "-m", *program]
    return torchrun(f"{folder}python", processes, program)


def torchrun(python: str, processes: str | int, program: tuple[str, ...]) -> list[str]:
    """torchrun on one host. If one process dies, all of them start again from the checkpoint.

    Without the ``--``, torchrun would take the program's ``--log`` for a short form of its own ``--log-dir``.
    """
    options = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=3"]
    return [python, "-m", "torch.distributed.run", *options, "-m", "--", *program]


def push(machine: Machine, job: Job) -> list[Command]:
    """Look at the machine, copy the book (without what can be built again),
    and copy earlier results unless newer ones are there.
    """
    look = f"""set -eu; missing=
for program in rsync tmux python3; do command -v $program >/dev/null || missing="$missing $program"; done
test -z "$missing" || {{
  echo "not on this machine:$missing. There: apt-get update && apt-get install -y$missing"; exit 3
}}
mkdir -p {FOLDER}/{RUNS}; df -h {FOLDER}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv || echo "no GPU here"
"""
    book = machine.rsync(*(f"--exclude={pattern}" for pattern in LEFT_HERE), "./", machine.place(FOLDER))
    return [machine.ssh(look), book, machine.rsync("--update", f"{RUNS}/", machine.place(f"{FOLDER}/{RUNS}"))]


def start(machine: Machine, job: Job) -> list[Command]:
    """Build an environment on the machine's own torch, then start the run in tmux unless it is running."""
    name = f"{RUNS}/{job.name}"
    command = start_command(".venv/bin/", job.processes, with_results(job.program, job.name))
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
    """Show the run's output until it ends or it is time to fetch results (exit status 124)."""
    name = f"{RUNS}/{job.name}"
    script = f"""set -eu; cd {FOLDER}
if tmux has-session -t ={job.name} 2>/dev/null; then
  touch {name}.out
  timeout {job.every_s} tail -n 10 -F --pid="$(tmux list-panes -t ={job.name}: -F '#{{pane_pid}}')" {name}.out
fi
test -e {name}.exit || {{
  echo "{job.name} is not running and left no exit status: was the machine restarted? start it again"; exit 3
}}
echo "{job.name} ended with exit status $(cat {name}.exit); its whole output is in {name}.out"
test "$(cat {name}.exit)" = 0
"""
    return [machine.ssh(script)]


def pull(machine: Machine, job: Job) -> list[Command]:
    """Fetch checkpoints and logs, unless newer ones are here."""
    return [machine.rsync("--update", machine.place(f"{FOLDER}/{RUNS}"), f"{RUNS}/")]


STEPS = {"push": push, "start": start, "watch": watch, "pull": pull}


def _shown(script: str) -> str:
    """A script as a here-document, with an end marker that is no line of the script."""
    marker = "EOF"
    while marker in script.splitlines():
        marker += "_"
    return f" <<'{marker}'\n{script}{marker}" if script else ""


def run_step(name: str, machine: Machine, job: Job, dry_run: bool) -> int:
    """Print and run each command of a step; the first that fails ends the step with its exit status."""
    for command, script in STEPS[name](machine, job):
        print(f"# {name}\n{shlex.join(command)}{_shown(script)}", flush=True)
        status = 0 if dry_run else subprocess.run(command, input=script, text=True, cwd=ROOT, check=False).returncode
        if (
            command[0] == "rsync" and status == FILES_VANISHED
        ):  # an old checkpoint was deleted while it was copied: no failure
            status = 0
        if status in CONNECTION_LOST[command[0]]:
            print(
                f"{name}: no connection to {machine.host}, port {machine.port}. "
                "A run there continues without it; give the same "
                "command again to find it. If the machine is gone, give the address of another.",
                file=sys.stderr,
            )
        if status:
            return status
    return 0


def run(names: list[str], machine: Machine, job: Job, dry_run: bool) -> int:
    """Run the steps in their order; results are fetched while the run is watched, and also if it fails."""
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
    """For ``type=``: accepts what torchrun accepts as a number of processes."""
    if text not in PROCESSES and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number of at least 1, or one of {', '.join(PROCESSES)}")
    return text


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m lib.runs.rent.remote", description="Train on a machine reached by SSH",
                    epilog="after --: the module to run there, and its arguments")  # fmt: skip
    parser.add_argument("address", help="user@host or user@host:port")
    parser.add_argument("--key", help="file of the private key; without it ssh uses its default keys")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="run only these steps")
    parser.add_argument("--name", default="workbook", help="name of the tmux session and of the files in runs/")
    parser.add_argument(
        "--processes",
        type=processes,
        default="gpu",
        help=f"processes on the machine; by default one for each GPU, and {MPI_PROCESSES} under MPI",
    )
    parser.add_argument("--every", type=whole(1), default=600, help="seconds between two fetches of results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    try:
        options, program = parser.parse_args(argv[:cut]), tuple(argv[cut + 1 :])
        job = Job(program=program, name=options.name, processes=options.processes, every_s=options.every)
        machine = parse_address(options.address, options.key)
        if "start" in options.only and not with_results(program, job.name):
            raise ValueError(
                "what is to be run? expected a module after --, for example: -- lib.runs.train_vit --model L/16"
            )
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
        print("\nstopped watching; the run continues, and the machine still costs money", file=sys.stderr)
        return 130
    if not status and not options.dry_run:
        print(f"done: the results are in {RUNS}/. The machine costs money until you give it back.")
    return status


if __name__ == "__main__":
    sys.exit(main())
