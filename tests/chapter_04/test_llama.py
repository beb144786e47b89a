"""Llama 2, graded.

The tests hold a plain Llama of their own, in float64 and without a class, so that no exercise needs another's answer
to be judged; Transformers' Llama judges the whole.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.given.models.llama import LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_70B, TINY, LlamaConfig, hf_tensors, meta_shapes
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.devices import Devices
from tests.inputs import randn

llama = graded("llama")

NORM, WIDTH, GATE, BLOCK, COUNT = (f"eq-llama-{n}" for n in (1, 2, 3, 4, 5))
MEMORY, CACHE, TEMPERATURE, NUCLEUS = (f"eq-llama-{n}" for n in (6, 7, 8, 9))
CONVERT, GENERATE = ("the contract of ex-llama-convert-hf-state-dict", "the contract of ex-llama-generate")

PLAIN = LlamaConfig(vocab_size=23, dim=24, n_layers=2, n_heads=4, hidden_dim=28, context_len=16)
GROUPED = LlamaConfig(vocab_size=19, dim=48, n_layers=2, n_heads=6, n_kv_heads=3, hidden_dim=20, context_len=32)
CONFIGS = pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=["plain", "grouped"])


def named(config: LlamaConfig) -> str:
    c = config
    return f"V={c.vocab_size} C={c.dim} L={c.n_layers} H={c.n_heads} G={c.n_kv_heads} F={c.hidden_dim}"


# ---- a plain Llama in float64 ----------------------------------------------------------------------------------------


def make_hf_weights(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Transformers' names; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (_, shape) in hf_tensors(config).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * values if len(shape) == 1 else values * 1.5 / math.sqrt(shape[-1])
    return weights


def to_neighbours(weight: Tensor, n_heads: int) -> Tensor:
    width = weight.shape[0] // n_heads
    order = [h * width + side * width // 2 + i for h in range(n_heads) for i in range(width // 2) for side in (0, 1)]
    return weight[order]


def make_weights(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """The same model under Meta's names."""
    weights, theirs = {}, make_hf_weights(config, seed)
    for name, (metas, _) in hf_tensors(config).items():
        weight = theirs[name]
        if ".q_proj." in name:
            weight = to_neighbours(weight, config.n_heads)
        if ".k_proj." in name:
            weight = to_neighbours(weight, config.n_kv_heads)
        weights[metas] = weight
    return weights


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight.double()


def plain_rotate(x: Tensor, theta: float) -> Tensor:
    """``[B, T, H, D]``, positions 0 to T - 1."""
    frequencies = theta ** (-2.0 * torch.arange(x.shape[-1] // 2, dtype=torch.float64) / x.shape[-1])
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()]
    return torch.stack(turned, dim=-1).flatten(-2)


def plain_attention(x: Tensor, w: dict[str, Tensor], config: LlamaConfig, causal: bool = True) -> Tensor:
    q, k, v = (
        (x @ w[f"attention.{name}.weight"].double().T).unflatten(-1, (-1, config.head_dim))
        for name in ("wq", "wk", "wv")
    )
    q, k = plain_rotate(q, config.rope_theta), plain_rotate(k, config.rope_theta)
    k, v = (heads.repeat_interleave(config.n_heads // config.n_kv_heads, dim=2) for heads in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / config.head_dim**0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=torch.float64).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2) @ w["attention.wo.weight"].double().T


def plain_feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.double().T
    return (gate / (1 + (-gate).exp()) * (x @ w3.double().T)) @ w2.double().T


def plain_block(x: Tensor, w: dict[str, Tensor], config: LlamaConfig, causal: bool = True) -> Tensor:
    eps = config.norm_eps
    x = x + plain_attention(plain_norm(x, w["attention_norm.weight"], eps), w, config, causal)
    matrices = (w[f"feed_forward.w{i}.weight"] for i in (1, 2, 3))
    return x + plain_feed_forward(plain_norm(x, w["ffn_norm.weight"], eps), *matrices)


def plain_llama(tokens: Tensor, w: dict[str, Tensor], config: LlamaConfig) -> Tensor:
    x = w["tok_embeddings.weight"].double()[tokens]
    for layer in range(config.n_layers):
        x = plain_block(x, part(w, f"layers.{layer}."), config)
    return plain_norm(x, w["norm.weight"], config.norm_eps) @ w["output.weight"].double().T


def fill(module: nn.Module, weights: dict[str, Tensor], read: str) -> Any:
    """Load the weights, once the names and shapes are the contract's."""
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    expect_equal(
        shapes,
        {name: tuple(value.shape) for name, value in weights.items()},
        name="shapes in the state dict",
        read=read,
    )
    module.load_state_dict(weights)
    return module


def make_rope(config: LlamaConfig, start: int, end: int) -> Tensor:
    frequencies = config.rope_theta ** (
        -2.0 * torch.arange(config.head_dim // 2, dtype=torch.float64) / config.head_dim
    )
    angles = torch.arange(start, end, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def make_tokens(config: LlamaConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


# Transformers, where a maintainer computes the recorded values.


def transformers_llama(config: LlamaConfig, seed: int = 0):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    more: dict[str, Any] = {"attn_implementation": "eager"}
    theirs = TheirConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=config.context_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
    )
    model = LlamaForCausalLM(theirs)
    model.load_state_dict(make_hf_weights(config, seed))
    return model.eval()


def transformers_logits(config: LlamaConfig, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return transformers_llama(config)(tokens).logits.float()


def transformers_greedy(config: LlamaConfig, tokens: Tensor, n_new: int) -> Tensor:
    model = transformers_llama(config)
    mask = torch.ones_like(tokens)
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=n_new, do_sample=False, pad_token_id=0)
    return out[:, tokens.shape[1] :]


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def test_RMSNorm_by_hand():
    case("dim=2, eps=0.5, weight (1, 2): mean squares 12.5, 1 and 0")
    norm = llama.RMSNorm(2, eps=0.5)
    norm.load_state_dict({"weight": torch.tensor([1.0, 2.0])})
    x = torch.tensor([[3.0, 4.0], [1.0, -1.0], [0.0, 0.0]])
    expected = torch.tensor([[3 / 13**0.5, 8 / 13**0.5], [1 / 1.5**0.5, -2 / 1.5**0.5], [0.0, 0.0]])
    before, out = x.clone(), norm(x)
    expect_close(out, expected, atol=1e-6, read=NORM)
    case("dim=2, eps=0.5, weight (1, 2): x after the call")
    expect_close(x, before, atol=0.0, rtol=0.0, name="x", answer=out, read="the contract, under Args")


def test_RMSNorm_has_one_weight_of_ones():
    case("dim=5: the parameters")
    norm = llama.RMSNorm(5)
    parameters = {name: value.tolist() for name, value in norm.named_parameters()}
    expect_equal(parameters, {"weight": [1.0] * 5}, name="parameters", read="the contract")
    expect_equal(list(norm.state_dict()), ["weight"], name="state dict", read="the contract")


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 11), (1, 2, 3, 64)], ids=["1d", "2d", "3d", "4d"])
def test_RMSNorm_equals_torch(shape):
    case(f"x of {list(shape)}, eps=1e-5")
    x, weight = 3 * randn(*shape) + 1, randn(shape[-1], seed=1)
    norm = llama.RMSNorm(shape[-1])
    norm.load_state_dict({"weight": weight})
    expected = nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), eps=1e-5).float()
    expect_close(norm(x), expected, read=NORM)


