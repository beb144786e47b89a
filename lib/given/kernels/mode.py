"""Triton, compiled where there is a GPU and interpreted where there is none, with sizes of tiles that suit each.

``import lib`` decides which of the two and sets ``TRITON_INTERPRET`` before this module is imported.
Import ``triton`` and ``tl`` from here: then files with kernels can be imported even where Triton is not installed
(macOS, Windows), and a launch says what is missing.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set

NO_TRITON = (
    "Triton is not installed. Its package is for Linux: on macOS or Windows run kernels in Colab, in WSL or in a "
    "container, where `pip install triton` finds it"
)
"""Why a kernel cannot be launched, and why its checks are skipped."""

triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]

    HAS_TRITON = True
except ImportError:

    class _Kernel:
        """What ``triton.jit`` returns where Triton is not installed."""

        def __init__(self, fn):
            self.fn = fn

        def __getitem__(self, grid):
            raise RuntimeError(NO_TRITON)

    def _jit(fn=None, **options):
        return _Kernel if fn is None else _Kernel(fn)

    class _Absent:
        """Replaces ``triton`` and ``tl`` where Triton is not installed."""

        jit = staticmethod(_jit)

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return args[0] if args else self

    triton = tl = _Absent()
    HAS_TRITON = False

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run as Python on the CPU."""

if HAS_TRITON and INTERPRETED and isinstance(tl.cdiv, triton.JITFunction):
    warnings.warn(
        "Triton was imported before `lib` could ask for its interpreter (torch.utils.flop_counter and "
        "torch.compile import "
        "it), so no kernel will run here: restart, and put `import lib` first or set TRITON_INTERPRET=1 in "
        "the environment",
        RuntimeWarning,
        stacklevel=2,
    )

if HAS_TRITON and INTERPRETED:
    from lib.given.kernels.interpreter import mend

    mend()

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "NO_TRITON",
    "MatmulTiles",
    "block_of",
    "check_tensors",
    "matmul_tiles",
    "rows_of",
    "tl",
    "triton",
    "warps_of",
]


@dataclass(frozen=True)
class MatmulTiles:
    """How a matrix product is cut: a program computes ``m`` x ``n`` numbers in steps of ``k`` terms;
    ``group`` rows of tiles.
    """

    m: int
    n: int
    k: int
    group: int
    num_warps: int = 4
    num_stages: int = 3


def matmul_tiles(dtype: torch.dtype) -> MatmulTiles:
    """Small tiles for the interpreter, so that even small matrices have several; large tiles for a GPU."""
    if INTERPRETED:
        return MatmulTiles(16, 32, 16, 3)
    if dtype == torch.float32:
        return MatmulTiles(64, 64, 32, 8)
    return MatmulTiles(128, 256, 64, 8, num_warps=8)


def block_of(length: int, largest: int = 1 << 20) -> int:
    """The power of two, 16 or more, that holds ``length`` numbers; at most ``largest``."""
    return min(max(16, triton.next_power_of_2(max(length, 1))), largest)


def rows_of(width: int) -> int:
    """Rows for each program if a block of columns is ``width`` wide: about 4096 numbers; 8 rows in the interpreter."""
    return 8 if INTERPRETED else max(1, 4096 // width)


def warps_of(block: int) -> int:
    """Groups of 32 threads for a row of ``block`` numbers: about 32 numbers for each thread, and 4 to 16 groups."""
    return min(16, max(4, block // 1024))


def check_tensors(*tensors: Tensor) -> None:
    """Reject tensors that the kernels of chapter 14 can't compute with.

    Raises:
        ValueError: a dtype other than float32, float16 and (on a GPU) bfloat16,
            or tensors of several dtypes or devices.
    """
    known = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
    for x in tensors:
        if x.dtype not in known:
            why = "; bfloat16 needs a GPU, the interpreter rounds it wrongly" if x.dtype == torch.bfloat16 else ""
            raise ValueError(f"{x.dtype}: expected {', '.join(str(d) for d in known)}{why}")
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        shown = ", ".join(f"{x.dtype} on {x.device}" for x in tensors)
        raise ValueError(f"{shown}: expected one dtype on one device")
