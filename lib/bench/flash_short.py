"""Find the length from which warp-specialized kernels beat Triton's own, by each kernel's time without its launch.

``python -m lib.bench.flash_short`` on a Hopper GPU (half a minute) writes ``flash_short.json``. A CUDA graph replays ``N_CALLS``
calls of one kernel, so that the host plays no part in the time. ``--tiny`` runs what needs no GPU, and times nothing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lib.bench.flash import inputs, time_ms
from lib.bench.record import MEASUREMENTS, record, spread
from lib.fast.flash import ENOUGH_ROWS, ROLES_TABLE, TABLE, Tiles, fast_dkdv, fast_dq, fast_forward
from lib.fast.flash_hopper import Roles
from lib.fast.models import capture

N_HEADS, LENGTHS, N_CALLS = 16, (256, 512, 1024, 2048, 4096, 8192), 20
KERNELS = ("forward", "dQ", "dK/dV")


def calls(
    length: int, width: int, causal: bool, device: str
) -> dict[str, Callable[[Tiles | Roles], tuple[Tensor, Tensor]]]:
    """Each kernel on the same inputs, by its name; the tiles are still to be given."""
    q, k, v = inputs(N_HEADS, length, width, torch.bfloat16, device, grad=False)
    o, lse = fast_forward(q, k, v, causal, TABLE[width, causal][0])
    do = torch.randn_like(o)
    _, stats = fast_dq(q, k, v, o, do, lse, causal, TABLE[width, causal][1])
    return {
        "forward": lambda tiles: fast_forward(q, k, v, causal, tiles),
        "dQ": lambda tiles: fast_dq(q, k, v, o, do, lse, causal, tiles),
        "dK/dV": lambda tiles: fast_dkdv(q, k, v, do, stats, causal, tiles),
    }


def replayed_ms(call: Callable[[], tuple[Tensor, Tensor]], rounds: int) -> dict[str, float]:
    """Of one call, in a graph of ``N_CALLS``."""

    def many() -> Tensor:
        for _ in range(N_CALLS - 1):
            call()
        return call()[0]

    times = time_ms(capture(many, n_warmup=1), rounds, "cuda", warm=2)
    return spread([ms / N_CALLS for ms in times])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        print(f"{len(TABLE) * len(LENGTHS)} rows of {len(KERNELS)} kernels would be timed, but there is no GPU")
        return
    rows: list[dict] = []
    for (width, causal), table in TABLE.items():
        for length in LENGTHS:
            found = calls(length, width, causal, "cuda")
            for i, kernel in enumerate(KERNELS):
                pair = {"Triton": table[i], "roles": ROLES_TABLE[width, causal][i]}
                ms = {name: replayed_ms(lambda c=found[kernel], t=t: c(t), options.rounds) for name, t in pair.items()}
                rows.append({"kernel": kernel, "width": width, "causal": causal, "length": length, "ms": ms})
        results = {"heads": N_HEADS, "dtype": "bf16", "enough_rows": ENOUGH_ROWS, "rows": rows}
        record("flash_short", results, options.folder)


if __name__ == "__main__":
    main()
