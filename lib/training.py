"""The parts of a correct training loop: loss, optimizer, schedule, clipping, data, accumulation, checkpoints."""

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
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn


def cross_entropy(logits: Float[Tensor, "... v"], targets: Integer[Tensor, "..."]) -> Float[Tensor, ""]:
    """Mean over all targets of minus the log probability of the target, in nats. (Exercise 7.1)

    Size: 20 minutes, difficulty 3, core.

    Args:
        logits: Scores ``[..., V]``, any floating dtype, of any magnitude: 1e4 must work.
        targets: The right classes ``[...]``, from 0 to V - 1, in any integer dtype.

    Returns:
        A scalar of the dtype of ``logits``, computed in float32 at least (float64 stays float64), because float16 ends
        at 65,504.

    Convention: the classes come last.
        PyTorch's ``cross_entropy`` expects them second, ``[N, V, ...]``, and ignores targets of -100.
    """
    raise NotImplementedError("Exercise 7.1: write cross_entropy")


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay. (Exercise 7.2)

    Size: 30 minutes, difficulty 3, core.

    Args:
        params: Parameters, or groups: dicts with "params" and the settings that differ from the defaults.
        lr: Learning rate.
        betas: Fractions of the mean of gradients, and of the mean of their squares, that each step keeps.
        eps: Added to the root of the mean square, after the mean square is corrected.
        weight_decay: Times ``lr``, the fraction of a weight that each step removes.

    Attributes:
        state: For each parameter that has had a gradient: "step" (the number of its gradients so far), "exp_avg" (m)
            and "exp_avg_sq" (v), both in the parameter's dtype.
            These are PyTorch's names, so its AdamW can load our ``state_dict()``, and ours its.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1); the message names the
            value.

    Source: Loshchilov and Hutter (arXiv:1711.05101), algorithm 2.
    Convention: the decay is multiplied by ``lr``, as in PyTorch; the paper multiplies it by the schedule alone.
    """

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        raise NotImplementedError("Exercise 7.2: write AdamW.__init__")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One update of every parameter whose ``grad`` is not None, in place; the gradients are left as they are.

        Args:
            closure: Function that computes the loss and its gradients.
                It is called once, before the update, with gradients enabled.

        Returns:
            What ``closure`` returned, or None.
        """
        raise NotImplementedError("Exercise 7.2: write AdamW.step")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split a model's parameters into those that decay and those that do not. (Exercise 7.3)

    Size: 15 minutes, difficulty 2, core.

    Args:
        model: Any module; a weight that is used in two places (a tied head) is one parameter.
        weight_decay: Decay of the first group; the second group has 0.0.

    Returns:
        Two parameter groups for an optimizer: dicts with "params" (a list, in the model's order) and "weight_decay".
        The first has the tensors of two or more dimensions, the second the others.
        Parameters that do not require a gradient are in neither.
        A list may be empty.

    Convention: embeddings and positions decay here, as in nanoGPT; some programs exempt them.
    """
    raise NotImplementedError("Exercise 7.3: write parameter_groups")


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of a step: a linear warm-up, then half a cosine. (Exercise 7.4)

    Size: 15 minutes, difficulty 2, core.

    Args:
        step: Number of the step, from 0.
        max_lr: Rate at ``step == warmup_steps``.
        min_lr: Rate from ``step == max_steps`` on.
        warmup_steps: Length of the warm-up; may be 0.
        max_steps: At least ``warmup_steps``.
            If both are equal, that step has ``min_lr``.

    Returns:
        Before ``warmup_steps``, ``max_lr * step / warmup_steps``, which is 0 at step 0; after that the cosine.

    Raises:
        ValueError: ``max_steps`` is below ``warmup_steps``; the message names both.

    Source: Loshchilov and Hutter (arXiv:1608.03983), equation (5), without restarts.
    Convention: some programs warm up with ``(step + 1) / warmup_steps``, so that their first step moves the weights.
    """
    raise NotImplementedError("Exercise 7.4: write cosine_schedule")


def clip_gradient_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients by one factor, in place, so that their common norm is at most ``max_norm``. (Exercise 7.5)

    Size: 20 minutes, difficulty 3, core.

    Args:
        parameters: One parameter or any iterable of parameters, also a generator; those without a gradient are skipped.
        max_norm: Largest Euclidean norm of all gradients together, as one long vector.

    Returns:
        The norm before clipping, a scalar tensor, right even if float16's squares would overflow; zero if there is no
        gradient.

    Source: Pascanu and others (arXiv:1211.5063), algorithm 1; the factor is PyTorch's, ``max_norm / (norm + 1e-6)``.
    Cost: no value is copied to the host: no ``item()``, no ``float()``, no ``if`` on a tensor.
    """
    raise NotImplementedError("Exercise 7.5: write clip_gradient_norm_")


class TokenBatches:
    """An endless iterator of inputs and targets over one long row of tokens. (Exercise 7.6)

    Size: 45 minutes, difficulty 4, core.

    The row of N tokens is cut into ``n_windows`` = (N - 1) // length windows.
    Window i has the inputs ``tokens[i * length : (i + 1) * length]``, and its targets are shifted by one token.
    An epoch contains every window once: in order, or, with a seed, in an order that is shuffled anew for each epoch.
    The shuffle depends on the seed and on the epoch's number as two numbers, not on their sum, and leaves the global
    random generators alone.
    Each step takes the next ``world_size * batch`` windows: rank 0 the first ``batch``, rank 1 the next, and so on.
    Every batch is full and no window is dropped, so a batch may span two epochs.

    Args:
        tokens: Ids ``[N]``: a tensor, an array, a list, or a ``numpy.memmap``, which is read batch by batch and never
            as a whole.
        batch: Windows B in a batch of one rank.
        length: Tokens T in a window.
        rank: Index of this rank.
        world_size: Number of ranks that share the tokens.
        seed: Seed of the shuffles, the same on all ranks; None keeps the order.

    Attributes:
        n_windows: Windows in an epoch.
        epoch: Epochs finished by all ranks together: 0 until ``n_windows`` windows have been returned.

    Raises:
        ValueError: there are too few tokens for one batch on every rank; the message names their number and the number
            needed, ``world_size * batch * length + 1``.
        ValueError: ``rank`` is not from 0 to ``world_size - 1``; the message names it.
    """

    def __init__(self, tokens, batch: int, length: int, rank: int = 0, world_size: int = 1, seed: int | None = None):
        raise NotImplementedError("Exercise 7.6: write TokenBatches.__init__")

    @property
    def epoch(self) -> int:
        raise NotImplementedError("Exercise 7.6: write TokenBatches.epoch")

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """This rank's next inputs and targets: int64 ``[B, T]`` each, contiguous.

        They share memory with no other tensor.
        """
        raise NotImplementedError("Exercise 7.6: write TokenBatches.__next__")

    def state_dict(self) -> dict[str, int | None]:
        """Where the next batch starts, as plain numbers that are the same on every rank."""
        raise NotImplementedError("Exercise 7.6: write TokenBatches.state_dict")

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Continue from a saved state; ``batch`` and ``world_size`` may differ from those of the run that saved it.

        Raises:
            ValueError: the number of tokens, ``length`` or ``seed`` differs from the saved one; the message names both
                values.
        """
        raise NotImplementedError("Exercise 7.6: write TokenBatches.load_state_dict")


def accumulate_gradients(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """Compute the gradient of a batch that does not fit in memory, one micro-batch at a time. (Exercise 7.7)

    Size: 25 minutes, difficulty 3, core.

    Args:
        model: ``model(inputs, targets)`` returns ``(logits, loss)``, where the loss is the mean over all targets.
        micro_batches: Any iterable of ``(inputs, targets)`` with ``targets.numel()`` items each; those without items
            are skipped.

    Returns:
        The mean loss over all items, detached.
        Its gradients are added to ``.grad``; the caller clears them.

    Raises:
        ValueError: no micro-batch has an item; the message says so.

    Cost: the activations of one micro-batch at a time.
        The micro-batches themselves may be kept in a list.
    """
    raise NotImplementedError("Exercise 7.7: write accumulate_gradients")


def save_checkpoint(
    path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **state
) -> None:
    """Save everything that a run needs to continue as if nothing had happened. (Exercise 7.8)

    Size: 40 minutes, difficulty 4, core.

    That is the model, the optimizer, ``step``, ``state``, and the states of the random number generators: PyTorch's
    (including every CUDA device's), that of Python's ``random``, and NumPy's global one.

    Args:
        path: Path of a file in an existing folder, or a file that is open for writing bytes.
        model: Its ``state_dict()`` is saved.
        optimizer: Its ``state_dict()`` is saved, too.
        step: Number of finished steps.
        **state: Additional values by name: tensors, numbers, strings, and dicts, lists and tuples of those.

    Returns:
        Nothing.
        At every moment ``path`` is the complete old checkpoint or the complete new one: the function writes
        ``{path}.tmp``, waits until it is on the disk (``os.fsync``), and renames it (``os.replace``).
        If anything fails, it removes ``{path}.tmp``.

    Raises:
        TypeError: ``step``, a value in ``state`` or the optimizer's ``param_groups`` holds what ``weights_only=True``
            refuses; it is named.
    """
    raise NotImplementedError("Exercise 7.8: write save_checkpoint")


def load_checkpoint(path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Restore a run to the moment at which ``save_checkpoint`` saved it. (Exercise 7.9)

    Size: 30 minutes, difficulty 3, core.

    Args:
        path: Path of a file, or a file that is open for reading bytes.
        model: Gets the saved weights, in place, on whatever device it is.
        optimizer: Gets its saved state and its groups' settings.

    Returns:
        ``step`` and the additional state, by name, with tensors on the CPU.
        The random numbers continue where they were when it was saved; CUDA's only if there are as many devices as then.

    Raises:
        pickle.UnpicklingError: the file contains more than tensors and plain values; nothing in it is run.
    """
    raise NotImplementedError("Exercise 7.9: write load_checkpoint")


def hours_per_epoch(items_per_second: float, dataset_size: int) -> float:
    """The book's yardstick: hours that it takes to see every item of a data set once. (Exercise 7.10)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        items_per_second: Images or tokens per second.
        dataset_size: Images or tokens in the data set.

    Returns:
        Hours per epoch.

    Raises:
        ValueError: ``items_per_second`` is not above 0 (NaN is not above 0 either); the message names it.
    """
    raise NotImplementedError("Exercise 7.10: write hours_per_epoch")
