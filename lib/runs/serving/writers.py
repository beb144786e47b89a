"""Answers in the interface's forms: whole or as server-sent events, as completions or as an assistant's messages."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from lib.runs.serving.jobs import Job, Piece, Scored
from lib.runs.serving.schema import ApiError, Asked
from lib.runs.serving.text import Tokenizer
from lib.runs.serving.wire import AnswerFailed, EngineFailed, EngineUnhealthy

MARK = "\0 text \0"  # no model's name, and so nothing else in an event, has it


def failed(error: EngineFailed | AnswerFailed) -> ApiError:
    if isinstance(error, EngineUnhealthy):
        return ApiError(503, str(error), code="engine_unhealthy", kind="server_error")
    code = "engine_failed" if isinstance(error, EngineFailed) else "failed"
    return ApiError(500, str(error), code=code, kind="server_error")


class Writer:
    """Writes completions in the interface's form.

    Args:
        model: Its name.
        tokenizer: Says what the tokens with scores stand for.
        asked: The request.
    """

    prefix, whole_name, part_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, asked: Asked) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        name = self.part_name if asked.stream else self.whole_name
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time())}
        self.head |= {"model": model}

    def whole(self, job: Job, echoes: list[str], pieces: list[Piece]) -> dict[str, Any]:
        """All answers at once."""
        texts = [_completed(text, job, i) for i, text in enumerate(echoes)]
        reasons, scores = [""] * len(echoes), [list[Scored]() for _ in echoes]
        for piece in pieces:
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish_reason or ""
            scores[piece.index] += piece.scores
        chosen = enumerate(self._best(job))
        choices = [self._choice(place, texts[i], reasons[i], scores[i]) for place, i in chosen]
        return self.head | {"choices": choices, "usage": self._usage(job)}

    def _best(self, job: Job) -> list[int]:
        """The answers to return: of each prompt's those n whose tokens are likeliest on average, best first."""
        n_made, n = self.asked.n_answers, self.asked.n or 1
        found = list[int]()
        for begin in range(0, len(job.asks), n_made):
            those = range(begin, begin + n_made)
            if n < n_made:
                found += sorted(those, key=lambda i: -job.logprobs[i] / job.n_tokens[i])[:n]
            else:
                found += those
        return found

    async def events(self, job: Job, echoes: list[str], pieces: list[Piece]) -> AsyncIterator[str]:
        """The answers as server-sent events, beginning with the first pieces; those that wait go out together."""
        told, frames = set[int](), dict[int, tuple[str, str]]()
        while True:
            written = ""
            for piece in pieces:
                if piece.index in told and not piece.scores and not piece.finish_reason:
                    written += self._framed(piece, frames) if piece.text else ""
                elif piece.text or piece.finish_reason:
                    is_first = piece.index not in told
                    echo = _completed(echoes[piece.index], job, piece.index) if is_first else ""
                    told.add(piece.index)
                    written += self._event([self._part(piece, echo, is_first)])
            if not job.unfinished and not job.waiting:
                break
            if written:
                yield written
            try:
                pieces = await job.next()
            except (EngineFailed, AnswerFailed) as error:  # the HTTP status was sent already
                yield f"data: {json.dumps(failed(error).body)}\n\n"
                return
        if self._counts:
            written += self._event([], self._usage(job))
        yield f"{written}data: [DONE]\n\n"

    def _framed(self, piece: Piece, frames: dict[int, tuple[str, str]]) -> str:
        """The event of a piece that has nothing but text, of which all else is written once for each answer."""
        if piece.index not in frames:
            event = self._event([self._part(replace(piece, text=MARK), "", False)])
            before, _, after = event.partition(json.dumps(MARK))
            frames[piece.index] = before, after
        before, after = frames[piece.index]
        return before + json.dumps(piece.text) + after

    @property
    def _counts(self) -> bool:
        return bool(self.asked.stream_options and self.asked.stream_options.include_usage)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        counted = {"usage": usage} if self._counts else {}
        return f"data: {json.dumps(self.head | {'choices': choices} | counted)}\n\n"

    def _choice(self, index: int, text: str, reason: str | None, scores: Sequence[Scored]) -> dict[str, Any]:
        logprobs = None if self.asked.n_top is None else self._logprobs(scores)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _part(self, piece: Piece, echo: str, is_first: bool) -> dict[str, Any]:
        return self._choice(piece.index, echo + piece.text, piece.finish_reason, piece.scores)

    def _logprobs(self, scores: Sequence[Scored]) -> dict[str, Any]:
        """Four lists with an item for each token. The likeliest ones always include the token itself."""
        drawn = [one.drawn for one in scores]
        tops = []
        for token, logprob, top in drawn:
            tops.append({self._name(token): logprob})
            for i, value in top:
                tops[-1].setdefault(self._name(i), value)
        return {
            "tokens": [self._name(token) for token, *_ in drawn],
            "token_logprobs": [logprob for _, logprob, _ in drawn],
            "top_logprobs": tops,
            "text_offset": [one.offset for one in scores],
        }

    def _name(self, token: int) -> str:
        """A token's text; the interface writes a part of a character as its bytes."""
        found = self.tokenizer.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _usage(self, job: Job) -> dict[str, int]:
        n_prompt = sum(len(ask.tokens) for ask in job.asks[:: self.asked.n_answers])
        n_new = sum(job.n_tokens)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


class ChatWriter(Writer):
    """Writes answers as an assistant's messages."""

    prefix, whole_name, part_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, text: str, reason: str | None, scores: Sequence[Scored]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._content(scores), "finish_reason": reason}

    def _part(self, piece: Piece, echo: str, is_first: bool) -> dict[str, Any]:
        delta = ({"role": "assistant"} if is_first else {}) | {"content": piece.text}
        logprobs = self._content(piece.scores)
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _content(self, scores: Sequence[Scored]) -> dict[str, Any] | None:
        if self.asked.n_top is None:
            return None
        content = []
        for token, logprob, top in (one.drawn for one in scores):
            likeliest = [self._scored(i, value) for i, value in top]
            content.append(self._scored(token, logprob) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        found = self.tokenizer.bytes_of(token)
        return {"token": found.decode(errors="replace"), "bytes": list(found), "logprob": logprob}


def _completed(echo: str, job: Job, index: int) -> str:
    """The text of a prompt up to where the answer's begins, which may complete the prompt's last character."""
    return echo[: len(echo) - job.answers[index].characters.n_replaced]
