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
from solutions.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from solutions.flash_attention import flash_attention
from solutions.gpt2 import Block, gelu_tanh, layer_norm
from solutions.tensor_parallel import CopyToRegion


class GatherSequence(torch.autograd.Function):
    """Forward all-gathers the ranks' shares of a sequence; backward reduce-scatters the gradient. (Exercise)

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
        ### BEGIN SOLUTION
        ctx.dim, ctx.group = dim, group
        check_shares(x.shape[dim], x.device, group)
        shares = x.new_empty((dist.get_world_size(group), *x.shape))
        all_gather_row(shares.view(-1), x.contiguous().view(-1), group)
        return torch.cat(shares.unbind(), dim)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """This rank's share of the sum of all ranks' gradients, and None for ``dim`` and the group.

        One reduce-scatter.
        """
        ### BEGIN SOLUTION
        return ScatterSequence.apply(grad, ctx.dim, ctx.group), None, None
        ### END SOLUTION


class ScatterSequence(torch.autograd.Function):
    """Forward adds up the ranks' tensors and gives each rank its share; backward all-gathers the gradient. (Exercise)

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
        ### BEGIN SOLUTION
        ctx.dim, ctx.group, n_ranks = dim, group, dist.get_world_size(group)
        equal_part(x.shape[dim], n_ranks, f"dimension {dim}")
        shares = torch.stack(x.chunk(n_ranks, dim))
        mine = torch.empty_like(shares[0])
        reduce_scatter_row(mine.view(-1), shares.view(-1), group)
        return mine
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The gradients of all shares side by side, and None for ``dim`` and the group; one all-gather."""
        ### BEGIN SOLUTION
        return GatherSequence.apply(grad, ctx.dim, ctx.group), None, None
        ### END SOLUTION


class SequenceParallelBlock(nn.Module):
    """Chapter 6's ``Block`` on R ranks: heads and hidden features are cut, and between them the sequence. (Exercise)

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
        ### BEGIN SOLUTION
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.n_local_heads = group, equal_part(block.attn.n_heads, n_ranks, "n_heads")
        block = copy.deepcopy(block)
        self.ln_1, self.attn, self.ln_2, self.mlp = block.ln_1, block.attn, block.ln_2, block.mlp

        def part(x: Tensor, dim: int = 0, sections: int = 1) -> nn.Parameter:
            cut = x.detach().unflatten(dim, (sections, n_ranks, -1)).select(dim + 1, rank)
            return nn.Parameter(cut.flatten(dim, dim + 1).clone())

        for linear, sections in ((self.attn.c_attn, 3), (self.mlp.c_fc, 1)):
            linear.weight, linear.bias = part(linear.weight, 0, sections), part(linear.bias, 0, sections)
        for linear in (self.attn.c_proj, self.mlp.c_proj):
            linear.weight = part(linear.weight, 1)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t_local c"]) -> Float[Tensor, "b t_local c"]:
        """This rank's share ``[B, T/R, C]`` in and out: positions r T/R to (r + 1) T/R - 1 on rank r."""
        ### BEGIN SOLUTION
        halves = ((self.ln_1, self.attn.c_proj), (self.ln_2, self.mlp.c_proj))
        whole = torch.stack([x for norm, linear in halves for x in (norm.weight, norm.bias, linear.bias)])
        gain_1, bias_1, attn_bias, gain_2, bias_2, mlp_bias = CopyToRegion.apply(whole, self.group)

        h = GatherSequence.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), 1, self.group)
        q, k, v = (split_heads(part, self.n_local_heads) for part in self.attn.c_attn(h).chunk(3, dim=-1))
        h = scaled_dot_product_attention(q, k, v, causal_mask(h.shape[1], h.shape[1], device=h.device))
        h = merge_heads(h) @ self.attn.c_proj.weight.T
        x = x + ScatterSequence.apply(h, 1, self.group) + attn_bias

        h = GatherSequence.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), 1, self.group)
        h = gelu_tanh(self.mlp.c_fc(h)) @ self.mlp.c_proj.weight.T
        return x + ScatterSequence.apply(h, 1, self.group) + mlp_bias
        ### END SOLUTION


