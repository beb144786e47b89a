"""Attention with a state, graded in float64 against the recurrence; the delta rule against Transformers' code, too."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, recorded
from tests.chapter_24.forms import DECAYS, FLOAT64, Operators, expected, gradients, inputs, recurrence
from tests.inputs import randn

la = graded("linear_attention")

STATE, CHUNK, DELTA, SYSTEM, WY, CHUNKED_DELTA = (f"eq-linear_attention-{n}" for n in (2, 4, 8, 9, 10, 11))
ARGS, RETURNS, RAISES, COST = (f"the contract, under {part}" for part in ("Args", "Returns", "Raises", "Cost"))
by_decay = pytest.mark.parametrize("decay", DECAYS)
LENGTHS = ((1, 4), (7, 3), (8, 4), (9, 64), (13, 1), (21, 8))


def one(*values) -> torch.Tensor:
    """Vectors of one sequence and one head, by position: ``[1, T, 1, D]``; numbers: ``[1, T, 1]``."""
    x = torch.tensor(values)
    return x[None, :, None, :] if x.ndim == 2 else x[None, :, None]


def head(*rows) -> torch.Tensor:
    """A state of one sequence and one head."""
    return torch.tensor([[rows]])


HALF, QUARTER = math.log(0.5), math.log(0.25)


def check_float64(form, decay, read, with_beta, **more):
    """Values and gradients of a form in float64."""
    for length, size in LENGTHS if more.get("chunked") else ((1, 0), (6, 0)):
        given = inputs(length, decay)
        given = given if with_beta else {name: x for name, x in given.items() if name != "beta"}
        named = {"chunk_size": size} if size else {}
        shown = f"B=2 T={length} H=3 Dk=4 Dv=5, decay: {decay}" + (f", chunks of {size}" if size else "")
        case(f"{shown}, an initial state, float64")
        found, aim = form(**given, **named), expected(given)
        expect_close(found, aim, read=read, **FLOAT64)
        case(f"{shown}, float64: gradients of all tensors")
        expect_close(gradients(found, given), gradients(aim, given), name="gradient", read=read, **FLOAT64)


def check_nothing(form, with_beta, **named):
    """No positions: no outputs, and the state as it was."""
    case("T=0: no outputs, and the initial state")
    given = inputs(0, "head", dtype=torch.float32)
    given = given if with_beta else {name: x for name, x in given.items() if name != "beta"}
    found = form(**given, **named)
    expect_close(found, (torch.zeros(2, 0, 3, 5), given["initial_state"].detach()), read=RETURNS)
    case("T=0 without an initial state: zeros")
    del given["initial_state"]
    expect_close(form(**given, **named)[1], torch.zeros(2, 3, 4, 5), read=RETURNS)


def check_refusals(form, with_beta, **named):
    """Every shape that does not fit is shown."""
    wrong = {"q": (2, 6, 3, 3), "k": (2, 5, 3, 4), "v": (2, 6, 2, 5), "g": (2, 6), "initial_state": (2, 3, 5, 4)}
    wrong |= {"beta": (2, 6, 3, 1)} if with_beta else {}
    for name, shape in wrong.items():
        given = inputs(6, "head", dtype=torch.float32)
        given = given if with_beta else {key: x for key, x in given.items() if key != "beta"}
        case(f"B=2 T=6 H=3 Dk=4 Dv=5, but {name} has the shape {shape}")
        form(**given, **named)
        with expect_raises(ValueError, str(shape), read=RAISES):
            form(**given | {name: randn(*shape)}, **named)


def check_narrow(form, with_beta, read, **named):
    """Inputs in bfloat16: outputs in bfloat16, sums and the state in float32."""
    case("B=1 T=40 H=1 Dk=1 Dv=1, bfloat16: 256 and 39 ones, which bfloat16 cannot add; the state is float32")
    ones = torch.ones(1, 40, 1, 1, dtype=torch.bfloat16)
    v = ones.clone()
    v[0, 0] = 256
    if with_beta:  # each key is new, so the state has a row for each
        q, k = torch.ones(1, 40, 1, 40).bfloat16(), torch.eye(40).view(1, 40, 1, 40).bfloat16()
        out, state = form(q, k, v, ones[..., 0], scale=1.0, **named)
        rows = v[0, :, 0].float().view(1, 1, 40, 1)
    else:
        out, state = form(ones, ones, v, scale=1.0, **named)
        rows = torch.full((1, 1, 1, 1), 295.0)
    expect_close(state, rows, name="state", answer=(out, state), read=RETURNS)
    totals = (256 + torch.arange(40.0)).view(1, 40, 1, 1).bfloat16()
    expect_close(out, totals, rtol=0, atol=0, answer=(out, state), read=read)


# ---- linear_attention_recurrent --------------------------------------------------------------------------------------


def test_linear_attention_recurrent_by_hand():
    case("T=2 Dk=2 Dv=2, scale 1: k (1, 0) writes (4, 8), k (1, 1) writes (2, 6)")
    q, k, v = one((1.0, 3.0), (1.0, 10.0)), one((1.0, 0.0), (1.0, 1.0)), one((4.0, 8.0), (2.0, 6.0))
    found = la.linear_attention_recurrent(q, k, v, scale=1.0)
    # S_2 = [[4 + 2, 8 + 6], [2, 6]], o_2 = (6 + 10 x 2, 14 + 10 x 6)
    expect_close(found, (one((4.0, 8.0), (26.0, 74.0)), head((6.0, 14.0), (2.0, 6.0))), read=STATE)
    case("the same with decays of 1/4 and 1/2: the first value fades, the second one does not yet")
    found = la.linear_attention_recurrent(q, k, v, one(QUARTER, HALF), scale=1.0)
    expect_close(found, (one((4.0, 8.0), (24.0, 70.0)), head((4.0, 10.0), (2.0, 6.0))), read=STATE)
    case("the same after an initial state of [[8, 0], [0, 16]]: it fades before anything is written")
    start = head((8.0, 0.0), (0.0, 16.0))
    found = la.linear_attention_recurrent(q, k, v, one(QUARTER, HALF), 1.0, start)
    # S_1 = [[2 + 4, 8], [0, 4]], S_2 = [[3 + 2, 4 + 6], [2, 2 + 6]]
    expect_close(found, (one((6.0, 20.0), (25.0, 90.0)), head((5.0, 10.0), (2.0, 8.0))), read=STATE)
    expect_close(start, head((8.0, 0.0), (0.0, 16.0)), name="initial_state", answer=found, read=RETURNS)


def test_linear_attention_recurrent_with_a_decay_for_each_feature():
    case("T=2 Dk=2 Dv=2, scale 1: k (1, 2) writes (4, 8); then row 0 keeps a half and row 1 a quarter")
    q, k, v = one((1.0, 0.0), (1.0, 10.0)), one((1.0, 2.0), (1.0, 0.0)), one((4.0, 8.0), (2.0, 6.0))
    g = one((QUARTER, HALF), (HALF, QUARTER))
    found = la.linear_attention_recurrent(q, k, v, g, scale=1.0)
    expect_close(found, (one((4.0, 8.0), (24.0, 50.0)), head((4.0, 10.0), (2.0, 4.0))), read=STATE)


def test_linear_attention_recurrent_scale():
    q, k, v = one((1.0, 3.0, 0.0, 0.0)), one((1.0, 2.0, 0.0, 0.0)), one((2.0,))
    for scale, value in ((None, 7.0), (3.0, 42.0), (0.0, 0.0)):
        case(f"T=1 Dk=4: q . k = 7, v = 2, scale={scale}; the state is not scaled")
        found = la.linear_attention_recurrent(q, k, v, scale=scale)
        expect_close(found, (one((value,)), head((2.0,), (4.0,), (0.0,), (0.0,))), read=ARGS)


def test_linear_attention_recurrent_is_attention_without_softmax():
    case("B=2 T=6 H=3, decays one a head: the scores of all pairs, times the decays between, times the values")
    given = {name: x.detach() for name, x in inputs(6, "head").items()}
    c = given["g"].cumsum(1)
    weights = torch.einsum("bihd,bjhd->bhij", given["q"], given["k"]) / 2
    weights = (weights * (c[:, :, None] - c[:, None]).permute(0, 3, 1, 2).exp()).tril()
    aim = torch.einsum("bhij,bjhd->bihd", weights, given["v"])
    out = la.linear_attention_recurrent(given["q"], given["k"], given["v"], given["g"])[0]
    expect_close(out, aim, read="eq-linear_attention-3", **FLOAT64)


@by_decay
def test_linear_attention_recurrent_in_float64(decay):
    check_float64(la.linear_attention_recurrent, decay, STATE, False)


def test_linear_attention_recurrent_in_bfloat16():
    check_narrow(la.linear_attention_recurrent, False, STATE)


def test_linear_attention_recurrent_of_nothing():
    check_nothing(la.linear_attention_recurrent, False)


def test_linear_attention_recurrent_refuses():
    check_refusals(la.linear_attention_recurrent, False)


# ---- linear_attention_chunked ----------------------------------------------------------------------------------------


def check_steps(form, with_beta):
    """2048 positions in chunks of 64: few operators, and no large tensor."""
    for decay in DECAYS:
        shapes = {"none": None, "head": (1, 2048, 1), "feature": (1, 2048, 1, 16)}
        q, k, v = (randn(1, 2048, 1, 16, seed=i) for i in range(3))
        k = F.normalize(k, dim=-1)
        given = [q, k, v] + ([torch.sigmoid(randn(1, 2048, 1, seed=3))] if with_beta else [])
        g = None if decay == "none" else -randn(*shapes[decay], seed=4).abs()
        case(f"T=2048 Dk=Dv=16, chunks of 64, decay: {decay}: operators, and the largest tensor")
        with Operators() as seen:
            found = form(*given, g, chunk_size=64)
        problem = f"{seen.n} operators for 2048 positions: there should be few for each of the 32 chunks"
        expect_true(seen.n < 2048, problem, answer=found, read=COST)
        allowed = 64 * 2048 * (16 if decay == "feature" else 1)
        problem = f"a tensor has {seen.largest:,} numbers; the scores of all chunks are {allowed:,}"
        expect_true(seen.largest <= 2 * allowed, problem, answer=found, read=COST)


def check_overflow(form, with_beta):
    """Decays of 1e-17 a step, and a few positions without decay among them."""
    for decay in ("head", "feature"):
        given = inputs(70, decay, batch=1, heads=1, dtype=torch.float32)
        given = given if with_beta else {name: x for name, x in given.items() if name != "beta"}
        g = torch.full_like(given["g"], -40.0)
        g[:, 5:9] = -0.5
        given["g"] = g.requires_grad_()
        shown = f"T=70, one chunk of 128, g of -40 a step, decay: {decay}, float32"
        case(f"{shown}: exp(40 x 69) is infinite")
        found, aim = form(**given, chunk_size=128), expected(given)
        loose: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-3}
        expect_close(found, tuple(x.float() for x in aim), read="eq-linear_attention-4", **loose)
        case(f"{shown}: gradients")
        aims = {name: x.float() for name, x in gradients(aim, given).items()}
        expect_close(gradients(found, given), aims, name="gradient", read="eq-linear_attention-4", **loose)


def check_chunk_size(form, with_beta):
    """No chunk without positions."""
    given = inputs(6, dtype=torch.float32)
    given = given if with_beta else {name: x for name, x in given.items() if name != "beta"}
    form(**given, chunk_size=2)
    for size in (0, -3):
        case(f"chunk_size={size}")
        with expect_raises(ValueError, "chunk_size", str(size), read=RAISES):
            form(**given, chunk_size=size)


def test_linear_attention_chunked_by_hand():
    case("T=3 Dk=1 Dv=1, scale 1, decay 1/2 a step, chunks of two: values 8, 4, 2 under keys 1, 3, 5")
    q, k, v = one((1.0,), (2.0,), (3.0,)), one((1.0,), (3.0,), (5.0,)), one((8.0,), (4.0,), (2.0,))
    found = la.linear_attention_chunked(q, k, v, one(HALF, HALF, HALF), 1.0, chunk_size=2)
    # states 8, 4 + 12 = 16, 8 + 10 = 18
    expect_close(found, (one((8.0,), (32.0,), (54.0,)), head((18.0,))), read=CHUNK)
    case("the same after an initial state of 32")
    found = la.linear_attention_chunked(q, k, v, one(HALF, HALF, HALF), 1.0, head((32.0,)), chunk_size=2)
    # states 24, 24, 22
    expect_close(found, (one((24.0,), (48.0,), (66.0,)), head((22.0,))), read="eq-linear_attention-5")


@by_decay
def test_linear_attention_chunked_in_float64(decay):
    check_float64(la.linear_attention_chunked, decay, CHUNK, False, chunked=True)


def test_linear_attention_chunked_scale():
    q, k, v = one((1.0, 3.0, 0.0, 0.0)), one((1.0, 2.0, 0.0, 0.0)), one((2.0,))
    for scale, value in ((None, 7.0), (3.0, 42.0), (0.0, 0.0)):
        case(f"T=1 Dk=4: q . k = 7, v = 2, scale={scale}; the state is not scaled")
        found = la.linear_attention_chunked(q, k, v, scale=scale)
        expect_close(found, (one((value,)), head((2.0,), (4.0,), (0.0,), (0.0,))), read=ARGS)


def test_linear_attention_chunked_in_bfloat16():
    check_narrow(la.linear_attention_chunked, False, CHUNK, chunk_size=16)


def test_linear_attention_chunked_of_nothing():
    check_nothing(la.linear_attention_chunked, False, chunk_size=4)


def test_linear_attention_chunked_does_not_overflow():
    check_overflow(la.linear_attention_chunked, False)


def test_linear_attention_chunked_refuses():
    check_refusals(la.linear_attention_chunked, False)
    check_chunk_size(la.linear_attention_chunked, False)


def test_linear_attention_chunked_takes_few_steps():
    check_steps(la.linear_attention_chunked, False)


# ---- delta_rule_recurrent --------------------------------------------------------------------------------------------


def test_delta_rule_recurrent_by_hand():
    case("T=3 Dk=2 Dv=2, scale 1: k (1, 0) writes (4, 8) and then (2, 6) with beta 1: only the second value stays")
    q, k = one((1.0, 0.0), (1.0, 0.0), (1.0, 2.0)), one((1.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    v = one((4.0, 8.0), (2.0, 6.0), (1.0, 3.0))
    found = la.delta_rule_recurrent(q, k, v, one(1.0, 1.0, 1.0), scale=1.0)
    expect_close(found, (one((4.0, 8.0), (2.0, 6.0), (4.0, 12.0)), head((2.0, 6.0), (1.0, 3.0))), read=DELTA)
    case("the same with beta 1, 1/2, 1: half of the error is corrected")
    found = la.delta_rule_recurrent(q, k, v, one(1.0, 0.5, 1.0), scale=1.0)
    expect_close(found, (one((4.0, 8.0), (3.0, 7.0), (5.0, 13.0)), head((3.0, 7.0), (1.0, 3.0))), read=DELTA)
    case("T=1, initial state [[8, 16], [4, 0]], decay 1/2, k (1, 2), beta 1/4: the state fades before it is read")
    # faded [[4, 8], [2, 0]]; predicted (8, 8); error (12 - 8, 4 - 8) / 4 = (1, -1)
    start = head((8.0, 16.0), (4.0, 0.0))
    found = la.delta_rule_recurrent(
        one((1.0, 1.0)), one((1.0, 2.0)), one((12.0, 4.0)), one(0.25), one(HALF), 1.0, start
    )
    expect_close(found, (one((9.0, 5.0)), head((5.0, 7.0), (4.0, -2.0))), read=DELTA)


def test_delta_rule_recurrent_recalls_as_many_values_as_it_has_rows():
    case("T=8 Dk=8, orthogonal unit keys, beta 1, scale 1: each of the eight values comes back")
    basis = torch.linalg.qr(randn(8, 8).double()).Q.view(1, 8, 1, 8)
    v = randn(1, 8, 1, 3, seed=1).double()
    found = la.delta_rule_recurrent(basis, basis, v, torch.ones(1, 8, 1).double(), scale=1.0)
    recalled = torch.einsum("bthk,bhkv->bthv", basis, found[1])
    expect_close(recalled, v, name="recalled", answer=found, read=DELTA, **FLOAT64)


@by_decay
def test_delta_rule_recurrent_in_float64(decay):
    check_float64(la.delta_rule_recurrent, decay, DELTA, True)


def ruled(name: str, length: int) -> tuple[dict, torch.Tensor]:
    """Inputs in float32, and what Transformers' function of that name makes of them."""
    given = {name: x.detach() for name, x in inputs(length, "head", dtype=torch.float32).items()}

    def compute():
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        out = getattr(modeling, name)(
            given["q"], given["k"], given["v"], given["g"], given["beta"],
            initial_state=given["initial_state"], output_final_state=True,
        )  # fmt: skip
        return torch.cat([x.flatten() for x in out])

    return given, recorded(f"{name}_{length}", compute)


def test_delta_rule_recurrent_equals_transformers():
    case("B=2 T=9 H=3 Dk=4 Dv=5, beside Transformers' torch_recurrent_gated_delta_rule: outputs and state")
    given, aim = ruled("torch_recurrent_gated_delta_rule", 9)
    found = la.delta_rule_recurrent(**given)
    expect_close(torch.cat([x.flatten() for x in found]), aim, atol=1e-5, rtol=1e-5, answer=found, read=DELTA)


def test_delta_rule_recurrent_in_bfloat16():
    check_narrow(la.delta_rule_recurrent, True, DELTA)


def test_delta_rule_recurrent_of_nothing():
    check_nothing(la.delta_rule_recurrent, True)


def test_delta_rule_recurrent_refuses():
    check_refusals(la.delta_rule_recurrent, True)


# ---- wy_representation -----------------------------------------------------------------------------------------------


def chunk(length, decay, dtype=torch.float64):
    """The arguments of `wy_representation` for two sequences of three heads: ``[2, 3, C, ...]``."""
    given = {name: x.detach().transpose(1, 2) for name, x in inputs(length, decay, dtype=dtype).items()}
    return {name: given[name] for name in ("k", "v", "beta", "g") if name in given}


def test_wy_representation_by_hand():
    case("C=2 Dk=2 Dv=1, k (1, 0) and (1, 2), v 3 and 10, beta 1 and 1/2, no decay")
    k, v = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0], [10.0]])
    found = la.wy_representation(k, v, torch.tensor([1.0, 0.5]))
    # A_21 = 1/2 (k_2 . k_1) = 1/2; w_2 = 1/2 k_2 - 1/2 w_1, u_2 = 1/2 10 - 1/2 3
    expect_close(found, (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0], [3.5]])), read=WY)
    case("the same with decays of 1/2 and 1/4")
    found = la.wy_representation(k, v, torch.tensor([1.0, 0.5]), torch.tensor([HALF, QUARTER]))
    # A_21 = 1/8; w_1 = (1/2, 0), w_2 = 1/2 (1/8, 1/4) - 1/8 (1/2, 0); u_2 = 5 - 3/8
    expect_close(found, (torch.tensor([[0.5, 0.0], [0.0, 0.125]]), torch.tensor([[3.0], [4.625]])), read=WY)


