"""Given parts of chapter 21: requests and their progress, and both models run on tokens of many requests at once."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.given.models.hidden import Attend, final_norm, head, residual_stream


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to be continued.

    Two requests are never equal, even with the same fields: a request is known by its identity.

    Attributes:
        tokens: The prompt, at least one token.
        max_new_tokens: Number of new tokens at most, 1 or more.
        temperature: Of the sampling; 0 chooses the likeliest token.
        seed: Seeds this request's own random numbers; None takes a seed from the operating system.
        top_k, top_p: As in chapter 4's ``sample_next``.
        eos_id: The request ends after this token, which is its last.
    """

    tokens: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    top_k: int | None = field(default=None, kw_only=True)
    top_p: float | None = field(default=None, kw_only=True)
    eos_id: int | None = field(default=None, kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "tokens", [int(token) for token in self.tokens])
        if not self.tokens:
            raise ValueError("a request needs at least one token in its prompt")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: expected 1 or more")


@dataclass(eq=False)
class Progress:
    """How far a request has come.

    Attributes:
        request: The request.
        tokens: Its prompt and the new tokens so far.
        n_cached: How many of these tokens have keys and values in the cache: none before it is admitted,
            and none after it was preempted.
        generator: Its random numbers, which go on from where they were after a preemption.
    """

    request: Request
    tokens: list[int] = field(init=False)
    n_cached: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self):
        self.tokens = list(self.request.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens that the model must still see before the next one can be chosen; 1 for a request that decodes."""
        return len(self.tokens) - self.n_cached

    @property
    def is_done(self) -> bool:
        """Whether the request has all its tokens, or its last one ends it."""
        n_new = len(self.tokens) - len(self.request.tokens)
        ended = n_new > 0 and self.tokens[-1] == self.request.eos_id
        return ended or n_new >= self.request.max_new_tokens

    def random(self, device: torch.device) -> torch.Generator | None:
        """The request's generator, made and seeded at the first call; None for a greedy request."""
        if self.generator is None and self.request.temperature > 0:
            self.generator = torch.Generator(device)
            if self.request.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(self.request.seed)
        return self.generator

    def sampling(self, device: torch.device) -> dict[str, Any]:
        """What chapter 4's ``sample_next`` needs besides the logits: ``temperature``, ``top_k``,
        ``top_p`` and ``generator``.
        """
        request = self.request
        chosen = {"temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p}
        return chosen | {"generator": self.random(device)}


class Chunk(NamedTuple):
    """A part of a step: the next ``n_tokens`` tokens of a request that are not in the cache."""

    progress: Progress
    n_tokens: int

    @property
    def tokens(self) -> list[int]:
        """The tokens to pass through the model."""
        return self.progress.tokens[self.progress.n_cached : self.progress.n_cached + self.n_tokens]

    @property
    def completes(self) -> bool:
        """Whether the model's scores of the last token choose a new one."""
        return self.n_tokens == self.progress.n_pending


class Layout(NamedTuple):
    """The tokens of a step in one row.

    Attributes:
        tokens, positions: ``[N]``: the tokens of all chunks, one chunk's after another's,
            and the position of each in its request.
        sizes: Tokens of each chunk.
        single: Indices, in the row, of the chunks that have one token.
        last: Index of the last token of each chunk.
    """

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    sizes: list[int]
    single: Int[Tensor, " s"]
    last: Int[Tensor, " c"]


def lay_out(chunks: list[Chunk], device: torch.device | str = "cpu") -> Layout:
    """Put the tokens of a step's chunks in one row."""
    sizes = [chunk.n_tokens for chunk in chunks]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = (
        [token for chunk in chunks for token in chunk.tokens],
        [position for p, n in chunks for position in range(p.n_cached, p.n_cached + n)],
        [end - 1 for end, n in zip(ends, sizes, strict=True) if n == 1],
        [end - 1 for end in ends],
    )
    tokens, positions, single, last = (torch.tensor(row, dtype=torch.int64).to(device) for row in rows)
    return Layout(tokens, positions, sizes, single, last)


def check_request(request: Request, config: Any) -> None:
    """Make sure that a model can continue a request.

    Raises:
        ValueError: a token is not in the vocabulary, or the tokens don't fit into the context;
            the message has the numbers.
    """
    strange = next((token for token in request.tokens if not 0 <= token < config.vocab_size), None)
    if strange is not None:
        raise ValueError(f"token {strange} is not in the vocabulary of {config.vocab_size}")
    n_prompt, n_new = len(request.tokens), request.max_new_tokens
    if n_prompt + n_new > config.context_len:
        total = f"{n_prompt} + {n_new} = {n_prompt + n_new}"
        raise ValueError(
            f"a prompt of {n_prompt} tokens and {n_new} new ones do not fit: {total}, "
            f"context_len is {config.context_len}"
        )


class CacheSizes(NamedTuple):
    """Layers L with keys, key/value heads G and head width D of a model's cache."""

    n_layers: int
    n_kv_heads: int
    head_dim: int


def cache_sizes(config: Any) -> CacheSizes:
    """The sizes of the cache of a ``LlamaConfig`` or a ``GPT2Config``; linear layers have no keys."""
    n_layers = config.n_layers - list(getattr(config, "layer_types", ())).count("linear_attention")
    head_dim = getattr(config, "head_dim", config.dim // config.n_heads)
    return CacheSizes(n_layers, getattr(config, "n_kv_heads", config.n_heads), head_dim)


class BlockStore:
    """The memory of a paged cache: keys and values of all layers, in blocks.

    Args:
        config: A ``LlamaConfig`` or a ``GPT2Config``.
        n_blocks, block_size: Number of blocks, and positions in each.
        dtype, device: Of the keys and values; PyTorch's defaults unless given.

    Attributes:
        keys, values: ``[L, n_blocks, block_size, G, D]``, zeros at first.
        tables, lengths: For each sequence's id the list of its blocks, and the list of its lengths, one a layer.
    """

    allocator: Any  # the BlockAllocator that a paged cache makes

    def __init__(
        self, config: Any, n_blocks: int, block_size: int, dtype: torch.dtype | None = None, device: Any = None
    ) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"n_blocks = {n_blocks}, block_size = {block_size}: expected 1 or more of each")
        n_layers, n_kv_heads, head_dim = cache_sizes(config)
        self.n_blocks, self.block_size = n_blocks, block_size
        self.keys = torch.zeros(n_layers, n_blocks, block_size, n_kv_heads, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, list[int]] = {}

    def length_of(self, sequence: int, layer: int = 0) -> int:
        """Positions of a sequence in a layer.

        Raises:
            ValueError: there is no such sequence; the message names it.
        """
        if sequence not in self.lengths:
            raise ValueError(f"there is no sequence {sequence}: it was freed already, or never made")
        return self.lengths[sequence][layer]

    def check_shapes(self, k: Tensor, v: Tensor) -> None:
        """Raise a ``ValueError`` with the shape found and the shape expected if keys or values are not ``[G, T,
        D]`` for this cache.
        """
        n_kv_heads, head_dim = self.keys.shape[3:]
        for name, new in (("keys", k), ("values", v)):
            expected = [n_kv_heads, k.shape[1] if k.dim() == 3 else "T", head_dim]
            if list(new.shape) != expected:
                raise ValueError(f"{name} are {list(new.shape)}, this cache takes [{', '.join(map(str, expected))}]")

    def write(
        self, layer: int, slots: list[int] | Int[Tensor, " n"], k: Float[Tensor, "n g d"], v: Float[Tensor, "n g d"]
    ) -> None:
        """Store keys and values ``[N, G, D]`` of a layer in N slots;
        slot ``block * block_size + i`` is place i of a block.
        """
        slots = torch.as_tensor(slots, dtype=torch.int64, device=self.keys.device)
        for pool, new in ((self.keys, k), (self.values, v)):
            pool[layer].flatten(0, 1)[slots] = new.to(pool.dtype)

    def read(self, sequence: int, layer: int = 0) -> tuple[Float[Tensor, "g s d"], Float[Tensor, "g s d"]]:
        """All keys and all values of a sequence in a layer, in the order of its positions."""
        length, table = self.length_of(sequence, layer), self.tables[sequence]
        table_ = torch.tensor(table, dtype=torch.int64, device=self.keys.device)
        k, v = (pool[layer][table_].flatten(0, 1)[:length].transpose(0, 1) for pool in (self.keys, self.values))
        return k, v

    def copy_block(self, block: int, into: int) -> None:
        """Copy the keys and values of a block, in all layers."""
        for pool in (self.keys, self.values):
            pool[:, into] = pool[:, block]


def check_used(n_users: list[int], block: int) -> None:
    """Raise a ``ValueError`` that names the block if it has no user, or if there is no such block."""
    if not 0 <= block < len(n_users):
        raise ValueError(f"there is no block {block} in a pool of {len(n_users)}")
    if n_users[block] == 0:
        raise ValueError(f"block {block} is not in use: it was freed already, or never allocated")


def whole_blocks(tokens: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """The tokens of each whole block; those behind the last one are left out."""
    ends = range(block_size, len(tokens) + 1, block_size)
    return [tuple(tokens[end - block_size : end]) for end in ends]


@dataclass(eq=False)
class Node:
    """A block in a prefix tree; the root is a node without a block.

    Attributes:
        block: Its number in the pool.
        parent, piece: The node before it, and the tokens of this block,
            under which the parent has it among its children.
        children: The nodes behind it, by their tokens.
        n_users, last_used: For the tree to count with: 0 at first.
    """

    block: int = -1
    parent: Any = None
    piece: tuple[int, ...] = ()
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    n_users: int = 0
    last_used: int = 0

    def leaves(self) -> "list[Node]":
        """The nodes below this one that have no children."""
        found, open_ = [], list(self.children.values())
        while open_:
            node = open_.pop()
            open_ += node.children.values()
            if not node.children:
                found.append(node)
        return found


class Queue:
    """The two lists of a scheduler, and what they say about its blocks.

    Args:
        max_tokens, n_blocks, block_size: Tokens of a step at most; blocks of the pool, and positions in each.

    Attributes:
        waiting: Requests that hold no blocks, the oldest first.
        running: For each admitted request the number of blocks that it holds, the oldest first.
    """

    def __init__(self, max_tokens: int, n_blocks: int, block_size: int) -> None:
        for name, value in (("max_tokens", max_tokens), ("n_blocks", n_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} = {value}: expected 1 or more")
        self.max_tokens, self.n_blocks, self.block_size = max_tokens, n_blocks, block_size
        self.waiting: deque[Progress] = deque()
        self.running: dict[Progress, int] = {}

    @property
    def n_free(self) -> int:
        """Blocks that no request holds."""
        return self.n_blocks - sum(self.running.values())

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-n_tokens // self.block_size)

    def find(self, request: Request) -> Progress | None:
        """The progress of a request that waits or runs; None for any other."""
        return next((progress for progress in (*self.waiting, *self.running) if progress.request is request), None)

    def check_new(self, request: Request) -> None:
        """Raise a ``ValueError`` if a request waits or runs already."""
        if self.find(request) is not None:
            raise ValueError("this request was submitted already, and has not ended")

    def advance(self, chunk: Chunk, token: int | None = None) -> None:
        """Note that a chunk of this step is in the cache, and the token that it led to, if any;
        a request that is done leaves.

        A request that was cancelled meanwhile is ignored.
        """
        progress, n_tokens = chunk
        if progress in self.running:
            progress.n_cached += n_tokens
            if token is not None:
                progress.tokens.append(token)
                if progress.is_done:
                    del self.running[progress]

    def cancel(self, request: Request) -> bool:
        """Drop a request, waiting or running, which frees its blocks. Returns whether it was there."""
        progress = self.find(request)
        if progress in self.running:
            del self.running[progress]
        elif progress is not None:
            self.waiting.remove(progress)
        return progress is not None


@torch.no_grad()
def next_logits(
    model: nn.Module, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], rows: Int[Tensor, " r"], attend: Attend
) -> Float[Tensor, "r v"]:
    """Pass tokens of any number of requests through a model, and return the logits of some of them.

    Args:
        model: Chapter 4's ``Llama``, chapter 6's ``GPT2``, or a model with a ``next_logits`` of its own.
        tokens, positions: ``[N]``: the tokens, one request's after another's,
            and the position of each in its own request.
        rows: Indices of the tokens whose next token is asked for.
        attend: Called once a layer as ``attend(layer, q, k, v)`` with ``[N, H, D]`` and ``[N, G, D]``,
            in the order of the tokens; rotary positions are applied already.
            It returns ``[N, H, D]``.

    Returns:
        Logits ``[R, V]`` in float32.
    """
    own = getattr(model, "next_logits", None)
    if own is not None:
        return own(tokens, positions, rows, attend)
    x = residual_stream(model, tokens, positions, attend)
    return head(model, final_norm(model)(x[rows])).float()
