"""What the tests of chapter 17 run on ranks: stages that write down what they do, models, and schedules written out
by hand."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from lib.given.parallel.pipeline import Action, Work
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded

pipeline = graded("pipeline")
RUN = "the section 'The run'"
SHARE = "eq-pipeline-12"
WIDTH, WORDS = 6, 11


class Stage(nn.Module):
    """A stage with the methods of ``PipelineStage``, which also writes down each call.

    Its backward is always in two parts: nothing is added to a parameter's gradient before ``backward_weights``.
    """

    def __init__(self, module: Callable[[Tensor], Tensor], stage: int, n_stages: int, group: Any = None):
        super().__init__()
        self.module, self.stage, self.n_stages, self.group = module, stage, n_stages, group
        self.trained = list(module.parameters()) if isinstance(module, nn.Module) else []
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.grads: dict[int, tuple[Tensor, ...]] = {}
        self.calls: list[tuple[str, int]] = []
        self.outputs: list[StorageWeakRef] = []
        self.most_alive = 0

    def forward_micro(self, i: int, x: Tensor) -> Tensor:
        self.calls.append(("F", i))
        x = x.detach().requires_grad_(x.is_floating_point())
        y = self.module(x)
        self.kept[i] = x, y
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        self.most_alive = max(self.most_alive, sum(not ref.expired() for ref in self.outputs))
        return y

    def backward_micro(self, i: int, grad: Tensor | None = None) -> Tensor | None:
        self.calls.append(("B", i))
        x, y = self.kept.pop(i)
        wanted = ([x] if x.requires_grad else []) + self.trained
        found = torch.autograd.grad(y, wanted, grad)
        self.grads[i] = found[len(wanted) - len(self.trained) :]
        return found[0] if x.requires_grad else None

    def backward_weights(self, i: int) -> None:
        self.calls.append(("W", i))
        if i not in self.grads:
            raise ValueError(f"micro-batch {i} has had no backward, or its weights already")
        for parameter, grad in zip(self.trained, self.grads.pop(i), strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def many(n: int, what: str) -> str:
    """A number of things in words: "1 chunk", "2 chunks", "3 micro-batches"."""
    return f"{n} {what}" + ("" if n == 1 else "es" if what.endswith("ch") else "s")


def layers(n: int, seed: int = 0) -> list[nn.Module]:
    """n layers of unequal sizes, from words to scores of words, in float64."""
    torch.manual_seed(seed)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH + i), nn.Tanh(), nn.Linear(WIDTH + i, WIDTH)) for i in range(n - 2)]
    return [part.double() for part in (nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, WORDS))]


def batches(n_micro: int, ragged: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of words ``[1 to 3, 4]`` with the words to come."""
    draw = torch.Generator().manual_seed(7)
    sizes = [(1 + i % 3 if ragged else 2, 4) for i in range(n_micro)]
    inputs = [torch.randint(WORDS, size, generator=draw) for size in sizes]
    return inputs, [torch.randint(WORDS, size, generator=draw) for size in sizes]


def word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, without targets of -100."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def one_process(
    model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of the whole model, micro-batch by micro-batch."""
    counts = [int((part != -100).sum()) for part in targets]
    mean = torch.zeros((), dtype=torch.float64)
    for x, wanted, count in zip(inputs, targets, counts, strict=True):
        if count:
            share = word_loss(model(x), wanted) * (count / sum(counts))
            share.backward()
            mean = mean + share.detach()
    return mean, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plan(kind: str, rank: int, n_ranks: int, n_micro: int, n_chunks: int = 1) -> list[Action]:
    """A valid schedule of a rank, made without the learner's functions."""
    if kind == "one by one":  # a micro-batch has its backward before the next one starts
        chunks = range(n_chunks)
        return [
            Action(k, m, c) for m in range(n_micro) for k in "FB" for c in (chunks if k == "F" else reversed(chunks))
        ]
    if kind == "all, then back":  # chunk by chunk
        forwards = [Action("F", m, c) for c in range(n_chunks) for m in range(n_micro)]
        return forwards + [Action("B", m, c) for c in reversed(range(n_chunks)) for m in range(n_micro)]
    if kind == "one W":  # chunk 0 puts off its last weights, and only those
        return [*plan("all, then back", rank, n_ranks, n_micro, n_chunks), Action("W", n_micro - 1)]
    ahead = min(n_ranks - rank, n_micro)
    actions = [Action("F", m) for m in range(ahead)]
    for m in range(n_micro):
        actions.append(Action("B", m))
        if kind == "weights later" and m >= rank:
            actions.append(Action("W", m - rank))
        if ahead + m < n_micro:
            actions.append(Action("F", ahead + m))
    late = range(max(0, n_micro - rank), n_micro) if kind == "weights later" else []
    return actions + [Action("W", m) for m in late]


