"""Time chapter 14's kernels beside PyTorch eager, torch.compile and cuBLAS, and against the GPU's measured ceiling.

Run ``python -m lib.bench.triton_kernels`` on one GPU (one to two minutes, mostly compilation);
``--tiny --device cpu`` tries it in the interpreter.
It writes ``chapters/measurements/triton_kernels.json`` (or into ``--folder``) after each case,
and stops after ``--seconds``.
In each case the competitors take turns in one process; times are the device's, by events;
the cache is flushed before each call.
A wrong result is recorded as an error and not timed.

The ceiling of memory is a copy of 1 GiB, read and written. The ceiling of products is cuBLAS's highest speed in any
case.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

os.environ.setdefault(
    "TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "triton_kernels_cache")
)  # Inductor would choose another folder

from lib.bench.kit import device_seconds, in_turns, record, spread
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, positive, whole
from lib.triton_kernels import matmul, rms_norm, softmax_rows, vector_add, weighted_sum

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
N_SWEEPS = 16  # takes an H200 about a millisecond, in which the host launches the whole call: its pauses do not count
Run = Callable[[], Any]


class Clock:
    """Seconds of one call on the device, with a cold cache."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.sweep = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self.cuda else torch.empty(0)

    def once(self, run: Run) -> float:
        return device_seconds(run, self.sweep.device, before=self.clear)

    def clear(self) -> None:
        for _ in range(N_SWEEPS):
            self.sweep.zero_()

    def turns(self, runs: dict[str, Run], n_repeats: int) -> dict[str, dict[str, float]]:
        """Medians and spreads of competitors that take turns."""
        times = in_turns(runs, self.once, n_repeats, 3)
        return {name: spread(values) for name, values in times.items()}


