"""Time FlashAttention on one GPU beside every attention that PyTorch offers, in one process.

``python -m lib.bench.kernels.flash --seconds 260`` writes ``flash.json`` after each step,
so that a run that times out keeps its results.
``--tiny`` runs all steps at a toy size on any device, in the interpreter if necessary.
"""

# ruff: noqa: B023 - what a loop makes is called within the same turn

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TMPDIR", "/tmp")) / "flash_triton_cache"
# Inductor would otherwise choose a folder of its own, and each process would compile everything anew.
os.environ["TRITON_CACHE_DIR"] = str(FOLDER)

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch import multiprocessing

from lib.bench.kernels import flash_kernels
from lib.bench.kit import record, spread, times_ms
from lib.fast.attention import flash as flash_fast
from lib.fast.attention.flash import fits_fast, flash_attention_fast
from lib.fast.attention.flash_hopper import Roles
from lib.fast.gluon import has_roles
from lib.flash_attention import FlashAttentionTorch, FlashAttentionTriton, flash_attention
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, positive, whole

CASES = {
    "64_causal": (16, 64, True),
    "64_full": (16, 64, False),
    "128_causal": (8, 128, True),
    "128_full": (8, 128, False),
}
LENGTHS, WIDTHS = [4**n * 128 for n in range(5)] + [65_536], (16, 32, 64, 128)
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
LOG2E, KERNELS = math.log2(math.e), ("forward", "dq", "dkdv")
STARTED = time.perf_counter()


def inputs(heads, length, width, dtype, device, grad=True):
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, heads, length, width)
    return [torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(grad) for _ in range(3)]


def ours(q, k, v, causal):
    """Chapter 15's ``flash_attention``: kernels on a GPU, and in the toy run the tiles in PyTorch."""
    return flash_attention(q, k, v, causal)


class InTriton(torch.autograd.Function):
    """Attention by the fast kernels that Triton compiles, whatever else the device could run."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        o, lse = flash_fast.fast_forward(q, k, v, causal, flash_fast.TABLE[q.shape[-1], causal][0])
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        _, for_dq, for_dkdv = flash_fast.TABLE[q.shape[-1], ctx.causal]
        do = do.contiguous()
        dq, stats = flash_fast.fast_dq(q, k, v, o, do, lse, ctx.causal, for_dq)
        return dq, *flash_fast.fast_dkdv(q, k, v, do, stats, ctx.causal, for_dkdv), None


in_triton = InTriton.apply


def sdpa(backend):
    """PyTorch's attention by one backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v, causal):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def naive(q, k, v, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def flex():
    """Compiled FlexAttention, with the block mask that lets it skip tiles."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention, dynamic=False), {}

    def attend(q, k, v, causal):
        t = q.shape[-2]
        if causal and t not in masks:
            masks[t] = create_block_mask(lambda b, h, i, j: i >= j, None, None, t, t, device=q.device)
        return compiled(q, k, v, block_mask=masks[t] if causal else None)

    return attend


def three_times(attend, q, k, v, causal, n, device):
    """Forward (which keeps what backward needs), backward and both."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    forward = times_ms(lambda: attend(q, k, v, causal), n, device)
    backward = backward_ms(attend, q, k, v, causal, n, device)

    def both():
        q.grad = k.grad = v.grad = None
        attend(q, k, v, causal).sum().backward()

    return {"forward": forward, "backward": backward, "both": times_ms(both, n, device)}


def backward_ms(attend, q, k, v, causal, n, device):
    """Backward alone; the output and its graph are freed on return."""
    o = attend(q, k, v, causal)
    do = torch.randn_like(o)
    return times_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), n, device)


