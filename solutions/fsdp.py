"""Fully sharded data parallel: every rank keeps a share of the model and gathers the rest when it computes."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from lib.given.parallel.sharding import HookedUnits, all_gather_row, blocks_of, reduce_scatter_row


def memory_per_device(
    n_parameters: int, world_size: int, stage: int, param_bytes: float, grad_bytes: float, optimizer_bytes: float
) -> float:
    """Bytes of model state that each of R devices holds. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        n_parameters: Parameters of the whole model.
        world_size: Number R of devices.
        stage: 0 shards nothing, 1 the optimizer's state, 2 also the gradients, 3 also the parameters.
        param_bytes: Bytes of a parameter.
        grad_bytes: Bytes of its gradient.
        optimizer_bytes: Bytes of its optimizer state (8 for two float32 moments).

    Returns:
        Bytes, not counting activations, padding, and parameters that are gathered for a moment.

    Raises:
        ValueError: ``stage`` is not 0, 1, 2 or 3, or ``world_size`` is below 1; the message names the wrong value.

    Source: Rajbhandari and others (arXiv:1910.02054), figure 1.
    """
    ### BEGIN SOLUTION
    if stage not in (0, 1, 2, 3) or world_size < 1:
        raise ValueError(f"stage = {stage} must be 0, 1, 2 or 3, and world_size = {world_size} at least 1")
    sizes = (optimizer_bytes, grad_bytes, param_bytes)
    return n_parameters * sum(size / world_size if i < stage else size for i, size in enumerate(sizes))
    ### END SOLUTION


def shard(tensor: Shaped[Tensor, "..."], rank: int, world_size: int) -> Shaped[Tensor, " s"]:
    """This rank's share of a tensor, as a row of numbers. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        tensor: Any shape (also a scalar), dtype and strides; left unchanged.
        rank: Index of the share, from 0.
        world_size: Number R of shares.

    Returns:
        ``[ceil(n / R)]`` of the n elements in row-major order, the last shares filled up with zeros.
        A copy outside of autograd's graph, so that the tensor can be freed.

    Raises:
        ValueError: ``rank`` is not in 0..R-1; the message names ``rank``.
    """
    ### BEGIN SOLUTION
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} is not in 0..{world_size - 1} (world_size = {world_size})")
    size = math.ceil(tensor.numel() / world_size)
    row, out = tensor.detach().reshape(-1), tensor.new_zeros(size)
    part = row[rank * size : (rank + 1) * size]
    out[: len(part)] = part
    return out
    ### END SOLUTION


def unshard(shards: Iterable[Shaped[Tensor, " s"]], shape: Sequence[int]) -> Shaped[Tensor, "..."]:
    """The tensor again, put together from the shards of all ranks. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        shards: What ``shard`` returned for ranks 0 to R-1, in this order.
        shape: The tensor's shape.

    Returns:
        The tensor, in the shards' dtype.

    Raises:
        ValueError: the shards hold fewer elements than ``shape``; the message names both numbers.
    """
    ### BEGIN SOLUTION
    row, n = torch.cat(list(shards)), math.prod(shape)
    if len(row) < n:
        raise ValueError(f"the shards hold {len(row)} elements, and the shape {list(shape)} has {n}")
    return row[:n].view(tuple(shape))
    ### END SOLUTION


class ShardedOptimizer(Optimizer):
    """ZeRO-1: each rank updates its share of the parameters, then broadcasts the new values. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    Args:
        params: Parameters, or dicts with ``params`` and options, as any optimizer takes them; the same on all ranks.
        optimizer_cls: The optimizer that updates this rank's share, such as ``torch.optim.AdamW``.
        kwargs: Its options.

    Each parameter belongs to one rank:

    - Go through a group from the largest parameter to the smallest.
    - Each goes to the rank that owns the fewest elements so far, over all groups; of equals, to the lowest rank.
    - Frozen parameters count as 0.

    Gradients are already averaged.
    ``state`` and ``state_dict`` have this rank's parameters only; a rank loads what its own ``state_dict`` gave.

    Source: Rajbhandari and others (arXiv:1910.02054), section 5.1.
    """

    _local: Any

    def __init__(self, params: Iterable, optimizer_cls: type[Optimizer], **kwargs: Any):
        ### BEGIN SOLUTION
        self._make, self._local = (lambda groups: optimizer_cls(groups, **kwargs)), None
        self._owner: dict[Tensor, int] = {}
        self._load = [0] * dist.get_world_size()
        super().__init__(params, kwargs)
        self.defaults = self._local.defaults
        ### END SOLUTION

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Assign owners in one more group (``params`` and options).

        ``Optimizer.__init__`` calls this for each of its groups.
        Afterwards the group in ``param_groups`` has all options of the inner optimizer, also those that nobody gave.
        """
        ### BEGIN SOLUTION
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in sorted(group["params"], key=Tensor.numel, reverse=True):
            owner = self._load.index(min(self._load))
            self._owner[parameter] = owner
            self._load[owner] += parameter.numel() * parameter.requires_grad
        mine = {**group, "params": [p for p in group["params"] if self._owner[p] == dist.get_rank()]}
        if self._local is None:
            self._local = self._make([mine])
        else:
            self._local.add_param_group(mine)
        for key, value in self._local.param_groups[-1].items():
            group.setdefault(key, value)
        ### END SOLUTION

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters, broadcast every trained one, and return what ``closure`` returned.

        - The options are the current ones in ``param_groups``.
        - Pass a ``closure`` to the inner ``step`` only if there is one.
        - Whatever that step changes in its groups, such as a counter, must be in ``param_groups`` afterwards.
        """
        ### BEGIN SOLUTION
        for theirs, group in zip(self._local.param_groups, self.param_groups, strict=True):
            theirs.update({key: value for key, value in group.items() if key != "params"})
        self._local.state, works = self.state, []
        loss = self._local.step(**kwargs) if closure is None else self._local.step(closure, **kwargs)
        for theirs, group in zip(self._local.param_groups, self.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})
        for parameter, owner in self._owner.items():
            if parameter.requires_grad:
                values = parameter.detach().contiguous()
                works.append((parameter, values, dist.broadcast(values, owner, async_op=True)))
        for parameter, values, work in works:
            work.wait()
            if not parameter.is_contiguous():
                parameter.detach().copy_(values)
        return loss
        ### END SOLUTION


def reduce_scatter_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None
) -> dict[str, Float[Tensor, " s"]]:
    """ZeRO-2: each rank keeps its share of the average gradient, and no rank keeps the whole. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        module: The model after backward.
        group: The ranks, all by default.

    Returns:
        By name, this rank's padded share of each gradient's mean over the ranks, laid out as by ``shard``, in the
        parameters' order.

        - Frozen parameters are left out, and a tied one appears once, under its first name.
        - A parameter without a gradient on this rank counts as zeros.
        - Divide before you sum: a float16 sum can overflow where the mean does not.
        - A gradient is set to None before the next one is reduced, so the ``grad`` of every trained parameter is None
          afterwards.

    Cost: one reduce-scatter for each padded gradient.
        The given ``reduce_scatter_row`` is PyTorch's, under its old and its new name.
    """
    ### BEGIN SOLUTION
    world_size, shares = dist.get_world_size(group), {}
    for name, parameter in ((n, p) for n, p in module.named_parameters() if p.requires_grad):
        grad, parameter.grad = parameter.grad, None
        row = torch.zeros_like(parameter).flatten() if grad is None else grad.reshape(-1)
        row = nn.functional.pad(row / world_size, (0, -len(row) % world_size))
        shares[name] = row.new_empty(len(row) // world_size)
        reduce_scatter_row(shares[name], row, group=group)
    return shares
    ### END SOLUTION


class FlatShard:
    """The parameters of one unit as one flat row; each rank keeps a shard of it. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        parameters: Names and parameters of one dtype, all trained or all frozen.
            All ranks start from the values of the group's rank 0.
        param_dtype: Dtype of the gathered row, with which the unit computes; None is the parameters' own.
        group: The R ranks that share the parameters, None for all.

    Attributes:
        shard: ``nn.Parameter`` ``[S]``, S = ceil(n / R): this rank's ``shard`` of the n values.
            It is trained if the parameters were.
        full: ``[R * S]`` in ``param_dtype``, on the parameters' device: a leaf that needs a gradient if the shard does.
            It has memory only while it is gathered.
        is_whole: True from the start of a gather until ``free``.
        shapes: Given: each parameter's shape, by name.
        sizes: Given: each parameter's number of elements.

    Source: Zhao and others (arXiv:2304.11277), section 3.2.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        param_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sizes = [parameter.numel() for parameter in parameters.values()]
        ### BEGIN SOLUTION
        first, world_size, self.group = next(iter(parameters.values())), dist.get_world_size(group), group
        row = torch.cat([parameter.detach().reshape(-1) for parameter in parameters.values()])
        dist.broadcast(row, group_src=0, group=group)
        self.shard = nn.Parameter(shard(row, dist.get_rank(group), world_size), requires_grad=first.requires_grad)
        self.full = torch.empty(len(self.shard) * world_size, dtype=param_dtype or first.dtype, device=first.device)
        self.full.requires_grad_(first.requires_grad)
        self.is_whole = True
        self._gathering: Any = None  # a gather that is on its way, and what must live until it is done
        self._reducing: Any = None
        self.free()
        ### END SOLUTION

    def start_gather(self) -> None:
        """Allocate ``full`` and start one all-gather into it. If it is whole already, or on its way, do nothing."""
        ### BEGIN SOLUTION
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            mine = self.shard.detach().to(self.full.dtype)
            work = all_gather_row(self.full.data, mine, self.group, async_op=True)  # .data: no new version for autograd
            self._gathering = (work, mine)
        ### END SOLUTION

    def finish_gather(self) -> None:
        """Wait until ``full`` holds all values; start the gather if it has not been started."""
        ### BEGIN SOLUTION
        self.start_gather()
        if self._gathering is not None:
            self._gathering[0].wait()
            self._gathering = None
        ### END SOLUTION

    def views(self) -> dict[str, Tensor]:
        """The parameters by name, in their shapes: views of ``full``, so that autograd passes their gradients on to it.

        Use one ``split`` with the padding as its last part: its backward makes one row.
        A slice for each parameter would make as many rows as there are parameters.
        """
        ### BEGIN SOLUTION
        parts = self.full.split([*self.sizes, self.full.numel() - sum(self.sizes)])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}
        ### END SOLUTION

    def free(self) -> None:
        """Release the memory behind ``full`` at once, even if other tensors refer to it.

        First wait for a gather that is on its way. If nothing is gathered, do nothing.
        """
        ### BEGIN SOLUTION
        if self.is_whole:
            self.finish_gather()
            self.full.untyped_storage().resize_(0)
            self.is_whole = False
        ### END SOLUTION

    def start_reduce(self) -> None:
        """Take ``full.grad`` and set it to None; divide it by R, and start one reduce-scatter in ``full``'s dtype.

        Divide first, because a float16 sum can overflow.
        """
        ### BEGIN SOLUTION
        grad, self.full.grad = self.full.grad, None
        assert grad is not None
        grad.div_(dist.get_world_size(self.group))  # before the sum, which could overflow
        mine = grad.new_empty(len(self.shard))
        self._reducing = (reduce_scatter_row(mine, grad, self.group, async_op=True), mine, grad)
        ### END SOLUTION

    def finish_reduce(self) -> None:
        """Wait, then add the mean over the ranks to ``shard.grad``, in place and in the shard's dtype.

        If nothing is on its way, do nothing.
        """
        ### BEGIN SOLUTION
        if self._reducing is not None:
            work, mine, _ = self._reducing
            work.wait()
            mean, self._reducing = mine.to(self.shard.dtype), None
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)
        ### END SOLUTION


