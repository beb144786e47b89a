"""Scaling: what a training run needs in memory, time and money, computed before anything is rented."""

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
    """Bytes that one device needs to train a model of feed-forward blocks. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        config: L blocks of two matrices each, C x F and F x C; no attention, no embedding, no biases.
        tokens: Tokens in the batch.

    Returns:
        Bytes under four keys.
        ``"weights"``, ``"gradients"`` and ``"optimizer"`` (AdamW's two moments) are float32.
        ``"activations"`` are bfloat16: the input of each matrix, which backward needs, so C + F numbers a token and
        block.

    Source: Stanford CS336, assignment 2 (spring 2025), problem "communication_accounting", part a.
    Convention: nothing is recomputed, and the activation function saves nothing of its own.
        That holds without one (the assignment) and for ReLU, whose output tells backward all it needs; GELU would save
        its input too, F numbers more.
    """
    ### BEGIN SOLUTION
    weights = 4 * config.n_parameters
    activations = 2 * config.n_layers * (config.dim + config.hidden_dim) * tokens
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": activations}
    ### END SOLUTION


def fsdp_memory_bytes(config: FFNConfig, tokens: float, n_devices: int) -> float:
    """Bytes on each of R devices when the states and every second layer's activations are sharded. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config, tokens: As for ``training_memory_bytes``.
        n_devices: Devices R.

    Returns:
        Bytes: 1/R of the weights, the gradients, the optimizer state and one half of the activations, plus the whole
        other half. The weights that are gathered for a moment are not counted.

    Raises:
        ValueError: ``n_devices`` is below 1; the message names it.

    Source: Stanford CS336, assignment 2 (spring 2025), problem "communication_accounting", part b.
    """
    ### BEGIN SOLUTION
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}: expected at least one device")
    memory = training_memory_bytes(config, tokens)
    half = memory["activations"] / 2
    return (memory["weights"] + memory["gradients"] + memory["optimizer"] + half) / n_devices + half
    ### END SOLUTION


def min_fsdp_devices(config: FFNConfig, tokens: float, device_bytes: float) -> int:
    """The smallest number of devices on which the model fits, by ``fsdp_memory_bytes``. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        config: As for ``training_memory_bytes``.
        tokens: As for ``training_memory_bytes``.
        device_bytes: Memory of one device, where an exact fit still fits.

    Returns:
        R, at least 1, with ``fsdp_memory_bytes(config, tokens, R) <= device_bytes``, while R - 1 devices need more.

    Raises:
        ValueError: no number is enough, because the activations that stay whole fill a device by themselves; the
            message names ``device_bytes`` and the bytes of these activations.

    Convention: the two comparisons decide, as Python computes them.
        A quotient is rounded, so it can land just above or below the whole number that it should be, and ``math.ceil``
        of it is then one too many or one too few.
    """
    ### BEGIN SOLUTION
    whole = training_memory_bytes(config, tokens)["activations"] / 2
    if whole >= device_bytes:
        raise ValueError(
            f"device_bytes = {device_bytes:g}: the activations that stay whole take {whole:g} bytes, "
            "so no number is enough"
        )
    too_few, enough = 0, 1
    while fsdp_memory_bytes(config, tokens, enough) > device_bytes:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:  # halve the interval between them
        middle = (too_few + enough) // 2
        fits = fsdp_memory_bytes(config, tokens, middle) <= device_bytes
        too_few, enough = (too_few, middle) if fits else (middle, enough)
    return enough
    ### END SOLUTION


def compute_bound_batch(
    config: FFNConfig, x: int, y: int, peak_flops: float, bandwidth: float, m_x: int = 2, m_y: int = 1
) -> int:
    """The smallest batch whose arithmetic can hide the forward pass's communication. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        config: Only its F matters.
        x: Devices along the sharded axis, where weights are gathered.
        y: Devices along the tensor axis, where activations are gathered.
        peak_flops: Operations a second of one device.
        bandwidth: Bytes a second that it sends along one physical axis.
        m_x: How many physical axes ``x`` has.
        m_y: How many physical axes ``y`` has.

    Returns:
        Tokens per device, rounded up to a whole number. The whole batch B is X * Y times as large.

    Raises:
        ValueError: ``x`` or ``y`` is below 1, and the message names it.
            Or ``y`` is so large for F that the activations take longer than the products at any batch (an equal time
            still hides); the message names ``y`` and the largest one that works.

    Source: Austin and others, How to Scale Your Model (2025), "Mixed FSDP and tensor parallelism"; Stanford CS336,
        assignment 2 (spring 2025), problem "communication_accounting", part c.
    Convention: the best case.
        The two axes send at the same time, each by itself behind the products, so the slowest of the three sets the
        time.
        (X - 1)/X counts as 1, but an axis of one device sends nothing, so with X = 1 one token is enough.
    """
    ### BEGIN SOLUTION
    if min(x, y) < 1:
        raise ValueError(f"x = {x}, y = {y}: expected at least one device along each axis")
    if (
        y > 1 and y * peak_flops > m_y * config.hidden_dim * bandwidth
    ):  # compared without a quotient: equal times still hide
        largest = math.floor(m_y * config.hidden_dim * bandwidth / peak_flops)
        raise ValueError(
            f"y = {y}: with F = {config.hidden_dim} no batch hides the activations; expected at most {largest}"
        )
    return math.ceil(peak_flops / (y * bandwidth * m_x)) if x > 1 else 1
    ### END SOLUTION


