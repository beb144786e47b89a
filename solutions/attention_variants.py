"""The attention of today: what recent models changed in chapter 3's layer, and the bill that each change pays."""

import math
from collections import Counter

import torch
from einops import rearrange
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from lib.given.kernels.fits import check_fit, check_heads, check_kinds, check_window, document_lengths
from lib.given.kernels.tiles import LN2, LOG2E, tl, triton
from lib.given.kernels.window import fits_window, launch_window
from solutions.attention import KVCache, causal_mask, softmax
from solutions.flash_attention import online_softmax_update
from solutions.llama import RMSNorm
from solutions.rope import rope_frequencies


def qk_norm(x: Float[Tensor, "b t h d"], weight: Float[Tensor, " n"], eps: float = 1e-6,
            offset: float = 0.0) -> Float[Tensor, "b t h d"]:  # fmt: skip
    """RMSNorm of queries or keys. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        x: Queries or keys ``[B, T, H, D]``, before any rotation.
        weight: ``[D]``: each head is normalized by itself. ``[H*D]``: all heads of a position have one mean square.
        eps: Added to the mean square.
        offset: The gain is ``offset + weight``.

    Returns:
        The shape and dtype of ``x``. All arithmetic, gain included, is in float32 (float64 for float64), and the
        result is rounded once.

    Raises:
        ValueError: ``weight`` has another length; the message names it, D and H*D.

    Source: Dehghani and others (arXiv:2302.05442); OLMo 2 (arXiv:2501.00656).
    Convention: ``[D]`` in Qwen3 and Gemma 3, ``[H*D]`` in OLMo 2 and 3. Offset 1 in Gemma 3 and Qwen3-Next, whose
        weights are kept as differences from 1. Transformers' Qwen3 rounds before the gain, too, which is the same in
        float32.
    """
    ### BEGIN SOLUTION
    heads, width = x.shape[-2:]
    if len(weight) not in (width, heads * width):
        raise ValueError(f"a weight of length {len(weight)}: expected D = {width} or H*D = {heads * width}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if len(weight) == width else wide.flatten(-2)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.to(wide.dtype))).to(x.dtype).view(x.shape)
    ### END SOLUTION


def grouped_attention(
    q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s dv"],
    mask: Bool[Tensor, "... t s"] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None) -> Float[Tensor, "b h t dv"]:  # fmt: skip
    """Attention with shared keys, a soft cap on its scores, and a sink in its softmax. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Query head h reads key head ``h // (H/G)``. The order is: scores times ``scale``; soft cap; mask; softmax with sink.

    Args:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, G, S, D]``.
        v: Values ``[B, G, S, Dv]``.
        mask: Boolean, broadcast to ``[B, H, T, S]``, True where a query may attend.
        scale: Factor of the scores; None means ``D ** -0.5``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None means no cap.
        sinks: One number ``[H]`` a head, whose exponential joins the softmax's denominator and has no value. It is
            neither scaled nor capped nor masked.

    Returns:
        ``[B, H, T, Dv]`` in the dtype of ``q``, differentiable. Softmax in float32 (float64 for float64). A query that
        may attend to nothing gets zeros, with or without sinks. Scores and sinks of 1e6 give no NaN, nor do their
        gradients.

    Raises:
        ValueError: H is no multiple of G; the message names both.

    Cost: keys and values are never repeated in memory: at T = 1, no tensor of ``H * S * D / 2`` numbers is made.
    Source: Gemma 2 (arXiv:2408.00118); gpt-oss (arXiv:2508.10925).
    """
    ### BEGIN SOLUTION
    check_heads(q.shape[1], k.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries = (q * scale).reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # a group's are rows of one product
    scores = (queries @ k.mT).view(*q.shape[:3], k.shape[2]).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None]
        scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], dim=-1)
    weights = softmax(scores, dim=-1)[..., : k.shape[2]].to(v.dtype)
    return (weights.reshape(*queries.shape[:3], k.shape[2]) @ v).view(*q.shape[:3], v.shape[-1]).to(q.dtype)
    ### END SOLUTION


def llama3_frequencies(
    head_dim: int, factor: float = 8.0, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192, theta: float = 500_000.0) -> Float[Tensor, " half_d"]:  # fmt: skip
    """Frequencies of Llama 3.1, whose slow pairs turn ``factor`` times slower. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        head_dim: Width D that turns.
        factor: How many times longer the new context is.
        low_freq_factor: Pairs with at most so many turns within the trained length are slowed down by ``factor``.
        high_freq_factor: Pairs with at least so many turns are kept.
        original_max_position_embeddings: The trained length L0.
        theta: Base of chapter 2's frequencies.

    Returns:
        float32 ``[D/2]``, computed in float32 or better.

    Source: equation (23.5); Meta's ``apply_scaling`` in llama-models.
    """
    ### BEGIN SOLUTION
    frequencies = rope_frequencies(head_dim, theta)
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * keep + frequencies / factor * (1 - keep)
    ### END SOLUTION


