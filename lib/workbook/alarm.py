"""A time limit inside one process: an exception in the main thread when the time is over."""

import contextlib
import signal
import threading


class TimeLimit(BaseException):
    """The check's time is over; no ``except Exception`` of the code under check may stop it."""


@contextlib.contextmanager
def alarm(seconds: float):
    """Raise TimeLimit in the main thread after ``seconds``; nothing happens where there are no signals."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number, frame):
        raise TimeLimit(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
