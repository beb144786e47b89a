"""The layer around the delta rule, and the bytes that it remembers, against Transformers' layer and `F.conv1d`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, recorded
from tests.chapter_24.forms import FLOAT64, Operators, recurrence
from tests.inputs import randn

la = graded("linear_attention")

CONV, LAYER, BYTES, CROSSING = (f"eq-linear_attention-{n}" for n in (12, 13, 14, 15))
ARGS, RETURNS, RAISES = (f"the contract, under {part}" for part in ("Args", "Returns", "Raises"))
ATTRIBUTES, CACHE = "the contract, under Attributes", "the contract of `make_cache`"
FORWARD = "the contract of `forward`"

# ---- short_convolution -----------------------------------------------------------------------------------------------


def test_short_convolution_by_hand():
    x = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]]])
    weight = torch.tensor([[100.0, 10.0, 1.0], [0.0, 0.0, 2.0]])
    case("T=4 K=3: weights 100, 10, 1 over the inputs 1, 2, 4, 8; a second channel is doubled; no activation")
    y, state = la.short_convolution(x, weight, activation=None)
    aim = torch.tensor([[[1.0, 20.0], [12.0, 40.0], [124.0, 80.0], [248.0, 160.0]]])
    expect_close((y, state), (aim, x[:, 2:]), read=CONV)
    case("the same after the inputs 3 and 5 (second channel 0)")
    start = torch.tensor([[[3.0, 0.0], [5.0, 0.0]]])
    y, state = la.short_convolution(x, weight, None, start, None)
    aim = torch.tensor([[[351.0, 20.0], [512.0, 40.0], [124.0, 80.0], [248.0, 160.0]]])
    expect_close((y, state), (aim, x[:, 2:]), read=CONV)
    case("the same with a bias of -50 and -60, and SiLU after it")
    found = la.short_convolution(x, weight, torch.tensor([-50.0, -60.0]))
    z = torch.tensor([[[-49.0, -40.0], [-38.0, -20.0], [74.0, 20.0], [198.0, 100.0]]])
    expect_close(found, (z * torch.sigmoid(z), x[:, 2:]), read=CONV)


def test_short_convolution_state_of_short_inputs():
    weight = torch.ones(1, 4)
    start = torch.tensor([[[1.0], [2.0], [3.0]]])
    for length in (0, 1, 2, 3):
        case(f"T={length} K=4 after 1, 2, 3: the last three inputs, old ones among them")
        x = torch.full((1, length, 1), 7.0)
        aim = torch.tensor([1.0, 2.0, 3.0] + [7.0] * length)[-3:].view(1, 3, 1)
        found = la.short_convolution(x, weight, None, start, None)
        sums = torch.tensor([13.0, 19.0, 24.0])[:length].view(1, length, 1)
        expect_close(found, (sums, aim), read=RETURNS)
    case("T=1 K=4 without an initial state")
    expect_close(
        la.short_convolution(x[:, :1], weight, activation=None)[1], torch.tensor([[[0.0], [0.0], [7.0]]]), read=RETURNS
    )
    case("T=2 K=1: nothing is remembered")
    y, state = la.short_convolution(x[:, :2], torch.full((1, 1), 3.0), activation=None)
    expect_close((y, state), (torch.full((1, 2, 1), 21.0), torch.zeros(1, 0, 1)), read=RETURNS)


@pytest.mark.parametrize("kernel", [2, 4])
def test_short_convolution_equals_pytorch(kernel):
    case(f"B=2 T=9 C=6 K={kernel}, float64, beside F.conv1d with one group a channel: values and gradients")
    given = [
        randn(*s, seed=i).double().requires_grad_()
        for i, s in enumerate([(2, 9, 6), (6, kernel), (6,), (2, kernel - 1, 6)])
    ]
    x, weight, bias, start = given
    y, state = la.short_convolution(*given)
    whole = torch.cat([start, x], 1)
    aim = F.silu(F.conv1d(whole.mT, weight[:, None], bias, groups=6)).mT
    expect_close((y, state), (aim, whole[:, 9:]), read=CONV, **FLOAT64)
    weights = randn(2, 9, 6, seed=5).double()
    found, wanted = (
        torch.autograd.grad((out * weights).sum() + s.sum(), given) for out, s in ((y, state), (aim, whole[:, 9:]))
    )
    expect_close(found, wanted, name="gradient", answer=(y, state), read=CONV, **FLOAT64)


def test_short_convolution_in_pieces():
    case("T=11 K=4 in pieces of 1, 2, 5 and 3, each with the state of the one before: the same numbers")
    x, weight = randn(2, 11, 3), randn(3, 4, seed=1)
    pieces, state = [], None
    for piece in x.split([1, 2, 5, 3], 1):
        y, state = la.short_convolution(piece, weight, None, state)
        pieces.append(y)
    whole = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=3)).mT
    expect_close(torch.cat(pieces, 1), whole, read=CONV)


def test_short_convolution_state_has_memory_of_its_own():
    for length, what in ((9, "the inputs"), (0, "the initial state")):
        case(f"T={length} K=3: bytes behind the state, which should not be those of {what}")
        x, start = randn(1, length, 2), randn(1, 2, 2, seed=1)
        found = la.short_convolution(x, randn(2, 3, seed=2), None, start)
        state = found[1]
        kept = state.untyped_storage().nbytes()
        problem = f"the state of {state.nbytes} bytes keeps {kept} bytes alive"
        expect_true(kept == state.nbytes, problem, answer=found, read=RETURNS)
        shared = state.data_ptr() in (start.data_ptr(), x.data_ptr())
        expect_true(not shared, "the state is a view of an argument", answer=found, read=RETURNS)


def test_short_convolution_dtype():
    case("bfloat16, after a state in float32: outputs and state are bfloat16")
    x = randn(1, 5, 2).bfloat16()
    y, state = la.short_convolution(x, randn(2, 3, seed=1).bfloat16(), None, torch.zeros(1, 2, 2))
    expect_equal([y.dtype, state.dtype], [torch.bfloat16] * 2, name="dtypes", answer=(y, state), read=RETURNS)


def test_short_convolution_refuses():
    la.short_convolution(randn(1, 5, 2), randn(2, 3))
    for activation in ("relu", "swish", ""):
        case(f"activation={activation!r}")
        with expect_raises(ValueError, activation, read=RAISES):
            la.short_convolution(randn(1, 5, 2), randn(2, 3), None, None, activation)


# ---- GatedDeltaNet ---------------------------------------------------------------------------------------------------

SIZES = {"dim": 12, "n_k_heads": 2, "n_v_heads": 6, "head_k_dim": 4, "head_v_dim": 5}
SHAPES = {
    "in_proj_qkvz.weight": (2 * 2 * 4 + 2 * 6 * 5, 12),
    "in_proj_ba.weight": (12, 12),
    "conv1d.weight": (2 * 2 * 4 + 6 * 5, 1, 4),
    "dt_bias": (6,),
    "A_log": (6,),
    "norm.weight": (5,),
    "out_proj.weight": (12, 30),
}


def weights_of() -> dict[str, Tensor]:
    """Random parameters by name, each of another scale."""
    return {name: randn(*shape, seed=20 + i) * 0.4 for i, (name, shape) in enumerate(SHAPES.items())}


def a_layer(dtype=torch.float32, **more) -> Any:
    layer = la.GatedDeltaNet(**SIZES, **more)
    layer.load_state_dict(weights_of())
    return layer.to(dtype)


def plain_layer(weights: dict[str, Tensor], x: Tensor, convolve=None, eps=1e-6) -> tuple[Tensor, Tensor]:
    """Output and last state, head by head: projections and convolution in the dtype of x, all else in float64."""
    groups = F.linear(x, weights["in_proj_qkvz.weight"]).unflatten(-1, (2, 38))
    gates = F.linear(x, weights["in_proj_ba.weight"]).unflatten(-1, (2, 6))
    mixed = torch.cat([groups[..., :4].flatten(2), groups[..., 4:8].flatten(2), groups[..., 8:23].flatten(2)], -1)
    if convolve is None:
        mixed = F.silu(F.conv1d(F.pad(mixed.mT, (3, 0)), weights["conv1d.weight"], groups=46)).mT.double()
    else:
        mixed = convolve(mixed, weights["conv1d.weight"][:, 0])[0].double()
    outputs, states = [], []
    for head in range(6):
        j, i = divmod(head, 3)
        q, k = mixed[..., 4 * j : 4 * j + 4], mixed[..., 8 + 4 * j : 12 + 4 * j]
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        v, z = mixed[..., 16 + 5 * head : 21 + 5 * head], groups[:, :, j, 23 + 5 * i : 28 + 5 * i].double()
        beta = torch.sigmoid(gates[:, :, j, i].double())
        step = F.softplus(gates[:, :, j, 3 + i].double() + weights["dt_bias"][head].double())
        g = -weights["A_log"][head].double().exp() * step
        o, state = recurrence(*(y[:, :, None] for y in (q, k, v, g)), beta=beta[:, :, None])
        o = o[:, :, 0] / (o[:, :, 0].square().mean(-1, keepdim=True) + eps).sqrt()
        outputs.append(o * weights["norm.weight"].double() * z * torch.sigmoid(z))
        states.append(state)
    return F.linear(torch.cat(outputs, -1).to(x.dtype), weights["out_proj.weight"]), torch.cat(states, 1)


def test_GatedDeltaNet_names_and_shapes():
    case(", ".join(f"{name}={size}" for name, size in SIZES.items()))
    layer = la.GatedDeltaNet(**SIZES)
    layer.make_cache(1)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    expect_equal(shapes, SHAPES, name="state_dict", answer=shapes, read=ATTRIBUTES)
    expect_close(layer.norm.weight.detach(), torch.ones(5), name="norm.weight", read=ATTRIBUTES)


@pytest.mark.parametrize("length", [1, 6, 70])
def test_GatedDeltaNet_head_by_head(length):
    case(f"B=2 T={length} C=12, two key heads of 4 and six value heads of 5, float64, beside the layer head by head")
    layer, x = a_layer(torch.float64), randn(2, length, 12).double()
    aim, _ = plain_layer({name: w.double() for name, w in weights_of().items()}, x)
    expect_close(layer(x).detach(), aim, read=LAYER, **FLOAT64)


def test_GatedDeltaNet_equals_transformers():
    case("B=2 T=9 C=12, float32, beside Transformers' Qwen3NextGatedDeltaNet: outputs and gradients of all parameters")
    x = randn(2, 9, 12)

    def compute():
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        config = Qwen3NextConfig(
            hidden_size=12, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=4,
            linear_value_head_dim=5, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, num_hidden_layers=4,
        )  # fmt: skip
        layer = Qwen3NextGatedDeltaNet(config, 0)
        layer.load_state_dict(weights_of())
        return all_of(layer, x)

    layer = a_layer()
    found, aim = all_of(layer, x), recorded("Qwen3NextGatedDeltaNet", compute)
    expect_close(found[: x.numel()], aim[: x.numel()], atol=1e-5, rtol=1e-4, read=LAYER)
    expect_close(found, aim, atol=1e-4, rtol=1e-3, name="out and gradients", read=LAYER)


def all_of(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output, then the gradients of its parameters, by name, in one row."""
    out = layer(x)
    (out * randn(*out.shape, seed=7)).sum().backward()
    named = dict(layer.named_parameters())
    return torch.cat([out.detach().flatten(), *(named[name].grad.flatten() for name in SHAPES)])


