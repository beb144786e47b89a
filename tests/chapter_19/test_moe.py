"""Mixture of experts, graded: on one process first, then on 1 to 4 ranks.

The layer is compared with a loop over tokens and with Transformers' Mixtral and DeepSeek-V2; routing and losses with
those of Transformers;
products with PyTorch's; the layer on ranks with the layer on one process. The ledger counts what is sent.
"""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from lib.given.kernels.grouped import launch_grouped
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.moe import DEEPSEEK_V3, MIXTRAL_8X7B, MoEConfig
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.chapter_14.memory import Guarded, watched
from tests.inputs import randn

moe = graded("moe")

ROUTER, BALANCE, Z_LOSS, ORDER, GROUPED, GRADS, ROOM, BIAS, LAYER, COUNT = (f"eq-moe-{n}" for n in range(1, 11))
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
RAISES = "the contract, under Raises"
COST = "the contract, under Cost"
AUTOCAST_RULE = "the contract of forward: in the dtype of x, also under autocast"
FAR_FROM_TIES = (
    155  # a seed with which every token's second and third expert stay apart when logits are rounded to bfloat16
)


# ---- top_k_router ----------------------------------------------------------------------------------------------------


def test_top_k_router_by_hand():
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0], [4.0, 1.0, 1.0, 2.0]]).log()
    case("probabilities 1/15, 2/15, 4/15, 8/15 and 4/8, 1/8, 1/8, 2/8; k=2")
    weights, experts = moe.top_k_router(logits, 2)
    expect_equal(experts.tolist(), [[3, 2], [0, 3]], name="experts", read=ROUTER)
    expect_close(weights, torch.tensor([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]), name="weights", read=ROUTER)


def test_top_k_router_without_normalizing():
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).log()
    case("probabilities 1/15, 2/15, 4/15, 8/15; k=3, normalize=False")
    weights, experts = moe.top_k_router(logits, 3, normalize=False)
    expect_equal(experts.tolist(), [[3, 2, 1]], name="experts", read=ROUTER)
    expect_close(weights, torch.tensor([[8 / 15, 4 / 15, 2 / 15]]), name="weights", read=ROUTER)


def test_top_k_router_prefers_the_lower_index():
    case("40 experts with equal logits but for expert 30, which has more; k=3")
    logits = torch.zeros(2, 40)
    logits[:, 30] = 1.0
    _, experts = moe.top_k_router(logits, 3)
    expect_equal(experts.tolist(), [[30, 0, 1]] * 2, name="experts", read="the contract: of equal ones the lower index")


def test_top_k_router_chooses_no_expert_twice():
    case("logits 200, 0, 0, 0, whose probabilities are 1, 0, 0, 0 in float32; k=3")
    weights, experts = moe.top_k_router(torch.tensor([[200.0, 0.0, 0.0, 0.0]]), 3)
    expect_equal(experts.tolist(), [[0, 1, 2]], name="experts", read="the contract: of equal ones the lower index")
    expect_close(weights, torch.tensor([[1.0, 0.0, 0.0]]), name="weights", read=ROUTER)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_top_k_router_computes_in_float32(dtype):
    case(f"n=9 e=6 k=2, {dtype}")
    logits = (3 * randn(9, 6)).to(dtype)
    weights, experts = moe.top_k_router(logits, 2)
    wide = logits.float().softmax(-1)
    largest, expected = wide.topk(2)
    expect_equal(experts.dtype, torch.int64, name="dtype of experts", read="the contract, under Returns")
    expect_equal(experts.tolist(), expected.tolist(), name="experts", read=ROUTER)
    expect_close(weights, largest / largest.sum(-1, keepdim=True), name="weights", read="the contract: in float32")


@pytest.mark.parametrize(("n", "e", "k"), [(5, 4, 4), (5, 4, 1), (0, 3, 2)])
def test_top_k_router_of_all_and_of_none(n, e, k):
    case(f"n={n} e={e} k={k}")
    weights, experts = moe.top_k_router(randn(n, e), k)
    expect_equal((tuple(weights.shape), tuple(experts.shape)), ((n, k), (n, k)), name="shapes", read=ROUTER)
    expect_close(weights.sum(-1), torch.ones(n), name="sum of a token's weights", read=ROUTER)


@pytest.mark.parametrize("normalize", [True, False])
def test_top_k_router_gradients(normalize):
    case(f"n=4 e=5 k=2, normalize={normalize}: gradients of the weights")
    ours, theirs = (randn(4, 5).requires_grad_() for _ in range(2))
    weights, _ = moe.top_k_router(ours, 2, normalize=normalize)
    expected = theirs.softmax(-1).topk(2).values
    expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
    upstream = randn(4, 2, seed=1)
    expect_true(weights.requires_grad, "the weights have no gradient", answer=weights, read=ROUTER)
    expect_close(
        torch.autograd.grad(weights, ours, upstream)[0],
        torch.autograd.grad(expected, theirs, upstream)[0],
        name="the logits' gradient",
        read=ROUTER,
    )


@oracle
@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_router_is_transformers(k, normalize):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    case(f"n=33 e=7 k={k}, normalize={normalize}: the router of Transformers' Qwen3-MoE with an identity as its weight")
    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=7, num_experts=7, num_experts_per_tok=k, norm_topk_prob=normalize)
    )
    router.weight.data.copy_(torch.eye(7))
    ours, theirs = ((3 * randn(33, 7)).requires_grad_() for _ in range(2))
    weights, experts = moe.top_k_router(ours, k, normalize)
    _, their_weights, their_experts = router(theirs)
    expect_equal(experts.tolist(), their_experts.tolist(), name="experts", read=ROUTER)
    expect_close(weights, their_weights, name="weights", read=ROUTER)
    upstream = randn(33, k, seed=1)
    weights.backward(upstream)
    their_weights.backward(upstream)
    expect_close(ours.grad, theirs.grad, atol=1e-6, name="the logits' gradient", read=ROUTER)


@pytest.mark.parametrize("k", [0, 7])
def test_top_k_router_refuses(k):
    case(f"k={k} of 6 experts")
    with expect_raises(ValueError, str(k), "6", read=RAISES):
        moe.top_k_router(randn(2, 6), k)


# ---- load_balancing_loss ---------------------------------------------------------------------------------------------


def test_load_balancing_loss_by_hand():
    case("3 tokens, 2 experts, k=1: shares 2/3 and 1/3, mean probabilities 0.6 and 0.4")
    probabilities = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7]])
    answer = moe.load_balancing_loss(probabilities, torch.tensor([[0], [0], [1]]))
    expect_close(answer, torch.tensor(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4)), read=BALANCE)


def test_load_balancing_loss_of_any_strides():
    case("3 tokens, 2 experts, k=2, the experts as the transpose of another tensor: shares 1/2 and 1/2")
    probabilities = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7]])
    answer = moe.load_balancing_loss(probabilities, torch.tensor([[0, 0, 1], [1, 1, 0]]).T)
    expect_close(answer, torch.tensor(1.0), read=BALANCE)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_load_balancing_loss_is_one_in_balance(k):
    case(f"8 tokens, 4 experts, k={k}, everything even")
    experts = (torch.arange(8)[:, None] + torch.arange(k)) % 4
    answer = moe.load_balancing_loss(torch.full((8, 4), 0.25), experts)
    expect_close(answer, torch.tensor(1.0), read="the contract: shares are of the N * k assignments")


def test_load_balancing_loss_of_a_collapse():
    case("6 tokens, 3 experts, k=1, all with probability 1 to expert 2: the loss is E = 3")
    probabilities = functional.one_hot(torch.full((6,), 2), 3).float()
    expect_close(moe.load_balancing_loss(probabilities, torch.full((6, 1), 2)), torch.tensor(3.0), read=BALANCE)


def test_load_balancing_loss_gradient():
    case("5 tokens, 4 experts, k=2: gradient of the probabilities")
    probabilities = randn(5, 4).softmax(-1).requires_grad_()
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0], [1, 0]])
    loss = moe.load_balancing_loss(probabilities, experts)
    expect_true(loss.requires_grad, "the loss has no gradient", answer=loss, read=BALANCE)
    (grad,) = torch.autograd.grad(loss, probabilities)
    shares = torch.tensor([5.0, 3.0, 2.0, 0.0]) / 10
    expect_close(grad, (4 * shares / 5).expand(5, 4), name="the probabilities' gradient", read=BALANCE)


