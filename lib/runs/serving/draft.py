"""Drafted tokens, by the text itself or by a small model, are checked in one step of the large one.

Chapter 21's ``speculative_step`` decides which drafted tokens stay, so the text keeps the model's own distribution, and
a greedy text stays the same. Where the drafts are right, a step of the same cost gives several tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.decode import GRAPH_ROWS
from lib.fast.parts.sample import NOT_FINITE, sample_rows, score_rows
from lib.fast.serving import NO_SCORES
from lib.given.models.serving import Chunk, Progress, Request
from lib.runs.serving.drafters import Draft, Drafter, PromptDrafter, probabilities, shorten
from lib.runs.serving.prefix import PrefixEngine, fault_of
from lib.runs.serving.wanted import drawn, form_of, n_top_of
from lib.serving import speculative_step

MOST_ROWS = 64
"""Tokens of a step with drafts at most: drafts pay while the step's time goes into reading the weights."""


class DraftEngine(PrefixEngine):
    """An engine that drafts.

    Args:
        model, scheduler: As for ``Engine``.
        n_drafted: Tokens that are drafted for each request in a step at most.
        on_drafted: Called with the numbers of drafted tokens and of those that were kept.
        drafter: Who drafts; by default the text itself.
        more: As for ``PrefixEngine``.

    Drafted tokens are a request's pending tokens until the step has decided: the scheduler counts their blocks, and
    those that are not kept give them back.
    """

    def __init__(self, model: Any, scheduler: Any, n_drafted: int = 7,
                 on_drafted: Callable[[int, int], None] = lambda n, n_kept: None, drafter: Drafter | None = None,
                 **more: Any):  # fmt: skip
        super().__init__(model, scheduler, **more)
        self.n_drafted, self.on_drafted, self.drafter = n_drafted, on_drafted, drafter or PromptDrafter()
        self.drafts = dict[Progress, Draft]()

    @torch.no_grad()
    def step(self) -> list[tuple[Request, Any]]:
        """As ``PrefixEngine.step``, but a request may get several tokens."""
        self.in_step = None
        self._draft()
        chunks = self.scheduler.schedule()
        self._undraft({chunk.progress: chunk.n_tokens - 1 for chunk in chunks})
        self.release()
        if not chunks:
            return []
        logits, order = self._logits(chunks)
        singles = [c.progress if c.completes and c.progress not in self.drafted else None for c in order]
        tokens, rows = sample_rows(logits, singles).tolist(), dict[Chunk, list[int]]()
        for row, chunk in enumerate(order):
            rows.setdefault(chunk, []).append(row)
        new = list[tuple[Request, Any]]()
        for chunk, own in rows.items():
            if not chunk.completes:
                self.scheduler.advance(chunk)
            elif NOT_FINITE in [tokens[row] for row in own]:
                self._keep(chunk, [0])
                fault = ArithmeticError(NO_SCORES)
                new.append((chunk.progress.request, fault))
            else:
                kept = self._check(chunk, logits[own]) if chunk.progress in self.drafted else [tokens[own[0]]]
                new += [(chunk.progress.request, self._scored(chunk, *one)) for one in zip(kept, own, strict=False)]
                self._keep(chunk, kept)
        self.drafted.clear()
        self.release()
        return new

    def _draft(self) -> None:
        """Give running requests drafted tokens, as far as the step has room and blocks are free."""
        running, scheduler = self.scheduler.running, self.scheduler
        room, free = (
            min(MOST_ROWS, GRAPH_ROWS, scheduler.max_tokens) - len(running),
            scheduler.n_free - len(running),
        )
        wanted = dict[Progress, int]()
        self.drafted = {}
        for progress, n_blocks in running.items():
            request, n_new = progress.request, len(progress.tokens) - len(progress.request.tokens)
            n = min(self.n_drafted, request.max_new_tokens - n_new - 1, room)
            if progress.n_pending != 1 or n < 1 or form_of(request) is not None:
                continue
            n_more = scheduler.blocks_for(progress.n_cached + 1 + n) - n_blocks
            if n_more <= free and (n := self.drafter.most(progress, n)):
                wanted[progress], room, free = n, room - n, free - n_more
        self.drafts = self.drafter.draft(wanted)
        for progress, draft in self.drafts.items():
            progress.tokens += draft.tokens
            self.drafted[progress] = len(draft.tokens)

    def _undraft(self, room: dict[Progress, int]) -> None:
        """Take back the drafts for which the step has no room."""
        for progress, n in list(self.drafted.items()):
            n_kept = min(n, room.get(progress, 0))
            del progress.tokens[len(progress.tokens) - n + n_kept :]
            self.drafted[progress] = n_kept
            if n_kept == 0:
                del self.drafted[progress]

    def _check(self, chunk: Chunk, logits: Tensor) -> list[int]:
        """The tokens that a request's draft leads to: those kept, and one of the model's own."""
        request, n = chunk.progress.request, self.drafted[chunk.progress]
        drafted = torch.tensor(chunk.progress.tokens[-n:], device=logits.device)
        rows, width = self.drafts[chunk.progress].rows, logits.shape[-1]
        rows = torch.nn.functional.one_hot(drafted, width).float() if rows is None else fitted(rows[:n], width)
        generator = chunk.progress.random(logits.device)
        kept = speculative_step(probabilities(logits, request), rows, drafted, generator).tolist()
        self.on_drafted(n, len(kept) - 1)
        return kept[: kept.index(request.eos_id) + 1] if request.eos_id in kept else kept

    def _scored(self, chunk: Chunk, token: int, row: int) -> Any:
        """A new token, as its request wants it."""
        request = chunk.progress.request
        if form := form_of(request):
            form.add(token)
        if n_top_of(request) is None or fault_of(request):
            return fault_of(request) or token
        found = score_rows(
            self.raw[row : row + 1], torch.tensor([token], device=self.raw.device), n_top_of(request) or 0
        )
        scores: list[Any] = [x[0].tolist() for x in found]
        return drawn(token, *scores)

    def _keep(self, chunk: Chunk, kept: list[int]) -> None:
        """Note a request's new tokens, and give back what the others of its draft hold."""
        progress, n_drafted = chunk.progress, self.drafted.get(chunk.progress, 0)
        n_tokens = chunk.n_tokens - n_drafted + len(kept) - 1
        if n_drafted:
            end = progress.n_cached + n_tokens
            del progress.tokens[end:]
            shorten(self, self.sequences[progress], end)
            if progress in self.scheduler.running:
                self.scheduler.running[progress] = self.scheduler.blocks_for(end)
        self.scheduler.advance(Chunk(progress, n_tokens), kept[-1])

    def release(self) -> None:
        """As ``PrefixEngine.release``, for the drafter's cache, too."""
        super().release()
        self.drafter.release()

    def _remember(self, progress: Progress) -> None:
        if progress not in self.drafted:  # a draft is no text yet
            super()._remember(progress)


def fitted(rows: Float[Tensor, "k u"], width: int) -> Float[Tensor, "k v"]:
    """Distributions over the V tokens of the target; those beyond the draft's own U have probability 0."""
    return torch.nn.functional.pad(rows, (0, max(0, width - rows.shape[1])))
