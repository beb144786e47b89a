"""Attention, graded.

The tests build masks, rotations and caches themselves, and compare with PyTorch's fused attention in float64.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.devices import Devices, Watch
from tests.inputs import randn

attention = graded("attention")

MEAN, SOFTMAX, SHIFTED, MASK = (f"eq-attention-{n}" for n in (1, 2, 3, 4))
ATTENTION, HEADS, GROUPS, CACHE = (f"eq-attention-{n}" for n in (6, 7, 8, 9))
INF = math.inf

SOFTMAX_RETURNS = "the contract of ex-attention-softmax, under Returns"
SIZES = [(1, 1, 1, 1), (5, 5, 8, 8), (3, 7, 4, 5), (6, 2, 3, 9)]  # t, s, d, dv
LAYERS = [(1, 1, 4, 1, 1), (2, 5, 8, 2, 2), (2, 3, 12, 6, 2), (3, 4, 8, 4, 1)]  # b, t, c, h, g
CHUNKS = [(7,), (1, 1, 1, 1, 1, 1, 1), (4, 3), (1, 5, 1)]


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    """About half True, and at least one True in each row."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return mask | (torch.arange(shape[-1]) == 0)


def lower(n_queries: int, n_keys: int) -> Tensor:
    """The causal mask, aligned to the last key."""
    return torch.arange(n_keys) <= torch.arange(n_queries)[:, None] + (n_keys - n_queries)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs) -> Tensor:
    """PyTorch's own, in float64."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, **kwargs)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Ledger(Watch):
    """Counts operators, the numbers in the largest tensor that one makes, and the numbers that are written anew."""

    def __init__(self):
        super().__init__()
        self.n_ops, self.largest, self.n_written = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.n_ops += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                in_place = func._schema.is_mutable
                if in_place or tensor.untyped_storage().data_ptr() not in given:
                    self.n_written += tensor.numel()
        return out


# ---- softmax ---------------------------------------------------------------------------------------------------------


def test_softmax_by_hand():
    case("logarithms of (1, 2, 5) and (4, 4, 8), dim=1")
    x = torch.tensor([[1.0, 2.0, 5.0], [4.0, 4.0, 8.0]]).log()
    expected = torch.tensor([[1 / 8, 1 / 4, 5 / 8], [1 / 4, 1 / 4, 1 / 2]])
    expect_close(attention.softmax(x, 1), expected, atol=1e-6, read=SOFTMAX)


def test_softmax_sums_to_one():
    for shape, dim in [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 5), 1), ((2, 3, 5), -3)]:
        case(f"x {list(shape)}, dim={dim}: the sums along it")
        out = attention.softmax(randn(*shape, seed=len(shape)), dim)
        sums = out.sum(dim)
        expect_close(sums, torch.ones_like(sums), atol=1e-5, name="out.sum(dim)", answer=out, read=SOFTMAX)


def test_softmax_equals_torch():
    for shape, dim in [((7,), 0), ((3, 4), 0), ((3, 4), 1), ((2, 3, 5), -2), ((), 0)]:
        case(f"x {list(shape)}, dim={dim}, float32")
        x = 3 * randn(*shape, seed=1)
        expect_close(attention.softmax(x, dim), torch.softmax(x, dim), atol=1e-6, read=SOFTMAX)


def test_softmax_keeps_float64():
    case("float64: 10^8 and 10^8 + 1, which float32 cannot tell apart, and 9 * 10^7")
    x = torch.tensor([1e8, 1e8 + 1, 9e7], dtype=torch.float64)
    expected = torch.tensor([1 / (1 + math.e), math.e / (1 + math.e), 0.0], dtype=torch.float64)
    expect_close(attention.softmax(x, 0), expected, read=SOFTMAX_RETURNS)
    for shape, dim in [((7,), 0), ((3, 4), 1)]:
        case(f"x {list(shape)} of float64, dim={dim}: the result in float64, to 12 digits")
        x = 3 * randn(*shape, seed=1, dtype=torch.float64)
        expected = torch.softmax(x, dim)
        expect_close(attention.softmax(x, dim), expected, atol=1e-12, rtol=1e-12, read=SOFTMAX_RETURNS)


def test_softmax_does_not_see_a_shift():
    case("(0, 1, 2) and the same plus 1000")
    x = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.tensor([0.09003057, 0.24472847, 0.66524096])
    expect_close(attention.softmax(x + 1000.0, 0), expected, atol=1e-6, read=SHIFTED)
    case("(0, 1, 2) and the same minus 1000")
    expect_close(attention.softmax(x - 1000.0, 0), expected, atol=1e-6, read=SHIFTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_softmax_takes_the_largest_numbers_there_are(dtype):
    top, bottom = torch.finfo(dtype).max, torch.finfo(dtype).min
    case(f"{name_of(dtype)}: twice the largest number and once the smallest")
    out = attention.softmax(torch.tensor([top, bottom, top], dtype=dtype), 0)
    expect_close(out, torch.tensor([0.5, 0.0, 0.5], dtype=dtype), read=SHIFTED)


def test_softmax_shifts_each_row_by_its_own_maximum():
    case("one row at 0, one at 500, dim=1")
    x = torch.tensor([[0.0, 0.0], [500.0, 500.0]])
    expect_close(attention.softmax(x, 1), torch.full((2, 2), 0.5), read=SHIFTED)


def test_softmax_gives_minus_infinity_no_weight():
    case("(-inf, 0, 0)")
    out = attention.softmax(torch.tensor([-INF, 0.0, 0.0]), 0)
    expect_close(out, torch.tensor([0.0, 0.5, 0.5]), read=SOFTMAX)
    case("a row of -inf under a row of zeros, dim=1")
    x = torch.tensor([[0.0, 0.0], [-INF, -INF]])
    expected = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    expect_close(attention.softmax(x, 1), expected, read=SOFTMAX_RETURNS)
    case("the same turned on its side, dim=0")
    expect_close(attention.softmax(x.T, 0), expected.T, read=SOFTMAX_RETURNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_computes_in_float32(dtype):
    case(f"x [8, 50], {name_of(dtype)}")
    x = 4 * randn(8, 50, seed=2, dtype=dtype)
    out = attention.softmax(x, -1)
    expected = torch.softmax(x.float(), -1).to(dtype)
    expect_close(out, expected, atol=1e-2, read=SOFTMAX)
    off = (out != expected).double().mean().item()  # another order of float32 operations may tip a rare tie
    problem = f"{off:.0%} of the numbers are rounded twice: the arithmetic was not in float32 but in {name_of(dtype)}"
    expect_true(off < 0.02, problem, answer=out, read=SOFTMAX_RETURNS)


def test_softmax_sums_70_000_in_float16():
    case("70,000 equal scores in float16, whose largest number is 65,504")
    out = attention.softmax(torch.zeros(70_000, dtype=torch.float16), 0)
    expected = torch.full((70_000,), 1 / 70_000).half()
    expect_close(out, expected, atol=1e-7, read=SOFTMAX_RETURNS)


def test_softmax_of_nothing_is_empty():
    for shape, dim in [((3, 0), 1), ((0,), -1), ((0, 4), 0)]:
        case(f"x {list(shape)} of bfloat16, dim={dim}: there is nothing to weigh")
        x = torch.zeros(shape, dtype=torch.bfloat16)
        expect_close(attention.softmax(x, dim), x.clone(), read=SOFTMAX_RETURNS)


def test_softmax_leaves_x_unchanged():
    case("x [2, 3]: x after the call")
    x = randn(2, 3)
    before = x.clone()
    out = attention.softmax(x, 1)
    expect_close(x, before, atol=0.0, rtol=0.0, name="x", answer=out, read="the contract")


def test_softmax_passes_gradients_back():
    case("x [3, 5] with ties, dim=1: the gradient of x")
    x, incoming = randn(3, 5), randn(3, 5, seed=1)
    x[1] = 0.0
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = attention.softmax(mine, 1)
    problem = "the output is cut off from the graph: no gradient can reach x"
    expect_true(out.requires_grad, problem, answer=out, read=SOFTMAX)
    out.backward(incoming)
    torch.softmax(theirs, 1).backward(incoming)
    expect_close(mine.grad, theirs.grad, atol=1e-6, name="x.grad", answer=out, read=SOFTMAX)


def test_softmax_has_no_nan_in_its_gradient():
    case("a row of -inf under a row of numbers: the gradient of x")
    x = torch.tensor([[1.0, 2.0, -INF], [-INF, -INF, -INF]], requires_grad=True)
    out = attention.softmax(x, 1)
    out.backward(torch.tensor([[1.0, 0.0, 5.0], [1.0, 2.0, 3.0]]))
    p = 1 / (1 + math.e)
    expected = torch.tensor([[p * (1 - p), -p * (1 - p), 0.0], [0.0, 0.0, 0.0]])
    expect_close(x.grad, expected, atol=1e-6, name="x.grad", answer=(out, x.grad), read=SOFTMAX_RETURNS)


@oracle
def test_softmax_properties():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    case("any scores from -1e30 to 1e30 or -inf")
    numbers = st.one_of(st.floats(-50, 50, width=32), st.floats(-(2.0**99), 2.0**99, width=32), st.just(-INF))

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.lists(numbers, min_size=1, max_size=9))
    def holds(scores):
        x = torch.tensor(scores)
        out = attention.softmax(x, 0)
        total = 1.0 if any(s > -INF for s in scores) else 0.0
        expect_close(out.sum(), torch.tensor(total), atol=1e-5, answer=out, read=SOFTMAX)
        expect_true(bool((out >= 0).all()), "a weight is negative", answer=out, read=SOFTMAX)
        order = x.argsort(stable=True)
        expect_true(bool((out[order].diff() >= 0).all()), "a higher score got less", answer=out, read=SOFTMAX)

    holds()


# ---- causal_mask -----------------------------------------------------------------------------------------------------


def test_causal_mask_by_hand():
    case("n_queries=3, n_keys=3")
    expected = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    expect_close(attention.causal_mask(3, 3), expected, read=MASK)
    case("n_queries=2, n_keys=5: three keys in a cache")
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    expect_close(attention.causal_mask(2, 5), expected, read=MASK)


def test_causal_mask_by_formula():
    for t, s in [(1, 1), (1, 7), (4, 4), (3, 11), (5, 6), (4, 2), (1, 0)]:
        case(f"n_queries={t}, n_keys={s}")
        expect_close(attention.causal_mask(t, s), lower(t, s), read=MASK)


def test_causal_mask_of_late_queries_is_the_end_of_the_whole_mask():
    whole = attention.causal_mask(9, 9)
    for t in (1, 4, 9):
        last = "last row" if t == 1 else f"last {t} rows"
        case(f"n_queries={t}, n_keys=9: the {last} of the mask of 9 queries")
        expect_close(attention.causal_mask(t, 9), whole[9 - t :], read=MASK)


def test_causal_mask_lives_on_the_device_asked_for():
    case('n_queries=2, n_keys=2, device="meta"')
    with Devices() as devices:
        mask = attention.causal_mask(2, 2, device="meta")
    problem = "no tensor is made on, or moved to, the device asked for"
    expect_true("meta" in devices.asked, problem, answer=mask, read="the contract, under Args")
    problem = f"{devices.mixed} gets tensors of two devices: the one asked for, and another"
    expect_true(not devices.mixed, problem, answer=mask, read="the contract, under Args")


def test_causal_mask_suits_torch():
    case("t=6: PyTorch's attention with this mask, and with is_causal=True")
    mask = attention.causal_mask(6, 6)
    q, k, v = (randn(1, 2, 6, 4, seed=seed) for seed in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    actual = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expect_close(actual, expected, atol=1e-5, name="attention", answer=mask, read=MASK)


@oracle
@pytest.mark.parametrize(("t", "s"), [(3, 3), (2, 7), (1, 4)])
def test_causal_mask_equals_torchs_lower_right(t, s):
    from torch.nn.attention.bias import causal_lower_right

    case(f"n_queries={t}, n_keys={s}: PyTorch's causal_lower_right")
    q, k, v = randn(1, 1, t, 4), randn(1, 1, s, 4, seed=1), randn(1, 1, s, 4, seed=2)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(t, s))
    mask = attention.causal_mask(t, s)
    actual = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expect_close(actual, expected, atol=1e-5, name="attention", answer=mask, read=MASK)


# ---- scaled_dot_product_attention ------------------------------------------------------------------------------------


def hand_made() -> tuple[Tensor, Tensor, Tensor]:
    """Weights (2, 1, 1)/4 and (1, 4, 1)/6."""
    log2 = math.log(2)
    q = torch.tensor([[2 * log2, 0, 0, 0], [0, 4 * log2, 0, 0]])
    v = torch.tensor([[12.0, 0, 0, 12, 0], [0, 12, 0, 12, 12], [0, 0, 12, 0, 12]])
    return q, torch.eye(4)[:3].clone(), v


def test_scaled_dot_product_attention_by_hand():
    case("t=2 s=3 d=4 dv=5: weights (2, 1, 1)/4 and (1, 4, 1)/6")
    out = attention.scaled_dot_product_attention(*hand_made())
    expected = torch.tensor([[6.0, 3, 3, 9, 6], [2, 8, 2, 10, 10]])
    expect_close(out, expected, atol=1e-4, read=ATTENTION)


def test_scaled_dot_product_attention_by_hand_with_a_mask():
    case("t=2 s=3 d=4 dv=5, mask (0, 1, 1) and (1, 1, 0): weights (0, 1, 1)/2 and (1, 4, 0)/5")
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).bool()
    out = attention.scaled_dot_product_attention(*hand_made(), mask)
    expected = torch.tensor([[0.0, 6, 6, 6, 12], [2.4, 9.6, 0, 12, 9.6]])
    expect_close(out, expected, atol=1e-4, read=ATTENTION)


def test_scaled_dot_product_attention_of_a_query_that_sees_nothing():
    case("t=2 s=3 d=4 dv=5, mask (1, 0, 1) and (0, 0, 0)")
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    out = attention.scaled_dot_product_attention(*hand_made(), mask)
    expected = torch.tensor([[8.0, 0, 4, 8, 4], [0, 0, 0, 0, 0]])
    expect_close(out, expected, atol=1e-4, read='section "A row with nothing to see"')


@pytest.mark.parametrize("with_mask", [False, True], ids=["no_mask", "empty_mask"])
def test_scaled_dot_product_attention_of_no_keys(with_mask):
    mask = torch.ones(4, 0, dtype=torch.bool) if with_mask else None
    case(f"q [2, 4, 3], k [2, 0, 3], v [2, 0, 5], {'mask [4, 0]' if with_mask else 'no mask'}: there are no keys")
    out = attention.scaled_dot_product_attention(randn(2, 4, 3), torch.zeros(2, 0, 3), torch.zeros(2, 0, 5), mask)
    expect_close(out, torch.zeros(2, 4, 5), read="the contract, under Returns")


def test_scaled_dot_product_attention_equals_torch():
    for lead, (t, s, d, dv) in product([(), (3,), (2, 3), (2, 1, 2)], SIZES):
        case(f"q {[*lead, t, d]}, k {[*lead, s, d]}, v {[*lead, s, dv]}")
        q, k, v = randn(*lead, t, d), randn(*lead, s, d, seed=1), randn(*lead, s, dv, seed=2)
        expected = torch_attention(q, k, v).float()
        expect_close(attention.scaled_dot_product_attention(q, k, v), expected, atol=1e-5, read=ATTENTION)


@pytest.mark.parametrize("shape", [(3, 6), (2, 1, 3, 6), (2, 1, 1, 6), (2, 4, 3, 6), (3, 1)])
def test_scaled_dot_product_attention_broadcasts_the_mask(shape):
    case(f"q [2, 4, 3, 5], k [2, 4, 6, 5], mask {list(shape)}")
    q, k, v = randn(2, 4, 3, 5), randn(2, 4, 6, 5, seed=1), randn(2, 4, 6, 7, seed=2)
    mask = random_mask(*shape, seed=3)
    out = attention.scaled_dot_product_attention(q, k, v, mask)
    expect_close(out, torch_attention(q, k, v, mask).float(), atol=1e-5, read=ATTENTION)


def test_scaled_dot_product_attention_agrees_with_torch_on_fully_masked_rows():
    case("b=2 h=2 t=4 s=5, rows 1 and 3 see nothing")
    q, k, v = randn(2, 2, 4, 3), randn(2, 2, 5, 3, seed=1), randn(2, 2, 5, 3, seed=2)
    mask = random_mask(4, 5)
    mask[1::2] = False
    expected = torch_attention(q, k, v, mask).float()
    out = attention.scaled_dot_product_attention(q, k, v, mask)
    expect_close(out, expected, atol=1e-5, read='section "A row with nothing to see"')


def test_scaled_dot_product_attention_cannot_see_what_is_masked():
    case("t=3 s=6: keys and values 4 and 5 changed, which the mask hides")
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 6, 4, seed=1), randn(1, 2, 6, 4, seed=2)
    mask = torch.arange(6).expand(3, 6) < 4
    before = attention.scaled_dot_product_attention(q, k, v, mask)
    k[:, :, 4:] *= -30
    v[:, :, 4:] += 1000
    after = attention.scaled_dot_product_attention(q, k, v, mask)
    expect_close(after, before, atol=1e-6, answer=after, read=ATTENTION)


def test_scaled_dot_product_attention_does_not_see_the_order_of_keys():
    case("t=3 s=6: keys and values in another order, the same for both")
    q, k, v = randn(2, 3, 4), randn(2, 6, 4, seed=1), randn(2, 6, 5, seed=2)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    out = attention.scaled_dot_product_attention(q, k[:, order], v[:, order])
    expect_close(out, torch_attention(q, k, v).float(), atol=1e-5, read=MEAN)


def test_scaled_dot_product_attention_is_sure_of_large_scores():
    case("t=2 s=2 d=4, scores of 20,000 and 0")
    q, k = 200 * torch.eye(4)[:2], 200 * torch.eye(4)[:2]
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expect_close(attention.scaled_dot_product_attention(q, k, v), v, read=SHIFTED)


def test_scaled_dot_product_attention_divides_before_float16_overflows():
    case("float16, d=64: products of 102,400 and scores of 12,800")
    q, k = torch.full((1, 2, 64), 40.0).half(), torch.full((1, 3, 64), 40.0).half()
    v = torch.tensor([[[0.0], [1.0], [2.0]]]).half()
    out = attention.scaled_dot_product_attention(q, k, v)
    expect_close(out, torch.ones(1, 2, 1).half(), read="the contract, under Returns")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_dot_product_attention_keeps_the_dtype(dtype):
    q, k, v = (randn(2, n, 16, seed=n, dtype=dtype) for n in (5, 9, 9))
    for mask in (None, random_mask(5, 9)):
        case(f"b=2 t=5 s=9 d=16, {name_of(dtype)}, {'no mask' if mask is None else 'with a mask'}")
        expected = torch_attention(q, k, v, mask).to(dtype)
        out = attention.scaled_dot_product_attention(q, k, v, mask)
        expect_close(out, expected, atol=2e-2, rtol=2e-2, read=ATTENTION)


def test_scaled_dot_product_attention_leaves_its_inputs_unchanged():
    case("t=2 s=3 d=4: q, k, v and mask after the call")
    inputs = [randn(2, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), random_mask(2, 3)]
    before = [x.clone() for x in inputs]
    out = attention.scaled_dot_product_attention(*inputs)
    expect_close(inputs, before, atol=0.0, rtol=0.0, name="inputs", answer=out, read="the contract")


def test_scaled_dot_product_attention_passes_gradients_back():
    case("b=2 t=4 s=5 d=3, row 2 sees nothing: the gradients of q, k and v")
    q, k, v = randn(2, 4, 3), randn(2, 5, 3, seed=1), randn(2, 5, 6, seed=2)
    mask, incoming = random_mask(4, 5), randn(2, 4, 6, seed=4)
    mask[2] = False
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.clone().double().requires_grad_() for x in (q, k, v)]
    out = attention.scaled_dot_product_attention(*mine, mask)
    expect_true(out.requires_grad, "the output is cut off from the graph", answer=out.detach(), read=ATTENTION)
    out.backward(incoming)
    torch_attention(*theirs, mask=mask).backward(incoming.double())
    grads = [x.grad for x in mine]
    expected = [x.grad.float() for x in theirs]
    expect_close(grads, expected, atol=1e-5, name="grads of q, k, v", answer=out.detach(), read=ATTENTION)


def test_scaled_dot_product_attention_makes_nothing_larger_than_the_scores():
    case("t=6 s=7 d=16: the largest tensor made on the way")
    q, k, v = randn(6, 16), randn(7, 16, seed=1), randn(7, 16, seed=2)
    with Ledger() as ledger:
        out = attention.scaled_dot_product_attention(q, k, v, random_mask(6, 7))
    problem = f"a tensor of {ledger.largest} numbers is made, but T x S is only 42 and the inputs have 112 at most"
    expect_true(ledger.largest <= 112, problem, answer=out, read="the contract, under Cost")


def test_scaled_dot_product_attention_does_not_loop():
    n_ops = {}
    for b, h, t in ((2, 2, 4), (3, 4, 20)):
        case(f"b={b} h={h} t={t} d=4: the number of operators")
        q, k, v = (randn(b, h, t, 4, seed=seed) for seed in range(3))
        with Ledger() as ledger:
            out = attention.scaled_dot_product_attention(q, k, v, lower(t, t))
        n_ops[b, h, t] = ledger.n_ops
    few, many = n_ops.values()
    problem = f"{few} operators for 2 x 2 heads of 4 positions, {many} for 3 x 4 of 20: there is a loop"
    expect_true(few == many, problem, answer=out, read="the contract, under Cost")


@oracle
def test_scaled_dot_product_attention_properties():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    size = st.integers(1, 6)

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(size, size, size, size, st.integers(0, 2**20), st.floats(0, 1))
    def holds(t, s, d, dv, seed, share):
        case(f"t={t} s={s} d={d} dv={dv} seed={seed}, {share:.2f} of the mask True")
        q, k, v = 3 * randn(2, t, d, seed=seed), randn(2, s, d, seed=seed + 1), randn(2, s, dv, seed=seed + 2)
        mask = torch.rand(t, s, generator=torch.Generator().manual_seed(seed)) < share
        out = attention.scaled_dot_product_attention(q, k, v, mask)
        expect_close(out, torch_attention(q, k, v, mask).float(), atol=1e-5, read=ATTENTION)
        seen = mask.any(1)
        low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
        inside = (out >= low - 1e-5) & (out <= high + 1e-5)
        expect_true(bool(inside[:, seen].all()), "a mean lies outside of its values", answer=out, read=MEAN)

    holds()


# ---- split_heads -----------------------------------------------------------------------------------------------------


def test_split_heads_by_hand():
    case("b=1 t=3, width 4 in 2 heads, numbers 0 to 11")
    expected = torch.tensor([[[0.0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]])[None]
    expect_close(attention.split_heads(torch.arange(12.0).view(1, 3, 4), 2), expected, read=HEADS)


@pytest.mark.parametrize(("b", "t", "h", "d"), [(1, 1, 1, 1), (2, 3, 4, 5), (3, 5, 1, 2), (1, 4, 6, 1)])
def test_split_heads_feature_by_feature(b, t, h, d):
    case(f"b={b} t={t} h={h} d={d}")
    x = randn(b, t, h * d)
    expected = torch.stack([x[..., head * d : (head + 1) * d] for head in range(h)], dim=1)
    expect_close(attention.split_heads(x, h), expected, atol=0.0, rtol=0.0, read=HEADS)


@pytest.mark.parametrize(("width", "n_heads"), [(100, 30), (70, 20), (40, 80)])
def test_split_heads_refuses_a_width_that_does_not_divide(width, n_heads):
    case(f"width {width}, n_heads={n_heads}")
    with expect_raises(ValueError, str(width), str(n_heads), read="the contract, under Raises"):
        attention.split_heads(randn(2, 3, width), n_heads)


def test_split_heads_takes_any_strides():
    case("b=2 t=3, width 4 in 2 heads, a transposed view")
    x = randn(2, 4, 3).transpose(1, 2)
    expected = torch.stack([x[..., :2], x[..., 2:]], dim=1)
    expect_close(attention.split_heads(x, 2), expected, atol=0.0, rtol=0.0, read=HEADS)


# ---- merge_heads -----------------------------------------------------------------------------------------------------


def test_merge_heads_by_hand():
    case("b=1 h=2 t=3 d=2: head, position and feature as the digits of a number")
    x = torch.tensor([[[0.0, 1], [10, 11], [20, 21]], [[100, 101], [110, 111], [120, 121]]])[None]
    expected = torch.tensor([[[0.0, 1, 100, 101], [10, 11, 110, 111], [20, 21, 120, 121]]])
    expect_close(attention.merge_heads(x), expected, read=HEADS)


@pytest.mark.parametrize(("b", "h", "t", "d"), [(1, 1, 1, 1), (2, 4, 3, 5), (3, 1, 5, 2), (1, 6, 4, 1)])
def test_merge_heads_feature_by_feature(b, h, t, d):
    case(f"b={b} h={h} t={t} d={d}")
    x = randn(b, h, t, d)
    expected = torch.cat([x[:, head] for head in range(h)], dim=-1)
    expect_close(attention.merge_heads(x), expected, atol=0.0, rtol=0.0, read=HEADS)


def test_merge_heads_undoes_the_split():
    case("b=2 t=3, width 12 cut into 4 heads and joined again")
    x = randn(2, 3, 12)
    expect_close(attention.merge_heads(x.unflatten(-1, (4, 3)).transpose(1, 2)), x, atol=0.0, rtol=0.0, read=HEADS)


def test_merge_heads_of_values_that_know_their_position():
    case("b=1 h=2 t=4 d=3, position t holds t in every head")
    x = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 2, 4, 3)
    expected = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 6)
    expect_close(attention.merge_heads(x), expected, read=HEADS)


# ---- repeat_kv -------------------------------------------------------------------------------------------------------


def test_repeat_kv_by_hand():
    case("b=1 g=2 t=3 d=1, each group for 4 heads")
    x = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [30.0]]])[None]
    expected = torch.tensor([[1.0, 2, 3]] * 4 + [[10.0, 20, 30]] * 4).view(1, 8, 3, 1)
    expect_close(attention.repeat_kv(x, 4), expected, read=GROUPS)


@pytest.mark.parametrize(
    ("b", "g", "t", "d", "r"), [(1, 1, 1, 1, 4), (2, 3, 5, 2, 2), (3, 2, 4, 3, 1), (2, 4, 3, 1, 5)]
)
def test_repeat_kv_head_by_head(b, g, t, d, r):
    case(f"b={b} g={g} t={t} d={d}, n_repeats={r}")
    x = randn(b, g, t, d)
    expected = torch.stack([x[:, head // r] for head in range(g * r)], dim=1)
    expect_close(attention.repeat_kv(x, r), expected, atol=0.0, rtol=0.0, read=GROUPS)


def test_repeat_kv_equals_torchs_grouped_queries():
    case("h=6 g=2 t=4 s=5 d=3: attention, against PyTorch's enable_gqa=True")
    q, k, v = randn(2, 6, 4, 3), randn(2, 2, 5, 3, seed=1), randn(2, 2, 5, 3, seed=2)
    repeated = [attention.repeat_kv(x, 3) for x in (k, v)]
    actual = torch_attention(q, *repeated).float()
    expected = torch_attention(q, k, v, enable_gqa=True).float()
    expect_close(actual, expected, atol=1e-5, name="attention", answer=repeated[0], read=GROUPS)


def test_repeat_kv_adds_up_the_gradients_of_a_group():
    case("b=1 g=2 t=3 d=2, n_repeats=3: the gradient of x")
    x, incoming = randn(1, 2, 3, 2).requires_grad_(), randn(1, 6, 3, 2, seed=1)
    out = attention.repeat_kv(x, 3)
    expect_true(out.requires_grad, "the output is cut off from the graph", answer=out.detach(), read=GROUPS)
    out.backward(incoming)
    expected = incoming.view(1, 2, 3, 3, 2).sum(2)
    expect_close(x.grad, expected, atol=1e-6, name="x.grad", answer=out.detach(), read=GROUPS)


# ---- KVCache ---------------------------------------------------------------------------------------------------------


def numbers(*values: float) -> Tensor:
    """``[1, 1, T, 1]``"""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def test_KVCache_by_hand():
    cache = attention.KVCache(1, 1, 5, 1)
    case("max_len=5: the first update, keys 1 2 and values 10 20")
    out = cache.update(numbers(1, 2), numbers(10, 20))
    expect_close(out, (numbers(1, 2), numbers(10, 20)), read=CACHE)
    answer, attributes = [*out, cache.length], "the contract, under Attributes"
    expect_equal(cache.length, 2, name="length", answer=answer, read=attributes)
    case("max_len=5: the second update, key 3 and value 30")
    out = cache.update(numbers(3), numbers(30))
    expect_close(out, (numbers(1, 2, 3), numbers(10, 20, 30)), read=CACHE)
    expect_equal(cache.length, 3, name="length", answer=[*out, cache.length], read=attributes)
    case("max_len=5: the third update fills it, keys 4 5 and values 40 50")
    out = cache.update(numbers(4, 5), numbers(40, 50))
    expect_close(out, (numbers(1, 2, 3, 4, 5), numbers(10, 20, 30, 40, 50)), read=CACHE)
    expect_equal(cache.length, 5, name="length", answer=[*out, cache.length], read=attributes)


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1), (3, 1, 4, 2), (10,), (1, 9)])
def test_KVCache_equals_concatenation(chunks):
    cache, n = attention.KVCache(2, 3, 10, 4), 0
    k, v = randn(2, 3, 10, 4), randn(2, 3, 10, 4, seed=1)
    for chunk in chunks:
        case(f"b=2 g=3 max_len=10 d=4: {chunk} more after {n}, of chunks {chunks}")
        out = cache.update(k[:, :, n : n + chunk], v[:, :, n : n + chunk])
        n += chunk
        expect_close(out, (k[:, :, :n], v[:, :, :n]), atol=0.0, rtol=0.0, read=CACHE)
        expect_equal(cache.length, n, name="length", answer=out, read="the contract")


def test_KVCache_returns_views_of_its_own_memory():
    case("b=2 g=1 max_len=6 d=3: the address of the result")
    cache = attention.KVCache(2, 1, 6, 3)
    own = [x.data_ptr() for x in (cache.keys, cache.values)]
    for n in (2, 1):
        out = cache.update(randn(2, 1, n, 3), randn(2, 1, n, 3, seed=1))
        problem = "the result is a copy: it is not in the memory that was allocated at the start"
        there = [x.data_ptr() for x in out]
        answer = [*out, cache.keys]
        expect_true(there == own, problem, answer=answer, read="the contract, under Returns")


def test_KVCache_never_copies_the_past():
    written = {}
    for past in (2, 50):
        case(f"b=1 g=2 max_len=64 d=3: one position after {past}, the numbers written")
        cache = attention.KVCache(1, 2, 64, 3)
        cache.update(randn(1, 2, past, 3), randn(1, 2, past, 3, seed=1))
        with Ledger() as ledger:
            out = cache.update(randn(1, 2, 1, 3, seed=2), randn(1, 2, 1, 3, seed=3))
        written[past] = ledger.n_written
    problem = f"{written[2]} numbers are written after 2 positions and {written[50]} after 50: the past is copied"
    expect_true(written[2] == written[50], problem, answer=out, read=CACHE)


@pytest.mark.parametrize(("held", "more"), [(0, 50), (30, 20), (40, 10), (20, 70)])
def test_KVCache_refuses_what_does_not_fit(held, more):
    case(f"max_len=40, holds {held}: {more} more")
    raises, cache = "the contract, under Raises", attention.KVCache(1, 1, 40, 2)
    k, v = randn(1, 1, 40, 2), randn(1, 1, 40, 2, seed=1)
    if held:
        cache.update(k[:, :, :held], v[:, :, :held])
    before = [cache.keys.clone(), cache.values.clone()]
    one_of = [(str(held), str(40 - held), str(held + more))] if held else []  # in use, free, or too many
    with expect_raises(ValueError, "40", str(more), *one_of, read=raises):
        cache.update(randn(1, 1, more, 2, seed=2), randn(1, 1, more, 2, seed=3))
    case(f"max_len=40, holds {held}, and refused {more} more: what it holds now")
    expect_equal(cache.length, held, name="length", read=raises)
    expect_close([cache.keys, cache.values], before, atol=0.0, rtol=0.0, name="keys and values", read=raises)
    if held < 40:
        case(f"max_len=40, holds {held}, and refused {more} more: {40 - held} that fit")
        out = cache.update(k[:, :, held:], v[:, :, held:])
        expect_close(out, (k, v), name="keys and values", read=raises)


@pytest.mark.parametrize(
    ("what", "k_shape", "v_shape", "wrong"),
    [
        ("a batch of one", [1, 2, 3, 5], [1, 2, 3, 5], "1, 2, 3, 5"),
        ("one head", [4, 1, 3, 5], [4, 1, 3, 5], "4, 1, 3, 5"),
        ("vectors of width one", [4, 2, 3, 1], [4, 2, 3, 1], "4, 2, 3, 1"),
        ("values of a batch of one", [4, 2, 3, 5], [1, 2, 3, 5], "1, 2, 3, 5"),
        ("values of one position less", [4, 2, 3, 5], [4, 2, 2, 5], "4, 2, 2, 5"),
        ("values of one position", [4, 2, 3, 5], [4, 2, 1, 5], "4, 2, 1, 5"),
    ],
    ids=["batch", "heads", "width", "values_batch", "values_less", "values_one"],
)
def test_KVCache_refuses_another_shape(what, k_shape, v_shape, wrong):
    case(f"b=4 g=2 max_len=7 d=5, holds 1: k {k_shape} and v {v_shape}, which is {what}")
    raises, cache = "the contract, under Raises", attention.KVCache(4, 2, 7, 5)
    cache.update(randn(4, 2, 1, 5), randn(4, 2, 1, 5, seed=1))
    before = [cache.keys.clone(), cache.values.clone()]
    with expect_raises(ValueError, wrong, ("4, 2, 3, 5", "4, 2, T, 5"), read=raises):
        cache.update(randn(*k_shape, seed=2), randn(*v_shape, seed=3))
    case(f"b=4 g=2 max_len=7 d=5, holds 1, and refused k {k_shape} and v {v_shape}: what it holds now")
    after = [cache.keys, cache.values]
    expect_close(after, before, atol=0.0, rtol=0.0, name="keys and values", answer=[*after, cache.length], read=raises)
    expect_equal(cache.length, 1, name="length", read=raises)


def test_KVCache_refuses_two_dimensions():
    case("b=4 g=2 max_len=7 d=5: k and v [3, 5], without batch and heads")
    cache = attention.KVCache(4, 2, 7, 5)
    with expect_raises(ValueError, "3, 5", read="the contract, under Raises"):
        cache.update(randn(3, 5), randn(3, 5, seed=1))


def test_KVCache_keeps_its_dtype():
    case("bfloat16: the dtype of the result")
    cache = attention.KVCache(1, 1, 3, 2, dtype=torch.bfloat16)
    k = randn(1, 1, 2, 2, dtype=torch.bfloat16)
    expect_close(cache.update(k, k), (k, k), atol=0.0, rtol=0.0, read="the contract")


def test_KVCache_lives_on_the_device_asked_for():
    case('device="meta": the devices that it asks for')
    with Devices() as devices:
        cache = attention.KVCache(1, 1, 3, 2, device="meta")
        asked = set(devices.asked)
        new = torch.ones(1, 1, 2, 2, device="meta")
        cache.update(new, new)
    read = "the contract, under Args"
    expect_true("meta" in asked, "no tensor is made on the device asked for", answer=asked, read=read)
    problem = f"{devices.mixed} gets tensors of two devices: the cache's, and another"
    expect_true(not devices.mixed, problem, answer=devices.mixed, read=read)


def test_KVCache_of_one_model_does_not_know_the_other():
    case("two caches, one update each")
    one, other = attention.KVCache(1, 1, 3, 1), attention.KVCache(1, 1, 3, 1)
    one.update(numbers(1, 2), numbers(1, 2))
    out = other.update(numbers(7), numbers(8))
    expect_close(out, (numbers(7), numbers(8)), read=CACHE)


# ---- MultiHeadAttention ----------------------------------------------------------------------------------------------


def make_layer(dim: int, n_heads: int, n_kv_heads: int | None = None, seed: int = 0) -> Any:
    layer = attention.MultiHeadAttention(dim, n_heads, n_kv_heads)
    for i, name in enumerate(("wq", "wk", "wv", "wo")):
        weight = getattr(layer, name).weight
        weight.data.copy_(randn(*weight.shape, seed=seed + i) * dim**-0.5 * 2)
    return layer


def make_angles(start: int, stop: int, head_dim: int) -> Tensor:
    frequencies = 100.0 ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    return torch.arange(start, stop, dtype=torch.float64)[:, None] * frequencies


def make_table(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring pairs of ``[B, H, T, D]`` turned by ``[T, D/2]``."""
    cos, sin, even, odd = angles.cos(), angles.sin(), x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def expected_of(weights, x: Tensor, n_heads: int, n_kv_heads: int, angles=None, mask=None) -> Tensor:
    """The layer in float64 on PyTorch's fused attention with grouped queries; weights are wq, wk, wv, wo."""
    wq, wk, wv, wo = weights
    x = x.double()
    q = (x @ wq.T).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k, v = ((x @ w.T).unflatten(-1, (n_kv_heads, -1)).transpose(1, 2) for w in (wk, wv))
    if angles is not None:
        q, k = turn(q, angles), turn(k, angles)
    return torch_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(2) @ wo.T


