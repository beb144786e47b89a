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
    """Cut a long text into windows, so that each of its tokens is predicted exactly once. (Exercise)

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
    ### BEGIN SOLUTION
    if not 1 <= context_len <= max_seq_len:
        raise ValueError(f"context_len = {context_len}: expected 1 to max_seq_len = {max_seq_len}")
    row = [prefix_token, *(int(token) for token in tokens)]
    return _windows(row, max_seq_len, max_seq_len - context_len + 1)
    ### END SOLUTION


### BEGIN SOLUTION
def _windows(row: list[int], max_seq_len: int, stride: int) -> Iterator[Window]:
    """The windows of a row whose first id is no target."""
    start, end = 0, min(max_seq_len, len(row) - 1)
    while start < end:
        yield row[max(0, end - max_seq_len) : end], row[start + 1 : end + 1]
        start, end = end, min(end + stride, len(row) - 1)


@torch.no_grad()
def _target_logits(model: Model, windows: Sequence[Window], pad_id: int) -> list[Float[Tensor, "n v"]]:
    """Logits of each window's targets, in float32 at least, from one call of the model."""
    device = next(iter(getattr(model, "parameters", list)()), torch.empty(0)).device
    longest = max(len(inputs) for inputs, _ in windows)
    rows = [inputs + [pad_id] * (longest - len(inputs)) for inputs, _ in windows]
    logits = model(torch.tensor(rows, dtype=torch.int64, device=device))
    logits = logits[0] if isinstance(logits, tuple) else logits
    scored = [row[len(x) - len(y) : len(x)] for row, (x, y) in zip(logits, windows, strict=True)]
    return [row.to(torch.promote_types(row.dtype, torch.float32)) for row in scored]


### END SOLUTION


def bits_per_byte(
    model: Model,
    tokens: Sequence[int],
    token_bytes: Int[Tensor, " v"],
    prefix_token: int,
    max_seq_len: int,
    context_len: int = 1,
    batch_size: int = 16,
) -> float:
    """Bits that a model needs for a byte of a text, whatever its tokenizer. (Exercise)

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
    ### BEGIN SOLUTION
    windows = rolling_windows(tokens, prefix_token, max_seq_len, context_len)
    nats, n_bytes = 0.0, 0
    while batch := list(itertools.islice(windows, batch_size)):
        for (_, targets), logits in zip(batch, _target_logits(model, batch, prefix_token), strict=True):
            ids = torch.tensor(targets, device=logits.device)
            sizes = token_bytes.to(logits.device)[ids]
            losses = cross_entropy(logits, ids, reduction="none")
            nats += losses[sizes > 0].double().sum().item()
            n_bytes += int(sizes.sum())
    if n_bytes == 0:
        raise ValueError("the text has no byte to score")
    return nats / (math.log(2) * n_bytes)
    ### END SOLUTION


def encode_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context, and of the continuation that is scored after it. (Exercise)

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
    ### BEGIN SOLUTION
    end = len(context.rstrip())
    context, continuation = context[:end], context[end:] + continuation
    whole, alone = list(encode(context + continuation)), encode(context)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, alone, strict=False))
    cut = sum(1 for _ in same)
    return whole[:cut], whole[cut:]
    ### END SOLUTION


def loglikelihood(
    model: Model,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_length: int,
    pad_id: int = 0,
    batch_size: int = 16,
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation after its context, and whether greedy decoding would write it. (Exercise)

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
    ### BEGIN SOLUTION
    windows = []
    for i, (context, continuation) in enumerate(requests):
        if not len(context):
            raise ValueError(f"request {i}: the context is empty")
        if len(continuation) > max_length:
            raise ValueError(f"request {i}: {len(continuation)} ids of continuation, but max_length = {max_length}")
        kept = [*context, *continuation][-max_length - 1 :]
        windows.append((kept[:-1], list(continuation)))
    order = sorted((i for i, (_, y) in enumerate(windows) if y), key=lambda i: -len(windows[i][0]))
    answers = [(0.0, True)] * len(windows)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        for i, logits in zip(batch, _target_logits(model, [windows[i] for i in batch], pad_id), strict=True):
            ids = torch.tensor(windows[i][1], device=logits.device)
            log_prob = -cross_entropy(logits, ids, reduction="none").double().sum().item()
            answers[i] = log_prob, bool((logits.argmax(-1) == ids).all())
    return answers
    ### END SOLUTION


def choose_answer(
    log_probs: Sequence[float],
    normalization: str = "sum",
    n_tokens: Sequence[int] | None = None,
    n_bytes: Sequence[int] | None = None,
    unconditional: Sequence[float] | None = None,
) -> int:
    """Index of the choice with the largest score; of equal ones the lowest. (Exercise)

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
    ### BEGIN SOLUTION
    needs = {"sum": None, "token": "n_tokens", "byte": "n_bytes", "unconditional": "unconditional"}
    if normalization not in needs:
        raise ValueError(f"normalization = {normalization!r}: expected one of {', '.join(needs)}")
    name, scores = needs[normalization], [float(score) for score in log_probs]
    if name:
        values = {"n_tokens": n_tokens, "n_bytes": n_bytes, "unconditional": unconditional}[name]
        if values is None or len(values) != len(scores):
            given = "nothing" if values is None else f"{len(values)} values"
            raise ValueError(f"{name}: expected {len(scores)} values, one a choice, got {given}")
        for i, value in enumerate(values):
            if name != "unconditional" and not value > 0:
                raise ValueError(f"choice {i}: {name} = {value}, expected more than 0")
        pairs = zip(scores, values, strict=True)
        scores = [s - float(v) if name == "unconditional" else s / float(v) for s, v in pairs]
    for i, score in enumerate(scores):
        if math.isnan(score):
            raise ValueError(f"choice {i}: its score is NaN")
    return scores.index(max(scores))
    ### END SOLUTION


