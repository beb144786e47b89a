"""The training programs on Modal: one host with up to eight GPUs, and checkpoints in a volume that outlives the host.

    # show what it would do; needs no account and no `modal`
    python -m lib.runs.rent.modal_train --dry-run -- lib.runs.train_vit --model L/16
    pip install modal && modal setup                                                # once: the package, and an account
    python -m lib.runs.rent.modal_train --gpu H100 --count 4 --hours 2 -- lib.runs.train_vit --model L/16 --strategy ddp
    modal volume get workbook-runs / runs                                           # fetch checkpoints and logs

If the host is taken away, the program crashes or its time limit ends, Modal starts it again,
and it continues from its checkpoint.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.given.models.gpus import GPUS, Gpu
from lib.runs.flags import Parser
from lib.runs.rent.remote import ROOT, RUNS, start_command, with_results

APP, VOLUME, BOOK = "workbook-train", "workbook-runs", "/book"
MOST_GPUS, MOST_HOURS, MOST_RETRIES = 8, 24, 10
"""Modal's own limits: GPUs of a container, hours of an attempt, retries of a call."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs, decided before anything is rented."""

    program: tuple[str, ...]
    gpu: Gpu
    count: int
    hours: float
    retries: int

    @property
    def command(self) -> list[str]:
        return start_command("", self.count, self.program)

    @property
    def dollars_per_hour(self) -> float:
        return self.gpu.dollars_per_hour * self.count

    def describe(self) -> str:
        most = self.dollars_per_hour * self.hours
        rows = {
            "app": f"{APP}: one function; it keeps running when this machine is switched off",
            "image": f"debian_slim, Python {PYTHON}, the dependencies of pyproject.toml, and this book",
            "gpu": f"{self.count} x {self.gpu.name} ({self.gpu.memory_gb} GB each)",
            "volume": f"{VOLUME} at {BOOK}/{RUNS}, created if it does not exist",
            "command": shlex.join(self.command),
            "time": f"at most {self.hours:g} h for an attempt; up to {self.retries} more attempts, "
            "each from the last checkpoint",
            "cost": f"${self.dollars_per_hour:.2f} an hour for the GPUs: at most ${most:.2f} for an attempt, "
            f"${most * (1 + self.retries):.2f} if every attempt is used up",
            "results": f"modal volume get {VOLUME} / {RUNS}",
        }
        return "\n".join(f"{name:8} {text}" for name, text in rows.items())


def make_plan(program: tuple[str, ...], gpu: str = "H100", count: int = 1, hours: float = 1, retries: int = 3) -> Plan:
    """Check the request against what Modal offers.

    Raises:
        ValueError: there is no such GPU, too many GPUs or hours are requested, or results would be lost.
    """
    cards = {card.name: card for card in GPUS}
    if not program:
        raise ValueError(
            "what is to be run? expected a module after --, for example: -- lib.runs.train_vit --model L/16"
        )
    if gpu not in cards:
        raise ValueError(f"--gpu {gpu!r}: expected one of {', '.join(cards)}")
    if not 1 <= count <= MOST_GPUS:
        raise ValueError(f"--count {count}: expected 1 to {MOST_GPUS}, the GPUs of one host")
    if not 0 < hours <= MOST_HOURS:
        raise ValueError(
            f"--hours {hours:g}: expected more than 0 and at most {MOST_HOURS}; "
            "a longer run continues in the next attempt"
        )
    if not 0 <= retries <= MOST_RETRIES:
        raise ValueError(f"--retries {retries}: expected 0 to {MOST_RETRIES}")
    program = with_results(program, "workbook")
    return Plan(program=program, gpu=cards[gpu], count=count, hours=hours, retries=retries)


def run_here(command: list[str], folder: str, keep: Callable[[], Any]) -> None:
    """The container's part: plain Python, so that it can be tried anywhere.

    Modal interrupts a container half a minute before it takes it away. The program is then asked to leave, and this
    function waits for it.

    Args:
        command: The program and its arguments.
        folder: Its working directory.
        keep: Called at the end, also after a failure: commits the volume.

    Raises:
        RuntimeError: the program failed, so that Modal tries again.
    """
    try:
        with subprocess.Popen(command, cwd=folder) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
    finally:
        keep()
    if status:
        raise RuntimeError(f"exit status {status} of {shlex.join(command)}")


def make_app(plan: Plan) -> tuple[Any, Any]:
    """The Modal app and its function; nothing is rented before it is called.

    Raises:
        ModuleNotFoundError: `modal` is not installed.
    """
    import modal

    image = modal.Image.debian_slim(python_version=PYTHON).pip_install_from_pyproject(str(ROOT / "pyproject.toml"))
    image = image.env({"PYTHONPATH": BOOK, "PYTHONUNBUFFERED": "1"})
    for name in ("lib", "solutions"):
        image = image.add_local_dir(str(ROOT / name), f"{BOOK}/{name}", ignore=["**/__pycache__"])
    image = image.add_local_file(str(ROOT / "book.yml"), f"{BOOK}/book.yml")
    volume = modal.Volume.from_name(VOLUME, create_if_missing=True)
    app = modal.App(APP)
    command, runs = plan.command, str(Path(BOOK) / RUNS)

    def train() -> None:
        from lib.runs.rent.modal_train import BOOK, run_here

        run_here(command, BOOK, volume.commit)

    settings = {
        "gpu": f"{plan.gpu.name}:{plan.count}",
        "volumes": {runs: volume},
        "timeout": int(plan.hours * 3600),
        "retries": modal.Retries(max_retries=plan.retries, initial_delay=0.0),
        "single_use_containers": True,  # a new attempt gets a new container, without remains of the failed one
    }
    # serialized: the function is nested here, because the plan decides its GPU
    return app, app.function(image=image, serialized=True, **settings)(train)


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m lib.runs.rent.modal_train", description="Train on Modal's GPUs",
                    epilog="after --: the module to run there, and its arguments")  # fmt: skip
    parser.add_argument("--gpu", default="H100", help="one of " + ", ".join(card.name for card in GPUS))
    parser.add_argument("--count", type=int, default=1, help=f"GPUs, all on one host, at most {MOST_GPUS}")
    parser.add_argument("--hours", type=float, default=1, help=f"time limit of one attempt, at most {MOST_HOURS}")
    parser.add_argument("--retries", type=int, default=3, help=f"further attempts, at most {MOST_RETRIES}")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")
    try:
        options = parser.parse_args(argv[:cut])
        plan = make_plan(tuple(argv[cut + 1 :]), options.gpu, options.count, options.hours, options.retries)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(plan.describe())
    if options.dry_run:
        print("dry run  nothing was rented and nothing was sent")
        return 0
    try:
        app, train = make_app(plan)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: pip install modal && modal setup; or --dry-run", file=sys.stderr)
        return 1
    import modal

    with modal.enable_output(), app.run(detach=True):
        train.remote()
    return 0


if __name__ == "__main__":
    sys.exit(main())
