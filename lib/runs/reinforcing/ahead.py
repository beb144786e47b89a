"""Rollouts on a GPU: one engine for all of them, whose recorded steps stay, and whose host is a step ahead.

Chapter 29's ``sample_groups`` makes an engine for each batch, and chapter 21's ``Engine.step`` waits for each token.
Both are cheap on a CPU; on a GPU they would take most of the time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.fast.serving import InFlight, to_host
from lib.given.models.serving import Progress, Request
from lib.serving import Engine, Scheduler


class Ahead(Engine):
    """An engine that gives each token together with its log-probability.

    The model's weights may change from rollout to rollout, in place: the recorded steps read the model's own.

    Args:
        model, scheduler: As for ``Engine``.
        temperature: Above 0; that of all requests, and of the log-probabilities.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler, temperature: float):
        super().__init__(model, scheduler)
        self.temperature = temperature

    def note(self, logits: Tensor, wanted: list[Progress | None], tokens: Tensor) -> Any:
        """The log-probability of each row's token, on its way to the host."""
        log_probs = (logits.float() / self.temperature).log_softmax(-1)
        return to_host(log_probs.gather(-1, tokens.clamp(min=0)[:, None])[:, 0])

    def told(self, progress: Progress, flight: InFlight, token: int) -> tuple[int, float]:
        """A token and its log-probability."""
        return token, float(flight.notes[flight.rows[progress]])

    def sample_groups(
        self, prompts: Sequence[Sequence[int]], group_size: int, max_new_tokens: int, seed: int, eos_id: int | None,
        version: int,
    ) -> dict[str, Any]:  # fmt: skip
        """The batch of chapter 29's ``sample_groups`` with the same arguments, to rounding.

        Raises:
            ArithmeticError: the model's scores are NaN or infinite.
        """
        rows = [(prompt, i) for i, prompt in enumerate(prompts) for _ in range(group_size)]
        requests = [
            Request(list(prompt), max_new_tokens, self.temperature, seed + n, eos_id=eos_id)
            for n, (prompt, _) in enumerate(rows)
        ]
        found = self.answer(requests)
        lengths = [len(request.tokens) + len(new) for request, new in found.items()]
        tokens = torch.zeros(len(rows), max(lengths, default=1), dtype=torch.int64)
        mask = torch.zeros(len(rows), tokens.shape[1] - 1, dtype=torch.bool)
        log_probs = torch.zeros(mask.shape)
        for n, (request, new) in enumerate(found.items()):
            targets = slice(len(request.tokens) - 1, lengths[n] - 1)
            tokens[n, : lengths[n]] = torch.tensor(request.tokens + [token for token, _ in new])
            mask[n, targets] = True
            log_probs[n, targets] = torch.tensor([log_prob for _, log_prob in new])
        groups = torch.tensor([i for _, i in rows], dtype=torch.int64)
        batch = {"tokens": tokens, "response_mask": mask, "log_probs": log_probs, "groups": groups}
        device = self.cache.keys.device
        return {name: value.to(device) for name, value in batch.items()} | {"version": version}

    def answer(self, requests: list[Request]) -> dict[Request, list[tuple[int, float]]]:
        """The new tokens of each request, each with its log-probability."""
        found: dict[Request, list[tuple[int, float]]] = {request: [] for request in requests}
        try:
            for request in requests:
                self.submit(request)
            while self.is_busy:
                for request, new in self.step_ahead():
                    if isinstance(new, Exception):
                        raise new
                    found[request].append(new)
        finally:
            for request in requests:
                self.cancel(request)
        return found
