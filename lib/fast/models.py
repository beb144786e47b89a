"""The book's GPT-2 and vision transformer on the fast path: the same parameters and the same function,
with fewer kernels and bytes.

The models of chapters 5 and 6 are written to be read.
This module computes their loss from their own parameters with PyTorch's fused operators,
so that a compiler has less to repair.
Every choice is a field of `Path`, so that each can be measured alone.
"""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.fast.attention.flash import fits_fast, flash_attention_fast, flash_attention_joined, is_quickest
from lib.fast.attention.heads import split_heads
from lib.fast.parts.float8 import DelayedLinear
from lib.fast.parts.gelu import TAIL, P, bias_gelu
from lib.fast.parts.loss import linear_cross_entropy
from lib.fast.parts.mlp import fits, mlp
from lib.fast.parts.norms import norm_and_bias
from lib.fast.parts.wide import tied_embedding, wide_linear

ATTENTIONS = ("written out", "fused", "flash", "cudnn", "workbook", "quickest")
JOINABLE = nn.Linear | DelayedLinear  # layers whose product can be taken with other weights, or without the bias


@dataclass(frozen=True, kw_only=True)
class Path:
    """How a model is computed.

    Attributes:
        dtype: Dtype of the factors of every product; parameters, losses and sums of gradients stay float32.
        stream: Dtype of the residual stream; None means ``dtype``.
        attention: "written out" computes the scores; "fused" is PyTorch's choice of kernel;
            "flash" and "cudnn" name one; "workbook" takes chapter 15's kernels where they fit,
            and "quickest" where they were measured to be the fastest.
        loss_kernel: Compute GPT-2's last product, the loss and its gradient with ``lib.fast.parts.loss``.
        class_token_alone: In the last block of a ViT, compute only the class token, which is all that the head reads.
        short_gelu: Compute the exact GELU with `short_gelu`, which needs one exponential and no error function.
        kernels: Use the kernels of this folder inside of a block.
            The GELU and the bias before it are computed inside the products of `lib.fast.parts.mlp` where they fit,
            and with `lib.fast.parts.gelu` elsewhere, also if ``short_gelu`` is set.
            `lib.fast.parts.norms` computes the backward pass of the norms and of the biases of a branch's last product,
            if the model is compiled.
            `lib.fast.attention.heads` joins the gradients of queries, keys and values and sums them for their bias,
            unless chapter 15's kernels do both.
    """

    dtype: torch.dtype = torch.float32
    stream: torch.dtype | None = None
    attention: str = "fused"
    loss_kernel: bool = False
    class_token_alone: bool = True
    short_gelu: bool = False
    kernels: bool = False

    def __post_init__(self):
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention = {self.attention!r} is none of {', '.join(ATTENTIONS)}")

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.stream or self.dtype


def linear(x: Tensor, path: Path, *layers: nn.Linear) -> Tensor:
    """One product for one linear map, or for several that read the same input; their outputs come side by side.

    A module that replaced an ``nn.Linear``, such as chapter 20's ``Float8Linear``, is called instead.
    """
    if not all(isinstance(layer, JOINABLE | nn.Conv2d) for layer in layers):
        return torch.cat([layer(x.to(path.dtype)) for layer in layers], dim=-1)
    return _product(x, path, layers[0], *_side_by_side(layers))


