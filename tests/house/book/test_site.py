"""The site: built from every page without a warning, whole without a network,
readable on a telephone and in the dark.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from lib.workbook.book.catalog import ROOT, BookError, all_exercises, chapters, pages, routes
from lib.workbook.book.front import citation, repository
from lib.workbook.tools import site as sites
from lib.workbook.tools.tryit import assets
from tests.house.browsing import chromium, missing, record_faults, served

SCREENSHOTS = ROOT / "_build" / "screenshots"
WRITTEN = [page for page in pages() if (ROOT / page["file"]).exists()]
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 360, "height": 740}}
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
  .filter(i => i.closest('.bd-article') ? !i.alt.trim() || /\\.(png|svg|jpe?g)$/.test(i.alt)
    : !i.hasAttribute('alt')).map(i => i.outerHTML.slice(0, 120))"""
PALE = """() => {
  const rgba = text => { const n = (text.match(/[\\d.]+/g) || []).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => { while (e && rgba(getComputedStyle(e).backgroundColor)[3] < .5) e = e.parentElement;
    return e ? light(rgba(getComputedStyle(e).backgroundColor)) : 1; };
  return [...document.querySelectorAll(`.bd-article :is(p, dd, td, th, li, figcaption, summary,
    a[href]:not(.headerlink)), .bd-article pre span, .bd-article .output pre,
    .bd-sidebar-primary a, .bd-sidebar-secondary a`)]
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
FOLDS = """() => [...document.querySelectorAll('.bd-article details')]
  .filter(d => d.firstElementChild?.tagName !== 'SUMMARY' || d.firstElementChild.tabIndex < 0)
  .map(d => d.outerHTML.slice(0, 120))"""
HEADINGS = """() => {
  const found = [...document.querySelectorAll('.bd-article :is(h1, h2, h3, h4, h5, h6)')]
    .map(e => [+e.tagName[1], e.textContent]);
  const wrong = found.filter(([level], i) => i && level > found[i - 1][0] + 1)
    .map(([level, text]) => `h${level} ${text}`);
  return found.filter(([level]) => level === 1).length === 1 ? wrong : [...wrong, 'not one h1']; }"""
UNNAMED = """() => [...document.querySelectorAll(
    '.bd-article :is(a[href], button, summary, input, select, [role=img], [role=slider])')]
  .filter(e => !e.closest('.headerlink, mjx-container') && !(e.textContent.trim() || e.getAttribute('aria-label')
    || e.title || e.getAttribute('aria-labelledby')
    || (e.labels && e.labels.length) || e.querySelector('img[alt]:not([alt=""])')))
      .map(e => e.outerHTML.slice(0, 120))"""
TWICE = """() => { const seen = new Set(); return [...document.querySelectorAll('.bd-article [id]')]
  .filter(e => !e.closest('mjx-container') && (seen.has(e.id) || !seen.add(e.id))).map(e => e.id).slice(0, 5); }"""
OUTSIDE = """() => [...document.querySelectorAll('dialog[open] a')].filter(a => a.offsetParent !== null)
  .filter(a => { const box = a.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth + 1
    || a.scrollWidth > a.clientWidth + 2 && getComputedStyle(a).display !== 'inline'; })
  .map(a => a.textContent.trim())"""
CLIPPED = """() => { const right = document.querySelector('.bd-article').getBoundingClientRect().right + 2;
  return [...document.querySelectorAll('.bd-article :is(pre, table, img, svg, mjx-container, p, li)')]
    .filter(e => !e.closest('mjx-assistive-mml') && e.offsetParent !== null)
    .filter(e => e.getBoundingClientRect().right > right || e.tagName === 'PRE' && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.outerHTML.slice(0, 120)).slice(0, 5); }"""
DEAD_LINKS = """() => [...document.querySelectorAll('.bd-article a[href^="#"]:not([href="#"])')]
  .map(a => a.getAttribute('href'))
  .filter(href => !document.getElementById(decodeURIComponent(href.slice(1)))).slice(0, 5)"""
CARDS = """() => Promise.all([...document.querySelectorAll('.workbook-exercise')].map(async card => {
  const link = new URL(card.querySelector('a[href*="solutions/"]').href);
  const solutions = new DOMParser().parseFromString(await (await fetch(link)).text(), 'text/html');
  const place = solutions.getElementById(link.hash.slice(1));
  return [card.innerText, (place?.matches('h2') ? place : place?.querySelector('h2'))?.innerText ?? '']; }))"""
BROKEN_IMAGES = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(0, 120))"


# ---- without a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page["file"])
def test_a_page_has_the_title_that_the_list_gives_it(page):
    headings = re.findall(r"^# (.+)$", (ROOT / page["file"]).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == page["title"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page["file"])
def test_a_page_is_in_jupytexts_canonical_form(page):
    text = (ROOT / page["file"]).read_text(encoding="utf-8")
    import jupytext  # what it imports takes as long as PyTorch

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
    assert toc["root"] == "index"


def test_a_chapter_out_of_its_place_is_refused():
    book = {"toc": [{"file": "chapters/00_start.md"}, {"title": "I", "children": [{"file": "chapters/02_rope.md"}]}]}
    with pytest.raises(BookError, match="expected chapter 01 here"):
        sites.write_toc(book)


def test_a_changed_reference_runs_every_cell_anew(monkeypatch, tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "rope.py").write_text("x = 1\n")
    monkeypatch.setattr(sites, "ROOT", tmp_path)
    before = sites.code_digest()
    (tmp_path / "solutions" / "rope.py").write_text("x = 2\n")
    assert sites.code_digest() != before


def test_every_page_is_read_once_and_those_with_cells_one_at_a_time(monkeypatch):
    builders = pytest.importorskip("sphinx.builders")
    monkeypatch.setattr(builders, "make_chunks", None)
    app: Any = SimpleNamespace(env=SimpleNamespace(doc2path=lambda name: ROOT / f"{name}.md"))
    sites.share_pages(app)
    names = ["chapters/01_tokenization", "chapters/02_rope", "chapters/03_attention", "chapters/names", "README"]
    pieces = builders.make_chunks(names, 2)
    assert pieces[:2] == [["chapters/names"], ["chapters/03_attention"]]
    assert pieces[2:] == [["README"], ["chapters/01_tokenization"], ["chapters/02_rope"]]  # the last one starts first
    assert builders.make_chunks([], 2) == []  # Sphinx fails on an empty piece


def test_the_cache_is_there_before_processes_share_it(tmp_path):
    """Two that made it at once failed: "table settings already exists"."""
    cache = pytest.importorskip("jupyter_cache")
    sites.make_cache(str(tmp_path / "cache"))
    assert list((tmp_path / "cache").glob("*.db"))
    assert not cache.get_cache(tmp_path / "cache").list_cache_records()


def test_kernels_of_a_build_listen_on_files(monkeypatch):
    """A port that Jupyter found free may be another page's before the kernel listens on it."""
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setattr(nbclient.NotebookClient, "create_kernel_manager", nbclient.NotebookClient.create_kernel_manager)
    during = []
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket's
        monkeypatch.setenv("FORKSERVER", f"{folder}/socket")
        sites.listen_on_files()
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
        look = {"on_cell_complete": lambda **_: during.extend(os.listdir(folder))}
        nbclient.NotebookClient(notebook, **look).execute()
        assert os.listdir(folder) == []
    assert len(during) == 5  # shell, control, standard input, output, heartbeat
    assert notebook.cells[0].outputs[0]["data"]["text/plain"] == "2"


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
    for name in ("book.yml", "myst.yml", "index.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "_static", tmp_path / "_static")
    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    environment = {**os.environ, "API_URL": "http://127.0.0.1:9", "NO_COLOR": "1"}
    command = [str(program), "build", "--site", "--ci"]
    merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **merged)
    said = done.stdout.split("Querying template metadata")[0]
    ours = "extra keys ignored: routes, previews"  # keys of our own in book.yml, which Jupyter Book need not know
    assert [line for line in said.splitlines() if ("⛔" in line or "⚠" in line) and ours not in line] == []
    assert sorted(re.findall(r"Built ((?:chapters/|index)\S*\.md)", said)) == sorted(page["file"] for page in WRITTEN)


