"""Record which program reads and writes which element of memory; in the interpreter only.

Masked places of a ``tl.load`` without ``other``, which Triton leaves undefined, are NaN here.

with trace() as seen:
    out = vector_add(x, y)
seen.bytes_loaded, seen.writer(out)

``trace(stop_outside=True)`` ends a kernel at its first load or store outside the tensors that it was given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

FAR_BYTES = 1 << 20  # an access further away than this belongs to none of the tensors


class OutOfBounds(IndexError):
    """A kernel loaded or stored outside the tensors that it was given.

    Attributes:
        problem: The operation, the tensor, and the side on which it went outside.
        place: The program and the offset.
    """

    def __init__(self, problem: str, place: str):
        super().__init__(f"{problem}: {place}")
        self.problem, self.place = problem, place


@dataclass
class Access:
    """One ``tl.load`` or ``tl.store`` of one program, without masked addresses. An atomic counts as one of each."""

    program: int
    stores: bool
    addresses: np.ndarray
    item_bytes: int


@dataclass
class Trace:
    """Everything that the launches under ``trace()`` did.

    Attributes:
        launches: Name, grid and tensors of each launch. The tensors are kept alive, so that no address is reused.
        given: The tensors of the last launch, by the names of the kernel's parameters.
        index: Position of the last program in its grid, such as "3" or "(0, 3)".
        accesses: Loads and stores, in order. The numbers of programs continue from launch to launch.
        n_atomics: Atomic operations of all programs, such as ``tl.atomic_add``; each also counts as a load and a store.
        dots: Dtype of the left factor and ``input_precision`` of each ``tl.dot``, such as ("fp32", "IEEE").
    """

    launches: list[tuple[str, tuple[int, ...], list[Tensor]]] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    index: str = ""
    accesses: list[Access] = field(default_factory=list)
    dots: list[tuple[str, str]] = field(default_factory=list)
    n_programs: int = 0
    n_atomics: int = 0

    def _bytes(self, stores: bool) -> int:
        return sum(a.addresses.size * a.item_bytes for a in self.accesses if a.stores == stores)

    @property
    def bytes_loaded(self) -> int:
        """Bytes that all programs read; masked elements do not count."""
        return self._bytes(False)

    @property
    def bytes_stored(self) -> int:
        """Bytes that all programs wrote."""
        return self._bytes(True)

    def count(self, tensor: Tensor, stores: bool) -> np.ndarray:
        """How often each element of ``tensor`` was loaded or stored, in the tensor's shape."""
        where = element_addresses(tensor)
        found = [a.addresses for a in self.accesses if a.stores == stores]
        unique, counts = np.unique(np.concatenate([np.empty(0, np.int64), *found]), return_counts=True)
        return np.array([*counts, 0])[_positions(unique, where)]

    def writer(self, tensor: Tensor) -> np.ndarray:
        """The program that stored each element of ``tensor`` last, or -1, in the tensor's shape."""
        where, writer = element_addresses(tensor), np.full(tensor.shape, -1)
        for access in self.accesses:
            if access.stores:
                writer[np.isin(where, access.addresses)] = access.program
        return writer

    def outside(self, stores: bool) -> int:
        """Number of addresses that belong to no element of any tensor given to a launch."""
        tensors = [element_addresses(t).ravel() for _, _, given in self.launches for t in given]
        inside = np.unique(np.concatenate([np.empty(0, np.int64), *tensors]))
        found = [a.addresses for a in self.accesses if a.stores == stores]
        return int((~np.isin(np.concatenate([np.empty(0, np.int64), *found]), inside)).sum())


def _refuse_outside(seen: Trace, operation: str) -> None:
    """Check that the last access is inside the tensors of the last launch;
    gaps between strided elements are allowed here.

    Raises:
        OutOfBounds: some of it is outside; the error names the tensor that most of the access hit, or else the nearest.
    """
    access, spans = seen.accesses[-1], {name: _span(tensor) for name, tensor in seen.given.items()}
    at = access.addresses
    inside = {name: (at >= first) & (at < end) for name, (first, end) in spans.items()}
    stray = at[~np.any([*inside.values(), np.zeros(at.shape, bool)], axis=0)]
    if not stray.size:
        return
    where = int(stray[0])
    away = {name: max(first - where, where - end + 1) for name, (first, end) in spans.items()}
    name = max(spans, key=lambda name: (int(inside[name].sum()), -away[name]), default="")
    does = f"{operation} {'writes' if access.stores else 'reads'}"
    if not name or (not inside[name].any() and away[name] > FAR_BYTES):
        raise OutOfBounds(f"{does} outside of every tensor that the kernel was given", f"in program {seen.index}")
    (first, end), size = spans[name], access.item_bytes
    side = "beyond the end" if where >= end else "before the beginning"
    n_stray = np.unique(stray).size
    one, more = ("one element ", "") if n_stray == 1 else ("", f", and at {n_stray - 1} more")
    offsets = f"at offset {(where - first) // size}{more}; the last element of {name} is at {(end - first) // size - 1}"
    raise OutOfBounds(f"{does} {one}{side} of {name}", f"in program {seen.index}, {offsets}")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the first byte after it."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _positions(unique: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Index of each address in ``unique``; one more than the last index where it is missing."""
    at = np.searchsorted(unique, where)
    present = np.isin(where, unique)
    return np.where(present, at, len(unique))


