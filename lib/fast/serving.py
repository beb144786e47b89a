"""Runs a model on the tokens of many requests at once: the basis of chapter 21's engine and of the server.

On a GPU a Llama takes the fast way (`lib.fast.decode`; for chapter 23's variants, `lib.fast.decode_variants`): the
tokens of a step, prompts and all, pass through a CUDA graph.
The learner's engine reads each step's logits before it schedules the next.
`Runner.step_ahead` schedules the next step while the device computes this one, so that the work of both overlaps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.attention.paged import cut
from lib.fast.decode import GRAPH_ROWS
from lib.fast.decode_variants import can_run, make_steps
from lib.fast.parts.sample import NOT_FINITE, sample_rows
from lib.fast.states import States
from lib.flash_attention import flash_attention
from lib.given.kernels.paged import window_of
from lib.given.models.serving import Chunk, Layout, Progress, Request, check_request, lay_out, next_logits

UNKNOWN = -1
"""In place of a token that the device has not computed yet."""
NO_SCORES = "the model's scores of the next token are not finite"


@dataclass(eq=False)
class InFlight:
    """A step that the device has been given, and whose tokens the host does not know yet.

    Attributes:
        rows: The row of each request that gets a token.
        places: Where each of these tokens belongs among the request's tokens.
        tokens: One a row, on the host once ``done`` has been reached.
        notes: What a subclass of `Runner` keeps of the step, in the same way.
    """

    rows: dict[Progress, int] = field(default_factory=dict)
    places: dict[Progress, int] = field(default_factory=dict)
    tokens: Tensor | None = None
    notes: Any = None
    done: Any = None

    def read(self) -> list[int]:
        """The tokens of all rows; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        return [] if self.tokens is None else self.tokens.tolist()