class FullySharded(HookedUnits):
    """ZeRO-3: a unit's parameters are gathered just before they are used, and freed just after. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        module: The model, the same on all ranks except for its values: all start from those of the group's rank 0.
            It is changed in place.
        units: Submodules in the order in which they run; by default the children of the module's ``ModuleList``.
            Parameters that no unit owns, or that two units share, belong to the root, unit 0, which is gathered when
            the module is called.
        param_dtype: Dtype in which units are gathered, computed with and reduced.
            Shards and their gradients keep the parameters' dtype.
        group: The R ranks, None for all; ``HookedUnits`` passes both to each ``FlatShard``.

    Attributes:
        module: The model, whose only parameters are now the shards.
        flats: For each unit its list of ``FlatShard``: one, two if some parameters are frozen, or none.
        places: For each unit its ``Places``, with ``hang(views)`` and ``take_down()``.

    The given ``HookedUnits`` makes ``flats`` and ``places``, and calls your methods.

    - Beside the root, at most two units are whole at any moment.
    - A step gathers each ``FlatShard`` twice and reduces it once.
    - If there are several backwards before ``finish_gradient_synchronization``, each is reduced, and they add up in the
      shards' ``grad``.
    - If a backward raised, ``HookedUnits`` calls ``after_forward(0)`` and drops the gradient in ``reducing`` before the
      next forward.

    """

    make_flat = FlatShard
    ahead: int | None = None  # the unit that is gathered ahead of its use
    reducing: FlatShard | None = None  # the one whose gradient is being reduced

    def gather(self, i: int, following: int) -> None:
        """Make unit i whole, and start gathering unit ``following``.

        - First free the unit that is ahead, unless it is i or ``following``.
        - Afterwards ``following`` is ahead if it is a unit other than the root, and else none is: behind the last unit
          comes none.
        """
        ### BEGIN SOLUTION
        if self.ahead not in (None, i, following):
            self.free(self.ahead)
        for flat in self.flats[i]:
            flat.finish_gather()
        self.ahead = following if 0 < following < len(self.flats) else None
        for flat in self.flats[following] if self.ahead is not None else ():
            flat.start_gather()
        ### END SOLUTION

    def free(self, i: int) -> None:
        """Free unit i's flat shards, and take its views down."""
        ### BEGIN SOLUTION
        for flat in self.flats[i]:
            flat.free()
        self.places[i].take_down()
        ### END SOLUTION

    def before_forward(self, i: int) -> None:
        """Gather unit i, start gathering the next one, and hang the views of unit i in their places."""
        ### BEGIN SOLUTION
        self.gather(i, i + 1)
        for flat in self.flats[i]:
            self.places[i].hang(flat.views())
        ### END SOLUTION

    def after_forward(self, i: int) -> None:
        """Free unit i. After the root, free every unit, and then none is ahead. Also called when the forward raised."""
        ### BEGIN SOLUTION
        for unit in range(len(self.flats)) if i == 0 else (i,):
            self.free(unit)
        self.ahead = self.ahead if i else None
        ### END SOLUTION

    def before_backward(self, i: int) -> None:
        """Gather unit i again, and start gathering the unit that ran before it.

        For the root that is the last unit, unless one is ahead already: the root may have returned a unit's output,
        whose backward began first.
        """
        ### BEGIN SOLUTION
        last = len(self.flats) - 1 if self.ahead is None else self.ahead
        self.gather(i, i - 1 if i else last)
        ### END SOLUTION

    def after_gradient(self, flat: FlatShard) -> None:
        """Take up a gradient, ``flat.full.grad``, that is complete.

        Free the values, wait for the previous reduction, then start to reduce this gradient.
        """
        ### BEGIN SOLUTION
        flat.free()
        if self.reducing is not None:
            self.reducing.finish_reduce()
        flat.start_reduce()
        self.reducing = flat
        ### END SOLUTION

    def finish_gradient_synchronization(self) -> None:
        """Complete every shard's ``grad``, and leave no unit whole.

        The caller calls it after backward and before the optimizer.
        """
        ### BEGIN SOLUTION
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = None
        self.after_forward(0)
        ### END SOLUTION