def few_shot_prompt(
    examples: Sequence[Mapping[str, Any]],
    index: int,
    n_shots: int = 0,
    continuation_delimiter: str = " ",
    seed: int = 1234,
) -> tuple[str, list[str]]:
    """Prompt of one question after solved ones, and a continuation for each of its choices. (Exercise)

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
    ### BEGIN SOLUTION
    asked = examples[index]
    available = [i for i, example in enumerate(examples) if i != index and example["query"] != asked["query"]]
    if n_shots > len(available):
        raise ValueError(f"n_shots = {n_shots}, but only {len(available)} other questions are available")
    shots = [examples[i] for i in random.Random(seed + index).sample(available, n_shots)]
    solved = [f"{s['query']}{continuation_delimiter}{s['choices'][s['gold']]}\n\n" for s in shots]
    return "".join(solved) + asked["query"], [continuation_delimiter + choice for choice in asked["choices"]]
    ### END SOLUTION


def wilson_interval(n_correct: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Shares of right answers that n questions cannot rule out. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 <= n_correct <= n or n < 1:
        raise ValueError(f"{n_correct} of {n} questions: expected 0 <= n_correct <= n and n >= 1")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, wide = n_correct / n, 1 + z * z / n
    middle = (p + z * z / (2 * n)) / wide
    half = z / wide * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 0.0 if n_correct == 0 else middle - half, 1.0 if n_correct == n else middle + half
    ### END SOLUTION


def paired_difference(
    a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable] | None = None, level: float = 0.95
) -> tuple[float, float, float, float]:
    """How much better one model is than another on the same questions, and how sure that is. (Exercise)

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
    ### BEGIN SOLUTION
    n = len(a)
    labels = range(n) if clusters is None else clusters
    if not n == len(b) == len(labels) or n < 2:
        raise ValueError(f"{n} and {len(b)} scores, {len(labels)} labels: expected equal numbers, and 2 or more")
    d = np.asarray([float(x) - float(y) for x, y in zip(a, b, strict=True)])
    mean = float(d.mean())
    d = d - mean
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    place = [number[label] for label in labels]
    together = np.bincount(place, d) ** 2 - np.bincount(place, d * d)  # products of different questions of a cluster
    variance = float((d * d).sum()) / (n * (n - 1)) + float(together.sum()) / n**2
    error = math.sqrt(max(0.0, variance))
    reach = NormalDist().inv_cdf((1 + level) / 2) * error
    return mean, error, mean - reach, mean + reach
    ### END SOLUTION


