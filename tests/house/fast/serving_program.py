"""Compile the kernels of a serving step for a Hopper GPU, on whatever machine this is.

Triton's interpreter takes Python that its compiler refuses.
"""

from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lib.fast.attention.one_row import one_row_attention_kernel
from lib.fast.attention.paged import prompt_attention_kernel
from lib.fast.attention.paged_variants import store_kernel, variant_attention_kernel
from lib.fast.parts.narrow import few_rows_kernel, widen_kernel
from lib.fast.parts.one_row import one_int4_row_kernel, one_row_kernel
from lib.fast.parts.packed import block_attention_kernel
from lib.fast.parts.rows import rotate_and_store_kernel

B16, F32, I32, I64, WHOLE = "*bf16", "*fp32", "*i32", "*i64", "i32"
CACHES = {"*bf16": 0.0, "*i8": 127.0, "*fp8e4nv": 448.0}
SIZES = {"H": WHOLE, "G": WHOLE, "M": WHOLE, "Q": WHOLE, "scale": "fp32"}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile a kernel whose parameters have these types or constant values."""
    constants = {"EARLY": True} | constants
    known = dict.fromkeys(constants, "constexpr") | SIZES | types
    signature = {param.name: known[param.name] for param in kernel.params}
    places = {(i,): constants[p.name] for i, p in enumerate(kernel.params) if p.name in constants}
    compile_kernel(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))


for cache, largest in CACHES.items():
    pools = {"keys": cache, "values": cache}
    pools |= dict.fromkeys(("key_scales", "value_scales"), F32 if largest else cache)
    stored = {"qkv": F32, "queries": B16, "rope": F32, "positions": I64, "slots": I64, **pools}
    build(rotate_and_store_kernel, stored, {"D": 64, "PAIRS": 32, "HEADS": 4, "LARGEST": largest, "PARTS": 4})
    sizes = {"SIZE": 16, "GROUP": 2, "D": 64, "WIDTH": 64, "COLS": 32}
    tiles = dict.fromkeys(("tables", "sequences", "rows", "positions", "counts"), I32)
    prompts = {"HEADS": 2, "QUERIES": 8, "SCALED": largest > 0}
    build(prompt_attention_kernel, {"queries": B16, "out": B16, **pools, **tiles}, sizes | prompts)
    attend = {"tables": I64, "lengths": I64, "o": F32, "lse": F32, "arrived": I32, "out": B16, **pools}
    sizes |= {"ROWS": 16, "PARTS": 4}
    build(one_row_attention_kernel, attend | {"qkv": B16, "rope": F32, "slots": I64}, sizes | {"LARGEST": largest})
    build(block_attention_kernel, attend | {"q": B16}, sizes | {"SCALED": largest > 0})

WHOLES = dict.fromkeys(("n_rows", "n_columns", "n_terms"), WHOLE) | {"eps": "fp32"}
ROW = WHOLES | {"x": B16, "gain": B16, "out": B16, "zeros": "*u8", "scales": F32}
for numbers, levels in (("*u8", True), ("*fp8e4nv", False), (B16, False)):
    weight = ROW | {"numbers": numbers}
    few: dict[str, Any] = {"LEVELS": levels, "SCALED": numbers == "*fp8e4nv", "GATED": False, "EVEN": True}
    tile = {"TERMS": 128, "ROWS": 8, "COLS": 64, "ASK": 1024}
    build(few_rows_kernel, weight | {"out": F32}, few | tile | {"ROWS": 64})
    build(few_rows_kernel, weight, few | tile | {"GATED": True})
    if numbers != B16:
        build(widen_kernel, weight, {"LEVELS": levels, "GROUP": 128, "COLS": 1024})
ways = {"NORM": True, "GATED": True, "ADD": True, "COLS": 4, "EVEN": True, "TERMS": 1024}
for numbers in ("*fp8e4nv", B16):
    build(one_row_kernel, ROW | {"weight": numbers}, ways | {"SCALED": numbers != B16})
build(one_int4_row_kernel, ROW | {"words": I32, "n_groups": WHOLE}, ways | {"GROUPS": 16, "GROUP": 128, "STEPS": 1})
tiles = dict.fromkeys(("tables", "sequences", "rows", "positions", "counts"), I64)
tensors = dict.fromkeys(("q", "keys", "values", "sinks"), B16) | {"o": F32, "lse": F32, "cap": "fp32"}
sizes = {"SIZE": 16, "GROUP": 2, "D": 64, "WIDTH": 64, "HEADS": 2, "QUERIES": 8, "COLS": 64}
build(variant_attention_kernel, tensors | tiles | {"window": WHOLE, "N": WHOLE}, sizes | {"CAPPED": True, "SUNK": True})
stored = dict.fromkeys(("k", "v", "keys", "values"), B16) | {"slots": I64, "n_columns": WHOLE}
build(store_kernel, stored, {"COLS": 1024})
print("compiled")
