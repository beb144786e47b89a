"""GPT-2, graded.

What the answers are compared with is written here with PyTorch's own functions, so that no exercise needs another
of the chapter, and with Transformers' model, live or recorded.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.given.models.gpt2 import GPT2_LARGE, GPT2_MEDIUM, GPT2_SMALL, GPT2_XL, GPT2Config
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.inputs import randn

gpt2 = graded("gpt2")

NORM, GELU, FUSED, INIT, PADDED, LOSS, FIRST_LOSS, COUNT = (f"eq-gpt2-{n}" for n in (1, 2, 3, 6, 7, 9, 10, 11))
BLOCK = "eq-gpt2-4; a block is made of ex-gpt2-layer-norm to ex-gpt2-mlp: if they do not pass, fix those first"
HEAD = (
    "eq-gpt2-8; the model is made of ex-gpt2-layer-norm to ex-gpt2-init-weights: if they do not pass, fix those first"
)
LOADS = (
    "the contract of ex-gpt2-load-pretrained; it uses ex-gpt2-gpt2 and ex-gpt2-convert-hf-state-dict: "
    "if they do not pass, fix those first"
)
SMALL = GPT2Config(vocab_size=11, context_len=6, dim=8, n_layers=2, n_heads=2)
ONE = GPT2Config(vocab_size=7, context_len=4, dim=4, n_layers=1, n_heads=2)


def shapes_of(config: GPT2Config, part: str = "") -> dict[str, tuple[int, ...]]:
    """The parameters that the contract names, of the whole model or of what stands under ``part``."""
    c = config.dim
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (config.n_rows, c), "wpe.weight": (config.context_len, c)}
    for i in range(config.n_layers):
        linear = {"attn.c_attn": (3 * c, c), "attn.c_proj": (c, c), "mlp.c_fc": (4 * c, c), "mlp.c_proj": (c, 4 * c)}
        for name, shape in linear.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
        shapes |= {f"h.{i}.{norm}.{kind}": (c,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    shapes |= {"ln_f.weight": (c,), "ln_f.bias": (c,)}
    return {name.removeprefix(part): shape for name, shape in shapes.items() if name.startswith(part)}


def make_weights(config: GPT2Config, part: str = "", seed: int = 0) -> dict[str, Tensor]:
    """Weights with which every part matters."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes_of(config).items():
        is_gain = ".ln_" in f".{name}" and name.endswith("weight")
        weights[name] = torch.randn(shape, generator=generator) * 0.5 + (1.0 if is_gain else 0.0)
    return {name.removeprefix(part): weight for name, weight in weights.items() if name.startswith(part)}


def filled(module: nn.Module, weights: dict[str, Tensor], exercise: str) -> Any:
    """The module with these weights, once its parameters are seen to be the contract's."""
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    expected = {name: tuple(weight.shape) for name, weight in weights.items()}
    read = f"the contract of {exercise}, under Attributes"
    expect_equal(found, expected, name="the parameters' shapes", read=read)
    more = sorted(set(module.state_dict()) - set(expected))
    name = "entries of the state dict that are no parameters"
    expect_equal(more, [], name=name, answer=len(more), read=f"the contract of {exercise}")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    return module


def attend(x: Tensor, w: dict[str, Tensor], part: str, n_heads: int) -> Tensor:
    q, k, v = functional.linear(x, w[f"{part}c_attn.weight"], w[f"{part}c_attn.bias"]).chunk(3, -1)
    q, k, v = (z.unflatten(-1, (n_heads, -1)).transpose(1, 2) for z in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return functional.linear(out, w[f"{part}c_proj.weight"], w[f"{part}c_proj.bias"])


def feed(x: Tensor, w: dict[str, Tensor], part: str) -> Tensor:
    hidden = functional.gelu(functional.linear(x, w[f"{part}c_fc.weight"], w[f"{part}c_fc.bias"]), approximate="tanh")
    return functional.linear(hidden, w[f"{part}c_proj.weight"], w[f"{part}c_proj.bias"])


def norm(x: Tensor, w: dict[str, Tensor], part: str, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w[f"{part}.weight"], w[f"{part}.bias"], eps)


def through_block(x: Tensor, w: dict[str, Tensor], part: str, config: GPT2Config) -> Tensor:
    x = x + attend(norm(x, w, f"{part}ln_1", config.norm_eps), w, f"{part}attn.", config.n_heads)
    return x + feed(norm(x, w, f"{part}ln_2", config.norm_eps), w, f"{part}mlp.")


def logits_of(tokens: Tensor, w: dict[str, Tensor], config: GPT2Config) -> Tensor:
    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for i in range(config.n_layers):
        x = through_block(x, w, f"h.{i}.", config)
    return (norm(x, w, "ln_f", config.norm_eps) @ w["wte.weight"].T)[..., : config.vocab_size]


def draw_tokens(config: GPT2Config, batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# Transformers' names and layout, written out; the model itself is imported only where a maintainer computes a record.

CONV1D = ("c_attn.weight", "c_fc.weight", "c_proj.weight")


def as_hf(weights: dict[str, Tensor], prefix: str = "transformer.") -> dict[str, Tensor]:
    return {prefix + n: w.T.contiguous() if n.endswith(CONV1D) else w.clone() for n, w in weights.items()}


def hf_settings(config: GPT2Config) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "n_positions": config.context_len, "n_embd": config.dim}
    sizes |= {"n_layer": config.n_layers, "n_head": config.n_heads, "layer_norm_epsilon": config.norm_eps}
    return sizes | {"model_type": "gpt2", "activation_function": "gelu_new", "n_inner": None}


def hf_model(config: GPT2Config, weights: dict[str, Tensor]):
    import transformers

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**hf_settings(config), **ends)).eval()
    missing, unexpected = model.load_state_dict(as_hf(weights), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def hf_logits_and_loss(config: GPT2Config, seed: int) -> Tensor:
    """Logits for all but the last token, and the loss, in one row: ``[T * V + 1]``."""
    tokens = draw_tokens(config, 2, config.context_len, seed)
    with torch.no_grad():
        out = hf_model(config, make_weights(config, seed=seed))(tokens, labels=tokens)
    return torch.cat([out.logits[:, :-1].flatten(), out.loss[None]])


class MadeOn(TorchDispatchMode):
    """Notes the devices of all tensors of one dimension or more that operators return."""

    def __init__(self):
        super().__init__()
        self.devices: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first use imports the compiler, for 2 s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.devices |= {str(leaf.device) for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.ndim}
        return out


# ---- layer_norm ------------------------------------------------------------------------------------------------------


def test_layer_norm_by_hand():
    case("two vectors of four features, eps=0.5: the first has mean 3 and variance 3.5, so its root is 2")
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 0.0]])
    weight, bias = torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 0.5, 0.0])
    expected = torch.tensor([[-1.0, -0.5, 0.5, 3.0], [0.0, 0.0, 0.5, 0.0]])
    expect_close(gpt2.layer_norm(x, weight, bias, eps=0.5), expected, read=NORM)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 16), (2, 1, 3, 1)])
