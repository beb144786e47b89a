"""The three kernels of FlashAttention in Triton's own language, for every mask that the book has.

Read ``lib.fast.attention.flash`` first, which launches them.
What a model does not use (a band of keys, a soft cap, sinks) is left out of its kernel when it is compiled.

With BAND, a query sees the keys from ``before`` positions before its own up to ``after`` positions behind it;
with DOCS, only those of its own document, whose first and last positions ``spans`` holds.
Tiles that no query of a program sees are neither read nor computed, and only tiles at either end are masked.
"""

from lib.fast.launch import LENGTHS, REACH
from lib.given.kernels.tiles import INTERPRETED, LN2, LOG2E, tl, triton

SLOW_TANH = tl.constexpr(INTERPRETED)

# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(x, b, h, at, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows ``at`` to ``at + ROWS`` of one head; zeros beyond the last token."""
    return x.load([b, h, at, 0]).reshape(ROWS, D)


@triton.jit
def _place(ROWS: tl.constexpr):
    """Head, counted through all batches, and first row of this program (`grid_by_rows`);
    the longest rows come first.
    """
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    return head, (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS


@triton.jit
def _tanh(x):
    """The hyperbolic tangent, on a GPU by its one instruction, which is exact to about eleven bits."""
    if SLOW_TANH:
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    else:  # noqa: RET505 - Triton wants both ways written out
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _reach(at, n, before, after, first, last, DOCS: tl.constexpr):
    """The first and the last of n positions on the other axis that belong to positions ``at``."""
    low, high = tl.maximum(at - before, 0), tl.minimum(at + after, n - 1)
    if DOCS:
        inside = tl.minimum(at, n - 1)
        low = tl.maximum(low, tl.load(first + inside))
        high = tl.minimum(high, tl.load(last + inside))
    return low, high


@triton.jit
def _ends(at, n, before, after, first, last, OWN: tl.constexpr, STEP: tl.constexpr, DOCS: tl.constexpr):
    """For OWN positions from ``at``, bounds on the other axis: of all tiles, and of those that need no mask."""
    low, whole = _reach(at, n, before, after, first, last, DOCS)
    low_last, high = _reach(at + OWN - 1, n, before, after, first, last, DOCS)
    end = tl.maximum(high + 1, 0)
    return low // STEP * STEP, tl.cdiv(low_last, STEP) * STEP, tl.maximum(whole + 1, 0) // STEP * STEP, end


@triton.jit
def _seen(low, high, at, BAND: tl.constexpr):
    """Whether ``at`` lies from ``low`` to ``high``; without BAND every ``low`` is 0."""
    if BAND:
        return (low <= at) & (at <= high)
    else:  # noqa: RET505
        return high >= at


@triton.jit
def _keys(
    acc, l, m, query, k, v, b, g, first, end, low, sees, scale2, inner,
    COLS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr, EMPTY: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        key = _tile(k, b, g, start, COLS, D)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if CAP:
            scores = _tanh(scores * inner)
        if MASK:
            seen = _seen(low[:, None], sees[:, None], start + tl.arange(0, COLS)[None, :], BAND)
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale2)
        shift = m_new
        if EMPTY:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no key yet
        weights = tl.exp2(scores * scale2 - shift[:, None])  # one multiply-add and one exp2 for each score
        decay = tl.exp2(m - shift)
        l = l * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        value = _tile(v, b, g, start, COLS, D)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit
def _bounds(start, T, S, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr):
    """For ROWS rows from ``start``: the end of the tiles that all of them see whole, and of the last row's keys."""
    if CAUSAL:
        return tl.maximum(start + S - T + 1, 0) // COLS * COLS, tl.minimum(tl.maximum(start + ROWS + S - T, 0), S)
    else:  # noqa: RET505 - Triton wants both ways written out
        return S // COLS * COLS, S


@triton.jit(do_not_specialize=(*LENGTHS, *REACH))
def fast_forward_kernel(
    q, k, v, o, lse, sinks, spans, T, S, H, scale2, inner, before, after, each,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, BAND: tl.constexpr, DOCS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Like ``flash_forward_kernel``, with descriptors of [batch, H, T, D] and [batch, H / GROUP, S, D].

    With CAP, scores are the tangent of ``inner`` times the products; ``each`` is the distance of batches in ``spans``.
    A sink is a key that every query sees before all others; its value is zero.
    """
    head, start = _place(ROWS)
    b, h = head // H, head % H
    g = h // GROUP
    rows = start + tl.arange(0, ROWS)
    query = _tile(q, b, h, start, ROWS, D)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if SINKS:
        m = tl.zeros([ROWS], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        l += 1.0
    if BAND:
        spans += b * each
        low, sees = _reach(rows + S - T, S, before, after, spans, spans + S, DOCS)
        first, left, whole, end = _ends(start + S - T, S, before, after, spans, spans + S, ROWS, COLS, DOCS)
        acc, l, m = _keys(
            acc, l, m, query, k, v, b, g, first, tl.minimum(left, end), low, sees, scale2, inner,
            COLS, D, True, True, True, CAP,
        )  # fmt: skip
        acc, l, m = _keys(
            acc, l, m, query, k, v, b, g, left, whole, low, sees, scale2, inner, COLS, D, False, True, False, CAP
        )
        acc, l, m = _keys(
            acc, l, m, query, k, v, b, g, tl.maximum(left, whole), end, low, sees, scale2, inner,
            COLS, D, True, True, True, CAP,
        )  # fmt: skip
    else:
        whole, end = _bounds(start, T, S, ROWS, COLS, CAUSAL)
        sees = rows + S - T if CAUSAL else tl.zeros([ROWS], tl.int32) + S - 1
        acc, l, m = _keys(
            acc, l, m, query, k, v, b, g, 0, whole, sees, sees, scale2, inner, COLS, D, False, False, False, CAP
        )
        if CAUSAL or RAGGED:
            acc, l, m = _keys(
                acc, l, m, query, k, v, b, g, whole, end, sees, sees, scale2, inner,
                COLS, D, True, False, RAGGED, CAP,
            )  # fmt: skip
    logsumexp = (m + tl.log2(l)) * LN2
    if RAGGED:
        l = tl.where(l == 0.0, 1.0, l)
        tl.store(lse + head * T + rows, logsumexp, mask=rows < T)
    else:
        tl.store(lse + head * T + rows, logsumexp)
    o.store([b, h, start, 0], (acc / l[:, None]).to(query.dtype).reshape(1, 1, ROWS, D))


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _keys_back(
    dq, query, grad, lse2, delta, k, v, b, g, first, end, low, sees, scale2, inner,
    COLS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        key = _tile(k, b, g, start, COLS, D)
        value = _tile(v, b, g, start, COLS, D)
        scores = tl.dot(query, key.T, input_precision="ieee")
        dp = tl.dot(grad, value.T, input_precision="ieee")  # started before the softmax waits for the scores
        if CAP:
            scores = _tanh(scores * inner)
        weights = tl.exp2(scores * scale2 - lse2[:, None])
        if MASK:
            seen = _seen(low[:, None], sees[:, None], start + tl.arange(0, COLS)[None, :], BAND)
            weights = tl.where(seen, weights, 0.0)
        ds = weights * (dp - delta[:, None])
        if CAP:
            ds *= 1.0 - scores * scores
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=(*LENGTHS, *REACH))
def fast_dq_kernel(
    q, k, v, o, do, dq, lse, stats, sums, spans, n_rows, T, S, H, padded, scale2, scale, inner, before, after, each,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, SUMS: tl.constexpr, BAND: tl.constexpr, DOCS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Like ``flash_backward_dq_kernel``.

    Stores stats [2, heads * padded] for dK/dV: lse in base 2, and row sums of o * do.

    A row that has no key, or that lies beyond the last token, gets an lse of infinity,
    so that dK/dV finds weights of 0.
    With SUMS also stores sums [batches, tiles, 2, H, D]: dQ and dO, each summed over the rows of a tile.
    """
    head, start = _place(ROWS)
    b, h = head // H, head % H
    g = h // GROUP
    rows = start + tl.arange(0, ROWS)
    query = _tile(q, b, h, start, ROWS, D)
    grad = _tile(do, b, h, start, ROWS, D)
    out = _tile(o, b, h, start, ROWS, D)
    along = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if RAGGED:
        lse2 = tl.load(lse + head * T + rows, mask=rows < T, other=float("inf")) * LOG2E
        lse2 = tl.where(lse2 == -float("inf"), float("inf"), lse2)
        tl.store(stats + head * padded + rows, lse2, mask=rows < padded)
        tl.store(stats + n_rows + head * padded + rows, along, mask=rows < padded)
    else:
        lse2 = tl.load(lse + head * T + rows) * LOG2E
        tl.store(stats + head * padded + rows, lse2)
        tl.store(stats + n_rows + head * padded + rows, along)
    acc = tl.zeros([ROWS, D], tl.float32)
    if BAND:
        spans += b * each
        low, sees = _reach(rows + S - T, S, before, after, spans, spans + S, DOCS)
        first, left, whole, end = _ends(start + S - T, S, before, after, spans, spans + S, ROWS, COLS, DOCS)
        acc = _keys_back(
            acc, query, grad, lse2, along, k, v, b, g, first, tl.minimum(left, end), low, sees, scale2, inner,
            COLS, D, True, True, CAP,
        )  # fmt: skip
        acc = _keys_back(
            acc, query, grad, lse2, along, k, v, b, g, left, whole, low, sees, scale2, inner, COLS, D, False, True, CAP
        )
        acc = _keys_back(
            acc, query, grad, lse2, along, k, v, b, g, tl.maximum(left, whole), end, low, sees, scale2, inner,
            COLS, D, True, True, CAP,
        )  # fmt: skip
    else:
        whole, end = _bounds(start, T, S, ROWS, COLS, CAUSAL)
        sees = rows + S - T if CAUSAL else tl.zeros([ROWS], tl.int32) + S - 1
        acc = _keys_back(
            acc, query, grad, lse2, along, k, v, b, g, 0, whole, sees, sees, scale2, inner, COLS, D, False, False, CAP
        )
        if CAUSAL or RAGGED:
            acc = _keys_back(
                acc, query, grad, lse2, along, k, v, b, g, whole, end, sees, sees, scale2, inner,
                COLS, D, True, False, CAP,
            )  # fmt: skip
    result = (acc * scale).to(query.dtype)
    dq.store([b, h, start, 0], result.reshape(1, 1, ROWS, D))
    if SUMS:  # products with ones, so that the tensor cores add up the columns
        sums += ((b * tl.cdiv(padded, ROWS) + start // ROWS) * 2 * H + h) * D
        at, ones = tl.arange(0, D)[None, :] + tl.zeros([64, 1], tl.int32), tl.full([64, ROWS], 1.0, query.dtype)
        first = tl.arange(0, 64)[:, None] == 0  # 64 rows, all alike, are the least that a product has
        tl.store(sums + at, tl.dot(ones, result, input_precision="ieee"), mask=first)
        tl.store(sums + H * D + at, tl.dot(ones, grad, input_precision="ieee"), mask=first)


@triton.jit
def _queries(
    dk, dv, key, value, q, do, stats, b, h, base, first, end, low, high, scale2, inner,
    ROWS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr, CAP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, ROWS):
        start = tl.multiple_of(start, ROWS)
        rows = start + tl.arange(0, ROWS)
        query = _tile(q, b, h, start, ROWS, D)
        grad = _tile(do, b, h, start, ROWS, D)
        lse2, sums = tl.split(stats.load([0, base + start]).T)
        scores = tl.dot(key, query.T, input_precision="ieee")
        if DK:
            dp = tl.dot(value, grad.T, input_precision="ieee")
        if CAP:
            scores = _tanh(scores * inner)
        weights = tl.exp2(scores * scale2 - lse2[None, :])
        if MASK:
            seen = rows[None, :] >= low[:, None]
            if BAND:
                seen = seen & (rows[None, :] <= high[:, None])
            weights = tl.where(seen, weights, 0.0)
        if DV:
            dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        if DK:
            ds = weights * (dp - sums[None, :])
            if CAP:
                ds *= 1.0 - scores * scores
            dk = tl.dot(ds.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=(*LENGTHS, *REACH))
def fast_dkdv_kernel(
    q, k, v, do, dk, dv, stats, spans, T, S, G, padded, scale2, scale, inner, before, after, each,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    BAND: tl.constexpr, DOCS: tl.constexpr, CAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Like ``flash_backward_dkdv_kernel``. G is the number of key/value heads in a batch.

    Without DK or without DV only the other gradient is computed, with half of the accumulators.
    APART programs share the query heads of a key head; the dk and dv of each are heads of their own.
    """
    head, part, start = tl.program_id(1) // APART, tl.program_id(1) % APART, tl.program_id(0) * COLS
    b, g = head // G, head % G
    cols = start + tl.arange(0, COLS)
    key = _tile(k, b, g, start, COLS, D)
    value = key
    if DK:
        value = _tile(v, b, g, start, COLS, D)
    dkey = tl.zeros([COLS, D], tl.float32)
    dvalue = tl.zeros([COLS, D], tl.float32)
    low, high = cols + T - S, cols  # of the queries that see each key
    if BAND:  # a query is as far behind a key as the key is before the query
        spans += b * each
        low, high = _reach(low, T, after, before, spans, spans + T, DOCS)
        first, left, whole, end = _ends(start + T - S, T, after, before, spans, spans + T, COLS, ROWS, DOCS)
    elif CAUSAL:
        first = tl.maximum(start + T - S, 0) // ROWS * ROWS
        left = tl.minimum(tl.cdiv(tl.maximum(start + COLS - 1 + T - S, 0), ROWS) * ROWS, tl.cdiv(T, ROWS) * ROWS)
    else:
        left = 0
    for shared in tl.range(part * (GROUP // APART), (part + 1) * (GROUP // APART)):
        h, base = g * GROUP + shared, (head * GROUP + shared) * padded
        if BAND:
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, b, h, base, first, tl.minimum(left, end), low, high,
                scale2, inner, ROWS, D, True, True, CAP, DK, DV,
            )  # fmt: skip
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, b, h, base, left, whole, low, high,
                scale2, inner, ROWS, D, False, True, CAP, DK, DV,
            )  # fmt: skip
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, b, h, base, tl.maximum(left, whole), end, low, high,
                scale2, inner, ROWS, D, True, True, CAP, DK, DV,
            )  # fmt: skip
        else:
            if CAUSAL:
                dkey, dvalue = _queries(
                    dkey, dvalue, key, value, q, do, stats, b, h, base, first, left, low, high,
                    scale2, inner, ROWS, D, True, False, CAP, DK, DV,
                )  # fmt: skip
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, b, h, base, left, T, low, high,
                scale2, inner, ROWS, D, False, False, CAP, DK, DV,
            )  # fmt: skip
    if DK:
        dk.store([b, g * APART + part, start, 0], (dkey * scale).to(key.dtype).reshape(1, 1, COLS, D))
    if DV:
        dv.store([b, g * APART + part, start, 0], dvalue.to(key.dtype).reshape(1, 1, COLS, D))
