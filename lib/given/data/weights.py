"""Read the weights that others have published: safetensors in shards with an index, and Meta's ``.pth`` files.

Whatever is wrong with a checkpoint comes in one error that lists all of it, so that a download of hours is mended once.
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

# Along which dimension Meta cut each tensor of a model in several consolidated files; the rest is whole in each.
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
        problems: Everything that is wrong with it, a line each.
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
        path: A ``.safetensors`` or ``.pth`` file, or a folder: with ``model.safetensors.index.json`` and its shards, with
            ``model.safetensors``, or with Meta's ``consolidated.NN.pth``.
        expected: The shape that each name should have; None takes what there is.
        ignore: Ends of names that are left out, as ``"rotary_emb.inv_freq"`` of older checkpoints and Meta's ``"rope.freqs"``.

    Raises:
        FileNotFoundError: nothing there is a checkpoint; the message says what was looked for.
        CheckpointError: shards that are missing, cut short or hold other than tensors; tensors that are missing,
            unknown or of a wrong shape: all in one message.
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


def find_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and its index (name of a tensor to name of a file) where it has one."""
    if path.is_file() and path.suffix in (".safetensors", ".pth"):
        return [path], {}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(path, [f"{index.name}: no index ({type(error).__name__}: {error})"]) from error
        outside = sorted({file for file in weight_map.values() if Path(file).name != file})
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
    """One file that cannot be read, and why."""


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
    """Only tensors and plain containers are unpickled: a ``.pth`` from a stranger can run no code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an unusual pickle protocol: the error, if any, says more
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
    """What ``torch.load`` met in a file, such as `` (posix.system)``; not its advice, which is to load the file all the same."""
    found = re.search(r"(?:GLOBAL|global:?) (?:GLOBAL )?([\w.]+\.\w+)", str(error))
    return f" ({found[1]})" if found else ""


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _join_meta(parts: list[dict[str, Tensor]], problems: list[str]) -> dict[str, Tensor]:
    """Put the pieces of Meta's larger models together: each file holds a share of every matrix."""
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
    """Tensors that the index promises, and that the (readable) file which it names does not hold."""
    broken = {problem.partition(":")[0] for problem in unreadable}
    return (
        f"missing: {name} (the index says in {file})"
        for name, file in index.items()
        if name not in found and file not in broken and not name.endswith("rotary_emb.inv_freq")
    )


def _problems_of_shapes(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], unread: bool, index: Mapping[str, str]
) -> list[str]:
    # What a broken file holds cannot be known: without an index, nothing is said to be missing.
    missing = [f"missing: {n}" for n in expected if n not in found and n not in index and not (unread and not index)]
    extra = [f"extra: {name}" for name in found if name not in expected]
    wrong = [
        f"wrong shape: {name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    return [*missing, *extra, *wrong]
