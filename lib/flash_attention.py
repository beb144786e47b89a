"""FlashAttention: exact attention in tiles, forward and backward, in PyTorch and in Triton."""

import torch
from jaxtyping import Float
from torch import Tensor

from lib.fast.attention.flash import fits_fast, flash_attention_fast
from lib.given.kernels.launch import launch_backward_dkdv, launch_backward_dq, launch_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.tiles import HAS_TRITON, LN2, LOG2E, fold_groups, hide_later, take_tile, tile_slices, tl, triton


def attention_io_bytes(length: int, head_dim: int, sram_bytes: int, algorithm: str) -> int:
    """Bytes that the forward pass of one head moves between the chip and main memory. (Exercise 15.1)

    Size: 20 minutes, difficulty 2, core.

    Args:
        length: Number N of queries, and of keys.
        head_dim: Width d of the head.
        sram_bytes: Size of the on-chip memory, which holds M = sram_bytes // 2 numbers of 2 bytes.
        algorithm: "standard", the paper's Algorithm 0, or "flash", its Algorithm 1 with blocks of ceil(M / 4d) keys.

    Returns:
        Two bytes for each number of equation (15.1) or (15.2).

    Raises:
        ValueError: another algorithm (the message shows it), ``length`` or ``head_dim`` below 1, ``sram_bytes`` below
            2.

    Source: FlashAttention (arXiv:2205.14135), Algorithms 0 and 1, Theorem 2.
    """
    raise NotImplementedError("Exercise 15.1: write attention_io_bytes")


def online_softmax_update(
    m: Float[Tensor, "*lead r"],
    l: Float[Tensor, "*lead r"],
    acc: Float[Tensor, "*lead r d"],
    scores: Float[Tensor, "*lead r c"],
    values: Float[Tensor, "*lead c d"],
) -> tuple[Float[Tensor, "*lead r"], Float[Tensor, "*lead r"], Float[Tensor, "*lead r d"]]:
    """Add one more tile of keys to a softmax that has seen only part of its row. (Exercise 15.2)

    Size: 20 minutes, difficulty 3, core.

    Args:
        m: Largest score of each row so far; -inf before the first tile.
        l: Sum of exp(score - m) so far; 0 before the first tile.
        acc: Sum of exp(score - m) * value so far, not yet divided by l.
        scores: Scaled scores of the new tile; -inf where a key is hidden.
        values: Values of the tile's keys, in any floating-point dtype; cast to that of acc for their product with the
            weights.

    Returns:
        New tensors m, l and acc; the old ones stay unchanged. A row that has seen no key keeps -inf, 0 and 0.

    Source: equation (15.3); Milakov and Gimelshein (arXiv:1805.02867), Algorithm 3.
    """
    raise NotImplementedError("Exercise 15.2: write online_softmax_update")


class FlashAttentionTorch(torch.autograd.Function):
    """Attention in tiles, in PyTorch: ``FlashAttentionTorch.apply(q, k, v, is_causal)``. (Exercise 15.3)

    Size: 30 minutes, difficulty 3, core.

    Args:
        q: Queries [..., T, D].
        k, v: Keys and values [..., S, D]. q may have a multiple of their number of heads.
        is_causal: If true, query t sees the keys up to t + S - T. A row without keys gives zeros.

    ``forward`` saves q, k, v, the output and exactly one more tensor [..., T]: the natural logsumexp of each row's
    scaled scores, in float32 (float64 for float64), -inf for a row without keys.
    It never makes a tensor of a quarter of T x S numbers, keeps sums in float32 at least, even under autocast, makes
    its tensors on the device of q, and skips tiles above the diagonal.
    ``backward`` is given, and calls `flash_backward`: checks of gradients wait for exercise 15.4.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit (`fold_groups` raises it).
        RuntimeError: somebody asks for a second derivative (`first_derivative_only` raises it).

    Source: equations (15.3) and (15.4); FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        raise NotImplementedError("Exercise 15.3: write FlashAttentionTorch.forward")

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return (*flash_backward(q, k, v, o, do, lse, ctx.is_causal), None)


def flash_backward(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    o: Float[Tensor, "*lead t d"],
    do: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    is_causal: bool,
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead_kv s d"], Float[Tensor, "*lead_kv s d"]]:
    """Gradients of attention, from tiles of weights that are computed again. (Exercise 15.4)

    Size: 35 minutes, difficulty 4, core.

    Args:
        q, k, v, is_causal: The inputs of the forward pass; several query heads may share a key/value head.
        o: The output, with any strides.
        do: The gradient of the loss with respect to it, with any strides.
        lse: Natural logsumexp of each row's scaled scores; -inf for a row without keys, whose gradient is 0.

    Returns:
        dq, dk, dv, shaped and typed as q, k, v, on their device; no tensor of a quarter of T x S numbers is made; sums
        in float32 at least, even under autocast.

    Source: equations (15.6) and (15.7); FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    raise NotImplementedError("Exercise 15.4: write flash_backward")