def test_GatedDeltaNet_decodes_in_pieces():
    case("B=2 T=12 in pieces of 5, 1, 1, 2 and 3 with a cache: the same numbers, in memory that never moves")
    layer, x = a_layer(chunk_size=4), randn(2, 12, 12)
    cache = layer.make_cache(2)
    places = cache.conv_state.data_ptr(), cache.recurrent_state.data_ptr()
    aim, state = plain_layer(weights_of(), x)
    pieces, lengths = [], []
    with torch.no_grad():
        for piece in x.split([5, 1, 1, 2, 3], 1):
            pieces.append(layer(piece, cache))
            lengths.append(cache.length)
    found = torch.cat(pieces, 1)
    expect_close(found, aim, atol=1e-5, rtol=1e-4, read=FORWARD)
    expect_close(cache.recurrent_state, state.float(), atol=1e-5, rtol=1e-4, name="recurrent_state", read=FORWARD)
    expect_equal(lengths, [5, 6, 7, 9, 12], name="length", answer=found, read=FORWARD)
    kept = places == (cache.conv_state.data_ptr(), cache.recurrent_state.data_ptr())
    expect_true(kept, "the cache's memory moved: its tensors must be written in place", answer=found, read=FORWARD)


def test_GatedDeltaNet_cache_begins_with_zeros():
    for dtype, wide in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        case(f"make_cache(3, {dtype}): shapes, dtypes and zeros")
        cache = a_layer(dtype).make_cache(3, dtype)
        aim = torch.zeros(3, 3, 46, dtype=dtype), torch.zeros(3, 6, 4, 5, dtype=wide)
        expect_close((cache.conv_state, cache.recurrent_state), aim, name="cache", read=CACHE)
        expect_equal(cache.length, 0, name="length", read=CACHE)
    case('make_cache(3, device="meta")')
    cache = a_layer().make_cache(3, device="meta")
    places = [cache.conv_state.device.type, cache.recurrent_state.device.type]
    expect_equal(places, ["meta", "meta"], name="where the two states are", read=CACHE)


