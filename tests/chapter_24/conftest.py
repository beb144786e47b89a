"""Runs these checks on one thread, as in chapter 14."""

from tests.chapter_14.conftest import one_thread

__all__ = ["one_thread"]
