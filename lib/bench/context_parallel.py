"""Measure attention over long sequences: ring and Ulysses by hand, PyTorch's context parallelism, and one device alone.

Run ``python -m lib.bench.context_parallel`` on a machine with 2 or more GPUs (about two minutes).
It starts a rank on each of them and writes ``chapters/measurements/context_parallel.json`` after each part.
``--device cpu --tiny`` tries it with gloo.

The first part times one layer of causal attention of Llama 2 7B, forward and backward, over 131,072 tokens and over
twice as many. The second finds the local length from which computation hides the ring's messages. The third runs two
blocks of the model over the longest sequence that fits, on one device and on all.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.bench.kit import record, seconds_of, spread, wait_for
from lib.context_parallel import (
    context_parallel_bytes,
    hidden_length,
    ring_attention,
    ulysses_attention,
    zigzag_indices,
)
from lib.demos.context_parallel import logits_of
from lib.flash_attention import flash_attention
from lib.given.data.record import MEASUREMENTS
from lib.given.models.llama import LLAMA_2_7B, LlamaConfig
from lib.given.parallel.ring import pass_on
from lib.llama import Llama
from lib.runs.flags import ProgramParser, whole

SMALL = LlamaConfig(vocab_size=256, dim=64, n_layers=1, n_heads=4, hidden_dim=128)
N_REPEATS, FILL, TIMEOUT_S = 3, 0.75, 120
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SDPA = functional.scaled_dot_product_attention
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sizes:
    """The sizes to measure on GPUs, or to try on a CPU."""

    def __init__(self, device: str, tiny: bool):
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32
        self.config = SMALL if tiny else LLAMA_2_7B
        self.length, self.check_length = (256, 128) if tiny else (131_072, 8192)
        self.local_lengths = [16, 32] if tiny else [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
        self.probes = (128, 256) if tiny else (16_384, 32_768)
        self.memory = 2**26 if device == "cpu" else int(FILL * torch.cuda.get_device_properties(0).total_memory)

    @property
    def stack(self) -> LlamaConfig:
        """Two blocks with a small vocabulary, so that attention and activations dominate."""
        return dataclasses.replace(self.config, n_layers=2, vocab_size=256, context_len=64)


# ---- one layer of attention ------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], device: str) -> float:
    """Time of a call, from the moment when all ranks begin until the last one ends."""
    return seconds_of(run, device, on_ranks=True)


def peak_of(run: Callable[[], Any], device: str) -> int:
    """Peak bytes that a call allocates beyond what was there before, on the rank with the most; 0 on a CPU."""
    if device != "cuda":
        run()
        return 0
    wait_for(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    wait_for(device)
    peak = torch.tensor(torch.cuda.max_memory_allocated() - before, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def torchs(backend: str | None = None, is_causal: bool = True) -> Way:
    """PyTorch's attention over the tokens that a rank holds."""

    def attend(q, k, v):
        with sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext():
            return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attend


