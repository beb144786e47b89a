"""Compare naive and compiled attention over widths and lengths, find where memory runs out, and time the softmax.

Run ``python -m lib.bench.attention_sweep`` (two minutes on a GPU) on any device; ``--tiny`` uses short sequences.
It writes ``chapters/measurements/attention_sweep.json`` as it goes.

Attention is chapter 3's ``scaled_dot_product_attention`` with a causal mask, on batch 8 without heads, in float32,
as in Stanford's CS336, assignment 2, spring 2025.
"""

import gc
import math
from collections.abc import Callable

import torch
from torch import Tensor

from lib.attention import causal_mask, scaled_dot_product_attention, softmax
from lib.bench.kit import record, seconds_of, spread, wait_for
from lib.runs.flags import ProgramParser, whole

BATCH, WIDTHS, LENGTHS = 8, (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
SOFTMAX_SHAPE = {"batch": 4, "heads": 25, "length": 1024, "head_dim": 64}  # one layer of GPT-2 XL


class Case:
    """Inputs of one width and length, and the calls that are timed."""

    def __init__(self, attend: Callable[..., Tensor], width: int, length: int, device: str, batch: int = BATCH):
        torch.manual_seed(0)
        shape = (batch, length, width)
        self.q, self.k, self.v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
        self.d_out = torch.randn(shape, device=device)
        self.mask = causal_mask(length, length, device=device)
        self.attend, self.device, self.out = attend, device, torch.empty(0)

    def forward(self) -> None:
        self.out = self.attend(self.q, self.k, self.v, self.mask)

    def backward(self) -> None:
        self.out.backward(self.d_out)
        self.out = torch.empty(0)
        self.q.grad = self.k.grad = self.v.grad = None

    def times(self, n_repeats: int) -> dict[str, dict[str, float]]:
        """Seconds of forward and of backward."""
        found: dict[str, list[float]] = {"forward_s": [], "backward_s": []}
        for repeat in range(n_repeats + 2):
            for name, run in (("forward_s", self.forward), ("backward_s", self.backward)):
                seconds = seconds_of(run, self.device)
                if repeat >= 2:
                    found[name].append(seconds)
        return {name: spread(times) for name, times in found.items()}

    def saved_bytes(self) -> int:
        """Bytes that a forward pass saves for the backward pass, its output included."""
        wait_for(self.device)
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        self.forward()
        wait_for(self.device)
        held = torch.cuda.memory_allocated() - before if self.device == "cuda" else 0
        self.backward()
        return held


def clear(device: str) -> None:
    """Free cached memory, so that the next case starts on an empty GPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_case(attend: Callable[..., Tensor], width: int, length: int, device: str) -> dict:
    """Times, bytes saved and peak of one case; "out of memory" if it does not fit."""
    clear(device)
    try:
        case = Case(attend, width, length, device)
        found: dict = {"saved_bytes": case.saved_bytes()}
        if device == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        return found | case.times(10 if length <= 4096 else 5)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def fits(attend: Callable[..., Tensor], width: int, length: int) -> bool:
    """Whether one forward and backward pass fits into the GPU's memory."""
    clear("cuda")
    try:
        case = Case(attend, width, length, "cuda")
        case.forward()
        case.backward()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False


def memory_end(attend: Callable[..., Tensor], width: int, row: dict, step: int = 512) -> dict:
    """The first length that runs out of memory: predicted from the peak at a shorter one, and observed."""
    known = max(int(length) for length, found in row.items() if "peak_bytes" in found)
    peak = row[str(known)]["peak_bytes"]
    clear("cuda")
    free, _ = torch.cuda.mem_get_info()
    predicted = known * math.sqrt(free / peak)
    low, high = known, step * math.ceil(2 * predicted / step)
    while high - low > step:  # low fits, high does not
        middle = step * ((low + high) // (2 * step))
        low, high = (middle, high) if fits(attend, width, middle) else (low, middle)
    clear("cuda")
    return {"from_length": known, "peak_bytes": peak, "free_bytes": free, "predicted": predicted, "observed": high}


def softmax_and_products(device: str, tiny: bool) -> dict:
    """Time and FLOPs of the score product, the softmax and the product with the values in one layer."""
    shape = {"batch": 1, "heads": 2, "length": 64, "head_dim": 16} if tiny else SOFTMAX_SHAPE
    b, h, t, d = shape.values()
    found: dict = {"shape": shape, "softmax_flops_per_score": 5}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        q, k, v = (torch.randn(b, h, t, d, device=device, dtype=dtype) for _ in range(3))
        scores = q @ k.mT
        weights = scores.softmax(-1)
        runs: dict[str, Callable[[], Tensor]] = {
            "scores": lambda: q @ k.mT,  # noqa: B023
            "softmax": lambda: softmax(scores, dim=-1),  # noqa: B023
            "fused softmax": lambda: torch.softmax(scores, dim=-1),  # noqa: B023
            "values": lambda: weights @ v,  # noqa: B023
        }
        n_scores = b * h * t * t
        flops = {"scores": 2 * d * n_scores, "values": 2 * d * n_scores}
        found[name] = {
            what: {"s": in_rows(run, device), "flops": flops.get(what, 5 * n_scores)} for what, run in runs.items()
        }
    return found


def in_rows(run: Callable[[], Tensor], device: str, n_repeats: int = 20) -> dict[str, float]:
    """Seconds of one call, measured over ten in a row, so that launching them does not count."""
    return spread([seconds_of(run, device, 10) for _ in range(n_repeats + 2)][2:])


def main() -> None:
    parser = ProgramParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="short sequences, for a laptop")
    parser.add_argument("--compile-only", type=whole(1), help="compile this width for every length, and stop")
    args = parser.parse_args()
    widths, lengths = ((16,), (64, 128)) if args.tiny else (WIDTHS, LENGTHS)
    compiled = torch.compile(scaled_dot_product_attention, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    if args.compile_only:
        for length in lengths[:-1] if len(lengths) > 2 else lengths:
            measure_case(compiled, args.compile_only, length, args.device)
        return
    name = "attention_sweep" + ("_tiny" if args.tiny else "")
    results: dict = {"batch": BATCH, "dtype": "float32", "widths": widths, "lengths": lengths}
    results["softmax_and_products"] = softmax_and_products(args.device, args.tiny)
    for who, attend in (("naive", scaled_dot_product_attention), ("compiled", compiled)):
        results[who] = {}
        for width in widths:
            row = {str(length): measure_case(attend, width, length, args.device) for length in lengths}
            results[who][str(width)] = row
            medians = {n: f"{r['forward_s']['median'] * 1e3:.2f} ms" for n, r in row.items() if "forward_s" in r}
            print(who, width, medians, flush=True)
            record(name, results)
    if args.device == "cuda":
        middle = str(widths[len(widths) // 2])
        results["memory_end"] = {
            "naive": memory_end(scaled_dot_product_attention, int(middle), results["naive"][middle])
        }
        print(results["memory_end"], flush=True)
        record(name, results)


if __name__ == "__main__":
    main()
