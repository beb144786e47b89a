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
    """Mean over all targets of minus the log probability of the target, in nats. (Exercise)

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
    ### BEGIN SOLUTION
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = wide - wide.amax(-1, keepdim=True)
    chosen = shifted.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return (shifted.exp().sum(-1).log() - chosen).mean().to(logits.dtype)
    ### END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay. (Exercise)

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
        ### BEGIN SOLUTION
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name} = {value} is negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}: each must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        ### END SOLUTION

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One update of every parameter whose ``grad`` is not None, in place; the gradients are left as they are.

        Args:
            closure: Function that computes the loss and its gradients.
                It is called once, before the update, with gradients enabled.

        Returns:
            What ``closure`` returned, or None.
        """
        ### BEGIN SOLUTION
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)
        return loss
        ### END SOLUTION


### BEGIN SOLUTION
def _update(parameter: Tensor, state: dict, group: dict) -> None:
    """Apply AdamW's step to one parameter."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    gradient, (beta1, beta2) = parameter.grad, group["betas"]
    step = state["step"] = int(state["step"]) + 1
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))


### END SOLUTION


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split a model's parameters into those that decay and those that do not. (Exercise)

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
    ### BEGIN SOLUTION
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    ### END SOLUTION


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of a step: a linear warm-up, then half a cosine. (Exercise)

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
    ### BEGIN SOLUTION
    if max_steps < warmup_steps:
        raise ValueError(f"max_steps = {max_steps} is below warmup_steps = {warmup_steps}")
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= max_steps:
        return min_lr
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)
    ### END SOLUTION


def clip_gradient_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients by one factor, in place, so that their common norm is at most ``max_norm``. (Exercise)

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
    ### BEGIN SOLUTION
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = torch._foreach_norm(gradients)  # one kernel for many tensors, as torch.optim does it
    norm = torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {gradient.device for gradient in gradients}:
        torch._foreach_mul_([gradient for gradient in gradients if gradient.device == device], factor.to(device))
    return norm
    ### END SOLUTION


class TokenBatches:
    """An endless iterator of inputs and targets over one long row of tokens. (Exercise)

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
        ### BEGIN SOLUTION
        self.tokens = tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asarray(tokens)
        self.batch, self.length, self.rank, self.world_size = map(int, (batch, length, rank, world_size))
        self.seed = None if seed is None else int(seed)
        self.n_windows = (len(self.tokens) - 1) // length
        self.position = 0  # windows that all ranks together have read, over all epochs
        self._order = (-1, np.arange(0))
        if not 0 <= rank < world_size:
            raise ValueError(f"rank = {rank} is not from 0 to world_size - 1 = {world_size - 1}")
        needed = world_size * batch * length + 1
        if len(self.tokens) < needed:
            parts = f"{world_size} ranks x {batch} windows x {length} tokens + 1"
            raise ValueError(f"{len(self.tokens)} tokens are too few: one step takes {parts} = {needed}")
        ### END SOLUTION

    @property
    def epoch(self) -> int:
        ### BEGIN SOLUTION
        return self.position // self.n_windows
        ### END SOLUTION

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """This rank's next inputs and targets: int64 ``[B, T]`` each, contiguous.

        They share memory with no other tensor.
        """
        ### BEGIN SOLUTION
        first = self.position + self.rank * self.batch
        starts = [self.length * _window(self, first + i) for i in range(self.batch)]
        rows = torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))
        self.position += self.world_size * self.batch
        return rows[:, :-1].clone(), rows[:, 1:].clone()
        ### END SOLUTION

    def state_dict(self) -> dict[str, int | None]:
        """Where the next batch starts, as plain numbers that are the same on every rank."""
        ### BEGIN SOLUTION
        return {"position": self.position, "n_tokens": len(self.tokens), "length": self.length, "seed": self.seed}
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Continue from a saved state; ``batch`` and ``world_size`` may differ from those of the run that saved it.

        Raises:
            ValueError: the number of tokens, ``length`` or ``seed`` differs from the saved one; the message names both
                values.
        """
        ### BEGIN SOLUTION
        for name, ours in self.state_dict().items():
            if name != "position" and state[name] != ours:
                raise ValueError(f"{name} was {state[name]} when the state was saved and is {ours} now")
        self.position = int(state["position"] or 0)
        ### END SOLUTION


### BEGIN SOLUTION
def _window(batches: TokenBatches, position: int) -> int:
    """The window at this place, if all epochs are laid end to end."""
    epoch, place = divmod(position, batches.n_windows)
    if batches.seed is not None and batches._order[0] != epoch:
        batches._order = (epoch, np.random.default_rng((batches.seed, epoch)).permutation(batches.n_windows))
    return place if batches.seed is None else int(batches._order[1][place])


### END SOLUTION


def accumulate_gradients(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """Compute the gradient of a batch that does not fit in memory, one micro-batch at a time. (Exercise)

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
    ### BEGIN SOLUTION
    micro_batches = [pair for pair in micro_batches if pair[1].numel()]
    if not micro_batches:
        raise ValueError("no micro-batch holds an item, so there is no gradient")
    n_items = sum(targets.numel() for _, targets in micro_batches)
    mean = torch.zeros(())
    for inputs, targets in micro_batches:
        share = model(inputs, targets)[1] * (targets.numel() / n_items)
        share.backward()
        mean = mean.to(share) + share.detach()
    return mean
    ### END SOLUTION


