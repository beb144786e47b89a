"""Long sequences: norms on a share of the positions, and attention over a sequence that no rank holds whole."""

import copy
import math

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.attention.blocks import block_backward, block_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.parallel.ring import LAYOUTS, check_ring, check_shares, equal_part, exchange, pass_on
from lib.given.parallel.sharding import all_gather_row, reduce_scatter_row
from lib.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from lib.flash_attention import flash_attention
from lib.gpt2 import Block, gelu_tanh, layer_norm
from lib.tensor_parallel import CopyToRegion


class GatherSequence(torch.autograd.Function):
    """Forward all-gathers the ranks' shares of a sequence; backward reduce-scatters the gradient. (Exercise 18.1)

    Size: 15 minutes, difficulty 2, core.

    Call it as ``GatherSequence.apply(x, dim, group)``; a group of None means all ranks.
    ``x`` is this rank's share, and is left unchanged.
    Each rank uses the whole sequence for a different part of a layer, so the gradients of all ranks must be added.
    Shares of different lengths are a ``ValueError`` with the arithmetic (``check_shares`` raises it).

    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, g in figure 5.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """All shares side by side along ``dim``, in rank order; one all-gather."""
        raise NotImplementedError("Exercise 18.1: write GatherSequence.forward")

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """This rank's share of the sum of all ranks' gradients, and None for ``dim`` and the group.

        One reduce-scatter.
        """
        raise NotImplementedError("Exercise 18.1: write GatherSequence.backward")


class ScatterSequence(torch.autograd.Function):
    """Forward adds up the ranks' tensors and gives each rank its share; backward all-gathers the gradient. (Exercise 18.2)

    Size: 15 minutes, difficulty 2, core.

    Call it as ``ScatterSequence.apply(x, dim, group)``; a group of None means all ranks.
    ``x`` is this rank's part of a sum over the ranks, for the whole sequence, and is left unchanged.
    This is more than a slice: the ranks' tensors are added.
    A length that R does not divide is a ``ValueError`` with the arithmetic (``equal_part`` raises it).

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

    Size: 40 minutes, difficulty 4, core.

    Args:
        block: A ``Block``, whole and the same on every rank, whose parameters are copied.
        group: The R ranks, where None means all ranks.

    Attributes:
        ln_1: The first norm, whole on every rank.
        ln_2: The second norm, whole on every rank.
        attn: As in the ``Block`` (``block.attn.n_heads`` is its number of heads), with this rank's part of each weight.
            ``c_attn`` keeps the rows of its heads' queries, keys and values, with their biases.
        mlp: As in the ``Block``, with this rank's part of each weight; ``c_fc`` keeps its rows, with their biases.

    Each ``c_proj.weight`` keeps its columns.
    Both ``c_proj.bias`` stay whole, and are added once.

    A whole parameter is applied to this rank's positions only, so autograd gives only a part of its gradient.
    The module sums the parts of all ranks before backward ends.

    Raises:
        ValueError: R does not divide the number of heads (``equal_part``, given, raises it with the arithmetic).
    Cost: two all-gathers and two reduce-scatters forward, the same backward: the bytes of four all-reduces.
        Autograd keeps a share of the positions, except for the gathered inputs of ``c_attn`` and ``c_fc``.
    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, figure 5.
    """

    def __init__(self, block: Block, group: dist.ProcessGroup | None = None):
        super().__init__()
        raise NotImplementedError("Exercise 18.3: write SequenceParallelBlock.__init__")

    def forward(self, x: Float[Tensor, "b t_local c"]) -> Float[Tensor, "b t_local c"]:
        """This rank's share ``[B, T/R, C]`` in and out: positions r T/R to (r + 1) T/R - 1 on rank r."""
        raise NotImplementedError("Exercise 18.3: write SequenceParallelBlock.forward")


def heads_to_sequence(x: Float[Tensor, "b t_r h d"], group: dist.ProcessGroup | None) -> Float[Tensor, "b t h_r d"]:
    """Exchange heads for positions: some positions of all heads become all positions of some heads. (Exercise 18.4)

    Size: 20 minutes, difficulty 3, core.

    Args:
        x: ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r.
        group: The R ranks, where None means all ranks.

    Returns:
        ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide H (``equal_part``, given, raises it), or the ranks' shares have different lengths
            (``check_shares``, given, raises it on every rank); the message has the arithmetic.
    Cost: one all-to-all forward and one backward; the given ``exchange`` makes both.
    Source: DeepSpeed-Ulysses (arXiv:2309.14509), section 3.1.
    """
    raise NotImplementedError("Exercise 18.4: write heads_to_sequence")


