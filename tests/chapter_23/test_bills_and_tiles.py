"""The bills of the variants, packed rows, and attention in tiles with a window."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lib.given.kernels.exact import LargestTensor, guarded, guards_of
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.kernels.window import launch_window
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_14.memory import watched
from tests.chapter_23.oracles import attend, visible
from tests.devices import Devices
from tests.inputs import randn

variants = graded("attention_variants")
pytestmark = pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds

BYTES, FLOPS, LATENT_FLOPS, PACKED, TILE = (f"eq-attention_variants-{n}" for n in (11, 12, 13, 14, 15))
RAISES, RETURNS, COST = (f"the contract, under {part}" for part in ("Raises", "Returns", "Cost"))
CONTRACT = "the contract"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
FULL, SLIDING, LATENT = "full_attention", "sliding_attention", "latent_attention"
CONFIG = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 5, "sliding_window": 4}
LATENT_CONFIG = {"n_heads": 6, "kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "v_head_dim": 3}


def config(*kinds: str, **changes) -> SimpleNamespace:
    """A configuration that has what its kinds of layers need, and nothing else."""
    fields = (LATENT_CONFIG if LATENT in kinds else {}) | (CONFIG if {FULL, SLIDING} & set(kinds) else {}) | changes
    if SLIDING not in kinds:
        fields.pop("sliding_window", None)
    return SimpleNamespace(layer_types=list(kinds), **fields)


# ---- hybrid_layer_types ----------------------------------------------------------------------------------------------


def test_hybrid_layer_types_by_hand():
    case("7 layers, interval 3")
    expected = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    expect_equal(variants.hybrid_layer_types(7, 3), expected, read=CONTRACT)
    case("4 layers, interval 2, other 'linear_attention'")
    expected = ["linear_attention", FULL] * 2
    expect_equal(variants.hybrid_layer_types(4, 2, "linear_attention"), expected, read=CONTRACT)
    case("3 layers, interval 1; and no layer")
    expect_equal(variants.hybrid_layer_types(3, 1), [FULL] * 3, read=CONTRACT)
    expect_equal(variants.hybrid_layer_types(0, 2), [], read=CONTRACT)


@pytest.mark.parametrize("interval", [0, -2])
def test_hybrid_layer_types_refuses(interval):
    case(f"4 layers, interval {interval}")
    with expect_raises(ValueError, str(interval), read=RAISES):
        variants.hybrid_layer_types(4, interval)


@oracle
@pytest.mark.parametrize(
    ("name", "interval"), [("Gemma2Config", 2), ("GptOssConfig", 2), ("Olmo3Config", 4), ("Gemma3TextConfig", 6)]
)
def test_hybrid_layer_types_of_transformers(name, interval):
    import transformers

    case(f"13 layers of {name}")
    theirs = getattr(transformers, name)(num_hidden_layers=13).layer_types
    expect_equal(variants.hybrid_layer_types(13, interval), list(theirs), read=CONTRACT)


# ---- cache_bytes -----------------------------------------------------------------------------------------------------


def test_cache_bytes_by_hand():
    for kinds, length, values in (
        ((FULL,), 10, 2 * 2 * 5 * 10),
        ((SLIDING,), 10, 2 * 2 * 5 * 4),
        ((SLIDING,), 3, 2 * 2 * 5 * 3),
        ((LATENT,), 10, (7 + 2) * 10),
        ((SLIDING, SLIDING, FULL, LATENT), 10, 2 * 2 * 5 * (4 + 4 + 10) + 9 * 10),
        ((), 10, 0),
    ):
        case(f"layers {list(kinds)}, G=2 D=5 window=4 r=7 rope=2, batch 1, length {length}")
        found = variants.cache_bytes(config(*kinds), 1, length)
        expect_equal(found, 2 * values, read=BYTES)
        expect_equal(type(found).__name__, "int", name="type of out", answer=found, read=BYTES)
    case("layers [full], batch 6, length 10, 1 byte a value")
    expect_equal(variants.cache_bytes(config(FULL), 6, 10, 1), 6 * 200, read=BYTES)


def test_cache_bytes_of_real_models():
    case("DeepSeek-V3, 61 latent layers, one sequence of 131,072 positions, bfloat16")
    latent = SimpleNamespace(layer_types=[LATENT] * 61, kv_lora_rank=512, qk_rope_head_dim=64)
    expect_equal(variants.cache_bytes(latent, 1, 131_072), 61 * 576 * 131_072 * 2, read=BYTES)
    case("Gemma 3 27B, 62 layers, every sixth full, window 1024, G=16 D=128, one sequence of 131,072 positions")
    kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(62)]
    gemma = SimpleNamespace(layer_types=kinds, n_kv_heads=16, head_dim=128, sliding_window=1024)
    expect_equal(variants.cache_bytes(gemma, 1, 131_072), 2 * 16 * 128 * (10 * 131_072 + 52 * 1024) * 2, read=BYTES)


def test_cache_bytes_refuses():
    case("layers [full, linear_attention]")
    with expect_raises(ValueError, "linear_attention", read=RAISES):
        variants.cache_bytes(config(FULL, "linear_attention"), 1, 10)


# ---- variant_flops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "s"), [(1, 9), (9, 9), (3, 9), (9, 3), (6, 2), (0, 5), (5, 0)])
def test_variant_flops_counts_pairs(t, s):
    for kind, window in ((LATENT, None), (FULL, None), (SLIDING, 4)):
        pairs = int(visible(t, s, window).sum())
        sizes = {LATENT: "r=7 nope=5 rope=2 v=3", FULL: "D=5", SLIDING: "D=5 window=4"}[kind]
        for absorb in (False, True):
            case(f"one layer of {kind}, H=6 {sizes}, T={t} S={s}, absorb={absorb}: {pairs} pairs")
            up = (t if absorb else s) * 7 * (5 + 3)
            each = 2 * 7 + 2 if absorb else 5 + 2 + 3
            expected = 2 * 6 * (pairs * each + up) if kind == LATENT else 4 * 6 * 5 * pairs
            found = variants.variant_flops(config(kind), t, s, absorb)
            expect_equal(found, expected, read=LATENT_FLOPS if kind == LATENT else FLOPS)
            expect_equal(type(found).__name__, "int", name="type of out", answer=found, read=FLOPS)


def test_variant_flops_sums_layers():
    case("layers [sliding, sliding, full, latent], T=5 S=8, window 4, not absorbed and absorbed")
    c = config(SLIDING, SLIDING, FULL, LATENT)
    near, far = (int(visible(5, 8, w).sum()) for w in (4, None))
    plain = 4 * 6 * 5 * (2 * near + far)
    expect_equal(variants.variant_flops(c, 5, 8), plain + 12 * (far * 10 + 8 * 7 * 8), read=FLOPS)
    expect_equal(variants.variant_flops(c, 5, 8, absorb=True), plain + 12 * (far * 16 + 5 * 7 * 8), read=LATENT_FLOPS)


def test_variant_flops_builds_no_mask():
    case("40 sliding layers, T=S=131,072, window 4,096: no tensor is made")
    c = config(*[SLIDING] * 40, sliding_window=4096)
    with LargestTensor() as largest:
        found = variants.variant_flops(c, 131_072, 131_072)
    pairs = 4096 * 4097 // 2 + (131_072 - 4096) * 4096
    expect_equal(found, 40 * 4 * 6 * 5 * pairs, read=FLOPS)
    expect_true(
        largest.numbers <= 131_072, f"a tensor of {largest.numbers} numbers was made", answer=found, read=CONTRACT
    )


def test_variant_flops_refuses():
    case("layers [full, linear_attention]")
    with expect_raises(ValueError, "linear_attention", read=RAISES):
        variants.variant_flops(config(FULL, "linear_attention"), 2, 3)


# ---- packed rows -----------------------------------------------------------------------------------------------------

ENDS = [[0, 4, 6, 13], [0, 1, 2, 3], [0, 5], [0, 0, 3, 3, 8, 8], [0]]
BAD_ENDS = [[1, 4, 13], [0, 6, 4, 13]]


def ends_of(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def same_document(ends: list[int], window: int | None = None) -> Tensor:
    """The mask of a packed row, document by document."""
    mask = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for start, end in pairwise(ends):
        mask[start:end, start:end] = visible(end - start, end - start, window)
    return mask


@pytest.mark.parametrize("ends", ENDS)
def test_packed_positions_by_hand(ends):
    case(f"cu_seqlens {ends}")
    expected = torch.tensor([i for start, end in pairwise(ends) for i in range(end - start)], dtype=torch.int64)
    expect_close(variants.packed_positions(ends_of(ends)), expected, read=PACKED)


def test_packed_positions_on_the_device_of_the_ends():
    case("cu_seqlens [0, 4, 6, 13] on another device than the CPU")
    with Devices() as devices:
        out = variants.packed_positions(ends_of([0, 4, 6, 13]).to("meta"))
        there = out in devices.on_meta
    expect_true(there and not devices.mixed, "the positions are not on that device", answer=out, read=RETURNS)


@pytest.mark.parametrize("ends", BAD_ENDS)
def test_packed_positions_refuses(ends):
    case(f"cu_seqlens {ends}")
    with expect_raises(ValueError, str(ends), read=RAISES):
        variants.packed_positions(ends_of(ends))


@pytest.mark.parametrize("ends", ENDS)
def test_document_mask_by_hand(ends):
    for window in (None, 1, 2, 4):
        case(f"cu_seqlens {ends}, window {window}")
        expect_close(variants.document_mask(ends_of(ends), window), same_document(ends, window), read=PACKED)


@pytest.mark.parametrize("ends", BAD_ENDS)
def test_document_mask_refuses(ends):
    case(f"cu_seqlens {ends}")
    with expect_raises(ValueError, str(ends), read=RAISES):
        variants.document_mask(ends_of(ends))
    case("cu_seqlens [0, 2, 4], window 0")
    with expect_raises(ValueError, "0", read=RAISES):
        variants.document_mask(ends_of([0, 2, 4]), 0)


def packed(t: int, h=4, g=2, d=8, dv=6) -> tuple[Tensor, Tensor, Tensor]:
    return randn(t, h, d), randn(t, g, d, seed=1), randn(t, g, dv, seed=2)


def as_batch(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1)[None] for x in tensors]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, 0.9), (1, None)])
def test_varlen_attention_equals_a_mask(ends, window, scale):
    case(f"h=4 g=2 d=8 dv=6, cu_seqlens {ends}, window {window}, scale {scale}")
    q, k, v = packed(ends[-1])
    expected = attend(*as_batch(q, k, v), seen=same_document(ends, window), scale=scale)[0].transpose(0, 1).float()
    expect_close(variants.varlen_attention(q, k, v, ends_of(ends), window, scale), expected, atol=1e-5, read=PACKED)


def test_varlen_attention_passes_gradients_back():
    case("cu_seqlens [0, 4, 4, 13], window 3: gradients of q, k and v")
    ends = [0, 4, 4, 13]
    narrow = [x.requires_grad_() for x in packed(13)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    incoming = randn(13, 4, 6, seed=5)
    out = variants.varlen_attention(*narrow, ends_of(ends), 3)
    out.backward(incoming)
    attend(*as_batch(*wide), seen=same_document(ends, 3))[0].transpose(0, 1).backward(incoming.double())
    expect_close([x.grad for x in narrow], [x.grad.float() for x in wide], atol=1e-4, name="grads", read=PACKED)


@pytest.mark.parametrize("ends", [[0, 4, 12], [0, 14], *BAD_ENDS])
def test_varlen_attention_refuses(ends):
    case(f"13 tokens, cu_seqlens {ends}")
    with expect_raises(ValueError, str(ends), read=RAISES):
        variants.varlen_attention(*packed(13), ends_of(ends))
    case("13 tokens, cu_seqlens [0, 4, 13], window 0")
    with expect_raises(ValueError, "0", read=RAISES):
        variants.varlen_attention(*packed(13), ends_of([0, 4, 13]), 0)


@pytest.mark.parametrize("ends", [[0, 256], [0, 128, 256], [0, 60, 61, 200, 256]])
def test_varlen_attention_costs_its_documents(ends):
    q, k, v = packed(256, 4, 2, 8, 8)
    case(f"256 tokens, h=4 d=8, cu_seqlens {ends}: FLOPs and the largest tensor")
    with FlopCounterMode(display=False) as counter:
        out = variants.varlen_attention(q, k, v, ends_of(ends))
    flops, most = counter.get_total_flops(), sum(4 * 4 * 8 * (end - start) ** 2 for start, end in pairwise(ends))
    problem = f"{flops} FLOPs, where the documents alone take {most}: documents are multiplied with one another"
    expect_true(flops <= most, problem, answer=out, read=COST)
    with LargestTensor() as largest:
        variants.varlen_attention(q, k, v, ends_of(ends))
    problem = f"a tensor of {largest.numbers} numbers was made, a quarter of T * T is {256 * 64}"
    expect_true(largest.numbers < 256 * 64, problem, answer=out, read=COST)


# ---- flash_window_forward --------------------------------------------------------------------------------------------

TILES = [  # b, h, g, t, s, d, dv, window, rows, cols: ragged, a chunk after a cache, T > S, one query, wide window
    (2, 4, 2, 13, 13, 8, 6, None, 4, 4),
    (1, 4, 2, 13, 13, 8, 8, 3, 4, 5),
    (1, 2, 1, 6, 17, 8, 8, 5, 4, 3),
    (1, 3, 3, 9, 4, 8, 8, 2, 3, 3),
    (1, 4, 1, 1, 20, 8, 8, 6, 64, 4),
    (1, 2, 2, 20, 20, 8, 8, 1, 8, 8),
    (1, 2, 2, 8, 8, 8, 8, 100, 3, 2),
    (1, 2, 1, 5, 0, 8, 8, 2, 4, 4),
]


def tile_case(b, h, g, t, s, d, dv, window, rows, cols, with_sinks, dtype=torch.float32):
    sinks = "sinks" if with_sinks else "no sinks"
    case(f"b={b} h={h} g={g} t={t} s={s} d={d} dv={dv}, window {window}, tiles of {rows} x {cols}, {sinks}, {dtype}")
    q, k, v = (randn(*shape, seed=i) for i, shape in enumerate(((b, h, t, d), (b, g, s, d), (b, g, s, dv))))
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.linspace(-1.0, 2.0, h) if with_sinks else None


def exact_window(q, k, v, window, sinks) -> tuple[Tensor, Tensor]:
    """Output and logsumexp in float64."""
    seen = visible(q.shape[2], k.shape[2], window)
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q.double() @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else torch.full(q.shape[:3], -math.inf).double()
    return attend(q, k, v, seen, sinks=sinks), lse


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sizes", TILES)
def test_flash_window_forward_is_attention(sizes, with_sinks):
    q, k, v, sinks = tile_case(*sizes, with_sinks=with_sinks)
    window, rows, cols = sizes[-3:]
    o, lse = variants.flash_window_forward(q, k, v, window, sinks, rows, cols)
    expected = exact_window(q, k, v, window, sinks)
    answer = (o, lse)
    expect_close(o, expected[0].float(), atol=1e-5, name="o", answer=answer, read=RETURNS)
    expect_close(lse, expected[1].float(), atol=1e-5, name="lse", answer=answer, read=RETURNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_flash_window_forward_dtypes(dtype):
    q, k, v, sinks = tile_case(1, 2, 1, 30, 40, 16, 8, 12, 8, 8, True, dtype)
    found = variants.flash_window_forward(q, k, v, 12, sinks.to(dtype), 8, 8)
    o, lse = exact_window(q, k, v, 12, sinks.to(dtype))
    wide = torch.promote_types(dtype, torch.float32)
    atol = 1e-12 if dtype == torch.float64 else 0.01
    expect_close(found[0], o.to(dtype), atol=atol, rtol=atol, name="o", answer=found, read=RETURNS)
    expect_close(found[1], lse.to(wide), atol=min(atol, 1e-4), rtol=1e-4, name="lse", answer=found, read=RETURNS)


def test_flash_window_forward_of_large_scores():
    case("b=1 h=1 t=s=9, window 4, scores of several thousand")
    q, k, v = 1000 * randn(1, 1, 9, 4), randn(1, 1, 9, 4, seed=1), randn(1, 1, 9, 4, seed=2)
    found = variants.flash_window_forward(q, k, v, 4, torch.tensor([5.0]), 4, 4)
    expected = [x.float() for x in exact_window(q, k, v, 4, torch.tensor([5.0]))]
    expect_close(list(found), expected, atol=1e-4, rtol=1e-5, name="o and lse", read=RETURNS)


@pytest.mark.parametrize(
    ("t", "s", "window", "rows", "cols"),
    [(50, 50, None, 16, 16), (50, 50, 9, 16, 8), (50, 50, 17, 16, 16),
     (33, 70, 12, 8, 16), (40, 25, 6, 16, 4), (16, 64, 1, 8, 8)],
)  # fmt: skip
def test_flash_window_forward_visits_no_other_tile(t, s, window, rows, cols):
    case(
        f"b=1 h=2 t={t} s={s} d=4 dv=6, window {window}, tiles of {rows} x {cols}: "
        "FLOPs of the tiles with a visible pair"
    )
    q, k, v = randn(1, 2, t, 4), randn(1, 1, s, 4, seed=1), randn(1, 1, s, 6, seed=2)
    with FlopCounterMode(display=False) as counter:
        found = variants.flash_window_forward(q, k, v, window, None, rows, cols)
    seen = visible(t, s, window)
    tiles = [seen[i : i + rows, j : j + cols] for i in range(0, t, rows) for j in range(0, s, cols)]
    expected = sum(2 * 2 * x.numel() * (4 + 6) for x in tiles if x.any())
    expect_equal(counter.get_total_flops(), expected, name="FLOPs", answer=found, read=TILE)


def test_flash_window_forward_keeps_tiles_only():
    case("b=1 h=2 t=s=256, window 100, tiles of 32: the largest tensor")
    q, k, v = randn(1, 2, 256, 8), randn(1, 1, 256, 8, seed=1), randn(1, 1, 256, 8, seed=2)
    with LargestTensor() as largest:
        found = variants.flash_window_forward(q, k, v, 100, None, 32, 32)
    problem = f"a tensor of {largest.numbers} numbers was made, a quarter of T * S is {256 * 64}"
    expect_true(largest.numbers < 256 * 64, problem, answer=found, read=COST)


# ---- flash_window_kernel ---------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
KERNEL = [  # b, h, g, t, s, d, dv, window, rows, cols
    (1, 2, 1, 40, 40, 16, 16, 9, 16, 16),
    (2, 4, 2, 21, 37, 24, 8, 11, 16, 32),
    (1, 2, 2, 45, 30, 16, 16, None, 32, 16),
    (1, 3, 1, 20, 5, 8, 16, 3, 16, 16),
    (1, 2, 1, 5, 0, 16, 16, 2, 16, 16),
]
OUTSIDE = "the contract: nothing outside the tensors is read or written"


def launched(*args, **kwargs):
    with watched(OUTSIDE) as seen:
        out = launch_window(variants.flash_window_kernel, *args, **kwargs)
    return out, seen


@needs_triton
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sizes", KERNEL)
def test_flash_window_kernel_is_attention(sizes, with_sinks):
    q, k, v, sinks = (None if x is None else x.to(DEVICE) for x in tile_case(*sizes, with_sinks=with_sinks))
    window, rows, cols = sizes[-3:]
    (o, lse), seen = launched(q, k, v, window, sinks, rows=rows, cols=cols)
    expected = exact_window(q.cpu(), k.cpu(), v.cpu(), window, None if sinks is None else sinks.cpu())
    expect_close(o.cpu(), expected[0].float(), atol=1e-5, name="o", answer=(o, lse), read=RETURNS)
    expect_close(lse.cpu(), expected[1].float(), atol=1e-5, name="lse", answer=(o, lse), read=RETURNS)
    asked = sorted({p.lower() for kind, p in seen.dots if kind == "fp32"} - {"ieee"}) if seen else []
    problem = f"tl.dot of float32 tiles runs with input_precision {', '.join(asked)} on a GPU: expected 'ieee'"
    expect_true(not asked, problem, answer=(o, lse), read=RETURNS)


@needs_triton
def test_flash_window_kernel_of_float16():
    q, k, v, sinks = (x.to(DEVICE) for x in tile_case(1, 2, 1, 30, 45, 16, 16, 12, 16, 16, True, torch.float16))
    (o, lse), seen = launched(q, k, v, 12, sinks, rows=16, cols=16)
    expected = exact_window(q.cpu(), k.cpu(), v.cpu(), 12, sinks.cpu())
    expect_close(o.cpu(), expected[0].half(), atol=4e-3, rtol=4e-3, name="o", answer=(o, lse), read=RETURNS)
    expect_close(lse.cpu(), expected[1].float(), atol=1e-3, name="lse", answer=(o, lse), read=RETURNS)
    wide = [left for left, _ in seen.dots if left == "fp32"] if seen else []
    problem = f"{len(wide)} of {len(seen.dots) if seen else 0} products have factors in float32, where v is float16"
    expect_true(not wide, problem, answer=(o, lse), read=RETURNS)


@needs_triton
def test_flash_window_kernel_stays_inside():
    q, k, v, _ = (x if x is None else x.to(DEVICE) for x in tile_case(1, 2, 1, 37, 41, 20, 20, 10, 16, 16, False))
    o, lse = guarded((1, 2, 37, 20), torch.float32, DEVICE), guarded((1, 2, 37), torch.float32, DEVICE)
    launched(q, k, v, 10, None, rows=16, cols=16, o=o, lse=lse)
    for name, x in (("o", o), ("lse", lse)):
        kept = bool((guards_of(x) == -7).all())
        expect_true(kept, f"numbers before or after {name} were overwritten: a store lacks its mask", answer=(o, lse))


@needs_triton
def test_flash_window_kernel_reads_no_other_tile():
    case("t=48 s=96, window 20, tiles of 16 x 16: how often each tile of keys is read")
    q, k, v = (randn(1, 1, n, 16, seed=i).to(DEVICE) for i, n in enumerate((48, 96, 96)))
    (o, _), seen = launched(q, k, v, 20, None, rows=16, cols=16)
    expect_close(o.cpu(), exact_window(q.cpu(), k.cpu(), v.cpu(), 20, None)[0].float(), atol=1e-5, read=RETURNS)
    mask = visible(48, 96, 20)
    expected = [sum(bool(mask[i : i + 16, j : j + 16].any()) for i in range(0, 48, 16)) for j in range(0, 96, 16)]
    for name, x in (("keys", k), ("values", v)) if seen else ():
        reads = seen.count(x, stores=False)[0, 0, ::16, 0].tolist()
        expect_equal(reads, expected, name=f"how often each tile of {name} is read", read=TILE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_window_kernel_is_what_a_gpu_runs(dtype):
    q, k, v, sinks = (x.cuda() for x in tile_case(2, 8, 2, 300, 700, 64, 64, 129, 64, 64, True, dtype))
    found = variants.flash_window_forward(q, k, v, 129, sinks)
    expected = exact_window(q.cpu(), k.cpu(), v.cpu(), 129, sinks.cpu())
    atol = 1e-4 if dtype == torch.float32 else 0.02
    expect_close(found[0].cpu(), expected[0].to(dtype), atol=atol, rtol=atol, name="o", answer=found, read=RETURNS)
    expect_close(found[1].cpu(), expected[1].float(), atol=atol, name="lse", answer=found, read=RETURNS)
