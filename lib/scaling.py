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
from lib.llama import inference_memory_gb
from lib.tensor_parallel import pipeline_bubble
from lib.training import hours_per_epoch


def training_memory_bytes(config: FFNConfig, tokens: float) -> dict[str, float]:
    """What one device would hold to train a model of feed-forward blocks. (Exercise 16.1)

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
    raise NotImplementedError("Exercise 16.1: write training_memory_bytes")


def fsdp_memory_bytes(config: FFNConfig, tokens: float, n_devices: int) -> float:
    """What each of R devices holds, if states and every second layer's activations are sharded. (Exercise 16.2)

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
    raise NotImplementedError("Exercise 16.2: write fsdp_memory_bytes")


def min_fsdp_devices(config: FFNConfig, tokens: float, device_bytes: float) -> int:
    """The least number of devices for which ``fsdp_memory_bytes`` fits. (Exercise 16.3)

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
    raise NotImplementedError("Exercise 16.3: write min_fsdp_devices")


def compute_bound_batch(
    config: FFNConfig, x: int, y: int, peak_flops: float, bandwidth: float, m_x: int = 2, m_y: int = 1
) -> int:
    """The smallest batch that hides the forward pass's communication behind its arithmetic. (Exercise 16.4)

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
    raise NotImplementedError("Exercise 16.4: write compute_bound_batch")


def choose_gpu(n_parameters: float, mode: str, bits: int) -> Choice:
    """The cheapest card on which a model fits. (Exercise 16.5)

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
    raise NotImplementedError("Exercise 16.5: write choose_gpu")


def epoch_cost(items_per_second: float, dataset_size: int, dollars_per_hour: float) -> float:
    """What it costs to see everything once. (Exercise 16.6)

    Args:
        items_per_second, dataset_size: Images, or tokens; of all devices together.
        dollars_per_hour: Of all devices together.

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
    """One round of DiLoCo: every rank trains alone for some steps, then all agree on a step. (Exercise 16.7)

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
    raise NotImplementedError("Exercise 16.7: write local_sgd_step")


def layout_costs(
    config: FFNConfig, layout: Layout, bandwidths: Bandwidths, tokens: float, peak_flops: float
) -> dict[str, float]:
    """Predicted seconds of one training step, and bytes of a device, of one way to lay a model out. (Exercise 16.8)

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
    raise NotImplementedError("Exercise 16.9: write plan")
