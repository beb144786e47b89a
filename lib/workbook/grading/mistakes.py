"""Known mistakes: plausible wrong answers, each with the sentence that names the misconception."""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lib.workbook.book.catalog import Exercise, chapters

MISTAKE = "WORKBOOK_MISTAKE"
IDLE = "changes nothing"


@dataclass(frozen=True)
class Mistake:
    """One known mistake: the exercise it belongs to, its sentence, and the wrong code itself."""

    module: str
    name: str
    sentence: str
    implementation: Any
    key: str


def mistake(name: str, sentence: str) -> Callable:
    """Mark a function or class of ``tests/chapter_NN/mistakes.py`` as a wrong answer to exercise ``name``.

    Args:
        name: The graded name.
        sentence: The misconception; it completes "looks like …".
    """

    def register(implementation):
        home = sys.modules[implementation.__module__]
        module = next(c.module for c in chapters().values() if c.tests.name == home.__name__.split(".")[-2])
        chapters()[module].exercise(name)
        found = home.__dict__.setdefault("MISTAKES", [])
        found.append(Mistake(module, name, sentence, implementation, f"{home.__name__}:{len(found)}"))
        return implementation

    return register


def mistakes_of(module: str, name: str | None = None) -> list[Mistake]:
    """The known mistakes of a chapter, or of one of its exercises."""
    home = f"tests.{chapters()[module].tests.name}.mistakes"
    if not (chapters()[module].tests / "mistakes.py").exists():
        return []
    found = getattr(importlib.import_module(home), "MISTAKES", [])
    idle = [_idle(e) for e in chapters()[module].exercises if e.changes_in_place and name in (None, e.name)]
    return [m for m in found if name in (None, m.name)] + idle


def _idle(exercise: Exercise) -> Mistake:
    """The mistake of doing nothing, for an exercise whose function should change its arguments."""

    def changes_nothing(*args, **kwargs):
        return None

    sentence = "a function that does nothing: its arguments are the same after the call as before"
    return Mistake(
        exercise.module, exercise.name, sentence, changes_nothing, f"{IDLE}:{exercise.module}.{exercise.name}"
    )


def active_mistake() -> Mistake | None:
    """The mistake that currently replaces an answer. An environment variable names it, so that ranks see it too."""
    key = os.environ.get(MISTAKE)
    if not key:
        return None
    home, _, index = key.rpartition(":")
    if home == IDLE:
        module, _, name = index.partition(".")
        return _idle(chapters()[module].exercise(name))
    return importlib.import_module(home).MISTAKES[int(index)]


@contextmanager
def standing_in(wrong: Mistake):
    """In this block, a mistake replaces the graded name that it belongs to."""
    os.environ[MISTAKE] = wrong.key
    try:
        yield
    finally:
        os.environ.pop(MISTAKE, None)
