"""FlashAttention: exact attention in tiles, forward and backward, in PyTorch and in Triton."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.attention.flash import fits_fast, flash_attention_fast
from lib.given.kernels.launch import launch_backward_dkdv, launch_backward_dq, launch_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.tiles import HAS_TRITON, LN2, LOG2E, fold_groups, hide_later, take_tile, tile_slices, tl, triton


def attention_io_bytes(length: int, head_dim: int, sram_bytes: int, algorithm: str) -> int:
    """Bytes that the forward pass of one head moves between the chip and main memory. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        length: Number N of queries, and of keys.
        head_dim: Width d of the head.
        sram_bytes: Size of the on-chip memory, which holds M = sram_bytes // 2 numbers of 2 bytes.
        algorithm: "standard", the paper's Algorithm 0, or "flash", its Algorithm 1 with blocks of ceil(M / 4d) keys.

    Returns:
        Two bytes for each number of equation (15.1) or (15.2).

    Raises:
        ValueError: another algorithm (the message shows it), ``length`` or ``head_dim`` below 1, ``sram_bytes`` below
            2.

    Source: FlashAttention (arXiv:2205.14135), Algorithms 0 and 1, Theorem 2.
    """
    ### BEGIN SOLUTION
    if length < 1 or head_dim < 1 or sram_bytes < 2:
        raise ValueError(f"{length = }, {head_dim = }, {sram_bytes = }: expected at least 1, 1 and 2")
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
    l: Float[Tensor, "*lead r"],
    acc: Float[Tensor, "*lead r d"],
    scores: Float[Tensor, "*lead r c"],
    values: Float[Tensor, "*lead c d"],
) -> tuple[Float[Tensor, "*lead r"], Float[Tensor, "*lead r"], Float[Tensor, "*lead r d"]]:
    """Add one more tile of keys to a softmax that has seen only part of its row. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        m: Largest score of each row so far; -inf before the first tile.
        l: Sum of exp(score - m) so far; 0 before the first tile.
        acc: Sum of exp(score - m) * value so far, not yet divided by l.
        scores: Scaled scores of the new tile; -inf where a key is hidden.
        values: Values of the tile's keys, in any floating-point dtype; cast to that of acc for their product with the
            weights.

    Returns:
        New tensors m, l and acc; the old ones stay unchanged. A row that has seen no key keeps -inf, 0 and 0.

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
    """Output and logsumexp of one tile of queries; ``position`` is the last key that the tile's first query sees."""
    l = q.new_zeros(q.shape[:-1])
    m, acc = torch.full_like(l, -torch.inf), torch.zeros_like(q)
    for tile in tile_slices(k.shape[-2]):
        if position is not None and tile.start > position + q.shape[-2] - 1:
            break
        scores = q @ k[..., tile, :].to(q.dtype).mT
        if position is not None:
            scores = hide_later(scores, position - tile.start)
        m, l, acc = online_softmax_update(m, l, acc, scores, v[..., tile, :])
    return acc / l.masked_fill(l == 0, 1)[..., None], m + torch.log(l)


### END SOLUTION


