"""Serving: many requests on one model, with a cache in blocks, a scheduler, shared prefixes and drafted tokens."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.serving import Runner
from lib.given.kernels.paged import launch_paged, table_of
from lib.given.models.gpus import Sheet
from lib.given.models.serving import BlockStore, Chunk, Node, OutOfBlocks, Progress, Queue, check_used, whole_blocks
from lib.given.models.serving import Request as Request
from lib.attention import repeat_kv, scaled_dot_product_attention
from lib.context_parallel import merge_attention
from lib.llama import LlamaConfig, count_parameters, kv_cache_bytes, sample_next
from lib.speed import roofline_seconds


def decode_seconds(config: LlamaConfig, card: Sheet, batch: int, length: int) -> float:
    """The least time in which a GPU can give each sequence of a batch one more token. (Exercise 21.1)

    Args:
        config, card: The model's sizes; a GPU's ``peak_flops`` and memory ``bandwidth``.
        batch, length: Number of sequences B; positions that each new token attends to, itself included.

    Returns:
        Seconds, by ``roofline_seconds`` of chapter 8. Bytes: every weight once, but of the embedding table only B rows, and the keys and values of all positions once; two bytes a value.
        FLOPs: those of all matrix products, attention's two included; looking up, norms and rotations are none.
    """
    raise NotImplementedError("Exercise 21.1: write decode_seconds")


def compute_bound_decode_batch(config: LlamaConfig, card: Sheet, length: int) -> float:
    """From how many sequences on arithmetic, not memory traffic, sets the time of a decoding step. (Exercise 21.2)

    Returns:
        The smallest batch, an ``int``, whose FLOPs in ``decode_seconds`` take at least as long as its bytes; ``math.inf`` if no batch is large enough.
    """
    raise NotImplementedError("Exercise 21.2: write compute_bound_decode_batch")


class BlockAllocator:
    """Hands out the blocks of a pool, numbered from 0 to ``n_blocks`` - 1, and lists in ``n_users`` how many users each has. (Exercise 21.3)"""

    def __init__(self, n_blocks: int):
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.__init__")

    @property
    def n_free(self) -> int:
        """Number of blocks without a user."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.n_free")

    def allocate(self) -> int:
        """A block that had no user and has one now; ``OutOfBlocks`` if there is none, and the message says how many blocks the pool has."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.allocate")

    def share(self, block: int) -> int:
        """Give a block one more user, and return the block; the given ``check_used`` raises a ``ValueError`` if it has none or does not exist."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.share")

    def free(self, block: int) -> None:
        """Take one user away, or raise as ``share`` does; without a user a block can be allocated again."""
        raise NotImplementedError("Exercise 21.3: write BlockAllocator.free")


class PagedCache(BlockStore):
    """Keys and values of many sequences, in blocks that each sequence lists in a table. (Exercise 21.4)

    Args:
        config, dtype, device: A ``LlamaConfig`` or a ``GPT2Config``; of keys and values, PyTorch's defaults unless given.
        n_blocks, block_size: Blocks in the pool; positions in a block, which holds them in all layers.

    Attributes:
        keys, values, allocator: ``[L, n_blocks, block_size, G, D]``, of the given ``BlockStore``; a ``BlockAllocator`` of the blocks.
        tables, lengths: For each sequence's id the list of its blocks, and the list of its lengths, one a layer. Position p is in block ``table[p // block_size]``, at place ``p % block_size``.

    An id that is unknown or was freed is a ``ValueError`` that names it (the given ``length_of`` raises it).
    Source: PagedAttention (arXiv:2309.06180), sections 4.3 and 4.4.
    """

    def __init__(self, config, n_blocks: int, block_size: int = 16, dtype: torch.dtype | None = None, device=None):
        super().__init__(config, n_blocks, block_size, dtype, device)
        raise NotImplementedError("Exercise 21.4: write PagedCache.__init__")

    def new(self, blocks: Sequence[int] = ()) -> int:
        """The id of a new sequence, an id that none had before. It begins with the positions of ``blocks``, full blocks in use, and becomes one more user of each; without any it is empty."""
        raise NotImplementedError("Exercise 21.4: write PagedCache.new")

    def find_slots(self, sequence: int, start: int, end: int) -> list[int]:
        """Prepare positions ``start`` to ``end`` - 1 for writing, and return their slots, ``block * block_size`` plus the place in the block.

        Missing blocks are allocated, and a block that others use, too, is first exchanged for a copy (``copy_block``, given).
        If too few are free for all this, ``OutOfBlocks`` says how many are needed and how many are free, and nothing changes.
        """
        raise NotImplementedError("Exercise 21.4: write PagedCache.find_slots")

    def append(self, sequence: int, layer: int, k: Float[Tensor, "g t d"], v: Float[Tensor, "g t d"]) -> None:
        """Append T positions to one layer of a sequence, by ``check_shapes`` (given: a ``ValueError`` if they are not ``[G, T, D]``), ``find_slots`` and ``write`` (given). A refused call changes nothing."""
        raise NotImplementedError("Exercise 21.4: write PagedCache.append")

    def fork(self, sequence: int) -> int:
        """The id of a new sequence with the same positions, which shares all blocks; nothing is copied."""
        raise NotImplementedError("Exercise 21.4: write PagedCache.fork")

    def free(self, sequence: int) -> None:
        """Forget a sequence; each of its blocks loses a user."""
        raise NotImplementedError("Exercise 21.4: write PagedCache.free")


