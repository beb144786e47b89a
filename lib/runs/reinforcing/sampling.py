"""Rollouts on chapter 21's engine: groups of responses to train on, and greedy answers to held-out questions."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.evaluation import wilson_interval
from lib.given.data.tasks import Question
from lib.given.models.serving import Request
from lib.rewards import sample_groups
from lib.runs.reinforcing.ahead import Ahead
from lib.runs.reinforcing.start import Policy
from lib.runs.reinforcing.tasks import draw, score
from lib.serving import Scheduler, generate_many

BLOCK = 16
"""Positions in a block of the cache."""
STEP = 4096
"""Tokens that the engine passes through the model in one of its steps at most."""
SEEDS = 2**62


def n_blocks(policy: Policy, n_rows: int, o: argparse.Namespace) -> int:
    """Blocks of a cache for the rows that run at a time, each with the longest prompt and all its new tokens."""
    at_once = min(n_rows, o.at_once or n_rows)
    return at_once * -(-(policy.longest + o.new_tokens) // BLOCK)


def scheduler(policy: Policy, n_rows: int, o: argparse.Namespace) -> Scheduler:
    return Scheduler(STEP, n_blocks(policy, n_rows, o), BLOCK)


def responses(policy: Policy, batch: dict[str, Any]) -> list[list[int]]:
    """The tokens of each response."""
    rows = zip(batch["tokens"].tolist(), batch["response_mask"].tolist(), strict=True)
    return [[token for token, is_new in zip(row[1:], mask, strict=True) if is_new] for row, mask in rows]


def questions_of(step: int, o: argparse.Namespace) -> list[Question]:
    """The questions of a step."""
    return draw(o.task, o.difficulty, o.prompts, (o.seed * 1_000_003 + step) * 2 + 1)


def make_sampler(policy: Policy, model: nn.Module, o: argparse.Namespace) -> nn.Module | Ahead:
    """What ``rollout`` samples from: the model, or where it can take the fast way an engine that is kept."""
    engine = Ahead(model, scheduler(policy, o.prompts * o.group, o), o.temperature)
    return model if engine.steps is None else engine


def rollout(
    policy: Policy, sampler: nn.Module | Ahead, step: int, version: int, o: argparse.Namespace,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any]:  # fmt: skip
    """The batch of a step, or a part of it: its questions, and a group of responses to each.

    Args:
        policy: Whose tokens.
        sampler: Of ``make_sampler``, with the weights.
        step: The step that the batch is for; decides its questions and its random numbers.
        version: Updates that the sampler's weights have had.
        o: The run's settings.
        part: Index of the part, and number of parts. Each response has the random numbers that it has in the whole.

    Returns:
        As ``sample_groups``.
    """
    asked = questions_of(step, o)
    first, end = (len(asked) * k // part[1] for k in (part[0], part[0] + 1))
    rows = len(asked) * o.group
    seed = (o.seed * 1_000_003 + step) * rows % SEEDS + first * o.group
    prompts = [policy.encode(q) for q in asked[first:end]]
    if isinstance(sampler, Ahead):
        batch = sample_ahead(sampler, prompts, o.group, o.new_tokens, seed, policy.end_id, version)
    else:
        batch = sample_groups(
            sampler, prompts, o.group, scheduler(policy, rows, o), o.new_tokens, o.temperature, seed, policy.end_id,
            version=version,
        )  # fmt: skip
    batch["groups"] += first
    return batch


def sample_ahead(
    engine: Ahead, prompts: Sequence[Sequence[int]], group_size: int, max_new_tokens: int, seed: int,
    eos_id: int | None, version: int,
) -> dict[str, Any]:  # fmt: skip
    """The batch of chapter 29's ``sample_groups`` with the same arguments, to rounding, from an engine that is kept.

    Raises:
        ArithmeticError: the model's scores are NaN or infinite.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    found = engine.answer([
        Request(list(prompt), max_new_tokens, engine.temperature, seed + n, eos_id=eos_id)
        for n, prompt in enumerate(rows)
    ])  # fmt: skip
    batch = joined([one_row(*answer, n // group_size, version) for n, answer in enumerate(found.items())])
    device = engine.cache.keys.device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def one_row(request: Request, new: list[tuple[int, float]], group: int, version: int) -> dict[str, Any]:
    """A batch of a single response, from its tokens and their log-probabilities."""
    before = len(request.tokens) - 1  # targets that are of the prompt
    return {
        "tokens": torch.tensor([request.tokens + [token for token, _ in new]]),
        "response_mask": torch.tensor([[False] * before + [True] * len(new)]),
        "log_probs": torch.tensor([[0.0] * before + [log_prob for _, log_prob in new]]),
        "groups": torch.tensor([group]),
        "version": version,
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One batch of its parts, all padded to the width of the longest."""
    width = max(part["response_mask"].shape[1] for part in parts)

    def padded(part: dict[str, Any], name: str) -> Tensor:
        return nn.functional.pad(part[name], (0, width - part["response_mask"].shape[1]))

    wide = {name: torch.cat([padded(p, name) for p in parts]) for name in ("tokens", "response_mask", "log_probs")}
    return parts[0] | wide | {"groups": torch.cat([part["groups"] for part in parts])}


def score_batch(policy: Policy, batch: dict[str, Any], step: int, o: argparse.Namespace) -> dict[str, Any]:
    """The batch of a step, with "rewards", and under "stats" what the log says about it."""
    asked = questions_of(step, o)
    new = responses(policy, batch)
    texts = [policy.decode(tokens) for tokens in new]
    found = score(texts, [q for q in asked for _ in range(o.group)], o.format_weight)
    rewards = torch.tensor(found["reward"])
    grouped = rewards.view(-1, o.group)
    lengths = torch.tensor([len(tokens) for tokens in new], dtype=torch.float32)
    batch["rewards"] = rewards.to(batch["tokens"].device)
    batch["stats"] = {
        "reward": float(rewards.double().mean()),
        "right": mean(found["answer_reward"]),
        "format": mean(found["format_reward"]),
        "groups_that_differ": mean((grouped.amax(1) > grouped.amin(1)).tolist()),
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "length_right": mean([n for n, right in zip(lengths.tolist(), found["answer_reward"], strict=True) if right]),
        "cut_off": mean([tokens[-1] != policy.end_id for tokens in new]),
    }
    return batch


def mean(values: Sequence[float]) -> float | None:
    """None where there are no values."""
    return sum(values) / len(values) if values else None


def evaluate(
    policy: Policy, questions: list[Question], o: argparse.Namespace, sampler: nn.Module | Ahead | None = None
) -> dict[str, Any]:
    """Greedy answers to held-out questions: how many are right, with the Wilson interval, and one of them to read.

    An engine of the policy's own weights gives them, where there is one.
    """
    requests = [Request(policy.encode(q), o.new_tokens, eos_id=policy.end_id) for q in questions]
    new: dict[Request, list[int]] = {request: [] for request in requests}
    if isinstance(sampler, Ahead) and sampler.model is policy.model:
        new = {request: [token for token, _ in answer] for request, answer in sampler.answer(requests).items()}
    else:
        for request, token in generate_many(policy.model, requests, scheduler(policy, len(requests), o)):
            new[request].append(token)
    texts = [policy.decode(new[request]) for request in requests]
    found = score(texts, questions, 0.0)
    n_right = int(sum(found["answer_reward"]))
    low, high = wilson_interval(n_right, len(questions))
    return {
        "held_out_right": n_right / len(questions),
        "held_out_low": low,
        "held_out_high": high,
        "held_out_format": mean(found["format_reward"]),
        "held_out_length": mean([len(tokens) for tokens in new.values()]),
        "held_out_questions": len(questions),
        "sample": questions[0].prompt + texts[0],
    }
