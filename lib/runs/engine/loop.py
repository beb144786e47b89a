"""The run itself: check all, meet, build, go on from where a checkpoint stands, train, save, and leave when a signal asks for it."""

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lib import amp
from lib.fast.models import capture
from lib.runs.engine import state as checkpoints
from lib.runs.engine.leave import STATUS, Signals, follow_launcher
from lib.runs.engine.log import Log
from lib.runs.engine.options import Options, Parser, UsageError, check_world, make_places, parse
from lib.runs.engine.sources import N_PICTURES
from lib.runs.engine.strategies import Single, check_cuts, make_optimizer, make_strategy
from lib.runs.engine.tasks import Loss, Task
from lib.runs.engine.world import World, agree, choose_device, find_world, start_group
from lib.training import TokenBatches, cosine_schedule, hours_per_epoch


def main(parser: Parser, kind: type[Task], argv: list[str] | None = None) -> int:
    """A program's exit status: 0, or 75 if it was asked to leave, or 2 with one line on the error stream when the request is wrong."""
    group_was_there, status = dist.is_initialized(), 0
    try:
        options = parse(parser, argv)
        status = 0 if train(options, kind) else STATUS
    except UsageError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr, flush=True)
        status = 2
    if dist.is_initialized() and not group_was_there:  # not after any other error: NCCL would wait for the other ranks
        dist.destroy_process_group()
    return status


def train(options: Options, kind: type[Task]) -> bool:
    """All of a run, or what of it was done when it was asked to leave.

    Returns:
        Whether all steps are done.

    Raises:
        UsageError: the request is wrong; nothing was allocated on a device then.
    """
    world = find_world()
    if world.launcher == "torchrun":
        follow_launcher()
    n_data = 1 if options.strategy == "tp" else world.size
    check_world(options, world.size, n_data)
    check_cuts(options, kind.widths(options.model), world.size)
    device = choose_device(options.device, world)
    if options.graph and device.type != "cuda":
        raise UsageError("--graph records a CUDA graph, and the device is a CPU: expected a GPU, or no --graph")
    make_places(options)
    found = checkpoints.peek(options, world.rank, world.size)
    task = make_task(options, kind)
    run = {"layout": checkpoints.layout(options), **task.describe()}
    checkpoints.check_same_run(options, found, run)
    set_up(options, device)
    if options.strategy != "single":
        start_group(world, device)
        agree(found and found["step"], "the step of the checkpoint")
    return Run(options, task, world, device, n_data, run, found is not None).go()


def make_task(options: Options, kind: type[Task]) -> Task:
    """The task and its data, still on the host.

    Raises:
        UsageError: the data is not there or cannot be read, a size does not fit, or a batch is larger than an epoch.
    """
    try:
        task = kind(options)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    if options.batch > task.source.n:
        rows = "images" if task.unit == "image" else "sequences"
        raise UsageError(f"--batch {options.batch} is more than the {task.source.n} {rows} of --data {options.data}")
    return task


def set_up(options: Options, device: torch.device) -> None:
    """What PyTorch keeps for the whole process."""
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if options.compile:
        # of a whole model DDP's buckets are cut out; a block is smaller than what they hold, and would be cut in two for nothing
        torch._dynamo.config.optimize_ddp = options.compile == "whole"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads)


