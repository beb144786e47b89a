"""What a model can do, and how sure we are: bits, answers, intervals, and questions that it has seen before."""

import itertools
import math
import random
import re
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lib.given.programs import run_program as run_program

Model = Callable[[Int[Tensor, "b t"]], Any]
"""Takes tokens, and returns logits ``[B, T, V]`` or a tuple that begins with them. It is causal."""
Window = tuple[list[int], list[int]]


def rolling_windows(
    tokens: Sequence[int], prefix_token: int, max_seq_len: int, context_len: int = 1
) -> Iterator[Window]:
    """Cut a long text into windows, so that each of its tokens is predicted exactly once. (Exercise 27.1)

    Size: 20 minutes, difficulty 3, core.

    Args:
        tokens: Ids of the text.
        prefix_token: Id that comes before the first token, which is its only context.
        max_seq_len: Largest number of ids that the model takes.
        context_len: Ids before the first target of a later window, at the least.

    Returns:
        An iterator over pairs ``(inputs, targets)`` of lists of ids.
        The model's last ``len(targets)`` logits score them.

        - The row is ``[prefix_token, *tokens]``.
        - The first window scores the first ``max_seq_len`` tokens.
        - Each later one scores the next ``max_seq_len - context_len + 1``, and the last one those that remain.
        - The inputs are the up to ``max_seq_len`` ids of the row that end before the last target.

    Raises:
        ValueError: ``context_len`` is not from 1 to ``max_seq_len``; the message shows both.
            The call raises it, before the first window.

    Source: ``get_rolling_token_windows`` of EleutherAI's lm-evaluation-harness.
    """
    raise NotImplementedError("Exercise 27.1: write rolling_windows")


def bits_per_byte(
    model: Model,
    tokens: Sequence[int],
    token_bytes: Int[Tensor, " v"],
    prefix_token: int,
    max_seq_len: int,
    context_len: int = 1,
    batch_size: int = 16,
) -> float:
    """Bits that a model needs for a byte of a text, whatever its tokenizer. (Exercise 27.2)

    Size: 25 minutes, difficulty 3, core.

    Args:
        model: Takes int64 tokens ``[B, T]``; returns logits ``[B, T, V]``, or a tuple that begins with them.
        tokens: Ids of the text.
        token_bytes: Bytes of each id, int64 ``[V]``; 0 for special tokens.
        prefix_token: Id that comes before the first token.
        max_seq_len: Largest number of ids that the model takes.
        context_len: Ids before the first target of a later window, at the least.
        batch_size: Largest number of windows in one call.

    Returns:
        The targets' negative log-probabilities in nats, over ln 2 times their bytes, summed in float64.
        Ids of 0 bytes stay in the inputs; as targets they are neither scored nor counted.

    Raises:
        ValueError: the text has no byte at all, or ``rolling_windows`` refuses ``context_len``.

    Cost: no gradients; at most ``batch_size`` windows and ``max_seq_len`` positions a call.
        The tokens go to the device of the model's parameters, or to the CPU if it has none.
    """
    raise NotImplementedError("Exercise 27.2: write bits_per_byte")


def encode_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context, and of the continuation that is scored after it. (Exercise 27.3)

    Size: 15 minutes, difficulty 3, core.

    Args:
        encode: Turns text into ids.
        context: Text before the continuation.
            White space at its end, as ``str.rstrip`` sees it, moves to the continuation first.
        continuation: Text to be scored.

    Returns:
        Two lists of ids, which joined are the encoding of the whole text.
        They are cut where it first differs from the encoding of the context alone.
        So every token that holds a byte of the continuation is scored, also one that reaches back into the context.
        The first list may be empty.

    Convention: lm-evaluation-harness cuts after as many tokens as the context alone has.
        This is the same where no token crosses the border, and loses tokens where one does.
    """
    raise NotImplementedError("Exercise 27.3: write encode_pair")


def loglikelihood(
    model: Model,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_length: int,
    pad_id: int = 0,
    batch_size: int = 16,
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation after its context, and whether greedy decoding would write it. (Exercise 27.4)

    Size: 35 minutes, difficulty 4, core.

    Args:
        model: Takes int64 tokens ``[B, T]``; returns logits ``[B, T, V]``, or a tuple that begins with them.
        requests: Pairs of ids ``(context, continuation)``.
        max_length: Largest number of ids that the model takes.
            Of context and continuation the last ``max_length + 1`` ids are kept, and all but the last are passed.
        pad_id: Id that fills the shorter rows of a batch, on the right.
            So the last logits of a row may belong to padding.
        batch_size: Largest number of rows in one call.

    Returns:
        ``(log_prob, is_greedy)`` for each request, in their order.
        The first is the sum over the continuation in nats, of logits in float32 at least.
        The second says whether each of its tokens has the largest logit.
        An empty continuation gives ``(0.0, True)``.

    Raises:
        ValueError: a context is empty; the message shows the request's index.
            Or a continuation is longer than ``max_length``; the message shows both numbers.
            No call comes before it.

    Cost: no gradients. The requests are sorted by length, longest first, and cut into batches of ``batch_size``.
        Each batch is padded to its own longest row. An empty continuation costs nothing.
        The tokens go to the device of the model's parameters, or to the CPU if it has none.
    """
    raise NotImplementedError("Exercise 27.4: write loglikelihood")


