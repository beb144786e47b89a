"""The boundary: where the learner's code may run, and which files it may not open. The rule lives in this module alone.

A process has one of three roles.
A ``free`` process (a notebook, a script, a training run) runs whatever its world says.
The ``judge`` is pytest's own process: the learner's code never runs in it, not even by an import,
so nothing that a learner writes can hang it, end it or change it.
A ``child`` runs the checks of one exercise and therefore the learner's code;
the ranks of a distributed exercise are children too.

In a child the world is pinned: changing the environment variable no longer has any effect.
The reference of the graded chapter is closed: an audit hook refuses to open it while the learner's file is on the
stack, whether by ``import``, by ``exec(open(...))``, by a name put together from strings or by a symbolic link.
This protects against accidents and temptation, not against malice:
grade strangers' files in a container (see "For teachers").
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHILD = "WORKBOOK_CHILD"  # environment variable of a check's ranks: the world that they are pinned to
_world: str | None = os.environ.pop(CHILD, None)
_role = "free" if _world is None else "child"
_refused: dict[str, tuple[str, Path]] = {}  # by module: the learner's file, and the reference that must stay closed
_hooked = False


class AnswerError(Exception):
    """A learner's answer that cannot be graded; the message says why and where."""


def role() -> str:
    """What this process is: ``free``, ``judge`` or ``child``."""
    return _role


def become_judge() -> None:
    """From now on this process grades, and therefore runs no answer itself."""
    global _role
    _role = "judge"


def become_child(world: str) -> None:
    """From now on this process runs answers, in ``world`` for good. Only this call lets a fork of the judge do so."""
    global _role, _world
    _role, _world = "child", world


def pinned() -> str | None:
    """The world that this process is pinned to; None if it may still change."""
    return _world


def check_may_run(mine: Path) -> None:
    """Raise RuntimeError in pytest's own process, where the learner's code must not run."""
    if _role == "judge":
        raise RuntimeError(f"{mine.name} was about to run in pytest's own process: only a child may run an answer")


def refuse_reference(module: str, mine: Path, reference: Path) -> None:
    """From now on, code of ``mine`` in this child can neither open ``reference`` nor find it already imported."""
    global _hooked
    if _role != "child":
        return
    _refused[module] = (str(mine), reference)
    forget_reference(module)
    if not _hooked:
        _hooked = True
        sys.addaudithook(_watch)


def forget_reference(module: str) -> None:
    """Remove the reference from ``sys.modules``, so that an import has to open its file, where the hook sees it."""
    if module in _refused and sys.modules.pop(f"solutions.{module}", None) is not None:
        package = sys.modules.get("solutions")
        if hasattr(package, module):
            delattr(package, module)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.link") and isinstance(args[0], str | bytes | os.PathLike):
        reaches: Callable[[Any, Path], bool] = _is_reference
        what = [args[0]]
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"):
        reaches = _names_reference
        what = [word for word in _words(args) if "solutions" in word]
    else:
        return
    for module, (mine, reference) in _refused.items():
        if what and _on_the_stack(mine) and any(reaches(one, reference) for one in what):
            raise AnswerError(
                f"lib/{module}.py:{_on_the_stack(mine)}: opens solutions/{module}.py, the answer key of this chapter: "
                f"a check grades only what you wrote (you can import other chapters, as lib.<module>)"
            )


def _is_reference(path: str | bytes | os.PathLike[str], reference: Path) -> bool:
    """Whether a path leads to the reference's source, under any name, or to its compiled code."""
    try:
        if os.path.samefile(path, reference):
            return True
    except OSError:
        return False
    folder, name = os.path.split(os.path.realpath(os.fsdecode(path)))
    return folder == os.path.realpath(reference.parent / "__pycache__") and name.partition(".")[0] == reference.stem


def _names_reference(word: str, reference: Path) -> bool:
    """Whether a word of a command names the reference, as a file or as a module."""
    module = reference.stem
    return any(form in word for form in (f"solutions/{module}.py", f"solutions.{module}", f"solutions import {module}"))


def _words(args: tuple[Any, ...]) -> list[str]:
    found: list[str] = []
    for part in args[:2]:
        found += [
            os.fsdecode(p) for p in (part if isinstance(part, list | tuple) else [part]) if isinstance(p, str | bytes)
        ]
    return found


def _on_the_stack(mine: str) -> int:
    """The innermost line of a file that is being executed in this thread; 0 if no line of it is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == mine:
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return 0
