"""Known mistakes: plausible wrong answers, each with the sentence that names the misconception."""

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, TypeVar

from lib.workbook.book.catalog import BookError, Chapter, Exercise, chapters
from lib.workbook.grading.changes import Change, build, parse, sections

MISTAKE = "WORKBOOK_MISTAKE"
IDLE = "changes nothing"
T = TypeVar("T", bound=Callable[..., Any])  # a function or class, which stays what it is


@dataclass(frozen=True)
class Mistake:
    """One known mistake: the exercise it belongs to, its sentence, and how to make the wrong code.

    The key is made of the exercise and the sentence, so it stays the same when other mistakes come and go.
    """

    module: str
    name: str
    sentence: str
    key: str
    make: Callable[[], dict[str, Any]]

    @cached_property
    def definitions(self) -> dict[str, Any]:
        """The names of the chapter that differ from the reference's: the graded one, and what is built on it."""
        return self.make()

    @property
    def implementation(self) -> Any:
        """The wrong code itself."""
        return self.definitions[self.name]

    @property
    def label(self) -> str:
        """The first words of the sentence and a few digits, unique among the mistakes of the exercise."""
        return self.key.rpartition(":")[2]

    def answer(self, name: str) -> Any:
        """A graded name of the chapter where this mistake is made: the mistake's, or else the reference's."""
        return self.definitions[name] if name in self.definitions else getattr(_reference(self.module), name)


@cache
def _reference(module: str) -> ModuleType:
    """The reference of a chapter; a child forgets it as a module, and the mistakes share this one."""
    return importlib.import_module(f"solutions.{module}")


def mistake(name: str, sentence: str) -> Callable[[T], T]:
    """Mark a function or class of ``tests/chapter_NN/mistakes.py`` as a wrong answer to exercise ``name``.

    It is for answers that are built in another way than the reference; for all others there is `edits`.

    Args:
        name: The graded name.
        sentence: The misconception; it completes "looks like …".
    """

    def register(implementation: T) -> T:
        _register(sys.modules[implementation.__module__].__dict__, name, sentence, lambda _: {name: implementation})
        return implementation

    return register


def edits(text: str) -> None:
    """Wrong answers to the exercises of a chapter, each a sentence and an edit of the reference.

    Args:
        text: ``# name`` for each exercise; below it for each mistake its sentence, and what stands in the reference
            before ``=>`` and what the learner wrote instead after it. `lib.workbook.grading.changes.parse` says the
            rest.
    """
    bank = sys._getframe(1).f_globals
    for names, part in sections(text):
        try:
            parsed = parse(part)
        except BookError as error:
            raise BookError(f"{bank['__file__']}: {', '.join(names)}: {error}") from None
        for name in names:
            for sentence, changes in parsed:
                _register(bank, name, sentence, lambda known, changes=changes: _edited(known, changes))


def _register(bank: dict[str, Any], name: str, sentence: str, make: Callable[[Mistake], dict[str, Any]]) -> None:
    """Add a mistake to its bank, the module whose names are ``bank``."""
    home = bank["__name__"]
    chapter = _chapter_in(home.split(".")[-2])
    chapter.exercise(name)
    words = re.sub(r"\W+", "-", sentence.lower(), flags=re.ASCII).strip("-")[:40].rpartition("-")
    key = f"{home}:{name}:{words[0] or words[2]}-{hashlib.sha1(sentence.encode()).hexdigest()[:6]}"
    found = bank.setdefault("MISTAKES", {})
    if key in found:
        raise BookError(f"{bank['__file__']}: {name} has two mistakes with the sentence {sentence!r}")
    found[key] = Mistake(chapter.module, name, sentence, key, lambda: make(found[key]))


@cache
def _chapter_in(folder: str) -> Chapter:
    """The chapter whose tests lie in this folder."""
    return next(chapter for chapter in chapters().values() if chapter.tests.name == folder)


def _edited(wrong: Mistake, changes: tuple[Change, ...]) -> dict[str, Any]:
    """The definitions of the reference after an edit."""
    bank, reference = sys.modules[wrong.key.partition(":")[0]], chapters()[wrong.module].reference
    source = reference.read_text(encoding="utf-8")
    file = f"{bank.__file__}#{wrong.name}-{wrong.label}.py"
    try:
        return build(source, _reference(wrong.module), wrong.name, changes, vars(bank), file)
    except BookError as error:
        raise BookError(f"{bank.__file__}: {wrong.name}: the mistake {wrong.sentence!r}: {error}") from error


def mistakes_of(module: str, name: str | None = None) -> list[Mistake]:
    """The known mistakes of a chapter, or of one of its exercises."""
    home = f"tests.{chapters()[module].tests.name}.mistakes"
    if not (chapters()[module].tests / "mistakes.py").exists():
        return []
    found = getattr(importlib.import_module(home), "MISTAKES", {}).values()
    idle = [_idle(e) for e in chapters()[module].exercises if e.changes_in_place and name in (None, e.name)]
    return [m for m in found if name in (None, m.name)] + idle


def _idle(exercise: Exercise) -> Mistake:
    """The mistake of doing nothing, for an exercise whose function should change its arguments."""

    def changes_nothing(*args: object, **kwargs: object) -> None:
        return None

    sentence = "a function that does nothing: its arguments are the same after the call as before"
    key = f"{IDLE}:{exercise.module}.{exercise.name}"
    return Mistake(exercise.module, exercise.name, sentence, key, lambda: {exercise.name: changes_nothing})


def active_mistake() -> Mistake | None:
    """The mistake that currently replaces an answer. An environment variable names it, so that ranks see it too."""
    key = os.environ.get(MISTAKE)
    if not key:
        return None
    home, _, rest = key.partition(":")
    if home == IDLE:
        module, _, name = rest.partition(".")
        return _idle(chapters()[module].exercise(name))
    found: dict[str, Mistake] = importlib.import_module(home).MISTAKES
    return found[key]


@contextmanager
def standing_in(wrong: Mistake) -> Iterator[None]:
    """In this block, a mistake replaces the graded name that it belongs to, and the reference everything else.

    Raises:
        BookError: the mistake's edit does not fit the reference.
    """
    wrong.definitions  # noqa: B018 - here, and not in a check that might expect a ValueError
    before = os.environ.pop(MISTAKE, "")
    os.environ[MISTAKE] = wrong.key
    try:
        yield
    finally:
        os.environ[MISTAKE] = before  # of a mistake that is graded as an answer
