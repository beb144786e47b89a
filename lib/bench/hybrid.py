"""Measure hybrid sharding, copies of shards, by hand beside ``fully_shard`` on a two-dimensional mesh:
seconds a step and a rank's peak memory.

``python -m lib.bench.hybrid --ranks 2`` starts its ranks itself, one for each GPU,
and measures every product of replicate and shard; it adds to ``chapters/measurements/hybrid.json`` after each.
``--tiny --device cpu`` tries the program without a GPU.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lib.bench.fsdp import DTYPE, N_ROUNDS, N_STEPS, N_WARMUP, TINY, measure_model, use_fused_parts
from lib.bench.kit import record
from lib.fsdp import FullySharded, apply_fully_shard
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2_XL
from lib.runs.engine.strategies import HybridSharded
from lib.runs.flags import ProgramParser, whole

XL, BATCH = GPT2_XL, 4


def wrap(mesh: DeviceMesh, name: str, model: nn.Module) -> nn.Module:
    """A model with as many copies as the mesh has rows, each divided among the ranks of a row."""
    if name == "fully_shard":
        return apply_fully_shard(model, mesh if mesh.size(0) > 1 else mesh["shard"], DTYPE)
    settings: dict[str, Any] = {"param_dtype": DTYPE, "group": mesh.get_group("shard")}
    if mesh.size(0) == 1:
        return FullySharded(model, **settings)
    return HybridSharded(model, copies=mesh.get_group("replicate"), **settings)


def run_rank(rank: int, n_ranks: int, options: argparse.Namespace, rendezvous: str, results: dict) -> None:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=n_ranks)
    use_fused_parts()
    config, batch = TINY["2.7B"] if options.tiny else (XL, BATCH)
    for n_copies in (n for n in range(1, n_ranks + 1) if n_ranks % n == 0):
        shape = (n_copies, n_ranks // n_copies)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        names = ("ours", "fully_shard")
        found = measure_model(config, batch, shape[1], device, names, partial(wrap, mesh))
        results["ranks"].setdefault(str(n_ranks), {})[f"{shape[0]} x {shape[1]}"] = found
        if rank == 0:
            record("hybrid", results, options.folder)
            for who, facts in found["competitors"].items():
                print(f"{shape[0]} replicate x {shape[1]} shard", who, facts, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--ranks", type=whole(1), default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    settings = {
        "dtype": "bfloat16",
        "n_warmup": N_WARMUP,
        "n_rounds": N_ROUNDS,
        "n_steps": N_STEPS,
        "optimizer": "AdamW",
    }
    results: dict[str, Any] = {"settings": {**settings, "model": "GPT-2 xl", "batch": BATCH}, "ranks": {}}
    if (options.folder / "hybrid.json").exists():  # results for other numbers of ranks stay
        results["ranks"] = load("hybrid", options.folder)["results"]["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options.ranks, options, f"{folder}/ranks", results), nprocs=options.ranks)


if __name__ == "__main__":
    main()
