"""Scores, positions, caches and layers of the attention of today."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lib.given.kernels.exact import LargestTensor
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.chapter_23 import oracles
from tests.chapter_23.oracles import LATENT, LATENTS, LAYERS, attend, random_state, rope_table, turn, visible
from tests.devices import devices_of
from tests.inputs import randn

variants = graded("attention_variants")
pytestmark = pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds

NORM, SCORES, CAP, SINK = (f"eq-attention_variants-{n}" for n in (1, 2, 3, 4))
LLAMA3, YARN, FACTOR, WINDOW = (f"eq-attention_variants-{n}" for n in (5, 6, 7, 8))
LATENT_EQ, ABSORB = (f"eq-attention_variants-{n}" for n in (9, 10))
RAISES, CONTRACT = "the contract, under Raises", "the contract"
PARTS = [(9,), (4, 5), (1,) * 9, (2, 1, 1, 4, 1), (5, 1, 1, 1, 1), (1, 3, 5)]


def gradients(function, *inputs: Tensor) -> list[Tensor]:
    """Of the sum of an output times fixed random numbers, with respect to each input."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    (out * randn(*out.shape, seed=55).to(out.dtype)).sum().backward()
    return [x.grad for x in inputs]


# ---- qk_norm ---------------------------------------------------------------------------------------------------------


def test_qk_norm_by_hand():
    case("b=1 t=1 h=2 d=2: heads (3, 4) and (6, 8), weight [1, 2] for each head, and [1, 2, 3, 4] for all")
    x = torch.tensor([[[[3.0, 4.0], [6.0, 8.0]]]])
    r, w = math.sqrt(12.5), math.sqrt(125 / 4)
    each, whole = [[3 / r, 8 / r], [3 / r, 8 / r]], [[3 / w, 8 / w], [18 / w, 32 / w]]
    expect_close(variants.qk_norm(x, torch.tensor([1.0, 2.0])), torch.tensor([[each]]), atol=1e-5, read=NORM)
    expect_close(variants.qk_norm(x, torch.tensor([1.0, 2, 3, 4])), torch.tensor([[whole]]), atol=1e-5, read=NORM)


@pytest.mark.parametrize(("n", "offset", "eps"), [(8, 0.0, 1e-6), (24, 0.0, 1e-6), (8, 1.0, 0.1), (24, 1.0, 0.5)])
def test_qk_norm_equals_torch(n, offset, eps):
    case(f"b=2 t=5 h=3 d=8, weight [{n}], offset {offset}, eps {eps}; x a slice of a wider tensor")
    x, weight = randn(2, 5, 3, 16)[..., :8], randn(n, seed=1)  # as where `q_proj` has the gate's rows, too
    expected = F.rms_norm(x.double().reshape(2, 5, -1, n), (n,), weight.double() + offset, eps).view(x.shape)
    out = variants.qk_norm(x, weight, eps=eps, offset=offset)
    expect_close(out, expected.float(), atol=1e-5, read=NORM)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_qk_norm_rounds_once(offset):
    dtype = torch.bfloat16 if offset else torch.float32  # a checkpoint's weights are often of x's dtype
    case(f"b=4 t=16 h=2 d=64, bfloat16, weight {dtype}, offset {offset}")
    x, weight = randn(4, 16, 2, 64, dtype=torch.bfloat16), (randn(64, seed=1) * 0.1 + 1.0 - offset).to(dtype)
    expected = F.rms_norm(x.double(), (64,), weight.double() + offset, 1e-6).to(torch.bfloat16)
    out = variants.qk_norm(x, weight, offset=offset)
    expect_close(out, expected, atol=0.05, rtol=0.05, read=CONTRACT)
    off = (out != expected).double().mean().item()
    problem = f"{off:.0%} of the numbers are rounded more than once: not everything was in float32 until the end"
    expect_true(off < 0.02, problem, answer=out, read="the contract, under Returns")


def test_qk_norm_keeps_float64():
    case("b=1 t=3 h=2 d=4, float64")
    x, weight = randn(1, 3, 2, 4, dtype=torch.float64), randn(4, seed=1, dtype=torch.float64)
    expect_close(variants.qk_norm(x, weight), F.rms_norm(x, (4,), weight, 1e-6), atol=1e-12, rtol=1e-12, read=CONTRACT)


@pytest.mark.parametrize("n", [1, 4, 16])
def test_qk_norm_refuses_another_length(n):
    case(f"h=3 d=8, weight [{n}]")
    with expect_raises(ValueError, str(n), "8", "24", read=RAISES):
        variants.qk_norm(randn(1, 2, 3, 8), randn(n))


@pytest.mark.parametrize("n", [4, 12])
def test_qk_norm_passes_gradients_back(n):
    case(f"b=2 t=3 h=3 d=4, weight [{n}]: gradients of x and of the weight")
    x, weight = randn(2, 3, 3, 4), randn(n, seed=1)
    found = gradients(lambda x, w: variants.qk_norm(x, w, offset=1.0), x, weight)
    wanted = gradients(
        lambda x, w: F.rms_norm(x.reshape(2, 3, -1, n), (n,), w + 1.0, 1e-6).view(x.shape), x.double(), weight.double()
    )
    expect_close(found, [g.float() for g in wanted], atol=1e-4, name="grads", read=NORM)


# ---- grouped_attention -----------------------------------------------------------------------------------------------


def qkv(b=2, h=4, g=2, t=5, s=7, d=8, dv=6, seed=0):
    return randn(b, h, t, d, seed=seed), randn(b, g, s, d, seed=seed + 1), randn(b, g, s, dv, seed=seed + 2)


def test_grouped_attention_by_hand():
    case("b=1 h=2 g=1 t=1 s=2 d=1: scores 0 and ln 3; a sink of ln 4 for head 0 and of 0 for head 1")
    q, k, v = torch.ones(1, 2, 1, 1), torch.tensor([[[[0.0], [math.log(3)]]]]), torch.tensor([[[[8.0], [16.0]]]])
    plain = torch.tensor([[[[14.0]], [[14.0]]]])
    expect_close(variants.grouped_attention(q, k, v), plain, atol=1e-4, read=SCORES)
    out = variants.grouped_attention(q, k, v, sinks=torch.tensor([math.log(4), 0.0]))
    expect_close(out, torch.tensor([[[[7.0]], [[11.2]]]]), atol=1e-4, read=SINK)


@pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_grouped_attention_equals_torch(h, g):
    for t, s in ((5, 7), (1, 6), (6, 4)):
        case(f"b=2 h={h} g={g} t={t} s={s} d=8 dv=6, no mask; in memory as [B, T, H, D]")
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(h=h, g=g, t=t, s=s))
        expect_close(variants.grouped_attention(q, k, v), attend(q, k, v).float(), atol=1e-5, read=SCORES)


@pytest.mark.parametrize("scale", [None, 0.9])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_grouped_attention_in_the_right_order(scale, softcap, with_sinks):
    sinks = torch.tensor([1.5, -2.0, 0.3, 3.0]) if with_sinks else None
    case(
        f"b=2 h=4 g=2 t=5 s=7 d=8, window 3, scale {scale}, softcap {softcap}, {'sinks' if with_sinks else 'no sinks'}"
    )
    q, k, v = qkv()
    seen = visible(5, 7, 3)
    expected = attend(2 * q, k, v, seen, scale, softcap, sinks).float()
    out = variants.grouped_attention(2 * q, k, v, seen, scale=scale, softcap=softcap, sinks=sinks)
    expect_close(out, expected, atol=1e-5, read=SINK if with_sinks else CAP)


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (4, 1, 7)])
def test_grouped_attention_broadcasts_the_mask(shape):
    case(f"b=2 h=4 g=2 t=5 s=7, mask {list(shape)}")
    q, k, v = qkv()
    mask = randn(*shape, seed=5) > -0.8
    expect_close(variants.grouped_attention(q, k, v, mask), attend(q, k, v, mask).float(), atol=1e-5, read=SCORES)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -3.0])])
def test_grouped_attention_of_a_query_that_sees_nothing(sinks):
    case(f"b=1 h=2 g=1 t=3 s=2, query 0 sees nothing, {'no sinks' if sinks is None else 'sinks'}: output and gradients")
    q, k, v = qkv(1, 2, 1, 3, 2, 4, 4)
    seen = visible(3, 2)
    out = variants.grouped_attention(q, k, v, seen, sinks=sinks)
    expect_close(out, attend(q, k, v, seen, sinks=sinks).float(), atol=1e-5, read=CONTRACT)
    found = gradients(lambda *x: variants.grouped_attention(*x, seen, sinks=sinks), q, k, v)
    expect_true(all(g.isfinite().all() for g in found), "a gradient is not finite", answer=out, read=CONTRACT)


@pytest.mark.parametrize(("score", "sink"), [(1e6, 0.0), (0.0, 1e6), (1e6, 1e6), (-1e6, -1e6)])
def test_grouped_attention_of_large_scores(score, sink):
    case(f"h=1 t=2 s=2 d=1, scores of 0 and {score:g}, a sink of {sink:g}: output and gradients")
    q, k, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[0.0], [score]]]]), torch.tensor([[[[1.0], [2.0]]]])
    sinks = torch.tensor([sink])
    out = variants.grouped_attention(q, k, v, sinks=sinks)
    expect_close(out, attend(q, k, v, sinks=sinks).float(), atol=1e-5, read=CONTRACT)
    found = gradients(lambda q, k, v, s: variants.grouped_attention(q, k, v, sinks=s), q, k, v, sinks)
    expect_true(all(g.isfinite().all() for g in found), "a gradient is not finite", answer=out, read=CONTRACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_attention_keeps_the_dtype(dtype):
    case(f"b=1 h=2 g=1 t=3 s=200 d=16, {dtype}: one key has half of the weight, so 16 bits cannot sum the others")
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 1, 3, 200, 16, 4))
    k[:, :, 0] = 2 * q[:, :1, 0]
    expect_close(variants.grouped_attention(q, k, v), attend(q, k, v).to(dtype), atol=0.02, rtol=0.02, read=CONTRACT)


def test_grouped_attention_keeps_float64():
    case("b=1 h=2 g=1 t=3 s=5, float64, softcap and sinks")
    q, k, v = (x.double() for x in qkv(1, 2, 1, 3, 5))
    sinks = torch.tensor([0.5, -0.5], dtype=torch.float64)
    out = variants.grouped_attention(q, k, v, softcap=2.0, sinks=sinks)
    expect_close(out, attend(q, k, v, softcap=2.0, sinks=sinks), atol=1e-12, rtol=1e-12, read=CONTRACT)


@pytest.mark.parametrize(("h", "g"), [(5, 2), (2, 4)])
def test_grouped_attention_refuses_heads(h, g):
    case(f"h={h} g={g}")
    with expect_raises(ValueError, str(h), str(g), read=RAISES):
        variants.grouped_attention(*qkv(h=h, g=g))


def test_grouped_attention_passes_gradients_back():
    case("b=2 h=4 g=2 t=5 s=7, window 3, softcap 1.5 and sinks: gradients of q, k, v and the sinks")
    inputs, seen = [*qkv(), randn(4, seed=9)], visible(5, 7, 3)
    found = gradients(lambda q, k, v, s: variants.grouped_attention(q, k, v, seen, 0.7, 1.5, s), *inputs)
    wanted = gradients(lambda q, k, v, s: attend(q, k, v, seen, 0.7, 1.5, s), *(x.double() for x in inputs))
    expect_close(found, [g.float() for g in wanted], atol=1e-4, name="grads", read=SINK)


