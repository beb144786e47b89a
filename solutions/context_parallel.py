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
from solutions.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from solutions.flash_attention import flash_attention
from solutions.gpt2 import Block, gelu_tanh, layer_norm
from solutions.tensor_parallel import CopyToRegion

### BEGIN SOLUTION


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' shares side by side along ``dim``, in rank order."""
    check_shares(x.shape[dim], x.device, group)
    shares = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather_row(shares.view(-1), x.contiguous().view(-1), group)
    return torch.cat(shares.unbind(), dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's share, along ``dim``, of the sum of all ranks' ``x``."""
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[dim], n_ranks, f"dimension {dim}")
    shares = torch.stack(x.chunk(n_ranks, dim))
    mine = torch.empty_like(shares[0])
    reduce_scatter_row(mine.view(-1), shares.view(-1), group)
    return mine


### END SOLUTION


class GatherSequence(torch.autograd.Function):
    """Forward all-gathers the ranks' shares of a sequence; backward reduce-scatters the gradient. (Exercise)

    Call it as ``GatherSequence.apply(x, dim, group)``; a group of None means all ranks. ``x`` is this rank's share, and each rank
    uses the whole sequence for a different part of a layer, so that the gradients of all ranks must be added. It changes nothing in place.

    Raises:
        ValueError: the ranks' shares have different lengths (``check_shares`` raises it).

    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, g in figure 5.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """All shares side by side along ``dim``, in rank order; one all-gather."""
        ### BEGIN SOLUTION
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """This rank's share of the sum of all ranks' gradients, and None for ``dim`` and the group; one reduce-scatter."""
        ### BEGIN SOLUTION
        return _scattered(grad, ctx.dim, ctx.group), None, None
        ### END SOLUTION


class ScatterSequence(torch.autograd.Function):
    """Forward adds up the ranks' tensors and gives each rank its share; backward all-gathers the gradient. (Exercise)

    Call it as ``ScatterSequence.apply(x, dim, group)``; a group of None means all ranks. ``x`` is this rank's part of a sum over the
    ranks, for the whole sequence. This is more than a slice: the ranks' tensors are added. It changes nothing in place.

    Raises:
        ValueError: R does not divide the length; the message has the arithmetic (``equal_part`` raises it).

    Source: Korthikanti and others (arXiv:2205.05198), section 4.2.2, g-bar in figure 5.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], dim: int, group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """This rank's share, along ``dim``, of the sum of all ranks' ``x``; one reduce-scatter."""
        ### BEGIN SOLUTION
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The gradients of all shares side by side, and None for ``dim`` and the group; one all-gather."""
        ### BEGIN SOLUTION
        return _gathered(grad, ctx.dim, ctx.group), None, None
        ### END SOLUTION


class SequenceParallelBlock(nn.Module):
    """Chapter 6's ``Block`` on R ranks: heads and hidden features are cut, and between them the sequence. (Exercise)

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
        ### BEGIN SOLUTION
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.n_local_heads = group, equal_part(block.attn.n_heads, n_ranks, "n_heads")
        block = copy.deepcopy(block)
        self.ln_1, self.attn, self.ln_2, self.mlp = block.ln_1, block.attn, block.ln_2, block.mlp

        def part(x: Tensor, dim: int = 0, sections: int = 1) -> nn.Parameter:
            """This rank's rows (or columns) of each of the sections."""
            cut = x.detach().unflatten(dim, (sections, n_ranks, -1)).select(dim + 1, rank)
            return nn.Parameter(cut.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format))

        for linear, sections in ((self.attn.c_attn, 3), (self.mlp.c_fc, 1)):
            linear.weight, linear.bias = part(linear.weight, 0, sections), part(linear.bias, 0, sections)
        for linear in (self.attn.c_proj, self.mlp.c_proj):
            linear.weight = part(linear.weight, 1)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t_local c"]) -> Float[Tensor, "b t_local c"]:
        """This rank's share ``[B, T/R, C]`` in and out: positions r T/R to (r + 1) T/R - 1 on rank r."""
        ### BEGIN SOLUTION
        parts = ((self.ln_1, self.attn.c_proj), (self.ln_2, self.mlp.c_proj))
        whole = torch.stack([x for norm, linear in parts for x in (norm.weight, norm.bias, linear.bias)])
        gain_1, bias_1, attn_bias, gain_2, bias_2, mlp_bias = CopyToRegion.apply(whole, self.group)

        h = GatherSequence.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), 1, self.group)
        q, k, v = (split_heads(part, self.n_local_heads) for part in self.attn.c_attn(h).chunk(3, dim=-1))
        mask = causal_mask(h.shape[1], h.shape[1], device=h.device)
        h = merge_heads(scaled_dot_product_attention(q, k, v, mask)) @ self.attn.c_proj.weight.T
        x = x + ScatterSequence.apply(h, 1, self.group) + attn_bias

        h = GatherSequence.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), 1, self.group)
        h = gelu_tanh(self.mlp.c_fc(h)) @ self.mlp.c_proj.weight.T
        return x + ScatterSequence.apply(h, 1, self.group) + mlp_bias
        ### END SOLUTION


