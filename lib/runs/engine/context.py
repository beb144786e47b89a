"""Context parallelism for chapter 6's model.

Each rank has some positions of every sequence, and keys and values travel around chapter 18's ring.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.attention import merge_heads, split_heads
from lib.context_parallel import ring_attention, zigzag_indices, zigzag_shard
from lib.given.parallel.sharding import blocks_of
from lib.runs.engine.mesh import Mesh


def divide_sequences(model: Any, mesh: Mesh) -> None:
    """Let a ``GPT2`` compute on this rank's share of the positions, in place.

    Each position is embedded by its place in the whole sequence, and attends to all positions before it.
    """
    group, length = mesh.group("context"), model.config.context_len
    mine = zigzag_indices(length, mesh.rank["context"], mesh.size["context"])
    if isinstance(model.wpe, nn.Embedding):  # on the first stage
        mine = mine.to(model.wpe.weight.device)
        model.wpe.register_forward_pre_hook(lambda _, args: (mine[args[0]],))
    for block in blocks_of(model):
        vars(block.attn)["forward"] = partial(attend, block.attn, group)


def attend(attn: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Causal attention of a ``CausalSelfAttention``, from ``[B, T/R, C]`` to the same shape."""
    q, k, v = (split_heads(part, attn.n_heads) for part in attn.c_attn(x).chunk(3, dim=-1))
    return attn.c_proj(merge_heads(_ring(q, k, v, group)))


@torch.compiler.disable
def _ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    return ring_attention(q, k, v, is_causal=True, group=group, layout="zigzag")


def share_of(batch: Tensor, mesh: Mesh) -> Tensor:
    """This rank's positions of a batch ``[B, T]``."""
    return zigzag_shard(batch, 1, mesh.group("context"))
