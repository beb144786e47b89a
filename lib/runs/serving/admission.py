"""Which requests the engine admits when each holds a state beside its blocks, as with chapter 24's linear layers."""

from typing import Any

import torch

from lib.given.models.serving import Chunk
from lib.runs.memory import free_bytes, state_bytes
from lib.serving import Scheduler

CONTEXTS = 64
"""Sequences for which a server has states in any case."""
SHARE = 1 / 8
"""Of the free memory, for states."""


class StateScheduler(Scheduler):
    """Chapter 21's scheduler, of whose requests no more run than there is room for states.

    Args:
        max_tokens, n_blocks, block_size: As for ``Scheduler``.
        n_states: Most requests that run together; a request that is preempted gives its state back.
    """

    def __init__(self, max_tokens: int, n_blocks: int, block_size: int, n_states: int) -> None:
        super().__init__(max_tokens, n_blocks, block_size)
        self.n_states = n_states

    @property
    def n_free_states(self) -> int:
        """Requests that could begin, as far as states go."""
        return max(0, self.n_states - len(self.running))

    def schedule(self) -> list[Chunk]:
        n_later = len(self.waiting) - self.n_free_states
        later = [self.waiting.pop() for _ in range(n_later)]  # the youngest
        chunks = super().schedule()
        self.waiting.extend(reversed(later))
        return chunks


def count_states(config: Any, dtype: torch.dtype, device: torch.device, max_tokens: int) -> int:
    """Sequences whose states a server keeps room for; 0 for a model without states.

    A step with ``max_tokens`` tokens has a token for as many sequences, so more states would wait.
    """
    each = state_bytes(config, dtype)
    return max(CONTEXTS, min(max_tokens, int(SHARE * free_bytes(device) / each))) if each else 0


def make_scheduler(max_tokens: int, n_blocks: int, block_size: int, n_states: int) -> Scheduler:
    """Chapter 21's scheduler, which also counts states if there are any."""
    if not n_states:
        return Scheduler(max_tokens, n_blocks, block_size)
    return StateScheduler(max_tokens, n_blocks, block_size, n_states)
