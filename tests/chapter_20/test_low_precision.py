"""Eight bits and fewer, graded: casts bit for bit, products, a layer that trains, shared exponents, and weights of four
bits.

Casts are compared with PyTorch's and torchao's, products with those of the dequantized matrices and with
``torch._scaled_mm``, layers, formats and
groups with torchao.
"""

import inspect
import logging
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.given.kernels import quantized
from lib.given.kernels.int4 import launch_int4_matmul
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.kernels.quantized import launch_block_matmul
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_14.memory import Guarded, watched
from tests.inputs import randn
from tests.observe import HostReads, tensors_in

low = graded("low_precision")

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {E4M3: 448.0, E5M2: 57_344.0, INT8: 127.0}
SCALE, ROUND, BACK, NOISE, PRODUCT, PAST, LAYER, SHARED, GROUPS, ERROR = (f"eq-low_precision-{n}" for n in range(1, 11))
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
RAISES = "the contract, under Raises"
RETURNS = "the contract, under Returns"
by_format = pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=lambda d: str(d).removeprefix("torch."))


class quiet_torchao(warnings.catch_warnings):
    """Import torchao without its remarks on kernels that this machine has not."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def __exit__(self, *error):
        logging.disable(logging.NOTSET)
        super().__exit__(*error)


TORCHAO_BLOCKS = {None: (256, 384), 1: (1, 384), 0: (256, 1), (128, 128): (128, 128)}  # of x [256, 384], for each dim


def torchao_scale(x: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
    """torchao's scales for blocks of this size."""
    with quiet_torchao():
        from torchao.quantization.quant_primitives import _choose_scale_float8

        return _choose_scale_float8(x.float(), list(block), dtype)


# ---- absmax_scale ----------------------------------------------------------------------------------------------------


def test_absmax_scale_by_hand():
    case(
        "[[1, -896], [3, 14]] in e4m3fn, whose largest number is 448: one scale, one for each row, one for each column"
    )
    x = torch.tensor([[1.0, -896.0], [3.0, 14.0]])
    expect_close(low.absmax_scale(x, E4M3), torch.tensor(2.0), read=SCALE)
    expect_close(low.absmax_scale(x, E4M3, dim=1), torch.tensor([[2.0], [14 / 448]]), read=SCALE)
    expect_close(low.absmax_scale(x, E4M3, dim=0), torch.tensor([[3 / 448, 2.0]]), read=SCALE)


@by_format
def test_absmax_scale_of_each_format(dtype):
    case(f"x [3, 4, 5] in {dtype}: dim None, 0, -1")
    x = 10 * randn(3, 4, 5)
    expect_close(low.absmax_scale(x, dtype), x.abs().max() / LARGEST[dtype], rtol=1e-6, atol=0, read=SCALE)
    for dim in (0, -1):
        expected = x.abs().amax(dim, keepdim=True) / LARGEST[dtype]
        expect_close(low.absmax_scale(x, dtype, dim), expected, rtol=1e-6, atol=0, read=SCALE)


@pytest.mark.parametrize("shape", [(256, 384), (130, 128), (5, 300), (1, 1)], ids=str)
def test_absmax_scale_of_blocks(shape):
    case(f"x {shape} in blocks of 128 x 128, those at the ends ragged")
    x = randn(*shape)
    sizes = [math.ceil(n / 128) for n in shape]
    expected = torch.empty(sizes)
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            expected[i, j] = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max() / 448
    expect_close(low.absmax_scale(x, E4M3, (128, 128)), expected, rtol=1e-6, atol=0, read=SCALE)


@pytest.mark.parametrize("dim", [None, 1, (128, 128)], ids=str)
def test_absmax_scale_changes_nothing_in_place(dim):
    case(f"x in float32, so that x.float() is x itself; dim={dim}: x is as before")
    x = randn(5, 7)
    x[2, 3], x[0, 1] = torch.inf, torch.nan
    given = x.clone()
    scale = low.absmax_scale(x, E4M3, dim)
    expect_close(x, given, rtol=0, atol=0, name="x afterwards", answer=scale, read=RETURNS)


def test_absmax_scale_of_a_transposed_matrix():
    case("x [300, 200], the transpose of a matrix, in blocks of 128 x 128: its rows don't lie one after the other")
    x = randn(200, 300).T
    expected = low.absmax_scale(x.contiguous(), E4M3, (128, 128))
    expect_close(low.absmax_scale(x, E4M3, (128, 128)), expected, atol=0, rtol=0, read=SCALE)


@pytest.mark.parametrize("dim", [None, 1, (128, 128)], ids=str)
def test_absmax_scale_of_zeros_and_infinities(dim):
    case(f"rows of zeros, of one infinity, of NaN and 7; dim={dim}")
    x = torch.zeros(3, 4)
    expect_true(
        bool((low.absmax_scale(x, E4M3, dim) == 1).all()),
        "where all numbers are 0, the scale is 1",
        answer=low.absmax_scale(x, E4M3, dim),
        read=RETURNS,
    )
    x[1] = torch.tensor([2.0, -torch.inf, 1.0, 0.0])
    x[2] = torch.tensor([torch.nan, 7.0, torch.inf, -1.0])
    expected = torch.tensor([[1.0], [2 / 448], [7 / 448]])
    wanted = expected if dim == 1 else torch.tensor(7 / 448).reshape(() if dim is None else (1, 1))
    expect_close(low.absmax_scale(x, E4M3, dim), wanted, rtol=1e-6, atol=0, read=RETURNS)


