"""Eight bits and fewer: numbers with a scale beside them, products of such numbers, and weights of four bits."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lib.given.kernels.checks import check_blocks, check_history, check_levels, check_weights
from lib.given.kernels.int4 import dequantize_int4, launch_int4_matmul
from lib.given.kernels.mode import tl, triton
from lib.given.kernels.quantized import BLOCK, expand_blocks, has_float8, largest, tensor_core_product, with_products


### BEGIN SOLUTION
def _magnitudes(x: Tensor) -> Tensor:
    return x.detach().float().abs().nan_to_num(nan=0, posinf=0)


def _amax(magnitudes: Tensor, *dim, **kept) -> Tensor:
    return (torch.amax if magnitudes.numel() else torch.sum)(magnitudes, *dim, **kept)  # 0 where there are no numbers


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


### END SOLUTION
def absmax_scale(
    x: Float[Tensor, "..."], dtype: torch.dtype, dim: int | tuple[int, int] | None = None
) -> Float[Tensor, "..."]:
    """The scale that maps a tensor's largest magnitude onto the largest number of an 8-bit format. (Exercise)

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
    ### BEGIN SOLUTION
    magnitudes = _magnitudes(x)
    if not isinstance(dim, tuple):
        return _positive((_amax(magnitudes) if dim is None else _amax(magnitudes, dim, keepdim=True)) / largest(dtype))
    if dim != (BLOCK, BLOCK) or x.ndim != 2:
        raise ValueError(f"blocks of {dim} in {tuple(x.shape)}: expected ({BLOCK}, {BLOCK}) in a matrix")
    rows, columns = (-(-n // BLOCK) for n in x.shape)
    padded = nn.functional.pad(magnitudes, (0, columns * BLOCK - x.shape[1], 0, rows * BLOCK - x.shape[0]))
    return _positive(_amax(padded.view(rows, BLOCK, columns, BLOCK), (1, 3)) / largest(dtype))
    ### END SOLUTION


def quantize(x: Float[Tensor, "..."], scale: Float[Tensor, "..."], dtype: torch.dtype) -> Tensor:
    """Divide by the scale and round to a format of 8 bits. (Exercise)

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
    ### BEGIN SOLUTION
    bound = largest(dtype)
    scaled = (x.float() / expand_blocks(scale, x.shape)).clamp(-bound, bound)
    return scaled.round().nan_to_num(0).to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    ### END SOLUTION


def dequantize(q: Tensor, scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Back to float32: each number times its scale. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        q: What `quantize` returned.
        scale: The scale that `quantize` was given.

    Returns:
        A float32 tensor of the shape of q.
    """
    ### BEGIN SOLUTION
    return q.float() * expand_blocks(scale, q.shape)
    ### END SOLUTION


def quantization_error(x: Float[Tensor, "m n"], dtype: torch.dtype, granularity: str) -> float:
    """How much of a tensor survives rounding: signal over noise, in decibels. (Exercise)

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
    ### BEGIN SOLUTION
    dims: dict[str, int | tuple[int, int] | None] = {"tensor": None, "row": -1, "block": (BLOCK, BLOCK)}
    if granularity not in dims:
        raise ValueError(f"granularity = {granularity!r}: expected 'tensor', 'row' or 'block'")
    scale = absmax_scale(x, dtype, dims[granularity])
    noise = (dequantize(quantize(x, scale, dtype), scale).double() - x.double()).square().sum()
    return (10 * torch.log10(x.double().square().sum() / noise)).item() if noise else torch.inf
    ### END SOLUTION


def scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Float[Tensor, "..."], scale_b: Float[Tensor, "..."], out_dtype: torch.dtype
) -> Float[Tensor, "m n"]:
    """The product of two quantized matrices. (Exercise)

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
    ### BEGIN SOLUTION
    if has_float8(a):
        return tensor_core_product(a, b, scale_a, scale_b, out_dtype)
    return (dequantize(a, scale_a) @ dequantize(b, scale_b)).to(out_dtype)
    ### END SOLUTION


class DelayedScale:
    """A scale from the past, so that a tensor can be rounded without being read twice. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        history: Number of past steps that are remembered; `check_history` raises a ``ValueError`` if it is below 1.

    Source: Micikevicius and others (arXiv:2209.05433), section 3; Transformer Engine's ``DelayedScaling``.
    """

    def __init__(self, history: int = 16):
        check_history(history)
        ### BEGIN SOLUTION
        self.history = history
        self.amax: list[Tensor] = []
        ### END SOLUTION

    def update(self, x: Float[Tensor, "..."]) -> None:
        """Record the largest finite magnitude of a step's tensor, not x itself, and drop the oldest beyond ``history``.

        The host does not wait for the device.
        """
        ### BEGIN SOLUTION
        self.amax = [*self.amax, _amax(_magnitudes(x))][-self.history :]
        ### END SOLUTION

    def scale(self, dtype: torch.dtype, x: Float[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
        """The largest recorded magnitude over the format's largest number, or 1 if that is 0.

        Without any record, it is the scale of the tensor x.

        Raises:
            ValueError: nothing is recorded, and no x is given.
        """
        ### BEGIN SOLUTION
        if self.amax:
            return _positive(torch.stack(self.amax).amax() / largest(dtype))
        if x is None:
            raise ValueError("no tensor has been recorded: expected update(x) first, or the current tensor")
        return absmax_scale(x, dtype)
        ### END SOLUTION


class Float8Linear(nn.Module):
    """A linear layer whose three products, forward and backward, are computed in float8. (Exercise)

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
        ### BEGIN SOLUTION
        if recipe not in ("dynamic", "delayed", "rowwise", "blockwise"):
            raise ValueError(f"recipe = {recipe!r}: expected 'dynamic', 'delayed', 'rowwise' or 'blockwise'")
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe
        self.past = {name: DelayedScale() for name in ("x", "weight", "grad")}
        self.now: dict[str, Tensor] = {}
        ### END SOLUTION

    def cast(self, tensor: Float[Tensor, "m n"], name: str, dim: int, first: bool) -> tuple[Tensor, Tensor]:
        """Quantize the left (dim 1) or right (dim 0) factor of a product that sums along ``dim``.

        Returns it and its scale.

        ``name`` is "x", "weight" or "grad"; ``first`` says whether this is its first product in this step: at the
        first, "delayed" chooses the scale for the step, and then records the tensor.
        """
        ### BEGIN SOLUTION
        dtype = torch.float8_e5m2 if name == "grad" else torch.float8_e4m3fn
        if self.recipe == "delayed" and first:
            self.now[name] = self.past[name].scale(dtype, tensor)
            self.past[name].update(tensor)
        dims: dict[str, int | tuple[int, int] | None] = {"rowwise": dim, "blockwise": (BLOCK, BLOCK)}
        scale = self.now[name] if self.recipe == "delayed" else absmax_scale(tensor, dtype, dims.get(self.recipe))
        return quantize(tensor, scale, dtype), scale
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """``x @ weight.T + bias``, in the dtype of x; x may be one vector or have no rows.

        `with_products` calls for each of the three products.
        """
        ### BEGIN SOLUTION

        def product(a: Tensor, b: Tensor, names: tuple[str, str], first: tuple[bool, bool]) -> Tensor:
            left, scale_a = self.cast(a, names[0], 1, first[0])
            right, scale_b = self.cast(b, names[1], 0, first[1])
            return scaled_matmul(left, right, scale_a, scale_b, x.dtype)

        y = with_products(x.reshape(-1, x.shape[-1]), self.weight, product).reshape(*x.shape[:-1], len(self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)
        ### END SOLUTION


def mx_quantize(x: Float[Tensor, "... n"], block: int = 32) -> tuple[Tensor, Tensor]:
    """Microscaling: each block of 32 numbers shares a power of two. (Exercise)

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
    ### BEGIN SOLUTION
    blocks = x.float().unflatten(-1, (-1, block))
    amax = _magnitudes(blocks).amax(-1, keepdim=True)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 1 - 8, -127).clamp(-127, 127)
    scale = torch.exp2(exponent.double()).float()
    return quantize(blocks, scale, torch.float8_e4m3fn).flatten(-2), scale[..., 0].to(torch.float8_e8m0fnu)
    ### END SOLUTION


### BEGIN SOLUTION
def _group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group along the last dimension; both kept as ``[..., 1]``."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = _positive((high - low) / 15)
    return scale, torch.round(-low / scale).clamp(max=15)  # a subnormal scale has few digits


### END SOLUTION
def quantize_int4(
    weight: Float[Tensor, "n k"], group_size: int = 128
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], UInt8[Tensor, "n g"]]:
    """Round each group of weights to sixteen levels, evenly spaced from its smallest weight to its largest. (Exercise)

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
    ### BEGIN SOLUTION
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    scale, zero = _group_range(groups)
    q = (torch.round(groups / scale) + zero).clamp(0, 15).to(torch.uint8)
    return q.flatten(1), scale[..., 0], zero[..., 0].to(torch.uint8)
    ### END SOLUTION


def pack_int4(q: UInt8[Tensor, "... k"]) -> UInt8[Tensor, "... half_k"]:
    """Two levels in a byte: that at an even place in the low four bits, that at an odd place in the high. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Returns:
        uint8, with half as many numbers along the last dimension; q is left unchanged.

    Raises:
        ValueError: the last dimension is odd, or a level is not from 0 to 15 (`check_levels` raises the second); the
            message shows it.
    """
    check_levels(q)
    ### BEGIN SOLUTION
    if q.shape[-1] % 2:
        raise ValueError(f"{q.shape[-1]} levels cannot be packed in pairs")
    return q[..., ::2] | q[..., 1::2] << 4
    ### END SOLUTION


def unpack_int4(packed: UInt8[Tensor, "... half_k"]) -> UInt8[Tensor, "... k"]:
    """The levels that `pack_int4` packed. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Returns:
        uint8, 0 to 15, with twice as many numbers along the last dimension.
    """
    ### BEGIN SOLUTION
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    ### END SOLUTION


@triton.jit
def int4_matmul_kernel(
    x, packed, scale, zero, out, M, N, K, group, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """A tile of rows times a tile of packed weights, which are unpacked on the chip. (Exercise)

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
    ### BEGIN SOLUTION
    rows = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    columns = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    pairs = tl.arange(0, TILE_K // 2)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        at = columns * (K // group) + start // group
        factor = tl.load(scale + at, mask=columns < N, other=0.0)
        origin = tl.load(zero + at, mask=columns < N, other=0).to(tl.float32)
        bytes_at = packed + columns[None, :] * (K // 2) + (start // 2 + pairs)[:, None]
        byte = tl.load(bytes_at, mask=(columns < N)[None, :], other=0)
        for odd in tl.static_range(2):
            level = (byte >> 4 if odd else byte & 15).to(tl.float32)
            weight = ((level - origin[None, :]) * factor[None, :]).to(x.dtype.element_ty)
            x_at = x + rows[:, None] * K + (start + 2 * pairs + odd)[None, :]
            total = tl.dot(tl.load(x_at, mask=(rows < M)[:, None], other=0.0), weight, total, input_precision="ieee")
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
    ### END SOLUTION


class Int4Linear(nn.Module):
    """A linear layer for inference whose weights have four bits. (Exercise)

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
        ### BEGIN SOLUTION
        q, scale, zero = quantize_int4(linear.weight, group_size)
        for name, tensor in {"packed": pack_int4(q), "scale": scale, "zero": zero}.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        """``x`` times the dequantized weights, in the dtype of x; on a GPU by `launch_int4_matmul`. Forward only."""
        ### BEGIN SOLUTION
        rows = x.reshape(-1, x.shape[-1])
        if x.is_cuda:
            y = launch_int4_matmul(int4_matmul_kernel, rows, self.packed, self.scale, self.zero)
        else:
            y = rows @ dequantize_int4(unpack_int4(self.packed), self.scale, self.zero).to(x.dtype).T
        return (y if self.bias is None else y + self.bias.to(y.dtype)).reshape(*x.shape[:-1], len(self.packed))
        ### END SOLUTION


def gptq(
    weight: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], group_size: int = 128
) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], UInt8[Tensor, "n g"]]:
    """Round weights to four bits column by column, and let later columns compensate for the error of each. (Exercise)

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
    ### BEGIN SOLUTION
    n_columns = weight.shape[1]
    w, h = weight.detach().double().clone(), hessian.detach().double()
    damped = h + 0.01 * _positive(h.diagonal().mean()) * torch.eye(n_columns).to(h)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    levels, scales, zeros = list[Tensor](), list[Tensor](), list[Tensor]()
    for i in range(n_columns):
        if i % group_size == 0:
            scale, zero = _group_range(w[:, i : i + group_size].float())
            scales.append(scale)
            zeros.append(zero)
        column = w[:, i : i + 1]
        level = (torch.round(column.float() / scale) + zero).clamp(0, 15)  # as quantize_int4 divides
        levels.append(level)
        error = (column - (level - zero) * scale) / upper[i, i]
        w[:, i + 1 :] -= error * upper[i, i + 1 :]
    return torch.cat(levels, 1).to(torch.uint8), torch.cat(scales, 1), torch.cat(zeros, 1).to(torch.uint8)
    ### END SOLUTION
