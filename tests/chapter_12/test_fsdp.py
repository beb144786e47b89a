"""FSDP, graded: equal to training on one process, by what a rank holds, and by what it sends.

The model that everything is tried on is made of PyTorch's own layers. What is compared with is that model on one
process,
ZeroRedundancyOptimizer, and fully_shard. Memory is counted by the allocator, bytes sent by the ledger.
"""

import copy
import math
import tempfile
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.given.parallel.sharding import all_gather_row, peak_bytes
from lib.ranks import milestone
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

fsdp = graded("fsdp")

MEMORY, SHARD, ZERO1, ZERO2, FLAT, ZERO3, CLIP = (f"eq-fsdp-{n}" for n in (1, 2, 3, 4, 5, 6, 7))
GATHER = ("all_gather_into_tensor", "all_gather_single")
SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")
PARTS = "it uses `FlatShard`: if that does not pass, fix it first"


class Net(nn.Module):
    """Blocks between two layers, a scale of one element, a tied head, and outputs that are no tensors alone."""

    def __init__(self, n_blocks: int = 3, dim: int = 8, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(n_blocks)
        )
        self.tied = nn.Linear(3, dim, bias=False)
        self.tied.weight = self.inp.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.fails_in = ""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> dict:
        x = self.inp(x) if shift is None else self.inp(x) + shift
        for i, block in enumerate(self.blocks):
            if i == 1 and self.fails_in == "forward":
                fail()
            if i == 1 and self.fails_in == "backward":
                x.register_hook(fail)
            x = x + block(x)
        return {"out": (x @ self.tied.weight * self.scale,), "name": "net"}


def fail(*_):
    raise KeyError("on purpose")


def loss_of(model: nn.Module, x: Tensor, **inputs) -> Tensor:
    return model(x, **inputs)["out"][0].float().square().mean()