def paged_attention(q: Float[Tensor, "b h d"], cache: PagedCache, sequences: Sequence[int], layer: int = 0,
                    n_parts: int | None = None) -> Float[Tensor, "b h d"]:  # fmt: skip
    """Attention of one query of each sequence to all of the sequence's positions in a layer. (Exercise 21.5)

    Args:
        q: ``[B, H, D]``, a query for each sequence; H is a multiple of the cache's G.
        cache, sequences, layer: A ``PagedCache``; ids of B sequences of any lengths, of which one may occur twice; the layer.
        n_parts: A power of two, not with float64: on any device, ``launch_paged`` (given) attends in float32 to so many parts of the positions, which ``merge_attention`` of chapter 18 joins in pairs. None: on a GPU ``launch_paged`` chooses the number; on a CPU, and for float64 on any device, PyTorch gathers the blocks of ``table_of`` (given), without the kernel.

    Returns:
        ``[B, H, D]`` in the dtype of ``q``; 0 for a sequence without positions. Whatever a block holds beyond a sequence's positions, NaN too, has no effect.
    """
    raise NotImplementedError("Exercise 21.5: write paged_attention")


class PrefixTree:
    """Remembers which blocks hold the keys and values of which tokens, so that equal beginnings are computed once. (Exercise 21.6)

    Args:
        block_size: Tokens of a block. Only whole blocks count: the given ``whole_blocks(tokens, block_size)`` cuts them.

    Each given ``Node`` is a block, and the way to it from ``root`` spells the tokens up to its end. ``match``, ``insert`` and ``acquire`` use the nodes on their way: these become the most recently used.
    Source: SGLang (arXiv:2312.07104), section 3.
    """

    def __init__(self, block_size: int):
        raise NotImplementedError("Exercise 21.6: write PrefixTree.__init__")

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest remembered prefix."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.match")

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember a block for each whole block of tokens, except where one is remembered already; returns those that are new. A ``ValueError`` with both numbers if there are more or fewer of the one than of the other."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.insert")

    def acquire(self, tokens: Sequence[int]) -> list[int]:
        """As ``match``; none of these blocks is evicted until it was released as often as acquired."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.acquire")

    def release(self, tokens: Sequence[int]) -> None:
        """Release the blocks that the oldest ``acquire`` of these tokens returned, no others; a ``ValueError`` if it was not called, or they were released already."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.release")

    def evict(self, n: int) -> list[int]:
        """Forget up to n blocks, none if n is 0 or less, and return them, each the least recently used of the leaves (``root.leaves()``) that nobody has acquired."""
        raise NotImplementedError("Exercise 21.6: write PrefixTree.evict")


