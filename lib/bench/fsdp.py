"""Measure ZeRO-3 by hand beside fully_shard and DDP: seconds a step, and a rank's peak memory against its prediction.

``python -m lib.bench.fsdp --ranks 2 4`` starts its ranks itself, one for each GPU,
and writes ``chapters/measurements/fsdp.json`` after each model.
``--tiny --device cpu`` tries the program without a GPU.
The three competitors take turns in one process.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lib.bench.kit import record, seconds_of, spread
from lib.fsdp import FullySharded, apply_fully_shard, memory_per_device
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import VIT_GIGANTIC_14, ViTConfig
from lib.given.parallel.sharding import blocks_of, saved_bytes
from lib.gpt2 import GPT2
from lib.runs.flags import ProgramParser, whole
from lib.vit import VisionTransformer

DTYPE = torch.bfloat16
N_WARMUP, N_ROUNDS, N_STEPS = 3, 5, 3
GPT_2_7B = GPT2Config(vocab_size=10_000, context_len=1024, dim=2560, n_layers=32, n_heads=32)
SIZES: dict[str, tuple[Any, int]] = {"ViT-G/14": (VIT_GIGANTIC_14, 32), "2.7B": (GPT_2_7B, 4)}
TINY: dict[str, tuple[Any, int]] = {
    "ViT-G/14": (
        ViTConfig(image_size=28, patch_size=14, n_classes=10, dim=32, n_layers=3, n_heads=2, hidden_dim=64),
        2,
    ),
    "2.7B": (GPT2Config(vocab_size=100, context_len=16, dim=32, n_layers=3, n_heads=2), 2),
}


def use_fused_parts() -> None:
    """Put PyTorch's fused norm, activation and attention into the chapters' models, for all competitors alike."""
    for model in (GPT2, VisionTransformer):
        home = sys.modules[model.__module__].__dict__
        home["scaled_dot_product_attention"] = _attention
        if "layer_norm" in home:
            home["layer_norm"] = lambda x, weight, bias, eps: functional.layer_norm(
                x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps
            )
            home["gelu_tanh"] = lambda x: functional.gelu(x, approximate="tanh")
            home["causal_mask"] = lambda *_, **__: True


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)


def make_model(config: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return GPT2(config) if isinstance(config, GPT2Config) else VisionTransformer(config)


def make_loss(config: Any, batch: int, device: torch.device) -> Callable[[nn.Module], Tensor]:
    """A loss on one random batch that every competitor sees."""
    if isinstance(config, GPT2Config):
        tokens = torch.randint(config.vocab_size, (batch, config.context_len), device=device)
        return lambda model: model(tokens, tokens)[1]
    images = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
    labels = torch.randint(config.n_classes, (batch,), device=device)
    return lambda model: functional.cross_entropy(model(images).float(), labels)


class Competitor:
    """A wrapped model with its optimizer, and the times of its steps."""

    def __init__(self, name: str, config: Any, batch: int, device: torch.device, wrap: "Wrap"):
        self.name, self.device = name, device
        self.times: list[float] = []
        gc.collect()  # free now what the previous model left behind, and not while this one is measured
        before = _taken(device)
        self.model = wrap(name, make_model(config, device))
        self.loss, self.peak = make_loss(config, batch, device), 0
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        self.step()
        self.state_bytes = _taken(device) - before

    def step(self) -> None:
        with torch.autocast(self.device.type, DTYPE, enabled=self.name == "ddp"):
            loss = self.loss(self.model)
        loss.backward()
        if isinstance(self.model, FullySharded):
            self.model.finish_gradient_synchronization()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_steps(self, n: int) -> None:
        """Time n steps in a row and record their mean, so that no step waits for the host's clock."""
        others = _taken(self.device) - self.state_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        self.times.append(seconds_of(self.step, self.device, n))
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)


Wrap = Callable[[str, nn.Module], nn.Module]
"""Wraps a model in the way of the competitor with this name."""


