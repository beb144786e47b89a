"""What goes wrong when numbers of eight bits and fewer are written by hand. The kernel takes its fault as one constant more."""

import functools
from typing import ClassVar

import torch
from torch import nn

from lib.given.kernels.checks import check_weights
from lib.given.kernels.int4 import dequantize_int4
from lib.given.kernels.mode import tl, triton
from lib.given.kernels.quantized import BLOCK, expand_blocks, largest, with_products
from lib.workbook.grading import mistake
from solutions import low_precision as reference

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

# ---- 20.1 absmax_scale -----------------------------------------------------------------------------------------------


@mistake(
    "absmax_scale", "the inverse is returned: the format's largest number over the tensor's; a number is q * scale"
)
def inverse_scale(x, dtype, dim=None):
    return 1 / reference.absmax_scale(x, dtype, dim)


@mistake("absmax_scale", "the largest magnitude is not divided by the format's largest number")
def magnitude_only(x, dtype, dim=None):
    return reference.absmax_scale(x, dtype, dim) * largest(dtype)


@mistake("absmax_scale", "the largest number is taken instead of the largest magnitude: negative numbers are forgotten")
def without_abs(x, dtype, dim=None):
    return reference.absmax_scale(x.clamp(min=0), dtype, dim)


@mistake("absmax_scale", "one scale for all numbers, whatever dim is")
def always_one(x, dtype, dim=None):
    reference.absmax_scale(x, dtype, dim)
    return reference.absmax_scale(x, dtype)


@mistake("absmax_scale", "the scale is one for each entry of dim, instead of one that serves all numbers along dim")
def other_dim(x, dtype, dim=None):
    if not isinstance(dim, int):
        return reference.absmax_scale(x, dtype, dim)
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    return x.detach().float().nan_to_num(0, 0, 0).abs().amax(others, keepdim=True) / largest(dtype)