@oracle
@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@pytest.mark.parametrize("k", [1, 3])
def test_load_balancing_loss_is_transformers(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral
    from transformers.models.switch_transformers.modeling_switch_transformers import load_balancing_loss_func as switch

    case(
        f"n=33 e=7 k={k}: Transformers' loss of Mixtral divided by k, and for k = 1 that of Switch; values and "
        "gradients"
    )
    logits = 2 * randn(33, 7)
    experts = logits.topk(k).indices
    losses = [
        lambda x: moe.load_balancing_loss(x.softmax(-1), experts),
        lambda x: mixtral((x,), 7, k) / k,
        lambda x: switch(x.softmax(-1)[None], experts[None, :, 0]),
    ]
    answers = [torch.autograd.functional.vjp(loss, logits) for loss in losses[: 3 if k == 1 else 2]]
    for value, grad in answers[1:]:
        expect_close(answers[0][0], value, read=BALANCE)
        expect_close(answers[0][1], grad, atol=1e-7, name="the logits' gradient", read=BALANCE)


# ---- router_z_loss ---------------------------------------------------------------------------------------------------


def test_router_z_loss_by_hand():
    case("logsumexps log 4 and log 8")
    logits = torch.tensor([[1.0, 3.0], [6.0, 2.0]]).log()
    expect_close(moe.router_z_loss(logits), torch.tensor((math.log(4) ** 2 + math.log(8) ** 2) / 2), read=Z_LOSS)


def test_router_z_loss_of_large_logits():
    case("logits of 300 in float16: exp(300) is infinite in float32")
    answer = moe.router_z_loss(torch.full((2, 4), 300.0, dtype=torch.float16))
    expect_close(answer, torch.tensor((300 + math.log(4)) ** 2), rtol=1e-5, read="the contract: in float32")


def test_router_z_loss_gradient():
    case("n=6 e=5: gradient of the logits")
    ours, theirs = (randn(6, 5).requires_grad_() for _ in range(2))
    loss = moe.router_z_loss(ours)
    expect_true(loss.requires_grad, "the loss has no gradient", answer=loss, read=Z_LOSS)
    (grad,) = torch.autograd.grad(loss, ours)
    (expected,) = torch.autograd.grad(theirs.logsumexp(-1).square().mean(), theirs)
    expect_close(grad, expected, name="the logits' gradient", read=Z_LOSS)


@oracle
@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_router_z_loss_is_transformers():
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    case("n=33 e=7: Transformers' loss of Switch, value and gradient")
    (ours, grad), (theirs, their_grad) = (
        torch.autograd.functional.vjp(loss, 2 * randn(33, 7))
        for loss in (moe.router_z_loss, lambda x: router_z_loss_func(x[None]))
    )
    expect_close(ours, theirs, read=Z_LOSS)
    expect_close(grad, their_grad, name="the logits' gradient", read=Z_LOSS)


# ---- sort_by_expert --------------------------------------------------------------------------------------------------


def test_sort_by_expert_by_hand():
    case("tokens with experts (2, 0), (0, 3), (2, 3); E=5")
    order, counts = moe.sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    expect_equal(order.tolist(), [1, 2, 0, 4, 3, 5], name="order", read=ORDER)
    expect_equal(counts.tolist(), [2, 0, 2, 2, 0], name="counts", read=ORDER)


def test_sort_by_expert_of_any_strides():
    case("the same experts, as the transpose of another tensor: `view` cannot flatten them")
    order, counts = moe.sort_by_expert(torch.tensor([[2, 0, 2], [0, 3, 3]]).T, 5)
    expect_equal(order.tolist(), [1, 2, 0, 4, 3, 5], name="order", read=ORDER)
    expect_equal(counts.tolist(), [2, 0, 2, 2, 0], name="counts", read=ORDER)


def test_sort_by_expert_keeps_the_old_order():
    case("3,000 assignments to 7 experts: those of one expert stay in their old order")
    experts = torch.randint(7, (1500, 2), generator=torch.Generator().manual_seed(0))
    order, counts = moe.sort_by_expert(experts, 7)
    flat = experts.flatten().tolist()
    expected = sorted(range(3000), key=lambda i: flat[i])
    expect_equal(order.tolist(), expected, name="order", read="the contract: in their old order")
    expect_equal(counts.tolist(), [flat.count(e) for e in range(7)], name="counts", read=ORDER)


@pytest.mark.parametrize(("n", "k"), [(0, 2), (1, 1), (4, 3)])
def test_sort_by_expert_of_few(n, k):
    case(f"{n} tokens, k={k}, all to the last of 6 experts")
    order, counts = moe.sort_by_expert(torch.full((n, k), 5), 6)
    expect_equal(order.tolist(), list(range(n * k)), name="order", read=ORDER)
    expect_equal(counts.tolist(), [0, 0, 0, 0, 0, n * k], name="counts", read=ORDER)
    dtypes = (order.dtype, counts.dtype)
    expect_equal(dtypes, (torch.int64, torch.int64), name="dtypes", read="the contract, under Returns")


@pytest.mark.parametrize("expert", [-1, 6])
def test_sort_by_expert_refuses(expert):
    case(f"a token with experts 2 and {expert}, of 6")
    moe.sort_by_expert(torch.tensor([[2, 5]]), 6)
    with expect_raises(ValueError, f"expert {expert} of 6", read="the contract, under Args: experts"):
        moe.sort_by_expert(torch.tensor([[2, expert]]), 6)


# ---- grouped_matmul_kernel -------------------------------------------------------------------------------------------

KERNEL = [pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON), pytest.mark.time_limit(60)]
COUNTS = [[1], [20, 0, 33, 7], [0, 0, 16, 16, 1], [0, 50, 0], [3, 2, 1, 1, 2, 1, 1, 4, 1]]


def kernel_marks(test):
    for mark in KERNEL:
        test = mark(test)
    return test


def by_loop(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    parts = zip(x.double().split(counts), weights.double(), strict=True)
    return torch.cat([rows @ weight for rows, weight in parts]).to(x.dtype)


def run_kernel(x, weights, counts, read=GROUPED):
    with watched(read) as seen, Guarded() if INTERPRETED else nullcontext():  # fresh memory is full of NaN
        out = launch_grouped(moe.grouped_matmul_kernel, x, weights, torch.tensor(counts, device=x.device))
    n = int(out.isnan().sum())
    expect_true(n == 0, f"{n} of {out.numel()} numbers of the result are never written", answer=out, read=read)
    return out, seen


@kernel_marks
def test_grouped_matmul_kernel_by_hand():
    case("experts with 2, 0 and 1 rows of [1, 10], [2, 20], [3, 30]; matrices of ones, of twos and of threes")
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], device=DEVICE)
    weights = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)[:, None, None].expand(3, 2, 1).contiguous()
    out, _ = run_kernel(x, weights, [2, 0, 1])
    expect_close(out, torch.tensor([[11.0], [22.0], [99.0]], device=DEVICE), read=GROUPED)


@kernel_marks
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_grouped_matmul_kernel_of_ragged_groups(counts, dtype):
    case(f"counts {counts}, c=21 f=37, {dtype}")
    x = randn(sum(counts), 21).to(DEVICE, dtype)
    weights = randn(len(counts), 21, 37, seed=1).to(DEVICE, dtype)
    out, _ = run_kernel(x, weights, counts)
    eps = 4 * torch.finfo(dtype).eps
    expect_close(
        out, by_loop(x, weights, counts), atol=20 * eps if dtype == torch.float32 else 4 * eps, rtol=eps, read=GROUPED
    )


@kernel_marks
def test_grouped_matmul_kernel_adds_in_float32():
    case("one row of ones, c=144, a float16 matrix with 2048 first and then a 1 in every 16 rows: the sum is 2048 + 8")
    weights = torch.zeros(1, 144, 1, dtype=torch.float16, device=DEVICE)
    weights[0, ::16] = 1
    weights[0, 0] = 2048
    out, _ = run_kernel(torch.ones(1, 144, dtype=torch.float16, device=DEVICE), weights, [1])
    expect_close(out, torch.full((1, 1), 2056, dtype=torch.float16, device=DEVICE), read="the contract: in float32")


@kernel_marks
def test_grouped_matmul_kernel_of_other_strides():
    counts = [5, 0, 18]
    x, weights = randn(17, 23).T.to(DEVICE), randn(3, 32, 17, seed=1)[:, :30].transpose(1, 2).to(DEVICE)
    case(f"counts {counts}, c=17 f=30, both operands transposed, the matrices cut out of larger ones")
    out, _ = run_kernel(x, weights, counts)
    expect_close(out, by_loop(x, weights, counts), atol=1e-5, read="the contract, under Args: the strides")


@kernel_marks
@pytest.mark.skipif(not INTERPRETED, reason="accesses are followed in Triton's interpreter")
def test_grouped_matmul_kernel_of_a_large_stack(tmp_path):
    case("3 matrices [2, 2] of float16, 2**30 numbers apart: the last one is 2**31 numbers after weights")
    sparse = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + 4, dtype=torch.float16)
    weights = sparse.as_strided((3, 2, 2), (2**30, 2, 1))
    weights.copy_(randn(3, 2, 2, seed=1))
    x = randn(2, 2).half()
    out, _ = run_kernel(x, weights, [1, 0, 1])
    expect_close(out, by_loop(x, weights, [1, 0, 1]), atol=0.01, read="the contract, under Args: weights")