class FlashAttentionTorch(torch.autograd.Function):
    """Attention in tiles, in PyTorch: ``FlashAttentionTorch.apply(q, k, v, is_causal)``. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        q: Queries [..., T, D].
        k, v: Keys and values [..., S, D]. q may have a multiple of their number of heads.
        is_causal: If true, query t sees the keys up to t + S - T. A row without keys gives zeros.

    ``forward`` saves q, k, v, the output and exactly one more tensor [..., T]: the natural logsumexp of each row's
    scaled scores, in float32 (float64 for float64), -inf for a row without keys.
    It never makes a tensor of a quarter of T x S numbers, keeps sums in float32 at least, even under autocast, makes
    its tensors on the device of q, and skips tiles above the diagonal.
    ``backward`` is given, and calls `flash_backward`: checks of gradients wait for exercise 15.4.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit (`fold_groups` raises it).
        RuntimeError: somebody asks for a second derivative (`first_derivative_only` raises it).

    Source: equations (15.3) and (15.4); FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
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
                out[..., tile, :], lse[..., tile] = _attend_rows(scaled, keys, values, position)
        out, lse, ctx.is_causal = out.reshape(q.shape), lse.reshape(q.shape[:-1]), is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out
        ### END SOLUTION

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return (*flash_backward(q, k, v, o, do, lse, ctx.is_causal), None)


def flash_backward(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    o: Float[Tensor, "*lead t d"],
    do: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    is_causal: bool,
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """Gradients of attention, from tiles of weights that are computed again. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Args:
        q, k, v, is_causal: The inputs of the forward pass; several query heads may share a key/value head.
        o: The output, with any strides.
        do: The gradient of the loss with respect to it, with any strides.
        lse: Natural logsumexp of each row's scaled scores; -inf for a row without keys, whose gradient is 0.

    Returns:
        dq, dk, dv, shaped and typed as q, k, v, on their device; no tensor of a quarter of T x S numbers is made; sums
        in float32 at least, even under autocast.

    Source: equations (15.6) and (15.7); FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    ### BEGIN SOLUTION
    dtype, scale, ahead = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5, k.shape[-2] - q.shape[-2]
    qs, ks, vs = (x.to(dtype) for x in fold_groups(q, k, v))
    dos, lses = do.reshape(qs.shape).to(dtype), lse.reshape(qs.shape[:-1])
    delta = (dos * o.reshape(qs.shape)).sum(-1)
    dq, dk, dv = (dos.new_zeros(x.shape) for x in (qs, ks, vs))
    with torch.autocast(q.device.type, enabled=False):
        for rows in tile_slices(q.shape[-2]):
            query, grad = take_tile(qs, rows) * scale, take_tile(dos, rows)
            for cols in tile_slices(k.shape[-2]):
                if is_causal and cols.start > rows.stop - 1 + ahead:
                    break
                exponent = query @ ks[..., cols, :].mT - lses[..., rows, None]
                p = torch.exp(hide_later(exponent, rows.start + ahead - cols.start) if is_causal else exponent)
                ds = p * (grad @ vs[..., cols, :].mT - delta[..., rows, None])
                take_tile(dv, cols).add_((p.mT @ grad).sum(2, keepdim=True))
                take_tile(dk, cols).add_((ds.mT @ query).sum(2, keepdim=True))
                take_tile(dq, rows).add_(ds @ ks[..., cols, :] * scale)
    return dq.reshape(q.shape).to(q.dtype), dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)
    ### END SOLUTION


