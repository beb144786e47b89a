"""Kernels for a few rows at a time: what a model computes when each of some sequences gets one more token.

With so few rows every product reads its whole weight for little arithmetic, so memory traffic sets the time of a step.
Each launch, and each small tensor that is written only to be read again, adds to it.
A product may come in parts, which the next kernel adds up as it reads them.
"""

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from lib.fast.parts.early import launch_early, wait_for_the_kernel_ahead
from lib.fast.parts.packed import merged, pointers
from lib.given.kernels.mode import tl, triton

TOGETHER = 4  # heads that a program takes at most, as measured on an H200


@triton.jit
def add_norm_kernel(
    x, added, gain, out, n_columns, eps, PARTS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """x += the sum of added [PARTS, n, n_columns], in place, and out is x over its root mean square times gain; a
    program has one row.
    """
    wait_for_the_kernel_ahead(EARLY)
    columns = tl.arange(0, COLS)
    inside, at = columns < n_columns, tl.program_id(0).to(tl.int64) * n_columns + columns
    row = tl.load(x + at, mask=inside, other=0.0)
    if PARTS > 0:
        total = sum_of_parts(added + at, tl.num_programs(0).to(tl.int64) * n_columns, inside, row.dtype, PARTS)
        row = (row.to(tl.float32) + total.to(tl.float32)).to(row.dtype)
        tl.store(x + at, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / n_columns + eps)
    weight = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (weight * (wide * scale)).to(row.dtype), mask=inside)


