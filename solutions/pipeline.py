"""Pipeline parallelism: a model cut between its layers,
micro-batches in flight, and activations that are computed twice."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lib.given.parallel.mail import Mail, Message
from lib.given.parallel.pipeline import Action, MeanLoss, Plan, Work, check_plans
from lib.given.parallel.recompute import Enough, conditions_of, keep_in_graph


def partition_layers(costs: Sequence[float], n_stages: int) -> list[range]:
    """Cut a list of layers into stages so that the most expensive stage is as cheap as possible. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        costs, n_stages: Cost of each layer in any one unit (FLOPs, seconds, bytes), none negative; number of stages.
            The list given is not changed.

    Returns:
        A range of layers for each stage: consecutive, none empty, together all layers.
        The cost of the most expensive stage, an exact sum (``Fraction``), is as small as possible.
        If several cuts achieve that, the one whose list of first layers is lexicographically smallest:
        the second stage begins as early as possible, then the third, and so on.

    Raises:
        ValueError: There are fewer layers than stages, or ``n_stages`` is less than 1; the message names both numbers.

    Cost: one number for each layer and stage, not a trial of every cut: 120 layers in 16 stages take seconds.
    """
    ### BEGIN SOLUTION
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot fill n_stages = {n_stages} stages with at least one layer each")
    before = list(accumulate((Fraction(c if isinstance(c, int) else float(c)) for c in costs), initial=Fraction(0)))
    least = before  # least[i]: the first i layers in k stages; exact, so that equal sums are equal
    for k in range(1, n_stages):
        least = [min((max(least[j], before[i] - before[j]) for j in range(k, i)), default=0) for i in range(n + 1)]
    starts = [n]
    for k in reversed(range(n_stages)):
        starts.insert(0, next(j for j in range(k, n) if before[starts[0]] - before[j] <= least[n]))
    return [range(first, end) for first, end in pairwise(starts)]
    ### END SOLUTION


def gpipe_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under GPipe: all forwards, then all backwards. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        stage, n_stages, n_micro: Index of the stage from 0, numbers of stages and of micro-batches.

    Returns:
        ``2 * n_micro`` actions, micro-batches in ascending order in both halves.

    Source: GPipe (arXiv:1811.06965), section 2.3.
    Convention: the paper runs the backwards in descending order.
    In ascending order, as in PyTorch, gradients add up in the order of one process.
    """
    ### BEGIN SOLUTION
    return [Action(kind, m) for kind in "FB" for m in range(n_micro)]
    ### END SOLUTION


### BEGIN SOLUTION
def _alternate(forwards: list[Action], backwards: list[Action], n_ahead: int) -> list[Action]:
    """``n_ahead`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    pairs = [[backward, *forwards[n_ahead + n : n_ahead + n + 1]] for n, backward in enumerate(backwards)]
    return forwards[:n_ahead] + [action for pair in pairs for action in pair]


### END SOLUTION
def one_f_one_b_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under 1F1B: it runs each backward as soon as it can, and so frees memory early. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Returns:
        ``2 * n_micro`` actions: first ``n_stages - stage`` forwards (all, if there are fewer micro-batches); then a
        backward and a forward in turn; at the end the backwards that are left.
        Both kinds are in ascending order of micro-batches, and at most ``n_stages - stage`` of them wait for their
        backward.

    Source: PipeDream-Flush (arXiv:2006.09503), section 3.2; Megatron-LM (arXiv:2104.04473), section 2.2.
    """
    ### BEGIN SOLUTION
    forwards, backwards = ([Action(kind, m) for m in range(n_micro)] for kind in "FB")
    return _alternate(forwards, backwards, n_stages - stage)
    ### END SOLUTION


