"""Documents on disk, in files that are finished or absent, so that a killed program goes on behind the last one."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

PART = 8 * 10**6
"""Characters that a part of a store is made from, about."""
BATCH, ITEMS = 10**6, 64
"""Characters and items that a process gets at a time, at most."""
A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Document:
    """A text with its place, which decides whether it is held out."""

    place: str
    text: str
    is_code: bool = False


def save(path: Path, data: bytes) -> None:
    """Write a file in one step: it is there with all of its bytes, or not at all."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def batched(items: Iterable[A], size: Callable[[A], int]) -> Iterator[list[A]]:
    """Consecutive items, as many as a process gets at a time."""
    batch: list[A] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH or len(batch) >= ITEMS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def streamed(
    pool: Executor, function: Callable[[A], B], items: Iterable[A], ahead: int = 8
) -> Generator[B, None, None]:
    """``pool.map`` that keeps only a few items ahead of its consumer, where ``map`` first reads them all."""
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def make_pool(begin: Callable[..., None] | None = None, *args: Any) -> ProcessPoolExecutor:
    """A process for each core. They end when this program is killed: with its open files they hold its lock.

    Args:
        begin: Called once in each process, with ``args``.
    """
    return ProcessPoolExecutor(os.cpu_count(), initializer=_begin, initargs=(begin, args))


def _begin(begin: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if begin:
        begin(*args)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


class Store:
    """Documents in order, in files ``part_00000.jsonl`` and so on, each with notes in ``part_00000.json``.

    A part counts once its documents are there; its notes are written before.

    Args:
        folder: Where the parts are; created if it is missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, i: int, suffix: str) -> Path:
        return self.folder / f"part_{i:05d}{suffix}"

    @property
    def n_parts(self) -> int:
        """Number of finished parts."""
        return sum(1 for _ in self.folder.glob("part_*.jsonl"))

    @property
    def is_done(self) -> bool:
        """Whether there will be no further part."""
        return (self.folder / "done").exists()

    def finish(self) -> None:
        save(self.folder / "done", b"")

    def add(self, documents: Iterable[Document], notes: Any = None) -> None:
        """Write the next part."""
        i = self.n_parts
        save(self._path(i, ".json"), json.dumps(notes).encode())
        lines = (json.dumps([d.place, d.text, d.is_code]) + "\n" for d in documents)
        save(self._path(i, ".jsonl"), "".join(lines).encode())

    def notes(self) -> Iterator[Any]:
        """The notes of each part."""
        return (json.loads(self._path(i, ".json").read_bytes()) for i in range(self.n_parts))

    def part(self, i: int) -> list[Document]:
        with self._path(i, ".jsonl").open("rb") as file:
            return [Document(*json.loads(line)) for line in file]

    def __iter__(self) -> Iterator[Document]:
        for i in range(self.n_parts):
            yield from self.part(i)

    def lines(self) -> "Lines":
        """Where each document begins."""
        found = [np.zeros((0, 2), np.int64)]
        for i in range(self.n_parts):
            with self._path(i, ".jsonl").open("rb") as file:
                ends = np.cumsum([0, *map(len, file)])[:-1]
            found.append(np.stack([np.full_like(ends, i), ends], axis=1))
        return Lines(self, np.concatenate(found))

    def read(self, i: int, start: int) -> Document:
        """The document whose line begins at byte ``start`` of part ``i``."""
        with self._path(i, ".jsonl").open("rb") as file:
            file.seek(start)
            return Document(*json.loads(file.readline()))


class Lines(Sequence[str]):
    """Texts of a store in any order, each read when it is asked for.

    Args:
        store: Where they are.
        places: Part and first byte of each, int64 ``[n, 2]``.
    """

    def __init__(self, store: Store, places: np.ndarray):
        self.store, self.places = store, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        """A text, or, for a slice or an array of indices, the sequence of these."""
        if isinstance(i, slice | np.ndarray):
            return Lines(self.store, self.places[i])
        return self.store.read(*map(int, self.places[i])).text
