"""Requests on one model: who waits, who computes and who loses its blocks, step by step, and how full the pool is."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from lib.given.models.serving import Request
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, boxes, label, line, number, rect, tag
from lib.given.show.plots import COLOURS
from lib.given.show.tokens import Html

N_REQUESTS, BLOCK_SIZE = 10, 4
LEFT, TOP, ROW = 22, 24, 15
STRIP, TALL = TOP + ROW * N_REQUESTS + 32, 40
WAYS = ("static", "continuous")
ALT = (
    "A row for each of ten requests, a column for each step: prompts, single tokens, "
    "and steps in which a request waits. "
    "Below, on the same steps, the blocks of the pool that are in use."
)


class Step(NamedTuple):
    """A step: the tokens of each request that takes part, which of them are computed again,
    and the blocks in use after it.
    """

    tokens: dict[int, int]
    again: set[int]
    n_blocks: int


def batching(
    make_scheduler: Callable[[int, int, int], Any],
    max_tokens: Sequence[int] = (8, 16, 32),
    n_blocks: Sequence[int] = (16, 24, 40),
) -> Html:
    """Ten requests with prompts of 4 to 16 tokens that ask for 2 to 20 new ones, in blocks of 4 positions.

    Args:
        make_scheduler: Chapter 21's ``Scheduler``.
        max_tokens: Tokens that a step passes at most.
        n_blocks: Blocks of the pool.
    """
    return figure(make_scheduler, max_tokens, n_blocks)()


def requests() -> list[Request]:
    """The ten requests, the same each time."""
    rng = random.Random(6)
    return [Request([0] * rng.randint(4, 16), rng.randint(2, 20)) for _ in range(N_REQUESTS)]


def steps_of(make_scheduler: Callable[[int, int, int], Any], way: str, max_tokens: int, n_blocks: int) -> list[Step]:
    """What happens.

    A static batch takes as many requests as fit with all their tokens, and no other until all have ended.
    """
    scheduler, asked, found = make_scheduler(max_tokens, n_blocks, BLOCK_SIZE), requests(), []
    queue, computed = list(asked), dict[Any, int]()
    while queue or scheduler.waiting or scheduler.running:
        free = n_blocks
        while queue and (way == "continuous" or not (scheduler.waiting or scheduler.running) or free < n_blocks):
            free -= scheduler.blocks_for(len(queue[0].tokens) + queue[0].max_new_tokens)
            if way == "static" and free < 0:
                break
            scheduler.submit(queue.pop(0))
        chunks = scheduler.schedule()
        tokens = {asked.index(chunk.progress.request): chunk.n_tokens for chunk in chunks}
        again = {asked.index(p.request) for p, _ in chunks if p.n_cached < computed.get(p, 0)}
        computed |= {p: max(p.n_cached + n, computed.get(p, 0)) for p, n in chunks}
        found.append(Step(tokens, again, n_blocks - scheduler.n_free))
        for chunk in chunks:
            scheduler.advance(chunk, 0 if chunk.completes else None)
    return found


def figure(
    make_scheduler: Callable[[int, int, int], Any], max_tokens: Sequence[int], n_blocks: Sequence[int]
) -> Figure:
    @cache
    def steps(way: str, limit: int, pool: int) -> list[Step]:
        return steps_of(make_scheduler, way, limit, pool)

    longest = max(len(steps(way, limit, pool)) for way in WAYS for limit in max_tokens for pool in n_blocks)
    unit = (WIDTH - LEFT - 4) / longest  # one scale for all, to compare them

    def draw(way: str, limit: int, pool: int) -> str:
        return _rows(steps(way, limit, pool), unit) + _pool(steps(way, limit, pool), unit, pool)

    def say(way: str, limit: int, pool: int) -> str:
        done = steps(way, limit, pool)
        computed, needed = (
            sum(sum(s.tokens.values()) for s in done),
            sum(len(r.tokens) + r.max_new_tokens - 1 for r in requests()),
        )
        used = sum(s.n_blocks for s in done) / len(done) / pool
        lost = (
            f"{computed - needed} tokens are computed again after a preemption"
            if computed > needed
            else "nothing is computed twice"
        )
        return (
            f"{way.capitalize()} batches of at most {limit} tokens with {pool} blocks: {len(done)} steps of "
            f"{computed / len(done):.1f} tokens on average, {used:.0%} of the pool in use; {lost}."
        )

    way_ = Control(name="way", label="batches", values=WAYS, kind="choice", start=1, still=1)
    limit_ = Control(name="limit", label="tokens in a step", values=max_tokens, start=1, still=1)
    pool_ = Control(name="pool", label="blocks in the pool", values=n_blocks, start=1, still=1)
    return Figure(
        name="batching",
        alt=ALT,
        height=STRIP + TALL + 6,
        controls=[way_, limit_, pool_],
        layers=[layer(_legend), layer(draw, way_, limit_, pool_)],
        sentences=[layer(say, way_, limit_, pool_)],
    )


def _legend() -> str:
    drawn = []
    for x, text, colour in ((LEFT, "prompt", BLUE), (96, "one token", GREEN), (186, "computed again", ORANGE)):
        drawn += [rect(x, 3, 12, 12, fill=colour), label(x + 17, 13, text)]
    for i in range(N_REQUESTS):
        drawn.append(label(LEFT - 6, TOP + ROW * i + 11, str(i), kind="end small"))
    drawn += [line((LEFT, y), (WIDTH, y), kind="grid") for y in (TOP + ROW * N_REQUESTS + 2, STRIP + TALL)]
    drawn.append(label(WIDTH, TOP + ROW * N_REQUESTS + 14, "steps", kind="end small"))
    return "".join(drawn)


def _rows(done: Sequence[Step], unit: float) -> str:
    """A box for each request and step, one path for those that look alike."""
    corners: dict[str, list[tuple[float, float]]] = {BLUE: [], GREEN: [], ORANGE: []}
    for i, step in enumerate(done):
        for request, n in step.tokens.items():
            colour = ORANGE if request in step.again else GREEN if n == 1 else BLUE
            corners[colour].append((LEFT + i * unit, TOP + ROW * request))
    return "".join(
        tag("path", d=boxes(at, max(unit - 0.6, 0.6), ROW - 3), fill=colour) for colour, at in corners.items() if at
    )


def _pool(done: Sequence[Step], unit: float, n_blocks: int) -> str:
    """A staircase of the blocks in use."""
    bottom = STRIP + TALL
    stairs = "".join(
        f"V{number(bottom - TALL * step.n_blocks / n_blocks)}H{number(LEFT + (i + 1) * unit)}"
        for i, step in enumerate(done)
    )
    area = tag("path", d=f"M{LEFT} {bottom}{stairs}V{bottom}z", fill=COLOURS[3], fill_opacity="0.55")
    return area + label(LEFT, STRIP - 6, f"blocks in use, of {n_blocks}")
