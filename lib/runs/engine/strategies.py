"""How a mesh of ranks divides a model, one kind of parallelism after the other, and what that changes in a step.

Each kind is done by our engine or by PyTorch's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lib.ddp import BucketedDDP, average_gradients_flat
from lib.fsdp import FullySharded, apply_fully_shard, clip_sharded_gradient_norm_, shard
from lib.given.parallel.sharding import all_gather_row
from lib.runs.engine.context import divide_sequences
from lib.runs.engine.experts import Balance, narrow_mixtures, spread_experts
from lib.runs.engine.mesh import Mesh
from lib.runs.engine.options import Options
from lib.runs.engine.stages import Pipeline, keep_stage, units_of
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
    """

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
        self.balance: Balance | None = None
        if options.n_experts:
            self.balance = Balance(loss.model, options, loss.task.config.n_layers, loss.device)
            if loss.mixes:
                narrow_mixtures(loss.model, loss.task.dtype)
        self.call: Any = self.wrap(loss)
        if mesh.size["pipeline"] > 1:
            self.pipeline = Pipeline(self.call, loss, mesh, options.accumulate, options.ours)

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

    def micro_step(self, is_last: bool) -> AbstractContextManager:
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


class Copied(Strategy):
    """Our engine for copies of a model whose layers, stages or experts are divided.

    All gradients are averaged at once, after the last backward.
    """

    def finish(self):
        experts = nn.ParameterList(p for name, p in self.named().items() if self.is_spread(name))
        others = nn.ParameterList(p for name, p in self.named().items() if not self.is_spread(name))
        average_gradients_flat(others, self.mesh.group("copies"))
        if len(experts):
            # backward has summed over the ranks that share the experts, and each rank's loss is a mean
            torch._foreach_div_([p.grad for p in experts if p.grad is not None], self.mesh.size["expert"])
            average_gradients_flat(experts, self.mesh.group("expert_copies"))


class Replicated(Strategy):
    """All ranks are copies; gradients are averaged while backward goes on."""

    def wrap(self, loss):
        if self.options.ours:
            return BucketedDDP(loss, self.options.bucket_mb)
        devices = [loss.device] if loss.device.type == "cuda" else None
        settings: dict = {"bucket_cap_mb": self.options.bucket_mb, "gradient_as_bucket_view": True}
        return DistributedDataParallel(loss, device_ids=devices, **settings)

    def micro_step(self, is_last):
        return nullcontext() if is_last else self.call.no_sync()

    def finish(self):
        if self.options.ours:
            self.call.finish_gradient_synchronization()


class HybridSharded(FullySharded):
    """Chapter 12's ``FullySharded`` with copies: each gradient that has been scattered is then averaged over them,
    while backward goes on.

    Args:
        copies: The ranks that hold the same shard.
        others: Arguments of ``FullySharded``.

    Attributes:
        pieces: For a flat shard that holds experts, which have fewer copies: its parts,
            and the ranks over which each is averaged.
    """

    def __init__(self, *others: Any, copies: dist.ProcessGroup, **settings: Any):
        super().__init__(*others, **settings)
        self.copies, self.is_last = copies, True
        self.means: dict[Any, list[dist.Work]] = {}
        self.pieces: dict[Any, list[tuple[slice, dist.ProcessGroup]]] = {}

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch; averages start only in the last one."""
        if self.reducing is not None:  # left by the previous micro-batch: its mean must wait for this one's gradient
            self.reducing.finish_reduce()
            self.reducing = None
        self.is_last = is_last

    def after_gradient(self, flat: Any) -> None:
        scattered = self.reducing
        super().after_gradient(flat)
        if scattered is not None and self.is_last:
            self.start_mean(scattered)

    def start_mean(self, flat: Any) -> None:
        """Start to average a shard's gradient, unless that has been done in this step."""
        if flat not in self.means and flat.shard.grad is not None:
            grad = flat.shard.grad.div_(dist.get_world_size(self.copies))
            pieces = self.pieces.get(flat, [(slice(None), self.copies)])
            self.means[flat] = [dist.all_reduce(grad[part], group=group, async_op=True) for part, group in pieces]

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for flat in (flat for flats in self.flats for flat in flats):
            self.start_mean(flat)
        for work in (work for works in self.means.values() for work in works):
            work.wait()
        self.means.clear()


