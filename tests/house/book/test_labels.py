"""Places of the book by label: each label that a check names is there, and no check types a number."""

import ast
import re
from pathlib import Path

import pytest

from lib.workbook.book.catalog import CHAPTER_FILE, ROOT, BookError, chapters, find, pages
from lib.workbook.book.labels import (
    FIGURE_LINK,
    by_beginning,
    figure_numbers,
    find_label,
    labels_in,
    number_figures,
    resolved,
    where_to_read,
    with_figure_numbers,
)

FILES = sorted((ROOT / "tests").glob("chapter_*/*.py"))
by_file = pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")


def strings(path: Path) -> list[str]:
    """Every string of a file; one made in a comprehension, as f"eq-rope-{n}", once for each of its values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.GeneratorExp) and _begins_label(node.elt)]
    inside = {id(part) for node in made for part in ast.walk(node)}
    found = [text for node in made for text in eval(ast.unparse(node), {"range": range})]
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside)
    return found + [node.value for node in constants if isinstance(node.value, str)]


def _begins_label(node: ast.expr) -> bool:
    first = node.values[0] if isinstance(node, ast.JoinedStr) else None
    return isinstance(first, ast.Constant) and re.match(r"(eq|ex)-", str(first.value)) is not None


def test_strings_finds_labels_wherever_they_are_made(tmp_path):
    path = tmp_path / "test_x.py"
    path.write_text('A, B = (f"eq-rope-{n}" for n in (3, 99))\ndef f():\n    return f"{A} and eq-rope-98"\n')
    assert sorted(label for text in strings(path) for label in labels_in(text)) == [
        "eq-rope-3",
        "eq-rope-98",
        "eq-rope-99",
    ]


@by_file
def test_every_label_is_in_the_book(path):
    missing = []
    for label in {label for text in strings(path) for label in labels_in(text)}:
        try:
            find_label(label)
        except BookError:
            missing.append(label)
    assert missing == []
    half = [text for text in strings(path) if re.search(r"\b(eq|ex)-\w*-?$", text)]
    assert half == [], "a label that is put together where this test does not see it"


@by_file
def test_no_number_of_an_equation_or_exercise_is_typed(path):
    typed = [text for text in strings(path) if re.search(r"[Ee]quations? \((\d|$)|[Ee]xercises? (\d|$)", text)]
    for text in strings(path):
        if labels_in(text) or text.startswith("the contract"):
            typed += re.findall(r"(?<![\d.:])\d{1,2}\.\d{1,2}(?![\d.])", text)
    assert typed == [], "name it by its label: eq-rope-4, ex-rope-apply-rope"


def test_every_chapter_names_its_equations_by_label():
    assert all(
        any(labels_in(text) for path in c.tests.glob("*.py") for text in strings(path)) for c in chapters().values()
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("eq-rope-7", "equation (2.7)"),
        ("eq-rope-3 to eq-rope-5", "equations (2.3) to (2.5)"),
        ("eq-training-2, eq-training-3 and eq-training-4; no more", "equations (7.2), (7.3) and (7.4); no more"),
        ("eq-flash_attention-6 and what stands under it", "equation (15.6) and what stands under it"),
        ("eq-amp-2, and the contract of ex-amp-round-to-format", "equation (11.2), and the contract of exercise 11.2"),
        ("made of ex-gpt2-layer-norm to ex-gpt2-mlp: mend", "made of exercises 6.1 to 6.4: mend"),
        ("eq-rope-99", "eq-rope-99"),
        ("the contract of ex-training-clip-gradient-norm-, under Args", "the contract of exercise 7.5, under Args"),
        ("index-free, ex-cathedra", "index-free, ex-cathedra"),
    ],
)
def test_a_reader_sees_numbers(text, shown):
    assert resolved(text) == shown


@pytest.mark.parametrize(
    ("read", "shown"),
    [
        (None, "chapter 2, exercise 2.4"),
        ("eq-rope-8", "chapter 2, equation (2.8)"),
        ("eq-attention-6", "chapter 3, equation (3.6)"),
        ("the contract, under Raises", "chapter 2, the contract of exercise 2.4, under Raises"),
        ("the contract", "chapter 2, the contract of exercise 2.4"),
        ("the contract of ex-rope-rope-frequencies", "chapter 2, the contract of exercise 2.1"),
        ("section 'A plan'", "chapter 2, section 'A plan'"),
        ("ex-post", "chapter 2, ex-post"),
    ],
)
def test_a_report_says_where_to_read(read, shown):
    assert where_to_read(find("apply_rope")[1], read) == shown


def test_a_number_in_a_reference_is_refused():
    chapter = chapters()["rope"]
    text = chapter.reference.read_text()
    assert "(Exercise 2.4)" in chapter.numbered()
    typed = text.replace("(Exercise)", "(Exercise 2.1)", 1)
    with pytest.raises(BookError, match=r"rope\.py:\d+: \(Exercise 2\.1\): the number is derived"):
        chapter.numbered(typed)


def test_numbers_are_the_order_of_the_definitions():
    text = (
        '"""A module (Exercise)."""\n\n\ndef a():\n    """One. (Exercise)"""\n\n\ndef helper():\n    """None."""\n\n\n'
    )
    text += 'class B:\n    """Two. (Exercise)\n\n    Of class (Exercise).\n    """\n'
    numbered = chapters()["rope"].numbered(text)
    assert '"""One. (Exercise 2.1)"""' in numbered
    assert '"""Two. (Exercise 2.2)\n\n    Of class (Exercise).' in numbered
    assert '"""A module (Exercise)."""' in numbered


