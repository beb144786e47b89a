"""The whole book as one PDF: the pages of the built site in one document, printed by Chromium, without a network."""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

import yaml
from bs4 import BeautifulSoup

from lib.workbook.book.catalog import ROOT, BookError, chapters, pages
from lib.workbook.tools.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Soup = Any
"""A document or an element of Beautiful Soup, whose own types make every attribute a string or a list."""

SOURCE = ".book.html"
"""The document that is printed; it lies beside the site's pages while Chromium reads it,
so that their pictures are found.
"""
STYLE = """
@page { size: A4; margin: 20mm 19mm 20mm 19mm; }
body { font-size: 10pt; background: #fff; color: #000; }
body, html { overflow: visible !important; height: auto !important; }
article.bd-article { break-before: page; padding: 0 !important; }
article.bd-article:first-of-type { break-before: auto; }
.bd-article svg.workbook-drawing { max-width: 27rem; margin: .5rem auto; }
.bd-article * { box-shadow: none !important; }
.sd-card, .workbook-numbers, .sd-row > * { break-inside: avoid; }
article h1 { font-size: 24pt; margin: 0 0 12pt; } article h2 { font-size: 16pt; } article h3 { font-size: 13pt; }
.paper-list { list-style: none; padding: 0; margin: 0; }
.paper-list li { display: flex; align-items: baseline; gap: 1em; padding: 1.5pt 0; break-inside: avoid; }
.paper-list li > a { flex: 1; color: #000; text-decoration: none; }
.paper-list .level-0 { font-size: 12pt; padding-top: 14pt; break-after: avoid; }
.paper-list .level-1 { font-weight: 700; padding-top: 7pt; break-after: avoid; }
.paper-list .level-2 { padding-left: 1.4em; font-size: 9.5pt; }
.paper-list .page { min-width: 2.5em; text-align: right; font-variant-numeric: tabular-nums; }
"""
FOOTER = (
    '<div style="width:100%;text-align:center;font:8px sans-serif;color:#555"><span class="pageNumber"></span></div>'
)


