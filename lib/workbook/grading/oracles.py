"""Oracles: implementations from other libraries. Maintainers run them live; learners get their recorded values."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from lib.workbook.book.catalog import BookError

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")

RECORDING: dict[str, bool] = {"live": False, "write": False}


def oracle(test: Callable[P, None]) -> Callable[P, None]:
    """Mark a test that needs packages only maintainers install; it runs with ``--reference`` only."""
    test.workbook_oracle = True  # type: ignore[attr-defined]
    return test


def recorded(name: str, compute: Callable[[], "Tensor"], needs: str | None = None) -> "Tensor":
    """An oracle's value: computed live under ``--reference``, and read from the chapter's record in a learner's run.

    Args:
        name: The value's key in the record; unique in the chapter.
        compute: Runs the oracle and returns a tensor; it imports the oracle's package itself.
        needs: A package that no extra of this project installs. Without it the value is read from the record always,
            and ``--record`` keeps what is there.

    Raises:
        BookError: the value is not recorded, or no longer agrees with the oracle.
    """
    import torch
    from safetensors import torch as safetensors

    path = _record_path(Path(sys._getframe(1).f_code.co_filename))
    # its bytes, because safetensors opens no path that is not UTF-8
    stored = safetensors.load(path.read_bytes()) if path.exists() else {}
    if not RECORDING["live"] or (needs and find_spec(needs) is None):
        if name not in stored:
            raise BookError(
                f"{path} has no value {name!r}; a maintainer writes it with: pytest --reference --record {path.parent}"
            )
        return stored[name]
    value = compute().detach().contiguous()
    if RECORDING["write"]:
        _write_record(path, {**stored, name: value})
    elif name not in stored or not torch.allclose(stored[name].double(), value.double(), rtol=1e-4, atol=1e-5):
        why = "no longer agrees with the oracle" if name in stored else "is not recorded"
        raise BookError(f"{path}: {name!r} {why}; write it with: pytest --reference --record {path.parent}")
    return value


def _record_path(test_file: Path) -> Path:
    return test_file.with_name("oracle.safetensors")


def _write_record(path: Path, values: dict[str, "Tensor"]) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from safetensors.torch import save_file

    versions = {}
    for package in ("torch", "transformers", "tokenizers", "tiktoken", "peft", "verl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(dict(sorted(values.items())), temporary, metadata=versions)
    os.replace(temporary, path)
