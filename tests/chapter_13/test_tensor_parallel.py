"""Tensor parallelism, graded: without ranks where none are needed, else on 2 to 4 of them.

What the answers are compared with is PyTorch's own: whole layers on whole tensors, with the gradients that autograd
gives them.
"""

import copy
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lib.attention import KVCache
from lib.given.models.gpt2 import GPT2_SMALL
from lib.given.models.llama import LLAMA_2_7B, TINY
from lib.given.parallel.tensors import Collectives
from lib.ranks import RankFailure, milestone
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.inputs import randn

tp = graded("tensor_parallel")

DOT, OUTER, INNER, PAIR, MLP, VOCAB, BYTES, BUBBLE = (f"eq-tensor_parallel-{n}" for n in (1, 2, 3, 4, 5, 6, 8, 9))


def fill(module: nn.Module, whole: dict[str, Tensor], cuts: dict[str, int], exercise: str, group=None) -> nn.Module:
    """The module with this rank's parts of ``whole``; ``cuts`` names the dimension of each that is cut."""
    n, at = dist.get_world_size(group), dist.get_rank(group)
    parts = {name: t.tensor_split(n, cuts[name])[at] if name in cuts else t for name, t in whole.items()}
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    read = f"the contract of {exercise}, under Attributes"
    expect_equal(found, {name: tuple(t.shape) for name, t in parts.items()}, name="the parameters' shapes", read=read)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(parts[name])
    return module


def gradients(module: nn.Module) -> dict[str, Tensor]:
    read = "a parameter that takes part gets a gradient"
    for name, parameter in module.named_parameters():
        expect_true(parameter.grad is not None, f"{name} got no gradient", read=read)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def calls(ledger) -> dict[str, int]:
    """How many collectives of each name were called, the making of groups not counted."""
    names = [record.op for record in ledger.records if record.op != "new_group"]
    return {name: names.count(name) for name in sorted(set(names))}


# ---- partitioned_dot -------------------------------------------------------------------------------------------------


