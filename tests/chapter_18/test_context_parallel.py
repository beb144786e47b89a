"""Long sequences, graded: on 1 to 4 ranks against PyTorch's layers and attention over the whole sequence, in float64.

Messages and bytes are read off the ledger, work is counted in products, memory by the allocator and by what autograd
saves.
"""

import copy
import math
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lib.demos.context_parallel import COPIER, copies, logits_of
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LLAMA_2_7B, LLAMA_2_70B, LlamaConfig
from lib.given.parallel.sharding import saved_bytes
from lib.gpt2 import Block
from lib.llama import Llama
from lib.ranks import Ledger, milestone
from lib.ranks.collectives import Pending
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.inputs import randn

cp = graded("context_parallel")

PAIR, BLOCK, ULYSSES, MERGE, RING, ZIGZAG, BACK, RING_BYTES, ULYSSES_BYTES, HIDDEN = (
    f"eq-context_parallel-{n}" for n in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
)
RAISES = "the contract, under Raises"
GATHER = ("all_gather_into_tensor", "all_gather_single", "all_gather")
SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter")
FLOAT64: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}


def counts(ledger) -> dict[str, int]:
    """How many collectives and messages of each kind were started, whichever of PyTorch's names they go by."""
    kinds = dict.fromkeys(GATHER, "all-gather") | dict.fromkeys(SCATTER, "reduce-scatter")
    kinds["all_to_all"] = "all_to_all_single"
    names = [kinds.get(record.op, record.op) for record in ledger.records]
    return {name: names.count(name) for name in sorted(set(names))}


def ring_volume(ledger) -> float:
    """Bytes that the rank sends in all, if every collective goes round a ring, as in chapter 9."""
    total = 0.0
    for record in ledger.records:
        share = (record.group_size - 1) / record.group_size
        factor = 2 * share if record.op == "all_reduce" else record.group_size - 1 if record.op in GATHER else share
        total += factor * record.n_bytes
    return total


def gradient(x: Tensor, what: str) -> Tensor:
    expect_true(x.grad is not None, f"{what} got no gradient: autograd does not see the way to it", read=PAIR)
    return x.grad


# ---- GatherSequence --------------------------------------------------------------------------------------------------


