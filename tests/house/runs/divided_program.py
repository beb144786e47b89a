"""What the ranks of test_serve_tensor.py do: one Llama and some requests, on one rank alone and on all together."""

import random
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.fast import decode, serving
from lib.given.models.llama import LlamaConfig
from lib.given.parallel.tensors import Collectives
from lib.llama import Llama
from lib.runs.serving import divided
from lib.runs.serving.divided import Follower, Leader, divide
from lib.runs.serving.wanted import Wanted
from lib.serving import Scheduler, generate_many

SIZES = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, context_len=64)
N_BLOCKS, BLOCK = 11, 4


def make_model() -> Llama:
    """A Llama whose next token is no near tie."""
    torch.manual_seed(0)
    model = Llama(SIZES).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.dim() > 1 else 1
    return model


def make_requests() -> list[Wanted]:
    """Greedy requests whose prompts begin alike, and some forks of others."""
    rng = random.Random(0)
    begins = [[rng.randrange(64) for _ in range(16)] for _ in range(3)]
    made = list[Wanted]()
    for i in range(24):
        tokens = rng.choice(begins)[: rng.randint(1, 16)] + [rng.randrange(3)] * rng.randint(0, 4)
        first = made[-1] if i % 6 == 5 else None
        made.append(Wanted(first.tokens if first else tokens, rng.randint(2, 12), first=first))
    return made


def serve_captured(rank: int, n_ranks: int, path: Path) -> list[Any]:
    """On rank 0 what differs from one process, where steps are those that GPUs capture: with more than four tokens in
    tiles, in a graph for 8.
    """
    vars(divided)["can_capture"] = lambda cache: True
    vars(serving)["GRAPH_ROWS"] = vars(decode)["GRAPH_ROWS"] = 4
    vars(decode)["TILED_ROWS"] = (8,)
    model, pipe = divide(make_model()), connect(rank, path)
    scheduler = Scheduler(8, N_BLOCKS, BLOCK)
    if rank:
        Follower(model, scheduler).follow(pipe)
        return []
    requests, engine = make_requests()[3:6], Leader(model, scheduler, [pipe])
    tokens, _ = lead(engine, requests, share=0.0)
    pipe.close()
    alone = make_model()
    own = [[t for _, t in generate_many(alone, [request], Scheduler(64, 60, BLOCK))] for request in requests]
    return [(tokens[request], right) for request, right in zip(requests, own, strict=True) if tokens[request] != right]


def connect(rank: int, path: Path) -> Connection:
    """A connection between ranks 0 and 1."""
    if rank == 0:
        with Listener(str(path)) as listener:
            dist.barrier()
            return listener.accept()
    dist.barrier()
    return Client(str(path))


def lead(
    engine: Leader, requests: list[Wanted], share: float = 0.1
) -> tuple[dict[Wanted, list[int]], set[Wanted]]:  # fmt: skip
    """Each request's tokens, as far as it came before it was cancelled, and those that were: one in this share of all
    steps.
    """
    rng, waiting, cancelled = random.Random(1), [*requests], set[Wanted]()
    tokens: dict[Any, list[int]] = {request: [] for request in requests}
    while waiting or engine.is_busy:
        if waiting and rng.random() < 0.5:
            engine.submit(waiting.pop(0))
            if waiting and waiting[0].first:  # before the prompt of its first is computed
                engine.submit(waiting.pop(0))
        if engine.scheduler.running and rng.random() < share:
            request: Any = rng.choice([*engine.scheduler.running]).request
            cancelled |= {request} if engine.cancel(request) else set()
        for request, token in engine.step():
            tokens[request].append(token)
    return tokens, cancelled


def serve(rank: int, n_ranks: int, path: Path) -> dict[str, Any]:
    """Rank 0's answers beside those of one process, and what each rank holds and sends."""
    model, pipe = divide(make_model()), connect(rank, path)
    scheduler = Scheduler(16, N_BLOCKS, BLOCK)
    if rank:
        follower = Follower(model, scheduler)
        follower.follow(pipe)
        return {"keys": follower.cache.keys}
    seen = {name: list[int]() for name in ("on_found", "on_forked", "on_preempted")}
    counted: dict[str, Any] = {name: n.append for name, n in seen.items()}
    requests, engine = make_requests(), Leader(model, scheduler, [pipe], **counted)
    tokens, cancelled = lead(engine, requests)
    with Collectives() as sent:
        engine.submit(Wanted([1, 2, 3], 1))
        engine.step()
    pipe.close()
    alone = make_model()
    wrong = []
    for request in requests:
        own = [token for _, token in generate_many(alone, [request], Scheduler(64, 60, BLOCK))]
        if tokens[request] != (own[: len(tokens[request])] if request in cancelled else own):
            wrong.append((request.tokens, tokens[request], own))
    counts = {name: sum(n) for name, n in seen.items()}
    return {"wrong": wrong, "counts": counts, "cancelled": len(cancelled), "calls": dict(sent.calls),
            "weights": {name: list(w.shape) for name, w in model.named_parameters()}, "keys": engine.cache.keys,
            "busy": engine.cache.tables}  # fmt: skip
