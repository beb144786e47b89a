"""What a rank sent and received, call by call."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Record:
    """One call of a collective or of a message by one rank.

    ``seq`` counts the calls of the same name on this rank from 1,
    ``at_s`` is in seconds since the run began (one clock for all ranks), ``n_bytes`` is what the rank passes in,
    and ``n_elements`` and ``dtype`` are those of the part that must be equal on all ranks (None
    and "" if no part must be).
    ``group``, ``to``, ``source`` and ``root`` are ranks of the world; a ``source`` of -1 is any rank.
    ``room`` is the elements and the dtype that a message is received into.
    """

    op: str
    n_bytes: int = 0
    dtype: str = ""
    group_size: int = 1
    is_async: bool = False
    seq: int = 1
    where: str = ""
    at_s: float = 0.0
    n_elements: int | None = None
    group: tuple[int, ...] = ()
    stream: str = ""
    to: int | None = None
    source: int | None = None
    root: int | None = None
    sends: bool = True
    room: tuple[int, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} #{self.seq}"

    @property
    def is_collective(self) -> bool:
        return self.to is None and self.source is None

    @property
    def with_peer(self) -> str:
        """``Recv #1 from rank 0``."""
        to = "" if self.to is None else f" to rank {self.to}"
        source = "" if self.source is None else f" from rank {self.source}" if self.source >= 0 else " from any rank"
        return f"{self.name}{to}{source}"

    @property
    def shape_of_call(self) -> str:
        """``all_reduce of 4 float32``: what must be equal on all ranks."""
        size = "" if self.n_elements is None else f" of {self.n_elements} {self.dtype}".rstrip()
        root = "" if self.root is None else f" with root {self.root}"
        return f"{self.op}{size}{root}"


@dataclass(frozen=True)
class Milestone:
    """A moment that the rank's code gave a name, ``at_s`` seconds after the run began."""

    name: str
    at_s: float


@dataclass
class Ledger:
    """What one rank did, in order."""

    rank: int
    records: list[Record] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)

    def count(self, *ops: str) -> int:
        """Number of calls with these names, in upper or lower case (Send and send); of all calls,
        if no name is given.
        """
        wanted = {op.lower() for op in ops}
        return sum(not wanted or record.op.lower() in wanted for record in self.records)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the rank passed in to be sent: not what it received, nor what a root keeps."""
        return sum(record.n_bytes for record in self.records if record.sends)

    @property
    def n_messages(self) -> int:
        """Number of messages to one other rank, without collectives."""
        return sum(record.to is not None for record in self.records)

    def before(self, milestone: str) -> list[Record]:
        """The calls that were started before the first milestone of that name.

        Raises:
            ValueError: the rank made no such milestone.
        """
        at = [m.at_s for m in self.milestones if m.name == milestone]
        if not at:
            raise ValueError(
                f"rank {self.rank} made no milestone {milestone!r}; it made {[m.name for m in self.milestones]}"
            )
        return [record for record in self.records if record.at_s < at[0]]

    def __str__(self) -> str:
        rows: list[tuple[float, Iterable[str]]] = [
            (r.at_s, (f"{r.at_s:.3f}", r.with_peer, str(r.n_bytes), r.dtype, str(r.group_size), r.where))
            for r in self.records
        ]
        rows += [(m.at_s, (f"{m.at_s:.3f}", f"-- {m.name}", "", "", "", "")) for m in self.milestones]
        table = [("at s", "call", "bytes", "dtype", "ranks", "where"), *(row for _, row in sorted(rows))]
        widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return f"rank {self.rank}\n" + "\n".join(lines)
