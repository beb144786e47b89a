"""The book's chapters and exercises, read from book.yml and from the reference's docstrings."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(os.environ.get("WORKBOOK_ROOT") or Path(__file__).parents[3])
CHAPTER_FILE = re.compile(r"chapters/(?P<number>\d\d)_(?P<module>\w+)\.md")
EXERCISE = re.compile(r"\(Exercise(?P<typed> [\d.]+)?\)")  # in the reference, at the end of a line
EXERCISE_NUMBER = re.compile(r"\(Exercise (?P<number>\d+\.\d+)(?:, stretch)?\)")  # in stubs; stretch in old ones
SIZE = re.compile(
    r"^[ \t]*Size: (?P<minutes>\d+) minutes, difficulty (?P<difficulty>[1-5]), (?P<weight>[\w-]+)\.$", re.MULTILINE
)
WEIGHTS = ("warm-up", "core", "stretch")


class BookError(ValueError):
    """Something in the book does not fit together; the message names the file and what was expected."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What an exercise asks of a learner, from the line "Size: 20 minutes, difficulty 3, core." of its docstring.

    Attributes:
        minutes: Time that it takes somebody who has read the section before it.
        difficulty: 1 (follow the equation) to 5 (several ideas at once).
        weight: "core"; "warm-up", which may be skipped; or "stretch", which no later exercise needs.
    """

    minutes: int
    difficulty: int
    weight: str

    @classmethod
    def read(cls, doc: str, name: str) -> "Size":
        """The size that a docstring states.

        Raises:
            BookError: the docstring of the exercise ``name`` has no such line, or another weight.
        """
        found = SIZE.search(doc)
        if found is None or found["weight"] not in WEIGHTS:
            said = next((line.strip() for line in doc.splitlines() if line.strip().startswith("Size:")), "nothing")
            raise BookError(
                f"{name}: its size says {said!r}, expected a line such as 'Size: 20 minutes, difficulty 3, core.' "
                f"with a difficulty from 1 to 5 and one of {', '.join(WEIGHTS)}"
            )
        return cls(minutes=int(found["minutes"]), difficulty=int(found["difficulty"]), weight=found["weight"])

    def __str__(self) -> str:
        return f"{self.minutes} minutes, difficulty {self.difficulty} of 5, {self.weight}"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One graded name of one chapter."""

    chapter: int
    number: str
    name: str
    module: str
    doc: str = field(repr=False)
    line: int
    size: Size
    changes_in_place: bool = False  # a function that returns nothing

    @property
    def summary(self) -> str:
        """The docstring's first line without its number."""
        return EXERCISE_NUMBER.sub("", self.doc.strip().splitlines()[0]).strip()

    @property
    def command(self) -> str:
        """The terminal command that checks this exercise and no other: with ``-k``, which ignores case,
        if a word is enough.
        """
        word = f"{self.name}_" if self.name.lower() in self.module else self.name  # -k also looks at the file's name
        others = [e for e in chapters()[self.module].exercises if e != self]
        alone = not any(word.lower() in e.name.lower() for e in others)
        return f"pytest tests/chapter_{self.chapter:02d} {f'-k {word}' if alone else f'--exercise {self.handle}'}"

    @property
    def handle(self) -> str:
        """The shortest name that ``workbook check`` and ``%check`` understand."""
        named = [chapter for chapter in chapters().values() if chapter.may_grade(self.name)]
        alone = sum(e.name == self.name for chapter in named for e in chapter.exercises) == 1
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
                number = f"(Exercise {self.number}.{count})"
                lines[at] = lines[at][: match.start()] + number + lines[at][match.end() :]
        return "\n".join(lines)

    @cached_property
    def exercises(self) -> tuple[Exercise, ...]:
        """The exercises in the order of their numbers, read from the reference's docstrings
        without importing anything.
        """
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
                        size=Size.read(doc, f"{self.module}.{node.name}"),
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


def _entries(toc: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every entry of a table of contents that is a file, in reading order."""
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
def _book() -> dict[str, Any]:
    """What book.yml says.

    Raises:
        BookError: there is no book.yml.
    """
    if fault := missing_book():
        raise BookError(fault)
    text = (ROOT / "book.yml").read_text(encoding="utf-8")
    return dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@cache
def pages() -> tuple[dict[str, Any], ...]:
    """Every page of the book in reading order, as book.yml lists it."""
    return tuple(_entries(_book()["project"]["toc"]))


@dataclass(frozen=True, kw_only=True)
class Route:
    """One way through the book: some chapters, and of these the exercises of some weights."""

    key: str
    title: str
    chapters: tuple[Chapter, ...]
    weights: tuple[str, ...]

    @property
    def exercises(self) -> tuple[Exercise, ...]:
        return tuple(e for chapter in self.chapters for e in chapter.exercises if e.size.weight in self.weights)


@cache
def routes() -> dict[str, Route]:
    """The routes through the book, by the key that ``workbook check --route`` takes.

    Raises:
        BookError: a route of book.yml names a chapter or a weight that does not exist.
    """
    numbered = {chapter.number: chapter for chapter in chapters().values()}
    found = {}
    for key, route in _book().get("routes", {}).items():
        numbers = list(numbered) if route["chapters"] == "all" else route["chapters"]
        for wrong in (n for n in numbers if n not in numbered):
            raise BookError(f"book.yml: route {key} has chapter {wrong}, but the chapters are {list(numbered)}")
        for wrong in (w for w in route["weights"] if w not in WEIGHTS):
            raise BookError(f"book.yml: route {key} has weight {wrong!r}, expected any of {', '.join(WEIGHTS)}")
        found[key] = Route(
            key=key,
            title=route["title"],
            chapters=tuple(numbered[n] for n in numbers),
            weights=tuple(route["weights"]),
        )
    return found


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
    """The chapter, and the exercise if one is named, for ``2``, ``rope``, ``2.4``,
    ``apply_rope`` or ``rope.apply_rope``.

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
    if re.fullmatch(r"\d+(\.\d+)?", what):
        raise BookError(
            f"there is no {'exercise' if '.' in what else 'chapter'} {what}; expected {_numbers_like(what)}"
        )
    names = [*chapters(), *(e.name for e in all_exercises())]
    close = difflib.get_close_matches(what, names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(close)}?" if close else f"; the chapters are {', '.join(chapters())}"
    raise BookError(f"no chapter or exercise is called {what!r}{hint}")


def _numbers_like(what: str) -> str:
    """The numbers of the chapters, or, if the chapter before the point is there, those of its exercises."""
    all_chapters = list(chapters().values())
    inside = next((c.exercises for c in all_chapters if what.startswith(f"{c.number}.") and c.exercises), None)
    numbers = [str(c.number) for c in all_chapters] if inside is None else [e.number for e in inside]
    return f"a number from {numbers[0]} to {numbers[-1]}, or a name"
