"""Qwen3, OLMo 3, Gemma 2 and 3, gpt-oss and Qwen3-Next: what their ``config.json`` must say, and the book's
configuration for it.
"""

from functools import partial
from typing import Any

from lib.given.models.variants import (
    DEFAULTS,
    FAMILIES,
    FULL,
    LINEAR,
    LINEAR_SIZES,
    SIZES,
    SLIDING,
    TYPES,
    VariantConfig,
)  # fmt: skip
from lib.runs.serving.kinds import ALIKE, Kind, Problems, is_number, shown
from lib.runs.serving.ropes import LOCAL, ROPE, SHARE, problems_of_rope, rope_scaling, rope_theta, rotary_shares

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Of the scores and of the logits."""
PATTERN = "sliding_window_pattern"
TURNED = 0.25
"""Share of a head's features that turn in a Qwen3-Next that does not say."""


def layer_types(settings: dict[str, Any], family: str) -> Any:
    """The kind of each layer, as the settings or Transformers' defaults have it."""
    interval, n_layers = DEFAULTS[family].interval, settings["num_hidden_layers"]
    if settings.get("layer_types") is not None:
        return settings["layer_types"]
    if interval is not None:
        name, other = ("full_attention_interval", LINEAR) if family == "qwen3_next" else (PATTERN, SLIDING)
        interval = settings.get(name) or interval
        return [other if (i + 1) % interval else FULL for i in range(n_layers)]
    first = (settings.get("max_window_layers", 28)) if sliding_window(settings, family) is not None else n_layers
    return [SLIDING if i >= first else FULL for i in range(n_layers)]


def sliding_window(settings: dict[str, Any], family: str) -> Any:
    """Keys that a sliding layer sees; Qwen3 has windows only where ``use_sliding_window`` says so."""
    if family == "qwen3" and not settings.get("use_sliding_window"):
        return None
    return settings.get("sliding_window", DEFAULTS[family].window)


