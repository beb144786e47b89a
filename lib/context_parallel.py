"""Long sequences: norms on a share of the positions, and attention over a sequence that no rank holds whole."""

import copy
import math

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.blocks import block_backward, block_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.tiles import check_shapes
from lib.given.parallel.ring import LAYOUTS, check_shares, equal_part, pass_on
from lib.given.parallel.sharding import all_gather_row, reduce_scatter_row
from lib.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from lib.flash_attention import flash_attention
from lib.gpt2 import Block, gelu_tanh, layer_norm
from lib.tensor_parallel import CopyToRegion


class GatherSequence(torch.autograd.Function):
    """Forward all-gathers the ranks' shares of a sequence; backward reduce-scatters the gradient. (Exercise 18.1)

    Call it as ``GatherSequence.apply(x, dim, group)``; a group of None means all ranks. ``x`` is this rank's share, and each rank
    uses the whole sequence for a different part of a layer, so that the gradients of all ranks must be added. It changes nothing in place.

    Raises:
        ValueError: the ranks' shares have different lengths (``check_shares`` raises it).

    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, g in figure 5.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """All shares side by side along ``dim``, in rank order; one all-gather."""
        raise NotImplementedError("Exercise 18.1: write GatherSequence.forward")

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """This rank's share of the sum of all ranks' gradients, and None for ``dim`` and the group; one reduce-scatter."""
        raise NotImplementedError("Exercise 18.1: write GatherSequence.backward")


class ScatterSequence(torch.autograd.Function):
    """Forward adds up the ranks' tensors and gives each rank its share; backward all-gathers the gradient. (Exercise 18.2)

    Call it as ``ScatterSequence.apply(x, dim, group)``; a group of None means all ranks. ``x`` is this rank's part of a sum over the
    ranks, for the whole sequence. This is more than a slice: the ranks' tensors are added. It changes nothing in place.

    Raises:
        ValueError: R does not divide the length; the message has the arithmetic (``equal_part`` raises it).

    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, g-bar in figure 5.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """This rank's share, along ``dim``, of the sum of all ranks' ``x``; one reduce-scatter."""
        raise NotImplementedError("Exercise 18.2: write ScatterSequence.forward")

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The gradients of all shares side by side, and None for ``dim`` and the group; one all-gather."""
        raise NotImplementedError("Exercise 18.2: write ScatterSequence.backward")


class SequenceParallelBlock(nn.Module):
    """Chapter 6's ``Block`` on R ranks: heads and hidden features are cut, and between them the sequence. (Exercise 18.3)

    Args:
        block: A ``Block``, whole and the same on every rank; left unchanged, because its parameters are copied.
        group: The R ranks; None means all ranks.

    Attributes:
        ln_1, ln_2: The norms, whole on every rank.
        attn, mlp: As in the ``Block``, with this rank's part of each weight: in ``c_attn`` the rows of its heads' queries, keys and values,
            in ``c_fc`` its rows, with their biases; in both ``c_proj.weight`` its columns. Both ``c_proj.bias`` are whole, and added once.

    A parameter that is whole on every rank sees only this rank's positions, so its gradient is a part of the sum. The module
    adds the parts of all ranks before backward ends.

    Raises:
        ValueError: R does not divide the number of heads; the message has the arithmetic.

    Cost: forward two all-gathers and two reduce-scatters, backward the same: as many bytes as the four all-reduces of chapter 13's layers. What
        autograd keeps falls to a share, except for the two gathered inputs of the column-parallel layers. (Megatron drops these, and
        gathers them a second time in backward.)
    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, figure 5.
    """

    def __init__(self, block: Block, group: dist.ProcessGroup | None = None):
        super().__init__()
        raise NotImplementedError("Exercise 18.3: write SequenceParallelBlock.__init__")

    def forward(self, x: Float[Tensor, "b t_local c"]) -> Float[Tensor, "b t_local c"]:
        """This rank's share ``[B, T/R, C]`` in and out: positions r T/R to (r + 1) T/R - 1 on rank r."""
        raise NotImplementedError("Exercise 18.3: write SequenceParallelBlock.forward")


def heads_to_sequence(
    x: Float[Tensor, "b t_local h d"], group: dist.ProcessGroup | None
) -> Float[Tensor, "b t h_local d"]:
    """Exchange heads for positions: some positions of all heads become all positions of some heads. (Exercise 18.4)

    Args:
        x: ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r.
        group: The R ranks; None means all ranks.

    Returns:
        ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide H (the message has the arithmetic), or the ranks' shares have different lengths.

    Cost: one all-to-all forward and one backward.
    Source: DeepSpeed-Ulysses (arXiv:2309.14509), section 3.1.
    """
    raise NotImplementedError("Exercise 18.4: write heads_to_sequence")


