"""Serving: many requests on one model, with a cache in blocks, a scheduler, shared prefixes and drafted tokens."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.serving import Runner
from lib.given.kernels.paged import launch_paged, table_of
from lib.given.models.captured import StaticInputs
from lib.given.models.gpus import Sheet
from lib.given.models.serving import BlockStore, Chunk, Node, OutOfBlocks, Progress, Queue, check_used, whole_blocks
from lib.given.models.serving import Request as Request
from solutions.attention import repeat_kv, scaled_dot_product_attention
from solutions.context_parallel import merge_attention
from solutions.llama import LlamaConfig, count_parameters, kv_cache_bytes, sample_next
from solutions.speed import roofline_seconds


def decode_seconds(config: LlamaConfig, card: Sheet, batch: int, length: int) -> float:
    """The least time in which a GPU can give each sequence of a batch one more token. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        config: The model's sizes.
        card: The GPU, of which ``peak_flops`` and memory ``bandwidth`` count.
        batch: Number of sequences B.
        length: Number of positions that each new token attends to, itself included.

    Returns:
        Seconds, by ``roofline_seconds`` of chapter 8.

        - Bytes, two for each value: every weight once, but only B rows of the embedding table, and the keys and values
          of all positions once.
        - FLOPs: those of all matrix products, attention's two included.
          Looking up, norms and rotations are not counted.
    """
    ### BEGIN SOLUTION
    weights, own, flops = _decode_costs(config, length)
    return roofline_seconds(batch * flops, weights + batch * own, card.peak_flops, card.bandwidth)
    ### END SOLUTION


def compute_bound_decode_batch(config: LlamaConfig, card: Sheet, length: int) -> float:
    """The smallest batch at which arithmetic, not memory traffic, sets the time of a decoding step. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Returns:
        The smallest batch, an ``int``, for which the FLOPs of ``decode_seconds`` take at least as long as the bytes;
        ``math.inf`` if no batch is large enough.
    """
    ### BEGIN SOLUTION
    weights, own, flops = _decode_costs(config, length)
    gain = flops * card.bandwidth / card.peak_flops - own  # by how many bytes one more sequence narrows the gap
    return math.ceil(weights / gain) if gain > 0 else math.inf
    ### END SOLUTION


### BEGIN SOLUTION
def _decode_costs(config: LlamaConfig, length: int) -> tuple[int, int, int]:
    weights = count_parameters(config) - config.vocab_size * config.dim
    products = weights - (2 * config.n_layers + 1) * config.dim + 2 * config.n_layers * config.dim * length
    return 2 * weights, 2 * config.dim + kv_cache_bytes(config, 1, length), 2 * products


### END SOLUTION


class BlockAllocator:
    """Hands out the blocks of a pool and counts the users of each. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        n_blocks: Number of blocks, which are numbered from 0.

    Attributes:
        n_users: List with the number of users of each block.
    """

    def __init__(self, n_blocks: int):
        ### BEGIN SOLUTION
        self.n_users, self.unused = [0] * n_blocks, list(range(n_blocks))
        ### END SOLUTION

    @property
    def n_free(self) -> int:
        """Number of blocks without a user."""
        ### BEGIN SOLUTION
        return len(self.unused)
        ### END SOLUTION

    def allocate(self) -> int:
        """Return a free block, which now has one user.

        If there is none, raise ``OutOfBlocks`` with the number of blocks in the pool.
        """
        ### BEGIN SOLUTION
        if not self.unused:
            raise OutOfBlocks(f"all {len(self.n_users)} blocks of the pool are in use")
        block = self.unused.pop()
        self.n_users[block] = 1
        return block
        ### END SOLUTION

    def share(self, block: int) -> int:
        """Give a block one more user, and return the block.

        The given ``check_used`` raises a ``ValueError`` if the block has no user or does not exist.
        """
        ### BEGIN SOLUTION
        check_used(self.n_users, block)
        self.n_users[block] += 1
        return block
        ### END SOLUTION

    def free(self, block: int) -> None:
        """Take one user away, or raise as ``share`` does; a block whose last user has left can be allocated again."""
        ### BEGIN SOLUTION
        check_used(self.n_users, block)
        self.n_users[block] -= 1
        if self.n_users[block] == 0:
            self.unused.append(block)
        ### END SOLUTION


class PagedCache(BlockStore):
    """Keys and values of many sequences, in blocks that each sequence lists in a table. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    Args:
        config: A ``LlamaConfig`` or a ``GPT2Config``.
        n_blocks: Number of blocks in the pool.
        block_size: Number of positions in a block, which holds them for all layers.
        dtype: Of keys and values, by default PyTorch's.
        device: Of keys and values, by default PyTorch's.

    Attributes:
        keys: Tensor ``[L, n_blocks, block_size, G, D]``, which the given ``BlockStore`` makes.
        values: Another one.
        allocator: The blocks' ``BlockAllocator``.
        tables: By a sequence's id, the list of its blocks.
            Position p is in block ``table[p // block_size]``, at place ``p % block_size``.
        lengths: By a sequence's id, the list of its lengths, one for each layer.

    The base class ``BlockStore`` is given, in ``lib/given/models/serving.py``:

    - ``write(layer, slots, k, v)`` stores keys and values ``[N, G, D]``, positions first, in N slots of a layer.
    - ``copy_block(block, into)`` copies all layers of the first block into the second.
    - ``length_of(sequence, layer=0)`` returns a length.
      An id that is unknown or was freed is a ``ValueError`` that names it.

    Source: PagedAttention (arXiv:2309.06180), sections 4.3 and 4.4.
    """

    def __init__(self, config, n_blocks: int, block_size: int = 16, dtype: torch.dtype | None = None, device=None):
        super().__init__(config, n_blocks, block_size, dtype, device)
        ### BEGIN SOLUTION
        self.allocator, self.n_made = BlockAllocator(n_blocks), 0
        ### END SOLUTION

    def new(self, blocks: Sequence[int] = ()) -> int:
        """Start a sequence and return its id, which no sequence had before.

        It begins with the positions of ``blocks``, full blocks in use, and becomes one more user of each.
        By default it is empty.
        """
        ### BEGIN SOLUTION
        self.n_made += 1
        self.tables[self.n_made] = [self.allocator.share(block) for block in blocks]
        self.lengths[self.n_made] = [len(blocks) * self.block_size] * len(self.keys)
        return self.n_made
        ### END SOLUTION

    def find_slots(self, sequence: int, start: int, end: int) -> list[int]:
        """Prepare positions ``start`` to ``end`` - 1 for writing, and return their slots: none if both are equal.

        - A slot is ``block * block_size`` plus the place in the block.
        - Missing blocks are allocated.
        - A block that other sequences use, too, is first replaced by a copy (``copy_block``, given).
        - If too few blocks are free for all of this, ``OutOfBlocks`` says how many are needed and how many are free,
          and nothing changes.
        """
        ### BEGIN SOLUTION
        self.length_of(sequence)  # raises the error for an unknown id
        table, size, n_blocks = self.tables[sequence], self.block_size, -(-end // self.block_size)
        shared = [i for i in range(start // size, min(n_blocks, len(table))) if self.allocator.n_users[table[i]] > 1]
        n_needed = max(0, n_blocks - len(table)) + len(shared)
        if n_needed > self.allocator.n_free:
            raise OutOfBlocks(f"{n_needed} blocks are needed and {self.allocator.n_free} are free")
        for i in shared:
            old, table[i] = table[i], self.allocator.allocate()
            self.copy_block(old, table[i])
            self.allocator.free(old)
        table += [self.allocator.allocate() for _ in range(n_blocks - len(table))]
        return [table[p // size] * size + p % size for p in range(start, end)]
        ### END SOLUTION

    def append(self, sequence: int, layer: int, k: Float[Tensor, "g t d"], v: Float[Tensor, "g t d"]) -> None:
        """Append T positions to one layer of a sequence, by ``check_shapes``, ``find_slots`` and ``write``.

        The first and the last are given; ``check_shapes`` raises a ``ValueError`` if k or v is not ``[G, T, D]``.
        A refused call changes nothing.
        """
        ### BEGIN SOLUTION
        self.check_shapes(k, v)
        start = self.length_of(sequence, layer)
        end = start + k.shape[1]
        self.write(layer, self.find_slots(sequence, start, end), k.transpose(0, 1), v.transpose(0, 1))
        self.lengths[sequence][layer] = end
        ### END SOLUTION

    def fork(self, sequence: int) -> int:
        """Start a sequence with the same positions and return its id.

        It shares all blocks; no keys or values are copied.
        """
        ### BEGIN SOLUTION
        self.length_of(sequence)
        copy = self.new(self.tables[sequence])
        self.lengths[copy] = list(self.lengths[sequence])
        return copy
        ### END SOLUTION

    def free(self, sequence: int) -> None:
        """Forget a sequence; each of its blocks loses a user."""
        ### BEGIN SOLUTION
        self.length_of(sequence)
        del self.lengths[sequence]
        for block in self.tables.pop(sequence):
            self.allocator.free(block)
        ### END SOLUTION


def paged_attention(q: Float[Tensor, "b h d"], cache: PagedCache, sequences: Sequence[int], layer: int = 0,
                    n_parts: int | None = None) -> Float[Tensor, "b h d"]:  # fmt: skip
    """Attention of one query of each sequence to all of the sequence's positions in a layer. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        q: ``[B, H, D]``, a query for each sequence; H is a multiple of the cache's G.
        cache: A ``PagedCache``.
        sequences: Ids of B sequences of any lengths; an id may occur twice.
        layer: The layer.
        n_parts: None, or a power of two.

            - If given: on any device, but not with float64, ``launch_paged`` (given) attends in float32 to that many
              parts of the positions, and ``merge_attention`` of chapter 18 joins them in pairs.
            - If None: on a GPU ``launch_paged`` chooses the number; on a CPU, and for float64 on any device, PyTorch
              gathers the blocks of ``table_of`` (given), without the kernel.

    Returns:
        ``[B, H, D]`` in the dtype of ``q``; 0 for a sequence without positions.
        Whatever a block holds beyond its sequence's positions, even NaN, has no effect.
    """
    ### BEGIN SOLUTION
    if n_parts or (q.is_cuda and q.dtype != torch.float64):
        o, lse = launch_paged(q, cache, sequences, layer, n_parts)
        while len(o) > 1:
            half = len(o) // 2
            o, lse = merge_attention(o[:half], lse[:half], o[half:], lse[half:])
        return o[0].to(q.dtype)
    table, lengths = table_of(cache, sequences, layer)
    k, v = (pool[layer][table].flatten(1, 2).transpose(1, 2) for pool in (cache.keys, cache.values))
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    k, v = (repeat_kv(x.masked_fill(~mask[:, None, :, None], 0), q.shape[1] // x.shape[1]) for x in (k, v))
    return scaled_dot_product_attention(q[:, :, None], k, v, mask[:, None, None]).squeeze(2)
    ### END SOLUTION


class PrefixTree:
    """Remembers which blocks hold which tokens, so that a common prefix is computed only once. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        block_size: Tokens of a block.
            Only whole blocks count: the given ``whole_blocks(tokens, block_size)`` cuts them.

    A ``Node(block, parent, piece)``, given in ``lib/given/models/serving.py``, is a block, and ``piece`` the tuple of
    its tokens. Its ``children`` are nodes by their pieces; its ``n_users`` and ``last_used`` are 0 at first.
    The path to it from ``root``, a ``Node()``, spells the tokens up to the block's end.
    ``match``, ``insert`` and ``acquire`` count as use of the nodes on their path.

    Source: SGLang (arXiv:2312.07104), section 3.
    """

    def __init__(self, block_size: int):
        ### BEGIN SOLUTION
        self.block_size, self.root, self.clock = block_size, Node(), 0
        self.acquired: dict[tuple[int, ...], list[list[Node]]] = {}
        ### END SOLUTION

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest remembered prefix."""
        ### BEGIN SOLUTION
        return [node.block for node in self._path(tokens)]
        ### END SOLUTION

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember a block for each whole block of tokens, except where one is remembered already.

        Returns the blocks that are new.
        If the numbers of blocks and of whole blocks of tokens differ, raises a ``ValueError`` with both.
        """
        ### BEGIN SOLUTION
        pieces, node, new = whole_blocks(tokens, self.block_size), self.root, []
        if len(pieces) != len(blocks):
            raise ValueError(f"{len(tokens)} tokens fill {len(pieces)} blocks, and {len(blocks)} blocks were given")
        for piece, block in zip(pieces, blocks, strict=True):
            if piece not in node.children:
                node.children[piece] = Node(block, node, piece)
                new.append(block)
            node = node.children[piece]
        self._path(tokens)
        return new
        ### END SOLUTION

    def acquire(self, tokens: Sequence[int]) -> list[int]:
        """As ``match``, but none of these blocks is evicted until it has been released as often as acquired."""
        ### BEGIN SOLUTION
        path = self._path(tokens)
        for node in path:
            node.n_users += 1
        self.acquired.setdefault(tuple(tokens), []).append(path)
        return [node.block for node in path]
        ### END SOLUTION

    def release(self, tokens: Sequence[int]) -> None:
        """Release the blocks that the oldest unreleased ``acquire`` of these tokens returned, and no others.

        Raises a ``ValueError`` if there is no such ``acquire``.
        """
        ### BEGIN SOLUTION
        if not self.acquired.get(tuple(tokens)):
            raise ValueError(f"these {len(tokens)} tokens are not acquired: released already, or never acquired")
        for node in self.acquired[tuple(tokens)].pop(0):
            node.n_users -= 1
        ### END SOLUTION

    def evict(self, n: int) -> list[int]:
        """Forget up to n blocks and return them, none if n is 0 or less.

        Each is the least recently used of the leaves (``root.leaves()``) that no one has acquired.
        """
        ### BEGIN SOLUTION
        evicted: list[int] = []
        while len(evicted) < n and (leaves := [leaf for leaf in self.root.leaves() if leaf.n_users == 0]):
            leaf = min(leaves, key=lambda leaf: leaf.last_used)
            del leaf.parent.children[leaf.piece]
            evicted.append(leaf.block)
        return evicted
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _path(self, tokens: Sequence[int]) -> list[Node]:
        self.clock, path = self.clock + 1, [self.root]
        for piece in whole_blocks(tokens, self.block_size):
            if piece not in path[-1].children:
                break
            path.append(path[-1].children[piece])
            path[-1].last_used = self.clock
        return path[1:]

    ### END SOLUTION


class Scheduler(Queue):
    """Decides, step by step, which tokens of which requests pass through the model. (Exercise)

    Size: 50 minutes, difficulty 5, core.

    Args:
        max_tokens: Most tokens in a step, over all requests.
        n_blocks: Blocks in the cache's pool.
        block_size: Positions in a block.

    The base class ``Queue`` is given, in ``lib/given/models/serving.py``:

    - A ``Progress(request)`` has the ``request`` and its ``tokens`` so far.
      ``n_cached`` of these are in the cache, and ``n_pending`` are not.
    - ``waiting`` is a deque of ``Progress`` without blocks, the oldest first.
    - ``running`` maps each admitted ``Progress`` to its number of blocks, the oldest first.
    - ``n_free`` and ``blocks_for(n_positions)`` count blocks.
    - ``advance(chunk, token)`` notes after a step that a chunk was computed, and the new token or None.

    Source: continuous batching, Orca (OSDI 2022), section 3;
        chunks of prompts, Sarathi-Serve (arXiv:2403.02310), section 4.
    """

    def submit(self, request: Request) -> None:
        """Queue a request as the youngest; allowed between any two steps.

        - ``check_new`` (given) raises a ``ValueError`` if the request waits or runs already.
        - A request that would not fit even alone is a ``ValueError`` with both numbers of blocks.
          It needs blocks for all its tokens, prompt and new ones, except the last, which is never cached.
        """
        ### BEGIN SOLUTION
        self.check_new(request)
        n_needed = self.blocks_for(len(request.tokens) + request.max_new_tokens - 1)
        if n_needed > self.n_blocks:
            raise ValueError(f"{n_needed} blocks of {self.block_size} are needed, and the pool has {self.n_blocks}")
        self.waiting.append(Progress(request))
        ### END SOLUTION

    def schedule(self) -> list[Chunk]:
        """The next step: a list with a ``Chunk(progress, n_tokens)`` (given) for each request that takes part.

        1. The oldest requests are served first, and the list has the same order.
        2. Running requests, in order of age, get as many of their pending tokens as the step has room for.
        3. If one lacks blocks, ``preempt`` takes those of the youngest running request until there are enough.
           The youngest may be the request itself.
        4. Preemption frees blocks, and leaves the step's room as it is: the youngest's turn comes last, so a request
           that is preempted has no chunk yet.
        5. If none was preempted, waiting requests are then admitted in order, as long as the step has room and the
           blocks of the next one's first chunk are free. After a preemption none is: the request just preempted is
           first in the queue, and would take its blocks back.
        """
        ### BEGIN SOLUTION
        chunks, room, n_running = list[Chunk](), self.max_tokens, len(self.running)
        for progress in list(self.running):
            n = min(progress.n_pending, room)
            n_needed = self.blocks_for(progress.n_cached + n)
            grows = n_needed > self.running.get(progress, n_needed)  # one that was preempted grows no more
            while grows and progress in self.running and n_needed - self.running[progress] > self.n_free:
                self.preempt()
            if progress in self.running and n:
                chunks.append(Chunk(progress, n))
                self.running[progress] = n_needed
                room -= n
        while self.waiting and room and len(self.running) >= n_running:
            n = min(self.waiting[0].n_pending, room)
            if self.blocks_for(n) > self.n_free:
                break
            progress = self.waiting.popleft()
            chunks.append(Chunk(progress, n))
            self.running[progress] = self.blocks_for(n)
            room -= n
        return chunks
        ### END SOLUTION

    def preempt(self) -> Progress:
        """Take the blocks of the youngest running request and return the request.

        Its cache is forgotten, and it waits at the head of the queue.
        """
        ### BEGIN SOLUTION
        youngest, _ = self.running.popitem()
        youngest.n_cached = 0
        self.waiting.appendleft(youngest)
        return youngest
        ### END SOLUTION


class Engine(Runner):
    """A model (``Llama`` or ``GPT2``) with a scheduler and a cache; it takes requests between any two steps. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        model: A ``Llama`` or a ``GPT2``.
        scheduler: A ``Scheduler``, which decides what each step computes.

    The base class ``Runner`` is given:

    - ``submit(request)`` queues a request, and ``cancel(request)`` drops one.
    - ``is_busy`` says whether a request waits or runs.
    - ``release()`` frees the cache of requests that no longer run.
    - ``run(chunks)`` passes chunks through the model.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler):
        super().__init__(model, scheduler, PagedCache, paged_attention)

    def step(self) -> list[tuple[Request, int]]:
        """Run the scheduler's next chunks; returns the new tokens, each with its request.

        - ``run`` returns logits ``[V]`` for each chunk.
        - Only for a chunk that ``completes`` is a token drawn from them, by chapter 4's ``sample_next`` with the
          arguments ``progress.sampling(device)`` (given).
        - After each chunk ``self.scheduler.advance(chunk, token)`` is called, with None if no token was drawn.
        - Caches are released before the chunks run, because the chunks need their blocks, and again at the end of the
          step, for requests that have ended.
        """
        ### BEGIN SOLUTION
        chunks, new = self.scheduler.schedule(), []
        self.release()
        for chunk, logits in zip(chunks, self.run(chunks), strict=True):
            request, token = chunk.progress.request, None
            if chunk.completes:
                token = int(sample_next(logits[None], **chunk.progress.sampling(logits.device)))
                new.append((request, token))
            self.scheduler.advance(chunk, token)
        self.release()
        return new
        ### END SOLUTION


