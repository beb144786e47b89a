"""Short runs of chapter 19: a small Llama on text, dense or with a mixture in every block,
and one layer on several ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.given.data.corpora import language_reference
from lib.given.models.llama import LlamaConfig
from lib.llama import Llama, SwiGLU
from lib.moe import ExpertParallelMoE, MoE, load_balancing_loss, router_z_loss, update_router_bias

N_EXPERTS, K, HIDDEN = 8, 2, 64
LENGTH, BATCH = 64, 16
CONFIG = LlamaConfig(vocab_size=256, dim=64, n_layers=2, n_heads=4, hidden_dim=K * HIDDEN, context_len=LENGTH)


@dataclass
class Run:
    """What a training left: the loss of each step, and for each step and block the share of
    assignments of each expert.
    """

    n_parameters: int
    losses: list[float] = field(default_factory=list)
    shares: list[list[list[float]]] = field(default_factory=list)
    held_out: float = 0.0

    def busiest(self) -> list[float]:
        """For each step, the largest share of an expert in the first block, as a multiple of the even share."""
        return [max(blocks[0]) * len(blocks[0]) for blocks in self.shares]


def make_model(kind: str, seed: int = 0) -> Llama:
    """A Llama on bytes: ``dense`` of the active size, ``wide`` of the total size, or ``mixture``."""
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    layers: Any = model.layers
    for layer in layers:
        if kind == "wide":
            layer.feed_forward = SwiGLU(CONFIG.dim, N_EXPERTS * HIDDEN)
        elif kind == "mixture":
            layer.feed_forward = MoE(CONFIG.dim, HIDDEN, N_EXPERTS, K)
            layer.feed_forward.register_forward_pre_hook(_keep_input)
    return model


def windows(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    start = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
    window = data[start + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def train(kind: str, balance: str = "none", n_steps: int = 200, seed: int = 0, learning_rate: float = 3e-3) -> Run:
    """Train on the bytes of the language reference.

    Args:
        kind: As in `make_model`.
        balance: "none", "loss" (both losses of the router) or "bias".
        n_steps: Steps of `BATCH` sequences of `LENGTH` bytes.
        seed: Of the weights and of the batches.
        learning_rate: Of AdamW.
    """
    data = torch.tensor(list(language_reference().encode()))
    cut = len(data) * 9 // 10
    generator = torch.Generator().manual_seed(seed)
    model = make_model(kind, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    run = Run(sum(p.numel() for p in model.parameters()))
    for _ in range(n_steps):
        x, y = windows(data[:cut], generator)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        total = loss + sum(_router_losses(layer) for layer in mixtures(model)) if balance == "loss" else loss
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item())
        counts = [_counts(layer) for layer in mixtures(model)]
        run.shares.append([(c / c.sum()).tolist() for c in counts])
        if balance == "bias":
            for layer, c in zip(mixtures(model), counts, strict=True):
                layer.router_bias.copy_(update_router_bias(layer.router_bias, c, rate=0.02))
    run.held_out = _held_out(model, data[cut:])
    return run


def _counts(layer: MoE) -> Tensor:
    """How many of the last rows each expert got."""
    assert layer.routing is not None
    return torch.bincount(layer.routing[1].flatten(), minlength=N_EXPERTS)


def _router_losses(layer: MoE) -> Tensor:
    assert layer.routing is not None
    router: Any = layer.router
    logits = router(vars(layer)["input"].flatten(0, -2))  # a softmax forgets how large they were
    return 0.01 * load_balancing_loss(*layer.routing) + 0.001 * router_z_loss(logits)


def _keep_input(layer: nn.Module, inputs: tuple) -> None:
    """A hook: the z-loss needs the logits, which a layer does not keep."""
    vars(layer)["input"] = inputs[0]


def _held_out(model: nn.Module, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = []
        for _ in range(20):
            x, y = windows(data, generator)
            losses.append(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return torch.stack(losses).mean().item()


def spread_layer(rank: int, world_size: int, lengths: Sequence[int]) -> tuple[float, list[int]]:
    """One layer on all ranks, each with its own number of tokens:
    the largest sum of a token's differences from the whole layer, and the rows for each expert here.
    """
    torch.manual_seed(0)
    whole = MoE(16, 32, 8, 2).double()
    x = torch.randn(lengths[rank], 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    layer = ExpertParallelMoE(whole)
    with torch.no_grad():
        apart = (layer(x) - whole(x)).abs().sum(-1)  # a rank without tokens takes part, too
    counts = _counts(whole)
    dist.all_reduce(counts)
    return max(apart.tolist(), default=0.0), counts.chunk(world_size)[rank].tolist()
