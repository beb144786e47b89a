"""From pages to tokens, graded: every rule by hand, hashes and orders by their formulas, all pairs by brute force."""

import hashlib
import json
import random
import sys
import unicodedata
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from lib.given.data import parts
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, with_peak
from solutions.training import TokenBatches

data = graded("data")

JACCARD, MINHASH, CURVE, QUALITY, MIXTURE, FEISTEL = (f"eq-data-{n}" for n in range(1, 7))
RETURNS, ARGS, RAISES, COST = (f"the contract, under {part}" for part in ("Returns", "Args", "Raises", "Cost"))
PRIME = 4_294_967_311


def number(text: str, digest_size: int = 8) -> int:
    """The chapter's hash, by its formula."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=digest_size).digest(), "little")


def words(n: int, seed: int = 0, vocabulary: int = 1000) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(vocabulary)}" for _ in range(n)]


# ---- extract_text ----------------------------------------------------------------------------------------------------

PAGES = {
    "navigation and programs": (
        "<title>T</title><nav>menu</nav><p>one<script>if (a < b) x();</script> two<footer>end</footer>",
        "T\n\none two",
    ),
    "an end tag ends what was opened in it": ("a<nav>b<form>c</nav>d<aside>e", "ad"),
    "an end tag in what is left out, of another name": ("a<nav>b</div></form>c</nav>d", "ad"),
    "what is left out marks nothing": ("a<nav><p>b<ul><li>c<pre><a></nav>d  e", "ad e"),
    "an end tag of what is outside": ("<p>a<nav>b</p>c</nav>d", "ad"),
    "the innermost of two": ("a<nav>b<nav>c</nav>d</nav>e", "ae"),
    "never ended": ("<p>a<p>b<header>c<p>d<body>e", "a\n\nb"),
    "a head without an end": ("<head><style>x</style><title>T<body>text", "text"),
    "blocks": ("a<p>b<h2>c</h2>d<hr>e<div>f</div><div>g", "a\n\nb\n\nc\n\nd\n\ne\n\nf\n\ng"),
    "lines": ("a<br>b<dt>c<dd>d</dd>e<tr>f", "a\nb\nc\nd\ne\nf"),
    "other tags vanish": ("un<b>believ</b>able<span>!</span><custom-tag>?", "unbelievable!?"),
    "a block boundary anywhere between": ("a<br><p></p><br>b<br><br>c", "a\n\nb\nc"),
    "cells": ("<table><tr><td>a</td><td>b</td></tr><tr><th>c<th>d<th> e </table>", "a b\nc d e"),
    "spaces": ("<p> a \t\r\n\f&nbsp;  b <b> c</b> \u00a0</p>", "a b c"),
    "other white space stays": ("<p>a\u2003 b\u2003\u2003c\vd", "a\u2003 b\u2003\u2003c\vd"),
    "pre": ("<pre>\nif x:\n    y  z \t\n\n\tw\n</pre>after", "if x:\n    y  z\n\n\tw\n\nafter"),
    "lines of pre": ("<pre>a\r\nb\u2028c\vd</pre>", "a\nb\u2028c\vd"),
    "a list": ("x<ul><li>a<li>b</li></ul>y", "x\n\n  • a\n  • b\n\ny"),
    "a list in a list": (
        "<ol><li>a<ul><li>b<br>c</li></ul>d</li><li><p>e</p>f</ol>",
        "  • a\n    • b\nc\nd\n\n  • e\n\nf",
    ),
    "a line before the inner item": ("<ul><li><ul><li></li></ul>a</li></ul><li>b", "  • a\n\n  • b"),
    "an item without text": ("<ul><li></li></ul>text<ul><li></ul>more", "text\n\nmore"),
    "text after an item without text": ("<ul><li></li>text<li>a</ul>", "text\n  • a"),
    "an item that begins with two lists": ("<ul><li><ol><li>a</ol>b</ul>", "    • a\nb"),
    "end tags that nothing opened": ("a</ul>b</li>c</p>d</b>e</pre>f  g", "a\n\nb\nc\n\nde\n\nf g"),
    "an end tag of another list": ("<ul><li>a</ol><ol><li>b</ul>", "  • a\n    • b"),
    "characters": ("<p>&lt;p&gt; &amp; caf&eacute; &#8364;&copy", "<p> & café €©"),
    "comments and declarations": ("<!doctype html><!-- no --><![bogus[x]>a<?pi?>b", "ab"),
    "the last line has no end": ("<p>a<p>b", "a\n\nb"),
    "nothing": ("<p> <br> </p>\n", ""),
}


@pytest.mark.parametrize("name", PAGES)
def test_extract_text_by_hand(name):
    page, expected = PAGES[name]
    case(f"{name}: {page!r}")
    expect_equal(data.extract_text(page), expected, read=RETURNS)


@pytest.mark.parametrize(
    ("page", "density", "expected"),
    [
        ("<p><a>home</a> <a>news</a> | x<p>more text, <a>link</a>", 0.5, "more text, link"),
        ("<p><a>ab</a> c d<p><a>abc</a> d", 0.5, "ab c d"),
        ("<p><a>abc</a> d e", 0.5, ""),
        ("<p><a>abc</a> defg hij<p><a>abcd</a> efg hij", 0.3, "abc defg hij"),
        ("<p><a>ab</a> c<br>d", 1.0, "ab c\nd"),
        ("<p><a>a</a> bcd<p>e", 0.0, "e"),
        ("a<ul><li><a>b</a><li>c <a>d</a></ul>", 0.5, "a\n\n  • c d"),
        ("<ul><li><a>abcd</a><br>text</ul>", 0.5, "text"),
        ("a<p><a>b</a></p><br>c", 0.5, "a\n\nc"),
        ("<p><a>ab <a>c</a> def</a>", 0.5, "ab c def"),
        ("<p><a>a</p>bc</a><p>d", 0.5, "d"),
        ("<pre>x\n<a>abc</a>\ny</pre>", 0.5, "x\ny"),
    ],
    ids=str,
)
def test_extract_text_drops_lines_of_links(page, density, expected):
    case(f"max_link_density = {density}: {page!r}")
    expect_equal(data.extract_text(page, density), expected, read=f"{RETURNS}: Links")


@pytest.mark.parametrize(
    ("page", "expected"),
    [("<p>é €".encode(), "é €"), ("<p>é €".encode("cp1252"), "é €"), (b"<p>a\x81b\x80", "a\ufffdb€")],
    ids=["UTF-8", "Windows-1252", "neither"],
)
def test_extract_text_of_bytes(page, expected):
    case(f"{page!r}")
    expect_equal(data.extract_text(page), expected, read=ARGS)


# ---- gopher_quality --------------------------------------------------------------------------------------------------

PROSE = "The cat sat with the dog and they have to be good friends of mine"
"""15 words, 7 of Gopher's stop words, 50 characters."""
NO_ALPHA = {"min_alpha_words_ratio": 0}
LIMITS = {"min_doc_words": 10, "max_doc_words": 100}
GOPHER = {
    "it passes": (PROSE, {}, None),
    "9 words": ("The cat sat with the dog and they have", {}, "gopher_short_doc"),
    "10 words": ("The cat sat with the dog and they have to", {}, None),
    "10 tokens, 9 words": ("The cat sat with the dog and they have -", {}, "gopher_short_doc"),
    "no words": ("- -", {"min_doc_words": 0}, "gopher_short_doc"),
    "101 words": ("the and " * 50 + "cat", {}, "gopher_long_doc"),
    "100 words": ("the and " * 50, {}, None),
    "mean of 2.9 characters": ("the be " * 1 + "cat " * 8, {}, "gopher_below_avg_threshold"),
    "mean of 3 characters": ("the and " + "cat " * 8, {}, None),
    "mean of 3 characters, symbols aside": ("the and " + "cat " * 8 + "- -", {}, None),
    "mean of 3 characters, with punctuation": ("the and " + "to, " * 8, {}, None),
    "mean of 10.1 characters": ("with have " + "elevenchars " * 13, {}, "gopher_above_avg_threshold"),
    "mean of 10 characters": ("with have " + "elevenchars " * 12, {}, None),
    "3 # on 20 tokens": ("the and # " + "cat " * 15 + "## dog", {}, "gopher_too_many_hashes"),
    "2 # on 20 tokens": ("the and # " + "cat " * 16 + "#dog", {}, None),
    "2 # on 21 tokens, 10 words": ("the and # # " + "cat " * 8 + "- " * 9, NO_ALPHA, None),
    "3 ellipses on 20 tokens": ("the... and… dog... " + "cat " * 17, {}, "gopher_too_many_ellipsis"),
    "20 tokens, one with 9 dots": ("the and......... " + "cat " * 18, {}, "gopher_too_many_ellipsis"),
    "20 tokens, one with 8 dots": ("the and........ " + "cat " * 18, {}, None),
    "2 ellipses on 20 tokens, 19 words": ("the... and… " + "cat " * 17 + "-", {}, None),
    "19 of 20 bullets": (
        "  • the\n" + "- and\n" * 18 + "cat\n\n",
        {"min_alpha_words_ratio": 0},
        "gopher_too_many_bullets",
    ),
    "10 of 10 bullets and blank lines": ("* the\n\n" * 5 + "- and\n" * 5, NO_ALPHA, "gopher_too_many_bullets"),
    "10 of 10 bullets without a space": ("-the\n" * 10, {}, "gopher_too_many_bullets"),
    "9 of 10 bullets": ("* the\n" * 5 + "- and\n\n" * 4 + "cat", NO_ALPHA, None),
    "4 of 10 lines": (
        "the...\n" * 2 + "and… \n\n" * 2 + "cat\n" * 6,
        {"max_symbol_word_ratio": 1},
        "gopher_too_many_end_ellipsis",
    ),
    "3 of 10 lines": ("the...\n" * 2 + "and…\n\n" + "cat\n" * 7, {"max_symbol_word_ratio": 1}, None),
    "2 of 4 lines, ended by line separators": (
        "the and cat...\u2028cat...\u2028cat cat cat\u2028cat cat cat cat",
        {"max_symbol_word_ratio": 1},
        "gopher_too_many_end_ellipsis",
    ),
    "7 of 10 tokens with a letter": ("the and cat dog cow hen pig 123 456 789", {}, "gopher_below_alpha_threshold"),
    "8 of 10 tokens with a letter": ("the and cat dog cow hen pig a1b 456 789", {}, None),
    "letters of another alphabet": ("the and " + "кот " * 8, {}, None),
    "a symbol counts as a token": ("the and cat dog cow hen pig ant 456 789 -", {}, "gopher_below_alpha_threshold"),
    "1 stop word, twice": ("the the " + "cat " * 10, {}, "gopher_enough_stop_words"),
    "1 stop word, others inside of words": ("the " + "often " * 10, {}, "gopher_enough_stop_words"),
    "2 stop words in other clothes": ("THE, (and) " + "cat " * 10, {}, None),
    "short before everything": ("# ... -", {}, "gopher_short_doc"),
    "hashes before ellipses": ("#... " * 12, {"min_doc_words": 0}, "gopher_short_doc"),
    "hashes, ellipses and stop words": ("cat#... " * 12, {}, "gopher_too_many_hashes"),
}