def timed(schedules: Sequence[Sequence[Action]], seconds: Mapping[str, float]) -> list[Work]:
    """The works of all stages, by the rules of the chapter, made without the learner's functions.

    It fails if the stages wait for each other for ever.
    """
    n = len(schedules)
    last = n * (1 + max(a.chunk for actions in schedules for a in actions)) - 1
    todo, free, works = [list(actions) for actions in schedules], [0.0] * n, list[Work]()
    ends: dict[tuple[str, int, int], float] = {}
    while any(todo):
        before = len(ends)
        for s, queue in enumerate(todo):
            while queue:
                a, g = queue[0], queue[0].chunk * n + s
                needs = {"F": [("F", g - 1)], "B": [("F", g), ("B", g + 1)], "W": [("B", g)]}[a.kind]
                keys = [(kind, at, a.micro_batch) for kind, at in needs if 0 <= at <= last]
                if not all(key in ends for key in keys):
                    break
                start = max([free[s], *(ends[key] for key in keys)])
                free[s] = ends[a.kind, g, a.micro_batch] = start + seconds[a.kind]
                works.append(Work(s, a.micro_batch, a.kind, start, free[s], a.chunk))
                queue.pop(0)
        stuck = [str(queue[0]) for queue in todo if queue]
        expect_true(len(ends) > before, f"the stages wait for each other for ever, at {stuck}", answer=schedules)
    return sorted(works, key=lambda work: (work.start, work.stage))


def my_stages(parts: list[nn.Module], rank: int, n_ranks: int, n_chunks: int = 1, make=Stage) -> list:
    """This rank's chunks of a list with one module for each virtual stage."""
    n = n_ranks * n_chunks
    return [make(parts[c * n_ranks + rank], c * n_ranks + rank, n) for c in range(n_chunks)]


def parts_of(model: list[nn.Module], n: int) -> list[nn.Module]:
    """The layers in n parts, of which the first has all that the others do not need."""
    first = len(model) - (n - 1)
    return [nn.Sequential(*model[:first]), *model[first:]] if first > 1 else model


def compare(rank, n_ranks, kind, n_micro, n_chunks, ragged=True) -> list[tuple[str, int]]:
    """One step beside one process: loss and every gradient to the last bit."""
    n = n_ranks * n_chunks
    sizes = "different" if ragged else "equal"
    parts = f"{many(n_ranks, 'rank')}, {many(n_chunks, 'chunk')}, {many(n_micro, 'micro-batch')}"
    what = f"{parts} of {sizes} sizes, {kind}"
    case(f"{what}, float64; rank {rank}")
    whole = nn.Sequential(*parts_of(layers(max(n + 1, 3)), n))
    mine = copy.deepcopy(whole)
    inputs, targets = batches(n_micro, ragged)
    expected, grads = one_process(whole, inputs, targets)
    stages = my_stages(list(mine), rank, n_ranks, n_chunks)
    schedule = plan(kind, rank, n_ranks, n_micro, n_chunks)
    loss = pipeline.run_schedule(stages, schedule, inputs, targets, word_loss)
    if rank == n_ranks - 1:
        expect_close(loss, expected, name="the loss on the last rank", atol=0, rtol=1e-15, read=SHARE)
    else:
        expect_close(
            loss.double(),
            torch.zeros((), dtype=torch.float64),
            name=f"the loss on rank {rank}",
            read="the contract, under Returns",
        )
    for stage in stages:
        left = sorted(stage.grads)
        problem = f"backward_weights was never called for micro-batches {left}"
        expect_true(not left, problem, answer=left, read="the contract, under Returns")
    here = {f"{stage.stage}.{name}": p.grad for stage in stages for name, p in stage.module.named_parameters()}
    wanted = {name: grads[name] for name in here}
    for name, grad in here.items():
        expect_true(grad is not None, f"{name} got no gradient", read=RUN)
        expect_close(grad, wanted[name], name=f"gradient of {name}", answer=here, read=SHARE)
        expect_true(
            torch.equal(grad, wanted[name]),
            f"the gradient of {name} is off by a rounding: add up in the schedule's order",
            read=SHARE,
        )
    done = [call for stage in stages for call in stage.calls]
    expect_order(stages, schedule)
    return done