def interleaved_schedule(stage: int, n_stages: int, n_micro: int, n_chunks: int) -> list[Action]:
    """What a stage does under interleaved 1F1B, where it holds several chunks of layers. (Exercise)

    Size: 25 minutes, difficulty 4, core.

    Args:
        stage, n_stages, n_micro, n_chunks: As in ``gpipe_schedule``; ``n_chunks`` is the number of chunks on each
            stage.
            Chunk c of stage s is virtual stage ``c * n_stages + s``.

    Returns:
        ``2 * n_micro * n_chunks`` actions.
        Forwards come in rounds of ``n_stages`` micro-batches: a round goes through chunk 0, then through chunk 1, up to
        the last, and then the next round begins.
        Backwards come in the same rounds, each from the last chunk to the first.
        The stage begins with ``2 (n_stages - stage - 1) + (n_chunks - 1) n_stages + 1`` forwards (all, if there are
        fewer), then runs a backward and a forward in turn.
        One chunk is the exception: then it is 1F1B.

    Raises:
        ValueError: ``n_micro`` is not a multiple of ``n_stages``; the message names both.

    Source: Megatron-LM (arXiv:2104.04473), section 2.2, figure 4.
    """
    ### BEGIN SOLUTION
    if n_micro % n_stages:
        raise ValueError(f"n_micro = {n_micro} must be a multiple of n_stages = {n_stages}")
    rounds = [range(first, first + n_stages) for first in range(0, n_micro, n_stages)]
    forwards = [Action("F", m, chunk) for round_ in rounds for chunk in range(n_chunks) for m in round_]
    backwards = [Action("B", m, chunk) for round_ in rounds for chunk in reversed(range(n_chunks)) for m in round_]
    return _alternate(forwards, backwards, min(n_chunks, 2) * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1)
    ### END SOLUTION


def zero_bubble_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under ZB-H1: gradients of weights, for which no stage waits, fill the bubble. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Returns:
        ``3 * n_micro`` actions: those of ``one_f_one_b_schedule`` in their order, and a "W" for each micro-batch.
        The "W" of micro-batch ``m - stage`` comes right after the "B" of micro-batch m; the last ``stage`` of them come
        at the end.
        So at most ``n_stages - stage`` forwards wait for their "B", and at most ``n_stages`` micro-batches for their
        "W": no stage holds more than the first stage of 1F1B.

    Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, ZB-H1.
    """
    ### BEGIN SOLUTION
    order = one_f_one_b_schedule(stage, n_stages, n_micro)
    later = {Action("B", m): [Action("W", m - stage)] for m in range(stage, n_micro)}
    rest = [Action("W", m) for m in range(max(0, n_micro - stage), n_micro)]
    return [each for action in order for each in (action, *later.get(action, []))] + rest
    ### END SOLUTION


### BEGIN SOLUTION
class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "DeferredLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        ctx.layer.pending.append((x.detach(), grad))  # with its history, weight.grad would get one, and keep every grad
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None


### END SOLUTION
class DeferredLinear(nn.Module):
    """A linear layer with a backward in two parts. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Attributes:
        weight, bias: Those of the ``nn.Linear`` that it replaces: the same ``nn.Parameter`` objects, no copies;
            ``bias`` may be None.
        pending: A deque with an entry for each backward whose weight gradients have not been computed yet, oldest
            first.

    Autograd's backward computes the gradient of the input, and leaves ``weight.grad`` and ``bias.grad`` alone, even if
    the input needs no gradient.
    It also works under autocast.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        ### BEGIN SOLUTION
        self.weight, self.bias = linear.weight, linear.bias
        self.pending: deque[tuple[Tensor, Tensor]] = deque()
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... f"]:
        """From ``[..., C]`` to ``[..., F]``, as ``nn.Linear`` computes it."""
        ### BEGIN SOLUTION
        return _DeferredProduct.apply(x, self.weight, self.bias, self)
        ### END SOLUTION

    def backward_weights(self) -> None:
        """Add to ``.grad`` what ``nn.Linear`` would have added in the oldest pending backward, and release what was
        kept for it; a RuntimeError if none is pending."""
        ### BEGIN SOLUTION
        if not self.pending:
            raise RuntimeError("no backward is pending: run backward first")
        x, grad = (tensor.reshape(-1, tensor.shape[-1]) for tensor in self.pending.popleft())
        for parameter, part in ((self.weight, lambda: grad.T @ x.to(grad.dtype)), (self.bias, lambda: grad.sum(0))):
            if parameter is not None and parameter.requires_grad:
                new = part().to(parameter.dtype)
                parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
        ### END SOLUTION


### BEGIN SOLUTION
def _needs(kind: str, g: int, m: int, n_virtual: int) -> list[tuple[str, int, int]]:
    """What must have ended before an action can start, each as kind, virtual stage and micro-batch."""
    needs = {"F": [("F", g - 1, m)], "B": [("F", g, m), ("B", g + 1, m)], "W": [("B", g, m)]}
    return [need for need in needs[kind] if 0 <= need[1] < n_virtual]


