"""Context parallelism: each rank has some positions of every sequence.

Keys and values travel around chapter 18's ring. The state of a linear layer is handed from one rank to the next.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from lib.attention import merge_heads, split_heads
from lib.context_parallel import ring_attention, zigzag_indices, zigzag_shard
from lib.given.models.variants import LINEAR
from lib.given.parallel.sharding import blocks_of
from lib.linear_attention import delta_rule_chunked, short_convolution
from lib.runs.engine.mesh import Mesh
from lib.runs.variants import VariantLlama


def divide_sequences(model: Any, mesh: Mesh) -> None:
    """Let a ``GPT2`` or a ``VariantLlama`` compute on this rank's share of the positions, in place.

    Each position is embedded by its place in the whole sequence, and sees all positions before it.
    """
    group, length, n_ranks = mesh.group("context"), model.config.context_len, mesh.size["context"]
    if isinstance(model, VariantLlama):
        model.first = mesh.rank["context"] * length // n_ranks
        for layer in model.blocks:
            compute = partial(recur, layer.attention) if layer.kind == LINEAR else partial(attend_variant, layer)
            vars(layer.attention)["forward"] = partial(compute, group)
        return
    mine = zigzag_indices(length, mesh.rank["context"], n_ranks)
    if isinstance(model.wpe, nn.Embedding):  # on the first stage
        mine = mine.to(model.wpe.weight.device)
        model.wpe.register_forward_pre_hook(lambda _, args: (mine[args[0]],))
    for block in blocks_of(model):
        vars(block.attn)["forward"] = partial(attend, block.attn, group)


def share_of(batch: Tensor, mesh: Mesh, layout: str) -> Tensor:
    """This rank's positions of a batch ``[B, T]``: chapter 18's zigzag, or one piece of the sequence."""
    if layout == "zigzag":
        return zigzag_shard(batch, 1, mesh.group("context"))
    return batch.chunk(mesh.size["context"], dim=1)[mesh.rank["context"]].contiguous()


def attend(attn: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Causal attention of a ``CausalSelfAttention``, from ``[B, T/R, C]`` to the same shape."""
    q, k, v = (split_heads(part, attn.n_heads) for part in attn.c_attn(x).chunk(3, dim=-1))
    return attn.c_proj(merge_heads(_ring(q, k, v, group, "zigzag")))


def attend_variant(
    layer: Any, group: dist.ProcessGroup, x: Float[Tensor, "b t_r c"], rope: Tensor, cache: None = None
) -> Float[Tensor, "b t_r c"]:
    """Causal attention of a ``VariantBlock`` without a window."""

    def around_the_ring(*heads: Tensor) -> Tensor:
        q, k, v = (h.unflatten(0, (len(x), -1)).transpose(1, 2) for h in heads)
        return _ring(q, k, v, group, "contiguous").transpose(1, 2).flatten(0, 1)

    rows = layer.attend_rows(x.flatten(0, 1), rope.repeat(len(x), 1), around_the_ring)
    return rows.unflatten(0, x.shape[:2])


@torch.compiler.disable
def _ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    return ring_attention(q, k, v, is_causal=True, group=group, layout=layout)


