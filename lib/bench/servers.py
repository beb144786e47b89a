"""Send one load over HTTP to the book's server and to Transformers', and record what the clients see.

Both serve the same folder, each as a program of its own: ``python -m lib.runs.serve``, and ``transformers serve`` with
continuous batching, which needs ``pip install accelerate openai``. The folder holds the Llama of a billion parameters
of ``lib.bench.serving``, with random weights and no token that ends an answer. ``lib.bench.load`` sends requests at
random moments, whether or not those before are answered, and counts those of a steady window.

A server that does not keep up with a rate gets no higher one.
The book's server gets four loads more. Three are at the highest rate: with a cache so small that the youngest requests
lose their blocks and begin again; with prompts that begin alike; and with prompts as long that differ from the first
word. In the fourth a prompt of 360 words is sent when the answer before is complete, so the server does nothing else.

Run ``python -m lib.bench.servers`` on a GPU; it adds to ``chapters/measurements/servers.json`` after each load.
``--tensor 1 2 4`` serves Llama 2 7B's shape instead, divided among so many GPUs, to 1 and to 64 clients that each send
the next request when one is answered, and writes ``servers_tensor.json``.
``--tiny --device cpu`` tries the program.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from lib.bench import load
from lib.bench.kit import record
from lib.bench.serving import LARGE, SMALL
from lib.bench.serving_http import CONTEXT, VOCAB, read_metrics, write_tokenizer
from lib.given.data.corpora import language_reference
from lib.given.data.record import MEASUREMENTS
from lib.given.data.record import load as load_record
from lib.given.models.llama import LLAMA_2_7B, LlamaConfig, hf_tensors
from lib.runs.flags import ProgramParser, positive, whole

BOOK, TRANSFORMERS = "this book", "Transformers"
TIGHT, ALIKE, DIFFERENT = "a small cache", "prompts that begin alike", "prompts that do not"
ALONE = "one prompt at a time"
LOADS = (BOOK, TRANSFORMERS, TIGHT, ALIKE, DIFFERENT, ALONE)
SERVERS = {BOOK: (ALONE, BOOK, ALIKE, DIFFERENT), TRANSFORMERS: (TRANSFORMERS,), TIGHT: (TIGHT,)}
"""The loads that each server gets."""
START_S = 300.0  # in which a server must answer
COMMON, OWN = 256, (16, 64)  # words with which prompts begin alike; fewest and most that follow
WORDS, ANSWER = 360, 16  # of a prompt that is alone; tokens of its answer
COUNTS = ("workbook_preemptions_total", "workbook_prefix_tokens_found_total", "workbook_prompt_tokens_total")
VLLM = (
    "for your own vLLM: vllm serve FOLDER --max-model-len 2048, then\n"
    "python -m lib.bench.load --url http://127.0.0.1:8000/v1 --ignore-eos --rate 16 64 --processes 8"
)


def write_folder(config: LlamaConfig, folder: Path, device: str) -> None:
    """A Llama with random weights and a tokenizer, in Transformers' format."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    c, generator = config, torch.Generator(device).manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": c.dim, "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
    }  # fmt: skip
    sizes |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu"}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    weights = {}
    for name, (_, shape) in hf_tensors(replace(c, vocab_size=VOCAB)).items():
        made = torch.full(shape, 1.0 if len(shape) == 1 else 0.0, dtype=torch.bfloat16, device=device)
        weights[name] = (made if len(shape) == 1 else made.normal_(std=0.02, generator=generator)).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def command(name: str, folder: Path, options: Any) -> list[str]:
    """The program of a server of a folder, with its own defaults on a GPU, but for the port."""
    small = options.device == "cpu"
    if name == TRANSFORMERS:
        sizes = ["--cb-num-blocks", "64", "--cb-block-size", "16", "--cb-max-batch-tokens", "64"] if small else []
        theirs = str(Path(sys.executable).with_name("transformers"))
        begin = [theirs] if Path(theirs).exists() else [sys.executable, "-m", "transformers.cli.transformers"]
        return [*begin, "serve", str(folder), "--continuous-batching", "--device", options.device,
                "--port", str(options.port), *sizes]  # fmt: skip
    more = ["--blocks", str(options.blocks)] if name == TIGHT else []
    more += ["--tensor", str(options.ranks)] if options.ranks > 1 else []
    return [sys.executable, "-m", "lib.runs.serve", "--model", str(folder), "--device", options.device,
            "--port", str(options.port), "--max-queue", "100000", *more]  # fmt: skip


