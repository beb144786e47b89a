"""Pipeline parallelism: a model cut between its layers, micro-batches in flight, and activations that are computed twice."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lib.given.parallel.mail import Mail, Message
from lib.given.parallel.pipeline import Action, Work


def partition_layers(costs: Sequence[float], n_stages: int) -> list[range]:
    """Cut a list of layers into stages so that the most expensive stage is as cheap as possible. (Exercise)

    Args:
        costs: Cost of each layer in any one unit (FLOPs, seconds, bytes), none negative.
        n_stages: Number of stages.

    Returns:
        The layers of each stage: consecutive, none empty, and together all of them. The largest sum of costs of a stage is as small as
        possible. Of several such cuts the one whose list of first layers is lexicographically smallest: the second stage begins as
        early as possible, then the third, and so on.

    Raises:
        ValueError: There are fewer layers than stages, or ``n_stages`` is less than 1; the message names both numbers.

    Cost: at most about ``n_stages * n_layers**2`` steps; trying all cuts would take far too many.
    """
    ### BEGIN SOLUTION
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot fill n_stages = {n_stages} stages with at least one layer each")
    cost = [[0, *accumulate(costs[i:])] for i in range(n)]  # cost[i][k]: layers i to i + k - 1
    least = [[*(row[-1] for row in cost), float("inf")]]  # least[k][i]: layers from i on, in k + 1 stages
    for _ in range(n_stages - 1):
        rest = least[-1]
        least.append(
            [min((max(cost[i][j - i], rest[j]) for j in range(i + 1, n)), default=float("inf")) for i in range(n + 1)]
        )
    starts = [0]
    for rest in reversed(least[:-1]):
        i = starts[-1]
        starts.append(next(j for j in range(i + 1, n) if max(cost[i][j - i], rest[j]) <= least[-1][0]))
    return [range(i, j) for i, j in zip(starts, [*starts[1:], n], strict=True)]
    ### END SOLUTION


def gpipe_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under GPipe: all forwards, then all backwards. (Exercise)

    Args:
        stage: Index of the stage, from 0.
        n_stages, n_micro: Numbers of stages and of micro-batches.

    Returns:
        ``2 * n_micro`` actions, micro-batches in ascending order in both halves.

    Source: GPipe (arXiv:1811.06965), section 2.3.
    Convention: the paper runs the backwards in descending order. Ascending, as in PyTorch, gradients are added up in the order of the
        micro-batches, and so equal those of one process to the last bit.
    """
    ### BEGIN SOLUTION
    return [Action(kind, m) for kind in "FB" for m in range(n_micro)]
    ### END SOLUTION


### BEGIN SOLUTION
def _alternate(forwards: list[Action], backwards: list[Action], n_ahead: int) -> list[Action]:
    """``n_ahead`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    actions = forwards[:n_ahead]
    for n, backward in enumerate(backwards):
        actions += [backward, *forwards[n_ahead + n : n_ahead + n + 1]]
    return actions


### END SOLUTION
def one_f_one_b_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under 1F1B: as soon as it can run a backward it does, and so frees memory early. (Exercise)

    Args:
        stage, n_stages, n_micro: As in ``gpipe_schedule``.

    Returns:
        ``2 * n_micro`` actions: first forwards, ``n_stages - stage`` of them (all, if there are fewer micro-batches); then a backward and a
        forward in turn; at the end the backwards that are left. Micro-batches ascend, and at most ``n_stages - stage`` of them wait
        for their backward.

    Source: PipeDream-Flush (arXiv:2006.09503), section 3.2; Megatron-LM (arXiv:2104.04473), section 2.2.
    """
    ### BEGIN SOLUTION
    forwards, backwards = ([Action(kind, m) for m in range(n_micro)] for kind in "FB")
    return _alternate(forwards, backwards, n_stages - stage)
    ### END SOLUTION


