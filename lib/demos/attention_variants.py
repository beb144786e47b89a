"""Runs of chapter 23: small byte-level Llamas on the language reference, each with another attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lib.attention_variants import CausalAttention, apply_partial_rope, hybrid_layer_types, qk_norm
from lib.given.data.corpora import language_reference
from lib.given.models.llama import rope_of
from lib.llama import RMSNorm, SwiGLU
from lib.rope import rope_frequencies

DIM, N_HEADS, N_KV_HEADS = 64, 4, 2
LENGTH, WINDOW, BATCH = 64, 8, 8


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The switches of one model.

    Attributes:
        interval: Layer i is full where it divides i + 1, and the others have the window; 0 means that all have it.
        nope: Whether full layers have no positions.
        norm, softcap: `CausalAttention`'s ``qk_norm`` and ``softcap``.
        n_layers: Number of layers.
    """

    interval: int = 1
    nope: bool = False
    norm: str | None = None
    softcap: float | None = None
    n_layers: int = 3

    @property
    def layer_types(self) -> list[str]:
        return hybrid_layer_types(self.n_layers, self.interval or self.n_layers + 1)

    @property
    def config(self) -> SimpleNamespace:
        """What `cache_bytes` reads."""
        return SimpleNamespace(
            layer_types=self.layer_types, n_kv_heads=N_KV_HEADS, head_dim=DIM // N_HEADS, sliding_window=WINDOW
        )


class Block(nn.Module):
    """Chapter 4's block around `CausalAttention`."""

    def __init__(self, kind: str, variant: Variant):
        super().__init__()
        self.turns = not (variant.nope and kind == "full_attention")
        window = WINDOW if kind == "sliding_attention" else None
        self.attention = CausalAttention(
            DIM, N_HEADS, N_KV_HEADS, window=window, qk_norm=variant.norm, softcap=variant.softcap
        )
        self.norms = nn.ModuleList([RMSNorm(DIM), RMSNorm(DIM)])
        self.mlp = SwiGLU(DIM, 160)

    def forward(self, x: Float[Tensor, "b t c"], rope: Complex[Tensor, "t half_d"]) -> Float[Tensor, "b t c"]:
        x = x + self.attention(self.norms[0](x), rope if self.turns else None)
        return x + self.mlp(self.norms[1](x))


class TinyLlama(nn.Module):
    """A byte-level Llama with a `Variant`'s attention; about 0.13 million parameters."""

    def __init__(self, variant: Variant):
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList([Block(kind, variant) for kind in variant.layer_types])
        self.norm, self.output = RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(
        self, tokens: Int[Tensor, "b t"], frequencies: Float[Tensor, " half_d"] | None = None, factor: float = 1.0
    ) -> Float[Tensor, "b t v"]:
        """Logits, with chapter 2's frequencies or with others, and with a factor of the cosines and sines."""
        rope = rope_of(
            rope_frequencies(DIM // N_HEADS) if frequencies is None else frequencies, tokens.shape[1], factor
        )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope)
        return self.output(self.norm(x))


@cache
def corpus() -> tuple[Tensor, Tensor]:
    """The language reference as bytes: every tenth piece of 4,096 is held out."""
    data = torch.tensor(list(language_reference().encode()), dtype=torch.uint8)
    pieces = data[: len(data) // 4096 * 4096].view(-1, 4096)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


@dataclass
class Run:
    """A model that was trained, its loss at each step, and the largest score at every tenth step."""

    model: TinyLlama
    losses: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)


def train(variant: Variant, n_steps: int, lr: float = 4e-3, length: int = LENGTH, watch: bool = False) -> Run:
    """Train with PyTorch's AdamW; the rate falls linearly to a tenth, or stays where the largest score is watched."""
    torch.manual_seed(0)
    run, data, generator = Run(TinyLlama(variant)), corpus()[0], torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1.0 if watch else 1 - 0.9 * step / n_steps)
        start = torch.randint(len(data) - length, (BATCH, 1), generator=generator)
        tokens = data[start + torch.arange(length + 1)].long()
        loss = functional.cross_entropy(run.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if not watch:
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item())
        if watch and step % 10 == 0:
            run.largest.append(largest_score(run.model, tokens[:2, :-1]))
    return run


@torch.no_grad()
def loss_by_position(
    model: TinyLlama, length: int, frequencies: Tensor | None = None, factor: float = 1.0, most: int = 16
) -> Float[Tensor, " t"]:
    """Held-out loss in nats at each position of sequences of ``length``, averaged over up to ``most`` of them."""
    data = corpus()[1]
    tokens = data[: len(data) // (length + 1) * (length + 1)].view(-1, length + 1)[:most].long()
    losses = []
    for part in tokens.split(8):
        logits = model(part[:, :-1], frequencies, factor)
        losses.append(functional.cross_entropy(logits.mT, part[:, 1:], reduction="none"))
    return torch.cat(losses).mean(0)


@torch.no_grad()
def largest_score(model: TinyLlama, tokens: Int[Tensor, "b t"]) -> float:
    """The largest magnitude of a scaled score, before any cap, in all layers."""
    largest, rope, x = 0.0, rope_of(rope_frequencies(DIM // N_HEADS), tokens.shape[1]), model.embedding(tokens)
    for block in cast(list[Any], model.blocks):
        layer, normed = block.attention, block.norms[0](x)
        q, k = layer.q_proj(normed).unflatten(-1, (N_HEADS, -1)), layer.k_proj(normed).unflatten(-1, (N_KV_HEADS, -1))
        if hasattr(layer, "q_norm"):
            q, k = qk_norm(q, layer.q_norm.weight), qk_norm(k, layer.k_norm.weight)
        q, k = (apply_partial_rope(h, rope, "half").transpose(1, 2) for h in (q, k))
        scores = q @ k.repeat_interleave(N_HEADS // N_KV_HEADS, 1).mT / math.sqrt(DIM // N_HEADS)
        largest, x = max(largest, scores.tril().abs().max().item()), block(x, rope)
    return largest


def topic_lengths() -> list[int]:
    """Bytes of each topic of the language reference."""
    from pydoc_data.topics import topics

    return [len(text.encode()) for text in topics.values()]


def pack(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Rows of documents side by side, in their order; one that does not fit into the rest of a row is cut."""
    rows, room = [list[int]()], row
    for length in lengths:
        while length:
            if room == 0:
                rows.append([])
                room = row
            part = min(length, room)
            rows[-1].append(part)
            length, room = length - part, room - part
    return rows
