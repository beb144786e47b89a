"""What goes wrong when people cut a sequence across ranks."""

import math

import torch
import torch.distributed as dist
from einops import rearrange
from torch import nn

from lib.fast.attention.blocks import block_backward, block_forward
from lib.given.kernels.once import first_derivative_only
from lib.given.parallel.ring import check_shares, equal_part, exchange, pass_on
from lib.workbook.grading import mistake
from solutions import context_parallel as reference
from solutions.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from solutions.flash_attention import flash_attention
from solutions.gpt2 import gelu_tanh, layer_norm
from solutions.tensor_parallel import CopyToRegion, ReduceFromRegion


def gathered(x, dim, group):
    """All ranks' shares side by side."""
    with torch.no_grad():
        return reference.GatherSequence.apply(x, dim, group)


def scattered(x, dim, group):
    """This rank's share of the sum."""
    with torch.no_grad():
        return reference.ScatterSequence.apply(x, dim, group)


def place(group):
    """This rank and the number of ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def summed(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def cut(x, dim, group):
    rank, n_ranks = place(group)
    return x.chunk(n_ranks, dim)[rank]


# ---- 18.1 GatherSequence, 18.2 ScatterSequence -----------------------------------------------------------------------


class Gather(torch.autograd.Function):
    """The right one, for the mistakes to change."""

    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad, ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """The right one, for the mistakes to change."""

    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        return scattered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.dim, ctx.group), None, None


@mistake(
    "GatherSequence", "backward takes this rank's share of its own gradient: the other ranks' gradients are not added"
)
class GatherOwnGradient(Gather):
    @staticmethod
    def backward(ctx, grad):
        return cut(grad, ctx.dim, ctx.group).contiguous(), None, None


@mistake("GatherSequence", "backward divides the sum of the gradients by the number of ranks, as for a mean of losses")
class GatherMeanGradient(Gather):
    @staticmethod
    def backward(ctx, grad):
        return scattered(grad, ctx.dim, ctx.group) / dist.get_world_size(ctx.group), None, None


@mistake("GatherSequence", "backward all-reduces the whole gradient and keeps a share: right, at twice the bytes")
class GatherThenReduceAll(Gather):
    @staticmethod
    def backward(ctx, grad):
        return cut(summed(grad, ctx.group), ctx.dim, ctx.group).contiguous(), None, None


@mistake("GatherSequence", "the shares are put side by side along the first dimension, whatever `dim` says")
class GatherFirstDim(Gather):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = 0, group
        return gathered(x, 0, group)


@mistake("GatherSequence", "this rank's own share comes first, and the others after it")
class GatherOwnFirst(Gather):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group).roll(-dist.get_rank(group) * x.shape[dim], dim)


@mistake("GatherSequence", "the group is ignored: all ranks of the world take part")
class GatherWorld(Gather):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, None
        return gathered(x, dim, None)


@mistake("ScatterSequence", "forward slices this rank's own tensor: the other ranks' parts of the sum are not added")
class ScatterSlice(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        equal_part(x.shape[dim], dist.get_world_size(group), "dimension")
        return cut(x, dim, group).contiguous()


@mistake("ScatterSequence", "forward takes the mean over the ranks instead of the sum")
class ScatterMean(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        return scattered(x, dim, group) / dist.get_world_size(group)


@mistake("ScatterSequence", "backward puts this rank's gradient among zeros: the other shares' gradients are missing")
class ScatterZeros(Scatter):
    @staticmethod
    def backward(ctx, grad):
        rank, n_ranks = place(ctx.group)
        parts = [grad if r == rank else torch.zeros_like(grad) for r in range(n_ranks)]
        return torch.cat(parts, ctx.dim), None, None


@mistake("ScatterSequence", "backward multiplies the gathered gradient by the number of ranks")
class ScatterTimesRanks(Scatter):
    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.dim, ctx.group) * dist.get_world_size(ctx.group), None, None


@mistake("ScatterSequence", "forward all-reduces the whole tensor and keeps a share: right, at twice the bytes")
class ScatterFromAll(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        equal_part(x.shape[dim], dist.get_world_size(group), "dimension")
        return cut(summed(x, group), dim, group).contiguous()


@mistake("ScatterSequence", "a length that the ranks don't divide is cut all the same, and its end is lost")
class ScatterRagged(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        n_ranks = dist.get_world_size(group)
        return Scatter.forward(ctx, x.narrow(dim, 0, x.shape[dim] // n_ranks * n_ranks), dim, group)


@mistake("GatherSequence", "backward scatters along the first dimension, whatever `dim` says")
class GatherFirstDimBackward(Gather):
    @staticmethod
    def backward(ctx, grad):
        return scattered(grad, 0, ctx.group), None, None


@mistake("GatherSequence", "the gathered memory is reshaped: only along the first dimension do the shares lie in order")
class GatherReshaped(Gather):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        whole = gathered(x, dim, group)
        return torch.stack(whole.chunk(dist.get_world_size(group), dim)).reshape(whole.shape)


@mistake("ScatterSequence", "the group is ignored: all ranks of the world take part")
class ScatterWorld(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, None
        return scattered(x, dim, None)


@mistake("ScatterSequence", "the memory is cut into consecutive parts: right only along the first dimension")
class ScatterConsecutive(Scatter):
    @staticmethod
    def forward(ctx, x, dim, group=None):
        ctx.dim, ctx.group = dim, group
        n_ranks, shape = dist.get_world_size(group), list(x.shape)
        shape[dim] = equal_part(shape[dim], n_ranks, "dimension")
        return scattered(x.reshape(n_ranks, -1), 0, group).reshape(shape)


@mistake("ScatterSequence", "backward gathers along the first dimension, whatever `dim` says")
class ScatterFirstDimBackward(Scatter):
    @staticmethod
    def backward(ctx, grad):
        whole = gathered(grad, 0, ctx.group)
        shape = list(grad.shape)
        shape[ctx.dim] *= dist.get_world_size(ctx.group)
        return whole.reshape(shape), None, None


# ---- 18.3 SequenceParallelBlock --------------------------------------------------------------------------------------


class SequenceBlock(reference.SequenceParallelBlock):
    """The right one, with each step as a method that a mistake can change."""

    def whole(self):
        parts = ((self.ln_1, self.attn.c_proj), (self.ln_2, self.mlp.c_proj))
        return torch.stack([x for norm, linear in parts for x in (norm.weight, norm.bias, linear.bias)])

    def shared(self):
        return CopyToRegion.apply(self.whole(), self.group)

    def enter(self, x, gain, bias, eps):
        return reference.GatherSequence.apply(layer_norm(x, gain, bias, eps), 1, self.group)

    def leave(self, x, h, bias):
        return x + reference.ScatterSequence.apply(h, 1, self.group) + bias

    def mask(self, length):
        return causal_mask(length, length)

    def forward(self, x):
        gain_1, bias_1, attn_bias, gain_2, bias_2, mlp_bias = self.shared()
        h = self.enter(x, gain_1, bias_1, self.ln_1.eps)
        q, k, v = (split_heads(part, self.n_local_heads) for part in self.attn.c_attn(h).chunk(3, dim=-1))
        h = merge_heads(scaled_dot_product_attention(q, k, v, self.mask(h.shape[1]))) @ self.attn.c_proj.weight.T
        x = self.leave(x, h, attn_bias)
        h = self.enter(x, gain_2, bias_2, self.ln_2.eps)
        return self.leave(x, gelu_tanh(self.mlp.c_fc(h)) @ self.mlp.c_proj.weight.T, mlp_bias)


@mistake(
    "SequenceParallelBlock",
    "the gradients of the norms are those of this rank's positions: their sum over the ranks is missing",
)
class NormsNotSummed(SequenceBlock):
    def shared(self):
        return [CopyToRegion.apply(x, self.group) if i % 3 == 2 else x for i, x in enumerate(self.whole())]


@mistake(
    "SequenceParallelBlock",
    "the gradients of both `c_proj.bias` are those of this rank's positions: their sum over the ranks is missing",
)
class BiasesNotSummed(SequenceBlock):
    def shared(self):
        return [x if i % 3 == 2 else CopyToRegion.apply(x, self.group) for i, x in enumerate(self.whole())]


@mistake("SequenceParallelBlock", "`c_proj.bias` is added before the scatter, which adds it once for each rank")
class BiasTimesRanks(SequenceBlock):
    def leave(self, x, h, bias):
        return x + reference.ScatterSequence.apply(h + bias, 1, self.group)


@mistake(
    "SequenceParallelBlock",
    "`c_attn` is cut into consecutive rows: the first rank gets queries only, the last one values only",
)
class ConsecutiveRows(SequenceBlock):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        rank, n_ranks = place(group)
        for name in ("weight", "bias"):
            part = getattr(block.attn.c_attn, name).detach().chunk(n_ranks)[rank]
            setattr(self.attn.c_attn, name, nn.Parameter(part.clone()))


@mistake("SequenceParallelBlock", "every position attends to the later ones, too: the causal mask is missing")
class NoMask(SequenceBlock):
    def mask(self, length):
        return None


@mistake(
    "SequenceParallelBlock",
    "the norms read the gathered sequence: each rank normalises all positions and keeps them for backward",
)
class NormsAfterGather(SequenceBlock):
    def shared(self):
        return [CopyToRegion.apply(x, self.group) for x in self.whole()]

    def enter(self, x, gain, bias, eps):
        return layer_norm(reference.GatherSequence.apply(x, 1, self.group), gain, bias, eps)


@mistake(
    "SequenceParallelBlock",
    "the stream is made whole again after each layer by all-reduces, and cut at the end: nothing but the result is a share",
)
class WholeStream(SequenceBlock):
    def forward(self, x):
        gain_1, bias_1, attn_bias, gain_2, bias_2, mlp_bias = self.shared()
        x = reference.GatherSequence.apply(x, 1, self.group)
        h = CopyToRegion.apply(layer_norm(x, gain_1, bias_1, self.ln_1.eps), self.group)
        q, k, v = (split_heads(part, self.n_local_heads) for part in self.attn.c_attn(h).chunk(3, dim=-1))
        h = merge_heads(scaled_dot_product_attention(q, k, v, self.mask(h.shape[1]))) @ self.attn.c_proj.weight.T
        x = x + ReduceFromRegion.apply(h, self.group) + attn_bias
        h = CopyToRegion.apply(layer_norm(x, gain_2, bias_2, self.ln_2.eps), self.group)
        h = gelu_tanh(self.mlp.c_fc(h)) @ self.mlp.c_proj.weight.T
        return cut(x + ReduceFromRegion.apply(h, self.group) + mlp_bias, 1, self.group)


@mistake(
    "SequenceParallelBlock",
    "the part of the weights is chosen by the rank in the world instead of the rank in the group",
)
class PartOfTheWorld(SequenceBlock):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        n_ranks = dist.get_world_size(group)
        taken = dist.get_rank() % n_ranks
        for linear, whole, sections in (
            (self.attn.c_attn, block.attn.c_attn, 3),
            (self.mlp.c_fc, block.mlp.c_fc, 1),
        ):
            for name in ("weight", "bias"):
                parts = getattr(whole, name).detach().unflatten(0, (sections, n_ranks, -1))
                setattr(linear, name, nn.Parameter(parts[:, taken].flatten(0, 1).clone()))


@mistake(
    "SequenceParallelBlock",
    "this rank's features are split into all H heads instead of its own H/R: each head is too narrow",
)
class AllHeadsOnEachRank(SequenceBlock):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        self.n_local_heads = block.attn.n_heads


@mistake("SequenceParallelBlock", "the given block's parameters are cut in place: it should be copied")
class BlockCutInPlace(SequenceBlock):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        for name in ("ln_1", "attn", "ln_2", "mlp"):
            setattr(block, name, getattr(self, name))


@mistake("SequenceParallelBlock", "the second half uses the first norm's gain and bias")
class OneNorm(SequenceBlock):
    def shared(self):
        gain_1, bias_1, attn_bias, gain_2, bias_2, mlp_bias = super().shared()
        return gain_1, bias_1, attn_bias, gain_1 + 0 * gain_2, bias_1 + 0 * bias_2, mlp_bias


@mistake("SequenceParallelBlock", "what a layer returns replaces the stream instead of being added to it")
class NoResidual(SequenceBlock):
    def leave(self, x, h, bias):
        return reference.ScatterSequence.apply(h, 1, self.group) + bias


@mistake(
    "SequenceParallelBlock",
    "the gathered positions also pass through `CopyToRegion`: their gradients are summed twice",
)
class SummedTwice(SequenceBlock):
    def enter(self, x, gain, bias, eps):
        return CopyToRegion.apply(super().enter(x, gain, bias, eps), self.group)


@mistake(
    "SequenceParallelBlock",
    "gradients of the parts that only this rank has are summed over the ranks, too",
)
class AllGradientsSummed(SequenceBlock):
    def __init__(self, block, group=None):
        super().__init__(block, group)
        for name, parameter in (*self.attn.named_parameters(), *self.mlp.named_parameters()):
            if name != "c_proj.bias":
                parameter.register_hook(lambda grad: summed(grad, self.group))


# ---- 18.4 heads_to_sequence, 18.5 sequence_to_heads ------------------------------------------------------------------


def check_heads(x, group):
    equal_part(x.shape[2], dist.get_world_size(group), "the number of heads")
    check_shares(x.shape[1], x.device, group)


@mistake("heads_to_sequence", "the heads are dealt out one by one (rank r gets heads r, r + R, …) instead of in blocks")
def heads_in_turn(x, group):
    check_heads(x, group)
    rows = rearrange(x, "b t (h r) d -> r b t h d", r=dist.get_world_size(group))
    return rearrange(exchange(rows, group), "r b t h d -> b (r t) h d")


@mistake("heads_to_sequence", "the ranks' positions are interleaved instead of put one rank's after the other's")
def positions_in_turn(x, group):
    check_heads(x, group)
    rows = rearrange(x, "b t (r h) d -> r b t h d", r=dist.get_world_size(group))
    return rearrange(exchange(rows, group), "r b t h d -> b (t r) h d")


@mistake(
    "heads_to_sequence",
    "`all_to_all_single` is called directly, and autograd does not see it: the result has no gradient",
)
def no_gradient(x, group):
    with torch.no_grad():
        return reference.heads_to_sequence(x, group)


@mistake("heads_to_sequence", "all heads are gathered and most are dropped: R times the bytes, and no all-to-all")
def gather_heads(x, group):
    check_heads(x, group)
    return cut(reference.GatherSequence.apply(x, 1, group), 2, group)


@mistake("heads_to_sequence", "the group is ignored: all ranks of the world take part")
def heads_in_world(x, group):
    return reference.heads_to_sequence(x, None)


@mistake(
    "heads_to_sequence",
    "heads that the ranks don't divide are not refused: each rank gets H // R, and the rest is lost",
)
def heads_lost(x, group):
    n_ranks = dist.get_world_size(group)
    return reference.heads_to_sequence(x[:, :, : x.shape[2] // n_ranks * n_ranks], group)


@mistake("heads_to_sequence", "the rows are made by `reshape` alone: they cut the positions instead of the heads")
def heads_reshaped(x, group):
    check_heads(x, group)
    (b, t, h, d), n_ranks = x.shape, dist.get_world_size(group)
    rows = x.reshape(n_ranks, b, t, h // n_ranks, d)
    return rearrange(exchange(rows, group), "r b t h d -> b (r t) h d")


@mistake("heads_to_sequence", "the result is only reshaped: with more than one sequence, R and B have to change places")
def result_reshaped(x, group):
    check_heads(x, group)
    rows = exchange(rearrange(x, "b t (r h) d -> r b t h d", r=dist.get_world_size(group)), group)
    n_ranks, b, t, h, d = rows.shape
    return rows.reshape(b, n_ranks * t, h, d)


@mistake("sequence_to_heads", "the heads of the ranks are interleaved instead of put one rank's after the other's")
def heads_woven(x, group):
    equal_part(x.shape[1], dist.get_world_size(group), "positions")
    rows = rearrange(x, "b (r t) h d -> r b t h d", r=dist.get_world_size(group))
    return rearrange(exchange(rows, group), "r b t h d -> b t (h r) d")


@mistake(
    "sequence_to_heads",
    "the positions are dealt out one by one (rank r gets positions r, r + R, …) instead of in blocks",
)
def positions_dealt(x, group):
    equal_part(x.shape[1], dist.get_world_size(group), "positions")
    rows = rearrange(x, "b (t r) h d -> r b t h d", r=dist.get_world_size(group))
    return rearrange(exchange(rows, group), "r b t h d -> b t (r h) d")


@mistake(
    "sequence_to_heads",
    "`all_to_all_single` is called directly, and autograd does not see it: the result has no gradient",
)
def back_without_gradient(x, group):
    with torch.no_grad():
        return reference.sequence_to_heads(x, group)


@mistake("sequence_to_heads", "all positions are gathered and most are dropped: R times the bytes, and no all-to-all")
def gather_positions(x, group):
    equal_part(x.shape[1], dist.get_world_size(group), "positions")
    return cut(reference.GatherSequence.apply(x, 2, group), 1, group)


@mistake("sequence_to_heads", "positions that the ranks don't divide are not refused: the rest is lost")
def positions_lost(x, group):
    n_ranks = dist.get_world_size(group)
    return reference.sequence_to_heads(x[:, : x.shape[1] // n_ranks * n_ranks], group)


@mistake("sequence_to_heads", "the group is ignored: all ranks of the world take part")
def positions_in_world(x, group):
    return reference.sequence_to_heads(x, None)


@mistake(
    "sequence_to_heads", "the rows are made by `reshape` alone: with more than one sequence, they mix the sequences"
)
def positions_reshaped(x, group):
    equal_part(x.shape[1], dist.get_world_size(group), "positions")
    (b, t, h, d), n_ranks = x.shape, dist.get_world_size(group)
    rows = x.reshape(n_ranks, b, t // n_ranks, h, d)
    return rearrange(exchange(rows, group), "r b t h d -> b t (r h) d")


@mistake("sequence_to_heads", "the result is only reshaped: the ranks' heads have to come after B and T")
def back_reshaped(x, group):
    equal_part(x.shape[1], dist.get_world_size(group), "positions")
    rows = exchange(rearrange(x, "b (r t) h d -> r b t h d", r=dist.get_world_size(group)), group)
    n_ranks, b, t, h, d = rows.shape
    return rows.reshape(b, t, n_ranks * h, d)


# ---- 18.6 ulysses_attention ------------------------------------------------------------------------------------------


def ulysses(q, k, v, is_causal, group, n_repeats=None, repeat=None):
    n_ranks = dist.get_world_size(group)
    equal_part(q.shape[2], n_ranks, "the number of query heads")
    if n_repeats is None:
        n_repeats = n_ranks // math.gcd(n_ranks, k.shape[2])
    repeat = repeat or (lambda x: x.repeat_interleave(n_repeats, dim=2))
    k, v = (repeat(x) if n_repeats > 1 else x for x in (k, v))
    q, k, v = (reference.heads_to_sequence(x, group).transpose(1, 2) for x in (q, k, v))
    return reference.sequence_to_heads(flash_attention(q, k, v, is_causal).transpose(1, 2), group)


@mistake("ulysses_attention", "`is_causal` is not passed on: every position attends to the later ones, too")
def ulysses_without_mask(q, k, v, is_causal=False, group=None):
    return ulysses(q, k, v, False, group)


@mistake(
    "ulysses_attention", "keys and values are repeated for every query head before the exchange: more bytes than needed"
)
def ulysses_repeats_all(q, k, v, is_causal=False, group=None):
    return ulysses(q, k, v, is_causal, group, q.shape[2] // k.shape[2])


@mistake(
    "ulysses_attention",
    "the key/value heads are repeated as 0 1 0 1 instead of 0 0 1 1: queries meet another group's keys",
)
def ulysses_tiles_heads(q, k, v, is_causal=False, group=None):
    n_repeats = dist.get_world_size(group) // math.gcd(dist.get_world_size(group), k.shape[2])
    return ulysses(q, k, v, is_causal, group, n_repeats, lambda x: x.repeat(1, 1, n_repeats, 1))


@mistake("ulysses_attention", "each rank attends to its own positions only: nothing is exchanged")
def ulysses_alone(q, k, v, is_causal=False, group=None):
    equal_part(q.shape[2], dist.get_world_size(group), "the number of query heads")
    check_shares(q.shape[1], q.device, group)
    return flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal).transpose(1, 2)


@mistake(
    "ulysses_attention",
    "positions and heads are not exchanged before the attention, which takes the heads for positions",
)
def ulysses_untransposed(q, k, v, is_causal=False, group=None):
    n_ranks = dist.get_world_size(group)
    equal_part(q.shape[2], n_ranks, "the number of query heads")
    n_repeats = n_ranks // math.gcd(n_ranks, k.shape[2])
    k, v = (x.repeat_interleave(n_repeats, dim=2) for x in (k, v))
    q, k, v = (reference.heads_to_sequence(x, group) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return reference.sequence_to_heads(flash_attention(q, k, v, is_causal), group)


@mistake("ulysses_attention", "fewer key/value heads than ranks are refused instead of repeated")
def ulysses_refuses_few(q, k, v, is_causal=False, group=None):
    equal_part(q.shape[2], dist.get_world_size(group), "the number of query heads")
    equal_part(k.shape[2], dist.get_world_size(group), "the number of key heads")
    return ulysses(q, k, v, is_causal, group)


@mistake("ulysses_attention", "the group is ignored: all ranks of the world take part")
def ulysses_in_world(q, k, v, is_causal=False, group=None):
    return ulysses(q, k, v, is_causal, None)


@mistake(
    "ulysses_attention", "keys and values are all-gathered instead of exchanged: each rank receives all their heads"
)
def ulysses_gathers_keys(q, k, v, is_causal=False, group=None):
    (rank, n_ranks), n_repeats = place(group), q.shape[2] // k.shape[2]
    equal_part(q.shape[2], n_ranks, "the number of query heads")
    q = reference.heads_to_sequence(q, group).transpose(1, 2)
    k, v = (reference.GatherSequence.apply(x, 1, group).repeat_interleave(n_repeats, 2) for x in (k, v))
    k, v = (x.chunk(n_ranks, 2)[rank].transpose(1, 2) for x in (k, v))
    return reference.sequence_to_heads(flash_attention(q, k, v, is_causal).transpose(1, 2), group)


# ---- 18.7 merge_attention --------------------------------------------------------------------------------------------


@mistake("merge_attention", "the mean of both outputs is returned, whatever their logsumexp")
def merge_mean(o, lse, other_o, other_lse):
    return (o + other_o) / 2, reference.merge_attention(o, lse, other_o, other_lse)[1]


@mistake("merge_attention", "the outputs are weighted by the logsumexp itself instead of its exponential")
def merge_by_lse(o, lse, other_o, other_lse):
    weight = (lse / (lse + other_lse))[..., None]
    return weight * o + (1 - weight) * other_o, reference.merge_attention(o, lse, other_o, other_lse)[1]


@mistake("merge_attention", "the exponentials are taken without subtracting the larger logsumexp: they overflow")
def merge_unshifted(o, lse, other_o, other_lse):
    a, b = lse.exp(), other_lse.exp()
    nothing = a + b == 0
    total = (a + b).masked_fill(nothing, 1)
    merged = (a / total)[..., None] * o + (b / total)[..., None] * other_o
    merged = merged.to(torch.promote_types(o.dtype, other_o.dtype))
    return merged, total.log().masked_fill(nothing, -torch.inf)


@mistake("merge_attention", "a row that saw no key on either side becomes NaN: -inf minus -inf")
def merge_nan(o, lse, other_o, other_lse):
    total = torch.logaddexp(lse, other_lse)
    merged = (lse - total).exp()[..., None] * o + (other_lse - total).exp()[..., None] * other_o
    return merged.to(torch.promote_types(o.dtype, other_o.dtype)), total


@mistake(
    "merge_attention",
    "a row that saw no key on the first side becomes NaN: infinity divided by infinity",
)
def merge_nan_on_one_side(o, lse, other_o, other_lse):
    difference = other_lse - lse
    weight = torch.exp(difference) / (1 + torch.exp(difference))
    merged = o + weight[..., None] * (other_o - o)
    return merged.to(torch.promote_types(o.dtype, other_o.dtype)), lse + torch.log1p(torch.exp(difference))


@mistake("merge_attention", "the larger of both logsumexps is returned instead of that of all keys")
def merge_largest(o, lse, other_o, other_lse):
    return reference.merge_attention(o, lse, other_o, other_lse)[0], torch.maximum(lse, other_lse)


@mistake("merge_attention", "the weighted sum of both outputs is not divided by the sum of the weights")
def merge_undivided(o, lse, other_o, other_lse):
    largest = torch.maximum(lse, other_lse)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    merged = (lse - shift).exp()[..., None] * o + (other_lse - shift).exp()[..., None] * other_o
    return merged.to(torch.promote_types(o.dtype, other_o.dtype)), reference.merge_attention(
        o, lse, other_o, other_lse
    )[1]


@mistake(
    "merge_attention", "the result has the dtype of the second output: sums of the ring would be rounded at every step"
)
def merge_rounded(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    return merged.to(other_o.dtype), total


@mistake("merge_attention", "the weights are exchanged: each output gets the other's share of the sum")
def merge_exchanged(o, lse, other_o, other_lse):
    merged, _ = reference.merge_attention(o, other_lse, other_o, lse)
    return merged, reference.merge_attention(o, lse, other_o, other_lse)[1]


@mistake(
    "merge_attention", "the exponentials are shifted by the first logsumexp instead of the larger one: they overflow"
)
def merge_shifted_by_first(o, lse, other_o, other_lse):
    shift = lse.detach().clamp(min=torch.finfo(lse.dtype).min)
    mine, others = torch.exp(lse - shift), torch.exp(other_lse - shift)
    nothing = mine + others == 0
    total = (mine + others).masked_fill(nothing, 1)
    merged = torch.lerp(o.to(lse.dtype), other_o.to(lse.dtype), (others / total)[..., None])
    dtype = torch.promote_types(o.dtype, other_o.dtype)
    return merged.to(dtype), (shift + torch.log(total)).masked_fill(nothing, -torch.inf)


@mistake("merge_attention", "what was subtracted from both logsumexps is not added again to that of all keys")
def merge_shift_lost(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    shift = torch.maximum(lse, other_lse).detach()
    return merged, total - shift.masked_fill(shift == -torch.inf, 0)


@mistake(
    "merge_attention", "the logsumexp of all keys is taken with `log2`: the contract asks for the natural logarithm"
)
def merge_log2(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    shift = torch.maximum(lse, other_lse).detach()
    shift = shift.masked_fill(shift == -torch.inf, 0)
    return merged, shift + (total - shift) / math.log(2.0)


@mistake(
    "merge_attention", "the weights are cut off from autograd: no gradient reaches the logsumexps through the output"
)
def merge_detached(o, lse, other_o, other_lse):
    merged, _ = reference.merge_attention(o, lse.detach(), other_o, other_lse.detach())
    return merged, reference.merge_attention(o, lse, other_o, other_lse)[1]


@mistake("merge_attention", "a row that saw no key on either side gets a logsumexp of 0 instead of -inf")
def merge_empty_is_zero(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    return merged, total.masked_fill(total == -torch.inf, 0)


@mistake("merge_attention", "NaN of a row that saw no key is overwritten at the end: its gradient is NaN all the same")
def merge_nan_hidden(o, lse, other_o, other_lse):
    total = torch.logaddexp(lse, other_lse)
    merged = (lse - total).exp()[..., None] * o + (other_lse - total).exp()[..., None] * other_o
    merged = merged.masked_fill((total == -torch.inf)[..., None], 0)
    return merged.to(torch.promote_types(o.dtype, other_o.dtype)), total


@mistake("merge_attention", "the result has the dtype of the first output: a second one in a wider dtype is rounded")
def merge_rounded_to_first(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    return merged.to(o.dtype), total


@mistake("merge_attention", "the output has the dtype of the logsumexp: two bfloat16 outputs become float32")
def merge_widened(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    return merged.to(lse.dtype), total


@mistake("merge_attention", "the logsumexp is rounded to the dtype of the outputs: it should keep its own")
def merge_lse_rounded(o, lse, other_o, other_lse):
    merged, total = reference.merge_attention(o, lse, other_o, other_lse)
    return merged, total.to(merged.dtype)


# ---- 18.8 to 18.10 zigzag --------------------------------------------------------------------------------------------


@mistake("zigzag_indices", "the positions of a rank are contiguous: the last rank has most to attend to")
def contiguous(length, rank, n_ranks):
    return reference.zigzag_indices(length, rank, n_ranks) * 0 + torch.arange(length).chunk(n_ranks)[rank]


@mistake("zigzag_indices", "the positions are dealt out one by one, in stripes: rank r gets r, r + R, …")
def stripes(length, rank, n_ranks):
    reference.zigzag_indices(length, rank, n_ranks)
    return torch.arange(rank, length, n_ranks)


@mistake("zigzag_indices", "the second chunk is r + R instead of 2R - 1 - r: later ranks have more work")
def chunk_plus_ranks(length, rank, n_ranks):
    reference.zigzag_indices(length, rank, n_ranks)
    chunks = torch.arange(length).view(2 * n_ranks, -1)
    return torch.cat([chunks[rank], chunks[rank + n_ranks]])


@mistake("zigzag_indices", "the second chunk runs backwards")
def backwards(length, rank, n_ranks):
    first, last = reference.zigzag_indices(length, rank, n_ranks).chunk(2)
    return torch.cat([first, last.flip(0)])


@mistake("zigzag_indices", "only R has to divide the length, not 2R: an odd share is cut into unequal chunks")
def only_ranks(length, rank, n_ranks):
    share = equal_part(length, n_ranks, "length")
    if not 0 <= rank < n_ranks:
        raise ValueError(f"no rank {rank}")
    half = share - share // 2
    return torch.cat(
        [
            torch.arange(rank * half, rank * half + half),
            torch.arange(length - (rank + 1) * (share - half), length - rank * (share - half)),
        ]
    )


@mistake("zigzag_indices", "the two chunks are r and 2R - r: off by one, and rank 0 would begin after the end")
def off_by_one(length, rank, n_ranks):
    reference.zigzag_indices(length, rank, n_ranks)
    chunks = torch.arange(length).view(2 * n_ranks, -1)
    return torch.cat([chunks[rank], chunks[(2 * n_ranks - rank) % (2 * n_ranks)]])


@mistake("zigzag_indices", "the late chunk comes before the early one: the positions are not ascending")
def late_first(length, rank, n_ranks):
    early, late = reference.zigzag_indices(length, rank, n_ranks).chunk(2)
    return torch.cat([late, early])


@mistake("zigzag_indices", "the positions are a list of integers instead of a tensor")
def positions_listed(length, rank, n_ranks):
    return reference.zigzag_indices(length, rank, n_ranks).tolist()


@mistake("zigzag_indices", "a rank that does not exist is not refused: Python counts a negative index from the end")
def rank_unchecked(length, rank, n_ranks):
    chunks = torch.arange(length).view(2 * n_ranks, equal_part(length, 2 * n_ranks, "length"))
    return torch.cat([chunks[rank], chunks[-1 - rank]])


@mistake("zigzag_shard", "the share is a contiguous stretch of the sequence")
def contiguous_share(x, dim, group):
    reference.zigzag_shard(x, dim, group)
    return cut(x, dim, group)


@mistake("zigzag_shard", "the first dimension is cut, whatever `dim` says")
def shard_first_dim(x, dim, group):
    reference.zigzag_shard(x, dim, group)
    return reference.zigzag_shard(x, 0, group)


@mistake("zigzag_shard", "the group is ignored: all ranks of the world get a share")
def shard_of_world(x, dim, group):
    reference.zigzag_shard(x, dim, group)
    return reference.zigzag_shard(x, dim, None)


@mistake("zigzag_shard", "the result is cut off from autograd")
def shard_detached(x, dim, group):
    return reference.zigzag_shard(x.detach(), dim, group)


@mistake("zigzag_shard", "a negative `dim` is taken for the first dimension: it counts from the end")
def shard_negative_dim(x, dim, group):
    reference.zigzag_shard(x, dim, group)
    return reference.zigzag_shard(x, max(0, dim), group)


@mistake("zigzag_shard", "a length that 2R does not divide is not refused: its end is lost")
def shard_ragged(x, dim, group):
    n_chunks = 2 * dist.get_world_size(group)
    return reference.zigzag_shard(x.narrow(dim, 0, x.shape[dim] // n_chunks * n_chunks), dim, group)


@mistake("zigzag_shard", "backward sums the gradient over the ranks: the contract asks for this rank's part")
def shard_summed(x, dim, group):
    return reference.zigzag_shard(CopyToRegion.apply(x, group) if x.requires_grad else x, dim, group)


@mistake("zigzag_gather", "the shares are put side by side in rank order, and the zigzag is not undone")
def not_undone(x, dim, group):
    equal_part(x.shape[dim], 2, "share")
    return reference.GatherSequence.apply(x, dim, group)


@mistake(
    "zigzag_gather",
    "the order of the shares is applied instead of its inverse: it is dealt out again, not put together",
)
def order_not_inverted(x, dim, group):
    equal_part(x.shape[dim], 2, "share")
    whole, n_ranks = reference.GatherSequence.apply(x, dim, group), dist.get_world_size(group)
    order = torch.cat([reference.zigzag_indices(whole.shape[dim], rank, n_ranks) for rank in range(n_ranks)])
    return whole.index_select(dim, order)


@mistake("zigzag_gather", "the gradient is this rank's own: the other ranks' gradients are not added")
def gather_own_gradient(x, dim, group):
    whole = reference.zigzag_gather(x.detach(), dim, group)
    if not x.requires_grad:
        return whole
    rank, n_ranks = place(group)
    return whole.index_copy(dim, reference.zigzag_indices(whole.shape[dim], rank, n_ranks), x)


@mistake("zigzag_gather", "the result is cut off from autograd")
def gather_detached(x, dim, group):
    return reference.zigzag_gather(x.detach(), dim, group)


@mistake(
    "zigzag_gather", "the late chunks are put together in rank order, but they lie from the last rank to the first"
)
def late_chunks_in_rank_order(x, dim, group):
    equal_part(x.shape[dim], 2, "share")
    chunks = reference.GatherSequence.apply(x, dim, group).chunk(2 * dist.get_world_size(group), dim)
    return torch.cat(chunks[::2] + chunks[1::2], dim)


@mistake("zigzag_gather", "the first dimension is put together, whatever `dim` says")
def gather_first_dim(x, dim, group):
    return reference.zigzag_gather(x, 0, group)


@mistake("zigzag_gather", "the group is ignored: all ranks of the world take part")
def gather_of_world(x, dim, group):
    return reference.zigzag_gather(x, dim, None)


@mistake("zigzag_gather", "shares of an odd length are cut into unequal chunks instead of refused")
def gather_odd(x, dim, group):
    halves = [
        share.tensor_split(2, dim)
        for share in reference.GatherSequence.apply(x, dim, group).chunk(dist.get_world_size(group), dim)
    ]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


# ---- 18.11 ring_block ------------------------------------------------------------------------------------------------


@mistake("ring_block", "zigzag shares are treated as contiguous ones: whole pairs of earlier ranks, none of later ones")
def block_contiguous(rank, source, length, is_causal=False, layout="contiguous"):
    reference.ring_block(rank, source, length, is_causal, layout)
    return reference.ring_block(rank, source, length, is_causal, "contiguous")


@mistake("ring_block", "every block of a causal attention gets a mask, also those whose keys are all earlier")
def block_always_masked(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    return block and (*block[:2], is_causal)


@mistake(
    "ring_block", "the two halves of zigzag are exchanged: earlier ranks' pairs meet the second half of the queries"
)
def block_halves_exchanged(rank, source, length, is_causal=False, layout="contiguous"):
    if layout == "zigzag" and is_causal and source != rank:
        return reference.ring_block(source, rank, length, is_causal, layout)
    return reference.ring_block(rank, source, length, is_causal, layout)


@mistake("ring_block", "earlier and later ranks are exchanged: queries meet the keys that come after them")
def block_later(rank, source, length, is_causal=False, layout="contiguous"):
    if layout == "contiguous" and is_causal and source != rank:
        return reference.ring_block(source, rank, length, is_causal, layout)
    return reference.ring_block(rank, source, length, is_causal, layout)


@mistake("ring_block", "blocks are skipped without a mask, too")
def block_skips_always(rank, source, length, is_causal=False, layout="contiguous"):
    if not is_causal and source > rank:
        return None
    return reference.ring_block(rank, source, length, is_causal, layout)


@mistake("ring_block", "the mask is missing on the rank's own pair")
def block_unmasked(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    return block and (*block[:2], False)


@mistake("ring_block", "all keys of an earlier rank's zigzag pair are attended to, although its second half is later")
def block_all_of_earlier(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    if layout == "zigzag" and is_causal and source < rank:
        return slice(0, length), slice(0, length), False
    return block


@mistake(
    "ring_block", "later ranks' zigzag pairs meet the first half of the queries, which comes before all of their keys"
)
def block_first_half_of_queries(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    if layout == "zigzag" and is_causal and source > rank:
        return slice(0, length // 2), slice(0, length), False
    return block


@mistake(
    "ring_block", "only the first half of a later rank's zigzag pair is attended to, although all of it is earlier"
)
def block_half_of_later(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    if layout == "zigzag" and is_causal and source > rank:
        return slice(length // 2, length), slice(0, length // 2), False
    return block


@mistake("ring_block", "later ranks' zigzag pairs are skipped, as if the layout were contiguous")
def block_skips_later_zigzag(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    return None if is_causal and source > rank else block


@mistake("ring_block", "no scores to compute are two empty slices instead of None")
def block_of_nothing(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    return block or (slice(0, 0), slice(0, 0), False)


@mistake("ring_block", "the slices have no bounds: `slice(None)` instead of `slice(0, length)`")
def block_without_bounds(rank, source, length, is_causal=False, layout="contiguous"):
    block = reference.ring_block(rank, source, length, is_causal, layout)
    return block and (*(slice(None) if x == slice(0, length) else x for x in block[:2]), block[2])


@mistake("ring_block", "an odd share is cut into unequal halves instead of refused")
def block_odd(rank, source, length, is_causal=False, layout="contiguous"):
    if layout != "zigzag" or not length % 2:
        return reference.ring_block(rank, source, length, is_causal, layout)
    if not is_causal or source == rank:
        return slice(0, length), slice(0, length), is_causal
    half, everything = length // 2, slice(0, length)
    return (everything, slice(0, half), False) if source < rank else (slice(half, length), everything, False)


@mistake("ring_block", "layout and length are checked only where a mask cuts the block: without one, everything passes")
def block_checked_late(rank, source, length, is_causal=False, layout="contiguous"):
    if not is_causal or source == rank:
        return slice(0, length), slice(0, length), is_causal
    return reference.ring_block(rank, source, length, is_causal, layout)


# ---- 18.12 ring_attention --------------------------------------------------------------------------------------------


def wait(messages):
    for message in messages:
        message()


class Ring(torch.autograd.Function):
    """Ring attention whose every choice can be made wrongly."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, group, layout, wrong):
        rank, n_ranks = place(group)
        wide = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros(q.shape, dtype=q.dtype if wrong == "narrow output" else wide)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype if wrong == "narrow lse" else wide)
        pairs, sources = Ring.pairs(k, v, group, wrong), []
        kept = []
        for source, (key, value) in pairs:
            sources.append(source)
            if wrong == "keeps pairs":
                kept.append(torch.stack((key, value)))
            block = Ring.block(rank, source, q.shape[-2], is_causal, layout, wrong)
            if wrong == "computes all" and block is None:
                block_forward(q, key, value, False)
            if block is None:
                continue
            rows, cols, masked = block
            part = block_forward(q[..., rows, :], key[..., cols, :], value[..., cols, :], masked)
            if wrong == "unweighted":
                o[..., rows, :] += part[0] / n_ranks
                lse[..., rows] = torch.logaddexp(lse[..., rows], part[1])
            elif wrong == "last block":
                o[..., rows, :], lse[..., rows] = part
            else:
                o[..., rows, :], lse[..., rows] = reference.merge_attention(o[..., rows, :], lse[..., rows], *part)
            if wrong == "lse of the last block":
                ctx.last = part[1] if part[1].shape == lse.shape else lse.clone()
        ctx.of_call = is_causal, group, layout, wrong
        ctx.save_for_backward(q, k, v, o if wrong == "wide output kept" else o.to(q.dtype), lse, *kept)
        return o if wrong == "wide output" else o.to(q.dtype)

    @staticmethod
    def pairs(k, v, group, wrong):
        if wrong == "alone":
            return [(dist.get_rank(group), torch.stack((k, v)))]
        if wrong in ("sends after", "waits first", "third pair", "new buffers", "once more"):
            return Ring.slow(torch.stack((k, v)), group, wrong)
        if wrong == "sources":
            rank, n_ranks = place(group)
            around = reference._around(torch.stack((k, v)), group)
            return (((2 * rank - source) % n_ranks, pair) for source, pair in around)
        return reference._around(torch.stack((k, v)), group)

    @staticmethod
    def slow(pair, group, wrong):
        rank, n_ranks = place(group)
        pairs = []
        for step in range(n_ranks):
            is_last = step == n_ranks - 1 and wrong != "once more"
            arriving = torch.empty_like(pair)
            messages = [] if is_last or wrong == "sends after" else [pass_on(pair, arriving, group)]
            if wrong == "waits first":
                wait(messages)
            yield (rank - step) % n_ranks, pair
            if wrong == "sends after" and not is_last:
                messages = [pass_on(pair, arriving, group)]
            if wrong != "waits first":
                wait(messages)
            if wrong == "third pair":
                pairs.append(pair)
            pair = arriving

    @staticmethod
    def block(rank, source, length, is_causal, layout, wrong):
        if wrong == "no mask":
            is_causal = False
        if wrong == "contiguous":
            layout = "contiguous"
        if wrong == "only the diagonal is masked" and is_causal and source != rank:
            return slice(0, length), slice(0, length), False
        return reference.ring_block(rank, source, length, is_causal, layout)

    @staticmethod
    def backward(ctx, do):
        if ctx.of_call[-1] != "twice":
            return first_derivative_only(Ring.gradients)(ctx, do)
        return Ring.gradients(ctx, do)

    @staticmethod
    def gradients(ctx, do):
        (q, k, v, o, lse, *_), (is_causal, group, layout, wrong) = ctx.saved_tensors, ctx.of_call
        rank, mine, arriving, messages = dist.get_rank(group), None, None, []
        if wrong == "lse of the last block":
            lse = ctx.last
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros(q.shape, dtype=q.dtype if wrong == "narrow dq" else wide)
        for source, (key, value) in Ring.pairs(k, v, group, wrong):
            grads = torch.zeros((2, *k.shape), dtype=wide if wrong == "wide gradients" else k.dtype)
            block = Ring.block(rank, source, q.shape[-2], is_causal, layout, wrong)
            if wrong == "computes all" and block is None:
                block_backward(q, key, value, o, do, lse, False)
            if block is not None:
                rows, cols, masked = block
                kept = (o[..., rows, :], do[..., rows, :], lse[..., rows])
                part = block_backward(q[..., rows, :], key[..., cols, :], value[..., cols, :], *kept, masked)
                dq[..., rows, :] = part[0] if wrong == "last dq" else dq[..., rows, :] + part[0]
                grads[0, ..., cols, :], grads[1, ..., cols, :] = part[1:]
            if source == rank:
                mine = grads
                continue
            if wrong == "gradients stay":
                continue
            if arriving is not None:
                wait(messages)
                if wrong != "gradients forgotten":
                    grads += arriving
            arriving = torch.empty_like(grads)
            messages = [pass_on(grads, arriving, group)]
        wait(messages)
        dk, dv = mine if arriving is None else mine + arriving
        if wrong == "own gradients lost" and arriving is not None:
            dk, dv = arriving
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def ring(wrong, sentence):
    """A mistake of ``ring_attention`` that makes one wrong choice."""

    def attention(q, k, v, is_causal=False, group=None, layout="contiguous"):
        for tensor in (q, k):
            check_shares(tensor.shape[-2], tensor.device, group)
        reference.ring_block(0, 0, q.shape[-2], is_causal, layout)
        return Ring.apply(q, k, v, is_causal, None if wrong == "world" else group, layout, wrong)

    return mistake("ring_attention", sentence)(attention)


