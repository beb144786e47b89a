"""The book's chapters and exercises, read from book.yml and from the reference's docstrings."""

import ast
import os
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import yaml

ROOT = Path(os.environ.get("WORKBOOK_ROOT") or Path(__file__).parents[3])
CHAPTER_FILE = re.compile(r"chapters/(?P<number>\d\d)_(?P<module>\w+)\.md")
EXERCISE = re.compile(
    r"\(Exercise(?P<typed> [\d.]+)?(?P<stretch>, stretch)?\)"
)  # in the reference, at the end of a line
EXERCISE_NUMBER = re.compile(r"\(Exercise (?P<number>\d+\.\d+)(?P<stretch>, stretch)?\)")  # in stubs and on cards


class BookError(ValueError):
    """Something in the book does not fit together; the message names the file and what was expected."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One graded name of one chapter."""

    chapter: int
    number: str
    name: str
    module: str
    doc: str = field(repr=False)
    line: int
    stretch: bool = False
    changes_in_place: bool = False  # a function that returns nothing

    @property
    def summary(self) -> str:
        """The docstring's first line without its number."""
        return EXERCISE_NUMBER.sub("", self.doc.strip().splitlines()[0]).strip()

    @property
    def command(self) -> str:
        """The terminal command that checks this exercise and no other: with ``-k``, which ignores case, if a word is enough."""
        word = f"{self.name}_" if self.name.lower() in self.module else self.name  # -k also looks at the file's name
        others = [e for e in chapters()[self.module].exercises if e != self]
        alone = not any(word.lower() in e.name.lower() for e in others)
        return f"pytest tests/chapter_{self.chapter:02d} {f'-k {word}' if alone else f'--exercise {self.handle}'}"

    @property
    def handle(self) -> str:
        """The shortest name that ``workbook check`` and ``%check`` understand."""
        alone = sum(e.name == self.name for e in all_exercises()) == 1
        return self.name if alone and self.name not in chapters() else f"{self.module}.{self.name}"

    @property
    def label(self) -> str:
        """The target of cross-references to the exercise."""
        return f"ex-{self.module}-{self.name}".replace("_", "-").lower()


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One chapter of the book."""

    number: int
    module: str
    title: str
    path: Path

    @property
    def mine(self) -> Path:
        """The learner's file."""
        return ROOT / "lib" / f"{self.module}.py"

    @property
    def reference(self) -> Path:
        return ROOT / "solutions" / f"{self.module}.py"

    @property
    def tests(self) -> Path:
        return ROOT / "tests" / f"chapter_{self.number:02d}"

    def numbered(self, source: str | None = None) -> str:
        """The reference's text with a number in each graded docstring: ``(Exercise)`` becomes ``(Exercise 2.1)``.

        Exercises are numbered in the order of the file.

        Raises:
            BookError: somebody typed a number; the message names the file and the line.
        """
        source = self.reference.read_text(encoding="utf-8") if source is None else source
        lines = source.split("\n")
        count = 0
        for node in ast.parse(source, str(self.reference)).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
                continue
            at = node.body[0].lineno - 1
            if match := EXERCISE.search(lines[at]):
                if match["typed"]:
                    raise BookError(f"{self.reference}:{at + 1}: {match[0]}: the number is derived, write (Exercise)")
                count += 1
                number = f"(Exercise {self.number}.{count}{match['stretch'] or ''})"
                lines[at] = lines[at][: match.start()] + number + lines[at][match.end() :]
        return "\n".join(lines)

    @cached_property
    def exercises(self) -> tuple[Exercise, ...]:
        """The exercises in the order of their numbers, read from the reference's docstrings without importing anything."""
        tree = ast.parse(self.numbered(), str(self.reference))
        found = []
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node) or ""
            first_line = doc.splitlines()[0] if doc else ""
            if match := EXERCISE_NUMBER.search(first_line):
                found.append(
                    Exercise(
                        chapter=self.number,
                        number=match["number"],
                        name=node.name,
                        module=self.module,
                        doc=doc,
                        line=node.lineno,
                        stretch=bool(match["stretch"]),
                        changes_in_place=isinstance(node, ast.FunctionDef)
                        and getattr(node.returns, "value", ...) is None,
                    )
                )
        return tuple(found)

    def may_grade(self, name: str) -> bool:
        """Whether the reference's text defines a name: a quick look, fifty times as fast as ``exercises``."""
        text = self.reference.read_text(encoding="utf-8")
        return f"\ndef {name}(" in text or f"\nclass {name}" in text

    def exercise(self, name: str) -> Exercise:
        for exercise in self.exercises:
            if exercise.name == name:
                return exercise
        raise KeyError(f"chapter {self.number} has no exercise {name!r}")


