"""What goes wrong when people cut a sequence across ranks."""

import torch
import torch.distributed as dist

from lib.workbook.grading import edits
from solutions import context_parallel as reference

right_bytes = reference.context_parallel_bytes


def summed(x, group):
    """The sum of all ranks' tensors."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def cut(x, dim, group):
    """This rank's part of a tensor."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


edits("""
# GatherSequence
backward takes this rank's share of its own gradient: the other ranks' gradients are not added
- ScatterSequence.apply(grad, ctx.dim, ctx.group) => cut(grad, ctx.dim, ctx.group).contiguous()
backward divides the sum of the gradients by the number of ranks, as for a mean of losses
- ScatterSequence.apply(grad, ctx.dim, ctx.group)
+ ScatterSequence.apply(grad, ctx.dim, ctx.group) / dist.get_world_size(ctx.group)
backward all-reduces the whole gradient and keeps a share: right, at twice the bytes
- ScatterSequence.apply(grad, ctx.dim, ctx.group) => cut(summed(grad, ctx.group), ctx.dim, ctx.group).contiguous()
the shares are put side by side along the first dimension, whatever `dim` says
+ dim = 0
  ctx.dim, ctx.group = dim, group
this rank's own share comes first, and the others after it
- shares.unbind() => shares.roll(-dist.get_rank(group), 0).unbind()
the group is ignored: all ranks of the world take part
+ group = None
  ctx.dim, ctx.group = dim, group
backward scatters along the first dimension, whatever `dim` says
- ScatterSequence.apply(grad, ctx.dim, ctx.group) => ScatterSequence.apply(grad, 0, ctx.group)
the gathered memory is reshaped: only along the first dimension do the shares lie in order
- torch.cat(shares.unbind(), dim)
+ shares.reshape([n * len(shares) if d == dim % x.ndim else n for d, n in enumerate(x.shape)])

# ScatterSequence
forward slices this rank's own tensor: the other ranks' parts of the sum are not added
- shares = torch.stack(x.chunk(n_ranks, dim)) => return cut(x, dim, group).contiguous()
forward takes the mean over the ranks instead of the sum
- return mine => return mine / n_ranks
backward puts this rank's gradient among zeros: the other shares' gradients are missing
- return GatherSequence.apply(grad, ctx.dim, ctx.group)
+ parts = [torch.zeros_like(grad) for _ in range(dist.get_world_size(ctx.group))]
+ parts[dist.get_rank(ctx.group)] = grad
+ return torch.cat(parts, ctx.dim)
backward multiplies the gathered gradient by the number of ranks
- GatherSequence.apply(grad, ctx.dim, ctx.group)
+ GatherSequence.apply(grad, ctx.dim, ctx.group) * dist.get_world_size(ctx.group)
forward all-reduces the whole tensor and keeps a share: right, at twice the bytes
- shares = torch.stack(x.chunk(n_ranks, dim)) => return cut(summed(x, group), dim, group).contiguous()
a length that the ranks don't divide is cut all the same, and its end is lost
- equal_part(x.shape[dim], n_ranks, f"dimension {dim}") => x = x.narrow(dim, 0, x.shape[dim] // n_ranks * n_ranks)
the group is ignored: all ranks of the world take part
+ group = None
  ctx.dim, ctx.group, n_ranks = dim, group
the memory is cut into consecutive parts: right only along the first dimension
- torch.stack(x.chunk(n_ranks, dim)) => x.reshape(n_ranks, *x.chunk(n_ranks, dim)[0].shape)
backward gathers along the first dimension, whatever `dim` says
- return GatherSequence.apply(grad, ctx.dim, ctx.group)
+ n_ranks = dist.get_world_size(ctx.group)
+ shape = [n * n_ranks if d == ctx.dim % grad.ndim else n for d, n in enumerate(grad.shape)]
+ return GatherSequence.apply(grad, 0, ctx.group).reshape(shape)

# SequenceParallelBlock
the gradients of the norms are those of this rank's positions: their sum over the ranks is missing
- CopyToRegion.apply(whole, self.group)
+ (CopyToRegion.apply(x, self.group) if i % 3 == 2 else x for i, x in enumerate(whole))
the gradients of both `c_proj.bias` are those of this rank's positions: their sum over the ranks is missing
- CopyToRegion.apply(whole, self.group)
+ (x if i % 3 == 2 else CopyToRegion.apply(x, self.group) for i, x in enumerate(whole))
`c_proj.bias` is added before the scatter, which adds it once for each rank
- ScatterSequence.apply(h, 1, self.group) + attn_bias => ScatterSequence.apply(h + attn_bias, 1, self.group)
- ScatterSequence.apply(h, 1, self.group) + mlp_bias => ScatterSequence.apply(h + mlp_bias, 1, self.group)
`c_attn` is cut into consecutive rows: the first rank gets queries only, the last one values only
- (self.attn.c_attn, 3) => (self.attn.c_attn, 1)
every position attends to the later ones, too: the causal mask is missing
- causal_mask(h.shape[1], h.shape[1], device=h.device) => None
the norms read the gathered sequence: each rank normalises all positions and keeps them for backward
- GatherSequence.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), 1, self.group)
+ layer_norm(GatherSequence.apply(x, 1, self.group), gain_1, bias_1, self.ln_1.eps)
- GatherSequence.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), 1, self.group)
+ layer_norm(GatherSequence.apply(x, 1, self.group), gain_2, bias_2, self.ln_2.eps)
the stream is made whole again after each layer by all-reduces, and cut at the end: nothing but the result is a share
- h = GatherSequence.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), 1, self.group)
+ from solutions.tensor_parallel import ReduceFromRegion
+ x = GatherSequence.apply(x, 1, self.group)
+ h = CopyToRegion.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), self.group)
- ScatterSequence.apply(h, 1, self.group) + attn_bias => ReduceFromRegion.apply(h, self.group) + attn_bias
- GatherSequence.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), 1, self.group)
+ CopyToRegion.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), self.group)
- return x + ScatterSequence.apply(h, 1, self.group) + mlp_bias
+ return cut(x + ReduceFromRegion.apply(h, self.group) + mlp_bias, 1, self.group)
the part of the weights is chosen by the rank in the world instead of the rank in the group
- rank, n_ranks = dist.get_rank(group) => rank, n_ranks = dist.get_rank() % dist.get_world_size(group)
the gradients of whole parameters are summed over all ranks instead of over those of the group
- CopyToRegion.apply(whole, self.group) => CopyToRegion.apply(whole, None)
this rank's features are split into all H heads instead of its own H/R: each head is too narrow
- self.group, self.n_local_heads = group, equal_part(block.attn.n_heads, n_ranks, "n_heads")
+ equal_part(block.attn.n_heads, n_ranks, "n_heads")
+ self.group, self.n_local_heads = group, block.attn.n_heads
the given block's parameters are cut in place: it should be copied
- block = copy.deepcopy(block) =>
a part is a view of the whole weight, which therefore stays in memory: copy it
- cut.flatten(dim, dim + 1).clone() => cut.flatten(dim, dim + 1)
the norms add the usual 1e-5 to the variance, not the block's own eps
- self.ln_1.eps => 1e-5
- self.ln_2.eps => 1e-5
the second half uses the first norm's gain and bias
- layer_norm(x, gain_2, bias_2 => layer_norm(x, gain_1 + 0 * gain_2, bias_1 + 0 * bias_2
what a layer returns replaces the stream instead of being added to it
- x = x + ScatterSequence => x = ScatterSequence
- return x + ScatterSequence => return ScatterSequence
the gathered positions also pass through `CopyToRegion`: their gradients are summed twice
- self.attn.c_attn(h) => self.attn.c_attn(CopyToRegion.apply(h, self.group))
- self.mlp.c_fc(h) => self.mlp.c_fc(CopyToRegion.apply(h, self.group))
gradients of the parts that only this rank has are summed over the ranks, too
- return nn.Parameter(cut.flatten(dim, dim + 1).clone())
+ mine = nn.Parameter(cut.flatten(dim, dim + 1).clone())
+ mine.register_hook(lambda grad: summed(grad, group))
+ return mine

# heads_to_sequence
the heads are dealt out one by one (rank r gets heads r, r + R, …) instead of in blocks
- b t (r h) d => b t (h r) d
the ranks' positions are interleaved instead of put one rank's after the other's
- b (r t) h d => b (t r) h d
`all_to_all_single` is called directly, and autograd does not see it: the result has no gradient
+ with torch.no_grad():
+     return reference.heads_to_sequence(x, group)
all heads are gathered and most are dropped: R times the bytes, and no all-to-all
- rows = rearrange(x, "b t (r h) d -> r b t h d", r=n_ranks) => return cut(GatherSequence.apply(x, 1, group), 2, group)
the group is ignored: all ranks of the world take part
+ return reference.heads_to_sequence(x, None)
heads that the ranks don't divide are not refused: each rank gets H // R, and the rest is lost
+ n_ranks = dist.get_world_size(group)
+ return reference.heads_to_sequence(x[:, :, : x.shape[2] // n_ranks * n_ranks], group)
the rows are made by `reshape` alone: they cut the positions instead of the heads
- rearrange(x, "b t (r h) d -> r b t h d", r=n_ranks) => x.reshape(n_ranks, *x.shape[:2], -1, x.shape[3])
the result is only reshaped: with more than one sequence, R and B have to change places
- rearrange(exchange(rows, group), "r b t h d -> b (r t) h d")
+ exchange(rows, group).reshape(len(x), -1, *rows.shape[3:])

# sequence_to_heads
the heads of the ranks are interleaved instead of put one rank's after the other's
- b t (r h) d => b t (h r) d
the positions are dealt out one by one (rank r gets positions r, r + R, …) instead of in blocks
- b (r t) h d => b (t r) h d
`all_to_all_single` is called directly, and autograd does not see it: the result has no gradient
+ with torch.no_grad():
+     return reference.sequence_to_heads(x, group)
all positions are gathered and most are dropped: R times the bytes, and no all-to-all
- rows = rearrange(x, "b (r t) h d -> r b t h d", r=n_ranks) => return cut(GatherSequence.apply(x, 2, group), 1, group)
positions that the ranks don't divide are not refused: the rest is lost
+ n_ranks = dist.get_world_size(group)
+ return reference.sequence_to_heads(x[:, : x.shape[1] // n_ranks * n_ranks], group)
the group is ignored: all ranks of the world take part
+ return reference.sequence_to_heads(x, None)
the rows are made by `reshape` alone: with more than one sequence, they mix the sequences
- rearrange(x, "b (r t) h d -> r b t h d", r=n_ranks) => x.reshape(n_ranks, len(x), -1, *x.shape[2:])
the result is only reshaped: the ranks' heads have to come after B and T
- rearrange(exchange(rows, group), "r b t h d -> b t (r h) d")
+ exchange(rows, group).reshape(len(x), rows.shape[2], -1, x.shape[3])

# ulysses_attention
`is_causal` is not passed on: every position attends to the later ones, too
- q, k, v, is_causal) => q, k, v, False)
keys and values are repeated for every query head before the exchange: more bytes than needed
- n_ranks // math.gcd(n_ranks, k.shape[2]) => q.shape[2] // k.shape[2]
the key/value heads are repeated as 0 1 0 1 instead of 0 0 1 1: queries meet another group's keys
- x.repeat_interleave(n_repeats, dim=2) => x.repeat(1, 1, n_repeats, 1)
each rank attends to its own positions only: nothing is exchanged
- n_repeats = n_ranks // math.gcd(n_ranks, k.shape[2])
+ equal_part(q.shape[2], n_ranks, "the number of heads")
+ check_shares(q.shape[1], q.device, group)
+ return flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal).transpose(1, 2)
positions and heads are not exchanged before the attention, which takes the heads for positions
- if n_repeats > 1 else x =>
- group).transpose(1, 2
+ group) for x in (q, k, v))
+ k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2
- for x in (q, k, v) => for x in (k, v)
- (flash_attention(q, k, v, is_causal).transpose(1, 2), group) => (flash_attention(q, k, v, is_causal), group)
fewer key/value heads than ranks are refused instead of repeated
+ equal_part(k.shape[2], n_ranks, "the number of key heads")
  n_repeats = n_ranks // math
the group is ignored: all ranks of the world take part
+ return reference.ulysses_attention(q, k, v, is_causal)
keys and values are all-gathered instead of exchanged: each rank receives all their heads
- q, k, v = (heads_to_sequence(x, group).transpose(1, 2) for x in (q, k, v))
+ q = heads_to_sequence(q, group).transpose(1, 2)
+ k, v = (cut(GatherSequence.apply(x, 1, group), 2, group).transpose(1, 2) for x in (k, v))

# merge_attention
the mean of both outputs is returned, whatever their logsumexp
- torch.lerp(o.to(lse.dtype), other_o.to(lse.dtype), (others / total)[..., None]) => (o + other_o) / 2
the outputs are weighted by the logsumexp itself instead of its exponential
- others / total => other_lse / (lse + other_lse)
the exponentials are taken without subtracting the larger logsumexp: they overflow
- torch.maximum(lse, other_lse).detach().clamp(min=torch.finfo(lse.dtype).min) => torch.zeros_like(lse)
a row that saw no key on either side becomes NaN: -inf minus -inf
- .clamp(min=torch.finfo(lse.dtype).min) =>
a row that saw no key on the first side becomes NaN: infinity divided by infinity
+ difference = other_lse - lse
+ weight = torch.exp(difference) / (1 + torch.exp(difference))
+ merged = o + weight[..., None] * (other_o - o)
+ return merged.to(torch.promote_types(o.dtype, other_o.dtype)), lse + torch.log1p(torch.exp(difference))
the larger of both logsumexps is returned instead of that of all keys
- (shift + torch.log(total)).masked_fill(nothing, -torch.inf) => torch.maximum(lse, other_lse)
the weighted sum of both outputs is not divided by the sum of the weights
- torch.lerp(o.to(lse.dtype), other_o.to(lse.dtype), (others / total)[..., None])
+ mine[..., None] * o + others[..., None] * other_o
the result has the dtype of the second output: sums of the ring would be rounded at every step
- torch.promote_types(o.dtype, other_o.dtype) => other_o.dtype
the weights are exchanged: each output gets the other's share of the sum
- others / total => mine / total
the exponentials are shifted by the first logsumexp instead of the larger one: they overflow
- torch.maximum(lse, other_lse) => lse
what was subtracted from both logsumexps is not added again to that of all keys
- shift + torch.log(total) => torch.log(total)
the logsumexp of all keys is taken with `log2`: the contract asks for the natural logarithm
- torch.log( => torch.log2(
the weights are cut off from autograd: no gradient reaches the logsumexps through the output
- (others / total) => (others / total).detach()
a row that saw no key on either side gets a logsumexp of 0 instead of -inf
- nothing, -torch.inf => nothing, 0
NaN of a row that saw no key is overwritten at the end: its gradient is NaN all the same
+ total = torch.logaddexp(lse, other_lse)
+ merged = (lse - total).exp()[..., None] * o + (other_lse - total).exp()[..., None] * other_o
+ merged = merged.masked_fill((total == -torch.inf)[..., None], 0)
+ return merged.to(torch.promote_types(o.dtype, other_o.dtype)), total
the result has the dtype of the first output: a second one in a wider dtype is rounded
- torch.promote_types(o.dtype, other_o.dtype) => o.dtype
the output has the dtype of the logsumexp: two bfloat16 outputs become float32
- torch.promote_types(o.dtype, other_o.dtype) => lse.dtype
the logsumexps are shifted in place: the caller's tensors have changed
  nothing = mine + others == 0
+ with torch.no_grad():
+     lse.sub_(shift)
where one side saw no key, the other side's own tensors are returned, not new ones
+ dtype = torch.promote_types(o.dtype, other_o.dtype)
+ if bool(torch.isneginf(other_lse).all()):
+     return o.to(dtype), lse
+ if bool(torch.isneginf(lse).all()):
+     return other_o.to(dtype), other_lse
  shift = torch.maximum
the logsumexp is rounded to the dtype of the outputs: it should keep its own
+ merged, total = reference.merge_attention(o, lse, other_o, other_lse)
+ return merged, total.to(merged.dtype)

# zigzag_indices
the positions of a rank are contiguous: the last rank has most to attend to
+ return reference.zigzag_indices(length, rank, n_ranks) * 0 + torch.arange(length).chunk(n_ranks)[rank]
the positions are dealt out one by one, in stripes: rank r gets r, r + R, …
- torch.cat([chunks[rank], chunks[-1 - rank]]) => torch.arange(rank, length, n_ranks)
the second chunk is r + R instead of 2R - 1 - r: later ranks have more work
- chunks[-1 - rank] => chunks[rank + n_ranks]
the second chunk runs backwards
- chunks[-1 - rank] => chunks[-1 - rank].flip(0)
only R has to divide the length, not 2R: an odd share is cut into unequal chunks
- size = equal_part(length, 2 * n_ranks, "length") => share = equal_part(length, n_ranks, "length")
- chunks = torch.arange(length).view(2 * n_ranks, size)
+ late = share // 2
+ ends = torch.arange(length).split((length - n_ranks * late, n_ranks * late))
- chunks[rank], chunks[-1 - rank] => ends[0].chunk(n_ranks)[rank], ends[1].view(n_ranks, late)[-1 - rank]
the two chunks are r and 2R - r: off by one, and rank 0 would begin after the end
- chunks[-1 - rank] => chunks[(2 * n_ranks - rank) % (2 * n_ranks)]
the late chunk comes before the early one: the positions are not ascending
- chunks[rank], chunks[-1 - rank] => chunks[-1 - rank], chunks[rank]
the positions are a list of integers instead of a tensor
+ return reference.zigzag_indices(length, rank, n_ranks).tolist()
a rank that does not exist is not refused: Python counts a negative index from the end
- not 0 <= rank < n_ranks => False

# zigzag_shard
the share is a contiguous stretch of the sequence
+ reference.zigzag_shard(x, dim, group)
+ return cut(x, dim, group)
the first dimension is cut, whatever `dim` says
+ reference.zigzag_shard(x, dim, group)
+ return reference.zigzag_shard(x, 0, group)
the group is ignored: all ranks of the world get a share
+ reference.zigzag_shard(x, dim, group)
+ return reference.zigzag_shard(x, dim, None)
the result is cut off from autograd
+ return reference.zigzag_shard(x.detach(), dim, group)
a negative `dim` is taken for the first dimension: it counts from the end
+ reference.zigzag_shard(x, dim, group)
+ return reference.zigzag_shard(x, max(0, dim), group)
a length that 2R does not divide is not refused: its end is lost
+ n_chunks = 2 * dist.get_world_size(group)
+ return reference.zigzag_shard(x.narrow(dim, 0, x.shape[dim] // n_chunks * n_chunks), dim, group)
backward sums the gradient over the ranks: the contract asks for this rank's part
+ return reference.zigzag_shard(CopyToRegion.apply(x, group) if x.requires_grad else x, dim, group)

# zigzag_gather
the shares are put side by side in rank order, and the zigzag is not undone
- whole.index_select(dim, order.argsort().to(x.device)) => whole
the order of the shares is applied instead of its inverse: it is dealt out again, not put together
- order.argsort() => order
the gradient is this rank's own: the other ranks' gradients are not added
+ whole = reference.zigzag_gather(x.detach(), dim, group)
+ if not x.requires_grad:
+     return whole
+ rank, n_ranks = place(group)
+ return whole.index_copy(dim, reference.zigzag_indices(whole.shape[dim], rank, n_ranks), x)
the result is cut off from autograd
+ return reference.zigzag_gather(x.detach(), dim, group)
the late chunks are put together in rank order, but they lie from the last rank to the first
- whole.index_select(dim, order.argsort().to(x.device))
+ torch.cat((chunks := whole.chunk(2 * n_ranks, dim))[::2] + chunks[1::2], dim)
the first dimension is put together, whatever `dim` says
+ return reference.zigzag_gather(x, 0, group)
the group is ignored: all ranks of the world take part
+ return reference.zigzag_gather(x, dim, None)
shares of an odd length are cut into unequal chunks instead of refused
+ shares = GatherSequence.apply(x, dim, group).chunk(dist.get_world_size(group), dim)
+ halves = [share.tensor_split(2, dim) for share in shares]
+ return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)

# ring_block
zigzag shares are treated as contiguous ones: whole pairs of earlier ranks, none of later ones
- layout == "contiguous": => True:
every block of a causal attention gets a mask, also those whose keys are all earlier
+ block = reference.ring_block(rank, source, length, is_causal, layout)
+ return block and (*block[:2], is_causal)
the two halves of zigzag are exchanged: earlier ranks' pairs meet the second half of the queries
- slice(0, half), False) if source < rank => slice(0, half), False) if source > rank
earlier and later ranks are exchanged: queries meet the keys that come after them
- everything, False) if source < rank else None => everything, False) if source > rank else None
blocks are skipped without a mask, too
- return everything, everything, is_causal
+ return (everything, everything, is_causal) if is_causal or source <= rank else None
the mask is missing on the rank's own pair
- return everything, everything, is_causal => return everything, everything, False
all keys of an earlier rank's zigzag pair are attended to, although its second half is later
- slice(0, half) => everything
later ranks' zigzag pairs meet the first half of the queries, which comes before all of their keys
- slice(half, length) => slice(0, half)
of an earlier rank's zigzag pair the second half is attended to, which is later, instead of the first
- slice(0, half), False) => slice(half, length), False)
half a zigzag pair gets a mask, although all its keys are earlier
- slice(0, half), False) => slice(0, half), True)
- (slice(half, length), everything, False) => (slice(half, length), everything, True)
a mask is asked for although the attention is not causal
- return everything, everything, is_causal => return everything, everything, True
only the first half of a later rank's zigzag pair is attended to, although all of it is earlier
- (slice(half, length), everything, False) => (slice(half, length), slice(0, half), False)
later ranks' zigzag pairs are skipped, as if the layout were contiguous
- else (slice(half, length), everything, False) => else None
no scores to compute are two empty slices instead of None
- else None => else (slice(0, 0), slice(0, 0), False)
the slices have no bounds: `slice(None)` instead of `slice(0, length)`
- slice(0, length) => slice(None)
an odd share is cut into unequal halves instead of refused
- equal_part(length, 2, "a zigzag share") => length // 2
an odd length is refused for contiguous shares, too, which are not halved
- equal_part(length, 2, "a zigzag share") if layout == "zigzag" else 0 => equal_part(length, 2, "a zigzag share")
layout and length are checked only where a mask cuts the block: without one, everything passes
+ if not is_causal or source == rank:
+     return slice(0, length), slice(0, length), is_causal
  if layout not in LAYOUTS:

# ring_attention
keys and values are all-gathered: every rank holds all of them, and nothing overlaps
+ check_ring(q, k, v, layout, group)
+ rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
+ shares = torch.arange(n_ranks * k.shape[-2]).chunk(n_ranks)
+ if layout == "zigzag":
+     shares = [zigzag_indices(n_ranks * k.shape[-2], r, n_ranks) for r in range(n_ranks)]
+ k, v = (GatherSequence.apply(x, 2, group).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
+ return scaled_dot_product_attention(q, k, v, torch.cat(shares) <= shares[rank][:, None] if is_causal else None)
the pair is sent on in the last step, too: R messages instead of R - 1
- arrived = pass_on(pair, spare, group) if step < n_ranks - 1 else None => arrived = pass_on(pair, spare, group)
each rank attends to its own keys only: nothing goes round
- dist.get_world_size(group), torch.empty_like(pair) => 1, torch.empty_like(pair)
a pair is sent on only after the rank has computed with it: no message is on its way meanwhile
- arrived = pass_on(pair, spare, group) if step < n_ranks - 1 else None
- yield (rank - step) % n_ranks, pair
+ yield (rank - step) % n_ranks, pair
+ arrived = pass_on(pair, spare, group) if step < n_ranks - 1 else None
the rank waits for the next pair before it computes with the present one: nothing overlaps
- arrived = pass_on(pair, spare, group) if step < n_ranks - 1 else None
+ following = pass_on(pair, spare, group)() if step < n_ranks - 1 else spare
- arrived() if arrived else spare => following
every pair that came by is kept: a rank ends up with the whole sequence
- for step in range(n_ranks):
+ pairs = []
+ for step in range(n_ranks):
- pass_on(pair, spare, group) => pass_on(pair, torch.empty_like(pair), group)
- yield (rank - step)
+ pairs.append(pair)
+ yield (rank - step)
each pair gets a new buffer while the one before the last is still held: three pairs at once
- pass_on(pair, spare, group) => pass_on(pair, torch.empty_like(pair), group)
every pair is kept for backward, instead of sending them round once more
- lse = torch.full_like(o[..., 0], -torch.inf) => lse, pairs = torch.full_like(o[..., 0], -torch.inf), []
- if block := ring_block(dist
+ pairs.append(torch.stack((key, value)))
+ if block := ring_block(dist
- out := o.to(q.dtype), lse) => out := o.to(q.dtype), lse, *pairs)
- (q, k, v, o, lse), (is_causal => (q, k, v, o, lse, *_), (is_causal
blocks that the mask hides are computed and then thrown away
+ if not ring_block(dist.get_rank(group), source, q.shape[-2], is_causal, layout):
+     block_forward(q, key, value, False)
  if block := ring_block(dist
the blocks' outputs are averaged instead of weighted by their logsumexp
- o[..., rows, :], lse[..., rows] = merge_attention(o[..., rows, :], lse[..., rows], *part)
+ o[..., rows, :] += part[0] / dist.get_world_size(group)
+ lse[..., rows] = torch.logaddexp(lse[..., rows], part[1])
every block overwrites the output: only the last pair counts
- merge_attention(o[..., rows, :], lse[..., rows], *part) => part
`is_causal` has no effect on the blocks
- v, is_causal, group => v, False, group
`layout` has no effect: zigzag positions are masked as if they were contiguous
- v, is_causal, group, layout) => v, is_causal, group, "contiguous")
later ranks' keys are attended to: only the rank's own block is causal
- ring_block(dist.get_rank(group), source, q.shape[-2], is_causal, layout)
+ ring_block(dist.get_rank(group), source, q.shape[-2], is_causal and source == dist.get_rank(group), layout)
- ring_block(rank, source, q.shape[-2], is_causal, layout)
+ ring_block(rank, source, q.shape[-2], is_causal and source == rank, layout)
backward computes the weights from the logsumexp of one block instead of that of the whole row
- out := o.to(q.dtype), lse) => out := o.to(q.dtype), part[1] if part[1].shape == lse.shape else lse.clone())
dK and dV are not sent home: each rank keeps those that its own queries gave
- grads += arrived() => continue
dK and dV travel, but each rank overwrites what came before it instead of adding to it
- grads += arrived() => arrived()
every block overwrites dQ: only the last pair counts
- dq[..., rows, :] += part[0] => dq[..., rows, :] = part[0]
dK and dV travel in float32: twice the bytes; the contract asks for the inputs' dtype
- dtype=k.dtype => dtype=torch.promote_types(k.dtype, torch.float32)
- dq.to(q.dtype), dk, dv => dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
a second derivative is returned, and is wrong: backward's messages have none; see `first_derivative_only`
- @first_derivative_only =>
the pairs arrive from the previous rank, and are taken for the next ranks': r + 1 instead of r - 1
- yield (rank - step) => yield (rank + step)
the group is ignored: all ranks of the world take part
- v, is_causal, group => v, is_causal, None
the pair is passed on after the last block, too: R messages where R - 1 are enough
- pass_on(pair, spare, group) if step < n_ranks - 1 else None => pass_on(pair, spare, group)
the output is summed in the dtype of `q`: bfloat16 rounds it at every step
- o = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32) => o = torch.zeros(q.shape, dtype=q.dtype
- lse = torch.full_like(o[..., 0], -torch.inf)
+ lse = torch.full_like(o[..., 0], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
the logsumexp is kept in the dtype of `q`: in bfloat16 the weights of the blocks are wrong
- torch.full_like(o[..., 0], -torch.inf) => torch.full_like(o[..., 0], -torch.inf, dtype=q.dtype)
dQ is summed in the dtype of `q`: bfloat16 rounds it at every step
- dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32) => dq = torch.zeros(q.shape, dtype=q.dtype
the output stays in float32: the contract asks for the dtype of `q`
- return out => return o
autograd keeps the output in float32: twice the bytes of the one that is returned
- out := o.to(q.dtype), lse)
+ o, lse)
+ out = o.to(q.dtype)
what a rank's own queries give to its own dK and dV is lost
- home + arrived() => arrived() if dist.get_world_size(group) > 1 else home

# context_parallel_bytes
for "ulysses", max(G, R) key/value heads are counted; ranks that don't divide G get the least common multiple
- math.lcm(groups, n_ranks) => max(groups, n_ranks)
for "ulysses", keys and values are counted with H heads instead of G
- math.lcm(groups, n_ranks) => heads
keys and values are counted with H heads instead of their own G
- getattr(config, "n_kv_heads", heads) => heads
the layers are not counted: these are the bytes of one
- config.n_layers * 3 => 3
- config.n_layers * 4 => 4
only the forward pass is counted
+ return right_bytes(config, batch, length, n_ranks, kind) // (3 if kind == "ring" else 2)
dK and dV are not counted: backward sends more than keys and values once more
+ return right_bytes(config, batch, length, n_ranks, kind) * (2 if kind == "ring" else 3) // 3
a pair takes R steps round the ring, and a rank sends its own part of an all-to-all: R where R - 1 belongs
- 3 * (n_ranks - 1) => 3 * n_ranks
- // n_ranks * (n_ranks - 1) =>
the whole sequence is counted instead of one rank's share
+ return right_bytes(config, batch, length, n_ranks, kind) * n_ranks
values have 4 bytes instead of 2
+ return 2 * right_bytes(config, batch, length, n_ranks, kind)
the batch is not counted: these are the bytes of one sequence
+ return right_bytes(config, 1, length, n_ranks, kind)
for "ring", the bytes of K are counted and those of V are not
- * 2 * groups => * groups
for "ulysses", the way back of the output is not counted: three all-to-alls of four
- 4 * (heads + math.lcm(groups, n_ranks)) => (2 * heads + 4 * math.lcm(groups, n_ranks))
a length or heads that the ranks don't divide are rounded down instead of refused
- equal_part(length, n_ranks, "length") => length // n_ranks
- equal_part(heads, n_ranks, "the number of query heads") =>
for "ring", too, the ranks have to divide the heads, although it cuts no heads
  if kind == "ring":
+     equal_part(heads, n_ranks, "the number of query heads")
for "ulysses", a length that the ranks don't divide is rounded down
- equal_part(length, n_ranks, "length")
+ (equal_part(length, n_ranks, "length") if kind != "ulysses" else length // n_ranks)
every kind but "ring" is counted as "ulysses": another string is not refused
+ return right_bytes(config, batch, length, n_ranks, kind if kind == "ring" else "ulysses")
the bytes are a float: bytes are counted in whole numbers, which // divides
+ return float(right_bytes(config, batch, length, n_ranks, kind))

# hidden_length
keys and values are counted with as many heads as the queries: G/H is missing
- getattr(config, "n_kv_heads", config.n_heads) => config.n_heads
only one of the two products of a block is counted: half the FLOPs, so twice the length
+ return reference.hidden_length(config, n_ranks, 2 * peak_flops, bandwidth)
the length of the whole sequence is returned instead of one rank's share
+ return n_ranks * reference.hidden_length(config, n_ranks, peak_flops, bandwidth)
the length is rounded to the nearest one, where sending may still take longer
- math.ceil(groups * peak_flops / (config.n_heads * bandwidth))
+ max(1, round(groups * peak_flops / (config.n_heads * bandwidth)))
`n_kv_heads` is read without a default: a model whose heads all have keys of their own has no such number
- getattr(config, "n_kv_heads", config.n_heads) => config.n_kv_heads
the length is rounded down: there, sending still takes longer
- math.ceil => math.floor
the bytes of K are counted and those of V are not
+ return reference.hidden_length(config, n_ranks, peak_flops / 2, bandwidth)
G/H is turned over: fewer key/value heads make the length longer
- groups * peak_flops / (config.n_heads * bandwidth) => config.n_heads * peak_flops / (groups * bandwidth)
a single rank is counted like several, although it has nothing to send
+ return reference.hidden_length(config, max(2, n_ranks), peak_flops, bandwidth)
the length is a float: positions are counted in whole numbers
+ return float(reference.hidden_length(config, n_ranks, peak_flops, bandwidth))
""")


right_bytes = reference.context_parallel_bytes
