"""Chapter 12's shards with copies of each shard."""

from typing import Any

import torch.distributed as dist

from lib.fsdp import FullySharded


class HybridSharded(FullySharded):
    """Chapter 12's ``FullySharded`` with copies: each gradient that has been scattered is then averaged over them,
    while backward goes on.

    Args:
        copies: The ranks that hold the same shard.
        others: Arguments of ``FullySharded``.

    Attributes:
        pieces: For a flat shard that holds experts, which have fewer copies: its parts,
            and the ranks over which each is averaged.
    """

    def __init__(self, *others: Any, copies: dist.ProcessGroup, **settings: Any):
        super().__init__(*others, **settings)
        self.copies, self.is_last = copies, True
        self.means: dict[Any, list[dist.Work]] = {}
        self.pieces: dict[Any, list[tuple[slice, dist.ProcessGroup]]] = {}

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch; averages start only in the last one."""
        if self.reducing is not None:  # left by the previous micro-batch: its mean must wait for this one's gradient
            self.reducing.finish_reduce()
            self.reducing = None
        self.is_last = is_last

    def after_gradient(self, flat: Any) -> None:
        scattered = self.reducing
        super().after_gradient(flat)
        if scattered is not None and self.is_last:
            self.start_mean(scattered)

    def start_mean(self, flat: Any) -> None:
        """Start to average a shard's gradient, unless that has been done in this step."""
        if flat not in self.means and flat.shard.grad is not None:
            grad = flat.shard.grad.div_(dist.get_world_size(self.copies))
            pieces = self.pieces.get(flat, [(slice(None), self.copies)])
            self.means[flat] = [dist.all_reduce(grad[part], group=group, async_op=True) for part, group in pieces]

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for flat in (flat for flats in self.flats for flat in flats):
            self.start_mean(flat)
        for work in (work for works in self.means.values() for work in works):
            work.wait()
        self.means.clear()
