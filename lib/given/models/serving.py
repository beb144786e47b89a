"""Given parts of chapter 21: requests and their progress, and both models run on tokens of many requests at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: keeps the keys and values ``[N, G, D]`` and returns the attention of the queries, ``[N, H, D]`` like them."""


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to be continued. Two requests are never equal, even with the same fields: a request is known by its identity.

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
        n_cached: How many of these tokens have keys and values in the cache: none before it is admitted, and none after it was preempted.
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
        tokens, positions: ``[N]``: the tokens of all chunks, one chunk's after another's, and the position of each in its request.
        sizes: Tokens of each chunk.
        single: Indices, in the row, of the chunks that have one token.
        last: Indices of the last token of each chunk that chooses a new one.
    """

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    sizes: list[int]
    single: Int[Tensor, " s"]
    last: Int[Tensor, " r"]


def lay_out(chunks: list[Chunk], device: torch.device | str = "cpu") -> Layout:
    """Put the tokens of a step's chunks in one row."""
    sizes = [chunk.n_tokens for chunk in chunks]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = (
        [token for chunk in chunks for token in chunk.tokens],
        [position for p, n in chunks for position in range(p.n_cached, p.n_cached + n)],
        [end - 1 for end, n in zip(ends, sizes, strict=True) if n == 1],
        [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.completes],
    )
    tokens, positions, single, last = (torch.tensor(row, dtype=torch.int64).to(device) for row in rows)
    return Layout(tokens, positions, sizes, single, last)


def check_request(request: Request, config: Any) -> None:
    """Make sure that a model can continue a request.

    Raises:
        ValueError: a token is not in the vocabulary, or the tokens don't fit into the context; the message has the numbers.
    """
    strange = next((token for token in request.tokens if not 0 <= token < config.vocab_size), None)
    if strange is not None:
        raise ValueError(f"token {strange} is not in the vocabulary of {config.vocab_size}")
    n_prompt, n_new = len(request.tokens), request.max_new_tokens
    if n_prompt + n_new > config.context_len:
        total = f"{n_prompt} + {n_new} = {n_prompt + n_new}"
        raise ValueError(
            f"a prompt of {n_prompt} tokens and {n_new} new ones do not fit: {total}, context_len is {config.context_len}"
        )


class CacheSizes(NamedTuple):
    """Layers L, key/value heads G and head width D of a model's cache."""

    n_layers: int
    n_kv_heads: int
    head_dim: int


def cache_sizes(config: Any) -> CacheSizes:
    """The sizes of the cache of a ``LlamaConfig`` or a ``GPT2Config``."""
    return CacheSizes(config.n_layers, getattr(config, "n_kv_heads", config.n_heads), config.dim // config.n_heads)


@torch.no_grad()
def next_logits(
    model: nn.Module, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], rows: Int[Tensor, " r"], attend: Attend
) -> Float[Tensor, "r v"]:
    """Pass tokens of any number of requests through a model, and return the logits of some of them.

    Args:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``.
        tokens, positions: ``[N]``: the tokens, one request's after another's, and the position of each in its own request.
        rows: Indices of the tokens whose next token is asked for.
        attend: Called once a layer as ``attend(layer, q, k, v)`` with ``[N, H, D]`` and ``[N, G, D]``, in the order of the tokens;
            rotary positions are applied already. It returns ``[N, H, D]``.

    Returns:
        Logits ``[R, V]`` in float32.
    """
    run = _llama if hasattr(model, "tok_embeddings") else _gpt2
    return run(model, tokens, positions, rows, attend).float()


def _rotate(x: Float[Tensor, "n h d"], rope: Complex[Tensor, "n half_d"]) -> Float[Tensor, "n h d"]:
    """Chapter 2's rotation for tokens that are each at a position of their own."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).to(x.dtype)


def _llama(model: Any, tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    if model.rope.device != tokens.device:
        model.rope = model.rope.to(tokens.device)
    rope, head_dim = model.rope[positions], model.config.head_dim
    x = model.tok_embeddings(tokens)
    for i, layer in enumerate(model.layers):
        a, h = layer.attention, layer.attention_norm(x)
        q, k, v = (rearrange(w(h), "n (h d) -> n h d", d=head_dim) for w in (a.wq, a.wk, a.wv))
        x = x + a.wo(attend(i, _rotate(q, rope), _rotate(k, rope), v).flatten(1))
        x = x + layer.feed_forward(layer.ffn_norm(x))
    return model.output(model.norm(x[rows]))


def _gpt2(model: Any, tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    head_dim = model.config.dim // model.config.n_heads
    x = model.wte(tokens) + model.wpe(positions)
    for i, block in enumerate(model.h):
        qkv = block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(part, "n (h d) -> n h d", d=head_dim) for part in qkv)
        x = x + block.attn.c_proj(attend(i, q, k, v).flatten(1))
        x = x + block.mlp(block.ln_2(x))
    return nn.functional.linear(model.ln_f(x[rows]), model.wte.weight)[..., : model.config.vocab_size]
