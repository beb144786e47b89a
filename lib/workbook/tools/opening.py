"""Read it in twenty minutes: a box at the head of a chapter, made of the page's figures, questions and takeaways."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from docutils import nodes
from sphinx.application import Sphinx

from lib.workbook.book.backmatter import hours
from lib.workbook.book.catalog import Chapter, chapters

OPEN = '<details class="workbook-opening"><summary>Read it in twenty minutes</summary>'
MOST_FIGURES = 3
SENTENCE_END = re.compile(r"(?<=[.?!])(?=\s|$)")


def add_opening(app: Sphinx, doctree: nodes.document) -> None:
    """Put the box before the first cell of a chapter; other pages have none."""
    path = PurePosixPath(app.env.docname)
    chapter = next(
        (c for c in chapters().values() if c.path.stem == path.name and str(path.parent) == "chapters"), None
    )
    page = next(doctree.findall(nodes.section), None)
    if chapter is None or page is None:
        return
    place = next((i for i, node in enumerate(page) if "cell" in node.get("classes", [])), None)
    if place is not None:
        page[place:place] = box(page, chapter)


def box(page: nodes.section, chapter: Chapter) -> list[nodes.Node]:
    """The box as nodes, which take the numbers, formulas and links that the page's own have."""
    asked = [[nodes.strong("", "Stop and predict, in: "), *_joined(predictions(page))]] if predictions(page) else []
    items = [
        *([nodes.strong("", "Look at "), *part] for part in figures(page)),
        *asked,
        *([nodes.strong("", "Keep: "), *part] for part in takeaways(page)),
        [nodes.Text(_core(chapter))],
    ]
    head = nodes.paragraph("", "With the question above in mind, and without writing any code:")
    lines = [nodes.list_item("", nodes.paragraph("", "", *parts)) for parts in items]
    return [
        nodes.raw("", OPEN, format="html"),
        head,
        nodes.bullet_list("", *lines),
        nodes.raw("", "</details>", format="html"),
    ]


def _joined(found: list[list[nodes.Node]]) -> list[nodes.Node]:
    return [node for n, part in enumerate(found) for node in ([nodes.Text(" · ")] if n else []) + part]


def _core(chapter: Chapter) -> str:
    core = [e for e in chapter.exercises if e.size.weight == "core"]
    return (
        f"To write it yourself: the {len(core)} core exercises take about {hours(core)}, "
        f"all {len(chapter.exercises)} about {hours(chapter.exercises)}."
    )


# ---- what a page has -------------------------------------------------------------------------------------------------


def figures(page: nodes.section) -> list[list[nodes.Node]]:
    """Up to three figures, each a link and its caption's first sentence: those to play with, the first and the last."""
    captions = [p for p in page.findall(nodes.paragraph) if "workbook-caption" in p["classes"] and _id_of(p)]
    by_rank = sorted(captions, key=lambda p: ("-play-" not in _id_of(p), p is not captions[0], p is not captions[-1]))
    chosen = {id(p) for p in by_rank[:MOST_FIGURES]}
    found = []
    for caption in captions:
        if id(caption) in chosen:
            name, rest = _parted(caption)
            found.append([_link(name.rstrip("."), _id_of(caption)), nodes.Text(":"), *first_sentence(rest)])
    return found


def _id_of(caption: nodes.paragraph) -> str:
    """The id of a caption's label, which stands in the line before it."""
    before = caption.previous_sibling()
    named = [*caption["ids"], *([before.get("refid", "")] if isinstance(before, nodes.target) else [])]
    return next((name for name in named if name.startswith("fig-")), "")


def first_sentence(parts: list[nodes.Node]) -> Iterator[nodes.Node]:
    """The nodes of a text up to the end of its first sentence, without that period."""
    for part in parts:
        if isinstance(part, nodes.Text) and (end := SENTENCE_END.search(part.astext())):
            yield nodes.Text(part.astext()[: end.start()].rstrip("."))
            return
        yield part.deepcopy()


def predictions(page: nodes.section) -> list[list[nodes.Node]]:
    """The page's sections with a link to each question that asks their reader to predict something."""
    asked: dict[nodes.section, list[str]] = {}
    for n, paragraph in enumerate(_beginning_with(page, "Predict."), start=1):
        label = f"predict-{n}"
        if label not in paragraph["ids"]:
            paragraph["ids"].append(label)
        asked.setdefault(_section_of(paragraph, page), []).append(label)
    return [_asked(_title(section), labels) for section, labels in asked.items()]


def _asked(title: str, labels: list[str]) -> list[nodes.Node]:
    if len(labels) == 1:
        return [_link(title, labels[0])]
    numbers = _joined([[_link(str(n), label)] for n, label in enumerate(labels, start=1)])
    return [
        nodes.Text(f"{title} ("),
        *(nodes.Text(", ") if isinstance(n, nodes.Text) else n for n in numbers),
        nodes.Text(")"),
    ]


def takeaways(page: nodes.section) -> list[list[nodes.Node]]:
    """The page's takeaways, and a link to its last section, which says what the reader has now."""
    found = [[node.deepcopy() for node in _parted(p)[1]] for p in _beginning_with(page, "Takeaway.")]
    ends = [s for s in page.findall(nodes.section) if s is not page and _title(s).startswith("What you have")]
    return found + [[_link(_title(s), s["ids"][0])] for s in ends[:1]]


def _beginning_with(page: nodes.section, words: str) -> list[nodes.paragraph]:
    return [p for p in page.findall(nodes.paragraph) if _parted(p)[0] == words]


def _parted(paragraph: nodes.paragraph) -> tuple[str, list[nodes.Node]]:
    """The bold words that a paragraph begins with, and what follows them."""
    said = [child for child in paragraph if child.astext()]
    return (said[0].astext(), said[1:]) if said and isinstance(said[0], nodes.strong) else ("", said)


def _section_of(node: nodes.Node, page: nodes.section) -> nodes.section:
    """The section right below the page's title that a node is in, or the page itself."""
    while node.parent is not page:
        node = node.parent
    return node if isinstance(node, nodes.section) else page


def _title(section: nodes.section) -> str:
    return str(section[section.first_child_matching_class(nodes.title)].astext())


def _link(text: str, target: str) -> nodes.reference:
    return nodes.reference("", text, refid=target, internal=True)
