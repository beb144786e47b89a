"""What the tests of this chapter run on each rank: small models, and steps of training with the graded wrappers."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.ranks import milestone
from lib.workbook.grading import graded

ddp = graded("ddp")


class Net(nn.Module):
    """Two layers whose parameters are tied, one frozen, one of another dtype, and two that a call may leave out."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.tied = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.maybe = nn.Parameter(torch.randn(7, 3).T)  # transposed in memory
        self.never = nn.Parameter(torch.randn(4))
        self.wide = nn.Parameter(torch.randn(7, 2, dtype=torch.float64))
        self.last = nn.Linear(7, 3)
        self.register_buffer("steps", torch.tensor(seed))

    def forward(self, x: Tensor, use: bool = True, *, scale: float = 1.0) -> Tensor:
        h = self.tied(torch.tanh(self.first(x)))
        h = torch.tanh(self.again(h)) + self.frozen(h)
        if use:
            h = h + self.maybe.mean(0)
        extra = (h.double() @ self.wide).sum(-1, keepdim=True).float()
        return scale * (self.last(h) + extra)


def sparse(rank, world_size, kind):
    """What a step says whose gradient is sparse."""
    model = wrap(kind, nn.Embedding(4, 2, sparse=True))
    try:
        model(torch.tensor([rank])).sum().backward()
        model.finish_gradient_synchronization()
    except TypeError as error:
        return str(error)
    return None


class Chain(nn.Module):
    """Three layers in a row; ``after`` is told when backward has come past the last, and past the second."""

    def __init__(self, seed: int = 0, after=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((4, 6), (6, 5), (5, 2)))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.after is not None and x.requires_grad and i < 2:
                x.register_hook(lambda grad, i=i: self.after(f"layer {i + 1} is through"))
        return x


def items(n: int, seed: int = 0, width: int = 5) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def wrap(kind: str | float, module: nn.Module) -> Any:
    """``"overlap"``, ``"torch"`` for PyTorch's own, or a bucket's size in MB."""
    if kind == "overlap":
        return ddp.OverlapDDP(module)
    if kind == "torch":
        return DistributedDataParallel(module, find_unused_parameters=True)
    return ddp.BucketedDDP(module, kind)


def finish(model: Any) -> None:
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_synchronization()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


# ---- broadcast_parameters ----


class Odd(nn.Module):
    """Tensors of every kind, filled with this rank's number."""

    def __init__(self, rank: int):
        super().__init__()
        value = float(rank + 1)
        self.across = nn.Parameter(torch.full((3, 2), value).T)
        self.narrow = nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((), value, dtype=torch.float64), requires_grad=False)
        self.tied = self.narrow
        self.register_buffer("count", torch.tensor(rank + 1))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("hidden", torch.full((2, 4), value)[:, ::2], persistent=False)
        with torch.no_grad():
            self.across[1, 2] += 10.0


def send_parameters(rank, world_size):
    module = Odd(rank)
    before = {name: (t.data_ptr(), t.stride()) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    ddp.broadcast_parameters(module)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    moved = [name for name, t in tensors.items() if (t.data_ptr(), t.stride()) != before[name]]
    module.across.sum().backward()
    values = {name: t.detach().contiguous() for name, t in tensors.items()}
    return values, moved, [name for name, p in module.named_parameters() if p.requires_grad], module.across.grad


def send_dtypes(rank, world_size, names):
    """Buffers of dtypes that gloo does not know, each [rank + 1, rank + 3]; one of them without dimensions."""
    module = nn.Module()
    for name in names:
        module.register_buffer(name, torch.tensor([rank + 1, rank + 3]).to(getattr(torch, name)))
    module.register_buffer("one", torch.tensor(rank + 5).to(torch.int16))
    ddp.broadcast_parameters(module)
    return {name: (buffer.dtype, buffer.float()) for name, buffer in module.named_buffers()}


def send_expanded(rank, world_size):
    """A buffer of one row that is shown three times."""
    module = nn.Module()
    module.register_buffer("rows", torch.arange(2.0 * rank, 2.0 * rank + 2).expand(3, 2))
    ddp.broadcast_parameters(module)
    rows = module.get_buffer("rows")
    return rows, rows.stride()


def send_in_a_group(rank, world_size):
    pair = dist.new_group([1, 3])
    module = nn.Linear(1, 1).requires_grad_(False)
    module.weight.fill_(float(rank))
    if rank in (1, 3):
        ddp.broadcast_parameters(module, pair)
    return module.weight.item()


# ---- average_gradients, average_gradients_flat ----


class Loose(nn.Module):
    """Parameters whose gradients the test sets."""

    def __init__(self, rank: int, used: list[bool], transposed: bool = True):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(3, 2).T)
        self.c = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.b_again = self.b
        self.frozen.grad = torch.tensor([5.0 + rank])  # from before it was frozen
        self.a.grad = torch.tensor([1.0 + rank, 2.0 + 10 * rank])
        grad = torch.arange(6.0).reshape(2, 3) * (rank + 1)
        self.b.grad = grad.T.contiguous().T if transposed else grad
        self.c.grad = torch.tensor(3.0 * rank, dtype=torch.float64)
        if not used[rank]:
            self.b.grad = self.c.grad = None