ring("alone", "each rank attends to its own keys only: nothing goes round")
ring("sends after", "a pair is sent on only after the rank has computed with it: no message is on its way meanwhile")
ring("waits first", "the rank waits for the next pair before it computes with the present one: nothing overlaps")
ring("third pair", "every pair that came by is kept: a rank ends up with the whole sequence")
ring("new buffers", "each pair gets a new buffer while the one before the last is still held: three pairs at once")
ring("keeps pairs", "every pair is kept for backward, instead of sending them round once more")
ring("computes all", "blocks that the mask hides are computed and then thrown away")
ring("unweighted", "the blocks' outputs are averaged instead of weighted by their logsumexp")
ring("last block", "every block overwrites the output: only the last pair counts")
ring("no mask", "`is_causal` has no effect on the blocks")
ring("contiguous", "`layout` has no effect: zigzag positions are masked as if they were contiguous")
ring("only the diagonal is masked", "later ranks' keys are attended to: only the rank's own block is causal")
ring(
    "lse of the last block",
    "backward computes the weights from the logsumexp of one block instead of that of the whole row",
)
ring("gradients stay", "dK and dV are not sent home: each rank keeps those that its own queries gave")
ring("gradients forgotten", "dK and dV travel, but each rank overwrites what came before it instead of adding to it")
ring("last dq", "every block overwrites dQ: only the last pair counts")
ring("wide gradients", "dK and dV travel in float32: twice the bytes; the contract asks for the inputs' dtype")
ring(
    "twice", "a second derivative is returned, and is wrong: backward's messages have none; see `first_derivative_only`"
)
ring("sources", "the pairs arrive from the previous rank, and are taken for the next ranks': r + 1 instead of r - 1")
ring("world", "the group is ignored: all ranks of the world take part")
ring("once more", "the pair is passed on after the last block, too: R messages where R - 1 are enough")
ring("narrow output", "the output is summed in the dtype of `q`: bfloat16 rounds it at every step")
ring("narrow lse", "the logsumexp is kept in the dtype of `q`: in bfloat16 the weights of the blocks are wrong")
ring("narrow dq", "dQ is summed in the dtype of `q`: bfloat16 rounds it at every step")
ring("wide output", "the output stays in float32: the contract asks for the dtype of `q`")
ring("wide output kept", "autograd keeps the output in float32: twice the bytes of the one that is returned")
ring("own gradients lost", "what a rank's own queries give to its own dK and dV is lost")


