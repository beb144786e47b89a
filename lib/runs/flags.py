"""Command lines: a parser that reports a wrong flag in one line, and the kinds of numbers that flags take."""

import argparse
from typing import NoReturn


class UsageError(ValueError):
    """A mistake that the person who started the run can correct: one line that names the value and what was expected."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the flags")


def whole(least: int):
    """For ``type=``: accepts a whole number of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return number


def degree(text: str) -> int:
    """For ``type=``: accepts a whole number of at least 1, or -1."""
    return -1 if text == "-1" else whole(1)(text)


def positive(text: str) -> float:
    """For ``type=``: accepts a number above 0."""
    if not (value := share(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def share(text: str) -> float:
    """For ``type=``: accepts a finite number, 0 or above."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return value


def fraction(text: str) -> float:
    """For ``type=``: accepts a number between 0 and 1, both excluded."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number between 0 and 1, such as 0.1")
    return value
