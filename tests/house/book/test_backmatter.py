"""The pages at the end of the book: made from the catalog, and true."""

import re

import pytest

from lib.given.data.record import MEASUREMENTS
from lib.workbook.book import backmatter
from lib.workbook.book.catalog import ROOT, BookError, all_exercises, chapters, is_back_matter, pages
from lib.workbook.tools import site as sites

CHAPTERS = [chapter for chapter in chapters().values() if chapter.path.exists()]
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.module)
MEASURED = sorted(path.stem for path in MEASUREMENTS.glob("*.json"))


def test_a_page_without_a_number_is_back_matter_and_no_chapter():
    extra = [page["file"] for page in pages() if is_back_matter(page["file"])]
    assert {f"chapters/{name}.md" for name in ("systems", "glossary", "names", "teachers", "sources")} <= set(extra)
    assert not set(extra) & {str(chapter.path.relative_to(ROOT)) for chapter in chapters().values()}
    assert [page["file"] for page in pages()][-len(extra) :] == extra


def test_the_back_matter_is_not_numbered_and_may_not_stand_between_chapters(monkeypatch):
    written = {}
    monkeypatch.setattr(sites, "write_if_new", lambda path, text: written.update({path.name: text}))
    start, rope = {"file": "chapters/00_start.md"}, {"file": "chapters/02_rope.md"}
    first = {"title": "I", "children": [{"file": "chapters/01_tokenization.md"}]}
    back = {"title": "Back", "children": [{"file": "chapters/glossary.md"}]}
    sites.write_toc({"toc": [start, first, back]})
    toc = written["toc.yml"]
    assert toc.count("numbered: 1") == 1
    with pytest.raises(BookError, match="expected chapter 02 here"):
        sites.write_toc({"toc": [start, first, back, {"title": "II", "children": [rope]}]})


@by_chapter
def test_what_a_chapter_is_compared_with_occurs_in_its_tests(chapter):
    said = backmatter.compared_with(chapter)
    assert said, f'{chapter.tests.name}/__init__.py holds no docstring "Compared with …", which names the oracles'
    files = [path for path in chapter.tests.glob("*.py") if path.name not in ("__init__.py", "mistakes.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for name in re.findall(r"`([^`]+)`", said):
        assert name.rpartition(".")[2] in code, f"no test of chapter {chapter.number} uses {name}"


def test_the_tables_hold_every_graded_name_and_every_chapter():
    systems, names = backmatter.systems().text, backmatter.names().text
    for exercise in all_exercises():
        assert f"`{exercise.name}`" in systems
        assert f"| `{exercise.name}` |" in names
    assert systems.count("\n") == len(CHAPTERS) + 1


@pytest.mark.parametrize("links", ["site", ""])
def test_links_lead_to_what_is_there(monkeypatch, links):
    monkeypatch.setenv("WORKBOOK_LINKS", links)
    labels = {e.label for e in all_exercises()}
    makers = (backmatter.systems, backmatter.names, backmatter.sources, backmatter.times, backmatter.works)
    for target in re.findall(r"\]\(([^)]+)\)", "".join(make().text for make in (*makers, backmatter.measurements))):
        if target.startswith("#"):
            assert target[1:] in labels
        elif not target.startswith("http"):
            assert (ROOT / "chapters" / target).exists(), target


@by_chapter
def test_a_chapter_says_what_it_needs_how_long_it_takes_and_where_to_read_on(chapter):
    assert backmatter.needs(chapter), 'the first lines say "You need …"'
    assert re.fullmatch(r"[\d.]+ (h|min)", backmatter.hours(chapter.exercises))
    assert backmatter.read_on(chapter), "a section 'Read on' with links ends the chapter"


@by_chapter
def test_a_chapter_needs_earlier_chapters_only(chapter):
    numbers = [
        int(n)
        for n in re.findall(r"\b\d+\b", " ".join(re.findall(r"chapters? [\d, and to]+", backmatter.needs(chapter))))
    ]
    assert [n for n in numbers if n >= chapter.number] == []


@pytest.mark.parametrize("name", MEASURED)
def test_a_measurement_is_shown_somewhere(name):
    assert backmatter.shown_in(name)


def test_an_equation_that_is_referred_to_by_number_is_there():
    count = {
        c.number: len(re.findall(rf"^:label: eq-{c.module}-\d+$", c.path.read_text(), re.MULTILINE)) for c in CHAPTERS
    }
    files = [c.path for c in CHAPTERS] + [path for c in CHAPTERS for path in (c.reference, *c.tests.glob("*.py"))]
    for path in files:
        for chapter, n in re.findall(r"equations? \((\d+)\.(\d+)\)", path.read_text(encoding="utf-8")):
            assert 1 <= int(n) <= count.get(int(chapter), 0), f"{path.relative_to(ROOT)}: equation ({chapter}.{n})"


def test_a_chapter_that_is_mentioned_is_in_the_book():
    last = max([22, *(chapter.number for chapter in CHAPTERS)])  # 17 to 22 may be mentioned before they exist
    for page in pages():
        if (ROOT / page["file"]).exists():
            for number in re.findall(r"\b[Cc]hapters? (\d+)", (ROOT / page["file"]).read_text(encoding="utf-8")):
                assert int(number) <= last, f"{page['file']}: chapter {number}"


def test_glossary_terms_are_many_linked_and_in_order():
    text = (ROOT / "chapters" / "glossary.md").read_text(encoding="utf-8")
    terms = []
    for block in re.findall(r"^:::\{glossary\}\n(.*?)^:::$", text, re.DOTALL | re.MULTILINE):
        entries = re.findall(r"^(\S.*)\n: (.+)$", block, re.MULTILINE)
        assert [term for term, _ in entries] == sorted((term for term, _ in entries), key=str.lower)
        assert [term for term, definition in entries if not re.search(r"\]\(\w+\.md\)", definition)] == []
        terms += [term for term, _ in entries]
    assert len(set(terms)) == len(terms) >= 60
    assert [name for name in re.findall(r"\{term\}`([^`]+)`", text) if name not in terms] == []


def test_underscores_of_a_docstring_are_no_emphasis():
    assert backmatter.plain("[_, _, X] of ``a_b`` and c_d") == "[\\_, \\_, X] of `a_b` and c\\_d"
    assert "[X, \\_, Y]" in backmatter.sources().text
