"""What the tests of fast paths share: where kernels run, their numbers and how these are compared, and a small ViT."""

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from lib.fast.parts.one_row import one_row
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON

WHY = "kernels are compiled here; the interpreter runs them where there is no GPU" if HAS_TRITON else NO_TRITON
PLACES = (
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason=WHY)),
    pytest.param("cuda", marks=pytest.mark.gpu),
)


SMALL_VIT: dict[str, Any] = {
    "image_size": 8, "patch_size": 4, "n_classes": 5, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24
}  # fmt: skip


def on_both(function):
    """The same test in the interpreter and, where there is one, on a GPU."""
    return pytest.mark.parametrize("device", PLACES)(function)


def normal(*shape, device, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def close(found, expected, atol=2e-5, rtol=1e-4):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def check_one_row(x, weight, wide, norm):
    """``one_row`` of a weight with ten rows, perhaps narrow: alone, behind a norm, gated, and added to a stream."""
    gain = norm.weight.data
    close(one_row(x, weight), linear(x, wide))
    close(one_row(x, weight, gain, 1e-3), linear(norm(x), wide), atol=1e-4)
    gated = silu(linear(norm(x), wide[:5])) * linear(norm(x), wide[5:])
    close(one_row(x, weight, gain, 1e-3, gated=True), gated, atol=1e-3)
    stream = normal(1, 10, device=x.device, seed=3)
    expected = stream + linear(x, wide)
    assert one_row(x, weight, into=stream) is stream
    close(stream, expected)
