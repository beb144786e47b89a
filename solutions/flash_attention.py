"""FlashAttention: exact attention in tiles, forward and backward, in PyTorch and in Triton."""


import torch
from jaxtyping import Float
from torch import Tensor

from lib.given.flash_fast import fits_fast, flash_attention_fast
from lib.given.flash_launch import (
    HAS_TRITON,
    fold_groups,
    launch_backward_dkdv,
    launch_backward_dq,
    launch_forward,
    load_tile,
    store_tile,
    tile_slices,
    tl,
    triton,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def attention_io_bytes(length: int, head_dim: int, sram_bytes: int, algorithm: str) -> int:
    """Bytes that the forward pass of one head moves to and from a GPU's main memory. (Exercise 15.1)

    Args:
        length: Number N of queries, and of keys.
        head_dim: Width d of the head.
        sram_bytes: Memory on the chip; it holds M = sram_bytes // 2 numbers of 2 bytes.
        algorithm: "standard" keeps the scores and the weights in main memory, as the paper's Algorithm 0;
            "flash" walks blocks of ceil(M / 4d) keys, as its Algorithm 1.

    Returns:
        Two bytes for each number of equation (15.1) or (15.2); all is read and written as often as the algorithm's
        lines say.

    Raises:
        ValueError: another algorithm, or a length, width or memory below 1 (2 bytes of memory).

    Source: FlashAttention (arXiv:2205.14135), Algorithms 0 and 1, Theorem 2.
    """
    ### BEGIN SOLUTION
    if length < 1 or head_dim < 1 or sram_bytes < 2:
        raise ValueError(f"length = {length}, head_dim = {head_dim}, sram_bytes = {sram_bytes}: expected 1, 1, 2 or more")
    if algorithm == "standard":
        return 2 * (4 * length * head_dim + 4 * length**2)
    if algorithm == "flash":
        block = -(-(sram_bytes // 2) // (4 * head_dim))
        passes = -(-length // block)
        return 2 * (2 * length * head_dim + passes * (3 * length * head_dim + 4 * length))
    raise ValueError(f"algorithm = {algorithm!r}: expected 'standard' or 'flash'")
    ### END SOLUTION


def online_softmax_update(
    m: Float[Tensor, "*lead r"],
    l: Float[Tensor, "*lead r"],  # noqa: E741
    acc: Float[Tensor, "*lead r d"],
    scores: Float[Tensor, "*lead r c"],
    values: Float[Tensor, "*lead c d"],
) -> tuple[Float[Tensor, "*lead r"], Float[Tensor, "*lead r"], Float[Tensor, "*lead r d"]]:
    """Take one more tile of keys into a softmax that is under way. (Exercise 15.2)

    Args:
        m: Largest score of each row so far; -inf before the first tile.
        l: Sum of exp(score - m) so far; 0 before the first tile.
        acc: Sum of exp(score - m) times value so far, not yet divided by l.
        scores: Scaled scores of the new tile; -inf where a key is hidden.
        values: Values of the tile's keys, in any floating dtype.

    Returns:
        The new m, l and acc, in the dtypes of the old ones, which stay unchanged. A row that has seen no key keeps -inf, 0 and 0.

    Source: equation (15.3); Milakov and Gimelshein (arXiv:1805.02867), Algorithm 3.
    """
    ### BEGIN SOLUTION
    m_new = torch.maximum(m, scores.amax(-1))
    shift = m_new.masked_fill(m_new == -torch.inf, 0)
    weights = torch.exp(scores - shift[..., None])
    decay = torch.exp(m - shift)
    return m_new, l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)
    ### END SOLUTION


### BEGIN SOLUTION
def _attend_rows(q: Tensor, k: Tensor, v: Tensor, position: int | None) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of one tile of queries; ``position`` is the last key that its first query sees."""
    n_rows, n_keys, rows = q.shape[-2], k.shape[-2], torch.arange(q.shape[-2], device=q.device)
    l = q.new_zeros(q.shape[:-1])  # noqa: E741
    m, acc = torch.full_like(l, -torch.inf), torch.zeros_like(q)
    for tile in tile_slices(n_keys):
        if position is not None and tile.start > position + n_rows - 1:
            break
        scores = q @ k[..., tile, :].to(q.dtype).mT
        if position is not None and tile.stop - 1 > position:
            keys = torch.arange(tile.start, tile.stop, device=q.device)
            scores = scores.masked_fill(keys > rows[:, None] + position, -torch.inf)
        m, l, acc = online_softmax_update(m, l, acc, scores, v[..., tile, :])
    return acc / l.masked_fill(l == 0, 1)[..., None], m + torch.log(l)


### END SOLUTION


class FlashAttentionTorch(torch.autograd.Function):
    """Attention in tiles, in PyTorch, with a backward pass that recomputes the weights. (Exercise 15.3)

    ``FlashAttentionTorch.apply(q, k, v, is_causal)`` gives softmax(q k^T / sqrt(D)) v.

    Args:
        q: Queries [..., T, D].
        k: Keys [..., S, D]; q's axis of heads may be a multiple of theirs.
        v: Values, of k's shape.
        is_causal: Query t sees the keys up to t + S - T. A row without keys gives zeros.

    ``forward`` saves q, k, v, the output and exactly one tensor [..., T] more: the natural logsumexp of each row's scaled
    scores, float32 (float64 for float64), -inf for a row without keys. No tensor of T x S numbers exists at any time, sums are
    kept in float32 at least, and tiles above the diagonal are not computed. `tile_slices` cuts, `fold_groups` sorts the heads.

    Raises:
        ValueError: the shapes or dtypes do not fit (`fold_groups` sees to it).

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ### BEGIN SOLUTION
        queries, keys, values = fold_groups(q, k, v)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=dtype)
        with torch.autocast(q.device.type, enabled=False):
            for tile in tile_slices(q.shape[-2]):
                position = tile.start + k.shape[-2] - q.shape[-2] if is_causal else None
                scaled = queries[..., tile, :].to(dtype) * q.shape[-1] ** -0.5
                o, lse[..., tile] = _attend_rows(scaled, keys, values, position)
                out[..., tile, :] = o.to(q.dtype)
        out, lse, ctx.is_causal = out.reshape(q.shape), lse.reshape(q.shape[:-1]), is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return (*flash_backward(q, k, v, o, do, lse, ctx.is_causal), None)


### BEGIN SOLUTION
def _weights(q: Tensor, k: Tensor, lse: Tensor, position: int | None) -> Tensor:
    """The weights of one tile again, from its scores and the logsumexp of its rows."""
    exponent = q @ k.mT - lse[..., None]
    if position is not None and k.shape[-2] - 1 > position:
        rows, keys = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
        exponent = exponent.masked_fill(keys > rows[:, None] + position, -torch.inf)
    return torch.exp(exponent)


### END SOLUTION


def flash_backward(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    o: Float[Tensor, "*lead t d"],
    do: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    is_causal: bool,
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """Gradients of attention, from tiles of weights computed once more. (Exercise 15.4)

    Args:
        q, k, v, is_causal: As they went into the forward pass; heads may be shared.
        o: What came out.
        do: Gradient of the loss with respect to o; any strides.
        lse: Natural logsumexp of each row's scaled scores.

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k, v. No tensor of T x S numbers exists at any time, and sums are kept in
        float32 at least.

    Source: equations (15.6) and (15.7); FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    ### BEGIN SOLUTION
    dtype, scale, ahead = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5, k.shape[-2] - q.shape[-2]
    qs, ks, vs = (x.to(dtype) for x in fold_groups(q, k, v))
    dos, lses = do.reshape(qs.shape).to(dtype), lse.reshape(qs.shape[:-1])
    delta = (dos * o.reshape(qs.shape).to(dtype)).sum(-1)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    with torch.autocast(q.device.type, enabled=False):
        for rows in tile_slices(q.shape[-2]):
            query, g = qs[..., rows, :] * scale, dos[..., rows, :]
            for cols in tile_slices(k.shape[-2]):
                if is_causal and cols.start > rows.stop - 1 + ahead:
                    break
                position = rows.start + ahead - cols.start if is_causal else None
                p = _weights(query, ks[..., cols, :], lses[..., rows], position)
                ds = p * (g @ vs[..., cols, :].mT - delta[..., rows, None])
                dv[..., cols, :] += (p.mT @ g).sum(2, keepdim=True)
                dk[..., cols, :] += (ds.mT @ query).sum(2, keepdim=True)
                dq[..., rows, :] += ds @ ks[..., cols, :] * scale
    return dq.reshape(q.shape).to(q.dtype), dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)
    ### END SOLUTION


### BEGIN SOLUTION
@triton.jit
def _walk_keys(
    query, m, l, acc, k, v, first, end, sees, S, scale2,
    D: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from ``first`` to ``end``; compares positions only if MASK."""
    for start in tl.range(first, end, COLS):
        cols = start + tl.arange(0, COLS)
        scores = tl.dot(query, tl.trans(load_tile(k, cols, S, D, WIDTH)), input_precision="ieee") * scale2
        if MASK:
            seen = cols[None, :] < S
            if CAUSAL:
                seen = seen & (cols[None, :] <= sees[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = m_new
        if MASK:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(m - shift)
        value = load_tile(v, cols, S, D, WIDTH)
        l = l * decay + tl.sum(weights, 1)  # noqa: E741
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        m = m_new
    return m, l, acc


### END SOLUTION


@triton.jit
def flash_forward_kernel(
    q, k, v, o, lse, T, S, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Output and logsumexp of one tile of queries of one head. (Exercise 15.5)

    The grid is (all query heads, tiles of queries). Query head h reads the keys of head h // GROUP, counted over the batch.

    Args:
        q, o: Pointers to contiguous [heads, T, D].
        k, v: Pointers to contiguous [heads / GROUP, S, D].
        lse: Pointer to float32 [heads, T], for the natural logsumexp; -inf for a row without keys.
        T, S: Numbers of queries and keys; any.
        scale: What the scores are multiplied with.
        GROUP: Query heads that share a head of keys.
        D, WIDTH: Width of a head, and the power of two that holds it.
        ROWS, COLS: Tiles of queries and keys.
        CAUSAL: Query t sees the keys up to t + S - T.

    Returns:
        Nothing; o and lse are written, and nothing beside them. Tiles of keys that no query of the tile sees are not read.
        Whole tiles are done without comparisons. Sums in float32; the weights take v's dtype for their product.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1; equation (15.5).
    """
    ### BEGIN SOLUTION
    head = tl.program_id(0).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # under a causal mask the longest rows begin first
    rows = start + tl.arange(0, ROWS)
    query = load_tile(q + head * T * D, rows, T, D, WIDTH)
    k, v = k + head // GROUP * S * D, v + head // GROUP * S * D
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = S // COLS * COLS, S
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(start + S - T + 1, 0) // COLS * COLS)
        end = tl.minimum(S, tl.maximum(start + ROWS + S - T, 0))
    sees, scale2 = rows + S - T, scale * LOG2E
    m, l, acc = _walk_keys(query, m, l, acc, k, v, 0, whole, sees, S, scale2, D, WIDTH, COLS, CAUSAL, False)  # noqa: E741
    m, l, acc = _walk_keys(query, m, l, acc, k, v, whole, end, sees, S, scale2, D, WIDTH, COLS, CAUSAL, True)  # noqa: E741
    l = tl.where(l == 0.0, 1.0, l)  # noqa: E741
    store_tile(o + head * T * D, acc / l[:, None], rows, T, D, WIDTH)
    tl.store(lse + head * T + rows, (m + tl.log2(l)) * LN2, mask=rows < T)
    ### END SOLUTION


### BEGIN SOLUTION
@triton.jit
def _walk_keys_back(
    dq, query, grad, lse2, delta, k, v, first, end, sees, S, scale2,
    D: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``first`` to ``end`` give to the gradient of a tile of queries."""
    for start in tl.range(first, end, COLS):
        cols = start + tl.arange(0, COLS)
        key = load_tile(k, cols, S, D, WIDTH)
        value = load_tile(v, cols, S, D, WIDTH)
        exponent = tl.dot(query, tl.trans(key), input_precision="ieee") * scale2 - lse2[:, None]
        dp = tl.dot(grad, tl.trans(value), input_precision="ieee")
        if MASK:
            seen = cols[None, :] < S
            if CAUSAL:
                seen = seen & (cols[None, :] <= sees[:, None])
            exponent = tl.where(seen, exponent, -float("inf"))
        ds = tl.exp2(exponent) * (dp - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    return dq


### END SOLUTION


@triton.jit
def flash_backward_dq_kernel(
    q, k, v, o, do, lse, delta, dq, T, S, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and the row sums that the other pass needs. (Exercise 15.6)

    The grid is (all query heads, tiles of queries); arguments as `flash_forward_kernel`'s, and

    Args:
        o, do: Pointers to the output and its gradient, [heads, T, D].
        lse: Pointer to the natural logsumexp [heads, T].
        delta: Pointer to float32 [heads, T]: each row's sum of o * do is written there.
        dq: Pointer to [heads, T, D]: the gradient is written there.

    Returns:
        Nothing; delta and dq are written, and nothing beside them. Each number is written by one program: no atomics.

    Source: equations (15.6) and (15.7); FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    ### BEGIN SOLUTION
    head = tl.program_id(0).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    rows = start + tl.arange(0, ROWS)
    query = load_tile(q + head * T * D, rows, T, D, WIDTH)
    grad = load_tile(do + head * T * D, rows, T, D, WIDTH)
    out = load_tile(o + head * T * D, rows, T, D, WIDTH)
    sums = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta + head * T + rows, sums, mask=rows < T)
    lse2 = tl.load(lse + head * T + rows, mask=rows < T, other=0.0) * LOG2E
    k, v = k + head // GROUP * S * D, v + head // GROUP * S * D
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = S // COLS * COLS, S
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(start + S - T + 1, 0) // COLS * COLS)
        end = tl.minimum(S, tl.maximum(start + ROWS + S - T, 0))
    sees, scale2 = rows + S - T, scale * LOG2E
    acc = _walk_keys_back(acc, query, grad, lse2, sums, k, v, 0, whole, sees, S, scale2, D, WIDTH, COLS, CAUSAL, False)
    acc = _walk_keys_back(acc, query, grad, lse2, sums, k, v, whole, end, sees, S, scale2, D, WIDTH, COLS, CAUSAL, True)
    store_tile(dq + head * T * D, acc * scale, rows, T, D, WIDTH)
    ### END SOLUTION


### BEGIN SOLUTION
@triton.jit
def _walk_queries(
    dk, dv, key, value, q, do, lse, delta, first, end, cols, T, ahead, scale2,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add what the queries from ``first`` to ``end`` give to the gradients of a tile of keys and values."""
    for start in tl.range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = load_tile(q, rows, T, D, WIDTH)
        grad = load_tile(do, rows, T, D, WIDTH)
        lse2 = tl.load(lse + rows, mask=rows < T, other=0.0) * LOG2E
        sums = tl.load(delta + rows, mask=rows < T, other=0.0)
        exponent = tl.dot(key, tl.trans(query), input_precision="ieee") * scale2 - lse2[None, :]
        dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
        if MASK:
            exponent = tl.where(cols[:, None] <= rows[None, :] + ahead, exponent, -float("inf"))
        weights = tl.exp2(exponent)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        ds = weights * (dp - sums[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


### END SOLUTION


@triton.jit
def flash_backward_dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, T, S, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, over all query heads that share them. (Exercise 15.7)

    The grid is (all heads of keys, tiles of keys); arguments as `flash_forward_kernel`'s, and

    Args:
        do: Pointer to the output's gradient [heads, T, D].
        lse, delta: Pointers to the natural logsumexp and the row sums of o * do, float32 [heads, T].
        dk, dv: Pointers to [heads / GROUP, S, D]: the gradients are written there.

    Returns:
        Nothing; dk and dv are written, and nothing beside them. Each number is written by one program: no atomics. Tiles of
        queries that see none of the keys are not read.

    Source: equations (15.6) and (15.7); FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    ### BEGIN SOLUTION
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * COLS
    cols = start + tl.arange(0, COLS)
    key = load_tile(k + head * S * D, cols, S, D, WIDTH)
    value = load_tile(v + head * S * D, cols, S, D, WIDTH)
    dkey = tl.zeros([COLS, WIDTH], tl.float32)
    dvalue = tl.zeros([COLS, WIDTH], tl.float32)
    first, whole = 0, 0
    if CAUSAL:  # the first query that sees the tile's first key, and the first that sees its last
        first = tl.maximum(start + T - S, 0) // ROWS * ROWS
        whole = tl.minimum(tl.cdiv(tl.maximum(start + COLS - 1 + T - S, 0), ROWS) * ROWS, T)
    for shared in tl.range(0, GROUP):
        at = head * GROUP + shared
        queries, grads, lses, sums = q + at * T * D, do + at * T * D, lse + at * T, delta + at * T
        if CAUSAL:
            dkey, dvalue = _walk_queries(
                dkey, dvalue, key, value, queries, grads, lses, sums, first, whole, cols, T, S - T, scale * LOG2E, D, WIDTH, ROWS, True
            )
        dkey, dvalue = _walk_queries(
            dkey, dvalue, key, value, queries, grads, lses, sums, whole, T, cols, T, S - T, scale * LOG2E, D, WIDTH, ROWS, False
        )
    store_tile(dk + head * S * D, dkey * scale, cols, S, D, WIDTH)
    store_tile(dv + head * S * D, dvalue, cols, S, D, WIDTH)
    ### END SOLUTION


class FlashAttentionTriton(torch.autograd.Function):
    """Attention by the three kernels. (Exercise 15.8)

    Arguments, results and what is saved are `FlashAttentionTorch`'s, for float32, float16 and bfloat16. `launch_forward`,
    `launch_backward_dq` and `launch_backward_dkdv` make the inputs contiguous, choose the tiles and start a kernel.

    Raises:
        ValueError: the shapes or dtypes do not fit (the launches see to it).
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ### BEGIN SOLUTION
        o, lse = launch_forward(flash_forward_kernel, q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o
        ### END SOLUTION

    @staticmethod
    def backward(ctx, do):
        ### BEGIN SOLUTION
        q, k, v, o, lse = ctx.saved_tensors
        dq, delta = launch_backward_dq(flash_backward_dq_kernel, q, k, v, o, do, lse, ctx.is_causal)
        dk, dv = launch_backward_dkdv(flash_backward_dkdv_kernel, q, k, v, do, lse, delta, ctx.is_causal)
        return dq, dk, dv, None
        ### END SOLUTION


def flash_attention(
    q: Float[Tensor, "*lead t d"], k: Float[Tensor, "*lead_kv s d"], v: Float[Tensor, "*lead_kv s d"], is_causal: bool = False
) -> Float[Tensor, "*lead t d"]:
    """Attention by the fastest way that fits. (Exercise 15.9)

    Args:
        q, k, v, is_causal: As `FlashAttentionTorch`'s. Under autocast they are cast to its dtype first.

    Returns:
        The output, in q's dtype (under autocast in its dtype): by `flash_attention_fast` where `fits_fast` says so, by
        `FlashAttentionTriton` on another GPU tensor of 16 or 32 bits and at most 256 features, else by `FlashAttentionTorch`.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    ### BEGIN SOLUTION
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if fits_fast(q, k, v, is_causal):
        return flash_attention_fast(q, k, v, is_causal)
    if q.is_cuda and HAS_TRITON and q.dtype != torch.float64 and q.shape[-1] <= 256:
        return FlashAttentionTriton.apply(q, k, v, is_causal)
    return FlashAttentionTorch.apply(q, k, v, is_causal)
    ### END SOLUTION
