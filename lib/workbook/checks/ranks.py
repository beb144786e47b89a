"""The ``ranks`` fixture: a check runs functions on warm ranks, within the check's own time limit."""

import contextlib
import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from lib.ranks.processes import PATIENCE
from lib.workbook.book import boundary, resolve
from lib.workbook.checks.alarm import paused
from lib.workbook.grading.cases import current_case
from lib.workbook.grading.mistakes import MISTAKE

if TYPE_CHECKING:
    from lib.ranks.pools import Result

SHOWN_LINES = 8  # of each rank's output
TOLD_S = 5.0  # before the check itself is ended, so that its ranks can still say where they are
DIAGNOSED_RUN_S = 6.0  # the limit of one run of ranks during a diagnosis


class Ranks:
    """The fixture's value: a function that runs another function on ranks.

    Args:
        limit_s: Seconds that each rank may compute in all runs of a check together.
        shows_all: Print everything that the ranks print, as ``pytest -s`` asks.
        is_quiet: The check runs for a diagnosis: briefly, and without printing.
    """

    def __init__(self, limit_s: float, shows_all: bool, is_quiet: bool):
        self.limit_s, self.shows_all, self.is_quiet, self.started = limit_s, shows_all, is_quiet, monotonic()

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        n_ranks: int = 4,
        backend: str = "gloo",
        time_limit_s: float | None = None,
    ) -> "Result":
        from lib.ranks import RankFailure, pool

        env = {resolve.VARIABLE: resolve.world(), MISTAKE: os.environ.get(MISTAKE, ""), "PYTHONBREAKPOINT": "0"}
        if boundary.role() == "child":
            env[boundary.CHILD] = resolve.world()
        if self.is_quiet:
            seconds = min(time_limit_s or DIAGNOSED_RUN_S, DIAGNOSED_RUN_S)
            return pool(backend).run(fn, *args, n_ranks=n_ranks, time_limit_s=seconds, env=env, show_output=False)
        with paused():  # starting processes does not count as the answer's time
            began = monotonic()
            pool(backend).ready()
            self.started += monotonic() - began
        left = max(1.0, self.limit_s - (monotonic() - self.started + TOLD_S) / PATIENCE)
        outputs: list[str] = []
        try:
            told: dict[str, Any] = {"about": current_case, "show_output": self.shows_all}
            result = pool(backend).run(fn, *args, n_ranks=n_ranks, time_limit_s=time_limit_s or left, env=env, **told)
            outputs = result.outputs
        except RankFailure as error:
            outputs = error.outputs
            raise
        finally:
            if not self.shows_all:
                _print_some(outputs)
        return result


def _print_some(outputs: list[str]) -> None:
    from lib.ranks.noise import shown_lines

    for rank, text in enumerate(outputs):
        for line in shown_lines(text, SHOWN_LINES):
            print(f"[rank {rank}] {line}")


def warm_up(module_texts: list[str]) -> None:
    """Begin to start the ranks that the tests will need.

    That takes seconds, and so does collecting the other tests meanwhile.
    """
    from lib.ranks import RankFailure, pool

    if any("ranks(" in text and 'backend="mpi"' not in text for text in module_texts):
        with contextlib.suppress(RankFailure):  # the check that needs the ranks will report it
            pool("gloo").warm()