def expect_order(stages: list, schedule: list[Action]) -> None:
    """The stages did what the schedule says, in its order; a "W" may follow its "B" at once where there is none in
    the list."""
    has_later = {(a.micro_batch, a.chunk) for a in schedule if a.kind == "W"}
    for chunk, stage in enumerate(stages):
        wanted = [(a.kind, a.micro_batch) for a in schedule if a.chunk == chunk]
        wanted = [
            x for k, m in wanted for x in ([(k, m), ("W", m)] if k == "B" and (m, chunk) not in has_later else [(k, m)])
        ]
        expect_equal(stage.calls, wanted, name=f"calls of virtual stage {stage.stage}", read=RUN)


def several(rank, n_ranks, cases) -> None:
    """`compare` for several cases in one world, which starts once."""
    for one in cases:
        compare(rank, n_ranks, *one)


def in_subgroups(rank, n_ranks) -> None:
    """Two pipelines of two ranks each, beside each other, on the ranks (0, 2) and (1, 3)."""
    mine = dist.new_group([0, 2]), dist.new_group([1, 3])
    group = mine[rank % 2]
    at = dist.get_rank(group)
    whole = nn.Sequential(*layers(2, seed=rank % 2))
    copied = copy.deepcopy(whole)
    inputs, targets = batches(3)
    expected, grads = one_process(whole, inputs, targets)
    stage: Any = Stage(copied[at], at, 2, group)
    for given, how in ((group, "given to run_schedule"), (None, "known from the stages only")):
        case(f"two groups of ranks, (0, 2) and (1, 3), each a pipeline of its own, {how}; rank {rank}")
        stage.module.zero_grad()
        loss = pipeline.run_schedule([stage], plan("1F1B", at, 2, 3), inputs, targets, word_loss, given)
        if at == 1:
            expect_close(loss, expected, name="the loss", read=SHARE)
        expect_close(
            {name: p.grad for name, p in stage.module.named_parameters()},
            {name: grads[f"{at}.{name}"] for name, _ in stage.module.named_parameters()},
            name="gradients",
            read=SHARE,
        )


def ignored_targets(rank, n_ranks) -> None:
    """Targets of -100 do not count, and a micro-batch of nothing else counts nothing."""
    case(f"2 ranks, 4 micro-batches of 12 targets; of the first only 3 count, of the third none; rank {rank}")
    whole = nn.Sequential(*layers(2))
    mine = copy.deepcopy(whole)
    inputs = [torch.arange(12).view(3, 4) % WORDS] * 4
    targets = [(torch.arange(12).view(3, 4) + i) % WORDS for i in range(4)]
    targets[0][1:, :], targets[0][0, 0] = -100, -100
    targets[2][:] = -100
    expected, grads = one_process(whole, inputs, targets)
    stage: Any = Stage(mine[rank], rank, 2)
    loss = pipeline.run_schedule([stage], plan("1F1B", rank, 2, 4), inputs, targets, word_loss)
    if rank == 1:
        expect_close(loss, expected, name="the loss", read="the contract, under Returns")
    for name, p in stage.module.named_parameters():
        expect_close(p.grad, grads[f"{rank}.{name}"], name=f"gradient of {name}", read="the contract, under Returns")


def float_targets(rank, n_ranks) -> None:
    """A regression on numbers, with stages that change width, dtype and shape between each other."""
    case(
        "3 ranks, float inputs and targets, activations [n, 5], [n, 2, 3] and [n, 1], float32, "
        f"twice in a row; rank {rank}"
    )
    torch.manual_seed(1)
    parts = [
        nn.Linear(4, 5),
        nn.Sequential(nn.Linear(5, 6), nn.Unflatten(-1, (2, 3))),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 1)),
    ]
    whole, mine = nn.Sequential(*copy.deepcopy(parts)), parts[rank]
    inputs, targets = [torch.randn(n, 4) for n in (1, 4, 2)], [torch.randn(n, 1) for n in (1, 4, 2)]
    stage: Any = Stage(mine, rank, 3)
    for _ in range(2):
        loss = pipeline.run_schedule([stage], plan("1F1B", rank, 3, 3), inputs, targets, functional.mse_loss)
        expected = functional.mse_loss(whole(torch.cat(inputs)), torch.cat(targets))
        expected.backward()
    if rank == 2:
        expect_close(loss, expected.detach(), name="the loss", read=SHARE)
    for name, p in stage.module.named_parameters():
        expect_close(
            p.grad,
            whole[rank].get_parameter(name).grad,
            name=f"gradient of {name} after two runs",
            atol=1e-6,
            read=SHARE,
        )


