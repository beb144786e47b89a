"""The MLP of a transformer on a Hopper GPU: its GELU is computed inside the products before and after it.

A separate GELU kernel reads and writes all numbers of the widest layer,
once in the forward pass and once in the backward pass, and the tensor cores wait meanwhile.
Here the first product applies the GELU to sums that are still in registers.
It writes the GELU and, in place of its argument, the GELU's slope there.
The backward pass needs nothing else: the gradient of the argument is a product too,
and each of its numbers is multiplied by a slope before it is written.

Read ``lib.fast.parts.grouped`` first: these products are tiled in the same way.
But the two groups of warps that compute, the users, take turns.
A program's tiles alternate between them, and a user's product starts when the other user has started
the last terms of its own.
While a user writes its tile, the tensor cores work for the other one.

The taller a tile, the fewer bytes are copied for a product.
Backward, a tile has 192 rows, whose sums fill the registers; with 128 the tensor cores waited for copies.
Forward, it has 128: with 192 both forms were slower,
probably because the code no longer fits into the instruction cache.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lib.fast.gluon import GLUON, PROVEN
from lib.fast.launch import VERSION, Address, Launch, constant_when_compiled, n_programs
from lib.fast.parts.gelu import _gelu_and_slope
from lib.fast.parts.grouped import Cut, described, launches
from lib.fast.parts.sums import add_rows
from lib.fast.parts.wide import wide_product

FORWARD, BACKWARD = Cut(columns=128, stages=5, users=1, transposed=True), Cut(columns=128, stages=4, users=1, parts=3)

if GLUON:
    from lib.fast.gluon import (
        acc,
        as_box,
        copy_in,
        copy_out,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        release,
        tma,
        wait_empty,
        wait_full,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from lib.fast.parts.grouped import _barriers, _full_barriers, _place, shared_layout

    PAIR, EIGHT = gl.constexpr(Cut(stages=2, users=1)), gl.constexpr(Cut(stages=8, users=1))

    @gluon.jit
    def _load(given, CUT: gl.constexpr):
        """Copy the factors of all of a program's tiles into the ring."""
        x, w, n_rows, n_columns, n_terms, ring = given
        x_s, w_s, full, empty = ring
        n = 0
        for t in range(gl.program_id(0), n_rows * n_columns, gl.num_programs(0)):
            i, j = _place(t, n_rows, n_columns, CUT)
            for k in range(0, n_terms):
                place = n % CUT.stages
                wait_empty(empty, n, CUT)
                opens = full.index(place)
                mbarrier.expect(opens, (64 * CUT.parts + 128) * 64 * 2)
                for part in gl.static_range(gl.constexpr(CUT.parts)):
                    row = 64 * (CUT.parts * i + part)
                    copy_in(x, [0, 0, row, 64 * k], opens, as_box(x_s.index(CUT.parts * place + part), x))
                if CUT.transposed:
                    copy_in(w, [0, 0, 128 * j, 64 * k], opens, as_box(w_s.index(place), w))
                else:
                    copy_in(w, [0, 0, 64 * k, 128 * j], opens, as_box(w_s.index(place), w))
                n += 1

    @gluon.jit
    def _product(m, n_terms, turns, ring, CUT: gl.constexpr):
        """Compute the product of tile m, 64 rows at a time,
        after the other user has started the last terms of the tile before.
        """
        x_s, w_s, full, empty = ring
        if m > 0:  # by then all terms of earlier tiles have arrived, so the parity of `full` cannot be one round behind
            wait_full(turns, m - 1, PAIR)
        a = gl.full([64, 128], 0.0, gl.float32, acc(128))
        b = gl.full([64, 128], 0.0, gl.float32, acc(128))
        c = gl.full([64, 128], 0.0, gl.float32, acc(128))
        for n in range(m * n_terms, (m + 1) * n_terms):
            place = n % CUT.stages
            wait_full(full, n, CUT)
            right = w_s.index(place)
            if CUT.transposed:
                right = right.permute((1, 0))
            a = warpgroup_mma(x_s.index(CUT.parts * place), right, a, is_async=True)
            b = warpgroup_mma(x_s.index(CUT.parts * place + 1), right, b, is_async=True)
            if CUT.parts == 3:
                c = warpgroup_mma(x_s.index(CUT.parts * place + 2), right, c, is_async=True)
            a, b, c = warpgroup_mma_wait(CUT.parts, deps=[a, b, c])
            mbarrier.arrive(empty.index((n + CUT.stages - 1) % CUT.stages), pred=n > m * n_terms)
        release(turns, m, PAIR)
        a, b, c = warpgroup_mma_wait(0, deps=[a, b, c])
        release(empty, (m + 1) * n_terms + CUT.stages - 1, CUT)
        return a, b, c

    @gluon.jit
    def _halves(x):
        """The left and the right half of 64 rows, without moving a number to another thread."""
        left, right = x.reshape((64, 2, 64)).permute((0, 2, 1)).split()
        return gl.convert_layout(left, acc(64), assert_trivial=True), gl.convert_layout(
            right, acc(64), assert_trivial=True
        )

    @gluon.jit
    def _pieces(a, b, c):
        """The pieces [64, 64] of a tile: the left ones from top to bottom, and then the right ones."""
        a, d = _halves(a)
        b, e = _halves(b)
        c, f = _halves(c)
        return a, b, c, d, e, f

    @gluon.jit
    def _write_gelu(x, shift, gelu, slope, row, column, gelu_s, slope_s, TANH: gl.constexpr):
        y, dy = _gelu_and_slope(x + shift[None, :], TANH, True)
        tma.store_wait(2)  # the piece before may still be on its way from the other two places
        gelu_s.store(y.to(gelu_s.dtype))
        slope_s.store(dy.to(slope_s.dtype))
        fence_async_shared()
        copy_out(gelu, [0, 0, row, column], as_box(gelu_s, gelu))
        copy_out(slope, [0, 0, row, column], as_box(slope_s, slope))

    @gluon.jit
    def _use_forward(user: gl.constexpr, given, TANH: gl.constexpr, CUT: gl.constexpr):
        bias, gelu, slope, n_rows, n_columns, n_terms, F, own_s, turns, ring = given
        for t in range(gl.program_id(0) + user * gl.num_programs(0), n_rows * n_columns, 2 * gl.num_programs(0)):
            i, j = _place(t, n_rows, n_columns, CUT)
            a, b, c = _product(t // gl.num_programs(0), n_terms, turns, ring, CUT)
            pieces = _pieces(a, b, c)  # c stays 0 and is not used
            for half in gl.static_range(2):
                column = 128 * j + 64 * half
                columns = column + gl.arange(0, 64, gl.SliceLayout(0, acc(64)))
                shift = gl.load(bias + columns, mask=columns < F, other=0.0).to(gl.float32)
                for part in gl.static_range(2):
                    row = 64 * (CUT.parts * i + part)
                    gelu_s, slope_s = own_s.index(4 * user + 2 * part), own_s.index(4 * user + 2 * part + 1)
                    _write_gelu(pieces[3 * half + part], shift, gelu, slope, row, column, gelu_s, slope_s, TANH)
        tma.store_wait(0)

    @gluon.jit
    def _load_slopes(user: gl.constexpr, slope, n, row, column, full, own_s):
        """Start to copy the slopes of the user's piece number n to place n % 4,
        which the piece before must have left.
        """
        place = 4 * user + n % 4
        mbarrier.expect(full.index(place), 64 * 64 * 2)
        copy_in(slope, [0, 0, row, column], full.index(place), as_box(own_s.index(place), slope))

    @gluon.jit
    def _write_product(user: gl.constexpr, x, n, out, row, column, full, own_s):
        """Multiply a piece by its slopes, and write it from where they were."""
        mbarrier.wait(full.index(4 * user + n % 4), n // 4 & 1)
        own = own_s.index(4 * user + n % 4)
        product = x * own.load(acc(64)).to(gl.float32)
        own.store(product.to(own.dtype))
        fence_async_shared()
        copy_out(out, [0, 0, row, column], as_box(own, out))
        return product

    @gluon.constexpr_function
    def one_row_per_warp():
        """Layout of sums [4, 64], one row for each warp of a user.

        A thread holds the same columns as of a piece [64, 64], and the eight threads of a column hold the same sum.
        """
        registers, lanes = [[0, 1], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[1, 0], [2, 0]], [], [4, 64])

    @gluon.jit
    def _write_sums(total, sums, i, column, F):
        """Add up each warp's eight rows of ``total`` [4, 8, 64], and write one row for each warp.

        The eight threads that hold a column are in one warp. They exchange registers, and no warp waits for another.
        """
        total = gl.convert_layout(gl.sum(total, 1), one_row_per_warp(), assert_trivial=True)
        rows = 4 * i + gl.arange(0, 4, gl.SliceLayout(1, one_row_per_warp()))
        columns = column + gl.arange(0, 64, gl.SliceLayout(0, one_row_per_warp()))
        gl.store(sums + rows.to(gl.int64)[:, None] * F + columns[None, :], total, mask=(columns < F)[None, :])

    @gluon.jit
    def _use_backward(user: gl.constexpr, given, CUT: gl.constexpr):
        slope, out, sums, n_rows, n_columns, n_terms, F, own_s, full, turns, ring = given
        n = 0
        for t in range(gl.program_id(0) + user * gl.num_programs(0), n_rows * n_columns, 2 * gl.num_programs(0)):
            i, j = _place(t, n_rows, n_columns, CUT)
            row, column = 64 * CUT.parts * i, 128 * j
            for piece in gl.static_range(4):
                _load_slopes(user, slope, n + piece, row + 64 * (piece % 3), column + 64 * (piece // 3), full, own_s)
            a, b, c = _product(t // gl.num_programs(0), n_terms, turns, ring, CUT)
            pieces = _pieces(a, b, c)
            for half in gl.static_range(2):
                total = 0.0
                for part in gl.static_range(3):
                    here = row + 64 * part
                    product = _write_product(user, pieces[3 * half + part], n, out, here, column, full, own_s)
                    # A thread holds rows r and r + 8 of its warp's 16 rows, so it adds them without the other threads.
                    total += gl.sum(product.reshape((4, 2, 8, 64)), 1)
                    n += 1
                    if half == 0 and part > 0:  # the slopes of the last two pieces take the places of the first two
                        tma.store_wait(1)
                        _load_slopes(user, slope, n + 2, here, column + 64, full, own_s)
                _write_sums(total, sums, i, column, F)
                column += 64
            tma.store_wait(0)

    @gluon.jit(do_not_specialize=("n_rows", "n_columns", "n_terms"))
    def gelu_kernel(x, w, bias, gelu, slope, n_rows, n_columns, n_terms, F, TANH: gl.constexpr, CUT: gl.constexpr):
        """Write the GELU of ``x @ w.T + bias`` and its slope there, both ``[N, F]``, for x ``[N, C]``, w ``[F,
        C]`` and bias ``[F]``.
        """
        x_s = gl.allocate_shared_memory(x.dtype, [CUT.parts * CUT.stages, 64, 64], shared_layout(64, 64))
        w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 128, 64], shared_layout(128, 64))
        own_s = gl.allocate_shared_memory(x.dtype, [8, 64, 64], shared_layout(64, 64))
        full, empty = _barriers(CUT)
        ring = (x_s, w_s, full, empty)
        turns = _full_barriers(PAIR)
        used = (bias, gelu, slope, n_rows, n_columns, n_terms, F, own_s, turns, ring)
        loaded = (x, w, n_rows, n_columns, n_terms, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [
                (_use_forward, (first, used, TANH, CUT)),
                (_use_forward, (second, used, TANH, CUT)),
                (_load, (loaded, CUT)),
            ],
            [4, 1],
            [240, 24],
        )

    @gluon.jit(do_not_specialize=("n_rows", "n_columns", "n_terms"))
    def slope_kernel(x, w, slope, out, sums, n_rows, n_columns, n_terms, F, CUT: gl.constexpr):
        """Write ``(x @ w) * slope`` for x ``[N, C]``, w ``[C, F]`` and slope ``[N, F]``,
        and its sums over rows, float32 ``[4 * ceil(N / 192), F]``.

        Row ``4 * i + j`` of the sums is what warp j adds up of tile i: 16 rows of each of its three pieces.
        """
        x_s = gl.allocate_shared_memory(x.dtype, [CUT.parts * CUT.stages, 64, 64], shared_layout(64, 64))
        w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 64, 128], shared_layout(64, 128))
        own_s = gl.allocate_shared_memory(x.dtype, [8, 64, 64], shared_layout(64, 64))
        full, empty = _barriers(CUT)
        ring = (x_s, w_s, full, empty)
        turns = _full_barriers(PAIR)
        slopes_full = _full_barriers(EIGHT)
        used = (slope, out, sums, n_rows, n_columns, n_terms, F, own_s, slopes_full, turns, ring)
        loaded = (x, w, n_rows, n_columns, n_terms, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use_backward, (first, used, CUT)), (_use_backward, (second, used, CUT)), (_load, (loaded, CUT))],
            [4, 1], [240, 24],
        )  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