@kernel_marks
@pytest.mark.skipif(not INTERPRETED, reason="accesses are counted in Triton's interpreter")
def test_grouped_matmul_kernel_reads_only_what_it_needs():
    counts = [16, 0, 40, 8]
    case(
        f"counts {counts}, c=16 f=64, tiles of 16 rows: the expert without rows is never read, results are written once"
    )
    x, weights = randn(64, 16), randn(4, 16, 64, seed=1)
    out, seen = run_kernel(x, weights, counts)
    expect_close(out, by_loop(x, weights, counts), atol=1e-5, read=GROUPED)
    reads = seen.count(weights, stores=False)[:, 0, 0].tolist()
    expect_equal(reads, [1, 0, 3, 1], name="how often each expert's matrix is read", answer=out, read=GROUPED)
    writes = seen.count(out, stores=True)
    problem = f"each element of the result is stored once; they were stored {writes.min()} to {writes.max()} times"
    expect_true(writes.min() == writes.max() == 1, problem, answer=out, read=GROUPED)
    exact = {precision.lower() for dtype, precision in seen.dots if dtype == "fp32"} <= {"ieee"}
    expect_true(
        exact, "tl.dot of float32 tiles needs input_precision='ieee', else a GPU uses TF32", answer=out, read=GROUPED
    )


# ---- grouped_matmul --------------------------------------------------------------------------------------------------


def test_grouped_matmul_by_hand():
    case("experts with 1, 0 and 2 rows, float64")
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None].expand(3, 2, 1)
    answer = moe.grouped_matmul(x, weights, torch.tensor([1, 0, 2]))
    expect_close(answer, torch.tensor([[11.0], [66.0], [99.0]], dtype=torch.float64), read=GROUPED)


@pytest.mark.parametrize("counts", [*COUNTS, [0, 0]], ids=str)
def test_grouped_matmul_and_its_gradients(counts):
    case(f"counts {counts}, c=5 f=7, float64: values, then gradients")
    inputs = randn(sum(counts), 5, dtype=torch.float64), randn(len(counts), 5, 7, seed=1, dtype=torch.float64)
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    answer, expected = moe.grouped_matmul(*ours, torch.tensor(counts)), by_loop(theirs[0], theirs[1], counts)
    expect_close(answer, expected, read=GROUPED)
    upstream = randn(sum(counts), 7, seed=2, dtype=torch.float64)
    expect_true(answer.requires_grad, "the result has no gradient", answer=answer, read=GRADS)
    grads = torch.autograd.grad(answer, ours, upstream, allow_unused=True)
    missing = [name for name, grad in zip(("x", "weights"), grads, strict=True) if grad is None]
    expect_true(not missing, f"{' and '.join(missing)} got no gradient", answer=answer, read=GRADS)
    wanted = torch.autograd.grad(expected, theirs, upstream)
    expect_close(
        dict(zip(("x", "weights"), grads, strict=True)),
        dict(zip(("x", "weights"), wanted, strict=True)),
        name="gradients",
        read=GRADS,
    )


def test_grouped_matmul_is_one_step_of_autograd():
    case("counts [2, 3], float32: autograd sees one step, since on a GPU it could not see into your kernel")
    x, weights = randn(5, 8).requires_grad_(), randn(2, 8, 6, seed=1).requires_grad_()
    answer = moe.grouped_matmul(x, weights, torch.tensor([2, 3]))
    expect_true(answer.requires_grad, "the result has no gradient", answer=answer, read=GRADS)
    before = {type(step).__name__ for step, _ in answer.grad_fn.next_functions if step is not None}
    problem = f"before the result's step autograd recorded {', '.join(sorted(before))}; expected x and weights alone"
    expect_true(before == {"AccumulateGrad"}, problem, answer=answer, read=GRADS)


@pytest.mark.parametrize(("shape", "counts"), [((2, 7, 6), [2, 3]), ((2, 8, 6), [2, 4]), ((3, 8, 6), [2, 3])])
def test_grouped_matmul_refuses(shape, counts):
    case(f"x [5, 8], weights {list(shape)}, counts {counts}; and once what fits")
    moe.grouped_matmul(randn(5, 8), randn(2, 8, 6), torch.tensor([2, 3]))
    with expect_raises(ValueError, str(counts if shape == (2, 8, 6) else shape), read="the contract, under Returns"):
        moe.grouped_matmul(randn(5, 8), randn(*shape), torch.tensor(counts))


def test_grouped_matmul_keeps_the_dtype():
    case("counts [2, 3], float16")
    x, weights = randn(5, 8, dtype=torch.float16).to(DEVICE), randn(2, 8, 6, seed=1, dtype=torch.float16).to(DEVICE)
    answer = moe.grouped_matmul(x, weights, torch.tensor([2, 3], device=DEVICE))
    expect_close(answer, by_loop(x, weights, [2, 3]), atol=1e-2, rtol=1e-2, read=GROUPED)


AUTOCAST = {  # dtypes of x and of the matrices, and of their product under autocast to bfloat16
    "the second product of a layer": (torch.bfloat16, torch.float32, torch.bfloat16),
    "the first product of a layer": (torch.float32, torch.float32, torch.bfloat16),
    "float16": (torch.float16, torch.float32, torch.bfloat16),
    "float64 is left alone": (torch.float64, torch.float64, torch.float64),
}


@pytest.mark.time_limit(60)  # a GPU compiles
@pytest.mark.parametrize("name", AUTOCAST)
def test_grouped_matmul_under_autocast(name):
    dtypes, wanted = AUTOCAST[name][:2], AUTOCAST[name][2]
    case(f"{name}: x in {dtypes[0]}, matrices in {dtypes[1]}, counts [2, 0, 3], under autocast to bfloat16")
    inputs = [
        randn(*s, seed=i, dtype=d).to(DEVICE) for i, (s, d) in enumerate(zip(((5, 8), (3, 8, 6)), dtypes, strict=True))
    ]
    ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    counts = torch.tensor([2, 0, 3], device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        answer = moe.grouped_matmul(*ours, counts)
        expected = torch.cat(
            [rows @ weight for rows, weight in zip(theirs[0].split([2, 0, 3]), theirs[1], strict=True)]
        )
    read = "the contract, under Returns: autocast"
    expect_equal(answer.dtype, wanted, name="dtype of the product", answer=answer, read=read)
    expect_close(answer, expected, atol=0.05, rtol=0.02, read=read)
    upstream = randn(5, 6, seed=2, dtype=wanted).to(DEVICE)
    answer.backward(upstream)
    expected.backward(upstream)
    for gradient, mine, other in zip(("x", "weights"), ours, theirs, strict=True):  # each in the dtype of its input
        expect_close(mine.grad, other.grad, atol=0.05, rtol=0.02, name=f"gradient of {gradient}", read=GRADS)


def test_grouped_matmul_refuses_two_dtypes():
    case("x in float64, matrices in float32: without autocast, and under it, where float64 is left alone")
    x, weights, counts = randn(5, 8, dtype=torch.float64), randn(2, 8, 6), torch.tensor([2, 3])
    moe.grouped_matmul(x, weights.double(), counts)
    for enabled in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
            expect_raises(ValueError, "float64", "float32", read="the contract, under Returns"),
        ):
            moe.grouped_matmul(x, weights, counts)


@oracle
def test_grouped_matmul_is_pytorchs():
    counts = [16, 0, 33, 7]
    case(f"counts {counts}, c=32 f=16, bfloat16: PyTorch's grouped product, values and gradients")
    inputs = randn(56, 32, dtype=torch.bfloat16), randn(4, 32, 16, seed=1, dtype=torch.bfloat16)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    (ours, grads), (theirs, their_grads) = (
        torch.autograd.functional.vjp(product, inputs, randn(56, 16, seed=2, dtype=torch.bfloat16))
        for product in (lambda x, w: moe.grouped_matmul(x, w, torch.tensor(counts)),
                        lambda x, w: functional.grouped_mm(x, w, offs=ends))
    )  # fmt: skip
    expect_close(ours, theirs, atol=1e-2, rtol=1e-2, read=GROUPED)
    for name, mine, wanted in zip(("x", "weights"), grads, their_grads, strict=True):
        expect_close(mine, wanted, atol=1e-2, rtol=1e-2, name=f"gradient of {name}", read=GRADS)


