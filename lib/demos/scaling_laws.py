"""Runs of chapter 22: GPT-2s of 10,000 to 1,000,000 parameters on text, each of which ends at several lengths."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lib.given.data.corpora import language_reference, standard_library_docstrings
from lib.given.models.gpt2 import GPT2Config
from lib.given.show.plots import COLOURS, GREY
from lib.gpt2 import GPT2, count_parameters
from lib.scaling_laws import mup_multipliers, wsd_schedule

LENGTH, BATCH, BASE_WIDTH, WARMUP = 32, 16, 32, 20
LEARNING_RATE = 5e-3
"""At the base width."""

N_LAYERS, HEAD_WIDTH = 2, 16
WIDTHS = (16, 32, 48, 64, 96, 192)
"""Widths of the sweep; the last one is predicted before it is trained."""

Multipliers = Callable[[int, int, str], dict[str, float]]


@dataclass
class Run:
    """One model's training: its size, the loss of each step at a constant rate, and where it ended at each length."""

    n_parameters: int
    losses: list[float] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)
    """Tokens seen, and the held-out loss after the decay."""


@cache
def corpus() -> tuple[Tensor, Tensor]:
    """The language reference and the docstrings as bytes: nine tenths for training, and one
    tenth, in pieces, held out.
    """
    data = torch.tensor(list((language_reference() + standard_library_docstrings()).encode()), dtype=torch.uint8)
    pieces = data[: len(data) // 4096 * 4096].view(-1, 4096)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def windows(data: Tensor, generator: torch.Generator, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[batch, LENGTH]`` from random places."""
    start = torch.randint(len(data) - LENGTH, (batch, 1), generator=generator)
    window = data[start + torch.arange(LENGTH + 1)].long()
    return window[:, :-1], window[:, 1:]


def standard(width: int, base_width: int, kind: str) -> dict[str, float]:
    """Standard parametrisation: random weights shrink with the width, learning rates do not."""
    return {"init": (width / base_width) ** -0.5 if kind == "hidden" else 1.0, "lr": 1.0, "output": 1.0}


def kind_of(name: str, weight: Tensor) -> str:
    """Weights of the blocks grow in both dimensions; embeddings, which are the head too, biases and gains in one."""
    return "hidden" if name.startswith("h.") and weight.ndim == 2 else "input"


def sinusoids(width: int) -> Tensor:
    """Positions ``[LENGTH, width]`` as sines and cosines, of mean square 1: a shift is a rotation,
    so attention learns it early.
    """
    angles = torch.arange(LENGTH)[:, None] * torch.logspace(0, -2, width // 2)
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)


def make_model(width: int, multipliers: Multipliers = mup_multipliers, seed: int = 0) -> GPT2:
    """A GPT-2 on bytes with heads of 16 features, whose initial weights and output follow the multipliers."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=256, context_len=LENGTH, dim=width, n_layers=N_LAYERS, n_heads=width // HEAD_WIDTH)
    model = GPT2(config)
    for name, weight in model.named_parameters():
        if kind_of(name, weight) == "hidden":
            depth = 1 / math.sqrt(2 * N_LAYERS) if name.endswith("c_proj.weight") else 1.0
            std = BASE_WIDTH**-0.5 * depth * multipliers(width, BASE_WIDTH, "hidden")["init"]
            nn.init.normal_(weight, std=std / 2 if "mlp.c_proj" in name else std)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=0.2)
    with torch.no_grad():
        cast(nn.Embedding, model.wpe).weight.copy_(0.2 * sinusoids(width))
    factor = multipliers(width, BASE_WIDTH, "output")["output"]
    norm: Any = model.ln_f
    norm.register_forward_hook(lambda module, inputs, out: out * factor)  # before the tied head
    return model


def make_optimizer(
    model: GPT2, lr: float = LEARNING_RATE, multipliers: Multipliers = mup_multipliers
) -> torch.optim.Optimizer:
    """AdamW with one group for each kind of weight; "factor" is what multiplies the schedule's rate."""
    groups, config = [], cast(GPT2Config, model.config)
    for kind in ("input", "hidden"):
        weights = [w for name, w in model.named_parameters() if kind_of(name, w) == kind]
        factor = multipliers(config.dim, BASE_WIDTH, kind)["lr"]
        groups.append({"params": weights, "lr": lr * factor, "factor": factor})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, batch: tuple[Tensor, Tensor]) -> float:
    """One step at this rate; returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]
    loss = model(*batch)[1]
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def held_out_loss(model: nn.Module, n_windows: int = 512) -> float:
    """Mean loss, in nats a byte, over the same windows of the held-out tenth for every model."""
    inputs, targets = windows(corpus()[1], torch.Generator().manual_seed(1), n_windows)
    parts = [model(x, y)[1] for x, y in zip(inputs.split(64), targets.split(64), strict=True)]
    return torch.stack(parts).mean().item()


def train(
    width: int,
    lengths: Sequence[int],
    lr: float = LEARNING_RATE,
    multipliers: Multipliers = mup_multipliers,
    batch: int = BATCH,
    seed: int = 0,
    n_windows: int = 512,
) -> Run:
    """One run at a constant rate, from which a decay branches off for each length.

    Args:
        width: Of the model.
        lengths: Steps at which a run ends, rising; its decay is the last fifth of them.
        lr: Highest rate of the base width.
        multipliers: How weights and rates follow the width.
        batch: Windows in a batch.
        seed: Of weights and batches.
        n_windows: Of the held-out loss.
    """
    model = make_model(width, multipliers, seed)
    optimizer, generator = make_optimizer(model, lr, multipliers), torch.Generator().manual_seed(seed)
    run = Run(count_parameters(cast(GPT2Config, model.config)))
    for last in lengths:
        start = last - last // 5
        while len(run.losses) < start:
            rate = wsd_schedule(len(run.losses), lr, WARMUP, start, last)
            run.losses.append(step(model, optimizer, rate, windows(corpus()[0], generator, batch)))
        branch, after = copy.deepcopy((model, optimizer)), torch.Generator().manual_seed(seed + last)
        for at in range(start, last):
            rate = wsd_schedule(at, lr, WARMUP, start, last)
            step(*branch, rate, windows(corpus()[0], after, batch))
        run.ends.append((last * batch * LENGTH, held_out_loss(branch[0], n_windows)))
    return run


def sweep(rank: int, world_size: int, widths: Sequence[int], lengths: Sequence[int]) -> list[Run]:
    """This rank's share of the runs, the wide ones first; ranks do not communicate."""
    return [train(width, lengths) for width in sorted(widths, reverse=True)[rank::world_size]]


