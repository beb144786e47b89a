"""How ranks share the work: each strategy wraps a `Loss`, and says what is different about a step. Ours or PyTorch's, by one flag."""

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
    """One process; also what the others have in common.

    Attributes:
        model: Without wrappers.
        call: ``call(inputs, targets)`` gives the mean loss.
        decays: Names of the parameters that decay, as they were before anything was cut.
        is_sharded: Whether each rank holds another part, so that a checkpoint is a folder.
        is_native: Whether ``lib.fsdp.save_sharded`` can write it: all that is cut is a DTensor.
    """

    is_sharded = is_native = False

    def __init__(self, options: Options, loss: Loss):
        self.options, self.model, self.loss = options, loss.model, loss
        decaying = {id(p) for p in parameter_groups(loss.model, options.weight_decay)[0]["params"]}
        self.decays = {name for name, p in loss.model.named_parameters() if id(p) in decaying}
        self.call: Any = self.wrap(loss)

    def wrap(self, loss: Loss) -> nn.Module:
        """The loss, its parameters shared out."""
        return loss

    def named(self) -> dict[str, nn.Parameter]:
        """What this rank trains."""
        return dict(self.model.named_parameters())

    def groups(self) -> list[dict[str, Any]]:
        """What an optimizer takes; DTensors and plain tensors apart, because fused optimizers do not mix them."""
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, p in self.named().items():
            groups.setdefault((name in self.decays, isinstance(p, DTensor)), []).append(p)
        decay = {True: self.options.weight_decay, False: 0.0}
        return [{"params": groups[key], "weight_decay": decay[key[0]]} for key in sorted(groups, reverse=True)]

    def micro_step(self, is_last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients pass between ranks in the last one only."""
        return nullcontext()

    def finish(self) -> None:
        """After the last backward: gradients are complete."""

    def share_overflow(self) -> None:
        """If one rank's part of the gradients has inf or NaN, let all ranks see it, so that all skip the step."""

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the whole gradient, which is scaled to at most ``max_norm``."""
        parameters = list(self.named().values())
        if self.options.ours:
            return clip_gradient_norm_(parameters, max_norm)
        # for DTensors PyTorch's own choice is a loop
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def decay(self, lr: float) -> None:
        """Weight decay that the optimizer cannot do, before its step."""

    def as_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the shape of parameter ``name`` as a distributed checkpoint takes it: cut parts as DTensors."""
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
    """Chapter 12's ``FullySharded``: parameters are flat shards, in which weights and biases stand side by side."""

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
        """Where this rank's shard holds what decays."""
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
        if self.options.optimizer == "sgd":  # PyTorch's adds the decay to the gradient
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
    """Every layer on all ranks: by chapter 13's layers, or by PyTorch's DTensor."""

    is_sharded = True

    def wrap(self, loss):
        self.mesh = make_mesh(loss.device)
        self.is_native = not self.options.ours
        self.cuts: dict[
            str, tuple[int, int]
        ] = {}  # name: the dimension that is cut, and into how many thirds it was fused
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
                whole += square  # the same on all ranks
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
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_mesh(device: torch.device) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


@torch.no_grad()
def share_overflow(parameters: list[nn.Parameter], device: torch.device) -> None:
    """One all-reduce of one number; where it says so, an inf goes into each rank's first gradient. The host does not wait."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    flags = [(~torch.isfinite(grad).all()).float() for grad in grads if grad.numel()]
    found = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for grad in [grad for grad in grads if grad.numel()][:1]:
        first = grad.view(-1)[:1]
        first.copy_(torch.where(found > 0, torch.full_like(first, torch.inf), first))


def make_strategy(options: Options, loss: Loss) -> Single:
    """The strategy that the options name, its parameters in their places."""
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
    """Whether tensor parallelism can cut the model.

    Raises:
        UsageError: a width that does not divide.
    """
    for name, width in widths.items() if options.strategy == "tp" else ():
        if width % n_ranks:
            raise UsageError(
                f"--model {options.model} has {name} = {width}, which --strategy tp cannot share out to {n_ranks} ranks: "
                f"{width} = {width // n_ranks} x {n_ranks} + {width % n_ranks}; expected a number of ranks that divides it"
            )


def make_optimizer(options: Options, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    """The optimizer that the options name; what they say of it holds also after a checkpoint of another time."""
    optimizer = _new_optimizer(options, groups, device)
    optimizer.register_load_state_dict_pre_hook(keep_settings)
    return optimizer


def keep_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state with this run's learning rate, decay and kernels: a CUDA graph reads its rate from a tensor on the device."""
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [{**now, "params": was["params"]} for now, was in pairs]}


def _new_optimizer(options: Options, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    """Chapter 7's AdamW, PyTorch's, or momentum; fused on a GPU, and able to be recorded where ``--graph`` asks for it."""
    if options.optimizer == "ours":
        from lib.training import AdamW

        return AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    lr = torch.tensor(options.lr, device=device) if options.graph else options.lr
    fused = device.type == "cuda"
    if options.optimizer == "sgd":
        # for DTensors there is no fused one
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused and not sharded, foreach=sharded)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused, capturable=options.graph)