class LargestProduct(TorchDispatchMode):
    """The most elements that went into one operation that computes."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in ("mul", "dot", "vdot", "mm", "mv", "bmm", "sum", "linalg_vecdot"):
            self.n = max([self.n, *(arg.numel() for arg in args if isinstance(arg, Tensor))])
        return func(*args, **(kwargs or {}))


def test_partitioned_dot_by_hand():
    case("n=5 parts=2: three elements, then two")
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([1.0, 10.0, 100.0, 1000.0, 10_000.0])
    expect_close(tp.partitioned_dot(a, b, 2), torch.tensor(54_321.0), read=DOT)


@pytest.mark.parametrize(("n", "parts"), [(1, 1), (7, 3), (8, 4), (3, 5), (0, 2), (97, 13)])
def test_partitioned_dot_equals_torch(n, parts):
    case(f"n={n} parts={parts}, float64")
    a, b = randn(n, dtype=torch.float64), randn(n, seed=1, dtype=torch.float64)
    expect_close(tp.partitioned_dot(a, b, parts), torch.dot(a, b), read=DOT)


def test_partitioned_dot_cuts_as_agreed():
    case(
        "n=10 parts=4, float32: 3, 3, 2 and 2 elements; 2**28 and -2**28 of one part cancel, but would round away "
        "small numbers of another"
    )
    big = 2.0**28
    a = torch.tensor([0.0, big, -big, 1.0, 64.0, 1.0, 1.0, 8.0, -big, big])  # another result for each wrong way to cut
    read = "the contract, under Args: which parts have one element more"
    expect_close(tp.partitioned_dot(a, torch.ones(10), 4), torch.tensor(75.0), read=read)


def test_partitioned_dot_of_strided_vectors():
    case("n=6 parts=4, every second element of a longer vector, float32; the inputs stay")
    a, b = randn(12)[::2], randn(12, seed=1)[1::2]
    before = a.clone()
    expect_close(tp.partitioned_dot(a=a, b=b, parts=4), torch.dot(a, b), read=DOT)
    expect_close(a, before, name="a afterwards")


def test_partitioned_dot_computes_by_parts():
    case("n=24 parts=4: no operation may see more than six elements")
    with LargestProduct() as seen:
        answer = tp.partitioned_dot(randn(24), randn(24, seed=1), 4)
    problem = f"{seen.n} elements went into one operation, but a part has only 6"
    expect_true(seen.n <= 6, problem, answer=answer, read=DOT)


@pytest.mark.parametrize(("lengths", "parts"), [((13, 17), 2), ((17, 13), 2), ((3, 3), 0), ((3, 3), -57)])
def test_partitioned_dot_refuses(lengths, parts):
    case(f"lengths {lengths}, parts={parts}")
    wrong = (str(lengths[0]), str(lengths[1])) if lengths[0] != lengths[1] else (str(parts),)
    with expect_raises(ValueError, *wrong, read="the contract, under Raises"):
        tp.partitioned_dot(torch.ones(lengths[0]), torch.ones(lengths[1]), parts)


@oracle
def test_partitioned_dot_for_any_sizes():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 999))
    def holds(n, parts, seed):
        a, b = randn(n, seed=seed, dtype=torch.float64), randn(n, seed=seed + 1, dtype=torch.float64)
        expect_close(tp.partitioned_dot(a, b, parts), torch.dot(a, b))

    holds()


# ---- matmul_outer ----------------------------------------------------------------------------------------------------


def test_matmul_outer_by_hand():
    case("m=2 k=2, this rank's one column of three")
    a, b = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[10.0], [1.0]])
    expect_close(tp.matmul_outer(a, b), torch.tensor([[12.0], [35.0]]), read=OUTER)


def outer_on_ranks(rank, world_size):
    case(f"a [2, 3, 4], b [4, 7] cut into 3, 2, 2 columns; rank {rank}")
    a, b = randn(2, 3, 4), randn(4, 7, seed=1)
    answer = tp.matmul_outer(a, b.tensor_split(world_size, 1)[rank])
    expect_close(answer, (a @ b).tensor_split(world_size, -1)[rank], read=OUTER)
    expect_close(a, randn(2, 3, 4), name="a afterwards")


@pytest.mark.time_limit(20)
def test_matmul_outer_sends_nothing(ranks):
    result = ranks(outer_on_ranks, n_ranks=3)
    expect_equal([calls(ledger) for ledger in result.ledgers], [{}] * 3, name="collectives of each rank", read=OUTER)


# ---- matmul_inner ----------------------------------------------------------------------------------------------------


def inner_on_ranks(rank, world_size):
    case(f"m=1 k=4 n=2 on two ranks, two rows each; rank {rank}")
    a, b = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 0.0], [10.0, 1.0], [100.0, 0.0], [1000.0, 2.0]])
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
    mine = a[:, pair] if rank < 2 else 10 * a[:, pair]
    expected = torch.tensor([[4321.0, 10.0]]) * (1 if rank < 2 else 10)
    before = mine.clone()
    expect_close(tp.matmul_inner(mine, b[pair], groups[rank // 2]), expected, read=INNER)
    expect_close(mine, before, name="a_shard afterwards")
    case(f"a [2, 3, 7], b [7, 5] cut into 2, 2, 2, 1, float64, all ranks; rank {rank}")
    a, b = randn(2, 3, 7, dtype=torch.float64), randn(7, 5, seed=1, dtype=torch.float64)
    answer = tp.matmul_inner(a.tensor_split(4, -1)[rank], b.tensor_split(4, 0)[rank], None)
    expect_close(answer, a @ b, read=INNER)


@pytest.mark.time_limit(20)
def test_matmul_inner_on_ranks(ranks):
    result = ranks(inner_on_ranks, n_ranks=4)
    for ledger in result.ledgers:
        case(f"what rank {ledger.rank} sends for two products: one all-reduce of each result")
        sent = [(r.op, r.n_bytes) for r in ledger.records if r.op != "new_group"]
        expect_equal(sent, [("all_reduce", 8), ("all_reduce", 240)], name="collectives and bytes", read=INNER)


# ---- and the conjugate pair ------------------------------------------------------------------------------------------


def transposed_on_odd_ranks(rank: int) -> torch.Tensor:
    """``(rank + 1) * [[0, 1, 2], [3, 4, 5]]``, whose rows lie one after another in memory on even ranks only."""
    values = (rank + 1) * torch.arange(6.0).view(2, 3)
    return values.T.contiguous().T if rank % 2 else values


def copy_on_ranks(rank, world_size):
    case(f"x = [1, 2] on all of 4 ranks, the gradients [1, 10], [2, 20], [3, 30], [4, 40]; rank {rank}")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    out = tp.CopyToRegion.apply(x, None)
    expect_close(out, x.detach(), name="what comes out", read=PAIR)
    upstream = torch.tensor([1.0, 10.0]) * (rank + 1)
    (grad,) = torch.autograd.grad(out, x, upstream)
    expect_close(grad, torch.tensor([10.0, 100.0]), name="x's gradient", read=PAIR)
    problem = "the incoming gradient was changed in place: all-reduce a copy of it"
    expect_true(upstream.equal(torch.tensor([1.0, 10.0]) * (rank + 1)), problem, answer=upstream, read=PAIR)
    case(f"x [2, 3] transposed, float64, in the groups (0, 2) and (1, 3); rank {rank}")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = randn(2, 3, dtype=torch.float64).requires_grad_()
    out = tp.CopyToRegion.apply(x.T, groups[rank % 2])
    ((rank + 1) * out).sum().backward()
    expect_close(
        x.grad, torch.full((2, 3), 2.0 * (rank % 2) + 4.0, dtype=torch.float64), name="x's gradient", read=PAIR
    )
    case(f"x [2, 3], whose gradient is transposed in the memory of ranks 1 and 3, not of 0 and 2; rank {rank}")
    x, upstream = torch.zeros(2, 3, requires_grad=True), transposed_on_odd_ranks(rank)
    (grad,) = torch.autograd.grad(tp.CopyToRegion.apply(x, None), x, upstream)
    expect_close(grad, torch.tensor([[0.0, 10.0, 20.0], [30.0, 40.0, 50.0]]), name="x's gradient", read=PAIR)


@pytest.mark.time_limit(20)
def test_CopyToRegion_on_ranks(ranks):
    result = ranks(copy_on_ranks, n_ranks=4)
    case("three times forward and backward: an all-reduce for each backward, and no other collective")
    expect_equal([calls(ledger) for ledger in result.ledgers], [{"all_reduce": 3}] * 4, name="calls", read=PAIR)


def reduce_on_ranks(rank, world_size):
    case(f"x = [1, 10], [2, 20], [3, 30], [4, 40] on 4 ranks, the gradient [5, 7] on each; rank {rank}")
    x = (torch.tensor([1.0, 10.0]) * (rank + 1)).requires_grad_()
    out = tp.ReduceFromRegion.apply(x, None)
    expect_close(out, torch.tensor([10.0, 100.0]), name="what comes out", read=PAIR)
    unchanged = x.detach().equal(torch.tensor([1.0, 10.0]) * (rank + 1))
    expect_true(unchanged, "x was changed in place: all-reduce a copy", answer=x.detach(), read=PAIR)
    (grad,) = torch.autograd.grad(out, x, torch.tensor([5.0, 7.0]))
    expect_close(grad, torch.tensor([5.0, 7.0]), name="x's gradient", read=PAIR)
    case(f"x [2, 3] transposed, float64, in the groups (0, 2) and (1, 3); rank {rank}")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.full((2, 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
    out = tp.ReduceFromRegion.apply(x.T, groups[rank % 2])
    expect_close(out, torch.full((3, 2), 2.0 * (rank % 2) + 4.0, dtype=torch.float64), read=PAIR)
    out.square().sum().backward()
    expect_close(x.grad, (2 * out.detach()).T, name="x's gradient", read=PAIR)
    case(f"x [2, 3] is transposed in the memory of ranks 1 and 3, not of 0 and 2; rank {rank}")
    out = tp.ReduceFromRegion.apply(transposed_on_odd_ranks(rank), None)
    expect_close(out, torch.tensor([[0.0, 10.0, 20.0], [30.0, 40.0, 50.0]]), name="what comes out", read=PAIR)


@pytest.mark.time_limit(20)
def test_ReduceFromRegion_on_ranks(ranks):
    result = ranks(reduce_on_ranks, n_ranks=4)
    case("three times forward and backward: an all-reduce for each forward, and no other collective")
    expect_equal([calls(ledger) for ledger in result.ledgers], [{"all_reduce": 3}] * 4, name="calls", read=PAIR)


# ---- ColumnParallelLinear --------------------------------------------------------------------------------------------


def column_on_ranks(rank, world_size):
    case(f"C=2 F=2 on two ranks: weight [[1, 2], [3, 5]], bias [10, 20], x = [1, 1]; rank {rank}")
    whole = {"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "bias": torch.tensor([10.0, 20.0])}
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = fill(
        tp.ColumnParallelLinear(2, 2, groups[rank // 2]),
        whole,
        {"weight": 0, "bias": 0},
        "ex-tensor-parallel-columnparallellinear",
        groups[rank // 2],
    )
    x = torch.tensor([[1.0, 1.0]], requires_grad=True)
    out = layer(x)
    expect_close(out, torch.tensor([[13.0, 28.0]])[:, rank % 2 :][:, :1], read=MLP)
    out.sum().backward()
    expect_close(x.grad, torch.tensor([[4.0, 7.0]]), name="x's gradient", read=PAIR)
    for bias in (True, False):
        case(f"x [2, 3, 5], F=8 on four ranks, float64, bias={bias}: output and all gradients; rank {rank}")
        full = nn.Linear(5, 8, bias).double()
        weights = {
            name: randn(*p.shape, seed=i, dtype=torch.float64) for i, (name, p) in enumerate(full.named_parameters())
        }
        full.load_state_dict(weights)
        layer = fill(
            tp.ColumnParallelLinear(5, 8, bias=bias).double(),
            weights,
            {"weight": 0, "bias": 0},
            "ex-tensor-parallel-columnparallellinear",
        )
        ours, theirs = (randn(2, 3, 5, seed=7, dtype=torch.float64).requires_grad_() for _ in range(2))
        upstream = randn(2, 3, 8, seed=8, dtype=torch.float64)
        expected = full(theirs)
        out = layer(ours)
        expect_close(out, expected.tensor_split(4, -1)[rank], read=MLP)
        out.backward(upstream.tensor_split(4, -1)[rank])
        expected.backward(upstream)
        expect_close(ours.grad, theirs.grad, name="x's gradient", read=PAIR)
        parts = {name: p.grad.tensor_split(4, 0)[rank] for name, p in full.named_parameters()}
        expect_close(gradients(layer), parts, name="gradients", read=MLP)


@pytest.mark.time_limit(20)
def test_ColumnParallelLinear_on_ranks(ranks):
    result = ranks(column_on_ranks, n_ranks=4)
    case("three times forward and backward: one all-reduce for each backward, and no other collective")
    expect_equal([calls(ledger) for ledger in result.ledgers], [{"all_reduce": 3}] * 4, name="calls", read=PAIR)


def column_start(rank, world_size):
    case("C=3 F=6 on three ranks after torch.manual_seed(5): the parts of nn.Linear(3, 6)")
    torch.manual_seed(5)
    full = nn.Linear(3, 6)
    after = torch.rand(1)
    torch.manual_seed(5)
    layer = tp.ColumnParallelLinear(3, 6)
    expected = {name: p.detach().tensor_split(3)[rank] for name, p in full.named_parameters()}
    found = {name: p.detach() for name, p in layer.named_parameters()}
    expect_close(
        found,
        expected,
        name=f"parameters of rank {rank}",
        read="the contract of ex-tensor-parallel-columnparallellinear",
    )
    expect_close(
        torch.rand(1),
        after,
        name="the next random number",
        read="the contract of ex-tensor-parallel-columnparallellinear",
    )
    for name, n_bytes in (("weight", 24), ("bias", 8)):
        held = getattr(layer, name).untyped_storage().nbytes()
        problem = f"the rank still holds the whole {name}: clone its part"
        expect_true(
            held == n_bytes, problem, answer=held, read="the contract of ex-tensor-parallel-columnparallellinear"
        )
    case("C=3 F=6 without a bias on three ranks after torch.manual_seed(5): the parts of nn.Linear(3, 6, bias=False)")
    torch.manual_seed(5)
    full = nn.Linear(3, 6, bias=False)
    after = torch.rand(1)
    torch.manual_seed(5)
    layer = tp.ColumnParallelLinear(3, 6, bias=False)
    expected = full.weight.detach().tensor_split(3)[rank]
    expect_close(
        layer.weight.detach(),
        expected,
        name=f"weight of rank {rank}",
        read="the contract of ex-tensor-parallel-columnparallellinear",
    )
    expect_close(
        torch.rand(1),
        after,
        name="the next random number",
        read="the contract of ex-tensor-parallel-columnparallellinear",
    )
    bias = getattr(layer, "bias", "no such attribute")
    expect_equal(bias, None, name="bias", read="the contract of ex-tensor-parallel-columnparallellinear")
    case("F=17 on three ranks")
    with expect_raises(
        ValueError, "17", "3", read="the contract of ex-tensor-parallel-columnparallellinear, under Raises"
    ):
        tp.ColumnParallelLinear(5, 17)


@pytest.mark.time_limit(20)
def test_ColumnParallelLinear_starts_as_one_layer(ranks):
    ranks(column_start, n_ranks=3)


# ---- RowParallelLinear -----------------------------------------------------------------------------------------------


def row_on_ranks(rank, world_size):
    case(f"F=2 C=2 on two ranks: weight [[1, 2], [3, 5]], bias [10, 20], x = [1, 1]; rank {rank}")
    whole = {"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "bias": torch.tensor([10.0, 20.0])}
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = fill(
        tp.RowParallelLinear(2, 2, groups[rank // 2]),
        whole,
        {"weight": 1},
        "ex-tensor-parallel-rowparallellinear",
        groups[rank // 2],
    )
    expect_close(layer(torch.tensor([[1.0]])), torch.tensor([[13.0, 28.0]]), read=MLP)
    for bias in (True, False):
        case(f"x [2, 3, 8], C=5 on four ranks, float64, bias={bias}: output and all gradients; rank {rank}")
        full = nn.Linear(8, 5, bias).double()
        weights = {
            name: randn(*p.shape, seed=i, dtype=torch.float64) for i, (name, p) in enumerate(full.named_parameters())
        }
        full.load_state_dict(weights)
        layer = fill(
            tp.RowParallelLinear(8, 5, bias=bias).double(),
            weights,
            {"weight": 1},
            "ex-tensor-parallel-rowparallellinear",
        )
        whole_x = randn(2, 3, 8, seed=7, dtype=torch.float64)
        theirs = whole_x.clone().requires_grad_()
        ours = whole_x.tensor_split(4, -1)[rank].clone().requires_grad_()
        expected = full(theirs)
        out = layer(ours)
        expect_close(out, expected, read=MLP)
        upstream = randn(2, 3, 5, seed=8, dtype=torch.float64)
        out.backward(upstream)
        expected.backward(upstream)
        expect_close(ours.grad, theirs.grad.tensor_split(4, -1)[rank], name="x's gradient", read=PAIR)
        cuts = {"weight": full.weight.grad.tensor_split(4, 1)[rank]} | ({"bias": full.bias.grad} if bias else {})
        expect_close(gradients(layer), cuts, name="gradients", read=MLP)


@pytest.mark.time_limit(20)
def test_RowParallelLinear_on_ranks(ranks):
    result = ranks(row_on_ranks, n_ranks=4)
    case("three times forward, two times backward: one all-reduce for each forward, and no other collective")
    expect_equal([calls(ledger) for ledger in result.ledgers], [{"all_reduce": 3}] * 4, name="calls", read=PAIR)


def row_start(rank, world_size):
    case("F=6 C=4 on three ranks after torch.manual_seed(5): the parts of nn.Linear(6, 4)")
    torch.manual_seed(5)
    full = nn.Linear(6, 4)
    torch.manual_seed(5)
    layer = tp.RowParallelLinear(6, 4)
    expected = {"weight": full.weight.detach().tensor_split(3, 1)[rank], "bias": full.bias.detach()}
    found = {name: p.detach() for name, p in layer.named_parameters()}
    expect_close(
        found, expected, name=f"parameters of rank {rank}", read="the contract of ex-tensor-parallel-rowparallellinear"
    )
    held, problem = layer.weight.untyped_storage().nbytes(), "the rank still holds the whole weight: clone its part"
    expect_true(held == 32, problem, answer=held, read="the contract of ex-tensor-parallel-rowparallellinear")
    case("F=6 C=4 without a bias on three ranks after torch.manual_seed(5): the parts of nn.Linear(6, 4, bias=False)")
    torch.manual_seed(5)
    full = nn.Linear(6, 4, bias=False)
    after = torch.rand(1)
    torch.manual_seed(5)
    layer = tp.RowParallelLinear(6, 4, bias=False)
    expected = full.weight.detach().tensor_split(3, 1)[rank]
    expect_close(
        layer.weight.detach(),
        expected,
        name=f"weight of rank {rank}",
        read="the contract of ex-tensor-parallel-rowparallellinear",
    )
    expect_close(
        torch.rand(1), after, name="the next random number", read="the contract of ex-tensor-parallel-rowparallellinear"
    )
    bias = getattr(layer, "bias", "no such attribute")
    expect_equal(bias, None, name="bias", read="the contract of ex-tensor-parallel-rowparallellinear")
    case("F=17 on three ranks")
    with expect_raises(
        ValueError, "17", "3", read="the contract of ex-tensor-parallel-rowparallellinear, under Raises"
    ):
        tp.RowParallelLinear(17, 4)


@pytest.mark.time_limit(20)
def test_RowParallelLinear_starts_as_one_layer(ranks):
    ranks(row_start, n_ranks=3)


# ---- ParallelMLP -----------------------------------------------------------------------------------------------------

MLP_CUTS = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}
MLP_READ = (
    "eq-tensor_parallel-5; it uses ex-tensor-parallel-columnparallellinear and "
    "ex-tensor-parallel-rowparallellinear: if they do not pass, fix those first"
)


def mlp_on_ranks(rank, world_size):
    case(f"x [2, 3, 5], C=5 F={4 * world_size}, float64: output and all gradients; rank {rank} of {world_size}")
    c, f = 5, 4 * world_size
    shapes = {"fc1.weight": (f, c), "fc1.bias": (f,), "fc2.weight": (c, f), "fc2.bias": (c,)}
    whole = {name: randn(*shape, seed=i, dtype=torch.float64) for i, (name, shape) in enumerate(shapes.items())}
    module = fill(tp.ParallelMLP(c, f).double(), whole, MLP_CUTS, "ex-tensor-parallel-parallelmlp")
    w = {name: weight.clone().requires_grad_() for name, weight in whole.items()}
    ours, theirs = (randn(2, 3, c, seed=7, dtype=torch.float64).requires_grad_() for _ in range(2))
    hidden = functional.gelu(functional.linear(theirs, w["fc1.weight"], w["fc1.bias"]))
    expected = functional.linear(hidden, w["fc2.weight"], w["fc2.bias"])
    out = module(ours)
    milestone("forward ends")
    expect_close(out, expected, read=MLP_READ)
    upstream = randn(2, 3, c, seed=8, dtype=torch.float64)
    out.backward(upstream)
    expected.backward(upstream)
    expect_close(ours.grad, theirs.grad, name="x's gradient", read=MLP_READ)
    parts = {n: t.grad.tensor_split(world_size, MLP_CUTS[n])[rank] if n in MLP_CUTS else t.grad for n, t in w.items()}
    expect_close(gradients(module), parts, name="gradients", read=MLP_READ)
    if world_size == 3:
        case("F=20 on three ranks")
        with expect_raises(ValueError, "20", "3", read="the contract of ex-tensor-parallel-parallelmlp, under Raises"):
            tp.ParallelMLP(5, 20)


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ParallelMLP_on_ranks(ranks, n_ranks):
    result = ranks(mlp_on_ranks, n_ranks=n_ranks)
    case(f"R={n_ranks}: one all-reduce of [2, 3, 5] float64 forward and one backward")
    sent = []
    for ledger in result.ledgers:
        n_forward = len(ledger.before("forward ends"))
        each = [(r.op, r.n_bytes) for r in ledger.records]
        sent.append({"forward": each[:n_forward], "backward": each[n_forward:]})
    expected = [{"forward": [("all_reduce", 240)], "backward": [("all_reduce", 240)]}] * n_ranks
    expect_equal(sent, expected, name="collectives and bytes of rank", read=MLP_READ)


def mlp_in_pairs(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    case(f"the groups (0, 2) and (1, 3), other weights and another x in each; rank {rank}")
    group, seed = groups[rank % 2], 10 * (rank % 2)
    shapes = {"fc1.weight": (6, 3), "fc1.bias": (6,), "fc2.weight": (3, 6), "fc2.bias": (3,)}
    whole = {name: randn(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    module = fill(tp.ParallelMLP(3, 6, group=group), whole, MLP_CUTS, "ex-tensor-parallel-parallelmlp", group)
    x = randn(4, 3, seed=seed + 7).requires_grad_()
    hidden = functional.gelu(functional.linear(x, whole["fc1.weight"], whole["fc1.bias"]))
    expected = functional.linear(hidden, whole["fc2.weight"], whole["fc2.bias"])
    expect_close(module(x), expected, atol=1e-5, read=MLP_READ)
    ours, theirs = (torch.autograd.grad(out.sum(), x)[0] for out in (module(x), expected))
    expect_close(ours, theirs, atol=1e-5, name="x's gradient", read=MLP_READ)


@pytest.mark.time_limit(20)
def test_ParallelMLP_in_groups(ranks):
    ranks(mlp_in_pairs, n_ranks=4)


# ---- ParallelAttention -----------------------------------------------------------------------------------------------

ATTENTION_CUTS = {"wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wo.weight": 1}
ATTENTION_READ = (
    "section `Heads are columns`; it uses ex-tensor-parallel-copytoregion to "
    "ex-tensor-parallel-rowparallellinear: if they do not pass, fix those first"
)


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """[B, H, T, D], each pair of neighbours turned."""
    return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * rope).flatten(-2)


def attend(x: Tensor, w: dict[str, Tensor], n_heads: int, rope=None, mask=None) -> Tensor:
    q, k, v = (functional.linear(x, w[f"w{n}.weight"]).unflatten(-1, (n_heads, -1)).transpose(1, 2) for n in "qkv")
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return functional.linear(out.transpose(1, 2).flatten(2), w["wo.weight"])


def attention_on_ranks(rank, world_size, plain):
    heads, c, t = 2 * world_size, 8 * world_size, 5
    given = {}
    if not plain:
        given = {"rope": torch.polar(torch.ones(t, 2), randn(t, 2, seed=3)), "mask": torch.ones(t, t).tril().bool()}
    sizes = f"x [2, {t}, {c}], {heads} heads of 4"
    case(f"{sizes}, {' and '.join(given) or 'no rope and no mask'}; rank {rank} of {world_size}")
    whole = {name: randn(c, c, seed=i) / c**0.5 for i, name in enumerate(ATTENTION_CUTS)}
    module = fill(tp.ParallelAttention(c, heads), whole, ATTENTION_CUTS, "ex-tensor-parallel-parallelattention")
    w = {name: weight.clone().requires_grad_() for name, weight in whole.items()}
    ours, theirs = (randn(2, t, c, seed=7).requires_grad_() for _ in range(2))
    expected = attend(theirs, w, heads, **given)
    out = module(ours, **given)
    expect_close(out, expected, atol=1e-5, read=ATTENTION_READ)
    upstream = randn(2, t, c, seed=8)
    milestone("forward ends")
    out.backward(upstream)
    milestone("backward ends")
    expected.backward(upstream)
    expect_close(ours.grad, theirs.grad, atol=1e-5, name="x's gradient", read=ATTENTION_READ)
    parts = {name: weight.grad.tensor_split(world_size, ATTENTION_CUTS[name])[rank] for name, weight in w.items()}
    expect_close(gradients(module), parts, atol=1e-5, name="gradients", read=ATTENTION_READ)
    with_rope = "rope, " * (not plain)
    case(f"{sizes}: two positions and then three, with {with_rope}mask and a cache of this rank's heads; rank {rank}")
    mask = torch.ones(t, t).tril().bool()
    rope = given.get("rope", torch.ones(t, 2, dtype=torch.complex64))
    cache, x = KVCache(2, 2, t, 4), ours.detach()
    with torch.no_grad():
        steps = [module(x[:, i:j], rope[i:j], mask[i:j, :j], cache) for i, j in ((0, 2), (2, 5))]
        expected = attend(x, whole, heads, rope, mask)
    expect_close(torch.cat(steps, 1), expected, atol=1e-5, name="cached out", read=ATTENTION_READ)
    if world_size == 3:
        case("dim=48 for 16 heads on three ranks")
        with expect_raises(
            ValueError, "16", "3", read="the contract of ex-tensor-parallel-parallelattention, under Raises"
        ):
            tp.ParallelAttention(48, 16)
        case("dim=45 for 6 heads on three ranks, which could share out both")
        with expect_raises(
            ValueError, "45", "6", read="the contract of ex-tensor-parallel-parallelattention, under Raises"
        ):
            tp.ParallelAttention(45, 6)


@pytest.mark.time_limit(20)
@pytest.mark.parametrize(("n_ranks", "plain"), [(2, True), (3, False)], ids=["2-plain", "3-rope-mask"])
def test_ParallelAttention_on_ranks(ranks, n_ranks, plain):
    result = ranks(attention_on_ranks, plain, n_ranks=n_ranks)
    case(f"{n_ranks} ranks: one all-reduce forward, one backward, and one in each of two passes with a cache")
    counts = []
    for ledger in result.ledgers:
        forward, backward = (len(ledger.before(f"{phase} ends")) for phase in ("forward", "backward"))
        cached = len(ledger.records) - backward
        counts.append({"forward": forward, "backward": backward - forward, "with a cache": cached})
    expected = [{"forward": 1, "backward": 1, "with a cache": 2}] * n_ranks
    expect_equal(counts, expected, name="collectives of rank", read=PAIR)
    case(f"{n_ranks} ranks: each collective is an all-reduce of the activations [2, T, {8 * n_ranks}], float32")
    sent = [[(r.op, r.n_bytes) for r in ledger.records] for ledger in result.ledgers]
    position = 2 * 8 * n_ranks * 4
    steps = [("all_reduce", n * position) for n in (5, 5, 2, 3)]
    expect_equal(sent, [steps] * n_ranks, name="collectives and bytes", read=PAIR)


def attention_in_pairs(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    case(f"C=12, 4 heads after torch.manual_seed(5), in the groups (0, 2) and (1, 3); rank {rank}")
    torch.manual_seed(5)
    whole = {name: nn.Linear(12, 12, bias=False).weight.detach() for name in ATTENTION_CUTS}
    torch.manual_seed(5)
    module = tp.ParallelAttention(12, 4, groups[rank % 2])
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    parts = {name: weight.tensor_split(2, ATTENTION_CUTS[name])[rank // 2] for name, weight in whole.items()}
    read = "the contract of ex-tensor-parallel-parallelattention: the four layers in their order, each with its group"
    expect_close(found, parts, name="parameters", read=read)
    case(f"x [2, 5, 12], another in each group; rank {rank}")
    x = randn(2, 5, 12, seed=rank % 2).requires_grad_()
    out, expected = module(x), attend(x, whole, 4)
    expect_close(out, expected, atol=1e-5, read=ATTENTION_READ)
    ours, theirs = (torch.autograd.grad(result.sum(), x)[0] for result in (out, expected))
    expect_close(ours, theirs, atol=1e-5, name="x's gradient", read=ATTENTION_READ)


@pytest.mark.time_limit(20)
def test_ParallelAttention_in_groups(ranks):
    ranks(attention_in_pairs, n_ranks=4)


# ---- vocab_parallel_cross_entropy ------------------------------------------------------------------------------------


def loss_by_hand(rank, world_size):
    case(f"V=6 on three ranks (3, 1, 2 columns), logits ln 1 .. ln 6, targets 0, 3, 4; rank {rank}")
    shard = torch.arange(1.0, 7.0).log().expand(3, 6).split([3, 1, 2], dim=-1)[rank].clone().requires_grad_()
    before = shard.detach().clone()
    loss = tp.vocab_parallel_cross_entropy(shard, torch.tensor([0, 3, 4]), None)
    expected = torch.tensor((3 * math.log(21) - math.log(1 * 4 * 5)) / 3)
    expect_close(loss, expected, atol=1e-5, read=VOCAB)
    expect_close(shard.detach(), before, name="logits_shard afterwards", read=VOCAB)


@pytest.mark.time_limit(20)
def test_vocab_parallel_cross_entropy_by_hand(ranks):
    ranks(loss_by_hand, n_ranks=3)


def loss_beside_another_device(shard: Tensor, targets: Tensor) -> Tensor:
    """The loss while "meta" is the default device, where a tensor lands that is made without ``device=``."""
    try:
        with torch.device("meta"):
            return tp.vocab_parallel_cross_entropy(shard, targets, None)
    except (RuntimeError, NotImplementedError) as error:
        read = "the contract of ex-tensor-parallel-vocab-parallel-cross-entropy, under Args"
        problem = "a tensor is made on the default device; make it with device=logits_shard.device"
        expect_true("meta" not in str(error).lower(), problem, answer="on the default device", read=read)
        raise


def loss_on_ranks(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for shape, widths, scale, dtype in (
        ((7,), [3, 5, 2, 4], 1.0, torch.float32),
        ((2, 3), [4, 4, 4, 4], 1e4, torch.float32),
        ((5,), [1, 9, 1, 1], 3.0, torch.float64),
        ((2, 1, 2), [4, 4, 4, 4], 30.0, torch.bfloat16),
        ((6,), [0, 2, 0, 1], 1.0, torch.float32),
    ):
        case(f"targets {list(shape)}, columns {widths}, logits of about {scale:g}, {str(dtype)[6:]}; rank {rank}")
        logits = (scale * randn(*shape, sum(widths), seed=len(shape))).to(dtype)
        targets = torch.randint(sum(widths), shape, generator=torch.Generator().manual_seed(1))
        wide = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        expected = functional.cross_entropy(wide.flatten(0, -2), targets.flatten())
        shard = logits.split(widths, -1)[rank].clone().requires_grad_()
        loss = loss_beside_another_device(shard, targets)
        expect_close(loss, expected, rtol=1e-5, read=VOCAB)
        (found,) = torch.autograd.grad(3 * loss, shard)
        part = 3 * torch.autograd.grad(expected, wide)[0].split(widths, -1)[rank]
        expect_close(found, part.to(dtype), atol=1e-2 if dtype == torch.bfloat16 else 1e-6, name="gradient", read=VOCAB)
    case(f"columns [0, 3, 0, 1], logits 9,999 to 10,002 below zero, targets 0, 3, 1; rank {rank}")
    logits = torch.tensor([-10_000.0, -10_001.0, -9_999.0, -10_002.0]).expand(3, 4)
    targets = torch.tensor([0, 3, 1])
    loss = tp.vocab_parallel_cross_entropy(logits.split([0, 3, 0, 1], -1)[rank], targets, None)
    expect_close(loss, functional.cross_entropy(logits, targets), rtol=1e-5, read=VOCAB)
    case(f"targets 0, 255 and 130 in uint8, V=300 in columns [100, 60, 70, 70]; rank {rank}")
    logits, targets = randn(3, 300, seed=3), torch.tensor([0, 255, 130])
    loss = tp.vocab_parallel_cross_entropy(logits.split([100, 60, 70, 70], -1)[rank], targets.to(torch.uint8), None)
    expect_close(loss, functional.cross_entropy(logits, targets), rtol=1e-5, read="the contract, under Args")
    case(f"the groups (0, 2), logits of about 1, and (1, 3), of about 10,000, with targets of their own; rank {rank}")
    logits, at = randn(4, 6, seed=rank % 2) * (10_000 if rank % 2 else 1), rank // 2
    targets = torch.tensor([0, 5, 2, 3]) if rank % 2 else torch.tensor([4, 4, 1, 0])
    loss = tp.vocab_parallel_cross_entropy(logits.chunk(2, -1)[at], targets, groups[rank % 2])
    expect_close(loss, functional.cross_entropy(logits, targets), rtol=1e-5, read=VOCAB)


LOSS_RAISES = "the contract of ex-tensor-parallel-vocab-parallel-cross-entropy, under Raises"


def loss_refuses(rank, world_size, wrong):
    case(f"V=23 on two ranks, targets 3 and {wrong}; rank {rank}")
    with expect_raises(ValueError, str(wrong), read=LOSS_RAISES):
        tp.vocab_parallel_cross_entropy(torch.zeros(2, 11 + rank), torch.tensor([3, wrong]), None)


@pytest.mark.time_limit(20)
def test_vocab_parallel_cross_entropy_on_ranks(ranks):
    ranks(loss_on_ranks, n_ranks=4)


@pytest.mark.time_limit(20)
def test_vocab_parallel_cross_entropy_refuses(ranks):
    for wrong in (-1, -100, 23, 57):
        case(f"V=23 on two ranks, targets 3 and {wrong}: a ValueError on both")
        try:
            ranks(loss_refuses, wrong, n_ranks=2)
        except RankFailure as failure:
            ended = [state.rank for state in failure.per_rank if state.status == "returned"]
            if failure.kind == "deadlock" and ended:
                problem = f"ValueError on rank {ended[0]} only, for which the other rank waits in a collective"
                expect_true(False, problem, answer=ended, read=LOSS_RAISES)
            raise


def loss_of_many(rank, world_size):
    shard = randn(50, 400, seed=rank).requires_grad_()
    targets = torch.randint(1600, (50,), generator=torch.Generator().manual_seed(1))
    tp.vocab_parallel_cross_entropy(shard, targets, None).backward()


@pytest.mark.time_limit(20)
def test_vocab_parallel_cross_entropy_never_gathers(ranks):
    result = ranks(loss_of_many, n_ranks=4)
    case("50 targets, 400 columns on each of 4 ranks: three times 50 numbers and a few integers, the logits are 20,000")
    for ledger in result.ledgers:
        sizes = [r.n_bytes if r.n_elements is None else r.n_elements for r in ledger.records if r.sends]
        problem = f"rank {ledger.rank} sent {sum(sizes)} numbers: {calls(ledger)}"
        expect_true(sum(sizes) <= 200, problem, answer=sum(sizes), read=VOCAB)


# ---- llama_plan ------------------------------------------------------------------------------------------------------


def plain(x):
    """The tensor that a DTensor stands for; any other as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def plan_on_ranks(rank, world_size, n_kv_heads):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    from lib.llama import Llama

    config = replace(TINY, vocab_size=30, dim=32, n_layers=2, n_kv_heads=n_kv_heads, hidden_dim=24, context_len=16)
    read = (
        "the contract of ex-tensor-parallel-llama-plan, and what the two styles expect and return in `The same, by "
        "a plan`"
    )
    torch.manual_seed(0)
    whole: Any = Llama(config)
    model: Any = parallelize_module(copy.deepcopy(whole), init_device_mesh("cpu", (world_size,)), tp.llama_plan(config))
    tokens = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(1))
    both = f"4 heads, {n_kv_heads} of keys and values, on {world_size} ranks"
    case(f"{both}: the embedding by itself, tokens [2, 7] in and [2, 7, 32] out, whole on every rank")
    embedded, x = model.tok_embeddings(tokens), whole.tok_embeddings(tokens)
    expect_close(plain(embedded), x, name="the embedding's output", read=read)
    case(f"{both}: the head by itself, [2, 7, 32] in and logits [2, 7, 30] out, whole on every rank")
    scores, name = plain(model.output(x.detach())), f"the head's output on rank {rank}"
    expect_close(scores, whole.output(x), atol=1e-5, name=name, answer=scores.shape[-1] == 30, read=read)
    case(f"{both}: parameters, logits and gradients; rank {rank}")
    with Collectives() as forward:
        logits = model(tokens)
    expected = whole(tokens)
    expect_true(not isinstance(logits, DTensor), "the logits are a DTensor, but should be a plain tensor", read=read)
    expect_close(logits, expected, atol=1e-5, name="logits", read=read)
    upstream = randn(*expected.shape, seed=2)
    with Collectives() as backward:
        logits.backward(upstream)
    expected.backward(upstream)
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        expect_true(parameter.grad is not None, f"{name} got no gradient", read=read)
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        expect_close(found, theirs[name].grad, atol=1e-4, rtol=1e-4, name=f"the gradient of {name}", read=read)
    is_kept = ("norm", "wk", "wv") if n_kv_heads < world_size else ("norm",)
    for name, parameter in model.named_parameters():
        if not any(word in name for word in is_kept):
            n_held = parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
            problem = f"{name} is not cut: each rank holds {n_held} of {theirs[name].numel()} values"
            expect_true(n_held <= theirs[name].numel() / world_size + 32, problem, answer=n_held, read=read)
    return dict(forward.calls), dict(backward.calls)


