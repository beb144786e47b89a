"""Tasks that do not ask the model to write: the likeliest of several choices, and the bits for each byte of a text."""

import math
from typing import Any

import torch

from lib.evaluation import (
    bits_per_byte,
    choose_answer,
    core_score,
    encode_pair,
    few_shot_prompt,
    loglikelihood,
    wilson_interval,
)
from lib.runs.data.questions import Example
from lib.runs.flags import UsageError

DEFAULTS: dict[str, Any] = {"shots": 5, "normalization": "byte", "batch_size": 16, "seed": 0}
"""How questions are asked unless flags say otherwise."""
PART = 32  # questions between two signs of progress


def answer(served: Any, questions: list[Example], options: Any, progress: Any) -> list[int]:
    """The index of the choice that the model takes for each question.

    Raises:
        UsageError: a question does not fit into the model, or there are too few for the shots.
    """
    picks: list[int] = []
    limit = served.model.config.context_len
    for first in range(0, len(questions), PART):
        asked = range(first, min(first + PART, len(questions)))
        try:
            prompts = [few_shot_prompt(questions, i, options.shots, seed=options.seed) for i in asked]
            pairs = [encode_pair(served.tokenizer.encode, context, c) for context, choices in prompts for c in choices]
            scores = loglikelihood(served.model, pairs, limit, batch_size=options.batch_size)
        except ValueError as error:
            raise UsageError(f"questions {first} to {asked[-1]}: {error}") from None
        start = 0  # of a question's choices among all pairs
        for i in asked:
            choices = questions[i]["choices"]
            own = slice(start, start + len(choices))
            likely = [score for score, *_ in scores[own]]
            n_tokens = [len(continuation) for _, continuation in pairs[own]]
            n_bytes = [len(choice.encode()) for choice in choices]
            picks.append(choose_answer(likely, options.normalization, n_tokens, n_bytes))
            start = own.stop
        progress.update(len(asked))
    return picks


def judge(questions: list[Example], picks: list[int]) -> dict[str, Any]:
    """How many are right, within what interval, and how many guessing would get."""
    right = sum(pick == question["gold"] for pick, question in zip(picks, questions, strict=True))
    baseline = sum(1 / len(question["choices"]) for question in questions) / len(questions)
    return share(right, len(questions), baseline)


def share(right: int, n: int, baseline: float) -> dict[str, Any]:
    """The result of a task of so many questions, so many of them right."""
    low, high = wilson_interval(right, n)
    return {"questions": n, "right": right, "accuracy": right / n, "low": low, "high": high, "baseline": baseline}


def score_choices(
    served: Any, questions: list[Example], options: Any, progress: Any
) -> tuple[dict[str, Any], list[str]]:
    """The result of a task of choices, and for each question what a page shows of it."""
    picks = answer(served, questions, options, progress)
    shown = []
    for question, pick in zip(questions, picks, strict=True):
        lines = [block(question["query"])]
        for i, choice in enumerate(question["choices"]):
            notes = [note for note, index in (("right", question["gold"]), ("taken", pick)) if i == index]
            lines.append(f"- `{choice}`" + (f" ({', '.join(notes)})" if notes else ""))
        shown.append("\n".join(lines))
    return judge(questions, picks), shown


def block(text: str) -> str:
    """A text as a block of Markdown."""
    return f"```text\n{text.replace('```', '` ` `')}\n```\n"


def first_token(tokenizer: Any) -> int:
    """What stands before a text: the token that the tokenizer puts there, one that ends texts, or a line's end."""
    put = tokenizer.encode("")
    return put[0] if put else min(tokenizer.end_ids, default=tokenizer.encode("\n")[-1])


def score_texts(served: Any, documents: list[Example], options: Any, progress: Any) -> tuple[dict[str, Any], list[str]]:
    """The bits per byte of documents together, and of each what a page shows.

    Tokens are counted as one byte each, and the sum is divided by the bytes of the text itself: so every token is
    scored, and a tokenizer need not say how many bytes its tokens have.
    """
    config, prefix = served.model.config, first_token(served.tokenizer)
    ones = torch.ones(config.vocab_size, dtype=torch.int64)
    bits, sizes, shown = [], [], []
    for document in documents:
        tokens, size = served.tokenizer.encode_rendered(document["text"]), len(document["text"].encode())
        per_token = bits_per_byte(served.model, tokens, ones, prefix, config.context_len, batch_size=options.batch_size)
        bits.append(per_token * len(tokens))
        sizes.append(size)
        shown.append(f"{document['name']}: {bits[-1] / size:.3f} bits per byte, {size:,} bytes, {len(tokens):,} tokens")
        progress.update(1)
    total = sum(sizes)
    return {"documents": len(documents), "bytes": total, "bits_per_byte": math.fsum(bits) / total,
            "prefix_token": prefix, "window": config.context_len}, shown  # fmt: skip


def center(results: dict[str, dict[str, Any]]) -> float | None:
    """Add to each accuracy the centered one; returns their mean, or None if no task has an accuracy."""
    graded = {name: result for name, result in results.items() if "accuracy" in result}
    if not graded:
        return None
    score, centered = core_score({name: result["accuracy"] for name, result in graded.items()},
                                 {name: result["baseline"] for name, result in graded.items()})  # fmt: skip
    for name, value in centered.items():
        graded[name]["centered"] = value
    return score