def interleaved_schedule(stage: int, n_stages: int, n_micro: int, n_chunks: int) -> list[Action]:
    """What a stage does under interleaved 1F1B, where it holds several chunks of layers. (Exercise)

    Chunk c of stage s is layer group ``c * n_stages + s``, so a micro-batch passes each stage ``n_chunks`` times.

    Args:
        stage, n_stages, n_micro: As in ``gpipe_schedule``.
        n_chunks: Number v of chunks on each stage.

    Returns:
        ``2 * n_micro * n_chunks`` actions. Forwards come in rounds of ``n_stages`` micro-batches: a round goes through chunk 0, then
        through chunk 1, up to the last, and then the next round begins. Backwards come in the same rounds, each from the last chunk to
        the first. The stage begins with ``2 (n_stages - stage - 1) + (n_chunks - 1) n_stages + 1`` forwards (all, if there are fewer), and then
        runs a backward and a forward in turn. With one chunk it is 1F1B.

    Raises:
        ValueError: ``n_micro`` is no multiple of ``n_stages``; the message names both.

    Source: Megatron-LM (arXiv:2104.04473), section 2.2, figure 4.
    """
    ### BEGIN SOLUTION
    if n_micro % n_stages:
        raise ValueError(f"n_micro = {n_micro} must be a multiple of n_stages = {n_stages}")
    rounds = [range(first, first + n_stages) for first in range(0, n_micro, n_stages)]
    chunks = range(n_chunks)
    forwards = [Action("F", m, chunk) for round_ in rounds for chunk in chunks for m in round_]
    backwards = [Action("B", m, chunk) for round_ in rounds for chunk in reversed(chunks) for m in round_]
    n_ahead = min(n_chunks, 2) * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1
    return _alternate(forwards, backwards, n_ahead)
    ### END SOLUTION


def zero_bubble_schedule(stage: int, n_stages: int, n_micro: int) -> list[Action]:
    """What a stage does under ZB-H1: the gradients of the weights, for which no other stage waits, fill the bubble. (Exercise)

    Args:
        stage, n_stages, n_micro: As in ``gpipe_schedule``.

    Returns:
        ``3 * n_micro`` actions: those of ``one_f_one_b_schedule`` in their order, and a "W" for each micro-batch. The "W" of micro-batch
        ``m - stage`` comes right after the "B" of micro-batch m; the last ``stage`` of them come at the end. So at most
        ``n_stages - stage`` forwards wait for their "B", and at most ``n_stages`` micro-batches wait for their "W": no stage holds more
        than the first stage of 1F1B.

    Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, ZB-H1.
    """
    ### BEGIN SOLUTION
    actions = []
    for action in one_f_one_b_schedule(stage, n_stages, n_micro):
        actions.append(action)
        if action.kind == "B" and action.micro_batch >= stage:
            actions.append(Action("W", action.micro_batch - stage))
    return actions + [Action("W", m) for m in range(max(0, n_micro - stage), n_micro)]
    ### END SOLUTION


### BEGIN SOLUTION
_Event = tuple[str, int, int]
"""Kind, layer group and micro-batch of an action."""


def _needs(event: _Event, n_groups: int) -> list[_Event]:
    """What must have ended before an action can start."""
    kind, group, m = event
    if kind == "F":
        return [("F", group - 1, m)] if group else []
    if kind == "W":
        return [("B", group, m)]
    return [("F", group, m)] + ([("B", group + 1, m)] if group + 1 < n_groups else [])


def _stuck(todo: list[deque[Action]], free: list[float], ends: Mapping[_Event, float], n_groups: int) -> ValueError:
    """The error that explains why no stage can go on, beginning with the one that has waited longest."""
    n_stages, said = len(todo), []
    for stage in sorted((s for s in range(n_stages) if todo[s]), key=lambda s: (free[s], s)):
        action = todo[stage][0]
        needs = _needs((action.kind, action.chunk * n_stages + stage, action.micro_batch), n_groups)
        kind, group, m = next(need for need in needs if need not in ends)
        chunk, there = divmod(group, n_stages)
        said.append(f"stage {stage} is stuck at {action}, which waits for {Action(kind, m, chunk)} on stage {there}")
    return ValueError("the schedule can never go on: " + "; ".join(said))


