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
from lib.attention import KVCache, causal_mask, softmax
from lib.flash_attention import online_softmax_update
from lib.llama import RMSNorm
from lib.rope import rope_frequencies


def qk_norm(x: Float[Tensor, "b t h d"], weight: Float[Tensor, " n"], eps: float = 1e-6,
            offset: float = 0.0) -> Float[Tensor, "b t h d"]:  # fmt: skip
    """RMSNorm of queries or keys. (Exercise 23.1)

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
    raise NotImplementedError("Exercise 23.1: write qk_norm")


def grouped_attention(
    q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s dv"],
    mask: Bool[Tensor, "... t s"] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None) -> Float[Tensor, "b h t dv"]:  # fmt: skip
    """Attention with shared keys, a soft cap on its scores, and a sink in its softmax. (Exercise 23.2)

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
    raise NotImplementedError("Exercise 23.2: write grouped_attention")


def llama3_frequencies(
    head_dim: int, factor: float = 8.0, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192, theta: float = 500_000.0) -> Float[Tensor, " half_d"]:  # fmt: skip
    """Frequencies of Llama 3.1, whose slow pairs turn ``factor`` times slower. (Exercise 23.3)

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
    raise NotImplementedError("Exercise 23.3: write llama3_frequencies")


def yarn_frequencies(
    head_dim: int, factor: float, original_max_position_embeddings: int, theta: float = 10_000.0,
    beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True, mscale: float | None = None,
    mscale_all_dim: float | None = None) -> tuple[Float[Tensor, " half_d"], float]:  # fmt: skip
    """YaRN's frequencies, and the factor of its cosines and sines. (Exercise 23.4)

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

    raise NotImplementedError("Exercise 23.4: write yarn_frequencies")


def apply_partial_rope(x: Float[Tensor, "b t h d"], rope: Complex[Tensor, "t half_r"],
                       layout: str = "interleaved") -> Float[Tensor, "b t h d"]:  # fmt: skip
    """Rotate the first R features of each head, and leave the others alone. (Exercise 23.5)

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
    raise NotImplementedError("Exercise 23.5: write apply_partial_rope")


def sliding_window_mask(n_queries: int, n_keys: int, window: int | None = None, device=None) -> Bool[Tensor, "t s"]:
    """Which keys each query may attend to if it sees the last few only. (Exercise 23.6)

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
    raise NotImplementedError("Exercise 23.6: write sliding_window_mask")


class RollingKVCache:
    """Keeps the keys and values of the last positions only: the newest overwrites the oldest. (Exercise 23.7)

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
        raise NotImplementedError("Exercise 23.7: write RollingKVCache.update")


class CausalAttention(nn.Module):
    """One layer with switches: Qwen3's, Gemma 2's and 3's, OLMo 3's, gpt-oss's or Qwen3-Next's. (Exercise 23.8)

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
        raise NotImplementedError("Exercise 23.8: write CausalAttention.__init__")

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
        raise NotImplementedError("Exercise 23.8: write CausalAttention.forward")


class LatentCache:
    """Keeps one latent and one rotated key a position, for all heads together. (Exercise 23.9)

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
        raise NotImplementedError("Exercise 23.9: write LatentCache.update")


class MultiHeadLatentAttention(nn.Module):
    """DeepSeek's attention: all heads' keys and values come from one short vector a position. (Exercise 23.10)

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
        raise NotImplementedError("Exercise 23.10: write MultiHeadLatentAttention.__init__")

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
        raise NotImplementedError("Exercise 23.10: write MultiHeadLatentAttention.forward")


def hybrid_layer_types(n_layers: int, interval: int, other: str = "sliding_attention") -> list[str]:
    """The kind of each layer, where every ``interval``-th sees everything. (Exercise 23.11)

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
    raise NotImplementedError("Exercise 23.11: write hybrid_layer_types")


def cache_bytes(config, batch: int, length: int, bytes_per_value: int = 2) -> int:
    """Bytes that the caches of all layers hold. (Exercise 23.12)

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
    raise NotImplementedError("Exercise 23.12: write cache_bytes")


def variant_flops(config, n_queries: int, n_keys: int, absorb: bool = False) -> int:
    """FLOPs of the two products of attention over visible pairs, forward, one sequence, all layers. (Exercise 23.13)

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
    raise NotImplementedError("Exercise 23.13: write variant_flops")


def packed_positions(cu_seqlens: Int[Tensor, " ends"]) -> Int[Tensor, " t"]:
    """Position of each token in its own document, for RoPE. (Exercise 23.14)

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
    raise NotImplementedError("Exercise 23.14: write packed_positions")


def document_mask(cu_seqlens: Int[Tensor, " ends"], window: int | None = None) -> Bool[Tensor, "t t"]:
    """Which tokens of a packed row may attend to which: causal, and inside of each document. (Exercise 23.15)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        cu_seqlens: As for `packed_positions`.
        window: As for `sliding_window_mask`.

    Returns:
        Boolean ``[T, T]``, True = may attend.

    Raises:
        ValueError: as `packed_positions`; ``window`` is below 1.
    """
    raise NotImplementedError("Exercise 23.15: write document_mask")


def varlen_attention(
    q: Float[Tensor, "t h d"], k: Float[Tensor, "t g d"], v: Float[Tensor, "t g dv"], cu_seqlens: Int[Tensor, " ends"],
    window: int | None = None, scale: float | None = None) -> Float[Tensor, "t h dv"]:  # fmt: skip
    """Attention of a packed row at the cost of its documents. (Exercise 23.16)

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
    raise NotImplementedError("Exercise 23.16: write varlen_attention")


def flash_window_forward(
    q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s dv"], window: int | None = None,
    sinks: Float[Tensor, " h"] | None = None, rows: int = 64, cols: int = 64,
) -> tuple[Float[Tensor, "b h t dv"], Float[Tensor, "b h t"]]:  # fmt: skip
    """Chapter 15's forward in tiles, with a window and a sink. (Exercise 23.17)

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
    raise NotImplementedError("Exercise 23.17: write flash_window_forward")


@triton.jit
def flash_window_kernel(q, k, v, sinks, o, lse, T, S, window, scale, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Output and logsumexp of one tile of queries; the grid is (query heads, tiles of queries). (Exercise 23.18)

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
    raise NotImplementedError("Exercise 23.18: write flash_window_kernel")
