"""Train GPT-2 124M and ViT-L/16 with each kernel for attention, beside Transformers' and timm's models, in one process.

``python -m lib.bench.kernels.flash_training`` on a GPU (five minutes) adds its rows to ``flash_training.json`` under
the GPU's name.
Ours are the fast paths that ``lib.runs`` uses, in a CUDA graph, with cuBLAS's usual workspace; the peers are compiled.
Ours, one for each kernel, take steps in turns.
``--tiny`` takes one step of each on any device.
"""

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.bench.kit import machine, record, seconds_of, spread, wait_for
from lib.bench.ladder import PEAK_FLOPS, Climber, Rung, Task, flops_per_item, make_task, set_tf32
from lib.bench.yardstick.replicas import RowViT
from lib.fast.models import Path as FastPath
from lib.fast.models import capture
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.flags import ProgramParser

NAME, BATCHES, N_BLOCKS, ROUNDS, N_IN_ROW = "flash_training", {"gpt2": 16, "vit": 256}, 4, 12, 4
KERNELS = {"PyTorch's choice": "fused", "the book's": "workbook"}
PEERS = {"gpt2": "Transformers", "vit": "timm"}
RUNG = Rung(name="", precision="bf16", compiled=True, attention="fused", padded=True, fused_optimizer=True)


class Trainer:
    """A model with its optimizer; ``step`` trains on one batch."""

    def __init__(self, task: Task, attention: str, batch: int):
        on_gpu = task.device == "cuda"
        self.task, self.batch = task, task.batch(batch)
        model = task.build("ours", RUNG, None)
        vit = task.name == "vit"
        path = FastPath(dtype=torch.bfloat16, attention=attention, loss_kernel=not vit, kernels=True)
        self.loss: Callable[[Tensor, Tensor], Tensor]
        self.model: torch.nn.Module
        if vit:
            self.loss = self.model = RowViT(model, path, min(N_BLOCKS, task.config.n_layers), compiled)
        else:
            self.model = model
            self.loss = compiled(lambda inputs, targets: task.fast(model, inputs, targets, path))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu
        )
        self.step = self.train_step

    def train_step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Train three steps, in which the model is compiled."""
        for _ in range(3):
            self.train_step()
        wait_for(self.task.device)

    def record_graph(self, pool: Any) -> None:
        """Record the step as a graph in a pool of memory that all trainers share."""
        self.step = capture(self.train_step, n_warmup=0, pool=pool)


def compiled(run: Callable) -> Callable:
    """Compile with PyTorch; on a CPU, where only a trial runs, without the compiler's slow stages."""
    return torch.compile(run, dynamic=False, backend="inductor" if torch.cuda.is_available() else "eager")


def trainer(task: Task, name: str, batch: int) -> Any:
    """One of our trainers, by the name of its kernel, or the peer's."""
    if name in KERNELS:
        return Trainer(task, KERNELS[name], batch)
    rung = replace(RUNG, batch=batch, compiled=task.device == "cuda")
    return Climber(task, "peer", rung, None)


def race(task: Task, names: list[str], batch: int) -> dict[str, Any]:
    """Milliseconds of a step for each, in turns; losses after the first steps show that ours train the same model."""
    found: dict[str, Any] = {}
    trainers: dict[str, Any] = {}  # they must live as long as their graphs, which read their parameters
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        torch.manual_seed(0)
        trainers[name] = trainer(task, name, batch)
        trainers[name].warm_up()
    if task.device == "cuda":
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        for each in trainers.values():
            if isinstance(each, Trainer):
                each.record_graph(pool)
    for name in names:
        found[name] = {"loss": trainers[name].step().item()}
    for turn in range(ROUNDS if task.device == "cuda" else 1):
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(step_ms(trainers[name].step, task.device))
    for name, ms in times.items():
        rate = 1e3 * task.items(batch) / spread(ms)["median"]
        found[name] |= {"step_ms": spread(ms), "items_per_s": rate, "mfu": rate * flops_per_item(task) / PEAK_FLOPS}
        print(task.name, name, f"{rate:,.0f}/s, MFU {found[name]['mfu']:.1%}, loss", found[name]["loss"], flush=True)
    return found


def step_ms(step: Callable[[], Tensor], device: str) -> float:
    """Milliseconds of one step, the mean of several in a row."""
    return 1e3 * seconds_of(step, device, N_IN_ROW)


def train(model: str, device: str, batch: int, tiny: bool) -> dict[str, Any]:
    """Time ours in turns, then the peer alone, because all together may not fit into memory."""
    task = make_task(model, device, tiny)
    found = race(task, list(KERNELS), batch)
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    if find_spec(PEERS[model].lower()) is not None:
        found |= race(task, [PEERS[model]], batch)
    return {"batch": batch, "items": task.items(batch), "flops_per_item": flops_per_item(task), "trainers": found}


def compile_all(models: list[str]) -> None:
    """Fill the compiler's cache in a process for each trainer, all at once."""
    commands = [
        [sys.executable, "-m", "lib.bench.kernels.flash_training", "--model", model, "--compile-one", name]
        for model in models
        for name in [*KERNELS, PEERS[model]]
    ]
    running = [subprocess.Popen(command) for command in commands]
    print("compiled:", [process.wait() for process in running], flush=True)


def compile_one(task: Task, name: str, batch: int) -> None:
    """Compile one trainer; if memory runs out beside the other processes, that does not matter."""
    torch.cuda.set_per_process_memory_fraction(0.16)
    try:
        ready = trainer(task, name, batch)
        ready.train_step()
        wait_for(task.device)
    except torch.OutOfMemoryError:
        print(task.name, name, "compiled, but a step beside the others has no memory")


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--model", choices=tuple(BATCHES), action="append")
    parser.add_argument("--compile-one", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    models = options.model or list(BATCHES)
    if options.tiny:
        for model in models:
            train(model, "cpu", 2, tiny=True)
        return
    set_tf32(True)
    if options.compile_one:
        compile_one(make_task(models[0], "cuda", False), options.compile_one, BATCHES[models[0]])
        return
    compile_all(models)
    card, results = torch.cuda.get_device_name(), {}
    for model in models:
        results[model] = train(model, "cuda", BATCHES[model], tiny=False)
        cards = load(NAME, options.folder)["results"]["cards"] if (options.folder / f"{NAME}.json").exists() else {}
        cards[card] = cards.get(card, {}) | results | {"machine": machine()}
        record(NAME, {"peak_flops": PEAK_FLOPS, "cards": cards}, options.folder)


if __name__ == "__main__":
    main()