def weights_of(layer: nn.Module) -> list[Tensor]:
    return [getattr(layer, name).weight.detach().double() for name in ("wq", "wk", "wv", "wo")]


class Notes:
    """A cache that joins tensors and writes down what it was given."""

    def __init__(self):
        self.keys, self.values, self.length, self.given = [], [], 0, []

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(k)
        self.values.append(v)
        self.given.append((list(k.shape), list(v.shape)))
        self.length += k.shape[2]
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def test_MultiHeadAttention_by_hand():
    case("b=1 t=4 c=6 h=3: head i of position i weighs itself 2/5 and the others 1/5, the rest 1/4 each; wo reverses")
    layer = make_layer(6, 3)
    s = math.sqrt(math.sqrt(2) * math.log(2))
    for name, weight in {"wq": torch.eye(6), "wk": torch.eye(6), "wv": 20 / s * torch.eye(6)}.items():
        getattr(layer, name).weight.data.copy_(weight)
    layer.wo.weight.data.copy_(torch.eye(6).flip(0))
    x = torch.zeros(1, 4, 6)
    x[0, [0, 1, 2], [0, 2, 4]] = s
    expected = torch.tensor([[[0.0, 5, 0, 5, 0, 8], [0, 5, 0, 8, 0, 5], [0, 8, 0, 5, 0, 5], [0, 5, 0, 5, 0, 5]]])
    expect_close(layer(x).detach(), expected, atol=1e-4, read=HEADS)


