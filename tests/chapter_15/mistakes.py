"""Wrong answers to chapter 15's exercises. A kernel takes its fault as one constant more, and else is the reference's."""

import contextlib
import functools
import math

import torch

from lib.given.kernels.launch import launch_backward_dkdv, launch_backward_dq, launch_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.tiles import LN2, LOG2E, fold_groups, hide_later, tile_slices, tl, triton
from lib.workbook.grading import mistake
from solutions import flash_attention as reference

# ---- 15.1 attention_io_bytes -----------------------------------------------------------------------------------------


def _io_bytes(length, head_dim, sram_bytes, algorithm, *, item_bytes=2, squares=4, blocks=None, passes=None, linear=3):
    if length < 1 or head_dim < 1 or sram_bytes < 2:
        raise ValueError(f"{length}, {head_dim}, {sram_bytes}")
    if algorithm == "standard":
        return item_bytes * (4 * length * head_dim + squares * length**2)
    if algorithm != "flash":
        raise ValueError(algorithm)
    block = -(-(sram_bytes // 2) // (4 * head_dim)) if blocks is None else blocks(sram_bytes // 2, head_dim)
    n = -(-length // block) if passes is None else passes(length, block)
    return item_bytes * (2 * length * head_dim + n * (linear * length * head_dim + 4 * length))


@mistake("attention_io_bytes", "numbers are counted instead of bytes")
def numbers_not_bytes(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, item_bytes=1)


@mistake("attention_io_bytes", "2 N^2 instead of 4 N^2: both the scores and the weights are written and read again")
def scores_moved_twice(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, squares=2)


@mistake("attention_io_bytes", "the last block of keys, which is not full, is missing")
def last_block_forgotten(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, passes=lambda n, block: n // block)


@mistake("attention_io_bytes", "the output is written for each block, but never read back")
def output_never_read_back(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, linear=2)


@mistake(
    "attention_io_bytes", "the block of keys is rounded down: with room for fewer than 4d numbers it has no key at all"
)
def block_rounded_down(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, blocks=lambda m, d: m // (4 * d))


@mistake("attention_io_bytes", "a block of M // d keys: the queries, the keys, the values and the output need room too")
def block_of_the_whole_memory(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, blocks=lambda m, d: -(-m // d))


@mistake("attention_io_bytes", "M is the memory's size in bytes instead of the numbers of two bytes that it holds")
def memory_in_bytes(length, head_dim, sram_bytes, algorithm):
    return _io_bytes(length, head_dim, sram_bytes, algorithm, blocks=lambda m, d: -(-sram_bytes // (4 * d)))


@mistake("attention_io_bytes", "the number is right, but it is a float and should be an int")
def bytes_as_a_float(length, head_dim, sram_bytes, algorithm):
    return float(reference.attention_io_bytes(length, head_dim, sram_bytes, algorithm))


# ---- 15.2 online_softmax_update --------------------------------------------------------------------------------------


def _weights(m, scores):
    """The new maximum, the tile's weights, and the factor for what came before."""
    m_new = torch.maximum(m, scores.amax(-1))
    shift = m_new.masked_fill(m_new == -torch.inf, 0)
    return m_new, torch.exp(scores - shift[..., None]), torch.exp(m - shift)


@mistake("online_softmax_update", "the sum so far is not scaled to the new maximum")
def sum_not_scaled(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    return m_new, l + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "the output so far is not scaled to the new maximum")
def output_not_scaled(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    return m_new, l * decay + weights.sum(-1), acc + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "the old sums are multiplied by exp(m' - m): the exponent has the wrong sign")
def factor_inverted(m, l, acc, scores, values):
    m_new, weights, _ = _weights(m, scores)
    decay = torch.exp((m_new - m).nan_to_num(0.0, posinf=0.0))
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "the new maximum is that of the tile alone: the old maximum is forgotten")
def maximum_of_the_tile(m, l, acc, scores, values):
    m_new = scores.amax(-1)
    shift = m_new.masked_fill(m_new == -torch.inf, 0)
    weights, decay = torch.exp(scores - shift[..., None]), torch.exp(m - shift)
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "in a row without keys, -inf is subtracted from -inf")
def infinity_from_infinity(m, l, acc, scores, values):
    m_new = torch.maximum(m, scores.amax(-1))
    weights, decay = torch.exp(scores - m_new[..., None]), torch.exp(m - m_new)
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "the weights are rounded to the values' 16 bits for their product")
def weights_in_the_values_dtype(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    product = (weights.to(values.dtype) @ values).to(acc.dtype)
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + product


@mistake("online_softmax_update", "the output is divided by l in every tile instead of once at the end")
def divided_in_every_tile(m, l, acc, scores, values):
    m, l, acc = reference.online_softmax_update(m, l, acc, scores, values)
    return m, l, acc / l[..., None]


@mistake("online_softmax_update", "powers of 2 are taken where the softmax has powers of e")
def powers_of_two(m, l, acc, scores, values):
    m_new = torch.maximum(m, scores.amax(-1))
    shift = m_new.masked_fill(m_new == -torch.inf, 0)
    weights, decay = torch.exp2(scores - shift[..., None]), torch.exp2(m - shift)
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


@mistake("online_softmax_update", "what came before is scaled to the new maximum twice")
def scaled_twice(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    return m_new, l * decay**2 + weights.sum(-1), acc * decay[..., None] ** 2 + weights @ values.to(acc.dtype)


@mistake(
    "online_softmax_update", "the new tile is scaled by exp(m - m') too, but its weights are relative to m' already"
)
def new_tile_scaled(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    return m_new, (l + weights.sum(-1)) * decay, (acc + weights @ values.to(acc.dtype)) * decay[..., None]


@mistake("online_softmax_update", "the mean of the tile's weights is added to l instead of their sum")
def mean_for_sum(m, l, acc, scores, values):
    m_new, weights, decay = _weights(m, scores)
    return m_new, l * decay + weights.mean(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)


# ---- 15.3 FlashAttentionTorch ----------------------------------------------------------------------------------------


def _attend(ctx, q, k, v, is_causal, *, scale=None, ahead=None, divisor=None, skip=True, autocast=False, rounded=None):
    """The reference's forward pass with a chosen scale, S - T and guard of l, and with parts left out."""
    queries, keys, values = fold_groups(q, k, v)
    dtype, ahead = torch.promote_types(q.dtype, torch.float32), k.shape[-2] - q.shape[-2] if ahead is None else ahead
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=dtype)
    with contextlib.nullcontext() if autocast else torch.autocast(q.device.type, enabled=False):
        for rows in tile_slices(q.shape[-2]):
            query = queries[..., rows, :].to(dtype) * scale
            query = query.to(q.dtype).to(dtype) if rounded == "queries" else query
            l = query.new_zeros(query.shape[:-1])
            m, acc = torch.full_like(l, -torch.inf), torch.zeros_like(query)
            for cols in tile_slices(k.shape[-2]):
                if is_causal and skip and cols.start > rows.stop - 1 + ahead:
                    break
                scores = query @ keys[..., cols, :].to(dtype).mT
                scores = scores.to(q.dtype).to(dtype) if rounded == "scores" else scores
                if is_causal:
                    scores = hide_later(scores, rows.start + ahead - cols.start)
                m, l, acc = reference.online_softmax_update(m, l, acc, scores, values[..., cols, :])
            out[..., rows, :] = acc / (l.masked_fill(l == 0, 1) if divisor is None else divisor(l))[..., None]
            lse[..., rows] = m + torch.log(l)
    out, lse, ctx.is_causal = out.reshape(q.shape), lse.reshape(q.shape[:-1]), is_causal
    ctx.save_for_backward(q, k, v, out, lse)
    return out


@mistake("FlashAttentionTorch", "scores not divided by the root of the width")
class ScoresNotScaled(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, scale=1.0)


@mistake("FlashAttentionTorch", "scores divided by the width instead of its root")
class ScaledByTheWidth(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, scale=1 / q.shape[-1])


@mistake(
    "FlashAttentionTorch", "the causal mask is aligned to the first key, but query t sees the keys up to t + S - T"
)
class CausalFromTheFirstKey(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, ahead=0)


@mistake("FlashAttentionTorch", "the diagonal is hidden too (< instead of <=), but a query sees its own key")
class DiagonalHidden(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, ahead=k.shape[-2] - q.shape[-2] - 1)


@mistake("FlashAttentionTorch", "a row without keys is divided by its sum, which is 0: NaN instead of zeros")
class DividedByZero(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, divisor=lambda l: l)


@mistake("FlashAttentionTorch", "the causal mask is ignored")
class CausalIgnored(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, False)


@mistake("FlashAttentionTorch", "tiles above the diagonal are computed and hidden instead of skipped")
class NothingSkipped(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, skip=False)


@mistake("FlashAttentionTorch", "the saved logsumexp is in base 2")
class SavedForBaseTwo(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        out = _attend(ctx, q, k, v, is_causal)
        ctx.save_for_backward(*ctx.to_save[:4], ctx.to_save[4] * math.log2(math.e))
        return out


@mistake("FlashAttentionTorch", "only q, k and v are saved, so the backward pass has no logsumexp")
class LogsumexpNotSaved(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        out = _attend(ctx, q, k, v, is_causal)
        ctx.save_for_backward(q, k, v)
        return out


@mistake("FlashAttentionTorch", "the whole matrix of scores is computed at once")
class WholeMatrix(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        queries, keys, _ = fold_groups(q, k, v)
        _ = queries @ keys.mT
        return _attend(ctx, q, k, v, is_causal)


@mistake("FlashAttentionTorch", "autocast is left on inside: it rounds the products of float32 inputs to 16 bits")
class AutocastLeftOn(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, autocast=True)


@mistake("FlashAttentionTorch", "the scaled queries are rounded to 16 bits before their product with the keys")
class QueriesRounded(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, rounded="queries")


@mistake("FlashAttentionTorch", "the scores are computed in the inputs' dtype: 16 bits before the exponential")
class ScoresRounded(reference.FlashAttentionTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return _attend(ctx, q, k, v, is_causal, rounded="scores")


# ---- 15.4 flash_backward ---------------------------------------------------------------------------------------------


def _backward(q, k, v, o, do, lse, is_causal, *, fault="", autocast=False):
    dtype, scale, ahead = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5, k.shape[-2] - q.shape[-2]
    ahead = {"first key": 0, "diagonal": ahead - 1}.get(fault, ahead)
    qs, ks, vs = (x.to(dtype) for x in fold_groups(q, k, v))
    dos, lses = do.reshape(qs.shape).to(dtype), lse.reshape(qs.shape[:-1])
    delta = (dos * o.reshape(qs.shape)).sum(-1) * (fault != "no delta")
    if fault == "low delta":
        delta = (do * o).reshape(qs.shape).sum(-1).to(dtype)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    dv = dv.to(v.dtype) if fault == "low dv" else dv
    with contextlib.nullcontext() if autocast else torch.autocast(q.device.type, enabled=False):
        for rows in tile_slices(q.shape[-2]):
            query, grad = qs[..., rows, :] * scale, dos[..., rows, :]
            for cols in tile_slices(k.shape[-2]):
                if is_causal and fault != "no break" and cols.start > rows.stop - 1 + ahead:
                    break
                scores, lowered = query @ ks[..., cols, :].mT, lses[..., rows, None]
                scores = scores.to(q.dtype).to(dtype) if fault == "low scores" else scores
                if fault == "hidden first" and is_causal:
                    scores = hide_later(scores, rows.start + ahead - cols.start)
                exponent = scores - lowered
                if fault != "hidden first" and is_causal:
                    exponent = hide_later(exponent, rows.start + ahead - cols.start)
                p = torch.exp(exponent)
                ds = p * (grad @ vs[..., cols, :].mT - delta[..., rows, None])
                for_dk = query / scale if fault == "dk" else query
                for_dv = (ds if fault == "dv" else p).mT @ grad
                for_dk = ds.mT @ for_dk
                if fault == "first head":
                    for_dk, for_dv = for_dk[:, :, :1], for_dv[:, :, :1]
                dv[..., cols, :] += for_dv.sum(2, keepdim=True)
                dk[..., cols, :] += for_dk.sum(2, keepdim=True)
                dq[..., rows, :] += ds @ ks[..., cols, :] * (1.0 if fault == "dq" else scale)
    return dq.reshape(q.shape).to(q.dtype), dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)


@mistake("flash_backward", "the row sums of o * do are not subtracted")
def row_sums_left_out(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="no delta")


@mistake("flash_backward", "the gradient of the queries lacks the scale of the scores")
def queries_without_scale(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="dq")


@mistake("flash_backward", "the gradient of the keys lacks the scale of the scores")
def keys_without_scale(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="dk")


@mistake("flash_backward", "the gradient of the values is computed with ds instead of the weights")
def values_by_ds(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="dv")


@mistake("flash_backward", "the causal mask is aligned to the first key, but query t sees the keys up to t + S - T")
def backward_from_the_first_key(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="first key")


@mistake("flash_backward", "the diagonal is hidden too (< instead of <=), but a query sees its own key")
def backward_without_the_diagonal(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="diagonal")


@mistake("flash_backward", "the causal mask is ignored")
def backward_not_causal(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, False)


@mistake("flash_backward", "only the first of the query heads that share the keys is counted")
def backward_of_the_first_head(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="first head")


@mistake(
    "flash_backward",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
)
def hidden_before_the_logsumexp(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="hidden first")


@mistake("flash_backward", "autocast is left on inside: it rounds the products of float32 inputs to 16 bits")
def backward_under_autocast(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, autocast=True)


@mistake("flash_backward", "tiles above the diagonal are computed and hidden instead of skipped")
def backward_of_all_tiles(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="no break")


@mistake("flash_backward", "the row sums of o * do are computed in the inputs' 16 bits")
def row_sums_in_16_bits(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="low delta")


@mistake("flash_backward", "the gradient of the values is summed in their 16 bits: each tile's part is rounded")
def values_summed_in_16_bits(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="low dv")


@mistake("flash_backward", "the scores are computed in the inputs' dtype: 16 bits before the exponential")
def scores_in_16_bits(q, k, v, o, do, lse, is_causal):
    return _backward(q, k, v, o, do, lse, is_causal, fault="low scores")


@mistake("flash_backward", "`view` takes an o or a do with some strides only: `reshape` copies where it must")
def backward_viewed(q, k, v, o, do, lse, is_causal):
    do.view(fold_groups(q, k, v)[0].shape)
    return reference.flash_backward(q, k, v, o, do, lse, is_causal)


# ---- the kernels -----------------------------------------------------------------------------------------------------


class _Faulty:
    """A kernel with a fault, launched as the graded kernel is: ``Kernel[grid](...)``."""

    def __init_subclass__(cls, kernel, fault):
        cls.kernel, cls.fault = staticmethod(kernel), fault

    def __class_getitem__(cls, grid):
        return functools.partial(cls.kernel[grid], FAULT=cls.fault)


FIRST_KEY, DIAGONAL, NATURAL, NO_SKIP = (tl.constexpr(n) for n in (1, 2, 3, 4))
TURNS, IN_GROUP, NO_LOADS_MASK, NO_STORE_MASK = (tl.constexpr(n) for n in (5, 6, 7, 8))
ONE_LOOP, NO_END, ZERO_SUM, BASE_2 = (tl.constexpr(n) for n in (9, 10, 11, 12))
WIDE_WEIGHTS, TF32, HIDDEN_FIRST, NO_SCALE = (tl.constexpr(n) for n in (13, 14, 15, 16))
NO_DELTA, FIRST_HEAD, FROM_ITSELF, BY_DS = (tl.constexpr(n) for n in (17, 18, 19, 20))
NOT_CAUSAL, END_SEEN, WIDE_DS, LOW_SUMS, OTHER_SIDE = (tl.constexpr(n) for n in (21, 22, 23, 24, 25))


@triton.jit
def _head_of_keys(head, GROUP: tl.constexpr, FAULT: tl.constexpr):
    found = head // GROUP
    if FAULT == TURNS:
        found = head % (tl.num_programs(0) // GROUP)
    if FAULT == IN_GROUP:
        found = head % GROUP
    return found


@triton.jit
def _seen(rows, cols, T, S, CAUSAL: tl.constexpr, FAULT: tl.constexpr):
    """Which query sees which key; one of the two comes as a column, the other as a row."""
    seen = cols < S
    if FAULT == NO_END:
        seen = cols >= 0
    if FAULT == END_SEEN:
        seen = cols <= S
    if CAUSAL:
        if FAULT == FIRST_KEY:
            seen = seen & (cols <= rows)
        elif FAULT == DIAGONAL:
            seen = seen & (cols < rows + S - T)
        else:
            seen = seen & (cols <= rows + S - T)
    return seen


@triton.jit
def _walk(i, T, S, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, FAULT: tl.constexpr):
    """Where the whole tiles of keys end, and where all end."""
    whole = S // COLS * COLS
    end = S
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS)
        if FAULT != NO_SKIP:
            end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0))
        if (FAULT == FIRST_KEY) | (FAULT == DIAGONAL):
            whole = whole * 0
    if FAULT == ONE_LOOP:
        whole = whole * 0
    return whole, end


@triton.jit
def _forward_kernel(q, k, v, o, lse, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, FAULT: tl.constexpr):  # fmt: skip
    head, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, dims = i * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = (head * T + rows[:, None]) * D + dims[None, :], (rows[:, None] < T) & (dims[None, :] < D)
    query = tl.load(q + at, mask=inside, other=0.0)
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = _walk(i, T, S, ROWS, COLS, CAUSAL and FAULT != NOT_CAUSAL, FAULT)
    kv_head = _head_of_keys(head, GROUP, FAULT)
    for masked in tl.static_range(2):
        for start in tl.range(whole if masked else 0, end if masked else whole, COLS):
            cols = start + tl.arange(0, COLS)
            part = (kv_head * S + cols[:, None]) * D + dims[None, :]
            there = (cols[:, None] < S) & (dims[None, :] < D)
            if FAULT == NO_LOADS_MASK:
                key = tl.load(k + part)
                value = tl.load(v + part)
            else:
                key = tl.load(k + part, mask=there, other=0.0)
                value = tl.load(v + part, mask=there, other=0.0)
            if FAULT == TF32:
                scores = tl.dot(query, tl.trans(key))
            else:
                scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if FAULT == NATURAL:
                scores = scores * scale
            elif FAULT == NO_SCALE:
                scores = scores * LOG2E
            else:
                scores = scores * (scale * LOG2E)
            if masked:
                seen = _seen(rows[:, None], cols[None, :], T, S, CAUSAL and FAULT != NOT_CAUSAL, FAULT)
                scores = tl.where(seen, scores, -float("inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(m - shift)
            l = l * decay + tl.sum(weights, 1)
            if FAULT == WIDE_WEIGHTS:
                acc = tl.dot(weights, value.to(tl.float32), acc * decay[:, None], input_precision="ieee")
            elif FAULT == TF32:
                acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None])
            else:
                acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
            m = m_new
    divisor = tl.where(l == 0.0, 1.0, l)
    if FAULT == ZERO_SUM:
        divisor = l
    out, found = (acc / divisor[:, None]).to(o.dtype.element_ty), (m + tl.log2(divisor)) * LN2
    if FAULT == BASE_2:
        found = m + tl.log2(divisor)
    if FAULT == NO_STORE_MASK:
        tl.store(o + at, out)
    else:
        tl.store(o + at, out, mask=inside)
    tl.store(lse + head * T + rows, found, mask=rows < T)


@triton.jit
def _dq_kernel(q, k, v, o, do, lse, delta, dq, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, FAULT: tl.constexpr):  # fmt: skip
    head, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, dims = i * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = (head * T + rows[:, None]) * D + dims[None, :], (rows[:, None] < T) & (dims[None, :] < D)
    query = tl.load(q + at, mask=inside, other=0.0)
    grad = tl.load(do + at, mask=inside, other=0.0)
    sums = tl.sum(tl.load(o + at, mask=inside, other=0.0).to(tl.float32) * grad.to(tl.float32), 1)
    if FAULT == LOW_SUMS:
        sums = tl.sum(tl.load(o + at, mask=inside, other=0.0) * grad, 1).to(tl.float32)
    if FAULT == NO_STORE_MASK:
        tl.store(delta + head * T + rows, sums)
    else:
        tl.store(delta + head * T + rows, sums, mask=rows < T)
    lse2 = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
    if FAULT != NATURAL:
        lse2 = lse2 * LOG2E
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = _walk(i, T, S, ROWS, COLS, CAUSAL and FAULT != NOT_CAUSAL, FAULT)
    kv_head = _head_of_keys(head, GROUP, FAULT)
    for masked in tl.static_range(2):
        for start in tl.range(whole if masked else 0, end if masked else whole, COLS):
            cols = start + tl.arange(0, COLS)
            part = (kv_head * S + cols[:, None]) * D + dims[None, :]
            there = (cols[:, None] < S) & (dims[None, :] < D)
            if FAULT == NO_LOADS_MASK:
                key = tl.load(k + part)
                value = tl.load(v + part)
            else:
                key = tl.load(k + part, mask=there, other=0.0)
                value = tl.load(v + part, mask=there, other=0.0)
            if FAULT == TF32:
                exponent = tl.dot(query, tl.trans(key)) * (scale * LOG2E)
            else:
                exponent = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
            dp = tl.dot(grad, tl.trans(value), input_precision="ieee")
            if FAULT != HIDDEN_FIRST:
                exponent = exponent - lse2[:, None]
            if masked:
                seen = _seen(rows[:, None], cols[None, :], T, S, CAUSAL and FAULT != NOT_CAUSAL, FAULT)
                exponent = tl.where(seen, exponent, -float("inf"))
            if FAULT == HIDDEN_FIRST:
                exponent = exponent - lse2[:, None]
            if FAULT == NO_DELTA:
                ds = tl.exp2(exponent) * dp
            else:
                ds = tl.exp2(exponent) * (dp - sums[:, None])
            if FAULT == WIDE_DS:
                acc = tl.dot(ds, key.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(ds.to(key.dtype), key, acc, input_precision="ieee")
    if FAULT != NO_SCALE:
        acc = acc * scale
    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _dkdv_kernel(q, k, v, do, lse, delta, dk, dv, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                 ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, FAULT: tl.constexpr):  # fmt: skip
    head, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, dims = j * COLS + tl.arange(0, COLS), tl.arange(0, WIDTH)
    at, inside = (head * S + cols[:, None]) * D + dims[None, :], (cols[:, None] < S) & (dims[None, :] < D)
    key = tl.load(k + at, mask=inside, other=0.0)
    value = tl.load(v + at, mask=inside, other=0.0)
    dkey, dvalue = tl.zeros([COLS, WIDTH], tl.float32), tl.zeros([COLS, WIDTH], tl.float32)
    first, whole = 0, 0
    if CAUSAL:
        if FAULT != NO_SKIP:
            first = tl.maximum(j * COLS + T - S, 0) // ROWS * ROWS
        whole = tl.minimum(tl.cdiv(tl.maximum(j * COLS + COLS - 1 + T - S, 0), ROWS) * ROWS, T)
        if (FAULT == FIRST_KEY) | (FAULT == DIAGONAL) | (FAULT == ONE_LOOP):
            whole = whole * 0 + T
    for shared in tl.range(0, 1 if FAULT == FIRST_HEAD else GROUP):
        h = head * GROUP + shared
        if FAULT == FROM_ITSELF:
            h = head + shared
        for masked in tl.static_range(2):
            for start in tl.range(first if masked else whole, whole if masked else T, ROWS):
                rows = start + tl.arange(0, ROWS)
                part = (h * T + rows[:, None]) * D + dims[None, :]
                there = (rows[:, None] < T) & (dims[None, :] < D)
                if FAULT == NO_LOADS_MASK:
                    query = tl.load(q + part)
                    grad = tl.load(do + part)
                else:
                    query = tl.load(q + part, mask=there, other=0.0)
                    grad = tl.load(do + part, mask=there, other=0.0)
                lse2 = tl.load(lse + h * T + rows, mask=rows < T, other=0.0)
                if FAULT != NATURAL:
                    lse2 = lse2 * LOG2E
                sums = tl.load(delta + h * T + rows, mask=rows < T, other=0.0)
                if FAULT == TF32:
                    exponent = tl.dot(key, tl.trans(query)) * (scale * LOG2E)
                else:
                    exponent = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2E)
                dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
                if FAULT != HIDDEN_FIRST:
                    exponent = exponent - lse2[None, :]
                if masked and FAULT != NOT_CAUSAL:
                    seen = _seen(rows[None, :], cols[:, None], T, S, CAUSAL, FAULT)
                    exponent = tl.where(seen, exponent, -float("inf"))
                if FAULT == HIDDEN_FIRST:
                    exponent = exponent - lse2[None, :]
                weights = tl.exp2(exponent)
                if FAULT == NO_DELTA:
                    ds = weights * dp
                else:
                    ds = weights * (dp - sums[None, :])
                if FAULT == BY_DS:
                    weights = ds
                dvalue = tl.dot(weights.to(grad.dtype), grad, dvalue, input_precision="ieee")
                if FAULT == WIDE_DS:
                    dkey = tl.dot(ds, query.to(tl.float32), dkey, input_precision="ieee")
                else:
                    dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    if FAULT != NO_SCALE:
        dkey = dkey * scale
    if FAULT == NO_STORE_MASK:
        tl.store(dk + at, dkey.to(dk.dtype.element_ty))
    else:
        tl.store(dk + at, dkey.to(dk.dtype.element_ty), mask=inside)
    if FAULT == OTHER_SIDE:
        dvalue = dvalue * scale
    tl.store(dv + at, dvalue.to(dv.dtype.element_ty), mask=inside)


# ---- 15.5 flash_forward_kernel ---------------------------------------------------------------------------------------


@mistake(
    "flash_forward_kernel", "the causal mask is aligned to the first key, but query t sees the keys up to t + S - T"
)
class ForwardFromTheFirstKey(_Faulty, kernel=_forward_kernel, fault=FIRST_KEY):
    pass


@mistake("flash_forward_kernel", "the diagonal is hidden too (< instead of <=), but a query sees its own key")
class ForwardWithoutTheDiagonal(_Faulty, kernel=_forward_kernel, fault=DIAGONAL):
    pass


@mistake("flash_forward_kernel", "the causal mask is ignored")
class ForwardNotCausal(_Faulty, kernel=_forward_kernel, fault=NOT_CAUSAL):
    pass


@mistake("flash_forward_kernel", "the logsumexp is left in base 2")
class LogsumexpInBaseTwo(_Faulty, kernel=_forward_kernel, fault=BASE_2):
    pass


@mistake("flash_forward_kernel", "exp2 of natural scores: they need the factor log2(e)")
class ExpTwoOfNaturalScores(_Faulty, kernel=_forward_kernel, fault=NATURAL):
    pass


@mistake("flash_forward_kernel", "scores not divided by the root of the width")
class ForwardNotScaled(_Faulty, kernel=_forward_kernel, fault=NO_SCALE):
    pass


@mistake("flash_forward_kernel", "a row without keys is divided by its sum, which is 0: NaN instead of zeros")
class ForwardDividedByZero(_Faulty, kernel=_forward_kernel, fault=ZERO_SUM):
    pass


@mistake("flash_forward_kernel", "tiles above the diagonal are read and masked instead of skipped")
class ForwardNothingSkipped(_Faulty, kernel=_forward_kernel, fault=NO_SKIP):
    pass


@mistake("flash_forward_kernel", "keys after the last one take part with score 0")
class KeysAfterTheLast(_Faulty, kernel=_forward_kernel, fault=NO_END):
    pass


@mistake("flash_forward_kernel", "one key after the last takes part with score 0: the mask says <= S instead of < S")
class OneKeyAfterTheLast(_Faulty, kernel=_forward_kernel, fault=END_SEEN):
    pass


@mistake("flash_forward_kernel", "keys and values are loaded without a mask: the last tile reads beyond their end")
class ForwardLoadsUnmasked(_Faulty, kernel=_forward_kernel, fault=NO_LOADS_MASK):
    pass


@mistake("flash_forward_kernel", "the store of the output has no mask")
class OutputStoredUnmasked(_Faulty, kernel=_forward_kernel, fault=NO_STORE_MASK):
    pass


@mistake("flash_forward_kernel", "the keys of head % GROUP are read instead of head // GROUP")
class ForwardHeadInGroup(_Faulty, kernel=_forward_kernel, fault=IN_GROUP):
    pass


@mistake(
    "flash_forward_kernel",
    "key/value heads are assigned in turn, head modulo their number, instead of head // GROUP",
)
class ForwardHeadsInTurn(_Faulty, kernel=_forward_kernel, fault=TURNS):
    pass


@mistake("flash_forward_kernel", "a single loop masks every tile, even those that are seen whole")
class ForwardInOneLoop(_Faulty, kernel=_forward_kernel, fault=ONE_LOOP):
    pass


@mistake(
    "flash_forward_kernel", "weights are left in float32 for their product, but tensor cores need them in v's dtype"
)
class WeightsLeftWide(_Faulty, kernel=_forward_kernel, fault=WIDE_WEIGHTS):
    pass


@mistake("flash_forward_kernel", 'tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32')
class ForwardInTF32(_Faulty, kernel=_forward_kernel, fault=TF32):
    pass


# ---- 15.6 flash_backward_dq_kernel -----------------------------------------------------------------------------------


@mistake("flash_backward_dq_kernel", "the natural logsumexp is used as if it were in base 2")
class DqNaturalForBaseTwo(_Faulty, kernel=_dq_kernel, fault=NATURAL):
    pass


@mistake("flash_backward_dq_kernel", "the scale of the scores is missing in the gradient")
class DqWithoutScale(_Faulty, kernel=_dq_kernel, fault=NO_SCALE):
    pass


@mistake("flash_backward_dq_kernel", "the row sums are not subtracted")
class DqWithoutRowSums(_Faulty, kernel=_dq_kernel, fault=NO_DELTA):
    pass


@mistake(
    "flash_backward_dq_kernel", "the causal mask is aligned to the first key, but query t sees the keys up to t + S - T"
)
class DqFromTheFirstKey(_Faulty, kernel=_dq_kernel, fault=FIRST_KEY):
    pass


@mistake("flash_backward_dq_kernel", "the diagonal is hidden too (< instead of <=), but a query sees its own key")
class DqWithoutTheDiagonal(_Faulty, kernel=_dq_kernel, fault=DIAGONAL):
    pass


@mistake("flash_backward_dq_kernel", "the causal mask is ignored")
class DqNotCausal(_Faulty, kernel=_dq_kernel, fault=NOT_CAUSAL):
    pass


@mistake("flash_backward_dq_kernel", "keys and values are loaded without a mask: the last tile reads beyond their end")
class DqLoadsUnmasked(_Faulty, kernel=_dq_kernel, fault=NO_LOADS_MASK):
    pass


@mistake("flash_backward_dq_kernel", "the store of the row sums has no mask")
class RowSumsStoredUnmasked(_Faulty, kernel=_dq_kernel, fault=NO_STORE_MASK):
    pass


@mistake("flash_backward_dq_kernel", "tiles above the diagonal are read and masked instead of skipped")
class DqNothingSkipped(_Faulty, kernel=_dq_kernel, fault=NO_SKIP):
    pass


@mistake(
    "flash_backward_dq_kernel",
    "key/value heads are assigned in turn, head modulo their number, instead of head // GROUP",
)
class DqHeadsInTurn(_Faulty, kernel=_dq_kernel, fault=TURNS):
    pass


@mistake(
    "flash_backward_dq_kernel",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
)
class DqHiddenFirst(_Faulty, kernel=_dq_kernel, fault=HIDDEN_FIRST):
    pass


@mistake("flash_backward_dq_kernel", 'tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32')
class DqInTF32(_Faulty, kernel=_dq_kernel, fault=TF32):
    pass


@mistake("flash_backward_dq_kernel", "a single loop masks every tile, even those that are seen whole")
class DqInOneLoop(_Faulty, kernel=_dq_kernel, fault=ONE_LOOP):
    pass


@mistake("flash_backward_dq_kernel", "ds is left in float32 for its product, but tensor cores need it in k's dtype")
class DsLeftWide(_Faulty, kernel=_dq_kernel, fault=WIDE_DS):
    pass


@mistake("flash_backward_dq_kernel", "o * do is multiplied and summed in 16 bits; cast both to float32 first")
class RowSumsIn16Bits(_Faulty, kernel=_dq_kernel, fault=LOW_SUMS):
    pass


# ---- 15.7 flash_backward_dkdv_kernel ---------------------------------------------------------------------------------


@mistake("flash_backward_dkdv_kernel", "the natural logsumexp is used as if it were in base 2")
class DkdvNaturalForBaseTwo(_Faulty, kernel=_dkdv_kernel, fault=NATURAL):
    pass


@mistake("flash_backward_dkdv_kernel", "the gradient of the keys lacks the scale of the scores")
class DkWithoutScale(_Faulty, kernel=_dkdv_kernel, fault=NO_SCALE):
    pass


@mistake("flash_backward_dkdv_kernel", "the row sums are not subtracted")
class DkdvWithoutRowSums(_Faulty, kernel=_dkdv_kernel, fault=NO_DELTA):
    pass


@mistake("flash_backward_dkdv_kernel", "the gradient of the values is computed with ds instead of the weights")
class DvByDs(_Faulty, kernel=_dkdv_kernel, fault=BY_DS):
    pass


@mistake(
    "flash_backward_dkdv_kernel",
    "the causal mask is aligned to the first key, but query t sees the keys up to t + S - T",
)
class DkdvFromTheFirstKey(_Faulty, kernel=_dkdv_kernel, fault=FIRST_KEY):
    pass


@mistake("flash_backward_dkdv_kernel", "the diagonal is hidden too (< instead of <=), but a query sees its own key")
class DkdvWithoutTheDiagonal(_Faulty, kernel=_dkdv_kernel, fault=DIAGONAL):
    pass


@mistake("flash_backward_dkdv_kernel", "positions are not compared on the diagonal, so queries see later keys")
class DkdvNotCausal(_Faulty, kernel=_dkdv_kernel, fault=NOT_CAUSAL):
    pass


@mistake(
    "flash_backward_dkdv_kernel",
    "queries and gradients are loaded without a mask: the last tile reads beyond their end",
)
class DkdvLoadsUnmasked(_Faulty, kernel=_dkdv_kernel, fault=NO_LOADS_MASK):
    pass


@mistake("flash_backward_dkdv_kernel", "the store of the keys' gradient has no mask")
class DkStoredUnmasked(_Faulty, kernel=_dkdv_kernel, fault=NO_STORE_MASK):
    pass


@mistake("flash_backward_dkdv_kernel", "queries before the tile's keys are read")
class EarlierQueriesRead(_Faulty, kernel=_dkdv_kernel, fault=NO_SKIP):
    pass


@mistake("flash_backward_dkdv_kernel", "only the first of the query heads that share the keys is counted")
class DkdvOfTheFirstHead(_Faulty, kernel=_dkdv_kernel, fault=FIRST_HEAD):
    pass


@mistake(
    "flash_backward_dkdv_kernel",
    "query heads are counted from the head of keys on, but its own are head * GROUP to head * GROUP + GROUP - 1",
)
class DkdvHeadsFromItself(_Faulty, kernel=_dkdv_kernel, fault=FROM_ITSELF):
    pass


@mistake(
    "flash_backward_dkdv_kernel",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
)
class DkdvHiddenFirst(_Faulty, kernel=_dkdv_kernel, fault=HIDDEN_FIRST):
    pass


@mistake("flash_backward_dkdv_kernel", 'tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32')
class DkdvInTF32(_Faulty, kernel=_dkdv_kernel, fault=TF32):
    pass


@mistake("flash_backward_dkdv_kernel", "every tile is masked, even those whose queries see all of the keys")
class DkdvInOneLoop(_Faulty, kernel=_dkdv_kernel, fault=ONE_LOOP):
    pass


@mistake("flash_backward_dkdv_kernel", "ds is left in float32 for its product, but tensor cores need it in q's dtype")
class DkdvDsLeftWide(_Faulty, kernel=_dkdv_kernel, fault=WIDE_DS):
    pass


@mistake("flash_backward_dkdv_kernel", "the gradient of the values has the scale of the scores; only the keys' has it")
class DvScaled(_Faulty, kernel=_dkdv_kernel, fault=OTHER_SIDE):
    pass


# ---- 15.8 FlashAttentionTriton ---------------------------------------------------------------------------------------


@mistake("FlashAttentionTriton", "is_causal is not passed to the forward kernel")
class CausalNotPassed(reference.FlashAttentionTriton):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o = reference.FlashAttentionTriton.forward(ctx, q, k, v, False)
        ctx.is_causal = is_causal
        return o


@mistake("FlashAttentionTriton", "the inputs are saved as contiguous copies instead of as they are")
class SavedAsCopies(reference.FlashAttentionTriton):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = launch_forward(reference.flash_forward_kernel, q, k, v, is_causal)
        ctx.save_for_backward(*(x.contiguous() for x in (q, k, v)), o, lse)
        ctx.is_causal = is_causal
        return o


@mistake("FlashAttentionTriton", "the row sums are computed again in the inputs' 16 bits; the dQ kernel's are float32")
class RowSumsByHand(reference.FlashAttentionTriton):
    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        o = ctx.saved_tensors[3]
        return *_gradients(ctx, do, lambda lse, delta: (o * do).sum(-1).float()), None


@mistake("FlashAttentionTriton", "is_causal is not passed to the backward kernels")
class CausalForgottenBackward(reference.FlashAttentionTriton):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o = reference.FlashAttentionTriton.forward(ctx, q, k, v, is_causal)
        ctx.is_causal = False
        return o


def _gradients(ctx, do, rows_for_dkdv=lambda lse, delta: delta):
    q, k, v, o, lse = ctx.saved_tensors[:5]
    dq, delta = launch_backward_dq(reference.flash_backward_dq_kernel, q, k, v, o, do, lse, ctx.is_causal)
    rows = rows_for_dkdv(lse, delta)
    dk, dv = launch_backward_dkdv(reference.flash_backward_dkdv_kernel, q, k, v, do, lse, rows, ctx.is_causal)
    return dq, dk, dv


@mistake("FlashAttentionTriton", "the gradients of keys and values are exchanged")
class KeysForValues(reference.FlashAttentionTriton):
    @staticmethod
    def backward(ctx, do):
        dq, dk, dv = _gradients(ctx, do)
        return dq, dv, dk, None


@mistake("FlashAttentionTriton", "the logsumexp is passed on instead of the row sums")
class LogsumexpForRowSums(reference.FlashAttentionTriton):
    @staticmethod
    def backward(ctx, do):
        return *_gradients(ctx, do, lambda lse, delta: lse), None


@mistake(
    "FlashAttentionTriton", "`first_derivative_only` is missing on `backward`: a second derivative silently lacks terms"
)
class SecondDerivativeSilent(reference.FlashAttentionTriton):
    @staticmethod
    def backward(ctx, do):
        return *_gradients(ctx, do), None


@mistake(
    "FlashAttentionTriton", "contiguous copies are saved too, which takes twice the memory until the backward pass"
)
class CopiesSaved(reference.FlashAttentionTriton):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = launch_forward(reference.flash_forward_kernel, q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse, q.contiguous(), k.contiguous(), v.contiguous())
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        return *_gradients(ctx, do), None


# ---- 15.9 flash_attention --------------------------------------------------------------------------------------------


@mistake("flash_attention", "is_causal is not passed on: every query sees every key")
def causal_lost(q, k, v, is_causal=False):
    return reference.flash_attention(q, k, v, False)


@mistake(
    "flash_attention", "CPU tensors go to the Triton kernels, which an interpreter runs there; ask `q.is_cuda` first"
)
def triton_on_a_cpu(q, k, v, is_causal=False):
    if q.is_cuda or torch.is_autocast_enabled(q.device.type) or q.dtype == torch.float64 or q.shape[-1] > 256:
        return reference.flash_attention(q, k, v, is_causal)
    return reference.FlashAttentionTriton.apply(q, k, v, is_causal)


@mistake("flash_attention", "under autocast the dtype of the inputs is kept")
def dtype_kept_under_autocast(q, k, v, is_causal=False):
    with torch.autocast(q.device.type, enabled=False):
        return reference.flash_attention(q, k, v, is_causal)


@mistake("flash_attention", "float64 is cast under autocast, but PyTorch's autocast leaves it alone")
def float64_cast_under_autocast(q, k, v, is_causal=False):
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    return reference.flash_attention(q, k, v, is_causal)


@mistake("flash_attention", "cut off from autograd: the result has no gradient")
def cut_off_from_autograd(q, k, v, is_causal=False):
    return reference.flash_attention(q.detach(), k.detach(), v.detach(), is_causal)
