"""What the tests of `lib.fast.replicas` run on gloo ranks."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from lib.bench.yardstick_parts import make_ways
from lib.fast.models import Path
from lib.fast.replicas import RowViT, train_step
from lib.given.models.vit import ViTConfig
from solutions.ddp import OverlapDDP
from solutions.fsdp import FullySharded
from solutions.vit import VisionTransformer

CONFIG = ViTConfig(image_size=8, patch_size=4, n_classes=5, dim=16, n_layers=5, n_heads=2, hidden_dim=24)
PATH = Path(short_gelu=True)


def parts(seed=0):
    torch.manual_seed(seed)
    return RowViT(VisionTransformer(CONFIG), PATH, 1)


def batch(n=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(5, (n,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_alone(n_steps=3):
    """One process, the whole batch."""
    model, (images, labels) = parts(), batch()
    step = train_step(lambda: model(images, labels), sgd(model.parameters()))
    return [step().item() for _ in range(n_steps)], model.named_values()


def train_on_ranks(rank, world_size, strategy, n_steps=3):
    """Each rank its share of the batch; a rank's own first weights must not count."""
    images, labels = (x.chunk(world_size)[rank] for x in batch())
    model = parts(seed=rank)
    wrapped = OverlapDDP(model) if strategy == "data" else FullySharded(model)
    optimizer = sgd(wrapped.parameters())
    step = train_step(lambda: wrapped(images, labels), optimizer, wrapped.finish_gradient_synchronization)
    losses = []
    for _ in range(n_steps):
        dist.all_reduce(loss := step() / world_size)
        losses.append(loss.item())
    if strategy == "data":
        return losses, model.named_values()
    rows = wrapped.gather_full_params()
    return losses, {n: v for i, p in enumerate(model.parts) for n, v in p.named(rows[f"parts.{i}.row"]).items()}


def step_each_way(rank, world_size):
    """For each way of ``lib.bench.yardstick_parts``: the all-reduces of a step, and whether all ranks have its gradients."""
    model, found = OverlapDDP(parts()), {}
    for name, step in make_ways(model, tuple(x.chunk(world_size)[rank] for x in batch())).items():
        with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sent:
            step()
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        every = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(every, mine)
        found[name] = sent.call_count, torch.equal(*every)
    return found