@mistake("ring_attention", "keys and values are all-gathered: every rank holds all of them, and nothing overlaps")
def ring_by_gather(q, k, v, is_causal=False, group=None, layout="contiguous"):
    reference.ring_block(0, 0, q.shape[-2], is_causal, layout)
    (rank, n_ranks), length = place(group), k.shape[-2] * dist.get_world_size(group)
    shares = [
        reference.zigzag_indices(length, r, n_ranks) if layout == "zigzag" else torch.arange(length).chunk(n_ranks)[r]
        for r in range(n_ranks)
    ]
    n_repeats = q.shape[1] // k.shape[1]
    k, v = (reference.GatherSequence.apply(x, 2, group).repeat_interleave(n_repeats, 1) for x in (k, v))
    mask = torch.cat(shares) <= shares[rank][:, None] if is_causal else None
    return scaled_dot_product_attention(q, k, v, mask)


# ---- 18.13 context_parallel_bytes, 18.14 hidden_length ---------------------------------------------------------------


class Sizes:
    """A config with some sizes changed."""

    def __init__(self, config, **changed):
        self.dim, self.n_layers, self.n_heads = config.dim, config.n_layers, config.n_heads
        self.n_kv_heads = getattr(config, "n_kv_heads", config.n_heads)
        self.__dict__.update(changed)


