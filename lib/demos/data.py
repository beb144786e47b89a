"""Chapter 26 on real text with known dirt: what each step finds, the curve of near-duplicates, and filled rows."""

import html
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import matplotlib.pyplot as plt
import numpy as np

from lib.data import (
    QualityClassifier,
    c4_clean,
    contaminated_spans,
    deduplicate_lines,
    extract_text,
    gopher_quality,
    mask_pii,
    minhash_signature,
    near_duplicates,
    pack_documents,
)
from lib.given.data.corpora import language_reference, standard_library_docstrings
from lib.given.data.record import load
from lib.given.models.laws import Chinchilla
from lib.given.show.plots import COLOURS, GREY
from lib.scaling_laws import fit_parametric

MENU = "Previous topic Next topic This page Show source"
SENTENCES = [
    "A train leaves the station at nine and needs three hours to cover the two hundred miles to the coast.",
    "Every morning the baker makes forty loaves, sells thirty of them, and gives the others to his neighbours.",
    "If four painters need six days for the walls of a school, how many days would eight painters need for them?",
    "Anna has twice as many marbles as Ben, and together they have as many as their cousin won last summer.",
    "The river falls by two feet in a week of sun and rises by five feet in a single night of heavy rain.",
]
"""Five questions that an evaluation might ask; no text that the machine carries holds them."""
KEYWORDS = ("cheap", "casino", "winner", "bonus", "click", "free", "pills", "credit", "#deal", "loans", "offer", "!!!")
PHRASES = (
    "You are the lucky winner of the bonus.",
    "Click here and get the best credit that money can buy.",
    "Our pills are cheap and you will have them with a free offer.",
    "To be rich, be with us.",
)


@dataclass
class Dirty:
    """Texts with dirt, and where it is.

    Attributes:
        texts: The documents as they should be extracted, dirt included.
        pages: The same as HTML, with navigation.
        navigation: Lines of ``pages`` that are navigation.
        copies: Index of each near copy, and the share of its words that were changed.
        spam: Indices of spam.
        personal: The addresses and numbers that were put into texts.
        leaks: Indices of documents with a sentence of the evaluation.
    """

    texts: list[str]
    pages: list[str] = field(default_factory=list)
    navigation: list[list[str]] = field(default_factory=list)
    copies: dict[int, float] = field(default_factory=dict)
    spam: set[int] = field(default_factory=set)
    personal: list[str] = field(default_factory=list)
    leaks: set[int] = field(default_factory=set)


@cache
def documents(n: int = 160) -> list[str]:
    """Paragraphs of the language reference and docstrings of the standard library, 60 to 400 words each."""
    found = []
    for text in (language_reference(), standard_library_docstrings()):
        blocks = iter(block for block in text.split("\n\n") if len(block.split()) > 3)
        parts: list[str] = []
        for block in blocks:
            parts.append(block)
            if len(" ".join(parts).split()) >= 60:
                found.append("\n".join(" ".join(line.split()) for line in "\n".join(parts).split("\n")))
                parts = []
    random.Random(0).shuffle(found)
    return [text for text in found if len(text.split()) <= 400][:n]


def _changed(text: str, share: float, rng: random.Random) -> str:
    words = text.split(" ")
    for i in rng.sample(range(len(words)), max(1, round(share * len(words)))):
        words[i] = f"changed{rng.randrange(10**6)}"
    return " ".join(words)