def yarn_frequencies(
    head_dim: int, factor: float, original_max_position_embeddings: int, theta: float = 10_000.0,
    beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True, mscale: float | None = None,
    mscale_all_dim: float | None = None) -> tuple[Float[Tensor, " half_d"], float]:  # fmt: skip
    """YaRN's frequencies, and the factor of its cosines and sines. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        head_dim: Width D that turns.
        factor: How many times longer the new context is.
        original_max_position_embeddings: The trained length L0.
        theta: Base of chapter 2's frequencies.
        beta_fast: Pairs with more turns within L0 are kept.
        beta_slow: Pairs with fewer turns are slowed down by ``factor``.
        truncate: Whether the ends of the ramp are rounded, down and up; False in gpt-oss.
        mscale: With ``mscale_all_dim``, as in DeepSeek's checkpoints, changes the factor below.
        mscale_all_dim: Its divisor; the two count only if neither is None or 0.

    Returns:
        ``(frequencies, attention_factor)``: float32 ``[D/2]``, computed in float32 or better; and a float: ``m(1)``, or
        ``m(mscale) / m(mscale_all_dim)``, where ``m(c)`` is ``0.1 * c * ln(factor) + 1``, and 1 for ``factor <= 1``.

    Source: YaRN (arXiv:2309.00071); equations (23.6) and (23.7).
    Convention: the ends are clipped to 0 and D - 1 although there are D/2 pairs, and of two equal ends the upper is
        raised by 0.001, as in the authors' code and Transformers.
    """

    ### BEGIN SOLUTION
    def pair_with(turns: float) -> float:
        return head_dim * math.log(original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(theta))

    def magnitude(c: float) -> float:
        return 0.1 * c * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
    frequencies = rope_frequencies(head_dim, theta)
    attention_factor = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, attention_factor
    ### END SOLUTION


def apply_partial_rope(x: Float[Tensor, "b t h d"], rope: Complex[Tensor, "t half_r"],
                       layout: str = "interleaved") -> Float[Tensor, "b t h d"]:  # fmt: skip
    """Rotate the first R features of each head, and leave the others alone. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        x: Queries or keys ``[B, T, H, D]``; not changed.
        rope: ``[T, R/2]`` complex with R <= D; R = 0 rotates nothing (NoPE). The modulus counts: YaRN's factor travels
            in it.
        layout: "interleaved" pairs feature 2i with 2i + 1, as in chapter 2; "half" pairs i with i + R/2.

    Returns:
        The shape and dtype of ``x``, computed in float32 (float64 for float64). The other D - R features come back bit
        for bit.

    Raises:
        ValueError: R > D, and the message names R; the rows of ``rope`` are not T; or another layout, and the message
            shows it.

    Source: RoFormer (arXiv:2104.09864), section 3.4.2.
    Convention: checkpoints in Transformers' format use "half", except for DeepSeek's and a few others.
    """
    ### BEGIN SOLUTION
    turned = 2 * rope.shape[1]
    if layout not in ("interleaved", "half"):
        raise ValueError(f"layout = {layout!r}: expected 'interleaved' or 'half'")
    if turned > x.shape[-1] or len(rope) != x.shape[1]:
        raise ValueError(f"rope turns R = {turned} features of {len(rope)} positions: too many for x {list(x.shape)}")
    wide = x.dtype == torch.float64
    pairs = {"interleaved": "b t h (i two)", "half": "b t h (two i)"}[layout]
    part = x[..., :turned].to(torch.float64 if wide else torch.float32)
    real, imaginary = rearrange(part, f"{pairs} -> two b t h i", two=2)
    rotated = torch.complex(real, imaginary) * rope[:, None].to(torch.complex128 if wide else torch.complex64)
    part = rearrange(torch.view_as_real(rotated), f"b t h i two -> {pairs}")
    return torch.cat([part.to(x.dtype), x[..., turned:]], dim=-1)
    ### END SOLUTION