def test_absmax_scale_of_the_smallest_numbers():
    case("float32 numbers so small that a 448th of them is 0")
    answer = low.absmax_scale(torch.tensor([1e-45, 0.0]), E4M3)
    expect_true(bool(answer > 0), f"the scale is {answer}: expected a positive number", answer=answer, read=RETURNS)
    case("4.48e-18 and 0: a 448th of the first is no zero")
    answer = low.absmax_scale(torch.tensor([4.48e-18, 0.0]), E4M3)
    expect_close(answer, torch.tensor(1e-20), rtol=1e-6, atol=0, read=RETURNS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_absmax_scale_is_float32(dtype):
    x = (3 * randn(4, 6)).to(dtype).requires_grad_()
    size = x.detach().abs().float()
    for dim, largest in ((None, size.max()), (1, size.amax(1, keepdim=True)), ((128, 128), size.max().view(1, 1))):
        case(f"x in {dtype}, with a gradient; dim={dim}")
        answer = low.absmax_scale(x, E4M3, dim)
        expect_close(answer, largest / 448, rtol=1e-6, atol=0, read=RETURNS)
        expect_true(not answer.requires_grad, "a scale has no gradient", answer=answer, read=RETURNS)


@pytest.mark.parametrize(
    ("shape", "dim", "wanted"),
    [
        ((0, 4), None, ()),
        ((0, 4), 1, (0, 1)),
        ((0, 4), 0, (1, 4)),
        ((3, 0), 1, (3, 1)),
        ((0, 4), (128, 128), (0, 1)),
        ((300, 0), (128, 128), (3, 0)),
    ],
    ids=str,
)
def test_absmax_scale_of_no_numbers(shape, dim, wanted):
    case(f"x {shape}, dim={dim}: nothing to scale, so every scale is 1")
    answer = low.absmax_scale(torch.zeros(shape), E4M3, dim)
    expect_close(answer, torch.ones(wanted), atol=0, rtol=0, read=RETURNS)


def test_absmax_scale_of_numbers_beyond_float32():
    case("float64 numbers 1e300 and 896: the first counts as an infinity, and the scale is finite")
    answer = low.absmax_scale(torch.tensor([1e300, 896.0], dtype=torch.float64), E4M3)
    expect_close(answer, torch.tensor(2.0), atol=0, rtol=0, read=RETURNS)


def test_absmax_scale_refuses_a_format():
    case("a format that is none of the three: float16")
    low.absmax_scale(torch.ones(3, 4), INT8)
    with expect_raises(ValueError, "float16", read=RAISES):
        low.absmax_scale(torch.ones(3, 4), torch.float16)


def test_absmax_scale_refuses_blocks():
    case("blocks of 64 x 64, of 128 x 64 and of 64 x 128; blocks of a vector, and of three dimensions")
    low.absmax_scale(torch.ones(3, 4), INT8)
    for sizes in ((64, 64), (128, 64), (64, 128)):
        with expect_raises(ValueError, "64", read=RAISES):
            low.absmax_scale(torch.ones(3, 4), E4M3, sizes)
    for shape in ((5,), (2, 3, 5)):
        with expect_raises(ValueError, "5", read=RAISES):
            low.absmax_scale(torch.ones(shape), E4M3, (128, 128))


@oracle
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_absmax_scale_is_torchaos(given, dtype):
    case(f"x [256, 384] in {given}, scales for {dtype}: torchao's for a tensor, its rows, its columns and its blocks")
    x = (randn(256, 384) * torch.exp2(2 * randn(256, 384, seed=1))).to(given)
    for dim, block in TORCHAO_BLOCKS.items():
        theirs = torchao_scale(x, dtype, block)
        expect_close(low.absmax_scale(x, dtype, dim).reshape(theirs.shape), theirs, rtol=1e-6, atol=0, read=SCALE)


# ---- quantize --------------------------------------------------------------------------------------------------------


def test_quantize_by_hand():
    case(
        "scale 2: numbers 2 * (1, 17, 19, -500, 0.0009) in e4m3fn, whose numbers above 16 are 2 apart and whose "
        "smallest is about 0.002"
    )
    q = low.quantize(2 * torch.tensor([1.0, 17.0, 19.0, -500.0, 0.0009]), torch.tensor(2.0), E4M3)
    expect_equal(q.dtype, E4M3, name="dtype", answer=q, read=RETURNS)
    expect_close(q.float(), torch.tensor([1.0, 16.0, 20.0, -448.0, 0.0]), answer=q, read=ROUND)


def test_quantize_to_int8_by_hand():
    case("scale 0.5: numbers 0.5 * (1, 2.5, 3.5, -2.5, 130, -300) in int8, ties to even")
    q = low.quantize(torch.tensor([0.5, 1.25, 1.75, -1.25, 65.0, -150.0]), torch.tensor(0.5), INT8)
    expect_equal((q.dtype, q.tolist()), (INT8, [1, 2, 4, -2, 127, -127]), answer=q, read=ROUND)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_quantize_is_pytorchs_cast(dtype):
    case(f"every float16 within the range of {dtype}, scale 1")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    every = every[every.abs() <= LARGEST[dtype]]
    q = low.quantize(every, torch.tensor(1.0), dtype)
    expect_close(q.float(), every.to(dtype).float(), atol=0, rtol=0, answer=q, read=ROUND)


@by_format
def test_quantize_saturates(dtype):
    case(f"numbers beyond the largest, infinities and NaN in {dtype}")
    x = torch.tensor([1.5, -2.0, torch.inf, -torch.inf, torch.nan]) * LARGEST[dtype]
    q = low.quantize(x, torch.tensor(1.0), dtype).float()
    end = LARGEST[dtype]
    nan = 0.0 if dtype == INT8 else torch.nan
    expect_close(q, torch.tensor([end, -end, end, -end, nan]), answer=q, read=RETURNS)


@pytest.mark.parametrize("shape", [(5, 7), (200, 300)], ids=str)
@by_format
def test_quantize_with_each_scale(shape, dtype):
    case(f"x {shape} in {dtype}, scales of rows, columns and blocks")
    x, (m, n) = randn(*shape), shape
    rows, columns = torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5
    blocks = torch.linspace(0.5, 2, math.ceil(m / 128) * math.ceil(n / 128)).view(math.ceil(m / 128), -1)
    for scale, wide in ((rows, rows), (columns, columns), (blocks, by_number(blocks, shape))):
        scale = scale / LARGEST[dtype]
        wide = x / (wide / LARGEST[dtype])
        limit = LARGEST[dtype]
        expected = wide.clamp(-limit, limit).round() if dtype == INT8 else wide.clamp(-limit, limit).to(dtype).float()
        expect_close(low.quantize(x, scale, dtype).float(), expected, atol=0, rtol=0, read=ROUND)


def test_quantize_of_three_dimensions():
    case("x [2, 3, 4] in int8, a scale for each row [2, 3, 1]")
    x, scale = 100 * randn(2, 3, 4), torch.rand(2, 3, 1) + 2
    q = low.quantize(x, scale, INT8)
    expect_equal(q.tolist(), (x / scale).round().clamp(-127, 127).to(INT8).tolist(), answer=q, read=ROUND)


def by_number(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of each number, by Python's division."""
    rows, columns = (torch.arange(n) // 128 for n in shape)
    return blocks[rows][:, columns]


def test_quantize_divides_in_float32():
    case("bfloat16 numbers and a scale of 1/3")
    x = torch.linspace(-30, 30, 101).bfloat16()
    q = low.quantize(x, torch.tensor(1 / 3), E5M2)
    expect_close(q.float(), (x.float() / torch.tensor(1 / 3)).to(E5M2).float(), atol=0, rtol=0, answer=q, read=ROUND)


@by_format
def test_quantize_changes_nothing_in_place(dtype):
    case(f"x in float32, so that x.float() is x itself; {dtype}: x is as before")
    x = randn(5, 7)
    x[2, 3], x[0, 1] = torch.inf, torch.nan
    given = x.clone()
    q = low.quantize(x, torch.tensor(0.3), dtype)
    expect_close(x, given, rtol=0, atol=0, name="x afterwards", answer=q, read=RETURNS)


@oracle
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_is_torchaos(given, dtype):
    case(
        f"x [256, 384] in {given} to {dtype}, bit for bit, with torchao's scales of a tensor, rows, columns and blocks"
    )
    x = (randn(256, 384) * torch.exp2(2 * randn(256, 384, seed=1))).to(given)
    for dim, block in TORCHAO_BLOCKS.items():
        scale = torchao_scale(x, dtype, block)
        with quiet_torchao():
            from torchao.quantization.quant_primitives import _quantize_affine_float8

            theirs = _quantize_affine_float8(x, scale, dtype)
        q = low.quantize(x, scale, dtype)
        wrong = (q.view(torch.uint8) != theirs.view(torch.uint8)).sum().item()
        expect_equal(wrong, 0, name=f"numbers that differ, dim={dim}", answer=q, read=ROUND)


# ---- dequantize ------------------------------------------------------------------------------------------------------


def test_dequantize_by_hand():
    case("1, 16, -448 in e4m3fn with scale 2; 1, -3 in int8 with scale 0.5")
    q = torch.tensor([1.0, 16.0, -448.0]).to(E4M3)
    expect_close(low.dequantize(q, torch.tensor(2.0)), torch.tensor([2.0, 32.0, -896.0]), read=BACK)
    q = torch.tensor([1, -3], dtype=INT8)
    expect_close(low.dequantize(q, torch.tensor(0.5)), torch.tensor([0.5, -1.5]), read=BACK)


@by_format
def test_dequantize_multiplies_in_float32(dtype):
    case(f"q [40] in {dtype}, one scale, 1/3, without dimensions")
    q, scale = (20 * randn(40)).to(dtype), torch.tensor(1 / 3)
    expect_close(low.dequantize(q, scale), q.float() * scale.expand(40), atol=0, rtol=0, read=BACK)


@by_format
def test_dequantize_with_each_scale(dtype):
    case(f"q [150, 260] in {dtype}, scales of rows, columns and blocks")
    q = (3 * randn(150, 260)).to(dtype)
    rows, columns, blocks = torch.rand(150, 1), torch.rand(1, 260), torch.rand(2, 3)
    for scale, wide in ((rows, rows), (columns, columns), (blocks, by_number(blocks, (150, 260)))):
        expect_close(low.dequantize(q, scale), q.float() * wide, atol=0, rtol=0, read=BACK)


def test_dequantize_loses_only_what_rounding_lost():
    case("x [64, 48] in e4m3fn, scaled to its largest: off by a sixteenth at most, or by half of the smallest step")
    x = randn(64, 48)
    scale = x.abs().max() / 448
    answer = low.dequantize((x / scale).to(E4M3), scale)
    worst = ((answer - x).abs() / (x.abs() / 16 + scale * 2**-10)).max()
    expect_true(
        answer.dtype == torch.float32 and bool(worst <= 1),
        f"{answer.dtype}, off by {worst:.2f} times the bound",
        answer=answer,
        read=BACK,
    )


# ---- quantization_error ----------------------------------------------------------------------------------------------


def test_quantization_error_by_hand():
    case("[[254, 1.4]] in int8 with scale 2: it becomes 254 and 2, an error of 0.6")
    answer = low.quantization_error(torch.tensor([[254.0, 1.4]]), INT8, "tensor")
    expect_equal(type(answer).__name__, "float", name="type", answer=answer, read=RETURNS)
    expect_close(answer, 10 * math.log10((254**2 + 1.4**2) / 0.6**2), rtol=1e-5, read=NOISE)


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantization_error_of_what_is_exact(given):
    case(
        f"448 and 99 times 17 in e4m3fn, where 17 becomes 16; {given}, in which sums of squares overflow or lose digits"
    )
    x = torch.tensor([[448.0] + 99 * [17.0]], dtype=given)
    answer = low.quantization_error(x, E4M3, "tensor")
    expect_close(answer, 10 * math.log10((448**2 + 99 * 17**2) / 99), rtol=1e-5, read=NOISE)


@by_format
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_quantization_error_of_each_granularity(granularity, dtype):
    case(f"x [200, 140] with rows of different sizes, {dtype}, {granularity}")
    x = randn(200, 140) * torch.logspace(-3, 3, 200)[:, None]
    wide = {
        "tensor": x.abs().max().expand(200, 140),
        "row": x.abs().amax(1, keepdim=True).expand(200, 140),
        "block": by_number(
            torch.stack([torch.stack([part.abs().max() for part in rows.split(128, 1)]) for rows in x.split(128)]),
            (200, 140),
        ),
    }[granularity]
    scale = wide / LARGEST[dtype]
    rounded = (x / scale).round() if dtype == INT8 else (x / scale).to(dtype).float()
    signal, noise = x.double().square().sum(), (rounded * scale - x).double().square().sum()
    expect_close(low.quantization_error(x, dtype, granularity), 10 * math.log10(signal / noise), rtol=1e-3, read=NOISE)


def test_quantization_error_of_an_outlier():
    case("a row of numbers near 1 beside one of 1000: int8 with one scale loses the first row, with rows it does not")
    x = torch.cat([randn(1, 400), torch.full((1, 400), 1000.0)])
    one, rows = (low.quantization_error(x, INT8, granularity) for granularity in ("tensor", "row"))
    problem = f"{one:.1f} dB with one scale, {rows:.1f} dB with scales of rows: expected 30 dB more at least"
    expect_true(rows > one + 30, problem, answer=[one, rows], read=NOISE)


def test_quantization_error_of_nothing_lost():
    case("numbers that the format has, and a matrix of zeros: infinity")
    x = torch.tensor([[127.0, 3.0], [-5.0, 64.0]])
    expect_close(low.quantization_error(x, INT8, "tensor"), math.inf, read=RETURNS)
    expect_close(low.quantization_error(torch.zeros(2, 3), E4M3, "row"), math.inf, read=RETURNS)


def test_quantization_error_refuses():
    case("granularity 'column'")
    low.quantization_error(randn(2, 3), INT8, "row")
    with expect_raises(ValueError, "column", read=RAISES):
        low.quantization_error(randn(2, 3), INT8, "column")


# ---- scaled_matmul ---------------------------------------------------------------------------------------------------


def test_scaled_matmul_by_hand():
    case("[[1, 2]] with scale 3 times [[4, 1], [0.5, -2]] with scale 10, and with scales of rows and columns")
    a, b = torch.tensor([[1.0, 2.0]]).to(E4M3), torch.tensor([[4.0, 1.0], [0.5, -2.0]]).to(E4M3)
    one = low.scaled_matmul(a, b, torch.tensor(3.0), torch.tensor(10.0), torch.float32)
    expect_close(one, torch.tensor([[150.0, -90.0]]), read=PRODUCT)
    rows = low.scaled_matmul(a, b, torch.tensor([[3.0]]), torch.tensor([[10.0, 100.0]]), torch.float32)
    expect_close(rows, torch.tensor([[150.0, -900.0]]), read=PRODUCT)


def factors(m: int, k: int, n: int, dtypes=(E4M3, E4M3)) -> tuple[Tensor, Tensor]:
    limits = [100 if d == INT8 else 3 for d in dtypes]
    a, b = (s * randn(*shape, seed=i) for i, (shape, s) in enumerate(zip(((m, k), (k, n)), limits, strict=True)))
    return a.to(dtypes[0]), b.to(dtypes[1])


def scales_of(kind: str, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    blocks = [math.ceil(size / 128) for size in (m, k, n)]
    shapes = {"one": ((), ()), "rows": ((m, 1), (1, n)), "blocks": (blocks[:2], blocks[1:])}[kind]
    a, b = (torch.rand(shape, generator=torch.Generator().manual_seed(i)) + 0.1 for i, shape in enumerate(shapes))
    return a, b


def in_full(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product of the dequantized matrices, in float64."""
    return (a.double() * wide(scale_a.double(), a)) @ (b.double() * wide(scale_b.double(), b))


def wide(scale: Tensor, x: Tensor) -> Tensor:
    """A scale that broadcasts with x."""
    by_blocks = tuple(scale.shape) == tuple(math.ceil(n / 128) for n in x.shape)
    return by_number(scale, tuple(x.shape)) if by_blocks else scale


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (INT8, INT8)], ids=str)
@pytest.mark.parametrize("kind", ["one", "rows", "blocks"])
@pytest.mark.parametrize("sizes", [(5, 9, 7), (140, 260, 33)], ids=str)
def test_scaled_matmul_of_each_granularity(sizes, kind, dtypes):
    case(f"m, k, n = {sizes}, {kind}, {dtypes}, float32 out")
    a, b = factors(*sizes, dtypes=dtypes)
    scale_a, scale_b = scales_of(kind, *sizes)
    expected = in_full(a, b, scale_a, scale_b)
    answer = low.scaled_matmul(a, b, scale_a, scale_b, torch.float32)
    expect_close(answer, expected.float(), rtol=1e-5, atol=1e-5 * expected.abs().max().item(), read=PRODUCT)


@pytest.mark.parametrize("other", ["rows", "blocks"])
def test_scaled_matmul_of_two_granularities(other):
    sizes = (140, 260, 33)
    a, b = factors(*sizes)
    (one_a, one_b), (scale_a, scale_b) = scales_of("one", *sizes), scales_of(other, *sizes)
    for name, given in (("b", (one_a, scale_b)), ("a", (scale_a, one_b))):
        case(f"m, k, n = {sizes}: {other} for {name}, and one scale for the other factor")
        expected = in_full(a, b, *given)
        answer = low.scaled_matmul(a, b, *given, torch.float32)
        expect_close(answer, expected.float(), rtol=1e-5, atol=1e-5 * expected.abs().max().item(), read=PRODUCT)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_matmul_is_rounded_once(out_dtype):
    case(f"m, k, n = 8, 600, 4, {out_dtype} out: sums in float32, rounded at the end")
    a, b = factors(8, 600, 4)
    scales = scales_of("one", 8, 600, 4)
    expected = in_full(a, b, *scales)
    answer = low.scaled_matmul(a, b, *scales, out_dtype)
    eps = torch.finfo(out_dtype).eps
    expect_close(answer, expected.to(out_dtype), rtol=eps, atol=1e-5, read="the contract: accumulated in float32")


def test_scaled_matmul_of_transposed_factors():
    case("m, k, n = 12, 40, 20, both factors transposed views")
    a, b = (x.T for x in factors(40, 12, 1)[:1] + factors(20, 40, 1)[:1])
    answer = low.scaled_matmul(a, b, torch.tensor(0.5), torch.tensor(2.0), torch.float32)
    expect_close(answer, a.float() @ b.float(), rtol=1e-5, atol=1e-4, read=PRODUCT)


def test_scaled_matmul_uses_the_tensor_cores(monkeypatch):
    case(
        "has_float8 says yes: the answer is that of tensor_core_product, called with all five arguments; it says "
        "no: it is not called"
    )
    asked, calls = [], []

    def fake_product(*given):
        calls.append(given)
        return torch.full((2, 3), 7.0)

    names = {"has_float8": lambda a: asked.append(a) or len(asked) == 1, "tensor_core_product": fake_product}
    for name, fake in names.items():
        monkeypatch.setitem(inspect.unwrap(low.scaled_matmul).__globals__, name, fake)
        monkeypatch.setattr(quantized, name, fake)
    a, b = factors(2, 4, 3)
    given = a, b, torch.tensor(0.5), torch.tensor(2.0), torch.bfloat16
    answer = low.scaled_matmul(*given)
    expect_close(answer, torch.full((2, 3), 7.0), name="where has_float8 is True", read=RETURNS)
    same = len(calls) == 1 and all(x is y for x, y in zip(calls[0], given, strict=True))
    expect_true(
        same,
        f"tensor_core_product was called {len(calls)} times, or not with the five arguments in their order",
        answer=answer,
        read=RETURNS,
    )
    answer = low.scaled_matmul(*given)
    expect_close(answer, in_full(*given[:4]).bfloat16(), rtol=1e-2, atol=1e-2, name="where it is False", read=RETURNS)


def test_scaled_matmul_refuses():
    case("a [2, 3] and b [4, 5]")
    a, b = factors(2, 3, 1)[0], factors(4, 5, 1)[0]
    low.scaled_matmul(b, b.T, torch.tensor(1.0), torch.tensor(1.0), torch.float32)
    with expect_raises(ValueError, "(2, 3)", "(4, 5)", read=RAISES):
        low.scaled_matmul(a, b, torch.tensor(1.0), torch.tensor(1.0), torch.float32)


@oracle
@pytest.mark.parametrize("kind", ["one", "rows"])
def test_scaled_matmul_is_pytorchs(kind):
    case(f"m, k, n = 48, 64, 32, {kind}, against torch._scaled_mm on this machine")
    a, b = factors(48, 64, 32)
    b = b.T.contiguous().T
    scale_a, scale_b = scales_of(kind, 48, 64, 32)
    theirs = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    expect_close(low.scaled_matmul(a, b, scale_a, scale_b, torch.float32), theirs, rtol=1e-5, atol=1e-4, read=PRODUCT)


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("kind", ["one", "rows", "blocks"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_matmul_on_a_gpu(out_dtype, kind, dtypes):
    sizes = (300, 520, 136)
    case(f"m, k, n = {sizes}, {kind}, {dtypes}, {out_dtype} out, on a GPU")
    given = [*factors(*sizes, dtypes=dtypes), *scales_of(kind, *sizes)]
    expected = in_full(*given)
    answer = low.scaled_matmul(*(x.cuda() for x in given), out_dtype)
    # Hopper's tensor cores add the terms of a float8 product in fewer bits than float32 has: results in the hundreds
    # were off by about 0.1
    atol = max(torch.finfo(out_dtype).eps, 1e-3) * expected.abs().max().item()
    expect_close(answer.cpu(), expected.to(out_dtype), rtol=torch.finfo(out_dtype).eps, atol=atol, read=PRODUCT)


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
@pytest.mark.time_limit(60)
@oracle
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", [(5, 9, 7), (140, 260, 33)], ids=str)
def test_scaled_matmul_of_blocks_by_the_given_kernel(sizes, dtype):
    case(f"m, k, n = {sizes}, {dtype}: the kernel that multiplies blocks on a GPU")
    a, b = factors(*sizes, dtypes=(dtype, dtype))
    scale_a, scale_b = scales_of("blocks", *sizes)
    on_device = [x.to(DEVICE) for x in (a, b, scale_a, scale_b)]
    with watched(PRODUCT):
        out = launch_block_matmul(on_device[0], on_device[1], on_device[2], on_device[3], torch.float32)
    expected = in_full(a, b, scale_a, scale_b)
    expect_close(out.cpu(), expected.float(), rtol=1e-4, atol=1e-4 * expected.abs().max().item(), read=PRODUCT)


# ---- DelayedScale ----------------------------------------------------------------------------------------------------


def test_DelayedScale_by_hand():
    steps = (448.0, -896.0, 4.48, 1792.0, 1.12, 0.448, 0.224, 0.112)
    case(f"history of 3 steps; steps with the largest numbers {steps}; e4m3fn after each")
    past = low.DelayedScale(3)
    scales = []
    for largest in steps:
        past.update(torch.tensor([largest, 0.1]))
        scales.append(float(past.scale(E4M3)))
    expect_close(scales, [1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 0.0025, 0.001], rtol=1e-6, name="scales", read=PAST)


def test_DelayedScale_comes_from_the_past():
    case("after a step with 448, the current tensor has 4480: it is not asked")
    past = low.DelayedScale()
    past.update(torch.tensor([448.0]))
    expect_close(past.scale(E4M3, torch.tensor([4480.0])), torch.tensor(1.0), read=PAST)
    expect_close(past.scale(E5M2), torch.tensor(448 / 57_344), rtol=1e-6, atol=0, name="in e5m2", read=PAST)


def test_DelayedScale_forgets_after_sixteen():
    case("the default history: a step with 896, then 16 with 448")
    past = low.DelayedScale()
    past.update(torch.tensor([896.0]))
    for _ in range(15):
        past.update(torch.tensor([448.0]))
    expect_close(past.scale(E4M3), torch.tensor(2.0), name="after 15 more", read="the contract: history=16")
    past.update(torch.tensor([448.0]))
    expect_close(past.scale(E4M3), torch.tensor(1.0), name="after 16 more", read="the contract: history=16")


def test_DelayedScale_without_a_past():
    case("nothing recorded: the current tensor's scale, and an error without one")
    past = low.DelayedScale()
    expect_close(past.scale(E4M3, torch.tensor([896.0])), torch.tensor(2.0), read="the contract of scale")
    in_e5m2 = past.scale(E5M2, torch.tensor([2.0 * LARGEST[E5M2]]))
    expect_close(in_e5m2, torch.tensor(2.0), name="in e5m2", read="the contract of scale")
    past.update(torch.tensor([448.0]))
    expect_close(past.scale(E4M3), torch.tensor(1.0), name="after one step", read=PAST)
    with expect_raises(ValueError, read="the contract of scale, under Raises"):
        low.DelayedScale().scale(E4M3)


def test_DelayedScale_of_zeros_and_infinities():
    case("a step of zeros: scale 1; a step with an infinity, NaN and 4.48; a step of zeros between others")
    past = low.DelayedScale()
    past.update(torch.zeros(3))
    expect_close(past.scale(E4M3), torch.tensor(1.0), name="zeros", read="the contract of scale")
    now = past.scale(E4M3, torch.tensor([896.0]))
    expect_close(now, torch.tensor(1.0), name="zeros, and x of 896", read="the contract of scale")
    past.update(torch.tensor([torch.inf, torch.nan, -4.48]))
    expect_close(
        past.scale(E4M3), torch.tensor(0.01), rtol=1e-6, atol=0, name="afterwards", read="the contract of update"
    )


def test_DelayedScale_keeps_no_tensor():
    case(
        "a tensor is recorded and then changed in place: its record stays, since a number was recorded and not the "
        "tensor"
    )
    past, x = low.DelayedScale(), torch.tensor([448.0, -896.0])
    past.update(x)
    expect_close(x, torch.tensor([448.0, -896.0]), name="x after the update", read="the contract of update")
    x.mul_(100)
    expect_close(past.scale(E4M3), torch.tensor(2.0), read="the contract of update")


def test_DelayedScale_holds_a_number_for_each_step():
    case("20 steps of 1,000 numbers with a gradient, in bfloat16: at most 16 numbers are held, and no gradient")
    past = low.DelayedScale()
    for i in range(20):
        past.update((3 * randn(1000, seed=i)).bfloat16().requires_grad_())
    held = tensors_in(past)
    n = sum(t.numel() for t in held)
    expect_true(
        n <= 16, f"{n:,} numbers are held after 20 steps", answer=past.scale(E4M3), read="the contract of update"
    )
    graph = any(t.requires_grad for t in held)
    expect_true(
        not graph,
        "what is held has a gradient, and keeps the step's graph",
        answer=past.scale(E4M3),
        read="the contract of update",
    )


def test_DelayedScale_does_not_wait_for_the_number():
    case("two steps: item(), float(), if and x[mask] are counted")
    past = low.DelayedScale()
    with HostReads() as host:
        past.update(torch.tensor([448.0]))
        past.update(torch.tensor([896.0]))
    found = host.n, host.n_masks
    expect_equal(found, (0, 0), name="values copied, x[mask] taken", read="the contract of update")


def test_DelayedScale_divides_in_float32():
    case("a step whose largest number is 3, in bfloat16")
    past = low.DelayedScale()
    past.update(torch.tensor([3.0, -1.0], dtype=torch.bfloat16))
    expect_close(past.scale(E4M3), torch.tensor(3 / 448), rtol=1e-6, atol=0, read="the contract of scale")


def test_DelayedScale_of_a_step_without_numbers():
    case("a step with 896, and one without numbers, as an expert without tokens has it")
    past = low.DelayedScale()
    past.update(torch.tensor([896.0]))
    past.update(torch.zeros(0, 4))
    expect_close(past.scale(E4M3), torch.tensor(2.0), read="the contract of update")


def test_DelayedScale_has_a_history_of_its_own():
    case("a step is recorded in one object, and another is asked")
    past, other = low.DelayedScale(), low.DelayedScale()
    past.update(torch.tensor([896.0]))
    expect_close(other.scale(E4M3, torch.tensor([448.0])), torch.tensor(1.0), read="the contract of scale")


@pytest.mark.parametrize("history", [0, -3])
def test_DelayedScale_refuses_a_history_without_steps(history):
    case(f"a history of {history} steps")
    low.DelayedScale(1)
    with expect_raises(ValueError, str(history), read="the contract, under Args"):
        low.DelayedScale(history)


# ---- Float8Linear ----------------------------------------------------------------------------------------------------

RECIPES = ["dynamic", "delayed", "rowwise", "blockwise"]


def rounded(x: Tensor, dtype: torch.dtype, recipe: str, dim: int) -> Tensor:
    """What is left of a factor of a sum along ``dim``, in float64."""
    if recipe == "rowwise":
        largest = x.abs().amax(dim, keepdim=True)
    elif recipe == "blockwise":
        parts = torch.stack([torch.stack([p.abs().max() for p in r.split(128, 1)]) for r in x.split(128)])
        largest = by_number(parts, x.shape)
    else:
        largest = x.abs().max()
    scale = largest / LARGEST[dtype]
    return (x / scale).to(dtype).double() * scale.double()


def layer_and_inputs(recipe: str, lead=(6,), k=20, n=12, bias=True, dtype=torch.float32):
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(0.3 * randn(n, k, seed=1))
        if bias:
            linear.bias.copy_(randn(n, seed=2))
    return (
        low.Float8Linear(linear, recipe),
        linear,
        randn(*lead, k, seed=3, dtype=dtype),
        randn(*lead, n, seed=4, dtype=dtype),
    )


@pytest.mark.parametrize("sizes", [((6,), 20, 12), ((2, 3, 75), 130, 140), ((), 20, 12)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_Float8Linear_and_its_gradients(recipe, sizes):
    lead, k, n = sizes
    case(f"{recipe}, x {(*lead, k)}, weight [{n}, {k}]: outputs, then gradients, against products of rounded factors")
    layer, linear, x, grad = layer_and_inputs(recipe, lead, k, n)
    x.requires_grad_()
    y = layer(x)
    flat, w, g = x.detach().reshape(-1, k), linear.weight.detach(), grad.reshape(-1, n)
    forward = rounded(flat, E4M3, recipe, 1) @ rounded(w.T, E4M3, recipe, 0)
    expected = (forward.float() + linear.bias.detach()).view(*lead, n)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}
    expect_close(y.detach(), expected, **close, answer=y, read=LAYER)
    y.backward(grad)
    expect_true(x.grad is not None and linear.weight.grad is not None, "a gradient is missing", answer=y, read=LAYER)
    dx = rounded(g, E5M2, recipe, 1) @ rounded(w, E4M3, recipe, 0)
    expect_close(x.grad, dx.float().view(*lead, k), **close, name="x.grad", answer=x.grad, read=LAYER)
    dw = rounded(g.T, E5M2, recipe, 1) @ rounded(flat, E4M3, recipe, 0)
    expect_close(linear.weight.grad, dw.float(), **close, name="weight.grad", answer=linear.weight.grad, read=LAYER)
    expect_close(linear.bias.grad, g.sum(0), **close, name="bias.grad", read="the contract: the bias")


@pytest.mark.parametrize("recipe", RECIPES)
def test_Float8Linear_when_only_one_factor_needs_a_gradient(recipe):
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}
    for frozen in ("x", "weight"):
        case(f"{recipe}, x (6, 20), weight [12, 20], of which {frozen} needs no gradient")
        layer, linear, x, grad = layer_and_inputs(recipe)
        x.requires_grad_(frozen != "x")
        linear.weight.requires_grad_(frozen != "weight")
        y = layer(x)
        y.backward(grad)
        found = [name for name, t in (("x", x), ("weight", linear.weight)) if t.grad is not None]
        expect_equal(found, ["weight" if frozen == "x" else "x"], name="what got a gradient", answer=y, read=LAYER)
        if frozen == "x":
            expected = rounded(grad.T, E5M2, recipe, 1) @ rounded(x, E4M3, recipe, 0)
            expect_close(linear.weight.grad, expected.float(), **close, name="weight.grad", answer=y, read=LAYER)
        else:
            expected = rounded(grad, E5M2, recipe, 1) @ rounded(linear.weight, E4M3, recipe, 0)
            expect_close(x.grad, expected.float(), **close, name="x.grad", answer=y, read=LAYER)


@pytest.mark.parametrize("recipe", ["dynamic", "delayed", "blockwise"])
def test_Float8Linear_keeps_small_gradients(recipe):
    case(f"{recipe}: gradients of 1 and of 1e-8, which is 5.7e-4 if e5m2's 57,344 stands for 1")
    layer, linear, x, _ = layer_and_inputs(recipe, (2,))
    grad = torch.tensor([1.0, 1e-8])[:, None].expand(2, 12).contiguous()
    y = layer(x.requires_grad_())
    y.backward(grad)
    expected = rounded(grad, E5M2, recipe, 1) @ rounded(linear.weight.detach(), E4M3, recipe, 0)
    expect_close(x.grad, expected.float(), rtol=1e-3, atol=1e-11, name="x.grad", answer=x.grad, read=LAYER)


def test_Float8Linear_delayed_uses_the_past():
    case(
        "delayed: a second step whose inputs, weights and gradients are 4 times as large saturates at the first step's"
    )
    layer, linear, x, grad = layer_and_inputs("delayed", bias=False)
    layer(x.requires_grad_()).backward(grad)
    w = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.mul_(4).grad.zero_()
    big = (4 * x.detach()).requires_grad_()
    y = layer(big)

    def old(current: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
        scale = before.abs().max() / LARGEST[dtype]
        return (current / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).double() * scale.double()

    a, b, g = old(big.detach(), x.detach(), E4M3), old(linear.weight.detach(), w, E4M3), old(4 * grad, grad, E5M2)
    expect_close(y.detach(), (a @ b.T).float(), rtol=1e-4, atol=1e-3, name="second output", answer=y, read=PAST)
    y.backward(4 * grad)
    expect_close(big.grad, (g @ b).float(), rtol=1e-4, atol=1e-3, name="second x.grad", answer=big.grad, read=PAST)
    answer = linear.weight.grad
    expect_close(answer, (g.T @ a).float(), rtol=1e-4, atol=1e-3, name="second weight.grad", answer=answer, read=PAST)


def test_Float8Linear_delayed_remembers_a_step_once():
    case("delayed: a large step, then 16 small ones: the large one is forgotten, after 15 it is not")
    layer, _, x, grad = layer_and_inputs("delayed", bias=False)
    layer((100 * x).requires_grad_()).backward(100 * grad)
    outputs = []
    for _ in range(17):
        y = layer(x.clone().requires_grad_())
        y.backward(grad)
        outputs.append(y.detach())
    coarse = (x / (100 * x.abs().max() / 448)).to(E4M3).double() * (100 * x.abs().max() / 448).double()
    w = rounded(layer.weight.detach().T, E4M3, "dynamic", 0)
    expect_close(outputs[15], (coarse @ w).float(), rtol=1e-4, atol=1e-3, name="step 16", answer=outputs, read=PAST)
    fine = rounded(x, E4M3, "dynamic", 1)
    expect_close(outputs[16], (fine @ w).float(), rtol=1e-4, atol=1e-3, name="step 17", answer=outputs, read=PAST)


@pytest.mark.parametrize("recipe", RECIPES)
def test_Float8Linear_keeps_parameters_and_dtype(recipe):
    case(f"{recipe}: the parameters are the layer's own; bfloat16 in gives bfloat16 out; no bias")
    layer, linear, x, grad = layer_and_inputs(recipe, bias=False, dtype=torch.bfloat16)
    found = [name for name, p in layer.named_parameters() if p is linear.weight]
    expect_equal(found, ["weight"], name="the layer's weight among the parameters", read="the contract, under Args")
    expect_equal(
        sorted(layer.state_dict()), ["weight"], name="names in the state dict", read="the contract, under Args"
    )
    y = layer(x.requires_grad_())
    y.backward(grad)
    dtypes = [y.dtype, x.grad.dtype, linear.weight.grad.dtype]
    expect_equal(dtypes, [torch.bfloat16] * 3, name="dtypes of output and gradients", answer=y, read="the contract")
    wide = rounded(x.detach().float(), E4M3, recipe, 1) @ rounded(linear.weight.detach().float().T, E4M3, recipe, 0)
    expect_close(y.detach(), wide.bfloat16(), rtol=2e-2, atol=2e-2, answer=y, read=LAYER)


def test_Float8Linear_of_float32_weights_and_bfloat16_inputs():
    case("weights in float32, inputs in bfloat16, as under autocast: the weight's gradient is float32")
    layer, linear, _, _ = layer_and_inputs("dynamic")
    x = randn(6, 20, seed=3, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    dtypes = [y.dtype, x.grad.dtype, linear.weight.grad.dtype, linear.bias.grad.dtype]
    wanted = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    expect_equal(dtypes, wanted, name="dtypes of output and gradients", answer=y, read="the contract")


def test_Float8Linear_rounds_weights_once():
    case("a weight 17.01 in float32, which e4m3fn rounds to 18; in bfloat16 it would be 17, whose even neighbour is 16")
    linear = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[448.0, 17.01]]))
    y = low.Float8Linear(linear, "dynamic")(torch.tensor([[0.0, 448.0]], dtype=torch.bfloat16))
    expect_close(y.float().detach(), torch.tensor([[18.0 * 448]]), rtol=2**-8, atol=0, answer=y, read=LAYER)


def test_Float8Linear_adds_the_bias_in_the_dtype_of_x():
    case("bfloat16, whose neighbours of 256 are 255 and 258: a product of 257 becomes 256, and so does its sum with 1")
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.5, 32.0, 1.0], [448.0, 0.0, 0.0]]))
        linear.bias.fill_(1)
    y = low.Float8Linear(linear, "dynamic")(torch.tensor([[448.0, 1.0, 1.0]], dtype=torch.bfloat16))
    expect_close(y.detach()[:, :1], torch.tensor([[256.0]]).bfloat16(), rtol=0, atol=0, answer=y, read="the contract")


def test_Float8Linear_of_a_transposed_x():
    case("x [3, 4, 20], the transpose of another tensor: its vectors don't lie one after the other")
    layer, _, _, _ = layer_and_inputs("dynamic")
    x = randn(20, 4, 3, seed=3).transpose(0, 2)
    expect_close(
        layer(x).detach(), layer(x.contiguous()).detach(), rtol=1e-5, atol=1e-5, read="the contract of forward"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_Float8Linear_of_no_rows(recipe):
    case(f"{recipe}, x [0, 20], as an expert without tokens gets it: an output without rows, and gradients of zeros")
    layer, linear, x, grad = layer_and_inputs(recipe, (0,))
    y = layer(x.requires_grad_())
    expect_equal(tuple(y.shape), (0, 12), name="shape of the output", answer=y, read="the contract of forward")
    y.backward(grad)
    shapes = [tuple(x.grad.shape), tuple(linear.weight.grad.shape), linear.weight.grad.any().item()]
    expect_equal(
        shapes,
        [(0, 20), (12, 20), False],
        name="shapes of the gradients, and whether the weight's has entries other than 0",
        answer=y,
        read=LAYER,
    )


@oracle
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_Float8Linear_is_torchaos(recipe):
    case(
        f"{recipe}, x [2, 4, 32], weight [16, 32], largest numbers 1.75: torchao's layer, emulated in float32, with "
        "gradients in e5m2"
    )
    with quiet_torchao():
        from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity
        from torchao.float8.float8_linear import Float8Linear

        by = ScalingGranularity.TENSORWISE if recipe == "dynamic" else ScalingGranularity.AXISWISE
        e4m3, e5m2 = (CastConfig(scaling_granularity=by, target_dtype=dtype) for dtype in (E4M3, E5M2))
        config = Float8LinearConfig(
            cast_config_input=e4m3, cast_config_weight=e4m3, cast_config_grad_output=e5m2, emulate=True
        )
        layers = [nn.Linear(32, 16) for _ in range(2)]
        theirs = Float8Linear.from_float(layers[1], config)
    ours, found = low.Float8Linear(layers[0], recipe), []
    for layer, linear in ((ours, layers[0]), (theirs, layers[1])):
        with torch.no_grad():
            linear.weight.copy_(at_most_175(16, 32, seed=1))
            linear.bias.copy_(randn(16, seed=2))
        x = at_most_175(8, 32, seed=3).view(2, 4, 32).requires_grad_()
        y = layer(x)
        y.backward(at_most_175(8, 16, seed=4).view(2, 4, 16))
        found.append(
            {"y": y.detach(), "x.grad": x.grad, "weight.grad": linear.weight.grad, "bias.grad": linear.bias.grad}
        )
    expect_close(found[0], found[1], rtol=1e-5, atol=1e-5, name="outputs and gradients", read=LAYER)


def at_most_175(rows: int, columns: int, seed: int) -> Tensor:
    """Numbers of which 1.75 is the largest in each row and column: their scales are powers of two, with which torchao's
    product by the inverse is a division.
    """
    x = randn(rows, columns, seed=seed).clamp(-1.7, 1.7)
    x[:, 0] = x[0] = 1.75
    return x


def test_Float8Linear_trains():
    case("a linear map is learned in 60 steps, with each recipe")
    target, x = randn(8, 16, seed=5), randn(64, 16, seed=6)
    for recipe in RECIPES:
        layer, _, _, _ = layer_and_inputs(recipe, k=16, n=8)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        for _ in range(60):
            loss = (layer(x) - x @ target.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        share = float(loss.detach() / (x @ target.T).square().mean())
        expect_true(
            share < 0.02, f"{recipe}: the loss ends at {share:.1%} of its start", answer=loss.detach(), read=LAYER
        )


def test_Float8Linear_refuses():
    case("recipe 'tensorwise'")
    low.Float8Linear(nn.Linear(4, 4), "dynamic")
    with expect_raises(ValueError, "tensorwise", read=RAISES):
        low.Float8Linear(nn.Linear(4, 4), "tensorwise")


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("recipe", RECIPES)
def test_Float8Linear_on_a_gpu(recipe):
    case(f"{recipe}, x [3, 100, 130], weight [140, 130], on a GPU: the same numbers, and the host does not wait")
    layer, linear, x, grad = layer_and_inputs(recipe, (3, 100), 130, 140)
    y = layer(x.requires_grad_())
    y.backward(grad)
    expected = [y.detach(), x.grad.clone(), linear.weight.grad.clone()]
    there, own, x, grad = layer_and_inputs(recipe, (3, 100), 130, 140)
    there, own.weight.grad = there.cuda(), None
    low.Float8Linear(nn.Linear(130, 140, device="cuda"), recipe)(x.cuda())  # compiles
    x, grad = x.cuda().requires_grad_(), grad.cuda()
    try:
        torch.cuda.set_sync_debug_mode("error")
        y = there(x)
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, mine, wanted in zip(
        ("out", "x.grad", "weight.grad"), (y, x.grad, there.weight.grad), expected, strict=True
    ):
        atol = 2e-3 * wanted.abs().max().item()
        expect_close(mine.detach().cpu(), wanted, rtol=1e-3, atol=atol, name=name, answer=y, read=LAYER)


# ---- mx_quantize -----------------------------------------------------------------------------------------------------


def test_mx_quantize_by_hand():
    case("blocks of 4: [1000, 17, -3, 0] has scale 2**(9 - 8) = 2; [0.3, ...] has 2**(-2 - 8)")
    x = torch.tensor([[1000.0, 17.0, -3.0, 0.0, 0.3, -0.1, 0.25, 0.0]])
    elements, scales = low.mx_quantize(x, 4)
    expect_equal((elements.dtype, scales.dtype), (E4M3, torch.float8_e8m0fnu), name="dtypes", read=RETURNS)
    expect_close(scales.float(), torch.tensor([[2.0, 2.0**-10]]), name="scales", answer=scales, read=SHARED)
    wanted = torch.tensor([[448.0, 8.5, -1.5, 0.0, 307.2, -102.4, 256.0, 0.0]]).to(E4M3).float()
    expect_close(elements.float(), wanted, name="elements", answer=elements, read=SHARED)


def test_mx_quantize_of_powers_of_two():
    case("blocks whose largest numbers are 2**-3, just below it, 2**8, and the last float32 before it")
    x = torch.zeros(4, 32)
    before = torch.nextafter(
        torch.tensor(2.0**8), torch.tensor(0.0)
    ).item()  # log2 in float32 rounds its logarithm to 8
    x[:, 5] = torch.tensor([2.0**-3, 2.0**-3 * (1 - 2.0**-20), -(2.0**8), before])
    _, scales = low.mx_quantize(x)
    wanted = torch.tensor([[2.0**-11], [2.0**-12], [1.0], [0.5]])
    expect_close(scales.float(), wanted, name="scales", answer=scales, read=SHARED)


def test_mx_quantize_of_zeros_and_of_the_smallest():
    case("a block of zeros, one of 1e-40, one of 3e38, one with an infinity and 1, one with NaN and 1")
    x = torch.zeros(5, 32)
    x[1], x[2], x[3, 0], x[4, 0], x[3:, 1] = 1e-40, 3e38, -torch.inf, torch.nan, 1.0
    elements, scales = low.mx_quantize(x)
    wanted = torch.tensor([[2.0**-127], [2.0**-127], [2.0**119], [2.0**-8], [2.0**-8]])
    expect_close(scales.double(), wanted.double(), rtol=0, atol=0, name="scales", answer=scales, read=RETURNS)
    first = torch.tensor([0.0, 1e-40 * 2.0**127, 448.0, -448.0, torch.nan]).to(E4M3).float()
    expect_close(elements[:, 0].float(), first, name="first elements", answer=elements, read=RETURNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96)], ids=str)
def test_mx_quantize_of_many(shape, dtype):
    case(f"x {shape} in {dtype}, numbers of many sizes")
    x = (randn(*shape) * torch.exp2(randn(*shape, seed=1).mul(8).round())).to(dtype)
    elements, scales = low.mx_quantize(x)
    blocks = x.double().unflatten(-1, (-1, 32))
    powers = torch.tensor([math.frexp(v)[1] - 9 for v in blocks.abs().amax(-1).flatten().tolist()]).double()
    wanted = torch.exp2(powers).view(blocks.shape[:-1])
    expect_close(scales.double(), wanted, rtol=0, atol=0, name="scales", answer=scales, read=SHARED)
    expected = (blocks / wanted[..., None]).clamp(-448, 448).flatten(-2).float().to(E4M3).float()
    expect_close(elements.float(), expected, rtol=0, atol=0, name="elements", answer=elements, read=SHARED)


def test_mx_quantize_changes_nothing_in_place():
    case("x in float32, so that x.float() is x itself: it is as before")
    x = randn(2, 64)
    given = x.clone()
    elements, _ = low.mx_quantize(x)
    expect_true(torch.equal(x, given), "the tensor that was given is changed", answer=elements, read=RETURNS)


def test_mx_quantize_of_a_transposed_matrix():
    case("x [64, 64], the transpose of a matrix, as the second factor of a product is: its rows are not contiguous")
    x = randn(64, 64)
    answer, wanted = (low.mx_quantize(t) for t in (x.T, x.T.contiguous()))
    for name, mine, other in zip(("elements", "scales"), answer, wanted, strict=True):
        expect_equal(mine.float().tolist(), other.float().tolist(), name=name, answer=mine, read=SHARED)


def test_mx_quantize_of_no_numbers():
    case("x [2, 0]: no blocks, so no scales")
    elements, scales = low.mx_quantize(torch.zeros(2, 0))
    shapes = tuple(elements.shape), tuple(scales.shape)
    expect_equal(shapes, ((2, 0), (2, 0)), name="shapes", answer=elements, read=RETURNS)


def test_mx_quantize_refuses():
    case("33 numbers in blocks of 32")
    low.mx_quantize(torch.ones(2, 32))
    with expect_raises(ValueError, "33", "32", read=RAISES):
        low.mx_quantize(torch.ones(2, 33))


@pytest.mark.parametrize("block", [0, -32])
def test_mx_quantize_refuses_a_block_below_1(block):
    case(f"64 numbers in blocks of {block}")
    low.mx_quantize(torch.ones(2, 64))
    with expect_raises(ValueError, "64", str(block), read=RAISES):
        low.mx_quantize(torch.ones(2, 64), block)


@oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_quantize_is_torchaos(dtype):
    case(
        f"x [16, 128] in {dtype}: numbers of many sizes, zeros, 256 and 500, which saturates; torchao rounds scales "
        "to the floor"
    )
    with quiet_torchao():
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        x = randn(16, 128) * torch.exp2(randn(16, 128, seed=1).mul(6).round())
        x[0], x[1], x[2] = 0, 256, 500
        x = x.to(dtype)
        scales, elements = to_mx(x, E4M3, 32, ScaleCalculationMode.FLOOR)
    ours = low.mx_quantize(x)
    expect_equal(ours[1].view(torch.uint8).tolist(), scales.view(torch.uint8).tolist(), name="scales", read=SHARED)
    expect_equal(ours[0].view(torch.uint8).tolist(), elements.view(torch.uint8).tolist(), name="elements", read=SHARED)


# ---- quantize_int4 ---------------------------------------------------------------------------------------------------


def test_quantize_int4_by_hand():
    case("groups of 4: [-1, 0, 0.4, 2] with scale 0.2 and zero 5; [3, 1, 2, 1.5], whose range begins at 0")
    q, scale, zero = low.quantize_int4(torch.tensor([[-1.0, 0.0, 0.4, 2.0, 3.0, 1.0, 2.0, 1.5]]), 4)
    dtypes = [t.dtype for t in (q, scale, zero)]
    expect_equal(dtypes, [torch.uint8, torch.float32, torch.uint8], name="dtypes", answer=q, read=RETURNS)
    expect_close(scale, torch.tensor([[0.2, 0.2]]), name="scale", answer=scale, read=GROUPS)
    expect_equal(zero.tolist(), [[5, 0]], name="zero", answer=zero, read=GROUPS)
    expect_equal(q[:, :5].tolist(), [[0, 5, 7, 15, 15]], name="q", answer=q, read=GROUPS)


@pytest.mark.parametrize("shape", [(1, 128), (6, 384)], ids=str)
def test_quantize_int4_of_many(shape):
    case(f"weight {shape}, groups of 128: off by half a step, and by little more where a zero point was rounded")
    weight = randn(*shape)
    q, scale, zero = low.quantize_int4(weight)
    groups = weight.unflatten(1, (-1, 128))
    span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    expect_close(scale, span / 15, rtol=1e-6, atol=0, name="scale", answer=scale, read=GROUPS)
    expect_equal(
        zero.tolist(),
        torch.round(-groups.amin(-1).clamp(max=0) / scale).to(torch.uint8).tolist(),
        name="zero",
        answer=zero,
        read=GROUPS,
    )
    back = (q.float().unflatten(1, (-1, 128)) - zero[..., None]) * scale[..., None]
    worst = ((back - groups).abs() / scale[..., None]).max().item()
    expect_true(worst <= 1.0001, f"a weight is off by {worst:.2f} steps: expected at most 1", answer=q, read=GROUPS)
    inner = ((back - groups).abs() / scale[..., None]).flatten().quantile(0.9).item()
    expect_true(
        inner <= 0.5,
        f"a tenth of the weights are off by {inner:.2f} steps or more: expected at most 0.5",
        answer=q,
        read=GROUPS,
    )


def test_quantize_int4_of_zeros_and_of_one_sign():
    case("groups of zeros, of positive and of negative numbers: 0 is always one of the levels")
    weight = torch.cat([torch.zeros(1, 4), torch.full((1, 4), 7.5), torch.full((1, 4), -3.0)], dim=1)
    q, scale, zero = low.quantize_int4(weight, 4)
    expect_close(scale, torch.tensor([[1.0, 0.5, 0.2]]), name="scale", answer=scale, read=RETURNS)
    expect_equal(zero.tolist(), [[0, 0, 15]], name="zero", answer=zero, read=RETURNS)
    expect_equal(q.tolist(), [[0] * 4 + [15] * 4 + [0] * 4], name="q", answer=q, read=RETURNS)


def test_quantize_int4_never_leaves_the_levels():
    case("a group of [-5.5, 9.5, 0, 1]: with scale 1 and zero 6 the largest weight would get level 16")
    q, _, zero = low.quantize_int4(torch.tensor([[-5.5, 9.5, 0.0, 1.0]]), 4)
    expect_equal((q.tolist(), zero.tolist()), ([[0, 15, 6, 7]], [[6]]), name="q and zero", answer=q, read=GROUPS)


def test_quantize_int4_of_the_smallest_numbers():
    case("a group of [-22, 0, 0, 0] times float32's smallest number: a fifteenth of 22 is rounded to 1 of them")
    q, _, zero = low.quantize_int4(torch.tensor([[-22.0, 0.0, 0.0, 0.0]]) * 2.0**-149, 4)
    expect_equal((q.tolist(), zero.tolist()), ([[0, 15, 15, 15]], [[15]]), name="q and zero", answer=q, read=RETURNS)


def test_quantize_int4_changes_nothing_in_place():
    case("weight [2, 64] in float32, so that weight.float() is the weight itself: it is as before")
    weight = randn(2, 64)
    given = weight.clone()
    q, _, _ = low.quantize_int4(weight, 32)
    expect_true(torch.equal(weight, given), "the weights that were given are changed", answer=q, read=RETURNS)


def test_quantize_int4_of_ties():
    case("a group of [-5, 10, 0.5, 1.5]: scale 1, zero 5; ties go to the even number before the zero point is added")
    q, _, zero = low.quantize_int4(torch.tensor([[-5.0, 10.0, 0.5, 1.5]]), 4)
    expect_equal((q.tolist(), zero.tolist()), ([[0, 15, 5, 7]], [[5]]), name="q and zero", answer=q, read=GROUPS)


def test_quantize_int4_of_other_dtypes():
    case("weight [32, 64] in bfloat16, a parameter, groups of 32: scales in float32 and no gradient")
    weight = nn.Parameter(randn(32, 64, dtype=torch.bfloat16))
    q, scale, _ = low.quantize_int4(weight, 32)
    groups = weight.detach().float().unflatten(1, (-1, 32))
    expect_close(scale, (groups.amax(-1) - groups.amin(-1)) / 15, name="scale", answer=scale, read=RETURNS)
    expect_true(not scale.requires_grad, "the scale has a gradient", answer=q, read=RETURNS)
    expect_equal(q.tolist(), nearest(weight.detach().float(), 32)[0].tolist(), name="q", answer=q, read=RETURNS)


def test_quantize_int4_of_a_transposed_matrix():
    case("weight [8, 64], the transpose of a matrix, as GPT-2's checkpoints have it: its rows are not contiguous")
    weight = randn(64, 8).T
    answer, wanted = low.quantize_int4(weight, 32), low.quantize_int4(weight.contiguous(), 32)
    expect_close(answer, wanted, rtol=0, atol=0, read=GROUPS)


def test_quantize_int4_refuses():
    case("100 columns in groups of 128")
    low.quantize_int4(torch.ones(1, 128))
    with expect_raises(ValueError, "100", "128", read=RAISES):
        low.quantize_int4(torch.ones(1, 100))


@pytest.mark.parametrize("size", [0, -32])
def test_quantize_int4_refuses_a_group_below_1(size):
    case(f"64 columns in groups of {size}")
    low.quantize_int4(torch.ones(1, 64), 32)
    with expect_raises(ValueError, "64", str(size), read=RAISES):
        low.quantize_int4(torch.ones(1, 64), size)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_quantize_int4_refuses_what_is_not_finite(value):
    case(f"a weight is {value}, which is not finite in float32")
    weight = torch.ones(2, 4, dtype=torch.float64)
    low.quantize_int4(weight, 4)
    weight[1, 2] = value
    with expect_raises(ValueError, str(value), read=RAISES):
        low.quantize_int4(weight, 4)


@oracle
def test_quantize_int4_is_torchaos():
    case(
        "weight [24, 256], groups of 64, also of one sign, of one number and with an outlier, against torchao's "
        "asymmetric groups of four bits"
    )
    weight = randn(24, 256)
    weight[0], weight[1], weight[2], weight[3] = weight[0].abs(), -weight[1].abs(), 7.5, -0.3
    weight[4:8, 5] = torch.tensor([1e30, -1e30, 100.0, -100.0])
    with quiet_torchao():
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        scale, zero = choose_qparams_affine(
            weight, MappingType.ASYMMETRIC, (1, 64), torch.uint8, 0, 15, eps=1e-9, zero_point_dtype=torch.int32
        )
        q = quantize_affine(weight, (1, 64), scale, zero, torch.uint8, 0, 15)
    ours = low.quantize_int4(weight, 64)
    expect_close(ours[1], scale.view(24, 4), rtol=1e-6, atol=0, name="scale", read=GROUPS)
    expect_equal(ours[2].tolist(), zero.view(24, 4).tolist(), name="zero", read=GROUPS)
    expect_equal(ours[0].tolist(), q.tolist(), name="q", read=GROUPS)


# ---- pack_int4 -------------------------------------------------------------------------------------------------------


def test_pack_int4_by_hand():
    case("levels 1, 2, 15, 0: bytes 0x21 and 0x0f")
    packed = low.pack_int4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    expect_equal((packed.dtype, packed.tolist()), (torch.uint8, [[0x21, 0x0F]]), answer=packed, read="the contract")


def test_pack_int4_of_all_pairs():
    case("all 256 pairs of levels, as [16, 32], and in three dimensions")
    low_half, high_half = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    q = torch.stack([low_half, high_half], -1).flatten(1).to(torch.uint8)
    expected = (low_half + 16 * high_half).tolist()
    expect_equal(low.pack_int4(q).tolist(), expected, answer=low.pack_int4(q), read="the contract")
    expect_equal(low.pack_int4(q.view(2, 8, 32)).tolist(), [expected[:8], expected[8:]], read="the contract")
    case("the same levels, the transpose of another tensor")
    expect_equal(low.pack_int4(q.T.contiguous().T).tolist(), expected, read="the contract")


def test_pack_int4_changes_nothing_in_place():
    case("levels 1, 2, 3, 4: they are as before")
    q = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    packed = low.pack_int4(q)
    expect_equal(q.tolist(), [[1, 2, 3, 4]], name="q after the call", answer=packed, read=RETURNS)


def test_pack_int4_refuses():
    case("3 levels; two rows of 3 levels, whose number is even")
    low.pack_int4(torch.zeros(2, dtype=torch.uint8))
    for shape in ((3,), (2, 3)):
        with expect_raises(ValueError, "3", read=RAISES):
            low.pack_int4(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("level", [16, 255, -1])
def test_pack_int4_refuses_more_than_four_bits(level):
    case(f"levels 15, 0, 3, {level}: a level has four bits, from 0 to 15")
    dtype = torch.uint8 if level > 0 else torch.int8
    low.pack_int4(torch.tensor([15, 0, 3, 1], dtype=dtype))
    with expect_raises(ValueError, str(level), read=RAISES):
        low.pack_int4(torch.tensor([15, 0, 3, level], dtype=dtype))


# ---- unpack_int4 -----------------------------------------------------------------------------------------------------


def test_unpack_int4_by_hand():
    case("bytes 0x21 and 0xf0: levels 1, 2, 0, 15")
    q = low.unpack_int4(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8))
    expect_equal((q.dtype, q.tolist()), (torch.uint8, [[1, 2, 0, 15]]), answer=q, read="the contract")


@pytest.mark.parametrize("shape", [(256,), (4, 64), (2, 2, 64), (3, 0)], ids=str)
def test_unpack_int4_of_every_byte(shape):
    case(f"bytes {shape}")
    packed = torch.arange(math.prod(shape), dtype=torch.int32).to(torch.uint8).view(shape)
    q = low.unpack_int4(packed)
    wanted = [level for byte in packed.flatten().tolist() for level in (byte % 16, byte // 16)]
    expect_equal(
        (tuple(q.shape), q.flatten().tolist()), ((*shape[:-1], 2 * shape[-1]), wanted), answer=q, read="the contract"
    )


def test_unpack_int4_changes_nothing_in_place():
    case("bytes 0x21 and 0xf0: they are as before")
    packed = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    q = low.unpack_int4(packed)
    expect_equal(packed.tolist(), [[0x21, 0xF0]], name="packed after the call", answer=q, read="the contract")


# ---- int4_matmul_kernel ----------------------------------------------------------------------------------------------

KERNEL = [pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON), pytest.mark.time_limit(60)]


def kernel_marks(test):
    for mark in KERNEL:
        test = mark(test)
    return test


def packed_weights(n: int, k: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random levels in bytes, scales and zero points, and the weights that they stand for, in float64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(16, (n, k), generator=generator)
    scale, zero = (
        torch.rand(n, k // group, generator=generator) + 0.1,
        torch.randint(16, (n, k // group), generator=generator),
    )
    weight = (q - zero.repeat_interleave(group, 1)).double() * scale.repeat_interleave(group, 1).double()
    packed = (q[:, ::2] + 16 * q[:, 1::2]).to(torch.uint8)
    return packed, scale, zero.to(torch.uint8), weight


def run_int4(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, read="the contract"):
    with watched(read) as seen, Guarded() if INTERPRETED else nullcontext():  # fresh memory is full of NaN
        out = launch_int4_matmul(low.int4_matmul_kernel, x.to(DEVICE), packed, scale, zero, always=True)
    return out, seen


@kernel_marks
def test_int4_matmul_kernel_by_hand():
    case("x [[1, 10, 100, 1000]], levels 1, 2, 15, 0, scale 0.5, zero 2")
    x = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    x, levels = x.repeat(1, 8), torch.tensor([[0x21, 0x0F]], dtype=torch.uint8).repeat(1, 8)
    scale, zero = torch.tensor([[0.5]]), torch.tensor([[2]], dtype=torch.uint8)
    out, _ = run_int4(x, levels.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
    expect_close(out.cpu(), torch.tensor([[8 * 0.5 * (-1 + 0 + 1300 - 2000)]]), read="the contract")


@kernel_marks
@pytest.mark.parametrize(
    ("m", "n", "k", "group"), [(1, 1, 32, 32), (3, 37, 128, 64), (20, 70, 384, 128), (17, 33, 192, 96)]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_int4_matmul_kernel_of_ragged_sizes(m, n, k, group, dtype):
    case(f"m={m} n={n} k={k}, groups of {group}, {dtype}")
    packed, scale, zero, weight = packed_weights(n, k, group)
    x = randn(m, k, seed=3).to(dtype)
    out, _ = run_int4(x, packed.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
    expected = x.double() @ weight.T
    eps = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    expect_close(out.cpu(), expected.to(dtype), rtol=eps, atol=eps * expected.abs().max().item(), read="the contract")


def how_often(counts: Tensor) -> str:
    """ "2 times", or "0 to 2 times" where the counts differ."""
    least, most = counts.min(), counts.max()
    return f"{least} times" if least == most else f"{least} to {most} times"


def sum_of_2048_and_ones() -> Tensor:
    """``[1, 256]`` in float16: 2048, and a one in each later group of 32; a float16 sum would stay at 2048, whose
    neighbour is 2050.
    """
    x = torch.zeros(1, 256, dtype=torch.float16)
    x[0, ::32] = 1
    x[0, 0], x[0, -32] = 2048, 0
    return x


@kernel_marks
def test_int4_matmul_kernel_adds_in_float32():
    case("x in float16: 2048 and six ones, each in a tile of its own; all weights are 1: the sum is 2054")
    packed, zero = torch.full((1, 128), 0x11, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.uint8)
    out, _ = run_int4(sum_of_2048_and_ones(), packed.to(DEVICE), torch.ones(1, 8).to(DEVICE), zero.to(DEVICE))
    expect_close(out.cpu().float(), torch.tensor([[2054.0]]), atol=0, rtol=0, read=RETURNS)


@kernel_marks
def test_int4_matmul_kernel_multiplies_in_the_dtype_of_x():
    case("x in float16: 1, -1 and zeros; levels 15 and 14 with a scale of 1/3: weights 5 and 4.668, rounded to float16")
    x, packed = torch.zeros(1, 32, dtype=torch.float16), torch.full((1, 16), 0xEF, dtype=torch.uint8)
    x[0, 0], x[0, 1] = 1, -1
    scale, zero = torch.tensor([[1 / 3]]), torch.zeros(1, 1, dtype=torch.uint8)
    out, _ = run_int4(x, packed.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
    expected = (15 * scale).half() - (14 * scale).half()
    expect_close(out.cpu(), expected, atol=0, rtol=0, read=RETURNS)


@kernel_marks
@pytest.mark.skipif(not INTERPRETED, reason="accesses are counted in Triton's interpreter")
def test_int4_matmul_kernel_reads_each_byte_once():
    case("m=5 n=40 k=256, groups of 64: one tile of rows, so each byte is read once and each result is stored once")
    packed, scale, zero, weight = packed_weights(40, 256, 64)
    x = randn(5, 256)
    out, seen = run_int4(x, packed, scale, zero)
    expect_close(out, (x.double() @ weight.T).float(), rtol=1e-4, atol=1e-3, read="the contract")
    reads, writes = seen.count(packed, stores=False), seen.count(out, stores=True)
    problem = f"each packed byte is read {how_often(reads)}: expected once, for both of its levels"
    expect_true(reads.min() == reads.max() == 1, problem, answer=out, read=RETURNS)
    problem = f"each element of the result is stored {how_often(writes)}: expected once"
    expect_true(writes.min() == writes.max() == 1, problem, answer=out, read=RETURNS)
    exact = {precision.lower() for dtype, precision in seen.dots if dtype == "fp32"} <= {"ieee"}
    problem = "tl.dot of float32 tiles needs input_precision='ieee', else a GPU uses TF32"
    expect_true(exact, problem, answer=out, read=RETURNS)


# ---- Int4Linear ------------------------------------------------------------------------------------------------------


def layer_of_int4(lead=(2, 3), k=64, n=10, group=32, bias=True, dtype=torch.float32):
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(randn(n, k, seed=1))
        if bias:
            linear.bias.copy_(randn(n, seed=2))
    groups = linear.weight.detach().float().unflatten(1, (-1, group))
    least, most = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (most - least) / 15
    zero = torch.round(-least / scale)
    weight = ((torch.round(groups / scale) + zero).clamp(0, 15) - zero) * scale
    return low.Int4Linear(linear, group), linear, randn(*lead, k, seed=3, dtype=dtype), weight.flatten(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,)], ids=str)
def test_Int4Linear_outputs(lead, bias):
    case(f"x {(*lead, 64)}, weight [10, 64], groups of 32, bias={bias}")
    layer, linear, x, weight = layer_of_int4(lead, bias=bias)
    y = layer(x)
    expected = x @ weight.T + (linear.bias.detach() if bias else 0)
    expect_close(y, expected, rtol=1e-5, atol=1e-4, read="the contract of forward")
    expect_equal(layer.bias is None, not bias, name="the bias is None", answer=y, read="the contract, under Attributes")


def test_Int4Linear_holds_half_a_byte_for_each_weight():
    case("weight [10, 256], groups of 128: buffers and no parameters; the layer itself is unchanged")
    layer, linear, _, _ = layer_of_int4(k=256, group=128)
    found = {name: (tuple(b.shape), b.dtype) for name, b in layer.named_buffers()}
    wanted = {"packed": ((10, 128), torch.uint8), "scale": ((10, 2), torch.float32), "zero": ((10, 2), torch.uint8)}
    expect_equal(
        dict(sorted(found.items())),
        dict(sorted((wanted | {"bias": ((10,), torch.float32)}).items())),
        name="buffers",
        read="the contract, under Attributes",
    )
    expect_equal(len(list(layer.parameters())), 0, name="number of parameters", read="the contract, under Attributes")
    graph = [name for name, b in layer.named_buffers() if b.requires_grad]
    expect_equal(graph, [], name="buffers with a gradient", read="the contract, under Attributes")
    layer(randn(3, 256))
    held, wanted_bytes = sum(t.nbytes for t in tensors_in(layer)), 10 * (128 + 2 * 4 + 2 + 4)
    problem = f"{held:,} bytes are held beside {wanted_bytes:,}: something other than the buffers is kept"
    expect_true(held <= wanted_bytes, problem, answer=held, read="the contract, under Attributes")
    expect_close(
        linear.weight.detach(), randn(10, 256, seed=1), name="the layer's weight", read="the contract, under Args"
    )
    frozen = [name for name, p in linear.named_parameters() if not p.requires_grad]
    expect_equal(frozen, [], name="parameters of the layer that are frozen", read="the contract, under Args")


def test_Int4Linear_of_a_transposed_x():
    case("x [3, 4, 64], the transpose of another tensor: its vectors don't lie one after the other")
    layer, _, _, _ = layer_of_int4()
    x = randn(64, 4, 3, seed=3).transpose(0, 2)
    expect_close(layer(x), layer(x.contiguous()), rtol=1e-5, atol=1e-5, read="the contract of forward")


def test_Int4Linear_groups_of_128_unless_told():
    case("weight [10, 256], no group size given: two groups in a row")
    scale = low.Int4Linear(nn.Linear(256, 10)).scale
    expect_equal(tuple(scale.shape), (10, 2), name="the scale's shape", answer=scale, read="the contract, under Args")


def test_Int4Linear_loads_a_state_dict():
    case("the buffers of one layer are loaded into another: the outputs are equal")
    (one, _, x, _), (other, _, _, _) = layer_of_int4(), layer_of_int4(bias=True)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(one.state_dict())
    expect_close(other(x), one(x), atol=0, rtol=0, read="the contract, under Attributes")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_Int4Linear_in_other_dtypes(dtype):
    case(f"x and weights in {dtype}")
    layer, linear, x, weight = layer_of_int4(dtype=dtype)
    y = layer(x)
    expected = (x.double() @ weight.to(dtype).double().T + linear.bias.detach().double()).to(dtype)
    expect_close(y, expected, rtol=2e-2, atol=0.3 if dtype == torch.bfloat16 else 4e-2, read="the contract of forward")


def test_Int4Linear_of_float32_keeps_the_dtype_of_x():
    case("x in bfloat16, a layer in float32, with a bias")
    layer, linear, x, weight = layer_of_int4()
    y = layer(x.bfloat16())
    expected = (x.bfloat16().double() @ weight.bfloat16().double().T + linear.bias.detach().double()).bfloat16()
    expect_close(y, expected, rtol=2e-2, atol=0.3, read="the contract of forward")


def test_Int4Linear_adds_in_float32():
    case("x in float16: 2048 and six ones; all weights are 1, in groups of 32: the sum is 2054")
    linear = nn.Linear(256, 4, bias=False, dtype=torch.float16)
    nn.init.ones_(linear.weight)
    y = low.Int4Linear(linear, 32)(sum_of_2048_and_ones())
    expect_close(y.float(), torch.full((1, 4), 2054.0), atol=0, rtol=0, read="the contract of forward")


def test_Int4Linear_has_its_own_bias():
    case("the layer's bias is changed after its weights were packed: the outputs stay as they were")
    layer, linear, x, _ = layer_of_int4()
    before = layer(x)
    with torch.no_grad():
        linear.bias.add_(100)
    expect_close(layer(x), before, atol=0, rtol=0, answer=layer(x), read="the contract, under Attributes")


@pytest.mark.parametrize("size", [0, 48])
def test_Int4Linear_refuses_a_group(size):
    case(f"64 columns in groups of {size}")
    low.Int4Linear(nn.Linear(64, 4), 32)
    with expect_raises(ValueError, "64", str(size), read="the contract, under Args"):
        low.Int4Linear(nn.Linear(64, 4), size)


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_Int4Linear_on_a_gpu(dtype):
    case(f"x [2, 3, 256], weight [200, 256], groups of 128, {dtype}, on a GPU")
    layer, linear, x, weight = layer_of_int4(k=256, n=200, group=128, dtype=dtype)
    y = layer.cuda()(x.cuda())
    expected = x.double() @ weight.to(dtype).double().T + linear.bias.detach().double()
    eps = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    expect_close(y.cpu(), expected.to(dtype), rtol=eps, atol=eps * expected.abs().max().item(), read="the contract")


# ---- gptq ------------------------------------------------------------------------------------------------------------


def correlated(n: int, k: int, n_inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, inputs that are mixtures of a few directions and a little noise, and the inputs' Hessian."""
    inputs = randn(n_inputs, k // 4, seed=seed) @ randn(k // 4, k, seed=seed + 1) + 0.3 * randn(
        n_inputs, k, seed=seed + 2
    )
    return randn(n, k, seed=seed + 3), inputs, (inputs.double().T @ inputs.double()).float()


def weights_of(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    group = q.shape[1] // scale.shape[1]
    return (q.double() - zero.double().repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)


def one_by_one(weight: Tensor, hessian: Tensor, group: int) -> Tensor:
    """Levels by optimal brain quantization in the order of the columns: each time the inverse of what is left of the
    Hessian is computed anew.
    """
    w, h = weight.double().clone(), hessian.double()
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    levels = torch.empty_like(w)
    for i in range(w.shape[1]):
        if i % group == 0:
            part = w[:, i : i + group].float()
            least, most = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (most - least) / 15
            zero = torch.round(-least / scale)
        inverse = torch.linalg.inv(h[i:, i:])
        levels[:, i] = (torch.round(w[:, i] / scale) + zero).clamp(0, 15)
        error = (w[:, i] - (levels[:, i] - zero) * scale) / inverse[0, 0]
        w[:, i:] -= error[:, None] * inverse[0]
    return levels.to(torch.uint8)


def nearest(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, group))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (most - least) / 15
    zero = torch.round(-least / scale)
    q = (torch.round(groups / scale[..., None]) + zero[..., None]).clamp(0, 15).to(torch.uint8)
    return q.flatten(1), scale, zero.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gptq_changes_nothing_in_place(dtype):
    case(f"weight and Hessian in {dtype} are as before")
    weight, hessian = (t.to(dtype) for t in correlated(3, 16, 64)[::2])
    given = weight.clone(), hessian.clone()
    q, _, _ = low.gptq(weight, hessian, 16)
    for name, now, before in zip(("weight", "hessian"), (weight, hessian), given, strict=True):
        expect_true(torch.equal(now, before), f"{name} was changed in place", answer=q, read="the contract, under Args")


def test_gptq_of_a_parameter():
    weight, _, hessian = correlated(3, 16, 64)
    wanted = low.gptq(weight.clone(), hessian, 8)
    for name in ("an nn.Parameter", "a Hessian with a gradient"):
        case(f"{name}, weight [3, 16] in groups of 8: the values of plain tensors, and no result has a gradient")
        given = nn.Parameter(weight.clone()) if "Parameter" in name else weight.clone()
        answer = low.gptq(given, hessian.clone().requires_grad_("Hessian" in name), 8)
        names = [name for name, t in zip(("q", "scale", "zero"), answer, strict=True) if t.requires_grad]
        expect_true(not names, f"{' and '.join(names)} requires a gradient", answer=answer, read=RETURNS)
        expect_close(answer, wanted, rtol=0, atol=0, read=RETURNS)


def test_gptq_of_weights_in_bfloat16():
    case("weights [3, 16] in bfloat16, groups of 8: as for the same numbers in float32")
    weight, _, hessian = correlated(3, 16, 64)
    weight = weight.bfloat16()
    expect_close(low.gptq(weight, hessian, 8), low.gptq(weight.float(), hessian, 8), rtol=0, atol=0, read=RETURNS)


def test_gptq_by_hand():
    case(
        "three columns, of which the second follows the first; 7.4 loses 0.4, so 3.3 becomes 3.7; group of 3; the "
        "same with inputs 100 times as large"
    )
    weight = torch.tensor([[7.4, 3.3, 15.0], [2.4, 8.2, 15.0]])
    hessian = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0001, 0.0], [0.0, 0.0, 1.0]])
    q, scale, zero = low.gptq(weight, hessian, 3)
    expect_equal(
        [t.dtype for t in (q, scale, zero)],
        [torch.uint8, torch.float32, torch.uint8],
        name="dtypes",
        answer=q,
        read=RETURNS,
    )
    levels = [q.tolist(), low.gptq(weight, 10_000 * hessian, 3)[0].tolist()]
    expect_equal(levels, 2 * [[[7, 4, 15], [2, 9, 15]]], name="levels of both", answer=levels, read=ERROR)


@pytest.mark.parametrize(("n", "k", "group"), [(6, 64, 32), (3, 16, 8), (4, 64, 64)])  # the first tells mistakes apart
def test_gptq_is_optimal_brain_quantization(n, k, group):
    case(f"weight [{n}, {k}], groups of {group}: column by column, with the rest's inverse computed anew")
    weight, _, hessian = correlated(n, k, 4 * k)
    q, scale, zero = low.gptq(weight, hessian, group)
    expect_equal(
        (tuple(q.shape), tuple(scale.shape), tuple(zero.shape)),
        ((n, k), (n, k // group), (n, k // group)),
        name="shapes",
        read=RETURNS,
    )
    expected = one_by_one(weight, hessian, group)
    share = (q == expected).double().mean().item()
    problem = f"{share:.1%} of the levels are those of exact arithmetic: expected more than 99 %"
    expect_true(share > 0.99, problem, answer=q, read=ERROR)


def test_gptq_corrects_in_float64():
    case("weight [64, 32] in one group, scale 1, inputs in one direction; last weights, corrected, 2e-6 beside a tie")
    inputs = randn(64, 1) @ randn(1, 32, seed=1)
    hessian = inputs.T @ inputs
    weight = 3 * randn(64, 32, seed=5, dtype=torch.float64).clamp(-1.5, 1.5)
    weight[:, 0], weight[:, 1] = 7, -8  # the range of every row
    h = hessian.double()
    h = h + 0.01 * h.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    w = weight.clone()
    for i in range(31):
        inverse = torch.linalg.inv(h[i:, i:])
        w[:, i:] -= ((w[:, i] - w[:, i].round().clamp(-8, 7)) / inverse[0, 0])[:, None] * inverse[0]
    wanted = torch.arange(64) % 2
    weight[:, 31] += 0.5 + 4e-6 * (wanted - 0.5) - w[:, 31]
    q, _, zero = low.gptq(weight, hessian, 32)
    last = q[:, 31].int() - zero[:, 0].int()
    problem = f"{(last == wanted).double().mean():.0%} of the last levels are those of float64: expected all"
    expect_true(torch.equal(last, wanted.int()), problem, answer=q, read=RETURNS)


def test_gptq_beats_rounding():
    case("weight [32, 128], correlated inputs, groups of 64: the outputs' squared error beside that of rounding")
    weight, inputs, hessian = correlated(32, 128, 512)
    q, scale, zero = low.gptq(weight, hessian, 64)
    errors = [
        ((inputs.double() @ (weights_of(*w) - weight).T).square().sum()).item()
        for w in ((q, scale, zero), nearest(weight, 64))
    ]
    share = errors[0] / errors[1]
    expect_true(share < 0.5, f"{share:.2f} of rounding's error: expected less than half", answer=q, read=ERROR)


def test_gptq_of_independent_inputs_is_rounding():
    case("a Hessian that is the identity: no column can make another's error good")
    weight = randn(5, 64)
    q, scale, zero = low.gptq(weight, torch.eye(64), 32)
    expected = nearest(weight, 32)
    expect_equal(
        (q.tolist(), zero.tolist()),
        (expected[0].tolist(), expected[2].tolist()),
        name="q and zero",
        answer=q,
        read=ERROR,
    )
    expect_close(scale, expected[1], name="scale", answer=scale, read=ERROR)


def test_gptq_of_no_inputs_is_plain_rounding():
    case("a Hessian of zeros; weights -0.5, -0.45, -0.4, ..., 1, whose scale is 0.1, so every other one is near a tie")
    weight = torch.cat([torch.arange(-10, 21) * 0.05, torch.zeros(1)])[None]
    q, scale, zero = low.gptq(weight, torch.zeros(32, 32), 32)
    expected = nearest(weight, 32)
    expect_equal(
        (q.tolist(), zero.tolist()),
        (expected[0].tolist(), expected[2].tolist()),
        name="q and zero",
        answer=q,
        read="the contract, under Args",
    )
    expect_close(scale, expected[1], atol=0, rtol=0, name="scale", answer=scale, read="the contract, under Args")


def test_gptq_of_small_inputs():
    case("weight [6, 64], groups of 32: inputs 2**-40 times as large as others; the Hessian's scale does not matter")
    weight, _, hessian = correlated(6, 64, 256)
    expected = one_by_one(weight, hessian, 32)
    q, _, _ = low.gptq(weight, hessian * 2.0**-80, 32)
    share = (q == expected).double().mean().item()
    problem = f"{share:.1%} of the levels are those of large inputs: expected more than 99 %"
    expect_true(share > 0.99, problem, answer=q, read=ERROR)


def test_gptq_of_a_singular_hessian():
    case("fewer inputs than columns, and a column that is always 0; then no inputs at all")
    weight, inputs, _ = correlated(4, 32, 8)
    inputs[:, 5] = 0
    q, scale, _ = low.gptq(weight, inputs.T @ inputs, 16)
    expect_true(
        bool(scale.isfinite().all()) and int(q.max()) <= 15,
        "the result is not finite",
        answer=q,
        read="the contract, under Args",
    )
    rounded = nearest(weight, 16)[0][:, 5].tolist()
    expect_equal(q[:, 5].tolist(), rounded, name="levels of the column that is always 0", answer=q, read=ERROR)
    q, _, _ = low.gptq(weight, torch.zeros(32, 32), 16)
    expect_equal(
        q.tolist(), nearest(weight, 16)[0].tolist(), name="q without inputs", answer=q, read="the contract, under Args"
    )


def test_gptq_refuses():
    case("100 columns in groups of 128")
    low.gptq(torch.ones(1, 128), torch.eye(128))
    with expect_raises(ValueError, "100", "128", read=RAISES):
        low.gptq(torch.ones(1, 100), torch.eye(100))
    case("16 columns in groups of 0; a weight that is NaN")
    with expect_raises(ValueError, "16", "0", read=RAISES):
        low.gptq(torch.ones(1, 16), torch.eye(16), 0)
    with expect_raises(ValueError, "nan", read=RAISES):
        low.gptq(torch.full((1, 16), torch.nan), torch.eye(16), 16)


HESSIANS = {  # a Hessian of four columns with a fault, and what the message shows
    "rows of three columns": (torch.eye(3), ("(3, 3)", "[4, 4]")),
    "one row": (torch.ones(4), ("(4,)", "[4, 4]")),
    "NaN": (torch.full((4, 4), torch.nan), ("nan",)),
    "an infinity": (torch.diag(torch.tensor([1.0, torch.inf, 1.0, 1.0])), ("inf",)),
    "not symmetric": (torch.eye(4) + torch.tensor([[0.0, 0.5, 0.0, 0.0]] + 3 * [[0.0] * 4]), ("0.5", "symmetric")),
    "a negative eigenvalue": (torch.diag(torch.tensor([3.0, 1.0, -0.25, 2.0])), ("-0.25",)),
    "all negative": (-torch.eye(4), ("-1",)),
}


@pytest.mark.parametrize("fault", HESSIANS)
def test_gptq_refuses_a_hessian(fault):
    case(f"weight [2, 4], groups of 4; the Hessian: {fault}")
    hessian, shown = HESSIANS[fault]
    low.gptq(torch.ones(2, 4), torch.eye(4), 4)
    with expect_raises(ValueError, *shown, read=RAISES):
        low.gptq(torch.ones(2, 4), hessian, 4)
