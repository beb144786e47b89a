"""FlashAttention's tiles in PyTorch, graded against PyTorch's attention in float64, and by counting the numbers that
are kept.
"""

import math

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lib.given.kernels.exact import LargestTensor, exact, make_inputs
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

flash = graded("flash_attention")
pytestmark = pytest.mark.time_limit(30)

STANDARD, FLASH, UPDATE, LSE, BACKWARD = (f"eq-flash_attention-{n}" for n in (1, 2, 3, 4, 7))
NO_KEYS = "eq-flash_attention-6, and the lines after it about rows without keys"
TILES = "under 'Tiles in PyTorch'"
AUTOCAST = "the contract: sums are in float32 at least, even under autocast"
WIDE = "the hints of ex-flash-attention-online-softmax-update: the product with the values is taken in the dtype of acc"
WIDE_SUMS = "the contract: sums are in float32 at least"
ERRORS = "the contract, under Raises"
ELSEWHERE = "tensors made without `device=` are on 'meta' here, as they would be on the CPU if the inputs were on a GPU"
SHAPES = [  # q, k and v: one tile, shared heads with T < S, T > S, no heads, one query, no keys
    ((1, 2, 12, 8), (1, 2, 15, 8)),
    ((2, 6, 45, 24), (2, 2, 70, 24)),
    ((1, 3, 90, 16), (1, 1, 37, 16)),
    ((17, 12), (33, 12)),
    ((1, 2, 1, 16), (1, 2, 65, 16)),
    ((2, 3, 5, 8), (2, 3, 0, 8)),
]


def described(shapes, is_causal, what):
    n_empty = max(shapes[0][-2] - shapes[1][-2], 0) * (is_causal or shapes[1][-2] == 0)
    empty = f"; the first {n_empty} rows see no key" if n_empty else ""
    return f"q {shapes[0]}, k and v {shapes[1]}, causal {is_causal}, {what}{empty}"


def refuses_a_second_derivative(attend, device="cpu"):
    """The gradient of a sum does not depend on what arrives from above, so `once_differentiable` lets it pass."""
    q, k, v, do = make_inputs((1, 2, 5, 8), (1, 2, 7, 8), torch.float32, device)
    q.requires_grad_()
    case("the gradient of o.sum() with respect to q, squared, and added to q.sum(): its derivative with respect to q")
    (grad,) = torch.autograd.grad(attend(q, k, v, True).sum(), q, create_graph=True)
    expect_close(grad.detach(), exact(q, k, v, torch.ones_like(do), True)["dq"].float(), atol=1e-5, read=BACKWARD)
    with expect_raises(RuntimeError, read=ERRORS):
        torch.autograd.grad(grad.square().sum() + q.sum(), q)


# ---- attention_io_bytes ----------------------------------------------------------------------------------------------


def test_attention_io_bytes_by_hand():
    case("N=8, d=2, M=32 numbers, standard")
    found = flash.attention_io_bytes(8, 2, 64, "standard")
    expect_equal(found, 2 * (4 * 8 * 2 + 4 * 64), read=STANDARD)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read=STANDARD)
    case("N=24, d=2, M=32 numbers, flash: blocks of 4 keys, so six passes")
    expect_equal(flash.attention_io_bytes(24, 2, 64, "flash"), 2 * (2 * 24 * 2 + 6 * (3 * 24 * 2 + 4 * 24)), read=FLASH)
    case("N=9, d=2, M=33 numbers: blocks of ceil(33 / 8) = 5 keys, so two passes, the last for 4")
    expect_equal(flash.attention_io_bytes(9, 2, 66, "flash"), 2 * (2 * 9 * 2 + 2 * (3 * 9 * 2 + 4 * 9)), read=FLASH)
    case("N=3, d=2, M=5 numbers, fewer than 4d: blocks of ceil(5 / 8) = 1 key, so three passes")
    expect_equal(flash.attention_io_bytes(3, 2, 10, "flash"), 2 * (2 * 3 * 2 + 3 * (3 * 3 * 2 + 4 * 3)), read=FLASH)
    case("N=5, d=1, 9 bytes: M=4 whole numbers, blocks of 1 key, so five passes")
    expect_equal(flash.attention_io_bytes(5, 1, 9, "flash"), 2 * (2 * 5 + 5 * (3 * 5 + 4 * 5)), read=FLASH)