def test_grouped_attention_repeats_no_key():
    case("b=1 h=16 g=2 t=1 s=128 d=64: the largest tensor that is made, of fewer than H * S * D / 2 = 65536 numbers")
    q, k, v = qkv(1, 16, 2, 1, 128, 64, 64)
    with LargestTensor() as largest:
        out = variants.grouped_attention(q, k, v, sinks=torch.zeros(16))
    problem = f"a tensor of {largest.numbers} numbers was made: keys or values are repeated for each query head"
    expect_true(largest.numbers < 16 * 128 * 64 // 2, problem, answer=out, read="the contract, under Cost")


# ---- llama3_frequencies ----------------------------------------------------------------------------------------------


def test_llama3_frequencies_by_hand():
    case("D=8, factor 4, low 1, high 3, trained length 63, theta 100: pairs with 10.0, 3.2, 1.003 and 0.32 turns")
    out = variants.llama3_frequencies(8, 4.0, 1.0, 3.0, 63, 100.0)
    keep = (63 * 0.1 / (2 * math.pi) - 1) / 2
    expected = torch.tensor([1.0, 10**-0.5, 0.1 * keep + 0.025 * (1 - keep), 10**-1.5 / 4])
    expect_close(out, expected, atol=0.0, rtol=1e-5, read=LLAMA3)
    case("D=8, factor 4, low 1.5, high 3, trained length 126, theta 100: 20, 6.3, 2.005 and 0.63 turns")
    out = variants.llama3_frequencies(8, 4.0, 1.5, 3.0, 126, 100.0)
    keep = (126 * 0.1 / (2 * math.pi) - 1.5) / 1.5
    expected = torch.tensor([1.0, 10**-0.5, 0.1 * keep + 0.025 * (1 - keep), 10**-1.5 / 4])
    expect_close(out, expected, atol=0.0, rtol=1e-5, read=LLAMA3)


@pytest.mark.parametrize(("width", "factor", "high", "theta"), [(64, 8.0, 4.0, 500_000.0), (32, 32.0, 8.0, 1e4)])
def test_llama3_frequencies_equal_transformers(width, factor, high, theta):
    case(f"D={width}, factor {factor}, high {high}, theta {theta:g}, trained length 8192")
    settings = {"head_dim": width, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high, "theta": theta}
    settings["original_max_position_embeddings"] = 8192
    expected = recorded(f"llama3_{width}", lambda: oracles.rope_oracle("llama3", **settings))[:-1]
    expect_close(variants.llama3_frequencies(**settings), expected, atol=0.0, rtol=1e-5, read=LLAMA3)


def test_llama3_frequencies_defaults():
    case("D=128, all defaults, against chapter 2's with theta 500,000")
    out = variants.llama3_frequencies(128)
    plain = 500_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ratio = out.double() / plain
    expect_close(
        ratio[0], torch.tensor(1.0, dtype=torch.float64), atol=1e-5, name="ratio of pair 0", answer=out, read=LLAMA3
    )
    last = ratio[-1]
    expect_close(last, torch.tensor(0.125, dtype=torch.float64), atol=1e-5, name="of the last", answer=out, read=LLAMA3)
    expect_equal(int((ratio > 0.9999).sum()), 29, name="number of pairs that are kept", answer=out, read=LLAMA3)


# ---- yarn_frequencies ------------------------------------------------------------------------------------------------

YARNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": {"truncate": False, "theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    "deepseek": {"mscale": 0.9, "mscale_all_dim": 0.7, "factor": 40.0, "original_max_position_embeddings": 4096},
    "one_mscale": {"mscale": 0.5},
    "zero_mscale": {"mscale": 0.5, "mscale_all_dim": 0.0},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "shorter": {"factor": 0.5},
    "beginning": {"original_max_position_embeddings": 40},
    "slow": {"theta": 10.0, "original_max_position_embeddings": 4096, "beta_fast": 200.0},
    "tiny": {"original_max_position_embeddings": 5},
}


@pytest.mark.parametrize("name", list(YARNS))
def test_yarn_frequencies_equal_transformers(name):
    settings = {"head_dim": 32, "factor": 4.0, "original_max_position_embeddings": 512, "theta": 1e4} | YARNS[name]
    case(", ".join(f"{key} {value}" for key, value in settings.items()))
    given = dict(settings)
    expected = recorded(f"yarn_{name}", lambda: oracles.rope_oracle("yarn", **given))
    answer = frequencies, factor = variants.yarn_frequencies(**settings)
    clipped = name in ("beginning", "slow", "tiny")
    ramp = f"{YARN}, and the contract, under Convention: the ends are clipped" if clipped else YARN
    expect_close(frequencies, expected[:-1], atol=0.0, rtol=1e-5, answer=answer, read=ramp)
    read = "the contract, under Returns" if "mscale" in settings or name == "shorter" else FACTOR
    expect_close(factor, expected[-1].item(), rtol=1e-6, name="attention_factor", answer=answer, read=read)


def test_yarn_frequencies_by_hand():
    case("D=16, factor 4, trained length 128, theta 100: pairs up to 0 are kept, pairs from 6 on are four times slower")
    out, factor = variants.yarn_frequencies(16, 4.0, 128, theta=100.0, beta_fast=20.0, beta_slow=1.0)
    low, high = 0, math.ceil(16 * math.log(128 / (2 * math.pi)) / (2 * math.log(100)))
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(8)]
    f = [100 ** (-i / 8) for i in range(8)]
    expected = torch.tensor([x * (1 - r) + x / 4 * r for x, r in zip(f, ramp, strict=True)])
    expect_close(out, expected, atol=0.0, rtol=1e-5, answer=(out, factor), read=YARN)
    expect_close(factor, 0.1 * math.log(4) + 1, rtol=1e-9, name="attention_factor", answer=(out, factor), read=FACTOR)


def test_yarn_frequencies_factor_by_hand():
    read = "the contract, under Returns"
    for more in ({"mscale_all_dim": 0.7}, {"mscale": 0.0, "mscale_all_dim": 0.7}, {"factor": 1.5}):
        settings = {"factor": 4.0} | more
        case(f"D=16, trained length 128, {', '.join(f'{key} {value}' for key, value in settings.items())}")
        answer = variants.yarn_frequencies(16, original_max_position_embeddings=128, **settings)
        wanted = 0.1 * math.log(settings["factor"]) + 1
        expect_close(answer[1], wanted, rtol=1e-9, name="attention_factor", answer=answer, read=read)


def test_yarn_frequencies_of_an_empty_ramp():
    case("D=8, trained length 7, beta_fast 0.9, beta_slow 0.9, not truncated: both ends of the ramp are one point")
    out, factor = variants.yarn_frequencies(8, 2.0, 7, theta=100.0, beta_fast=0.9, beta_slow=0.9, truncate=False)
    at = 8 * math.log(7 / (2 * math.pi * 0.9)) / (2 * math.log(100))
    f = [100 ** (-i / 4) for i in range(4)]
    expected = torch.tensor([x / (1 if i < at else 2) for i, x in enumerate(f)])
    read = "the contract, under Convention: two equal ends"
    expect_close(out, expected, atol=0.0, rtol=1e-5, answer=(out, factor), read=read)


# ---- apply_partial_rope ----------------------------------------------------------------------------------------------


def test_apply_partial_rope_by_hand():
    case("b=1 t=1 h=1 d=6, r=4: a quarter turn of the first pair, half a turn of the second, both layouts")
    x, rope = torch.tensor([[[[1.0, 2, 3, 4, 5, 6]]]]), torch.tensor([[1j, -1 + 0j]])
    out = variants.apply_partial_rope(x, rope)
    expect_close(out, torch.tensor([[[[-2.0, 1, -3, -4, 5, 6]]]]), atol=1e-6, read=CONTRACT)
    out = variants.apply_partial_rope(x, rope, layout="half")
    expect_close(out, torch.tensor([[[[-3.0, -2, 1, -4, 5, 6]]]]), atol=1e-6, read=CONTRACT)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("r", [0, 2, 6, 10])
