"""A training loop that is right: loss, optimizer, schedule, clipping, data, accumulation, checkpoints."""

import io
import math
import os
import pickle
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def cross_entropy(logits: Float[Tensor, "... v"], targets: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """The mean of minus the log probability of each target, in nats. (Exercise 7.1)

    Args:
        logits: Scores ``[..., V]``, any floating dtype, of any size: 1e4 is no exception.
        targets: The class that each should have been, ``[...]``, from 0 to V - 1, in any integer dtype.

    Returns:
        One number of the dtype of ``logits``; inside, float32 at least (float64 stays float64): float16 ends at 65,504.

    Convention: the classes stand last. ``torch.nn.functional.cross_entropy`` wants them second, ``[N, V, ...]``, and passes
        over targets of -100; here every target counts.
    """
    raise NotImplementedError("Exercise 7.1: write cross_entropy")


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay. (Exercise 7.2)

    Args:
        params: Parameters, or groups: dicts with "params" and whatever differs from the defaults.
        lr: Learning rate.
        betas: How much of the mean of gradients, and of the mean of their squares, each step keeps.
        eps: Added to the root of the mean square, after it is corrected.
        weight_decay: Share of a weight that a step takes off, times ``lr``.

    Attributes:
        state: For each parameter that has had a gradient: "step" (how many it had), "exp_avg" (m) and "exp_avg_sq" (v),
            in the parameter's dtype: PyTorch's names, so that its AdamW loads our ``state_dict()`` and we load its.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1); the message names the value.

    Source: Loshchilov and Hutter (arXiv:1711.05101), algorithm 2.
    Convention: the decay is multiplied by ``lr``, as in PyTorch; the paper multiplies it by the schedule alone.
    """

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        raise NotImplementedError("Exercise 7.2: write AdamW.__init__")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One update of every parameter whose ``grad`` is not None, in place; the gradients are left as they are.

        Args:
            closure: Computes the loss and its gradients anew, with gradients enabled; called once, first.

        Returns:
            What ``closure`` returned, or None.
        """
        raise NotImplementedError("Exercise 7.2: write AdamW.step")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Which parameters decay and which do not, as an optimizer takes them. (Exercise 7.3)

    Args:
        model: Any module; a weight that stands in two places (a tied head) is one parameter.
        weight_decay: Of the first group; the second has 0.0.

    Returns:
        Two dicts with "params" (a list, in the model's order) and "weight_decay": first the tensors of two or more
        dimensions, then the rest. Parameters that do not require a gradient are in neither. A list may be empty.

    Convention: embeddings and positions decay here, as in nanoGPT; others leave them out.
    """
    raise NotImplementedError("Exercise 7.3: write parameter_groups")


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of a step: up in a line, down in half a cosine. (Exercise 7.4)

    Args:
        step: From 0.
        max_lr: Reached at ``step == warmup_steps``, which may be 0.
        min_lr: Reached at ``step == max_steps``, and kept.
        max_steps: ``warmup_steps`` or more. Both may be equal: then that step has ``min_lr``, and there is no cosine.

    Returns:
        ``max_lr * step / warmup_steps`` before ``warmup_steps``, so 0 at step 0; then the cosine.

    Raises:
        ValueError: ``max_steps`` is below ``warmup_steps``; the message names both.

    Source: Loshchilov and Hutter (arXiv:1608.03983), equation (5), without restarts.
    Convention: others warm up with ``(step + 1) / warmup_steps``, so that their first step moves.
    """
    raise NotImplementedError("Exercise 7.4: write cosine_schedule")


def clip_gradient_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients together, in place, so that their common norm is at most ``max_norm``. (Exercise 7.5)

    Args:
        parameters: Any iterable of parameters (a generator too), or one; those without a gradient are passed over.
        max_norm: The Euclidean norm that all gradients together, as one long vector, may have.

    Returns:
        Their norm before clipping, of no dimension; zero without a gradient. It fits where float16's squares do not.

    Source: Pascanu and others (arXiv:1211.5063), algorithm 1; the factor is PyTorch's, ``max_norm / (norm + 1e-6)``.
    Cost: no value is brought to the host: no ``item()``, no ``float()``, no ``if`` on a tensor.
    """
    raise NotImplementedError("Exercise 7.5: write clip_gradient_norm_")


class TokenBatches:
    """An endless iterator of inputs and targets over one long row of tokens. (Exercise 7.6)

    The row of N tokens is cut into ``n_windows`` = (N - 1) // length windows, side by side; window i has the inputs
    ``tokens[i * length : (i + 1) * length]`` and the targets one token further on. An epoch is every window once: in order,
    or with a seed in an order drawn anew each epoch. The epochs follow each other without a gap, and each step takes the
    next ``world_size * batch`` windows of them: rank 0 the first ``batch``, rank 1 the next, and so on. So a batch may begin
    in one epoch and end in the next; it is always full, and no window is dropped.

    Args:
        tokens: Ids ``[N]``: a tensor, an array, a ``numpy.memmap`` (read as it goes, not all at once), a list.
        batch: Windows B in a batch of one rank.
        length: Tokens T in a window.
        rank: Which of the ranks this is.
        world_size: How many ranks share the tokens.
        seed: Shuffles; None keeps the order. All ranks need the same.

    Attributes:
        n_windows: In an epoch.
        epoch: Epochs begun and ended by all ranks together: 0 until ``n_windows`` are given out.

    Raises:
        ValueError: the windows do not fill one batch of every rank, with the numbers of tokens that there are and that it
            takes, ``world_size * batch * length + 1``; a rank that is not from 0 to ``world_size - 1``.
    """

    def __init__(self, tokens, batch: int, length: int, rank: int = 0, world_size: int = 1, seed: int | None = None):
        raise NotImplementedError("Exercise 7.6: write TokenBatches.__init__")

    @property
    def epoch(self) -> int:
        raise NotImplementedError("Exercise 7.6: write TokenBatches.epoch")

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """This rank's next inputs and targets, int64 ``[B, T]`` each, contiguous, in memory shared with nothing."""
        raise NotImplementedError("Exercise 7.6: write TokenBatches.__next__")

    def state_dict(self) -> dict[str, int | None]:
        """Where the next batch begins, in plain numbers; the same on every rank."""
        raise NotImplementedError("Exercise 7.6: write TokenBatches.state_dict")

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from there; ``batch`` and ``world_size`` may differ from those of the run that saved.

        Raises:
            ValueError: another number of tokens, another ``length`` or ``seed``; the message names both values.
        """
        raise NotImplementedError("Exercise 7.6: write TokenBatches.load_state_dict")


def accumulate_gradients(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """The gradient of a batch that does not fit, micro-batch by micro-batch. (Exercise 7.7)

    Args:
        model: ``model(inputs, targets)`` gives ``(logits, loss)``, the loss being the mean over all targets.
        micro_batches: Any iterable of ``(inputs, targets)``, with ``targets.numel()`` items each; one with none is skipped.

    Returns:
        The mean loss over all items, detached. Its gradients are added to ``.grad``, which the caller clears.

    Raises:
        ValueError: there is no micro-batch that holds an item; the message says so in words.

    Cost: one micro-batch's activations at a time. The micro-batches themselves may be kept in a list.
    """
    raise NotImplementedError("Exercise 7.7: write accumulate_gradients")


def save_checkpoint(
    path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **state
) -> None:
    """All that a run needs to go on as if nothing had happened. (Exercise 7.8)

    Kept are the model, the optimizer, ``step``, ``state``, and where the random numbers stand: PyTorch's (every CUDA device's
    too), those of Python's ``random`` and of NumPy's global generator.

    Args:
        path: A file; its folder exists. Or a file that is open for writing bytes.
        model: Its ``state_dict()`` is kept, and that of ``optimizer``.
        step: Steps done.
        **state: More, by name: tensors, numbers, strings, and dicts, lists and tuples of those.

    Returns:
        Nothing. At every moment ``path`` holds the old checkpoint or the new one, whole: what is written goes to
        ``{path}.tmp``, to the disk (``os.fsync``), and then into its place (``os.replace``). Where it fails, that is removed.

    Raises:
        TypeError: a value in ``state`` that pickle (a lambda) or ``weights_only=True`` (an object) refuses; it is named.
    """
    raise NotImplementedError("Exercise 7.8: write save_checkpoint")


def load_checkpoint(path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Put a run back where ``save_checkpoint`` saw it. (Exercise 7.9)

    Args:
        path: A file, or a file that is open for reading bytes.
        model: Takes the weights, in place, on whatever device it is; ``optimizer`` its state and its groups' settings.

    Returns:
        ``step`` and the extra state, by name; tensors on the CPU. The random numbers go on where they were.

    Raises:
        pickle.UnpicklingError: the file holds more than tensors and plain values; nothing in it is run.
    """
    raise NotImplementedError("Exercise 7.9: write load_checkpoint")


def hours_per_epoch(items_per_second: float, dataset_size: int) -> float:
    """The book's yardstick: how long it takes to see everything once. (Exercise 7.10)

    Args:
        items_per_second: Images, or tokens.
        dataset_size: The same.

    Returns:
        Hours.

    Raises:
        ValueError: ``items_per_second`` is not above 0, as nan is not; the message names it.
    """
    raise NotImplementedError("Exercise 7.10: write hours_per_epoch")
