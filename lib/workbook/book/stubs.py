"""Makes stubs from the reference, and finds out which exercises of a learner's file are written."""

import ast
import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from lib.workbook.book import sources
from lib.workbook.book.catalog import ROOT, BookError, Chapter, chapters
from lib.workbook.book.sources import SourceError, line_end, lines_of, read_bytes, read_exactly, read_mine

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
RECORD = Path(__file__).with_name("stubs.json")
BACKUPS = ROOT / ".workbook" / "backups"
_REFERENCE_IMPORT = re.compile(r"^(\s*(?:from|import) )solutions\b", re.MULTILINE)


def as_lib(source: str) -> str:
    """The reference's source with its imports of ``solutions`` turned into imports of ``lib``."""
    return _REFERENCE_IMPORT.sub(r"\1lib", source)


def _owners(tree: ast.Module, graded: dict[str, str]) -> list[tuple[int, int, str, str]]:
    """(first line, last line, exercise number, name to be written) of each function, outer functions before inner ones.

    For a class the name is empty: a marked part between its methods is a helper, which the stub simply leaves out.
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
    """The learner's file: the reference, with a NotImplementedError that names the exercise in
    place of every marked part.

    Raises:
        BookError: a mark has no partner, the stub is not valid Python, or an exercise has nothing to write;
            the message names the file and the line or exercise.
    """
    path = chapter.reference
    source = chapter.numbered(source)
    graded = {e.name: e.number for e in chapter.exercises}
    text = as_lib(_without_answers(path, source, graded).rstrip("\n") + "\n")
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    try:
        asked = marker_lines(text)
    except SyntaxError as error:
        raise BookError(f"{path}: its stub is not valid Python, {error.msg}: {(error.text or '').strip()!r}") from error
    if missing := [name for name in graded if name not in asked]:
        raise BookError(
            f"{path}: the stub leaves nothing to write in {', '.join(missing)}: "
            f"put {BEGIN} inside its function or a method"
        )
    return text


def _without_answers(path: Path, source: str, graded: dict[str, str]) -> str:
    """The source without its marked parts."""
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
    return "\n".join(out)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one step: at every moment, even after a crash, the file is complete, either old or new."""
    sources.write_bytes(path, text.encode("utf-8"))


def dated(path: Path) -> Path:
    """The path for a copy of a learner's file: under .workbook/backups, with the time in its name."""
    stamp = datetime.now().strftime("%Y-%m-%dT%H-%M-%S.%f")
    return BACKUPS / f"{path.stem}-{stamp}{path.suffix}"


def keep_copy(path: Path, module: str | None = None) -> Path:
    """Copy a learner's file (a module or any other) to a dated file under .workbook/backups;
    returns the copy's path.
    """
    copy = dated(path)
    sources.write_bytes(copy, read_bytes(path, module))
    return copy


def _now(chapter: Chapter) -> tuple[str | None, str]:
    """The text of a learner's module (None if there is none), and the problem if it cannot be read ("" otherwise)."""
    if not chapter.mine.exists():
        return None, ""
    try:
        return read_mine(chapter), ""
    except SourceError as error:
        return None, str(error)


def is_begun(chapter: Chapter) -> bool:
    """Whether the learner has written anything in this module."""
    now, unreadable = _now(chapter)
    return bool(unreadable) or (now is not None and now != make_stub(chapter))


def write_stubs(check: bool = False) -> list[str]:
    """Write every lib/<module>.py that nobody has begun; with ``check``, only report differences.

    Returns:
        A line for each file that differs (``check``), was written, or was left alone because somebody has begun it.
    """
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    fresh, lines = {}, []
    for chapter in chapters().values():
        stub, kept = make_stub(chapter), recorded.get(chapter.module, "")
        told, is_left = _write_one(chapter, stub, kept, check)
        fresh[chapter.module] = kept if is_left else _digest(stub)
        lines += told
    record = json.dumps(fresh, indent=2, sort_keys=True) + "\n"
    if check and (not RECORD.exists() or RECORD.read_text() != record):
        lines.append(f"{RECORD.relative_to(ROOT)} is out of date: run `workbook stubs`, and commit it with lib/")
    elif not check and (not RECORD.exists() or RECORD.read_text() != record):
        write_atomically(RECORD, record)
    return lines


def _write_one(chapter: Chapter, stub: str, recorded: str, check: bool) -> tuple[list[str], bool]:
    """`write_stubs` for one file: a line about it or none, and whether the file keeps what is not this stub."""
    now, unreadable = _now(chapter)
    if now == stub:
        return [], False
    where = chapter.mine.relative_to(ROOT)
    if unreadable:
        return [f"{unreadable}; left as it is"], True
    if check:
        before = (now or "").splitlines()
        difference = difflib.unified_diff(before, stub.splitlines(), str(where), "stub", lineterm="", n=1)
        return ["\n".join(list(difference)[:20])], False
    if now is not None and _digest(now) != recorded:
        again = f"workbook reset {chapter.module} makes it a stub again and keeps a copy"
        return [f"{where} is begun, so it stays as it is ({again})"], True
    sources.write_stub(chapter.mine, stub)
    return [f"{where} written"], False


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
    """Names in a learner's source that still contain a stub's ``raise``, each with the line of the first one."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines = [inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Raise) and _is_marker(inner)]
            if lines:
                found[node.name] = min(lines)
    return found


def untouched(chapter: Chapter) -> frozenset[str]:
    """The exercises of a chapter whose definitions are still the stub's, word for word."""
    try:
        mine = _definitions(read_mine(chapter))
    except (SourceError, SyntaxError, ValueError):
        return frozenset()
    stub = _definitions(make_stub(chapter))
    return frozenset(e.name for e in chapter.exercises if mine.get(e.name) == stub[e.name])