@pytest.mark.time_limit(40)
@pytest.mark.parametrize(("n_ranks", "n_kv_heads"), [(2, 2), (4, 2)])
def test_llama_plan_on_ranks(ranks, n_ranks, n_kv_heads):
    result = ranks(plan_on_ranks, n_kv_heads, n_ranks=n_ranks)
    case(f"2 layers on {n_ranks} ranks, {n_kv_heads} key/value heads: what passes between the ranks")
    forward = {"all_reduce": 5, "all_gather": 1}  # two a layer and the embedding; the logits
    backward = {"all_reduce": 5 if n_kv_heads >= n_ranks else 9}  # two a layer and the head; wk and wv kept whole
    read = "the contract"
    expect_equal(result.values, [(forward, backward)] * n_ranks, name="collectives forward and backward", read=read)


# ---- ffn_partition_specs ---------------------------------------------------------------------------------------------

SPECS_READ = "the table in section `The same, annotated`"
TABLE = {
    "data": {"embedding": ("X", None, None), "w_in": (None, None), "hidden": ("X", None, None), "w_out": (None, None)},
    "megatron": {"embedding": (None,) * 3, "w_in": (None, "Y"), "hidden": (None, None, "Y"), "w_out": ("Y", None)},
    "2d features": {
        "embedding": (None, None, "X"),
        "w_in": ("X", "Y"),
        "hidden": (None, None, "Y"),
        "w_out": ("Y", "X"),
    },
    "2d batch": {
        "embedding": ("X", None, None),
        "w_in": ("X", "Y"),
        "hidden": ("X", None, "Y"),
        "w_out": ("Y", "X"),
    },
    "2d finalized": {
        "embedding": ("X", None, "Y"),
        "w_in": ("X", "Y"),
        "hidden": ("X", None, "Y"),
        "w_out": ("Y", "X"),
    },
}


