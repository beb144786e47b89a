"""FlashAttention for Hopper: chapter 15's kernels again, with tensor descriptors and tiles chosen by measurement.

Read chapter 15 first: the arithmetic is the same, and the page "Measurements: FlashAttention" says what each difference pays.
Where ``lib.fast.flash_hopper`` has an even faster kernel that the device can run, ``tiles_for`` chooses that one.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lib.fast.flash_hopper import Roles, has_roles, hopper_dkdv, hopper_dq, hopper_forward, launch
from lib.given.kernels.once import NO_SECOND_DERIVATIVE
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, LN2, LOG2E, check_shapes, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How one kernel is cut and compiled."""

    rows: int
    cols: int
    warps: int
    stages: int
    registers: int | None = None
    heads_first: bool = False  # forward and dQ: neighbouring programs compute different heads instead of different rows


# Width, causal: tiles of forward, dQ, dK/dV, found on an H200 by ``lib.bench.flash_tiles``, for kernels without roles.
TABLE: dict[tuple[int, bool], tuple[Tiles, Tiles, Tiles]] = {
    (64, True): (
        Tiles(64, 128, 4, 2, 168, heads_first=True),
        Tiles(128, 64, 4, 4, heads_first=True),
        Tiles(64, 64, 4, 4),
    ),
    (64, False): (Tiles(64, 128, 4, 2), Tiles(128, 64, 4, 4, heads_first=True), Tiles(64, 64, 4, 4)),
    (128, True): (Tiles(64, 64, 4, 3, heads_first=True), Tiles(128, 64, 8, 3, heads_first=True), Tiles(64, 64, 4, 2)),
    (128, False): (Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
}
# The fastest of all where `has_roles`, mostly kernels with roles for their warps.
ROLES_TABLE: dict[tuple[int, bool], tuple[Tiles | Roles, Tiles | Roles, Tiles | Roles]] = {
    (64, True): (Roles(3, 128, 4, heads_first=True), TABLE[64, True][1], Roles(2, 64, 3, registers=True)),
    (64, False): (Roles(3, 128, 2), TABLE[64, False][1], Roles(2, 64, 3, registers=True)),
    (128, True): (Roles(3, 64, 3, heads_first=True), Roles(2, 64, 3, heads_first=True, early=True), Roles(2, 64, 2)),
    (128, False): (Roles(2, 128, 2), Roles(2, 128, 2), Roles(2, 64, 2)),
}
# Queries (keys for dK/dV) in all heads: with fewer, kernels with roles leave multiprocessors idle (lib.bench.flash_short).
ENOUGH_ROWS = (2**16, 2**15, 2**15)


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _keys(acc, l, m, query, k, v, base, first, end, sees, scale2, COLS: tl.constexpr, MASK: tl.constexpr):
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        key = k.load([base + start, 0])
        scores = tl.dot(query, key.T, input_precision="ieee")
        if MASK:
            scores = tl.where(sees[:, None] >= start + tl.arange(0, COLS)[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale2)
        weights = tl.exp2(scores * scale2 - m_new[:, None])  # one multiply-add and one exp2 for each score
        decay = tl.exp2(m - m_new)
        l = l * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        value = v.load([base + start, 0])
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit
def fast_forward_kernel(
    q, k, v, o, lse, T, S, scale2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Like ``flash_forward_kernel``, for whole tiles, with descriptors of [heads * T, D] and [heads / GROUP * S, D]."""
    if HEADS_FIRST:
        head, i = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    else:
        head, i = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    start = i * ROWS
    base = head // GROUP * S
    rows = start + tl.arange(0, ROWS)
    query = q.load([head * T + start, 0])
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if CAUSAL:
        first = start + S - T
        whole = first // COLS * COLS
        acc, l, m = _keys(acc, l, m, query, k, v, base, 0, whole, rows + S - T, scale2, COLS, False)
        acc, l, m = _keys(acc, l, m, query, k, v, base, whole, first + ROWS, rows + S - T, scale2, COLS, True)
    else:
        acc, l, m = _keys(acc, l, m, query, k, v, base, 0, S, rows, scale2, COLS, False)
    o.store([head * T + start, 0], (acc / l[:, None]).to(query.dtype))
    tl.store(lse + head * T + rows, (m + tl.log2(l)) * LN2)


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _keys_back(
    dq, query, grad, lse2, delta, k, v, base, first, end, sees, scale2, COLS: tl.constexpr, MASK: tl.constexpr
):
    for start in tl.range(first, end, COLS):
        start = tl.multiple_of(start, COLS)
        key = k.load([base + start, 0])
        value = v.load([base + start, 0])
        scores = tl.dot(query, key.T, input_precision="ieee")
        dp = tl.dot(grad, value.T, input_precision="ieee")  # started before the softmax waits for the scores
        weights = tl.exp2(scores * scale2 - lse2[:, None])
        if MASK:
            weights = tl.where(sees[:, None] >= start + tl.arange(0, COLS)[None, :], weights, 0.0)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    return dq


@triton.jit
def fast_dq_kernel(
    q, k, v, o, do, dq, lse, stats, T, S, scale2, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Like ``flash_backward_dq_kernel``. Stores stats [2, heads * T] for dK/dV: lse in base 2, and row sums of o * do."""
    if HEADS_FIRST:
        head, i, n_heads = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0)
    else:
        head, i, n_heads = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1)
    start = i * ROWS
    base = head // GROUP * S
    at = head * T + start
    rows = start + tl.arange(0, ROWS)
    query = q.load([at, 0])
    grad = do.load([at, 0])
    out = o.load([at, 0])
    sums = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse2 = tl.load(lse + head * T + rows) * LOG2E
    tl.store(stats + head * T + rows, lse2)
    tl.store(stats + n_heads * T + head * T + rows, sums)
    acc = tl.zeros([ROWS, D], tl.float32)
    if CAUSAL:
        first = start + S - T
        whole = first // COLS * COLS
        sees = rows + S - T
        acc = _keys_back(acc, query, grad, lse2, sums, k, v, base, 0, whole, sees, scale2, COLS, False)
        acc = _keys_back(acc, query, grad, lse2, sums, k, v, base, whole, first + ROWS, sees, scale2, COLS, True)
    else:
        acc = _keys_back(acc, query, grad, lse2, sums, k, v, base, 0, S, rows, scale2, COLS, False)
    dq.store([at, 0], (acc * scale).to(query.dtype))


@triton.jit
def _queries(
    dk, dv, key, value, q, do, stats, base, first, end, cols, ahead, scale2,
    ROWS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, ROWS):
        start = tl.multiple_of(start, ROWS)
        rows = start + tl.arange(0, ROWS)
        query = q.load([base + start, 0])
        grad = do.load([base + start, 0])
        lse2, sums = tl.split(stats.load([0, base + start]).T)
        scores = tl.dot(key, query.T, input_precision="ieee")
        dp = tl.dot(value, grad.T, input_precision="ieee")
        weights = tl.exp2(scores * scale2 - lse2[None, :])
        if MASK:
            weights = tl.where(rows[None, :] + ahead >= cols[:, None], weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        ds = weights * (dp - sums[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def fast_dkdv_kernel(
    q, k, v, do, dk, dv, stats, T, S, scale2, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Like ``flash_backward_dkdv_kernel``."""
    head, start = tl.program_id(1), tl.program_id(0) * COLS
    cols = start + tl.arange(0, COLS)
    key = k.load([head * S + start, 0])
    value = v.load([head * S + start, 0])
    dkey = tl.zeros([COLS, D], tl.float32)
    dvalue = tl.zeros([COLS, D], tl.float32)
    for shared in tl.range(0, GROUP):
        base = (head * GROUP + shared) * T
        if CAUSAL:
            first = tl.maximum(start + T - S, 0) // ROWS * ROWS
            whole = tl.cdiv(tl.maximum(start + COLS + T - S, 0), ROWS) * ROWS
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, base, first, whole, cols, S - T, scale2, ROWS, True
            )
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, base, whole, T, cols, S - T, scale2, ROWS, False
            )
        else:
            dkey, dvalue = _queries(
                dkey, dvalue, key, value, q, do, stats, base, 0, T, cols, S - T, scale2, ROWS, False
            )
    dk.store([head * S + start, 0], (dkey * scale).to(key.dtype))
    dv.store([head * S + start, 0], dvalue.to(key.dtype))


# ---- host ------------------------------------------------------------------------------------------------------------


def fits_fast(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether the fast kernels can compute it: a Hopper GPU, 16 bits, width 64 or 128, whole tiles, no row without keys."""
    if not (HAS_TRITON and q.is_cuda) or INTERPRETED or torch.cuda.get_device_capability(q.device)[0] < 9:
        return False
    lengths = q.shape[-2] % 128 == k.shape[-2] % 128 == 0 and (not is_causal or q.shape[-2] <= k.shape[-2])
    known = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in (64, 128)
    return bool(known and lengths and q.numel() and k.numel())


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and starting at a multiple of 16 bytes, as the copy engine requires."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _describe(x: Tensor, rows: int):
    """A descriptor that copies ``rows`` rows at once."""
    width = x.shape[-1]
    flat = x.view(-1, width) if INTERPRETED else x  # when compiled, only its address matters
    return TensorDescriptor(flat, [x.numel() // width, width], [width, 1], [rows, width])


def tiles_for(q: Tensor, k: Tensor, is_causal: bool) -> tuple[Tiles | Roles, Tiles | Roles, Tiles | Roles]:
    """Tiles of forward, dQ and dK/dV for this device and these sizes; small ones for widths in no table, as in the tests."""
    small = Tiles(32, 32, 4, 2)
    chosen = TABLE.get((q.shape[-1], is_causal), (small, small, small))
    if not has_roles(q) or (q.shape[-1], is_causal) not in ROLES_TABLE:
        return chosen
    rows = q.shape[:-1].numel(), q.shape[:-1].numel(), k.shape[:-1].numel()
    both = zip(chosen, ROLES_TABLE[q.shape[-1], is_causal], rows, ENOUGH_ROWS, strict=True)
    forward, dq, dkdv = (roles if n >= enough else tiles for tiles, roles, n, enough in both)
    return forward, dq, dkdv


def _options(tiles: Tiles) -> dict[str, int]:
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return {} if INTERPRETED else options | ({"maxnreg": tiles.registers} if tiles.registers else {})


def fast_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tiles: Tiles | Roles) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp [..., T]; q, k, v aligned."""
    if isinstance(tiles, Roles):
        return hopper_forward(q, k, v, is_causal, tiles)
    (t, d), s, n_heads = q.shape[-2:], k.shape[-2], math.prod(q.shape[:-2])
    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    grid, group = (n_heads, t // tiles.rows) if tiles.heads_first else (t // tiles.rows, n_heads), check_shapes(q, k, v)
    args = (
        _describe(q, tiles.rows), _describe(k, tiles.cols), _describe(v, tiles.cols), _describe(o, tiles.rows), lse,
        t, s, d**-0.5 * math.log2(math.e), group, d, tiles.rows, tiles.cols, is_causal, tiles.heads_first,
    )  # fmt: skip
    launch(fast_forward_kernel, grid, (tiles, q.dtype, group, d, is_causal), args, **_options(tiles))
    return o, lse


def fast_dq(q, k, v, o, do, lse, is_causal: bool, tiles: Tiles | Roles) -> tuple[Tensor, Tensor]:
    """The gradient of q; and for each row, stats [2, ...]: lse in base 2, and the sum of o * do."""
    if isinstance(tiles, Roles):
        return hopper_dq(q, k, v, o, do, lse, is_causal, tiles)
    (t, d), s, n_heads = q.shape[-2:], k.shape[-2], math.prod(q.shape[:-2])
    dq, stats = torch.empty_like(q), lse.new_empty((2, *lse.shape))
    by_rows, by_cols = ([_describe(x, n) for x in xs] for n, xs in ((tiles.rows, (q, o, do, dq)), (tiles.cols, (k, v))))
    grid, group = (n_heads, t // tiles.rows) if tiles.heads_first else (t // tiles.rows, n_heads), check_shapes(q, k, v)
    args = (
        by_rows[0], *by_cols, *by_rows[1:], lse, stats, t, s, d**-0.5 * math.log2(math.e), d**-0.5,
        group, d, tiles.rows, tiles.cols, is_causal, tiles.heads_first,
    )  # fmt: skip
    launch(fast_dq_kernel, grid, (tiles, q.dtype, group, d, is_causal), args, **_options(tiles))
    return dq, stats


def fast_dkdv(q, k, v, do, stats, is_causal: bool, tiles: Tiles | Roles) -> tuple[Tensor, Tensor]:
    """The gradients of k and v; stats are those that `fast_dq` returns."""
    if isinstance(tiles, Roles):
        return hopper_dkdv(q, k, v, do, stats, is_causal, tiles)
    (t, d), s, n_heads, n_rows = q.shape[-2:], k.shape[-2], math.prod(k.shape[:-2]), math.prod(q.shape[:-1])
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    queries, grads = _describe(q, tiles.rows), _describe(do, tiles.rows)
    by_cols = [_describe(x, tiles.cols) for x in (k, v, dk, dv)]
    pairs = TensorDescriptor(stats, [2, n_rows], [n_rows, 1], [2, tiles.rows])
    group = check_shapes(q, k, v)
    args = (
        queries, *by_cols[:2], grads, *by_cols[2:], pairs, t, s, d**-0.5 * math.log2(math.e), d**-0.5,
        group, d, tiles.rows, tiles.cols, is_causal,
    )  # fmt: skip
    launch(fast_dkdv_kernel, (s // tiles.cols, n_heads), (tiles, q.dtype, group, d, is_causal), args, **_options(tiles))
    return dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (_aligned(x) for x in (q, k, v))
    return fast_forward(q, k, v, is_causal, tiles_for(q, k, is_causal)[0])


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, do, lse = (_aligned(x) for x in (q, k, v, o, do, lse))
    _, for_dq, for_dkdv = tiles_for(q, k, is_causal)
    dq, stats = fast_dq(q, k, v, o, do, lse, is_causal, for_dq)
    return dq, *fast_dkdv(q, k, v, do, stats, is_causal, for_dkdv)


# Registered as operators, so that torch.compile treats each as one step and does not look inside.
forward_operator = torch.library.custom_op("workbook::flash_forward", mutates_args=())(_forward)
backward_operator = torch.library.custom_op("workbook::flash_backward", mutates_args=())(_backward)


@forward_operator.register_fake
def _(q, k, v, is_causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@backward_operator.register_fake
def _(q, k, v, o, do, lse, is_causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _refuse(ctx, *grads):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


backward_operator.register_autograd(_refuse)


def _save(ctx, inputs, output):
    q, k, v, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, do, _):
    return *backward_operator(*ctx.saved_tensors[:4], do, ctx.saved_tensors[4], ctx.is_causal), None


forward_operator.register_autograd(_differentiate, setup_context=_save)


class Eager(torch.autograd.Function):
    """The same without operators: PyTorch's dispatcher takes longer for these than a short kernel runs."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        o, lse = _forward(q, k, v, is_causal)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        # With create_graph use the operator, which raises on a second derivative; a plain launch would silently lack terms.
        compute = backward_operator if torch.is_grad_enabled() else _backward
        return *compute(q, k, v, o, do, lse, ctx.is_causal), None


def _looked_at(*xs: Tensor) -> bool:
    """Whether somebody watches operators: a dispatch mode, or tensors of another kind, such as fake ones without memory."""
    return _get_current_dispatch_mode() is not None or any(type(x) is not Tensor for x in xs)


def flash_attention_fast(
    q: Float[Tensor, "*lead t d"], k: Float[Tensor, "*lead_kv s d"], v: Float[Tensor, "*lead_kv s d"], is_causal=False
) -> Float[Tensor, "*lead t d"]:
    """Attention where `fits_fast`, with gradients.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    check_shapes(q, k, v)
    if torch.compiler.is_compiling() or _looked_at(q, k, v):
        return forward_operator(q, k, v, is_causal)[0]
    return Eager.apply(q, k, v, is_causal)