def shared_table(rank, n_ranks) -> None:
    """The first and the last stage hold the same table; the sum of its two gradients is the whole model's."""
    case(f"3 ranks, 1F1B, 4 micro-batches; the table of words is also the last layer; rank {rank}")

    class Head(nn.Module):
        def __init__(self, table: Any):
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.table.weight)

    start, middle, _ = layers(3)
    whole = nn.Sequential(start, middle, Head(start))
    mine = copy.deepcopy(whole)
    inputs, targets = batches(4)
    expected, grads = one_process(whole, inputs, targets)
    stage = Stage(mine[rank], rank, 3)
    loss = pipeline.run_schedule([stage], plan("1F1B", rank, 3, 4), inputs, targets, word_loss)
    if rank == 2:
        expect_close(loss, expected, name="the loss", read=SHARE)
    table = torch.zeros(WORDS, WIDTH, dtype=torch.float64) if rank == 1 else mine[0].weight.grad
    dist.all_reduce(table)
    expect_close(table, grads["0.weight"], name="the sum of the table's two gradients", read=SHARE)


def numbers_and_tables(rank, n_ranks) -> None:
    """Two programs in one world."""
    float_targets(rank, n_ranks)
    shared_table(rank, n_ranks)


def beside_pytorch(rank, n_ranks) -> None:
    """The same split and micro-batches as schedules of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    for name, kind, n_chunks in (
        ("ScheduleGPipe", "all, then back", 1),
        ("Schedule1F1B", "1F1B", 1),
        ("ScheduleInterleaved1F1B", "all, then back", 2),
    ):
        case(f"{many(n_ranks, 'rank')}, {many(n_chunks, 'chunk')}, 4 micro-batches, beside {name}; rank {rank}")
        n = n_ranks * n_chunks
        model = parts_of(layers(max(n, 2)), n)
        theirs = my_stages(copy.deepcopy(model), rank, n_ranks, n_chunks)
        made = [pipelining.PipelineStage(s.module, s.stage, n, torch.device("cpu")) for s in theirs]
        inputs, targets = batches(4, ragged=False)
        schedule = getattr(pipelining, name)(made if n_chunks > 1 else made[0], 4, loss_fn=word_loss)
        losses: list[Tensor] = []
        given = {"target": torch.cat(targets), "losses": losses} if rank == n_ranks - 1 else {}
        schedule.step(*([torch.cat(inputs)] if rank == 0 else []), **given)
        ours = my_stages(model, rank, n_ranks, n_chunks)
        actions = plan(kind, rank, n_ranks, 4, n_chunks)
        loss = pipeline.run_schedule(ours, actions, inputs, targets, word_loss)
        if losses:
            expect_close(loss, torch.stack(losses).mean().detach(), name="the loss")
        for mine, other in zip(ours, theirs, strict=True):
            found = {name: p.grad for name, p in mine.module.named_parameters()}
            expect_close(found, {name: p.grad for name, p in other.module.named_parameters()}, name="gradients")


def counted(rank, n_ranks, kind, n_micro, n_chunks) -> list[int]:
    """One step of equal micro-batches, for the ledger."""
    case(
        f"{many(n_ranks, 'rank')}, {many(n_chunks, 'chunk')}, {many(n_micro, 'micro-batch')}, {kind}: "
        f"the messages; rank {rank}"
    )
    n = n_ranks * n_chunks
    stages = my_stages(parts_of(layers(max(n, 2)), n), rank, n_ranks, n_chunks)
    inputs, targets = batches(n_micro, ragged=False)
    pipeline.run_schedule(stages, plan(kind, rank, n_ranks, n_micro, n_chunks), inputs, targets, word_loss)
    return [stage.most_alive for stage in stages]


class Sent:
    """The handle of a message that has arrived."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def without_buffers(rank, n_ranks, cases) -> None:
    """Steps on a backend that buffers nothing: a send returns when the receiver has the message."""
    plain = dist.isend

    def isend(*args, **kwargs):
        plain(*args, **kwargs).wait()
        return Sent()

    dist.isend = isend
    try:
        for kind, n_micro, n_chunks in cases:
            what = f"{many(n_ranks, 'rank')}, {many(n_chunks, 'chunk')}, {many(n_micro, 'micro-batch')}, {kind}"
            case(f"{what}; a send returns when the receiver has taken it; rank {rank}")
            n = n_ranks * n_chunks
            stages = my_stages(parts_of(layers(max(n, 2)), n), rank, n_ranks, n_chunks)
            schedule = plan(kind, rank, n_ranks, n_micro, n_chunks)
            pipeline.run_schedule(stages, schedule, *batches(n_micro), word_loss)
    finally:
        dist.isend = plain


