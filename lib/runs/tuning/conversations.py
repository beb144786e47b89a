"""Conversations and preferences in files of JSON lines, and the rows of tokens that a model learns from."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lib.finetuning import pack_conversations
from lib.runs.flags import UsageError
from lib.runs.tuning.templates import Message, Template

ROLES = ("system", "user", "assistant")
TOGETHER = 1000
"""Conversations that are packed at once: first fit looks at every row that it has begun."""
IGNORED = -100
Shape = dict[str, Tensor]


@dataclass(frozen=True)
class Line:
    """What a line of the file asks for.

    Attributes:
        number: Its number, from 1.
        prompt: The messages before the two answers; empty for a conversation.
        talks: The conversation, or the preferred answer and the other one.
    """

    number: int
    prompt: list[Message]
    talks: list[list[Message]]


def read_lines(path: Path, is_preference: bool, limit: int | None = None) -> list[Line]:
    """The conversations or the preferences of a file; empty lines are skipped.

    Raises:
        UsageError: a line is wrong; names its number, the value and what was expected.
    """
    found: list[Line] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if limit is not None and len(found) == limit:
                    break
                if not raw.strip():
                    continue
                try:
                    found.append((_preference if is_preference else _conversation)(number, _object(raw)))
                except ValueError as error:
                    raise UsageError(f"--data {path}, line {number}: {error}") from None
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror or error}; expected a file of JSON lines") from None
    if not found:
        raise UsageError(f"--data {path} has no lines; expected an object of JSON in each")
    return found


def _object(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode())
        if b"\\u" in raw:
            json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!r} is half of a character: expected both surrogates of the pair") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{_shown(entry)}: expected an object")
    return entry


def _conversation(number: int, entry: dict[str, Any]) -> Line:
    messages = _messages(entry, "messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages has no message of the assistant, so there is nothing to learn")
    return Line(number, [], [messages])


def _preference(number: int, entry: dict[str, Any]) -> Line:
    """A line with chosen and rejected; the prompt has its own key, or both answers begin with it."""
    answers = [_answer(entry, key) for key in ("chosen", "rejected")]
    key = next((name for name in ("prompt", "messages") if name in entry), None)
    if key is None:
        n = next((i for i, pair in enumerate(zip(*answers, strict=False)) if pair[0] != pair[1]), 0)
        prompt, answers = answers[0][:n], [answer[n:] for answer in answers]
        if not n:
            raise ValueError("it has neither prompt nor messages, and chosen and rejected do not begin with a prompt")
    elif isinstance(entry[key], str):
        prompt = [{"role": "user", "content": entry[key]}]
    else:
        prompt = _messages(entry, key)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            raise ValueError(f"{name} holds {_shown(answer)}: expected one message of the assistant")
    if answers[0] == answers[1]:
        raise ValueError(f"chosen and rejected are both {_shown(answers[0][0]['content'])}")
    if prompt[-1]["role"] != "user":
        raise ValueError(f"{key} ends with a message of the role {prompt[-1]['role']!r}: expected 'user'")
    return Line(number, prompt, [prompt + answer for answer in answers])


def _answer(entry: dict[str, Any], key: str) -> list[Message]:
    if isinstance(entry.get(key), str):
        return [{"role": "assistant", "content": entry[key]}]
    return _messages(entry, key)


def _messages(entry: dict[str, Any], key: str) -> list[Message]:
    """A list of messages, each with a role and a content that is text, or an assistant's list of parts."""
    if key not in entry:
        raise ValueError(f"it has no {key!r}, but {_shown(sorted(entry))}")
    messages = entry[key]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key} is {_shown(messages)}: expected a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{key}[{i}] is {_shown(message)}: expected an object with role and content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"{key}[{i}].role is {_shown(role)}: expected one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (role == "assistant" and _are_parts(content)):
            raise ValueError(f"{key}[{i}].content is {_shown(content)}: expected text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) and isinstance(part.get("type"), str)
        for part in content
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- rows of tokens --------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Packed rows on the device, as a source of the engine.

    Attributes:
        inputs: ``[N, 3, T]``, int32: tokens, documents and positions, as ``pack_conversations`` makes them.
            The documents of pair i are 2 i, the preferred answer, and 2 i + 1.
        targets: ``[N, T]``, int32.
        n: Rows to train on; the first ones.
        n_short: Lines that do not fit into a row, of which a conversation was cut, and a pair left out.
        n_held_out: Rows behind them, which are not trained on.
    """

    inputs: Tensor
    targets: Tensor
    n: int
    n_short: int = 0
    n_held_out: int = 0
    n_test: int = 0
    codec: None = None
    is_on_host: ClassVar[bool] = False
    made_bytes: int = 0

    def hold_out(self, n: int) -> None:
        self.n, self.n_held_out = self.n - n, n

    def to(self, device: torch.device) -> None:
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers.to(self.inputs.device)
        return self.inputs[numbers].long(), self.targets[numbers].long()

    def fingerprint(self) -> str:
        found = hashlib.blake2b(digest_size=8)
        for tensor in (self.inputs, self.targets):
            found.update(repr(tuple(tensor.shape)).encode())
            found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()

    @property
    def n_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    @property
    def n_padding(self) -> int:
        return int((self.inputs[:, 1] < 0).sum())


def make_rows(path: Path, lines: list[Line], template: Template, length: int, seed: int, pairs: bool) -> Rows:
    """The lines in rows of ``length`` positions, in an order that the seed decides: whole, and none sees another.

    A conversation is cut at the end of a row.
    A pair has a row of its own, and is left out if its two conversations do not fit.

    Raises:
        UsageError: the template refuses a line, which is named, or nothing fits.
    """
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    found = [_rendered(path, lines[i], template) for i in order]
    n_short = sum(sum(len(ids) - 1 for ids, _ in talks) > length for talks in found)
    parts: Iterator[Shape]
    if pairs:
        parts = (_pair_row(pair, length) for pair in found)
    else:
        starts = range(0, len(found), TOGETHER)
        parts = (pack_conversations([talk for (talk,) in found[k : k + TOGETHER]], length) for k in starts)
    kept = [part for part in parts if len(part["inputs"])]
    if not kept:
        what = "no pair of conversations fits" if pairs else "no conversation has an answer that begins within"
        raise UsageError(f"--data {path}: {what} {length} tokens; expected a larger --length, or shorter lines")
    rows = {name: torch.cat([part[name] for part in kept]).int() for name in kept[0]}
    if pairs:  # a pair's number is that of its row
        numbers = 2 * torch.arange(len(kept), dtype=torch.int32)[:, None]
        rows["documents"] = torch.where(rows["documents"] < 0, -1, rows["documents"] + numbers)
    inputs = torch.stack([rows["inputs"], rows["documents"], rows["positions"]], 1)
    return Rows(inputs, rows["targets"], len(inputs), n_short)


def _pair_row(pair: list[tuple[list[int], list[int]]], length: int) -> Shape:
    """The two conversations in one row; no row if they do not fit."""
    fits = sum(len(ids) - 1 for ids, _ in pair) <= length
    return pack_conversations(pair if fits else [], length)


def _rendered(path: Path, line: Line, template: Template) -> list[tuple[list[int], list[int]]]:
    """Ids and masks of a line's conversations; of a preference only the two answers are learned."""
    render: Callable[[list[Message]], tuple[list[int], list[int]]] = template.render
    try:
        found = [render(talk) for talk in line.talks]
        if not line.prompt:
            return found
        n = len(template.prompt(line.prompt))
    except ValueError as error:
        raise UsageError(f"--data {path}, line {line.number}: {error}") from None
    return [(ids, [0] * n + mask[n:]) for ids, mask in found]
