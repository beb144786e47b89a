"""The last product and the cross-entropy on a Hopper GPU in one kernel, so that no logit is ever in memory.

The softmax does not change if the same number is taken from all logits of a row.
Taken is the target's own logit, which one short kernel computes for each row before the product.
The product can then apply the exponential to sums that are still in registers, and writes exp(logit - own).
A row's loss is the logarithm of the sum of these powers, and the gradient of its logits is the powers over that sum,
less 1 at the target.
The division is left to whoever uses the gradient, because a factor for each row can be applied after a product with it.

Read ``lib.fast.parts.mlp`` first: its two users, which take turns, compute these tiles as well.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from lib.fast.gluon import GLUON, has_roles
from lib.fast.launch import Address, Launch, n_programs
from lib.fast.parts.grouped import Cut, described, launches
from lib.fast.parts.mlp import _readable
from lib.given.kernels.mode import tl, triton

CUT = Cut(columns=128, stages=6, users=1, transposed=True)  # with 192 rows registers were spilled
MOST_BITS = 88  # a logit counts as at most 61 nats above the target's: larger powers would leave bfloat16's range

if GLUON:
    from lib.fast.gluon import acc, as_box, copy_out, fence_async_shared, gl, gluon, tma
    from lib.fast.parts.grouped import _barriers, _full_barriers, _place, shared_layout
    from lib.fast.parts.mlp import PAIR, _load, _pieces, _product

    BITS, LIMIT = gl.constexpr(math.log2(math.e)), gl.constexpr(float(MOST_BITS))

    @gluon.jit
    def _write_powers(x, shift, target, row, column, n_vocab, powers, own_s):
        """Write a piece's powers, 0 for the target and for columns that are no tokens; returns their sums over rows."""
        columns = column + gl.arange(0, 64, gl.SliceLayout(0, acc(64)))
        bits = x * BITS - shift[:, None]
        power = gl.exp2(gl.where(bits > LIMIT, LIMIT, bits))  # NaN stays NaN
        power = gl.where((columns < n_vocab)[None, :] & (columns[None, :] != target[:, None]), power, 0.0)
        tma.store_wait(1)  # the piece before may still be on its way from the other place
        own_s.store(power.to(own_s.dtype))
        fence_async_shared()
        copy_out(powers, [0, 0, row, column], as_box(own_s, powers))
        return gl.sum(power, 1)

    @gluon.jit
    def _use(user: gl.constexpr, given, CUT: gl.constexpr):
        own, targets, powers, sums, n_rows, n_columns, n_terms, N, n_vocab, own_s, turns, ring = given
        for t in range(gl.program_id(0) + user * gl.num_programs(0), n_rows * n_columns, 2 * gl.num_programs(0)):
            i, j = _place(t, n_rows, n_columns, CUT)
            a, b, c = _product(t // gl.num_programs(0), n_terms, turns, ring, CUT)
            pieces = _pieces(a, b, c)
            for part in gl.static_range(gl.constexpr(CUT.parts)):
                row, column = 64 * (CUT.parts * i + part), 128 * j
                rows = row + gl.arange(0, 64, gl.SliceLayout(1, acc(64)))
                shift = gl.load(own + rows, mask=rows < N, other=0.0)
                target = gl.load(targets + rows, mask=rows < N, other=0).to(gl.int32)
                left, right = own_s.index(2 * user), own_s.index(2 * user + 1)
                total = _write_powers(pieces[part], shift, target, row, column, n_vocab, powers, left)
                total += _write_powers(pieces[3 + part], shift, target, row, column + 64, n_vocab, powers, right)
                gl.store(sums + j.to(gl.int64) * N + rows, total, mask=rows < N)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=("n_rows", "n_columns", "n_terms", "N", "n_vocab"))
    def powers_kernel(x, w, own, targets, powers, sums, n_rows, n_columns, n_terms, N, n_vocab, CUT: gl.constexpr):
        """Write exp(``x @ w.T`` - own) ``[N, V]``, 0 for each row's target, and its sums over each 128 columns, float32
        ``[ceil(V / 128), N]``, for x ``[N, C]``, w ``[V, C]`` and the targets' logits ``own`` in bits.
        """
        x_s = gl.allocate_shared_memory(x.dtype, [CUT.parts * CUT.stages, 64, 64], shared_layout(64, 64))
        w_s = gl.allocate_shared_memory(x.dtype, [CUT.stages, 128, 64], shared_layout(128, 64))
        own_s = gl.allocate_shared_memory(x.dtype, [4, 64, 64], shared_layout(64, 64))
        full, empty = _barriers(CUT)
        ring = (x_s, w_s, full, empty)
        turns = _full_barriers(PAIR)
        used = (own, targets, powers, sums, n_rows, n_columns, n_terms, N, n_vocab, own_s, turns, ring)
        loaded = (x, w, n_rows, n_columns, n_terms, ring)
        first: gl.constexpr = 0
        second: gl.constexpr = 1
        gl.warp_specialize(
            [(_use, (first, used, CUT)), (_use, (second, used, CUT)), (_load, (loaded, CUT))], [4, 1], [240, 24]
        )


