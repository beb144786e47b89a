"""Everything before the first step: check the request, start the group, and build or resume the model."""

import math
import os
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from lib.fast.copies import lost_rank
from lib.fast.models import forbid_workspace
from lib.runs.engine import state as checkpoints
from lib.runs.engine.evaluation import hold_out, load_questions
from lib.runs.engine.loop import Run
from lib.runs.engine.mesh import DATA, arrange, check_degrees
from lib.runs.engine.need import check_memory, memory_flags
from lib.runs.engine.options import Options
from lib.runs.engine.places import check_places, check_unlocked, lock_places, make_places
from lib.runs.engine.request import check_batch, parse
from lib.runs.engine.signals import STATUS, follow_launcher
from lib.runs.engine.tasks import Task
from lib.runs.engine.world import agree, choose_device, find_world, start_group
from lib.runs.flags import Parser, UsageError
from lib.runs.memory import shortage


def main(
    parser: Parser,
    kind: type[Task],
    argv: list[str] | None = None,
    options_kind: type[Options] = Options,
    run_kind: type[Run] | None = None,
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
        2, after one line on stderr, if the request is wrong, memory ran out or another rank was lost.
    """
    group_was_there, status = dist.is_initialized(), 0
    try:
        options = parse(parser, argv, options_kind)
        status = 0 if train(options, kind, run_kind) else STATUS
    except UsageError as error:
        status = _refuse(parser, str(error))
    except (MemoryError, RuntimeError) as error:
        if (text := shortage(error, memory_flags(parser)) or lost_rank(error)) is None:
            raise
        return _refuse(parser, text)  # the other ranks go on: destroying the group would wait for them
    if dist.is_initialized() and not group_was_there:  # after any other error NCCL would wait for the other ranks here
        dist.destroy_process_group()
    return status


def _refuse(parser: Parser, text: str) -> int:
    print(f"{parser.prog}: error: {text}", file=sys.stderr, flush=True)
    return 2


def train(options: Options, kind: type[Task], run_kind: type[Run] | None = None) -> bool:
    """Train to the last step, or until the run is asked to leave.

    Returns:
        Whether all steps are done.

    Raises:
        UsageError: the request is wrong; in this case nothing was allocated on a device.
    """
    with ExitStack() as held:
        return prepare(options, kind, held, run_kind).go()


def prepare(
    options: Options, kind: type[Task], held: ExitStack | None = None, run_kind: type[Run] | None = None
) -> Run:
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
    if options.graph:
        forbid_workspace(device)
    if options.compile:
        # a whole model is split at DDP's buckets; a block is smaller than a bucket, and splitting it would gain nothing
        torch._dynamo.config.optimize_ddp = options.compile == "whole"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads)