### END SOLUTION
def simulate(
    schedules: Sequence[Sequence[Action]], durations: Mapping[str, float] | Sequence[Mapping[str, float]]
) -> list[Work]:
    """When each stage runs each of its actions, if messages take no time. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    A stage runs its list in order, each action as soon as the stage is free and what the action needs has ended.
    With R stages, chunk c of stage s is virtual stage ``g = c * R + s``.
    For each micro-batch, "F" of virtual stage g needs "F" of g - 1.
    "B" of g needs "F" of g and "B" of g + 1; "W" of g needs "B" of g.

    Args:
        schedules, durations: The actions of each stage; seconds of each kind of action, above 0: one mapping for all
            stages, or a sequence with one for each stage. The lists given are not changed.

    Returns:
        A ``Work`` for each action, in ascending order of start, then of stage.

    Raises:
        ValueError: The stages can never complete their lists.
            The message names the stuck stage that has waited longest, from when it was free (of equal ones the lowest),
            its action, and the action that it waits for, with the stage of that action; actions as ``str`` writes them.
            Of two missing actions it is the one that stands first in the rules above.
    """
    ### BEGIN SOLUTION
    n, n_chunks = len(schedules), 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    seconds = [durations] * n if isinstance(durations, Mapping) else durations
    todo, free, works = [deque(actions) for actions in schedules], [0.0] * n, list[Work]()
    ends: dict[tuple[str, int, int], float] = {}
    while waiting := [stage for stage in range(n) if todo[stage]]:
        stuck = dict[int, tuple[str, int, int]]()
        for stage in waiting:
            a = todo[stage][0]
            needs = _needs(a.kind, a.chunk * n + stage, a.micro_batch, n * n_chunks)
            if missing := [need for need in needs if need not in ends]:
                stuck[stage] = missing[0]
                continue
            start = max([free[stage], *(ends[need] for need in needs)])
            free[stage] = ends[a.kind, a.chunk * n + stage, a.micro_batch] = start + seconds[stage][a.kind]
            works.append(Work(stage, a.micro_batch, a.kind, start, free[stage], a.chunk))
            todo[stage].popleft()
        if len(stuck) == len(waiting):
            stage = min(stuck, key=lambda s: free[s])
            kind, g, m = stuck[stage]
            need = f"{Action(kind, m, g // n)} on stage {g % n}"
            raise ValueError(f"stage {stage} is stuck for ever at {todo[stage][0]}, which waits for {need}")
    return sorted(works, key=lambda work: (work.start, work.stage))
    ### END SOLUTION


def checkpoint(function: Callable, *args):
    """Call a function, keep only its inputs, and compute the rest again when backward needs it. (Exercise)

    Size: 50 minutes, difficulty 5, core.

    Args:
        function, *args: Called as ``function(*args)``; may use parameters, draw random numbers, call ``checkpoint``.
            Arguments may be anything; tensors may require gradients or not.

    Returns:
        What ``function`` returns, with the values and gradients of a plain call.
        The graph saves the tensors among ``args`` and nothing else; ``keep_in_graph`` saves them so that an enclosing
        ``checkpoint`` can drop even these. Without gradients it is a plain call.

    When backward asks for the first saved tensor, the function runs again, with gradients enabled and under the random
    states and the autocast of the first run (``conditions_of``).
    The second run ends as soon as all tensors that the first one saved are there again; backward uses each and drops
    it.

    Raises:
        RuntimeError: In backward, if the second run saves fewer tensors than the first; the message names both numbers.

    Source: Chen and others (arXiv:1604.06174), section 4; ``torch.utils.checkpoint`` with ``use_reentrant=False``.
    """
    ### BEGIN SOLUTION
    inputs = keep_in_graph(args)
    if inputs is None:
        return function(*args)
    same_conditions, saved, again = conditions_of(args), list[int](), dict[int, Tensor]()

    def drop(tensor: Tensor) -> int:
        saved.append(len(saved))
        return saved[-1]

    def catch(tensor: Tensor) -> Tensor:
        again[len(again)] = tensor.detach()
        if len(again) == len(saved):
            raise Enough
        return tensor.detach()

    def restore(index: int) -> Tensor:
        if index not in again:
            again.clear()
            with suppress(Enough), same_conditions(), torch.enable_grad(), saved_tensors_hooks(catch, lambda t: t):
                function(*inputs())
            if len(again) < len(saved):
                raise RuntimeError(f"the first run saved {len(saved)} tensors, the second only {len(again)}")
        return again.pop(index)

    with saved_tensors_hooks(drop, restore):
        return function(*args)
    ### END SOLUTION


