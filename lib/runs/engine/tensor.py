"""Tensor parallelism for the models of chapters 5 and 6, by the layers of chapter 13 or by DTensor."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lib.given.parallel.sharding import blocks_of
from lib.given.parallel.tensors import LocalHeads, SharedInput
from lib.tensor_parallel import ColumnParallelLinear, CopyToRegion, RowParallelLinear

FUSED = {"attn.c_attn": 3}
"""Layers whose columns hold queries, keys and values, one after the other: each third is divided by itself."""
SEPARATE = ("attn.wq", "attn.wk", "attn.wv")
"""Column-parallel layers with the same input, which enters the parallel region once."""
COLUMNS = ("attn.c_attn", "mlp.fc1", "mlp.c_fc")
ROWS = ("attn.wo", "attn.c_proj", "mlp.fc2", "mlp.c_proj")


def layers_of(block: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """The layers of a block that have one of these names."""
    there = dict(block.named_modules())
    return {name: there[name] for name in names if name in there}


def cut(whole: Tensor, dim: int, n_fused: int) -> Tensor:
    """This rank's part along ``dim``; with ``n_fused`` of 3, its part of each third."""
    parts = whole.detach().unflatten(dim, (n_fused, -1)) if n_fused > 1 else whole.detach()
    at = dim + 1 if n_fused > 1 else dim
    mine = parts.chunk(dist.get_world_size(), at)[dist.get_rank()]
    return mine.flatten(dim, at) if n_fused > 1 else mine


def part_of(mine: Tensor, dim: int, n_fused: int, mesh: DeviceMesh) -> DTensor:
    """The inverse of ``cut``, for a checkpoint: the whole tensor as a DTensor that shares memory with this rank's part."""
    parts = mine.unflatten(dim, (n_fused, -1)) if n_fused > 1 else mine
    return DTensor.from_local(parts, mesh, [Shard(dim + 1 if n_fused > 1 else dim)], run_check=False)


def share_heads(block: Any) -> None:
    """Reduce the number of heads in a block's attention to those of this rank."""
    if not hasattr(block.attn, "n_heads"):
        raise AttributeError(f"{type(block.attn).__name__} has no n_heads, by which tensor parallelism divides it")
    block.attn.n_heads //= dist.get_world_size()


def cut_by_hand(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Replace layers by this rank's parts, with Megatron's f before them and its g after them.

    Args:
        model: The whole model, the same on all ranks; changed in place. Embeddings, norms and head stay whole.

    Returns:
        For each divided parameter its divided dimension and its number of fused parts.
    """
    cuts: dict[str, tuple[int, int]] = {}
    names = {id(part): name for name, part in model.named_modules()}
    for block in blocks_of(model):
        share_heads(block)
        where = names[id(block)]
        for name, layer in layers_of(block, SEPARATE).items():
            _take(layer, layer, 0, 1)
            cuts |= {f"{where}.{name}.{part}": (0, 1) for part in ("weight", "bias")}
        if layers_of(block, SEPARATE):
            block.get_submodule("attn").register_forward_pre_hook(_enter_region)
        for name, layer in layers_of(block, COLUMNS).items():
            n_fused = FUSED.get(name, 1)
            new = _take(_eager(ColumnParallelLinear(*reversed(layer.weight.shape))), layer, 0, n_fused)
            block.set_submodule(name, new)
            cuts |= {f"{where}.{name}.{part}": (0, n_fused) for part in ("weight", "bias")}
        for name, layer in layers_of(block, ROWS).items():
            block.set_submodule(name, _take(_eager(RowParallelLinear(*reversed(layer.weight.shape))), layer, 1, 1))
            cuts[f"{where}.{name}.weight"] = (1, 1)
    return cuts


@torch.compiler.disable
def _enter_region(_: nn.Module, args: tuple) -> tuple:
    return (CopyToRegion.apply(args[0], None), *args[1:])


def _eager(layer: Any) -> Any:
    """Exclude a layer from compilation: the compiler cannot handle chapter 13's collectives inside of an autograd function."""
    layer.forward = torch.compiler.disable(layer.forward)
    return layer


def _take(new: Any, old: Any, dim: int, n_fused: int) -> nn.Module:
    """Give ``new`` this rank's part of ``old``; a bias is divided only together with the weight's rows."""
    weight, bias = cut(old.weight, dim, n_fused), old.bias.detach()
    new.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    new.bias = nn.Parameter((cut(bias, 0, n_fused) if dim == 0 else bias).clone())
    return new


class FusedColumns(nn.Module):
    """Queries, keys and values in one layer, divided by heads: DTensors ``[3, C, C]`` and ``[3, C]``, which any number of ranks can load.

    Args:
        layer: The whole layer, C to 3C.
        mesh: The ranks.
    """

    weight: Any  # parameters, and DTensors
    bias: Any

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh, n_fused: int = 3):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(distribute_tensor(p.detach().unflatten(0, (n_fused, -1)).contiguous(), mesh, [Shard(1)]))
            for p in (layer.weight, layer.bias)
        )

    def forward(self, x: DTensor) -> Tensor:
        mine = x.to_local(grad_placements=[Partial()])
        return F.linear(mine, self.weight.to_local().flatten(0, 1), self.bias.to_local().flatten())


class Rows(RowwiseParallel):
    """PyTorch's row-wise style with plain tensors as input and output."""

    def __init__(self):
        super().__init__(input_layouts=Shard(-1), output_layouts=Replicate())


def cut_by_dtensor(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same as ``cut_by_hand``, by ``parallelize_module``."""
    for block in blocks_of(model):
        heads = getattr(block.attn, "n_heads", 0)
        plan: dict[str, Any] = {"attn": LocalHeads(heads, heads), "mlp": SharedInput()}
        fused = layers_of(block, tuple(FUSED))
        plan |= {name: ColwiseParallel() for name in layers_of(block, (*SEPARATE, *COLUMNS)) if name not in fused}
        plan |= {name: Rows() for name in layers_of(block, ROWS)}
        parallelize_module(block, mesh, plan)
        for name, layer in fused.items():
            block.set_submodule(name, FusedColumns(layer, mesh, FUSED[name]))
