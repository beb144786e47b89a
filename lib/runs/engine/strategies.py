"""How a mesh of ranks divides a model, one kind of parallelism after the other, and what that changes in a step.

Each kind is done by our engine or by PyTorch's.
"""

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
from lib.fast.copies import CopyDDP, share_a_host
from lib.fast.shards import FullyShardedByCopies
from lib.fsdp import FullySharded, apply_fully_shard, clip_sharded_gradient_norm_, shard
from lib.given.parallel.sharding import all_gather_row
from lib.runs.engine.mesh import Mesh
from lib.runs.engine.options import Options
from lib.runs.engine.stages import units_of
from lib.runs.engine.strategy import Strategy
from lib.runs.engine.tasks import Loss
from lib.runs.flags import UsageError

BY_COPIES = "copies between GPUs"


class Copied(Strategy):
    """Our engine for copies of a model whose layers, stages or experts are divided.

    All gradients are averaged at once, after the last backward.
    """

    def finish(self) -> None:
        experts = nn.ParameterList(p for name, p in self.named().items() if self.is_spread(name))
        others = nn.ParameterList(p for name, p in self.named().items() if not self.is_spread(name))
        average_gradients_flat(others, self.mesh.group("copies"))
        if len(experts):
            # backward has summed over the ranks that share the experts, and each rank's loss is a mean
            torch._foreach_div_([p.grad for p in experts if p.grad is not None], self.mesh.size["expert"])
            average_gradients_flat(experts, self.mesh.group("expert_copies"))


class Replicated(Strategy):
    """All ranks are copies; gradients are averaged while backward goes on."""

    def wrap(self, loss: Loss) -> nn.Module:
        if self.options.ours:
            by_copies = takes_copies(self.options, loss.device, [p for p in loss.parameters() if p.requires_grad])
            self.opening = f"gradients are averaged by {BY_COPIES if by_copies else 'collectives'}"
            return (CopyDDP if by_copies else BucketedDDP)(loss, self.options.bucket_mb)
        devices = [loss.device] if loss.device.type == "cuda" else None
        settings: dict[str, Any] = {"bucket_cap_mb": self.options.bucket_mb, "gradient_as_bucket_view": True}
        return DistributedDataParallel(loss, device_ids=devices, **settings)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.call.no_sync()

    def finish(self) -> None:
        if self.in_turn:
            self.call.start_others()
        elif self.options.ours:
            self.call.finish_gradient_synchronization()

    def norm(self) -> Tensor:
        return self.call.norm() if self.in_turn else super().norm()

    def update(self, optimizer: Optimizer) -> None:
        if self.in_turn:
            update_in_turn(optimizer, self.call)
        else:
            super().update(optimizer)


def update_in_turn(optimizer: Optimizer, averaging: CopyDDP) -> None:
    """Update all parameters but those of the last bucket, which is still on its way, and then those."""
    grads = {p: p.grad for mean in averaging.means for p in mean.parameters}
    *most, last = averaging.means
    arrived: list[nn.Parameter] = []
    for p in grads:
        p.grad = None
    for parameters in averaging.finished():
        arrived += parameters
        if parameters is last.parameters or (most and parameters is most[-1].parameters):
            for p in arrived:
                p.grad = grads[p]
            optimizer.step()  # passes over parameters without a gradient
            for p in arrived:
                p.grad = None
            arrived.clear()
    for p, grad in grads.items():
        p.grad = grad


