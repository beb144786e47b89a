"""How ranks divide the work: each strategy wraps a `Loss` and defines what its step does differently, by our engine or PyTorch's."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lib.ddp import BucketedDDP
from lib.fsdp import FullySharded, apply_fully_shard, clip_sharded_gradient_norm_
from lib.runs.engine.options import Options, UsageError
from lib.runs.engine.tasks import Loss
from lib.runs.engine.tensor import cut_by_dtensor, cut_by_hand, part_of
from lib.training import clip_gradient_norm_, parameter_groups


class Single:
    """One process; also the base class of the others.

    Attributes:
        model: The model without wrappers.
        call: ``call(inputs, targets)`` returns the mean loss.
        decays: Names of the parameters with weight decay, before anything was divided.
        is_sharded: Whether ranks hold different parts, so that a checkpoint is a folder.
        is_native: Whether ``lib.fsdp.save_sharded`` can write it, because everything that is divided is a DTensor.
    """

    is_sharded = is_native = False

    def __init__(self, options: Options, loss: Loss):
        self.options, self.model, self.loss = options, loss.model, loss
        decaying = {id(p) for p in parameter_groups(loss.model, options.weight_decay)[0]["params"]}
        self.decays = {name for name, p in loss.model.named_parameters() if id(p) in decaying}
        self.call: Any = self.wrap(loss)

    def wrap(self, loss: Loss) -> nn.Module:
        """Wrap the loss, and divide its parameters among the ranks."""
        return loss

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank trains, by name."""
        return dict(self.model.named_parameters())

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer. DTensors and plain tensors are in separate groups, because fused optimizers cannot mix them."""
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, p in self.named().items():
            groups.setdefault((name in self.decays, isinstance(p, DTensor)), []).append(p)
        decay = {True: self.options.weight_decay, False: 0.0}
        return [{"params": groups[key], "weight_decay": decay[key[0]]} for key in sorted(groups, reverse=True)]

    def micro_step(self, is_last: bool) -> AbstractContextManager:
        """Context for forward and backward of a micro-batch: gradients are synchronized in the last one only."""
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients, after the last backward."""

    def share_overflow(self) -> None:
        """If one rank's gradients have inf or NaN, make all ranks see it, so that all skip the step."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale the whole gradient to a norm of at most ``max_norm``; return its norm before that."""
        parameters = list(self.named().values())
        if self.options.ours:
            return clip_gradient_norm_(parameters, max_norm)
        # by default PyTorch loops over DTensors one by one
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def decay(self, lr: float) -> None:
        """Apply weight decay that the optimizer cannot apply, before its step."""

    def as_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with the shape of parameter ``name``, in the form that a distributed checkpoint stores: a part becomes a DTensor."""
        return tensor


class DataParallel(Single):
    """Every rank has the whole model; gradients are averaged."""

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


class Sharded(Single):
    """Chapter 12's ``FullySharded``: parameters are flat shards that mix weights and biases."""

    is_sharded = True

    def wrap(self, loss):
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        self.mesh = make_mesh(loss.device)
        wrapped = FullySharded(loss, param_dtype=low)
        flats = [(f"unit_{i}.flat_{j}", flat) for i, unit in enumerate(wrapped.flats) for j, flat in enumerate(unit)]
        self.flats = dict(flats)
        self.decaying = {name: self._decaying(flat) for name, flat in flats}
        return wrapped

    def _decaying(self, flat: Any) -> list[slice]:
        """Slices of this rank's shard to which weight decay applies."""
        n, found = len(flat.shard), []
        start = -dist.get_rank() * n
        for name, size in zip(flat.shapes, flat.sizes, strict=True):
            here = slice(max(start, 0), min(start + size, n))
            if here.start < here.stop and name.removeprefix("model.") in self.decays:
                found.append(here)
            start += size
        return found

    def named(self):
        return {name: flat.shard for name, flat in self.flats.items()}

    def groups(self):
        return [{"params": list(self.named().values()), "weight_decay": 0.0}]

    def finish(self):
        self.call.finish_gradient_synchronization()

    def share_overflow(self):
        share_overflow(list(self.named().values()), self.loss.device)

    def clip(self, max_norm):
        return clip_sharded_gradient_norm_(self.named().values(), max_norm)

    @torch.no_grad()
    def decay(self, lr):
        shards = [(self.flats[name].shard, part) for name, parts in self.decaying.items() for part in parts]
        values = [shard[part] for shard, part in shards]
        if not values or not self.options.weight_decay:
            return
        if self.options.optimizer == "sgd":  # like PyTorch's SGD, add the decay to the gradient
            torch._foreach_add_([shard.grad[part] for shard, part in shards], values, alpha=self.options.weight_decay)
        else:
            torch._foreach_mul_(values, 1 - lr * self.options.weight_decay)

    def as_dtensor(self, name, tensor):
        flat = self.flats[name]
        n, start = sum(flat.sizes), dist.get_rank() * len(flat.shard)
        mine = tensor.detach()[: max(0, min(len(flat.shard), n - start))]  # without the padding
        return DTensor.from_local(mine, self.mesh, [Shard(0)], run_check=False, shape=torch.Size((n,)), stride=(1,))