def torchs_ring(method: str, backend: str, device: str) -> Way:
    """PyTorch's context parallelism. Its backward must run inside of the context too, which `step` ensures."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh, attend = init_device_mesh(device, (dist.get_world_size(),)), torchs(backend)

    @contextlib.contextmanager
    def within(length: int):
        set_rotate_method(method)
        positions = torch.arange(length, device=device)[None]
        try:
            with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[1], no_restore_buffers={positions}):
                yield
        finally:  # PyTorch replaces the function, and some releases do not restore it after an error
            functional.scaled_dot_product_attention = SDPA

    attend.within = within  # type: ignore[attr-defined]
    return attend


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ulysses_attention(q, k, v, is_causal=True).transpose(1, 2)


def ring(layout: str, is_causal: bool = True) -> Way:
    return lambda q, k, v: ring_attention(q, k, v, is_causal, layout=layout)


def ways(device: str) -> dict[str, tuple[str, Way]]:
    """For each way, how it divides the positions ("all": each rank has all of them), and its attention function."""
    found: dict[str, tuple[str, Way]] = {
        "one device": ("all", lambda q, k, v: flash_attention(q, k, v, True)),
        "one device, PyTorch": ("all", torchs()),
        "ring, contiguous": ("contiguous", ring("contiguous")),
        "ring, zigzag": ("zigzag", ring("zigzag")),
        "Ulysses": ("contiguous", ulysses),
    }
    for method in ("allgather", "alltoall") if device == "cuda" else ():
        for backend in BACKENDS:
            found[f"PyTorch, {method}, {backend}"] = "zigzag", torchs_ring(method, backend, device)
    return found


def positions_of(layout: str, length: int, device: str) -> Tensor:
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    if layout == "zigzag":
        return torch.as_tensor(zigzag_indices(length, rank, n_ranks)).to(device)
    every = torch.arange(length, device=device)
    return every if layout == "all" else every.chunk(n_ranks)[rank]


def inputs(sizes: Sizes, length: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and the output's gradient ``[1, H, T, D]``, the same on every rank if the seed is."""
    generator, config = torch.Generator(sizes.device).manual_seed(seed), sizes.config
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    shapes = [(1, h, length, config.head_dim) for h in heads]
    return [torch.randn(s, generator=generator, device=sizes.device, dtype=sizes.dtype) for s in shapes]


def step(attend: Way, tensors: list[Tensor], length: int) -> list[Tensor]:
    """Forward and backward: the output, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    within = getattr(attend, "within", lambda length: contextlib.nullcontext())
    with within(length):
        out = attend(*leaves)
        out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def off(sizes: Sizes, layout: str, attend: Way) -> float:
    """Largest error of output and gradients against PyTorch's on a shorter sequence, relative to the largest entry."""
    whole = inputs(sizes, sizes.check_length)
    expected = step(torchs(), whole, sizes.check_length)
    here = positions_of(layout, sizes.check_length, sizes.device)
    found = step(attend, [x[:, :, here].contiguous() for x in whole], sizes.check_length)
    worst = max(((a - b[:, :, here]).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))
    return worst


