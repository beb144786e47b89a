"""A file in which a rank records what it does, one JSON line an event,
so that others can read it even if the rank dies.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lib.ranks.places import user_line

_current: "Journal | None" = None


class Journal:
    """The file of one rank. Every event is appended in one write, before the rank can block."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._seq: Counter[str] = Counter()
        self._n_begun = 0
        self._thread = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a recorded call: calls that it makes there are the library's own."""
        return bool(getattr(self._thread, "inside", False))

    def write(self, event: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())

    @contextlib.contextmanager
    def call(self, op: str, **facts: Any) -> Iterator[int]:
        """Record a call's beginning and end; yields its index, by which `waiting` refers to it."""
        self._seq[op] += 1
        index, self._n_begun = self._n_begun, self._n_begun + 1
        self.write("begin", index=index, op=op, seq=self._seq[op], where=user_line(sys._getframe(2)), **facts)
        self._thread.inside = True
        try:
            yield index
        except BaseException:
            self.write("failed", index=index)
            raise
        else:
            self.write("end", index=index)
        finally:
            self._thread.inside = False

    @contextlib.contextmanager
    def waiting(self, index: int) -> Iterator[None]:
        """Record that the rank waits for a call that it started earlier."""
        if self.is_inside:
            yield
            return
        self.write("wait", index=index, where=user_line(sys._getframe(2)))
        try:
            yield
        except BaseException:
            self.write("failed", index=index)
            raise
        else:
            self.write("end", index=index)

    def close(self) -> None:
        os.close(self._file)


def open_journal(path: str) -> Journal:
    """Open the journal that `milestone` writes to in this process."""
    global _current
    _current = Journal(path)
    return _current


def milestone(name: str) -> None:
    """Put a named moment into this rank's ledger; does nothing in a process that is not a rank."""
    if _current is not None:
        _current.write("milestone", name=name)