def choose_gpu(n_parameters: float, mode: str, bits: int) -> Choice:
    """The cheapest GPU on which a model fits. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        n_parameters: Number of weights.
        mode: "inference", which holds the weights only, or "training", which also holds a gradient and two moments for
            each.
        bits: Bits of each value (PyTorch's AdamW creates moments in the weights' dtype).

    Returns:
        ``Choice(name, dollars_per_hour)`` of the cheapest of ``CARDS`` with enough ``memory_gb``.
        Inference needs chapter 4's ``inference_memory_gb(n_parameters, bits)``, which adds a fifth; training needs four
        times as much.

    Raises:
        ValueError: ``mode`` is neither of the two, and the message names it.
            Or no GPU is large enough, and the message names the GB that are needed (one decimal) and the largest GPU.

    Source: the rule of thumb is M. Mboya's, Scaling ViTs across Training Compute (2025).
    """
    ### BEGIN SOLUTION
    copies = {"inference": 1, "training": 4}
    if mode not in copies:
        raise ValueError(f"mode = {mode!r}: expected inference or training")
    needed = copies[mode] * inference_memory_gb(n_parameters, bits)
    fitting = [card for card in CARDS if card.memory_gb >= needed]
    if not fitting:
        largest = max(CARDS, key=lambda card: card.memory_gb)
        raise ValueError(f"{needed:.1f} GB fit on no GPU: the largest is {largest.name} with {largest.memory_gb} GB")
    cheapest = min(fitting, key=lambda card: card.dollars_per_hour)
    return Choice(cheapest.name, cheapest.dollars_per_hour)
    ### END SOLUTION


