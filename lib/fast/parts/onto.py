"""The product that ends a branch on a Hopper GPU: it adds the residual stream while its sums are still in registers.

Written as two steps, the product writes the branch, and whatever comes next reads it and the stream to add them up.
Here the product reads the stream and writes the sum, so the branch itself is never in memory, nor rounded.

Read ``lib.fast.parts.mlp`` first: this is its `slope_kernel` with a sum in the place of a product.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lib.fast.gluon import GLUON
from lib.fast.launch import Address, Launch, n_programs
from lib.fast.parts.grouped import Cut, described, launches
from lib.fast.parts.mlp import _cdiv, _readable, fits
from lib.fast.parts.wide import wide_product

CUT = Cut(columns=128, stages=4, users=1, parts=3, transposed=True)

if GLUON:
    from lib.fast.gluon import acc, as_box, copy_out, fence_async_shared, gl, gluon, mbarrier, tma
    from lib.fast.parts.grouped import _barriers, _place, shared_layout
    from lib.fast.parts.mlp import EIGHT, PAIR, _load, _load_slopes, _pieces, _product

    @gluon.jit
    def _write_sum(user: gl.constexpr, x, shift, n, out, row, column, full, own_s):
        """Add the stream to a piece, and write it from where the stream was."""
        mbarrier.wait(full.index(4 * user + n % 4), n // 4 & 1)
        own = own_s.index(4 * user + n % 4)
        own.store((x + shift[None, :] + own.load(acc(64)).to(gl.float32)).to(own.dtype))
        fence_async_shared()
        copy_out(out, [0, 0, row, column], as_box(own, out))

    @gluon.jit
    def _use(user: gl.constexpr, given, CUT: gl.constexpr):
        bias, stream, out, n_rows, n_columns, n_terms, F, own_s, full, turns, ring = given
        n = 0
        for t in range(gl.program_id(0) + user * gl.num_programs(0), n_rows * n_columns, 2 * gl.num_programs(0)):
            i, j = _place(t, n_rows, n_columns, CUT)
            row, column = 64 * CUT.parts * i, 128 * j
            for piece in gl.static_range(4):
                _load_slopes(user, stream, n + piece, row + 64 * (piece % 3), column + 64 * (piece // 3), full, own_s)
            a, b, c = _product(t // gl.num_programs(0), n_terms, turns, ring, CUT)
            pieces = _pieces(a, b, c)
            for half in gl.static_range(2):
                columns = column + gl.arange(0, 64, gl.SliceLayout(0, acc(64)))
                shift = gl.load(bias + columns, mask=columns < F, other=0.0).to(gl.float32)
                for part in gl.static_range(3):
                    here = row + 64 * part
                    _write_sum(user, pieces[3 * half + part], shift, n, out, here, column, full, own_s)
                    n += 1
                    if half == 0 and part > 0:  # the stream of the last two pieces takes the places of the first two
                        tma.store_wait(1)
                        _load_slopes(user, stream, n + 2, here, column + 64, full, own_s)
                column += 64
            tma.store_wait(0)

    @gluon.jit(do_not_specialize=("n_rows", "n_columns", "n_terms"))
    def onto_kernel(x, w, bias, stream, out, n_rows, n_columns, n_terms, F, CUT: gl.constexpr):
        """Write ``x @ w.T + bias + stream`` for x ``[N, C]``, w ``[F, C]``, bias ``[F]`` and stream ``[N, F]``."""
        x_s = gl.allocate_shared_memory(x.dtype, [CUT.parts * CUT.stages, 64, 64], shared_layout(64, 64))
        w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 128, 64], shared_layout(128, 64))
        own_s = gl.allocate_shared_memory(x.dtype, [8, 64, 64], shared_layout(64, 64))
        full, empty = _barriers(CUT)
        ring = (x_s, w_s, full, empty)
        turns, _ = _barriers(PAIR)
        streams_full, _ = _barriers(EIGHT)
        used = (bias, stream, out, n_rows, n_columns, n_terms, F, own_s, streams_full, turns, ring)
        loaded = (x, w, n_rows, n_columns, n_terms, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_load, (loaded, CUT))], [4, 1], [240, 24]
        )


@lru_cache(maxsize=64)
def _onto_launch(key: tuple) -> Launch:
    n_rows, width, columns, programs = key
    grid = _cdiv(n_rows, 64 * CUT.parts), _cdiv(columns, 128)
    args = (
        described(0, 64, 64), described(1, 128, 64), Address(2), described(3, 64, 64), described(4, 64, 64),
        *grid, _cdiv(width, 64), columns, CUT,
    )  # fmt: skip
    return Launch(onto_kernel, (min(programs, grid[0] * grid[1]),), args, num_warps=4)


def launch_onto(x: Tensor, weight: Tensor, bias: Tensor, stream: Tensor) -> Tensor:
    """Run `onto_kernel`."""
    x, weight, bias, stream = _readable(x), _readable(weight), _readable(bias), _readable(stream)
    out, key = torch.empty_like(stream), (len(x), x.shape[1], len(weight), n_programs(x.device))
    launches(_onto_launch, key, x, weight, bias, stream, out)(x, weight, bias, stream, out)
    return out


@torch.library.custom_op("scaling_workbook::linear_onto", mutates_args=())
def linear_onto_op(x: Tensor, weight: Tensor, bias: Tensor, stream: Tensor) -> Tensor:
    """``x @ weight.T + bias + stream`` in the dtype of the stream, rounded once."""
    if x.dtype == stream.dtype and fits(x, len(weight)):
        return launch_onto(x, weight, bias, stream)
    return (x.float() @ weight.float().T + bias.float() + stream.float()).to(stream.dtype)


@linear_onto_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stream: Tensor) -> Tensor:
    return stream.new_empty(stream.shape)


class _LinearOnto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stream: Tensor) -> Tensor:
        ctx.dtypes, narrow = (weight.dtype, bias.dtype), weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        return linear_onto_op(x, narrow, bias, stream)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        x, narrow = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        narrow_grad = grad.to(x.dtype)
        db = grad.sum(0, dtype=of_bias) if ctx.needs_input_grad[2] else None
        return narrow_grad @ narrow, wide_product(narrow_grad.T, x, of_weight), db, grad


def linear_onto(x: Tensor, weight: Tensor, bias: Tensor, stream: Tensor) -> Tensor:
    """``stream + x @ weight.T + bias`` for x ``[N, C]``, a weight ``[F, C]``, maybe wider, and a stream ``[N, F]``."""
    return _LinearOnto.apply(x, weight, bias, stream)