def inputs_of(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def cut(row: Tensor, rank: int, world_size: int) -> Tensor:
    """A row's share, padded with zeros; by hand, so that no exercise is needed."""
    size = math.ceil(len(row) / world_size)
    return nn.functional.pad(row, (0, size * world_size - len(row)))[rank * size : (rank + 1) * size].clone()


@contextmanager
def elsewhere():
    """Tensors that are made without a device are on "meta" here, where no collective takes them."""
    with torch.device("meta"):
        yield


GROUP_SIZE = (
    "the sizes fit all 4 ranks, but the group has 2: both `get_world_size` and `reduce_scatter_row` take `group`"
)
NO_GROUP = "the sizes fit the group's 2 ranks, but the collective is of all 4: every collective takes `group`"
TWO_DTYPES = (
    "the tensor that takes the reduced gradient has another dtype than the gradient: make it by `grad.new_empty`"
)
NO_DEVICE = (
    "a tensor was made without `device=`: it is on 'meta' in this check, and would be on the CPU if the others were "
    "on a GPU"
)
ELSEWHERE = "tensors made without `device=` are on 'meta' here, as they would be on the CPU if these were on a GPU"


@contextmanager
def explained(words: str, problem: str, read: str):
    """A PyTorch error with these words, which says little to someone who meets it here, becomes ``problem``."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if words not in str(error):
            raise
        found = str(error).rpartition("Check failed: ")[2].partition(".")[0]  # without the rank and the time of day
        expect_true(False, problem, answer=f"{type(error).__name__}: {found}", read=read)


@contextmanager
def explained_elsewhere(read: str):
    """``elsewhere``, where PyTorch's error about a tensor on "meta" says that nobody chose a device for it."""
    with explained("meta", NO_DEVICE, read), explained("Meta", NO_DEVICE, read), elsewhere():
        yield


def mean_over_ranks(module: nn.Module) -> None:
    """What data parallel training does before the optimizer; by hand, so that no chapter is needed."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# ---- memory_per_device -----------------------------------------------------------------------------------------------


def test_memory_per_device_by_hand():
    case("10 parameters on 5 devices, 2 + 3 + 7 bytes each: 120, then a fifth of 7, of 3, of 2")
    found = [fsdp.memory_per_device(10, 5, stage, 2, 3, 7) for stage in (0, 1, 2, 3)]
    expect_close(found, [120.0, 64.0, 40.0, 24.0], read=MEMORY)


def test_memory_per_device_gives_the_papers_figure():
    case("7.5e9 parameters on 64 devices, 2 + 2 + 12 bytes: 120, 31.4, 16.6 and 1.9 GB (arXiv:1910.02054, figure 1)")
    found = [round(fsdp.memory_per_device(7_500_000_000, 64, s, 2, 2, 12) / 1e9, 1) for s in (0, 1, 2, 3)]
    expect_close(found, [120.0, 31.4, 16.6, 1.9], read=MEMORY)
    expect_close(fsdp.memory_per_device(7, 1, 3, 4, 4, 8), 112.0, name="on one device", read=MEMORY)
    case("7 parameters on 4 devices, 2 + 3 + 6 bytes each: a fourth of 77, neither padded nor rounded")
    expect_close(fsdp.memory_per_device(7, 4, 3, 2, 3, 6), 19.25, read="the contract: padding is not counted")


@pytest.mark.parametrize(
    ("stage", "world_size", "wrong"), [(4, 2, "4"), (57, 2, "57"), (-1, 2, "-1"), (1, 0, "0"), (1, -73, "-73")]
)
def test_memory_per_device_refuses(stage, world_size, wrong):
    case(f"stage {stage} on {world_size} devices")
    with expect_raises(ValueError, wrong, read="the contract of ex-fsdp-memory-per-device, under Raises"):
        fsdp.memory_per_device(10, world_size, stage, 2, 2, 12)


# ---- shard, unshard --------------------------------------------------------------------------------------------------

SHAPES = [(5,), (2, 3), (), (0,), (1,), (3, 0, 2), (7, 5)]


def test_shard_by_hand():
    case("1..5 on 3 ranks: two each, and one zero in the end")
    found = [fsdp.shard(torch.tensor([1, 2, 3, 4, 5]), rank, 3) for rank in range(3)]
    expect_close(found, [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 0])], read=SHARD)
    case("1..4 on 3 ranks: two, two, and nothing but zeros")
    found = [fsdp.shard(torch.tensor([1, 2, 3, 4]), rank, 3) for rank in range(3)]
    expect_close(found, [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([0, 0])], read=SHARD)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shard_cuts_any_shape(shape, world_size):
    case(f"{list(shape)} on {world_size} ranks, bfloat16")
    tensor = torch.randn(shape).to(torch.bfloat16)
    size = math.ceil(tensor.numel() / world_size)
    row = torch.cat([tensor.flatten(), torch.zeros(size * world_size - tensor.numel(), dtype=torch.bfloat16)])
    expect_close([fsdp.shard(tensor, r, world_size) for r in range(world_size)], list(row.split(size or 1))[:world_size]
                 if size else [row] * world_size, read=SHARD)  # fmt: skip


def test_shard_is_a_copy_in_row_major_order():
    case("a transposed 2 x 3 tensor that needs a gradient, on 2 ranks")
    tensor = torch.arange(6.0).view(2, 3).t().requires_grad_()
    mine = fsdp.shard(tensor, 0, 2)
    expect_close(mine, torch.tensor([0.0, 3.0, 1.0]), read=SHARD)
    expect_true(not mine.requires_grad, "the shard still belongs to autograd's graph", answer=mine, read=SHARD)
    case("a 2 x 3 tensor on 2 ranks: 12 bytes of memory behind the shard")
    held = fsdp.shard(torch.arange(6.0).view(2, 3), 0, 2).untyped_storage().nbytes()
    expect_true(
        held == 12, f"the shard keeps {held} bytes alive; it should be a copy of 12 bytes", answer=held, read=SHARD
    )
    case(f"1..5 on 3 ranks; {ELSEWHERE}")
    with elsewhere():
        share = fsdp.shard(torch.arange(1.0, 6.0, device="cpu"), 2, 3)
    expect_equal(share.device.type, "cpu", name="device of the shard of a tensor on the CPU", read=SHARD)
    case("four elements on one rank")
    even = torch.arange(4.0)
    share = fsdp.shard(even, 0, 1)
    expect_true(
        share.data_ptr() != even.data_ptr(), "on one rank, too, the shard should be a copy", answer=share, read=SHARD
    )


@pytest.mark.parametrize("rank", [-1, 13, 27])
def test_shard_refuses_a_rank_that_is_none(rank):
    case(f"rank {rank} of 13")
    with expect_raises(ValueError, str(rank), read="the contract of ex-fsdp-shard, under Raises"):
        fsdp.shard(torch.ones(4), rank, 13)


def test_unshard_by_hand():
    case("[1, 2], [3, 4], [5, 0] are a row of five")
    parts = [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 0])]
    expect_close(fsdp.unshard(parts, (5,)), torch.tensor([1, 2, 3, 4, 5]), read=SHARD)
    case("the same shards as a tuple, for a shape of 2 x 2")
    expect_close(fsdp.unshard(tuple(parts), torch.Size([2, 2])), torch.tensor([[1, 2], [3, 4]]), read=SHARD)
    case("the same shards for a shape of 3 x 2: no padding at all")
    expect_close(fsdp.unshard(parts, [3, 2]), torch.tensor([[1, 2], [3, 4], [5, 0]]), read=SHARD)
    case("[1, 2] as an iterator, for the shape () of no dimensions, which has one element")
    expect_close(fsdp.unshard(iter(parts[:1]), ()), torch.tensor(1), read=SHARD)


def test_unshard_takes_empty_shards():
    case("nothing on 3 ranks, shape [2, 0], float64")
    empty = [torch.zeros(0, dtype=torch.float64)] * 3
    expect_close(fsdp.unshard(empty, [2, 0]), torch.zeros(2, 0, dtype=torch.float64), read=SHARD)


def test_unshard_refuses_too_few():
    case("two shards of 17 elements for a shape of 5 x 7")
    with expect_raises(ValueError, "34", "35", read="the contract of ex-fsdp-unshard, under Raises"):
        fsdp.unshard([torch.ones(17), torch.ones(17)], (5, 7))


@oracle
def test_unshard_undoes_any_cut():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 9))
    def there_and_back(shape, world_size):
        case(f"{shape} on {world_size} ranks")
        tensor = torch.randn(shape, dtype=torch.float64)
        size = math.ceil(tensor.numel() / world_size)
        row = torch.cat([tensor.flatten(), tensor.new_zeros(size * world_size - tensor.numel())])
        expect_equal(torch.equal(fsdp.unshard(row.view(world_size, size), shape), tensor), True)

    there_and_back()


# ---- ShardedOptimizer ------------------------------------------------------------------------------------------------


def some_parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    shapes = [(2, 3), (9, 5), (4,), (), (7, 3), (6, 6)]
    found = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    found.append(nn.Parameter(torch.randn(4, 3).t()))  # not contiguous
    found.append(nn.Parameter(torch.ones(50), requires_grad=False))
    return found


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def sharded_steps(rank, world_size):
    case(f"one parameter of 1.0 a rank, gradient 1, SGD 0.5, {world_size} ranks")
    ones = [nn.Parameter(torch.ones(2)) for _ in range(world_size)]
    small = fsdp.ShardedOptimizer(ones, torch.optim.SGD, lr=0.5)
    for parameter in ones:
        parameter.grad = torch.ones(2)
    small.step()
    expect_close([p.detach() for p in ones], [torch.full((2,), 0.5)] * world_size, name="parameters", read=ZERO1)
    case(f"eight parameters of sizes 0-d to 45, AdamW with a scheduler, {world_size} ranks, three steps")
    ours, theirs = some_parameters(), some_parameters()
    mine = fsdp.ShardedOptimizer((p for p in ours), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    one = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (mine, one)]
    for step in range(3):
        gradients(ours, step), gradients(theirs, step)
        mine.step(), one.step()
        [schedule.step() for schedule in schedules]
    expect_close([p.detach() for p in ours], [p.detach() for p in theirs], name="parameters", read=ZERO1)
    expect_true(isinstance(mine, torch.optim.Optimizer), "it is not a torch.optim.Optimizer", read=ZERO1)
    return sorted(p.numel() for p in mine.state)


class Slowing(torch.optim.SGD):
    """An optimizer whose ``step`` takes no closure, and which keeps a counter and its last learning rate in its
    groups.
    """

    def step(self, divisor=2):
        for group in self.param_groups:
            group["lr"], group["n_steps"] = group["lr"] / divisor, group.get("n_steps", 0) + 1
        super().step()


class Asking(torch.optim.SGD):
    """An optimizer that calls its closure twice in a step."""

    def step(self, closure=None):
        losses = [] if closure is None else [closure(), closure()]
        super().step()
        return losses[-1] if losses else None


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_ShardedOptimizer_equals_the_whole_one_and_holds_a_share(ranks, n_ranks):
    result = ranks(sharded_steps, n_ranks=n_ranks)
    case(
        f"which parameters (by their sizes) have state on which of {n_ranks} ranks: largest first, to the least loaded"
    )
    expect_equal(result.values, balanced(n_ranks), name="sizes with state, rank by rank", read=ZERO1)
    if n_ranks > 1:
        case(
            f"what {n_ranks} ranks send: one step of {2 * n_ranks} values, three of 125 trained ones, nothing that "
            "is frozen"
        )
        sent = sum(ledger.bytes_sent for ledger in result.ledgers)
        expect_equal(sent, 4 * (2 * n_ranks + 3 * 125), name="bytes", read=ZERO1)


def balanced(n_ranks: int) -> list[list[int]]:
    """The contract's greedy rule, written out."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    for size in (45, 36, 21, 12, 6, 4, 1):
        min(shares, key=sum).append(size)
    return [sorted(share) for share in shares]


def sharded_groups(rank, world_size):
    case(
        f"two groups with options of their own, {world_size} ranks, fewer parameters than ranks in each; a third is "
        "added"
    )

    def build(make):
        torch.manual_seed(1)
        a, b, c = (nn.Parameter(torch.randn(n)) for n in (3, 2, 4))
        optimizer = make([{"params": [a], "weight_decay": 0.5}, {"params": [b], "lr": 0.01}])
        optimizer.add_param_group({"params": [c], "lr": 0.2})
        return optimizer, [a, b, c]

    mine, ours = build(lambda groups: fsdp.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1))
    one, theirs = build(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    for step in range(2):
        gradients(ours, step), gradients(theirs, step)
        loss = mine.step(lambda: 7.0)
        one.step()
    expect_close([p.detach() for p in ours], [p.detach() for p in theirs], name="parameters", read=ZERO1)
    expect_equal(loss, 7.0, name="what step(closure) gives", read=ZERO1)
    expect_equal([group["lr"] for group in mine.param_groups], [0.1, 0.01, 0.2], name="lr of the groups", read=ZERO1)
    case("state_dict and load_state_dict, then another step")
    mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    gradients(ours, 5), gradients(theirs, 5)
    mine.step(), one.step()
    expect_close([p.detach() for p in ours], [p.detach() for p in theirs], name="parameters", read=ZERO1)
    case(
        "a new optimizer loads the state_dict (which replaces `state`) and goes on, beside one that was not interrupted"
    )
    kept, values = copy.deepcopy(mine.state_dict()), [p.detach().clone() for p in ours]
    mine, ours = build(lambda groups: fsdp.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1))
    [p.detach().copy_(value) for p, value in zip(ours, values, strict=True)]
    mine.load_state_dict(kept)
    gradients(ours, 6), gradients(theirs, 6)
    mine.step(), one.step()
    expect_close([p.detach() for p in ours], [p.detach() for p in theirs], name="parameters", read=ZERO1)
    n_states = len(mine.state)
    case("the same two after new betas and a new weight_decay in param_groups, as some schedules set them")
    for group in (*mine.param_groups, *reversed(one.param_groups)):
        group["betas"], group["weight_decay"] = (0.5, 0.6), 0.3
    gradients(ours, 7), gradients(theirs, 7)
    mine.step(), one.step()
    options = "the contract of ex-fsdp-shardedoptimizer, `step`: the current options, whichever they are"
    expect_close([p.detach() for p in ours], [p.detach() for p in theirs], name="parameters", read=options)
    case(
        "an optimizer whose step takes no closure and halves the lr in its groups; 1.0, gradient 1, lr 1: 1 - 1/2 - 1/4"
    )
    value, read = nn.Parameter(torch.ones(3)), "the contract of ex-fsdp-shardedoptimizer, `step`"
    slowing = fsdp.ShardedOptimizer([value], Slowing, lr=1.0)
    for _ in range(2):
        value.grad = torch.ones(3)
        slowing.step()
    expect_close(value.detach(), torch.full((3,), 0.25), name="parameter", read=read)
    kept = {key: slowing.param_groups[0].get(key) for key in ("lr", "n_steps")}
    expect_equal(kept, {"lr": 0.25, "n_steps": 2}, name="param_groups[0]", read=read)
    case("the same optimizer, a third step with divisor=8: 1/4 - 1/32")
    value.grad = torch.ones(3)
    slowing.step(divisor=8)
    expect_close(value.detach(), torch.full((3,), 0.25 - 1 / 32), name="parameter", read=read)
    case(
        "an optimizer that calls its closure twice in a step, as LBFGS may: calls of the closure, and what step "
        "returned"
    )
    asking, calls = fsdp.ShardedOptimizer([value], Asking, lr=1.0), []
    loss = asking.step(lambda: calls.append(1) or 5.0)
    expect_equal((len(calls), loss), (2, 5.0), read=read)
    case("AdamW without any option: its own are in param_groups at once")
    options = fsdp.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW).param_groups[0]
    found = {key: options.get(key) for key in ("lr", "betas")}
    expect_equal(found, {"lr": 0.001, "betas": (0.9, 0.999)}, name="param_groups[0]", read=ZERO1)
    return n_states


