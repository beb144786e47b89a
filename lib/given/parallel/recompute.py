"""Two given parts of activation checkpointing: inputs that the autograd graph keeps,
and the conditions of a computation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class Enough(BaseException):
    """Ends a computation early, because everything that it should give is there. No ``except Exception`` stops it."""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def keep_in_graph(args: Sequence[Any]) -> Callable[[], list] | None:
    """Let autograd save the tensors among some arguments, as it saves what an operation needs for its backward.

    Args:
        args: Tensors, which may require gradients or not, and anything else.

    Returns:
        A function that returns all arguments again; or None if gradients are off, so that there is no graph.
        Saved tensors pass through the hooks that are active (`torch.autograd.graph.saved_tensors_hooks`),
        so an enclosing checkpoint can drop these, too.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    kept = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)
    if kept.grad_fn is None:
        return None
    blanks = [kept if isinstance(arg, Tensor) else arg for arg in args]

    def restored() -> list:
        saved = iter(kept.grad_fn.saved_tensors)  # torch 2.11 frees them with the output, so the output is what stays
        return [next(saved) if blank is kept else blank for blank in blanks]

    return restored


def conditions_of(args: Sequence[Any]) -> Callable[[], AbstractContextManager]:
    """Remember the states of the random number generators and the settings of autocast,
    of the CPU and of the arguments' GPUs.

    Returns:
        A function that opens a context in which they are as they were; when the context ends,
        the random states are put back.
    """
    devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.is_cuda}
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    cpu_state, cached = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    kinds = {"cpu", *(device.type for device in devices)}
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device.index for device in devices]))
            torch.set_rng_state(cpu_state)
            for device, state in states.items():
                torch.cuda.set_rng_state(state, device)
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield

    return restored
