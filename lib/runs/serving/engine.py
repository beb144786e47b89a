"""The engine that the server's flags ask for, and what its process does with it."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from lib.runs.flags import UsageError
from lib.runs.memory import block_bytes, check_need, shortage, state_bytes
from lib.runs.serving import models
from lib.runs.serving.admission import CONTEXTS, count_states, make_scheduler
from lib.runs.serving.draft import DraftEngine
from lib.runs.serving.drafters import ModelDrafter
from lib.runs.serving.forms import Forms
from lib.runs.serving.packed import measure_cost, position_bytes
from lib.runs.serving.pairs import PROMPT, check_layers, load_models
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.process import Ready
from lib.runs.serving.settings import one_line
from lib.runs.serving.worker import Worker

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
MOST_THREADS = 1024
CACHE_FLAGS = ("--blocks", "--block-size")


def main(connection: Connection, options: Any) -> None:
    """What the engine's process does: load the model, say so, and work until the connection is closed."""
    counts = Counter[str]()
    if made := try_to(lambda: build(options, counts), connection):
        work(connection, options, counts, *made)


def try_to(build: Callable[[], Any], connection: Connection) -> Any:
    """What a function returns; None after the HTTP side was told what is wrong with the request."""
    try:
        return build()
    except UsageError as error:
        connection.send(UsageError(str(error)))
    except (MemoryError, RuntimeError) as error:
        if (why := shortage(error, ("--model", *CACHE_FLAGS))) is None:
            raise
        connection.send(UsageError(why))
    return None


def work(connection: Connection, options: Any, counts: Counter[str], engine: Any, ready: Ready) -> None:
    """Say that an engine is ready, and take its steps until the connection is closed."""
    connection.send(ready)
    Worker(engine, options.queue, connection, Forms(ready.tokenizer, ready.vocab_size), counts).run()


def build(options: Any, counts: Counter[str]) -> tuple[Any, Ready]:
    """Load the model, and make its engine, which adds to the counts.

    Raises:
        UsageError: the model cannot be loaded, or something does not fit into memory.
    """
    device = find_device(options)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "float32")]
    served, drafting = load_models(options, dtype, device)
    config: Any = served.model.config
    per_position = position_bytes(config, dtype, options.cache_dtype)
    each = options.block_size * per_position
    each += block_bytes(drafting.config, options.block_size, dtype) if drafting else 0
    scheduler = plan(config, options, dtype, device, each)
    what = f"a cache of {scheduler.n_blocks} blocks of {options.block_size} positions"
    try:
        engine = make_engine(served.model, scheduler, counts, options, drafting)
    except (MemoryError, RuntimeError) as error:
        why = shortage(error, CACHE_FLAGS, device) or one_line([str(error)])
        raise UsageError(f"{what} cannot be allocated: {why}") from None
    warm_up(engine)
    ready = Ready(
        served.name, served.tokenizer, served.template, config.vocab_size, config.context_len, scheduler.n_blocks,
        describe_path(engine), served.notes + describe_draft(options) + describe_cache(served, options, dtype),
        per_position,
    )  # fmt: skip
    return engine, ready


def plan(config: Any, options: Any, dtype: torch.dtype, device: torch.device, each: int) -> Any:
    """A scheduler of the blocks, of so many bytes each, and of the states for which there is memory.

    Raises:
        UsageError: there is none for what was asked.
    """
    n_states = count_states(config, dtype, device, options.max_tokens)
    of_states = n_states * state_bytes(config, dtype)
    n_blocks = options.blocks or count_blocks(config, options.block_size, device, each, of_states)
    states = f" and {n_states} states" if n_states else ""
    what = f"a cache of {n_blocks} blocks of {options.block_size} positions{states}"
    check_need(n_blocks * each + of_states, device, what, CACHE_FLAGS)
    return make_scheduler(options.max_tokens, n_blocks, options.block_size, n_states)


def find_device(options: Any) -> torch.device:
    """The device that the flags ask for; sets PyTorch's threads.

    Raises:
        UsageError: there is no such device, or there are too many threads.
    """
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UsageError("--device cuda: this machine has no GPU that PyTorch can use; expected cpu")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    if options.threads or (options.model == "tiny" and device.type == "cpu"):
        if (options.threads or 1) > MOST_THREADS:
            raise UsageError(f"--threads {options.threads}: expected {MOST_THREADS} at most")
        torch.set_num_threads(options.threads or 1)
    return device