### BEGIN SOLUTION
class _Exchange(torch.autograd.Function):
    """Row i of ``x`` goes to rank i, and the result's row i comes from rank i; the gradients go back by the same road."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Exchange.apply(grad, ctx.group), None


### END SOLUTION


def heads_to_sequence(
    x: Float[Tensor, "b t_local h d"], group: dist.ProcessGroup | None
) -> Float[Tensor, "b t h_local d"]:
    """Exchange heads for positions: some positions of all heads become all positions of some heads. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[2], n_ranks, "the number of heads")
    check_shares(x.shape[1], x.device, group)
    rows = rearrange(x, "b t (r h) d -> r b t h d", r=n_ranks)
    return rearrange(_Exchange.apply(rows, group), "r b t h d -> b (r t) h d")
    ### END SOLUTION


def sequence_to_heads(
    x: Float[Tensor, "b t h_local d"], group: dist.ProcessGroup | None
) -> Float[Tensor, "b t_local h d"]:
    """Exchange positions for heads: the inverse of ``heads_to_sequence``. (Exercise)

    Args:
        x: ``[B, T, H/R, D]``: heads r H/R to (r + 1) H/R - 1 on rank r.
        group: The R ranks; None means all ranks.

    Returns:
        ``[B, T/R, H, D]``: positions r T/R to (r + 1) T/R - 1 on rank r. The gradient is exchanged back.

    Raises:
        ValueError: R does not divide T; the message has the arithmetic.

    Cost: one all-to-all forward and one backward.
    """
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[1], n_ranks, "the number of positions")
    rows = rearrange(x, "b (r t) h d -> r b t h d", r=n_ranks)
    return rearrange(_Exchange.apply(rows, group), "r b t h d -> b t (r h) d")
    ### END SOLUTION


