"""The site: Sphinx's settings that follow from book.yml, the solution pages, and the build itself."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from lib.workbook.book.catalog import CHAPTER_FILE, ROOT, BookError, Chapter, chapters, is_back_matter
from lib.workbook.book.stubs import BEGIN, END, source_of, write_atomically

JUPYTEXT_HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3 (ipykernel)
  language: python
  name: python3
---
"""


def build(destination: str | Path = "_build/html", execute: bool = True) -> None:
    """Build every page, each cell executed on the reference; a warning is an error.

    Args:
        destination: Folder of the pages, relative to the project.
        execute: False shows the cells without their results, for who only edits prose.

    Raises:
        BookError: Sphinx found fault with a page; it has printed which.
    """
    write_solution_pages()
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    if not execute:
        command += ["-D", "nb_execution_mode=off", "-D", "suppress_warnings=misc.highlighting_failure"]
    command += [str(ROOT), str(ROOT / destination)]
    finished = subprocess.run(command, cwd=ROOT, env=environment())
    if finished.returncode:
        raise BookError("the site has faults; they stand above")
    print(f"the site is in {destination}; open {Path(destination) / 'index.html'}")


def environment() -> dict[str, str]:
    """What the cells of the site see: the reference's code, links instead of commands, and no network."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "WORKBOOK_WORLD": "reference",
        "WORKBOOK_LINKS": "site",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


# ---- what conf.py asks for -------------------------------------------------------------------------------------------


def write_toc(book: dict) -> str:
    """Write book.yml's table of contents as sphinx-external-toc reads it, and return where it is.

    Chapters are numbered; the last part may hold pages that are none (the back matter), and these are not.

    Raises:
        BookError: a chapter's file bears another number than its place in the list.
    """
    first, *parts = book["toc"]
    number = 0
    subtrees = []
    for part in parts:
        entries = []
        back_matter = part is parts[-1] and all(is_back_matter(entry["file"]) for entry in part["children"])
        for entry in part["children"]:
            match = CHAPTER_FILE.fullmatch(entry["file"])
            number += 1
            if not back_matter and (match is None or int(match["number"]) != number):
                raise BookError(f"book.yml: {entry['file']} stands where chapter {number:02d} is expected")
            if (ROOT / entry["file"]).exists():
                entries.append({"file": entry["file"].removesuffix(".md")})
        if entries:
            numbered = {} if back_matter else {"numbered": 1}
            subtrees.append({"caption": part["title"], **numbered, "entries": entries})
    solved = [
        {"file": f"solutions/{chapter.module}", "title": f"{chapter.number}. {chapter.title}"}
        for chapter in chapters().values()
        if solution_page(chapter).exists()
    ]
    if solved:
        subtrees.append({"caption": "Solutions", "entries": solved})
    toc = {"root": first["file"].removesuffix(".md"), **({"subtrees": subtrees} if subtrees else {})}
    write_if_new(ROOT / "_build" / "toc.yml", yaml.safe_dump(toc, sort_keys=False))
    return "_build/toc.yml"


def code_digest() -> str:
    """A name for what the cells run: it changes when lib's own parts, a reference or a measurement does."""
    mine = {chapter.mine for chapter in chapters().values()}
    parts = ("lib/**/*.py", "lib/**/*.js", "lib/**/*.css", "solutions/*.py", "chapters/measurements/*.json")
    files = [path for part in parts for path in ROOT.glob(part)]
    digest = hashlib.sha256()
    for path in sorted(set(files) - mine):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def offer_notebook(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Put the page's notebook, without results, beside its source, where the theme's download button looks for it."""
    source = Path(app.srcdir, f"{pagename}.md")
    if doctree is None or not pagename.startswith("chapters/") or not source.exists():
        return
    import jupytext

    target = Path(app.outdir, "_sources", f"{pagename}.ipynb")
    write_if_new(target, jupytext.writes(jupytext.read(source), fmt="ipynb"))
    context["ipynb_source"] = f"{pagename}.ipynb"


def write_if_new(path: Path, text: str) -> None:
    """Write a file unless it already holds that text, so that what depends on its date is left alone."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


# ---- the solution pages ----------------------------------------------------------------------------------------------


def solution_page(chapter: Chapter) -> Path:
    """Where a chapter's solution page is written; on the site it is solutions/<module>.html."""
    return ROOT / "solutions" / f"{chapter.module}.md"


def write_solution_pages() -> None:
    """Write each chapter's page of answers; an exercise's heading is its name, hence rope.html#apply-rope."""
    for chapter in chapters().values():
        if chapter.path.exists():
            write_if_new(solution_page(chapter), _solutions(chapter))


def _solutions(chapter: Chapter) -> str:
    source = chapter.numbered()
    targets = re.findall(r"^\(([\w-]+)\)=$", chapter.path.read_text(encoding="utf-8"), re.MULTILINE)
    page = f"../{chapter.path.relative_to(ROOT).as_posix()}"
    lines = [
        f"{JUPYTEXT_HEADER}\n# {chapter.title}: solutions\n",
        f"One good answer to each exercise of [chapter {chapter.number}]({page}).",
        "Yours may differ and be as good: the checks decide.\n",
    ]
    for exercise in chapter.exercises:
        back = f" [Back to the exercise](#{exercise.label})." if exercise.label in targets else ""
        lines += [
            f"## `{exercise.name}`\n",
            f"Exercise {exercise.number}{', stretch' if exercise.stretch else ''}. {exercise.summary}{back}\n",
            _fenced(source_of(source, exercise.name) or ""),
        ]
    if rest := _rest(chapter, source):
        lines += ["## What they share\n", "Imports, constants and helpers of the module.\n", _fenced(rest)]
    return "\n".join(lines)


def _fenced(source: str) -> str:
    shown = "\n".join(line for line in source.splitlines() if line.strip() not in (BEGIN, END))
    return f"```python\n{shown.strip(chr(10))}\n```\n"


def _rest(chapter: Chapter, source: str) -> str:
    """The module without its docstring and its graded names."""
    graded = {exercise.name for exercise in chapter.exercises}
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or getattr(node, "name", None) in graded:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            del lines[first - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


# ---- the glossary ----------------------------------------------------------------------------------------------------


def read_definition_lists(app) -> None:
    """Let Sphinx's glossary take terms as Jupyter Book 2 does: a line ``: definition`` below each."""
    from sphinx.domains.std import Glossary

    class DefinitionList(Glossary):
        def run(self):
            for i, line in enumerate(self.content):
                if line.startswith(": "):
                    self.content.data[i] = "  " + line[2:]
            return super().run()

    app.add_directive_to_domain("std", "glossary", DefinitionList, override=True)
