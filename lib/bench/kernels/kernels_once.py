"""Run every Triton kernel of the book once, at awkward sizes, forward and backward, under a sanitizer.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m
lib.bench.kernels.kernels_once`` on a GPU (a minute or two) ends with status 1 if a kernel touches
memory that is not its own.
The variable is needed because PyTorch's allocator otherwise hands out parts of large blocks,
where a neighbour's bytes look legal.
Nothing is measured.
"""

import argparse
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from lib.attention_variants import flash_window_kernel
from lib.bench.kit import wait_for
from lib.fast.attention import flash
from lib.fast.attention.flash import fits_fast, flash_attention_fast, flash_attention_joined
from lib.fast.attention.heads import split_heads
from lib.fast.attention.latent import latent_attention
from lib.fast.gluon import has_roles
from lib.fast.parts import mlp
from lib.fast.parts.float8 import cast_both
from lib.fast.parts.gelu import bias_gelu
from lib.fast.parts.grouped import grouped_matmul_fast, weight_gradients_fast
from lib.fast.parts.loss import linear_cross_entropy
from lib.fast.parts.narrow import product
from lib.fast.parts.norms import norm_and_bias
from lib.fast.parts.one_row import one_row
from lib.flash_attention import FlashAttentionTriton, flash_attention
from lib.given.kernels.int4 import launch_int4_matmul
from lib.given.kernels.window import launch_window
from lib.given.models.llama import LlamaConfig
from lib.low_precision import absmax_scale, int4_matmul_kernel, pack_int4, quantize, quantize_int4, scaled_matmul
from lib.moe import grouped_matmul
from lib.runs.flags import ProgramParser
from lib.runs.serving.quantized import narrow
from lib.serving import PagedCache, paged_attention
from lib.triton_kernels import matmul, rms_norm, softmax_rows, vector_add, weighted_sum


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def run(name: str, call: Callable[[], torch.Tensor], device: str) -> None:
    """Run forward and, if there is one, backward, and wait, so that an error appears under this kernel's name."""
    out = call()
    if out.requires_grad:
        out.float().sum().backward()
    wait_for(device)
    print("ran", name, flush=True)


def run_latents(device: str) -> None:
    """Absorbed attention of a prompt, and of one token in parts."""
    rank, rope, dtype = (512, 64, torch.bfloat16) if device == "cuda" else (32, 16, torch.float32)
    for t, parts in ((70, 1), (1, 4)):
        shapes = (1, 3, t, rank), (1, 3, t, rope), (1, 90, rank), (1, 90, rope)
        xs = [normal(*shape, device=device, dtype=dtype).detach() for shape in shapes]
        run(f"latents, {t}", lambda xs=xs, n=parts: latent_attention(*xs, scale=0.1, n_parts=n), device)


def run_paged(device: str) -> None:
    """Attention to sequences in blocks, in one part and in several,
    one sequence empty and one ending in the middle of a block.
    """
    for width, groups, size in ((16, 2, 3), (64, 1, 16), (120, 4, 16)):
        config = LlamaConfig(vocab_size=8, dim=4 * width, n_layers=1, n_heads=4, n_kv_heads=groups)
        cache = PagedCache(config, 60, size, torch.bfloat16 if device == "cuda" else torch.float32, device)
        sequences = [cache.new() for _ in range(3)]
        for sequence, n in zip(sequences, (0, 1, 130), strict=True):
            new = torch.randn(groups, n, width, device=device)
            cache.append(sequence, 0, new, new)
        q = torch.randn(3, 4, width, device=device, dtype=cache.keys.dtype)
        for parts in (1, 4):
            run(
                f"paged_attention {width}, {parts}",
                lambda q=q, c=cache, s=sequences, n=parts: paged_attention(q, c, s, 0, n),
                device,
            )


def run_narrow(device: str) -> None:
    """Products with weights of 4 and 8 bits: of one row, of a few, and of many, with columns that no tile divides."""
    for kind in ("int4", "float8"):
        weight = narrow(torch.randn(38, 96, device=device), kind)
        for rows in (1, 3, 260):
            x = torch.randn(rows, 96, device=device)
            one = rows == 1
            run(f"narrow {kind}, {rows}", lambda x=x, w=weight, f=one_row if one else product: f(x, w), device)
        x, gain = torch.randn(1, 96, device=device), torch.ones(96, device=device)
        run(f"narrow {kind}, gated", lambda x=x, w=weight, g=gain: one_row(x, w, g, 1e-5, gated=True), device)


