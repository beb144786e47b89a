"""Chapter 4's Llama with the variants of chapters 23 and 24: the models of Qwen3, OLMo 3, Gemma 2 and 3,
gpt-oss and Qwen3-Next, as their settings ask for.

The parts are the reader's own: chapter 4's norm and feed-forward layer, chapter 23's attention, frequencies and
caches, chapter 24's layer with a state.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from lib.attention import KVCache
from lib.attention_variants import (
    CausalAttention,
    RollingKVCache,
    apply_partial_rope,
    llama3_frequencies,
    qk_norm,
    yarn_frequencies,
)  # fmt: skip
from lib.given.models.llama import rope_of
from lib.given.models.variants import FULL, LINEAR, SLIDING, VariantConfig
from lib.linear_attention import DeltaCache, GatedDeltaNet
from lib.llama import RMSNorm, SwiGLU
from lib.rope import rope_frequencies

STD = 0.02
"""Deviation of the initial weights, as in Transformers."""


class OffsetNorm(nn.Module):
    """An RMSNorm whose gain is ``offset + weight``: Gemma keeps its gains as differences from 1."""

    def __init__(self, dim: int, eps: float, offset: float):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        heads = x.reshape(1, -1, 1, x.shape[-1])  # one head that is as wide as the model
        return qk_norm(heads, self.weight, self.eps, self.offset).view(x.shape)


class GeGLU(SwiGLU):
    """Chapter 4's feed-forward layer, whose gate is the GELU with a hyperbolic tangent."""

    w1: nn.Linear
    w2: nn.Linear
    w3: nn.Linear

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Experts(nn.Module):
    """The weights of gpt-oss's experts ``[E, ...]``, by Transformers' names; gates and values are every other column.

    Source: gpt-oss (arXiv:2508.10925), section 2.2.
    """

    STEEPNESS, LIMIT = 1.702, 7.0

    def __init__(self, n_experts: int, dim: int, hidden_dim: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(n_experts, dim, 2 * hidden_dim) * STD)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(n_experts, 2 * hidden_dim))
        self.down_proj = nn.Parameter(torch.randn(n_experts, hidden_dim, dim) * STD)
        self.down_proj_bias = nn.Parameter(torch.zeros(n_experts, dim))

    def forward(self, expert: int | slice, x: Float[Tensor, "n c"]) -> Float[Tensor, "*e n c"]:
        """What one expert, or each of several, returns."""
        both = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert].unsqueeze(-2)
        gate, up = both[..., ::2].clamp(max=self.LIMIT), both[..., 1::2].clamp(-self.LIMIT, self.LIMIT)
        hidden = (up + 1) * gate * torch.sigmoid(self.STEEPNESS * gate)
        return hidden @ self.down_proj[expert] + self.down_proj_bias[expert].unsqueeze(-2)


