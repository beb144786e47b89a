"""Eight bits and fewer: numbers with a scale beside them, products of such numbers, and weights of four bits."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lib.given.kernels.checks import check_blocks, check_history, check_levels, check_weights
from lib.given.kernels.int4 import dequantize_int4, launch_int4_matmul
from lib.given.kernels.mode import tl, triton
from lib.given.kernels.quantized import BLOCK, expand_blocks, has_float8, largest, tensor_core_product, with_products


def absmax_scale(
    x: Float[Tensor, "..."], dtype: torch.dtype, dim: int | tuple[int, int] | None = None
) -> Float[Tensor, "..."]:
    """The scale that maps a tensor's largest magnitude onto the largest number of an 8-bit format. (Exercise 20.1)

    Size: 20 minutes, difficulty 2, core.

    Args:
        x: Any shape and floating dtype; for blocks a matrix.
        dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.int8``.
        dim: None for one scale; a dimension, all numbers along which share a scale; or ``(128, 128)`` for a scale for
            each block of a matrix.

    Returns:
        The largest finite magnitude over the format's largest number, float32, without a gradient: a scalar; the shape
        of x with 1 at ``dim``; or one for each block, incomplete blocks at the edges included.
        NaN and what is infinite in float32 are left out.
        Where the scale would be 0, as for zeros or an empty tensor, it is 1.

    Raises:
        ValueError: another dtype (`largest` raises it), another pair of block sizes, or blocks of a tensor that is not
            a matrix; the message shows it.
    """
    raise NotImplementedError("Exercise 20.1: write absmax_scale")


def quantize(x: Float[Tensor, "..."], scale: Float[Tensor, "..."], dtype: torch.dtype) -> Tensor:
    """Divide by the scale and round to a format of 8 bits. (Exercise 20.2)

    Size: 15 minutes, difficulty 2, core.

    Args:
        x: Any shape and floating dtype; left unchanged.
        scale: What `absmax_scale` returns: anything that broadcasts with x, or one for each block of 128 x 128.
        dtype: As in `absmax_scale`.

    Returns:
        A new tensor of that dtype and of the shape of x.
        The quotients are computed in float32 and rounded to the format's nearest number, ties to even.
        Quotients beyond the format's largest number, infinities too, become that number with their sign.
        NaN stays NaN in float8 and becomes 0 in int8.
    """
    raise NotImplementedError("Exercise 20.2: write quantize")


def dequantize(q: Tensor, scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Back to float32: each number times its scale. (Exercise 20.3)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        q: What `quantize` returned.
        scale: The scale that `quantize` was given.

    Returns:
        A float32 tensor of the shape of q.
    """
    raise NotImplementedError("Exercise 20.3: write dequantize")


def quantization_error(x: Float[Tensor, "m n"], dtype: torch.dtype, granularity: str) -> float:
    """How much of a tensor survives rounding: signal over noise, in decibels. (Exercise 20.4)

    Size: 15 minutes, difficulty 2, stretch.

    Args:
        x: A matrix.
        dtype: As in `absmax_scale`.
        granularity: What shares a scale: "tensor", "row" or "block" (of 128 x 128).

    Returns:
        ``10 log10(sum of squares of x / sum of squared errors)``; infinity if nothing is lost.
        Six decibels are worth about one bit.

    Raises:
        ValueError: any other granularity; the message shows it.
    """
    raise NotImplementedError("Exercise 20.4: write quantization_error")


def scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Float[Tensor, "..."], scale_b: Float[Tensor, "..."], out_dtype: torch.dtype
) -> Float[Tensor, "m n"]:
    """The product of two quantized matrices. (Exercise 20.5)

    Size: 15 minutes, difficulty 2, core.

    Args:
        a: ``[M, K]`` of 8 bits.
        b: ``[K, N]`` of 8 bits.
        scale_a: One number; or ``[M, 1]``; or one for each block of 128 x 128.
        scale_b: One number; or ``[1, N]``; or one for each block of 128 x 128.
        out_dtype: Dtype of the result.

    Returns:
        ``[M, N]``: the product of the dequantized matrices, accumulated in float32 and rounded once.
        Where `has_float8` says that a GPU multiplies such numbers, `tensor_core_product` computes it.

    Raises:
        ValueError: the shapes don't fit together; the message shows them.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)}: expected [M, K] and [K, N]")
    raise NotImplementedError("Exercise 20.5: write scaled_matmul")


class DelayedScale:
    """A scale from the past, so that a tensor can be rounded without being read twice. (Exercise 20.6)

    Size: 25 minutes, difficulty 3, core.

    Args:
        history: Number of past steps that are remembered; `check_history` raises a ``ValueError`` if it is below 1.

    Source: Micikevicius and others (arXiv:2209.05433), section 3; Transformer Engine's ``DelayedScaling``.
    """

    def __init__(self, history: int = 16):
        check_history(history)
        raise NotImplementedError("Exercise 20.6: write DelayedScale.__init__")

    def update(self, x: Float[Tensor, "..."]) -> None:
        """Record the largest finite magnitude of a step's tensor, not x itself, and drop the oldest beyond ``history``.

        The host does not wait for the device.
        """
        raise NotImplementedError("Exercise 20.6: write DelayedScale.update")

    def scale(self, dtype: torch.dtype, x: Float[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
        """The largest recorded magnitude over the format's largest number, or 1 if that is 0.

        Without any record, it is the scale of the tensor x.

        Raises:
            ValueError: nothing is recorded, and no x is given.
        """
        raise NotImplementedError("Exercise 20.6: write DelayedScale.scale")


class Float8Linear(nn.Module):
    """A linear layer whose three products, forward and backward, are computed in float8. (Exercise 20.7)

    Size: 40 minutes, difficulty 4, core.

    Args:
        linear: The layer; its parameters are used, not copied, and stay in their dtype.
        recipe: "dynamic": one scale for each tensor, from the tensor itself.
            "delayed": one for each tensor, from past steps (`DelayedScale`).
            "rowwise": one for each row of the left factor and each column of the right.
            "blockwise": one for each block of 128 x 128.

    Activations and weights are e4m3fn, gradients e5m2 in every recipe (torchao's rowwise recipe takes e4m3fn for
    gradients too).
    Products, and their sum with the bias, are in the dtype of the input.

    Raises:
        ValueError: any other recipe; the message shows it.

    Source: Micikevicius and others (arXiv:2209.05433), section 3.
    """

    def __init__(self, linear: nn.Linear, recipe: str):
        super().__init__()
        raise NotImplementedError("Exercise 20.7: write Float8Linear.__init__")

    def cast(self, tensor: Float[Tensor, "m n"], name: str, dim: int, first: bool) -> tuple[Tensor, Tensor]:
        """Quantize the left (dim 1) or right (dim 0) factor of a product that sums along ``dim``.

        Returns it and its scale.

        ``name`` is "x", "weight" or "grad"; ``first`` says whether this is its first product in this step: at the
        first, "delayed" chooses the scale for the step, and then records the tensor.
        """
        raise NotImplementedError("Exercise 20.7: write Float8Linear.cast")

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """``x @ weight.T + bias``, in the dtype of x; x may be one vector or have no rows.

        `with_products` calls for each of the three products.
        """
        raise NotImplementedError("Exercise 20.7: write Float8Linear.forward")


def mx_quantize(x: Float[Tensor, "... n"], block: int = 32) -> tuple[Tensor, Tensor]:
    """Microscaling: each block of 32 numbers shares a power of two. (Exercise 20.8)

    Size: 25 minutes, difficulty 3, core.

    Args:
        x: ``[..., n]``, any floating dtype.
        block: Numbers that share a scale, along the last dimension; it divides n.

    Returns:
        elements: float8_e4m3fn, in the shape of x, saturating: infinities become 448 with their sign, and NaN stays
            NaN.
        scales: float8_e8m0fnu ``[..., n / block]``: ``2**(floor(log2(amax)) - 8)``, amax the largest finite magnitude;
            ``2**-127``, the smallest, for zeros.

    Raises:
        ValueError: the block is below 1 or does not divide n (`check_blocks` raises it); the message shows both.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """
    check_blocks(x.shape[-1], block)
    raise NotImplementedError("Exercise 20.8: write mx_quantize")


def quantize_int4(
    weight: Float[Tensor, "n k"], group_size: int = 128
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], UInt8[Tensor, "n g"]]:
    """Round each group of weights to sixteen levels, evenly spaced from its smallest weight to its largest. (Exercise 20.9)

    Size: 20 minutes, difficulty 2, core.

    Args:
        weight: ``[N, K]``.
        group_size: Numbers of a row that share a scale and a zero point; it divides K.

    Returns:
        q: ``[N, K]``, uint8, 0 to 15: ``round(weight / scale) + zero``, clamped.
        scale: ``[N, K / group_size]``, float32: a fifteenth of the group's range, which always contains 0; 1 for a
            group of zeros.
        zero: ``[N, K / group_size]``, uint8, 0 to 15: the level of the number 0.
            A weight is about ``(q - zero) * scale``.

    Raises:
        ValueError: the group size is below 1 or does not divide K, or a weight is not finite (`check_weights` raises
            it); the message shows it.
    """
    check_weights(weight, group_size)
    raise NotImplementedError("Exercise 20.9: write quantize_int4")


def pack_int4(q: UInt8[Tensor, "... k"]) -> UInt8[Tensor, "... half_k"]:
    """Two levels in a byte: that at an even place in the low four bits, that at an odd place in the high. (Exercise 20.10)

    Size: 15 minutes, difficulty 2, core.

    Returns:
        uint8, with half as many numbers along the last dimension; q is left unchanged.

    Raises:
        ValueError: the last dimension is odd, or a level is not from 0 to 15 (`check_levels` raises the second); the
            message shows it.
    """
    check_levels(q)
    raise NotImplementedError("Exercise 20.10: write pack_int4")


def unpack_int4(packed: UInt8[Tensor, "... half_k"]) -> UInt8[Tensor, "... k"]:
    """The levels that `pack_int4` packed. (Exercise 20.11)

    Size: 5 minutes, difficulty 1, warm-up.

    Returns:
        uint8, 0 to 15, with twice as many numbers along the last dimension.
    """
    raise NotImplementedError("Exercise 20.11: write unpack_int4")


@triton.jit
def int4_matmul_kernel(
    x, packed, scale, zero, out, M, N, K, group, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """A tile of rows times a tile of packed weights, which are unpacked on the chip. (Exercise 20.12)

    Size: 45 minutes, difficulty 4, core.

    Args:
        x, packed, out: Pointers to contiguous ``[M, K]``, uint8 ``[N, K / 2]`` and ``[M, N]``.
        scale, zero: Pointers to contiguous ``[N, K / group]``, float32 and uint8.
        TILE_M, TILE_N, TILE_K: Sizes of a tile; TILE_K is even and divides the group.

    Returns:
        Nothing.
        The grid is (tiles of rows, tiles of columns).
        Each packed byte of the tile's columns is read once; weights are multiplied in the dtype of x; sums are in
        float32.
    """
    raise NotImplementedError("Exercise 20.12: write int4_matmul_kernel")


class Int4Linear(nn.Module):
    """A linear layer for inference whose weights have four bits. (Exercise 20.13)

    Size: 25 minutes, difficulty 3, core.

    Args:
        linear: The layer to quantize; left unchanged.
        group_size: As in `quantize_int4`.

    Attributes:
        packed: Buffer, uint8 ``[N, K / 2]``.
            ``scale`` and ``zero`` are buffers ``[N, K / group_size]``; ``bias`` is a buffer with a copy of the layer's
            bias, or None.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, group_size: int = 128):
        super().__init__()
        raise NotImplementedError("Exercise 20.13: write Int4Linear.__init__")

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """``x`` times the dequantized weights, in the dtype of x; on a GPU by `launch_int4_matmul`. Forward only."""
        raise NotImplementedError("Exercise 20.13: write Int4Linear.forward")


def gptq(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], group_size: int = 128
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], UInt8[Tensor, "n g"]]:
    """Round weights to four bits column by column, and let later columns compensate for the error of each. (Exercise 20.14)

    Size: 45 minutes, difficulty 5, core.

    Args:
        weight: ``[N, K]``, perhaps a parameter; left unchanged.
        hessian: ``[K, K]``: the sum over inputs x of ``x x^T``; symmetric, without negative eigenvalues, perhaps
            singular.
            If it is 0, the result is that of `quantize_int4`.
        group_size: As in `quantize_int4`.
            A group's scale and zero point are set when its first column's turn comes, from the corrected weights as
            they are then.

    Returns:
        (q, scale, zero), as `quantize_int4`.
        Corrections are computed in float64; weights are divided by their scale in float32. No result has a gradient.

    Raises:
        ValueError: as for `quantize_int4`, or a Hessian that is not as above (`check_weights` raises it); the message
            shows it.

    Source: GPTQ (arXiv:2210.17323), Algorithm 1, with a damping of 1 % of the mean diagonal.
        (The authors' code sets weights whose input is always 0 to 0.)
    """
    check_weights(weight, group_size, hessian)
    raise NotImplementedError("Exercise 20.14: write gptq")
