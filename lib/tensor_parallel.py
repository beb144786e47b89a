"""Tensor parallelism: one layer on many ranks, from a dot product cut in two to a whole Llama."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lib.given.models.llama import LlamaConfig
from lib.given.parallel.tensors import KeyValueHeads, LocalHeads, SharedInput
from lib.attention import merge_heads, scaled_dot_product_attention, split_heads
from lib.rope import apply_rope


def partitioned_dot(a: Float[Tensor, " n"], b: Float[Tensor, " n"], parts: int) -> Float[Tensor, ""]:
    """A dot product as the sum of the dot products of its parts. (Exercise 13.1)

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
    raise NotImplementedError("Exercise 13.1: write partitioned_dot")


def matmul_outer(a: Float[Tensor, "... m k"], b_shard: Float[Tensor, "k n_local"]) -> Float[Tensor, "... m n_local"]:
    """This rank's columns of a product whose second matrix is cut by columns, along an outer axis. (Exercise 13.2)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        a: All of ``[..., M, K]``, the same on every rank.
        b_shard: This rank's columns ``[K, N/R]`` of ``[K, N]``; ranks may have different numbers of columns.

    Returns:
        Those columns of the product, ``[..., M, N/R]``.

    Cost: no communication.
    """
    raise NotImplementedError("Exercise 13.2: write matmul_outer")


def matmul_inner(
    a_shard: Float[Tensor, "... m k_local"], b_shard: Float[Tensor, "k_local n"], group: dist.ProcessGroup | None
) -> Float[Tensor, "... m n"]:
    """The whole product of two matrices that are cut along the inner axis. (Exercise 13.3)

    Size: 10 minutes, difficulty 2, core.

    Args:
        a_shard: This rank's columns ``[..., M, K/R]`` of the first matrix; left unchanged.
        b_shard: The matching rows ``[K/R, N]`` of the second.
        group: The ranks that hold the parts; None means all ranks.

    Returns:
        The product ``[..., M, N]``, the same on every rank. It need not support gradients.

    Cost: one product and one all-reduce of the result.
    """
    raise NotImplementedError("Exercise 13.3: write matmul_inner")


class CopyToRegion(torch.autograd.Function):
    """f, the entrance of a parallel region: it copies forward, and sums gradients over the ranks backward. (Exercise 13.4)

    Size: 15 minutes, difficulty 2, core.

    Call it as ``CopyToRegion.apply(x, group)``; None means all ranks.
    ``x`` is the same on every rank, and each rank uses it for a different part of the layer.
    It changes nothing in place.
    Source: Megatron-LM (arXiv:1909.08053), section 3, f in figure 3.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """``x`` itself; no communication."""
        raise NotImplementedError("Exercise 13.4: write CopyToRegion.forward")

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The sum of all ranks' gradients, and None for the group; one all-reduce."""
        raise NotImplementedError("Exercise 13.4: write CopyToRegion.backward")


class ReduceFromRegion(torch.autograd.Function):
    """g, the exit of a parallel region: forward it sums over the ranks, backward it passes the gradient on. (Exercise 13.5)

    Size: 10 minutes, difficulty 2, core.

    Call it as ``ReduceFromRegion.apply(x, group)``; None means all ranks.
    ``x`` is this rank's part of a sum, and every rank continues with the whole sum.
    It changes nothing in place.
    Source: Megatron-LM (arXiv:1909.08053), section 3, g in figure 3.
    """

    @staticmethod
    def forward(ctx, x: Float[Tensor, "..."], group: dist.ProcessGroup | None = None) -> Float[Tensor, "..."]:
        """The sum of all ranks' ``x``; one all-reduce."""
        raise NotImplementedError("Exercise 13.5: write ReduceFromRegion.forward")

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "..."]):
        """The gradient itself, the same on all ranks after the sum, and None for the group."""
        raise NotImplementedError("Exercise 13.5: write ReduceFromRegion.backward")


class ColumnParallelLinear(nn.Module):
    """A linear layer in which each rank computes some of the outputs. (Exercise 13.6)

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
        raise NotImplementedError("Exercise 13.6: write ColumnParallelLinear.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... f_local"]:
        """From ``[..., C]``, the same on every rank, to this rank's ``[..., F/R]``.

        Sends nothing forward, all-reduces once backward.
        """
        raise NotImplementedError("Exercise 13.6: write ColumnParallelLinear.forward")


class RowParallelLinear(nn.Module):
    """A linear layer in which each rank reads some of the inputs. (Exercise 13.7)

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
        raise NotImplementedError("Exercise 13.7: write RowParallelLinear.__init__")

    def forward(self, x: Float[Tensor, "... f_local"]) -> Float[Tensor, "... c"]:
        """From this rank's ``[..., F/R]`` to the whole ``[..., C]``.

        All-reduces once forward, sends nothing backward.
        """
        raise NotImplementedError("Exercise 13.7: write RowParallelLinear.forward")


class ParallelMLP(nn.Module):
    """A feed-forward layer on R ranks: the hidden features are cut, and never put together. (Exercise 13.8)

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
        raise NotImplementedError("Exercise 13.8: write ParallelMLP.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` in and out, the same on every rank; one all-reduce forward, one backward."""
        raise NotImplementedError("Exercise 13.8: write ParallelMLP.forward")


class ParallelAttention(nn.Module):
    """Chapter 3's ``MultiHeadAttention`` on R ranks, each with some of the heads. (Exercise 13.9)

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
        raise NotImplementedError("Exercise 13.9: write ParallelAttention.__init__")

    def forward(self, x: Float[Tensor, "b t c"], rope=None, mask=None, cache=None) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in and out, the same on every rank.

        One all-reduce forward, and one backward for wq, wk and wv together.

        ``rope`` ``[T, D/2]``, ``mask`` (the same for all heads; None lets every position attend to every other) and
        ``cache`` (for this rank's H/R heads only) mean what they mean in chapter 3's ``MultiHeadAttention.forward``;
        ``cache.update(k, v)`` appends the new keys (rotated) and values, and returns all of them.
        """
        raise NotImplementedError("Exercise 13.9: write ParallelAttention.forward")


def vocab_parallel_cross_entropy(
    logits_shard: Float[Tensor, "... v_local"], targets: Integer[Tensor, "..."], group: dist.ProcessGroup | None
) -> Float[Tensor, ""]:
    """The mean cross-entropy of logits whose vocabulary is divided among the ranks. (Exercise 13.10)

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
    raise NotImplementedError("Exercise 13.10: write vocab_parallel_cross_entropy")


def llama_plan(config: LlamaConfig) -> dict[str, ParallelStyle]:
    """How DTensor should cut chapter 4's ``Llama``. (Exercise 13.11)

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
    raise NotImplementedError("Exercise 13.11: write llama_plan")


def ffn_partition_specs(layout: str) -> dict[str, tuple[str | None, ...]]:
    """Which mesh axis cuts which dimension of a feed-forward layer's tensors. (Exercise 13.12)

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
    raise NotImplementedError("Exercise 13.12: write ffn_partition_specs")


def tensor_parallel_bytes(config, batch: int, length: int, world_size: int, bytes_per_value: int = 2) -> int:
    """Bytes that a rank sends for the blocks of a model in one step, forward and backward. (Exercise 13.13)

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
    raise NotImplementedError("Exercise 13.13: write tensor_parallel_bytes")


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """The share of a pipeline's time in which a stage waits. (Exercise 13.14)

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
    raise NotImplementedError("Exercise 13.14: write pipeline_bubble")