### END SOLUTION
def simulate(
    schedules: Sequence[Sequence[Action]], durations: Mapping[str, float] | Sequence[Mapping[str, float]]
) -> list[Work]:
    """When each stage runs each of its actions, if messages take no time. (Exercise)

    A stage runs its list in order, each action as soon as the stage is free and what the action needs has ended. With R stages, chunk c
    of stage s is layer group ``g = c * R + s``. For each micro-batch, "F" of group g needs "F" of group g - 1; "B" needs "F" of the same group
    and "B" of group g + 1; "W" needs "B" of the same group. The first group needs no other forward, and the last no other backward.

    Args:
        schedules: The actions of each stage.
        durations: Seconds of each kind of action, above 0: one mapping for all stages, or a sequence with one for each stage.

    Returns:
        A ``Work`` for each action, in ascending order of start, then of stage.

    Raises:
        ValueError: The stages can never complete their lists; the message names the first action that is stuck (of several, the one
            whose stage has waited longest) and the action that it waits for. Or an action occurs twice; the message names it.
    """
    ### BEGIN SOLUTION
    n_stages = len(schedules)
    seconds = [durations] * n_stages if isinstance(durations, Mapping) else durations
    n_groups = n_stages * (1 + max((action.chunk for actions in schedules for action in actions), default=0))
    todo, free = [deque(actions) for actions in schedules], [0.0] * n_stages
    ends: dict[_Event, float] = {}
    works: list[Work] = []
    while any(todo):
        n_before = len(works)
        for stage, queue in enumerate(todo):
            while queue:
                action = queue[0]
                event = action.kind, action.chunk * n_stages + stage, action.micro_batch
                needs = _needs(event, n_groups)
                if event in ends:
                    raise ValueError(f"stage {stage} has {action} twice")
                if not all(need in ends for need in needs):
                    break
                start = max([free[stage], *(ends[need] for need in needs)])
                free[stage] = ends[event] = start + seconds[stage][action.kind]
                works.append(Work(stage, action.micro_batch, action.kind, start, free[stage], action.chunk))
                queue.popleft()
        if len(works) == n_before:
            raise _stuck(todo, free, ends, n_groups)
    return sorted(works, key=lambda work: (work.start, work.stage))
    ### END SOLUTION


### BEGIN SOLUTION
class _KeepTensors(torch.autograd.Function):
    """Saves tensors in the autograd graph, so that an outer ``checkpoint`` can drop them as it drops all that is saved."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Enough(BaseException):
    """Everything that backward needs has been computed again."""


def _conditions(tensors: Sequence[Tensor]) -> Callable[[], AbstractContextManager]:
    """A function that opens a context with the random states and the autocast of this moment."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    cpu_state, cached = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    kinds = {"cpu", *(device.type for device in devices)}
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device.index for device in devices]))
            torch.set_rng_state(cpu_state)
            for device, state in states.items():
                torch.cuda.set_rng_state(state, device)
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield

    return restored


### END SOLUTION
def checkpoint(function: Callable, *args) -> Any:
    """Call a function, keep only its inputs, and compute the rest again when backward needs it. (Exercise)

    Args:
        function: Called as ``function(*args)``; may use parameters, draw random numbers, call ``checkpoint`` itself.
        *args: Anything. Tensors among them may or may not require gradients.

    Returns:
        What ``function`` returns: a tensor, a tuple, anything. Values and gradients are those of a plain call. The graph saves the
        tensors among ``args`` and nothing else. In an enclosing ``checkpoint`` it does not keep even those, because they are saved by
        autograd, and the enclosing call computes them again.

    The first saved tensor that backward asks for makes the function run again, with gradients enabled and with the random states
    (of the CPU and of the arguments' GPUs) and the autocast settings of the first run; random states are put back afterwards. The second run
    ends as soon as all tensors that the first one saved are there again. Without gradients it is a plain call.

    Raises:
        RuntimeError: In backward, if the second run saves fewer tensors than the first; the message names both numbers.

    Source: Chen and others (arXiv:1604.06174), section 4; ``torch.utils.checkpoint`` with ``use_reentrant=False``.
    """
    ### BEGIN SOLUTION
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    keeper = _KeepTensors.apply(torch.empty(0, requires_grad=True), *tensors)
    if keeper.grad_fn is None:  # no gradients are wanted
        return function(*args)
    blanks = [keeper if isinstance(arg, Tensor) else arg for arg in args]
    conditions = _conditions(tensors)
    indices, again = list[int](), dict[int, Tensor]()

    def run_again() -> None:
        n_saved = len(indices)
        again.clear()

        def catch(tensor: Tensor) -> Tensor:
            again[len(again)] = tensor.detach()
            if len(again) == n_saved:
                raise _Enough
            return tensor.detach()

        saved = iter(keeper.grad_fn.saved_tensors)
        inputs = [next(saved) if blank is keeper else blank for blank in blanks]
        with suppress(_Enough), conditions(), torch.enable_grad(), saved_tensors_hooks(catch, lambda tensor: tensor):
            function(*inputs)
        if len(again) < n_saved:
            raise RuntimeError(
                f"the function saved {n_saved} tensors when it ran first, and {len(again)} when it ran again"
            )

    def drop(tensor: Tensor) -> int:
        indices.append(len(indices))
        return indices[-1]

    def restore(index: int) -> Tensor:
        if index not in again:
            run_again()
        return again.pop(index)

    with saved_tensors_hooks(drop, restore):
        return function(*args)
    ### END SOLUTION