def try_out(sizes: Sizes, chosen: dict[str, tuple[str, Way]]) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of the ways that run, and why the others don't.

    Only PyTorch's ways may fail, because they are experimental. Of PyTorch's kernels that run, only the first is kept
    in ``chosen``.
    """
    differences: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, (layout, attend) in list(chosen.items()):
        family = name.rpartition(", ")[0]
        if name.startswith("PyTorch") and any(other.startswith(family) for other in differences):
            del chosen[name]
            continue
        try:
            differences[name] = off(sizes, layout, attend)
        except Exception as error:
            if not name.startswith("PyTorch"):
                raise
            refused[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            del chosen[name]
    return differences, refused


def measure_attention(sizes: Sizes) -> dict[str, Any]:
    """Time every way, in a random order that is the same on all ranks, and find what the ring's messages cost."""
    chosen = ways(sizes.device)
    differences, refused = try_out(sizes, chosen)
    found = measure_ways(sizes, chosen, sizes.length, N_REPEATS)
    for name, difference in differences.items():
        found[name]["off"] = difference
    part = [x.clone() for x in inputs(sizes, sizes.length // dist.get_world_size(), 1 + dist.get_rank())]
    for layout in ("contiguous", "zigzag"):
        row, attend = found[f"ring, {layout}"], ring(layout)
        run = partial(step, attend, part, sizes.length)
        row |= costs(run, row["step_s"]["median"], torch.stack(part[1:3]), 3, sizes.device)
    long = measure_ways(sizes, chosen, 2 * sizes.length, 1)
    return {"ways": found, "refused": refused, "long": {"length": 2 * sizes.length, "ways": long}}


def measure_ways(sizes: Sizes, chosen: dict[str, tuple[str, Way]], length: int, n_repeats: int) -> dict[str, Any]:
    """Seconds and peak bytes of forward and backward for each way. The peak includes the way's inputs."""
    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    n_ranks = dist.get_world_size()
    for repeat in range(n_repeats + 1 if n_repeats > 1 else 1):
        order = list(chosen)
        random.Random(repeat).shuffle(order)
        for name in order:
            layout, attend = chosen[name]
            own = length if layout == "all" else length // n_ranks
            tensors = inputs(sizes, own, 1 + dist.get_rank())
            taken: list[float] = []
            run = partial(step, attend, tensors, length)
            peak = peak_of(lambda run=run, taken=taken: taken.append(seconds(run, sizes.device)), sizes.device)
            if repeat or n_repeats == 1:
                times[name] += taken
            found[name] = {"peak_bytes": peak + sum(x.nbytes for x in tensors)}
    return {name: row | {"step_s": spread(times[name])} for name, row in found.items()}


@contextlib.contextmanager
def silence():
    """Leave out the ring's messages: every rank computes with whatever its buffers hold, which takes just as long."""
    names: dict[str, Any] = ring_attention.__globals__
    names["pass_on"] = lambda tensor, into, group: lambda: into
    try:
        yield
    finally:
        names["pass_on"] = pass_on


def costs(run: Callable[[], Any], whole_s: float, pair: Tensor, n_rounds: int, device: str) -> dict[str, float]:
    """Time of the ring's blocks without messages, of its messages alone,
    and the share of the messages' time that the blocks hide.
    """

    def messages():
        into = torch.empty_like(pair)
        for _ in range(n_rounds * (dist.get_world_size() - 1)):
            pass_on(pair, into, None)()

    with silence():
        computing = sorted(seconds(run, device) for _ in range(1 + N_REPEATS))[N_REPEATS // 2]
    sending = sorted(seconds(messages, device) for _ in range(1 + N_REPEATS))[N_REPEATS // 2]
    hidden = min(1.0, max(0.0, 1 - (whole_s - computing) / sending)) if sending else 1.0
    return {"blocks_s": computing, "messages_s": sending, "hidden_share": hidden}


# ---- the length from which the messages are hidden -------------------------------------------------------------------


def measure_hidden(sizes: Sizes) -> list[dict[str, float]]:
    """Time the forward pass without a mask at growing local lengths."""
    found = []
    attend = ring("contiguous", is_causal=False)
    for length in sizes.local_lengths:
        q, k, v, _ = inputs(sizes, length, 1 + dist.get_rank())

        def run(q=q, k=k, v=v):
            with torch.no_grad():
                attend(q, k, v)

        pair = torch.stack((k, v))
        whole = sorted(seconds(run, sizes.device) for _ in range(3 + 2 * N_REPEATS))[N_REPEATS]
        row = {"local_length": length, "step_s": whole, "pair_bytes": pair.nbytes}
        found.append(row | costs(run, whole, pair, 1, sizes.device))
    return found


# ---- the longest sequence that fits ----------------------------------------------------------------------------------


def train_step(sizes: Sizes, model: Any, layout: str, attend: Way, length: int) -> None:
    """Forward and backward of the blocks over this rank's positions of a sequence."""
    here = positions_of(layout, length, sizes.device)
    tokens = torch.randint(256, (1, len(here)), device=sizes.device)
    logits = logits_of(model, tokens, here, attend)
    functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    model.zero_grad(set_to_none=True)


def longest(sizes: Sizes, layout: str, attend: Way) -> dict[str, Any]:
    """Predict the longest sequence from the peaks at two lengths, which give the bytes of a token, and run it."""
    n_ranks = 1 if layout == "all" else dist.get_world_size()
    unit = 256 * n_ranks if sizes.device == "cuda" else 4 * n_ranks
    config = dataclasses.replace(sizes.stack, context_len=2**21 if sizes.device == "cuda" else 2**12)
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model: Any = Llama(config).to(sizes.dtype)
    run = partial(train_step, sizes, model, layout, attend)
    (short, low), (long, high) = ((n, peak_of(partial(run, n), sizes.device)) for n in sizes.probes)
    per_token, room = max((high - low) / (long - short), 1.0), sizes.memory
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
        room -= torch.cuda.memory_allocated()
    length = (long + int((room - high) / per_token) if sizes.device == "cuda" else 2 * long) // unit * unit
    taken: list[float] = []
    peak = peak_of(lambda: taken.append(seconds(partial(run, length), sizes.device)), sizes.device)
    return {"length": length, "step_s": taken[0], "peak_bytes": peak, "bytes_per_token": per_token}


def measure_longest(sizes: Sizes) -> dict[str, Any]:
    """The longest sequence on one device, which each rank tries for itself, and on all devices, with the ring."""
    kinds: dict[str, tuple[str, Way]] = {
        "one device": ("all", lambda q, k, v: flash_attention(q, k, v, True)),
        "ring, zigzag": ("zigzag", ring("zigzag")),
    }
    found = {}
    for name, (layout, attend) in kinds.items():
        if sizes.device == "cuda":
            torch.cuda.empty_cache()
        found[name] = longest(sizes, layout, attend)
    return {"config": dataclasses.asdict(sizes.stack), "runs": found}


# ---- the program -----------------------------------------------------------------------------------------------------


def work(rank: int, n_ranks: int, options: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if options.device == "cuda" else "gloo"
    device = torch.device("cuda", rank) if options.device == "cuda" else None
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=n_ranks, timeout=limit, device_id=device
    )
    sizes = Sizes(options.device, options.tiny)
    sent = {
        kind: context_parallel_bytes(dataclasses.replace(sizes.config, n_layers=1), 1, sizes.length, n_ranks, kind)
        for kind in ("ring", "ulysses")
    }
    results: dict[str, Any] = {"config": dataclasses.asdict(sizes.config), "length": sizes.length, "n_ranks": n_ranks}
    results["nccl_priority"] = "high" if os.environ.get("TORCH_NCCL_HIGH_PRIORITY") == "1" else "normal"
    written = options.folder / "context_parallel.json"  # results for other numbers of ranks stay
    others = json.loads(written.read_text())["results"]["runs"] if written.exists() else {}
    results |= {"dtype": str(sizes.dtype).removeprefix("torch."), "sent_bytes": sent}
    started = time.perf_counter()
    for name, part in {"attention": measure_attention, "hidden": measure_hidden, "longest": measure_longest}.items():
        results[name] = part(sizes)
        if name == "hidden":
            results["predicted_hidden_length"] = predicted(sizes, results["hidden"], n_ranks)
        results[f"{name}_took_s"] = round(time.perf_counter() - started, 1)
        if rank == 0:
            print(f"{name} done after {time.perf_counter() - started:.0f} s", flush=True)
            record("context_parallel", {"runs": {**others, str(n_ranks): results}}, options.folder)
    dist.barrier()
    dist.destroy_process_group()


def predicted(sizes: Sizes, rows: list[dict[str, float]], n_ranks: int) -> dict[str, float]:
    """The hidden length by the chapter's equation, from the FLOP/s and bytes/s measured at the longest local length."""
    last, config = rows[-1], sizes.config
    flops = 4 * n_ranks * config.dim * last["local_length"] ** 2 / last["blocks_s"]
    bandwidth = (n_ranks - 1) * last["pair_bytes"] / last["messages_s"]
    length = hidden_length(config, n_ranks, flops, bandwidth)
    return {"length": length, "flops_per_s": flops, "bytes_per_s": bandwidth}


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program out")
    parser.add_argument("--ranks", type=whole(1), help="ranks; by default as many as there are GPUs, at most 4")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # else messages wait behind the blocks of attention
    most = min(4, torch.cuda.device_count()) if options.device == "cuda" else 2
    n_ranks = options.ranks or most
    if n_ranks < 2:
        parser.error(f"{n_ranks} ranks: a ring needs at least 2")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n_ranks, options, f"{folder}/meeting")
        torch.multiprocessing.spawn(work, args=arguments, nprocs=n_ranks)  # type: ignore[attr-defined]
    written = json.loads((options.folder / "context_parallel.json").read_text())["results"]["runs"][str(n_ranks)]
    for name, row in written["attention"]["ways"].items():
        print(
            f"{name:34} {1e3 * row['step_s']['median']:9.1f} ms {row['peak_bytes'] / 2**30:7.2f} GiB  off "
            f"by {row['off']:.1e}"
        )


if __name__ == "__main__":
    main()
