"""What goes wrong when people write kernels. Each kernel takes its fault as a constant; without one it is the reference."""

import torch

from lib.given.kernels.mode import INTERPRETED, block_of, check_tensors, matmul_tiles, rows_of, tl, triton
from lib.given.kernels.once import first_derivative_only
from lib.workbook.grading import mistake
from solutions import triton_kernels as reference

# ---- 14.1 vector_add -------------------------------------------------------------------------------------------------

NO_MASK, SAME_TILE, LOADS_UNMASKED, UP_TO_N = (tl.constexpr(n) for n in (1, 2, 3, 4))


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == SAME_TILE:
        index = tl.program_id(0) + tl.arange(0, BLOCK)
    inside = index < n
    if FAULT == UP_TO_N:
        inside = index <= n
    if FAULT == LOADS_UNMASKED:
        total = tl.load(x + index) + tl.load(y + index)
    else:
        total = tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside)
    if FAULT == NO_MASK:
        tl.store(out + index, total)
    else:
        tl.store(out + index, total, mask=inside)


def _vector_add(x, y, fault=0, n_programs=triton.cdiv, out=None):
    check_tensors(x, y)
    if x.shape != y.shape:
        raise ValueError(f"{tuple(x.shape)} and {tuple(y.shape)}")
    x, y = x.contiguous(), y.contiguous()
    out, block = torch.empty_like(x) if out is None else out, 64 if INTERPRETED else 2048
    _add[(n_programs(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block, FAULT=fault)
    return out


@mistake("vector_add", "the store has no mask: the last program writes beyond the end of the tensor")
def store_without_mask(x, y):
    return _vector_add(x, y, NO_MASK)


@mistake("vector_add", "the loads have no mask: the last program reads beyond the end of x and y")
def loads_without_mask(x, y):
    return _vector_add(x, y, LOADS_UNMASKED)


@mistake("vector_add", "the mask says <= n instead of < n: one element too many")
def mask_up_to_n(x, y):
    return _vector_add(x, y, UP_TO_N)


@mistake("vector_add", "the number of programs is rounded down, so that the ragged end is never computed")
def grid_rounded_down(x, y):
    return _vector_add(x, y, n_programs=lambda n, block: n // block)


@mistake("vector_add", "program i starts at element i instead of i * BLOCK")
def program_not_scaled(x, y):
    return _vector_add(x, y, SAME_TILE)


@mistake("vector_add", "a single program does everything: its block is as long as the tensor")
def one_large_program(x, y):
    if x.shape != y.shape:
        raise ValueError(f"{tuple(x.shape)} and {tuple(y.shape)}")
    x, y, out = x.contiguous(), y.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _add[(1,)](x, y, out, x.numel(), BLOCK=triton.next_power_of_2(max(x.numel(), 1)), FAULT=0)
    return out


@mistake("vector_add", "PyTorch computes the sum, and no kernel is launched")
def added_by_pytorch(x, y):
    if x.shape != y.shape:
        raise ValueError(f"{tuple(x.shape)} and {tuple(y.shape)}")
    return x.contiguous() + y.contiguous()


@mistake("vector_add", "the sum is written over x")
def written_over_x(x, y):
    return _vector_add(x, y, out=x if x.is_contiguous() else None)


# ---- 14.2 weighted_sum -----------------------------------------------------------------------------------------------

NO_LOOP, NARROW, NO_ROW_MASK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NO_GRAD, DX_GRAD_ALONE, FIRST_ROW = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
NO_OTHER, ATOMIC, SUM_UNMASKED = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _sum(x, weight, out, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    if FAULT == NARROW:
        total = total.to(out.dtype.element_ty)
    end = width
    if FAULT == NO_LOOP:
        end = tl.minimum(width, BLOCK)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
        tile = tl.load(x + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        if FAULT == NO_OTHER:
            tile = tl.load(x + rows[:, None] * width + columns[None, :], mask=inside)
        if FAULT == SUM_UNMASKED:
            tile = tl.load(x + rows[:, None] * width + columns[None, :])
        w = tl.load(weight + columns, mask=columns < width, other=0.0)
        if FAULT == NARROW:
            total += tl.sum(tile * w[None, :], axis=1).to(total.dtype)
        else:
            total += tl.sum(tile.to(tl.float32) * w.to(tl.float32)[None, :], axis=1)
    if FAULT == NO_ROW_MASK:
        tl.store(out + rows, total.to(out.dtype.element_ty))
    else:
        tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < n_rows)


@triton.jit
def _back(x, weight, grad, dx, partial, n_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.load(grad + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
        place = rows[:, None] * width + columns[None, :]
        tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        if FAULT == DX_GRAD_ALONE:
            w = w * 0.0 + 1.0
        tl.store(dx + place, (g[:, None] * w[None, :]).to(dx.dtype.element_ty), mask=inside)
        part = tile * g[:, None]
        if FAULT == NO_GRAD:
            part = tile
        if FAULT == ATOMIC:
            tl.atomic_add(partial + columns, tl.sum(part, axis=0), mask=columns < width)
        else:
            tl.store(partial + tl.program_id(0) * width + columns, tl.sum(part, axis=0), mask=columns < width)


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fault):
        (n_rows, width), ctx.fault = x.shape, fault
        ctx.save_for_backward(x, weight)
        ctx.block = block_of(width, 16 if INTERPRETED else 512)
        ctx.rows = rows_of(ctx.block)
        out = x.new_empty(n_rows)
        _sum[(triton.cdiv(n_rows, ctx.rows),)](
            x, weight, out, n_rows, width, ROWS=ctx.rows, BLOCK=ctx.block, FAULT=fault
        )
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        return _faulty_gradients(ctx, grad)


class _SecondSilent(_Faulty):
    @staticmethod
    def backward(ctx, grad):
        return _faulty_gradients(ctx, grad)


def _faulty_gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    (n_rows, width), n_programs = x.shape, triton.cdiv(x.shape[0], ctx.rows)
    dtype = torch.float16 if ctx.fault == "narrow partial" else torch.float32
    dx, partial = torch.empty_like(x), x.new_empty(n_programs, width, dtype=torch.float32)
    if ctx.fault == ATOMIC:
        partial = x.new_zeros(1, width, dtype=torch.float32)
    grad = grad if ctx.fault == "strides" else grad.contiguous()
    fault = 0 if isinstance(ctx.fault, str) else ctx.fault
    _back[(n_programs,)](x, weight, grad, dx, partial, n_rows, width, ROWS=ctx.rows, BLOCK=ctx.block, FAULT=fault)
    total = partial[:1].sum(0) if ctx.fault == FIRST_ROW else partial.to(dtype).sum(0)
    return dx, total.to(weight.dtype), None


def _weighted_sum(x, weight, fault, copied=True, step=_Faulty):
    check_tensors(x, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{tuple(x.shape)} and {tuple(weight.shape)}")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    return step.apply(rows, weight.contiguous() if copied else weight, fault).reshape(x.shape[:-1])


@mistake("weighted_sum", "only the first block of columns is summed: the loop over the width is missing")
def first_block_alone(x, weight):
    return _weighted_sum(x, weight, NO_LOOP)


@mistake("weighted_sum", "the sum is kept in the dtype of x, where float16 cannot count beyond 2048")
def summed_in_narrow(x, weight):
    return _weighted_sum(x, weight, NARROW)


@mistake(
    "weighted_sum", "the last program stores all of its rows, even those that do not exist: the store needs a mask"
)
def rows_without_mask(x, weight):
    return _weighted_sum(x, weight, NO_ROW_MASK)


@mistake("weighted_sum", "x is loaded without a mask: the last tile reads beyond its end")
def tile_without_mask(x, weight):
    return _weighted_sum(x, weight, SUM_UNMASKED)


@mistake("weighted_sum", "the weight's gradient is the sum of x: the factor with the output's gradient is missing")
def weight_gradient_without_grad(x, weight):
    return _weighted_sum(x, weight, NO_GRAD)


@mistake("weighted_sum", "the gradient of x is just the output's gradient: the factor weight is missing")
def x_gradient_without_weight(x, weight):
    return _weighted_sum(x, weight, DX_GRAD_ALONE)


@mistake("weighted_sum", "the weight's gradient is the first program's part only: the parts are not added")
def partial_sums_not_added(x, weight):
    return _weighted_sum(x, weight, FIRST_ROW)


@mistake(
    "weighted_sum", "the kernel assumes that the output's gradient is contiguous, but out.sum() gives an expanded one"
)
def gradient_taken_for_contiguous(x, weight):
    return _weighted_sum(x, weight, "strides")


@mistake(
    "weighted_sum", "the kernel assumes that the weight is contiguous, but it may be every second number of a vector"
)
def weight_taken_for_contiguous(x, weight):
    return _weighted_sum(x, weight, 0, copied=False)


@mistake(
    "weighted_sum", "masked places are loaded without other=0.0: Triton leaves them undefined, and they enter the sum"
)
def masked_left_undefined(x, weight):
    return _weighted_sum(x, weight, NO_OTHER)


@mistake(
    "weighted_sum", "all programs add to one row of `partial` with atomics, in an order that changes from run to run"
)
def added_by_atomics(x, weight):
    return _weighted_sum(x, weight, ATOMIC)


@mistake("weighted_sum", "the kernel is called outside of autograd, so no gradient flows back")
def cut_from_the_graph(x, weight):
    return reference.weighted_sum(x.detach(), weight.detach())


@mistake("weighted_sum", "`first_derivative_only` is missing on `backward`: a second derivative silently lacks terms")
def second_derivative_silent(x, weight):
    return _weighted_sum(x, weight, 0, step=_SecondSilent)


@mistake("weighted_sum", "PyTorch computes the sums, and no kernel is launched")
def summed_by_pytorch(x, weight):
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{tuple(x.shape)} and {tuple(weight.shape)}")
    return (x.float() * weight.float()).sum(-1).to(x.dtype)


@mistake(
    "weighted_sum", "`view` cannot flatten an x whose rows don't lie one after another: `reshape` copies where it must"
)
def sum_viewed(x, weight):
    rows = x.view(x.shape[:-1].numel(), x.shape[-1]) if weight.shape == x.shape[-1:] else x
    return reference.weighted_sum(rows, weight).reshape(x.shape[:-1])


# ---- 14.3 softmax_rows -----------------------------------------------------------------------------------------------

NO_SHIFT, FILL_ZERO, NAN_ROW = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
THREE_PASSES, IN_NARROW, NOT_DIVIDED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
OUT_STRIDE, ROW_UNMASKED = tl.constexpr(7), tl.constexpr(8)


@triton.jit
def _softmax(x, out, width, row_stride, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    place, inside = x + row * row_stride + columns, columns < width
    scores = tl.load(place, mask=inside, other=-float("inf"))
    if FAULT == FILL_ZERO:
        scores = tl.load(place, mask=inside, other=0.0)
    if FAULT == ROW_UNMASKED:
        scores = tl.load(place)
    if FAULT != IN_NARROW:
        scores = scores.to(tl.float32)
    largest = tl.max(scores, axis=0)
    if FAULT != NAN_ROW:
        largest = tl.where(largest == -float("inf"), 0.0, largest)
    if FAULT == NO_SHIFT:
        largest = 0.0
    if FAULT == THREE_PASSES:
        scores = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp((scores - largest).to(scores.dtype))
    total = tl.sum(weights, axis=0).to(weights.dtype)
    if FAULT != NAN_ROW:
        total = tl.where(total == 0.0, 1.0, total)
    if FAULT == NOT_DIVIDED:
        total = 1.0
    row_of_out = out + row * width
    if FAULT == OUT_STRIDE:
        row_of_out = out + row * row_stride
    tl.store(row_of_out + columns, (weights / total).to(out.dtype.element_ty), mask=inside)


def _softmax_rows(x, fault, row_stride=None):
    check_tensors(x)
    if x.ndim != 2:
        raise ValueError(f"{tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        stride = x.stride(0) if row_stride is None else row_stride
        _softmax[(x.shape[0],)](x, out, x.shape[1], stride, BLOCK=block_of(x.shape[1]), FAULT=fault)
    return out


@mistake("softmax_rows", "the row's largest score is not subtracted, so that exp overflows")
def largest_not_subtracted(x):
    return _softmax_rows(x, NO_SHIFT)


@mistake("softmax_rows", "masked places are loaded as 0 and count as scores; they have to be -inf")
def masked_as_zero(x):
    return _softmax_rows(x, FILL_ZERO)


@mistake(
    "softmax_rows",
    "the row is loaded without a mask: the load reaches into the next row, and for the last row beyond the end",
)
def row_without_mask(x):
    return _softmax_rows(x, ROW_UNMASKED)


@mistake("softmax_rows", "a row that is all -inf gives NaN, because -inf is subtracted from -inf")
def nan_for_hidden_row(x):
    return _softmax_rows(x, NAN_ROW)


@mistake("softmax_rows", "the row is loaded again for each step, although one load is enough")
def loaded_again(x):
    return _softmax_rows(x, THREE_PASSES)


@mistake("softmax_rows", "exponentials and their sum are computed in the dtype of x instead of in float32")
def computed_in_narrow(x):
    return _softmax_rows(x, IN_NARROW)


@mistake("softmax_rows", "the exponentials are not divided by their sum")
def not_divided(x):
    return _softmax_rows(x, NOT_DIVIDED)


@mistake("softmax_rows", "the kernel assumes that rows begin `width` elements apart, but x.stride(0) says how far")
def row_stride_ignored(x):
    return _softmax_rows(x, 0, x.shape[-1])


@mistake("softmax_rows", "the kernel steps through the result with x's row stride, but the result is contiguous")
def result_stepped_by_row_stride(x):
    return _softmax_rows(x, OUT_STRIDE)


@mistake("softmax_rows", "PyTorch computes it, and no kernel is launched")
def softmax_by_pytorch(x):
    if x.ndim != 2:
        raise ValueError(f"{tuple(x.shape)}")
    return torch.softmax(x.float(), -1).nan_to_num(0.0).to(x.dtype)


@mistake("softmax_rows", "the result is made on PyTorch's default device: it needs device=x.device")
def softmax_on_the_default_device(x):
    torch.empty(0).to(x.device)
    return reference.softmax_rows(x)


# ---- 14.4 matmul -----------------------------------------------------------------------------------------------------

ROW_MAJOR, FULL_GROUPS, NO_K_MASK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DOT_NARROW, ONE_STEP, OVERWRITTEN = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
TF32, K_UNDEFINED, ROWS_UNMASKED = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _product(
    a, b, out, M, N, K, am, ak, bk, bn,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    program, n_tiles = tl.program_id(0), tl.cdiv(N, TILE_N)
    first = program // (GROUP * n_tiles) * GROUP
    height = tl.minimum(tl.cdiv(M, TILE_M) - first, GROUP)
    if FAULT == FULL_GROUPS:
        height = GROUP
    row, column = first + program % (GROUP * n_tiles) % height, program % (GROUP * n_tiles) // height
    if FAULT == ROW_MAJOR:
        row, column = program // n_tiles, program % n_tiles
    rows, columns = row * TILE_M + tl.arange(0, TILE_M), column * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    end = K
    if FAULT == ONE_STEP:
        end = tl.minimum(K, TILE_K)
    for start in range(0, end, TILE_K):
        k = start + tl.arange(0, TILE_K)
        k_inside = k < K
        if FAULT == NO_K_MASK:
            k_inside = k >= 0
        left = tl.load(
            a + rows[:, None] * am + k[None, :] * ak, mask=(rows < M)[:, None] & k_inside[None, :], other=0.0
        )
        if FAULT == ROWS_UNMASKED:
            left = tl.load(a + rows[:, None] * am + k[None, :] * ak, mask=k_inside[None, :], other=0.0)
        right = tl.load(
            b + k[:, None] * bk + columns[None, :] * bn, mask=k_inside[:, None] & (columns < N)[None, :], other=0.0
        )
        if FAULT == K_UNDEFINED:
            right = tl.load(
                b + k[:, None] * bk + columns[None, :] * bn, mask=k_inside[:, None] & (columns < N)[None, :]
            )
        if FAULT == TF32:
            step = tl.dot(left, right)
        else:
            step = tl.dot(left, right, input_precision="ieee")
        if FAULT == OVERWRITTEN:
            total = step
        else:
            total += step
        if FAULT == DOT_NARROW:
            total = total.to(out.dtype.element_ty).to(tl.float32)
    place = out + rows[:, None] * N + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def _matmul(a, b, fault=0, strides=None):
    check_tensors(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)}")
    tiles, out, (m, k), n = matmul_tiles(a.dtype), a.new_empty(a.shape[0], b.shape[1]), a.shape, b.shape[1]
    _product[(triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n),)](
        a, b, out, m, n, k, *(strides or (*a.stride(), *b.stride())),
        TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group, FAULT=fault,
    )  # fmt: skip
    return out


@mistake("matmul", "the tiles are computed row by row, so every program reads another column of tiles of b")
def row_by_row(a, b):
    return _matmul(a, b, ROW_MAJOR)


@mistake("matmul", "the last group is assumed to be full, but it has only the remaining rows of tiles")
def last_group_taken_for_full(a, b):
    return _matmul(a, b, FULL_GROUPS)


@mistake("matmul", "the last step along K has no mask: it reads into the next row, or beyond the end")
def k_without_mask(a, b):
    return _matmul(a, b, NO_K_MASK)


@mistake("matmul", "the rows of a are loaded without a mask: the last tile reads beyond its end")
def rows_of_a_without_mask(a, b):
    return _matmul(a, b, ROWS_UNMASKED)


@mistake("matmul", "the running sum is rounded to the dtype of the result after each step")
def rounded_each_step(a, b):
    return _matmul(a, b, DOT_NARROW)


@mistake("matmul", "only the first step along K is done: the loop is missing")
def one_step_alone(a, b):
    return _matmul(a, b, ONE_STEP)


@mistake("matmul", "each step along K replaces the sum instead of adding to it")
def overwritten_each_step(a, b):
    return _matmul(a, b, OVERWRITTEN)


@mistake(
    "matmul", 'tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32, with 10 bits of mantissa'
)
def rounded_to_tf32(a, b):
    return _matmul(a, b, TF32)


@mistake(
    "matmul",
    "masked places are loaded without other=0.0: Triton leaves them undefined, and those along K enter the sum",
)
def k_left_undefined(a, b):
    return _matmul(a, b, K_UNDEFINED)


@mistake("matmul", "b's two strides are exchanged, which reads b transposed")
def strides_exchanged(a, b):
    return _matmul(a, b, strides=(*a.stride(), *b.stride()[::-1]) if b.ndim == a.ndim == 2 else None)


@mistake("matmul", "the strides are those of contiguous matrices, although a.stride() says otherwise")
def strides_assumed(a, b):
    return _matmul(a, b, strides=(a.shape[-1], 1, b.shape[-1], 1))


@mistake("matmul", "a and b are copied to make them contiguous, which costs a pass over both")
def copied_first(a, b):
    return _matmul(a.contiguous(), b.contiguous())


@mistake("matmul", "PyTorch multiplies, and no kernel is launched")
def multiplied_by_pytorch(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)}")
    return (a.float() @ b.float()).to(a.dtype)


# ---- 14.5 rms_norm ---------------------------------------------------------------------------------------------------

OVER_BLOCK, EPS_OUTSIDE, CENTRED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CAST_TWICE, TWO_PASSES, NO_ROOT, NARROW_SQUARES = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
UNDEFINED, NORM_UNMASKED = tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _norm(x, weight, out, width, row_stride, eps, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside, place = columns < width, x + row * row_stride + columns
    narrow = tl.load(place, mask=inside, other=0.0)
    if FAULT == UNDEFINED:
        narrow = tl.load(place, mask=inside)
    if FAULT == NORM_UNMASKED:
        narrow = tl.load(place)
    v = narrow.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if FAULT == CENTRED:
        v = tl.where(inside, v - tl.sum(v, axis=0) / width, 0.0)
    squares = v * v
    if FAULT == NARROW_SQUARES:
        squares = (narrow * narrow).to(tl.float32)
    mean = tl.sum(squares, axis=0) / width
    if FAULT == OVER_BLOCK:
        mean = tl.sum(squares, axis=0) / BLOCK
    scale = 1.0 / tl.sqrt(mean + eps)
    if FAULT == EPS_OUTSIDE:
        scale = 1.0 / (tl.sqrt(mean) + eps)
    if FAULT == NO_ROOT:
        scale = 1.0 / (mean + eps)
    if FAULT == TWO_PASSES:
        v = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    result = v * scale
    if FAULT == CAST_TWICE:
        result = result.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (result * w).to(out.dtype.element_ty), mask=inside)


def _rms_norm(x, weight, eps, fault, row_stride=None, copied=True, fits=lambda stride: stride == 1):
    check_tensors(x, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{tuple(x.shape)} and {tuple(weight.shape)}")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    rows = rows if fits(rows.stride(1)) else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        n, width, stride = *rows.shape, rows.stride(0) if row_stride is None else row_stride
        weight = weight.contiguous() if copied else weight
        _norm[(n,)](rows, weight, out, width, stride, eps, BLOCK=block_of(width), FAULT=fault)
    return out


@mistake(
    "rms_norm", "the sum of squares is divided by BLOCK, which counts the masked places too, instead of by the width"
)
def divided_by_block(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, OVER_BLOCK)


@mistake("rms_norm", "eps is added to the root instead of under it")
def eps_outside_the_root(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, EPS_OUTSIDE)


@mistake("rms_norm", "the mean is subtracted, as in layer norm")
def mean_subtracted(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, CENTRED)


@mistake(
    "rms_norm", "rounded to the dtype of x before the product with the weight, as Meta's code does, and then once more"
)
def rounded_before_the_weight(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, CAST_TWICE)


@mistake("rms_norm", "x is loaded a second time for the product, although it is still in registers")
def x_loaded_twice(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, TWO_PASSES)


@mistake("rms_norm", "divided by the mean square: the root is missing")
def root_missing(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, NO_ROOT)


@mistake("rms_norm", "the squares are computed in the dtype of x, and overflow in float16")
def squares_in_narrow(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, NARROW_SQUARES)


@mistake("rms_norm", "the kernel assumes that rows begin `width` elements apart, but the stride says how far")
def norm_row_stride_ignored(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, 0, x.shape[-1])


@mistake(
    "rms_norm", "x is loaded without a mask: the load reaches into the next row, and for the last row beyond the end"
)
def norm_without_mask(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, NORM_UNMASKED)


@mistake("rms_norm", "columns of stride 0, in an expanded x, are treated as contiguous")
def stride_zero_taken_for_contiguous(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, 0, fits=lambda stride: stride <= 1)


@mistake("rms_norm", "the argument eps is not passed on: the kernel always adds 1e-5")
def eps_not_passed_on(x, weight, eps=1e-5):
    return _rms_norm(x, weight, 1e-5, 0)


@mistake("rms_norm", "the kernel assumes that the weight is contiguous, but it may be every second number of a vector")
def norm_weight_taken_for_contiguous(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, 0, copied=False)


@mistake(
    "rms_norm",
    "masked places are loaded without other=0.0: Triton leaves them undefined, and they are squared and summed",
)
def norm_masked_left_undefined(x, weight, eps=1e-5):
    return _rms_norm(x, weight, eps, UNDEFINED)


@mistake("rms_norm", "PyTorch computes it, and no kernel is launched")
def norm_by_pytorch(x, weight, eps=1e-5):
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{tuple(x.shape)} and {tuple(weight.shape)}")
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype).contiguous()


@mistake(
    "rms_norm", "`view` cannot flatten an x whose rows don't lie one after another: `reshape` copies where it must"
)
def norm_viewed(x, weight, eps=1e-5):
    rows = x.view(x.shape[:-1].numel(), x.shape[-1]) if weight.shape == x.shape[-1:] else x
    return reference.rms_norm(rows, weight, eps).view(x.shape)


@mistake("rms_norm", "the result is made on PyTorch's default device: it needs device=x.device")
def norm_on_the_default_device(x, weight, eps=1e-5):
    torch.ones(0).to(x.device)
    return reference.rms_norm(x, weight, eps)


@mistake("rms_norm", "no kernel is launched: the result is an empty tensor that nobody fills")
def norm_not_launched(x, weight, eps=1e-5):
    reference.rms_norm(x, weight, eps)
    return torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