def sequence_to_heads(
    x: Float[Tensor, "b t h_local d"], group: dist.ProcessGroup | None
) -> Float[Tensor, "b t_local h d"]:
    """Exchange positions for heads: the inverse of ``heads_to_sequence``. (Exercise 18.5)

    Args:
        x: ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r.
        group: The R ranks; None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide T; the message has the arithmetic.

    Cost: one all-to-all forward and one backward.
    """
    raise NotImplementedError("Exercise 18.5: write sequence_to_heads")


def ulysses_attention(
    q: Float[Tensor, "b t_local h d"],
    k: Float[Tensor, "b t_local g d"],
    v: Float[Tensor, "b t_local g d"],
    is_causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "b t_local h d"]:
    """Attention over the whole sequence, in which each rank computes some of the heads. (Exercise 18.6)

    Args:
        q: Queries ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r.
        k, v: Keys and values ``[B, T/R, G, D]`` of the same positions; G divides H. Where R does not divide G, each head of keys and
            values is repeated, as few times as possible, so that R divides their number.
        is_causal: If true, no position attends to a later one.
        group: The R ranks; None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: the output at this rank's positions.

    Raises:
        ValueError: R does not divide H (the message has the arithmetic), or the ranks' shares have different lengths.

    Cost: four all-to-alls forward and four backward; the attention of H/R heads to T positions, by chapter 15's ``flash_attention``.
    Source: DeepSpeed-Ulysses (arXiv:2309.14509), section 3.
    """
    raise NotImplementedError("Exercise 18.6: write ulysses_attention")


