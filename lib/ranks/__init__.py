"""Warm processes on which a function runs as the ranks of a small world, with gloo or with MPI.

``pool("gloo").run(fn, *args, n_ranks=4)`` returns the value of ``fn`` on each rank and a ledger of what each rank sent.
If a rank raises, dies, loops or waits for ever, the run ends with a `RankFailure` that says where each rank was.
"""

from lib.ranks.failure import RankFailure, RankState
from lib.ranks.journal import milestone
from lib.ranks.ledger import Ledger, Milestone, Record
from lib.ranks.pool import MAX_RANKS, Pool, Result, close_all, pool

__all__ = [
    "MAX_RANKS",
    "Ledger",
    "Milestone",
    "Pool",
    "RankFailure",
    "RankState",
    "Record",
    "Result",
    "close_all",
    "milestone",
    "pool",
]
