"""Send requests at random moments to any server of completions or chats, and record when each piece arrives.

python -m lib.bench.load --url http://127.0.0.1:8000/v1 --rate 4
python -m lib.bench.load --url http://127.0.0.1:8000/v1 --rate 4 16 64 --chat --first 0.5 --between 0.05 --plot load.png
python -m lib.bench.load --url http://127.0.0.1:8000/v1 --rate 150 --processes 8
python -m lib.bench.load --url http://127.0.0.1:8000/v1 --streams 64 192 --processes 8
python -m lib.bench.load --url http://127.0.0.1:8000/v1 --trace requests.jsonl

The loop is open: requests leave at the moments of a Poisson process, or of a trace, whether or not the server has
answered those before. Only requests of the steady window count, after the warm-up; others go on until these have
ended, so that the last of them meet the same load as the first. A line of a trace is an object with ``at``, in
seconds, ``max_tokens``, and ``prompt`` or ``messages``.

``--streams`` closes the loop: so many requests are always open, the next one leaves when one has ended. That shows what
the server can carry, not how long clients wait.

One process can receive some ten thousand pieces of text a second. ``--processes`` splits the requests of one load among
several, each of which sends until its own requests of the window have ended.

The key of the server is read from the variable ``SERVE_API_KEY``.
"""

import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

from lib.bench.clients import Clients, certificates, find_model
from lib.given.data.corpora import language_reference
from lib.runs.flags import ProgramParser, UsageError, positive, whole

BEHIND_S = 0.05  # a request that leaves so late was held up by this program
AGAIN_S = 0.1  # after which a stream whose request failed asks again
GREW = 1.5  # times as many open requests at the window's end as in its middle: the server does not keep up


@dataclass(frozen=True)
class Ask:
    """A request of the load: when it leaves, in seconds, and what it asks for."""

    at: float
    fields: dict[str, Any]


@dataclass
class Seen:
    """What became of a request; moments are in seconds since the load began.

    Attributes:
        ask: The request.
        left: When it really left.
        pieces: When each piece of text arrived.
        n_tokens: Tokens of the answer, as the server counts them; None if it does not say.
        ended: When the answer was complete or failed; None while it is open.
        error: What went wrong; empty if nothing did.
    """

    ask: Ask
    left: float = 0.0
    pieces: list[float] = field(default_factory=list)
    n_tokens: int | None = None
    ended: float | None = None
    error: str = ""

    @property
    def tokens(self) -> int:
        return self.n_tokens if self.n_tokens is not None else len(self.pieces)

    @property
    def first_s(self) -> float:
        """From the moment at which it should have left."""
        return self.pieces[0] - self.ask.at

    @property
    def between_s(self) -> float:
        """Mean time between two tokens."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


# ---- what is asked ---------------------------------------------------------------------------------------------------


def drawn(options: Any, rate: float) -> Iterator[Ask]:
    """Requests without end, whose arrivals are a Poisson process; a seed repeats them all."""
    chance, now, words = random.Random(options.seed), 0.0, language_reference().split()
    for number in count():
        now += chance.expovariate(rate)
        begin, n = chance.randrange(len(words)), chance.randint(*options.prompt_words)
        text = f"{number} " + " ".join(words[(begin + i) % len(words)] for i in range(n))
        fields: dict[str, Any] = {"max_tokens": chance.randint(*options.answer_tokens)}
        if options.ignore_eos:
            fields["ignore_eos"] = True
        said = {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
        yield Ask(now, fields | said)


def read_trace(path: Path) -> list[Ask]:
    """The requests of a trace, in order of time.

    Raises:
        UsageError: the file cannot be read, or a line is no request; the message names the line.
    """
    asks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--trace {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            fields = dict(json.loads(line))
            asks.append(Ask(float(fields.pop("at")), fields))
        except (ValueError, TypeError, KeyError) as error:
            text = f"expected an object with at, max_tokens, and prompt or messages ({type(error).__name__}: {error})"
            raise UsageError(f"--trace {path}: line {number}: {text}") from None
    if not asks:
        raise UsageError(f"--trace {path} has no lines: expected one for each request")
    return sorted(asks, key=lambda ask: ask.at)


# ---- asking ----------------------------------------------------------------------------------------------------------


class Load:
    """One load, or one process's part of it.

    Args:
        client: Of the server: `Clients`, or an ``httpx.AsyncClient``.
        model: What the server calls its model.
        asks: The requests in order of time, perhaps without end.
        window: Where the steady window begins and ends, in seconds.
        drain_s: How long after the window's end its last requests are waited for.
        n_streams: Requests that are always open; None: they leave when they should.
    """

    def __init__(
        self, client: Any, model: str, asks: Iterator[Ask], window: tuple[float, float], drain_s: float,
        n_streams: int | None = None,
    ) -> None:  # fmt: skip
        self.client, self.model, self.asks, self.window, self.drain_s = client, model, asks, window, drain_s
        self.n_streams, self.seen = n_streams, list[Seen]()

    async def run(self) -> None:
        """Send requests until those of the window have ended, and give up what is still open then."""
        self.began, tasks = time.perf_counter(), set[asyncio.Task]()
        for _ in range(self.n_streams or 0):
            tasks.add(asyncio.create_task(self._stream()))
        for ask in self.asks if self.n_streams is None else ():
            while (left := ask.at - self.now()) > 0 and not self.is_over():
                await asyncio.sleep(min(left, 0.05))
            if self.is_over():
                break
            self.seen.append(Seen(ask, self.now()))
            tasks.add(asyncio.create_task(self._ask(self.seen[-1])))
        while not self.is_over() and not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self) -> None:
        """Send one request after another."""
        for ask in self.asks:
            seen = Seen(Ask(self.now(), ask.fields), self.now())
            self.seen.append(seen)
            await self._ask(seen)
            if seen.error:
                await asyncio.sleep(AGAIN_S)

    def now(self) -> float:
        return time.perf_counter() - self.began

    def is_over(self) -> bool:
        """Whether the window is over, and all its requests have ended or were waited for long enough."""
        now, end = self.now(), self.window[1]
        return now > end and (now > end + self.drain_s or all(seen.ended is not None for seen in self.counted()))

    def counted(self) -> list[Seen]:
        """The requests of the steady window."""
        begin, end = self.window
        return [seen for seen in self.seen if begin <= seen.ask.at < end]

    async def _ask(self, seen: Seen) -> None:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **seen.ask.fields}
        path = "chat/completions" if "messages" in body else "completions"
        try:
            async with self.client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    seen.error = f"status {answer.status_code}"
                else:
                    async for line in answer.aiter_lines():
                        self._note(seen, line)
        except Exception as error:  # the connection, or an answer that is no stream of events
            seen.error = type(error).__name__
        seen.error = seen.error or ("" if seen.pieces else "no text")
        seen.ended = self.now()

    def _note(self, seen: Seen, line: str) -> None:
        """Note a line of an answer's stream."""
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return
        event = json.loads(line.removeprefix("data:"))
        if "error" in event:
            seen.error = "error in the stream"
        if event.get("usage"):
            seen.n_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", []):
            if choice.get("text") or choice.get("delta", {}).get("content"):
                seen.pieces.append(self.now())


