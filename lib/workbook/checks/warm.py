"""A warm process: `workbook check` and `%check` fork a process that has already imported PyTorch, which saves seconds.

The warm process is a fork server (`lib.ranks.forkserver`) for this checkout and this Python.
It ends after a quarter of an hour without a request.
Where it cannot run (macOS, Windows, a folder that others may write to), each check starts a new process.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.ranks import forkserver

PRELOADED = (
    *("torch", "numpy", "pytest", "_pytest.main", "einops", "jaxtyping", "regex", "yaml", "safetensors.torch"),
    *("psutil", "rich.table", "docstring_parser"),
)
PATIENCE_S = 60.0
SETTINGS_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")  # meant for runs of pytest itself; a check chooses its own
INHERITED = ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV", "WORKBOOK_ROOT")
EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # pytest warns that its plugins were imported before it ran


def can_fork() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def run_pytest(arguments: list[str], root: Path) -> tuple[int, str]:
    """Exit status and output of ``pytest ARGUMENTS`` in the project; run by the warm process if possible."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS_OF_PYTEST}
    with tempfile.TemporaryFile() as output:
        program: Any = (
            _forked(arguments, root, output.fileno(), environment)
            if can_fork() and not os.environ.get("WORKBOOK_COLD")
            else None
        )
        if program is None:
            program = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            status = program.wait()
        except BaseException:
            program.kill()
            raise
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _forked(arguments: list[str], root: Path, output: int, environment: dict[str, str]) -> forkserver.Forked | None:
    """Start the run in a fork of the warm process, which is started first if necessary; None if that is impossible."""
    where = address(root)
    if where is None:
        return None
    # a check needs only the book's own plugin, and loading the others takes time
    environment = {**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", forkserver.VARIABLE: where}
    request = forkserver.Request(
        program="pytest",
        arguments=[*arguments, *EARLY],
        folder=str(root),
        environment=environment,
        preload=("torch._dynamo",),
    )
    for _ in range(2):
        try:
            return forkserver.ask(where, request, output)
        except OSError:
            if not _start(where, root):
                return None
    return None


def _start(where: str, root: Path) -> bool:
    """Start the server, or wait for the one that another process is starting. Returns whether it runs."""
    with open(where + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _answers(where):
            return True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where)
        command = [sys.executable, "-P", str(Path(forkserver.__file__).resolve()), where, *PRELOADED]
        with open(where + ".log", "wb") as log:
            server = subprocess.Popen(
                command, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and server.poll() is None:
            if os.path.exists(where):
                return True
            time.sleep(0.02)
    return False


def _answers(where: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as wire:
        try:
            wire.connect(where)
        except OSError:
            return False
        return True


def address(root: Path) -> str | None:
    """The path of a socket that only this user, checkout, Python and version of the server use;
    None if no folder is safe.
    """
    version = str(Path(forkserver.__file__).stat().st_mtime_ns)
    key = "|".join([str(root), sys.executable, version, *(os.environ.get(n, "") for n in INHERITED)])
    name = f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.sock"  # a folder's name may hold any bytes
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for folder in [Path(runtime) / "workbook"] if runtime else []:
        if _is_private(folder):
            return str(folder / name)
    folder = root / ".workbook" / "run"
    if len(os.fsencode(folder / name)) < 90 and _is_private(folder):  # a socket's path has about a hundred characters
        return str(folder / name)
    return None


def _is_private(folder: Path) -> bool:
    """Make a folder if it is missing. Returns whether it is a real folder (no link) that only this user can enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        if found.st_mode & 0o077:
            folder.chmod(0o700)
        return True
    except OSError:
        return False
