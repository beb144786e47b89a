"""Short runs of chapter 29: a tiny Llama learns to answer sums in a form, then from rewards alone."""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lib.attention import causal_mask
from lib.given.data.tasks import Characters, Check, Question, sums, supervised_batch
from lib.given.models.rewards import TINY
from lib.llama import Llama
from lib.rewards import StalenessGate, grpo_step, sample_groups, score_response, token_log_probs
from lib.serving import Scheduler
from lib.training import AdamW

LETTERS = Characters()
MAX_NEW_TOKENS, SAMPLES, PROMPTS = 40, 8, 8
HEDGED = 0.15
"""The share of the supervised responses that answer a sum with three numbers."""
N_DIGITS = 1
"""Digits of each number: with more, a model of this size needs more steps than a page has time for."""
History = list[dict[str, float]]


def task(seed: int) -> Iterator[Question]:
    """Sums of numbers of one digit."""
    return sums(N_DIGITS, seed)


@cache
def _tuned(n_steps: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model, shown = Llama(TINY), sums(N_DIGITS, seed, HEDGED)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (n_steps - step) / (0.3 * n_steps))
        rows = [(LETTERS.encode(q.prompt), [*LETTERS.encode(q.solution), LETTERS.eos_id]) for q in islice(shown, 32)]
        inputs, targets = supervised_batch(rows)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def tuned(n_steps: int = 150, seed: int = 0) -> Llama:
    """A tiny Llama after supervised steps on sums in the form; it is trained once, and each call returns a copy."""
    model = Llama(TINY)
    model.load_state_dict(_tuned(n_steps, seed))
    return model


def scheduler() -> Scheduler:
    """Room for a whole batch at a time."""
    return Scheduler(1024, 64 * 8, 16)


def responses(batch: dict[str, Any]) -> list[str]:
    """The text of each response."""
    masks = batch["response_mask"].bool()
    return [LETTERS.decode(row[1:][mask].tolist()) for row, mask in zip(batch["tokens"], masks, strict=True)]


def rollout(model: nn.Module, questions: list[Question], seed: int, version: int = 0) -> dict[str, Any]:
    """Sample a group of responses to each question."""
    prompts = [LETTERS.encode(q.prompt) for q in questions]
    return sample_groups(
        model, prompts, SAMPLES, scheduler(), MAX_NEW_TOKENS, 1.0, seed, LETTERS.eos_id, LETTERS.pad_id, version
    )


def score(batch: dict[str, Any], questions: list[Question], check: Callable[[Question], Check]) -> dict[str, Tensor]:
    """The rewards of a batch by some check, and whether the answers are right by the task's own."""
    texts = responses(batch)
    asked = [questions[group] for group in batch["groups"].tolist()]
    paid = [score_response(text, check(q), 0.1)["reward"] for text, q in zip(texts, asked, strict=True)]
    right = [score_response(text, q.check)["answer_reward"] for text, q in zip(texts, asked, strict=True)]
    return {"rewards": torch.tensor(paid), "right": torch.tensor(right)}


def exact(question: Question) -> Check:
    """The task's own check."""
    return question.check


def generous(question: Question) -> Check:
    """A check that accepts a list with the right number in it. It can be fooled: a list is right more often."""
    return lambda answer: any(question.check(part.strip()) for part in answer.split(","))


