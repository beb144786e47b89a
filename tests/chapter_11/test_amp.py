"""Mixed precision, graded: formats, rounding, sums. The scaler is in test_scaler.py, autocast in test_autocast.py.

The oracles are ``torch.finfo``, PyTorch's and NumPy's own casts.
"""

import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.given.kernels.autocast import FORMATS
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

amp = graded("amp")

BEYOND = "eq-amp-2, and the contract of ex-amp-round-to-format, under Returns"
RANGE, SPACING, SUM = (f"eq-amp-{n}" for n in (1, 2, 3))
CAST = {name: getattr(torch, name) for name in FORMATS if name != "TF32"}
PROPERTIES = ("max", "min_normal", "min_subnormal", "epsilon")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Format:
    """A format of the tests' own, so that rounding can be graded without ex-amp-floatformat."""

    def __init__(self, name: str | tuple[int, int, bool]):
        bits = FORMATS.get(name, (11, 52, True)) if isinstance(name, str) else name
        self.exponent_bits, self.mantissa_bits, self.has_infinity = bits
        self.bias = bias = 2 ** (self.exponent_bits - 1) - 1  # a learner's FloatFormat may have it, too
        self.epsilon = 2.0**-self.mantissa_bits
        self.min_normal = 2.0 ** (1 - bias)
        self.min_subnormal = self.min_normal * self.epsilon
        whole = (2 - self.epsilon) * 2.0**bias
        self.max = whole if self.has_infinity else (2 - 2 * self.epsilon) * 2.0 ** (bias + 1)


def same_bits(actual: Tensor, expected: Tensor, x: Tensor, read: str) -> None:
    """Equal to the last bit, the sign of zero included; one NaN is as good as another."""
    expect_close(actual, expected, atol=0, rtol=0, read=read)
    view = BITS[x.element_size()]
    differ = (actual.view(view) != expected.view(view)) & ~expected.isnan()
    first = x[differ][0].item() if differ.any() else None
    expect_true(first is None, f"the sign of zero is lost: x = {first}", answer=actual, read=read)


# ---- FloatFormat -----------------------------------------------------------------------------------------------------


def test_FloatFormat_by_hand():
    case("3 exponent bits, 2 mantissa bits: bias 3, exponents -2 to 3")
    fmt = amp.FloatFormat(3, 2)
    expected = {"max": 14.0, "min_normal": 0.25, "min_subnormal": 0.0625, "epsilon": 0.25}
    expect_equal({name: getattr(fmt, name) for name in PROPERTIES}, expected, read=RANGE)


def test_FloatFormat_without_infinity_by_hand():
    case("3 exponent bits, 2 mantissa bits, no infinity: one exponent more, of which the last mantissa is NaN")
    fmt = amp.FloatFormat(3, 2, has_infinity=False)
    expected = {"max": 24.0, "min_normal": 0.25, "min_subnormal": 0.0625, "epsilon": 0.25}
    expect_equal({name: getattr(fmt, name) for name in PROPERTIES}, expected, read=RANGE)


@pytest.mark.parametrize("name", [*CAST, "float64"])
def test_FloatFormat_equals_finfo(name):
    case(name)
    bits, info = FORMATS.get(name, (11, 52, True)), torch.finfo(getattr(torch, name))
    fmt = amp.FloatFormat(*bits)
    expect_equal(fmt.max, float(info.max), name="max", read=RANGE)
    expect_equal(fmt.min_normal, float(info.smallest_normal), name="min_normal", read=RANGE)
    expect_equal(fmt.epsilon, float(info.eps), name="epsilon", read=RANGE)
    expect_equal(fmt.min_subnormal, float(info.smallest_normal) * float(info.eps), name="min_subnormal", read=RANGE)


