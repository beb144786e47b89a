"""Time an all-reduce of 1 MB to 1 GB on several ranks, with gloo and with NCCL.

Run ``python -m lib.bench.all_reduce --ranks 2,4 --backend gloo,nccl`` on a machine with that many GPUs (a minute or
two), or with ``--tiny`` anywhere.
It starts its ranks itself and writes ``all_reduce.json`` after each size.
Earlier results for other backends and numbers of ranks stay in the file, each with its machine,
unless you give ``--fresh``.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lib.bench.kit import record, seconds_of, spawn, spread
from lib.given.data.record import MEASUREMENTS, load, where
from lib.runs.flags import ProgramParser, positive, some_of, whole, wholes

MB = 10**6
SIZES_MB = (1, 3, 10, 30, 100, 300, 1000)
TINY_MB = (0.01, 0.1, 1)


def fit(sizes_bytes: list[float], seconds: list[float]) -> tuple[float, float]:
    """Fit ``call + size / bandwidth`` to the times by relative error; returns seconds per call and bytes per second."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (sizes_bytes, seconds))
    design = torch.stack([1 / y, x / y], dim=1)
    call_s, per_byte = torch.linalg.lstsq(design, torch.ones(len(y), 1, dtype=torch.float64)).solution[:, 0].tolist()
    if call_s <= 0:  # the cost of a call is lost in the noise: take half of the quickest time
        call_s = min(seconds) / 2
    return call_s, 1 / per_byte if per_byte > 0 else max(s / t for s, t in zip(sizes_bytes, seconds, strict=True))


def time_sizes(rank: int, device: torch.device, key: str, sizes_mb: list[float], n_repeats: int, folder: Path) -> None:
    """Measure the median time of each size, with the slowest rank's in each repeat; rank 0 records size by size."""
    for size_mb in sizes_mb:
        x, times = torch.ones(int(size_mb * MB) // 4, device=device), []
        for repeat in range(n_repeats + 3):
            seconds = seconds_of(partial(dist.all_reduce, x), device, on_ranks=True)
            if repeat >= 3:
                times.append(seconds)
            x.fill_(1.0)
        if rank == 0:
            now = load("all_reduce", folder)
            kept = now["results"]["all_reduce_s"].get(key, {}) if size_mb != sizes_mb[0] else {}
            now["results"]["all_reduce_s"][key] = kept | {str(size_mb): spread(times)}
            now["results"]["on"][key] = where(now)
            record("all_reduce", now["results"], folder)
            print(f"{key} {size_mb} MB: {1e3 * statistics.median(times):.3f} ms", flush=True)


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=wholes, default="2,4")
    backends = "gloo,nccl" if torch.cuda.is_available() else "gloo"
    parser.add_argument("--backend", type=some_of("gloo", "nccl"), default=backends)
    parser.add_argument(
        "--gloo-limit-mb", type=positive, default=1000, help="largest array with gloo, which is slow on CPUs"
    )
    parser.add_argument("--repeats", type=whole(1), default=15)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes and few repeats, to try the program")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    options = parser.parse_args()
    sizes = list(TINY_MB if options.tiny else SIZES_MB)
    results: dict = {"dtype": "float32", "mb_bytes": MB, "tiny": options.tiny, "all_reduce_s": {}, "on": {}}
    if not options.fresh and (options.folder / "all_reduce.json").exists():
        kept = load("all_reduce", options.folder)["results"]
        if kept["tiny"] != options.tiny:
            parser.error(f"{options.folder}/all_reduce.json has other sizes: another --folder, or --fresh")
        results |= {key: kept[key] for key in ("all_reduce_s", "on")}
    record("all_reduce", results, options.folder)
    for backend in reversed(options.backend.split(",")):  # NCCL before gloo, which is slow and cares less
        for n_ranks in map(int, options.ranks.split(",")):
            if backend == "nccl" and torch.cuda.device_count() < n_ranks:
                print(f"nccl on {n_ranks} ranks: skipped, because there are only {torch.cuda.device_count()} GPUs")
                continue
            chosen = [s for s in sizes if backend == "nccl" or s <= options.gloo_limit_mb]
            repeats = 3 if options.tiny else options.repeats if backend == "nccl" else 7
            spawn(time_sizes, backend, n_ranks, f"{backend} {n_ranks}", chosen, repeats, options.folder)


if __name__ == "__main__":
    main()
