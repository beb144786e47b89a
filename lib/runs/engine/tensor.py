"""Tensor parallelism for the models of chapters 5 and 6, by the layers of chapter 13 or by DTensor."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lib.given.parallel.sharding import blocks_of
from lib.given.parallel.tensors import LocalHeads, SharedInput
from lib.runs.engine.mesh import Mesh
from lib.tensor_parallel import ColumnParallelLinear, CopyToRegion, RowParallelLinear

FUSED = {"attn.c_attn": 3}
"""Layers whose columns hold queries, keys and values, one after the other. Each third is divided by itself."""
SEPARATE = ("attn.wq", "attn.wk", "attn.wv")
"""Column-parallel layers with the same input, which enters the parallel region once."""
COLUMNS = ("attn.c_attn", "mlp.fc1", "mlp.c_fc")
ROWS = ("attn.wo", "attn.c_proj", "mlp.fc2", "mlp.c_proj")

Cuts = dict[str, tuple[str, int, int]]
"""For each divided parameter the mesh's axis, the dimension, and the number of fused parts (3 for q, k and v)."""


def layers_of(block: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """The layers of a block that have one of these names."""
    there = dict(block.named_modules())
    return {name: there[name] for name in names if name in there}


def cut(whole: Tensor, dim: int, n_fused: int, rank: int, n_ranks: int) -> Tensor:
    """A rank's part along ``dim``; with ``n_fused`` = 3 its part of each third, one after the other."""
    return whole.unflatten(dim, (n_fused, n_ranks, -1)).select(dim + 1, rank).flatten(dim, dim + 1)


def uncut(joined: Tensor, dim: int, n_fused: int, n_ranks: int) -> Tensor:
    """The whole, from all ranks' parts joined along ``dim`` in the order of the ranks."""
    return joined.unflatten(dim, (n_ranks, n_fused, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def gather(mine: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts, joined along ``dim`` in the order of the ranks."""
    parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, dim)


def divide_layers(model: nn.Module, mesh: Mesh, ours: bool) -> Cuts:
    """Give each rank of the tensor axis its part of every block, in place. Embeddings, norms and head stay whole.

    Args:
        model: The whole model, the same on all ranks.
        mesh: The ranks.
        ours: By chapter 13's layers instead of DTensor.
    """
    cuts: Cuts = {}
    names = {id(part): name for name, part in model.named_modules()}
    for block in blocks_of(model):
        for name in layers_of(block, (*SEPARATE, *COLUMNS)):
            cuts |= {
                f"{names[id(block)]}.{name}.{part}": ("tensor", 0, FUSED.get(name, 1)) for part in ("weight", "bias")
            }
        cuts |= {f"{names[id(block)]}.{name}.weight": ("tensor", 1, 1) for name in layers_of(block, ROWS)}
        if ours:
            _by_hand(block, mesh)
        else:
            _by_dtensor(block, mesh)
    return cuts


def _by_hand(block: Any, mesh: Mesh) -> None:
    """Replace layers by this rank's parts, with Megatron's f before them and its g after them."""
    group, place = mesh.group("tensor"), (mesh.rank["tensor"], mesh.size["tensor"])
    if not hasattr(block.attn, "n_heads"):
        raise AttributeError(f"{type(block.attn).__name__} has no n_heads, by which tensor parallelism divides it")
    block.attn.n_heads //= mesh.size["tensor"]
    for layer in layers_of(block, SEPARATE).values():
        _take(layer, layer, 0, 1, place)
    if layers_of(block, SEPARATE):
        enter = torch.compiler.disable(lambda _, args: (CopyToRegion.apply(args[0], group), *args[1:]))
        block.get_submodule("attn").register_forward_pre_hook(enter)
    for name, layer in layers_of(block, COLUMNS).items():
        column = ColumnParallelLinear(layer.in_features, layer.out_features, group)
        block.set_submodule(name, _take(_eager(column), layer, 0, FUSED.get(name, 1), place))
    for name, layer in layers_of(block, ROWS).items():
        row = RowParallelLinear(layer.in_features, layer.out_features, group)
        block.set_submodule(name, _take(_eager(row), layer, 1, 1, place))


def _eager(layer: Any) -> Any:
    """Exclude a layer from compilation: the compiler cannot handle chapter 13's collectives inside
    of an autograd function.
    """
    layer.forward = torch.compiler.disable(layer.forward)
    return layer


def _take(new: Any, old: Any, dim: int, n_fused: int, place: tuple[int, int]) -> nn.Module:
    """Give ``new`` this rank's part of ``old``; a bias is divided only together with the weight's rows."""
    weight, bias = cut(old.weight.detach(), dim, n_fused, *place), old.bias.detach()
    new.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    new.bias = nn.Parameter((cut(bias, 0, n_fused, *place) if dim == 0 else bias).clone())
    return new


class Rows(RowwiseParallel):
    """PyTorch's row-wise style with plain tensors as input and output."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Shard(-1), output_layouts=Replicate())


@torch.no_grad()
def _by_dtensor(block: Any, mesh: Mesh) -> None:
    """Divide a block by ``parallelize_module``.

    The rows of a fused layer are first put into the order of the ranks, so that each rank gets its part of each third.
    """
    heads, n_ranks = block.attn.n_heads, mesh.size["tensor"]
    for name, n_fused in FUSED.items():
        for whole in (p for layer in layers_of(block, (name,)).values() for p in layer.parameters()):
            whole.copy_(torch.cat([cut(whole, 0, n_fused, rank, n_ranks) for rank in range(n_ranks)]))
    plan: dict[str, Any] = {"attn": LocalHeads(heads, heads), "mlp": SharedInput()}
    plan |= {name: ColwiseParallel() for name in layers_of(block, (*SEPARATE, *COLUMNS))}
    plan |= {name: Rows() for name in layers_of(block, ROWS)}
    parallelize_module(block, mesh.devices["tensor"], plan)