def run_windows(device: str) -> None:
    """Attention with a window, ragged ends, shared heads, values of another width, and with a sink."""
    for window, sinks in ((9, None), (None, torch.zeros(4, device=device))):
        q, k, v = (torch.randn(2, h, n, d, device=device) for h, n, d in ((4, 45, 24), (2, 70, 24), (2, 70, 40)))
        run(f"window {window}", lambda: launch_window(flash_window_kernel, q, k, v, window, sinks)[0], device)  # noqa: B023


def run_grouped(device: str) -> None:
    """Experts without rows, with one, with whole tiles and with a part of one."""
    counts = torch.tensor([0, 5, 300, 1, 128], device=device)
    x, weights = (normal(*s, device=device, dtype=torch.bfloat16) for s in ((434, 200), (5, 200, 264)))
    run("grouped_matmul", lambda: grouped_matmul(x, weights, counts), device)
    if has_roles(x):
        given = x.detach(), weights.detach(), counts
        run("grouped_matmul with roles", lambda: grouped_matmul_fast(*given), device)
        flipped = given[1].transpose(1, 2).contiguous().transpose(1, 2)
        run("grouped_matmul with roles, transposed", lambda: grouped_matmul_fast(x.detach(), flipped, counts), device)
        rows = torch.randn(434, 264, device=device).bfloat16()
        run("gradients of matrices with roles", lambda: weight_gradients_fast(x.detach(), rows, counts), device)


def run_mlp(device: str) -> None:
    """The products around a GELU, with tiles that are partly empty at the last rows, columns and terms."""
    x, first, bias = (torch.randn(shape, device=device).bfloat16() for shape in ((300, 136), (264, 136), (264,)))
    second = first.T.contiguous()
    if has_roles(x):
        for form in ("none", "tanh"):
            run(f"gelu_kernel, {form}", lambda f=form: mlp.launch_forward(x, first, bias, f)[0], device)
        slope = mlp.launch_forward(x, first, bias, "tanh")[1]
        run("slope_kernel", lambda: mlp.launch_backward(x, second, slope)[0], device)


