"""The witness of chapter 14: what it sees of a kernel, and that it leaves Triton's interpreter as it was."""

import linecache

import pytest
import torch

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, tl, triton
from lib.given.kernels.trace import OutOfBounds, trace
from tests.chapter_14.memory import kernel_line

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


# ---- accesses outside, and other failures ----------------------------------------------------------------------------


@triton.jit
def shifted_kernel(x, out, n, by, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        value = tl.load(x + index + by, mask=index + by < n)
    else:
        value = tl.load(x + index + by)
    tl.store(out + index, value)


@triton.jit
def chained_kernel(x, out):

    a = b = tl.load(x)
    tl.store(out, a + b)


@triton.jit
def misspelt_kernel(x, out):
    tl.store(out, tl.lode(x))


@triton.jit
def three(x):
    return x + tl.arange(0, 3)


@triton.jit
def calling_kernel(x, out):
    tl.store(out, tl.load(three(x)))


@triton.jit
def logarithm_kernel(out):
    zero = tl.zeros([4], tl.float32)
    tl.store(out + tl.arange(0, 4), tl.log2(zero))
    tl.store(out + 4 + tl.arange(0, 4), tl.log2(zero) - tl.log2(zero))


@pytest.mark.parametrize(
    ("by", "n", "masked", "sizes", "problem", "place"),
    [
        (0, 0, False, (6, 8), "tl.load reads beyond the end of x",
        "in program 1, at offset 6, and at 1 more; the last element of x is at 5"),
        (0, 7, True, (6, 8), "tl.load reads one element beyond the end of x",
        "in program 1, at offset 6; the last element of x is at 5"),
        (-1, 9, True, (8, 8), "tl.load reads one element before the beginning of x",
        "in program 0, at offset -1; the last element of x is at 7"),
        (0, 6, True, (6, 7), "tl.store writes one element beyond the end of out",
        "in program 1, at offset 7; the last element of out is at 6"),
        (10**9, 2 * 10**9, True, (6, 8), "tl.load reads outside of every tensor that the kernel was given",
        "in program 0"),
        (0, 9, True, (0, 8), "tl.load reads beyond the end of x",
        "in program 0, at offset 0, and at 3 more; the last element of x is at -1"),
    ],
)  # fmt: skip
def test_an_access_outside_is_stopped_and_named(by, n, masked, sizes, problem, place):
    buffers = [torch.zeros(64)[16 : 16 + size] for size in sizes]
    with pytest.raises(OutOfBounds) as caught, trace(stop_outside=True):
        shifted_kernel[(2,)](*buffers, n, by, BLOCK=4, MASKED=masked)
    assert (caught.value.problem, caught.value.place) == (problem, place)
    operation = "tl.store" if "store" in problem else "tl.load"
    assert operation in kernel_line(caught.value)
    assert kernel_line(caught.value).startswith("tests/house/given/test_triton_trace.py:")


def test_an_atomic_outside_is_stopped():
    with pytest.raises(OutOfBounds, match="writes one element beyond the end of total"), trace(stop_outside=True):
        count_kernel[(3,)](torch.arange(10.0), torch.zeros(4)[:1], 10, BLOCK=4)


def test_gaps_and_ends_of_a_strided_tensor_are_inside():
    with trace(stop_outside=True) as seen:
        shifted_kernel[(2,)](torch.arange(15.0)[::2], torch.zeros(8), 8, 0, BLOCK=4, MASKED=True)
    assert seen.outside(stores=False) == 4  # the gaps are counted, as before


@pytest.mark.parametrize(
    ("kernel", "error", "line"),
    [
        (misspelt_kernel, AttributeError, "tl.store(out, tl.lode(x))"),
        (calling_kernel, ValueError, "return x + tl.arange(0, 3)"),
    ],
)
def test_a_failure_is_the_kernels_own_with_its_own_line(kernel, error, line):
    with pytest.raises(error) as caught:
        kernel[(1,)](torch.zeros(4), torch.zeros(4))
    assert kernel_line(caught.value).endswith(line)


def test_a_chained_assignment_is_placed():
    with pytest.raises(SyntaxError, match=r"`a = b = tl.load\(x\)`: write a line for each") as caught:
        chained_kernel[(1,)](torch.zeros(4), torch.zeros(4))
    assert linecache.getline(__file__, caught.value.lineno).strip() == "a = b = tl.load(x)"


def test_infinities_make_no_warning():
    out = torch.zeros(8)
    logarithm_kernel[(1,)](out)
    assert (out[:4] == -torch.inf).all()
    assert out[4:].isnan().all()
