"""What the HTTP side and the engine's process tell each other. Nothing here imports PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

MOST_LIKELY = 20
"""The likeliest tokens that a client may ask for at each place."""


class EngineFailed(RuntimeError):
    """The engine raised an exception or its process ended, and it takes no more steps."""


class EngineUnhealthy(EngineFailed):
    """Too many steps failed in a row, or one takes too long; the server stays up to say so."""


class AnswerFailed(RuntimeError):
    """Something went wrong with one answer; the engine goes on with the others."""


class QueueFull(RuntimeError):
    """Too many requests wait; the message has the numbers."""


class Drawn(NamedTuple):
    """A new token and the model's own scores, before temperature, top-k and top-p.

    Attributes:
        token: The token.
        logprob: Natural logarithm of its probability.
        top: The likeliest tokens and their log-probabilities, the likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Ask:
    """One answer that a job asks for.

    Attributes:
        tokens: The prompt.
        n_new, temperature, seed, top_k, top_p: As in the engine's ``Request``.
        n_top: Each token comes as a ``Drawn`` with so many likeliest tokens; None: as its number alone.
        first: Index of the job's answer to the same prompt, of whose cache this one is a fork; None if it has its own.
    """

    tokens: list[int]
    n_new: int
    temperature: float
    seed: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    n_top: int | None = None
    first: int | None = None


@dataclass(frozen=True)
class Submit:
    """A job for the engine: all of its answers are accepted, or none.

    Attributes:
        job: The number by which both sides know it.
        asks: What it asks for.
        end_ids: Tokens that end an answer.
        grammar: llguidance's description of what each answer must look like; None: anything.
    """

    job: int
    asks: list[Ask]
    end_ids: frozenset[int] = frozenset()
    grammar: str | None = None


@dataclass(frozen=True)
class Cancel:
    """Drop what is left of a job, or of the answer with this index."""

    job: int
    index: int | None = None


@dataclass
class Report:
    """What one step, or one message to the engine, has changed.

    Attributes:
        accepted: Jobs, each with the reason why the engine refuses it, or None.
        new: Tokens: job, index of the answer, the token, and whether it ends the answer, other than by its number.
        ended: Jobs that go no further, each with the reason.
        fault: Why the engine takes no more steps, or no more requests.
        counts: By how much counters of the metrics grow.
        levels: Values of gauges of the metrics.
    """

    accepted: list[tuple[int, Exception | None]] = field(default_factory=list)
    new: list[tuple[int, int, int | Drawn, bool]] = field(default_factory=list)
    ended: list[tuple[int, Exception]] = field(default_factory=list)
    fault: EngineFailed | None = None
    counts: dict[str, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)

    @classmethod
    def joined(cls, reports: Sequence[Self]) -> Self:
        """One report that says what some in a row do."""
        whole = cls()
        for report in reports:
            whole.accepted += report.accepted
            whole.new += report.new
            whole.ended += report.ended
            whole.fault = whole.fault or report.fault
            for name, n in report.counts.items():
                whole.counts[name] = whole.counts.get(name, 0) + n
            whole.levels |= report.levels
        return whole

    def answers(self) -> dict[tuple[int, int], tuple[list[int | Drawn], bool]]:
        """The new tokens of each answer, by its job and index, and whether the last of them ends it."""
        found = dict[tuple[int, int], tuple[list[int | Drawn], bool]]()
        for job, index, token, ends in self.new:
            tokens = found[job, index][0] if (job, index) in found else []
            tokens.append(token)
            found[job, index] = tokens, ends
        return found
