"""A Llama that is divided among ranks, a process each, by chapter 13's layers.

Rank 0 has the scheduler, the prefix tree, the logits and the sampling. Before each pass through the model it tells the
other ranks which tokens take part, and where their keys and values belong; then all ranks compute the pass together,
each with its own heads, feed-forward features and cache. Two all-reduces in each block make one model of their parts.
On GPUs a pass is a graph on each rank (`lib.runs.serving.divided_steps`).
"""

import os
import socket
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.serving import Runner
from lib.given.models.serving import Chunk, Layout
from lib.given.models.variants import family_of
from lib.given.parallel.tensors import rank_part
from lib.llama import Llama
from lib.ranks.mpi_launch import loopback
from lib.runs.flags import UsageError
from lib.runs.memory import block_bytes, check_need
from lib.runs.serving import engine, models
from lib.runs.serving.divided_steps import DividedSteps, Numbers, can_capture
from lib.runs.serving.packed import position_bytes
from lib.runs.serving.pairs import load_models
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.process import Place, Ready
from lib.runs.variants import VariantLlama
from lib.serving import PagedCache, Scheduler, paged_attention
from lib.tensor_parallel import ColumnParallelLinear, RowParallelLinear

COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
ROWS = ("attention.wo", "feed_forward.w2")


class Pass(NamedTuple):
    """What a rank needs to know of a pass through the model.

    Attributes:
        ids: The sequence of each chunk.
        tables: The blocks of each of these sequences.
        lengths: Its positions, with those of this pass.
        sizes: Tokens of each chunk.
        fields: int64: ``tokens``, ``positions``, ``single`` and ``last`` of the pass's ``Layout``, and the slots.
        copies: Pairs of blocks, the first copied into the second since the pass before.
    """

    ids: list[int]
    tables: list[list[int]]
    lengths: list[int]
    sizes: list[int]
    fields: list[np.ndarray]
    copies: list[tuple[int, int]]


class NotedCache(PagedCache):
    """Chapter 21's cache, which notes each block that it copies: the other ranks must copy their part of it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.copies: list[tuple[int, int]] = []

    def copy_block(self, block: int, into: int) -> None:
        super().copy_block(block, into)
        self.copies.append((block, into))


class Leader(PrefixEngine):
    """The engine on rank 0, which tells the other ranks of each pass.

    Args:
        model: Rank 0's part.
        scheduler: As for ``PrefixEngine``.
        pipes: To the other ranks.
        more: As for ``PrefixEngine``.
    """

    own_cache = NotedCache, paged_attention
    is_torn = False

    def __init__(self, model: nn.Module, scheduler: Scheduler, pipes: list[Connection], **more: Any) -> None:
        super().__init__(model, scheduler, **more)
        self.pipes = pipes
        if can_capture(self.cache):
            self.steps = DividedSteps(model, self.cache, scheduler.max_tokens, self._tell)

    def is_fast(self) -> bool:
        return False

    def _tell(self, told: Pass | Numbers) -> None:
        for pipe in self.pipes:
            pipe.send(told)

    def _by_graph(self, chunks: list[Chunk]) -> Float[Tensor, "n v"]:
        self.is_torn = True
        logits = super()._by_graph(chunks)
        self.is_torn = False
        return logits

    def pass_row(self, ids: list[int], row: Layout, slots: Int[Tensor, " n"]) -> Float[Tensor, "r v"]:
        """As ``Runner.pass_row``, on all ranks."""
        cache: Any = self.cache
        fields = [x.numpy() for x in (row.tokens, row.positions, row.single, row.last, slots)]
        tables, lengths = [cache.tables[i] for i in ids], [cache.length_of(i) for i in ids]
        copies, cache.copies = cache.copies, []
        self.is_torn = True
        self._tell(Pass(ids, tables, lengths, row.sizes, fields, copies))
        logits = super().pass_row(ids, row, slots)
        self.is_torn = False
        return logits

    def abandon(self) -> list[Any]:
        """As ``PrefixEngine.abandon``.

        Raises:
            RuntimeError: rank 0 has left a pass in which the other ranks still take part.
        """
        if self.is_torn:
            raise RuntimeError("the other ranks are in the middle of a pass, from which nobody can call them back")
        return super().abandon()


class Follower(Runner):
    """The part of an engine on another rank than 0: a cache for its own heads, and no logits.

    Args:
        model: This rank's part.
        scheduler: It says how many blocks there are, and schedules nothing.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler) -> None:
        super().__init__(model, scheduler, PagedCache, paged_attention)
        if can_capture(self.cache):
            self.steps = DividedSteps(model, self.cache, scheduler.max_tokens)

    def is_fast(self) -> bool:
        return False

    def follow(self, pipe: Connection) -> None:
        """Take part in every pass that rank 0 tells of, until rank 0 is gone."""
        with suppress(EOFError):
            while True:
                self.take(pipe.recv())

    def take(self, told: Pass | Numbers) -> None:
        """Take part in a pass."""
        if isinstance(told, Numbers):
            steps: Any = self.steps
            steps.follow(told)
            return
        for block, into in told.copies:
            self.cache.copy_block(block, into)
        self.cache.tables = dict(zip(told.ids, told.tables, strict=True))
        self.cache.lengths = {i: [n] * len(self.cache.keys) for i, n in zip(told.ids, told.lengths, strict=True)}
        tokens, positions, single, last, slots = map(torch.from_numpy, told.fields)
        self.pass_row(told.ids, Layout(tokens, positions, told.sizes, single, last), slots)


