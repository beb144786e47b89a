"""What chapter 26's rules are made of: kinds of tags, words that the papers list, a hash that never changes, and the
lines of a page.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser

LEFT_OUT = frozenset(["head", "script", "style", "noscript", "template", "nav", "header", "footer", "aside", "form"])
LEFT_OUT |= {"button", "svg"}
"""Elements that are left out with all that is inside them."""
LISTS = frozenset(["ul", "ol"])
BLOCKS = frozenset(["p", "div", "section", "article", "main", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote"])
BLOCKS |= {"table", "dl", "figure", "hr", "body"}
"""Elements with a boundary where they begin and where they end; so has a list that is in no other list."""
LINES = frozenset(["br", "li", "tr", "dt", "dd"])
"""Elements that begin and end a line; so does a list that is in another list."""
STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
"""The words of which Gopher wants at least two."""
BANNED = (
    "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
"""C4 drops a line that holds one of these, in any case."""
MASKS = {"email": "|||EMAIL_ADDRESS|||", "ip": "|||IP_ADDRESS|||", "phone": "|||PHONE_NUMBER|||"}
PRIME = 4_294_967_311
"""The least prime above 2**32: chapter 26's MinHash counts modulo this number."""
SPACES = re.compile("[ \t\n\r\f\xa0]+")


def text_hash(text: str, digest_size: int = 8) -> int:
    """A number that depends on the text alone, unlike Python's ``hash``: BLAKE2b, read as a little-endian number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=digest_size).digest(), "little")


def word_grams(words: Sequence[str], n: int) -> list[str]:
    """Every n neighbouring words, joined by a space; none if there are fewer words."""
    return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]


def share(marks: Iterable[bool]) -> float:
    """The share of marks that are true; there is at least one mark."""
    marked = list(marks)
    return sum(marked) / len(marked)


def decode(html: str | bytes) -> str:
    """A page's characters: UTF-8, else Windows-1252 with U+FFFD for bytes that it does not have."""
    if isinstance(html, str):
        return html
    try:
        return html.decode()
    except UnicodeDecodeError:
        return html.decode("cp1252", errors="replace")


class PageParser(HTMLParser):
    """``html.parser``, which takes a declaration that HTML does not know for a comment instead of giving up."""

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)


def end_element(opened: list[str], tag: str) -> None:
    """End the innermost open element of this name, and all that was opened in it; none of this name, none ends."""
    if tag in opened:
        del opened[len(opened) - 1 - opened[::-1].index(tag) :]


class Lines:
    """Collects the lines of a page.

    Args:
        max_link_density: Largest share of a line's characters, white space not counted, that may be inside ``a``.

    Attributes:
        in_link: Whether what is added is inside ``a``.
        n_pre: Number of open ``pre``; in one, spaces stay.
        boundary: Whether a block boundary lies between the last line that was kept and the next one.
        items: For each open ``li``, by the number of lists it is in: whether it still waits for a line with text.
    """

    def __init__(self, max_link_density: float):
        self.max_link_density, self.in_link, self.n_pre, self.boundary = max_link_density, False, 0, False
        self.items: dict[int, bool] = {}
        self._kept: list[str] = []
        self._start()

    def _start(self) -> None:
        self._pieces: list[str] = []
        self._n_characters = self._n_linked = 0

    @property
    def begun(self) -> bool:
        """Whether anything was added to the line that is open."""
        return bool(self._pieces)

    def add(self, text: str) -> None:
        """Add characters to the open line; in ``pre``, a newline ends it, and an empty line is a block boundary."""
        first, *others = text.split("\n") if self.n_pre else [text]
        self._add(first)
        for line in others:
            if not self.end_line():
                self.boundary = True
            self._add(line)

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        n = sum(map(len, piece.split()))
        self._n_characters += n
        self._n_linked += n * self.in_link

    def break_at(self, tag: str, in_list: bool) -> None:
        """What a tag of a block or of a line does, where its element begins and where it ends."""
        if tag in BLOCKS | LINES | LISTS:
            self.end_line()
            self.boundary |= tag in BLOCKS or (tag in LISTS and not in_list)

    def end_line(self) -> bool:
        """Finish the open line: strip it, give it its "• ", and keep it unless it is empty or full of links.

        Returns:
            Whether it has text.
        """
        line = "".join(self._pieces)
        line = line.rstrip() if self.n_pre else SPACES.sub(" ", line).strip()
        keep = bool(line) and self._n_linked / self._n_characters <= self.max_link_density
        self._start()
        if line and any(self.items.values()):
            line = "  " * max([1, *self.items]) + "• " + line
            self.items = dict.fromkeys(self.items, False)
        if keep:
            if self._kept:
                self._kept.append("\n\n" if self.boundary else "\n")
            self._kept.append(line)
            self.boundary = False
        return bool(line)

    def __str__(self) -> str:
        return "".join(self._kept)