class Routed(nn.Module):
    """gpt-oss's feed-forward layer: each token's ``top_k`` experts, by the softmax of their scores among these.

    Experts run one after the other, each on its own tokens.
    On a GPU all experts run on all tokens of a decoding step, which are few: so the host need not wait to hear which
    were chosen.
    """

    FEW = 256

    def __init__(self, dim: int, hidden_dim: int, n_experts: int, top_k: int):
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(dim, n_experts)
        self.experts = Experts(n_experts, dim, hidden_dim)

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        rows = x.flatten(0, -2)
        scores, chosen = self.router(rows).topk(self.top_k, dim=-1)
        shares, out = scores.softmax(-1), torch.zeros_like(rows)
        if x.is_cuda and len(rows) <= self.FEW and not torch.is_grad_enabled():
            return self.by_all(rows, chosen, shares).view(x.shape)
        for expert in range(self.router.out_features):
            row, place = torch.where(chosen == expert)
            found = self.experts(expert, rows[row]) * shares[row, place, None]
            out = out.index_add(0, row, found.to(out.dtype))
        return out.view(x.shape)

    def by_all(
        self, rows: Float[Tensor, "n c"], chosen: Int[Tensor, "n k"], shares: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n c"]:
        """The same from every expert's answer to every token; an expert that was not chosen counts 0."""
        of_all = torch.zeros_like(rows[:, :1]).repeat(1, self.router.out_features).scatter(1, chosen, shares)
        return torch.einsum("ne,enc->nc", of_all, self.experts(slice(None), rows))


def make_feed_forward(config: VariantConfig) -> nn.Module:
    """The other part of a block."""
    c = config
    if c.activation == "clamped":
        return Routed(c.dim, c.hidden_dim, c.n_experts, c.top_k)
    return (GeGLU if c.activation == "gelu_tanh" else SwiGLU)(c.dim, c.hidden_dim)


def make_norm(config: VariantConfig) -> nn.Module:
    """A norm of the width of the model."""
    if config.norm_offset:
        return OffsetNorm(config.dim, config.norm_eps, config.norm_offset)
    return RMSNorm(config.dim, config.norm_eps)


def make_mixer(config: VariantConfig, kind: str) -> nn.Module:
    """The part of a block in which positions see each other."""
    c = config
    if kind == LINEAR:
        return GatedDeltaNet(
            c.dim, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim,
            c.linear_conv_kernel_dim, c.norm_eps,
        )  # fmt: skip
    return CausalAttention(
        c.dim, c.n_heads, c.n_kv_heads, c.head_dim, window=c.sliding_window if kind == SLIDING else None,
        qk_norm=c.qk_norm, norm_offset=c.norm_offset, softcap=c.softcap, sinks=c.sinks, gate=c.gate, scale=c.scale,
        bias=c.bias, eps=c.norm_eps,
    )  # fmt: skip


class VariantBlock(nn.Module):
    """Attention, then a feed-forward layer, with norms before them, after them, or both.

    Attributes:
        kind: "full_attention", "sliding_attention" or "linear_attention".
        attention: Chapter 23's ``CausalAttention``, or chapter 24's ``GatedDeltaNet``.
        feed_forward: A ``SwiGLU``, a ``GeGLU`` or a ``Routed``.
        attention_norm, ffn_norm: Norms before the two; they do nothing where the model has none there.
        attention_post_norm, ffn_post_norm: Norms after them, likewise.
    """

    def __init__(self, config: VariantConfig, layer: int):
        super().__init__()
        c = config
        self.kind = c.layer_types[layer]
        self.attention = make_mixer(config, self.kind)
        self.feed_forward = make_feed_forward(c)
        before, after = (c.norms in (place, "both") for place in ("before", "after"))
        self.attention_norm, self.ffn_norm = (make_norm(c) if before else nn.Identity() for _ in range(2))
        self.attention_post_norm, self.ffn_post_norm = (make_norm(c) if after else nn.Identity() for _ in range(2))

    def forward(
        self, x: Float[Tensor, "b t c"], rope: Complex[Tensor, "t half_r"] | None, cache: Any = None
    ) -> Float[Tensor, "b t c"]:
        """``x`` plus the outputs of attention and feed-forward."""
        if self.kind == LINEAR:
            return self.around(x, lambda h: self.attention(h, cache))
        return self.around(x, lambda h: self.attention(h, rope, cache))

    def around(self, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """The block with another attention in its middle."""
        x = x + self.attention_post_norm(attention(self.attention_norm(x)))
        return x + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x)))

    def attend(
        self, x: Float[Tensor, "n c"], rope: Complex[Tensor, "n half_r"], attend: Callable[..., Tensor]
    ) -> Float[Tensor, "n c"]:
        """The block for tokens of many requests, each at a position of its own.

        Args:
            x: Their residual streams.
            rope: The rotation of each.
            attend: ``attend(q, k, v)`` of chapter 21's step, which keeps the keys and values.
        """
        return self.around(x, lambda h: self.attend_rows(h, rope, attend))

    def attend_rows(self, h: Tensor, rope: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The attention of `attend`, from what its norm returns to what its last projection returns."""
        a: Any = self.attention
        q = a.q_proj(h).unflatten(-1, (a.n_heads, -1))[None]
        q, gate = q.chunk(2, dim=-1) if a.gate else (q, None)
        k, v = (proj(h).unflatten(-1, (a.n_kv_heads, -1))[None] for proj in (a.k_proj, a.v_proj))
        if a.normed:
            q, k = (qk_norm(x, norm["weight"], *a.norm) for x, norm in ((q, a.q_norm), (k, a.k_norm)))
        q, k = (apply_partial_rope(x, rope, a.layout) for x in (q, k))
        if a.scale is not None:  # chapter 21's attention divides by the root of the width
            q = q * (a.scale * q.shape[-1] ** 0.5)
        out = attend(q[0], k[0], v[0])
        return a.o_proj((out if gate is None else out * torch.sigmoid(gate[0])).flatten(1))


class VariantLlama(nn.Module):
    """The whole model: takes tokens, returns scores of the next token.

    Attributes:
        config: The argument.
        tok_embeddings, layers, norm, output: As in chapter 4's ``Llama``; ``output`` is None if it is tied.
        first: Position of the first token without a cache; above 0 on ranks that have a later piece of the sequence.
        ropes: For each kind of layer the rotations of ``context_len`` positions, complex64, plain tensors.
    """

    def __init__(self, config: VariantConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(VariantBlock(config, layer) for layer in range(config.n_layers))
        self.norm = make_norm(config)
        self.output = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.ropes, self.first = make_ropes(config), 0
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def blocks(self) -> list[Any]:
        """The ``VariantBlock`` of each layer, in order."""
        return list(self.layers)

    @property
    def sinks(self) -> list[Tensor | None]:
        """The sinks of each layer with keys."""
        return [block.attention.sinks for block in self.blocks if block.kind != LINEAR]

    def make_cache(self, batch: int, max_len: int) -> list[KVCache | RollingKVCache | DeltaCache]:
        """One empty cache a layer; a sliding layer's holds its window only, a linear layer's a state."""
        c, like = self.config, {"dtype": self.tok_embeddings.weight.dtype, "device": self.tok_embeddings.weight.device}
        caches = []
        for block in self.blocks:
            if block.kind == LINEAR:
                caches.append(block.attention.make_cache(batch, **like))
                continue
            window = c.sliding_window if block.kind == SLIDING else None
            make: Any = KVCache if window is None else RollingKVCache
            caches.append(make(batch, c.n_kv_heads, window or max_len, c.head_dim, **like))
        return caches

    def forward(self, tokens: Int[Tensor, "b t"], cache: list[Any] | None = None) -> Float[Tensor, "b t v"]:
        """For each token, the scores of the token that follows it, float32.

        Args:
            tokens: ``[B, T]``.
            cache: From ``make_cache``; the call appends the new positions to it.

        Raises:
            ValueError: the cache's length + T is more than ``context_len``; the message names both.
        """
        start = cache[0].length if cache else self.first
        end = start + tokens.shape[1]
        if end > self.config.context_len:
            raise ValueError(f"{end} positions ({start} cached) do not fit: context_len is {self.config.context_len}")
        ropes = {kind: rope[start:end] for kind, rope in self.ropes_on(tokens.device).items()}
        x = self.embed(tokens)
        for i, layer in enumerate(self.blocks):
            x = layer(x, ropes.get(layer.kind), cache[i] if cache else None)
        return self.scores(x)

    def next_logits(
        self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], rows: Int[Tensor, " r"], attend: Any
    ) -> Float[Tensor, "r v"]:
        """As ``lib.given.models.serving.next_logits``, which calls this.

        Layers with keys are counted by themselves; for the others ``attend.recur(i, net, h)`` computes layer i, the
        ``GatedDeltaNet`` net, on h ``[N, C]``.
        """
        ropes = {kind: rope[positions] for kind, rope in self.ropes_on(tokens.device).items()}
        x, n_cached = self.embed(tokens), 0
        for i, layer in enumerate(self.blocks):
            if layer.kind == LINEAR:
                x = layer.around(x, partial(attend.recur, i, layer.attention))
                continue
            x = layer.attend(x, ropes[layer.kind], partial(attend, n_cached))
            n_cached += 1
        return self.scores(x[rows])

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream that the first block reads."""
        x = self.tok_embeddings(tokens)
        if not self.config.scaled_embeddings:
            return x
        return x * torch.tensor(self.config.dim**0.5, dtype=x.dtype, device="cpu").item()  # rounded to its dtype

    def scores(self, x: Tensor) -> Tensor:
        """The logits, float32, of what the last block returns."""
        output = self.tok_embeddings if self.output is None else self.output
        logits, cap = F.linear(self.norm(x), output.weight).float(), self.config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def ropes_on(self, device: torch.device) -> dict[str, Tensor]:
        """The rotations on a device."""
        if device.type == "meta":  # moving the tables there would lose their numbers for good
            return {kind: rope.to(device) for kind, rope in self.ropes.items()}
        if any(rope.device != device for rope in self.ropes.values()):
            self.ropes = {kind: rope.to(device) for kind, rope in self.ropes.items()}
        return self.ropes


def make_ropes(config: VariantConfig) -> dict[str, Complex[Tensor, "t half_d"]]:
    """The rotations of each kind of layer, on the CPU."""
    with torch.device("cpu"):
        frequencies, factor = scaled_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        full = rope_of(frequencies, config.context_len, factor)
        if config.sliding_rope_theta is None:
            return {FULL: full, SLIDING: full}
        local = rope_frequencies(config.rotary_dim, config.sliding_rope_theta)
        return {FULL: full, SLIDING: rope_of(local, config.context_len)}


def scaled_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """The rotary frequencies, scaled as chapters 2 and 23 do, and the modulus of the rotations."""
    settings = dict(scaling or {"rope_type": "default"})
    kind = settings.pop("rope_type")
    if kind == "default":
        return rope_frequencies(head_dim, theta), 1.0
    if kind == "linear":  # chapter 2's interpolation
        return rope_frequencies(head_dim, theta) / settings["factor"], 1.0
    if kind == "llama3":
        return llama3_frequencies(head_dim, theta=theta, **settings), 1.0
    if kind == "yarn":
        asked = settings.pop("attention_factor", None)
        frequencies, factor = yarn_frequencies(head_dim, theta=theta, **settings)
        return frequencies, factor if asked is None else asked
    raise ValueError(f"rope_type = {kind!r}: expected default, linear, llama3 or yarn")