def _entries(toc: list[dict]):
    for entry in toc:
        if "file" in entry:
            yield entry
        yield from _entries(entry.get("children", []))


def missing_book() -> str:
    """What is wrong if there is no book.yml, because the package was copied out of the book's folder; otherwise ""."""
    if (ROOT / "book.yml").is_file():
        return ""
    return (
        f"there is no book.yml in {ROOT}: expected the book's own folder; install it there with `pip install -e .`, "
        "because without -e pip makes a copy that holds none of your files"
    )


@cache
def pages() -> tuple[dict, ...]:
    """Every page of the book in reading order, as book.yml lists it.

    Raises:
        BookError: there is no book.yml.
    """
    if fault := missing_book():
        raise BookError(fault)
    text = (ROOT / "book.yml").read_text(encoding="utf-8")
    book = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(_entries(book["project"]["toc"]))


def is_back_matter(file: str) -> bool:
    """Whether a page belongs to the back matter: a file in chapters/ whose name has no number."""
    return file.startswith("chapters/") and CHAPTER_FILE.fullmatch(file) is None


@cache
def chapters() -> dict[str, Chapter]:
    """The chapters that grade something, by module."""
    found = {}
    for entry in pages():
        match = CHAPTER_FILE.fullmatch(entry["file"])
        if match is None or not (ROOT / "solutions" / f"{match['module']}.py").exists():
            continue
        if "title" not in entry:
            raise BookError(f"book.yml: {entry['file']} has no title")
        chapter = Chapter(
            number=int(match["number"]), module=match["module"], title=entry["title"], path=ROOT / entry["file"]
        )
        found[chapter.module] = chapter
    return found


def all_exercises() -> list[Exercise]:
    return [exercise for chapter in chapters().values() for exercise in chapter.exercises]


def find(what: str) -> tuple[Chapter, Exercise | None]:
    """The chapter, and the exercise if one is named, for ``2``, ``rope``, ``2.4``, ``apply_rope`` or ``rope.apply_rope``.

    Raises:
        BookError: the name fits nothing, or more than one thing; the message lists the nearest names.
    """
    import difflib

    what = str(what).strip()
    module, _, name = what.rpartition(".")
    for chapter in chapters().values():
        if what in (str(chapter.number), f"{chapter.number:02d}", chapter.module):
            return chapter, None
        if what.rstrip("/") in (f"tests/chapter_{chapter.number:02d}", f"chapter_{chapter.number:02d}"):
            return chapter, None
    matches = [
        e
        for chapter in chapters().values()
        if what.startswith(f"{chapter.number}.") or chapter.may_grade(name)
        for e in chapter.exercises
        if what in (e.number, e.name) or (module.split(".")[-1] == e.module and name == e.name)
    ]
    if len(matches) == 1:
        return chapters()[matches[0].module], matches[0]
    if matches:
        written = " or ".join(f"{e.module}.{e.name}" for e in matches)
        raise BookError(f"{what!r} is in several chapters: write {written}")
    names = [*chapters(), *(e.name for e in all_exercises())]
    close = difflib.get_close_matches(what, names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(close)}?" if close else f"; the chapters are {', '.join(chapters())}"
    raise BookError(f"no chapter or exercise is called {what!r}{hint}")
