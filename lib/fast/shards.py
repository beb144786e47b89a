"""Chapter 12's ``FullySharded`` between the GPUs of one host: copy engines move its bytes, not multiprocessors.

NCCL's all-gather and reduce-scatter are kernels, and while they run they hold multiprocessors that the products want.
Here, as in ``lib.fast.copies``, ranks read each other's memory, and only copies and a few short kernels are left:

1. when the model is called, each rank puts all its shards where the others can read them, in the dtype of computing;
2. a gather copies a unit's shards from all ranks, on a stream of its own, in forward and again in backward;
3. a unit's gradient is put where the others can read it, on another stream; each rank copies its part of all ranks'
   gradients and computes the mean, in float32 and in the order of the ranks.

Shards change only between two calls of the model.
So the ranks meet twice before a forward, and no gather has to wait for another rank.
They also meet twice for each gradient.
A meeting is a kernel of a single thread block.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.fast.copies import ALIGNED, MakePlaces, in_peers_memory
from lib.fast.parts.means import mean_of_ranks
from lib.fsdp import FlatShard, FullySharded


class Window:
    """Memory on each rank's GPU that all ranks read, and that its owner fills again and again.

    Args:
        n: Numbers on each rank.
        dtype: Their dtype.
        device: This rank's GPU.
        places: See `lib.fast.copies.CopyDDP`.

    Attributes:
        of: The memory of rank 0, 1, ...
    """

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device, places: MakePlaces):
        self.of, self._meet = places(n, dtype, device)
        self._kept, self._meet_again = places(1, dtype, device)  # two meetings, so that none is used twice in a row

    @contextmanager
    def filling(self) -> Iterator[Tensor]:
        """Fill this rank's memory on the current stream: every rank must do so the same number of times.

        When the body begins, each rank's current stream has come here, so what it has waited for is read.
        After the context all ranks have filled theirs.
        """
        self._meet()
        yield self.of[dist.get_rank()]
        self._meet_again()


class CopiedShard(FlatShard):
    """A ``FlatShard`` that is gathered and reduced by copies, once a `Peers` has been made of all shards of a model.

    Attributes:
        peers: What it shares with the other shards.
        narrow: For each rank the memory ``[S]`` of its shard, in the dtype of ``full``.
    """

    shard: nn.Parameter
    full: Tensor
    is_whole: bool
    peers: "Peers"
    narrow: list[Tensor]
    _gathered: Any = None  # the end of a gather that the current stream has not waited for
    _reduced: Any = None  # the end of a reduction, its result, and the gradient that must live until then

    @torch.no_grad()
    def start_gather(self) -> None:
        """Allocate ``full`` and start to copy all ranks' shards into it. If it is whole, or on its way, do nothing."""
        if self.is_whole:
            return
        self.is_whole = True
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        rows, stream = self.full.data.view(len(self.narrow), -1), self.peers.gathering
        stream.wait_stream(torch.cuda.current_stream())  # what used this memory before, and the refresh
        with torch.cuda.stream(stream):
            for rank in self.peers.order:
                rows[rank].copy_(self.narrow[rank])
            self._gathered = stream.record_event()

    def finish_gather(self) -> None:
        """Let the current stream wait until ``full`` holds all values; start the gather if it has not been started."""
        self.start_gather()
        if self._gathered is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
            self._gathered = None

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Take ``full.grad``, set it to None, and start to compute this rank's part of its mean over the ranks."""
        gradient, self.full.grad = self.full.grad, None
        assert gradient is not None
        mean, stream = torch.empty_like(self.shard), self.peers.reducing  # allocated for the stream that will use it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.peers.reduce(gradient, mean)
            self._reduced = (stream.record_event(), mean, gradient)

    def finish_reduce(self) -> None:
        """Let the current stream wait, then add the mean to ``shard.grad``. If nothing is on its way, do nothing."""
        if self._reduced is not None:
            event, mean, _ = self._reduced
            torch.cuda.current_stream().wait_event(event)
            self._reduced = None
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)


