"""The program of chapter 16's ranks: train on digits by DiLoCo, or by data parallel training."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lib.ddp import average_gradients_flat
from lib.demos.ddp import digits_batch
from lib.given.data.images import load_images
from lib.given.models.vit import TINY
from lib.scaling import local_sgd_step
from lib.vit import VisionTransformer

LR, BATCH = 2e-3, 16
SMALL = replace(TINY, n_layers=2)


class Classifier(nn.Module):
    """Two blocks of chapter 5's small ViT; like chapter 7's models it takes targets and returns (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vit = VisionTransformer(SMALL)
        with torch.no_grad():
            self.vit.get_parameter("embeddings.pos_embed").mul_(50)  # better in so short a run, as chapter 5 found

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.vit(images)
        return logits, F.cross_entropy(logits, targets)


def learn(
    rank: int, world_size: int, inner_steps: int, n_steps: int, outer_lr: float, outer_momentum: float
) -> dict[str, Any]:
    """Train on digits. With 0 inner steps the training is data parallel: gradients are averaged in each step.

    Args:
        rank: This rank.
        world_size: Number of ranks R; every rank trains on its own R-th of the images.
        inner_steps: Steps H in a round of DiLoCo, or 0.
        n_steps: Steps in all.
        outer_lr, outer_momentum: Learning rate and momentum of the outer step.

    Returns:
        On rank 0 ``"curve"``, a list of (steps, loss on the test digits), and the final ``"accuracy"``;
        on other ranks nothing.
    """
    torch.set_num_threads(1)
    train, test = load_images("digits", "train"), load_images("digits", "test")
    model, state = Classifier(), {}  # type: ignore[var-annotated]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    mine = torch.arange(rank, len(train), world_size)
    generator = torch.Generator().manual_seed(rank)

    def batch() -> tuple[Tensor, Tensor]:
        return digits_batch(train, mine[torch.randint(len(mine), (BATCH,), generator=generator)].tolist())

    losses: list[tuple[int, float]] = []
    accuracy = 0.0
    for step in range(0, n_steps, inner_steps or 1):
        if inner_steps:
            turns = min(inner_steps, n_steps - step)
            local_sgd_step(model, state, optimizer, (batch() for _ in range(turns)), outer_lr, outer_momentum)
        else:
            optimizer.zero_grad()
            model(*batch())[1].backward()
            average_gradients_flat(model)
            optimizer.step()
        done = min(step + (inner_steps or 1), n_steps)
        if rank == 0 and (inner_steps or done % 10 == 0):
            loss, accuracy = _judge(model, test)
            losses.append((done, loss))
    return {"curve": losses, "accuracy": accuracy} if rank == 0 else {}


@torch.no_grad()
def _judge(model: nn.Module, test: Any) -> tuple[float, float]:
    """Mean loss and accuracy on every second item of the test digits."""
    images, labels = digits_batch(test, list(range(0, len(test), 2)))
    logits, loss = model(images, labels)
    return loss.item(), (logits.argmax(1) == labels).double().mean().item()
