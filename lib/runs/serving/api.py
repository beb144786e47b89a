"""The HTTP interface: completions and chats as the field's clients ask for them, models, health, metrics,
and a page to try them.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.grammar import grammar_of
from lib.runs.serving.jobs import Job
from lib.runs.serving.link import Link
from lib.runs.serving.metrics import Metrics
from lib.runs.serving.schema import ApiError, Asked, AskedChat, AskedCompletion, parse, shorter, shown
from lib.runs.serving.text import Answer, Characters, Tokenizer
from lib.runs.serving.wire import AnswerFailed, Ask, EngineFailed, QueueFull
from lib.runs.serving.writers import ChatWriter, Writer, failed

MAX_BODY_BYTES, RETRY_AFTER_S, CLIENT_LEFT = 16 * 2**20, 1, 499
BODY_S = 30.0  # from a request's head to the end of its body
PAGE = Path(__file__).parent / "page.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
COLDEST = 1e-5  # below this temperature the likeliest token is chosen: logits divided by less might overflow
ID_HEADER, GIVEN_ID = b"x-request-id", re.compile(r"[!-~]{1,128}")
LOG = logging.getLogger("workbook.serve")
T = TypeVar("T")


@dataclass
class Service:
    """A served model and the state of its server.

    Attributes:
        link: To the engine.
        name, aliases: What clients may call the model: the name that it lists, and others.
        vocab_size, context_len: Of the model.
        template: Writes the prompt of a chat; None if the model has none.
        key: The key that clients must present; None if anybody may ask.
        path: Which way the engine's steps take, in words for the server's log.
        notes: Further lines for the log.
        is_leaving: Whether the server was asked to end, and refuses new requests.
        n_open: Number of requests for completions in progress.
        created: When the server began, in seconds since 1970.
    """

    name: str
    tokenizer: Tokenizer
    link: Link
    metrics: Metrics
    vocab_size: int
    context_len: int
    template: ChatTemplate | None = None
    key: str | None = None
    aliases: tuple[str, ...] = ()
    path: str = ""
    notes: tuple[str, ...] = ()
    is_leaving: bool = False
    n_open: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def describe(self) -> dict[str, Any]:
        """The model, as ``/v1/models`` lists it."""
        listed = {"id": self.name, "object": "model", "created": self.created, "owned_by": "workbook"}
        return listed | {"max_model_len": self.context_len, "has_chat_template": self.template is not None}

    def check_model(self, name: str) -> None:
        """Raise an ``ApiError`` if the model is not this one."""
        if name not in (self.name, *self.aliases):
            text = f"there is no model {name[:200]!r}; this server has {self.name!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def prompts(self, asked: Asked) -> list[tuple[list[int], str]]:
        """The tokens of each prompt, and the text that its answers begin with, which is empty without ``echo``.

        Raises:
            ApiError: a prompt cannot be encoded, has no tokens or unknown ones, or the model has no template.
        """
        if isinstance(asked, AskedChat):
            if self.template is None:
                text = f"messages: {self.name!r} has no chat template; ask /v1/completions with a prompt"
                raise ApiError(400, text, param="messages", code="chat_template")
            text = self.template.render([message.model_dump(exclude_none=True) for message in asked.messages])
            tokens = _encode(self.tokenizer.encode_rendered, text, "messages")
            self._check_tokens(tokens, "messages")
            return [(tokens, "")]
        assert isinstance(asked, AskedCompletion)
        found = []
        for prompt in asked.prompts:
            tokens = _encode(self.tokenizer.encode, prompt, "prompt") if isinstance(prompt, str) else prompt
            self._check_tokens(tokens, "prompt")
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
            found.append((tokens, text if asked.echo else ""))
        return found

    def prepare(self, asked: Asked) -> tuple[Job, list[str]]:
        """The job of a request, and the text that each answer begins with.

        Raises:
            ApiError: a prompt is wrong, or does not fit into the context.
        """
        asks, echoes = list[Ask](), list[str]()
        for tokens, echo in self.prompts(asked):
            room = self.context_len - len(tokens)
            n_new = asked.n_new(room)
            if n_new > room:
                name = "max_tokens" if room > 0 else asked.source
                text = (
                    f"{name}: a prompt of {len(tokens)} tokens and {shown(n_new)} new ones do not fit into the "
                    f"context of {self.context_len}"
                )
                raise ApiError(400, text, param=name, code="context_length_exceeded")
            asks += self._asks(asked, tokens, n_new, len(asks))
            echoes += [echo] * asked.n_answers
        answers = [Answer(Characters(self.tokenizer.decode, ask.tokens), asked.stop) for ask in asks]
        shape = asked.response_format
        grammar = grammar_of(shape) if shape and shape.type != "text" else None
        return Job(asks, answers, frozenset() if asked.ignore_eos else self.tokenizer.end_ids, grammar), echoes

    def _asks(self, asked: Asked, tokens: list[int], n_new: int, first: int) -> list[Ask]:
        """What is asked for each answer to a prompt, the first of which has this index in the job.

        The seeds follow each other. All but the first are forks.
        """
        temperature = 1.0 if asked.temperature is None else asked.temperature
        temperature = temperature if temperature >= COLDEST else 0.0
        chooses, made = asked.n_answers > (asked.n or 1), list[Ask]()
        for i in range(asked.n_answers):
            made.append(Ask(
                tokens, n_new, temperature, None if asked.seed is None else (asked.seed + i) % 2**63,
                top_k=asked.top_k, top_p=asked.top_p, n_top=0 if chooses and asked.n_top is None else asked.n_top,
                first=first if i else None,
            ))  # fmt: skip
        return made

    def _check_tokens(self, tokens: list[int], source: str) -> None:
        if not tokens:
            raise ApiError(400, f"{source}: expected at least one token, got none", param=source)
        strange = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            text = f"{source}: token {shown(strange)} is not in the vocabulary of {self.vocab_size}"
            raise ApiError(400, text, param=source)


def _encode(encode: Callable[[str], list[int]], prompt: str, param: str) -> list[int]:
    try:
        return encode(prompt)
    except Exception as error:  # for example a character for which a vocabulary of words has no token
        text = f"{param}: the tokenizer cannot encode {shown(prompt)}: {shorter(str(error))}"
        raise ApiError(400, text, param=param) from None


def make_app(service: Service) -> FastAPI:
    """The application; its lifespan is that of the link to the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.link.start()
        yield
        service.link.stop()

    app = FastAPI(
        title="The Scaling Workbook", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Door, service=service)
    app.add_exception_handler(ApiError, _as_json)
    app.add_exception_handler(HTTPException, _as_json)
    app.add_exception_handler(Exception, _as_json)  # and the traceback on stderr
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    def check_key(http: Request) -> None:
        if service.key is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        key = service.key.encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key):
            text = "the key is wrong or missing: expected the header Authorization: Bearer KEY"
            refused = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, text, code="invalid_api_key", kind="authentication_error", headers=refused)

    closed = [Depends(check_key)]

    @app.get("/v1/models", dependencies=closed)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe()]}

    @app.get("/v1/models/{name:path}", dependencies=closed)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.describe()

    @app.post("/v1/completions", dependencies=closed)
    async def completions(http: Request) -> Response:
        return await _complete(http, service, parse(await _read_body(http), AskedCompletion))

    @app.post("/v1/chat/completions", dependencies=closed)
    async def chat(http: Request) -> Response:
        return await _complete(http, service, parse(await _read_body(http), AskedChat))

    @app.get("/")
    async def page() -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/health")
    async def health() -> Response:
        if fault := service.link.error or service.link.unhealthy or service.link.stalled:
            raise failed(fault)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _read_body(http: Request) -> bytes:
    coding = http.headers.get("content-encoding", "identity")
    if coding.lower() not in ("", "identity"):
        raise ApiError(
            415, f"Content-Encoding is {shown(coding)}: expected a body that is not compressed", code="encoded"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", code="too_large")
    except TimeoutError:
        raise ApiError(408, f"the body was not complete after {BODY_S:g} s", code="too_slow") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_LEFT, "the client left before the body was complete") from None
    return bytes(body)


