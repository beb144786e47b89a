"""One task on one rank: find the function, call it together with the other ranks, and report the outcome."""

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from lib.ranks.journal import Journal, open_journal
from lib.ranks.places import is_user_file, shown

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from lib.ranks.mpi_comm import RecordedComm

Header = dict[str, Any]  # what `Pool.run` asks of its ranks
Outcome = dict[str, Any]


def run_task(header: Header, rank: int) -> bytes:
    """Run the task that ``header`` describes as this rank; returns the pickled outcome and never raises."""
    folder = header["folder"]
    journal = open_journal(f"{folder}/journal-{rank}")
    with open(f"{folder}/stack-{rank}", "w") as stack, _output_to(f"{folder}/output-{rank}"):
        faulthandler.enable(stack)
        # SIGUSR1 writes the stack between two Python instructions; SIGUSR2 also inside a C call,
        # but may crash Python while it makes a frame
        signal.signal(signal.SIGUSR1, lambda _, frame: _write_frames(stack.fileno(), frame))
        signal.siginterrupt(signal.SIGUSR1, False)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for a signal that arrives after the end
        faulthandler.register(signal.SIGUSR2, stack, all_threads=True)
        try:
            outcome = _attempt(header, rank, journal)
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
    journal.close()
    return pickle.dumps(outcome)


def _write_frames(file: int, frame: FrameType | None) -> None:
    """Write where Python is, innermost frame first, in faulthandler's format."""
    lines = []
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
        frame = frame.f_back
    os.write(file, "".join(lines).encode())


def _attempt(header: Header, rank: int, journal: Journal) -> Outcome:
    try:
        with _PEERS[header["backend"]](header, rank, journal) as first:
            journal.write("importing")
            function = _find(*header["function"])
            args = pickle.loads(header["args"])
            journal.write("running")
            value = function(*first, *args)
            journal.write("returned")
            return {"value": _pickled_value(value)}
    except BaseException as error:
        journal.write("raised")
        if header["about"]:
            with contextlib.suppress(Exception):
                vars(error)["about"] = _find(*header["about"])()
        return _described(error)


def _find(module: str, qualname: str, file: str | None) -> Any:
    """The function, imported by its module's name, or from its file if that name belongs to another file."""
    found: Any = None
    if module != "__main__":
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(module)
        if found is not None and file and getattr(found, "__file__", None) not in (file, None):
            found = None if not os.path.samefile(found.__file__ or "", file) else found
    if found is None:
        if not file:
            raise ModuleNotFoundError(f"no module named {module!r}, and it has no file")
        spec = importlib.util.spec_from_file_location("__ranks_main__" if module == "__main__" else module, file)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _pickled_value(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"it returned a {type(value).__name__}, which cannot be sent back: {error}") from error


def _described(error: BaseException) -> Outcome:
    """An exception in plain types, and the exception itself if it can be pickled."""
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(shown(f.filename, f.lineno or 0), f.name, f.line or "") for f in frames if is_user_file(f.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((shown(error.filename, error.lineno or 0), "", (error.text or "").strip()))
    return {"error": pickled, "type": type(error).__name__, "text": str(error), "frames": lines}


@contextlib.contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Send what this process prints, from Python or from C, into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, start=1):
            os.dup2(old, number)
            os.close(old)


def _store(path: str, rank: int, timeout: datetime.timedelta) -> "TCPStore":
    """The store of all ranks: rank 0 keeps it, on a port of this machine alone, and writes the port to ``path``.

    A FileStore would need no port, but it looks for a key only every 10 ms, which took half of a pipeline's step on
    ranks.
    """
    from torch.distributed import TCPStore

    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port, file = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            "127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=file
        )
        with open(f"{path}.new", "w") as new:
            new.write(str(port))
        os.rename(f"{path}.new", path)
        return store
    while not os.path.exists(path):
        time.sleep(0.001)
    with open(path) as told:
        return TCPStore("127.0.0.1", int(told.read()), is_master=False, timeout=timeout, wait_for_workers=False)


@contextlib.contextmanager
def _gloo(header: Header, rank: int, journal: Journal) -> Iterator[tuple[int, int]]:
    """A default process group; it lives as long as this process."""
    import torch
    import torch.distributed as dist

    from lib.ranks.collectives import record_collectives

    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=header["time_limit_s"] + 120)  # our own limit ends first and says more
    store = _store(f"{header['folder']}/port", rank, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=header["n_ranks"], timeout=patience)
    record_collectives(journal)
    yield rank, header["n_ranks"]


@contextlib.contextmanager
def _mpi(header: Header, rank: int, journal: Journal) -> "Iterator[tuple[RecordedComm]]":
    """A communicator of this task's own, of the first ranks of the warm world;
    it replaces COMM_WORLD during the task.
    """
    from mpi4py import MPI

    from lib.ranks.mpi_comm import RecordedRequest, recorded_world

    world, request = MPI.COMM_WORLD, MPI.Request
    members = world.Get_group().Incl(range(header["n_ranks"]))
    comm = recorded_world(journal, world.Create_group(members))
    try:
        MPI.COMM_WORLD, MPI.Request = comm, RecordedRequest
        yield (comm,)
    finally:
        MPI.COMM_WORLD, MPI.Request = world, request


_PEERS = {"gloo": _gloo, "mpi": _mpi}
