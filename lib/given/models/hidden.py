"""The hidden states of both models, the vectors in front of the head, with which a loss need not make all logits."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)`` takes queries ``[..., H, D]``, keys and values ``[..., G, D]``, and returns the means."""
PARTS = {"Llama": ("tok_embeddings", "layers", "norm", "output", "rope"), "GPT2": ("wte", "wpe", "h", "ln_f")}
"""Attributes by which the two models are known, whoever wrote them."""


def hidden_states(
    model: nn.Module,
    ids: Int[Tensor, "b t"],
    mask: Bool[Tensor, "b 1 t t"] | None = None,
    positions: Int[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t c"]:
    """What the model multiplies by its head's weight: the output of its last norm.

    Args:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``; its layers may be wrapped in adapters.
        ids: Tokens.
        mask: True = may attend, as chapter 28's ``packed_mask`` returns it; None is causal attention.
        positions: Each token's position in its own text; None counts from 0 in each row.

    Returns:
        States in the dtype of the weights.
        Their product with ``output_weight(model)`` is the model's logits.

    Raises:
        TypeError: another model; the message names its class.
        ValueError: without ``positions``, more tokens in a row than the model's context; names both numbers.
    """
    length = ids.shape[1]
    parts = _parts(model)
    if positions is None:
        if length > parts.config.context_len:
            raise ValueError(f"{length} tokens in a row are more than the context of {parts.config.context_len}")
        positions = torch.arange(length, device=ids.device).expand(ids.shape)

    def attend(layer: int, *heads: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in heads)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        causal = mask is None
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)

    return final_norm(model)(residual_stream(model, ids, positions, attend))


def output_weight(model: nn.Module) -> Float[Tensor, "v c"]:
    """The head's weight, which in GPT-2 is the embedding's, without rows of padding; gradients pass through.

    Raises:
        TypeError: another model than those of `hidden_states`.
    """
    parts = _parts(model)
    return parts.output.weight if is_llama(model) else parts.wte.weight[: parts.config.vocab_size]


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last block and the head."""
    parts = _parts(model)
    return parts.norm if is_llama(model) else parts.ln_f


def head(model: nn.Module, hidden: Float[Tensor, "... c"]) -> Float[Tensor, "... v"]:
    """The logits of hidden states, by the model's own head, without those of padding rows."""
    parts = _parts(model)
    if is_llama(model):
        return parts.output(hidden)
    return nn.functional.linear(hidden, parts.wte.weight)[..., : parts.config.vocab_size]


def residual_stream(
    model: nn.Module, tokens: Int[Tensor, "..."], positions: Int[Tensor, "..."], attend: Attend
) -> Float[Tensor, "... c"]:
    """What the last block returns, for tokens in any arrangement: who sees whom is the callback's business.

    Args:
        model: As in `hidden_states`.
        tokens: Ids, of any number of texts.
        positions: Each token's position in its own text.
        attend: Called once a layer; rotary positions are applied already.
    """
    return (_llama if is_llama(model) else _gpt2)(model, tokens, positions, attend)


def is_llama(model: nn.Module) -> bool:
    """Whether it is chapter 4's model; False for chapter 6's.

    Raises:
        TypeError: it is neither.
    """
    for name, parts in PARTS.items():
        if all(hasattr(model, part) for part in parts):
            return name == "Llama"
    raise TypeError(f"{type(model).__name__}: expected chapter 4's Llama or chapter 6's GPT2")


def _parts(model: nn.Module) -> Any:
    """The model, with attributes that a type checker does not know."""
    is_llama(model)
    return model


def _llama(model: Any, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    if model.rope.device != tokens.device:
        model.rope = model.rope.to(tokens.device)
    rope, head_dim = model.rope[positions], model.config.head_dim
    x = model.tok_embeddings(tokens)
    for i, layer in enumerate(model.layers):
        a, h = layer.attention, layer.attention_norm(x)
        q, k, v = (rearrange(w(h), "... (h d) -> ... h d", d=head_dim) for w in (a.wq, a.wk, a.wv))
        x = x + a.wo(attend(i, _rotate(q, rope), _rotate(k, rope), v).flatten(-2))
        x = x + layer.feed_forward(layer.ffn_norm(x))
    return x


def _gpt2(model: Any, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    head_dim = model.config.dim // model.config.n_heads
    x = model.wte(tokens) + model.wpe(positions)
    for i, block in enumerate(model.h):
        qkv = block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(part, "... (h d) -> ... h d", d=head_dim) for part in qkv)
        x = x + block.attn.c_proj(attend(i, q, k, v).flatten(-2))
        x = x + block.mlp(block.ln_2(x))
    return x


def _rotate(x: Float[Tensor, "... h d"], rope: Complex[Tensor, "... half_d"]) -> Float[Tensor, "... h d"]:
    """Chapter 2's rotation for tokens that are each at a position of their own."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rope[..., None, :]).flatten(-2).to(x.dtype)
