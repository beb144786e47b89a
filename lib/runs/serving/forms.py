"""Answers of a given form: JSON of a schema, or a text that a regular expression matches.

llguidance reads the form, and says after each token which ones may follow. The engine gives all others a score of -inf.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lib.runs.serving.grammar import LONGEST
from lib.runs.serving.schema import shorter
from lib.runs.serving.text import Tokenizer


class Form:
    """How far one answer has come in its form.

    Args:
        matcher: llguidance's.

    Attributes:
        error: Why the library cannot go on; empty while it can.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.n_accepted, self.error = matcher, 0, ""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, and nothing may follow."""
        return bool(self.matcher.is_stopped())

    def add(self, token: int) -> None:
        """Note the answer's next token."""
        self.n_accepted += 1
        if not self.is_over and not self.matcher.consume_token(token):
            self.error = shorter(" ".join(self.matcher.get_error().split()), LONGEST)

    def accept(self, tokens: Sequence[int]) -> None:
        """Note all tokens of an answer so far; those that were noted before are skipped."""
        for token in tokens[self.n_accepted :]:
            self.add(token)

    def bits(self) -> Tensor:
        """Which tokens may come next, 32 in each number, int32."""
        return torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)


class Forms:
    """Makes the forms of a server's answers; the vocabulary is read at the first one.

    Args:
        tokenizer, vocab_size: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._theirs: Any = None

    def make(self, grammar: str, n: int) -> list[Form]:
        """The forms of n answers, of a grammar that ``grammar_of`` returned.

        Raises:
            ValueError: the vocabulary cannot write what the grammar asks for.
        """
        from llguidance import LLMatcher

        first = LLMatcher(self._vocabulary(), grammar, log_level=0)
        if first.is_error():
            raise ValueError(f"response_format: {shorter(' '.join(first.get_error().split()), LONGEST)}")
        return [Form(first), *(Form(first.deep_copy()) for _ in range(n - 1))]

    def _vocabulary(self) -> Any:
        if self._theirs is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            self._theirs = LLTokenizer(TokenizerWrapper(_Vocabulary(self.tokenizer, self.vocab_size)))
        return self._theirs


class _Vocabulary:
    """A tokenizer as llguidance wants it. One without an end gets a token for it that the model does not have."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ends = sorted(i for i in tokenizer.end_ids if i < vocab_size)
        self.tokens = [tokenizer.bytes_of(i) for i in range(vocab_size)]
        if not ends:
            ends = [vocab_size]
            self.tokens.append(b"<end>")
        self.eos_token_id, self.special_token_ids = ends[0], ends
        self.encode = tokenizer.encode_rendered

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def allowed(forms: Sequence[Form], vocab_size: int, device: torch.device) -> Bool[Tensor, "n v"]:
    """Which tokens each form allows."""
    bits = torch.stack([form.bits() for form in forms])
    bits = bits.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else bits
    return (bits[:, :, None] >> torch.arange(32, device=device) & 1).bool().flatten(1)[:, :vocab_size]


def masked(logits: Float[Tensor, "n v"], rows: list[int], forms: Sequence[Form]) -> Float[Tensor, "n v"]:
    """A copy of the logits, -inf where a row's form does not allow a token."""
    there = torch.tensor(rows, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
    fine = allowed(forms, logits.shape[-1], logits.device)
    return logits.index_copy(0, there, logits[there].masked_fill(~fine, -torch.inf))
