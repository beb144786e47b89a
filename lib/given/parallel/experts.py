"""Parts of chapter 19 that are given: a check of the experts chosen, rows that change ranks,
and the gradients that follow them back.
"""

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


def check_experts(experts: Int[Tensor, "..."], n_experts: int) -> None:
    """Reject experts that don't exist; reads them on a CPU only, so a GPU need not be waited for.

    Raises:
        ValueError: an expert is below 0 or is not below ``n_experts``; the message shows it.
    """
    if experts.device.type == "cpu" and experts.numel():
        for expert in experts.aminmax():
            if not 0 <= expert < n_experts:
                raise ValueError(f"expert {expert} of {n_experts}: expected from 0 to {n_experts - 1}")


def experts_per_rank(n_experts: int, group: dist.ProcessGroup | None = None) -> int:
    """Number of experts on each rank of a group.

    Raises:
        ValueError: the number of ranks does not divide ``n_experts``; the message shows both.
    """
    n_ranks = dist.get_world_size(group)
    if n_experts % n_ranks:
        raise ValueError(f"{n_experts} experts cannot be divided evenly among {n_ranks} ranks")
    return n_experts // n_ranks


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back the same way.

    Call it as ``AllToAll.apply(rows, send, receive, group)``: the first ``send[0]`` rows go to rank 0 of the group,
    the next ``send[1]`` to rank 1, and so on; ``receive`` says how many rows come from each.
    """

    @staticmethod
    def forward(
        ctx, rows: Float[Tensor, "a c"], send: list[int], receive: list[int], group=None
    ) -> Float[Tensor, "b c"]:
        """One all-to-all with uneven parts."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "b c"]):
        """One all-to-all, the other way round."""
        return AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None
