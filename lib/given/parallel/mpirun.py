"""Start programs on several MPI processes, and compile a C program for them, where there is what it takes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.ranks.mpi_launch import mpi_environment, mpiexec


def mpirun(n_ranks: int, *command: str, timeout_s: float = 60) -> str:
    """What a program prints on ``n_ranks`` processes of ``mpiexec``; what it says on its error stream comes last.

    Args:
        n_ranks: How many processes.
        command: The program and its arguments; ``"python"`` is this Python.
        timeout_s: After so long all processes are ended.

    Raises:
        subprocess.TimeoutExpired: they have not ended by themselves.
    """
    program = [sys.executable if part == "python" else part for part in command]
    process = subprocess.Popen(
        [mpiexec(), "-n", str(n_ranks), *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=mpi_environment(),
    )
    try:
        return "".join(process.communicate(timeout=timeout_s))
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec then ends its processes, which it could not if it were killed
        process.communicate(timeout=10)
        raise


def compile_c(source: str | os.PathLike, program: str | os.PathLike) -> str:
    """Compile a C program with the ``mpicc`` that lies beside this Python, else the system's.

    Args:
        source: The ``.c`` file.
        program: Where the executable goes.

    Returns:
        Nothing, or why it could not be: there is no ``mpicc``, no C compiler behind it, or an error in the source.
    """
    beside = Path(sys.executable).with_name("mpicc")
    mpicc = str(beside) if beside.exists() else shutil.which("mpicc")
    if mpicc is None:
        return "there is no mpicc here"
    try:
        done = subprocess.run([mpicc, "-O2", "-o", program, source], capture_output=True, text=True, timeout=120)
    except OSError as error:
        return f"mpicc cannot be run: {error}"
    if done.returncode == 0:
        return ""
    lines: Sequence[str] = (done.stderr or done.stdout).strip().splitlines()
    return f"mpicc failed (is a C compiler installed?): {lines[0] if lines else done.returncode}"
