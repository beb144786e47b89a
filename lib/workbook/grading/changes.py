"""A wrong answer as an edit of the reference: what stands there, and what the learner wrote instead.

`parse` reads the notation of ``tests/chapter_NN/mistakes.py``; `build` applies an edit to the reference's source and
runs what has changed. Text is compared token by token, so an edit survives another line break, another comment and a
trailing comma in the reference.
"""

import ast
import inspect
import linecache
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from lib.workbook.book.catalog import BookError

TOKEN = re.compile(r"\w+|[^\w\s]")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Token = tuple[str, int, int, int]  # text, line, first column, end
ARROW = " =>"  # between both sides of a change in one line


@dataclass(frozen=True)
class Change:
    """``old`` becomes ``new`` in the definition ``place``.

    An empty ``old`` means the whole body. An empty ``place`` means the graded definition or, where the text is not in
    it, the private helpers that it uses.
    """

    place: str
    old: str
    new: str


def sections(text: str) -> Iterator[tuple[list[str], str]]:
    """The parts of a bank's text: the exercises that a heading ``# name`` or ``# name, other`` names, and their part.

    Raises:
        BookError: text above the first heading.
    """
    above, *parts = re.split(r"(?m)^# ", inspect.cleandoc(text))
    if above.strip():
        raise BookError(
            f"{above.strip().splitlines()[0]!r} is above the first heading; expected a line like '# softmax'"
        )
    for part in parts:
        heading, _, rest = part.partition("\n")
        yield heading.split(", "), rest


def parse(text: str) -> list[tuple[str, tuple[Change, ...]]]:
    """The mistakes of an exercise: the sentence of each, and its changes.

    A line that begins with ``-`` is code of the reference, and one with ``+`` is what the learner wrote instead; or
    both are in one line, ``- code => code``. Indented lines are code that stays, above or below which the learner wrote
    more. ``@@ name`` says in which definition the changes after it are. All other lines are the sentence.

    Raises:
        BookError: a sentence without a change, or a change without a sentence.
    """
    mistakes, sentence, hunks, place = list[tuple[str, tuple[Change, ...]]](), "", list[Hunk](), ""
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        mark, code = line[:2].ljust(2), line[2:]
        if mark in ("- ", "+ ", "  ") and line.strip():
            if not hunks or hunks[-1].place != place or hunks[-1].ends_before(mark):
                hunks.append(Hunk(place))
            hunks[-1].add(mark, code)
        elif line.startswith("@@"):
            place = line[2:].strip()
        else:
            if hunks:
                mistakes.append((_named(sentence, hunks), tuple(hunk.change() for hunk in hunks)))
                sentence, hunks, place = "", [], ""
            sentence = f"{sentence} {line.strip()}".strip()
    if sentence:
        raise BookError(f"the mistake {sentence!r} has no line with - or +")
    return mistakes


@dataclass
class Hunk:
    """A change as it is read: its place, and the lines of both sides."""

    place: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    last: str = ""

    def ends_before(self, mark: str) -> bool:
        """Whether a line with this mark begins the next change."""
        return self.last == ARROW or (bool(self.old) and self.last == "+ " and mark != "+ ")

    def add(self, mark: str, code: str) -> None:
        old, arrow, new = code.partition(ARROW) if mark == "- " else (code, "", code)
        if mark != "+ ":
            self.old.append(old)
        if mark != "- " or arrow:
            self.new.append(new.removeprefix(" ") if arrow else new)
        self.last = arrow or mark

    def change(self) -> Change:
        return Change(self.place, "\n".join(self.old), "\n".join(self.new))


def _named(sentence: str, hunks: list[Hunk]) -> str:
    if not sentence:
        raise BookError(f"the change {hunks[0].new or hunks[0].old} has no sentence above it")
    return sentence


# ---- the reference's source ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One statement at the top of a module: its lines, what it defines, and which names it uses."""

    node: ast.stmt
    first: int
    last: int
    defines: frozenset[str]
    uses: frozenset[str]