def test_FloatFormat_TF32_has_the_range_of_float32():
    case("TF32: 8 exponent bits as float32, 10 mantissa bits as float16")
    fmt = amp.FloatFormat(exponent_bits=8, mantissa_bits=10)
    expect_equal(fmt.epsilon, torch.finfo(torch.float16).eps, name="epsilon", read=RANGE)
    expect_equal(fmt.min_normal, torch.finfo(torch.float32).tiny, name="min_normal", read=RANGE)
    expect_equal(fmt.max, (2 - 2.0**-10) * 2.0**127, name="max", read=RANGE)


def test_FloatFormat_is_a_value():
    case("FloatFormat(5, 10) twice")
    expect_true(amp.FloatFormat(5, 10) == amp.FloatFormat(5, 10, True), "two equal formats differ")
    expect_equal(len({amp.FloatFormat(5, 10), amp.FloatFormat(5, 10)}), 1, name="formats in a set")


@pytest.mark.parametrize(
    ("bits", "greatest", "least"),
    [
        ((2, 1, True), 3.0, 0.5),
        ((2, 1, False), 4.0, 0.5),
        ((2, 52, True), 4.0 - 2.0**-51, 2.0**-52),
        ((10, 1, False), 2.0**512, 2.0**-511),
        ((11, 1, True), 1.5 * 2.0**1023, 2.0**-1023),
    ],
)
def test_FloatFormat_at_the_ends_of_its_ranges(bits, greatest, least):
    case(f"FloatFormat{bits}: the narrowest or widest exponent, the narrowest or widest mantissa")
    fmt = amp.FloatFormat(*bits)
    expect_equal(
        {"max": fmt.max, "min_subnormal": fmt.min_subnormal}, {"max": greatest, "min_subnormal": least}, read=RANGE
    )


REFUSES = "the contract, under Raises"


@pytest.mark.parametrize("bits", [(0, 10), (-1, 10), (1, 10), (12, 10), (5, 0), (5, -3), (5, 53), (11, 52, False)])
def test_FloatFormat_refuses_widths_that_are_none(bits):
    case(
        f"FloatFormat{bits}" + (", without infinity: the greatest number would be no float64" if len(bits) == 3 else "")
    )
    with expect_raises(ValueError, read=REFUSES):
        amp.FloatFormat(*bits)


@pytest.mark.parametrize(
    ("bits", "named"), [((94, 7), "94"), ((94, 7, False), "94"), ((7, 94), "94"), ((-86, 7), "-86"), ((7, -86), "-86")]
)
def test_FloatFormat_names_the_width_it_refuses(bits, named):
    case(f"FloatFormat{bits}: the message names the width, and the range that it is not in")
    end = "52" if bits[0] == 7 else "10" if len(bits) == 3 else "11"
    with expect_raises(ValueError, named, end, read=REFUSES):
        amp.FloatFormat(*bits)


# ---- round_to_format -------------------------------------------------------------------------------------------------


def test_round_to_format_by_hand():
    case("float16 near 2048, where its numbers are 2 apart: 2049 and 2051 are ties")
    x = torch.tensor([2048.9, 2049.0, 2049.1, 2051.0, -2051.0, 1.0 + 2.0**-11])
    expected = torch.tensor([2048.0, 2048.0, 2050.0, 2052.0, -2052.0, 1.0])
    expect_close(amp.round_to_format(x, Format("float16")), expected, atol=0, rtol=0, read=SPACING)


def test_round_to_format_keeps_subnormals():
    case("float16 below 2**-14: numbers are 2**-24 apart, down to 0")
    unit = 2.0**-24
    x = torch.tensor([0.4, 0.5, 0.6, 1.5, 2.4, -0.4, 1023.5]) * unit
    expected = torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0, -0.0, 1024.0]) * unit
    same_bits(amp.round_to_format(x, Format("float16")), expected, x, SPACING)


