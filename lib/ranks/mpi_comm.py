"""mpi4py's communicators and requests, which record every call in the rank's journal."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

from mpi4py import MPI

from lib.ranks.journal import Journal


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SENDS = _names("send bsend ssend isend ibsend issend Send Bsend Ssend Rsend Isend Ibsend Issend Irsend")
_RECEIVES = _names("recv irecv Recv Irecv")
_BOTH = _names("sendrecv Sendrecv Sendrecv_replace Isendrecv Isendrecv_replace")
_PICKLED = _names("barrier bcast gather scatter allgather alltoall reduce allreduce scan exscan")
_BUFFERS = _names(
    "Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter Reduce_scatter_block Scan Exscan"
)
_COLLECTIVES = (*_PICKLED, *_BUFFERS, *("I" + name.lower() for name in _BUFFERS))
_WAITS = _names("probe Probe mprobe Mprobe")
_NEW_COMMS = _names("Split Split_type Dup Dup_with_info Clone Create Create_group Create_cart Create_graph")
_FROM_ROOT = ("bcast", "scatter", "scatterv")
_TO_ROOT = ("gather", "gatherv", "reduce")
_ALIKE = ("bcast", "gather", "allgather", "reduce", "allreduce", "scan", "exscan", "alltoall")
_REQUEST = MPI.Request  # tasks see RecordedRequest instead
_PAYLOADS = ("buf", "obj", "sendbuf", "sendobj")


class _Context:
    """What the communicators of one task share: the journal, the task's own ranks,
    and the communicators made so far.
    """

    def __init__(self, journal: Journal, comm: MPI.Intracomm):
        self.journal, self.world = journal, comm.Get_group()
        self.made: dict[tuple[int, ...], int] = {}

    def name(self, ranks: tuple[int, ...]) -> str:
        """A name that is the same on all ranks of a communicator: its ranks,
        and how many communicators these ranks made before.
        """
        self.made[ranks] = self.made.get(ranks, 0) + 1
        return f"{','.join(map(str, ranks))}:{self.made[ranks]}"


class _Recorded:
    """What all recorded communicators have in common."""

    def _adopt(self, context: _Context) -> Self:
        group = self.Get_group()  # type: ignore[attr-defined]
        self.context, self.ranks = context, tuple(MPI.Group.Translate_ranks(group, None, context.world))
        self.stream = context.name(self.ranks)
        return self


class RecordedComm(_Recorded, MPI.Intracomm):
    """An `MPI.Intracomm` that records its calls."""


class RecordedCart(_Recorded, MPI.Cartcomm):
    """An `MPI.Cartcomm` that records its calls."""


class RecordedRequest(MPI.Request):
    """An `MPI.Request` that records its waits."""

    def _adopt(self, journal: Journal, index: int) -> Self:
        self.journal, self.index = journal, index
        return self


def adopt(comm: Any, context: _Context) -> Any:
    """The recording version of a communicator that mpi4py returned; anything else unchanged."""
    if isinstance(comm, _Recorded):
        return comm if hasattr(comm, "context") else comm._adopt(context)
    if isinstance(comm, MPI.Cartcomm) and comm != MPI.COMM_NULL:
        return RecordedCart(comm)._adopt(context)
    if isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
        return RecordedComm(comm)._adopt(context)
    return comm


def recorded_world(journal: Journal, comm: MPI.Intracomm) -> RecordedComm:
    """The communicator of a task, recorded."""
    recorded: RecordedComm = adopt(comm, _Context(journal, comm))
    return recorded


def _method(name: str, base: type) -> Callable[..., Any]:
    plain = getattr(base, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        journal = self.context.journal
        if journal.is_inside:
            return plain(self, *args, **kwargs)
        try:
            facts = _facts(self, name, signature.bind(self, *args, **kwargs).arguments)
        except (TypeError, ValueError, IndexError):
            return plain(self, *args, **kwargs)  # its error says what is wrong with the arguments
        with journal.call(name, **facts) as index:
            result = plain(self, *args, **kwargs)
        if isinstance(result, _REQUEST):
            return RecordedRequest(result)._adopt(journal, index)
        return adopt(result, self.context) if name in _NEW_COMMS else result

    return call


def _facts(comm: Any, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A call's entry in the ledger, from its arguments."""
    kind = name.lower().removeprefix("i") if name[0] == "I" else name
    kind = kind.lower()
    payload = next((given[key] for key in _PAYLOADS if given.get(key) is not None), None)
    if payload is MPI.IN_PLACE:
        payload = given.get("recvbuf")
    facts: dict[str, Any] = {"group": comm.ranks, "group_size": len(comm.ranks), "stream": comm.stream}
    facts["is_async"] = name[0] == "I" or name in ("isend", "ibsend", "issend", "irecv")
    n_bytes, n_elements, dtype = _sizes(payload, pickled=name[0].islower())
    facts.update(n_bytes=n_bytes, dtype=dtype)
    if name[0].isupper() and name in _RECEIVES + _BOTH:
        inbox = given.get("recvbuf")
        _, room, its_dtype = _sizes(payload if inbox is None else inbox, pickled=False)
        facts["room"] = None if room is None else (room, its_dtype)
    if name[0].isupper() and (kind in _ALIKE or name in _SENDS + _RECEIVES + _BOTH):
        facts["n_elements"] = n_elements
    if name in _NEW_COMMS:
        return {**facts, "n_bytes": 0, "stream": f"new:{comm.stream}", "sends": False}
    return {**facts, **_peers(comm, name, kind, given)}


