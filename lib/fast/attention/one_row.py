"""Attention of a single new token: its query and key are rotated in the kernel that attends.

With one row, no other row of the step writes a key that it reads. So all older keys and values can be read before the
kernel ahead has ended, and a kernel that only rotates and stores is not needed.
"""

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from lib.fast.parts.early import launch_early, wait_for_the_kernel_ahead
from lib.fast.parts.packed import pointers, store_mean
from lib.given.kernels.mode import tl, triton


@triton.jit
def rotated(at, dims, inside, cos, sin):
    """Numbers at ``at + dims``, each pair of them rotated."""
    own, other = tl.load(at + dims, mask=inside, other=0.0), tl.load(at + (dims ^ 1), mask=inside, other=0.0)
    turned = own.to(tl.float32) * cos + tl.where(dims % 2 == 0, -sin, sin) * other.to(tl.float32)
    return turned.to(own.dtype)


@triton.jit
def in_eight_bits(x, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """A head in 8 bits, and its scale; as `lib.fast.parts.rows.rotate_and_store_kernel` stores it."""
    wide = x.to(tl.float32)
    most = tl.max(tl.abs(wide), 0)
    scale = tl.where(most == 0.0, 1.0, most / LARGEST)
    wide = wide / scale
    if LARGEST == 127:
        wide = tl.floor(wide + 0.5)
    return wide.to(dtype), scale


@triton.jit
def tile_of_cache(
    keys, values, key_scales, value_scales, tables, tile, g, G, old, dims,
    SIZE: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Keys and values of COLS positions, of which those below ``old`` are read, and their scales, perhaps 1."""
    cols = tile * COLS + tl.arange(0, COLS)
    head = (tl.load(tables + cols // SIZE, mask=cols < old, other=0) * SIZE + cols % SIZE) * G + g
    where, there = head[:, None] * D + dims[None, :], (cols < old)[:, None] & (dims < D)[None, :]
    key, value = tl.load(keys + where, mask=there, other=0.0), tl.load(values + where, mask=there, other=0.0)
    key_scale, value_scale = tl.full([COLS], 1.0, tl.float32), tl.full([COLS], 1.0, tl.float32)
    if SCALED:
        key_scale = tl.load(key_scales + head, mask=cols < old, other=0.0)
        value_scale = tl.load(value_scales + head, mask=cols < old, other=0.0)
    return key, value, key_scale, value_scale


@triton.jit
def one_row_attention_kernel(
    qkv, rope, slots, keys, values, key_scales, value_scales, tables, lengths, o, lse, arrived, out, scale, H, G,
    SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token that share a key head, and its key; attend to one part of the positions; store
    key and value, if the part has the last position.

    Arguments as of `lib.fast.parts.rows.rotate_and_store_kernel` and of
    `lib.fast.parts.packed.block_attention_kernel`. The grid is (key heads, PARTS).
    """
    g, part = tl.program_id(0), tl.program_id(1)
    rows, dims, length, slot = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.load(lengths), tl.load(slots)
    n_tiles, last, is_dim = tl.cdiv(length, COLS), length - 1, dims < D
    begin, end = part * n_tiles // PARTS, (part + 1) * n_tiles // PARTS
    dtype: tl.constexpr = qkv.dtype.element_ty
    stored: tl.constexpr = keys.dtype.element_ty
    key, value, key_scale, value_scale = tile_of_cache(
        keys, values, key_scales, value_scales, tables, begin, g, G, tl.where(begin < end, last, 0), dims,
        SIZE, D, COLS, LARGEST > 0.0,
    )  # fmt: skip
    angle = rope + (tl.maximum(last, 0) * (D // 2) + dims // 2) * 2
    cos, sin = tl.load(angle, mask=is_dim, other=0.0), tl.load(angle + 1, mask=is_dim, other=0.0)
    wait_for_the_kernel_ahead(EARLY)
    own_key = rotated(qkv + (H + g) * D, dims, is_dim, cos, sin)
    own_value = tl.load(qkv + (H + G + g) * D + dims, mask=is_dim, other=0.0)
    own_key_scale, own_value_scale = 1.0, 1.0
    if LARGEST > 0.0:
        key_in, own_key_scale = in_eight_bits(own_key, LARGEST, stored)
        value_in, own_value_scale = in_eight_bits(own_value, LARGEST, stored)
    else:
        key_in, value_in = own_key, own_value
    if (slot >= 0) & (begin < end) & (end == n_tiles):
        to = (slot * G + g) * D + dims
        tl.store(keys + to, key_in, mask=is_dim)
        tl.store(values + to, value_in, mask=is_dim)
        if LARGEST > 0.0:
            tl.store(key_scales + slot * G + g, own_key_scale)
            tl.store(value_scales + slot * G + g, own_value_scale)
    is_query = (rows < GROUP)[:, None] & is_dim[None, :]
    at = qkv + (g * GROUP + rows)[:, None] * D
    query = rotated(at, dims[None, :], is_query, cos[None, :], sin[None, :])
    m, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in range(begin, end):
        cols = tile * COLS + tl.arange(0, COLS)
        is_own = cols == last
        key_here = tl.where(is_own[:, None], key_in.to(dtype)[None, :], key.to(dtype))
        value_here = tl.where(is_own[:, None], value_in.to(dtype)[None, :], value.to(dtype))
        factor = scale * tl.where(is_own, own_key_scale, key_scale)
        weight = tl.where(is_own, own_value_scale, value_scale)
        key, value, key_scale, value_scale = tile_of_cache(
            keys, values, key_scales, value_scales, tables, tile + 1, g, G, tl.where(tile + 1 < end, last, 0), dims,
            SIZE, D, COLS, LARGEST > 0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key_here), input_precision="ieee") * factor[None, :]
        scores = tl.where(cols[None, :] < length, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights, decay = tl.exp(scores - m_new[:, None]), tl.exp(m - m_new)
        total = total * decay + tl.sum(weights, 1)
        weights = (weights * weight[None, :]).to(dtype)
        acc = tl.dot(weights, value_here, acc * decay[:, None], input_precision="ieee")
        m = m_new
    total, row = tl.where(total == 0.0, 1.0, total), g * GROUP + rows
    mean, own_lse = acc / total[:, None], m + tl.log(total)
    store_mean(mean, own_lse, o, lse, arrived + g, out, row, H, part, dims, rows < GROUP, D, PARTS)


def one_row_attention(
    qkv: Float[Tensor, "1 hggd"], rope: Complex[Tensor, "t half_d"], slots: Int[Tensor, " 1"], keys: Any, values: Any,
    tables: Int[Tensor, "b m"], lengths: Int[Tensor, " 1"], arrived: Int[Tensor, "1 g"], n_parts: int, columns: int,
) -> Float[Tensor, "1 h d"]:  # fmt: skip
    """Attention of one token to its sequence and itself; its key and value are written into a layer's blocks.

    Args:
        qkv: ``[1, (H + 2 G) D]``: queries, key and value, before they are rotated.
        rope: Chapter 2's table, complex64.
        slots: The token's slot; a negative one is not written.
        keys: ``[n_blocks, block_size, G, D]``, a tensor or a ``Packed``.
        values: The same.
        tables: The blocks of the sequence, in the first row.
        lengths: Its positions, the new one counted.
        arrived: int32, zeros before and after.
        n_parts: Parts of the positions, a power of two.
        columns: Positions that a program reads at a time.
    """
    (_, size, n_kv_heads, width) = keys.shape
    (k, k_scales, largest), (v, v_scales, _) = pointers(keys), pointers(values)
    n_heads = qkv.shape[1] // width - 2 * n_kv_heads
    group = n_heads // n_kv_heads
    o = torch.empty(n_parts, n_heads, width, dtype=torch.float32, device=qkv.device)
    lse, out = torch.empty_like(o[..., 0]), qkv.new_empty(1, n_heads, width)
    one_row_attention_kernel[(n_kv_heads, n_parts)](
        qkv, torch.view_as_real(rope), slots, k, v, k_scales, v_scales, tables, lengths, o, lse, arrived, out,
        width**-0.5, n_heads, n_kv_heads, SIZE=size, GROUP=group, D=width, WIDTH=triton.next_power_of_2(width),
        ROWS=max(16, triton.next_power_of_2(group)), COLS=columns, LARGEST=largest, PARTS=n_parts, num_warps=4,
        num_stages=1, **launch_early(qkv.device),
    )  # fmt: skip
    return out