### BEGIN SOLUTION
class _DeferredProduct(torch.autograd.Function):
    """A linear layer whose backward hands (x, gradient of the output) to the layer instead of computing the weights' gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, layer: "DeferredLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        ctx.layer.pending.append((x, grad))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


def _add_gradient(parameter: Tensor | None, grad: Callable[[], Tensor]) -> None:
    if parameter is not None and parameter.requires_grad:
        new = grad().to(parameter.dtype)
        parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)


### END SOLUTION
class DeferredLinear(nn.Module):
    """A linear layer with a backward in two parts. (Exercise)

    Args:
        linear: The ``nn.Linear`` to replace. Its parameters are used, not copied.

    Attributes:
        weight, bias: The same ``nn.Parameter`` objects as in ``linear``; ``bias`` may be None.
        pending: A deque with an entry for each backward whose weights' gradients are still to be computed.

    Autograd's backward computes the gradient of the input, and leaves ``weight.grad`` and ``bias.grad`` alone, even if the input needs no
    gradient. It also works under autocast.
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
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        anchor = torch.empty(
            0, requires_grad=self.weight.requires_grad or (bias is not None and self.bias.requires_grad)
        )
        return _DeferredProduct.apply(x, weight, bias, anchor, self)
        ### END SOLUTION

    def backward_weights(self) -> None:
        """Add the gradients of weight and bias for the oldest backward that is pending, and release what it kept.

        They are what ``nn.Linear`` would have added to ``.grad``. A frozen parameter gets none.

        Raises:
            RuntimeError: No backward is pending.
        """
        ### BEGIN SOLUTION
        if not self.pending:
            raise RuntimeError("no backward is pending: run backward first")
        x, grad = (tensor.reshape(-1, tensor.shape[-1]) for tensor in self.pending.popleft())
        _add_gradient(self.weight, lambda: grad.T @ x)
        _add_gradient(self.bias, lambda: grad.sum(0))
        ### END SOLUTION