def bad_schedules(rank, n_ranks) -> int:
    """Arguments that do not fit together, on one rank only; returns how many activations left this rank."""
    model, (inputs, targets) = parts_of(layers(2), 2), batches(3)
    good = plan("1F1B", rank, 2, 3)
    reversed_b = [a for a in good if a.kind == "F"] + [a for a in good if a.kind == "B"][::-1]
    cases = {
        "the last action is missing": (1, good[:-1], "micro-batch 2"),
        "the last action is missing on the first stage, for which nobody waits": (0, good[:-1], "micro-batch 2"),
        "F of micro-batch 1 occurs twice": (0, [*good, Action("F", 1)], "micro-batch 1"),
        "an action of micro-batch 7, which does not exist": (1, [*good, Action("W", 7)], "micro-batch 7"),
        "an action of chunk 1, which does not exist": (0, [*good, Action("W", 0, 1)], "chunk 1"),
        "B of micro-batch 0 before its F": (
            1,
            [Action("B", 0), *[a for a in good if a != Action("B", 0)]],
            "micro-batch 0",
        ),
        "W of micro-batch 2 before its B": (0, [Action("W", 2), *good], "micro-batch 2"),
        "all backwards in reverse, on one rank of two": (0, reversed_b, "stuck"),
    }
    wrong_calls = 0
    for name, (where, schedule, mention) in cases.items():
        if name.startswith("all") and rank == 1:
            schedule = [Action(k, m) for m in range(3) for k in "FB"]
            where = 1
        case(f"2 ranks, 3 micro-batches, 1F1B, but on rank {where}: {name}; rank {rank}")
        stage = Stage(model[rank], rank, 2)
        if name.startswith("all"):
            pipeline.run_schedule([stage], schedule, inputs, targets, word_loss)  # unusual and valid
            continue
        with expect_raises(ValueError, mention, read="the contract, under Raises"):
            pipeline.run_schedule([stage], schedule if rank == where else good, inputs, targets, word_loss)
        wrong_calls += len(stage.calls)
    case(f"2 ranks, rank 1 has one micro-batch less; rank {rank}")
    with expect_raises(ValueError, "3", "2", read="the contract, under Raises"):
        n = 3 - rank
        stage = Stage(model[rank], rank, 2)
        pipeline.run_schedule([stage], plan("1F1B", rank, 2, n), inputs[:n], targets[:n], word_loss)
    case(f"2 ranks that both hold virtual stage 0; rank {rank}")
    with expect_raises(ValueError, "0", "1", read="the contract, under Raises"):
        pipeline.run_schedule([Stage(model[0], 0, 2)], good, inputs, targets, word_loss)
    return wrong_calls


class Fault(nn.Module):
    """A layer that raises an exception in its n-th forward, or in the backward of it."""

    def __init__(self, inner: nn.Module, n: int, in_backward: bool):
        super().__init__()
        self.inner, self.n, self.in_backward = inner, n, in_backward

    def forward(self, x: Tensor) -> Tensor:
        self.n -= 1
        if self.n == 0 and not self.in_backward:
            raise ArithmeticError("the layer is out of order")
        y = self.inner(x)
        if self.n == 0:
            y.register_hook(self.fail)
        return y

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("the layer is out of order")


def failing(rank, n_ranks, where, in_backward) -> None:
    """One stage raises an exception in its second micro-batch: every rank ends with its text."""
    case(
        f"{many(n_ranks, 'rank')}, 1F1B; rank {where} raises in "
        f"{'backward' if in_backward else 'forward'} of micro-batch 1; rank {rank}"
    )
    model = parts_of(layers(n_ranks + 1), n_ranks)
    module = Fault(model[rank], 2, in_backward) if rank == where else model[rank]
    inputs, targets = batches(5)
    error = ArithmeticError if rank == where else RuntimeError
    with expect_raises(error, "the layer is out of order", read="the contract, under Raises"):
        pipeline.run_schedule(
            [Stage(module, rank, n_ranks)], plan("1F1B", rank, n_ranks, 5), inputs, targets, word_loss
        )
