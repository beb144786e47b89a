"""What tests see of a learner's code from outside: reads by the host, and tensors that an object keeps."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is copied to the host: item(), float(), if, tolist(); and, in ``n_masks``, how
    often the host must ask how many numbers are left: x[mask], nonzero().
    """

    def __init__(self):
        super().__init__()
        self.n = self.n_masks = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.n += func is aten._local_scalar_dense.default
        is_mask = func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.n_masks += is_mask or func in (aten.nonzero.default, aten.masked_select.default)
        return func(*args, **(kwargs or {}))


def tensors_in(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors that an object holds: its attributes, and the entries of its dicts, lists, tuples,
    sets and deques; each once.
    """
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set | deque):
        parts = list(thing)
    elif isinstance(thing, nn.Module) or type(thing).__module__ not in ("builtins", "collections", "torch"):
        parts = list(getattr(thing, "__dict__", {}).values())
    else:
        parts = []
    return [t for part in parts for t in tensors_in(part, seen)]
