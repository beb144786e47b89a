"""Fully sharded data parallel: every rank keeps a share of the model, and borrows the rest when it needs it."""

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
    """Bytes of model state that each of R devices holds. (Exercise 12.1)

    Args:
        n_parameters, world_size: Parameters of the whole model; devices R.
        stage: 0 shards nothing, 1 the optimizer's state, 2 also the gradients, 3 also the parameters.
        param_bytes, grad_bytes, optimizer_bytes: Bytes of a parameter, of its gradient, and of what the optimizer keeps for it (8 for two float32 moments).

    Returns:
        Bytes, without activations, padding and what is gathered for a moment.

    Raises:
        ValueError: ``stage`` is none of 0, 1, 2, 3, or ``world_size`` is below 1; the message names the wrong value.

    Source: Rajbhandari and others (arXiv:1910.02054), figure 1.
    """
    raise NotImplementedError("Exercise 12.1: write memory_per_device")


def shard(tensor: Shaped[Tensor, "..."], rank: int, world_size: int) -> Shaped[Tensor, " s"]:
    """This rank's share of a tensor, as a row of numbers. (Exercise 12.2)

    Args:
        tensor: Any shape (also none), dtype and strides; left as it is.
        rank, world_size: Which share, from 0, of how many R.

    Returns:
        ``[ceil(n / R)]`` of the n elements in row-major order, then zeros; a copy, so that the tensor can be freed.

    Raises:
        ValueError: ``rank`` is not in 0..R-1; the message names ``rank``.
    """
    raise NotImplementedError("Exercise 12.2: write shard")


def unshard(shards: Iterable[Shaped[Tensor, " s"]], shape: Sequence[int]) -> Shaped[Tensor, "..."]:
    """The tensor again, from the shares of all ranks in their order. (Exercise 12.3)

    Args:
        shards, shape: What ``shard`` gave for ranks 0 to R-1; the tensor's shape.

    Returns:
        The tensor, in the shards' dtype.

    Raises:
        ValueError: the shards hold fewer elements than ``shape``; the message names both numbers.
    """
    raise NotImplementedError("Exercise 12.3: write unshard")


class ShardedOptimizer(Optimizer):
    """ZeRO-1: each rank updates its share of the parameters, then all ranks get all new values. (Exercise 12.4)

    Args:
        params: Parameters, or dicts with ``params`` and options, as any optimizer takes them; alike on all ranks.
        optimizer_cls, kwargs: The optimizer that updates this rank's share, such as ``torch.optim.AdamW``; its options.

    A parameter belongs to one rank, whole: the largest of a group comes first, each goes to the rank with the fewest elements so far in all
    groups (the lowest such); frozen ones count nothing. ``state`` has this rank's parameters only, also after ``load_state_dict``. Gradients come averaged.
    Source: Rajbhandari and others (arXiv:1910.02054), section 5.1.
    """

    _local: Any

    def __init__(self, params: Iterable, optimizer_cls: type[Optimizer], **kwargs: Any):
        raise NotImplementedError("Exercise 12.4: write ShardedOptimizer.__init__")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Share out one more group, ``params`` and options; ``Optimizer.__init__`` calls this for each that it is given."""
        raise NotImplementedError("Exercise 12.4: write ShardedOptimizer.add_param_group")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters with the options that ``param_groups`` has now, broadcast every trained one, return what ``closure`` gave.

        The inner ``step`` gets a ``closure`` only if there is one; what it changes in its groups, such as a counter, is in ``param_groups`` afterwards."""
        raise NotImplementedError("Exercise 12.4: write ShardedOptimizer.step")


def reduce_scatter_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None
) -> dict[str, Float[Tensor, " s"]]:
    """ZeRO-2: each rank keeps its share of the average gradient, and nobody keeps the whole. (Exercise 12.5)

    Args:
        module, group: After backward; the ranks, all by default. Frozen parameters are left out, a tied one stands once
            under its first name, and one without a gradient on this rank counts as zeros.

    Returns:
        This rank's padded share of each gradient's mean over the ranks, ``shard``'s layout, in the parameters' order; in float16
        the sum may overflow where the mean does not, so divide first. The ``grad`` of every trained parameter is None afterwards.
    Cost: one reduce-scatter of each gradient, padded (``reduce_scatter_row``, given, is PyTorch's under its old and new name).
    """
    raise NotImplementedError("Exercise 12.5: write reduce_scatter_gradients")


class FlatShard:
    """The parameters of one unit as one row of numbers, of which each rank keeps a share. (Exercise 12.6)

    Args:
        parameters: Names and parameters of one dtype, all trained or all frozen; rank 0's values count.
        param_dtype: What is gathered and computed with; None is the parameters' own dtype.

    Attributes:
        shard: ``nn.Parameter`` ``[S]``, S = ceil(n / R): this rank's ``shard`` of the n values; trained if they were.
        full: ``[R * S]`` in ``param_dtype``, on the parameters' device; a leaf that needs a gradient if the shard does; has memory only while gathered.
        is_whole: Whether the gather has begun and ``free`` was not called since.

    Source: Zhao and others (arXiv:2304.11277), section 3.2.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], param_dtype: torch.dtype | None = None):
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sizes = [parameter.numel() for parameter in parameters.values()]
        raise NotImplementedError("Exercise 12.6: write FlatShard.__init__")

    def start_gather(self) -> None:
        """Take memory for ``full`` and start one all-gather into it; if it is whole or on its way, do nothing."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.start_gather")

    def finish_gather(self) -> None:
        """Wait until ``full`` holds all values; start the gather, if nobody has."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.finish_gather")

    def views(self) -> dict[str, Tensor]:
        """The parameters by name, in their shapes: views of ``full`` through which gradients reach it."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.views")

    def free(self) -> None:
        """Give the memory behind ``full`` back, now, whoever still refers to it; wait first for a gather that is on its way."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.free")

    def start_reduce(self) -> None:
        """Take ``full.grad`` away (it is None afterwards), divide it by R, as a float16 sum may overflow, and start one reduce-scatter in its dtype."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.start_reduce")

    def finish_reduce(self) -> None:
        """Wait; add the mean over ranks, in the shard's dtype, in place to ``shard.grad``. With none on its way, do nothing."""
        raise NotImplementedError("Exercise 12.6: write FlatShard.finish_reduce")