def choose_answer(
    log_probs: Sequence[float],
    normalization: str = "sum",
    n_tokens: Sequence[int] | None = None,
    n_bytes: Sequence[int] | None = None,
    unconditional: Sequence[float] | None = None,
) -> int:
    """Index of the choice with the largest score; of equal ones the lowest. (Exercise 27.5)

    Size: 15 minutes, difficulty 2, core.

    Args:
        log_probs: Log-probability of each choice after the question; ``-inf`` is a score.
        normalization: "sum", the log-probability itself; "token" and "byte", over the length of the choice;
            or "unconditional", minus the log-probability of the same continuation after an empty prompt.
        n_tokens: Tokens of each choice, for "token".
        n_bytes: Bytes of each choice in UTF-8 as it stands in the task file, without delimiter, for "byte".
        unconditional: Log-probability of each choice after an empty prompt, for "unconditional".

    Returns:
        The index. What another normalization would need is ignored.

    Raises:
        ValueError: One of these.

            - The list that the normalization needs is missing or has another length; the message names the argument.
            - A length is 0 or less, or a score is NaN; the message shows the choice's index.
            - The normalization is unknown; the message shows it.

    Source: Brown and others (arXiv:2005.14165); "byte" is like the harness's ``acc_norm``, which counts characters.
    """
    raise NotImplementedError("Exercise 27.5: write choose_answer")


def few_shot_prompt(
    examples: Sequence[Mapping[str, Any]],
    index: int,
    n_shots: int = 0,
    continuation_delimiter: str = " ",
    seed: int = 1234,
) -> tuple[str, list[str]]:
    """Prompt of one question after solved ones, and a continuation for each of its choices. (Exercise 27.6)

    Size: 20 minutes, difficulty 2, core.

    Args:
        examples: Questions: dicts with ``query``, ``choices`` and ``gold``, the index of the right choice.
        index: The question that is asked.
        n_shots: Number of solved examples before it.
        continuation_delimiter: Text between a query and its answer.
        seed: The shots are ``random.Random(seed + index).sample(available, n_shots)``.
            ``available`` are the indices, rising, of all examples but this one, and but those with the same query.

    Returns:
        The context, and ``delimiter + choice`` for each choice.
        Each shot is ``query + delimiter + right choice + "\\n\\n"``; the context ends with the query.

    Raises:
        ValueError: fewer examples are available than ``n_shots``; the message shows both numbers.

    Source: the CORE evaluation of nanochat, which follows DCLM (arXiv:2406.11794).
    Convention: nanochat leaves out the question itself only, so a copy of it can be a shot and give the answer away.
    """
    raise NotImplementedError("Exercise 27.6: write few_shot_prompt")


def wilson_interval(n_correct: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Shares of right answers that n questions cannot rule out. (Exercise 27.7)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        n_correct: Questions that were answered correctly.
        n: Questions that were asked.
        level: Share of such intervals that contain the true accuracy, about.

    Returns:
        ``(low, high)`` of the score interval, without continuity correction.
        ``low`` is exactly 0.0 if nothing is right, and ``high`` exactly 1.0 if everything is.

    Raises:
        ValueError: not ``0 <= n_correct <= n``, or ``n`` is below 1; the message shows both.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    raise NotImplementedError("Exercise 27.7: write wilson_interval")


def paired_difference(
    a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable] | None = None, level: float = 0.95
) -> tuple[float, float, float, float]:
    """How much better one model is than another on the same questions, and how sure that is. (Exercise 27.8)

    Size: 25 minutes, difficulty 3, core.

    Args:
        a: Score of the first model on each question.
        b: Score of the second model on the same questions.
        clusters: A label for each question, in any order.
            Questions with equal labels, such as those about one text, are not independent.
        level: Share of such intervals that contain the true difference, about.

    Returns:
        ``(difference, standard_error, low, high)``: the mean of a - b, its standard error, and the ends of
        the interval, which are a normal quantile times the error away. Clusters of one question change nothing.

    Raises:
        ValueError: the lengths differ, or there are fewer than 2 questions; the message shows the numbers.

    Source: Miller (arXiv:2411.00640).
    Convention: the term of independent questions is divided by n (n - 1), that of the clusters by n squared.
    """
    raise NotImplementedError("Exercise 27.8: write paired_difference")