@pytest.mark.parametrize("name", GOPHER)
def test_gopher_quality_by_hand(name):
    text, settings, expected = GOPHER[name]
    case(f"{name}: {text[:60]!r}, at least 10 words, {settings}")
    expect_equal(data.gopher_quality(text, **(LIMITS | settings)), expected, read=RETURNS)


def test_gopher_quality_by_every_limit():
    limits: dict[str, float] = {"min_doc_words": 11, "max_doc_words": 9}
    limits |= {"min_avg_word_length": 6, "max_avg_word_length": 4}
    for expected, loosened in (
        ("gopher_short_doc", {"min_doc_words": 10}),
        ("gopher_long_doc", {"max_doc_words": 10}),
        ("gopher_below_avg_threshold", {"min_avg_word_length": 5}),
        ("gopher_above_avg_threshold", {"max_avg_word_length": 5}),
        ("gopher_too_many_hashes", {"max_symbol_word_ratio": 0.5}),
        ("gopher_too_many_bullets", {"max_bullet_lines_ratio": 1}),
        ("gopher_too_many_end_ellipsis", {"max_ellipsis_lines_ratio": 1}),
        ("gopher_below_alpha_threshold", {"min_alpha_words_ratio": 0}),
        ("gopher_enough_stop_words", {"min_stop_words": 0}),
        (None, {}),
    ):
        case(f"10 lines '- 1#...', which break every rule until its limit is loosened: {limits}")
        expect_equal(data.gopher_quality("- 1#...\n" * 10, **limits), expected, read=RETURNS)
        limits |= loosened


def test_gopher_quality_has_the_papers_limits():
    case("the limits that the paper names, as defaults: 49, 50, 100,000 and 100,001 words")
    for n, expected in ((49, "gopher_short_doc"), (50, None), (100_000, None), (100_001, "gopher_long_doc")):
        text = " ".join(("the", "and", "cats")[i % 3] for i in range(n))
        expect_equal(data.gopher_quality(text), expected, name=f"{n} words", read=ARGS)


# ---- c4_clean --------------------------------------------------------------------------------------------------------

LINE = "One two three. Four five six!"
C4 = {
    "a page that passes": (f"  {LINE}  \n\n{LINE}\nEnd of the page?", (f"{LINE}\n{LINE}\nEnd of the page?", None)),
    "lorem ipsum": (f"{LINE}\n{LINE}\n{LINE}\nLorem Ipsum", ("", "lorem_ipsum")),
    "a curly bracket": (f"{LINE}\n{LINE}\n{LINE}\nx {{", ("", "curly_bracket")),
    "a closing bracket alone": (f"{LINE}\n{LINE}\n{LINE}\nx }}", (f"{LINE}\n{LINE}\n{LINE}", None)),
    "lorem ipsum before the bracket": ("lorem ipsum {", ("", "lorem_ipsum")),
    "four sentences": (f"{LINE}\n{LINE}\nNo end of a line", ("", "too_few_sentences")),
    "ends of lines": (
        'He said "one..."\nIs it three two?\nIt is three!\nIt is three.\nWell, it is...\nIt is so;\nIt is “so.”\n'
        "And so on.",
        ('He said "one..."\nIs it three two?\nIt is three!\nIt is three.\nAnd so on.', None),
    ),
    "a line separator ends a line": (f"{LINE}\u2028{LINE}\x0cand one more.", (f"{LINE}\n{LINE}\nand one more.", None)),
    "two and three tokens": (
        f"{LINE}\n{LINE}\nTwo  tokens.\nNow three tokens.",
        (f"{LINE}\n{LINE}\nNow three tokens.", None),
    ),
    "phrases": (
        f"{LINE}\nWe like JavaScript a lot.\nSee our Terms of Use now.\nOur privacy policy is good.\n{LINE}\n"
        "This site uses cookies here.\nThe use of cookies is old.\nWe use cookies for you.\n"
        f"Our cookie policy is new.\nBakers bake cookies all day.\n{LINE}",
        (f"{LINE}\n{LINE}\nBakers bake cookies all day.\n{LINE}", None),
    ),
    "a word of 1,001 characters": (f"{LINE}\n{LINE}\n{LINE}\nA long {'x' * 1000}.", (f"{LINE}\n{LINE}\n{LINE}", None)),
    "a word of 1,000 characters": (
        f"{LINE}\n{LINE}\nA long {'x' * 999}.",
        (f"{LINE}\n{LINE}\nA long {'x' * 999}.", None),
    ),
    "ends of sentences": (
        "Wait... [Really?] \"'Yes!'\") Pi is 3.14 at a.b here?!\nNo more of it.",
        ("Wait... [Really?] \"'Yes!'\") Pi is 3.14 at a.b here?!\nNo more of it.", None),
    ),
    "a line without an end counts one": (
        'It is "so" and "no"\nIt is "so" and "no"\nIt is three.\nIt is four.\nIt is five.',
        ('It is "so" and "no"\nIt is "so" and "no"\nIt is three.\nIt is four.\nIt is five.', None),
    ),
    "dots inside of words": ("It is 3.1.4.1.5 or a.b.c.d.e.", ("", "too_few_sentences")),
}


