"""Measure number formats: the time and memory of a training step by model size,
and the accuracy that each format reaches.

``python -m lib.bench.amp`` takes about three minutes on one H200.
It writes ``chapters/measurements/amp.json`` after every part, so that an interrupted run keeps what it has.
``--tiny --device cpu`` tries the program anywhere; ``--seconds`` limits its time; ``--folder`` writes elsewhere.
GPT-2 uses chapter 6's attention as written, without a fused kernel, and is not compiled.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.amp import GradScaler
from lib.bench.kit import record, spread, wait_for
from lib.given.data.corpora import language_reference
from lib.given.data.record import MEASUREMENTS
from lib.given.models.gpt2 import TINY as GPT2_TINY
from lib.given.models.sizes import MODEL_SIZES
from lib.given.models.vit import TINY as VIT_TINY
from lib.given.models.vit import VIT_L_16
from lib.gpt2 import GPT2
from lib.runs.flags import ProgramParser, positive
from lib.vit import VisionTransformer

OUR_SCALER, THEIR_SCALER, NO_SCALER = "float16, our scaler", "float16, PyTorch's scaler", "float16, no scaler"
DTYPES = {OUR_SCALER: torch.float16, THEIR_SCALER: torch.float16, NO_SCALER: torch.float16, "bfloat16": torch.bfloat16}
"""Dtype of the autocast region of each way that has one."""
WIDE = ("float32", "TF32", OUR_SCALER, THEIR_SCALER, "bfloat16")
"""Ways that keep float32 weights, so that one model and its optimizer serve all of them in turn."""
SMALLEST = replace(GPT2_TINY, vocab_size=256, context_len=16, dim=32)
"""The GPT-2 of ``--tiny``, which is very small because float16 products are slow on a CPU."""
NARROW = ("model.half()", "model.half(), eps 1e-4")
UNSCALED = (NO_SCALER,)
PHASES = ("forward", "backward", "optimizer")
Loss = Callable[[nn.Module], Tensor]


def region(way: str, device: str) -> Any:
    """Set float32 products to TF32 or not, and return the autocast region of this way."""
    torch.set_float32_matmul_precision("high" if way == "TF32" else "highest")
    return torch.autocast(device, dtype=DTYPES[way]) if way in DTYPES else nullcontext()


def make_scaler(way: str, device: str) -> Any:
    """The loss scaler of a way; one that changes nothing for the ways without."""
    if way == OUR_SCALER:
        return GradScaler()
    return torch.amp.GradScaler(device) if way == THEIR_SCALER else Plain()


def make_optimizer(model: nn.Module, way: str, device: str, lr: float) -> torch.optim.Optimizer:
    eps = 1e-4 if way == "model.half(), eps 1e-4" else 1e-8
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, fused=device == "cuda")


def one_step(model, optimizer, scaler, loss_of: Loss, way: str, device: str) -> list[float]:
    """Train one step; returns the seconds of forward, backward and optimizer, each until the device is done."""

    def now() -> float:
        wait_for(device)
        return time.perf_counter()

    times = [now()]
    with region(way, device):
        loss = loss_of(model)
    times.append(now())
    scaler.scale(loss).backward()
    times.append(now())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    times.append(now())
    return [after - before for before, after in itertools.pairwise(times)]


class Plain:
    """Stands in for a scaler, and scales nothing."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        pass


def measure_steps(
    model: nn.Module, loss_of: Loss, ways: tuple[str, ...], device: str, n_repeats: int
) -> dict[str, Any]:
    """Measure the times of each way in turns, and the peak memory of a step."""
    scalers = {way: make_scaler(way, device) for way in ways}
    optimizer = make_optimizer(model, ways[0], device, lr=1e-6)
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    peaks: dict[str, float] = {}
    for repeat in range(n_repeats + 2):
        for way in ways:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = one_step(model, optimizer, scalers[way], loss_of, way, device)
            peaks[way] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
            if repeat >= 2:
                times[way].append(taken)
    found: dict[str, Any] = {}
    for way in ways:
        found[way] = {f"{name}_s": spread([t[i] for t in times[way]]) for i, name in enumerate(PHASES)}
        found[way] |= {"step_s": spread([sum(t) for t in times[way]]), "peak_gib": peaks[way]}
    return found


def measure_model(build: Callable[[], nn.Module], loss_of: Loss, device: str, n_repeats: int) -> dict[str, Any]:
    """Measure all ways for one model; ways that run out of memory are recorded as such."""
    found: dict[str, Any] = {}
    for ways in (WIDE, NARROW[:1]):
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            found |= measure_steps(make_model(build, ways, device), loss_of, ways, device, n_repeats)
        except torch.cuda.OutOfMemoryError:
            found |= {way: {"error": "out of memory"} for way in ways}
    return found


def make_model(build: Callable[[], nn.Module], ways: tuple[str, ...], device: str) -> nn.Module:
    """The model on its device, with float16 weights for the ways that want them."""
    with torch.device(device):
        model = build()
    return model.half() if ways == NARROW[:1] else model