def _wrap(name: str, model: nn.Module) -> nn.Module:
    if name == "ours":
        return FullySharded(model, param_dtype=DTYPE)
    if name == "fully_shard":
        return apply_fully_shard(model, None, DTYPE)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _taken(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def predict(config: Any, batch: int, n_ranks: int, device: torch.device) -> dict[str, float]:
    """Peak bytes of a rank under ZeRO-3, part by part; activations are counted in one block and multiplied."""
    with torch.device("meta"):
        model = GPT2(config) if isinstance(config, GPT2Config) else VisionTransformer(config)
    n, unit = (sum(p.numel() for p in part.parameters()) for part in (model, blocks_of(model)[0]))
    block = type(blocks_of(model)[0])(config).to(device, DTYPE)
    gpt = isinstance(config, GPT2Config)
    length = config.context_len if gpt else 1 + config.n_patches
    x = torch.randn(batch, length, config.dim, device=device, dtype=DTYPE, requires_grad=True)
    activations = config.n_layers * saved_bytes(lambda: block(x), without=block.parameters())
    head = 3 * 2 * batch * length * config.n_rows if gpt else 0  # logits, their logarithms and their gradients
    states = memory_per_device(n, n_ranks, 3, 4, 0, 8)
    gradients = memory_per_device(n, n_ranks, 3, 0, 4, 0)
    root = n - config.n_layers * unit
    gathered, reducing = 2 * (2 * unit + root), 2 * 3 * unit
    total = states + max(activations + head, gradients) + gathered + reducing
    parts = {"states": states, "gradients": gradients, "activations": activations + head}
    return parts | {"gathered": gathered, "reducing": reducing, "total": total, "n_parameters": n}


def measure_model(
    config: Any,
    batch: int,
    n_shards: int,
    device: torch.device,
    names: Sequence[str] = ("ours", "fully_shard", "ddp"),
    wrap: Wrap = _wrap,
) -> dict[str, Any]:
    """Let the competitors of these names take steps in turn, each with a model divided among ``n_shards`` ranks."""
    found: dict[str, Any] = {
        "batch": batch,
        "predicted_bytes": predict(config, batch, n_shards, device),
        "competitors": {},
    }
    racers: list[Competitor] = []
    for name in names:
        try:
            racers.append(Competitor(name, config, batch, device, wrap))
        except torch.OutOfMemoryError:
            found["competitors"][name] = {"out_of_memory": True}
    for racer in racers:
        for _ in range(N_WARMUP):
            racer.step()
    for turn in range(N_ROUNDS):
        for racer in racers if turn % 2 == 0 else racers[::-1]:
            racer.timed_steps(N_STEPS)
    for racer in racers:
        peak = torch.tensor([racer.peak, racer.state_bytes], dtype=torch.float64, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        facts = {"step_s": spread(racer.times), "peak_bytes": peak[0].item(), "state_bytes": peak[1].item()}
        found["competitors"][racer.name] = facts
    return found


def run_rank(rank: int, n_ranks: int, options: argparse.Namespace, rendezvous: str, results: dict) -> None:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    use_fused_parts()
    for name, (config, batch) in (TINY if options.tiny else SIZES).items():
        found = measure_model(config, batch, n_ranks, device)
        results["ranks"].setdefault(str(n_ranks), {})[name] = found
        if rank == 0:
            record("fsdp", results, options.folder)
            for who, facts in found["competitors"].items():
                print(n_ranks, name, who, facts, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=[2, 4])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    settings = {
        "dtype": "bfloat16",
        "n_warmup": N_WARMUP,
        "n_rounds": N_ROUNDS,
        "n_steps": N_STEPS,
        "optimizer": "AdamW",
    }
    results: dict[str, Any] = {"settings": settings, "ranks": {}}
    for n_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (n_ranks, options, f"{folder}/ranks", results), nprocs=n_ranks)
        results = load("fsdp", options.folder)["results"]


if __name__ == "__main__":
    main()