def save_checkpoint(
    path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **state
) -> None:
    """Save everything that a run needs to continue as if nothing had happened. (Exercise)

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
    ### BEGIN SOLUTION
    contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for name, value in [("step", step), ("param_groups", contents["optimizer"]["param_groups"]), *state.items()]:
        _check_readable(name, value)
    contents |= {"random": _random_state(), "state": {"step": step, **state}}
    if not isinstance(path, str | os.PathLike):
        torch.save(contents, path)
        return
    temporary = f"{os.fspath(path)}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    ### END SOLUTION


### BEGIN SOLUTION
def _check_readable(name: str, value) -> None:
    """Raise now for a value that ``load_checkpoint`` would refuse later."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):  # a lambda: which one depends on Python; a full disk: none
        raise TypeError(f"{name} holds a {type(value).__name__} that weights_only=True cannot read back") from None


def _random_state() -> dict:
    kind, key, *rest = np.random.get_state()
    kept = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, np.array(key).tolist(), *rest)}
    return kept | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


### END SOLUTION


def load_checkpoint(path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Restore a run to the moment at which ``save_checkpoint`` saved it. (Exercise)

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
    ### BEGIN SOLUTION
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # PyTorch's own message advises to load it all the same
        raise pickle.UnpicklingError("more than tensors and plain values in the file; nothing in it was run") from None
    model.load_state_dict(contents["model"])
    optimizer.load_state_dict(contents["optimizer"])
    kept = contents["random"]
    torch.set_rng_state(kept["torch"])
    random.setstate(kept["python"])
    np.random.set_state(kept["numpy"])
    if torch.cuda.is_available() and len(kept.get("cuda", [])) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(kept["cuda"])
    return contents["state"]
    ### END SOLUTION


def hours_per_epoch(items_per_second: float, dataset_size: int) -> float:
    """The book's yardstick: hours that it takes to see every item of a data set once. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        items_per_second: Images or tokens per second.
        dataset_size: Images or tokens in the data set.

    Returns:
        Hours per epoch.

    Raises:
        ValueError: ``items_per_second`` is not above 0 (NaN is not above 0 either); the message names it.
    """
    ### BEGIN SOLUTION
    if not items_per_second > 0:
        raise ValueError(f"items_per_second = {items_per_second} is not above 0")
    return dataset_size / items_per_second / 3600
    ### END SOLUTION