# ---- what it means ---------------------------------------------------------------------------------------------------


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile; of nothing, nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 90, 99)}


def n_open(load: Load, moment: float) -> int:
    """Requests that had left and not ended at some moment."""
    return sum(s.left <= moment and (s.ended is None or s.ended > moment) for s in load.seen)


def summarize(load: Load, limits: tuple[float, float]) -> dict[str, Any]:
    """Rates and waiting times of the window's requests.

    Args:
        load: A load that was run.
        limits: Seconds to the first token, and between two tokens on average, within which an answer is good.
    """
    begin, end = load.window
    counted = load.counted()
    whole_ones = [s for s in counted if s.ended is not None and not s.error]
    good = sum(s.first_s <= limits[0] and s.between_s <= limits[1] for s in whole_ones)
    arrived = sum(begin <= moment < end for s in load.seen for moment in s.pieces)
    n_pieces, n_tokens = sum(len(s.pieces) for s in whole_ones), sum(s.tokens for s in whole_ones)
    middle, last = n_open(load, (begin + end) / 2), n_open(load, end)
    return {
        "requests": len(counted),
        "requests_per_s": len(counted) / (end - begin),
        "answered": len(whole_ones),
        "errors": dict(Counter(s.error for s in counted if s.error)),
        "unfinished": sum(s.ended is None for s in counted),
        "tokens_per_s": arrived * (n_tokens / n_pieces if n_pieces else 0.0) / (end - begin),
        "first_token_s": percentiles([s.first_s for s in whole_ones]),
        "between_tokens_s": percentiles([s.between_s for s in whole_ones if s.tokens > 1]),
        "between_pieces_s": percentiles([b - a for s in whole_ones for a, b in pairwise(s.pieces)]),
        "whole_s": percentiles([s.pieces[-1] - s.ask.at for s in whole_ones]),
        "goodput": {"requests_per_s": good / (end - begin), "share": good / len(counted) if counted else 0.0,
                    "first_token_s": limits[0], "between_tokens_s": limits[1]},
        "open_requests": {"middle": middle, "end": last},
        "server_kept_up": last <= GREW * middle + 5,
        "latest_start_s": max((s.left - s.ask.at for s in counted), default=0.0),
    }  # fmt: skip