class FullySharded(HookedUnits):
    """ZeRO-3: a unit's parameters are gathered just before they are used, and freed just after. (Exercise 12.7)

    Args:
        module: The model, alike on all ranks but for its values: rank 0's count. It is changed in place.
        units: Submodules in the order in which they run; by default the children of the module's ``ModuleList``. What no
            unit owns, or two share, belongs to the root, unit 0, which is gathered when the module is called.
        param_dtype: What is gathered, computed with and reduced; the shards and their gradients keep the parameters' dtype.

    Attributes:
        module: The model, whose only parameters are now the shards.
        flats, places: For each unit its list of ``FlatShard`` (one, two if some parameters are frozen, or none), and its
            ``Places``, with ``hang(views)`` and ``take_down()``. The given ``HookedUnits`` makes them, and calls the methods.

    Of the units beside the root at most two are whole at any moment. A step gathers each ``FlatShard`` twice, reduces it once.
    Each of several backwards before ``finish_gradient_synchronization`` is reduced, and they add up in the shards' ``grad``. After a
    backward that raised, the given ``HookedUnits`` calls ``after_forward(0)`` and drops what ``reducing`` names, before the next forward.
    """

    make_flat = FlatShard
    ahead: int | None = None  # the unit that was gathered ahead of its use
    reducing: FlatShard | None = None  # the one whose gradient is on its way

    def gather(self, i: int, following: int) -> None:
        """Free what is ahead, unless i or ``following``; make i whole; start on ``following``, if it is a unit but the root."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.gather")

    def free(self, i: int) -> None:
        """Free unit i, and take its views down."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.free")

    def before_forward(self, i: int) -> None:
        """Gather unit i and start on the next; hang the views of unit i in their places."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.before_forward")

    def after_forward(self, i: int) -> None:
        """Free unit i; after the root, every unit, and none is ahead. Called also when the forward raised."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.after_forward")

    def before_backward(self, i: int) -> None:
        """Gather unit i again, and start on the unit that ran before it; for the root on the last, if none is ahead."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.before_backward")

    def after_gradient(self, flat: FlatShard) -> None:
        """``flat.full.grad`` is complete: free the values, reduce the gradient; wait for the one before it first."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.after_gradient")

    def finish_gradient_synchronization(self) -> None:
        """After backward, before the optimizer: every shard's ``grad`` is complete, and nothing is whole."""
        raise NotImplementedError("Exercise 12.7: write FullySharded.finish_gradient_synchronization")


def clip_sharded_gradient_norm_(parameters: Iterable[Tensor], max_norm: float, group=None) -> Float[Tensor, ""]:
    """Scale gradients of which each rank holds a share, so that the norm of the whole is at most ``max_norm``. (Exercise 12.8)

    Args:
        parameters, max_norm, group: This rank's shards, whose ``grad`` is scaled in place, if there is one; the largest norm.

    Returns:
        The norm of the whole gradient before clipping, float32, alike on all ranks, for one all-reduce of one number.
    """
    raise NotImplementedError("Exercise 12.8: write clip_sharded_gradient_norm_")


def apply_fully_shard(model: nn.Module, mesh: DeviceMesh | None, param_dtype: torch.dtype | None) -> nn.Module:
    """The same with PyTorch's own: ``fully_shard`` on each block of the ``ModuleList``, then on the root. (Exercise 12.9)

    Args:
        model, mesh: Changed in place, its parameters become DTensors cut along dimension 0; the devices, None is all.
        param_dtype: What is gathered and computed with (``MixedPrecisionPolicy``); None is the parameters' dtype.

    Returns:
        The same model.
    """
    raise NotImplementedError("Exercise 12.9: write apply_fully_shard")


def save_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint with ``torch.distributed.checkpoint``, into which every rank puts its own share. (Exercise 12.10)

    Args:
        path, model, optimizer: A folder, the same on all ranks; a model after ``apply_fully_shard``, or plain; its optimizer. The dict has the keys "model" and "optimizer".

    Raises:
        ValueError: ``model`` is any ``HookedUnits``, such as ``FullySharded``, whose shards have no names; the message names ``gather_full_params``.

    Returns: nothing.
    """
    raise NotImplementedError("Exercise 12.10: write save_sharded")


def load_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer) -> None:
    """Read such a checkpoint, on the same number of ranks or on another, in place. (Exercise 12.11)

    Args:
        path, model, optimizer: As for ``save_sharded``. The optimizer need not have taken a step; its state and options (the learning rate) become the saved ones.

    Returns: nothing.
    """
    raise NotImplementedError("Exercise 12.11: write load_sharded")