def test_RMSNorm_knows_the_usual_eps():
    case("x of [2, 9], values near 0.003, eps left out: it is 1e-5")
    x = 0.003 * randn(2, 9)
    expected = nn.functional.rms_norm(x.double(), (9,), eps=1e-5).float()
    expect_close(llama.RMSNorm(9)(x), expected, read=NORM)


def test_RMSNorm_forgets_the_scale():
    case("dim=16: x, and a thousand times x")
    norm, x = llama.RMSNorm(16, eps=1e-12), randn(4, 16)
    out = norm(x)
    expect_close(norm(1000 * x), out, atol=1e-5, name="norm(1000 x)", answer=out, read=NORM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_RMSNorm_computes_in_float32(dtype):
    case(f"x of [4, 512], values near 400, {str(dtype).removeprefix('torch.')}")
    x = (400 * randn(4, 512)).to(dtype)
    out = llama.RMSNorm(512).to(dtype)(x)
    expected = plain_norm(x.double(), torch.ones(512), 1e-5).to(dtype)
    expect_close(out, expected, atol=0.05, rtol=0.05, read="the contract")
    off = (out != expected).double().mean().item()
    problem = f"{off:.0%} of the numbers are rounded more than once: the statistics were not in float32"
    expect_true(off < 0.02, problem, answer=out, read="the contract, under Returns")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_RMSNorm_weighs_in_float32(dtype):
    name = str(dtype).removeprefix("torch.")
    case(f"x of [4, 512], {name}; the weight float32, between 0.5 and 1.5")
    x, weight = randn(4, 512).to(dtype), 0.5 + torch.rand(512, generator=torch.Generator().manual_seed(1))
    norm = llama.RMSNorm(512)
    norm.load_state_dict({"weight": weight})
    out = norm(x)
    expected = plain_norm(x.double(), weight, 1e-5).to(dtype)
    expect_close(out, expected, atol=0.05, rtol=0.05, read="the contract")
    off = (out != expected).double().mean().item()
    problem = f"{off:.0%} of the numbers are rounded more than once: the product with the weight was not in float32"
    expect_true(off < 0.02, problem, answer=out, read="the contract, under Convention")


def test_RMSNorm_keeps_the_inputs_dtype_with_float32_weights():
    for dtype in ("bfloat16", "float64"):
        case(f"x {dtype}, weight float32: the dtype of the result")
        out = llama.RMSNorm(8)(randn(2, 8, dtype=getattr(torch, dtype)))
        expect_equal(str(out.dtype), f"torch.{dtype}", name="out.dtype", answer=out, read="the contract")


def test_RMSNorm_passes_gradients_back():
    case("x of [3, 6]: gradients of x and of the weight, against PyTorch's")
    x, weight, incoming = randn(3, 6).requires_grad_(), randn(6, seed=1), randn(3, 6, seed=2)
    norm = llama.RMSNorm(6)
    norm.load_state_dict({"weight": weight})
    out = norm(x)
    expect_true(out.requires_grad, "the output is detached from the graph", answer=out, read=NORM)
    out.backward(incoming)
    other_x, other_w = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    nn.functional.rms_norm(other_x, (6,), other_w, eps=1e-5).backward(incoming.double())
    expect_close(x.grad, other_x.grad.float(), atol=1e-5, name="x.grad", answer=out, read=NORM)
    expect_close(norm.weight.grad, other_w.grad.float(), atol=1e-5, name="weight.grad", answer=out, read=NORM)


# ---- swiglu_hidden_dim -----------------------------------------------------------------------------------------------


def test_swiglu_hidden_dim_of_the_presets():
    case("7B (4096), 13B (5120) and 70B (8192, multiple_of=4096, multiplier=1.3)")
    widths = [llama.swiglu_hidden_dim(4096), llama.swiglu_hidden_dim(5120), llama.swiglu_hidden_dim(8192, 4096, 1.3)]
    expect_equal(widths, [11_008, 13_824, 28_672], read=WIDTH)


@oracle
def test_swiglu_hidden_dim_is_the_next_multiple():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(deadline=None, max_examples=100)
    @given(st.integers(2, 20_000), st.integers(1, 5_000))
    def check(dim, multiple_of):
        case(f"dim={dim} multiple_of={multiple_of}")
        width, wanted = llama.swiglu_hidden_dim(dim, multiple_of), 2 * 4 * dim // 3
        expect_true(width % multiple_of == 0, f"{width} is not a multiple of {multiple_of}", answer=width)
        expect_true(wanted <= width < wanted + multiple_of, f"{width} is not the next from {wanted} on", answer=width)

    check()


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "width"),
    [
        (12, 4, 1.0, 32),
        (7, 1, 1.0, 18),
        (11, 1, 1.0, 29),
        (7, 1, 1.3, 23),
        (100, 1, 1.3, 345),
        (128, 32, 1.0, 352),
        (3072, 256, 1.0, 8192),
        (1, 5, 1.0, 5),
    ],
    ids=["exact", "drops", "drops_less", "drops_twice", "widens", "up", "multiple_already", "tiny"],
)
def test_swiglu_hidden_dim_rounds(dim, multiple_of, multiplier, width):
    case(f"dim={dim}, multiple_of={multiple_of}, multiplier={multiplier}")
    out = llama.swiglu_hidden_dim(dim, multiple_of, multiplier)
    expect_equal(out, width, read=WIDTH)
    expect_equal(type(out).__name__, "int", name="type of out", answer=out, read="the contract")


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def test_SwiGLU_by_hand():
    case("C=2, F=2: w1 doubles, w3 swaps, w2 sums in its first row and takes the second in its last; x = (1, 2)")
    weights = {
        "w1.weight": torch.tensor([[2.0, 0.0], [0.0, 2.0]]),
        "w2.weight": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        "w3.weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
    }
    first, second = 2 / (1 + math.exp(-2)) * 2, 4 / (1 + math.exp(-4)) * 1
    layer = fill(llama.SwiGLU(2, 2), weights, GATE)
    expect_close(layer(torch.tensor([1.0, 2.0])), torch.tensor([first + second, second]), atol=1e-5, read=GATE)


