"""Attention position by position: which keys each variant sees, and what its cache holds meanwhile."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from lib.given.show.play.player import Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, boxes, label, rect, tag
from lib.given.show.tokens import Html

LENGTH, WINDOW, CELL = 12, 4, 15
LEFT, TOP = 28, 34
CACHE, SLOT = 236, 22
KINDS = {
    "full attention": ("full_attention", BLUE),
    "window of 4": ("sliding_attention", ORANGE),
    "latent attention": ("latent_attention", GREEN),
}
SIZES = {"n_kv_heads": 8, "head_dim": 128, "sliding_window": WINDOW, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
ALT = (
    "A triangle of queries by keys, in which the keys that the newest query sees are bright. "
    "Beside it, the slots of the cache with the position that each of them holds."
)
Mask = Callable[[int, int, int | None], Iterable[Any]]
Bytes = Callable[..., int]


def windows(sliding_window_mask: Mask, cache_bytes: Bytes) -> Html:
    """Full, windowed and latent attention over twelve positions.

    Args:
        sliding_window_mask: Chapter 23's function, which says which keys are seen.
        cache_bytes: Chapter 23's function, which says what a layer holds.
    """
    return figure(sliding_window_mask, cache_bytes)()


def figure(sliding_window_mask: Mask, cache_bytes: Bytes) -> Figure:
    def seen(kind: str) -> list[list[bool]]:
        window = WINDOW if KINDS[kind][0] == "sliding_attention" else None
        return [[bool(x) for x in row] for row in sliding_window_mask(LENGTH, LENGTH, window)]

    def triangle(kind: str) -> str:
        pairs = [(q, k) for q, row in enumerate(seen(kind)) for k, sees in enumerate(row) if sees]
        return _cells(pairs, KINDS[kind][1], "0.25")

    def now(kind: str, n: int) -> str:
        if not n:
            return label(CACHE, TOP + 15, "empty", kind="small")
        keys = [k for k, sees in enumerate(seen(kind)[n - 1]) if sees]
        return _cells([(n - 1, k) for k in keys], KINDS[kind][1], "0.95") + _cache(kind, n)

    def say(kind: str, n: int) -> str:
        if not n:
            return "Nothing has been read yet, and the cache is empty."
        held = cache_bytes(SimpleNamespace(layer_types=[KINDS[kind][0]], **SIZES), 1, n)
        keys = sum(seen(kind)[n - 1])
        text = f"Position {n - 1} sees {keys} key{'s' if keys > 1 else ''}. A layer's cache holds {held:,} bytes"
        return f"{text}, in bfloat16: {_sizes(kind)}."

    kind_ = Control(name="kind", label="attention", values=list(KINDS), start=1, still=1, kind="choice")
    step_ = Control(name="step", label="positions read", values=range(LENGTH + 1), start=0, still=7, kind="steps")
    return Figure(
        name="windows",
        alt=ALT,
        height=TOP + LENGTH * CELL + 22,
        controls=[kind_, step_],
        layers=[layer(_frame), layer(triangle, kind_), layer(now, kind_, step_)],
        sentences=[layer(say, kind_, step_)],
    )


def _sizes(kind: str) -> str:
    if KINDS[kind][0] == "latent_attention":
        return "one latent of 512 numbers and one rotated key of 64 for each position, for all heads together"
    return "a key and a value of 128 numbers for each position and each of 8 key heads"


def _frame() -> str:
    """The grid of queries and keys, and the words around it."""
    side = LENGTH * CELL
    across = "".join(f"M0 {i * CELL}h{side}M{i * CELL} 0v{side}" for i in range(LENGTH + 1))
    drawn = [tag("path", d=across, kind="grid", transform=f"translate({LEFT} {TOP})")]
    drawn += [label(LEFT, 12, "keys"), label(4, TOP + side + 16, "queries, downwards"), label(CACHE, 12, "cache")]
    for i in range(LENGTH):
        middle = (i + 0.5) * CELL
        drawn.append(label(LEFT + middle, TOP - 6, str(i), kind="middle small"))
        drawn.append(label(LEFT - 6, TOP + middle + 4, str(i), kind="end small"))
    return "".join(drawn)


def _cells(pairs: Sequence[tuple[int, int]], colour: str, opacity: str) -> str:
    corners = [(LEFT + k * CELL, TOP + q * CELL) for q, k in pairs]
    return tag("path", d=boxes(corners, CELL, CELL), fill=colour, fill_opacity=opacity)


def _cache(kind: str, n: int) -> str:
    """The slots that are filled after ``n`` positions, with the position in each; a latent's slot is narrower."""
    name, colour = KINDS[kind]
    if name == "sliding_attention":
        held = [max(p for p in range(n) if p % WINDOW == slot) for slot in range(min(n, WINDOW))]
    else:
        held = list(range(n))
    width = SLOT * (0.55 if name == "latent_attention" else 1.0)
    drawn = []
    for slot, position in enumerate(held):
        x, y = CACHE + slot % 4 * (SLOT + 6), TOP + slot // 4 * (SLOT + 6)
        fresh = position == n - 1
        drawn.append(rect(x, y, width, SLOT, fill=colour, fill_opacity="0.9" if fresh else "0.3"))
        drawn.append(label(x + width / 2, y + 15, str(position), kind="middle small"))
    return "".join(drawn)
