"""Checkpoints: one file, chapter 7's, where every rank holds the whole model, and a folder where each holds a part.

The file is ``<folder>/checkpoint.pt``. The folder is ``<folder>/step_00000100/``, with a file from each rank. Both are
written under another name and renamed when they are complete, so a reader finds the old checkpoint or the new one,
never half of one.

Both hold whole parameters under the model's own names, so a run on any mesh can load either. To write a folder,
the ranks assemble one tensor after the other, and each rank keeps some of them. To load it, each rank reads one tensor
after the other and takes its part.
"""

import json
import os
import pickle
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lib.given.data.weights import why
from lib.given.parallel.mail import Mail, Message
from lib.runs.engine.export import TOKENIZER, write_tokenizer
from lib.runs.engine.options import CONTENTS, Options
from lib.runs.engine.sources import Codec
from lib.runs.engine.strategy import local
from lib.runs.flags import UsageError
from lib.training import load_checkpoint, save_checkpoint

FILE, STATE, SUMS, COUNTS, MODEL = "checkpoint.pt", "state.json", "checksums", "counts", "model"


def newest(folder: Path) -> Path | None:
    """The complete checkpoint in a folder that was written last (several are there only for a moment), or None."""
    found = [path for path in sorted(folder.glob("step_????????")) if (path / STATE).exists()][-1:]
    found += [folder / FILE] if (folder / FILE).exists() else []
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def stamp(options: Options) -> tuple[Path, int] | None:
    """The newest checkpoint of a run's folder and when it was written; None if there is none."""
    path = newest(options.checkpoint) if options.checkpoint else None
    return (path, path.stat().st_mtime_ns) if path else None


def check_unchanged(options: Options, before: tuple[Path, int] | None) -> None:
    """Check that the newest checkpoint is the one that was looked at before the folder was locked.

    Raises:
        UsageError: another run has written one meanwhile.
    """
    if stamp(options) != before:
        raise UsageError(
            f"{options.checkpoint_flag} {options.checkpoint}: another run wrote a checkpoint there while this one "
            "started, and has "
            "ended; start this one again"
        )


