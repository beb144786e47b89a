"""Checkpoints. Where every rank holds the whole model: one file, chapter 7's. Where each holds a part: a folder with a file from each rank.

The file is ``<folder>/checkpoint.pt``, the folder ``<folder>/step_00000100/``. Both are written under another name and renamed when they are
complete, so a reader finds the old checkpoint or the new one, never half of one.
"""

import json
import os
import pickle
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lib.fsdp import load_sharded, save_sharded
from lib.given.data.weights import why
from lib.runs.engine.options import Options, UsageError
from lib.training import load_checkpoint, save_checkpoint

FILE, STATE, SUMS = "checkpoint.pt", "state.json", "checksums"


def layout(options: Options) -> str:
    """The name of this run's checkpoint format; ``single`` and ``ddp`` can read each other's."""
    return "whole" if options.strategy in ("single", "ddp") else f"{options.strategy}, {options.engine}"


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder."""
    if (folder / FILE).exists():
        return folder / FILE
    found = sorted(path for path in folder.glob("step_????????") if (path / STATE).exists())
    return found[-1] if found else None


def peek(options: Options, rank: int = 0, world_size: int = 1) -> dict[str, Any] | None:
    """The description of its run that the newest checkpoint holds, without its tensors; None if there is no checkpoint.

    Checksums are verified too, because a byte that flipped on a disk would otherwise come back as a wrong weight or as NaN.
    Each rank reads its share of a folder's files.

    Raises:
        UsageError: the checkpoint cannot be read, is damaged, or has another layout.
    """
    path = newest(options.checkpoint) if options.checkpoint else None
    if path is None:
        return None
    try:
        if path.name == FILE:
            damaged = zipfile.ZipFile(path).testzip()  # torch.load verifies no checksum
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state"]
        else:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            written = sorted(state.pop(SUMS, {}).items())[rank::world_size]
            damaged = next((name for name, kept in written if checksum(path / name) != kept), None)
        was = state["run"]["layout"]
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--checkpoint {path} cannot be read: it holds more than tensors and plain values{why(error)}; nothing was run"
        ) from None
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[:1]
        raise UsageError(
            f"--checkpoint {path} cannot be read: {reason[0] if reason else type(error).__name__}"
        ) from None
    if damaged:
        raise UsageError(
            f"--checkpoint {path} is damaged: {damaged} is not what was written; expected an intact copy, or none"
        )
    if was != layout(options):
        raise UsageError(f"--checkpoint {path} holds a run of layout {was!r}, expected {layout(options)!r}")
    return state


def check_same_run(options: Options, state: dict[str, Any] | None, run: dict[str, Any]) -> None:
    """Check that a checkpoint belongs to this run.

    Raises:
        UsageError: something differs; the message names the first difference and both values.
    """
    if state is None:
        return
    for name, value in run.items():
        was = state["run"].get(name)
        if was != value:
            if isinstance(value, dict) and isinstance(was, dict):
                names = (k for k in {**was, **value} if was.get(k) != value.get(k))
                name = next(names, name)
                was, value = was.get(name), value.get(name)
            raise UsageError(
                f"--checkpoint {options.checkpoint} is of a run with {name} = {was!r}, this one has {value!r}"
            )
    if state["step"] > options.steps:
        raise UsageError(
            f"--checkpoint {options.checkpoint} is at step {state['step']}, beyond --steps {options.steps}"
        )


class NotSaved(OSError):
    """A checkpoint could not be written; the message names the place, the space that it needs, and the newest one that is still there."""


def save(options: Options, strategy: Any, optimizer: Optimizer, step: int, **state: Any) -> None:
    """Write a checkpoint. All ranks call this together; when it returns on any rank, the checkpoint is in its place.

    Args:
        options, strategy, optimizer: Those of the run.
        step: Steps done so far.
        state: Plain values to save with it.

    Raises:
        NotSaved: the disk is full, or cannot be written to.
    """
    assert options.checkpoint is not None
    try:
        _save(options.checkpoint, strategy, optimizer, step, state)
    except (OSError, RuntimeError, CheckpointException) as error:
        if reason := _disks_fault(error):
            raise NotSaved(_why_not(options.checkpoint, strategy, optimizer, step, reason)) from None
        raise


def _save(folder: Path, strategy: Any, optimizer: Optimizer, step: int, state: dict[str, Any]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    if not strategy.is_sharded:
        if rank == 0:
            save_checkpoint(folder / FILE, strategy.model, optimizer, step, **state)
        _barrier()
        return
    final = folder / f"step_{step:08d}"
    being_written = final.with_name(f".{final.name}")
    if rank == 0:
        for left in folder.glob(".step_????????"):  # left by runs that were killed while they saved
            shutil.rmtree(left)
        being_written.mkdir()
    _barrier()
    if strategy.is_native:
        save_sharded(being_written, strategy.model, optimizer)
    else:
        dcp.save(_contents(strategy, optimizer), checkpoint_id=being_written)
    sums = _gathered({path.name: checksum(path) for path in being_written.glob(f"__{rank}_*")})
    if rank == 0:
        _put_in_place(being_written, final, {"step": step, **state, SUMS: sums})
    _barrier()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            total = zlib.crc32(piece, total)
    return total


def _gathered(mine: dict[str, int]) -> dict[str, int]:
    """The entries of all ranks, on every rank."""
    if not dist.is_initialized():
        return mine
    found: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {name: value for part in found for name, value in part.items()}


def _disks_fault(error: BaseException) -> str:
    """The operating system's message somewhere in the causes of a failed save; empty if the disk is not to blame."""
    left, seen = [error], set()
    while left:
        cause = left.pop()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        seen.add(id(cause))
        failures = cause.failures.values() if isinstance(cause, CheckpointException) else ()
        behind = [cause.__cause__, cause.__context__, *(failure[0] for failure in failures)]
        left += [e for e in behind if e is not None and id(e) not in seen]
    return (
        "a write failed, as on a full disk" if "inline_container.cc" in str(error) else ""
    )  # the file writer of PyTorch


