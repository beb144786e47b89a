"""Which lines are the user's own code, and how to show them."""

import linecache
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_OURS = ("lib", "solutions", "tests", "chapters", "notebooks")
_MACHINERY = (HERE, ROOT / "lib" / "workbook")
_LIBRARIES = {Path(path).resolve() for path in sysconfig.get_paths().values()}


@lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether a file is the user's code: neither this package nor the grader, a library or Python itself."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if any(path.is_relative_to(folder) for folder in _MACHINERY):
        return False
    if path.suffix == ".pyx":  # compiled code, whose source is not installed
        return False
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in _OURS:
        return True
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(library) for library in _LIBRARIES)


def shown(filename: str, line: int) -> str:
    """``lib/ddp.py:41``: relative to the project, if the file is inside it."""
    path = Path(filename).resolve()
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def user_line(frame: FrameType | None) -> str:
    """The line of the user's code at or above ``frame`` that `innermost` chooses."""
    lines = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            lines.append(shown(frame.f_code.co_filename, frame.f_lineno))
            if not _is_given(lines[-1]):
                break
        frame = frame.f_back
    return innermost(lines)


def innermost(lines: list[str]) -> str:
    """Of lines, innermost first, the first outside of the tests and of what is given; else the first; empty if there
    is none.

    A check may put a function of its own in the place of one that the learner calls.
    """
    return next((line for line in lines if not _is_given(line)), lines[0] if lines else "")


def _is_given(line: str) -> bool:
    return Path(line).parts[:1] == ("tests",) or Path(line).parts[:2] == ("lib", "given")


def code_at(where: str) -> str:
    """The source text of a line given as ``lib/ddp.py:41``; empty if it cannot be read."""
    file, _, line = where.rpartition(":")
    if not file or not line.isdigit():
        return ""
    linecache.checkcache(str(ROOT / file))
    return linecache.getline(str(ROOT / file), int(line)).strip()
