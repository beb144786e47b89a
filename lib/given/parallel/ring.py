"""Parts of chapter 18 that are given: cutting a length into equal parts, comparing shares, and passing a tensor to the next rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")
_compared: set[tuple[str, int]] = set()


def equal_part(size: int, parts: int, what: str) -> int:
    """``size // parts``.

    Raises:
        ValueError: ``parts`` is below 1 or does not divide ``size``; the message names ``what`` and shows the arithmetic.
    """
    if parts < 1:
        raise ValueError(f"{what} = {size} cannot be cut into {parts} parts: expected at least 1")
    if size % parts:
        arithmetic = f"{size} = {parts} x {size // parts} + {size % parts}"
        raise ValueError(f"{what} = {size} cannot be cut into {parts} equal parts: {arithmetic}")
    return size // parts


def check_shares(length: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Make sure that all ranks hold equally many positions. Every rank calls it, and an error is raised on every rank.

    The ranks exchange 8 bytes, which the ledger does not list: they check the call and belong to no algorithm. On a GPU they are
    exchanged only once for each length, because reading the result makes the host wait for the device.

    Raises:
        ValueError: the shares differ; the message shows all of them and the arithmetic.
    """
    n_ranks = dist.get_world_size(group)
    group = group or dist.group.WORLD
    assert group is not None
    key = group.group_name, length
    if n_ranks == 1 or (device.type != "cpu" and key in _compared):
        return
    mine = torch.tensor([length], device=device)
    lengths = [torch.empty_like(mine) for _ in range(n_ranks)]
    group.allgather([lengths], [mine]).wait()
    shares = [int(share) for share in lengths]
    if len(set(shares)) > 1:
        total, sizes = sum(shares), " + ".join(map(str, shares))
        arithmetic = f"{total} = {n_ranks} x {total // n_ranks} + {total % n_ranks}"
        raise ValueError(
            f"{n_ranks} ranks hold {sizes} positions, and {arithmetic}: expected equal shares on all ranks"
        )
    _compared.add(key)


def pass_on(tensor: Tensor, into: Tensor, group: dist.ProcessGroup | None) -> list[Any]:
    """Start to send ``tensor`` to the next rank, and to receive the previous rank's into ``into``; the last rank's next is the first.

    Both messages are started together, which NCCL needs. Leave both tensors alone until ``wait()`` of every returned handle is over.
    """
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    receive = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % n_ranks)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n_ranks)
    return dist.batch_isend_irecv([receive, send])
