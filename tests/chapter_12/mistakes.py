"""What goes wrong when people shard a model by hand."""

import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lib.given.parallel.sharding import HookedUnits, all_gather_row, blocks_of, reduce_scatter_row
from lib.workbook.grading import mistake
from solutions import fsdp as reference

# ---- 12.1 memory_per_device ------------------------------------------------------------------------------------------


def _checked(n, r, stage):
    reference.memory_per_device(n, r, stage, 0, 0, 0)


@mistake("memory_per_device", "stage 1 shards the parameters first; ZeRO begins with the optimizer's state")
def parameters_first(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes):
    return reference.memory_per_device(n_parameters, world_size, stage, optimizer_bytes, grad_bytes, param_bytes)


@mistake("memory_per_device", "each stage shards only its own part, but stage 2 should also shard what stage 1 shards")
def one_part_only(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes):
    _checked(n_parameters, world_size, stage)
    sizes = [optimizer_bytes, grad_bytes, param_bytes]
    return n_parameters * sum(s / world_size if i == stage - 1 else s for i, s in enumerate(sizes))


@mistake("memory_per_device", "everything is divided by the number of devices at every stage")
def all_divided(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes):
    _checked(n_parameters, world_size, stage)
    return n_parameters * (param_bytes + grad_bytes + optimizer_bytes) / (world_size if stage else 1)


@mistake("memory_per_device", "the padding of the last share is counted")
def padding_counted(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes):
    _checked(n_parameters, world_size, stage)
    share, sizes = math.ceil(n_parameters / world_size), (optimizer_bytes, grad_bytes, param_bytes)
    return float(sum(size * (share if i < stage else n_parameters) for i, size in enumerate(sizes)))


@mistake("memory_per_device", "an unknown stage is treated as stage 3 instead of being refused")
def any_stage(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes):
    if world_size < 1:
        raise ValueError("0 devices")
    return reference.memory_per_device(
        n_parameters, world_size, min(stage, 3), param_bytes, grad_bytes, optimizer_bytes
    )


# ---- 12.2 shard ------------------------------------------------------------------------------------------------------


@mistake("shard", "the last shard is shorter: the padding is missing, and ranks would disagree on sizes")
def unpadded(tensor, rank, world_size):
    full = reference.shard(tensor, rank, world_size)
    return full[: max(0, min(len(full), tensor.numel() - rank * len(full)))].clone()


@mistake("shard", "a shard holds every R-th element instead of a stretch of neighbouring elements")
def strided(tensor, rank, world_size):
    reference.shard(tensor, rank, world_size)
    row = tensor.detach().reshape(-1)
    return nn.functional.pad(row, (0, -len(row) % world_size))[rank::world_size].clone()


@mistake(
    "shard", "the elements are spread as evenly as possible (`tensor_split`); every shard but the last should be full"
)
def spread(tensor, rank, world_size):
    size = len(reference.shard(tensor, rank, world_size))
    part = tensor.detach().reshape(-1).tensor_split(world_size)[rank]
    return nn.functional.pad(part, (0, size - len(part))).clone()


@mistake("shard", "the size is rounded down, so the end of the tensor is in no shard")
def rounded_down(tensor, rank, world_size):
    reference.shard(tensor, rank, world_size)
    size = tensor.numel() // world_size
    return tensor.detach().reshape(-1)[rank * size : (rank + 1) * size].clone()


@mistake("shard", "the shard is a view that keeps the memory of the whole tensor alive")
def a_view(tensor, rank, world_size):
    size = len(reference.shard(tensor, rank, world_size))
    return nn.functional.pad(tensor.detach().reshape(-1), (0, size * world_size - tensor.numel())).view(-1)[
        rank * size : (rank + 1) * size
    ]


@mistake("shard", "the shard is made on the default device instead of the tensor's")
def on_the_default_device(tensor, rank, world_size):
    share = reference.shard(tensor, rank, world_size)
    out = torch.zeros(len(share), dtype=share.dtype)
    out.copy_(share)
    return out


@mistake("shard", "a negative rank counts from the end instead of being refused")
def any_rank(tensor, rank, world_size):
    return reference.shard(tensor, rank + world_size if -world_size <= rank < 0 else rank, world_size)


@mistake("shard", "rank = R is accepted, but the last of R ranks is R - 1")
def rank_is_world_size(tensor, rank, world_size):
    return reference.shard(tensor, min(rank, world_size - 1) if rank == world_size else rank, world_size)


@mistake("shard", "no rank is refused, neither below 0 nor above R - 1")
def rank_unchecked(tensor, rank, world_size):
    return reference.shard(tensor, rank % world_size, world_size)


# ---- 12.3 unshard ----------------------------------------------------------------------------------------------------


@mistake("unshard", "the padding is still there")
def with_padding(shards, shape):
    row = torch.cat(list(shards))
    reference.unshard([row], shape)
    return row


