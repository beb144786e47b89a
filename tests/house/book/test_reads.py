"""Where a failed check sends its reader: to the section of the page with the exercise,
or to what that section cites.
"""

import ast
import importlib
import re
from types import ModuleType

import pytest

from lib.workbook.book.catalog import Chapter, Exercise, Size, all_exercises, chapters
from lib.workbook.book.labels import labels_in
from lib.workbook.checks.plugin import exercise_of

by_chapter = pytest.mark.parametrize("chapter", chapters().values(), ids=lambda c: f"{c.number:02d}")
# What an exercise builds on although its section does not cite it: other equations and sections of the same page.
BUILDS_ON: dict[str, list[str]] = {
    "apply_rope": ["eq-rope-3", "eq-rope-4"],
    "rotation_matrix": ["eq-rope-4"],
    "MultiHeadAttention": ["eq-attention-6", "eq-attention-7", "eq-attention-8", "eq-rope-4"],
    "Block": ["ex-gpt2-layer-norm"],
    "GPT2": ["eq-gpt2-10", "eq-gpt2-7", "ex-gpt2-layer-norm"],
    "BucketedDDP": ["eq-ddp-2", "eq-ddp-3", "the section 'One start for all'"],
    "OverlapDDP": ["the section 'Buckets'", "the section 'One start for all'"],
    "FlashAttentionTorch": ["eq-flash_attention-7"],
    "FlashAttentionTriton": ["eq-flash_attention-6"],
    "flash_attention": ["eq-flash_attention-7"],
    "flash_backward_dkdv_kernel": ["eq-flash_attention-7"],
    "flash_backward_dq_kernel": ["eq-flash_attention-7"],
    "flash_forward_kernel": ["eq-flash_attention-3", "eq-flash_attention-4", "eq-flash_attention-5"],
    "ring_attention": ["eq-context_parallel-10", "eq-context_parallel-7", "eq-context_parallel-8"],
    "ring_block": ["eq-context_parallel-7"],
    "ulysses_attention": ["eq-context_parallel-11"],
    "MoE": ["eq-moe-8"],
    "fit_power_law": ["eq-scaling_laws-1"],
    "learning_curve_prediction": ["eq-scaling_laws-1"],
    "linear_attention_recurrent": ["eq-linear_attention-3"],
}
HEADING = re.compile(r"^#{2,3} (?P<title>.+)$", re.MULTILINE)


def section_of(page: str, label: str) -> str:
    """The section, from one heading of the second level to the next, in which a page has a label."""
    return next(part for part in re.split(r"^(?=## )", page, flags=re.MULTILINE) if f"({label})=" in part)


def explained_in(section: str) -> set[str]:
    """The equations of a section and the titles of its headings."""
    titles = {f"the section '{m['title']}'" for m in HEADING.finditer(section)}
    return titles | set(re.findall(r"^:label: (\S+)$", section, re.MULTILINE))


def known_in(page: str, exercise: Exercise) -> set[str]:
    """Where an exercise's reader may be sent.

    To what its section explains; to the equations and exercises that the section, the hints or the contract cite, by
    label or by name; and to what the section of an exercise of the same page explains that they cite.
    """
    section = section_of(page, exercise.label)
    text = section + exercise.doc
    words, labels = set(re.findall(r"\w+", text)), set(labels_in(text))
    cited = [e for e in all_exercises() if e.name in words or e.label in labels]
    built_on = [section_of(page, e.label) for e in cited if f"({e.label})=" in page]
    return labels | {e.label for e in cited} | set().union(*map(explained_in, [section, *built_on]))


def reads_of(test: ast.FunctionDef, module: ModuleType, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Every text that a test, or a function of its module that it calls, passes or has by default as ``read``."""
    found: set[str] = set()
    seen, open_ = {test.name}, [test]
    while open_:
        function = open_.pop()
        local = {
            target.id: node.value for node in ast.walk(function) if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            given = [local.get(k.value.id, k.value) if isinstance(k.value, ast.Name) else k.value
                     for k in call.keywords if k.arg == "read"]  # fmt: skip
            for value in given:
                found |= _texts(value, module)
            callee = functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
            if callee is not None and not given:
                found |= _default(callee, module)
            if callee is not None and callee.name not in seen:
                seen.add(callee.name)
                open_.append(callee)
    return found


def _texts(value: ast.expr, module: ModuleType) -> set[str]:
    """The values of an expression; none if it depends on a parameter."""
    if isinstance(value, ast.IfExp):
        return _texts(value.body, module) | _texts(value.orelse, module)
    try:
        text = eval(ast.unparse(value), vars(module))
    except NameError:
        return set()
    return {text} if isinstance(text, str) else set()


def _default(function: ast.FunctionDef, module: ModuleType) -> set[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return set().union(*(_texts(default, module) for argument, default in pairs if argument.arg == "read"))


def strays(read: str, exercise: Exercise, known: set[str]) -> list[str]:
    """The places that a ``read`` names and its exercise's section neither has nor cites."""
    titles = re.findall(r"the section '[^']+'", read)
    return [
        place
        for place in (*labels_in(read), *titles)
        if place not in known and place != exercise.label and place not in BUILDS_ON.get(exercise.name, [])
    ]


def stray_reads(chapter: Chapter) -> list[str]:
    found, page = [], chapter.path.read_text(encoding="utf-8")
    for path in sorted(chapter.tests.glob("test_*.py")):
        module = importlib.import_module(f"tests.{chapter.tests.name}.{path.stem}")
        functions = {
            n.name: n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)
        }
        for test in (function for name, function in functions.items() if name.startswith("test_")):
            exercise = exercise_of(chapter, test.name)
            known = known_in(page, exercise)
            for read in sorted(reads_of(test, module, functions)):
                found += [f"{test.name} sends to {place}" for place in strays(read, exercise, known)]
    return found


@by_chapter
def test_every_read_belongs_to_its_exercise(chapter):
    assert stray_reads(chapter) == []


def test_a_stray_read_is_found():
    page = "## One\n\n:label: eq-rope-1\n\n(ex-rope-one)=\n### Your turn\n\nby {eq}`eq-rope-9`\n"
    page += "\n## Two\n\n:label: eq-rope-2\n"
    size = Size(minutes=5, difficulty=1, weight="core")
    exercise = Exercise(chapter=2, number="2.1", name="one", module="rope", doc="", line=1, size=size)
    known = known_in(page, exercise)
    assert strays("eq-rope-1 and eq-rope-9", exercise, known) == []
    assert strays("eq-rope-2", exercise, known) == ["eq-rope-2"]
    assert strays("the section 'One'", exercise, known) == []
    assert strays("the section 'Two'", exercise, known) == ["the section 'Two'"]
    assert strays("the contract, under Raises", exercise, known) == []
