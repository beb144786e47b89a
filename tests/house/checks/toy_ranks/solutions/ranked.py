"""What several ranks do together."""

import torch
import torch.distributed as dist


def total(value: float) -> float:
    """The sum of every rank's value, on every rank. (Exercise)

    Size: 5 minutes, difficulty 1, core.
    """
    ### BEGIN SOLUTION
    buffer = torch.tensor(value)
    dist.all_reduce(buffer)
    return buffer.item()
    ### END SOLUTION
