"""What chapter 23's tests compare with: attention pair by pair in float64, and Transformers' layers with random
weights."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.inputs import randn


def visible(n_queries: int, n_keys: int, window: int | None = None) -> Tensor:
    """Which key each query sees, pair by pair."""
    reach = n_keys + n_queries if window is None else window
    places = range(n_keys - n_queries, n_keys)
    return torch.tensor([[p - reach < s <= p for s in range(n_keys)] for p in places]).bool().view(n_queries, n_keys)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale=None, softcap=None, sinks=None) -> Tensor:
    """Attention of ``[B, H, T, D]`` and ``[B, G, S, D]`` in float64: PyTorch's, with each head's keys repeated.

    A sink is one more key for PyTorch, whose score is the sink and whose value is 0.
    """
    n = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(n, 1), v.double().repeat_interleave(n, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros(scores.shape, dtype=torch.bool) if seen is None else ~seen.expand(scores.shape)
    column = torch.full((q.shape[1],), -math.inf).double() if sinks is None else sinks.double()
    column = column[:, None, None].expand(*scores.shape[:3], 1)
    bias = torch.cat([scores.masked_fill(hidden, -math.inf), column], dim=-1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q * 0, k, v, attn_mask=bias)


def rope_table(positions, width: int, theta: float = 100.0, modulus: float = 1.0) -> Tensor:
    """Rotations ``[T, width/2]`` as complex numbers, and so their angles in float64."""
    frequencies = theta ** (-2.0 * torch.arange(width // 2, dtype=torch.float64) / max(width, 1))
    angles = torch.as_tensor(list(positions), dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, modulus), angles).to(torch.complex64)


def turn(x: Tensor, rope: Tensor, layout: str = "half") -> Tensor:
    """The first features of ``[B, T, H, D]`` in float64, pair by pair."""
    out, n = x.double().clone(), rope.shape[1]
    for i in range(n):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + n)
        c, s = rope[:, i].real.double()[:, None], rope[:, i].imag.double()[:, None]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return out


# ---- layers: our switches, and Transformers' configuration -----------------------------------------------------------

LAYERS = {
    "qwen3": SimpleNamespace(
        ours={"dim": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "qk_norm": "head"},
        window=None, rope=8, theirs="qwen3",
    ),
    "gemma2": SimpleNamespace(
        ours={"dim": 20, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": 3, "softcap": 0.7, "scale": 10**-0.5},
        window=3, rope=6, theirs="gemma2",
    ),
    "gemma3": SimpleNamespace(
        ours={
            "dim": 20, "n_heads": 4, "n_kv_heads": 1, "head_dim": 6, "window": 4,
            "qk_norm": "head", "norm_offset": 1.0, "scale": 12**-0.5,
        },
        window=4, rope=6, theirs="gemma3",
    ),
    "olmo3": SimpleNamespace(
        ours={"dim": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": 3, "qk_norm": "width"},
        window=3, rope=6, theirs="olmo3",
    ),
    "gpt_oss": SimpleNamespace(
        ours={"dim": 20, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "window": 3, "sinks": True, "bias": True},
        window=3, rope=8, theirs="gpt_oss",
    ),
    "qwen3_next": SimpleNamespace(
        ours={
            "dim": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
            "qk_norm": "head", "norm_offset": 1.0, "gate": True,
        },
        window=None, rope=4, theirs="qwen3_next",
    ),
}  # fmt: skip
LATENT = {"dim": 24, "n_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENTS = {"no_q_lora": LATENT, "q_lora": LATENT | {"q_lora_rank": 7}}


def random_state(shapes: dict[str, tuple]) -> dict[str, Tensor]:
    """A tensor for each name, the same for every order of the names; gains near 1, or near 0 where they are
    differences."""
    out = {}
    for seed, name in enumerate(sorted(shapes)):
        x = randn(*shapes[name], seed=100 + seed)
        out[name] = (
            0.5 * x + (0.7 if "norm" in name else 0) if len(shapes[name]) == 1 else x * shapes[name][-1] ** -0.5 * 1.5
        )
    return out


def values_and_gradients(layer, x: Tensor, call) -> Tensor:
    """The output, and the gradients of x and of every parameter in the order of their names, in one row."""
    x = x.clone().requires_grad_()
    out = call(layer, x)
    out.backward(randn(*out.shape, seed=77))
    named = dict(layer.named_parameters())
    grads = [named[name].grad for name in sorted(named)]
    return torch.cat([t.detach().float().flatten() for t in (out, x.grad, *grads)])


def transformers_layer(name: str):
    """Transformers' attention of one of `LAYERS`, with the random weights of `random_state`."""
    import importlib

    import transformers

    spec, o = LAYERS[name], LAYERS[name].ours
    configs = {
        "qwen3": "Qwen3Config", "gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig", "olmo3": "Olmo3Config",
        "gpt_oss": "GptOssConfig", "qwen3_next": "Qwen3NextConfig",
    }  # fmt: skip
    settings = {
        "hidden_size": o["dim"], "num_attention_heads": o["n_heads"], "num_key_value_heads": o["n_kv_heads"],
        "head_dim": o["head_dim"], "num_hidden_layers": 1, "attention_bias": o.get("bias", False), "rms_norm_eps": 1e-6,
        "attn_implementation": "eager", "attn_logit_softcapping": o.get("softcap"),
    }  # fmt: skip
    if "scale" in o:
        settings["query_pre_attn_scalar"] = round(o["scale"] ** -2)
    if name == "qwen3_next":
        settings["layer_types"] = ["full_attention"]
    config = getattr(transformers, configs[name])(**settings)
    module = importlib.import_module(f"transformers.models.{spec.theirs}.modeling_{spec.theirs}")
    layer = getattr(module, configs[name].replace("TextConfig", "Config").replace("Config", "Attention"))(config, 0)
    return _loaded(layer)