class PipelineStage(nn.Module):
    """One chunk of layers on one rank: forward and backward of one micro-batch at a time, in any order. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    The arguments are its attributes, under their names.

    Args:
        module: The layers. They take one tensor and return one.
        stage: Index of this virtual stage: ``c * R + s`` for chunk c of rank s of R.
        n_stages: Number of virtual stages: R times the chunks of a rank.
        group: The process group of the R ranks; None means all ranks.

    Raises:
        ValueError: ``stage`` is not in ``range(n_stages)``; the message names both.
            Also a backward without a forward, or ``backward_weights`` without a backward; the message names i.
    """

    def __init__(self, module: nn.Module, stage: int, n_stages: int, group: dist.ProcessGroup | None = None):
        super().__init__()
        ### BEGIN SOLUTION
        if not 0 <= stage < n_stages:
            raise ValueError(f"stage = {stage}, expected 0 to {n_stages - 1} for n_stages = {n_stages}")
        self.module, self.stage, self.n_stages, self.group = module, stage, n_stages, group
        self._kept: dict[int, tuple[Tensor, GradientEdge | None]] = {}
        self._pending: dict[int, list[DeferredLinear]] = {}
        ### END SOLUTION

    def forward_micro(self, i: int, x: Tensor) -> Tensor:
        """The output for micro-batch i, whose graph ends at ``x``.

        Keeps ``x`` and what autograd saved, but not the output.
        """
        ### BEGIN SOLUTION
        x = x.detach().requires_grad_(x.is_floating_point())
        y = self.module(x)
        self._kept[i] = x, get_gradient_edge(y) if y.requires_grad else None
        return y
        ### END SOLUTION

    def backward_micro(self, i: int, grad: Tensor | None = None) -> Tensor | None:
        """Run the backward of micro-batch i, release all that its forward kept, and return the gradient of ``x``; None
        if ``x`` holds integers.

        If the output does not depend on ``x``, the gradient of ``x`` is zero. An output that requires no
        gradient is allowed, too: then there is nothing for autograd to do.
        ``grad`` is the gradient of the output; None if the output is one number, the loss itself.
        The parameters' gradients are added to ``.grad``, but ``DeferredLinear`` layers wait for
        ``backward_weights(i)``.
        """
        ### BEGIN SOLUTION
        if i not in self._kept:
            raise ValueError(f"micro-batch {i} has had no forward, or its backward already")
        x, edge = self._kept.pop(i)
        layers = {layer: len(layer.pending) for layer in self.modules() if isinstance(layer, DeferredLinear)}
        if edge is not None:
            torch.autograd.backward(edge, grad)
        self._pending[i] = [layer for layer, n in layers.items() for _ in range(len(layer.pending) - n)]
        return torch.zeros_like(x) if x.requires_grad and x.grad is None else x.grad
        ### END SOLUTION

    def backward_weights(self, i: int) -> None:
        """Add the gradients that ``backward_micro(i)`` left to the ``DeferredLinear`` layers, if there are any.

        Call it in the order of the backwards.
        """
        ### BEGIN SOLUTION
        if i not in self._pending:
            raise ValueError(f"micro-batch {i} has had no backward, or its weights already")
        for layer in self._pending.pop(i):
            layer.backward_weights()
        ### END SOLUTION


def timetable(works: Sequence[Work], n_stages: int) -> list[Work | Message]:
    """Everything that happens in a step, actions and messages, in one order that all ranks can follow. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    A ``Work(stage, micro_batch, kind, start, end, chunk)`` is an action with its times.
    A ``Message(name, sender, receiver)`` is a tensor that goes from one stage to another.

    Args:
        works: What ``simulate`` returns for the schedules of all stages; the list is not changed.
        n_stages: Number R of stages.
            Chunk c of stage s is virtual stage ``c * R + s``; each stage has as many chunks as occur in ``works``.

    Returns:
        All ``works`` as they are, and one ``Message`` for each tensor that another virtual stage needs.
        Without works the list is empty.
        An "F" makes one for the next virtual stage, a "B" one for the previous one, and a "W" none.
        The last virtual stage's "F" and the first one's "B" make none, either.
        A message's name is ``(kind, g, micro_batch)``: the kind and micro-batch of the work that makes it, and the
        virtual stage g that needs it.
        Its sender is the stage of that work, and its receiver is stage ``g % R``, even if they are the same stage.
        The list is in ascending order of time: a work counts at its start, a message at the end of its work.
        At the same time messages come before works.
        Works of the same time keep their order in ``works``, and messages that of the works that make them.
    """
    ### BEGIN SOLUTION
    n_virtual = n_stages * (1 + max((work.chunk for work in works), default=0))
    timed: list[tuple[float, int, Work | Message]] = [(work.start, 1, work) for work in works]
    for work in works:
        if work.kind == "W":
            continue
        to = work.chunk * n_stages + work.stage + (1 if work.kind == "F" else -1)
        if 0 <= to < n_virtual:
            timed.append((work.end, 0, Message((work.kind, to, work.micro_batch), work.stage, to % n_stages)))
    return [item for *_, item in sorted(timed, key=lambda entry: entry[:2])]
    ### END SOLUTION