def generate_many(model: nn.Module, requests: Iterable[Request], scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
    """Continue many prompts together, with an ``Engine`` to which all are submitted before its first step. (Exercise)

    Size: 20 minutes, difficulty 2, warm-up.

    Args:
        model: As for ``Engine``.
        requests: The prompts; they may come from a generator, which can be read only once.
        scheduler: As for ``Engine``.

    Yields:
        ``(request, token)`` as soon as the token is known, until all requests have ended.
        If one is refused, or the caller stops early, the requests that this call submitted are cancelled, and no
        others.
    """
    ### BEGIN SOLUTION
    engine, submitted = Engine(model, scheduler), list[Request]()
    try:
        for request in requests:
            engine.submit(request)
            submitted.append(request)
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in submitted:
            engine.cancel(request)
    ### END SOLUTION


def speculative_step(target: Float[Tensor, "k_plus_1 v"], draft: Float[Tensor, "k v"], drafted: Int[Tensor, " k"],
                     generator: torch.Generator | None = None) -> Int[Tensor, " n"]:  # fmt: skip
    """Keep drafted tokens as long as the target agrees, and add one token of the target's own. (Exercise)

    Size: 30 minutes, difficulty 4, core.

    Args:
        target: Probabilities ``[k + 1, V]``: the large model's distribution at each of the k drafted tokens, and in the
            last row that of the token after them.
        draft: Probabilities ``[k, V]``: the small model's distribution at each drafted token.
        drafted: k tokens; token i was drawn from row i of ``draft``.
        generator: Source of the random numbers, None for PyTorch's global one.

    Returns:
        1 to k + 1 tokens, int64, distributed exactly as draws from ``target``.

        - Token i is kept with probability min(1, p/q), p its probability in ``target`` and q in ``draft``.
        - The first that is not kept ends the step, and a draw from max(0, p - q), normalised, takes its place.
        - If all are kept, the last token is a draw from the last row of ``target``.
        - One-hot rows give greedy decoding.
        - Where max(0, p - q) is 0 for all tokens, because p and q differ by rounding only, the draw is from p.

    Source: Leviathan, Kalman and Matias (arXiv:2211.17192), algorithm 1.
    """
    ### BEGIN SOLUTION
    places = torch.arange(len(drafted), device=target.device)
    uniform = torch.rand(len(drafted), generator=generator, device=target.device)
    kept = uniform * draft[places, drafted] < target[places, drafted]
    n_kept = int(kept.long().cumprod(0).sum())
    rest = (target - nn.functional.pad(draft, (0, 0, 0, 1)))[n_kept].clamp(min=0)  # behind the last draft q is 0
    rest = rest if rest.any() else target[n_kept]  # p and q differ by rounding only
    return torch.cat([drafted[:n_kept], torch.multinomial(rest, 1, generator=generator)])
    ### END SOLUTION


def expected_tokens(acceptance: float, n_drafted: int) -> float:
    """Mean number of tokens in a speculative step, if each drafted token is kept with the same probability. (Exercise)

    Size: 15 minutes, difficulty 2, stretch.

    Returns:
        The mean; a ``ValueError`` that names ``acceptance``, the probability, if it is not from 0 to 1.

    Source: Leviathan, Kalman and Matias (arXiv:2211.17192), equation (1).
    """
    ### BEGIN SOLUTION
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance = {acceptance}: expected a probability from 0 to 1")
    return float(sum(acceptance**i for i in range(n_drafted + 1)))
    ### END SOLUTION


def fill_static_inputs(
    inputs: StaticInputs, cache: PagedCache, sequences: Sequence[int], tokens: Sequence[int]
) -> None:
    """Write what a captured decoding step needs into the buffers that it reads, in place. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        inputs: Buffers (given) of N rows, int64: ``tokens``, ``positions``, ``slots`` and ``lengths`` ``[N]``, and
            ``tables`` ``[N, M]``. They still hold the rows of the step before.
        cache: A ``PagedCache``, which has the blocks that the step needs.
        sequences: Ids of B sequences, all different. A sequence has one length in all layers, and fits into M blocks.
        tokens: The next token of each.

    Returns:
        Nothing.

        - Row i takes the token of ``sequences[i]``, its position, its slot (from ``find_slots``), its length, which
          counts the new position, and its table, which has a block for it.
        - Rows B to N - 1 are padding: a slot of -1, so that the step writes nothing, and a length of 0. Their other
          numbers change no result, but the model looks them up, so they must be valid; 0 always is.
        - In ``cache.lengths`` each sequence is one position longer in all layers, before any key is written.
        - Every buffer keeps its address, its shape and its dtype; only its numbers change. One copy a buffer is enough;
          on a GPU each write of a single number would be a launch of its own.

    Raises:
        ValueError: There are more sequences than rows. The message has both numbers, and nothing has changed.
    """
    ### BEGIN SOLUTION
    (n_rows, width), n = inputs.tables.shape, len(sequences)
    if n > n_rows:
        raise ValueError(f"{n} sequences do not fit into {n_rows} rows")
    rows, tables = [(0, 0, -1, 0)] * n_rows, [[0] * width] * n_rows  # padding
    for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
        position = cache.length_of(sequence)
        (slot,) = cache.find_slots(sequence, position, position + 1)
        cache.lengths[sequence] = [position + 1] * len(cache.keys)
        table = cache.tables[sequence]
        rows[i], tables[i] = (token, position, slot, position + 1), table + [0] * (width - len(table))
    buffers = inputs.tokens, inputs.positions, inputs.slots, inputs.lengths
    for buffer, column in zip(buffers, torch.tensor(rows).T, strict=True):
        buffer.copy_(column)
    inputs.tables.copy_(torch.tensor(tables))
    ### END SOLUTION
