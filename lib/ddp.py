"""Distributed data parallel: every rank keeps the whole model, sees its share of the batch, and averages gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def shard_indices(
    n: int,
    rank: int,
    world_size: int,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[int]:
    """Which items of a data set a rank reads in an epoch, in its order. (Exercise 10.1)

    All ranks make the same list of all n items: shuffled by a ``torch.Generator`` seeded with ``seed + epoch`` and
    ``torch.randperm``, or in order. It is made a multiple of R long: padded from its own start, again and again if it is
    shorter than what is missing, or cut. Rank r takes every R-th item, from the r-th on.

    Args:
        n: Items of the data set.
        rank: This rank, from 0.
        world_size: Number R of ranks.
        epoch: Changes the shuffle, and nothing else.
        seed: The same on all ranks.
        shuffle: Shuffle before dividing.
        drop_last: Cut the tail instead of padding.

    Returns:
        ``ceil(n / R)`` indices, or ``floor(n / R)`` with ``drop_last``, the same number on every rank.

    Raises:
        ValueError: ``rank`` is not one of ``world_size`` ranks; the message names both.

    Source: ``torch.utils.data.DistributedSampler``, whose order this is.
    """
    raise NotImplementedError("Exercise 10.1: write shard_indices")


@torch.no_grad()
def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of the group's rank 0, in place. (Exercise 10.2)

    Args:
        module: The same on all ranks but for its values. Frozen parameters are sent too, and buffers of any dtype: also
            int16, uint16 and the floats of 8 bits, which gloo refuses as such and takes as bytes (uint8). A tensor that
            stands in two places is sent once; one that is not contiguous keeps its strides.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing.
    """
    raise NotImplementedError("Exercise 10.2: write broadcast_parameters")


@torch.no_grad()
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce a tensor. (Exercise 10.3)

    Args:
        module: After ``backward``. Frozen parameters are left alone; a tied parameter counts once.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing. A parameter without a gradient on this rank counts as zeros, here and in the mean: another rank may have
        one. If no rank has, the mean is zeros.

    The mean is of elements with the same index: gradients may lie in memory in other strides on other ranks.

    Cost: one ``all_reduce`` for each trainable parameter, in the order of ``module.parameters()``, of its own size.
    Convention: the mean over ranks. It is the mean over all items if every rank has equally many.
    """
    raise NotImplementedError("Exercise 10.3: write average_gradients")


@torch.no_grad()
def average_gradients_flat(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The same as ``average_gradients`` with one all-reduce in all. (Exercise 10.4)

    Args:
        module: After ``backward``.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing; gradients as after ``average_gradients``, each in its own dtype and shape.

    Cost: one ``all_reduce`` of all gradients in one flat buffer; with mixed dtypes, one for each dtype, in the order in
        which the dtypes first occur among the parameters.
    """
    raise NotImplementedError("Exercise 10.4: write average_gradients_flat")


class OverlapDDP(nn.Module):
    """A module whose gradients are averaged while backward still runs, one collective each. (Exercise 10.5)

    Args:
        module: The model, on every rank; it gets rank 0's parameters and buffers at once.

    Attributes:
        module: The same model.

    The mean of a gradient is started (``async_op=True``) by a hook, as soon as the gradient is ready, and in reverse order
    of the parameters on all ranks: a gradient that is ready early waits for its turn. What backward did not reach is
    started by ``finish_gradient_synchronization()``, and counts as ``average_gradients`` says.

    Raises:
        RuntimeError: in a backward without ``no_sync()`` that makes a gradient ready a second time in one round, when it
            may be on its way already. (A forward in between completes the round, so there it is no error.)

    Source: Li and others (arXiv:2006.15704), section 3.2.3.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.__init__")

    def forward(self, *args, **kwargs):
        """What ``module`` gives. If the round before was left open, by an exception or for lack of a finish, it is completed
        first: also if gradients were made ready and no collective had been started.
        """
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.forward")

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.finish_gradient_synchronization")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside starts no collective: gradients add up on each rank, and the next round averages the sums.

        It may be nested; only the end of the outermost one turns collectives on again.
        """
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.no_sync")


def ddp_overhead_seconds(n_bytes: float, bandwidth: float, call_overhead_s: float, n_buckets: float) -> float:
    """Time that communication adds to a step when it overlaps with backward. (Exercise 10.6)

    Args:
        n_bytes: All gradients together.
        bandwidth: Bytes a second that an all-reduce averages.
        call_overhead_s: Seconds that each call costs, whatever its size.
        n_buckets: Collectives k, of equal size.

    Returns:
        Seconds: the last bucket's transfer, which nothing is left to hide, and the cost of all calls.

    Raises:
        ValueError: ``n_buckets`` is less than 1 or ``bandwidth`` is not positive; the message names the value.
    """
    raise NotImplementedError("Exercise 10.6: write ddp_overhead_seconds")


def optimal_bucket_bytes(n_bytes: float, bandwidth: float, call_overhead_s: float) -> float:
    """The bucket that makes ``ddp_overhead_seconds`` smallest. (Exercise 10.7)

    Args:
        n_bytes: All gradients together.
        bandwidth: Bytes a second.
        call_overhead_s: Seconds a call.

    Returns:
        Bytes of a bucket, a float: ``n_bytes`` divided by the best k, which need not be whole but is at least 1.
    """
    raise NotImplementedError("Exercise 10.7: write optimal_bucket_bytes")


class BucketedDDP(nn.Module):
    """``OverlapDDP`` with gradients that travel together in buckets. (Exercise 10.8)

    Args:
        module: The model, on every rank; it gets rank 0's parameters and buffers at once.
        bucket_size_mb: The most that a bucket holds, in MB of 2**20 bytes; may be a fraction.

    Attributes:
        module: The same model.

    Buckets are filled in reverse order of the parameters: a gradient that would make its bucket too large begins the next
    one, and one larger than a bucket has one of its own. Each dtype has its own buckets; those whose last gradient comes
    earlier in the reverse order go first. A bucket is one flat ``all_reduce``, started when all its gradients are ready and
    all buckets before it have been started, so that the order is the same on all ranks. A parameter that only some ranks
    used gets the mean with zeros for the others; one that none used gets zeros. Frozen parameters are in no bucket, tied
    ones once.

    Raises:
        ValueError: ``bucket_size_mb`` is not positive; the message names it.
        RuntimeError: in a second backward of a round, as ``OverlapDDP``.

    Source: Li and others (arXiv:2006.15704), sections 3.2.2 and 3.2.3.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__()
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.__init__")

    def forward(self, *args, **kwargs):
        """What ``module`` gives. If the round before was left open, by an exception or for lack of a finish, it is completed
        first: also if gradients were made ready and no collective had been started.
        """
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.forward")

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.finish_gradient_synchronization")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside starts no collective: gradients add up on each rank, and the next round averages the sums.

        It may be nested; only the end of the outermost one turns collectives on again.
        """
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.no_sync")
