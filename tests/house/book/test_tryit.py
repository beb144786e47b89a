"""The exercise on the front page: graded as in a terminal, fetched with care, and alive in a browser."""

import inspect
import io
import json
import re
import shutil
import tarfile

import pytest

from lib.workbook.book.catalog import ROOT, BookError
from lib.workbook.book.front import doors, repository
from lib.workbook.grading.mistakes import mistakes_of
from lib.workbook.tools.tryit import assets, kit, python
from lib.workbook.tools.tryit.judge import Judge
from lib.workbook.tools.tryit.page import tryit
from solutions import tokenization
from tests.house.browsing import chromium, missing, opener, served

MISTAKES = mistakes_of("tokenization", "merge_pair")
ANSWER = inspect.getsource(tokenization.merge_pair)
TWICE = ANSWER.replace("at += 2", "at += 1")
ENDLESS = ANSWER.replace("at += 2", "pass")
RECORDED = "the word is joined with spaces"
START = "the second symbol of a merged pair comes again"
READY_MS = 120_000  # Python's start, on a machine that does other things too


@pytest.fixture(scope="module")
def made() -> dict:
    return json.loads(json.dumps(kit.make("merge_pair")))  # as the page gets it


@pytest.fixture
def judge(made):
    return Judge(made)


# ---- the judge -------------------------------------------------------------------------------------------------------


def test_the_reference_passes_and_the_stub_is_not_started(judge, made):
    right = judge(ANSWER)
    assert (right["state"], right["passed"]) == ("passed", right["total"])
    assert judge(made["stub"])["state"] == "not started"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.label)
def test_every_known_mistake_is_named(judge, mistake):
    told = judge.grade(mistake.implementation)
    assert told["state"] == "wrong"
    assert ("looks like", mistake.sentence) in told["rows"]


def test_a_report_has_the_case_the_first_wrong_value_and_where_to_read(judge):
    told = judge(TWICE)
    rows = dict(told["rows"])
    assert rows["case"] == "b a n a n a, pair (a, n)"
    assert "expected b'an'" in rows["first wrong"]
    assert told["read"] == {
        "text": "chapter 1, equation (1.2)",
        "page": "chapters/01_tokenization.html#equation-eq-tokenization-2",
    }


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("def merge_pair(symbols, pair)\n    return 1", "is no valid Python", "line 1: def merge_pair"),
        ("import nothing_of_this_name", "raised ModuleNotFoundError", "line 1: import nothing"),
        ("def merge_pair(symbols, pair):\n    return symbols[99]", "raised IndexError", "line 2: return symbols[99]"),
        ("def merge_pair(symbols, pair):\n    raise SystemExit", "raised SystemExit", "line 2: raise SystemExit"),
        (ENDLESS, "was not finished after", "line "),
        ("while True: pass", "was not finished after", "line 1: while True"),
        ("other = 1", "there is no function merge_pair", ""),
    ],
    ids=["syntax", "import", "error", "exit", "endless", "endless-import", "missing"],
)
def test_what_cannot_be_graded_is_said_with_its_line(judge, monkeypatch, text, problem, line):
    monkeypatch.setitem(judge.kit, "limit_s", 0.3)
    told = judge(text)
    assert told["state"] == "wrong"
    assert told["problem"].startswith(problem)
    assert dict(told["rows"]).get("at", "").startswith(line)


def test_what_an_answer_prints_is_shown(judge):
    assert judge("def merge_pair(symbols, pair):\n    print('seen', len(symbols))")["printed"].startswith("seen 6\n")


# ---- the kit ---------------------------------------------------------------------------------------------------------


def test_the_kit_is_of_the_repositorys_files(made):
    tests = (ROOT / "tests" / "chapter_01" / "test_tokenization.py").read_text(encoding="utf-8")
    for function in re.split(r"\n\n(?=def )", made["tests"][made["tests"].index("def ") :]):
        assert function in tests
    assert {name for _, name, _ in made["checks"]} == set(re.findall(r"^def (test_merge_pair\w*)", tests, re.MULTILINE))
    for path, text in made["files"].items():
        assert text == (ROOT / path).read_text(encoding="utf-8")
    assert "merged.append" not in json.dumps(made), "the page holds no answer"


def test_an_exercise_that_needs_more_than_the_standard_library_is_refused():
    with pytest.raises(BookError, match="more than the standard library"):
        kit.make("embed")


def test_the_front_page_tries_what_the_site_has():
    front = (ROOT / "index.md").read_text(encoding="utf-8")
    assert re.findall(r'^tryit\("(\w+)"', front, re.MULTILINE) == list(assets.EXERCISES)


def test_a_recorded_run_is_a_run():
    page = tryit("merge_pair", recorded=RECORDED, start=START).page
    assert "<dt>looks like</dt><dd>the word is joined with spaces" in page
    assert 'class="try-live" hidden' in page
    with pytest.raises(BookError, match="expected one"):
        tryit("merge_pair", recorded="no such mistake", start=START)


# ---- Python for the browser ------------------------------------------------------------------------------------------


