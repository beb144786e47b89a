"""How a conversation becomes tokens: by the model's own chat template, or by chapter 28's, with its markers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lib.finetuning import render_chat
from lib.runs.flags import UsageError
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.schema import ApiError

Message = dict[str, Any]
Rendered = tuple[list[int], list[int]]
WHO = ("user", "assistant", "python", "output")
MARKERS = {"bos": "<|bos|>", **{f"{who}_{end}": f"<|{who}_{end}|>" for who in WHO for end in ("start", "end")}}
"""Text of each special token of chapter 28's template, by its name there."""
JINJA = """\
{{- '<|bos|>' -}}
{%- set first = 1 if messages and messages[0]['role'] == 'system' else 0 -%}
{%- for message in messages[first:] -%}
{%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('user and assistant must alternate') -}}
{%- endif -%}
{{- '<|' + message['role'] + '_start|>' -}}
{%- if first and loop.first -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}
{{- message['content'] + '<|' + message['role'] + '_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""
"""Chapter 28's template for those who serve the model, for contents that are text."""


class Template(Protocol):
    """What turns messages into tokens."""

    def render(self, messages: list[Message]) -> Rendered:
        """Ids, and a mask that is 1 for what the assistant has to produce.

        Raises:
            ValueError: the messages do not fit the template.
        """

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids up to where the assistant's answer begins."""


class BookTemplate:
    """Chapter 28's template.

    Args:
        encode: Text to ordinary tokens.
        special: Ids of the markers, by their names.
    """

    def __init__(self, encode: Callable[[str], list[int]], special: dict[str, int]) -> None:
        self.encode, self.special = encode, special

    def render(self, messages: list[Message]) -> Rendered:
        return render_chat(messages, self.encode, self.special)

    def prompt(self, messages: list[Message]) -> list[int]:
        return render_chat(messages, self.encode, self.special, add_generation_prompt=True)[0]


class FolderTemplate:
    """A model's own template: what it adds to a conversation for an answer is what the assistant has to produce.

    Args:
        template: The folder's.
        encode: Text with special tokens to ids.
    """

    def __init__(self, template: ChatTemplate, encode: Callable[[str], list[int]]) -> None:
        self.template, self.encode = template, encode

    def render(self, messages: list[Message]) -> Rendered:
        ids, mask, done = list[int](), list[int](), ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # the model will see a prompt's tokens and go on by itself, so prompt and answer are encoded apart
            prompt, answered = self._text(messages[:i], True), self._text(messages[: i + 1], False)
            for text, is_learned in ((prompt, 0), (answered, 1)):
                if not text.startswith(done):
                    raise ValueError(f"the model's chat template writes the messages before message {i} in another way")
                new = self.encode(text[len(done) :])
                ids += new
                mask += [is_learned] * len(new)
                done = text
        return ids, mask

    def prompt(self, messages: list[Message]) -> list[int]:
        earlier, _ = self.render(messages)
        done = self._text(messages[:n], False) if (n := _n_answered(messages)) else ""
        return earlier + self.encode(self._text(messages, True)[len(done) :])

    def _text(self, messages: list[Message], is_prompt: bool) -> str:
        if any(not isinstance(message["content"], str) for message in messages):
            raise ValueError("a content in parts: the model's chat template takes text only")
        try:
            return self.template.render(messages, is_prompt)
        except ApiError as error:
            raise ValueError(str(error)) from None


def _n_answered(messages: list[Message]) -> int:
    """Number of messages up to the last one of the assistant."""
    return max((i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)


def add_markers(contents: dict[str, Any]) -> dict[str, int]:
    """Give a ``tokenizer.json`` the markers that it lacks, in place, and return the ids of all, by their names."""
    added = contents.setdefault("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    free = 1 + max((*contents["model"]["vocab"].values(), *ids.values()), default=-1)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text in MARKERS.values():
        if text not in ids:
            ids[text], free = free, free + 1
            added.append({"id": ids[text], "content": text, **plain, "special": True})
    return {name: ids[text] for name, text in MARKERS.items()}


def read_tokenizer(path: Path) -> dict[str, Any]:
    """The contents of a ``tokenizer.json``.

    Raises:
        UsageError: it is no such file.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(contents["model"]["vocab"], dict):
            raise TypeError("its vocabulary is no table of tokens and ids")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no tokenizer.json: {type(error).__name__}: {error}") from None
    return contents


def ordinary(contents: dict[str, Any]) -> Callable[[str], list[int]]:
    """Encodes text with a ``tokenizer.json``: a marker that somebody typed stays text, and nothing is put before it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(contents))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