def sliding_window_mask(n_queries: int, n_keys: int, window: int | None = None, device=None) -> Bool[Tensor, "t s"]:
    """Which keys each query may attend to if it sees the last few only. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        n_queries: Number T of queries.
        n_keys: Number S of keys; the last query is at the position of the last key.
        window: Number of keys that a query sees, its own counted; None means all up to its own.
        device: Where the result lives.

    Returns:
        Boolean ``[T, S]``, True = may attend: the query at position ``p = t + S - T`` sees keys ``p - window + 1 ..
        p``.

    Raises:
        ValueError: ``window`` is below 1; the message names it.

    Source: Beltagy and others (arXiv:2004.05150); Mistral 7B (arXiv:2310.06825).
    Convention: the query itself is counted, as in Transformers and the papers. FlashAttention's ``window_size=(left,
        right)`` leaves it out, so ``left = window - 1``.
    """
    ### BEGIN SOLUTION
    check_window(window)
    mask = causal_mask(n_queries, n_keys, device)
    return mask if window is None else mask.triu(n_keys - n_queries - window + 1)
    ### END SOLUTION


class RollingKVCache:
    """Keeps the keys and values of the last positions only: the newest overwrites the oldest. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        batch: Number B of sequences.
        n_kv_heads: Number G of key/value heads.
        window: Number of positions that are kept.
        head_dim: Width D of a head.
        dtype: Type of the keys and values.
        device: Where they live.

    Attributes:
        keys: ``[B, G, window, D]``, position p in slot ``p % window``; ``values`` likewise.
        length: Number of all positions seen so far, which RoPE needs.

    Raises:
        ValueError: ``window`` is below 1.
    """

    def __init__(self, batch: int, n_kv_heads: int, window: int, head_dim: int, dtype=torch.float32, device=None):
        check_window(window)
        self.keys = torch.zeros(batch, n_kv_heads, window, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def update(self, k: Float[Tensor, "b g t d"],
               v: Float[Tensor, "b g t d"]) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:  # fmt: skip
        """Append T new positions.

        Args:
            k: New keys ``[B, G, T, D]`` of any floating dtype, which are cast to the cache's; ``v`` likewise.

        Returns:
            Keys and values that the new positions may need, in the cache's dtype.
            - T = 1: the filled slots, in slot order, as views of the cache's memory; nothing is copied, and no mask is
              needed.
            - T != 1: the last ``min(length before, window - 1)`` positions and the T new ones in order of position, for
              ``sliding_window_mask(T, S, window)``; T may exceed the window.

        Raises:
            ValueError: ``k`` and ``v`` are not both ``[B, G, T, D]`` for this cache; the message shows the shape given
                and the one expected, and the cache is not changed.
        """
        ### BEGIN SOLUTION
        window, start, n_new = self.keys.shape[2], self.length, k.shape[-2]
        check_fit({"keys": (self.keys, k), "values": (self.values, v)})
        self.length = start + n_new
        if n_new == 1:
            slot, filled = start % window, min(start + 1, window)
            self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
            return self.keys[:, :, :filled], self.values[:, :, :filled]
        past = torch.arange(max(0, start - window + 1), start, device=k.device) % window
        kept = torch.arange(max(0, n_new - window), n_new, device=k.device)
        memories = (self.keys, k), (self.values, v)
        joined = [torch.cat([memory[:, :, past], new.to(memory.dtype)], dim=2) for memory, new in memories]
        for memory, new in memories:
            memory[:, :, (start + kept) % window] = new[:, :, kept].to(memory.dtype)
        return joined[0], joined[1]
        ### END SOLUTION


class CausalAttention(nn.Module):
    """One layer with switches: Qwen3's, Gemma 2's and 3's, OLMo 3's, gpt-oss's or Qwen3-Next's. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    Args:
        dim: Model width C.
        n_heads: Query heads H.
        n_kv_heads: Key/value heads G, a divisor of H; None means H.
        head_dim: Width D of a head; None means C/H.
        window: Keys that a query sees, its own counted; None means all up to its own.
        qk_norm: None, "head" (``[D]``) or "width" (``[H*D]`` for queries, ``[G*D]`` for keys), before the rotation.
        norm_offset: The offset of the norms' gains.
        softcap: Cap of the scores.
        sinks: Whether each head has a sink.
        gate: Whether the heads' output is multiplied by ``sigmoid(gate)`` before ``o_proj``. ``q_proj`` then has for
            each head the D rows of its query, followed by the D rows of its gate.
        scale: Factor of the scores; None means ``D ** -0.5``.
        bias: Whether all four projections have biases.
        eps: Of the norms.
        layout: Of the rotated pairs.

    Attributes:
        q_proj: ``nn.Linear``, as are ``k_proj``, ``v_proj`` and ``o_proj``: Transformers' names, so that the
            ``state_dict()`` of its layers loads as it is.
        q_norm: ``nn.ParameterDict`` with a ``weight``, as is ``k_norm``; only with ``qk_norm``. A new gain is 1.
        sinks: Parameter ``[H]``, new ones 0; only with ``sinks``.

    Raises:
        ValueError: H is no multiple of G, and the message names both; or another ``qk_norm``, and the message shows it.

    Source: the reports of these models; the gate is Qiu and others' (arXiv:2505.06708).
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int | None = None, head_dim: int | None = None,
        window: int | None = None, qk_norm: str | None = None, norm_offset: float = 0.0, softcap: float | None = None,
        sinks: bool = False, gate: bool = False, scale: float | None = None, bias: bool = False, eps: float = 1e-6,
        layout: str = "half"):  # fmt: skip
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_heads if n_kv_heads is None else n_kv_heads
        self.window, self.softcap, self.gate, self.scale, self.layout = window, softcap, gate, scale, layout
        self.normed, self.norm = qk_norm is not None, (eps, norm_offset)
        ### BEGIN SOLUTION
        width, groups = dim // n_heads if head_dim is None else head_dim, self.n_kv_heads
        check_heads(n_heads, groups)
        if qk_norm not in (None, "head", "width"):
            raise ValueError(f"qk_norm = {qk_norm!r}: expected None, 'head' or 'width'")
        self.q_proj = nn.Linear(dim, n_heads * width * (2 if gate else 1), bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * width, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(n_heads * width, dim, bias=bias)
        if qk_norm is not None:
            sizes = (width, width) if qk_norm == "head" else (n_heads * width, groups * width)
            gains = (nn.Parameter(torch.full((size,), 1.0 - norm_offset)) for size in sizes)
            self.q_norm, self.k_norm = (nn.ParameterDict({"weight": gain}) for gain in gains)
        self.sinks = nn.Parameter(torch.zeros(n_heads)) if sinks else None
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"], rope: Complex[Tensor, "t half_r"] | None = None,
                cache: KVCache | RollingKVCache | None = None) -> Float[Tensor, "b t c"]:  # fmt: skip
        """Attend from each position of ``x`` to itself and to what is before it; the mask is the layer's own.

        Args:
            x: ``[B, T, C]``.
            rope: Rotations ``[T, R/2]`` of these T positions; None is a layer without positions.
            cache: Chapter 3's ``KVCache``, or a `RollingKVCache` of the layer's window; keys enter it normed and
                rotated.

        Returns:
            ``[B, T, C]``.
        """
        ### BEGIN SOLUTION
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1))
        k, v = (proj(x).unflatten(-1, (self.n_kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        q, gate = q.chunk(2, dim=-1) if self.gate else (q, None)
        if self.normed:
            q, k = (qk_norm(h, norm["weight"], *self.norm) for h, norm in ((q, self.q_norm), (k, self.k_norm)))
        if rope is not None:
            q, k = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v)
        mask = sliding_window_mask(q.shape[2], k.shape[2], self.window, x.device)
        out = grouped_attention(q, k, v, mask, self.scale, self.softcap, self.sinks).transpose(1, 2)
        return self.o_proj((out if gate is None else out * torch.sigmoid(gate)).flatten(2))
        ### END SOLUTION


class LatentCache:
    """Keeps one latent and one rotated key a position, for all heads together. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        batch: Number B of sequences.
        max_len: Number of positions that fit.
        kv_lora_rank: Width r of the latent.
        qk_rope_head_dim: Width of the rotated key.
        dtype: Type of both.
        device: Where they live.

    Attributes:
        latents: ``[B, max_len, r]``.
        rope_keys: ``[B, max_len, rope]``.
        length: Number of positions held so far.
    """

    def __init__(self, batch: int, max_len: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype=torch.float32,
                 device=None):  # fmt: skip
        self.latents = torch.zeros(batch, max_len, kv_lora_rank, dtype=dtype, device=device)
        self.rope_keys = torch.zeros(batch, max_len, qk_rope_head_dim, dtype=dtype, device=device)
        self.length = 0

    def update(self, latents: Float[Tensor, "b t r"], rope_keys: Float[Tensor, "b t rope"]
               ) -> tuple[Float[Tensor, "b s r"], Float[Tensor, "b s rope"]]:  # fmt: skip
        """Append T new positions.

        Args:
            latents: ``[B, T, r]``, normed.
            rope_keys: ``[B, T, rope]``, rotated.

        Returns:
            All latents and rotated keys so far, ``[B, length, ...]``, as views of the cache's memory.

        Raises:
            ValueError: the T positions do not fit, and the message shows the arithmetic; or the shapes do not, and it
                shows both. The cache is not changed.
        """
        ### BEGIN SOLUTION
        start, end, max_len = self.length, self.length + latents.shape[1], self.latents.shape[1]
        check_fit({"latents": (self.latents, latents), "rope_keys": (self.rope_keys, rope_keys)})
        if end > max_len:
            raise ValueError(f"the cache holds {start} of {max_len} positions: {end - start} more would make {end}")
        self.latents[:, start:end], self.rope_keys[:, start:end], self.length = latents, rope_keys, end
        return self.latents[:, :end], self.rope_keys[:, :end]
        ### END SOLUTION


class MultiHeadLatentAttention(nn.Module):
    """DeepSeek's attention: all heads' keys and values come from one short vector a position. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        dim: Model width C.
        n_heads: Heads H.
        kv_lora_rank: Width r of the latent.
        qk_nope_head_dim: Width of a head's query and key that is not rotated.
        qk_rope_head_dim: Width that is; the rotated key is the same for all heads.
        v_head_dim: Width of a head's value.
        q_lora_rank: Width of the queries' own latent; None means that they have none.
        scale: Factor of the scores; None means ``(nope + rope) ** -0.5``.
        eps: Of the norms.

    Attributes:
        q_proj: ``nn.Linear`` of the queries; with a ``q_lora_rank`` instead ``q_a_proj``, ``q_a_layernorm``,
            ``q_b_proj``.
        kv_a_proj_with_mqa: ``nn.Linear`` from C to the latent, followed by the one rotated key.
        kv_a_layernorm: chapter 4's ``RMSNorm`` of the latent.
        kv_b_proj: ``nn.Linear`` from the latent to, for each head, the rows of its key, followed by those of its value.
        o_proj: ``nn.Linear`` from H * v to C. No projection has a bias.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; names and shapes are the checkpoint's.
    Convention: a head's query is [nope, rope], rotated in interleaved pairs.
    """

    def __init__(self, dim: int, n_heads: int, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int,
        v_head_dim: int, q_lora_rank: int | None = None, scale: float | None = None, eps: float = 1e-6):  # fmt: skip
        super().__init__()
        self.n_heads, self.rank, self.q_lora_rank = n_heads, kv_lora_rank, q_lora_rank
        self.nope, self.rope, self.v = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        ### BEGIN SOLUTION
        width = self.nope + self.rope
        self.scale = width**-0.5 if scale is None else scale
        if q_lora_rank is None:
            self.q_proj = nn.Linear(dim, n_heads * width, bias=False)
        else:
            self.q_a_proj, self.q_a_layernorm = nn.Linear(dim, q_lora_rank, bias=False), RMSNorm(q_lora_rank, eps)
            self.q_b_proj = nn.Linear(q_lora_rank, n_heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, kv_lora_rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(kv_lora_rank, n_heads * (self.nope + v_head_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_head_dim, dim, bias=False)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"], rope: Complex[Tensor, "t half_r"], cache: LatentCache | None = None,
                absorb: bool = False) -> Float[Tensor, "b t c"]:  # fmt: skip
        """Attend from each position of ``x`` to itself and to what is before it.

        Args:
            x: ``[B, T, C]``.
            rope: Rotations ``[T, rope/2]`` of these T positions.
            cache: Holds the S - T positions before these: normed latents and rotated keys.
            absorb: Move ``kv_b_proj``'s key rows into the query, and its value rows behind the weighted mean of
                latents. Same output and gradients, but no tensor of ``S * H * min(nope, v)`` numbers is made.

        Returns:
            ``[B, T, C]``, on the device of ``x``.
        """
        ### BEGIN SOLUTION
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, turned = q.unflatten(-1, (self.n_heads, -1)).split([self.nope, self.rope], dim=-1)
        latents, key = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        latents, key = self.kv_a_layernorm(latents), apply_partial_rope(key[:, :, None], rope)[:, :, 0]
        if cache is not None:
            latents, key = cache.update(latents, key)
        attend = self._absorbed if absorb else self._expanded
        mask = sliding_window_mask(x.shape[1], key.shape[1], device=x.device)
        out = attend(q.transpose(1, 2), apply_partial_rope(turned, rope).transpose(1, 2), latents, key, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _expanded(self, q: Tensor, turned: Tensor, latents: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        keys, values = self.kv_b_proj(latents).unflatten(-1, (self.n_heads, -1)).split([self.nope, self.v], dim=-1)
        keys = torch.cat([keys, key[:, :, None].expand(-1, -1, self.n_heads, -1)], dim=-1)
        q = torch.cat([q, turned], dim=-1)
        return grouped_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask, self.scale)

    def _absorbed(self, q: Tensor, turned: Tensor, latents: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        up_keys, up_values = self.kv_b_proj.weight.unflatten(0, (self.n_heads, -1)).split([self.nope, self.v], dim=1)
        q = torch.cat([q @ up_keys, turned], dim=-1)  # H queries against one head of keys, the latents
        keys = torch.cat([latents, key], dim=-1)[:, None]
        return grouped_attention(q, keys, latents[:, None], mask, self.scale) @ up_values.mT

    ### END SOLUTION


def hybrid_layer_types(n_layers: int, interval: int, other: str = "sliding_attention") -> list[str]:
    """The kind of each layer, where every ``interval``-th sees everything. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        n_layers: Number L of layers.
        interval: Layer i is full where ``interval`` divides ``i + 1``: 2 in Gemma 2 and gpt-oss, 4 in OLMo 3, 6 in
            Gemma 3.
        other: Kind of all other layers.

    Returns:
        L strings, "full_attention" or ``other``.

    Raises:
        ValueError: ``interval`` is below 1; the message names it.

    Source: ``layer_types`` in Transformers' configurations.
    """
    ### BEGIN SOLUTION
    if interval < 1:
        raise ValueError(f"interval = {interval}: expected at least 1")
    return [other if (i + 1) % interval else "full_attention" for i in range(n_layers)]
    ### END SOLUTION


def cache_bytes(config, batch: int, length: int, bytes_per_value: int = 2) -> int:
    """Bytes that the caches of all layers hold. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Read by attribute: ``layer_types``, and what their kinds need of ``n_kv_heads``, ``head_dim``,
            ``sliding_window``, ``kv_lora_rank`` and ``qk_rope_head_dim``.
        batch: Number B of sequences.
        length: Positions of each.
        bytes_per_value: 2 for bfloat16.

    Returns:
        Values of equation (23.11), summed over the layers, times ``batch * bytes_per_value``.

    Raises:
        ValueError: a kind that is not "full_attention", "sliding_attention" or "latent_attention"; the message shows
            it.
    """
    ### BEGIN SOLUTION
    values, c = 0, config
    for kind in check_kinds(config.layer_types):
        if kind == "latent_attention":
            values += (c.kv_lora_rank + c.qk_rope_head_dim) * length
        else:
            held = length if kind == "full_attention" else min(length, c.sliding_window)
            values += 2 * c.n_kv_heads * c.head_dim * held
    return values * batch * bytes_per_value
    ### END SOLUTION


def variant_flops(config, n_queries: int, n_keys: int, absorb: bool = False) -> int:
    """FLOPs of the two products of attention over visible pairs, forward, one sequence, all layers. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        config: As for `cache_bytes`, with ``n_heads``, ``qk_nope_head_dim`` and ``v_head_dim``.
        n_queries: Number T of queries, aligned to the last key.
        n_keys: Number S of keys.
        absorb: How latent layers are computed; changes nothing in others.

    Returns:
        2 FLOPs a multiply-add, by equations (23.12) and (23.13). Other projections are not counted; no mask is built.

    Raises:
        ValueError: another kind of layer, as in `cache_bytes`.
    """
    ### BEGIN SOLUTION
    flops, c, positions = 0, config, range(n_keys - n_queries, n_keys)
    for kind, n_layers in Counter(check_kinds(config.layer_types)).items():
        sees = c.sliding_window if kind == "sliding_attention" else n_keys
        pairs = sum(min(max(p + 1, 0), sees) for p in positions)
        if kind == "latent_attention":
            nope, rope, r, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank, c.v_head_dim
            each, turned = (2 * r + rope, n_queries) if absorb else (nope + rope + v, n_keys)
            flops += n_layers * 2 * c.n_heads * (pairs * each + turned * r * (nope + v))
        else:
            flops += n_layers * 4 * c.n_heads * c.head_dim * pairs
    return flops
    ### END SOLUTION


def packed_positions(cu_seqlens: Int[Tensor, " ends"]) -> Int[Tensor, " t"]:
    """Position of each token in its own document, for RoPE. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        cu_seqlens: int32 ``[N + 1]``: 0 first, then the end of each document; the last is the number T of tokens. A
            document may be empty.

    Returns:
        int64 ``[T]``, from 0 in each document, on the device of ``cu_seqlens``.

    Raises:
        ValueError: the ends do not begin with 0, or fall; the message shows them.

    Convention: FlashAttention's varlen interface.
    """
    ### BEGIN SOLUTION
    lengths = document_lengths(cu_seqlens)
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    return torch.arange(len(starts), device=cu_seqlens.device) - starts
    ### END SOLUTION


def document_mask(cu_seqlens: Int[Tensor, " ends"], window: int | None = None) -> Bool[Tensor, "t t"]:
    """Which tokens of a packed row may attend to which: causal, and inside of each document. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        cu_seqlens: As for `packed_positions`.
        window: As for `sliding_window_mask`.

    Returns:
        Boolean ``[T, T]``, True = may attend.

    Raises:
        ValueError: as `packed_positions`; ``window`` is below 1.
    """
    ### BEGIN SOLUTION
    lengths = document_lengths(cu_seqlens)
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    same = document[:, None] == document
    return same & sliding_window_mask(len(document), len(document), window, cu_seqlens.device)
    ### END SOLUTION


def varlen_attention(
    q: Float[Tensor, "t h d"], k: Float[Tensor, "t g d"], v: Float[Tensor, "t g dv"], cu_seqlens: Int[Tensor, " ends"],
    window: int | None = None, scale: float | None = None) -> Float[Tensor, "t h dv"]:  # fmt: skip
    """Attention of a packed row at the cost of its documents. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        q: Queries ``[T, H, D]``.
        k: Keys ``[T, G, D]``.
        v: Values ``[T, G, Dv]``.
        cu_seqlens: As for `packed_positions`.
        window: As for `sliding_window_mask`.
        scale: Factor of the scores; None means ``D ** -0.5``.

    Returns:
        ``[T, H, Dv]``: attention under `document_mask`, differentiable.

    Raises:
        ValueError: as `packed_positions`, or the last end is not T; the message shows the ends. ``window`` is below 1.

    Cost: no product between two documents, and no tensor of ``T * T / 4`` numbers, also where one document is the
        whole row.
    """
    ### BEGIN SOLUTION
    lengths = document_lengths(cu_seqlens, len(q)).tolist()
    documents = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
    out = [q.new_zeros(1, q.shape[1], 0, v.shape[-1])]
    for query, key, value in documents:
        length = query.shape[2]
        rows = max(1, len(q) ** 2 // (8 * q.shape[1] * max(length, 1)))  # scores of at most T * T / 8 numbers
        for start in range(0, length, rows):
            end = min(start + rows, length)
            first = 0 if window is None else max(0, start - window + 1)
            mask = sliding_window_mask(end - start, end - first, window, q.device)
            seen = slice(first, end)
            out.append(grouped_attention(query[:, :, start:end], key[:, :, seen], value[:, :, seen], mask, scale))
    return torch.cat(out, dim=2)[0].transpose(0, 1)
    ### END SOLUTION


def flash_window_forward(
    q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s dv"], window: int | None = None,
    sinks: Float[Tensor, " h"] | None = None, rows: int = 64, cols: int = 64,
) -> tuple[Float[Tensor, "b h t dv"], Float[Tensor, "b h t"]]:  # fmt: skip
    """Chapter 15's forward in tiles, with a window and a sink. (Exercise)

    Size: 40 minutes, difficulty 4, core.

    Args:
        q: Queries ``[B, H, T, D]``; the last one is at the position of the last key.
        k: Keys ``[B, G, S, D]``.
        v: Values ``[B, G, S, Dv]``.
        window: As for `sliding_window_mask`.
        sinks: As for `grouped_attention`.
        rows: Queries in a tile, from query 0; the last tile is cut, not padded.
        cols: Keys in a tile, from key 0, likewise.

    Returns:
        ``(o, lse)``: ``[B, H, T, Dv]`` in the dtype of ``q``; and ``[B, H, T]`` in float32 (float64 for float64), the
        natural logsumexp of the scaled visible scores, the sink counted. A row that sees nothing gives 0 and -inf (or
        its sink).

    Cost: of a tile without a visible pair nothing is computed; no tensor of ``T * S / 4`` numbers.
    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1; equation (15.3).
    Convention: on a GPU, `launch_window` runs `flash_window_kernel` instead, in tiles of its own.
    """
    if fits_window(q, k, v, window):
        return launch_window(flash_window_kernel, q, k, v, window, sinks)
    ### BEGIN SOLUTION
    (batch, n_heads, n_queries, width), (n_groups, n_keys) = q.shape, k.shape[1:3]
    window, shared, ahead = n_keys if window is None else window, n_heads // n_groups, n_keys - n_queries
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=dtype)
    sink = torch.full((n_heads,), -math.inf) if sinks is None else sinks
    sink = sink.to(q.device, dtype).view(n_groups, shared, 1)
    for top in range(0, n_queries, rows):
        query = q[:, :, top : top + rows].to(dtype) * width**-0.5
        size, first = query.shape[2], top + ahead  # the tile's queries are at positions first .. first + size - 1
        query = query.reshape(batch, n_groups, -1, width)
        m = sink.expand(batch, -1, -1, size).flatten(2)
        l, acc = (m > -math.inf).to(dtype), m.new_zeros(*m.shape, v.shape[-1])
        for left in range(max(0, first - window + 1) // cols * cols, min(n_keys, first + size), cols):
            keys, values = (x[:, :, left : left + cols].to(dtype) for x in (k, v))
            seen = torch.ones(size, keys.shape[2], dtype=torch.bool, device=q.device)
            seen = seen.tril(first - left).triu(first - left - window + 1).repeat(shared, 1)
            m, l, acc = online_softmax_update(m, l, acc, (query @ keys.mT).masked_fill(~seen, -math.inf), values)
        at = slice(top, top + size)
        out[:, :, at] = (acc / l.masked_fill(l == 0, 1)[..., None]).view(batch, n_heads, size, -1)
        lse[:, :, at] = (m + torch.log(l)).view(batch, n_heads, size)
    return out, lse
    ### END SOLUTION


@triton.jit
def flash_window_kernel(q, k, v, sinks, o, lse, T, S, window, scale, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Output and logsumexp of one tile of queries; the grid is (query heads, tiles of queries). (Exercise)

    Size: 60 minutes, difficulty 5, stretch.

    Args:
        q: Pointer to the queries ``[heads, T, D]``, contiguous like all tensors here; heads are those of all batches.
        k: Pointer to the keys ``[heads / GROUP, S, D]``.
        v: Pointer to the values ``[heads / GROUP, S, DV]``.
        sinks: Pointer to float32 ``[heads]``; -inf is no sink.
        o: Pointer to the output ``[heads, T, DV]``.
        lse: Pointer to float32 ``[heads, T]``: the natural logsumexp, the sink counted.
        T: Number of queries; the last one is at the position of the last key.
        S: Number of keys.
        window: Number of keys that a query sees, itself counted; S or more for all of them.
        scale: Factor of the scores.
        GROUP: Query heads that share a head of keys.
        D: Width of queries and keys.
        DV: Width of values.
        WIDTH: Power of two that holds D.
        WIDTH_V: Power of two that holds DV.
        ROWS: Queries in a tile.
        COLS: Keys in a tile.

    Returns:
        Nothing. The kernel writes ``o`` and ``lse``.

        - It reads and writes nothing outside the tensors, and reads no tile of keys that none of its queries sees.
        - Sums are in float32, without TF32. Weights are cast to the dtype of ``v`` before their product.

    Source: as for `flash_window_forward`.
    """
    ### BEGIN SOLUTION
    head, i = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    rows, dims, dims_v = i * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH_V)[None, :]
    row, here = head * T + rows[:, None], rows[:, None] < T
    query = tl.load(q + row * D + dims, mask=here & (dims < D), other=0.0)
    m = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head) * LOG2E
    l = tl.where(m == -float("inf"), 0.0, 1.0)
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    at = rows + S - T  # positions of the queries
    begin = tl.maximum(i * ROWS + S - T - window + 1, 0) // COLS * COLS
    end = tl.minimum(S, tl.maximum(tl.minimum(i * ROWS + ROWS, T) + S - T, 0))
    for start in tl.range(begin, end, COLS):
        cols = start + tl.arange(0, COLS)
        part, there = head // GROUP * S + cols[:, None], cols[:, None] < S
        key = tl.load(k + part * D + dims, mask=there & (dims < D), other=0.0)
        value = tl.load(v + part * DV + dims_v, mask=there & (dims_v < DV), other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        seen = (cols[None, :] <= at[:, None]) & (cols[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights, decay = tl.exp2(scores - shift[:, None]), tl.exp2(m - shift)
        l = l * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    out = (acc / l[:, None]).to(o.dtype.element_ty)
    tl.store(o + row * DV + dims_v, out, mask=here & (dims_v < DV))
    tl.store(lse + head * T + rows, (m + tl.log2(l)) * LN2, mask=rows < T)
    ### END SOLUTION
