"""The site: built from every page without a warning, whole without a network, readable on a telephone and in the dark."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jupytext
import pytest
import yaml

from lib.workbook.book.catalog import ROOT, BookError, chapters, pages
from lib.workbook.tools import site as sites
from tests.workbook.browsing import chromium, missing, record_faults

SCREENSHOTS = ROOT / "_build" / "screenshots"
WRITTEN = [page for page in pages() if (ROOT / page["file"]).exists()]
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
TOO_WIDE = """() => {
  const scrolls = e => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
  const wide = [];
  for (const e of document.querySelectorAll('.bd-article *')) {
    if (e.getBoundingClientRect().right <= innerWidth + 1 || e.closest('mjx-assistive-mml')) continue;
    let box = e;
    while (box && !(scrolls(box) && box.getBoundingClientRect().right <= innerWidth + 1)) box = box.parentElement;
    if (!box || box === document.body || box === document.documentElement) wide.push(e.outerHTML.slice(0, 120));
  }
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth + 1) wide.push(`the page itself: ${page.scrollWidth} of ${page.clientWidth}`);
  return wide.slice(0, 3);
}"""
MATH_LEFT = """() => [...document.querySelectorAll('.math')].filter(e => !e.querySelector('mjx-container'))
  .map(e => e.textContent.slice(0, 60))"""
MATH_ERRORS = (
    "() => [...document.querySelectorAll('[data-mml-node=merror], mjx-merror')].map(e => e.outerHTML.slice(0, 200))"
)
NO_ALT = """() => [...document.images]
  .filter(i => i.closest('.bd-article') ? !i.alt.trim() || /\\.(png|svg|jpe?g)$/.test(i.alt) : !i.hasAttribute('alt')).map(i => i.outerHTML.slice(0, 120))"""
PALE = """() => {
  const rgba = text => { const n = (text.match(/[\\d.]+/g) || []).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => { while (e && rgba(getComputedStyle(e).backgroundColor)[3] < .5) e = e.parentElement;
    return e ? light(rgba(getComputedStyle(e).backgroundColor)) : 1; };
  return [...document.querySelectorAll('.bd-article p, .bd-article dd, .bd-article td, .bd-article .output pre')]
    .filter(e => e.textContent.trim() && !e.closest('details:not([open])'))
    .map(e => { const [a, b] = [light(rgba(getComputedStyle(e).color)), ground(e)];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 100)]; })
    .filter(([contrast]) => contrast < 4.5).slice(0, 3).map(([c, e]) => `${c.toFixed(1)} ${e}`);
}"""
BOXED = """() => [...document.querySelectorAll('img.workbook-figure')].filter(image => {
  for (let e = image; e && e !== document.body; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/rgba\\(.*, 0\\)|transparent/.test(colour)) return colour !== getComputedStyle(document.body).backgroundColor;
  } return false; }).map(image => image.alt)"""
UNREACHED = """() => [...document.querySelectorAll('.bd-article :is(a[href], button, summary, input), nav a[href]')]
  .filter(e => e.tabIndex < 0 && !e.closest('[aria-hidden=true]')).map(e => e.outerHTML.slice(0, 120))"""
FOCUS_SHOWN = """() => { const e = document.activeElement, look = getComputedStyle(e);
  return e.matches(':focus-visible') && (look.outlineStyle !== 'none' || look.boxShadow !== 'none'); }"""
BROKEN_IMAGES = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(0, 120))"


# ---- without a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page["file"])
def test_a_page_has_the_title_that_the_list_gives_it(page):
    headings = re.findall(r"^# (.+)$", (ROOT / page["file"]).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == page["title"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page["file"])
def test_a_page_is_in_jupytexts_canonical_form(page):
    text = (ROOT / page["file"]).read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="md:myst")
    configuration = jupytext.config.load_jupytext_config(str(ROOT / page["file"]))
    again = jupytext.writes(notebook, fmt="md:myst", config=configuration)
    assert again == text, f"jupytext --to md:myst {page['file']} changes it"


def test_the_table_of_contents_follows_the_book(tmp_path):
    book = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["project"]
    toc = yaml.safe_load((ROOT / sites.write_toc(book)).read_text(encoding="utf-8"))
    files = [entry["file"] for part in toc["subtrees"] for entry in part["entries"]]
    in_order = [page["file"].removesuffix(".md") for page in WRITTEN]
    assert [toc["root"], *(file for file in files if not file.startswith("solutions/"))] == in_order


def test_a_chapter_out_of_its_place_is_refused():
    book = {"toc": [{"file": "chapters/00_start.md"}, {"title": "I", "children": [{"file": "chapters/02_rope.md"}]}]}
    with pytest.raises(BookError, match="chapter 01 is expected"):
        sites.write_toc(book)


def test_a_changed_reference_runs_every_cell_anew(monkeypatch, tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "rope.py").write_text("x = 1\n")
    monkeypatch.setattr(sites, "ROOT", tmp_path)
    before = sites.code_digest()
    (tmp_path / "solutions" / "rope.py").write_text("x = 2\n")
    assert sites.code_digest() != before


@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda chapter: chapter.module)
def test_a_solution_page_answers_every_exercise_and_shows_no_mark(chapter):
    text = sites._solutions(chapter)
    assert re.findall(r"^## `(\w+)`$", text, re.MULTILINE) == [e.name for e in chapter.exercises]
    assert "SOLUTION" not in text
    assert "NotImplementedError" not in text


@pytest.mark.slow
def test_jupyter_book_2_reads_every_page(tmp_path):
    """Its site content needs no theme; with the template's address out of reach it ends there, whatever the network."""
    program = Path(sys.executable).with_name("jupyter-book")
    if not program.exists() or shutil.which("node") is None:
        missing("Jupyter Book 2 needs node and `pip install -e .[site]`")
    for name in ("book.yml", "myst.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    environment = {**os.environ, "API_URL": "http://127.0.0.1:9", "NO_COLOR": "1"}
    command = [str(program), "build", "--site", "--ci"]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **merged)
    said = done.stdout.split("Querying template metadata")[0]
    assert [line for line in said.splitlines() if "⛔" in line or "⚠" in line] == []
    assert sorted(re.findall(r"Built (chapters/\S+\.md)", said)) == sorted(page["file"] for page in WRITTEN)


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> Path:
    """The pages: those of WORKBOOK_SITE, or built now."""
    if os.environ.get("WORKBOOK_SITE"):
        found = ROOT / os.environ["WORKBOOK_SITE"]
        assert (found / "index.html").exists(), f"WORKBOOK_SITE: no pages in {found}"
        return found
    if not (Path(sys.executable).with_name("sphinx-build")).exists():
        missing("no Sphinx: `pip install -e .[site]`")
    sites.build()
    return ROOT / "_build" / "html"


