"""Runs a model on the tokens of many requests at once: the basis of chapter 21's engine and of the server."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lib.flash_attention import flash_attention
from lib.given.models.serving import Chunk, Progress, Request, check_request, lay_out, next_logits


class Runner:
    """A model, a scheduler and the cache that belongs to it.

    Args:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``.
        scheduler: Chapter 21's ``Scheduler``, which decides what the next step computes.
        make_cache, attend: Chapter 21's ``PagedCache`` and ``paged_attention``.

    Attributes:
        cache: Keys and values, in the dtype and on the device of the model's parameters,
            with as many blocks as the scheduler has.
        sequences: For each request that has keys and values in the cache, its id there.
    """

    def __init__(
        self, model: nn.Module, scheduler: Any, make_cache: Callable[..., Any], attend: Callable[..., Tensor]
    ) -> None:
        weight = next(model.parameters())
        self.model, self.scheduler, self.attend = model, scheduler, attend
        self.cache = make_cache(
            model.config, scheduler.n_blocks, scheduler.block_size, dtype=weight.dtype, device=weight.device
        )
        self.sequences: dict[Progress, int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, request: Request) -> None:
        """Queue a request, between any two steps; a ``ValueError`` says why the model or the
        scheduler cannot take it.
        """
        check_request(request, self.model.config)
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> bool:
        """Drop a request, between any two steps; its blocks are free when the call returns.

        Returns whether it was there.
        """
        found = self.scheduler.cancel(request)
        self.release()
        return found

    def release(self) -> None:
        """Free the blocks of requests that no longer run: they ended, were cancelled or were preempted."""
        for progress in [progress for progress in self.sequences if progress not in self.scheduler.running]:
            self.cache.free(self.sequences.pop(progress))

    @torch.no_grad()
    def run(self, chunks: list[Chunk]) -> Iterator[Float[Tensor, " v"]]:
        """Pass the tokens of some chunks through the model in one row, and keep their keys and values.

        Returns:
            For each chunk the logits ``[V]`` after its last token, float32.
        """
        if not chunks:
            return iter(())
        ids = [self._sequence(chunk.progress) for chunk in chunks]
        row = lay_out(chunks, self.cache.keys.device)
        slots = torch.cat([self._extend(i, n) for i, n in zip(ids, row.sizes, strict=True)]).to(row.tokens.device)
        ones = [i for i, n in zip(ids, row.sizes, strict=True) if n == 1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, slots, k, v)
            if len(ones) == len(ids):
                return self.attend(q, self.cache, ids, layer)
            out = torch.empty_like(q)
            if ones:
                out[row.single] = self.attend(q[row.single], self.cache, ones, layer)
            for i, queries, part in zip(ids, q.split(row.sizes), out.split(row.sizes), strict=True):
                if len(queries) > 1:  # the new positions attend to the whole sequence, each to none after itself
                    k, v = self.cache.read(i, layer)
                    part.copy_(flash_attention(queries.transpose(0, 1), k, v, True).transpose(0, 1))
            return out

        return iter(next_logits(self.model, row.tokens, row.positions, row.last, attend))

    def _sequence(self, progress: Progress) -> int:
        if progress not in self.sequences:
            self.sequences[progress] = self.cache.new()
        return self.sequences[progress]

    def _extend(self, sequence: int, n_tokens: int) -> Tensor:
        """Make a sequence longer in all layers; returns the slots of its new positions."""
        start = self.cache.length_of(sequence)
        slots = self.cache.find_slots(sequence, start, start + n_tokens)
        self.cache.lengths[sequence] = [start + n_tokens] * len(self.cache.keys)
        return torch.tensor(slots, dtype=torch.int64)
