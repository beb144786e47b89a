"""Warm processes on which a function runs as the ranks of a small world, with gloo or with MPI.

``pool("gloo").run(fn, *args, n_ranks=4)`` returns the value of ``fn`` on each rank and a ledger of what each rank sent.
If a rank raises, dies, loops or waits for ever, the run ends with a `RankFailure` that says where each rank was.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lib.ranks.journal import milestone

if TYPE_CHECKING:
    from lib.ranks.failure import RankFailure, RankState
    from lib.ranks.ledger import Ledger, Milestone, Record
    from lib.ranks.pools import MAX_RANKS, Pool, Result, close_all, pool

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


def __getattr__(name: str) -> Any:
    """What only a caller needs, imported when it is first asked for, so that a rank starts without it."""
    for module in ("ledger", "failure", "pools") if name in __all__ else ():
        found = vars(importlib.import_module(f"lib.ranks.{module}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
