"""Keep many requests open, first in the engine alone, then over HTTP with streaming: what share of its tokens arrives?

Both times the server's engine runs in a process of its own, with the same prompts and answers. The model is that of
``lib.bench.serving``, a Llama of a billion parameters with random weights. The record also has the CPU time that the
process with the HTTP side takes for a token, which bounds what one such process can carry.

``--step 9.6`` needs no GPU: in place of the model's, each step sleeps for so many milliseconds, and makes up a token
for every open request. That measures the HTTP side alone: 192 requests and 9.6 ms are 20,000 tokens/s.

Run ``python -m lib.bench.serving_http`` on a GPU; it writes ``chapters/measurements/serving_http.json``.
"""

import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.bench import load
from lib.bench.kit import record
from lib.given.data.corpora import language_reference
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, positive, whole

VOCAB, TRAINED, CONTEXT = 32_000, 8_000, 2048  # tokens of the tokenizer; those that are trained; positions
QUEUE = 1024
WORDS, ANSWERS = (32, 384), (64, 256)  # fewest and most words of a prompt, tokens of an answer
MOST = 400  # requests that an engine alone answers in a second


class Costless:
    """An engine whose step sleeps, as a step on a GPU does for Python, and then has a token for each request.

    Args:
        step_s: How long.
        seed: Of the tokens.
    """

    def __init__(self, step_s: float, seed: int = 0) -> None:
        self.step_s, self.tokens, self.at = step_s, random.Random(seed).choices(range(VOCAB), k=100_003), 0
        self.scheduler = SimpleNamespace(waiting=list[Any](), running=dict[Any, int](), n_free=0, n_blocks=0)

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, request: Any) -> None:
        self.scheduler.waiting.append(request)

    def cancel(self, request: Any) -> bool:
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
            return True
        return self.scheduler.running.pop(request, None) is not None

    def abandon(self) -> list[Any]:
        raise NotImplementedError("its steps do not fail")

    def step(self) -> list[tuple[Any, int]]:
        time.sleep(self.step_s)
        running, new = self.scheduler.running, list[tuple[Any, int]]()
        running |= {request: request.max_new_tokens for request in self.scheduler.waiting}
        self.scheduler.waiting.clear()
        for request, n_left in list(running.items()):
            self.at = (self.at + 1) % len(self.tokens)
            new.append((request, self.tokens[self.at]))
            running[request] = n_left - 1
            if n_left == 1:
                del running[request]
        return new


def write_tokenizer(path: Path) -> None:
    """A ``tokenizer.json`` of bytes and pairs, trained on the language reference, and filled up with made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TRAINED, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([language_reference()], trainer)
    settings = json.loads(made.to_str())
    vocab = settings["model"]["vocab"]
    vocab |= {f"Ġ_{i}": i for i in range(len(vocab), VOCAB)}
    path.write_text(json.dumps(settings), encoding="utf-8")


def make_engine(step_ms: float | None, device: str) -> tuple[Any, tuple[str, str]]:
    """The engine, and which way its steps take."""
    if step_ms is not None:
        return Costless(step_ms / 1e3), ("none", "no way: it computes nothing")
    import torch

    from lib.bench.serving import LARGE, Ahead
    from lib.runs.serving.engine import describe_path

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engine = Ahead(LARGE, torch.device(device), dtype).engine
    return engine, describe_path(engine)


def make_requests(options: Any, tokenizer: Any) -> Iterator[Any]:
    """Requests like those of the load, as the engine gets them; other ones, for the prefix tree remembers prompts."""
    from lib.given.models.serving import Request

    for ask in load.drawn(options, 1.0):
        yield Request(tokenizer.encode(ask.fields["prompt"]), ask.fields["max_tokens"], 1.0)


def alone(engine: Any, requests: Iterator[Any], n: int, warm_up_s: float, seconds: float) -> float:
    """Tokens per second of an engine in which n requests are always open; those left at the end are dropped.

    Their prompts are made into tokens before the clock starts.
    """
    requests = iter(list(islice(requests, n + round(MOST * (warm_up_s + seconds)))))
    waiting = dict[Any, int]()
    for request in islice(requests, n):
        waiting[request] = request.max_new_tokens
        engine.submit(request)
    begin = time.perf_counter() + warm_up_s
    n_tokens, now = 0, 0.0
    while now < begin + seconds:
        new = engine.step()
        now = time.perf_counter()
        n_tokens += len(new) * (begin <= now < begin + seconds)
        for request, _ in new:
            waiting[request] -= 1
            if waiting[request] == 0:
                del waiting[request]
                another = next(requests)
                waiting[another] = another.max_new_tokens
                engine.submit(another)
    for request in waiting:
        engine.cancel(request)
    return n_tokens / seconds


def engine_main(connection: Connection, options: Any, tokenizer_file: str) -> None:
    """The engine's process: measure it alone, then serve."""
    from lib.runs.serving.forms import Forms
    from lib.runs.serving.process import Ready
    from lib.runs.serving.text import FileTokenizer
    from lib.runs.serving.worker import Worker

    tokenizer = FileTokenizer(tokenizer_file, [])
    engine, path = make_engine(options.step, options.device)
    connection.send(Ready("measured", tokenizer, None, VOCAB, CONTEXT, 0, path))
    requests = make_requests(options, tokenizer)
    for n in options.streams:  # kernels are compiled for the lengths that occur
        alone(engine, requests, n, 0.0, options.warm_up)
    connection.send({n: alone(engine, requests, n, options.warm_up, options.seconds) for n in options.streams})
    Worker(engine, QUEUE, connection, Forms(tokenizer, VOCAB)).run()