def clip_sharded_gradient_norm_(parameters: Iterable[Tensor], max_norm: float, group=None) -> Float[Tensor, ""]:
    """Clip a gradient that is sharded over the ranks, so that the norm of the whole is at most ``max_norm``. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        parameters: This rank's shards, whose ``grad`` (if there is one) is scaled in place.
        max_norm: The largest norm.
        group: The ranks, None for all.

    Returns:
        The norm of the whole gradient before clipping, float32, the same on all ranks.
        It takes one all-reduce of one number, on the parameters' device (the CPU where there are none), also where no
        gradient is.
    """
    ### BEGIN SOLUTION
    parameters = list(parameters)
    device = parameters[0].device if parameters else "cpu"
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = sum((grad.float().square().sum() for grad in grads), torch.zeros((), device=device))
    dist.all_reduce(square, group=group)
    for grad in grads:
        grad.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return square.sqrt()
    ### END SOLUTION


def apply_fully_shard(model: nn.Module, mesh: DeviceMesh | None, param_dtype: torch.dtype | None) -> nn.Module:
    """PyTorch's own ``fully_shard``, on each block of the ``ModuleList`` and then on the root. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        model: Changed in place: its parameters become DTensors cut along dimension 0.
        mesh: The devices, None for all.
        param_dtype: Dtype of the gathered parameters (``MixedPrecisionPolicy``); None is the parameters' own dtype.

    Returns:
        The same model. All other options keep their defaults, by which a block is freed after its forward.
    """
    ### BEGIN SOLUTION
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return model
    ### END SOLUTION