def sequence_to_heads(x: Float[Tensor, "b t h_r d"], group: dist.ProcessGroup | None) -> Float[Tensor, "b t_r h d"]:
    """Exchange positions for heads: the inverse of ``heads_to_sequence``, at the same cost. (Exercise 18.5)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        x: ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r.
        group: The R ranks, where None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide T (``equal_part``, given, raises it with the arithmetic).
    """
    raise NotImplementedError("Exercise 18.5: write sequence_to_heads")


def ulysses_attention(q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], v: Float[Tensor, "b t g d"],
                      is_causal: bool = False, group: dist.ProcessGroup | None = None
                      ) -> Float[Tensor, "b t h d"]:  # fmt: skip
    """Attention over the whole sequence, in which each rank computes some of the heads. (Exercise 18.6)

    Size: 20 minutes, difficulty 3, core.

    Args:
        q: Queries ``[B, T/R, H, D]`` of positions r T/R to (r + 1) T/R - 1.
        k: Keys ``[B, T/R, G, D]`` of the same positions; G divides H.
        v: Values ``[B, T/R, G, D]``.
            If R does not divide G, each key/value head is repeated, as few times as possible, so that R divides their
            number; the copies of a head stand side by side.
        is_causal: Whether no position attends to a later one.
        group: The R ranks, where None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: the output at this rank's positions.

    Raises:
        ValueError: R does not divide H, or the ranks' shares have different lengths; the message has the arithmetic.
    Cost: four all-to-alls forward and four backward; the attention of H/R heads to T positions, by chapter 15's
        ``flash_attention``.
    """
    raise NotImplementedError("Exercise 18.6: write ulysses_attention")


def merge_attention(o: Float[Tensor, "*n t d"], lse: Float[Tensor, "*n t"], other_o: Float[Tensor, "*n t d"],
                    other_lse: Float[Tensor, "*n t"]
                    ) -> tuple[Float[Tensor, "*n t d"], Float[Tensor, "*n t"]]:  # fmt: skip
    """Attention to two disjoint sets of keys, from the attention to each of them. (Exercise 18.7)

    Size: 25 minutes, difficulty 3, core.

    Args:
        o: Output ``[..., T, D]`` of the attention to some keys.
        lse: Natural logsumexp ``[..., T]`` of each row's scaled scores, -inf for a row that saw no key (its output is
            0).
        other_o: Output of the same queries' attention to the other keys.
        other_lse: Its logsumexp.

    Returns:
        Output and logsumexp of the attention to all the keys: new tensors, the output in the dtype to which PyTorch
        promotes the two outputs, the logsumexp in that of ``lse``.
        A row that saw no key on either side keeps 0 and -inf.
        Nothing else becomes NaN or infinite, gradients included, even for scores of 1e4.

    Source: Milakov and Gimelshein (arXiv:1805.02867), section 3.1, whose operator this is, with the division done.
    """
    raise NotImplementedError("Exercise 18.7: write merge_attention")


def zigzag_indices(length: int, rank: int, n_ranks: int) -> Int[Tensor, " t_local"]:
    """The positions of a rank in zigzag: of 2R equal chunks the early one r and the late one 2R - 1 - r. (Exercise 18.8)

    Size: 15 minutes, difficulty 2, core.

    Args:
        length: Number T of positions.
        rank: The rank r.
        n_ranks: The number R of ranks.

    Returns:
        Positions ``[T/R]``, ascending, int64. Under a causal mask all ranks see equally many keys.

    Raises:
        ValueError: 2R does not divide T (``equal_part``, given, raises it), or there is no such rank.
    """
    raise NotImplementedError("Exercise 18.8: write zigzag_indices")