@pytest.mark.parametrize(("c", "h", "g"), [(8, 2, None), (12, 6, 2), (12, 4, 1), (6, 1, 1)])
def test_MultiHeadAttention_has_these_weights(c, h, g):
    case(f"dim={c}, n_heads={h}, n_kv_heads={g}: names and shapes of its parameters")
    d, groups = c // h, g or h
    expected = {"wq.weight": [c, c], "wk.weight": [groups * d, c], "wv.weight": [groups * d, c], "wo.weight": [c, c]}
    actual = {name: list(p.shape) for name, p in attention.MultiHeadAttention(c, h, g).named_parameters()}
    expect_equal(actual, expected, name="parameters", read="the contract, under Attributes")


def test_MultiHeadAttention_equals_torch():
    for (b, t, c, h, g), causal in product(LAYERS, (False, True)):
        case(f"b={b} t={t} c={c} h={h} g={g}, {'causal mask' if causal else 'no mask'}")
        layer, x, mask = make_layer(c, h, g), randn(b, t, c, seed=9), lower(t, t) if causal else None
        expected = expected_of(weights_of(layer), x, h, g, mask=mask).float()
        expect_close(layer(x, mask=mask).detach(), expected, atol=1e-4, read=GROUPS if g < h else HEADS)


def test_MultiHeadAttention_turns_keys_by_their_position():
    case("b=1 t=3 d=4 h=2 g=2, with rope and a causal mask: the keys that the cache is given, [B, G, T, D]")
    layer, x, angles, cache = make_layer(8, 2), randn(1, 3, 8, seed=9), make_angles(0, 3, 4), Notes()
    expected = turn((x.double() @ weights_of(layer)[1].T).unflatten(-1, (2, 4)).transpose(1, 2), angles).float()
    out = layer(x, make_table(angles), lower(3, 3), cache).detach()
    keys = torch.cat([torch.zeros(1, 2, 0, 4), *cache.keys], dim=2).detach()
    expect_close(keys, expected, atol=1e-4, name="keys", answer=(keys, out), read='section "The layer"')


