"""Measure AdamW beside Muon on GPT-2 124M: steps and seconds to one held-out loss, and what Newton-Schulz costs a step.

``python -m lib.bench.optimizers`` needs one GPU, some 8 minutes and no network: its text is the sources and documents
of the Python packages that are installed.
It writes ``chapters/measurements/optimizers.json``. ``--device cpu --tiny`` tries it.

1. Predict Newton-Schulz's share of a step: ``newton_schulz_flops`` over ``6 n tokens``.
2. Time steps in turns: PyTorch's fused AdamW, chapter 25's Muon, the same in stacks (``lib.fast.parts.muon``) and
   ``torch.optim.Muon``, each Muon with fused AdamW for the rest.
3. Train with AdamW and with Muon in stacks at the same number of rates, then with the best rate of each and other
   seeds.
   The loss to reach is what the tuned AdamW has at the end, the mean over its seeds.
"""

import argparse
import json
import math
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.bench.kit import in_turns, record, seconds_of, spread, wait_for
from lib.fast import models as fast
from lib.fast.parts.muon import StackedMuon
from lib.given.data.record import MEASUREMENTS
from lib.given.models.gpt2 import GPT2_SMALL, GPT2Config
from lib.gpt2 import GPT2
from lib.optimizers import Muon, newton_schulz_flops, split_parameters
from lib.runs.flags import ProgramParser, positive, whole
from lib.training import cosine_schedule

VOCAB = 512
"""Bytes need 256 ids; the table's size is a multiple of 128."""
RATES = {"adamw": (6e-4, 1.2e-3, 2.4e-3), "stacked_muon": (1.2e-3, 2.4e-3, 4.8e-3)}
"""The largest rates that are tried. With "match_rms_adamw" both optimizers' steps are about as long."""
MUONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "stacked_muon": StackedMuon,
    "muon": Muon,
    "torch_muon": torch.optim.Muon,
}
ENDINGS = {".py", ".pyi", ".txt", ".rst", ".md", ".h", ".hpp", ".cuh"}
HELD_OUT = 20
"""One file in so many is held out."""


