"""Tasks with exact checkers: questions to train on, others to be evaluated on, and what an answer is worth.

A prompt's checksum decides whether it is held out, so no question is ever in both parts, whatever the seed.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lib.given.data.tasks import Question, countdown, form, sorting, sums
from lib.rewards import check_countdown, score_response
from lib.runs.data import questions
from lib.runs.flags import UsageError

Make = Callable[[int, int], Iterator[Question]]
"""Endless questions of a difficulty and a seed."""
ONE_IN = 5
"""One prompt in so many is held out."""
TRIES = 200
"""Questions that are drawn in vain before a task counts as exhausted."""


@dataclass(frozen=True)
class Kind:
    """A task: what makes its questions, and its difficulties; none if there is only one.

    Attributes:
        make: Its questions.
        unit: What the difficulty counts.
        least, most, usual: Its limits, and the default.
    """

    make: Make
    unit: str = ""
    least: int = 0
    most: int = 0
    usual: int = 0


def _of_choices(name: str) -> Make:
    """A task of ``lib.runs.data.questions``, whose right choice the model must write itself."""

    def make(_: int, seed: int) -> Iterator[Question]:
        draw = random.Random(f"{name} {seed}")
        while True:
            asked = questions.TASKS[name](draw)
            right = asked["choices"][asked["gold"]]
            yield Question(f"{asked['query']}<think>", right.__eq__, form("", right))

    return make


KINDS = {
    "sums": Kind(sums, "digits of each number", 1, 9, 1),
    "sorting": Kind(sorting, "numbers", 2, 9, 4),
    "countdown": Kind(lambda n, seed: countdown(check_countdown, n, seed), "numbers", 2, 6, 3),
    **{name: Kind(_of_choices(name)) for name in ("copying", "brackets", "dates")},
}
"""Tasks by name. Sums, sorting and countdown are chapter 29's; the others are those of ``lib.runs.evaluate``."""


def check_difficulty(name: str, difficulty: int | None) -> int:
    """The difficulty of a task, its default if None.

    Raises:
        UsageError: the task has no such difficulty.
    """
    kind = KINDS[name]
    if difficulty is None:
        return kind.usual
    if not kind.unit:
        raise UsageError(f"--difficulty {difficulty} with --task {name}, which has only one: expected no --difficulty")
    if not kind.least <= difficulty <= kind.most:
        raise UsageError(
            f"--difficulty {difficulty}: of --task {name} it is the {kind.unit}, expected {kind.least} to {kind.most}"
        )
    return difficulty


def is_held_out(prompt: str) -> bool:
    """Whether a question is kept for evaluations."""
    return zlib.crc32(prompt.encode()) % ONE_IN == 0


def endless(name: str, difficulty: int, seed: int) -> Iterator[Question]:
    """Questions to train on, for ever; the same prompt may come again."""
    return (q for q in KINDS[name].make(difficulty, seed) if not is_held_out(q.prompt))


def draw(name: str, difficulty: int, n: int, seed: int, held_out: bool = False) -> list[Question]:
    """Questions of one part, no prompt twice; fewer if the task has no more."""
    found: dict[str, Question] = {}
    n_vain = 0
    for question in KINDS[name].make(difficulty, seed):
        if len(found) == n or n_vain == TRIES:
            break
        if is_held_out(question.prompt) != held_out or question.prompt in found:
            n_vain += 1
        else:
            found[question.prompt], n_vain = question, 0
    return list(found.values())


def score(texts: Sequence[str], asked: Sequence[Question], format_weight: float) -> dict[str, list[float]]:
    """``score_response`` of each text, as lists by its names."""
    scores = [score_response(text, q.check, format_weight) for text, q in zip(texts, asked, strict=True)]
    return {name: [found[name] for found in scores] for name in ("reward", "answer_reward", "format_reward")}