@pytest.mark.time_limit(30)
def test_ShardedOptimizer_groups_closure_and_state(ranks):
    case(
        "three groups on 4 ranks: of 3, 2 and 4 elements, so that one rank owns nothing; how many states each rank has"
    )
    result = ranks(sharded_groups, n_ranks=4)
    expect_equal(
        sorted(result.values), [0, 1, 1, 1], name="how many parameters have state on a rank, sorted", read=ZERO1
    )
    case("what a rank sends: all new values, once a step, by broadcasts")
    sent = sum(ledger.bytes_sent for ledger in result.ledgers)
    expect_equal(sent, 4 * (5 * 9 + 4 * 3), name="bytes of all ranks: five steps of 9 values, four of 3", read=ZERO1)


def beside_zero_redundancy(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    case(f"ours beside ZeroRedundancyOptimizer, Adam, {world_size} ranks")
    ours, theirs = Net(), Net()
    mine = fsdp.ShardedOptimizer(ours.parameters(), torch.optim.Adam, lr=0.05)
    other = ZeroRedundancyOptimizer(theirs.parameters(), optimizer_class=torch.optim.Adam, lr=0.05)
    for step in range(3):
        x = inputs_of(4, step)
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            loss_of(model, x[rank::world_size]).backward()
            mean_over_ranks(model)
            optimizer.step()
    expect_close(values_of(ours), values_of(theirs), name="parameters", atol=1e-6, read=ZERO1)


@oracle
@pytest.mark.time_limit(30)
def test_ShardedOptimizer_equals_ZeroRedundancyOptimizer(ranks):
    ranks(beside_zero_redundancy, n_ranks=2)


# ---- reduce_scatter_gradients ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of 3, 1 and 0-d, one frozen, one tied, one that rank 1 does not use, one transposed."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.tied = self.a
        self.unused = nn.Parameter(torch.zeros(()))
        self.turned = nn.Parameter(torch.zeros(2, 3).t())
        self.low = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))


def scattered(rank, world_size):
    module = Odd()
    module.a.grad = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    module.unused.grad = torch.tensor(6.0) if rank == 0 else None
    module.turned.grad = (torch.arange(6.0).view(2, 3) * (rank + 1)).t()
    module.low.grad = torch.ones(1, dtype=torch.bfloat16) * (rank + 1)
    mean = (world_size + 1) / 2
    case(f"{world_size} ranks, gradients 1, 2, ... times those of rank 0; on rank 1 one is missing")
    with Calls(SCATTER, lambda: sum(p.grad is not None for p in module.parameters())) as calls:
        shares = fsdp.reduce_scatter_gradients(module)
    whole = {"a": torch.tensor([1.0, 2.0, 3.0]) * mean, "unused": torch.tensor([6.0 / world_size])}
    whole |= {"turned": torch.arange(6.0).view(2, 3).t().flatten() * mean, "low": torch.tensor([mean]).bfloat16()}
    expected = {name: cut(row, rank, world_size) for name, row in whole.items()}
    expect_close(shares, expected, name="shares", read=ZERO2)
    expect_equal(list(shares), list(whole), name="names", read=ZERO2)
    left = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    expect_equal(left, [], name="parameters that still have a full gradient", read=ZERO2)
    case("how many whole gradients are still there when each reduction begins")
    most = [len(calls.seen) - i for i in range(len(calls.seen))]
    problem = f"{calls.seen} gradients were still there, and at most {most} need to be: set each to None on the way"
    on_the_way = all(n <= limit for n, limit in zip(calls.seen, most, strict=True))
    expect_true(on_the_way, problem, answer=calls.seen, read="the contract of ex-fsdp-reduce-scatter-gradients")
    case("the memory of a share")
    most = max(share.untyped_storage().nbytes() for share in shares.values())
    problem = f"a share keeps {most} bytes alive: the memory of the whole gradient"
    expect_true(most <= 4 * math.ceil(6 / world_size), problem, answer=most, read=ZERO2)
    milestone("all ranks done")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    case(f"the groups (0, 2) and (1, 3) of 4 ranks, gradients of 1, 2, 3 times rank + 1; {ELSEWHERE}")
    module = Odd()
    module.a.grad = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    with (
        explained("outputShape", GROUP_SIZE, ZERO2),
        explained("must be equal to output", GROUP_SIZE, ZERO2),
        elsewhere(),
    ):
        shares = fsdp.reduce_scatter_gradients(module, groups[rank % 2])
    share = cut(torch.tensor([1.0, 2.0, 3.0]) * (2.0 + rank % 2), rank // 2, 2)
    expect_close(shares["a"], share, name="shares['a']", answer=shares, read=ZERO2)
    made = {name: (share.device.type, share.dtype) for name, share in shares.items()}
    wanted = dict.fromkeys(made, ("cpu", torch.float32)) | {"low": ("cpu", torch.bfloat16)}
    expect_equal(made, wanted, name="devices and dtypes, also where every rank's gradient is missing", read=ZERO2)
    case("40,000 in float16 on each of 4 ranks: their sum is beyond float16, their mean is not")
    layer = nn.Linear(1, 4, bias=False, dtype=torch.float16)
    layer.weight.grad = torch.full((4, 1), 40_000.0, dtype=torch.float16)
    shares = fsdp.reduce_scatter_gradients(layer)
    expect_close(shares, {"weight": torch.full((1,), 40_000.0, dtype=torch.float16)}, name="shares", read=ZERO2)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("n_ranks", [4])
def test_reduce_scatter_gradients_gives_shares_of_the_mean(ranks, n_ranks):
    case(f"{n_ranks} ranks; one rank has no gradient for a parameter")
    result = ranks(scattered, n_ranks=n_ranks)
    case(f"what a rank sends on {n_ranks} ranks: every gradient once, padded, and nothing else")
    padded = sum(-(-n // n_ranks) * n_ranks * size for n, size in ((3, 4), (1, 4), (6, 4), (1, 2)))
    calls = result.ledgers[0].before("all ranks done")
    found = {"bytes": sum(r.n_bytes for r in calls), "collectives": [r.op for r in calls if r.op not in SCATTER]}
    expect_equal(found, {"bytes": padded, "collectives": []}, name="sent besides reduce-scatters", read=ZERO2)


# ---- FlatShard -------------------------------------------------------------------------------------------------------

CHANGED = (
    "autograd raised an error because it saw `full` change: a gather into `full` or `full.detach()` counts as a "
    "change, "
    "and a gather into `full.data` does not"
)


class Calls:
    """While active, ``seen`` has what ``look()`` gives at the start of each call of these collectives."""

    def __init__(self, names, look):
        self.names, self.look, self.seen = [name for name in names if hasattr(dist, name)], look, []

    def __enter__(self):
        self.functions = {name: getattr(dist, name) for name in self.names}
        for name, function in self.functions.items():
            setattr(dist, name, partial(self._call, function))
        return self

    def _call(self, function, *args, **kwargs):
        self.seen.append(self.look())
        return function(*args, **kwargs)

    def __exit__(self, *_):
        for name, function in self.functions.items():
            setattr(dist, name, function)


class Late:
    """Gathers and reductions that do their work when somebody waits for them, and not before."""

    def __enter__(self):
        self.n_begun, self.n_waited, self.reductions, self.in_flight = 0, 0, [], []
        self.functions = {name: getattr(dist, name) for name in (*GATHER, *SCATTER) if hasattr(dist, name)}
        for name in self.functions:
            setattr(dist, name, partial(self._call, name))
        return self

    def _call(self, name, *args, **kwargs):
        return LateWork(self, name, args, kwargs)

    def __exit__(self, *_):
        for name, function in self.functions.items():
            setattr(dist, name, function)


class LateWork:
    def __init__(self, late: Late, name, args, kwargs):
        function = late.functions[name]
        late.n_begun += 1
        if name in SCATTER:
            late.in_flight.append(sum(not work.is_done for work in late.reductions))
            late.reductions.append(self)
        self.late, self.call, self.is_done = late, (lambda: function(*args, **kwargs | {"async_op": False})), False
        if not kwargs.get("async_op"):
            self.wait()

    def wait(self):
        if not self.is_done:
            self.is_done = True
            self.late.n_waited += 1
            self.call()


def flat_by_hand(rank, world_size):
    case(f"a transposed [2, 2] of 1..4 and a 0-d 5, {world_size} ranks; only rank 0 has these values")
    start = {"w": torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t(), "s": torch.tensor(5.0)}
    flat = fsdp.FlatShard({name: nn.Parameter(value * (rank == 0)) for name, value in start.items()})
    size = math.ceil(5 / world_size)
    row = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * (size * world_size - 5))
    expect_close(flat.shard.detach(), row[rank * size : (rank + 1) * size], name="shard", read=FLAT)
    expect_true(isinstance(flat.shard, nn.Parameter), "shard is not an nn.Parameter", read=FLAT)
    expect_equal(flat.shard.untyped_storage().nbytes(), 4 * size, name="bytes behind shard, a copy", read=FLAT)
    expect_equal(
        [flat.shard.requires_grad, flat.full.requires_grad],
        [True, True],
        name="whether shard and full need a gradient",
        read=FLAT,
    )
    held = flat.full.untyped_storage().nbytes()
    expect_equal([held, flat.is_whole], [0, False], name="bytes behind full, and is_whole, at first", read=FLAT)
    full = flat.full
    flat.start_gather(), flat.start_gather()
    expect_equal(flat.is_whole, True, name="is_whole after start_gather", read=FLAT)
    flat.finish_gather()
    views = flat.views()
    expect_close({n: v.detach().clone() for n, v in views.items()}, start, name="views", read=FLAT)
    case("the gradient of w.sum() * 2 + s * 10 * (rank + 1), reduced twice")
    grads = []
    for _ in range(2):
        flat.finish_gather()
        found = [flat.is_whole, flat.full.untyped_storage().nbytes()]
        expect_equal(found, [True, 4 * len(row)], name="is_whole, and bytes behind full, when gathered", read=FLAT)
        problem = "full became a new tensor, but autograd refers to the one from `__init__`: resize its storage instead"
        expect_true(flat.full is full, problem, answer=list(flat.full.shape), read=FLAT)
        with explained("is a view", CHANGED, FLAT):
            views = flat.views()
            (views["w"].sum() * 2 + views["s"] * 10 * (rank + 1)).backward()
        flat.free()
        held = [tensor.untyped_storage().nbytes() for tensor in (flat.full, views["w"])]
        expect_equal(held, [0, 0], name="bytes behind full, and behind a view of it, after free", read=FLAT)
        expect_equal(flat.is_whole, False, name="is_whole after free", read=FLAT)
        flat.start_reduce()
        expect_true(flat.full.grad is None, "full.grad should be None after start_reduce", read=FLAT)
        flat.finish_reduce(), flat.finish_reduce()
        grads.append(flat.shard.grad)
    mean = torch.tensor([2.0] * 4 + [10 * (world_size + 1) / 2] + [0.0] * (size * world_size - 5))
    expect_close(flat.shard.grad, 2 * mean[rank * size : (rank + 1) * size], name="shard.grad", read=FLAT)
    problem = "shard.grad became a new tensor, so two were held for a moment: add in place"
    if rank == 0:  # the last rank has nothing but padding: whatever is done to it, it stays zero
        expect_true(grads[0] is grads[1], problem, answer=flat.shard.grad, read=FLAT)


def flat_in_bfloat16(rank, world_size):
    case(f"five float32 parameters gathered in bfloat16, {world_size} ranks, one frozen row beside them")
    values = torch.tensor([1.0, 1.001, -3.0, 0.5, 7.0])
    flat = fsdp.FlatShard({"w": nn.Parameter(values.clone())}, torch.bfloat16)
    expect_equal([flat.shard.dtype, flat.full.dtype], [torch.float32, torch.bfloat16], name="dtypes", read=FLAT)
    flat.finish_gather()
    expect_close(flat.views()["w"].detach().clone(), values.bfloat16(), name="view", read=FLAT)
    (flat.views()["w"] * (rank + 1)).sum().backward()
    with explained("].dtype()", TWO_DTYPES, FLAT):
        flat.start_reduce(), flat.finish_reduce()
    expect_equal(flat.shard.grad.dtype, torch.float32, name="dtype of the gradient", read=FLAT)
    flat.free()
    frozen = fsdp.FlatShard({"w": nn.Parameter(values, requires_grad=False)})
    expect_equal(
        [frozen.shard.requires_grad, frozen.full.requires_grad],
        [False, False],
        name="whether shard and full need a gradient",
        read=FLAT,
    )
    case("saved by autograd, freed, and gathered again before backward")
    flat = fsdp.FlatShard({"w": nn.Parameter(values.clone())})
    flat.finish_gather()
    x = torch.ones(5, requires_grad=True)
    loss = (flat.views()["w"] * x).sum()
    flat.free()
    with explained("is a view", CHANGED, FLAT), explained("modified by an inplace operation", CHANGED, FLAT):
        flat.finish_gather()
        loss.backward()
    expect_close(x.grad, values, name="gradient of the input", read=FLAT)
    milestone("counted")


def flat_waits(rank, world_size):
    case(f"gathers and reductions that do their work only when waited for, {world_size} ranks; {ELSEWHERE}")
    values = torch.tensor([1.0, -2.0, 3.0, 0.5, 7.0], dtype=torch.float64)
    with elsewhere():
        flat = fsdp.FlatShard({"w": nn.Parameter(values)})
    expect_equal([flat.shard.dtype, flat.full.dtype], [torch.float64] * 2, name="dtypes of shard and full", read=FLAT)
    expect_equal([flat.shard.device.type, flat.full.device.type], ["cpu"] * 2, name="devices of both", read=FLAT)
    with Late() as late:
        with elsewhere():
            flat.start_gather()
        found = [late.n_begun, late.n_waited]
        expect_equal(found, [1, 0], name="gathers begun, and waited for, after `start_gather`", read=FLAT)
        flat.finish_gather()
        found = [late.n_begun, late.n_waited]
        expect_equal(found, [1, 1], name="gathers begun, and waited for, after `finish_gather`", read=FLAT)
        expect_close(flat.views()["w"].detach().clone(), values, name="view", read=FLAT)
        flat.free()
        flat.start_gather(), flat.free()
        problem = "free did not wait for the gather on its way, which would then write into released memory"
        expect_true(late.n_waited == late.n_begun, problem, answer=(late.n_waited, late.n_begun), read=FLAT)
        n_gathers = late.n_begun
        flat.free()
        expect_equal(late.n_begun - n_gathers, 0, name="gathers begun by `free` with nothing gathered", read=FLAT)
        held = flat.full.untyped_storage().nbytes()
        expect_equal([held, flat.is_whole], [0, False], name="bytes behind full, and is_whole, after free", read=FLAT)
        flat.full.grad = torch.full_like(flat.full, rank + 1.0)
        n_gathers = late.n_begun
        with elsewhere():
            flat.start_reduce()
        expect_equal(late.n_waited, n_gathers, name="calls that were waited for after `start_reduce`", read=FLAT)
        flat.finish_reduce()
        expect_equal(late.n_waited, n_gathers + 1, name="calls that were waited for after `finish_reduce`", read=FLAT)
    mean = torch.full_like(flat.shard, (world_size + 1) / 2)
    expect_close(flat.shard.grad, mean, name="shard.grad", read=FLAT)
    case(
        f"gradients of 40,000 in float16 on each of {world_size} ranks: their sum is beyond float16, their mean is not"
    )
    flat = fsdp.FlatShard({"w": nn.Parameter(torch.ones(5))}, torch.float16)
    flat.full.grad = torch.full_like(flat.full, 40_000.0)
    flat.start_reduce(), flat.finish_reduce()
    expect_close(flat.shard.grad, torch.full_like(flat.shard, 40_000.0), name="shard.grad", read=FLAT)


def last_before(views: list[Tensor]) -> list[str]:
    """The steps of autograd that hand a gradient of the whole row to a leaf, by their names."""
    todo, seen, found = [view.grad_fn for view in views], set(), []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        later = [function for function, _ in node.next_functions if function is not None]
        leaves = [function for function in later if type(function).__name__ == "AccumulateGrad"]
        found += [type(node).__name__] if leaves else []
        todo += [function for function in later if function not in leaves]
    return found


def flat_cut_once(rank, world_size):
    case("three parameters of 2, 3 and 1 elements: how many rows as long as full their backward makes")
    start = {name: nn.Parameter(torch.ones(n)) for name, n in (("a", 2), ("b", 3), ("c", 1))}
    flat = fsdp.FlatShard(start)
    flat.finish_gather()
    steps = last_before(list(flat.views().values()))
    problem = f"{len(steps)} rows as long as full ({', '.join(sorted(steps))}): cut full once, by `split`"
    expect_true(len(steps) == 1, problem, answer=steps, read="the contract of ex-fsdp-flatshard, `views`")
    flat.free()


def flat_steps(rank, world_size):
    flat_by_hand(rank, world_size)
    flat_in_bfloat16(rank, world_size)
    flat_waits(rank, world_size)
    flat_cut_once(rank, world_size)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("n_ranks", [4])
def test_FlatShard_gathers_frees_and_reduces(ranks, n_ranks):
    case(f"a flat row on {n_ranks} ranks")
    result = ranks(flat_steps, n_ranks=n_ranks)
    case(f"what a rank of {n_ranks} starts: a gather each time it was freed, a reduce-scatter for each gradient")
    calls = result.ledgers[0].before("counted")
    counts = [sum(r.op in names for r in calls) for names in (GATHER, SCATTER)]
    expect_equal(counts, [2 + 1 + 2, 3], name="all-gathers and reduce-scatters", read=FLAT)
    in_low = [r.n_bytes for r in calls if r.op in GATHER and r.dtype == "bfloat16"]
    expect_equal(in_low, [2 * math.ceil(5 / n_ranks)], name="bytes sent in bfloat16", read=FLAT)
    case("what it reduces of five values: two gradients in float32, and one in the bfloat16 of its unit")
    size = math.ceil(5 / n_ranks) * n_ranks
    reduced = [r.n_bytes for r in calls if r.op in SCATTER]
    expect_equal(reduced, [4 * size, 4 * size, 2 * size], name="bytes passed to reduce-scatters", read=FLAT)


def flat_of_a_pair(rank, world_size):
    case(
        f"{world_size} ranks in pairs: the second pair has other values and gradients than the first, and rank r has "
        "group rank r % 2"
    )
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    group, start = pairs[rank // 2], torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
    flat = fsdp.FlatShard({"w": nn.Parameter(start)}, None, group)
    row = torch.tensor([1.0, 2.0, 3.0, -10.0 * (rank - rank % 2)]) + 10 * (rank - rank % 2)
    expect_close(flat.shard.detach(), row[2 * (rank % 2) :][:2], name="shard", read=FLAT)
    with explained("invalid tensor size", NO_GROUP, FLAT):
        flat.finish_gather()
    expect_close(flat.views()["w"].detach().clone(), row[:3], name="view", read=FLAT)
    flat.full.grad = torch.full_like(flat.full, rank + 1.0)
    with explained("outputShape", NO_GROUP, FLAT), explained("must be equal to output", NO_GROUP, FLAT):
        flat.start_reduce(), flat.finish_reduce()
    expect_close(flat.shard.grad, torch.full((2,), rank - rank % 2 + 1.5), name="shard.grad", read=FLAT)


@pytest.mark.time_limit(30)
def test_FlatShard_of_some_of_the_ranks(ranks):
    ranks(flat_of_a_pair, n_ranks=4)


# ---- FullySharded ----------------------------------------------------------------------------------------------------


def train(wrapped, rank, world_size, n_steps=3, n_micro=1, lr=0.05):
    """Steps of AdamW on halves of a batch; then the whole parameters."""
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=lr)
    for step in range(n_steps):
        for micro in range(n_micro):
            x = inputs_of(2 * world_size, 10 * step + micro)
            (loss_of(wrapped, x[2 * rank : 2 * rank + 2]) / n_micro).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.gather_full_params()


def train_alone(model, world_size, n_steps=3, n_micro=1, lr=0.05):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(n_steps):
        loss_of(model, torch.cat([inputs_of(2 * world_size, 10 * step + micro) for micro in range(n_micro)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def fully_equal(rank, world_size):
    case(f"{world_size} ranks, three steps of AdamW, a tied weight, a scale of one element; only rank 0's start counts")
    expected = train_alone(Net(), world_size)
    wrapped = fsdp.FullySharded(Net(seed=rank))
    total = sum(p.numel() for p in wrapped.parameters())
    expect_true(all(p.ndim == 1 for p in wrapped.parameters()), "the parameters are not flat shards", read=ZERO3)
    whole = sum(v.numel() for v in expected.values())
    expect_true(total <= whole / world_size + 5, f"a rank holds {total} of {whole} values", read=ZERO3)
    found = train(wrapped, rank, world_size)
    expect_equal(list(found), list(expected), name="names", read=ZERO3)
    expect_close(found, expected, atol=1e-5, name="parameters", read=f"{ZERO3}; {PARTS}")
    case(
        f"{world_size} ranks, two backwards before finish against the whole batch in one, a block frozen, another in "
        "part"
    )

    def frozen():
        model: Any = Net(n_blocks=4)
        model.blocks[1].requires_grad_(False)
        model.blocks[2][0].weight.requires_grad_(False)
        return model

    found = train(fsdp.FullySharded(frozen()), rank, world_size, n_micro=2)
    expect_close(found, train_alone(frozen(), world_size, n_micro=2), atol=1e-5, name="parameters", read=ZERO3)
    case(f"{world_size} ranks, units given by hand, no ModuleList; a unit with one parameter of one element")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1, bias=False))
    alone, x = copy.deepcopy(model), inputs_of(world_size)
    wrapped = fsdp.FullySharded(model, units=(part for part in model if not isinstance(part, nn.Tanh)))
    wrapped(x[rank : rank + 1]).square().sum().backward()
    wrapped.finish_gradient_synchronization()
    sizes = [p.numel() for p in wrapped.parameters() if p.grad is not None and p.grad.shape == p.shape]
    whole = sorted(math.ceil(n / world_size) for n in (16, 5, 1))
    expect_equal(sorted(sizes), whole, name="shards with a gradient", read=ZERO3)
    alone(x).square().mean().backward()
    for module in (wrapped, alone):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    expect_close(wrapped.gather_full_params(), values_of(alone), atol=1e-5, name="parameters", read=ZERO3)


@pytest.mark.time_limit(40)
@pytest.mark.parametrize("n_ranks", [3])
def test_FullySharded_equals_one_process(ranks, n_ranks):
    case(f"a net on {n_ranks} ranks")
    ranks(fully_equal, n_ranks=n_ranks)


def fully_interrupted(rank, world_size):
    case("an exception in forward, then training as if nothing had been; an evaluation between steps")
    wrapped = fsdp.FullySharded(Net())
    wrapped.module.fails_in = "forward"
    with expect_raises(KeyError, "on purpose"):
        loss_of(wrapped, inputs_of(2))
    expect_equal(whole_units(wrapped), [], name="units still whole after the exception", read=ZERO3)
    wrapped.module.fails_in = ""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
    alone = Net()
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for step in range(2):
        x = inputs_of(2 * world_size, step)
        loss_of(wrapped, x[2 * rank : 2 * rank + 2]).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step(), optimizer.zero_grad()
        loss_of(alone, x).backward()
        theirs.step(), theirs.zero_grad()
        with torch.no_grad():
            expect_close(loss_of(wrapped, x), loss_of(alone, x), atol=1e-5, name="loss in evaluation", read=ZERO3)
    case("an exception in backward, then gradients to None, and another step without a call of finish between")
    wrapped.module.fails_in = "backward"
    with expect_raises(KeyError, "on purpose"):
        loss_of(wrapped, inputs_of(2)).backward()
    wrapped.module.fails_in = ""
    optimizer.zero_grad()
    found = [gradients_of(wrapped, inputs_of(3)) for _ in range(2)]
    expect_close(found[0], found[1], atol=1e-6, name="gradients, beside those of the same step later", read=ZERO3)
    expect_equal(whole_units(wrapped), [], name="units still whole after the step", read=ZERO3)
    case("two inputs, one by its name, that needs a gradient")
    shift = torch.zeros(2, 8, requires_grad=True)
    loss_of(wrapped, inputs_of(2), shift=shift).backward()
    wrapped.finish_gradient_synchronization()
    again = torch.zeros(2, 8, requires_grad=True)
    loss_of(alone, inputs_of(2), shift=again).backward()
    expect_close(shift.grad, again.grad, atol=1e-5, name="gradient of the second input", read=ZERO3)
    case("param_dtype=bfloat16: float32 shards and gradients, bfloat16 on the wire")
    wrapped = fsdp.FullySharded(Net(), param_dtype=torch.bfloat16)
    out = wrapped(inputs_of(2))["out"][0]
    expect_equal(out.dtype, torch.bfloat16, name="dtype of the output", read=ZERO3)
    out.float().square().mean().backward()
    wrapped.finish_gradient_synchronization()
    dtypes = {p.dtype for p in wrapped.parameters()} | {p.grad.dtype for p in wrapped.parameters()}
    expect_equal(dtypes, {torch.float32}, name="dtypes of shards and gradients", read=ZERO3)


def gradients_of(wrapped, x: Tensor) -> list[Tensor]:
    wrapped.zero_grad()
    loss_of(wrapped, x).backward()
    wrapped.finish_gradient_synchronization()
    return [p.grad.clone() for p in wrapped.parameters()]


def whole_units(wrapped) -> list[int]:
    """Which units have memory behind their whole values at this moment; the root is 0."""
    return [i for i, flats in enumerate(wrapped.flats) if any(f.full.untyped_storage().nbytes() for f in flats)]


def units_with_gradients(wrapped) -> list[int]:
    return [i for i, flats in enumerate(wrapped.flats) if any(f.shard.grad is not None for f in flats)]


class Noted(nn.Module):
    """A block that writes down which units are whole when it computes, forward and backward."""

    def __init__(self, place: int):
        super().__init__()
        self.weight, self.place, self.look = nn.Parameter(torch.ones(4 + place)), place, None

    def forward(self, x):
        milestone(f"computes {self.place}")
        self.look(f"forward {self.place}")
        out = x * self.weight.sum()
        inside = out * 1.0
        if inside.requires_grad:
            inside.register_hook(lambda _: self.look(f"backward {self.place}"))
        return inside * self.weight[0]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Noted(i) for i in (1, 2, 3, 4))
        self.look = lambda moment: None

    def forward(self, x, order=(0, 1, 2, 3)):
        self.look("forward 0")
        for i in order:
            x = self.blocks[i](x)
        inside = x * 1.0
        if inside.requires_grad:
            inside.register_hook(lambda _: self.look("backward 0"))
        return inside * 1.0


class RootedChain(Chain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, order=(0, 1, 2, 3)):
        return super().forward(x * self.scale.sum(), order)


def fully_out_of_order(rank, world_size):
    case(
        f"{world_size} ranks, a chain of four units and a root's parameter, run as 2, 3, 4, 1: unit 1 is the first "
        "in backward"
    )
    alone: Any = RootedChain()
    order, log = (1, 2, 3, 0), {}
    wrapped = fsdp.FullySharded(RootedChain())
    for block, other in zip(wrapped.module.blocks, alone.blocks, strict=True):
        block.look, other.look = (lambda moment: log.update({moment: whole_units(wrapped)})), alone.look
    x, again = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    wrapped(x, order).sum().backward()
    wrapped.finish_gradient_synchronization()
    for moment, whole in log.items():
        expect_true(
            0 in whole, f"{moment}: the root, unit 0, was freed while it is in use; whole units: {whole}", read=ZERO3
        )
        expect_true(len(whole) <= 3, f"{moment}: more than the root and two units are whole: {whole}", read=ZERO3)
    alone(again, order).sum().backward()
    expect_close(x.grad, again.grad, name="gradient of the input", read=ZERO3)
    for module in (wrapped, alone):
        torch.optim.SGD(module.parameters(), lr=1e-4).step()
    expect_close(wrapped.gather_full_params(), values_of(alone), name="parameters", read=ZERO3)


def fully_reduced(rank, world_size):
    """How many gathers are on their way in forward; and reductions, with which units whole, when each one begins."""
    case(f"a chain of four units on {world_size} ranks; how many gathers are on their way while each unit computes")
    wrapped, on_the_way = fsdp.FullySharded(Chain()), {}
    with Late() as late, Calls(SCATTER, lambda: whole_units(wrapped)) as calls:
        for part in (wrapped.module, *wrapped.module.blocks):
            part.look = lambda moment: on_the_way.update({moment: late.n_begun - late.n_waited})
        out = wrapped(torch.ones(1, requires_grad=True)).sum()
        read = "the contract of ex-fsdp-fullysharded, `gather`: the following unit's gather is started only"
        expected = {f"forward {i}": 1 if i < 4 else 0 for i in range(5)}
        expect_equal(on_the_way, expected, name="gathers", answer=on_the_way, read=read)
        case(f"a chain of four units on {world_size} ranks, at the start of the reductions of units 4, 3, 2, 1")
        out.backward()
        wrapped.finish_gradient_synchronization()
    read = "the contract of ex-fsdp-fullysharded, `after_gradient`"
    expect_equal(late.in_flight, [0] * 4, name="other reductions that are on their way", read=read)
    expect_equal(calls.seen, [[3], [2], [1], []], name="units that are whole", read=read)


class Headless(nn.Module):
    """The root returns its last unit's output, and its own parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def fully_without_a_head(rank, world_size):
    case(f"a root that returns its last unit's output, its parameter frozen; four units on {world_size} ranks")
    wrapped, at_first = fsdp.FullySharded(Headless()), []
    wrapped.finish_gradient_synchronization()  # before the first backward nothing is being reduced
    with Calls(GATHER, lambda: None) as calls:
        out = wrapped(torch.ones(2, 3))
        out.register_hook(lambda _: at_first.extend(whole_units(wrapped)))
        out.sum().backward()
        wrapped.finish_gradient_synchronization()
    read = "the contract of ex-fsdp-fullysharded, `finish_gradient_synchronization`"
    expect_equal(whole_units(wrapped), [], name="units that are whole after finish", read=read)
    read = "the contract of ex-fsdp-fullysharded, `before_backward`"
    name = "gathers of five flat shards in a step, and the units with memory when backward begins"
    expect_equal([len(calls.seen), at_first], [2 * 5, [0, 3, 4]], name=name, read=read)


def fully_in_two_parts(rank, world_size):
    case(f"three units on {world_size} ranks, each of two flat shards: the weight is trained, the bias frozen")
    layers = [nn.Linear(3, 3) for _ in range(3)]
    model = nn.Sequential(nn.ModuleList(layers))
    model.forward = lambda x: layers[2](layers[1](layers[0](x)))
    for block in layers:
        block.bias.requires_grad_(False)
    wrapped, begun = fsdp.FullySharded(model), []
    with Calls(GATHER, lambda: None) as calls:
        for block in layers:
            block.register_forward_pre_hook(lambda *_: begun.append(len(calls.seen)))
        wrapped(torch.ones(2, 3)).sum().backward()
        wrapped.finish_gradient_synchronization()
    read = "the contract of ex-fsdp-fullysharded, `free`"
    expect_equal(whole_units(wrapped), [], name="units that are whole after finish", read=read)
    read = "the contract of ex-fsdp-fullysharded, `gather`"
    expect_equal(begun, [4, 6, 6], name="gathers begun when each unit computes", read=read)


def fully_ahead(rank, world_size):
    wrapped, log, reduced = fsdp.FullySharded(Chain()), {}, {}

    def look(moment):
        log[moment], reduced[moment] = whole_units(wrapped), units_with_gradients(wrapped)

    for part in (wrapped.module, *wrapped.module.blocks):
        part.look = look
    wrapped(torch.ones(1, requires_grad=True)).sum().backward()
    look("after backward")
    wrapped.finish_gradient_synchronization()
    look("after the step")
    usual, gradients_at = dict(log), dict(reduced)
    with torch.no_grad():
        wrapped(torch.ones(1))
    usual["after evaluation"] = whole_units(wrapped)
    with torch.no_grad():
        wrapped(torch.ones(1), order=(0, 2, 1))
    found = usual, log["forward 2"], whole_units(wrapped), gradients_at
    fully_out_of_order(rank, world_size)
    fully_interrupted(rank, world_size)
    return found


@pytest.mark.time_limit(40)
def test_FullySharded_gathers_ahead_and_survives_what_happens_in_training(ranks):
    result = ranks(fully_ahead, n_ranks=2)
    case("a chain of four units on 2 ranks; which are whole while each computes")
    expected = {"forward 0": [1]} | {f"forward {i}": [i, i + 1][: 5 - i] for i in (1, 2, 3, 4)}
    expected |= {"backward 0": [4]} | {f"backward {i}": [i - 1, i][i == 1 :] for i in (4, 3, 2, 1)}
    expected |= {"after backward": [], "after the step": [], "after evaluation": []}
    found, at_second, in_the_end, gradients_at = result.values[0]
    expect_equal(found, expected, name="whole", read=ZERO3)
    case(
        "a chain of four units on 2 ranks; whose shards have their gradient: a reduction ends when the next one begins"
    )
    expected = {f"backward {i}": [*range(i + 2, 5)] for i in (4, 3, 2, 1)} | {"after the step": [1, 2, 3, 4]}
    found = {moment: gradients_at.get(moment) for moment in expected}
    expect_equal(found, expected, name="units with a gradient", answer=gradients_at, read=ZERO3)
    case("the same units in another order: 1, 3, 2")
    expect_equal([at_second, in_the_end], [[2, 3], []], name="whole while 2 computes, and after", read=ZERO3)
    case("how many gathers have been started when each begins to compute")
    ledger = result.ledgers[0]
    begun = [sum(r.op in GATHER for r in ledger.before(f"computes {i}")) for i in (1, 2, 3, 4)]
    expect_equal(begun, [2, 3, 4, 4], name="gathers", read=ZERO3)


def fully_kept_promises(rank, world_size):
    """What the contract of each method says, one by one: a test of its own, so that a mistake fails no more than it
    must.
    """
    case("a chain of four units on 2 ranks, run as 1, 3, 2 without gradients: unit 3 was ahead in the end")
    wrapped = fsdp.FullySharded(Chain())
    for block in wrapped.module.blocks:
        block.look = wrapped.module.look
    with torch.no_grad():
        wrapped(torch.ones(1), order=(0, 2, 1))
    read = "the contract of ex-fsdp-fullysharded, `after_forward`"
    expect_equal(wrapped.ahead, None, name="which unit is ahead after the root's forward", read=read)
    case("a chain of four units on 2 ranks, after forward; what hangs in the place of a weight")
    kept = [i for i, block in enumerate(wrapped.module.blocks, 1) if block.weight.device.type != "meta"]
    read = "the contract of ex-fsdp-fullysharded, `free`"
    expect_equal(kept, [], name="units whose views were not taken down", read=read)
    fully_reduced(rank, world_size)
    fully_without_a_head(rank, world_size)
    fully_in_two_parts(rank, world_size)


@pytest.mark.time_limit(40)
def test_FullySharded_does_what_each_method_promises(ranks):
    ranks(fully_kept_promises, n_ranks=2)


def fully_counted(rank, world_size, n_blocks):
    wide = 64
    wrapped = fsdp.FullySharded(Net(n_blocks, wide))
    x = inputs_of(2)
    unit = sum(p.numel() for p in nn.Sequential(nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)).parameters()) * 4

    def step():
        loss_of(wrapped, x).backward()
        wrapped.finish_gradient_synchronization()

    step()  # after it, every shard has its gradient
    dist.barrier()
    in_step, after_step = peak_bytes(step)
    with torch.no_grad():
        in_evaluation, _ = peak_bytes(lambda: loss_of(wrapped, x))
    starts = peak_bytes(lambda: loss_of(wrapped, x).backward())  # and finished by the next forward
    wrapped.finish_gradient_synchronization()
    return in_step / unit, after_step / unit, in_evaluation / unit, starts[0] / unit


@pytest.mark.time_limit(40)
def test_FullySharded_holds_two_units_at_most(ranks):
    many = ranks(fully_counted, 9, n_ranks=2)
    case("9 equal units on 2 ranks, bytes counted by the allocator, in whole units; gloo itself takes one for a gather")
    for in_step, after_step, in_evaluation, overlapped in many.values:
        problem = "{} held {:.1f} whole units at once; at most 3 in forward, 8 in backward with its gradients"
        expect_true(in_evaluation < 4.5, problem.format("a forward", in_evaluation), read=ZERO3)
        expect_true(in_step < 10.5, problem.format("a step", in_step), read=ZERO3)
        expect_true(overlapped < 10.5, problem.format("forward and backward", overlapped), read=ZERO3)
        expect_true(after_step < 2.5, f"{after_step:.1f} whole units are still held after a step", read=ZERO3)
    case(
        "what rank 0 of 2 starts: for each of 9 units and the root, in a step two gathers and one reduction; 11 "
        "steps, 5 forwards"
    )
    ledger = many.ledgers[0]
    steps, evaluations, n_flats = 1 + 5 + 5, 5, 10
    expect_equal(ledger.count(*GATHER), (2 * steps + evaluations) * n_flats, name="all-gathers", read=ZERO3)
    expect_equal(ledger.count(*SCATTER), steps * n_flats, name="reduce-scatters", read=ZERO3)
    expect_equal(ledger.count("all_reduce"), 0, name="all-reduces", read=ZERO3)


def beside_fully_shard(rank, world_size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for dtype, atol in ((None, 1e-5), (torch.bfloat16, 2e-2)):
        case(f"ours beside fully_shard, param_dtype={dtype}, {world_size} ranks, the gradients of one step")
        theirs: Any = Net()
        ours = fsdp.FullySharded(Net(), param_dtype=dtype)
        for part in (*theirs.blocks, theirs):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        x = inputs_of(2, rank)
        losses = [loss_of(model, x) for model in (ours, theirs)]
        [loss.backward() for loss in losses]
        ours.finish_gradient_synchronization()
        expect_close(losses[0], losses[1].detach(), atol=atol, rtol=atol, name="loss", read=ZERO3)
        for block, other in zip(ours.module.blocks, theirs.blocks, strict=True):
            row = torch.empty(world_size * len(block.flat_0))
            all_gather_row(row, block.flat_0.grad)
            expected = torch.cat([p.grad.full_tensor().flatten() for p in other.parameters()])
            expect_close(row[: len(expected)], expected, atol=atol, rtol=atol, name="gradient of a block", read=ZERO3)


@oracle
@pytest.mark.time_limit(40)
def test_FullySharded_equals_fully_shard_of_torch(ranks):
    ranks(beside_fully_shard, n_ranks=2)


# ---- clip_sharded_gradient_norm_ -------------------------------------------------------------------------------------


def clipped(rank, world_size):
    case(f"{world_size} ranks that hold gradients of 3 and 4, padded with a zero; one parameter has none")
    mine, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    mine.grad = torch.tensor([3.0, 0.0]) if rank == 0 else torch.tensor([4.0 if rank == 1 else 0.0, 0.0])
    start = mine.grad.clone()
    norm = fsdp.clip_sharded_gradient_norm_([mine, other], 10.0)
    expect_close(norm, torch.tensor(5.0), name="norm", read=CLIP)
    expect_close(mine.grad, start, name="gradient below the limit", read=CLIP)
    before = mine.grad
    norm = fsdp.clip_sharded_gradient_norm_([mine, other], max_norm=0.5)
    expect_close(norm, torch.tensor(5.0), name="norm", read=CLIP)
    expect_close(mine.grad, start / 10, atol=1e-5, name="gradient above the limit", read=CLIP)
    problem = "grad became a new tensor, so two were held for a moment: scale it in place"
    expect_true(mine.grad is before, problem, answer=mine.grad, read="the contract, under Args")
    case(f"a rank that holds no gradient at all takes part too; {ELSEWHERE}")
    if rank == 1:
        mine.grad = None
    with explained_elsewhere(CLIP):
        norm = fsdp.clip_sharded_gradient_norm_([mine], 1.0)
    expect_equal(norm.device.type, "cpu", name="device of the norm", read=CLIP)
    expect_close(norm, torch.tensor(0.3), atol=1e-5, name="norm", read=CLIP)
    case(f"a net's gradients cut over {world_size} ranks, beside torch.nn.utils.clip_grad_norm_ on the whole")
    net = Net()
    loss_of(net, inputs_of(5)).backward()
    shards = [nn.Parameter(torch.zeros(math.ceil(p.numel() / world_size))) for p in net.parameters()]
    for part, p in zip(shards, net.parameters(), strict=True):
        part.grad = cut(p.grad.flatten(), rank, world_size)
    norm = fsdp.clip_sharded_gradient_norm_((part for part in shards), 0.01)
    expect_close(norm, nn.utils.clip_grad_norm_(net.parameters(), 0.01), atol=1e-5, name="norm", read=CLIP)
    for part, p in zip(shards, net.parameters(), strict=True):
        expect_close(part.grad, cut(p.grad.flatten(), rank, world_size), atol=1e-6, name="clipped share", read=CLIP)
    case(f"gradients of 3e-8 and 4e-8, far below 1e-6; {ELSEWHERE}")
    for scale in (1e-8, 0.0):
        mine.grad = start * scale
        with explained_elsewhere(CLIP):
            norm = fsdp.clip_sharded_gradient_norm_([mine], 1.0)
        expect_equal(norm.device.type, "cpu", name="device of the norm", read=CLIP)
        expect_close(norm, torch.tensor(5 * scale), atol=1e-10, name="norm", read=CLIP)
        expect_close(mine.grad, start * scale, atol=1e-10, name="gradient below the limit", read=CLIP)
    case("gradients of 30,000 and 40,000 in float16, where the square of either is infinite")
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = (start * 10_000).half()
    norm = fsdp.clip_sharded_gradient_norm_([half], 5.0)
    expect_close(norm, torch.tensor(50_000.0), name="norm", read=CLIP)
    expect_close(half.grad, start.half(), name="clipped share", read=CLIP)
    milestone("counted")
    case("the groups (1,) and (0, 2) of 3 ranks")
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine.grad = start + 0.5
    norm = fsdp.clip_sharded_gradient_norm_([mine], 100.0, groups[rank % 2])
    square = [torch.tensor([3.5, 0.5, 0.5, 0.5]), torch.tensor([4.5, 0.5])][rank % 2]
    expect_close(norm, square.norm(), name="norm", read=CLIP)
    case(f"two of the three ranks have gradients [3, 3], and the third has no parameter at all; rank {rank}")
    mine.grad = torch.full((2,), 3.0)
    norm = fsdp.clip_sharded_gradient_norm_([] if rank == 2 else [mine], 100.0)
    expect_close(norm, torch.tensor(6.0), name="norm", read=CLIP)


@pytest.mark.time_limit(30)
def test_clip_sharded_gradient_norm__is_of_the_whole(ranks):
    result = ranks(clipped, n_ranks=3)
    case("what a rank sends for seven calls: one all-reduce of one number each")
    sent = [[(r.op, r.n_elements) for r in ledger.before("counted")] for ledger in result.ledgers]
    expect_equal(sent, [[("all_reduce", 1)] * 7] * 3, name="collectives and numbers", read=CLIP)


# ---- apply_fully_shard -----------------------------------------------------------------------------------------------


ROOT_FIRST = (
    "call `fully_shard` on the root last, after every block: the root takes all parameters that no block has taken "
    "before, "
    "and PyTorch raises this error when a block comes after it"
)


def applied_on_a_mesh(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    case(f"a mesh of ranks 0 and 2, and one of 1 and 3: half of the weight on each; rank {rank}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "replicas"))["shards"]
    model = fsdp.apply_fully_shard(Net(), mesh, None)
    weight = model.blocks[0][0].weight
    found = weight.device_mesh.mesh.tolist(), tuple(weight.to_local().shape)
    expect_equal(found, ([rank % 2, 2 + rank % 2], (8, 8)), name="ranks that share a weight, and the shape of a share")
    x = inputs_of(2)
    expect_close(
        loss_of(model, x), loss_of(Net(), x), atol=1e-6, name="loss", read="the contract of ex-fsdp-apply-fully-shard"
    )


def applied(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    case(f"{world_size} ranks, three blocks and the root, bfloat16")
    model: Any = Net()
    read = "the contract of ex-fsdp-apply-fully-shard"
    with explained("Invariant encountered", ROOT_FIRST, read):
        out = fsdp.apply_fully_shard(model, init_device_mesh("cpu", (world_size,)), torch.bfloat16)
    expect_true(out is model, "it should return the model that was passed", read=read)
    expect_equal(
        [isinstance(part, FSDPModule) for part in (*model.blocks, model)], [True] * 4, name="sharded", read=read
    )
    expect_true(
        not isinstance(model.blocks[0][0], FSDPModule), "a layer inside a block is a unit of its own", read=read
    )
    kinds = {type(p) for p in model.parameters()}
    expect_equal(kinds, {DTensor}, name="types of the parameters", read=read)
    weight = model.blocks[0][0].weight
    expect_equal([weight.dtype, tuple(weight.placements)], [torch.float32, (Shard(0),)], name="weight", read=read)
    seen = []
    model.blocks[1][0].register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    with explained("Invariant encountered", ROOT_FIRST, read):
        result = model(inputs_of(2, rank))["out"][0]
    found = {"a block": seen[0], "the root": result.dtype}
    expect_equal(found, dict.fromkeys(found, torch.bfloat16), name="dtypes of the outputs", answer=found, read=read)
    whole = [i for i, block in enumerate(model.blocks) if not isinstance(block[0].weight, DTensor)]
    problem = (
        f"blocks {whole} are still whole after the root's forward: by default `fully_shard` frees a block after its own"
    )
    expect_true(not whole, problem, answer=whole, read=read)
    result.float().sum().backward()
    milestone("backward ends")
    expect_equal(weight.grad.dtype, torch.float32, name="dtype of a gradient", read=read)
    case(f"{world_size} ranks, param_dtype=None, the default mesh")
    plain = fsdp.apply_fully_shard(Net(), None, None)
    expect_equal(plain(inputs_of(2))["out"][0].dtype, torch.float32, name="dtype of the output", read=read)


@pytest.mark.time_limit(40)
def test_apply_fully_shard_makes_units_of_blocks(ranks):
    result = ranks(applied, n_ranks=2)
    case(
        "what rank 0 of 2 starts in a step: gathers of three blocks and the root, of the blocks again, four reductions"
    )
    calls = result.ledgers[0].before("backward ends")
    found = {
        "gathers": [r.dtype for r in calls if r.op in GATHER],
        "reductions": [r.dtype for r in calls if r.op in SCATTER],
    }
    expected = {"gathers": ["bfloat16"] * (4 + 3), "reductions": ["bfloat16"] * 4}
    read = "the contract of ex-fsdp-apply-fully-shard: all other options keep their defaults"
    expect_equal(found, expected, name="dtypes", answer=found, read=read)


@pytest.mark.time_limit(40)
def test_apply_fully_shard_on_some_of_the_ranks(ranks):
    ranks(applied_on_a_mesh, n_ranks=4)


# ---- save_sharded, load_sharded --------------------------------------------------------------------------------------


def build(kind: str, seed: int):
    """A model and its optimizer; another seed gives other weights and another learning rate."""
    from torch.distributed.fsdp import fully_shard

    model = Net(2, 6, seed)
    if kind == "sharded":
        for part in (*model.blocks, model):
            fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05 * (1 + seed), weight_decay=0.1 * (1 + seed))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_step(model, optimizer, rank=0, world_size=1):
    optimizer.zero_grad()
    loss_of(model, inputs_of(4, 9)).backward()
    optimizer.step()


def everything(model, optimizer):
    found = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": whole(v).clone() for key, v in optimizer.state[p].items()}
    return found | {key: optimizer.param_groups[0][key] for key in ("lr", "weight_decay")}


def saved_by_them(path, model, optimizer):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def loaded_by_them(path, model, optimizer):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def write(rank, world_size, path, kind, by_them):
    model, optimizer = build(kind, 0)
    one_step(model, optimizer)
    before = everything(model, optimizer)
    (saved_by_them if by_them else fsdp.save_sharded)(path, model, optimizer)
    expect_close(everything(model, optimizer), before, name="what was saved, in memory", read="A checkpoint in pieces")
    return before


def read_back(rank, world_size, path, kinds, by_them, expected):
    for kind in kinds:
        model, optimizer = build(kind, 1)
        case(f"a checkpoint read on {world_size} ranks, {kind}, into a model that has other values and no step")
        (loaded_by_them if by_them else fsdp.load_sharded)(path, model, optimizer)
        expect_close(everything(model, optimizer), expected, name="loaded", read="A checkpoint in pieces")
    one_step(model, optimizer)
    return everything(model, optimizer)


def written(path) -> dict[str, tuple[int, ...]]:
    """The names of the tensors in a checkpoint, and their whole shapes."""
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(about.size) for name, about in found.items() if hasattr(about, "size")}


def rows_of(path) -> dict[str, list[int]]:
    """For each tensor in a checkpoint, the rows (along dimension 0) of the pieces in which it was written."""
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(path).read_metadata().state_dict_metadata
    chunks = {
        name: sorted(about.chunks, key=lambda c: tuple(c.offsets))
        for name, about in found.items()
        if hasattr(about, "chunks")
    }
    return {name: [c.sizes[0] for c in parts if c.sizes and c.sizes[0]] for name, parts in chunks.items()}


def stepped(kind):
    model, optimizer = build(kind, 0)
    one_step(model, optimizer), one_step(model, optimizer)
    return everything(model, optimizer)


@pytest.mark.time_limit(60)
def test_save_sharded_writes_what_another_number_of_ranks_reads(ranks):
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        case("saved on 2 ranks after a step, read on one by torch.distributed.checkpoint")
        before = ranks(write, folder, "sharded", False, n_ranks=2).values[0]
        shapes = {name: tuple(p.shape) for name, p in build("plain", 0)[0].named_parameters()}
        expected = {f"model.{name}": shape for name, shape in shapes.items()}
        expected |= {f"optimizer.state.{name}.exp_avg": shape for name, shape in shapes.items()}
        found = written(folder)
        read = (
            "the contract of ex-fsdp-save-sharded: the state of the model and that of the optimizer, under these "
            "two keys"
        )
        keys = sorted({name.partition(".")[0] for name in found})
        expect_equal(keys, ["model", "optimizer"], name="keys of the saved dict that hold tensors", read=read)
        parts = {name: found.get(name) for name in expected}
        expect_equal(parts, expected, name="names and whole shapes", answer=found, read=read)
        files = sorted(file.name for file in Path(folder).iterdir())
        expect_true(
            sum(name.endswith(".distcp") for name in files) == 2, f"two ranks should write a file each: {files}"
        )
        case("saved on 2 ranks: how many of each tensor's rows were written at once; a rank has about half of them")
        read = "the contract of ex-fsdp-save-sharded: every rank writes its own share"
        shares = {name: [len(part) for part in torch.empty(shape).chunk(2)] for name, shape in expected.items()}
        expect_equal({name: rows_of(folder)[name] for name in shares}, shares, name="rows", read=read)
        ranks(read_back, folder, ("plain",), True, before, n_ranks=1)


def test_save_sharded_refuses_flat_shards():
    from lib.given.parallel.sharding import HookedUnits

    case("a model that is another `HookedUnits` than your `FullySharded`, in flat shards all the same")
    model: HookedUnits = HookedUnits.__new__(type("OtherUnits", (HookedUnits,), {}))
    nn.Module.__init__(model)
    read = "the contract: any `HookedUnits` is refused"
    with tempfile.TemporaryDirectory() as folder, expect_raises(ValueError, "gather_full_params", read=read):
        fsdp.save_sharded(folder, model, torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.time_limit(60)
def test_load_sharded_on_another_number_of_ranks(ranks):
    with tempfile.TemporaryDirectory() as folder:
        before = ranks(write, folder, "sharded", True, n_ranks=2).values[0]
        after = ranks(read_back, folder, ("plain", "sharded"), False, before, n_ranks=3).values[0]
        case("another step after loading, as if nothing had been")
        expect_close(after, stepped("plain"), atol=1e-5, name="after a step", read="A checkpoint in pieces")
