"""Means of gradients over the GPUs of one host, whose bytes are moved by copy engines and not by multiprocessors.

NCCL's all-reduce is a kernel: while it runs, it holds multiprocessors that backward wants too.
A GPU also has a few copy engines, which do nothing but move bytes, also from the memory of another GPU.
So here the mean of a gradient of n numbers on R ranks is made of copies and a few short kernels:

1. each rank puts its gradient where the others can read it;
2. it copies the r-th part of every rank's gradient, n / R numbers each, where r is its own rank;
3. it computes the mean of these R parts;
4. it copies the other parts of the mean from the ranks that computed them.

These are a reduce-scatter and an all-gather, as in a ring, and a rank receives as many numbers:
2 (R - 1) / R times its gradient's.
Before steps 2 and 4 the ranks meet: each waits for the others in a kernel of a single thread block.
A wait that holds no multiprocessor was tried too, and made no step shorter (``lib.bench.yardstick.parts``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp import broadcast_parameters

ALIGNED = 64  # numbers: each part begins at a multiple of 128 bytes, also in bf16
Places = tuple[list[Tensor], Callable[[], None]]


def allocate_shared(n: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Any]:
    """Memory for ``n`` numbers on each rank's GPU, which the GPUs of all other ranks can read and write.

    Returns:
        The memory of rank 0, 1, ..., as tensors, and PyTorch's handle to it.
        Both live as long as this rank's own tensor.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
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


def in_peers_memory(n: int, dtype: torch.dtype, device: torch.device) -> Places:
    """`allocate_shared`, and a function that lets the current stream wait until those of all ranks
    have reached the same call.
    """
    places, handle = allocate_shared(n, dtype, device)
    return places, handle.barrier


class MeanByCopies:
    """The mean over ranks of one gradient, again and again, in the same memory.

    Args:
        n: Number of elements of the gradient.
        device: The GPU that holds it.
        sent: The dtype in which gradients travel to the rank that computes their mean.
            The mean is computed in float32 and travels so.
        places: Returns memory that all ranks can read, and a function that waits for all ranks.
            Neither of the two functions of a mean is called twice in a row,
            so each may reset itself while the ranks meet in the other.
    """

    def __init__(
        self,
        n: int,
        device: torch.device,
        sent: torch.dtype = torch.float32,
        places: Callable[[int, torch.dtype, torch.device], Places] = in_peers_memory,
    ):
        self.n, self.rank, self.n_ranks = n, dist.get_rank(), dist.get_world_size()
        self.n_part = -(-n // (self.n_ranks * ALIGNED)) * ALIGNED
        gradients, self.meet = places(self.n_ranks * self.n_part, sent, device)
        self.gradients = [place.view(self.n_ranks, self.n_part) for place in gradients]
        self.means, self.meet_again = places(self.n_part, torch.float32, device)
        self.peers_bytes = self.gradients[self.rank].nbytes + self.means[self.rank].nbytes
        self.received = torch.empty(self.n_ranks, self.n_part, dtype=sent, device=device)

    def __call__(self, gradient: Tensor) -> None:
        """Replace a contiguous float32 tensor by its mean over the ranks; every rank must take the same steps."""
        in_turn = [(self.rank + i) % self.n_ranks for i in range(self.n_ranks)]  # no two ranks read from the same one
        self.gradients[self.rank].view(-1)[: self.n].copy_(gradient.view(-1))
        self.meet()
        for rank in in_turn:
            self.received[rank].copy_(self.gradients[rank][self.rank])
        torch.mean(self.received, 0, dtype=torch.float32, out=self.means[self.rank])
        self.meet_again()
        parts = gradient.view(-1).split(self.n_part)
        for rank in in_turn:
            if rank < len(parts):
                parts[rank].copy_(self.means[rank][: len(parts[rank])])


class CopyDDP(nn.Module):
    """A module whose gradients are averaged by copies while backward still runs, used like ``lib.ddp.OverlapDDP``.

    Args:
        module: A model of a few large parameters, such as ``lib.bench.yardstick.replicas.RowViT``.
            It is called in the same way on all ranks, so that gradients become ready in the same order.
        sent: See ``MeanByCopies``. A weight's gradient loses nothing in bf16 if it comes from one product in bf16.
        places: Returns memory that all ranks can read.

    Attributes:
        peers_bytes: Memory on this GPU that the others read; the caching allocator does not count it.
    """

    def __init__(
        self,
        module: nn.Module,
        sent: torch.dtype = torch.bfloat16,
        places: Callable[[int, torch.dtype, torch.device], Places] = in_peers_memory,
    ):
        super().__init__()
        self.module, self.is_paused = module, False
        broadcast_parameters(module)
        self.stream = torch.cuda.Stream()
        self.means = {
            p: MeanByCopies(p.numel(), p.device, sent, places) for p in module.parameters() if p.requires_grad
        }
        self.peers_bytes = sum(mean.peers_bytes for mean in self.means.values())
        self.started: dict[nn.Parameter, torch.cuda.Event] = {}
        for p in self.means:
            p.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, p: nn.Parameter) -> None:
        """Called by autograd during backward, when a gradient is complete."""
        if not self.is_paused:
            self.start(p)

    @torch.no_grad()
    def start(self, p: nn.Parameter) -> None:
        """Begin to average a parameter's gradient, on a stream of its own."""
        if p in self.started:
            raise RuntimeError(
                "a second backward before the first one's gradients were used; use no_sync() for the first"
            )
        assert p.grad is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.means[p](p.grad)
            self.started[p] = self.stream.record_event()

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.finish_gradient_synchronization()  # of a round that was left open, by an exception for example
        return self.module(*args, **kwargs)

    def finished(self) -> Iterator[nn.Parameter]:
        """The parameters in the order in which their averaging began; the current stream waits for each one's mean."""
        started, self.started = self.started, {}
        for p, event in started.items():
            torch.cuda.current_stream().wait_event(event)
            yield p

    def finish_gradient_synchronization(self) -> None:
        """Call it after backward: the current stream then waits until every gradient is the mean."""
        list(self.finished())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing in a backward inside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class InTurn:
    """An optimizer for each parameter, which updates it as soon as its gradient is the mean,
    while others are on their way.

    Args:
        model: The model after whose backward ``step`` is called, without ``finish_gradient_synchronization``.
        make: Makes the optimizer of a list of parameters.
    """

    def __init__(self, model: CopyDDP, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        self.model, self.optimizers = model, {p: make([p]) for p in model.means}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Update every parameter whose averaging has begun.

        Raises:
            RuntimeError: another parameter has a gradient, from a backward under ``no_sync`` for example.
        """
        left = {p for p in self.optimizers if p.grad is not None}
        for p in self.model.finished():
            self.optimizers[p].step()
            left.discard(p)
        if left:
            raise RuntimeError(f"{len(left)} of {len(self.optimizers)} parameters have gradients that nobody averaged")
