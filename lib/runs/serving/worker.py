"""The thread that takes the engine's steps.

Requests and cancellations reach it between two steps; text goes back to the event loop.
"""

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lib.given.models.serving import Request
from lib.runs.serving.metrics import Metrics
from lib.runs.serving.text import Answer
from lib.runs.serving.wanted import Drawn, first_of, form_of


class Engine(Protocol):
    """What the thread needs of chapter 21's ``Engine``.

    Attributes:
        scheduler: Has ``waiting``, ``running`` and ``n_free``.
        n_held: Requests that wait for another's prompt; an engine without forks needs none.
    """

    scheduler: Any

    @property
    def is_busy(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request: Request) -> bool: ...

    def step(self) -> list[tuple[Request, Any]]:
        """The new tokens, each with its request, and as a ``Drawn`` if the request wants scores.

        An exception in place of a token ends only this request.
        """

    def abandon(self) -> list[Request]:
        """After a step that raised: drop the requests that took part in it, free their blocks, and return them."""


SWITCH_S = 2e-4
"""How long a thread may hold Python while another one wants it; by default 5 ms, longer than a step of the engine."""
MOST_FAILURES = 3
"""After so many failed steps in a row the engine is unhealthy: it is not the requests that are at fault."""


class EngineFailed(RuntimeError):
    """The engine raised an exception, and takes no more steps."""


class EngineUnhealthy(EngineFailed):
    """Too many steps failed in a row; the server stays up to say so, and takes no more requests."""


class AnswerFailed(RuntimeError):
    """Something went wrong with one answer; the engine goes on with the others."""


class QueueFull(RuntimeError):
    """Too many requests wait; the message has the numbers."""


@dataclass(frozen=True)
class Scored:
    """A token of an answer with its scores, and the character of the answer's text at which it begins."""

    drawn: Drawn
    offset: int


@dataclass(frozen=True)
class Piece:
    """What a step adds to an answer.

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
    scores: Sequence[Scored] = ()


@dataclass(eq=False)
class Job:
    """One HTTP request: the answers that it asks for, and what comes back.

    Attributes:
        requests: A request for each answer.
        answers: The text of each.
        end_ids: Tokens that end an answer.
        n_tokens: Tokens of each answer so far.
        logprobs: Sum of the log-probabilities of each answer's tokens, if they come with scores.
        first_s: When the first token of each came, in seconds after ``arrived``.
        held: Scores of each answer's tokens whose text is not certain yet.
        arrived: When it came, by ``time.perf_counter``.
        pieces: What the steps add, or the exception that ends all.
    """

    requests: list[Request]
    answers: list[Answer]
    end_ids: frozenset[int] = frozenset()
    n_tokens: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    first_s: list[float] = field(init=False)
    held: list[list[Scored]] = field(init=False)
    arrived: float = field(default_factory=time.perf_counter)
    pieces: asyncio.Queue = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.n_tokens = [0] * len(self.requests)
        self.logprobs, self.first_s = [0.0] * len(self.requests), [0.0] * len(self.requests)
        self.held = [[] for _ in self.requests]

    def add(self, index: int, new: int | Drawn) -> Piece:
        """Note a new token of an answer."""
        self.n_tokens[index] += 1
        answer, reason = self.answers[index], None
        token = new.token if isinstance(new, Drawn) else new
        if isinstance(new, Drawn):
            self.logprobs[index] += new.logprob
            if token not in self.end_ids:
                self.held[index].append(Scored(new, answer.n_read))
        text = "" if token in self.end_ids else answer.add(token)
        form = form_of(self.requests[index])
        if token in self.end_ids or answer.is_stopped or (form and form.is_over):
            reason = "stop"
        elif self.n_tokens[index] >= self.requests[index].max_new_tokens:
            reason = "length"
        if reason:
            text += answer.finish()
            reason = "stop" if answer.is_stopped else reason
        return Piece(index, text, self.n_tokens[index], reason, self._scores(index, bool(reason)))

    def _scores(self, index: int, is_end: bool) -> list[Scored]:
        """The scores that were held until now: those of the certain text, and at the end all but a stop string's."""
        answer, held = self.answers[index], self.held[index]
        takes_all = is_end and not answer.is_stopped
        found = held[:] if takes_all else [one for one in held if one.offset < answer.n_certain]
        del held[: len(found)]
        return found

    async def next(self) -> Piece:
        """The next piece of any answer.

        Raises:
            EngineFailed, AnswerFailed: there will be none.
        """
        piece = await self.pieces.get()
        if isinstance(piece, Exception):
            raise piece
        return piece


