"""Weights of 4 and 8 bits in the serving step: the products of the wide weights, and the same tokens."""

import copy

import pytest
import torch
from torch.nn.functional import linear, silu

import lib.fast.decode as decode
import lib.fast.serving as serving
from lib.fast.parts import narrow as parts
from lib.fast.parts.narrow import NarrowLinear, dense, few_rows, join, product, widen
from lib.given.kernels.mode import HAS_TRITON, NO_TRITON
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request
from lib.llama import Llama
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.quantized import matrices, narrow
from lib.serving import Scheduler
from tests.house.fast.comparing import close, normal, on_both
from tests.house.fast.test_decode import served

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
SMALL = LlamaConfig(vocab_size=23, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=64, context_len=32)
KINDS = ("int4", "float8")


@on_both
@pytest.mark.parametrize("kind", [*KINDS, "wide"])
def test_products_of_few_rows(device, kind, monkeypatch):
    """In one part and in four, with rows, columns and terms that no tile divides, and gated."""
    for dtype, atol in ((torch.float32, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.5)):
        if device == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter knows no such numbers
        weight = normal(70, 160, device=device, seed=1)
        weight = weight.to(dtype) if kind == "wide" else narrow(weight, kind)
        wide = weight.float() if isinstance(weight, torch.Tensor) else dense(weight, torch.float32)
        for x in (normal(1, 160, device=device).to(dtype), normal(17, 160, device=device).to(dtype)):
            expected = linear(x.float(), wide)
            for n_parts in (1, 4):
                monkeypatch.setattr(parts, "n_parts", lambda *asked, n=n_parts: n)
                close(few_rows(x, weight).float().sum(0), expected, atol)
            gated = silu(expected[:, :35]) * expected[:, 35:]
            close(few_rows(x, weight, gated=True)[0].float(), gated, 10 * atol, rtol=2**-7)  # twice bfloat16's rounding


@on_both
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_products_of_more_rows(device, kind, monkeypatch):
    weight = narrow(normal(35, 160, device=device, seed=1), kind)
    x, wide = normal(17, 160, device=device), dense(weight, torch.float32)
    assert torch.equal(widen(weight, torch.float32), wide)
    close(product(x, weight), linear(x, wide), atol=1e-4)
    monkeypatch.setattr(parts, "MANY_ROWS", 8)
    close(product(x, weight), linear(x, wide), atol=1e-4)


def test_tiles_of_a_large_narrow_weight_have_three_stages_for_many_rows():
    numbers = torch.empty(parts.LARGE, parts.LONG_ROW, dtype=torch.int8, device="meta")
    scales, few, many = numbers[:, :1], numbers[: parts.SOME_ROWS].half(), numbers[: parts.MANY_ROWS].half()
    large, small = parts.Narrow(numbers, scales, None), parts.Narrow(numbers[1:], scales[1:], None)
    assert parts.tile_of(many, large).stages[3] == 3
    assert parts.tile_of(many, small).stages == parts.TILES["float8"][0].stages
    assert parts.tile_of(few, large) == parts.FEW


def test_layers_of_narrow_weights_are_joined_and_moved():
    for kind in KINDS:
        layers = [NarrowLinear(narrow(normal(n, 64, device="cpu"), kind)) for n in (3, 5)]
        wide, x = torch.cat([dense(layer.weights, torch.float32) for layer in layers]), normal(2, 64, device="cpu")
        whole = join(layers)
        assert torch.equal(dense(whole, torch.float32), wide)
        assert layers[0].numbers.data_ptr() == whole.numbers.data_ptr()
        moved = layers[1].to(torch.bfloat16)
        assert [t.dtype for t in moved.weights if t is not None] == [t.dtype for t in whole if t is not None]
        assert torch.equal(moved(x), linear(x, wide[3:]))


@on_both
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("kind", [*KINDS, "wide"])
def test_the_same_tokens_as_with_the_wide_weights(device, kind, monkeypatch):
    """On the fast way, beside another request and then alone; its products come in two parts."""
    monkeypatch.setattr(decode, "takes_few", lambda x, weight: True)
    monkeypatch.setattr(parts, "n_parts", lambda *asked: 2)
    torch.manual_seed(0)
    model = Llama(SMALL).eval().to(device)
    quantized = copy.deepcopy(model)
    for name, layer in matrices(model) if kind in KINDS else ():
        weight = narrow(2 * layer.weight.detach(), kind)
        layer.weight.data = dense(weight, torch.float32)
        quantized.set_submodule(name, NarrowLinear(weight))

    def tokens_of(net):
        asked = [Request([3, 1], 3, 0.8, 1), Request([3, 1, 4], 2)]
        return served(PrefixEngine(net, Scheduler(7, 9, 4)), asked)

    expected = tokens_of(model)
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: decode.can_step(engine.model, engine.cache))
    assert PrefixEngine(quantized, Scheduler(7, 9, 4)).steps is not None
    assert tokens_of(quantized) == expected