def test_round_to_format_overflows_only_after_rounding():
    case("float16, x = 65504, 65519, 65520, -65520, 1e30: 65519 rounds down to 65504, the last three are infinite")
    x = torch.tensor([65_504.0, 65_519.0, 65_520.0, -65_520.0, 1e30])
    expected = torch.tensor([65_504.0, 65_504.0, torch.inf, -torch.inf, torch.inf])
    expect_close(amp.round_to_format(x, Format("float16")), expected, atol=0, rtol=0, read=BEYOND)


def test_round_to_format_of_infinity_and_nan():
    case("float16, x = inf, -inf, nan: each stays what it is")
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    expect_close(amp.round_to_format(x, Format("float16")), x.clone(), atol=0, rtol=0, read=BEYOND)


def test_round_to_format_saturates_without_infinity():
    case("float8_e4m3fn, x = 447, 448, 463, 465, -1000: 448 is the greatest, and all beyond it becomes 448")
    x = torch.tensor([447.0, 448.0, 463.0, 465.0, -1000.0])
    expected = torch.tensor([448.0, 448.0, 448.0, 448.0, -448.0])
    expect_close(amp.round_to_format(x, Format("float8_e4m3fn")), expected, atol=0, rtol=0, read=BEYOND)
    case("float8_e4m3fn, x = inf, -inf, nan: infinity becomes 448 with its sign, NaN stays NaN")
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([448.0, -448.0, torch.nan])
    expect_close(amp.round_to_format(x, Format("float8_e4m3fn")), expected, atol=0, rtol=0, read=BEYOND)
    case("3 exponent and 2 mantissa bits without infinity, x = 21, 23, -30, inf: 24 is the greatest")
    x = torch.tensor([21.0, 23.0, -30.0, torch.inf])
    expected = torch.tensor([20.0, 24.0, -24.0, 24.0])
    expect_close(amp.round_to_format(x, Format((3, 2, False))), expected, atol=0, rtol=0, read=BEYOND)


def test_round_to_format_leaves_what_the_format_has():
    case("float64 to 11 exponent and 52 mantissa bits: x = the numbers next below 8, 1024, 2**100, and the extremes")
    below = [math.nextafter(power, 0.0) for power in (8.0, 1024.0, 2.0**100)]
    extremes = [sys.float_info.max, sys.float_info.min, 5e-324, -0.0]
    x = torch.tensor([*below, 1.0, *extremes], dtype=torch.float64)
    same_bits(amp.round_to_format(x, Format("float64")), x.clone(), x, SPACING)
    case("float64 to 11 exponent and 52 mantissa bits: 20,000 random bit patterns, which all stay what they are")
    patterns = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=torch.Generator().manual_seed(0))
    x = patterns.view(torch.float64)
    same_bits(amp.round_to_format(x, Format("float64")), x.clone(), x, SPACING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", CAST)
def test_round_to_format_equals_a_cast_for_every_float16(name, dtype):
    case(f"all 65,536 bit patterns of float16, as {str(dtype)[6:]}, to {name}")
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).to(dtype)
    if name == "float8_e4m3fn":
        x = x[x.abs() <= 448]  # beyond it PyTorch before 2.12 gives NaN
    same_bits(amp.round_to_format(x, Format(name)), x.to(CAST[name]).to(dtype), x, SPACING)


@pytest.mark.parametrize("name", CAST)
def test_round_to_format_equals_a_cast_for_float32_patterns(name):
    case(f"every upper half of a float32 with eight lower halves, and 100,000 random patterns, to {name}")
    high = torch.arange(2**16, dtype=torch.int64)[:, None] * 2**16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    drawn = torch.randint(2**32, (100_000,), generator=torch.Generator().manual_seed(0))
    patterns = torch.cat([(high + low).flatten(), drawn])
    x = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    if name == "float8_e4m3fn":
        x = x[x.abs() <= 448]
    same_bits(amp.round_to_format(x, Format(name)), x.to(CAST[name]).float(), x, SPACING)