def test_apply_partial_rope_pair_by_pair(layout, r):
    case(f"b=2 t=5 h=3 d=10, r={r}, modulus 1.2, {layout}; x in memory as [B, H, T, D]")
    x, rope = randn(2, 3, 5, 10).transpose(1, 2), rope_table(range(3, 8), r, modulus=1.2)
    before = x.clone()
    out = variants.apply_partial_rope(x, rope, layout)
    expect_close(out, turn(x, rope, layout).float(), atol=1e-5, read=CONTRACT)
    expect_true(torch.equal(x, before), "x was changed", answer=out, read=CONTRACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_apply_partial_rope_keeps_the_dtype(dtype):
    case(f"b=1 t=40 h=2 d=8, r=4, {dtype}")
    x, rope = randn(1, 40, 2, 8, dtype=dtype) / 3, rope_table(range(40), 4)  # thirds are not exact in float32
    out, expected = variants.apply_partial_rope(x, rope), turn(x, rope, "interleaved").to(dtype)
    atol = 1e-12 if dtype == torch.float64 else 0.03
    expect_close(out, expected, atol=atol, rtol=atol, read=CONTRACT)
    same = (out == expected).double().mean().item() if dtype == torch.bfloat16 else 1.0
    expect_true(same > 0.98, f"{1 - same:.0%} of the numbers are rounded more than once", answer=out, read=CONTRACT)


def test_apply_partial_rope_returns_the_rest_bit_for_bit():
    case("b=1 t=3 h=2 d=8, r=4, bfloat16 and float32: features 4 to 7")
    for dtype in (torch.bfloat16, torch.float32):
        x = (randn(1, 3, 2, 8) * 1e4).to(dtype)
        out = variants.apply_partial_rope(x, rope_table(range(3), 4, modulus=1.5))
        expect_true(torch.equal(out[..., 4:], x[..., 4:]), "features beyond R have changed", answer=out, read=CONTRACT)


def test_apply_partial_rope_refuses():
    x = randn(1, 3, 2, 4)
    case("d=4, r=6")
    with expect_raises(ValueError, "6", read=RAISES):
        variants.apply_partial_rope(x, rope_table(range(3), 6))
    case("layout='neox'")
    with expect_raises(ValueError, "neox", read=RAISES):
        variants.apply_partial_rope(x, rope_table(range(3), 4), layout="neox")
    for n in (1, 5):
        case(f"t=3, a rope of {n} positions")
        with expect_raises(ValueError, read=RAISES):
            variants.apply_partial_rope(x, rope_table(range(n), 4))


def test_apply_partial_rope_passes_gradients_back():
    case("b=1 t=4 h=2 d=6, r=4, half")
    rope = rope_table(range(4), 4, modulus=1.3)
    (found,) = gradients(lambda x: variants.apply_partial_rope(x, rope, "half"), randn(1, 4, 2, 6))
    (wanted,) = gradients(lambda x: turn(x, rope, "half"), randn(1, 4, 2, 6).double())
    expect_close(found, wanted.float(), atol=1e-5, name="x.grad", read=CONTRACT)


# ---- sliding_window_mask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "s"), [(5, 5), (2, 6), (6, 4), (1, 7), (0, 3), (3, 0)])
def test_sliding_window_mask_pair_by_pair(t, s):
    for window in (1, 2, 3, 9, None):
        case(f"t={t} s={s}, window {window}")
        expect_close(variants.sliding_window_mask(t, s, window), visible(t, s, window), read=WINDOW)


@pytest.mark.parametrize("window", [0, -1])
def test_sliding_window_mask_refuses(window):
    case(f"window {window}")
    with expect_raises(ValueError, str(window), read=RAISES):
        variants.sliding_window_mask(3, 3, window)


def test_sliding_window_mask_is_transformers():
    case("t=s=8, window 3, against Transformers' sliding_window_causal_mask_function")

    def their_mask():
        from transformers.masking_utils import sliding_window_causal_mask_function

        sees = sliding_window_causal_mask_function(3)
        pairs = [[int(sees(0, 0, torch.tensor(t), torch.tensor(s))) for s in range(8)] for t in range(8)]
        return torch.tensor(pairs)

    expected = recorded("window_mask", their_mask).bool()
    expect_close(variants.sliding_window_mask(8, 8, 3), expected, read=WINDOW)


def test_sliding_window_mask_on_the_device_asked_for():
    case('window 2, device="meta"')
    _, devices = devices_of(variants.sliding_window_mask, 3, 4, 2, device="meta")
    expect_true("meta" in devices, "the device asked for is ignored", answer=devices, read="the contract, under Args")


# ---- RollingKVCache --------------------------------------------------------------------------------------------------


def numbered(start: int, stop: int, b=1, g=1, d=2) -> tuple[Tensor, Tensor]:
    """Keys p and values 100 + p of positions p."""
    p = torch.arange(float(start), float(stop))[None, None, :, None].expand(b, g, -1, d)
    return p.clone(), p + 100


def test_RollingKVCache_by_hand():
    cache = variants.RollingKVCache(1, 1, 3, 2)
    slots = [[0], [0, 1], [0, 1, 2], [3, 1, 2], [3, 4, 2], [3, 4, 5], [6, 4, 5]]
    for p, expected in enumerate(slots):
        case(f"window 3, position {p} alone: the filled slots")
        keys, values = cache.update(*numbered(p, p + 1))
        expect_close(
            keys[0, 0, :, 0], torch.tensor(expected).float(), name="keys", answer=(keys, values), read=CONTRACT
        )
        expect_close(values, keys + 100, name="values", answer=(keys, values), read=CONTRACT)
        expect_equal(cache.length, p + 1, name="length", answer=(keys, values), read=CONTRACT)


@pytest.mark.parametrize("parts", [(2, 3, 1), (5, 2, 2), (1, 1, 1, 1, 2), (7, 3), (2, 0, 4), (4, 4), (3, 9, 1)])
def test_RollingKVCache_of_several_positions(parts):
    window, cache, start = 4, variants.RollingKVCache(2, 2, 4, 3), 0
    for n in parts:
        case(f"window 4, {n} positions after {start}")
        found = cache.update(*numbered(start, start + n, 2, 2, 3))
        first = start - min(start, window - 1)
        expected = numbered(first, start + n, 2, 2, 3)
        start += n
        if n == 1:  # any order
            found = tuple(x.sort(dim=2).values for x in found)
            expected = numbered(max(0, start - window), start, 2, 2, 3)
        expect_close(found, expected, name="keys and values", read=CONTRACT)
        expect_equal(cache.length, start, name="length", answer=found, read=CONTRACT)
        held = list(range(max(0, start - window), start))
        slots = cache.keys[0, 0, [p % window for p in held], 0]
        expect_close(
            slots, torch.tensor(held).float(), name="the slots of the last positions", answer=found, read=CONTRACT
        )


def test_RollingKVCache_copies_nothing_for_one_position():
    case("window 4, then six positions one by one: where the memory is, and its size")
    cache = variants.RollingKVCache(1, 2, 4, 3)
    where = (cache.keys.data_ptr(), cache.values.data_ptr())
    expect_equal(list(cache.keys.shape), [1, 2, 4, 3], name="shape of keys", read=CONTRACT)
    for p in range(6):
        found = cache.update(*numbered(p, p + 1, 1, 2, 3))
        pointers = tuple(x.data_ptr() for x in found)
        expect_true(
            pointers == where, "the returned tensors are no views of the cache's memory", answer=found, read=CONTRACT
        )
    same = (cache.keys.data_ptr(), cache.values.data_ptr()) == where
    expect_true(same, "the cache's memory has moved", answer=found, read=CONTRACT)


def test_RollingKVCache_does_not_return_what_it_will_overwrite():
    case("window 3, 3 positions, then 2 more: what the second update returned, after a third")
    cache = variants.RollingKVCache(1, 1, 3, 2)
    cache.update(*numbered(0, 3))
    found = cache.update(*numbered(3, 5))
    cache.update(*numbered(5, 7))
    expect_close(found, numbered(1, 5), name="keys and values", read=CONTRACT)


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "wrong"),
    [
        ([1, 2, 3, 5], [1, 2, 3, 5], "1, 2, 3, 5"),
        ([4, 1, 3, 5], [4, 1, 3, 5], "4, 1, 3, 5"),
        ([4, 2, 3, 1], [4, 2, 3, 1], "4, 2, 3, 1"),
        ([4, 2, 3, 5], [4, 2, 1, 5], "4, 2, 1, 5"),
        ([4, 2, 1, 5], [1, 2, 1, 5], "1, 2, 1, 5"),
    ],
)
def test_RollingKVCache_refuses_another_shape(k_shape, v_shape, wrong):
    case(f"b=4 g=2 window=3 d=5, holds 2 positions: k {k_shape} and v {v_shape}")
    cache = variants.RollingKVCache(4, 2, 3, 5)
    cache.update(randn(4, 2, 2, 5), randn(4, 2, 2, 5, seed=1))
    before = [cache.keys.clone(), cache.values.clone()]
    with expect_raises(ValueError, wrong, "4, 2, ", read=RAISES):
        cache.update(randn(*k_shape, seed=2), randn(*v_shape, seed=3))
    after = [cache.keys, cache.values]
    expect_close(after, before, atol=0.0, rtol=0.0, name="keys and values", answer=[*after, cache.length], read=RAISES)
    expect_equal(cache.length, 2, name="length", answer=[*after, cache.length], read=RAISES)