class Report:
    """The results so far, written after each step."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds
        self.results: dict[str, Any] = {"failures": {}}

    def time_is_left(self, reserve=0.0):
        return time.perf_counter() - STARTED < self.seconds - reserve

    def attempt(self, name, fn):
        """Run a step; a failure is recorded and stops nothing else."""
        try:
            return fn()
        except Exception as error:
            self.results["failures"][name] = f"{type(error).__name__}: {error}"[:300]
            print("failed:", name, self.results["failures"][name], flush=True)
            return None

    def keep(self, name, value):
        self.results[name] = value
        self.results["elapsed_s"] = time.perf_counter() - STARTED
        record("flash", self.results, self.folder)
        print(f"{self.results['elapsed_s']:.0f} s: {name}", flush=True)


# ---- what is compiled beforehand -------------------------------------------------------------------------------------


def warm_jobs(tiny):
    """Calls that compile every kernel of this program once, at a length where running them takes no time."""
    length, device = (128, "cpu") if tiny else (512, "cuda")
    jobs: list[tuple[str, Callable[[], Any]]] = []
    for _, width, causal in CASES.values():
        for attend in (flash_attention_fast, in_triton):
            jobs.append(
                ("fast", lambda a=attend, w=width, c=causal: both_ways(a, w, c, length, device, torch.bfloat16))
            )
    for width in WIDTHS:
        for dtype in DTYPES.values():
            if width < 64 or dtype == torch.float32:
                jobs.append(
                    (
                        "readable",
                        lambda w=width, t=dtype: both_ways(FlashAttentionTriton.apply, w, True, length, device, t),
                    )
                )
    for name in variants(device):
        jobs.append((name, lambda n=name: ablation_call(n, length, device)()))
    return sorted(jobs, key=lambda job: job[0] != "readable")


def both_ways(attend, width, causal, length, device, dtype):
    q, k, v = inputs(1, length, width, dtype, device)
    attend(q, k, v, causal).sum().backward()


def compile_share(rank, n_ranks, tiny):
    for name, job in warm_jobs(tiny)[rank::n_ranks]:
        try:
            job()
        except Exception as error:
            print("did not compile:", name, str(error)[:200], flush=True)


def compile_all(tiny, n_ranks):
    """Start processes that fill Triton's cache; they run while Inductor compiles the peers here."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_share, args=(r, n_ranks, tiny), daemon=True) for r in range(n_ranks)]
    for process in processes:
        process.start()
    return processes


# ---- (a) the field ---------------------------------------------------------------------------------------------------


def field(report, peers, device, length, rounds, n):
    """Time every peer in every case, in turns, so that a minute of throttling hits all of them alike."""
    table = {}
    for case, (heads, width, causal) in CASES.items():
        q, k, v = inputs(heads, length, width, torch.bfloat16, device)
        times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": [], "both": []} for name in peers}
        for turn in range(rounds):
            for name, attend in list(peers.items())[:: 1 if turn % 2 == 0 else -1]:
                if name in report.results["failures"] or f"{name} {case}" in report.results["failures"]:
                    continue
                if name == "naive, compiled" and times[name]["both"]:
                    continue
                some = report.attempt(f"{name} {case}", lambda a=attend: three_times(a, q, k, v, causal, n, device))
                for part, values in (some or {}).items():
                    times[name][part] += values
        table[case] = {name: {p: spread(x) for p, x in parts.items() if x} for name, parts in times.items()}
        report.keep("field", {"length": length, "dtype": "bf16", "batch": 1, "cases": CASES, "ms": table})
        torch.cuda.empty_cache()


# ---- (b) one optimisation less ---------------------------------------------------------------------------------------

ABLATION: dict[str, tuple[str, dict[str, Any]]] = {
    "forward: all": ("forward", {}),
    "forward: tiles 64 x 64": ("forward", {"cols": 64}),
    "forward: tiles 128 x 64": ("forward", {"rows": 128, "cols": 64}),
    "forward: tiles 128 x 128, 8 warps": ("forward", {"rows": 128, "warps": 8}),
    "forward: exp instead of exp2": ("forward", {"base2": False}),
    "forward: every tile compared": ("forward", {"split": False}),
    "forward: pointers instead of descriptors": ("forward", {"copy_engine": False}),
    "forward: shortest rows first": ("forward", {"longest_first": False}),
    "forward: no tile skipped": ("forward", {"skip": False, "split": False}),
    "dQ: all": ("dq", {}),
    "dQ: row sums before it, by PyTorch": ("dq", {"fused": False}),
    "dQ: second product after the softmax": ("dq", {"early": False}),
    "dQ of the table: all": ("dq of the table", {}),
    "dQ of the table: one head after the other": ("dq of the table", {"heads_first": False}),
    "dK/dV: all": ("dkdv", {}),
    "dK/dV: tiles 128 x 64": ("dkdv", {"rows": 128, "stages": 2}),
    "dK/dV: second product after the softmax": ("dkdv", {"early": False}),
    "dK/dV: row sums and logsumexp by pointers": ("dkdv", {"copy_engine": False}),
}
WITH_ROLES: dict[
    str, tuple[str, dict[str, Any] | None]
] = {  # only on devices where warps can have roles; None stands for Triton's own kernel
    "forward with roles: all": ("forward", {}),
    "forward with roles: no roles": ("forward", None),
    "forward with roles: two groups": ("forward", {"users": 2}),
    "forward with roles: tiles of 64 keys": ("forward", {"tile": 64, "stages": 4}),
    "forward with roles: one head after the other": ("forward", {"heads_first": False}),
    "dK/dV with roles: all": ("dkdv", {}),
    "dK/dV with roles: no roles": ("dkdv", None),
    "dK/dV with roles: tiles of 32 rows": ("dkdv", {"tile": 32, "stages": 4}),
    "dK/dV with roles: keys and values in shared memory": ("dkdv", {"registers": False}),
    "dK/dV with roles: keys and values in registers": ("dkdv", {"registers": True}),
    "dQ with roles: all": ("dq", {}),
    "dQ with roles: no roles": ("dq", None),
    "dQ with roles: queries and gradients in shared memory": ("dq", {"registers": False}),
    "dQ with roles: queries and gradients in registers": ("dq", {"registers": True}),
}


