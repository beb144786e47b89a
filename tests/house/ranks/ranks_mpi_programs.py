"""What the tests of `lib.ranks` run on MPI ranks; without torch, so that new ranks are soon ready."""

import os
import signal

import numpy as np


def sum_of_ranks(comm, n):
    x, total = np.full(n, float(comm.rank)), np.empty(n)
    comm.Allreduce(x, total)
    return total, comm.allgather(comm.Get_rank())


def messages(comm):
    rank, size = comm.Get_rank(), comm.size
    x, inbox = np.arange(4, dtype=np.float32), np.empty(4, dtype=np.float32)
    if rank == 0:
        comm.Send(x, dest=1, tag=7)
        comm.send({"a": 1}, dest=1)
    elif rank == 1:
        comm.Recv(inbox, source=0, tag=7)
        comm.recv(source=0)
    comm.Sendrecv(x, (rank + 1) % size, recvbuf=inbox, source=(rank - 1) % size)
    requests = [comm.Isend(x, (rank + 1) % size), comm.Irecv(inbox, (rank - 1) % size)]
    type(requests[0]).Waitall(requests)
    comm.Bcast(x, root=0)
    comm.barrier()
    half = comm.Split(rank % 2, rank)
    total = half.allreduce(rank)
    return total, half.size, inbox.tolist(), isinstance(half, type(comm))


def world(comm):
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size(), isinstance(comm, MPI.Intracomm), MPI.COMM_WORLD.allreduce(1)


def both_receive(comm):
    inbox = np.empty(2)
    comm.Recv(inbox, source=1 - comm.rank)
    comm.Send(inbox, dest=1 - comm.rank)


def wait_for_nothing(comm):
    inbox = np.empty(2)
    request = comm.Irecv(inbox, source=1 - comm.rank)
    request.Wait()


def raise_on(comm, culprit):
    if comm.rank == culprit:
        raise ValueError(f"odd thing on {culprit}")
    comm.Barrier()


def killed_on(comm, culprit):
    if comm.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


def exit_on(comm, culprit):
    if comm.rank == culprit:
        os._exit(7)
    comm.Barrier()


def returns_early(comm, culprit):
    if comm.rank != culprit:
        comm.Bcast(np.ones(2), root=culprit)


def loop(comm, culprit):
    all(iter(lambda: comm.rank == culprit, False))  # endless, and all on one line
    comm.Barrier()


def untaken(comm):
    if comm.rank == 0:
        comm.send("anybody?", dest=1)


def not_started(comm):
    raise NotImplementedError("Exercise 9.1: write me")


def raise_on_all(comm):
    comm.Barrier()
    raise ValueError("on all of them")


def pid(comm):
    return os.getpid()


def receive_another_type(comm):
    if comm.rank == 0:
        comm.Send(np.ones(3, dtype=np.float32), dest=1)
    elif comm.rank == 1:
        inbox = np.empty(3)
        comm.Recv(inbox, source=0)  # too wide
    comm.Barrier()


def receive_too_much(comm):
    if comm.rank == 0:
        comm.Send(np.ones(12), dest=1)
    else:
        comm.Recv(np.empty(6), source=0)


def listening(comm):
    """The addresses on which this rank, its guard, mpiexec and the keeper listen."""
    from tests.house.ranks.ranks_programs import addresses_listened_on

    comm.allgather(comm.Get_rank())
    return addresses_listened_on(3)