def test_layer_norm_equals_torch(shape):
    case(f"x {list(shape)}, float32")
    x, weight, bias = randn(*shape), randn(shape[-1], seed=1), randn(shape[-1], seed=2)
    expected = functional.layer_norm(x, shape[-1:], weight, bias)
    expect_close(gpt2.layer_norm(x, weight, bias), expected, atol=1e-5, read=NORM)


def test_layer_norm_far_from_zero():
    case("features around 1000 with a spread of 1, float32: E[x^2] - E[x]^2 would lose the variance")
    x = randn(4, 32) + 1000.0
    expected = functional.layer_norm(x.double(), (32,)).float()
    expect_close(gpt2.layer_norm(x, torch.ones(32), torch.zeros(32)), expected, atol=1e-3, read=NORM)


def test_layer_norm_stays_in_float64():
    case("x [3, 64], float64, around 30,000 with a spread of 1: float32 would keep two digits after the point")
    x = randn(3, 64, dtype=torch.float64) + 30_000.0
    ones, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    expected = functional.layer_norm(x, (64,))
    expect_close(gpt2.layer_norm(x, ones, zeros), expected, atol=1e-8, read="the contract, under Returns")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_layer_norm_keeps_the_dtype_and_counts_wide(dtype):
    case(f"x [3, 64], {str(dtype)[6:]}, with a feature of 300")
    x = randn(3, 64, dtype=dtype)
    x[:, 0] = 300.0  # its square is more than float16 holds
    weight, bias = torch.ones(64, dtype=dtype), torch.full((64,), 0.25, dtype=dtype)
    expected = functional.layer_norm(x.double(), (64,)).add(0.25).to(dtype)
    atol = {torch.float16: 2e-3, torch.bfloat16: 3e-2, torch.float64: 1e-9}[dtype]
    answer = gpt2.layer_norm(x, weight, bias)
    expect_close(answer, expected, atol=atol, read="the contract")


def test_layer_norm_counts_wide_in_bfloat16():
    case("x [3, 64], bfloat16, around 300 with a spread of 4: there, bfloat16 has only every second whole number")
    x = (300.0 + 4.0 * randn(3, 64)).to(torch.bfloat16)
    expected = functional.layer_norm(x.double(), (64,)).to(torch.bfloat16)
    ones, zeros = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    answer = gpt2.layer_norm(x, ones, zeros)
    expect_close(answer, expected, atol=3e-2, read="the contract, under Returns")


def test_layer_norm_passes_gradients():
    case("x [2, 5], float64: the gradients of x, weight and bias")
    tensors = [randn(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate([(2, 5), (5,), (5,)])]
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    upstream = randn(2, 5, seed=9, dtype=torch.float64)
    found = torch.autograd.grad(gpt2.layer_norm(*ours), ours, upstream, allow_unused=True)
    expected = torch.autograd.grad(functional.layer_norm(theirs[0], (5,), theirs[1], theirs[2]), theirs, upstream)
    expect_close(list(found), list(expected), atol=1e-7, name="gradients", read=NORM)


# ---- gelu_tanh -------------------------------------------------------------------------------------------------------


def test_gelu_tanh_by_hand():
    case("x = -1, 0, 1, 2, float32")
    inner = [math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) for x in (-1.0, 0.0, 1.0, 2.0)]
    expected = torch.tensor([0.5 * x * (1 + math.tanh(t)) for x, t in zip((-1.0, 0.0, 1.0, 2.0), inner, strict=True)])
    expect_close(gpt2.gelu_tanh(torch.tensor([-1.0, 0.0, 1.0, 2.0])), expected, atol=1e-6, read=GELU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gelu_tanh_equals_torch(dtype):
    case(f"201 points from -8 to 8 in a [3, 67], {str(dtype)[6:]}")
    x = torch.linspace(-8, 8, 201).view(3, 67).to(dtype)
    expected = functional.gelu(x.double(), approximate="tanh").to(dtype)
    atol = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-3, torch.float16: 1e-4}[dtype]
    expect_close(gpt2.gelu_tanh(x), expected, atol=atol, read=GELU)