class PipelineStage(nn.Module):
    """A group of layers on one rank: forward and backward of one micro-batch at a time. (Exercise)

    Args:
        module: The layers. They take one tensor and return one.
        stage: Index of the layer group, ``c * R + s`` for chunk c of stage s.
        n_stages: Number of layer groups: R times the chunks of a stage.
        group: The R ranks; None means all ranks.

    Attributes:
        module, stage, n_stages, group: The arguments.

    Several micro-batches may be between their forward and their backward, and backwards may come in any order.

    Raises:
        ValueError: ``stage`` is not in ``range(n_stages)``; the message names both. And whenever a method is called too early or
            twice: a forward whose backward is still to come, a backward without a forward, ``backward_weights`` without a backward; the message names i.
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
        """The output for micro-batch i, whose graph ends at ``x``: no gradient goes beyond this stage by itself.

        Keeps what backward needs: ``x`` and what autograd saved, but not the output.
        """
        ### BEGIN SOLUTION
        if i in self._kept:
            raise ValueError(f"micro-batch {i} has had its forward, and not its backward")
        x = x.detach().requires_grad_(x.is_floating_point())
        y = self.module(x)
        self._kept[i] = x, get_gradient_edge(y) if y.requires_grad else None
        return y
        ### END SOLUTION

    def backward_micro(self, i: int, grad: Tensor | None = None) -> Tensor | None:
        """Run the backward of micro-batch i, and release all that its forward kept.

        Args:
            i: The micro-batch.
            grad: Gradient of the output; None if the output is one number, the loss itself.

        Returns:
            The gradient of ``x``, or None if ``x`` holds integers. The parameters' gradients are added to ``.grad``, except those of
            ``DeferredLinear`` layers, which wait for ``backward_weights(i)``.
        """
        ### BEGIN SOLUTION
        if i not in self._kept:
            raise ValueError(f"micro-batch {i} has had no forward, or its backward already")
        x, edge = self._kept.pop(i)
        layers = [layer for layer in self.modules() if isinstance(layer, DeferredLinear)]
        n_before = [len(layer.pending) for layer in layers]
        if edge is not None:
            torch.autograd.backward(edge, grad)
        new = [[layer] * (len(layer.pending) - n) for layer, n in zip(layers, n_before, strict=True)]
        self._pending[i] = [layer for part in new for layer in part]
        return torch.zeros_like(x) if x.requires_grad and x.grad is None else x.grad
        ### END SOLUTION

    def backward_weights(self, i: int) -> None:
        """Add the gradients that ``backward_micro(i)`` left to the ``DeferredLinear`` layers; without such layers, do nothing.

        Call it in the order of the backwards.
        """
        ### BEGIN SOLUTION
        if i not in self._pending:
            raise ValueError(f"micro-batch {i} has had no backward, or its weights already")
        for layer in self._pending.pop(i):
            layer.backward_weights()
        ### END SOLUTION


### BEGIN SOLUTION
def _checked(plans: Sequence[tuple[Sequence[Action], list[int], int, int]]) -> list[Work]:
    """The works of all stages, if all ranks' parts fit together.

    Raises:
        ValueError: They do not. All ranks see the same plans, so it is raised on all.
    """
    n_ranks, (_, groups, n_micro, _) = len(plans), plans[0]
    if not n_micro:
        raise ValueError("there are no micro-batches: 0 inputs, expected at least 1")
    for rank, (actions, indices, n_inputs, n_targets) in enumerate(plans):
        if not n_inputs == n_targets == n_micro:
            raise ValueError(
                f"rank {rank} has {n_inputs} inputs and {n_targets} targets, expected {n_micro} of both as on rank 0"
            )
        expected = [chunk * n_ranks + rank for chunk in range(len(groups))]
        if indices != expected:
            raise ValueError(f"rank {rank} of {n_ranks} holds the layer groups {indices}, expected {expected}")
        counts = Counter(actions)
        wanted = [Action(kind, m, chunk) for chunk in range(len(groups)) for m in range(n_micro) for kind in "FB"]
        allowed = [*wanted, *(Action("W", action.micro_batch, action.chunk) for action in wanted)]
        for problem, found in (
            ("lacks", [action for action in wanted if not counts[action]]),
            ("repeats", [action for action in counts if counts[action] > 1]),
            (
                f"({n_micro} micro-batches, {len(groups)} chunks) has no place for",
                [a for a in counts if a not in allowed],
            ),
        ):
            if found:
                raise ValueError(f"the schedule of rank {rank} {problem} {found[0]}")
    schedules = [actions for actions, *_ in plans]
    has_weights = any(action.kind == "W" for actions in schedules for action in actions)
    return simulate(schedules, {"F": 1, "B": 1 if has_weights else 2, "W": 1})


def _timetable(works: Sequence[Work], n_stages: int) -> list[Work | Message]:
    """All works and messages in one order, in which each message follows the work that makes it.

    If every rank does its part of this list from top to bottom, some rank can always go on, even if sends block: the two ranks of the
    first message that is not delivered have nothing left to do before it.
    """
    n_groups = n_stages * (1 + max(work.chunk for work in works))
    timed: list[tuple[float, int, Work | Message]] = []
    for work in works:
        group = work.chunk * n_stages + work.stage
        to = group + {"F": 1, "B": -1, "W": n_groups}[work.kind]
        timed.append((work.start, 1, work))
        if 0 <= to < n_groups:
            timed.append((work.end, 0, Message((work.kind, to, work.micro_batch), work.stage, to % n_stages)))
    return [item for *_, item in sorted(timed, key=lambda entry: entry[:2])]


def _shares(micro_targets: Sequence[Tensor]) -> Tensor:
    """Each micro-batch's share of all targets, on their device; the count does not make the host wait."""
    counts = [t.numel() if t.is_floating_point() else (t != -100).sum() for t in micro_targets]
    n_targets = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=micro_targets[0].device) for n in counts])
    return n_targets / n_targets.sum()


