"""Send requests at random times and growing rates to a Llama of a billion parameters; record when each token arrives.

Five competitors serve the same requests: chapter 21's ``Engine``, without CUDA graphs and with them; the server's
engine, which works one step ahead; Transformers' ``generate`` on static batches (a batch holds all requests that wait
when the batch before it ends); and Transformers' continuous batching. The model has about one billion parameters.
Its weights are random, which does not affect the speed.

Run ``python -m lib.bench.serving`` on a GPU; it adds to ``chapters/measurements/serving.json`` after each load.
``--tiny --device cpu`` tries the program.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lib.bench.kit import record, spread
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request
from lib.llama import Llama
from lib.runs.flags import ProgramParser, positive
from lib.runs.serving.prefix import PrefixEngine
from lib.serving import Engine, Scheduler

ONE_B = LlamaConfig(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, hidden_dim=5632, context_len=2048)
SMALL = LlamaConfig(vocab_size=128, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, context_len=128)
MAX_TOKENS, BLOCK_SIZE, MAX_BATCH = 2048, 16, 256  # tokens of a step; positions of a block; sequences of a static batch
IDLE_S = 0.0005
N_STEPS = 30  # that are timed

Times = list[list[float]]
"""For each request the moments of its tokens, in seconds since the load began."""


@dataclass(frozen=True)
class Ask:
    """A request of the load: when it arrives, in seconds, its prompt, and how many tokens it wants."""

    arrives_s: float
    tokens: list[int]
    n_new: int


@dataclass(frozen=True)
class Sizes:
    """The model, the load and the rates of one measurement."""

    config: LlamaConfig
    rates: tuple[float, ...]  # requests a second
    n_asks: tuple[int, int]  # fewest and most
    prompts: tuple[int, int]  # shortest and longest, in tokens
    answers: tuple[int, int]
    length: int  # positions of each sequence whose step is timed alone
    batches: tuple[int, ...]  # sequences in such a step


LARGE = Sizes(ONE_B, (1.0, 4.0, 16.0, 64.0), (16, 192), (32, 512), (16, 256), 400, (1, 8, 64, 192))
TINY = Sizes(SMALL, (50.0, 1000.0), (5, 5), (3, 20), (2, 6), 10, (1, 3))
LOAD_S = 8.0  # requests arrive for about this long, if their number allows it


def make_load(sizes: Sizes, rate: float, seed: int = 0) -> list[Ask]:
    """Requests whose arrivals are a Poisson process."""
    chance, now, asks = random.Random(seed), 0.0, []
    fewest, most = sizes.n_asks
    for _ in range(min(most, max(fewest, round(rate * LOAD_S)))):
        now += chance.expovariate(rate)
        tokens = [chance.randrange(sizes.config.vocab_size) for _ in range(chance.randint(*sizes.prompts))]
        asks.append(Ask(now, tokens, chance.randint(*sizes.answers)))
    return asks


class Ours:
    """Chapter 21's engine, on chapter 4's Llama; on a GPU its steps are CUDA graphs."""

    make: Callable[..., Engine] = Engine

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        with torch.device(device):
            self.model = Llama(sizes.config).to(device, dtype).eval()
        n_blocks = sizes.n_asks[1] * -(-(sizes.prompts[1] + sizes.answers[1]) // BLOCK_SIZE)
        self.engine = type(self).make(self.model, Scheduler(MAX_TOKENS, n_blocks, BLOCK_SIZE))
        if self.engine.steps is not None:
            self.engine.steps.warm_up()

    def serve(self, asks: list[Ask]) -> Times:
        engine, times = self.engine, [list[float]() for _ in asks]
        begun, waiting, numbers = time.perf_counter(), list(enumerate(asks)), dict[Request, int]()
        while waiting or engine.is_busy:
            while waiting and waiting[0][1].arrives_s <= time.perf_counter() - begun:
                number, ask = waiting.pop(0)
                request = Request(ask.tokens, ask.n_new)
                numbers[request] = number
                engine.submit(request)
            if not engine.is_busy:
                time.sleep(IDLE_S)
                continue
            new = engine.step()
            now = time.perf_counter() - begun
            for request, _ in new:
                times[numbers[request]].append(now)
        return times

    def step_seconds(self, n: int, length: int) -> dict[str, float]:
        """Time of a step in which each of n sequences of some length gets one token."""
        requests = [Request([7] * length, N_STEPS + 20) for _ in range(n)]
        for request in requests:
            self.engine.submit(request)
        seen = set[Request]()
        while len(seen) < n:
            seen |= {request for request, _ in self.engine.step()}
        times = [time.perf_counter()]
        while len(times) <= N_STEPS:
            self.engine.step()
            times.append(time.perf_counter())
        for request in requests:
            self.engine.cancel(request)
        return spread([after - before for before, after in pairwise(times)])


class Plain(Ours):
    """The same engine, which launches each kernel of a step from Python."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(sizes, device, dtype)
        self.engine.steps = None


class Ahead(Ours):
    """The server's engine, which prepares a step while the GPU computes the one before."""

    make = PrefixEngine