@pytest.mark.parametrize("name", C4)
def test_c4_clean_by_hand(name):
    text, expected = C4[name]
    case(f"{name}: {text[:80]!r}")
    found = data.c4_clean(text)
    expect_true(
        isinstance(found, tuple) and len(found) == 2, "the answer is no pair of a text and a reason", read=RETURNS
    )
    expect_equal(found[1], expected[1], name="reason", read=RETURNS)
    expect_equal(found[0], expected[0], name="text", read=RETURNS)
    if expected[1] is None:
        expect_equal(data.c4_clean(expected[0]), expected, name="cleaned twice", read=RETURNS)


def test_c4_clean_with_other_limits():
    case("1 sentence, 2 tokens and words of 5 characters")
    text = "Two tokens.\nToo looong now.\nOne\nIt is."
    expect_equal(data.c4_clean(text, 1, 2, 5), ("It is.", None), read=ARGS)
    expect_equal(data.c4_clean("", 0), ("", None), read=ARGS)
    case("2 sentences, 2 tokens: one line of three sentences")
    expect_equal(data.c4_clean("It is. Was it? No!", 2, 2), ("It is. Was it? No!", None), read=ARGS)


# ---- mask_pii --------------------------------------------------------------------------------------------------------

E, IP, P = "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||", "|||PHONE_NUMBER|||"
MASKED = {
    "an address": ("Write to a.b_c+d%e-f@mail.example.co.uk.", f"Write to {E}."),
    "digits": ("a1@3m.m3.com", E),
    "a long last label": ("a@b.technology", E),
    "capitals": ("A@B.COM", E),
    "an end of a sentence": ("a@b.com. (c@d.org)", f"{E}. ({E})"),
    "one label": ("root@localhost", "root@localhost"),
    "two dots in the local part": ("a..b@c.com .d@e.com", "a..b@c.com .d@e.com"),
    "a last label of one letter or with digits": ("a@b.c a@b.c1 a@b.com1", "a@b.c a@b.c1 a@b.com1"),
    "hyphens inside and at the end": ("a@b-c.de a@-b.de a@b-.de a@b.de-", f"{E} a@-b.de a@b-.de a@b.de-"),
    "a dot and more": ("a@b.com.x a@b.com.1 a@b.com..", f"a@b.com.x a@b.com.1 {E}.."),
    "a letter of another alphabet": (
        "éa@b.com a@b.comé é1.2.3.4é é283-182-3829é _2831823829_",
        f"é{E} {E}é é{IP}é é{P}é _{P}_",
    ),
    "an address of a machine": ("at 192.168.0.1, 255.255.255.255 and 0.0.0.0.", f"at {IP}, {IP} and {IP}."),
    "numbers too large or with zeros": (
        "256.1.1.1 1.1.1.999 01.1.1.1 1.1.1.01",
        "256.1.1.1 1.1.1.999 01.1.1.1 1.1.1.01",
    ),
    "neighbours": (
        "v1.2.3.4 1.2.3.4.5 .1.2.3.4 1.2.3.4a 1.2.3 1.2.3.4:80",
        f"v1.2.3.4 1.2.3.4.5 .1.2.3.4 1.2.3.4a 1.2.3 {IP}:80",
    ),
    "a phone": ("283-182-3829 (283)-182-3829 2831823829 283.182.3829 283 182 3829", f"{P} {P} {P} {P} {P}"),
    "a phone with a country": ("+1 283-182-3829 +12831823829 1-283-182-3829 1 (283) 182 3829", f"{P} {P} {P} {P}"),
    "half a parenthesis, two spaces, a slash, a tab": (
        "283)-182-3829 (283-182-3829 283  182 3829 283/182/3829 283\t182\t3829",
        f"283)-182-3829 ({P} 283  182 3829 283/182/3829 283\t182\t3829",
    ),
    "more digits": (
        "2831823829 28318238291 92831823829 283182382 x2831823829",
        f"{P} 28318238291 92831823829 283182382 x2831823829",
    ),
    "eleven digits": ("23456789012 12345678901", f"23456789012 {P}"),
    "dots and hyphens before and after": (
        "-283-182-3829 .2831823829 283-182-3829-1 283.182.3829.1 283-182-3829. 283-182-3829-x",
        f"-283-182-3829 .2831823829 283-182-3829-1 283.182.3829.1 {P}. {P}-x",
    ),
    "digits of another alphabet": ("٢831823829 283182382٩", "٢831823829 283182382٩"),
    "neighbours that a mask frees": ("2831823829(283)182-3829", f"{P}{P}"),
    "an address that a mask frees": ("a@b.com_c@d.com", f"{E}{E}"),
    "first the address": ("283-182-3829@b.com 1.2.3.4@b.com", f"{E} {E}"),
}


@pytest.mark.parametrize("name", MASKED)
def test_mask_pii_by_hand(name):
    text, expected = MASKED[name]
    case(f"{name}: {text!r}")
    counts = {"email": expected.count(E), "ip": expected.count(IP), "phone": expected.count(P)}
    expect_equal(data.mask_pii(text), (expected, counts), read=RETURNS)
    expect_equal(data.mask_pii(expected), (expected, dict.fromkeys(counts, 0)), name="masked twice", read=RETURNS)


def test_mask_pii_is_fast_on_long_words():
    case("words of 40,000 characters that begin like addresses")
    for text in ("a" * 40_000, "a." * 20_000, "a@" + "b-" * 20_000, "1." * 20_000, "a@" + "b." * 20_000):
        expect_equal(data.mask_pii(text)[1]["phone"], 0, name=text[:6], read=COST)


# ---- normalize and deduplicate_lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ℳ ™", ["M", "TM"]),
        ("Hello, World!  It's 3.5", ["hello", "world", "it", "s", "3", "5"]),
        ("Café Ü ﬁne ½ x²", ["cafe", "u", "fine", "1", "2", "x2"]),
        ("e\u0301e\u20dd a\u0335b", ["ee", "ab"]),
        ("snake_case a-b", ["snake", "case", "a", "b"]),
        ("İ ΣΑΣ 東京", ["i", "σας", "東京"]),
        ("\u0915\u093f", ["\u0915"]),
        (" … — \n", []),
    ],
    ids=str,
)
def test_normalize_by_hand(text, expected):
    case(repr(text))
    expect_equal(data.normalize(text), expected, read=RETURNS)


def test_normalize_by_the_rules():
    case("2,000 characters from all of Unicode, in four texts")
    for seed in range(4):
        rng = random.Random(seed)
        text = "".join(c for c in (chr(rng.randrange(0x20, 0x3000)) for _ in range(500)))
        marks = unicodedata.normalize("NFKD", text.lower())
        kept = (c for c in marks if unicodedata.category(c) not in ("Mn", "Mc", "Me"))
        expected = "".join(c if c.isalnum() else " " for c in kept).split()
        expect_equal(data.normalize(text), expected, read=RETURNS)


