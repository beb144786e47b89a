"""The states of linear layers in the engine: beside the blocks of its keys, each sequence has one of constant size."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class States:
    """What the linear layers of a model remember of each sequence of a paged cache.

    A state is made at a sequence's first token, and forgotten when the cache forgets the sequence.

    Args:
        cache: Chapter 21's ``PagedCache``.

    Attributes:
        held: For each sequence its state in each linear layer, chapter 24's ``DeltaCache`` of a batch of 1.
    """

    def __init__(self, cache: Any) -> None:
        self.cache, self.held = cache, dict[int, dict[int, Any]]()

    def forget(self) -> None:
        """Drop the states of sequences that the cache no longer has."""
        for sequence in self.held.keys() - self.cache.tables.keys():
            del self.held[sequence]

    def copy(self, sequence: int, into: int) -> None:
        """Let a sequence go on from where another one is."""
        self.held[into] = {}
        for layer, state in self.held.get(sequence, {}).items():
            parts = state.conv_state.clone(), state.recurrent_state.clone(), state.length
            self.held[into][layer] = type(state)(*parts)

    def recur(
        self, ids: list[int], sizes: list[int], layer: int, net: Any, h: Float[Tensor, "n c"]
    ) -> Float[Tensor, "n c"]:
        """Pass the new tokens of some sequences through a linear layer, whose states go on.

        Sequences with as many new tokens pass through it together.

        Args:
            ids, sizes: The sequences, and the number of tokens of each.
            layer, net: The layer's place, and chapter 24's ``GatedDeltaNet``.
            h: What the layer reads, one sequence's tokens after another's.
        """
        if len(set(sizes)) == 1:
            return self._together(ids, layer, net, h.unflatten(0, (len(ids), -1))).flatten(0, 1)
        out, parts = torch.empty_like(h), list(torch.arange(len(h), device=h.device).split(sizes))
        for size in set(sizes):
            rows = [row for row, n in enumerate(sizes) if n == size]
            places = torch.stack([parts[row] for row in rows])
            out[places] = self._together([ids[row] for row in rows], layer, net, h[places])
        return out

    def _together(self, ids: list[int], layer: int, net: Any, h: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        states = [self.held.setdefault(i, {}) for i in ids]
        for state in states:
            if layer not in state:
                state[layer] = net.make_cache(1, h.dtype, h.device)
        both = net.make_cache(len(ids), h.dtype, h.device)
        for name in ("conv_state", "recurrent_state"):
            torch.cat([getattr(state[layer], name) for state in states], out=getattr(both, name))
        out = net(h, both)
        for row, state in enumerate(states):
            state[layer].conv_state.copy_(both.conv_state[row : row + 1])
            state[layer].recurrent_state.copy_(both.recurrent_state[row : row + 1])
            state[layer].length += h.shape[1]
        return out
