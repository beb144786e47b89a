"""Read it in twenty minutes: a box at the head of each chapter's page, made from the page's own figures, questions and takeaways."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from docutils import nodes

from lib.workbook.book.backmatter import hours
from lib.workbook.book.catalog import Chapter, chapters

OPEN = '<details class="workbook-opening"><summary>Read it in twenty minutes</summary>'
MOST_FIGURES = 3
SENTENCE_END = re.compile(r"(?<=[.?!])(?=\s|$)")


def add_opening(app, doctree: nodes.document) -> None:
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
    items = [
        *_item("Look at", figures(page)),
        *_item("Stop and predict, in", predictions(page)),
        *_item("Keep", takeaways(page)),
        _core(chapter),
    ]
    head = nodes.paragraph("", "", nodes.Text("With the question above in mind, and without writing any code:"))
    return [
        nodes.raw("", OPEN, format="html"),
        head,
        nodes.bullet_list("", *items),
        nodes.raw("", "</details>", format="html"),
    ]


def _item(words: str, found: list[list[nodes.Node]]) -> list[nodes.list_item]:
    """A line of the box: what to do, and what with; none if the page has nothing of the kind."""
    if not found:
        return []
    line = nodes.paragraph("", "", nodes.strong("", f"{words}: "))
    for n, part in enumerate(found):
        line += [*([nodes.Text(" · ")] if n else []), *part]
    return [nodes.list_item("", line)]


def _core(chapter: Chapter) -> nodes.list_item:
    core = [e for e in chapter.exercises if e.size.weight == "core"]
    said = f"To write it yourself: the {len(core)} core exercises take about {hours(core)}, all {len(chapter.exercises)} about {hours(chapter.exercises)}."
    return nodes.list_item("", nodes.paragraph("", said))


# ---- what a page has -------------------------------------------------------------------------------------------------


def figures(page: nodes.section) -> list[list[nodes.Node]]:
    """Two or three figures, each a link with the first sentence of its caption: those to play with, the first and the last."""
    captions = [p for p in page.findall(nodes.paragraph) if "workbook-caption" in p["classes"] and _id_of(p)]
    by_rank = sorted(captions, key=lambda p: ("-play-" not in _id_of(p), p is not captions[0], p is not captions[-1]))
    chosen = {id(p) for p in by_rank[:MOST_FIGURES]}
    found = []
    for caption in captions:
        if id(caption) in chosen:
            name, *rest = caption.children
            found.append([_link(name.astext().rstrip("."), _id_of(caption)), nodes.Text(":"), *first_sentence(rest)])
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
    """The sections that ask their reader to predict something, each a link, with the number of questions if there are several."""
    homes = [_section_of(p) for p in _beginning_with(page, "Predict.")]
    once = list(dict.fromkeys(homes))
    return [[_link(_title(s), s["ids"][0]), *_times(homes.count(s))] for s in once]


def _times(n: int) -> list[nodes.Node]:
    return [nodes.Text(f" ({n} times)")] if n > 1 else []


def takeaways(page: nodes.section) -> list[list[nodes.Node]]:
    """The page's takeaways, and a link to its last section, which says what the reader has now."""
    found = [[node.deepcopy() for node in p.children[1:]] for p in _beginning_with(page, "Takeaway.")]
    ends = [s for s in page.findall(nodes.section) if s is not page and _title(s).startswith("What you have")]
    return found + [[_link(_title(s), s["ids"][0])] for s in ends[:1]]


def _beginning_with(page: nodes.section, words: str) -> list[nodes.paragraph]:
    starts = ((p, next((child for child in p if child.astext()), None)) for p in page.findall(nodes.paragraph))
    return [p for p, first in starts if isinstance(first, nodes.strong) and first.astext() == words]


def _section_of(node: nodes.Node) -> nodes.section:
    while not isinstance(node, nodes.section):
        node = node.parent
    return node


def _title(section: nodes.section) -> str:
    return section[section.first_child_matching_class(nodes.title)].astext()


def _link(text: str, target: str) -> nodes.reference:
    return nodes.reference("", text, refid=target, internal=True)
