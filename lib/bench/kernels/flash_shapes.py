"""Time attention at the shapes that models have, beside every kernel that PyTorch offers, in one process on one GPU.

``python -m lib.bench.kernels.flash_shapes`` on a Hopper GPU (three minutes) adds its rows to ``flash_shapes.json``
under the GPU's name, and keeps the rows of other GPUs.
Forward and backward run together in bf16, in random order, in two ways: called in a row from Python,
and in a CUDA graph, where the host plays no part.
Four shapes are also timed with one decision undone, and four with other ways to launch the kernels.
``--only`` measures some shapes anew and keeps the others.
``--tiny`` runs a toy size and times nothing.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.bench.kit import machine, record, spread, times_ms
from lib.fast import launch
from lib.fast.attention import flash, flash_stored
from lib.fast.attention.flash import (
    fits_fast,
    flash_attention_fast,
    flash_attention_joined,
    forward_operator,
    joined_forward_operator,
    split_joined,
)
from lib.fast.attention.flash_items import deal
from lib.fast.attention.flash_stored import Dealt, for_device
from lib.fast.launch import Sizes
from lib.fast.models import capture
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.flags import ProgramParser, positive

NAME, ROUNDS, SAMPLE_MS = "flash_shapes", 12, 6.0


class Shape(NamedTuple):
    """Sizes of one call; the two lengths are equal."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    causal: bool
    joined: bool = False  # queries, keys and values are slices of one projection, and so are their gradients


SHAPES = {
    "16 x 64, 16,384 tokens, causal": Shape(1, 16, 16, 16_384, 64, True),
    "16 x 64, 16,384 tokens, full": Shape(1, 16, 16, 16_384, 64, False),
    "8 x 128, 16,384 tokens, causal": Shape(1, 8, 8, 16_384, 128, True),
    "8 x 128, 16,384 tokens, full": Shape(1, 8, 8, 16_384, 128, False),
    "32 heads on 8, width 128, 8,192 tokens, causal": Shape(1, 32, 8, 8192, 128, True),
    "28 heads on 4, width 128, 4,096 tokens, causal": Shape(1, 28, 4, 4096, 128, True),
    "2 x 32 heads on 8, width 128, 2,048 tokens, causal": Shape(2, 32, 8, 2048, 128, True),
    "16 heads on 1, width 128, 4,096 tokens, causal": Shape(1, 16, 1, 4096, 128, True),
    "2 x 32 heads on 8, width 64, 2,048 tokens, causal": Shape(2, 32, 8, 2048, 64, True),
    "8 x 16 x 128, 1,024 tokens, causal": Shape(8, 16, 16, 1024, 128, True),
    "2 x 32 x 128, 4,096 tokens, causal": Shape(2, 32, 32, 4096, 128, True),
    "4 x 128, 65,536 tokens, causal": Shape(1, 4, 4, 65_536, 128, True),
    "2 x 16 x 96, 4,096 tokens, causal": Shape(2, 16, 16, 4096, 96, True),
    "2 x 8 x 256, 4,096 tokens, causal": Shape(2, 8, 8, 4096, 256, True),
    "GPT-2: 16 x 12 x 64, 1,024 tokens, causal": Shape(16, 12, 12, 1024, 64, True),
    "GPT-2, joined": Shape(16, 12, 12, 1024, 64, True, joined=True),
    "ViT: 64 x 16 x 64, 256 tokens, full": Shape(64, 16, 16, 256, 64, False),
    "ViT, joined": Shape(64, 16, 16, 256, 64, False, joined=True),
    "ViT-L/16: 64 x 16 x 64, 197 tokens, full, joined": Shape(64, 16, 16, 197, 64, False, joined=True),
    "ViT-H/14: 64 x 16 x 80, 257 tokens, full, joined": Shape(64, 16, 16, 257, 80, False, joined=True),
}
OTHERS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "flash backend": [SDPBackend.FLASH_ATTENTION],
    "PyTorch's choice": [],
}
Step = Callable[[], tuple[Tensor, ...]]