class _Run:
    """What one rank computes during a run: ``work`` does a work, and puts the tensor to send into ``outgoing``."""

    def __init__(self, stages, schedule, micro_inputs, micro_targets, loss_function, mail: Mail):
        self.stages, self.inputs, self.targets, self.loss_function = stages, micro_inputs, micro_targets, loss_function
        self.mail, self.outgoing = mail, dict[Hashable, Tensor]()
        self.weights_later = {(a.micro_batch, a.chunk) for a in schedule if a.kind == "W"}
        self.loss, self.loss_grads = torch.zeros((), device=micro_inputs[0].device), dict[int, Tensor | None]()
        self.shares = _shares(micro_targets)

    def work(self, work: Work) -> None:
        stage, i = self.stages[work.chunk], work.micro_batch
        if work.kind == "F":
            self.forward(stage, i)
        elif work.kind == "B":
            self.backward(stage, i)
        if work.kind == "W" or (work.kind == "B" and (i, work.chunk) not in self.weights_later):
            stage.backward_weights(i)

    def forward(self, stage: PipelineStage, i: int) -> None:
        g = stage.stage
        y = stage.forward_micro(i, self.mail.take(("F", g, i)) if g else self.inputs[i])
        if g + 1 < stage.n_stages:
            self.outgoing["F", g + 1, i] = y.detach()
        else:
            self.loss_grads[i] = self.add_loss(y.detach().requires_grad_(y.requires_grad), i)

    def add_loss(self, y: Tensor, i: int) -> Tensor | None:
        """Add a micro-batch's share to the mean loss, and return the gradient of the output."""
        loss = self.loss_function(y, self.targets[i])
        share = self.shares[i].to(loss)
        part = torch.where(share > 0, loss * share, 0)
        if part.requires_grad:
            part.backward()
        self.loss = self.loss.to(part) + part.detach()
        return y.grad

    def backward(self, stage: PipelineStage, i: int) -> None:
        g = stage.stage
        grad = self.mail.take(("B", g, i)) if g + 1 < stage.n_stages else self.loss_grads.pop(i)
        x_grad = stage.backward_micro(i, grad)
        if g:
            self.outgoing["B", g - 1, i] = self.loss.new_zeros(()) if x_grad is None else x_grad


### END SOLUTION
def run_schedule(
    stages: Sequence[PipelineStage],
    schedule: Sequence[Action],
    micro_inputs: Sequence[Tensor],
    micro_targets: Sequence[Tensor],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, ""]:
    """Train on one batch: run this rank's schedule, and exchange activations and gradients with the other ranks. (Exercise)

    Args:
        stages: This rank's chunks in order; chunk c of rank s of R is layer group ``c * R + s``.
        schedule: This rank's actions, for example from ``one_f_one_b_schedule``. Any list goes that has one "F" and one "B" for each chunk and micro-batch, a
            "W" after the "B" where it likes, and an order in which the ranks can complete their lists.
        micro_inputs, micro_targets: The m micro-batches, the same on every rank, of any sizes.
        loss_function: ``loss_function(output, targets)`` gives the mean loss of a micro-batch.
        group: The R ranks; None means all ranks.

    Returns:
        On the last rank the mean loss over all targets, detached; on the others a zero, so that the sum over the ranks is the loss.
        As in chapter 7, a micro-batch counts by its targets; integer targets of -100, which PyTorch's losses ignore, do not count. Gradients are added to
        ``.grad``, and are those of the whole model on the whole batch. Where no "W" follows a "B", the weights of ``DeferredLinear`` layers are done with the "B".

    Raises:
        ValueError: The ranks' arguments do not fit together: an action is missing, unknown or there twice, a list can never be completed
            (as ``simulate`` says), stages or numbers of micro-batches differ. It is raised on every rank, before any activation is sent.
        RuntimeError: Another rank raised an exception; the message has its text. The rank itself raises the exception.

    Cost: for each micro-batch one message with the activation and one with its gradient between neighbouring layer groups; a message between
        chunks of the same rank is none. It never deadlocks, however much or little the backend buffers.
    """
    ### BEGIN SOLUTION
    mail = Mail(group)
    plans = mail.gather((list(schedule), [stage.stage for stage in stages], len(micro_inputs), len(micro_targets)))
    timetable = _timetable(_checked(plans), mail.n_ranks)
    device = micro_inputs[0].device
    run = _Run(stages, schedule, micro_inputs, micro_targets, loss_function, mail)
    with mail.delivering([item for item in timetable if isinstance(item, Message)], device):
        for item in timetable:
            if isinstance(item, Work):
                if item.stage == mail.rank:
                    run.work(item)
            elif item.sender == mail.rank:
                mail.send(item, run.outgoing.pop(item.name))
            elif item.receiver == mail.rank:
                mail.expect(item)
    return run.loss
    ### END SOLUTION