def test_GatedDeltaNet_cache_keeps_no_graph():
    case("a prompt of 3 positions with gradients on, whose output nobody differentiates")
    layer = a_layer()
    cache = layer.make_cache(1)
    out = layer(randn(1, 3, 12), cache)
    kept = [name for name in ("conv_state", "recurrent_state") if getattr(cache, name).requires_grad]
    problem = f"{' and '.join(kept)} of the cache keeps autograd's graph of all that was passed"
    expect_true(not kept, problem, answer=out, read=FORWARD)


def test_GatedDeltaNet_one_position_is_one_step():
    case("T=1 with a cache: no chunk, so no triangular system is solved")
    layer = a_layer()
    cache = layer.make_cache(1)
    with torch.no_grad(), Operators() as seen:
        out = layer(randn(1, 1, 12), cache)
    problem = "a triangular system is solved for one position: one recurrent step is enough"
    expect_true(not any("triangular" in name for name in seen.names), problem, answer=out, read=FORWARD)
    case("T=70 without a cache: chunks")
    with torch.no_grad(), Operators() as seen:
        out = layer(randn(1, 70, 12))
    problem = f"{seen.n} operators for 70 positions: more than one position is chunked"
    expect_true(seen.n < 350, problem, answer=out, read=FORWARD)
    case("T=70 without a cache, chunks of 4: more of them")
    layer = a_layer(chunk_size=4)
    with torch.no_grad(), Operators() as smaller:
        out = layer(randn(1, 70, 12))
    problem = f"{smaller.n} operators in chunks of 4 and {seen.n} in chunks of 64: chunk_size changes nothing"
    expect_true(smaller.n > seen.n, problem, answer=out, read=ARGS)