def server_main(results: Connection, options: Any, tokenizer_file: str) -> None:
    """The server's process: it starts the engine's, reports its results, and serves over HTTP."""
    from lib.runs import serve
    from lib.runs.serving import process
    from lib.runs.serving.api import Service
    from lib.runs.serving.link import Link
    from lib.runs.serving.metrics import Metrics

    begun, connection, ready = process.start(engine_main, options, tokenizer_file)
    bound = serve.open_socket("127.0.0.1", 0)
    bound.listen(1024)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    results.send((connection.recv(), ready.path[1], url))
    metrics = Metrics(0)
    service = Service(
        name=ready.name, tokenizer=ready.tokenizer, link=Link(connection, QUEUE, metrics, begun), metrics=metrics,
        vocab_size=VOCAB, context_len=CONTEXT,
    )  # fmt: skip
    sys.exit(serve.run(service, bound, url, grace_s=1.0))


def over_http(options: Any, url: str, n: int) -> dict[str, Any]:
    """The load's summary of n streams, and the CPU time of the HTTP side's process for each token."""
    words = ["--url", url, "--streams", str(n), "--processes", str(options.processes), "--ignore-eos",
             "--warm-up", str(options.warm_up), "--seconds", str(options.seconds), "--seed", str(options.seed + n),
             "--prompt-words", *map(str, options.prompt_words),
             "--answer-tokens", *map(str, options.answer_tokens)]  # fmt: skip
    before = read_metrics(url)
    (found,) = load.run(load.make_parser().parse_args(words)).values()
    after = read_metrics(url)
    cpu_s, n_tokens = (
        after[name] - before[name] for name in ("process_cpu_seconds_total", "workbook_generated_tokens_total")
    )
    kept = ("tokens_per_s", "answered", "errors", "first_token_s", "between_pieces_s", "latest_start_s")
    return {name: found[name] for name in kept} | {"cpu_s_per_token": cpu_s / max(1.0, n_tokens)}


def read_metrics(url: str) -> dict[str, float]:
    import httpx

    text = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=60.0).text
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def make_parser() -> ProgramParser:
    parser = ProgramParser(prog="python -m lib.bench.serving_http", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--step", type=positive, metavar="MS", help="no model: each step sleeps for so long")
    parser.add_argument("--streams", nargs="+", type=whole(1), default=[64, 192], help="open requests, a load for each")
    parser.add_argument("--processes", type=whole(1), default=8, help="of clients")
    parser.add_argument("--warm-up", type=positive, default=5.0, help="seconds before each measurement")
    parser.add_argument("--seconds", type=positive, default=20.0, help="of each measurement")
    parser.add_argument("--prompt-words", nargs=2, type=whole(1), default=[*WORDS], metavar=("LEAST", "MOST"))
    parser.add_argument("--answer-tokens", nargs=2, type=whole(1), default=[*ANSWERS], metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.set_defaults(chat=False, ignore_eos=True)  # as for ``lib.bench.load``
    return parser


def main(argv: list[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_file = Path(folder, "tokenizer.json")
        write_tokenizer(tokenizer_file)
        server = context.Process(target=server_main, args=(there, options, str(tokenizer_file)))
        server.start()
        there.close()
        try:
            engine, path, url = here.recv()
            results: dict[str, Any] = {"step_ms": options.step, "path": path, "processes": options.processes,
                                       "prompt_words": options.prompt_words, "answer_tokens": options.answer_tokens,
                                       "seconds": options.seconds, "streams": {}}  # fmt: skip
            for n in options.streams:
                found = over_http(options, url, n)
                share = found["tokens_per_s"] / engine[n]
                results["streams"][str(n)] = {"engine_tokens_per_s": engine[n], "http": found, "share": share}
                print(f"{n} streams: the engine alone {engine[n]:,.0f} tokens/s, over HTTP {share:.0%} of them; "
                      f"{1e6 * found['cpu_s_per_token']:.1f} us of CPU for a token")  # fmt: skip
        finally:
            server.terminate()
            server.join()
    import torch  # noqa: F401  (the record names the card of a program that uses one)

    record("serving_http", results, options.folder)


if __name__ == "__main__":
    main()
