"""What a run needs of memory at least, told before anything is allocated on a device or written."""

import math

import torch

from lib.runs.engine.mesh import DATA
from lib.runs.engine.tasks import Task
from lib.runs.engine.world import World
from lib.runs.flags import Parser
from lib.runs.memory import check_need

FLAGS = ("--batch", "--length", "--image-size", "--dim", "--n-layers", "--n-experts", "--items", "--model")
"""Flags that change how much memory a run needs."""


def memory_flags(parser: Parser) -> list[str]:
    """Those of ``FLAGS`` that a program has, and the flag that divides a batch."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    first, *others = [flag for flag in FLAGS if flag in known]
    return [first, "more --accumulate", *others]


def check_memory(task: Task, world: World, device: torch.device) -> None:
    """Check that a run can fit, by what it needs in any case.

    Ranks on the CPUs of a host share its memory.

    Raises:
        UsageError: it cannot; one line names the flags.
    """
    together = world.local_size if device.type == "cpu" else 1
    model = model_bytes(task)
    copy = ", a copy while --graph records" if task.options.graph else ""
    each = f"each with a gradient and {_n_states(task)} numbers of the optimizer{copy}"
    check_need(
        model * together,
        device,
        task.held[1] if task.held else f"{_asked(task)} has {task.n_weights:,} weights, {each}",
        [*task.size_flags, "more --shard"],
    )
    rows = _micro_batch(task)
    side = "--image-size" if task.unit == "image" else "--length"
    check_need(
        (model + stream_bytes(task)) * together,
        device,
        f"--batch {task.options.batch} in micro-batches of {rows} {task.rows} of {task.tokens_per_row:,} tokens",
        ["--batch", "more --accumulate", side, *task.size_flags],
    )
    check_need(
        (model + task.source.made_bytes) * together,
        device,
        f"--items {task.source.n + task.source.n_held_out} synthetic {task.rows}",
        ["--items", side],
    )


def model_bytes(task: Task) -> int:
    """Weights, gradients and the optimizer's state of this rank in float32, and what ``--graph`` keeps of the weights
    while it records; at first each rank makes the whole model.
    """
    if task.held:
        return task.held[0]
    o = task.options
    n_ranks = o.shard * o.tensor * o.pipeline * o.expert if o.is_parallel else 1  # type: ignore[operator]
    return max(4 * task.n_weights, 4 * (2 + _n_states(task) + o.graph) * task.n_weights // n_ranks)


def stream_bytes(task: Task) -> int:
    """What the backward pass keeps at least: the residual stream before each block, of one micro-batch."""
    o = task.options
    n_ranks = (o.context or 1) * (o.pipeline or 1)
    width = task.config.dim * task.config.n_layers * task.dtype.itemsize
    return _micro_batch(task) * task.tokens_per_row * width // n_ranks


def _micro_batch(task: Task) -> int:
    """Rows of a micro-batch on one rank."""
    o = task.options
    return o.batch // (math.prod(getattr(o, kind) or 1 for kind in DATA) * o.accumulate)


def _n_states(task: Task) -> int:
    """Numbers that the optimizer keeps for each weight."""
    return 1 if task.options.optimizer == "sgd" else 2


def _asked(task: Task) -> str:
    """The model and its sizes, as flags."""
    o = task.options
    sizes = {"dim": o.dim, "n-layers": o.n_layers, "n-experts": o.n_experts, "length": o.length}
    flags = [f"--{name} {value}" for name, value in sizes.items() if value is not None]
    return " ".join([f"--model {o.model}", *flags])