async def _complete(http: Request, service: Service, asked: Asked) -> Response:
    service.check_model(asked.model)
    writer = (ChatWriter if isinstance(asked, AskedChat) else Writer)(service.name, service.tokenizer, asked)
    job, echoes = await run_in_threadpool(service.prepare, asked)
    try:
        await _submit(service.link, job, asked)
        if asked.stream:
            first = await _unless_gone(http, job.next())
            return EventStream(writer.events(job, echoes, first), service.link, job)
        return JSONResponse(writer.whole(job, echoes, await _unless_gone(http, job.whole())))
    except (EngineFailed, AnswerFailed) as error:
        raise failed(error) from None
    except BaseException:
        service.link.cancel(job)
        raise


async def _submit(link: Link, job: Job, asked: Asked) -> None:
    if len(job.asks) > link.max_waiting:
        name = "best_of" if asked.n_answers > (asked.n or 1) else "n" if asked.n_answers > 1 else "prompt"
        text = f"{name}: {len(job.asks)} answers are more than the queue of {link.max_waiting} holds"
        raise ApiError(400, text, param=name)
    try:
        await link.submit(job)
    except QueueFull as error:
        later = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(
            429, f"{error}; try again later", code="queue_full", kind="rate_limit_error", headers=later
        ) from None
    except ValueError as error:
        raise ApiError(400, f"this request can never run: {error}", param="max_tokens") from None


