"""Measure tensor parallelism: blocks of Llama 2 13B divided by hand, divided by DTensor's plan,
and whole on one device.

Run ``python -m lib.bench.tensor_parallel`` on a machine with 1 to 4 GPUs (about two minutes).
It starts its own ranks, 1, 2 and 4 of them if there are enough GPUs,
and writes ``chapters/measurements/tensor_parallel.json`` after each.
``--device cpu --tiny`` tries it with gloo.
"""

import dataclasses
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lib.attention import MultiHeadAttention
from lib.bench.kit import in_turns, record, seconds_of, spread, wait_for
from lib.given.data.record import MEASUREMENTS
from lib.given.models.llama import TINY, LlamaConfig
from lib.given.parallel.tensors import Collectives, rank_part
from lib.llama import Llama
from lib.runs.flags import ProgramParser, whole
from lib.tensor_parallel import (
    ColumnParallelLinear,
    CopyToRegion,
    ParallelAttention,
    RowParallelLinear,
    llama_plan,
    tensor_parallel_bytes,
    vocab_parallel_cross_entropy,
)

STACK = LlamaConfig(dim=5120, n_layers=4, n_heads=40, hidden_dim=13_824, context_len=2048)
N_WARMUP, N_STEPS, SHORT_GAP_MS = 3, 12, 0.02


class ParallelSwiGLU(nn.Module):
    """Chapter 4's feed-forward layer on all ranks."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1: Any = ColumnParallelLinear(dim, hidden_dim, bias=False)
        self.w3: Any = ColumnParallelLinear(dim, hidden_dim, bias=False)
        self.w2 = RowParallelLinear(hidden_dim, dim, bias=False)

    def forward(self, x):
        x = CopyToRegion.apply(x, None)
        return self.w2(functional.silu(functional.linear(x, self.w1.weight)) * functional.linear(x, self.w3.weight))


def use_fast_attention() -> None:
    """Let every attention here use PyTorch's fused kernel, which a training run would;
    the mask is always the causal one.
    """

    def attend(q, k, v, mask=None):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)

    for cls in (MultiHeadAttention, ParallelAttention):
        cls.forward.__globals__["scaled_dot_product_attention"] = attend


def by_hand(config: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    model = Llama(config)
    whole = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    layers: Any = model.layers
    for block in layers:
        block.attention = ParallelAttention(config.dim, config.n_heads)
        block.feed_forward = ParallelSwiGLU(config.dim, config.hidden_dim)
    model.output = ColumnParallelLinear(config.dim, config.vocab_size, bias=False)
    model = model.to(dtype)
    model.load_state_dict(rank_part(whole, model.state_dict(), dist.get_rank()))
    return model


def by_plan(config: LlamaConfig, dtype: torch.dtype, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return parallelize_module(Llama(config).to(dtype), mesh, llama_plan(config))


def make_step(kind: str, model: nn.Module, tokens, targets):
    """Forward and backward; then the gradients are freed, as an optimizer would after its step."""

    def step():
        logits = model(tokens)
        if kind == "by hand":
            loss = vocab_parallel_cross_entropy(logits, targets, None)
        else:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def intervals(step, device: str) -> list[list]:
    """[start, end, "collective" or "compute"] in ms of the device's work in one step, neighbours of a kind merged."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait_for(device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if device == "cuda" else ("cpu_op", "user_annotation")
    found = []
    for event in events:
        if event.get("cat") in wanted and event.get("ph") == "X":
            name = event["name"].lower()
            is_collective = "nccl" in name or name.startswith("gloo:")
            found.append((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, is_collective))
    return merged(sorted(found))


def merged(found: list[tuple[float, float, bool]]) -> list[list]:
    """Union of each kind's intervals, from 0 on; a gap of less than 0.02 ms is closed."""
    start, out = (found[0][0] if found else 0.0), []
    for kind, wanted in (("compute", False), ("collective", True)):
        last: list = []
        for begin, end, is_collective in found:
            if is_collective != wanted:
                continue
            if last and begin - start - last[1] < SHORT_GAP_MS:
                last[1] = max(last[1], end - start)
            else:
                last = [begin - start, end - start, kind]
                out.append(last)
    return sorted([round(a, 3), round(b, 3), kind] for a, b, kind in out)


def share(found: list[list]) -> float:
    """Collective time as a share of the time from the first start to the last end."""
    whole = max((end for _, end, _ in found), default=0.0)
    return sum(end - begin for begin, end, kind in found if kind == "collective") / whole if whole else 0.0


def measure(kinds: dict, device: str) -> dict:
    """Measure the step times of all kinds in turns, then collectives, memory and a trace of each."""
    times = in_turns(kinds, partial(seconds_of, device=device), N_STEPS, N_WARMUP)
    found = {}
    for kind, step in kinds.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = step().item()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        with Collectives() as sent:
            step()
        trace = intervals(step, device)
        found[kind] = {"step_s": spread(times[kind]), "loss": loss, "peak_bytes": peak, "calls": dict(sent.calls)}
        found[kind] |= {"passed_in_bytes": sent.n_bytes, "collective_share": share(trace), "intervals": trace}
    return found


def work(rank: int, n_ranks: int, device: str, tiny: bool, folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting-{n_ranks}", rank=rank, world_size=n_ranks)
    use_fast_attention()
    config, dtype = (dataclasses.replace(TINY, n_kv_heads=4), torch.bfloat16) if tiny else (STACK, torch.bfloat16)
    batch, length = sizes(tiny)
    with torch.device(device):
        generator = torch.Generator(device).manual_seed(0)
        window = torch.randint(config.vocab_size, (batch, length + 1), generator=generator)
        makers = {"by hand": lambda: by_hand(config, dtype), "by plan": lambda: by_plan(config, dtype, device)}
        if n_ranks == 1:
            makers = {"whole": lambda: Llama(config).to(dtype)}
        kinds = {}
        for kind, make in makers.items():
            torch.manual_seed(0)
            kinds[kind] = make_step(kind, make(), window[:, :-1].contiguous(), window[:, 1:].contiguous())
        found = measure(kinds, device)
    if rank == 0:
        Path(folder, f"{n_ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def sizes(tiny: bool) -> tuple[int, int]:
    """Sequences and positions of a step."""
    return (2, 32) if tiny else (4, 2048)


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program out")
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=[4, 2, 1])
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args()
    most = torch.cuda.device_count() if options.device == "cuda" else 4
    config, (batch, length) = TINY if options.tiny else STACK, sizes(options.tiny)
    results: dict = {
        "config": dataclasses.asdict(config),
        "batch": batch,
        "length": length,
        "runs": {},
        "sent_bytes": {},
    }
    results["dtype"] = "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks in [n for n in options.ranks if n <= most]:
            arguments = (n_ranks, options.device, options.tiny, folder)
            torch.multiprocessing.spawn(work, args=arguments, nprocs=n_ranks)  # type: ignore[attr-defined]
            results["runs"][str(n_ranks)] = json.loads(Path(folder, f"{n_ranks}.json").read_text())
            results["sent_bytes"][str(n_ranks)] = tensor_parallel_bytes(config, batch, length, n_ranks)
            record("tensor_parallel", results, options.folder)


if __name__ == "__main__":
    main()
