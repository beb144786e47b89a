"""Settings that all code of a process shares.

They are read before a check; what the check left changed is restored and reported.
"""

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

SEED = 41  # of the global generators


@dataclass(frozen=True)
class Setting:
    """One shared setting: its name, and how to read and set it."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _settings() -> list[Setting]:
    found = [
        Setting("the working directory", os.getcwd, os.chdir),
        Setting("sys.getrecursionlimit()", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("sys.stdout", lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
        Setting("sys.stderr", lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    ]
    with contextlib.suppress(ImportError):
        import resource

        for name in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_CPU"):
            kind = getattr(resource, name)
            put = lambda limits, kind=kind: resource.setrlimit(kind, limits)
            found.append(Setting(f"the limit {name}", lambda kind=kind: resource.getrlimit(kind), put))
    torch = sys.modules.get("torch")
    return found if torch is None or not hasattr(torch, "get_default_device") else found + _settings_of(torch)


def _settings_of(torch: ModuleType) -> list[Setting]:
    return [
        Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
        Setting("torch.get_default_device()", lambda: str(torch.get_default_device()), _set_device),
        Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("torch.is_autocast_enabled('cpu')", *_autocast(torch)),
        Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
        Setting(
            "torch.are_deterministic_algorithms_enabled()",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    ]


def _set_device(name: str) -> None:
    import torch

    torch.set_default_device(None if name == "cpu" else name)


def _autocast(torch: ModuleType) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)


def seed_generators() -> None:
    """Every check starts with the same state of the global generators, so that an answer that draws from them fails
    the same way each time.
    """
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(SEED)


class Shared:
    """The shared settings as they are now."""

    def __init__(self) -> None:
        self.before = [(setting, setting.get()) for setting in _settings()]
        self.streams = [(number, os.dup(number)) for number in (1, 2)]
        self.closed: list[str] = []

    @contextlib.contextmanager
    def streams_stay_open(self) -> Iterator[None]:
        """In this block, closing ``sys.stdout`` or ``sys.stderr`` is only noted:
        pytest needs both to report anything.
        """
        streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            with contextlib.suppress(AttributeError):
                stream.close = functools.partial(self.closed.append, f"sys.{name}")
        try:
            yield
        finally:
            for stream in streams.values():
                with contextlib.suppress(AttributeError):
                    del stream.close

    def restore(self) -> list[str]:
        """Restore every setting; return a line for each one that was changed."""
        changed = []
        for setting, before in self.before:
            try:
                now = setting.get()
            except Exception as error:
                now = f"an error, {type(error).__name__}"
            if now is not before and now != before:
                changed.append(f"{setting.name} was {_short(before)} before the check and {_short(now)} after it")
                with contextlib.suppress(Exception):
                    setting.put(before)
        changed += [f"{name} was closed" for name in dict.fromkeys(self.closed)]
        for number, kept in self.streams:
            try:
                os.fstat(number)
            except OSError:
                changed.append(f"file descriptor {number} was closed")
                os.dup2(kept, number)
            os.close(kept)
        return changed


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else f"{text[:57]}…"