def test_RollingKVCache_refuses_a_window():
    case("window 1, then window 0")
    expect_close(variants.RollingKVCache(1, 1, 1, 2).update(*numbered(0, 1)), numbered(0, 1), read=CONTRACT)
    with expect_raises(ValueError, "0", read=RAISES):
        variants.RollingKVCache(1, 1, 0, 4)


def test_RollingKVCache_keeps_its_dtype():
    case("bfloat16, window 2: one position, then three")
    cache = variants.RollingKVCache(1, 1, 2, 2, dtype=torch.bfloat16)
    expected = tuple(x.bfloat16() for x in numbered(0, 4))
    expect_close(cache.update(*numbered(0, 1)), tuple(x[:, :, :1] for x in expected), name="one", read=CONTRACT)
    expect_close(cache.update(*numbered(1, 4)), expected, name="three", read=CONTRACT)
    case("bfloat16, window 2: a prompt of four positions")
    found = variants.RollingKVCache(1, 1, 2, 2, dtype=torch.bfloat16).update(*numbered(0, 4))
    expect_close(found, expected, name="keys and values", read=CONTRACT)


# ---- CausalAttention -------------------------------------------------------------------------------------------------


def make_layer(name: str, **changes):
    layer = variants.CausalAttention(**LAYERS[name].ours | changes)
    layer.load_state_dict(random_state({key: tuple(p.shape) for key, p in layer.state_dict().items()}))
    return layer


@pytest.mark.parametrize("name", list(LAYERS))
def test_CausalAttention_is_transformers(name):
    spec = LAYERS[name]
    case(f"{name}'s layer, b=2 t=9, {', '.join(f'{k}={v}' for k, v in spec.ours.items())}: output and all gradients")
    expected = recorded(f"layer_{name}", lambda: oracles.theirs(name))
    x, rope = randn(2, 9, spec.ours["dim"], seed=3), rope_table(range(9), spec.rope)
    out = make_layer(name)(x, rope)
    expect_close(out.detach(), expected[: out.numel()].view(out.shape), atol=1e-4, rtol=1e-4, read=CONTRACT)
    found = oracles.values_and_gradients(make_layer(name), x, lambda layer, x: layer(x, rope))
    expect_close(found, expected, atol=1e-4, rtol=1e-4, name="out and grads", answer=out.detach(), read=CONTRACT)


