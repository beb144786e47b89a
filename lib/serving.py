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
from lib.attention import repeat_kv, scaled_dot_product_attention
from lib.context_parallel import merge_attention
from lib.llama import LlamaConfig, count_parameters, kv_cache_bytes, sample_next
from lib.speed import roofline_seconds


def decode_seconds(config: LlamaConfig, card: Sheet, batch: int, length: int) -> float:
    """The least time in which a GPU can give each sequence of a batch one more token. (Exercise 21.1)

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
    raise NotImplementedError("Exercise 21.1: write decode_seconds")


def compute_bound_decode_batch(config: LlamaConfig, card: Sheet, length: int) -> float:
    """The smallest batch at which arithmetic, not memory traffic, sets the time of a decoding step. (Exercise 21.2)

    Size: 15 minutes, difficulty 2, core.

    Returns:
        The smallest batch, an ``int``, for which the FLOPs of ``decode_seconds`` take at least as long as the bytes;
        ``math.inf`` if no batch is large enough.
    """
    raise NotImplementedError("Exercise 21.2: write compute_bound_decode_batch")


class BlockAllocator:
    """Hands out the blocks of a pool and counts the users of each. (Exercise 21.3)

    Size: 25 minutes, difficulty 3, core.

    Args:
        n_blocks: Number of blocks, which are numbered from 0.

    Attributes:
        n_users: List with the number of users of each block.
    """

    def __init__(self, n_blocks: int):
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.__init__")

    @property
    def n_free(self) -> int:
        """Number of blocks without a user."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.n_free")

    def allocate(self) -> int:
        """Return a free block, which now has one user.

        If there is none, raise ``OutOfBlocks`` with the number of blocks in the pool.
        """
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.allocate")

    def share(self, block: int) -> int:
        """Give a block one more user, and return the block.

        The given ``check_used`` raises a ``ValueError`` if the block has no user or does not exist.
        """
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.share")

    def free(self, block: int) -> None:
        """Take one user away, or raise as ``share`` does; a block whose last user has left can be allocated again."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.free")


class PagedCache(BlockStore):
    """Keys and values of many sequences, in blocks that each sequence lists in a table. (Exercise 21.4)

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
        raise NotImplementedError("Exercise 21.4: write PagedCache.__init__")

    def new(self, blocks: Sequence[int] = ()) -> int:
        """Start a sequence and return its id, which no sequence had before.

        It begins with the positions of ``blocks``, full blocks in use, and becomes one more user of each.
        By default it is empty.
        """
        raise NotImplementedError("Exercise 21.4: write PagedCache.new")

    def find_slots(self, sequence: int, start: int, end: int) -> list[int]:
        """Prepare positions ``start`` to ``end`` - 1 for writing, and return their slots: none if both are equal.

        - A slot is ``block * block_size`` plus the place in the block.
        - Missing blocks are allocated.
        - A block that other sequences use, too, is first replaced by a copy (``copy_block``, given).
        - If too few blocks are free for all of this, ``OutOfBlocks`` says how many are needed and how many are free,
          and nothing changes.
        """
        raise NotImplementedError("Exercise 21.4: write PagedCache.find_slots")

    def append(self, sequence: int, layer: int, k: Float[Tensor, "g t d"], v: Float[Tensor, "g t d"]) -> None:
        """Append T positions to one layer of a sequence, by ``check_shapes``, ``find_slots`` and ``write``.

        The first and the last are given; ``check_shapes`` raises a ``ValueError`` if k or v is not ``[G, T, D]``.
        A refused call changes nothing.
        """
        raise NotImplementedError("Exercise 21.4: write PagedCache.append")

    def fork(self, sequence: int) -> int:
        """Start a sequence with the same positions and return its id.

        It shares all blocks; no keys or values are copied.
        """
        raise NotImplementedError("Exercise 21.4: write PagedCache.fork")

    def free(self, sequence: int) -> None:
        """Forget a sequence; each of its blocks loses a user."""
        raise NotImplementedError("Exercise 21.4: write PagedCache.free")