def inputs(shape: Shape, device: str) -> tuple[list[Tensor], Tensor]:
    """Leaves, and the gradient of the output ``[B, H, T, D]`` or, joined, ``[B, T, H, D]``."""
    b, h, g, t, d = shape[:5]
    dtype = torch.bfloat16
    if shape.joined:
        leaves = [torch.randn(b, t, h + 2 * g, d, device=device, dtype=dtype)]
        return [x.requires_grad_() for x in leaves], torch.randn(b, t, h, d, device=device, dtype=dtype)
    leaves = [torch.randn(b, n, t, d, device=device, dtype=dtype) for n in (h, g, g)]
    return [x.requires_grad_() for x in leaves], torch.randn(b, h, t, d, device=device, dtype=dtype)


def ours(shape: Shape, leaves: list[Tensor]) -> Tensor:
    if shape.joined:
        return flash_attention_joined(leaves[0], shape.heads, shape.causal)
    q, k, v = leaves
    return flash_attention_fast(q, k, v, shape.causal)


def theirs(shape: Shape, leaves: list[Tensor], backends: list[Any]) -> Tensor:
    """PyTorch's attention; its gradients of a joined projection are joined by the backward pass of a split."""
    q, k, v = split(leaves[0], shape) if shape.joined else leaves
    grouped = shape.heads != shape.groups
    if backends:
        with sdpa_kernel(backends):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)
    return o.transpose(1, 2) if shape.joined else o


def split(x: Tensor, shape: Shape) -> list[Tensor]:
    """Views of a joined projection whose gradients are joined by one kernel."""
    return [part.transpose(1, 2) for part in x.split([shape.heads, shape.groups, shape.groups], dim=2)]


def steps(shape: Shape, device: str) -> dict[str, Step]:
    """Forward and backward of every competitor, on the same tensors."""
    leaves, grad = inputs(shape, device)

    def step(attend: Callable[..., Tensor], *rest: Any) -> Step:
        return lambda: (o := attend(shape, leaves, *rest), *torch.autograd.grad(o, leaves, grad))

    return {"ours": step(ours), **{name: step(theirs, backends) for name, backends in OTHERS.items()}}


def many(step: Step, n: int) -> Callable[[], Tensor]:
    """A call that makes n calls, so that a sample is longer than the clock's resolution."""

    def run() -> Tensor:
        for _ in range(n - 1):
            step()
        return step()[0]

    return run


def prepare(name: str, step: Step) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """What is timed for one competitor: calls in a row and in a graph, each with the number of calls in a sample."""
    for _ in range(3):
        step()
    once = statistics.median(times_ms(step, 3, "cuda"))
    n = max(2, min(40, round(SAMPLE_MS / once)))
    return {f"{name}, row": (many(step, n), n), f"{name}, graph": (capture(many(step, n), n_warmup=1), n)}


def measure(shape: Shape) -> dict[str, dict[str, float]]:
    """Milliseconds of forward and backward by name and way, in turns of random order."""
    ready: dict[str, tuple[Callable[[], Tensor], int]] = {}
    for name, step in steps(shape, "cuda").items():
        try:
            ready |= prepare(name, step)
        except RuntimeError as error:
            print("cannot run:", name, shape, str(error)[:200], flush=True)
    return in_turns(ready)


