"""Find which tiles suit short lengths, by each kernel's time without its launch.

``python -m lib.bench.kernels.flash_short lengths models`` on a Hopper GPU (half a minute each) writes
``flash_short.json``, and keeps what it does not measure anew.
"lengths" compares kernels with roles for their warps and Triton's own for 16 heads;
"models" compares both with the tiles for short sequences, at the shapes of models.
A CUDA graph replays ``N_CALLS`` calls of one kernel, so that the host plays no part in the time.
``--tiny`` prints what would run, and times nothing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.bench.kernels import flash_shapes
from lib.bench.kernels.flash import inputs
from lib.bench.kit import record, spread, times_ms
from lib.fast.attention.flash import (
    ENOUGH_ROWS,
    ROLES_TABLE,
    TABLE,
    Tiles,
    fast_dkdv,
    fast_dq,
    fast_forward,
    sizes_of,
    split_joined,
    tiles_for,
)
from lib.fast.attention.flash_hopper import Roles
from lib.fast.models import capture
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.flags import ProgramParser, whole

NAME, N_HEADS, LENGTHS, N_CALLS = "flash_short", 16, (256, 512, 1024, 2048, 4096, 8192), 20
KERNELS = ("forward", "dQ", "dK/dV")
MODELS = [name for name, shape in flash_shapes.SHAPES.items() if shape.joined]


def calls(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool
) -> dict[str, Callable[[Tiles | Roles], tuple[Tensor, Tensor]]]:
    """For each kernel's name, a function of its tiles that runs it on these inputs."""
    table = TABLE[sizes_of(q, k, causal).width, causal]
    o, lse = fast_forward(q, k, v, causal, table[0])
    _, stats = fast_dq(q, k, v, o, do, lse, causal, table[1])
    return {
        "forward": lambda tiles: fast_forward(q, k, v, causal, tiles),
        "dQ": lambda tiles: fast_dq(q, k, v, o, do, lse, causal, tiles),
        "dK/dV": lambda tiles: fast_dkdv(q, k, v, do, stats, causal, tiles),
    }


def replayed_ms(call: Callable[[], tuple[Tensor, Tensor]], rounds: int) -> dict[str, float]:
    """Milliseconds of one call, measured in a graph of ``N_CALLS``."""

    def many() -> Tensor:
        for _ in range(N_CALLS - 1):
            call()
        return call()[0]

    times = times_ms(capture(many, n_warmup=1), rounds, "cuda", n_warmup=2)
    return spread([ms / N_CALLS for ms in times])


def lengths(rounds: int) -> list[dict[str, Any]]:
    """Kernels with roles and Triton's own, for 16 heads of each length."""
    rows = []
    for (width, causal), table in TABLE.items():
        for length in LENGTHS:
            q, k, v = inputs(N_HEADS, length, width, torch.bfloat16, "cuda", grad=False)
            found = calls(q, k, v, torch.randn_like(q), causal)
            for i, kernel in enumerate(KERNELS):
                pair = {"Triton": table[i], "roles": ROLES_TABLE[width, causal][i]}
                ms = {name: replayed_ms(lambda c=found[kernel], t=t: c(t), rounds) for name, t in pair.items()}
                rows.append({"kernel": kernel, "width": width, "causal": causal, "length": length, "ms": ms})
    return rows


def models(rounds: int) -> list[dict[str, Any]]:
    """Both, and the tiles that `tiles_for` chooses, at the shapes of models, on slices of one projection."""
    rows = []
    for name in MODELS:
        shape = flash_shapes.SHAPES[name]
        (x,), do = flash_shapes.inputs(shape, "cuda")
        q, k, v = split_joined(x.detach(), shape.heads)
        sizes, found = sizes_of(q, k, shape.causal), calls(q, k, v, do.transpose(1, 2), shape.causal)
        tables: dict[str, dict[tuple[int, bool], Any]] = {"Triton": TABLE, "roles": ROLES_TABLE}
        for i, kernel in enumerate(KERNELS):
            ways = {way: table[sizes.width, shape.causal][i] for way, table in tables.items()}
            ways["chosen"] = tiles_for(q, k, shape.causal)[i]
            ms = {way: replayed_ms(lambda c=found[kernel], t=t: c(t), rounds) for way, t in ways.items()}
            rows.append({"model": name, "kernel": kernel, "ms": ms})
            print(name, kernel, {way: f"{1e3 * t['median']:.1f} us" for way, t in ms.items()}, flush=True)
    return rows


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {"lengths": lengths, "models": models}


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"parts to measure: {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--rounds", type=whole(1), default=7)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    if options.tiny:
        n = len(TABLE) * len(LENGTHS) + len(MODELS)
        print(f"{n} rows of {len(KERNELS)} kernels would be timed, but there is no GPU")
        return
    results = load(NAME, options.folder)["results"] if (options.folder / f"{NAME}.json").exists() else {}
    for part in options.parts or PARTS:
        results |= {"heads": N_HEADS, "dtype": "bf16", "enough_rows": ENOUGH_ROWS, part: PARTS[part](options.rounds)}
        record(NAME, results, options.folder)


if __name__ == "__main__":
    main()
