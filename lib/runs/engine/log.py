"""What a run says while it goes: a line of JSON a step, a bar for people, TensorBoard for who has it.

JSON has no NaN and no infinity: such a loss or norm is written as null, and the line has one thing more, ``"not_finite": {"loss": "nan"}``.
"""

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
from lib.runs.engine.options import Options
from lib.speed import mfu

COLUMN = {"bf16": "peak_flops", "float16": "peak_flops", "tf32": "tf32_flops", "float32": "float32_flops"}
"""Where the data sheet of a card says what the precision of a run can reach."""


def peak_flops(options: Options, device: torch.device) -> float | None:
    """Operations a second of one device in the precision of the run; None where nobody knows."""
    if options.peak_tflops:
        return options.peak_tflops * 1e12
    sheet = sheet_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return getattr(sheet, COLUMN[options.precision]) if sheet else None


def memory_peak_bytes(device: torch.device) -> int:
    """The most that the allocator had given out on the device; on a CPU the most that the process had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def as_json(line: dict[str, Any]) -> str:
    """A line of a log, in strict JSON: what is not finite stands under ``not_finite``, by its name, and is null in its place."""
    odd = {name: str(value) for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {name: None if name in odd else value for name, value in line.items()}
    return json.dumps({**plain, "not_finite": odd} if odd else plain, allow_nan=False) + "\n"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; one that was cut off is passed over. A loss that was not finite is None."""
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
    """Start to bring a row of numbers to the host; the call that comes back waits for them, and not for what the device was given later."""
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
    """When the device came here, by its own clock, for the host may run ahead of it; without CUDA by the host's."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event:
            self.event.record()
        self.host = time.perf_counter()

    def seconds_since(self, earlier: "Moment") -> float:
        """Seconds between the two; waits until the device is here, and reads the host's clock, if it counts, only now."""
        if self.event is None or earlier.event is None:
            self.host = time.perf_counter()
            return self.host - earlier.host
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Log:
    """Rank 0's words; the other ranks have one that is silent.

    On an accelerator a step's line is written when the next step has been started, so that the host never waits for the step that
    it has just begun.

    Args:
        options: Of the run.
        task: What is counted, and what it costs.
        device: Of this rank.
        n_ranks: All ranks.
        begin: The first step that is written.
        speaks: Whether this is rank 0.
    """

    def __init__(self, options: Options, task: Any, device: torch.device, n_ranks: int, begin: int, speaks: bool):
        self.options, self.task, self.device, self.speaks = options, task, device, speaks
        self.items = options.batch * task.per_row
        peak = peak_flops(options, device)
        self.peak = peak and peak * n_ranks
        self.waiting: tuple[int, float, Callable[[], list[float]], Moment] | None = None
        self.leaves = False  # whether a step that was read says that a rank was asked to leave: alike on all ranks
        self.file: TextIO | None = None
        self.board: Any = None
        self.rates: list[float] = []
        if speaks and options.log:
            self._continue_file(options.log, begin)
        if speaks and options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(options.tensorboard), purge_step=begin)
        self.bar: Any = range(begin, options.steps)
        if speaks and not options.quiet:
            self.bar = progress(self.bar, f"{options.model} {options.strategy}")
        self.last = Moment(device)

    def _continue_file(self, path: Path, begin: int) -> None:
        """Keep the lines of the steps before ``begin``; those that a lost run wrote after its checkpoint will be written again.

        A file of which nothing is kept is another run's: it stays, with ``.old`` behind its name.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] < begin]
        if not kept and path.exists() and path.stat().st_size:
            os.replace(path, path.with_name(f"{path.name}.old"))
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(map(as_json, kept)), encoding="utf-8")
        os.replace(temporary, path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, step: int, lr: float, numbers: Tensor) -> None:
        """A step was started; the one before it is written, and on a CPU, where it is done, the step itself.

        Args:
            numbers: What ``Run.plain_step`` gives.
        """
        self.flush()
        self.waiting = (step, lr, send(numbers), Moment(self.device))
        if self.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Write the step that waits, if one does; the host waits until it is done."""
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
        self._say({**line, "seconds": seconds})

    def _say(self, line: dict[str, Any]) -> None:
        if self.file:
            self.file.write(as_json(line))
            self.file.flush()
        if self.board:
            for name, value in line.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(name, value, line["step"])
        if hasattr(self.bar, "set_postfix"):
            self.bar.set_postfix(loss=f"{line['loss']:.4f}", per_s=f"{self.rates[-1]:.4g}", refresh=False)

    def restart_clock(self) -> None:
        """What was done since the last step is not of the next one."""
        self.last = Moment(self.device)

    def close(self) -> None:
        self.flush()
        for part in (self.file, self.board):
            if part:
                part.close()
