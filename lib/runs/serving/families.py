"""Qwen3, OLMo 3 and Gemma 3: what their ``config.json`` must say, and the settings of the book's model for it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from lib.given.models.variants import FAMILIES, FULL, SLIDING, VariantConfig
from lib.runs.serving.kinds import ALIKE, Kind, Problems, is_number, shown
from lib.runs.serving.ropes import LOCAL, ROPE, problems_of_rope, rope_scaling, rope_theta

SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim", "intermediate_size": "hidden_dim",
    "max_position_embeddings": "context_len",
}  # fmt: skip
"""Names in ``config.json``, and the fields of ``VariantConfig`` that they set."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What Transformers takes for a setting that is absent.

    Attributes:
        theta, sliding_theta: Bases of the rotary frequencies; ``sliding_theta`` None: all layers turn alike.
        eps: Of the norms.
        window: Keys that a sliding layer sees.
        interval: Every so manieth layer is full; None: ``use_sliding_window`` and ``max_window_layers`` decide.
        tied: Whether the output layer's weight is the embedding's.
    """

    theta: float
    sliding_theta: float | None
    eps: float
    window: int
    interval: int | None
    tied: bool


DEFAULTS = {
    "qwen3": Defaults(theta=1e4, sliding_theta=None, eps=1e-6, window=4096, interval=None, tied=False),
    "olmo3": Defaults(theta=5e5, sliding_theta=5e5, eps=1e-5, window=4096, interval=4, tied=False),
    "gemma3": Defaults(theta=1e6, sliding_theta=1e4, eps=1e-6, window=4096, interval=6, tied=True),
}


def layer_types(settings: dict[str, Any], family: str) -> Any:
    """The kind of each layer, as the settings or Transformers' defaults have it."""
    interval, n_layers = DEFAULTS[family].interval, settings["num_hidden_layers"]
    if settings.get("layer_types") is not None:
        return settings["layer_types"]
    if interval is not None:
        interval = settings.get("sliding_window_pattern") or interval
        return [SLIDING if (i + 1) % interval else FULL for i in range(n_layers)]
    first = (settings.get("max_window_layers", 28)) if sliding_window(settings, family) is not None else n_layers
    return [SLIDING if i >= first else FULL for i in range(n_layers)]


def sliding_window(settings: dict[str, Any], family: str) -> Any:
    """Keys that a sliding layer sees; Qwen3 has windows only where ``use_sliding_window`` says so."""
    if family == "qwen3" and not settings.get("use_sliding_window"):
        return None
    return settings.get("sliding_window", DEFAULTS[family].window)


