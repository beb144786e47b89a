"""Checkpoints: one file where every rank has all (chapter 7's), a folder into which each puts its part where not; atomic both.

``<folder>/checkpoint.pt``, or ``<folder>/step_00000100/``, which is written under another name and moved into its place when it is whole.
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer

from lib.fsdp import load_sharded, save_sharded
from lib.runs.engine.options import Options, UsageError
from lib.training import load_checkpoint, save_checkpoint

FILE, STATE = "checkpoint.pt", "state.json"


def layout(options: Options) -> str:
    """What a checkpoint of this run is made of; ``single`` and ``ddp`` read each other's."""
    return "whole" if options.strategy in ("single", "ddp") else f"{options.strategy}, {options.engine}"


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder."""
    if (folder / FILE).exists():
        return folder / FILE
    found = sorted(path for path in folder.glob("step_????????") if (path / STATE).exists())
    return found[-1] if found else None


def peek(options: Options) -> dict[str, Any] | None:
    """What the newest checkpoint says about its run, without its tensors; None if there is none.

    Raises:
        UsageError: it cannot be read, or is of another layout.
    """
    path = newest(options.checkpoint) if options.checkpoint else None
    if path is None:
        return None
    try:
        if path.name == FILE:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state"]
        else:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
        was = state["run"]["layout"]
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise UsageError(
            f"--checkpoint {path} cannot be read: {reason[0] if reason else type(error).__name__}"
        ) from None
    if was != layout(options):
        raise UsageError(f"--checkpoint {path} holds a run of layout {was!r}, expected {layout(options)!r}")
    return state


def check_same_run(options: Options, state: dict[str, Any] | None, run: dict[str, Any]) -> None:
    """Whether a checkpoint is one of this run.

    Raises:
        UsageError: something differs; the message names the first such thing, and both values.
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


def save(options: Options, strategy: Any, optimizer: Optimizer, step: int, **state: Any) -> None:
    """Write a checkpoint; all ranks call it together, and it is in its place when any returns.

    Args:
        options, strategy, optimizer: Of the run.
        step: Steps done.
        state: Plain values.
    """
    assert options.checkpoint is not None
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        options.checkpoint.mkdir(parents=True, exist_ok=True)
    if not strategy.is_sharded:
        if rank == 0:
            save_checkpoint(options.checkpoint / FILE, strategy.model, optimizer, step, **state)
        _barrier()
        return
    final = options.checkpoint / f"step_{step:08d}"
    being_written = final.with_name(f".{final.name}")
    if rank == 0:
        for left in options.checkpoint.glob(".step_????????"):  # by runs that were killed while they saved
            shutil.rmtree(left)
        being_written.mkdir()
    _barrier()
    if strategy.is_native:
        save_sharded(being_written, strategy.model, optimizer)
    else:
        dcp.save(_contents(strategy, optimizer), checkpoint_id=being_written)
    _barrier()
    if rank == 0:
        _put_in_place(being_written, final, {"step": step, **state})
    _barrier()


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
    """Put model and optimizer back where the newest checkpoint saw them, in place; the rest is returned."""
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
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def _contents(strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and the optimizer's state by name, cut tensors as DTensors in memory shared with the run's own."""
    named = strategy.named()
    kept: dict[str, dict[str, Any]] = {}
    for name, p in named.items():
        alike = {k: torch.is_tensor(v) and v.shape == p.shape and v.ndim > 0 for k, v in optimizer.state[p].items()}
        kept[name] = {k: strategy.as_dtensor(name, v) if alike[k] else v for k, v in optimizer.state[p].items()}
    return {"model": {name: strategy.as_dtensor(name, p) for name, p in named.items()}, "optimizer": kept}


@torch.no_grad()
def prime(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, and change no parameter: a step of zero gradients, without lr and without decay."""
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
