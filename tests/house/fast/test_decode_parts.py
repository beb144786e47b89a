"""The kernels of a captured step, each beside the plain operations that it replaces."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from lib.fast.attention.one_row import one_row_attention
from lib.fast.attention.paged import ROWS, Tiles, cut, prompt_attention
from lib.fast.parts import narrow as parts
from lib.fast.parts import one_row_hopper
from lib.fast.parts.narrow import dense
from lib.fast.parts.one_row import one_row
from lib.fast.parts.packed import FORMATS, Packed, pack
from lib.fast.parts.rows import add_norm, embed, gate, merge, rotate_and_store
from lib.fast.parts.sample import NOT_FINITE, sample_rows
from lib.given.kernels.mode import HAS_TRITON, NO_TRITON
from lib.given.models.serving import Progress, Request
from lib.llama import RMSNorm, sample_next
from lib.rope import apply_rope, precompute_rope
from lib.runs.serving.quantized import narrow
from tests.house.fast.comparing import check_one_row, close, normal, on_both

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)


@on_both
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["wide", "int4", "float8"])
def test_a_product_of_one_row(device, kind, large, monkeypatch):
    """With rows of the weight that no tile divides, and with the tiles of a large weight, too."""
    if large:
        monkeypatch.setattr(parts, "LARGE", 1)
        monkeypatch.setattr(parts, "LONG_ROW", 1)
    for width in (48, 300) if kind == "wide" else (96, 320):
        x, wide = normal(1, width, device=device), normal(10, width, device=device, seed=1)
        weight = wide if kind == "wide" else narrow(wide, kind)
        assert parts.is_large(weight) == large
        norm: Any = RMSNorm(width, 1e-3).to(device)
        norm.weight.data.copy_(1 + normal(width, device=device, seed=2))
        check_one_row(x, weight, wide if kind == "wide" else dense(weight, torch.float32), norm)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "width"), [(10, 384), (4102, 4480)])
def test_a_row_times_a_large_weight_of_levels_on_tensor_cores(n, width, monkeypatch):
    """With columns and groups that no tile divides: alone, behind a norm, gated, and added to a stream."""
    monkeypatch.setattr(parts, "LARGE", 10)
    monkeypatch.setattr(parts, "LONG_ROW", 384)
    x, gain, stream = (normal(1, k, device="cuda", seed=s).bfloat16() for s, k in enumerate((width, width, n)))
    weight = narrow(normal(n, width, device="cuda", seed=3), "int4")
    if not one_row_hopper.fits(x, weight):
        pytest.skip("a GPU without these kernels")
    wide, gain = dense(weight, torch.float32), gain[0]
    product = linear(x.float(), wide)
    normed = linear(rms_norm(x.float(), [width], gain.float(), 1e-3), wide)
    gated = silu(normed[:, : n // 2]) * normed[:, n // 2 :]
    bound = product.abs().max().item() / 2**7  # x times its gain is rounded, as are gate, product and sum
    close(one_row(x, weight).float(), product, bound, 2**-7)
    close(one_row(x, weight, gain, 1e-3).float(), normed, bound, 2**-7)
    close(one_row(x, weight, gain, 1e-3, gated=True).float(), gated, bound * normed.abs().max().item(), 2**-6)
    expected = stream.float() + product
    close(one_row(x, weight, into=stream).float(), expected, bound, 2**-7)


def test_tensor_cores_take_large_weights_of_levels_in_bfloat16(monkeypatch):
    monkeypatch.setattr(one_row_hopper, "has_roles", lambda x: True)
    x = torch.empty(1, parts.LONG_ROW, dtype=torch.bfloat16, device="meta")
    numbers = torch.empty(parts.LARGE, parts.LONG_ROW // 2, dtype=torch.uint8, device="meta")
    large, small, fine = (
        parts.Narrow(levels, scales, scales.byte())
        for levels, scales in (
            (numbers, numbers[:, :32].float()), (numbers[1:], numbers[1:, :32].float()),
            (numbers, numbers[:, :64].float()),
        )
    )  # fmt: skip
    assert one_row_hopper.fits(x, large)
    assert not any(one_row_hopper.fits(*pair) for pair in ((x.half(), large), (x, small), (x, fine)))


@on_both
def test_sums_norms_gates_and_rows_of_a_table(device):
    x, added = normal(3, 20, device=device), normal(2, 3, 20, device=device, seed=1)
    norm: Any = RMSNorm(20).to(device)
    gain = norm.weight.data.copy_(1 + normal(20, device=device, seed=2))
    close(add_norm(x.clone(), None, gain, norm.eps), norm(x))
    stream = x.clone()
    close(add_norm(stream, added, gain, norm.eps), norm(x + added.sum(0)))
    close(stream, x + added.sum(0))
    close(gate(added, torch.float32), silu(added.sum(0)[:, :10]) * added.sum(0)[:, 10:])
    known = torch.tensor([7, 2], device=device)
    table, tokens = normal(9, 12, device=device), torch.tensor([4, -1, -2, 0], device=device)
    assert torch.equal(embed(tokens, known, table), table[[4, 7, 2, 0]])


@on_both
def test_heads_are_rotated_and_stored(device):
    n_heads, n_kv_heads, width = 4, 2, 8
    qkv, rope = normal(3, (n_heads + 2 * n_kv_heads) * width, device=device), precompute_rope(width, 11, device=device)
    keys, values = torch.zeros(2, 3, 4, n_kv_heads, width, device=device)
    positions, slots = torch.tensor([5, 0, 10], device=device), torch.tensor([7, -1, 2], device=device)
    heads = qkv.view(3, -1, width)
    turned = torch.cat(
        [apply_rope(row[None, None, :6], rope[p : p + 1])[0] for row, p in zip(heads, positions, strict=True)]
    )
    parts = torch.stack([qkv - 1, torch.ones_like(qkv)])
    queries = rotate_and_store(parts, rope, positions, slots, keys, values, torch.float32)
    close(queries.view(3, -1, width), turned[:, :4])
    for pool, expected in ((keys, turned[:, 4:]), (values, heads[:, 6:])):
        close(pool.flatten(0, 1)[[7, 2]], expected[[0, 2]])
        assert pool.count_nonzero() == 2 * n_kv_heads * width  # a slot below 0 is not written


@on_both
def test_parts_of_an_attention_are_merged(device):
    o, lse = normal(4, 2, 3, 8, device=device), normal(4, 2, 3, device=device, seed=1)
    lse[2:, 0] = -math.inf
    lse[:, 1, 1] = -math.inf
    o[2:, 0] = math.nan  # a part without positions is not read
    expected = (lse.softmax(0)[..., None] * o).nan_to_num(0).sum(0)
    expected[1, 1] = 0
    close(merge(o, lse, torch.float32), expected)


@on_both
def test_prompts_attend_to_their_blocks(device):
    """Two sequences in blocks of any order; the second has three positions in the cache before its new tokens."""
    n_heads, n_kv_heads, width, size, starts, sizes = 4, 2, 16, 4, [0, 3], [9, 2]
    tables = [[5, 0, 3], [1, 4]]
    keys, values = normal(2, 6, size, n_kv_heads, width, device=device)
    qkv = normal(sum(sizes), (n_heads + 2 * n_kv_heads) * width, device=device, seed=1)
    blocks = torch.tensor([table + [0] * (3 - len(table)) for table in tables], device=device)
    most = ROWS // (n_heads // n_kv_heads)
    cuts = zip(cut(starts, sizes, most), (0, 0, 0, -1), strict=True)  # and a tile that is padding
    fields = [torch.tensor([*field, padding], device=device) for field, padding in cuts]
    queries = qkv[:, : n_heads * width].contiguous()
    found, row = prompt_attention(queries, keys, values, Tiles(blocks, *fields)), 0
    for start, n, table in zip(starts, sizes, tables, strict=True):
        q = qkv[row : row + n].view(n, -1, width)[:, :n_heads].transpose(0, 1)
        k, v = (pool[table].flatten(0, 1)[: start + n].transpose(0, 1) for pool in (keys, values))
        mask = torch.ones(n, start + n, dtype=torch.bool, device=device).tril(start)
        expected = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)
        close(found[row : row + n], expected, atol=1e-4)
        row += n


@on_both
@pytest.mark.parametrize("kind", [None, "int8", "float8"])
def test_one_row_is_rotated_and_stored_where_it_attends(device, kind):
    """The last of 21 positions, in blocks of any order, in one part and in parts of which some are empty."""
    n_heads, n_kv_heads, width, size, n = 4, 2, 16, 4, 21
    wide, qkv = normal(2, 7, size, n_kv_heads, width, device=device), normal(1, 8 * width, device=device, seed=1)
    rope, table = precompute_rope(width, 32, device=device), torch.tensor([[5, 0, 3, 1, 4, 6, 2, 0]], device=device)
    slots, length = torch.tensor([6 * size], device=device), torch.tensor([n], device=device)
    arrived = torch.zeros(1, n_kv_heads, dtype=torch.int32, device=device)
    for n_parts in (1, 4):
        pools: list[Any] = [wide.clone(), wide.clone()]
        if kind:
            pools = [Packed(*pack(x, FORMATS[kind][0]), torch.float32) for x in pools]
        (keys, values), (keys_too, values_too) = ((pool[0], pool[1]) for pool in pools)
        found = one_row_attention(qkv, rope, slots, keys, values, table, length, arrived, n_parts, columns=16)
        q = rotate_and_store(qkv[None], rope, length - 1, slots, keys_too, values_too, torch.float32)
        where = torch.arange(7, device=device)
        whole = [(pool[where] if kind else pool)[table[0]].flatten(0, 1)[:n] for pool in (keys, values)]
        again = [(pool[where] if kind else pool)[table[0]].flatten(0, 1)[:n] for pool in (keys_too, values_too)]
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
        k, v = (x.transpose(0, 1) for x in whole)
        expected = scaled_dot_product_attention(q.view(n_heads, 1, width), k, v, enable_gqa=True)
        close(found[0], expected[:, 0], atol=1e-5)
        assert not arrived.any()  # ready for the next call


@on_both
def test_rows_are_sampled_as_one_at_a_time(device):
    logits = 3 * normal(8, 50, device=device)
    settings = [(0.0, None, None), (1.0, None, None), (0.7, 5, None), (1.3, None, 0.6), (0.9, 7, 0.8), (1.0, 99, 1.0)]
    made = [Request([1], 1, t, i, top_k=k, top_p=p) for i, (t, k, p) in enumerate(settings)]
    alone = [sample_next(row[None], **Progress(r).sampling(row.device)) for row, r in zip(logits, made, strict=False)]
    logits[6, 3], logits[7, 0] = math.inf, math.nan
    found = sample_rows(logits, [*map(Progress, made), None, None])
    assert found.tolist() == [*map(int, alone), NOT_FINITE, NOT_FINITE]
