"""``pytest --mistakes --live N``: grades known mistakes as a learner's answers are graded, and times their diagnosis.

Each is run in a child of its own, check by check, within a learner's limits, until the first check fails.
"""

import os
import random
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from lib.workbook.book.catalog import Exercise
from lib.workbook.checks.child import Ended
from lib.workbook.checks.grader import Grader
from lib.workbook.checks.report import CheckReport
from lib.workbook.grading.cases import case
from lib.workbook.grading.mistakes import MISTAKE, Mistake, mistakes_of

SEED = 41
ENOUGH_S = 1.0  # from a failure to its sentence
OWN, OTHER, NONE = "named", "named as another", "not named"


class LiveItem(pytest.Item):
    """One known mistake in the place of a learner's answer."""

    def __init__(self, *, mistake: Mistake, tests: list[pytest.Function], checks: Grader, **kwargs: Any):
        super().__init__(**kwargs)
        self.mistake, self.tests, self.checks = mistake, tests, checks

    def runtest(self) -> None:
        os.environ[MISTAKE] = self.mistake.key
        try:
            why, failed, said, seconds = self._graded()
        finally:
            os.environ[MISTAKE] = ""
            self.checks.close_child()
        what = NONE if not said else OWN if said == self.mistake.sentence else OTHER
        self.user_properties.append(("live", (what, round(seconds, 3), self.nodeid, failed, why or said)))
        assert what != OTHER, f"{failed}: {self.mistake.sentence!r} is taken for {said!r}"

    def _graded(self) -> tuple[str, str, str, float]:
        """Why no mistake was named, the check that failed, the sentence, and seconds from failure to sentence."""
        for check in self.tests:
            failed_at, said, why = 0.0, "", ""
            case("")  # as before every check of a learner's
            for sent in self.checks.sent_by_child(check, self.mistake.module, self.mistake.key, "reference"):
                if isinstance(sent, Ended):
                    return sent.why, check.name, "", 0.0
                reports = [self.config.hook.pytest_report_from_serializable(config=self.config, data=d) for d in sent]
                for told in (CheckReport.of(one) for one in reports if one.failed):
                    failed_at = failed_at or monotonic()
                    rows = dict(told.rows) if told else {}
                    said, why = rows.get("looks like", ""), rows.get("not named", "not diagnosed")
            if failed_at:
                return "" if said else why, check.name, said, monotonic() - failed_at
        raise AssertionError(f"no check catches the mistake: {self.mistake.sentence}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def items(tests_by_exercise: dict[Exercise, list[pytest.Function]], checks: Grader, n: int) -> list[LiveItem]:
    """``n`` mistakes chosen at random, always the same ones; all of them if ``n`` is 0."""
    every = [(tests, wrong) for e, tests in tests_by_exercise.items() for wrong in mistakes_of(e.module, e.name)]
    chosen = sorted(random.Random(SEED).sample(range(len(every)), min(n or len(every), len(every))))
    return [
        LiveItem.from_parent(
            tests[0].parent or tests[0].session,
            name=f"{wrong.name}[{wrong.label}]",
            mistake=wrong,
            tests=[t for t in tests if not t.get_closest_marker("skip")],
            checks=checks,
        )
        for tests, wrong in (every[i] for i in chosen)
    ]


def summary(reports: list[pytest.TestReport]) -> list[str]:
    """How many were named, how long that took, and each that was not named, or late."""
    found: list[Any] = [value for one in reports for key, value in one.user_properties if key == "live"]
    if not found:
        return []
    counts, seconds = Counter(what for what, *_ in found), sorted(s for _, s, *_ in found)
    middle, most = (seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.99))
    late = sum(s > ENOUGH_S for s in seconds)
    return [
        f"{len(found)} mistakes: " + ", ".join(f"{counts[what]} {what}" for what in (OWN, OTHER, NONE)),
        f"from failure to sentence: {middle:.2f} s (median), {most:.2f} s (99 %), longer than 1 s: {late}",
        *(
            f"{what}, {s:.1f} s: {at}, {check}: {why}"
            for what, s, at, check, why in found
            if what != OWN or s > ENOUGH_S
        ),
    ]
