"""As in chapter 14: one thread."""

from tests.chapter_14.conftest import one_thread

__all__ = ["one_thread"]
