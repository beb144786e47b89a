"""What goes wrong when people cut layers across ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from lib.workbook.grading import mistake
from solutions import tensor_parallel as reference
from solutions.attention import merge_heads, scaled_dot_product_attention, split_heads
from solutions.rope import apply_rope


def summed(x, group):
    """The sum of all ranks' tensors."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def part(full, dim, group):
    """This rank's part of a whole parameter."""
    parts = full.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone(memory_format=torch.contiguous_format))


def local_size(size, group):
    """How much of ``size`` a rank has."""
    if size % dist.get_world_size(group):
        raise ValueError(f"{size} features or heads cannot be cut for {dist.get_world_size(group)} ranks")
    return size // dist.get_world_size(group)


# ---- 13.1 partitioned_dot --------------------------------------------------------------------------------------------


@mistake("partitioned_dot", "all elements go into one product: nothing is cut")
def in_one(a, b, parts):
    reference.partitioned_dot(a, b, parts)
    return torch.dot(a, b)


@mistake("partitioned_dot", "all parts have n // parts elements, and the rest is lost")
def rest_lost(a, b, parts):
    reference.partitioned_dot(a, b, parts)
    size = len(a) // parts
    return sum(
        (torch.dot(a[i * size : (i + 1) * size], b[i * size : (i + 1) * size]) for i in range(parts)), a.new_zeros(())
    )


@mistake(
    "partitioned_dot", "chunk cuts 10 in 4 as 3, 3, 3 and 1; the contract asks for 3, 3, 2 and 2, as tensor_split cuts"
)
def chunked(a, b, parts):
    reference.partitioned_dot(a, b, parts)
    return torch.stack([torch.dot(p, q) for p, q in zip(a.chunk(parts), b.chunk(parts), strict=True)]).sum()


@mistake("partitioned_dot", "the mean of the partial sums is returned instead of their sum")
def mean_of_parts(a, b, parts):
    return reference.partitioned_dot(a, b, parts) / parts


@mistake("partitioned_dot", "the partial sums are returned without being added")
def partial_sums(a, b, parts):
    reference.partitioned_dot(a, b, parts)
    return torch.stack([torch.dot(p, q) for p, q in zip(a.tensor_split(parts), b.tensor_split(parts), strict=True)])


@mistake("partitioned_dot", "the lengths are not compared: the longer vector loses its end")
def lengths_ignored(a, b, parts):
    n = min(len(a), len(b))
    return reference.partitioned_dot(a[:n], b[:n], parts)


# ---- 13.2 matmul_outer -----------------------------------------------------------------------------------------------


@mistake("matmul_outer", "the result is summed over the ranks, but they hold different columns, not parts of a sum")
def outer_reduced(a, b_shard):
    product = a @ b_shard
    if dist.is_initialized():
        dist.all_reduce(product)
    return product


@mistake(
    "matmul_outer", "the columns of all ranks are gathered, but the result should stay cut, and nothing should be sent"
)
def outer_gathered(a, b_shard):
    product = a @ b_shard
    if not dist.is_initialized():
        return product
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, product)
    return torch.cat(parts, dim=-1)


@mistake("matmul_outer", "b_shard is transposed, like the weight of nn.Linear; here it is [K, N/R]")
def outer_transposed(a, b_shard):
    return a @ b_shard.T


# ---- 13.3 matmul_inner -----------------------------------------------------------------------------------------------


@mistake("matmul_inner", "the partial products are never added: each rank has one part of each sum")
def inner_partial(a_shard, b_shard, group):
    return a_shard @ b_shard


@mistake(
    "matmul_inner", "the mean over the ranks is taken, as for the gradients in chapter 10; here it should be the sum"
)
def inner_mean(a_shard, b_shard, group):
    return reference.matmul_inner(a_shard, b_shard, group) / dist.get_world_size(group)


@mistake("matmul_inner", "the sum goes over all ranks, whatever the group")
def inner_group_ignored(a_shard, b_shard, group):
    return reference.matmul_inner(a_shard, b_shard, None)