@triton.jit
def sum_of_parts(at, distance, inside, dtype: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the numbers at ``at`` and at the same places of all further parts, rounded to dtype."""
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * distance, mask=inside, other=0.0)
    return total.to(dtype)


def add_norm(
    x: Float[Tensor, "n c"], added: Float[Tensor, "p n c"] | None, gain: Float[Tensor, " c"], eps: float
) -> Float[Tensor, "n c"]:
    """Add a product in P parts to the residual stream x, in place, and return RMSNorm of the sum."""
    out, parts = torch.empty_like(x), 0 if added is None else len(added)
    add_norm_kernel[(len(x),)](
        x, added, gain, out, x.shape[1], eps, PARTS=parts, COLS=triton.next_power_of_2(x.shape[1]),
        num_warps=16 if parts > 1 else 4, **launch_early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def gate_kernel(x, out, n_columns, PARTS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    """out [n, n_columns] is silu of the first half of each row of x [n, 2 n_columns] times the second half; x is the
    sum of PARTS parts.
    """
    wait_for_the_kernel_ahead(EARLY)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside, at = columns < n_columns, x + 2 * row * n_columns + columns
    dtype: tl.constexpr = out.dtype.element_ty
    distance = tl.num_programs(0).to(tl.int64) * 2 * n_columns
    gate = sum_of_parts(at, distance, inside, dtype, PARTS).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    second = sum_of_parts(at + n_columns, distance, inside, dtype, PARTS).to(tl.float32)
    tl.store(out + row * n_columns + columns, (gate * second).to(dtype), mask=inside)


def gate(x: Float[Tensor, "p n 2f"], dtype: torch.dtype) -> Float[Tensor, "n f"]:
    """``silu(first half) * second half`` of each row of the sum of P parts."""
    (n_parts, n, _), n_columns = x.shape, x.shape[2] // 2
    out = x.new_empty(n, n_columns, dtype=dtype)
    gate_kernel[(n, triton.cdiv(n_columns, 1024))](
        x, out, n_columns, PARTS=n_parts, COLS=1024, **launch_early(x.device)
    )
    return out


@triton.jit
def rotate_and_store_kernel(
    qkv, rope, positions, slots, queries, keys, values, key_scales, value_scales, H, G,
    D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token, and store each in queries, or in its slot if it is a key or a value.

    It is the sum of PARTS parts of qkv.

    If LARGEST is not 0, the copy is in 8 bits, a multiple of its scale: integers up to 127, or float8 up to 448.
    The grid is (tokens, H + 2 G over HEADS).
    """
    wait_for_the_kernel_ahead(EARLY)
    token, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    inside = (pairs < D // 2) & (head < H + 2 * G)
    dtype: tl.constexpr = queries.dtype.element_ty
    at, distance = qkv + (token * (H + 2 * G) + head) * D + 2 * pairs, tl.num_programs(0).to(tl.int64) * (H + 2 * G) * D
    even, odd = (
        sum_of_parts(at, distance, inside, dtype, PARTS), sum_of_parts(at + 1, distance, inside, dtype, PARTS)
    )  # fmt: skip
    angle = rope + (tl.load(positions + token) * (D // 2) + pairs) * 2
    cos, sin = tl.load(angle, mask=pairs < D // 2, other=0.0), tl.load(angle + 1, mask=pairs < D // 2, other=0.0)
    x, y, is_value = even.to(tl.float32), odd.to(tl.float32), head >= H + G
    even, odd = (
        tl.where(is_value, even, (x * cos - y * sin).to(dtype)), tl.where(is_value, odd, (x * sin + y * cos).to(dtype))
    )  # fmt: skip
    to, is_query = queries + (token * H + head) * D + 2 * pairs, inside & (head < H)
    tl.store(to, even, mask=is_query)
    tl.store(to + 1, odd, mask=is_query)
    slot = tl.load(slots + token)
    if slot >= 0:
        is_key, of_values = inside & (head >= H) & (head < H + G), inside & is_value
        if LARGEST > 0.0:  # compiled, `if` takes no float
            wide, other = even.to(tl.float32), odd.to(tl.float32)
            most = tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(other), 1))[:, None]
            scale = tl.where(most == 0.0, 1.0, most / LARGEST)
            tl.store(key_scales + slot * G + head - H, scale, mask=(head >= H) & (head < H + G))
            tl.store(value_scales + slot * G + head - H - G, scale, mask=is_value & (head < H + 2 * G))
            wide, other = wide / scale, other / scale
            if LARGEST == 127:
                wide, other = tl.floor(wide + 0.5), tl.floor(other + 0.5)
        else:
            wide, other = even, odd
        wide, other = wide.to(keys.dtype.element_ty), other.to(keys.dtype.element_ty)
        place = (slot * G + head - H) * D + 2 * pairs
        tl.store(keys + place, wide, mask=is_key)
        tl.store(keys + place + 1, other, mask=is_key)
        tl.store(values + place - G * D, wide, mask=of_values)
        tl.store(values + place - G * D + 1, other, mask=of_values)


def rotate_and_store(
    qkv: Float[Tensor, "p n hggd"], rope: Complex[Tensor, "t half_d"], positions: Int[Tensor, " n"],
    slots: Int[Tensor, " n"], keys: Any, values: Any, dtype: torch.dtype,
) -> Float[Tensor, "n hd"]:  # fmt: skip
    """Rotate queries and keys, write keys and values into a layer's blocks, and return the queries in ``dtype``.

    Args:
        qkv: ``[P, N, (H + 2 G) D]``: each token's queries, keys and values, in parts whose sum they are.
        rope: Chapter 2's table, complex64.
        positions: Each token's position.
        slots: Each token's slot, ``block * block_size`` plus the place in the block; a negative one is not written.
        keys: ``[n_blocks, block_size, G, D]``, a tensor or a ``Packed``.
        values: The same.
        dtype: Of the sum.
    """
    (n_kv_heads, width), (n_parts, n) = keys.shape[2:], qkv.shape[:2]
    (k, k_scales, largest), (v, v_scales, _) = pointers(keys), pointers(values)
    n_heads = qkv.shape[2] // width - 2 * n_kv_heads
    queries = torch.empty(n, n_heads * width, dtype=dtype, device=qkv.device)
    heads = together(n, n_heads + 2 * n_kv_heads)
    rotate_and_store_kernel[(n, triton.cdiv(n_heads + 2 * n_kv_heads, heads))](
        qkv, torch.view_as_real(rope), positions, slots, queries, k, v, k_scales, v_scales, n_heads, n_kv_heads,
        D=width, PAIRS=triton.next_power_of_2(max(1, width // 2)), HEADS=heads, LARGEST=largest, PARTS=n_parts,
        num_warps=min(4, heads),
        **launch_early(qkv.device),
    )  # fmt: skip
    return queries


def together(n: int, n_heads: int) -> int:
    """Heads of a token that one program takes, a power of two: the more, the more tokens there are."""
    return min(TOGETHER, triton.next_power_of_2(n_heads), 1 << max(0, (n * n_heads // 128).bit_length() - 1))


@triton.jit
def merge_kernel(
    o, lse, out, H, D, PARTS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """out [B, H, D] joins the attention o [PARTS, B, H, D] to each part by the parts' logsumexp; the grid is
    (B, H over HEADS).
    """
    wait_for_the_kernel_ahead(EARLY)
    heads, dims, n_rows = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.num_programs(0) * H
    row, n_rows = tl.program_id(0).to(tl.int64) * H + heads, n_rows.to(tl.int64)
    mean = merged(o, lse, row, n_rows, dims, heads < H, D, PARTS)
    at = out + row[:, None] * D + dims[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=(heads < H)[:, None] & (dims < D)[None, :])


def merge(o: Float[Tensor, "p b h d"], lse: Float[Tensor, "p b h"], dtype: torch.dtype) -> Float[Tensor, "b h d"]:
    """Attention to all positions from that to each of P parts, P a power of two; 0 where no part has a position."""
    n_parts, batch, n_heads, width = o.shape
    out = torch.empty(batch, n_heads, width, dtype=dtype, device=o.device)
    heads = together(batch, n_heads)
    merge_kernel[(batch, triton.cdiv(n_heads, heads))](
        o, lse, out, n_heads, width, PARTS=n_parts, WIDTH=triton.next_power_of_2(width), HEADS=heads,
        **launch_early(o.device),
    )  # fmt: skip
    return out


@triton.jit
def embed_kernel(tokens, sampled, weight, out, n_columns, COLS: tl.constexpr, EARLY: tl.constexpr):
    """out [n, n_columns] has the row of weight for each token; a token of -1 - i stands for sampled[i]."""
    wait_for_the_kernel_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.maximum(tl.load(sampled - 1 - token), 0)  # below 0 for a request that has ended
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = columns < n_columns
    values = tl.load(weight + token * n_columns + columns, mask=inside, other=0.0)
    tl.store(out + row * n_columns + columns, values, mask=inside)


def embed(tokens: Int[Tensor, " n"], sampled: Int[Tensor, " m"], weight: Float[Tensor, "v c"]) -> Float[Tensor, "n c"]:
    """Rows of an embedding table; a token of ``-1 - i`` stands for ``sampled[i]``, which only the device knows yet."""
    out = weight.new_empty(len(tokens), weight.shape[1])
    embed_kernel[(len(tokens), triton.cdiv(weight.shape[1], 1024))](
        tokens, sampled, weight, out, weight.shape[1], COLS=1024, **launch_early(weight.device)
    )
    return out
