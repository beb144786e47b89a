"""The book inside a kernel: cards, %check, and what a session of a learner looks like."""

import ast
import inspect
import json
import re
from importlib import import_module

import pytest

from lib.workbook.book import contracts
from lib.workbook.book.catalog import EXERCISE_NUMBER, SIZE, BookError, all_exercises, chapters, find
from lib.workbook.checks.plugin import exercise_of
from lib.workbook.tools import notebook

SESSION = """
import json, os, sys, time
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
out = []

def cell(code):
    result = shell.run_cell(code)
    shown = result.result
    out.append(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown))

def edit(old, new):
    text = open("lib/toy.py").read()
    open("lib/toy.py", "w").write(text.replace(old, new))
    os.utime("lib/toy.py", ns=(time.time_ns(), time.time_ns()))

stub = 'raise NotImplementedError("Exercise 1.1: write double")'
cell("from lib.toy import double\\nfrom lib.workbook.tools.notebook import exercise\\ndouble(4)")
cell("exercise('double')")
cell("%check double")
edit(stub, "return x * x")
cell("double(4)")
cell("%check double")
edit("return x * x", "if x > 100:\\n        raise ValueError(x)\\n    return 2 * x")
cell("double(4)")
cell("%check double")
cell("%check")
cell("%check dubble")
open("out.json", "w").write(json.dumps(out))
"""


def test_a_learners_session(book):
    done = book.python(SESSION)
    assert done.returncode == 0, done.out
    out = json.loads((book.root / "out.json").read_text())
    assert out[0] == "8"
    assert "Exercise 1.1 · <code>double</code>" in out[1]
    assert "def double(x: int) -&gt; int" in out[1]
    assert "not started" in out[2]
    assert out[3] == "16"
    assert "looks like   squared instead of doubled" in out[4]
    assert "✗ wrong" in out[4]
    assert out[5] == "8"
    assert "✓ passed" in out[6]
    assert "%check takes one chapter or exercise" in out[7]
    assert "did you mean double?" in out[8]


def test_the_solution_is_one_click_away_on_the_site_only(book):
    code = "from lib.workbook.tools.notebook import exercise; print(exercise('double')._repr_html_())"
    assert "../solutions/toy.html#double" in book.python(code, WORKBOOK_LINKS="site").stdout
    plain = book.python(code).stdout
    assert "href" not in plain
    assert "workbook solution double" in plain


@pytest.mark.parametrize("exercise", all_exercises(), ids=lambda e: e.name)
def test_every_card_has_its_contract(exercise):
    card = notebook.exercise(f"{exercise.module}.{exercise.name}")
    assert f"Exercise {exercise.number}" in card.page
    assert "(Exercise" not in card.page
    assert card.page.count("<dl>") == card.page.count("</dl>")
    assert f"lib/{exercise.module}.py" in card.page


def test_a_list_in_a_docstring_is_a_list_on_its_card():
    doc = """Does it.\n\nReturns:\n    A number.\n\n    - It is even.\n    - It is\n      small.\n\n    1. First."""
    assert notebook.contract(doc) == (
        "<p>Does it.</p><p><strong>Returns.</strong> A number.</p>"
        "<ul><li>It is even.</li><li>It is small.</li></ul><p>1. First.</p>"
    )
    assert notebook.contract("- One.\n\nReturns:\n    - Two.") == (
        "<ul><li>One.</li></ul><p><strong>Returns.</strong> </p><ul><li>Two.</li></ul>"
    )


@pytest.mark.parametrize("exercise", all_exercises(), ids=lambda e: e.name)
def test_every_card_has_the_docstrings_sections_and_the_signatures_arguments(exercise):
    found = contracts.parts(exercise.doc)
    titles = re.findall(rf"^({'|'.join([*contracts.LISTS, *contracts.TEXTS])}):", exercise.doc, re.MULTILINE)
    assert [title for title, _ in found if title] == titles
    shown = " ".join(part for title, text in found for part in [f"{title}:" if title else "", *_texts(text)])
    said = SIZE.sub("", EXERCISE_NUMBER.sub("", exercise.doc))
    assert shown.split() == said.split(), "the card leaves something out, or has it twice"
    there = arguments(exercise)
    lists = {title: text for title, text in found if not isinstance(text, str)}
    named = [name for names, _ in lists.get("Args", []) for name in names.split(", ")]
    assert [name for name in named if name.lstrip("*") not in there] == []
    raised = [names for names, _ in lists.get("Raises", [])]
    assert [names for names in raised if not re.fullmatch(r"[\w.]+(, \w+| or \w+)*", names)] == []


def _texts(text) -> list[str]:
    return [text] if isinstance(text, str) else [f"{name}: {what}" for name, what in text]


def arguments(exercise) -> set[str]:
    """Names of a function's arguments; of a class those of its methods, inherited or not, and its fields."""
    for node in ast.parse(chapters()[exercise.module].reference.read_text()).body:
        if getattr(node, "name", None) == exercise.name:
            names = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
            if isinstance(node, ast.ClassDef):
                names |= set(
                    inspect.signature(getattr(import_module(f"solutions.{exercise.module}"), node.name)).parameters
                )
            fields = [f.target for f in getattr(node, "body", []) if isinstance(f, ast.AnnAssign)]
            return names | {target.id for target in fields if isinstance(target, ast.Name)}
    raise AssertionError(exercise.name)


@pytest.mark.parametrize("exercise", all_exercises(), ids=lambda e: e.name)
def test_the_command_of_a_card_is_short_and_selects_the_exercise_alone(exercise):
    chapter = chapters()[exercise.module]
    start, option, name = exercise.command.rsplit(" ", 2)
    assert start == f"pytest tests/chapter_{chapter.number:02d}"
    assert re.fullmatch(r"[\w.]+", name), "no quotes, no expression"
    if option == "--exercise":
        assert find(name) == (chapter, exercise)
        return
    assert option == "-k"
    for path in sorted(chapter.tests.glob("test_*.py")):
        assert name.lower() not in path.name
        for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            assert (name.lower() in test.lower()) == (exercise_of(chapter, test) == exercise), test


def test_a_contract_is_laid_out_by_its_sections():
    doc = """What it does. (Exercise 9.1)

    A second paragraph
    of two lines.

    Args:
        x: The first,
            which goes on: with a colon.
        y: The second.

    Returns:
        Its sum.

    Raises:
        ValueError: ``x`` is odd.

    Source: RoFormer (arXiv:2104.09864), section 3.
    """
    page = notebook.contract(inspect.cleandoc(doc))
    assert page == (
        "<p>What it does.</p><p>A second paragraph of two lines.</p>"
        "<p><strong>Args</strong></p><dl><dt><code>x</code></dt><dd>The first, which goes on: with a colon.</dd>"
        "<dt><code>y</code></dt><dd>The second.</dd></dl>"
        "<p><strong>Returns.</strong> Its sum.</p>"
        "<p><strong>Raises</strong></p><dl><dt><code>ValueError</code></dt><dd><code>x</code> is odd.</dd></dl>"
        "<p><strong>Source.</strong> RoFormer (<a "
        'href="https://arxiv.org/abs/2104.09864">arXiv:2104.09864</a>), section 3.</p>'
    )


def test_a_card_of_a_chapter_is_an_error():
    with pytest.raises(BookError, match="is a chapter"):
        notebook.exercise("rope")
