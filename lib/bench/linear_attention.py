"""Measure chapter 24: chunked forms, kernel and attention by length; sizes of chunks; decoding; and a state on
several GPUs.

Run ``python -m lib.bench.linear_attention`` on a machine with a GPU: it writes
``chapters/measurements/linear_attention.json``. With ``--ranks 4`` it measures ``sequence_parallel_linear_attention``
beside chapter 18's ring instead, and writes ``linear_attention_parallel.json``. With ``--fla`` it measures the forward
pass of flash-linear-attention's forms beside the chapter's kernel and attention, and writes
``linear_attention_fla.json``. ``--device cpu --tiny`` tries each.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lib.bench.kit import device_seconds, in_turns, record, seconds_of, spawn, spread
from lib.context_parallel import ring_attention
from lib.flash_attention import flash_attention
from lib.given.data.record import MEASUREMENTS
from lib.linear_attention import (
    chunk_linear_attention,
    delta_rule_chunked,
    delta_rule_recurrent,
    linear_attention_chunked,
    linear_attention_recurrent,
    sequence_parallel_linear_attention,
)
from lib.runs.flags import ProgramParser

N_ROUNDS = 5


class Sizes:
    """What is measured: full sizes on a GPU, tiny ones to try the program out."""

    def __init__(self, device: str, tiny: bool):
        self.device, self.heads, self.width = device, 2 if tiny else 16, 16 if tiny else 128
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.lengths = (32, 64) if tiny else (2048, 8192, 32_768, 131_072)
        self.chunk_sizes: tuple[int, ...]
        self.chunk_sizes, self.chunk_length = ((16, 32), 64) if tiny else ((16, 32, 64, 128, 256), 16_384)
        self.decoded = (16, 64) if tiny else (1024, 16_384, 131_072, 1_048_576)
        self.parallel_length = 64 if tiny else 131_072

    def inputs(self, length: int, grad: bool = False) -> dict[str, Any]:
        """Queries, unit keys and values ``[1, T, H, D]``, shares and decays ``[1, T, H]``."""
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        shape = (1, length, self.heads, self.width)
        q, k, v = (torch.randn(shape, **options) for _ in range(3))
        found = {name: x.to(self.dtype) for name, x in {"q": q, "k": F.normalize(k, dim=-1), "v": v}.items()}
        found["beta"] = torch.sigmoid(torch.randn(shape[:3], **options))
        found["g"] = -0.05 * torch.rand(shape[:3], **options)
        return {name: x.requires_grad_(grad) for name, x in found.items()}


def peers() -> dict[str, Callable]:
    """flash-linear-attention's forms by name."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    return {
        "fla simple_gla": lambda q, k, v, beta, g: chunk_simple_gla(q, k, v, g=g)[0],
        "fla gated_delta_rule": lambda q, k, v, beta, g: chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0],
    }