@constant_when_compiled
def _n_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU for which these kernels were tried; 0 for any other device."""
    proven = (
        GLUON and VERSION in PROVEN and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    )
    return n_programs(device) if proven else 0


def fits(x: Tensor, n_columns: int) -> bool:
    """Whether the kernels take rows ``[..., C]`` and an inner width of ``n_columns``: 16 bits, a Hopper GPU,
    and at least a tile for each multiprocessor.
    """
    n_rows, width = x.shape[:-1].numel(), x.shape[-1]
    readable = x.dtype in (torch.bfloat16, torch.float16) and width % 8 == n_columns % 8 == 0
    n_tiles = _cdiv(n_rows, 64 * BACKWARD.parts) * _cdiv(n_columns, 128)
    return readable and 0 < _n_multiprocessors(x.device) <= n_tiles


def _cdiv(n: int, size: int) -> int:
    return -(-n // size)


@lru_cache(maxsize=64)
def _forward_launch(key: tuple) -> Launch:
    n_rows, width, columns, tanh, programs = key
    grid = _cdiv(n_rows, 64 * FORWARD.parts), _cdiv(columns, 128)
    args = (
        described(0, 64, 64), described(1, 128, 64), Address(2), described(3, 64, 64), described(4, 64, 64),
        *grid, _cdiv(width, 64), columns, tanh, FORWARD,
    )  # fmt: skip
    return Launch(gelu_kernel, (min(programs, grid[0] * grid[1]),), args, num_warps=4)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Run `gelu_kernel`; returns the GELU and its slope."""
    x, weight, bias = _readable(x), _readable(weight), _readable(bias)
    (n_rows, width), columns = x.shape, len(weight)
    gelu, slope = x.new_empty(n_rows, columns), x.new_empty(n_rows, columns)
    key = (n_rows, width, columns, approximate == "tanh", n_programs(x.device))
    launches(_forward_launch, key, x, weight, bias, gelu, slope)(x, weight, bias, gelu, slope)
    return gelu, slope