@dataclass(frozen=True)
class Source:
    """A module's text and its parts; lines are counted from 0."""

    lines: tuple[str, ...]
    parts: tuple[Part, ...]
    tokens: dict[int, tuple[Token, ...]]  # of parts, by their first lines, as `tokens_of` finds them

    def part_of(self, name: str) -> Part | None:
        return next((part for part in self.parts if name in part.defines), None)

    def tokens_of(self, part: Part) -> tuple[Token, ...]:
        """The tokens of a part, without comments and docstrings; to read the whole module takes ten times as long."""
        if part.first not in self.tokens:
            self.tokens[part.first] = tuple(_no_trailing_commas(list(_tokens(self.lines, part))))
        return self.tokens[part.first]

    def with_helpers(self, name: str) -> list[Part]:
        """The part that defines ``name``, and the private ones that it uses, directly or not."""
        found, left = list[Part](), {name}
        while left:
            part = self.part_of(left.pop())
            if part is not None and part not in found:
                found.append(part)
                left |= {used for used in part.uses if used.startswith("_")}
        return sorted(found, key=lambda part: part.first)

    def made_again(self, edited: Iterable[Part]) -> list[Part]:
        """The edited parts, all that use what they define, and these parts' private helpers, in the module's order.

        The helpers are made again so that an answer's globals are in one place, as in a learner's file.
        """
        found = list(edited)
        for part in found:  # grows as it is read
            found += [other for other in self.parts if other not in found and part.defines & other.uses]
        helpers = {id(each): each for part in found for name in part.defines for each in self.with_helpers(name)}
        return sorted(helpers.values(), key=lambda part: part.first)


@lru_cache(maxsize=32)
def read(source: str) -> Source:
    """A module's text and its parts."""
    return Source(tuple(source.splitlines(keepends=True)), tuple(map(_part, ast.parse(source).body)), {})


def _tokens(lines: tuple[str, ...], part: Part) -> Iterator[Token]:
    """The tokens of a part, without comments and docstrings."""
    comments = dict[int, int]()
    for token in tokenize.generate_tokens(iter(lines[part.first : part.last]).__next__):
        if token.type == tokenize.COMMENT:
            comments[part.first + token.start[0] - 1] = token.start[1]
    docs = [doc for node in ast.walk(part.node) if (doc := _docstring(node))]
    quiet = {n for doc in docs for n in range(doc.lineno - 1, doc.end_lineno)}
    for n in range(part.first, part.last):
        if n not in quiet:
            for match in TOKEN.finditer(lines[n][: comments.get(n)]):
                yield (match[0], n, *match.span())


def _docstring(node: ast.AST) -> Any:
    """The statement that is a definition's docstring."""
    if isinstance(node, Definition | ast.Module) and ast.get_docstring(node, clean=False) is not None:
        return node.body[0]
    return None


def _part(node: ast.stmt) -> Part:
    first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno).lineno - 1
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    own = frozenset({node.name} if isinstance(node, Definition) else stored)
    return Part(node, first, node.end_lineno or first + 1, own, frozenset(n.id for n in names) - own)


def _no_trailing_commas(tokens: list[Any]) -> Iterator[Any]:
    """The same tokens without commas before a closing bracket, which depend on how lines are broken."""
    for token, following in zip(tokens, [*tokens[1:], [""]], strict=True):
        if not (token[0] == "," and following[0] in (")", "]", "}")):
            yield token


# ---- applying an edit ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splice:
    """The text between two places of a source, each a line and a column, and what replaces it."""

    start: tuple[int, int]
    end: tuple[int, int]
    new: str


def _definitions(source: Source, name: str, place: str) -> list[list[tuple[Part, ast.stmt]]]:
    """Where to look for a change, first here, then there: definitions, each with the part that it belongs to.

    Raises:
        BookError: ``place`` names no definition, or several.
    """
    if not place:
        homes = [(part, part.node) for part in source.with_helpers(name)]
        return [[home for home in homes if (name in home[0].defines) is own] for own in (True, False)]
    first, _, rest = place.partition(".")
    home = source.part_of(first)
    part, inner = (home, rest) if home is not None else (source.part_of(name), place)
    assert part is not None
    found = [n for n in ast.walk(part.node) if isinstance(n, Definition) and n.name == inner] if inner else [part.node]
    if len(found) != 1:
        raise BookError(f"@@ {place} names {len(found)} definitions, expected one")
    return [[(part, found[0])]]


