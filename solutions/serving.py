"""Serving: many requests on one model, with a cache in blocks, a scheduler, shared prefixes and drafted tokens."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.given.models.serving import Chunk, OutOfBlocks, Progress, cache_sizes, check_request, lay_out, next_logits
from lib.given.models.serving import Request as Request
from solutions.attention import causal_mask, repeat_kv, scaled_dot_product_attention
from solutions.llama import sample_next


class BlockAllocator:
    """Lends the blocks of a pool, and counts how many users each block has. (Exercise)

    Args:
        n_blocks: Blocks in the pool, numbered from 0.

    Attributes:
        n_free: Blocks that nobody uses.

    Source: PagedAttention (arXiv:2309.06180), section 4.4.
    """

    def __init__(self, n_blocks: int):
        ### BEGIN SOLUTION
        self.n_users = [0] * n_blocks
        self.unused = list(range(n_blocks))[::-1]
        ### END SOLUTION

    @property
    def n_free(self) -> int:
        """Blocks that nobody uses."""
        ### BEGIN SOLUTION
        return len(self.unused)
        ### END SOLUTION

    def allocate(self) -> int:
        """An unused block, which has one user now; ``OutOfBlocks`` if there is none, and the message says how many the pool has."""
        ### BEGIN SOLUTION
        if not self.unused:
            raise OutOfBlocks(f"all {len(self.n_users)} blocks of the pool are in use")
        block = self.unused.pop()
        self.n_users[block] = 1
        return block
        ### END SOLUTION

    def share(self, block: int) -> int:
        """Count one more user of a block in use, and return the block; a ``ValueError`` that names the block if nobody uses it."""
        ### BEGIN SOLUTION
        self._check(block)
        self.n_users[block] += 1
        return block
        ### END SOLUTION

    def free(self, block: int) -> None:
        """Count one user less; after the last one the block is unused. A ``ValueError`` that names the block if nobody uses it."""
        ### BEGIN SOLUTION
        self._check(block)
        self.n_users[block] -= 1
        if self.n_users[block] == 0:
            self.unused.append(block)
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _check(self, block: int) -> None:
        if not 0 <= block < len(self.n_users):
            raise ValueError(f"there is no block {block}: the pool has blocks 0 to {len(self.n_users) - 1}")
        if self.n_users[block] == 0:
            raise ValueError(f"block {block} is not in use: it was freed already, or never allocated")

    ### END SOLUTION


class PagedCache:
    """Keys and values of many sequences, in blocks that a table lists for each sequence. (Exercise)

    Args:
        config: A ``LlamaConfig`` or ``GPT2Config``; ``cache_sizes`` (given) reads L, G and D from it.
        n_blocks: Blocks in the pool. A block holds ``block_size`` positions, in all layers.
        block_size: Positions in a block.
        dtype, device: Of the keys and values; PyTorch's defaults unless given.

    Attributes:
        keys, values: ``[L, n_blocks, block_size, G, D]``, zeros at first.
        allocator: A ``BlockAllocator``.
        tables: Each sequence's blocks, by its id, in the order of its positions.

    An id that is unknown or was freed is a ``ValueError`` that names it.
    Source: PagedAttention (arXiv:2309.06180), sections 4.3 and 4.4.
    """

    def __init__(self, config, n_blocks: int, block_size: int = 16, dtype: torch.dtype | None = None, device=None):
        ### BEGIN SOLUTION
        n_layers, n_kv_heads, head_dim = cache_sizes(config)
        shape = (n_layers, n_blocks, block_size, n_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.block_size, self.allocator, self.n_made = block_size, BlockAllocator(n_blocks), 0
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, list[int]] = {}  # of each layer
        ### END SOLUTION

    def new(self) -> int:
        """The id of a new, empty sequence. No id is given twice."""
        ### BEGIN SOLUTION
        self.n_made += 1
        self.tables[self.n_made], self.lengths[self.n_made] = [], [0] * len(self.keys)
        return self.n_made
        ### END SOLUTION

    def length(self, sequence: int, layer: int = 0) -> int:
        """Positions that a sequence has in a layer."""
        ### BEGIN SOLUTION
        self._check(sequence)
        return self.lengths[sequence][layer]
        ### END SOLUTION

    def extend(self, sequence: int, n_tokens: int) -> Int[Tensor, " t"]:
        """Make room for ``n_tokens`` more positions in all layers; returns their slots ``block * block_size + offset``.

        The new positions lie in blocks that no other sequence uses: a shared block is copied first, in all layers. If the free blocks don't suffice,
        ``OutOfBlocks`` says how many are needed and how many are free, and nothing is changed.
        """
        ### BEGIN SOLUTION
        self._check(sequence)
        start = max(self.lengths[sequence])
        slots = self._slots(sequence, start, start + n_tokens)
        self.lengths[sequence] = [start + n_tokens] * len(self.keys)
        return slots
        ### END SOLUTION

    def write(self, layer: int, slots: Int[Tensor, " t"], k: Float[Tensor, "t g d"], v: Float[Tensor, "t g d"]) -> None:
        """Store the keys and values of a layer in the slots that ``extend`` returned, of one sequence or of several."""
        ### BEGIN SOLUTION
        for pool, new in ((self.keys, k), (self.values, v)):
            pool[layer].flatten(0, 1)[slots] = new.to(pool.dtype)
        ### END SOLUTION

    def append(self, sequence: int, layer: int, k: Float[Tensor, "g t d"], v: Float[Tensor, "g t d"]) -> None:
        """Append T positions to one layer of a sequence. Keys or values that are not ``[G, T, D]`` are a ``ValueError``; too few blocks as in ``extend``."""
        ### BEGIN SOLUTION
        self._check(sequence)
        expected = (self.keys.shape[3], k.shape[1] if k.dim() > 1 else 1, self.keys.shape[4])
        for name, new in (("keys", k), ("values", v)):
            if tuple(new.shape) != expected:
                raise ValueError(f"{name} are {list(new.shape)}, this cache takes {list(expected)}")
        start = self.lengths[sequence][layer]
        slots = self._slots(sequence, start, start + expected[1])
        self.write(layer, slots, k.transpose(0, 1), v.transpose(0, 1))
        self.lengths[sequence][layer] = start + expected[1]
        ### END SOLUTION

    def read(self, sequence: int, layer: int = 0) -> tuple[Float[Tensor, "g s d"], Float[Tensor, "g s d"]]:
        """All keys and values of a sequence in a layer, as ``append`` took them."""
        ### BEGIN SOLUTION
        n, table = self.length(sequence, layer), self.tables[sequence]
        k, v = (pool[layer][table].flatten(0, 1)[:n].transpose(0, 1) for pool in (self.keys, self.values))
        return k, v
        ### END SOLUTION

    def fork(self, sequence: int) -> int:
        """The id of a new sequence with the same positions, which shares all blocks and copies none."""
        ### BEGIN SOLUTION
        self._check(sequence)
        copy = self.new()
        self.tables[copy] = [self.allocator.share(block) for block in self.tables[sequence]]
        self.lengths[copy] = list(self.lengths[sequence])
        return copy
        ### END SOLUTION

    def free(self, sequence: int) -> None:
        """Forget a sequence, and free each of its blocks."""
        ### BEGIN SOLUTION
        self._check(sequence)
        for block in self.tables.pop(sequence):
            self.allocator.free(block)
        del self.lengths[sequence]
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _check(self, sequence: int) -> None:
        if sequence not in self.tables:
            raise ValueError(f"there is no sequence {sequence}: it was freed already, or never made")

    def _slots(self, sequence: int, start: int, end: int) -> Tensor:
        """Slots of some positions, in blocks that are this sequence's alone."""
        table, size = self.tables[sequence], self.block_size
        used = range(start // size, -(-end // size) if end > start else 0)
        shared = [i for i in used if i < len(table) and self.allocator.n_users[table[i]] > 1]
        n_needed = len(shared) + sum(i >= len(table) for i in used)
        if n_needed > self.allocator.n_free:
            raise OutOfBlocks(f"{n_needed} blocks are needed and {self.allocator.n_free} are free")
        for i in shared:
            block = self.allocator.allocate()
            for pool in (self.keys, self.values):
                pool[:, block] = pool[:, table[i]]
            self.allocator.free(table[i])
            table[i] = block
        table += [self.allocator.allocate() for i in used if i >= len(table)]
        positions = torch.arange(start, end)
        slots = torch.tensor(table, dtype=torch.int64)[positions // size] * size + positions % size
        return slots.to(self.keys.device)

    ### END SOLUTION


def paged_attention(
    q: Float[Tensor, "b h d"], cache: PagedCache, sequences: Sequence[int], layer: int = 0
) -> Float[Tensor, "b h d"]:
    """Attention of one query of each sequence to all of the sequence's positions in a layer. (Exercise)"""
    ### BEGIN SOLUTION
    lengths = torch.tensor([cache.length(sequence, layer) for sequence in sequences])
    longest = max(len(cache.tables[sequence]) for sequence in sequences)
    table = torch.tensor([(cache.tables[i] + [0] * longest)[:longest] for i in sequences], dtype=torch.int64)
    mask = (torch.arange(longest * cache.block_size) < lengths[:, None]).to(q.device)
    keys, values = (pool[layer][table.to(q.device)].flatten(1, 2) for pool in (cache.keys, cache.values))
    values = values.masked_fill(~mask[..., None, None], 0)  # what an earlier sequence left there may be infinite
    k, v = (repeat_kv(x.transpose(1, 2), q.shape[1] // x.shape[2]) for x in (keys, values))
    return scaled_dot_product_attention(q[:, :, None], k, v, mask[:, None, None]).squeeze(2)
    ### END SOLUTION


class Scheduler:
    """Decides which tokens of which requests the next step passes through the model. (Exercise)"""

    def __init__(self, max_tokens: int, n_blocks: int, block_size: int):
        ### BEGIN SOLUTION
        self.max_tokens, self.n_blocks, self.block_size = max_tokens, n_blocks, block_size
        self.waiting: deque[Progress] = deque()
        self.running: dict[Progress, int] = {}  # the blocks of each, the oldest request first
        ### END SOLUTION

    @property
    def n_free(self) -> int:
        """Blocks that no running request holds."""
        ### BEGIN SOLUTION
        return self.n_blocks - sum(self.running.values())
        ### END SOLUTION

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        ### BEGIN SOLUTION
        n_needed = self._blocks(len(request.tokens) + request.max_new_tokens - 1)
        if n_needed > self.n_blocks:
            raise ValueError(
                f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones need {n_needed} blocks of {self.block_size}; "
                f"the pool has {self.n_blocks}"
            )
        if any(progress.request is request for progress in (*self.waiting, *self.running)):
            raise ValueError("this request was submitted already and has not ended")
        self.waiting.append(Progress(request))
        ### END SOLUTION

    def cancel(self, request: Request) -> bool:
        """Drop a request, waiting or running; returns whether it was there."""
        ### BEGIN SOLUTION
        for progress in (*self.waiting, *self.running):
            if progress.request is request:
                if progress in self.running:
                    del self.running[progress]
                else:
                    self.waiting.remove(progress)
                return True
        return False
        ### END SOLUTION

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most ``max_tokens`` tokens."""
        ### BEGIN SOLUTION
        planned: dict[Progress, int] = {}
        n_running = len(self.running)
        for progress in sorted(self.running, key=lambda it: it.n_pending > 1):  # first those that decode
            n = min(progress.n_pending, self.max_tokens - sum(planned.values()))
            if progress in self.running and n and self._find_blocks(progress, n, planned):
                planned[progress] = n
        while self.waiting and len(self.running) >= n_running:  # nobody is admitted in a step that preempts
            progress, budget = self.waiting[0], self.max_tokens - sum(planned.values())
            n = min(progress.n_pending, budget)
            if not n or self._blocks(n) > self.n_free:
                break
            self.running[self.waiting.popleft()] = self._blocks(n)
            planned[progress] = n
        return [Chunk(progress, planned[progress]) for progress in self.running if progress in planned]
        ### END SOLUTION

    def advance(self, chunk: Chunk, token: int | None = None) -> None:
        """Note that a chunk is in the cache, and which token came of it; a request that has all its tokens leaves."""
        ### BEGIN SOLUTION
        progress, n_tokens = chunk
        if progress in self.running:  # else it was cancelled meanwhile
            progress.n_cached += n_tokens
            if token is not None:
                progress.tokens.append(token)
                if progress.is_done:
                    del self.running[progress]
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _find_blocks(self, progress: Progress, n_tokens: int, planned: dict[Progress, int]) -> bool:
        """Take the blocks that a chunk needs, from the youngest requests if none are free; False if that is this one."""
        n_needed = self._blocks(progress.n_cached + n_tokens)
        while n_needed - self.running[progress] > self.n_free:
            youngest = next(reversed(self.running))
            del self.running[youngest]
            planned.pop(youngest, None)
            youngest.n_cached = 0
            self.waiting.appendleft(youngest)
            if youngest is progress:
                return False
        self.running[progress] = n_needed
        return True

    ### END SOLUTION


class Engine:
    """Runs a model on the chunks of a scheduler. (Exercise)"""

    def __init__(self, model: nn.Module, scheduler: Scheduler):
        ### BEGIN SOLUTION
        weight = next(model.parameters())
        self.model, self.scheduler = model, scheduler
        self.cache = PagedCache(
            model.config, scheduler.n_blocks, scheduler.block_size, dtype=weight.dtype, device=weight.device
        )
        self.sequences: dict[Progress, int] = {}  # in the cache
        ### END SOLUTION

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        ### BEGIN SOLUTION
        return bool(self.scheduler.waiting or self.scheduler.running)
        ### END SOLUTION

    def submit(self, request: Request) -> None:
        """Queue a request; it can be done between any two steps."""
        ### BEGIN SOLUTION
        check_request(request, self.model.config)
        self.scheduler.submit(request)
        ### END SOLUTION

    def cancel(self, request: Request) -> bool:
        """Drop a request and return its blocks at once."""
        ### BEGIN SOLUTION
        found = self.scheduler.cancel(request)
        self._release()
        return found
        ### END SOLUTION

    def step(self) -> list[tuple[Request, int]]:
        """Pass one step's tokens through the model; returns the new tokens."""
        ### BEGIN SOLUTION
        chunks = self.scheduler.schedule()
        self._release()
        if not chunks:
            return []
        slots = []
        for progress, n_tokens in chunks:
            if progress not in self.sequences:
                self.sequences[progress] = self.cache.new()
            slots.append(self.cache.extend(self.sequences[progress], n_tokens))
        logits = self._run(chunks, torch.cat(slots))
        completed = [chunk for chunk in chunks if chunk.completes]
        new = []
        for chunk, row in zip(completed, logits.split(1), strict=True):
            request, generator = chunk.progress.request, chunk.progress.random(row.device)
            token = sample_next(row, request.temperature, request.top_k, request.top_p, generator)
            new.append((request, int(token)))
        tokens = iter(token for _, token in new)
        for chunk in chunks:
            self.scheduler.advance(chunk, next(tokens) if chunk.completes else None)
        self._release()
        return new
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _release(self) -> None:
        """Free the sequences of requests that no longer run: ended, cancelled or preempted."""
        for progress in [progress for progress in self.sequences if progress not in self.scheduler.running]:
            self.cache.free(self.sequences.pop(progress))

    def _run(self, chunks: list[Chunk], slots: Tensor) -> Tensor:
        """The logits of the last tokens of those chunks that complete what their request knows."""
        parts = [(self.sequences[chunk.progress], chunk.n_tokens) for chunk in chunks]
        layout = lay_out(chunks, slots.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, slots, k, v)
            out = torch.empty_like(q)
            if len(layout.single):
                ones = [sequence for sequence, n in parts if n == 1]
                out[layout.single] = paged_attention(q[layout.single], self.cache, ones, layer)
            for (sequence, n), mine, queries in zip(parts, out.split(layout.sizes), q.split(layout.sizes), strict=True):
                if n > 1:
                    mine.copy_(_attend_chunk(queries, *self.cache.read(sequence, layer)))
            return out

        return next_logits(self.model, layout.tokens, layout.positions, layout.last, attend)

    ### END SOLUTION


### BEGIN SOLUTION
def _attend_chunk(q: Float[Tensor, "t h d"], k: Float[Tensor, "g s d"], v: Float[Tensor, "g s d"]) -> Tensor:
    """The newest T positions of a sequence attend to all S, none to a later one."""
    k, v = (repeat_kv(x[None], q.shape[1] // x.shape[0]) for x in (k, v))
    mask = causal_mask(q.shape[0], k.shape[2], q.device)
    return scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, mask)[0].transpose(0, 1)


### END SOLUTION


def generate_many(model: nn.Module, requests: Iterable[Request], scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
    """Continue many prompts together, and yield each token as soon as it is known. (Exercise)"""
    ### BEGIN SOLUTION
    engine, requests = Engine(model, scheduler), list(requests)
    try:
        for request in requests:
            engine.submit(request)
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in requests:
            engine.cancel(request)
    ### END SOLUTION
