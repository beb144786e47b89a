"""The house: which room may import from which, no circle among them, and each fact about the chapters in one place."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from lib.workbook.book.catalog import ROOT, chapters

# the learner's desk, lib/<module>.py, is no room: a chapter may use the fast code of an earlier chapter's subject
ARROWS = {
    "given": {"ranks"},
    "ranks": set(),
    "workbook": {"given", "ranks"},
    "fast": {"given", "desk"},
    "demos": {"given", "ranks", "desk", "runs"},
    "runs": {"given", "ranks", "desk", "fast"},
    "bench": {"given", "ranks", "desk", "fast", "demos", "runs"},
    "desk": {"given", "ranks", "fast"},
    "lib": {"workbook"},
}


def modules() -> dict[str, Path]:
    """Every module of lib/ with its file."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "lib").rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported_by(source: str, known: set[str]) -> set[str]:
    """The modules among ``known`` that a file imports, at its head or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts if parts <= known else parts | {node.module or ""}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):  # import_module("lib.llama")
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found & known


def room_of(name: str) -> str:
    """The folder of lib/ that holds a module, "desk" for a graded module and "lib" for the package itself."""
    _, _, inside = name.partition("lib.")
    return "lib" if not inside else "desk" if inside in chapters() else inside.partition(".")[0]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    files = modules()
    return {name: imported_by(path.read_text(encoding="utf-8"), set(files)) - {name} for name, path in files.items()}


def test_every_way_to_import_is_seen():
    source = """
import lib.rope as r
def late():
    from lib import llama
    from lib.attention import softmax
    importlib.import_module("lib.vit")
"""
    known = {f"lib.{name}" for name in ("rope", "llama", "attention", "vit", "moe")}
    assert imported_by(source, known) == known - {"lib.moe"}


def test_every_arrow_between_rooms_is_drawn(imports):
    drawn = {(room_of(name), room_of(other), name) for name, others in imports.items() for other in others}
    assert [arrow for arrow in sorted(drawn) if arrow[0] != arrow[1] and arrow[1] not in ARROWS[arrow[0]]] == []


@pytest.mark.parametrize("depth", [2, 3, 9])  # the rooms, the rooms in them, and single modules
def test_no_circle_among_rooms(imports, depth):
    """Each can be built on those that it imports from, once the learner's desk stands."""
    below: dict[str, set[str]] = {}
    for name, others in imports.items():
        if room_of(name) not in ("desk", "lib"):
            there = {shortened(other, depth) for other in others if room_of(other) not in ("desk", "lib")}
            below.setdefault(shortened(name, depth), set()).update(there - {shortened(name, depth)})
    while ready := [room for room, under in below.items() if not under & below.keys()]:
        for room in ready:
            del below[room]
    assert below == {}


def shortened(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def test_the_readme_lists_the_chapters_as_book_yml_does():
    rows, readme = [], (ROOT / "README.md").read_text(encoding="utf-8")
    for part in yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["project"]["toc"]:
        named = [re.match(r"chapters/(\d+)_", entry["file"]) for entry in part.get("children", [])]
        if named and all(named):
            titles = (f"{int(n[1])} {entry['title']}" for n, entry in zip(named, part["children"], strict=True))
            rows.append(f"| {part['title'].removeprefix('Part ')} | {', '.join(titles)} |")
    assert "\n".join(rows) in readme


def test_no_section_of_a_test_types_the_number_of_an_exercise():
    for path in (ROOT / "tests").glob("chapter_*/*.py"):
        typed = re.findall(r"(?m)^# -+ .*\b\d+\.\d+ .*", path.read_text(encoding="utf-8"))
        assert typed == [] or path.name == "mistakes.py", f"{path}: the number is derived, write the name alone"
