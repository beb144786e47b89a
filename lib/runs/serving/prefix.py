"""Chapter 21's engine with its prefix tree: prompts that begin alike share blocks,
and their beginnings are computed once.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lib.fast.parts.sample import NOT_FINITE, score_rows
from lib.fast.serving import NO_SCORES, InFlight, to_host
from lib.given.models.serving import Chunk, Progress, Request
from lib.llama import sample_next
from lib.runs.serving.forms import Form, masked
from lib.runs.serving.packed import PackedCache, packed_attention
from lib.runs.serving.wanted import drawn, first_of, form_of, n_top_of
from lib.serving import Engine, PrefixTree, Scheduler


class PrefixEngine(Engine):
    """An engine whose new requests begin with the blocks of earlier ones, as far as these hold the same tokens.

    The tree is one more user of each block that it remembers. The scheduler does not know the tree: it counts a
    request's blocks as if none were shared. So the blocks of running requests always fit into the pool, and when no
    block is free, the tree holds one that nobody else uses.

    A model with linear layers shares no beginnings, because a block holds keys and no state. A fork copies the state.

    Of several requests with one prompt, only the first is scheduled. Once its prompt is computed, the others begin as
    forks of its cache, and draw their first token from the same scores.

    Args:
        model, scheduler: As for ``Engine``.
        on_found: Called with the number of tokens that a request found in the tree.
        on_forked: Called with the number of tokens that a fork shares with the first request of its prompt.
        cache_format: "int8" or "float8", in which keys and values are kept; None: in the model's dtype.
        on_preempted: Called with the number of requests that a step preempted.

    Attributes:
        held: For each first request the others, until its prompt is computed.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler, on_found: Callable[[int], None] = lambda n: None,
                 on_forked: Callable[[int], None] = lambda n: None, cache_format: str | None = None,
                 on_preempted: Callable[[int], None] = lambda n: None):  # fmt: skip
        if cache_format:
            self.own_cache = partial(PackedCache, cache_format), packed_attention
        super().__init__(model, scheduler)
        self.tree, self.on_found, self.on_forked = PrefixTree(scheduler.block_size), on_found, on_forked
        self.on_preempted = on_preempted
        self.held: dict[Request, list[Request]] = {}
        self.raw = torch.empty(0)  # this step's logits, before the tokens that forms do not allow are taken out
        self.forked: list[tuple[Chunk, Tensor]] = []  # the forks that began in this step, with their first logits
        self.acquired: dict[Progress, list[int]] = {}
        self.without_scores: set[Request] = set()
        self.scores: dict[Request, Tensor] = {}  # the logits of this step's requests that want them
        self.in_step: list[Progress] | None = None  # those that take part in this step, once it is known

    def step(self) -> list[tuple[Request, Any]]:
        """As ``Engine.step``, but a request that wants scores gets a ``Drawn`` in place of a token, and one for whose
        next token the model has no scores gets an ``ArithmeticError``.

        The logits of the latter are NaN or infinite, for example after an overflow of float16.
        To draw from them would raise an exception, and on a
        GPU end all work of the process.
        """
        self.in_step = None
        if self.steps is not None:
            return self.step_ahead()
        self.without_scores.clear()
        self.scores.clear()
        self.forked.clear()
        new = super().step()
        for chunk, logits in self.forked:
            token = int(sample_next(logits[None], **chunk.progress.sampling(logits.device)))
            self.scheduler.advance(chunk, token)
            new.append((chunk.progress.request, token))
        self.release()
        for request, token in new:
            if form := form_of(request):
                form.add(token)
        return [(request, self._told(request, token)) for request, token in new]

    def submit(self, request: Request) -> None:
        """As ``Runner.submit``; a request whose prompt another is about to compute is held until then."""
        first = self.scheduler.find(first_of(request)) if first_of(request) else None
        if first is None or len(first.tokens) > len(first.request.tokens):
            super().submit(request)
        else:
            self.held.setdefault(first.request, []).append(request)

    @property
    def n_held(self) -> int:
        """Requests that wait for the prompt of another."""
        return sum(map(len, self.held.values()))

    def cancel(self, request: Request) -> bool:
        """As ``Runner.cancel``; the forks of a request that leaves early are queued by themselves."""
        for held in self.held.values():
            if request in held:
                held.remove(request)
                return True
        found = super().cancel(request)
        self._queue(self.held.pop(request, []))
        return found

    def _queue(self, requests: list[Request]) -> None:
        """Let requests that were held wait at the head of the queue."""
        self.scheduler.waiting.extendleft(map(Progress, reversed(requests)))

    def _told(self, request: Request, token: int) -> Any:
        if request in self.without_scores:
            return ArithmeticError(NO_SCORES)
        if fault := fault_of(request):
            return fault
        if request not in self.scores:
            return token
        found = score_rows(self.scores[request][None], torch.tensor([token]), n_top_of(request) or 0)
        scores: list[Any] = [x[0].tolist() for x in found]
        return drawn(token, *scores)

    def note(self, logits: Tensor, wanted: list[Progress | None], tokens: Tensor) -> Any:
        """The scores of the rows whose requests want them: for each request its row among them, and the scores."""
        asked = {p: row for row, p in enumerate(wanted) if p and n_top_of(p.request) is not None}
        if not asked:
            return {}, None
        rows = torch.tensor(list(asked.values()), pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
        n_top = max(n_top_of(progress.request) or 0 for progress in asked)
        found = score_rows(self.raw[rows], tokens[rows], n_top)
        return {progress: i for i, progress in enumerate(asked)}, [to_host(x) for x in found]

    def told(self, progress: Progress, flight: InFlight, token: int) -> Any:
        """The token, with its scores if the request wants them."""
        if form := form_of(progress.request):
            form.accept(progress.tokens[len(progress.request.tokens) : flight.places[progress] + 1])
            if fault := fault_of(progress.request):
                return fault
        rows, found = flight.notes
        if progress not in rows:
            return token
        logprob, tokens, logprobs = (x[rows[progress]].tolist() for x in found)
        n = n_top_of(progress.request) or 0
        return drawn(token, logprob, tokens[:n], logprobs[:n])

    def abandon(self) -> list[Request]:
        """After a step that raised an exception: drop the requests that took part in it, and free all of their blocks.

        The tree remembers none of what the step may have left half written.
        If the step failed before its requests were chosen, all running ones are dropped.

        Returns:
            The requests that were dropped.
        """
        dropped = list(self.scheduler.running) if self.in_step is None else self.in_step
        for progress in dropped:
            self.scheduler.cancel(progress.request)
            self._flight.rows.pop(progress, None)
            if progress in self.sequences:
                self.cache.free(self.sequences.pop(progress))
            if progress in self.acquired:
                self.tree.release(self.acquired.pop(progress))
        for progress in dropped:
            self._queue(self.held.pop(progress.request, []))
        self.in_step = None
        self.release()
        return [progress.request for progress in dropped]

    @torch.no_grad()
    def run(self, chunks: list[Chunk]) -> Iterator[Tensor]:
        """The logits, but zeros where the largest is NaN or infinite; the requests of these are noted."""
        if not chunks:
            return iter(())
        logits, order = self._logits(chunks)
        rows = {}
        for row, raw, chunk, largest in zip(logits, self.raw, order, logits.amax(-1).tolist(), strict=True):
            request = chunk.progress.request
            if not math.isfinite(largest):
                self.without_scores.add(request)
            rows[chunk.progress] = row if math.isfinite(largest) else torch.zeros_like(row)
            if n_top_of(request) is not None:
                self.scores[request] = raw.cpu()
        self.forked = [(chunk, rows[chunk.progress]) for chunk in order[len(chunks) :]]
        return (rows[chunk.progress] for chunk in chunks)

    def _logits(self, chunks: list[Chunk]) -> tuple[Tensor, list[Chunk]]:
        """Pass chunks through the model, without the tokens of a new request's first chunk that the tree knows."""
        self.in_step = [progress for progress, _ in chunks]
        found = {progress: self._begin(progress, n) for progress, n in chunks if progress not in self.sequences}
        for progress, n_found in found.items():
            progress.n_cached = n_found
        rest = [Chunk(progress, n - found.get(progress, 0)) for progress, n in chunks] if found else chunks
        logits, order = super()._logits(rest)
        for progress in found:
            progress.n_cached = 0  # the scheduler adds the whole chunk
        for progress, n in chunks:
            if n > 1:
                self._remember(progress)
        whole = dict(zip(self.in_step, chunks, strict=True))
        self.raw, order = self._fork(logits, [whole[chunk.progress] for chunk in order])
        return self._masked(order), order

    def _masked(self, order: list[Chunk]) -> Tensor:
        """The logits, without the tokens that a request's form does not allow."""
        rows, forms = list[int](), list[Form]()
        for row, (progress, _) in enumerate(order):
            form = form_of(progress.request)
            if form and order[row].completes:
                new = progress.tokens[len(progress.request.tokens) :]
                if progress in self._flight.rows and new:  # the step before: read while the device computes this one
                    new[-1] = self._flight.read()[self._flight.rows[progress]]
                form.accept([token for token in new if token != NOT_FINITE])
                if not form.is_over:
                    rows.append(row)
                    forms.append(form)
        return masked(self.raw, rows, forms) if rows else self.raw

    def _fork(self, logits: Tensor, order: list[Chunk]) -> tuple[Tensor, list[Chunk]]:
        """Start the requests that waited for a prompt which this step has computed: behind the step's own rows comes
        one for each of them, with the logits of its first.
        """
        rows = list[int]()
        for row, chunk in enumerate(order[:] if self.held else []):
            held = self.held.pop(chunk.progress.request, []) if chunk.completes else []
            n_blocks = self.scheduler.blocks_for(len(chunk.progress.tokens))
            n_rows = len(held) if self.steps is None else len(self.steps.sampled) - len(order)
            n_states = getattr(self.scheduler, "n_free_states", len(held))
            n = max(0, min(len(held), n_rows, n_states, self.scheduler.n_free // n_blocks))
            order += [self._begin_fork(request, chunk.progress, n_blocks) for request in held[:n]]
            rows += [row] * n
            self._queue(held[n:])
        return (torch.cat([logits, logits[rows]]) if rows else logits), order

    def _begin_fork(self, request: Request, first: Progress, n_blocks: int) -> Chunk:
        made = Progress(request)
        self.scheduler.running[made] = n_blocks
        self.sequences[made] = self.cache.fork(self.sequences[first])
        if self.states:
            self.states.copy(self.sequences[first], self.sequences[made])
        self.acquired[made] = made.tokens[:-1]
        self.tree.acquire(self.acquired[made])
        self.on_forked(len(made.tokens))
        if self.in_step is not None:
            self.in_step.append(made)
        return Chunk(made, len(made.tokens))

    def release(self) -> None:
        """Free the blocks of requests that no longer run, after the tree has become a user of the full ones."""
        gone = [progress for progress in self.sequences if progress not in self.scheduler.running]
        for progress in gone:
            self._remember(progress)
            self.tree.release(self.acquired.pop(progress))
        self.on_preempted(sum(not progress.is_done and progress in self.scheduler.waiting for progress in gone))
        super().release()

    def _begin(self, progress: Progress, n_tokens: int) -> int:
        """Make the sequence of a request; returns the number of its first tokens that the tree knows.

        The last token of the chunk is computed in any case, for its logits.
        """
        beginning = [] if self.states else progress.tokens[: n_tokens - 1]  # blocks alone bring no state back
        blocks = self.tree.acquire(beginning)
        self.acquired[progress] = beginning
        self.sequences[progress] = self.cache.new(blocks)
        n_found = len(blocks) * self.cache.block_size
        self.on_found(n_found)
        return n_found

    def _remember(self, progress: Progress) -> None:
        if self.states:
            return
        sequence, size = self.sequences[progress], self.cache.block_size
        n_whole = self.cache.length_of(sequence) // size
        for block in self.tree.insert(progress.tokens[: n_whole * size], self.cache.tables[sequence][:n_whole]):
            self.cache.allocator.share(block)

    def _extend(self, sequence: int, n_tokens: int) -> Tensor:
        pool, end = self.cache.allocator, self.cache.length_of(sequence) + n_tokens
        table, start = self.cache.tables[sequence], self.cache.length_of(sequence) // self.cache.block_size
        n_copied = sum(pool.n_users[block] > 1 for block in table[start:])  # of forks: the block that both go on from
        n_needed = self.scheduler.blocks_for(end) - len(table) + n_copied
        lot = self.cache.n_blocks // 32  # to find the oldest leaf means to look at all, so several go at a time
        while n_needed > pool.n_free and (evicted := evict(self.tree, max(n_needed - pool.n_free, lot))):
            for block in evicted:
                pool.free(block)
        return super()._extend(sequence, n_tokens)


def fault_of(request: Request) -> Exception | None:
    """What ends a request in place of its next token: its form cannot go on."""
    form = form_of(request)
    return RuntimeError(f"response_format: {form.error}") if form and form.error else None


def evict(tree: Any, n: int) -> list[int]:
    """As a ``PrefixTree``'s own ``evict(n)``, but the leaves are looked up once for all n blocks.

    A pool can have a hundred thousand.
    """
    heap = [(leaf.last_used, i, leaf) for i, leaf in enumerate(tree.root.leaves()) if leaf.n_users == 0]
    heapq.heapify(heap)
    evicted: list[int] = []
    while heap and len(evicted) < n:
        _, i, leaf = heapq.heappop(heap)
        parent = leaf.parent
        del parent.children[leaf.piece]
        evicted.append(leaf.block)
        if parent is not tree.root and not parent.children and parent.n_users == 0:
            heapq.heappush(heap, (parent.last_used, i, parent))
    return evicted