@contextmanager
def serving(name: str, folder: Path, options: Any) -> Iterator[str]:
    """A server that answers; its address.

    Raises:
        RuntimeError: it ended, or did not answer in time; the message holds the end of what it wrote.
    """
    log = folder.parent / "server.log"
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{options.port}/v1"
    with log.open("w") as out:
        process = subprocess.Popen(command(name, folder, options), stdout=out, stderr=subprocess.STDOUT, env=offline)
    try:
        end = time.monotonic() + START_S
        while not answers(url, model_of(name, folder)):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name} does not answer at {url}:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def model_of(name: str, folder: Path) -> str:
    """What a client calls the model."""
    return str(folder) if name == TRANSFORMERS else folder.name


def answers(url: str, model: str) -> bool:
    """Whether a server answers a request; the first one may also load and compile."""
    import httpx

    try:
        asked = {"model": model, "prompt": "a b c", "max_tokens": 2}
        return httpx.post(f"{url}/completions", json=asked, timeout=START_S).status_code == 200
    except httpx.TransportError:
        return False


def write_trace(path: Path, rate: float, options: Any, *, alike: bool) -> None:
    """Requests of a Poisson process whose prompts begin with the same words, or with a number each and then those."""
    chance, words = random.Random(options.seed), language_reference().split()
    asks = load.drawn(options, rate)
    end = options.warm_up + options.seconds + options.drain
    with path.open("w", encoding="utf-8") as out:
        for number, ask in enumerate(takewhile(lambda ask: ask.at < end, asks)):
            begin, n = chance.randrange(len(words) - OWN[1]), chance.randint(*OWN)
            parts = [" ".join(words[:COMMON]), str(number), " ".join(words[begin : begin + n])]
            prompt = " ".join(parts if alike else [parts[1], parts[0], parts[2]])
            print(json.dumps({"at": ask.at, **ask.fields, "prompt": prompt}), file=out)


def measure(name: str, url: str, folder: Path, options: Any) -> dict[str, Any]:
    """A summary for each of the loads, by its rate, and how the book's server counted; the first with which the server
    does not keep up is the last.
    """
    top = 1.0 if name == ALONE else max(options.rate)
    rates = options.rate if name in (BOOK, TRANSFORMERS) else [top]
    found = {}
    for rate in rates:
        words = shared_words(name, url, folder, options) + load_words(name, rate, folder, options)
        before = counts(url) if name != TRANSFORMERS else {}
        print(f"{name}, {rate:g} requests/s" if name != ALONE else name, flush=True)
        (found[f"{rate:g}"],) = load.run(load.make_parser().parse_args(words)).values()
        if before:
            after = counts(url)
            found[f"{rate:g}"]["counted"] = {key: after[key] - before[key] for key in COUNTS}
        if not found[f"{rate:g}"]["server_kept_up"]:
            break
    return found


def shared_words(name: str, url: str, folder: Path, options: Any) -> list[str]:
    """The server, the model and the window, as arguments of ``lib.bench.load``."""
    return ["--url", url, "--model", model_of(name, folder), "--warm-up", str(options.warm_up), "--seconds",
            str(options.seconds), "--drain", str(options.drain), "--seed", str(options.seed)]  # fmt: skip


