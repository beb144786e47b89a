"""Four vision transformers on Fashion-MNIST: three are swept,
and the fourth's loss and accuracy are predicted before it is trained.

python -m lib.runs.pictures my_pictures
python -m lib.bench.scaling_laws_images --data my_pictures

Each of the three is trained to four lengths.
Chapter 22's law is fitted to their losses on the test pictures, and a straight line gives the accuracy for a loss.
Both predictions for the fourth are written to ``chapters/measurements/scaling_laws_images.json`` before it is trained.
The program takes a minute or two on one GPU; ``--tiny`` tries the program on a CPU, with the handwritten digits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lib.bench.kit import record
from lib.bench.scaling_laws import n_weights, train_branches
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, width_and_layers
from lib.scaling_laws import bootstrap, fit_parametric

SIZES = ((64, 4), (128, 4), (128, 8), (256, 8))
"""Width and number of blocks of each model; the last model is predicted."""
STEPS, BATCH, WARMUP = (120, 240, 480, 960), 500, 30  # 120 steps are a pass over all 60,000 pictures
TINY_SIZES, TINY_STEPS = ((64, 1), (64, 2), (128, 2), (128, 4)), (10, 15, 20)
N_BOOTSTRAP = 100


def flags(o: argparse.Namespace, dim: int, n_layers: int, steps: int) -> list[str]:
    """Flags of ``lib.runs.train_vit``: patches of 4 x 4 pixels, and a rate that falls as one over the width."""
    same = {
        "model": "tiny", "data": o.data, "image-size": 8 if o.tiny else 28, "patch-size": 4, "dim": dim,
        "n-layers": n_layers, "steps": steps,
        "batch": 50 if o.tiny else BATCH, "lr": f"{min(2e-3, 0.256 / dim):.6g}", "schedule": "wsd",
        "warmup": 2 if o.tiny else WARMUP,
        "weight-decay": 0.1, "eval-every": 10**9, "optimizer": "adamw",
    }  # fmt: skip
    fast = ["--device=cpu"] if o.tiny else ["--precision", "bf16", "--graph"]
    return [*(f"--{name}={value}" for name, value in same.items()), *fast]


def train_size(o: argparse.Namespace, dim: int, n_layers: int) -> list[dict[str, Any]]:
    """Train one vision transformer to every length."""
    from lib.runs.engine.request import parse
    from lib.runs.engine.tasks import ViTTask
    from lib.runs.train_vit import make_vit_parser

    ends = TINY_STEPS if o.tiny else STEPS
    options = parse(make_vit_parser(), flags(o, dim, n_layers, ends[-1]))
    size = {"dim": dim, "n_layers": n_layers, "n_weights": n_weights(dim, n_layers)}
    return [{**size, **point} for point in train_branches(options, ViTTask, ends)]


def sweep(o: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the three smaller models at once, each in a process of its own."""

    def train(size: tuple[int, int]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "lib.bench.scaling_laws_images", f"--data={o.data}", f"--folder={folder}"]
            command += [f"--size={size[0]}x{size[1]}", *(["--tiny"] if o.tiny else [])]
            subprocess.run(command, check=True)
            return json.loads(Path(folder, "size.json").read_text())

    sizes = (TINY_SIZES if o.tiny else SIZES)[:-1]
    with ThreadPoolExecutor(1 if o.tiny else len(sizes)) as threads:
        return [point for found in threads.map(train, sizes) for point in found]


def predict(swept: list[dict[str, Any]], dim: int, n_layers: int, n_fits: int = N_BOOTSTRAP) -> dict[str, Any]:
    """The largest model's loss and accuracy at the sweep's greatest length, each with its 90 % interval."""
    n, d = n_weights(dim, n_layers), max(p["images"] for p in swept)

    def fit(rows: np.ndarray) -> dict[str, float]:
        law = fit_parametric(*rows[:, :3].T, n_starts=4)
        slope, at_0 = np.polyfit(rows[:, 2], rows[:, 3], 1)
        loss = float(law(n, d))
        return asdict(law) | {"slope": slope, "at_0": at_0, "held_out_loss": loss, "held_out_top1": at_0 + slope * loss}

    points = np.array([[p["n_weights"], p["images"], p["held_out_loss"], p["held_out_top1"]] for p in swept])
    size = {"dim": dim, "n_layers": n_layers, "n_weights": n, "images": d}
    intervals = bootstrap(fit, points, n_fits, seed=0)
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), **size, **fit(points), "intervals_90": intervals}


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder that lib.runs.pictures wrote")
    parser.add_argument("--size", type=width_and_layers, help="train only this one, such as 128x4")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    o = parser.parse_args(arguments)
    if not o.data and not o.tiny:
        parser.error("expected --data with a folder that lib.runs.pictures wrote, or --tiny")
    o.data = "embedded" if o.tiny else o.data
    if o.size:  # started by the sweep
        dim, n_layers = map(int, o.size.split("x"))
        (o.folder / "size.json").write_text(json.dumps(train_size(o, dim, n_layers)))
        return
    largest = (TINY_SIZES if o.tiny else SIZES)[-1]
    found: dict[str, Any] = {"tiny": o.tiny, "batch": BATCH, "sweep": sweep(o)}
    found["predict"] = predict(found["sweep"], *largest, n_fits=4 if o.tiny else N_BOOTSTRAP)
    record("scaling_laws_images", found, o.folder)
    found["largest"] = train_size(o, *largest)
    record("scaling_laws_images", found, o.folder)
    expected, measured = found["predict"], found["largest"][-1]
    for name in ("held_out_loss", "held_out_top1"):
        low, high = expected["intervals_90"][name]
        print(f"{name}: predicted {expected[name]:.4f} ({low:.4f} to {high:.4f}), measured {measured[name]:.4f}")


if __name__ == "__main__":
    main()
