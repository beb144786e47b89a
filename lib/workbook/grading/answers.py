"""Decides whether two answers are the same, for a diagnosis."""

import math
from collections.abc import Mapping
from typing import Any


def is_array(value: object) -> bool:
    """Whether a value is a tensor or an array."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def same_answer(a: Any, b: Any) -> bool:
    """Whether two wrong answers consist of the same values."""
    if a is None or b is None:
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(same_answer(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same_answer(x, y) or x is y is None for x, y in zip(a, b, strict=True))
    if is_array(a) and is_array(b):
        import torch

        a, b = torch.as_tensor(a).detach().cpu(), torch.as_tensor(b).detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        wide = torch.complex128 if a.is_complex() else torch.float64
        return torch.allclose(a.to(wide), b.to(wide), rtol=1e-4, atol=1e-6, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) or (a != a and b != b)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def further_apart(a: Any, b: Any, gap: float | None) -> bool:
    """Whether two arrays differ by more than a fifth of ``gap``, so that they cannot be the same mistake."""
    if gap is None or not (is_array(a) and is_array(b)) or not math.isfinite(gap):
        return False
    import torch

    a, b = (torch.as_tensor(value).detach().cpu().double() for value in (a, b))
    alike = (a == b) | (a.isnan() & b.isnan())  # equal infinities differ by 0, but their difference is NaN
    return not float((a - b).masked_fill(alike, 0).abs().max()) <= gap / 5
