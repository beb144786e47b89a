"""Random inputs that many tests share, and what they watch."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers: the same seed gives the same numbers on every machine and, up to rounding, in every dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is copied to the host: item(), float(), if, tolist()."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors that an object holds: its attributes, and the entries of its dicts, lists, tuples, sets and deques."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif isinstance(thing, nn.Module) or type(thing).__module__ not in ("builtins", "collections", "torch"):
        thing = list(getattr(thing, "__dict__", {}).values())
    return [t for part in thing for t in tensors_in(part)] if isinstance(thing, list | tuple | set | deque) else []