@pytest.mark.parametrize(("h", "g"), [(2, 2), (4, 2), (6, 1)])
def test_MultiHeadAttention_turns_queries_and_keys(h, g):
    case(f"b=2 t=5 d=4 h={h} g={g}, with rope and a causal mask")
    layer, x, angles = make_layer(4 * h, h, g), randn(2, 5, 4 * h, seed=9), make_angles(0, 5, 4)
    expected = expected_of(weights_of(layer), x, h, g, angles, lower(5, 5)).float()
    out = layer(x, rope=make_table(angles), mask=lower(5, 5)).detach()
    expect_close(out, expected, atol=1e-4, read=HEADS)


def test_MultiHeadAttention_sees_distance_only():
    case("b=1 t=6 d=8 h=2: the same table, 40 positions later")
    layer, x = make_layer(16, 2), randn(1, 6, 16, seed=9)
    near, far = (layer(x, rope=make_table(make_angles(n, n + 6, 8)), mask=lower(6, 6)).detach() for n in (0, 40))
    expect_close(far, near, atol=1e-4, answer=far, read="eq-rope-4")


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 1, 1, 4), (3, 4, 4)])
def test_MultiHeadAttention_broadcasts_the_mask(shape):
    case(f"b=2 t=4 c=6 h=3, mask {list(shape)}")
    layer, x, mask = make_layer(6, 3), randn(2, 4, 6, seed=9), random_mask(*shape)
    expected = expected_of(weights_of(layer), x, 3, 3, mask=mask).float()
    expect_close(layer(x, mask=mask).detach(), expected, atol=1e-4, read=ATTENTION)