def read_text(n_bytes: int) -> tuple[Tensor, Tensor]:
    """Bytes of installed files, to train on and held out, in an order that is the same on every such machine."""
    root = Path(sysconfig.get_paths()["purelib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen, total = set[int](), 0
    for path in sorted(p for folder in (Path(sysconfig.get_paths()["stdlib"]), root) for p in folder.rglob("*")):
        if path.suffix not in ENDINGS or total >= n_bytes or not path.is_file():
            continue
        text = path.read_bytes()[: 1 << 17]
        if len(text) < 400 or hash(text) in seen:
            continue
        parts[len(seen) % HELD_OUT == 0].append(text)
        seen.add(hash(text))
        total += len(text)
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def adamw(params: list, lr: float, o: argparse.Namespace) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=o.device == "cuda")


def make_optimizers(kind: str, model: nn.Module, lr: float, o: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW alone, or one of the three Muons with AdamW for what is not in the blocks."""
    if kind == "adamw":
        return [adamw(list(model.parameters()), lr, o)]
    matrices, others = split_parameters(model)
    settings: dict[str, Any] = {"lr": lr, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return [MUONS[kind](matrices, **settings), adamw(others, lr, o)]


class Model:
    """The model and its loss, which is compiled once for all trainings."""

    def __init__(self, o: argparse.Namespace):
        self.config = config_of(o)
        self.model = GPT2(self.config).to(o.device)
        path = fast.Path(dtype=torch.bfloat16, kernels=o.device == "cuda", attention="quickest")
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda x, y: fast.gpt2_loss(self.model, x, y, path)
        if o.device == "cuda":
            self.loss = torch.compile(self.loss)

    def begin(self, seed: int) -> None:
        """New weights."""
        torch.manual_seed(seed)
        self.model.load_state_dict(GPT2(self.config).state_dict())


class Training:
    """A model, its optimizers and its data.

    Args:
        kind: "adamw" or a key of ``MUONS``.
        lr: The largest rate.
        seed: Of the weights and of the order of the data.
        model: The model, which begins anew.
        texts: Bytes to train on, and held out.
        o: The program's flags.
    """

    def __init__(
        self, kind: str, lr: float, seed: int, model: Model, texts: tuple[Tensor, Tensor], o: argparse.Namespace
    ):
        model.begin(seed)
        self.o, self.lr, self.config, self.model, self.loss = o, lr, model.config, model.model, model.loss
        self.text, self.held_out = (text.to(o.device) for text in texts)
        self.optimizers = make_optimizers(kind, self.model, lr, o)
        self.chance = torch.Generator(o.device).manual_seed(seed)

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts[:, None] + torch.arange(self.config.context_len + 1, device=text.device)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self) -> tuple[Tensor, Tensor]:
        last = len(self.text) - self.config.context_len - 1
        return self.windows(
            self.text, torch.randint(last, (self.o.batch,), device=self.o.device, generator=self.chance)
        )

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.loss(*self.batch()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss in nats a byte over windows that lie evenly in the held-out text."""
        n = self.o.eval_batches * self.o.batch
        starts = torch.linspace(0, len(self.held_out) - self.config.context_len - 2, n, device=self.o.device).long()
        losses = [self.loss(*self.windows(self.held_out, part)) for part in starts.split(self.o.batch)]
        return float(torch.stack(losses).mean())

    def run(self, steps: int) -> list[dict[str, float]]:
        """Train all steps; the held-out loss after each ``eval_every``, with the seconds of the steps so far."""
        found, seconds = [], 0.0
        warmup = max(1, steps // 20)
        for first in range(0, steps, self.o.eval_every):
            many = range(first, min(steps, first + self.o.eval_every))

            def train(many: range = many) -> None:
                for step in many:
                    self.step(cosine_schedule(step + 1, self.lr, 0.1 * self.lr, warmup, steps))

            seconds += seconds_of(train, self.o.device)
            found.append({"step": many.stop, "seconds": seconds, "loss": self.held_out_loss()})
        return found


def config_of(o: argparse.Namespace) -> GPT2Config:
    """GPT-2 124M's blocks with a table for bytes; with ``--tiny`` a size for a CPU."""
    if o.tiny:
        return GPT2Config(vocab_size=VOCAB, context_len=o.length, dim=64, n_layers=2, n_heads=1)
    return replace(GPT2_SMALL, vocab_size=VOCAB, context_len=o.length)


def prediction(o: argparse.Namespace) -> dict[str, Any]:
    """Newton-Schulz's FLOPs over those of a step, before anything is timed."""
    with torch.device("meta"):
        model = GPT2(config_of(o))
    matrices, _ = split_parameters(model)
    flops = sum(newton_schulz_flops(p.shape) for p in matrices)
    n = sum(p.numel() for p in model.parameters())
    tokens = o.batch * o.length
    return {
        "n_parameters": n,
        "n_matrices": len(matrices),
        "tokens": tokens,
        "newton_schulz_flops": flops,
        "share_of_flops": flops / (6 * n * tokens),
    }


def speeds(model: Model, texts: tuple[Tensor, Tensor], o: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of each, in turns, and of the optimizers' steps alone."""
    trainings = {kind: Training(kind, 1e-4, 0, model, texts, o) for kind in ("adamw", *MUONS)}
    n = o.rounds
    steps = in_turns(
        {k: (lambda t=t: t.step(1e-4)) for k, t in trainings.items()}, lambda run: seconds_of(run, o.device, 3), n
    )
    training = trainings["adamw"]
    training.loss(*training.batch()).backward()

    def alone(training: Training) -> Callable[[], None]:
        def update() -> None:
            for optimizer in training.optimizers:
                optimizer.step()

        return update

    updates = in_turns({k: alone(t) for k, t in trainings.items()}, lambda run: seconds_of(run, o.device, 3), n)
    wait_for(o.device)
    return {
        "step_s": {kind: spread(times) for kind, times in steps.items()},
        "optimizer_s": {kind: spread(times) for kind, times in updates.items()},
    }


def reached(curve: list[dict[str, float]], goal: float) -> dict[str, float] | None:
    """Step and seconds at which a curve reaches a loss, by a straight line between evaluations, or None."""
    before = None
    for point in curve:
        if point["loss"] <= goal:
            if before is None:
                return {"step": point["step"], "seconds": point["seconds"]}
            share = (before["loss"] - goal) / (before["loss"] - point["loss"])
            return {name: before[name] + share * (point[name] - before[name]) for name in ("step", "seconds")}
        before = point
    return None


def race(model: Model, texts: tuple[Tensor, Tensor], o: argparse.Namespace) -> dict[str, Any]:
    """Both optimizers at every rate, the best with other seeds, and when Muon reaches AdamW's last loss."""
    found: dict[str, Any] = {"tuning": {}, "best_rate": {}, "curves": {}, "reached": {}}
    for kind, rates in RATES.items():
        curves = {lr: Training(kind, lr, 0, model, texts, o).run(o.steps) for lr in rates}
        last = {lr: curve[-1]["loss"] for lr, curve in curves.items()}
        best = min((lr for lr in rates if math.isfinite(last[lr])), key=last.__getitem__)
        found["tuning"][kind] = {str(lr): loss for lr, loss in last.items()}
        found["best_rate"][kind] = best
        more = [Training(kind, best, seed, model, texts, o).run(o.steps) for seed in range(1, o.seeds)]
        found["curves"][kind] = [curves[best], *more]
        print(kind, found["tuning"][kind], [curve[-1]["loss"] for curve in found["curves"][kind]], flush=True)
    ends = [curve[-1]["loss"] for curve in found["curves"]["adamw"]]
    found["goal"] = sum(ends) / len(ends)
    for kind, curves in found["curves"].items():
        found["reached"][kind] = [reached(curve, found["goal"]) for curve in curves]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("speeds", "race", []), default=[], help="by default both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--steps", type=whole(1), default=800, help="steps of each training")
    parser.add_argument("--batch", type=whole(1), default=16, help="sequences in a step")
    parser.add_argument("--length", type=whole(16), default=1024, help="bytes in a sequence")
    parser.add_argument("--seeds", type=whole(1), default=3, help="trainings with the best rate")
    parser.add_argument("--eval-every", type=whole(1), default=80, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=whole(1), default=16, help="batches of an evaluation")
    parser.add_argument("--rounds", type=whole(1), default=12, help="how often each is timed")
    parser.add_argument("--megabytes", type=positive, default=120, help="text that is read at most")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    o = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    texts = read_text(round(o.megabytes * 1e6))
    settings = {
        name: getattr(o, name) for name in ("tiny", "steps", "batch", "length", "seeds", "eval_every", "eval_batches")
    }
    results: dict[str, Any] = {
        "settings": settings,
        "bytes": [len(text) for text in texts],
        "prediction": prediction(o),
    }
    print(results, flush=True)
    old = o.folder / "optimizers.json"
    if old.exists() and (kept := json.loads(old.read_text(encoding="utf-8"))["results"])["settings"] == settings:
        results = {**kept, **results}  # the parts that were measured before
    model = Model(o)
    for part in o.parts or PARTS:
        results |= {part: PARTS[part](model, texts, o)}
        record("optimizers", results, o.folder)


PARTS = {"speeds": speeds, "race": race}


if __name__ == "__main__":
    main()
