"""DeepSeek's absorbed attention: all query heads read one latent a position, as their key and as their value.

Read chapter 23's ``MultiHeadLatentAttention`` first. With ``absorb``, a query is 576 wide in DeepSeek's models: 512
that meet the latent, and 64 that meet the rotated key. The mean of latents is 512 wide. A tile of latents is read once
for both products. Rows are the tokens of the first head, then those of the second, and so on; a program computes 64.

Few queries (decoding) leave multiprocessors idle: their keys are split among programs, and the parts are joined.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.attention.flash import Plan, _allocate, _contiguous, _copied, _planned, _statistics
from lib.fast.attention.flash_portable import _tile
from lib.fast.launch import LENGTHS, Address, Box, Launch, n_programs
from lib.fast.parts.rows import merge
from lib.given.kernels.tiles import INTERPRETED, LN2, tl, triton

ROWS, COLS = (16, 16) if INTERPRETED else (64, 64)  # queries (heads times tokens) and positions in a tile
WARPS, STAGES = 8, 2
LEAST_PART = 128  # positions that a program reads at least, if the others are split among programs
RANKS = (128, 256, 512)


@triton.jit
def _positions(
    acc, total, m, query, turned, latents, keys, b, first, end, sees, scale2,
    COLS: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for at in tl.range(first, end, COLS):
        latent = _tile(latents, 0, b, at, COLS, R)
        scores = tl.dot(query, latent.T, input_precision="ieee")
        scores = tl.dot(turned, _tile(keys, 0, b, at, COLS, ROPE).T, scores, input_precision="ieee")
        if MASK:
            scores = tl.where(sees[:, None] >= at + tl.arange(0, COLS)[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale2)
        shift = m_new
        if MASK:
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no position yet
        weights = tl.exp2(scores * scale2 - shift[:, None])
        decay = tl.exp2(m - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        m = m_new
    return acc, total, m


@triton.jit(do_not_specialize=(*LENGTHS, "n_rows", "each"))
def latent_kernel(
    q, turned, latents, keys, o, lse, n_rows, T, S, each, scale2,
    ROWS: tl.constexpr, COLS: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The mean of latents and the logsumexp over ``each`` positions, for ROWS rows; o and lse have the parts of all
    positions one after the other along their first axis.
    """
    b, part, start = tl.program_id(1), tl.program_id(2), tl.program_id(0) * ROWS
    to = part * tl.num_programs(1) + b
    row = start + tl.arange(0, ROWS)
    query, rotated = _tile(q, 0, b, start, ROWS, R), _tile(turned, 0, b, start, ROWS, ROPE)
    sees = tl.zeros_like(row) + S - 1
    if CAUSAL:
        sees = tl.minimum(row, n_rows - 1) % T + S - T
    first = part * each
    end = tl.minimum(tl.max(sees) + 1, first + each)
    whole = tl.minimum(tl.maximum((tl.min(sees) + 1) // COLS * COLS, first), first + each)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    acc, total, m = _positions(
        acc, total, m, query, rotated, latents, keys, b, first, whole, sees, scale2, COLS, R, ROPE, False
    )
    acc, total, m = _positions(
        acc, total, m, query, rotated, latents, keys, b, whole, end, sees, scale2, COLS, R, ROPE, True
    )
    tl.store(lse + to.to(tl.int64) * n_rows + row, (m + tl.log2(total)) * LN2, mask=row < n_rows)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    o.store([0, to, start, 0], out.to(o.dtype).reshape(1, 1, ROWS, R))


def n_parts(n_rows: int, n_positions: int, n_programs_at_once: int) -> int:
    """Among how many programs, a power of two, the positions of each row are split, for rows of so many programs."""
    most = max(1, min(n_programs_at_once // n_rows, n_positions // LEAST_PART))
    return 2 ** (most.bit_length() - 1)


def _plan(xs: tuple[Tensor, ...], t: int, is_causal: bool, scale: float, n: int | None) -> Plan:
    q, turned, latents, _ = xs
    (b, n_rows, r), rope, s = q.shape, turned.shape[-1], latents.shape[-2]
    blocks = triton.cdiv(n_rows, ROWS)
    parts = n or n_parts(blocks * b, s, 1 if INTERPRETED else n_programs(q.device))
    rows, cols = (1, 1, ROWS, r), (1, 1, COLS, r)
    args = (
        Box(0, rows), Box(1, (1, 1, ROWS, rope)), Box(2, cols), Box(3, (1, 1, COLS, rope)), Box(4, rows), Address(5),
        n_rows, t, s, triton.cdiv(s, parts * COLS) * COLS, scale * math.log2(math.e), ROWS, COLS, r, rope, is_causal,
    )  # fmt: skip
    options: dict[str, Any] = {} if INTERPRETED else {"num_warps": WARPS, "num_stages": STAGES}
    shape = parts * b, n_rows, r
    o = _allocate(shape, _contiguous(shape), q.dtype, q.device)
    launch = Launch(latent_kernel, (blocks, b, parts), args, **options)
    return Plan(_copied(xs), (o, _statistics(q, *shape[:-1])), launch, {})


def _check(q: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, is_causal: bool) -> None:
    wanted = (*q.shape[:-1], turned.shape[-1]), (q.shape[0], latents.shape[1], q.shape[-1])
    fits = q.ndim == 4 and latents.ndim == 3 and turned.shape == wanted[0] and latents.shape == wanted[1]
    if not fits or keys.shape != (*latents.shape[:-1], turned.shape[-1]):
        shapes = [tuple(x.shape) for x in (q, turned, latents, keys)]
        raise ValueError(f"shapes {shapes}, expected [B, H, T, r], [B, H, T, rope], [B, S, r], [B, S, rope]")
    if is_causal and q.shape[2] > latents.shape[1]:
        raise ValueError(f"{q.shape[2]} queries, {latents.shape[1]} positions: expected at most one query a position")
    if not INTERPRETED and (q.shape[-1] not in RANKS or turned.shape[-1] != 64):
        raise ValueError(f"a latent {q.shape[-1]} wide, a key {turned.shape[-1]}: expected {RANKS} and 64")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, turned, latents, keys)):
        raise ValueError("absorbed attention has no backward pass here: expected torch.no_grad(), or keys and values")


def latent_attention(
    q: Float[Tensor, "b h t r"],
    turned: Float[Tensor, "b h t rope"],
    latents: Float[Tensor, "b s r"],
    keys: Float[Tensor, "b s rope"],
    is_causal: bool = True,
    *,
    scale: float,
    n_parts: int | None = None,
) -> Float[Tensor, "b h t r"]:
    """Each query's weighted mean of latents, without a gradient.

    Needs a Hopper GPU and 16 bits, a latent 128, 256 or 512 wide and a rotated key 64 wide; or Triton's interpreter.

    Args:
        q: Queries in the space of latents, chapter 23's ``q @ up_keys``.
        turned: The rotated part of the queries.
        latents: One a position.
        keys: The rotated keys, one a position.
        is_causal: Whether a query sees no position after its own; the last query is at the last position.
        scale: Factor of the scores ``q @ latents.mT + turned @ keys.mT``.
        n_parts: Among how many programs the positions are split, a power of two; as many as keep the GPU busy if None.

    Raises:
        ValueError: the shapes do not fit, or a gradient is wanted; the message says which.
    """
    _check(q, turned, latents, keys, is_causal)
    (b, h, t, _), xs = q.shape, (q.flatten(1, 2), turned.flatten(1, 2), latents, keys)
    o, lse = _planned(_plan, xs, t, is_causal, scale, n_parts).run(xs)
    if len(o) > b:
        with torch.cuda.device_of(q):
            o = merge(o.unflatten(0, (-1, b)), lse.unflatten(0, (-1, b)), q.dtype)
    return o.unflatten(1, (h, t))