def test_attention_io_bytes_of_the_smallest_sizes():
    case("N=1, d=1, 2 bytes: the least that is allowed")
    expect_equal(flash.attention_io_bytes(1, 1, 2, "standard"), 16, read=STANDARD)
    expect_equal(flash.attention_io_bytes(1, 1, 2, "flash"), 18, read=FLASH)


def test_attention_io_bytes_errors():
    case("algorithm 'paged'")
    with expect_raises(ValueError, "paged", read=ERRORS):
        flash.attention_io_bytes(8, 2, 64, "paged")
    for length, head_dim, sram_bytes in ((0, 2, 64), (8, 0, 64), (8, 2, 1)):
        for algorithm in ("standard", "flash"):
            case(f"N={length}, d={head_dim}, {sram_bytes} bytes, {algorithm}")
            with expect_raises(ValueError, read=ERRORS):
                flash.attention_io_bytes(length, head_dim, sram_bytes, algorithm)


# ---- online_softmax_update -------------------------------------------------------------------------------------------


def start(rows, width, dtype=torch.float32):
    return (
        torch.full((rows,), -torch.inf, dtype=dtype),
        torch.zeros(rows, dtype=dtype),
        torch.zeros(rows, width, dtype=dtype),
    )


def test_online_softmax_update_by_hand():
    case("one row that has seen scores 0 and 0, then scores ln 2, ln 4 and 0")
    m, l, acc = torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[3.0, -8.0]])
    values = torch.tensor([[1.0, 0.0], [5.0, 2.0], [2.0, 4.0]])
    new = flash.online_softmax_update(m, l, acc, torch.tensor([[2.0, 4.0, 1.0]]).log(), values)
    expected = (torch.tensor([4.0]).log(), torch.tensor([2.25]), torch.tensor([[6.75, 1.0]]))
    expect_close(new, expected, read=UPDATE)
    old = (torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[3.0, -8.0]]))
    expect_close((m, l, acc), old, name="the old m, l and acc", read="the contract, under Returns")
    case("one row that has seen score 3 with value 7, then score 1 with value 2: the maximum stays")
    m, l, acc = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([[7.0]])
    new = flash.online_softmax_update(m, l, acc, torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    less = math.exp(-2)
    expect_close(new, (torch.tensor([3.0]), torch.tensor([1 + less]), torch.tensor([[7 + 2 * less]])), read=UPDATE)


def test_online_softmax_update_tile_by_tile():
    torch.manual_seed(0)
    scores, values = 30 * torch.randn(2, 5, 21, dtype=torch.float64) - 400, torch.randn(2, 21, 3, dtype=torch.float64)
    case("2 heads, 5 rows, 21 keys in tiles of 8, scores about -400")
    m, l, acc = (x.expand(2, *x.shape) for x in start(5, 3, torch.float64))
    for at in (0, 8, 16):
        m, l, acc = flash.online_softmax_update(m, l, acc, scores[..., at : at + 8], values[:, at : at + 8])
    expect_close(acc / l[..., None], scores.softmax(-1) @ values, name="acc / l", read=UPDATE)
    expect_close(m + l.log(), scores.logsumexp(-1), name="m + log l", read=UPDATE)


def test_online_softmax_update_hidden_keys_and_half_values():
    case(
        "row 0 has seen no key and sees none, row 1 sees its first, row 2 has seen one and sees none; values in float16"
    )
    scores = torch.full((3, 2), -torch.inf)
    scores[1, 0] = 1.0
    m, l, acc = start(3, 4)
    m[2], l[2], acc[2] = 5.0, 1.0, torch.tensor([1.0, 2.0, 3.0, 4.0])
    values = torch.arange(2.0, 10.0).view(2, 4)
    new = flash.online_softmax_update(m, l, acc, scores, values.half())
    expected = (
        torch.tensor([-torch.inf, 1.0, 5.0]),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.stack([torch.zeros(4), values[0], acc[2]]),
    )
    expect_close(new, expected, read=UPDATE)


def test_online_softmax_update_keeps_its_sums_wide():
    torch.manual_seed(0)
    scores, values = torch.randn(4, 64), torch.randn(64, 8).bfloat16()
    case("4 rows, 64 keys in tiles of 32, values in bfloat16; m, l, acc and scores in float32")
    m, l, acc = start(4, 8)
    for at in (0, 32):
        m, l, acc = flash.online_softmax_update(m, l, acc, scores[:, at : at + 32], values[at : at + 32])
    expected = (scores.double().softmax(-1) @ values.double()).float()
    expect_close(acc / l[:, None], expected, atol=1e-6, name="acc / l", answer=(m, l, acc), read=WIDE)


# ---- FlashAttentionTorch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_FlashAttentionTorch_is_attention(shapes, is_causal):
    case(described(shapes, is_causal, "float32"))
    q, k, v, do = make_inputs(*shapes)
    expect_close(
        flash.FlashAttentionTorch.apply(q, k, v, is_causal),
        exact(q, k, v, do, is_causal)["o"].float(),
        atol=2e-6,
        read=UPDATE,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_FlashAttentionTorch_dtypes(dtype):
    q, k, v, do = make_inputs((1, 2, 150, 16), (1, 2, 150, 16), dtype)
    case(f"T=S=150, D=16, {dtype}: sums in float32 at least")
    rounded = exact(q, k, v, do, True)["o"].to(dtype)
    eps = torch.finfo(dtype).eps
    expect_close(flash.FlashAttentionTorch.apply(q, k, v, True), rounded, atol=2 * eps, rtol=eps)


def test_FlashAttentionTorch_under_autocast():
    q, k, v, do = make_inputs((1, 2, 40, 16), (1, 1, 40, 16))
    case("float32 inputs under bfloat16 autocast on the CPU")
    with torch.autocast("cpu", torch.bfloat16):
        o = flash.FlashAttentionTorch.apply(q, k, v, True)
    expect_close(o, exact(q, k, v, do, True)["o"].float(), atol=2e-6, read=AUTOCAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_FlashAttentionTorch_saves_one_number_a_row(dtype):
    saved = []
    q, k, v, do = make_inputs((2, 3, 50, 16), (2, 3, 40, 16), dtype)
    case(f"q (2, 3, 50, 16), k and v (2, 3, 40, 16), causal, {dtype}: the first 10 rows see no key")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = flash.FlashAttentionTorch.apply(*leaves, True)
    rows = [x for x in saved if x.shape == q.shape[:-1]]
    expect_equal(
        sorted(tuple(x.shape) for x in saved),
        sorted([q.shape, k.shape, v.shape, o.shape, q.shape[:-1]]),
        name="saved shapes",
    )
    lse = exact(q, k, v, do, True)["lse"].to(torch.promote_types(dtype, torch.float32))
    expect_close(
        rows[0].detach(), lse, atol=1e-5 if dtype == torch.float16 else None, name="the saved logsumexp", read=LSE
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_FlashAttentionTorch_never_holds_the_scores(is_causal):
    q, k, v, _ = make_inputs((1, 1, 320, 16), (1, 1, 256, 16))
    case(f"T=320, S=256, D=16, causal {is_causal}")
    with LargestTensor() as largest:
        o = flash.FlashAttentionTorch.apply(q, k, v, is_causal)
    problem = f"a tensor of {largest.numbers} numbers was made; a quarter of T x S is {320 * 256 // 4}"
    expect_true(largest.numbers < 320 * 256 / 4, problem, answer=o, read=TILES)


def test_FlashAttentionTorch_skips_tiles_above_the_diagonal():
    q, k, v, _ = make_inputs((1, 1, 256, 16), (1, 1, 256, 16))
    flops = []
    for is_causal in (False, True):
        with FlopCounterMode(display=False) as counter:
            flash.FlashAttentionTorch.apply(q, k, v, is_causal)
        flops.append(counter.get_total_flops())
    case("T=S=256")
    problem = f"causal took {flops[1]} FLOPs and full {flops[0]}: the tiles above the diagonal were computed"
    expect_true(flops[1] <= 0.65 * flops[0], problem, answer=flops, read=TILES)


def test_FlashAttentionTorch_strides_and_errors():
    q, k, v, do = make_inputs((2, 20, 3, 16), (2, 20, 3, 16))
    q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
    case("q, k, v as [B, T, H, D] transposed")
    expect_close(flash.FlashAttentionTorch.apply(q, k, v, False), exact(q, k, v, do, False)["o"].float(), atol=2e-6)
    case(f"the same, causal; {ELSEWHERE}")
    found, leaf = [], q.clone().requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x.device.type) or x, lambda x: x),
        torch.device("meta"),
    ):
        o = flash.FlashAttentionTorch.apply(leaf, k, v, True)
    read = "the contract: it makes its tensors on the device of q"
    expect_equal({o.device.type, *found}, {"cpu"}, name="devices of out and of what is saved", read=read)
    expect_close(o.detach(), exact(q, k, v, do, True)["o"].float(), atol=2e-6, read=read)
    case("k and v narrower than q")
    with expect_raises(ValueError, read=ERRORS):
        flash.FlashAttentionTorch.apply(q, k[..., :8], v[..., :8], False)


def test_FlashAttentionTorch_refuses_a_second_derivative():
    refuses_a_second_derivative(flash.FlashAttentionTorch.apply)


@oracle
def test_FlashAttentionTorch_gradcheck():
    q, k, v, _ = make_inputs((1, 2, 21, 4), (1, 1, 18, 4), torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for is_causal in (False, True):
        attend = lambda *x, c=is_causal: flash.FlashAttentionTorch.apply(*x, c)
        assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def rounding_times(found, exact_values):
    """By how much the root mean square error of a result exceeds that of the exact one, rounded to its dtype."""
    error, rounded = (x.double() - exact_values for x in (found, exact_values.to(found.dtype)))
    return math.sqrt(error.square().mean() / rounded.square().mean())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_FlashAttentionTorch_rounds_once(dtype):
    q, k, v, do = make_inputs((1, 1, 384, 24), (1, 1, 384, 24), dtype)
    case(f"T=S=384, D=24, {dtype}: the error of o beside that of the exact output, rounded once")
    o = flash.FlashAttentionTorch.apply(q, k, v, False)
    times = rounding_times(o, exact(q, k, v, do, False)["o"])
    problem = f"the error is {times:.2f} times that of one rounding to {dtype}: something was rounded on the way"
    expect_true(times < 1.05, problem, answer=o, read=WIDE_SUMS)


# ---- flash_backward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_flash_backward_is_the_gradient(shapes, is_causal):
    case(described(shapes, is_causal, "float64"))
    q, k, v, do = make_inputs(*shapes, dtype=torch.float64)
    r = exact(q, k, v, do, is_causal)
    got = flash.flash_backward(q, k, v, r["o"], do, r["lse"], is_causal)
    expect_close(
        dict(zip(("dq", "dk", "dv"), got, strict=True)),
        {n: r[n] for n in ("dq", "dk", "dv")},
        atol=1e-10,
        read=NO_KEYS if r["lse"].isinf().any() else BACKWARD,
    )


def test_flash_backward_of_a_sum_and_memory():
    q, k, v, _ = make_inputs((1, 1, 256, 16), (1, 1, 320, 16))
    do = torch.ones(()).expand(1, 1, 256, 16)
    r = exact(q, k, v, do, True)
    case("the gradient of o.sum(), which has no memory of its own; T=256, S=320, causal")
    with LargestTensor() as largest:
        got = flash.flash_backward(q, k, v, r["o"].float(), do, r["lse"].float(), True)
    expect_close(got, tuple(r[n].float() for n in ("dq", "dk", "dv")), atol=5e-5, rtol=1e-4, read=BACKWARD)
    problem = f"a tensor of {largest.numbers} numbers was made; a quarter of T x S is {256 * 320 // 4}"
    expect_true(largest.numbers < 256 * 320 / 4, problem, answer=got, read=BACKWARD)


def test_flash_backward_of_any_strides():
    q, k, v, do = make_inputs((2, 3, 2, 20, 8), (2, 3, 1, 24, 8), torch.float64)
    r = exact(q, k, v, do, True)
    case(
        "q [2, 3, 2, 20, 8]; o and do as [3, 2, 2, 20, 8] with the first two dimensions exchanged, so that `view` fails"
    )
    o, do = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (r["o"], do))
    got = flash.flash_backward(q, k, v, o, do, r["lse"], True)
    expect_close(got, tuple(r[n] for n in ("dq", "dk", "dv")), atol=1e-10, read="the contract, under Args")
    case(f"the same; {ELSEWHERE}")
    with torch.device("meta"):
        got = flash.flash_backward(q, k, v, o, do, r["lse"], True)
    devices = dict(zip(("dq", "dk", "dv"), (x.device.type for x in got), strict=True))
    expect_equal(devices, dict.fromkeys(devices, "cpu"), name="devices", read="the contract, under Returns")
    expect_close(got, tuple(r[n] for n in ("dq", "dk", "dv")), atol=1e-10, read="the contract, under Returns")


def test_flash_backward_keeps_dtypes():
    q, k, v, do = make_inputs((1, 2, 40, 16), (1, 1, 40, 16), torch.bfloat16)
    r = exact(q, k, v, do, True)
    case("bfloat16")
    got = flash.flash_backward(q, k, v, r["o"].bfloat16(), do, r["lse"].float(), True)
    expect_close(got, tuple(r[n].bfloat16() for n in ("dq", "dk", "dv")), atol=0.03, rtol=0.03, read=BACKWARD)


def test_flash_backward_under_autocast():
    q, k, v, do = make_inputs((1, 2, 40, 16), (1, 1, 40, 16))
    r = exact(q, k, v, do, True)
    case("float32 inputs under bfloat16 autocast on the CPU")
    with torch.autocast("cpu", torch.bfloat16):
        got = flash.flash_backward(q, k, v, r["o"].float(), do, r["lse"].float(), True)
    expected = tuple(r[n].float() for n in ("dq", "dk", "dv"))
    expect_close(got, expected, atol=1e-5, rtol=1e-5, read=AUTOCAST)


def gradients_from(q, k, v, o, do, lse):
    """The gradients in float64, from the output and the logsumexp as they are given."""
    q, k, v, o, do = (x.double() for x in (q, k, v, o, do))
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (do @ v.mT - (o * do).sum(-1, keepdim=True))
    return {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ do}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_backward_rounds_once(dtype):
    q, k, v, do = make_inputs((1, 1, 384, 24), (1, 1, 384, 24), dtype)
    r = exact(q, k, v, do, False)
    o, lse = r["o"].to(dtype), r["lse"].float()
    case(f"T=S=384, D=24, {dtype}: the errors of dq, dk, dv beside those of the exact gradients, rounded once")
    got = flash.flash_backward(q, k, v, o, do, lse, False)
    for found, (name, expected) in zip(got, gradients_from(q, k, v, o, do, lse).items(), strict=True):
        times = rounding_times(found, expected)
        problem = (
            f"the error of {name} is {times:.2f} times that of one rounding to {dtype}: something was rounded on the "
            "way"
        )
        expect_true(times < 1.05, problem, answer=got, read=WIDE_SUMS)


def test_flash_backward_skips_tiles_above_the_diagonal():
    q, k, v, do = make_inputs((1, 1, 256, 16), (1, 1, 256, 16))
    flops = []
    for is_causal in (False, True):
        r = exact(q, k, v, do, is_causal)
        with FlopCounterMode(display=False) as counter:
            flash.flash_backward(q, k, v, r["o"].float(), do, r["lse"].float(), is_causal)
        flops.append(counter.get_total_flops())
    case("T=S=256")
    problem = f"causal took {flops[1]} FLOPs and full {flops[0]}: the tiles above the diagonal were computed"
    expect_true(flops[1] <= 0.65 * flops[0], problem, answer=flops, read=TILES)


# ---- flash_attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_with_gradients(is_causal):
    q, k, v, do = make_inputs((1, 4, 33, 20), (1, 2, 50, 20))
    r = exact(q, k, v, do, is_causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    case(f"q (1, 4, 33, 20), k and v (1, 2, 50, 20), causal {is_causal}")
    o = flash.flash_attention(*leaves, is_causal=is_causal)
    expect_close(o.detach(), r["o"].float(), atol=2e-6)
    expect_true(o.requires_grad, "the result is cut off from autograd: it has no gradient", answer=o)
    expect_close(
        torch.autograd.grad((o * do).sum(), leaves), tuple(r[n].float() for n in ("dq", "dk", "dv")), atol=1e-5
    )


def test_flash_attention_refuses_a_second_derivative():
    refuses_a_second_derivative(flash.flash_attention)


def test_flash_attention_errors():
    q, k, v, _ = make_inputs((1, 3, 20, 16), (1, 2, 20, 16))
    case("3 heads of queries, 2 of keys")
    with expect_raises(ValueError, read="the contract"):
        flash.flash_attention(q, k, v)
    q, k, v, _ = make_inputs((1, 2, 20, 16), (1, 2, 20, 16))
    case("whole numbers, int64: a mean of values that is cut to a whole number would be wrong")
    with expect_raises(ValueError, "int64", read="the contract"):
        flash.flash_attention(q.long(), k.long(), v.long())
    case("q on the CPU, k and v on the device meta, which has no memory")
    with expect_raises(ValueError, "meta", read="the contract"):
        flash.flash_attention(q, k.to("meta"), v.to("meta"))
    case("heads of width 0")
    with expect_raises(ValueError, read="the contract"):
        flash.flash_attention(q[..., :0], k[..., :0], v[..., :0])


def test_flash_attention_default_and_long_causal_alignment():
    q, k, v, do = make_inputs((7, 16), (7, 16))
    case("no is_causal given: every query sees every key")
    expect_close(flash.flash_attention(q, k, v), exact(q, k, v, do, False)["o"].float(), atol=2e-6)


def test_flash_attention_takes_pytorch_on_a_cpu():
    q, k, v, _ = make_inputs((1, 1, 40, 16), (1, 1, 40, 16))
    case("float32 tensors on the CPU: the FLOPs of PyTorch's matrix products, two products of 40 x 40 x 16 at least")
    with FlopCounterMode(display=False) as counter:
        flash.flash_attention(q, k, v)
    flops = counter.get_total_flops()
    problem = (
        f"PyTorch computed {flops} FLOPs: CPU tensors went to a Triton kernel, which only an interpreter can run there"
    )
    read = (
        "the contract of ex-flash-attention-flash-attention, under Returns: `FlashAttentionTriton` for other GPU "
        "tensors"
    )
    expect_true(flops >= 2 * 2 * 40 * 40 * 16, problem, answer=flops, read=read)


def test_flash_attention_under_autocast():
    q, k, v, do = make_inputs((1, 1, 40, 16), (1, 1, 40, 16))
    case("bfloat16 autocast on the CPU, float32 inputs")
    with torch.autocast("cpu", torch.bfloat16):
        o = flash.flash_attention(q, k, v, True)
    half = [x.bfloat16() for x in (q, k, v)]
    contract = "the contract: under autocast the inputs are cast to its dtype first, except float64"
    expect_close(o, exact(half[0], half[1], half[2], do, True)["o"].bfloat16(), atol=0.02, rtol=0.02, read=contract)
    case("bfloat16 autocast on the CPU, float64 inputs")
    q, k, v, do = make_inputs((1, 1, 40, 16), (1, 1, 40, 16), torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        o = flash.flash_attention(q, k, v, True)
    expect_close(o, exact(q, k, v, do, True)["o"], read=contract)
    case("bfloat16 autocast on the CPU, float32 queries, float64 keys and values: two dtypes after the cast")
    with torch.autocast("cpu", torch.bfloat16), expect_raises(ValueError, read=contract):
        flash.flash_attention(q.float(), k, v)


@oracle
@pytest.mark.parametrize("shapes", [((4, 2, 4, 16), (4, 2, 4, 16)), ((1, 2, 21, 4), (1, 1, 18, 4))], ids=str)
def test_flash_attention_takes_a_batch_of_gradients(shapes):
    """As PyTorch's own tests of attention do: their gradcheck maps the backward pass over a batch of gradients."""
    leaves = [x.requires_grad_() for x in make_inputs(*shapes, dtype=torch.float64)[:3]]
    attend = flash.flash_attention
    assert torch.autograd.gradcheck(lambda *x: attend(*x, True), leaves, fast_mode=True, check_batched_grad=True)


@oracle
def test_flash_attention_compiles():
    q, k, v, do = make_inputs((1, 2, 16, 16), (1, 2, 20, 16))  # one tile of queries, two of keys
    r = exact(q, k, v, do, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = flash.flash_attention
    o = torch.compile(lambda q, k, v: attend(q, k, v, True), backend="aot_eager")(*leaves)
    expect_close(o.detach(), r["o"].float(), atol=2e-6)
    expect_close(torch.autograd.grad(o, leaves, do), tuple(r[n].float() for n in ("dq", "dk", "dv")), atol=1e-5)


@pytest.mark.gpu
def test_flash_attention_on_a_gpu_is_as_exact_as_the_flash_backend():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for width, is_causal in ((64, True), (128, True), (64, False), (80, True)):
        q, k, v, do = make_inputs((2, 4, 512, width), (2, 4, 512, width), torch.bfloat16, "cuda")
        r = exact(q, k, v, do, is_causal)
        gaps = []
        for attend in (flash.flash_attention, F.scaled_dot_product_attention):
            leaves = a, b, c = [x.detach().requires_grad_() for x in (q, k, v)]
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                o = attend(a, b, c, is_causal=is_causal)
            got = (o.detach(), *torch.autograd.grad(o, leaves, do))
            gaps.append(
                [
                    math.sqrt((g.double() - r[n]).square().mean())
                    for g, n in zip(got, ("o", "dq", "dk", "dv"), strict=True)
                ]
            )
        case(f"width {width}, causal {is_causal}, bf16: root mean square errors of o, dq, dk, dv")
        expect_true(
            all(a <= 1.05 * b for a, b in zip(*gaps, strict=True)), f"ours {gaps[0]}, PyTorch's flash backend {gaps[1]}"
        )