LINES = ["top\n a \nb\n\nmenu\n", "menu \r\n\n\nc\na\nc", "  MENU\ntop"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("none", ["b\n\n", "\n\n", "  MENU\n"]), ("first", ["top\n a \nb\n\nmenu\n", "\n\nc\n", "  MENU\n"])],
)
def test_deduplicate_lines_by_hand(keep, expected):
    case(f"keep = {keep!r}: {LINES}")
    given = list(LINES)
    expect_equal(data.deduplicate_lines(given, keep), expected, read=RETURNS)
    expect_equal(given, LINES, name="the documents after the call", read=RETURNS)
    expect_equal(data.deduplicate_lines(expected, keep), expected, name="done twice", read=RETURNS)


def test_deduplicate_lines_drops_every_occurrence_unless_it_is_told():
    case("no keep: 'a' twice in one document; and nothing")
    expect_equal(data.deduplicate_lines(["a\nb\na"]), ["b\n"], read=ARGS)
    expect_equal(data.deduplicate_lines([]), [], read=RETURNS)
    case("lines that end with a line separator, with '\\r\\n' or with nothing; two of spaces alone")
    expect_equal(data.deduplicate_lines(["a\u2028b\r\n \n", "b\n \nc"]), ["a\u2028 \n", " \nc"], read=RETURNS)
    with expect_raises(ValueError, "last", read=RAISES):
        data.deduplicate_lines(["a"], "last")


def test_deduplicate_lines_keeps_a_hash_a_line():
    case("300 lines of 20,000 characters")
    documents = [f"{i} {'x' * 20_000}\n" for i in range(300)]
    data.deduplicate_lines(documents[:3])
    found, peak = with_peak(lambda: data.deduplicate_lines(documents, "first"))
    expect_equal(len(found), 300, name="documents", read=RETURNS)
    limit = sum(map(len, documents)) * 1.5
    expect_true(peak < limit, f"{peak / 1e6:.1f} MB beside the documents: the lines themselves were kept", read=COST)


# ---- minhash_signature and near_duplicates ---------------------------------------------------------------------------


