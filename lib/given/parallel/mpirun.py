"""Start a program on several MPI processes, and compile a C program for them if the machine has a compiler."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.ranks.mpi_launch import mpi_environment, mpiexec


def mpirun(n_ranks: int, *command: str, timeout_s: float = 60) -> str:
    """Run a program on ``n_ranks`` processes of ``mpiexec`` and return what it prints, its error stream last.

    Args:
        n_ranks: Number of processes.
        command: The program and its arguments; ``"python"`` stands for the running Python.
        timeout_s: After this time all processes are ended.

    Raises:
        subprocess.TimeoutExpired: the processes did not end in time.
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
        process.terminate()  # mpiexec then ends its processes; if it were killed, it could not
        process.communicate(timeout=10)
        raise


def compile_c(source: str | os.PathLike, program: str | os.PathLike) -> str:
    """Compile a C program with the ``mpicc`` beside this Python, or else with the system's.

    Args:
        source: The ``.c`` file.
        program: Path of the executable.

    Returns:
        An empty string, or the reason for the failure: no ``mpicc``, no C compiler behind it,
        or an error in the source.
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