class Runner:
    """A model, a scheduler and the cache that belongs to it.

    Args:
        model: Chapter 4's ``Llama``, chapter 6's ``GPT2``, or a model with windows and a ``next_logits`` of its own.
        scheduler: Chapter 21's ``Scheduler``, which decides what the next step computes.
        make_cache: Chapter 21's ``PagedCache``.
        attend: Chapter 21's ``paged_attention``.

    Attributes:
        cache: Keys and values, in the dtype and on the device of the model's parameters, with as many blocks as the
            scheduler has.
        sequences: For each request that has keys and values in the cache, its id there.
        drafted: How many of a request's pending tokens are drafts; the logits before each of them are wanted too.
        steps: The fast way through the model; None where it does not fit.
        windows: For each layer with keys how many a query sees; None for all up to its own.
        softcap: Of the scores; None for no cap.
        sinks: For each layer with keys those of its heads; None where they have none.
        states: Of the model's linear layers; None where it has none.
    """

    own_cache: tuple[Callable[..., Any], Callable[..., Tensor]] | None = None
    """A cache and its attention, in place of those that are given."""

    def __init__(
        self, model: nn.Module, scheduler: Any, make_cache: Callable[..., Any], attend: Callable[..., Tensor]
    ) -> None:
        weight = next(model.parameters())
        make_cache, self.attend = self.own_cache or (make_cache, attend)
        self.model, self.scheduler = model, scheduler
        self.cache = make_cache(
            model.config, scheduler.n_blocks, scheduler.block_size, dtype=weight.dtype, device=weight.device
        )
        self.sequences: dict[Progress, int] = {}
        self.drafted: dict[Progress, int] = {}
        self.windows = getattr(model.config, "windows", [None] * len(self.cache.keys))
        self.softcap = getattr(model.config, "softcap", None)
        self.sinks: Any = getattr(model, "sinks", [None] * len(self.cache.keys))
        self.states = States(self.cache) if "linear_attention" in getattr(model.config, "layer_types", ()) else None
        self.steps = make_steps(model, self.cache, scheduler.max_tokens) if self.is_fast() else None
        self._known = [(-1, 0)] * GRAPH_ROWS  # whose table each row of the next step holds, and of how many blocks
        self._decoding: list[Progress] = []  # the requests of the last step's rows, if each had one
        self._flight = InFlight()

    def is_fast(self) -> bool:
        """Whether the model takes the fast way."""
        return self.cache.keys.is_cuda and can_run(self.model, self.cache)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._flight.rows)

    def submit(self, request: Request) -> None:
        """Queue a request, between any two steps; a ``ValueError`` says why it cannot be taken."""
        check_request(request, self.model.config)
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> bool:
        """Drop a request, between any two steps; its blocks are free when the call returns.

        Returns whether it was there.
        """
        found = self.scheduler.cancel(request)
        flying = [progress for progress in self._flight.rows if progress.request is request]
        for progress in flying:
            del self._flight.rows[progress]
        self.release()
        return found or bool(flying)

    def release(self) -> None:
        """Free the blocks of requests that no longer run: they ended, were cancelled or were preempted."""
        for progress in [progress for progress in self.sequences if progress not in self.scheduler.running]:
            self.cache.free(self.sequences.pop(progress))
        if self.states is not None:
            self.states.forget()

    @torch.no_grad()
    def run(self, chunks: list[Chunk]) -> Iterator[Float[Tensor, " v"]]:
        """Pass the tokens of some chunks through the model, and keep their keys and values.

        Returns:
            For each chunk the logits ``[V]`` after its last token, float32.
        """
        if not chunks:
            return iter(())
        logits, order = self._logits(chunks)
        rows = {id(chunk.progress): row for chunk, row in zip(order, logits, strict=True)}
        return (rows[id(chunk.progress)] for chunk in chunks)

    def step_ahead(self) -> list[tuple[Request, Any]]:
        """Begin the scheduler's next step, then return the new tokens of the step before, each with its request.

        An ``ArithmeticError`` in place of a token ends its request: the model's scores are NaN or infinite. Needs
        ``steps``.
        """
        chunks, new = self.scheduler.schedule(), list[tuple[Request, Any]]()
        self.release()
        if any(chunk.n_tokens > 1 and UNKNOWN in chunk.tokens for chunk in chunks):  # of a request that was preempted
            new = self._collect(self._flight)
            chunks = [chunk for chunk in chunks if chunk.progress in self.scheduler.running]
        last, self._flight = self._flight, self._launch(chunks)
        return new + self._collect(last)

    @torch.no_grad()
    def _launch(self, chunks: list[Chunk]) -> InFlight:
        """Launch a step. The scheduler may go on as if its tokens were known."""
        flight = InFlight()
        if not chunks:
            return flight
        assert self.steps is not None
        logits, order = self._logits(chunks)
        wanted = [chunk.progress if chunk.completes else None for chunk in order]
        tokens = sample_rows(logits, wanted)
        self.steps.sampled[: len(tokens)] = tokens
        flight.tokens, flight.notes = to_host(tokens), self.note(logits, wanted, tokens)
        if tokens.is_cuda:
            flight.done = torch.cuda.Event()
            flight.done.record()
        for row, (chunk, progress) in enumerate(zip(order, wanted, strict=True)):
            if progress is not None:
                flight.rows[progress], flight.places[progress] = row, len(progress.tokens)
            self.scheduler.advance(chunk, None if progress is None else UNKNOWN)
        return flight

    def note(self, logits: Tensor, wanted: list[Progress | None], tokens: Tensor) -> Any:
        """What a subclass keeps of a step beside its tokens; the host may read it when it reads these."""

    def told(self, progress: Progress, flight: InFlight, token: int) -> Any:
        """The form in which ``step_ahead`` returns a new token: its number, unless a subclass says more."""
        return token

    def _collect(self, flight: InFlight) -> list[tuple[Request, Any]]:
        """Wait for a step, and give its requests their tokens."""
        new: list[tuple[Request, Any]] = []
        tokens = flight.read() if flight.rows else []
        for progress, row in list(flight.rows.items()):
            request, token = progress.request, tokens[row]
            progress.tokens[flight.places[progress]] = token
            is_lost = token == NOT_FINITE
            told = ArithmeticError(NO_SCORES) if is_lost else self.told(progress, flight, token)
            new.append((request, told))
            if is_lost or token == request.eos_id:  # the step that is in flight does not know this yet
                self.scheduler.cancel(request)
                self._flight.rows.pop(progress, None)
        flight.rows = {}
        return new

    def _logits(self, chunks: list[Chunk]) -> tuple[Float[Tensor, "n v"], list[Chunk]]:
        """The logits after each chunk's last token, and the chunks in the order of these rows.

        A chunk with drafted tokens has a row more for each of them, before its last one.
        """
        if self.steps is None:
            return self._in_a_row(chunks), self._by_row(chunks)
        if not self.drafted and len(chunks) <= GRAPH_ROWS:
            return self._by_graph(chunks), chunks
        parts, n_rows = [list[Chunk]()], 0
        for chunk in chunks:
            n = 1 + self.drafted.get(chunk.progress, 0)
            if n_rows + n > GRAPH_ROWS:
                parts.append([])
                n_rows = 0
            parts[-1].append(chunk)
            n_rows += n
        found = [self._by_graph(part) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found), self._by_row(chunks)

    def _by_row(self, chunks: list[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks for _ in range(1 + self.drafted.get(chunk.progress, 0))]

    def _by_graph(self, chunks: list[Chunk]) -> Float[Tensor, "n v"]:
        """The tokens of some chunks in one graph: few tokens row by row, and more in tiles."""
        assert self.steps is not None
        self.steps.wait()
        if self._goes_on(chunks):
            return self._next_rows()
        n_tokens = sum(chunk.n_tokens for chunk in chunks)
        in_rows = n_tokens <= GRAPH_ROWS
        self._decoding = [progress for progress, _ in chunks] if in_rows and n_tokens == len(chunks) else []
        return self._in_rows(chunks) if in_rows else self._in_tiles(chunks)

    def _in_rows(self, chunks: list[Chunk]) -> Float[Tensor, "n v"]:
        """Each token in a row with its own position and length: so a prompt's tokens, whose keys are all written
        before any is read, see those before them and none behind.
        """
        steps, tokens, positions, slots, asked = self.steps, list[int](), list[int](), list[int](), list[int]()
        assert steps is not None
        for progress, n in chunks:
            sequence, row = self._sequence(progress), len(tokens)
            slots += self._slots(sequence, n)
            self._show_table(sequence, row, row + n)
            end = self.cache.lengths[sequence][0]
            new = progress.tokens[progress.n_cached : progress.n_cached + n]
            tokens += [-1 - self._flight.rows[progress]] if new == [UNKNOWN] else new
            positions += range(end - n, end)
            asked += range(row + n - 1 - self.drafted.get(progress, 0), row + n)
        n_rows = len(tokens)
        steps.fields[:3, :n_rows] = tokens, positions, slots
        steps.fields[3, :n_rows] = steps.fields[1, :n_rows] + 1
        logits = steps.decode(n_rows)
        return logits.clone() if len(asked) == n_rows else logits[_sent(torch.tensor(asked), logits.device)]

    def _goes_on(self, chunks: list[Chunk]) -> bool:
        """Whether the step has the rows of the step before, which is in flight, each with its request's next token."""
        requests = [progress for progress, n in chunks if n == 1]
        return len(requests) == len(chunks) and requests == self._decoding == [*self._flight.rows]

    def _next_rows(self) -> Float[Tensor, "n v"]:
        """The logits of a step that goes on: the host has about a millisecond to prepare it for hundreds of requests,
        so only those that begin a block are looked at one by one.
        """
        steps, n_rows = self.steps, len(self._decoding)
        assert steps is not None
        fields, ids = steps.fields[:, :n_rows], [self.sequences[progress] for progress in self._decoding]
        fields[0] = -1 - np.arange(n_rows)
        fields[1:] += 1
        begins = fields[1] % self.cache.block_size == 0
        for row in np.flatnonzero(begins).tolist():
            (fields[2, row],) = self._slots(ids[row], 1)
            self._show_table(ids[row], row, row + 1)
        for sequence, is_longer in zip(ids, begins.tolist(), strict=True):
            if not is_longer:
                lengths = self.cache.lengths[sequence]
                lengths[:] = [lengths[0] + 1] * len(lengths)
        return steps.decode(n_rows).clone()

    def _in_tiles(self, chunks: list[Chunk]) -> Float[Tensor, "n v"]:
        """The tokens of each chunk in tiles of queries, which read its keys together."""
        steps, starts, sizes, asked = self.steps, list[int](), list[int](), list[int]()
        assert steps is not None
        tokens, positions, slots = list[int](), list[int](), list[int]()
        for row, chunk in enumerate(chunks):
            progress, new, sequence = chunk.progress, chunk.tokens, self._sequence(chunk.progress)
            starts.append(self.cache.lengths[sequence][0])
            sizes.append(len(new))
            tokens += [-1 - self._flight.rows[progress]] if new == [UNKNOWN] else new
            positions += range(starts[-1], starts[-1] + len(new))
            slots += self._slots(sequence, len(new))
            self._show_table(sequence, row, row + 1)
            asked += range(len(tokens) - 1 - self.drafted.get(progress, 0), len(tokens))
        fields = np.array((tokens, positions, slots), dtype=np.int64)
        tiles = np.array(cut(starts, sizes, steps.tile_queries), dtype=np.int64)
        return steps.decode_tiled(fields, tiles, asked).clone()

    def _slots(self, sequence: int, n_tokens: int) -> list[int]:
        """Make a sequence longer; returns the slots of its new positions."""
        table, lengths, size = self.cache.tables[sequence], self.cache.lengths[sequence], self.cache.block_size
        place, at = divmod(lengths[0], size)
        is_shared = place < len(table) and self.cache.allocator.n_users[table[place]] > 1
        if n_tokens == 1 and place < len(table) and not is_shared:
            lengths[:] = [lengths[0] + 1] * len(lengths)
            return [table[place] * size + at]
        slots = self._extend(sequence, n_tokens).tolist()
        if is_shared:  # it has been copied: rows may know the table with the block before
            self.forget_tables()
        return slots

    def _show_table(self, sequence: int, row: int, end: int) -> None:
        """Put a sequence's table into rows ``row`` to ``end`` of the next step, unless it is there."""
        assert self.steps is not None
        table = self.cache.tables[sequence]
        known = [(sequence, len(table))] * (end - row)
        if self._known[row] != known[0] or self._known[row:end] != known:
            self.steps.tables[row:end, : len(table)] = table
            self._known[row:end] = known

    def forget_tables(self) -> None:
        """Send all tables anew with the next step: blocks have left the end of one."""
        self._known = [(-1, 0)] * GRAPH_ROWS

    def _in_a_row(self, chunks: list[Chunk]) -> Float[Tensor, "n v"]:
        """The tokens of all chunks, one chunk's after another's."""
        ids, row = [self._sequence(chunk.progress) for chunk in chunks], lay_out(chunks)
        before = [range(self.drafted.get(chunk.progress, 0), -1, -1) for chunk in chunks]
        ends = [end - n for end, back in zip(row.last.tolist(), before, strict=True) for n in back]
        slots = torch.cat([self._extend(i, n) for i, n in zip(ids, row.sizes, strict=True)])
        return self.pass_row(ids, row._replace(last=torch.tensor(ends, dtype=torch.int64)), slots)

    def pass_row(self, ids: list[int], row: Layout, slots: Int[Tensor, " n"]) -> Float[Tensor, "r v"]:
        """Pass a row of tokens through the model.

        Args:
            ids: The sequence of each chunk in the row, which is as long already as the row makes it.
            row: The tokens, on the host; ``last`` has the index of each token whose logits are wanted.
            slots: Where the tokens' keys and values belong in the cache, on the host.

        Returns:
            The logits ``[R, V]``, float32.
        """
        device = self.cache.keys.device
        tokens, positions, single, last, slots = (
            _sent(x, device) for x in (row.tokens, row.positions, row.single, row.last, slots)
        )
        row = Layout(tokens, positions, row.sizes, single, last)
        return next_logits(self.model, row.tokens, row.positions, row.last, self._plain_attention(ids, row, slots))

    def _plain_attention(self, ids: list[int], row: Layout, slots: Tensor) -> Callable[..., Tensor]:
        ones = [i for i, n in zip(ids, row.sizes, strict=True) if n == 1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, slots, k, v)
            if len(ones) == len(ids):
                return self._attend_one(q, ids, layer)
            out = torch.empty_like(q)
            if ones:
                out[row.single] = self._attend_one(q[row.single], ones, layer)
            for i, queries, part in zip(ids, q.split(row.sizes), out.split(row.sizes), strict=True):
                if len(queries) > 1:
                    part.copy_(self._attend_many(queries.transpose(0, 1), i, layer).transpose(0, 1))
            return out

        if self.states is not None:
            vars(attend)["recur"] = partial(self.states.recur, ids, row.sizes)
        return attend

    def _bends(self, layer: int) -> bool:
        """Whether a layer's weights are not the softmax of its scores alone."""
        return self.softcap is not None or self.sinks[layer] is not None

    def _attend_one(self, q: Float[Tensor, "b h d"], ids: list[int], layer: int) -> Float[Tensor, "b h d"]:
        """The newest position of each sequence attends to all that its layer lets it see."""
        window = self.windows[layer]
        if window is None and not self._bends(layer):
            return self.attend(q, self.cache, ids, layer)
        from lib.attention_variants import grouped_attention  # a chapter after 21

        reach = window or max(self.cache.lengths[i][layer] for i in ids)
        k, v, seen = window_of(self.cache, ids, reach, layer)
        bends = self.softcap, self.sinks[layer]
        return grouped_attention(q[:, :, None], k, v, seen[:, None, None], None, *bends)[:, :, 0]

    def _attend_many(self, q: Float[Tensor, "h t d"], i: int, layer: int) -> Float[Tensor, "h t d"]:
        """The newest positions of a sequence attend to it, each to none after itself."""
        (k, v), window = self.cache.read(i, layer), self.windows[layer]
        if window is None and not self._bends(layer):
            return flash_attention(q, k, v, True)
        from lib.attention_variants import flash_window_forward, grouped_attention, sliding_window_mask

        if window is not None:
            k, v = (x[:, -(window + q.shape[1] - 1) :] for x in (k, v))
        if self._bends(layer):
            mask = sliding_window_mask(q.shape[1], k.shape[1], window, q.device)
            return grouped_attention(q[None], k[None], v[None], mask, None, self.softcap, self.sinks[layer])[0]
        return flash_window_forward(q[None], k[None], v[None], window)[0][0]

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


def to_host(x: Tensor) -> Tensor:
    """A tensor on its way to the host, which must not read it before the device has written it."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to a device, for which the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
