"""Parts of chapter 18 that are given: equal parts and equal shares, an exchange of rows,
and a message to the next rank.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lib.given.kernels.tiles import check_shapes

LAYOUTS = ("contiguous", "zigzag")
_compared: set[tuple[str, int]] = set()


def equal_part(size: int, parts: int, what: str) -> int:
    """``size // parts``.

    Raises:
        ValueError: ``parts`` is below 1 or does not divide ``size``;
            the message names ``what`` and shows the arithmetic.
    """
    if parts < 1:
        raise ValueError(f"{what} = {size} cannot be cut into {parts} parts: expected at least 1")
    if size % parts:
        arithmetic = f"{size} = {parts} x {size // parts} + {size % parts}"
        raise ValueError(f"{what} = {size} cannot be cut into {parts} equal parts: {arithmetic}")
    return size // parts


def check_shares(length: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Make sure that all ranks hold equally many positions. Every rank calls it, and an error is raised on every rank.

    The ranks exchange 8 bytes, which the ledger does not list: they check the call and belong to no algorithm.
    On a GPU they are exchanged only once for each length,
    because reading the result makes the host wait for the device.

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


def check_ring(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup | None) -> None:
    """Make sure that every rank may begin a ring. Every rank calls it.

    Raises:
        ValueError: shapes or dtypes do not fit, the ranks' shares have different lengths, the layout is unknown,
            or a share cannot be halved for "zigzag".
    """
    for tensor in (q, k, v):  # before what only one rank may find wrong: the others would wait for it
        check_shares(tensor.shape[-2], tensor.device, group)
    check_shapes(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} queries and {k.shape[-2]} keys on a rank: expected the same positions")
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: expected one of {LAYOUTS}")
    if layout == "zigzag":
        equal_part(q.shape[-2], 2, "a rank's zigzag share")


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _Exchange.apply(grad, ctx.group), None


def exchange(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Row i of ``x`` goes to rank i, and row i of the result comes from rank i:
    ``dist.all_to_all_single`` with a gradient.

    ``x`` has as many rows as there are ranks. Backward is one more all-to-all, which takes the gradients back.
    """
    return _Exchange.apply(x, group)


def pass_on(tensor: Tensor, into: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Start to send ``tensor`` to the next rank, and to receive the previous rank's into ``into``;
    the last rank's next is the first.

    Both messages are started together, which NCCL needs.

    Returns:
        A function that waits for both and returns ``into``. Leave both tensors alone until then.
    """
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    receive = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % n_ranks)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n_ranks)
    handles = dist.batch_isend_irecv([receive, send])

    def arrived() -> Tensor:
        for handle in handles:
            handle.wait()
        return into

    return arrived