class Run:
    """A model in training on this rank.

    Args:
        options: What was asked for.
        task: What is learned.
        world: Where this rank stands.
        device: Of this rank.
        n_data: Among how many ranks a batch is shared out.
        run: What its checkpoints say about it.
        resumes: Whether there is one to go on from.
    """

    def __init__(
        self,
        options: Options,
        task: Task,
        world: World,
        device: torch.device,
        n_data: int,
        run: dict[str, Any],
        resumes: bool,
    ):
        self.options, self.task, self.world, self.device, self.run = options, task, world, device, run
        self.n_data, self.data_rank = n_data, world.rank if n_data > 1 else 0
        torch.manual_seed(options.seed)
        self.strategy: Single = make_strategy(options, Loss(task, device))
        self.optimizer: Optimizer = make_optimizer(options, self.strategy.groups(), device)
        self.scaler: Any = self._scaler()
        self.parameters = list(self.strategy.named().values())
        self.numbers = self._order()
        self.begin = self._resume() if resumes else 0
        task.source.to(device)
        self.asked = torch.zeros((), device=device)  # 1 when this rank was asked to leave; a CUDA graph reads it too
        self.step: Callable[[Tensor, Tensor], Tensor] = self.plain_step

    def _scaler(self) -> Any:
        if self.options.precision != "float16":
            return None
        return amp.GradScaler() if self.options.ours else torch.amp.GradScaler(self.device.type)

    def _order(self) -> TokenBatches:
        """The numbers of this rank's items, batch after batch: chapter 7's order of windows, of a row of numbers."""
        row = np.arange(self.task.source.n + 1)
        share = self.options.batch // self.n_data
        return TokenBatches(row, share, 1, rank=self.data_rank, world_size=self.n_data, seed=self.options.seed)

    def _resume(self) -> int:
        state = checkpoints.load(self.options, self.strategy, self.optimizer)
        self.numbers.load_state_dict(state["data"])
        if self.scaler is not None and "scaler" in state:  # there is none if the run was not in float16 so far
            self.scaler.load_state_dict(state["scaler"])
        return state["step"]

    def save(self, step: int) -> None:
        extra = {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}
        state = {"data": self.numbers.state_dict(), "run": self.run, **extra}
        checkpoints.save(self.options, self.strategy, self.optimizer, step, **state)

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's share of the next batch, on the device; the host does not wait for it."""
        numbers = next(self.numbers)[0][:, 0]
        if self.device.type == "cuda":
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        return self.task.source.fetch(numbers)

    def plain_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping, one update.

        Returns:
            What ``Log`` takes, on the device: the mean loss over all ranks, the share of them that were asked to leave, and
            with ``--clip`` the norm of the gradient before clipping.
        """
        numbers = self.backward(inputs, targets)
        if self.scaler is not None:
            self.strategy.share_overflow()
            self.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip(self.options.clip).detach() if self.options.clip else None
        lr = self.optimizer.param_groups[0]["lr"]
        if self.scaler is None:
            self.strategy.decay(lr)
            self.optimizer.step()
        else:
            self.scaler_step(lr)
        return numbers if norm is None else torch.cat([numbers, norm.float().reshape(1)])

    def scaler_step(self, lr: float) -> None:
        """The update, unless a gradient has inf or NaN; decay that the optimizer does not do is skipped with it."""

        def decay(*_) -> None:
            self.strategy.decay(lr)

        handle = self.optimizer.register_step_pre_hook(decay)
        self.scaler.step(self.optimizer)
        handle.remove()
        self.scaler.update()

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the whole batch, micro-batch by micro-batch; all ranks' mean loss, and the share of them that were asked to leave."""
        n = self.options.accumulate
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(zip(inputs.chunk(n), targets.chunk(n), strict=True)):
            with self.strategy.micro_step(i == n - 1):
                loss = self.strategy.call(x, y) / n
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach().float()
        self.strategy.finish()
        numbers = torch.stack([total, self.asked])
        if self.options.strategy != "single":
            dist.all_reduce(numbers)
            numbers /= self.world.size
        return numbers

    def set_lr(self, step: int) -> float:
        o = self.options
        lr = cosine_schedule(step, o.lr, o.min_lr, o.warmup, o.steps)
        for group in self.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return lr

    def record_graph(self) -> None:
        """Record a step as a CUDA graph, and put back all that the recording changed, in place."""
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
        """All steps that are left, or up to the one after which the ranks leave together; whether all are done."""
        o = self.options
        if o.graph:
            self.record_graph()
        log = Log(o, self.task, self.device, self.world.size, self.begin, self.world.rank == 0)
        done = self.begin
        try:
            with Signals() as signals:
                for step in log.bar:
                    self.asked.fill_(signals.asked)
                    log.add(step, self.set_lr(step), self.step(*self.batch()))
                    done = step + 1
                    if o.checkpoint and (done % o.save_every == 0 or done == o.steps or log.leaves):
                        log.flush()
                        self.save(done)
                        log.restart_clock()
                    if log.leaves:
                        break
        finally:
            log.close()
            del self.step  # NCCL leaves a communicator only when the graph that uses it is gone
        if self.world.rank == 0 and log.rates and not o.quiet:
            print(summary(log, self.task), file=sys.stderr, flush=True)
        if self.world.rank == 0 and done < o.steps:
            kept = f"a checkpoint is in {o.checkpoint}" if o.checkpoint else "nothing is kept, for want of --checkpoint"
            print(f"asked to leave after step {done} of {o.steps}: {kept}", file=sys.stderr, flush=True)
        return done >= o.steps


def summary(log: Log, task: Task) -> str:
    """The rate of the median step, and the book's yardstick where an epoch is of images."""
    rate = statistics.median(log.rates)
    line = f"median {rate:,.4g} {task.unit}s/s"
    if task.unit == "image":
        line += f", {hours_per_epoch(rate, N_PICTURES):.5f} hours per epoch of {N_PICTURES:,}"
    return line
