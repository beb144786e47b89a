"""Makes the tables and lists at the end of the book from the catalog, the references, the tests and the chapters."""

import ast
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.given.data.record import MEASUREMENTS, where
from lib.workbook.book import contracts
from lib.workbook.book.catalog import (
    ROOT,
    WEIGHTS,
    Chapter,
    Exercise,
    all_exercises,
    chapters,
    is_back_matter,
    pages,
    routes,
)

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<url>https?://[^)\s]+)\)")


class Listing:
    """A Markdown table or list; shown as plain text where Markdown is not rendered."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def table(head: list[str], rows: list[list[str]]) -> Listing:
    lines = [head, ["---"] * len(head), *rows]
    return Listing("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines))


def plain(text: str) -> str:
    """A docstring's text for Markdown: code in single backticks,
    and no emphasis from other underscores or asterisks.
    """
    parts = text.replace("``", "`").split("`")
    return "`".join(part if n % 2 else re.sub(r"([_*])", r"\\\1", part) for n, part in enumerate(parts))


# ---- links -----------------------------------------------------------------------------------------------------------


def chapter_link(chapter: Chapter, text: str = "", folder: str = "") -> str:
    """A link to a chapter, from a page beside it or from one that has the chapters in a ``folder``."""
    return f"[{text or f'{chapter.number}. {chapter.title}'}]({folder}{chapter.path.name})"


def exercise_link(exercise: Exercise, text: str) -> str:
    """A link to the exercise on the site; in JupyterLab, which cannot follow labels into another page,
    to its chapter.
    """
    if os.environ.get("WORKBOOK_LINKS") == "site":
        return f"[{text}](#{exercise.label})"
    return f"[{text}]({chapters()[exercise.module].path.name})"


def _written() -> list[Chapter]:
    return [chapter for chapter in chapters().values() if chapter.path.exists()]


# ---- all systems -----------------------------------------------------------------------------------------------------


def systems() -> Listing:
    """Each chapter, its graded names, and the implementations that their results are compared with."""
    rows = []
    for chapter in _written():
        names = ", ".join(exercise_link(e, f"`{e.name}`") for e in chapter.exercises)
        rows.append([chapter_link(chapter), names, compared_with(chapter)])
    return table(["chapter", "what you write", "what it is compared with"], rows)


def compared_with(chapter: Chapter) -> str:
    """The oracles of a chapter, from the docstring "Compared with …" in tests/chapter_NN/__init__.py."""
    path = chapter.tests / "__init__.py"
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    return " ".join((doc or "").split()).removeprefix("Compared with ").rstrip(".")


# ---- measurements ----------------------------------------------------------------------------------------------------


def measurements() -> Listing:
    """Every recorded measurement: the pages that show it, the machine and day,
    and the command that measures it again.
    """
    rows = []
    for path in sorted(MEASUREMENTS.glob("*.json")):
        measured = json.loads(path.read_text(encoding="utf-8"))
        rows.append(
            [
                f"`{path.stem}`",
                ", ".join(shown_in(path.stem)),
                hardware(measured),
                f"`python -m {program(path.stem)}`",
            ]
        )
    return table(["measurement", "shown in", "where and when", "made by"], rows)


def shown_in(name: str) -> list[str]:
    """Links to the pages, chapters first, that load a measurement."""
    links = [chapter_link(chapter, str(chapter.number)) for chapter in _written() if shows(chapter.path, name)]
    behind = [(ROOT / page["file"], page["title"]) for page in pages() if is_back_matter(page["file"])]
    return links + [f"[{title}]({path.name})" for path, title in behind if path.exists() and shows(path, name)]


def shows(page: Path, name: str) -> bool:
    """Whether a page loads a measurement, by its name or by ``f"ladder_{model}"``."""
    text = page.read_text(encoding="utf-8")
    return f'load("{name}")' in text or f'load(f"{name.rpartition("_")[0]}_{{' in text


def program(measurement: str) -> str:
    """The module in lib/bench that wrote a measurement: the one with the longest name that the
    measurement's begins with.

    A program in a folder is called by its own name or by the folder's and its own:
    ``yardstick/parts.py`` wrote ``yardstick_parts``.

    Raises:
        LookupError: there is no such program.
    """
    modules = {}
    for path in (ROOT / "lib" / "bench").rglob("*.py"):
        *_, room, name = path.with_suffix("").parts
        if name == "__main__":
            modules[room] = f"lib.bench.{room}"
        elif room == "bench":
            modules[name] = f"lib.bench.{name}"
        else:
            modules |= dict.fromkeys((name, f"{room}_{name}"), f"lib.bench.{room}.{name}")
    names = [name for name in modules if measurement == name or measurement.startswith(f"{name}_")]
    if not names:
        raise LookupError(f"no program in lib/bench wrote the measurement {measurement!r}")
    return modules[max(names, key=len)]


def hardware(measured: dict[str, Any]) -> str:
    """Machine and date as `where` writes them, with equal accelerators counted ("4 NVIDIA H200")."""
    found = measured["machine"].get("accelerators", [])
    counted = [f"{found.count(name)} {name}" for name in dict.fromkeys(found)]
    return where({**measured, "machine": {**measured["machine"], "accelerators": counted}}).removeprefix("measured on ")


# ---- names -----------------------------------------------------------------------------------------------------------


def names() -> Listing:
    """Every graded name in alphabetical order; the chapter distinguishes those that share a name."""
    found = [e for e in all_exercises() if chapters()[e.module].path.exists()]
    rows = []
    for e in sorted(found, key=lambda e: (e.name.lower(), e.chapter)):
        where = exercise_link(e, e.number), chapter_link(chapters()[e.module])
        rows.append(
            [f"`{e.name}`", plain(e.summary), *where, str(e.size.minutes), str(e.size.difficulty), e.size.weight]
        )
    return table(["name", "what it does", "exercise", "chapter", "minutes", "difficulty", "weight"], rows)


# ---- routes ----------------------------------------------------------------------------------------------------------


def route_table(folder: str = "") -> Listing:
    """The routes through the book: their chapters, exercises and hours, and the command that marks one.

    Args:
        folder: Where the chapters are, seen from the page: "chapters/" for the front page.
    """
    rows = []
    for route in routes().values():
        numbers = ", ".join(chapter_link(chapter, str(chapter.number), folder) for chapter in route.chapters)
        size = f"{len(route.exercises)} exercises, {hours(route.exercises)}"
        rows.append([route.title, numbers, size, f"`workbook check --route {route.key}`"])
    return table(["route", "chapters", "size", "marked by"], rows)


# ---- times and sources -----------------------------------------------------------------------------------------------


def times() -> Listing:
    """How many exercises each chapter has, of which weight, how long they take, and what a chapter needs."""
    rows = []
    for chapter in _written():
        counts = [sum(e.size.weight == weight for e in chapter.exercises) for weight in WEIGHTS]
        tests = f"`pytest tests/chapter_{chapter.number:02d}`"
        core = hours(e for e in chapter.exercises if e.size.weight == "core")
        rows.append([chapter_link(chapter), *map(str, counts), core, hours(chapter.exercises), needs(chapter), tests])
    return table(["chapter", *WEIGHTS, "core takes", "all takes", "needs", "check"], rows)


def hours(exercises: Iterable[Exercise]) -> str:
    """The time that exercises take together, in half hours from one hour on."""
    minutes = sum(e.size.minutes for e in exercises)
    return f"{minutes} min" if minutes < 60 else f"{round(minutes / 30) / 2:g} h"


def needs(chapter: Chapter) -> str:
    """The sentence in which a chapter says what it needs, up to the first semicolon."""
    found = re.search(r"You need (.+?)(?:;|\.(?:\s|$)|$)", opening(chapter), re.MULTILINE)
    return found[1] if found else ""


def opening(chapter: Chapter) -> str:
    """The text between a chapter's title and its first cell."""
    text = chapter.path.read_text(encoding="utf-8")
    return text.split("\n# ", 1)[1].split("```{code-cell}")[0]


def read_on(chapter: Chapter) -> list[tuple[str, str]]:
    """The links of a chapter's section "Read on", as (text, address)."""
    text = chapter.path.read_text(encoding="utf-8").partition("### Read on\n")[2]
    return [(m["text"], m["url"]) for m in LINK.finditer(text)]


def works() -> Listing:
    """For each chapter, the links of its section "Read on"."""
    lines = []
    for chapter in _written():
        links = "; ".join(f"[{text}]({url})" for text, url in read_on(chapter))
        lines.append(f"- **{chapter_link(chapter)}.** {links}.")
    return Listing("\n".join(lines))


def sources() -> Listing:
    """For each exercise, the paper, section and equation that its docstring names."""
    rows = []
    for e in (e for e in all_exercises() if chapters()[e.module].path.exists()):
        for text in (text for title, text in contracts.parts(e.doc) if title == "Source" and isinstance(text, str)):
            linked = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", plain(text))
            rows.append([exercise_link(e, e.number), f"`{e.name}`", linked])
    return table(["exercise", "name", "source"], rows)