def test_gelu_tanh_far_out():
    case("x = -100 and 100, float32: zero and x itself, and no NaN")
    expect_close(gpt2.gelu_tanh(torch.tensor([-100.0, 100.0])), torch.tensor([0.0, 100.0]), read=GELU)


def test_gelu_tanh_leaves_x_and_passes_gradients():
    case("x [7], float64: the gradient")
    x = torch.linspace(-3, 3, 7, dtype=torch.float64).requires_grad_()
    before = x.detach().clone()
    (found,) = torch.autograd.grad(gpt2.gelu_tanh(x).sum(), x)
    (expected,) = torch.autograd.grad(functional.gelu(x, approximate="tanh").sum(), x)
    expect_close(found, expected, atol=1e-9, name="gradient", read=GELU)
    expect_close(x.detach(), before, name="x afterwards")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gelu_tanh_has_a_gradient_far_out(dtype):
    case(f"x = -300, -41, 41 and 300, {str(dtype)[6:]}: the gradient is 0 to the left and 1 to the right, and no NaN")
    x = torch.tensor([-300.0, -41.0, 41.0, 300.0], dtype=dtype, requires_grad=True)
    out = gpt2.gelu_tanh(x)
    read = "the contract, under Returns"
    expect_close(out.detach(), torch.tensor([0.0, 0.0, 41.0, 300.0], dtype=dtype), read=read)
    (found,) = torch.autograd.grad(out.sum(), x)
    expect_close(found, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype), name="gradient", read=read)


# ---- CausalSelfAttention ---------------------------------------------------------------------------------------------


def make_attention(config: GPT2Config, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    weights = make_weights(config, "h.0.attn.", seed)
    return filled(gpt2.CausalSelfAttention(config), weights, "ex-gpt2-causalselfattention"), weights


def test_CausalSelfAttention_by_hand():
    case("b=1 t=3 c=2 h=1; queries and keys are zero, values are x: each output is the mean of x so far")
    config = GPT2Config(vocab_size=3, context_len=4, dim=2, n_layers=1, n_heads=1)
    module, _ = make_attention(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.c_attn.weight[4:] = torch.eye(2)
        module.c_proj.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0], [3.0, 2.0], [2.0, 10.0]]])
    expect_close(module(x), torch.tensor([[[1.0, 0.0], [2.0, 1.0], [2.0, 4.0]]]), read=FUSED)


@pytest.mark.parametrize(
    ("batch", "length", "dim", "n_heads"), [(1, 3, 4, 2), (2, 5, 6, 3), (2, 1, 8, 1), (1, 6, 8, 8)]
)
def test_CausalSelfAttention_equals_torch(batch, length, dim, n_heads):
    case(f"b={batch} t={length} c={dim} h={n_heads}, random weights and biases")
    config = GPT2Config(vocab_size=3, context_len=8, dim=dim, n_layers=1, n_heads=n_heads)
    module, weights = make_attention(config)
    x = randn(batch, length, dim, seed=1)
    expect_close(module(x), attend(x, weights, "", n_heads), atol=1e-5, read=FUSED)


def test_CausalSelfAttention_never_looks_ahead():
    case("b=1 t=4 c=4 h=2: the inputs at 2 and 3 change; outputs 0 and 1 may not")
    module, _ = make_attention(ONE)
    x, read = randn(1, 4, 4), "chapter 3, causal_mask"
    changed = x.clone()
    changed[:, 2:] += 1.0
    before, after = module(x), module(changed)
    expect_close(after[:, :2], before[:, :2], name="out[:, :2]", answer=after, read=read)
    case("the same module with t=2, after t=4: its outputs are the first two of the longer sequence")
    expect_close(module(x[:, :2]), before[:, :2], atol=1e-5, read=read)


def test_CausalSelfAttention_never_looks_ahead_at_large_scores():
    case("b=1 t=2 c=1 h=1: the allowed score is -40,000, the hidden one +40,000")
    config = GPT2Config(vocab_size=3, context_len=2, dim=1, n_layers=1, n_heads=1)
    module, _ = make_attention(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.c_attn.weight.copy_(torch.tensor([[200.0], [-200.0], [1.0]]))
        module.c_proj.weight.fill_(1.0)
    out = module(torch.tensor([[[1.0], [-1.0]]]))
    expect_close(
        out[0, 0], torch.tensor([1.0]), name="out[0, 0]", answer=out, read="ex-attention-scaled-dot-product-attention"
    )


def test_CausalSelfAttention_passes_gradients():
    case("b=2 t=3 c=4 h=2: gradients of x and of the parameters")
    module, weights = make_attention(ONE)
    x, upstream = randn(2, 3, 4, seed=1).requires_grad_(), randn(2, 3, 4, seed=2)
    mine = torch.autograd.grad(module(x), [x, module.c_attn.weight, module.c_proj.bias], upstream)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    wanted = [x, leaves["c_attn.weight"], leaves["c_proj.bias"]]
    expected = torch.autograd.grad(attend(x, leaves, "", 2), wanted, upstream)
    expect_close(list(mine), list(expected), atol=1e-5, name="gradients", read=FUSED)


def test_CausalSelfAttention_works_on_any_device():
    case('module and x on the device "meta" (shapes without numbers): is any other tensor made on the CPU?')
    module, read = make_attention(ONE)[0].to("meta"), "the contract; what is made inside needs a device"
    x, made = torch.zeros(2, 3, 4, device="meta"), MadeOn()
    try:
        with made:
            out = module(x)
    except RuntimeError as error:
        expect_true(False, f"it does not run beside tensors on another device: {error}", answer=made.devices, read=read)
    expect_equal(sorted(made.devices - {"meta"}), [], name="other devices on which a tensor is made", read=read)
    expect_equal(str(out.device), "meta", name="the device of the output", read=read)


# ---- MLP -------------------------------------------------------------------------------------------------------------


def test_MLP_by_hand():
    case("c=1: hidden features 1, -1, 2, 0 times x, summed with weights 1, 10, 100, 1000, plus 0.5; x = 1")
    config = GPT2Config(vocab_size=3, context_len=2, dim=1, n_layers=1, n_heads=1)
    weights = {"c_fc.weight": torch.tensor([[1.0], [-1.0], [2.0], [0.0]]), "c_fc.bias": torch.zeros(4)}
    weights |= {"c_proj.weight": torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), "c_proj.bias": torch.tensor([0.5])}
    module = filled(gpt2.MLP(config), weights, "ex-gpt2-mlp")
    expected = torch.tensor([[[0.841192 - 1.588080 + 195.45977 + 0.5]]])
    expect_close(module(torch.ones(1, 1, 1)), expected, atol=1e-3, read=GELU)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 4), (4,)])