def told(found: dict[str, Any]) -> str:
    """A summary in a few lines."""
    lines = [f"{found['requests_per_s']:.2f} requests/s: {found['answered']} of {found['requests']} answered, "
             f"{found['tokens_per_s']:,.0f} tokens/s, good {found['goodput']['share']:.0%}"]  # fmt: skip
    for name, text in (("first_token_s", "first token"), ("between_tokens_s", "between tokens"), ("whole_s", "whole")):
        if found[name]:
            lines.append(f"  {text:15s}" + "".join(f"{p} {1e3 * s:9,.1f} ms   " for p, s in found[name].items()))
    lines += [f"  {n} requests failed: {error}" for error, n in found["errors"].items()]
    if found["unfinished"]:
        lines.append(f"  {found['unfinished']} requests had not ended when the load was")
    if not found["server_kept_up"]:
        middle, end = found["open_requests"].values()
        lines.append(
            f"  the server did not keep up: {middle} requests were open in the window's middle, {end} at its end"
        )
    if found["latest_start_s"] > BEHIND_S:
        lines.append(f"  this program fell behind by {found['latest_start_s']:.2f} s: its times are too long; "
                     "expected more --processes")  # fmt: skip
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Waiting times over the rate of requests; a mark for each load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    kinds = (("first_token_s", "first token"), ("between_tokens_s", "between tokens"))
    for place, (name, title) in zip(places, kinds, strict=True):
        answered = [found for found in results.values() if found[name]]
        for p in ("p50", "p90", "p99"):
            rates = [found["requests_per_s"] for found in answered]
            place.plot(rates, [1e3 * found[name][p] for found in answered], "o-", label=p)
        place.set(title=title, xlabel="requests a second", ylabel="ms", ylim=(0, None))
        place.legend()
    figure.savefig(path)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def make_parser() -> ProgramParser:
    """All flags of this program."""
    parser = ProgramParser(prog="python -m lib.bench.load", description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", required=True, help="of the interface, which usually ends in /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--rate", nargs="+", type=positive, default=[1.0], help="requests a second, one load for each")
    parser.add_argument("--trace", type=Path, help="send these requests instead, one load")
    parser.add_argument(
        "--streams", nargs="+", type=whole(1), help="keep so many requests open instead, one load for each"
    )
    parser.add_argument("--processes", type=whole(1), default=1, help="that share a load")
    parser.add_argument("--chat", action="store_true", help="send messages, not prompts")
    parser.add_argument("--warm-up", type=positive, default=10.0, help="seconds before the steady window")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of the steady window")
    parser.add_argument("--drain", type=positive, default=60.0, help="seconds in which its last requests may end")
    parser.add_argument("--prompt-words", nargs=2, type=whole(1), default=[32, 384], metavar=("LEAST", "MOST"))
    parser.add_argument("--answer-tokens", nargs=2, type=whole(1), default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--ignore-eos", action="store_true", help="ask for answers of full length (this book, vLLM)")
    parser.add_argument(
        "--first", type=positive, default=1.0, help="a good answer's seconds to the first token at most"
    )
    parser.add_argument("--between", type=positive, default=0.1, help="and between tokens on average")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--plot", type=Path, help="and a picture of waiting times here")
    return parser


def names_of(options: Any) -> list[str]:
    """A name for each load."""
    if options.trace:
        return [str(options.trace)]
    return [f"{n} streams" for n in options.streams] if options.streams else [f"{rate:g}" for rate in options.rate]


async def send(options: Any, model: str, number: int, part: int) -> list[Seen]:
    """One process's part of the load with this number."""
    share: Any = None
    if options.trace:
        asks = iter(read_trace(options.trace))
    elif options.streams:
        asks = drawn(options, 1.0)
        share = options.streams[number] // options.processes + (part < options.streams[number] % options.processes)
    else:
        asks = drawn(options, options.rate[number])
    own = islice(asks, part, None, options.processes)
    clients = Clients(options)
    load = Load(clients, model, own, window_of(options), options.drain, share)
    await load.run()
    await clients.close()
    return load.seen


def window_of(options: Any) -> tuple[float, float]:
    return options.warm_up, options.warm_up + options.seconds


_meet: Any = None  # of a pool's processes, which begin a load together


def prepare(meet: Any = None) -> None:
    """Read what the first request needs while no load runs: it takes longer than the next request can wait."""
    global _meet
    _meet = meet
    certificates()
    language_reference()


def _send(options: Any, model: str, number: int, part: int) -> list[Seen]:
    _meet.wait()
    return asyncio.run(send(options, model, number, part))


def run(options: Any) -> dict[str, dict[str, Any]]:
    """Every load's summary, by its rate, its number of streams or the trace's name."""
    model, n, results = asyncio.run(find_model(options)), options.processes, dict[str, dict[str, Any]]()
    prepare()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n, context, prepare, (context.Barrier(n),)) as pool:
        for number, name in enumerate(names_of(options)):
            whole_load = Load(None, model, iter(()), window_of(options), options.drain)
            if n == 1:
                whole_load.seen = asyncio.run(send(options, model, number, 0))
            else:
                parts = [pool.submit(_send, options, model, number, part) for part in range(n)]
                whole_load.seen = [seen for part in parts for seen in part.result()]
            results[name] = summarize(whole_load, (options.first, options.between))
            print(told(results[name]), flush=True)
    return results


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if no request was answered, or 2 after a line about what is wrong."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("prompt_words", "answer_tokens"):
        least, most = getattr(options, name)
        if least > most:
            parser.error(f"--{name.replace('_', '-')} {least} {most}: expected the smaller number first")
    try:
        results = run(options)
    except UsageError as error:
        parser.error(str(error))
    if options.out:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings, "loads": results}, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)
    return 0 if any(found["answered"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
