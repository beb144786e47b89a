"""Programs that a model wrote, run with limits: in a process, a session and an empty folder of their own."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

GUARD = Path(__file__).with_name("guard.py")
FILE_BYTES = 16 * 2**20
"""Largest file that a program may write, its standard output included."""


class Outcome(NamedTuple):
    """How a program ended, and what it wrote.

    Attributes:
        status: "ok" (exit status 0), "timeout", "memory" (ended by a ``MemoryError``) or "error" (anything else).
        stdout: Its standard output, up to ``FILE_BYTES``.
        stderr: Its standard error, up to ``FILE_BYTES``.
    """

    status: str
    stdout: str
    stderr: str


def run_program(program: str, stdin: str = "", timeout_s: float = 5.0, memory_bytes: int = 256 * 2**20) -> Outcome:
    """Run a Python program that nobody has read, with limits.

    Args:
        program: Source text. It runs as ``__main__`` of a fresh ``python -I``, in an empty folder of its own.
            Of the environment it sees PATH only.
        stdin: What it reads from its standard input.
        timeout_s: Seconds after which it is ended, start of the interpreter included.
        memory_bytes: Limit of its address space.

    Returns:
        Its status, standard output and standard error. All that it started is killed at the end.

    An audit hook refuses sockets, processes, signals, ctypes, deleting, and writing outside of its folder with a
    ``PermissionError``. This guards against accidents and greedy policies. It is no prison.
    """
    return run_behind((), program, stdin, timeout_s, memory_bytes)


def run_behind(
    prefix: Sequence[str],
    program: str,
    stdin: str | IO[bytes] = "",
    timeout_s: float = 5.0,
    memory_bytes: int = 256 * 2**20,
    stdout: IO[bytes] | None = None,
) -> Outcome:
    """`run_program` behind a command that starts other commands, such as one that makes namespaces.

    Args:
        prefix: The command and its options.
        program, timeout_s, memory_bytes: As in `run_program`.
        stdin: As in `run_program`; or a file, such as the end of a pipe, which is closed here once the program has it.
        stdout: A file that the program writes to, closed here like the other; the outcome's ``stdout`` is then empty.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, contextlib.ExitStack() as files:
        folder = Path(name).resolve()
        work = folder / "work"
        work.mkdir()
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        if isinstance(stdin, str):
            (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
            stdin = (folder / "stdin").open("rb")
        out, err, mark = (files.enter_context((folder / n).open("w+b")) for n in ("stdout", "stderr", "mark"))
        limits = [memory_bytes, math.ceil(timeout_s) + 1, FILE_BYTES, mark.fileno()]
        python = [sys.executable, "-I", "-B", "-X", "utf8", str(GUARD)]
        with stdin, stdout or out as written:
            process = subprocess.Popen(
                [*prefix, *python, str(folder / "program.py"), *map(str, limits)],
                stdin=stdin,
                stdout=written,
                stderr=err,
                cwd=work,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
                pass_fds=[mark.fileno()],
            )
        ended = _ends(process, timeout_s)
        texts = [(folder / n).read_bytes().decode("utf-8", "replace") for n in ("stdout", "stderr")]
        return Outcome(_status(process.returncode, ended, (folder / "mark").stat().st_size > 0), *texts)


def _ends(process: subprocess.Popen, timeout_s: float) -> bool:
    """Whether a process ends in time; afterwards nothing of its session is left."""
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _status(code: int, ended: bool, no_memory: bool) -> str:
    if not ended or code == -signal.SIGXCPU:
        return "timeout"
    return "ok" if code == 0 else "memory" if no_memory else "error"
