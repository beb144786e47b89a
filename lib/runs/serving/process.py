"""The engine's process: it loads the model and takes the steps, so that nothing on the HTTP side holds up the next one.

It ends with the process that started it, and leaves signals to it: a request that has begun is completed after SIGTERM.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lib.runs.flags import UsageError
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.text import Tokenizer
from lib.runs.serving.wire import EngineFailed

Main = Callable[..., None]
"""What the process runs: its first argument is the connection, through which it sends a ``Ready`` or a ``UsageError``
before it becomes a ``Worker``'s."""


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


def start(main: Main, *args: Any) -> tuple[BaseProcess, Connection, Ready]:
    """Start a process that calls ``main(connection, *args)``, and wait until its engine is ready.

    Raises:
        UsageError: the process says so.
        EngineFailed: it ended before it was ready.
    """
    context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(main, there, *args), name="engine", daemon=True)
    process.start()
    atexit.register(process.kill)
    there.close()
    try:
        said = here.recv()
    except EOFError:
        process.join()
        text = f"the engine's process ended before it was ready: {describe_exit(process.exitcode)}"
        raise EngineFailed(text) from None
    if isinstance(said, UsageError):
        process.join()
        raise said
    return process, here, said


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
