"""How many bytes a call takes."""

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def with_peak(compute: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and the most bytes that Python and NumPy held at once for it."""
    tracemalloc.start()
    try:
        return compute(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()  # also where the call fails: later checks would be slow