def test_MultiHeadAttention_gives_the_cache_what_is_new():
    layer, cache = make_layer(24, 6, 2), Notes()
    for start, stop in ((0, 3), (3, 4)):
        where = f"positions {start} to {stop - 1}" if stop - start > 1 else f"position {start}"
        case(f"b=2 c=24 h=6 g=2 d=4: shapes of the keys and values given to the cache, {where}")
        out = layer(randn(2, stop - start, 24), make_table(make_angles(start, stop, 4)), None, cache).detach()
        shape = [2, 2, stop - start, 4]
        expect_equal(cache.given[-1:], [(shape, shape)], name="given", answer=out, read=CACHE)


def test_MultiHeadAttention_with_a_cache_equals_the_whole():
    for chunks, g, with_rope in product(CHUNKS, (1, 2, 4), (False, True)):
        layer, x, cache, n = make_layer(16, 4, g), randn(2, 7, 16, seed=9), Notes(), 0
        angles = make_angles(0, 7, 4) if with_rope else None
        expected = expected_of(weights_of(layer), x, 4, g, angles, lower(7, 7)).float()
        for chunk in chunks:
            new = "1 position" if chunk == 1 else f"{chunk} positions"
            case(f"b=2 c=16 h=4 g={g}, {new} after {n} in the cache{', with rope' if with_rope else ''}")
            rope = make_table(make_angles(n, n + chunk, 4)) if with_rope else None
            out = layer(x[:, n : n + chunk], rope, lower(chunk, n + chunk), cache).detach()
            expect_close(out, expected[:, n : n + chunk], atol=1e-4, read=CACHE)
            n += chunk