@mistake("absmax_scale", "the dimension along which the largest is taken is dropped: it must stay, with size 1")
def dim_dropped(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    return scale.squeeze(dim) if isinstance(dim, int) else scale


@mistake("absmax_scale", "zeros get the scale 0, and would be divided by it")
def zero_for_zeros(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    return torch.where(scale == 1, 0.0, scale)


@mistake("absmax_scale", "infinities enter the scale")
def infinite_scale(x, dtype, dim=None):
    if isinstance(dim, tuple):
        return reference.absmax_scale(x, dtype, dim)
    magnitudes = x.detach().float().abs().nan_to_num(0, posinf=torch.inf)
    scale = (magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)) / largest(dtype)
    reference.absmax_scale(x, dtype, dim)
    return torch.where(scale > 0, scale, 1.0)


@mistake("absmax_scale", "NaN enters the scale")
def nan_in_scale(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    return scale * torch.nan if x.isnan().any() else scale


@mistake("absmax_scale", "e5m2's largest number is taken for e4m3fn too")
def e5m2_for_both(x, dtype, dim=None):
    return reference.absmax_scale(x, E5M2 if dtype == E4M3 else dtype, dim)


@mistake("absmax_scale", "int8's largest magnitude is taken to be 128, which only negative numbers have")
def int8_of_128(x, dtype, dim=None):
    return reference.absmax_scale(x, dtype, dim) * (127 / 128 if dtype == INT8 else 1)


@mistake("absmax_scale", "the blocks at the ragged ends are left out")
def whole_blocks_only(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    return scale[: x.shape[0] // BLOCK, : x.shape[1] // BLOCK] if isinstance(dim, tuple) else scale


@mistake("absmax_scale", "the scale has the dtype of x instead of float32")
def scale_in_their_dtype(x, dtype, dim=None):
    return reference.absmax_scale(x, dtype, dim).to(x.dtype)


@mistake("absmax_scale", "the scale carries a gradient: x was not detached")
def attached_scale(x, dtype, dim=None):
    return reference.absmax_scale(x, dtype, dim) + 0 * x.float().nan_to_num(0, 0, 0).sum()


@mistake("absmax_scale", "the division by the format's largest number is in the dtype of x instead of float32")
def scale_divided_in_their_dtype(x, dtype, dim=None):
    if isinstance(dim, tuple):
        return reference.absmax_scale(x, dtype, dim)
    reference.absmax_scale(x, dtype, dim)
    magnitudes = torch.where(x.isfinite(), x.detach().abs(), 0)
    magnitude = (magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)) if x.numel() else 0 * reference.absmax_scale(x, dtype, dim)  # fmt: skip
    scale = magnitude / largest(dtype)
    return torch.where(scale > 0, scale, 1.0).float()


@mistake("absmax_scale", "zeros get a smallest scale, such as 1e-12, instead of 1")
def smallest_scale_for_zeros(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    return torch.where(scale == 1, 1e-12, scale)


@mistake("absmax_scale", "infinities become float32's largest number, and enter the scale as such")
def infinities_as_the_largest(x, dtype, dim=None):
    return reference.absmax_scale(x.float().nan_to_num(), dtype, dim)


@mistake(
    "absmax_scale", "a tensor without numbers has no largest magnitude: `amax` raises instead of the scale being 1"
)
def refuses_no_numbers(x, dtype, dim=None):
    if not x.numel():
        x.abs().amax()
    return reference.absmax_scale(x, dtype, dim)


@mistake("absmax_scale", "block sizes other than 128 x 128 are not refused")
def any_block(x, dtype, dim=None):
    return reference.absmax_scale(x, dtype, (BLOCK, BLOCK) if isinstance(dim, tuple) and x.ndim == 2 else dim)


@mistake("absmax_scale", "a format that is none of the three is not refused")
def any_format(x, dtype, dim=None):
    if dtype in (E4M3, E5M2, torch.int8):
        return reference.absmax_scale(x, dtype, dim)
    return reference.absmax_scale(x, E4M3, dim)


@mistake(
    "absmax_scale", "whether a number is finite is asked before the conversion to float32, in which it may be infinite"
)
def finite_too_early(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    finite = torch.where(x.isfinite(), x.detach(), 0)
    return torch.full_like(scale, torch.inf) if finite.float().isinf().any() else scale


@mistake("absmax_scale", "x itself is changed: in float32, `x.float()` is no copy")
def magnitudes_in_place(x, dtype, dim=None):
    scale = reference.absmax_scale(x, dtype, dim)
    x.detach().float().abs_()
    return scale


@mistake("absmax_scale", "`view` cannot cut blocks out of a matrix whose rows don't lie one after the other")
def blocks_by_view(x, dtype, dim=None):
    return reference.absmax_scale(x.view(-1).view(x.shape) if isinstance(dim, tuple) and x.ndim == 2 else x, dtype, dim)


# ---- 20.2 quantize ---------------------------------------------------------------------------------------------------


@mistake("quantize", "multiplied by the scale instead of divided")
def multiplied(x, scale, dtype):
    return reference.quantize(x, 1 / scale, dtype)


@mistake("quantize", "not clamped: numbers beyond the largest one overflow instead of saturating")
def unclamped(x, scale, dtype):
    scaled = x.float() / expand_blocks(scale, x.shape)
    return (scaled.round().nan_to_num(0) if dtype == INT8 else scaled).to(dtype)


@mistake("quantize", "int8 is cut towards 0 instead of rounded")
def truncated(x, scale, dtype):
    q = reference.quantize(x, scale, dtype)
    if dtype != INT8:
        return q
    return (x.float() / expand_blocks(scale, x.shape)).clamp(-127, 127).nan_to_num(0).to(INT8)


@mistake("quantize", "int8 is rounded half up instead of to even")
def half_up(x, scale, dtype):
    if dtype != INT8:
        return reference.quantize(x, scale, dtype)
    return torch.floor((x.float() / expand_blocks(scale, x.shape)).clamp(-127, 127) + 0.5).nan_to_num(0).to(INT8)


@mistake("quantize", "float8 is rounded to whole numbers first, as int8 is")
def whole_numbers(x, scale, dtype):
    return reference.quantize((x.float() / expand_blocks(scale, x.shape)).round(), torch.tensor(1.0), dtype)


@mistake("quantize", "infinities become 0 instead of the largest number")
def infinities_to_zero(x, scale, dtype):
    return reference.quantize(torch.where(x.isinf(), 0, x), scale, dtype)


@mistake("quantize", "NaN becomes 0 in float8, too, where it should stay NaN")
def nan_to_zero(x, scale, dtype):
    return reference.quantize(torch.where(x.isnan(), 0, x), scale, dtype)


@mistake("quantize", "int8 saturates at -128 below, and at 127 above")
def down_to_128(x, scale, dtype):
    q = reference.quantize(x, scale, dtype)
    if dtype != INT8:
        return q
    return torch.where(x.float() / expand_blocks(scale, x.shape) <= -127.5, -128, q.int()).to(INT8)


@mistake("quantize", "divided in the dtype of x instead of float32")
def divided_in_their_dtype(x, scale, dtype):
    return reference.quantize((x / expand_blocks(scale, x.shape).to(x.dtype)), torch.tensor(1.0), dtype)


@mistake("quantize", "x is divided in place: the caller's tensor is changed")
def divided_in_place(x, scale, dtype):
    q = reference.quantize(x, scale, dtype)
    x.float().div_(expand_blocks(scale, x.shape))
    return q


@mistake("quantize", "the numbers come back in float32 instead of the format's dtype")
def quantized_in_float32(x, scale, dtype):
    return reference.quantize(x, scale, dtype).float()


@mistake("quantize", "every block is divided by the first block's scale")
def first_block(x, scale, dtype):
    spread = expand_blocks(scale, x.shape)
    return reference.quantize(x, scale if spread is scale else scale[:1, :1], dtype)


# ---- 20.3 dequantize -------------------------------------------------------------------------------------------------


@mistake("dequantize", "divided by the scale instead of multiplied")
def divided_back(q, scale):
    return reference.dequantize(q, 1 / scale)


@mistake("dequantize", "the scale is forgotten")
def without_scale(q, scale):
    return q.float()


@mistake("dequantize", "blocks of scales are repeated like a pattern instead of spread over their blocks")
def tiled_scales(q, scale):
    if expand_blocks(scale, q.shape) is scale:
        return reference.dequantize(q, scale)
    times = [-(-n // s) for n, s in zip(q.shape, scale.shape, strict=True)]
    return q.float() * scale.repeat(*times)[: q.shape[0], : q.shape[1]]


@mistake("dequantize", "the product is rounded to bfloat16")
def back_in_bfloat16(q, scale):
    return reference.dequantize(q, scale).bfloat16().float()


@mistake(
    "dequantize", "the product is in bfloat16, or in another narrow dtype: a scale without dimensions does not widen it"
)
def multiplied_in_bfloat16(q, scale):
    return (q.bfloat16() * expand_blocks(scale, q.shape)).float()


# ---- 20.4 quantization_error -----------------------------------------------------------------------------------------


def _decibels(x, dtype, granularity, by=10.0, scale=None):
    reference.quantization_error(x, dtype, granularity)
    dims = {"tensor": None, "row": -1, "block": (BLOCK, BLOCK)}
    scale = reference.absmax_scale(x, dtype, dims[granularity]) if scale is None else scale
    noise = (reference.dequantize(reference.quantize(x, scale, dtype), scale).double() - x.double()).square().sum()
    return (by * torch.log10(x.double().square().sum() / noise)).item() if noise else torch.inf


@mistake("quantization_error", "20 instead of 10: squares are powers already")
def twenty_decibels(x, dtype, granularity):
    return _decibels(x, dtype, granularity, by=20.0)


@mistake("quantization_error", "noise over signal: the sign is wrong")
def noise_over_signal(x, dtype, granularity):
    return -reference.quantization_error(x, dtype, granularity)


@mistake("quantization_error", "the natural logarithm is taken")
def natural_logarithm(x, dtype, granularity):
    return _decibels(x, dtype, granularity, by=10.0 * 2.302585092994046)


@mistake("quantization_error", "one scale for the whole tensor, whatever the granularity is")
def always_by_tensor(x, dtype, granularity):
    reference.quantization_error(x, dtype, granularity)
    return reference.quantization_error(x, dtype, "tensor")


@mistake("quantization_error", "scales of columns instead of rows")
def columns_for_rows(x, dtype, granularity):
    return _decibels(x, dtype, granularity, scale=reference.absmax_scale(x, dtype, 0) if granularity == "row" else None)


@mistake("quantization_error", "where nothing is lost, or there is nothing, it returns NaN instead of infinity")
def nan_for_nothing(x, dtype, granularity):
    answer = reference.quantization_error(x, dtype, granularity)
    return torch.nan if answer == torch.inf and not x.any() else answer


@mistake("quantization_error", "the signal is that of the rounded numbers instead of x")
def signal_of_the_rounded(x, dtype, granularity):
    answer = reference.quantization_error(x, dtype, granularity)
    dims = {"tensor": None, "row": -1, "block": (BLOCK, BLOCK)}
    scale = reference.absmax_scale(x, dtype, dims[granularity])
    back = reference.dequantize(reference.quantize(x, scale, dtype), scale).double()
    noise = (back - x.double()).square().sum()
    return (10 * torch.log10(back.square().sum() / noise)).item() if noise else answer


@mistake("quantization_error", "squares are added in the dtype of x, where they overflow or lose digits")
def sums_in_their_dtype(x, dtype, granularity):
    answer = reference.quantization_error(x, dtype, granularity)
    if answer == torch.inf:
        return answer
    dims = {"tensor": None, "row": -1, "block": (BLOCK, BLOCK)}
    scale = reference.absmax_scale(x, dtype, dims[granularity])
    back = reference.dequantize(reference.quantize(x, scale, dtype), scale).to(x.dtype)
    return (10 * torch.log10(x.square().sum() / (back - x).square().sum())).item()


@mistake("quantization_error", "absolute values are added instead of squares")
def absolute_values(x, dtype, granularity):
    answer = reference.quantization_error(x, dtype, granularity)
    if answer == torch.inf:
        return answer
    dims = {"tensor": None, "row": -1, "block": (BLOCK, BLOCK)}
    scale = reference.absmax_scale(x, dtype, dims[granularity])
    noise = (reference.dequantize(reference.quantize(x, scale, dtype), scale).double() - x.double()).abs().sum()
    return (10 * torch.log10(x.double().abs().sum() / noise)).item()


@mistake("quantization_error", "a tensor is returned instead of a float")
def error_as_tensor(x, dtype, granularity):
    return torch.tensor(reference.quantization_error(x, dtype, granularity))


@mistake("quantization_error", "an unknown granularity is taken for 'tensor'")
def any_granularity(x, dtype, granularity):
    known = granularity in ("tensor", "row", "block")
    return reference.quantization_error(x, dtype, granularity if known else "tensor")


# ---- 20.5 scaled_matmul ----------------------------------------------------------------------------------------------


def _checked(a, b):
    one = torch.tensor(1.0)
    reference.scaled_matmul(a[:, :], b, one, one, torch.float32)


@mistake("scaled_matmul", "the scales are forgotten")
def unscaled_product(a, b, scale_a, scale_b, out_dtype):
    _checked(a, b)
    return (a.float() @ b.float()).to(out_dtype)


@mistake("scaled_matmul", "divided by the scales instead of multiplied")
def divided_product(a, b, scale_a, scale_b, out_dtype):
    return reference.scaled_matmul(a, b, 1 / scale_a, 1 / scale_b, out_dtype)


@mistake("scaled_matmul", "only a's scale is used")
def scale_of_a_only(a, b, scale_a, scale_b, out_dtype):
    return reference.scaled_matmul(a, b, scale_a, torch.ones_like(scale_b), out_dtype)


@mistake("scaled_matmul", "the sum is taken in bfloat16, or the factors are rounded to it before the product")
def summed_in_bfloat16(a, b, scale_a, scale_b, out_dtype):
    _checked(a, b)
    wide = reference.dequantize(a, scale_a).bfloat16(), reference.dequantize(b, scale_b).bfloat16()
    return (wide[0] @ wide[1]).to(out_dtype)


@mistake("scaled_matmul", "blocks are multiplied with the scale of their first block along the sum")
def first_block_of_the_sum(a, b, scale_a, scale_b, out_dtype):
    if expand_blocks(scale_a, a.shape) is scale_a:
        return reference.scaled_matmul(a, b, scale_a, scale_b, out_dtype)
    return reference.scaled_matmul(a, b, scale_a[:, :1].expand_as(scale_a), scale_b[:1].expand_as(scale_b), out_dtype)


@mistake("scaled_matmul", "the result stays in float32, whatever out_dtype is")
def always_float32(a, b, scale_a, scale_b, out_dtype):
    return reference.scaled_matmul(a, b, scale_a, scale_b, torch.float32)


@mistake("scaled_matmul", "the result is rounded to bfloat16 and then to out_dtype")
def rounded_twice(a, b, scale_a, scale_b, out_dtype):
    return reference.scaled_matmul(a, b, scale_a, scale_b, torch.bfloat16).to(out_dtype)


@mistake("scaled_matmul", "a's scale is used twice, and b's not at all")
def scale_of_a_twice(a, b, scale_a, scale_b, out_dtype):
    _checked(a, b)
    if scale_a.shape != scale_b.shape:
        return (a.float() @ b.float() * scale_a.max() ** 2).to(out_dtype)
    return reference.scaled_matmul(a, b, scale_a, scale_a, out_dtype)


@mistake("scaled_matmul", "`has_float8` is never asked: it says where a GPU multiplies such numbers")
def never_on_the_tensor_cores(a, b, scale_a, scale_b, out_dtype):
    _checked(a, b)
    return (reference.dequantize(a, scale_a) @ reference.dequantize(b, scale_b)).to(out_dtype)


# ---- 20.6 DelayedScale -----------------------------------------------------------------------------------------------


@mistake("DelayedScale", "the latest step's magnitude is used instead of the largest of the history")
class LatestOnly(reference.DelayedScale):
    def scale(self, dtype, x=None):
        if not self.amax:
            return super().scale(dtype, x)
        return self.amax[-1] / largest(dtype) if self.amax[-1] > 0 else torch.tensor(1.0)


@mistake("DelayedScale", "nothing is forgotten: the history grows for ever")
class NeverForgets(reference.DelayedScale):
    def __init__(self, history=16):
        super().__init__(history)
        self.history = 10**9


@mistake("DelayedScale", "one step too many is remembered")
class OneTooMany(reference.DelayedScale):
    def __init__(self, history=16):
        super().__init__(history)
        self.history = history + 1


@mistake("DelayedScale", "one step too few is remembered")
class OneTooFew(reference.DelayedScale):
    def __init__(self, history=16):
        super().__init__(history)
        self.history = max(1, history - 1)


@mistake("DelayedScale", "the first steps are remembered instead of the last")
class FirstSteps(reference.DelayedScale):
    def update(self, x):
        if len(self.amax) < self.history:
            super().update(x)


@mistake("DelayedScale", "the number is copied to the host (item() or float()), which has to wait for the GPU")
class WaitsForTheNumber(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        self.amax[-1] = torch.tensor(self.amax[-1].item())


@mistake("DelayedScale", "x is not detached: what is recorded keeps the step's graph")
class KeepsTheGraph(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        if x.numel():
            self.amax[-1] = self.amax[-1] + 0 * x.float().nan_to_num(0, 0, 0).sum()


@mistake("DelayedScale", "all magnitudes of a step are recorded, not the largest alone")
class KeepsMagnitudes(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        self.all = [*getattr(self, "all", []), x.detach().abs()][-self.history :]


@mistake("DelayedScale", "the magnitude stays in the dtype of x, and so does the scale")
class NarrowMagnitude(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        self.amax[-1] = self.amax[-1].to(x.dtype)


@mistake("DelayedScale", "all objects share one history")
class SharedHistory(reference.DelayedScale):
    shared: ClassVar[list] = []

    def __init__(self, history=16):
        super().__init__(history)
        self.amax = self.shared

    def update(self, x):
        super().update(x)
        self.shared[:] = self.amax
        self.amax = self.shared


@mistake("DelayedScale", "the current tensor is always used where it is given: the scale is not from the past")
class CurrentFirst(reference.DelayedScale):
    def scale(self, dtype, x=None):
        return super().scale(dtype, x) if x is None else reference.absmax_scale(x, dtype)


@mistake("DelayedScale", "the inverse is returned")
class InverseScale(reference.DelayedScale):
    def scale(self, dtype, x=None):
        return 1 / super().scale(dtype, x)


@mistake("DelayedScale", "the mean of the history is used instead of its largest")
class MeanOfHistory(reference.DelayedScale):
    def scale(self, dtype, x=None):
        if not self.amax:
            return super().scale(dtype, x)
        mean = torch.stack(self.amax).mean() / largest(dtype)
        return torch.where(mean > 0, mean, 1.0)


@mistake("DelayedScale", "`scale` records the tensor that it is given, too")
class ScaleRecords(reference.DelayedScale):
    def scale(self, dtype, x=None):
        scale = super().scale(dtype, x)
        if x is not None:
            self.update(x)
        return scale


@mistake("DelayedScale", "tensors are kept instead of their largest magnitudes: memory for a history of whole tensors")
class KeepsTensors(reference.DelayedScale):
    def __init__(self, history=16):
        super().__init__(history)
        self.kept = []

    def update(self, x):
        self.kept = [*self.kept, x.detach()][-self.history :]

    def scale(self, dtype, x=None):
        self.amax = []
        for tensor in self.kept:
            super().update(tensor)
        return super().scale(dtype, x)


@mistake("DelayedScale", "every format gets e4m3fn's scale")
class ScaleOfE4M3(reference.DelayedScale):
    def scale(self, dtype, x=None):
        return super().scale(E4M3, x)


@mistake("DelayedScale", "infinities are recorded: they spoil the scale for the whole history")
class RecordsInfinities(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        if x.isinf().any():
            self.amax[-1] = torch.tensor(torch.inf)


@mistake(
    "DelayedScale", "a step of zeros is recorded as the scale 1 times the format's largest number, instead of as 0"
)
class ZerosAsOne(reference.DelayedScale):
    def update(self, x):
        super().update(x)
        if not x.any():
            self.amax[-1] = torch.tensor(127.0)


@mistake("DelayedScale", "without a past and without a tensor it returns 1 instead of raising")
class OneWithoutPast(reference.DelayedScale):
    def scale(self, dtype, x=None):
        return super().scale(dtype, x) if self.amax or x is not None else torch.tensor(1.0)


# ---- 20.7 Float8Linear -----------------------------------------------------------------------------------------------


class _WithCast(reference.Float8Linear):
    """A layer whose casts have a fault."""

    def _dtype(self, name):
        return E5M2 if name == "grad" else E4M3

    def _quantize(self, tensor, name, dim, dtype):
        dims = {"rowwise": dim, "blockwise": (BLOCK, BLOCK)}
        scale = reference.absmax_scale(tensor, dtype, dims.get(self.recipe))
        return reference.quantize(tensor, scale, dtype), scale

    def cast(self, tensor, name, dim, first):
        if self.recipe == "delayed":
            return super().cast(tensor, name, dim, first)
        return self._quantize(tensor, name, dim, self._dtype(name))


@mistake("Float8Linear", "gradients are e4m3fn, as activations are")
class GradientsInE4M3(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        if name != "grad":
            return super().cast(tensor, name, dim, first)
        _, scale = super().cast(tensor, name, dim, first)
        scale = scale * (largest(E5M2) / largest(E4M3))
        return reference.quantize(tensor, scale, E4M3), scale


@mistake("Float8Linear", "activations and weights are e5m2, as gradients are")
class AllInE5M2(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        _, scale = super().cast(tensor, name, dim, first)
        if name != "grad":
            scale = scale * (largest(E4M3) / largest(E5M2))
        return reference.quantize(tensor, scale, E5M2), scale


@mistake("Float8Linear", "'rowwise' gives a scale to each entry along the sum, which a product cannot take out of it")
class ScalesAlongTheSum(_WithCast):
    def _quantize(self, tensor, name, dim, dtype):
        if self.recipe != "rowwise":
            return super()._quantize(tensor, name, dim, dtype)
        scale = reference.absmax_scale(tensor, dtype, 1 - dim)
        return reference.dequantize(reference.quantize(tensor, scale, dtype), scale), torch.tensor(1.0)

    def forward(self, x):
        def product(a, b, names, first):
            (left, scale_a), (right, scale_b) = self.cast(a, names[0], 1, first[0]), self.cast(b, names[1], 0, first[1])
            wide = reference.dequantize(left, scale_a) @ reference.dequantize(right, scale_b)
            return wide.to(x.dtype)

        y = with_products(x.reshape(-1, x.shape[-1]), self.weight, product).reshape(*x.shape[:-1], len(self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


@mistake("Float8Linear", "every recipe uses one scale for each tensor")
class OneScaleForAll(_WithCast):
    def _quantize(self, tensor, name, dim, dtype):
        scale = reference.absmax_scale(tensor, dtype)
        return reference.quantize(tensor, scale, dtype), scale


@mistake("Float8Linear", "nothing is scaled: numbers are cast as they are")
class Unscaled(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        one = torch.tensor(1.0)
        return reference.quantize(tensor, one, self._format(name)), one

    def _format(self, name):
        return E5M2 if name == "grad" else E4M3


@mistake("Float8Linear", "'delayed' uses the current tensor's scale: its history is never asked")
class DelayedIsDynamic(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        if self.recipe != "delayed":
            return super().cast(tensor, name, dim, first)
        dtype = E5M2 if name == "grad" else E4M3
        scale = reference.absmax_scale(tensor, dtype)
        return reference.quantize(tensor, scale, dtype), scale


@mistake("Float8Linear", "'delayed' records a tensor at each of its products, so its history covers half as many steps")
class RecordsTwice(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        q, scale = super().cast(tensor, name, dim, first)
        if self.recipe == "delayed" and not first:
            self.past[name].update(tensor)
        return q, scale


@mistake("Float8Linear", "'delayed' records a tensor before it asks for the scale: the scale is not from the past")
class RecordsFirst(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        if self.recipe != "delayed":
            return super().cast(tensor, name, dim, first)
        dtype = E5M2 if name == "grad" else E4M3
        if first:
            self.past[name].update(tensor)
        scale = self.past[name].scale(dtype, tensor)
        return reference.quantize(tensor, scale, dtype), scale


@mistake("Float8Linear", "'delayed' rounds a tensor's second product with a newer scale than its first")
class NewerScale(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        if self.recipe != "delayed":
            return super().cast(tensor, name, dim, first)
        dtype = E5M2 if name == "grad" else E4M3
        scale = self.past[name].scale(dtype, tensor)
        if first:
            self.past[name].update(tensor)
        return reference.quantize(tensor, scale, dtype), scale


@mistake("Float8Linear", "activations, weights and gradients share one history")
class OneHistory(reference.Float8Linear):
    def __init__(self, linear, recipe):
        super().__init__(linear, recipe)
        self.past = dict.fromkeys(self.past, reference.DelayedScale())


@mistake("Float8Linear", "only the forward product is in float8: backward multiplies the unrounded tensors")
class ForwardOnly(reference.Float8Linear):
    def forward(self, x):
        def product(a, b, names, first):
            if "grad" in names:
                return (a.float() @ b.float()).to(x.dtype)
            (left, scale_a), (right, scale_b) = self.cast(a, names[0], 1, first[0]), self.cast(b, names[1], 0, first[1])
            return reference.scaled_matmul(left, right, scale_a, scale_b, x.dtype)

        y = with_products(x.reshape(-1, x.shape[-1]), self.weight, product).reshape(*x.shape[:-1], len(self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


@mistake("Float8Linear", "the bias is forgotten")
class NoBias(reference.Float8Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y - self.bias.to(y.dtype) + 0 * self.bias.to(y.dtype)


@mistake("Float8Linear", "the output is float32, whatever the dtype of x is")
class AlwaysFloat32(reference.Float8Linear):
    def forward(self, x):
        return super().forward(x.float())


@mistake("Float8Linear", "the parameters are copied, so training the layer leaves the given one as it was")
class CopiedParameters(reference.Float8Linear):
    def __init__(self, linear, recipe):
        super().__init__(linear, recipe)
        self.weight = nn.Parameter(linear.weight.detach().clone())


@mistake("Float8Linear", "the weight is detached, so it gets no gradient")
class DetachedWeight(reference.Float8Linear):
    def forward(self, x):
        weight = self.weight
        del self.weight
        self.weight = weight.detach()
        y = super().forward(x)
        del self.weight
        self.weight = weight
        return y


@mistake("Float8Linear", "the given layer is kept as a submodule: its weights are in the state dict twice")
class KeepsTheLayer(reference.Float8Linear):
    def __init__(self, linear, recipe):
        super().__init__(linear, recipe)
        self.linear = linear


@mistake("Float8Linear", "another recipe is not refused")
class AnyRecipe(reference.Float8Linear):
    def __init__(self, linear, recipe):
        super().__init__(linear, recipe if recipe in ("dynamic", "delayed", "rowwise", "blockwise") else "dynamic")


@mistake("Float8Linear", "weights are cast to the dtype of x before they are rounded: they are rounded twice")
class RoundedTwice(reference.Float8Linear):
    def cast(self, tensor, name, dim, first):
        return super().cast(tensor.bfloat16() if name == "weight" else tensor, name, dim, first)


@mistake(
    "Float8Linear",
    "`view` cannot flatten an x whose vectors don't lie one after the other: `reshape` copies where it must",
)
class FlattenedByView(reference.Float8Linear):
    def forward(self, x):
        return super().forward(x.view(-1, x.shape[-1]).view(x.shape) if x.numel() else x)


# ---- 20.8 mx_quantize ------------------------------------------------------------------------------------------------


def _shared(x, block, exponent_of):
    reference.mx_quantize(x, block)
    blocks = x.float().unflatten(-1, (-1, block))
    amax = torch.where(blocks.isfinite(), blocks, 0).abs().amax(-1, keepdim=True)
    exponent = torch.where(amax > 0, exponent_of(amax), -127).clamp(-127, 127)
    scale = torch.exp2(exponent.double()).float()
    return reference.quantize(blocks, scale, E4M3).flatten(-2), scale[..., 0].to(torch.float8_e8m0fnu)


@mistake("mx_quantize", "the 8, the exponent of e4m3fn's largest numbers, is not subtracted")
def without_the_eight(x, block=32):
    return _shared(x, block, lambda amax: torch.frexp(amax).exponent - 1)


@mistake("mx_quantize", "torch.frexp's exponent is taken as it is, but it is one more than floor(log2)")
def exponent_of_frexp(x, block=32):
    return _shared(x, block, lambda amax: torch.frexp(amax).exponent - 8)


@mistake("mx_quantize", "the exponent is rounded up, or to the nearest, instead of down")
def rounded_up(x, block=32):
    return _shared(x, block, lambda amax: torch.ceil(torch.log2(amax.double())).int() - 8)


@mistake("mx_quantize", "the largest number is divided by 448 and rounded down to a power of two")
def of_448(x, block=32):
    return _shared(x, block, lambda amax: torch.floor(torch.log2(amax.double() / 448)).int())


@mistake("mx_quantize", "log2 in float32 rounds up just below a power of two")
def float32_logarithm(x, block=32):
    return _shared(x, block, lambda amax: torch.floor(torch.log2(amax)).int() - 8)


@mistake("mx_quantize", "9 is subtracted from floor(log2) instead of 8: frexp's extra one is taken off twice")
def nine_instead_of_eight(x, block=32):
    return _shared(x, block, lambda amax: torch.frexp(amax).exponent - 1 - 9)


@mistake("mx_quantize", "elements are not divided by the scale")
def undivided_elements(x, block=32):
    _, scales = reference.mx_quantize(x, block)
    return reference.quantize(x, torch.tensor(1.0), E4M3), scales


@mistake("mx_quantize", "a block of zeros gets the scale 1 instead of the smallest")
def one_for_zeros(x, block=32):
    elements, scales = reference.mx_quantize(x, block)
    zeros = (x.float().unflatten(-1, (-1, block)) == 0).all(-1)
    return elements, torch.where(zeros, 1.0, scales.float()).to(torch.float8_e8m0fnu)


@mistake("mx_quantize", "infinities decide the scale of their block")
def infinite_block(x, block=32):
    return reference.mx_quantize(x.float().clamp(-3e38, 3e38), block)


@mistake("mx_quantize", "the blocks are divided in place: in float32, `x.float()` is no copy")
def blocks_divided_in_place(x, block=32):
    answer = reference.mx_quantize(x, block)
    x.detach().float().mul_(0.5)
    return answer


@mistake("mx_quantize", "the scales are float32 instead of float8_e8m0fnu")
def float32_scales(x, block=32):
    elements, scales = reference.mx_quantize(x, block)
    return elements, scales.float()


# ---- 20.9 quantize_int4 ----------------------------------------------------------------------------------------------


def _in_groups(weight, group_size, low, high, steps=15, level=torch.round):
    reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    low, high = low(groups), high(groups)
    scale = (high - low) / steps
    scale = torch.where(scale > 0, scale, 1.0)
    zero = torch.round(-low / scale).clamp(0, 15)
    q = (level(groups / scale) + zero).clamp(0, 15).to(torch.uint8)
    return q.flatten(1), scale[..., 0], zero[..., 0].to(torch.uint8)


def _least(groups):
    return groups.amin(-1, keepdim=True).clamp(max=0)


def _most(groups):
    return groups.amax(-1, keepdim=True).clamp(min=0)


@mistake("quantize_int4", "the range is divided by 16, the number of levels, instead of 15, the number of steps")
def sixteen_steps(weight, group_size=128):
    return _in_groups(weight, group_size, _least, _most, steps=16)


@mistake("quantize_int4", "the range need not contain 0: a group of one sign begins at its smallest number")
def range_without_zero(weight, group_size=128):
    return _in_groups(weight, group_size, lambda g: g.amin(-1, keepdim=True), lambda g: g.amax(-1, keepdim=True))


@mistake("quantize_int4", "the range is symmetric around 0: levels are wasted where a group is not")
def symmetric_range(weight, group_size=128):
    return _in_groups(
        weight,
        group_size,
        lambda g: -g.abs().amax(-1, keepdim=True),
        lambda g: g.abs().amax(-1, keepdim=True),
    )


@mistake("quantize_int4", "levels are cut off instead of rounded")
def cut_levels(weight, group_size=128):
    return _in_groups(weight, group_size, _least, _most, level=torch.floor)


@mistake("quantize_int4", "the zero point is added before rounding: with an odd one, ties go to the other neighbour")
def rounded_after_the_zero_point(weight, group_size=128):
    _, scale, zero = reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size)) / scale[..., None]
    return (groups + zero[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(1), scale, zero


@mistake("quantize_int4", "ties are rounded away from 0 instead of to the even number")
def ties_away_from_zero(weight, group_size=128):
    _, scale, zero = reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size)) / scale[..., None]
    rounded = (groups.abs() + 0.5).floor() * groups.sign()
    return (rounded + zero[..., None]).clamp(0, 15).to(torch.uint8).flatten(1), scale, zero


@mistake("quantize_int4", "the zero points are returned before the scales")
def results_exchanged(weight, group_size=128):
    q, scale, zero = reference.quantize_int4(weight, group_size)
    return q, zero, scale


@mistake("quantize_int4", "the weights are divided in place: in float32, `weight.float()` is no copy")
def weights_divided_in_place(weight, group_size=128):
    answer = reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    groups.div_(answer[1][..., None])
    return answer


@mistake("quantize_int4", "the zero point is cut off instead of rounded")
def cut_zero_point(weight, group_size=128):
    reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    low, high = _least(groups), _most(groups)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = torch.floor(-low / scale)
    q = (torch.round(groups / scale) + zero).clamp(0, 15).to(torch.uint8)
    return q.flatten(1), scale[..., 0], zero[..., 0].to(torch.uint8)


@mistake("quantize_int4", "one scale for a whole row, repeated for its groups")
def one_scale_for_a_row(weight, group_size=128):
    n_groups = weight.shape[1] // group_size
    q, _, _ = reference.quantize_int4(weight, group_size)
    q, scale, zero = reference.quantize_int4(weight[:, : q.shape[1]], q.shape[1])
    return q, scale.repeat(1, n_groups), zero.repeat(1, n_groups)


@mistake("quantize_int4", "the zero point has the wrong sign")
def negative_zero(weight, group_size=128):
    q, scale, zero = reference.quantize_int4(weight, group_size)
    return q, scale, (256 - zero.int()).remainder(256).to(torch.uint8)


@mistake("quantize_int4", "the smallest number is returned instead of the level that stands for 0")
def smallest_instead_of_level(weight, group_size=128):
    q, scale, zero = reference.quantize_int4(weight, group_size)
    return q, scale, -zero.float() * scale


@mistake("quantize_int4", "the zero point is not clamped: the scale of the smallest numbers has few digits")
def zero_point_beyond_the_levels(weight, group_size=128):
    _, scale, _ = reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    zero = torch.round(-_least(groups) / scale[..., None])
    q = (torch.round(groups / scale[..., None]) + zero).clamp(0, 15)
    return q.flatten(1).to(torch.uint8), scale, zero[..., 0].to(torch.uint8)


@mistake("quantize_int4", "levels are not clamped, and wrap around")
def wrapped_levels(weight, group_size=128):
    _, scale, zero = reference.quantize_int4(weight, group_size)
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    free = torch.round(groups / scale[..., None]).int() + zero[..., None].int()
    return free.remainder(16).to(torch.uint8).flatten(1), scale, zero


@mistake("quantize_int4", "a group of zeros gets another scale than 1")
def zero_scale(weight, group_size=128):
    q, scale, zero = reference.quantize_int4(weight, group_size)
    zeros = (weight.detach().unflatten(1, (-1, group_size)) == 0).all(-1)
    return q, torch.where(zeros, 0.0, scale), zero


@mistake("quantize_int4", "the scales have the dtype of the weights instead of float32")
def scales_in_their_dtype(weight, group_size=128):
    q, scale, zero = reference.quantize_int4(weight, group_size)
    return q, scale.to(weight.dtype), zero


# ---- 20.10 pack_int4, 20.11 unpack_int4 ------------------------------------------------------------------------------


@mistake("pack_int4", "the even place is in the high four bits and the odd one in the low four")
def halves_exchanged(q):
    return reference.pack_int4(q.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)) if q.shape[-1] % 2 == 0 else reference.pack_int4(q)  # fmt: skip


@mistake("pack_int4", "the first half of the row is in the low four bits and the second half in the high ones")
def halves_of_the_row(q):
    reference.pack_int4(q)
    half = q.shape[-1] // 2
    return q[..., :half] | q[..., half:] << 4


@mistake("pack_int4", "the bytes are int32 instead of uint8")
def packed_as_int32(q):
    return reference.pack_int4(q).to(torch.int32)


@mistake("pack_int4", "the odd place is multiplied by 15 instead of shifted by four bits")
def times_fifteen(q):
    reference.pack_int4(q)
    return (q[..., ::2].int() + 15 * q[..., 1::2].int()).to(torch.uint8)


@mistake(
    "pack_int4",
    "the pair is joined before it is shifted: `<<` binds tighter than `|`, and (a | b) << 4 is not a | b << 4",
)
def joined_before_shifted(q):
    reference.pack_int4(q)
    return (q[..., ::2] | q[..., 1::2]) << 4


@mistake("pack_int4", "the levels that were given are changed in place")
def packed_in_place(q):
    packed = reference.pack_int4(q)
    q[..., ::2] |= q[..., 1::2] << 4
    return packed


@mistake("pack_int4", "an odd number of levels in a row is not refused")
def odd_length(q):
    return reference.pack_int4(q[..., : q.shape[-1] // 2 * 2])


@mistake("unpack_int4", "the high four bits come first")
def high_first(packed):
    return reference.unpack_int4(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@mistake("unpack_int4", "the levels are int32 instead of uint8")
def unpacked_as_int32(packed):
    return reference.unpack_int4(packed).to(torch.int32)


@mistake("unpack_int4", "all low halves come first, then all high ones")
def low_halves_first(packed):
    return torch.cat([packed & 15, packed >> 4], dim=-1)


@mistake("unpack_int4", "the high four bits are not shifted down")
def high_unshifted(packed):
    return torch.stack([packed & 15, packed & 240], dim=-1).flatten(-2)


@mistake("unpack_int4", "the low level keeps the high four bits")
def low_unmasked(packed):
    return torch.stack([packed, packed >> 4], dim=-1).flatten(-2)


@mistake("unpack_int4", "the bytes that were given are changed in place")
def unpacked_in_place(packed):
    q = reference.unpack_int4(packed)
    packed &= 15
    return q


# ---- 20.12 int4_matmul_kernel ----------------------------------------------------------------------------------------

HALVES, NO_ZERO, FIRST_GROUP, READ_TWICE, TF32, SIGN = (tl.constexpr(n) for n in range(1, 7))
UNMASKED_ROWS, UNMASKED_COLUMNS, NO_LOOP, HALVES_OF_TILE, NARROW_SUM = (tl.constexpr(n) for n in range(7, 12))


@triton.jit
def _int4_kernel(
    x, packed, scale, zero, out, M, N, K, group,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    columns = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    pairs = tl.arange(0, TILE_K // 2)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    last = K
    if FAULT == NO_LOOP:
        last = TILE_K
    for start in range(0, last, TILE_K):
        at = columns * (K // group) + start // group
        if FAULT == FIRST_GROUP:
            at = columns * (K // group)
        factor = tl.load(scale + at, mask=columns < N, other=0.0)
        origin = tl.load(zero + at, mask=columns < N, other=0).to(tl.float32)
        if FAULT == NO_ZERO:
            origin = tl.zeros([TILE_N], tl.float32)
        if FAULT == SIGN:
            origin = -origin
        half = start // 2 + pairs
        inside = (columns < N)[None, :]
        if FAULT == UNMASKED_COLUMNS:
            inside = (columns >= 0)[None, :]
        byte = tl.load(packed + columns[None, :] * (K // 2) + half[:, None], mask=inside, other=0)
        for odd in tl.static_range(2):
            if FAULT == READ_TWICE:
                byte = tl.load(packed + columns[None, :] * (K // 2) + half[:, None], mask=inside, other=0)
            if FAULT == HALVES:
                level = (byte & 15 if odd else byte >> 4).to(tl.float32)
            else:
                level = (byte >> 4 if odd else byte & 15).to(tl.float32)
            weight = ((level - origin[None, :]) * factor[None, :]).to(x.dtype.element_ty)
            k = start + 2 * pairs + odd
            if FAULT == HALVES_OF_TILE:
                k = start + pairs + odd * (TILE_K // 2)
            there = (rows < M)[:, None]
            if FAULT == UNMASKED_ROWS:
                there = (rows >= 0)[:, None]
            left = tl.load(x + rows[:, None] * K + k[None, :], mask=there, other=0.0)
            if FAULT == TF32:
                total = tl.dot(left, weight, total)
            else:
                total = tl.dot(left, weight, total, input_precision="ieee")
            if FAULT == NARROW_SUM:
                total = total.to(x.dtype.element_ty).to(tl.float32)
    kept = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=kept)


class _Faulty:
    """A kernel with a fault, launched as the graded kernel is: ``Kernel[grid](...)``."""

    def __init_subclass__(cls, fault):
        cls.fault = fault

    def __class_getitem__(cls, grid):
        return functools.partial(_int4_kernel[grid], FAULT=cls.fault)


@mistake("int4_matmul_kernel", "the low and the high four bits of a byte are exchanged")
class HalvesExchanged(_Faulty, fault=HALVES):
    pass


@mistake("int4_matmul_kernel", "the zero point is not subtracted")
class NoZeroPoint(_Faulty, fault=NO_ZERO):
    pass


@mistake("int4_matmul_kernel", "the zero point is added instead of subtracted")
class ZeroPointAdded(_Faulty, fault=SIGN):
    pass


@mistake("int4_matmul_kernel", "all groups of a column get the first group's scale and zero point")
class FirstGroupForAll(_Faulty, fault=FIRST_GROUP):
    pass


@mistake("int4_matmul_kernel", "each byte is loaded twice, once for each of its levels")
class BytesLoadedTwice(_Faulty, fault=READ_TWICE):
    pass


@mistake("int4_matmul_kernel", "tl.dot is left to use TF32 on a GPU")
class RoundedToTF32(_Faulty, fault=TF32):
    pass


@mistake("int4_matmul_kernel", "rows after the last are not masked")
class RowsAfterTheLast(_Faulty, fault=UNMASKED_ROWS):
    pass


@mistake("int4_matmul_kernel", "columns after the last are not masked")
class ColumnsAfterTheLast(_Faulty, fault=UNMASKED_COLUMNS):
    pass


@mistake("int4_matmul_kernel", "only the first TILE_K terms are added: the loop over K is missing")
class NoLoop(_Faulty, fault=NO_LOOP):
    pass


@mistake("int4_matmul_kernel", "the sum is rounded to the dtype of x after each tile instead of once at the end")
class NarrowSum(_Faulty, fault=NARROW_SUM):
    pass


@mistake("int4_matmul_kernel", "high levels are taken for the second half of the tile instead of for the odd places")
class HighLevelsSecond(_Faulty, fault=HALVES_OF_TILE):
    pass


# ---- 20.13 Int4Linear ------------------------------------------------------------------------------------------------


@mistake("Int4Linear", "the bias is forgotten")
class Int4NoBias(reference.Int4Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y - self.bias.to(y.dtype)


@mistake("Int4Linear", "the zero point is not subtracted")
class Int4NoZero(reference.Int4Linear):
    def forward(self, x):
        q = reference.unpack_int4(self.packed)
        y = x @ dequantize_int4(q, self.scale, torch.zeros_like(self.zero)).to(x.dtype).T
        return y if self.bias is None else y + self.bias.to(y.dtype)


@mistake("Int4Linear", "the levels are kept one in a byte: packing is forgotten")
class Int4Unpacked(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        self.packed = reference.unpack_int4(self.packed)

    def forward(self, x):
        y = x @ dequantize_int4(self.packed, self.scale, self.zero).to(x.dtype).T
        return y if self.bias is None else y + self.bias.to(y.dtype)


@mistake("Int4Linear", "the packed weights are a plain attribute instead of a buffer: no state_dict has them")
class Int4NoBuffer(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        packed = self.packed
        del self.packed
        self.packed = packed


@mistake("Int4Linear", "the weights stay beside the packed ones, as a parameter")
class Int4KeepsWeights(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        self.weight = linear.weight


@mistake("Int4Linear", "the output is float32, whatever the dtype of x is")
class Int4AlwaysFloat32(reference.Int4Linear):
    def forward(self, x):
        return super().forward(x.float())


@mistake("Int4Linear", "the bias is added in its own dtype, and the output takes it")
class Int4BiasInItsDtype(reference.Int4Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y.to(torch.promote_types(y.dtype, self.bias.dtype))


@mistake("Int4Linear", "the given layer's weights are rounded in place")
class Int4InPlace(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        with torch.no_grad():
            linear.weight.copy_(dequantize_int4(reference.unpack_int4(self.packed), self.scale, self.zero))


@mistake("Int4Linear", "the bias is the layer's own: it changes when the layer is trained on")
class Int4SharedBias(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        self.bias = None if linear.bias is None else linear.bias.detach()


@mistake("Int4Linear", "a layer without a bias gets one of zeros")
class Int4ZeroBias(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        if self.bias is None:
            self.bias = torch.zeros(len(self.packed))


@mistake("Int4Linear", "the copy of the bias carries a gradient: it was not detached")
class Int4BiasWithGraph(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        self.bias = None if linear.bias is None else linear.bias.clone()

    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@mistake("Int4Linear", "the unpacked weights are kept as an attribute, beside the packed ones")
class Int4KeepsUnpacked(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, group_size)
        self.unpacked = [dequantize_int4(reference.unpack_int4(self.packed), self.scale, self.zero)]


@mistake("Int4Linear", "without being told, groups are not of 128")
class Int4GroupsOf64(reference.Int4Linear):
    def __init__(self, linear, group_size=64):
        super().__init__(linear, group_size)


@mistake("Int4Linear", "groups are multiplied one by one, and added in the dtype of x instead of float32")
class Int4NarrowSum(reference.Int4Linear):
    def forward(self, x):
        weight = dequantize_int4(reference.unpack_int4(self.packed), self.scale, self.zero).to(x.dtype)
        size = weight.shape[1] // self.scale.shape[1]
        parts = [a @ b.T for a, b in zip(x.split(size, -1), weight.split(size, 1), strict=True)]
        y = sum(parts[1:], parts[0])
        return y if self.bias is None else y + self.bias.to(y.dtype)


@mistake("Int4Linear", "groups always have 128 columns, or are the whole row")
class Int4WholeRows(reference.Int4Linear):
    def __init__(self, linear, group_size=128):
        super().__init__(linear, 128 if linear.weight.shape[1] % 128 == 0 else linear.weight.shape[1])


# ---- 20.14 gptq ------------------------------------------------------------------------------------------------------


def _gptq(weight, hessian, group_size, factor=None, damping=0.01, ranges="current", carry=True, later_only=True, narrow=True, floor=0.0):  # fmt: skip
    check_weights(weight, group_size, hessian)
    w, h = weight.detach().double().clone(), hessian.double()
    k = w.shape[1]
    mean = h.diagonal().mean().clamp(min=floor)
    h = h + damping * (mean if mean > 0 else 1.0) * torch.eye(k, dtype=h.dtype)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True) if factor is None else factor(h)
    _, fixed_scale, fixed_zero = reference.quantize_int4(weight, group_size)
    levels, scales, zeros = [], [], []
    for i in range(k):
        if i % group_size == 0:
            part = w[:, i : i + group_size].float()
            if ranges == "original":
                scale, zero = fixed_scale[:, i // group_size, None], fixed_zero[:, i // group_size, None].float()
            else:
                _, scale, zero = reference.quantize_int4(part, part.shape[1])
                zero = zero.float()
            scales.append(scale)
            zeros.append(zero)
        column = w[:, i : i + 1]
        level = (torch.round((column.float() if narrow else column) / scale) + zero).clamp(0, 15)
        levels.append(level)
        error = (column - (level - zero) * scale) / upper[i, i]
        if carry:
            stop = k if later_only else (i // group_size + 1) * group_size
            w[:, i + 1 : stop] -= error * upper[i, i + 1 : stop]
    return torch.cat(levels, 1).to(torch.uint8), torch.cat(scales, 1), torch.cat(zeros, 1).to(torch.uint8)


@mistake("gptq", "errors are not carried on: this is plain rounding")
def plain_rounding(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, carry=False)


@mistake("gptq", "the Cholesky factor of the Hessian is used instead of that of its inverse")
def factor_of_the_hessian(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, factor=lambda h: torch.linalg.cholesky(h, upper=True))


@mistake("gptq", "the rows of the inverse are used as they are: columns that are done are not taken out of it")
def inverse_itself(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, factor=torch.linalg.inv)


@mistake("gptq", "the errors are added to the columns after instead of subtracted")
def errors_added(weight, hessian, group_size=128):
    def factor(h):
        upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
        return 2 * torch.diag(upper.diagonal()) - upper

    return _gptq(weight, hessian, group_size, factor=factor)


@mistake("gptq", "weights are divided by the scale in float64: near a tie the level is not that of `quantize_int4`")
def levels_in_float64(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, narrow=False)


@mistake("gptq", "errors stay within their group")
def within_the_group(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, later_only=False)


@mistake("gptq", "a group's range is that of the original weights instead of the weights as they are by then")
def ranges_of_the_original(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, ranges="original")


@mistake("gptq", "the Hessian is not damped: a singular one has no inverse")
def undamped(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, damping=0.0)


@mistake("gptq", "the damping is 1 % of the diagonal's sum instead of its mean")
def damped_by_the_trace(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, damping=0.01 * weight.shape[1])


@mistake("gptq", "the damping has a smallest value, which is more than 1 % where inputs are small")
def damping_with_a_floor(weight, hessian, group_size=128):
    return _gptq(weight, hessian, group_size, floor=1e-6)


@mistake("gptq", "weights in float64 are not copied, so the corrections change the caller's tensor")
def float64_in_place(weight, hessian, group_size=128):
    answer = reference.gptq(weight, hessian, group_size)
    if weight.dtype == torch.float64:
        weight.copy_(dequantize_int4(*answer))
    return answer


@mistake("gptq", "the Hessian is damped in place")
def damped_in_place(weight, hessian, group_size=128):
    answer = reference.gptq(weight, hessian, group_size)
    hessian.diagonal().mul_(1.01)
    return answer


@mistake("gptq", "the error is not divided by the entry of the factor on its diagonal")
def error_undivided(weight, hessian, group_size=128):
    def factor(h):
        upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
        return upper - torch.diag(upper.diagonal() - 1)

    return _gptq(weight, hessian, group_size, factor=factor)


@mistake("gptq", "the weights are changed in place")
def in_place(weight, hessian, group_size=128):
    answer = reference.gptq(weight, hessian, group_size)
    weight.copy_(dequantize_int4(*answer))
    return answer