class Theirs:
    """Transformers' Llama of the same sizes."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        import transformers

        c = sizes.config
        config = transformers.LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.hidden_dim, num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, max_position_embeddings=c.context_len,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        with torch.device(device):
            model: Any = transformers.LlamaForCausalLM(config)
        self.model = model.to(device, dtype).eval()
        self.model.generation_config.do_sample = False
        self.device = device


class Static(Theirs):
    """``generate`` on batches: a batch begins when the one before it has ended, with all that have arrived by then."""

    def serve(self, asks: list[Ask]) -> Times:
        times: Times = [[] for _ in asks]
        begun, waiting = time.perf_counter(), list(enumerate(asks))
        while waiting:
            now = time.perf_counter() - begun
            batch = [pair for pair in waiting[:MAX_BATCH] if pair[1].arrives_s <= now]
            if batch:
                waiting = waiting[len(batch) :]
                self._run(batch, begun, times)
            else:
                time.sleep(IDLE_S)
        return times

    def _run(self, batch: list[tuple[int, Ask]], begun: float, times: Times) -> None:
        longest = max(len(ask.tokens) for _, ask in batch)
        rows = [[0] * (longest - len(ask.tokens)) + ask.tokens for _, ask in batch]
        seen = [[0] * (longest - len(ask.tokens)) + [1] * len(ask.tokens) for _, ask in batch]

        def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            ids[0, -1].item()  # waits for the device
            now = time.perf_counter() - begun
            for number, ask in batch:
                if len(times[number]) < ask.n_new:
                    times[number].append(now)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        self.model.generate(
            torch.tensor(rows, device=self.device), attention_mask=torch.tensor(seen, device=self.device),
            max_new_tokens=max(ask.n_new for _, ask in batch), stopping_criteria=[note],
        )  # fmt: skip


class Continuous(Theirs):
    """Transformers' continuous batching, with its own defaults on a GPU."""

    def _settings(self) -> Any:
        from transformers import ContinuousBatchingConfig

        small: dict[str, Any] = {
            "num_blocks": 32,
            "page_size": BLOCK_SIZE,
            "max_batch_tokens": 64,
        }  # on a CPU the defaults would take nine tenths of all memory
        return ContinuousBatchingConfig(**small if self.device.type == "cpu" else {})

    def serve(self, asks: list[Ask]) -> Times:
        times: Times = [[] for _ in asks]
        n_ended = 0
        with self.model.continuous_batching_context_manager(continuous_batching_config=self._settings()) as manager:
            begun, waiting, numbers = time.perf_counter(), list(enumerate(asks)), dict[str, int]()
            while n_ended < len(asks):
                while waiting and waiting[0][1].arrives_s <= time.perf_counter() - begun:
                    number, ask = waiting.pop(0)
                    name = manager.add_request(ask.tokens, max_new_tokens=ask.n_new, record_timestamps=True)
                    numbers[name] = number
                found = manager.get_result(timeout=IDLE_S)
                if found is not None and found.is_finished():
                    if found.error:
                        raise RuntimeError(f"Transformers' continuous batching failed: {found.error}")
                    times[numbers[found.request_id]] = [moment - begun for moment in found.timestamps or []]
                    n_ended += 1
        return times


COMPETITORS: dict[str, Callable[..., Any]] = {
    "Engine, kernel by kernel": Plain,
    "Engine": Ours,
    "Engine of the server": Ahead,
    "Transformers, static": Static,
    "Transformers, continuous": Continuous,
}


def summarize(asks: list[Ask], times: Times) -> dict[str, Any]:
    """Throughput and waiting times under one load. Every request must have received its tokens."""
    for ask, moments in zip(asks, times, strict=True):
        assert len(moments) == ask.n_new, f"{len(moments)} tokens of {ask.n_new}"
    gaps = [b - a for moments in times for a, b in pairwise(moments)]
    last = max(moments[-1] for moments in times)
    return {
        "tokens_per_s": sum(map(len, times)) / (last - asks[0].arrives_s),
        "first_token_s": spread([moments[0] - ask.arrives_s for ask, moments in zip(asks, times, strict=True)]),
        "between_tokens_s": spread(gaps),
        "whole_s": spread([moments[-1] - ask.arrives_s for ask, moments in zip(asks, times, strict=True)]),
    }


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small model and few requests, to try the program")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(COMPETITORS),
        default=list(COMPETITORS),
        help="measure these, and keep the others",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=positive,
        help="measure these loads, in requests a second, and keep the others; default: all",
    )
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    sizes, device = TINY if options.tiny else LARGE, torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = {"dtype": str(dtype).removeprefix("torch."), "n_requests": sizes.n_asks, "prompt_tokens": sizes.prompts,
                "new_tokens": sizes.answers, "step_tokens": MAX_TOKENS, "step_length": sizes.length,
                "config": vars(sizes.config)}  # fmt: skip
    results: dict[str, Any] = {"tiny": options.tiny, "settings": settings, "step_s": {}, "requests_per_s": {}}
    if options.only != list(COMPETITORS) or options.rates:
        known = load("serving", options.folder)["results"]
        results |= {"step_s": known["step_s"], "requests_per_s": known["requests_per_s"]}
    for name in options.only:  # one model at a time is in memory
        torch.manual_seed(0)
        competitor = COMPETITORS[name](sizes, device, dtype)
        competitor.serve(
            make_load(sizes, max(sizes.rates), seed=1)
        )  # warm-up: kernels are compiled, memory is allocated
        if isinstance(competitor, Ours):
            results["step_s"][name] = {n: competitor.step_seconds(n, sizes.length) for n in sizes.batches}
        for rate in options.rates or sizes.rates:
            asks = make_load(sizes, rate)
            found = summarize(asks, competitor.serve(asks))
            results["requests_per_s"].setdefault(f"{rate:g}", {})[name] = found
            record("serving", results, options.folder)
            print(f"{name}, {rate:g} requests/s: {found['tokens_per_s']:,.0f} tokens/s", flush=True)
        del competitor
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
