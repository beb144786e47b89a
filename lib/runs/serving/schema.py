"""A request for a completion or a chat: its fields, and one sentence about what is wrong with it."""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lib.runs.serving.wire import MOST_LIKELY

MAX_STOPS, DEFAULT_MAX_TOKENS = 4, 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": (None, "")}
"""The same, of ``/v1/completions`` alone."""
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "metadata": (None, {}),
}
"""The same, of ``/v1/chat/completions`` alone."""


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


class JsonSchema(BaseModel):
    """A schema with its name; ``strict`` changes nothing, because every answer keeps to the schema."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer must look like. The regular expression is this server's own addition."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> "ResponseFormat":
        for kind, name in (("json_schema", "json_schema"), ("regex", "pattern")):
            if (getattr(self, name) is not None) != (self.type == kind):
                raise ValueError(f"expected {name} if, and only if, the type is {kind}")
        return self


class Asked(BaseModel):
    """What the bodies of both kinds of requests share. null means the default, as does a field that is absent."""

    model_config = ConfigDict(strict=True, extra="forbid")
    source: ClassVar[str]  # the field that the prompt comes from

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Any = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None

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
        return _neutral(value, NEUTRAL[info.field_name])

    def n_new(self, room: int) -> int:
        """Tokens of an answer at most, where the context has room for so many."""
        raise NotImplementedError

    @property
    def n_answers(self) -> int:
        """Answers to each prompt that are computed; the best n of them are returned."""
        return self.n or 1

    @property
    def n_top(self) -> int | None:
        """The likeliest tokens to return beside each of an answer's; None: no scores at all."""
        raise NotImplementedError


class AskedCompletion(Asked):
    """The body of a request to ``/v1/completions``."""

    source = "prompt"
    prompt: Any
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    suffix: Any = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        several = isinstance(prompt, list) and bool(prompt) and not _is_tokens(prompt)
        for one in prompt if several else [prompt]:
            if not isinstance(one, str) and not _is_tokens(one):
                raise ValueError("expected a string, a list of tokens, or a list of these")
        return prompt

    @field_validator(*NEUTRAL_COMPLETION)
    @classmethod
    def _check_neutral_here(cls, value: Any, info: Any) -> Any:
        return _neutral(value, NEUTRAL_COMPLETION[info.field_name])

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        several = isinstance(self.prompt, list) and not _is_tokens(self.prompt)
        return self.prompt if several else [self.prompt]

    def n_new(self, room: int) -> int:
        return self.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room))

    @property
    def n_answers(self) -> int:
        return self.best_of or self.n or 1

    @property
    def n_top(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One message of a chat; ``content`` may come in parts, which are joined."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any
    name: str | None = None

    @field_validator("content")
    @classmethod
    def _join(cls, content: Any) -> str:
        parts = [content] if isinstance(content, str) else content
        texts = [_text_of(part) for part in parts] if isinstance(parts, list) else []
        whole = [text for text in texts if text is not None]
        if not texts or len(whole) < len(texts):
            raise ValueError('expected a string, or a list of parts {"type": "text", "text": ...}')
        return "".join(whole)


def _text_of(part: Any) -> str | None:
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        part = part["text"]
    return part if isinstance(part, str) else None


class AskedChat(Asked):
    """The body of a request to ``/v1/chat/completions``."""

    source = "messages"
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    store: Any = None
    metadata: Any = None

    @field_validator(*NEUTRAL_CHAT)
    @classmethod
    def _check_neutral_here(cls, value: Any, info: Any) -> Any:
        return _neutral(value, NEUTRAL_CHAT[info.field_name])

    def n_new(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or max(1, room)

    @property
    def n_top(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


def _neutral(value: Any, accepted: tuple[Any, ...]) -> Any:
    if value not in accepted:
        raise ValueError("not supported by this server")
    return value


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


Kind = TypeVar("Kind", bound=Asked)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """Read the body of a request.

    Raises:
        ApiError: with status 400, about the first thing that is wrong.
    """
    _check_characters(body)
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_fault(error) from None
    for name, text in _contradictions(asked):
        raise ApiError(400, f"{name}: {text}", param=name)
    return asked


def _contradictions(asked: Asked) -> Iterator[tuple[str, str]]:
    """Fields that do not go with others, and why."""
    if asked.stream_options and not asked.stream:
        yield "stream_options", "only with stream = true"
    if isinstance(asked, AskedChat) and asked.top_logprobs and not asked.logprobs:
        yield "top_logprobs", "only with logprobs = true"
    if asked.n_answers < (asked.n or 1):
        yield "best_of", f"{asked.n_answers} is less than n = {asked.n}, and the best n of so many are returned"
    if asked.n_answers > (asked.n or 1) and asked.stream:
        yield "best_of", "not with stream = true: which answers are best is known when all are complete"
    if isinstance(asked, AskedCompletion) and asked.echo and asked.logprobs is not None:
        yield "logprobs", "not with echo = true; this server has no scores of a prompt's tokens"


def _first_fault(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
    given = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
    text = f"{shorter(name)}: {message}{given}" if name else f"the body is no valid request: {message}"
    return ApiError(400, text, param=shorter(name) if name else None, code=None if name else "invalid_json")
