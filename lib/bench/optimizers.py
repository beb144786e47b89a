"""Measure AdamW beside Muon on GPT-2 124M: steps and seconds to one held-out loss, and what Newton-Schulz costs a step.

``python -m lib.bench.optimizers`` needs one GPU, some 10 minutes and no network: its text is the sources and documents
of the Python packages that are installed.
It writes ``chapters/measurements/optimizers.json``. ``--device cpu --tiny`` tries it.

With ``--units FOLDER`` each training of the race is kept as a file of its own. Processes that share the folder, say one
for each GPU, divide the trainings, and a race that was stopped goes on with those that are missing.

1. Predict Newton-Schulz's share of a step: ``newton_schulz_flops`` over ``6 n tokens``.
2. Time steps in turns: PyTorch's fused AdamW, chapter 25's Muon, the same in stacks (``lib.fast.parts.muon``) and
   ``torch.optim.Muon``, each Muon with fused AdamW for the rest.
3. Train with AdamW and with Muon in stacks at the same number of rates, then with the best rate of each and other
   seeds. Compiling is not timed.
   The loss to reach is what the tuned AdamW has at the end, the mean over its seeds.
"""

import argparse
import fcntl
import json
import math
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.bench.kit import in_turns, record, seconds_of, spread
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
RATES = {"adamw": (3e-4, 6e-4, 1.2e-3), "stacked_muon": (1.2e-3, 2.4e-3, 4.8e-3)}
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


def adamw(params: list, lr: float | Tensor, o: argparse.Namespace) -> torch.optim.Optimizer:
    """PyTorch's AdamW; with a rate that is a tensor on a GPU, a CUDA graph may hold its step."""
    groups = [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    settings: dict[str, Any] = {"fused": o.device == "cuda", "capturable": torch.is_tensor(lr)}
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **settings)