def peek(options: Options, rank: int = 0, world_size: int = 1) -> dict[str, Any] | None:
    """The description of its run that the newest checkpoint holds, without its tensors; None if there is no checkpoint.

    Checksums are verified too, because a byte that flipped on a disk would otherwise come back as
    a wrong weight or as NaN.
    Each rank reads its share of a folder's files.

    Raises:
        UsageError: the checkpoint cannot be read, or is damaged.
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
        if not isinstance(state["run"], dict):
            raise TypeError("it does not say which run it is of")
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{options.checkpoint_flag} {path} cannot be read: "
            f"it holds more than tensors and plain values{why(error)}; "
            "nothing was run"
        ) from None
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[:1]
        raise UsageError(
            f"{options.checkpoint_flag} {path} cannot be read: {reason[0] if reason else type(error).__name__}"
        ) from None
    if damaged:
        raise UsageError(
            f"{options.checkpoint_flag} {path} is damaged: {damaged} is not what was written; "
            "expected an intact copy, or none"
        )
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
        if was != value and name in state["run"]:  # checkpoints written before an entry was kept lack it
            if isinstance(value, dict) and isinstance(was, dict):
                names = (k for k in {**was, **value} if was.get(k) != value.get(k))
                name = next(names, name)
                was, value = was.get(name), value.get(name)
            if name == CONTENTS:
                raise UsageError(
                    f"{options.checkpoint_flag} {options.checkpoint} is of a run that read other contents, "
                    f"or another tokenizer, from --data {options.data} "
                    f"(digest {was}, now {value}); expected the data that the run began with, or another folder"
                )
            raise UsageError(
                f"{options.checkpoint_flag} {options.checkpoint} is of a run with {name} = {was!r}, "
                f"this one has {value!r}"
            )
    if state["step"] > options.steps:
        raise UsageError(
            f"{options.checkpoint_flag} {options.checkpoint} is at step {state['step']}, beyond --steps {options.steps}"
        )


class NotSaved(OSError):
    """A checkpoint could not be written; the message names the place, the space that it needs,
    and the newest one that is still there.
    """


def save(
    options: Options, strategy: Any, optimizer: Optimizer, step: int, codec: Codec | None = None, **state: Any
) -> None:
    """Write a checkpoint. All ranks call this together; when it returns on any rank, the checkpoint is in its place.

    Args:
        options, strategy, optimizer: Those of the run.
        step: Steps done so far.
        codec: The run's tokenizer, which is written beside the folder's first checkpoint.
        state: Plain values to save with it.

    Raises:
        NotSaved: the disk is full, or cannot be written to.
    """
    assert options.checkpoint is not None
    try:
        _save(options.checkpoint, strategy, optimizer, step, codec, state)
    except (OSError, RuntimeError, CheckpointException) as error:
        if reason := _disks_fault(error):
            raise NotSaved(_why_not(options.checkpoint, strategy, optimizer, step, reason)) from None
        raise


def _save(
    folder: Path, strategy: Any, optimizer: Optimizer, step: int, codec: Codec | None, state: dict[str, Any]
) -> None:
    if _rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if newest(folder) is None or not (folder / TOKENIZER).exists():
            write_tokenizer(folder, codec)
    if strategy.is_divided:
        _save_divided(folder, strategy, optimizer, step, state)
    elif _rank() == 0:
        save_checkpoint(folder / FILE, strategy.model, optimizer, step, **state)
        for old in folder.glob("step_????????"):
            shutil.rmtree(old, ignore_errors=True)
    if not getattr(strategy, "is_alone", False):
        _barrier()


def _save_divided(folder: Path, strategy: Any, optimizer: Optimizer, step: int, state: dict[str, Any]) -> None:
    """A folder into which every rank writes its part; it gets its name when all have."""
    final = folder / f"step_{step:08d}"
    being_written = final.with_name(f".{final.name}")
    if _rank() == 0:
        for left in folder.glob(".step_????????"):  # left by runs that were killed while they saved
            shutil.rmtree(left)
        being_written.mkdir()
    _barrier()
    dcp.save(_contents(strategy, optimizer), checkpoint_id=being_written)
    sums = _gathered({path.name: checksum(path) for path in being_written.glob(f"__{_rank()}_*")})
    if _rank() == 0:
        counts = {key: n for p in strategy.named().values() for key, n in _counts(optimizer.state[p], p).items()}
        _put_in_place(being_written, final, {"step": step, **state, COUNTS: counts, SUMS: sums})
        (folder / FILE).unlink(missing_ok=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
        f"the checkpoint of step {step} could not be written to {folder}: {reason}. "
        f"It needs about {needed / 1e6:,.1f} MB, and "
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
    if path.name == FILE and not strategy.is_divided:
        return load_checkpoint(path, strategy.model, optimizer)
    prime(optimizer)
    read, counts, state = (_open_file if path.name == FILE else _open_folder)(path, strategy)
    with torch.no_grad():
        for name, p in strategy.named().items():
            tensors = {MODEL: p, **{key: value for key, value in optimizer.state[p].items() if _is_like(value, p)}}
            found = read(list(tensors), strategy.members(name))
            for key, tensor in tensors.items():
                local(tensor).copy_(strategy.take(name, found[key]))
            for key, count in counts.items():
                kept = optimizer.state[p]
                if key not in kept:  # Muon counts no steps
                    continue
                kept[key] = torch.full_like(kept[key], count) if torch.is_tensor(kept[key]) else type(kept[key])(count)
    return state


def read_model(folder: Path) -> dict[str, Tensor]:
    """The whole parameters in the newest checkpoint of a folder, by the model's names, on the host."""
    path = newest(folder)
    assert path is not None
    if path.name == FILE:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[MODEL]
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name.removeprefix(f"{MODEL}.") for name in described if name.startswith(f"{MODEL}.")]
    return _read_folder(path, [MODEL], names)[MODEL]


def gather_model(strategy: Any, device: torch.device) -> dict[str, Tensor]:
    """The whole parameters, by the model's names, on rank 0's host; on the other ranks nothing.

    All ranks call it together.
    """
    mesh, mine = strategy.mesh, dict[str, Tensor]()
    for name, p in strategy.named().items():
        for member, whole in strategy.whole(name, p).items():
            if mesh.stage_rank == 0:
                mine[member] = whole.to("cpu", copy=True)
    if mesh.size["pipeline"] == 1 or mesh.stage_rank:
        return mine
    mail = Mail(mesh.group("pipeline"))
    senders = list(enumerate(mail.gather(list(mine))))[1:]
    sent = [(name, Message((stage, name), stage, 0)) for stage, names in senders for name in names]
    with mail.delivering([message for _, message in sent], device):
        for name, message in sent:
            if message.sender == mail.rank:
                mail.send(message, mine[name].to(device))
            elif mail.rank == 0:
                mail.expect(message)
                mine[name] = mail.take(message.name).cpu()
    return mine if mail.rank == 0 else {}