def merge_attention(
    o: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    other_o: Float[Tensor, "*lead t d"],
    other_lse: Float[Tensor, "*lead t"],
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Attention to two disjoint sets of keys, from the attention to each of them. (Exercise 18.7)

    Args:
        o, other_o: Outputs ``[..., T, D]`` of the same queries.
        lse, other_lse: Natural logsumexp ``[..., T]`` of each row's scaled scores; -inf for a row that saw no key, whose output is 0.

    Returns:
        Output and logsumexp of the attention to all the keys: new tensors in the dtype to which PyTorch promotes the two
        outputs', and that of ``lse``. A row that saw no key on either side keeps 0 and -inf. Numbers and gradients are finite where the inputs are,
        and never NaN, also for scores of 1e4.

    Source: Milakov and Gimelshein (arXiv:1805.02867), section 3.1, whose operator this is, with the division done.
    """
    raise NotImplementedError("Exercise 18.7: write merge_attention")


def zigzag_indices(length: int, rank: int, n_ranks: int) -> Int[Tensor, " t_local"]:
    """The positions of a rank if the sequence is dealt out in zigzag. (Exercise 18.8)

    The sequence is cut into 2R equal chunks. Rank r has chunk r and chunk 2R - 1 - r: one early, with little to attend to under a causal
    mask, and one late, with much.

    Args:
        length: Number T of positions.
        rank, n_ranks: The rank r and the number R of ranks.

    Returns:
        Positions ``[T/R]``, ascending, int64.

    Raises:
        ValueError: 2R does not divide T (the message has the arithmetic), or there is no such rank.
    """
    raise NotImplementedError("Exercise 18.8: write zigzag_indices")


def zigzag_shard(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's positions of a whole sequence, in zigzag. (Exercise 18.9)

    Args:
        x: A tensor of any dtype, the same on every rank, whose dimension ``dim`` is the sequence.
        dim: May be negative.
        group: The R ranks; None means all ranks.

    Returns:
        The positions of ``zigzag_indices``. The gradient of ``x`` is this rank's part: zero at all other positions.

    Raises:
        ValueError: 2R does not divide the length; the message has the arithmetic.

    Cost: no communication.
    """
    raise NotImplementedError("Exercise 18.9: write zigzag_shard")


def zigzag_gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole sequence from the ranks' zigzag shares. (Exercise 18.10)

    Args:
        x: This rank's share, as ``zigzag_shard`` gives it.
        dim: The dimension of the sequence; may be negative.
        group: The R ranks; None means all ranks.

    Returns:
        The whole sequence in its order, the same on every rank. Its gradient is this rank's share of the sum of all ranks'
        gradients, as with ``GatherSequence``.

    Raises:
        ValueError: the ranks' shares have different or odd lengths; the message has the arithmetic.

    Cost: one all-gather forward, one reduce-scatter backward.
    """
    raise NotImplementedError("Exercise 18.10: write zigzag_gather")


def ring_block(
    rank: int, source: int, length: int, is_causal: bool = False, layout: str = "contiguous"
) -> tuple[slice, slice, bool] | None:
    """Which of a rank's queries attend to which keys of another rank's pair, as one block of attention. (Exercise 18.11)

    Args:
        rank: The rank that computes.
        source: The rank whose keys and values these are.
        length: Positions on each rank, L = T/R; even for "zigzag".
        is_causal: Whether no position attends to a later one.
        layout: "contiguous": rank r has positions r L to (r + 1) L - 1. "zigzag": those of ``zigzag_indices``.

    Returns:
        ``(queries, keys, masked)``: two slices of the L local positions, with explicit bounds, and whether a causal mask covers the block. Every
        query of a block without a mask sees all of the block's keys, and no query outside of the block sees any of the pair's keys. None if there is nothing to compute.

    Raises:
        ValueError: another layout (the message shows it), or an odd length for "zigzag".
    """
    raise NotImplementedError("Exercise 18.11: write ring_block")


def ring_attention(
    q: Float[Tensor, "b h t_local d"],
    k: Float[Tensor, "b g t_local d"],
    v: Float[Tensor, "b g t_local d"],
    is_causal: bool = False,
    group: dist.ProcessGroup | None = None,
    layout: str = "contiguous",
) -> Float[Tensor, "b h t_local d"]:
    """Attention over the whole sequence, in which keys and values go round a ring of ranks. (Exercise 18.12)

    Args:
        q: Queries ``[B, H, T/R, D]`` of this rank's positions.
        k, v: Keys and values ``[B, G, T/R, D]`` of the same positions; G divides H.
        is_causal: If true, no position attends to a later one.
        group: The R ranks; None means all ranks.
        layout: "contiguous" (rank r has positions r T/R to (r + 1) T/R - 1) or "zigzag" (those of ``zigzag_indices``).

    Returns:
        ``[B, H, T/R, D]``: the output at this rank's positions, in the dtype of ``q``. Autograd keeps q, k, v, the output and one logsumexp.

    Given: ``block_forward`` and ``block_backward`` compute one block in chapter 15's tiles, the latter from the output and the logsumexp of whole
        rows; ``pass_on`` starts two messages, to the next rank and from the previous one.

    Raises:
        ValueError: the shapes or dtypes do not fit, the ranks' shares have different lengths, the layout is unknown, or a share is odd for "zigzag".

    Cost: forward, R - 1 pairs of K and V sent, each while the rank computes with it. Backward, the same again, and R - 1 pairs of dK and dV
        in the inputs' dtype, which follow one step behind. No more than two travelling pairs of K and V on a rank at any time, and only the blocks of ``ring_block``.
    Source: Ring Attention (arXiv:2310.01889), section 3; zigzag: Striped Attention (arXiv:2311.09431) describes the imbalance.
    """
    check_shapes(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} queries and {k.shape[-2]} keys on a rank: expected the same positions")
    ring_block(0, 0, q.shape[-2], is_causal, layout)
    check_shares(q.shape[-2], q.device, group)
    raise NotImplementedError("Exercise 18.12: write ring_attention")


def context_parallel_bytes(config, batch: int, length: int, n_ranks: int, kind: str) -> int:
    """Bytes that one rank sends for the attention of all layers in one step, forward and backward. (Exercise 18.13)

    Args:
        config: Sizes with ``dim`` C, ``n_layers`` L and ``n_heads`` H, such as a ``LlamaConfig`` or a ``GPT2Config``. Without ``n_kv_heads``, G is H.
        batch, length, n_ranks: Sequences B; positions T of each, on all ranks together; ranks R.
        kind: "ring" or "ulysses".

    Returns:
        Bytes, an ``int``, with 2 bytes a value, dK and dV included. A rank does not send its own part of an all-to-all. Heads that ``ulysses_attention``
        repeats are sent as often as it repeats them.

    Raises:
        ValueError: another kind (the message shows it), R does not divide T, or for "ulysses" H; the message has the arithmetic.
    """
    raise NotImplementedError("Exercise 18.13: write context_parallel_bytes")


def hidden_length(config, n_ranks: int, peak_flops: float, bandwidth: float) -> int:
    """From how many positions on each rank the ring's messages are hidden behind its computation. (Exercise 18.14)

    Args:
        config: Sizes with ``n_heads`` H, and ``n_kv_heads`` G if it differs from H.
        n_ranks: Number R of ranks; a ring of one sends nothing.
        peak_flops: FLOPs that a rank computes each second.
        bandwidth: Bytes that a rank sends each second.

    Returns:
        The smallest local length T/R with which computing a block of the forward pass, without a mask, takes at least as long as sending a pair
        with 2 bytes a value; 1 if there is nothing to send.

    Source: Ring Attention (arXiv:2310.01889), section 3, "arithmetic intensity between hosts", for G = H.
    """
    raise NotImplementedError("Exercise 18.14: write hidden_length")
