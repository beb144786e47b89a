"""A request for completions: its fields, and one sentence about what is wrong with it."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

MAX_STOPS = 4
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
}
"""Fields that this server does not support, with the values that are accepted because they ask for nothing.

Some belong to the interface, and vLLM's load generator adds the others.
"""


class ApiError(Exception):
    """An error for the client, in the form that the field's clients read.

    Args:
        status: HTTP status.
        message: What is wrong, and what was expected.
        param: The field that is wrong.
        code: A word for programs.
        kind: The error's ``type``.
        headers: Further headers of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error", headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class Asked(BaseModel):
    """The body of a request to ``/v1/completions``. null means the default, as does a field that is absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    prompt: Any
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Any = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    echo: bool | None = None
    user: str | None = None
    logprobs: Any = None
    suffix: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        several = isinstance(prompt, list) and bool(prompt) and not _is_tokens(prompt)
        for one in prompt if several else [prompt]:
            if not isinstance(one, str) and not _is_tokens(one):
                raise ValueError("expected a string, a list of tokens, or a list of these")
        return prompt

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Any) -> list[str]:
        stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"expected a string that is not empty, or a list of at most {MAX_STOPS}")
        return stops

    @field_validator(*NEUTRAL)
    @classmethod
    def _check_neutral(cls, value: Any, info: Any) -> Any:
        if value not in NEUTRAL[info.field_name]:
            raise ValueError("not supported by this server")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        several = isinstance(self.prompt, list) and not _is_tokens(self.prompt)
        return self.prompt if several else [self.prompt]


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def shown(value: Any) -> str:
    """A client's value for a message, which repeats no more than its beginning."""
    return shorter(repr(value))


def shorter(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # what could be one: an escape of JSON, or three bytes


def _check_characters(body: bytes) -> None:
    """Raise an ``ApiError`` if a text holds half of a surrogate pair, which is no character; it names the field."""
    if not ESCAPED.search(body):
        return
    try:
        texts = list(_texts(json.loads(body.decode(errors="surrogatepass")), ""))
    except (ValueError, RecursionError):  # wrong in another way, which the validation says
        return
    for name, text in texts:
        if half := SURROGATE.search(text):
            what = f"\\u{ord(half[0]):04x} at character {half.start()} is half of a surrogate pair"
            message = f"{what} without its other half; expected whole characters"
            place = f"{shorter(name)}: " if name else "the name of a field: "
            raise ApiError(400, place + message, param=shorter(name) if name else None, code="invalid_text")


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text in a value of JSON, after the name of its field; a field's own name comes after that of its object."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _texts(part, f"{name}.{i}" if name else str(i))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield name, key
            yield from _texts(part, f"{name}.{key}" if name else key)


def parse(body: bytes) -> Asked:
    """Read the body of a request.

    Raises:
        ApiError: with status 400, about the first thing that is wrong.
    """
    _check_characters(body)
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "there is no such field"
        given = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
        text = f"{shorter(name)}: {message}{given}" if name else f"the body is no valid request: {message}"
        raise ApiError(
            400, text, param=shorter(name) if name else None, code=None if name else "invalid_json"
        ) from None
    if asked.best_of not in (None, asked.n or 1):
        raise ApiError(
            400,
            f"best_of: {shown(asked.best_of)} is not n = {asked.n or 1}; not supported by this server",
            param="best_of",
        )
    if asked.stream_options and not asked.stream:
        raise ApiError(400, "stream_options: only with stream = true", param="stream_options")
    return asked