def test_wy_representation_with_a_decay_for_each_feature_by_hand():
    case("C=2 Dk=2 Dv=1, k (1, 1) and (1, 2), v 3 and 10, beta 1 and 1/2; then feature 0 keeps 1/2, feature 1 1/4")
    k, v = torch.tensor([[1.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0], [10.0]])
    g = torch.tensor([[HALF, 0.0], [HALF, QUARTER]])
    # A_21 = 1/2 (1/2 + 2/4) = 1/2; w_1 = (1/2, 1), w_2 = 1/2 (1/4, 2/4) - 1/2 w_1; u_2 = 5 - 3/2
    found = la.wy_representation(k, v, torch.tensor([1.0, 0.5]), g)
    expect_close(found, (torch.tensor([[0.5, 1.0], [-0.125, -0.25]]), torch.tensor([[3.0], [3.5]])), read=WY)


@by_decay
@pytest.mark.parametrize("length", [1, 6])
def test_wy_representation_for_any_state(length, decay):
    case(f"two sequences of three heads, C={length}, decay: {decay}, and a random state: u - w S is what is added")
    given = chunk(length, decay)
    w, u = la.wy_representation(**given)
    state = randn(2, 3, 4, 5, seed=8).double()
    added = []
    s = state
    for t in range(length):
        if "g" in given:
            s = s * (given["g"][:, :, t].exp().reshape(2, 3, -1, 1))
        key = given["k"][:, :, t, :, None]
        new = given["beta"][:, :, t, None] * (given["v"][:, :, t] - (key * s).sum(-2))
        s = s + key * new[:, :, None]
        added.append(new)
    expect_close(u - w @ state, torch.stack(added, 2), name="u - w S", answer=(w, u), read=SYSTEM, **FLOAT64)