def core_score(accuracies: Mapping[str, float], baselines: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """One number for many tasks: 0 for guessing, 1 for knowing everything. (Exercise)

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
    ### BEGIN SOLUTION
    if alone := sorted(accuracies.keys() ^ baselines.keys()):
        raise ValueError(f"in only one of accuracies and baselines: {', '.join(alone)}")
    for task, baseline in baselines.items():
        if not 0 <= baseline < 1:
            raise ValueError(f"{task}: baseline = {baseline}, expected a number in [0, 1)")
    centered = {task: (a - baselines[task]) / (1 - baselines[task]) for task, a in accuracies.items()}
    return fmean(centered.values()), centered
    ### END SOLUTION


def extract_answer(text: str, kind: str = "number", n_choices: int = 4) -> str | None:
    """The answer that a written solution ends in, in one form. (Exercise)

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
    ### BEGIN SOLUTION
    if kind == "number":
        found = re.findall(r"((?:(?<![\w.)\]])-)?)((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+))(?:\.([0-9]+))?", text)
        return _canonical(*found[-1]) if found else None
    if kind != "letter":
        raise ValueError(f"kind = {kind!r}: expected 'number' or 'letter'")
    letter = f"[{string.ascii_uppercase[:n_choices]}]"
    if whole := re.fullmatch(rf"\(?({letter})(?:[).:](?:\s.*)?)?", text.strip(), re.DOTALL):
        return whole[1]
    answers = re.findall(rf"(?i:answer(?:\s+is|\s*:)?)\s*(?:\(({letter})\)|\[({letter})\]|\b({letter})\b)", text)
    return "".join(answers[-1]) if answers else None
    ### END SOLUTION


### BEGIN SOLUTION
def _canonical(sign: str, whole: str, decimals: str) -> str:
    whole, decimals = whole.replace(",", "").lstrip("0") or "0", decimals.rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return number if number == "0" else sign + number


### END SOLUTION


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, from n samples of which c are. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"n = {n}, c = {c}, k = {k}: expected 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    few, many = sorted((c, k))  # C(n - c, k) / C(n, k) does not change when c and k are exchanged
    return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))
    ### END SOLUTION


def expected_calibration_error(confidences: Sequence[float], correct: Sequence[bool], n_bins: int = 15) -> float:
    """How far a model's confidence is from its accuracy, on average over bins of confidence. (Exercise)

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
    ### BEGIN SOLUTION
    sure, right = (torch.as_tensor(x, dtype=torch.float64).detach().cpu().flatten() for x in (confidences, correct))
    if len(sure) != len(right) or not len(sure):
        raise ValueError(f"{len(sure)} confidences, {len(right)} answers: expected equal numbers, and one or more")
    outside = sure[~((sure >= 0) & (sure <= 1))]
    if len(outside):
        raise ValueError(f"a confidence of {outside[0].item()}: expected a number in [0, 1]")
    edges = torch.arange(n_bins + 1, dtype=torch.float64) / n_bins
    place = (torch.bucketize(sure, edges) - 1).clamp(min=0)
    return torch.bincount(place, right - sure, n_bins).abs().sum().item() / len(sure)
    ### END SOLUTION


def contaminated_share(texts: Sequence[str], corpus: Iterable[str], n: int = 13) -> list[float]:
    """Share of each test text's n-grams that the training corpus contains. (Exercise)

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
    ### BEGIN SOLUTION
    grams = []
    for text in texts:
        words = _words(text)
        grams.append(list(_grams(words, min(n, len(words)))))
    wanted, seen = {gram for row in grams for gram in row}, set[tuple[str, ...]]()
    lengths = {len(gram) for gram in wanted}
    for words in map(_words, corpus):  # map lets go of a document once its words are known
        seen.update(gram for length in lengths for gram in _grams(words, length) if gram in wanted)
        del words
    return [sum(gram in seen for gram in row) / max(1, len(row)) for row in grams]
    ### END SOLUTION


### BEGIN SOLUTION
def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """Every run of so many words; none of length 0."""
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1) if length)


### END SOLUTION