def write(built: Path, target: Path) -> int:
    """Print a built site as one PDF with a table of contents, a list of figures and bookmarks.

    It is printed twice: only the first printing shows on which page each section begins.

    Args:
        built: Folder of the site's pages.
        target: The PDF.

    Returns:
        How many pages the PDF has.

    Raises:
        BookError: Chromium, Playwright or pypdf is not installed.
    """
    program = chromium()
    if program is None:
        raise BookError("the PDF is printed by Chromium, which is not installed: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
        from pypdf import PdfReader
    except ImportError as error:
        raise BookError(f"the PDF needs {error.name}: pip install -e '.[site]'") from None
    document, source = assemble(built), built / SOURCE
    target.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            for _ in range(2):
                source.write_text(str(document), encoding="utf-8")
                _print(browser, source, target)
                reader = PdfReader(target)
                _fill_in(
                    document,
                    {
                        name: reader.get_destination_page_number(place)
                        for name, place in reader.named_destinations.items()
                    },
                )
        finally:
            browser.close()
            source.unlink(missing_ok=True)
    return len(reader.pages)


def _print(browser: "Browser", source: Path, target: Path) -> None:
    context = browser.new_context(color_scheme="light", offline=True)
    page = context.new_page()
    page.set_default_timeout(0)  # a whole book takes minutes
    page.goto(source.as_uri())
    page.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise : null")
    page.pdf(
        path=target,
        display_header_footer=True,
        header_template="<span></span>",
        footer_template=FOOTER,
        prefer_css_page_size=True,
        print_background=True,
        outline=True,
        tagged=True,
    )
    context.close()


def _fill_in(document: Soup, page_of: dict[str, int | None]) -> None:
    """Write the page numbers into the lists of contents and of figures."""
    for line in document.select(".paper-list li"):
        number = page_of.get("/" + line.a["href"][1:], page_of.get(line.a["href"][1:]))
        line.select_one(".page").string = "" if number is None else str(number + 1)


# ---- one document of many pages --------------------------------------------------------------------------------------


def order(built: Path) -> list[str]:
    """The site's pages as the book orders them, with the solutions at the end."""
    names = [page["file"].removesuffix(".md") for page in pages()]
    names += ["solutions/index", *(f"solutions/{chapter.module}" for chapter in chapters().values())]
    return [f"{name}.html" for name in names if (built / f"{name}.html").exists()]


def assemble(built: Path) -> Soup:
    """One document of all pages: unfolded, every link between them inside of it, contents and figures listed.

    Raises:
        BookError: the site has not been built.
    """
    names = order(built)
    if not names:
        raise BookError("there is no site to print: run `workbook site` first")
    articles = {name: _article(built / name) for name in names}
    anchors = _unique_ids(articles)
    for name, article in articles.items():
        _lead_inside(name, article, anchors)
        _unfold(article)
    document = _frame([built / name for name in names])
    first, *rest = articles.values()
    lists = [_contents(document, articles), _figures(document, articles)]
    for part in (first, *(found for found in lists if found is not None), *rest):
        document.body.append(part)
    return document


def _parsed(text: str) -> Soup:
    return BeautifulSoup(text, "html.parser")


def _article(path: Path) -> Soup:
    page = _parsed(path.read_text(encoding="utf-8"))
    article = page.select_one("article.bd-article")
    if article is None:
        raise BookError(f"{path} is no page of the site")
    for useless in article.select("a.headerlink, button.copybtn"):
        useless.decompose()
    return article


def _unique_ids(articles: dict[str, Soup]) -> dict[tuple[str, str], str]:
    """Rename what several pages call by one id; the id in the document of each (page, id), "" for the page itself."""
    taken: set[str] = set()
    found = {}
    for name, article in articles.items():
        slug = re.sub(r"\W+", "-", name.removesuffix(".html"))
        for element in article.select("[id]"):
            old = element["id"]
            element["id"] = old if old not in taken else f"{slug}-{old}"
            taken.add(element["id"])
            found[name, old] = element["id"]
        article["id"] = found[name, ""] = f"page-{slug}"
    return found


def _lead_inside(name: str, article: Soup, anchors: dict[tuple[str, str], str]) -> None:
    """Turn links to the book's other pages into links within the document, and paths of pictures into the site's."""
    for link in article.select("a[href]"):
        path, anchor = urldefrag(link["href"])
        if re.match(r"[a-z]+:", path):
            continue
        page = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if inside := anchors.get((page, anchor), anchors.get((page, ""))):
            link["href"] = f"#{inside}"
        else:
            del link["href"]
    for picture in article.select("img[src]"):
        if not re.match(r"[a-z]+:", picture["src"]):
            picture["src"] = posixpath.normpath(posixpath.join(posixpath.dirname(name), picture["src"]))


def _unfold(article: Soup) -> None:
    for fold in article.select("details"):
        fold["open"] = ""
        if "hide" in fold.get("class", []) and fold.summary is not None:
            fold.summary.decompose()
            fold.name = "div"  # otherwise the browser puts a word of its own in the summary's place


def _frame(files: list[Path]) -> Soup:
    """An empty document with the site's style sheets and its mathematics, and without the theme's scripts."""
    front = _parsed(files[0].read_text(encoding="utf-8"))
    sheets = [link for link in front.select("link[rel=stylesheet]") if not re.match(r"[a-z]+:", link["href"])]
    scripts = next(filter(None, map(_mathematics, files)), [])
    title = front.h1.get_text().rstrip("#") if front.h1 else front.title.string
    head = "".join(str(tag) for tag in (*sheets, *scripts))
    return _parsed(
        '<!DOCTYPE html><html lang="en" data-theme="light" data-mode="light"><head><meta '
        f'charset="utf-8"><title>{title}'
        f"</title>{head}<style>{STYLE}</style></head><body></body></html>"
    )


def _mathematics(path: Path) -> list[Soup]:
    """The scripts by which a page sets formulas; none where a page has no formula."""
    found = []
    for script in _parsed(path.read_text(encoding="utf-8")).select("script"):
        if "tex-svg" in (script.get("src") or ""):
            script["src"] = "_static/" + script["src"].partition("_static/")[2]
            found.append(script)
        elif "window.MathJax" in (script.string or ""):
            found.insert(0, script)
    return found


def _contents(document: Soup, articles: dict[str, Soup]) -> Soup:
    """The titles of parts, of pages, and of the pages' sections; a page of solutions has only its title here."""
    lines: list[tuple[int, str, str]] = []
    part_of = _parts()
    for name, article in list(articles.items())[1:]:
        if part := part_of.get(name):
            lines.append((0, part, article["id"]))
        for heading in article.select("h1" if name.startswith("solutions/") else "h1, h2"):
            section = heading.find_parent("section")
            target = article["id"] if heading.name == "h1" or section is None else section.get("id", article["id"])
            lines.append((int(heading.name[1]), " ".join(heading.get_text().split()), target))
    return _list(document, "Contents", lines)


def _parts() -> dict[str, str]:
    """The title of each part of the book, by its first page."""
    toc = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))["project"]["toc"]
    parts = [part for part in toc if part.get("children")]
    return {part["children"][0]["file"].replace(".md", ".html"): part["title"] for part in parts}


def _figures(document: Soup, articles: dict[str, Soup]) -> Soup | None:
    """The first sentence of every figure's caption."""
    lines = []
    for caption in (caption for article in articles.values() for caption in article.select("p.workbook-caption")):
        number, text = caption.strong.get_text(), " ".join(caption.get_text().split())
        sentence = re.split(r"(?<=[.?!])\s", text.removeprefix(number).strip())[0]
        caption["id"] = caption.get("id") or f"caption-{number.strip('.').replace(' ', '-')}"
        lines.append((2, f"{number} {sentence}", caption["id"]))
    return _list(document, "Figures", lines) if lines else None


def _list(document: Soup, title: str, lines: list[tuple[int, str, str]]) -> Soup:
    article = document.new_tag("article", attrs={"class": "bd-article", "id": f"paper-{title.lower()}"})
    heading = document.new_tag("h1")
    heading.string = title
    listed = document.new_tag("ul", attrs={"class": "paper-list"})
    for level, text, target in lines:
        line = document.new_tag("li", attrs={"class": f"level-{level}"})
        link = document.new_tag("a", attrs={"href": f"#{target}"})
        link.string = text
        line.append(link)
        line.append(document.new_tag("span", attrs={"class": "page"}))
        listed.append(line)
    article.append(heading)
    article.append(listed)
    return article
