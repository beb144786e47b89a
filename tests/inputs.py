"""Random inputs that many tests share."""

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers: the same seed gives the same numbers on every machine and, up to rounding,
    in every dtype.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