class Peers:
    """What all shards of a model share: memory that every rank can read, and two streams.

    Args:
        flats: The shards, in the same order on all ranks; gets each one's ``peers`` and ``narrow``.
        places: See `lib.fast.copies.CopyDDP`.

    Attributes:
        order: All ranks, this one last, so that no two read from the same one at a time.
        values: Each rank's shards, one after the other.
        gradients: Each rank's gradient of one unit.
        gathering, reducing: The streams of gathers and of reductions.

    Raises:
        ValueError: units would be gathered in different dtypes.
    """

    def __init__(self, flats: list[CopiedShard], places: MakePlaces):
        (dtype, *others), device = {flat.full.dtype for flat in flats}, flats[0].full.device
        if others:
            raise ValueError(f"units in {dtype} and in {others[0]} cannot share memory: expected one dtype for all")
        self.flats = flats
        self.rank, n_ranks = dist.get_rank(), dist.get_world_size()
        self.order = [(self.rank + i) % n_ranks for i in range(1, n_ranks + 1)]
        sizes = [len(flat.shard) for flat in flats]
        starts = list(accumulate((-(-n // ALIGNED) * ALIGNED for n in sizes), initial=0))
        self.values = Window(starts.pop(), dtype, device, places)
        for flat, start, n in zip(flats, starts, sizes, strict=True):
            flat.peers, flat.narrow = self, [values[start : start + n] for values in self.values.of]
        n_most = n_ranks * max((len(flat.shard) for flat in flats if flat.shard.requires_grad), default=1)
        self.gradients = Window(n_most, dtype, device, places)
        self.received = torch.empty(n_most, dtype=dtype, device=device)
        self.gathering, self.reducing = (torch.cuda.Stream(priority=-1) for _ in range(2))

    @torch.no_grad()
    def refresh(self) -> None:
        """Show the other ranks what this rank's shards hold now; the current stream waits until all have done so."""
        for flat in self.flats:
            if flat.is_whole:
                flat.finish_gather()  # a rank that comes to the meeting reads no more
        shards = [flat.shard.detach() for flat in self.flats]
        with self.values.filling():
            torch._foreach_copy_([flat.narrow[self.rank] for flat in self.flats], shards)  # casts all in one kernel

    def reduce(self, gradient: Tensor, mean: Tensor) -> None:
        """On the current stream: this rank's part ``mean`` ``[S]`` of the mean of all ranks' gradients ``[R * S]``."""
        n, n_part = len(gradient), len(mean)
        with self.gradients.filling() as own:
            own[:n].copy_(gradient)
        parts = [row[:n].view(-1, n_part)[self.rank] for row in self.gradients.of]
        received = self.received[:n].view(-1, n_part)
        for rank in self.order[:-1]:
            received[rank].copy_(parts[rank])
        mean_of_ranks(parts[self.rank], received, self.rank, mean)


class FullyShardedByCopies(FullySharded):
    """Chapter 12's ``FullySharded`` over all ranks, by copies; used in the same way.

    Forward shows the other ranks the values that the shards have when it begins; its backward gathers these again.

    Args:
        module: A model on one GPU; all its parameters have one dtype unless ``param_dtype`` is given.
        units, param_dtype: See ``FullySharded``. The mean of gradients is computed in float32 whatever their dtype.
        places: See `lib.fast.copies.CopyDDP`.
    """

    make_flat = CopiedShard
    _is_inside = False  # the root's forward is running

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None = None,
        param_dtype: torch.dtype | None = None,
        places: MakePlaces = in_peers_memory,
    ):
        super().__init__(module, units, param_dtype)
        self.peers = Peers([flat for flats in self.flats for flat in flats], places)

    def before_forward(self, i: int) -> None:
        """Before the root's forward, or that of a unit that is called alone, show the others this rank's shards."""
        if not self._is_inside:
            self.peers.refresh()
        self._is_inside = self._is_inside or i == 0
        super().before_forward(i)

    def after_forward(self, i: int) -> None:
        """As in ``FullySharded``."""
        super().after_forward(i)
        self._is_inside = self._is_inside and i != 0