@triton.jit
def flash_forward_kernel(q, k, v, o, lse, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                         ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Output and logsumexp of one tile of queries; the grid is (query heads, tiles of queries). (Exercise 15.5)

    Size: 60 minutes, difficulty 5, core.

    Args:
        q, k, v, o: Pointers to contiguous tensors: q and o [heads, T, D], k and v [heads / GROUP, S, D].
        lse: Pointer to float32 [heads, T]: the natural logsumexp, -inf for a row without keys (whose output is 0).
        T, S, scale: Numbers of queries and of keys, both arbitrary; and the factor of the scores.
        GROUP: Query heads that share a key/value head: head h, counted through all batches, reads the keys of h //
            GROUP.
        D, WIDTH: Width of a head, and the power of two that holds it.
        ROWS, COLS, CAUSAL: Queries and keys in a tile. If CAUSAL, query t sees the keys up to t + S - T.

    Returns:
        Nothing.
        Writes o and lse; touches nothing outside the tensors; skips tiles of keys that none of its queries sees; masks
        no score in tiles that all see.
        Sums in float32; no TF32; weights are cast to v's dtype before their product.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1; equations (15.3) to (15.5).
    """
    raise NotImplementedError("Exercise 15.5: write flash_forward_kernel")


@triton.jit
def flash_backward_dq_kernel(q, k, v, o, do, lse, delta, dq, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr,
                             WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Gradient of one tile of queries; the grid is (query heads, tiles of queries). (Exercise 15.6)

    Size: 50 minutes, difficulty 5, core.

    Args:
        o, do: Pointers to the output and its gradient, [heads, T, D].
        lse: Pointer to the natural logsumexp [heads, T]; -inf for a row without keys, whose gradient is 0.
        delta, dq: Pointers to the results: each row's sum of o * do, float32 [heads, T], and the gradient [heads, T,
            D].

    Returns:
        Nothing.
        Writes delta and dq, each number from one program, without atomics.
        All else is `flash_forward_kernel`'s.
    """
    raise NotImplementedError("Exercise 15.6: write flash_backward_dq_kernel")


@triton.jit
def flash_backward_dkdv_kernel(q, k, v, do, lse, delta, dk, dv, T, S, scale, GROUP: tl.constexpr, D: tl.constexpr,
                               WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                             CAUSAL: tl.constexpr):  # fmt: skip
    """Gradients of one tile of keys and values; the grid is (key/value heads, tiles of keys). (Exercise 15.7)

    Size: 60 minutes, difficulty 5, core.

    Args:
        do, lse, delta: Pointers to the output's gradient, the natural logsumexp and the row sums of o * do.
        dk, dv: Pointers to the results [heads / GROUP, S, D], summed over the query heads that share the keys.

    Returns:
        Nothing.
        Writes dk and dv, each number from a single program, without atomics.
        Skips tiles of queries that see none of its keys.
        The other arguments, and what holds for sums and products, are those of `flash_forward_kernel`.
    """
    raise NotImplementedError("Exercise 15.7: write flash_backward_dkdv_kernel")


class FlashAttentionTriton(torch.autograd.Function):
    """Attention by the three kernels, as one step of autograd. (Exercise 15.8)

    Size: 25 minutes, difficulty 3, core.

    Arguments, results, errors and saved tensors are those of `FlashAttentionTorch`, for float32, float16 and bfloat16.
    `launch_forward`, `launch_backward_dq` and `launch_backward_dkdv` choose the tiles and launch a kernel.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        raise NotImplementedError("Exercise 15.8: write FlashAttentionTriton.forward")

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        raise NotImplementedError("Exercise 15.8: write FlashAttentionTriton.backward")


def flash_attention(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    is_causal: bool = False,
) -> Float[Tensor, "*lead t d"]:
    """Attention by the fastest implementation that can compute it. (Exercise 15.9)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        q, k, v, is_causal: As for `FlashAttentionTorch`.
            Under autocast they are cast to its dtype first, except float64.

    Returns:
        The output of `flash_attention_fast` where `fits_fast` says so; of `FlashAttentionTriton` for other GPU tensors
        of 16 or 32 bits and at most 256 features; else of `FlashAttentionTorch`, whose errors are raised.
    """
    raise NotImplementedError("Exercise 15.9: write flash_attention")