def core_score(accuracies: Mapping[str, float], baselines: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """One number for many tasks: 0 for guessing, 1 for knowing everything. (Exercise 27.9)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        accuracies: Share of right answers of each task.
        baselines: Share that guessing gets right, for the same tasks.

    Returns:
        The mean over the tasks, and the centered accuracy of each: 0 at its baseline, 1 if all answers are right.
        A centered accuracy may be negative.

    Raises:
        ValueError: a task is in only one of the two (the message names all such tasks),
            or a baseline is outside of [0, 1) (the message names the task).

    Source: DCLM (arXiv:2406.11794).
    """
    raise NotImplementedError("Exercise 27.9: write core_score")


def extract_answer(text: str, kind: str = "number", n_choices: int = 4) -> str | None:
    """The answer that a written solution ends in, in one form. (Exercise 27.10)

    Size: 35 minutes, difficulty 4, core.

    Args:
        text: What the model wrote.
        kind: "number" or "letter".
        n_choices: The letters are the first ``n_choices`` capitals.

    Returns:
        The answer, or None if there is none.

        "number" is the last one in the text: ASCII digits, plain or in groups of three by commas, and perhaps
        a decimal part. A "-" before it counts unless a letter, a digit, an underscore, ".", ")" or "]" is before that.
        The form has no commas, no zeros in front, none at the end of the decimal part, and no "-0".

        "letter" is X if the whole text, without white space at its ends, is ``X`` or ``(X``, alone or followed by one
        of ``)``, ``.`` and ``:``, and perhaps by white space and anything.
        Otherwise it is the letter of the last ``answer``, ``answer is`` or ``answer:``, in upper or lower case, which
        a letter follows directly, as a word of its own: plain, as ``(X)`` or as ``[X]``.
        So ``answer is: X`` does not count.

    Raises:
        ValueError: another ``kind``; the message shows it.
    """
    raise NotImplementedError("Exercise 27.10: write extract_answer")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, from n samples of which c are. (Exercise 27.11)

    Size: 15 minutes, difficulty 3, core.

    Args:
        n: Samples that were drawn.
        c: Samples that were right.
        k: Samples that a user would draw.

    Returns:
        ``1 - C(n - c, k) / C(n, k)``, with a relative error below 1e-9, also at n = 100,000.

    Raises:
        ValueError: not ``0 <= c <= n`` and ``1 <= k <= n``; the message shows the three.

    Source: Chen and others (arXiv:2107.03374).
    """
    raise NotImplementedError("Exercise 27.11: write pass_at_k")


def expected_calibration_error(confidences: Sequence[float], correct: Sequence[bool], n_bins: int = 15) -> float:
    """How far a model's confidence is from its accuracy, on average over bins of confidence. (Exercise 27.12)

    Size: 20 minutes, difficulty 2, core.

    Args:
        confidences: Probability that the model gave to each of its answers.
        correct: Whether each answer was right.
        n_bins: Bins of equal width: bin i holds the confidences in ``(i / n_bins, (i + 1) / n_bins]``, in float64.
            A confidence of 0 is in the first.

    Returns:
        The sum over bins of ``|sum of correct - sum of confidences|``, over the number of answers.

    Raises:
        ValueError: a confidence outside of [0, 1] or NaN (the message shows it), different lengths (the message shows
            both), or nothing at all.

    Source: Guo and others (arXiv:1706.04599).
    """
    raise NotImplementedError("Exercise 27.12: write expected_calibration_error")


def contaminated_share(texts: Sequence[str], corpus: Iterable[str], n: int = 13) -> list[float]:
    """Share of each test text's n-grams that the training corpus contains. (Exercise 27.13)

    Size: 25 minutes, difficulty 3, core.

    Args:
        texts: Test texts.
        corpus: Documents; any iterable.
        n: Words in a gram. Words are what ``\\w+`` finds in the lower-cased text.

    Returns:
        For each text the share of its n-grams that occur in a document; each place counts.
        Grams never cross documents. A text of fewer than n words is one gram of all its words.
        A text without words has the share 0.0.

    Cost: the corpus is read once, and a document is dropped before the next is taken.
        The variable of a ``for`` loop still holds a document while the next is being made.
        Memory grows with the texts only.

    Source: Brown and others (arXiv:2005.14165), for grams of 13 words.
    """
    raise NotImplementedError("Exercise 27.13: write contaminated_share")
