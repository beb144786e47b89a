"""Toys."""

LIMIT = 100

### BEGIN SOLUTION
_TWO = 2


def _times(x, n):
    return x * n


### END SOLUTION


def double(x: int) -> int:
    """Twice a number. (Exercise)

    Size: 5 minutes, difficulty 1, core.

    Args:
        x: Any number.

    Returns:
        ``2 x``.

    Raises:
        ValueError: ``x`` is above the limit.
    """
    ### BEGIN SOLUTION
    if x > LIMIT:
        raise ValueError(f"x must be at most {LIMIT}, got {x}")
    return _times(x, _TWO)
    ### END SOLUTION


class Tally:
    """Counts what it is given. (Exercise)

    Size: 5 minutes, difficulty 1, core.
    """

    def __init__(self, start: int = 0):
        self.n = start

    def add(self, x: int) -> int:
        """Add ``double(x)`` and return the sum so far."""
        ### BEGIN SOLUTION
        self.n += double(x)
        return self.n
        ### END SOLUTION

    def clear(self) -> None:
        ### BEGIN SOLUTION
        self.n = 0
        ### END SOLUTION


def halves(x: int) -> list[float]:
    """Both halves of a number. (Exercise)

    Size: 5 minutes, difficulty 1, stretch.
    """
    half = x / 2
    ### BEGIN SOLUTION
    return [half, half]
    ### END SOLUTION
