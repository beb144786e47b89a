"""Measure the gain of resizing and normalising images on the accelerator: uint8 32 x 32 in, float 224 x 224 out.

Run ``python -m lib.bench.images_on_device`` (half a minute) on any device; ``--tiny`` uses few images.
It writes ``chapters/measurements/images_on_device.json``.
The two competitors: images stay on the device as uint8 and one call prepares a batch,
or Python workers prepare them with Pillow and NumPy and send floats over the bus.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lib.bench.kit import record, seconds_of, spread
from lib.fast.models import MEAN, STD, prepare_images
from lib.runs.flags import ProgramParser

SIZE, BATCH, N_PICTURES = 224, 256, 50_000


def pictures(n: int) -> Tensor:
    """Random uint8 pictures ``[N, 3, 32, 32]``; what they show does not change the time."""
    return torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class OnWorkers(Dataset):
    """One picture at a time, as most training scripts do it."""

    def __init__(self, all_pictures: Tensor):
        self.arrays = all_pictures.permute(0, 2, 3, 1).numpy()
        self.mean, self.std = (np.asarray(x, dtype=np.float32)[:, None, None] for x in (MEAN, STD))

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, i):
        large = Image.fromarray(self.arrays[i]).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        unit = np.asarray(large, dtype=np.float32).transpose(2, 0, 1) / 255.0
        return torch.from_numpy((unit - self.mean) / self.std)


def on_device(device: str, all_pictures: Tensor, dtype: torch.dtype, compiled: bool, n_repeats: int) -> dict:
    """Pictures a second when they lie on the device: chosen at random, resized, normalised."""
    there = all_pictures.to(device)
    make: Callable[..., Tensor] = torch.compile(prepare_images) if compiled else prepare_images

    def run() -> None:
        make(there[torch.randint(len(there), (BATCH,), device=device)], SIZE, dtype)

    return spread([BATCH / seconds_of(run, device, 4) for _ in range(n_repeats + 2)][2:])


def by_workers(device: str, all_pictures: Tensor, n_workers: int, n_batches: int) -> dict:
    """Pictures a second when Python workers make the floats, which then cross the bus."""
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if n_workers else {}
    pinned = device == "cuda"
    loader = DataLoader(
        OnWorkers(all_pictures), BATCH, shuffle=True, num_workers=n_workers, pin_memory=pinned, **options
    )
    batches = iter(loader)
    next(batches).to(device)
    fetch = lambda: next(batches).to(device, non_blocking=True)
    return spread([BATCH / seconds_of(fetch, device, n_batches) for _ in range(3)])


def main() -> None:
    parser = ProgramParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="few pictures, for a laptop")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of this process; the workers have one each
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    all_pictures = pictures(3_000 if args.tiny else N_PICTURES)
    results: dict = {"batch": BATCH, "size": SIZE, "cores": cores, "on_device_per_s": {}, "workers_per_s": {}}
    results["bytes_across_per_image"] = {"uint8": 3 * 32 * 32, "float32": 4 * 3 * SIZE * SIZE}
    name = "images_on_device" + ("_tiny" if args.tiny else "")
    for label, dtype, compiled in (("float32", torch.float32, False), ("bf16, compiled", torch.bfloat16, True)):
        found = on_device(args.device, all_pictures, dtype, compiled and not args.tiny, 2 if args.tiny else 20)
        results["on_device_per_s"][label] = found
    for n_workers in (0, 1, 2) if args.tiny else (0, 4, 8, cores):
        results["workers_per_s"][str(n_workers)] = by_workers(
            args.device, all_pictures, n_workers, 2 if args.tiny else 2 + 2 * n_workers
        )
        print(n_workers, results["workers_per_s"][str(n_workers)], flush=True)
        record(name, results)
    print(results["on_device_per_s"], flush=True)


if __name__ == "__main__":
    main()
