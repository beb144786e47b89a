"""DiLoCo, graded: equal to torch.optim.SGD(nesterov=True) on the average of what the ranks did, for one all-reduce a
round.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ranks import milestone
from lib.workbook.grading import case, expect_close, expect_equal, expect_true, graded

scaling = graded("scaling")

ROUND = "eq-scaling-8"


class Line(nn.Module):
    """One weight, and a loss whose gradient is the input: every step can be done by hand."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Net(nn.Module):
    """Two layers, a frozen one, and one shared by two names; gives (logits, loss), as chapter 7's models do."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.again = self.last
        self.register_buffer("seen", torch.zeros(1))
        self.to(dtype)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.again(self.fixed(self.first(x).tanh()))
        return logits, nn.functional.cross_entropy(logits, targets)


def data(rank: int, turn: int, n: int, dtype=torch.float32) -> list[tuple[Tensor, Tensor]]:
    """``n`` batches of a rank in a round, of odd sizes."""
    generator = torch.Generator().manual_seed(100 * rank + turn)
    sizes = [3 + (rank + i) % 3 for i in range(n)]
    return [
        (torch.randn(b, 3, generator=generator).to(dtype), torch.randint(2, (b,), generator=generator)) for b in sizes
    ]


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def alone(n_ranks: int, steps: list[list[int]], outer_lr: float, outer_momentum: float, inner) -> Net:
    """The same training in one process: copies for ranks, and torch's own SGD for the outer step."""
    outer_model = Net()
    models = [copy.deepcopy(outer_model) for _ in range(n_ranks)]
    inners = [inner(m.parameters()) for m in models]
    outer = torch.optim.SGD(
        [p for p in outer_model.parameters() if p.requires_grad],
        lr=outer_lr,
        momentum=outer_momentum,
        nesterov=outer_momentum > 0,
    )
    for turn, counts in enumerate(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inners, strict=True)):
            model.load_state_dict(outer_model.state_dict())
            for x, targets in data(rank, turn, counts[rank]):
                optimizer.zero_grad()
                model(x, targets)[1].backward()
                optimizer.step()
        for name, p in outer_model.named_parameters():
            if p.requires_grad:
                p.grad = p.detach() - torch.stack([m.get_parameter(name).detach() for m in models]).mean(0)
        outer.step()
    return outer_model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_local_sgd_step_by_hand():
    case("w=1, inputs 1 and 2 at inner lr 0.1, outer lr 0.5, momentum 0.8: g=0.3, v=0.3, step 0.5 (0.3 + 0.24)")
    model, state = Line(), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.tensor([x]),) for x in (1.0, 2.0)]
    scaling.local_sgd_step(model, state, optimizer, batches, 0.5, 0.8)
    expect_close(model.weight.detach(), torch.tensor([0.73]), name="the weight after a round", read=ROUND)
    case("the same, then a second round with input 1: g=0.1, v=0.34, step 0.5 (0.1 + 0.272)")
    scaling.local_sgd_step(model, state, optimizer, batches[:1], outer_lr=0.5, outer_momentum=0.8)
    expect_close(model.weight.detach(), torch.tensor([0.544]), name="the weight after two rounds", read=ROUND)
    expected = {"parameters": torch.tensor([0.544]), "momentum": torch.tensor([0.34])}
    expect_close(state, expected, name="outer_state", read=ROUND)
    graph = [name for name, value in state.items() if value.requires_grad]
    problem = f"outer_state has the graph of every round: {' and '.join(graph)}"
    expect_true(not graph, problem, answer=state, read=ROUND)


def test_local_sgd_step_gives_the_mean_loss():
    case("w=1, inputs 1 and 2 at inner lr 0.1: losses 1 and 1.8")
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ((torch.tensor([x]),) for x in (1.0, 2.0))  # a generator: it can be read once
    loss = scaling.local_sgd_step(model, {}, optimizer, batches, 1.0, 0.0)
    expect_close(loss, torch.tensor(1.4), name="mean loss", read=ROUND)
    expect_true(not loss.requires_grad, "the loss still has its graph", answer=loss)


