"""Record finished runs of ``lib.runs.reinforce``: reward over seeds, its cost, and where the answers fail.

python -m lib.bench.reinforce --runs "no lag" runs/seed0 runs/seed1 runs/seed2 --runs "lag 1" runs/late --price 3.95

It reads the log and the newest checkpoint's settings of each folder and writes chapters/measurements/reinforce.json, or
``--name``, on the machine that made them. Files power*.csv in a folder, one for each GPU, give the energy. Their lines
are a time and watts, as ``nvidia-smi --query-gpu=timestamp,power.draw --format=csv,noheader,nounits -l 1`` writes them.
"""

import argparse
import itertools
import math
import statistics
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scipy import stats

from lib.bench.kit import record, spread
from lib.given.data.record import MEASUREMENTS
from lib.runs.engine import state as checkpoints
from lib.runs.engine.log import read_log
from lib.runs.flags import ProgramParser, positive, whole

CURVES = ("reward", "right", "format", "groups_that_differ", "length", "length_max", "cut_off", "entropy", "drift",
          "drift_max", "drift_kl", "clip_fraction", "grad_norm", "lag", "weight_bytes", "weight_seconds")  # fmt: skip
RATES = ("rollout_tokens_per_s", "train_tokens_per_s", "rollout_idle", "train_idle")
LOOKS = ("step", "held_out_right", "held_out_low", "held_out_high", "held_out_format", "held_out_length", "sample")
GAP_S = 5.0
"""Between two samples of the power that are further apart, the run was not running."""


def main(argv: list[str] | None = None) -> None:
    """Read the runs and write the record."""
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", action="append", required=True, metavar=("NAME", "FOLDER"),
                        help="a name and the folders of runs that differ in their seeds; may be repeated")  # fmt: skip
    parser.add_argument("--window", type=whole(1), default=10, help="steps that a point of a curve is the mean of")
    parser.add_argument("--price", type=positive, help="dollars that one GPU costs an hour")
    parser.add_argument("--name", default="reinforce", help="of the record")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    o = parser.parse_args(argv)
    found = {}
    for name, *folders in o.runs:
        if not folders:
            parser.error(f"--runs {name}: expected a name and at least one folder")
        runs = [read(Path(folder), o.price) for folder in folders]
        found[name] = {"runs": runs, "curve": curve([run["steps"]["reward"] for run in runs], o.window)}
    record(o.name, {"window": o.window, "price": o.price, "groups": found}, o.folder)


def read(folder: Path, price: float | None) -> dict[str, Any]:
    """What a run's folder says: its settings, its curves by step, its evaluations, its rates and its cost.

    Raises:
        SystemExit: the folder has no log of such a run, or no checkpoint.
    """
    lines = read_log(folder / "log.jsonl", "reward")
    found = checkpoints.peek(SimpleNamespace(checkpoint=folder, checkpoint_flag="--runs"))  # type: ignore[arg-type]
    if not lines or found is None:
        raise SystemExit(f"{folder}: expected the log and the checkpoint of a run of lib.runs.reinforce")
    settings = found["run"]["settings"]
    seconds, rows = sum(line["seconds"] for line in lines), settings["prompts"] * settings["group"]
    ranks = max(line.get("ranks", 1) for line in lines)
    return {
        "settings": settings,
        "steps": {name: [rounded(line.get(name)) for line in lines] for name in CURVES},
        "looks": [{name: look[name] for name in LOOKS} for look in read_log(folder / "log.jsonl", "held_out_right")],
        "rates": {name: spread([line[name] for line in lines]) for name in RATES},
        "memory_peak_bytes": max(line["memory_peak_bytes"] for line in lines),
        "rollout_tokens": round(sum(line["length"] for line in lines) * rows),
        "train_tokens": round(sum(line["train_tokens_per_s"] * (1 - line["train_idle"]) * line["seconds"]
                                  for line in lines)),
        "seconds": seconds,
        "cpu_seconds": sum(line["cpu_seconds"] for line in lines),
        "device": lines[-1]["device"],
        "ranks": ranks,
        "dollars": None if price is None else seconds / 3600 * price * ranks,
        **energy(sorted(folder.glob("power*.csv")), seconds),
    }  # fmt: skip


def rounded(value: float | None) -> float | None:
    """Five digits, which are enough for a curve."""
    return None if value is None else float(f"{value:.5g}")


def energy(files: list[Path], seconds: float) -> dict[str, float | None]:
    """The mean watts of a run's GPUs while its process ran, and the kWh of this many seconds; None without samples."""
    found = [mean_watts(path) for path in files]
    if not found or None in found:
        return {"watts": None, "kwh": None}
    watts = sum(one for one in found if one is not None)
    return {"watts": watts, "kwh": watts * seconds / 3.6e6}


def mean_watts(path: Path) -> float | None:
    """The mean over the time between a GPU's samples; None if there is no such time."""
    samples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        when, _, watts = line.partition(",")
        try:
            samples.append((datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(watts)))
        except ValueError:
            continue  # a line that was cut off, or "[N/A]"
    pairs = itertools.pairwise(samples)
    spans = [(after - before, watts) for (before, watts), (after, _) in pairs if 0 < after - before <= GAP_S]
    return sum(span * watts for span, watts in spans) / sum(span for span, _ in spans) if spans else None


def curve(seeds: list[list[float]], window: int) -> list[dict[str, float | None]]:
    """Means over windows of steps and over seeds, with Student's interval of 95 % over the seeds, None with one."""
    points, length = [], min(map(len, seeds))
    for begin in range(0, length, window):
        end = min(begin + window, length)
        means = [statistics.fmean(seed[begin:end]) for seed in seeds]
        mean, n = statistics.fmean(means), len(means)
        half = stats.t.ppf(0.975, n - 1) * statistics.stdev(means) / math.sqrt(n) if n > 1 else None
        points.append({"step": end, "mean": mean,
                       "low": None if half is None else mean - half,
                       "high": None if half is None else mean + half})  # fmt: skip
    return points


if __name__ == "__main__":
    main()