def _why_not(folder: Path, strategy: Any, optimizer: Optimizer, step: int, reason: str) -> str:
    """One sentence for a checkpoint that was not written."""
    tensors = [
        *strategy.model.parameters(),
        *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    old = newest(folder)
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {reason}. It needs about {needed / 1e6:,.1f} MB, and "
        f"{shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6:,.1f} MB are free there; "
        + (f"the previous one, {old}, is complete" if old else "there is no earlier one")
    )


def _put_in_place(being_written: Path, final: Path, state: dict[str, Any]) -> None:
    with open(being_written / STATE, "w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    os.replace(being_written, final)
    for old in final.parent.glob("step_????????"):
        if old.name < final.name:
            shutil.rmtree(old, ignore_errors=True)


def load(options: Options, strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Load model and optimizer from the newest checkpoint, in place; return the rest of it."""
    assert options.checkpoint is not None
    path = newest(options.checkpoint)
    assert path is not None
    if path.name == FILE:
        return load_checkpoint(path, strategy.model, optimizer)
    if strategy.is_native:
        load_sharded(path, strategy.model, optimizer)
    else:
        prime(optimizer)
        contents = _contents(strategy, optimizer)
        dcp.load(contents, checkpoint_id=path)
        for name, p in strategy.named().items():
            kept = contents["optimizer"].get(name, {})
            optimizer.state[p].update({key: value for key, value in kept.items() if not torch.is_tensor(value)})
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    state.pop(SUMS, None)
    return state


def _contents(strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state by name. Divided tensors are DTensors that share memory with the run's own."""
    named = strategy.named()
    kept: dict[str, dict[str, Any]] = {}
    for name, p in named.items():
        alike = {k: torch.is_tensor(v) and v.shape == p.shape and v.ndim > 0 for k, v in optimizer.state[p].items()}
        kept[name] = {k: strategy.as_dtensor(name, v) if alike[k] else v for k, v in optimizer.state[p].items()}
    return {"model": {name: strategy.as_dtensor(name, p) for name, p in named.items()}, "optimizer": kept}


@torch.no_grad()
def prime(optimizer: Optimizer) -> None:
    """Let an optimizer create its state without changing a parameter: one step with zero gradients, zero lr and no decay."""
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value):
                value.zero_()
            elif key == "step":
                state[key] = 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