def role_cut(which, options):
    """The cut of a variant, for 16 heads of 64, causal."""
    i = KERNELS.index(which)
    if options is None:
        return flash_fast.TABLE[64, True][i]
    cut: Any = flash_fast.ROLES_TABLE[64, True][i]
    return replace(cut, **options) if options else cut


def variants(device):
    """Names of the variants that `ablation` measures; a variant of a kernel with roles must differ from that kernel."""
    names = list(ABLATION)
    for name, (which, options) in WITH_ROLES.items() if has_roles(torch.empty(0, device=device)) else ():
        chosen = flash_fast.ROLES_TABLE[64, True][KERNELS.index(which)]
        if isinstance(chosen, Roles) and (options == {} or role_cut(which, options) != chosen):
            names.append(name)
    return names


def role_call(name, length, device):
    """A call without arguments that runs one variant of `WITH_ROLES`."""
    which, options = WITH_ROLES[name]
    q, k, v = inputs(16, length, 64, torch.bfloat16, device, grad=False)
    cut = role_cut(which, options)
    if which == "forward":
        return lambda: flash_fast.fast_forward(q, k, v, True, cut)
    o, lse = flash_fast.fast_forward(q, k, v, True, role_cut("forward", {}))
    do = torch.randn_like(o)
    if which == "dq":
        return lambda: flash_fast.fast_dq(q, k, v, o, do, lse, True, cut)
    _, stats = flash_fast.fast_dq(q, k, v, o, do, lse, True, role_cut("dq", {}))
    return lambda: flash_fast.fast_dkdv(q, k, v, do, stats, True, cut)