def element_addresses(tensor: Tensor) -> np.ndarray:
    """Address of each element, in bytes, in the shape of the tensor."""
    where = np.full(tensor.shape, tensor.data_ptr(), dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = np.arange(size, dtype=np.int64) * stride * tensor.element_size()
        where += steps.reshape([-1 if i == dim else 1 for i in range(tensor.ndim)])
    return where


@contextmanager
def trace(stop_outside: bool = False) -> Iterator[Trace]:
    """Record every launch, load, store and atomic of interpreted kernels.

    Args:
        stop_outside: Raise `OutOfBounds` inside the kernel at its first access outside the tensors that it was given.

    Raises:
        RuntimeError: kernels are compiled here, so Python can't see their accesses.
    """
    from lib.given.kernels.mode import INTERPRETED

    if not INTERPRETED:
        raise RuntimeError("trace() sees interpreted kernels only: set TRITON_INTERPRET=1 before Triton is imported")
    from triton.runtime import interpreter

    seen, builder, executor = Trace(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    old = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx, executor.__call__
    old_atomics, old_dot = (builder.create_atomic_rmw, builder.create_atomic_cas), builder.create_dot

    def note(ptrs: Any, mask: Any, stores: bool, operation: str) -> None:
        taken = np.broadcast_to(True if mask is None else mask.data, ptrs.data.shape).astype(bool)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        addresses = ptrs.data[taken].astype(np.int64).ravel()
        seen.accesses.append(Access(seen.n_programs - 1, stores, addresses, size))
        if stop_outside and operation:
            _refuse_outside(seen, operation)

    def undefined(ptrs: Any) -> Any:
        dtype = ptrs.get_element_ty()
        if not dtype.is_floating() or dtype.primitive_bitwidth < 16:
            return None
        nan = 0x7FC0 if dtype.is_bf16() else np.nan  # NumPy has no bfloat16: the interpreter keeps its bits
        return interpreter.TensorHandle(np.full(ptrs.data.shape, nan, interpreter._get_np_dtype(dtype)), dtype)

    def load(self, ptrs, mask, other, *rest, **named):
        note(ptrs, mask, False, "tl.load")
        return old[0](self, ptrs, mask, undefined(ptrs) if other is None else other, *rest, **named)

    def store(self, ptrs, value, mask, *rest, **named):
        note(ptrs, mask, True, "tl.store")
        return old[1](self, ptrs, value, mask, *rest, **named)

    def note_atomic(ptrs: Any, mask: Any) -> None:
        seen.n_atomics += 1
        note(ptrs, mask, False, "")
        note(ptrs, mask, True, "an atomic operation")

    def atomic(self, operation, ptrs, value, mask, *rest, **named):
        note_atomic(ptrs, mask)
        return old_atomics[0](self, operation, ptrs, value, mask, *rest, **named)

    def atomic_exchange(self, ptrs, *rest, **named):
        note_atomic(ptrs, None)
        return old_atomics[1](self, ptrs, *rest, **named)

    def dot(self, a, b, total, precision, *rest, **named):
        seen.dots.append((str(a.get_element_ty()), getattr(precision, "name", str(precision)).upper()))
        return old_dot(self, a, b, total, precision, *rest, **named)

    def begin_program(self, *index):
        seen.n_programs += 1
        grid = seen.launches[-1][1] if seen.launches else ()
        seen.index = str(index[0] if len(grid) == 1 else index[: len(grid) or None])
        return old[2](self, *index)

    def launch(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        seen.given = {name: a for name, a in named.items() if isinstance(a, Tensor)}
        grid = self.grid if isinstance(self.grid, tuple) else ()
        seen.launches.append((self.fn.__name__, grid, list(seen.given.values())))
        return old[3](self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = load, store
    builder.set_grid_idx, executor.__call__ = begin_program, launch
    builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_dot = atomic, atomic_exchange, dot
    try:
        yield seen
    finally:
        builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx, executor.__call__ = old
        (builder.create_atomic_rmw, builder.create_atomic_cas), builder.create_dot = old_atomics, old_dot
