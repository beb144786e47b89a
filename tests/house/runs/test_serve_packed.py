"""A cache in 8 bits: what it holds, that it is exact where 8 bits are, what it costs, and that no block is lost.
Weights of 4 and 8 bits: the tokens of the wide ones, what they cost, and what they refuse.
"""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from lib.fast.parts.narrow import NarrowLinear, dense
from lib.fast.parts.packed import Packed, pack, unpack
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request
from lib.given.models.variants import variant_of
from lib.llama import Llama
from lib.runs import serve
from lib.runs.flags import UsageError
from lib.runs.serving.engine import build
from lib.runs.serving.packed import PackedCache, measure_cost, packed_attention
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.quantized import quantize_model
from lib.runs.serving.text import ByteTokenizer
from lib.runs.variants import VariantLlama
from lib.serving import PagedCache, Scheduler, generate_many, paged_attention
from tests.house.fast.test_decode import served
from tests.house.runs.test_serve import users_of

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(60)]
SMALL = LlamaConfig(vocab_size=256, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, context_len=160)
DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("float8", 2**-4)])
def test_each_head_has_its_largest_number_exactly_and_no_error_above_half_a_step(kind, error):
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1.0, 1e6])[:, None]
    x[0, 0] = 0
    numbers, scales = pack(x, DTYPES[kind])
    found, most = unpack(numbers, scales, torch.float32), x.abs().amax(-1, keepdim=True)
    assert numbers.element_size() == 1
    assert found[0, 0].count_nonzero() == 0
    assert ((found - x).abs() <= 1.01 * error * (most if kind == "int8" else x.abs() + most / 448)).all()
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), most, rtol=1e-6, atol=0)
    broken, bad = pack(torch.tensor([[1.0, float("nan")]]), DTYPES[kind])
    assert unpack(broken, bad, torch.float32).isnan().any()  # what is not finite does not become a score


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_blocks_forks_and_attention_are_those_of_the_rounded_numbers(kind):
    """The same positions in chapter 21's cache, rounded beforehand; a fork writes into a copy, scales included."""
    config, generator = SMALL, torch.Generator().manual_seed(1)
    packed, plain = PackedCache(kind, config, 12, 4), PagedCache(config, 12, 4)
    assert isinstance(packed.keys, Packed)
    ids = [[cache.new() for _ in range(2)] for cache in (packed, plain)]
    for row, n in enumerate((7, 3)):
        for layer in range(2):
            k, v = torch.randn(2, 2, n, 8, generator=generator)
            packed.append(ids[0][row], layer, k, v)
            plain.append(ids[1][row], layer, *(unpack(*pack(x, DTYPES[kind]), torch.float32) for x in (k, v)))
    fork = packed.fork(ids[0][0])
    for layer in range(2):
        packed.append(fork, layer, *(100 * torch.randn(2, 2, 1, 8, generator=generator)))
    q = torch.randn(2, 4, 8, generator=generator)
    for layer in range(2):
        for found, expected in zip(packed.read(ids[0][0], layer), plain.read(ids[1][0], layer), strict=True):
            assert torch.equal(found, expected)
        found = packed_attention(q, packed, ids[0], layer)
        torch.testing.assert_close(found, paged_attention(q, plain, ids[1], layer))
        torch.testing.assert_close(packed.read(fork, layer)[0][:, :7], plain.read(ids[1][0], layer)[0])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("float8", 0.08)])
