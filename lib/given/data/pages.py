"""What chapter 26's rules are made of: kinds of tags, words that the papers list, and a hash that never changes."""

import hashlib
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
BANNED = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies")
BANNED += ("use cookies",)
"""C4 drops a line that holds one of these, in any case."""
PRIME = 4_294_967_311
"""The least prime above 2**32: chapter 26's MinHash counts modulo this number."""


def text_hash(text: str, digest_size: int = 8) -> int:
    """A number that depends on the text alone, unlike Python's ``hash``: BLAKE2b, read as a little-endian number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=digest_size).digest(), "little")


class PageParser(HTMLParser):
    """``html.parser``, which takes a declaration that HTML does not know for a comment instead of giving up."""

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)
