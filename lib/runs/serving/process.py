"""The engine's process: it loads the model and takes the steps, so that nothing on the HTTP side holds up the next one.

It ends with the process that started it, and leaves signals to it: a request that has begun is completed after SIGTERM.
An engine on several ranks has a process for each; the engine itself is on rank 0.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from lib.runs.flags import UsageError
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.text import Tokenizer
from lib.runs.serving.wire import EngineFailed

Main = Callable[..., None]
"""What the process runs: its first argument is the connection, through which it sends a ``Ready`` or a ``UsageError``
before it becomes a ``Worker``'s; on a rank other than 0 it sends nothing but a ``UsageError``."""


class Place(NamedTuple):
    """Which of an engine's ranks a process is.

    Attributes:
        rank, n_ranks: Its rank, and how many there are.
        pipes: On rank 0 the connections to the other ranks, in their order; on another rank the one to rank 0.
    """

    rank: int
    n_ranks: int
    pipes: list[Connection]


@dataclass(frozen=True)
class Ready:
    """What the HTTP side needs to know of a model that is loaded.

    Attributes:
        name, tokenizer, template: As in ``Served``.
        vocab_size, context_len: Of the model.
        n_blocks: Blocks of the cache.
        path: Which way the engine's steps take through the model: a word, and a sentence.
        notes: What else to say at the start, a line each.
        position_bytes: Bytes of the cache that a position takes.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    context_len: int
    n_blocks: int
    path: tuple[str, str]
    notes: tuple[str, ...] = ()
    position_bytes: int = 0


def start(main: Main, *args: Any, n_ranks: int = 1) -> tuple[list[BaseProcess], Connection, Ready]:
    """Start a process that calls ``main(connection, *args)``, and wait until its engine is ready.

    With several ranks, start as many processes, each with its ``Place`` as the last argument.

    Returns:
        The processes, the connection to the first, and what it said.

    Raises:
        UsageError: a process says so.
        EngineFailed: one ended before the engine was ready.
    """
    context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
    places = _places(context, n_ranks) if n_ranks > 1 else []
    begun, ends = list[BaseProcess](), list[Connection]()
    for rank in range(n_ranks):
        here, there = context.Pipe()
        name = f"the process of rank {rank}" if rank else "the engine's process"
        given = (main, there, *args, *places[rank : rank + 1])
        begun.append(context.Process(target=_run, args=given, name=name, daemon=True))
        ends.append(here)
        begun[rank].start()
        atexit.register(begun[rank].kill)
        there.close()
    for pipe in (pipe for place in places for pipe in place.pipes):
        pipe.close()  # so that a rank reads the end of it when the rank at the other end is gone
    try:
        return begun, ends[0], _hear(begun, ends)
    except Exception:
        for process in begun:
            process.kill()
            process.join()
        raise


def _places(context: Any, n_ranks: int) -> list[Place]:
    pipes = [context.Pipe() for _ in range(1, n_ranks)]
    held = [[here for here, _ in pipes], *([there] for _, there in pipes)]
    return [Place(rank, n_ranks, pipes) for rank, pipes in enumerate(held)]


def _hear(begun: list[BaseProcess], ends: list[Connection]) -> Ready:
    """What the first of the processes says once all are ready; a ``UsageError`` comes before the end of another."""
    said, ended, there = list[Any](), list[BaseProcess](), wait(ends)
    for process, end in zip(begun, ends, strict=True):
        if end in there:
            try:
                said.append(end.recv())
            except EOFError:
                ended.append(process)
    for word in said:
        if isinstance(word, UsageError):
            raise word
    if ended:
        ended[0].join()
        raise EngineFailed(f"{ended[0].name} ended before it was ready: {describe_exit(ended[0].exitcode)}")
    return said[0]


def _run(main: Main, connection: Connection, *args: Any) -> None:
    for name in (signal.SIGINT, signal.SIGTERM):  # which a terminal and systemd send to all processes of a program
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(connection, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def describe_exit(code: int | None) -> str:
    """How a process ended, by its exit code as ``multiprocessing`` gives it."""
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"signal {-code} ({signal.Signals(-code).name}) killed it"
    return f"exit status {code}"
