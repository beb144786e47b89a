"""Tensor parallelism: one layer on many ranks, from a dot product cut in two to a whole Llama."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lib.given.models.llama import LlamaConfig
from lib.given.parallel.tensors import KeyValueHeads, LocalHeads, SharedInput
from solutions.attention import merge_heads, scaled_dot_product_attention, split_heads
from solutions.rope import apply_rope


def partitioned_dot(a: Float[Tensor, " n"], b: Float[Tensor, " n"], parts: int) -> Float[Tensor, ""]:
    """A dot product as the sum of the dot products of its parts. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        a: ``[n]``; so is b.
        parts: Number of parts.
            If it does not divide n, the first n % parts have one element more; if n is smaller, the last parts are
            empty.

    Returns:
        The sum of the parts' dot products: a scalar tensor with the dtype of ``a``.

    Raises:
        ValueError: the lengths differ, or ``parts`` is below 1; the message names the numbers.

    Cost: no product takes more elements than one part has, because no rank would hold more.
    """
    ### BEGIN SOLUTION
    if len(a) != len(b) or parts < 1:
        raise ValueError(f"lengths {len(a)} and {len(b)} must be equal, and parts = {parts} at least 1")
    pairs = zip(a.tensor_split(parts), b.tensor_split(parts), strict=True)
    return torch.stack([torch.dot(a_part, b_part) for a_part, b_part in pairs]).sum()
    ### END SOLUTION


def matmul_outer(a: Float[Tensor, "... m k"], b_shard: Float[Tensor, "k n_local"]) -> Float[Tensor, "... m n_local"]:
    """This rank's columns of a product whose second matrix is cut by columns, along an outer axis. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        a: All of ``[..., M, K]``, the same on every rank.
        b_shard: This rank's columns ``[K, N/R]`` of ``[K, N]``; ranks may have different numbers of columns.

    Returns:
        Those columns of the product, ``[..., M, N/R]``.

    Cost: no communication.
    """
    ### BEGIN SOLUTION
    return a @ b_shard
    ### END SOLUTION


def matmul_inner(
    a_shard: Float[Tensor, "... m k_local"], b_shard: Float[Tensor, "k_local n"], group: dist.ProcessGroup | None
) -> Float[Tensor, "... m n"]:
    """The whole product of two matrices that are cut along the inner axis. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        a_shard: This rank's columns ``[..., M, K/R]`` of the first matrix; left unchanged.
        b_shard: The matching rows ``[K/R, N]`` of the second.
        group: The ranks that hold the parts; None means all ranks.

    Returns:
        The product ``[..., M, N]``, the same on every rank. It need not support gradients.

    Cost: one product and one all-reduce of the result.
    """
    ### BEGIN SOLUTION
    product = a_shard @ b_shard
    dist.all_reduce(product, group=group)
    return product
    ### END SOLUTION


### BEGIN SOLUTION
def _local_size(size: int, what: str, group: dist.ProcessGroup | None) -> int:
    world_size = dist.get_world_size(group)
    if size % world_size:
        raise ValueError(f"{what} = {size} cannot be cut into equal parts for {world_size} ranks")
    return size // world_size


def _part(full: Tensor, dim: int, group: dist.ProcessGroup | None) -> nn.Parameter:
    parts = full.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone(memory_format=torch.contiguous_format))


def _all_reduced(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


### END SOLUTION


class CopyToRegion(torch.autograd.Function):
    """f, the entrance of a parallel region: it copies forward, and sums gradients over the ranks backward. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Call it as ``CopyToRegion.apply(x, group)``; None means all ranks.
    ``x`` is the same on every rank, and each rank uses it for a different part of the layer.
    It changes nothing in place.
    Source: Megatron-LM (arXiv:1909.08053), section 3, f in figure 3.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """``x`` itself; no communication."""
        ### BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The sum of all ranks' gradients, and None for the group; one all-reduce."""
        ### BEGIN SOLUTION
        return _all_reduced(grad, ctx.group), None
        ### END SOLUTION