def _peers(comm: Any, name: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    to, source, root = given.get("dest"), given.get("source", MPI.ANY_SOURCE), None
    if name in _SENDS + _BOTH:
        to = None if to in (None, MPI.PROC_NULL) else comm.ranks[to]
    receives = name in _RECEIVES + _BOTH + _WAITS and source != MPI.PROC_NULL
    source = (comm.ranks[source] if source >= 0 else -1) if receives else None
    if kind in _FROM_ROOT + _TO_ROOT:
        root = comm.ranks[given.get("root", 0)]
    here = comm.ranks[comm.Get_rank()]
    sends = name not in _RECEIVES + _WAITS
    if root is not None:
        sends = (here == root) == (kind in _FROM_ROOT)
    return {"to": to, "source": source, "root": root, "sends": sends}


def _sizes(payload: Any, pickled: bool) -> tuple[int, int | None, str]:
    """Bytes, elements and element type of the data that a call was given."""
    if payload is None:
        return 0, None, ""
    if pickled:
        try:
            return len(MPI.pickle.dumps(payload)), None, ""
        except Exception:
            return 0, None, ""
    data, *rest = payload if isinstance(payload, list | tuple) else (payload,)
    counts = [part for part in rest if isinstance(part, int)]
    types = [part for part in rest if isinstance(part, MPI.Datatype)]
    dtype = str(getattr(data, "dtype", "")).removeprefix("torch.")
    if counts and types:
        return counts[0] * types[0].Get_size(), counts[0], dtype
    size = getattr(data, "size", None)
    n_elements = data.numel() if hasattr(data, "numel") else size if isinstance(size, int) else None
    n_bytes = data.nbytes if hasattr(data, "nbytes") else memoryview(data).nbytes
    return n_bytes, n_elements, dtype


def _wait_method(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Request, name)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "journal"):
            return plain(self, *args, **kwargs)
        with self.journal.waiting(self.index):
            return plain(self, *args, **kwargs)

    return call


def _wait_many(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Request, name)

    @functools.wraps(plain)
    def call(requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        known = [r for r in requests if isinstance(r, RecordedRequest) and r != MPI.REQUEST_NULL]
        if not known:
            return plain(requests, *args, **kwargs)
        with known[0].journal.waiting(known[0].index):
            return plain(requests, *args, **kwargs)

    return staticmethod(call)


def _fill() -> None:
    """Give the classes above a recording version of each mpi4py method that sends, receives or waits."""
    names = [*_SENDS, *_RECEIVES, *_BOTH, *_COLLECTIVES, *_WAITS, *_NEW_COMMS]
    for cls, base in ((RecordedComm, MPI.Intracomm), (RecordedCart, MPI.Cartcomm)):
        for name in [*names, *(["Sub"] if base is MPI.Cartcomm else [])]:
            if hasattr(base, name):
                setattr(cls, name, _method(name, base))
    for name in ("wait", "Wait"):
        setattr(RecordedRequest, name, _wait_method(name))
    for name in ("waitall", "Waitall", "waitany", "Waitany", "waitsome", "Waitsome"):
        setattr(RecordedRequest, name, _wait_many(name))


_fill()