@pytest.mark.parametrize(("shape", "hidden_dim"), [((5, 6), 10), ((2, 3, 8), 4), ((4,), 4)], ids=["2d", "3d", "1d"])
def test_SwiGLU_by_formula(shape, hidden_dim):
    C = shape[-1]
    case(f"x of {list(shape)}, F={hidden_dim}")
    weights = {
        "w1.weight": randn(hidden_dim, C),
        "w2.weight": randn(C, hidden_dim, seed=1),
        "w3.weight": randn(hidden_dim, C, seed=2),
    }
    x = randn(*shape, seed=3)
    expected = plain_feed_forward(x.double(), *weights.values()).float()
    expect_close(fill(llama.SwiGLU(C, hidden_dim), weights, GATE)(x), expected, atol=1e-4, rtol=1e-4, read=GATE)


# ---- TransformerBlock ------------------------------------------------------------------------------------------------


def make_block(config: LlamaConfig, **changed: Tensor) -> tuple[Any, dict[str, Tensor]]:
    weights = part(make_weights(config), "layers.0.") | changed
    return fill(llama.TransformerBlock(config), weights, BLOCK), weights


@CONFIGS
def test_TransformerBlock_by_formula(config):
    case(f"x of [2, 5, {config.dim}], causal, {named(config)}")
    block, weights = make_block(config)
    x = randn(2, 5, config.dim)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    before, expected = x.clone(), plain_block(x.double(), weights, config).float()
    out = block(x, make_rope(config, 0, 5), mask)
    expect_close(out, expected, atol=1e-4, rtol=1e-4, read=BLOCK)
    case(f"x of [2, 5, {config.dim}], causal, {named(config)}: x after the call")
    expect_close(x, before, atol=0.0, rtol=0.0, name="x", answer=out, read=BLOCK)


def test_TransformerBlock_sees_all_without_a_mask():
    case(f"x of [1, 5, 24], no mask, {named(PLAIN)}")
    block, weights = make_block(PLAIN)
    x = randn(1, 5, 24)
    expected = plain_block(x.double(), weights, PLAIN, causal=False).float()
    expect_close(block(x, make_rope(PLAIN, 0, 5)), expected, atol=1e-4, rtol=1e-4, read=BLOCK)


def test_TransformerBlock_is_the_identity_if_nothing_is_added():
    case("wo and w2 are zero: the output equals the input")
    silent = {"attention.wo.weight": torch.zeros(24, 24), "feed_forward.w2.weight": torch.zeros(24, 28)}
    block, _ = make_block(PLAIN, **silent)
    x = 5 * randn(2, 3, 24)
    expect_close(block(x, make_rope(PLAIN, 0, 3)), x, atol=1e-6, read=BLOCK)


def test_TransformerBlock_uses_the_configs_epsilon():
    case("norm_eps=0.5, x of [1, 3, 16] and small")
    config = LlamaConfig(dim=16, n_layers=1, n_heads=4, hidden_dim=24, norm_eps=0.5)
    block, weights = make_block(config)
    x = 0.1 * randn(1, 3, 16)
    expected = plain_block(x.double(), weights, config, causal=False).float()
    expect_close(block(x, make_rope(config, 0, 3)), expected, atol=1e-5, rtol=1e-4, read=BLOCK)


