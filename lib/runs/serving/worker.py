"""The loop that takes the engine's steps, at the engine's end of a connection to the HTTP side.

Jobs and cancellations reach it between two steps; a report of each step goes back, with the tokens of all answers.
"""

import gc
import queue
import threading
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lib.given.models.serving import Request
from lib.runs.serving.forms import Form, Forms
from lib.runs.serving.wanted import Wanted, form_of
from lib.runs.serving.wire import (
    AnswerFailed,
    Cancel,
    Drawn,
    EngineFailed,
    EngineUnhealthy,
    QueueFull,
    Report,
    Submit,
)


class Engine(Protocol):
    """What the loop needs of chapter 21's ``Engine``.

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

        An exception in place of a token ends only this request's job.
        """

    def abandon(self) -> list[Request]:
        """After a step that raised: drop the requests that took part in it, free their blocks, and return them."""


MOST_FAILURES = 3
"""After so many failed steps in a row the engine is unhealthy: it is not the requests that are at fault."""


class Closed(Exception):
    """The HTTP side has closed its end of the connection."""


@dataclass
class Place:
    """Where an answer belongs: its job, its index there, how many tokens may still come, and which of them end it."""

    job: int
    index: int
    n_left: int
    end_ids: frozenset[int]


class Worker:
    """Takes the engine's steps as long as it has requests, and ends when the other end of the connection is closed.

    Args:
        engine: Chapter 21's, or anything like it.
        max_waiting: Requests that may wait for room in the engine.
        connection: To the HTTP side's ``Link``.
        forms: Makes the forms that answers must have.
        counts: Counters that the engine adds to; they are reported and begin again at 0.

    Attributes:
        unhealthy: Why it takes no more requests; None while it does.
    """

    def __init__(
        self, engine: Engine, max_waiting: int, connection: Connection, forms: Forms, counts: Counter[str] | None = None
    ) -> None:
        self.engine, self.max_waiting, self.connection, self.forms = engine, max_waiting, connection, forms
        self.counts = Counter[str]() if counts is None else counts
        self.unhealthy: EngineUnhealthy | None = None
        self._n_failures = 0  # steps in a row, up to the last one
        self._places: dict[Request, Place] = {}
        self._jobs: dict[int, dict[int, Request]] = {}
        self._inbox: queue.SimpleQueue[Submit | Cancel | None] = queue.SimpleQueue()
        self._report = Report()

    def run(self) -> None:
        """Work until there is nobody to work for."""
        gc.freeze()  # a collection would look at every object of PyTorch's while all requests wait
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        try:
            self._send()
            self._work()
        except Closed:
            pass
        except Exception as error:
            traceback.print_exc()
            self._report.fault = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            with suppress(Closed):
                self._send()
        finally:
            gc.unfreeze()  # or Triton would report all of its types as leaks when the process ends

    def _listen(self) -> None:
        """Take messages off the connection at once, so that the HTTP side never waits for a step."""
        with suppress(EOFError, OSError):
            while True:
                self._inbox.put(self.connection.recv())
        self._inbox.put(None)

    def _work(self) -> None:
        while True:
            while not (self._inbox.empty() and self.engine.is_busy):  # an idle engine waits here
                message = self._inbox.get()
                if message is None:
                    return
                if isinstance(message, Submit):
                    self._accept(message)
                else:
                    self._drop(message.job, message.index)
                self._send()
            self._step()
            self._send()

    def _send(self) -> None:
        """Report what has changed; waits while the HTTP side is far behind."""
        scheduler, report = self.engine.scheduler, self._report
        report.levels = {
            "waiting": self._n_waiting, "running": len(scheduler.running), "blocks_free": scheduler.n_free
        }  # fmt: skip
        report.counts = dict(self.counts)
        self.counts.clear()
        self._report = Report()
        try:
            self.connection.send(report)
        except OSError:
            raise Closed from None

    def _step(self) -> None:
        try:
            new = self.engine.step()
        except Exception as error:
            self._end_requests(error)
        else:
            self._n_failures = 0
            for request, token in new:
                self._note(request, token)

    def _note(self, request: Request, token: Any) -> None:
        """Report a new token, and end its answer if this is the last one."""
        place = self._places.get(request)
        if place is None:  # its job has failed in this step
            return
        if isinstance(token, Exception):
            self._report.ended.append((place.job, self._give_up(place.job, token)))
            return
        form = form_of(request)
        place.n_left -= 1
        ends = (token.token if isinstance(token, Drawn) else token) in place.end_ids or bool(form and form.is_over)
        self._report.new.append((place.job, place.index, token, ends))
        if ends or place.n_left == 0:
            self._drop(place.job, place.index)  # the engine itself may have ended it

    def _end_requests(self, error: Exception) -> None:
        """End the requests of a step that failed as a whole; after too many such steps in a row, end all."""
        traceback.print_exc()
        try:
            dropped = self.engine.abandon()
        except Exception as second:  # nobody knows what state the engine is in
            raise error from second
        self._n_failures += 1
        self.counts["failed_steps"] += 1
        cause = f"{type(error).__name__}: {error}"
        ended: Exception = AnswerFailed(f"the engine's step failed: {cause}")
        jobs = {self._places[request].job for request in dropped if request in self._places}
        if self._n_failures >= MOST_FAILURES:
            self.unhealthy = EngineUnhealthy(f"the last {self._n_failures} steps of the engine failed: {cause}")
            self._report.fault = ended = self.unhealthy
            jobs = set(self._jobs)
        for job in jobs:
            self._drop(job)
        self._report.ended += [(job, ended) for job in jobs]

    def _accept(self, asked: Submit) -> None:
        """Hand all requests of a job to the engine, or none."""
        refused: Exception | None = None
        try:
            if self.unhealthy:
                raise self.unhealthy
            n_waiting = self._n_waiting
            if n_waiting + len(asked.asks) > self.max_waiting:
                raise QueueFull(f"{n_waiting} requests wait already, and the queue holds {self.max_waiting}")
            made, self._jobs[asked.job] = self._requests(asked), {}
            for index, request in enumerate(made):
                self.engine.submit(request)
                self._places[request] = Place(asked.job, index, request.max_new_tokens, asked.end_ids)
                self._jobs[asked.job][index] = request
        except ValueError as error:
            refused = ValueError(str(error))  # whatever its class: this one can be sent
        except (QueueFull, EngineUnhealthy) as error:
            refused = error
        except Exception as error:
            refused = self._give_up(asked.job, error)
        if refused:
            self._drop(asked.job)
        self._report.accepted.append((asked.job, refused))

    def _requests(self, asked: Submit) -> list[Wanted]:
        forms: list[Form | None] = [None] * len(asked.asks)
        if asked.grammar is not None:
            forms = [*self.forms.make(asked.grammar, len(forms))]
        made = list[Wanted]()
        for ask, form in zip(asked.asks, forms, strict=True):
            made.append(Wanted(
                ask.tokens, ask.n_new, ask.temperature, ask.seed, top_k=ask.top_k, top_p=ask.top_p, n_top=ask.n_top,
                form=form, first=None if ask.first is None else made[ask.first],
            ))  # fmt: skip
        return made

    def _drop(self, job: int, index: int | None = None) -> None:
        """Drop what is left of a job, or one of its answers."""
        answers = self._jobs.get(job, {})
        for i in [*answers] if index is None else [index]:
            if i in answers:
                request = answers.pop(i)
                del self._places[request]
                self.engine.cancel(request)
        if not answers:
            self._jobs.pop(job, None)

    def _give_up(self, job: int, error: Exception) -> AnswerFailed:
        """Drop a job with which something is wrong; returns what to tell its client."""
        traceback.print_exception(error)
        self._drop(job)
        return AnswerFailed(f"this answer failed: {type(error).__name__}: {error}")

    @property
    def _n_waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + getattr(self.engine, "n_held", 0)