@lru_cache(maxsize=64)
def _backward_launch(key: tuple) -> Launch:
    n_rows, width, columns, programs = key
    grid = _cdiv(n_rows, 64 * BACKWARD.parts), _cdiv(columns, 128)
    args = (
        described(0, 64, 64), described(1, 64, 128), described(2, 64, 64), described(3, 64, 64), Address(4),
        *grid, _cdiv(width, 64), columns, BACKWARD,
    )  # fmt: skip
    return Launch(slope_kernel, (min(programs, grid[0] * grid[1]),), args, num_warps=4)


def launch_backward(x: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Run `slope_kernel`; returns the product times the slopes, and its column sums.

    Each warp adds up its own rows, and `add_rows` adds up what the warps wrote, always in the same order.
    The warps' sums are 4 % of the product's bytes: 17 MB for ViT-L/16 with 50,432 rows and 4,096 columns.
    """
    x, weight, slope = _readable(x), _readable(weight), _readable(slope)
    (n_rows, width), columns = x.shape, weight.shape[1]
    out = x.new_empty(n_rows, columns)
    sums = x.new_empty(4 * _cdiv(n_rows, 64 * BACKWARD.parts), columns, dtype=torch.float32)
    key = (n_rows, width, columns, n_programs(x.device))
    launches(_backward_launch, key, x, weight, slope, out, sums)(x, weight, slope, out, sums)
    return out, add_rows(sums)


def _readable(x: Tensor) -> Tensor:
    """The same tensor, contiguous and at an address from which the TMA can read."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# ---- as PyTorch and its compiler see them ----------------------------------------------------------------------------


@torch.library.custom_op("scaling_workbook::gelu_and_slope", mutates_args=())
def gelu_and_slope_op(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The GELU of ``x @ weight.T + bias`` and its slope there, in the dtype of ``x``."""
    if fits(x, len(weight)):
        return launch_forward(x, weight, bias, approximate)
    y = x.float() @ weight.float().T + bias.float()
    slope = torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate=approximate)
    return F.gelu(y, approximate=approximate).to(x.dtype), slope.to(x.dtype)


@torch.library.custom_op("scaling_workbook::times_slope", mutates_args=())
def times_slope_op(x: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """``(x @ weight) * slope`` in the dtype of ``x``, and its sums over rows in float32."""
    if fits(x, weight.shape[1]):
        return launch_backward(x, weight, slope)
    product = (x.float() @ weight.float()) * slope.float()
    return product.to(x.dtype), product.sum(0)


@gelu_and_slope_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@times_slope_op.register_fake
def _(x: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(slope.shape), x.new_empty(slope.shape[1], dtype=torch.float32)


class MLP(torch.autograd.Function):
    """Both products with the GELU between them, as one function:
    the second layer's backward product also applies the GELU's slope.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, bias: Tensor, second: Tensor, last: Tensor | None, approximate: str
    ) -> Tensor:
        ctx.dtypes, ctx.last_dtype = (first.dtype, second.dtype), None if last is None else last.dtype
        first, second = first.to(x.dtype), second.to(x.dtype)
        gelu, slope = gelu_and_slope_op(x, first, bias, approximate)
        ctx.save_for_backward(x, first, bias, second, gelu, slope)
        return F.linear(gelu, second, None if last is None else last.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, None]:
        x, first, bias, second, gelu, slope = ctx.saved_tensors
        inner, sums = times_slope_op(grad, second, slope)
        of_first, of_second = (
            wide_product(left.T, right, dtype)
            for left, right, dtype in zip((inner, grad), (x, gelu), ctx.dtypes, strict=True)
        )
        of_last = grad.sum(0, dtype=ctx.last_dtype) if ctx.needs_input_grad[4] else None
        return inner @ first, of_first, sums.to(bias.dtype), of_second, of_last, None


def mlp(
    x: Tensor, first: Tensor, bias: Tensor, second: Tensor, last: Tensor | None = None, approximate: str = "none"
) -> Tensor:
    """``gelu(x @ first.T + bias) @ second.T + last``, by the kernels where `fits` says so and by PyTorch elsewhere.

    Args:
        x: ``[N, C]``, bfloat16, float16 or float32.
        first: ``[F, C]`` in the dtype of ``x``, or float32.
        bias: ``[F]``, of any floating-point dtype.
        second: ``[D, F]`` in the dtype of ``x``, or float32.
        last: ``[D]`` likewise, or None for no second bias.
        approximate: "none" or "tanh", as PyTorch's ``gelu`` has it.

    Returns:
        ``[N, D]``. The backward pass keeps the GELU and its slope, both ``[N, F]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, a dtype or ``approximate`` is not one of these.
    """
    last_shape = second.shape[:1] if last is None else last.shape
    shapes = f"x {tuple(x.shape)}, first {tuple(first.shape)}, bias {tuple(bias.shape)}, second {tuple(second.shape)}"
    if x.ndim != 2 or first.shape != (*bias.shape, x.shape[1]) or second.shape != (*last_shape, *bias.shape):
        raise ValueError(f"{shapes}, last {tuple(last_shape)}: expected [N, C], [F, C], [F], [D, F] and [D]")
    dtypes = {"first": first.dtype, "second": second.dtype} | ({} if last is None else {"last": last.dtype})
    if not x.dtype.is_floating_point or not {*dtypes.values()} <= {x.dtype, torch.float32}:
        others = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"x is {x.dtype}, {others}: expected one floating-point dtype, or float32 for the layers")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate = {approximate!r}: expected 'none' or 'tanh'")
    return MLP.apply(x, first, bias, second, last, approximate)