def test_GatedDeltaNet_computes_in_float32():
    case("B=1 T=12 in bfloat16: the state is float32, from projections and a convolution in bfloat16")
    layer, x = a_layer(torch.bfloat16), randn(1, 12, 12).bfloat16()
    cache = layer.make_cache(1, torch.bfloat16)
    with torch.no_grad():
        out = layer(x, cache)
    given = {name: w.bfloat16() for name, w in weights_of().items()}
    aim, state = plain_layer(given, x)
    if not torch.allclose(cache.recurrent_state, state.float(), atol=1e-5, rtol=1e-4):
        aim, state = plain_layer(given, x, la.short_convolution)  # it may round its bfloat16 sums in another order
    read = "the contract, after Attributes"
    expect_close(cache.recurrent_state, state.float(), atol=1e-5, rtol=1e-4, name="recurrent_state", read=read)
    expect_close(out, aim, atol=1e-2, rtol=1.6e-2, read=read)
    wrong = (out != aim).float().mean().item()
    expect_true(wrong < 0.1, f"{wrong:.0%} of the results are rounded more than once", answer=out, read=read)


def test_GatedDeltaNet_of_other_sizes():
    case("B=1 T=5, eps=0.1, float64: only the output's norm has it")
    x = randn(1, 5, 12).double()
    aim, _ = plain_layer({name: w.double() for name, w in weights_of().items()}, x, eps=0.1)
    expect_close(a_layer(torch.float64, eps=0.1)(x).detach(), aim, read=ARGS, **FLOAT64)
    case("as many value heads as key heads, K=2")
    layer, x = la.GatedDeltaNet(8, 2, 2, 3, 3, conv_kernel_size=2).double(), randn(1, 5, 8).double()
    expect_equal(tuple(layer.conv1d.weight.shape), (18, 1, 2), name="conv1d.weight", read=ATTRIBUTES)
    expect_equal(tuple(layer(x).shape), (1, 5, 8), name="shape", read=LAYER)
    case("no positions")
    expect_equal(tuple(layer(x[:, :0]).shape), (1, 0, 8), name="shape", read=LAYER)


