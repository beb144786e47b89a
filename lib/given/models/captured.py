"""Given parts of chapter 21: the inputs of a decoding step in buffers that never move, and a step that replays on them.

A CUDA graph has noted the address and the shape of each tensor that its kernels read, and reads there at every replay.
`CapturedStep` does the same on any device, in plain PyTorch, so that a laptop can show what a replay sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.given.models.serving import next_logits


@dataclass(eq=False)
class StaticInputs:
    """What changes from one replay of a decoding step to the next: int64 buffers with a row for each sequence.

    Attributes:
        tokens: ``[N]``: the token that the row passes through the model.
        positions: ``[N]``: its position in its sequence.
        slots: ``[N]``: where its keys and values are written; a row whose slot is negative writes nothing.
        lengths: ``[N]``: how many positions of its sequence it attends to, itself included; it may be 0.
        tables: ``[N, M]``: the blocks of its sequence. Those beyond its length are not read.
    """

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    lengths: Int[Tensor, " n"]
    tables: Int[Tensor, "n m"]

    @classmethod
    def allocate(cls, n_rows: int, n_blocks: int, device: Any = None) -> "StaticInputs":
        """Buffers of N rows for sequences of up to M = ``n_blocks`` blocks; no row writes or attends to anything."""
        tables = torch.zeros(n_rows, n_blocks, dtype=torch.int64, device=device)
        tokens, positions, lengths = torch.zeros(3, n_rows, dtype=torch.int64, device=device)
        return cls(tokens, positions, torch.full_like(tokens, -1), lengths, tables)


class CapturedStep:
    """A decoding step that stands in for a CUDA graph.

    It keeps the memory that ``inputs`` has now. A tensor that is assigned to ``inputs`` later is never read.

    Args:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``.
        cache: A paged cache with ``keys``, ``values`` and ``write``.
        inputs: Buffers of N rows.
    """

    def __init__(self, model: nn.Module, cache: Any, inputs: StaticInputs) -> None:
        self.model, self.cache = model, cache
        self.inputs = StaticInputs(*(buffer.detach() for buffer in vars(inputs).values()))

    @torch.no_grad()
    def replay(self) -> Float[Tensor, "n v"]:
        """Run the step on what the buffers hold; returns the logits after each row's token, float32."""
        rows = torch.arange(len(self.inputs.tokens), device=self.inputs.tokens.device)
        return next_logits(self.model, self.inputs.tokens, self.inputs.positions, rows, self._attend)

    def _attend(
        self, layer: int, q: Float[Tensor, "n h d"], k: Float[Tensor, "n g d"], v: Float[Tensor, "n g d"]
    ) -> Float[Tensor, "n h d"]:
        inputs, n_shared = self.inputs, q.shape[1] // k.shape[1]
        kept = inputs.slots >= 0  # on a GPU the kernel that stores skips the others
        self.cache.write(layer, inputs.slots[kept], k[kept], v[kept])
        k, v = (pool[layer][inputs.tables].flatten(1, 2) for pool in (self.cache.keys, self.cache.values))
        seen = torch.arange(k.shape[1], device=k.device) < inputs.lengths[:, None]
        k, v = (x.masked_fill(~seen[:, :, None, None], 0).repeat_interleave(n_shared, 2) for x in (k, v))
        scores = torch.einsum("nhd,nshd->nhs", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("nhs,nshd->nhd", weights.masked_fill(~seen[:, None], 0), v)
