"""What every command line of the book shares: whole names of flags, one line for a mistake,
and numbers with a range.
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

MOST = 2**31 - 1
"""The largest count that a flag takes, unless it says otherwise."""
MOST_SEED = 2**64 - 1
"""The largest seed that PyTorch's and NumPy's generators both take."""
LARGEST = 1e15
"""The most seconds, megabytes and the like that a flag takes; in bytes they are still a finite number."""


class UsageError(ValueError):
    """A mistake that the person who started the run can correct:
    one line that names the value and what was expected.
    """


class Parser(argparse.ArgumentParser):
    """Takes whole names of flags only, and reports a wrong flag in one line, without the page of usage."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the flags")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string:  # a variable of the shell that is not set
            raise argparse.ArgumentError(action, "'' is empty: expected a value")
        return super()._get_value(action, arg_string)


class ProgramParser(Parser):
    """Ends the program with status 2 after the line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; --help lists the flags\n")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """For ``type=``: accepts a whole number from ``least`` to ``most``."""

    def number(text: str) -> int:
        digits = text.lstrip("0") or "0"
        if not text.isdecimal() or (len(digits) <= 20 and int(digits) < least):
            raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a whole number of at least {least}")
        if len(digits) > 20 or int(digits) > most:  # Python itself refuses to read thousands of digits
            raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a whole number of at most {most}")
        return int(digits)

    return number


def wholes(text: str) -> str:
    """For ``type=``: accepts whole numbers of at least 1, with commas between, and returns them as they are."""
    for part in text.split(","):
        whole(1)(part)
    return text


def some_of(*names: str) -> Callable[[str], str]:
    """For ``type=``: accepts one or more of these names, with commas between, and returns them as they are."""

    def listed(text: str) -> str:
        for part in text.split(","):
            if part not in names:
                raise argparse.ArgumentTypeError(
                    f"{_cut(part)}: expected some of {', '.join(names)}, with commas between"
                )
        return text

    return listed


def width_and_layers(text: str) -> str:
    """For ``type=``: accepts a width and a number of layers such as 128x4, and returns them as they are."""
    if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a width and a number of layers, such as 128x4")
    return text


def degree(text: str) -> int:
    """For ``type=``: accepts a whole number of at least 1, or -1."""
    return -1 if text == "-1" else whole(1)(text)


def share(text: str) -> float:
    """For ``type=``: accepts a finite number, 0 or above."""
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a number of at least 0")
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a finite number")
    return value


def positive(text: str) -> float:
    """For ``type=``: accepts a number above 0, and at most ``LARGEST``."""
    if not (value := share(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a number of at most {LARGEST:g}")
    return value


def fraction(text: str) -> float:
    """For ``type=``: accepts a number between 0 and 1, both excluded."""
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{_cut(text)}: expected a number between 0 and 1, such as 0.1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
