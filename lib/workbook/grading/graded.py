"""The graded names of a chapter, each looked up at the moment when a test uses it."""

from collections.abc import Callable
from typing import Any

from lib.workbook.book import resolve
from lib.workbook.book.catalog import BookError, chapters
from lib.workbook.grading.mistakes import active_mistake


class Graded:
    """The graded names of one chapter, as attributes that are looked up anew at each use."""

    def __init__(self, module: str):
        if module not in chapters():
            raise BookError(f"no chapter grades {module!r}; chapters are {', '.join(chapters())}")
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no graded name; pytest asks for such attributes when it looks for fixtures
            raise AttributeError(name)
        wrong = active_mistake()
        if wrong is not None and wrong.module == self._module:
            return wrong.answer(name)
        return resolve.answer(self._module, name)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return graded, (self._module,)


def graded(module: str) -> Any:
    """The graded names of ``lib.<module>``, as attributes: the learner's, the reference's or a mistake's."""
    return Graded(module)
