"""The site: the settings of Sphinx that follow from book.yml, the pages of solutions, and the build itself."""

import ast
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lib.ranks import forkserver
from lib.workbook.book.catalog import CHAPTER_FILE, ROOT, BookError, Chapter, chapters, is_back_matter
from lib.workbook.book.stubs import BEGIN, END, source_of, write_atomically
from lib.workbook.checks.warm import can_fork
from lib.workbook.tools.lab import jupyter_path
from lib.workbook.tools.tryit import assets

if TYPE_CHECKING:
    from docutils import nodes
    from jupyter_client import KernelManager
    from nbclient import NotebookClient
    from sphinx.application import Sphinx

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

PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch._dynamo", "numpy", "einops", "jaxtyping", "regex", "yaml", "psutil"),
    *("safetensors.torch", "docstring_parser", "IPython", "ipykernel.ipkernel"),
    *("matplotlib.pyplot", "matplotlib_inline.backend_inline"),
)
INLINE = "module://matplotlib_inline.backend_inline"
"""Where figures go; matplotlib asks when it is imported."""


def build(destination: str | Path = "_build/html", execute: bool = True) -> None:
    """Build every page and run every cell on the reference solutions, as many pages at a time as there are cores, from
    two to four; a warning is an error.

    Args:
        destination: Folder of the pages, relative to the project.
        execute: False leaves out the results of cells, which is enough for editing prose.

    Raises:
        BookError: Sphinx could not build a page; it has printed which one and why.
    """
    write_solution_pages()
    assets.write()
    n_at_once = min(max(os.cpu_count() or 2, 2), 4)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", str(n_at_once)]
    if not execute:
        command += ["-D", "nb_execution_mode=off", "-D", "suppress_warnings=misc.highlighting_failure"]
    command += [str(ROOT), str(ROOT / destination)]
    with warm_kernels(environment()) as variables:
        finished = subprocess.run(command, cwd=ROOT, env=variables)
    if finished.returncode:
        raise BookError("the site could not be built; the errors are printed above")
    print(f"The site is built. Open {Path(destination) / 'index.html'} in a browser.")


def environment() -> dict[str, str]:
    """The environment in which the site's cells run: the reference solutions, links instead of commands, no network,
    one thread a process because several pages share the cores, and compiled modules kept for the next process.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "WORKBOOK_WORLD": "reference",
        "WORKBOOK_LINKS": "site",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",  # as lib/__init__.py sets it; a chapter imports torch before lib
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "JUPYTER_PATH": jupyter_path(),
    }


@contextlib.contextmanager
def warm_kernels(variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """While this block runs, kernels and their ranks are forks of a process that has imported what most pages import.

    Args:
        variables: The environment of a build.

    Returns:
        The same, with the place of that process. Where a process cannot be forked so, there is none.
    """
    if not can_fork():
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        where = f"{folder}/socket"
        server = forkserver.start(where, PRELOADED, env={**variables, "MPLBACKEND": INLINE})
        try:
            yield {**variables, forkserver.VARIABLE: where}
        finally:
            server.kill()
            server.wait()


# ---- what conf.py asks for -------------------------------------------------------------------------------------------


def write_toc(book: dict[str, Any]) -> str:
    """Write book.yml's table of contents as sphinx-external-toc reads it, and return the file's path.

    The first page is the front page.
    Chapters are numbered; pages before the first part, and those of a last part that holds no chapter (the back
    matter), are not.
    The solutions follow as pages below one page of their own, so that they fold.

    Raises:
        BookError: the number in a chapter's file name is not its place in the list.
    """
    loose = [entry for entry in book["toc"] if "file" in entry]
    parts = [part for part in book["toc"] if "file" not in part]
    subtrees: list[dict[str, Any]] = [{"entries": found}] if (found := _entries(loose[1:])) else []
    number = 0
    for part in parts:
        back_matter = part is parts[-1] and all(is_back_matter(entry["file"]) for entry in part["children"])
        for entry in [] if back_matter else part["children"]:
            number += 1
            match = CHAPTER_FILE.fullmatch(entry["file"])
            if match is None or int(match["number"]) != number:
                raise BookError(f"book.yml: expected chapter {number:02d} here, found {entry['file']}")
        if entries := _entries(part["children"]):
            subtrees.append({"caption": part["title"], **({} if back_matter else {"numbered": 1}), "entries": entries})
    solved = [
        {"file": f"solutions/{chapter.module}", "title": f"{chapter.number}. {chapter.title}"}
        for chapter in chapters().values()
        if solution_page(chapter).exists()
    ]
    if solved and SOLUTIONS.exists():
        if not subtrees or "caption" not in subtrees[-1] or "numbered" in subtrees[-1]:
            subtrees.append({"caption": "Solutions", "entries": []})
        subtrees[-1]["entries"].append({"file": "solutions/index", "entries": solved})
    toc = {"root": _page(loose[0]), **({"subtrees": subtrees} if subtrees else {})}
    write_if_new(ROOT / "_build" / "toc.yml", yaml.safe_dump(toc, sort_keys=False))
    return "_build/toc.yml"


def _entries(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"file": _page(entry)} for entry in listed if (ROOT / entry["file"]).exists()]


def _page(entry: dict[str, str]) -> str:
    return entry["file"].removesuffix(".md")


def code_digest() -> str:
    """A name for the code that cells run: it changes whenever lib/ (your answers apart),
    a reference or a measurement does.
    """
    apart = {chapter.mine for chapter in chapters().values()}
    apart |= {
        Path(__file__).with_name(f"{name}.py") for name in ("site", "pages", "opening", "paper", "previews")
    }  # which no cell runs
    parts = ["lib/**/*.py", "lib/**/*.js", "lib/**/*.css", "solutions/*.py", "chapters/measurements/*.json"]
    parts.append("tests/chapter_01/*.py")  # the front page shows a run of them
    files = [path for part in parts for path in ROOT.glob(part)]
    digest = hashlib.sha256()
    for path in sorted(set(files) - apart):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write_if_new(path: Path, text: str) -> None:
    """Write a file unless it already holds that text, so that what depends on its date is left alone."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def share_pages(app: "Sphinx") -> None:
    """Give each process of Sphinx one page with cells at a time, the last chapters first, because they take longest.

    Sphinx would cut the list into a few long pieces, and the process with the slowest piece would end alone.
    """
    from sphinx import builders

    def pieces(arguments: Sequence[str], nproc: int, maxbatch: int = 1) -> list[list[str]]:
        with_cells = sorted((name for name in arguments if has_cells(Path(app.env.doc2path(name)))), reverse=True)
        rest = [name for name in arguments if name not in with_cells]
        found = [[name] for name in with_cells] + ([rest] if rest else [])
        return found[:nproc] + found[nproc:][::-1]  # of those that wait, Sphinx starts the last one

    vars(builders)["make_chunks"] = pieces