def test_grouped_matmul_multiplies_no_more_than_it_must():
    case("counts [1, 0, 30, 1]: 32 rows take 32 x 8 x 6 multiplications, whatever the largest expert has")
    x, weights = randn(32, 8), randn(4, 8, 6, seed=1)
    with FlopCounterMode(display=False) as counter:
        answer = moe.grouped_matmul(x, weights, torch.tensor([1, 0, 30, 1]))
    n, needed = counter.get_total_flops(), 2 * 32 * 8 * 6
    expect_true(
        n <= needed, f"{n:,} FLOPs, but the rows need {needed:,}: nothing is padded", answer=answer, read=GROUPED
    )


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_matmul_on_a_gpu(dtype):
    counts = [0, 700, 13, 1, 0, 310]
    case(f"counts {counts}, c=200 f=136, {dtype}, on a GPU: values, then gradients, and the host does not wait")
    inputs = randn(1024, 200).to("cuda", dtype), randn(6, 200, 136, seed=1).to("cuda", dtype)
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    on_device = torch.tensor(counts, device="cuda")
    upstream = randn(1024, 136, seed=2).to("cuda", dtype)
    moe.grouped_matmul(*ours, on_device).backward(upstream)  # compiles
    ours = [x.detach().requires_grad_() for x in ours]
    try:
        torch.cuda.set_sync_debug_mode("error")
        answer = moe.grouped_matmul(*ours, on_device)
        answer.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = by_loop(theirs[0], theirs[1], counts)
    expected.backward(upstream)
    eps = torch.finfo(dtype).eps
    for name, mine, wanted in (
        ("out", answer, expected),
        *zip(("dx", "dw"), (x.grad for x in ours), (x.grad for x in theirs), strict=True),
    ):
        scale = wanted.abs().max().item()
        expect_close(mine, wanted, atol=4 * eps * scale + 1e-5 * scale, rtol=8 * eps, name=name, read=GRADS)


# ---- capacity_mask ---------------------------------------------------------------------------------------------------


def test_capacity_mask_by_hand():
    case("4 tokens, k=2, 4 experts, factor 1: room for 2 each; first choices 0, 0, 0, 1, second 1, 1, 2, 0")
    experts = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
    expected = [[True, True], [True, False], [False, True], [True, False]]
    expect_equal(moe.capacity_mask(experts, 4, 1.0).tolist(), expected, read=ROOM)


@pytest.mark.parametrize(("factor", "room"), [(1.0, 3), (1.1, 3), (1.2, 3), (1.25, 4), (0.4, 1), (2.0, 5), (8.0, 20)])
def test_capacity_mask_rounds_up(factor, room):
    case(f"5 tokens, k=2, 4 experts, factor {factor}: room for {room} each, all want experts 0 and 1")
    experts = torch.tensor([[0, 1]] * 5)
    expected = [[i < room, i < room] for i in range(5)]
    expect_equal(moe.capacity_mask(experts, 4, factor).tolist(), expected, read=ROOM)


def test_capacity_mask_of_many():
    case("97 tokens, k=3, 8 experts, factor 0.7, against a loop")
    experts = randn(97, 8).argsort(-1)[:, :3]
    room, used = math.ceil(0.7 * 97 * 3 / 8), [0] * 8
    expected = torch.zeros(97, 3, dtype=torch.bool)
    for choice in range(3):
        for token in range(97):
            expert = int(experts[token, choice])
            expected[token, choice] = used[expert] < room
            used[expert] += 1
    answer = moe.capacity_mask(experts, 8, 0.7)
    expect_equal(answer.tolist(), expected.tolist(), read=ROOM)
    expect_equal(answer.dtype, torch.bool, name="dtype", read="the contract, under Returns")


def test_capacity_mask_of_no_tokens():
    case("no tokens, k=2, 4 experts")
    answer = moe.capacity_mask(torch.zeros(0, 2, dtype=torch.int64), 4, 1.0)
    expect_equal((tuple(answer.shape), answer.dtype), ((0, 2), torch.bool), name="shape and dtype", read=ROOM)


@oracle
@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@pytest.mark.parametrize("room", [1, 6, 40])
def test_capacity_mask_is_transformers(room):
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router

    case(
        f"40 tokens, k=2, 5 experts with room for {room} each: the router of Transformers' NLLB-MoE, which serves "
        "first choices first"
    )
    more: dict[str, Any] = {"hidden_size": 5}
    config = NllbMoeConfig(
        **more, num_experts=5, expert_capacity=room, second_expert_policy="all", batch_prioritized_routing=False,
        normalize_router_prob_before_dropping=True, moe_eval_capacity_token_fraction=-1.0,
    )  # fmt: skip
    logits = randn(40, 5) + torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0])
    _, theirs = NllbMoeTop2Router(config).eval().route_tokens(logits.clone())
    experts = logits.topk(2).indices
    answer = moe.capacity_mask(experts, 5, room * 5 / 80)
    expect_equal(answer.tolist(), (theirs.gather(-1, experts) > 0).tolist(), read=ROOM)


# ---- update_router_bias ----------------------------------------------------------------------------------------------


def test_update_router_bias_by_hand():
    case("counts 8, 0, 4, 4 with mean 4; rate 0.1")
    bias = torch.tensor([0.5, 0.0, -0.2, 0.0])
    answer = moe.update_router_bias(bias, torch.tensor([8, 0, 4, 4]), 0.1)
    expect_close(answer, torch.tensor([0.4, 0.1, -0.2, 0.0]), read=BIAS)
    expect_close(bias, torch.tensor([0.5, 0.0, -0.2, 0.0]), name="bias afterwards", read="the contract: a new bias")


def test_update_router_bias_of_an_uneven_mean():
    case("counts 14, 0, 3, 4, 1, 0 with mean 3.67; rate 0.25")
    answer = moe.update_router_bias(torch.zeros(6), torch.tensor([14, 0, 3, 4, 1, 0]), 0.25)
    expect_close(answer, torch.tensor([-0.25, 0.25, 0.25, -0.25, 0.25, 0.25]), read=BIAS)


def test_update_router_bias_of_a_bias_in_bfloat16():
    case("counts 1001, 999, 1000 with mean 1000, all of which bfloat16 rounds to 1000; rate 0.25")
    bias = torch.zeros(3, dtype=torch.bfloat16)
    answer = moe.update_router_bias(bias, torch.tensor([1001, 999, 1000]), 0.25)
    expect_close(answer, torch.tensor([-0.25, 0.25, 0.0], dtype=torch.bfloat16), read=BIAS)


def test_update_router_bias_balances():
    case("2,000 tokens, 4 experts, logits of expert 0 higher by 2; 300 updates with rate 0.02")
    logits, bias = randn(2000, 4) + torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.zeros(4)
    for _ in range(300):
        bias = moe.update_router_bias(bias, torch.bincount((logits + bias).argmax(-1), minlength=4), 0.02)
    counts = torch.bincount((logits + bias).argmax(-1), minlength=4)
    problem = f"the experts end with {counts.tolist()} of 2,000 tokens: expected about 500 each"
    expect_true(counts.min() > 450 and counts.max() < 550, problem, answer=bias, read=BIAS)


# ---- MoE -------------------------------------------------------------------------------------------------------------


