"""Timings on the reader's machine: taken again if another program was in the way."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def measured_when(
    condition: Callable[[Found], bool],
    measure: Callable[[], Found],
    what: str,
    tries: int = 3,
    otherwise: Found | None = None,
    pause_s: float = 0.5,
) -> Found | None:
    """Measure until the result meets the condition that a chapter's text needs.

    Args:
        condition: Takes what ``measure`` returns; True if the text holds for it.
        measure: Called without arguments, at most ``tries`` times.
        what: The condition in words, as "a launch takes less than 10 ms".
        tries: Measurements before giving up, 1 or more.
        otherwise: Returned if no measurement meets the condition.
        pause_s: Seconds between two measurements, in which the other program may finish.

    Returns:
        The first measurement that meets the condition. If there is none, says that this machine was busy and returns
        ``otherwise``.
    """
    for n in range(tries):
        if n:
            time.sleep(pause_s)
        found = measure()
        if condition(found):
            return found
    instead = "" if otherwise is None else " A recorded measurement takes its place."
    print(f"This machine was busy. The text needs that {what}; that failed {tries} times in a row.{instead}")
    return otherwise
