"""Settings of Llamas with the variants of chapters 23 and 24, those of Qwen3, OLMo 3, Gemma 2 and 3, gpt-oss and
Qwen3-Next, and the names of their weights.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lib.given.kernels.fits import check_heads
from lib.given.models.llama import LlamaConfig

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
"""Sizes of a linear layer, by Transformers' names, which chapter 24's ``hybrid_cache_bytes`` reads."""


@dataclass(frozen=True, kw_only=True)
class VariantConfig(LlamaConfig):
    """A ``LlamaConfig`` with the variants of chapters 23 and 24; the defaults describe the Llama of chapter 4.

    Attributes:
        head_dim: Width D of a head; None means C/H.
        qk_norm: Norm of queries and keys: None, "head" or "width", as in ``CausalAttention``.
        norms: Where a block has its norms: "before" each of its two parts, "after" it, or "both".
        norm_offset: The gain of every norm is this number plus its weight.
        activation: Of the feed-forward layer's gate: "silu", "gelu_tanh", or "clamped", which is that of experts.
        n_experts: Experts of a feed-forward layer; 0 where it has none.
        top_k: Experts that compute a token.
        bias: Whether the projections of attention have biases.
        sinks: Whether each head has a sink, as in ``CausalAttention``.
        scaled_embeddings: Whether embeddings are multiplied by the square root of ``dim``.
        tied: Whether the output layer's weight is the embedding's.
        scale: Factor of the scores; None means ``D ** -0.5``.
        softcap: Cap of the scores, as in ``CausalAttention``; None means no cap.
        logits_softcap: Cap of the logits, likewise.
        gate: Whether the heads' output is multiplied by a gate, as in ``CausalAttention``.
        layer_types: Kind of each layer: "full_attention", "sliding_attention" or chapter 24's "linear_attention".
            Empty means that all are full.
        sliding_window: Keys that a query of a sliding layer sees, its own counted.
        sliding_rope_theta: Base of the rotary frequencies of sliding layers.
            None means that they turn like the full ones.
        rope_scaling: How the frequencies of ``rope_theta`` are changed, by Transformers' names:
            its ``rope_type`` is "linear", "llama3" or "yarn". None means not at all.
        rotary_share: Share of a head's features that turn, the first ones.
        linear_num_key_heads: Heads of queries and keys in a linear layer, a ``GatedDeltaNet``.
        linear_num_value_heads: Its heads of values.
        linear_key_head_dim: Width of its queries and keys.
        linear_value_head_dim: Width of its values.
        linear_conv_kernel_dim: Inputs that an output of its convolution sees.
    """

    head_dim: int = None  # type: ignore[assignment]
    qk_norm: str | None = None
    norms: str = "before"
    norm_offset: float = 0.0
    activation: str = "silu"
    n_experts: int = 0
    top_k: int = 0
    bias: bool = False
    sinks: bool = False
    scaled_embeddings: bool = False
    tied: bool = False
    scale: float | None = None
    softcap: float | None = None
    logits_softcap: float | None = None
    gate: bool = False
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int | None = None
    sliding_rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rotary_share: float = 1.0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4

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
        chosen = {"norms": ("before", "after", "both"), "activation": ("silu", "gelu_tanh", "clamped")}
        for name, known in chosen.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {', '.join(known)}")
        if (self.activation == "clamped") != (0 < self.top_k <= self.n_experts):
            raise ValueError(
                f"activation = {self.activation!r} with top_k = {self.top_k} of n_experts = {self.n_experts}: "
                "expected 'clamped' with 1 <= top_k <= n_experts, or neither"
            )
        self._check_layers()

    def _check_layers(self) -> None:
        known = FULL, SLIDING, LINEAR
        if len(self.layer_types) != self.n_layers or any(kind not in known for kind in self.layer_types):
            raise ValueError(
                f"layer_types = {self.layer_types}: expected one of {', '.join(known)} for {self.n_layers} layers"
            )
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding_window = {self.sliding_window}: expected at least 1, for the sliding layers")
        sizes = {name: getattr(self, name) for name in LINEAR_SIZES}
        if LINEAR in self.layer_types and min(sizes.values()) < 1:
            raise ValueError(f"{sizes}: expected each to be at least 1, for the linear layers")

    @property
    def windows(self) -> list[int | None]:
        """For each layer that caches keys the number that a query sees; None for all up to its own."""
        return [self.sliding_window if kind == SLIDING else None for kind in self.layer_types if kind != LINEAR]

    @property
    def rotary_dim(self) -> int:
        """Features of a head that turn."""
        return int(self.head_dim * self.rotary_share)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head"},
    "olmo3": {"qk_norm": "width", "norms": "after"},
    "gemma2": {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "scaled_embeddings": True},
    "gemma3": {
        "qk_norm": "head", "norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "scaled_embeddings": True,
    },
    "gpt_oss": {"activation": "clamped", "bias": True, "sinks": True},
    "qwen3_next": {"qk_norm": "head", "norm_offset": 1.0, "gate": True},
}  # fmt: skip
"""What all models of a family have in common; the other fields are sizes."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What Transformers takes for a setting that is absent.

    Attributes:
        theta, sliding_theta: Bases of the rotary frequencies; ``sliding_theta`` None: all layers turn alike.
        eps: Of the norms.
        window: Keys that a sliding layer sees; None: it has no such layers.
        interval: Every ``interval``-th layer is full; None: ``use_sliding_window`` and ``max_window_layers`` decide.
        tied: Whether the output layer's weight is the embedding's.
        caps: Of the scores and of the logits.
    """

    theta: float
    sliding_theta: float | None
    eps: float
    window: int | None
    interval: int | None
    tied: bool
    caps: tuple[float | None, float | None] = (None, None)


DEFAULTS = {
    "qwen3": Defaults(theta=1e4, sliding_theta=None, eps=1e-6, window=4096, interval=None, tied=False),
    "olmo3": Defaults(theta=5e5, sliding_theta=5e5, eps=1e-5, window=4096, interval=4, tied=False),
    "gemma2": Defaults(theta=1e4, sliding_theta=None, eps=1e-6, window=4096, interval=2, tied=True, caps=(50.0, 30.0)),
    "gemma3": Defaults(theta=1e6, sliding_theta=1e4, eps=1e-6, window=4096, interval=6, tied=True),
    "gpt_oss": Defaults(theta=1.5e5, sliding_theta=None, eps=1e-5, window=128, interval=2, tied=False),
    "qwen3_next": Defaults(theta=1e4, sliding_theta=None, eps=1e-6, window=None, interval=4, tied=False),
}


def variant_of(
    sizes: LlamaConfig, family: str, window: int | None = None, interval: int | None = None
) -> VariantConfig:
    """A family's model with the sizes of a Llama, for training.

    Args:
        sizes: Widths, heads, layers and context.
        family: One of ``FAMILIES``.
        window: Keys that a sliding layer sees; None takes a quarter of the context where the family has windows.
        interval: Every ``interval``-th layer sees everything; None takes the family's, or the number of layers.

    gpt-oss gets one expert a layer, so that there is nothing to balance.
    Linear layers get Qwen3-Next's proportions: as many key heads as there are heads, twice as many value heads.
    """
    known, heads = (
        DEFAULTS[family],
        {"linear_num_key_heads": sizes.n_heads, "linear_num_value_heads": 2 * sizes.n_heads},
    )
    kind = LINEAR if family == "qwen3_next" else SLIDING
    has_windows = kind == SLIDING and (window is not None or known.interval is not None)
    every = min(interval or known.interval or 4, sizes.n_layers) if kind == LINEAR or has_windows else 1
    more: dict[str, Any] = {"sliding_window": window or max(1, sizes.context_len // 4)} if has_windows else {}
    if kind == LINEAR:
        more |= heads | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), sizes.head_dim)
        more["rotary_share"] = 0.25
    if family == "gpt_oss":
        more |= {"n_experts": 1, "top_k": 1}
    return VariantConfig(
        **asdict(sizes) | FAMILIES[family] | more | {"norm_eps": known.eps, "rope_theta": known.theta},
        tied=known.tied, softcap=known.caps[0], logits_softcap=known.caps[1], sliding_rope_theta=known.sliding_theta,
        layer_types=[kind if (i + 1) % every else FULL for i in range(sizes.n_layers)],
    )  # fmt: skip


def family_of(config: VariantConfig) -> str:
    """The family whose fields a model has.

    Raises:
        ValueError: no family has them all; the message shows them.
    """
    names = sorted({name for fields in FAMILIES.values() for name in fields})
    plain = {name: VariantConfig.__dataclass_fields__[name].default for name in names}
    found = {name: getattr(config, name) for name in names}
    found |= (caps := {name: getattr(config, name) for name in ("softcap", "logits_softcap")})
    for family, fields in FAMILIES.items():
        if found == plain | (caps if family == "gemma2" else dict.fromkeys(caps)) | fields:
            return family
    raise ValueError(f"no family of Transformers' has {found}: expected one of {', '.join(FAMILIES)}")


SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim", "intermediate_size": "hidden_dim",
    "max_position_embeddings": "context_len",
}  # fmt: skip
"""Names in ``config.json``, and the fields of ``VariantConfig`` that they set."""


TYPES = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "olmo3": ("olmo3", "Olmo3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
}
"""Transformers' ``model_type`` and class of each family."""