@mistake(
    "matmul_inner", "the inputs are summed first and then multiplied, but a sum of products is not a product of sums"
)
def inner_inputs_reduced(a_shard, b_shard, group):
    a = a_shard.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(a, group=group)
    return a @ b_shard


@mistake("matmul_inner", "only the first rank has the result: this is a reduce, but all ranks need it")
def inner_to_root(a_shard, b_shard, group):
    product = a_shard @ b_shard
    dist.reduce(product, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
    return product


# ---- 13.4 CopyToRegion -----------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """f in steps, each of which a mistake may take in its own way."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)


@mistake(
    "CopyToRegion",
    "the gradients of the ranks are not summed: each rank has only the gradient from its own part of the layer",
)
class CopyWithoutSum(_Copy):
    @staticmethod
    def backward(ctx, grad):
        return grad, None


@mistake("CopyToRegion", "f and g are exchanged: it sums forward instead of backward")
class CopyIsReduce(_Copy):
    @staticmethod
    def forward(ctx, x, group=None):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@mistake(
    "CopyToRegion",
    "the mean of the gradients is taken, but each rank used x for a different part, so they should be added",
)
class CopyMean(_Copy):
    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group) / dist.get_world_size(ctx.group), None


@mistake("CopyToRegion", "the incoming gradient is all-reduced in place, although it may be needed elsewhere")
class CopyInPlace(_Copy):
    @staticmethod
    def backward(ctx, grad):
        grad = grad if grad.is_contiguous() else grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@mistake("CopyToRegion", "the sum goes over all ranks, whatever the group")
class CopyGroupIgnored(_Copy):
    @staticmethod
    def backward(ctx, grad):
        return summed(grad, None), None


@mistake(
    "CopyToRegion",
    "the clone keeps the gradient's order in memory, in which the ranks may differ: clone it with contiguous_format",
)
class CopyNotContiguous(_Copy):
    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


# ---- 13.5 ReduceFromRegion -------------------------------------------------------------------------------------------


