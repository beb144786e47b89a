"""Scaling: what a training run needs in memory, time and money, before it is started, and how to start it well."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from lib.given.models.scaling import CARDS, Bandwidths, Choice, Layout, Plan
from lib.given.models.scaling import XXL as XXL
from lib.given.models.scaling import FFNConfig as FFNConfig
from solutions.llama import inference_memory_gb
from solutions.tensor_parallel import pipeline_bubble
from solutions.training import hours_per_epoch


def training_memory_bytes(config: FFNConfig, tokens: float) -> dict[str, float]:
    """What one device would hold to train a model of feed-forward blocks. (Exercise)

    Args:
        config: Blocks L of two matrices, C x F and F x C; no attention, no embedding, no biases.
        tokens: How many are in the batch.

    Returns:
        Bytes under ``"weights"``, ``"gradients"``, ``"optimizer"`` (AdamW's two moments), all float32, and ``"activations"``,
        bfloat16: what backward needs, which is the input of each matrix, so C + F numbers a token and block.

    Source: Stanford CS336, assignment 2 (2025), "communication accounting", part a.
    Convention: nothing is recomputed, and the activation function keeps nothing of its own. That is so with none (the
        assignment), and with ReLU, whose output shows its sign; GELU would keep its input too, F more.
    """
    ### BEGIN SOLUTION
    weights = 4 * config.n_parameters
    activations = 2 * config.n_layers * (config.dim + config.hidden_dim) * tokens
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": activations}
    ### END SOLUTION


def fsdp_memory_bytes(config: FFNConfig, tokens: float, n_devices: int) -> float:
    """What each of R devices holds, if states and every second layer's activations are sharded. (Exercise)

    Args:
        config, tokens: As for ``training_memory_bytes``.
        n_devices: Devices R.

    Returns:
        Bytes: 1/R of weights, gradients, optimizer and one half of the activations; the other half stays whole. What is
        gathered for a moment is not counted.

    Raises:
        ValueError: ``n_devices`` is below 1; the message names it.

    Source: Stanford CS336, assignment 2 (2025), "communication accounting", part b.
    """
    ### BEGIN SOLUTION
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}: there is at least one device")
    memory = training_memory_bytes(config, tokens)
    half = memory["activations"] / 2
    return (memory["weights"] + memory["gradients"] + memory["optimizer"] + half) / n_devices + half
    ### END SOLUTION


def min_fsdp_devices(config: FFNConfig, tokens: float, device_bytes: float) -> int:
    """The least number of devices for which ``fsdp_memory_bytes`` fits. (Exercise)

    Args:
        config, tokens: As before.
        device_bytes: Memory of a device; exactly as much still fits.

    Returns:
        R, at least 1: ``fsdp_memory_bytes(config, tokens, R) <= device_bytes``, and for R - 1 devices it is more.

    Raises:
        ValueError: no number is enough, because the activations that stay whole fill the device; the message names
            ``device_bytes`` and their bytes.

    Convention: the two comparisons decide, as Python computes them. A rounded quotient can be a hair above or below a whole
        number that divides exactly, and ``math.ceil`` of it is then one too many or one too few.
    """
    ### BEGIN SOLUTION
    whole = training_memory_bytes(config, tokens)["activations"] / 2
    if whole >= device_bytes:
        raise ValueError(
            f"device_bytes = {device_bytes:g} hold no more than the {whole:g} of activations that stay whole"
        )
    too_few, enough = 0, 1
    while fsdp_memory_bytes(config, tokens, enough) > device_bytes:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:  # halve what lies between
        middle = (too_few + enough) // 2
        fits = fsdp_memory_bytes(config, tokens, middle) <= device_bytes
        too_few, enough = (too_few, middle) if fits else (middle, enough)
    return enough
    ### END SOLUTION


def compute_bound_batch(
    config: FFNConfig, x: int, y: int, peak_flops: float, bandwidth: float, m_x: int = 2, m_y: int = 1
) -> int:
    """The smallest batch that hides the forward pass's communication behind its arithmetic. (Exercise)

    Args:
        config: Only its F matters.
        x, y: Devices along the sharded axis, over which weights are gathered, and along the tensor axis, over which
            activations are.
        peak_flops, bandwidth: Operations a second of a device; bytes a second that it sends along one axis of the mesh.
        m_x, m_y: How many axes of the mesh each of the two has.

    Returns:
        Tokens per device (the batch B over X * Y), rounded up to a whole number: times X * Y it is the batch.

    Raises:
        ValueError: ``x`` or ``y`` is below 1, or the activations take longer than the products at any batch, because
            ``y`` is too large for F (as long still hides); the message names the value, and the largest ``y`` for the latter.

    Source: Austin and others, How to Scale Your Model (2025), "Mixed FSDP and tensor parallelism"; CS336, assignment 2.
    Convention: the two axes send at the same time, so each must hide by itself; (X - 1)/X counts as 1, but an axis of one
        device sends nothing. The book's first edition added the two times.
    """
    ### BEGIN SOLUTION
    if min(x, y) < 1:
        raise ValueError(f"x = {x}, y = {y}: an axis has at least one device")
    if y > 1 and y * peak_flops > m_y * config.hidden_dim * bandwidth:  # whole numbers stay exact: equal still hides
        largest = math.floor(m_y * config.hidden_dim * bandwidth / peak_flops)
        raise ValueError(f"y = {y}: no batch hides the activations of F = {config.hidden_dim}; y is at most {largest}")
    return math.ceil(peak_flops / (y * bandwidth * m_x)) if x > 1 else 1
    ### END SOLUTION


def choose_gpu(n_parameters: float, mode: str, bits: int) -> Choice:
    """The cheapest card on which a model fits. (Exercise)

    Args:
        n_parameters: Weights.
        mode: "inference", which keeps the weights, or "training", which keeps as many gradients and twice as many moments.
        bits: Of each of these values: PyTorch's AdamW makes its moments in the dtype of the weights.

    Returns:
        ``Choice(name, dollars_per_hour)`` of the cheapest of ``CARDS`` whose ``memory_gb`` is no less than needed: for
        inference chapter 4's ``inference_memory_gb(n_parameters, bits)`` with its fifth on top, for training four times it.

    Raises:
        ValueError: ``mode`` is neither of the two, or no card is large enough; the message names the mode, or the GB that
            are needed (one decimal) and the largest card.

    Source: the rule of thumb is M. Mboya's, Scaling ViTs across Training Compute (2025).
    """
    ### BEGIN SOLUTION
    copies = {"inference": 1, "training": 4}
    if mode not in copies:
        raise ValueError(f"mode = {mode!r} is none of inference, training")
    needed = copies[mode] * inference_memory_gb(n_parameters, bits)
    fitting = [card for card in CARDS if card.memory_gb >= needed]
    if not fitting:
        largest = max(CARDS, key=lambda card: card.memory_gb)
        raise ValueError(f"{needed:.1f} GB fit on no card: the largest is {largest.name} with {largest.memory_gb} GB")
    cheapest = min(fitting, key=lambda card: card.dollars_per_hour)
    return Choice(cheapest.name, cheapest.dollars_per_hour)
    ### END SOLUTION


def epoch_cost(items_per_second: float, dataset_size: int, dollars_per_hour: float) -> float:
    """What it costs to see everything once. (Exercise)

    Args:
        items_per_second, dataset_size: Images, or tokens; of all devices together.
        dollars_per_hour: Of all devices together.

    Returns:
        Dollars.

    Raises:
        ValueError: ``items_per_second`` is not above 0; the message names it.
    """
    ### BEGIN SOLUTION
    return hours_per_epoch(items_per_second, dataset_size) * dollars_per_hour
    ### END SOLUTION


def local_sgd_step(
    model: nn.Module,
    outer_state: dict[str, Tensor],
    inner_optimizer: torch.optim.Optimizer,
    batches: Iterable[Sequence[Tensor]],
    outer_lr: float,
    outer_momentum: float,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, ""]:
    """One round of DiLoCo: every rank trains alone for some steps, then all agree on a step. (Exercise)

    Args:
        model: Alike on all ranks at first. ``model(*batch)`` gives ``(logits, loss)`` as in chapter 7, or the loss.
        outer_state: Empty before the first round. Afterwards ``"parameters"`` and ``"momentum"``, each one flat float32 vector
            of the trained parameters in the model's order (float64, if one of them is); changed in place by later rounds.
        inner_optimizer: Over this rank's parameters; keeps its state from round to round, and to itself.
        batches: This rank's; one inner step each. There may be none, and ranks may have different numbers.
        outer_lr, outer_momentum: Of the outer step, which is SGD with Nesterov momentum.
        group: The ranks, all by default; without a process group this process alone.

    Returns:
        Mean loss of this rank's inner steps, detached (nan without a batch). The model has the new global parameters.

    A round begins at ``outer_state["parameters"]``. The outer gradient is old minus new, averaged over the ranks.
    Cost: one all-reduce of one flat vector, whatever the number of inner steps. Buffers stay each rank's own.
    Source: Douillard and others (arXiv:2311.08105), algorithm 1.
    Convention: momentum as ``torch.optim.SGD(nesterov=True)`` keeps it: v = mu v + g, then a step of g + mu v.
    """
    ### BEGIN SOLUTION
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not outer_state:
        start = _flat(parameters)
        outer_state.update(parameters=start, momentum=torch.zeros_like(start))
    old, momentum = outer_state["parameters"], outer_state["momentum"]
    _write(old, parameters)
    losses = [_inner_step(model, inner_optimizer, batch) for batch in batches]
    gradient = old - _flat(parameters)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    momentum.mul_(outer_momentum).add_(gradient)
    old.sub_(outer_lr * (gradient + outer_momentum * momentum))
    _write(old, parameters)
    return torch.stack(losses).mean() if losses else torch.tensor(math.nan)
    ### END SOLUTION


### BEGIN SOLUTION
def _flat(parameters: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """All values in one new vector, float32 at least."""
    rows = [p.detach().reshape(-1) for p in parameters]
    return torch.cat([row.to(torch.promote_types(row.dtype, torch.float32)) for row in rows])


@torch.no_grad()
def _write(values: Float[Tensor, " n"], parameters: Sequence[Tensor]) -> None:
    for p, row in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        p.copy_(row.view(p.shape))


def _inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> Tensor:
    optimizer.zero_grad()
    out = model(*batch)
    loss = out[1] if isinstance(out, tuple) else out
    loss.backward()
    optimizer.step()
    return loss.detach()


### END SOLUTION


def layout_costs(
    config: FFNConfig, layout: Layout, bandwidths: Bandwidths, tokens: float, peak_flops: float
) -> dict[str, float]:
    """Predicted seconds of one training step, and bytes of a device, of one way to lay a model out. (Exercise)

    Args:
        config: Widths C and F, blocks L.
        layout: Degrees ``data`` D, ``sharded`` S, ``tensor`` T, ``pipeline`` P; T divides F, and P divides L.
        bandwidths: ``layout.bandwidth(axis, bandwidths)``, given, is the W of an axis.
        tokens: Of the whole batch B; each rank of a stage has B/(D S) of them.
        peak_flops: Operations a second of one device, as fast as it really computes.

    Returns:
        Seconds under ``"compute"`` (forward and backward, longer by the bubble of 4 P micro-batches), ``"sharded"``,
        ``"data"``, ``"tensor"``, ``"pipeline"`` (0 for an axis of one), and ``"step"``: tensor, for which the products wait,
        plus the longest of the others, which go on at the same time. Bytes under ``"memory"``.

    All that is sent is bfloat16, around rings. Sharded weights are gathered twice and their gradients scattered once a step;
    for that two blocks' weights are whole at a time (one, if the stage has one block; none beside the states, if S = 1).
    Copies all-reduce their shards. A block all-reduces its output forward and its input's gradient backward. A stage sends its
    output forward and its input's gradient backward. No activation is sharded by S.
    Convention: chapter 13's bubble is a share of the whole time, so compute is the useful time over 1 - bubble.
    """
    ### BEGIN SOLUTION
    d, s, t, p = layout.data, layout.sharded, layout.tensor, layout.pipeline
    local = FFNConfig(config.dim, config.hidden_dim // t, config.n_layers // p)
    local_tokens = tokens / (d * s)
    weights, activations = 2 * local.n_parameters, 2 * config.dim * local_tokens  # bytes of bfloat16
    sent = {
        "sharded": 3 * weights * (s - 1) / s,
        "data": 2 * weights / s * (d - 1) / d,
        "tensor": 2 * local.n_layers * 2 * activations * (t - 1) / t,
        "pipeline": 2 * activations if p > 1 else 0,
    }
    costs = {axis: n_bytes / layout.bandwidth(axis, bandwidths) for axis, n_bytes in sent.items()}
    flops = 6 * config.n_parameters * tokens / layout.n_devices
    costs["compute"] = flops / peak_flops / (1 - pipeline_bubble(p, 4 * p))
    costs["step"] = max(value for name, value in costs.items() if name != "tensor") + costs["tensor"]
    memory = training_memory_bytes(local, local_tokens)
    states = sum(memory.values()) - memory["activations"]
    gathered = weights / local.n_layers * min(2, local.n_layers) if s > 1 else 0
    return costs | {"memory": states / s + memory["activations"] + gathered}
    ### END SOLUTION


def plan(
    config: FFNConfig,
    n_devices: int,
    memory_bytes: float,
    bandwidths: Bandwidths | Mapping[str, float] | Sequence[float] | float,
    *,
    tokens_per_device: float = 1024,
    peak_flops: float = 989e12,
) -> Plan:
    """The fastest layout that fits, found by trying every one. (Exercise)

    Args:
        config, n_devices: The model; how many devices, all of which work.
        memory_bytes: Of a device; exactly as much still fits.
        bandwidths: ``Bandwidths(within_host, across_hosts, devices_per_host=8)`` in bytes a second, its fields as a mapping or
            in their order, or one number for every link: ``Bandwidths.of`` (given) takes them all.
        tokens_per_device: Times ``n_devices`` it is the batch, the same for every layout.
        peak_flops: Of a device.

    Returns:
        ``Plan``: the four degrees, whose product is ``n_devices``, ``step_s``, ``memory_bytes``, ``costs`` (all that
        ``layout_costs`` gave) and ``reasons``, at least one sentence. Of layouts with T dividing F, P dividing L and enough
        memory it has the least step; of several such the least memory, then the smallest pipeline, tensor and sharded.

    Raises:
        ValueError: ``n_devices`` is below 1 (the message names it), or nothing fits (it names ``memory_bytes`` and the least
            that any layout needs).
    """
    ### BEGIN SOLUTION
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}: there is at least one device")
    links, tokens = Bandwidths.of(bandwidths), tokens_per_device * n_devices
    tried = [
        (layout_costs(config, layout, links, tokens, peak_flops), layout) for layout in _layouts(config, n_devices)
    ]
    tried.sort(key=lambda it: (it[0]["step"], it[0]["memory"], it[1].pipeline, it[1].tensor, it[1].sharded))
    fitting = [(costs, layout) for costs, layout in tried if costs["memory"] <= memory_bytes]
    if not fitting:
        least = min((costs["memory"] for costs, _ in tried), default=math.inf)
        raise ValueError(f"nothing fits: memory_bytes = {memory_bytes:g}, and the least of any layout is {least:g}")
    costs, best = fitting[0]
    return Plan(
        **vars(best),
        step_s=costs["step"],
        memory_bytes=costs["memory"],
        costs=costs,
        reasons=_reasons(tried, fitting),
    )
    ### END SOLUTION


### BEGIN SOLUTION
def _layouts(config: FFNConfig, n_devices: int) -> list[Layout]:
    """Every way to write the number as a product of four, with whole stages and whole stretches of F."""
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    found = []
    for p, t, s in itertools.product(divisors, repeat=3):
        if n_devices % (p * t * s) == 0 and config.n_layers % p == 0 and config.hidden_dim % t == 0:
            found.append(Layout(data=n_devices // (p * t * s), sharded=s, tensor=t, pipeline=p))
    return found


def _reasons(
    tried: list[tuple[dict[str, Any], Layout]], fitting: list[tuple[dict[str, Any], Layout]]
) -> tuple[str, ...]:
    costs, best = fitting[0]
    hidden = ("compute", "sharded", "data", "pipeline")
    longest = max(hidden, key=lambda name: costs[name])
    reasons = [f"{len(tried)} layouts are possible, and {len(fitting)} of them fit"]
    reasons.append(f"{best}: the longest part is {longest}, {costs[longest]:.3g} s of {costs['step']:.3g} s")
    if costs["tensor"]:
        reasons.append(f"the products wait {costs['tensor']:.3g} s for the tensor axis")
    if tried[0][1] != best:
        faster, layout = tried[0]
        reasons.append(f"{layout} would take {faster['step']:.3g} s, and needs {faster['memory']:.3g} bytes")
    if len(fitting) > 1:
        reasons.append(f"the next that fits is {fitting[1][1]}, with {fitting[1][0]['step']:.3g} s")
    return tuple(reasons)


### END SOLUTION