def make_cache(folder: str) -> None:
    """Make the database of executed pages.

    Each of Sphinx's processes would make it if it is missing, and fail if another has just done so.
    """
    from jupyter_cache import get_cache

    get_cache(folder).db  # noqa: B018 (made when it is asked for)


def listen_on_files() -> None:
    """Let the build's kernels listen on files in the fork server's folder instead of ports.

    Jupyter looks for free ports, and lets go of them until the kernel listens.
    In between, another page's kernel or ranks may take one.
    """
    from nbclient import NotebookClient

    where = os.environ.get(forkserver.VARIABLE)
    if where is None:
        return
    create = NotebookClient.create_kernel_manager

    def create_kernel_manager(client: "NotebookClient") -> "KernelManager":
        manager = create(client)
        manager.transport, manager.ip = "ipc", str(Path(where).with_name(uuid.uuid4().hex[:8]))
        return manager

    NotebookClient.create_kernel_manager = create_kernel_manager  # type: ignore[assignment, method-assign]


def has_cells(page: Path) -> bool:
    """Whether a page runs code: solution pages do not."""
    return "```{code-cell}" in page.read_text(encoding="utf-8")


# ---- the solution pages ----------------------------------------------------------------------------------------------

SOLUTIONS = ROOT / "solutions" / "index.md"
"""The page that lists the pages of solutions."""


def solution_page(chapter: Chapter) -> Path:
    """The file of a chapter's solution page; on the site it becomes solutions/<module>.html."""
    return ROOT / "solutions" / f"{chapter.module}.md"


def write_solution_pages() -> None:
    """Write each chapter's page of answers, in which an exercise's heading is its name (rope.html#apply-rope),
    and their list.
    """
    written = [chapter for chapter in chapters().values() if chapter.path.exists()]
    for chapter in written:
        write_if_new(solution_page(chapter), _solutions(chapter))
    lines = [
        f"{JUPYTEXT_HEADER}\n# Solutions\n",
        "**Have you tried it?**\n",
        "Here is one good answer to every exercise of the book, a page a chapter.",
        "Each chapter's three hints give away less, in small steps; "
        "`workbook solution NAME --diff` compares an answer with yours.\n",
        *(f"- [{chapter.number}. {chapter.title}]({chapter.module}.md)" for chapter in written),
        "",
    ]
    write_if_new(SOLUTIONS, "\n".join(lines))


def _solutions(chapter: Chapter) -> str:
    source = chapter.numbered()
    targets = re.findall(r"^\(([\w-]+)\)=$", chapter.path.read_text(encoding="utf-8"), re.MULTILINE)
    page = f"../{chapter.path.relative_to(ROOT).as_posix()}"
    lines = [
        f"{JUPYTEXT_HEADER}\n# {chapter.title}: solutions\n",
        f"One good answer to each exercise of [chapter {chapter.number}]({page}).",
        "Yours may look different and be just as good: the checks decide.\n",
    ]
    for exercise in chapter.exercises:
        back = f" [Back to the exercise](#{exercise.label})." if exercise.label in targets else ""
        lines += [
            f"## `{exercise.name}`\n",
            f"Exercise {exercise.number} ({exercise.size}). {exercise.summary}{back}\n",
            _fenced(source_of(source, exercise.name) or ""),
        ]
    if rest := _rest(chapter, source):
        lines += ["## Shared code\n", "The module's imports, constants and helpers.\n", _fenced(rest)]
    return "\n".join(lines)


def _fenced(source: str) -> str:
    shown = "\n".join(line for line in source.splitlines() if line.strip() not in (BEGIN, END))
    return f"```python\n{shown.strip(chr(10))}\n```\n"


def _rest(chapter: Chapter, source: str) -> str:
    """The module without its docstring and without the exercises."""
    graded = {exercise.name for exercise in chapter.exercises}
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or getattr(node, "name", None) in graded:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            del lines[first - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


# ---- the glossary ----------------------------------------------------------------------------------------------------


def read_definition_lists(app: "Sphinx") -> None:
    """Let Sphinx's glossary read terms as Jupyter Book 2 does, with a line ``: definition`` below each."""
    from sphinx.domains.std import Glossary

    class DefinitionList(Glossary):
        def run(self) -> "list[nodes.Node]":
            for i, line in enumerate(self.content):
                if line.startswith(": "):
                    self.content.data[i] = "  " + line[2:]
            return super().run()

    app.add_directive_to_domain("std", "glossary", DefinitionList, override=True)
