"""The HTTP side's end of the connection to the engine's worker, which usually runs in a process of its own."""

import asyncio
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from lib.runs.serving.jobs import Job
from lib.runs.serving.metrics import Metrics
from lib.runs.serving.process import describe_exit
from lib.runs.serving.wire import AnswerFailed, Cancel, Drawn, EngineFailed, EngineUnhealthy, Report

SWITCH_S = 2e-4
"""How long a thread may hold Python while another one wants it; by default 5 ms.
Prompts become tokens in threads beside the event loop."""
MOST_REPORTS = 64  # that are read before the event loop's other work
END_S = 20.0  # in which the engine's process should have ended by itself
PATIENCE_S = 2.0  # in which the end of another rank is noticed after the engine has failed, perhaps because of it


class Link:
    """Sends jobs to the engine's worker, and gives each the text that comes back.

    Args:
        connection: To a ``Worker``.
        max_waiting: Requests that may wait for room in the engine.
        metrics: Counts what happens.
        processes: The worker's first, then those of the engine's other ranks; none if it runs in a thread of this one.
        stall_s: Seconds in which an engine that works should have reported a step.

    Attributes:
        error: Why the engine takes no more steps and the server ends; None while it works.
        unhealthy: Why the server takes no more requests, although it stays up; None while it does.
    """

    def __init__(
        self, connection: Connection, max_waiting: int, metrics: Metrics,
        processes: Sequence[BaseProcess] = (), stall_s: float = 60.0,
    ) -> None:  # fmt: skip
        self.connection, self.max_waiting, self.metrics, self.processes = connection, max_waiting, metrics, processes
        self.stall_s = stall_s
        self._expected_since: float | None = None  # a report is due: something was sent, or requests run
        self.error: EngineFailed | None = None
        self.unhealthy: EngineUnhealthy | None = None
        self._jobs: dict[int, Job] = {}
        self._accepting: dict[int, asyncio.Future[None]] = {}

    def start(self) -> None:
        """Begin, in the running event loop."""
        sys.setswitchinterval(SWITCH_S)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.connection.fileno(), self._read)
        for process in self.processes[1:]:
            self._loop.add_reader(process.sentinel, self._lose_rank)

    def stop(self) -> None:
        """End the worker after the step that it is in."""
        self._close()
        for process in self.processes:
            process.join(END_S)
            process.kill()

    def _close(self) -> None:
        """Listen to the worker and the other ranks no more, which a worker that works takes for the end."""
        if not self.connection.closed:
            for source in (self.connection.fileno(), *(process.sentinel for process in self.processes[1:])):
                self._loop.remove_reader(source)
            self.connection.close()

    @property
    def stalled(self) -> EngineUnhealthy | None:
        """Why nobody should wait for the engine, if it has been silent for too long; the next report ends that."""
        silent_s = 0.0 if self._expected_since is None else time.monotonic() - self._expected_since
        if silent_s < self.stall_s:
            return None
        return EngineUnhealthy(f"the engine has taken no step for {silent_s:.0f} s, although it has requests")

    async def submit(self, job: Job) -> None:
        """Hand all requests of a job to the engine, or none.

        Raises:
            ValueError: the engine refuses one; the message says why.
            AnswerFailed: it cannot take one, for another reason.
            QueueFull: too many wait.
            EngineFailed: the engine takes no more steps.
        """
        if failed := self.error or self.unhealthy:
            raise failed
        accepted = self._loop.create_future()
        self._accepting[job.number], self._jobs[job.number] = accepted, job
        try:
            self._tell(job.message)
            await accepted
        except BaseException:
            self._jobs.pop(job.number, None)
            raise
        finally:
            self._accepting.pop(job.number, None)

    def cancel(self, job: Job) -> None:
        """Drop what is left of a job. Its blocks return before the next step."""
        self._jobs.pop(job.number, None)
        if job.unfinished:
            self._tell(Cancel(job.number))

    def _tell(self, message: object) -> None:
        """Send a message, for which the worker's listener never lets us wait long."""
        self._expected_since = self._expected_since or time.monotonic()
        try:
            if not self.connection.closed:
                self.connection.send(message)
        except OSError:
            self._lose()

    def _read(self) -> None:
        """Take the reports that have come, together: a side that is behind has less to do for each of their tokens."""
        reports, is_lost = list[Report](), False
        try:
            while not reports or (len(reports) < MOST_REPORTS and self.connection.poll()):
                reports.append(self.connection.recv())
        except (EOFError, OSError):
            is_lost = True
        if reports:
            self._take(Report.joined(reports))
        if is_lost and not self.connection.closed:
            self._lose()

    def _take(self, report: Report) -> None:
        self.metrics.note(report.counts, report.levels)
        for number, refused in report.accepted:
            if (accepted := self._accepting.get(number)) and not accepted.done():
                if refused is None:
                    self._count_prompts(self._jobs[number])
                    accepted.set_result(None)
                else:
                    accepted.set_exception(refused)
        self.metrics.generated_tokens.inc(len(report.new))
        for (number, index), (tokens, ends) in report.answers().items():
            if job := self._jobs.get(number):
                self._add(job, index, tokens, ends)
        for number, error in report.ended:
            if job := self._jobs.pop(number, None):
                job.fail(error)
        if report.fault and not self._lose_rank(PATIENCE_S):
            self._fail(report.fault)
        self._expected_since = time.monotonic() if self._jobs else None

    def _count_prompts(self, job: Job) -> None:
        for ask in job.asks:
            if ask.first is None:
                self.metrics.prompt_tokens.inc(len(ask.tokens))
                self.metrics.prompt_length.observe(len(ask.tokens))

    def _add(self, job: Job, index: int, tokens: Sequence[int | Drawn], ends: bool) -> None:
        """Give an answer of a job its tokens."""
        if index not in job.unfinished:  # a stop string has ended the answer
            return
        try:
            piece = job.add(index, tokens, ends)
        except Exception as error:
            traceback.print_exception(error)
            self.cancel(job)
            job.fail(AnswerFailed(f"this answer failed: {type(error).__name__}: {error}"))
            return
        now = time.perf_counter() - job.arrived
        if job.first_s[index] is None:
            job.first_s[index] = now
            self.metrics.time_to_first_token.observe(now)
        if piece.finish_reason:
            self.metrics.observe_end(piece.n_tokens, now, job.first_s[index] or 0.0)
            if piece.finish_reason == "stop" and not ends:
                self._tell(Cancel(job.number, index))  # the engine knows nothing of stop strings
            if not job.unfinished:
                self._jobs.pop(job.number, None)

    def _lose(self) -> None:
        """The worker is gone."""
        self._close()
        why = "its connection was closed"
        if self.processes:
            self.processes[0].join(END_S)
            why = describe_exit(self.processes[0].exitcode)
        self._fail(EngineFailed(f"the engine's process has ended: {why}"))

    def _lose_rank(self, patience_s: float = 0.0) -> bool:
        """End all work if another rank than the worker's has failed; the ranks that are left wait for it in vain.

        Args:
            patience_s: How long to wait for one that is about to end.

        Returns:
            Whether one has.
        """
        others = {process.sentinel: process for process in self.processes[1:]}
        ended = [others[found] for found in wait(others, patience_s)] if others else []  # type: ignore[index]
        for process in ended:
            process.join(PATIENCE_S)
        lost = next((process for process in ended if process.exitcode), None)  # 0: it has followed rank 0
        if lost is None:
            return False
        self._close()
        for process in self.processes:
            process.kill()
        why = f"{lost.name} has ended: {describe_exit(lost.exitcode)}"
        fault = EngineUnhealthy(f"{why}; the others cannot go on without it, so start the server again")
        print(f"error: {fault}", file=sys.stderr, flush=True)
        self._fail(fault)
        return True

    def _fail(self, error: EngineFailed) -> None:
        """End all jobs."""
        if isinstance(error, EngineUnhealthy):
            self.unhealthy = error
        else:
            self.error = self.error or error
        for accepted in self._accepting.values():
            if not accepted.done():
                accepted.set_exception(error)
        for job in self._jobs.values():
            job.fail(error)
        self._jobs.clear()
