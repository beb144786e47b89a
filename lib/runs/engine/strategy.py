"""What a strategy is: a model on its ranks, divided by tensors, stages, sequences and experts, and its step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lib.runs.engine.context import divide_sequences
from lib.runs.engine.experts import Balance, narrow_mixtures, spread_experts
from lib.runs.engine.mesh import Mesh
from lib.runs.engine.options import Options
from lib.runs.engine.stages import Pipeline, keep_stage
from lib.runs.engine.tasks import Loss
from lib.runs.engine.tensor import Cuts, cut, divide_layers, gather, uncut
from lib.training import clip_gradient_norm_, parameter_groups


class Strategy:
    """A model whose parameters are whole on each rank, or plain parts; also the base class of the others.

    Args:
        options: With a number for every degree.
        loss: The model, whole and the same on all ranks; changed in place.
        mesh: The ranks.

    Attributes:
        model: The model without wrappers.
        call: ``call(inputs, targets)`` returns the mean loss.
        decays: Names of the parameters with weight decay, before anything was divided.
        matrices: Names of the parameters that Muon trains; empty without ``--optimizer muon``.
        cuts: How parameters are divided along the tensor axis, and experts along theirs.
        balance: Keeps the experts of mixtures equally busy; None for a dense model.
        tied: Names of the parameters on this stage that both the first stage and the last one have.
        opening: What the program says before the first step; empty if there is nothing to say.
        in_turn: Whether parameters are updated as their gradients arrive. The optimizer then needs nothing else.
    """

    opening = ""
    in_turn = False

    def __init__(self, options: Options, loss: Loss, mesh: Mesh):
        self.options, self.model, self.loss, self.mesh = options, loss.model, loss, mesh
        decaying = {id(p) for p in parameter_groups(loss.model, options.weight_decay)[0]["params"]}
        self.decays = {name for name, p in loss.model.named_parameters() if id(p) in decaying}
        self.matrices: set[str] = set()
        if options.optimizer == "muon":
            from lib.optimizers import split_parameters

            chosen = {id(p) for p in split_parameters(loss.model)[0]}
            self.matrices = {name for name, p in loss.model.named_parameters() if id(p) in chosen}
        self.cuts: Cuts = {}
        self.tied: list[str] = []
        self.pipeline: Pipeline | None = None
        if mesh.size["pipeline"] > 1:
            self.tied = keep_stage(loss, mesh)
        if options.uses("tensor"):
            with loss.device:
                self.cuts = divide_layers(loss.model, mesh, options.ours)
        if mesh.size["context"] > 1:
            divide_sequences(loss.model, mesh)
        if mesh.size["expert"] > 1:
            self.cuts |= spread_experts(loss.model, mesh)
        self.balance = self._balanced() if options.n_experts else None
        self.call: Any = self.wrap(loss)
        if mesh.size["pipeline"] > 1:
            self.pipeline = Pipeline(self.call, loss, mesh, options.accumulate, options.ours)

    def _balanced(self) -> Balance:
        """What balances the experts, which then take a mixed path's numbers."""
        loss = self.loss
        balance = Balance(loss.model, self.options, loss.task.config.n_layers, loss.device)
        if loss.mixes:
            narrow_mixtures(loss.model, loss.task.dtype)
        return balance

    def wrap(self, loss: Loss) -> nn.Module:
        """Wrap the loss, and divide those of its parameters that are not divided yet."""
        return loss

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank trains, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer.

        Parameters on different meshes are in separate groups, because fused optimizers cannot mix them.
        """
        groups: dict[tuple[bool, bool, int], list[nn.Parameter]] = {}
        for name, p in self.named().items():
            n_axes = p.device_mesh.ndim if isinstance(p, DTensor) else 0
            groups.setdefault((name in self.matrices, name in self.decays, n_axes), []).append(p)
        decay = {True: self.options.weight_decay, False: 0.0}
        return [{"params": groups[key], "weight_decay": decay[key[1]]} for key in sorted(groups, reverse=True)]

    def backward(self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient of the whole batch, micro-batch by micro-batch. Returns this rank's mean loss, detached."""
        if self.pipeline is not None:
            return self.backward_of_stage(self.pipeline, inputs, targets)
        n, total = self.options.accumulate, torch.zeros((), device=self.loss.device)
        for i, (x, y) in enumerate(zip(inputs.chunk(n), targets.chunk(n), strict=True)):
            with self.micro_step(i == n - 1):
                loss = self.call(x, y) / n
                scale(loss).backward()
            total += loss.detach().float()
        self.finish()
        return total

    def backward_of_stage(self, pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> Tensor:
        """``backward`` for a rank that has only a stage; the loss is 0 on all but the last."""
        # Our engine synchronizes the gradients at the end; PyTorch's schedule knows which backward is the last.
        waits = self.options.ours
        with self.micro_step(not waits):
            loss = pipeline.run(inputs, targets)
        self.finish()
        for name, p in self.named().items():
            if p.grad is not None and set(self.members(name)) & set(self.tied):
                pipeline.add_ends(local(p.grad))
        return loss.float()

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This rank's scores of a micro-batch; the model is in evaluation mode. All ranks call it together."""
        return self.pipeline.score(inputs, targets) if self.pipeline is not None else self.call(inputs, targets)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context for forward and backward of a micro-batch: gradients are synchronized in the last one only."""
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients, after the last backward."""

    def share_overflow(self) -> None:
        """If one rank's gradients have inf or NaN, make all ranks see it, so that all skip the step."""
        if self.options.uses("shard", "tensor", "expert"):
            share_overflow(list(self.named().values()), self.loss.device)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the whole gradient to a norm of at most ``max_norm``; return its norm before that."""
        parameters = list(self.named().values())
        if self.options.uses("tensor", "pipeline", "expert"):
            return self.clip_parts(max_norm)
        if self.options.ours:
            return clip_gradient_norm_(parameters, max_norm)
        # by default PyTorch loops over DTensors one by one
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def clip_parts(self, max_norm: float) -> Tensor:
        """``clip`` where some values are on more ranks than others: a value that n ranks hold counts 1/n on each."""
        shared: dict[int, list[Tensor]] = {}
        grads = {name: local(p.grad) for name, p in self.named().items() if p.grad is not None}
        for name, grad in grads.items():
            for whole, part in self.parts(name).items():
                shared.setdefault(self.n_holders(whole), []).append(grad[part])
        square = torch.zeros((), device=self.loss.device)
        for n, pieces in shared.items():
            square += torch.stack(torch._foreach_norm(pieces)).square().sum() / n
        dist.all_reduce(square)
        norm = square.sqrt()
        torch._foreach_mul_(list(grads.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def n_holders(self, name: str) -> int:
        """The number of ranks that hold the same values of a parameter of the model."""
        size = self.mesh.size
        n = size["expert_copies"] if self.is_spread(name) else size["copies"]
        if not self.options.uses("shard"):
            n *= size["shard"]
        if name not in self.cuts or self.is_spread(name):  # whole on each of the ranks that divide a layer
            n *= size["tensor"]
        return 2 * n if name in self.tied else n

    def norm(self) -> Tensor:
        """The norm of the whole gradient; here each rank has all of it."""
        return nn.utils.get_total_norm([p.grad for p in self.named().values() if p.grad is not None])

    def update(self, optimizer: Optimizer) -> None:
        """The optimizer's step."""
        optimizer.step()

    def decay(self, lr: float) -> None:
        """Apply weight decay that the optimizer cannot apply, before its step."""

    # ---- between this rank's parts and the whole model, for checkpoints ----

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different parts, so that a checkpoint is a folder."""
        return self.options.shards or self.options.uses("tensor", "pipeline", "expert")

    def members(self, name: str) -> list[str]:
        """The parameters of the model whose parts ``named()[name]`` holds, on this rank or others."""
        return [name]

    def parts(self, name: str) -> dict[str, slice]:
        """The parameters of the model that ``named()[name]`` holds on this rank, and where."""
        return {name: slice(None)}

    def whole(self, name: str, mine: Tensor) -> dict[str, Tensor]:
        """The whole of a tensor with the shape of ``named()[name]``, by the model's names.

        The ranks of a stage must call it together.
        """
        found = self.unsharded(name, mine.detach())
        for whole in [name for name in found if name in self.cuts]:
            axis, dim, n_fused = self.cuts[whole]
            joined = found[whole] if isinstance(mine, DTensor) else gather(found[whole], dim, self.mesh.group(axis))
            found[whole] = uncut(joined, dim, n_fused, self.mesh.size[axis])
        return found

    def unsharded(self, name: str, mine: Tensor) -> dict[str, Tensor]:
        """``whole`` along all axes but those of ``cuts``; a DTensor knows the tensor axis too."""
        return {name: mine.full_tensor() if isinstance(mine, DTensor) else mine}

    def take(self, name: str, whole: dict[str, Tensor]) -> Tensor:
        """The inverse of ``whole``: this rank's part, as a plain tensor."""
        return next(iter(self._cut(whole).values()))

    def _cut(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._cut_one(t, *self.cuts[name]) if name in self.cuts else t for name, t in whole.items()}

    def _cut_one(self, whole: Tensor, axis: str, dim: int, n_fused: int) -> Tensor:
        return cut(whole, dim, n_fused, self.mesh.rank[axis], self.mesh.size[axis])

    def is_spread(self, name: str) -> bool:
        """Whether copies hold different experts in this parameter, so that fewer of them share its gradient."""
        return name in self.cuts and self.cuts[name][0] == "expert"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def share_overflow(parameters: list[nn.Parameter], device: torch.device) -> None:
    """All-reduce whether any gradient is not finite; if so, put an inf into each rank's first. No host waits."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    flags = [(~torch.isfinite(grad).all()).float() for grad in grads if grad.numel()]
    found = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for grad in [grad for grad in grads if grad.numel()][:1]:
        first = grad.view(-1)[:1]
        first.copy_(torch.where(found > 0, torch.full_like(first, torch.inf), first))
