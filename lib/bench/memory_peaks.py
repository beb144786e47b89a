"""Measure the peak memory of a forward pass and of a training step, for context lengths from 128 to 1024.

Run ``python -m lib.bench.memory_peaks`` (half a minute) on a GPU.
``--tiny`` uses a small model; on a CPU the bytes are counted from the tensors.
It writes ``chapters/measurements/memory_peaks.json``.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict

import torch

from lib.bench.attention import peak_bytes as counted_peak_bytes
from lib.bench.kit import record
from lib.given.models.gpt2 import TINY, GPT2Config
from lib.given.models.sizes import MODEL_SIZES
from lib.gpt2 import GPT2, count_parameters
from lib.runs.flags import ProgramParser

BATCH, LENGTHS = 4, (128, 256, 512, 1024)
SIZES = ("xl", "2.7B")


def peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """Peak bytes in use during a call, including what was there before; None if memory ran out."""
    if device != "cuda":
        return counted_peak_bytes(run)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        run()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


class Model:
    """A model with its optimizer, and the two things that are measured."""

    def __init__(self, config: GPT2Config, device: str, mixed: bool):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = GPT2(config)
        self.config, self.device, self.mixed = config, device, mixed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self, length: int) -> torch.Tensor:
        tokens = torch.randint(self.config.vocab_size, (BATCH, length + 1), device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            return self.model(tokens[:, :-1], tokens[:, 1:])[1]

    def forward(self, length: int) -> None:
        with torch.no_grad():
            self.loss(length)

    def train_step(self, length: int) -> None:
        self.optimizer.zero_grad()
        self.loss(length).backward()
        self.optimizer.step()


def measure_size(config: GPT2Config, device: str, lengths: tuple[int, ...], mixed: bool) -> dict:
    """Peaks of a forward pass before there is any training state, then of training steps."""
    model = Model(config, device, mixed)
    found: dict = {"forward_bytes": {}, "training_bytes": {}}
    for length in lengths:
        found["forward_bytes"][str(length)] = peak_bytes(lambda: model.forward(length), device)  # noqa: B023
    for length in lengths:
        found["training_bytes"][str(length)] = peak_bytes(lambda: model.train_step(length), device)  # noqa: B023
        model.optimizer.zero_grad()
    return found


def main() -> None:
    parser = ProgramParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model, for a laptop")
    args = parser.parse_args()
    sizes = {"tiny": TINY} if args.tiny else {name: MODEL_SIZES[name] for name in SIZES}
    lengths = (16, 32, 64) if args.tiny else LENGTHS
    results: dict = {"batch": BATCH, "lengths": lengths, "sizes": {}}
    if args.device == "cuda":
        results["device_bytes"] = torch.cuda.get_device_properties(0).total_memory
    for name, config in sizes.items():
        row = results["sizes"][name] = {"config": asdict(config), "n_parameters": count_parameters(config)}
        for dtype in ("float32", "bf16"):
            row[dtype] = measure_size(config, args.device, lengths, dtype == "bf16")
            print(name, dtype, row[dtype], flush=True)
            record("memory_peaks" + ("_tiny" if args.tiny else ""), results)


if __name__ == "__main__":
    main()
