"""Memory: how much there is, and one line for a request that needs more."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from lib.given.models.serving import cache_sizes
from lib.runs.flags import UsageError

CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Below /sys/fs/cgroup: the limit of a container and what it uses, in the newer and the older form."""
SIGNS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "out of memory",
         "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # fmt: skip
"""What PyTorch says in a ``RuntimeError`` when memory runs out."""
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device, as far as the system tells.

    On a CPU that is the memory without what others use, plus swap, and no more than the limits of a container and of
    ``ulimit -v`` leave.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [psutil.virtual_memory().available + psutil.swap_memory().free]
    for limit, used in CGROUPS:
        try:
            numbers = [int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used)]
        except (OSError, ValueError):  # no such file, or "max"
            continue
        found.append(numbers[0] - numbers[1])
    if sys.platform == "linux":
        import resource

        limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            found.append(limit_bytes - psutil.Process().memory_info().vms)
    return max(0, min(found))


def shown(n_bytes: float) -> str:
    """A number of bytes in the largest unit that leaves a digit before the point."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes:,.0f} bytes"


def block_bytes(config: Any, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block of a paged cache: keys and values of all layers."""
    n_layers, n_kv_heads, head_dim = cache_sizes(config)
    return 2 * n_layers * n_kv_heads * head_dim * block_size * dtype.itemsize


def state_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the states of a sequence in the model's linear layers, whatever its length."""
    if "linear_attention" not in getattr(config, "layer_types", ()):
        return 0
    from lib.linear_attention import hybrid_cache_bytes

    return hybrid_cache_bytes(config, 1, 0, dtype.itemsize, max(dtype.itemsize, 4))


def check_need(n_bytes: int, device: torch.device, what: str, flags: Iterable[str]) -> None:
    """Refuse what cannot fit, before anything is allocated or written.

    Args:
        n_bytes: A lower bound of what is needed.
        device: Where.
        what: What needs it, with the values that were asked for.
        flags: Flags that change it.

    Raises:
        UsageError: there is less; one line says what needs how much, how much there is, and which flags change it.
    """
    free = free_bytes(device)
    if n_bytes > free:
        raise UsageError(
            f"{what}: at least {shown(n_bytes)} of memory are needed, and {shown(free)} are free on {device}; "
            f"expected {_listed(flags)}"
        )


def shortage(error: BaseException, flags: Iterable[str], device: torch.device | None = None) -> str | None:
    """One line about memory that ran out; None if the error is about something else.

    Args:
        error: What was raised.
        flags: Flags that change how much is needed.
        device: Where to look for what is free; the error itself says if it was a GPU.
    """
    said = " ".join(str(error).split())
    is_gpu = isinstance(error, torch.OutOfMemoryError)
    is_short = isinstance(error, RuntimeError) and any(sign in said for sign in SIGNS)
    if not (is_gpu or is_short or isinstance(error, MemoryError)):
        return None
    asked = _asked(said)
    where = device or torch.device("cuda" if is_gpu or "CUDA" in said else "cpu")
    try:
        there = f"{shown(free_bytes(where))} are free on {where}"
    except RuntimeError:  # a GPU that tells nothing any more
        there = f"too little is free on {where}"
    more = f"{shown(asked)} more were asked for at once" if asked else "more was asked for"
    return f"out of memory: {more}, and {there}; expected {_listed(flags)}"


def _asked(said: str) -> float | None:
    """Bytes that an error message says were asked for."""
    if found := re.search(r"tried to allocate (\d+) bytes", said):
        return float(found[1])
    if found := re.search(r"(?:Tried|Unable) to allocate ([\d.]+) ([KMGTPE]iB)", said):
        return float(found[1]) * UNITS[found[2]]
    if found := re.search(r"sizes=\[([\d, ]+)\]", said):
        product = 4.0
        for size in found[1].split(","):
            product *= int(size)
        return product
    return None


def _listed(flags: Iterable[str]) -> str:
    """The flags as a phrase; one that begins with "more" or "fewer" keeps its word, the others get "a smaller"."""
    *first, last = [flag if " " in flag else f"a smaller {flag}" for flag in flags]
    return f"{', '.join(first)} or {last}" if first else last