@pytest.fixture(scope="module")
def address(built):
    """Where a server on this machine shows the pages."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport=SIZES["desktop"])
    yield context.new_page()
    context.close()


def html_pages(built: Path) -> list[str]:
    found = [
        path.relative_to(built).as_posix()
        for folder in ("chapters", "solutions")
        for path in built.glob(f"{folder}/*.html")
    ]
    assert len([name for name in found if name.startswith("chapters/")]) == len(WRITTEN)
    return sorted(found)


def settle(page) -> None:
    """Wait until the mathematics stands and the pictures are there."""
    page.wait_for_load_state("load")
    page.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise : null")


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_whole(browser, built, address, size):
    """Each page is loaded once, in the light; then it gets dark. A page at fault is kept as a picture."""
    context = browser.new_context(viewport=SIZES[size])
    context.add_init_script("localStorage.setItem('mode', 'auto')")  # as the reader's system has it
    faults = []
    for name in [*html_pages(built), "search.html", "genindex.html"]:
        page, found = context.new_page(), []
        record_faults(page, found)
        page.emulate_media(color_scheme="light")
        page.goto(f"{address}/{name}")
        settle(page)
        found += [f"wider than the {size}: {e}" for e in page.evaluate(TOO_WIDE)]
        found += [f"mathematics left as TeX: {e}" for e in page.evaluate(MATH_LEFT)]
        found += [f"mathematics in error: {e}" for e in page.evaluate(MATH_ERRORS)]
        found += [f"a picture without a description: {e}" for e in page.evaluate(NO_ALT)]
        found += [f"a picture that does not load: {e}" for e in page.evaluate(BROKEN_IMAGES)]
        for mode in ("light", "dark"):
            page.emulate_media(color_scheme=mode)
            page.wait_for_function(f"() => document.documentElement.dataset.theme === '{mode}'")
            found += [f"too little contrast, {mode}: {e}" for e in page.evaluate(PALE)]
            found += [f"a figure in a box, {mode}: {e}" for e in page.evaluate(BOXED)]
        if found:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SCREENSHOTS / f"{Path(name).stem}-{Path(name).parent}-{size}.png", full_page=True)
        faults += [f"{name}: {fault}" for fault in found]
        page.close()
    context.close()
    assert not faults, "\n".join(faults)


@pytest.mark.browser
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_page_keeps_the_colours_that_its_reader_chose(browser, address, mode):
    context = browser.new_context(color_scheme="light" if mode == "dark" else "dark")
    context.add_init_script(f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')")
    page = context.new_page()
    page.goto(f"{address}/chapters/02_rope.html")
    settle(page)
    assert page.evaluate("() => document.documentElement.dataset.theme") == mode
    context.close()


@pytest.mark.browser
def test_the_keyboard_reaches_what_the_mouse_does(page, address):
    page.goto(f"{address}/chapters/00_start.html")
    settle(page)
    page.keyboard.press("Tab")
    assert "Skip to main content" in page.evaluate("() => document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#main-content'")
    assert page.evaluate(UNREACHED) == []
    for what in (".bd-article a[href]:not(.headerlink)", ".bd-article summary", "button.copybtn"):
        page.locator(what).first.focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")  # focus that came by keyboard is shown
        assert page.evaluate(FOCUS_SHOWN), f"{what}: nothing shows that it has the focus"
    hint = page.locator("details.sd-dropdown").first
    hint.locator("summary").focus()
    page.keyboard.press("Enter")
    assert hint.evaluate("d => d.open")


@pytest.mark.browser
def test_the_first_page_is_how_to_use_the_book(page, address):
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/chapters/00_start.html")
    entries = page.locator(".bd-sidebar-primary a.reference.internal").all_inner_texts()
    for chapter in WRITTEN[1:]:
        assert any(chapter["title"] in entry for entry in entries), f"{chapter['title']} is not in {entries}"


@pytest.mark.browser
def test_search_finds_rope(page, address):
    page.goto(f"{address}/search.html?q=rope")
    page.locator("#search-results li a[href*='02_rope']").first.wait_for()  # results come one after the other


@pytest.mark.browser
def test_a_page_downloads_as_a_notebook_and_as_its_source(page, built, address):
    for entry in WRITTEN:
        page.goto(f"{address}/{entry['file'].removesuffix('.md')}.html")
        page.locator(".dropdown-download-buttons > button").click()
        with page.expect_download() as waiting:
            page.locator("a.btn-download-notebook-button").click()
        notebook = json.loads(Path(waiting.value.path()).read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4
        assert entry["title"] in "".join(notebook["cells"][0]["source"])
        assert all(not cell.get("outputs") for cell in notebook["cells"])
        link = page.locator("a.btn-download-source-button").first.get_attribute("href")
        source = page.request.get(f"{address}/chapters/{link}" if not link.startswith("http") else link)
        assert f"# {entry['title']}\n" in source.text()
        assert "format_name: myst" in source.text()


@pytest.mark.browser
@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda chapter: chapter.module)
def test_equations_and_exercises_are_numbered_and_lead_to_their_solutions(page, built, address, chapter):
    page.goto(f"{address}/chapters/{chapter.path.stem}.html")
    settle(page)
    numbers = [text.strip("() \n¶#") for text in page.locator(".bd-article .eqno").all_inner_texts()]
    assert numbers == [f"{chapter.number}.{i}" for i in range(1, len(numbers) + 1)]
    cards = page.locator(".workbook-exercise").all()
    assert len(cards) == len(chapter.exercises)
    links = []
    for card, exercise in zip(cards, chapter.exercises, strict=True):
        assert f"Exercise {exercise.number}" in card.inner_text()
        links.append(card.locator("a[href*='solutions/']").evaluate("a => a.href"))
    for link, exercise in zip(links, chapter.exercises, strict=True):
        page.goto(link)
        heading = page.locator(f"[id='{link.split('#')[1]}'] h2, h2[id='{link.split('#')[1]}']").first
        assert exercise.name in heading.inner_text()


@pytest.mark.browser
def test_hints_fold_out_and_code_is_copied_with_one_click(page, address):
    page.goto(f"{address}/chapters/00_start.html")
    hint = page.locator("details.sd-dropdown").first
    assert not hint.evaluate("d => d.open")
    hint.locator("summary").click()
    assert hint.evaluate("d => d.open")
    assert page.locator("button.copybtn").count() > 0