def test_wy_representation_is_a_product_of_reflections():
    case("C=5 Dk=4, no decay: I - k' w is the product of (I - beta k k') of all positions")
    given = {name: x[0, 0] for name, x in chunk(5, "none").items()}
    w, u = la.wy_representation(**given)
    product = torch.eye(4).double()
    for key, beta in zip(given["k"], given["beta"], strict=True):
        product = (torch.eye(4).double() - beta * key[:, None] * key) @ product
    expect_close(torch.eye(4).double() - given["k"].T @ w, product, name="I - k' w", answer=(w, u), read=WY, **FLOAT64)


def test_wy_representation_of_any_leading_axes():
    for lead in ((), (2,), (2, 1, 3)):
        case(f"k {(*lead, 3, 4)}, v {(*lead, 3, 2)}, float32")
        k, v, beta = randn(*lead, 3, 4), randn(*lead, 3, 2, seed=1), torch.sigmoid(randn(*lead, 3, seed=2))
        g = -randn(*lead, 3, seed=3).abs()
        found = la.wy_representation(k, v, beta, g)
        c, one_key = g.cumsum(-1), (k * beta[..., None]) @ k.mT
        a = (one_key * (c[..., :, None] - c[..., None, :]).exp()).tril(-1) + torch.eye(3)
        aim = tuple(torch.linalg.inv(a) @ (beta[..., None] * x) for x in (c.exp()[..., None] * k, v))
        expect_close(found, aim, atol=1e-5, rtol=1e-4, read=WY)


