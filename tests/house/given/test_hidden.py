"""Hidden states: the head's product with them is the model's logits, and a loss over them never holds all logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lib.finetuning import add_lora, masked_cross_entropy, pack_conversations, packed_mask
from lib.given.models import gpt2, llama
from lib.given.models.hidden import hidden_states, output_weight
from lib.gpt2 import GPT2
from lib.llama import Llama
from lib.rewards import token_log_probs

MAKE: dict[str, Any] = {
    "Llama": lambda: Llama(replace(llama.TINY, n_layers=2, vocab_size=300, context_len=64)),
    "GPT2": lambda: GPT2(replace(gpt2.TINY, n_layers=2, vocab_size=300, padded_vocab_size=384, context_len=64)),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MAKE[name]().to(dtype)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    found = model(ids)
    return found[0] if isinstance(found, tuple) else found


def tokens(*shape: int) -> Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("length", [1, 33, 64])
def test_product_is_the_models_logits(name, length):
    model, ids = made(name), tokens(2, length)
    with torch.no_grad():
        found = hidden_states(model, ids) @ output_weight(model).T
        expected = logits_of(model, ids)
    assert found.shape == expected.shape == (2, length, 300)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MAKE)
def test_packed_conversations_see_themselves_only(name):
    model = made(name)
    conversations = [(tokens(n).tolist(), [1] * n) for n in (9, 20, 14)]
    rows = pack_conversations(conversations, length=48)
    assert len(rows["inputs"]) == 1
    with torch.no_grad():
        packed = hidden_states(model, rows["inputs"], packed_mask(rows["documents"]), rows["positions"])
        for i, (ids, _) in enumerate(conversations):
            alone = hidden_states(model, torch.tensor([ids[:-1]]))
            torch.testing.assert_close(packed[rows["documents"] == i][None], alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MAKE)
def test_gradients_are_those_of_whole_logits(name):
    lean, whole = made(name, torch.float64), made(name, torch.float64)
    ids, targets = tokens(2, 40), tokens(2, 40).roll(1)
    targets[0, :25] = -100
    counted = targets != -100
    losses = -token_log_probs(hidden_states(lean, ids)[counted], output_weight(lean), targets[counted], chunk_size=16)[
        0
    ]
    (losses.sum() / counted.sum()).backward()
    masked_cross_entropy(logits_of(whole, ids).double(), targets).backward()
    for (parameter, ours), theirs in zip(lean.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-7, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}")


class Shapes(TorchDispatchMode):
    """Keeps the shapes of all that is computed, in autograd functions and in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(x)}
        return out


@pytest.mark.parametrize("name", MAKE)
def test_no_logits_of_all_positions_are_made_or_saved(name):
    model, ids = made(name), tokens(2, 48)

    def shapes(lean: bool) -> set[tuple[int, ...]]:
        saved: list[tuple[int, ...]] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x)
        with hooks, Shapes() as made_:
            states, weight = hidden_states(model, ids), output_weight(model)
            if lean:
                token_log_probs(states, weight, ids, chunk_size=16)[0].sum().backward()
            else:
                masked_cross_entropy(states @ weight.T, ids).backward()
        return {shape for shape in {*saved, *made_.seen} if shape[-1:] == (300,) and len(shape) > 1}

    n_dims = model.config.dim
    assert shapes(lean=True) == {(16, 300), (n_dims, 300)}  # a chunk of logits, and the weight's transpose
    assert any(torch.Size(shape).numel() == 96 * 300 for shape in shapes(lean=False))


@pytest.mark.parametrize("name", MAKE)
def test_adapters_are_passed_through(name):
    model = made(name)
    target = "wq" if name == "Llama" else "c_attn"
    before = hidden_states(model, tokens(1, 8))
    add_lora(model, 2, 4.0, [target])
    torch.testing.assert_close(hidden_states(model, tokens(1, 8)), before)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.ones_(parameter)
    with torch.no_grad():
        found = hidden_states(model, tokens(1, 8)) @ output_weight(model).T
        torch.testing.assert_close(found, logits_of(model, tokens(1, 8)), atol=5e-6, rtol=1e-5)
    assert not torch.allclose(hidden_states(model, tokens(1, 8)), before)


def test_another_model_and_too_long_a_row_are_refused():
    with pytest.raises(TypeError, match="Linear: expected chapter 4's Llama or chapter 6's GPT2"):
        hidden_states(nn.Linear(2, 2), tokens(1, 2))
    with pytest.raises(TypeError, match="Sequential"):
        output_weight(nn.Sequential())
    for name in MAKE:
        with pytest.raises(ValueError, match="65 tokens in a row are more than the context of 64"):
            hidden_states(made(name), tokens(1, 65))
