"""Speed on one device: measure it, count what it should cost, and look where it goes."""

import json
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import ViTConfig


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls.

    Attributes:
        mean_s: Their mean.
        std_s: Their sample standard deviation, which divides by n - 1; 0 for a single call.
        median_s: Their median, which one slow call does not move.
        times_s: All of them, in the order of the calls.
    """

    mean_s: float
    std_s: float
    median_s: float
    times_s: tuple[float, ...]


def benchmark(
    fn: Callable[[], Any], warmup: int = 5, repeats: int = 10, device: torch.device | str | None = None
) -> Timing:
    """Time a call, when it has warmed up and the accelerator has finished. (Exercise 8.1)

    Args:
        fn: What is timed, called without arguments ``warmup + repeats`` times; what it returns is dropped.
        warmup: Calls before the clock is read, 0 or more.
        repeats: Calls that are timed, each by itself, 1 or more.
        device: Where ``fn`` works: a ``torch.device`` or its name. None means the accelerator, if there is one, else the
            CPU.

    Returns:
        A ``Timing`` of the ``repeats`` calls.

    Raises:
        ValueError: ``warmup`` is negative or ``repeats`` is less than 1; the message names the argument and its value.

    Convention: the clock is ``time.perf_counter()``. On an accelerator ``torch.cuda.synchronize(device)`` (on one that is
        not CUDA ``torch.accelerator.synchronize(device)``) comes before each reading of it, for a reading at the start
        too; on the CPU there is nothing to wait for, and neither is called.
    """
    raise NotImplementedError("Exercise 8.1: write benchmark")


def matmul_flops(m: int, k: int, n: int) -> int:
    """Floating-point operations of a matrix product. (Exercise 8.2)

    Args:
        m: Rows of the left factor ``[m, k]``.
        k: Columns of the left, rows of the right.
        n: Columns of the right factor ``[k, n]``.

    Returns:
        Multiplications and additions, as an ``int``.

    Convention: a fused multiply-add is two operations, and each of the ``m * n`` results takes k of them: adding to a
        zero counts. So do PyTorch, the makers of processors and the papers; "MACs" are half as many.
    """
    raise NotImplementedError("Exercise 8.2: write matmul_flops")


def roofline_seconds(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    """The least time that a processor needs: for the arithmetic or for the memory. (Exercise 8.3)

    Args:
        flops: Operations to be done.
        bytes_moved: Bytes to be read from memory and written to it.
        peak_flops: Operations a second that the processor can do.
        bandwidth: Bytes a second that its memory can move.

    Returns:
        Seconds, if the two overlap perfectly.

    Source: Williams, Waterman and Patterson, "Roofline" (2009), figure 1.
    """
    raise NotImplementedError("Exercise 8.3: write roofline_seconds")


def attention_flops(config: GPT2Config | ViTConfig, length: int, causal: bool) -> int:
    """FLOPs of scores and of weighted values, for one sequence in all layers, forward. (Exercise 8.4)

    Args:
        config: Gives ``dim`` C and ``n_layers`` L.
        length: Positions T of the sequence.
        causal: Whether only the pairs that a causal mask allows count, a query with itself included.

    Returns:
        FLOPs of the two products of each head, Q with K and weights with V, as an ``int``. The projections before and
        after them, the softmax, the scaling and the mask are not counted.

    Convention: without ``causal``, what PyTorch's ``FlopCounterMode`` counts for the naive program, which computes every
        pair and then masks half of them away. With ``causal``, exactly the allowed pairs: papers often write one half,
        which is what is left of (T + 1) / 2T for long sequences.
    """
    raise NotImplementedError("Exercise 8.4: write attention_flops")


def training_flops_per_token(config: GPT2Config) -> int:
    """FLOPs of GPT-2's training step, forward and backward, for each token. (Exercise 8.5)

    Args:
        config: A ``GPT2Config``; sequences are ``context_len`` long.

    Returns:
        FLOPs of all matrix products, as an ``int``: the blocks' linear maps, attention (every pair, not only the causal ones)
        and the head, whose rows of padding are computed too. Backward costs each product twice more, once for either factor.

    Source: Kaplan and others (arXiv:2001.08361), section 2.1; PaLM (arXiv:2204.02311), appendix B.
    Convention: exactly what ``FlopCounterMode`` counts for chapter 6's model, divided by the tokens. Looking up an
        embedding is no product; recomputation, as in fused attention's backward, does not count; the optimizer neither.
    """
    raise NotImplementedError("Exercise 8.5: write training_flops_per_token")


def vit_training_flops_per_image(config: ViTConfig) -> int:
    """FLOPs of a vision transformer's training step, forward and backward, for each image. (Exercise 8.6)

    Args:
        config: A ``ViTConfig``.

    Returns:
        FLOPs of all products (an ``int``): patch convolution over N patches, blocks over N + 1 tokens, head on one vector.

    Convention: exactly what ``FlopCounterMode`` counts for chapter 5's model on images that need no gradient.
    """
    raise NotImplementedError("Exercise 8.6: write vit_training_flops_per_image")


def mfu(items_per_second: float, flops_per_item: float, peak_flops: float) -> float:
    """The share of a processor's peak that a model's own arithmetic uses. (Exercise 8.7)

    Args:
        items_per_second: Tokens or images trained on.
        flops_per_item: What the model needs for each, forward and backward; work done twice counts once.
        peak_flops: Operations a second that the processor can do in the dtype of the products.

    Returns:
        Model FLOPs utilisation, from 0 to 1: 0.4 is 40 %.

    Source: PaLM (arXiv:2204.02311), section 4.1.
    """
    raise NotImplementedError("Exercise 8.7: write mfu")


def saved_activation_bytes(fn: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass of a call. (Exercise 8.8)

    Args:
        fn: Called once, without arguments; what it returns is dropped.

    Returns:
        Bytes of all storages of which a tensor is saved while ``fn`` runs, those that end before ``fn`` does with them. A
        storage counts whole and once, however many views or saves of it there are.

    Convention: counted is what ``torch.autograd.graph.saved_tensors_hooks`` sees: inputs and parameters that a backward
        formula needs as well as intermediate results. Two storages are the same if their ``_cdata`` is the same while
        both live; a ``data_ptr`` is 0 for every tensor on the meta device, where ``fn`` may work too. Nothing stays alive
        after the call that would not without it: what ``fn`` drops is freed, without waiting for the garbage collector.
    """
    raise NotImplementedError("Exercise 8.8: write saved_activation_bytes")


