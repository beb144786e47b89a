"""A lock on a folder that a run writes to, so that two runs never write there at the same time."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.runs.flags import UsageError

try:
    import fcntl as _fcntl

    fcntl: ModuleType | None = _fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
TRIES, PAUSE_S = 5, 0.1  # another run's ``refuse_if_held`` holds the lock for a moment


class FolderLock:
    """A lock on a folder: the operating system holds it for this process, and releases it when the process dies.

    The folder gets a file ``.lock`` that names the holder; it is deleted when the lock is released.
    Some network drives have no locks.
    There the run goes on, and a warning says that nothing keeps a second run out.

    Args:
        folder: The folder, which exists.
        asked: The flag that names it, for messages: ``--checkpoint ck``.

    Raises:
        UsageError: another process holds the lock; the message names the folder and the holder.
    """

    def __init__(self, folder: Path, asked: str) -> None:
        self.path, self.asked = folder / NAME, asked
        self.file: int | None = None
        try:
            self.file = self._take()
            self._note_holder(self.file)
        except OSError as error:
            self._warn(f"no file lock can be set there ({error.strerror or error})")

    def _take(self) -> int | None:
        """The locked file, or None where there are no locks."""
        if fcntl is None:
            self._warn("this system has no file locks")
            return None
        for attempt in range(TRIES):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            is_locked = _try(file, fcntl.LOCK_EX)
            if is_locked and _is_still(file, self.path):
                return file
            if not is_locked and attempt == TRIES - 1:
                text = _in_use(self.asked, file)
                os.close(file)
                raise UsageError(text)
            os.close(file)
            time.sleep(PAUSE_S * (not is_locked))
        raise OSError(errno.ENOLCK, "the lock's file is replaced again and again")

    def _note_holder(self, file: int | None) -> None:
        if file is None:
            return
        left = _read(file)
        if left.get("host", _me()["host"]) != _me()["host"]:
            self._warn(
                f"{_named(left)} has not released it; if that process still runs, the two will overwrite each other's "
                "files, because some network drives do not carry locks between hosts"
            )
        with suppress(OSError):  # a full disk: the lock holds, and does not say whose it is
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_me()).encode(), 0)

    def _warn(self, why: str) -> None:
        print(f"warning: {self.asked}: {why}; make sure that no second run writes there", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Let others write to the folder. A second call does nothing."""
        if self.file is not None:
            with suppress(OSError):
                self.path.unlink()  # before the lock is released: whoever gets this file's lock sees that it is gone
            os.close(self.file)
            self.file = None


@contextmanager
def closing_lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock inside of a ``with`` block."""
    lock = FolderLock(folder, str(folder))
    try:
        yield
    finally:
        lock.release()


def refuse_if_held(folder: Path, asked: str) -> None:
    """Check that no process has locked a folder, which need not exist. Writes nothing.

    Raises:
        UsageError: one has; the message names the folder and the holder.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return
    try:
        if fcntl is not None and not _try(file, fcntl.LOCK_SH):
            raise UsageError(_in_use(asked, file))
    except OSError:  # no locks on this drive, which ``FolderLock`` will say
        pass
    finally:
        os.close(file)


def _try(file: int, kind: int) -> bool:
    """Lock an open file without waiting; returns whether nobody else holds it."""
    assert fcntl is not None
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        raise
    return True


def _is_still(file: int, path: Path) -> bool:
    """Whether the path still names this file: a holder deletes it before it releases the lock."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(file: int) -> dict[str, Any]:
    """Who holds the lock, or held it last; empty if the file does not say."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _me() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')},"


def _in_use(asked: str, file: int) -> str:
    return (
        f"{asked} is in use by {_named(_read(file))} and nothing was written; expected another folder, "
        "or that run to end"
    )