def make_moe(dim=6, hidden=5, n_experts=4, k=2, n_shared=0, dtype=torch.float64, seed=0):
    """The learner's layer with weights that are drawn here, and these weights."""
    layer = moe.MoE(dim, hidden, n_experts, k, n_shared=n_shared).to(dtype)
    shapes = {"router.weight": (n_experts, dim), "w1": (n_experts, dim, hidden), "w2": (n_experts, hidden, dim)}
    shapes |= {"w3": (n_experts, dim, hidden)}
    wide = n_shared * hidden
    shapes |= (
        {"shared.w1.weight": (wide, dim), "shared.w2.weight": (dim, wide), "shared.w3.weight": (wide, dim)}
        if n_shared
        else {}
    )
    found = {name: tuple(p.shape) for name, p in sorted(layer.named_parameters())}
    expect_equal(
        found, dict(sorted(shapes.items())), name="the parameters' shapes", read="the contract, under Attributes"
    )
    weights = {name: randn(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[name])
    return layer, weights


def swiglu(x, w1, w2, w3):
    return (functional.silu(x @ w1) * (x @ w3)) @ w2


def loop_over_tokens(x: Tensor, weights: dict[str, Tensor], k: int, bias=None) -> Tensor:
    """The layer in its plainest form: token by token, expert by expert."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = (weights["router.weight"] @ token).float()
        chosen = (logits if bias is None else logits + bias).topk(k).indices
        share = logits.softmax(-1)[chosen]
        share = (share / share.sum()).to(token.dtype)
        parts = [
            s * swiglu(token, *(weights[w][e] for w in ("w1", "w2", "w3"))) for s, e in zip(share, chosen, strict=True)
        ]
        row = sum(parts)
        if "shared.w1.weight" in weights:
            row = row + swiglu(token, *(weights[f"shared.{w}.weight"].T for w in ("w1", "w2", "w3")))
        rows.append(row)
    return torch.stack(rows).view_as(x) if rows else torch.zeros_like(x)


def compare_layer(layer, weights, x, k, bias=None, read=LAYER):
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    out, expected = layer(ours), loop_over_tokens(theirs, weights, k, bias)
    expect_close(out, expected, atol=1e-5, rtol=1e-5, read=read)  # the router's float32 leaves seven digits
    upstream = randn(*x.shape, seed=9, dtype=x.dtype)
    out.backward(upstream)
    (expected + 0 * sum(w.sum() for w in weights.values())).backward(upstream)
    expect_close(ours.grad, theirs.grad, name="x's gradient", atol=1e-5, rtol=1e-5, read=read)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    missing = [name for name, grad in grads.items() if grad is None]
    expect_true(not missing, f"{', '.join(missing)} got no gradient", answer=out, read=read)
    expect_close(grads, {name: weights[name].grad for name in grads}, name="gradients", atol=1e-5, rtol=1e-5, read=read)


def test_MoE_by_hand():
    case("one token [1], 2 experts of width 1, k=1: probability 1 for the expert that is chosen, so its SwiGLU alone")
    layer, _ = make_moe(1, 1, 2, 1)
    with torch.no_grad():
        for name, value in {
            "router.weight": [[1.0], [3.0]],
            "w1": [[[1.0]], [[2.0]]],
            "w3": [[[1.0]], [[5.0]]],
            "w2": [[[1.0]], [[7.0]]],
        }.items():
            layer.get_parameter(name).copy_(torch.tensor(value))
    expected = 7.0 * 5.0 * functional.silu(torch.tensor([[2.0]], dtype=torch.float64))
    expect_close(layer(torch.ones(1, 1, dtype=torch.float64)), expected, read=LAYER)


@pytest.mark.parametrize(("n_experts", "k"), [(4, 2), (4, 1), (3, 3), (1, 1)])
def test_MoE_equals_a_loop_over_tokens(n_experts, k):
    case(f"x [2, 5, 6], {n_experts} experts, k={k}, float64")
    layer, weights = make_moe(n_experts=n_experts, k=k)
    compare_layer(layer, weights, randn(2, 5, 6, seed=7, dtype=torch.float64), k)


def test_MoE_of_any_strides():
    case("x [2, 5, 6], the transpose of [5, 2, 6], float64: `view` cannot flatten its tokens")
    layer, _ = make_moe()
    x = randn(5, 2, 6, seed=7, dtype=torch.float64).transpose(0, 1)
    expect_close(layer(x), layer(x.contiguous()).detach(), read=LAYER)


@pytest.mark.parametrize("n_shared", [1, 2])
def test_MoE_with_shared_experts(n_shared):
    case(f"x [7, 6], 4 experts, k=2, {n_shared} shared, float64")
    layer, weights = make_moe(n_shared=n_shared)
    compare_layer(layer, weights, randn(7, 6, seed=7, dtype=torch.float64), 2)


def test_MoE_with_empty_experts():
    case("x [4, 6]: all tokens go to expert 3 of 5, k=1, so four experts are empty")
    layer, weights = make_moe(n_experts=5, k=1)
    weights["router.weight"][:] = 0
    weights["router.weight"][3] = 1
    layer.load_state_dict(layer.state_dict() | {"router.weight": weights["router.weight"]})
    compare_layer(layer, weights, randn(4, 6, seed=7, dtype=torch.float64).abs(), 1)


def test_MoE_of_no_tokens():
    case("x [0, 6]")
    layer, _ = make_moe()
    out = layer(torch.zeros(0, 6, dtype=torch.float64))
    expect_equal(tuple(out.shape), (0, 6), name="shape", read="the contract")


def test_MoE_bias_chooses_and_does_not_weight():
    case(
        "x [9, 6], 4 experts, k=2, router_bias [0, 9, 0, 0]: expert 1 is always chosen, with its own probability as "
        "weight"
    )
    layer, weights = make_moe()
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0])
    layer.router_bias.copy_(bias)
    compare_layer(layer, weights, randn(9, 6, seed=7, dtype=torch.float64), 2, bias, read=BIAS)
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    case("the same with router_bias [0.5, 0, -0.5, 0], which is added to the logits")
    layer.zero_grad()
    layer.router_bias.copy_(bias)
    compare_layer(layer, weights, randn(9, 6, seed=7, dtype=torch.float64), 2, bias, read=BIAS)


def test_MoE_starts_as_linear_layers_do():
    case("dim 16, width 64, 3 experts: weights within 1 / sqrt(width that comes in), a bias of zeros, no routing yet")
    layer = moe.MoE(16, 64, 3, 1)
    read = "the contract, under Attributes"
    for name, bound in (("w1", 16**-0.5), ("w3", 16**-0.5), ("w2", 64**-0.5)):
        w = getattr(layer, name).detach()
        for e in range(3):
            largest, spread = w[e].abs().max().item(), w[e].std().item() / bound
            problem = (
                f"{name}[{e}] has numbers up to {largest:.3f}; expected uniform ones between -{bound:.3f} and "
                f"{bound:.3f}"
            )
            even = 0.9 * bound < largest <= bound and 0.54 < spread < 0.62
            expect_true(even, problem, answer=(name, e), read=read)
    expect_true(not torch.equal(layer.w1, layer.w3), "w1 and w3 are the same numbers", answer=0, read=read)
    for name in ("w1", "w2", "w3"):
        w = getattr(layer, name)
        expect_true(not torch.equal(w[0], w[1]), f"{name} has the same numbers for all experts", answer=name, read=read)
    expect_true("router_bias" in layer.state_dict(), "the state dict has no router_bias", answer=0, read=read)
    expect_close(layer.router_bias, torch.zeros(3), name="router_bias", read=read)
    expect_equal(layer.routing, None, name="routing", read=read)


def test_MoE_routes_in_float32():
    case("x [8, 6] in bfloat16, 4 experts, k=2: the probabilities are float32, the result bfloat16")
    layer, weights = make_moe(dtype=torch.bfloat16)
    x = randn(8, 6, seed=7).bfloat16()
    out = layer(x)
    expect_equal(out.dtype, torch.bfloat16, name="dtype of the result", read=LAYER)
    expect_true(isinstance(layer.routing, tuple), "routing is no pair", answer=out, read="the contract: routing")
    expected = (x @ weights["router.weight"].T).float().softmax(-1)
    expect_close(layer.routing[0], expected, name="probabilities", read="the contract: in float32")


def test_MoE_keeps_the_routing():
    case("x [9, 6], 4 experts, k=2: what `routing` holds after a forward pass")
    layer, weights = make_moe(dtype=torch.float32)
    x = randn(9, 6, seed=7)
    layer(x)
    read = "the contract, under Attributes: routing"
    expect_true(isinstance(layer.routing, tuple) and len(layer.routing) == 2, "routing is no pair", answer=0, read=read)
    probabilities, experts = layer.routing
    expected = (x @ weights["router.weight"].T).softmax(-1)
    expect_close(probabilities, expected, name="probabilities", read=read)
    expect_true(probabilities.requires_grad, "the probabilities have no gradient", answer=probabilities, read=read)
    expect_equal(experts.tolist(), expected.topk(2).indices.tolist(), name="experts", read=read)
    expect_close(layer.router_bias, torch.zeros(4), name="router_bias after a forward pass", read=read)
    case("the same with router_bias [0, 9, 0, 0] and after eval(): the probabilities don't see it")
    layer.router_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    layer.eval()(-x)
    expected = (-x @ weights["router.weight"].T).softmax(-1)
    expect_close(layer.routing[0], expected, name="probabilities", read=read)


def test_MoE_is_copied_without_its_routing():
    case("a layer after a forward pass, copied by copy.deepcopy: the routing, part of a graph, stays behind")
    layer, _ = make_moe()
    x = randn(8, 6, seed=7, dtype=torch.float64)
    out = layer(x)
    other = copy.deepcopy(layer)
    expect_true(
        other.routing is None, "the copy has the routing", answer=out, read="the contract, under Attributes: routing"
    )
    expect_true(
        layer.routing is not None,
        "the layer has lost its routing",
        answer=out,
        read="the contract, under Attributes: routing",
    )
    expect_close(other(x), out, name="the copy's output", read=LAYER)


@pytest.mark.parametrize("n_shared", [0, 1])
def test_MoE_under_autocast(n_shared):
    case(f"x [2, 5, 6] in float32, 4 experts, k=2, {n_shared} shared, under autocast to bfloat16")
    layer, weights = make_moe(n_shared=n_shared, dtype=torch.float32)
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    ours, theirs = (randn(2, 5, 6, seed=FAR_FROM_TIES).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = layer(ours), loop_over_tokens(theirs, weights, 2)
    expect_equal(out.dtype, torch.float32, name="dtype", answer=out, read=AUTOCAST_RULE)
    expect_close(out, expected.to(out.dtype), **loosely(expected), read=AUTOCAST_RULE)
    upstream = randn(2, 5, 6, seed=9)
    out.backward(upstream)
    expected.backward(upstream.to(expected.dtype))
    expect_close(ours.grad, theirs.grad, **loosely(theirs.grad), name="x's gradient", read=AUTOCAST_RULE)
    for name, parameter in layer.named_parameters():
        wanted = weights[name].grad
        expect_close(parameter.grad, wanted, **loosely(wanted), name=f"gradient of {name}", read=AUTOCAST_RULE)


def loosely(expected: Tensor) -> dict[str, Any]:
    """Tolerances for three products in a row in bfloat16, each with eight bits."""
    return {"rtol": 0.03, "atol": 0.01 * expected.detach().abs().max().item()}


def mixtral_block(dim, hidden, n_experts, k):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden, num_local_experts=n_experts, num_experts_per_tok=k
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(block.named_parameters())):
            parameter.copy_(randn(*parameter.shape, seed=i))
    return block


def joined_weights(dim=6, hidden=5, n_experts=4):
    """The state dict of Transformers' block as the installed library has it: the numbers that `mixtral_block` draws."""
    shapes = {
        "experts.down_proj": (n_experts, dim, hidden),
        "experts.gate_up_proj": (n_experts, 2 * hidden, dim),
        "gate.weight": (n_experts, dim),
    }
    return {name: randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_MoE_equals_mixtral():
    case("x [2, 5, 6], 4 experts of width 5, k=2, with the weights of Transformers' block")
    layer, _ = make_moe(dtype=torch.float32)
    layer.load_state_dict(expected_conversion(joined_weights()))
    x = randn(2, 5, 6, seed=7).requires_grad_()
    out = layer(x)
    out.backward(randn(2, 5, 6, seed=8))

    def theirs():
        block = mixtral_block(6, 5, 4, 2)
        y = randn(2, 5, 6, seed=7).requires_grad_()
        result = block(y)
        result.backward(randn(2, 5, 6, seed=8))
        return torch.stack([result.detach(), y.grad])

    value, grad = recorded("mixtral_values_and_gradients", theirs)
    expect_close(out, value, atol=1e-4, rtol=1e-4, read=LAYER)
    expect_close(x.grad, grad, atol=1e-4, rtol=1e-4, name="x's gradient", read=LAYER)


@oracle
@pytest.mark.time_limit(60)
def test_MoE_equals_mixtral_under_autocast():
    case("x [2, 5, 6], 4 experts of width 5, k=2, with the weights of Transformers' block, under autocast to bfloat16")
    layer, _ = make_moe(dtype=torch.float32)
    block = mixtral_block(6, 5, 4, 2)
    layer.load_state_dict(expected_conversion(block.state_dict()))
    ours, theirs = (randn(2, 5, 6, seed=FAR_FROM_TIES).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = layer(ours), block(theirs)
    expect_close(out, expected, **loosely(expected), read=AUTOCAST_RULE)
    for result in (out, expected):
        result.backward(randn(2, 5, 6, seed=8))
    expect_close(ours.grad, theirs.grad, **loosely(theirs.grad), name="x's gradient", read=AUTOCAST_RULE)
    grads = expected_conversion({name: p.grad for name, p in block.named_parameters()})
    for name, parameter in layer.named_parameters():
        expect_close(
            parameter.grad, grads[name], **loosely(grads[name]), name=f"gradient of {name}", read=AUTOCAST_RULE
        )


@oracle
@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@pytest.mark.parametrize("k", [1, 2, 4])
def test_MoE_equals_deepseek(k):
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    case(
        f"x [2, 5, 6], 4 experts of width 5, k={k}, 2 shared: Transformers' DeepSeek-V2, whose weights are not "
        "divided by their sum"
    )
    config = DeepseekV2Config(
        hidden_size=6, moe_intermediate_size=5, n_routed_experts=4, num_experts_per_tok=k, n_shared_experts=2,
        num_attention_heads=1, num_key_value_heads=1, topk_method="greedy", routed_scaling_factor=1.0,
        n_group=1, topk_group=1,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block, (layer, weights) = DeepseekV2Moe(config).double(), make_moe(k=k, n_shared=2)
    state = {"gate.weight": weights["router.weight"], "experts.down_proj": weights["w2"].transpose(1, 2)}
    state["experts.gate_up_proj"] = torch.cat([weights["w1"], weights["w3"]], dim=2).transpose(1, 2)
    for name, w in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        state[f"shared_experts.{name}_proj.weight"] = weights[f"shared.{w}.weight"]
    block.load_state_dict(state)
    ours, theirs = (randn(2, 5, 6, seed=7, dtype=torch.float64).requires_grad_() for _ in range(2))
    shared = layer.shared(ours)
    out = layer(ours)
    probabilities, experts = layer.routing
    out = (out - shared) * probabilities.gather(-1, experts).sum(-1).view(2, 5, 1) + shared
    expected = block(theirs)
    expect_close(out, expected, atol=1e-5, rtol=1e-5, read=LAYER)
    upstream = randn(2, 5, 6, seed=9, dtype=torch.float64)
    out.backward(upstream)
    expected.backward(upstream)
    expect_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5, name="x's gradient", read=LAYER)
    router, their_router = layer.router.weight.grad, block.gate.weight.grad
    expect_close(router, their_router, atol=1e-5, rtol=1e-5, name="the router's gradient", read=LAYER)


# ---- convert_hf_state_dict -------------------------------------------------------------------------------------------


def expected_conversion(state):
    gates, values = state["experts.gate_up_proj"].chunk(2, dim=1)
    return {
        "router.weight": state["gate.weight"],
        "router_bias": torch.zeros(len(gates)),
        "w1": gates.transpose(1, 2),
        "w2": state["experts.down_proj"].transpose(1, 2),
        "w3": values.transpose(1, 2),
    }


def single_weights(state):
    """The same weights as checkpoints on the hub have them: a matrix for each expert and name."""
    gates, values = state["experts.gate_up_proj"].chunk(2, dim=1)
    found = {"gate.weight": state["gate.weight"]}
    for e in range(len(gates)):
        for name, part in {"w1": gates, "w2": state["experts.down_proj"], "w3": values}.items():
            found[f"experts.{e}.{name}.weight"] = part[e]
    return found


def are_contiguous(answer):
    strided = [name for name, t in answer.items() if not t.is_contiguous()]
    expect_equal(strided, [], name="weights that are not contiguous", read="the contract, under Returns")


def test_convert_hf_state_dict_of_joined_experts():
    case("12 experts of width 5, dim 6, as the installed library keeps them")
    state = joined_weights(n_experts=12)
    before = {name: t.clone() for name, t in state.items()}
    answer = moe.convert_hf_state_dict(state)
    expect_close(dict(sorted(answer.items())), expected_conversion(state), read="the contract")
    are_contiguous(answer)
    lost = [name for name in before if name not in state]
    expect_equal(
        lost, [], name="names that the dictionary given has lost", answer=answer, read="the contract: left unchanged"
    )
    expect_close(state, before, name="the weights given, afterwards", read="the contract: left unchanged")


def test_convert_hf_state_dict_of_single_experts():
    case("12 experts of width 5, dim 6, as the hub keeps them: expert 10 comes after expert 9")
    state = joined_weights(n_experts=12)
    answer = moe.convert_hf_state_dict(dict(sorted(single_weights(state).items())))
    expect_close(dict(sorted(answer.items())), expected_conversion(state), read="the contract")
    are_contiguous(answer)


def test_convert_hf_state_dict_keeps_dtypes():
    case("12 experts of width 5, dim 6, in bfloat16, as both keep them")
    state = {name: t.bfloat16() for name, t in joined_weights(n_experts=12).items()}
    for kept in (state, single_weights(state)):
        answer = moe.convert_hf_state_dict(kept)
        changed = {name: t.dtype for name, t in answer.items() if name != "router_bias" and t.dtype != torch.bfloat16}
        expect_equal(changed, {}, name="weights of another dtype", answer=answer, read="the contract, under Returns")


def test_convert_hf_state_dict_refuses_an_expert_too_few():
    case("a router for 4 experts, and all names of expert 3 are missing")
    gone = [f"experts.3.{w}.weight" for w in ("w1", "w2", "w3")]
    with expect_raises(ValueError, *gone, read=RAISES):
        moe.convert_hf_state_dict({n: t for n, t in single_weights(joined_weights()).items() if n not in gone})


@pytest.mark.parametrize("gone", ["gate.weight", "experts.down_proj", "experts.gate_up_proj", "experts.2.w3.weight"])
def test_convert_hf_state_dict_refuses(gone):
    state = single_weights(joined_weights()) if "w3" in gone else joined_weights()
    case(f"without {gone}, and with router.scale too many")
    changed = {name: t for name, t in state.items() if name != gone} | {"router.scale": torch.ones(1)}
    with expect_raises(ValueError, gone, "router.scale", read=RAISES):
        moe.convert_hf_state_dict(changed)


def test_convert_hf_state_dict_refuses_a_name_too_many():
    case("nothing is missing, and router.scale is too many")
    with expect_raises(ValueError, "router.scale", read=RAISES):
        moe.convert_hf_state_dict(joined_weights() | {"router.scale": torch.ones(1)})


# ---- dispatch --------------------------------------------------------------------------------------------------------

ROUTES = {  # for each rank its tokens' experts, of four
    2: [[[0, 3], [2, 1], [3, 0]], [[3, 2]]],
    4: [[[0, 1], [3, 2]], [], [[3, 0], [3, 1], [3, 2]], [[1, 0]]],
}


def tokens_of(rank, routes):
    """Token i of rank r is the number 10 r + i, twice."""
    return (10.0 * rank + torch.arange(len(routes[rank]), dtype=torch.float64))[:, None].expand(-1, 2).contiguous()


def experts_of(rank, routes):
    return torch.tensor(routes[rank], dtype=torch.int64).reshape(-1, 2)


def rows_for(expert, routes):
    """The tokens that want an expert, by rank and by their order there."""
    return [10.0 * r + i for r, tokens in enumerate(routes) for i, token in enumerate(tokens) if expert in token]


def dispatch_on_ranks(rank, world_size):
    routes = ROUTES[world_size]
    case(f"4 experts on {world_size} ranks; tokens 10 r + i with experts {routes}; rank {rank}")
    x = tokens_of(rank, routes).requires_grad_()
    rows, counts, _ = moe.dispatch(x, experts_of(rank, routes), 4)
    local = range(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    expect_equal(counts.tolist(), [len(rows_for(e, routes)) for e in local], name="counts", read=ORDER)
    expect_equal(counts.dtype, torch.int64, name="dtype of counts", read="the contract, under Returns: counts")
    wanted = [t for e in local for t in rows_for(e, routes)]
    expect_close(
        rows,
        torch.tensor(wanted, dtype=torch.float64)[:, None].expand(-1, 2),
        name="rows",
        read="the contract, under Returns: rows",
    )
    case(f"the same; rank {rank}: the gradient of a row is the number of its expert")
    upstream = torch.tensor([float(e) for e in local for _ in rows_for(e, routes)], dtype=torch.float64)
    expect_true(rows.requires_grad, "the rows have no gradient", answer=rows, read="the contract: differentiable in x")
    rows.backward(upstream[:, None].expand(-1, 2))
    expected = experts_of(rank, routes).sum(-1).double()[:, None].expand(-1, 2)
    expect_close(x.grad, expected, name="x's gradient", read="the contract: differentiable in x")


def exchanges(ledger) -> list[int]:
    """Bytes of each all-to-all; another collective is not expected."""
    return [record.n_bytes for record in ledger.records if record.op != "new_group"]


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_dispatch_on_ranks(ranks, n_ranks):
    result = ranks(dispatch_on_ranks, n_ranks=n_ranks)
    for ledger in result.ledgers:
        routes = ROUTES[n_ranks]
        case(
            f"what rank {ledger.rank} of {n_ranks} sends: 4 counts, its assignments' rows, and the rows' gradients back"
        )
        local = range(ledger.rank * 4 // n_ranks, (ledger.rank + 1) * 4 // n_ranks)
        back = sum(len(rows_for(e, routes)) for e in local)
        ops = [record.op for record in ledger.records if record.op != "new_group"]
        expect_equal(ops, ["all_to_all_single"] * 3, name="collectives", read=COST)
        expect_equal(exchanges(ledger), [4 * 8, 2 * len(routes[ledger.rank]) * 16, back * 16], name="bytes", read=COST)


def in_two_groups(rank):
    """Groups (0, 2) and (1, 3) and this rank's own, and each rank's tokens with two experts each."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tokens = [randn(r + 1, 3, seed=r, dtype=torch.float64) for r in range(4)]
    experts = [torch.tensor([[r, (r + 1) % 4]] * (r + 1)) for r in range(4)]
    case(f"4 experts in the groups (0, 2) and (1, 3), whose ranks have 1, 2, 3 and 4 tokens; rank {rank}")
    return groups[rank % 2], tokens, experts


def dispatch_in_pairs(rank, world_size):
    group, tokens, experts = in_two_groups(rank)
    rows, counts, _ = moe.dispatch(tokens[rank], experts[rank], 4, group)
    expect_equal(len(counts), 2, name="experts on this rank, of 4 in a group of 2", read="the contract: group")
    local = [rank // 2 * 2, rank // 2 * 2 + 1]
    expected = [tokens[r][(experts[r] == e).any(-1)] for e in local for r in (rank % 2, rank % 2 + 2)]
    expect_close(rows, torch.cat(expected), name="rows", read="the contract: group")


@pytest.mark.time_limit(20)
def test_dispatch_in_groups(ranks):
    ranks(dispatch_in_pairs, n_ranks=4)


def refuse_on_ranks(rank, world_size):
    case(f"4 experts on 3 ranks; rank {rank}")
    with expect_raises(ValueError, "4", "3", read=RAISES):
        moe.dispatch(torch.ones(2, 5), torch.zeros(2, 1, dtype=torch.int64), 4)


@pytest.mark.time_limit(20)
def test_dispatch_refuses(ranks):
    ranks(refuse_on_ranks, n_ranks=3)


# ---- combine ---------------------------------------------------------------------------------------------------------


def combine_on_ranks(rank, world_size):
    routes = ROUTES[world_size]
    x, experts = tokens_of(rank, routes), experts_of(rank, routes)
    case(
        f"4 experts on {world_size} ranks, tokens 10 r + i with experts {routes}; expert e multiplies by e + 1; rank "
        f"{rank}"
    )
    rows, counts, state = moe.dispatch(x, experts, 4)
    first = rank * 4 // world_size
    factors = torch.cat([torch.full((int(n),), first + i + 1.0) for i, n in enumerate(counts)]).double()
    y = (rows * factors[:, None]).detach().requires_grad_()
    weights = (0.25 + 0.5 * torch.arange(experts.numel()) / 8).view_as(experts).double().requires_grad_()
    out = moe.combine(y, weights, state)
    share = (weights.detach() * (experts + 1)).sum(-1)
    read = "eq-moe-9; it uses `dispatch`: if that does not pass, fix it first"
    expect_close(out, x * share[:, None], read=read)
    case(f"the same; rank {rank}: gradients of the results and of the weights, from a gradient of ones")
    expect_true(out.requires_grad, "the result has no gradient", answer=out, read=read)
    out.backward(torch.ones_like(out))
    missing = [name for name, given in (("y", y), ("weights", weights)) if given.grad is None]
    expect_true(not missing, f"{' and '.join(missing)} got no gradient", answer=out, read=read)
    expect_close(weights.grad, 2 * x[:, :1] * (experts + 1), name="the weights' gradient", read=read)
    case(f"the same; rank {rank}: all the gradients of the results, added up, are twice all weights' sum")
    total = torch.stack([y.grad.sum(), 2 * weights.detach().sum()])
    dist.all_reduce(total)
    expect_close(total[0], total[1], name="sum of the results' gradients", read=read)


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_combine_on_ranks(ranks, n_ranks):
    result = ranks(combine_on_ranks, n_ranks=n_ranks)
    case("dispatch and combine, forward and combine's backward: one small all-to-all and three large ones")
    for ledger in result.ledgers:
        ops = [r.op for r in ledger.records if r.op != "new_group"]
        expect_equal(ops[:-1], ["all_to_all_single"] * 4, name="collectives", read="the contract, under Returns")


def combine_in_pairs(rank, world_size):
    group, tokens, experts = in_two_groups(rank)
    rows, _, state = moe.dispatch(tokens[rank], experts[rank], 4, group)
    weights = torch.full((rank + 1, 2), 0.5, dtype=torch.float64)
    read = "the contract: group; it uses `dispatch`: if that does not pass, fix it first"
    out = moe.combine(rows, weights, state, group)
    expect_close(out, tokens[rank], name="tokens sent there and back", read=read)
    case(f"the same with results in bfloat16 and weights in float32; rank {rank}")
    out = moe.combine(rows.bfloat16(), weights.float(), state, group)
    expect_close(out, tokens[rank].bfloat16(), name="tokens sent there and back", read="the contract: the dtype of y")


@pytest.mark.time_limit(20)
def test_combine_in_groups(ranks):
    ranks(combine_in_pairs, n_ranks=4)


# ---- ExpertParallelMoE -----------------------------------------------------------------------------------------------


def whole_layer(n_shared, n_experts=4):
    """The reference's layer, the same on every rank, so that one exercise fails at a time."""
    from solutions.moe import MoE

    layer = MoE(6, 5, n_experts, 2, n_shared=n_shared).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i, dtype=torch.float64))
    return layer


def parallel_on_ranks(rank, world_size, n_shared, lengths):
    whole = whole_layer(n_shared)
    whole(randn(3, 6, dtype=torch.float64))  # a layer that has been used can be taken too
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    xs = [randn(n, 6, seed=20 + r, dtype=torch.float64) for r, n in enumerate(lengths)]
    case(f"4 experts, k=2, {n_shared} shared, on {world_size} ranks with {list(lengths)} tokens; rank {rank}")
    layer = moe.ExpertParallelMoE(whole)
    held = sum(p.numel() for name, p in layer.named_parameters() if name.split(".")[-1] in ("w1", "w2", "w3"))
    expect_equal(
        held, 3 * 4 * 30 // world_size, name="weights of experts on this rank", read="the contract, under Attributes"
    )
    local = {name: getattr(layer.local, name).detach() for name in ("w1", "w2", "w3")}
    expected = {name: getattr(whole, name).detach().chunk(world_size)[rank] for name in local}
    expect_close(local, expected, name="this rank's experts", read="the contract, under Attributes")
    x, y = xs[rank].clone().requires_grad_(), xs[rank].clone().requires_grad_()
    out = layer(x)
    alone = whole(y)
    expect_close(out, alone, read=LAYER)
    upstreams = [randn(n, 6, seed=40 + r, dtype=torch.float64) for r, n in enumerate(lengths)]
    out.backward(upstreams[rank])
    alone.backward(upstreams[rank])
    expect_close(x.grad, y.grad, name="x's gradient", read=LAYER)
    case(f"the same; rank {rank}: the router's gradient is this rank's part, the experts' are of all tokens")
    router, shared = (
        {n: p.grad for n, p in m.named_parameters() if n.startswith(("router", "shared"))} for m in (layer.local, whole)
    )
    expect_close(
        router, shared, name="gradients of router and shared experts", read="the contract: nothing is averaged"
    )
    places = {p.untyped_storage().data_ptr() for p in whole.parameters()}
    same = [name for name, p in layer.local.named_parameters() if p.untyped_storage().data_ptr() in places]
    expect_true(
        not same,
        f"{', '.join(same)} belong to the layer given, too; expected copies",
        answer=same,
        read="the contract: left unchanged",
    )
    for grad in (p.grad for p in (whole.w1, whole.w2, whole.w3)):
        dist.all_reduce(grad)
    wanted = {name: getattr(whole, name).grad.chunk(world_size)[rank] for name in ("w1", "w2", "w3")}
    grads = {name: getattr(layer.local, name).grad for name in wanted}
    expect_close(grads, wanted, name="the experts' gradients", read="the contract: nothing is averaged")
    after = dict(whole.state_dict())
    expect_close(after, before, name="the layer given, afterwards", read="the contract: left unchanged")


@pytest.mark.time_limit(30)
@pytest.mark.parametrize(
    ("n_shared", "lengths"), [(0, (5,)), (0, (7, 2)), (1, (3, 4)), (0, (4, 0, 9, 1))], ids=["1", "2", "2-shared", "4"]
)
def test_ExpertParallelMoE_on_ranks(ranks, n_shared, lengths):
    result = ranks(parallel_on_ranks, n_shared, lengths, n_ranks=len(lengths))
    for ledger in result.ledgers:
        case(f"what rank {ledger.rank} of {len(lengths)} sends: counts, rows out and back, and the same for gradients")
        sent = [r for r in ledger.records if r.op != "new_group"][:-3]  # the test's own are the last
        expect_equal([r.op for r in sent], ["all_to_all_single"] * 5, name="collectives", read=COST)
        rows = 2 * lengths[ledger.rank] * 6 * 8
        small = 4 * 8
        total = sum(r.n_bytes for r in sent)
        received = total - small - 2 * rows
        expect_equal([sent[0].n_bytes, sent[1].n_bytes], [small, rows], name="bytes of counts and of rows", read=COST)
        expect_true(
            received == 2 * sent[2].n_bytes, "the results and their gradients differ in size", answer=total, read=COST
        )


def under_autocast(rank, world_size):
    case(f"4 experts, k=2, 1 shared, float32 under autocast to bfloat16, on 2 ranks with 4 and 3 tokens; rank {rank}")
    whole = whole_layer(1).float()
    layer = moe.ExpertParallelMoE(whole)
    x, y = (randn(4 - rank, 6, seed=10 + rank).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, alone = layer(x), whole(y)
    read = "the contract of forward"
    expect_equal(out.dtype, torch.float32, name="dtype", answer=out, read=read)
    expect_close(out, alone, **loosely(alone), read=read)
    for result in (out, alone):
        result.backward(randn(4 - rank, 6, seed=40 + rank))
    expect_close(x.grad, y.grad, **loosely(y.grad), name="x's gradient", read=read)
    for name in ("w1", "w2", "w3"):
        dist.all_reduce(getattr(whole, name).grad)
        wanted = getattr(whole, name).grad.chunk(world_size)[rank]
        expect_close(getattr(layer.local, name).grad, wanted, **loosely(wanted), name=f"gradient of {name}", read=read)


@pytest.mark.time_limit(20)
def test_ExpertParallelMoE_under_autocast(ranks):
    ranks(under_autocast, n_ranks=2)


def in_pairs(rank, world_size):
    case(f"x [2, {rank + 2}, 6], transposed, 4 experts, k=2, a router_bias, in the groups (0, 2), (1, 3); rank {rank}")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    whole, x = whole_layer(0), randn(rank + 2, 2, 6, seed=30 + rank, dtype=torch.float64).transpose(0, 1)
    whole.router_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    layer = moe.ExpertParallelMoE(whole, groups[rank % 2])
    held = len(layer.local.w1)
    expect_equal(held, 2, name="experts on this rank, of 4 in a group of 2", read="the contract: group")
    out, alone = layer(x), whole(x)
    expect_close(out, alone, read="the contract: group")
    routing = layer.local.routing
    expect_true(routing is not None, "local.routing is None after a forward pass", answer=out, read="ex-moe-moe")
    expect_close(routing[0], whole.routing[0], name="local.routing", read="ex-moe-moe")


@pytest.mark.time_limit(20)
def test_ExpertParallelMoE_in_groups(ranks):
    ranks(in_pairs, n_ranks=4)


def refuse_layer(rank, world_size):
    case(f"4 experts on 3 ranks; rank {rank}")
    with expect_raises(ValueError, "4", "3", read="the contract of ex-moe-dispatch, under Raises"):
        moe.ExpertParallelMoE(whole_layer(0))


@pytest.mark.time_limit(20)
def test_ExpertParallelMoE_refuses(ranks):
    ranks(refuse_layer, n_ranks=3)


# ---- moe_parameters --------------------------------------------------------------------------------------------------

TINY = MoEConfig(vocab_size=11, dim=4, n_layers=3, hidden_dim=2, n_experts=5, k=2, attention_parameters=100)


def test_moe_parameters_by_hand():
    case("V=11 C=4 L=3 F=2 E=5 k=2, attention 100 a block")
    common = 2 * 11 * 4 + 4 + 3 * (100 + 2 * 4 + 5 * 4)
    expected = (common + 3 * 5 * 24, common + 3 * 2 * 24)
    found = tuple(moe.moe_parameters(TINY))
    expect_equal(found, expected, name="(total, active)", read=COUNT)
    types = [type(count).__name__ for count in found]
    expect_equal(types, ["int", "int"], name="types", answer=found, read="the contract, under Returns")


def test_moe_parameters_of_mixtral():
    case("Mixtral 8x7B: 46.7 and 12.9 billion")
    expected = (46_702_792_704, 12_879_925_248)
    expect_equal(tuple(moe.moe_parameters(MIXTRAL_8X7B)), expected, name="(total, active)", read=COUNT)


def test_moe_parameters_of_deepseek():
    case("DeepSeek-V3: 671 and 37 billion; three dense blocks, one shared expert, a bias for each expert")
    expected = (671_026_419_200, 37_552_297_472)
    expect_equal(tuple(moe.moe_parameters(DEEPSEEK_V3)), expected, name="(total, active)", read=COUNT)


@oracle
def test_moe_parameters_count_transformers_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    case("Transformers' Mixtral, tiny")
    theirs = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(theirs)
    ours = MoEConfig(vocab_size=50, dim=16, n_layers=2, hidden_dim=24, n_experts=3, k=2, attention_parameters=3 * 256)
    expect_equal(moe.moe_parameters(ours)[0], sum(p.numel() for p in model.parameters()), name="total", read=COUNT)


@oracle
def test_moe_parameters_count_transformers_deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    case(
        "Transformers' DeepSeek-V3 in its released size, without memory for its weights; the routers' biases are "
        "buffers there"
    )
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config())
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    counted = sum(t.numel() for t in [*model.parameters(), *biases])
    expect_equal(moe.moe_parameters(DEEPSEEK_V3)[0], counted, name="total", read=COUNT)
