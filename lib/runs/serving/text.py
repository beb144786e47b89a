"""Text of a stream of tokens: whole characters only, and none that belong to a stop string."""

import json
import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Protocol

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
WINDOW = 16  # tokens of the prompt that an answer is decoded with
LONGEST = 3  # bytes of UTF-8, and so tokens, after which a character may still be incomplete


ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece for a byte of a character that has none


def _bytes_by_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _bytes_by_letter()


class Characters:
    """The text of an answer, as its tokens come: the text of prompt and answer together,
    cut where the prompt's text ends.

    What a token stands for depends on those before it: a tokenizer drops the space before the first word of a text,
    and a character may begin in one token and end in another.
    So a window of tokens is decoded with and without the newest ones, and the difference is their text.
    The window, at first the end of the prompt, moves on at each whole character.

    Args:
        decode: The text of tokens. Bytes that are not UTF-8 become U+FFFD.
        prompt: The tokens before the answer.

    Attributes:
        n_replaced: Characters at the end of the prompt's own text that the answer replaces:
            the U+FFFD of a character that the prompt begins and the answer completes.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self.decode, self.tokens, self.n_replaced = decode, list(prompt[-WINDOW:]), 0
        self.n_shown = len(self.tokens)
        self.is_first = True

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        return self._show(len(self.tokens) - LONGEST) if text.endswith(UNKNOWN) else self._show(len(self.tokens), text)

    def finish(self) -> str:
        """What is left of an incomplete character: U+FFFD, as chapter 1's ``decode`` has it, or nothing."""
        return self._show(len(self.tokens))

    def _show(self, n: int, text: str | None = None) -> str:
        """The text of the first tokens of the window, as far as it was not shown yet."""
        if n <= self.n_shown:
            return ""
        before, text = self.decode(self.tokens[: self.n_shown]), self.decode(self.tokens[:n]) if text is None else text
        is_longer = text.startswith(before)
        n_same = len(before) if is_longer else len(commonprefix([before, text]))  # noqa: RUF071
        if n_same < len(text):
            if self.is_first:
                self.n_replaced = len(before) - n_same
            self.tokens, self.n_shown, self.is_first = self.tokens[self.n_shown :], n - self.n_shown, False
        return text[n_same:]


class Tokenizer(Protocol):
    """What the server needs of a tokenizer.

    Attributes:
        end_ids: Tokens that end a text.
    """

    end_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a text that a chat template wrote, its special tokens included: nothing is put before it."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; a token that the tokenizer lacks has none."""

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for in the middle of a text; perhaps a part of a character."""


class ByteTokenizer:
    """Tokens that are bytes, or sequences of bytes.

    Args:
        encode: The tokens of a text; its bytes unless given.
        bytes_of: The bytes of a token; by default a token below 256 is the byte with its number.
        end_ids: Tokens that end a text.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]] | None = None,
        bytes_of: Callable[[int], bytes] | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.encode = self.encode_rendered = encode or _bytes_of_text
        self.bytes_of = bytes_of or _one_byte
        self.end_ids = frozenset(end_ids)

    def decode(self, tokens: list[int]) -> str:
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")


def _bytes_of_text(text: str) -> list[int]:
    return list(text.encode())


def _one_byte(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


class FileTokenizer:
    """The ``tokenizer.json`` of a Hugging Face folder.

    The file may hold settings of the program that saved it, which would change a prompt:
    a length at which texts are cut or padded, merges that are dropped at random,
    and a token that is put behind each text, which would end it before the model has begun.
    None of them is heeded.
    What is put before a text, such as Llama's ``<s>``, belongs to a prompt.

    Args:
        path: The file.
        end_ids: Tokens that end a text; None takes the file's special tokens.

    Attributes:
        n_tokens: 1 more than the largest token.
    """

    def __init__(self, path: str, end_ids: Sequence[int] | None = None) -> None:
        from tokenizers import Tokenizer as Theirs

        self.theirs = Theirs.from_str(Path(path).read_text(encoding="utf-8"))
        self.theirs.no_truncation()
        self.theirs.no_padding()
        if getattr(self.theirs.model, "dropout", None) is not None:
            self.theirs.model.dropout = None
        added = self.theirs.get_added_tokens_decoder()
        self.n_tokens = 1 + max((*self.theirs.get_vocab().values(), *added), default=-1)
        self.end_ids = frozenset((i for i, token in added.items() if token.special) if end_ids is None else end_ids)
        self.added = {i: token.content for i, token in added.items()}
        self.alone = dict[int, str]()  # texts of single tokens, which a stream asks for at each step
        self.is_of_bytes = '"ByteLevel"' in json.dumps(json.loads(self.theirs.to_str()).get("decoder"))

    def encode(self, text: str) -> list[int]:
        found = self.theirs.encode(text)
        n = len(found.ids)
        while n and found.special_tokens_mask[n - 1]:  # 1: not in the text, but put behind it
            n -= 1
        return found.ids[:n] or found.ids[:1]

    def encode_rendered(self, text: str) -> list[int]:
        return self.theirs.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        if len(tokens) != 1:
            return self.theirs.decode(tokens)
        if (text := self.alone.get(tokens[0])) is None:
            text = self.alone[tokens[0]] = self.theirs.decode(tokens)
        return text

    def bytes_of(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        name = self.theirs.id_to_token(token) or ""
        if self.is_of_bytes:
            return b"".join(bytes([BYTES[letter]]) if letter in BYTES else letter.encode() for letter in name)
        if ONE_BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class Answer:
    """The text of one answer, up to the first stop string.

    Args:
        characters: Of the tokenizer.
        stops: Stop strings. Text that may be the beginning of one is held back.

    Attributes:
        is_stopped: Whether a stop string was found; what follows is dropped.
        n_read: Characters that the tokens so far have completed.
        n_certain: Those among them that are certain to belong to the answer.
    """

    def __init__(self, characters: Characters, stops: Sequence[str] = ()) -> None:
        self.characters, self.stops, self.held, self.is_stopped = characters, stops, "", False
        self.n_read = self.n_certain = 0

    def add(self, token: int) -> str:
        """The text that is certain to belong to the answer, now that this token is known."""
        return self._release(self.characters.add(token))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        certain = self._release(self.characters.finish())
        rest, self.held = self.held, ""
        self.n_certain += len(rest)
        return certain + rest

    def _release(self, new: str) -> str:
        if self.is_stopped:
            return ""
        self.n_read += len(new)
        if not self.stops:
            self.n_certain = self.n_read
            return new
        self.held += new
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        n_certain = min(found)[1] if found else len(self.held) - self._n_uncertain()
        certain, self.held = self.held[:n_certain], "" if found else self.held[n_certain:]
        self.is_stopped = bool(found)
        self.n_certain += len(certain)
        return certain

    def _n_uncertain(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        ends = range(min(longest, len(self.held)), 0, -1)
        return next((n for n in ends if any(stop.startswith(self.held[-n:]) for stop in self.stops)), 0)
