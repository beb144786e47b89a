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
    """Seconds that repeated calls took.

    Attributes:
        mean_s: Mean of the times.
        std_s: Sample standard deviation, which divides by n - 1; 0 for a single call.
        median_s: Median, which one slow call does not move.
        times_s: All times, in the order of the calls.
    """

    mean_s: float
    std_s: float
    median_s: float
    times_s: tuple[float, ...]


def benchmark(
    fn: Callable[[], Any], warmup: int = 5, repeats: int = 10, device: torch.device | str | None = None
) -> Timing:
    """Time a function after a warm-up, waiting for the accelerator before each reading of the clock. (Exercise 8.1)

    Size: 30 minutes, difficulty 3, core.

    Args:
        fn: The function to time, called without arguments ``warmup + repeats`` times; its result is dropped.
        warmup: Calls that are not timed, 0 or more.
        repeats: Calls that are timed, each on its own, 1 or more.
        device: Where ``fn`` works: a ``torch.device`` or its name.
            None means the accelerator, if there is one, else the CPU.

    Returns:
        A ``Timing`` of the ``repeats`` calls.

    Raises:
        ValueError: ``warmup`` is negative or ``repeats`` is less than 1; the message names the argument and its value.

    Convention: the clock is ``time.perf_counter()``.
        Before every reading, also the first one of a call, wait: on CUDA with ``torch.cuda.synchronize(device)``, on
        another accelerator with ``torch.accelerator.synchronize(device)``.
        On the CPU there is nothing to wait for, so call neither.
    """
    raise NotImplementedError("Exercise 8.1: write benchmark")


def matmul_flops(m: int, k: int, n: int) -> int:
    """Floating-point operations of a matrix product. (Exercise 8.2)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        m: Rows of the left factor ``[m, k]``.
        k: Columns of the left, rows of the right.
        n: Columns of the right factor ``[k, n]``.

    Returns:
        Multiplications and additions, as an ``int``.

    Convention: a fused multiply-add is two operations, and each of the ``m * n`` results takes k of them, the first
        addition (to zero) included.
        PyTorch, makers of processors and most papers count the same way; "MACs" are half as many.
    """
    raise NotImplementedError("Exercise 8.2: write matmul_flops")