def epoch_cost(items_per_second: float, dataset_size: int, dollars_per_hour: float) -> float:
    """The price of one epoch. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        items_per_second: Images or tokens of all devices together in a second.
        dataset_size: Images or tokens in the data set.
        dollars_per_hour: Price of all devices together.

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
    """One round of DiLoCo: every rank trains alone for some steps, then all take one common step. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        model: The same on all ranks at first.
            ``model(*batch)`` returns ``(logits, loss)`` as in chapter 7, or just the loss.
        outer_state: Empty at first; later rounds change it in place.
            Holds ``"parameters"`` and ``"momentum"``, each one flat float32 vector over the trainable parameters in the
            model's order (float64 if one of them is float64).
        inner_optimizer: This rank's optimizer. Its state stays on the rank and lives on from round to round.
        batches: This rank's batches, one inner step for each.
            There may be none, and ranks may have different numbers of them.
        outer_lr: Learning rate of the outer step, which is SGD with Nesterov momentum.
        outer_momentum: Its momentum.
        group: Ranks that take part; all by default. Without a process group this process works alone.

    Returns:
        Mean loss of this rank's inner steps, detached (nan without a batch). The model holds the new global parameters.

    A round begins at ``outer_state["parameters"]``. The outer gradient is old minus new, averaged over the ranks.
    Cost: one all-reduce of one flat vector, whatever the number of inner steps. Buffers are not synchronized.
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
    """All values in one new vector, in float32 or wider."""
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
    """Predicted seconds of one training step, and bytes on each device, for one way to lay a model out. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Args:
        config: Widths C and F, L blocks. T divides F, and P divides L.
        layout: Degrees ``data`` D, ``sharded`` S, ``tensor`` T and ``pipeline`` P.
        bandwidths: Speeds of the links; ``layout.bandwidth(axis, bandwidths)``, given, is the W of an axis.
        tokens: Tokens B of the whole batch; each rank of a stage has B' = B/(D S) of them.
        peak_flops: Operations a second of one device, as fast as it really computes.

    Returns:
        Seconds under ``"compute"`` (forward and backward, bubble included), ``"sharded"``, ``"data"``, ``"tensor"`` and
        ``"pipeline"``; an axis of one device takes 0.
        Seconds under ``"step"``: tensor, for which the products wait, plus the longest of the other four, which
        overlap.
        Bytes under ``"memory"``.

    Everything that travels is bfloat16 and goes around rings.
    Once a step, sharded weights are gathered twice and their gradients scattered once.
    Copies all-reduce the gradients of their shards.
    Each block all-reduces its output in forward and its input's gradient in backward; each stage sends these two to its
    neighbours.
    Memory is the states' shard, the activations, and the weights that are gathered: two blocks at a time (one if the
    stage has one block, none if S = 1).
    S shards no activations.
    With P > 1 the tokens come in 4 P micro-batches and the schedule is one-forward-one-backward, so the first stage
    keeps the activations of P micro-batches, a quarter; with P = 1, of all B'.
    Convention: chapter 13's bubble is a share of the whole time, so compute is the useful time over 1 - bubble.
    """
    ### BEGIN SOLUTION
    d, s, t, p = layout.data, layout.sharded, layout.tensor, layout.pipeline
    local = FFNConfig(config.dim, config.hidden_dim // t, config.n_layers // p)
    local_tokens = tokens / (d * s)
    micro_batches = 4 * p if p > 1 else 1
    weights, activations = 2 * local.n_parameters, 2 * config.dim * local_tokens  # bytes of bfloat16
    sent = {
        "sharded": 3 * weights * (s - 1) / s,
        "data": 2 * weights / s * (d - 1) / d,
        "tensor": 2 * local.n_layers * 2 * activations * (t - 1) / t,
        "pipeline": 2 * activations if p > 1 else 0,
    }
    costs = {axis: n_bytes / layout.bandwidth(axis, bandwidths) for axis, n_bytes in sent.items()}
    flops = 6 * config.n_parameters * tokens / layout.n_devices
    costs["compute"] = flops / peak_flops / (1 - pipeline_bubble(p, micro_batches))
    costs["step"] = max(value for name, value in costs.items() if name != "tensor") + costs["tensor"]
    memory = training_memory_bytes(local, local_tokens * p / micro_batches)  # 1F1B: P micro-batches in flight
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

    Size: 35 minutes, difficulty 4, core.

    Args:
        config: The model.
        n_devices: The number of devices; the layout uses all of them.
        memory_bytes: Memory of one device, in bytes; a need of exactly this much still fits.
        bandwidths: ``Bandwidths(within_host, across_hosts, devices_per_host=8)`` in bytes a second, its fields as a
            mapping or in their order, or one number for every link; ``Bandwidths.of`` (given) accepts all of
            these.
        tokens_per_device: Tokens for each device. The batch is this times ``n_devices``, the same for every layout.
        peak_flops: Operations a second of one device.

    Returns:
        ``Plan``: the four degrees, whose product is ``n_devices``, ``step_s``, ``memory_bytes``, ``costs`` (everything
        that ``layout_costs`` returned) and ``reasons``, at least one sentence.
        Of the layouts that fit, with T dividing F and P dividing L, it has the shortest step; of equal ones the least
        memory, then the smallest pipeline, tensor and sharded.
        If the fastest layout of all does not fit, one of the reasons says how many bytes or GB it needs.

    Raises:
        ValueError: ``n_devices`` is below 1, and the message names it. Or nothing fits, and the message names
            ``memory_bytes`` and the least that any layout needs.
    """
    ### BEGIN SOLUTION
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}: expected at least one device")
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
    """Every way to write ``n_devices`` as a product of four degrees, with T dividing F and P dividing L."""
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
    reasons = [f"of {len(tried)} possible layouts {len(fitting)} fit"]
    reasons.append(f"{best} takes {costs['step']:.3g} s a step; its longest part is {longest}, {costs[longest]:.3g} s")
    if costs["tensor"]:
        reasons.append(f"the products wait {costs['tensor']:.3g} s for the tensor axis")
    if tried[0][1] != best:
        faster, layout = tried[0]
        reasons.append(f"{layout} would take {faster['step']:.3g} s, but needs {faster['memory'] / 1e9:.3g} GB")
    if len(fitting) > 1:
        reasons.append(f"the runner-up is {fitting[1][1]}, with {fitting[1][0]['step']:.3g} s a step")
    return tuple(reasons)


### END SOLUTION