def _spam(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return " ".join(rng.choices(KEYWORDS, k=120))
    return "\n".join(rng.choices(PHRASES, k=14))


def _personal(rng: random.Random) -> str:
    digits = [rng.randrange(10) for _ in range(10)]
    kinds = (
        f"user{digits[0]}{digits[1]}.name@mail{digits[2]}.example.org",
        f"{rng.randrange(1, 255)}.{rng.randrange(255)}.{rng.randrange(255)}.{rng.randrange(1, 255)}",
        "({}{}{}) {}{}{}-{}{}{}{}".format(*digits),
    )
    return rng.choice(kinds)


@cache
def dirty(seed: int = 0, n: int = 160) -> Dirty:
    """Documents with known dirt: copies, spam, personal data, leaks, a menu in each, and navigation around each."""
    rng = random.Random(seed)
    found = Dirty(list(documents(n)))
    for share in [0.02, 0.05, 0.1, 0.2] * 6:
        found.copies[len(found.texts)] = share
        found.texts.append(_changed(found.texts[rng.randrange(n)], share, rng))
    for _ in range(20):
        found.spam.add(len(found.texts))
        found.texts.append(_spam(rng))
    for i in rng.sample(range(n), 30):
        found.personal.append(_personal(rng))
        found.texts[i] += f"\nContact: {found.personal[-1]}, any day."
    for i, sentence in zip(rng.sample(range(n), len(SENTENCES)), SENTENCES, strict=True):
        found.leaks.add(i)
        found.texts[i] += f"\n{sentence}"
    found.texts = [f"{text}\n{MENU}" for text in found.texts]
    for i, text in enumerate(found.texts):
        links = [f"Topic {rng.randrange(99)}" for _ in range(4)]
        found.navigation.append([f"Site map, page {i}", " | ".join(links), f"Copyright, page {i}"])
        found.pages.append(_page(text, i, links))
    return found


def _page(text: str, i: int, links: Sequence[str]) -> str:
    body = "\n".join(f"<p>{html.escape(line)}" for line in text.split("\n"))
    menu = " | ".join(f'<a href="{n}.html">{link}</a>' for n, link in enumerate(links))
    head = f"<html><head><title>Page {i}</title><script>if (a < b) track({i});</script>\n<body>"
    head += f"<nav>Site map, page {i}</nav>"
    return f"{head}\n<div>{menu}</div>\n{body}\n<footer>Copyright, page {i}</footer>"


@dataclass
class Found:
    """What a step found of one kind of dirt."""

    step: str
    dirt: str
    n_dirt: int
    n_found: int
    n_right: int

    @property
    def precision(self) -> float:
        return self.n_right / max(1, self.n_found)

    @property
    def recall(self) -> float:
        return self.n_right / max(1, self.n_dirt)


def _sets(step: str, dirt: str, truth: Iterable, found: Iterable) -> Found:
    true, hits = set(truth), set(found)
    return Found(step, dirt, len(true), len(hits), len(true & hits))


def findings(seed: int = 0) -> list[Found]:
    """Every step on the dirty documents: how much of its dirt it finds, and how much else."""
    d = dirty(seed)
    rows = [_navigation(d), _menus(d)]
    for threshold in (0.8, 0.4):
        copies = [i for cluster in near_duplicates(d.texts, threshold, n_bands=32) for i in cluster[1:]]
        rows.append(_sets(f"near_duplicates, {threshold}", "near copies", d.copies, copies))
    masked = [mask_pii(text) for text in d.texts]
    kept = "\n".join(text for text, _ in masked)
    right = sum(item not in kept for item in d.personal)
    rows.append(Found("mask_pii", "personal data", len(d.personal), sum(sum(c.values()) for _, c in masked), right))
    gopher = [i for i, text in enumerate(d.texts) if gopher_quality(text, min_doc_words=20)]
    c4 = [i for i, text in enumerate(d.texts) if c4_clean(text)[1]]
    rows += [_sets("gopher_quality", "spam", d.spam, gopher), _sets("c4_clean", "spam", d.spam, c4), _learned(d)]
    leaks = [i for i, spans in enumerate(contaminated_spans(d.texts, SENTENCES)) if spans]
    return [*rows, _sets("contaminated_spans", "evaluation", d.leaks, leaks)]


def _navigation(d: Dirty) -> Found:
    truth, found = set(), set()
    for i, (page, text) in enumerate(zip(d.pages, d.texts, strict=True)):
        kept = set(extract_text(page).split("\n"))
        lines = [line for line in (" ".join(line.split()) for line in text.split("\n")) if line]
        truth |= {(i, line) for line in d.navigation[i]}
        found |= {(i, line) for line in [*lines, *d.navigation[i]] if line not in kept}
    return _sets("extract_text", "navigation", truth, found)


def _menus(d: Dirty) -> Found:
    truth = {(i, MENU) for i in range(len(d.texts))}
    found = set()
    for i, (before, after) in enumerate(zip(d.texts, deduplicate_lines(d.texts), strict=True)):
        kept = set(after.splitlines())
        found |= {(i, line) for line in before.splitlines() if line.strip() and line not in kept}
    return _sets("deduplicate_lines", "menus", truth, found)


def _learned(d: Dirty) -> Found:
    """A classifier that has seen every second document."""
    model = QualityClassifier(["page", "spam"], 2**12)
    labels = ["spam" if i in d.spam else "page" for i in range(len(d.texts))]
    model.fit(d.texts[::2], labels[::2], steps=60, lr=0.3)
    held = range(1, len(d.texts), 2)
    found = [i for i in held if model.predict(d.texts[i])[0] == "spam"]
    return _sets("QualityClassifier, held out", "spam", d.spam & set(held), found)


def pair(similarity: float, rng: random.Random, n_words: int = 60) -> tuple[str, str]:
    """Two texts of random words, together ``n_words``; the share that both have is their similarity by words."""
    words = [f"w{rng.randrange(10**9)}" for _ in range(n_words)]
    both = round(n_words * similarity)
    half = both + (n_words - both) // 2
    return " ".join(words[:half]), " ".join(words[:both] + words[half:])


def measured_curve(n_bands: int, n_hashes: int, similarities: Sequence[float], n_pairs: int = 60) -> list[float]:
    """The share of pairs of each similarity that agree in a whole band; their shingles are random words."""
    found, rng = [], random.Random(0)
    for similarity in similarities:
        hits = 0
        for _ in range(n_pairs):
            texts = pair(similarity, rng)
            a, b = (minhash_signature(text, n_hashes, 1).reshape(n_bands, -1) for text in texts)
            hits += bool((a == b).all(1).any())
        found.append(hits / n_pairs)
    return found


def found_pairs(
    near_duplicates: Callable, n_bands: int, n_hashes: int, threshold: float, highest: float, n_pairs: int = 400
) -> int:
    """How many pairs ``near_duplicates`` links, of similarities spread evenly from the threshold to the highest."""
    rng, found = random.Random(1), 0
    for i in range(n_pairs):
        similarity = threshold + (highest - threshold) * i / n_pairs
        texts = pair(similarity, rng, 100)
        found += bool(near_duplicates(texts, threshold, n_hashes, n_bands, 1))
    return found


def draw_curves(settings: Sequence[tuple[int, int]]) -> plt.Figure:
    """The promise of LSH as lines, and measured shares of pairs as dots."""
    fig, ax = plt.subplots(figsize=(6.2, 3.4))
    grid, points = [i / 200 for i in range(201)], [i / 10 for i in range(1, 11)]
    for (n_bands, n_hashes), colour, marker in zip(settings, COLOURS, "os^D", strict=False):
        rows = n_hashes // n_bands
        ax.plot(grid, [1 - (1 - s**rows) ** n_bands for s in grid], color=colour, label=f"{n_bands} bands of {rows}")
        ax.plot(points, measured_curve(n_bands, n_hashes, points), marker, color=colour)
    ax.axvline(0.8, color=GREY, linestyle=":")
    ax.set(xlabel="Jaccard similarity", ylabel="share of pairs that are compared")
    ax.legend(loc="upper left")
    return fig


def concatenated(lengths: Sequence[int], row_length: int) -> tuple[int, int]:
    """Rows, and documents that are cut although they would fit into one row, if all are written one after the other."""
    end = cut = 0
    for n in lengths:
        cut += 0 < n <= row_length and end // row_length != (end + n - 1) // row_length
        end += n
    return -(-end // row_length), cut


def first_fit(lengths: Sequence[int], row_length: int) -> int:
    """Rows, if each document goes to the first one that has room, in the order in which documents come."""
    rooms: list[int] = []
    for length in lengths:
        for start in range(0, length, row_length):
            n = min(row_length, length - start)
            row = next((i for i, room in enumerate(rooms) if room >= n), len(rooms))
            if row == len(rooms):
                rooms.append(row_length)
            rooms[row] -= n
    return len(rooms)


def fills(lengths: Sequence[int], row_length: int) -> dict[str, tuple[int, float, int]]:
    """For each way to fill rows: their number, the share that is filled, and the documents cut without need."""
    total, (n_rows, cut) = sum(lengths), concatenated(lengths, row_length)
    rows = {"one after the other": (n_rows, cut), "one a row": (sum(-(-n // row_length) for n in lengths), 0)}
    rows |= {
        "first-fit": (first_fit(lengths, row_length), 0),
        "best-fit decreasing": (len(pack_documents(lengths, row_length)), 0),
    }
    return {name: (n, total / (n * row_length), c) for name, (n, c) in rows.items()}


@cache
def sweep_law() -> Chinchilla:
    """Chapter 22's law in parameters and tokens, fitted to the runs of its recorded sweep."""
    points = load("scaling_laws")["results"]["sweep"]["points"]
    n, d, loss = (np.array([point[key] for point in points]) for key in ("n_weights", "tokens", "held_out_loss"))
    return fit_parametric(n, d, loss, n_starts=2)


def predicted_gain(law: Chinchilla, tokens: float, removed: float) -> float:
    """What a law says that a filter saves, in nats a token, for a fixed budget.

    Args:
        law: Only its b and beta count, because the model's size stays.
        tokens: The budget D.
        removed: Share of the tokens that taught nothing, and that the filter replaces by new text.
    """
    return float(law.b * ((tokens * (1 - removed)) ** -law.beta - tokens**-law.beta))