class _Reduce(torch.autograd.Function):
    """g in steps."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@mistake(
    "ReduceFromRegion",
    "the gradient is summed again, although all ranks have the same one: it becomes R times too large",
)
class ReduceTwice(_Reduce):
    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


@mistake("ReduceFromRegion", "nothing is summed forward")
class ReduceNothing(_Reduce):
    @staticmethod
    def forward(ctx, x, group=None):
        return x.view_as(x)


@mistake("ReduceFromRegion", "x itself is all-reduced, so that the caller's tensor changes: sum a clone")
class ReduceInPlace(_Reduce):
    @staticmethod
    def forward(ctx, x, group=None):
        total = x.detach() if x.is_contiguous() else x.detach().contiguous()
        dist.all_reduce(total, group=group)
        return total.clone()


@mistake("ReduceFromRegion", "the gradient is divided by the number of ranks: each part counts fully in the sum")
class ReduceShared(_Reduce):
    @staticmethod
    def backward(ctx, grad):
        return grad / dist.get_world_size(ctx.group), None


@mistake("ReduceFromRegion", "the sum goes over all ranks, whatever the group")
class ReduceGroupIgnored(_Reduce):
    @staticmethod
    def forward(ctx, x, group=None):
        return summed(x, None)


@mistake(
    "ReduceFromRegion",
    "the clone keeps x's order in memory, in which the ranks may differ: clone it with contiguous_format",
)
class ReduceNotContiguous(_Reduce):
    @staticmethod
    def forward(ctx, x, group=None):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total


# ---- 13.6 ColumnParallelLinear ---------------------------------------------------------------------------------------


@mistake("ColumnParallelLinear", "f is missing: x's gradient comes from this rank's outputs alone; use CopyToRegion")
class ColumnWithoutCopy(reference.ColumnParallelLinear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


@mistake("ColumnParallelLinear", "the outputs of all ranks are gathered, but they should stay split")
class ColumnGathered(reference.ColumnParallelLinear):
    def forward(self, x):
        out = super().forward(x).contiguous()
        parts = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, out.detach(), group=self.group)
        return torch.cat(parts, -1)


@mistake("ColumnParallelLinear", "each rank draws a small layer of its own: the parts are not those of one nn.Linear")
class ColumnOwnStart(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        nn.Module.__init__(self)
        small = nn.Linear(in_features, local_size(out_features, group), bias)
        self.group, self.weight, self.bias = group, small.weight, small.bias


@mistake("ColumnParallelLinear", "every rank keeps the first part of the weight")
class ColumnFirstPart(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        nn.Module.__init__(self)
        n = local_size(out_features, group)
        full = nn.Linear(in_features, out_features, bias)
        self.group, self.weight = group, nn.Parameter(full.weight[:n].detach().clone())
        self.bias = nn.Parameter(full.bias[:n].detach().clone()) if bias else None


@mistake("ColumnParallelLinear", "the weight is cut along its inputs: that is the row layer")
class ColumnIsRow(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features, group, bias)
        self.weight = part(nn.Linear(in_features, out_features).weight, 1, group)


@mistake("ColumnParallelLinear", "the rank's weight is a view of the whole one, which stays in memory: clone it")
class ColumnView(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        nn.Module.__init__(self)
        local_size(out_features, group)
        full, n, rank = nn.Linear(in_features, out_features, bias), dist.get_world_size(group), dist.get_rank(group)
        self.group, self.weight = group, nn.Parameter(full.weight.detach().chunk(n)[rank])
        self.bias = nn.Parameter(full.bias.detach().chunk(n)[rank]) if bias else None


@mistake("ColumnParallelLinear", "outputs that cannot be divided evenly are dropped without an error")
class ColumnDropsRest(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features - out_features % dist.get_world_size(group), group, bias)


@mistake("ColumnParallelLinear", "the group is not used: the layer is cut for all ranks")
class ColumnGroupIgnored(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features, None, bias)


@mistake(
    "ColumnParallelLinear",
    "a bias is drawn and thrown away, so that what is drawn next is not what one nn.Linear leaves",
)
class ColumnBiasDrawn(reference.ColumnParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features, group)
        self.bias = self.bias if bias else None


# ---- 13.7 RowParallelLinear ------------------------------------------------------------------------------------------


@mistake("RowParallelLinear", "each rank adds the bias before the sum, so the total contains it R times")
class RowBiasInside(reference.RowParallelLinear):
    def forward(self, x):
        return reference.ReduceFromRegion.apply(functional.linear(x, self.weight, self.bias), self.group)


@mistake(
    "RowParallelLinear",
    "the partial products are never added: g, `ReduceFromRegion`, belongs after the product, and f nowhere",
)
class RowPartial(reference.RowParallelLinear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


@mistake(
    "RowParallelLinear",
    "each rank adds 1/R of the bias: the output is right, but the bias's gradient is R times too small",
)
class RowBiasShared(reference.RowParallelLinear):
    def forward(self, x):
        share = None if self.bias is None else self.bias / dist.get_world_size(self.group)
        return reference.ReduceFromRegion.apply(functional.linear(x, self.weight, share), self.group)


@mistake("RowParallelLinear", "the bias is cut like the weight, but every rank should add all of it, after the sum")
class RowBiasCut(reference.RowParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features, group, bias)
        if bias:
            self.bias = nn.Parameter(self.bias.detach().tensor_split(dist.get_world_size(group))[dist.get_rank(group)])


@mistake("RowParallelLinear", "each rank draws a small layer of its own: the parts are not those of one nn.Linear")
class RowOwnStart(reference.RowParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        nn.Module.__init__(self)
        small = nn.Linear(local_size(in_features, group), out_features, bias)
        self.group, self.weight, self.bias = group, small.weight, small.bias


@mistake("RowParallelLinear", "the group is not passed on: the sum goes over all ranks")
class RowGroupIgnored(reference.RowParallelLinear):
    def forward(self, x):
        total = reference.ReduceFromRegion.apply(functional.linear(x, self.weight), None)
        return total if self.bias is None else total + self.bias


@mistake(
    "RowParallelLinear", "a bias is drawn and thrown away, so that what is drawn next is not what one nn.Linear leaves"
)
class RowBiasDrawn(reference.RowParallelLinear):
    def __init__(self, in_features, out_features, group=None, bias=True):
        super().__init__(in_features, out_features, group)
        self.bias = self.bias if bias else None


# ---- 13.8 ParallelMLP ------------------------------------------------------------------------------------------------


@mistake("ParallelMLP", "the GELU is the tanh approximation instead of the exact one")
class MLPTanh(reference.ParallelMLP):
    def forward(self, x):
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


@mistake("ParallelMLP", "there is nothing between the two layers: the GELU is missing")
class MLPLinear(reference.ParallelMLP):
    def forward(self, x):
        return self.fc2(self.fc1(x))


@mistake("ParallelMLP", "the GELU comes after the second layer instead of between the two")
class MLPGeluLast(reference.ParallelMLP):
    def forward(self, x):
        return functional.gelu(self.fc2(self.fc1(x)))


@mistake("ParallelMLP", "x is copied to the region twice, once here and once in fc1: its gradient is R times too large")
class MLPCopiedTwice(reference.ParallelMLP):
    def forward(self, x):
        return super().forward(reference.CopyToRegion.apply(x, self.fc1.group))


@mistake("ParallelMLP", "the group is not passed on to the layers")
class MLPGroupIgnored(reference.ParallelMLP):
    def __init__(self, dim, hidden_dim, group=None):
        super().__init__(dim, hidden_dim)


# ---- 13.9 ParallelAttention ------------------------------------------------------------------------------------------


class _Attention(reference.ParallelAttention):
    """Attention in steps, each of which a mistake may take in its own way."""

    def enter(self, x):
        return reference.CopyToRegion.apply(x, self.group)

    def project(self, x):
        x = self.enter(x)
        return [functional.linear(x, layer.weight) for layer in (self.wq, self.wk, self.wv)]

    def forward(self, x, rope=None, mask=None, cache=None):
        q, k, v = (split_heads(out, self.n_local_heads) for out in self.project(x))
        if rope is not None:
            q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
        if cache is not None:
            k, v = cache.update(k, v)
        return self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))


@mistake(
    "ParallelAttention",
    "wq, wk and wv each all-reduce their own gradient of x: three all-reduces backward instead of one",
)
class AttentionThreeTimes(_Attention):
    def project(self, x):
        return [layer(x) for layer in (self.wq, self.wk, self.wv)]


@mistake(
    "ParallelAttention",
    "the rank's features are split into all H heads instead of H/R, so each head is R times too narrow",
)
class AttentionAllHeads(reference.ParallelAttention):
    def __init__(self, dim, n_heads, group=None):
        super().__init__(dim, n_heads, group)
        self.n_local_heads = n_heads

    def forward(self, x, rope=None, mask=None, cache=None):
        return super().forward(x, None if rope is None else rope[:, : rope.shape[1] // dist.get_world_size()], mask)


@mistake("ParallelAttention", "f is missing: x's gradient comes from this rank's heads alone")
class AttentionWithoutCopy(_Attention):
    def enter(self, x):
        return x


@mistake("ParallelAttention", "the group is not passed on to the layers, which are cut for all ranks")
class AttentionGroupIgnored(reference.ParallelAttention):
    def __init__(self, dim, n_heads, group=None):
        super().__init__(dim, n_heads)


@mistake("ParallelAttention", "wq, wk and wv are drawn in another order than wq, wk, wv, wo")
class AttentionOtherOrder(reference.ParallelAttention):
    def __init__(self, dim, n_heads, group=None):
        super().__init__(dim, n_heads, group)
        self.wq, self.wv = self.wv, self.wq


@mistake("ParallelAttention", "heads of unequal width are not refused: dim must be a multiple of n_heads")
class AttentionAnyDim(reference.ParallelAttention):
    def __init__(self, dim, n_heads, group=None):
        super().__init__(dim, n_heads if dim % n_heads == 0 else local_size(n_heads, group) and dim, group)


@mistake("ParallelAttention", "the mask is not used")
class AttentionWithoutMask(reference.ParallelAttention):
    def forward(self, x, rope=None, mask=None, cache=None):
        return super().forward(x, rope, None, cache)


@mistake("ParallelAttention", "attention is always causal, but without a mask every position may attend to every other")
class AttentionAlwaysCausal(reference.ParallelAttention):
    def forward(self, x, rope=None, mask=None, cache=None):
        return super().forward(x, rope, torch.ones(x.shape[1], x.shape[1]).tril().bool() if mask is None else mask)


@mistake("ParallelAttention", "queries and keys are not rotated")
class AttentionWithoutRope(reference.ParallelAttention):
    def forward(self, x, rope=None, mask=None, cache=None):
        return super().forward(x, None, mask, cache)


# ---- 13.10 vocab_parallel_cross_entropy ------------------------------------------------------------------------------


def _loss(
    logits_shard,
    targets,
    group,
    reduces_max=True,
    offset=None,
    masks=True,
    reduce=None,
    ends=torch.mean,
    refuses=True,
    pads=True,
):
    """The loss in steps, each of which a mistake may take in its own way."""
    reduce = reduce or reference.ReduceFromRegion.apply
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    rank, width = dist.get_rank(group), logits.shape[-1]
    widths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=logits.device)
    widths[rank] = width
    dist.all_reduce(widths, group=group)
    n_ids = int(widths.sum())
    for target in targets.flatten().tolist() if refuses else ():
        if not 0 <= target < n_ids:
            raise ValueError(f"target {target} is no id of a vocabulary of {n_ids}")
    if width == 0 and pads:
        logits = functional.pad(logits, (0, 1), value=-torch.inf)
    largest = logits.detach().amax(-1)
    if reduces_max:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    total = reduce(shifted.exp().sum(-1), group)
    column = targets - (widths[:rank].sum() if offset is None else offset(rank, width))
    found = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[..., None]).squeeze(-1)
    is_here = (column >= 0) & (column < width)
    return ends(total.log() - reduce(torch.where(is_here, found, 0.0) if masks else found, group))


@mistake(
    "vocab_parallel_cross_entropy",
    "each rank subtracts its own largest logit, so the exponentials of different ranks cannot be added",
)
def loss_own_max(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, reduces_max=False)


@mistake(
    "vocab_parallel_cross_entropy",
    "the targets are used as columns of this rank's part; first subtract the id at which it begins",
)
def loss_without_offset(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, offset=lambda rank, width: 0)


@mistake(
    "vocab_parallel_cross_entropy", "all ranks are assumed to have as many columns as this one, but widths may differ"
)
def loss_equal_widths(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, offset=lambda rank, width: rank * width)


@mistake("vocab_parallel_cross_entropy", "ranks that do not have the target add some other logit instead of zero")
def loss_without_mask(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, masks=False)


@mistake("vocab_parallel_cross_entropy", "the sum over the targets is returned instead of the mean")
def loss_summed(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, ends=torch.sum)


@mistake("vocab_parallel_cross_entropy", "the gradient is summed over the ranks once more, and is R times too large")
def loss_reduced_twice(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, reduce=ReduceTwice.apply)


@mistake(
    "vocab_parallel_cross_entropy",
    "the logits are gathered, which costs the memory and the traffic that this loss should avoid",
)
def loss_gathered(logits_shard, targets, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    _loss(logits_shard.detach(), targets, group)  # for the contract's errors
    parts: list = [None] * n
    dist.all_gather_object(parts, logits_shard.detach(), group=group)
    parts[rank] = logits_shard
    logits = torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts], -1)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@mistake("vocab_parallel_cross_entropy", "a rank without any column takes the maximum of nothing, which is an error")
def loss_of_no_columns(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, pads=False)


@mistake(
    "vocab_parallel_cross_entropy", "a target outside of the vocabulary is not refused, and its logit counts as zero"
)
def loss_of_any_target(logits_shard, targets, group):
    return _loss(logits_shard, targets, group, refuses=False)


@mistake("vocab_parallel_cross_entropy", "the group is ignored: the vocabulary is assumed to be on all ranks")
def loss_over_all_ranks(logits_shard, targets, group):
    return _loss(logits_shard, targets, None)


@mistake("vocab_parallel_cross_entropy", "no maximum is subtracted: exponentials of large logits overflow")
def loss_unstable(logits_shard, targets, group):
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    largest = logits.detach().amax(-1, keepdim=True)
    loss = _loss(logits_shard, targets, group)
    return torch.where(largest.max() > 80, torch.inf, loss)


# ---- 13.11 llama_plan ------------------------------------------------------------------------------------------------


def _changed(config, changes):
    plan = reference.llama_plan(config) | changes
    return {name: style for name, style in plan.items() if style is not None}


# first those that the checks of embedding and head meet: a diagnosis has little time


@mistake(
    "llama_plan",
    "T became R x T: RowwiseParallel assumes that its input is cut and gathers the token ids; say with input_layouts that they are whole",
)
def plan_tokens_cut(config):
    return _changed(config, {"tok_embeddings": RowwiseParallel()})


@mistake(
    "llama_plan",
    "the embedding is cut by features (ColwiseParallel), and so is its output; the contract cuts it by tokens (RowwiseParallel)",
)
def plan_embedding_by_features(config):
    return _changed(config, {"tok_embeddings": ColwiseParallel()})


@mistake("llama_plan", "the embedding's output stays cut along the positions, but the blocks need it whole")
def plan_embedding_output_cut(config):
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return _changed(config, {"tok_embeddings": style})


@mistake("llama_plan", "the logits stay cut: output_layouts=Replicate() gathers them")
def plan_logits_cut(config):
    return _changed(config, {"output": ColwiseParallel()})


@mistake("llama_plan", "attention does not know that a rank has only some of its heads: LocalHeads is missing")
def plan_all_heads(config):
    return _changed(config, {"layers.*.attention": None})


@mistake("llama_plan", "the feed-forward's input is not shared: w1 and w3 each sum their own gradient of it")
def plan_without_shared_input(config):
    return _changed(config, {"layers.*.feed_forward": None})


@mistake("llama_plan", "w2 is cut by columns, but its input is cut already, so it should be cut by rows")
def plan_w2_colwise(config):
    return _changed(config, {"layers.*.feed_forward.w2": ColwiseParallel(output_layouts=Replicate())})


@mistake("llama_plan", "wo is cut by columns, but its input is cut already, so it should be cut by rows")
def plan_wo_colwise(config):
    return _changed(config, {"layers.*.attention.wo": ColwiseParallel(output_layouts=Replicate())})


@mistake("llama_plan", "the logits come out as a DTensor; leave out use_local_output=False")
def plan_logits_dtensor(config):
    return _changed(config, {"output": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)})


@mistake("llama_plan", "embedding and head are left whole on every rank")
def plan_without_ends(config):
    return _changed(config, {"tok_embeddings": None, "output": None})


@mistake("llama_plan", "w3 is left whole, so its output does not fit the cut output of w1")
def plan_without_w3(config):
    return _changed(config, {"layers.*.feed_forward.w3": None})


@mistake(
    "llama_plan",
    "wk and wv are always cut like wq, even if there are fewer heads than ranks and a head would be cut in half",
)
def plan_kv_cut(config):
    return _changed(config, {f"layers.*.attention.w{n}": ColwiseParallel() for n in "kv"})


@mistake("llama_plan", "only the first layer is cut; use `*` for the number of the layer")
def plan_first_layer(config):
    return {name.replace("*", "0"): style for name, style in reference.llama_plan(config).items()}


# ---- 13.12 ffn_partition_specs ---------------------------------------------------------------------------------------


@mistake("ffn_partition_specs", "w_out is cut like w_in, but its rows are the hidden features, which Y cuts")
def specs_w_out(layout):
    found = reference.ffn_partition_specs(layout)
    return found | {"w_out": found["w_in"]}


@mistake("ffn_partition_specs", "the embedding of the finalized layout is cut by the batch alone: that is 2d batch")
def specs_by_batch(layout):
    found = reference.ffn_partition_specs(layout)
    return reference.ffn_partition_specs("2d batch") if "final" in layout.lower() else found


@mistake("ffn_partition_specs", "X and Y are exchanged")
def specs_exchanged(layout):
    swap = {"X": "Y", "Y": "X", None: None}
    return {name: tuple(swap[axis] for axis in spec) for name, spec in reference.ffn_partition_specs(layout).items()}


@mistake("ffn_partition_specs", "lists are returned instead of tuples")
def specs_lists(layout):
    return {name: list(spec) for name, spec in reference.ffn_partition_specs(layout).items()}


@mistake("ffn_partition_specs", "dimensions that are not cut have no entry; their entry should be None")
def specs_without_none(layout):
    found = reference.ffn_partition_specs(layout)
    return {name: tuple(axis for axis in spec if axis) for name, spec in found.items()}


@mistake("ffn_partition_specs", "an unknown layout raises a KeyError, which does not list the known layouts")
def specs_key_error(layout):
    try:
        return reference.ffn_partition_specs(layout)
    except ValueError:
        raise KeyError(layout) from None


# ---- 13.13 tensor_parallel_bytes -------------------------------------------------------------------------------------


@mistake(
    "tensor_parallel_bytes",
    "only half is counted: each block has two all-reduces forward, of attention and feed-forward, and two backward",
)
def bytes_forward(config, batch, length, world_size, bytes_per_value=2):
    return reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value) // 2


@mistake(
    "tensor_parallel_bytes",
    "the bytes of the tensors are counted, but in a ring each rank sends 2 (R - 1)/R times as many",
)
def bytes_of_tensor(config, batch, length, world_size, bytes_per_value=2):
    return 4 * config.n_layers * batch * length * config.dim * bytes_per_value


@mistake(
    "tensor_parallel_bytes",
    "2 (R - 1) // R is taken first, which rounds 1.5 down to 1: multiply by the bytes, then divide",
)
def bytes_floored(config, batch, length, world_size, bytes_per_value=2):
    return 2 * (world_size - 1) // world_size * 4 * config.n_layers * batch * length * config.dim * bytes_per_value


@mistake("tensor_parallel_bytes", "values are counted, not bytes")
def bytes_values(config, batch, length, world_size, bytes_per_value=2):
    return reference.tensor_parallel_bytes(config, batch, length, world_size, 1)


@mistake("tensor_parallel_bytes", "the bytes of all ranks are added, but only one rank's are wanted")
def bytes_of_all(config, batch, length, world_size, bytes_per_value=2):
    return world_size * reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value)


@mistake("tensor_parallel_bytes", "every value counts 2 bytes, whatever bytes_per_value is")
def bytes_fixed(config, batch, length, world_size, bytes_per_value=2):
    return reference.tensor_parallel_bytes(config, batch, length, world_size)


@mistake("tensor_parallel_bytes", "the bytes are computed as a float, which is inexact beyond 2**53: use //")
def bytes_as_float(config, batch, length, world_size, bytes_per_value=2):
    share = 2 * (world_size - 1) / world_size
    return int(4 * config.n_layers * batch * length * config.dim * bytes_per_value * share)


@mistake("tensor_parallel_bytes", "a float is returned instead of an int")
def bytes_are_float(config, batch, length, world_size, bytes_per_value=2):
    return float(reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value))


# ---- 13.14 pipeline_bubble -------------------------------------------------------------------------------------------


@mistake("pipeline_bubble", "this is the bubble as a share of the useful time, (p - 1)/m, not of the whole time")
def bubble_of_useful(stages, micro_batches):
    reference.pipeline_bubble(stages, micro_batches)
    return (stages - 1) / micro_batches


@mistake("pipeline_bubble", "this is the useful share of the time: the bubble is the rest")
def bubble_useful(stages, micro_batches):
    return 1 - reference.pipeline_bubble(stages, micro_batches)


@mistake("pipeline_bubble", "the whole has m + p - 1 slots, not m + p")
def bubble_slots(stages, micro_batches):
    reference.pipeline_bubble(stages, micro_batches)
    return (stages - 1) / (micro_batches + stages)


@mistake("pipeline_bubble", "stages and micro-batches are exchanged")
def bubble_exchanged(stages, micro_batches):
    return reference.pipeline_bubble(micro_batches, stages)


@mistake("pipeline_bubble", "numbers below 1 are not refused")
def bubble_unchecked(stages, micro_batches):
    return (stages - 1) / (micro_batches + stages - 1) if micro_batches + stages != 1 else 0.0
