"""Attention with a state: a sum of outer products that decays, corrects itself, and crosses chunks and ranks."""

from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lib.given.kernels.mode import tl, triton
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.states import check_chunk, check_sequence, state_tiles

# ---- 24.1 ------------------------------------------------------------------------------------------------------------


def linear_attention_recurrent(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """Attention without a softmax, one position after the other. (Exercise 24.1)

    Size: 20 minutes, difficulty 2, core.

    Args:
        q, k: Queries and keys.
        v: Values.
        g: Natural logarithm of the decay, at most 0: one a head, or one for each feature of the key. None is no decay.
        scale: Factor of the queries. None means ``Dk ** -0.5``.
        initial_state: The state before the first position. None means zeros.

    Returns:
        The outputs in the dtype of ``q``, and the state after the last position. Everything is summed in float32
        (float64 for float64), which is the state's dtype. T may be 0. Differentiable in all tensors.

    Raises:
        ValueError: shapes do not fit (``check_sequence`` raises it).
    Convention: decay first, then write, then read; so position t reads its own value.
    Source: equation (24.2); Katharopoulos and others (arXiv:2006.16236), without the normaliser.
    """
    check_sequence(q, k, v, g, initial_state=initial_state)
    raise NotImplementedError("Exercise 24.1: write linear_attention_recurrent")


# ---- 24.2 ------------------------------------------------------------------------------------------------------------


def linear_attention_chunked(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The recurrence's numbers from products of matrices, one chunk of positions at a time. (Exercise 24.2)

    Size: 45 minutes, difficulty 4, core.

    Args:
        q, k, v, g, scale, initial_state: As for ``linear_attention_recurrent``.
        chunk_size: Positions C of a chunk; the last chunk may have fewer.

    Returns:
        Outputs and state, as ``linear_attention_recurrent`` returns them.

    Raises:
        ValueError: shapes do not fit, or ``chunk_size`` is below 1 (``check_sequence`` raises it).
    Cost: T/C steps that depend on each other, each of a few operators. No tensor of T x T numbers, nor of a state for
        every position. With a decay for each feature, tensors of C x T x Dk numbers a head are allowed.
    Convention: only differences that are at most 0 are exponentiated, so nothing overflows, gradients included.
    Source: equations (24.4) to (24.6); GLA (arXiv:2312.06635); Mamba-2 (arXiv:2405.21060).
    """
    check_sequence(q, k, v, g, initial_state=initial_state, chunk_size=chunk_size)
    raise NotImplementedError("Exercise 24.2: write linear_attention_chunked")


# ---- 24.3 ------------------------------------------------------------------------------------------------------------


def delta_rule_recurrent(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "b t h"], g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    scale: float | None = None, initial_state: Float[Tensor, "b h dk dv"] | None = None
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """A state that corrects itself: each position writes what the state would get wrong about its value. (Exercise 24.3)

    Size: 20 minutes, difficulty 3, core.

    Args:
        q, v, g, scale, initial_state: As for ``linear_attention_recurrent``.
        k: Keys, as they are: if you want unit keys, norm them before.
        beta: Share of the error that is corrected, one a head.

    Returns:
        Outputs and state, in the dtypes of ``linear_attention_recurrent``.

    Raises:
        ValueError: shapes do not fit (``check_sequence`` raises it).
    Source: equation (24.8); DeltaNet (arXiv:2406.06484); with g Gated DeltaNet (arXiv:2412.06464),
        with g of each feature Kimi Linear (arXiv:2510.26692).
    """
    check_sequence(q, k, v, g, beta, initial_state)
    raise NotImplementedError("Exercise 24.3: write delta_rule_recurrent")


# ---- 24.4 ------------------------------------------------------------------------------------------------------------


def wy_representation(
    k: Float[Tensor, "*lead c dk"],
    v: Float[Tensor, "*lead c dv"],
    beta: Float[Tensor, "*lead c"],
    g: Float[Tensor, "*lead c"] | Float[Tensor, "*lead c dk"] | None = None,
) -> tuple[Float[Tensor, "*lead c dk"], Float[Tensor, "*lead c dv"]]:
    """All corrections of a chunk at once, whatever the state before it. (Exercise 24.4)

    Size: 40 minutes, difficulty 4, core.

    Args:
        k, v, beta: Keys, values and shares of the C positions of a chunk.
        g: Natural logarithm of each position's decay, one a head or one for each feature of the key; None is no decay.

    Returns:
        w and u, in float32 (float64 for float64): with the state S before the chunk, row t of ``u - w @ S`` is what
        ``delta_rule_recurrent`` multiplies k_t with at position t.

    Raises:
        ValueError: shapes do not fit (``check_chunk`` raises it).
    Cost: one triangular solve for both; no inverse of a full matrix.
    Source: equation (24.10); DeltaNet (arXiv:2406.06484); with g Gated DeltaNet (arXiv:2412.06464).
    """
    check_chunk(k, v, beta, g)
    raise NotImplementedError("Exercise 24.4: write wy_representation")


# ---- 24.5 ------------------------------------------------------------------------------------------------------------


def delta_rule_chunked(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "b t h"], g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    scale: float | None = None, initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The delta rule's numbers from products of matrices. (Exercise 24.5)

    Size: 30 minutes, difficulty 4, core.

    Args:
        q, k, v, beta, g, scale, initial_state: As for ``delta_rule_recurrent``.
        chunk_size: Positions C of a chunk; the last chunk may have fewer.

    Returns:
        Outputs and state, as ``delta_rule_recurrent`` returns them.

    Raises:
        ValueError: shapes do not fit, or ``chunk_size`` is below 1 (``check_sequence`` raises it).
    Cost: ``wy_representation`` of all chunks at once, then T/C steps that depend on each other. Sizes of tensors, and
        what is exponentiated, are as in ``linear_attention_chunked``.
    Source: equation (24.11); DeltaNet (arXiv:2406.06484).
    """
    check_sequence(q, k, v, g, beta, initial_state, chunk_size)
    raise NotImplementedError("Exercise 24.5: write delta_rule_chunked")


# ---- 24.6 ------------------------------------------------------------------------------------------------------------


def short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c k"], bias: Float[Tensor, " c"] | None = None,
    initial_state: Float[Tensor, "b k_1 c"] | None = None, activation: str | None = "silu"
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b k_1 c"]]:  # fmt: skip
    """Each channel's weighted sum over its last K inputs. (Exercise 24.6)

    Size: 20 minutes, difficulty 2, warm-up.

    Args:
        x: Inputs of C channels.
        weight: K weights a channel; the last column multiplies the present input.
        bias: Added to the sum.
        initial_state: The K - 1 inputs before the first; None means zeros.
        activation: "silu", applied after the bias, or None.

    Returns:
        The outputs in the dtype of ``x``; and the last K - 1 inputs, those of ``initial_state`` included where T is
        shorter, in memory of their own. T may be 0.

    Raises:
        ValueError: another activation; the message shows it.
    Source: equation (24.12).
    """
    raise NotImplementedError("Exercise 24.6: write short_convolution")


# ---- 24.7 ------------------------------------------------------------------------------------------------------------


@dataclass
class DeltaCache:
    """What a `GatedDeltaNet` remembers of the positions that it has seen; its size does not depend on their number."""

    conv_state: Float[Tensor, "b k_1 channels"]
    recurrent_state: Float[Tensor, "b hv dk dv"]
    length: int = 0


class GatedDeltaNet(nn.Module):
    """Qwen3-Next's linear layer: short convolutions, unit keys, the gated delta rule, a gated norm. (Exercise 24.7)

    Size: 60 minutes, difficulty 4, core.

    Args:
        dim: Width C of the model.
        n_k_heads: Heads Hk of queries and keys.
        n_v_heads: Heads Hv of values; key head j serves the r = Hv/Hk value heads j r to (j + 1) r - 1.
        head_k_dim: Width Dk of queries and keys.
        head_v_dim: Width Dv of values.
        conv_kernel_size: Inputs K that an output of the convolution sees.
        eps: Epsilon of the output's norm.
        chunk_size: As for ``delta_rule_chunked``.

    Attributes, none of them with a bias:
        in_proj_qkvz: For each key head the rows of its query, its key, its r values, and their r gates z.
        in_proj_ba: For each key head the rows of its r b, then of its r a.
        conv1d: Weight ``[2 Hk Dk + Hv Dv, 1, K]`` over all queries, then all keys, then all values.
        dt_bias, A_log: ``[Hv]``, of the decay.
        norm: Weight ``[Dv]``, 1 at first.
        out_proj: From the ``Hv Dv`` features of all heads to C.

    - SiLU follows the convolution. Queries and keys are then divided by ``sqrt(sum of squares + 1e-6)``.
    - ``beta = sigmoid(b)``, ``g = -exp(A_log) * softplus(a + dt_bias)``.
    - Each head's output passes an RMSNorm over Dv, then is multiplied by ``norm.weight`` and by ``silu(z)``.
    - Projections and convolution are in the dtype of ``x``; all between them and ``out_proj`` is in float32 (float64
      for float64).

    Raises:
        ValueError: Hv is no multiple of Hk; the message names both.
    Source: equation (24.13); Gated DeltaNet (arXiv:2412.06464); Transformers' Qwen3NextGatedDeltaNet.
    """

    def __init__(
        self, dim: int, n_k_heads: int, n_v_heads: int, head_k_dim: int, head_v_dim: int,
        conv_kernel_size: int = 4, eps: float = 1e-6, chunk_size: int = 64
    ):  # fmt: skip
        super().__init__()
        if n_v_heads % n_k_heads:
            raise ValueError(f"n_v_heads = {n_v_heads} is no multiple of n_k_heads = {n_k_heads}")
        self.n_k_heads, self.n_v_heads, self.head_k_dim, self.head_v_dim = n_k_heads, n_v_heads, head_k_dim, head_v_dim
        self.eps, self.chunk_size = eps, chunk_size
        keys, values = n_k_heads * head_k_dim, n_v_heads * head_v_dim
        self.in_proj_qkvz = nn.Linear(dim, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(dim, 2 * n_v_heads, bias=False)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel_size, groups=channels, bias=False)
        step = (
            torch.empty(n_v_heads).uniform_(-6.9, -2.3).exp()
        )  # heads that forget over 10 to 1000 positions, and A times faster
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.empty(n_v_heads).uniform_(1, 16).log())
        self.norm = nn.RMSNorm(head_v_dim, eps)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def make_cache(self, batch: int, dtype: torch.dtype = torch.float32, device=None) -> DeltaCache:
        """A cache of zeros, for no positions yet.

        ``conv_state`` is ``[B, K - 1, 2 Hk Dk + Hv Dv]`` in ``dtype``. ``recurrent_state`` is ``[B, Hv, Dk, Dv]`` in
        float32 (float64 for float64).
        """
        raise NotImplementedError("Exercise 24.7: write GatedDeltaNet.make_cache")

    def forward(self, x: Float[Tensor, "b t c"], cache: DeltaCache | None = None) -> Float[Tensor, "b t c"]:
        """The layer's output. With a cache, go on from its states and write them in place; its memory never moves.

        T = 1 is one step of ``delta_rule_recurrent``; more positions are chunked. T may be 0.
        T is added to the cache's ``length``.
        A cache is for decoding, without gradients: what is overwritten cannot be differentiated. It keeps no graph.
        """
        raise NotImplementedError("Exercise 24.7: write GatedDeltaNet.forward")


# ---- 24.8 ------------------------------------------------------------------------------------------------------------


def hybrid_cache_bytes(config, batch: int, length: int, bytes_per_value=2, state_bytes_per_value=4) -> int:
    """Bytes that all layers remember of ``batch`` sequences of ``length`` positions. (Exercise 24.8)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Sizes by attribute: ``layer_types``, and what its kinds need.

            - "full_attention": ``n_kv_heads`` G and ``head_dim`` D.
            - "linear_attention": ``linear_num_key_heads`` Hk, ``linear_num_value_heads`` Hv, ``linear_key_head_dim``
              Dk, ``linear_value_head_dim`` Dv and ``linear_conv_kernel_dim`` K.
        batch: Number of sequences.
        length: Positions of each.
        bytes_per_value: Of keys, values and the convolution's inputs.
        state_bytes_per_value: Of the recurrent state.

    Returns:
        The sum of equation (24.14) over the layers, for all sequences.

    Raises:
        ValueError: another kind of layer; the message shows it.
    """
    raise NotImplementedError("Exercise 24.8: write hybrid_cache_bytes")


# ---- 24.9 ------------------------------------------------------------------------------------------------------------


def crossing_length(config, bytes_per_value=2, state_bytes_per_value=4) -> int:
    """The smallest length at which one full layer holds more bytes than one linear layer. (Exercise 24.9)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        config: Sizes by attribute, as for ``hybrid_cache_bytes``; ``layer_types`` is not read.
        bytes_per_value: Of keys, values and the convolution's inputs.
        state_bytes_per_value: Of the recurrent state.

    Returns:
        A number of positions: 1049 for Qwen3-Next.
    """
    raise NotImplementedError("Exercise 24.9: write crossing_length")


# ---- 24.10 -----------------------------------------------------------------------------------------------------------


def scan_states(
    state: Float[Tensor, "b h dk dv"],
    log_decay: Float[Tensor, "b h"] | Float[Tensor, "b h dk"],
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "b h dk dv"]:
    """The state before this rank's first position, from what each rank's positions build from zero. (Exercise 24.10)

    Size: 35 minutes, difficulty 4, core.

    Args:
        state: What this rank's positions build from a state of zeros.
        log_decay: Sum of their g, one a head or one for each feature of the key.
        group: The R ranks, whose peers are counted within the group; None means all ranks.

    Returns:
        Zeros on rank 0. On rank r + 1, the state before rank r times ``exp(log_decay)`` of rank r, plus ``state`` of
        rank r. Differentiable in ``state`` and ``log_decay``; every rank calls backward.

    Raises:
        RuntimeError: a second derivative is asked for (``first_derivative_only`` raises it).
    Cost: forward, one message of one state to the next rank, and none from the last. Backward, one of the same size to
        the previous rank, and none from the first. No collective.
    Source: equation (24.16); LASP (arXiv:2404.02882).
    """
    raise NotImplementedError("Exercise 24.10: write scan_states")


# ---- 24.11 -----------------------------------------------------------------------------------------------------------


def sequence_parallel_linear_attention(
    q: Float[Tensor, "b t_r h dk"], k: Float[Tensor, "b t_r h dk"], v: Float[Tensor, "b t_r h dv"],
    g: Float[Tensor, "b t_r h"] | Float[Tensor, "b t_r h dk"] | None = None, scale: float | None = None,
    group: dist.ProcessGroup | None = None, chunk_size: int = 64
) -> Float[Tensor, "b t_r h dv"]:  # fmt: skip
    """Linear attention over a sequence whose parts are on R ranks. (Exercise 24.11)

    Size: 25 minutes, difficulty 3, core.

    Args:
        q, k, v, g: As for ``linear_attention_chunked``, at this rank's positions r T/R to (r + 1) T/R - 1.
        scale, chunk_size: As there.
        group: The R ranks; None means all ranks.

    Returns:
        The output at this rank's positions, as if one process had the whole sequence; gradients of q, k, v and g, too.

    Cost: the messages of ``scan_states``, forward and backward. A rank does its own positions' work before it waits.
    Source: equation (24.17); LASP (arXiv:2404.02882).
    """
    raise NotImplementedError("Exercise 24.11: write sequence_parallel_linear_attention")


# ---- 24.12 -----------------------------------------------------------------------------------------------------------


@triton.jit
def chunk_linear_attention_kernel(
    q, k, v, g, state, o, T, H, Dk, Dv, scale,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, gb, gt, gh,
    DECAYS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Program (i, j) walks the chunks of head ``i % H`` of sequence ``i // H``, for SLICE features from j SLICE.

    - Number (b, t, h, d) of q is ``b * qb + t * qt + h * qh + d * qd`` elements after the pointer; k, v and, if
      DECAYS, g likewise.
    - o ``[B, T, H, Dv]`` and the float32 state ``[B, H, Dk, Dv]`` are contiguous. A program reads its part of the state
      first, and writes it at the end.
    - CHUNK is the number of positions of a chunk. WIDTH, a power of two, holds Dk.
    """


def chunk_linear_attention(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The chunked form in one kernel, in which a program keeps its part of the state on the chip. (Exercise 24.12)

    Size: 60 minutes, difficulty 5, stretch.

    Args:
        q, k, v: float32, float16 or, on a GPU, bfloat16; any strides; Dk and Dv up to 256.
        g: One decay a head, in any floating-point dtype and with any strides; None is no decay.
        scale, initial_state: As for ``linear_attention_recurrent``.
        chunk_size: A power of two of at least 16.

    Returns:
        New tensors: the outputs in the dtype of ``q``, contiguous, and the last state in float32. Sums, decays and the
        state are float32, and products of float32 are true float32 (no TF32). Forward only: there is no gradient.

    Raises:
        ValueError: ``state_tiles`` raises it, for shapes or dtypes that do not fit, a g for each feature or another
            chunk size.
    Cost: one launch, no product by PyTorch, no copy of q, k, v or g. Program (i, j) is described at the kernel.
    """
    tiles = state_tiles(q, k, v, g, initial_state, chunk_size)
    raise NotImplementedError("Exercise 24.12: write chunk_linear_attention")