def test_TransformerBlock_hands_the_cache_to_attention():
    from lib.attention import KVCache

    case(f"positions 0 to 2, then 3 and 4 with the cache, {named(GROUPED)}")
    block, weights = make_block(GROUPED)
    x, cache = randn(2, 5, 48), KVCache(2, 3, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    first = block(x[:, :3], make_rope(GROUPED, 0, 3), mask[:3, :3], cache)
    expect_equal(cache.length, 3, name="cache.length", answer=first, read="the contract")
    last = block(x[:, 3:], make_rope(GROUPED, 3, 5), mask[3:], cache)
    expected = plain_block(x.double(), weights, GROUPED).float()
    expect_close(torch.cat([first, last], dim=1), expected, atol=1e-4, rtol=1e-4, read=BLOCK)


# ---- Llama -----------------------------------------------------------------------------------------------------------


def make_llama(config: LlamaConfig) -> tuple[Any, dict[str, Tensor]]:
    weights = make_weights(config)
    return fill(llama.Llama(config), weights, "the contract of ex-llama-llama"), weights


@CONFIGS
def test_Llama_by_formula(config):
    case(f"tokens [2, 7], {named(config)}")
    model, weights = make_llama(config)
    tokens = make_tokens(config, 2, 7)
    expected = plain_llama(tokens, weights, config).float()
    expect_close(model(tokens), expected, atol=1e-3, rtol=1e-3, read="the contract")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@CONFIGS
def test_Llama_equals_transformers(config):
    case(f"tokens [2, 9], {named(config)}, against Transformers' LlamaForCausalLM")
    tokens = make_tokens(config, 2, 9, seed=1)
    expected = recorded(f"logits_g{config.n_kv_heads}", lambda: transformers_logits(config, tokens))
    model, _ = make_llama(config)
    expect_close(model(tokens), expected, atol=1e-3, rtol=1e-3, read="the contract")


@pytest.mark.parametrize(
    "changed", [{"norm_eps": 0.5}, {"rope_theta": 20.0}, {"n_layers": 1}], ids=["norm_eps", "rope_theta", "one_layer"]
)
def test_Llama_uses_its_config(changed):
    config = replace(GROUPED, **changed)
    case(f"tokens [2, 5] and 2 more with a cache, {changed}, {named(config)}")
    model, weights = make_llama(config)
    tokens, cache = make_tokens(config, 2, 7), model.make_cache(2, 7)
    logits = torch.cat([model(tokens[:, :5], cache), model(tokens[:, 5:], cache)], dim=1)
    expected = plain_llama(tokens, weights, config).float()
    expect_close(logits, expected, atol=1e-3, rtol=1e-3, read="the contract, under Args")


@oracle
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("seed", range(4))
def test_Llama_equals_transformers_at_random_sizes(seed):
    draw = torch.Generator().manual_seed(seed)
    pick = lambda *choices: choices[torch.randint(len(choices), (1,), generator=draw).item()]
    groups, repeats, head_dim = pick(1, 2, 3), pick(1, 2, 4), pick(2, 6, 8)
    heads = groups * repeats
    config = LlamaConfig(
        vocab_size=pick(11, 40),
        dim=heads * head_dim,
        n_layers=pick(1, 3),
        n_heads=heads,
        n_kv_heads=groups,
        hidden_dim=pick(5, 16),
        context_len=24,
    )
    case(f"tokens [3, 8], {named(config)}")
    tokens = make_tokens(config, 3, 8, seed)
    model, _ = make_llama(config)
    expect_close(model(tokens), transformers_logits(config, tokens), atol=1e-3, rtol=1e-3)
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    expect_equal(tokens[:, 8:].tolist(), transformers_greedy(config, tokens[:, :8], 8).tolist())


def test_Llama_state_dict_has_metas_names_and_nothing_else():
    case(named(GROUPED))
    model = llama.Llama(GROUPED)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    expect_equal(shapes, meta_shapes(GROUPED), name="shapes in the state dict", read="the contract")
    problem = "config is no attribute of the model"
    expect_true(getattr(model, "config", None) == GROUPED, problem, read="the contract, under Attributes")


def test_Llama_head_has_a_weight_of_its_own():
    case("output.weight and tok_embeddings.weight")
    model = llama.Llama(PLAIN)
    tied = model.output.weight is model.tok_embeddings.weight
    expect_true(
        not tied, "the head shares the embedding's weight; Llama 2 has two separate weights", read="the contract"
    )


@pytest.mark.parametrize("cuts", [(4, 5, 6, 7, 8), (1, 2, 8)], ids=["prompt_then_one_by_one", "uneven"])
def test_Llama_with_a_cache_equals_the_full_pass(cuts):
    case(f"tokens [2, 8] in pieces that end at {cuts}, {named(GROUPED)}")
    model, weights = make_llama(GROUPED)
    tokens, cache, start, pieces = make_tokens(GROUPED, 2, 8), model.make_cache(2, 8), 0, []
    for end in cuts:
        pieces.append(model(tokens[:, start:end], cache))
        start = end
    expected = plain_llama(tokens, weights, GROUPED).float()
    expect_close(torch.cat(pieces, dim=1), expected, atol=1e-3, rtol=1e-3, read="the contract")


def test_Llama_make_cache_has_one_for_each_layer():
    case(f"batch=3, max_len=10, bfloat16, {named(GROUPED)}")
    model = llama.Llama(GROUPED).to(torch.bfloat16)
    cache = model.make_cache(3, 10)
    contract = "the contract, make_cache"
    expect_equal(len(cache), 2, name="len(cache)", read=contract)
    found = [(*held.keys.shape, *held.values.shape, str(held.keys.dtype), held.length) for held in cache]
    expected = [(3, 3, 10, 8, 3, 3, 10, 8, "torch.bfloat16", 0)] * 2
    expect_equal(found, expected, name="shapes, dtype and length of each layer's cache", read=contract)
    apart = len({held.keys.data_ptr() for held in cache})
    expect_equal(apart, 2, name="caches with a memory of their own", read=contract)


@pytest.mark.time_limit(30)  # PyTorch imports a part of itself for that device
def test_Llama_make_cache_is_where_the_weights_are():
    case('batch=1, max_len=2, a model whose weights are on the device "meta"')
    cache = llama.Llama(PLAIN).to("meta").make_cache(1, 2)
    devices = [held.keys.device.type for held in cache]
    expect_equal(devices, ["meta"] * 2, name="devices", read="the contract, make_cache")


def test_Llama_works_on_the_device_of_its_tokens():
    case("weights and tokens [2, 6] on the CPU, while PyTorch's default device is another one, with a cache")
    model, weights = make_llama(GROUPED)
    tokens = make_tokens(GROUPED, 2, 6)
    expected, pieces = plain_llama(tokens, weights, GROUPED).float(), []
    with torch.device("meta"), Devices() as devices:
        cache = model.make_cache(2, 6)
        for piece in (tokens[:, :4], tokens[:, 4:]):
            pieces.append(model(piece, cache))
    logits = torch.cat(pieces, dim=1)
    returns = "the contract, under Returns"
    expect_close(logits, expected, atol=1e-3, rtol=1e-3, read=returns)
    problem = f"{devices.mixed} mixes two devices: a tensor was made on PyTorch's default device"
    expect_true(not devices.mixed, problem, answer=logits, read=returns)


def test_Llama_logits_are_float32():
    case("weights in bfloat16: the dtype of the logits, and the rotation in it")
    weights = {name: weight.bfloat16() for name, weight in make_weights(PLAIN).items()}
    model = fill(llama.Llama(PLAIN), weights, "the contract").to(torch.bfloat16)
    tokens = make_tokens(PLAIN, 1, 6)
    logits = model(tokens)
    expect_equal(str(logits.dtype), "torch.float32", name="out.dtype", answer=logits, read="the contract")
    error = (logits - plain_llama(tokens, weights, PLAIN)).abs().max().item()
    problem = f"in bfloat16 the logits are off by {error:.2f}: was the rotation table cast?"
    expect_true(error < 0.3, problem, answer=logits, read="the contract, under Attributes")


def test_Llama_fills_its_context():
    case("16 tokens, context_len=16: they just fit")
    model, weights = make_llama(PLAIN)
    tokens = make_tokens(PLAIN, 1, 16)
    expected = plain_llama(tokens, weights, PLAIN).float()
    expect_close(model(tokens), expected, atol=1e-3, rtol=1e-3, read="the contract, under Raises")
    case("15 tokens in the cache and 1 more, context_len=16: they just fit")
    cache = model.make_cache(1, 16)
    model(tokens[:, :15], cache)
    out = model(tokens[:, 15:], cache)
    expect_close(out, expected[:, 15:], atol=1e-3, rtol=1e-3, read="the contract, under Raises")


def test_Llama_refuses_more_than_its_context():
    case("17 tokens, context_len=16")
    model = llama.Llama(PLAIN)
    with expect_raises(ValueError, "17", "16", read="the contract, under Raises"):
        model(make_tokens(PLAIN, 1, 17))
    case("15 tokens in the cache and 2 more, context_len=16")
    cache = model.make_cache(1, 30)
    model(make_tokens(PLAIN, 1, 15), cache)
    with expect_raises(ValueError, "17", "16", read="the contract, under Raises"):
        model(make_tokens(PLAIN, 1, 2), cache)


@oracle  # PyTorch needs seconds to set up that device
def test_Llama_can_be_built_without_memory():
    case('built under torch.device("meta"), then given its weights')
    with torch.device("meta"):
        model = llama.Llama(GROUPED)
    weights, tokens = make_weights(GROUPED), make_tokens(GROUPED, 1, 4)
    model.load_state_dict(weights, assign=True)
    expected = plain_llama(tokens, weights, GROUPED).float()
    expect_close(model(tokens), expected, atol=1e-3, rtol=1e-3, read="the contract, rope")


@oracle  # PyTorch needs seconds to set up that device
def test_Llama_comes_back_from_meta():
    case('run under torch.device("meta"), then moved to the CPU with to_empty and given its weights')
    model = llama.Llama(GROUPED).to("meta")
    weights, tokens = make_weights(GROUPED), make_tokens(GROUPED, 2, 5)
    expect_equal(tuple(model(tokens.to("meta")).shape), (2, 5, 19), name="shape of the logits on meta")
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    expected = plain_llama(tokens, weights, GROUPED).float()
    expect_close(model(tokens), expected, atol=1e-3, rtol=1e-3, read="the contract, rope")


def test_Llama_learns():
    case("tokens [2, 6]: every parameter gets a gradient")
    model, _ = make_llama(GROUPED)
    logits = model(make_tokens(GROUPED, 2, 6))
    expect_true(logits.requires_grad, "the logits are detached from the graph", answer=logits)
    logits.square().mean().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    expect_equal(still, [], name="parameters without a gradient", read="the contract")


# ---- count_parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "n"),
    [(LLAMA_2_7B, 6_738_415_616), (LLAMA_2_13B, 13_015_864_320), (LLAMA_2_70B, 68_976_648_192)],
    ids=["7B", "13B", "70B"],
)
def test_count_parameters_of_the_presets(config, n):
    case(named(config))
    found = llama.count_parameters(config)
    expect_equal(found, n, read=COUNT)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read="the contract, under Returns")


