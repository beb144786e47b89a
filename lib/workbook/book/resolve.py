"""Whose code runs: the learner's or the reference's, for each graded name of ``lib``.

The environment variable ``WORKBOOK_WORLD`` decides for a process and for every process that it starts:

=============  =========================  ==========================
world          a graded name is           where
=============  =========================  ==========================
``fallback``   the learner's if written,  notebooks, scripts, runs
               else the reference's
``only:rope``  in ``lib.rope`` the        ``pytest tests/chapter_02``
               learner's, in all other
               modules the reference's
``mine``       the learner's              ``pytest --mine``
``reference``  the reference's            ``pytest --reference``, site
=============  =========================  ==========================

``import lib`` installs a finder on ``sys.meta_path`` that loads ``lib.<module>`` accordingly.
A process that grades several chapters switches between worlds; each world has its own copies of the modules.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from lib.workbook.book import boundary
from lib.workbook.book.boundary import AnswerError
from lib.workbook.book.catalog import ROOT, Chapter, Exercise, chapters
from lib.workbook.book.sources import SourceError, read_mine
from lib.workbook.book.stubs import as_lib, contract_arguments, make_stub, marker_lines, methods_left

VARIABLE = "WORKBOOK_WORLD"
KINDS = ("fallback", "reference", "mine")
Contracts = dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]]  # as `contract_arguments` returns them
Stamp = tuple[tuple[int, int] | None, ...]  # of each file its time and its size, or None if it is missing

_active = ""
_loaded: dict[str, dict[str, types.ModuleType]] = defaultdict(dict)
_stamps: dict[str, Stamp] = {}


# called with True before a learner's module runs and with False after it,
# so that a report can say "when it was imported"
on_import: Callable[[bool], object] = lambda begins: None


class ReferenceWarning(UserWarning):
    """The reference replaces something of the learner's: a module that fails to import, or methods not written yet."""


def world() -> str:
    """The world that this process is pinned to; otherwise the one that the environment variable names.

    Raises:
        ValueError: the variable names no world.
    """
    value = boundary.pinned() or os.environ.get(VARIABLE, "fallback")
    kind, _, module = value.partition(":")
    if value not in KINDS and not (kind == "only" and module in chapters()):
        raise ValueError(
            f"{VARIABLE}={value!r}: expected {', '.join(KINDS)} or only:<module> with one of {', '.join(chapters())}"
        )
    return value


def flavor(module: str) -> str:
    """``learner``, ``reference`` or ``fallback``: how this world loads one module."""
    now = world()
    if now.startswith("only:"):
        return "learner" if now == f"only:{module}" else "reference"
    return "learner" if now == "mine" else now


def _belongs_to_a_world(name: str) -> bool:
    module = name.removeprefix("lib.")
    return module in chapters() or name.startswith(("lib.runs.", "lib.bench.", "lib.fast.", "lib.demos."))


def sync() -> None:
    """Put the modules of the current world into ``sys.modules``, and set those of the previous world aside."""
    global _active
    wanted = world()
    if wanted == _active:
        return
    for name in [name for name in sys.modules if name.startswith("lib.") and _belongs_to_a_world(name)]:
        _loaded[_active][name] = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], child):
            delattr(sys.modules[parent], child)
    _active = wanted
    for name, module in _loaded[wanted].items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


def enter(new: str) -> str:
    """Switch to another world; returns the previous one."""
    before = world()
    os.environ[VARIABLE] = new
    sync()
    return before


# ---- loading ---------------------------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        chapter = chapters().get(fullname.removeprefix("lib.")) if fullname.startswith("lib.") else None
        if chapter is None:
            return None
        return importlib.util.spec_from_file_location(fullname, chapter.mine, loader=_Loader(chapter))


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, chapter: Chapter):
        self.chapter = chapter

    def get_source(self, fullname: str) -> str:
        return read_mine(self.chapter)

    def get_code(self, fullname: str) -> types.CodeType:
        """The code that ``python -m lib.rope`` runs: the learner's file as it is."""
        return compile(self.get_source(fullname), str(self.chapter.mine), "exec")

    def is_package(self, fullname: str) -> bool:
        return False

    def exec_module(self, module: types.ModuleType) -> None:
        sync()
        chapter, how = self.chapter, flavor(self.chapter.module)
        _stamps[chapter.module] = stamp(chapter)
        if how == "reference":
            sys.modules[module.__name__] = importlib.import_module(f"solutions.{chapter.module}")
        elif how == "learner":
            _run_learners(chapter, module)
        else:
            _run_with_fallback(chapter, module)


def stamp(chapter: Chapter) -> Stamp:
    """Changes when the learner's file or the reference does."""
    marks: list[tuple[int, int] | None] = []
    for path in (chapter.mine, chapter.reference):
        try:
            status = path.stat()
            marks.append((status.st_mtime_ns, status.st_size))
        except FileNotFoundError:
            marks.append(None)
    return tuple(marks)


