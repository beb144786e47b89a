"""Settings of Llamas with chapter 23's variants: Qwen3, OLMo 3 and Gemma 3, and the names of their weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lib.given.kernels.fits import check_heads
from lib.given.models.llama import LlamaConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class VariantConfig(LlamaConfig):
    """A ``LlamaConfig`` with chapter 23's variants; the defaults describe the Llama of chapter 4.

    Attributes:
        head_dim: Width D of a head; None means C/H.
        qk_norm: Norm of queries and keys: None, "head" or "width", as in ``CausalAttention``.
        norms: Where a block has its norms: "before" each of its two parts, "after" it, or "both".
        norm_offset: The gain of every norm is this number plus its weight.
        activation: Of the feed-forward layer's gate: "silu" or "gelu_tanh".
        scaled_embeddings: Whether embeddings are multiplied by the square root of ``dim``.
        tied: Whether the output layer's weight is the embedding's.
        scale: Factor of the scores; None means ``D ** -0.5``.
        layer_types: Kind of each layer, "full_attention" or "sliding_attention"; empty means that all are full.
        sliding_window: Keys that a query of a sliding layer sees, its own counted.
        sliding_rope_theta: Base of the rotary frequencies of sliding layers.
            None means that they turn like the full ones.
        rope_scaling: How the frequencies of ``rope_theta`` are changed, by Transformers' names:
            its ``rope_type`` is "linear", "llama3" or "yarn". None means not at all.
    """

    head_dim: int = None  # type: ignore[assignment]
    qk_norm: str | None = None
    norms: str = "before"
    norm_offset: float = 0.0
    activation: str = "silu"
    scaled_embeddings: bool = False
    tied: bool = False
    scale: float | None = None
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int | None = None
    sliding_rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self):
        if self.head_dim is None:
            super().__post_init__()
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        check_heads(self.n_heads, self.n_kv_heads)
        if self.hidden_dim is None:
            raise ValueError("hidden_dim = None: expected the feed-forward width")
        object.__setattr__(self, "layer_types", list(self.layer_types) or [FULL] * self.n_layers)
        chosen = {"norms": ("before", "after", "both"), "activation": ("silu", "gelu_tanh")}
        for name, known in chosen.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {', '.join(known)}")
        strange = [kind for kind in self.layer_types if kind not in (FULL, SLIDING)]
        if strange or len(self.layer_types) != self.n_layers:
            raise ValueError(
                f"layer_types = {self.layer_types}: expected {FULL} or {SLIDING} for {self.n_layers} layers"
            )
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding_window = {self.sliding_window}: expected at least 1, for the sliding layers")

    @property
    def windows(self) -> list[int | None]:
        """For each layer the keys that a query sees; None for all up to its own."""
        return [self.sliding_window if kind == SLIDING else None for kind in self.layer_types]


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head"},
    "olmo3": {"qk_norm": "width", "norms": "after"},
    "gemma3": {
        "qk_norm": "head", "norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "scaled_embeddings": True,
    },
}  # fmt: skip
"""What all models of a family have in common; the other fields are sizes."""


def family_of(config: VariantConfig) -> str:
    """The family whose fields a model has.

    Raises:
        ValueError: no family has them all; the message shows them.
    """
    names = sorted({name for fields in FAMILIES.values() for name in fields})
    plain = {name: VariantConfig.__dataclass_fields__[name].default for name in names}
    found = {name: getattr(config, name) for name in names}
    for family, fields in FAMILIES.items():
        if found == plain | fields:
            return family
    raise ValueError(f"no family of Transformers' has {found}: expected one of {', '.join(FAMILIES)}")


Names = Mapping[str, tuple[str, tuple[int, ...]]]


def variant_tensors(config: VariantConfig) -> Names:
    """For the name of every tensor in Transformers' checkpoint: its name in the book's model, and its shape,
    which is the same in both.
    """
    C, F, V, D = config.dim, config.hidden_dim, config.vocab_size, config.head_dim
    q_width, kv_width = config.n_heads * D, config.n_kv_heads * D
    block: dict[str, tuple[str, tuple[int, ...]]] = {
        "self_attn.q_proj": ("attention.q_proj", (q_width, C)),
        "self_attn.k_proj": ("attention.k_proj", (kv_width, C)),
        "self_attn.v_proj": ("attention.v_proj", (kv_width, C)),
        "self_attn.o_proj": ("attention.o_proj", (C, q_width)),
        "mlp.gate_proj": ("feed_forward.w1", (F, C)),
        "mlp.down_proj": ("feed_forward.w2", (C, F)),
        "mlp.up_proj": ("feed_forward.w3", (F, C)),
    }
    if config.qk_norm is not None:
        sizes = (D, D) if config.qk_norm == "head" else (q_width, kv_width)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            block[f"self_attn.{name}"] = (f"attention.{name}", (size,))
    block |= {theirs: (ours, (C,)) for theirs, ours in _norm_names(config.norms).items()}
    found: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("tok_embeddings.weight", (V, C))}
    for layer in range(config.n_layers):
        for theirs, (ours, shape) in block.items():
            found[f"model.layers.{layer}.{theirs}.weight"] = (f"layers.{layer}.{ours}.weight", shape)
    found["model.norm.weight"] = ("norm.weight", (C,))
    return found if config.tied else found | {"lm_head.weight": ("output.weight", (V, C))}


def _norm_names(norms: str) -> dict[str, str]:
    """Transformers' names of a block's norms, and ours; ``post_attention_layernorm`` has two meanings there."""
    if norms == "before":
        return {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    after = {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "ffn_post_norm"}
    before = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
    return after if norms == "after" else before | after