def paged_attention(q: Float[Tensor, "b h d"], cache: PagedCache, sequences: Sequence[int], layer: int = 0,
                    n_parts: int | None = None) -> Float[Tensor, "b h d"]:  # fmt: skip
    """Attention of one query of each sequence to all of the sequence's positions in a layer. (Exercise 21.5)

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
    raise NotImplementedError("Exercise 21.5: write paged_attention")


class PrefixTree:
    """Remembers which blocks hold which tokens, so that a common prefix is computed only once. (Exercise 21.6)

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
        raise NotImplementedError("Exercise 21.6: write PrefixTree.__init__")

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest remembered prefix."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.match")

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember a block for each whole block of tokens, except where one is remembered already.

        Returns the blocks that are new.
        If the numbers of blocks and of whole blocks of tokens differ, raises a ``ValueError`` with both.
        """
        raise NotImplementedError("Exercise 21.6: write PrefixTree.insert")

    def acquire(self, tokens: Sequence[int]) -> list[int]:
        """As ``match``, but none of these blocks is evicted until it has been released as often as acquired."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.acquire")

    def release(self, tokens: Sequence[int]) -> None:
        """Release the blocks that the oldest unreleased ``acquire`` of these tokens returned, and no others.

        Raises a ``ValueError`` if there is no such ``acquire``.
        """
        raise NotImplementedError("Exercise 21.6: write PrefixTree.release")

    def evict(self, n: int) -> list[int]:
        """Forget up to n blocks and return them, none if n is 0 or less.

        Each is the least recently used of the leaves (``root.leaves()``) that no one has acquired.
        """
        raise NotImplementedError("Exercise 21.6: write PrefixTree.evict")


class Scheduler(Queue):
    """Decides, step by step, which tokens of which requests pass through the model. (Exercise 21.7)

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
        raise NotImplementedError("Exercise 21.7: write Scheduler.submit")

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
        raise NotImplementedError("Exercise 21.7: write Scheduler.schedule")

    def preempt(self) -> Progress:
        """Take the blocks of the youngest running request and return the request.

        Its cache is forgotten, and it waits at the head of the queue.
        """
        raise NotImplementedError("Exercise 21.7: write Scheduler.preempt")


class Engine(Runner):
    """A model (``Llama`` or ``GPT2``) with a scheduler and a cache; it takes requests between any two steps. (Exercise 21.8)

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
        raise NotImplementedError("Exercise 21.8: write Engine.step")


def generate_many(model: nn.Module, requests: Iterable[Request], scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
    """Continue many prompts together, with an ``Engine`` to which all are submitted before its first step. (Exercise 21.9)

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
    raise NotImplementedError("Exercise 21.9: write generate_many")


def speculative_step(target: Float[Tensor, "k_plus_1 v"], draft: Float[Tensor, "k v"], drafted: Int[Tensor, " k"],
                     generator: torch.Generator | None = None) -> Int[Tensor, " n"]:  # fmt: skip
    """Keep drafted tokens as long as the target agrees, and add one token of the target's own. (Exercise 21.10)

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
    raise NotImplementedError("Exercise 21.10: write speculative_step")


def expected_tokens(acceptance: float, n_drafted: int) -> float:
    """Mean number of tokens in a speculative step, if each drafted token is kept with the same probability. (Exercise 21.11)

    Size: 15 minutes, difficulty 2, stretch.

    Returns:
        The mean; a ``ValueError`` that names ``acceptance``, the probability, if it is not from 0 to 1.

    Source: Leviathan, Kalman and Matias (arXiv:2211.17192), equation (1).
    """
    raise NotImplementedError("Exercise 21.11: write expected_tokens")


def fill_static_inputs(
    inputs: StaticInputs, cache: PagedCache, sequences: Sequence[int], tokens: Sequence[int]
) -> None:
    """Write what a captured decoding step needs into the buffers that it reads, in place. (Exercise 21.12)

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
    raise NotImplementedError("Exercise 21.12: write fill_static_inputs")