def test_a_downloaded_notebook_installs_the_book_on_colab_and_is_always_the_same():
    page_tools = pytest.importorskip("lib.workbook.tools.pages")
    source = ROOT / "chapters" / "02_rope.md"
    text = page_tools.notebook(source)
    assert text == page_tools.notebook(source)
    cells = json.loads(text)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert ["google.colab" in cell for cell in code] == [True, *([False] * (len(code) - 1))]


def test_a_description_is_the_question_and_what_fits_after_it():
    page_tools = pytest.importorskip("lib.workbook.tools.pages")
    from docutils import nodes
    from docutils.utils import new_document

    document = new_document("page")
    section = nodes.section("", nodes.title("", "A title"), nodes.paragraph("", "", nodes.strong("", "Why?")))
    section += [
        nodes.paragraph("", "Because\nof it. " + "A second sentence. " * 4),
        nodes.paragraph("", "x" * 200 + "."),
    ]
    document += section
    about = page_tools.description(document)
    assert about.startswith("Why? Because of it. A second sentence.")
    assert len(about) <= page_tools.DESCRIPTION_LENGTH


def test_an_opening_is_made_of_what_the_page_has():
    opening = pytest.importorskip("lib.workbook.tools.opening")
    from docutils import nodes

    def paragraph(start: str, rest: str, **attributes) -> nodes.paragraph:
        return nodes.paragraph("", "", nodes.Text(""), nodes.strong("", start), nodes.Text(rest), **attributes)

    def section(title: str, *children: nodes.Node) -> nodes.section:
        return nodes.section("", nodes.title("", title), *children, ids=[nodes.make_id(title)])

    drawn = [
        paragraph(
            f"Figure 1.{n}.",
            f" Caption {n}. More.",
            ids=[f"fig-a{'-play' * (n == 3)}-{n}"],
            classes=["workbook-caption"],
        )
        for n in (1, 2, 3, 4, 5)
    ]
    asked = [paragraph("Predict.", " Which?"), paragraph("Predict.", " How many?")]
    end = section("What you have now", paragraph("Takeaway.", " Less is more."))
    page = section("A page", section("One", *drawn, asked[0]), section("Two", asked[1]), end)
    said = ["".join(node.astext() for node in part) for part in opening.figures(page)]
    assert said == ["Figure 1.1: Caption 1", "Figure 1.3: Caption 3", "Figure 1.5: Caption 5"]
    assert [part[0]["refid"] for part in opening.predictions(page)] == ["predict-1", "predict-2"]
    assert asked[1]["ids"] == ["predict-2"]
    assert [part[0].astext() for part in opening.takeaways(page)] == [" Less is more.", "What you have now"]
    text = opening.box(page, chapters()["rope"])[2].astext()
    assert "core exercises take about" in text