def config_of(settings: dict[str, Any], family: str) -> VariantConfig:
    """The configuration of the book's model, from settings without problems."""
    known, scale = DEFAULTS[family], settings.get("query_pre_attn_scalar", 256 if family == "gemma3" else None)
    sizes = {ours: settings[theirs] for theirs, ours in SIZES.items() if settings.get(theirs) is not None}
    head_dim = sizes.get("head_dim", sizes["dim"] // sizes["n_heads"])
    sliding = known.sliding_theta
    return VariantConfig(
        **FAMILIES[family], **sizes,
        norm_eps=settings.get("rms_norm_eps", known.eps),
        tied=bool(settings.get("tie_word_embeddings", known.tied)),
        scale=None if scale in (None, head_dim) else scale**-0.5,
        layer_types=layer_types(settings, family),
        sliding_window=sliding_window(settings, family),
        rope_theta=rope_theta(settings, known.theta),
        sliding_rope_theta=None if sliding is None else rope_theta(settings, sliding, SLIDING),
        rope_scaling=rope_scaling(settings),
    )  # fmt: skip


def problems(settings: dict[str, Any], family: str) -> Problems:
    """What is wrong with a family's settings, its sizes aside."""
    yield from problems_of_rope(settings, ("linear", "llama3", "yarn"), DEFAULTS[family].sliding_theta is not None)
    for name in ("tie_word_embeddings", "use_sliding_window"):
        if not isinstance(settings.get(name, False), bool):
            yield f"config.json: {name} = {shown(settings[name])}, expected true or false"
    scale = settings.get("query_pre_attn_scalar", 1)
    if not is_number(scale) or scale <= 0:
        yield f"config.json: query_pre_attn_scalar = {shown(scale)}, expected a number above 0"
    for name in ("sliding_window_pattern", "max_window_layers"):
        if type(settings.get(name, 1)) is not int or settings.get(name, 1) < (name == "sliding_window_pattern"):
            yield f"config.json: {name} = {shown(settings[name])}, expected an integer"
            return
    sizes: list[Any] = [settings.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    yield from _problems_of_heads(settings, *sizes[:2])
    yield from _problems_of_layers(settings, family)


def _problems_of_heads(settings: dict[str, Any], dim: int, n_heads: int) -> Problems:
    head_dim, groups = settings.get("head_dim"), settings.get("num_key_value_heads") or n_heads
    if head_dim is None and dim % n_heads:
        yield f"config.json: hidden_size = {dim} is not a multiple of num_attention_heads = {n_heads}"
    if type(groups) is int and groups > 0 and n_heads % groups:
        yield f"config.json: num_attention_heads = {n_heads} is not a multiple of num_key_value_heads = {groups}"
    if type(head_dim or 0) is int and (head_dim or dim // n_heads) % 2:
        yield f"config.json: head_dim = {head_dim or dim // n_heads} is odd, expected pairs to rotate"


def _problems_of_layers(settings: dict[str, Any], family: str) -> Problems:
    types, window = layer_types(settings, family), sliding_window(settings, family)
    n_layers = settings["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, SLIDING) for kind in types):
        yield f"config.json: layer_types = {shown(types)}, expected {FULL} or {SLIDING} for each of {n_layers} layers"
    elif SLIDING in types and (type(window) is not int or window < 1):
        yield f"config.json: sliding_window = {shown(window)}, expected a positive integer for the sliding layers"
    if family == "olmo3" and not settings.get(ROPE[0]) and rope_theta(settings, 5e5) != 5e5:
        base = rope_theta(settings, 5e5)
        yield f"config.json: rope_theta = {base} without {ROPE[0]}: versions of Transformers differ on sliding layers"


ACTIVATIONS = {"hidden_act": ("silu", "swish")}
READ = ("tie_word_embeddings", "layer_types", "sliding_window", "rope_theta", *ROPE)
KINDS = {
    "qwen3": Kind(
        architectures=("Qwen3ForCausalLM",), sizes=tuple(SIZES), eps="rms_norm_eps", end_id=None,
        read=(*READ, "use_sliding_window", "max_window_layers"), more=partial(problems, family="qwen3"),
        fixed=ALIKE | ACTIVATIONS | {"attention_bias": (False,)},
    ),
    "olmo3": Kind(
        architectures=("Olmo3ForCausalLM",), sizes=tuple(SIZES), eps="rms_norm_eps", end_id=50_279,
        optional=("num_key_value_heads", "head_dim"), read=READ, more=partial(problems, family="olmo3"),
        fixed=ALIKE | ACTIVATIONS | {"attention_bias": (False,), "clip_qkv": (None,)},
    ),
    "gemma3_text": Kind(
        architectures=("Gemma3ForCausalLM",), sizes=tuple(SIZES), eps="rms_norm_eps", end_id=1,
        read=(*READ, "query_pre_attn_scalar", "sliding_window_pattern", "cache_implementation", LOCAL),
        more=partial(problems, family="gemma3"),
        fixed=ALIKE | {
            "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,), "use_bidirectional_attention": (False,),
        },
    ),
}  # fmt: skip
"""By ``model_type``; what a layer does with a cache does not depend on ``cache_implementation``."""
FAMILY = {"qwen3": "qwen3", "olmo3": "olmo3", "gemma3_text": "gemma3"}
"""The family of each ``model_type``."""
