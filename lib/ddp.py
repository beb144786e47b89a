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
    """The items of a data set that a rank reads in an epoch, in order. (Exercise 10.1)

    Size: 20 minutes, difficulty 2, core.

    All ranks make the same list of all n items, in order or shuffled by ``torch.randperm`` with a ``torch.Generator``
    that is seeded with ``seed + epoch``.
    The length of the list becomes a multiple of R: it is padded from its own start (again and again, if the list is
    shorter than the padding) or, with ``drop_last``, cut.
    Rank r takes every R-th item, beginning with item r.

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

    Source: ``torch.utils.data.DistributedSampler``, which has the same order.
    """
    raise NotImplementedError("Exercise 10.1: write shard_indices")


@torch.no_grad()
def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of the group's rank 0, in place. (Exercise 10.2)

    Size: 20 minutes, difficulty 2, core.

    Args:
        module: The same module on all ranks, with different values.
            Frozen parameters are sent too, and buffers of any dtype, also int16, uint16 and 8-bit floats: gloo refuses
            these dtypes, but sends their bytes (uint8).
            A tensor that occurs twice in the module is sent once; one that is not contiguous keeps its strides.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing.
    """
    raise NotImplementedError("Exercise 10.2: write broadcast_parameters")


@torch.no_grad()
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce a tensor. (Exercise 10.3)

    Size: 10 minutes, difficulty 1, core.

    Args:
        module: The module after ``backward``.
            Frozen parameters are left alone; a tied parameter counts once.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing.
        A gradient that is None on this rank counts as zeros, because another rank may have one, and becomes the mean
        like any other.
        If no rank has one, the mean is zeros.

    The mean is over elements with the same index: a gradient may have different strides on different ranks.

    Cost: one ``all_reduce`` for each trainable parameter, in the order of ``module.parameters()``, of its own size.
    Convention: the mean over ranks.
        It is the mean over all items if every rank has equally many.
    """
    raise NotImplementedError("Exercise 10.3: write average_gradients")


@torch.no_grad()
def average_gradients_flat(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Do what ``average_gradients`` does with a single all-reduce. (Exercise 10.4)

    Size: 15 minutes, difficulty 2, core.

    Args:
        module: The module after ``backward``.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing; gradients as after ``average_gradients``, each in its own dtype and shape.

    Cost: one ``all_reduce`` of one flat buffer with all gradients; with mixed dtypes, one for each dtype, in the order
        in which the dtypes first occur among the parameters.
    """
    raise NotImplementedError("Exercise 10.4: write average_gradients_flat")


class OverlapDDP(nn.Module):
    """A module whose gradients are averaged while backward still runs, with one collective each. (Exercise 10.5)

    Size: 30 minutes, difficulty 3, core.

    Args:
        module: The model, on every rank; the constructor gives it rank 0's parameters and buffers.

    Attributes:
        module: The same model.

    A hook starts the mean of a gradient (``async_op=True``) as soon as the gradient is ready, but in the reverse order
    of the parameters on all ranks: a gradient that is ready early waits for its turn.
    ``finish_gradient_synchronization()`` starts the means of gradients that backward did not reach; they count as
    ``average_gradients`` says.

    Raises:
        RuntimeError: in a backward without ``no_sync()`` that makes a gradient ready a second time in one round,
            because the first one may be on its way already.
            (A forward in between completes the round, and then it is no error.)

    Source: Li and others (arXiv:2006.15704), section 3.2.3.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.__init__")

    def forward(self, *args, **kwargs):
        """Return what ``module`` returns.

        First complete a round that an exception left open, or a missing ``finish_gradient_synchronization()``.
        Before that, gradients may be replaced by None (``zero_grad()``), but not zeroed in place: a collective may
        still write into them.
        A round is open if a gradient is ready, even if no collective has started.
        A forward under ``torch.no_grad()`` completes nothing, because one rank may evaluate alone.
        """
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.forward")

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.finish_gradient_synchronization")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no collective in a backward inside: gradients add up on each rank.

        The next round averages the sums.
        One ``no_sync()`` may be inside another; only the end of the outermost turns collectives on again.
        """
        raise NotImplementedError("Exercise 10.5: write OverlapDDP.no_sync")


def ddp_overhead_seconds(n_bytes: float, bandwidth: float, call_overhead_s: float, n_buckets: float) -> float:
    """Time that communication adds to a step when it overlaps with backward. (Exercise 10.6)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        n_bytes: Bytes of all gradients together.
        bandwidth: Algorithm bandwidth: bytes of an array over the seconds of its all-reduce.
        call_overhead_s: Seconds that each call costs, whatever its size.
        n_buckets: Number k of collectives, of equal size.

    Returns:
        Seconds: the transfer of the last bucket, which nothing hides, and the cost of all calls.

    Raises:
        ValueError: ``n_buckets`` is less than 1 or ``bandwidth`` is not positive; the message names the value.
    """
    raise NotImplementedError("Exercise 10.6: write ddp_overhead_seconds")


def optimal_bucket_bytes(n_bytes: float, bandwidth: float, call_overhead_s: float) -> float:
    """The size of bucket that makes ``ddp_overhead_seconds`` smallest. (Exercise 10.7)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        n_bytes: Bytes of all gradients together.
        bandwidth: Algorithm bandwidth, in bytes a second.
        call_overhead_s: Seconds that each call costs.

    Returns:
        Bytes of a bucket, a float: ``n_bytes`` divided by the best k, which is at least 1 and may be a fraction.
    """
    raise NotImplementedError("Exercise 10.7: write optimal_bucket_bytes")


class BucketedDDP(nn.Module):
    """``OverlapDDP`` with several gradients in one collective, a bucket. (Exercise 10.8)

    Size: 45 minutes, difficulty 4, core.

    Args:
        module: The model, on every rank; the constructor gives it rank 0's parameters and buffers.
        bucket_size_mb: The most that a bucket holds, in MB of 2**20 bytes; may be a fraction.

    Attributes:
        module: The same model.

    Buckets fill in the reverse order of the parameters.
    A gradient that would make its bucket too large begins the next one; a gradient larger than a bucket has a bucket of
    its own.
    Each dtype has its own buckets.
    All ranks send the buckets in the same order: the bucket whose last gradient comes earlier in the reverse order goes
    first.
    A bucket is one flat ``all_reduce``; it starts when all its gradients are ready and all buckets before it have
    started.
    For a parameter that only some ranks used, the others count as zeros; one that no rank used gets zeros.
    Frozen parameters are in no bucket, tied ones in one bucket once.

    Raises:
        ValueError: ``bucket_size_mb`` is not positive, checked before anything is sent; the message names it.
        RuntimeError: in a second backward of a round, as ``OverlapDDP``.

    Source: Li and others (arXiv:2006.15704), sections 3.2.2 and 3.2.3.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__()
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.__init__")

    def forward(self, *args, **kwargs):
        """Return what ``module`` returns.

        First complete a round that an exception left open, or a missing ``finish_gradient_synchronization()``.
        Before that, gradients may be replaced by None (``zero_grad()``), but not zeroed in place: a collective may
        still write into them.
        A round is open if a gradient is ready, even if no collective has started.
        A forward under ``torch.no_grad()`` completes nothing, because one rank may evaluate alone.
        """
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.forward")

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.finish_gradient_synchronization")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no collective in a backward inside: gradients add up on each rank.

        The next round averages the sums.
        One ``no_sync()`` may be inside another; only the end of the outermost turns collectives on again.
        """
        raise NotImplementedError("Exercise 10.8: write BucketedDDP.no_sync")
