"""The witness of chapter 14: what it sees of a kernel, and that it leaves Triton's interpreter as it was."""

import pytest
import torch

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton
from lib.given.kernels.trace import trace

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON),
    pytest.mark.skipif(HAS_TRITON and not INTERPRETED, reason="there is nothing to see of compiled kernels"),
    pytest.mark.time_limit(60),  # the first imports Triton
]


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < n))


@triton.jit
def count_kernel(x, total, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total + index % 2, tl.load(x + index, mask=index < n, other=0.0), mask=index < n)


@triton.jit
def swap_kernel(place):
    tl.atomic_cas(place, 1, 2)


@triton.jit
def dot_kernel(x, out, IEEE: tl.constexpr):
    index = tl.arange(0, 16)
    place = index[:, None] * 16 + index[None, :]
    tile = tl.load(x + place)
    if IEEE:
        product = tl.dot(tile, tile, input_precision="ieee")
    else:
        product = tl.dot(tile, tile)
    tl.store(out + place, product.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_masked_places_without_other_are_nan(dtype):
    x, out = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    with trace() as seen:
        copy_kernel[(1,)](x, out, 5, BLOCK=8)
    assert out.isnan().tolist() == [False] * 5 + [True] * 3
    assert out[:5].tolist() == [1.0] * 5
    assert (seen.bytes_loaded, seen.bytes_stored) == (5 * x.element_size(), 8 * x.element_size())
    copy_kernel[(1,)](x, out, 5, BLOCK=8)
    assert out.tolist() == [1.0] * 5 + [0.0] * 3  # what the interpreter does by itself


def test_masked_integers_are_left_alone():
    out = torch.ones(4, dtype=torch.int32)
    with trace():
        copy_kernel[(1,)](torch.ones(4, dtype=torch.int32), out, 3, BLOCK=4)
    assert out.tolist() == [1, 1, 1, 0]


def test_atomics_are_loads_and_stores():
    x, total = torch.arange(10.0), torch.zeros(2)
    with trace() as seen:
        count_kernel[(3,)](x, total, 10, BLOCK=4)
    assert total.tolist() == [20.0, 25.0]
    assert seen.n_atomics == 3
    assert seen.count(total, stores=True).tolist() == seen.count(total, stores=False).tolist()
    assert seen.bytes_stored == 40
    assert seen.bytes_loaded == 80
    with trace() as seen:
        count_kernel[(3,)](x, total[:1], 10, BLOCK=4)
    assert seen.outside(stores=True) == 5


def test_a_compared_exchange_is_seen():
    place = torch.ones(1, dtype=torch.int32)
    with trace() as seen:
        swap_kernel[(1,)](place)
    assert place.tolist() == [2]
    assert (seen.n_atomics, seen.bytes_loaded, seen.bytes_stored) == (1, 4, 4)


def test_precision_of_products_is_seen():
    x, out = torch.ones(16, 16), torch.zeros(16, 16)
    with trace() as seen:
        dot_kernel[(1,)](x, out, IEEE=True)
        dot_kernel[(1,)](x, out, IEEE=False)
        dot_kernel[(1,)](x.half(), out, IEEE=True)
    assert seen.dots == [("fp32", "IEEE"), ("fp32", "TF32"), ("fp16", "IEEE")]


def test_the_interpreter_is_left_as_it_was():
    from triton.runtime import interpreter

    before = dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__
    with trace():
        assert dict(vars(interpreter.InterpreterBuilder)) != before[0]
    assert (dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__) == before