def attended(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Chapter 15's causal attention to the same queries, keys and values."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attention(q, k, v, is_causal=True)


def forms() -> dict[str, Callable]:
    """The competitors that have a backward pass, by name."""
    return {
        "chunked": lambda q, k, v, beta, g: linear_attention_chunked(q, k, v, g)[0],
        "delta chunked": lambda q, k, v, beta, g: delta_rule_chunked(q, k, v, beta, g)[0],
        "attention": attended,
    }


def timed(runs: dict[str, Callable], device: str, n_rounds: int = N_ROUNDS) -> dict[str, Any]:
    """Seconds of each competitor; None for one that runs out of memory or cannot run."""
    able, found = {}, dict[str, Any]()
    for name, run in runs.items():
        try:
            run()
            able[name] = run
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            found[name] = None
    clock = functools.partial(device_seconds, device=device)
    return found | {name: spread(s) for name, s in in_turns(able, clock, n_rounds, n_warmup=1).items()}


def back_and_forth(form: Callable, given: dict[str, Tensor]) -> None:
    """A forward and a backward pass, whose gradients are dropped."""
    out = form(**given)
    out.backward(torch.ones_like(out))
    for x in given.values():
        x.grad = None


def by_length(sizes: Sizes) -> dict[str, Any]:
    """Seconds forward, and forward and backward, at each length; the naive scan at the shortest alone."""
    found = {}
    for i, length in enumerate(sizes.lengths):
        given = sizes.inputs(length)
        forward: dict[str, Callable] = {n: functools.partial(form, **given) for n, form in forms().items()}
        q, k, v, g = (given[name] for name in "qkvg")
        forward["kernel"] = functools.partial(chunk_linear_attention, q, k, v, g)
        if i == 0:
            forward["recurrent"] = functools.partial(linear_attention_recurrent, q, k, v, g)
            forward["delta recurrent"] = functools.partial(delta_rule_recurrent, q, k, v, given["beta"], g)
        with torch.no_grad():
            found[str(length)] = {"forward_s": timed(forward, sizes.device)}
        wanted = sizes.inputs(length, grad=True)
        both: dict[str, Callable] = {n: functools.partial(back_and_forth, form, wanted) for n, form in forms().items()}
        found[str(length)]["both_s"] = timed(both, sizes.device)
        print(length, {n: s and round(1e3 * s["median"], 2) for n, s in found[str(length)]["forward_s"].items()})
    return found


def by_chunk_size(sizes: Sizes) -> dict[str, Any]:
    """Seconds forward of the three chunked programs at one length, for each size of a chunk."""
    found, given = {}, sizes.inputs(sizes.chunk_length)
    q, k, v, beta, g = (given[name] for name in ("q", "k", "v", "beta", "g"))
    for size in sizes.chunk_sizes:
        runs: dict[str, Callable] = {
            "chunked": functools.partial(linear_attention_chunked, q, k, v, g, chunk_size=size),
            "delta chunked": functools.partial(delta_rule_chunked, q, k, v, beta, g, chunk_size=size),
            "kernel": functools.partial(chunk_linear_attention, q, k, v, g, chunk_size=size),
        }
        with torch.no_grad():
            found[str(size)] = timed(runs, sizes.device)
        print("chunks of", size, {n: s and round(1e3 * s["median"], 2) for n, s in found[str(size)].items()})
    return found


def decoding(sizes: Sizes) -> dict[str, Any]:
    """Seconds of one position after so many: a step of the delta rule, and attention to a full cache; bytes of each."""
    found = {}
    one = sizes.inputs(1)
    state = torch.zeros(1, sizes.heads, sizes.width, sizes.width, device=sizes.device)
    shape = (1, sizes.heads, 1, sizes.width)
    for length in sizes.decoded:
        cache = torch.randn(2, 1, sizes.heads, length, sizes.width, device=sizes.device, dtype=sizes.dtype)
        q = one["q"].reshape(shape)
        runs: dict[str, Callable] = {
            "delta step": functools.partial(delta_rule_recurrent, **one, initial_state=state),
            "attention": functools.partial(F.scaled_dot_product_attention, q, cache[0], cache[1]),
        }
        with torch.no_grad():
            seconds = timed(runs, sizes.device, 4 * N_ROUNDS)
        found[str(length)] = {"step_s": seconds, "state_bytes": state.nbytes, "cache_bytes": cache.nbytes}
        print("after", length, {n: s and round(1e6 * s["median"], 1) for n, s in seconds.items()}, "us")
        del cache
    return found


def measure(options: argparse.Namespace) -> None:
    """All that one device can say."""
    sizes = Sizes(options.device, options.tiny)
    results = {"shape": {"batch": 1, "heads": sizes.heads, "width": sizes.width, "dtype": str(sizes.dtype)[6:]}}
    for name, part in (("by_length", by_length), ("by_chunk_size", by_chunk_size), ("decoding", decoding)):
        results[name] = {}
        try:
            results[name] = part(sizes)
        finally:  # what has been measured stays
            record("linear_attention", results, options.folder)


@torch.no_grad()
def measure_beside_fla(options: argparse.Namespace) -> None:
    """Seconds forward at each length, and how far each form is from the recurrence in float64 at a short one.

    Forward only: on Hopper GPUs fla's backward pass refuses the versions of Triton before 3.7.1.
    """
    sizes = Sizes(options.device, options.tiny)
    states = {"kernel": lambda q, k, v, beta, g: chunk_linear_attention(q, k, v, g)[0], **peers()}
    results: dict[str, Any] = {"error": errors(states, sizes), "by_length": {}}
    print(results["error"], flush=True)
    for length in sizes.lengths:
        given = sizes.inputs(length)
        forward = {**states, "attention": attended}
        runs: dict[str, Callable] = {n: functools.partial(form, **given) for n, form in forward.items()}
        results["by_length"][str(length)] = found = timed(runs, sizes.device, 2 * N_ROUNDS)
        print(length, {n: s and round(1e3 * s["median"], 3) for n, s in found.items()}, flush=True)
        record("linear_attention_fla", results, options.folder)


def errors(found: dict[str, Callable], sizes: Sizes) -> dict[str, float]:
    """The largest error of each form over the largest output of the recurrence that it computes, in float64."""
    given = sizes.inputs(sizes.lengths[0] // 8)
    q, k, v, beta, g = (given[name].double() for name in ("q", "k", "v", "beta", "g"))
    sums, delta = linear_attention_recurrent(q, k, v, g)[0], delta_rule_recurrent(q, k, v, beta, g)[0]
    distances = {}
    for name, form in found.items():
        expected = delta if "delta" in name else sums
        distances[name] = ((form(**given).double() - expected).abs().max() / expected.abs().max()).item()
    return distances


def measure_parallel(rank: int, device: torch.device, options: argparse.Namespace) -> None:
    """One sequence on all ranks: the state in one message, beside the keys and values that go round a ring."""
    import torch.distributed as dist

    sizes, n_ranks = Sizes(str(device), options.tiny), dist.get_world_size()
    sizes.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = sizes.inputs(sizes.parallel_length // n_ranks, grad=True)
    leaves: Any = [given[name] for name in ("q", "k", "v", "g")]

    def linear() -> None:
        out = sequence_parallel_linear_attention(*leaves)
        out.backward(torch.ones_like(out))

    def ring() -> None:
        q, k, v = (x.transpose(1, 2) for x in leaves[:3])
        out = ring_attention(q, k, v, is_causal=True, layout="zigzag")
        out.backward(torch.ones_like(out))

    clock = functools.partial(seconds_of, device=device, on_ranks=True)
    seconds = in_turns({"state": linear, "ring": ring}, clock, N_ROUNDS)
    if rank == 0:
        state = 2 * 4 * sizes.heads * sizes.width**2  # one message forward and one backward, float32
        item, share = leaves[0].element_size(), sizes.parallel_length // n_ranks
        pair = 2 * share * sizes.heads * sizes.width * item
        sent = {"state": state, "ring": 3 * (n_ranks - 1) * pair}
        results = {
            "length": sizes.parallel_length,
            "both_s": {n: spread(s) for n, s in seconds.items()},
            "sent_bytes": sent,
        }
        record("linear_attention_parallel", {"runs": {str(n_ranks): results}}, options.folder)


def main() -> None:
    """Read the flags and measure."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=1, help="more than 1: a sequence on so many GPUs")
    parser.add_argument("--fla", action="store_true", help="beside flash-linear-attention, which is installed")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program out")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args()
    if options.ranks > 1:
        spawn(measure_parallel, "nccl" if options.device == "cuda" else "gloo", options.ranks, options, limit_s=600)
    else:
        (measure_beside_fla if options.fla else measure)(options)


if __name__ == "__main__":
    main()
