"""Means of gradients over the GPUs of one host, whose bytes are moved by copy engines and not by multiprocessors.

NCCL's all-reduce is a kernel: while it runs, it holds multiprocessors that backward wants too.
A GPU also has a few copy engines, which do nothing but move bytes, also from the memory of another GPU.
So here the mean of a gradient of n numbers on R ranks is made of copies and a few short kernels:

1. each rank puts its gradient where the others can read it;
2. it copies the r-th part of every rank's gradient, n / R numbers each, where r is its own rank;
3. it computes the mean of these R parts, always in the order of the ranks;
4. it copies the other parts of the mean from the ranks that computed them.

These are a reduce-scatter and an all-gather, as in a ring, and a rank receives as many numbers:
2 (R - 1) / R times its gradient's.
Before steps 2 and 4 the ranks meet: each waits for the others in a kernel of a single thread block.
A wait that holds no multiprocessor was tried too, and made no step shorter (``lib.bench.yardstick.parts``).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp import broadcast_parameters
from lib.fast.parts.means import mean_of_ranks, n_squares

ALIGNED = 64  # numbers: each part begins at a multiple of 128 bytes, also in bf16
PATIENCE_S = 600  # as long as NCCL waits
Meet = Callable[[], None]
Places = tuple[list[Tensor], Meet]
MakePlaces = Callable[[int, torch.dtype, torch.device], Places]


# ---- memory that all ranks can read ----------------------------------------------------------------------------------


def share_a_host(device: torch.device) -> bool:
    """Whether each rank has a GPU of its own whose memory all ranks can read; all ranks return the same."""
    own, seen = "", []
    if device.type == "cuda":
        gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        here = torch.cuda.current_device() if device.index is None else device.index
        own = gpus[here]
        seen = [gpu for i, gpu in enumerate(gpus) if i == here or torch.cuda.can_device_access_peer(here, i)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (own, seen))
    owners = {own for own, _ in found}
    return len(owners) == len(found) > 1 and all(owners <= set(seen) for _, seen in found)


def allocate_shared(n: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Any]:
    """Memory for ``n`` numbers on each rank's GPU, which the GPUs of all other ranks can read and write.

    Returns:
        The memory of rank 0, 1, ..., as tensors, and PyTorch's handle to it.
        Both live as long as this rank's own tensor, so keep that.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # copies need none
    own = symmetric.empty(n, dtype=dtype, device=device)
    try:
        handle = symmetric.rendezvous(own, dist.group.WORLD)
    except RuntimeError as error:
        raise RuntimeError(
            f"GPU {device} cannot share memory with the others; average by collectives instead"
        ) from error
    places = [handle.get_buffer(rank, (n,), dtype) for rank in range(handle.world_size)]
    places[handle.rank] = own
    return places, handle


def in_peers_memory(n: int, dtype: torch.dtype, device: torch.device, patience_s: float = PATIENCE_S) -> Places:
    """`allocate_shared`, and a function that lets the current stream wait until those of all ranks
    have reached the same call.

    If one of them has not after ``patience_s`` seconds, the GPU ends the program's kernels: see `lost_rank`.
    """
    places, handle = allocate_shared(n, dtype, device)
    patience.append(patience_s)
    return places, partial(handle.barrier, timeout_ms=int(1e3 * patience_s))


patience: list[float] = []
"""Of this process's meetings, each one's seconds."""


def lost_rank(error: BaseException) -> str | None:
    """What to tell the user if an error is a meeting to which some rank did not come; None if it is another error."""
    if not patience or "launch failure" not in str(error):
        return None
    return (
        f"a GPU gave up, most likely because another rank has not come to average gradients for {min(patience):g} s: "
        "look for the first error in the other ranks' output; expected all ranks to take every step"
    )


# ---- the mean of a bucket --------------------------------------------------------------------------------------------