def test_MLP_equals_torch(shape):
    case(f"x {list(shape)}, random weights and biases")
    weights = make_weights(ONE, "h.0.mlp.")
    module = filled(gpt2.MLP(ONE), weights, "ex-gpt2-mlp")
    x = randn(*shape)
    expect_close(module(x), feed(x, weights, ""), atol=1e-5, read=GELU)


# ---- Block -----------------------------------------------------------------------------------------------------------


def test_Block_without_weights_is_the_identity():
    case("b=1 t=2 c=4, all weights zero: nothing is added to the stream")
    module = filled(
        gpt2.Block(ONE), {n: torch.zeros_like(w) for n, w in make_weights(ONE, "h.0.").items()}, "ex-gpt2-block"
    )
    x = randn(1, 2, 4)
    expect_close(module(x), x, read=BLOCK)


@pytest.mark.parametrize(("config", "batch", "length"), [(ONE, 1, 2), (SMALL, 2, 5)])
def test_Block_equals_torch(config, batch, length):
    case(f"b={batch} t={length} c={config.dim} h={config.n_heads}, random weights, biases and gains")
    weights = make_weights(config, "h.0.")
    module = filled(gpt2.Block(config), weights, "ex-gpt2-block")
    x = randn(batch, length, config.dim, seed=3)
    before = x.clone()
    expect_close(module(x), through_block(before, weights, "", config), atol=1e-5, read=BLOCK)
    expect_close(x, before, name="x afterwards", read=BLOCK)


def test_Block_uses_the_eps_of_the_config():
    case("b=1 t=2 c=4, norm_eps=0.3")
    config = GPT2Config(vocab_size=3, context_len=4, dim=4, n_layers=1, n_heads=2, norm_eps=0.3)
    weights = make_weights(config, "h.0.")
    x = randn(1, 2, 4, seed=3)
    found = filled(gpt2.Block(config), weights, "ex-gpt2-block")(x)
    expect_close(found, through_block(x, weights, "", config), atol=1e-5, read="the contract")


# ---- init_weights ----------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Two of GPT-2's blocks in names and kinds, with 64 x 64 matrices; nothing of it is the learner's."""

    def __init__(self):
        super().__init__()
        blocks = []
        for _ in range(2):
            attn = nn.ModuleDict({"c_attn": nn.Linear(64, 64), "c_proj": nn.Linear(64, 64)})
            mlp = nn.ModuleDict({"c_fc": nn.Linear(64, 64), "c_proj": nn.Linear(64, 64, bias=False)})
            blocks.append(nn.ModuleDict({"ln_1": nn.LayerNorm(64), "attn": attn, "mlp": mlp}))
        self.wte, self.wpe = nn.Embedding(64, 64), nn.Embedding(64, 64)
        self.h, self.ln_f = nn.ModuleList(blocks), nn.LayerNorm(64)
        for name, parameter in self.named_parameters():
            if "ln_" in name:
                nn.init.constant_(parameter, 1.5 if name.endswith("weight") else 0.25)


def spreads(module: nn.Module) -> dict[str, float]:
    return {name: p.std().item() for name, p in module.named_parameters() if p.dim() == 2}


def started(n_layers: int) -> tuple[Any, dict[str, float]]:
    """A part after init_weights, and an answer without the random numbers: log2 of each spread, in halves."""
    torch.manual_seed(0)
    module = Part()
    gpt2.init_weights(module, n_layers)
    return module, {name: round(2 * math.log2(max(std, 1e-9))) / 2 for name, std in spreads(module).items()}


@pytest.mark.parametrize("n_layers", [12, 2, 48])
def test_init_weights_scales_what_writes_to_the_stream(n_layers):
    scaled = f"c_proj has a standard deviation of 0.02 / sqrt({2 * n_layers}), all else of 0.02"
    case(f"n_layers={n_layers}: {scaled}; mlp.c_proj has no bias (None)")
    module, answer = started(n_layers)
    small = 0.02 / math.sqrt(2 * n_layers)
    expected = {name: small if "c_proj" in name else 0.02 for name in spreads(module)}
    expect_close(spreads(module), expected, rtol=0.08, atol=0.0, name="standard deviations", answer=answer, read=INIT)


def test_init_weights_centres_and_shapes_the_draw():
    case("n_layers=2: the mean, and the share of values beyond two standard deviations (4.6 % of a normal)")
    module, answer = started(2)
    weight = torch.cat([module.wte.weight.flatten(), module.wpe.weight.flatten()])
    expect_close(weight.mean().item(), 0.0, atol=1e-3, name="mean", answer=answer, read=INIT)
    beyond = (weight.abs() > 0.04).float().mean().item()
    expect_close(beyond, 0.0455, atol=0.012, name="share beyond 0.04", answer=answer, read=INIT)