def load_words(name: str, rate: float, folder: Path, options: Any) -> list[str]:
    """What is asked for and when, as arguments of ``lib.bench.load``."""
    if name == ALONE:
        return ["--streams", "1", "--prompt-words", *[str(WORDS)] * 2, "--answer-tokens", *[str(ANSWER)] * 2]
    words = lengths(options)
    if name in (ALIKE, DIFFERENT):
        write_trace(folder.parent / "trace.jsonl", rate, options, alike=name == ALIKE)
        return [*words, "--trace", str(folder.parent / "trace.jsonl")]
    return [*words, "--rate", str(rate)]


def lengths(options: Any) -> list[str]:
    """How many clients' processes there are and how long prompts and answers, as arguments of ``lib.bench.load``."""
    return ["--processes", str(options.processes), "--prompt-words", *map(str, options.prompt_words),
            "--answer-tokens", *map(str, options.answer_tokens)]  # fmt: skip


def counts(url: str) -> dict[str, float]:
    metrics = read_metrics(url)
    return {name: metrics[name] for name in COUNTS}


def make_parser() -> ProgramParser:
    parser = ProgramParser(prog="python -m lib.bench.servers", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS), help="measure these, keep the others")
    parser.add_argument("--rate", nargs="+", type=positive, default=[4.0, 16.0, 64.0], help="requests a second")
    parser.add_argument("--blocks", type=whole(1), default=1200, help="of 16 positions, of the small cache")
    parser.add_argument("--processes", type=whole(1), default=8, help="of clients")
    parser.add_argument("--warm-up", type=positive, default=10.0, help="seconds before the steady window")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of the steady window")
    parser.add_argument("--drain", type=positive, default=30.0, help="seconds in which its last requests may end")
    parser.add_argument("--prompt-words", nargs=2, type=whole(1), default=[32, 384], metavar=("LEAST", "MOST"))
    parser.add_argument("--answer-tokens", nargs=2, type=whole(1), default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--tensor", nargs="+", type=whole(1), metavar="GPUS", help="divide a 7B among so many instead")
    parser.add_argument("--port", type=whole(1, 65535), default=8199)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.set_defaults(ranks=1, chat=False, ignore_eos=False)  # as for ``lib.bench.load``; no token ends an answer
    return parser


def measure_divided(settings: dict[str, Any], options: Any) -> None:
    """Serve a Llama divided among several numbers of GPUs, and record what clients see."""
    results: dict[str, Any] = {"settings": settings, "gpus": {}}
    config = SMALL if options.tiny else replace(LLAMA_2_7B, context_len=CONTEXT)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "llama")
        write_folder(config, folder, options.device)
        for n in options.tensor:
            options.ranks = n
            with serving(BOOK, folder, options) as url:
                words = [*shared_words(BOOK, url, folder, options), *lengths(options), "--streams", "1", "64"]
                found = load.run(load.make_parser().parse_args(words))
            results["gpus"][str(n)] = dict(zip(("1", "64"), found.values(), strict=True))
            record("servers_tensor", results, options.folder)


def measure_loads(settings: dict[str, Any], options: Any) -> None:
    """Serve a Llama of a billion parameters by each server, and record what clients see."""
    results: dict[str, Any] = {"settings": settings, "loads": {}}
    if options.only != list(LOADS) and (options.folder / "servers.json").exists():
        results["loads"] = load_record("servers", options.folder)["results"]["loads"]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "llama")
        write_folder(SMALL if options.tiny else LARGE.config, folder, options.device)
        for server, loads in SERVERS.items():
            if wanted := [name for name in loads if name in options.only]:
                with serving(server, folder, options) as url:
                    for name in wanted:
                        results["loads"][name] = measure(name, url, folder, options)
                        record("servers", results, options.folder)


def main(argv: list[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    names = ("tiny", "warm_up", "seconds", "prompt_words", "answer_tokens", "blocks", "processes")
    settings = {name: getattr(options, name) for name in names}
    import torch  # noqa: F401  (the record names the card of a program that uses one)

    if options.tensor:
        measure_divided(settings, options)
    else:
        measure_loads(settings | {"common_words": COMMON, "own_words": OWN}, options)
    print(VLLM)


if __name__ == "__main__":
    main()