class MeanByCopies:
    """The mean over ranks of the gradients of some parameters, again and again, in the same memory.

    Args:
        parameters: Float32 parameters on one GPU, in the same order on all ranks.
        gradients: For each rank the memory ``[R, n_part]`` in which it puts its gradients, one after the other.
        means: For each rank the memory ``[n_part]`` in which it puts its part of the mean, float32.
            It may be the rank's own row of ``gradients``, which no other rank reads before.
        squares: Gets the sums of the squares of this rank's part of the mean, before ``meet_again``.
        meet, meet_again: Let the current stream wait for the streams of all ranks.

    Attributes:
        result: For each parameter the memory of its mean, which becomes its gradient.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        gradients: list[Tensor],
        means: list[Tensor],
        squares: Tensor,
        meet: Meet,
        meet_again: Meet,
    ):
        self.parameters, self.gradients, self.means, self.squares = parameters, gradients, means, squares
        self.meet, self.meet_again = meet, meet_again
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        own = gradients[self.rank].zero_()  # what no gradient fills must not count in a norm
        is_in_place = means[self.rank].data_ptr() == own[self.rank].data_ptr()
        self.whole = own if is_in_place else torch.empty_like(own, dtype=torch.float32)
        self.put, self.result = self.cut(own), self.cut(self.whole)

    def cut(self, rows: Tensor) -> list[Tensor]:
        """A piece of the rows for each parameter, in its shape."""
        sizes = [p.numel() for p in self.parameters]
        pieces = rows.view(-1)[: sum(sizes)].split(sizes)
        return [piece.view(p.shape) for p, piece in zip(self.parameters, pieces, strict=True)]

    def put_gradients(self) -> list[Tensor]:
        """Step 1, on the current stream. From now on the parameters have the gradients in ``result``.

        Returns:
            This rank's own gradients, which must be kept until the stream has read them.
        """
        pairs = [(place, p.grad) for p, place in zip(self.parameters, self.put, strict=True) if p.grad is not None]
        if len(pairs) < len(self.parameters):  # another rank may have the other gradients
            torch._foreach_zero_([place for p, place in zip(self.parameters, self.put, strict=True) if p.grad is None])
        grads = [grad for _, grad in pairs]
        if pairs:
            torch._foreach_copy_([place for place, _ in pairs], grads)  # one kernel; a copy for each would be many
        for p, result in zip(self.parameters, self.result, strict=True):
            p.grad = result
        return grads

    def others(self) -> list[int]:
        """The other ranks, so that no two read from the same one at a time."""
        return [(self.rank + i) % self.n_ranks for i in range(1, self.n_ranks)]

    def reduce(self, received: Tensor) -> None:
        """Steps 2 and 3: this rank's part of the mean, and its squares; then all ranks have theirs.

        Args:
            received: Scratch memory of the dtype of a rank's gradients, and at least as long.
        """
        own = self.gradients[self.rank]
        received = received.view(-1)[: own.numel()].view_as(own)
        self.meet()
        for rank in self.others():
            received[rank].copy_(self.gradients[rank][self.rank])
        mean_of_ranks(own[self.rank], received, self.rank, self.means[self.rank], self.squares)
        self.meet_again()

    def gather(self) -> None:
        """Step 4."""
        for rank in self.others() if self.whole is self.gradients[self.rank] else range(self.n_ranks):
            self.whole[rank].copy_(self.means[rank])


def fill_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """The parameters in buckets of at most so many bytes, in order; a larger parameter has a bucket of its own."""
    buckets: list[list[nn.Parameter]] = []
    size = 0.0
    for p in parameters:
        if not buckets or size + p.nbytes > bucket_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(p)
        size += p.nbytes
    return buckets


def make_means(
    buckets: list[list[nn.Parameter]], sent: torch.dtype, places: MakePlaces
) -> tuple[list[MeanByCopies], list[Tensor], int]:
    """A mean for each bucket; for each rank the memory of its parts' sums of squares;
    and the bytes of memory on this GPU that other ranks read.

    Gradients that travel in float32 become their means where they were put.
    """
    n_ranks, device = dist.get_world_size(), buckets[0][0].device
    parts = [-(-sum(p.numel() for p in bucket) // (n_ranks * ALIGNED)) * ALIGNED for bucket in buckets]
    gradients, meet = places(n_ranks * sum(parts), sent, device)
    n_wide = 0 if sent == torch.float32 else sum(parts)
    others, meet_again = places(n_wide + sum(map(n_squares, parts)), torch.float32, device)
    squares = [flat[n_wide:] for flat in others]
    own_squares = squares[dist.get_rank()].split([n_squares(n) for n in parts])
    n_bytes, means, start = gradients[0].nbytes + others[0].nbytes, [], 0
    for i, (bucket, n) in enumerate(zip(buckets, parts, strict=True)):
        rows = [flat[n_ranks * start :][: n_ranks * n].view(n_ranks, n) for flat in gradients]
        wide = (
            [row[rank] for rank, row in enumerate(rows)] if sent == torch.float32 else [x[start:][:n] for x in others]
        )
        means.append(MeanByCopies(bucket, rows, wide, own_squares[i], meet, meet_again))
        start += n
    return means, squares, n_bytes


class CopyDDP(nn.Module):
    """A module whose gradients are averaged by copies while backward still runs, used like ``lib.ddp.BucketedDDP``.

    The n-th bucket of one rank meets the n-th of every other, whichever parameters each rank used:
    a bucket starts when its gradients are ready and all buckets before it have started.
    After `finish_gradient_synchronization` a gradient is a view of memory that the next backward overwrites.

    Args:
        module: A model with float32 parameters on one GPU.
        bucket_mb: Size of a bucket in 2**20 bytes; 0 gives each parameter its own.
        sent: The dtype in which gradients travel to the rank that computes their mean.
            The mean is computed in float32 and travels so.
            A weight's gradient loses nothing in bf16 if it comes from one product in bf16.
        places: Returns memory that all ranks can read, and a function that waits for all ranks.
            No such function is called twice in a row, so each may reset itself while the ranks meet in another.

    Attributes:
        peers_bytes: Memory on this GPU that the others read; the caching allocator does not count it.

    Raises:
        RuntimeError: in a backward without ``no_sync()`` that makes a gradient ready a second time in one round.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        sent: torch.dtype = torch.float32,
        places: MakePlaces = in_peers_memory,
    ):
        super().__init__()
        self.module, self.is_paused = module, False
        broadcast_parameters(module)
        parameters = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.means, self.squares, self.peers_bytes = make_means(
            fill_buckets(parameters, bucket_mb * 2**20), sent, places
        )
        self.end, self.meet_at_end = places(1, torch.float32, parameters[0].device)
        self.received = torch.empty_like(max((mean.gradients[0] for mean in self.means), key=Tensor.numel))
        self.stream = torch.cuda.Stream(priority=-1)
        self.begin()
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.on_ready)

    def begin(self) -> None:
        """Begin a round: no gradient is ready, and no bucket has started."""
        self.ready: set[nn.Parameter] = set()
        self.started: list[torch.cuda.Event] = []
        self.reduced: torch.cuda.Event | None = None
        self.kept: list[Tensor] = []

    def on_ready(self, p: nn.Parameter) -> None:
        """Called by autograd during backward, when a gradient is complete."""
        if self.is_paused:
            return
        if p in self.ready:
            raise RuntimeError(
                "a second backward before the first one's gradients were used; use no_sync() for the first"
            )
        self.ready.add(p)
        while len(self.started) < len(self.means) and self.ready.issuperset(self.means[len(self.started)].parameters):
            self.start_next()

    @torch.no_grad()
    def start_next(self) -> None:
        """Begin to average the next bucket's gradients, on a stream of its own; every rank must take the same steps."""
        mean = self.means[len(self.started)]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.kept += mean.put_gradients()
            mean.reduce(self.received)
            self.reduced = self.stream.record_event()
            mean.gather()
            self.started.append(self.stream.record_event())

    def start_others(self) -> None:
        """Begin to average the buckets that have not begun, because backward did not reach all of their parameters."""
        while len(self.started) < len(self.means):
            self.start_next()

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of all means, which is known before the last of them are complete.

        It is the root of the sum of all parts' squares. A norm that is summed in another order, such as
        ``torch.nn.utils.get_total_norm``, can differ from it in the last bits, and so do the weights that it clips.
        """
        self.start_others()
        assert self.reduced is not None
        torch.cuda.current_stream().wait_event(self.reduced)
        return torch.cat(self.squares).sum().sqrt()

    def forward(self, *args, **kwargs):
        if self.ready and torch.is_grad_enabled():  # a round that was left open, by an exception for example
            list(self.finished())
        return self.module(*args, **kwargs)

    def finished(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each bucket in turn; the current stream waits for the means that it yields."""
        self.start_others()
        for mean, event in zip(self.means, self.started, strict=True):
            torch.cuda.current_stream().wait_event(event)
            yield mean.parameters
        with torch.cuda.stream(self.stream):
            self.meet_at_end()  # before the next gradients are put where a slower rank may still read means
        torch.cuda.current_stream().wait_stream(self.stream)
        self.begin()

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: the current stream then waits until every gradient is the mean.
        Inside ``no_sync()`` it does nothing.
        """
        if not self.is_paused:
            list(self.finished())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing in a backward inside: gradients add up on each rank."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class InTurn:
    """An optimizer for each bucket, which updates it as soon as its gradients are the means,
    while others are on their way.

    Args:
        model: The model after whose backward ``step`` is called, without ``finish_gradient_synchronization``.
        make: Makes the optimizer of a list of parameters.
    """

    def __init__(self, model: CopyDDP, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        self.model, self.optimizers = model, [make(mean.parameters) for mean in model.means]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Update every parameter when its mean is there."""
        for _, optimizer in zip(self.model.finished(), self.optimizers, strict=True):
            optimizer.step()