@pytest.mark.parametrize("name", list(LAYERS))
def test_CausalAttention_has_their_parameters(name):
    o = LAYERS[name].ours
    case(f"{name}: names, shapes and new values of the parameters")
    c, q, k = o["dim"], o["n_heads"] * o["head_dim"], o["n_kv_heads"] * o["head_dim"]
    expected = {"q_proj.weight": [2 * q if o.get("gate") else q, c], "k_proj.weight": [k, c]}
    expected |= {"v_proj.weight": [k, c], "o_proj.weight": [c, q]}
    if o.get("bias"):
        expected |= {f"{n}_proj.bias": [w] for n, w in (("q", q), ("k", k), ("v", k), ("o", c))}
    if "qk_norm" in o:
        sizes = (o["head_dim"],) * 2 if o["qk_norm"] == "head" else (q, k)
        expected |= {"q_norm.weight": [sizes[0]], "k_norm.weight": [sizes[1]]}
    if o.get("sinks"):
        expected["sinks"] = [o["n_heads"]]
    named = {key: p.detach() for key, p in variants.CausalAttention(**o).named_parameters()}
    shapes = {key: list(p.shape) for key, p in named.items()}
    expect_equal(dict(sorted(shapes.items())), dict(sorted(expected.items())), name="parameters", read=CONTRACT)
    for key, p in named.items():
        if "norm" in key or key == "sinks":
            new = torch.full_like(p, 1.0 - o.get("norm_offset", 0.0) if "norm" in key else 0.0)
            expect_close(p, new, name=f"new {key}", answer=(key, p), read="the contract, under Attributes")


def make_cache(spec, length: int):
    from lib.attention import KVCache

    o = spec.ours
    if spec.window is None:
        return KVCache(2, o["n_kv_heads"], length, o["head_dim"])
    return RollingCache(2, o["n_kv_heads"], spec.window, o["head_dim"])


class RollingCache:
    """A window's cache that keeps everything and returns the contract's part, so that this exercise needs no other."""

    def __init__(self, batch, groups, window, width):
        self.window, self.k, self.v = window, torch.zeros(batch, groups, 0, width), torch.zeros(batch, groups, 0, width)

    def update(self, k, v):
        start, n = self.k.shape[2], k.shape[2]
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        if n == 1:
            kept = sorted(range(max(0, start + 1 - self.window), start + 1), key=lambda p: p % self.window)
            return self.k[:, :, kept], self.v[:, :, kept]
        first = start - min(start, self.window - 1)
        return self.k[:, :, first:], self.v[:, :, first:]


@pytest.mark.parametrize("name", list(LAYERS))
def test_CausalAttention_decodes_in_parts(name):
    spec = LAYERS[name]
    layer, x, rope = make_layer(name), randn(2, 9, spec.ours["dim"], seed=3), rope_table(range(9), spec.rope)
    whole = recorded(f"layer_{name}", lambda: oracles.theirs(name))[: 2 * 9 * spec.ours["dim"]].view(2, 9, -1)
    for parts in PARTS:
        cache, ends = make_cache(spec, 9), [sum(parts[:i]) for i in range(len(parts) + 1)]
        for start, end in pairwise(ends):
            case(f"{name}: positions {start} to {end - 1} of parts {list(parts)}, with a cache")
            with torch.no_grad():
                out = layer(x[:, start:end], rope[start:end], cache)
            expect_close(out, whole[:, start:end], atol=1e-4, rtol=1e-4, read=CONTRACT)


def test_CausalAttention_with_the_chapters_own_cache():
    spec = LAYERS["gpt_oss"]
    case("gpt_oss: parts of 4, 1, 1, 3, with a RollingKVCache")
    layer, x, rope = make_layer("gpt_oss"), randn(2, 9, 20, seed=3), rope_table(range(9), 8)
    cache, outs = variants.RollingKVCache(2, 2, spec.window, 8), []
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
            outs.append(layer(x[:, start:end], rope[start:end], cache))
        whole = layer(x, rope)
    expect_close(torch.cat(outs, 1), whole, atol=1e-5, read=CONTRACT)


def test_CausalAttention_caches_keys_normed_and_rotated():
    case("qwen3 with eps=0.5, b=2 t=3: the keys that the cache is given")
    layer, x, rope, cache = (
        make_layer("qwen3", eps=0.5),
        randn(2, 3, 24, seed=3),
        rope_table(range(3), 8),
        RollingCache(2, 2, 9, 8),
    )
    with torch.no_grad():
        out = layer(x, rope, cache)
        state = {key: p.double() for key, p in layer.state_dict().items()}
    k = (x.double() @ state["k_proj.weight"].T).view(2, 3, 2, 8)
    k = turn(F.rms_norm(k, (8,), state["k_norm.weight"], 0.5), rope).transpose(1, 2)
    expect_close(cache.k, k.float(), atol=1e-4, name="keys", answer=(cache.k, out), read=CONTRACT)


def test_CausalAttention_without_positions():
    case("qwen3 with rope=None, b=1 t=5: without positions, only the mask knows the order of what is before the last")
    layer, x = make_layer("qwen3"), randn(1, 5, 24, seed=3)
    with torch.no_grad():
        out, turned = layer(x)[:, -1], layer(x[:, [2, 0, 3, 1, 4]])[:, -1]
    expect_close(turned, out, atol=1e-5, answer=out, read=CONTRACT)
    case("qwen3 with rope=None, b=1 t=5, against a rope that turns by 0: the norms stay")
    with torch.no_grad():
        expect_close(layer(x), layer(x, torch.ones(5, 4, dtype=torch.complex64)), atol=1e-5, read=CONTRACT)


def test_CausalAttention_of_its_layout():
    case("qwen3 with layout='interleaved': the rows of q and k reordered within each head, as in chapter 2")
    layer, other = make_layer("qwen3"), make_layer("qwen3", layout="interleaved")
    order = torch.arange(8).view(2, 4).T.flatten()
    state = layer.state_dict()
    for key in ("q_proj.weight", "k_proj.weight"):
        state[key] = state[key].view(-1, 8, 24)[:, order].reshape(-1, 24)
    for key in ("q_norm.weight", "k_norm.weight"):
        state[key] = state[key][order]
    other.load_state_dict(state)
    x, rope = randn(2, 6, 24, seed=3), rope_table(range(6), 8)
    with torch.no_grad():
        out, expected = other(x, rope), layer(x, rope)
    expect_close(out, expected, atol=1e-5, read=CONTRACT)


def test_CausalAttention_of_default_heads():
    case("dim=12, n_heads=3: G = H and D = C/H, no cap, no window")
    layer, x = variants.CausalAttention(12, 3), randn(1, 4, 12, seed=3)
    shapes = {key: list(p.shape) for key, p in layer.named_parameters()}
    expect_equal(shapes, {f"{n}_proj.weight": [12, 12] for n in "qkvo"}, name="parameters", read=CONTRACT)
    q, k, v = (
        (x.double() @ getattr(layer, f"{n}_proj").weight.double().T).view(1, 4, 3, 4).transpose(1, 2) for n in "qkv"
    )
    expected = attend(q, k, v, visible(4, 4)).transpose(1, 2).flatten(2) @ layer.o_proj.weight.double().T
    expect_close(layer(x).detach(), expected.detach().float(), atol=1e-5, read=CONTRACT)