@mistake("unshard", "the shards are interleaved instead of following one another")
def interleaved(shards, shape):
    row = torch.stack(list(shards), dim=1).flatten()
    return reference.unshard([row], shape)


@mistake("unshard", "missing elements are filled with zeros, but they should raise an error")
def filled_up(shards, shape):
    row = torch.cat(list(shards))
    return reference.unshard([row, row.new_zeros(max(0, math.prod(shape) - len(row)))], shape)


@mistake("unshard", "the result is float32 whatever the shards are")
def as_float32(shards, shape):
    return reference.unshard(shards, shape).float()


# ---- 12.4 ShardedOptimizer -------------------------------------------------------------------------------------------


class _Zero1(torch.optim.Optimizer):
    """ZeRO-1 in steps, each of which a mistake may take in its own way."""

    inner = None

    def __init__(self, params, optimizer_cls, **kwargs):
        self.make = lambda groups: optimizer_cls(groups, **kwargs)
        self.owners, self.loads = {}, [0] * dist.get_world_size()
        super().__init__(params, kwargs)

    def next_owner(self):
        return self.loads.index(min(self.loads))

    def order(self, parameters):
        return sorted(parameters, key=torch.Tensor.numel, reverse=True)

    def mine(self, parameters):
        return [p for p in parameters if self.owners[p] == dist.get_rank()]

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in self.order(group["params"]):
            self.owners[parameter] = owner = self.next_owner()
            self.loads[owner] += parameter.numel() * parameter.requires_grad
        mine = {**group, "params": self.mine(group["params"])}
        if self.inner is None:
            self.inner = self.make([mine])
        else:
            self.inner.add_param_group(mine)
        self.param_groups[-1] = {**self.inner.param_groups[-1], "params": group["params"]}

    def step(self, closure=None, **kwargs):
        self.link()
        self.copy(self.param_groups, self.inner.param_groups)
        loss = self.call(closure, **kwargs)
        self.copy_back()
        self.send()
        return loss

    def link(self):
        self.inner.state = self.state

    def copy(self, source, target):
        for theirs, ours in zip(source, target, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    def copy_back(self):
        self.copy(self.inner.param_groups, self.param_groups)

    def call(self, closure, **kwargs):
        return self.inner.step(**kwargs) if closure is None else self.inner.step(closure, **kwargs)

    def send(self):
        for parameter, owner in self.owners.items():
            if parameter.requires_grad:
                values = parameter.detach().contiguous()
                dist.broadcast(values, owner)
                parameter.detach().copy_(values)


@mistake("ShardedOptimizer", "every rank updates every parameter: the values are right, but no memory is saved")
class NothingSharded(_Zero1):
    def mine(self, parameters):
        return list(parameters)


@mistake("ShardedOptimizer", "the new values are not broadcast: each rank has new values for its own share only")
class NoBroadcast(_Zero1):
    def send(self):
        pass


@mistake(
    "ShardedOptimizer",
    "the inner optimizer keeps its first options, so a scheduler that changes param_groups has no effect",
)
class OldOptions(_Zero1):
    def copy(self, source, target):
        pass


@mistake(
    "ShardedOptimizer",
    "parameters are dealt out in turn, regardless of their size: one rank may get all the large ones",
)
class InTurn(_Zero1):
    def next_owner(self):
        return len(self.owners) % len(self.loads)


@mistake("ShardedOptimizer", "parameters are dealt out in their own order instead of from the largest to the smallest")
class AsTheyCome(_Zero1):
    def order(self, parameters):
        return parameters


@mistake("ShardedOptimizer", "parameters are dealt out from the smallest to the largest instead of the other way round")
class SmallestFirst(_Zero1):
    def order(self, parameters):
        return sorted(parameters, key=torch.Tensor.numel)


@mistake("ShardedOptimizer", "a frozen parameter counts by its size, but it needs no state: it counts as 0")
class FrozenCounted(_Zero1):
    def next_owner(self):
        sizes = [0] * len(self.loads)
        for parameter, owner in self.owners.items():
            sizes[owner] += parameter.numel()
        return sizes.index(min(sizes))


@mistake(
    "ShardedOptimizer",
    "only the learning rate is copied to the inner optimizer: a schedule of betas, momentum or weight decay has no effect",
)
class OnlyTheLearningRate(_Zero1):
    def copy(self, source, target):
        for theirs, ours in zip(source, target, strict=True):
            is_back = source is self.inner.param_groups
            ours.update({k: value for k, value in theirs.items() if k == "lr" or (is_back and k != "params")})


@mistake("ShardedOptimizer", "the loads start again at zero for each group, so the earlier groups are forgotten")
class EachGroupAnew(_Zero1):
    def add_param_group(self, param_group):
        self.loads = [0] * len(self.loads)
        super().add_param_group(param_group)


@mistake("ShardedOptimizer", "frozen parameters are broadcast, although no rank changes them")
class FrozenSent(_Zero1):
    def send(self):
        super().send()
        for parameter, owner in self.owners.items():
            if not parameter.requires_grad:
                dist.broadcast(parameter.detach(), owner)


@mistake(
    "ShardedOptimizer",
    "the state is linked only once, at the start: `load_state_dict` replaces it, and the inner optimizer keeps the old one",
)
class LinkedOnce(_Zero1):
    is_linked = False

    def link(self):
        if not self.is_linked:
            self.inner.state, self.is_linked = self.state, True


@mistake("ShardedOptimizer", "step does not return what the closure returned")
class NoLoss(_Zero1):
    def step(self, closure=None, **kwargs):
        super().step(closure, **kwargs)


@mistake(
    "ShardedOptimizer",
    "the closure is called outside of the inner step, which may need to call it itself, even several times",
)
class ClosureOutside(_Zero1):
    def call(self, closure, **kwargs):
        loss = None if closure is None else closure()
        self.inner.step(**kwargs)
        return loss


@mistake("ShardedOptimizer", "a closure of None is passed to an inner optimizer whose step takes none")
class ClosureAlways(_Zero1):
    def call(self, closure, **kwargs):
        return self.inner.step(closure, **kwargs)


@mistake(
    "ShardedOptimizer",
    "what the inner optimizer changes in its groups is not copied back, and is overwritten at the next step",
)
class NotCopiedBack(_Zero1):
    def copy_back(self):
        pass


# ---- 12.5 reduce_scatter_gradients -----------------------------------------------------------------------------------


def _scatter(module, group, before=True, after=False, order=False, missing=True, keep=False):
    n, shares = dist.get_world_size(group), {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or (parameter.grad is None and not missing):
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not keep:
            parameter.grad = None
        row = grad.t().reshape(-1) if order and grad.ndim == 2 else grad.reshape(-1)
        row = nn.functional.pad(row / n if before else row, (0, -len(row) % n))
        shares[name] = row.new_empty(len(row) // n)
        reduce_scatter_row(shares[name], row, group=group)
        shares[name].div_(n if after else 1)
    return shares


@mistake("reduce_scatter_gradients", "the gradients are summed over the ranks, not averaged")
def summed(module, group=None):
    return _scatter(module, group, before=False)


@mistake("reduce_scatter_gradients", "the full gradients are kept: each rank holds all of them, and its share as well")
def kept(module, group=None):
    return _scatter(module, group, keep=True)


@mistake(
    "reduce_scatter_gradients",
    "the gradients are set to None only after all of them were reduced: until then a rank holds all of them, and its shares as well",
)
def dropped_at_the_end(module, group=None):
    shares = _scatter(module, group, keep=True)
    for parameter in module.parameters():
        parameter.grad = None if parameter.requires_grad else parameter.grad
    return shares


@mistake(
    "reduce_scatter_gradients", "an all-reduce gives every rank the whole sum, out of which it then cuts its share"
)
def all_reduced(module, group=None):
    rank, n, shares = dist.get_rank(group), dist.get_world_size(group), {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            grad, parameter.grad = parameter.grad, None
            grad = torch.zeros_like(parameter) if grad is None else grad.contiguous() / n
            dist.all_reduce(grad, group=group)
            shares[name] = reference.shard(grad, rank, n)
    return shares


@mistake("reduce_scatter_gradients", "a gradient of two dimensions is laid out column by column")
def by_columns(module, group=None):
    return _scatter(module, group, order=True)


@mistake(
    "reduce_scatter_gradients",
    "a parameter without a gradient on this rank is skipped, so the ranks' collectives no longer match",
)
def skipped(module, group=None):
    return _scatter(module, group, missing=False)


@mistake("reduce_scatter_gradients", "the group is not used: the mean is over all ranks")
def all_ranks(module, group=None):
    return _scatter(module, None)


@mistake(
    "reduce_scatter_gradients", "the mean is taken after the sum, which overflows in float16 where the mean does not"
)
def divided_after(module, group=None):
    return _scatter(module, group, before=False, after=True)


# ---- 12.6 FlatShard --------------------------------------------------------------------------------------------------


@mistake("FlatShard", "the gradient is summed over the ranks, not averaged")
class Summed(reference.FlatShard):
    def start_reduce(self):
        self.full.grad.mul_(dist.get_world_size(self.group))
        super().start_reduce()


@mistake("FlatShard", "the mean is taken after the sum, which overflows in float16 where the mean does not")
class DividedAfter(reference.FlatShard):
    def start_reduce(self):
        self.full.grad.mul_(dist.get_world_size())
        super().start_reduce()

    def finish_reduce(self):
        before, self.shard.grad = self.shard.grad, None
        super().finish_reduce()
        if self.shard.grad is not None:
            self.shard.grad.div_(dist.get_world_size())
        if before is not None:
            self.shard.grad = before if self.shard.grad is None else before.add_(self.shard.grad)


@mistake(
    "FlatShard", "the gradient is reduced in the shard's dtype, which sends twice the bytes of a bfloat16 gradient"
)
class ReducedWide(reference.FlatShard):
    def start_reduce(self):
        grad, self.full.grad = self.full.grad, None
        grad = grad.to(torch.promote_types(grad.dtype, self.shard.dtype)) / dist.get_world_size(self.group)
        mine = grad.new_empty(len(self.shard))
        self._reducing = (reduce_scatter_row(mine, grad, self.group, async_op=True), mine, grad)


@mistake("FlatShard", "a second backward replaces shard.grad instead of adding to it")
class Replaced(reference.FlatShard):
    def start_reduce(self):
        self.shard.grad = None
        super().start_reduce()


@mistake(
    "FlatShard", "the addition to shard.grad is not in place: the old sum and the new one are both held for a moment"
)
class OutOfPlace(reference.FlatShard):
    def finish_reduce(self):
        before, self.shard.grad = self.shard.grad, None
        super().finish_reduce()
        if before is not None:
            self.shard.grad = before if self.shard.grad is None else before + self.shard.grad


@mistake("FlatShard", "full keeps its memory: `free` does not empty it, or `__init__` does not call `free`")
class NotFreed(reference.FlatShard):
    def free(self):
        if self.is_whole:
            self.finish_gather()
            self.is_whole = False


@mistake(
    "FlatShard", "free does not wait for a gather on its way, which then writes into memory that has been released"
)
class FreedTooEarly(reference.FlatShard):
    def free(self):
        if self.is_whole:
            self.full.untyped_storage().resize_(0)
            self.is_whole = False


@mistake("FlatShard", "start_gather waits for its gather, so nothing can be computed in the meantime")
class GatheredAtOnce(reference.FlatShard):
    def start_gather(self):
        super().start_gather()
        if self._gathering is not None:
            self._gathering[0].wait()


@mistake("FlatShard", "without a param_dtype full is float32 instead of the parameters' own dtype")
class AlwaysFloat32(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype or torch.float32, group)


@mistake("FlatShard", "full is made on the default device instead of the parameters' device")
class DefaultDevice(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype, group)
        full, needs_grad = self.full, self.full.requires_grad
        self.full = torch.empty(full.shape, dtype=full.dtype).requires_grad_(needs_grad)
        self.full.untyped_storage().resize_(0)


@mistake("FlatShard", "each rank keeps its own initial values: rank 0's were not broadcast")
class OwnStart(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype, group)
        row = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        self.shard.data.copy_(reference.shard(row, dist.get_rank(group), dist.get_world_size(group)))


@mistake(
    "FlatShard",
    "the gathered row is copied into full, which changes the version that autograd checks; copy it into full.data",
)
class NewVersion(reference.FlatShard):
    def start_gather(self):
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            with torch.no_grad():
                mine = self.shard.detach().to(self.full.dtype)
                row = torch.empty_like(self.full)
                all_gather_row(row, mine, self.group)
                self.full.copy_(row)


@mistake("FlatShard", "the gather writes into full, which autograd watches; it should write into full.data")
class IntoFull(reference.FlatShard):
    def start_gather(self):
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            all_gather_row(self.full, self.shard.detach().to(self.full.dtype), self.group)


@mistake(
    "FlatShard",
    "a slice of full for each parameter: backward makes a row of the whole unit's size for every one of them",
)
class SlicedOneByOne(reference.FlatShard):
    def views(self):
        views, at = {}, 0
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            views[name], at = self.full[at : at + size].view(shape), at + size
        return views


@mistake("FlatShard", "the shard is kept in param_dtype, which loses small updates")
class LowShard(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        if param_dtype is not None:
            parameters = {n: nn.Parameter(p.detach().to(param_dtype)) for n, p in parameters.items()}
        super().__init__(parameters, param_dtype, group)


@mistake("FlatShard", "the group is ignored: the parameters are divided among all ranks instead of the group's")
class AmongAll(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype)


@mistake("FlatShard", "the sum over the group's ranks is divided by the number of all ranks")
class DividedByAll(reference.FlatShard):
    def start_reduce(self):
        self.full.grad.mul_(dist.get_world_size(self.group) / dist.get_world_size())
        super().start_reduce()


@mistake(
    "FlatShard", "finish_reduce adds the same mean again if it is called twice: the second time nothing is on its way"
)
class AddedTwice(reference.FlatShard):
    def finish_reduce(self):
        reducing = self._reducing
        super().finish_reduce()
        self._reducing = reducing


@mistake("FlatShard", "each parameter is sharded by itself; put them end to end in one row first, and shard that row")
class EachByItself(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype, group)
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        parts = [p.detach().clone() for p in parameters.values()]
        for part in parts:
            dist.broadcast(part, group_src=0, group=group)
        self.shard.data = torch.cat([reference.shard(part, rank, n) for part in parts])
        self.full.data = self.full.data.new_empty(n * len(self.shard))
        self.full.untyped_storage().resize_(0)


@mistake("FlatShard", "full has only the n elements of the parameters; it needs the padding as well, R * S elements")
class FullWithoutPadding(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        super().__init__(parameters, param_dtype, group)
        self.full = self.full.new_empty(sum(self.sizes)).requires_grad_(self.full.requires_grad)
        self.full.untyped_storage().resize_(0)


@mistake("FlatShard", "the views are views of full.data, so autograd passes no gradient on to full")
class ViewsOfData(reference.FlatShard):
    def views(self):
        return {name: view.detach() for name, view in super().views().items()}


@mistake("FlatShard", "free empties full but leaves is_whole at True, so the next gather does nothing")
class StillWhole(reference.FlatShard):
    def free(self):
        super().free()
        self.is_whole = True


@mistake("FlatShard", "start_gather gathers again although full is whole already, or its gather is on its way")
class GatheredTwice(reference.FlatShard):
    def start_gather(self):
        self.is_whole = False
        super().start_gather()


@mistake("FlatShard", "the shard is gathered as it is and only then cast to param_dtype, which sends twice the bytes")
class GatheredWide(reference.FlatShard):
    def start_gather(self):
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            row = torch.empty_like(self.full, dtype=self.shard.dtype, requires_grad=False)
            self._gathering = (all_gather_row(row, self.shard.detach(), self.group, async_op=True), row)

    def finish_gather(self):
        self.start_gather()
        if self._gathering is not None:
            work, row = self._gathering
            work.wait()
            self.full.data.copy_(row)
            self._gathering = None


@mistake("FlatShard", "the shard is not cast to param_dtype before it is gathered into full")
class ShardNotCast(reference.FlatShard):
    def start_gather(self):
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            work = all_gather_row(self.full.data, self.shard.detach(), self.group, async_op=True)
            self._gathering = (work,)


@mistake("FlatShard", "free gives full other data, but its storage lives on in the tensors that refer to it: empty the storage")  # fmt: skip
class OtherData(reference.FlatShard):
    def start_gather(self):
        if not self.is_whole:
            self.full.data = self.full.data.new_empty(len(self.shard) * dist.get_world_size(self.group))
            super().start_gather()

    def free(self):
        if self.is_whole:
            self.finish_gather()
            self.full.data, self.is_whole = self.full.data.new_empty(0), False


@mistake("FlatShard", "the broadcast does not take the group: every group starts from the values of rank 0 of all")
class BroadcastToAll(reference.FlatShard):
    def __init__(self, parameters, param_dtype=None, group=None):
        for parameter in parameters.values():
            dist.broadcast(parameter.detach(), src=0)
        super().__init__(parameters, param_dtype, group)


# ---- 12.7 FullySharded -----------------------------------------------------------------------------------------------


@mistake("FullySharded", "nothing is freed after forward, so at its end every unit is whole")
class KeptAfterForward(reference.FullySharded):
    def after_forward(self, i):
        self.ahead = self.ahead if i else None


@mistake("FullySharded", "nothing is gathered ahead: every unit waits for its own gather")
class NothingAhead(reference.FullySharded):
    def gather(self, i, following):
        super().gather(i, len(self.flats))


@mistake("FullySharded", "backward gathers unit i + 1 ahead, but unit i - 1 comes next")
class WrongWayBack(reference.FullySharded):
    def before_backward(self, i):
        self.gather(i, i + 1)


@mistake("FullySharded", "nothing is gathered ahead before the root's backward, but the last unit comes next")
class NothingAheadOfTheRoot(reference.FullySharded):
    def before_backward(self, i):
        self.gather(i, i - 1 if i else len(self.flats))


@mistake(
    "FullySharded", "each reduction is waited for as soon as it is started, so nothing is computed in the meantime"
)
class NoOverlap(reference.FullySharded):
    def after_gradient(self, flat):
        flat.free()
        flat.start_reduce()
        flat.finish_reduce()


@mistake("FullySharded", "reductions are waited for only at the end, so the gradients of all units are held at once")
class AllOnTheirWay(reference.FullySharded):
    def after_gradient(self, flat):
        flat.free()
        flat.start_reduce()
        self.__dict__.setdefault("started", []).append(flat)

    def finish_gradient_synchronization(self):
        for flat in self.__dict__.pop("started", []):
            flat.finish_reduce()
        super().finish_gradient_synchronization()


@mistake("FullySharded", "finish_gradient_synchronization does not wait for the last unit's gradient")
class LastGradientLost(reference.FullySharded):
    def finish_gradient_synchronization(self):
        self.reducing = None
        self.after_forward(0)


@mistake(
    "FullySharded", "the gradients are reduced only after backward: until then every unit's gradient is held whole"
)
class ReducedAtTheEnd(reference.FullySharded):
    def after_gradient(self, flat):
        flat.free()
        self.__dict__.setdefault("waiting", []).append(flat)

    def finish_gradient_synchronization(self):
        for flat in self.__dict__.pop("waiting", []):
            if flat.full.grad is not None:
                flat.start_reduce()
                flat.finish_reduce()
        super().finish_gradient_synchronization()


@mistake("FullySharded", "a unit that was gathered ahead and then not used is never freed")
class AheadForGood(reference.FullySharded):
    def gather(self, i, following):
        self.ahead = None
        super().gather(i, following)


@mistake(
    "FullySharded", "the root counts as gathered ahead: if units run in another order, backward frees it too early"
)
class RootAhead(reference.FullySharded):
    def gather(self, i, following):
        if self.ahead not in (None, i, following):
            self.free(self.ahead)
        for flat in self.flats[i]:
            flat.finish_gather()
        self.ahead = following if following < len(self.flats) else None
        for flat in self.flats[following] if self.ahead is not None else ():
            flat.start_gather()


@mistake("FullySharded", "an exception in forward leaves the unit that was gathered ahead whole")
class WholeAfterAnException(reference.FullySharded):
    def after_forward(self, i):
        self.free(i)


@mistake("FullySharded", "`free` does not take the views down: the weights of a freed unit still hang in the model")
class ViewsLeftHanging(reference.FullySharded):
    def free(self, i):
        for flat in self.flats[i]:
            flat.free()


@mistake("FullySharded", "finish_gradient_synchronization frees nothing: a root with frozen values stays whole")
class NothingFreedAtTheEnd(reference.FullySharded):
    def finish_gradient_synchronization(self):
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = None


@mistake(
    "FullySharded",
    "the root's backward always gathers the last unit ahead: if that unit's backward began first, the one ahead is freed and gathered again",
)
class AlwaysTheLastUnit(reference.FullySharded):
    def before_backward(self, i):
        self.gather(i, i - 1 if i else len(self.flats) - 1)


@mistake("FullySharded", "after the root's forward a unit still counts as ahead, although all were freed")
class StillAhead(reference.FullySharded):
    def after_forward(self, i):
        for unit in range(len(self.flats)) if i == 0 else (i,):
            self.free(unit)


@mistake(
    "FullySharded", "a reduction is started before the previous one was waited for, so two gradients are on their way"
)
class TwoOnTheirWay(reference.FullySharded):
    def after_gradient(self, flat):
        flat.free()
        flat.start_reduce()
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = flat


@mistake(
    "FullySharded",
    "a unit's values are freed only after its reduction was started, so they are held beside its gradient",
)
class FreedAfterTheReduction(reference.FullySharded):
    def after_gradient(self, flat):
        if self.reducing is not None:
            self.reducing.finish_reduce()
        flat.start_reduce()
        flat.free()
        self.reducing = flat


@mistake("FullySharded", "only the gradient of the last backward is kept: gradient accumulation is lost")
class LastBackwardOnly(reference.FullySharded):
    def before_backward(self, i):
        for flat in self.flats[i]:
            flat.shard.grad = None
        super().before_backward(i)


@mistake("FullySharded", "`free` frees only the first of a unit's flat shards: where a part is frozen there are two")
class FreesOneFlat(reference.FullySharded):
    def free(self, i):
        for flat in self.flats[i][:1]:
            flat.free()
        self.places[i].take_down()


@mistake(
    "FullySharded",
    "only the first of the next unit's flat shards is gathered ahead: where a part is frozen there are two",
)
class OneFlatAhead(reference.FullySharded):
    def gather(self, i, following):
        if self.ahead not in (None, i, following):
            self.free(self.ahead)
        for flat in self.flats[i]:
            flat.finish_gather()
        self.ahead = following if 0 < following < len(self.flats) else None
        for flat in self.flats[following][:1] if self.ahead is not None else ():
            flat.start_gather()


@mistake(
    "FullySharded", "the views are not hung in their places before the forward: the unit computes with empty parameters"
)
class NothingHung(reference.FullySharded):
    def before_forward(self, i):
        self.gather(i, i + 1)


@mistake("FullySharded", "the views are taken before the unit is gathered, when there is no memory behind them")
class HungTooEarly(reference.FullySharded):
    def before_forward(self, i):
        for flat in self.flats[i]:
            self.places[i].hang(flat.views())
        self.gather(i, i + 1)


@mistake("FullySharded", "the gather of the unit itself is started but not waited for")
class OnlyStarted(reference.FullySharded):
    def gather(self, i, following):
        if self.ahead not in (None, i, following):
            self.free(self.ahead)
        self.ahead = following if 0 < following < len(self.flats) else None
        for unit in (i, self.ahead):
            for flat in self.flats[unit] if unit is not None else ():
                flat.start_gather()


@mistake("FullySharded", "after the root's forward only the root is freed: a unit that was gathered ahead stays whole")
class OnlyTheRootFreed(reference.FullySharded):
    def after_forward(self, i):
        self.free(i)
        self.ahead = self.ahead if i else None


@mistake("FullySharded", "`reducing` does not say which gradient is being reduced, so nobody waits for it")
class NotRemembered(reference.FullySharded):
    def after_gradient(self, flat):
        super().after_gradient(flat)
        self.reducing = None


@mistake("FullySharded", "a unit's reduction is not started when its gradient is complete")
class NeverReduced(reference.FullySharded):
    def after_gradient(self, flat):
        flat.free()
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = flat


@mistake("FullySharded", "the unit that was gathered ahead is freed when its turn comes, and gathered again")
class FreedWhenItsTurnComes(reference.FullySharded):
    def gather(self, i, following):
        if self.ahead is not None:
            self.free(self.ahead)
        self.ahead = None
        super().gather(i, following)


@mistake("FullySharded", "the unit that is ahead is freed even if it comes next, and gathered again")
class FreedThoughNext(reference.FullySharded):
    def gather(self, i, following):
        if self.ahead not in (None, i):
            self.free(self.ahead)
        super().gather(i, following)


@mistake("FullySharded", "two units are gathered ahead, so three are whole while one computes")
class TwoAhead(reference.FullySharded):
    def gather(self, i, following):
        super().gather(i, following)
        for unit in (following - 1, following + 1):
            for flat in self.flats[unit] if 0 < unit < len(self.flats) and unit != i else ():
                flat.start_gather()


@mistake("FullySharded", "a gradient is reduced twice")
class ReducedTwice(reference.FullySharded):
    def after_gradient(self, flat):
        super().after_gradient(flat)
        flat.start_reduce()


@mistake("FullySharded", "`before_forward` names the unit itself as the following one, so no other is gathered ahead")
class FollowsItself(reference.FullySharded):
    def before_forward(self, i):
        self.gather(i, i)
        for flat in self.flats[i]:
            self.places[i].hang(flat.views())


@mistake("FullySharded", "`before_backward` frees the unit first, and so gathers anew what was gathered ahead")
class FreedBeforeItsBackward(reference.FullySharded):
    def before_backward(self, i):
        self.free(i)
        super().before_backward(i)


@mistake(
    "FullySharded", "after the last unit comes none: `following` may be the number of units, for which there is no list"
)
class BeyondTheLast(reference.FullySharded):
    def gather(self, i, following):
        super().gather(i, following)
        if following > 0:
            self.ahead = following
            for flat in self.flats[following]:
                flat.start_gather()


# ---- 12.8 clip_sharded_gradient_norm_ --------------------------------------------------------------------------------


def _clip(parameters, max_norm, group, before=lambda square: square, after=torch.sqrt, eps=1e-6, wide=torch.float32):
    grads = [p.grad for p in parameters if p.grad is not None]
    device = grads[0].device if grads else "cpu"
    square = sum((g.to(wide or g.dtype).square().sum() for g in grads), torch.zeros((), device=device))
    square = before(square.float())
    dist.all_reduce(square, group=group)
    norm = after(square)
    for grad in grads:
        grad.mul_((max_norm / (norm + eps)).clamp(max=1.0))
    return norm


@mistake(
    "clip_sharded_gradient_norm_",
    "the norm is that of this rank's share alone, so each rank scales by a different factor",
)
def own_share(parameters, max_norm, group=None):
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = sum((g.float().square().sum() for g in grads), torch.zeros((), device="cpu")).sqrt()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@mistake("clip_sharded_gradient_norm_", "norms are added over the ranks, but their squares should be")
def norms_added(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, group, before=torch.sqrt, after=lambda norm: norm)


@mistake("clip_sharded_gradient_norm_", "the squares are averaged over the ranks, not added")
def averaged(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, group, after=lambda square: (square / dist.get_world_size(group)).sqrt())


@mistake("clip_sharded_gradient_norm_", "the square root is missing: the squared norm is compared with the limit")
def not_rooted(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, group, after=lambda square: square)


@mistake("clip_sharded_gradient_norm_", "the group is ignored: the norm is over all ranks")
def clipped_over_all(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, None)


@mistake("clip_sharded_gradient_norm_", "1e-6 is subtracted from the norm, which makes it negative for a tiny gradient")
def negative_norm(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, group, eps=-1e-6)


@mistake(
    "clip_sharded_gradient_norm_",
    "squares are computed in the gradient's own dtype: in float16 the square of 300 is infinite",
)
def narrow_squares(parameters, max_norm, group=None):
    return _clip(parameters, max_norm, group, wide=None)


@mistake("clip_sharded_gradient_norm_", "the scaled gradient is a new tensor, but it should be scaled in place")
def out_of_place(parameters, max_norm, group=None):
    parameters = list(parameters)
    grads = [p.grad for p in parameters]
    norm = reference.clip_sharded_gradient_norm_(parameters, max_norm, group)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    return norm


@mistake("clip_sharded_gradient_norm_", "`parameters` is walked through twice: an iterator is empty the second time")
def walked_twice(parameters, max_norm, group=None):
    again = parameters if isinstance(parameters, list) else ()
    grads = [p.grad for p in parameters if p.grad is not None]
    device = "cpu"
    square = sum((g.float().square().sum() for g in grads), torch.zeros((), device=device))
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for grad in (p.grad for p in again if p.grad is not None):
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@mistake(
    "clip_sharded_gradient_norm_",
    "on a rank without gradients the zero is made on the default device, which NCCL refuses: make it on the parameters' device",
)
def zero_anywhere(parameters, max_norm, group=None):
    grads = [p.grad for p in parameters if p.grad is not None]
    zero = torch.zeros((), device=grads[0].device if grads else None)
    square = sum((g.float().square().sum() for g in grads), zero)
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@mistake("clip_sharded_gradient_norm_", "gradients below the limit are scaled up to it")
def scaled_up(parameters, max_norm, group=None):
    parameters = list(parameters)
    norm = reference.clip_sharded_gradient_norm_(parameters, math.inf, group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm if norm else 1.0)
    return norm


# ---- 12.9 apply_fully_shard ------------------------------------------------------------------------------------------


@mistake("apply_fully_shard", "only the root is sharded: the whole model is gathered at once")
def root_only(model, mesh, param_dtype):
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))


@mistake("apply_fully_shard", "the root is left out, so the embeddings and the head stay whole on every rank")
def blocks_only(model, mesh, param_dtype):
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return model


@mistake("apply_fully_shard", "the model itself is cast to param_dtype: the shards lose their float32")
def cast_model(model, mesh, param_dtype):
    return reference.apply_fully_shard(model.to(param_dtype), mesh, None)


@mistake("apply_fully_shard", "every layer inside a block is a unit of its own: many small gathers")
def every_layer(model, mesh, param_dtype):
    for block in blocks_of(model):
        for layer in block.children():
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return reference.apply_fully_shard(model, mesh, param_dtype)


@mistake("apply_fully_shard", "the root is sharded before its blocks, and takes their parameters")
def root_first(model, mesh, param_dtype):
    for part in (model, *blocks_of(model)):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return model


@mistake("apply_fully_shard", "the mesh is not passed on: the weights are cut over all ranks")
def mesh_ignored(model, mesh, param_dtype):
    return reference.apply_fully_shard(model, None, param_dtype)


@mistake("apply_fully_shard", "`reshard_after_forward=False` keeps every block whole until its backward")
def kept_whole(model, mesh, param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@mistake("apply_fully_shard", "the root has no policy: its own parameters are gathered and computed with in float32")
def root_without_policy(model, mesh, param_dtype):
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return fully_shard(model, mesh=mesh)


@mistake("apply_fully_shard", "param_dtype is not passed on: everything is gathered in float32")
def dtype_ignored(model, mesh, param_dtype):
    return reference.apply_fully_shard(model, mesh, None)


# ---- 12.10 save_sharded, 12.11 load_sharded --------------------------------------------------------------------------


def _refuse(model):
    if isinstance(model, HookedUnits):
        raise ValueError("save what gather_full_params() gives")


@mistake("save_sharded", "the optimizer's state is not in the checkpoint")
def weights_only(path, model, optimizer):
    _refuse(model)
    weights, _ = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": {}}, checkpoint_id=path)


@mistake("save_sharded", "every rank writes its own shard as if it were the whole parameter")
def local_shards(path, model, optimizer):
    _refuse(model)
    weights, state = get_state_dict(model, optimizer)
    weights = {name: getattr(w, "_local_tensor", w) for name, w in weights.items()}
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


@mistake("save_sharded", "rank 0 gathers everything and writes it alone, but a large model does not fit on one rank")
def gathered_first(path, model, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    _refuse(model)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, no_dist=True)
    dist.barrier()


@mistake("save_sharded", "`full_state_dict=True` gathers the whole model and optimizer on every rank before it writes")
def gathered_everywhere(path, model, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    _refuse(model)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


@mistake("save_sharded", "the optimizer's state is not saved under the key 'optimizer'")
def another_key(path, model, optimizer):
    _refuse(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)


@mistake(
    "save_sharded",
    "a plain `state_dict()` names the optimizer's state by numbers; `get_state_dict` uses the parameters' names",
)
def plain_state_dicts(path, model, optimizer):
    _refuse(model)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)


@mistake(
    "save_sharded",
    "flat shards are not refused: no `HookedUnits` has names to save, and `FullySharded` is only one of them",
)
def anything(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


@mistake("load_sharded", "the model is loaded, but the optimizer starts from scratch")
def without_optimizer(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@mistake("load_sharded", "the checkpoint is read into a state dict that is then thrown away")
def thrown_away(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    copies = {name: w.clone() for name, w in weights.items()}
    dcp.load({"model": copies, "optimizer": state}, checkpoint_id=path)


@mistake("load_sharded", "the optimizer is loaded, but the model keeps its initial values")
def without_model(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@mistake(
    "load_sharded",
    "set_state_dict is not called after dcp.load: the moments are read in place, but the learning rate is not restored",
)
def without_set(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
