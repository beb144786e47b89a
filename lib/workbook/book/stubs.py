"""Stubs made from the reference, and what state a learner's answer is in."""

import ast
import difflib
import hashlib
import json
import os
import re
from datetime import datetime
from pathlib import Path

from lib.workbook.book.catalog import ROOT, BookError, Chapter, chapters

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
RECORD = Path(__file__).with_name("stubs.json")
BACKUPS = ROOT / ".workbook" / "backups"
_REFERENCE_IMPORT = re.compile(r"^(\s*(?:from|import) )solutions\b", re.MULTILINE)


def as_lib(source: str) -> str:
    """The reference's source with its imports of ``solutions`` turned into imports of ``lib``."""
    return _REFERENCE_IMPORT.sub(r"\1lib", source)


def _owners(tree: ast.Module, graded: dict[str, str]) -> list[tuple[int, int, str, str]]:
    """(first line, last line, exercise number, what is to be written) of each function; the innermost comes last.

    What is to be written is empty for a class: what a mark hides there, beside its methods, is a helper that just goes.
    """
    spans = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in graded:
            number = graded[node.name]
            written = "" if isinstance(node, ast.ClassDef) else node.name
            spans.append((node.lineno, node.end_lineno or node.lineno, number, written))
            for child in ast.walk(node):
                if child is not node and isinstance(child, ast.FunctionDef):
                    inside = f"{node.name}.{child.name}" if isinstance(node, ast.ClassDef) else node.name
                    spans.append((child.lineno, child.end_lineno or child.lineno, number, inside))
    return spans


def make_stub(chapter: Chapter, source: str | None = None) -> str:
    """The learner's file: the reference with every marked part replaced by a NotImplementedError that names its exercise.

    Raises:
        BookError: a mark has no partner, or the stub is no Python or asks for too little; the message names the file and
            the line or the exercise.
    """
    path = chapter.reference
    source = chapter.numbered(source)
    graded = {e.name: e.number for e in chapter.exercises}
    spans = _owners(ast.parse(source, str(path)), graded)
    out: list[str] = []
    begun = 0
    for number, line in enumerate(source.splitlines(), start=1):
        mark = line.strip()
        if mark == BEGIN:
            if begun:
                raise BookError(f"{path}:{number}: {BEGIN} inside the one of line {begun}")
            begun = number
            owner = [span for span in spans if span[0] <= number <= span[1]]
            if owner and owner[-1][3]:
                indent = line[: len(line) - len(line.lstrip())]
                out.append(f'{indent}raise NotImplementedError("Exercise {owner[-1][2]}: write {owner[-1][3]}")')
        elif mark == END:
            if not begun:
                raise BookError(f"{path}:{number}: {END} without {BEGIN}")
            begun = 0
        elif not begun:
            out.append(line)
    if begun:
        raise BookError(f"{path}:{begun}: {BEGIN} without {END}")
    text = as_lib("\n".join(out).rstrip("\n") + "\n")
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    try:
        asked = marker_lines(text)
    except SyntaxError as error:
        raise BookError(f"{path}: its stub is no Python, {error.msg}: {(error.text or '').strip()!r}") from error
    if missing := [name for name in graded if name not in asked]:
        raise BookError(
            f"{path}: the stub asks nothing of {', '.join(missing)}: put {BEGIN} inside a function or a method of it"
        )
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one step, so that a reader or a killed program sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def keep_copy(path: Path) -> Path:
    """Copy a learner's file to a dated one under .workbook/backups, and return where it lies."""
    stamp = datetime.now().strftime("%Y-%m-%dT%H-%M-%S.%f")
    copy = BACKUPS / f"{path.stem}-{stamp}{path.suffix}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
    return copy


def write_stubs(check: bool = False) -> list[str]:
    """Write every lib/<module>.py that nobody has begun; with ``check``, only say what differs.

    Returns:
        A line for each file that differed (``check``), was written, or was left because it was begun.
    """
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    fresh, lines = {}, []
    for chapter in chapters().values():
        stub = make_stub(chapter)
        fresh[chapter.module] = _digest(stub)
        now = chapter.mine.read_text(encoding="utf-8") if chapter.mine.exists() else None
        if now == stub:
            continue
        where = chapter.mine.relative_to(ROOT)
        if check:
            difference = difflib.unified_diff(
                (now or "").splitlines(), stub.splitlines(), str(where), "stub", lineterm="", n=1
            )
            lines.append("\n".join(list(difference)[:20]))
        elif now is not None and _digest(now) != recorded.get(chapter.module):
            fresh[chapter.module] = recorded.get(chapter.module, "")
            lines.append(
                f"{where} was begun: left as it is (workbook reset {chapter.module} starts it anew and keeps a copy)"
            )
        else:
            write_atomically(chapter.mine, stub)
            lines.append(f"{where} written")
    record = json.dumps(fresh, indent=2, sort_keys=True) + "\n"
    if check and (not RECORD.exists() or RECORD.read_text() != record):
        lines.append(f"{RECORD.relative_to(ROOT)} is out of date: run `workbook stubs`, and commit it with lib/")
    elif not check and (not RECORD.exists() or RECORD.read_text() != record):
        write_atomically(RECORD, record)
    return lines


