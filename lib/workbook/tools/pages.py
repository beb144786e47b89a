"""What the site adds to a page of Sphinx: a description, captions, breaks in long names, drawings, and its notebook."""

import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from lib.workbook.book.front import repository
from lib.workbook.tools import previews
from lib.workbook.tools.opening import add_opening
from lib.workbook.tools.site import write_if_new
from lib.workbook.tools.tryit import assets

CAPTION = re.compile(r"Figure [0-9A-Z]+\.\d+\.")
DESCRIPTION_LENGTH = 170
"""Search engines show about this many characters."""
PREVIEW = "_static/preview.png"
"""What a link to a page without figures shows."""
PREVIEW_ALT = "Six drawings: tokens, attention, training, many devices, tiles on a chip, a cluster."
COLAB = """import sys
from pathlib import Path

if "google.colab" in sys.modules and not Path("book.yml").exists():  # on Colab: fetch the book and install it, once
    !git clone -q {source} book && pip install -q ./book
    %cd book"""


def connect(app: Sphinx) -> None:
    """Register everything below with Sphinx; called by conf.py."""
    for builder in ("html", "dirhtml"):
        app.set_translator(builder, Translator)
    app.connect("doctree-read", mark_captions)
    app.connect("doctree-read", add_opening)
    app.connect("doctree-read", keep_punctuation)
    app.connect("doctree-resolved", draw_inline)
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", offer_notebook)
    app.connect("html-page-context", bring_python)


# ---- descriptions ----------------------------------------------------------------------------------------------------


def description(doctree: nodes.document) -> str:
    """What a page is about, in one or two sentences: the question at its head, and as much after it as fits."""
    found = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, nodes.section):
            break
        for sentence in re.split(r"(?<=[.?!])\s+", " ".join(paragraph.astext().split())):
            if found and len(found) + len(sentence) > DESCRIPTION_LENGTH:
                return found
            found = f"{found} {sentence}".strip()
    return found


def describe_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Put the description into a page's head, and what a preview of a link to it shows."""
    if doctree is None:
        return
    at_front = pagename == app.config.root_doc
    title = re.sub(r"<[^>]+>", "", html.unescape(context["title"]))
    if at_front:
        context["docstitle"] = app.config.workbook_subtitle
    base = app.config.html_baseurl
    path, alt = preview(app, pagename, title, doctree)
    picture = urljoin(base, path) if base else context["pathto"](path, 1)
    properties = {
        "og:title": title if at_front else f"{title} · {app.config.project}",
        "og:description": (about := description(doctree)),
        "og:type": "website" if at_front else "article",
        "og:site_name": app.config.project,
        "og:image": picture,
        "og:image:width": str(previews.SIZE[0]),
        "og:image:height": str(previews.SIZE[1]),
        "og:image:alt": alt,
    }
    if base:
        properties["og:url"] = urljoin(base, app.builder.get_target_uri(pagename))
    named = {"description": about, "twitter:card": "summary_large_image"}
    named |= {"twitter:image": picture, "twitter:image:alt": alt}
    tags = [*(_meta("name", *tag) for tag in named.items()), *(_meta("property", *tag) for tag in properties.items())]
    context["metatags"] = context.get("metatags", "") + "\n".join(["", *tags, ""])