def ulysses_attention(
    q: Float[Tensor, "b t_local h d"],
    k: Float[Tensor, "b t_local g d"],
    v: Float[Tensor, "b t_local g d"],
    is_causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "b t_local h d"]:
    """Attention over the whole sequence, in which each rank computes some of the heads. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(q.shape[2], n_ranks, "the number of query heads")
    n_repeats = n_ranks // math.gcd(n_ranks, k.shape[2])
    k, v = (x.repeat_interleave(n_repeats, dim=2) if n_repeats > 1 else x for x in (k, v))
    q, k, v = (heads_to_sequence(x, group).transpose(1, 2) for x in (q, k, v))
    return sequence_to_heads(flash_attention(q, k, v, is_causal).transpose(1, 2), group)
    ### END SOLUTION


def merge_attention(
    o: Float[Tensor, "*lead t d"],
    lse: Float[Tensor, "*lead t"],
    other_o: Float[Tensor, "*lead t d"],
    other_lse: Float[Tensor, "*lead t"],
) -> tuple[Float[Tensor, "*lead t d"], Float[Tensor, "*lead t"]]:
    """Attention to two disjoint sets of keys, from the attention to each of them. (Exercise)

    Args:
        o, other_o: Outputs ``[..., T, D]`` of the same queries.
        lse, other_lse: Natural logsumexp ``[..., T]`` of each row's scaled scores; -inf for a row that saw no key, whose output is 0.

    Returns:
        Output and logsumexp of the attention to all the keys: new tensors in the dtype to which PyTorch promotes the two
        outputs', and that of ``lse``. A row that saw no key on either side keeps 0 and -inf. Numbers and gradients are finite where the inputs are,
        and never NaN, also for scores of 1e4.

    Source: Milakov and Gimelshein (arXiv:1805.02867), section 3.1, whose operator this is, with the division done.
    """
    ### BEGIN SOLUTION
    largest = torch.maximum(lse, other_lse).detach()
    shift = largest.masked_fill(largest == -torch.inf, 0)
    mine, others = torch.exp(lse - shift), torch.exp(other_lse - shift)
    nothing = mine + others == 0
    total = (mine + others).masked_fill(nothing, 1)
    merged = torch.lerp(o.to(lse.dtype), other_o.to(lse.dtype), (others / total)[..., None])
    dtype = torch.promote_types(o.dtype, other_o.dtype)
    return merged.to(dtype), (shift + torch.log(total)).masked_fill(nothing, -torch.inf)
    ### END SOLUTION


def zigzag_indices(length: int, rank: int, n_ranks: int) -> Int[Tensor, " t_local"]:
    """The positions of a rank if the sequence is dealt out in zigzag. (Exercise)

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
    ### BEGIN SOLUTION
    size = equal_part(length, 2 * n_ranks, "length")
    if not 0 <= rank < n_ranks:
        raise ValueError(f"there is no rank {rank} among {n_ranks} ranks")
    chunks = torch.arange(length).view(2 * n_ranks, size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])
    ### END SOLUTION


