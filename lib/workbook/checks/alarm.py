"""A time limit inside one process: the main thread gets an exception when the time is up.

All modules here take ``monotonic`` itself, because a check may wind the clocks of the module ``time``.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from time import monotonic
from types import FrameType


class TimeLimit(BaseException):
    """The check's time is up. A BaseException, so that no ``except Exception`` in the code under test swallows it."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeLimit in the main thread after ``seconds``.

    Does nothing without signals, or outside of the main thread.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"not finished after {seconds:g} s")

    before, started = signal.signal(signal.SIGALRM, ring), monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left = max(0.01, outer - (monotonic() - started)) if outer else 0
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of any alarm for the length of this block."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