@torch.no_grad()
def divide(model: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Keep this rank's part of a Llama, in place: its heads and feed-forward features, and the vocabulary's matrices.

    The model's ``config`` becomes that of the part: its heads, and a ``dim`` that leaves the width of a head as it was.
    Only rank 0 keeps the output layer; on the others the model returns hidden states in place of logits.
    """
    whole, rank, n_ranks = model.state_dict(), dist.get_rank(group), dist.get_world_size(group)
    with torch.device("meta"):
        for block in model.layers:
            for name in (*COLUMNS, *ROWS):
                kind: Any = ColumnParallelLinear if name in COLUMNS else RowParallelLinear
                old = block.get_submodule(name)
                block.set_submodule(name, kind(old.in_features, old.out_features, group, bias=False))
    model.load_state_dict(rank_part(whole, model.state_dict(), rank), assign=True)
    if rank:
        model.output = nn.Identity()
    shared = {name: getattr(model.config, name) // n_ranks for name in ("dim", "n_heads", "n_kv_heads", "hidden_dim")}
    model.config = replace(model.config, **shared)
    return model.requires_grad_(False).eval()


def check(model: nn.Module, options: Any) -> None:
    """Raise a ``UsageError`` for a model that is no plain Llama, or that has a number which the ranks cannot share."""
    asked, config = f"--tensor {options.tensor}: --model {options.model}", getattr(model, "config", None)
    if not isinstance(model, Llama):
        family = family_of(model.config) if isinstance(model, VariantLlama) else type(model).__name__
        raise UsageError(f"{asked} is of the family {family}; expected a plain Llama, or no --tensor")
    sizes = {"heads": "n_heads", "key/value heads": "n_kv_heads", "feed-forward features": "hidden_dim"}
    for what, name in sizes.items():
        if (n := getattr(config, name)) % options.tensor:
            raise UsageError(f"{asked} has {n} {what}; expected a number of ranks that divides {n}")


def find_device(options: Any, place: Place) -> torch.device:
    """The device of a rank.

    Raises:
        UsageError: there is none, or there are fewer GPUs than ranks.
    """
    device = engine.find_device(options)
    if device.type == "cuda":
        if (n_gpus := torch.cuda.device_count()) < place.n_ranks:
            raise UsageError(
                f"--tensor {place.n_ranks}: PyTorch sees {n_gpus} GPU{'s' * (n_gpus > 1)} here; expected no more "
                "ranks than GPUs, or --device cpu"
            )
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    elif not options.threads:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.n_ranks))
    return device


def start_group(place: Place, device: torch.device) -> None:
    """Start the process group of all ranks: NCCL between GPUs, gloo on a CPU, by the loopback interface.

    Raises:
        EOFError: rank 0 is gone.
    """
    if place.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for pipe in place.pipes:
            pipe.send(port)
    else:
        store = dist.TCPStore("127.0.0.1", place.pipes[0].recv(), is_master=False, wait_for_workers=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    backend, its_device = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.n_ranks, device_id=its_device)


def build(options: Any, counts: Counter[str], place: Place) -> tuple[Any, Ready]:
    """Load a rank's part of the model, and make its engine: a ``Leader`` on rank 0, else a ``Follower``.

    Raises:
        UsageError: the model cannot be loaded or divided, or something does not fit into memory.
    """
    device = find_device(options, place)
    dtype = engine.DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "float32")]
    if place.rank == 0:  # each rank reads all of the weights, and then keeps its part
        need = place.n_ranks * models.weight_bytes(options.model)
        check_need(need, torch.device("cpu"), f"--model {options.model}: weights, read by each rank", ["--tensor"])
    served, _ = load_models(options, dtype, torch.device("cpu"))
    check(served.model, options)
    whole: Any = served.model.config
    start_group(place, device)
    model = divide(served.model).to(device)
    scheduler = plan(model.config, options, dtype, device)
    if place.rank:
        made: Any = Follower(model, scheduler)
    else:
        made = Leader(model, scheduler, place.pipes, **engine.counters(counts))
    if made.steps is not None:
        made.steps.warm_up(engine.progress if place.rank == 0 else iter)
    dist.barrier()  # once rank 0 is ready, all are
    per_position = position_bytes(model.config, dtype, None)
    note = f"a position of the cache takes {per_position:,} bytes on each rank, in {str(dtype).removeprefix('torch.')}"
    ready = Ready(
        served.name, served.tokenizer, served.template, whole.vocab_size, whole.context_len, scheduler.n_blocks,
        describe(made, whole, place.n_ranks), (note,), per_position,
    )  # fmt: skip
    return made, ready


def plan(config: Any, options: Any, dtype: torch.dtype, device: torch.device) -> Scheduler:
    """A scheduler of as many blocks as every rank has memory for."""
    each = block_bytes(config, options.block_size, dtype)
    n_blocks = torch.tensor([engine.plan(config, options, dtype, device, each).n_blocks], device=device)
    dist.all_reduce(n_blocks, dist.ReduceOp.MIN)
    return Scheduler(options.max_tokens, int(n_blocks), options.block_size)


def describe(made: Any, config: Any, n_ranks: int) -> tuple[str, str]:
    """As ``engine.describe_path``, and what each rank has."""
    way, what = engine.describe_path(made)
    heads = f"{config.n_heads // n_ranks} of {config.n_heads} heads"
    groups = f"{config.n_kv_heads // n_ranks} of {config.n_kv_heads} key/value heads"
    return way, f"{what}; on {n_ranks} ranks ({dist.get_backend()}), each with {heads} and {groups}"


def _follow(follower: Follower, pipe: Connection) -> None:
    try:
        follower.follow(pipe)
    except Exception:
        if pipe.poll(1.0):  # rank 0 is gone, so the pass that this rank was in has failed
            os._exit(0)
        traceback.print_exc()
        os._exit(1)


def main(connection: Connection, options: Any, place: Place) -> None:
    """What the process of a rank does: load its part, and work until rank 0 has nobody to work for."""
    counts, made = Counter[str](), None
    with suppress(EOFError):  # rank 0 has found something wrong
        made = engine.try_to(partial(build, options, counts, place), connection)
    if made is None:
        return
    if place.rank:
        _follow(made[0], place.pipes[0])
    else:
        engine.work(connection, options, counts, *made)
        if made[0].is_torn:
            os._exit(1)  # NCCL would wait for the others
    for pipe in place.pipes:
        pipe.close()
    if made[0].steps is not None:  # NCCL would wait for the graphs that hold its kernels
        os._exit(0)
    dist.destroy_process_group()