def run_quantized(device: str) -> None:
    """Four-bit weights times one row and times more than a tile; eight bits with a scale for each block;
    a matrix cast in both orders.
    """
    q, scale, zero = quantize_int4(torch.randn(40, 384, device=device), 128)
    for n_rows in (1, 33):
        x = torch.randn(n_rows, 384, device=device).bfloat16()
        given = x, pack_int4(q), scale, zero
        run(f"int4_matmul, {n_rows} rows", lambda given=given: launch_int4_matmul(int4_matmul_kernel, *given), device)
    blocks, dtype = (128, 128), torch.float8_e4m3fn
    a, b = torch.randn(130, 200, device=device), torch.randn(200, 300, device=device)
    scales = absmax_scale(a, dtype, blocks), absmax_scale(b, dtype, blocks)
    factors = quantize(a, scales[0], dtype), quantize(b, scales[1], dtype)
    run("scaled_matmul of blocks", lambda: scaled_matmul(*factors, *scales, torch.bfloat16), device)
    for shape, kind in (((33, 70), torch.bfloat16), ((80, 48), torch.float32)):
        matrix = normal(*shape, device=device, dtype=kind).detach()
        run(f"cast_both {shape}", lambda x=matrix: cast_both(x, scale[0, 0], dtype)[1].float(), device)


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    x, y, row = (normal(*s, device=device) for s in ((1000,), (1000,), (37,)))
    run("vector_add", lambda: vector_add(x.detach(), y.detach()), device)
    run("weighted_sum", lambda: weighted_sum(normal(5, 7, 37, device=device), row), device)
    run("softmax_rows", lambda: softmax_rows(normal(13, 301, device=device)), device)
    run(
        "matmul",
        lambda: matmul(normal(67, 45, device=device).detach(), normal(45, 131, device=device).detach()),
        device,
    )
    for shape in ((300, 40), (33, 77)):
        x, bias = normal(*shape, device=device, dtype=torch.bfloat16), normal(shape[-1], device=device)
        for form in ("none", "tanh"):
            run(f"bias_gelu {shape}, {form}", lambda x=x, bias=bias, f=form: bias_gelu(x, bias, f), device)
    rows: tuple[int, ...]
    for rows, n_heads in (((4, 77, 120), 5), ((300, 48), 2)):
        x, bias = normal(*rows, device=device, dtype=torch.bfloat16), normal(rows[-1], device=device)
        run(f"split_heads {rows}", lambda x=x, bias=bias, h=n_heads: torch.stack(split_heads(x, bias, h)), device)
        bias, layer = normal(rows[-1], device=device), torch.nn.LayerNorm(rows[-1], device=device)
        run(f"norm_and_bias {rows}", lambda x=x, b=bias, n=layer: torch.stack(norm_and_bias(x, n, b)), device)
    hidden, head = (normal(*s, device=device, dtype=torch.bfloat16) for s in ((30, 16), (5008, 16)))
    targets = torch.randint(5001, (30,), device=device)
    run("softmax_loss", lambda: linear_cross_entropy(hidden, head, targets, 5001), device)
    hidden, head = (normal(*s, device=device, dtype=torch.bfloat16) for s in ((700, 16), (5120, 16)))
    targets = torch.randint(5001, (700,), device=device)
    name = "softmax_loss, inside of the product on Hopper GPUs"
    run(name, lambda: linear_cross_entropy(hidden, head, targets, 5001), device)
    run("rms_norm", lambda: rms_norm(normal(11, 37, device=device), row, 1e-5), device)
    for width, t, s, causal, groups in ((16, 33, 33, True, 2), (64, 100, 77, False, 1), (128, 17, 65, True, 2)):
        q, k, v = (normal(2, h, n, width, device=device) for h, n in ((2, t), (groups, s), (groups, s)))
        run(
            f"attention {width}, {t} x {s}",
            lambda q=q, k=k, v=v, c=causal: FlashAttentionTriton.apply(q, k, v, c),
            device,
        )
    for width, t, causal in (
        ((64, 197, False), (64, 1000, True), (80, 257, False), (128, 1, True)) if device == "cuda" else ()
    ):
        for heads in (2, 512):  # few rows get other kernels than many
            x = normal(1, t, heads + 2 * (heads // 2), width, device=device, dtype=torch.bfloat16)
            bias = normal(x.shape[2] * width, device=device)
            call = partial(flash_attention_joined, x, heads, causal, bias)
            run(f"joined {width}, {t}", call, device)
    for t, s in ((70, 197), (197, 70)) if device == "cuda" else ():
        q, k, v = (normal(1, n, 64, 64, device=device, dtype=torch.bfloat16).transpose(1, 2) for n in (t, s, s))
        run(f"attention, {t} x {s}", lambda q=q, k=k, v=v: flash_attention(q, k, v, True), device)
    with patch.object(flash, "STORED_ROWS", 1):
        # few heads of keys, whose heads of queries are computed apart, and many
        for heads, t, s, causal in ((4, 700, 900, True), (64, 600, 600, False)) if device == "cuda" else ():
            q, k, v = (
                normal(1, h, n, 128, device=device, dtype=torch.bfloat16)
                for h, n in ((heads, t), (heads // 2, s), (heads // 2, s))
            )
            fast = f"attention 128 with dS through memory, {heads} heads, {t} x {s}"
            run(fast, lambda q=q, k=k, v=v, c=causal: flash_attention_fast(q, k, v, c), device)
    for heads, t, values in ((4, 600, 256), (64, 600, 192), (4, 700, 128)) if device == "cuda" else ():
        q, k, v = (
            normal(1, h, t, width, device=device, dtype=torch.bfloat16)
            for h, width in ((2 * heads, 256), (heads, 256), (heads, values))
        )
        run(f"attention 256, values {values}", lambda q=q, k=k, v=v: flash_attention_fast(q, k, v, True), device)
    run_latents(device)
    run_paged(device)
    run_narrow(device)
    run_windows(device)
    run_grouped(device)
    run_mlp(device)
    run_quantized(device)
    for width in (64, 128) if device == "cuda" else ():
        for causal in (True, False):
            for heads in (2, 256):  # few rows get other kernels than many
                q, k, v = (
                    normal(1, h, 256, width, device=device, dtype=torch.bfloat16)
                    for h in (heads, heads // 2, heads // 2)
                )
                fast = f"attention {width}, {heads} heads, fast: {fits_fast(q, k, v, causal)}"
                run(fast, lambda q=q, k=k, v=v, c=causal: flash_attention(q, k, v, c), device)


if __name__ == "__main__":
    main()
