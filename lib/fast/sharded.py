"""Chapter 12's ``FullySharded`` on the GPUs of one host: copy engines gather the parameters and scatter the gradients.

Read ``lib.fast.copies`` first.
All ranks can read a copy of each rank's shards, in the dtype in which the model computes.
It is made anew when the root begins its forward, and the ranks meet before and after that.
So a gather is R copies and nothing else: no kernel, and no rank waits for another.
Gradients are scattered as in a mean by copies, without its last step: a rank puts its gradient where the others can
read it, the ranks meet, and each one copies its part of every rank's gradient and computes the mean of the parts in
float32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.fast.copies import MakePlaces, in_peers_memory
from lib.fast.parts.means import mean_of_ranks
from lib.fsdp import FlatShard, FullySharded

N_SLOTS = 2
"""Gradients for which there is room: when a slot is used again, all ranks have met since they have read it."""


class CopiedShard(FlatShard):
    """A ``FlatShard`` that a `Wires` gathers and reduces.

    Attributes:
        wires: Set by `CopySharded`.
        everywhere: For each rank the memory in which it puts its shard, for all to read.
    """

    shard: nn.Parameter
    full: Tensor
    is_whole: bool
    wires: "Wires"
    everywhere: list[Tensor]
    gathering: torch.cuda.Event | None = None
    reducing: tuple[torch.cuda.Event, Tensor, Tensor] | None = None

    def start_gather(self) -> None:
        if not self.is_whole:
            self.is_whole = True
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = self.wires.gather(self.full.data, self.everywhere)

    def finish_gather(self) -> None:
        self.start_gather()
        if self.gathering is not None:
            torch.cuda.current_stream().wait_event(self.gathering)
            self.gathering = None

    def start_reduce(self) -> None:
        grad, self.full.grad = self.full.grad, None
        assert grad is not None
        mean = torch.empty_like(self.shard)
        self.reducing = self.wires.reduce(mean, grad), mean, grad  # both are kept until the copies are done

    def finish_reduce(self) -> None:
        if self.reducing is not None:
            event, mean, _ = self.reducing
            torch.cuda.current_stream().wait_event(event)
            self.reducing = None
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)


class Wires:
    """The memory and the streams through which the ranks exchange shards and gradients.

    Args:
        flats: All shards of a model, of one dtype, in the same order on all ranks.
        places: Returns memory that all ranks can read, and a function that waits for all ranks.
    """

    def __init__(self, flats: list[CopiedShard], places: MakePlaces):
        self.flats, (dtype,) = flats, {flat.full.dtype for flat in flats}
        self.rank, self.n_ranks, device = dist.get_rank(), dist.get_world_size(), flats[0].shard.device
        lengths = [len(flat.shard) for flat in flats]
        rows, self.meet_before = places(sum(lengths), dtype, device)
        self.kept, self.meet_after = places(1, dtype, device)
        cut = [row.split(lengths) for row in rows]
        for i, flat in enumerate(flats):
            flat.wires, flat.everywhere = self, [pieces[i] for pieces in cut]
        slots, self.meet = places(N_SLOTS * self.n_ranks * max(lengths), dtype, device)
        self.slots = [slot.view(N_SLOTS, -1) for slot in slots]
        self.received = torch.empty(self.n_ranks, max(lengths), dtype=dtype, device=device)
        self.n_reduced = 0
        self.gathers, self.reduces = (torch.cuda.Stream(priority=-1) for _ in range(2))

    def others(self) -> list[int]:
        """The other ranks, so that no two read from the same one at a time."""
        return [(self.rank + i) % self.n_ranks for i in range(1, self.n_ranks)]

    @torch.no_grad()
    def share(self) -> None:
        """Let all ranks read this rank's shards as they are now; every rank must call it."""
        self.reduces.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduces):
            self.meet_before()  # until all have read the former ones
            torch._foreach_copy_([flat.everywhere[self.rank] for flat in self.flats], [f.shard for f in self.flats])
            self.meet_after()
        self.gathers.wait_stream(self.reduces)

    def gather(self, full: Tensor, everywhere: list[Tensor]) -> torch.cuda.Event:
        """Start to fill ``full`` with every rank's shard, in rank order."""
        self.gathers.wait_stream(torch.cuda.current_stream())  # which may still use this memory for something else
        places = full.view(self.n_ranks, -1)
        with torch.cuda.stream(self.gathers):
            for rank in (self.rank, *self.others()):
                places[rank].copy_(everywhere[rank])
            return self.gathers.record_event()

    @torch.no_grad()
    def reduce(self, mean: Tensor, grad: Tensor) -> torch.cuda.Event:
        """Start to fill ``mean`` with this rank's part of the mean of all ranks' ``grad``."""
        n, slot = len(mean), self.n_reduced % N_SLOTS
        rows = [place[slot, : self.n_ranks * n].view(self.n_ranks, n) for place in self.slots]
        received = self.received.view(-1)[: self.n_ranks * n].view(self.n_ranks, n)
        self.n_reduced += 1
        self.reduces.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduces):
            rows[self.rank].view(-1).copy_(grad)
            self.meet()
            for rank in self.others():
                received[rank].copy_(rows[rank][self.rank])
            mean_of_ranks(rows[self.rank][self.rank], received, self.rank, mean)
            return self.reduces.record_event()


class CopySharded(FullySharded):
    """``FullySharded`` over all ranks, whose GPUs can read each other's memory.

    Args:
        others: Arguments of ``FullySharded``, without a group.
        places: Returns memory that all ranks can read, and a function that waits for all ranks.
    """

    make_flat = CopiedShard

    def __init__(self, *others: Any, places: MakePlaces = in_peers_memory, **settings: Any):
        super().__init__(*others, **settings)
        self.wires = Wires([flat for flats in self.flats for flat in flats], places)

    def before_forward(self, i: int) -> None:
        if i == 0:
            self.wires.share()
        super().before_forward(i)
