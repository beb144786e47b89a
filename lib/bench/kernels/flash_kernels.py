"""The fast kernels of chapter 15 with each optimisation behind a flag, so that its gain can be measured."""

import math

import torch
from torch import Tensor

from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, LOG2E, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


def _describe(x: Tensor, rows: int):
    """A descriptor of a contiguous tensor as [*, width], which copies ``rows`` rows at once."""
    width = x.shape[-1]
    flat = x.view(-1, width) if INTERPRETED else x  # when compiled, only its address matters
    return TensorDescriptor(flat, [x.numel() // width, width], [width, 1], [rows, width])


@triton.jit
def _walk(
    acc, l, m, query, k, v, k_at, v_at, base, first, end, rows, scale,
    D: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr, BASE2: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, D)
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        cols = start + tl.arange(0, COLS)
        if COPY_ENGINE:
            key = k.load([base + start, 0])
        else:
            key = tl.load(k_at + (base + cols)[:, None] * D + dims[None, :])
        scores = tl.dot(query, key.T)
        if MASK:
            scores = tl.where(rows[:, None] >= cols[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        if BASE2:
            weights = tl.exp2(scores * scale - m_new[:, None])
            decay = tl.exp2(m - m_new)
        else:
            weights = tl.exp(scores * scale - m_new[:, None])
            decay = tl.exp(m - m_new)
        l = l * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if COPY_ENGINE:
            value = v.load([base + start, 0])
        else:
            value = tl.load(v_at + (base + cols)[:, None] * D + dims[None, :])
        acc = tl.dot(weights.to(value.dtype), value, acc)
        m = m_new
    return acc, l, m


@triton.jit
def forward_with_flags(
    q, k, v, o, k_at, v_at, lse, T, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BASE2: tl.constexpr, SPLIT: tl.constexpr,
    COPY_ENGINE: tl.constexpr, LONGEST_FIRST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The causal forward pass for T = S in whole tiles."""
    head, i = tl.program_id(0), tl.program_id(1)
    if LONGEST_FIRST:
        i = tl.num_programs(1) - 1 - i
    start = i * ROWS
    base = head * T
    rows = start + tl.arange(0, ROWS)
    query = q.load([base + start, 0])
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    end = start + ROWS
    if not SKIP:
        end = T
    whole = 0
    if SPLIT:
        whole = start // COLS * COLS
        acc, l, m = _walk(
            acc, l, m, query, k, v, k_at, v_at, base, 0, whole, rows, scale, D, COLS, False, BASE2, COPY_ENGINE
        )
    acc, l, m = _walk(
        acc, l, m, query, k, v, k_at, v_at, base, whole, end, rows, scale, D, COLS, True, BASE2, COPY_ENGINE
    )
    o.store([base + start, 0], (acc / l[:, None]).to(query.dtype))
    tl.store(lse + base + rows, m + tl.log2(l))


@triton.jit
def _walk_back(
    dq, query, grad, lse2, delta, k, v, base, first, end, rows, scale,
    COLS: tl.constexpr, MASK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        key = k.load([base + start, 0])
        value = v.load([base + start, 0])
        scores = tl.dot(query, key.T)
        if EARLY:
            dp = tl.dot(grad, value.T)
        weights = tl.exp2(scores * scale - lse2[:, None])
        if MASK:
            weights = tl.where(rows[:, None] >= start + tl.arange(0, COLS)[None, :], weights, 0.0)
        if not EARLY:
            dp = tl.dot(grad, value.T)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq)
    return dq


@triton.jit
def dq_with_flags(
    q, k, v, o, do, dq, lse, delta, T, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The causal gradient of the queries for T = S in whole tiles."""
    head, start = tl.program_id(1), (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    base = head * T
    rows = start + tl.arange(0, ROWS)
    query = q.load([base + start, 0])
    grad = do.load([base + start, 0])
    if FUSED:
        out = o.load([base + start, 0])
        sums = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        tl.store(delta + base + rows, sums)
    else:
        sums = tl.load(delta + base + rows)
    lse2 = tl.load(lse + base + rows) * LOG2E
    acc = tl.zeros([ROWS, D], tl.float32)
    whole = start // COLS * COLS
    acc = _walk_back(acc, query, grad, lse2, sums, k, v, base, 0, whole, rows, scale, COLS, False, EARLY)
    acc = _walk_back(acc, query, grad, lse2, sums, k, v, base, whole, start + ROWS, rows, scale, COLS, True, EARLY)
    dq.store([base + start, 0], acc.to(query.dtype))


def forward(
    q: Tensor, k: Tensor, v: Tensor, rows=64, cols=128, warps=4, stages=2,
    base2=True, split=True, copy_engine=True, longest_first=True, skip=True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and logsumexp in base 2; without ``base2`` the logsumexp mixes units, for timing only."""
    (t, d), n_heads = q.shape[-2:], math.prod(q.shape[:-2])
    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    scale = d**-0.5 * (math.log2(math.e) if base2 else 1.0)
    options = {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}
    by_cols = [_describe(x, cols) for x in (k, v)]
    forward_with_flags[(n_heads, t // rows)](
        _describe(q, rows), *by_cols, _describe(o, rows), k, v, lse, t, scale,
        d, rows, cols, base2, split, copy_engine, longest_first, skip, **options,
    )  # fmt: skip
    return o, lse


def backward_dq(q, k, v, o, do, lse, rows=64, cols=64, warps=4, stages=3, early=True, fused=True) -> Tensor:
    """The gradient of the queries, not yet multiplied by the scale."""
    (t, d), n_heads = q.shape[-2:], math.prod(q.shape[:-2])
    delta = torch.empty_like(lse) if fused else (o.float() * do.float()).sum(-1)
    dq = torch.empty_like(q)
    options = {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}
    by_rows = [_describe(x, rows) for x in (q, o, do, dq)]
    dq_with_flags[(t // rows, n_heads)](
        by_rows[0], _describe(k, cols), _describe(v, cols), *by_rows[1:], lse, delta,
        t, d**-0.5 * math.log2(math.e), d, rows, cols, early, fused, **options,
    )  # fmt: skip
    return dq


@triton.jit
def _walk_queries(
    dk, dv, key, value, q, do, stats, lse, delta, base, first, end, cols, scale,
    ROWS: tl.constexpr, MASK: tl.constexpr, EARLY: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, ROWS):
        start = tl.multiple_of(start, ROWS)
        rows = start + tl.arange(0, ROWS)
        query = q.load([base + start, 0])
        grad = do.load([base + start, 0])
        if COPY_ENGINE:
            lse2, sums = tl.split(stats.load([0, base + start]).T)
        else:
            lse2, sums = tl.load(lse + base + rows) * LOG2E, tl.load(delta + base + rows)
        scores = tl.dot(key, query.T)
        if EARLY:
            dp = tl.dot(value, grad.T)
        weights = tl.exp2(scores * scale - lse2[None, :])
        if MASK:
            weights = tl.where(rows[None, :] >= cols[:, None], weights, 0.0)
        if not EARLY:
            dp = tl.dot(value, grad.T)
        dv = tl.dot(weights.to(grad.dtype), grad, dv)
        ds = weights * (dp - sums[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk)
    return dk, dv


@triton.jit
def dkdv_with_flags(
    q, k, v, do, dk, dv, stats, lse, delta, T, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """The causal gradients of keys and values for T = S in whole tiles."""
    head, start = tl.program_id(1), tl.program_id(0) * COLS
    base = head * T
    cols = start + tl.arange(0, COLS)
    key = k.load([base + start, 0])
    value = v.load([base + start, 0])
    dkey = tl.zeros([COLS, D], tl.float32)
    dvalue = tl.zeros([COLS, D], tl.float32)
    first = start // ROWS * ROWS
    whole = tl.cdiv(start + COLS, ROWS) * ROWS
    dkey, dvalue = _walk_queries(
        dkey, dvalue, key, value, q, do, stats, lse, delta, base, first, whole, cols, scale,
        ROWS, True, EARLY, COPY_ENGINE,
    )  # fmt: skip
    dkey, dvalue = _walk_queries(
        dkey, dvalue, key, value, q, do, stats, lse, delta, base, whole, T, cols, scale,
        ROWS, False, EARLY, COPY_ENGINE,
    )  # fmt: skip
    dk.store([base + start, 0], dkey.to(key.dtype))
    dv.store([base + start, 0], dvalue.to(key.dtype))


def backward_dkdv(
    q, k, v, do, lse, stats, rows=64, cols=64, warps=4, stages=3, early=True, copy_engine=True
) -> tuple[Tensor, Tensor]:
    """The gradients of keys, not yet multiplied by the scale, and of values; ``stats`` are those of ``fast_dq``.

    Without ``copy_engine`` it reads ``lse`` and the row sums by pointers.
    """
    (t, d), n_heads = q.shape[-2:], math.prod(q.shape[:-2])
    n_rows, dk, dv = n_heads * t, torch.empty_like(k), torch.empty_like(v)
    pairs = TensorDescriptor(stats, [2, n_rows], [n_rows, 1], [2, rows])
    options = {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}
    by_cols = [_describe(x, cols) for x in (k, v, dk, dv)]
    dkdv_with_flags[(t // cols, n_heads)](
        _describe(q, rows), *by_cols[:2], _describe(do, rows), *by_cols[2:], pairs, lse, stats[1],
        t, d**-0.5 * math.log2(math.e), rows, cols, d, early, copy_engine, **options,
    )  # fmt: skip
    return dk, dv


@triton.jit
def _walk_once(
    dk, dv, key, value, q, do, dq, dq_at, lse, delta, base, first, end, cols, scale,
    D: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, ROWS):
        start = tl.multiple_of(start, ROWS)
        rows = start + tl.arange(0, ROWS)
        query = q.load([base + start, 0])
        grad = do.load([base + start, 0])
        lse2 = tl.load(lse + base + rows)
        sums = tl.load(delta + base + rows)
        scores = tl.dot(key, query.T)
        dp = tl.dot(value, grad.T)
        weights = tl.exp2(scores * scale - lse2[None, :])
        if MASK:
            weights = tl.where(rows[None, :] >= cols[:, None], weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv)
        ds = (weights * (dp - sums[None, :])).to(query.dtype)
        dk = tl.dot(ds, query, dk)
        share = tl.dot(ds.T, key)
        if COPY_ENGINE:
            dq.atomic_add([base + start, 0], share)
        else:
            tl.atomic_add(dq_at + (base + rows)[:, None] * D + tl.arange(0, D)[None, :], share)
    return dk, dv


@triton.jit
def backward_in_one_pass(
    q, k, v, do, dq, dk, dv, dq_at, lse, delta, T, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """All causal gradients for T = S in whole tiles: five products a tile, dq [*, D] in float32 by reduce-add.

    Triton's interpreter has no reduce-add of a tile: there it adds by pointers.
    """
    head, start = tl.program_id(1), tl.program_id(0) * COLS
    base = head * T
    cols = start + tl.arange(0, COLS)
    key = k.load([base + start, 0])
    value = v.load([base + start, 0])
    dkey = tl.zeros([COLS, D], tl.float32)
    dvalue = tl.zeros([COLS, D], tl.float32)
    first = start // ROWS * ROWS
    whole = tl.cdiv(start + COLS, ROWS) * ROWS
    dkey, dvalue = _walk_once(
        dkey, dvalue, key, value, q, do, dq, dq_at, lse, delta, base, first, whole, cols, scale,
        D, ROWS, True, COPY_ENGINE,
    )  # fmt: skip
    dkey, dvalue = _walk_once(
        dkey, dvalue, key, value, q, do, dq, dq_at, lse, delta, base, whole, T, cols, scale,
        D, ROWS, False, COPY_ENGINE,
    )  # fmt: skip
    dk.store([base + start, 0], dkey.to(key.dtype))
    dv.store([base + start, 0], dvalue.to(key.dtype))


def backward_once(q, k, v, o, do, lse, rows=64, cols=64, warps=4, stages=2) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients, those of queries and keys not yet multiplied by the scale; ``lse`` is in base 2."""
    (t, d), n_heads = q.shape[-2:], math.prod(q.shape[:-2])
    delta = (o.float() * do.float()).sum(-1)
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    options = {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}
    by_rows, by_cols = ([_describe(x, n) for x in xs] for n, xs in ((rows, (q, do, dq)), (cols, (k, v, dk, dv))))
    backward_in_one_pass[(t // cols, n_heads)](
        by_rows[0], *by_cols[:2], *by_rows[1:], *by_cols[2:], dq, lse, delta,
        t, d**-0.5 * math.log2(math.e), d, rows, cols, not INTERPRETED, **options,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv
