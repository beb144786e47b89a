"""Measure chapter 23: prefill in tiles, and decoding with each kind of cache, beside what was predicted.

Run ``python -m lib.bench.attention_variants`` on a machine with one GPU (about five minutes); it writes
``chapters/measurements/attention_variants.json`` after each part. ``--device cpu --tiny`` tries it out.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.attention import KVCache
from lib.attention_variants import (
    CausalAttention,
    LatentCache,
    MultiHeadLatentAttention,
    RollingKVCache,
    cache_bytes,
    flash_window_forward,
    variant_flops,
)
from lib.bench.kit import device_seconds, in_turns, record, spread
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser

Way = tuple[Callable[[], Any], SimpleNamespace, bool]
"""What is timed, the configuration of its layers, and whether latents are absorbed."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Layers of about eight billion parameters' model, and of DeepSeek's kind."""

    dim: int = 4096
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128
    window: int = 4096
    rank: int = 512
    rope: int = 64
    prefill: int = 32_768
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 131_072)
    batches: tuple[int, ...] = (1, 32)
    n_rounds: int = 20


TINY = Sizes(
    dim=64, n_heads=4, n_kv_heads=2, head_dim=16, window=16, rank=24, rope=8, prefill=128, lengths=(32, 64), n_rounds=2
)


def config_of(sizes: Sizes, *kinds: str) -> SimpleNamespace:
    """What `cache_bytes` and `variant_flops` read."""
    s = sizes
    heads = {"n_heads": s.n_heads, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim, "sliding_window": s.window}
    latent = {"kv_lora_rank": s.rank, "qk_rope_head_dim": s.rope, "qk_nope_head_dim": s.head_dim}
    return SimpleNamespace(layer_types=list(kinds), v_head_dim=s.head_dim, **heads, **latent)


# ---- prefill ---------------------------------------------------------------------------------------------------------


@cache
def flex(n: int, window: int, device: str) -> Callable[..., Tensor]:
    """Compiled FlexAttention, causal with a window."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(b, h, q, k):
        return (q >= k) & (q - k < window)

    mask = create_block_mask(sees, None, None, n, n, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def prefill(sizes: Sizes, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds of the forward products of one layer over a whole prompt, by each way."""
    s, n = sizes, sizes.prefill
    q, k, v = (torch.randn(1, h, n, s.head_dim, device=device, dtype=dtype) for h in (s.n_heads, *[s.n_kv_heads] * 2))
    key, value = (
        torch.randn(1, s.n_heads, n, d, device=device, dtype=dtype) for d in (s.head_dim + s.rope, s.head_dim)
    )
    wide = torch.randn(1, s.n_heads, n, s.head_dim + s.rope, device=device, dtype=dtype)
    latents, up = (
        torch.randn(n, s.rank, device=device, dtype=dtype),
        torch.randn(s.rank, 2 * s.n_heads * s.head_dim, device=device, dtype=dtype),
    )
    full, window, latent = (config_of(s, f"{kind}_attention") for kind in ("full", "sliding", "latent"))
    ways: dict[str, Way] = {
        "full": (lambda: flash_window_forward(q, k, v), full, False),
        "window": (lambda: flash_window_forward(q, k, v, s.window), window, False),
        "latent, expanded": (lambda: (latents @ up, flash_window_forward(wide, key, value)), latent, False),
    }
    if device == "cuda":
        ways["full, compiled FlexAttention"] = (lambda: flex(n, n, device)(q, k, v), full, False)
        ways["window, compiled FlexAttention"] = (lambda: flex(n, s.window, device)(q, k, v), window, False)
        ways["full, cuDNN"] = (lambda: _cudnn(q, k, v), full, False)
        ways |= _flash_attn(q, k, v, s.window, full, window)
    return {name: row | {"positions": n} for name, row in timed(ways, n, n, 1, s.n_rounds, device).items()}


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, window: int, full, windowed) -> dict[str, Way]:
    """The package flash-attn, where it is installed; its window leaves the query out."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return {}
    qs, ks, vs = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    left = (window - 1, 0)
    return {
        "full, flash-attn": (lambda: flash_attn_func(qs, ks, vs, causal=True), full, False),
        "window, flash-attn": (lambda: flash_attn_func(qs, ks, vs, causal=True, window_size=left), windowed, False),
    }


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode(sizes: Sizes, device: str, dtype: torch.dtype, batch: int, length: int) -> dict[str, Any]:
    """Time of one token after ``length - 1`` others, and bytes of cache: one layer, or six of a hybrid, by each way."""
    s, found = sizes, dict[str, Any]()
    makers = {
        "full": ways_of(s, ["full_attention"]),
        "window": ways_of(s, ["sliding_attention"]),
        "five windows to one full": ways_of(s, ["sliding_attention"] * 5 + ["full_attention"]),
        "latent, expanded": ways_of(s, ["latent_attention"]),
        "latent, absorbed": ways_of(s, ["latent_attention"], absorb=True),
    }
    for name, make in makers.items():
        try:
            way, held = make(device, dtype, batch, length)
            found |= timed({name: way}, 1, length, batch, s.n_rounds, device)
            found[name] |= {"layers": len(way[1].layer_types), "cache_bytes": held}
            found[name]["predicted_cache_bytes"] = cache_bytes(way[1], batch, length, dtype.itemsize)
        except torch.OutOfMemoryError:
            found[name] = {"out_of_memory": True}
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def ways_of(sizes: Sizes, kinds: list[str], absorb: bool = False) -> Callable[..., tuple[Way, int]]:
    """Makes the layers with full caches, and returns what is timed and the bytes that the caches hold."""

    def make(device: str, dtype: torch.dtype, batch: int, length: int) -> tuple[Way, int]:
        s, layers, caches = sizes, [], list[Any]()
        for kind in kinds:
            layer, memory = _latent(s, batch, length) if kind == "latent_attention" else _plain(s, kind, batch, length)
            layers.append(layer.to(device, dtype))
            caches.append(memory(dtype=dtype, device=device))
        x = torch.randn(batch, 1, s.dim, device=device, dtype=dtype)
        width = s.rope if kinds[0] == "latent_attention" else s.head_dim
        rope = torch.ones(1, width // 2, device=device, dtype=torch.complex64)
        tensors = [t for c in caches for t in vars(c).values() if isinstance(t, Tensor)]
        for t in tensors:
            t.normal_()

        def step() -> None:
            for layer, memory in zip(layers, caches, strict=True):
                memory.length = length - 1
                layer(x, rope, memory, **({"absorb": absorb} if absorb else {}))

        return (step, config_of(s, *kinds), absorb), sum(t.nbytes for t in tensors)

    return make


def _plain(s: Sizes, kind: str, batch: int, length: int):
    window = s.window if kind == "sliding_attention" else None
    layer = CausalAttention(s.dim, s.n_heads, s.n_kv_heads, s.head_dim, window=window, qk_norm="head")
    if window is None:
        return layer, lambda **where: KVCache(batch, s.n_kv_heads, length, s.head_dim, **where)
    return layer, lambda **where: RollingKVCache(batch, s.n_kv_heads, min(window, length), s.head_dim, **where)


def _latent(s: Sizes, batch: int, length: int):
    layer = MultiHeadLatentAttention(s.dim, s.n_heads, s.rank, s.head_dim, s.rope, s.head_dim)
    return layer, lambda **where: LatentCache(batch, length, s.rank, s.rope, **where)


# ---- both ------------------------------------------------------------------------------------------------------------


def timed(ways: dict[str, Way], n_queries: int, n_keys: int, batch: int, n_rounds: int, device: str) -> dict[str, Any]:
    """Seconds of each way, and the FLOPs that `variant_flops` predicts for its products."""
    with torch.no_grad():
        times = in_turns(
            {name: way[0] for name, way in ways.items()}, lambda run: device_seconds(run, device), n_rounds
        )
    return {
        name: {"seconds": spread(times[name]), "flops": batch * variant_flops(c, n_queries, n_keys, absorb)}
        for name, (_, c, absorb) in ways.items()
    }


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program out")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args()
    sizes, dtype = TINY if options.tiny else Sizes(), torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "tiny": options.tiny,
        "sizes": vars(sizes),
        "prefill": prefill(sizes, options.device, dtype),
    }
    record("attention_variants", results, options.folder)
    results["decode"] = {}
    for batch in sizes.batches:
        for length in sizes.lengths:
            results["decode"][f"{batch} x {length}"] = decode(sizes, options.device, dtype, batch, length)
            record("attention_variants", results, options.folder)


if __name__ == "__main__":
    main()
