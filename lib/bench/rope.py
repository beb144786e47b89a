"""Measure the rotary embedding: what three ways of rotating cost, and what angles in small dtypes are worth.

Run ``python -m lib.bench.rope``; it writes ``chapters/measurements/rope.json``.
"""

import statistics
import time
from collections.abc import Callable

import torch

from lib.bench.record import record
from lib.rope import apply_rope, precompute_rope, rope_frequencies, rotation_matrix

BATCH, N_POSITIONS, N_HEADS, HEAD_DIM = 1, 1024, 8, 64
N_REPEATS = 30
FAR = 100_000


def time_ms(run: Callable[[], object]) -> dict[str, float]:
    """Median, 10th and 90th percentile of ``N_REPEATS`` runs after three to warm up, in milliseconds."""
    times = []
    for repeat in range(N_REPEATS + 3):
        start = time.perf_counter()
        run()
        if repeat >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


def rotation_times() -> dict[str, dict[str, float]]:
    """The same rotation as D/2 complex products, as cosines and sines of split halves, and as D x D matrices."""
    x = torch.randn(BATCH, N_POSITIONS, N_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rope = precompute_rope(HEAD_DIM, N_POSITIONS)
    matrices = torch.stack([rotation_matrix(m, HEAD_DIM) for m in range(N_POSITIONS)])
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (rope.real, rope.imag))

    def split_halves():
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    return {
        "complex_ms": time_ms(lambda: apply_rope(x, rope)),
        "split_halves_ms": time_ms(split_halves),
        "matrices_ms": time_ms(lambda: torch.einsum("tij,bthj->bthi", matrices, x)),
    }


def angle_errors() -> dict[str, float]:
    """Radians by which position times frequency is wrong at position ``FAR``, in the worst pair."""
    frequencies = rope_frequencies(HEAD_DIM)
    exact = FAR * frequencies.double()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        angles = torch.tensor(float(FAR), dtype=dtype) * frequencies.to(dtype)
        errors[str(dtype).removeprefix("torch.")] = (angles.double() - exact).abs().max().item()
    return errors


def main() -> None:
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other
    shape = {"batch": BATCH, "n_positions": N_POSITIONS, "n_heads": N_HEADS, "head_dim": HEAD_DIM, "threads": 1}
    with torch.no_grad():
        record("rope", {"shape": shape, "angle_error_rad": angle_errors(), **rotation_times()})


if __name__ == "__main__":
    main()
