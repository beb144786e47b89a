"""The hooks of ``lib.given.parallel.sharding``: activation checkpointing around, across and inside of sharded units."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.ranks import pool
from solutions.fsdp import FullySharded


class Block(nn.Module):
    """Its elementwise parameter is saved for backward, so backward reads it."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.scale, self.layer, self.checkpoints = nn.Parameter(torch.randn(6)), nn.Linear(6, 6), False

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * self.scale)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x))


class Model(nn.Module):
    """Three blocks between two uses of the root's own parameter."""

    def __init__(self, how: str = "never"):
        super().__init__()
        blocks = [Block(n) for n in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.scale, self.how = nn.Parameter(torch.ones(6)), how
        for block in blocks:
            block.checkpoints = how == "inside of each unit"

    def forward(self, x: Tensor) -> Tensor:
        x, (first, second, third) = x * self.scale, self.blocks
        if self.how == "across two units":
            x = third(checkpoint(lambda y: second(first(y)), x, use_reentrant=False))
        elif self.how.startswith("around each unit"):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant="reentrant" in self.how)
        else:
            x = third(second(first(x)))
        return (x * self.scale).square().sum()


def gradients(wrapped: FullySharded, x: Tensor, how: str) -> list[Tensor]:
    wrapped.zero_grad()
    loss = checkpoint(wrapped, x, use_reentrant=False) if how == "around the whole model" else wrapped(x)
    loss.backward()
    wrapped.finish_gradient_synchronization()
    return [parameter.grad for parameter in wrapped.parameters()]


def compare(rank: int, world_size: int, how: str) -> list[int]:
    """Which units are whole after two steps that equal those without checkpointing."""
    wrapped, usual = FullySharded(Model(how)), FullySharded(Model())
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2 * step + rank)).requires_grad_()
        torch.testing.assert_close(gradients(wrapped, x, how), gradients(usual, x, "never"))
    return [i for i, flats in enumerate(wrapped.flats) if any(flat.is_whole for flat in flats)]


@pytest.mark.parametrize(
    "how",
    [
        "around each unit",
        "around each unit, reentrant",
        "across two units",
        "inside of each unit",
        "around the whole model",
    ],
)
def test_a_sharded_model_with_activation_checkpointing(how):
    assert pool("gloo").run(compare, how, n_ranks=2, time_limit_s=30).values == [[], []]