def test_init_weights_clears_biases_and_leaves_norms():
    case("n_layers=2: biases of linear maps (mlp.c_proj has none), and norms that had a gain of 1.5 and a bias of 0.25")
    module, _ = started(2)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            value = 0.0 if "ln_" not in name else 1.5 if name.endswith("weight") else 0.25
            expect_close(parameter.detach(), torch.full((64,), value), name=name, read="the contract")


def test_init_weights_works_in_place_and_keeps_gradients():
    case("n_layers=2: the parameters are the same objects, and still require gradients")
    module = Part()
    before = dict(module.named_parameters())
    gpt2.init_weights(module, 2)
    kept = {name: parameter is before[name] for name, parameter in module.named_parameters()}
    expect_equal(kept, dict.fromkeys(before, True), name="same object")
    expect_true(all(p.requires_grad for p in module.parameters()), "a parameter no longer requires gradients")


# ---- pad_vocab -------------------------------------------------------------------------------------------------------


def test_pad_vocab_of_50257():
    case("n=50257")
    expect_equal(gpt2.pad_vocab(50_257), 50_304, read=PADDED)


@pytest.mark.parametrize(
    ("n", "multiple", "expected"), [(128, 128, 128), (129, 128, 256), (1, 128, 128), (512, 64, 512), (1000, 7, 1001)]
)
def test_pad_vocab_is_the_least_multiple(n, multiple, expected):
    case(f"n={n}, multiple={multiple}")
    found = gpt2.pad_vocab(n, multiple)
    expect_equal(found, expected, read=PADDED)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read="the contract, under Returns")


def test_pad_vocab_of_all_small_sizes():
    case("n from 1 to 300, multiple=8")
    found = [gpt2.pad_vocab(n, 8) for n in range(1, 301)]
    expect_equal(found, [next(m for m in range(n, n + 8) if m % 8 == 0) for n in range(1, 301)], read=PADDED)


# ---- GPT2 ------------------------------------------------------------------------------------------------------------


