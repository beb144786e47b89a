"""Attention: every position asks all others a question, and takes from each in proportion to its answer."""

import math

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from lib.rope import apply_rope


def softmax(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Positive weights that sum to one along a dimension. (Exercise 3.1)

    Args:
        x: Scores of any shape; ``-inf`` gets no weight.
        dim: The dimension along which the weights sum to one.

    Returns:
        The shape and dtype of ``x``; float16 and bfloat16 are computed in float32 and rounded once, float64 in
        float64. Finite for scores as large as the dtype holds. A row of nothing but ``-inf`` gives zeros, never NaN, and so does its gradient.
        A dimension of size 0 gives an empty result.

    Source: Vaswani and others (arXiv:1706.03762), section 3.2.1.
    Convention: PyTorch's softmax gives NaN for a row of ``-inf``; its ``scaled_dot_product_attention`` gives zeros, as here.
    """
    raise NotImplementedError("Exercise 3.1: write softmax")


def causal_mask(n_queries: int, n_keys: int, device=None) -> Bool[Tensor, "t s"]:
    """Which keys each query may attend to, if none may look ahead. (Exercise 3.2)

    Args:
        n_queries: Number T of queries.
        n_keys: Number S of keys; at least T when the keys begin with a cache.
        device: Where the result lives.

    Returns:
        Boolean ``[T, S]``: True where query t may attend to key s. The last query sees the last key: with S > T the
        first queries already see S - T keys before their own.

    Convention: True means "may attend", as in ``scaled_dot_product_attention``; ``nn.MultiheadAttention`` means the opposite. Aligned to
        the last key; PyTorch's ``is_causal=True`` aligns to the first.
    """
    raise NotImplementedError("Exercise 3.2: write causal_mask")


def scaled_dot_product_attention(
    q: Float[Tensor, "... t d"],
    k: Float[Tensor, "... s d"],
    v: Float[Tensor, "... s dv"],
    mask: Bool[Tensor, "... t s"] | None = None,
) -> Float[Tensor, "... t dv"]:
    """Weighted means of the values, by how well the keys answer the queries. (Exercise 3.3)

    Args:
        q: Queries ``[..., T, D]``; any leading dimensions.
        k: Keys ``[..., S, D]``.
        v: Values ``[..., S, Dv]``; Dv may differ from D.
        mask: Boolean, broadcast to ``[..., T, S]``, True where a query may attend; None lets every query see every key.

    Returns:
        ``[..., T, Dv]`` in the dtype of ``q``. A query that may attend to nothing gets zeros: one whose row of the mask is
        all False, and every query when there are no keys (S = 0). In float16 only the scores
        after the division by ``sqrt(D)`` need to fit below 65,504: divide before the product.

    Cost: a few operations on whole tensors, none larger than the ``[..., T, S]`` of scores or the inputs; no loop.
    Source: Vaswani and others (arXiv:1706.03762), equation (1).
    """
    raise NotImplementedError("Exercise 3.3: write scaled_dot_product_attention")


def split_heads(x: Float[Tensor, "b t hd"], n_heads: int) -> Float[Tensor, "b h t d"]:
    """Cut the features into heads, and put the heads beside the batch. (Exercise 3.4)

    Args:
        x: ``[B, T, H*D]``; head 0 is the first D features.
        n_heads: Number H of heads.

    Returns:
        ``[B, H, T, D]``.

    Raises:
        ValueError: the width is no multiple of ``n_heads``; the message names both.
    """
    raise NotImplementedError("Exercise 3.4: write split_heads")


def merge_heads(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b t hd"]:
    """Put the heads of each position side by side again. (Exercise 3.5)

    Args:
        x: ``[B, H, T, D]``.

    Returns:
        ``[B, T, H*D]``: the inverse of ``split_heads``.
    """
    raise NotImplementedError("Exercise 3.5: write merge_heads")


def repeat_kv(x: Float[Tensor, "b g t d"], n_repeats: int) -> Float[Tensor, "b h t d"]:
    """Give each key/value head to the query heads that share it. (Exercise 3.6)

    Args:
        x: Keys or values ``[B, G, T, D]`` of G groups.
        n_repeats: Query heads H / G that share one group.

    Returns:
        ``[B, G * n_repeats, T, D]``: each group's copies stand next to each other.

    Source: grouped-query attention, Ainslie and others (arXiv:2305.13245).
    """
    raise NotImplementedError("Exercise 3.6: write repeat_kv")


class KVCache:
    """The keys and values of all positions so far, so that none is computed twice. (Exercise 3.7)

    Memory for ``max_len`` positions is taken once, at the start.

    Args:
        batch: Number B of sequences.
        n_kv_heads: Number G of key/value heads.
        max_len: Positions that fit.
        head_dim: Width D of a head.
        dtype: Of the keys and values.
        device: Where they live.

    Attributes:
        keys: ``[B, G, max_len, D]``, zeros where nothing was written yet; ``values`` likewise.
        length: Positions held so far.

    Convention: made for generation, under ``torch.no_grad()``. An update writes in place, so that after a second one
        PyTorch refuses to go backward through the first.
    """

    def __init__(self, batch: int, n_kv_heads: int, max_len: int, head_dim: int, dtype=torch.float32, device=None):
        self.keys = torch.zeros(batch, n_kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def update(
        self, k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t d"]
    ) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:
        """Append T new positions.

        Args:
            k: New keys ``[B, G, T, D]``.
            v: New values ``[B, G, T, D]``.

        Returns:
            All keys and all values so far ``[B, G, length, D]``, as views of the cache's own memory: the past is never
            copied.

        Raises:
            ValueError: the T positions do not fit, and the message shows the arithmetic; or ``k`` and ``v`` are not both
                ``[B, G, T, D]`` for this cache's B, G and D, and the message shows the shape given and the one expected.
                (A batch of one would broadcast over the whole cache.) Either way the cache is as it was before.
        """
        raise NotImplementedError("Exercise 3.7: write KVCache.update")


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each on its own projection of the input. (Exercise 3.8)

    Args:
        dim: Model width C; a multiple of ``n_heads``.
        n_heads: Query heads H.
        n_kv_heads: Key/value heads G, a divisor of H; None means H.

    Attributes:
        wq: ``nn.Linear`` C to H*D, no bias; so are ``wk`` and ``wv``, C to G*D, and ``wo``, H*D to C.

    Raises:
        ValueError: ``dim`` is no multiple of ``n_heads``, or ``n_heads`` none of ``n_kv_heads``; the message names both.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int | None = None):
        super().__init__()
        raise NotImplementedError("Exercise 3.8: write MultiHeadAttention.__init__")

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        rope: Complex[Tensor, "t half_d"] | None = None,
        mask: Bool[Tensor, "... t s"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "b t c"]:
        """Attend from each position of ``x`` to all that the mask allows.

        Args:
            x: ``[B, T, C]``.
            rope: Rotations ``[T, D/2]`` of these T positions, for queries and keys; None rotates nothing. ``apply_rope``
                takes ``[B, T, H, D]``, heads after positions, where ``split_heads`` gives ``[B, H, T, D]``.
            mask: Boolean, True where a query may attend, broadcast to ``[B, H, T, S]``; None lets every position attend to
                every other. A mask ``[B, T, S]`` does not broadcast: give it a head axis, ``[B, 1, T, S]``.
            cache: Holds the S - T positions before; the new ones are appended (rotated) to it.

        Returns:
            ``[B, T, C]``.
        """
        raise NotImplementedError("Exercise 3.8: write MultiHeadAttention.forward")
