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
    """Time a function after a warm-up, waiting for the accelerator before each reading of the clock. (Exercise)

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
    ### BEGIN SOLUTION
    if warmup < 0:
        raise ValueError(f"warmup = {warmup} calls: expected 0 or more")
    if repeats < 1:
        raise ValueError(f"repeats = {repeats} calls: expected 1 or more")
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        fn()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    std = statistics.stdev(times) if repeats > 1 else 0.0
    return Timing(statistics.fmean(times), std, statistics.median(times), tuple(times))
    ### END SOLUTION


### BEGIN SOLUTION
def _synchronize(device: torch.device | str | None) -> None:
    """Wait until a device has finished all the work in its queue."""
    if device is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    device = torch.device(device or "cpu")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


### END SOLUTION


def matmul_flops(m: int, k: int, n: int) -> int:
    """Floating-point operations of a matrix product. (Exercise)

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
    ### BEGIN SOLUTION
    return 2 * m * k * n
    ### END SOLUTION


def roofline_seconds(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    """The least time that a processor needs, if arithmetic and memory traffic overlap perfectly. (Exercise)

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
    ### BEGIN SOLUTION
    return max(flops / peak_flops, bytes_moved / bandwidth)
    ### END SOLUTION


def attention_flops(config: GPT2Config | ViTConfig, length: int, causal: bool) -> int:
    """FLOPs of attention's scores and weighted values in all layers, for the forward pass of one sequence. (Exercise)

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
    ### BEGIN SOLUTION
    pairs = length * (length + 1) // 2 if causal else length * length
    return 2 * matmul_flops(1, config.dim, 1) * pairs * config.n_layers
    ### END SOLUTION


def training_flops_per_token(config: GPT2Config) -> int:
    """FLOPs of GPT-2's training step, forward and backward, for each token. (Exercise)

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
    ### BEGIN SOLUTION
    linear = config.n_layers * matmul_flops(1, config.dim, 12 * config.dim)
    head = matmul_flops(1, config.dim, config.n_rows)
    attention = attention_flops(config, config.context_len, causal=False) // config.context_len
    return 3 * (linear + head + attention)
    ### END SOLUTION


def vit_training_flops_per_image(config: ViTConfig) -> int:
    """FLOPs of a vision transformer's training step, forward and backward, for each image. (Exercise)

    Size: 20 minutes, difficulty 2, stretch.

    Args:
        config: A ``ViTConfig``.

    Returns:
        FLOPs of all products, as an ``int``: patch convolution over N patches, blocks over N + 1 tokens, head on one
        vector.

    Convention: exactly what ``FlopCounterMode`` counts for chapter 5's model on images that need no gradient.
    """
    ### BEGIN SOLUTION
    tokens = config.n_patches + 1
    patches = matmul_flops(config.n_patches, config.patch_dim, config.dim)
    projections = matmul_flops(tokens, config.dim, 4 * config.dim)
    mlp = 2 * matmul_flops(tokens, config.dim, config.hidden_dim)
    head = matmul_flops(1, config.dim, config.n_classes)
    attention = attention_flops(config, tokens, causal=False)
    return 2 * patches + 3 * (config.n_layers * (projections + mlp) + attention + head)
    ### END SOLUTION


def mfu(items_per_second: float, flops_per_item: float, peak_flops: float) -> float:
    """The share of a processor's peak that the model's arithmetic uses. (Exercise)

    Size: 5 minutes, difficulty 1, core.

    Args:
        items_per_second: Tokens or images that the program trains on in a second.
        flops_per_item: FLOPs that the model needs for one of them, forward and backward; recomputation does not count.
        peak_flops: Operations a second that the processor can do in the dtype of the products.

    Returns:
        Model FLOPs utilisation, from 0 to 1: 0.4 is 40 %.

    Source: PaLM (arXiv:2204.02311), section 4.1.
    """
    ### BEGIN SOLUTION
    return items_per_second * flops_per_item / peak_flops
    ### END SOLUTION


def saved_activation_bytes(fn: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass of a call. (Exercise)

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
    ### BEGIN SOLUTION
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # keeps it alive, so that no other storage gets its number
        return tensor.detach()  # an output itself would hold its own graph, in a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in kept.values())
    ### END SOLUTION


def attention_activation_bytes(batch: int, heads: int, length: int, head_dim: int, bytes_per_value: int) -> int:
    """Bytes that naive attention keeps for its backward pass. (Exercise)

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
    ### BEGIN SOLUTION
    inputs = 3 * length * head_dim  # q, k and v
    weights = length * length  # softmax's output, which softmax and the last product both need
    return batch * heads * (inputs + weights) * bytes_per_value
    ### END SOLUTION


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
    """Run one step under the profiler, write its trace, and add up its times. (Exercise)

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
    ### BEGIN SOLUTION
    with torch.profiler.profile():  # an empty one first: the profiler's own start is not part of the step
        pass
    with torch.profiler.profile() as profiler:  # of the CPU, and of an accelerator, for which it waits at its end
        step_fn()
    profiler.export_chrome_trace(str(path))
    events = profiler.events()
    on_device = any(event.self_device_time_total for event in events if event.name.startswith("aten::"))
    own: dict[Any, float] = {}  # seconds of each operator's event
    ranges: dict[str, float] = {}
    operators: dict[str, float] = {}
    for event in (event for event in events if event.name.startswith("aten::")):
        own[event] = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        operators[event.name] = operators.get(event.name, 0.0) + own[event]
    for event in events:
        if _is_range(event):
            seconds = _begun_inside(event.time_range, own) if on_device else event.cpu_time_total / 1e6
            ranges[event.name] = ranges.get(event.name, 0.0) + seconds
    return StepProfile(ranges, operators)
    ### END SOLUTION


### BEGIN SOLUTION
def _is_range(event: Any) -> bool:
    """Whether an event is the host's row of a range that the step itself opened, not the optimizer."""
    mine = not event.name.startswith(("Optimizer.", "ProfilerStep"))
    return event.is_user_annotation and event.device_type.name == "CPU" and mine


def _begun_inside(span: Any, seconds: dict[Any, float]) -> float:
    """Seconds of the events that began while a range was open."""
    return sum(s for event, s in seconds.items() if span.start <= event.time_range.start < span.end)


### END SOLUTION


### BEGIN SOLUTION
class _StorageLog(TorchDispatchMode):
    """Notes when an operator makes a storage, and when the storage is freed."""

    def __init__(self, events: list[dict[str, Any]]):
        super().__init__()
        self.events, self.total, self.start = events, 0, time.perf_counter()
        self.alive: dict[int, int] | None = {}  # bytes of each storage; None after the block

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first use imports the compiler, which takes 2 s

    def note(self, operator: str, change: int) -> None:
        self.total += change
        seconds = time.perf_counter() - self.start
        self.events.append({"time_s": seconds, "operator": operator, "change_bytes": change, "total_bytes": self.total})

    def free(self, key: int) -> None:
        if self.alive is not None:
            self.note("free", -self.alive.pop(key))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {s._cdata for s in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            new = storage.nbytes() and storage._cdata not in given
            if new and self.alive is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata).atexit = False
                self.note(str(func), storage.nbytes())
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """The storages of all tensors in nested arguments."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


### END SOLUTION


@contextmanager
def memory_timeline(path: str | os.PathLike) -> Iterator[list[dict[str, Any]]]:
    """Follow the memory that tensors take while a block of code runs. (Exercise)

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
    ### BEGIN SOLUTION
    events: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            yield events
        finally:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        return
    log = _StorageLog(events)
    try:
        with log:
            yield events
    finally:
        log.alive = None
        peak = max((event["total_bytes"] for event in events), default=0)
        Path(path).write_text(json.dumps({"events": events, "peak_bytes": peak}), encoding="utf-8")
    ### END SOLUTION