def test_local_sgd_step_without_batches():
    case("w=1, a round of no batch, then of one, then of none: the momentum goes on")
    model, state = Line(), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = scaling.local_sgd_step(model, state, optimizer, [], 1.0, 0.5)
    expect_true(bool(torch.as_tensor(loss).isnan()), "the mean of no loss is nan", answer=[loss], read=ROUND)
    expect_close(model.weight.detach(), torch.ones(1), name="the weight after nothing", read=ROUND)
    scaling.local_sgd_step(model, state, optimizer, [(torch.ones(1),)], 1.0, 0.5)
    expect_close(model.weight.detach(), torch.tensor([0.85]), name="the weight after a step", read=ROUND)
    scaling.local_sgd_step(model, state, optimizer, [], 1.0, 0.5)
    expect_close(model.weight.detach(), torch.tensor([0.825]), name="the weight when only momentum moves", read=ROUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_local_sgd_step_keeps_dtypes_and_storages(dtype):
    case(f"a model in {dtype} with a frozen layer, a shared layer and a buffer; AdamW inside, two rounds")
    model, state = Net(dtype), dict[str, Any]()
    optimizer = adamw(model.parameters())
    before = {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()}
    fixed = model.fixed.weight.clone()
    for turn in range(2):
        scaling.local_sgd_step(model, state, optimizer, data(0, turn, 2, dtype), 0.7, 0.9)
    after = {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()}
    expect_equal(after, before, name="dtype and place of each tensor", read=ROUND)
    expect_true(torch.equal(fixed, model.fixed.weight), "the frozen layer was changed", read=ROUND)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expect_equal(sorted(state), ["momentum", "parameters"], name="keys of outer_state", read=ROUND)
    expect_equal(
        [(v.dtype, tuple(v.shape)) for v in state.values()], [(wide, (32,))] * 2, name="outer_state", read=ROUND
    )
    expect_close(
        trained(model), state["parameters"].to(dtype), name="the model, and the state it came from", read=ROUND
    )
    expect_equal(
        [s["step"].item() for s in optimizer.state.values()], [4.0] * 4, name="inner steps counted", read=ROUND
    )


def test_local_sgd_step_of_a_transposed_parameter():
    case("a parameter [2, 3] whose memory is transposed, gradient 1 at inner lr 0.1, outer lr 1, no momentum")
    model, state = nn.Module(), dict[str, Any]()
    model.weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())  # rows 0 2 4 and 1 3 5
    model.forward = lambda x: (model.weight * x).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling.local_sgd_step(model, state, optimizer, [(torch.ones(()),)], 1.0, 0.0)
    expected = torch.tensor([[-0.1, 1.9, 3.9], [0.9, 2.9, 4.9]])
    expect_close(model.weight.detach(), expected, name="the weight", read=ROUND)
    expect_close(state["parameters"], expected.flatten(), name='outer_state["parameters"]', read=ROUND)


def test_local_sgd_step_begins_at_the_global_parameters():
    case("w=1; after a round somebody writes 5 into the weight: the next round begins at outer_state's")
    model, state = Line(), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling.local_sgd_step(model, state, optimizer, [(torch.ones(1),)], 1.0, 0.0)
    with torch.no_grad():
        model.weight.fill_(5.0)
    scaling.local_sgd_step(model, state, optimizer, [(torch.ones(1),)], 1.0, 0.0)
    expect_close(model.weight.detach(), torch.tensor([0.8]), name="the weight", read=ROUND)


# ---- on ranks --------------------------------------------------------------------------------------------------------

STEPS = [[2, 1, 3, 2], [1, 2, 0, 1], [2, 2, 1, 3]]


def rounds(rank: int, world_size: int) -> dict:
    """Three rounds of AdamW; then one round of one SGD step; then a round of a group of ranks 1 and 3 alone."""
    found: dict[str, Any] = {}
    model, state = Net(), dict[str, Any]()
    optimizer = adamw(model.parameters())
    for turn, counts in enumerate(STEPS):
        milestone(f"round {turn}")
        scaling.local_sgd_step(model, state, optimizer, data(rank, turn, counts[rank]), 0.7, 0.9)
    milestone("one step")
    found["model"], found["momentum"] = values_of(model), state["momentum"]
    model = Net()
    scaling.local_sgd_step(model, {}, sgd(model.parameters()), data(rank, 0, 1), 1.0, 0.0)
    found["one step"] = values_of(model)
    milestone("in a group")
    line = Line()
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        inner = torch.optim.SGD(line.parameters(), lr=0.1)
        scaling.local_sgd_step(line, {}, inner, [(torch.tensor([float(rank)]),)], 1.0, 0.0, group=group)
    found["in a group"] = line.weight.detach().clone()
    milestone("end")
    return found


def between(ledger, first: str, last: str) -> list:
    return ledger.before(last)[len(ledger.before(first)) :]


@pytest.mark.time_limit(60)
def test_local_sgd_step_on_four_ranks_is_nesterov_on_the_average(ranks):
    case(
        "4 ranks, 3 rounds of 0 to 3 AdamW steps each, outer lr 0.7, momentum 0.9, against "
        "torch.optim.SGD(nesterov=True)"
    )
    result = ranks(rounds, n_ranks=4)
    expected = values_of(alone(4, STEPS, 0.7, 0.9, adamw))
    for rank, found in enumerate(result.values):
        expect_close(found["model"], expected, name=f"the model on rank {rank}", atol=1e-5, rtol=1e-4, read=ROUND)
    case("the same: what was sent in each round")
    for rank, ledger in enumerate(result.ledgers):
        for turn in range(3):
            sent = between(ledger, f"round {turn}", f"round {turn + 1}" if turn < 2 else "one step")
            calls = [(record.op, record.n_bytes) for record in sent]
            expect_equal(
                calls, [("all_reduce", 32 * 4)], name=f"collectives and bytes of round {turn}, rank {rank}", read=ROUND
            )
    case("4 ranks, one SGD step each, outer lr 1, momentum 0, against one process on the mean of the four gradients")
    whole = Net()
    losses = torch.stack([whole(*data(rank, 0, 1)[0])[1] for rank in range(4)])
    losses.mean().backward()
    sgd(whole.parameters()).step()
    for rank, found in enumerate(result.values):
        expect_close(
            found["one step"], values_of(whole), name=f"the model on rank {rank}", atol=1e-6, rtol=1e-5, read=ROUND
        )
    case(
        "w=1, gradients 1 and 3 on ranks 1 and 3, which are a group; ranks 0 and 2 do nothing; inner lr 0.1, outer lr 1"
    )
    weights = torch.cat([found["in a group"] for found in result.values])
    expect_close(weights, torch.tensor([1.0, 0.8, 1.0, 0.8]), name="weights of the ranks", read=ROUND)