def _product(x: Tensor, path: Path, layer: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product as ``layer`` computes it."""
    if isinstance(layer, DelayedLinear):
        return layer.product(x.to(path.dtype), weight, bias)
    if path.kernels:
        return wide_linear(x.to(path.dtype), weight.flatten(1), bias)
    return F.linear(x.to(path.dtype), weight.flatten(1).to(path.dtype), None if bias is None else bias.to(path.dtype))


def _side_by_side(layers: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])


def norm(x: Tensor, layer: nn.LayerNorm, path: Path) -> Tensor:
    """Layer norm in one kernel, with statistics in float32 and a result for the next product."""
    if torch.compiler.is_compiling() or x.dtype == torch.float32:  # the compiler fuses the two casts
        weight, bias = layer.weight.float(), layer.bias.float()  # sharded parameters may be narrower
        return F.layer_norm(x.float(), layer.normalized_shape, weight, bias, layer.eps).to(path.dtype)
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def linear_gelu(x: Tensor, path: Path, layer: nn.Linear, approximate: str) -> Tensor:
    """The GELU of a linear map."""
    if path.kernels and isinstance(layer, JOINABLE):
        return bias_gelu(_product(x, path, layer, layer.weight, None), layer.bias, approximate)
    wide = linear(x, path, layer)
    return short_gelu(wide) if path.short_gelu and approximate == "none" else F.gelu(wide, approximate=approximate)


def mlp_of(
    x: Tensor, path: Path, first: nn.Linear, second: nn.Linear, approximate: str, last_bias: Tensor | None
) -> Tensor:
    """Two linear maps with a GELU between them; ``last_bias`` takes the place of the second one's bias."""
    plain = isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    if not (path.kernels and plain and fits(x.to(path.dtype), first.out_features)):
        return _last_product(linear_gelu(x, path, first, approximate), path, second, last_bias)
    rows = x.to(path.dtype).flatten(0, -2)
    return mlp(rows, first.weight, first.bias, second.weight, last_bias, approximate).unflatten(0, x.shape[:-1])


def _last_product(x: Tensor, path: Path, layer: Any, bias: Tensor | None) -> Tensor:
    return _product(x, path, layer, layer.weight, bias) if isinstance(layer, JOINABLE) else linear(x, path, layer)


def add_branch(x: Tensor, path: Path, layer: nn.LayerNorm, out: nn.Linear, branch: Callable[..., Tensor]) -> Tensor:
    """Add to the stream a branch that begins with a norm and ends with the linear map ``out``.

    Args:
        x: The stream ``[B, T, C]``.
        path: How to compute it.
        layer: The norm.
        out: The last linear map.
        branch: A function ``(normed, bias)`` that computes the rest, with ``bias`` in ``out``.
    """
    bias = out.bias if isinstance(out, JOINABLE) else None
    if path.kernels and torch.compiler.is_compiling() and bias is not None:
        x, normed = norm_and_bias(x, layer, bias, path.dtype)
        return x + branch(normed, bias.detach())
    return x + branch(norm(x, layer, path), bias)


def attend(q: Tensor, k: Tensor, v: Tensor, path: Path, causal: bool) -> Tensor:
    """Attention on ``[B, T, H, D]`` as the projection returns it, without a copy; returns ``[B, T, H*D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if _takes_ours(q, k, v, path, causal):
        return flash_attention_fast(q, k, v, causal).transpose(1, 2).flatten(2)
    if path.attention == "written out" or (q.shape[2] == 1 and not causal):
        return _written_out(q, k, v, causal).transpose(1, 2).flatten(2)
    with _kernel(path.attention if q.is_cuda else "fused"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def self_attention(x: Tensor, n_heads: int, path: Path, causal: bool, *layers: nn.Linear) -> Tensor:
    """Attention of a sequence ``[B, T, C]`` to itself; ``layers`` project to queries, keys and values,
    in one map or in three.

    Where a kernel computes the gradient of the projection's bias, the product gets a detached bias.
    """
    like_queries = x.to(path.dtype).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    ours = _takes_ours(like_queries, like_queries, like_queries, path, causal)
    has_biases = all(isinstance(layer, JOINABLE) and layer.bias is not None for layer in layers)
    if not has_biases or not (ours or path.kernels):
        heads = linear(x, path, *layers).unflatten(-1, (3 * n_heads, -1))
        if ours:
            return flash_attention_joined(heads, n_heads, causal).flatten(2)
        q, k, v = heads.unflatten(2, (3, n_heads)).unbind(2)
        return attend(q, k, v, path, causal)
    weight, bias = _side_by_side(layers)
    heads = _product(x, path, layers[0], weight, bias.detach())
    if ours:
        return flash_attention_joined(heads.unflatten(-1, (3 * n_heads, -1)), n_heads, causal, bias).flatten(2)
    return attend(*split_heads(heads, bias, n_heads), path, causal)


def _takes_ours(q: Tensor, k: Tensor, v: Tensor, path: Path, causal: bool) -> bool:
    if path.attention == "workbook":
        return fits_fast(q, k, v, causal)
    return path.attention == "quickest" and is_quickest(q, k, v, causal)


def _kernel(name: str) -> AbstractContextManager:
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(chosen[name]) if name in chosen else nullcontext()


def _written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Scores, softmax, weighted means.

    Scale and mask are part of the first product; scores and weights are written to memory.
    """
    b, h, t, _ = q.shape
    s, scale = k.shape[2], q.shape[-1] ** -0.5
    if causal:
        mask = q.new_full((t, s), -torch.inf).triu(s - t + 1)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=scale)
        return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, (b, h))
    return (q * scale @ k.transpose(-2, -1)).softmax(-1) @ v


# ---- GPT-2 -----------------------------------------------------------------------------------------------------------


