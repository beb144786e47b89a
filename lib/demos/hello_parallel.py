"""Scatter, halve, reduce, broadcast: ``mpiexec -n 4 python -m mpi4py -m lib.demos.hello_parallel``. hello_parallel.c
does the same in C.
"""

import sys

from mpi4py import MPI


def main() -> None:
    comm = MPI.COMM_WORLD
    rank, n_ranks = comm.Get_rank(), comm.Get_size()
    values = [39, 72, 129, 42] if rank == 0 else None
    mine = comm.scatter(values, root=0)
    mine = mine / 2  # a float, whatever it was
    total = comm.reduce(mine, op=MPI.SUM, root=0)
    mean = None if total is None else total / n_ranks  # rank 0 alone has the total
    mean = comm.bcast(mean, root=0)
    sys.stdout.write(f"rank {rank} of {n_ranks} in Python: my half {mine:g}, the mean {mean:.2f}\n")


if __name__ == "__main__":
    main()