def preview(app: Sphinx, pagename: str, title: str, doctree: nodes.document) -> tuple[str, str]:
    """Path and description of what a link to a page shows: the page's own figure, or the book's picture."""
    figure = None if pagename == app.config.root_doc else previews.chosen(doctree, app.config.workbook_previews)
    if figure is None:
        return PREVIEW, PREVIEW_ALT
    path = f"_static/previews/{pagename.replace('/', '_')}.png"
    file = Path(app.outdir, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(previews.card(figure.png, title, app.config.project))
    return path, figure.alt


def _meta(kind: str, name: str, content: str) -> str:
    return f'<meta {kind}="{name}" content="{html.escape(content)}" />'


# ---- captions, names and drawings ------------------------------------------------------------------------------------


def mark_captions(app: Sphinx, doctree: nodes.document) -> None:
    """Give a paragraph that begins with a bold "Figure 2.1." the class of captions."""
    for paragraph in doctree.findall(nodes.paragraph):
        first = next((child for child in paragraph if child.astext()), None)
        if isinstance(first, nodes.strong) and CAPTION.fullmatch(first.astext()):
            paragraph["classes"].append("workbook-caption")


def keep_punctuation(app: Sphinx, doctree: nodes.document) -> None:
    """Keep a comma or a period on the line of the formula before it: a browser may break a line after any formula."""
    for formula in list(doctree.findall(nodes.math)):
        after = formula.next_node(descend=False, siblings=True)
        mark = re.match(r"[.,;:?!)\]]+", after.astext()) if isinstance(after, nodes.Text) else None
        if mark:
            whole = nodes.inline("", "", classes=["workbook-together"])
            formula.replace_self(whole)
            whole += [formula, nodes.Text(mark[0])]
            after.parent.replace(after, nodes.Text(after.astext()[mark.end() :]))


def breakable(text: str) -> str:
    """HTML in which a name may break: ``vocab_<wbr>parallel``, ``lib/<wbr>rope.<wbr>py``, ``Image<wbr>Embeddings``."""
    text = re.sub(r"(?<=[A-Za-z0-9])([_/]|\.(?=[A-Za-z]))(?=[A-Za-z0-9])", r"\1<wbr>", text)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", text)


class Translator(HTML5Translator):
    """Sphinx's writer of HTML, with breaks in the code of running text, headings and lists of contents."""

    def visit_Text(self, node: nodes.Text) -> None:
        start = len(self.body)
        super().visit_Text(node)
        if isinstance(node.parent, nodes.literal):
            self.body[start:] = [breakable(part) for part in self.body[start:]]


def draw_inline(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put a page's drawings (.svg) into the page itself, where they take its colours, light or dark,
    and can be read aloud.
    """
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir, image["uri"])
        if path.suffix == ".svg" and path.exists():
            drawing = inline(path.read_text(encoding="utf-8"), image.get("alt", ""))
            image.replace_self(nodes.raw("", drawing, format="html"))


def inline(drawing: str, alt: str) -> str:
    """An SVG file's text as part of a page: with its description, and without the header that only a file needs."""
    drawing = re.sub(r"\A\s*(<\?xml.*?\?>\s*)?(<!--.*?-->\s*)*", "", drawing, flags=re.DOTALL)
    described = f'<svg role="img" aria-label="{html.escape(alt)}" class="workbook-drawing"'
    return re.sub(r"\A<svg", described, drawing)


def bring_python(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add the script that lets a reader try an exercise, if the site has a Python for the browser."""
    if 'class="workbook-try"' in context.get("body", "") and assets.folders():
        attributes: dict[str, Any] = {"data-bytes": str(assets.n_bytes())}
        app.add_js_file("tryit/page.js", defer="defer", **attributes)


# ---- the notebook of a page ------------------------------------------------------------------------------------------


def offer_notebook(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Put the page's notebook, without results, beside its source, where the theme's download button looks for it."""
    source = Path(app.srcdir, f"{pagename}.md")
    if doctree is None or pagename.startswith("solutions/") or not source.exists():
        return
    write_if_new(Path(app.outdir, "_sources", f"{pagename}.ipynb"), notebook(source))
    context["ipynb_source"] = f"{pagename}.ipynb"


def notebook(source: Path) -> str:
    """A page as a notebook that also runs on Colab: the cell that installs the book there comes right after the title.

    It stands in no chapter, since a downloaded notebook is the only one that Colab ever opens.
    """
    import jupytext
    from nbformat.v4 import new_code_cell

    found = jupytext.read(source)
    if not any("google.colab" in cell["source"] for cell in found.cells):
        hidden = {"jupyter": {"source_hidden": True}}
        cell = new_code_cell(COLAB.format(source=repository()), metadata=hidden)  # type: ignore[no-untyped-call]
        code = (i for i, other in enumerate(found.cells) if other["cell_type"] == "code")
        if (first := next(code, None)) is not None:
            found.cells.insert(first, cell)
    for n, cell in enumerate(found.cells):
        cell["id"] = f"cell-{n}"  # otherwise random, and every build would write another file
    return str(jupytext.writes(found, fmt="ipynb"))
