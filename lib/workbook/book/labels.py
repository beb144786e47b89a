"""The book's labels and their numbers: ``eq-rope-7`` is equation (2.7), ``ex-rope-apply-rope`` exercise 2.4,
``fig-rope-clocks`` a figure.
"""

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lib.workbook.book.catalog import CHAPTER_FILE, ROOT, BookError, Chapter, Exercise, all_exercises, chapters, pages
from lib.workbook.book.sources import write_bytes

KINDS = {"eq": "equation", "ex": "exercise"}
_LABEL = {kind: rf"\b{kind}-[a-z0-9_-]*[a-z0-9]-?" for kind in KINDS}  # a name may end with an underscore
_ANY = re.compile("|".join(_LABEL.values()))
_RUNS = {kind: re.compile(rf"{label}(?:(?:, | and | to ){label})*") for kind, label in _LABEL.items()}


@cache
def _equations(chapter: Chapter) -> dict[str, str]:
    """The number, in parentheses, of each labelled equation of a chapter's page."""
    page = chapter.path.read_text(encoding="utf-8") if chapter.path.exists() else ""
    labels = re.findall(r"^:label: (\S+)$", page, re.MULTILINE)
    return {label: f"({chapter.number}.{n})" for n, label in enumerate(labels, start=1)}


def find_label(label: str) -> tuple[Chapter, str]:
    """The chapter that a label belongs to, and its number as readers see it: ``(2.7)`` or ``2.4``.

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
    """A text in which numbers replace the labels: ``eq-rope-3 to eq-rope-5`` becomes "equations (2.3) to (2.5)".

    An unknown label is left as it is, so that a report is shown in any case; tests/house finds such labels.
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
    """The place where a report sends its reader, such as "chapter 2, equation (2.7)"; without ``read``,
    the exercise itself.

    Args:
        exercise: The graded exercise; "the contract" without an "of" behind it means this exercise's.
        read: The test's text, with labels. If it begins with a label, that label decides the chapter.
    """
    read = read or exercise.label
    read = re.sub(r"^the contract\b(?! of)", f"the contract of {exercise.label}", read)
    chapter = exercise.chapter
    first = _ANY.match(read)
    if first is not None:
        with contextlib.suppress(BookError):
            chapter = find_label(first[0])[0].number
    return f"chapter {chapter}, {resolved(read)}"


# ---- figures ---------------------------------------------------------------------------------------------------------

CAPTION = re.compile(r"^\((?P<label>fig-[\w-]+)\)=\n\*\*Figure [\w.]*\*\*", re.MULTILINE)
FIGURE_LINK = re.compile(r"\[Figure(?: [\w.]*)?(?P<part>,[^\]\n]*)?\]\(#(?P<label>fig-[\w-]+)\)")


def figure_numbers(texts: Mapping[int | str, str]) -> dict[str, str]:
    """The number of each figure, by label; figures are numbered in the order of a page's captions.

    Args:
        texts: Each page's text. The key, a chapter's number or a letter, is the first part of its figures' numbers.

    Raises:
        BookError: two captions have the same label.
    """
    numbers: dict[str, str] = {}
    for chapter, text in texts.items():
        for n, caption in enumerate(CAPTION.finditer(text), start=1):
            if caption["label"] in numbers:
                raise BookError(f"{chapter}: a second caption has the label {caption['label']!r}")
            numbers[caption["label"]] = f"{chapter}.{n}"
    return numbers


def by_beginning(texts: Mapping[Path, str]) -> dict[int | str, str]:
    """Each page's text by the first part of its figures' numbers: the chapter's number, or A, B, … for other pages."""
    found: dict[int | str, str] = {}
    letters = iter("ABCDEFGH")
    for path, text in texts.items():
        match = CHAPTER_FILE.fullmatch(path.relative_to(ROOT).as_posix())
        if match or CAPTION.search(text):
            found[int(match["number"]) if match else next(letters)] = text
    return found


def with_figure_numbers(text: str, numbers: dict[str, str]) -> str:
    """A page's text with the right number in every caption and in every link to a figure.

    A link to an unknown label is left as it is; the site's build and tests/house find it.
    """

    def linked(m: re.Match[str]) -> str:
        number = numbers.get(m["label"])
        return f"[Figure {number}{m['part'] or ''}](#{m['label']})" if number else m[0]

    text = CAPTION.sub(lambda m: f"({m['label']})=\n**Figure {numbers[m['label']]}.**", text)
    return FIGURE_LINK.sub(linked, text)


def number_figures(check: bool = False) -> list[str]:
    """Write the figures' numbers into the captions and links of every page; with ``check``, only report differences.

    Returns:
        A line for each page whose numbers differed.
    """
    paths = [ROOT / page["file"] for page in pages() if (ROOT / page["file"]).exists()]
    texts = {path: path.read_bytes().decode("utf-8") for path in paths}
    numbers, lines = figure_numbers(by_beginning(texts)), []
    for path, text in texts.items():
        numbered = with_figure_numbers(text, numbers)
        if numbered != text:
            lines.append(_renumbered(path, check))
            if not check:
                write_bytes(path, numbered.encode("utf-8"))
    return lines


def _renumbered(path: Path, check: bool) -> str:
    where = path.relative_to(ROOT).as_posix()
    return f"{where}: figures are not numbered in order" if check else f"{where}: figures numbered anew"
