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
    """The mean of minus the log probability of each target, in nats. (Exercise)

    Args:
        logits: Scores ``[..., V]``, any floating dtype, of any size: 1e4 is no exception.
        targets: The class that each should have been, ``[...]``, from 0 to V - 1, in any integer dtype.

    Returns:
        One number of the dtype of ``logits``; inside, float32 at least (float64 stays float64): float16 ends at 65,504.

    Convention: the classes stand last. ``torch.nn.functional.cross_entropy`` wants them second, ``[N, V, ...]``, and passes
        over targets of -100; here every target counts.
    """
    ### BEGIN SOLUTION
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = wide - wide.amax(-1, keepdim=True)
    chosen = shifted.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return (shifted.exp().sum(-1).log() - chosen).mean().to(logits.dtype)
    ### END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay. (Exercise)

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
            closure: Computes the loss and its gradients anew, with gradients enabled; called once, first.

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
    """AdamW's step of one parameter."""
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
    """Which parameters decay and which do not, as an optimizer takes them. (Exercise)

    Args:
        model: Any module; a weight that stands in two places (a tied head) is one parameter.
        weight_decay: Of the first group; the second has 0.0.

    Returns:
        Two dicts with "params" (a list, in the model's order) and "weight_decay": first the tensors of two or more
        dimensions, then the rest. Parameters that do not require a gradient are in neither. A list may be empty.

    Convention: embeddings and positions decay here, as in nanoGPT; others leave them out.
    """
    ### BEGIN SOLUTION
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    ### END SOLUTION


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of a step: up in a line, down in half a cosine. (Exercise)

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
    """Scale all gradients together, in place, so that their common norm is at most ``max_norm``. (Exercise)

    Args:
        parameters: Any iterable of parameters (a generator too), or one; those without a gradient are passed over.
        max_norm: The Euclidean norm that all gradients together, as one long vector, may have.

    Returns:
        Their norm before clipping, of no dimension; zero without a gradient. It fits where float16's squares do not.

    Source: Pascanu and others (arXiv:1211.5063), algorithm 1; the factor is PyTorch's, ``max_norm / (norm + 1e-6)``.
    Cost: no value is brought to the host: no ``item()``, no ``float()``, no ``if`` on a tensor.
    """
    ### BEGIN SOLUTION
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(gradient).to(gradients[0].device) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm
    ### END SOLUTION


class TokenBatches:
    """An endless iterator of inputs and targets over one long row of tokens. (Exercise)

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
        ### BEGIN SOLUTION
        self.tokens = tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asarray(tokens)
        self.batch, self.length, self.rank, self.world_size, self.seed = batch, length, rank, world_size, seed
        self.n_windows = (len(self.tokens) - 1) // length
        self.position = 0  # windows that all ranks together have had, over all epochs
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
        """This rank's next inputs and targets, int64 ``[B, T]`` each, contiguous, in memory shared with nothing."""
        ### BEGIN SOLUTION
        first = self.position + self.rank * self.batch
        starts = [self.length * _window(self, first + i) for i in range(self.batch)]
        rows = torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))
        self.position += self.world_size * self.batch
        return rows[:, :-1].clone(), rows[:, 1:].clone()
        ### END SOLUTION

    def state_dict(self) -> dict[str, int | None]:
        """Where the next batch begins, in plain numbers; the same on every rank."""
        ### BEGIN SOLUTION
        return {"position": self.position, "n_tokens": len(self.tokens), "length": self.length, "seed": self.seed}
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from there; ``batch`` and ``world_size`` may differ from those of the run that saved.

        Raises:
            ValueError: another number of tokens, another ``length`` or ``seed``; the message names both values.
        """
        ### BEGIN SOLUTION
        for name, ours in self.state_dict().items():
            if name != "position" and state[name] != ours:
                raise ValueError(f"{name} was {state[name]} when the state was saved and is {ours} now")
        self.position = int(state["position"] or 0)
        ### END SOLUTION


### BEGIN SOLUTION
def _window(batches: TokenBatches, position: int) -> int:
    """The window that stands at this place of all epochs in a row."""
    epoch, place = divmod(position, batches.n_windows)
    if batches.seed is not None and batches._order[0] != epoch:
        batches._order = (epoch, np.random.default_rng((batches.seed, epoch)).permutation(batches.n_windows))
    return place if batches.seed is None else int(batches._order[1][place])


### END SOLUTION


def accumulate_gradients(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """The gradient of a batch that does not fit, micro-batch by micro-batch. (Exercise)

    Args:
        model: ``model(inputs, targets)`` gives ``(logits, loss)``, the loss being the mean over all targets.
        micro_batches: Any iterable of ``(inputs, targets)``, with ``targets.numel()`` items each; one with none is skipped.

    Returns:
        The mean loss over all items, detached. Its gradients are added to ``.grad``, which the caller clears.

    Raises:
        ValueError: there is no micro-batch that holds an item; the message says so in words.

    Cost: one micro-batch's activations at a time. The micro-batches themselves may be kept in a list.
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
    """All that a run needs to go on as if nothing had happened. (Exercise)

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
    ### BEGIN SOLUTION
    for name, value in state.items():
        _check_readable(name, value)
    contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
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
    """Refuse now what a load would refuse on the day that it is needed."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # what pickle raises for a lambda depends on where it was written and on Python's version
        raise TypeError(f"{name} holds a {type(value).__name__} that weights_only=True cannot read back") from None


def _random_state() -> dict:
    kind, key, *rest = np.random.get_state()
    kept = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, np.array(key).tolist(), *rest)}
    return kept | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


### END SOLUTION


def load_checkpoint(path: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Put a run back where ``save_checkpoint`` saw it. (Exercise)

    Args:
        path: A file, or a file that is open for reading bytes.
        model: Takes the weights, in place, on whatever device it is; ``optimizer`` its state and its groups' settings.

    Returns:
        ``step`` and the extra state, by name; tensors on the CPU. The random numbers go on where they were.

    Raises:
        pickle.UnpicklingError: the file holds more than tensors and plain values; nothing in it is run.
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
    """The book's yardstick: how long it takes to see everything once. (Exercise)

    Args:
        items_per_second: Images, or tokens.
        dataset_size: The same.

    Returns:
        Hours.

    Raises:
        ValueError: ``items_per_second`` is not above 0, as nan is not; the message names it.
    """
    ### BEGIN SOLUTION
    if not items_per_second > 0:
        raise ValueError(f"items_per_second = {items_per_second} is not above 0")
    return dataset_size / items_per_second / 3600
    ### END SOLUTION
