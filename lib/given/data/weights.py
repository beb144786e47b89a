"""Read published weights: safetensors in shards with an index, and Meta's ``.pth`` files.

If anything is wrong with a checkpoint, one error lists all of it,
so that a download of hours has to be repaired only once.
"""

import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

# The dimension along which Meta cut each tensor of a model that comes in several files; the others are whole in each.
META_CUTS = {
    "tok_embeddings": 1,
    "output": 0,
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wo": 1,
    "w1": 0,
    "w2": 1,
    "w3": 0,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used.

    Attributes:
        problems: Everything that is wrong with the checkpoint, one line each.
    """

    def __init__(self, path: Path, problems: list[str]):
        n = len(problems)
        super().__init__("\n  ".join([f"{path}: {n} problem{'s' if n > 1 else ''}", *problems]))
        self.problems = problems


def load_weights(
    path: str | os.PathLike, expected: Mapping[str, tuple[int, ...]] | None = None, *, ignore: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name, on the CPU, in the dtypes that they were saved in.

    Args:
        path: A ``.safetensors`` or ``.pth`` file, or a folder: with ``model.safetensors.index.json`` and its shards,
            with ``model.safetensors``, or with Meta's ``consolidated.NN.pth``.
        expected: The shape that each name should have; None accepts any names and shapes.
        ignore: Endings of names to leave out, such as ``"rotary_emb.inv_freq"`` in older checkpoints and Meta's
            ``"rope.freqs"``.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``; the message says what was looked for.
        CheckpointError: a shard is missing, is cut short, or holds something other than tensors,
            or a tensor is missing, unknown or of a wrong shape.
            One message lists all of these.
    """
    path, problems = Path(path), []
    files, index = find_files(path)
    parts: list[dict[str, Tensor]] = []
    for file in files:
        try:
            parts.append(_read(file))
        except _Unreadable as error:
            problems.append(f"{file.name}: {error}")
    if files[0].suffix == ".pth" and len(files) > 1:
        found = _join_meta(parts, problems) if len(parts) == len(files) else {}
    else:
        found = {name: tensor for part in parts for name, tensor in part.items()}
    found = {name: tensor for name, tensor in found.items() if not name.endswith(ignore or ("\0",))}
    problems += _problems_of_index(index, found, problems)
    unread = bool(problems)
    problems += _problems_of_shapes(found, expected or {}, unread, dict(index)) if expected is not None else []
    if problems:
        raise CheckpointError(path, problems)
    return found


def check_shapes(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare tensors that were read from ``path`` with the names and shapes that a model has.

    Raises:
        CheckpointError: a tensor is missing, unknown or of a wrong shape; one message lists all of these.
    """
    problems = _problems_of_shapes(found, expected, False, {})
    if problems:
        raise CheckpointError(path, problems)


def find_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and its index (name of a tensor to name of a file) where it has one."""
    if path.is_file() and path.suffix in (".safetensors", ".pth"):
        return [path], {}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            outside = sorted({file for file in weight_map.values() if Path(file).name != file})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(path, [f"{index.name}: no index ({type(error).__name__}: {error})"]) from error
        if not weight_map:
            raise CheckpointError(path, [f"{index.name}: it names no tensor"])
        if outside:
            raise CheckpointError(path, [f"{index.name}: {file} is no file of this folder" for file in outside])
        return [path / file for file in sorted(set(weight_map.values()))], weight_map
    for pattern in ("model.safetensors", "consolidated.*.pth"):
        files = sorted(path.glob(pattern)) if path.is_dir() else []
        if files:
            return files, {}
    raise FileNotFoundError(
        f"no checkpoint at {path}: looked for model.safetensors.index.json, model.safetensors and consolidated.NN.pth "
        f"(a single file must end in .safetensors or .pth)"
    )


class _Unreadable(Exception):
    """A file cannot be read; the message says why."""


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise _Unreadable("the index names it, and it is not there")
    if file.stat().st_size == 0:
        raise _Unreadable("an empty file")
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise _Unreadable(f"cut short or no safetensors file, {file.stat().st_size:,} bytes ({error})") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Only tensors and plain containers are unpickled, so a ``.pth`` from a stranger cannot run code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unusual pickle protocol; the error, if there is one, says more
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except pickle.UnpicklingError as error:
        raise _Unreadable(
            f"holds other things than tensors, or is no checkpoint; nothing was run{why(error)}"
        ) from None
    except Exception as error:  # half a pickle can provoke anything
        size, first = file.stat().st_size, f"{type(error).__name__}: {error}".splitlines()[0]
        raise _Unreadable(f"cut short or no checkpoint, {size:,} bytes ({first})") from error
    if not isinstance(loaded, dict):
        raise _Unreadable(f"holds a {type(loaded).__name__}, where a dict of tensors is expected")
    others = [f"{name} is a {type(value).__name__}" for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise _Unreadable(f"holds other things than tensors: {', '.join(others)}")
    return loaded


def why(error: pickle.UnpicklingError) -> str:
    """The object that ``torch.load`` refused, such as `` (posix.system)``,
    without its advice to load the file all the same.
    """
    found = re.search(r"(?:GLOBAL|global:?) (?:GLOBAL )?([\w.]+\.\w+)", str(error))
    return f" ({found[1]})" if found else ""


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _join_meta(parts: list[dict[str, Tensor]], problems: list[str]) -> dict[str, Tensor]:
    """Join the pieces of Meta's larger models, in which each file holds a share of every matrix."""
    joined = {}
    for name in sorted({name for part in parts for name in part}):
        pieces = [part[name] for part in parts if name in part]
        if len(pieces) < len(parts):
            problems.append(f"{name}: in {len(pieces)} of {len(parts)} files")
            continue
        dim = META_CUTS.get(name.split(".")[-2] if "." in name else name)
        if dim is None:
            joined[name] = pieces[0]
            continue
        rest = {tuple(n for d, n in enumerate(piece.shape) if d != dim) for piece in pieces}
        if len(rest) > 1:
            problems.append(f"{name}: pieces of {[list(p.shape) for p in pieces]} do not fit together along {dim}")
            continue
        joined[name] = torch.cat(pieces, dim)
    return joined


def _problems_of_index(index: Mapping[str, str], found: Mapping[str, Tensor], unreadable: list[str]) -> Iterator[str]:
    """Tensors that the index lists in a file that can be read, but that are not in this file."""
    broken = {problem.partition(":")[0] for problem in unreadable}
    for name, file in index.items():
        is_optional = name.endswith("rotary_emb.inv_freq")  # a buffer that old files hold; it follows from the settings
        if not (name in found or file in broken or is_optional):
            yield f"missing: {name} (the index says in {file})"


def _problems_of_shapes(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], unread: bool, index: Mapping[str, str]
) -> list[str]:
    if unread and not index:  # nobody can know what was in the broken file
        absent: list[str] = []
    else:  # what the index lists is missed by ``_problems_of_index``
        absent = [name for name in expected if name not in found and name not in index]
    missing = [f"missing: {name}" for name in absent]
    extra = [f"extra: {name}" for name in found if name not in expected]
    wrong = [
        f"wrong shape: {name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    return [*missing, *extra, *wrong]