@pytest.mark.parametrize(("name", "numpy_dtype"), [("float16", np.float16), ("float32", np.float32)])
def test_round_to_format_rounds_float64_once(name, numpy_dtype):
    case(f"float64 to {name}, just off the ties, where rounding to float32 on the way would make a tie of it")
    draw = np.random.default_rng(0)
    grid = draw.standard_normal(20_000).astype(numpy_dtype)
    half = np.abs(np.spacing(grid)).astype(np.float64) / 2
    x = grid.astype(np.float64) + half + draw.choice([-1, 0, 1], grid.shape) * half * 2.0**-25
    expected = torch.from_numpy(x.astype(numpy_dtype).astype(np.float64))
    answer = amp.round_to_format(torch.from_numpy(x), Format(name))
    expect_close(answer, expected, atol=0, rtol=0, read=SPACING)


def test_round_to_format_any_shape_and_x_unchanged():
    case("x [3, 2], a transposed view; x [] and x [0]")
    x = torch.linspace(-3, 3, 6).view(2, 3).T
    before = x.clone()
    fmt = Format("float8_e5m2")
    expect_close(amp.round_to_format(x, fmt), x.to(torch.float8_e5m2).float(), atol=0, rtol=0, read=SPACING)
    expect_close(x, before, name="x afterwards", atol=0, rtol=0)
    wide = torch.tensor([1.1, -3.3], dtype=torch.float64)
    amp.round_to_format(wide, fmt)
    expect_close(wide, torch.tensor([1.1, -3.3], dtype=torch.float64), name="a float64 x afterwards", atol=0, rtol=0)
    expect_close(amp.round_to_format(torch.tensor(1.1), fmt), torch.tensor(1.0), atol=0, rtol=0, read=SPACING)
    expect_close(amp.round_to_format(torch.empty(0), fmt), torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_round_to_format_of_narrow_tensors(dtype):
    for name in ("float16", "float8_e4m3fn", "float32"):
        case(f"x = -448, 0.3, -0.001, 5 and 0 in {str(dtype)[6:]}, to {name}")
        x = torch.tensor([-448.0, 0.3, -0.001, 5.0, 0.0]).to(dtype)
        expected = x.float().to(CAST[name]).float().to(dtype)
        found = amp.round_to_format(x, Format(name))
        expect_equal(found.dtype, dtype, name="out.dtype", read="the contract, under Returns")
        expect_close(found.float(), expected.float(), atol=0, rtol=0, answer=found.float(), read=SPACING)


def test_round_to_format_refuses_integers():
    case("x int64")
    with expect_raises(ValueError, "int64", read="the contract, under Raises"):
        amp.round_to_format(torch.arange(3), Format("float16"))


@oracle
def test_round_to_format_finds_the_nearest():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    case("any format of up to 5 and 6 bits, any number: nothing in the format is nearer")

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 5), st.integers(1, 6), st.floats(-(2.0**12), 2.0**12))
    def nearest(exponent_bits, mantissa_bits, number):
        fmt = amp.FloatFormat(exponent_bits, mantissa_bits)
        count = 2 ** (exponent_bits + mantissa_bits)
        codes = torch.arange(count - 2**mantissa_bits, dtype=torch.float64)
        exponent = (codes / 2**mantissa_bits).floor()
        fraction = codes - exponent * 2**mantissa_bits
        grid = torch.where(exponent > 0, 2.0**mantissa_bits + fraction, fraction)
        grid = grid * torch.exp2(exponent.clamp(min=1) - 1) * fmt.min_subnormal
        found = amp.round_to_format(torch.tensor(number, dtype=torch.float64), fmt).abs()
        if found.isfinite():
            assert found in grid
            assert (found - abs(number)).abs() == (grid - abs(number)).abs().min()
        else:
            assert abs(number) >= fmt.max * (1 + fmt.epsilon / 4)

    nearest()


# ---- accumulate ------------------------------------------------------------------------------------------------------