class Worker:
    """Takes the engine's steps in a thread of its own, as long as it has requests.

    Args:
        engine: Chapter 21's, or anything like it.
        max_waiting: Requests that may wait for room in the engine.
        metrics: Counts what happens.

    Attributes:
        error: Why the engine takes no more steps and the server ends; None while it works.
        unhealthy: Why the server takes no more requests, although it stays up; None while it does.
    """

    def __init__(self, engine: Engine, max_waiting: int, metrics: Metrics) -> None:
        self.engine, self.max_waiting, self.metrics = engine, max_waiting, metrics
        self.error: EngineFailed | None = None
        self.unhealthy: EngineUnhealthy | None = None
        self._n_failures = 0  # steps in a row, up to the last one
        self._jobs: dict[Request, tuple[Job, int]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between a failure and what is put into the inbox
        self._accepting: dict[Job, asyncio.Future] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin, in the event loop to which all text goes."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_S)
        self._count()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._inbox.put(None)
        self._thread.join()

    async def submit(self, job: Job) -> None:
        """Hand all requests of a job to the engine, or none.

        Raises:
            ValueError: the engine refuses one; the message says why.
            AnswerFailed: it cannot take one, for another reason.
            QueueFull: too many wait.
            EngineFailed: the engine takes no more steps.
        """
        accepted = self._loop.create_future()
        with self._lock:
            if failed := self.error or self.unhealthy:
                raise failed
            self._accepting[job] = accepted
            self._inbox.put(lambda: self._accept(job))
        await accepted

    def cancel(self, job: Job) -> None:
        """Drop what is left of a job. Its blocks return before the next step."""
        self._inbox.put(lambda: self._drop(job))

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            traceback.print_exc()
            self._fail(error)

    def _work(self) -> None:
        while True:
            while not (self._inbox.empty() and self.engine.is_busy):  # an idle engine waits here
                command = self._inbox.get()
                if command is None:
                    return
                command()
                self._count()
            self._step()
            self._count()

    def _step(self) -> None:
        try:
            new = self.engine.step()
        except Exception as error:
            self._end_requests(error)
        else:
            self._n_failures = 0
            self._deliver(new)

    def _end_requests(self, error: Exception) -> None:
        """End the requests of a step that failed as a whole; after too many such steps in a row, end all."""
        traceback.print_exc()
        try:
            dropped = self.engine.abandon()
        except Exception as second:  # nobody knows what state the engine is in
            raise error from second
        self._n_failures += 1
        self.metrics.failed_steps.inc()
        cause = f"{type(error).__name__}: {error}"
        ended: Exception = AnswerFailed(f"the engine's step failed: {cause}")
        jobs = {self._jobs[request][0] for request in dropped if request in self._jobs}
        if self._n_failures >= MOST_FAILURES:
            self.unhealthy = EngineUnhealthy(f"the last {self._n_failures} steps of the engine failed: {cause}")
            ended, jobs = self.unhealthy, {job for job, _ in self._jobs.values()}
        for job in jobs:
            self._drop(job)
        self._call(_send, [(job, ended) for job in jobs])

    def _accept(self, job: Job) -> None:
        try:
            if self.unhealthy:
                raise self.unhealthy
            n_waiting = self._n_waiting
            if n_waiting + len(job.requests) > self.max_waiting:
                raise QueueFull(f"{n_waiting} requests wait already, and the queue holds {self.max_waiting}")
            for index, request in enumerate(job.requests):
                self.engine.submit(request)
                self._jobs[request] = job, index
        except (ValueError, QueueFull, EngineUnhealthy) as error:
            self._drop(job)
            self._resolve(job, error)
        except Exception as error:
            self._resolve(job, self._give_up(job, error))
        else:
            for n_tokens in (len(request.tokens) for request in job.requests if first_of(request) is None):
                self.metrics.prompt_tokens.inc(n_tokens)
                self.metrics.prompt_length.observe(n_tokens)
            self._resolve(job, None)

    def _resolve(self, job: Job, error: Exception | None) -> None:
        accepted = self._accepting.pop(job)
        self._call(_settle, accepted, error)

    def _drop(self, job: Job) -> None:
        for request in job.requests:
            if self._jobs.pop(request, None):
                self.engine.cancel(request)

    def _give_up(self, job: Job, error: Exception) -> AnswerFailed:
        """Drop a job with which something is wrong; returns what to tell its client."""
        traceback.print_exception(error)
        self._drop(job)
        return AnswerFailed(f"this answer failed: {type(error).__name__}: {error}")

    def _deliver(self, new: list[tuple[Request, Any]]) -> None:
        """Send the pieces of a step to their jobs, in one call for all."""
        self.metrics.generated_tokens.inc(len(new))
        pieces: list[tuple[Job, Piece | Exception]] = []
        for request, token in new:
            if request not in self._jobs:  # another answer of its job has failed in this step
                continue
            job, index = self._jobs[request]
            try:
                if isinstance(token, Exception):
                    raise token
                piece = job.add(index, token)
            except Exception as error:
                pieces.append((job, self._give_up(job, error)))
                continue
            if piece.n_tokens == 1:
                job.first_s[index] = time.perf_counter() - job.arrived
                self.metrics.time_to_first_token.observe(job.first_s[index])
            if piece.finish_reason:
                self.metrics.observe_end(piece.n_tokens, time.perf_counter() - job.arrived, job.first_s[index])
                del self._jobs[request]
                self.engine.cancel(request)  # does nothing for an answer that its last token ended
            pieces.append((job, piece))
        self._count()
        self._call(_send, pieces)

    def _fail(self, error: Exception) -> None:
        """End all requests: there is no next step."""
        failed = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
        with self._lock:
            self.error = failed
            accepting, self._accepting = list(self._accepting.values()), {}
        jobs = {job for job, _ in self._jobs.values()}
        self._jobs.clear()
        for accepted in accepting:
            self._call(_settle, accepted, failed)
        self._call(_send, [(job, failed) for job in jobs])

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if not self._loop.is_closed():
                raise

    @property
    def _n_waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + getattr(self.engine, "n_held", 0)

    def _count(self) -> None:
        scheduler = self.engine.scheduler
        self.metrics.waiting.set(self._n_waiting)
        self.metrics.running.set(len(scheduler.running))
        self.metrics.blocks_free.set(scheduler.n_free)


def _settle(accepted: asyncio.Future, error: Exception | None) -> None:
    if accepted.done():  # the client has gone
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _send(pieces: list[tuple[Job, Piece | Exception]]) -> None:
    for job, piece in pieces:
        job.pieces.put_nowait(piece)
