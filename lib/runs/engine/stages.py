"""Pipeline parallelism for the models of chapters 5 and 6: a stage keeps some blocks,
and runs its schedule by chapter 17 or by PyTorch.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B

from lib.given.parallel.mail import Mail, Message
from lib.given.parallel.sharding import blocks_of
from lib.pipeline import PipelineStage, one_f_one_b_schedule, partition_layers, run_schedule
from lib.runs.engine.mesh import Mesh


class Unembedding(nn.Module):
    """The head of the last stage: the embedding of the first, used the other way round."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def keep_stage(loss: Any, mesh: Mesh) -> list[str]:
    """Remove from a model everything that other stages compute, in place; the rest keeps its names.

    Returns:
        Names of the parameters that both the first and the last stage hold.
    """
    model, task = loss.model, loss.task
    rank, n_stages = mesh.rank["pipeline"], mesh.size["pipeline"]
    loss.is_first, loss.is_last = rank == 0, rank == n_stages - 1
    tied = [name for name in task.first_parts if name in task.last_parts]
    blocks = blocks_of(model)
    costs = [sum(p.numel() for p in block.parameters()) for block in blocks]
    costs[-1] += sum(p.numel() for name in task.last_parts for p in getattr(model, name).parameters())
    mine = partition_layers(costs, n_stages)[rank]
    holder = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for i in range(len(blocks)):
        if i not in mine:
            del holder._modules[str(i)]  # ``del holder[i]`` would renumber the others
    kept = (task.first_parts if loss.is_first else ()) + (task.last_parts if loss.is_last else ())
    for name in (*task.first_parts, *task.last_parts):
        if name not in kept:
            setattr(model, name, nn.Identity())
    if loss.is_last:
        for name in tied:
            setattr(model, name, Unembedding(getattr(model, name).weight))
    return [f"{name}.weight" for name in tied] if loss.is_first or loss.is_last else []


def units_of(loss: Any) -> list[nn.Module]:
    """The units that chapter 12's sharding gathers on a stage.

    These are the blocks, and what both end stages hold, as units of its own, so that both divide it in the same way.
    """
    tied = [getattr(loss.model, name) for name in loss.task.first_parts if name in loss.task.last_parts]
    ends = [part for part in tied if list(part.parameters())]  # none on a stage in the middle
    return ends + blocks_of(loss.model) if loss.is_first else blocks_of(loss.model) + ends


class Pipeline:
    """A stage with its schedule, 1F1B.

    Args:
        call: The module that computes the stage.
        loss: The stage's `Loss`.
        mesh: The ranks.
        n_micro: Micro-batches in a step.
        ours: Use chapter 17's ``run_schedule`` instead of PyTorch's schedule.
    """

    def __init__(self, call: nn.Module, loss: Any, mesh: Mesh, n_micro: int, ours: bool):
        self.call, self.loss, self.n_micro, self.ours = call, loss, n_micro, ours
        self.group = mesh.group("pipeline")
        rank, n_stages = mesh.rank["pipeline"], mesh.size["pipeline"]
        self.n_stages = n_stages
        if ours:
            self.stage: Any = PipelineStage(call, rank, n_stages, self.group)
            self.schedule: Any = one_f_one_b_schedule(rank, n_stages, n_micro)
        else:
            self.stage = TorchStage(call, rank, n_stages, loss.device, group=self.group)
            self.schedule = Schedule1F1B(self.stage, n_micro, loss_fn=loss.loss_of)

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a batch. Returns its mean loss on the last stage, and 0 on the others."""
        if self.ours:
            micro = inputs.chunk(self.n_micro), targets.chunk(self.n_micro)
            return run_schedule([self.stage], self.schedule, *micro, self.loss.loss_of, self.group)
        losses: list[Tensor] = []
        target = targets if self.loss.is_last else None
        self.schedule.step(*([inputs] if self.loss.is_first else []), target=target, losses=losses)
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.loss.device)

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Pass a micro-batch through all stages, forward only.

        Returns its scores on the last stage, and zeros on the others.
        """
        mail, rank = Mail(self.group), dist.get_rank(self.group)
        hops = [Message(("score", to), to - 1, to) for to in range(1, self.n_stages)]
        with mail.delivering(hops, self.loss.device):
            if not self.loss.is_first:
                mail.expect(hops[rank - 1])
                inputs = mail.take(hops[rank - 1].name)
            output = self.call(inputs)
            if not self.loss.is_last:
                mail.send(hops[rank], output)
        if self.loss.is_last:
            return self.loss.scores_of(output, targets)
        return torch.zeros(len(self.loss.task.scores), device=self.loss.device)

    @torch.no_grad()
    def add_ends(self, grad: Tensor) -> None:
        """Add the gradient that the other end of the pipeline computed for the same parameter."""
        other = self.n_stages - 1 if self.loss.is_first else 0
        theirs = torch.empty_like(grad)
        messages = [
            dist.P2POp(dist.isend, grad.contiguous(), group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        grad.add_(theirs)