def _is_like(value: Any, p: Tensor) -> bool:
    """Whether an optimizer's value has a number for each element of the parameter; a count of steps does not."""
    return torch.is_tensor(value) and value.ndim > 0 and value.shape == p.shape


def _contents(strategy: Any, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The whole tensors that this rank writes.

    The ranks of a stage assemble each tensor together, and the rank with the fewest bytes so far keeps it on its host.
    """
    mine: dict[str, dict[str, Tensor]] = {}
    n_bytes = [0] * strategy.mesh.stage_size
    elsewhere = () if strategy.loss.is_first else strategy.tied
    for name, p in strategy.named().items():
        tensors = {MODEL: p, **{key: value for key, value in optimizer.state[p].items() if _is_like(value, p)}}
        for key, tensor in tensors.items():
            for member, whole in strategy.whole(name, tensor).items():
                writer = n_bytes.index(min(n_bytes))
                n_bytes[writer] += whole.nbytes
                if writer == strategy.mesh.stage_rank and member not in elsewhere:
                    mine.setdefault(key, {})[member] = whole.detach().to("cpu", copy=True)
    return mine


def _counts(state: dict[str, Any], p: Tensor) -> dict[str, float]:
    """What an optimizer keeps for a parameter as a whole, such as the number of its steps,
    which is the same for all parameters.
    """
    return {key: float(value) for key, value in state.items() if not _is_like(value, p) and value is not None}


Read = Callable[[list[str], list[str]], dict[str, dict[str, Tensor]]]
"""Whole tensors by kind ("model", or the name in the optimizer's state) and parameter."""


def _open_file(path: Path, strategy: Any) -> tuple[Read, dict[str, float], dict[str, Any]]:
    """The tensors of a file, in which the optimizer numbers its parameters: those that decay come first."""
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    names = sorted(saved[MODEL], key=lambda name: (name not in strategy.matrices, name not in strategy.decays))
    kept = {names[i]: state for i, state in saved["optimizer"]["state"].items()}

    def read(keys: list[str], members: list[str]) -> dict[str, dict[str, Tensor]]:
        model = saved[MODEL]
        zeros = {
            n: torch.zeros_like(model[n]) for n in members if any(key not in kept[n] for key in keys if key != MODEL)
        }
        return {key: {n: model[n] if key == MODEL else kept[n].get(key, zeros.get(n)) for n in members} for key in keys}

    counts = {key: n for name, state in kept.items() for key, n in _counts(state, saved[MODEL][name]).items()}
    return read, counts, saved["state"]


def _open_folder(path: Path, strategy: Any) -> tuple[Read, dict[str, float], dict[str, Any]]:
    """The tensors of a folder. Each rank reads what it needs, without the others."""
    read = partial(_read_folder, path)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    state.pop(SUMS, None)
    return read, state.pop(COUNTS), state


def _read_folder(path: Path, keys: list[str], members: list[str]) -> dict[str, dict[str, Tensor]]:
    """Whole tensors of a folder, as ``Read`` returns them, read by this rank alone."""
    described: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    there = {key: [n for n in members if f"{key}.{n}" in described] for key in keys}
    found = {key: {n: torch.empty(described[f"{key}.{n}"].size) for n in names} for key, names in there.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it points out that this rank reads alone
        dcp.load({key: tensors for key, tensors in found.items() if tensors}, checkpoint_id=path, no_dist=True)
    for key in keys:  # Muon keeps no squares
        found[key] |= {n: torch.zeros(described[f"{MODEL}.{n}"].size) for n in members if n not in found[key]}
    return found


@torch.no_grad()
def prime(optimizer: Optimizer) -> None:
    """Let an optimizer create its state without changing a parameter: one step with zero gradients,
    zero lr and no decay.
    """
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0 * group["lr"], 0.0  # a tensor's rate stays a tensor
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    forget(optimizer)


def forget(optimizer: Optimizer) -> None:
    """Make an optimizer's state, in place, what it was before the first step."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value):
                value.zero_()
            elif key == "step":
                state[key] = 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