def heads_to_sequence(x: Float[Tensor, "b t_r h d"], group: dist.ProcessGroup | None) -> Float[Tensor, "b t h_r d"]:
    """Exchange heads for positions: some positions of all heads become all positions of some heads. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[2], n_ranks, "the number of heads")
    check_shares(x.shape[1], x.device, group)
    rows = rearrange(x, "b t (r h) d -> r b t h d", r=n_ranks)
    return rearrange(exchange(rows, group), "r b t h d -> b (r t) h d")
    ### END SOLUTION


def sequence_to_heads(x: Float[Tensor, "b t h_r d"], group: dist.ProcessGroup | None) -> Float[Tensor, "b t_r h d"]:
    """Exchange positions for heads: the inverse of ``heads_to_sequence``, at the same cost. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        x: ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r.
        group: The R ranks, where None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide T (``equal_part``, given, raises it with the arithmetic).
    """
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[1], n_ranks, "the number of positions")
    rows = rearrange(x, "b (r t) h d -> r b t h d", r=n_ranks)
    return rearrange(exchange(rows, group), "r b t h d -> b t (r h) d")
    ### END SOLUTION


def ulysses_attention(q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], v: Float[Tensor, "b t g d"],
                      is_causal: bool = False, group: dist.ProcessGroup | None = None
                      ) -> Float[Tensor, "b t h d"]:  # fmt: skip
    """Attention over the whole sequence, in which each rank computes some of the heads. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    n_repeats = n_ranks // math.gcd(n_ranks, k.shape[2])
    k, v = (x.repeat_interleave(n_repeats, dim=2) if n_repeats > 1 else x for x in (k, v))
    q, k, v = (heads_to_sequence(x, group).transpose(1, 2) for x in (q, k, v))
    return sequence_to_heads(flash_attention(q, k, v, is_causal).transpose(1, 2), group)
    ### END SOLUTION


def merge_attention(o: Float[Tensor, "*n t d"], lse: Float[Tensor, "*n t"], other_o: Float[Tensor, "*n t d"],
                    other_lse: Float[Tensor, "*n t"]
                    ) -> tuple[Float[Tensor, "*n t d"], Float[Tensor, "*n t"]]:  # fmt: skip
    """Attention to two disjoint sets of keys, from the attention to each of them. (Exercise)

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
    ### BEGIN SOLUTION
    shift = torch.maximum(lse, other_lse).detach().clamp(min=torch.finfo(lse.dtype).min)
    mine, others = torch.exp(lse - shift), torch.exp(other_lse - shift)
    nothing = mine + others == 0
    total = (mine + others).masked_fill(nothing, 1)
    merged = torch.lerp(o.to(lse.dtype), other_o.to(lse.dtype), (others / total)[..., None])
    dtype = torch.promote_types(o.dtype, other_o.dtype)
    return merged.to(dtype), (shift + torch.log(total)).masked_fill(nothing, -torch.inf)
    ### END SOLUTION


def zigzag_indices(length: int, rank: int, n_ranks: int) -> Int[Tensor, " t_local"]:
    """The positions of a rank in zigzag: of 2R equal chunks the early one r and the late one 2R - 1 - r. (Exercise)

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
    ### BEGIN SOLUTION
    size = equal_part(length, 2 * n_ranks, "length")
    if not 0 <= rank < n_ranks:
        raise ValueError(f"there is no rank {rank} among {n_ranks} ranks")
    chunks = torch.arange(length).view(2 * n_ranks, size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])
    ### END SOLUTION