class Sharded(Strategy):
    """Chapter 12's ``FullySharded``: parameters are flat shards that mix weights and biases."""

    def wrap(self, loss):
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        settings: dict = {"param_dtype": low, **self.mesh.along("shard")}
        if self.mesh.size["pipeline"] > 1:
            settings["units"] = units_of(loss)
        elif loss.units is not None:
            settings["units"] = loss.units
        if self.mesh.size["copies"] > 1:
            wrapped: FullySharded = HybridSharded(loss, copies=self.mesh.group("copies"), **settings)
        else:
            wrapped = FullySharded(loss, **settings)
        flats = [(f"unit_{i}.flat_{j}", flat) for i, unit in enumerate(wrapped.flats) for j, flat in enumerate(unit)]
        self.flats: dict[str, Any] = dict(flats)
        if isinstance(wrapped, HybridSharded) and self.mesh.size["expert"] > 1:
            wrapped.pieces = {flat: self.pieces(name) for name, flat in flats}
        return wrapped

    def pieces(self, name: str) -> list[tuple[slice, dist.ProcessGroup]]:
        """The parts of a shard that hold experts, or none, and the ranks that hold the same ones."""
        found: list[tuple[str, slice]] = []
        for whole, part in self.parts(name).items():
            kind = "expert_copies" if self.is_spread(whole) else "copies"
            if found and found[-1][0] == kind:  # neighbours go together
                part = slice(found.pop()[1].start, part.stop)
            found.append((kind, part))
        return [(part, self.mesh.group(kind)) for kind, part in found]

    def parts(self, name):
        flat = self.flats[name]
        n, found = len(flat.shard), {}
        start = -self.mesh.rank["shard"] * n
        for whole, size in zip(flat.shapes, flat.sizes, strict=True):
            here = slice(max(start, 0), min(start + size, n))
            if here.start < here.stop:
                found[whole.removeprefix("model.")] = here
            start += size
        return found

    def members(self, name):
        return [whole.removeprefix("model.") for whole in self.flats[name].shapes]

    def named(self):
        return {name: flat.shard for name, flat in self.flats.items()}

    def groups(self):
        return [{"params": list(self.named().values()), "weight_decay": 0.0}]

    def micro_step(self, is_last):
        if isinstance(self.call, HybridSharded):
            self.call.begin(is_last)
        return nullcontext()

    def finish(self):
        self.call.finish_gradient_synchronization()

    def clip(self, max_norm):
        if self.options.uses("tensor", "pipeline", "expert"):
            return self.clip_parts(max_norm)
        return clip_sharded_gradient_norm_(self.named().values(), max_norm, **self.mesh.along("shard"))

    @torch.no_grad()
    def decay(self, lr):
        found = [
            (p, part)
            for name, p in self.named().items()
            for whole, part in self.parts(name).items()
            if whole in self.decays
        ]
        values = [p[part] for p, part in found]
        if not values or not self.options.weight_decay or self.options.optimizer == "muon":
            return
        if self.options.optimizer == "sgd":  # like PyTorch's SGD, add the decay to the gradient
            torch._foreach_add_([p.grad[part] for p, part in found], values, alpha=self.options.weight_decay)
        else:
            torch._foreach_mul_(values, 1 - lr * self.options.weight_decay)

    def unsharded(self, name, mine):
        flat = self.flats[name]
        row = mine.new_empty(self.mesh.size["shard"] * len(mine))
        all_gather_row(row, mine, self.mesh.group("shard"))
        parts = row[: sum(flat.sizes)].split(flat.sizes)
        shaped = zip(self.members(name), parts, flat.shapes.values(), strict=True)
        return {whole: part.view(shape) for whole, part, shape in shaped}

    def take(self, name, whole):
        local = self._cut(whole)
        row = torch.cat([local[n].reshape(-1) for n in self.members(name)])
        return shard(row, self.mesh.rank["shard"], self.mesh.size["shard"])


class TorchSharded(Strategy):
    """PyTorch's ``fully_shard``."""

    def wrap(self, loss):
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        hybrid = self.mesh.size["copies"] > 1
        mesh = self.mesh.copies_by_shard() if hybrid else self.mesh.devices["shard"]
        return apply_fully_shard(loss, mesh, low)

    def score(self, inputs, targets):
        found = super().score(inputs, targets)
        for part in self.call.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # the root does this only after a backward
        return found

    def micro_step(self, is_last):
        self.call.set_requires_gradient_sync(is_last)
        return nullcontext()

    def take(self, name, whole):
        (mine,) = self._cut(whole).values()
        parts = mine.chunk(self.mesh.size["shard"])
        rank = self.mesh.rank["shard"]
        return parts[rank] if rank < len(parts) else mine[:0]


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


def make_strategy(options: Options, loss: Loss, mesh: Mesh) -> Strategy:
    """The model on its ranks, divided as the options say."""
    if options.shards:
        return (Sharded if options.ours else TorchSharded)(options, loss, mesh)
    if not options.uses("replicate", "context", "expert"):
        return Strategy(options, loss, mesh)
    return (Copied if options.uses("tensor", "pipeline", "expert") else Replicated)(options, loss, mesh)


def make_optimizer(
    options: Options, groups: list[dict[str, Any]], device: torch.device, strategy: Strategy | None = None
) -> Optimizer:
    """The optimizer that the options name; its settings come from the options even after it loads a checkpoint.

    Args:
        options: Of the run.
        groups: Parameter groups, as ``strategy`` makes them.
        device: Where the parameters are.
        strategy: The divided model, which Muon needs in order to assemble whole matrices.
    """
    if options.optimizer == "muon":
        from lib.runs.engine.muon import MuonAndAdamW

        name = "ours" if options.ours and not options.graph else "adamw"
        optimizer: Optimizer = MuonAndAdamW(
            options, strategy, device, lambda some: _new_optimizer(replace(options, optimizer=name), some, device)
        )
    else:
        optimizer = _new_optimizer(options, groups, device)
    optimizer.register_load_state_dict_pre_hook(keep_settings)
    return optimizer


def keep_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state with this run's learning rate, decay and kernels. (A CUDA graph reads its rate from a tensor on
    the device.)
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [{**now, "params": was["params"]} for now, was in pairs]}


def _new_optimizer(options: Options, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    """Chapter 7's AdamW, PyTorch's AdamW, or SGD with momentum; fused on a GPU, and capturable for ``--graph``."""
    if options.optimizer == "ours":
        from lib.training import AdamW

        return AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    lr = torch.tensor(options.lr, device=device) if options.graph else options.lr
    fused = device.type == "cuda"
    if options.optimizer == "sgd":
        # there is no fused SGD for DTensors
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused and not sharded, foreach=fused and sharded)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused, capturable=options.graph)
