"""The server's cache in 8 bits, and what it costs in the model's scores."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lib.fast.parts.packed import FORMATS, SCALE, Packed
from lib.fast.serving import Runner
from lib.given.data.corpora import language_reference
from lib.given.kernels.paged import window_of
from lib.given.models.serving import Chunk, Progress, Request, cache_sizes
from lib.serving import PagedCache, Scheduler, paged_attention

N_TRIED = 128  # tokens of the text with which the cost is measured


class PackedCache(PagedCache):
    """Chapter 21's cache, whose blocks hold keys and values in 8 bits, with a scale for each head and position.

    Args:
        cache_format: "int8" or "float8".
        more: As for ``PagedCache``; ``dtype`` is that of keys and values when they are read.
    """

    keys: Any  # Packed
    values: Any

    def __init__(self, cache_format: str, config: Any, n_blocks: int, block_size: int = 16,
                 dtype: torch.dtype | None = None, device: Any = None):  # fmt: skip
        super().__init__(config, n_blocks, block_size, FORMATS[cache_format][0], device)
        wide = dtype or torch.get_default_dtype()
        self.keys, self.values = (
            Packed(pool, torch.ones(pool.shape[:-1], dtype=SCALE, device=device), wide)
            for pool in (self.keys, self.values)
        )

    def write(
        self, layer: int, slots: list[int] | Int[Tensor, " n"], k: Float[Tensor, "n g d"], v: Float[Tensor, "n g d"]
    ) -> None:
        """As chapter 21's, rounded to 8 bits."""
        slots = torch.as_tensor(slots, dtype=torch.int64, device=self.keys.device)
        self.keys.write(layer, slots, k)
        self.values.write(layer, slots, v)

    def copy_block(self, block: int, into: int) -> None:
        """As chapter 21's, with the scales."""
        self.keys.copy_block(block, into)
        self.values.copy_block(block, into)


def packed_attention(
    q: Float[Tensor, "b h d"], cache: Any, sequences: Sequence[int], layer: int = 0
) -> Float[Tensor, "b h d"]:
    """As chapter 21's ``paged_attention``, from a ``PackedCache``, whose blocks are gathered and made wide."""
    longest = max(cache.lengths[i][layer] for i in sequences)
    k, v, seen = window_of(cache, sequences, max(1, longest), layer)
    return scaled_dot_product_attention(q[:, :, None], k, v, seen[:, None, None], enable_gqa=True)[:, :, 0]


def position_bytes(config: Any, dtype: torch.dtype, cache_format: str | None) -> int:
    """Bytes of the cache that a position takes: keys and values of all layers, and their scales."""
    n_layers, n_kv_heads, head_dim = cache_sizes(config)
    each = head_dim * dtype.itemsize if cache_format is None else head_dim + SCALE.itemsize
    return 2 * n_layers * n_kv_heads * each


class Cost(NamedTuple):
    """What fewer bits change in a model's scores of the next token.

    Attributes:
        rms: Root mean square of the change, of scores whose mean at each place is taken off.
        spread: Root mean square of the scores themselves.
        n_same: Places at which the likeliest token stays the same.
        n: Places.
    """

    rms: float
    spread: float
    n_same: int
    n: int

    def __str__(self) -> str:
        return (
            f"on {self.n} tokens of a text this changes the model's scores by {self.rms / max(self.spread, 1e-30):.2%} "
            f"of their spread, and leaves the likeliest token the same at {self.n_same} of {self.n} places"
        )


class Portable(Runner):
    """A runner that computes a text's scores kernel by kernel on any device, before there is an engine.

    Args:
        model: The model.
        n_tokens: Of the text.
        cache_format: As for ``PackedCache``; None: the model's dtype.
    """

    def __init__(self, model: nn.Module, n_tokens: int, cache_format: str | None) -> None:
        if cache_format:
            self.own_cache = partial(PackedCache, cache_format), packed_attention
        super().__init__(model, Scheduler(n_tokens, -(-n_tokens // 16), 16), PagedCache, paged_attention)

    def is_fast(self) -> bool:
        return False

    def scores(self, tokens: list[int]) -> Float[Tensor, "n v"]:
        """The logits after each token."""
        progress = Progress(Request(tokens, 1))
        self.drafted[progress] = len(tokens) - 1
        return self._logits([Chunk(progress, len(tokens))])[0]


def text_for(model: nn.Module, tokenizer: Any) -> list[int]:
    """The tokens with which a cost is measured: the beginning of the Python language reference."""
    config: Any = model.config
    return tokenizer.encode(language_reference()[: 8 * N_TRIED])[: min(N_TRIED, config.context_len - 1)]


def compare(plain: Float[Tensor, "n v"], changed: Float[Tensor, "n v"]) -> Cost:
    """What a change does to the scores of a text."""
    plain, changed = (x - x.mean(-1, keepdim=True) for x in (plain, changed))
    n_same = int((plain.argmax(-1) == changed.argmax(-1)).sum())
    rms, spread = (float(x.square().mean().sqrt()) for x in (plain - changed, plain))
    return Cost(rms, spread, n_same, len(plain))


@torch.no_grad()
def measure_cost(model: nn.Module, tokenizer: Any, cache_format: str) -> Cost:
    """Pass a text through the model twice, with the cache in its dtype and in 8 bits, and compare the logits."""
    tokens = text_for(model, tokenizer)
    return compare(*(Portable(model, len(tokens), kind).scores(tokens) for kind in (None, cache_format)))