@triton.jit
def flash_forward_kernel(q, k, v, o, lse, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                         ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Output and logsumexp of one tile of queries; the grid is (query heads, tiles of queries). (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        q, k, v, o: Pointers to contiguous tensors: q and o [heads, T, D], k and v [heads / GROUP, S, D].
        lse: Pointer to float32 [heads, T]: the natural logsumexp, -inf for a row without keys (whose output is 0).
        T, S, scale: Numbers of queries and of keys, both arbitrary; and the factor of the scores.
        GROUP: Query heads that share a key/value head: head h, counted through all batches, reads the keys of h //
            GROUP.
        D, WIDTH: Width of a head, and the power of two that holds it.
        ROWS, COLS, CAUSAL: Queries and keys in a tile. If CAUSAL, query t sees the keys up to t + S - T.

    Returns:
        Nothing.
        Writes o and lse; touches nothing outside the tensors; skips tiles of keys that none of its queries sees; masks
        no score in tiles that all see.
        Sums in float32; no TF32; weights are cast to v's dtype before their product.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1; equations (15.3) to (15.5).
    """
    ### BEGIN SOLUTION
    head, i = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)  # longest rows first
    rows, dims = i * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = (head * T + rows[:, None]) * D + dims[None, :], (rows[:, None] < T) & (dims[None, :] < D)
    query = tl.load(q + at, mask=inside, other=0.0)
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = S // COLS * COLS, S
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS)
        end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0))
    for masked in tl.static_range(2):  # first the whole tiles, then those on the diagonal and at the ragged end
        for start in tl.range(whole if masked else 0, end if masked else whole, COLS):
            cols = start + tl.arange(0, COLS)
            part = (head // GROUP * S + cols[:, None]) * D + dims[None, :]
            there = (cols[:, None] < S) & (dims[None, :] < D)
            key = tl.load(k + part, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
            if masked:
                seen = cols[None, :] < S
                if CAUSAL:
                    seen = seen & (cols[None, :] <= rows[:, None] + S - T)
                scores = tl.where(seen, scores, -float("inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new) if masked else m_new
            weights, decay = tl.exp2(scores - shift[:, None]), tl.exp2(m - shift)
            value = tl.load(v + part, mask=there, other=0.0)
            l = l * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
            m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(o + at, (acc / l[:, None]).to(o.dtype.element_ty), mask=inside)
    tl.store(lse + head * T + rows, (m + tl.log2(l)) * LN2, mask=rows < T)
    ### END SOLUTION


@triton.jit
def flash_backward_dq_kernel(q, k, v, o, do, lse, delta, dq, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr,
                             WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Gradient of one tile of queries; the grid is (query heads, tiles of queries). (Exercise)

    Size: 50 minutes, difficulty 5, core.

    Args:
        o, do: Pointers to the output and its gradient, [heads, T, D].
        lse: Pointer to the natural logsumexp [heads, T]; -inf for a row without keys, whose gradient is 0.
        delta, dq: Pointers to the results: each row's sum of o * do, float32 [heads, T], and the gradient [heads, T,
            D].

    Returns:
        Nothing.
        Writes delta and dq, each number from one program, without atomics.
        All else is `flash_forward_kernel`'s.
    """
    ### BEGIN SOLUTION
    head, i = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    rows, dims = i * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = (head * T + rows[:, None]) * D + dims[None, :], (rows[:, None] < T) & (dims[None, :] < D)
    query, grad = tl.load(q + at, mask=inside, other=0.0), tl.load(do + at, mask=inside, other=0.0)
    sums = tl.sum(tl.load(o + at, mask=inside, other=0.0).to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta + head * T + rows, sums, mask=rows < T)
    lse2 = tl.load(lse + head * T + rows, mask=rows < T, other=0.0) * LOG2E
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole, end = S // COLS * COLS, S
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS)
        end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0))
    for masked in tl.static_range(2):
        for start in tl.range(whole if masked else 0, end if masked else whole, COLS):
            cols = start + tl.arange(0, COLS)
            part = (head // GROUP * S + cols[:, None]) * D + dims[None, :]
            there = (cols[:, None] < S) & (dims[None, :] < D)
            key, value = tl.load(k + part, mask=there, other=0.0), tl.load(v + part, mask=there, other=0.0)
            exponent = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E) - lse2[:, None]
            dp = tl.dot(grad, tl.trans(value), input_precision="ieee")
            if masked:
                seen = cols[None, :] < S
                if CAUSAL:
                    seen = seen & (cols[None, :] <= rows[:, None] + S - T)
                exponent = tl.where(seen, exponent, -float("inf"))
            ds = tl.exp2(exponent) * (dp - sums[:, None])
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision="ieee")
    tl.store(dq + at, (acc * scale).to(dq.dtype.element_ty), mask=inside)
    ### END SOLUTION