def average_loose(rank, world_size, name, used):
    module = Loose(rank, used)
    getattr(ddp, name)(module)
    return gradients(module)


def average_laid_out(rank, world_size, name):
    """The gradient of ``b`` is in memory column by column on rank 1, and row by row on the others."""
    module = Loose(rank, [True] * world_size, transposed=rank == 1)
    getattr(ddp, name)(module)
    return gradients(module)


def average_in_a_group(rank, world_size, name):
    pair = dist.new_group([1, 3])
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[1.0 + rank * rank, 4.0 * rank]])
    if rank in (1, 3):
        getattr(ddp, name)(module, pair)
    return module.weight.grad


def average_all_unused(rank, world_size, name):
    module = nn.Linear(2, 1)
    getattr(ddp, name)(module)
    return [0.0 if p.grad is None else p.grad.abs().sum().item() for p in module.parameters()]


def train_by_hand(rank, world_size, name, n_each, n_steps):
    """Steps of SGD on this rank's share, gradients averaged by one of the two functions."""
    model = Chain(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(n_steps):
        x = items(n_each * world_size, seed=step, width=4)[rank::world_size]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        getattr(ddp, name)(model)
        optimizer.step()
    return model.state_dict()


# ---- OverlapDDP, BucketedDDP ----


def step_by_hand(rank, world_size, kind):
    """One weight of two numbers that begins as [rank, rank]; its gradient is [1 + rank, 2 + 10 rank]."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, float(rank + 1))
    model = wrap(kind, module)
    start = module.weight.detach().clone()
    model(torch.tensor([[1.0 + rank, 2.0 + 10 * rank]])).sum().backward()
    model.finish_gradient_synchronization()
    return start, module.weight.grad.clone()


def train(rank, world_size, kind, n_each, n_steps):
    """Steps of SGD on this rank's share, beside PyTorch's DDP; each rank begins with other weights."""
    found = {}
    # our wrapper runs last: PyTorch's own collectives are not recorded,
    # so no report could say which rank waits for which
    for name, seed in (("torch", 0), (kind, rank)):
        model = wrap(name, Net(seed=seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(n_steps):
            x = items(n_each * world_size, seed=step)[rank::world_size]
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(x, rank > 0 or step == 0, scale=0.5).square().mean().backward()
            finish(model)
            optimizer.step()
        found[name] = model.module.state_dict(), gradients(model.module)
    return found[kind], found["torch"]


def overlap(rank, world_size, kinds, dtype=torch.float32):
    """One round for each kind, with milestones where backward is through with a layer, and where it ends."""
    for i, kind in enumerate(kinds):
        model = wrap(kind, Chain(after=lambda name, i=i: milestone(f"{name} ({i})")).to(dtype))
        milestone(f"begin ({i})")
        model(items(3, seed=rank, width=4).to(dtype)).square().mean().backward()
        milestone(f"backward ends ({i})")
        model.finish_gradient_synchronization()
        milestone(f"end ({i})")


def several(rank, world_size, kind):
    """Accumulation, no_sync nested, an error inside it, a rank without items, an evaluation: one after the other."""
    programs = (accumulate, nested, accumulate_after_an_error, with_an_empty_rank, evaluated_in_a_round)
    return [program(rank, world_size, kind) for program in programs]


def mixed(rank, world_size, kinds):
    """A step for each kind of wrapper, with ``maybe`` unused on rank 1."""
    found = []
    for kind in kinds:
        model = wrap(kind, Net())
        milestone(f"wrapped ({kind})")
        model(items(2, seed=rank), rank != 1).square().mean().backward()
        model.finish_gradient_synchronization()
        found.append(gradients(model.module))
    return found


def mean_of_locals(world_size, use=lambda rank: True, seeds=lambda rank: [rank], n=lambda rank: 2):
    """The means that ``mixed`` and its relatives should give, from one process; unused counts as zeros."""
    total: dict[str, Tensor] = {}
    for rank in range(world_size):
        model = Net()
        for i, seed in enumerate(seeds(rank)):
            if n(rank):
                model(items(n(rank), seed=seed), use(rank) and i == 0).square().mean().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                total[name] = total.get(name, 0) + grad / world_size
    return total


def accumulate(rank, world_size, kind):
    """Two micro-batches, the first under no_sync; the parameter ``maybe`` is used in the first only."""
    model = wrap(kind, Net())
    milestone("wrapped")
    with model.no_sync():
        model(items(2, seed=rank)).square().mean().backward()
        model.finish_gradient_synchronization()
    inside = gradients(model.module)
    milestone("no_sync ends")
    model(items(2, seed=10 + rank), False).square().mean().backward()
    model.finish_gradient_synchronization()
    return inside, gradients(model.module)


def nested(rank, world_size, kind):
    """One weight; two micro-batches after the end of an inner no_sync, within the outer one, and a third outside."""
    module = nn.Linear(2, 1, bias=False)
    model = wrap(kind, module)
    x = torch.tensor([[1.0 + rank, 2.0 + 10 * rank]])
    milestone("nested begins")
    with model.no_sync():
        with model.no_sync():
            pass
        for _ in range(2):
            model(x).sum().backward()
            model.finish_gradient_synchronization()
        inside = module.weight.grad.clone()
    milestone("nested ends")
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    milestone("third ends")
    return inside


def accumulate_with_sync(rank, world_size, kind):
    """One weight; two micro-batches, each with its forward, without no_sync; then two backwards after two forwards."""
    module = nn.Linear(2, 1, bias=False)
    model = wrap(kind, module)
    for factor in (1.0, 100.0):
        model(factor * torch.tensor([[1.0 + rank, 2.0 + 10 * rank]])).sum().backward()
    model.finish_gradient_synchronization()
    grad = module.weight.grad.clone()
    first, second = (model(torch.ones(1, 2)).sum() for _ in range(2))
    first.backward()
    try:
        second.backward()
    except RuntimeError as error:
        return grad, str(error)
    return grad, None


def accumulate_after_an_error(rank, world_size, kind):
    """An exception inside no_sync, then an ordinary step."""
    model = wrap(kind, Net())
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    model(items(2, seed=rank)).square().mean().backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


def with_an_empty_rank(rank, world_size, kind):
    """Rank 1 has no items, and goes through no backward."""
    model = wrap(kind, Net())
    if rank != 1:
        model(items(2, seed=rank)).square().mean().backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


def evaluated_in_a_round(rank, world_size, kind):
    """One weight; a forward under no_grad between backward and the end of the round."""
    module = nn.Linear(2, 1, bias=False)
    model = wrap(kind, module)
    milestone("round begins")
    model(torch.tensor([[1.0 + rank, 2.0 + 10 * rank]])).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.finish_gradient_synchronization()
    milestone("round ends")
    return module.weight.grad.clone()


class Pair(nn.Module):
    """Two parameters; a call may leave out the second."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, use_b: bool = True) -> Tensor:
        y = (self.a * x).sum()
        return y + 3.0 * self.b.sum() if use_b else y


def nothing_started(rank, world_size, kind):
    """A step that reaches only ``a``, whose turn has not come, ended by an exception; then one that reaches both.

    None if the second step's backward raised a RuntimeError.
    """
    model = wrap(kind, Pair())
    x = torch.tensor([1.0 + rank, 2.0 + 10 * rank])
    with contextlib.suppress(ZeroDivisionError):
        model(10 * x, use_b=False).backward()
        raise ZeroDivisionError("on purpose")
    model.zero_grad()
    try:
        model(x).backward()
    except RuntimeError:
        return None
    model.finish_gradient_synchronization()
    return gradients(model.module)


def interrupted(rank, world_size, kind, places):
    """What ``interrupted_at`` gives for each place, and ``accumulate_with_sync``."""
    return [interrupted_at(rank, kind, where) for where in places], accumulate_with_sync(rank, world_size, kind)


def interrupted_at(rank, kind, where):
    """A step that an exception ends, and the step after it; then one more, to see that order is restored."""

    def fail(_):
        raise ZeroDivisionError("on purpose")

    model = wrap(kind, Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(ZeroDivisionError):
        if where.startswith("in backward"):
            place = model.module.first if where == "in backward" else model.module.again
            place.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        model(items(2, seed=20 + rank)).square().mean().backward()
        if where == "after backward" or rank == 0:
            raise ZeroDivisionError("on purpose")
        model.finish_gradient_synchronization()
    for place in (model.module.first, model.module.again):
        place._forward_hooks.clear()
    for _ in range(2):
        optimizer.zero_grad()
        model(items(2, seed=rank)).square().mean().backward()
        model.finish_gradient_synchronization()
    return gradients(model.module)


class Picky(nn.Module):
    """A module whose call must get through as it is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *more, flip=False, **named):
        return {"out": self.weight * x, "more": more, "flip": flip, "named": sorted(named), "training": self.training}


def passthrough(rank, world_size, kind):
    inner = Picky()
    model = wrap(kind, inner)
    given = model(torch.ones(2), 1, "two", flip=True, mask=None)
    with torch.no_grad():
        model.eval()(torch.ones(2))
    state = model.state_dict()
    return {
        "is_module": model.module is inner,
        "call": {key: value for key, value in given.items() if key != "out"},
        "eval": model(torch.ones(2))["training"],
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "inner_keys": sorted(model.module.state_dict()),
        "keys": sorted(state),
        "loads": str(model.load_state_dict(state)),
    }


def passthrough_and_frozen(rank, world_size, kind):
    """What ``passthrough`` gives; then all is frozen: nothing to average, and no error."""
    found = passthrough(rank, world_size, kind)
    model = wrap(kind, nn.Linear(2, 2).requires_grad_(False))
    milestone("wrapped")
    model(torch.ones(1, 2))
    model.finish_gradient_synchronization()
    return found