# ---- the state of a learner's answer ---------------------------------------------------------------------------------


def _is_marker(node: ast.AST) -> bool:
    """``raise NotImplementedError("Exercise …")``"""
    return (
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") == "NotImplementedError"
        and bool(node.exc.args)
        and isinstance(node.exc.args[0], ast.Constant)
        and str(node.exc.args[0].value).startswith("Exercise ")
    )


def marker_lines(source: str) -> dict[str, int]:
    """Graded names of a learner's source that still hold a stub's ``raise``, with the line of the first."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines = [inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Raise) and _is_marker(inner)]
            if lines:
                found[node.name] = min(lines)
    return found


def methods_left(chapter: Chapter, source: str) -> dict[str, list[str]]:
    """The methods that still hold a stub's ``raise``, of each class of which a learner has written others."""
    left = _methods_with_markers(source)
    asked = _methods_with_markers(make_stub(chapter)) if left else {}
    return {name: methods for name, methods in left.items() if set(methods) < set(asked.get(name, ()))}


def _methods_with_markers(source: str) -> dict[str, list[str]]:
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            found[node.name] = [m.name for m in methods if any(map(_is_marker, ast.walk(m)))]
    return {name: methods for name, methods in found.items() if methods}


def contract_arguments(stub: str) -> dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]]:
    """Of each top-level name of a stub, by method ("" for a function): its positional arguments in order, and all of them.

    The methods of an ``autograd.Function``, which are called by position, are left out, and so are properties.
    """
    found: dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = {"": _arguments(node)}
        elif isinstance(node, ast.ClassDef):
            by_position = any(ast.unparse(base).endswith("Function") for base in node.bases)
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not by_position]
            public = [m for m in methods if not m.name.startswith("_") or m.name in ("__init__", "__call__")]
            found[node.name] = {m.name: _arguments(m) for m in public if not _is_property(m)}
    return found


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).split(".")[-1] in ("property", "setter", "cached_property") for d in node.decorator_list)


def _arguments(node: ast.FunctionDef) -> tuple[tuple[str, ...], frozenset[str]]:
    given = node.args
    positional = tuple(a.arg for a in (*given.posonlyargs, *given.args))
    others = [a.arg for a in (*given.kwonlyargs, given.vararg, given.kwarg) if a is not None]
    return positional, frozenset([*positional, *others])


def read_mine(chapter: Chapter) -> str:
    """The text of a learner's file."""
    return chapter.mine.read_text(encoding="utf-8-sig")


def _span(source: str, name: str) -> tuple[int, int] | None:
    """First and last line of a top-level definition, its decorators included."""
    span = None
    for node in ast.parse(source).body:
        if getattr(node, "name", None) == name:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            span = (first, node.end_lineno or node.lineno)
    return span


def source_of(source: str, name: str) -> str | None:
    """The text of one top-level definition."""
    span = _span(source, name)
    return None if span is None else "\n".join(source.splitlines()[span[0] - 1 : span[1]])


def reset(chapter: Chapter, name: str | None = None) -> Path | None:
    """Put a stub back in place of one answer, or of the whole module; return the dated copy of what was there.

    Raises:
        BookError: the module does not parse, so that one answer cannot be found in it.
    """
    stub = make_stub(chapter)
    copy = keep_copy(chapter.mine) if chapter.mine.exists() else None
    if name is None or copy is None:
        write_atomically(chapter.mine, stub)
        return copy
    mine = chapter.mine.read_text(encoding="utf-8")
    try:
        span = _span(mine, name)
    except SyntaxError as error:
        raise BookError(
            f"{chapter.mine.relative_to(ROOT)}:{error.lineno}: {error.msg}; mend that line, "
            f"or start the whole module anew with: workbook reset {chapter.module}"
        ) from error
    fresh = source_of(stub, name)
    assert fresh is not None, f"the stub has no {name}"
    lines = mine.splitlines()
    if span is None:
        text = mine.rstrip("\n") + f"\n\n\n{fresh}\n"
    else:
        text = "\n".join([*lines[: span[0] - 1], *fresh.splitlines(), *lines[span[1] :]]) + "\n"
    write_atomically(chapter.mine, text)
    return copy