def _definitions(source: str) -> dict[str, str]:
    """The text of each definition at a module's top level."""
    lines, nodes = lines_of(source), ast.parse(source).body
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: "".join(lines[_first(node) - 1 : node.end_lineno]).rstrip("\n") for node in named}


def methods_left(chapter: Chapter, source: str) -> dict[str, list[str]]:
    """For each half-written class, the methods that still contain a stub's ``raise``."""
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
    """The arguments of each top-level name of a stub, by method ("" for a function):
    the positional ones in order, and all.

    Properties are left out, and so are the methods of an ``autograd.Function``, which are called by position.
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


def _span(source: str, name: str) -> tuple[int, int] | None:
    """First and last line of a top-level definition, including its decorators."""
    span = None
    for node in _statements(source):
        if getattr(node, "name", None) == name:
            span = (_first(node), node.end_lineno or node.lineno)
    return span


@lru_cache(maxsize=2)
def _statements(source: str) -> list[ast.stmt]:
    """The top-level statements of a source, parsed once for all of the exercises that are looked up in it."""
    return ast.parse(source).body


def _first(node: ast.stmt) -> int:
    """The first line of a statement, including its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def source_of(source: str, name: str) -> str | None:
    """The text of one top-level definition."""
    span = _span(source, name)
    return None if span is None else "".join(lines_of(source)[span[0] - 1 : span[1]]).rstrip("\n")


def bindings(source: str) -> dict[str, ast.stmt]:
    """For each name of a module, the top-level statement that binds it last."""
    bound: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = node
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name.partition(".")[0]: node for alias in inner.names}
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                bound[inner.id] = node
    return bound


def piece(stub: str, name: str, mine: str, also: Iterable[str] = ()) -> str:
    """One exercise of a stub, preceded by the imports and helpers that it uses and the learner's source lacks.

    Args:
        stub: The whole stub.
        name: The exercise.
        mine: The learner's source.
        also: Other names of the stub that the answer will use.
    """
    given, have = bindings(stub), {name, *bindings(mine)}
    needed, missing = [given[name], *(given[other] for other in {*also} - have)], {*also} - have
    while needed:
        used = {n.id for n in ast.walk(needed.pop()) if isinstance(n, ast.Name)} & (given.keys() - have - missing)
        missing |= used
        needed += [given[other] for other in used]
    nodes = sorted({id(given[other]): given[other] for other in missing}.values(), key=lambda node: node.lineno)
    parts = ["".join(lines_of(stub)[_first(node) - 1 : node.end_lineno]).rstrip("\n") for node in nodes]
    lines = "\n".join(part for node, part in zip(nodes, parts, strict=True) if not hasattr(node, "name"))
    definitions = [part for node, part in zip(nodes, parts, strict=True) if hasattr(node, "name")]
    return "\n\n\n".join(filter(None, [lines, *definitions, source_of(stub, name)]))


def with_piece(mine: str, added: str) -> str:
    """A learner's source with something added at its end, in the source's own line ends; the rest is unchanged."""
    start = "" if mine.endswith(("\n", "\r")) or not mine else "\n"
    return mine + f"{start}\n\n{added}\n".replace("\n", line_end(mine))


def reset(chapter: Chapter, name: str | None = None) -> Path | None:
    """Replace one answer, or the whole module, by its stub; returns the dated copy of the file as it was.

    Raises:
        BookError: the module cannot be read, or does not parse, so that the answer cannot be found in it.
    """
    stub = make_stub(chapter)
    mine = None if name is None or not chapter.mine.exists() else read_exactly(chapter)
    copy = keep_copy(chapter.mine, chapter.module) if chapter.mine.exists() else None
    if mine is None or name is None:
        sources.write_stub(chapter.mine, stub)
        return copy
    try:
        span = _span(mine, name)
    except SyntaxError as error:
        raise SourceError(
            f"{where_it_breaks(chapter, error)}; fix that line, "
            f"or start the whole module over with: workbook reset {chapter.module}"
        ) from error
    if span is None:
        text = with_piece(mine, piece(stub, name, mine))
    else:
        lines, fresh = lines_of(mine), f"{source_of(stub, name)}\n".replace("\n", line_end(mine))
        text = "".join([*lines[: span[0] - 1], fresh, *lines[span[1] :]])
    sources.write_mine(chapter.mine, text)
    return copy


def where_it_breaks(chapter: Chapter, error: SyntaxError) -> str:
    """``lib/rope.py:7: SyntaxError: '(' was never closed``."""
    return f"{sources.shown(chapter.mine)}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
