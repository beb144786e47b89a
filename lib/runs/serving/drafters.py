"""Who drafts: the text itself, or a small model that follows the engine's requests with a cache of its own."""

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.fast.serving import Runner
from lib.given.models.serving import Chunk, Progress, Request
from lib.serving import PagedCache, paged_attention

SIZES = (3, 2)  # of the last few tokens, the longer first
SHORT = 16  # tokens of a text that a graph reads at a time; more pass as a prompt does


class Draft(NamedTuple):
    """Drafted tokens of one request.

    Attributes:
        tokens: K tokens.
        rows: ``[K, V']``, the distribution that each was drawn from; None if each was certain.
    """

    tokens: list[int]
    rows: Float[Tensor, "k v"] | None


class Drafter(Protocol):
    """Drafts tokens for the running requests of an engine."""

    def most(self, progress: Progress, n: int) -> int:
        """How many of n tokens it would draft for a request at most."""

    def draft(self, wanted: dict[Progress, int]) -> dict[Progress, Draft]:
        """Draft up to so many tokens for each of some requests."""

    def release(self) -> None:
        """Forget the requests that no longer run."""

    def warm_up(self, show: Any) -> None:
        """Record CUDA graphs, if there are any, with ``show`` around their sizes."""


def probabilities(logits: Float[Tensor, "n v"], request: Request) -> Float[Tensor, "n v"]:
    """The distributions that a request's tokens are drawn from; one-hot at temperature 0."""
    if request.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    ordered, tokens = (logits.float() / request.temperature).sort(dim=-1, descending=True)
    found = ordered.softmax(-1)
    if request.top_k is not None:
        found[:, request.top_k :] = 0.0
        found /= found.sum(-1, keepdim=True)
    if request.top_p is not None:
        before = found.cumsum(-1) - found
        found[:, 1:][before[:, 1:] >= request.top_p] = 0.0
        found /= found.sum(-1, keepdim=True)
    return torch.zeros_like(found).scatter(-1, tokens, found)


def shorten(runner: Runner, sequence: int, end: int) -> None:
    """Forget the positions of a sequence from ``end`` on; blocks that are left without any are free again."""
    cache = runner.cache
    n_blocks, table = runner.scheduler.blocks_for(end), cache.tables[sequence]
    cache.lengths[sequence] = [end] * len(cache.keys)
    for block in table[n_blocks:]:
        cache.allocator.free(block)
    del table[n_blocks:]
    runner.forget_tables()


class Lookup:
    """Where each short run of tokens of one text occurred last."""

    def __init__(self) -> None:
        self.n_read, self.ends = 0, dict[tuple[int, ...], int]()

    def guess(self, tokens: list[int], n: int) -> list[int]:
        """Up to n tokens that may come next; none if the last few are new to the text."""
        for end in range(self.n_read, len(tokens)):
            for size in SIZES:
                if end >= size:
                    self.ends[tuple(tokens[end - size : end])] = end
        self.n_read = len(tokens)
        found = (self.ends.get(tuple(tokens[-size:])) for size in SIZES)
        at = next((end for end in found if end is not None), None)
        if at is None:
            return []
        guess = list[int]()
        for i in range(at, at + n):  # a text whose period is short goes on in the guess itself
            guess.append(tokens[i] if i < len(tokens) else guess[i - len(tokens)])
        return guess


class PromptDrafter:
    """Drafts what followed the last few tokens when they occurred before in the same text."""

    def __init__(self) -> None:
        self.lookups: WeakKeyDictionary[Progress, Lookup] = WeakKeyDictionary()

    def most(self, progress: Progress, n: int) -> int:
        return len(self._guess(progress, n))

    def draft(self, wanted: dict[Progress, int]) -> dict[Progress, Draft]:
        return {progress: Draft(self._guess(progress, n), None) for progress, n in wanted.items()}

    def release(self) -> None:
        pass  # a lookup goes with its request

    def warm_up(self, show: Any) -> None:
        pass

    def _guess(self, progress: Progress, n: int) -> list[int]:
        return self.lookups.setdefault(progress, Lookup()).guess(progress.tokens, n)