def save_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint with ``torch.distributed.checkpoint``; every rank writes its own share. (Exercise)

    Size: 15 minutes, difficulty 2, stretch.

    Args:
        path: A folder, the same on all ranks.
        model: A plain model, or one after ``apply_fully_shard``.
        optimizer: Its optimizer.

    Returns:
        Nothing.
        The saved dict has the keys "model" and "optimizer".
        No rank gathers a sharded tensor in order to write it.

    Raises:
        ValueError: ``model`` is a ``HookedUnits``, such as ``FullySharded``, whose shards have no names.
            The message names ``gather_full_params``.
    """
    ### BEGIN SOLUTION
    if isinstance(model, HookedUnits):
        raise ValueError("FullySharded holds flat shards: save what its gather_full_params() gives, by save_checkpoint")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    ### END SOLUTION


def load_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer) -> None:
    """Load such a checkpoint into a model and its optimizer, on any number of ranks. (Exercise)

    Size: 15 minutes, difficulty 2, stretch.

    Args:
        path: As for ``save_sharded``.
        model: As for ``save_sharded``; changed in place.
        optimizer: As for ``save_sharded``; changed in place.
            It need not have taken a step; its state and options (the learning rate) become the saved ones.

    Returns: nothing.
    """
    ### BEGIN SOLUTION
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    ### END SOLUTION