def gradient_norm(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Norm of the gradient of all weights over one batch."""
    model.zero_grad()
    model(*batch)[1].backward()
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]).norm().item()


def norms_along(
    width: int, moments: Sequence[int], small: int, large: int, n_large: int = 12
) -> dict[int, tuple[list[float], list[float]]]:
    """Train at a constant rate and measure gradients at some steps:
    the norms of small and of large batches of windows.
    """
    model = make_model(width)
    optimizer, generator = make_optimizer(model), torch.Generator().manual_seed(0)
    found = {}
    for at in range(max(moments) + 1):
        if at in moments:
            smalls = [gradient_norm(model, windows(corpus()[0], generator, small)) for _ in range(8 * n_large)]
            larges = [gradient_norm(model, windows(corpus()[0], generator, large)) for _ in range(n_large)]
            found[at] = smalls, larges
        rate = wsd_schedule(at, LEARNING_RATE, WARMUP, max(moments) + 1, max(moments) + 1)
        step(model, optimizer, rate, windows(corpus()[0], generator))
    return found


def coordinate_check(
    widths: Sequence[int], multipliers: Multipliers, n_steps: int = 4, lr: float = LEARNING_RATE
) -> list[list[float]]:
    """For each width, how far the last block's output and the logits have moved after each of a few steps,
    on average.
    """
    moved = []
    for width in widths:
        model = make_model(width, multipliers)
        optimizer, generator = make_optimizer(model, lr, multipliers), torch.Generator().manual_seed(0)
        batch, seen = windows(corpus()[0], generator), list[Tensor]()
        blocks: Any = model.h
        blocks[-1].register_forward_hook(lambda module, inputs, out, seen=seen: seen.append(out.detach()))
        first = model(*batch)[0].detach()
        for _ in range(n_steps):
            step(model, optimizer, lr, batch)
        logits = model(*batch)[0].detach()
        moved.append([(seen[-1] - seen[0]).abs().mean().item(), (logits - first).abs().mean().item()])
    return moved


def transfer(
    rank: int, world_size: int, widths: Sequence[int], rates: Sequence[float], n_steps: int
) -> dict[tuple[str, int, float], float]:
    """This rank's share of short runs: held-out loss for each parametrisation, width and learning rate.

    At the base width all of muP's multipliers are 1, so that one run stands for both parametrisations.
    """
    kinds: dict[str, Multipliers] = {"standard": standard, "muP": mup_multipliers}
    cases = [
        (kind, width, lr) for kind in kinds for width in widths for lr in rates if (kind, width) != ("muP", BASE_WIDTH)
    ]
    found = {
        (kind, width, lr): train(width, (n_steps,), lr, kinds[kind], BATCH // 2, n_windows=128).ends[0][1]
        for kind, width, lr in cases[rank::world_size]
    }
    return found | {("muP", width, lr): loss for (_, width, lr), loss in found.items() if width == BASE_WIDTH}


def draw_run(recorded: dict[str, Any], law: Callable[[Any, Any], Any] | None = None) -> Figure:
    """The predicted run: its loss over the tokens, what was predicted, and where Transformers ended.

    Args:
        recorded: ``load("scaling_laws")``.
        law: The loss for weights and tokens, if one was fitted to the sweep.
    """
    found = recorded["results"]
    plan, ours, theirs = found["predict"], found["run"]["ours"], found["run"]["transformers"]
    a_step = plan["tokens"] / plan["steps"] / 1e6
    fig, ax = plt.subplots(figsize=(6.6, 3.8))
    losses = ours["losses_every_20"]
    ax.plot([a_step * (20 * i + 10) for i in range(len(losses))], losses, color=GREY, lw=1, label="training loss")
    largest = max(point["n_weights"] for point in found["sweep"]["points"])
    for point in found["sweep"]["points"]:
        if point["n_weights"] == largest:
            ax.plot(point["tokens"] / 1e6, point["held_out_loss"], "o", color=COLOURS[2])
    ax.plot([], [], "o", color=COLOURS[2], label="largest model of the sweep")
    if law:
        tokens = [5e6 * 1.1**i for i in range(33)]
        tokens = [t for t in tokens if t < plan["tokens"]] + [plan["tokens"]]
        ax.plot([t / 1e6 for t in tokens], [law(plan["n_weights"], t) for t in tokens], "--", color=COLOURS[1])
    low, high = plan["intervals_90"]["held_out_loss"]
    at, value = plan["tokens"] / 1e6, plan["held_out_loss"]
    ax.errorbar(
        at,
        value,
        [[value - low], [high - value]],
        fmt="s",
        ms=12,
        mfc="none",
        color=COLOURS[1],
        capsize=4,
        label="predicted",
    )
    ends = ours["held_out"]
    ax.plot(
        [a_step * (e["step"] + 1) for e in ends],
        [e["held_out_loss"] for e in ends],
        "*",
        ms=11,
        color=COLOURS[0],
        label="held out",
    )
    ax.plot(theirs["tokens"] / 1e6, theirs["held_out_loss"], "D", color=COLOURS[3], label="Transformers, as long")
    ax.set(xlabel="million tokens", ylabel="loss (nats a token)", ylim=(1.5, 6.5), xlim=(0, 1.05 * at))
    ax.legend(fontsize=8)
    return fig


def draw_positions(recorded: dict[str, Any]) -> Figure:
    """The held-out loss at each place in the window, before and after the sweep's fall.

    Args:
        recorded: ``load("scaling_laws")``.
    """
    found = recorded["results"]
    fig, ax = plt.subplots(figsize=(6.6, 2.8))
    for point, colour in zip(found["positions"]["points"], COLOURS, strict=False):
        losses = point["loss_by_position"]
        each = found["sweep"]["length"] / len(losses)
        places = [each * (i + 0.5) for i in range(len(losses))]
        ax.plot(places, losses, "o-", ms=4, color=colour, label=f"after {point['tokens'] / 1e6:.0f} million tokens")
    ax.set(xlabel="place in the window", ylabel="loss (nats a token)")
    ax.legend(fontsize=8)
    return fig


def draw_images(recorded: dict[str, Any]) -> Figure:
    """The test loss of the four vision transformers over the pictures seen, and what was predicted for the largest.

    Args:
        recorded: ``load("scaling_laws_images")``.
    """
    found = recorded["results"]
    fig, ax = plt.subplots(figsize=(6.6, 3.2))
    points = [*found["sweep"], *found["largest"]]
    for size, colour in zip(sorted({p["n_weights"] for p in points}), COLOURS, strict=False):
        mine = [p for p in points if p["n_weights"] == size]
        seen, losses = [p["images"] for p in mine], [p["held_out_loss"] for p in mine]
        ax.plot(seen, losses, "o-", ms=4, color=colour, label=f"{size / 1e6:.1f} million weights")
    plan = found["predict"]
    (low, high), value = plan["intervals_90"]["held_out_loss"], plan["held_out_loss"]
    spread = [[value - low], [high - value]]
    ax.errorbar(plan["images"], value, spread, fmt="s", ms=12, mfc="none", color=GREY, capsize=4, label="predicted")
    ax.set(xlabel="pictures seen", ylabel="loss on the test pictures", xscale="log", yscale="log")
    ticks = [p["images"] for p in found["largest"]]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set_yticks([0.3, 0.4, 0.5, 0.6, 0.7], ["0.3", "0.4", "0.5", "0.6", "0.7"])
    ax.minorticks_off()
    ax.legend(fontsize=8)
    return fig
