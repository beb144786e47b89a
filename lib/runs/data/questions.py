"""Questions with a right answer among choices: tasks that a seed makes, and files of them.

A question is a dict with ``query``, ``choices`` and ``gold``, the index of the right choice, as in CORE's task files.
"""

import json
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from lib.runs.flags import UsageError

Question = dict[str, Any]


def _question(draw: random.Random, query: str, right: str, wrong: list[str]) -> Question:
    """The right answer among at most three wrong ones, in a random order."""
    choices = [right, *dict.fromkeys(text for text in wrong if text != right)][:4]
    draw.shuffle(choices)
    return {"query": query, "choices": choices, "gold": choices.index(right)}


def _sums(draw: random.Random) -> Question:
    """Sums of two numbers below 100, among numbers near by."""
    a, b = draw.randrange(100), draw.randrange(100)
    near = draw.sample([-11, -10, -9, -2, -1, 1, 2, 9, 10, 11], 3)
    return _question(draw, f"{a} + {b} =", str(a + b), [str(a + b + d) for d in near])


def _sorting(draw: random.Random) -> Question:
    """Five digits in rising order, among other orders."""
    digits = draw.sample(range(10), 5)
    right = sorted(digits)
    wrong = [draw.sample(right, 5) for _ in range(9)]
    told = [" ".join(map(str, order)) for order in (digits, right, *wrong)]
    return _question(draw, f"{told[0]} in rising order:", told[1], told[2:])


def _copying(draw: random.Random) -> Question:
    """Six letters again, among copies with one letter changed."""
    letters = draw.sample("abcdefghijklmnopqrstuvwxyz", 9)
    right, spare = letters[:6], letters[6:]
    places = draw.sample(range(6), 3)
    wrong = [[*right[:p], new, *right[p + 1 :]] for p, new in zip(places, spare, strict=True)]
    return _question(draw, f"{' '.join(right)} again:", " ".join(right), [" ".join(text) for text in wrong])


def _brackets(draw: random.Random) -> Question:
    """Whether brackets of three kinds are closed in order."""
    text = _nested(draw, 4)
    if is_closed := draw.random() < 0.5:
        shown = text
    else:
        places = draw.sample(range(len(text)), 2)
        letters = list(text)
        letters[places[0]], letters[places[1]] = letters[places[1]], letters[places[0]]
        shown = "".join(letters)
        is_closed = closes(shown)
    return {
        "query": f"Are the brackets {shown} closed in order?",
        "choices": ["yes", "no"],
        "gold": 0 if is_closed else 1,
    }


def _nested(draw: random.Random, n: int) -> str:
    """So many pairs of brackets, in order."""
    if n == 0:
        return ""
    inside = draw.randrange(n)
    pair = draw.choice(("()", "[]", "{}"))
    return pair[0] + _nested(draw, inside) + pair[1] + _nested(draw, n - 1 - inside)


def closes(text: str) -> bool:
    """Whether each bracket of a text is closed by its own kind, in order."""
    open_ones: list[str] = []
    for letter in text:
        if letter in "([{":
            open_ones.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif not open_ones or open_ones.pop() != letter:
            return False
    return not open_ones


def _dates(draw: random.Random) -> Question:
    """The day after a date; every second one ends a month."""
    day = date(draw.randrange(1990, 2030), draw.randrange(1, 13), draw.randrange(1, 29))
    if draw.random() < 0.5:
        day = (day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)
    wrong = [day + timedelta(days=d) for d in (2, -1, 30)]
    told = [f"{d:%Y-%m-%d}" for d in wrong]
    return _question(draw, f"The day after {day:%Y-%m-%d} is", f"{day + timedelta(days=1):%Y-%m-%d}", told)


TASKS: dict[str, Callable[[random.Random], Question]] = {
    "sums": _sums, "sorting": _sorting, "copying": _copying, "brackets": _brackets, "dates": _dates,
}  # fmt: skip
"""Tasks that ship with the book: each makes a question from a generator."""


def generated(name: str, n: int, seed: int) -> list[Question]:
    """Questions of a task that ships with the book, no query twice."""
    draw, seen = random.Random(f"{name} {seed}"), set[str]()

    def fresh() -> Iterator[Question]:
        while True:
            question = TASKS[name](draw)
            if question["query"] not in seen:
                seen.add(question["query"])
                yield question

    return list(islice(fresh(), n))


def read(path: Path) -> list[Question]:
    """The questions of a file: one object a line, with ``query``, ``choices`` and ``gold``; other keys are ignored.

    Raises:
        UsageError: the file cannot be read, or a line is no question; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--tasks {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if problem := _problem(line):
            raise UsageError(f"--tasks {path}: line {number}: {problem}")
        found.append(json.loads(line))
    if not found:
        raise UsageError(f"--tasks {path} has no questions: expected one object a line")
    return found


def _problem(line: str) -> str:
    """What keeps a line from being a question; empty if nothing does."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"no JSON ({error})"
    if not isinstance(row, dict):
        return f"a {type(row).__name__}, expected an object"
    query, choices, gold = (row.get(name) for name in ("query", "choices", "gold"))
    if not isinstance(query, str) or not query.strip():
        return "query: expected a text that is not empty"
    texts = choices if isinstance(choices, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        return "choices: expected a list of at least two texts that are not empty"
    if type(gold) is not int or not 0 <= gold < len(texts):
        return f"gold: {str(gold)[:40]}, expected the index of one of {len(texts)} choices"
    return ""


def load(name: str, n: int | None, seed: int) -> dict[str, list[Question]]:
    """The questions of a task's name, of a file, or of every ``.jsonl`` file of a folder, by the task's name.

    Args:
        name: What ``--tasks`` was given.
        n: Questions of each task at most; None is all of a file, and 200 that are made.
        seed: Of questions that are made.

    Raises:
        UsageError: there is nothing of the kind, or it cannot be read.
    """
    path = Path(name)
    if name in TASKS:
        return {name: generated(name, n or 200, seed)}
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise UsageError(f"--tasks {name}: no file .jsonl in this folder")
        return {file.stem: read(file)[:n] for file in files}
    if path.is_file():
        return {path.stem: read(path)[:n]}
    raise UsageError(f"--tasks {name}: expected {', '.join(TASKS)}, a file of questions, or a folder of such files")