def make_optimizers(
    kind: str, model: nn.Module, lr: float | Tensor, o: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """AdamW alone, or one of the three Muons with AdamW for what is not in the blocks."""
    if kind == "adamw":
        return [adamw(list(model.parameters()), lr, o)]
    matrices, others = split_parameters(model)
    settings: dict[str, Any] = {"lr": lr, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return [MUONS[kind](matrices, **settings), adamw(others, lr, o)]


class Model:
    """A GPT-2 and its loss, which is compiled once for all trainings.

    Args:
        config: Its sizes.
        device: Where it computes.
        path: How it is computed.
        compiled: Whether its loss is compiled.
    """

    def __init__(self, config: GPT2Config, device: str, path: fast.Path, compiled: bool):
        self.config, self.device = config, device
        self.model = GPT2(config).to(device)
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda x, y: fast.gpt2_loss(self.model, x, y, path)
        if compiled:
            self.loss = torch.compile(self.loss, dynamic=False)

    def begin(self, seed: int) -> None:
        """New weights, and no gradient of what ran before."""
        torch.manual_seed(seed)
        self.model.zero_grad(set_to_none=True)
        with torch.device(self.device):
            self.model.load_state_dict(GPT2(self.config).state_dict())


class Training:
    """A model, its optimizers and its data.

    Args:
        kind: "adamw" or a key of ``MUONS``.
        lr: The largest rate.
        seed: Of the weights and of the order of the data.
        model: The model, which begins anew.
        texts: Ids to train on, and held out.
        o: The program's flags.
    """

    def __init__(
        self, kind: str, lr: float | Tensor, seed: int, model: Model, texts: tuple[Tensor, Tensor],
        o: argparse.Namespace,
    ):  # fmt: skip
        model.begin(seed)
        self.o, self.lr, self.config, self.model, self.loss = o, lr, model.config, model.model, model.loss
        self.judged_by = model.loss
        self.text, self.held_out = (text.to(o.device) for text in texts)
        self.optimizers = make_optimizers(kind, self.model, lr, o)
        self.chance = torch.Generator(o.device).manual_seed(seed)

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts[:, None] + torch.arange(self.config.context_len + 1, device=text.device)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of n windows that lie anywhere in the text."""
        last = len(self.text) - self.config.context_len - 1
        return self.windows(self.text, torch.randint(last, (n,), device=self.o.device, generator=self.chance))

    def set_rate(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if torch.is_tensor(group["lr"]):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping, one update; returns the loss."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def step(self, lr: float) -> None:
        self.set_rate(lr)
        self.update(*self.batch(self.o.batch))

    def warm_up(self) -> None:
        """Compile all that a run needs."""
        self.step(0.0)
        self.held_out_loss()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss in nats over windows that lie evenly in the held-out text."""
        n = self.o.eval_batches * self.o.batch
        starts = torch.linspace(0, len(self.held_out) - self.config.context_len - 2, n, device=self.o.device).long()
        losses = [self.judged_by(*self.windows(self.held_out, part)) for part in starts.split(self.o.batch)]
        return float(torch.stack(losses).mean())

    def run(self, steps: int) -> list[dict[str, float]]:
        """Train all steps; the held-out loss after each ``eval_every``, with the seconds of the steps so far.

        A loss that is not finite ends the training.
        """
        found, seconds = [], 0.0
        warmup = max(1, steps // 20)
        assert not isinstance(self.lr, Tensor)
        for first in range(0, steps, self.o.eval_every):
            rates = [
                cosine_schedule(step + 1, self.lr, 0.1 * self.lr, warmup, steps)
                for step in range(first, min(steps, first + self.o.eval_every))
            ]

            def train(rates: list[float] = rates) -> None:
                for lr in rates:
                    self.step(lr)

            seconds += seconds_of(train, self.o.device)
            found.append({"step": first + len(rates), "seconds": seconds, "loss": self.held_out_loss()})
            if not math.isfinite(found[-1]["loss"]):
                break
        return found


def config_of(o: argparse.Namespace) -> GPT2Config:
    """GPT-2 124M's blocks with a table for bytes; with ``--tiny`` a size for a CPU."""
    if o.tiny:
        return GPT2Config(vocab_size=VOCAB, context_len=o.length, dim=64, n_layers=2, n_heads=1)
    return replace(GPT2_SMALL, vocab_size=VOCAB, context_len=o.length)


def path_of(o: argparse.Namespace) -> fast.Path:
    """How the model is computed: in bfloat16, on a GPU with this book's kernels."""
    ours = o.device == "cuda" and not o.plain
    return fast.Path(dtype=torch.bfloat16, kernels=ours, attention="quickest" if ours else "fused")


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
    training.loss(*training.batch(o.batch)).backward()

    def alone(training: Training) -> Callable[[], None]:
        def update() -> None:
            for optimizer in training.optimizers:
                optimizer.step()

        return update

    updates = in_turns({k: alone(t) for k, t in trainings.items()}, lambda run: seconds_of(run, o.device, 3), n)
    model.model.zero_grad(set_to_none=True)
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


Curve = list[dict[str, float]]
Unit = tuple[str, float, int]
"""A training of the race: its optimizer, the largest rate and the seed."""


def finished(
    folder: Path, settings: dict[str, Any], names: Sequence[str] = ("kind", "lr", "seed")
) -> dict[tuple, Curve]:
    """The trainings whose files are in a folder, by what identifies one.

    Raises:
        ValueError: one of them has other settings; the message names its file.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        unit = json.loads(path.read_text(encoding="utf-8"))
        if unit["settings"] != settings:
            raise ValueError(f"{path} has the settings {unit['settings']}: expected {settings}")
        found[tuple(unit[name] for name in names)] = unit["curve"]
    return found


def best_rate(kind: str, done: dict[Unit, Curve]) -> float:
    """The rate with the lowest last loss, among those whose losses stayed finite.

    Raises:
        ValueError: none did; the message has the optimizer and its losses.
    """
    last = {lr: done[kind, lr, 0][-1]["loss"] for lr in RATES[kind]}
    finite = [lr for lr in last if math.isfinite(last[lr])]
    if not finite:
        raise ValueError(f"no training with {kind} stayed finite: the last losses are {last}")
    return min(finite, key=last.__getitem__)


def wanted(done: dict[Unit, Curve], n_seeds: int) -> list[Unit]:
    """The trainings that are missing and can begin: other seeds follow when all rates of an optimizer are done."""
    found = [(kind, lr, 0) for kind, rates in RATES.items() for lr in rates]
    for kind, rates in RATES.items():
        if all((kind, lr, 0) in done for lr in rates):
            found += [(kind, best_rate(kind, done), seed) for seed in range(1, n_seeds)]
    return [unit for unit in found if unit not in done]


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether a training is this process's: no other one is at it, which a lock shows, nor has finished it."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield not path.exists()


def file_name(*parts: Any) -> str:
    """What identifies a training, as its file's name."""
    return "-".join(str(part).replace(" ", "_") for part in parts)


def train_one(
    units: Sequence[dict[str, Any]], train: Callable[..., Curve], settings: dict[str, Any], folder: Path
) -> bool:
    """Do the first of these trainings that no other process does; False if there is none.

    Args:
        units: What identifies each, such as its seed.
        train: Called with these as keywords; returns its curve.
        settings: What all trainings of the folder share.
        folder: Gets a file for each.
    """
    for unit in units:
        path = folder / f"{file_name(*unit.values())}.json"
        with claimed(path) as is_mine:
            if is_mine:
                curve = train(**unit)
                whole_unit = {"settings": settings, **unit, "curve": curve}
                path.with_suffix(".part").write_text(json.dumps(whole_unit), encoding="utf-8")
                os.replace(path.with_suffix(".part"), path)
                print(*(f"{name} {value}" for name, value in unit.items()), curve[-1], flush=True)
                return True
    return False


def race(model: Model, texts: tuple[Tensor, Tensor], o: argparse.Namespace) -> dict[str, Any]:
    """Both optimizers at every rate, the best with other seeds, and when Muon reaches AdamW's last loss."""
    settings = settings_of(o) | {"bytes": [len(text) for text in texts]}
    folder = o.units or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)

    compiled: set[str] = set()

    def train(kind: str, lr: float, seed: int) -> Curve:
        if kind not in compiled:
            compiled.add(kind)
            Training(kind, lr, seed, model, texts, o).warm_up()
        return Training(kind, lr, seed, model, texts, o).run(o.steps)

    while units := wanted(finished(folder, settings), o.seeds):
        named = [dict(zip(("kind", "lr", "seed"), unit, strict=True)) for unit in units]
        if not train_one(named, train, settings, folder):
            time.sleep(0.5)  # others are at them
    return outcome(finished(folder, settings), o.seeds)


def outcome(done: dict[Unit, Curve], n_seeds: int) -> dict[str, Any]:
    """What the record says of the trainings."""
    found: dict[str, Any] = {"tuning": {}, "best_rate": {}, "curves": {}, "reached": {}}
    for kind, rates in RATES.items():
        found["tuning"][kind] = {str(lr): done[kind, lr, 0][-1]["loss"] for lr in rates}
        found["best_rate"][kind] = best = best_rate(kind, done)
        found["curves"][kind] = [done[kind, best, seed] for seed in range(n_seeds)]
    ends = [curve[-1]["loss"] for curve in found["curves"]["adamw"]]
    found["goal"] = sum(ends) / len(ends)
    for kind, curves in found["curves"].items():
        found["reached"][kind] = [reached(curve, found["goal"]) for curve in curves]
    return found


def settings_of(o: argparse.Namespace) -> dict[str, Any]:
    """What a record and its trainings must agree about."""
    names = ("tiny", "plain", "steps", "batch", "length", "seeds", "eval_every", "eval_batches")
    return {name: getattr(o, name) for name in names}


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("speeds", "race", []), default=[], help="by default both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--plain", action="store_true", help="the model's kernels are PyTorch's alone")
    parser.add_argument("--steps", type=whole(1), default=1000, help="steps of each training")
    parser.add_argument("--batch", type=whole(1), default=16, help="sequences in a step")
    parser.add_argument("--length", type=whole(16), default=1024, help="bytes in a sequence")
    parser.add_argument("--seeds", type=whole(1), default=3, help="trainings with the best rate")
    parser.add_argument("--eval-every", type=whole(1), default=80, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=whole(1), default=16, help="batches of an evaluation")
    parser.add_argument("--rounds", type=whole(1), default=12, help="how often each is timed")
    parser.add_argument("--megabytes", type=positive, default=120, help="text that is read at most")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    parser.add_argument("--units", type=Path, help="folder of the race's trainings, which several processes may share")
    o = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    texts = read_text(round(o.megabytes * 1e6))
    results = {"settings": settings_of(o), "bytes": [len(text) for text in texts], "prediction": prediction(o)}
    print(results, flush=True)
    model = Model(config_of(o), o.device, path_of(o), o.device == "cuda")
    for part in o.parts or PARTS:
        results[part] = PARTS[part](model, texts, o)
        record("optimizers", {**measured_before(o), **results}, o.folder)


def measured_before(o: argparse.Namespace) -> dict[str, Any]:
    """What the record holds already, if it has the same settings: perhaps the other part."""
    path = o.folder / "optimizers.json"
    old = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {"settings": None}
    return old if old["settings"] == settings_of(o) else {}


PARTS = {"speeds": speeds, "race": race}


if __name__ == "__main__":
    main()
