"""What the server's engine is asked for beyond a prompt's continuation, and the tokens that come with their scores."""

from dataclasses import dataclass, field
from typing import Any

from lib.given.models.serving import Request
from lib.runs.serving.wire import Drawn

LOWEST = -9999.0
"""In place of a log-probability below it, in the interface's own words: very unlikely."""


@dataclass(frozen=True, eq=False)
class Wanted(Request):
    """A request to the server's engine.

    Attributes:
        n_top: Each token comes as a ``Drawn`` with so many likeliest tokens; None: as its number alone.
        form: What its answer must look like; None: anything.
        first: A request with the same prompt, submitted before this one, which begins as a fork of its cache.
    """

    n_top: int | None = field(default=None, kw_only=True)
    form: Any = field(default=None, kw_only=True)
    first: Request | None = field(default=None, kw_only=True)


def n_top_of(request: Request) -> int | None:
    """How many likeliest tokens a request asks for; None if it wants no scores."""
    return request.n_top if isinstance(request, Wanted) else None


def first_of(request: Request) -> Request | None:
    """The request whose prompt a request shares; None if it has one of its own."""
    return request.first if isinstance(request, Wanted) else None


def form_of(request: Request) -> Any:
    """The ``Form`` of a request's answer, or None."""
    return request.form if isinstance(request, Wanted) else None


def drawn(token: int, logprob: float, tokens: list[int], logprobs: list[float]) -> Drawn:
    """A token with its scores, each at least ``LOWEST``, which JSON can hold."""
    top = [(i, max(value, LOWEST)) for i, value in zip(tokens, logprobs, strict=True)]
    return Drawn(token, max(logprob, LOWEST), top)
