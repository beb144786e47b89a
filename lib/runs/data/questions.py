"""What a model is asked: tasks that a seed makes, and files of them.

A question is a dict. Its keys say of which kind it is, and all of a task are of one kind:

- choices: ``query``, ``choices`` and ``gold``, the index of the right choice, as in CORE's task files;
- answers: ``query`` and ``answer``, as GSM8K has it (which says ``question``, and puts ``####`` before the number);
- programs: ``prompt``, ``test`` and ``entry_point``, as in HumanEval;
- texts: ``text``, a document to be predicted.
"""

import json
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from lib.runs.flags import UsageError

Example = dict[str, Any]
KEYS = {
    "choices": ("query", "choices", "gold"),
    "answers": ("query", "answer"),
    "programs": ("prompt", "test", "entry_point"),
}
"""Keys of a line of each kind; texts have files of their own."""


def _question(draw: random.Random, query: str, right: str, wrong: list[str]) -> Example:
    """The right answer among at most three wrong ones, in a random order."""
    choices = [right, *dict.fromkeys(text for text in wrong if text != right)][:4]
    draw.shuffle(choices)
    return {"query": query, "choices": choices, "gold": choices.index(right)}


def _sums(draw: random.Random) -> Example:
    """Sums of two numbers below 100, among numbers near by."""
    a, b = draw.randrange(100), draw.randrange(100)
    near = draw.sample([-11, -10, -9, -2, -1, 1, 2, 9, 10, 11], 3)
    return _question(draw, f"{a} + {b} =", str(a + b), [str(a + b + d) for d in near])


def _sorting(draw: random.Random) -> Example:
    """Five digits in rising order, among other orders."""
    digits = draw.sample(range(10), 5)
    right = sorted(digits)
    wrong = [draw.sample(right, 5) for _ in range(9)]
    told = [" ".join(map(str, order)) for order in (digits, right, *wrong)]
    return _question(draw, f"{told[0]} in rising order:", told[1], told[2:])


def _copying(draw: random.Random) -> Example:
    """Six letters again, among copies with one letter changed."""
    letters = draw.sample("abcdefghijklmnopqrstuvwxyz", 9)
    right, spare = letters[:6], letters[6:]
    places = draw.sample(range(6), 3)
    wrong = [[*right[:p], new, *right[p + 1 :]] for p, new in zip(places, spare, strict=True)]
    return _question(draw, f"{' '.join(right)} again:", " ".join(right), [" ".join(text) for text in wrong])


def _brackets(draw: random.Random) -> Example:
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


def _dates(draw: random.Random) -> Example:
    """The day after a date; every second one ends a month."""
    day = date(draw.randrange(1990, 2030), draw.randrange(1, 13), draw.randrange(1, 29))
    if draw.random() < 0.5:
        day = (day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)
    wrong = [day + timedelta(days=d) for d in (2, -1, 30)]
    told = [f"{d:%Y-%m-%d}" for d in wrong]
    return _question(draw, f"The day after {day:%Y-%m-%d} is", f"{day + timedelta(days=1):%Y-%m-%d}", told)


TASKS: dict[str, Callable[[random.Random], Example]] = {
    "sums": _sums, "sorting": _sorting, "copying": _copying, "brackets": _brackets, "dates": _dates,
}  # fmt: skip
"""Tasks that ship with the book: each makes a question from a generator."""


def generated(name: str, n: int, seed: int) -> list[Example]:
    """Questions of a task that ships with the book, no query twice."""
    draw, seen = random.Random(f"{name} {seed}"), set[str]()

    def fresh() -> Iterator[Example]:
        while True:
            question = TASKS[name](draw)
            if question["query"] not in seen:
                seen.add(question["query"])
                yield question

    return list(islice(fresh(), n))


def kind_of(question: Example) -> str:
    """The kind whose keys a question has."""
    return next((kind for kind, keys in KEYS.items() if set(keys) <= question.keys()), "texts")


def read(path: Path) -> list[Example]:
    """The questions of a file of JSON lines; keys that their kind does not have are ignored.

    Raises:
        UsageError: the file cannot be read, or a line is no question; the message names the line.
    """
    found: list[Example] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question_of(line))
            if kind_of(found[-1]) != kind_of(found[0]):
                raise ValueError(f"a question of {kind_of(found[-1])}, and those before it are of {kind_of(found[0])}")
        except ValueError as error:
            raise UsageError(f"--tasks {path}: line {number}: {error}") from None
    if not found:
        raise UsageError(f"--tasks {path} has no questions: expected one object a line")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--tasks {path} cannot be read: {error}") from None


def _question_of(line: str) -> Example:
    """The question of a line.

    Raises:
        ValueError: it is none; the message says why.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, expected an object")
    if "question" in row:
        row = {"query": row["question"]} | row
    kind = next((kind for kind, keys in KEYS.items() if keys[-1] in row), None)
    if kind is None:
        wanted = "; or ".join(f"{', '.join(keys)}" for keys in KEYS.values())
        raise ValueError(f"the keys {', '.join(row)[:80] or '(none)'}: expected {wanted}")
    if kind == "choices":
        _check_choices(row)
    for key in KEYS[kind]:
        if key not in ("choices", "gold") and not (isinstance(row.get(key), str) and row[key].strip()):
            raise ValueError(f"{key}: expected a text that is not empty")
    if kind == "programs" and not row["entry_point"].isidentifier():
        raise ValueError(f"entry_point: {row['entry_point'][:40]!r}, expected the name of a function")
    return row


def _check_choices(row: Example) -> None:
    choices, gold = row.get("choices"), row["gold"]
    texts = choices if isinstance(choices, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("choices: expected a list of at least two texts that are not empty")
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise ValueError(f"gold: {str(gold)[:40]}, expected the index of one of {len(texts)} choices")


def read_texts(paths: list[Path]) -> list[Example]:
    """A document of each file that is not empty.

    Raises:
        UsageError: there is none, or a file cannot be read.
    """
    found = [{"text": text, "name": path.name} for path in paths if (text := _text(path))]
    if not found:
        raise UsageError(f"--tasks {paths[0]} is empty: expected text")
    return found


def load(name: str, n: int | None, seed: int) -> dict[str, list[Example]]:
    """The questions of a task's name, of a file, or of a folder, by the task's name.

    In a folder every ``.jsonl`` file is a task, and all ``.txt`` files together are one of the folder's name.

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
        files, texts = sorted(path.glob("*.jsonl")), sorted(path.glob("*.txt"))
        if not files and not texts:
            raise UsageError(f"--tasks {name}: no file .jsonl or .txt in this folder")
        found = {file.stem: read(file)[:n] for file in files}
        return found | ({path.resolve().name: read_texts(texts)[:n]} if texts else {})
    if path.is_file():
        return {path.stem: (read_texts([path]) if path.suffix == ".txt" else read(path))[:n]}
    raise UsageError(f"--tasks {name}: expected {', '.join(TASKS)}, a file .jsonl or .txt, or a folder of such files")
