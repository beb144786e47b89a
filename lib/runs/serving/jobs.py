"""Jobs: what HTTP requests ask of the engine, and the text that their tokens become."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from lib.runs.serving.text import Answer
from lib.runs.serving.wire import Ask, Drawn, Submit

_NUMBERS = count()


@dataclass(frozen=True)
class Scored:
    """A token of an answer with its scores, and the character of the answer's text at which it begins."""

    drawn: Drawn
    offset: int


@dataclass
class Piece:
    """What one or several steps add to an answer.

    Attributes:
        index: The number of the answer in its job.
        text: New text, which may be empty.
        n_tokens: Tokens of the answer so far.
        finish_reason: "stop" or "length" if this is the end, else None.
        scores: Of the tokens of the new text, if the request wants them.
    """

    index: int
    text: str
    n_tokens: int
    finish_reason: str | None
    scores: list[Scored]

    def extend(self, later: "Piece") -> None:
        """Take in what a later step adds to the same answer."""
        self.text += later.text
        self.n_tokens, self.finish_reason = later.n_tokens, later.finish_reason
        self.scores += later.scores


@dataclass(eq=False)
class Job:
    """One HTTP request: the answers that it asks for, and what comes back.

    A piece that waits to be taken grows: a client that reads slowly gets the tokens of several steps at a time, and so
    do all clients of a server that is behind.

    Attributes:
        asks: What each answer is asked for.
        answers: The text of each.
        end_ids: Tokens that end an answer.
        grammar: What each must look like; None: anything.
        number: By which the engine's worker knows the job.
        n_tokens: Tokens of each answer so far.
        logprobs: Sum of the log-probabilities of each answer's tokens, if they come with scores.
        first_s: When the first token of each came, in seconds after ``arrived``; None before.
        held: Scores of each answer's tokens whose text is not certain yet.
        arrived: When it came, by ``time.perf_counter``.
        unfinished: Indices of the answers that have not ended.
        waiting: For each answer the piece that was not taken yet.
        error: Why no more pieces come; None while they do.
    """

    asks: list[Ask]
    answers: list[Answer]
    end_ids: frozenset[int] = frozenset()
    grammar: str | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))
    n_tokens: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    first_s: list[float | None] = field(init=False)
    held: list[list[Scored]] = field(init=False)
    arrived: float = field(default_factory=time.perf_counter)
    unfinished: set[int] = field(init=False)
    waiting: dict[int, Piece] = field(default_factory=dict)
    error: Exception | None = None
    _woken: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        n = len(self.asks)
        self.n_tokens, self.logprobs, self.first_s = [0] * n, [0.0] * n, [None] * n
        self.held, self.unfinished = [[] for _ in self.asks], set(range(n))

    @property
    def message(self) -> Submit:
        """The job, as the engine's worker gets it."""
        return Submit(self.number, self.asks, self.end_ids, self.grammar)

    def add(self, index: int, new: Sequence[int | Drawn], ends: bool) -> Piece:
        """Note new tokens of an answer, and let their piece wait. What follows a stop string is dropped.

        Args:
            index: Of the answer.
            new: The tokens.
            ends: Whether the engine ends the answer with the last one, other than by the number of tokens.
        """
        answer, text, reason = self.answers[index], "", None
        try:
            for one in new:
                text += self._text(index, one)
                if answer.is_stopped:
                    break
        except Exception:
            if text:  # what came before the fault
                self._leave(Piece(index, text, self.n_tokens[index], None, []))
            raise
        if ends or answer.is_stopped:
            reason = "stop"
        elif self.n_tokens[index] >= self.asks[index].n_new:
            reason = "length"
        if reason:
            text += answer.finish()
            reason = "stop" if answer.is_stopped else reason
            self.unfinished.discard(index)
        piece = Piece(index, text, self.n_tokens[index], reason, self._scores(index, bool(reason)))
        self._leave(piece)
        return piece

    def _leave(self, piece: Piece) -> None:
        """Let a piece wait."""
        if piece.index in self.waiting:
            self.waiting[piece.index].extend(piece)
        else:
            self.waiting[piece.index] = piece
        self._wake()

    def _text(self, index: int, new: int | Drawn) -> str:
        """Note a token; returns the text that is certain now."""
        self.n_tokens[index] += 1
        answer, token = self.answers[index], new.token if isinstance(new, Drawn) else new
        if isinstance(new, Drawn):
            self.logprobs[index] += new.logprob
            if token not in self.end_ids:
                self.held[index].append(Scored(new, answer.n_read))
        return "" if token in self.end_ids else answer.add(token)

    def _scores(self, index: int, is_end: bool) -> list[Scored]:
        """The scores that were held until now: those of the certain text, and at the end all but a stop string's."""
        answer, held = self.answers[index], self.held[index]
        if not held:
            return []
        takes_all = is_end and not answer.is_stopped
        found = held[:] if takes_all else [one for one in held if one.offset < answer.n_certain]
        del held[: len(found)]
        return found

    def fail(self, error: Exception) -> None:
        """End the job: no more pieces come."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def next(self) -> list[Piece]:
        """The pieces that wait, at least one.

        Raises:
            EngineFailed, AnswerFailed: there will be none.
        """
        await self._until(lambda: bool(self.waiting))
        pieces, self.waiting = [*self.waiting.values()], {}
        return pieces

    async def whole(self) -> list[Piece]:
        """The pieces that wait, once all answers are complete.

        Raises:
            EngineFailed, AnswerFailed: they won't be.
        """
        await self._until(lambda: not self.unfinished)
        return await self.next()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self.error:
                raise self.error
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