def expected_signature(text: list[str], n_hashes: int, ngrams: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    a = [int(x) for x in rng.integers(1, 2**32, n_hashes, dtype=np.uint64)]
    b = [int(x) for x in rng.integers(0, 2**32, n_hashes, dtype=np.uint64)]
    grams = {" ".join(text[i : i + ngrams]) for i in range(max(1, len(text) - ngrams + 1))}
    hashes = [number(gram, 4) for gram in grams]
    return np.array([min((x * h + y) % PRIME for h in hashes) for x, y in zip(a, b, strict=True)], dtype=np.uint64)


@pytest.mark.parametrize(
    ("n", "settings"),
    [(3, {}), (5, {}), (40, {}), (40, {"n_hashes": 20, "ngrams": 2, "seed": 7}), (700, {"n_hashes": 16, "ngrams": 1})],
    ids=str,
)
def test_minhash_signature_by_the_formula(n, settings):
    case(f"{n} words, {settings or 'the defaults'}")
    text = words(n)
    expected = expected_signature(
        text, *(settings.get(k, v) for k, v in (("n_hashes", 128), ("ngrams", 5), ("seed", 0)))
    )
    read = f"{MINHASH} and {RETURNS}"
    expect_close(data.minhash_signature(" ".join(text), **settings), expected, atol=0, rtol=0, read=read)


def test_minhash_signature_of_words_and_of_none():
    case("the words count, not their case, accents or punctuation; without words all values are the prime")
    clean = expected_signature(["the", "cafe", "is", "open", "to", "all"], 128, 5, 0)
    expect_close(data.minhash_signature("THE café is open, to all!"), clean, atol=0, rtol=0, read=RETURNS)
    expect_close(data.minhash_signature(" - ", 4), np.full(4, PRIME, np.uint64), atol=0, rtol=0, read=RETURNS)


def test_minhash_signature_of_a_long_text():
    case("8,000 shingles: all their values at once would be 8 MB, and a product of them as many again")
    text = " ".join(f"w{i}" for i in range(8_000))
    found, peak = with_peak(lambda: data.minhash_signature(text))
    expect_true(found.max() < PRIME / 300, "the least of 8,000 values is small", read=MINHASH)
    expect_true(peak < 10e6, f"{peak / 1e6:.0f} MB at once", read=COST)


def shingles(text: str, n: int) -> set[str]:
    parts = text.split()
    return {" ".join(parts[i : i + n]) for i in range(max(1, len(parts) - n + 1))} if parts else set()


def brute_force(documents: list[str], threshold: float, n_hashes: int, n_bands: int, ngrams: int, seed: int):
    """Clusters of all pairs that agree in a band and are similar enough."""
    rows = [
        expected_signature(text.split(), n_hashes, ngrams, seed).reshape(n_bands, -1) if text else None
        for text in documents
    ]
    home = list(range(len(documents)))
    for i in range(len(documents)):
        for j in range(i):
            if rows[i] is None or rows[j] is None or not (rows[i] == rows[j]).all(1).any():
                continue
            one, two = shingles(documents[i], ngrams), shingles(documents[j], ngrams)
            if len(one & two) / len(one | two) >= threshold:
                home = [home[j] if home[k] == home[i] else home[k] for k in range(len(home))]
    groups = [[i for i in range(len(home)) if home[i] == root] for root in dict.fromkeys(home)]
    return [group for group in groups if len(group) > 1]


def copies(n_pages: int, n_copies: int, seed: int = 0) -> list[str]:
    """Pages and copies of them with 0 to 30 % of the words changed, in a random order."""
    rng, found = random.Random(seed), []
    for page in range(n_pages):
        text = words(80, seed=1000 * seed + page)
        for copy in range(n_copies):
            found.append(" ".join(f"x{rng.random()}" if rng.random() < 0.02 * copy else word for word in text))
    rng.shuffle(found)
    return [*found[:3], "", *found[3:], ""]


@pytest.mark.parametrize(
    ("threshold", "n_hashes", "n_bands", "ngrams"),
    [(0.8, 128, 16, 5), (0.5, 64, 32, 2), (0.3, 32, 8, 1), (0.7, 24, 24, 3)],
    ids=str,
)
def test_near_duplicates_by_brute_force(threshold, n_hashes, n_bands, ngrams):
    case(f"30 documents, threshold {threshold}, {n_hashes} hashes in {n_bands} bands, {ngrams} words in a shingle")
    documents = copies(5, 6, seed=n_bands)
    documents = [" ".join(text.replace(".", "").split()) for text in documents]
    expected = brute_force(documents, threshold, n_hashes, n_bands, ngrams, 3)
    found = data.near_duplicates(documents, threshold, n_hashes, n_bands, ngrams, 3)
    expect_equal(found, expected, read=RETURNS)


def test_near_duplicates_by_hand():
    case("words a to j: one copy in capitals, one text of the same words in another order, two empty ones")
    text = "a b c d e f g h i j"
    expect_equal(data.near_duplicates([text, "", text.upper(), text[::-1], "-"]), [[0, 2]], read=RETURNS)
    case("similarity exactly at the threshold: 8 shingles of 10")
    pair = ["a b c d e f g h i", "a b c d e f g h j"]
    expect_equal(data.near_duplicates(pair, 0.8, 32, 32, 1), [[0, 1]], read=RETURNS)
    expect_equal(data.near_duplicates(pair, 0.81, 32, 32, 1), [], read=RETURNS)
    case("signatures of 4 values that agree in the first two; 2 bands")
    expect_equal(data.near_duplicates(["m y n b i", "m y n q p"], 0.4, 4, 2, 1), [[0, 1]], read=RETURNS)
    case("signatures of 2 values that agree in one with seed 1, in none with seed 0; 2 bands")
    expect_equal(data.near_duplicates(["s h y e r", "s h y o c"], 0.4, 2, 2, 1, 1), [[0, 1]], read=RETURNS)


def test_near_duplicates_connects_through_others():
    case("a chain: each of five texts shares 14 of 18 words with the next, the first and the last none; threshold 0.7")
    letters = [f"w{i}" for i in range(40)]
    chain = [" ".join(letters[2 * i : 2 * i + 16]) for i in range(9)]
    expect_equal(data.near_duplicates(chain[::-1], 0.7, 64, 64, 1), [list(range(9))], read=RETURNS)


def test_near_duplicates_compares_all_that_meet():
    case("one band of one value, which three texts share through one word; the first and the last are similar")
    least = min((f"w{i}" for i in range(500)), key=lambda word: int(expected_signature([word], 1, 1, 0)[0]))
    documents = [f"{least} w1 w2 w3 w4", f"{least} w5 w6 w7 w8", f"{least} w1 w2 w3 w9"]
    expect_equal(data.near_duplicates(documents, 0.6, 1, 1, 1), [[0, 2]], read=RETURNS)


def test_near_duplicates_checks_its_bands():
    case("128 hashes in 10 bands")
    with expect_raises(ValueError, "128", "10", read=RAISES):
        data.near_duplicates(["a"], n_bands=10)


def count_comparisons(monkeypatch) -> list[int]:
    """Grows by one number with each pair that is compared."""
    counted, jaccard = [], parts.jaccard

    def counting(a, b):
        counted.append(len(a))
        return jaccard(a, b)

    monkeypatch.setattr(parts, "jaccard", counting)
    return counted


def test_near_duplicates_compares_no_pair_of_a_cluster(monkeypatch):
    case("900 copies of a page, each with another last word: 899 comparisons, not 404,550")
    counted = count_comparisons(monkeypatch)
    text = " ".join(words(50, vocabulary=10**6))
    found = data.near_duplicates([f"{text} x{i}" for i in range(900)], 0.8, 8, 8)
    expect_equal(found, [list(range(900))], read=RETURNS)
    expect_true(0 < len(counted) <= 900, f"{len(counted):,} comparisons", read=COST)


def test_near_duplicates_compares_no_pair_of_a_cluster_beside_a_stranger(monkeypatch):
    case("50 copies of 'a b c d e f', then a text with half of their words, 128 bands of 1: 49 + 50 comparisons")
    counted = count_comparisons(monkeypatch)
    found = data.near_duplicates(["a b c d e f"] * 50 + ["a b c x y z"], 0.9, n_bands=128, ngrams=1)
    expect_equal(found, [list(range(50))], read=RETURNS)
    expect_true(0 < len(counted) <= 99, f"{len(counted):,} comparisons instead of 99", read=COST)


def test_near_duplicates_compares_no_pair_twice(monkeypatch):
    case("two texts that share half of their words, 64 bands of 1: they meet in many bands; and two that share none")
    counted = count_comparisons(monkeypatch)
    pair = ["a b c d e f", "a b c d x y", "m n o p q r"]
    expect_equal(data.near_duplicates(pair, 0.9, 64, 64, 1), [], read=RETURNS)
    expect_equal(len(counted), 1, name="comparisons", read=COST)


# ---- contaminated_spans ----------------------------------------------------------------------------------------------


def test_contaminated_spans_by_hand():
    case("n = 3: 'b c d e' and 'x y z' are known; 'a b' is too short")
    documents = ["A, b C d: e f", "x-y z x y z", "b c d q q c d e", "a b", "", "a b c", "y z b c"]
    expected = [[(1, 5)], [(0, 6)], [(0, 3), (5, 8)], [], [], [], []]
    expect_equal(data.contaminated_spans(documents, ["B c d e!", "a b", "x y z"], 3), expected, read=RETURNS)


def test_contaminated_spans_reads_each_text_once():
    case("texts from generators, n = 13 by default: 12 and 13 words of an evaluation text")
    text = words(40)

    def once(texts: list[str]) -> Iterator[str]:
        yield from texts

    documents = [" ".join(text[:12]), " ".join(["q", *text[5:18], "q"]), " ".join(text)]
    found = data.contaminated_spans(once(documents), once([" ".join(text)]))
    expect_equal(found, [[], [(1, 14)], [(0, 40)]], read=ARGS)


def test_contaminated_spans_keeps_a_hash_an_n_gram():
    case("100 evaluation texts of 40 words of 100 characters: their n-grams are 3.7 MB")
    evaluation = [" ".join(f"{i}x{k:098}" for k in range(40)) for i in range(100)]
    data.contaminated_spans(evaluation[:1], evaluation[:1])
    found, peak = with_peak(lambda: data.contaminated_spans(evaluation[:2], evaluation))
    expect_equal(found, [[(0, 40)]] * 2, read=RETURNS)
    expect_true(peak < 2e6, f"{peak / 1e6:.1f} MB at once: the n-grams themselves were kept", read=COST)


def test_contaminated_spans_by_brute_force():
    case("20 texts of 60 words of 12, n = 2: covered words, one by one")
    texts = [words(60, seed, 12) for seed in range(20)]
    evaluation = [words(4, 100 + seed, 12) for seed in range(6)]
    known = {tuple(e[i : i + 2]) for e in evaluation for i in range(3)}
    found = data.contaminated_spans([" ".join(t) for t in texts], [" ".join(e) for e in evaluation], 2)
    for text, spans in zip(texts, found, strict=True):
        starts = [i for i in range(59) if tuple(text[i : i + 2]) in known]
        covered = {i + k for i in starts for k in (0, 1)}
        expect_equal(
            {i for start, end in spans for i in range(start, end)}, covered, name="covered words", read=RETURNS
        )
        apart = all(end < start for (_, end), (start, _) in pairwise(spans))
        expect_true(apart, f"spans {spans} overlap or touch", read=RETURNS)


# ---- QualityClassifier -----------------------------------------------------------------------------------------------

GOOD = ["the model is trained on text", "a loss is a mean over tokens", "we measure the loss of the model", "tokens"]
BAD = ["click here to win", "win money now now now", "click click click", "cheap money here"]


@pytest.mark.parametrize(("n_features", "ngrams"), [(2**16, 2), (50, 1), (1000, 3)])
def test_QualityClassifier_features_by_hand(n_features, ngrams):
    case(f"'To be, or to be', up to {ngrams} words, {n_features} features")
    text = ["to", "be", "or", "to", "be"]
    grams = [" ".join(text[i : i + n]) for n in range(1, ngrams + 1) for i in range(6 - n)]
    expected = torch.tensor([number(gram) % n_features for gram in grams])
    model = data.QualityClassifier(["a", "b"], n_features, ngrams)
    expect_close(model.features("To be, or to be"), expected, atol=0, rtol=0, read=RETURNS)
    expect_close(model.features("-"), torch.zeros(0, dtype=torch.int64), atol=0, rtol=0, name="no words", read=RETURNS)


def test_QualityClassifier_forward_is_a_mean_and_a_bias():
    case("three texts, one without words; random weights [64, 3]")
    model = data.QualityClassifier(["a", "b", "c"], 64, 2)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.bias, generator=torch.Generator().manual_seed(1))
    texts = ["one two one", " ", "three"]
    rows: list[list[Any]] = [[], [], []]
    for row, text in zip(rows, texts, strict=True):
        w = text.split()
        row += [number(g) % 64 for g in [*w, *(f"{a} {b}" for a, b in pairwise(w))]]
    means = [model.weight[row].mean(0) if row else torch.zeros(3) for row in rows]
    expect_close(model(texts), torch.stack(means) + model.bias, read=QUALITY)
    expect_close(model([]), torch.zeros(0, 3), name="no texts", read=QUALITY)