right_bytes = reference.context_parallel_bytes


def all_to_all_bytes(config, batch, length, n_ranks, key_heads):
    """Bytes of four all-to-alls a layer, with so many key/value heads on all ranks together."""
    head_bytes = 2 * batch * (length // n_ranks) * (config.dim // config.n_heads)
    return config.n_layers * 4 * (config.n_heads + key_heads) // n_ranks * (n_ranks - 1) * head_bytes


@mistake(
    "context_parallel_bytes",
    'for "ulysses", max(G, R) key/value heads are counted; ranks that don\'t divide G get the least common multiple',
)
def bytes_of_the_larger(config, batch, length, n_ranks, kind):
    right = right_bytes(config, batch, length, n_ranks, kind)
    groups = max(getattr(config, "n_kv_heads", config.n_heads), n_ranks)
    return right if kind == "ring" else all_to_all_bytes(config, batch, length, n_ranks, groups)


@mistake("context_parallel_bytes", 'for "ulysses", keys and values are counted with H heads instead of G')
def bytes_of_all_heads_exchanged(config, batch, length, n_ranks, kind):
    right = right_bytes(config, batch, length, n_ranks, kind)
    return right if kind == "ring" else all_to_all_bytes(config, batch, length, n_ranks, config.n_heads)


@mistake("context_parallel_bytes", "keys and values are counted with H heads instead of their own G")
def bytes_of_all_heads(config, batch, length, n_ranks, kind):
    return right_bytes(Sizes(config, n_kv_heads=config.n_heads), batch, length, n_ranks, kind)


@mistake("context_parallel_bytes", "the layers are not counted: these are the bytes of one")
def bytes_of_a_layer(config, batch, length, n_ranks, kind):
    return right_bytes(Sizes(config, n_layers=1), batch, length, n_ranks, kind)


@mistake("context_parallel_bytes", "only the forward pass is counted")
def bytes_forward(config, batch, length, n_ranks, kind):
    return right_bytes(config, batch, length, n_ranks, kind) // (3 if kind == "ring" else 2)


@mistake("context_parallel_bytes", "dK and dV are not counted: backward sends more than keys and values once more")
def bytes_without_gradients(config, batch, length, n_ranks, kind):
    return right_bytes(config, batch, length, n_ranks, kind) * (2 if kind == "ring" else 3) // 3


@mistake(
    "context_parallel_bytes",
    "a pair takes R steps round the ring, and a rank sends its own part of an all-to-all: R where R - 1 belongs",
)
def bytes_of_all_ranks(config, batch, length, n_ranks, kind):
    found = right_bytes(config, batch, length, n_ranks, kind)
    return found * n_ranks // max(1, n_ranks - 1) if n_ranks > 1 else 8


@mistake("context_parallel_bytes", "the whole sequence is counted instead of one rank's share")
def bytes_of_the_sequence(config, batch, length, n_ranks, kind):
    return right_bytes(config, batch, length, n_ranks, kind) * n_ranks


@mistake("context_parallel_bytes", "values have 4 bytes instead of 2")
def bytes_in_float32(config, batch, length, n_ranks, kind):
    return 2 * right_bytes(config, batch, length, n_ranks, kind)


@mistake("context_parallel_bytes", "the batch is not counted: these are the bytes of one sequence")
def bytes_of_a_sequence(config, batch, length, n_ranks, kind):
    return right_bytes(config, 1, length, n_ranks, kind)


@mistake("context_parallel_bytes", 'for "ring", the bytes of K are counted and those of V are not')
def bytes_of_keys(config, batch, length, n_ranks, kind):
    right = right_bytes(config, batch, length, n_ranks, kind)
    return right // 2 if kind == "ring" else right


@mistake(
    "context_parallel_bytes", 'for "ulysses", the way back of the output is not counted: three all-to-alls of four'
)
def bytes_without_output(config, batch, length, n_ranks, kind):
    right = right_bytes(config, batch, length, n_ranks, kind)
    queries = all_to_all_bytes(config, batch, length, n_ranks, 0) // 2
    return right if kind == "ring" else right - queries


@mistake("context_parallel_bytes", "a length or heads that the ranks don't divide are rounded down instead of refused")
def bytes_rounded_down(config, batch, length, n_ranks, kind):
    length = length // n_ranks * n_ranks
    if kind != "ulysses":
        return right_bytes(config, batch, length, n_ranks, kind)
    groups = math.lcm(getattr(config, "n_kv_heads", config.n_heads), n_ranks)
    return all_to_all_bytes(config, batch, length, n_ranks, groups)


@mistake("context_parallel_bytes", 'every kind but "ring" is counted as "ulysses": another string is not refused')
def bytes_of_any_kind(config, batch, length, n_ranks, kind):
    return right_bytes(config, batch, length, n_ranks, kind if kind == "ring" else "ulysses")


@mistake("context_parallel_bytes", "the bytes are a float: bytes are counted in whole numbers, which // divides")
def bytes_as_floats(config, batch, length, n_ranks, kind):
    return float(right_bytes(config, batch, length, n_ranks, kind))


@mistake("hidden_length", "keys and values are counted with as many heads as the queries: G/H is missing")
def hidden_without_groups(config, n_ranks, peak_flops, bandwidth):
    return reference.hidden_length(Sizes(config, n_kv_heads=config.n_heads), n_ranks, peak_flops, bandwidth)


@mistake("hidden_length", "only one of the two products of a block is counted: half the FLOPs, so twice the length")
def hidden_one_product(config, n_ranks, peak_flops, bandwidth):
    return reference.hidden_length(config, n_ranks, 2 * peak_flops, bandwidth)


@mistake("hidden_length", "the length of the whole sequence is returned instead of one rank's share")
def hidden_whole_length(config, n_ranks, peak_flops, bandwidth):
    return n_ranks * reference.hidden_length(config, n_ranks, peak_flops, bandwidth)


@mistake("hidden_length", "the length is rounded down: there, sending still takes longer")
def hidden_rounded_down(config, n_ranks, peak_flops, bandwidth):
    found = config.n_kv_heads * peak_flops / (config.n_heads * bandwidth)
    return max(1, math.floor(found)) if n_ranks > 1 else 1


@mistake("hidden_length", "the bytes of K are counted and those of V are not")
def hidden_one_tensor(config, n_ranks, peak_flops, bandwidth):
    return reference.hidden_length(config, n_ranks, peak_flops / 2, bandwidth)


@mistake("hidden_length", "G/H is turned over: fewer key/value heads make the length longer")
def hidden_turned_over(config, n_ranks, peak_flops, bandwidth):
    found = config.n_heads * peak_flops / (config.n_kv_heads * bandwidth)
    return max(1, math.ceil(found)) if n_ranks > 1 else 1


@mistake("hidden_length", "a single rank is counted like several, although it has nothing to send")
def hidden_alone(config, n_ranks, peak_flops, bandwidth):
    return reference.hidden_length(config, max(2, n_ranks), peak_flops, bandwidth)


@mistake("hidden_length", "the length is a float: positions are counted in whole numbers")
def hidden_as_a_float(config, n_ranks, peak_flops, bandwidth):
    return float(reference.hidden_length(config, n_ranks, peak_flops, bandwidth))