def gpt2_block(block: Any, x: Tensor, path: Path, n_heads: int) -> Tensor:
    """One block of a ``lib.gpt2.GPT2``."""
    attn = block.attn

    def attention(seen: Tensor, bias: Tensor | None) -> Tensor:
        return _last_product(self_attention(seen, n_heads, path, True, attn.c_attn), path, attn.c_proj, bias)

    def mlp_branch(seen: Tensor, bias: Tensor | None) -> Tensor:
        return mlp_of(seen, path, block.mlp.c_fc, block.mlp.c_proj, "tanh", bias)

    x = add_branch(x, path, block.ln_1, attn.c_proj, attention)
    return add_branch(x, path, block.ln_2, block.mlp.c_proj, mlp_branch)


def gpt2_loss(model: Any, tokens: Tensor, targets: Tensor, path: Path, call_blocks: bool = False) -> Tensor:
    """The mean cross-entropy of a ``lib.gpt2.GPT2``; with ``call_blocks`` each block is called as a module."""
    x, weight = tied_embedding(model.wte.weight, tokens)
    x = (x + model.wpe.weight[: tokens.shape[1]]).to(path.stream_dtype)
    for block in model.h:
        x = block(x) if call_blocks else gpt2_block(block, x, path, model.config.n_heads)
    rows = norm(x, model.ln_f, path).flatten(0, 1)
    n_vocab = model.config.vocab_size
    if path.loss_kernel:
        return linear_cross_entropy(rows, weight, targets.flatten(), n_vocab)
    logits = F.linear(rows, weight.to(path.dtype))[:, :n_vocab]
    return F.cross_entropy(logits.float(), targets.flatten())


# ---- the vision transformer ------------------------------------------------------------------------------------------


def vit_logits(model: Any, images: Tensor, path: Path, call_blocks: bool = False) -> Tensor:
    """The float32 logits of a ``lib.vit.VisionTransformer``; patches go through a product instead of a convolution.

    With ``call_blocks`` each block is called as a module:
    for callers that have replaced its forward by ``vit_block_of``.
    """
    x = vit_stem(model.embeddings, images, path)
    for i, block in enumerate(model.blocks):
        x = block(x) if call_blocks else vit_block_of(model, i, path)(block, x, path)
    return _vit_out(model.norm, model.head, x, path, model.config.pooling)


def vit_loss(model: Any, images: Tensor, labels: Tensor, path: Path, call_blocks: bool = False) -> Tensor:
    """The mean cross-entropy of a ``lib.vit.VisionTransformer``."""
    return F.cross_entropy(vit_logits(model, images, path, call_blocks), labels)


def vit_block_of(model: Any, i: int, path: Path) -> Callable[..., Tensor]:
    """The function ``(block, x, path)`` that computes block i of a ``lib.vit.VisionTransformer``.

    For the last block it may be the function that computes the class token alone.
    """
    alone = path.class_token_alone and model.config.pooling == "token" and i == len(model.blocks) - 1
    return _class_token_block if alone else vit_block