class ReduceFromRegion(torch.autograd.Function):
    """g, the exit of a parallel region: forward it sums over the ranks, backward it passes the gradient on. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Call it as ``ReduceFromRegion.apply(x, group)``; None means all ranks.
    ``x`` is this rank's part of a sum, and every rank continues with the whole sum.
    It changes nothing in place.
    Source: Megatron-LM (arXiv:1909.08053), section 3, g in figure 3.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """The sum of all ranks' ``x``; one all-reduce."""
        ### BEGIN SOLUTION
        return _all_reduced(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The gradient itself, the same on all ranks after the sum, and None for the group."""
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


class ColumnParallelLinear(nn.Module):
    """A linear layer in which each rank computes some of the outputs. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        in_features: Width C of the input, which every rank has whole.
        out_features: Width F of all ranks' outputs together.
        group: The R ranks, None for all.
        bias: Whether there is a bias.

    Attributes:
        weight: ``[F/R, C]``: this rank's rows of ``nn.Linear``'s ``[F, C]``, in rank order.
        bias: ``[F/R]``, or None.

    It starts with the values of ``nn.Linear(C, F)`` under the same seed: every rank draws the whole layer and keeps its
    part.

    Raises:
        ValueError: F is no multiple of R; the message names both.

    Source: Megatron-LM (arXiv:1909.08053), section 3: Y = X [A1, A2].
    Convention: "column" means a column of the paper's A, which is ``weight`` transposed.
    """

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup | None = None, bias: bool = True):
        super().__init__()
        ### BEGIN SOLUTION
        _local_size(out_features, "out_features", group)
        full = nn.Linear(in_features, out_features, bias)
        self.group = group
        self.weight = _part(full.weight, 0, group)
        self.bias = _part(full.bias, 0, group) if bias else None
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... f_local"]:
        """From ``[..., C]``, the same on every rank, to this rank's ``[..., F/R]``.

        Sends nothing forward, all-reduces once backward.
        """
        ### BEGIN SOLUTION
        return nn.functional.linear(CopyToRegion.apply(x, self.group), self.weight, self.bias)
        ### END SOLUTION


class RowParallelLinear(nn.Module):
    """A linear layer in which each rank reads some of the inputs. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        in_features: Width F of all ranks' inputs together.
        out_features: Width C of the output, which every rank gets whole.
        group: The R ranks, None for all.
        bias: Whether there is a bias.

    Attributes:
        weight: ``[C, F/R]``: this rank's columns of ``nn.Linear``'s ``[C, F]``, in rank order.
        bias: ``[C]``, whole on every rank and added once; or None.

    Initial values come from ``nn.Linear(F, C)`` under the same seed, as in ``ColumnParallelLinear``; the source is the
    same, too.

    Raises:
        ValueError: F is no multiple of R; the message names both.
    """

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup | None = None, bias: bool = True):
        super().__init__()
        ### BEGIN SOLUTION
        _local_size(in_features, "in_features", group)
        full = nn.Linear(in_features, out_features, bias)
        self.group = group
        self.weight = _part(full.weight, 1, group)
        self.bias = full.bias
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... f_local"]) -> Float[Tensor, "... c"]:
        """From this rank's ``[..., F/R]`` to the whole ``[..., C]``.

        All-reduces once forward, sends nothing backward.
        """
        ### BEGIN SOLUTION
        total = ReduceFromRegion.apply(nn.functional.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
        ### END SOLUTION


class ParallelMLP(nn.Module):
    """A feed-forward layer on R ranks: the hidden features are cut, and never put together. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        dim: Model width C.
        hidden_dim: Width F between the layers.
        group: The R ranks, None for all.

    Attributes:
        fc1: ``ColumnParallelLinear`` C to F with a bias; ``fc2``: ``RowParallelLinear`` F to C with a bias.
            Between them an exact GELU.

    Raises:
        ValueError: ``hidden_dim`` is no multiple of R; the message names both.

    Source: Megatron-LM (arXiv:1909.08053), section 3, equation (3) and figure 3a.
    """

    def __init__(self, dim: int, hidden_dim: int, group: dist.ProcessGroup | None = None):
        super().__init__()
        ### BEGIN SOLUTION
        self.fc1 = ColumnParallelLinear(dim, hidden_dim, group)
        self.fc2 = RowParallelLinear(hidden_dim, dim, group)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` in and out, the same on every rank; one all-reduce forward, one backward."""
        ### BEGIN SOLUTION
        return self.fc2(nn.functional.gelu(self.fc1(x)))
        ### END SOLUTION


class ParallelAttention(nn.Module):
    """Chapter 3's ``MultiHeadAttention`` on R ranks, each with some of the heads. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Args:
        dim: Model width C, a multiple of ``n_heads``.
        n_heads: Heads H of all ranks together.
        group: The R ranks; None means all.

    Attributes:
        wq: ``ColumnParallelLinear`` C to C without bias.
        wk: Another one.
        wv: Another one.
        wo: ``RowParallelLinear`` C to C without bias.

    The four are made in the order wq, wk, wv, wo.
    Rank r has heads r H/R to (r + 1) H/R - 1.
    With the same weights it equals ``MultiHeadAttention(dim, n_heads)``.

    Raises:
        ValueError: ``dim`` is not a multiple of ``n_heads``, or ``n_heads`` not one of R; the message names both
            numbers.

    Source: Megatron-LM (arXiv:1909.08053), section 3, figure 3b.
    """

    def __init__(self, dim: int, n_heads: int, group: dist.ProcessGroup | None = None):
        super().__init__()
        ### BEGIN SOLUTION
        if dim % n_heads:
            raise ValueError(f"dim = {dim} is no multiple of n_heads = {n_heads}")
        self.group, self.n_local_heads = group, _local_size(n_heads, "n_heads", group)
        self.wq = ColumnParallelLinear(dim, dim, group, bias=False)
        self.wk = ColumnParallelLinear(dim, dim, group, bias=False)
        self.wv = ColumnParallelLinear(dim, dim, group, bias=False)
        self.wo = RowParallelLinear(dim, dim, group, bias=False)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"], rope=None, mask=None, cache=None) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in and out, the same on every rank.

        One all-reduce forward, and one backward for wq, wk and wv together.

        ``rope`` ``[T, D/2]``, ``mask`` (the same for all heads; None lets every position attend to every other) and
        ``cache`` (for this rank's H/R heads only) mean what they mean in chapter 3's ``MultiHeadAttention.forward``;
        ``cache.update(k, v)`` appends the new keys (rotated) and values, and returns all of them.
        """
        ### BEGIN SOLUTION
        x = CopyToRegion.apply(x, self.group)
        weights = (self.wq.weight, self.wk.weight, self.wv.weight)
        q, k, v = (split_heads(nn.functional.linear(x, weight), self.n_local_heads) for weight in weights)
        if rope is not None:
            q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
        if cache is not None:
            k, v = cache.update(k, v)
        return self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))
        ### END SOLUTION


def vocab_parallel_cross_entropy(
    logits_shard: Float[Tensor, "... v_local"], targets: Integer[Tensor, "..."], group: dist.ProcessGroup | None
) -> Float[Tensor, ""]:
    """The mean cross-entropy of logits whose vocabulary is divided among the ranks. (Exercise)

    Size: 45 minutes, difficulty 5, core.

    Args:
        logits_shard: This rank's columns ``[..., V_r]``, in rank order, any floating dtype; widths V_r may differ from
            rank to rank, and be 0.
            Left unchanged. Tensors made for the loss are on its device, which need not be the default one.
        targets: Ids ``[...]`` in the whole vocabulary, in any integer dtype, the same on every rank.
        group: The ranks; None means all ranks.

    Returns:
        The mean loss in nats, float32 (float64 for float64 logits), the same on every rank, stable for logits of 1e4.
        Its backward sends nothing.

    Raises:
        ValueError: a target is not an id of the vocabulary (raised on every rank); the message names it.
            So -100, which PyTorch ignores, is refused.

    Cost: for N targets, all-reduces of N numbers (the largest logit, the sum of exponentials, the target's logit)
        and a few integers, such as the ranks' widths, by any collective.
    Source: Megatron-LM (arXiv:1909.08053), section 3.
    """
    ### BEGIN SOLUTION
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    targets = targets.long()  # uint8 has the numbers 0 to 255 only
    rank, width = dist.get_rank(group), logits.shape[-1]
    widths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=logits.device)
    widths[rank] = width
    dist.all_reduce(widths, group=group)
    unknown = targets[(targets < 0) | (targets >= widths.sum())]
    if len(unknown):
        raise ValueError(f"target {int(unknown[0])} is no id of a vocabulary of {int(widths.sum())}")
    if width == 0:  # one column that adds nothing, because the maximum of no columns is an error
        logits = nn.functional.pad(logits, (0, 1), value=-torch.inf)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    total = ReduceFromRegion.apply(shifted.exp().sum(-1), group)
    column = targets - widths[:rank].sum()
    is_here = (column >= 0) & (column < width)
    found = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[..., None]).squeeze(-1)
    of_target = ReduceFromRegion.apply(torch.where(is_here, found, 0.0), group)
    return (total.log() - of_target).mean()
    ### END SOLUTION


def llama_plan(config: LlamaConfig) -> dict[str, ParallelStyle]:
    """How DTensor should cut chapter 4's ``Llama``. (Exercise)

    Size: 25 minutes, difficulty 3, stretch.

    Given: ``LocalHeads(n_heads, n_kv_heads)`` for ``layers.*.attention`` and ``SharedInput()`` for
        ``layers.*.feed_forward`` (both make one DTensor of their input for the layers inside), and
        ``KeyValueHeads(n_kv_heads)`` for ``wk`` and ``wv``: cut by columns, or whole on every rank if R is larger than
        G.
        For the rest use ``ColwiseParallel`` and ``RowwiseParallel``, with their ``input_layouts`` and
        ``output_layouts``.

    Args:
        config: The sizes of the model.

    Returns:
        The plan for ``parallelize_module(model, mesh, plan)``: module names (``*`` for the layer's number) to styles.
        It cuts every matrix; the embedding and the head are cut by tokens.
        Token ids go in and whole logits come out as plain tensors, the same on every rank.

    Convention: the plan serves training and scoring.
        A ``make_cache`` of the cut model would still make room for all heads.
    """
    ### BEGIN SOLUTION
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": LocalHeads(config.n_heads, config.n_kv_heads),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": KeyValueHeads(config.n_kv_heads),
        "layers.*.attention.wv": KeyValueHeads(config.n_kv_heads),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward": SharedInput(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    ### END SOLUTION


def ffn_partition_specs(layout: str) -> dict[str, tuple[str | None, ...]]:
    """Which mesh axis cuts which dimension of a feed-forward layer's tensors. (Exercise)

    Size: 20 minutes, difficulty 3, stretch.

    Args:
        layout: "data" (batch cut along X), "megatron" (hidden features cut along Y), "2d features", "2d batch" (two
            steps on the way, names of our own) or "2d finalized" (GSPMD's).
            Letters may be upper case, and "_" or "-" may replace the space.

    Returns:
        Four tuples with one entry for each dimension: "X", "Y", or None where it is not cut.
        ``embedding`` ``[B, T, C]`` (input and output), ``w_in`` ``[C, F]``, ``hidden`` ``[B, T, F]``, ``w_out`` ``[F,
        C]``.
        ``jax.sharding.PartitionSpec(*entries)`` takes each.

    Raises:
        ValueError: the layout is unknown; the message names it and lists the known ones.

    Source: GSPMD (arXiv:2105.04663), its table of layouts, for "2d finalized": embedding and hidden [X, _, Y].
        "2d features" has [_, _, X] and [_, _, Y], "2d batch" [X, _, _] and [X, _, Y]; in all three the weights are cut
        both ways, [X, Y] and [Y, X].
    """
    ### BEGIN SOLUTION
    table = {
        "data": (("X", None, None), (None, None), ("X", None, None), (None, None)),
        "megatron": ((None, None, None), (None, "Y"), (None, None, "Y"), ("Y", None)),
        "2d features": ((None, None, "X"), ("X", "Y"), (None, None, "Y"), ("Y", "X")),
        "2d batch": (("X", None, None), ("X", "Y"), ("X", None, "Y"), ("Y", "X")),
        "2d finalized": (("X", None, "Y"), ("X", "Y"), ("X", None, "Y"), ("Y", "X")),
    }
    key = layout.lower().replace("_", " ").replace("-", " ")
    if key not in table:
        raise ValueError(f"no layout {layout!r}; there are {', '.join(map(repr, table))}")
    return dict(zip(("embedding", "w_in", "hidden", "w_out"), table[key], strict=True))
    ### END SOLUTION


def tensor_parallel_bytes(config, batch: int, length: int, world_size: int, bytes_per_value: int = 2) -> int:
    """Bytes that a rank sends for the blocks of a model in one step, forward and backward. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        config: Anything with ``dim`` C and ``n_layers`` L, such as a ``LlamaConfig`` or a ``GPT2Config``.
        batch: Sequences B.
        length: Positions T in each.
        world_size: Ranks R.
        bytes_per_value: 2 for bfloat16 activations.

    Returns:
        Bytes, an ``int``, rounded down.
        Each block all-reduces ``[B, T, C]`` twice forward and twice backward, and in a ring all-reduce (chapter 9) a
        rank sends 2 (R - 1)/R times the bytes of the tensor.
        Embedding, head and loss are not counted.
    """
    ### BEGIN SOLUTION
    all_reduced_bytes = 4 * config.n_layers * batch * length * config.dim * bytes_per_value
    return 2 * (world_size - 1) * all_reduced_bytes // world_size
    ### END SOLUTION


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """The share of a pipeline's time in which a stage waits. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        stages: Number p of stages, each a stretch of consecutive layers.
        micro_batches: Number m of pieces that the batch is cut into.

    Returns:
        Idle time as a share of the whole time, if all stages cost the same and messages cost nothing.

    Raises:
        ValueError: one of the numbers is below 1; the message names both.

    Source: GPipe (arXiv:1811.06965), section 2.3.
    Convention: a share of the whole time. Megatron's papers give the share of the useful time, (p - 1)/m.
    """
    ### BEGIN SOLUTION
    if min(stages, micro_batches) < 1:
        raise ValueError(f"both must be 1 or more: stages = {stages}, micro_batches = {micro_batches}")
    return (stages - 1) / (micro_batches + stages - 1)
    ### END SOLUTION