def make_model(config: GPT2Config, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    weights = make_weights(config, seed=seed)
    return filled(gpt2.GPT2(config), weights, "ex-gpt2-gpt2"), weights


def test_GPT2_by_hand():
    case("v=3 c=2, no block: token plus position, normalised, times each token's row")
    config = GPT2Config(vocab_size=3, context_len=2, dim=2, n_layers=0, n_heads=1, norm_eps=1e-12)
    wte = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    weights = {"wte.weight": wte, "wpe.weight": torch.tensor([[0.0, 0.0], [0.0, 3.0]])}
    weights |= {"ln_f.weight": torch.ones(2), "ln_f.bias": torch.tensor([0.0, 0.5])}
    model = filled(gpt2.GPT2(config), weights, "ex-gpt2-gpt2")
    logits, loss = model(torch.tensor([[0, 0]]))
    expected = torch.tensor([[[1.0, -0.5, 1.0], [-1.0, 1.5, 1.0]]])
    expect_close(logits, expected, atol=1e-4, name="logits", read=HEAD)
    expect_equal(loss, None, name="loss without targets", read="the contract")
    kept = getattr(model, "config", None)
    expect_true(kept is config, "the model's config is not its argument", answer=kept, read="the contract")


@pytest.mark.parametrize(("config", "batch", "length"), [(ONE, 1, 2), (SMALL, 2, 6), (SMALL, 3, 1)])
def test_GPT2_logits(config, batch, length):
    case(f"v={config.vocab_size} l={config.n_layers} b={batch} t={length}, random weights")
    model, weights = make_model(config)
    tokens = draw_tokens(config, batch, length)
    expect_close(model(tokens)[0], logits_of(tokens, weights, config), atol=1e-4, name="logits", read=HEAD)


def test_GPT2_loss_is_the_mean():
    case("v=11 b=2 t=5, targets already shifted")
    model, weights = make_model(SMALL)
    tokens, targets = draw_tokens(SMALL, 2, 5), draw_tokens(SMALL, 2, 5, seed=1)
    expected = functional.cross_entropy(logits_of(tokens, weights, SMALL).flatten(0, 1), targets.flatten())
    expect_close(model(tokens, targets)[1], expected, atol=1e-4, name="loss", read=LOSS)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@pytest.mark.parametrize("seed", [0, 1])
def test_GPT2_equals_transformers(seed):
    case(f"v=11 l=2 h=2 t=5, weights of seed {seed}: Transformers' logits, and its loss")
    model, _ = make_model(SMALL, seed)
    tokens = draw_tokens(SMALL, 2, SMALL.context_len, seed)
    expected = recorded(f"logits_and_loss_{seed}", lambda: hf_logits_and_loss(SMALL, seed))
    with torch.no_grad():
        logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    expect_close(
        logits.flatten(), expected[:-1], atol=1e-4, rtol=1e-4, name="logits.flatten()", answer=logits, read=HEAD
    )
    expect_close(loss, expected[-1], atol=1e-4, name="loss", read=LOSS)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@oracle
@pytest.mark.parametrize(("dim", "n_heads", "n_layers"), [(8, 1, 1), (12, 3, 3), (16, 16, 2)])
def test_GPT2_equals_transformers_live(dim, n_heads, n_layers):
    config = GPT2Config(vocab_size=19, context_len=9, dim=dim, n_heads=n_heads, n_layers=n_layers)
    model, _ = make_model(config, seed=dim)
    tokens, expected = draw_tokens(config, 2, 9, seed=dim), hf_logits_and_loss(config, dim)
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    expect_close(torch.cat([logits.flatten(), loss[None]]), expected, atol=1e-4, rtol=1e-4)


def test_GPT2_refuses_more_tokens_than_its_context():
    case("context_len=12, 13 tokens")
    model, _ = make_model(GPT2Config(vocab_size=7, context_len=12, dim=4, n_layers=0, n_heads=2))
    with expect_raises(ValueError, "13", "12", read="the contract, under Raises"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_GPT2_padding_takes_no_probability():
    case("v=11 in an embedding of 16 rows, whose five last are 100 times the others")
    config = GPT2Config(vocab_size=11, context_len=6, dim=8, n_layers=1, n_heads=2, padded_vocab_size=16)
    model, weights = make_model(config)
    with torch.no_grad():
        model.wte.weight[11:] *= 100.0
    tokens, targets = draw_tokens(config, 2, 6), draw_tokens(config, 2, 6, seed=1)
    logits, loss = model(tokens, targets)
    expected = logits_of(tokens, weights, config)
    expect_close(logits, expected, atol=1e-4, name="logits", read=PADDED)
    expect_close(
        loss,
        functional.cross_entropy(expected.flatten(0, 1), targets.flatten()),
        atol=1e-4,
        name="loss",
        read="the contract, under Returns",
    )


def test_GPT2_last_norm_uses_the_eps_of_the_config():
    case("v=7 c=4, no block, norm_eps=0.3")
    config = GPT2Config(vocab_size=7, context_len=4, dim=4, n_layers=0, n_heads=2, norm_eps=0.3)
    model, weights = make_model(config)
    tokens = draw_tokens(config, 1, 3)
    read = "the contract, under Attributes"
    expect_close(model(tokens)[0], logits_of(tokens, weights, config), atol=1e-4, name="logits", read=read)


def test_GPT2_works_on_any_device():
    case('model and tokens on the device "meta" (shapes without numbers), no block, t=3')
    config = GPT2Config(vocab_size=7, context_len=4, dim=4, n_layers=0, n_heads=2)
    model, read = make_model(config)[0].to("meta"), "the contract; torch.arange takes a device"
    looked_up: list[torch.device] = []
    model.wpe.register_forward_pre_hook(lambda _, given: looked_up.append(given[0].device))
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    try:
        logits, _ = model(tokens)
    except RuntimeError as error:
        expect_true(False, f"it does not run beside tokens on another device: {error}", read=read)
    where = [str(device) for device in looked_up if device != tokens.device]
    expect_true(not where, f"positions are made on {where[:1]}, tokens are on meta", answer=where, read=read)
    expect_equal(str(logits.device), "meta", name="the logits' device", read=read)


def test_GPT2_gradient_reaches_the_embedding_from_both_ends():
    case("v=7 c=4: the gradient of wte.weight, token 6 not among the inputs")
    model, weights = make_model(ONE)
    tokens, targets = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 6]])
    (found,) = torch.autograd.grad(model(tokens, targets)[1], model.wte.weight)
    leaf = {**weights, "wte.weight": weights["wte.weight"].clone().requires_grad_()}
    loss = functional.cross_entropy(logits_of(tokens, leaf, ONE).flatten(0, 1), targets.flatten())
    (expected,) = torch.autograd.grad(loss, leaf["wte.weight"])
    expect_close(found, expected, atol=1e-5, name="gradient of wte.weight", read=HEAD)


def test_GPT2_starts_small():
    case("v=1000 c=64 l=2: the spread of the weights, and the first loss beside ln(1000) = 6.908")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1000, context_len=32, dim=64, n_layers=2, n_heads=4)
    model = gpt2.GPT2(config)
    found = {name: model.get_parameter(name).std().item() for name in ("wte.weight", "h.1.mlp.c_proj.weight")}
    expect_close(found, {"wte.weight": 0.02, "h.1.mlp.c_proj.weight": 0.01}, rtol=0.08, atol=0.0, read=INIT)
    loss = model(draw_tokens(config, 4, 32), draw_tokens(config, 4, 32, seed=1))[1].item()
    expect_close(loss, math.log(1000), atol=0.15, rtol=0.0, name="first loss", read=FIRST_LOSS)


# ---- count_parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, ONE], ids=["small", "one"])
def test_count_parameters_of_tiny_ones(config):
    case(f"v={config.vocab_size} t={config.context_len} c={config.dim} l={config.n_layers}")
    expected = sum(math.prod(shape) for shape in shapes_of(config).values())
    expect_equal(gpt2.count_parameters(config), expected, read=COUNT)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(GPT2_SMALL, 124_439_808), (GPT2_MEDIUM, 354_823_168), (GPT2_LARGE, 774_030_080), (GPT2_XL, 1_557_611_200)],
    ids=["small", "medium", "large", "xl"],
)
@pytest.mark.memory_limit(64)
def test_count_parameters_of_the_four_sizes(config, expected):
    case(f"c={config.dim} l={config.n_layers}")
    found = gpt2.count_parameters(config)
    expect_equal(found, expected, read=COUNT)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read="the contract, under Returns")


def test_count_parameters_leaves_padding_out():
    case("GPT-2 small in 50,304 rows")
    config = GPT2Config(padded_vocab_size=50_304)
    expect_equal(gpt2.count_parameters(config), 124_439_808, read="the contract")


# ---- convert_hf_state_dict -------------------------------------------------------------------------------------------