def _execute(path: Path, source: str, module: types.ModuleType) -> None:
    exec(compile(source, str(path), "exec"), module.__dict__)


def broken(chapter: Chapter, error: BaseException) -> AnswerError:
    """An AnswerError whose one line says where and why a learner's module fails to import."""
    if isinstance(error, AnswerError | SourceError):
        return AnswerError(str(error))
    where = chapter.mine.relative_to(ROOT)
    line = error.lineno if isinstance(error, SyntaxError) else _last_line(chapter.mine, error)
    text = (error.msg if isinstance(error, SyntaxError) else safe_text(error)) or "no message"
    return AnswerError(f"{where}:{line or 1}: {type(error).__name__}: {text}")


def safe_text(error: BaseException) -> str:
    """An exception's text; safe even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its __str__ raises {type(fault).__name__})"


def _last_line(path: Path, error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _run_learners(chapter: Chapter, module: types.ModuleType) -> None:
    """Load the learner's file and nothing else, behind the boundary.

    Raises:
        AnswerError: the file is missing, fails to import, or opens the reference.
    """
    boundary.check_may_run(chapter.mine)
    try:
        source = read_mine(chapter)
    except SourceError as error:
        raise AnswerError(str(error)) from None
    _contract(chapter)  # read it now: the reference is closed from here on
    boundary.refuse_reference(chapter.module, chapter.mine, chapter.reference)
    on_import(True)
    try:
        _execute(chapter.mine, source, module)
    except (Exception, SystemExit) as error:
        raise broken(chapter, error) from error
    finally:
        on_import(False)


def _run_with_fallback(chapter: Chapter, module: types.ModuleType) -> None:
    """Load the learner's file, and fill each remaining stub with the reference's definition.

    The reference runs in a module of its own, so that its helpers and the learner's never mix.
    The two modules share the graded names, so that the reference calls what the learner wrote.
    """
    standin = types.ModuleType(module.__name__)
    standin.__file__ = str(chapter.reference)
    standin.__package__ = "lib"
    _execute(chapter.reference, as_lib(chapter.reference.read_text(encoding="utf-8")), standin)
    borrowed: dict[str, list[str]] = {}
    try:
        source = read_mine(chapter)
        unwritten, borrowed = marker_lines(source), methods_left(chapter, source)
        _execute(chapter.mine, source, module)
    except (Exception, SystemExit) as error:
        warnings.warn(
            f"{broken(chapter, error)} (until it imports, the reference replaces all of lib.{chapter.module})",
            ReferenceWarning,
            stacklevel=2,
        )
        kept = {key: value for key, value in module.__dict__.items() if key.startswith("__")}
        module.__dict__.update(standin.__dict__)
        module.__dict__.update(kept)
        unwritten = {exercise.name: 0 for exercise in chapter.exercises}
    _share_names(chapter, module, standin, unwritten, borrowed)
    module.__dict__["__standin__"] = standin


def _share_names(
    chapter: Chapter,
    module: types.ModuleType,
    standin: types.ModuleType,
    unwritten: Container[str],
    borrowed: dict[str, list[str]],
) -> None:
    """Give each of the two modules the other's definitions: the learner's where they are written."""
    for exercise in chapter.exercises:
        mine, theirs = module.__dict__.get(exercise.name), getattr(standin, exercise.name)
        if isinstance(mine, type) and isinstance(theirs, type) and borrowed.get(exercise.name):
            _lend_methods(chapter, mine, theirs, borrowed[exercise.name])
            setattr(standin, exercise.name, mine)
        elif exercise.name in unwritten or not callable(mine):
            setattr(module, exercise.name, theirs)
        else:
            setattr(standin, exercise.name, mine)


def _lend_methods(chapter: Chapter, mine: type, theirs: type, names: list[str]) -> None:
    """Fill the stubs of a half-written class with the reference's methods, and warn once which ones."""
    for name, value in vars(theirs).items():
        if name in names or name not in vars(mine):
            setattr(mine, name, _moved(value, mine))
    shown = ", ".join(f"{mine.__name__}.{name}" for name in names)
    verb = "is" if len(names) == 1 else "are"
    warnings.warn(
        f"lib/{chapter.module}.py: {shown} {verb} not written yet, so the reference's code runs there; "
        f"all other methods are yours",
        ReferenceWarning,
        stacklevel=2,
    )


