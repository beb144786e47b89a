"""Serve a model over HTTP, with the interface for completions and chats that the field's clients speak.

python -m lib.runs.serve --model tiny --port 8000
python -m lib.runs.serve --model runs/gpt2 --port 8000
python -m lib.runs.serve --model ~/models/Llama-2-7b-hf --port 8000 --api-key "$KEY" --host 0.0.0.0

On SIGTERM the server completes the requests that it has begun, refuses new ones, and exits with status 0, or with 1 if
its engine has failed before. A second signal ends it at once.
"""

import argparse
import gc
import importlib.util
import ipaddress
import logging
import os
import socket
import sys
import time
from typing import Any

from lib.runs.flags import Parser, UsageError, positive, whole
from lib.runs.serving.wire import EngineFailed

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "tokenizers", "jinja2")
KEY_VARIABLE = "SERVE_API_KEY"
DTYPES = ("float32", "bf16", "float16")
MOST_RANKS = 8
"""Of a model: the GPUs of a host."""


def filled(text: str) -> str:
    """For ``type=``: accepts any text but an empty one, which a shell makes of a variable that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a text that is not empty; is a variable not set?")
    return text


def key(text: str) -> str:
    """For ``type=``: accepts what a client can put into a header. The message does not show it."""
    if text != filled(text).strip() or not all(
        letter.isprintable() or "\udc80" <= letter <= "\udcff" for letter in text
    ):
        raise argparse.ArgumentTypeError("expected a key without spaces around it, line breaks and control characters")
    return text


def make_parser() -> Parser:
    """The flags."""
    parser = Parser(prog="python -m lib.runs.serve", description="Serve a model over HTTP.", allow_abbrev=False)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        type=filled,
        metavar="tiny|FOLDER",
        help="tiny; a --checkpoint of lib.runs; or a folder in Transformers' format: of a Llama, GPT-2, Qwen3, OLMo 3, "
        "Gemma 2 or 3, gpt-oss (not in MXFP4), or a Qwen3-Next without experts",
    )
    model.add_argument("--name", type=filled, help="what clients call the model; default: the folder's name")
    model.add_argument(
        "--tokenizer",
        type=filled,
        metavar="bytes|gpt2|FILE",
        help="bytes, gpt2 (tiktoken's) or a tokenizer.json; default: the folder's, or bytes",
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model.add_argument("--dtype", choices=DTYPES, help="of weights and cache; default: bf16 on a GPU, float32 on a CPU")
    model.add_argument(
        "--quantize", choices=("int4", "float8"),
        help="keep the weights of the model's blocks in 4 or 8 bits, in chapter 20's formats; the server says at its "
        "start what that costs; default: as --dtype",
    )  # fmt: skip
    model.add_argument("--threads", type=whole(1), help="of PyTorch on a CPU")
    model.add_argument(
        "--tensor", type=whole(1, MOST_RANKS), default=1, metavar="RANKS",
        help="divide a Llama among so many ranks, a process each, with chapter 13's layers: every rank holds some of "
        "the heads with their cache, and some of the feed-forward features. Each rank has a GPU of its own (NCCL), or "
        "they share the CPU (gloo); default: 1",
    )  # fmt: skip
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--port", type=whole(0), default=8000, help="0: one that is free, which the first line of the output names"
    )
    http.add_argument("--host", type=filled, default="127.0.0.1",
                      help="default: 127.0.0.1, which only this machine can reach")  # fmt: skip
    http.add_argument(
        "--api-key",
        type=key,
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"what clients must present; default: {KEY_VARIABLE}, which other users of the machine do not see",
    )
    http.add_argument("--grace", type=positive, default=120.0, help="seconds after SIGTERM for what has begun")
    http.add_argument(
        "--stall", type=positive, default=60.0,
        help="seconds without a step, while there are requests, after which /health says 503",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    load.add_argument(
        "--max-queue", "--queue", dest="queue", type=whole(1), default=256,
        help="requests that may wait for room in the cache; one more is refused with status 429",
    )  # fmt: skip
    load.add_argument(
        "--max-tokens", type=whole(1), default=2048, help="tokens that a step passes through the model at most"
    )
    load.add_argument(
        "--draft", type=filled, metavar="prompt|FOLDER",
        help="draft tokens, by what followed the last few earlier in the text, or by a small model with the same "
        "tokenizer; the answers keep their distribution",
    )  # fmt: skip
    load.add_argument("--drafted", type=whole(1), default=7, help="tokens that are drafted for a step at most")
    load.add_argument(
        "--blocks", type=whole(1), help="blocks of the cache; default: what fits into 0.9 of a GPU's free memory"
    )
    load.add_argument(
        "--cache-dtype", choices=("float8", "int8"),
        help="keep keys and values in 8 bits; the server says at its start what that costs; default: as --dtype",
    )  # fmt: skip
    load.add_argument("--block-size", type=whole(1), default=16, help="positions in a block")
    return parser


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening: a port in use is found before the model is loaded.

    Raises:
        UsageError: there is no such address, or somebody else has the port.
    """
    if port > 65_535:  # the system would take it modulo 65,536
        raise UsageError(f"--port {port}: expected 65535 at most")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: no such name can exist
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--host {host} --port {port}: {reason}; expected an address of this machine and a free port"
        ) from None
    return bound


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def make_service(options: Any) -> Any:
    """Start the engine's process, wait until the model is loaded, and make all that the HTTP side needs.

    Raises:
        UsageError: the model cannot be loaded, or something does not fit into memory.
    """
    from lib.runs.serving import process
    from lib.runs.serving.api import Service
    from lib.runs.serving.link import Link
    from lib.runs.serving.metrics import Metrics

    begun, connection, ready = process.start(_engine, options, n_ranks=options.tensor)
    metrics = Metrics(ready.n_blocks)
    metrics.tell_path(ready.path[0])
    metrics.position_bytes.set(ready.position_bytes)
    return Service(
        name=ready.name, tokenizer=ready.tokenizer, link=Link(connection, options.queue, metrics, begun, options.stall),
        metrics=metrics, vocab_size=ready.vocab_size, context_len=ready.context_len, template=ready.template,
        key=options.api_key, aliases=(options.model,), path=ready.path[1],
        notes=ready.notes,
    )  # fmt: skip