def test_long_names_break_after_underscores_and_dots():
    page_tools = pytest.importorskip("lib.workbook.tools.pages")
    assert page_tools.breakable("vocab_parallel") == "vocab_<wbr>parallel"
    assert page_tools.breakable("lib/rope.py") == "lib/<wbr>rope.<wbr>py"
    assert page_tools.breakable("ImageEmbeddings") == "Image<wbr>Embeddings"
    assert page_tools.breakable('<span class="pre">0.95</span> __init__') == '<span class="pre">0.95</span> __init__'


def test_the_front_page_names_every_part_and_page():
    book = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["project"]
    front = (ROOT / "index.md").read_text(encoding="utf-8")
    for part in (part for part in book["toc"] if "children" in part):
        card = re.search(
            rf"^:::{{grid-item-card}} {re.escape(part['title'])}\n(.*?)^:::$", front, re.MULTILINE | re.DOTALL
        )
        assert card, f"the front page has no card {part['title']!r}"
        assert [entry["file"] for entry in part["children"] if f"[]({entry['file']})" not in card[1]] == []
        assert "**Needs**" in card[1]


def test_the_citation_is_that_of_the_book():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    book = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["project"]
    assert cff["cff-version"] == "1.2.0"
    assert cff.keys() >= {"message", "title", "authors"}
    assert cff["title"] == cff["preferred-citation"]["title"] == f"{book['title']}: {book['subtitle']}"
    releases = re.findall(r"^## (\d\S*),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cff["version"] == cff["preferred-citation"]["version"] == releases[0]
    assert cff["keywords"] == book["keywords"]
    assert cff["license"] == book["license"]["code"]
    assert cff["preferred-citation"]["license"] == book["license"]["content"]
    assert citation().text.startswith("```bibtex\n@book{")


def test_the_preview_is_as_large_as_it_says():
    header = (ROOT / "_static" / "preview.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(header[i : i + 4], "big") for i in (16, 20)] == [1200, 630]


@pytest.mark.parametrize(("on_colab", "has_book"), [(True, False), (True, True), (False, False)])
def test_the_first_cell_installs_the_book_on_colab_once(monkeypatch, tmp_path, on_colab, has_book):
    from IPython.core.inputtransformer2 import TransformerManager

    page_tools = pytest.importorskip("lib.workbook.tools.pages")
    done: list[str] = []
    shell = SimpleNamespace(system=done.append, run_line_magic=lambda name, line: done.append(f"%{name} {line}"))
    first = next(
        c for c in json.loads(page_tools.notebook(chapters()["rope"].path))["cells"] if c["cell_type"] == "code"
    )
    monkeypatch.chdir(tmp_path)
    if on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    if has_book:
        (tmp_path / "book.yml").touch()
    exec(TransformerManager().transform_cell("".join(first["source"])), {"get_ipython": lambda: shell})
    expected = [f"git clone -q {repository()} book && pip install -q ./book", "%cd book"]
    assert done == (expected if on_colab and not has_book else [])


def figures_of(text: str) -> dict[str, str]:
    """The alternative text of each captioned picture of a built page, by the caption's label."""
    marks = re.findall(
        r'<img class="workbook-figure"[^>]* alt="([^"]*)"|<p class="workbook-caption" id="([^"]+)"', text
    )
    found, last = {}, ""
    for alt, label in marks:
        last = alt or last
        if label:
            found[label] = last
    return found


def page_with_figures(*labels: str):
    """A page whose figures have their labels as alternative texts; the bytes of each are the label's, too."""
    from docutils import nodes
    from docutils.utils import new_document

    page = new_document("page")
    for label in labels:
        data = base64.b64encode(label.encode()).decode()
        figure = f'<img class="workbook-figure" src="data:image/png;base64,{data}" alt="{label} &amp; more" style="">'
        page += nodes.raw("", figure, format="html")
        page += nodes.paragraph("", "Figure.", classes=["workbook-caption"], ids=[nodes.make_id(label)])
    return page


def test_a_preview_is_the_chosen_figure_or_the_first():
    previews = pytest.importorskip("lib.workbook.tools.previews")
    page = page_with_figures("fig-a_b-one", "fig-a_b-two")
    assert previews.chosen(page, ["fig-c-one", "fig-a_b-two"]) == previews.Picture(b"fig-a_b-two", "fig-a_b-two & more")
    assert previews.chosen(page, []) == previews.Picture(b"fig-a_b-one", "fig-a_b-one & more")
    assert previews.chosen(page_with_figures(), ["fig-a_b-one"]) is None


@pytest.mark.parametrize("size", [(30, 200), (2000, 90), (400, 300)])
def test_a_preview_shows_all_of_its_figure_at_the_size_that_it_says(size):
    previews = pytest.importorskip("lib.workbook.tools.previews")
    file = io.BytesIO()
    Image.new("RGBA", size, "#d55e00").save(file, format="PNG")
    title = "A title that is far too long for one line of a preview, and so is written in smaller letters"
    card = Image.open(io.BytesIO(previews.card(file.getvalue(), title, "The book")))
    assert card.size == (1200, 630)
    pixels = card.load()
    orange = [(x, y) for x in range(0, 1200, 2) for y in range(630) if pixels[x, y] == (0xD5, 0x5E, 0x00)]
    (left, right), (top, bottom) = ((min(found), max(found)) for found in zip(*orange, strict=True))
    assert (right - left) / (bottom - top) == pytest.approx(size[0] / size[1], rel=0.1)
    assert left >= previews.MARGIN
    assert bottom <= 630 - previews.FOOT


def test_every_chapter_has_one_figure_for_its_preview():
    wanted = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["previews"]
    for chapter in chapters().values():
        text = chapter.path.read_text(encoding="utf-8")
        assert len([label for label in wanted if f"\n({label})=\n**Figure" in text]) == 1, chapter.path.name
    start = (ROOT / "chapters" / "00_start.md").read_text(encoding="utf-8")
    assert len(wanted) == len(chapters()) + sum(f"({label})=" in start for label in wanted)


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
    with served(built) as address:
        yield address


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
    found.append("index.html")
    assert len([name for name in found if not name.startswith("solutions/")]) == len(WRITTEN)
    return sorted(found)


def settle(page) -> None:
    """Wait until the mathematics stands and the pictures are there."""
    page.wait_for_load_state("load")
    page.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise : null")


def faults_on_a_desktop(page, name: str) -> list[str]:
    found = [f"wider than the desktop: {e}" for e in page.evaluate(TOO_WIDE)]
    found += [f"mathematics left as TeX: {e}" for e in page.evaluate(MATH_LEFT)]
    found += [f"mathematics in error: {e}" for e in page.evaluate(MATH_ERRORS)]
    found += [f"a picture without a description: {e}" for e in page.evaluate(NO_ALT)]
    found += [f"a picture that does not load: {e}" for e in page.evaluate(BROKEN_IMAGES)]
    found += [f"a link to no place of its page: {e}" for e in page.evaluate(DEAD_LINKS)]
    if Path(name).name not in ("search.html", "genindex.html"):
        found += [f"headings out of order: {e}" for e in page.evaluate(HEADINGS)]
    found += [f"a control without a name: {e}" for e in page.evaluate(UNNAMED)]
    found += [f"an id that is there twice: {e}" for e in page.evaluate(TWICE)]
    found += [f"a fold that the keyboard does not reach: {e}" for e in page.evaluate(FOLDS)]
    for mode in ("light", "dark"):
        page.emulate_media(color_scheme=mode)
        page.wait_for_function(f"() => document.documentElement.dataset.theme === '{mode}'")
        found += [f"too little contrast, {mode}: {e}" for e in page.evaluate(PALE)]
        found += [f"a figure in a box, {mode}: {e}" for e in page.evaluate(BOXED)]
    return found


def faults_on_a_telephone(page) -> list[str]:
    page.set_viewport_size(SIZES["phone"])
    found = [f"wider than the phone: {e}" for e in page.evaluate(TOO_WIDE)]
    found += [f"a control without a name, on the phone: {e}" for e in page.evaluate(UNNAMED)]
    found += [f"a fold that the keyboard does not reach, on the phone: {e}" for e in page.evaluate(FOLDS)]
    for side in ("secondary", "primary"):
        toggle = page.locator(f"button.{side}-toggle:visible")
        if toggle.count():  # a page without sections has no contents
            toggle.first.click()
            page.locator("dialog[open] a:visible").first.wait_for()
            found += [f"a list of contents is too wide for the phone: {text}" for text in page.evaluate(OUTSIDE)]
            page.keyboard.press("Escape")
            page.locator("dialog[open]").wait_for(state="detached")
    return found


def check_opening(page, chapter) -> None:
    """What the box at a chapter's beginning says when it is opened."""
    opening = page.locator(".bd-article details.workbook-opening")
    opening.locator("summary").click()
    asked = [link for link in opening.locator("a").all() if link.is_visible()]
    assert sum(link.inner_text().startswith("Figure ") for link in asked) in (2, 3)
    assert {"Look at", "Keep:"} <= {strong.inner_text().strip() for strong in opening.locator("strong").all()}
    n_core = sum(e.size.weight == "core" for e in chapter.exercises)
    assert f"the {n_core} core exercises take about" in opening.inner_text()
    opening.locator("summary").click()


def check_downloads(page, title: str) -> None:
    """That the page downloads as a notebook and as its source."""
    page.locator(".dropdown-download-buttons > button").click()
    with page.expect_download() as waiting:
        page.locator("a.btn-download-notebook-button").click()
    notebook = json.loads(Path(waiting.value.path()).read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert title in "".join(notebook["cells"][0]["source"])
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    link = page.locator("a.btn-download-source-button").first.get_attribute("href")
    source = page.request.get(page.evaluate("link => new URL(link, location).href", link))
    assert f"# {title}\n" in source.text()
    assert "format_name: myst" in source.text()


def check_chapter(page, chapter) -> None:
    """That its equations are numbered, that it opens briefly, and that each exercise leads to its solution."""
    numbers = [text.strip("() \n¶#") for text in page.locator(".bd-article .eqno").all_inner_texts()]
    assert numbers == [f"{chapter.number}.{i}" for i in range(1, len(numbers) + 1)]
    for (card, heading), exercise in zip(page.evaluate(CARDS), chapter.exercises, strict=True):
        assert f"Exercise {exercise.number}" in card
        assert exercise.name in heading
    check_opening(page, chapter)


def faults_of_its_content(page, name: str) -> list[str]:
    """Whether a page of the book is what it should be and downloads; where it is a chapter, see ``check_chapter``."""
    title = {Path(entry["file"]).stem: entry["title"] for entry in WRITTEN if entry["file"].startswith("chapters/")}
    try:
        if (chapter := {c.path.stem: c for c in chapters().values()}.get(Path(name).stem)) is not None:
            check_chapter(page, chapter)
        if Path(name).stem in title:
            check_downloads(page, title[Path(name).stem])
    except AssertionError as fault:
        return [str(fault)]
    return []


@pytest.mark.browser
@pytest.mark.parametrize("part", range(8))
def test_every_page_is_whole(browser, built, address, part):
    """Each page is loaded once: it is light, then dark, read and downloaded, then on a telephone.

    A page at fault is kept as a picture.
    """
    context = browser.new_context(viewport=SIZES["desktop"])
    context.add_init_script("localStorage.setItem('mode', 'auto')")  # as the reader's system has it
    faults: list[str] = []
    for name in [*html_pages(built), "search.html", "genindex.html"][part::8]:
        page, found = context.new_page(), list[str]()
        record_faults(page, found)
        page.emulate_media(color_scheme="light")
        page.goto(f"{address}/{name}")
        settle(page)
        found += [*faults_on_a_desktop(page, name), *faults_of_its_content(page, name), *faults_on_a_telephone(page)]
        if found:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SCREENSHOTS / f"{Path(name).stem}-{Path(name).parent}.png", full_page=True)
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
def test_the_first_page_is_the_front_page(page, built, address):
    assert "http-equiv" not in (built / "index.html").read_text(encoding="utf-8"), "it is the page itself, no redirect"
    page.goto(f"{address}/index.html")
    assert page.title().startswith("The Scaling Workbook")
    assert page.locator(".bd-article svg.workbook-drawing").get_attribute("aria-label")
    assert page.locator("figure.workbook-play-schedules[data-live]").count() == 1
    for route in routes().values():
        assert page.locator(".bd-article table").get_by_text(route.title, exact=True).count() == 1
    if assets.folders():
        assert "MB" in page.locator(".workbook-try .try-check").inner_text()
    else:
        assert page.locator(".workbook-try .try-recorded").is_visible()
    numbers = page.locator(".workbook-numbers strong").all_inner_texts()
    assert len(numbers) == 4
    assert str(len(all_exercises())) in numbers[0]
    linked = page.locator(".bd-article .sd-card a, .bd-article p a").all_inner_texts()
    entries = page.locator(".bd-sidebar-primary a.reference.internal").all_inner_texts()
    for chapter in WRITTEN[1:]:
        assert chapter["title"] in linked, f"{chapter['title']} is not on the front page"
        assert any(chapter["title"] in entry for entry in entries), f"{chapter['title']} is not in {entries}"


@pytest.mark.browser
def test_solutions_fold_in_the_sidebar(page, address):
    page.goto(f"{address}/index.html")
    entry = page.locator(".bd-sidebar-primary a[href$='solutions/rope.html']")
    assert not entry.is_visible()
    fold = page.locator(".bd-sidebar-primary li:has(> a[href$='solutions/index.html']) summary")
    fold.focus()
    page.keyboard.press("Enter")
    assert entry.is_visible()


@pytest.mark.browser
def test_every_page_has_a_description_and_a_preview(built):
    seen: dict[Any, Any] = {}
    for name in html_pages(built):
        text = (built / name).read_text(encoding="utf-8")
        found = dict(re.findall(r'<meta (?:name|property)="([\w:]+)" content="([^"]*)"', text))
        about = found["description"]
        assert 40 <= len(about) <= 300, f"{name}: {about!r}"
        assert about not in seen, f"{name} and {seen.get(about)} have one description"
        seen[about] = name
        assert found["og:title"]
        assert found["og:description"] == about
        assert found["twitter:image"] == found["og:image"]
        shown = figures_of(text) if name != "index.html" else {}
        assert not shown or found["og:image:alt"] in shown.values(), f"{name}: not a figure of this page"
        assert found["og:image"].endswith(f"previews/{name[:-5].replace('/', '_')}.png" if shown else "preview.png")
        if not found["og:image"].startswith("http"):
            picture = (built / name).parent.joinpath(found["og:image"]).resolve()
            assert Image.open(picture).size == (1200, 630), f"{name}: {found['og:image']}"


@pytest.mark.browser
def test_folds_open_by_keyboard(page, address):
    page.goto(f"{address}/chapters/02_rope.html")
    folds = page.locator(".bd-article details").all()[:4]
    for fold in folds:
        fold.locator("summary").focus()
        page.keyboard.press("Enter")
        assert fold.evaluate("d => d.open")


@pytest.mark.browser
@pytest.mark.parametrize("name", ["chapters/02_rope.html", "chapters/15_flash_attention.html"])
def test_nothing_is_clipped_or_folded_on_paper(page, address, name):
    page.set_viewport_size({"width": 680, "height": 960})  # what A4 leaves between its margins
    page.goto(f"{address}/{name}")
    settle(page)
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("() => document.querySelectorAll('.bd-article details:not([open])').length") == 0
    hidden = (
        "() => [...document.querySelectorAll('.bd-article details pre')].filter(e => "
        "!e.checkVisibility({checkOpacity: true}))"
    )
    assert page.evaluate(f"{hidden}.length") == 0, "code that is still fading in prints as an empty box"
    assert page.evaluate(CLIPPED) == []
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("() => document.querySelectorAll('.bd-article details[open].sd-dropdown').length") == 0


@pytest.mark.browser
@pytest.mark.slow
def test_the_book_prints_as_one_pdf(built, tmp_path):
    """Of three pages, since a whole book takes minutes; what links them, lists them and numbers them is the same."""
    pypdf = pytest.importorskip("pypdf")
    few = ["index", "chapters/02_rope", "solutions/rope"]
    shutil.copytree(built / "_static", tmp_path / "site" / "_static")
    for name in few:
        (tmp_path / "site" / name).parent.mkdir(exist_ok=True)
        shutil.copy(built / f"{name}.html", tmp_path / "site" / f"{name}.html")
    code = (
        "import sys, pathlib; from lib.workbook.tools import paper; print(paper.write(*map(pathlib.Path, "
        "sys.argv[1:])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "site"), str(tmp_path / "book.pdf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)  # one Playwright a process
    assert done.returncode == 0, done.stderr
    reader = pypdf.PdfReader(tmp_path / "book.pdf")
    assert len(reader.pages) == int(done.stdout) > 20
    text = "\n".join(page.extract_text() for page in reader.pages)
    assert "Hint 3" in text, "hints are open"
    assert "\\(" not in text, "mathematics is set"
    contents = next(page.extract_text() for page in reader.pages if page.extract_text().startswith("Contents"))
    title = re.search(r"2\. Rotary position embedding\s+(\d+)", contents)
    assert "Rotary position embedding" in reader.pages[int(title[1]) - 1].extract_text()[:60]
    links = [a.get_object() for page in reader.pages for a in page.get("/Annots", [])]
    outside = [str(link["/A"]["/URI"]) for link in links if "/A" in link and "/URI" in link["/A"]]
    assert [uri for uri in outside if not uri.startswith("http")] == []
    assert sorted(path.name for path in (tmp_path / "site").glob("*.html")) == ["index.html"]


@pytest.mark.browser
def test_search_finds_rope(page, address):
    page.goto(f"{address}/search.html?q=rope")
    page.locator("#search-results li a[href*='02_rope']").first.wait_for()  # results come one after the other


@pytest.mark.browser
def test_hints_fold_out_and_code_is_copied_with_one_click(page, address):
    page.goto(f"{address}/chapters/00_start.html")
    hint = page.locator("details.sd-dropdown").first
    assert not hint.evaluate("d => d.open")
    hint.locator("summary").click()
    assert hint.evaluate("d => d.open")
    assert page.locator("button.copybtn").count() > 0
