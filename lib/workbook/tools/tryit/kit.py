"""Makes the kit of an exercise, from the repository's own files: all that `judge` needs of them, as data for a page.

The stub is made from the reference, and the checks are the chapter's tests. What each known mistake does on each of
them is recorded here, so that the page needs neither the reference nor the mistakes' code.
"""

import ast
import base64
import importlib
import itertools
import json
import pickle
import sys
from types import FunctionType, ModuleType
from typing import Any

from lib.workbook.book import labels
from lib.workbook.book.catalog import ROOT, BookError, Chapter, Exercise, find
from lib.workbook.book.stubs import BEGIN, END, make_stub, source_of
from lib.workbook.checks.plugin import exercise_of
from lib.workbook.grading.changes import Part, Source, read
from lib.workbook.grading.mistakes import Mistake, mistakes_of
from lib.workbook.tools.tryit import judge
from lib.workbook.tools.tryit.judge import Judge

LIMIT_S = 4.0
"""Seconds for one check; those of the exercises that fit on a page take milliseconds."""


def make(name: str) -> dict[str, Any]:
    """The kit of an exercise.

    Raises:
        BookError: a check needs more than a browser's Python has, or the reference does not pass it.
    """
    chapter, exercise = find(name)
    if exercise is None:
        raise BookError(f"{name!r} is a chapter; name one of its exercises")
    if str(ROOT) not in sys.path:  # `workbook` is started from anywhere, and the tests are no installed package
        sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"tests.{chapter.tests.name}.test_{chapter.module}")
    tests = tests_of(chapter, exercise, module)
    source = read((chapter.tests / f"test_{chapter.module}.py").read_text(encoding="utf-8"))
    kit: dict[str, Any] = {
        "exercise": exercise.name,
        "graded": chapter.module,
        "limit_s": LIMIT_S,
        "given": given(chapter),
        "tests": text_of(source, tests),
        "checks": [check for test in tests for check in checks_of(test)],
        "reads": reads(exercise, source, tests),
        "files": {path: (ROOT / path).read_text(encoding="utf-8") for path in files()},
        "stub": stub(chapter, exercise),
    }
    return kit | known(kit, mistakes_of(chapter.module, exercise.name), chapter, exercise)


def stub(chapter: Chapter, exercise: Exercise) -> str:
    return shortened(source_of(make_stub(chapter), exercise.name) or "", exercise)


def shortened(text: str, exercise: Exercise) -> str:
    """A function's text with the first line of its docstring: the contract stands beside the editor."""
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    doc, lines = node.body[0], text.splitlines()
    body = [line for line in lines[doc.end_lineno or 0 :] if line.strip() not in (BEGIN, END)]
    return "\n".join([*lines[: doc.lineno - 1], f'    """{exercise.summary}"""', *body, ""])


def given(chapter: Chapter) -> str:
    """The first lines of a chapter's module as far as the standard library goes: imports, and names made from them."""
    known, lines = set(dir(__builtins__) if isinstance(__builtins__, ModuleType) else __builtins__), []
    source = read(make_stub(chapter))
    for part in source.parts:
        if isinstance(part.node, ast.Import | ast.ImportFrom) and _is_standard(part.node):
            known |= {alias.asname or alias.name for alias in part.node.names}
            lines.append(ast.unparse(part.node))
        elif isinstance(part.node, ast.Assign) and part.uses <= known:
            known |= part.defines
            lines.append(ast.unparse(part.node))
    return "\n".join(lines)


def _is_standard(node: ast.Import | ast.ImportFrom) -> bool:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return all(module.partition(".")[0] in sys.stdlib_module_names for module in modules)


def tests_of(chapter: Chapter, exercise: Exercise, module: ModuleType) -> list[FunctionType]:
    """The exercise's tests, in the order of their file."""
    named = [test for name, test in vars(module).items() if name.startswith("test_")]
    return [test for test in named if exercise_of(chapter, test.__name__) == exercise]


def checks_of(test: FunctionType) -> list[tuple[str, str, dict[str, Any]]]:
    """A test's name and arguments, once for each of its parameters.

    Raises:
        BookError: the test has a mark, a fixture or an argument that a page cannot have.
    """
    marks = list(getattr(test, "pytestmark", []))
    if other := [mark.name for mark in marks if mark.name != "parametrize"]:
        raise BookError(f"{test.__name__} is marked {', '.join(other)}, so it cannot run on a page")
    each = []
    for mark in reversed(marks):
        names = [name.strip() for name in mark.args[0].split(",")]
        each.append([dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in mark.args[1]])
    found = []
    for choice in itertools.product(*each):
        arguments = {name: value for part in choice for name, value in part.items()}
        if json.loads(json.dumps(arguments)) != arguments or set(arguments) != set(
            test.__code__.co_varnames[: test.__code__.co_argcount]
        ):
            raise BookError(f"{test.__name__} has arguments that a page cannot have: {arguments}")
        found.append((f"{test.__name__}[{'-'.join(map(str, arguments.values()))}]", test.__name__, arguments))
    return found


