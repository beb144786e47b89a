"""The files of a folder that hold data: not those that tools leave beside them."""

import sys
from collections.abc import Collection
from pathlib import Path

LEFT_BY_TOOLS = {"__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "lost+found"}
"""Folders of copies and waste whose names do not begin with a dot: of macOS, Python, Synology, Windows and Linux."""


def is_left_by_tools(place: Path) -> bool:
    """Whether a place below a folder is hidden or a tool's own copy,
    such as ``.ipynb_checkpoints/a-checkpoint.txt``.
    """
    return any(part.startswith((".", "~$")) or part in LEFT_BY_TOOLS for part in place.parts)


def files_below(folder: Path, suffixes: Collection[str], beginning: str = "", is_quiet: bool = False) -> list[Path]:
    """The files below a folder with one of these suffixes, sorted; hidden files and folders are left out.

    Args:
        folder: An existing folder.
        suffixes: Suffixes with their dot.
        beginning: How the names of the files begin.
        is_quiet: Do not say on the error stream how many files were left out.
    """
    found = sorted(p for p in folder.rglob(f"{beginning}*") if p.suffix in suffixes and p.is_file())
    hidden = [path for path in found if is_left_by_tools(path.relative_to(folder))]
    if hidden and not is_quiet:
        which = f"such as {hidden[0].relative_to(folder)}"
        print(f"{folder}: {len(hidden)} hidden files or files in hidden folders are not read, {which}", file=sys.stderr)
    return [path for path in found if path not in set(hidden)]
