"""Every page can be read without seeing its figures, by its headings and links alone, in the light and in the dark."""

import ast
import itertools
import re

import pytest

from lib.given.show.plots import COLOURS, GREY
from lib.given.show.tokens import show_numbers
from lib.workbook.book.catalog import ROOT, pages

WRITTEN = [page["file"] for page in pages() if (ROOT / page["file"]).exists()]
on_every_page = pytest.mark.parametrize("file", WRITTEN)
GROUNDS = {
    "white": "#ffffff",
    "the light theme's surface": "#f3f4f5",
    "the dark theme": "#121212",
    "its box": "#222832",
}
EMPTY_WORDS = {"here", "click here", "this", "this page", "link", "this link", "more", "read more"}


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def cells(file: str) -> list[str]:
    """The code of each cell, without its options, magics and shell lines."""
    found = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", text_of(file), re.DOTALL | re.MULTILINE)
    code = [re.sub(r"\A(:[^\n]*\n|---\n.*?\n---\n)+", "", cell, flags=re.DOTALL) for cell in found]
    return [re.sub(r"^([ \t]*)[!%].*$", r"\1pass", cell, flags=re.MULTILINE) for cell in code]


def prose(file: str) -> str:
    """The page without its header and without what stands in fences of code or mathematics."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text_of(file), flags=re.DOTALL)
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


def words(node: ast.expr | None, named: dict[str, ast.expr]) -> str:
    """A string's text as far as it is written out: names are followed, what is filled in counts as one word."""
    if isinstance(node, ast.Name) and node.id in named:
        return words(named[node.id], named)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part, named) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left, named) + words(node.right, named)
    return str(node.value) if isinstance(node, ast.Constant) else ""


@on_every_page
def test_every_figure_has_a_description_that_says_something(file):
    poor, named = [], {}
    for cell in cells(file):
        tree = ast.parse(cell)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = node.value
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "show":
                keywords = {k.arg: k.value for k in node.keywords}
                alt = words(keywords.get("alt", node.args[1] if len(node.args) > 1 else None), named)
                if len(alt.split()) < 6 or alt.lower().startswith(("image of", "picture of", "figure of")):
                    poor.append(f"{ast.unparse(node)[:80]}: {alt!r}")
    assert poor == [], "an alt text says in at least six words what the figure shows"


@on_every_page
def test_every_figure_goes_through_show(file):
    code = "\n".join(cells(file))
    assert not re.search(r"plt\.show\(", code), "show(fig, alt) from lib.given.show.plots asks for a description"
    pictures = re.findall(r"!\[([^\]]*)\]\(|<img(?![^>]*\balt=)", prose(file))
    assert [alt for alt in pictures if len(alt.split()) < 6] == []
    links = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", prose(file))
    assert [link for link in links if not ((ROOT / file).parent / link).exists()] == []


def at_once(tree: ast.Module) -> list[str]:
    """What a cell calls when it runs, without what its functions call later."""
    waiting, found = list[ast.AST](tree.body), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


@on_every_page
def test_no_cell_leaves_a_figure_open(file):
    """The notebook would show it as it stands at the cell's end, half drawn and without a description."""
    left = []
    for cell in cells(file):
        calls = at_once(ast.parse(cell))
        makes = {"plt.subplots", "plt.figure", "plt.subplot_mosaic"} & set(calls)
        if makes and not {"show", "plt.close"} & set(calls):
            left.append(cell[:200])
    assert left == [], "show(fig, alt), or plt.close(fig) when the next cell goes on with it"


@on_every_page
def test_headings_do_not_skip_a_level(file):
    found = [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose(file), re.MULTILINE)]
    assert [level for level, _ in found].count(1) == 1
    assert found[0][0] == 1
    skipped = [after for before, after in itertools.pairwise(found) if after[0] > before[0] + 1]
    assert skipped == []


@on_every_page
def test_a_link_says_where_it_leads(file):
    links = re.findall(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", prose(file))
    assert [(text, url) for text, url in links if text.strip(" .`*").lower() in EMPTY_WORDS or text == url] == []


@on_every_page
def test_a_link_to_another_page_has_its_page(file):
    for text, target in re.findall(r"(?<!!)\[([^\]\n]+)\]\(([\w./-]+\.md)(?:#[\w-]*)?\)", prose(file)):
        assert ((ROOT / file).parent / target).exists(), f"[{text}]({target})"
    for target in re.findall(r"(?<!!)\[\]\(([\w./-]+\.md)\)", prose(file)):  # the site writes the page's title
        assert (ROOT / file).parent.joinpath(target).resolve().relative_to(ROOT).as_posix() in WRITTEN, target


@on_every_page
def test_tables_have_headers(file):
    lines = prose(file).splitlines()
    rulers = [i for i, line in enumerate(lines) if re.fullmatch(r"\|?(\s*:?-{3,}:?\s*\|)+\s*:?-*:?\s*", line)]
    for i in rulers:
        head = [cell.strip() for cell in lines[i - 1].strip().strip("|").split("|")]
        assert all(head[1:]), f"a column without a name: {lines[i - 1]}"
    assert "<table" not in prose(file), "a Markdown table has a header; show_numbers makes one in a cell"


def test_a_table_of_numbers_has_headers():
    page = show_numbers({"what": "7"})._repr_html_()
    assert page.count("<th ") == 2
    assert "<thead>" in page


def luminance(colour: str) -> float:
    """Relative luminance after WCAG 2."""
    levels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("colour", [*COLOURS, GREY])
def test_a_figures_lines_stand_out_on_a_light_and_on_a_dark_page(colour, ground):
    assert contrast(colour, GROUNDS[ground]) >= 3, f"WCAG asks for 3 for lines and symbols: {colour} on {ground}"


def test_a_figures_text_stands_out_as_far_as_one_grey_can():
    """One colour serves both pages, and none reaches 4.5 on white and on the dark page; this one is near the best."""
    assert min(contrast(GREY, "#ffffff"), contrast(GREY, "#121212")) >= 4