def text_of(source: Source, tests: list[FunctionType]) -> str:
    """The tests without their decorators, and what they use of their file.

    Raises:
        BookError: they import something that a browser's Python does not have.
    """
    found = [part for part in source.parts if getattr(part.node, "name", None) in {test.__name__ for test in tests}]
    for part in found:  # grows as it is read
        found += [
            other for other in source.parts if _names(other) & part.uses and other not in found and not _provided(other)
        ]
    for part in found:
        if isinstance(part.node, ast.Import | ast.ImportFrom) and not _is_standard(part.node):
            raise BookError(f"the tests import more than the standard library: {ast.unparse(part.node)}")
    used = set().union(*(part.uses for part in found))
    if wanted := {"recorded", "oracle"} & used:
        raise BookError(f"the tests use {', '.join(sorted(wanted))}, which a page does not have")
    return "\n\n".join(_plain(source, part) for part in sorted(found, key=lambda part: part.first))


def _names(part: Part) -> set[str]:
    if isinstance(part.node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in part.node.names}
    return set(part.defines)


def _provided(part: Part) -> bool:
    """Whether the judge defines what this statement defines: the expectations, and the graded names."""
    is_ours = isinstance(part.node, ast.ImportFrom) and part.node.module == "lib.workbook.grading"
    value = getattr(part.node, "value", None)
    is_graded = isinstance(value, ast.Call) and ast.unparse(value.func) == "graded"
    return is_ours or is_graded or (isinstance(part.node, ast.Import) and part.node.names[0].name == "pytest")


def _plain(source: Source, part: Part) -> str:
    first = part.node.lineno - 1 if isinstance(part.node, ast.FunctionDef) else part.first
    return "".join(source.lines[first : part.last]).rstrip()


def reads(exercise: Exercise, source: Source, tests: list[FunctionType]) -> dict[str, dict[str, str]]:
    """Where each label that the tests name is on the site, and the words of a report; "" is the exercise itself."""
    constants = {
        c for test in tests for c in (*test.__code__.co_consts, *map(test.__globals__.get, test.__code__.co_names))
    }
    found = {
        "": {"text": labels.where_to_read(exercise, None), "page": f"chapters/{_stem(exercise)}.html#{exercise.label}"}
    }
    for label in (c for c in constants if isinstance(c, str) and labels.labels_in(c) == [c]):
        chapter, _ = labels.find_label(label)
        anchor = f"equation-{label}" if label.startswith("eq-") else label
        found[label] = {
            "text": labels.where_to_read(exercise, label),
            "page": f"chapters/{chapter.path.stem}.html#{anchor}",
        }
    return found


def _stem(exercise: Exercise) -> str:
    return find(exercise.module)[0].path.stem


def files() -> list[str]:
    """The book's files that the judge needs, its own among them, as paths inside the project.

    Raises:
        BookError: one of them imports more than the standard library and one another.
    """
    found = [judge.__name__]
    for module in found:  # grows as it is read
        path = ROOT / f"{module.replace('.', '/')}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lib."):
                found += [node.module] if node.module not in found else []
            elif isinstance(node, ast.Import | ast.ImportFrom) and not _is_standard(node):
                raise BookError(f"{path}: {ast.unparse(node)}: a browser's Python has the standard library only")
    return [f"{module.replace('.', '/')}.py" for module in found]


def known(kit: dict[str, Any], mistakes: list[Mistake], chapter: Chapter, exercise: Exercise) -> dict[str, Any]:
    """The sentences of the known mistakes, and how each of them fails the checks.

    Raises:
        BookError: the reference fails a check, or a mistake passes them all.
    """
    judged = Judge(kit)
    reference = getattr(importlib.import_module(f"solutions.{chapter.module}"), exercise.name)
    if failed := [check.nodeid for check in judged.checks if not judged.run(check, reference).passed]:
        raise BookError(f"the reference's {exercise.name} fails {failed}")
    outcomes = {m.key: {c.nodeid: judged.run(c, m.implementation) for c in judged.checks} for m in mistakes}
    if missed := [m.sentence for m in mistakes if all(outcome.passed for outcome in outcomes[m.key].values())]:
        raise BookError(f"no check of {exercise.name} catches: {missed}")
    return {
        "mistakes": [{"key": m.key, "sentence": m.sentence} for m in mistakes],
        "outcomes": base64.b64encode(pickle.dumps(outcomes, protocol=4)).decode(),
    }