@pytest.mark.parametrize("config", [PLAIN, GROUPED, TINY], ids=["plain", "grouped", "tiny"])
def test_count_parameters_counts_every_tensor(config):
    case(named(config))
    expect_equal(llama.count_parameters(config), sum(math.prod(s) for s in meta_shapes(config).values()), read=COUNT)


@pytest.mark.time_limit(5)
def test_count_parameters_builds_nothing():
    case("a billion layers")
    config = LlamaConfig(vocab_size=10, dim=8, n_layers=10**9, n_heads=2, hidden_dim=8)
    expect_equal(llama.count_parameters(config), 464 * 10**9 + 168, read=COUNT)


# ---- inference_memory_gb ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "bits", "overhead", "gb"),
    [(7e9, 32, 1.2, 33.6), (7e9, 16, 1.2, 16.8), (70e9, 4, 1.2, 42.0), (13e9, 8, 1.0, 13.0), (1e9, 16, 1.5, 3.0)],
    ids=["7B_32_bits", "7B_16_bits", "70B_4_bits", "13B_bare", "1B_half_more"],
)
def test_inference_memory_gb(n, bits, overhead, gb):
    case(f"{n:.0e} weights of {bits} bits, overhead {overhead}")
    expect_close(llama.inference_memory_gb(n, bits, overhead), gb, rtol=1e-9, read=MEMORY)


def test_inference_memory_gb_defaults():
    case("6,738,415,616 weights, defaults")
    expect_close(llama.inference_memory_gb(6_738_415_616), 16.1721974784, rtol=1e-9, read=MEMORY)


# ---- kv_cache_bytes --------------------------------------------------------------------------------------------------


def test_kv_cache_bytes_in_float32():
    config = LlamaConfig(vocab_size=11, dim=48, n_layers=5, n_heads=6, n_kv_heads=2, hidden_dim=20)
    case(f"batch=3, length=7, 4 bytes a value, {named(config)}")
    expect_equal(llama.kv_cache_bytes(config, 3, 7, 4), 2 * 5 * 3 * 2 * 7 * 8 * 4, read=CACHE)


@pytest.mark.parametrize(
    ("config", "batch", "length", "n_bytes"),
    [(LLAMA_2_7B, 1, 1, 524_288), (LLAMA_2_7B, 1, 4096, 2**31), (LLAMA_2_70B, 8, 4096, 10_737_418_240)],
    ids=["7B, one token", "7B, full context", "70B, eight of them"],
)
def test_kv_cache_bytes_of_the_presets(config, batch, length, n_bytes):
    case(f"batch={batch}, length={length}, {named(config)}")
    found = llama.kv_cache_bytes(config, batch, length)
    expect_equal(found, n_bytes, read=CACHE)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read="the contract, under Returns")


# ---- convert_hf_state_dict -------------------------------------------------------------------------------------------