def test_an_engine_with_shared_blocks_and_preemption_in_8_bits(kind, most):
    """Each answer as if asked alone in the same cache; the cost in scores is small, and not nothing."""
    torch.manual_seed(0)
    model = Llama(SMALL).eval()
    engine = PrefixEngine(model, Scheduler(16, 14, 4), cache_format=kind)
    requests = [Request([3, 1, 4, 1, 5, 9, 2, 6][: 4 + i], 9) for i in range(4)]
    found: dict[Request, list[int]] = {request: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.is_busy:
        for request, token in engine.step():
            found[request].append(token)
        assert engine.cache.allocator.n_users == users_of(engine)
    for request in requests:
        alone = PrefixEngine(model, Scheduler(64, 40, 4), cache_format=kind)
        alone.submit(Request(request.tokens, 9))
        tokens = []
        while alone.is_busy:
            tokens += [token for _, token in alone.step()]
        assert found[request] == tokens
    cost = measure_cost(model, ByteTokenizer(), kind)
    assert 0 < cost.rms / cost.spread < most
    assert cost.n - cost.n_same <= cost.n // 8


def test_the_server_says_what_a_position_takes_and_what_8_bits_cost():
    flags = ["--model", "tiny", "--device", "cpu", "--blocks", "64", "--cache-dtype", "int8"]
    engine, ready = build(serve.make_parser().parse_args(flags), Counter())
    pools = (engine.cache.keys, engine.cache.values)
    n_bytes = sum(x.numbers.nbytes + x.scales.nbytes for x in pools)
    assert ready.position_bytes * 64 * 16 == n_bytes
    assert ready.notes[0] == "a position of the cache takes 544 bytes, in int8; in float32 it would take 2,048"
    assert "the likeliest token the same at 12" in ready.notes[1]  # of 128
    request = Request(list(b"the rain, "), 8)
    engine.submit(request)
    found = []
    while engine.is_busy:
        found += [token for _, token in engine.step()]
    assert found == [token for _, token in generate_many(engine.model, [request], Scheduler(64, 60, 4))]


def test_the_server_says_what_narrow_weights_take_and_cost():
    flags = ["--model", "tiny", "--device", "cpu", "--blocks", "64", "--quantize"]
    _, ready = build(serve.make_parser().parse_args([*flags, "int4"]), Counter())
    n = 3 * 256 * 256 * 2 + (2 * 256 + 2 * 128) * 256 * 2  # of two blocks
    assert (
        ready.notes[0]
        == f"the blocks' weights take {n // 2 + 5 * n // 128:,} bytes, in int4; in float32 they would take 3.1 MB"
    )
    assert "the likeliest token the same at 11" in ready.notes[1]  # of 128
    engine, ready = build(serve.make_parser().parse_args([*flags, "float8"]), Counter())
    assert "the likeliest token the same at 12" in ready.notes[1]
    wide = copy.deepcopy(engine.model)
    for name, layer in engine.model.named_modules():
        if isinstance(layer, NarrowLinear):
            made = nn.Linear(layer.weights.n_terms, layer.weights.n_columns, bias=False)
            made.weight.data = dense(layer.weights, torch.float32)
            wide.set_submodule(name, made)
    request = Request(list(b"the rain, "), 8)
    found = served(engine, [request])
    assert found == [[token for _, token in generate_many(wide, [request], Scheduler(64, 60, 4))]]


def test_what_narrow_weights_do_not_hold_is_refused_by_name():
    def refused(model, kind="int4"):
        torch.manual_seed(0)
        with pytest.raises(UsageError) as caught:
            quantize_model(model, kind, ByteTokenizer(), torch.float32, torch.device("cpu"))
        return str(caught.value)

    odd = Llama(replace(SMALL, dim=40, n_heads=2)).eval()
    assert refused(odd) == "--quantize int4: layers.0.attention.wq has rows of 40 weights, expected a multiple of 32"
    broken = Llama(replace(SMALL, hidden_dim=64)).eval()
    broken.get_parameter("layers.1.feed_forward.w1.weight").data[0, 0] = float("nan")
    for kind in ("int4", "float8"):
        assert refused(broken, kind) == f"--quantize {kind}: layers.1.feed_forward.w1 has weights that are not finite"
    assert "the model has experts" in refused(VariantLlama(variant_of(SMALL, "gpt_oss")))
    assert "the model has linear layers" in refused(VariantLlama(variant_of(SMALL, "qwen3_next")))