def test_GatedDeltaNet_refuses():
    case("n_k_heads=4, n_v_heads=6")
    la.GatedDeltaNet(8, 2, 6, 3, 3).make_cache(1)
    with expect_raises(ValueError, "4", "6", read=RAISES):
        la.GatedDeltaNet(8, 4, 6, 3, 3)


# ---- hybrid_cache_bytes, crossing_length -----------------------------------------------------------------------------


def config(*kinds: str, **more) -> SimpleNamespace:
    """Small sizes, each another number; Qwen3-Next's with ``**QWEN``."""
    sizes = {"n_kv_heads": 3, "head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
    sizes |= {"linear_key_head_dim": 5, "linear_value_head_dim": 11, "linear_conv_kernel_dim": 3}
    return SimpleNamespace(layer_types=list(kinds), **sizes | more)


FULL, LINEAR = "full_attention", "linear_attention"
QWEN = {"n_kv_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
QWEN |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}


def test_hybrid_cache_bytes_by_hand():
    case("one full layer, G=3 D=7, B=2, 10 positions: 2 x 3 x 7 x 10 values of two bytes, twice")
    expect_equal(la.hybrid_cache_bytes(config(FULL), 2, 10), 2 * 840, read=BYTES)
    case("one linear layer, Hk=2 Hv=6 Dk=5 Dv=11 K=3, B=2: 2 x 86 inputs of two bytes, 6 x 5 x 11 numbers of four")
    expect_equal(la.hybrid_cache_bytes(config(LINEAR), 2, 10), 2 * (344 + 1320), read=BYTES)
    case("the same layer at another length: the same bytes")
    expect_equal(la.hybrid_cache_bytes(config(LINEAR), 2, 10_000), 2 * (344 + 1320), read=BYTES)
    case("three linear layers and a full one, one byte a value, a state of two bytes a number")
    found = la.hybrid_cache_bytes(config(LINEAR, LINEAR, LINEAR, FULL), 1, 10, 1, 2)
    expect_equal(found, 3 * (172 + 660) + 420, read=BYTES)
    expect_equal(type(found).__name__, "int", name="type", answer=found, read=RETURNS)
    case("a full layer, and a config that has no sizes of linear layers")
    found = la.hybrid_cache_bytes(SimpleNamespace(layer_types=[FULL], n_kv_heads=3, head_dim=7), 1, 10)
    expect_equal(found, 840, read=BYTES)


def test_hybrid_cache_bytes_of_qwen3_next():
    kinds = [FULL if i % 4 == 3 else LINEAR for i in range(48)]
    for length, n_bytes in ((1, 77_291_520), (262_144, 6_519_717_888)):
        case(f"Qwen3-Next's 48 layers, three linear ones to one full one, {length:,} positions")
        expect_equal(la.hybrid_cache_bytes(config(*kinds, **QWEN), 1, length), n_bytes, read=BYTES)


def test_hybrid_cache_bytes_refuse():
    for kind in ("sliding_attention", "full"):
        case(f"a layer of kind {kind!r}")
        with expect_raises(ValueError, kind, read=RAISES):
            la.hybrid_cache_bytes(config(LINEAR, FULL, kind), 1, 8)


def test_crossing_length_by_hand():
    case("G=3 D=7: 84 bytes a position, against 1664 bytes of a linear layer: 19 positions are 1596, 20 are 1680")
    sizes = config(LINEAR, FULL)
    found = la.crossing_length(sizes)
    expect_equal(found, 20, read=CROSSING)
    expect_equal(sizes.layer_types, [LINEAR, FULL], name="layer_types of config", answer=found, read=ARGS)
    expect_equal(type(found).__name__, "int", name="type", answer=found, read=RETURNS)
    case("Qwen3-Next: 1048 positions hold just as many bytes, and the crossing needs more")
    expect_equal(la.crossing_length(config(**QWEN)), 1049, read=CROSSING)


@pytest.mark.parametrize(("bytes_per_value", "state_bytes", "expected"), [(1, 4, 2073), (2, 2, 537), (4, 4, 537)])
def test_crossing_length_of_other_dtypes(bytes_per_value, state_bytes, expected):
    case(f"Qwen3-Next, {bytes_per_value} bytes a value, {state_bytes} bytes a number of the state")
    expect_equal(la.crossing_length(config(**QWEN), bytes_per_value, state_bytes), expected, read=CROSSING)