def test_convert_hf_state_dict_by_hand():
    case("one layer, C=36, H=3, G=1, D=12: row r of each projection holds r")
    config = LlamaConfig(vocab_size=3, dim=36, n_layers=1, n_heads=3, n_kv_heads=1, hidden_dim=2)
    theirs = {n: torch.arange(s[0]).float()[:, None].expand(s) if len(s) > 1 else torch.ones(s)
              for n, (_, s) in hf_tensors(config).items()}  # fmt: skip
    out = llama.convert_hf_state_dict(theirs, config)
    expect_equal(sorted(out), sorted(meta_shapes(config)), name="names", answer=out, read=CONVERT)
    rows = {name: out[f"layers.0.attention.{name}.weight"][:, 0].int().tolist() for name in ("wq", "wk", "wv", "wo")}
    turned = [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    queries = [12 * head + row for head in range(3) for row in turned]
    expected = {"wq": queries, "wk": turned, "wv": [*range(12)], "wo": [*range(36)]}
    expect_equal(rows, expected, name="rows", read=CONVERT)


@CONFIGS
def test_convert_hf_state_dict_tensor_by_tensor(config):
    case(named(config))
    theirs = make_hf_weights(config)
    kept = {name: tensor.clone() for name, tensor in theirs.items()}
    out = llama.convert_hf_state_dict(theirs, config)
    expect_close(dict(out), make_weights(config), atol=0.0, rtol=0.0, read=CONVERT)
    expect_close(theirs, kept, atol=0.0, rtol=0.0, name="state_dict", answer=out, read=CONVERT)


def test_convert_hf_state_dict_keeps_the_dtype():
    case("bfloat16")
    out = llama.convert_hf_state_dict({n: w.bfloat16() for n, w in make_hf_weights(PLAIN).items()}, PLAIN)
    expect_equal({str(w.dtype) for w in out.values()}, {"torch.bfloat16"}, name="dtypes", answer=out, read=CONVERT)


def test_convert_hf_state_dict_lists_all_that_is_wrong():
    case("two tensors missing, two unknown, two of another shape")
    theirs = make_hf_weights(GROUPED)
    missing = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    for name in missing:
        del theirs[name]
    theirs |= {"model.layers.2.mlp.up_proj.weight": torch.ones(2), "lm_head.bias": torch.ones(2)}
    theirs["lm_head.weight"] = torch.ones(19, 25)
    theirs["model.layers.0.self_attn.k_proj.weight"] = torch.ones(48, 47)
    mentions = [*missing, "model.layers.2.mlp.up_proj.weight", "lm_head.bias", "lm_head.weight", "25", "48"]
    with expect_raises(ValueError, *mentions, "model.layers.0.self_attn.k_proj.weight", "24", "47", read=CONVERT):
        llama.convert_hf_state_dict(theirs, GROUPED)


def test_convert_hf_state_dict_lets_old_buffers_go():
    case("with model.layers.0.self_attn.rotary_emb.inv_freq, as older checkpoints have it")
    theirs = make_hf_weights(PLAIN) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    n_before, out = len(theirs), llama.convert_hf_state_dict(theirs, PLAIN)
    expect_equal(sorted(out), sorted(meta_shapes(PLAIN)), name="names", read=CONVERT)
    expect_equal(len(theirs), n_before, name="len(state_dict) after the call", answer=out, read=CONVERT)
    case("another name that ends in inv_freq")
    with expect_raises(ValueError, "model.inv_freq", read=CONVERT):
        llama.convert_hf_state_dict(make_hf_weights(PLAIN) | {"model.inv_freq": torch.ones(2)}, PLAIN)


# ---- sample_next -----------------------------------------------------------------------------------------------------

N_DRAWS = 4000
SHARES = (0.15, 0.5, 0.1, 0.25)  # the likeliest is token 1, then 3, 0, 2


def draw_shares(seed: int = 0, **settings) -> tuple[list[float], list[float]]:
    """How often each of four tokens was drawn, and the same in tenths for a comparison of wrong answers."""
    logits = torch.tensor(SHARES).log().repeat(N_DRAWS, 1)
    drawn = llama.sample_next(logits, generator=torch.Generator().manual_seed(seed), **settings)
    expect_equal(tuple(drawn.shape), (N_DRAWS,), name="out.shape", read="the contract of ex-llama-sample-next")
    expect_equal(str(drawn.dtype), "torch.int64", name="out.dtype", read="the contract of ex-llama-sample-next")
    shares = [(drawn == token).double().mean().item() for token in range(4)]
    return shares, [round(share * 10) / 10 for share in shares]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SHARES),
        ({"temperature": 0.5}, [0.0225, 0.25, 0.01, 0.0625]),
        ({"temperature": 2.0}, [share**0.5 for share in SHARES]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 0.5, 0, 0.25]),
        ({"top_k": 9}, SHARES),
        ({"top_p": 0.6}, [0, 0.5, 0, 0.25]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.8}, [0.15, 0.5, 0, 0.25]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 1.0}, SHARES),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 0.5, 0, 0.25]),
        ({"temperature": 0.5, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"temperature": 2.0, "top_p": 0.6}, [0, 0.5**0.5, 0, 0.25**0.5]),
    ],
    ids=[
        "defaults",
        "colder",
        "hotter",
        "k_1",
        "k_2",
        "k_past_all",
        "p_two_left",
        "p_one_left",
        "p_three_left",
        "p_tiny",
        "p_1",
        "k_then_p",
        "k_renormalised",
        "colder_then_p",
        "hotter_then_p",
    ],
)
def test_sample_next_draws_in_proportion(settings, expected):
    case(f"tokens of probability {SHARES}, {N_DRAWS} draws, {settings or 'defaults'}: their shares")
    shares, tenths = draw_shares(**settings)
    expected = [share / sum(expected) for share in expected]
    read = NUCLEUS if "top_p" in settings else TEMPERATURE
    for token, share in enumerate(expected):
        problem = f"token {token} was drawn, although these settings exclude it"
        expect_true(share > 0 or shares[token] == 0, problem, answer=tenths, read=read)
    # five standard deviations of a share of 4000 draws are at most 0.04
    expect_close(shares, expected, atol=0.04, rtol=0.0, name="shares", answer=tenths, read=read)


@pytest.mark.parametrize(("top_p", "n_left"), [(0.5, 1), (0.75, 2), (0.875, 3)], ids=["one_left", "two", "three"])
def test_sample_next_top_p_met_exactly(top_p, n_left):
    # powers of two: their softmax and its sums have no rounding
    case(f"tokens of probability 0.5, 0.25, 0.125, 0.125, top_p={top_p}: met exactly by the first {n_left}")
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(N_DRAWS, 1)
    drawn = llama.sample_next(logits, top_p=top_p, generator=torch.Generator().manual_seed(0))
    found = len(set(drawn.tolist()))
    expect_equal(found, n_left, name="tokens that were drawn", answer=found, read=NUCLEUS)


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.1}], ids=["defaults", "k", "p"])
def test_sample_next_at_temperature_0_takes_the_likeliest(settings):
    case(f"three rows, temperature=0, {settings or 'no more'}")
    logits = torch.tensor([[0.0, 3.0, 1.0], [-1.0, -2.0, -0.5], [1e4, 0.0, -1e4]])
    out = llama.sample_next(logits, temperature=0, **settings)
    expect_equal(out.tolist(), [1, 2, 0], read=TEMPERATURE)