class Scheduler(Queue):
    """Decides, step by step, which tokens of which requests pass through the model. (Exercise 21.7)

    Args:
        max_tokens, n_blocks, block_size: Tokens that a step passes at most, over all requests; blocks in the cache's pool, and positions in each.

    The given ``Queue`` keeps ``waiting``, a deque of ``Progress`` without blocks, and ``running``, the number of blocks of each admitted ``Progress``, both with the oldest first; ``n_free`` and ``blocks_for(n_positions)`` count blocks. After each step ``advance`` (given) notes what was computed.
    Source: continuous batching, Orca (OSDI 2022), section 3; chunks of prompts, Sarathi-Serve (arXiv:2403.02310), section 4.
    """

    def submit(self, request: Request) -> None:
        """Queue a request, between any two steps, as the youngest. ``check_new`` (given) raises a ``ValueError`` if it waits or runs already.

        A request that would not fit even alone is a ``ValueError`` with both numbers of blocks: of its tokens, old and new, all are cached but the last.
        """
        raise NotImplementedError("Exercise 21.7: write Scheduler.submit")

    def schedule(self) -> list[Chunk]:
        """The next step: a list with a ``Chunk(progress, n_tokens)`` (given) for each request that takes part. Age decides who is served first, and the list has the same order: the oldest first.

        Running requests, in order of age, get as many of their pending tokens as the step has room for. If one lacks blocks, ``preempt`` takes those of the youngest running request until there are enough; the youngest may be the request itself.
        Who is preempted has no chunk yet, so this frees blocks and no room. Then, if nobody was preempted, waiting requests are admitted in order, as long as the step has room and the blocks of the next one's first chunk are free.
        """
        raise NotImplementedError("Exercise 21.7: write Scheduler.schedule")

    def preempt(self) -> Progress:
        """Take the blocks of the youngest running request and return it: its cache is forgotten, and it waits at the head of the queue."""
        raise NotImplementedError("Exercise 21.7: write Scheduler.preempt")


class Engine(Runner):
    """A model (``Llama`` or ``GPT2``) with a scheduler and a cache; it takes requests between any two steps. (Exercise 21.8)

    The given ``Runner`` has ``submit(request)``, ``cancel(request)``, ``is_busy``, and the two parts of a step: ``release()`` frees the cache of requests that no longer run, ``run(chunks)`` passes chunks through the model.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler):
        super().__init__(model, scheduler, PagedCache, paged_attention)

    def step(self) -> list[tuple[Request, int]]:
        """Run the scheduler's next chunks; returns the new tokens, each with its request.

        ``run`` gives logits ``[V]`` for each chunk, of which only a chunk that ``completes`` chooses a token: chapter 4's ``sample_next`` with the arguments ``progress.sampling(device)`` (given).
        Caches are released before chunks need their blocks, and again when requests have ended.
        """
        raise NotImplementedError("Exercise 21.8: write Engine.step")


def generate_many(model: nn.Module, requests: Iterable[Request], scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
    """Continue many prompts together, by an ``Engine`` to which all are submitted before its first step. (Exercise 21.9)

    Yields:
        ``(request, token)`` as soon as the token is known, until all have ended. If a request is refused, or the caller stops earlier, those that this call submitted are cancelled, and no others.
    """
    raise NotImplementedError("Exercise 21.9: write generate_many")


def speculative_step(target: Float[Tensor, "k_plus_1 v"], draft: Float[Tensor, "k v"], drafted: Int[Tensor, " k"],
                     generator: torch.Generator | None = None) -> Int[Tensor, " n"]:  # fmt: skip
    """Keep drafted tokens as long as the target agrees, and add one token of the target's own. (Exercise 21.10)

    Args:
        target, draft: Probabilities ``[k + 1, V]`` and ``[k, V]``: what the large and the small model would draw from at the k drafted tokens, and the large one after them.
        drafted, generator: k tokens, token i drawn from row i of ``draft``; source of the random numbers, None for PyTorch's global one.

    Returns:
        1 to k + 1 tokens, int64, distributed exactly as draws from ``target``. Token i is kept with probability min(1, p/q); the first that is not ends the step, and a draw
        from max(0, p - q), normalised, takes its place. If all are kept, the last token is a draw from the last row of ``target``. One-hot rows give greedy decoding.

    Source: Leviathan, Kalman and Matias (arXiv:2211.17192), algorithm 1.
    """
    raise NotImplementedError("Exercise 21.10: write speculative_step")


def expected_tokens(acceptance: float, n_drafted: int) -> float:
    """How many tokens a speculative step gives on average, if each drafted token is kept with the same probability. (Exercise 21.11)

    Returns:
        The mean; a ``ValueError`` that names ``acceptance``, that probability, if it is not from 0 to 1.

    Source: Leviathan, Kalman and Matias (arXiv:2211.17192), equation (1).
    """
    raise NotImplementedError("Exercise 21.11: write expected_tokens")