def vit_stem(inputs: Any, images: Tensor, path: Path) -> Tensor:
    """The residual stream ``[B, 1 + N, C]`` that the first block reads;
    ``inputs`` are the model's ``ImageEmbeddings``.
    """
    side = inputs.config.patch_size
    patches = rearrange(images.to(path.dtype), "b ch (r p) (c q) -> b (r c) (ch p q)", p=side, q=side)
    x = linear(patches, path, inputs.proj)
    x = torch.cat([inputs.cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
    return (x + inputs.pos_embed).to(path.stream_dtype)


def vit_head(last: Any, final_norm: Any, head: Any, x: Tensor, path: Path, pooling: str = "token") -> Tensor:
    """The last block, the final norm and the head: from the residual stream to float32 logits."""
    alone = path.class_token_alone and pooling == "token"
    x = _class_token_block(last, x, path) if alone else vit_block(last, x, path)
    return _vit_out(final_norm, head, x, path, pooling)


def _vit_out(final_norm: Any, head: Any, x: Tensor, path: Path, pooling: str) -> Tensor:
    x = norm(x, final_norm, path)
    return linear(x[:, 0] if pooling == "token" else x[:, 1:].mean(dim=1), path, head).float()


def vit_block(block: Any, x: Tensor, path: Path) -> Tensor:
    """Attention and MLP of a ``ViTBlock``, each added to its input."""
    attn = block.attn

    def attention(seen: Tensor, bias: Tensor | None) -> Tensor:
        heads = self_attention(seen, attn.n_heads, path, False, attn.wq, attn.wk, attn.wv)
        return _last_product(heads, path, attn.wo, bias)

    return _add_vit_mlp(block, add_branch(x, path, block.norm1, attn.wo, attention), path)


def _add_vit_mlp(block: Any, x: Tensor, path: Path) -> Tensor:
    def mlp_branch(seen: Tensor, bias: Tensor | None) -> Tensor:
        return mlp_of(seen, path, block.mlp.fc1, block.mlp.fc2, block.mlp.approximate, bias)

    return add_branch(x, path, block.norm2, block.mlp.fc2, mlp_branch)


def _class_token_block(block: Any, x: Tensor, path: Path) -> Tensor:
    """The last block for the class token alone, ``[B, 1, C]``: its query sees all tokens,
    and no other query is needed.
    """
    attn, seen = block.attn, norm(x, block.norm1, path)
    keys, values = linear(seen, path, attn.wk, attn.wv).unflatten(-1, (2, attn.n_heads, -1)).unbind(2)
    queries = linear(seen[:, :1], path, attn.wq).unflatten(-1, (attn.n_heads, -1))
    x = x[:, :1] + linear(attend(queries, keys, values, path, causal=False), path, attn.wo)
    return _add_vit_mlp(block, x, path)


# ---- the exact GELU without an error function ------------------------------------------------------------------------


class ShortGELU(torch.autograd.Function):
    """``x`` times the share of the normal distribution below ``x``; forward and backward need the same exponential.

    PyTorch's error function takes about fifty instructions for each element,
    so a GELU that is fused with its casts waits for arithmetic and not for memory.
    A polynomial in 1 / (1 + 0.33 z) and one exponential, which the backward pass needs anyway, are enough.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        share, _ = normal_share(_wide(x))
        return _narrow(x * share, x.dtype)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        share, density = normal_share(_wide(x))
        return _narrow(d_out * (share + x * density), x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Cast to float32 unless x is float32: torch 2.11's compiler gives a cast without effect a gradient of zeros."""
    return x if x.dtype == torch.float32 else x.float()


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def normal_share(x: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the normal distribution below ``x``, and its density at ``x``."""
    z = x.abs() * 0.5**0.5
    bell, t = torch.exp(-z * z), 1.0 / (1.0 + P * z)
    a, b, c, d, e = TAIL
    tail = 0.5 * bell * t * (a + t * (b + t * (c + t * (d + t * e))))
    return torch.where(x < 0, tail, 1.0 - tail), bell * (2 * torch.pi) ** -0.5


def short_gelu(x: Tensor) -> Tensor:
    """The exact GELU with an error of at most 1e-6 in float32, in the dtype of ``x``."""
    return ShortGELU.apply(x)


# ---- images and whole steps ------------------------------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def prepare_images(
    pictures: Tensor, size: int, dtype: torch.dtype = torch.float32, mean: Any = MEAN, std: Any = STD
) -> Tensor:
    """Resize and normalise pictures for the model, on the device where they are.

    Args:
        pictures: ``[B, ch, height, width]``, uint8 or floats from 0 to 1.
        size: Side of the result in pixels.
        dtype: Dtype of the result.
        mean, std: One value for each channel. Tensors on the same device save a copy to the device in each call.
    """
    mean, std = (torch.as_tensor(x, device=pictures.device)[:, None, None] for x in (mean, std))
    unit = pictures.float() / 255.0 if pictures.dtype == torch.uint8 else pictures
    unit = (unit - mean) / std  # before the resize, where there are fewer pixels; it is linear
    if unit.shape[-2:] != (size, size):
        unit = F.interpolate(unit, size=(size, size), mode="bilinear", align_corners=False)
    return unit.to(dtype)


def forbid_workspace(device: torch.device) -> None:
    """On a Hopper GPU let cuBLAS choose only algorithms that need no memory of their own.

    Call it before the process's first product.

    Before many products of a training step the usual workspace is cleared,
    probably for a counter from which the product's programs draw tiles.
    In a graph that is a node of its own, for which the product waits.
    A user's ``CUBLAS_WORKSPACE_CONFIG`` stays.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if is_hopper and os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0") == ":0:0":
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")  # else PyTorch warns that it makes it so


def capture(
    step: Callable[[], Tensor], n_warmup: int = 3, on_ranks: bool = False, pool: Any = None
) -> Callable[[], Tensor]:
    """Record a step once as a CUDA graph and replay it: one launch for all its kernels.

    Args:
        step: Reads and writes the same tensors each time, and never waits for the device;
            its optimizer is ``capturable``.
        n_warmup: Number of steps before the recording, in which kernels are compiled and chosen.
        on_ranks: The step contains NCCL's collectives.
            NCCL's watchdog thread queries events while we record,
            so only calls of this thread may then invalidate the recording.
        pool: Memory from ``torch.cuda.graph_pool_handle`` that several graphs share.
            Read the result of one before you replay another, and never replay two at once.

    Returns:
        A function that replays the step and returns its result, which the next replay overwrites.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(n_warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()  # nodes of autograd that wait for it would bring the streams of the warm-up into the recording
    torch.cuda.empty_cache()  # the graph has memory of its own and can't reuse what the warm-up left
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local" if on_ranks else "global"):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