class ModelDrafter(Runner):
    """A small model, with blocks for as many positions as the engine's cache has.

    For each request it keeps a ``Progress`` of its own, which it brings to the request's text before it drafts: what
    the engine did not keep of the last draft leaves the cache, what it added is computed. So nothing that happens to a
    request can change its answer here: at worst the draft's cache is made again.

    A request holds no more positions here than in the engine's cache, so blocks are always free.

    Args:
        model: The small model, without linear layers, whose state could not take back a token.
        scheduler: The engine's.
        vocab_size: Of the engine's model.
    """

    def __init__(self, model: nn.Module, scheduler: Any, vocab_size: int) -> None:
        super().__init__(model.eval(), scheduler, PagedCache, paged_attention)
        self.vocab_size = vocab_size
        self.followed: dict[Progress, Progress] = {}

    def most(self, progress: Progress, n: int) -> int:
        config: Any = self.model.config
        return max(0, min(n, config.context_len - len(progress.tokens)))

    def warm_up(self, show: Any) -> None:
        if self.steps is not None:
            self.steps.warm_up(show)

    def release(self) -> None:
        for progress in [progress for progress in self.followed if progress not in self.scheduler.running]:
            own = self.followed.pop(progress)
            if own in self.sequences:
                self.cache.free(self.sequences.pop(own))

    @torch.no_grad()
    def draft(self, wanted: dict[Progress, int]) -> dict[Progress, Draft]:
        """Draft so many tokens for each request, none where a long text is still to be read."""
        for progress in {**self.followed, **wanted}:  # the others, too, give back what was not kept
            self._catch_up(progress)
        room, chunks = self.scheduler.max_tokens, list[Chunk]()
        for mine in (self.followed[progress] for progress in wanted):
            n = min(mine.n_pending, room)
            room -= n
            chunks += [Chunk(mine, n)] if n else []
        drafts = {self.followed[progress]: Draft([], None) for progress in wanted}
        left = {self.followed[progress]: n for progress, n in wanted.items()}
        while chunks:
            for mine, logits, likeliest in self._pass(chunks):
                drafts[mine] = self._add(mine, drafts[mine], logits, likeliest)
            chunks = [Chunk(c.progress, 1) for c in chunks if 0 < len(drafts[c.progress].tokens) < left[c.progress]]
        found = {progress: drafts[self.followed[progress]] for progress in wanted}
        return {progress: draft for progress, draft in found.items() if draft.tokens}

    def _catch_up(self, progress: Progress) -> None:
        """Give the own progress of a request the request's text, of which it keeps what it has in the cache."""
        config: Any = self.model.config
        mine = self.followed.setdefault(progress, Progress(progress.request))
        most = config.vocab_size - 1  # a target with more rows than the tokenizer has tokens may go beyond
        tokens, n = [min(token, most) for token in progress.tokens], min(mine.n_cached, progress.n_cached)
        while mine.tokens[:n] != tokens[:n]:
            n -= 1
        mine.tokens, mine.n_cached, mine.generator = tokens, n, progress.random(self.cache.keys.device)
        if mine in self.sequences:
            shorten(self, self.sequences[mine], n)

    def _pass(self, chunks: list[Chunk]) -> list[tuple[Progress, Tensor, int]]:
        """Pass chunks through the model; for those that complete, the logits behind them, and the likeliest token."""
        if self.steps is not None:  # a few tokens are rows of a graph, as drafted ones are: the last row counts
            self.drafted = {progress: n - 1 for progress, n in chunks if 1 < n <= SHORT}
        logits, order = self._logits(chunks)
        logits = logits[:, : self.vocab_size]
        last, likeliest = {chunk: row for row, chunk in enumerate(order)}, logits.argmax(-1).tolist()
        found = [(c.progress, logits[last[c]], likeliest[last[c]]) for c in chunks if c.completes]
        for progress, n in chunks:
            progress.n_cached += n
        self.drafted.clear()
        return found

    def _add(self, mine: Progress, draft: Draft, logits: Float[Tensor, " v"], likeliest: int) -> Draft:
        token, rows = likeliest, None
        if mine.generator is not None:
            row = probabilities(logits[None], mine.request)
            row = torch.where(row.isfinite().all(), row, 1 / row.shape[1])  # any distribution may draft
            token = int(torch.multinomial(row[0], 1, generator=mine.generator))
            rows = row if draft.rows is None else torch.cat([draft.rows, row])
        mine.tokens.append(token)
        return Draft([*draft.tokens, token], rows)