class TorchSharded(Single):
    """PyTorch's ``fully_shard``."""

    is_sharded = is_native = True

    def wrap(self, loss):
        low = loss.task.dtype if loss.task.dtype != torch.float32 else None
        return apply_fully_shard(loss, make_mesh(loss.device), low)

    def micro_step(self, is_last):
        self.call.set_requires_gradient_sync(is_last)
        return nullcontext()

    def share_overflow(self):
        share_overflow(list(self.named().values()), self.loss.device)


class TensorParallel(Single):
    """Every layer is divided among all ranks, by chapter 13's layers or by PyTorch's DTensor."""

    is_sharded = True

    def wrap(self, loss):
        self.mesh = make_mesh(loss.device)
        self.is_native = not self.options.ours
        self.cuts: dict[
            str, tuple[int, int]
        ] = {}  # name: the divided dimension, and the number of fused parts (3 for qkv)
        if self.options.ours:
            with loss.device:
                self.cuts = cut_by_hand(loss.model)
        else:
            cut_by_dtensor(loss.model, self.mesh)
        return loss

    def share_overflow(self):
        share_overflow(list(self.named().values()), self.loss.device)

    @torch.no_grad()
    def clip(self, max_norm):
        cut, whole = torch.zeros((), device=self.loss.device), torch.zeros((), device=self.loss.device)
        grads: list[Tensor] = []
        for name, p in self.named().items():
            if p.grad is None:
                continue
            grads.append(local(p.grad))
            square = grads[-1].float().square().sum()
            if name in self.cuts or (isinstance(p, DTensor) and p.placements[0].is_shard()):
                cut += square
            else:
                whole += square  # replicated: the same on all ranks
        dist.all_reduce(cut)
        norm = (cut + whole).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return norm

    def as_dtensor(self, name, tensor):
        if name not in self.cuts:
            return tensor.detach()
        return part_of(tensor.detach(), *self.cuts[name], self.mesh)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_mesh(device: torch.device) -> DeviceMesh:
    """A one-dimensional mesh of all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


@torch.no_grad()
def share_overflow(parameters: list[nn.Parameter], device: torch.device) -> None:
    """All-reduce one number: whether any gradient is not finite. If so, write an inf into each rank's first gradient. The host does not wait."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    flags = [(~torch.isfinite(grad).all()).float() for grad in grads if grad.numel()]
    found = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for grad in [grad for grad in grads if grad.numel()][:1]:
        first = grad.view(-1)[:1]
        first.copy_(torch.where(found > 0, torch.full_like(first, torch.inf), first))


def make_strategy(options: Options, loss: Loss) -> Single:
    """The strategy that the options name, with its parameters divided."""
    kinds: dict[tuple[str, bool], type[Single]] = {
        ("single", True): Single,
        ("single", False): Single,
        ("ddp", True): DataParallel,
        ("ddp", False): DataParallel,
        ("fsdp", True): Sharded,
        ("fsdp", False): TorchSharded,
        ("tp", True): TensorParallel,
        ("tp", False): TensorParallel,
    }
    return kinds[options.strategy, options.ours](options, loss)


def check_cuts(options: Options, widths: dict[str, int], n_ranks: int) -> None:
    """Check that tensor parallelism can divide the model.

    Raises:
        UsageError: a width is not a multiple of the ranks.
    """
    for name, width in widths.items() if options.strategy == "tp" else ():
        if width % n_ranks:
            raise UsageError(
                f"--model {options.model} has {name} = {width}, which --strategy tp cannot divide among {n_ranks} ranks: "
                f"{width} = {width // n_ranks} x {n_ranks} + {width % n_ranks}; expected a number of ranks that divides it"
            )


def make_optimizer(options: Options, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    """The optimizer that the options name; its settings come from the options even after it loads a checkpoint."""
    optimizer = _new_optimizer(options, groups, device)
    optimizer.register_load_state_dict_pre_hook(keep_settings)
    return optimizer


def keep_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state with this run's learning rate, decay and kernels. (A CUDA graph reads its rate from a tensor on the device.)"""
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
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused and not sharded, foreach=sharded)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused, capturable=options.graph)
