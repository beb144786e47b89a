"""Splits a docstring into sections, for the exercise cards and the lists at the end of the book."""

import re

from docstring_parser import ParseError
from docstring_parser.google import GoogleParser, Section, SectionType

from lib.workbook.book.catalog import EXERCISE_NUMBER, SIZE, BookError

Part = tuple[str, str | list[tuple[str, str]]]
LISTS = {"Args": "param", "Attributes": "attribute", "Raises": "raises"}  # title: docstring_parser's key
TEXTS = ("Returns", "Yields", "Source", "Convention", "Cost", "Note")
_PARSER = GoogleParser([Section(title, key, SectionType.MULTIPLE) for title, key in LISTS.items()])
_TITLE = rf"(?P<title>{'|'.join([*LISTS, *TEXTS])}):"
_HEAD = re.compile(_TITLE + r"(?P<text>.*)", re.DOTALL)
_BREAK = re.compile(r"\n\s*\n\s*|\n\s*(?=- |\d\. )")
_BORDER = re.compile(rf"\n(?={_TITLE.replace('?P<title>', '?:')})|\n\s*\n(?=\S)")


def parts(doc: str) -> list[Part]:
    """The paragraphs and sections of a docstring in order, without the exercise's number and size.

    The text of a section may begin on the line of its title (``Source: …``);
    docstring_parser alone would not accept that.

    Returns:
        A (title, text) pair for each. In a text each paragraph, and each item of a list, has a line of its own.
        A paragraph's title is empty; for ``Args``, ``Attributes`` and ``Raises`` the text is a list of (name,
        text) pairs.

    Raises:
        BookError: an entry of a list has no name.
    """
    doc = SIZE.sub("", EXERCISE_NUMBER.sub("", doc.strip(), count=1), count=1)
    return [_part(piece.strip("\n")) for piece in _BORDER.split(doc) if piece.strip()]


def _part(piece: str) -> Part:
    head = _HEAD.match(piece)
    if head is None:
        return "", _flat(piece)
    title = head["title"]
    if title in TEXTS:
        return title, _flat(head["text"])
    try:
        found = _PARSER.parse(f"\n{piece}").meta
    except ParseError as error:
        raise BookError(f"a docstring's {title}: {error}") from error
    return title, [(entry.args[1], _flat(entry.description or "")) for entry in found]


def _flat(text: str) -> str:
    """Each paragraph, and each item of a list, in a line of its own."""
    return "\n".join(" ".join(piece.split()) for piece in _BREAK.split(text.strip()))
