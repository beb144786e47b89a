"""What this machine can and cannot do of the book, in two lines."""

import os
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch


def machine() -> None:
    """Print what runs here, and what is recorded elsewhere or does not run."""
    can, cannot = facts(
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        has_mpi=find_spec("mpi4py") is not None and (_beside_python("mpiexec") or shutil.which("mpiexec") is not None),
        has_triton=find_spec("triton") is not None,
    )
    print(f"Here runs: {'; '.join(can)}.")
    print(f"Not here: {'; '.join(cannot) or 'nothing is missing'}.")


def facts(gpus: list[str], has_mpi: bool, has_triton: bool) -> tuple[list[str], list[str]]:
    """What runs on a machine with these parts, and what does not."""
    can = [f"PyTorch {torch.__version__.partition('+')[0]} on {os.cpu_count()} cores of {platform.system()}"]
    cannot = []
    if gpus:
        can.append(f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0]})")
    else:
        cannot.append("a GPU, so the times of large machines are recorded ones")
    if has_mpi:
        can.append("four processes that send each other messages, by MPI")
    else:
        cannot.append("MPI, so chapter 9 and every cell with four ranks need Linux, macOS or WSL")
    if has_triton:
        can.append("Triton's kernels, compiled" if gpus else "Triton's kernels, in its interpreter")
    else:
        cannot.append("Triton, so chapters 14 and 15 need Linux, a container or WSL")
    return can, cannot


def _beside_python(program: str) -> bool:
    return Path(sys.executable).with_name(program).exists()