def attention_activation_bytes(batch: int, heads: int, length: int, head_dim: int, bytes_per_value: int) -> int:
    """Bytes that naive attention keeps for its backward pass. (Exercise 8.9)

    Args:
        batch: Sequences B.
        heads: Heads H of each.
        length: Positions T, of queries and of keys.
        head_dim: Width D of a head.
        bytes_per_value: 4 for float32, 2 for bfloat16.

    Returns:
        Bytes of what ``torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v`` saves for ``[B, H, T, D]``
        inputs of which all three need a gradient.
    """
    raise NotImplementedError("Exercise 8.9: write attention_activation_bytes")


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step went.

    Attributes:
        range_s: Seconds in each range that the step opened, by name; a range opened twice has the sum of both.
        operator_s: Seconds in each of PyTorch's operators, as "aten::mm", without those that it calls.
    """

    range_s: dict[str, float]
    operator_s: dict[str, float]


def profile_step(step_fn: Callable[[], Any], path: str | os.PathLike) -> StepProfile:
    """Run one step under the profiler, write its trace, and sum its times up. (Exercise 8.10)

    Args:
        step_fn: Called once, without arguments; it names its parts by ``torch.profiler.record_function("forward")``.
        path: Where the Chrome trace goes, for https://ui.perfetto.dev; the folder exists.

    Returns:
        A ``StepProfile``. On the CPU a range is counted from its opening to its closing and an operator by its own time. If
        the step ran on a CUDA device, which is so if any operator took time there (``self_device_time_total``), both are
        the device's: an operator has its own, and a range that of the operators that began while it was open, on
        whatever thread (autograd has one of its own). The profiler's device row of a range is not added to that.

    Convention: PyTorch's optimizers open ranges of their own, named "Optimizer.step#AdamW.step" and the like: they are in
        the trace, but not in ``range_s``, because the step did not open them.
    """
    raise NotImplementedError("Exercise 8.10: write profile_step")


@contextmanager
def memory_timeline(path: str | os.PathLike) -> Iterator[list[dict[str, Any]]]:
    """Follow the memory that tensors take while a block of code runs. (Exercise 8.11)

    ``with memory_timeline("memory.json") as events: step()``. The file is there when the block has been left, also by an
    exception: out of memory is when one needs it.

    Args:
        path: The file that is written; the folder exists.

    Yields:
        A list that grows while the block runs, one dict for each storage made or freed: ``time_s`` since the block began,
        ``operator`` (what made it, in any form that holds its name, as "aten.mm.default", or "free"), ``change_bytes`` (negative where freed) and ``total_bytes``,
        alive after it. Where there is a CUDA device it stays empty: what happened is in the file.

    Without a CUDA device, ``path`` holds JSON: ``{"events": the list, "peak_bytes": the greatest total}``. Counted are
    storages that operators make inside the block, in forward and backward, each once however many views it has; weights
    that were there before are not, nor storages of 0 bytes. It is an estimate: what an operator needs inside itself and what the allocator keeps
    in reserve are not seen. A storage that outlives the block is not followed further.

    With a CUDA device, the allocator itself knows: ``torch.cuda.memory._record_memory_history(max_entries=100_000)`` at
    the start; ``torch.cuda.memory._dump_snapshot(str(path))`` and ``_record_memory_history(enabled=None)`` at the end.
    The file is for https://pytorch.org/memory_viz.
    """
    raise NotImplementedError("Exercise 8.11: write memory_timeline")