def _moved(value: Any, owner: type) -> Any:
    """A copy of a method from another class's body, in which ``super()`` refers to ``owner``."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(_moved(value.__func__, owner))
    if isinstance(value, property):
        return property(*(_moved(part, owner) for part in (value.fget, value.fset, value.fdel)), doc=value.__doc__)
    if not isinstance(value, types.FunctionType):
        return value
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    if "__class__" in cells:
        cells["__class__"] = types.CellType(owner)
    moved = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells.values())
    )
    return functools.wraps(value)(moved)


# ---- one graded name -------------------------------------------------------------------------------------------------


def answer(module: str, name: str) -> Any:
    """The definition that this world uses for one graded name.

    Raises:
        AnswerError: the learner's is missing, is not callable, or takes other arguments than its contract.
    """
    sync()
    chapter = chapters()[module]
    loaded = importlib.import_module(f"lib.{module}")
    where = chapter.mine.relative_to(ROOT)
    if not hasattr(loaded, name):
        raise AnswerError(f"{where} has no {name}; `workbook reset {name}` puts its stub back")
    found = getattr(loaded, name)
    if flavor(module) == "learner":
        boundary.forget_reference(module)
        exercise = next((e for e in chapter.exercises if e.name == name), None)
        if exercise is not None and not callable(found):
            raise AnswerError(
                f"{where}: {name} is {found!r}, not a function or a class; `workbook reset {name}` puts its stub back"
            )
        if exercise is not None:
            check_signature(exercise, found)
    return found


def check_signature(exercise: Exercise, found: Any) -> None:
    """Check a definition's arguments: other chapters pass them by name, so their names are part of the contract.

    Raises:
        AnswerError: an argument of the contract is missing, or has another name or position.
    """
    chapter = chapters()[exercise.module]
    for method, (wanted, allowed) in _contract(chapter)[exercise.name].items():
        what = f"{exercise.name}.{method}" if method else exercise.name
        part = getattr(found, method, None) if method else found
        if part is None:
            raise AnswerError(f"lib/{exercise.module}.py: there is no {what}, which the contract names")
        try:
            given = list(inspect.signature(inspect.unwrap(part)).parameters.values())
        except (TypeError, ValueError):
            continue  # a kernel, or something defined in C
        if any(p.kind is p.VAR_KEYWORD for p in given):
            continue
        names = tuple(p.name for p in given)
        extra = [p for p in given if p.name not in allowed and p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
        if names[: len(wanted)] != wanted or extra:
            raise AnswerError(
                f"lib/{exercise.module}.py: {what}({', '.join(names)}) should be {what}({', '.join(wanted)}): "
                f"other chapters call it by these names"
            )


_contracts: dict[str, Contracts] = {}


def _contract(chapter: Chapter) -> Contracts:
    """The result of `contract_arguments` for a chapter's stub."""
    if chapter.module not in _contracts:
        _contracts[chapter.module] = contract_arguments(make_stub(chapter))
    return _contracts[chapter.module]


def place(exercise: Exercise, of_world: str) -> tuple[Path, int]:
    """File and line of the definition that a world grades, read from the source without importing it;
    line 0 if there is none.
    """
    chapter = chapters()[exercise.module]
    if of_world == "reference":
        return chapter.reference, exercise.line
    try:
        return chapter.mine, definition_lines(read_mine(chapter)).get(exercise.name, 0)
    except (SourceError, SyntaxError, ValueError):
        return chapter.mine, 0


@functools.lru_cache(maxsize=64)
def definition_lines(source: str) -> dict[str, int]:
    """The line at which each top-level name of a source is defined or assigned; the last one, if there are several."""
    found: dict[str, int] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.lineno for target in node.targets if isinstance(target, ast.Name)}
    return found


# ---- a kernel that keeps running while files are edited --------------------------------------------------------------


def refresh(namespace: dict[str, Any] | None = None) -> list[str]:
    """Reload edited modules in place, and rebind the names in ``namespace`` that refer to their old definitions.

    Returns:
        The modules whose files changed.
    """
    sync()
    running = [c for c in chapters().values() if f"lib.{c.module}" in sys.modules and c.module in _stamps]
    changed = [c.module for c in running if stamp(c) != _stamps[c.module]]
    if not changed or world() == "reference":
        return []
    old: dict[int, tuple[str, str]] = {}
    first = min(chapters()[module].number for module in changed)
    for chapter in running:
        if chapter.number < first:
            continue
        module = sys.modules[f"lib.{chapter.module}"]
        old.update({id(value): (module.__name__, name) for name, value in vars(module).items() if callable(value)})
    keep_alive = [dict(vars(sys.modules[f"lib.{c.module}"])) for c in running]
    for chapter in sorted((c for c in running if c.number >= first), key=lambda c: c.number):
        _reload(sys.modules[f"lib.{chapter.module}"], chapter)
    for name, value in list((namespace or {}).items()):
        place = old.get(id(value))
        if place is not None and hasattr(sys.modules[place[0]], place[1]):
            namespace[name] = getattr(sys.modules[place[0]], place[1])  # type: ignore[index]
    del keep_alive
    return changed


def _reload(module: types.ModuleType, chapter: Chapter) -> None:
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)
    _Loader(chapter).exec_module(module)


def install() -> None:
    """Called once, by ``import lib``."""
    global _active
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        _active = world()
