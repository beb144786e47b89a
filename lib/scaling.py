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
from lib.llama import inference_memory_gb
from lib.tensor_parallel import pipeline_bubble
from lib.training import hours_per_epoch


def training_memory_bytes(config: FFNConfig, tokens: float) -> dict[str, float]:
    """Bytes that one device needs to train a model of feed-forward blocks. (Exercise 16.1)

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
    raise NotImplementedError("Exercise 16.1: write training_memory_bytes")


def fsdp_memory_bytes(config: FFNConfig, tokens: float, n_devices: int) -> float:
    """Bytes on each of R devices when the states and every second layer's activations are sharded. (Exercise 16.2)

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
    raise NotImplementedError("Exercise 16.2: write fsdp_memory_bytes")


def min_fsdp_devices(config: FFNConfig, tokens: float, device_bytes: float) -> int:
    """The smallest number of devices on which the model fits, by ``fsdp_memory_bytes``. (Exercise 16.3)

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
    raise NotImplementedError("Exercise 16.3: write min_fsdp_devices")


def compute_bound_batch(
    config: FFNConfig, x: int, y: int, peak_flops: float, bandwidth: float, m_x: int = 2, m_y: int = 1
) -> int:
    """The smallest batch whose arithmetic can hide the forward pass's communication. (Exercise 16.4)

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
    raise NotImplementedError("Exercise 16.4: write compute_bound_batch")


def choose_gpu(n_parameters: float, mode: str, bits: int) -> Choice:
    """The cheapest GPU on which a model fits. (Exercise 16.5)

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
    raise NotImplementedError("Exercise 16.5: write choose_gpu")


def epoch_cost(items_per_second: float, dataset_size: int, dollars_per_hour: float) -> float:
    """The price of one epoch. (Exercise 16.6)

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
    raise NotImplementedError("Exercise 16.6: write epoch_cost")


def local_sgd_step(
    model: nn.Module,
    outer_state: dict[str, Tensor],
    inner_optimizer: torch.optim.Optimizer,
    batches: Iterable[Sequence[Tensor]],
    outer_lr: float,
    outer_momentum: float,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, ""]:
    """One round of DiLoCo: every rank trains alone for some steps, then all take one common step. (Exercise 16.7)

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
    raise NotImplementedError("Exercise 16.7: write local_sgd_step")


def layout_costs(
    config: FFNConfig, layout: Layout, bandwidths: Bandwidths, tokens: float, peak_flops: float
) -> dict[str, float]:
    """Predicted seconds of one training step, and bytes on each device, for one way to lay a model out. (Exercise 16.8)

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
    raise NotImplementedError("Exercise 16.8: write layout_costs")


def plan(
    config: FFNConfig,
    n_devices: int,
    memory_bytes: float,
    bandwidths: Bandwidths | Mapping[str, float] | Sequence[float] | float,
    *,
    tokens_per_device: float = 1024,
    peak_flops: float = 989e12,
) -> Plan:
    """The fastest layout that fits, found by trying every one. (Exercise 16.9)

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
    raise NotImplementedError("Exercise 16.9: write plan")