def test_another_package_than_the_pinned_is_refused(tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz"):
        pass
    with pytest.raises(BookError, match="has the integrity sha512-"):
        python.unpack(packed.getvalue(), tmp_path / "python")
    assert not (tmp_path / "python").exists()


def test_without_npm_the_build_says_so_and_the_page_keeps_its_recorded_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(python, "ROOT", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "static").mkdir()
    assets.write(tmp_path / "static")
    assert "No Python for the browser (there is no npm)" in capsys.readouterr().out
    assert not (tmp_path / "static").exists()


def test_doors_lead_to_the_repository_of_pyproject():
    addresses = [url for row in doors().rows.values() for _, url in row]
    name = repository().removeprefix("https://github.com/")
    assert all(name in url for url in addresses)
    stems = re.findall(r"blob/notebooks/chapters/(\w+)\.ipynb", " ".join(addresses))
    assert len(stems) == 8
    assert all((ROOT / "chapters" / f"{stem}.md").exists() for stem in stems)


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page with the exercise, served with the files that the site has."""
    folder = tmp_path_factory.mktemp("tryit")
    try:
        python.folder()
    except python.NotFetched as error:
        missing(f"no Python for the browser: {error}")
    assets.write(folder / "_static")
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'>"
    script = f"<script src='_static/tryit/page.js' defer data-bytes='{assets.n_bytes(folder / '_static')}'></script>"
    body = tryit("merge_pair", recorded=RECORDED, start=START).page
    page = f"<!doctype html><html lang='en'><head><title>Try</title>{head}{script}</head><body>{body}</body></html>"
    (folder / "index.html").write_text(page, encoding="utf-8")

    with served(folder) as address:
        yield f"{address}/index.html"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser, address):
    with opener(browser, address) as open_with:
        yield open_with


def check(page, text: str) -> str:
    """What the page says of an answer that is typed in and checked by keyboard."""
    page.locator("textarea").fill(text)
    page.keyboard.press("Control+Enter")
    button = page.locator(".try-check")
    button.get_by_text("Check", exact=True).wait_for(timeout=READY_MS)
    page.wait_for_function(
        "() => !document.querySelector('.try-check').hasAttribute('aria-disabled')", timeout=READY_MS
    )
    return page.get_by_role("status").inner_text()


@pytest.mark.browser
def test_a_reader_is_wrong_in_many_ways_and_then_right(open_page):
    page = open_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    assert re.fullmatch(r"Check \(loads Python, \d\.\d MB\)", page.locator(".try-check").inner_text())
    assert not page.locator(".try-recorded").is_visible()
    assert asked == [], "nothing is loaded before somebody asks for it"

    page.locator(".try-check").click()
    page.wait_for_function("() => document.querySelector('progress').value > 0")
    page.get_by_role("status").get_by_text("Not started").wait_for(timeout=READY_MS)
    assert any(url.endswith("pyodide.asm.wasm.gz") for url in asked)
    loaded = len(asked)

    said = check(page, TWICE)
    assert "merge_pair: wrong result" in said
    assert "b a n a n a, pair (a, n)" in said
    assert "the second symbol of a merged pair comes again" in said
    link = page.get_by_role("status").get_by_role("link").evaluate("a => a.href")
    assert link.endswith("/chapters/01_tokenization.html#equation-eq-tokenization-2")
    assert "is no valid Python" in check(page, "def merge_pair(symbols, pair) return")
    assert "raised IndexError" in check(page, "def merge_pair(symbols, pair):\n    return symbols[99]")
    assert re.search(r"was not finished after 4 s.*\bline \d+:", check(page, ENDLESS), re.DOTALL)
    assert "all 13 checks pass" in check(page, ANSWER)
    assert page.get_by_role("status").get_by_role("link", name="Chapter 1").count() == 1
    assert [url for url in asked[loaded:] if not url.startswith("blob:")] == [], "Python is loaded once"


@pytest.mark.browser
def test_what_python_cannot_end_is_ended_by_the_page_which_starts_it_again(open_page):
    page = open_page()
    assert "did not end within 8 s" in check(page, "def merge_pair(symbols, pair):\n    return sum(iter(int, 1))")
    assert "all 13 checks pass" in check(page, ANSWER)


@pytest.mark.browser
def test_an_answer_survives_a_reload_until_its_reader_starts_over(open_page, made):
    page = open_page()
    page.locator("textarea").fill("def merge_pair(symbols, pair):\n    return ()")
    page.reload()
    assert page.locator("textarea").input_value().endswith("return ()")
    page.get_by_role("button", name="Start over").click()
    assert page.locator("textarea").input_value() == made["stub"]
    page.reload()
    assert page.locator("textarea").input_value() == made["stub"]


@pytest.mark.browser
def test_the_keyboard_writes_python_and_leaves_the_box(open_page):
    page = open_page()
    box = page.get_by_role("textbox", name="merge_pair")
    box.fill("")
    box.press_sequentially("def f():\nif x:\nreturn 1\n")
    assert box.input_value() == "def f():\n    if x:\n        return 1\n        "
    page.keyboard.press("Backspace")
    page.keyboard.press("Backspace")
    assert box.input_value().endswith("return 1\n")
    page.keyboard.press("Backspace")
    assert box.input_value().endswith("return 1")
    for name in ("Check", "Mend one line", "Start over"):
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.textContent").startswith(name)
        assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.browser
def test_a_telephone_shows_all_of_it(open_page):
    page = open_page()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    heights = page.evaluate(
        "() => [...document.querySelectorAll('.try-live button')].map(b => b.getBoundingClientRect().height)"
    )
    assert min(heights) >= 40, "large enough for a finger"
    assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('textarea')).fontSize)") >= 16


@pytest.mark.browser
def test_one_line_can_be_mended_and_undo_brings_back_what_stood_there(open_page, made):
    page = open_page()
    box = page.get_by_role("textbox", name="merge_pair")
    box.fill("mine")
    page.get_by_role("button", name="Mend one line").click()
    begun = box.input_value()
    page.keyboard.press("Control+z")
    assert box.input_value() == "mine"
    assert "the second symbol of a merged pair comes again" in check(page, begun)
    assert "all 13 checks pass" in check(page, begun.replace("at += 1", "at += 2", 1))


@pytest.mark.browser
def test_without_scripts_the_page_shows_a_recorded_run(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator(".try-recorded").is_visible()
    assert not page.locator(".try-live").is_visible()
    assert "looks like" in page.locator(".try-recorded").inner_text()