def zigzag_shard(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's positions of a whole sequence, in zigzag. (Exercise)

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
    ### BEGIN SOLUTION
    indices = zigzag_indices(x.shape[dim], dist.get_rank(group), dist.get_world_size(group))
    return x.index_select(dim, indices.to(x.device))
    ### END SOLUTION


def zigzag_gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole sequence from the ranks' zigzag shares. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = dist.get_world_size(group)
    equal_part(x.shape[dim], 2, "a rank's zigzag share")
    whole = GatherSequence.apply(x, dim, group)
    order = torch.cat([zigzag_indices(whole.shape[dim], rank, n_ranks) for rank in range(n_ranks)])
    return whole.index_select(dim, order.argsort().to(x.device))
    ### END SOLUTION


def ring_block(
    rank: int, source: int, length: int, is_causal: bool = False, layout: str = "contiguous"
) -> tuple[slice, slice, bool] | None:
    """Which of a rank's queries attend to which keys of another rank's pair, as one block of attention. (Exercise)

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
    ### BEGIN SOLUTION
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: expected one of {LAYOUTS}")
    half = equal_part(length, 2, "a rank's zigzag share") if layout == "zigzag" else 0
    everything = slice(0, length)
    if not is_causal or source == rank:
        return everything, everything, is_causal
    if layout == "contiguous":
        return (everything, everything, False) if source < rank else None
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False
    ### END SOLUTION


### BEGIN SOLUTION
def _around(pair: Tensor, group: dist.ProcessGroup | None):
    """Yield every rank's pair with its rank, this rank's own first; while the caller computes, the next pair is on its way.

    There are two buffers: the pair in use, and the one that arrives. The caller's ``pair`` becomes one of them.
    """
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty_like(pair) if n_ranks > 1 else pair
    for step in range(n_ranks):
        is_last = step == n_ranks - 1
        messages = [] if is_last else pass_on(pair, arriving, group)
        yield (rank - step) % n_ranks, pair
        _wait(messages)
        pair, arriving = arriving, pair


def _wait(messages: list) -> None:
    for message in messages:
        message.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, group, layout):  # type: ignore[override]
        ctx.of_call = is_causal, group, layout
        o = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, (key, value) in _around(torch.stack((k, v)), group):
            block = ring_block(dist.get_rank(group), source, q.shape[-2], is_causal, layout)
            if block is None:
                continue
            rows, cols, masked = block
            part = block_forward(q[..., rows, :], key[..., cols, :], value[..., cols, :], masked)
            o[..., rows, :], lse[..., rows] = merge_attention(o[..., rows, :], lse[..., rows], *part)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @first_derivative_only
    def backward(ctx, do):
        (q, k, v, o, lse), (is_causal, group, layout) = ctx.saved_tensors, ctx.of_call
        rank, mine, arriving, messages = dist.get_rank(group), None, None, []
        dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for source, (key, value) in _around(torch.stack((k, v)), group):
            grads = torch.zeros((2, *k.shape), dtype=k.dtype, device=k.device)
            block = ring_block(rank, source, q.shape[-2], is_causal, layout)
            if block is not None:
                rows, cols, masked = block
                queries, kept = q[..., rows, :], (o[..., rows, :], do[..., rows, :], lse[..., rows])
                part = block_backward(queries, key[..., cols, :], value[..., cols, :], *kept, masked)
                dq[..., rows, :] += part[0]
                grads[0, ..., cols, :], grads[1, ..., cols, :] = part[1:]
            if source == rank:  # these are at home already
                mine = grads
                continue
            if arriving is not None:  # what the ranks that had this pair before add to its gradients
                _wait(messages)
                grads += arriving
            arriving = torch.empty_like(grads)
            messages = pass_on(grads, arriving, group)
        _wait(messages)
        assert mine is not None
        dk, dv = mine if arriving is None else mine + arriving
        return dq.to(q.dtype), dk, dv, None, None, None


### END SOLUTION


def ring_attention(
    q: Float[Tensor, "b h t_local d"],
    k: Float[Tensor, "b g t_local d"],
    v: Float[Tensor, "b g t_local d"],
    is_causal: bool = False,
    group: dist.ProcessGroup | None = None,
    layout: str = "contiguous",
) -> Float[Tensor, "b h t_local d"]:
    """Attention over the whole sequence, in which keys and values go round a ring of ranks. (Exercise)

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
    ### BEGIN SOLUTION
    return _RingAttention.apply(q, k, v, is_causal, group, layout)
    ### END SOLUTION


def context_parallel_bytes(config, batch: int, length: int, n_ranks: int, kind: str) -> int:
    """Bytes that one rank sends for the attention of all layers in one step, forward and backward. (Exercise)

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
    ### BEGIN SOLUTION
    heads, share = config.n_heads, equal_part(length, n_ranks, "length")
    groups = getattr(config, "n_kv_heads", heads)
    head_bytes = 2 * batch * share * (config.dim // heads)  # of one head's positions on one rank
    if kind == "ring":
        return config.n_layers * 3 * (n_ranks - 1) * 2 * groups * head_bytes
    if kind != "ulysses":
        raise ValueError(f"kind = {kind!r}: expected 'ring' or 'ulysses'")
    equal_part(heads, n_ranks, "the number of query heads")
    exchanged = 2 * heads + 2 * math.lcm(groups, n_ranks)
    return config.n_layers * 2 * (exchanged // n_ranks) * (n_ranks - 1) * head_bytes
    ### END SOLUTION


def hidden_length(config, n_ranks: int, peak_flops: float, bandwidth: float) -> int:
    """From how many positions on each rank the ring's messages are hidden behind its computation. (Exercise)

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
    ### BEGIN SOLUTION
    if n_ranks == 1:
        return 1
    groups = getattr(config, "n_kv_heads", config.n_heads)
    return max(1, math.ceil(groups * peak_flops / (config.n_heads * bandwidth)))
    ### END SOLUTION