### BEGIN SOLUTION
class _Run:
    """What one rank computes during a run, and the tensors that it has for others."""

    def __init__(self, stages, schedule: Sequence[Action], inputs: Sequence[Tensor], loss: MeanLoss, mail: Mail):
        self.stages, self.inputs, self.loss, self.mail = stages, inputs, loss, mail
        self.weights_later = {(a.micro_batch, a.chunk) for a in schedule if a.kind == "W"}
        self.outgoing, self.loss_grads = dict[Hashable, Tensor](), dict[int, Tensor | None]()

    def work(self, work: Work) -> None:
        stage, i = self.stages[work.chunk], work.micro_batch
        g, is_last = stage.stage, stage.stage == stage.n_stages - 1
        if work.kind == "F":
            y = stage.forward_micro(i, self.mail.take(("F", g, i)) if g else self.inputs[i])
            if is_last:
                self.loss_grads[i] = self.loss.add(i, y)
            else:
                self.outgoing["F", g + 1, i] = y.detach()
        elif work.kind == "B":
            x_grad = stage.backward_micro(i, self.loss_grads.pop(i) if is_last else self.mail.take(("B", g, i)))
            if g:
                self.outgoing["B", g - 1, i] = torch.zeros_like(self.loss.total) if x_grad is None else x_grad
        if work.kind == "W" or (work.kind == "B" and (i, work.chunk) not in self.weights_later):
            stage.backward_weights(i)


### END SOLUTION
def run_schedule(
    stages: Sequence[PipelineStage], schedule: Sequence[Action], micro_inputs: Sequence[Tensor],
    micro_targets: Sequence[Tensor], loss_function: Callable, group: dist.ProcessGroup | None = None
) -> Float[Tensor, ""]:  # fmt: skip
    """Run this rank's schedule for one batch, and exchange activations and gradients with the other ranks. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        stages: This rank's chunks in order; chunk c of rank s of R is virtual stage ``c * R + s``.
        schedule: This rank's actions.
            Any list is valid that has one "F" and one "B" for each chunk and micro-batch, optionally a "W" somewhere
            after a "B", and an order in which the ranks can complete their lists.
            Where no "W" follows a "B", ``DeferredLinear`` layers compute their weights' gradients with the "B".
        micro_inputs, micro_targets: The micro-batches, the same on every rank, of any sizes; a stage's outputs for two
            micro-batches of one shape have one shape too.
        loss_function: ``loss_function(output, targets)`` returns the mean loss of a micro-batch; ``MeanLoss`` weights
            it by its targets.
        group: The process group of the R ranks; None means the ``group`` of the stages.

    Returns:
        On the last rank the mean loss over all targets, detached; on the others a zero.
        Gradients are added to ``.grad``: those of the whole model on the whole batch.

    Raises:
        ValueError: ``check_plans`` or ``simulate`` refuses the ranks' plans.
            It is raised on every rank, before any activation is computed or sent.
        RuntimeError: Another rank raised an exception; the message has its text. That rank raises the exception itself.

    Cost: one message with each activation and one with each gradient between neighbouring virtual stages, none between
    chunks of one rank.
    It never deadlocks, whatever the backend buffers.
    """
    ### BEGIN SOLUTION
    mail = Mail(group or next((getattr(stage, "group", None) for stage in stages), None))
    plans = mail.gather(Plan(list(schedule), [s.stage for s in stages], len(micro_inputs), len(micro_targets)))
    check_plans(plans)
    works = simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})
    items = timetable(works, mail.n_ranks)
    run = _Run(stages, schedule, micro_inputs, MeanLoss(loss_function, micro_targets), mail)
    with mail.delivering(items, micro_inputs[0].device, lambda m: (m.name[:2], micro_inputs[m.name[2]].shape)):
        for item in items:
            if isinstance(item, Work):
                if item.stage == mail.rank:
                    run.work(item)
            elif item.sender == mail.rank:
                mail.send(item, run.outgoing.pop(item.name))
            elif item.receiver == mail.rank:
                mail.expect(item)
    return run.loss.total
    ### END SOLUTION
