"""What the ranks of chapter 17 run: a naive step that deadlocks,
and a small GPT-2 that trains on stages or in one process.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lib.given.models.gpt2 import GPT2Config
from lib.given.parallel.pipeline import Action
from lib.gpt2 import GPT2
from lib.pipeline import (
    DeferredLinear,
    PipelineStage,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    partition_layers,
    run_schedule,
    zero_bubble_schedule,
)
from lib.speed import memory_timeline
from lib.training import AdamW, TokenBatches, accumulate_gradients

SMALL = GPT2Config(vocab_size=512, context_len=64, dim=64, n_layers=8, n_heads=2)
N_MICRO, MICRO_BATCH, LR = 8, 4, 1e-3
SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "GPipe": gpipe_schedule,
    "1F1B": one_f_one_b_schedule,
    "interleaved, 2 chunks": partial(interleaved_schedule, n_chunks=2),
    "zero bubble": zero_bubble_schedule,
}


# ---- GPT-2 as a list of layers ---------------------------------------------------------------------------------------


class Start(nn.Module):
    """The first layer: from tokens to the stream."""

    wte: nn.Embedding
    wpe: nn.Embedding

    def __init__(self, model: Any):
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))


class End(nn.Module):
    """The last layer: from the stream to logits, by the transposed embedding."""

    ln_f: nn.Module
    wte: nn.Embedding

    def __init__(self, model: Any):
        super().__init__()
        self.ln_f, self.wte, self.vocab_size = model.ln_f, model.wte, model.config.vocab_size

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), self.wte.weight)[..., : self.vocab_size]


def layers_of(model: Any) -> list[nn.Module]:
    """A ``GPT2`` as layers to be called one after another."""
    return [Start(model), *model.h, End(model)]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model() -> Any:
    torch.manual_seed(0)
    return GPT2(SMALL)


def micro_batches(tokens: Tensor) -> TokenBatches:
    """Batches of ``N_MICRO`` micro-batches, the same on every rank."""
    return TokenBatches(tokens, N_MICRO * MICRO_BATCH, SMALL.context_len, seed=0)


# ---- training --------------------------------------------------------------------------------------------------------


def train_whole(tokens: Tensor, n_steps: int) -> list[float]:
    """The losses of one process, which accumulates the gradients of the same micro-batches."""
    model = make_model()
    optimizer, losses = AdamW(model.parameters(), lr=LR), []
    for _, (inputs, targets) in zip(range(n_steps), micro_batches(tokens), strict=False):
        optimizer.zero_grad()
        pairs = list(zip(inputs.chunk(N_MICRO), targets.chunk(N_MICRO), strict=True))
        losses.append(accumulate_gradients(model, pairs).item())
        optimizer.step()
    return losses


def make_stages(
    model: GPT2, rank: int, n_ranks: int, costs: Sequence[float], n_chunks: int, is_split: bool
) -> list[PipelineStage]:
    """This rank's chunks of the model; with a split backward, every linear layer can defer its weights' gradient."""
    n_virtual = n_chunks * n_ranks
    parts, layers = partition_layers(costs, n_virtual), layers_of(model)
    mine = [chunk * n_ranks + rank for chunk in range(n_chunks)]
    modules = [nn.Sequential(*(layers[i] for i in parts[g])) for g in mine]
    if is_split:
        for module in modules:
            defer(module)
    return [PipelineStage(module, g, n_virtual) for module, g in zip(modules, mine, strict=True)]


def defer(module: nn.Module) -> None:
    """Put a ``DeferredLinear`` in the place of every linear layer."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, DeferredLinear(child))


def train(rank: int, n_ranks: int, tokens: Tensor, name: str, costs: Sequence[float], n_steps: int) -> dict[str, Any]:
    """Train the small GPT-2 under one schedule.

    Args:
        rank, n_ranks: This rank, and the number of ranks.
        tokens: The corpus.
        name: One of ``SCHEDULES``.
        costs: Cost of each of the model's layers.
        n_steps: Steps, at least 3.

    Returns:
        ``"losses"`` (on the last rank), ``"peak_bytes"`` (what the third step held at most,
        beyond what it began with) and ``"parameters"``, their number on this rank.
    """
    torch.set_num_threads(1)
    n_chunks = 2 if "chunks" in name else 1
    model = make_model()
    stages = make_stages(model, rank, n_ranks, costs, n_chunks, is_split=name == "zero bubble")
    schedule = SCHEDULES[name](rank, n_ranks, N_MICRO)
    ends = dist.new_group([0, n_ranks - 1])
    parameters = list({id(p): p for stage in stages for p in stage.parameters()}.values())
    optimizer, peak = AdamW(parameters, lr=LR), 0
    losses: list[float] = []
    for step, (inputs, targets) in zip(range(n_steps), micro_batches(tokens), strict=False):
        optimizer.zero_grad(set_to_none=False)
        make_step = partial(
            run_schedule, stages, schedule, inputs.chunk(N_MICRO), targets.chunk(N_MICRO), next_token_loss
        )
        loss, peak = measured(make_step) if step == 2 else (make_step(), peak)
        if rank in (0, n_ranks - 1):
            dist.all_reduce(model.wte.weight.grad, group=ends)  # both ends use this table
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "peak_bytes": peak, "parameters": sum(p.numel() for p in parameters)}


def measured(make_step: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """A step's loss, and the most bytes that it held at one time, gradients of the parameters not counted."""
    with tempfile.TemporaryDirectory() as folder, memory_timeline(Path(folder, "memory.json")) as events:
        loss = make_step()
    return loss, max(event["total_bytes"] for event in events)


# ---- the naive way ---------------------------------------------------------------------------------------------------


def naive_step(rank: int, n_ranks: int, name: str) -> str:
    """Do a schedule's list with blocking messages: receive what an action needs, do it, and send what it gives."""
    for action in SCHEDULES[name](rank, n_ranks, 4):
        before, after = (rank - 1, rank + 1) if action.kind == "F" else (rank + 1, rank - 1)
        if 0 <= before < n_ranks:
            dist.recv(torch.empty(8), before)
        if 0 <= after < n_ranks:
            dist.send(torch.ones(8), after)
    return "done"