def settings_of(config: VariantConfig) -> dict[str, Any]:
    """What Transformers' ``config.json`` says of a configuration.

    Raises:
        ValueError: no family has such a model.
    """
    family = family_of(config)
    kind, name = TYPES[family]
    activation = {"hidden_activation": "gelu_pytorch_tanh"} if "gemma" in family else {"hidden_act": "silu"}
    found: dict[str, Any] = {"architectures": [name], "model_type": kind, "dtype": "float32", **activation}
    found |= {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} | {"rms_norm_eps": config.norm_eps}
    found |= {"tie_word_embeddings": config.tied, "layer_types": config.layer_types, "attention_bias": config.bias}
    found |= {"sliding_window": config.sliding_window} if SLIDING in config.layer_types else {}
    found |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return found | _rope_settings(config) | _own_settings(config, family)


def _rope_settings(config: VariantConfig) -> dict[str, Any]:
    """Transformers 4 reads the bases beside the other settings, Transformers 5 those among ``rope_parameters``."""
    full = (config.rope_scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
    if config.sliding_rope_theta is None:
        share = {} if config.rotary_share == 1.0 else {"partial_rotary_factor": config.rotary_share}
        return {"rope_theta": config.rope_theta, "rope_parameters": full | share, **share}
    local = {"rope_type": "default", "rope_theta": config.sliding_rope_theta}
    return {"rope_theta": config.rope_theta, "rope_parameters": {FULL: full, SLIDING: local}}


def _own_settings(config: VariantConfig, family: str) -> dict[str, Any]:
    """Settings that one family has."""
    if family == "qwen3":
        return {"use_sliding_window": SLIDING in config.layer_types}
    scale = {"query_pre_attn_scalar": config.head_dim if config.scale is None else _whole(config.scale**-2)}
    if family == "gemma2":
        return scale | {
            "attn_logit_softcapping": config.softcap, "final_logit_softcapping": config.logits_softcap,
        }  # fmt: skip
    if family == "gemma3":
        return scale | {"rope_local_base_freq": config.sliding_rope_theta}
    if family == "gpt_oss":
        return {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    if family == "qwen3_next":
        return {name: getattr(config, name) for name in LINEAR_SIZES} | {"num_experts": 0}
    return {}


def _whole(value: float) -> float:
    """A number that is whole but for rounding, as an integer."""
    return round(value) if math.isclose(value, round(value)) else value


Shape = tuple[int, ...]
Names = Mapping[str, tuple[str, Shape]]


def variant_tensors(config: VariantConfig) -> Names:
    """For the name of every tensor in Transformers' checkpoint: its name in the book's model, and its shape,
    which is the same in both.
    """
    C, V, block = config.dim, config.vocab_size, _feed_forward(config)
    block |= {f"{theirs}.weight": (f"{ours}.weight", (C,)) for theirs, ours in _norm_names(config.norms).items()}
    found: dict[str, tuple[str, Shape]] = {"model.embed_tokens.weight": ("tok_embeddings.weight", (V, C))}
    for layer, kind in enumerate(config.layer_types):
        theirs, shapes = ("linear_attn", _linear(config)) if kind == LINEAR else ("self_attn", _attention(config))
        mixer = {f"{theirs}.{name}": (f"attention.{name}", shape) for name, shape in shapes.items()}
        for theirs, (ours, shape) in (mixer | block).items():
            found[f"model.layers.{layer}.{theirs}"] = (f"layers.{layer}.{ours}", shape)
    found["model.norm.weight"] = ("norm.weight", (C,))
    return found if config.tied else found | {"lm_head.weight": ("output.weight", (V, C))}


def _feed_forward(config: VariantConfig) -> dict[str, tuple[str, Shape]]:
    C, F, E = config.dim, config.hidden_dim, config.n_experts
    if not E:
        shapes = {"gate_proj": ("w1", (F, C)), "down_proj": ("w2", (C, F)), "up_proj": ("w3", (F, C))}
        return {f"mlp.{name}.weight": (f"feed_forward.{ours}.weight", size) for name, (ours, size) in shapes.items()}
    routed: dict[str, Shape] = {
        "router.weight": (E, C), "router.bias": (E,), "experts.gate_up_proj": (E, C, 2 * F),
        "experts.gate_up_proj_bias": (E, 2 * F), "experts.down_proj": (E, F, C), "experts.down_proj_bias": (E, C),
    }  # fmt: skip
    return {f"mlp.{name}": (f"feed_forward.{name}", shape) for name, shape in routed.items()}


def _attention(config: VariantConfig) -> dict[str, Shape]:
    """The tensors of a ``CausalAttention``, whose names are Transformers'."""
    C, D = config.dim, config.head_dim
    q_width, kv_width = config.n_heads * D, config.n_kv_heads * D
    found: dict[str, Shape] = {
        "q_proj.weight": (q_width * (2 if config.gate else 1), C),
        "k_proj.weight": (kv_width, C),
        "v_proj.weight": (kv_width, C),
        "o_proj.weight": (C, q_width),
    }
    if config.bias:
        found |= {name.replace("weight", "bias"): shape[:1] for name, shape in found.items()}
    if config.sinks:
        found["sinks"] = (config.n_heads,)
    if config.qk_norm is not None:
        sizes = (D, D) if config.qk_norm == "head" else (q_width, kv_width)
        found |= {f"{name}.weight": (size,) for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)}
    return found


def _linear(config: VariantConfig) -> dict[str, Shape]:
    """The tensors of a ``GatedDeltaNet``, likewise."""
    C, n_heads = config.dim, config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, n_heads * config.linear_value_head_dim
    return {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, C),
        "in_proj_ba.weight": (2 * n_heads, C),
        "conv1d.weight": (2 * keys + values, 1, config.linear_conv_kernel_dim),
        "dt_bias": (n_heads,),
        "A_log": (n_heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (C, values),
    }


def _norm_names(norms: str) -> dict[str, str]:
    """Transformers' names of a block's norms, and ours; ``post_attention_layernorm`` has two meanings there."""
    if norms == "before":
        return {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    after = {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "ffn_post_norm"}
    before = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
    return after if norms == "after" else before | after