def test_wy_representation_dtypes():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        case(f"C=4, {dtype}: w and u are {wide}")
        found = la.wy_representation(**chunk(4, "head", dtype))
        expect_equal([x.dtype for x in found], [wide, wide], name="dtypes", answer=found, read=RETURNS)


def test_wy_representation_gradients():
    case("C=5, decay: head, float64: gradients of k, v, beta and g")
    given = {name: x.requires_grad_() for name, x in chunk(5, "head").items()}
    found = la.wy_representation(**given)
    c = given["g"].cumsum(-1)
    a = given["beta"][..., None] * (given["k"] @ given["k"].mT) * (c[..., :, None] - c[..., None, :]).exp()
    inverse = torch.linalg.inv(a.tril(-1) + torch.eye(5))
    beta = given["beta"][..., None]
    aim = inverse @ (beta * c.exp()[..., None] * given["k"]), inverse @ (beta * given["v"])
    expect_close(gradients(found, given), gradients(aim, given), name="gradient", read=WY, **FLOAT64)


def test_wy_representation_refuses():
    given = chunk(4, "head", torch.float32)
    la.wy_representation(**given)
    for name, shape in {"v": (2, 3, 5, 5), "beta": (2, 3), "g": (2, 3, 4, 3)}.items():
        case(f"k (2, 3, 4, 4), v (2, 3, 4, 5), beta and g (2, 3, 4), but {name} has the shape {shape}")
        with expect_raises(ValueError, str(shape), read=RAISES):
            la.wy_representation(**given | {name: randn(*shape)})


