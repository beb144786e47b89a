"""The run itself: check the request, start the group, build or resume the model, train, save,
and leave when a signal asks for it.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lib import amp
from lib.fast.models import capture, forbid_workspace
from lib.runs.engine import export
from lib.runs.engine import state as checkpoints
from lib.runs.engine.context import share_of
from lib.runs.engine.evaluation import ask, evaluate, hold_out, is_due, load_questions, sample
from lib.runs.engine.log import Log
from lib.runs.engine.mesh import DATA, Mesh, arrange, check_degrees
from lib.runs.engine.need import check_memory, memory_flags
from lib.runs.engine.options import (
    DECAYED,
    Options,
    check_batch,
    check_places,
    check_unlocked,
    lock_places,
    make_places,
    parse,
)
from lib.runs.engine.signals import STATUS, Signals, follow_launcher
from lib.runs.engine.sources import N_PICTURES
from lib.runs.engine.strategies import clip_in_update, divides_gradients, make_optimizer, make_strategy
from lib.runs.engine.strategy import Strategy
from lib.runs.engine.tasks import Task
from lib.runs.engine.world import World, agree, choose_device, find_world, start_group
from lib.runs.flags import Parser, UsageError
from lib.runs.memory import shortage
from lib.training import TokenBatches, cosine_schedule, hours_per_epoch

BEST = "best"
"""The folder of the best model, inside of the last model's folder."""


def main(
    parser: Parser,
    kind: type[Task],
    argv: list[str] | None = None,
    options_kind: type[Options] = Options,
    run_kind: "type[Run] | None" = None,
) -> int:
    """Run, and return the exit status.

    Args:
        parser: The program's flags.
        kind: Its task.
        argv: What was asked for; None takes the command line.
        options_kind: The class of its options, if it has further ones.
        run_kind: The class of its run, if it is not `Run`.

    Returns:
        0, or 75 if the run was asked to leave early.
        2, after one line on stderr, if the request is wrong or memory ran out.
    """
    group_was_there, status = dist.is_initialized(), 0
    try:
        options = parse(parser, argv, options_kind)
        status = 0 if train(options, kind, run_kind) else STATUS
    except UsageError as error:
        status = _refuse(parser, str(error))
    except (MemoryError, RuntimeError) as error:
        if (text := shortage(error, memory_flags(parser))) is None:
            raise
        return _refuse(parser, text)  # the other ranks go on: destroying the group would wait for them
    if dist.is_initialized() and not group_was_there:  # after any other error NCCL would wait for the other ranks here
        dist.destroy_process_group()
    return status


def _refuse(parser: Parser, text: str) -> int:
    print(f"{parser.prog}: error: {text}", file=sys.stderr, flush=True)
    return 2


def train(options: Options, kind: type[Task], run_kind: "type[Run] | None" = None) -> bool:
    """Train to the last step, or until the run is asked to leave.

    Returns:
        Whether all steps are done.

    Raises:
        UsageError: the request is wrong; in this case nothing was allocated on a device.
    """
    with ExitStack() as held:
        return prepare(options, kind, held, run_kind).go()


def prepare(
    options: Options, kind: type[Task], held: ExitStack | None = None, run_kind: "type[Run] | None" = None
) -> "Run":
    """Check the request, start the group and build or resume the model.

    Args:
        options: Options of the run.
        kind: Its task.
        held: Gets the locks of the folders that the run writes to; None locks nothing.
        run_kind: The class of what is returned; None is `Run`.

    Raises:
        UsageError: the request is wrong; in this case nothing was allocated on a device.
    """
    world = find_world()
    if world.launcher == "torchrun":
        follow_launcher()
    options = arrange(options, world.size)
    check_batch(options, math.prod(getattr(options, kind) for kind in DATA))
    check_degrees(options, kind.sizes(options))
    device = choose_device(options.device, world)
    if options.graph and device.type != "cuda":
        raise UsageError("--graph records a CUDA graph, but the device is a CPU: expected a GPU, or no --graph")
    check_places(options)
    check_unlocked(options)
    stamp = checkpoints.stamp(options)
    found = checkpoints.peek(options, world.rank, world.size)
    task = make_task(options, kind)
    run = task.describe()
    checkpoints.check_same_run(options, found, run)
    check_memory(task, world, device)
    make_places(options)
    set_up(options, device)
    if options.is_parallel:
        start_group(world, device)
        agree(found and found["step"], "the step of the checkpoint")
    if held is not None:
        lock_places(options, world.rank, held)
        checkpoints.check_unchanged(options, stamp)
    return (run_kind or Run)(options, task, world, device, run, found is not None)


def make_task(options: Options, kind: type[Task]) -> Task:
    """The task and its data, still on the host.

    Raises:
        UsageError: the data is missing or unreadable, a size does not fit, or a batch is larger than an epoch.
    """
    try:
        task = kind(options)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    if options.batch > task.source.n:
        raise UsageError(
            f"--batch {options.batch} is more than the {task.source.n} {task.rows} of --data {options.data}"
        )
    hold_out(task)
    task.questions = load_questions(task)
    return task


def set_up(options: Options, device: torch.device) -> None:
    """Set PyTorch's process-wide options."""
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if options.graph and not options.is_parallel:  # beside collectives it was not measured
        forbid_workspace(device)
    if options.compile:
        # a whole model is split at DDP's buckets; a block is smaller than a bucket, and splitting it would gain nothing
        torch._dynamo.config.optimize_ddp = options.compile == "whole"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads)


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
            self.optimizer.step()
        else:
            self.scaler_step(lr)
        return numbers if norm is None else torch.cat([numbers, norm.float().reshape(1)])

    def clip(self, max_norm: float) -> Tensor:
        """Scale the whole gradient to a norm of at most ``max_norm``, now or in the update; return its norm before."""
        if divides_gradients(self.options, self.optimizer):
            return clip_in_update(self.optimizer, max_norm)
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

    def record_graph(self) -> None:
        """Record a step as a CUDA graph, then restore in place everything that the recording changed."""
        inputs, targets = (torch.empty_like(x) for x in self.task.source.fetch(self._some_numbers()))
        inputs.zero_()
        targets.zero_()
        if not self.optimizer.state:
            checkpoints.prime(self.optimizer)
        tensors = [
            *self.parameters,
            *(v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
        ]
        before = [tensor.detach().clone() for tensor in tensors]
        replay = capture(lambda: self.plain_step(inputs, targets), on_ranks=self.n_data > 1)
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)

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
