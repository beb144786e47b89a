"""Short runs of chapter 12: what each stage of ZeRO holds and sends while a small ViT learns handwritten digits."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.fsdp import (
    FullySharded,
    ShardedOptimizer,
    apply_fully_shard,
    load_sharded,
    reduce_scatter_gradients,
    save_sharded,
    shard,
    unshard,
)
from lib.given.data.images import load_images, normalize_digits
from lib.given.models.vit import TINY
from lib.given.parallel.sharding import all_gather_row, blocks_of
from lib.ranks import milestone
from lib.vit import VisionTransformer

BATCH = 32
Data = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(TINY)


def digits() -> Data:
    """One batch of handwritten digits, normalised in float32, before any cast."""
    train = load_images("digits", "train")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:BATCH]
    return normalize_digits(train.images[chosen]), train.labels[chosen]


def loss_of(model: nn.Module, data: Data, rank: int, world_size: int) -> Tensor:
    """The loss on this rank's part of the batch."""
    images, labels = (part[rank::world_size] for part in data)
    return nn.functional.cross_entropy(model(images).float(), labels)


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return _bytes(v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim)


def _average(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= world_size


def run_stages(rank: int, world_size: int, data: Data, n_steps: int = 3) -> list[dict[str, Any]]:
    """Call `run_stage` for every stage, with a milestone in the ledger before each: "stage 0" to "stage 3"."""
    found = []
    for stage in range(4):
        milestone(f"stage {stage}")
        found.append(run_stage(rank, world_size, data, stage, n_steps))
    milestone("stage 4")
    return found


def run_stage(rank: int, world_size: int, data: Data, stage: int, n_steps: int) -> dict[str, Any]:
    """Train under one stage; return the losses, and the bytes of each kind that this rank holds."""
    model: nn.Module = make_model()
    held: dict[str, int] = {}
    if stage == 3:
        model = FullySharded(model)
    parameters = list(model.parameters())
    if stage == 2:  # the optimizer sees this rank's shards
        parameters = [nn.Parameter(shard(p, rank, world_size)) for p in parameters]
    optimizer: torch.optim.Optimizer
    if stage == 1:
        optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(n_steps):
        loss = loss_of(model, data, rank, world_size)
        loss.backward()
        if stage == 2:
            shares = reduce_scatter_gradients(model)
            for mine, share in zip(parameters, shares.values(), strict=True):
                mine.grad = share
        elif isinstance(model, FullySharded):
            model.finish_gradient_synchronization()
        else:
            _average(model, world_size)
        optimizer.step()
        if stage == 2:
            _gather(model, parameters, world_size)
        held = {"parameters": _bytes(model.parameters()), "gradients": _bytes(p.grad for p in parameters)}
        held["optimizer"] = _state_bytes(optimizer)
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world_size)
        losses.append(mean.item())
    return {"losses": losses, "held": held}


def _gather(model: nn.Module, shards: list, world_size: int) -> None:
    """Put every parameter together again from the ranks' new shards."""
    with torch.no_grad():
        for parameter, mine in zip(model.parameters(), shards, strict=True):
            row = mine.new_empty(world_size * len(mine))
            all_gather_row(row, mine.detach())
            parameter.copy_(unshard([row], parameter.shape))


def watch_units(rank: int, world_size: int, data: Data) -> list[tuple[str, list[int]]]:
    """List the units that are whole at each moment of one step."""
    wrapped = FullySharded(make_model())
    blocks: Any = blocks_of(wrapped)
    moments: list[tuple[str, list[int]]] = []

    def note(what: str) -> None:
        whole = [i for i, flats in enumerate(wrapped.flats) if any(f.full.untyped_storage().nbytes() for f in flats)]
        moments.append((what, whole))

    for i, block in enumerate(blocks, start=1):
        block.norm1.register_forward_hook(lambda *_, i=i: note(f"forward {i}"))
        block.mlp.register_full_backward_hook(lambda *_, i=i: note(f"backward {i}"))
    loss = loss_of(wrapped, data, rank, world_size)
    note("loss")
    loss.backward()
    wrapped.finish_gradient_synchronization()
    note("end")
    return moments


def save_on(rank: int, world_size: int, data: Data, folder: str) -> float:
    """Take two steps under ``fully_shard``, save a checkpoint, and return the loss."""
    model = apply_fully_shard(make_model(), None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss_of(model, data, rank, world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_sharded(folder, model, optimizer)
    return _mean_loss(model, data, rank, world_size)


def load_on(rank: int, world_size: int, data: Data, folder: str) -> float:
    """Load the checkpoint on any number of ranks and return the same loss."""
    torch.manual_seed(1)
    model = apply_fully_shard(VisionTransformer(TINY), None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    load_sharded(folder, model, optimizer)
    return _mean_loss(model, data, rank, world_size)


def _mean_loss(model: nn.Module, data: Data, rank: int, world_size: int) -> float:
    with torch.no_grad():
        loss = loss_of(model, data, rank, world_size)
    n = torch.tensor([float(len(data[1][rank::world_size]))])
    dist.all_reduce(total := loss * n)
    dist.all_reduce(n)
    return (total / n).item()


def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="workbook-checkpoint-")
