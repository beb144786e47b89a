"""Output of a run: a line of JSON for each step, a progress bar,
and TensorBoard or Weights & Biases where they are asked for.

An evaluation and a sample of text have a line of their own, after that of their step and with its number.

JSON has neither NaN nor infinity, so such a loss or norm is written as null, and the line gets a further entry,
``"not_finite": {"loss": "nan"}``.
"""

import itertools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from lib.given.models.gpus import sheet_of
from lib.given.show.progress import progress
from lib.runs.engine.need import model_bytes
from lib.runs.engine.options import Options
from lib.speed import mfu

COLUMN = {"bf16": "peak_flops", "float16": "peak_flops", "tf32": "tf32_flops", "float32": "float32_flops"}
"""Column of a data sheet that holds the peak for each precision."""


def peak_flops(options: Options, device: torch.device) -> float | None:
    """Peak operations a second of one device in the run's precision; None if unknown."""
    if options.peak_tflops:
        return options.peak_tflops * 1e12
    sheet = sheet_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return getattr(sheet, COLUMN[options.precision]) if sheet else None


def memory_peak_bytes(device: torch.device) -> int:
    """Peak bytes that the allocator had handed out on the device; on a CPU the process's peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def as_json(line: dict[str, Any]) -> str:
    """A line of a log in strict JSON: a value that is not finite becomes null,
    and its name goes under ``not_finite``.
    """
    odd = {name: str(value) for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {name: None if name in odd else value for name, value in line.items()}
    return json.dumps({**plain, "not_finite": odd} if odd else plain, allow_nan=False) + "\n"


def read_log(path: Path, what: str = "loss") -> list[dict[str, Any]]:
    """The complete lines of a log that have this entry: "loss" for those of steps, "held_out_loss" of evaluations,
    "sample" of samples.

    A line that was cut off is skipped. A loss that was not finite is None.
    """
    return [line for line in _lines(path) if what in line]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            found.append(entry)
    return found


def send(row: Tensor) -> Callable[[], list[float]]:
    """Start copying a row of numbers to the host.

    The returned function waits for the copy only, not for work that the device got later.
    """
    row = row.detach()
    here = row.to("cpu", non_blocking=True)  # from a GPU into pinned memory
    if not row.is_cuda:
        return here.tolist
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return read


class Moment:
    """The moment at which the device reaches this point, by the device's own clock, since the host may run ahead;
    without CUDA, by the host's.
    """

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event:
            self.event.record()
        self.host = time.perf_counter()

    def seconds_since(self, earlier: "Moment") -> float:
        """Seconds between two moments. Waits for the device; without CUDA it reads the host's clock only now."""
        if self.event is None or earlier.event is None:
            self.host = time.perf_counter()
            return self.host - earlier.host
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Log:
    """The log of rank 0; on other ranks it writes nothing.

    On an accelerator a step's line is written after the next step has been started,
    so that the host never waits for the step that it has just launched.

    Args:
        options: Options of the run.
        task: The unit that is counted, and its FLOPs.
        device: Device of this rank.
        n_ranks: Number of ranks.
        begin: First step that is logged.
        speaks: Whether this is rank 0.
        wandb_id: Weights & Biases' name of the run that this one continues.
    """

    def __init__(
        self, options: Options, task: Any, device: torch.device, n_ranks: int, begin: int, speaks: bool,
        wandb_id: str | None = None,
    ):  # fmt: skip
        self.options, self.task, self.device, self.n_ranks, self.speaks = options, task, device, n_ranks, speaks
        self.items = options.batch * task.per_row
        peak = peak_flops(options, device)
        self.peak = peak and peak * n_ranks
        self.waiting: tuple[int, float, Callable[[], list[float]], Moment] | None = None
        self.leaves = (
            False  # whether some rank was asked to leave, by the last step that was read: the same on all ranks
        )
        self.file: TextIO | None = None
        self.board: Any = None
        self.rates: list[float] = []
        if speaks and options.log:
            self._continue_file(options.log, begin)
        if speaks and options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(options.tensorboard), purge_step=begin)
        self.wandb: Any = _start_wandb(options, wandb_id) if speaks and options.wandb else None
        self.wandb_id: str | None = self.wandb.id if self.wandb else wandb_id
        self.bar: Any = range(begin, options.steps)
        if speaks and not options.quiet:
            self.bar = progress(self.bar, f"{options.model} {options.how}")
        self.last = Moment(device)

    def _continue_file(self, path: Path, begin: int) -> None:
        """Keep the lines of the steps before ``begin``; later ones, from after the checkpoint, will be written again.

        If no line is kept, the file belongs to another run: it is renamed, with ``.old`` after its name,
        or ``.old2`` and so on.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if line["step"] < begin]
        if not kept and path.exists() and path.stat().st_size:
            names = (path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in itertools.count(1))
            os.replace(path, next(name for name in names if not name.exists()))
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(map(as_json, kept)), encoding="utf-8")
        os.replace(temporary, path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, step: int, lr: float, numbers: Tensor) -> None:
        """Record that a step was started.

        Writes the step before it; on a CPU, where the step is done, also the step itself.

        Args:
            numbers: The result of ``Run.plain_step``.
        """
        self.flush()
        self.waiting = (step, lr, send(numbers), Moment(self.device))
        if self.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Write the step that is still pending, if any; the host waits until the device has finished it."""
        if self.waiting is None:
            return
        (step, lr, read, moment), self.waiting = self.waiting, None
        loss, asked, *norm = read()
        self.leaves |= asked > 0
        seconds, self.last = moment.seconds_since(self.last), moment
        rate = self.items / seconds
        self.rates.append(rate)
        share = mfu(rate, self.task.flops_per_item, self.peak) if self.peak else None
        line = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm[0] if norm else None}
        line |= {f"{self.task.unit}s_per_s": rate, "mfu": share, "memory_peak_bytes": memory_peak_bytes(self.device)}
        line |= {"memory_told_bytes": model_bytes(self.task), "ranks": self.n_ranks}
        self.note(step, {**line, "seconds": seconds})
        if hasattr(self.bar, "set_postfix"):
            self.bar.set_postfix(loss=f"{line['loss']:.4f}", per_s=f"{self.rates[-1]:.4g}", refresh=False)

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Write a line about a step, to wherever this run writes."""
        if self.file:
            self.file.write(as_json({"step": step, **values}))
            self.file.flush()
        there = {name: value for name, value in values.items() if name != "step" and value is not None}
        for name, value in there.items() if self.board else ():
            (self.board.add_text if isinstance(value, str) else self.board.add_scalar)(name, value, step)
        if self.wandb:
            self.wandb.log(there, step=step)
        if self.speaks and not self.options.quiet and "loss" not in values:
            shown = (f"{name} {value if isinstance(value, str) else f'{value:.4f}'}" for name, value in there.items())
            self.bar.write(f"step {step}: {', '.join(shown)}", file=sys.stderr)

    def restart_clock(self) -> None:
        """Do not count the time since the last step as part of the next one."""
        self.last = Moment(self.device)

    def close(self) -> None:
        self.flush()
        for part in (self.file, self.board):
            if part:
                part.close()
        if self.wandb:
            self.wandb.finish()


def _start_wandb(options: Options, run_id: str | None) -> Any:
    """A run of Weights & Biases, which is imported here only; with ``run_id`` the run of that name goes on."""
    import wandb

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    again = {"id": run_id, "resume": "allow"} if run_id else {}
    return wandb.init(project=options.wandb, config=settings, **again)