@pytest.mark.parametrize(
    ("changes", "says"), [({"n_heads": 5, "n_kv_heads": 2}, ("5", "2")), ({"qk_norm": "layer"}, ("layer",))]
)
def test_CausalAttention_refuses(changes, says):
    case(str(changes))
    with expect_raises(ValueError, *says, read=RAISES):
        variants.CausalAttention(**{"dim": 20, "n_heads": 4, "head_dim": 4} | changes)


# ---- LatentCache -----------------------------------------------------------------------------------------------------


def test_LatentCache_by_hand():
    cache, latents, keys = variants.LatentCache(2, 5, 3, 2), randn(2, 5, 3), randn(2, 5, 2, seed=1)
    for start, end in ((0, 3), (3, 4), (4, 5)):
        case(f"b=2 max_len=5 r=3 rope=2, positions {start} to {end - 1}")
        found = cache.update(latents[:, start:end], keys[:, start:end])
        expect_close(found, (latents[:, :end], keys[:, :end]), name="latents and keys", read=CONTRACT)
        expect_equal(cache.length, end, name="length", answer=found, read=CONTRACT)


def test_LatentCache_copies_nothing():
    case("b=2 max_len=5 r=3 rope=2, two updates: where the returned tensors are")
    cache = variants.LatentCache(2, 5, 3, 2)
    where = (cache.latents.data_ptr(), cache.rope_keys.data_ptr())
    for n in (2, 1):
        found = cache.update(randn(2, n, 3), randn(2, n, 2))
        views = tuple(x.data_ptr() for x in found) == where
        expect_true(views, "the returned tensors are no views of the cache's memory", answer=found, read=CONTRACT)


def test_LatentCache_refuses():
    cache = variants.LatentCache(2, 5, 3, 2)
    cache.update(randn(2, 3, 3), randn(2, 3, 2))
    before = cache.latents.clone(), cache.rope_keys.clone()
    for latents, keys, says in (
        ([2, 3, 3], [2, 3, 2], ("3", "5")),
        ([1, 1, 3], [1, 1, 2], ("1, 1, 3",)),
        ([2, 2, 3], [2, 1, 2], ("2, 1, 2",)),
        ([2, 2, 1], [2, 2, 2], ("2, 2, 1",)),
        ([2, 2, 3], [2, 2, 1], ("2, 2, 1",)),
    ):
        case(f"b=2 max_len=5 r=3 rope=2, holds 3: latents {latents} and rope_keys {keys}")
        with expect_raises(ValueError, *says, read=RAISES):
            cache.update(randn(*latents, seed=4), randn(*keys, seed=5))
        after = (cache.latents, cache.rope_keys)
        expect_close(after, before, name="latents and keys", answer=[*after, cache.length], read=RAISES)
        expect_equal(cache.length, 3, name="length", answer=[*after, cache.length], read=RAISES)


# ---- MultiHeadLatentAttention ----------------------------------------------------------------------------------------


def make_latent(name: str = "no_q_lora", **changes):
    layer = variants.MultiHeadLatentAttention(**LATENTS[name] | changes)
    layer.load_state_dict(random_state({key: tuple(p.shape) for key, p in layer.state_dict().items()}))
    return layer


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("name", list(LATENTS))
def test_MultiHeadLatentAttention_is_transformers(name, absorb):
    case(f"DeepSeek-V3's layer, b=2 t=9, {', '.join(f'{k}={v}' for k, v in LATENTS[name].items())}, absorb={absorb}")
    expected = recorded(f"latent_{name}", lambda: oracles.theirs_latent(name))
    x, rope, read = randn(2, 9, 24, seed=3), rope_table(range(9), 4), ABSORB if absorb else LATENT_EQ
    out = make_latent(name)(x, rope, absorb=absorb)
    expect_close(out.detach(), expected[: out.numel()].view(out.shape), atol=1e-4, rtol=1e-4, read=read)
    found = oracles.values_and_gradients(make_latent(name), x, lambda layer, x: layer(x, rope, absorb=absorb))
    expect_close(found, expected, atol=1e-4, rtol=1e-4, name="out and grads", answer=out.detach(), read=read)


@pytest.mark.parametrize("name", list(LATENTS))
def test_MultiHeadLatentAttention_has_their_parameters(name):
    case(f"{name}: names and shapes of the parameters")
    o = LATENTS[name]
    shapes = {key: list(p.shape) for key, p in variants.MultiHeadLatentAttention(**o).named_parameters()}
    q = {"q_proj.weight": [40, 24]} if name == "no_q_lora" else {
        "q_a_proj.weight": [7, 24], "q_a_layernorm.weight": [7], "q_b_proj.weight": [40, 7],
    }  # fmt: skip
    expected = q | {"kv_a_proj_with_mqa.weight": [14, 24], "kv_a_layernorm.weight": [10]}
    expected |= {"kv_b_proj.weight": [44, 10], "o_proj.weight": [24, 20]}
    expect_equal(dict(sorted(shapes.items())), dict(sorted(expected.items())), name="parameters", read=CONTRACT)


@pytest.mark.parametrize("absorb", [False, True])
def test_MultiHeadLatentAttention_on_the_device_of_x(absorb):
    case(f"PyTorch's default device is another than that of x, as the CPU is for x on a GPU; absorb={absorb}")
    layer, x, rope = make_latent(), randn(2, 9, 24, seed=3), rope_table(range(9), 4)
    expected = layer(x, rope, absorb=absorb)
    with torch.device("meta"):
        found = layer(x, rope, absorb=absorb)
    expect_close(found, expected, read=CONTRACT)


@pytest.mark.parametrize("absorb", [False, True])
def test_MultiHeadLatentAttention_decodes_in_parts(absorb):
    layer, x, rope = make_latent(), randn(2, 9, 24, seed=3), rope_table(range(9), 4)
    whole = recorded("latent_no_q_lora", lambda: oracles.theirs_latent("no_q_lora"))[: 2 * 9 * 24].view(2, 9, 24)
    for parts in PARTS:
        cache, ends = NotedLatents(), [sum(parts[:i]) for i in range(len(parts) + 1)]
        for start, end in pairwise(ends):
            case(f"positions {start} to {end - 1} of parts {list(parts)}, with a cache, absorb={absorb}")
            with torch.no_grad():
                out = layer(x[:, start:end], rope[start:end], cache, absorb=absorb)
            expect_close(out, whole[:, start:end], atol=1e-4, rtol=1e-4, read=ABSORB if absorb else LATENT_EQ)