async def _unless_gone(http: Request, result: Awaitable[T]) -> T:
    """Wait for a result as long as the client does.

    Raises:
        ApiError: the client has left, so nobody reads this error.
    """
    task, gone = asyncio.ensure_future(result), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_LEFT, "the client left before the answer was complete")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _as_json(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such page, no such method
        text = f"{http.method} {http.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, text, headers=headers)
    elif not isinstance(error, ApiError):
        error = ApiError(
            500, f"this request failed: {type(error).__name__}: {error}", code="failed", kind="server_error"
        )
    return JSONResponse(error.body, error.status, headers=error.headers)


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is cancelled when they end, for whatever reason."""

    def __init__(self, events: AsyncIterator[str], link: Link, job: Job) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.link, self.job = link, job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.link.cancel(self.job)  # does nothing if the job has ended


class Door:
    """Gives each request an id, counts and logs the requests for completions, and refuses all once the server
    was asked to end.

    Args:
        app: The application.
        service: Its state.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = request_id(scope)

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, name.encode())]
            await send(message)

        if self.service.is_leaving and scope["path"] != "/metrics":
            text = "this server was asked to end, and completes only what it has begun"
            error = ApiError(503, text, code="leaving", kind="server_error", headers={"Connection": "close"})
            return await JSONResponse(error.body, 503, headers=error.headers)(scope, receive, named)
        if scope["path"] not in ("/v1/completions", "/v1/chat/completions"):
            return await self.app(scope, receive, named)
        return await self._counted(scope, receive, named, name)

    async def _counted(self, scope: Any, receive: Any, send: Any, name: str) -> None:
        status, began = str(CLIENT_LEFT), time.perf_counter()

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self.service.n_open += 1
        try:
            await self.app(scope, receive, noting)
        except Exception:
            status = "500"
            raise
        finally:
            self.service.n_open -= 1
            self.service.metrics.responses.labels(status).inc()
            taken = time.perf_counter() - began
            LOG.info("%s %s: status %s after %.3f s, request %s", scope["method"], scope["path"], status, taken, name)


def request_id(scope: Any) -> str:
    """The id that a client gave its request, if it is short and has only signs that a log can hold; else a new one."""
    given = next((value for header, value in scope["headers"] if header == ID_HEADER), b"").decode("latin-1")
    return given if GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
