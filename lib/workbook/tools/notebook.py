"""The book inside a notebook: exercise cards, ``%check``, and a kernel that picks up what you save in lib/."""

import ast
import html
import os
import re
from itertools import groupby
from typing import Any

from lib.workbook.book import contracts, resolve
from lib.workbook.book.catalog import BookError, Chapter, Exercise, find
from lib.workbook.checks.summary import describe
from lib.workbook.tools import check as checks

STYLE = """<style>
.workbook-exercise, .workbook-check {border-left: 4px solid #3b82c4; background: rgba(59,130,196,.08);
  padding: .6em 1em;
  margin: .8em 0; border-radius: 4px; font-size: .95em; overflow-x: auto}
.workbook-exercise h4 {margin: 0 0 .4em; font-size: 1.05em}
.workbook-exercise pre, .workbook-check pre {background: rgba(127,127,127,.12); padding: .5em .7em; border-radius: 4px;
  margin: .5em 0; white-space: pre-wrap; word-break: normal !important; overflow-wrap: anywhere}
.workbook-exercise dl {margin: .4em 0; display: grid; grid-template-columns: max-content 1fr; gap: .15em 1em}
.workbook-exercise dt {font-weight: 600} .workbook-exercise dd {margin: 0}
.workbook-exercise p, .workbook-exercise ul {margin: .4em 0} .workbook-exercise dd > :first-child {margin-top: 0}
.workbook-check table {border-collapse: collapse; margin: .2em 0; border: 0; font-size: 1em}
.workbook-check tr, .workbook-exercise pre code {background: none !important; border: 0}
.workbook-check td {padding: .15em .8em .15em 0; text-align: left !important; vertical-align: top; white-space: normal}
</style>"""
COLOURS = {"passed": "#2e9e5b", "wrong": "#d9534f", "not started": "#b58900", "skipped": "#3b82c4"}
COLOURS |= dict.fromkeys(("not run", "not checked"), "#8e5fa8")


class Shown:
    """A piece of HTML with its plain text."""

    def __init__(self, page: str, text: str):
        self.page, self.text = page, text

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


# ---- the exercise card -----------------------------------------------------------------------------------------------


def exercise(name: str) -> Shown:
    """The card of an exercise: its number, contract, file and check, from the reference's docstring."""
    chapter, found = find(name)
    if found is None:
        raise BookError(f"{name!r} is a chapter; name one of its exercises, such as {chapter.exercises[0].name!r}")
    parts = [
        f"<h4>Exercise {found.number} · <code>{html.escape(found.name)}</code></h4><p><em>{found.size}</em></p>",
        f"<pre><code>{html.escape(signature(chapter, found))}</code></pre>",
        contract(found.doc),
        f"<p>Write it in <code>lib/{found.module}.py</code>, then run <code>%check {found.handle}</code> in a cell or "
        f"<code>{found.command}</code> in a terminal. {_solution_link(found)}</p>",
    ]
    return Shown(
        f'{STYLE}<div class="workbook-exercise">{"".join(parts)}</div>',
        f"Exercise {found.number}: {found.name}\n\n{found.doc}",
    )


def _solution_link(found: Exercise) -> str:
    """A link on the site, a command everywhere else: the solution is one click or one line away, never on the page."""
    if os.environ.get("WORKBOOK_LINKS") == "site":
        anchor = found.name.lower().replace("_", "-").strip("-")  # as Sphinx names a heading
        return f'<a href="../solutions/{found.module}.html#{anchor}">The solution</a>.'
    return f"The solution: <code>workbook solution {found.handle}</code>."


def signature(chapter: Chapter, found: Exercise) -> str:
    """The signature of a function, or a class with the signatures of its public methods, from the reference."""
    for node in ast.parse(chapter.reference.read_text(encoding="utf-8")).body:
        if getattr(node, "name", None) != found.name:
            continue
        if isinstance(node, ast.FunctionDef):
            return _head(node)
        methods = [m for m in getattr(node, "body", []) if isinstance(m, ast.FunctionDef)]
        shown = [
            f"    {_head(m)}"
            for m in methods
            if m.name in ("__init__", "forward", "__call__") or not m.name.startswith("_")
        ]
        bases = ", ".join(ast.unparse(base) for base in getattr(node, "bases", []))
        return "\n".join([f"class {found.name}({bases}):" if bases else f"class {found.name}:", *shown])
    raise BookError(f"{chapter.reference} has no {found.name}")


