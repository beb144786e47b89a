"""Measure the rotary embedding: the cost of three ways to rotate, and the error of angles in small dtypes.

Run ``python -m lib.bench.rope``; it writes ``chapters/measurements/rope.json``.
"""

import torch

from lib.bench.kit import measure, record
from lib.rope import apply_rope, precompute_rope, rope_frequencies, rotation_matrix
from lib.runs.flags import ProgramParser

BATCH, N_POSITIONS, N_HEADS, HEAD_DIM = 1, 1024, 8, 64
N_REPEATS = 200
FAR = 100_000


def rotation_times() -> dict[str, dict[str, float]]:
    """Time the same rotation as D/2 complex products, as cosines and sines of split halves, and as D x D matrices."""
    x = torch.randn(BATCH, N_POSITIONS, N_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rope = precompute_rope(HEAD_DIM, N_POSITIONS)
    matrices = torch.stack([rotation_matrix(m, HEAD_DIM) for m in range(N_POSITIONS)])
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (rope.real, rope.imag))

    def split_halves():
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    return {
        "complex_s": measure(lambda: apply_rope(x, rope), N_REPEATS, n_warmup=20),
        "split_halves_s": measure(split_halves, N_REPEATS, n_warmup=20),
        "matrices_s": measure(lambda: torch.einsum("tij,bthj->bthi", matrices, x), N_REPEATS, n_warmup=20),
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
    ProgramParser(description=__doc__).parse_args()  # there are no flags: a word is refused before anything is measured
    main()
