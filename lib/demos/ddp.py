"""What the ranks of chapter 10 run: a step with milestones in its ledger, a training on digits, a timed all-reduce."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from lib.ddp import BucketedDDP, OverlapDDP, average_gradients, average_gradients_flat, shard_indices
from lib.given.data.images import load_images, normalize_digits
from lib.given.models.vit import TINY
from lib.ranks import milestone
from lib.vit import VisionTransformer

Strategy = str | float
"""``"none"``, ``"naive"``, ``"flat"``, ``"overlap"``, ``"torch"``, or the size of a bucket in MB."""


def synchronised(strategy: Strategy, model: nn.Module, **options) -> tuple[nn.Module, Callable[[], None]]:
    """The model to call, and a function to call after its backward.

    Args:
        strategy: How gradients become means.
        model: The same on all ranks.
        options: For ``DistributedDataParallel``.
    """
    if strategy == "none":
        return model, lambda: None
    if strategy in ("naive", "flat"):
        average = average_gradients if strategy == "naive" else average_gradients_flat
        return model, lambda: average(model)
    if strategy == "torch":
        return DistributedDataParallel(model, **options), lambda: None
    wrapped = OverlapDDP(model) if strategy == "overlap" else BucketedDDP(model, float(strategy))
    return wrapped, wrapped.finish_gradient_synchronization


def step_with_marks(rank: int, world_size: int, strategies: list[Strategy], width: int, depth: int, batch: int) -> None:
    """One step of a stack of linear layers for each strategy;
    milestones and ledger tell when each part and each collective began.
    """
    torch.set_num_threads(1)
    for strategy in strategies:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        model, finish = synchronised(strategy, nn.Sequential(*layers))
        x = torch.randn(batch, width)
        for name in ("warm", "step"):
            model.zero_grad()
            loss = model(x).square().mean()
            dist.barrier()
            milestone(f"{strategy} {name}: backward begins")
            loss.backward()
            milestone(f"{strategy} {name}: backward ends")
            finish()
            milestone(f"{strategy} {name}: means are there")


def digits_batch(data, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """Normalised images and their classes."""
    return normalize_digits(data.images[chosen]), data.labels[chosen]


def train_digits(rank: int, world_size: int, strategy: Strategy, n_shares: int, n_epochs: int, share: int = 8) -> dict:
    """Train the small ViT of chapter 5; every rank works on its shares of each batch.

    Args:
        rank: This rank.
        world_size: Ranks.
        strategy: How gradients become means.
        n_shares: Parts of ``share`` items that make up a batch; one process may take all of them.
        n_epochs: Passes over the data.
        share: Items in a part.

    Returns:
        The losses of this rank, all its parameters in one vector, and its accuracy on the test digits.
    """
    torch.set_num_threads(1)
    train, test = load_images("digits", "train"), load_images("digits", "test")
    torch.manual_seed(rank if strategy not in ("none", "naive", "flat") else 0)  # a wrapper must make them equal
    inner = VisionTransformer(TINY)
    with torch.no_grad():
        inner.get_parameter("embeddings.pos_embed").mul_(50)  # as chapter 5 found better for so short a run
    model, finish = synchronised(strategy, inner)
    optimizer, losses = torch.optim.AdamW(inner.parameters(), lr=3e-3, weight_decay=0.05), []
    for epoch in range(n_epochs):
        mine = [
            shard_indices(len(train), r, n_shares, epoch, drop_last=True) for r in range(rank, n_shares, world_size)
        ]
        for start in range(0, len(mine[0]) - share + 1, share):
            images, labels = digits_batch(train, [i for one in mine for i in one[start : start + share]])
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            finish()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        images, labels = digits_batch(test, list(range(len(test))))
        accuracy = (inner(images).argmax(1) == labels).double().mean().item()
    return {
        "losses": losses,
        "weights": nn.utils.parameters_to_vector(inner.parameters()).detach(),
        "accuracy": accuracy,
    }


def time_all_reduce(rank: int, world_size: int, sizes: list[int], n_repeats: int = 7) -> list[float]:
    """For each number of bytes, the median seconds of an all-reduce on the slowest rank."""
    torch.set_num_threads(1)
    found = []
    for size in sizes:
        x, times = torch.ones(size // 4), []
        for _ in range(n_repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - began)
            x.fill_(1.0)
        slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(slowest.item())
    return found
