"""A captured step for the Llamas of chapter 23: Qwen3, OLMo 3, Gemma 2 and 3, and gpt-oss.

Read `lib.fast.decode` first.
Here a step runs the model's own layers, whose functions may not wait for the device, and replaces their attention by
one kernel that knows windows, soft caps and sinks.
Their launches are many, but a graph launches them all at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.fast.attention.paged import Tiles
from lib.fast.attention.paged_variants import store, variant_attention
from lib.fast.decode import DTYPES, GRAPH_ROWS, TILE, Steps, can_step
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED


def can_step_variant(model: Any, cache: Any) -> bool:
    """Whether `VariantSteps` can run a model: layers with keys only, of the cache's dtype, on a GPU or interpreted."""
    if not HAS_TRITON or not hasattr(model, "ropes") or not isinstance(cache.keys, Tensor):
        return False
    weights = {(w.dtype, w.device) for w in model.parameters()}
    has_keys = "linear_attention" not in model.config.layer_types
    fits = cache.keys.dtype in DTYPES and 16 <= cache.keys.shape[-1] <= 256
    return (
        has_keys and fits and weights == {(cache.keys.dtype, cache.keys.device)} and (cache.keys.is_cuda or INTERPRETED)
    )


def can_run(model: Any, cache: Any) -> bool:
    """Whether `make_steps` can."""
    return can_step(model, cache) or can_step_variant(model, cache)


def make_steps(model: Any, cache: Any, n_rows: int) -> Steps:
    """The fast way through a model for which `can_run` holds."""
    return (VariantSteps if can_step_variant(model, cache) else Steps)(model, cache, n_rows)


class VariantSteps(Steps):
    """`Steps` of a model with ``next_logits``, ``ropes`` and ``sinks``; its ``config`` has windows and a soft cap."""

    @property
    def waits_for_nothing(self) -> bool:
        """As in `Steps`: not if experts run one after the other, each on the tokens that chose it."""
        return not self.config.n_experts

    def _prepare(self) -> list[Any]:
        self.model.ropes_on(self.device)
        self.each, self.sinks = torch.arange(GRAPH_ROWS, device=self.device), self.model.sinks
        return []

    def _decode(self, size: int) -> Float[Tensor, "b v"]:
        fields = self._rows[: self.fields.size].view(len(self.fields), -1)[:, :size]
        tables = self._rows[self.fields.size :].view(-1, self.tables.shape[1])
        tokens, each = self._tokens(fields[0]), self.each[:size]
        tiles = Tiles(tables, each, each, fields[1], fields[3].clamp(max=1))
        attend = partial(self._attend, fields[2], tiles, 1, partial(self._n_parts_seen, size))
        return self.model.next_logits(tokens, fields[1], each, attend)

    @torch.no_grad()
    def prompts(
        self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], slots: Int[Tensor, " n"],
        last: Int[Tensor, " c"], tiles: Tiles,
    ) -> Float[Tensor, "c v"]:  # fmt: skip
        """As `Steps.prompts`."""
        attend = partial(self._attend, slots, tiles, self.tile_queries, lambda window: 1)
        return self.model.next_logits(self._tokens(tokens), positions, last, attend)

    def _attend(
        self, slots: Tensor, tiles: Tiles, queries: int, n_parts: Callable[[int | None], int],
        i: int, q: Tensor, k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        """Keep the keys and values of layer i, and attend to those that its queries see."""
        keys, values, window = self.cache.keys[i], self.cache.values[i], self.config.windows[i]
        store(k, v, slots, keys, values)
        bends = self.config.softcap, self.sinks[i]
        return variant_attention(q, keys, values, tiles, window, *bends, queries, n_parts(window))

    def _n_parts_seen(self, batch: int, window: int | None) -> int:
        """`Steps._n_parts` of a layer with a window: no more parts than tiles that it sees."""
        n_tiles = -(-(window or self.config.context_len) // TILE)
        return min(self._n_parts(batch), 1 << max(0, n_tiles.bit_length() - 1))
