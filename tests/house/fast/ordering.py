"""Finds on a CPU which accesses of a step no stream orders, as they would race on a GPU.

A CPU computes everything in the order of the program. Here each operation is noted with its stream, the tensors that it
reads and those that it writes. Two accesses to the same memory, of which one writes, must be ordered: by being on one
stream, or by an event that the stream of the later one waited for.
Memory that several ranks share needs more: all ranks must have met between the two.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lib.fast import shards
from lib.fast.copies import MakePlaces, Places

Seen = dict[int, int]
"""For each stream, how many of its operations come before a moment."""


class Event:
    def __init__(self, seen: Seen, step: int):
        self.seen, self.step = seen, step


class Stream:
    """Stands for a CUDA stream.

    Attributes:
        seen: The operations before the next one here.
        step: The last step in which something here belonged to a recording that begins with the step.
    """

    def __init__(self, watch: "Watch", priority: int = 0):
        self.watch, self.seen, self.step, self.number = watch, dict[int, int](), -1, len(watch.streams)
        watch.streams.append(self)

    def advance(self) -> None:
        self.seen[self.number] = self.seen.get(self.number, 0) + 1

    def record_event(self) -> Event:
        return Event(dict(self.seen), self.step)

    def wait_event(self, event: Event) -> None:
        if self.watch.forgotten != "wait_event":
            self.follow(event)

    def wait_stream(self, other: "Stream") -> None:
        if self.watch.forgotten != "wait_stream":
            self.follow(other.record_event())

    def follow(self, event: Event) -> None:
        if event.step != self.watch.step:
            self.watch.complaints.append(f"stream {self.number} waits for an event that is not of this step")
        self.step = self.watch.step
        for number, n in event.seen.items():
            self.seen[number] = max(n, self.seen.get(number, 0))


class Watch(TorchDispatchMode):
    """Notes every operation, and complains of accesses without order.

    Attributes:
        complaints: What is wrong.
        forgotten: "wait_stream", "wait_event" or "meet" is ignored, to see that a complaint follows.
    """

    def __init__(self, forgotten: str = ""):
        super().__init__()
        self.streams: list[Stream] = []
        self.complaints: list[str] = []
        self.step, self.forgotten = 0, forgotten
        self.current = Stream(self)
        self.current.step = 0
        self.shared: dict[int, int] = {}  # which memory each rank's memory stands for, by address
        self.written: dict[int, tuple[int, int]] = {}  # the last operation that wrote to some memory
        self.read: dict[int, set[tuple[int, int]]] = {}  # the operations that have read it since
        self.met: list[tuple[int, int, Seen]] = []
        self.kept: list[Any] = []  # memory that is not used again for something else

    def begin_step(self) -> None:
        """From here on the main stream is recorded."""
        self.step += 1
        self.current.step = self.step

    def end_step(self) -> None:
        """Everything must have come back to the main stream."""
        for stream in self.streams:
            if self.current.seen.get(stream.number, 0) < stream.seen.get(stream.number, 0):
                self.complaints.append(f"stream {stream.number} is not joined")

    def is_before(self, access: tuple[int, int], key: int) -> bool:
        number, n = access
        if key not in self.shared.values():
            return self.current.seen.get(number, 0) >= n
        return any(seen.get(number, 0) >= n and self.current.seen.get(of, 0) >= at for of, at, seen in self.met)

    def note(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """An operation on the current stream."""
        self.current.advance()
        here = (self.current.number, self.current.seen[self.current.number])
        for tensors, is_write in ((reads, False), (writes, True)):
            for key in {self.key(tensor.untyped_storage()) for tensor in tensors}:
                before = {self.written[key]} if key in self.written else set()
                for access in before | (self.read.get(key, set()) if is_write else set()):
                    if access != here and not self.is_before(access, key):
                        self.complaints.append(f"{what} on stream {here[0]} does not wait for stream {access[0]}")
                if is_write:
                    self.written[key], self.read[key] = here, set()
                else:
                    self.read.setdefault(key, set()).add(here)

    def key(self, storage: Any) -> int:
        self.kept.append(storage)
        return self.shared.get(storage.data_ptr(), storage._cdata)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        schema = function._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return out  # a view
        values = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | (kwargs or {})
        is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
        found: dict[bool, list[Tensor]] = {True: [x for x in tree_leaves(out) if isinstance(x, Tensor)], False: []}
        for name, value in values.items():
            found[is_written[name]] += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        real = {kind: [x for x in some if x.device.type == "cpu"] for kind, some in found.items()}
        self.note(str(function), real[False], real[True])
        return out

    def places(self, made_by: MakePlaces) -> MakePlaces:
        """The same places; what lies in one rank's stands for what lies in any other's at the same moment."""

        def places(n: int, dtype: torch.dtype, device: torch.device) -> Places:
            of, meet = made_by(n, dtype, device)
            self.kept += of
            addresses = [memory.untyped_storage().data_ptr() for memory in of]
            self.shared |= dict.fromkeys(addresses, addresses[0])

            def noted() -> None:
                meet()
                self.current.advance()
                at = self.current.seen[self.current.number]
                if self.forgotten != "meet":
                    self.met.append((self.current.number, at, dict(self.current.seen)))

            return of, noted

        return places

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operations are noted, on streams that stand for CUDA's."""
        resize, mean_of_ranks = torch.UntypedStorage.resize_, shards.mean_of_ranks

        def resized(storage: Any, n: int) -> Any:  # what the current stream had here before, or will have
            self.note("resize_", [], [torch.empty(0, dtype=torch.uint8).set_(storage)])
            return resize(storage, n)

        def mean(own: Tensor, received: Tensor, rank: int, out: Tensor) -> None:
            self.note("mean_of_ranks", [own, received], [out])
            with _disable_current_modes():  # Triton's interpreter moves memory about
                mean_of_ranks(own, received, rank, out)

        streams: Any = {"Stream": lambda priority: Stream(self), "current_stream": lambda: self.current}
        with (
            patch.multiple(torch.cuda, **streams, stream=self.on),
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(shards, "mean_of_ranks", mean),
            self,
        ):
            yield