def old_buffers(config: GPT2Config, prefix: str) -> dict[str, Tensor]:
    """The masks that old checkpoints hold."""
    mask = torch.ones(1, 1, config.context_len, config.context_len).tril()
    found = {f"{prefix}h.{i}.attn.bias": mask for i in range(config.n_layers)}
    return found | {f"{prefix}h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(config.n_layers)}


def check_converted(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    found = gpt2.convert_hf_state_dict(given)
    read = "the contract of ex-gpt2-convert-hf-state-dict"
    expect_true(isinstance(found, dict), f"it returned a {type(found).__name__}, expected a dict", read=read)
    missing, extra = ([n for n in a if n not in b] for a, b in ((expected, found), (found, expected)))
    expect_true(not missing, f"these names are missing: {', '.join(missing[:3])}", answer=found, read=read)
    expect_true(not extra, f"these names are unexpected: {', '.join(extra[:3])}", answer=found, read=read)
    for name, tensor in expected.items():
        expect_close(found[name], tensor, atol=0.0, rtol=0.0, name=f"out[{name!r}]", answer=found, read=read)


def test_convert_hf_state_dict_by_hand():
    case("one attention of c=2")
    weight, bias = torch.arange(12.0).view(2, 6), torch.arange(6.0)
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    given = {"transformer.h.0.attn.c_attn.weight": weight, "transformer.h.0.attn.c_attn.bias": bias}
    given |= {"transformer.h.0.attn.c_proj.weight": square, "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    given |= {"transformer.wpe.weight": square, "transformer.wte.weight": square, "lm_head.weight": square.clone()}
    expected = {"h.0.attn.c_attn.weight": weight.T, "h.0.attn.c_attn.bias": bias, "h.0.attn.c_proj.weight": square.T}
    check_converted(given, expected | {"wpe.weight": square, "wte.weight": square})


@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["prefixed", "bare"])
def test_convert_hf_state_dict_of_a_whole_model(prefix):
    names = f"begin with {prefix!r}" if prefix else "as in the file on the hub"
    case(f"two blocks of c=8, names {names}, and a head that is wte.weight itself")
    weights = make_weights(SMALL)
    given = as_hf(weights, prefix) | old_buffers(SMALL, prefix)
    check_converted(given | {"lm_head.weight": given[f"{prefix}wte.weight"]}, weights)


def test_convert_hf_state_dict_passes_on_what_it_does_not_know():
    case("a head of its own, and h.0.attn.strange.weight")
    weights = make_weights(ONE)
    head, strange = weights["wte.weight"] + 1.0, torch.ones(3, 2)
    given = as_hf(weights) | {"lm_head.weight": head, "transformer.h.0.attn.strange.weight": strange}
    check_converted(given, weights | {"lm_head.weight": head, "h.0.attn.strange.weight": strange})


def test_convert_hf_state_dict_of_a_part():
    case("a head and a norm, and no wte.weight to compare the head with: it is passed on")
    head, gain = randn(7, 4), randn(4, seed=1)
    check_converted(
        {"lm_head.weight": head, "transformer.ln_f.weight": gain}, {"lm_head.weight": head, "ln_f.weight": gain}
    )


def test_convert_hf_state_dict_leaves_its_input():
    case("one block of c=4")
    given = as_hf(make_weights(ONE)) | old_buffers(ONE, "transformer.")
    before = {name: tensor.clone() for name, tensor in given.items()}
    gpt2.convert_hf_state_dict(given)
    expect_equal(sorted(given), sorted(before), name="the input's names afterwards")
    expect_close(given, before, name="the input afterwards")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@oracle
def test_convert_hf_state_dict_of_transformers_own_model():
    model = hf_model(SMALL, make_weights(SMALL))
    check_converted(model.state_dict(), make_weights(SMALL))


# ---- load_pretrained -------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, tensors: dict[str, Tensor], config: GPT2Config = SMALL, n_shards: int = 1, **changes
):
    """A folder as Transformers writes it."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_settings(config) | changes))
    if n_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: f"model-{i % n_shards + 1:05}-of-{n_shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name, home in where.items() if home == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def expect_loaded(folder: Path, weights: dict[str, Tensor], config: GPT2Config = SMALL) -> None:
    model = gpt2.load_pretrained(folder)
    read = LOADS
    expect_true(isinstance(model, nn.Module), f"it returned a {type(model).__name__}, expected a model", read=read)
    tokens = draw_tokens(config, 2, config.context_len)
    with torch.no_grad():
        logits = model(tokens)[0]
    expect_close(logits, logits_of(tokens, weights, config), atol=1e-4, name="logits", read=read)
    expect_true(not model.training, "the model is in training mode", answer=model.training, read=read)
    expect_true(all(p.requires_grad for p in model.parameters()), "a parameter cannot be trained further", read=read)


@pytest.mark.parametrize(("prefix", "n_shards"), [("transformer.", 1), ("", 1), ("transformer.", 3)])
def test_load_pretrained_from_a_folder(tmp_path, prefix, n_shards):
    case(f"two blocks of c=8, {n_shards} file(s), names {'prefixed' if prefix else 'bare, with old buffers'}")
    weights = make_weights(SMALL)
    tensors = as_hf(weights, prefix) | ({} if prefix else old_buffers(SMALL, prefix))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    expect_loaded(write_checkpoint(tmp_path / "model", tensors, n_shards=n_shards), weights)


def test_load_pretrained_reads_the_eps(tmp_path):
    case("layer_norm_epsilon = 0.3")
    config = GPT2Config(vocab_size=11, context_len=6, dim=8, n_layers=1, n_heads=4, norm_eps=0.3)
    weights = make_weights(config)
    expect_loaded(write_checkpoint(tmp_path / "model", as_hf(weights), config), weights, config)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_load_pretrained_gives_transformers_logits(tmp_path):
    case("weights of seed 0: Transformers' logits, from a folder")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)))
    expected = recorded("logits_and_loss_0", lambda: hf_logits_and_loss(SMALL, 0))
    tokens = draw_tokens(SMALL, 2, SMALL.context_len)
    with torch.no_grad():
        logits = gpt2.load_pretrained(str(folder))(tokens[:, :-1])[0]
    expect_close(
        logits.flatten(), expected[:-1], atol=1e-4, rtol=1e-4, name="logits.flatten()", answer=logits, read=LOADS
    )


def test_load_pretrained_refuses_a_missing_tensor(tmp_path):
    case("h.1.ln_2.bias is missing, and all else is right")
    tensors = as_hf(make_weights(SMALL))
    del tensors["transformer.h.1.ln_2.bias"]
    folder = write_checkpoint(tmp_path / "model", tensors)
    with expect_raises(ValueError, "h.1.ln_2.bias", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_refuses_an_unexpected_tensor(tmp_path):
    case("h.0.attn.strange.weight is in the file, and all else is right")
    tensors = as_hf(make_weights(SMALL)) | {"transformer.h.0.attn.strange.weight": torch.zeros(2)}
    folder = write_checkpoint(tmp_path / "model", tensors)
    with expect_raises(ValueError, "strange", read=LOADS):
        gpt2.load_pretrained(folder)


@pytest.mark.parametrize("rows", [5, 7])
def test_load_pretrained_refuses_another_shape(tmp_path, rows):
    case(f"wpe.weight is [{rows}, 8] and should be [6, 8]: the message shows both")
    tensors = as_hf(make_weights(SMALL)) | {"transformer.wpe.weight": torch.zeros(rows, 8)}
    folder = write_checkpoint(tmp_path / "model", tensors)
    shapes = (f"[{rows}, 8]", f"({rows}, 8)"), ("[6, 8]", "(6, 8)")
    with expect_raises(ValueError, "wpe.weight", *shapes, read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_refuses_another_activation(tmp_path):
    case('the activation in config.json is "relu", and all else is right')
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)), activation_function="relu")
    with expect_raises(ValueError, "relu", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_refuses_a_config_without_heads(tmp_path):
    case("config.json has no n_head, and all else is right")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)))
    settings = hf_settings(SMALL)
    del settings["n_head"]
    (folder / "config.json").write_text(json.dumps(settings))
    with expect_raises(ValueError, "n_head", read=LOADS):
        gpt2.load_pretrained(folder)


@pytest.mark.parametrize("value", [0, "8", 8.0])
def test_load_pretrained_refuses_a_size_that_is_no_positive_integer(tmp_path, value):
    case(f"config.json has n_head = {value!r}, and all else is right")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)), n_head=value)
    with expect_raises(ValueError, f"n_head = {value!r}", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_refuses_a_config_that_is_a_list(tmp_path):
    case("config.json holds a list, and all else is right")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)))
    (folder / "config.json").write_text("[]")
    with expect_raises(ValueError, "config.json", "list", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_lists_all_that_is_wrong(tmp_path):
    case("a tensor missing, one of the wrong shape, one too many, another activation: one error names all four")
    tensors = as_hf(make_weights(SMALL))
    del tensors["transformer.h.1.ln_2.bias"]
    tensors["transformer.wpe.weight"] = torch.zeros(5, 8)
    tensors["transformer.h.0.attn.strange.weight"] = torch.zeros(2)
    folder = write_checkpoint(tmp_path / "model", tensors, activation_function="relu")
    with expect_raises(ValueError, "h.1.ln_2.bias", "wpe.weight", "strange", "relu", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_of_a_file_without_tensors(tmp_path):
    case("model.safetensors is whole and holds no tensor: every tensor is missing, and the message names each")
    folder = write_checkpoint(tmp_path / "model", {}, ONE)
    with expect_raises(ValueError, *shapes_of(ONE), read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_without_a_shard(tmp_path):
    case("the second of three shards is not there: the message names the file, and the tensors that were in it")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL), prefix=""), n_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    lost = [name for i, name in enumerate(make_weights(SMALL)) if i % 3 == 1]
    with expect_raises(ValueError, "model-00002-of-00003.safetensors", *lost, read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_names_every_broken_file(tmp_path):
    case("config.json without n_head, and model.safetensors cut in half: one error names both")
    folder = write_checkpoint(tmp_path / "model", as_hf(make_weights(SMALL)))
    settings = hf_settings(SMALL)
    del settings["n_head"]
    (folder / "config.json").write_text(json.dumps(settings))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with expect_raises(ValueError, "n_head", "model.safetensors", read=LOADS):
        gpt2.load_pretrained(folder)


def test_load_pretrained_of_an_empty_folder(tmp_path):
    case("a folder with a pytorch_model.bin and nothing else: both missing files are named")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with expect_raises(ValueError, "config.json", "model.safetensors", read=LOADS):
        gpt2.load_pretrained(tmp_path)


def test_load_pretrained_of_no_folder(tmp_path):
    case("a path that is not there")
    with expect_raises(FileNotFoundError, "nowhere", read=LOADS):
        gpt2.load_pretrained(tmp_path / "nowhere" / "model")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@oracle
def test_load_pretrained_of_what_transformers_saves(tmp_path):
    model = hf_model(SMALL, make_weights(SMALL))
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for name in ("whole", "shards"):
        expect_loaded(tmp_path / name, make_weights(SMALL))
