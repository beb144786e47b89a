"""What the stages of a pipeline do: actions, the work that they become, and what one can count in it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Action:
    """One entry of a stage's schedule.

    ``kind`` is "F" (forward), "B" (backward; only the gradient of the input if a "W" of the same micro-batch and chunk
    follows) or "W" (the gradients of the weights).
    ``chunk`` counts the stretches of layers that the stage holds.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __post_init__(self):
        if self.kind not in ("F", "B", "W"):
            raise ValueError(f'kind = {self.kind!r}, expected "F", "B" or "W"')

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Work:
    """An action of a stage with its time: ``kind``, ``micro_batch`` and ``chunk`` as in `Action`,
    ``start`` and ``end`` in seconds.
    """

    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class Plan:
    """What one rank wants to do in a step: its actions, its virtual stages, and the numbers of its inputs and targets.

    Chunk c of rank s of R is virtual stage ``c * R + s``.
    """

    actions: Sequence[Action]
    virtual_stages: Sequence[int]
    n_inputs: int
    n_targets: int


def check_plans(plans: Sequence[Plan]) -> None:
    """Whether the plans of all ranks fit together: numbers, virtual stages, and one F and one B of everything.

    It does not find actions that wait for each other for ever; a simulation does.

    Raises:
        ValueError: They do not fit; the message names the rank and the first action that is wrong.
    """
    n_ranks, n_micro, n_chunks = len(plans), plans[0].n_inputs, len(plans[0].virtual_stages)
    if not n_micro:
        raise ValueError("there are no micro-batches: 0 inputs, expected at least 1")
    wanted = [Action(kind, m, chunk) for chunk in range(n_chunks) for m in range(n_micro) for kind in "FB"]
    allowed = {*wanted, *(Action("W", action.micro_batch, action.chunk) for action in wanted)}
    for rank, plan in enumerate(plans):
        if not plan.n_inputs == plan.n_targets == n_micro:
            found = f"{plan.n_inputs} inputs and {plan.n_targets} targets"
            raise ValueError(f"rank {rank} has {found}, expected {n_micro} of both, as many as rank 0 has inputs")
        held, expected = list(plan.virtual_stages), [chunk * n_ranks + rank for chunk in range(n_chunks)]
        if held != expected:
            raise ValueError(f"rank {rank} of {n_ranks} holds the virtual stages {held}, expected {expected}")
        counts = Counter(plan.actions)
        for problem, wrong in {
            "lacks": [action for action in wanted if not counts[action]],
            "repeats": [action for action in counts if counts[action] > 1],
            f"({n_micro} micro-batches, {n_chunks} chunks) has no place for": [a for a in counts if a not in allowed],
        }.items():
            if wrong:
                raise ValueError(f"the schedule of rank {rank} {problem} {wrong[0]}")


class MeanLoss:
    """The mean loss over all targets of several micro-batches, computed one micro-batch at a time.

    A micro-batch counts by its targets, as in chapter 7.
    Integer targets of -100, which PyTorch's losses ignore, do not count.

    Args:
        loss_function: ``loss_function(output, targets)`` returns the mean loss of a micro-batch.
        micro_targets: The targets of each micro-batch.

    Attributes:
        total: The sum of the shares so far, detached; at the end the mean loss.
    """

    def __init__(self, loss_function: Callable[[Tensor, Tensor], Tensor], micro_targets: Sequence[Tensor]):
        self.loss_function, self.targets = loss_function, micro_targets
        counts = [
            torch.full((), t.numel(), device=t.device) if t.is_floating_point() else (t != -100).sum()
            for t in micro_targets
        ]
        self.shares = (
            torch.stack(counts).double() / torch.stack(counts).sum()
        )  # on the device, so that the host need not wait
        self.total = torch.zeros((), device=micro_targets[0].device)

    def add(self, i: int, output: Tensor) -> Tensor | None:
        """Add the share of micro-batch i, and return the gradient that its output gets from the mean loss."""
        output = output.detach().requires_grad_(output.requires_grad)
        loss = self.loss_function(output, self.targets[i])
        share = self.shares[i].to(loss)
        part = torch.where(share > 0, loss * share, 0)  # the mean over no targets is NaN, and counts nothing
        if part.requires_grad:
            part.backward()
        self.total = self.total.to(part) + part.detach()
        return output.grad


def idle_share(work: Sequence[Work]) -> float:
    """The share of all stages' time in which they wait, from the first start to the last end."""
    stages, end = 1 + max(w.stage for w in work), max(w.end for w in work)
    return 1 - sum(w.end - w.start for w in work) / (stages * end)


def kept_over_time(work: Sequence[Work], stage: int = 0) -> list[tuple[float, float]]:
    """When the activations that a stage keeps change, and how many micro-batches it keeps from then on.

    A micro-batch counts from its forward's end to the end of the last part of its backward;
    on a stage of several chunks, each chunk counts as its share.
    """
    mine = [w for w in work if w.stage == stage]
    last = "W" if any(w.kind == "W" for w in mine) else "B"
    n_chunks = 1 + max(w.chunk for w in mine)
    changes = sorted((w.end, 1 if w.kind == "F" else -1) for w in mine if w.kind in ("F", last))
    held, levels = 0, [(0.0, 0.0)]
    for time, change in changes:
        held += change
        levels.append((time, held / n_chunks))
    return levels


def most_kept(work: Sequence[Work], stage: int = 0) -> float:
    """The most micro-batches whose activations a stage keeps at one time."""
    return max(held for _, held in kept_over_time(work, stage))


def n_messages(work: Sequence[Work]) -> int:
    """How many activations and gradients cross from one virtual stage to the next in a step."""
    n_stages, n_chunks = 1 + max(w.stage for w in work), 1 + max(w.chunk for w in work)
    last = n_stages * n_chunks - 1
    places = [(w.kind, w.chunk * n_stages + w.stage) for w in work]
    return sum((kind == "F" and place < last) or (kind == "B" and place > 0) for kind, place in places)
