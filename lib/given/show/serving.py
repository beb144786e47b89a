"""Pictures of chapter 21: block tables with copy on write, a tree of prefixes, and drafted tokens."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib.given.show.parallel import arrow, box, cells
from lib.given.show.plots import COLOURS, GREY


def draw_block_tables() -> Figure:
    """Two sequences that share their blocks after a fork, and the copy made by the first write into the last block."""
    fig, axes = plt.subplots(2, 1, figsize=(6.6, 4.4))
    words: dict[int, tuple[str, ...]] = {0: ("the", "cat", "sat", "on"), 3: ("a", "mat", "", "")}
    shared = {"a, 6 tokens": (0, 3), "b, 6 tokens": (0, 3)}
    _tables(axes[0], "after fork(a): b has a table of its own, and no block", shared, words)
    words[1] = ("a", "mat", "up", "")
    own = {"a, 6 tokens": (0, 3), "b, 7 tokens": (0, 1)}
    _tables(axes[1], "b appends a token: the shared last block is copied, then written", own, words)
    return fig


def _tables(ax: Axes, title: str, tables: dict[str, tuple[int, int]], words: dict[int, tuple[str, ...]]) -> None:
    """Two tables above the pool of four blocks, with an arrow from each entry to its block. What b wrote is orange."""
    for block in range(4):
        inside, users = words.get(block, ("",) * 4), sum(block in table for table in tables.values())
        colours = ["none" if not word else COLOURS[1] if word == "up" else COLOURS[0] for word in inside]
        cells(ax, 3.6 * block, 0.0, colours, inside, 0.8)
        label = f"{users} user{'s' * (users > 1)}" if users else "free"
        ax.text(3.6 * block + 1.6, -0.4, f"block {block}: {label}", ha="center", va="center", fontsize=9)
    for (name, table), left, aside in zip(tables.items(), (2.2, 9.0), (-0.3, 0.3), strict=True):
        cells(ax, left, 2.4, ["none"] * len(table), [str(block) for block in table], 0.8)
        ax.text(left - 0.2, 2.8, name, ha="right", va="center")
        for place, block in enumerate(table):
            arrow(ax, (left + 0.4 + 0.8 * place, 2.35), (3.6 * block + 1.6 + aside, 0.9))
    ax.set_title(title)
    ax.set(xlim=(-1.2, 14.4), ylim=(-0.7, 3.4))
    ax.axis("off")


def draw_prefix_tree() -> Figure:
    """A tree whose nodes are blocks, with the path of a new prompt: two blocks are found, the rest is computed."""
    fig, ax = plt.subplots(figsize=(6.6, 3.2))
    nodes = {
        "root": (0.0, 1.5, "root"),
        "system": (2.6, 1.5, "You are a"),
        "helpful": (5.4, 2.5, "kind helper."),
        "pirate": (5.4, 0.5, "gruff pirate."),
        "hello": (8.4, 3.1, "Hello! How"),
        "why": (8.4, 1.9, "Why is the"),
    }
    edges = [("root", "system"), ("system", "helpful"), ("system", "pirate"), ("helpful", "hello"), ("helpful", "why")]
    path = {"root", "system", "helpful"}
    for start, end in edges:
        (x, y, _), (to_x, to_y, _) = nodes[start], nodes[end]
        arrow(ax, (x + (0.5 if start == "root" else 1.1), y), (to_x - 1.12, to_y), COLOURS[2] if end in path else GREY)
    for name, (x, y, words) in nodes.items():
        size = (1.0, 0.6) if name == "root" else (2.2, 0.6)
        box(ax, x, y, words, COLOURS[2] if name in path else GREY, size)
    ax.text(0.0, 0.62, "n_users = 1 along\nthe acquired path", ha="center", va="center", fontsize=9, color=COLOURS[2])
    box(ax, 2.6, -0.7, "You are a", COLOURS[2], (2.2, 0.6))
    box(ax, 5.0, -0.7, "kind helper.", COLOURS[2], (2.2, 0.6))
    box(ax, 7.4, -0.7, "What is 2 + 2?", COLOURS[1], (2.2, 0.6))
    ax.text(1.3, -0.7, "new prompt", ha="right", va="center")
    ax.text(3.8, -1.3, "found in the tree", ha="center", va="center", color=COLOURS[2])
    ax.text(7.4, -1.3, "computed", ha="center", va="center", color=COLOURS[1])
    ax.set(xlim=(-1.2, 9.7), ylim=(-1.6, 3.6))
    ax.axis("off")
    return fig


def draw_drafts(
    drafted: Sequence[str] = ("the", "old", "man", "ran", "off"), kept: int = 3, instead: str = "sat"
) -> Figure:
    """A speculative step: drafted tokens, the target's check of all of them at once, and what the step returns."""
    fig, ax = plt.subplots(figsize=(6.6, 2.6))
    for row, (name, y) in enumerate((("draft writes", 2.4), ("target reads", 1.3), ("the step returns", 0.0))):
        ax.text(-0.9, y, name, ha="right", va="center", color=(COLOURS[0], COLOURS[2], GREY)[row])
    for i, word in enumerate(drafted):
        x = 1.5 * i
        box(ax, x, 2.4, word, COLOURS[0], (1.2, 0.6))
        if i:
            arrow(ax, (x - 0.88, 2.4), (x - 0.62, 2.4), COLOURS[0])
        mark, colour = ("keep", COLOURS[2]) if i < kept else ("reject", COLOURS[1]) if i == kept else ("drop", GREY)
        arrow(ax, (x, 2.05), (x, 1.6), colour)
        ax.text(x, 1.3, mark, ha="center", va="center", color=colour)
        if i < kept:
            arrow(ax, (x, 1.05), (x, 0.35), COLOURS[2])
            box(ax, x, 0.0, word, COLOURS[2], (1.2, 0.6))
    x = 1.5 * kept
    arrow(ax, (x, 1.05), (x, 0.35), COLOURS[1])
    box(ax, x, 0.0, instead, COLOURS[1], (1.2, 0.6))
    ax.text(
        x + 0.75, 0.0, "drawn from the rest of\nthe target's distribution", va="center", fontsize=9, color=COLOURS[1]
    )
    ax.set(xlim=(-3.0, 1.5 * len(drafted) + 0.6), ylim=(-0.5, 2.9))
    ax.axis("off")
    return fig