def roofline_seconds(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    """The least time that a processor needs, if arithmetic and memory traffic overlap perfectly. (Exercise 8.3)

    Size: 10 minutes, difficulty 1, core.

    Args:
        flops: Operations to do.
        bytes_moved: Bytes to read from memory and to write to it.
        peak_flops: Operations a second that the processor can do.
        bandwidth: Bytes a second that its memory can move.

    Returns:
        Seconds.

    Source: Williams, Waterman and Patterson, "Roofline" (2009), figure 1.
    """
    raise NotImplementedError("Exercise 8.3: write roofline_seconds")


def attention_flops(config: GPT2Config | ViTConfig, length: int, causal: bool) -> int:
    """FLOPs of attention's scores and weighted values in all layers, for the forward pass of one sequence. (Exercise 8.4)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Gives ``dim`` C and ``n_layers`` L.
        length: Positions T of the sequence.
        causal: Count only the pairs that a causal mask allows, a query with itself included.

    Returns:
        FLOPs of the two products of each head, Q with K and weights with V, as an ``int``.
        The projections before and after them, the softmax, the scaling and the mask do not count.

    Convention: without ``causal``, what PyTorch's ``FlopCounterMode`` counts for the naive program, which computes
        every pair and then masks half of them away.
        With ``causal``, exactly the allowed pairs, a share of (T + 1) / 2T; papers often write one half, which is its
        limit for long sequences.
    """
    raise NotImplementedError("Exercise 8.4: write attention_flops")


def training_flops_per_token(config: GPT2Config) -> int:
    """FLOPs of GPT-2's training step, forward and backward, for each token. (Exercise 8.5)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: A ``GPT2Config``; sequences are ``context_len`` long.

    Returns:
        FLOPs of all matrix products, as an ``int``: the blocks' linear maps, attention (every pair, not only the causal
        ones) and the head with its rows of padding.
        Backward has two products for each of forward: one a factor's gradient.

    Source: Kaplan and others (arXiv:2001.08361), section 2.1; PaLM (arXiv:2204.02311), appendix B.
    Convention: exactly what ``FlopCounterMode`` counts for chapter 6's model, divided by the tokens.
        Looking up an embedding is no product.
        Neither recomputation, as in fused attention's backward, nor the optimizer counts.
    """
    raise NotImplementedError("Exercise 8.5: write training_flops_per_token")


def vit_training_flops_per_image(config: ViTConfig) -> int:
    """FLOPs of a vision transformer's training step, forward and backward, for each image. (Exercise 8.6)

    Size: 20 minutes, difficulty 2, stretch.

    Args:
        config: A ``ViTConfig``.

    Returns:
        FLOPs of all products, as an ``int``: patch convolution over N patches, blocks over N + 1 tokens, head on one
        vector.

    Convention: exactly what ``FlopCounterMode`` counts for chapter 5's model on images that need no gradient.
    """
    raise NotImplementedError("Exercise 8.6: write vit_training_flops_per_image")


def mfu(items_per_second: float, flops_per_item: float, peak_flops: float) -> float:
    """The share of a processor's peak that the model's arithmetic uses. (Exercise 8.7)

    Size: 5 minutes, difficulty 1, core.

    Args:
        items_per_second: Tokens or images that the program trains on in a second.
        flops_per_item: FLOPs that the model needs for one of them, forward and backward; recomputation does not count.
        peak_flops: Operations a second that the processor can do in the dtype of the products.

    Returns:
        Model FLOPs utilisation, from 0 to 1: 0.4 is 40 %.

    Source: PaLM (arXiv:2204.02311), section 4.1.
    """
    raise NotImplementedError("Exercise 8.7: write mfu")


def saved_activation_bytes(fn: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass of a call. (Exercise 8.8)

    Size: 30 minutes, difficulty 4, core.

    Args:
        fn: Called once, without arguments; its result is dropped.

    Returns:
        Bytes of all storages of tensors that autograd saves while ``fn`` runs, also of storages that are freed before
        ``fn`` returns.
        Each storage counts in full and once, however many views of it are saved.

    Convention: count what ``torch.autograd.graph.saved_tensors_hooks`` sees: inputs and parameters that a backward
        formula needs, and intermediate results.
        Storages are the same if they have the same ``_cdata`` while both are alive (on the meta device ``data_ptr`` is
        always 0).
        What ``fn`` drops must be freed at once, not by the garbage collector.
    """
    raise NotImplementedError("Exercise 8.8: write saved_activation_bytes")


def attention_activation_bytes(batch: int, heads: int, length: int, head_dim: int, bytes_per_value: int) -> int:
    """Bytes that naive attention keeps for its backward pass. (Exercise 8.9)

    Size: 15 minutes, difficulty 3, core.

    Args:
        batch: Sequences B.
        heads: Heads H of each.
        length: Positions T, of queries and of keys.
        head_dim: Width D of a head.
        bytes_per_value: 4 for float32, 2 for bfloat16.

    Returns:
        Bytes that ``torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v`` saves for inputs
        ``[B, H, T, D]`` that all need a gradient.
    """
    raise NotImplementedError("Exercise 8.9: write attention_activation_bytes")


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step went.

    Attributes:
        range_s: Seconds in each range that the step opened, by name; for a range opened twice, the sum of both.
        operator_s: Seconds in each of PyTorch's operators, as "aten::mm", without the operators that it calls.
    """

    range_s: dict[str, float]
    operator_s: dict[str, float]


def profile_step(step_fn: Callable[[], Any], path: str | os.PathLike) -> StepProfile:
    """Run one step under the profiler, write its trace, and add up its times. (Exercise 8.10)

    Size: 40 minutes, difficulty 4, stretch.

    Args:
        step_fn: Called once, without arguments; it names its parts with ``torch.profiler.record_function("forward")``.
        path: File for the Chrome trace, which https://ui.perfetto.dev opens; its folder exists.

    Returns:
        A ``StepProfile``, from the profiler's ``events()``.
        On the CPU, a range takes the time from its opening to its closing, and an operator its own time.
        If any operator took time on a CUDA device (``self_device_time_total``), all times are the device's: an operator
        has its own, and a range has the sum over the operators that began while it was open, on any thread (autograd
        has one of its own).
        Do not add the device row that the profiler makes for a range.

    Convention: PyTorch's optimizers open ranges of their own, whose names begin with "Optimizer." (``step``,
        ``zero_grad``).
        They are in the trace, but not in ``range_s``, because the step did not open them.
    """
    raise NotImplementedError("Exercise 8.10: write profile_step")


@contextmanager
def memory_timeline(path: str | os.PathLike) -> Iterator[list[dict[str, Any]]]:
    """Follow the memory that tensors take while a block of code runs. (Exercise 8.11)

    Size: 40 minutes, difficulty 4, stretch.

    Use it as ``with memory_timeline("memory.json") as events: step()``.
    It writes the file when the block ends, also when the block ends with an exception: you need the file most when
    memory ran out.

    Args:
        path: The file to write; its folder exists.

    Yields:
        A list that grows by one dict for each storage that is made or freed: ``time_s`` since the block began;
        ``operator``, what made it, ``str(func)`` as "aten.mm.default", or "free"; ``change_bytes``, negative for a
        free; ``total_bytes``, alive after the event.
        With a CUDA device the list stays empty, and all is in the file.

    Without a CUDA device, ``path`` holds JSON: ``{"events": the list, "peak_bytes": the greatest total}``.
    Count storages that operators make inside the block, in forward and backward, each once however many views it has;
    not weights that were there before, nor storages of 0 bytes.
    This is an estimate: it does not see what an operator needs inside itself, nor what the allocator keeps in reserve.
    After the block, storages are not followed any more.

    With a CUDA device, call ``torch.cuda.memory._record_memory_history(max_entries=100_000)`` at the start, and at the
    end ``torch.cuda.memory._dump_snapshot(str(path))`` (for pytorch.org/memory_viz) and
    ``_record_memory_history(enabled=None)``.
    """
    raise NotImplementedError("Exercise 8.11: write memory_timeline")
