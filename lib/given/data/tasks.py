"""Tasks whose answers a program can check: sums, sorting and countdown, in endless supply from a seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Check = Callable[[str], bool]
MARKERS = ("<think>", "</think>", "<answer>", "</answer>")
ALPHABET = "0123456789+-*/()=:;, \n"
"""All other characters of the tasks; with the markers they make a small vocabulary."""


@dataclass(frozen=True)
class Question:
    """A prompt, a check of its answers, and one right response, for supervised training.

    Attributes:
        prompt: Ends with ``<think>``.
        check: Says whether an answer, the text between the last two markers, is right.
        solution: A response in the right form, with a right answer unless said otherwise.
    """

    prompt: str
    check: Check
    solution: str


def form(thought: str, answer: str) -> str:
    """A response to a prompt that ends with ``<think>``."""
    return f"{thought}</think><answer>{answer}</answer>"


def supervised_batch(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[N, T]`` of prompts and responses; a target is -100 in the prompt and in the padding."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    tokens, targets = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    for n, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        tokens[n, :end] = torch.tensor(prompt + response)
        targets[n, len(prompt) : end] = tokens[n, len(prompt) : end]
    return tokens[:, :-1], targets[:, 1:]


def sums(n_digits: int = 2, seed: int = 0, hedged: float = 0.0) -> Iterator[Question]:
    """Sums of two numbers of at most ``n_digits`` digits. The thought adds digit by digit, one to three times.

    Args:
        n_digits: More digits make the task harder.
        seed: Of the questions.
        hedged: The share of answers that come with the sum and both of its neighbours, which is wrong.
    """
    draw = random.Random(seed)
    while True:
        a, b = (draw.randrange(10**n_digits) for _ in range(2))
        thought = ";".join([_carries(a, b, n_digits)] * draw.randint(1, 3))
        near = (a + b - 1, a + b, a + b + 1)
        answer = ",".join(map(str, near)) if draw.random() < hedged else str(a + b)
        yield Question(f"{a}+{b}=<think>", _equals(str(a + b)), form(thought, answer))


def sorting(n_numbers: int = 4, seed: int = 0) -> Iterator[Question]:
    """Lists of one-digit numbers, to be put in order."""
    draw = random.Random(seed)
    while True:
        numbers = [draw.randrange(10) for _ in range(n_numbers)]
        right = ",".join(map(str, sorted(numbers)))
        yield Question(f"{','.join(map(str, numbers))}:<think>", _equals(right), form("", right))


def countdown(
    check_countdown: Callable[[str, list[int], int], bool], n_numbers: int = 3, seed: int = 0
) -> Iterator[Question]:
    """Numbers from 1 to 9 and a target that some expression of them reaches.

    Args:
        check_countdown: Chapter 29's function.
        n_numbers: More numbers make the task harder.
        seed: Of the questions.
    """
    draw = random.Random(seed)
    while True:
        numbers = [draw.randint(1, 9) for _ in range(n_numbers)]
        expression, value = str(numbers[0]), Fraction(numbers[0])
        for number in numbers[1:]:
            sign = draw.choice("+-*")
            value = value + number if sign == "+" else value - number if sign == "-" else value * number
            expression = f"({expression}){sign}{number}"
        given = list(numbers)
        draw.shuffle(given)
        target = int(value)

        def check(answer: str, given: list[int] = given, target: int = target) -> bool:
            return check_countdown(answer, given, target)

        yield Question(f"{','.join(map(str, given))}={target}:<think>", check, form("", expression))


def _equals(right: str) -> Check:
    return lambda answer: answer == right


def _carries(a: int, b: int, n_digits: int) -> str:
    """Each column's sum with the carry, from the right: 47+85 is "12 13"."""
    columns, carry = [], 0
    for place in range(n_digits):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        columns.append(str(column))
        carry = column // 10
    return " ".join(columns)


class Characters:
    """A tokenizer of one token a character, and one for each marker and for the end and the padding."""

    def __init__(self) -> None:
        self.pieces = ["<pad>", "<end>", *MARKERS, *ALPHABET]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.pad_id, self.eos_id = 0, 1

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids; a ``KeyError`` names a character that is none of the tasks'."""
        ids = []
        while text:
            piece = next((marker for marker in MARKERS if text.startswith(marker)), text[0])
            ids.append(self.ids[piece])
            text = text[len(piece) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text; the end and the padding are left out."""
        return "".join(self.pieces[i] for i in ids if i > 1)
