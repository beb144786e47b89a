"""What a label of the book stands for: ``eq-rope-7`` is equation (2.7), ``ex-rope-apply-rope`` exercise 2.4."""

import contextlib
import re
from functools import cache

from lib.workbook.book.catalog import BookError, Chapter, Exercise, all_exercises, chapters

KINDS = {"eq": "equation", "ex": "exercise"}
_LABEL = {kind: rf"\b{kind}-[a-z0-9_-]*[a-z0-9]" for kind in KINDS}
_ANY = re.compile("|".join(_LABEL.values()))
_RUNS = {kind: re.compile(rf"{label}(?:(?:, | and | to ){label})*") for kind, label in _LABEL.items()}


@cache
def _equations(chapter: Chapter) -> dict[str, str]:
    """Label of each numbered equation of a chapter's page, with its number in parentheses."""
    page = chapter.path.read_text(encoding="utf-8") if chapter.path.exists() else ""
    labels = re.findall(r"^:label: (\S+)$", page, re.MULTILINE)
    return {label: f"({chapter.number}.{n})" for n, label in enumerate(labels, start=1)}


def find_label(label: str) -> tuple[Chapter, str]:
    """The chapter in which a label stands, and its number as a reader sees it: ``(2.7)`` or ``2.4``.

    Raises:
        BookError: the book has no such label.
    """
    if label.startswith("ex-"):
        for exercise in all_exercises():
            if exercise.label == label:
                return chapters()[exercise.module], exercise.number
    else:
        for chapter in chapters().values():
            if label.startswith(f"eq-{chapter.module}-") and label in _equations(chapter):
                return chapter, _equations(chapter)[label]
    raise BookError(f"the book has no label {label!r}")


def labels_in(text: str) -> list[str]:
    return _ANY.findall(text)


def resolved(text: str) -> str:
    """A text with numbers for its labels: ``eq-rope-3 to eq-rope-5`` becomes "equations (2.3) to (2.5)".

    A label that the book does not have is left as it is: a report is shown in any case, and tests/workbook finds the label.
    """

    def numbered(kind: str, run: str) -> str:
        try:
            numbers = _ANY.sub(lambda label: find_label(label[0])[1], run)
        except BookError:
            return run
        return f"{KINDS[kind]}{'s' if len(labels_in(run)) > 1 else ''} {numbers}"

    for kind, pattern in _RUNS.items():
        text = pattern.sub(lambda run, kind=kind: numbered(kind, run[0]), text)
    return text


def where_to_read(exercise: Exercise, read: str | None) -> str:
    """A report's last pointer: "chapter 2, equation (2.7)"; without ``read``, the exercise itself.

    Args:
        exercise: The one that is graded; "the contract", with no "of" behind it, is its contract.
        read: What the test says, with labels; a label at its beginning decides the chapter.
    """
    read = read or exercise.label
    read = re.sub(r"^the contract\b(?! of)", f"the contract of {exercise.label}", read)
    chapter = exercise.chapter
    first = _ANY.match(read)
    if first is not None:
        with contextlib.suppress(BookError):
            chapter = find_label(first[0])[0].number
    return f"chapter {chapter}, {resolved(read)}"