def step_cases(tiny: bool, device: str) -> dict[str, tuple[Callable[[], nn.Module], Loss]]:
    """For each model the function that builds it, and its loss on one batch."""
    batch, length, n_images = (2, 16, 2) if tiny else (4, 512, 64)
    sizes = dict.fromkeys(MODEL_SIZES, SMALLEST) if tiny else MODEL_SIZES
    vit = VIT_TINY if tiny else VIT_L_16
    cases: dict[str, tuple[Callable[[], nn.Module], Loss]] = {}
    for name, config in sizes.items():
        tokens = torch.randint(config.vocab_size, (batch, length + 1), device=device)
        cases[name] = (lambda c=config: GPT2(c)), (lambda m, t=tokens: m(t[:, :-1], t[:, 1:])[1])
    images = torch.randn(n_images, vit.channels, vit.image_size, vit.image_size, device=device)
    labels = torch.randint(vit.n_classes, (n_images,), device=device)

    def vit_loss(model: nn.Module) -> Tensor:
        logits = model(images.to(next(model.parameters()).dtype))
        return functional.cross_entropy(logits.float(), labels)

    cases["ViT-L/16"] = (lambda: VisionTransformer(vit)), vit_loss
    return cases


# ---- accuracy after the same number of steps -------------------------------------------------------------------------


def train(model: nn.Module, batch_loss: Loss, way: str, device: str, n_steps: int, lr: float) -> nn.Module:
    """Train with linear warm-up and decay, the same for every way; the model comes back in float32."""
    model = model.half() if way in NARROW else model
    scaler = make_scaler(way, device)
    optimizer = make_optimizer(model, way, device, lr)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / n_steps)
        one_step(model, optimizer, scaler, batch_loss, way, device)
    torch.set_float32_matmul_precision("highest")
    return model.float()


def gpt2_loss(way: str, seed: int, device: str, n_steps: int, tiny: bool) -> float:
    """Held-out loss, in nats a byte, of chapter 6's tiny GPT-2 on the bytes of the language reference."""
    data = torch.tensor(list(language_reference().encode()), device=device)
    cut, draw = int(0.9 * len(data)), torch.Generator().manual_seed(seed)
    config, batch = (SMALLEST, 2) if tiny else (GPT2_TINY, 32)

    def window(low: int, high: int, n: int) -> Tensor:
        starts = torch.randint(low, high - config.context_len, (n, 1), generator=draw).to(device)
        return data[starts + torch.arange(config.context_len + 1, device=device)]

    def batch_loss(model: nn.Module) -> Tensor:
        tokens = window(0, cut, batch)
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    torch.manual_seed(seed)
    model = train(GPT2(config).to(device), batch_loss, way, device, n_steps, lr=3e-3)
    draw.manual_seed(1234)
    with torch.no_grad():
        tokens = window(cut, len(data), 256)
        return model(tokens[:, :-1], tokens[:, 1:])[1].item()


def vit_accuracy(way: str, seed: int, device: str, n_steps: int, tiny: bool) -> float:
    """Share of held-out digits that chapter 5's tiny ViT gets right."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None].to(device)
    labels, draw = torch.tensor(digits.target)[order].to(device), torch.Generator().manual_seed(seed)

    def batch_loss(model: nn.Module) -> Tensor:
        batch = torch.randint(1400, (2 if tiny else 64,), generator=draw).to(device)
        logits = model(images[batch].to(next(model.parameters()).dtype))
        return functional.cross_entropy(logits.float(), labels[batch])

    torch.manual_seed(seed)
    model = train(VisionTransformer(VIT_TINY).to(device), batch_loss, way, device, n_steps, lr=2e-3)
    with torch.no_grad():
        return (model(images[1400:]).argmax(-1) == labels[1400:]).float().mean().item()


def summary(values: list[float]) -> dict[str, Any]:
    """The spread of the runs that ended with a finite value, and the number of those that did not."""
    finite = [value for value in values if math.isfinite(value)]
    values_or_none = [value if math.isfinite(value) else None for value in values]
    return {"values": values_or_none, "n_diverged": len(values) - len(finite), **(spread(finite) if finite else {})}


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes and few steps: does the program run?")
    parser.add_argument("--seconds", type=positive, default=210.0, help="start no further part after this many seconds")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    device, begun = options.device, time.perf_counter()
    n_steps, n_seeds, n_repeats = (3, 2, 2) if options.tiny else (200, 3, 5)
    results: dict[str, Any] = {
        "batch": 4,
        "length": 512,
        "n_images": 64,
        "n_steps": n_steps,
        "steps": {},
        "accuracy": {},
    }
    for name, (build, loss_of) in step_cases(options.tiny, device).items():
        if time.perf_counter() - begun < options.seconds:
            results["steps"][name] = measure_model(build, loss_of, device, n_repeats)
            record("amp", results, options.folder)
    found: dict[str, dict[str, list[float]]] = {"gpt2_held_out_nats": {}, "vit_held_out_accuracy": {}}
    for seed in range(n_seeds):
        for key, run in (("vit_held_out_accuracy", vit_accuracy), ("gpt2_held_out_nats", gpt2_loss)):
            for way in WIDE + UNSCALED + NARROW:
                if time.perf_counter() - begun < options.seconds:
                    found[key].setdefault(way, []).append(run(way, seed, device, n_steps, options.tiny))
        results["accuracy"] = {key: {way: summary(v) for way, v in ways.items()} for key, ways in found.items()}
        results["total_s"] = time.perf_counter() - begun
        record("amp", results, options.folder)


if __name__ == "__main__":
    main()
