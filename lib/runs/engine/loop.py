"""The run itself: train step by step, evaluate, save, and leave when a signal asks for it."""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lib import amp
from lib.fast.copies import CopyDDP
from lib.fast.models import capture
from lib.runs.engine import export
from lib.runs.engine import state as checkpoints
from lib.runs.engine.context import share_of
from lib.runs.engine.evaluation import ask, evaluate, is_due, sample
from lib.runs.engine.log import Log
from lib.runs.engine.mesh import DATA, Mesh
from lib.runs.engine.options import DECAYED, Options
from lib.runs.engine.signals import Signals
from lib.runs.engine.sources import N_PICTURES
from lib.runs.engine.strategies import clip_in_update, divides_gradients, make_optimizer, make_strategy
from lib.runs.engine.strategy import Strategy
from lib.runs.engine.tasks import Task
from lib.runs.engine.world import World
from lib.training import TokenBatches, cosine_schedule, hours_per_epoch

BEST = "best"
"""The folder of the best model, inside of the last model's folder."""


class Run:
    """A model in training on this rank.

    Args:
        options: Options of the run.
        task: Model, loss and data.
        world: This rank's place.
        device: Device of this rank.
        run: The description of the run that its checkpoints hold.
        resumes: Whether there is a checkpoint to continue from.
    """

    def __init__(
        self,
        options: Options,
        task: Task,
        world: World,
        device: torch.device,
        run: dict[str, Any],
        resumes: bool,
    ):
        self.options, self.task, self.world, self.device, self.run = options, task, world, device, run
        self.mesh = Mesh(options, device)
        torch.manual_seed(options.seed)
        self.strategy: Strategy = make_strategy(options, task.new_loss(device), self.mesh)
        self.optimizer: Optimizer = make_optimizer(options, self.strategy.groups(), device, self.strategy)
        self.strategy.in_turn = isinstance(self.strategy.call, CopyDDP) and divides_gradients(options, self.optimizer)
        self.scaler: Any = self._scaler()
        self.parameters = list(self.strategy.named().values())
        self.numbers = self._order()
        self.best: dict[str, float] | None = None  # step and scores of the best evaluation
        self.wandb_id: str | None = None
        self.begin = self._resume() if resumes else 0
        task.source.to(device)
        self.asked = torch.zeros((), device=device)  # 1 when this rank was asked to leave; a CUDA graph reads it too
        self.step: Callable[[Tensor, Tensor], Tensor] = self.plain_step

    def _scaler(self) -> Any:
        if self.options.precision != "float16":
            return None
        return amp.GradScaler() if self.options.ours else torch.amp.GradScaler(self.device.type)

    def _order(self) -> TokenBatches:
        """Indices of this rank's items, batch after batch, in the order in which chapter 7 visits windows of a text."""
        row, share = np.arange(self.task.source.n + 1), self.options.batch // self.n_data
        rank = 0
        for kind in DATA:
            rank = rank * self.mesh.size[kind] + self.mesh.rank[kind]
        return TokenBatches(row, share, 1, rank=rank, world_size=self.n_data, seed=self.options.seed)

    @property
    def n_data(self) -> int:
        """Number of ranks, or groups of ranks, that divide a batch."""
        return math.prod(self.mesh.size[kind] for kind in DATA)

    def _resume(self) -> int:
        state = checkpoints.load(self.options, self.strategy, self.optimizer)
        self.numbers.load_state_dict(state["data"])
        if self.strategy.balance is not None:
            self.strategy.balance.load(state["router_bias"])
        if self.scaler is not None and "scaler" in state:  # absent if the run has not used float16 before
            self.scaler.load_state_dict(state["scaler"])
        self.best, self.wandb_id = state.get("best"), state.get("wandb_id")
        return state["step"]

    def save(self, step: int, options: Options | None = None) -> None:
        """Write a checkpoint to the folder that ``options`` name; by default the run's own."""
        extra = {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}
        if self.strategy.balance is not None:
            extra["router_bias"] = self.strategy.balance.bias.tolist()
        extra |= {"best": self.best, "wandb_id": self.wandb_id}
        state = {"data": self.numbers.state_dict(), "run": self.run, **extra}
        codec = self.task.source.codec
        checkpoints.save(options or self.options, self.strategy, self.optimizer, step, codec, **state)

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's share of the next batch, on the device; the host does not wait for it."""
        return self.fetch(next(self.numbers)[0][:, 0])

    def fetch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The items with these indices, on the device; of each sequence only this rank's positions."""
        if self.device.type == "cuda" and not self.task.source.is_on_host:
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        inputs, targets = self.task.source.fetch(numbers)
        if self.mesh.size["context"] > 1:
            layout = self.task.layout
            return share_of(inputs, self.mesh, layout), share_of(targets, self.mesh, layout)
        return inputs, targets

    def plain_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping, one update.

        Returns:
            For ``Log``, on the device: the mean loss over all ranks, the share of ranks that were asked to leave,
            and with ``--clip`` the gradient's norm before clipping.
        """
        numbers = self.backward(inputs, targets)
        if self.scaler is not None:
            self.strategy.share_overflow()
            self.scaler.unscale_(self.optimizer)
        norm = self.clip(self.options.clip).detach() if self.options.clip else None
        lr = self.optimizer.param_groups[0]["lr"]
        if self.scaler is None:
            self.strategy.decay(lr)
            self.strategy.update(self.optimizer)
        else:
            self.scaler_step(lr)
        return numbers if norm is None else torch.cat([numbers, norm.float().reshape(1)])

    def clip(self, max_norm: float) -> Tensor:
        """Scale the whole gradient to a norm of at most ``max_norm``, now or in the update; return its norm before."""
        if divides_gradients(self.options, self.optimizer):
            return clip_in_update(self.optimizer, max_norm, self.strategy.norm())
        return self.strategy.clip(max_norm)

    def scaler_step(self, lr: float) -> None:
        """The update, which is skipped if a gradient has inf or NaN,
        together with the weight decay outside of the optimizer.
        """

        def decay(*_: object) -> None:
            self.strategy.decay(lr)

        handle = self.optimizer.register_step_pre_hook(decay)
        self.scaler.step(self.optimizer)
        handle.remove()
        self.scaler.update()

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradient of the whole batch, micro-batch by micro-batch.

        Returns:
            The mean loss over all ranks, and the share of ranks that were asked to leave.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = self.strategy.backward(inputs, targets, self.scaler.scale if self.scaler else lambda loss: loss)
        if self.strategy.balance is not None:
            self.strategy.balance.update()
        numbers = torch.stack([total, self.asked])
        if self.options.is_parallel:
            dist.all_reduce(numbers)
            numbers *= self.mesh.size["pipeline"] / self.world.size  # the loss is on the last stage only
        return numbers

    def set_lr(self, step: int) -> float:
        o = self.options
        lr = rate(step, o)
        for group in self.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return lr

    def record_graph(self, pool: Any = None) -> None:
        """Record a step as a CUDA graph, then restore in place everything that the recording changed.

        Args:
            pool: See `lib.fast.models.capture`.
        """
        inputs, targets = (torch.empty_like(x) for x in self.task.source.fetch(self._some_numbers()))
        inputs.zero_()
        targets.zero_()
        tensors: list[Tensor] = [*self.parameters]
        if is_new := not self.optimizer.state:
            checkpoints.prime(self.optimizer)
        else:
            tensors += [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        before = [tensor.detach().clone() for tensor in tensors]
        replay = capture(lambda: self.plain_step(inputs, targets), on_ranks=self.n_data > 1, pool=pool)
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        if is_new:
            checkpoints.forget(self.optimizer)

        def replayed(x: Tensor, y: Tensor) -> Tensor:
            inputs.copy_(x)
            targets.copy_(y)
            return replay().clone()  # the next replay overwrites it

        self.step = replayed

    def _some_numbers(self) -> Tensor:
        return torch.zeros(self.options.batch // self.n_data, dtype=torch.int64, device=self.device)

    def go(self) -> bool:
        """Train the remaining steps, or up to the step after which all ranks leave.

        Returns whether all steps are done.
        """
        o = self.options
        if o.graph:
            self.record_graph()
        if self.strategy.opening and self.world.rank == 0 and not o.quiet:
            print(self.strategy.opening, file=sys.stderr, flush=True)
        log = Log(o, self.task, self.device, self.world.size, self.begin, self.world.rank == 0, self.wandb_id)
        self.wandb_id = log.wandb_id
        done = self.begin
        try:
            with Signals() as signals:
                for step in log.bar:
                    self.asked.fill_(signals.asked)
                    log.add(step, self.set_lr(step), self.step(*self.batch()))
                    done = step + 1
                    self.look(log, done)
                    if o.checkpoint and (done % o.save_every == 0 or done == o.steps or log.leaves):
                        log.flush()
                        self.save(done)
                        log.restart_clock()
                    if log.leaves:
                        break
        finally:
            log.close()
            del self.step  # NCCL destroys a communicator only when the graph that uses it is gone
        if o.export and done >= o.steps:
            self.export(o.export)
        if self.world.rank == 0 and log.rates and not o.quiet:
            print(summary(log, self.task), file=sys.stderr, flush=True)
        if self.world.rank == 0 and done < o.steps:
            kept = (
                f"a checkpoint is in {o.checkpoint}"
                if o.checkpoint
                else "nothing was saved, because there was no --checkpoint"
            )
            print(f"asked to leave after step {done} of {o.steps}: {kept}", file=sys.stderr, flush=True)
        return done >= o.steps

    def look(self, log: Log, done: int) -> None:
        """Evaluate, ask and sample if that is due after a step, and keep the best model.

        No step's time includes this.
        """
        o = self.options
        if is_due(o.eval_every, done, o):
            log.flush()
            found = evaluate(self)
            log.note(done - 1, found)
            if found["held_out_loss"] < (self.best["held_out_loss"] if self.best else math.inf):
                self.best = {"step": done, **found}
                if o.checkpoint:
                    self.save(done, replace(o, checkpoint=o.checkpoint / BEST))
            log.restart_clock()
        if is_due(o.eval_tasks_every, done, o):
            log.flush()
            if scores := ask(self):
                log.note(done - 1, scores)
            log.restart_clock()
        if is_due(o.sample_every, done, o):
            log.flush()
            if text := sample(self):
                log.note(done - 1, {"sample": text})
            log.restart_clock()

    def export(self, folder: Path) -> None:
        """Write the model for other libraries, and into ``folder/best`` the best one,
        if there is a checkpoint of it.
        """
        weights = checkpoints.gather_model(self.strategy, self.device)
        if self.world.rank == 0:
            export.write(folder, self.task.exported(weights), self.task.source.codec)
            if self.best and self.options.checkpoint and checkpoints.newest(self.options.checkpoint / BEST):
                best = checkpoints.read_model(self.options.checkpoint / BEST)
                export.write(folder / BEST, self.task.exported(best), self.task.source.codec)


def rate(step: int, o: Options) -> float:
    """The learning rate of a step."""
    if o.schedule == "cosine":
        return cosine_schedule(step, o.lr, o.min_lr, o.warmup, o.steps)
    from lib.scaling_laws import wsd_schedule

    return wsd_schedule(step, o.lr, o.warmup, o.steps - o.steps // DECAYED, o.steps)


def summary(log: Log, task: Task) -> str:
    """The rate of the median step, and for images the hours for an epoch of 50,000, the book's yardstick."""
    rate = statistics.median(log.rates)
    line = f"median {rate:,.4g} {task.unit}s/s"
    if task.unit == "image":
        line += f", {hours_per_epoch(rate, N_PICTURES):.5f} hours per epoch of {N_PICTURES:,}"
    return line
