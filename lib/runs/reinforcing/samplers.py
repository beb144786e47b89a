"""Where the rollouts of ``lib.runs.reinforce`` are made: on the trainer's rank, or on all others while it trains.

Rank 0 trains. Each other rank holds a copy of the weights, which rank 0 sends in buckets, and samples the responses to
its share of a step's questions.
"""

import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.runs.engine.signals import Signals
from lib.runs.reinforcing.sampling import joined, make_sampler, rollout, score_batch
from lib.runs.reinforcing.start import Policy

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
Batch = dict[str, Any]


def clock(device: torch.device) -> float:
    """The time when the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Here:
    """Rollouts on the trainer's rank. The engine reads the trainer's own weights, unless it wants another dtype.

    Attributes:
        sampler: Of ``make_sampler``.
        n_asked: Batches that were asked for and not yet taken.
        ranks: Others, which sample.
        weight_bytes, weight_seconds: Sent to them so far, and the time that this took.
    """

    ranks, weight_bytes, weight_seconds = range(0), 0, 0.0

    def __init__(self, policy: Policy, o: Any, device: torch.device):
        self.policy, self.o, self.device, self.n_asked = policy, o, device, 0
        dtype = DTYPES[o.sampler_dtype]
        is_shared = dtype == next(policy.model.parameters()).dtype
        self.model = policy.model if is_shared else copy.deepcopy(policy.model).to(dtype)
        self.sampler = make_sampler(policy, self.model, o)
        self.made: list[Batch] = []
        self.tokens, self.seconds = 0, 0.0

    def ask(self, steps: Iterable[int], version: int) -> None:
        """Begin the batches of some steps, with the weights of now."""
        begin = clock(self.device)
        if self.model is not self.policy.model:
            self.model.load_state_dict(self.policy.model.state_dict())
        self.made += [score_batch(self.policy, rollout(self.policy, self.sampler, step, version, self.o), step, self.o)
                      for step in steps]  # fmt: skip
        self.seconds += clock(self.device) - begin

    def _counted(self, batch: Batch) -> Batch:
        self.tokens += int(batch["response_mask"].sum())
        return batch

    def take(self, n: int) -> list[Batch]:
        """At least ``n`` of the batches that were asked for, in their order."""
        taken, self.made = self.made, []
        return [self._counted(batch) for batch in taken]

    def spent(self) -> tuple[int, float]:
        """New tokens of the batches that were taken since the last call, and the seconds that sampling them took."""
        found, self.tokens, self.seconds = (self.tokens, self.seconds), 0, 0.0
        return found

    def close(self) -> None:
        """No more rollouts are wanted."""


class There(Here):
    """Rollouts on all ranks but this one; ``ask`` returns as soon as the weights are sent."""

    def __init__(self, policy: Policy, o: Any, device: torch.device, objects: dist.ProcessGroup | None):
        self.policy, self.o, self.device, self.objects = policy, o, device, objects
        self.sampler = make_sampler(policy, policy.model, o)  # it answers held-out questions, with the newest weights
        self.asked: deque[int] = deque()
        self.ranks = range(1, dist.get_world_size())
        self.weight_bytes, self.weight_seconds = 0, 0.0
        self.tokens, self.seconds = 0, 0.0

    @property
    def n_asked(self) -> int:  # type: ignore[override]
        return len(self.asked)

    def ask(self, steps: Iterable[int], version: int) -> None:
        steps = list(steps)
        begin = clock(self.device)
        self._tell((version, steps))
        for flat, _ in buckets(self.policy.model, DTYPES[self.o.sampler_dtype], self.o.bucket_mb):
            dist.broadcast(flat, 0)
            self.weight_bytes += flat.nbytes * len(self.ranks)
        self.weight_seconds += clock(self.device) - begin
        self.asked.extend(steps)

    def take(self, n: int) -> list[Batch]:
        return [self._counted(self._receive(self.asked.popleft())) for _ in range(n)]

    def close(self) -> None:
        self._tell(None)

    def _tell(self, what: Any) -> None:
        for rank in self.ranks:
            dist.send_object_list([what], rank, self.objects)

    def _receive(self, step: int) -> Batch:
        parts = []
        for rank in self.ranks:
            got: list[Any] = [None]
            dist.recv_object_list(got, rank, self.objects)
            parts.append(got[0])
        self.seconds += max(seconds for _, seconds in parts)
        batch = joined([part for part, _ in parts])
        here = {name: v.to(self.device) if isinstance(v, Tensor) else v for name, v in batch.items()}
        return score_batch(self.policy, here, step, self.o)


class Sampler:
    """What a rank other than 0 does: it samples what rank 0 asks for, until rank 0 says that this is enough.

    Args:
        policy: On the device; its weights are replaced before each rollout.
        o: The run's settings.
        device: Of the weights.
        objects: The group through which questions and responses go.
    """

    def __init__(self, policy: Policy, o: Any, device: torch.device, objects: dist.ProcessGroup | None):
        self.policy, self.o, self.device, self.objects = policy, o, device, objects
        self.model = policy.model.requires_grad_(False).to(DTYPES[o.sampler_dtype])
        self.sampler = make_sampler(policy, self.model, o)

    def go(self) -> bool:
        """Sample until the end; rank 0 decides what a signal means."""
        part = dist.get_rank() - 1, dist.get_world_size() - 1
        with Signals():
            while (asked := self._asked()) is not None:
                version, steps = asked
                for flat, weights in buckets(self.model, DTYPES[self.o.sampler_dtype], self.o.bucket_mb):
                    dist.broadcast(flat, 0)
                    for weight, new in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
                        weight.copy_(new.view_as(weight))
                for step in steps:
                    begin = clock(self.device)
                    batch = rollout(self.policy, self.sampler, step, version, self.o, part)
                    seconds = clock(self.device) - begin
                    sent = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in batch.items()}
                    dist.send_object_list([(sent, seconds)], 0, self.objects)
        return True

    def _asked(self) -> Any:
        got: list[Any] = [None]
        dist.recv_object_list(got, 0, self.objects)
        return got[0]


@torch.no_grad()
def buckets(model: nn.Module, dtype: torch.dtype, bucket_mb: float) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
    """The weights of a model in flat tensors, each with the parameters whose values it holds.

    Args:
        model: Its parameters are taken in their order, a tied one once.
        dtype: Of the flat tensors.
        bucket_mb: The most that one holds, in MB of 2**20 bytes; a larger weight has one of its own.
    """
    waiting: list[nn.Parameter] = []
    size, most = 0, bucket_mb * 2**20 / dtype.itemsize
    for weight in model.parameters():
        if waiting and size + weight.numel() > most:
            yield torch.cat([w.to(dtype).flatten() for w in waiting]), waiting
            waiting, size = [], 0
        waiting.append(weight)
        size += weight.numel()
    yield torch.cat([w.to(dtype).flatten() for w in waiting]), waiting