HALF, SINGLE = torch.float16, torch.float32


def test_accumulate_by_hand():
    case("2048, then 1 four times, in float16, whose numbers are 2 apart there: the total stays")
    values = [2048.0, 1.0, 1.0, 1.0, 1.0]
    expect_close(amp.accumulate(values, HALF, HALF), torch.tensor(2048.0, dtype=HALF), atol=0, rtol=0, read=SUM)
    expect_close(amp.accumulate(values, SINGLE, HALF), torch.tensor(2052.0), atol=0, rtol=0, read=SUM)
    expect_close(amp.accumulate(values[::-1], HALF, HALF), torch.tensor(2052.0, dtype=HALF), atol=0, rtol=0, read=SUM)


@pytest.mark.parametrize(
    ("accumulator", "value", "expected"),
    [(SINGLE, SINGLE, 10.000134468), (HALF, HALF, 9.953125), (SINGLE, HALF, 10.0021362), (HALF, SINGLE, 9.953125)],
)
def test_accumulate_gives_the_four_sums(accumulator, value, expected):
    case(f"0.01 a thousand times; total {str(accumulator)[6:]}, values {str(value)[6:]}")
    values = torch.full((1000,), 0.01)
    answer = amp.accumulate(values, accumulator, value)
    expect_close(answer, torch.tensor(expected, dtype=accumulator), atol=1e-6, rtol=0, read=SUM)
    expect_close(values, torch.full((1000,), 0.01), atol=0, rtol=0, name="values afterwards")


@pytest.mark.parametrize("accumulator", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.float16, torch.bfloat16, torch.float32])
def test_accumulate_equals_torch_one_by_one(accumulator, value):
    case(f"200 random numbers; total {str(accumulator)[6:]}, values {str(value)[6:]}")
    values = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.zeros((), dtype=accumulator)
    for number in values.tolist():
        total += torch.tensor(number, dtype=value)
    expect_close(amp.accumulate(values, accumulator, value), total, atol=0, rtol=0, read=SUM)


def test_accumulate_takes_lists_and_generators():
    case("a list, a tuple, a generator, nothing")
    for values in ([0.5, 1.5], (0.5, 1.5), (n + 0.5 for n in range(2)), np.array([0.5, 1.5])):
        answer = amp.accumulate(values, accumulator_dtype=torch.bfloat16, value_dtype=SINGLE)
        expect_close(answer, torch.tensor(2.0, dtype=torch.bfloat16), read=SUM)
    expect_close(amp.accumulate([], SINGLE, SINGLE), torch.tensor(0.0), read=SUM)


def test_accumulate_takes_a_matrix_of_any_strides():
    case("[[1, 2], [3, 4]] transposed, so that its numbers don't lie one after another in memory")
    answer = amp.accumulate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, SINGLE, SINGLE)
    expect_close(answer, torch.tensor(10.0), read=SUM)


def test_accumulate_keeps_the_digits_of_a_list():
    case("a list of 1 and 2**-40, total and values float64: no number may pass through float32 on the way")
    answer = amp.accumulate([1.0, 2.0**-40], torch.float64, torch.float64)
    expect_close(answer, torch.tensor(1 + 2.0**-40, dtype=torch.float64), atol=0, rtol=0, read=SUM)
    case("a list of 1 + 2**-40 alone, total and values float64")
    answer = amp.accumulate([1 + 2.0**-40], torch.float64, torch.float64)
    expect_close(answer, torch.tensor(1 + 2.0**-40, dtype=torch.float64), atol=0, rtol=0, read=SUM)


def test_accumulate_stays_on_the_device():
    case("three values on the meta device, which has no numbers: the total is there too")
    answer = amp.accumulate(torch.ones(3, device="meta"), HALF, SINGLE)
    where = (answer.device.type, answer.dtype)
    expect_equal(where, ("meta", HALF), name="device and dtype", read="the contract, under Returns")