@triton.jit
def own_logits_kernel(x, w, targets, own, n_rows, n_terms, ROWS: tl.constexpr, TERMS: tl.constexpr):
    """own [n_rows] is the product, in bits, of each row of x [n_rows, n_terms] with its target's row of w."""
    rows, terms = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TERMS)
    is_row = rows < n_rows
    inside = is_row[:, None] & (terms < n_terms)[None, :]
    target = tl.load(targets + rows, mask=is_row, other=0).to(tl.int64)
    left = tl.load(x + rows.to(tl.int64)[:, None] * n_terms + terms[None, :], mask=inside, other=0.0)
    right = tl.load(w + target[:, None] * n_terms + terms[None, :], mask=inside, other=0.0)
    bits = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1) * 1.4426950408889634  # log2(e)
    tl.store(own + rows, bits, mask=is_row)


@triton.jit
def finish_kernel(
    sums, own, targets, powers, losses, scales, n_rows, n_sums, n_columns, ROWS: tl.constexpr, SUMS: tl.constexpr
):
    """Add up sums [n_sums, n_rows], and write each row's loss, the factor of its powers, and the target's power,
    from which the whole sum has been taken.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < n_rows
    total = tl.zeros([SUMS, ROWS], tl.float32)
    for start in range(0, n_sums, SUMS):
        each = start + tl.arange(0, SUMS)
        inside = (each < n_sums)[:, None] & is_row[None, :]
        total += tl.load(sums + each.to(tl.int64)[:, None] * n_rows + rows[None, :], mask=inside, other=0.0)
    others = tl.sum(total, 0) + 0.0 * tl.load(own + rows, mask=is_row, other=0.0)  # NaN if the target's logit is
    tl.store(losses + rows, tl.log(1.0 + others), mask=is_row)
    tl.store(scales + rows, 1.0 / (1.0 + others) / n_rows, mask=is_row)
    target = tl.load(targets + rows, mask=is_row, other=0).to(tl.int64)
    tl.store(powers + rows.to(tl.int64) * n_columns + target, (-others).to(powers.dtype.element_ty), mask=is_row)


def fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes rows ``[N, C]`` and a weight ``[V, C]``: bfloat16, a Hopper GPU,
    and at least a tile for each multiprocessor.
    """
    (n_rows, width), n_columns = rows.shape, len(weight)
    readable = rows.dtype == weight.dtype == torch.bfloat16 and width % 8 == n_columns % 8 == 0
    n_tiles = -(-n_rows // (64 * CUT.parts)) * -(-n_columns // 128)
    return readable and has_roles(rows) and n_programs(rows.device) <= n_tiles


@lru_cache(maxsize=16)
def _powers_launch(key: tuple) -> Launch:
    n_rows, width, n_columns, n_vocab, programs = key
    grid = -(-n_rows // (64 * CUT.parts)), -(-n_columns // 128)
    args = (
        described(0, 64, 64), described(1, 128, 64), Address(2), Address(3), described(4, 64, 64), Address(5),
        *grid, -(-width // 64), n_rows, n_vocab, CUT,
    )  # fmt: skip
    return Launch(powers_kernel, (min(programs, grid[0] * grid[1]),), args, num_warps=4)


def launch_own_logits(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Each row's logit of its target ``[N]``, in bits."""
    (n_rows, width), own = rows.shape, rows.new_empty(len(rows), dtype=torch.float32)
    sizes = (n_rows, width, 4, triton.next_power_of_2(width))
    own_logits_kernel[(triton.cdiv(n_rows, 4),)](rows, weight, targets, own, *sizes, num_warps=4)
    return own


def finish(sums: Tensor, own: Tensor, targets: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """The losses ``[N]`` and the factors ``[N]`` of the rows of powers, whose targets are filled in."""
    n_rows, losses, scales = len(own), torch.empty_like(own), torch.empty_like(own)
    given = (sums, own, targets, powers, losses, scales, n_rows, len(sums), powers.shape[1])
    finish_kernel[(triton.cdiv(n_rows, 32),)](*given, 32, 32, num_warps=4)
    return losses, scales


def launch_loss(rows: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """For what `fits`: the losses ``[N]``; and the gradient of their mean with respect to the logits,
    as a matrix ``[N, V]`` and a float32 factor for each of its rows ``[N]``.
    """
    rows, weight, targets = _readable(rows), _readable(weight), _readable(targets)
    (n_rows, width), n_columns = rows.shape, len(weight)
    own, powers = launch_own_logits(rows, weight, targets), rows.new_empty(n_rows, n_columns)
    sums = rows.new_empty(-(-n_columns // 128), n_rows, dtype=torch.float32)
    tensors = rows, weight, own, targets, powers, sums
    launches(_powers_launch, (n_rows, width, n_columns, n_vocab, n_programs(rows.device)), *tensors)(*tensors)
    losses, scales = finish(sums, own, targets, powers)
    return losses, powers, scales