# ---- figures ---------------------------------------------------------------------------------------------------------

PAGES = {page["file"]: (ROOT / page["file"]).read_text(encoding="utf-8") for page in pages()}
NUMBERED = {file: match for file in PAGES if (match := CHAPTER_FILE.fullmatch(file))}
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?P<code>.*?)^```\n+(?P<after>[^\n]*\n[^\n]*)", re.DOTALL | re.MULTILINE)
on_every_chapter = pytest.mark.parametrize("file", NUMBERED)


def shows_a_figure(code: str) -> bool:
    """Whether a cell calls ``show(fig, ...)`` when it runs;
    a call inside a function that it only defines does not count.
    """
    lines = re.sub(r"\A(:[^\n]*\n|---\n.*?\n---\n)+", "", code, flags=re.DOTALL).splitlines()
    tree = ast.parse("\n".join(re.sub(r"^(\s*)[!%].*$", r"\1pass", line) for line in lines))
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "show":
            return True
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def test_a_cell_that_only_defines_how_to_show_shows_nothing():
    assert shows_a_figure(":tags: [hide-input]\n\nfig, ax = plt.subplots()\nshow(fig, alt)\n")
    assert not shows_a_figure("def draw():\n    show(fig, alt)\n")


@on_every_chapter
def test_every_figure_has_a_caption_right_below_its_cell(file):
    module, bare = NUMBERED[file]["module"], []
    for cell in CELL.finditer(PAGES[file]):
        captioned = re.match(rf"\(fig-{module}-[\w-]+\)=\n\*\*Figure [\d.]+\*\* \S", cell["after"])
        if shows_a_figure(cell["code"]) and not captioned:
            bare.append(cell["code"][-200:])
    assert bare == [], f"below the cell: (fig-{module}-name)= and, on the next line, **Figure N.M.** with a sentence"


def test_figures_are_numbered_in_order_and_cited_by_their_numbers():
    assert number_figures(check=True) == [], "`workbook stubs` numbers captions and links"


@pytest.mark.parametrize("file", PAGES)
def test_every_figure_that_is_cited_has_a_caption(file):
    labels = figure_numbers(by_beginning({ROOT / name: text for name, text in PAGES.items()}))
    assert [m["label"] for m in FIGURE_LINK.finditer(PAGES[file]) if m["label"] not in labels] == []
    typed = re.findall(r"(?<![\[*])\bFigure \d+\.\d+\b", PAGES[file])
    assert typed == [], "a figure is cited by a link: [Figure 2.1](#fig-rope-clocks)"


def test_captions_and_links_get_their_numbers():
    second = (
        "See [Figure 9.9](#fig-rope-a).\n\n(fig-rope-b)=\n**Figure X.** One.\n\n(fig-rope-a)=\n**Figure 2.1.** Two.\n"
    )
    third = "[Figure](#fig-rope-b), [Figure 1, left](#fig-rope-a), [Figure 1](#fig-rope-none)\n"
    numbers = figure_numbers({2: second, 3: third})
    assert numbers == {"fig-rope-b": "2.1", "fig-rope-a": "2.2"}
    again = with_figure_numbers(second, numbers)
    assert again.startswith("See [Figure 2.2](#fig-rope-a).")
    assert "(fig-rope-b)=\n**Figure 2.1.** One." in again
    assert "(fig-rope-a)=\n**Figure 2.2.** Two." in again
    assert (
        with_figure_numbers(third, numbers)
        == "[Figure 2.1](#fig-rope-b), [Figure 2.2, left](#fig-rope-a), [Figure 1](#fig-rope-none)\n"
    )


def test_two_figures_of_one_label_are_refused():
    with pytest.raises(BookError, match="second caption has the label 'fig-rope-a'"):
        figure_numbers({2: "(fig-rope-a)=\n**Figure 2.1.**\n", 3: "(fig-rope-a)=\n**Figure 3.1.**\n"})