def _engine(connection: Any, options: Any, *place: Any) -> None:
    if place:
        from lib.runs.serving import divided  # in the engine's process: this one has no use for PyTorch

        divided.main(connection, options, *place)
    else:
        from lib.runs.serving import engine

        engine.main(connection, options)


def check_tensor(options: Any) -> None:
    """Refuse what the engine on several ranks does not do, before any process is started.

    Raises:
        UsageError: it is asked for.
    """
    for name, value in (("quantize", options.quantize), ("draft", options.draft), ("cache-dtype", options.cache_dtype)):
        if options.tensor > 1 and value:
            raise UsageError(
                f"--tensor {options.tensor} with --{name} {value}: a model that is divided among ranks has no "
                f"--{name}; expected one of the two flags"
            )


def make_server(service: Any, grace_s: float, url: str) -> Any:
    """uvicorn's server, which prints its address once it handles signals, and shuts down in good order."""
    import uvicorn

    from lib.runs.serving.api import make_app

    class Server(uvicorn.Server):
        """Keeps listening while it completes what it has begun, so that new requests get a refusal.

        Ends by itself when the engine has failed.
        """

        asked_at = float("inf")

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"serving {service.name} at {url}", flush=True)
            print(f"a page to try it: {url.removesuffix('v1')}", flush=True)
            if service.path:
                print(f"each step takes {service.path}", *service.notes, sep="\n", flush=True)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.is_leaving:
                self.should_exit = self.force_exit = True
            service.is_leaving, self.asked_at = True, min(self.asked_at, time.monotonic())

        async def on_tick(self, counter: int) -> bool:
            is_over = time.monotonic() > self.asked_at + grace_s
            if service.link.error or (service.is_leaving and (service.n_open == 0 or is_over)):
                self.should_exit = True
            return await super().on_tick(counter)

    config = uvicorn.Config(make_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    return Server(config)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a signal, 1 if the engine failed, before it or without one,
    or 2 after one line about what is wrong with the request.
    """
    try:
        options = make_parser().parse_args(argv)
        logging.basicConfig(format="%(asctime)s %(message)s")  # on stderr
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"{', '.join(missing)}: not installed; pip install 'scaling-workbook[serve]'")
        check_tensor(options)
        bound = open_socket(options.host, options.port)
        address, port = bound.getsockname()[:2]
        if options.api_key is None and not is_loopback(address):
            print(
                f"warning: anybody who reaches {address} may use this server; --api-key asks for a key", file=sys.stderr
            )
        service = make_service(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EngineFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run(service, bound, f"http://{f'[{address}]' if ':' in address else address}:{port}/v1", options.grace)


def run(service: Any, bound: socket.socket, url: str, grace_s: float) -> int:
    """Serve until a signal comes or the engine fails; returns the exit status."""
    logging.getLogger("workbook.serve").setLevel(logging.INFO)
    server = make_server(service, grace_s, url)
    bound.listen(1024)
    gc.freeze()  # a collection would look at every object that exists by now, while all answers wait
    server.run(sockets=[bound])
    gc.unfreeze()  # or Triton would report all of its types as leaks
    if service.link.error:
        print(f"error: {service.link.error}", file=sys.stderr)
    return 1 if service.link.error or service.link.unhealthy else 0


if __name__ == "__main__":
    sys.exit(main())
