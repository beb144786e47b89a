"""Measure the time and memory of attention against sequence length: written out as products,
and PyTorch's fused kernel.

Run ``python -m lib.bench.attention``; it writes ``chapters/measurements/attention.json``.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.attention import scaled_dot_product_attention
from lib.bench.kit import measure, record
from lib.runs.flags import ProgramParser

BATCH, N_HEADS, HEAD_DIM = 1, 4, 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
BYTES = 4  # of a float32


def inputs(length: int) -> list[Tensor]:
    """Queries, keys and values ``[B, H, T, D]``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, N_HEADS, length, HEAD_DIM, generator=generator) for _ in range(3)]


def score_bytes(length: int) -> int:
    """Bytes of one ``[B, H, T, T]`` tensor of scores."""
    return BYTES * BATCH * N_HEADS * length**2


class Held(TorchDispatchMode):
    """Counts the bytes that operators allocate and free, and remembers the peak."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage(), given)
        return out

    def note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key not in given and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key, None)
            self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes of the tensors that a call creates, beyond those that existed before."""
    with Held() as held:
        run()
    return held.peak_bytes


def sweep(attend: Callable[..., Tensor], lengths=LENGTHS, n_repeats: int = 10) -> dict[str, dict[str, Any]]:
    """Seconds and peak bytes of one call at each length."""
    found = {}
    for length in lengths:
        q, k, v = inputs(length)
        found[str(length)] = {
            "forward_s": measure(lambda: attend(q, k, v), n_repeats),  # noqa: B023 (called at once)
            "peak_bytes": peak_bytes(lambda: attend(q, k, v)),  # noqa: B023
        }
    return found


def main() -> None:
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other
    shape = {"batch": BATCH, "n_heads": N_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "threads": 1}
    with torch.no_grad():
        written_out, fused = sweep(scaled_dot_product_attention), sweep(F.scaled_dot_product_attention)
    record("attention", {"shape": shape, "written_out": written_out, "fused": fused})


if __name__ == "__main__":
    ProgramParser(description=__doc__).parse_args()  # there are no flags: a word is refused before anything is measured
    main()
