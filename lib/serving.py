"""Serving: many requests on one model, with a cache in blocks, a scheduler, shared prefixes and drafted tokens."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.given.models.serving import Chunk, OutOfBlocks, Progress, cache_sizes, check_request, lay_out, next_logits
from lib.given.models.serving import Request as Request
from lib.attention import causal_mask, repeat_kv, scaled_dot_product_attention
from lib.llama import sample_next


class BlockAllocator:
    """Lends the blocks of a pool, and counts how many users each block has. (Exercise 21.1)

    Args:
        n_blocks: Blocks in the pool, numbered from 0.

    Attributes:
        n_free: Blocks that nobody uses.

    Source: PagedAttention (arXiv:2309.06180), section 4.4.
    """

    def __init__(self, n_blocks: int):
        raise NotImplementedError("Exercise 21.1: write BlockAllocator.__init__")

    @property
    def n_free(self) -> int:
        """Blocks that nobody uses."""
        raise NotImplementedError("Exercise 21.1: write BlockAllocator.n_free")

    def allocate(self) -> int:
        """An unused block, which has one user now; ``OutOfBlocks`` if there is none, and the message says how many the pool has."""
        raise NotImplementedError("Exercise 21.1: write BlockAllocator.allocate")

    def share(self, block: int) -> int:
        """Count one more user of a block in use, and return the block; a ``ValueError`` that names the block if nobody uses it."""
        raise NotImplementedError("Exercise 21.1: write BlockAllocator.share")

    def free(self, block: int) -> None:
        """Count one user less; after the last one the block is unused. A ``ValueError`` that names the block if nobody uses it."""
        raise NotImplementedError("Exercise 21.1: write BlockAllocator.free")


class PagedCache:
    """Keys and values of many sequences, in blocks that a table lists for each sequence. (Exercise 21.2)

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
        raise NotImplementedError("Exercise 21.2: write PagedCache.__init__")

    def new(self) -> int:
        """The id of a new, empty sequence. No id is given twice."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.new")

    def length(self, sequence: int, layer: int = 0) -> int:
        """Positions that a sequence has in a layer."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.length")

    def extend(self, sequence: int, n_tokens: int) -> Int[Tensor, " t"]:
        """Make room for ``n_tokens`` more positions in all layers; returns their slots ``block * block_size + offset``.

        The new positions lie in blocks that no other sequence uses: a shared block is copied first, in all layers. If the free blocks don't suffice,
        ``OutOfBlocks`` says how many are needed and how many are free, and nothing is changed.
        """
        raise NotImplementedError("Exercise 21.2: write PagedCache.extend")

    def write(self, layer: int, slots: Int[Tensor, " t"], k: Float[Tensor, "t g d"], v: Float[Tensor, "t g d"]) -> None:
        """Store the keys and values of a layer in the slots that ``extend`` returned, of one sequence or of several."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.write")

    def append(self, sequence: int, layer: int, k: Float[Tensor, "g t d"], v: Float[Tensor, "g t d"]) -> None:
        """Append T positions to one layer of a sequence. Keys or values that are not ``[G, T, D]`` are a ``ValueError``; too few blocks as in ``extend``."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.append")

    def read(self, sequence: int, layer: int = 0) -> tuple[Float[Tensor, "g s d"], Float[Tensor, "g s d"]]:
        """All keys and values of a sequence in a layer, as ``append`` took them."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.read")

    def fork(self, sequence: int) -> int:
        """The id of a new sequence with the same positions, which shares all blocks and copies none."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.fork")

    def free(self, sequence: int) -> None:
        """Forget a sequence, and free each of its blocks."""
        raise NotImplementedError("Exercise 21.2: write PagedCache.free")


def paged_attention(
    q: Float[Tensor, "b h d"], cache: PagedCache, sequences: Sequence[int], layer: int = 0
) -> Float[Tensor, "b h d"]:
    """Attention of one query of each sequence to all of the sequence's positions in a layer. (Exercise 21.3)"""
    raise NotImplementedError("Exercise 21.3: write paged_attention")


class Scheduler:
    """Decides which tokens of which requests the next step passes through the model. (Exercise 21.4)"""

    def __init__(self, max_tokens: int, n_blocks: int, block_size: int):
        raise NotImplementedError("Exercise 21.4: write Scheduler.__init__")

    @property
    def n_free(self) -> int:
        """Blocks that no running request holds."""
        raise NotImplementedError("Exercise 21.4: write Scheduler.n_free")

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        raise NotImplementedError("Exercise 21.4: write Scheduler.submit")

    def cancel(self, request: Request) -> bool:
        """Drop a request, waiting or running; returns whether it was there."""
        raise NotImplementedError("Exercise 21.4: write Scheduler.cancel")

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most ``max_tokens`` tokens."""
        raise NotImplementedError("Exercise 21.4: write Scheduler.schedule")

    def advance(self, chunk: Chunk, token: int | None = None) -> None:
        """Note that a chunk is in the cache, and which token came of it; a request that has all its tokens leaves."""
        raise NotImplementedError("Exercise 21.4: write Scheduler.advance")


class Engine:
    """Runs a model on the chunks of a scheduler. (Exercise 21.5)"""

    def __init__(self, model: nn.Module, scheduler: Scheduler):
        raise NotImplementedError("Exercise 21.5: write Engine.__init__")

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        raise NotImplementedError("Exercise 21.5: write Engine.is_busy")

    def submit(self, request: Request) -> None:
        """Queue a request; it can be done between any two steps."""
        raise NotImplementedError("Exercise 21.5: write Engine.submit")

    def cancel(self, request: Request) -> bool:
        """Drop a request and return its blocks at once."""
        raise NotImplementedError("Exercise 21.5: write Engine.cancel")

    def step(self) -> list[tuple[Request, int]]:
        """Pass one step's tokens through the model; returns the new tokens."""
        raise NotImplementedError("Exercise 21.5: write Engine.step")


def generate_many(model: nn.Module, requests: Iterable[Request], scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
    """Continue many prompts together, and yield each token as soon as it is known. (Exercise 21.6)"""
    raise NotImplementedError("Exercise 21.6: write generate_many")