def _loaded(layer):
    layer.load_state_dict(random_state({k: tuple(p.shape) for k, p in layer.state_dict().items()}))
    return layer.eval()


def call_transformers(layer, x: Tensor, rope: Tensor, window: int | None, halves: int = 2) -> Tensor:
    """Run a layer on a whole sequence; ``halves`` is how often its cosines repeat."""
    cos, sin = (torch.cat([part] * halves, dim=-1)[None] for part in (rope.real, rope.imag))
    hidden = ~visible(x.shape[1], x.shape[1], window)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    return layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=mask)[0]


def theirs(name: str) -> Tensor:
    """Values and gradients of Transformers' layer on the inputs of the test."""
    spec = LAYERS[name]
    rope = rope_table(range(9), spec.rope)
    halves = 1 if name == "gpt_oss" else 2
    x = randn(2, 9, spec.ours["dim"], seed=3)
    return values_and_gradients(
        transformers_layer(name), x, lambda m, x: call_transformers(m, x, rope, spec.window, halves)
    )


def theirs_latent(name: str) -> Tensor:
    """Values and gradients of Transformers' DeepSeek-V3 layer on the inputs of the test."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    o = LATENTS[name]
    more: dict[str, Any] = {"attn_implementation": "eager"}
    config = DeepseekV3Config(
        hidden_size=o["dim"], num_attention_heads=o["n_heads"], num_key_value_heads=o["n_heads"],
        kv_lora_rank=o["kv_lora_rank"], q_lora_rank=o.get("q_lora_rank"), qk_nope_head_dim=o["qk_nope_head_dim"],
        qk_rope_head_dim=o["qk_rope_head_dim"], v_head_dim=o["v_head_dim"], num_hidden_layers=1, rope_interleave=True,
        **more,
    )  # fmt: skip
    layer, rope = _loaded(DeepseekV3Attention(config, 0)), rope_table(range(9), o["qk_rope_head_dim"])
    x = randn(2, 9, o["dim"], seed=3)
    return values_and_gradients(layer, x, lambda m, x: call_transformers(m, x, rope, None))


def rope_oracle(kind: str, **settings) -> Tensor:
    """Transformers' frequencies, and its attention factor as the last number."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    width, theta = settings.pop("head_dim"), settings.pop("theta")
    parameters = {"rope_type": kind, "rope_theta": theta, **settings}
    longest = int(settings["original_max_position_embeddings"] * max(settings["factor"], 1))
    config = LlamaConfig(head_dim=width, max_position_embeddings=longest, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return torch.cat([frequencies, torch.tensor([factor])])