def backward_of(function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Run:
    """Forward and backward of a weighted sum, by a gradient of ones."""

    def run() -> tuple[Tensor, ...]:
        out = function(x, weight)
        return torch.autograd.grad(out, (x, weight), torch.ones_like(out))

    return run


def eager_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def eager_softmax(x: Tensor) -> Tensor:
    exps = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    return (exps / exps.sum(-1, keepdim=True)).to(x.dtype)


def compiled(function: Callable[..., Tensor], use: bool) -> dict[str, Callable[..., Tensor]]:
    return {"compiled": torch.compile(function, dynamic=False)} if use else {}


def cases(sizes: dict[str, list[int]], device: str, with_compile: bool):
    """Name, width, dtype's name, bytes, FLOPs and competitors of each case; `ours` is first."""
    torch.manual_seed(0)
    for dtype_name, dtype in DTYPES.items():
        if device == "cpu" and dtype == torch.bfloat16:
            continue
        item = dtype.itemsize
        for n in sizes["vector"]:
            x, y = (torch.randn(n, device=device).to(dtype) for _ in range(2))
            yield (
                "vector_add",
                n,
                dtype_name,
                3 * item * n,
                n,
                {
                    "ours": lambda x=x, y=y: vector_add(x, y),
                    "eager": lambda x=x, y=y: x + y,
                },
            )
        for width in sizes["width"] if dtype_name == "bf16" else sizes["width"][-3:-2] or sizes["width"]:
            yield from row_cases(width, sizes["elements"][0] // width, dtype_name, device, with_compile)
        for n in sizes["matmul"]:
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            yield (
                "matmul",
                n,
                dtype_name,
                3 * item * n * n,
                2 * n**3,
                {
                    "ours": lambda a=a, b=b: matmul(a, b),
                    "cuBLAS": lambda a=a, b=b: a @ b,
                },
            )


def row_cases(width: int, n_rows: int, dtype_name: str, device: str, with_compile: bool):
    """Cases of the three row-wise kernels, and of the weighted sum's backward pass."""
    dtype, item = DTYPES[dtype_name], DTYPES[dtype_name].itemsize
    x, n = torch.randn(n_rows, width, device=device).to(dtype), n_rows * width
    w = torch.randn(width, device=device).to(dtype)
    fused: dict[str, dict[str, Callable[..., Tensor]]] = {
        "softmax_rows": {"ours": softmax_rows, "eager": eager_softmax, "fused": lambda x: torch.softmax(x, -1)},
        "rms_norm": {"ours": rms_norm, "eager": eager_norm, "fused": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5)},
        "weighted_sum": {"ours": weighted_sum, "eager": eager_sum, "fused": lambda x, w: x @ w},
    }
    moved = {"softmax_rows": 2 * n * item, "rms_norm": 2 * n * item, "weighted_sum": n * item + n_rows * item}
    flops = {"softmax_rows": 5 * n, "rms_norm": 4 * n, "weighted_sum": 2 * n}
    for name, functions in fused.items():
        given = (x,) if name == "softmax_rows" else (x, w)
        functions |= compiled(functions["eager"], with_compile)
        runs = {who: (lambda f=f, given=given: f(*given)) for who, f in functions.items()}
        yield name, width, dtype_name, moved[name], flops[name], runs
    gx, gw = x.detach().requires_grad_(), w.detach().requires_grad_()
    both = {"ours": weighted_sum, "eager": eager_sum, "fused": lambda x, w: x @ w}
    both |= compiled(eager_sum, with_compile)
    runs = {who: backward_of(f, gx, gw) for who, f in both.items()}
    yield "weighted_sum forward+backward", width, dtype_name, 3 * n * item + 2 * n_rows * item, 5 * n, runs


def check(runs: dict[str, Run]) -> dict[str, str]:
    """Competitors whose results differ from the reference (eager or cuBLAS), each with its error."""
    expected = runs.get("eager", runs.get("cuBLAS"))
    assert expected is not None
    wanted, wrong = expected(), {}
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for name, run in list(runs.items()):
        try:
            found = run()
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found = found if isinstance(found, tuple) else (found,)
        gaps = [
            ((f.float() - e.float()).norm() / e.float().norm().clamp_min(1e-9)).item()
            for f, e in zip(found, wanted, strict=True)
        ]
        limit = 2e-2 if wanted[0].dtype == torch.bfloat16 else 1e-4
        if not max(gaps) < limit:
            wrong[name] = f"relative error {max(gaps):.1e}"
    return wrong


def memory_ceiling(clock: Clock, device: str, n_bytes: int) -> dict[str, float]:
    """Bytes a second of a copy, read and written."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = clock.turns({"copy": lambda: target.copy_(source)}, 10)["copy"]
    return {"bytes_per_s": 2 * n_bytes / times["median"], "n_bytes": n_bytes}


def main() -> None:
    parser = ProgramParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=positive, default=100.0)
    parser.add_argument("--repeats", type=whole(1), default=20)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    args = parser.parse_args()
    start, clock = time.perf_counter(), Clock(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64  # each size is compiled by itself
    sizes = {
        "vector": [1 << n for n in (16, 20, 24, 28)],
        "width": [1024, 4096, 5000, 16384],
        "elements": [1 << 26],
        "matmul": [512, 1024, 2048, 4096, 4097, 8192],
    }
    if args.tiny:
        sizes = {"vector": [1000], "width": [50], "elements": [500], "matmul": [40]}
    n_repeats = 2 if args.tiny else args.repeats
    results: dict[str, Any] = {"cases": [], "complete": False, "n_rows_times_width": sizes["elements"][0]}
    results["memory"] = memory_ceiling(clock, args.device, 1 << (20 if args.tiny else 30))
    todo = cases(sizes, args.device, args.device == "cuda")
    for name, size, dtype, n_bytes, flops, runs in todo:
        if time.perf_counter() - start > args.seconds:
            print(f"stopped at {name} {size} {dtype}: time is up")
            break
        wrong = check(runs)
        right = {who: run for who, run in runs.items() if who not in wrong}
        times = clock.turns(right, n_repeats)
        found = {"kernel": name, "size": size, "dtype": dtype, "bytes": n_bytes, "flops": flops, "seconds": times}
        results["cases"].append(found | ({"errors": wrong} if wrong else {}))
        shown = "  ".join(f"{who} {1e3 * t['median']:.3f} ms" for who, t in times.items())
        print(f"{name:30} {size:10} {dtype:8} {shown}", *(f"{k}: {v}" for k, v in wrong.items()), flush=True)
        record("triton_kernels", results, args.folder)
    else:
        results["complete"] = True
    products = [c for c in results["cases"] if c["kernel"] == "matmul" and "cuBLAS" in c["seconds"]]
    results["flops_per_s"] = {
        d: max((c["flops"] / c["seconds"]["cuBLAS"]["median"] for c in products if c["dtype"] == d), default=0.0)
        for d in DTYPES
    }
    results["wall_s"] = time.perf_counter() - start
    record("triton_kernels", results, args.folder)


if __name__ == "__main__":
    main()
