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
    """The items of a data set that a rank reads in an epoch, in order. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}, expected 0 to {world_size - 1} with world_size = {world_size}")
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n, generator=generator).tolist() if shuffle else list(range(n))
    n_each = n // world_size if drop_last else -(-n // world_size)  # the second form rounds up, without a float
    return [order[i % n] for i in range(rank, n_each * world_size, world_size)]
    ### END SOLUTION


@torch.no_grad()
def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of the group's rank 0, in place. (Exercise)

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
    ### BEGIN SOLUTION
    for tensor in [*module.parameters(), *module.buffers()]:
        once = tensor.detach()[
            tuple(slice(None if step else 1) for step in tensor.stride())
        ]  # without expand's repeats
        sent = once.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=group)  # bytes: gloo knows few dtypes
        if sent.data_ptr() != once.data_ptr():
            once.copy_(sent)
    ### END SOLUTION


### BEGIN SOLUTION
def _trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that get a gradient, each once, in the same order on all ranks."""
    return [p for p in module.parameters() if p.requires_grad]


def _start_mean(tensor: Tensor, group=None, async_op: bool = False) -> dist.Work | None:
    """Replace a contiguous tensor by its mean over the ranks.

    The division comes first, so that the sum cannot overflow.
    """
    if dist.get_backend(group) == "nccl":
        return dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group, async_op=async_op)
    tensor.div_(dist.get_world_size(group))
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def _flat_mean(parameters: Sequence[nn.Parameter], group=None, async_op: bool = False) -> dist.Work | None:
    """One collective for the gradients of several parameters of one dtype, whose ``.grad`` become views of it."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if any(grad.layout != torch.strided for grad in grads):
        raise TypeError(
            "a gradient is sparse: each rank's has different rows, so make it dense (Embedding(..., sparse=False))"
        )
    pieces = [grad.detach().reshape(-1) for grad in grads]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]  # the only copy; a single gradient needs none
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
    return _start_mean(flat, group, async_op)


### END SOLUTION
@torch.no_grad()
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce a tensor. (Exercise)

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
    ### BEGIN SOLUTION
    for p in _trainable(module):
        _flat_mean([p], group)
    ### END SOLUTION


@torch.no_grad()
def average_gradients_flat(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Do what ``average_gradients`` does with a single all-reduce. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        module: The module after ``backward``.
        group: The ranks that take part; None is all of them.

    Returns:
        Nothing; gradients as after ``average_gradients``, each in its own dtype and shape.

    Cost: one ``all_reduce`` of one flat buffer with all gradients; with mixed dtypes, one for each dtype, in the order
        in which the dtypes first occur among the parameters.
    """
    ### BEGIN SOLUTION
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in _trainable(module):
        by_dtype.setdefault(p.dtype, []).append(p)
    for parameters in by_dtype.values():
        _flat_mean(parameters, group)
    ### END SOLUTION


### BEGIN SOLUTION
class _Rounds:
    """Starts the mean of each bucket when its last gradient is ready and all buckets before it have started.

    The order of the buckets is the same on all ranks, whichever parameters each rank used, so that the n-th collective
    of one rank meets the n-th of every other.
    """

    def __init__(self, buckets: list[list[nn.Parameter]]):
        self.buckets, self.is_paused = buckets, False
        self.bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self) -> None:
        """Begin a round: no gradient is ready, and no collective has started."""
        self.ready: set[nn.Parameter] = set()
        self.n_missing = [len(bucket) for bucket in self.buckets]
        self.works: list[dist.Work | None] = []

    def on_ready(self, p: nn.Parameter) -> None:
        """Called by autograd during backward, when a gradient is complete."""
        if self.is_paused:
            return
        if p in self.ready:
            raise RuntimeError(
                "a second backward before finish_gradient_synchronization(); use no_sync() for the first"
            )
        self.ready.add(p)
        self.n_missing[self.bucket_of[p]] -= 1
        while len(self.works) < len(self.buckets) and self.n_missing[len(self.works)] == 0:
            self.start_next()

    @torch.no_grad()
    def start_next(self) -> None:
        self.works.append(_flat_mean(self.buckets[len(self.works)], async_op=True))

    def finish(self) -> None:
        """Start the collectives that have not started, wait for all, and begin the next round."""
        if self.is_paused:
            return
        while len(self.works) < len(self.buckets):
            self.start_next()
        works = self.works
        self.begin()
        for work in works:
            if work is not None:
                work.wait()

    def finish_what_was_left(self) -> None:
        """Complete a round that was left open, so that its collectives meet those of the other ranks."""
        if self.ready and torch.is_grad_enabled():
            paused, self.is_paused = self.is_paused, False
            self.finish()
            self.is_paused = paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