@triton.jit
def flash_backward_dkdv_kernel(q, k, v, do, lse, delta, dk, dv, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr,
                               WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Gradients of one tile of keys and values; the grid is (key/value heads, tiles of keys). (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        do, lse, delta: Pointers to the output's gradient, the natural logsumexp and the row sums of o * do.
        dk, dv: Pointers to the results [heads / GROUP, S, D], summed over the query heads that share the keys.

    Returns:
        Nothing.
        Writes dk and dv, each number from a single program, without atomics.
        Skips tiles of queries that see none of its keys.
        The other arguments, and what holds for sums and products, are those of `flash_forward_kernel`.
    """
    ### BEGIN SOLUTION
    head, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, dims = j * COLS + tl.arange(0, COLS), tl.arange(0, WIDTH)
    at, inside = (head * S + cols[:, None]) * D + dims[None, :], (cols[:, None] < S) & (dims[None, :] < D)
    key, value = tl.load(k + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
    dkey, dvalue = tl.zeros([COLS, WIDTH], tl.float32), tl.zeros([COLS, WIDTH], tl.float32)
    first, whole = 0, 0
    if CAUSAL:  # where the first tile begins that sees one of the keys, and the first that sees all of them
        first = tl.maximum(j * COLS + T - S, 0) // ROWS * ROWS
        whole = tl.minimum(tl.cdiv(tl.maximum(j * COLS + COLS - 1 + T - S, 0), ROWS) * ROWS, T)
    for shared in tl.range(0, GROUP):
        h = head * GROUP + shared
        for masked in tl.static_range(2):
            for start in tl.range(first if masked else whole, whole if masked else T, ROWS):
                rows = start + tl.arange(0, ROWS)
                part = (h * T + rows[:, None]) * D + dims[None, :]
                there = (rows[:, None] < T) & (dims[None, :] < D)
                query = tl.load(q + part, mask=there, other=0.0)
                grad = tl.load(do + part, mask=there, other=0.0)
                lse2 = tl.load(lse + h * T + rows, mask=rows < T, other=0.0) * LOG2E
                sums = tl.load(delta + h * T + rows, mask=rows < T, other=0.0)
                exponent = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2E) - lse2[None, :]
                dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
                if masked:
                    exponent = tl.where(cols[:, None] <= rows[None, :] + S - T, exponent, -float("inf"))
                weights = tl.exp2(exponent)
                dvalue = tl.dot(weights.to(grad.dtype), grad, dvalue, input_precision="ieee")
                ds = weights * (dp - sums[None, :])
                dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    tl.store(dk + at, (dkey * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, dvalue.to(dv.dtype.element_ty), mask=inside)
    ### END SOLUTION


class FlashAttentionTriton(torch.autograd.Function):
    """Attention by the three kernels, as one step of autograd. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Arguments, results, errors and saved tensors are those of `FlashAttentionTorch`, for float32, float16 and bfloat16.
    `launch_forward`, `launch_backward_dq` and `launch_backward_dkdv` choose the tiles and launch a kernel.
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
    @first_derivative_only
    def backward(ctx, do):
        ### BEGIN SOLUTION
        q, k, v, o, lse = ctx.saved_tensors
        dq, delta = launch_backward_dq(flash_backward_dq_kernel, q, k, v, o, do, lse, ctx.is_causal)
        dk, dv = launch_backward_dkdv(flash_backward_dkdv_kernel, q, k, v, do, lse, delta, ctx.is_causal)
        return dq, dk, dv, None
        ### END SOLUTION


def flash_attention(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    is_causal: bool = False,
) -> Float[Tensor, "*lead t d"]:
    """Attention by the fastest implementation that can compute it. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        q, k, v, is_causal: As for `FlashAttentionTorch`.
            Under autocast they are cast to its dtype first, except float64.

    Returns:
        The output of `flash_attention_fast` where `fits_fast` says so; of `FlashAttentionTriton` for other GPU tensors
        of 16 or 32 bits and at most 256 features; else of `FlashAttentionTorch`, whose errors are raised.
    """
    ### BEGIN SOLUTION
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if fits_fast(q, k, v, is_causal):
        return flash_attention_fast(q, k, v, is_causal)
    if q.is_cuda and HAS_TRITON and q.dtype != torch.float64 and q.shape[-1] <= 256:
        return FlashAttentionTriton.apply(q, k, v, is_causal)
    return FlashAttentionTorch.apply(q, k, v, is_causal)
    ### END SOLUTION