def dense(model, texts: list[str]) -> torch.Tensor:
    """Shares of features: one row a text."""
    rows = torch.zeros(len(texts), model.n_features, dtype=torch.float64)
    for row, text in zip(rows, texts, strict=True):
        w = text.split()
        grams = [*w, *(f"{a} {b}" for a, b in pairwise(w))]
        for gram in grams:
            row[number(gram) % model.n_features] += 1 / len(grams)
    return rows


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_QualityClassifier_fit_is_a_softmax_regression(steps):
    case(f"8 texts of two classes, {steps} steps, compared with torch.optim.AdamW in float64")
    model = data.QualityClassifier(["good", "bad"], 128)
    labels = ["good"] * 4 + ["bad"] * 4
    loss = model.fit(GOOD + BAD, labels, steps, lr=0.2)
    x, y = dense(model, GOOD + BAD), torch.tensor([0] * 4 + [1] * 4)
    weight = torch.zeros(128, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], lr=0.2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = functional.cross_entropy(x @ weight + bias, y)
        expected.backward()
        optimizer.step()
    expect_true(isinstance(loss, float), "fit returns a Python float", read=RETURNS)
    expect_close(torch.tensor(loss).double(), expected.detach(), rtol=1e-3, name="loss of the last step", read=QUALITY)
    expect_close(model.weight.detach().double(), weight.detach(), atol=2e-3, name="weight", read=QUALITY)
    expect_close(model.bias.detach().double(), bias.detach(), atol=2e-3, name="bias", read=QUALITY)


def test_QualityClassifier_predicts_what_it_has_learned():
    case("8 texts, 100 steps: all are told apart; probabilities are the softmax's")
    model = data.QualityClassifier(["bad", "good"])
    model.fit(GOOD + BAD, ["good"] * 4 + ["bad"] * 4)
    for text, label in [(GOOD[0], "good"), (BAD[2], "bad"), ("win cheap money", "bad")]:
        found, probability = model.predict(text)
        expected = model([text])[0].softmax(-1).max().item()
        expect_equal(found, label, name=f"label of {text!r}", read=RETURNS)
        expect_close(torch.tensor(probability), torch.tensor(expected), name="probability", read=RETURNS)
    with expect_raises(ValueError, "ugly", read=RAISES):
        model.fit(["a"], ["ugly"])


@oracle
def test_QualityClassifier_is_as_accurate_as_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    case("200 texts of 12 words from two overlapping vocabularies; 100 to train on")
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(40) + 12 * (i % 2)}" for _ in range(12)) for i in range(200)]
    labels = ["even" if i % 2 == 0 else "odd" for i in range(200)]
    model = data.QualityClassifier(["even", "odd"], 4096)
    model.fit(texts[:100], labels[:100], 300, lr=0.5)
    ours = sum(model.predict(t)[0] == label for t, label in zip(texts[100:], labels[100:], strict=True))
    x = dense(model, texts).numpy()
    theirs = LogisticRegression(C=1e4, max_iter=1000).fit(x[:100], labels[:100]).score(x[100:], labels[100:]) * 100
    expect_true(ours >= theirs - 5, f"{ours} of 100 right, scikit-learn {theirs:.0f}", read=QUALITY)


# ---- plan_mixture ----------------------------------------------------------------------------------------------------


def float64(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


SIZES = {"web": 1000, "code": 100, "books": 10}
MIXTURES: dict[str, tuple[float, dict[str, Any], dict[str, float]]] = {
    "in proportion": (555, {}, {"web": 500, "code": 50, "books": 5}),
    "fractions": (277.5, {}, {"web": 250, "code": 25, "books": 2.5}),
    "uniform": (30, {"temperature": float("inf")}, {"web": 10, "code": 10, "books": 10}),
    "one cap": (300, {"temperature": float("inf")}, {"web": 130, "code": 130, "books": 40}),
    "two caps, one after the other": (
        1000,
        {"weights": {"web": 1, "code": 3, "books": 6}},
        {"web": 560, "code": 400, "books": 40},
    ),
    "temperature 2": (
        111,
        {"weights": {"web": 100, "code": 25, "books": 0}, "temperature": 2},
        {"web": 74, "code": 37, "books": 0},
    ),
    "temperature 1/2": (
        100,
        {"weights": {"web": 3, "code": 1, "books": 0}, "temperature": 0.5},
        {"web": 90, "code": 10, "books": 0},
    ),
    "weight 0 and infinite temperature": (
        100,
        {"weights": {"web": 0, "code": 5, "books": 1}, "temperature": float("inf"), "max_epochs": 8},
        {"web": 0, "code": 50, "books": 50},
    ),
    "all that there is": (4440, {}, {"web": 4000, "code": 400, "books": 40}),
    "one epoch": (
        500,
        {"weights": {"books": 1, "code": 1, "web": 1}, "max_epochs": 1},
        {"web": 390, "code": 100, "books": 10},
    ),
    "nothing": (0, {}, {"web": 0, "code": 0, "books": 0}),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_plan_mixture_by_hand(name):
    budget, settings, expected = MIXTURES[name]
    case(f"{name}: {budget} tokens of {SIZES}, {settings}")
    found = data.plan_mixture(SIZES, budget, **settings)
    expect_equal(list(found), list(SIZES), name="names in order", read=RETURNS)
    plan, wanted = (torch.tensor([float(tokens[name]) for name in SIZES]).double() for tokens in (found, expected))
    shown = dict(zip(SIZES, [round(tokens, 3) for tokens in plan.tolist()], strict=True))
    is_right = torch.allclose(plan, wanted, rtol=1e-6, atol=1e-9)
    expect_true(is_right, f"the plan is {shown}, expected {expected}", answer=plan, read=MIXTURE)


def test_plan_mixture_of_extreme_temperatures():
    case("sizes 10**12 and 10, temperature 0.01: no power overflows, and what the first cannot give the second must")
    found = data.plan_mixture({"a": 10**12, "b": 10}, 4 * 10**12 + 20, temperature=0.01)
    expect_close(float64(found["a"]), float64(4e12), name="a", read=MIXTURE)
    expect_close(float64(found["b"]), float64(20), name="b", read=MIXTURE)


def test_plan_mixture_refuses():
    case("a budget of 4,441 of 1,110 tokens; weights of other sources; a negative weight; temperature 0")
    with expect_raises(ValueError, "4441", read=RAISES):
        data.plan_mixture(SIZES, 4441)
    with expect_raises(ValueError, "441", read=RAISES):
        data.plan_mixture(SIZES, 441, {"web": 0, "code": 1, "books": 1})
    with expect_raises(ValueError, "1111", read=RAISES):
        data.plan_mixture(SIZES, 1111, max_epochs=1)
    with expect_raises(ValueError, "films", read=RAISES):
        data.plan_mixture(SIZES, 10, {"web": 1, "code": 1, "books": 1, "films": 1})
    with expect_raises(ValueError, "-0.5", read=RAISES):
        data.plan_mixture(SIZES, 10, {"web": 1, "code": -0.5, "books": 1})
    for temperature in (0, -1.0):
        with expect_raises(ValueError, "temperature", read=RAISES):
            data.plan_mixture(SIZES, 10, temperature=temperature)


# ---- pack_documents --------------------------------------------------------------------------------------------------


def test_pack_documents_by_hand():
    case("lengths 3, 12, 0, 5, 5, 2, rows of 10")
    expected = [[(1, 0, 10)], [(3, 0, 5), (4, 0, 5)], [(0, 0, 3), (1, 10, 12), (5, 0, 2)]]
    expect_equal(data.pack_documents([3, 12, 0, 5, 5, 2], 10), expected, read=RETURNS)
    case("lengths 6, 7, 3, 4, rows of 10: each finds the row that it fills")
    expected = [[(1, 0, 7), (2, 0, 3)], [(0, 0, 6), (3, 0, 4)]]
    expect_equal(data.pack_documents([6, 7, 3, 4], 10), expected, read=RETURNS)
    expect_equal(data.pack_documents([], 10), [], read=RETURNS)


@pytest.mark.parametrize("row_length", [1, 7, 50])
def test_pack_documents_by_search(row_length):
    case(f"120 documents of 0 to 59 tokens, rows of {row_length}: a search through all rows")
    rng = random.Random(row_length)
    lengths = [rng.randrange(60) for _ in range(120)]
    pieces = [(d, s, min(s + row_length, n)) for d, n in enumerate(lengths) for s in range(0, n, row_length)]
    rows: list[Any] = []
    rooms: list[Any] = []
    for piece in sorted(pieces, key=lambda p: (p[1] - p[2], p[0], p[1])):
        n = piece[2] - piece[1]
        fits = [(room, i) for i, room in enumerate(rooms) if room >= n]
        if not fits:
            rows.append([])
            rooms.append(row_length)
            fits = [(row_length, len(rows) - 1)]
        i = min(fits)[1]
        rows[i].append(piece)
        rooms[i] -= n
    expect_equal(data.pack_documents(lengths, row_length), rows, read=RETURNS)


@pytest.mark.time_limit(30)
def test_pack_documents_needs_no_search():
    case("60,000 documents of 1 to 2,500 tokens, rows of 2,048, in less than 30 s on a busy machine")
    rng = random.Random(0)
    lengths = [rng.randrange(1, 2500) for _ in range(60_000)]
    rows = data.pack_documents(lengths, 2048)
    placed = sum(end - start for row in rows for _, start, end in row)
    expect_equal(placed, sum(lengths), name="tokens in rows", read=COST)
    expect_true(max(sum(e - s for _, s, e in row) for row in rows) <= 2048, "a row is too full", read=RETURNS)


# ---- write_shards ----------------------------------------------------------------------------------------------------

DOCUMENTS = [[5, 6, 7], [], [8, 9, 10, 11, 12, 13, 14, 15], [16]]
ROW = [5, 6, 7, 0, 0, 8, 9, 10, 11, 12, 13, 14, 15, 0, 16, 0]


def write(folder: Path, row: list[int], shard_tokens: int, vocab_size: int = 100, documents: int = 1) -> dict:
    """Shards and a manifest, without the graded function."""
    dtype, shards = "uint16" if vocab_size <= 65536 else "uint32", []
    folder.mkdir(parents=True, exist_ok=True)
    for i, start in enumerate(range(0, len(row), shard_tokens)):
        part = np.array(row[start : start + shard_tokens], dtype=np.dtype(dtype).newbyteorder("<"))
        name = f"shard_{i:05d}.bin"
        (folder / name).write_bytes(part.tobytes())
        shards.append({"name": name, "tokens": len(part), "sha256": hashlib.sha256(part.tobytes()).hexdigest()})
    manifest = {"dtype": dtype, "vocab_size": vocab_size, "end_id": 0, "documents": documents, "tokens": len(row)}
    manifest["shards"] = shards
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


@pytest.mark.parametrize(("shard_tokens", "vocab_size"), [(5, 65_536), (16, 65_537), (1, 17), (100, 100)])
def test_write_shards_by_hand(shard_tokens, vocab_size, tmp_path):
    case(f"documents of 3, 0, 8 and 1 ids, shards of {shard_tokens}, a vocabulary of {vocab_size}")
    expected = write(tmp_path / "expected", ROW, shard_tokens, vocab_size, documents=4)
    found = data.write_shards(tmp_path / "new" / "corpus", DOCUMENTS, shard_tokens, vocab_size, 0)
    expect_equal(found, expected, name="manifest", read=RETURNS)
    folder = tmp_path / "new" / "corpus"
    expect_equal(json.loads((folder / "manifest.json").read_text()), expected, name="manifest.json", read=RETURNS)
    names = [shard["name"] for shard in expected["shards"]]
    expect_equal(sorted(p.name for p in folder.iterdir()), ["manifest.json", *names], name="files", read=RETURNS)
    for name in names:
        ours, theirs = ((f / name).read_bytes() for f in (folder, tmp_path / "expected"))
        expect_equal(ours, theirs, name=name, read=RETURNS)


def test_write_shards_takes_any_iterable_and_any_ids(tmp_path):
    case("a generator of a list, an array, a tensor and a tuple")
    kinds = ([5, 6, 7], np.array([], dtype=np.uint16), torch.arange(8, 16), (16,))
    found = data.write_shards(str(tmp_path), (document for document in kinds), 5, 100, 0)
    expect_equal(found, write(tmp_path / "expected", ROW, 5, 100, documents=4), name="manifest", read=ARGS)
    case("no documents")
    found = data.write_shards(tmp_path / "none", [], 5, 100, 0)
    expect_equal((found["tokens"], found["shards"]), (0, []), name="tokens and shards", read=RETURNS)


@pytest.mark.parametrize(("document", "end_id", "shown"), [([1, 100], 0, "100"), ([-1], 0, "-1"), ([1], 300, "300")])
def test_write_shards_refuses_an_unknown_id(document, end_id, shown, tmp_path):
    case(f"ids {document}, end {end_id}, a vocabulary of 100; the folder has an old manifest")
    (tmp_path / "manifest.json").write_text("{}")
    with expect_raises(ValueError, shown, read=RAISES):
        data.write_shards(tmp_path, [[1, 2], document], 5, 100, end_id)
    expect_true(not (tmp_path / "manifest.json").exists(), "the old manifest is still there", read=RETURNS)


WRITTEN: deque[str] = deque(maxlen=1000)
"""Files that were opened for writing, in this process."""


def note_writes(event: str, args: tuple) -> None:
    if event == "open" and set(args[1] or "") & set("wax+"):
        WRITTEN.append(str(args[0]))


sys.addaudithook(note_writes)


def test_write_shards_writes_the_manifest_last(tmp_path):
    case("an old manifest; while documents are read there is none")
    (tmp_path / "manifest.json").write_text("{}")
    WRITTEN.clear()
    seen = []

    def documents():
        for document in DOCUMENTS:
            seen.append((tmp_path / "manifest.json").exists())
            yield document

    data.write_shards(tmp_path, documents(), 5, 100, 0)
    expect_equal(seen, [False] * 4, name="manifest.json exists", read=RETURNS)
    is_direct = str(tmp_path / "manifest.json") in WRITTEN
    expect_true(not is_direct, "manifest.json is written under its own name: a reader may see half of it", read=RETURNS)


@pytest.mark.parametrize("kind", ["many documents", "one long document"])
def test_write_shards_holds_one_shard(kind, tmp_path):
    case(f"{kind}: 1,000,000 ids in shards of 20,000, whose bytes are 40 kB")
    row = np.lib.stride_tricks.as_strided(np.array([7], np.uint16), (1_000_000,), (0,))
    documents = (row[i : i + 100] for i in range(0, 1_000_000, 100)) if kind == "many documents" else [row]
    _, peak = with_peak(lambda: data.write_shards(tmp_path, documents, 20_000, 100, 0))
    expect_true(peak < 1e6, f"{peak / 1e6:.1f} MB at once: a shard and a piece in int64 need 0.3 MB", read=COST)


# ---- shuffled_index --------------------------------------------------------------------------------------------------


def expected_index(i: int, n: int, seed: int, epoch: int) -> int:
    k = 1
    while 4**k < n:
        k += 1
    while True:
        left, right = divmod(i, 2**k)
        for r in range(4):
            left, right = right, left ^ (number(f"{seed},{epoch},{r},{right}") % 2**k)
        i = left * 2**k + right
        if i < n:
            return i


@pytest.mark.parametrize("n", [1, 2, 4, 5, 16, 17, 64, 100])
def test_shuffled_index_by_the_formula(n):
    case(f"all places of {n}, seeds 0 and 12, epochs 0 and 3")
    for seed, epoch in ((0, 0), (12, 3)):
        expected = [expected_index(i, n, seed, epoch) for i in range(n)]
        found = [data.shuffled_index(i, n, seed, epoch) for i in range(n)]
        expect_equal(found, expected, name=f"seed {seed}, epoch {epoch}", read=FEISTEL)
    expect_equal(sorted(found), list(range(n)), name="sorted", read=RETURNS)
    expect_equal(data.shuffled_index(n - 1, n, 5), expected_index(n - 1, n, 5, 0), name="no epoch", read=ARGS)


def test_shuffled_index_needs_no_table():
    case("place 123,456,789 of 10**15")
    found, peak = with_peak(lambda: data.shuffled_index(123_456_789, 10**15, 1))
    expect_equal(found, expected_index(123_456_789, 10**15, 1, 0), read=FEISTEL)
    expect_true(peak < 1e6, f"{peak / 1e6:.1f} MB", read=COST)


@pytest.mark.parametrize(("i", "n"), [(-1, 10), (10, 10), (0, 0)])
def test_shuffled_index_refuses_other_places(i, n):
    case(f"place {i} of {n}")
    with expect_raises(ValueError, str(i), read=RAISES):
        data.shuffled_index(i, n, 0)


# ---- ShardReader -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """A row of 101 tokens in shards of 7."""
    write(tmp_path / "row", list(range(300, 401)), 7, 1000)
    return tmp_path / "row"


def batches(reader, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [next(reader) for _ in range(n)]


@pytest.mark.parametrize(("batch", "length", "rank", "world_size"), [(2, 10, 0, 1), (1, 3, 1, 2), (3, 7, 0, 2)])
def test_ShardReader_is_chapter_7_across_shards(batch, length, rank, world_size, folder):
    case(f"101 tokens in shards of 7; windows of {length}, batches of {batch}, rank {rank} of {world_size}")
    reader = data.ShardReader(folder, batch, length, rank, world_size)
    row = TokenBatches(torch.arange(300, 401), batch, length, rank, world_size)
    expect_equal(reader.n_windows, row.n_windows, name="n_windows", read=ARGS)
    for step in range(12):
        expect_equal(reader.epoch, row.epoch, name=f"epoch before step {step}", read=ARGS)
        for name, ours, theirs in zip(("inputs", "targets"), next(reader), next(row), strict=True):
            expect_close(ours, theirs, atol=0, rtol=0, name=f"{name} of step {step}", read=ARGS)


def test_ShardReader_walks_in_a_shuffled_order(folder):
    case("seeds 5 and 0, 33 windows of 3, batches of 4 on 2 ranks, three epochs")
    readers = [(seed, rank, data.ShardReader(folder, 4, 3, rank, 2, seed=seed)) for seed in (5, 0) for rank in (0, 1)]
    for step in range(12):
        for seed, rank, reader in readers:
            inputs, targets = next(reader)
            for b in range(4):
                epoch, place = divmod(step * 8 + rank * 4 + b, 33)
                start = 300 + 3 * expected_index(place, 33, seed, epoch)
                expect_equal(inputs[b].tolist(), [start, start + 1, start + 2], name="inputs", read=ARGS)
                expect_equal(targets[b].tolist(), [start + 1, start + 2, start + 3], name="targets", read=ARGS)


def test_ShardReader_reads_four_bytes(tmp_path):
    case("a vocabulary of 70,000, ids up to 69,999, one shard")
    row = list(range(69_980, 70_000))
    write(tmp_path, row, 100, 70_000)
    inputs, targets = next(iter(data.ShardReader(tmp_path, 2, 9)))
    expect_close(inputs, torch.tensor([row[:9], row[9:18]]), atol=0, rtol=0, name="inputs", read=ARGS)
    expect_close(targets, torch.tensor([row[1:10], row[10:19]]), atol=0, rtol=0, name="targets", read=ARGS)
    expect_true(inputs.is_contiguous() and targets.is_contiguous(), "inputs and targets are contiguous", read=RETURNS)


@pytest.mark.parametrize("seed", [None, 3])
def test_ShardReader_goes_on_with_other_batches_and_ranks(seed, folder):
    case(f"seed {seed}: 3 steps of 4 windows, then 2 ranks of 1 window")
    whole = torch.cat([inputs for inputs, _ in batches(data.ShardReader(folder, 1, 4, seed=seed), 40)])
    first = data.ShardReader(folder, 4, 4, seed=seed)
    batches(first, 3)
    state = json.loads(json.dumps(first.state_dict()))
    readers = [data.ShardReader(folder, 1, 4, rank, 2, seed) for rank in (0, 1)]
    for reader in readers:
        reader.load_state_dict(state)
    rest = torch.cat([next(reader)[0] for _ in range(14) for reader in readers])
    expect_close(rest, whole[12:], atol=0, rtol=0, name="windows after the break", read=RETURNS)
    expect_equal(readers[0].state_dict(), readers[1].state_dict(), name="state of rank 0 and of rank 1", read=RETURNS)


def test_ShardReader_refuses_a_foreign_state(folder, tmp_path):
    case("a state of another length, seed, manifest")
    state = data.ShardReader(folder, 1, 4, seed=3).state_dict()
    write(tmp_path / "other", [*range(300, 400), 7], 7, 1000)
    for reader, name in (
        (data.ShardReader(folder, 1, 5, seed=3), "length"),
        (data.ShardReader(folder, 1, 4, seed=4), "seed"),
        (data.ShardReader(tmp_path / "other", 1, 4, seed=3), "manifest"),
    ):
        with expect_raises(ValueError, name, read=RAISES):
            reader.load_state_dict(state)


def test_ShardReader_checks_what_it_is_given(folder):
    case("ranks 2 of 2 and -1; 102 tokens needed of 101; a shard cut, a shard missing, no manifest")
    for rank in (2, -1):
        with expect_raises(ValueError, "rank", str(rank), read=RAISES):
            data.ShardReader(folder, 1, 4, rank, 2)
    with expect_raises(ValueError, "101", read=RAISES):
        data.ShardReader(folder, 1, 101)
    with expect_raises(ValueError, "101", read=RAISES):
        data.ShardReader(folder, 3, 17, 0, 2)
    next(data.ShardReader(folder, 2, 25, 0, 2))
    (folder / "shard_00003.bin").write_bytes(b"12")
    with expect_raises(ValueError, "shard_00003.bin", read=RAISES):
        data.ShardReader(folder, 1, 4)
    (folder / "shard_00003.bin").unlink()
    with expect_raises(ValueError, "shard_00003.bin", read=RAISES):
        data.ShardReader(folder, 1, 4)
    (folder / "manifest.json").unlink()
    with expect_raises(FileNotFoundError, "manifest.json", read=RAISES):
        data.ShardReader(folder, 1, 4)


def test_ShardReader_maps_and_does_not_load(tmp_path):
    case("4,000,000 tokens in two shards: 8 MB, of which a batch needs 128 bytes")
    row = np.zeros(2_000_000, np.uint16)
    shards = []
    for name in ("shard_00000.bin", "shard_00001.bin"):
        row.tofile(tmp_path / name)
        shards.append({"name": name, "tokens": len(row), "sha256": ""})
    manifest = {"dtype": "uint16", "vocab_size": 9, "end_id": 0, "documents": 1, "tokens": 4_000_000, "shards": shards}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    _, peak = with_peak(lambda: batches(data.ShardReader(tmp_path, 4, 8, seed=0), 5))
    expect_true(peak < 1e6, f"{peak / 1e6:.1f} MB in memory", read=COST)
