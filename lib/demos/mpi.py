"""Small MPI programs of chapter 9. Some of them wait for ever, and `lib.ranks` reports where."""

import numpy as np


def both_receive(comm):
    """Each rank waits for the other to send first."""
    other, inbox = 1 - comm.rank, np.empty(4)
    comm.Recv(inbox, source=other)
    comm.Send(np.ones(4), dest=other)


def both_send(comm, n_bytes):
    """Each rank sends first and then receives: that works as long as MPI can buffer the message."""
    other, inbox = 1 - comm.rank, np.empty(n_bytes, np.uint8)
    comm.Send(np.ones(n_bytes, np.uint8), dest=other)
    comm.Recv(inbox, source=other)


def both_at_once(comm, n_bytes):
    """Send and receive in one call: no rank waits for the other's turn."""
    other, inbox = 1 - comm.rank, np.empty(n_bytes, np.uint8)
    comm.Sendrecv(np.ones(n_bytes, np.uint8), dest=other, recvbuf=inbox, source=other)


def one_stays_away(comm):
    """A collective that one rank does not call."""
    total = np.empty(1)
    if comm.rank != 2:
        comm.Allreduce(np.ones(1), total)


def ring_of(comm, n):
    """Run the learner's ring on n float64, for its ledger."""
    from lib.mpi import ring_all_reduce

    return ring_all_reduce(comm, np.arange(n) + float(comm.rank))


def tree_of(comm, root):
    """Run the learner's tree, for its ledger."""
    from lib.mpi import tree_broadcast

    return tree_broadcast(comm, np.full(4, float(comm.rank)), root)