def config_of(settings: dict[str, Any], family: str) -> VariantConfig:
    """The configuration of the book's model, from settings without problems."""
    known, scale = DEFAULTS[family], settings.get("query_pre_attn_scalar", 256 if "gemma" in family else None)
    caps = [settings.get(name, cap) for name, cap in zip(CAPS, known.caps, strict=True)]
    sizes = {ours: settings[theirs] for theirs, ours in SIZES.items() if settings.get(theirs) is not None}
    head_dim = sizes.get("head_dim", sizes["dim"] // sizes["n_heads"])
    sliding = known.sliding_theta
    if family == "qwen3_next":
        sizes |= {name: settings[name] for name in LINEAR_SIZES} | {
            "rotary_share": next(iter(rotary_shares(settings)), TURNED)
        }
    if family == "gpt_oss":
        sizes |= {"n_experts": settings["num_local_experts"], "top_k": settings["num_experts_per_tok"]}
    return VariantConfig(
        **FAMILIES[family], **sizes,
        norm_eps=settings.get("rms_norm_eps", known.eps),
        tied=bool(settings.get("tie_word_embeddings", known.tied)),
        scale=None if scale in (None, head_dim) else scale**-0.5, softcap=caps[0], logits_softcap=caps[1],
        layer_types=layer_types(settings, family),
        sliding_window=sliding_window(settings, family),
        rope_theta=rope_theta(settings, known.theta),
        sliding_rope_theta=None if sliding is None else rope_theta(settings, sliding, SLIDING),
        rope_scaling=rope_scaling(settings),
    )  # fmt: skip


def problems(settings: dict[str, Any], family: str) -> Problems:
    """What is wrong with a family's settings, its sizes aside."""
    is_layered, is_partial = DEFAULTS[family].sliding_theta is not None, family == "qwen3_next"
    yield from problems_of_rope(settings, ("linear", "llama3", "yarn"), is_layered, is_partial)
    for name in ("tie_word_embeddings", "use_sliding_window"):
        if not isinstance(settings.get(name, False), bool):
            yield f"config.json: {name} = {shown(settings[name])}, expected true or false"
    for name in ("query_pre_attn_scalar", *CAPS):
        value = settings.get(name, 1)
        if (not is_number(value) or value <= 0) and (value is not None or name not in CAPS):
            yield f"config.json: {name} = {shown(value)}, expected a number above 0"
    for name in (PATTERN, "full_attention_interval", "max_window_layers"):
        if type(settings.get(name, 1)) is not int or settings.get(name, 1) < (name != "max_window_layers"):
            yield f"config.json: {name} = {shown(settings[name])}, expected an integer"
            return
    sizes: list[Any] = [settings.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    yield from _problems_of_heads(settings, *sizes[:2])
    yield from _problems_of_layers(settings, family)
    n_experts, top_k = settings.get("num_local_experts"), settings.get("num_experts_per_tok")
    if family == "gpt_oss" and type(n_experts) is type(top_k) is int and top_k > n_experts:
        yield f"config.json: num_experts_per_tok = {top_k} is more than num_local_experts = {n_experts}"
    if family == "gpt_oss" and not any(settings.get(name) for name in ROPE):
        yield f"config.json has no {ROPE[0]}: Transformers takes a yarn of its own, expected it to be written"
    if is_partial:
        yield from _problems_of_states(settings, sizes[0] // sizes[1])


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
    n_layers, other = settings["num_hidden_layers"], LINEAR if family == "qwen3_next" else SLIDING
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, other) for kind in types):
        yield f"config.json: layer_types = {shown(types)}, expected {FULL} or {other} for each of {n_layers} layers"
    elif other == LINEAR and FULL not in types:
        yield f"config.json: layer_types = {shown(types)}, expected {FULL} in at least one layer"
    elif SLIDING in types and (type(window) is not int or window < 1):
        yield f"config.json: sliding_window = {shown(window)}, expected a positive integer for the sliding layers"
    if family == "olmo3" and not settings.get(ROPE[0]) and rope_theta(settings, 5e5) != 5e5:
        base = rope_theta(settings, 5e5)
        yield f"config.json: rope_theta = {base} without {ROPE[0]}: versions of Transformers differ on sliding layers"


def _problems_of_states(settings: dict[str, Any], head_dim: int) -> Problems:
    """What is wrong with Qwen3-Next's own settings."""
    if settings.get("num_experts") != 0:
        found = settings.get("num_experts", "512, the default")
        yield f"config.json: num_experts = {found}, expected 0: this server has no mixtures"
    n_keys, n_values = (settings.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if type(n_keys) is type(n_values) is int and n_keys > 0 and n_values % n_keys:
        yield f"config.json: linear_num_value_heads = {n_values} is not a multiple of linear_num_key_heads = {n_keys}"
    shares, width = rotary_shares(settings) or [TURNED], settings.get("head_dim", head_dim)
    share = shares[0]
    if any(other != share for other in shares):
        yield f"config.json: {SHARE} = {' and '.join(map(repr, shares))} contradict each other"
    elif not is_number(share) or not 0 < share <= 1:
        yield f"config.json: {SHARE} = {shown(share)}, expected a number above 0, and at most 1"
    elif type(width) is int and (int(width * share) % 2 or int(width * share) < 2):
        yield f"config.json: {SHARE} = {share} of head_dim = {width} turns {int(width * share)}, expected pairs"


ACTIVATIONS = {"hidden_act": ("silu", "swish")}
READ = ("tie_word_embeddings", "layer_types", "sliding_window", "rope_theta", *ROPE)
UNUSED = (
    "decoder_sparse_step", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok",
    "norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "mlp_only_layers",
)  # fmt: skip
"""Settings of mixtures, which a Qwen3-Next without experts does not read."""
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
    "gemma2": Kind(
        architectures=("Gemma2ForCausalLM",), sizes=tuple(SIZES), eps="rms_norm_eps", end_id=1,
        read=(*READ, "query_pre_attn_scalar", "cache_implementation", *CAPS), more=partial(problems, family="gemma2"),
        fixed=ALIKE | dict.fromkeys(("hidden_activation", "hidden_act"), ("gelu_pytorch_tanh",)) | {
            "attention_bias": (False,), "use_bidirectional_attention": (False,),
        },
    ),
    "gemma3_text": Kind(
        architectures=("Gemma3ForCausalLM",), sizes=tuple(SIZES), eps="rms_norm_eps", end_id=1,
        read=(*READ, "query_pre_attn_scalar", "sliding_window_pattern", "cache_implementation", LOCAL),
        more=partial(problems, family="gemma3"),
        fixed=ALIKE | {
            "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
            **dict.fromkeys(CAPS, (None,)), "use_bidirectional_attention": (False,),
        },
    ),
    "gpt_oss": Kind(
        architectures=("GptOssForCausalLM",), sizes=(*SIZES, "num_local_experts", "num_experts_per_tok"),
        eps="rms_norm_eps", end_id=None, more=partial(problems, family="gpt_oss"),
        read=(*READ, "router_aux_loss_coef", "output_router_logits", "experts_per_token", "initial_context_length"),
        fixed=ALIKE | {
            "hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,),
        },
    ),
    "qwen3_next": Kind(
        architectures=("Qwen3NextForCausalLM",), sizes=(*SIZES, *LINEAR_SIZES), eps="rms_norm_eps", end_id=None,
        read=(*READ, SHARE, "full_attention_interval", "num_experts", *UNUSED), fixed=ALIKE | ACTIVATIONS | {
            "attention_bias": (False,),
        },
        more=partial(problems, family="qwen3_next"),
    ),
}  # fmt: skip
"""By ``model_type``; what a layer does with a cache does not depend on ``cache_implementation``."""
FAMILY = {kind: family for family, (kind, _) in TYPES.items()}
"""The family of each ``model_type``."""