def _head(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"``(.+?)``|`(.+?)`", lambda m: f"<code>{m[1] or m[2]}</code>", escaped)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', escaped)


def contract(doc: str) -> str:
    """A docstring's text and sections as HTML, without the exercise's number, which is in the card's title."""
    return "".join(_block(title, text) for title, text in contracts.parts(doc))


def _block(title: str, text: str | list[tuple[str, str]]) -> str:
    if isinstance(text, str):
        return _prose(text, f"<strong>{title}.</strong> " if title else "")
    shown = [(name, _prose(what) if "\n" in what else _inline(what)) for name, what in text]
    items = "".join(f"<dt><code>{html.escape(name)}</code></dt><dd>{what}</dd>" for name, what in shown)
    return f"<p><strong>{title}</strong></p><dl>{items}</dl>"


def _prose(text: str, head: str = "") -> str:
    """Paragraphs, and lists of the lines that begin with a dash; ``head`` begins the first paragraph."""
    shown = ""
    for is_list, lines in groupby(text.split("\n"), lambda line: line.startswith("- ")):
        if is_list:
            shown += f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in lines)}</ul>"
        else:
            shown += "".join(f"<p>{_inline(line)}</p>" for line in lines)
    if text.startswith("- "):
        return f"<p>{head}</p>{shown}" if head else shown
    return shown.replace("<p>", f"<p>{head}", 1)


# ---- %check ----------------------------------------------------------------------------------------------------------


def check(line: str) -> Shown:
    """Grade the chapter or exercise of a ``%check`` line, in a process of its own, exactly as in a terminal."""
    words = line.split()
    mine = "--mine" in words
    names = [word for word in words if not word.startswith("-")]
    if len(names) != 1:
        return _told(f"%check takes one chapter or exercise, as in `%check apply_rope`, but got {line.strip()!r}")
    try:
        result = checks.run(names[0], mine=mine)
    except BookError as error:
        return _told(str(error))
    rows = "".join(
        f'<tr><td style="color:{COLOURS[row["state"]]}">{checks.SIGNS[row["state"]][0]} {row["state"]}</td>'
        f"<td>{row['number']} <code>{html.escape(row['name'])}</code></td><td>{html.escape(describe(row))}</td></tr>"
        for row in result.rows
    )
    report = f"<pre>{html.escape(result.first_report)}</pre>" if result.first_report else ""
    plain = "\n".join(f"{row['number']} {row['name']}: {row['state']}  {describe(row)}" for row in result.rows)
    page = f'{STYLE}<div class="workbook-check"><table>{rows}</table>{report}</div>'
    return Shown(page, plain + ("\n\n" + result.first_report if result.first_report else ""))


def _told(text: str) -> Shown:
    return Shown(f'{STYLE}<div class="workbook-check"><pre>{html.escape(text)}</pre></div>', text)


# ---- the kernel ------------------------------------------------------------------------------------------------------


def load(shell: Any = None) -> None:
    """Register ``%check``, and a hook that reloads edited modules before each cell;
    ``import lib`` calls it in a kernel.
    """
    from IPython.core.getipython import get_ipython

    shell = shell or get_ipython()
    if shell is None or getattr(shell, "workbook_loaded", False):
        return
    shell.workbook_loaded = True
    shell.register_magic_function(check, "line", "check")

    def before_cell(info: object = None) -> None:
        _leave_to_us(shell)
        resolve.refresh(shell.user_ns)

    shell.events.register("pre_run_cell", before_cell)


load_ipython_extension = load
"""Lets `workbook lab` load this module when a kernel starts (``.jupyter/kernels``),
so that ``%check`` works before any other cell has run.
"""


def _leave_to_us(shell: Any) -> None:
    """Keep ``%autoreload`` away from graded modules, whose names may come from the reference."""
    from lib.workbook.book.catalog import chapters

    reloader = getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
    if reloader is not None:
        for module in chapters():
            reloader.mark_module_skipped(f"lib.{module}")
