"""Chapter 15's attention in two steps that autograd does not see: forward with the logsumexp, and backward from it.

``lib.context_parallel`` assembles attention over a long sequence from such blocks. The fast kernels compute a block
wherever they can.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.attention.flash import backward_operator, fits_fast, forward_operator
from lib.flash_attention import FlashAttentionTorch, FlashAttentionTriton
from lib.given.kernels.tiles import HAS_TRITON


class _Kept:
    """Replaces the ``ctx`` of an autograd function whose forward and backward are called by hand."""

    saved_tensors: tuple[Tensor, ...]
    is_causal: bool

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _function(q: Tensor) -> Any:
    can_compile = q.is_cuda and HAS_TRITON and q.dtype != torch.float64 and q.shape[-1] <= 256
    return FlashAttentionTriton if can_compile else FlashAttentionTorch


def block_forward(
    q: Float[Tensor, "*lead t d"], k: Float[Tensor, "*lead_kv s d"], v: Float[Tensor, "*lead_kv s d"], is_causal: bool
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Attention of some queries to some keys: the output, and the natural logsumexp of each row's scaled scores.

    Arguments as in ``flash_attention``: query heads may share key/value heads, and a causal mask is aligned to the
    last key.
    Autograd does not see this function; ``block_backward`` computes its gradients.
    """
    with torch.no_grad():
        if fits_fast(q, k, v, is_causal):
            return forward_operator(q, k, v, is_causal)
        kept = _Kept()
        _function(q).forward(kept, q, k, v, is_causal)
        *_, o, lse = kept.saved_tensors
        return o, lse


def block_backward(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    o: Float[Tensor, "*lead t d"],
    do: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    is_causal: bool,
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """The contributions of these keys and values to the gradients: dq, dk and dv.

    ``o`` and ``lse`` may come from attention to more keys than these. The weights that are computed again from ``lse``
    are then those of the whole row, and the contributions of all blocks add up to the gradient of the whole attention.
    """
    with torch.no_grad():
        if fits_fast(q, k, v, is_causal):
            return backward_operator(q, k, v, o, do, lse, is_causal)
        kept = _Kept()
        kept.save_for_backward(q, k, v, o, lse)
        kept.is_causal = is_causal
        dq, dk, dv, _ = _function(q).backward(kept, do)
        return dq, dk, dv