def zigzag_shard(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's positions of a whole sequence, those of ``zigzag_indices``, without communication. (Exercise)

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
    ### BEGIN SOLUTION
    indices = zigzag_indices(x.shape[dim], dist.get_rank(group), dist.get_world_size(group))
    return x.index_select(dim, indices.to(x.device))
    ### END SOLUTION


def zigzag_gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole sequence from the ranks' zigzag shares, by one all-gather. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    whole = GatherSequence.apply(x, dim, group)
    order = torch.cat([zigzag_indices(whole.shape[dim], rank, n_ranks) for rank in range(n_ranks)])
    return whole.index_select(dim, order.argsort().to(x.device))
    ### END SOLUTION


def ring_block(
    rank: int, source: int, length: int, is_causal: bool = False, layout: str = "contiguous"
) -> tuple[slice, slice, bool] | None:
    """Which of a rank's queries attend to which keys of another rank's pair, as one block of attention. (Exercise)

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
    ### BEGIN SOLUTION
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: expected one of {LAYOUTS}")
    half, everything = equal_part(length, 2, "a zigzag share") if layout == "zigzag" else 0, slice(0, length)
    if not is_causal or source == rank:
        return everything, everything, is_causal
    if layout == "contiguous":
        return (everything, everything, False) if source < rank else None
    return (everything, slice(0, half), False) if source < rank else (slice(half, length), everything, False)
    ### END SOLUTION


### BEGIN SOLUTION
def _around(pair: Tensor, group: dist.ProcessGroup | None):
    """Yield every rank with its pair, this rank first.

    While the caller computes, the next pair arrives in a second buffer.
    """
    rank, n_ranks, spare = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(pair)
    for step in range(n_ranks):
        arrived = pass_on(pair, spare, group) if step < n_ranks - 1 else None
        yield (rank - step) % n_ranks, pair
        pair, spare = arrived() if arrived else spare, pair


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, group, layout):  # type: ignore[override]
        ctx.of_call = is_causal, group, layout
        o = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, (key, value) in _around(torch.stack((k, v)), group):
            if block := ring_block(dist.get_rank(group), source, q.shape[-2], is_causal, layout):
                rows, cols, masked = block
                part = block_forward(q[..., rows, :], key[..., cols, :], value[..., cols, :], masked)
                o[..., rows, :], lse[..., rows] = merge_attention(o[..., rows, :], lse[..., rows], *part)
        ctx.save_for_backward(q, k, v, out := o.to(q.dtype), lse)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        (q, k, v, o, lse), (is_causal, group, layout) = ctx.saved_tensors, ctx.of_call
        rank, arrived = dist.get_rank(group), lambda: 0
        dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for source, (key, value) in _around(torch.stack((k, v)), group):
            grads = torch.zeros((2, *k.shape), dtype=k.dtype, device=k.device)
            if block := ring_block(rank, source, q.shape[-2], is_causal, layout):
                rows, cols, masked = block
                kept = o[..., rows, :], do[..., rows, :], lse[..., rows]
                part = block_backward(q[..., rows, :], key[..., cols, :], value[..., cols, :], *kept, masked)
                dq[..., rows, :] += part[0]
                grads[0, ..., cols, :], grads[1, ..., cols, :] = part[1:]
            if source == rank:
                home = grads
                continue
            grads += arrived()  # what the ranks that had this pair before add to its gradients
            arrived = pass_on(grads, torch.empty_like(grads), group)  # type: ignore[assignment]
        dk, dv = home + arrived()
        return dq.to(q.dtype), dk, dv, None, None, None


### END SOLUTION


def ring_attention(q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t d"],
                   is_causal: bool = False, group: dist.ProcessGroup | None = None, layout: str = "contiguous"
                   ) -> Float[Tensor, "b h t d"]:  # fmt: skip
    """Attention over the whole sequence, in which keys and values go round a ring of ranks. (Exercise)

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
    ### BEGIN SOLUTION
    return _RingAttention.apply(q, k, v, is_causal, group, layout)
    ### END SOLUTION


def context_parallel_bytes(config, batch: int, length: int, n_ranks: int, kind: str) -> int:
    """Bytes that one rank sends for the attention of all layers in one step, forward and backward. (Exercise)

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
    ### BEGIN SOLUTION
    heads, share = config.n_heads, equal_part(length, n_ranks, "length")
    groups = getattr(config, "n_kv_heads", heads)
    head_bytes = 2 * batch * share * (config.dim // heads)  # of one head's positions on one rank
    if kind == "ring":
        return config.n_layers * 3 * (n_ranks - 1) * 2 * groups * head_bytes
    if kind != "ulysses":
        raise ValueError(f"kind = {kind!r}: expected 'ring' or 'ulysses'")
    equal_part(heads, n_ranks, "the number of query heads")
    return config.n_layers * 4 * (heads + math.lcm(groups, n_ranks)) // n_ranks * (n_ranks - 1) * head_bytes
    ### END SOLUTION


def hidden_length(config, n_ranks: int, peak_flops: float, bandwidth: float) -> int:
    """From how many positions on each rank the ring's messages are hidden behind its computation. (Exercise)

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
    ### BEGIN SOLUTION
    groups = getattr(config, "n_kv_heads", config.n_heads)
    return math.ceil(groups * peak_flops / (config.n_heads * bandwidth)) if n_ranks > 1 else 1
    ### END SOLUTION
