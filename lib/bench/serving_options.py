"""Time what the server's flags for drafts, for a cache in 8 bits and for narrow weights buy, on a Llama of a billion
parameters.

Drafts, at one request at a time: tokens a second with and without. The weights are random, so a small model that was
trained with the large one does not exist. In its place the draft is the large model's own beginning: its first two
layers and its head. What all further layers add is multiplied by a *damping*, from 0, where the draft is always right,
upwards, so the acceptance is made, not found; what is measured is the speed that each acceptance gives.
``prompt`` drafts from the text, once where it does not repeat and once where it does: there the output layer is made of
the token table, so each token leads to the next of its cycle of 32.

Cache: seconds of a decoding step of 1, 8 and 64 sequences of 1,500 different positions, and the change in the scores.
Weights: the same at 400 positions, with the blocks' weights in bfloat16, int4 and float8, of this model and of one
with Llama 2 7B's shape.

Run ``python -m lib.bench.serving_options`` on a GPU; it writes ``chapters/measurements/serving_options.json``.
``--tiny --device cpu`` tries the program.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from lib.bench.kit import record, spread
from lib.bench.serving import BLOCK_SIZE, MAX_TOKENS, ONE_B, SMALL
from lib.given.data.record import MEASUREMENTS
from lib.given.models.llama import LLAMA_2_7B, LlamaConfig
from lib.given.models.serving import Request
from lib.llama import Llama
from lib.runs.flags import ProgramParser
from lib.runs.serving.draft import DraftEngine
from lib.runs.serving.drafters import ModelDrafter
from lib.runs.serving.packed import measure_cost, position_bytes
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.quantized import FORMATS, matrices, quantize_model
from lib.runs.serving.text import ByteTokenizer
from lib.serving import Scheduler

N_FIRST = 2  # layers of the draft
CYCLE = 32  # tokens after which a text that repeats does so
N_STEPS = 30  # that are timed


@dataclass(frozen=True)
class Sizes:
    """The model and what is asked of it."""

    config: LlamaConfig
    large: LlamaConfig  # whose weights are narrow, too
    n_texts: int
    prompt: int  # tokens
    n_new: int
    dampings: tuple[float, ...]
    drafted: tuple[int, ...]
    batches: tuple[int, ...]
    length: int  # positions of each sequence whose step is timed with each cache
    short: int  # the same, with each format of the weights


LARGE = Sizes(ONE_B, LLAMA_2_7B, 4, 64, 256, (0.0, 0.1), (2, 4, 7), (1, 8, 64), 1500, 400)
FEW = replace(SMALL, vocab_size=256, n_layers=4, context_len=160)
TINY = Sizes(FEW, FEW, 2, 8, 24, (0.0, 0.5), (3,), (1, 2), 40, 20)


def make_models(sizes: Sizes, damping: float, device: torch.device, dtype: torch.dtype) -> tuple[Llama, Llama]:
    """The model, and the draft, which is its beginning."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(sizes.config).to(device, dtype).eval().requires_grad_(False)
        draft = Llama(replace(sizes.config, n_layers=N_FIRST)).to(device, dtype).eval().requires_grad_(False)
    layers: Any = model.layers
    for layer in layers[N_FIRST:]:
        layer.attention.wo.weight *= damping
        layer.feed_forward.w2.weight *= damping
    draft.load_state_dict({name: w for name, w in model.state_dict().items() if name in draft.state_dict()})
    return model, draft