class HandOn(torch.autograd.Function):
    """What is in front of this rank's positions: of the previous rank its ``transition @ before + state``.

    Forward, one message to the next rank; backward, one of the same size to the previous rank. Rank 0 has zeros before
    it. A ``transition`` of None forgets what was before: each rank hands on its ``state`` alone.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, transition: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
        before = torch.zeros_like(state, memory_format=torch.contiguous_format)
        if rank > 0:
            dist.recv(before, group=group, group_src=rank - 1)
        if rank < last:
            after = state if transition is None else transition @ before + state
            dist.send(after.contiguous(), group=group, group_dst=rank + 1)
        ctx.group = group
        ctx.save_for_backward(before, transition)
        return before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        before, transition = ctx.saved_tensors
        rank, last = dist.get_rank(ctx.group), dist.get_world_size(ctx.group) - 1
        after = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if rank < last:
            dist.recv(after, group=ctx.group, group_src=rank + 1)
        if rank > 0:
            mine = grad if transition is None else grad + transition.mT @ after
            dist.send(mine.contiguous(), group=ctx.group, group_dst=rank - 1)
        return after, None if transition is None else after @ before.mT, None


@torch.compiler.disable
def recur(
    net: Any, group: dist.ProcessGroup, x: Float[Tensor, "b t_r c"], cache: None = None
) -> Float[Tensor, "b t_r c"]:
    """A ``GatedDeltaNet`` on this rank's piece of the sequence.

    Two messages: the last K - 1 inputs of the convolution, and one state. The rule is linear in the values and in the
    state, so that one pass over the own positions, with more columns, gives the output and the state from zeros and
    also what both take from a state before: a rank waits with a few small products left, not with its positions.

    Raises:
        ValueError: a piece is shorter than what the convolution remembers.
    """
    kernel, dtype = net.conv1d.weight.shape[-1], torch.promote_types(x.dtype, torch.float32)
    if x.shape[1] < kernel - 1:
        raise ValueError(f"a rank has {x.shape[1]} positions: expected at least {kernel - 1}, for the convolution")
    keys, values, ratio = (
        net.n_k_heads * net.head_k_dim,
        net.n_v_heads * net.head_v_dim,
        net.n_v_heads // net.n_k_heads,
    )
    shares = [net.head_k_dim, net.head_k_dim, ratio * net.head_v_dim, ratio * net.head_v_dim]
    *qkv, z = net.in_proj_qkvz(x).unflatten(-1, (net.n_k_heads, -1)).split(shares, -1)
    b, a = (y.flatten(2).to(dtype) for y in net.in_proj_ba(x).unflatten(-1, (net.n_k_heads, -1)).chunk(2, -1))
    inputs = torch.cat([y.flatten(2) for y in qkv], -1)
    first = HandOn.apply(inputs[:, inputs.shape[1] - kernel + 1 :], None, group)
    mixed, _ = short_convolution(inputs, net.conv1d.weight[:, 0], None, first)
    with torch.autocast(x.device.type, enabled=False):
        q, k, v = mixed.to(dtype).split([keys, keys, values], -1)
        q, k = (y.unflatten(-1, (net.n_k_heads, -1)) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(ratio, dim=2) for y in (q, k))
        v, z = (y.reshape(*x.shape[:2], net.n_v_heads, -1) for y in (v, z.to(dtype)))
        g = -torch.exp(net.A_log.to(dtype)) * F.softplus(a + net.dt_bias.to(dtype))
        o = _handed_on(q, k, v, torch.sigmoid(b), g, net.chunk_size, group)
        o = F.rms_norm(o, o.shape[-1:], net.norm.weight.to(dtype), net.eps) * F.silu(z)
    return net.out_proj(o.flatten(2).to(x.dtype))


def _handed_on(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, size: int, group: Any) -> Tensor:
    """The gated delta rule over a sequence whose pieces are on the ranks of a group."""
    (n, _, n_heads, width), columns = k.shape, v.shape[-1]
    identity = torch.eye(width, dtype=v.dtype, device=v.device).expand(n, n_heads, -1, -1)
    start = torch.cat([identity.new_zeros(n, n_heads, width, columns), identity], -1)
    wide = torch.cat([v, torch.zeros_like(k)], -1)  # no values: these columns show what becomes of a state before
    out, state = delta_rule_chunked(q, k, wide, beta, g, initial_state=start, chunk_size=size)
    (own, reached), (built, transition) = (y.split([columns, width], -1) for y in (out, state))
    before = HandOn.apply(built, transition, group)
    return own + torch.einsum("bthk,bhkv->bthv", reached, before)