@torch.no_grad()
def trainers_view(model: Any, batch: dict[str, Any]) -> tuple[Tensor, float]:
    """The trainer's own log-probabilities ``[N, T-1]``, and the mean entropy of the responses' tokens."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    length = inputs.shape[1]
    x, rope, mask = model.tok_embeddings(inputs), model.rope[:length], causal_mask(length, length)
    for layer in model.layers:
        x = layer(x, rope, mask, None)
    log_probs, entropy = token_log_probs(model.norm(x), model.output.weight, targets)
    return log_probs, float(entropy[batch["response_mask"]].mean())


def update(
    model: Llama, optimizer: torch.optim.Optimizer, batch: dict[str, Any], n_updates: int = 2, **settings: Any
) -> dict[str, float]:
    """Some steps on one batch, against the policy before the first of them; what the last one and the batch say."""
    right, batch = batch["right"], {key: value for key, value in batch.items() if key != "right"}
    batch["old_log_probs"], entropy = trainers_view(model, batch)
    lengths = batch["response_mask"].sum(-1).float()
    wrong = right == 0
    for _ in range(n_updates):
        found = grpo_step(model, optimizer, batch, **settings)
    found |= {"right": float(right.mean()), "entropy": entropy, "length": float(lengths.mean())}
    drift = (batch["old_log_probs"] - batch["log_probs"])[batch["response_mask"]].abs()
    found |= {"drift": float(drift.mean())}
    return found | {"wrong_length": float(lengths[wrong].mean()) if wrong.any() else float("nan")}


def train_grpo(
    model: Llama,
    task: Iterator[Question],
    steps: int,
    *,
    lr: float = 1e-3,
    check: Callable[[Question], Check] = exact,
    lag: int = 0,
    seed: int = 0,
    **settings: Any,
) -> History:
    """Sample, score, update, and again: the loop around the chapter's functions.

    Args:
        model: Trained in place.
        task: Questions with exact checks.
        steps: Batches of 8 questions with 8 responses each, every one used for two updates.
        lr: AdamW's rate.
        check: What a response is paid by; the history's "right" is always by the task's own check.
        lag: Versions by which the sampler's weights are behind the trainer's.
        seed: Of the sampling.
        settings: Of ``grpo_step``.

    Returns:
        For each step reward, right, length, wrong_length, entropy, clip_fraction, grad_norm, loss and drift, the mean
        difference between the trainer's and the sampler's log-probabilities.
    """
    optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    versions, sampler, history = deque([copy.deepcopy(model.state_dict())], lag + 1), copy.deepcopy(model), []
    for step in range(steps):
        sampler.load_state_dict(versions[0])
        questions = list(islice(task, PROMPTS))
        batch = rollout(sampler, questions, seed + 1000 * step)
        batch |= score(batch, questions, check)
        history.append(update(model, optimizer, batch, **settings))
        versions.append(copy.deepcopy(model.state_dict()))
    return history


class TwoThreads:
    """A sampler and a trainer that run at the same time, with a ``StalenessGate`` between them.

    Args:
        model: The trainer's, trained in place; the sampler has a copy, which takes the newest weights before each
            question.
        task: Questions.
        max_staleness: Of the gate, whose rollouts are whole groups.
        settings: Of ``grpo_step``.
    """

    def __init__(self, model: Llama, task: Iterator[Question], max_staleness: int, lr: float = 1e-3, **settings: Any):
        self.model, self.task, self.settings = model, task, settings
        self.optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.gate = StalenessGate(PROMPTS, max_staleness)
        self.changed = threading.Condition()
        self.weights = copy.deepcopy(model.state_dict())
        self.history: History = []
        self.error: BaseException | None = None

    def run(self, steps: int) -> History:
        """Train for so many steps; an error of the sampler is raised here."""
        self.is_over = False
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            for _ in range(steps):
                self._train_once()
        finally:
            with self.changed:
                self.is_over = True
                self.changed.notify_all()
            thread.join()
        return self.history

    def _sample(self) -> None:
        sampler, seed = copy.deepcopy(self.model), 0
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.is_over or self.gate.n_allowed > 0)
                    if self.is_over:
                        return
                    version = self.gate.start()
                    sampler.load_state_dict(self.weights)
                    question = next(self.task)
                batch = rollout(sampler, [question], seed, version)
                batch |= score(batch, [question], exact)
                seed += SAMPLES
                with self.changed:
                    self.gate.finish(batch, version)
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _train_once(self) -> None:
        with self.changed:
            while (taken := self.gate.take()) is None:
                if self.error is not None:
                    raise self.error
                self.changed.wait()
        batch = join([item for item, _ in taken])
        found = update(self.model, self.optimizer, batch, **self.settings)
        self.history.append(found | {"staleness": sum(age for _, age in taken) / len(taken)})
        with self.changed:
            self.weights = copy.deepcopy(self.model.state_dict())
            self.gate.advance()
            self.changed.notify_all()


def join(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """One batch of several, each of which becomes a group, padded to the widest."""
    width = max(batch["tokens"].shape[1] for batch in batches)
    joined: dict[str, Any] = {"groups": torch.arange(len(batches)).repeat_interleave(SAMPLES), "version": 0}
    for key in ("tokens", "response_mask", "log_probs"):
        place = width - (key != "tokens")
        parts = [nn.functional.pad(batch[key], (0, place - batch[key].shape[1])) for batch in batches]
        joined[key] = torch.cat(parts)
    return joined | {key: torch.cat([batch[key] for batch in batches]) for key in ("rewards", "right")}


def smooth(history: History, key: str, window: int = 5) -> list[float]:
    """Means over ``window`` steps that leave NaN out."""
    values = torch.tensor([found[key] for found in history])
    return values.unfold(0, window, 1).nanmean(-1).tolist()
