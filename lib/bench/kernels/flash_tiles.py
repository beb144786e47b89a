"""Find the best tiles for chapter 15's fast kernels: compile, check and time every candidate of every kernel, in turns.

``python -m lib.bench.kernels.flash_tiles`` on a Hopper GPU (two minutes) writes ``flash_tiles.json``, fastest first,
and prints the fastest.
They are copied by hand into ``ROLES_TABLE`` of ``lib.fast.attention.flash``,
those of Triton's own kernels into ``TABLE``.
``--tiny`` tries two candidates of each kernel on any device.
"""

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TMPDIR", "/tmp")) / "flash_triton_cache"
os.environ["TRITON_CACHE_DIR"] = str(FOLDER)  # shared with lib.bench.kernels.flash

import torch
from torch import Tensor, multiprocessing

from lib.bench.kernels.flash import LOG2E, inputs, naive
from lib.bench.kernels.flash_kernels import backward_once
from lib.bench.kit import record, spread, times_ms
from lib.fast.attention.flash import Tiles, fast_dkdv, fast_dq, fast_forward, tiles_for
from lib.fast.attention.flash_hopper import Roles
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, whole

KERNELS = ("forward", "dQ", "dK/dV", "one pass")  # the last: all gradients at once, of lib.bench.kernels.flash_kernels
CUTS: dict[tuple[str, int], list[tuple[Any, ...]]] = {  # rows, columns, warps, stages, registers
    ("forward", 64): [
        (64, 128, 4, 2), (64, 128, 4, 2, 168), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2),
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 4, 2), (128, 128, 8, 2),
    ],
    ("forward", 128): [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
    ],
    ("dQ", 64): [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 4, 2),
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2),
    ],
    ("dQ", 128): [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3),
    ],
    ("dK/dV", 64): [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 4), (32, 64, 4, 4), (32, 128, 4, 3),
        (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2),
    ],
    ("dK/dV", 128): [
        (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 8, 2), (32, 128, 8, 2),
        (64, 128, 8, 2),
    ],
    ("one pass", 64): [
        (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 8, 2), (32, 128, 4, 2),
    ],
    ("one pass", 128): [(64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2)],
}  # fmt: skip
# Users, tile, stages, early, registers: only on a GPU, after Triton's own candidates.
WITH_ROLES: dict[tuple[str, int], list[tuple[Any, ...]]] = {
    ("forward", 64): [
        (3, 128, 2), (3, 128, 3), (3, 128, 4), (3, 64, 4), (3, 64, 4, True), (2, 128, 3), (2, 128, 3, True),
        (2, 128, 3, False, True), (2, 128, 3, True, True),
    ],
    ("forward", 128): [
        (3, 64, 2, True), (3, 64, 3), (3, 64, 3, True), (2, 128, 2), (2, 128, 2, True), (2, 64, 4), (2, 64, 4, True),
        (2, 128, 2, False, True),
    ],
    ("dQ", 64): [
        (3, 64, 3), (3, 64, 4), (3, 64, 4, True), (3, 64, 6), (2, 128, 3), (2, 64, 4), (2, 64, 4, True),
        (3, 64, 2, False, True), (3, 64, 3, False, True), (3, 64, 4, False, True), (2, 64, 4, True, True),
    ],
    ("dQ", 128): [
        (3, 64, 2), (2, 64, 2), (2, 64, 3), (2, 64, 3, True), (2, 128, 2), (2, 64, 3, False, True),
        (2, 64, 3, True, True),
    ],
    ("dK/dV", 64): [
        (2, 64, 2), (2, 64, 3), (2, 64, 4), (2, 64, 6), (2, 32, 4), (2, 64, 2, False, True), (2, 64, 3, False, True),
        (2, 64, 4, False, True), (2, 64, 6, False, True),
    ],
    ("dK/dV", 128): [(2, 64, 2), (2, 32, 3), (2, 32, 4)],
}  # fmt: skip
LIMIT = 1.5  # largest error that counts as right, in multiples of the error of the table's tiles


def candidates(kernel: str, width: int) -> list[Tiles | Roles]:
    """The candidates for a kernel; those for forward and dQ in both orders of programs."""
    orders = (False, True) if kernel in ("forward", "dQ") else (False,)
    tiles = [Tiles(*cut)._replace(heads_first=h) for cut in CUTS[kernel, width] for h in orders]
    roles = [Roles(*(*cut[:3], h, *cut[3:])) for cut in WITH_ROLES.get((kernel, width), ()) for h in orders]
    return [*tiles, *roles]


def call(kernel: str, given: tuple[Tensor, ...], causal: bool, tiles: Tiles | Roles) -> tuple[Tensor, ...]:
    """Run one kernel on q, k, v, o, do, lse and what dQ leaves for dK/dV."""
    q, k, v, o, do, lse, stats = given
    if kernel == "forward":
        return fast_forward(q, k, v, causal, tiles)[:1]
    if kernel == "dQ":
        return fast_dq(q, k, v, o, do, lse, causal, tiles)[:1]
    if kernel == "dK/dV":
        return fast_dkdv(q, k, v, do, stats, causal, tiles)
    assert isinstance(tiles, Tiles)
    return backward_once(q, k, v, o, do, lse * LOG2E, *tiles[:4])