def test_MultiHeadAttention_without_a_mask_sees_the_whole_cache():
    case("b=1 c=8 h=2, 2 positions after 3 in the cache, no mask")
    layer, x, cache = make_layer(8, 2), randn(1, 5, 8, seed=9), Notes()
    layer(x[:, :3], cache=cache)
    out = layer(x[:, 3:], cache=cache).detach()
    expect_close(out, expected_of(weights_of(layer), x, 2, 2).float()[:, 3:], atol=1e-4, read=CACHE)


@pytest.mark.parametrize("args", [(100, 30), (120, 40, 30), (80, 20, 40)])
def test_MultiHeadAttention_refuses_what_does_not_divide(args):
    case(f"MultiHeadAttention{args}")
    two = args[:2] if args[0] % args[1] else args[1:]
    with expect_raises(ValueError, *map(str, two), read="the contract, under Raises"):
        attention.MultiHeadAttention(*args)


def test_MultiHeadAttention_passes_gradients_back():
    case("b=2 t=4 c=8 h=4 g=2, rope and causal mask: the gradients of wq, wk, wv, wo and x")
    layer, x, incoming = make_layer(8, 4, 2), randn(2, 4, 8, seed=9).requires_grad_(), randn(2, 4, 8, seed=10)
    angles, weights = make_angles(0, 4, 2), [w.requires_grad_() for w in weights_of(layer)]
    wide = x.detach().double().requires_grad_()
    expected_of(weights, wide, 4, 2, angles, lower(4, 4)).backward(incoming.double())
    out = layer(x, make_table(angles), lower(4, 4))
    out.backward(incoming)
    grads = [getattr(layer, name).weight.grad for name in ("wq", "wk", "wv", "wo")]
    still = [name for name, grad in zip(("wq", "wk", "wv", "wo"), grads, strict=True) if grad is None]
    expect_true(not still, f"{' and '.join(still)} got no gradient", answer=out.detach(), read=HEADS)
    expected = [w.grad.float() for w in (*weights, wide)]
    expect_close([*grads, x.grad], expected, atol=1e-4, name="grads", answer=out.detach(), read=HEADS)


