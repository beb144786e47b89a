"""Rollouts on a GPU: one engine for all of them, whose recorded steps stay, and whose host is a step ahead.

Chapter 29's ``sample_groups`` makes an engine for each batch, and chapter 21's ``Engine.step`` waits for each token.
Both are cheap on a CPU; on a GPU they would take most of the time.
"""

from typing import Any

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

    def answer(self, requests: list[Request]) -> dict[Request, list[tuple[int, float]]]:
        """The new tokens of each request, each with its log-probability.

        Raises:
            ArithmeticError: the model's scores are NaN or infinite.
        """
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