def ablation_call(name, length, device):
    """A call without arguments that runs one variant."""
    if name in WITH_ROLES:
        return role_call(name, length, device)
    which, options = ABLATION[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = inputs(16, length, 64, dtype, device, grad=False)
    if which == "forward":
        return lambda: flash_kernels.forward(q, k, v, **options)
    tiles = flash_fast.TABLE[64, True]
    o, lse = flash_fast.fast_forward(q, k, v, True, tiles[0])
    do = torch.randn_like(o)
    if which == "dq":
        return lambda: flash_kernels.backward_dq(q, k, v, o, do, lse, **options)
    if which == "dq of the table":
        chosen = tiles[1]._replace(**options)
        return lambda: flash_fast.fast_dq(q, k, v, o, do, lse, True, chosen)
    _, stats = flash_fast.fast_dq(q, k, v, o, do, lse, True, tiles[1])
    return lambda: flash_kernels.backward_dkdv(q, k, v, do, lse, stats, **options)


def ablation(report, device, length, rounds, n):
    names = variants(device)
    calls: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        calls[name] = report.attempt(name, lambda m=name: ablation_call(m, length, device))
    for turn in range(rounds):
        for name, call in list(calls.items())[:: 1 if turn % 2 == 0 else -1]:
            if call is not None and name not in report.results["failures"]:
                times[name] += report.attempt(name, lambda c=call: times_ms(c, n, device)) or []
    report.keep("ablation", {"length": length, "ms": {name: spread(x) for name, x in times.items() if x}})


# ---- (c) lengths, widths, dtypes; (d) memory; (e) error --------------------------------------------------------------


def default_sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def sweep(report, device, lengths, widths, n):
    """16 heads, causal, forward, backward and both, until the time is up: short lengths first."""
    rows = []
    for length in lengths:
        for dtype_name, dtype in DTYPES.items():
            for width in widths:
                slow = dtype_name == "float32" and length > 16_384  # some ten seconds for each width
                if not report.time_is_left(60 if slow else 25):
                    continue
                q, k, v = inputs(16 if length < 65_536 else 4, length, width, dtype, device)
                for name, attend in (("ours", ours), ("PyTorch", default_sdpa)):
                    repeats = n if length <= 8192 else 2
                    step = f"sweep {name} {length} {width} {dtype_name}"
                    some = report.attempt(step, lambda a=attend: three_times(a, q, k, v, True, repeats, device))
                    if some:
                        ms = {part: spread(x) for part, x in some.items()}
                        rows.append(
                            {
                                "peer": name,
                                "length": length,
                                "width": width,
                                "dtype": dtype_name,
                                "heads": q.shape[1],
                                "ms": ms,
                            }
                        )
        report.keep("sweep", rows)


def memory(report, device, lengths):
    """Peak memory of forward and backward beyond the inputs, 16 heads of 64, bf16."""
    rows = []
    for length in lengths:
        for name, attend in (("ours", ours), ("naive", naive)):
            q, k, v = inputs(16, length, 64, torch.bfloat16, device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step = f"memory {name} {length}"
            report.attempt(step, lambda a=attend, x=(q, k, v): a(*x, True).sum().backward())
            if step not in report.results["failures"]:
                rows.append({"peer": name, "length": length, "peak_bytes": torch.cuda.max_memory_allocated() - before})
            del q, k, v
    report.keep("memory", rows)


def errors(report, device, peers, length):
    """The largest and the root mean square error against float64, output and gradients, bf16."""
    rows, heads = [], 16 if device == "cuda" else 2  # on a GPU enough rows for the kernels of the field
    for case, (_, width, causal) in CASES.items():
        q, k, v = inputs(heads, length, width, torch.bfloat16, device)
        do = torch.randn_like(q)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        o = naive(exact[0], exact[1], exact[2], causal)
        expected = [o, *torch.autograd.grad(o, exact, do.double())]
        for name, attend in peers.items():
            result = report.attempt(f"error {name} {case}", lambda a=attend: attend(q, k, v, causal))
            if result is None:
                continue
            got = [result, *torch.autograd.grad(result, (q, k, v), do)]
            gaps = [(a.double() - b).abs() for a, b in zip(got, expected, strict=True)]
            names = ("o", "dq", "dk", "dv")
            worst = {n: gap.max().item() for n, gap in zip(names, gaps, strict=True)}
            rms = {n: gap.square().mean().sqrt().item() for n, gap in zip(names, gaps, strict=True)}
            again = attend(q, k, v, causal)
            same = torch.equal(result, again) and all(
                torch.equal(a, b) for a, b in zip(got[1:], torch.autograd.grad(again, (q, k, v), do), strict=True)
            )
            rows.append({"peer": name, "case": case, "largest": worst, "rms": rms, "same_bits_again": same})
    report.keep("error", {"length": length, "heads": heads, "rows": rows})


def main():
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--seconds", type=positive, default=260)
    parser.add_argument("--processes", type=whole(1), default=12)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    tiny, device = args.tiny, "cpu" if args.tiny else "cuda"
    report = Report(args.folder, args.seconds)
    if tiny:
        peers = {"ours": ours, "PyTorch": default_sdpa}
        compile_share(0, 6, True)
        field(report, peers, device, 256, 1, 1)
        ablation(report, device, 128, 1, 1)
        sweep(report, device, [128], (16,), 1)
        errors(report, device, {"ours": FlashAttentionTorch.apply}, 128)
        return
    workers = compile_all(tiny, args.processes)
    torch._functorch.config.donated_buffer = False  # otherwise compiled functions refuse a second backward pass
    torch._dynamo.config.recompile_limit = 64
    peers = {
        "ours": ours,
        "ours, Triton alone": in_triton,
        "cuDNN": sdpa("CUDNN_ATTENTION"),
        "flash backend": sdpa("FLASH_ATTENTION"),
    }
    others = {"FlexAttention, compiled": flex(), "naive, compiled": torch.compile(naive, dynamic=False)}
    for name, attend in others.items():  # Inductor's compilation, once for each case, while the workers fill the cache
        for case, (heads, width, causal) in CASES.items():
            q, k, v = inputs(heads, 16_384, width, torch.bfloat16, device)
            report.attempt(f"{name} {case}", lambda a=attend, x=(q, k, v), c=causal: a(*x, c).sum().backward())
            del q, k, v
        torch.cuda.empty_cache()
    report.keep("compiled_peers_s", time.perf_counter() - STARTED)
    for worker in workers:
        worker.join(max(1.0, 100 - (time.perf_counter() - STARTED)))
        if worker.is_alive():
            worker.terminate()
    q, k, v = inputs(1, 512, 64, torch.bfloat16, device)
    report.keep("compile_s", {"all": time.perf_counter() - STARTED, "fast_path": fits_fast(q, k, v, True)})
    report.attempt("error", lambda: errors(report, device, peers, 4096))
    report.attempt("field", lambda: field(report, peers | others, device, 16_384, 8, 5))
    report.attempt("ablation", lambda: ablation(report, device, 16_384, 6, 5))
    report.attempt("memory", lambda: memory(report, device, [2**n for n in range(9, 17, 1)]))
    report.attempt("sweep", lambda: sweep(report, device, LENGTHS, WIDTHS, 3))


if __name__ == "__main__":
    main()
