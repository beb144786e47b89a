"""Tasks that ask the model to write: answers that are compared with the right one, and programs that are run."""

import re
from collections.abc import Callable
from typing import Any

from lib.evaluation import extract_answer, few_shot_prompt
from lib.runs.data.questions import Example
from lib.runs.evaluating import programs
from lib.runs.evaluating.choices import block, share
from lib.runs.flags import UsageError

Write = Callable[[list[str], int, tuple[str, ...]], list[list[str]]]
"""``write(prompts, n_samples, stops)``: what the model writes after each prompt, so many times."""
END = "\n\n"
"""What ends an answer, because it ends a shot."""
MARK = "####"
"""What comes before the last line of an answer in GSM8K."""
NUMBER = r"[-+$€£]?(\d{1,3}(,\d{3})+|\d*)(\.\d*)?%?"
"""A single number, with or without commas between thousands; ``1,2,3`` is none."""


def form_of(answer: str) -> tuple[str, str]:
    """In which form an answer is compared, "letter", "number" or "text", and the right answer in this form."""
    last = answer.rpartition(MARK)[2].strip()
    if re.fullmatch("[A-Z]", last):
        return "letter", last
    number = extract_answer(last)
    if number is not None and re.fullmatch(NUMBER, last):
        return "number", number
    return "text", last


def marked(text: str) -> str:
    """What stands between the last ``<answer>`` and ``</answer>``; the whole text without them."""
    head, end, _ = text.rpartition("</answer>")
    _, begin, inside = head.rpartition("<answer>")
    return inside if begin and end else text


def read_out(text: str, kind: str, n_choices: int = 4) -> str | None:
    """The answer that a model wrote: chapter 27's number or letter, or the text without white space at its ends.

    Where the text has chapter 29's form, only what it marks as the answer is read.
    """
    text = marked(text)
    return text.strip() if kind == "text" else extract_answer(text, kind, n_choices)


def score_answers(
    questions: list[Example], options: Any, progress: Any, write: Write
) -> tuple[dict[str, Any], list[str]]:
    """The result of a task whose answers must be exactly right, and for each question what a page shows of it.

    In a chat there are no shots, and an answer ends where the model ends it.

    Raises:
        UsageError: there are too few questions for the shots.
    """
    solved = [question | {"choices": [question["answer"]], "gold": 0} for question in questions]
    n_shots, stops = (0, ()) if options.chat else (options.shots, (END,))
    try:
        prompts = [few_shot_prompt(solved, i, n_shots, seed=options.seed)[0] for i in range(len(solved))]
    except ValueError as error:
        raise UsageError(f"--shots {options.shots}: {error}") from None
    forms = [form_of(question["answer"]) for question in questions]
    n_choices = max(4, *(ord(right) - ord("A") + 1 for kind, right in forms if kind == "letter"), 4)
    written = [texts[0] for texts in write(prompts, 1, stops)]
    found = [read_out(text, kind, n_choices) for text, (kind, _) in zip(written, forms, strict=True)]
    shown = [
        f"{block(question['query'])}\n{block(text)}\n- read out: `{got}`; right: `{right}`"
        for question, text, got, (_, right) in zip(questions, written, found, forms, strict=True)
    ]
    n_right = sum(got == right for got, (_, right) in zip(found, forms, strict=True))
    return share(n_right, len(questions), 0.0), shown


def score_programs(tasks: list[Example], options: Any, progress: Any, write: Write) -> tuple[dict[str, Any], list[str]]:
    """The result of a task whose answers are programs, and for each what a page shows of its first sample."""
    written = write([task["prompt"] for task in tasks], options.samples, programs.STOPS)
    verdicts = programs.judge_all(tasks, written, options, progress)
    shown = [
        f"{block(task['prompt'] + texts[0])}\n- {row[0].status}" + (f": `{row[0].why}`" if row[0].why else "")
        for task, texts, row in zip(tasks, written, verdicts, strict=True)
    ]
    return programs.score(verdicts), shown
