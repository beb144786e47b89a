"""Records every call of torch.distributed's functions in the rank's journal."""

import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lib.ranks.journal import Journal

# name: (the argument that the rank passes in, the argument that must be equal on all ranks)
_CALLS: dict[str, tuple[str, str]] = {
    "all_reduce": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor"),
    "all_gather_into_tensor": ("input_tensor", "input_tensor"),
    "all_gather_single": ("input_tensor", "input_tensor"),
    "gather": ("tensor", "tensor"),
    "scatter": ("scatter_list", "tensor"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
    "all_to_all_single": ("input", ""),
    "all_to_all": ("input_tensor_list", ""),
    "barrier": ("", ""),
    "monitored_barrier": ("", ""),
    "send": ("tensor", "tensor"),
    "isend": ("tensor", "tensor"),
    "recv": ("tensor", "tensor"),
    "irecv": ("tensor", "tensor"),
    "all_gather_object": ("obj", ""),
    "gather_object": ("obj", ""),
    "broadcast_object_list": ("object_list", ""),
    "scatter_object_list": ("scatter_object_input_list", ""),
    "new_group": ("", ""),
}
_FROM_ROOT = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list")
_TO_ROOT = ("reduce", "gather", "gather_object")


class Pending:
    """The handle of an operation that was started, with a ``wait`` that is recorded."""

    def __init__(self, work: dist.Work, journal: Journal, index: int):
        self._work, self._journal, self._index = work, journal, index

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        with self._journal.waiting(self._index):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def record_collectives(journal: Journal) -> None:
    """Replace torch.distributed's functions by recording ones, in this process, for good.

    ``batch_isend_irecv`` needs no replacement: it calls ``isend`` and ``irecv``, which are recorded.
    """
    for name in filter(functools.partial(hasattr, distributed_c10d), _CALLS):
        function = _recorded(name, getattr(distributed_c10d, name), journal)
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)


def _recorded(name: str, function: Callable[..., Any], journal: Journal) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if journal.is_inside:
            return function(*args, **kwargs)
        try:
            facts = _facts(name, signature.bind(*args, **kwargs).arguments)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            return function(*args, **kwargs)  # its error says what is wrong with the arguments
        with journal.call(name, **facts) as index:
            result = function(*args, **kwargs)
        return Pending(result, journal, index) if isinstance(result, dist.Work) else result

    return call


def _facts(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A call's entry in the ledger, from its arguments."""
    group = given.get("group") or distributed_c10d._get_default_group()
    ranks = dist.get_process_group_ranks(group)
    passed_in, alike = _CALLS[name]
    to, source, root = _peers(name, given, ranks)
    here = dist.get_rank()
    if name in _FROM_ROOT:
        sends = here == root
    elif name in _TO_ROOT:
        sends = here != root
    else:
        sends = name not in ("recv", "irecv")
    facts: dict[str, Any] = {"to": to, "source": source, "root": root, "sends": sends, "group": ranks}
    facts["group_size"] = len(ranks)
    facts["stream"] = name if name == "new_group" else group.group_name
    facts["is_async"] = bool(given.get("async_op")) or name in ("isend", "irecv")
    facts["n_bytes"] = _n_bytes(given.get(passed_in))
    if isinstance(tensor := given.get(alike), Tensor):
        facts.update(n_elements=tensor.numel(), dtype=str(tensor.dtype).removeprefix("torch."))
    elif isinstance(tensor := given.get(passed_in), Tensor):
        facts["dtype"] = str(tensor.dtype).removeprefix("torch.")
    if source is not None and facts.get("n_elements") is not None:
        facts["room"] = facts["n_elements"], facts["dtype"]
    return facts


def _peers(name: str, given: dict[str, Any], ranks: list[int]) -> tuple[int | None, int | None, int | None]:
    """Destination, source and root of a call, as ranks of the world; -1 is any source."""
    peer = None
    for key in ("dst", "src"):
        if given.get(key) is not None:
            peer = given[key]
        elif given.get(f"group_{key}") is not None:
            peer = ranks[given[f"group_{key}"]]
    if name in ("send", "isend"):
        return peer, None, None
    if name in ("recv", "irecv"):
        return None, -1 if peer is None else peer, None
    return None, None, (0 if peer is None else peer) if name in _FROM_ROOT + _TO_ROOT else None


def _n_bytes(payload: Any) -> int:
    if payload is None:
        return 0
    if isinstance(payload, Tensor):
        return payload.nbytes
    if isinstance(payload, list | tuple) and all(isinstance(part, Tensor) for part in payload):
        return sum(part.nbytes for part in payload)
    try:
        return len(pickle.dumps(payload))
    except Exception:
        return 0