def test_sample_next_draws_each_row_by_itself():
    case("three rows, each certain of another token")
    logits = torch.full((3, 5), -math.inf)
    logits[[0, 1, 2], [4, 0, 2]] = 1.0
    for settings in ({}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.3}):
        case(f"three rows, each certain of another token, {settings}")
        expect_equal(llama.sample_next(logits, **settings).tolist(), [4, 0, 2], read=TEMPERATURE)
    case("a batch of one row")
    expect_equal(llama.sample_next(logits[:1]).tolist(), [4], read=TEMPERATURE)
    logits = torch.tensor([[0.0, 0.2, 0.1], [5.2, 5.0, 5.1]]).repeat(20, 1)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        case(f"rows whose logits lie 5 apart, {settings}")
        expect_equal(llama.sample_next(logits, **settings).tolist(), [1, 0] * 20, read="the contract, under Args")


def test_sample_next_repeats_with_the_same_seed():
    case("logits [8, 50], the same seed twice")
    logits = randn(8, 50)
    once, again = (
        llama.sample_next(logits, top_k=40, generator=torch.Generator().manual_seed(3)).tolist() for _ in "12"
    )
    expect_equal(again, once, name="second draw", read="the contract, generator")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    llama.sample_next(logits, generator=torch.Generator().manual_seed(3))
    same = torch.equal(before, torch.random.get_rng_state())
    expect_true(same, "the global random state was used although a generator was given", read="the contract, generator")


def test_sample_next_leaves_the_logits_alone():
    logits = randn(4, 9)
    before = logits.clone()
    for temperature in (0.7, 1.0):
        case(f"logits [4, 9] after the call, temperature={temperature}")
        llama.sample_next(logits, temperature=temperature, top_k=3, top_p=0.8)
        expect_close(logits, before, atol=0.0, rtol=0.0, name="logits", read="the contract")


@pytest.mark.parametrize(
    ("settings", "named_value"),
    [
        ({"temperature": -0.5}, "-0.5"),
        ({"top_k": -30}, "-30"),
        ({"top_k": 0}, "0"),
        ({"top_p": -0.25}, "-0.25"),
        ({"top_p": 0.0}, "0"),
        ({"top_p": 1.5}, "1.5"),
    ],
    ids=["negative_temperature", "negative_k", "k_0", "negative_p", "p_0", "p_above_1"],
)
def test_sample_next_refuses(settings, named_value):
    case(str(settings))
    with expect_raises(ValueError, named_value, read="the contract, under Raises"):
        llama.sample_next(torch.zeros(2, 4), **settings)


# ---- generate --------------------------------------------------------------------------------------------------------


class Scripted(nn.Module):
    """A model that writes a given sequence and records how it is called."""

    def __init__(self, script: list[list[int]], vocab_size: int = 10):
        super().__init__()
        self.script, self.vocab_size = torch.tensor(script), vocab_size
        self.weight = nn.Parameter(torch.zeros(1))
        self.asked: list[list[list[int]]] = []
        self.caches: list = []

    def make_cache(self, batch: int, max_len: int) -> list:
        self.caches.append((batch, max_len))
        return [self]

    def forward(self, tokens: Tensor, cache: list | None = None) -> Tensor:
        expect_true(cache is not None, "the model was run without its cache", read=GENERATE)
        step, (batch, n_steps) = len(self.asked), self.script.shape
        self.asked.append(tokens.tolist())
        problem = f"the model was given {len(tokens)} sequences, and there are {batch}"
        expect_true(len(tokens) == batch, problem, answer=self.asked, read=GENERATE)
        problem = f"the model was asked for step {step + 1} of {n_steps}: it should run exactly max_new_tokens times"
        expect_true(step < n_steps, problem, answer=self.asked, read=GENERATE)
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        logits[:, -1].scatter_(1, self.script[:, step, None], 50.0)
        return logits + self.weight


