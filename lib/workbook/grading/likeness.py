"""Finds the known mistake that an answer makes: the one that fails the same checks in the same way.

A mistake is a candidate if it fails the failing check just as the answer does: on the same case, with the same problem
and the same numbers. It is dropped if it fails another check that the answer passes.
If several candidates with different sentences remain, only those that agree with the answer on every check stay.
If that does not decide either, the report names no mistake: no sentence is better than a wrong one.

A single candidate that shows the answer's own wrong numbers is named even if the two differ on another check.
An answer often holds two mistakes at once, and no known mistake agrees with both of them everywhere; two answers
hardly have the same wrong numbers by chance, so the sentence is right about the check that the learner looks at.
A failure without numbers (an exception, a wrong type) is weaker evidence: there the candidate must agree on every
check.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lib.workbook.grading.answers import further_apart, same_answer
from lib.workbook.grading.expect import Wrong

C = TypeVar("C")  # a check, of which only the identity matters here
M = TypeVar("M", bound="Named")
FOLDERS = re.compile(r"(?<![\w.])/\S+/")  # of a file in a message: a check that runs again has a new one
CONFIRMED_BY = 12  # once a single sentence remains, this many other checks are enough to confirm it
FEW = 4  # and this many runs of the answer if the record speaks for the sentence, too, or if time is short


@dataclass(frozen=True)
class Outcome:
    """How a check ended: ``error`` is None if it passed, and ``case`` is the last case that it named."""

    error: BaseException | None
    case: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None

    @property
    def is_telling(self) -> bool:
        """Whether the failure shows the answer's own numbers.

        Two answers hardly have the same wrong numbers by chance.
        """
        return isinstance(self.error, Wrong) and self.error.answer is not None

    def is_like(self, other: "Outcome") -> bool:
        """Whether two answers failed in the same way, or both passed."""
        a, b = self.error, other.error
        if a is None or b is None:
            return a is b
        if isinstance(a, Wrong) and isinstance(b, Wrong):
            if (a.case, _bare(a.problem)) != (b.case, _bare(b.problem)):
                return False
            if a.answer is None and b.answer is None:
                return a.rows == b.rows
            return same_answer(_bare(a.answer), _bare(b.answer)) and not further_apart(a.answer, b.answer, b.gap)
        if isinstance(a, Wrong) or isinstance(b, Wrong) or self.case != other.case:
            return False
        return type(a) is type(b) and raised(a) == raised(b) != ""


def raised(error: BaseException) -> str:
    """What an error that is no `Wrong` says; two answers that fail with the same words fail in the same way.

    Empty if it says nothing of the answer: ranks that ran out of time, or an exception that could not be sent.
    """
    if not hasattr(error, "per_rank"):
        return f"{type(error).__name__}: {_head(error)}"
    kind = getattr(error, "kind", "")
    if kind == "raised":
        return _raised_on_a_rank(error)
    parted = ("deadlock", "died")  # when the ranks' calls do not match, chance decides between these two
    return _without_places(error) if kind in parted else ""


def _head(error: BaseException) -> str:
    return FOLDERS.sub("/", (str(error).splitlines() or [""])[0][:200])


def _bare(what: Any) -> Any:
    """A text without the folders of the files in it; anything else as it is."""
    return FOLDERS.sub("/", what) if isinstance(what, str) else what


def _raised_on_a_rank(error: BaseException) -> str:
    """Type and first line of the exception that ended a run of ranks, without addresses.

    Empty if it could not be sent.
    """
    inner = getattr(error, "error", None)
    return "" if inner is None else re.sub(r"0x[0-9a-f]+", "", f"{type(inner).__name__}: {_head(inner)}")


def _without_places(error: BaseException) -> str:
    """The first line of a deadlock's report, without places in the code and without seconds."""
    return re.sub(r" \([^()]*:\d+\)|, for \d+ s| \(the limit is [^)]*\)", "", str(error).partition("\n")[0])


class Named(Protocol):
    """A mistake: two with the same sentence are the same to a learner."""

    @property
    def key(self) -> str: ...

    @property
    def sentence(self) -> str: ...


def looks_like(
    failing: C,
    first: Outcome,
    others: Sequence[C],
    mistakes: Sequence[M],
    try_answer: Callable[[C], Outcome],
    try_mistake: Callable[[M, C], Outcome],
    confirmed_by: int = CONFIRMED_BY,
    on_certain: Callable[[str], None] = lambda sentence: None,
) -> str:
    """The sentence of the mistake that the answer makes; empty if no mistake is certain.

    Args:
        failing: The check that the answer failed first.
        first: How it failed.
        others: Other checks of the exercise, which tell the candidates apart.
        mistakes: The known mistakes of the exercise, each with a ``key`` and a ``sentence``.
        try_answer: Runs a check on the answer.
        try_mistake: Runs a check on a mistake.
        confirmed_by: How many checks to try although no two sentences agree with the answer on all of them.
            None are needed if the answer is itself one of ``mistakes``: it agrees with itself on every check.
        on_certain: Called before each other check: with the sentence that would be returned if no more checks were
            tried, or with "".
    """
    candidates = [m for m in mistakes if try_mistake(m, failing).is_like(first)]
    unlike: set[str] = set()
    for n_tried, check in enumerate(others if candidates else []):
        every = {m.sentence for m in candidates}
        agreeing = {m.sentence for m in candidates if m.key not in unlike}
        if n_tried >= confirmed_by and len(agreeing) <= 1:
            break
        certain = every if first.is_telling and len(every) == 1 else agreeing
        on_certain(*certain if len(certain) == 1 else [""])
        answer = try_answer(check)
        outcomes = {m.key: try_mistake(m, check) for m in candidates}
        candidates = [m for m in candidates if outcomes[m.key].passed or not answer.passed]
        unlike |= {m.key for m in candidates if not outcomes[m.key].is_like(answer)}
        if not candidates:
            return ""
    if len({m.sentence for m in candidates}) > 1 or not first.is_telling:
        candidates = [m for m in candidates if m.key not in unlike]
    sentences = {m.sentence for m in candidates}
    return sentences.pop() if len(sentences) == 1 else ""
