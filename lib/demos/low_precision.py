"""Short runs of chapter 20: a small GPT-2 whose linear layers multiply in float8,
and a small Llama with weights of eight and four bits.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from lib.given.data.corpora import language_reference
from lib.given.kernels.int4 import dequantize_int4
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.gpt2 import GPT2
from lib.llama import Llama, generate
from lib.low_precision import (
    Float8Linear,
    Int4Linear,
    absmax_scale,
    dequantize,
    gptq,
    pack_int4,
    quantize,
    quantize_int4,
)

LENGTH, BATCH = 64, 8
GPT2_TINY = GPT2Config(vocab_size=256, context_len=LENGTH, dim=128, n_layers=2, n_heads=4)
LLAMA_TINY = LlamaConfig(vocab_size=256, dim=128, n_layers=2, n_heads=4, hidden_dim=384, context_len=256)


class UnscaledLinear(Float8Linear):
    """Casts numbers to float8 as they are, without a scale; gradients to the format that is asked for."""

    def __init__(self, linear: nn.Linear, gradients: torch.dtype):
        super().__init__(linear, "dynamic")
        self.gradients = gradients

    def cast(self, tensor: Tensor, name: str, dim: int, first: bool) -> tuple[Tensor, Tensor]:
        """The nearest float8 numbers, and the scale 1."""
        one = torch.ones((), device=tensor.device)
        return quantize(tensor, one, self.gradients if name == "grad" else torch.float8_e4m3fn), one


class Int8Linear(nn.Module):
    """A linear layer for inference with int8 weights and a scale for each row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = absmax_scale(linear.weight, torch.int8, 1)
        self.register_buffer("weight", quantize(linear.weight.detach(), scale, torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` times the dequantized weights; for a layer without bias."""
        return x @ dequantize(self.weight, self.scale).to(x.dtype).T


RECIPES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "dynamic": lambda linear: Float8Linear(linear, "dynamic"),
    "delayed": lambda linear: Float8Linear(linear, "delayed"),
    "rowwise": lambda linear: Float8Linear(linear, "rowwise"),
    "blockwise": lambda linear: Float8Linear(linear, "blockwise"),
    "no scale, gradients e5m2": lambda linear: UnscaledLinear(linear, torch.float8_e5m2),
    "no scale, gradients e4m3": lambda linear: UnscaledLinear(linear, torch.float8_e4m3fn),
}


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module], skip: tuple[str, ...] = ()) -> nn.Module:
    """Replace every ``nn.Linear`` of the model, except those whose own name is in ``skip``, by ``make(linear)``;
    returns the model.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name not in skip:
                setattr(parent, name, make(child))
    return model


@cache
def corpus() -> tuple[Tensor, Tensor]:
    """The bytes of the Python language reference: nine tenths to train on, and the rest."""
    data = torch.tensor(list(language_reference().encode()))
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def windows(data: Tensor, generator: torch.Generator, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[batch, LENGTH]`` from random places."""
    start = torch.randint(len(data) - LENGTH, (batch, 1), generator=generator)
    window = data[start + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def make_gpt2(recipe: str, seed: int, device: str = "cpu") -> GPT2:
    """A small GPT-2 with the linear layers of a recipe; its embeddings are drawn wider than GPT-2's,
    so that it learns within a hundred steps.
    """
    torch.manual_seed(seed)
    model = GPT2(GPT2_TINY)
    with torch.no_grad():
        model.get_parameter("wte.weight").mul_(4)
    if recipe in RECIPES:
        replace_linears(model, RECIPES[recipe])
    return model.to(device)


def train_gpt2(recipe: str = "float32", n_steps: int = 100, seed: int = 0, device: str = "cpu") -> list[float]:
    """The losses of a short training.

    Args:
        recipe: "float32", "bfloat16" (under autocast) or one of `RECIPES`.
        n_steps: Steps of ``BATCH`` sequences of ``LENGTH`` bytes.
        seed: Of the weights and of the batches.
        device: Where it is trained.
    """
    model, data, generator = make_gpt2(recipe, seed, device), corpus()[0], torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for _ in range(n_steps):
        x, y = windows(data, generator)
        with torch.autocast(device, torch.bfloat16, enabled=recipe == "bfloat16"):
            loss = model(x.to(device), y.to(device))[1]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero_gradients(recipe: str, seed: int = 0) -> float:
    """The share of zeros among the gradients of the blocks' linear weights, in the first step."""
    model = make_gpt2(recipe, seed)
    weights = [p for name, p in model.named_parameters() if p.ndim == 2 and "wte" not in name and "wpe" not in name]
    model(*windows(corpus()[0], torch.Generator().manual_seed(seed)))[1].backward()
    return 1 - sum(int(torch.count_nonzero(torch.as_tensor(w.grad))) for w in weights) / sum(w.numel() for w in weights)


def train_llama(n_steps: int = 400, seed: int = 0) -> Llama:
    """A small Llama, trained on bytes of the language reference."""
    torch.manual_seed(seed)
    model, data, generator = Llama(LLAMA_TINY), corpus()[0], torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=n_steps)
    for _ in range(n_steps):
        x, y = windows(data, generator)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module, n_batches: int = 40) -> float:
    """The exponential of the mean loss over held-out bytes."""
    data, generator = corpus()[1], torch.Generator().manual_seed(1)
    losses = []
    for _ in range(n_batches):
        x, y = windows(data, generator)
        losses.append(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return torch.stack(losses).mean().exp().item()


def with_int8(model: nn.Module) -> nn.Module:
    """A copy whose linear layers, except for the head, have int8 weights."""
    return replace_linears(copy.deepcopy(model), Int8Linear, skip=("output",))


def with_int4(model: nn.Module, group_size: int) -> nn.Module:
    """A copy whose linear layers, except for the head, have weights of four bits, rounded to the nearest level."""
    return replace_linears(copy.deepcopy(model), lambda linear: Int4Linear(linear, group_size), skip=("output",))


def with_gptq(model: nn.Module, group_size: int, n_batches: int = 8) -> nn.Module:
    """As `with_int4`, with levels by GPTQ: each layer's Hessian is that of its inputs on some batches of the
    training text.
    """
    model = copy.deepcopy(model)
    found = hessians(model, n_batches)

    def make(linear: nn.Linear) -> Int4Linear:
        layer, (q, scale, zero) = Int4Linear(linear, group_size), gptq(linear.weight, found[linear], group_size)
        layer.packed, layer.scale, layer.zero = pack_int4(q), scale, zero
        return layer

    return replace_linears(model, make, skip=("output",))


@torch.no_grad()
def hessians(model: nn.Module, n_batches: int = 8, held_out: bool = False) -> dict[nn.Linear, Tensor]:
    """For each linear layer except for the head, the sum of ``x x^T`` over its inputs on some batches of text."""
    found: dict[nn.Linear, Tensor] = {}

    def watch(layer, inputs):
        x = inputs[0].flatten(0, -2)
        found[layer] = found.get(layer, 0) + x.T @ x

    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "output"]
    hooks = [layer.register_forward_pre_hook(watch) for layer in layers]
    data, generator = corpus()[held_out], torch.Generator().manual_seed(2)
    for _ in range(n_batches):
        model(windows(data, generator)[0])
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def output_errors(model: nn.Module, group_size: int) -> tuple[float, float]:
    """Squared error of the linear layers' outputs over their inputs on held-out text, by rounding and by GPTQ,
    as shares of the outputs' squares.
    """
    train, test = hessians(model), hessians(model, held_out=True)
    found = []
    for layer, h in test.items():
        total = (layer.weight @ h * layer.weight).sum()
        for levels in (quantize_int4(layer.weight, group_size), gptq(layer.weight, train[layer], group_size)):
            off = dequantize_int4(*levels) - layer.weight
            found.append(((off @ h * off).sum() / total).item())
    return sum(found[::2]) / len(test), sum(found[1::2]) / len(test)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def text(model: Llama, prompt: str, n: int = 60) -> str:
    """The prompt and n more bytes, the likeliest one at each step."""
    tokens = torch.tensor([list(prompt.encode())])
    steps: Iterator[Tensor] = generate(model, tokens, n, temperature=0)
    return prompt + bytes(int(step) for step in steps).decode(errors="replace")