def in_turns(ready: dict[str, tuple[Callable[[], Tensor], int]]) -> dict[str, dict[str, float]]:
    """Milliseconds of each prepared competitor, by name; they take turns in random order."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    gc.disable()  # as in timeit: a collection of all that PyTorch's compiler holds takes longer than a sample
    for _ in range(ROUNDS):
        for name in random.sample(list(ready), len(ready)):
            run, n = ready[name]
            times[name].append(times_ms(run, 1, "cuda", n_warmup=1)[0] / n)
    gc.enable()
    return {name: spread(ms) for name, ms in times.items()}


# ---- one decision undone ---------------------------------------------------------------------------------------------


def _never_apart(sizes: Sizes, n_programs: int, n_tiles: int, device: torch.device) -> Dealt:
    return for_device(deal(sizes, n_programs, n_tiles), 1, device)


WITHOUT: dict[str, tuple[Any, str, Any] | None] = {
    "as it is": None,
    "dQ and dK/dV in two passes": (flash, "n_stored_tiles", lambda device, sizes: 0),
    "heads that share keys are one part": (flash_stored, "_dealt", _never_apart),
    "all heads side by side": (launch, "MOST_TOGETHER", flash.MOST_ALONG_AXIS),
}
WITHOUT_AT = (
    "28 heads on 4, width 128, 4,096 tokens, causal",
    "16 heads on 1, width 128, 4,096 tokens, causal",
    "8 x 16 x 128, 1,024 tokens, causal",
    "GPT-2: 16 x 12 x 64, 1,024 tokens, causal",
)


def without_one(shape: Shape) -> dict[str, dict[str, float]]:
    """Milliseconds of ours in a graph, as it is and with one decision undone."""
    leaves, grad = inputs(shape, "cuda")
    ready: dict[str, tuple[Callable[[], Tensor], int]] = {}
    plans: list[dict] = []  # they hold what the graphs read
    for name, change in WITHOUT.items():
        plans.append({})
        with patch.object(flash, "_plans", plans[-1]), patch.object(*change) if change else nullcontext():
            found = prepare(name, lambda: (o := ours(shape, leaves), *torch.autograd.grad(o, leaves, grad)))
        ready[name] = found[f"{name}, graph"]
    return in_turns(ready)


# ---- what the host does ----------------------------------------------------------------------------------------------


@contextmanager
def without(what: str) -> Iterator[None]:
    """Our host code without one of its optimizations."""
    kept = launch.Launch.__call__, launch._direct, launch.MOST_KEPT, flash.Joined.__call__
    flash._plans.clear()
    if what == "Triton's own launch":
        launch.Launch.__call__ = _slowly  # type: ignore[assignment, method-assign]
    elif what == "the compiled kernel, called through Triton's Python":
        launch._direct = lambda *args: None  # type: ignore[assignment]
    elif what == "a launcher in C, arguments made at every call":
        launch.MOST_KEPT = 0
    elif what == "a launcher in C, views made at every call":
        flash.Joined.__call__ = _with_views  # type: ignore[method-assign]
    try:
        yield
    finally:
        launch.Launch.__call__, flash.Joined.__call__ = kept[0], kept[3]  # type: ignore[method-assign]
        launch._direct, launch.MOST_KEPT = kept[1:3]
        flash._plans.clear()


def _slowly(self: launch.Launch, *tensors: Tensor) -> None:
    self.kernel[self.grid](*[launch._argument(arg, tensors) for arg in self.args], **self.options)


def _with_views(self: flash.Joined, *tensors: Tensor) -> None:
    self.launch(*self.views(*tensors))


def as_operator(shape: Shape, leaves: list[Tensor]) -> Tensor:
    if shape.joined:
        return joined_forward_operator(*leaves, None, shape.heads, shape.causal)[0]
    return forward_operator(*leaves, shape.causal)[0]


HOST_AT = (
    "GPT-2: 16 x 12 x 64, 1,024 tokens, causal",
    "GPT-2, joined",
    "ViT: 64 x 16 x 64, 256 tokens, full",
    "ViT, joined",
)
HOST = (
    "Triton's own launch",
    "the compiled kernel, called through Triton's Python",
    "a launcher in C, arguments made at every call",
    "a launcher in C, views made at every call",
    "a launcher in C, arguments kept",
    "the same as a registered operator",
    "PyTorch's choice",
)


def host_us(step: Step, n: int = 30, repeats: int = ROUNDS) -> dict[str, float]:
    """Microseconds until a call returns, while the GPU still works; the queue is empty at the start and never full."""
    found = []
    for _ in range(3):
        step()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            step()
        found.append(1e6 * (time.perf_counter() - start) / n)
    torch.cuda.synchronize()
    return spread(found)


def host(shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
    """For each way to launch, the time of the host alone and the time of a call in a row of calls."""
    leaves, grad = inputs(shape, "cuda")
    ways: dict[str, Callable[..., Tensor]] = dict.fromkeys(HOST, ours)
    ways["the same as a registered operator"] = as_operator
    ways["PyTorch's choice"] = lambda shape, leaves: theirs(shape, leaves, [])
    found = {}
    for name in HOST:
        if name == "a launcher in C, views made at every call" and not shape.joined:
            continue

        def step(attend: Callable[..., Tensor] = ways[name]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(shape, leaves), leaves, grad)

        with without(name):
            us = host_us(step)
            forward = host_us(lambda a=ways[name]: (a(shape, leaves),))  # type: ignore[misc]
            row = spread([ms / 20 for ms in times_ms(many(step, 20), ROUNDS, "cuda", n_warmup=1)])
        found[name] = {"host_us": us, "host_forward_us": forward, "row_ms": row}
    return found


def cards_in(folder: Path) -> dict[str, Any]:
    """The recorded results of each GPU."""
    return load(NAME, folder)["results"]["cards"] if (folder / f"{NAME}.json").exists() else {}


NOTHING: dict[str, Any] = {"rows": [], "host": {}, "without": {}}


def found_before(folder: Path) -> dict[str, Any]:
    """The recorded results of this GPU."""
    return cards_in(folder).get(torch.cuda.get_device_name(), NOTHING)


def keep(results: dict[str, Any], folder: Path) -> None:
    """Write the results of this GPU beside those of others."""
    cards = cards_in(folder)
    cards[torch.cuda.get_device_name()] = results | {"machine": machine()}
    record(NAME, {"dtype": "bf16", "rounds": ROUNDS, "cards": cards}, folder)


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--seconds", type=positive, default=300)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="shapes whose name has one of these words in it")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    names = [n for n in SHAPES if not options.only or any(w in n for w in options.only)]
    if not names:
        parser.error(
            f"--only {' '.join(options.only)}: no shape has it in its name, expected a word of {'; '.join(SHAPES)}"
        )
    if options.tiny:
        leaves, grad = inputs(Shape(1, 2, 1, 33, 16, True, joined=True), "cpu")
        o = theirs(Shape(1, 2, 1, 33, 16, True, joined=True), leaves, [])
        (found,) = torch.autograd.grad(o, leaves, grad)
        assert [x.shape for x in split_joined(found, 2)] == [(1, 2, 33, 16), (1, 1, 33, 16), (1, 1, 33, 16)]
        print(f"{len(SHAPES)} shapes of {1 + len(OTHERS)} kernels would be timed, but there is no GPU")
        return
    start = time.perf_counter()
    known = NOTHING | (found_before(options.folder) if options.only else {})
    rows, host_of, less = {row["name"]: row for row in known["rows"]}, dict(known["host"]), dict(known["without"])
    if not options.only:
        for name in HOST_AT:
            host_of[name] = host(SHAPES[name])
    for name in names:
        shape = SHAPES[name]
        if time.perf_counter() - start > options.seconds:
            print("no time for", name)
            continue
        q, k, v = split_joined(inputs(shape, "cuda")[0][0], shape.heads) if shape.joined else inputs(shape, "cuda")[0]
        ms = measure(shape)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        rows[name] = {
            "name": name,
            "date": date,
            "shape": shape._asdict(),
            "fits_fast": fits_fast(q, k, v, shape.causal),
            "ms": ms,
        }
        print(
            f"{time.perf_counter() - start:.0f} s {name}", {n: round(t["median"], 3) for n, t in ms.items()}, flush=True
        )
        in_order = [rows[n] for n in SHAPES if n in rows]
        if name in WITHOUT_AT:
            less[name] = without_one(shape)
            print({n: round(t["median"], 3) for n, t in less[name].items()}, flush=True)
        keep({"rows": in_order, "host": host_of, "without": less}, options.folder)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
