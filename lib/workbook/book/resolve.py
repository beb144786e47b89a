"""Whose code runs: which definition stands behind each graded name of ``lib``.

One environment variable, ``WORKBOOK_WORLD``, says it for a process and for every process that it starts:

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

``import lib`` puts a finder on ``sys.meta_path`` that loads ``lib.<module>`` accordingly. A process that grades several
chapters changes worlds; each world keeps its own modules.
"""

import builtins
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections import defaultdict
from pathlib import Path

from lib.workbook.book.catalog import ROOT, Chapter, chapters
from lib.workbook.book.stubs import as_lib, marker_lines, reference_imports

VARIABLE = "WORKBOOK_WORLD"
KINDS = ("fallback", "reference", "mine")

_active = ""
_loaded: dict[str, dict[str, types.ModuleType]] = defaultdict(dict)
_stamps: dict[str, tuple] = {}


class AnswerError(Exception):
    """A learner's answer that cannot be graded; the message says why and where."""


class ReferenceWarning(UserWarning):
    """A module of the learner's does not import, and the reference stands in for it."""


def world() -> str:
    """The world that the environment asks for.

    Raises:
        ValueError: the variable holds something else.
    """
    value = os.environ.get(VARIABLE, "fallback")
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
    """Put the modules of the world that the environment asks for into ``sys.modules``."""
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
    """Change to another world; return the one that was."""
    before = world()
    os.environ[VARIABLE] = new
    sync()
    return before


# ---- loading ---------------------------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        chapter = chapters().get(fullname.removeprefix("lib.")) if fullname.startswith("lib.") else None
        if chapter is None:
            return None
        return importlib.util.spec_from_file_location(fullname, chapter.mine, loader=_Loader(chapter))


class _Loader(importlib.abc.Loader):
    def __init__(self, chapter: Chapter):
        self.chapter = chapter

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


def stamp(chapter: Chapter) -> tuple:
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
    """One line that says where a learner's module fails to import."""
    where = chapter.mine.relative_to(ROOT)
    if isinstance(error, FileNotFoundError) and not chapter.mine.exists():
        return AnswerError(f"{where} is missing; `workbook reset {chapter.module}` writes its stubs anew")
    line = error.lineno if isinstance(error, SyntaxError) else _last_line(chapter.mine, error)
    text = (error.msg if isinstance(error, SyntaxError) else str(error)) or "no message"
    return AnswerError(f"{where}:{line or 1}: {type(error).__name__}: {text}")


def _last_line(path: Path, error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _run_learners(chapter: Chapter, module: types.ModuleType) -> None:
    """Load the learner's file and nothing else.

    Raises:
        AnswerError: it is missing, does not import, or imports the reference.
    """
    try:
        source = chapter.mine.read_text(encoding="utf-8")
        line = reference_imports(source)
        if line is None:
            _execute(chapter.mine, source, module)
            return
    except (Exception, SystemExit) as error:
        raise broken(chapter, error) from error
    raise AnswerError(
        f"{chapter.mine.relative_to(ROOT)}:{line}: reaches for solutions/, which is the answer key: "
        f"a check grades only what you wrote (other chapters are at hand as lib.<module>)"
    )


def _run_with_fallback(chapter: Chapter, module: types.ModuleType) -> None:
    """Load the learner's file; put the reference's definition wherever a stub is left.

    The reference runs in a module of its own, so that its helpers and the learner's never meet; graded names are shared
    between the two, so that the reference calls what the learner wrote.
    """
    standin = types.ModuleType(module.__name__)
    standin.__file__ = str(chapter.reference)
    standin.__package__ = "lib"
    _execute(chapter.reference, as_lib(chapter.reference.read_text(encoding="utf-8")), standin)
    try:
        source = chapter.mine.read_text(encoding="utf-8")
        unwritten = marker_lines(source)
        _execute(chapter.mine, source, module)
    except (Exception, SystemExit) as error:
        warnings.warn(
            f"{broken(chapter, error)} (the reference stands in for lib.{chapter.module})",
            ReferenceWarning,
            stacklevel=2,
        )
        kept = {key: value for key, value in module.__dict__.items() if key.startswith("__")}
        module.__dict__.update(standin.__dict__)
        module.__dict__.update(kept)
        unwritten = {exercise.name: 0 for exercise in chapter.exercises}
    for exercise in chapter.exercises:
        mine = module.__dict__.get(exercise.name)
        if exercise.name in unwritten or not callable(mine):
            setattr(module, exercise.name, getattr(standin, exercise.name))
        else:
            setattr(standin, exercise.name, mine)
    module.__dict__["__standin__"] = standin


# ---- one graded name -------------------------------------------------------------------------------------------------


def answer(module: str, name: str):
    """What this world gives for one graded name.

    Raises:
        AnswerError: the learner's is missing, is not callable, or is the reference's.
    """
    sync()
    chapter = chapters()[module]
    loaded = importlib.import_module(f"lib.{module}")
    where = chapter.mine.relative_to(ROOT)
    if not hasattr(loaded, name):
        raise AnswerError(f"{where} has no {name}; `workbook reset {name}` puts its stub back")
    found = getattr(loaded, name)
    if flavor(module) == "learner" and name in {e.name for e in chapter.exercises}:
        if not callable(found):
            raise AnswerError(
                f"{where}: {name} is {found!r}, not a function or a class; `workbook reset {name}` puts its stub back"
            )
        _refuse_reference(chapter, name, found)
    return found


def provenance(found) -> tuple[Path, int] | None:
    """File and line at which a function or class was defined."""
    found = inspect.unwrap(getattr(found, "fn", found))  # a Triton kernel keeps its function in .fn
    if isinstance(found, type):
        for value in vars(found).values():
            code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if code is not None:
                return Path(code.co_filename), _class_line(Path(code.co_filename), found) or code.co_firstlineno
        return None
    code = getattr(found, "__code__", None)
    return None if code is None else (Path(code.co_filename), code.co_firstlineno)


def _class_line(path: Path, found: type) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    starts = [
        n
        for n, line in enumerate(lines, 1)
        if line.startswith((f"class {found.__name__}(", f"class {found.__name__}:"))
    ]
    return starts[-1] if starts else None


def _refuse_reference(chapter: Chapter, name: str, found) -> None:
    parts = [found, *(base for base in getattr(found, "__mro__", ())), getattr(found, "func", None)]
    for part in parts:
        place = provenance(part) if part is not None and part is not object else None
        if place is not None and place[0].parent == ROOT / "solutions":
            shown = f"solutions/{place[0].name}:{place[1]}"
            raise AnswerError(
                f"{chapter.mine.relative_to(ROOT)}: {name} is the answer key's ({shown}): a check grades only what you wrote"
            )


# ---- a kernel that goes on while files are edited --------------------------------------------------------------------


def refresh(namespace: dict | None = None) -> list[str]:
    """Load edited modules again, in place, and rebind the names of ``namespace`` that held their old definitions.

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
    if getattr(builtins, "__IPYTHON__", False):
        from lib.workbook.tools import notebook

        notebook.load()
