"""Chats: a folder's template turns messages into the text of one prompt."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from lib.runs.flags import UsageError
from lib.runs.serving.schema import ApiError, shorter

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
LONGEST = 300  # characters of a template's own complaint that a client is told


class TemplateRefuses(Exception):
    """What a template raises about messages that it cannot write, for example two of one role in a row."""


class ChatTemplate:
    """A template in Jinja, as Transformers' tokenizers keep it, in a sandbox.

    Args:
        source: The template.
        tokens: Names and texts of special tokens that it may write: ``bos_token``, ``eos_token`` and others.

    Raises:
        ValueError: the source is no template.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        sandbox.filters["tojson"] = _as_json
        sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self.template = sandbox.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{error} (line {getattr(error, 'lineno', '?')})") from None
        self.source, self.tokens = source, tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.tokens)

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by default up to where the assistant's next answer begins.

        Raises:
            ApiError: the template refuses these messages, or fails on them.
        """
        try:
            return self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except TemplateRefuses as error:
            why = f"the model's chat template refuses them: {error}"
        except Exception as error:  # whatever its author did not think of
            why = f"the model's chat template fails on them: {type(error).__name__}: {error}"
        raise ApiError(400, f"messages: {shorter(why, LONGEST)}", param="messages", code="chat_template")


def _refuse(message: object) -> NoReturn:
    raise TemplateRefuses(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Transformers' filter: Jinja's own would write letters of HTML as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a folder: its own file, else the one in the tokenizer's settings; None if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        settings = _read_settings(folder / SETTINGS)
        if (folder / FILE).is_file():
            source: Any = (folder / FILE).read_text(encoding="utf-8")
        else:
            source = settings.get("chat_template")
        if isinstance(source, list):  # several, each with a name
            source = next((one["template"] for one in source if one["name"] == "default"), None)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError(f"chat_template is a {type(source).__name__}, expected a string")
        return ChatTemplate(source, special_tokens(settings))
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = FILE if (folder / FILE).is_file() else SETTINGS
        said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        raise UsageError(f"--model {folder}: {where}: the chat template cannot be read: {said}") from None


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The special tokens of a ``tokenizer_config.json``, each a string or an object with its ``content``."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is a {type(found).__name__}, expected an object")
    return found