### END SOLUTION
class OverlapDDP(nn.Module):
    """A module whose gradients are averaged while backward still runs, with one collective each. (Exercise)

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
        ### BEGIN SOLUTION
        self.module = module
        broadcast_parameters(module)
        self._rounds = _Rounds([[p] for p in reversed(_trainable(module))])
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        """Return what ``module`` returns.

        First complete a round that an exception left open, or a missing ``finish_gradient_synchronization()``.
        Before that, gradients may be replaced by None (``zero_grad()``), but not zeroed in place: a collective may
        still write into them.
        A round is open if a gradient is ready, even if no collective has started.
        A forward under ``torch.no_grad()`` completes nothing, because one rank may evaluate alone.
        """
        ### BEGIN SOLUTION
        self._rounds.finish_what_was_left()
        return self.module(*args, **kwargs)
        ### END SOLUTION

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        ### BEGIN SOLUTION
        self._rounds.finish()
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no collective in a backward inside: gradients add up on each rank.

        The next round averages the sums.
        One ``no_sync()`` may be inside another; only the end of the outermost turns collectives on again.
        """
        ### BEGIN SOLUTION
        with self._rounds.paused():
            yield
        ### END SOLUTION


def ddp_overhead_seconds(n_bytes: float, bandwidth: float, call_overhead_s: float, n_buckets: float) -> float:
    """Time that communication adds to a step when it overlaps with backward. (Exercise)

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
    ### BEGIN SOLUTION
    if n_buckets < 1 or bandwidth <= 0:
        raise ValueError(f"n_buckets = {n_buckets} must be at least 1 and bandwidth = {bandwidth} above 0")
    return n_bytes / (n_buckets * bandwidth) + n_buckets * call_overhead_s
    ### END SOLUTION


def optimal_bucket_bytes(n_bytes: float, bandwidth: float, call_overhead_s: float) -> float:
    """The size of bucket that makes ``ddp_overhead_seconds`` smallest. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        n_bytes: Bytes of all gradients together.
        bandwidth: Algorithm bandwidth, in bytes a second.
        call_overhead_s: Seconds that each call costs.

    Returns:
        Bytes of a bucket, a float: ``n_bytes`` divided by the best k, which is at least 1 and may be a fraction.
    """
    ### BEGIN SOLUTION
    return min(float(n_bytes), math.sqrt(n_bytes * bandwidth * call_overhead_s))
    ### END SOLUTION


### BEGIN SOLUTION
def _buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Fill buckets in the order given, each dtype its own; the one whose last parameter comes first goes first."""
    position = {p: i for i, p in enumerate(parameters)}
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        bucket = open_buckets.get(p.dtype)
        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > bucket_bytes:
            bucket = open_buckets[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


### END SOLUTION
class BucketedDDP(nn.Module):
    """``OverlapDDP`` with several gradients in one collective, a bucket. (Exercise)

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
        ### BEGIN SOLUTION
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb = {bucket_size_mb}, expected more than 0")
        self.module = module
        broadcast_parameters(module)
        self._rounds = _Rounds(_buckets(_trainable(module)[::-1], bucket_size_mb * 2**20))
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        """Return what ``module`` returns.

        First complete a round that an exception left open, or a missing ``finish_gradient_synchronization()``.
        Before that, gradients may be replaced by None (``zero_grad()``), but not zeroed in place: a collective may
        still write into them.
        A round is open if a gradient is ready, even if no collective has started.
        A forward under ``torch.no_grad()`` completes nothing, because one rank may evaluate alone.
        """
        ### BEGIN SOLUTION
        self._rounds.finish_what_was_left()
        return self.module(*args, **kwargs)
        ### END SOLUTION

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: when it returns, every gradient is the mean. Inside ``no_sync()`` it does nothing."""
        ### BEGIN SOLUTION
        self._rounds.finish()
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no collective in a backward inside: gradients add up on each rank.

        The next round averages the sums.
        One ``no_sync()`` may be inside another; only the end of the outermost turns collectives on again.
        """
        ### BEGIN SOLUTION
        with self._rounds.paused():
            yield
        ### END SOLUTION
