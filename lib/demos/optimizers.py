"""Short runs of chapter 25: a small GPT-2 on the bytes of the language reference, trained by different optimizers."""

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.given.data.corpora import language_reference
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.optimizers import Lion, Muon, ShardedMuon, split_parameters
from lib.training import AdamW, cosine_schedule, parameter_groups

LENGTH, BATCH, HELD_OUT = 64, 8, 20_000
CONFIG = GPT2Config(vocab_size=256, context_len=LENGTH, dim=64, n_layers=2, n_heads=2)
RATES = {"AdamW": (3e-4, 1e-3, 3e-3), "Lion": (3e-4, 1e-3, 3e-3), "Muon": (1e-2, 3e-2, 1e-1)}
"""Largest learning rates. Those of Muon are of its matrices; AdamW trains the other parameters at 3e-3."""
Optimizers = list[torch.optim.Optimizer]


@cache
def tokens() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and held out."""
    row = torch.tensor(list(language_reference().encode()))
    return row[:-HELD_OUT], row[-HELD_OUT:]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows, and the byte after each of their bytes."""
    row, _ = tokens()
    starts = torch.randint(len(row) - LENGTH - 1, (BATCH, 1), generator=generator)
    window = row[starts + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def new_model(seed: int = 0) -> GPT2:
    torch.manual_seed(seed)
    return GPT2(CONFIG)


def make_optimizers(kind: str, model: nn.Module, lr: float) -> Optimizers:
    """AdamW or Lion for all parameters; or Muon for the matrices of the blocks, with AdamW for the others."""
    if kind == "Muon":
        matrices, others = split_parameters(model)
        muon = Muon(matrices, lr=lr, ns_dtype=torch.float32)  # a CPU emulates bfloat16, slowly
        return [muon, AdamW(others, lr=3e-3, betas=(0.9, 0.95))]
    if kind == "Lion":
        return [Lion(parameter_groups(model, 0.1), lr=lr)]
    return [AdamW(parameter_groups(model, 0.1), lr=lr, betas=(0.9, 0.95))]


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Mean loss over the first 64 windows of the held-out bytes."""
    row = tokens()[1][: 128 * LENGTH + 1]
    return model(row[:-1].view(-1, LENGTH), row[1:].view(-1, LENGTH))[1].item()


def train(
    model: nn.Module,
    optimizers: Optimizers,
    n_steps: int,
    schedule: str = "cosine",
    after: Callable[[int], Any] = lambda step: None,
) -> dict[str, list[float]]:
    """Losses of all steps, and the seconds after each since the first began.

    Args:
        model: Trained in place.
        optimizers: Each with its largest rate.
        n_steps: Steps.
        schedule: "cosine" with a warm-up of a tenth, or "constant" after the warm-up.
        after: Called with the number of each step when it is done.
    """
    generator, peaks = torch.Generator().manual_seed(0), [o.param_groups[0]["lr"] for o in optimizers]
    losses, seconds, begin = [], [], time.perf_counter()
    for step in range(n_steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                floor = 0.1 * peak if schedule == "cosine" else peak
                group["lr"] = cosine_schedule(step + 1, peak, floor, n_steps // 10, n_steps)
            optimizer.zero_grad()
        _, loss = model(*batch(generator))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after(step)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return {"losses": losses, "seconds": seconds}


@cache
def run(kind: str, lr: float, n_steps: int) -> dict[str, Any]:
    """One optimizer at one rate: the curve of its training, and the held-out loss at its end."""
    model = new_model()
    curve = train(model, make_optimizers(kind, model, lr), n_steps)
    return {**curve, "held_out": held_out_loss(model)}


def race(n_steps: int = 100) -> dict[str, dict[float, dict[str, Any]]]:
    """Every optimizer at each of its rates, from the same weights and on the same batches."""
    return {kind: {lr: run(kind, lr, n_steps) for lr in rates} for kind, rates in RATES.items()}


def trained(n_steps: int = 60) -> tuple[GPT2, AdamW]:
    """A model after some steps of AdamW, with its last gradients, and the optimizer with its moments."""
    model = new_model()
    optimizer = AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    train(model, [optimizer], n_steps)
    return model, optimizer


# ---- averages of weights, which are shown and not graded
# ----------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule (arXiv:2405.15682): gradients are taken between the fast weights z and their mean x.

    Args:
        params: The parameters, which hold y = 0.1 z + 0.9 x between the steps.
        lr: The rate, constant after a warm-up.
    """

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state.update(step=0, z=y.clone(), x=y.clone(), square=torch.zeros_like(y))
                state["step"] += 1
                t = state["step"]
                state["square"].lerp_(y.grad.square(), 0.05)
                root = (state["square"] / (1 - 0.95**t)).sqrt() + 1e-8
                state["z"].addcdiv_(y.grad, root, value=-group["lr"])
                state["x"].lerp_(state["z"], 1 / t)
                y.copy_(state["z"].lerp(state["x"], 0.9))

    @torch.no_grad()
    def take_mean(self) -> None:
        """Put the means, with which the model is used, into the parameters."""
        for group in self.param_groups:
            for y in group["params"]:
                y.copy_(self.state[y]["x"])


def without_schedule(n_steps: int = 100, lr: float = 3e-3) -> dict[str, float]:
    """Held-out losses: with the cosine; at a constant rate; of the mean weights of its last half; schedule-free."""
    found: dict[str, float] = {"cosine": run("AdamW", lr, n_steps)["held_out"]}
    model, sums = new_model(), dict[str, Tensor]()

    def add(step: int) -> None:
        if step >= n_steps // 2:
            for name, value in model.state_dict().items():
                sums[name] = sums.get(name, 0) + value / (n_steps - n_steps // 2)

    train(model, make_optimizers("AdamW", model, lr), n_steps, "constant", add)
    found["constant"] = held_out_loss(model)
    model.load_state_dict(sums)
    found["constant, mean weights of the last half"] = held_out_loss(model)
    model = new_model()
    free = ScheduleFree(model.parameters(), lr)
    train(model, [free], n_steps, "constant")
    free.take_mean()
    found["schedule-free"] = held_out_loss(model)
    return found


# ---- on ranks
# ---------------------------------------------------------------------------------------------------------


def sharded_step(rank: int, world_size: int, way: str, dim: int, n_matrices: int) -> float:
    """One step on this rank's rows of square matrices; the largest difference from Muon on the whole ones.

    Args:
        rank, world_size: Of this process.
        way: "owners" for `ShardedMuon`, "gather" for matrices that every rank gathers, "parts" for rows on their own.
        dim: Side of the matrices.
        n_matrices: How many there are.
    """
    shapes = [(dim, dim)] * n_matrices
    whole = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)
    ]
    rows = -(-dim // world_size)
    cut = slice(rank * rows, (rank + 1) * rows)
    mine = [nn.Parameter(w.detach()[cut].clone()) for w in whole]
    settings: dict[str, Any] = {"lr": 0.1, "ns_dtype": torch.float32}
    for i, (w, m) in enumerate(zip(whole, mine, strict=True)):
        w.grad = torch.randn(dim, dim, generator=torch.Generator().manual_seed(100 + i))
        m.grad = w.grad[cut].clone()
    if way == "owners":
        ShardedMuon(mine, shapes, **settings).step()
    elif way == "parts":
        Muon(mine, **settings).step()
    else:
        for m in mine:
            parts = [torch.empty(rows, dim) for _ in range(world_size)]
            dist.all_gather(parts, m.detach())  # as many bytes as the gradient
    Muon(whole, **settings).step()
    return max(float((w.detach()[cut] - m.detach()).abs().max()) for w, m in zip(whole, mine, strict=True))


def within(values: Tensor, low: float = 0.68, high: float = 1.14) -> float:
    """The share of singular values inside of the band."""
    return float(((values >= low) & (values <= high)).double().mean())


def steps_to(curve: dict[str, list[float]], goal: float, window: int = 10) -> tuple[int, float] | None:
    """The first step and second at which the mean loss of ``window`` steps is at most ``goal``; None if it never is."""
    for first, last in pairwise(range(0, len(curve["losses"]) + 1, window)):
        if sum(curve["losses"][first:last]) / window <= goal:
            return last, curve["seconds"][last - 1]
    return None