def gather_on_ranks(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, at = pairs[rank // 2], rank % 2
    case(f"shares [[1, 2]] and [[3, 4]] along dim 1, groups of two ranks; rank {rank}")
    mine = torch.tensor([[1.0, 2.0]] if at == 0 else [[3.0, 4.0]]).add(10 * (rank // 2)).requires_grad_()
    whole = cp.GatherSequence.apply(mine, 1, group)
    expect_close(whole, torch.tensor([[1.0, 2.0, 3.0, 4.0]]) + 10 * (rank // 2), read=PAIR)
    case(f"gradients [[1, 2, 3, 4]] and [[10, 20, 30, 40]] of the two ranks; rank {rank}")
    whole.backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]]) * (1 if at == 0 else 10))
    expected = torch.tensor([[11.0, 22.0]] if at == 0 else [[33.0, 44.0]])
    expect_close(gradient(mine, "x"), expected, name="x's gradient", read=PAIR)
    for dim in (0, 1, -1):
        case(f"shares [3, 2, 5] along dim {dim} of four ranks, with strides, float64; rank {rank}")
        shares = [randn(5, 2, 3, seed=r, dtype=torch.float64).permute(2, 1, 0) for r in range(4)]
        before, x = shares[rank].clone(), shares[rank].detach().requires_grad_()
        out = cp.GatherSequence.apply(x, dim, None)
        expect_close(out, torch.cat(shares, dim), read=PAIR)
        upstream = [randn(*out.shape, seed=10 + r, dtype=torch.float64) for r in range(4)]
        out.backward(upstream[rank])
        expect_close(x.grad, sum(upstream, torch.zeros(())).chunk(4, dim)[rank], name="x's gradient", read=PAIR)
        expect_close(x.detach(), before, name="x afterwards")
    case("shares of 3, 2, 2 and 2 positions on four ranks")
    with expect_raises(ValueError, "3 + 2 + 2 + 2", "4 x 2 + 1", read=RAISES):
        cp.GatherSequence.apply(torch.ones(1, 3 if rank == 0 else 2), 1, None)


@pytest.mark.time_limit(20)
def test_GatherSequence_on_ranks(ranks):
    result = ranks(gather_on_ranks, n_ranks=4)
    case("four times forward and backward: one all-gather and one reduce-scatter each")
    found = [counts(ledger) for ledger in result.ledgers]
    expect_equal(found, [{"all-gather": 4, "reduce-scatter": 4}] * 4, name="collectives", read=PAIR)


# ---- ScatterSequence -------------------------------------------------------------------------------------------------


def scatter_on_ranks(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, at = pairs[rank // 2], rank % 2
    case(f"x = [[1, 2, 3, 4]] and [[10, 20, 30, 40]] along dim 1, groups of two ranks; rank {rank}")
    x = (torch.tensor([[1.0, 2.0, 3.0, 4.0]]) * (1 if at == 0 else 10)).requires_grad_()
    out = cp.ScatterSequence.apply(x, 1, group)
    expect_close(out, torch.tensor([[11.0, 22.0]] if at == 0 else [[33.0, 44.0]]), read=PAIR)
    case(f"gradients [[1, 2]] and [[3, 4]] of the two shares; rank {rank}")
    out.backward(torch.tensor([[1.0, 2.0]] if at == 0 else [[3.0, 4.0]]))
    expect_close(gradient(x, "x"), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), name="x's gradient", read=PAIR)
    for dim in (0, 1, -1):
        case(f"x [8, 4, 12] along dim {dim} on four ranks, with strides, float64; rank {rank}")
        parts = [randn(12, 4, 8, seed=r, dtype=torch.float64).permute(2, 1, 0) for r in range(4)]
        before, mine = parts[rank].clone(), parts[rank].detach().requires_grad_()
        out = cp.ScatterSequence.apply(mine, dim, None)
        expect_close(out, sum(parts, torch.zeros(())).chunk(4, dim)[rank], read=PAIR)
        upstream = [randn(*out.shape, seed=10 + r, dtype=torch.float64) for r in range(4)]
        out.backward(upstream[rank])
        expect_close(mine.grad, torch.cat(upstream, dim), name="x's gradient", read=PAIR)
        expect_close(mine.detach(), before, name="x afterwards")
    case("7 positions on four ranks")
    with expect_raises(ValueError, "7", "4 x 1 + 3", read=RAISES):
        cp.ScatterSequence.apply(torch.ones(1, 7), 1, None)


@pytest.mark.time_limit(20)
def test_ScatterSequence_on_ranks(ranks):
    result = ranks(scatter_on_ranks, n_ranks=4)
    case("four times forward and backward: one reduce-scatter and one all-gather each")
    found = [counts(ledger) for ledger in result.ledgers]
    expect_equal(found, [{"all-gather": 4, "reduce-scatter": 4}] * 4, name="collectives", read=PAIR)


# ---- SequenceParallelBlock -------------------------------------------------------------------------------------------

NARROW = GPT2Config(vocab_size=16, context_len=16, dim=8, n_layers=1, n_heads=4)


def a_block(config: GPT2Config = NARROW) -> Block:
    """A block in float64 whose every parameter matters, and the eps of each norm, too."""
    block: Any = Block(config).double()
    block.ln_1.eps, block.ln_2.eps = 0.1, 0.2
    with torch.no_grad():
        for i, parameter in enumerate(block.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i, dtype=torch.float64) / 2)
    return block


def rows_of(name: str, x: Tensor, rank: int, n_ranks: int) -> Tensor:
    """A rank's part of a parameter of the ``Block``, or of its gradient."""
    if name.startswith("attn.c_attn"):
        return torch.cat([third.chunk(n_ranks)[rank] for third in x.chunk(3)])
    if name.startswith("mlp.c_fc"):
        return x.chunk(n_ranks)[rank]
    return x.chunk(n_ranks, 1)[rank] if name.endswith("c_proj.weight") else x


def run_block(rank, world_size):
    block, whole = a_block(), randn(2, 12, 8, seed=50, dtype=torch.float64)
    upstream, theirs = randn(2, 12, 8, seed=51, dtype=torch.float64), whole.clone().requires_grad_()
    case(f"B=2 T=12 C=8 H=4 on {world_size} ranks, float64: output; rank {rank}")
    given = copy.deepcopy(block)
    module = cp.SequenceParallelBlock(block)
    more = [name for name, p in module.named_parameters() if p.untyped_storage().nbytes() > p.nbytes]
    expect_true(not more, f"views of larger tensors, which stay in memory: {', '.join(more)}", answer=more, read=BLOCK)
    places = {p.untyped_storage().data_ptr() for p in block.parameters()}
    shared = [name for name, p in module.named_parameters() if p.untyped_storage().data_ptr() in places]
    problem = f"the block's own parameters, not copies: {', '.join(shared)}"
    expect_true(not shared, problem, answer=shared, read="the contract, under Args: block")
    mine = whole.chunk(world_size, 1)[rank].clone().requires_grad_()
    milestone("forward")
    out = module(mine)
    expected = given(theirs)
    expected.backward(upstream)
    expect_close(out, expected.chunk(world_size, 1)[rank], **FLOAT64, read=BLOCK)
    case(f"B=2 T=12 C=8 H=4 on {world_size} ranks, float64: the input's gradient; rank {rank}")
    out.backward(upstream.chunk(world_size, 1)[rank])
    milestone("end")
    expect_close(mine.grad, theirs.grad.chunk(world_size, 1)[rank], **FLOAT64, name="x's gradient", read=BLOCK)
    found = {name: p.grad for name, p in module.named_parameters()}
    names = {name: rows_of(name, p.grad, rank, world_size) for name, p in given.named_parameters()}
    read = "the contract of ex-context-parallel-sequenceparallelblock, under Attributes"
    for what, chosen in (("norms", "ln_"), ("layers", "attn."), ("layers", "mlp.")):
        case(f"B=2 T=12 C=8 H=4 on {world_size} ranks, float64: gradients of the {what} {chosen}*; rank {rank}")
        parts = {name: grad for name, grad in names.items() if name.startswith(chosen)}
        mine_of = {name: grad for name, grad in found.items() if name.startswith(chosen)}
        missing = next((name for name in parts if mine_of.get(name) is None), "")
        expect_true(not missing, f"{missing} got no gradient, or there is no parameter of that name", read=read)
        expect_close(mine_of, parts, atol=1e-9, rtol=1e-9, name="gradients", read=read)
    case(f"H=5 on {world_size} ranks")
    with expect_raises(ValueError, "5", f"{world_size} x {5 // world_size} + 1", read=RAISES):
        cp.SequenceParallelBlock(Block(GPT2Config(vocab_size=16, context_len=16, dim=10, n_layers=1, n_heads=5)))
    case("the block that was given, afterwards")
    unchanged = {name: p.detach() for name, p in given.named_parameters()}
    expect_close({name: p.detach() for name, p in block.named_parameters()}, unchanged, name="block")


def block_in_group(rank, world_size):
    case(f"groups of the ranks (0, 2) and (1, 3), B=2 T=12 C=8 H=4, float64; rank {rank}")
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    block, whole = a_block(), randn(2, 12, 8, seed=50 + rank % 2, dtype=torch.float64)
    module, expected = cp.SequenceParallelBlock(block, group), block(whole)
    out = module(whole.chunk(2, 1)[rank // 2])
    expect_close(out, expected.chunk(2, 1)[rank // 2], **FLOAT64, read="the contract, under Args: group")
    upstream = randn(2, 12, 8, seed=52 + rank % 2, dtype=torch.float64)
    expected.backward(upstream)
    out.backward(upstream.chunk(2, 1)[rank // 2])
    theirs = {name: p.grad for name, p in block.named_parameters() if name.startswith("ln_")}
    found = {name: p.grad for name, p in module.named_parameters() if name in theirs}
    expect_close(found, theirs, atol=1e-9, rtol=1e-9, name="gradients", read="the contract, under Args: group")


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_SequenceParallelBlock_equals_the_block(ranks, n_ranks):
    result = ranks(run_block, n_ranks=n_ranks)
    for ledger in result.ledgers:
        case(f"B=2 T=12 C=8 on {n_ranks} ranks, forward and backward: the collectives of rank {ledger.rank}")
        found = {op: n for op, n in counts(ledger).items() if op in ("all-gather", "reduce-scatter")}
        expect_equal(found, {"all-gather": 4, "reduce-scatter": 4}, name="collectives", read=BLOCK)
        whole = 2 * 12 * 8 * 8
        reduced = sum(record.n_bytes for record in ledger.records if record.op == "all_reduce")
        problem = f"{reduced} bytes are all-reduced: more than the six parameters of C values that every rank has whole"
        expect_true(reduced <= 6 * 8 * 8, problem, answer=reduced, read=BLOCK)
        volume = ring_volume(ledger) - 2 * (n_ranks - 1) / n_ranks * reduced
        expected = 4 * 2 * (n_ranks - 1) / n_ranks * whole
        expect_close(volume, expected, name="bytes of gathers and scatters, as in a ring", read=BLOCK)


@pytest.mark.time_limit(20)
def test_SequenceParallelBlock_in_a_group(ranks):
    ranks(block_in_group, n_ranks=4)


def kept_by_block(rank, world_size):
    config = GPT2Config(vocab_size=16, context_len=64, dim=32, n_layers=1, n_heads=4)
    block, x = a_block(config), randn(2, 64, 32, dtype=torch.float64)
    whole = saved_bytes(lambda: block(x.clone().requires_grad_()), without=block.parameters())
    module = cp.SequenceParallelBlock(block)
    mine = x.chunk(world_size, 1)[rank].clone().requires_grad_()
    return saved_bytes(lambda: module(mine), without=module.parameters()), whole, x.nbytes


@pytest.mark.time_limit(20)
def test_SequenceParallelBlock_keeps_a_share(ranks):
    for kept, whole, stream in ranks(kept_by_block, n_ranks=2).values:
        case("B=2 T=64 C=32 on two ranks: bytes that autograd keeps")
        # Half of everything, the other half of the two gathered inputs, and some slack for copies of the mask and of
        # weights.
        most = whole / 2 + 2 * 0.5 * stream + 0.5 * stream
        problem = f"a rank keeps {kept:,} bytes of the {whole:,}: half of them and two gathered inputs make {most:,.0f}"
        expect_true(kept <= most, problem, answer=kept, read=BLOCK)


# ---- heads_to_sequence, sequence_to_heads ----------------------------------------------------------------------------


def exchange_on_ranks(rank, world_size, name):
    """Both directions of the exchange; ``name`` is the one that is graded, and the other is made here by indexing."""
    case(f"B=1 T=4 H=4 D=1 on two ranks, entries 10 t + h, groups of two; rank {rank}")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    function, at = getattr(cp, name), rank % 2
    table = torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])[None, :, :, None]
    positions, heads = (table.chunk(2, dim)[at] for dim in (1, 2))
    x, expected = (positions, heads) if name == "heads_to_sequence" else (heads, positions)
    expect_close(function(x, pairs[rank // 2]), expected, read=ULYSSES)
    case(f"B=2 T=12 H=8 D=3 on four ranks, with strides, float64; rank {rank}")
    whole, upstream = (randn(2, 8, 12, 3, seed=seed, dtype=torch.float64).transpose(1, 2) for seed in (1, 2))
    by_position, by_head = (whole.chunk(4, dim)[rank].detach() for dim in (1, 2))
    dims = (1, 2) if name == "heads_to_sequence" else (2, 1)
    mine = whole.chunk(4, dims[0])[rank].detach().clone().requires_grad_()
    out = function(mine, None)
    expect_close(out, by_head if name == "heads_to_sequence" else by_position, read=ULYSSES)
    case(f"B=2 T=12 H=8 D=3 on four ranks: the gradient, exchanged back; rank {rank}")
    expect_true(out.requires_grad, "the result is cut off from autograd", read=ULYSSES)
    out.backward(upstream.chunk(4, dims[1])[rank])
    expect_close(gradient(mine, "x"), upstream.chunk(4, dims[0])[rank], name="x's gradient", read=ULYSSES)
    if name == "heads_to_sequence":
        case("H=6 on four ranks")
        with expect_raises(ValueError, "6", "4", read=RAISES):
            cp.heads_to_sequence(torch.ones(1, 2, 6, 2), None)
        case("shares of 3, 2, 2 and 2 positions on four ranks")
        with expect_raises(ValueError, "3 + 2 + 2 + 2", "4 x 2 + 1", read=RAISES):
            cp.heads_to_sequence(torch.ones(1, 3 if rank == 0 else 2, 4, 2), None)
    else:
        case("T=7 on four ranks")
        with expect_raises(ValueError, "7", "4", read=RAISES):
            cp.sequence_to_heads(torch.ones(1, 7, 2, 2), None)


def check_exchange(result):
    case("two exchanges forward and one backward: one all-to-all each, of the bytes that the rank has")
    found = [counts(ledger) for ledger in result.ledgers]
    expect_equal(found, [{"all_to_all_single": 3}] * 4, name="collectives", read=ULYSSES)


@pytest.mark.time_limit(20)
def test_heads_to_sequence_on_ranks(ranks):
    check_exchange(ranks(exchange_on_ranks, "heads_to_sequence", n_ranks=4))


@pytest.mark.time_limit(20)
def test_sequence_to_heads_on_ranks(ranks):
    check_exchange(ranks(exchange_on_ranks, "sequence_to_heads", n_ranks=4))


# ---- ulysses_attention -----------------------------------------------------------------------------------------------


def whole_inputs(length: int, n_heads: int, n_kv_heads: int, dim: int, batch: int = 2) -> list[Tensor]:
    """q, k, v ``[B, H, T, D]`` in float64, the same on every rank, and a gradient of the output."""
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    return [randn(batch, h, length, dim, seed=i, dtype=torch.float64) for i, h in enumerate(heads)]


def attended(whole: list[Tensor], is_causal: bool) -> tuple[Tensor, list[Tensor]]:
    """PyTorch's output over the whole sequence, and its gradients of q, k and v."""
    q, k, v = leaves = [x.clone().requires_grad_() for x in whole[:3]]
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    expected.backward(whole[3])
    return expected.detach(), [x.grad for x in leaves]


def compare_attention(attend, whole, positions, is_causal, read):
    """An attention of this rank's positions, and its gradients, with PyTorch's over all of them."""
    out, grads = attended(whole, is_causal)
    mine = [x[:, :, positions].clone().requires_grad_() for x in whole[:3]]
    found = attend(*mine)
    expect_close(found, out[:, :, positions], **FLOAT64, read=read[0])
    found.backward(whole[3][:, :, positions])
    for name, x, grad in zip(("dq", "dk", "dv"), mine, grads, strict=True):
        got = x.grad if x.grad is not None else torch.zeros_like(x)
        expect_close(got, grad[:, :, positions], **FLOAT64, name=name, read=read[1])


def run_ulysses(rank, world_size, heads):
    for n_heads, n_kv_heads in heads:
        milestone(f"{n_heads} {n_kv_heads}")
        for is_causal in (False, True):
            sizes = f"B=2 T=12 H={n_heads} G={n_kv_heads} D=4"
            case(f"{sizes} on {world_size} ranks, causal {is_causal}, float64; rank {rank}")

            def attend(q, k, v, is_causal=is_causal):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return cp.ulysses_attention(q, k, v, is_causal).transpose(1, 2)

            whole = whole_inputs(12, n_heads, n_kv_heads, 4)
            compare_attention(attend, whole, torch.arange(12).chunk(world_size)[rank], is_causal, (ULYSSES, ULYSSES))


@pytest.mark.time_limit(20)
@pytest.mark.parametrize(("n_ranks", "heads"), [(2, [(4, 2), (6, 3)]), (4, [(8, 2), (4, 1)])])
def test_ulysses_attention_equals_the_whole(ranks, n_ranks, heads):
    result = ranks(run_ulysses, heads, n_ranks=n_ranks)
    for ledger in result.ledgers:
        case(f"B=2 T=12 D=4 on {n_ranks} ranks, {heads} heads, each twice forward and backward: rank {ledger.rank}")
        expect_equal(counts(ledger), {"all_to_all_single": 32}, name="collectives", read=ULYSSES)
        exchanged = sum(2 * h + 2 * math.lcm(g, n_ranks) for h, g in heads)
        expected = 2 * 2 * exchanged * 2 * (12 // n_ranks) * 4 * 8
        expect_equal(ledger.bytes_sent, expected, name="bytes passed in", read=ULYSSES_BYTES)


def ulysses_in_group(rank, world_size):
    case(f"groups of two ranks, T=4 H=2 D=4, causal; rank {rank}")
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    q, k, v, _ = (x[:, :, :, :] + rank // 2 for x in whole_inputs(4, 2, 2, 4))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).chunk(2, 1)[rank % 2]
    mine = (x.transpose(1, 2).chunk(2, 1)[rank % 2].float() for x in (q, k, v))
    out = cp.ulysses_attention(*mine, is_causal=True, group=group)
    expect_close(out, expected.float(), atol=1e-5, read=ULYSSES)
    case("H=3 on two ranks")
    with expect_raises(ValueError, "3", "2", read=RAISES):
        cp.ulysses_attention(*(torch.ones(1, 2, 3, 4) for _ in range(3)), group=group)
    case("shares of 3 and 2 positions")
    with expect_raises(ValueError, "3 + 2", read=RAISES):
        cp.ulysses_attention(*(torch.ones(1, 3 - rank % 2, 2, 4) for _ in range(3)), group=group)


def test_ulysses_attention_in_a_group(ranks):
    ranks(ulysses_in_group, n_ranks=4)


# ---- merge_attention -------------------------------------------------------------------------------------------------


def part_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by the textbook, and its logsumexp."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_merge_attention_by_hand():
    case("two queries, D=2, float32: o 1 and 10 with lse ln 3 and ln 1; o 2 and 20 with lse ln 1 and ln 4")
    o, lse = torch.tensor([[1.0, 1.0], [2.0, 4.0]]), torch.tensor([math.log(3.0), math.log(1.0)])
    other_o, other_lse = torch.tensor([[10.0, 5.0], [20.0, 9.0]]), torch.tensor([math.log(1.0), math.log(4.0)])
    found = cp.merge_attention(o, lse, other_o, other_lse)
    expected = torch.tensor([[3.25, 2.0], [16.4, 8.0]]), torch.tensor([math.log(4.0), math.log(5.0)])
    expect_close(found, expected, read=MERGE)


def test_merge_attention_equals_the_whole():
    case("[2, 3, 4, 5] queries, 7 keys in parts of 3 and 4, float64: output, logsumexp and gradients")
    q, k, v = (randn(2, 3, n, 5, seed=n, dtype=torch.float64).requires_grad_() for n in (4, 7, 8))
    v = v[:, :, :7]
    whole = part_of(q, k, v)
    merged = cp.merge_attention(*part_of(q, k[:, :, :3], v[:, :, :3]), *part_of(q, k[:, :, 3:], v[:, :, 3:]))
    expect_close(merged, whole, **FLOAT64, read=MERGE)
    weights = [randn(*x.shape, seed=9, dtype=torch.float64) for x in whole]
    of_whole, of_merged = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), (q, k))
        for pair in (whole, merged)
    )
    expect_close(list(of_merged), list(of_whole), **FLOAT64, name="gradients of q and k", answer=merged, read=MERGE)


def test_merge_attention_is_associative():
    case("three parts merged from the left and from the right, lse from -300 to 300, float64")
    parts = [
        (randn(6, 3, seed=i, dtype=torch.float64), 100 * randn(6, seed=9 + i, dtype=torch.float64)) for i in range(3)
    ]
    left = cp.merge_attention(*cp.merge_attention(*parts[0], *parts[1]), *parts[2])
    right = cp.merge_attention(*parts[0], *cp.merge_attention(*parts[1], *parts[2]))
    expect_close(left, right, **FLOAT64, read=MERGE)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_merge_attention_of_rows_without_keys(side):
    case(
        f"a row without keys on {'both sides' if side == 'both' else 'the ' + side}, another with; float64, "
        "gradients too"
    )
    o, other_o = (randn(2, 3, seed=i, dtype=torch.float64) for i in (1, 2))
    lse, other_lse = torch.tensor([0.5, 0.7]).double(), torch.tensor([-0.3, 0.2]).double()
    empty = torch.tensor([True, False])
    if side in ("left", "both"):
        o, lse = o.masked_fill(empty[:, None], 0), lse.masked_fill(empty, -math.inf)
    if side in ("right", "both"):
        other_o, other_lse = other_o.masked_fill(empty[:, None], 0), other_lse.masked_fill(empty, -math.inf)
    inputs = [x.requires_grad_() for x in (o, lse, other_o, other_lse)]
    merged, total = cp.merge_attention(*inputs)
    first = (o, lse) if side == "right" else (other_o, other_lse)
    expect_close((merged[0], total[0]), (first[0][0], first[1][0]), name="the row", read=MERGE)
    (merged.sum() + total[1]).backward()
    finite = all(x.grad is None or bool(x.grad.isfinite().all()) for x in inputs)
    expect_true(
        finite, "a gradient is NaN or infinite", answer=[x.grad for x in inputs], read="the contract, under Returns"
    )


def test_merge_attention_of_large_scores():
    case("lse 10,000 and 9,999, float32; and 1e4 below nothing")
    o, other = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    found = cp.merge_attention(o, torch.tensor([10_000.0]), other, torch.tensor([9_999.0]))
    weight = 1 / (1 + math.exp(-1.0))
    expected = torch.tensor([[weight + 2 * (1 - weight)]]), torch.tensor([10_000 + math.log1p(math.exp(-1.0))])
    expect_close(found, expected, read="the contract, under Returns")
    case("lse -10,000 and -10,001, float32")
    found = cp.merge_attention(o, torch.tensor([-10_000.0]), other, torch.tensor([-10_001.0]))
    expected = expected[0], torch.tensor([-10_000 + math.log1p(math.exp(-1.0))])
    expect_close(found, expected, read="the contract, under Returns")


def test_merge_attention_dtypes():
    case("o float32 with other_o bfloat16: float32; the inputs stay")
    o, lse, other_lse = randn(3, 2), randn(3), randn(3, seed=1)
    other = randn(3, 2, seed=2).bfloat16()
    inputs = {"o": o, "lse": lse, "other_o": other, "other_lse": other_lse}
    before = {name: x.clone() for name, x in inputs.items()}
    merged, total = cp.merge_attention(o, lse, other, other_lse)
    found = [str(merged.dtype), str(total.dtype)]
    expect_equal(found, ["torch.float32"] * 2, name="dtypes", read="the contract, under Returns")
    for name, x in inputs.items():
        expect_close(x, before[name], name=f"{name} afterwards", answer=[merged, total])
    case("o and other_o bfloat16, lse float32: bfloat16 and float32")
    found = [str(x.dtype) for x in cp.merge_attention(o.bfloat16(), lse, other, other_lse)]
    expect_equal(found, ["torch.bfloat16", "torch.float32"], name="dtypes", read="the contract, under Returns")
    case("o bfloat16 with other_o float32: float32")
    merged, _ = cp.merge_attention(other, lse, o, other_lse)
    expect_equal(str(merged.dtype), "torch.float32", name="dtype", read="the contract, under Returns")


@pytest.mark.parametrize("side", ["left", "right"])
def test_merge_attention_returns_new_tensors(side):
    case(f"no row saw a key on the {side}: the result shares no memory with the other side")
    full, empty = (randn(3, 2), randn(3)), (torch.zeros(3, 2), torch.full((3,), -math.inf))
    found = cp.merge_attention(*(empty + full if side == "left" else full + empty))
    expect_close(found, full, read=MERGE)
    shared = [name for name, x, y in zip(("o", "lse"), found, full, strict=True) if x.data_ptr() == y.data_ptr()]
    expect_equal(shared, [], name="shared", answer=[*found, shared], read="the contract, under Returns: new tensors")


# ---- to zigzag -------------------------------------------------------------------------------------------------------


def test_zigzag_indices_by_hand():
    case("T=12 on three ranks: chunks of two")
    found = [torch.as_tensor(cp.zigzag_indices(12, rank, 3)).tolist() for rank in range(3)]
    expect_equal(found, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]], read=ZIGZAG)


@pytest.mark.parametrize(("length", "n_ranks"), [(2, 1), (16, 4), (60, 5)])
def test_zigzag_indices_deal_out_equal_work(length, n_ranks):
    case(f"T={length} on {n_ranks} ranks: every position once, and the same number of causal scores on all")
    dealt = [cp.zigzag_indices(length, rank, n_ranks) for rank in range(n_ranks)]
    kinds = [(type(x).__name__, str(getattr(x, "dtype", ""))) for x in dealt]
    expect_equal(kinds, [("Tensor", "torch.int64")] * n_ranks, name="types", read="the contract, under Returns")
    expect_equal(sorted(torch.cat(dealt).tolist()), list(range(length)), name="all positions", read=ZIGZAG)
    work = [int((x + 1).sum()) for x in dealt]
    expect_true(len(set(work)) == 1, f"causal scores of the ranks: {work}", answer=dealt, read=ZIGZAG)


@pytest.mark.parametrize(
    ("length", "rank", "n_ranks", "says"),
    [(10, 0, 4, "10"), (12, 0, 4, "12"), (8, 2, 2, "2"), (8, -1, 2, "-1")],
)
def test_zigzag_indices_refuse(length, rank, n_ranks, says):
    case(f"T={length}, rank {rank} of {n_ranks}")
    with expect_raises(ValueError, says, read=RAISES):
        cp.zigzag_indices(length, rank, n_ranks)


ZIGZAGS = {2: [[0, 1, 6, 7], [2, 3, 4, 5]], 4: [[0, 7], [1, 6], [2, 5], [3, 4]]}  # of 8 positions


def shard_on_ranks(rank, world_size):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for dim, of_ranks in ((0, None), (1, group), (-2, None)):
        n_ranks = 2 if of_ranks else 4
        case(f"token ids [8, 8, 8] along dim {dim} on {n_ranks} ranks; rank {rank}")
        ids = torch.arange(8)
        x = 100 * ids[:, None, None] + 10 * ids[:, None] + ids
        chosen = torch.tensor(ZIGZAGS[n_ranks][rank % n_ranks])
        expect_close(cp.zigzag_shard(x, dim, of_ranks), x.index_select(dim, chosen), read=ZIGZAG)
    case(f"[2, 8] along dim 1 on four ranks, float64: the gradient; rank {rank}")
    x, upstream = randn(2, 8, dtype=torch.float64).requires_grad_(), randn(2, 2, seed=rank + 1, dtype=torch.float64)
    out = cp.zigzag_shard(x, 1, None)
    expect_true(out.requires_grad, "the result is cut off from autograd", read="the contract, under Returns")
    out.backward(upstream)
    expected = torch.zeros(2, 8, dtype=torch.float64).index_copy(1, torch.tensor(ZIGZAGS[4][rank]), upstream)
    expect_close(x.grad, expected, name="x's gradient", read="the contract, under Returns")
    case("T=6 on two ranks")
    with expect_raises(ValueError, "6", read=RAISES):
        cp.zigzag_shard(torch.ones(6), 0, group)


def test_zigzag_shard_on_ranks(ranks):
    result = ranks(shard_on_ranks, n_ranks=4)
    case("zigzag_shard sends nothing")
    expect_equal(
        [counts(ledger) for ledger in result.ledgers], [{}] * 4, name="messages", read="the contract, under Cost"
    )


def gather_zigzag_on_ranks(rank, world_size):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for dim, of_ranks in ((0, None), (1, group), (-2, None)):
        n_ranks = 2 if of_ranks else 4
        case(f"token ids [8, 8, 8] along dim {dim} from {n_ranks} ranks; rank {rank}")
        ids = torch.arange(8)
        x = 100 * ids[:, None, None] + 10 * ids[:, None] + ids
        mine = x.index_select(dim, torch.tensor(ZIGZAGS[n_ranks][rank % n_ranks]))
        expect_close(cp.zigzag_gather(mine, dim, of_ranks), x, read=ZIGZAG)
    case(f"[2, 2] along dim 1 from four ranks, float64: the gradient; rank {rank}")
    mine = randn(2, 2, seed=rank, dtype=torch.float64).requires_grad_()
    upstream = [randn(2, 8, seed=10 + r, dtype=torch.float64) for r in range(4)]
    out = cp.zigzag_gather(mine, 1, None)
    expect_true(out.requires_grad, "the result is cut off from autograd", read="the contract, under Returns")
    out.backward(upstream[rank])
    expected = sum(upstream, torch.zeros(()))[:, ZIGZAGS[4][rank]]
    expect_close(mine.grad, expected, name="x's gradient", read="the contract, under Returns")
    milestone("refusals")
    case("shares of 4, 2, 2 and 2 positions")
    with expect_raises(ValueError, "4 + 2 + 2 + 2", "4 x 2 + 2", read=RAISES):
        cp.zigzag_gather(torch.ones(4 if rank == 0 else 2), 0, None)
    case("shares of 3 positions on four ranks")
    with expect_raises(ValueError, read=RAISES):
        cp.zigzag_gather(torch.ones(3), 0, None)


def test_zigzag_gather_on_ranks(ranks):
    result = ranks(gather_zigzag_on_ranks, n_ranks=4)
    case("four times forward, once backward: one all-gather and one reduce-scatter each")
    found = [counts(Ledger(ledger.rank, ledger.before("refusals"))) for ledger in result.ledgers]
    expect_equal(found, [{"all-gather": 4, "reduce-scatter": 1}] * 4, name="messages", read="the contract, under Cost")


# ---- ring_block ------------------------------------------------------------------------------------------------------


def positions_of(rank: int, length: int, layout: str, n_ranks: int = 4) -> Tensor:
    """Positions of a rank with ``length`` of them; written again, so that this exercise needs no other."""
    if layout == "contiguous":
        return torch.arange(rank * length, (rank + 1) * length)
    half = length // 2
    first, last = (torch.arange(chunk * half, (chunk + 1) * half) for chunk in (rank, 2 * n_ranks - 1 - rank))
    return torch.cat([first, last])


def as_words(block) -> str | None:
    """A block as it is compared and shown."""
    if block is None:
        return None
    expect_true(isinstance(block, tuple) and len(block) == 3, f"{block!r} is no (queries, keys, masked)", read=ZIGZAG)
    rows, cols, masked = block
    return f"queries {rows.start}:{rows.stop}, keys {cols.start}:{cols.stop}, {'masked' if masked else 'no mask'}"


def test_ring_block_by_hand():
    case("4 positions on a rank, causal, zigzag: rank 1 with the pairs of ranks 0, 1 and 2")
    found = [as_words(cp.ring_block(1, source, 4, True, "zigzag")) for source in range(3)]
    wanted = ["queries 0:4, keys 0:2, no mask", "queries 0:4, keys 0:4, masked", "queries 2:4, keys 0:4, no mask"]
    expect_equal(found, wanted, read=ZIGZAG)
    case("4 positions on a rank, causal, contiguous: rank 1 with the pairs of ranks 0, 1 and 2")
    found = [as_words(cp.ring_block(1, source, 4, True, "contiguous")) for source in range(3)]
    expect_equal(found, ["queries 0:4, keys 0:4, no mask", "queries 0:4, keys 0:4, masked", None], read=RING)
    case("5 positions on a rank, causal, contiguous: rank 1 with the pair of rank 0")
    try:
        odd = as_words(cp.ring_block(1, 0, 5, True))
    except ValueError:
        expect_true(False, "an odd length is refused, though contiguous shares are not halved", answer=5, read=RING)
    expect_equal(odd, "queries 0:5, keys 0:5, no mask", read=RING)
    case("4 positions on a rank, without a mask: rank 1 with the pairs of ranks 0, 1 and 2")
    for layout in ("contiguous", "zigzag"):
        found = [as_words(cp.ring_block(1, source, 4, layout=layout)) for source in range(3)]
        expect_equal(found, ["queries 0:4, keys 0:4, no mask"] * 3, name=layout, read=RING)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_block_covers_every_score_once(layout, is_causal):
    for rank in range(4):
        for source in range(4):
            case(
                f"6 positions on a rank, {layout}, causal {is_causal}: rank {rank} with the pair of rank {source} of 4"
            )
            block = cp.ring_block(rank, source, 6, is_causal, layout)
            seen = torch.zeros(6, 6, dtype=torch.bool)
            if block is not None:
                rows, cols, masked = block
                whole = torch.ones_like(seen[rows, cols])
                seen[rows, cols] = whole.tril(whole.shape[1] - whole.shape[0]) if masked else whole
            queries, keys = (positions_of(r, 6, layout) for r in (rank, source))
            may = keys <= queries[:, None] if is_causal else torch.ones_like(seen)
            expect_close(seen, may, name="scores that are computed", answer=as_words(block), read=ZIGZAG)


def test_ring_block_refuses():
    case("layout 'striped'")
    with expect_raises(ValueError, "striped", read=RAISES):
        cp.ring_block(0, 1, 4, True, "striped")
    case("5 positions on a rank, zigzag")
    with expect_raises(ValueError, "5", read=RAISES):
        cp.ring_block(0, 1, 5, True, "zigzag")
    case("without a mask: layout 'striped'")
    with expect_raises(ValueError, "striped", read=RAISES):
        cp.ring_block(0, 1, 4, False, "striped")
    case("without a mask: 5 positions on a rank, zigzag")
    with expect_raises(ValueError, "5", read=RAISES):
        cp.ring_block(0, 1, 5, False, "zigzag")


# ---- ring_attention --------------------------------------------------------------------------------------------------


def run_ring(rank, world_size, length, n_heads, n_kv_heads):
    for layout in ("contiguous", "zigzag"):
        for is_causal in (False, True):
            sizes = f"B=2 T={length} H={n_heads} G={n_kv_heads} D=4"
            case(f"{sizes} on {world_size} ranks, {layout}, causal {is_causal}, float64; rank {rank}")
            whole = whole_inputs(length, n_heads, n_kv_heads, 4)
            positions = positions_of(rank, length // world_size, layout, world_size)

            def attend(q, k, v, is_causal=is_causal, layout=layout):
                return cp.ring_attention(q, k, v, is_causal, layout=layout)

            compare_attention(attend, whole, positions, is_causal, (RING, BACK))


RINGS = [(2, 8, 2, 2), (3, 18, 4, 2), (4, 40, 3, 1)]


@pytest.mark.time_limit(20)
@pytest.mark.parametrize(("n_ranks", "length", "h", "g"), RINGS)
def test_ring_attention_equals_the_whole(ranks, n_ranks, length, h, g):
    sizes = f"T={length} H={h} G={g} D=4 on {n_ranks} ranks"
    case(f"{sizes}, four times forward and backward")
    result = ranks(run_ring, length, h, g, n_ranks=n_ranks)
    pair = 2 * 2 * g * (length // n_ranks) * 4 * 8
    for ledger in result.ledgers:
        case(f"{sizes}, four times forward and backward: bytes of rank {ledger.rank}")
        others = {op for op in counts(ledger) if op not in ("isend", "irecv", "send", "recv")}
        problem = (
            f"keys and values should go round the ring in messages, but the rank calls {', '.join(sorted(others))}"
        )
        expect_true(not others, problem, answer=sorted(others), read=RING)
        expect_equal(ledger.bytes_sent, 4 * 3 * (n_ranks - 1) * pair, name="bytes sent", read=RING_BYTES)


def ring_in_group(rank, world_size):
    case(f"groups of two ranks, T=4 H=2 D=4, causal, contiguous, q with strides; rank {rank}")
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    q, k, v, _ = (x + rank % 2 for x in whole_inputs(4, 2, 2, 4))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(2, 2)[rank // 2]
    mine = [x.chunk(2, 2)[rank // 2].transpose(1, 2).contiguous().transpose(1, 2).float() for x in (q, k, v)]
    before = [x.clone() for x in mine]
    out = cp.ring_attention(*mine, is_causal=True, group=group)
    expect_close(out, expected.float(), atol=1e-5, read=RING)
    expect_close(mine, before, name="q, k and v afterwards")
    case(f"groups of two ranks, T=256 H=2 D=16, bfloat16, causal, zigzag; rank {rank}")
    whole = [x.bfloat16() for x in whole_inputs(256, 2, 2, 16)]
    q, k, v = (x.double() for x in whole[:3])
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    positions = positions_of(rank // 2, 128, "zigzag", 2)
    out = cp.ring_attention(*(x[:, :, positions] for x in whole[:3]), True, group, "zigzag")
    expect_close(out, expected[:, :, positions].bfloat16(), atol=2e-2, rtol=2e-2, read=RING)

    case(f"a ring of one rank, T=6, causal, zigzag; rank {rank}")
    alone = [dist.new_group([r]) for r in range(4)][rank]
    q, k, v, _ = whole_inputs(6, 2, 1, 4)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expect_close(cp.ring_attention(q, k, v, True, alone, "zigzag"), expected, **FLOAT64, read=RING)
    x = torch.ones(1, 2, 4, 4)
    case("shares of 4, 3, 3 and 3 positions on four ranks")
    with expect_raises(ValueError, "4 + 3 + 3 + 3", "4 x 3 + 1", read=RAISES):
        cp.ring_attention(*(x[:, :, : 4 if rank == 0 else 3] for _ in range(3)))
    case("shares of 3, 2, 2 and 2 positions on four ranks, zigzag")
    with expect_raises(ValueError, "3 + 2 + 2 + 2", "4 x 2 + 1", read=RAISES):
        cp.ring_attention(*(x[:, :, : 3 if rank == 0 else 2] for _ in range(3)), layout="zigzag")
    case("4 queries on each of four ranks, keys and values of 4, 3, 3 and 3 positions")
    with expect_raises(ValueError, "4 + 3 + 3 + 3", "4 x 3 + 1", read=RAISES):
        cp.ring_attention(x, *(x[:, :, : 4 if rank == 0 else 3] for _ in range(2)))
    case("layout 'striped'")
    with expect_raises(ValueError, "striped", read=RAISES):
        cp.ring_attention(x, x, x, layout="striped")
    case("3 positions on a rank, zigzag")
    with expect_raises(ValueError, "3", "2 x 1 + 1", read=RAISES):
        cp.ring_attention(*(x[:, :, :3] for _ in range(3)), layout="zigzag")


@pytest.mark.time_limit(20)
def test_ring_attention_in_a_group(ranks):
    ranks(ring_in_group, n_ranks=4)


def count_work(rank, world_size):
    from torch.utils.flop_counter import FlopCounterMode  # here, because every rank of every test imports this file

    found = {}
    for layout in ("contiguous", "zigzag"):
        whole = whole_inputs(96, 2, 2, 4, batch=1)
        positions = positions_of(rank, 96 // world_size, layout, world_size)
        mine = [x[:, :, positions].requires_grad_() for x in whole[:3]]
        with FlopCounterMode(display=False) as forward:
            out = cp.ring_attention(*mine, is_causal=True, layout=layout)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        found[layout] = {"forward": forward.get_total_flops(), "backward": backward.get_total_flops() / 2.5}
    return found


@pytest.mark.time_limit(20)
def test_ring_attention_computes_no_more_than_it_must(ranks):
    work = ranks(count_work, n_ranks=3).values
    block = 4 * 2 * 32 * 32 * 4  # FLOPs of two products, for 2 heads, 32 queries, 32 keys and width 4
    for layout, whole, said in (
        ("contiguous", [0, 1, 2], "0, 1 and 2 whole ones"),
        ("zigzag", [1, 1, 1], "one whole block on each"),
    ):
        for which in ("forward", "backward"):
            case(f"32 positions on each of three ranks, causal, {layout}: blocks that are multiplied in {which}")
            found = [flops[layout][which] / block for flops in work]
            diagonal = found[0] - whole[0]
            fits = 0 < diagonal <= 1 and all(abs(a - b - diagonal) < 1e-6 for a, b in zip(found, whole, strict=True))
            shown = ", ".join(f"{blocks:.2f}" for blocks in found)
            problem = f"the ranks compute {shown} blocks; expected {said}, and the diagonal's, at most 1"
            expect_true(fits, problem, answer=found, read=ZIGZAG if layout == "zigzag" else RING)


class Products(TorchDispatchMode):
    """Marks every product of matrices in the ledger."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in ("mm", "bmm", "matmul", "addmm", "baddbmm"):
            milestone("product")
        return func(*args, **(kwargs or {}))


@contextmanager
def marked_waits():
    """Marks in the ledger where the rank waits for a message."""
    wait = Pending.wait

    def marked(self, *args, **kwargs):
        milestone("wait")
        return wait(self, *args, **kwargs)

    Pending.wait = marked
    try:
        yield
    finally:
        Pending.wait = wait


def watch_order(rank, world_size):
    q, k, v, do = (x[:, :, 8 * rank : 8 * rank + 8] for x in whole_inputs(8 * world_size, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with marked_waits(), Products():
        milestone("forward")
        out = cp.ring_attention(*leaves)
        milestone("backward")
        out.backward(do)


def order_of(ledger) -> dict[str, list[str]]:
    """What a rank did, in order, in forward and in backward: "send", "product" and "wait"."""
    sends = [(r.at_s, "send") for r in ledger.records if r.op in ("isend", "send")]
    phases: dict[str, list[str]] = {}
    for _, name in sorted(sends + [(m.at_s, m.name) for m in ledger.milestones]):
        if name in ("forward", "backward"):
            events = phases.setdefault(name, [])
        else:
            events.append(name)
    return phases


@pytest.mark.time_limit(20)
def test_ring_attention_sends_while_it_computes(ranks):
    for ledger in ranks(watch_order, n_ranks=3).ledgers:
        for phase, events in order_of(ledger).items():
            case(
                f"8 positions on each of three ranks, no mask, {phase}: the order of sends, products and waits; rank "
                f"{ledger.rank}"
            )
            n_products, n_sends = events.count("product"), events.count("send")
            messages = max(1, n_sends // (2 if phase == "forward" else 4))  # for one pair
            places = [i for i, event in enumerate(events) if event == "product"]
            expect_true(
                n_products % 3 == 0 and places, f"{n_products} products for three blocks", answer=events, read=RING
            )
            for block in range(3):
                before = events[: places[block * n_products // 3]]
                sent, waited = before.count("send"), before.count("wait")
                due = messages * min(block + 1, 2)
                problem = (
                    f"block {block + 1} of 3 is computed when {sent} messages of {due} have been started: the next "
                    "pair should be on its way"
                )
                expect_true(sent >= due, problem, answer=events, read=RING)
                most = 2 * messages * (block + (max(0, block - 2) if phase == "backward" else 0))
                problem = (
                    f"before block {block + 1} of 3 the rank has waited {waited} times: it waits for the pair that "
                    "it should receive while it computes"
                )
                expect_true(waited <= most, problem, answer=events, read=RING)


def most_pairs(run, pair_bytes: int, times: int = 4) -> float:
    """The most pairs of K and V, in one tensor or in two, that a call holds at once in memory that it allocated itself.

    A thread of gloo may let go of a buffer late, so the call is repeated and the smallest count taken, as in
    `peak_bytes`.
    """
    found = []
    for _ in range(times):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        found.append(max(accumulate((n for n in changes if abs(n) in (pair_bytes, pair_bytes // 2)), initial=0)))
    return min(found) / pair_bytes


def measure_memory(rank, world_size):
    length, width = 64, 32
    q, k, v = (randn(1, h, length, width, seed=i).requires_grad_() for i, h in enumerate((3, 1, 1)))
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    kept = [saved_bytes(lambda qkv=qkv: cp.ring_attention(*qkv)) for qkv in ((q, k, v), halves)]
    held = most_pairs(lambda: cp.ring_attention(q.detach(), k.detach(), v.detach()), 2 * k.nbytes)
    return kept, held, [2 * x.nbytes + 2 * y.nbytes + 3 * length * 4 for x, y in ((q, k), halves[:2])]


@pytest.mark.time_limit(20)
def test_ring_attention_holds_two_pairs(ranks):
    for kept, held, allowed in ranks(measure_memory, n_ranks=4).values:
        for dtype, n_bytes, most in zip(("float32", "bfloat16"), kept, allowed, strict=True):
            sizes = f"64 positions, 3 query heads and one key head of 32 on each of four ranks, {dtype}"
            case(f"{sizes}: bytes that autograd keeps")
            problem = f"autograd keeps {n_bytes:,} bytes: q, k, v, the output and the logsumexp are {most:,}"
            expect_true(n_bytes <= most, problem, answer=n_bytes, read="the contract, under Returns")
        case("64 positions, 3 query heads and one key head of 32 on each of four ranks: travelling pairs of K and V")
        problem = (
            f"a rank holds {held:g} travelling pairs of K and V at once, and should hold two: the one in use, and "
            "the next"
        )
        expect_true(held <= 2, problem, answer=held, read=RING)


def run_llama(rank, world_size):
    torch.manual_seed(0)
    model = Llama(COPIER).double()
    alone = copy.deepcopy(model)
    tokens, targets = (x[0, :2, :32] for x in copies(1))
    targets = tokens.roll(1, 1)
    positions = positions_of(rank, 32 // world_size, "zigzag", world_size)

    def around(q, k, v):
        return cp.ring_attention(q, k, v, is_causal=True, layout="zigzag")

    case(
        f"a Llama with chapter 2's RoPE at zigzag positions, B=2 T=32 on {world_size} ranks, float64: logits; rank "
        f"{rank}"
    )
    logits, whole = logits_of(model, tokens[:, positions], positions, around), alone(tokens).float()
    expect_close(logits, whole[:, positions], read=ZIGZAG)
    for found, aim in ((logits, targets[:, positions]), (whole, targets)):
        functional.cross_entropy(found.flatten(0, 1), aim.flatten(), reduction="sum").backward()
    case(f"a Llama with chapter 2's RoPE at zigzag positions, B=2 T=32 on {world_size} ranks: gradients; rank {rank}")
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    found, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (model, alone))
    expect_close(found, expected, atol=1e-4, rtol=1e-4, name="gradients", read=BACK)


@pytest.mark.time_limit(20)
def test_ring_attention_in_a_llama(ranks):
    ranks(run_llama, n_ranks=2)


# ---- context_parallel_bytes ------------------------------------------------------------------------------------------

GROUPED = LlamaConfig(dim=48, n_layers=3, n_heads=12, n_kv_heads=4)


def test_context_parallel_bytes_by_hand():
    case("B=1 T=8, three layers of 12 heads of 4 with 4 key heads, two ranks: ring")
    # A pair is 2 x 4 heads x 4 positions x 4 wide x 2 bytes = 256 bytes; three of them a layer.
    expect_equal(cp.context_parallel_bytes(GROUPED, 1, 8, 2, "ring"), 3 * 3 * 256, read=RING_BYTES)
    case("B=1 T=10, three layers of 12 heads of 4 with 4 key heads, five ranks: ring")
    try:
        on_five = cp.context_parallel_bytes(GROUPED, 1, 10, 5, "ring")
    except ValueError:
        expect_true(False, "5 ranks are refused for 12 heads, but a ring cuts no heads", answer=5, read=RING_BYTES)
    expect_equal(on_five, 3 * 3 * 4 * 128, read=RING_BYTES)
    case("B=1 T=8, three layers of 12 heads of 4 with 4 key heads, two ranks: ulysses")
    # 12 + 4 + 4 + 12 heads of 4 positions x 4 wide x 2 bytes = 32 bytes; half of them is sent, forward and backward.
    expect_equal(cp.context_parallel_bytes(GROUPED, 1, 8, 2, "ulysses"), 3 * 2 * 32 * 32 // 2, read=ULYSSES_BYTES)


@pytest.mark.parametrize(
    ("config", "batch", "length", "n_ranks", "ring", "ulysses"),
    [
        (LLAMA_2_7B, 1, 16_384, 8, 22_548_578_304, 3_758_096_384),
        (LLAMA_2_70B, 1, 16_384, 16, 15_099_494_400, 6_291_456_000),
        (GPT2Config(vocab_size=16, context_len=16, dim=12, n_layers=2, n_heads=3), 2, 6, 3, 2304, 1024),
        (LLAMA_2_7B, 4, 4096, 1, 0, 0),
        # 4 key/value heads on 6 ranks are sent as 12, the least common multiple: 2 x 12 + 2 x 12 heads of 2 x 2
        # bytes, 5
        # of 6 leave, twice
        (LlamaConfig(vocab_size=16, dim=24, n_layers=1, n_heads=12, n_kv_heads=4, hidden_dim=8), 1, 6, 6, 480, 320),
    ],
)
def test_context_parallel_bytes_of_models(config, batch, length, n_ranks, ring, ulysses):
    case(f"C={config.dim} L={config.n_layers} H={config.n_heads}, B={batch} T={length} on {n_ranks} ranks")
    found = {kind: cp.context_parallel_bytes(config, batch, length, n_ranks, kind) for kind in ("ring", "ulysses")}
    expect_equal(found, {"ring": ring, "ulysses": ulysses}, name="bytes", read=f"{RING_BYTES} and {ULYSSES_BYTES}")
    types = {kind: type(n_bytes).__name__ for kind, n_bytes in found.items()}
    expect_equal(types, dict.fromkeys(found, "int"), name="type", answer=found, read="the contract, under Returns")


def test_context_parallel_bytes_refuse():
    for says, (length, n_ranks, kind) in {
        ("10", "4"): (10, 4, "ring"),
        ("9", "4"): (9, 4, "ulysses"),
        ("12", "8"): (16, 8, "ulysses"),
        ("striped",): (8, 2, "striped"),
        ("zigzag",): (8, 2, "zigzag"),  # behind "ulysses" in the alphabet
    }.items():
        case(f"T={length}, 12 query heads, {n_ranks} ranks, kind {kind!r}")
        with expect_raises(ValueError, *says, read=RAISES):
            cp.context_parallel_bytes(GROUPED, 1, length, n_ranks, kind)


def run_for_bytes(rank, world_size):
    leaves = [randn(2, 6, h, 4).bfloat16().requires_grad_() for h in (12, 4, 4)]
    cp.ring_attention(*(x.transpose(1, 2) for x in leaves)).sum().backward()
    milestone("ulysses")
    cp.ulysses_attention(*leaves).sum().backward()


def backward_in_bfloat16(rank, world_size):
    q, k, v, do = (randn(1, 2, 4, 4, seed=i).bfloat16().requires_grad_() for i in range(4))
    cp.ring_attention(q, k, v).backward(do)


@pytest.mark.time_limit(20)
def test_ring_attention_sends_in_the_inputs_dtype(ranks):
    for ledger in ranks(backward_in_bfloat16, n_ranks=2).ledgers:
        case(
            "two ranks, two heads of 4 positions, 4 wide, bfloat16, forward and backward: bytes that rank "
            f"{ledger.rank} sends"
        )
        sent = sum(r.n_bytes for r in ledger.records if r.sends and r.to is not None)
        read = "the contract, under Cost: pairs of dK and dV in the inputs' dtype"
        expect_equal(sent, 3 * 2 * 2 * 4 * 4 * 2, name="bytes of three pairs", read=read)


def sums_in_bfloat16(rank, world_size):
    # Queries are 0, so each of the four keys has weight 1/4, and every block's part of the sums is exact in bfloat16,
    # where 256 is followed by 258.
    q, k, v, do = torch.zeros(4, 1, 1, 1, 4)
    k[..., 0] = (2048.0, -7.5, 7.5, -7.5)[rank]
    v[..., 0] = (1.0, -1.0, 1.0, -1.0)[rank]
    v[..., 1] = (256.0, 258.0, 258.0, 258.0)[rank]
    do[..., 0] = 1.0
    q, k, v, do = (x.bfloat16().requires_grad_() for x in (q, k, v, do))
    case(f"four ranks with a position each, q = 0, bfloat16: the mean of 256, 258, 258 and 258; rank {rank}")
    out = cp.ring_attention(q, k, v)
    read = "the contract, under Returns: sums are in float32 at least"
    expect_close(out, torch.tensor([0.0, 258.0, 0.0, 0.0]).bfloat16().view_as(q), atol=1e-3, rtol=1e-3, read=read)
    case(f"four ranks with a position each, bfloat16: dq, which is 256 + 3 x 0.9375, rounded to 258; rank {rank}")
    out.backward(do)
    expected = torch.tensor([258.0, 0.0, 0.0, 0.0]).bfloat16().view_as(q)
    expect_close(gradient(q, "q"), expected, atol=1e-3, rtol=1e-3, name="dq", read=read)


@pytest.mark.time_limit(20)
def test_ring_attention_sums_in_float32(ranks):
    ranks(sums_in_bfloat16, n_ranks=4)


def test_ring_attention_refuses_a_second_derivative(ranks):
    ranks(second_derivative, n_ranks=2)


def second_derivative(rank, world_size):
    case(f"two ranks: the gradient of a gradient; rank {rank}")
    q, k, v, do = (randn(1, 1, 4, 4, seed=i).requires_grad_() for i in range(4))
    (grad,) = torch.autograd.grad((cp.ring_attention(q, k, v) * do).sum(), q, create_graph=True)
    with expect_raises(RuntimeError, "second derivative", read="the contract, under Raises"):
        grad.sum().backward()


@oracle
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_context_parallel_bytes_are_the_ledgers(ranks, n_ranks):
    for ledger in ranks(run_for_bytes, n_ranks=n_ranks).ledgers:
        ring = ledger.before("ulysses")
        for kind, records in {"ring": ring, "ulysses": ledger.records[len(ring) :]}.items():
            case(f"{kind} on {n_ranks} ranks, bfloat16, forward and backward; rank {ledger.rank}")
            leaving = sum(r.n_bytes for r in records if r.sends) * (1 if kind == "ring" else (n_ranks - 1) / n_ranks)
            counted = cp.context_parallel_bytes(GROUPED, 2, 6 * n_ranks, n_ranks, kind)
            expect_equal(counted, GROUPED.n_layers * int(leaving), name="bytes", read=RING_BYTES)


# ---- hidden_length ---------------------------------------------------------------------------------------------------


def test_hidden_length_by_hand():
    case("12 query heads and 4 key heads, 600 FLOPs and 10 bytes a second: L x 12 / 600 = 4 / 10 at L = 20")
    expect_equal(cp.hidden_length(GROUPED, 4, 600.0, 10.0), 20, read=HIDDEN)
    case("12 query heads and 4 key heads, 610 FLOPs and 10 bytes a second: 20.33 positions are rounded up")
    expect_equal(cp.hidden_length(GROUPED, 4, 610.0, 10.0), 21, read=HIDDEN)
    case("GPT-2, whose 3 query heads have 3 key heads, 600 FLOPs and 10 bytes a second")
    gpt2 = GPT2Config(vocab_size=16, context_len=16, dim=12, n_layers=2, n_heads=3)
    expect_equal(cp.hidden_length(gpt2, 4, 600.0, 10.0), 60, read=HIDDEN)


@pytest.mark.parametrize(
    ("config", "n_ranks", "expected"),
    [(LLAMA_2_7B, 4, 2198), (LLAMA_2_70B, 8, 275), (LLAMA_2_7B, 2, 2198), (LLAMA_2_7B, 1, 1)],
)
def test_hidden_length_of_models(config, n_ranks, expected):
    case(f"H={config.n_heads} G={config.n_kv_heads} on {n_ranks} ranks of 989 TFLOP/s and 450 GB/s")
    found = cp.hidden_length(config, n_ranks, 989e12, 450e9)
    expect_equal(found, expected, read=HIDDEN)
    expect_equal(type(found).__name__, "int", name="type", answer=found, read="the contract, under Returns")


def test_hidden_length_is_at_least_one():
    case("a slow processor and a fast wire")
    expect_equal(cp.hidden_length(LLAMA_2_7B, 4, 1e9, 1e12), 1, read=HIDDEN)
