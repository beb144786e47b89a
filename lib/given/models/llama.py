"""Sizes of Llama 2: those that Meta released, and a tiny one that a laptop trains in half a minute."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama: they determine the shape of every tensor.

    Attributes:
        vocab_size: Number of tokens V.
        dim: Model width C; a multiple of ``n_heads``.
        n_layers: Number of blocks L.
        n_heads: Number of query heads H.
        n_kv_heads: Number of key/value heads G, a divisor of H; None means H.
        hidden_dim: Feed-forward width F; None means Meta's rule: two thirds of 4 x ``dim``, widened and rounded up.
        multiple_of: Meta's rule rounds up to a multiple of this.
        ffn_dim_multiplier: Meta's rule widens by this factor.
        context_len: Largest number of positions.
        norm_eps: Added to the mean square in every RMSNorm.
        rope_theta: Base of the rotary frequencies.
    """

    vocab_size: int = 32_000
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = None  # type: ignore[assignment]
    hidden_dim: int = None  # type: ignore[assignment]
    multiple_of: int = 256
    ffn_dim_multiplier: float = 1.0
    context_len: int = 4096
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self):
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.dim % self.n_heads:
            raise ValueError(f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}")
        if self.hidden_dim is None:
            width = int(self.ffn_dim_multiplier * (8 * self.dim // 3))
            object.__setattr__(self, "hidden_dim", -(-width // self.multiple_of) * self.multiple_of)

    @property
    def head_dim(self) -> int:
        """Width D of a head."""
        return self.dim // self.n_heads


LLAMA_2_7B = LlamaConfig(dim=4096, n_layers=32, n_heads=32, hidden_dim=11_008)
LLAMA_2_13B = LlamaConfig(dim=5120, n_layers=40, n_heads=40, hidden_dim=13_824)
LLAMA_2_70B = LlamaConfig(
    dim=8192,
    n_layers=80,
    n_heads=64,
    n_kv_heads=8,
    hidden_dim=28_672,
    multiple_of=4096,
    ffn_dim_multiplier=1.3,
)
TINY = LlamaConfig(
    vocab_size=1024,
    dim=128,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=352,
    multiple_of=32,
    context_len=256,
)
PRESETS = {"7B": LLAMA_2_7B, "13B": LLAMA_2_13B, "70B": LLAMA_2_70B, "tiny": TINY}


def hf_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """For the name of every tensor in Transformers' checkpoint: its name in Meta's, and its shape,
    which is the same in both.
    """
    C, F, V = config.dim, config.hidden_dim, config.vocab_size
    kv_width = config.n_kv_heads * config.head_dim
    block = {
        "self_attn.q_proj": ("attention.wq", (C, C)),
        "self_attn.k_proj": ("attention.wk", (kv_width, C)),
        "self_attn.v_proj": ("attention.wv", (kv_width, C)),
        "self_attn.o_proj": ("attention.wo", (C, C)),
        "mlp.gate_proj": ("feed_forward.w1", (F, C)),
        "mlp.down_proj": ("feed_forward.w2", (C, F)),
        "mlp.up_proj": ("feed_forward.w3", (F, C)),
        "input_layernorm": ("attention_norm", (C,)),
        "post_attention_layernorm": ("ffn_norm", (C,)),
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("tok_embeddings.weight", (V, C))}
    for layer in range(config.n_layers):
        for theirs, (metas, shape) in block.items():
            found[f"model.layers.{layer}.{theirs}.weight"] = (f"layers.{layer}.{metas}.weight", shape)
    found["model.norm.weight"] = ("norm.weight", (C,))
    found["lm_head.weight"] = ("output.weight", (V, C))
    return found


def meta_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of Meta's checkpoint, by its name there."""
    return dict(hf_tensors(config).values())


def rope_of(frequencies: Float[Tensor, " half_d"], length: int, factor: float = 1.0) -> Complex[Tensor, "t half_d"]:
    """The rotations of positions 0 to ``length - 1``, whose modulus is ``factor``."""
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies.double())
    return torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64)