class Plain(nn.Module):
    """The tests' own Llama; its cache is the list of tokens so far."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.weights = config, make_weights(config)

    def make_cache(self, batch: int, max_len: int) -> list:
        return [torch.zeros(batch, 0, dtype=torch.int64)]

    def forward(self, tokens: Tensor, cache: list) -> Tensor:
        cache[0] = torch.cat([cache[0], tokens], dim=1)
        return plain_llama(cache[0], self.weights, self.config).float()[:, -tokens.shape[1] :]


class Bigrams(nn.Module):
    """A model whose scores depend on the newest token only."""

    def __init__(self):
        super().__init__()
        self.scores = 3 * randn(20, 20)

    def make_cache(self, batch: int, max_len: int) -> list:
        return []

    def forward(self, tokens: Tensor, cache: list) -> Tensor:
        return self.scores[tokens]


def write(model: nn.Module, tokens: Tensor, n_new: int, **settings) -> list[list[int]]:
    """The new tokens, a row for each sequence."""
    steps = list(llama.generate(model, tokens, n_new, **settings))
    for step in steps:
        expect_true(
            isinstance(step, Tensor) and tuple(step.shape) == tokens.shape[:1],
            f"a step gave {list(step.shape) if isinstance(step, Tensor) else step!r}, expected a tensor "
            f"[{len(tokens)}]",
            answer=[str(step) for step in steps],
            read=GENERATE,
        )
    return torch.stack(steps, dim=1).tolist() if steps else [[] for _ in tokens]


def test_generate_by_hand():
    case("prompts (1, 2) and (4, 5), greedy, a model that writes 7 8 9 and 3 2 1")
    model, prompts = Scripted([[7, 8, 9], [3, 2, 1]]), torch.tensor([[1, 2], [4, 5]])
    out = write(model, prompts, 3, temperature=0)
    expect_equal(out, [[7, 8, 9], [3, 2, 1]], name="new tokens", read=GENERATE)
    asked = [[[1, 2], [4, 5]], [[7], [3]], [[8], [2]]]
    expect_equal(model.asked, asked, name="what the model was given, call by call", answer=model.asked, read=GENERATE)
    batch, max_len = model.caches[0] if model.caches else (0, 0)
    problem = f"the cache has room for {batch} x {max_len} positions; 2 sequences may need 4 or 5 each"
    expect_true(len(model.caches) == 1 and batch == 2 and max_len >= 4, problem, answer=model.asked, read=GENERATE)


def test_generate_yields_each_token_as_soon_as_it_is_known():
    case("the first token asked for, of 5")
    model = Scripted([[7, 8, 9, 1, 2]])
    steps = llama.generate(model, torch.tensor([[1]]), 5, temperature=0)
    expect_true(
        hasattr(steps, "__next__"), "generate did not return an iterator", answer=str(type(steps)), read=GENERATE
    )
    first = next(steps)
    expect_equal(first.tolist(), [7], name="first token", read=GENERATE)
    problem = f"the model ran {len(model.asked)} times before the first token came out"
    expect_true(len(model.asked) == 1, problem, answer=len(model.asked), read=GENERATE)


def test_generate_stops_when_all_have_ended():
    case("eos_id=9: the first sequence ends at step 1, the second at step 3, of 5")
    out = write(Scripted([[9, 4, 8, 7, 5], [3, 2, 9, 6, 6]]), torch.tensor([[1], [2]]), 5, temperature=0, eos_id=9)
    expect_equal(out, [[9, 9, 9], [3, 2, 9]], name="new tokens", read=GENERATE)
    case("eos_id=0: the first sequence ends at step 2, the second at step 4, of 6")
    model = Scripted([[7, 0, 8, 9, 5, 5], [3, 2, 1, 0, 6, 6]])
    out = write(model, torch.tensor([[1], [2]]), 6, temperature=0, eos_id=0)
    expect_equal(out, [[7, 0, 0, 0], [3, 2, 1, 0]], name="new tokens", read=GENERATE)
    expect_equal(model.asked[3], [[0], [1]], name="what the model was given at step 4", answer=out, read=GENERATE)


def test_generate_does_not_mind_eos_in_the_prompt():
    case("eos_id=0, and the prompt is 0 1 0")
    out = write(Scripted([[7, 8]]), torch.tensor([[0, 1, 0]]), 2, temperature=0, eos_id=0)
    expect_equal(out, [[7, 8]], name="new tokens", read=GENERATE)


def test_generate_without_eos_id_goes_on():
    case("no eos_id, a model that writes 0 0 0; then no steps at all")
    expect_equal(write(Scripted([[0, 0, 0]]), torch.tensor([[1]]), 3, temperature=0), [[0, 0, 0]], read=GENERATE)
    expect_equal(write(Scripted([[0, 0, 0]]), torch.tensor([[1]]), 0, temperature=0), [[]], read=GENERATE)


def test_generate_keeps_no_gradients():
    case("one step: are gradients off inside, and on again outside?")
    model, seen = Scripted([[7, 8]]), []
    forward = model.forward
    model.forward = lambda tokens, cache=None: (seen.append(torch.is_grad_enabled()), forward(tokens, cache))[1]
    steps = llama.generate(model, torch.tensor([[1]]), 2, temperature=0)
    next(steps)
    expect_equal(seen, [False], name="gradients enabled inside", read=GENERATE)
    expect_true(
        torch.is_grad_enabled(), "gradients are still off in the caller's code between two steps", read=GENERATE
    )


def test_generate_hands_on_how_to_draw():
    case("temperature=5, top_p=1e-6: the likeliest, always")
    model, tokens = Bigrams(), torch.tensor([[3, 1, 4], [1, 5, 9]])
    greedy = write(model, tokens, 6, temperature=0)
    expect_equal(write(model, tokens, 6, temperature=5.0, top_p=1e-6), greedy, name="new tokens", read=GENERATE)
    case("temperature=5, top_k=1: the likeliest, always")
    expect_equal(write(model, tokens, 6, temperature=5.0, top_k=1), greedy, name="new tokens", read=GENERATE)
    case("temperature=1e-5: the likeliest, almost surely")
    expect_equal(write(model, tokens, 6, temperature=1e-5), greedy, name="new tokens", read=GENERATE)
    case("temperature=5, one seed twice, and another")
    seeded = [
        write(model, tokens, 9, temperature=5.0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    expect_equal(seeded[1], seeded[0], name="new tokens, same seed", read=GENERATE)
    expect_true(seeded[2] != seeded[0], "two seeds give the same text: was anything drawn?", answer=seeded[0])
    case("temperature left out: it is 1")
    usual, one = (
        write(model, tokens, 9, generator=torch.Generator().manual_seed(1), **settings)
        for settings in ({}, {"temperature": 1.0})
    )
    expect_equal(usual, one, name="new tokens", read=GENERATE)


def test_generate_works_on_the_device_of_its_tokens():
    case("model and tokens on the CPU, while PyTorch's default device is another one; eos_id=0")
    model, tokens = Bigrams(), torch.tensor([[3, 1, 4], [1, 5, 9]])
    expected = write(model, tokens, 4, temperature=0, eos_id=0)
    with torch.device("meta"), Devices() as devices:
        out = write(model, tokens, 4, temperature=0, eos_id=0)
    expect_equal(out, expected, name="new tokens", read=GENERATE)
    problem = f"{devices.mixed} mixes two devices: a tensor was made on PyTorch's default device"
    expect_true(not devices.mixed, problem, answer=out, read=GENERATE)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@CONFIGS
def test_generate_equals_transformers(config):
    case(f"prompts [2, 4], 7 tokens, greedy, {named(config)}, against Transformers' generate")
    tokens = make_tokens(config, 2, 4, seed=2)
    expected = recorded(f"greedy_g{config.n_kv_heads}", lambda: transformers_greedy(config, tokens, 7))
    expect_equal(write(Plain(config), tokens, 7, temperature=0), expected.tolist(), name="new tokens", read=GENERATE)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_generate_with_your_model_equals_transformers():
    case(f"the same with your Llama, {named(GROUPED)}")
    tokens = make_tokens(GROUPED, 2, 4, seed=2)
    expected = recorded("greedy_g3", lambda: transformers_greedy(GROUPED, tokens, 7))
    model, _ = make_llama(GROUPED)
    expect_equal(write(model, tokens, 7, temperature=0), expected.tolist(), name="new tokens", read=GENERATE)