def _splice(source: Source, name: str, change: Change) -> tuple[Part, Splice]:
    """The place of one change in the source.

    Raises:
        BookError: the text to replace is not there, or several times.
    """
    homes = _definitions(source, name, change.place)
    if not change.old:
        return _whole_body(source, *homes[0][0], change.new)
    wanted = [token for (token,) in _no_trailing_commas([(token,) for token in TOKEN.findall(change.old)])]
    found = next((found for each in homes if (found := list(_occurrences(source, each, wanted)))), [])
    if len(found) != 1:
        where = change.place or " and ".join(sorted(n for each in homes for part, _ in each for n in part.defines))
        times = f"found {len(found)} times" if found else "not found"
        raise BookError(f"{change.old!r} is {times} in {where}, expected once")
    part, start, end = found[0]
    margin = re.match(r"\s*", source.lines[start[1]])
    return part, Splice(start[1:3], (end[1], end[3]), _indented(change.new, margin[0] if margin else ""))


def _occurrences(
    source: Source, homes: list[tuple[Part, ast.stmt]], wanted: list[str]
) -> Iterator[tuple[Part, Token, Token]]:
    """Where some tokens stand in these definitions: the part, the first token and the last."""
    for part, node in homes:
        tokens = [token for token in source.tokens_of(part) if _is_in(token, node)]
        texts = [token[0] for token in tokens]
        for at in range(len(texts) - len(wanted) + 1):
            if texts[at : at + len(wanted)] == wanted:
                yield part, tokens[at], tokens[at + len(wanted) - 1]


def _is_in(token: Token, node: ast.stmt) -> bool:
    first: int = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno).lineno
    return first <= token[1] + 1 <= (node.end_lineno or 0)


def _indented(text: str, margin: str) -> str:
    first, *rest = textwrap.dedent(text).split("\n")
    return "\n".join([first, *(margin + line for line in rest)])


def _whole_body(source: Source, part: Part, node: ast.stmt, new: str) -> tuple[Part, Splice]:
    if not isinstance(node, ast.FunctionDef):
        name = getattr(node, "name", "it")
        raise BookError(f"{name} is no function: name a method with @@, or say with - what is replaced")
    body = node.body[1:] if _docstring(node) and len(node.body) > 1 else node.body
    first, last = body[0].lineno - 1, (node.end_lineno or 0) - 1
    start = first, len(source.lines[first]) - len(source.lines[first].lstrip())
    return part, Splice(start, (last, len(source.lines[last].rstrip("\n"))), _indented(new, " " * start[1]))


def _text(source: Source, chosen: list[Part], splices: list[Splice]) -> str:
    """The chosen parts after the edit, with empty lines in place of all other parts."""
    lines = [""] * len(source.lines)
    for part in chosen:
        lines[part.first : part.last] = source.lines[part.first : part.last]
    for splice in sorted(splices, key=lambda s: s.start, reverse=True):
        (first, column), (last, end) = splice.start, splice.end
        lines[first : last + 1] = [lines[first][:column] + splice.new + lines[last][end:]]
    return "".join(line or "\n" for line in lines)


def build(
    source: str, reference: ModuleType, name: str, changes: Iterable[Change], known: dict[str, Any], file: str
) -> dict[str, Any]:
    """The definitions that differ after an edit: those that it changes, and those of the module that use them.

    Args:
        source: The text of the reference.
        reference: The reference itself; everything that the edit leaves alone is taken from it.
        name: The graded name.
        changes: What to replace.
        known: More names for the new text, where the reference has no such name.
        file: The name under which tracebacks and ``inspect`` show the edited text.

    Raises:
        BookError: a change does not fit, or what it leaves is no Python.
    """
    parsed = read(source)
    found = [_splice(parsed, name, change) for change in changes]
    splices = sorted((splice for _, splice in found), key=lambda s: s.start)
    if any(one.end > other.start for one, other in pairwise(splices)):
        raise BookError("two of its changes overlap")
    chosen = parsed.made_again(dict.fromkeys(part for part, _ in found))
    if not any(name in part.defines for part in chosen):
        raise BookError(f"{name} does not use what is changed")
    text = _text(parsed, chosen, splices)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = {**known, **vars(reference), "reference": reference}
    try:
        exec(compile(text, file, "exec"), namespace)
    except SyntaxError as error:
        raise BookError(f"what it leaves is no Python: {error.msg}: {(error.text or '').strip()}") from error
    return {defined: namespace[defined] for part in chosen for defined in part.defines}