def make_repeating(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model whose text repeats: each token leads to the next of its cycle, and the last to the first."""
    model: Any = make_models(sizes, 1.0, device, dtype)[0]
    token = torch.arange(sizes.config.vocab_size, device=device)
    model.output.weight[token - token % CYCLE + (token + 1) % CYCLE] = model.tok_embeddings.weight
    return model


def write(engine: Any, sizes: Sizes) -> tuple[list[list[int]], list[float]]:
    """Texts, one after another, and the tokens a second of each; the first one, a warm-up, is dropped."""
    chance, texts, rates = random.Random(0), list[list[int]](), list[float]()
    for made in (engine.steps, getattr(engine, "drafter", None)):
        if made is not None:
            made.warm_up(lambda rows: [n for n in rows if n <= max(sizes.drafted) + 1])
    for _ in range(sizes.n_texts + 1):
        prompt = [chance.randrange(sizes.config.vocab_size) for _ in range(sizes.prompt)]
        engine.submit(Request(prompt, sizes.n_new))
        text, moments = list[int](), list[float]()
        while engine.is_busy:
            text += [token for _, token in engine.step()]
            moments.append(time.perf_counter())
        texts.append(text)
        rates.append((len(text) - 1) / (moments[-1] - moments[0]))
    return texts[1:], rates[1:]


def time_drafts(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Tokens a second with each draft, and how many of its tokens were kept, first in texts that do not repeat."""
    found = list[dict[str, Any]]()
    for damping in sizes.dampings:
        model, draft = make_models(sizes, damping, device, dtype)
        drafters = [("prompt", max(sizes.drafted)), *(("model", n) for n in sizes.drafted)]
        found += [{"repeats": False, "damping": damping} | one for one in time_texts(model, draft, drafters, sizes)]
    model = make_repeating(sizes, device, dtype)
    drafters = [("prompt", n) for n in sizes.drafted]
    return found + [{"repeats": True} | one for one in time_texts(model, None, drafters, sizes)]


def time_texts(
    model: Llama, draft: Llama | None, drafters: list[tuple[str, int]], sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """The same texts without drafts, and with each drafter's."""
    n_blocks = -(-(sizes.prompt + sizes.n_new) // BLOCK_SIZE) + 2
    plain, rates = write(PrefixEngine(model, Scheduler(MAX_TOKENS, n_blocks, BLOCK_SIZE)), sizes)
    yield {"draft": "none", "tokens_per_s": spread(rates)}
    for who, n in drafters:
        counts, scheduler = list[tuple[int, int]](), Scheduler(MAX_TOKENS, n_blocks, BLOCK_SIZE)
        drafter = ModelDrafter(draft, scheduler, sizes.config.vocab_size) if draft and who == "model" else None
        engine = DraftEngine(model, scheduler, n, lambda *n, counts=counts: counts.append(n), drafter)
        texts, rates = write(engine, sizes)
        n_drafted, n_kept = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        pairs = zip(chain.from_iterable(texts), chain.from_iterable(plain), strict=True)
        one = {"draft": who, "drafted": n, "tokens_per_s": spread(rates), "kept": n_kept / max(1, n_drafted),
               "checks": len(counts), "tokens_for_a_check": 1 + n_kept / max(1, len(counts)),
               "same_tokens": sum(a == b for a, b in pairs) / len(texts) / sizes.n_new}  # fmt: skip
        print(one, flush=True)
        yield one


def time_caches(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Of each format: bytes of a position, seconds of a step, and what it changes in the scores."""
    found = dict[str, Any]()
    n_blocks = max(sizes.batches) * -(-(sizes.length + 2 * N_STEPS) // BLOCK_SIZE)
    model, _ = make_models(sizes, 1.0, device, dtype)
    for kind in (None, "int8", "float8"):
        engine: Any = PrefixEngine(model, Scheduler(MAX_TOKENS, n_blocks, BLOCK_SIZE), cache_format=kind)
        steps = {n: step_seconds(engine, sizes, n, sizes.length) for n in sizes.batches}
        cost = measure_cost(model, ByteTokenizer(), kind)._asdict() if kind else None
        found[kind or "wide"] = {"position_bytes": position_bytes(sizes.config, dtype, kind), "step_s": steps,
                                 "is_fast": engine.steps is not None, "cost": cost}  # fmt: skip
        print(kind or "wide", found[kind or "wide"], flush=True)
        del engine
    return found


def time_weights(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Of each format: bytes of the blocks' weights, seconds of a step, the bytes that it must read, and what the format
    changes in the scores.
    """
    found, each = dict[str, Any](), position_bytes(sizes.config, dtype, None)
    n_blocks = max(sizes.batches) * -(-(sizes.short + 2 * N_STEPS) // BLOCK_SIZE)
    for kind in (None, *FORMATS):
        model: Any = make_models(sizes, 1.0, device, dtype)[0]
        made = quantize_model(model, kind, ByteTokenizer(), dtype, device) if kind else None
        engine: Any = PrefixEngine(model, Scheduler(MAX_TOKENS, n_blocks, BLOCK_SIZE))
        steps = {n: step_seconds(engine, sizes, n, sizes.short) for n in sizes.batches}
        bytes_read = made.n_bytes if made else sum(m.weight.nbytes for _, m in matrices(model))
        step_bytes = {n: bytes_read + model.output.weight.nbytes + n * sizes.short * each for n in steps}
        cost = made.cost._asdict() if made and made.cost else None
        found[kind or "wide"] = {"weight_bytes": bytes_read, "step_s": steps, "step_bytes": step_bytes,
                                 "is_fast": engine.steps is not None, "cost": cost}  # fmt: skip
        print(kind or "wide", found[kind or "wide"], flush=True)
        del engine, model
    return found


def step_seconds(engine: Any, sizes: Sizes, n: int, length: int) -> dict[str, float]:
    """Time of a step in which each of n sequences gets one token; none shares a block with another."""
    chance = random.Random(n)
    requests = [
        Request([chance.randrange(sizes.config.vocab_size) for _ in range(length)], 2 * N_STEPS) for _ in range(n)
    ]
    for request in requests:
        engine.submit(request)
    seen = set[Request]()
    while len(seen) < n:
        seen |= {request for request, _ in engine.step()}
    for _ in range(5):
        engine.step()
    times = [time.perf_counter()]
    while len(times) <= N_STEPS // 2:
        engine.step()
        times.append(time.perf_counter())
    for request in requests:
        engine.cancel(request)
    return spread([after - before for before, after in pairwise(times)])


def main(argv: list[str] | None = None) -> None:
    parser = ProgramParser(prog="python -m lib.bench.serving_options", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args(argv)
    sizes, device = TINY if options.tiny else LARGE, torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results: dict[str, Any] = {
        "tiny": options.tiny, "dtype": str(dtype).removeprefix("torch."), "settings": vars(sizes) | {
            "config": vars(sizes.config), "large": vars(sizes.large), "draft_layers": N_FIRST, "cycle": CYCLE},
    }  # fmt: skip
    for name, measure in (("weights", time_weights), ("caches", time_caches), ("drafts", time_drafts)):
        results[name] = measure(sizes, device, dtype)
    results["large weights"] = time_weights(replace(sizes, config=sizes.large), device, dtype)
    record("serving_options", results, options.folder)


if __name__ == "__main__":
    main()