class NotedLatents:
    """A latent cache that joins tensors, so that this exercise needs no other."""

    def __init__(self):
        self.latents, self.keys = [], []

    def update(self, latents, keys):
        self.latents.append(latents)
        self.keys.append(keys)
        return torch.cat(self.latents, 1), torch.cat(self.keys, 1)


def test_MultiHeadLatentAttention_caches_normed_latents_and_rotated_keys():
    case("b=2 t=3 r=10 rope=4: what the cache is given")
    layer, x, rope, cache = make_latent(), randn(2, 3, 24, seed=3), rope_table(range(1, 4), 4), NotedLatents()
    with torch.no_grad():
        out = layer(x, rope, cache)
        state = {key: p.double() for key, p in layer.state_dict().items()}
    latents, key = (x.double() @ state["kv_a_proj_with_mqa.weight"].T).split([10, 4], -1)
    latents = F.rms_norm(latents, (10,), state["kv_a_layernorm.weight"], 1e-6)
    key = turn(key[:, :, None], rope, "interleaved")[:, :, 0]
    answer = (cache.latents, cache.keys, out)
    expect_close(torch.cat(cache.latents), latents.float(), atol=1e-4, name="latents", answer=answer, read=LATENT_EQ)
    expect_close(torch.cat(cache.keys), key.float(), atol=1e-4, name="rope_keys", answer=answer, read=LATENT_EQ)


def test_MultiHeadLatentAttention_with_the_chapters_own_cache():
    case("b=2, 4, 1 and 4 positions with a LatentCache, absorbed for the single one")
    layer, x, rope = make_latent("q_lora"), randn(2, 9, 24, seed=3), rope_table(range(9), 4)
    cache, outs = variants.LatentCache(2, 9, 10, 4), []
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 9)):
            outs.append(layer(x[:, start:end], rope[start:end], cache, absorb=end - start == 1))
        whole = layer(x, rope)
    expect_close(torch.cat(outs, 1), whole, atol=1e-5, read=CONTRACT)


@pytest.mark.parametrize("name", list(LATENTS))
def test_MultiHeadLatentAttention_scale_and_eps(name):
    case(f"{name}, scale=0.2 and eps=0.5, b=1 t=4, against attention over the keys and values of each head")
    layer, x, rope = make_latent(name, scale=0.2, eps=0.5), randn(1, 4, 24, seed=3), rope_table(range(4), 4)
    state = {key: p.double() for key, p in layer.state_dict().items()}
    if name == "no_q_lora":
        q = (x.double() @ state["q_proj.weight"].T).view(1, 4, 4, 10)
    else:
        q = F.rms_norm(x.double() @ state["q_a_proj.weight"].T, (7,), state["q_a_layernorm.weight"], 0.5)
        q = (q @ state["q_b_proj.weight"].T).view(1, 4, 4, 10)
    q = torch.cat([q[..., :6], turn(q[..., 6:], rope, "interleaved")], -1)
    latents, key = (x.double() @ state["kv_a_proj_with_mqa.weight"].T).split([10, 4], -1)
    latents = F.rms_norm(latents, (10,), state["kv_a_layernorm.weight"], 0.5)
    kv = (latents @ state["kv_b_proj.weight"].T).view(1, 4, 4, 11)
    turned = turn(key[:, :, None], rope, "interleaved").expand(-1, -1, 4, -1)
    k, v = torch.cat([kv[..., :6], turned], -1), kv[..., 6:]
    out = attend(*(h.transpose(1, 2) for h in (q, k, v)), seen=visible(4, 4), scale=0.2)
    expected = out.transpose(1, 2).flatten(2) @ state["o_proj.weight"].T
    for absorb in (False, True):
        expect_close(layer(x, rope, absorb=absorb).detach(), expected.float(), atol=1e-4, read=LATENT_EQ)


WIDE = {"dim": 16, "n_heads": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def one_step(absorb: bool):
    """One position after 255: the output, its products' FLOPs beyond the projections, and the largest tensor."""
    layer, cache = variants.MultiHeadLatentAttention(**WIDE), NotedLatents()
    cache.update(randn(1, 255, 24), randn(1, 255, 8, seed=1))
    x, rope = randn(1, 1, 16, seed=2), rope_table([255], 8)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            out = layer(x, rope, cache, absorb=absorb)
        cache.latents, cache.keys = cache.latents[:1], cache.keys[:1]
        with LargestTensor() as largest:
            layer(x, rope, cache, absorb=absorb)
    names = ("q_proj", "kv_a_proj_with_mqa", "o_proj")
    return out, counter.get_total_flops() - sum(2 * getattr(layer, n).weight.numel() for n in names), largest.numbers


def test_MultiHeadLatentAttention_absorbs():
    case("t=1 s=256 h=8 r=24 nope=16 rope=8 v=16, absorb=True: FLOPs without the projections, and the largest tensor")
    out, flops, largest = one_step(absorb=True)
    expected = 2 * 8 * (256 * (2 * 24 + 8) + 24 * (16 + 16))
    expect_equal(flops, expected, name="FLOPs", answer=out, read=ABSORB)
    problem = f"a tensor of {largest} numbers was made: a key or value for each head and position"
    expect_true(largest < 256 * 8 * 16, problem, answer=out, read=ABSORB)


def test_MultiHeadLatentAttention_expands():
    case("t=1 s=256 h=8 r=24 nope=16 rope=8 v=16, absorb=False: FLOPs without the projections")
    out, flops, _ = one_step(absorb=False)
    expected = 2 * 8 * (256 * (16 + 8 + 16) + 256 * 24 * (16 + 16))
    expect_equal(flops, expected, name="FLOPs", answer=out, read=LATENT_EQ)


@oracle
def test_MultiHeadLatentAttention_absorbed_has_the_same_gradients():
    case("float64, b=2 t=7: output and all gradients, absorbed and not")
    x, rope = randn(2, 7, 24, seed=3).double(), rope_table(range(7), 4)
    found = [
        oracles.values_and_gradients(make_latent("q_lora").double(), x, lambda m, x, a=a: m(x, rope, absorb=a)).double()
        for a in (False, True)
    ]
    expect_close(found[1], found[0], atol=1e-6, rtol=1e-6, read=ABSORB)
    expect_true(LATENT["n_heads"] == 4, "the case is as described")