def takes_copies(options: Options, device: torch.device, parameters: list[nn.Parameter]) -> bool:
    """Whether copy engines send these parameters or their gradients; all ranks return the same.

    Raises:
        UsageError: they were asked for and cannot.
    """
    if options.averaging == "collectives":
        return False
    found = share_a_host(device) and all(p.dtype == torch.float32 for p in parameters)
    if options.averaging == "copies" and not found:
        raise UsageError(
            "--averaging copies: not every rank's GPU can read the memory of all others, or a parameter is not "
            "float32; expected the GPUs of one host, all visible to each rank, or --averaging collectives"
        )
    return found


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
    """Chapter 12's ``FullySharded``: parameters are flat shards that mix weights and biases.

    If nothing else divides or copies the model, its bytes are sent by copy engines where they can.
    """

    def wrap(self, loss: Loss) -> nn.Module:
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        settings: dict[str, Any] = {"param_dtype": low, **self.mesh.along("shard")}
        if self.mesh.size["pipeline"] > 1:
            settings["units"] = units_of(loss)
        elif loss.units is not None:
            settings["units"] = loss.units
        if self.mesh.size["copies"] > 1:
            wrapped: FullySharded = HybridSharded(loss, copies=self.mesh.group("copies"), **settings)
        else:
            wrapped = self.alone(loss, settings)
        flats = [(f"unit_{i}.flat_{j}", flat) for i, unit in enumerate(wrapped.flats) for j, flat in enumerate(unit)]
        self.flats: dict[str, Any] = dict(flats)
        if isinstance(wrapped, HybridSharded) and self.mesh.size["expert"] > 1:
            wrapped.pieces = {flat: self.pieces(name) for name, flat in flats}
        return wrapped

    def alone(self, loss: Loss, settings: dict[str, Any]) -> FullySharded:
        """The model without copies of its shards, which copy engines gather and reduce if all ranks share it."""
        if not self.options.only_shards:
            return FullySharded(loss, **settings)
        by_copies = takes_copies(self.options, loss.device, list(loss.parameters()))
        self.opening = f"shards and gradients are sent by {BY_COPIES if by_copies else 'collectives'}"
        return (FullyShardedByCopies if by_copies else FullySharded)(loss, **settings)

    def pieces(self, name: str) -> list[tuple[slice, dist.ProcessGroup]]:
        """The parts of a shard that hold experts, or none, and the ranks that hold the same ones."""
        found: list[tuple[str, slice]] = []
        for whole, part in self.parts(name).items():
            kind = "expert_copies" if self.is_spread(whole) else "copies"
            if found and found[-1][0] == kind:  # neighbours go together
                part = slice(found.pop()[1].start, part.stop)
            found.append((kind, part))
        return [(part, self.mesh.group(kind)) for kind, part in found]

    def parts(self, name: str) -> dict[str, slice]:
        flat = self.flats[name]
        n, found = len(flat.shard), {}
        start = -self.mesh.rank["shard"] * n
        for whole, size in zip(flat.shapes, flat.sizes, strict=True):
            here = slice(max(start, 0), min(start + size, n))
            if here.start < here.stop:
                found[whole.removeprefix("model.")] = here
            start += size
        return found

    def members(self, name: str) -> list[str]:
        return [whole.removeprefix("model.") for whole in self.flats[name].shapes]

    def named(self) -> dict[str, nn.Parameter]:
        return {name: flat.shard for name, flat in self.flats.items()}

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.named().values()), "weight_decay": 0.0}]

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.call, HybridSharded):
            self.call.begin(is_last)
        return nullcontext()

    def finish(self) -> None:
        self.call.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> Tensor:
        if self.options.uses("tensor", "pipeline", "expert"):
            return self.clip_parts(max_norm)
        return clip_sharded_gradient_norm_(self.named().values(), max_norm, **self.mesh.along("shard"))

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of the whole gradient, of which each rank has a shard."""
        grads = [p.grad for p in self.named().values() if p.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(square, **self.mesh.along("shard"))
        return square.sqrt()

    @torch.no_grad()
    def decay(self, lr: float) -> None:
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
            grads = [p.grad[part] for p, part in found]  # type: ignore[index] # backward has made all of them
            torch._foreach_add_(grads, values, alpha=self.options.weight_decay)
        else:
            torch._foreach_mul_(values, 1 - lr * self.options.weight_decay)

    def unsharded(self, name: str, mine: Tensor) -> dict[str, Tensor]:
        flat = self.flats[name]
        row = mine.new_empty(self.mesh.size["shard"] * len(mine))
        all_gather_row(row, mine, self.mesh.group("shard"))
        parts = row[: sum(flat.sizes)].split(flat.sizes)
        shaped = zip(self.members(name), parts, flat.shapes.values(), strict=True)
        return {whole: part.view(shape) for whole, part, shape in shaped}

    def take(self, name: str, whole: dict[str, Tensor]) -> Tensor:
        local = self._cut(whole)
        row = torch.cat([local[n].reshape(-1) for n in self.members(name)])
        return shard(row, self.mesh.rank["shard"], self.mesh.size["shard"])


class TorchSharded(Strategy):
    """PyTorch's ``fully_shard``."""

    def wrap(self, loss: Loss) -> nn.Module:
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        hybrid = self.mesh.size["copies"] > 1
        mesh = self.mesh.copies_by_shard() if hybrid else self.mesh.devices["shard"]
        return apply_fully_shard(loss, mesh, low)

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        found = super().score(inputs, targets)
        for part in self.call.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # the root does this only after a backward
        return found

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        self.call.set_requires_gradient_sync(is_last)
        return nullcontext()

    def take(self, name: str, whole: dict[str, Tensor]) -> Tensor:
        (mine,) = self._cut(whole).values()
        parts = mine.chunk(self.mesh.size["shard"])
        rank = self.mesh.rank["shard"]
        return parts[rank] if rank < len(parts) else mine[:0]


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


def divides_gradients(options: Options, optimizer: Optimizer) -> bool:
    """Whether ``clip_in_update`` may clip: the strategy knows the norm, and a fused AdamW reads the gradients next."""
    known = not options.uses("tensor", "pipeline", "expert") and (options.ours or not options.uses("shard"))
    fused = type(optimizer) is torch.optim.AdamW and bool(optimizer.defaults["fused"])
    return fused and known and options.precision != "float16" and options.path == "fast"


@torch.no_grad()
def clip_in_update(optimizer: Optimizer, max_norm: float, norm: Tensor) -> Tensor:
    """Let PyTorch's fused AdamW clip the gradients while it reads them; a pass over all of them less.

    Args:
        optimizer: Its next step scales all of its gradients to a common norm of at most ``max_norm``.
        max_norm: Largest norm of the whole gradient.
        norm: Norm of the whole gradient.

    Returns:
        ``norm``.
    """
    optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    return norm


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