@pytest.mark.parametrize("layout", list(TABLE)[::-1])
def test_ffn_partition_specs_table(layout):
    case(f"layout {layout!r}")
    expect_equal(tp.ffn_partition_specs(layout), TABLE[layout], read=SPECS_READ)


def test_ffn_partition_specs_other_spellings():
    case("2D_Finalized and 2d-finalized")
    for layout in ("2D_Finalized", "2d-finalized"):
        expect_equal(tp.ffn_partition_specs(layout), TABLE["2d finalized"], read=SPECS_READ)


def test_ffn_partition_specs_refuses():
    case("layout '3d'")
    with expect_raises(ValueError, "3d", *TABLE, read="the contract"):
        tp.ffn_partition_specs("3d")


JAX_PROGRAM = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("X", "Y"))
shapes = {"embedding": (4, 3, 8), "w_in": (8, 16), "w_out": (16, 8)}
values = {name: np.sin(np.arange(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
plain = np.maximum(values["embedding"] @ values["w_in"], 0) @ values["w_out"]
for specs in json.loads(sys.argv[1]):
    at = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    def ffn(x, w_in, w_out):
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w_in), at["hidden"])
        return jax.lax.with_sharding_constraint(hidden @ w_out, at["embedding"])
    out = jax.jit(ffn)(*(jax.device_put(values[name], at[name]) for name in shapes))
    assert out.sharding.is_equivalent_to(at["embedding"], 3), out.sharding
    np.testing.assert_allclose(np.asarray(out), plain, atol=1e-4)
"""


@oracle
@pytest.mark.time_limit(90)
def test_ffn_partition_specs_in_jax():
    import json

    case("every layout on 8 virtual devices: jit gives the plain result")
    specs = json.dumps([tp.ffn_partition_specs(layout) for layout in TABLE])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", JAX_PROGRAM, specs], env=environment, capture_output=True, text=True)
    expect_true(done.returncode == 0, f"JAX refuses: {done.stderr[-500:]}", read=SPECS_READ)


# ---- tensor_parallel_bytes -------------------------------------------------------------------------------------------


def test_tensor_parallel_bytes_by_hand():
    case("TINY (3 layers, C=128), B=2 T=8: 12 all-reduces of 2,048 values, 1.5 of each sent on 4 ranks, nothing on 1")
    given = {"4 ranks, bfloat16": (4,), "4 ranks, float32": (4, 4), "1 rank, bfloat16": (1,)}
    found = {name: tp.tensor_parallel_bytes(TINY, 2, 8, *arguments) for name, arguments in given.items()}
    expected = {"4 ranks, bfloat16": 73_728, "4 ranks, float32": 147_456, "1 rank, bfloat16": 0}
    expect_equal(found, expected, name="bytes", read=BYTES)


@pytest.mark.parametrize(
    ("config", "batch", "length", "n"), [(LLAMA_2_7B, 1, 4096, 8), (GPT2_SMALL, 3, 100, 2), (TINY, 1, 1, 3)]
)
def test_tensor_parallel_bytes_of_models(config, batch, length, n):
    case(
        f"C={config.dim} L={config.n_layers}, batch={batch} length={length} world_size={n}; then 4 bytes a value; "
        "then 1 rank"
    )
    one = batch * length * config.dim
    expect_equal(
        tp.tensor_parallel_bytes(config, batch, length, n), 16 * config.n_layers * (n - 1) * one // n, read=BYTES
    )
    wide = tp.tensor_parallel_bytes(config, batch, length, world_size=n, bytes_per_value=4)
    expect_equal(wide, 32 * config.n_layers * (n - 1) * one // n, read=BYTES)
    expect_equal(tp.tensor_parallel_bytes(config, batch, length, 1), 0, read=BYTES)


@pytest.mark.parametrize("n", [2**27 + 1, 5])
def test_tensor_parallel_bytes_is_a_whole_number(n):
    case(f"TINY, batch=2**40 + 1, length=3, {n} ranks: an int, exact beyond 2**53 and rounded down")
    answer = tp.tensor_parallel_bytes(TINY, 2**40 + 1, 3, n)
    expect_equal(
        type(answer), int, name="type", answer=answer, read="the contract of ex-tensor-parallel-tensor-parallel-bytes"
    )
    expect_equal(answer, 16 * TINY.n_layers * (n - 1) * (2**40 + 1) * 3 * TINY.dim // n, name="bytes", read=BYTES)


# ---- pipeline_bubble -------------------------------------------------------------------------------------------------


def test_pipeline_bubble_by_hand():
    case("4 stages, 9 micro-batches: 3 slots of 12 are idle")
    expect_close(tp.pipeline_bubble(4, 9), 3 / 12, read=BUBBLE)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 9), (8, 1), (8, 64), (3, 2)])
def test_pipeline_bubble_equals_the_simulation(stages, micro_batches):
    case(f"{stages} stages, {micro_batches} micro-batches, against a simulated pipeline")
    ends: dict[tuple[int, int], int] = {}
    for place in itertools.product(
        range(stages), range(micro_batches)
    ):  # the previous stage, and this one, must be done
        stage, m = place
        ends[place] = 1 + max(ends.get((stage - 1, m), 0), ends.get((stage, m - 1), 0))
    expected = 1 - micro_batches / ends[stages - 1, micro_batches - 1]
    expect_close(tp.pipeline_bubble(stages=stages, micro_batches=micro_batches), expected, read=BUBBLE)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 41), (41, 0), (57, -23)])
def test_pipeline_bubble_refuses(stages, micro_batches):
    case(f"{stages} stages, {micro_batches} micro-batches")
    with expect_raises(
        ValueError, str(stages), str(micro_batches), read="the contract of ex-tensor-parallel-pipeline-bubble"
    ):
        tp.pipeline_bubble(stages, micro_batches)
