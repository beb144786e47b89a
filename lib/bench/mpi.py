"""Time messages and all-reduces between MPI processes of this machine, over sizes from 8 bytes to 16 MB.

Run ``python -m lib.bench.mpi`` (about a minute); it starts the ranks with ``mpiexec`` and writes
``chapters/measurements/mpi.json``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lib.bench.kit import measure, record, spread
from lib.given.parallel.mpirun import mpirun
from lib.runs.flags import ProgramParser

RANKS = (2, 4)
SIZES = tuple(8 * 8**k for k in range(8))  # 8 B to 16 MiB
SIZE_S = 1.0  # seconds for which each size is measured, roughly


def naive_all_reduce(comm, array):
    """Rank 0 receives from one rank after the other, then sends the sum to each of them."""
    total = array.copy()
    if comm.rank == 0:
        inbox = np.empty_like(total)
        for other in range(1, comm.size):
            comm.Recv(inbox, source=other)
            total += inbox
        for other in range(1, comm.size):
            comm.Send(total, dest=other)
    else:
        comm.Send(total, dest=0)
        comm.Recv(total, source=0)
    return total


def tree_all_reduce(comm, array):
    """Sum up a binomial tree to rank 0, and broadcast down again."""
    from lib.mpi import tree_broadcast

    total, inbox, reach = array.copy(), np.empty_like(array), 1
    while reach < comm.size:
        if comm.rank % (2 * reach) == reach:
            comm.Send(total, dest=comm.rank - reach)
        elif comm.rank % (2 * reach) == 0 and comm.rank + reach < comm.size:
            comm.Recv(inbox, source=comm.rank + reach)
            total += inbox
        reach *= 2
    return tree_broadcast(comm, total)


def mpi_all_reduce(comm, array):
    """MPI's own all-reduce."""
    total = np.empty_like(array)
    comm.Allreduce(array, total)
    return total


def ping(comm, array):
    """A message from rank 0 to rank 1 and back: two messages."""
    if comm.rank == 0:
        comm.Send(array, dest=1)
        comm.Recv(array, source=1)
    elif comm.rank == 1:
        comm.Recv(array, source=0)
        comm.Send(array, dest=0)


class Silent:
    """A communicator that sends nothing, so that only Python's own time is left."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Send(self, *args, **kwargs):
        pass

    Ssend = Recv = Sendrecv = Sendrecv_replace = Send

    def Isend(self, *args, **kwargs):
        mpi = sys.modules.get("mpi4py.MPI")  # not imported here, because that would start MPI
        return mpi.REQUEST_NULL if mpi else Done()

    Issend = Irecv = Isendrecv = Isend


class Done:
    """A request without a message: waiting for it returns at once."""

    def Wait(self, *args):
        return True

    wait = Test = test = Wait


def python_seconds(all_reduce, n_ranks: int, n: int = 2000) -> float:
    """Seconds of rank 0's Python in one all-reduce of 8 bytes, without the messages."""
    comm, array = Silent(0, n_ranks), np.ones(1)
    return measure(lambda: all_reduce(comm, array), n, n_warmup=0)["median"]


def measure_ranks(comm, seconds: float) -> dict:
    """Seconds of each algorithm at each size, the competitors in turn; the slowest rank counts."""
    from lib.mpi import ring_all_reduce

    programs = {
        "naive": naive_all_reduce,
        "tree": tree_all_reduce,
        "ring": ring_all_reduce,
        "MPI": mpi_all_reduce,
        "ping": ping,
    }
    times: dict = {name: {} for name in programs}
    for n_bytes in SIZES:
        array = np.ones(n_bytes // 8)
        found: dict[str, list[float]] = {name: [] for name in programs}
        end = time.perf_counter() + seconds
        while comm.bcast(time.perf_counter() < end or len(found["MPI"]) < 7) and len(found["MPI"]) < 300:
            for name, run in programs.items():
                comm.Barrier()
                start = time.perf_counter()
                run(comm, array)
                found[name].append(comm.allreduce(time.perf_counter() - start, op=_max()))
        for name, values in found.items():
            halves = [value / 2 for value in values] if name == "ping" else values
            times[name][str(n_bytes)] = spread(halves[2:])
    return times


def _max():
    from mpi4py import MPI

    return MPI.MAX


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # set for the ranks that mpiexec starts
    parser.add_argument("--tiny", action="store_true", help="take a few seconds and write nothing")
    options = parser.parse_args()
    seconds = 0.02 if options.tiny else SIZE_S
    if options.inside:
        from mpi4py import MPI

        times = measure_ranks(MPI.COMM_WORLD, seconds)
        if MPI.COMM_WORLD.rank == 0:
            options.inside.write_text(json.dumps(times), encoding="utf-8")
        return
    results: dict = {"sizes_bytes": SIZES, "seconds": {}, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks in RANKS:
            out = Path(folder, f"{n_ranks}.json")
            tiny = ["--tiny"] if options.tiny else []
            said = mpirun(
                n_ranks, "python", "-m", "mpi4py", "-m", "lib.bench.mpi", "--inside", str(out), *tiny, timeout_s=300
            )
            if not out.exists():
                sys.exit(said)
            results["seconds"][str(n_ranks)] = json.loads(out.read_text())
    if options.tiny:
        print(
            json.dumps(
                {
                    n: {name: times["8"]["median"] for name, times in found.items()}
                    for n, found in results["seconds"].items()
                }
            )
        )
    else:
        record("mpi", results)


if __name__ == "__main__":
    main()