def count_blocks(config: Any, block_size: int, device: torch.device, each: int, of_states: int = 0) -> int:
    """Number of blocks of the cache, of so many bytes each.

    On a GPU they fill 0.9 of the free memory, less 0.1 of the total, which activations need, and less the bytes
    of states. Elsewhere they hold 64 full contexts.
    """
    whole_contexts = CONTEXTS * -(-config.context_len // block_size)
    if device.type != "cuda":
        return whole_contexts
    free, total = torch.cuda.mem_get_info(device)
    room = 0.9 * free - 0.1 * total - of_states
    n_blocks = int(room // each)
    if n_blocks < 1:
        raise UsageError(
            f"no memory is left for the cache: {free / 1e9:.1f} GB are free; expected a larger GPU, or a smaller model"
        )
    return n_blocks


def make_engine(model: Any, scheduler: Any, counts: Counter[str], options: Any, draft: Any = None) -> Any:
    """The engine that the flags ask for; ``draft`` is the model that drafts, if one does."""
    more = counters(counts) | {"cache_format": options.cache_dtype}
    if options.draft:
        check_layers(model.config, options, options.model)
        drafter = ModelDrafter(draft, scheduler, model.config.vocab_size) if draft else None
        return DraftEngine(model, scheduler, options.drafted, partial(_add_drafts, counts), drafter, **more)
    return PrefixEngine(model, scheduler, **more)


def counters(counts: Counter[str]) -> dict[str, Any]:
    """What an engine calls to add to the counts."""
    return {
        "on_found": partial(_add, counts, "found_tokens"), "on_forked": partial(_add, counts, "forked_tokens"),
        "on_preempted": partial(_add, counts, "preemptions"),
    }  # fmt: skip


def _add(counts: Counter[str], name: str, n: int) -> None:
    counts[name] += n


def _add_drafts(counts: Counter[str], n_drafted: int, n_kept: int) -> None:
    counts["drafted_tokens"] += n_drafted
    counts["kept_tokens"] += n_kept


def warm_up(engine: Any) -> None:
    """Record an engine's CUDA graphs, with a progress bar. An engine without them needs nothing."""
    if engine.steps is not None:
        engine.steps.warm_up(progress)
    if isinstance(engine, DraftEngine):
        engine.drafter.warm_up(progress)


def progress(sizes: list[int]) -> Any:
    """The sizes of graphs, with a progress bar."""
    from tqdm import tqdm

    return tqdm(sizes, desc="recording CUDA graphs", unit="size", leave=False)


def describe_draft(options: Any) -> tuple[str, ...]:
    """What drafts, if anything does, a line for the log."""
    if not options.draft:
        return ()
    who = "the text itself" if options.draft == PROMPT else options.draft
    return (f"{who} drafts up to {options.drafted} tokens of a request in a step",)


def describe_cache(served: models.Served, options: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """What a position of the cache takes; of one in 8 bits also what it costs, measured on a text."""
    config, wide = served.model.config, str(dtype).removeprefix("torch.")
    wide_bytes = position_bytes(config, dtype, None)
    if options.cache_dtype is None:
        return (f"a position of the cache takes {wide_bytes:,} bytes, in {wide}",)
    n_bytes = position_bytes(config, dtype, options.cache_dtype)
    cost = measure_cost(served.model, served.tokenizer, options.cache_dtype)
    return (
        f"a position of the cache takes {n_bytes:,} bytes, in {options.cache_dtype}; in {wide} it would take "
        f"{wide_bytes:,}",
        str(cost),
    )


def describe_path(engine: Any) -> tuple[str, str]:
    """Which way an engine's steps take through the model: a word for the metrics, and a sentence for the log."""
    if engine.steps is not None:
        return "fast", "the fast step: fused kernels, and a CUDA graph for each of some batch sizes"
    needs = "it needs a Llama of one dtype without linear layers"
    why = needs if engine.cache.keys.is_cuda else "the fast one needs a GPU"
    return "plain", f"the plain step, kernel by kernel: {why}"
