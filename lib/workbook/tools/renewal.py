"""What an update does to a module that was begun: it adds the stubs of new exercises, and says what has changed."""

import ast
import difflib
from collections.abc import Container

from lib.workbook.book import sources, stubs
from lib.workbook.book.catalog import EXERCISE_NUMBER, ROOT, SIZE
from lib.workbook.book.sources import SourceError


def mine_of(name: str) -> str | None:
    """A learner's module, with its line ends unchanged; None if there is no file.

    Raises:
        SourceError: it cannot be read.
    """
    path = ROOT / "lib" / f"{name}.py"
    return sources.decode(path, sources.read_bytes(path)) if path.exists() else None


def exercises(stub: str) -> dict[str, str]:
    """The graded names of a stub, with the text of each: signature, docstring and given code."""
    found = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = (ast.get_docstring(node) or "").split("\n", 1)[0]
            if EXERCISE_NUMBER.search(first):
                found[node.name] = stubs.source_of(stub, node.name) or ""
    return found


def renew_begun(name: str, old: str, new: str) -> list[str]:
    """Add the stubs of new exercises at the end of a module that was begun, and report contracts that changed."""
    where = f"lib/{name}.py"
    before, after = exercises(old), exercises(new)
    added = [one for one in after if one not in before]
    try:
        mine = mine_of(name) or ""
        left, have = stubs.marker_lines(mine), stubs.bindings(mine)
    except (SyntaxError, SourceError) as error:
        problem = f"{where}:{error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        advice = "is new; fix that line, then run `workbook reset"
        lines = [f"{problem}; your file stays as it is"]
        lines += [f"{where}: {one} {advice} {one}` to add its stub" for one in added]
        return lines + [row for one in after if one in before for row in _difference(where, one, before, after, "")]
    mine, lines = _with_stubs(where, mine, added, have, old, new)
    if any(one not in have for one in added):
        sources.write_mine(ROOT / where, mine)
    for one in before:
        if one not in after and one in have:
            lines.append(f"{where}: {one} is no longer an exercise; your code stays")
        elif one in after:
            note = f"still the old stub; run `workbook reset {one}` for the new one" if one in left else ""
            lines += _difference(where, one, before, after, note)
    return lines


def _with_stubs(
    where: str, mine: str, added: list[str], have: Container[str], old: str, new: str
) -> tuple[str, list[str]]:
    """A module's text with the stubs of new exercises at its end, and a line about each."""
    lines = []
    imports = {key for key in stubs.bindings(new).keys() - stubs.bindings(old).keys() if key not in exercises(new)}
    for one in added:
        if one in have:
            lines.append(
                f"{where}: {one} is a new exercise, and you already have code of that name: run `workbook check {one}`"
            )
            continue
        mine = stubs.with_piece(mine, stubs.piece(new, one, mine, also=imports))
        lines.append(f"{where}: {one} is a new exercise; its stub is at the end of the file")
    return mine, lines


def _difference(where: str, name: str, before: dict[str, str], after: dict[str, str], note: str) -> list[str]:
    """The lines in which the contract of a graded name differs, apart from its number and its size."""
    old, new = (
        SIZE.sub("", EXERCISE_NUMBER.sub("", found[name])).replace("\n\n\n", "\n\n").splitlines()
        for found in (before, after)
    )
    lines = [row for row in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:] if not row.startswith("@@")]
    if not lines:
        return []
    head = (
        f"{where}: {name}: {note or 'its contract has changed since you wrote it; run `workbook check ' + name + '`'}"
    )
    return [head, *(f"    {row[0]} {row[1:]}" for row in lines)]