def test_wy_representation_solves_a_triangle():
    case("C=64, one head: the operators")
    k, v = F.normalize(randn(64, 8), dim=-1), randn(64, 8, seed=1)
    with Operators() as seen:
        found = la.wy_representation(k, v, torch.sigmoid(randn(64, seed=2)), -randn(64, seed=3).abs())
    full = [n for n in seen.names if "inv" in n or "lu" in n.split("_") or n in ("linalg_solve", "_linalg_solve_ex")]
    expect_true(
        not full, f"{', '.join(full)}: the matrix is triangular, and solving is enough", answer=found, read=COST
    )
    problem = f"{seen.n} operators for 64 positions: one triangular solve does all of them"
    expect_true(seen.n < 64, problem, answer=found, read=COST)


# ---- delta_rule_chunked ----------------------------------------------------------------------------------------------


def test_delta_rule_chunked_by_hand():
    case("T=3 Dk=2 Dv=2, scale 1, chunks of two: k (1, 0) writes (4, 8), then (2, 6) with beta 1/2")
    q, k = one((1.0, 0.0), (1.0, 0.0), (1.0, 2.0)), one((1.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    v = one((4.0, 8.0), (2.0, 6.0), (1.0, 3.0))
    found = la.delta_rule_chunked(q, k, v, one(1.0, 0.5, 1.0), scale=1.0, chunk_size=2)
    # S_2 = [[3, 7], [0, 0]]; error (1 - 3, 3 - 7); S_3 = [[1, 3], [-2, -4]]
    aim = one((4.0, 8.0), (3.0, 7.0), (-3.0, -5.0)), head((1.0, 3.0), (-2.0, -4.0))
    expect_close(found, aim, read=CHUNKED_DELTA)


@by_decay
def test_delta_rule_chunked_in_float64(decay):
    check_float64(la.delta_rule_chunked, decay, CHUNKED_DELTA, True, chunked=True)


def test_delta_rule_chunked_scale():
    q, k, v = one((1.0, 3.0, 0.0, 0.0)), one((1.0, 2.0, 0.0, 0.0)), one((2.0,))
    for scale, value in ((None, 7.0), (3.0, 42.0), (0.0, 0.0)):
        case(f"T=1 Dk=4: q . k = 7, v = 2, beta 1, scale={scale}; the state is not scaled")
        found = la.delta_rule_chunked(q, k, v, one(1.0), scale=scale)
        expect_close(found, (one((value,)), head((2.0,), (4.0,), (0.0,), (0.0,))), read=ARGS)


def test_delta_rule_chunked_equals_transformers():
    case("B=2 T=70 H=3 Dk=4 Dv=5, beside Transformers' torch_chunk_gated_delta_rule: outputs and state")
    given, aim = ruled("torch_chunk_gated_delta_rule", 70)
    found = la.delta_rule_chunked(**given)
    flat = torch.cat([x.flatten() for x in found])
    expect_close(flat, aim, atol=1e-5, rtol=1e-4, answer=found, read=CHUNKED_DELTA)


def test_delta_rule_chunked_in_bfloat16():
    check_narrow(la.delta_rule_chunked, True, CHUNKED_DELTA, chunk_size=16)


def test_delta_rule_chunked_of_nothing():
    check_nothing(la.delta_rule_chunked, True, chunk_size=4)


def test_delta_rule_chunked_does_not_overflow():
    check_overflow(la.delta_rule_chunked, True)


def test_delta_rule_chunked_refuses():
    check_refusals(la.delta_rule_chunked, True)
    check_chunk_size(la.delta_rule_chunked, True)


def test_delta_rule_chunked_takes_few_steps():
    check_steps(la.delta_rule_chunked, True)


def test_delta_rule_chunked_of_long_sequences():
    case("B=1 T=300 H=1 Dk=8 Dv=8, decay: head, float32, chunks of 64: close to the recurrence in float64")
    given = {name: x.detach() for name, x in inputs(300, "head", 1, 1, 8, 8, dtype=torch.float32).items()}
    aim = tuple(x.float() for x in expected(given))
    expect_close(la.delta_rule_chunked(**given), aim, atol=2e-5, rtol=1e-4, read=CHUNKED_DELTA)


def test_delta_rule_recurrent_does_not_norm_keys():
    case("T=2 Dk=2, keys of length 2, beta 1/4: keys come as they are")
    q, k, v = one((1.0, 1.0), (1.0, 1.0)), one((2.0, 0.0), (2.0, 0.0)), one((4.0,), (8.0,))
    found = la.delta_rule_recurrent(q, k, v, one(0.25, 0.25), scale=1.0)
    # 1/4 x 4 x 2 = 2; then 1/4 (8 - 4) x 2 = 2 more
    expect_close(found, (one((2.0,), (4.0,)), head((4.0,), (0.0,))), read=ARGS)
    expect_close(tuple(x.float() for x in recurrence(q, k, v, None, 1.0, None, one(0.25, 0.25))), found, read=ARGS)
