"""Attention: every position compares its query with all keys, and returns a weighted mean of the values."""

import math

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from solutions.rope import apply_rope


def softmax(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Positive weights that sum to one along a dimension. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        x: Scores of any shape; ``-inf`` gets no weight.
        dim: The dimension along which the weights sum to one.

    Returns:
        Weights of the shape and dtype of ``x``. float16 and bfloat16 are computed in float32 and rounded once; float64
        is computed in float64. The result is finite even for the largest scores that the dtype can hold. A row that is
        all ``-inf`` gives zeros, never NaN, and its gradient is zero too. A dimension of size 0 gives an empty result.

    Source: Vaswani and others (arXiv:1706.03762), section 3.2.1.
    Convention: PyTorch's softmax returns NaN for a row that is all ``-inf``; its ``scaled_dot_product_attention``
        returns zeros for it, as here.
    """
    ### BEGIN SOLUTION
    if x.numel() == 0:  # nothing to weigh, and no largest score
        return x.clone()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # a float16 sum overflows at 65,504
    largest = wide.detach().amax(dim, keepdim=True)
    weights = torch.exp(wide - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(dim, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)).to(x.dtype)
    ### END SOLUTION


def causal_mask(n_queries: int, n_keys: int, device=None) -> Bool[Tensor, "t s"]:
    """Which keys each query may attend to if no query may look ahead. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        n_queries: Number T of queries.
        n_keys: Number S of keys; more than T if the first of them come from a cache.
        device: Where the result lives.

    Returns:
        Boolean ``[T, S]``: True where query t may attend to key s. The last query is at the position of the last key,
        so with S > T every query sees at least the S - T keys of the cache.

    Convention: True means "may attend", as in ``scaled_dot_product_attention``; in ``nn.MultiheadAttention`` it means
        the opposite. The mask is aligned to the last key; PyTorch's ``is_causal=True`` aligns it to the first.
    """
    ### BEGIN SOLUTION
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)
    ### END SOLUTION


def scaled_dot_product_attention(
    q: Float[Tensor, "... t d"],
    k: Float[Tensor, "... s d"],
    v: Float[Tensor, "... s dv"],
    mask: Bool[Tensor, "... t s"] | None = None,
) -> Float[Tensor, "... t dv"]:
    """Weighted means of the values, by how well the keys match the queries. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        q: Queries ``[..., T, D]``; any leading dimensions.
        k: Keys ``[..., S, D]``.
        v: Values ``[..., S, Dv]``; Dv may differ from D.
        mask: Boolean, broadcast to ``[..., T, S]``, True where a query may attend.
            None means that every query sees every key.

    Returns:
        ``[..., T, Dv]`` in the dtype of ``q``. A query that may attend to nothing gets zeros: if its row of the mask is
        all False, or if there are no keys (S = 0). In float16, scores that are below 65,504 after the
        division by ``sqrt(D)`` must not overflow before it, so divide the queries first.

    Cost: a few operations on whole tensors and no loop; no tensor is larger than the ``[..., T, S]`` scores or the
        inputs.

    Source: Vaswani and others (arXiv:1706.03762), equation (1).
    """
    ### BEGIN SOLUTION
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return softmax(scores, dim=-1) @ v
    ### END SOLUTION


def split_heads(x: Float[Tensor, "b t hd"], n_heads: int) -> Float[Tensor, "b h t d"]:
    """Cut the features into heads, and put the heads next to the batch. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        x: ``[B, T, H*D]``; the first D features are head 0.
        n_heads: Number H of heads.

    Returns:
        ``[B, H, T, D]``.

    Raises:
        ValueError: the width is not a multiple of ``n_heads``; the message names both.
    """
    ### BEGIN SOLUTION
    if x.shape[-1] % n_heads:
        raise ValueError(f"a width of {x.shape[-1]} cannot be cut into {n_heads} heads of equal width")
    return rearrange(x, "b t (h d) -> b h t d", h=n_heads)
    ### END SOLUTION


def merge_heads(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b t hd"]:
    """Put the heads of each position side by side again. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        x: ``[B, H, T, D]``.

    Returns:
        ``[B, T, H*D]``: the inverse of ``split_heads``.
    """
    ### BEGIN SOLUTION
    return rearrange(x, "b h t d -> b t (h d)")
    ### END SOLUTION


def repeat_kv(x: Float[Tensor, "b g t d"], n_repeats: int) -> Float[Tensor, "b h t d"]:
    """Repeat each key/value head for the query heads that share it. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        x: Keys or values ``[B, G, T, D]`` of G groups.
        n_repeats: Number of query heads that share one group, H / G.

    Returns:
        ``[B, G * n_repeats, T, D]``, with the copies of each group next to each other.

    Source: grouped-query attention, Ainslie and others (arXiv:2305.13245).
    """
    ### BEGIN SOLUTION
    return repeat(x, "b g t d -> b (g r) t d", r=n_repeats)
    ### END SOLUTION


class KVCache:
    """Keeps the keys and values of all positions so far, so that none is computed twice. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Memory for ``max_len`` positions is allocated once, at the start.

    Args:
        batch: Number B of sequences.
        n_kv_heads: Number G of key/value heads.
        max_len: Number of positions that fit.
        head_dim: Width D of a head.
        dtype: Type of the keys and values.
        device: Where they live.

    Attributes:
        keys: ``[B, G, max_len, D]``, zeros where nothing was written yet; ``values`` likewise.
        length: Number of positions held so far.

    Convention: made for generation, under ``torch.no_grad()``. An update writes in place, so after a second update
        PyTorch refuses to run backward through the first.
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
            All keys and all values so far, ``[B, G, length, D]``, as views of the cache's own memory: the past is never
            copied.

        Raises:
            ValueError: the T positions do not fit, and the message shows the arithmetic; or ``k`` and ``v`` are not
                both ``[B, G, T, D]`` for this cache's B, G and D, and the message shows the shape given and the one
                expected. (A batch of one would broadcast over the whole cache.) In both cases the cache is not changed.
        """
        ### BEGIN SOLUTION
        batch, n_kv_heads, max_len, head_dim = self.keys.shape
        expected = (batch, n_kv_heads, k.shape[-2], head_dim)
        for name, new in (("keys", k), ("values", v)):
            if tuple(new.shape) != expected:
                raise ValueError(f"{name} are {list(new.shape)}, this cache takes {list(expected)}")
        start, end = self.length, self.length + k.shape[2]
        if end > max_len:
            raise ValueError(f"the cache holds {start} of {max_len} positions: {k.shape[2]} more would make {end}")
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
        ### END SOLUTION


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each on its own projection of the input. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        dim: Model width C; a multiple of ``n_heads``.
        n_heads: Query heads H.
        n_kv_heads: Key/value heads G, a divisor of H; None means H.

    Attributes:
        wq: ``nn.Linear`` from C to H*D, without bias. ``wk`` and ``wv`` likewise, from C to G*D; ``wo``, from H*D to C.

    Raises:
        ValueError: ``dim`` is not a multiple of ``n_heads``, or ``n_heads`` is not a multiple of ``n_kv_heads``; the
            message names both numbers.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int | None = None):
        super().__init__()
        ### BEGIN SOLUTION
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if dim % n_heads:
            raise ValueError(f"dim = {dim} is not a multiple of n_heads = {n_heads}")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"n_heads = {n_heads} is not a multiple of n_kv_heads = {n_kv_heads}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        ### END SOLUTION

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        rope: Complex[Tensor, "t half_d"] | None = None,
        mask: Bool[Tensor, "... t s"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "b t c"]:
        """Attend from each position of ``x`` to all positions that the mask allows.

        Args:
            x: ``[B, T, C]``.
            rope: Rotations ``[T, D/2]`` of these T positions, for queries and keys; None means no rotation.
                ``apply_rope`` takes ``[B, T, H, D]``, heads after positions, but ``split_heads`` returns
                ``[B, H, T, D]``.
            mask: Boolean, True where a query may attend, broadcast to ``[B, H, T, S]``. None means that every position
                may attend to every other.
                A mask ``[B, T, S]`` does not broadcast: give it a head axis, ``[B, 1, T, S]``.
            cache: Holds the S - T positions before these; the new keys (rotated) and values are appended to it.

        Returns:
            ``[B, T, C]``.
        """
        ### BEGIN SOLUTION
        q, k = split_heads(self.wq(x), self.n_heads), split_heads(self.wk(x), self.n_kv_heads)
        v = split_heads(self.wv(x), self.n_kv_heads)
        if rope is not None:
            q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
        if cache is not None:
            k, v = cache.update(k, v)
        k, v = (repeat_kv(heads, self.n_heads // self.n_kv_heads) for heads in (k, v))
        return self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))
        ### END SOLUTION