def fields(tiles: Tiles | Roles) -> dict[str, dict]:
    """The fields that a caller of the kernel chooses, in the form in which they are recorded."""
    if isinstance(tiles, Tiles):
        return {"tiles": tiles._asdict()}
    return {
        "roles": {
            name: asdict(tiles)[name] for name in ("users", "tile", "stages", "heads_first", "early", "registers")
        }
    }


def given_at(heads: int, length: int, width: int, causal: bool, device: str) -> tuple[Tensor, ...]:
    q, k, v = inputs(heads, length, width, torch.bfloat16 if device == "cuda" else torch.float32, device, grad=False)
    for_forward, for_dq, _ = tiles_for(q, k, causal)
    o, lse = fast_forward(q, k, v, causal, for_forward)
    do = torch.randn_like(o)
    return q, k, v, o, do, lse, fast_dq(q, k, v, o, do, lse, causal, for_dq)[1]


def errors(
    kernel: str, causal: bool, width: int, all_tiles: list[Tiles | Roles], device: str, length: int
) -> dict[Tiles | Roles, float]:
    """Root mean square error of each candidate against float64; infinite if it does not compile or returns NaN."""
    given = given_at(2, length, width, causal, device)
    exact = [x.double().requires_grad_() for x in given[:3]]
    q, k, v = exact
    o = naive(q, k, v, causal)
    want = (o,) if kernel == "forward" else torch.autograd.grad(o, exact, given[4].double())
    want = want[:1] if kernel == "dQ" else want[1:] if kernel == "dK/dV" else want
    if kernel == "one pass":
        want = tuple(x / scale for x, scale in zip(want, (width**-0.5, width**-0.5, 1.0), strict=True))
    found = {}
    for tiles in all_tiles:
        try:
            got = call(kernel, given, causal, tiles)
            gaps = [(a.double() - b).square().mean().sqrt().item() for a, b in zip(got, want, strict=True)]
            found[tiles] = max(gaps) if all(gap == gap for gap in gaps) else float("inf")
        except Exception as error:  # too much shared memory, or a failure of the compiler: a result like any other
            print(f"{kernel}, width {width}, {tiles}: {str(error)[:120]}", flush=True)
            found[tiles] = float("inf")
    return found


def jobs(tiny: bool) -> list[tuple[str, int, bool]]:
    widths = (64,) if tiny else (64, 128)
    found = [(kernel, width, causal) for width in widths for causal in (True, False) for kernel in KERNELS]
    return [job for job in found if job[0] != "one pass" or job[2]]


def compile_share(rank: int, n_ranks: int, length: int) -> None:
    """Fill the cache with every ``n_ranks``-th candidate."""
    wanted = [(*job, tiles) for job in jobs(False) for tiles in candidates(*job[:2])]
    for kernel, width, causal, tiles in wanted[rank::n_ranks]:
        errors(kernel, causal, width, [tiles], "cuda", length)


def measure(job: tuple[str, int, bool], device: str, length: int, rounds: int, n: int, tiny: bool) -> list[dict]:
    """Each candidate's times, quickest first, and those that were wrong."""
    kernel, width, causal = job
    all_tiles = candidates(*job[:2])[: 2 if tiny else None]
    wrong = errors(kernel, causal, width, all_tiles, device, 128 if tiny else 1024)
    least = min(wrong.values())
    right = [tiles for tiles in all_tiles if wrong[tiles] <= LIMIT * least]
    given = given_at(16 if width == 64 else 8, length, width, causal, device)
    times: dict[Tiles | Roles, list[float]] = {tiles: [] for tiles in right}
    for turn in range(rounds):
        for tiles in right if turn % 2 == 0 else right[::-1]:
            times[tiles] += times_ms(lambda t=tiles: call(kernel, given, causal, t), n, device)
    rows: list[dict[str, Any]] = [{**fields(tiles), "rms": wrong[tiles], "ms": spread(times[tiles])} for tiles in right]
    rows.sort(key=lambda row: row["ms"]["median"])
    return rows + [{**fields(tiles), "failed": True} for tiles in all_tiles if tiles not in right]


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--processes", type=whole(1), default=14)
    parser.add_argument("--length", type=whole(1), default=16_384)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, start = "cpu" if options.tiny else "cuda", time.perf_counter()
    if not options.tiny:
        context = multiprocessing.get_context("spawn")
        shares = [(r, options.processes, 1024) for r in range(options.processes)]
        workers = [context.Process(target=compile_share, args=share, daemon=True) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    results: dict = {"length": 128 if options.tiny else options.length, "dtype": "bf16", "kernels": []}
    for job in jobs(options.tiny):
        rows = measure(job, device, results["length"], 1 if options.tiny else 4, 1 if options.tiny else 4, options.tiny)
        results["kernels"].append({"kernel": job[0], "width": job[1], "causal": job[2], "rows": rows})
        record("flash_tiles_tiny" if options.tiny else "flash_tiles", results, options.folder)
        best = rows[0]
        print(
            *job,
            f"{best['ms']['median']:.3f} ms",
            best.get("roles") or best["tiles"],
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