def zigzag_shard(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's positions of a whole sequence, those of ``zigzag_indices``, without communication. (Exercise 18.9)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        x: A tensor of any dtype, the same on every rank.
        dim: Its dimension that is the sequence, which may be negative.
        group: The R ranks.

    Returns:
        This rank's share. The gradient of ``x`` is this rank's part: zero at all other positions.

    Raises:
        ValueError: 2R does not divide the length (``zigzag_indices`` raises it).
    """
    raise NotImplementedError("Exercise 18.9: write zigzag_shard")


def zigzag_gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole sequence from the ranks' zigzag shares, by one all-gather. (Exercise 18.10)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        x: This rank's share, as ``zigzag_shard`` returns it.
            Shares of different or odd lengths are a ``ValueError`` with the arithmetic.
        dim: As there.
        group: As there.

    Returns:
        The whole sequence in its order, the same on every rank.
        Backward, one reduce-scatter adds the ranks' gradients, as in ``GatherSequence``.
    """
    raise NotImplementedError("Exercise 18.10: write zigzag_gather")


def ring_block(
    rank: int, source: int, length: int, is_causal: bool = False, layout: str = "contiguous"
) -> tuple[slice, slice, bool] | None:
    """Which of a rank's queries attend to which keys of another rank's pair, as one block of attention. (Exercise 18.11)

    Size: 15 minutes, difficulty 2, core.

    Args:
        rank: The rank that computes.
        source: The rank whose keys and values these are.
        length: Positions L = T/R of each.
        is_causal: Whether no position attends to a later one.
        layout: "contiguous": rank r has positions r L to (r + 1) L - 1. "zigzag": those of ``zigzag_indices``.

    Returns:
        ``(queries, keys, masked)``: two slices of the L positions, with explicit bounds, that cover just the scores to
        be computed, and whether they need a causal mask.
        None if there are no scores to compute.

    Raises:
        ValueError: another layout, or an odd length for "zigzag"; the message shows it.
    """
    raise NotImplementedError("Exercise 18.11: write ring_block")


def ring_attention(q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t d"],
                   is_causal: bool = False, group: dist.ProcessGroup | None = None, layout: str = "contiguous"
                   ) -> Float[Tensor, "b h t d"]:  # fmt: skip
    """Attention over the whole sequence, in which keys and values go round a ring of ranks. (Exercise 18.12)

    Size: 40 minutes, difficulty 5, core.

    Args:
        q: Queries ``[B, H, T/R, D]`` of this rank's positions.
        k: Keys ``[B, G, T/R, D]`` of this rank's positions; G divides H.
        v: Values ``[B, G, T/R, D]``.
        is_causal: Whether no position attends to a later one.
        group: The R ranks, where None means all.
        layout: "contiguous" or "zigzag", as in ``ring_block``.

    Returns:
        ``[B, H, T/R, D]``: the output at this rank's positions, in the dtype of ``q``.
        Autograd keeps q, k, v, the output and one logsumexp.
        The output and dq are summed in float32 at least; dK and dV travel, and are summed, in the dtype of ``k``.

    Given: ``block_forward`` and ``block_backward`` compute one block in chapter 15's tiles; ``pass_on`` starts a
        message to the next rank and one from the previous.

    Raises:
        ValueError: shapes or dtypes do not fit, shares differ in length, the layout is unknown, or a share is odd for
            "zigzag" (``check_ring`` raises it).
        RuntimeError: a second derivative is asked for (``first_derivative_only`` raises it).
    Cost: forward, R - 1 pairs of K and V, each sent while the rank computes with it.
        Backward, as many again, and R - 1 pairs of dK and dV in the inputs' dtype, one step behind.
        At most two travelling pairs of K and V are on a rank at any time.
        Only the blocks of ``ring_block`` are computed.
    Source: Ring Attention (arXiv:2310.01889), section 3.
        Striped Attention (arXiv:2311.09431) describes the imbalance under a causal mask.
    """
    check_ring(q, k, v, layout, group)
    raise NotImplementedError("Exercise 18.12: write ring_attention")


def context_parallel_bytes(config, batch: int, length: int, n_ranks: int, kind: str) -> int:
    """Bytes that one rank sends for the attention of all layers in one step, forward and backward. (Exercise 18.13)

    Size: 25 minutes, difficulty 3, core.

    Args:
        config: Sizes with ``dim`` C, ``n_layers`` L, ``n_heads`` H and, if it differs, ``n_kv_heads`` G.
        batch: Sequences B.
        length: Positions T of each, on all ranks together.
        n_ranks: Ranks R.
        kind: "ring" or "ulysses".

    Returns:
        Bytes, an ``int``, with 2 bytes a value, dK and dV included.
        A rank does not send its own part of an all-to-all.
        Repeated heads count as often as they are sent.

    Raises:
        ValueError: ``kind`` is another string (the message shows it), or R does not divide T or, for "ulysses", H
            (``equal_part``, given, raises it with the arithmetic).
    """
    raise NotImplementedError("Exercise 18.13: write context_parallel_bytes")


def hidden_length(config, n_ranks: int, peak_flops: float, bandwidth: float) -> int:
    """From how many positions on each rank the ring's messages are hidden behind its computation. (Exercise 18.14)

    Size: 10 minutes, difficulty 2, stretch.

    Args:
        config: Sizes as for ``context_parallel_bytes``.
        n_ranks: Ranks R.
        peak_flops: FLOP/s that each computes.
        bandwidth: Bytes/s that each sends.

    Returns:
        The smallest T/R with which computing a block of the forward pass, without a mask, takes at least as long as
        sending a pair with 2 bytes a value; 1 if R is 1.

    Source: Ring Attention (arXiv:2310.01889), section 3, "arithmetic intensity between hosts", for G = H.
    """
    raise NotImplementedError("Exercise 18.14: write hidden_length")
