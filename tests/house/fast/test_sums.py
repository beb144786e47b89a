"""The sum over the rows that programs leave."""

import pytest
import torch

from lib.fast.parts.sums import add_rows
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON

WHY = "kernels are compiled here; the interpreter runs them where there is no GPU" if HAS_TRITON else NO_TRITON
SHAPES = [(300, 40), (129, 3, 7), (1, 16), (0, 5), (4, 0)]


def expect_sum(x):
    found = add_rows(x)
    assert found.shape == x.shape[1:]
    torch.testing.assert_close(found.double(), x.double().sum(0), atol=1e-4, rtol=1e-5)
    assert torch.equal(found, add_rows(x))


@pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason=WHY)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rows_of_any_shape_are_added(shape):
    expect_sum(torch.randn(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 2, 16, 64), (1052, 4096)])
def test_on_a_gpu_the_rows_of_any_shape_are_added(shape):
    expect_sum(torch.randn(shape, device="cuda"))
