"""Inputs that many tests draw."""

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, the same for a seed on every machine, and in every dtype up to rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