def test_MultiHeadAttention_equals_torchs_layer():
    case("b=2 t=5 c=12 h=3: nn.MultiheadAttention with the same weights, whose mask is True where it hides")
    layer, x = make_layer(12, 3), randn(2, 5, 12, seed=9)
    theirs = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    theirs.in_proj_weight.data.copy_(torch.cat([layer.wq.weight, layer.wk.weight, layer.wv.weight]).data)
    theirs.out_proj.weight.data.copy_(layer.wo.weight.data)
    expected, _ = theirs(x, x, x, attn_mask=~lower(5, 5), need_weights=False)
    expect_close(layer(x, mask=lower(5, 5)).detach(), expected.detach(), atol=1e-4, read=HEADS)


@oracle
def test_MultiHeadAttention_goes_backward_through_one_update():
    case("b=2 t=5 c=8 h=4 g=2: gradients of a pass with a KVCache and of one without")
    layer, x = make_layer(8, 4, 2), randn(2, 5, 8, seed=9)
    grads = []
    for cache in (None, attention.KVCache(2, 2, 6, 2)):
        layer.zero_grad()
        layer(x, mask=lower(5, 5), cache=cache).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    expect_close(grads[1], grads[0], atol=1e-5, name="grads", read=CACHE)


@oracle
def test_MultiHeadAttention_properties():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=30, deadline=None, database=None, derandomize=True)
    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=5),
        st.sampled_from([(4, 4), (4, 2), (3, 1)]),
        st.integers(0, 99),
    )
    def holds(chunks, heads, seed):
        (h, g), total, n = heads, sum(chunks), 0
        layer, x = make_layer(4 * h, h, g, seed), randn(2, total, 4 * h, seed=seed + 9)
        expected = expected_of(weights_of(layer), x, h, g, make_angles(0, total, 4), lower(total, total)).float()
        cache = attention.KVCache(2, g, total, 4)
        with torch.no_grad():
            for chunk in chunks:
                case(f"h={h} g={g} seed={seed}, chunks {chunks}: {chunk} after {n}")
                out = layer(
                    x[:, n : n + chunk], make_table(make_angles(n, n + chunk, 4)), lower(chunk, n + chunk), cache
                )
                expect_close(out, expected[:, n : n + chunk], atol=1e-4, read=CACHE)
                n += chunk

    holds()
