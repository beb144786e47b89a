"""Text of a stream of tokens: whole characters only, and none that belong to a stop string."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Characters(Protocol):
    """Turns the tokens of one answer into text, as they come."""

    def add(self, token: int) -> str:
        """The characters that this token completes."""

    def finish(self) -> str:
        """What is left of an incomplete character: U+FFFD, as chapter 1's ``decode`` has it, or nothing."""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer.

    Attributes:
        end_ids: Tokens that end a text.
    """

    end_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def characters(self) -> Characters:
        """Characters for a new answer."""


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
        self.encode = encode or (lambda text: list(text.encode()))
        self.bytes_of = bytes_of or (lambda token: bytes([token]) if token < 256 else b"")
        self.end_ids = frozenset(end_ids)

    def characters(self) -> "ByteCharacters":
        return ByteCharacters(self.bytes_of)


class ByteCharacters:
    """Characters of tokens that are bytes; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self.bytes_of, self.decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self.decoder.decode(self.bytes_of(token))

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


class FileTokenizer:
    """The ``tokenizer.json`` of a Hugging Face folder.

    Args:
        path: The file.
        end_ids: Tokens that end a text.
    """

    def __init__(self, path: str, end_ids: Sequence[int] = ()) -> None:
        from tokenizers import Tokenizer as Theirs

        self.theirs, self.end_ids = Theirs.from_file(path), frozenset(end_ids)

    def encode(self, text: str) -> list[int]:
        return self.theirs.encode(text).ids

    def characters(self) -> "WindowCharacters":
        return WindowCharacters(self.theirs)


class WindowCharacters:
    """Characters of any tokenizer that can only decode lists of tokens.

    Its ``decode`` may treat the first token differently, for example drop a space before it. So a window of tokens is decoded with and without
    the newest ones, and the difference is their text. The window moves on at each whole character.
    """

    def __init__(self, theirs: Any) -> None:
        self.decode, self.tokens, self.n_shown = theirs.decode, list[int](), 0

    def add(self, token: int) -> str:
        self.tokens.append(token)
        if self._text().endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # a character may go on in the next token
        return self.finish()

    def finish(self) -> str:
        new = self._text()[len(self.decode(self.tokens[: self.n_shown])) :]
        if new:
            self.tokens = self.tokens[self.n_shown :]
            self.n_shown = len(self.tokens)
        return new

    def _text(self) -> str:
        return self.decode(self.tokens)


class Answer:
    """The text of one answer, up to the first stop string.

    Args:
        characters: Of the tokenizer.
        stops: Stop strings. Text that may be the beginning of one is held back.

    Attributes:
        is_stopped: Whether a stop string was found; what follows is dropped.
    """

    def __init__(self, characters: Characters, stops: Sequence[str] = ()) -> None:
        self.characters, self.stops, self.held, self.is_stopped = characters, stops, "", False

    def add(self, token: int) -> str:
        """The text that is certain to belong to the answer, now that this token is known."""
        return self._release(self.characters.add(token))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        certain = self._release(self.characters.finish())
        rest, self.held = self.held, ""
        return certain + rest

    def _release(self, new: str) -> str:
        if self.is_stopped:
            return ""
        self.held += new
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        n_certain = min(found)[1] if found else len(self.held) - self._n_uncertain()
        certain, self.held = self.held[:n_certain], "" if found else self.held[n_certain:]
        self.is_stopped = bool(found)
        return certain

    def _n_uncertain(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        ends = range(min(longest, len(self.held)), 0, -1)
        return next((n for n in ends if any(stop.startswith(self.held[-n:]) for stop in self.stops)), 0)
