"""The fast way of a Llama through the serving engine: its kernels, its step, and the same tokens as the plain way."""

import copy
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import lib.fast.decode as decode
import lib.fast.serving as serving
from lib.fast.decode import GRAPH_ROWS, batch_size, can_step
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.captured import CapturedStep, StaticInputs
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Chunk, Progress, Request
from lib.llama import Llama
from lib.runs.serving.draft import DraftEngine
from lib.runs.serving.drafters import Lookup, ModelDrafter
from lib.runs.serving.forms import Form
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.wanted import Wanted
from lib.serving import Engine, Scheduler, fill_static_inputs
from tests.house.fast.comparing import PLACES, close, normal

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
SMALL = LlamaConfig(vocab_size=23, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=40, context_len=32)


@pytest.mark.time_limit(240)
def test_the_kernels_of_a_step_compile_for_a_gpu(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.house.fast.serving_program"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_sizes_of_graphs():
    assert [batch_size(n) for n in (1, 2, 3, 4, 5, 8, 9, 250)] == [1, 2, 4, 4, 8, 8, 16, 256]
    assert batch_size(GRAPH_ROWS) == GRAPH_ROWS


def test_what_takes_the_plain_way():
    model = Llama(SMALL)
    cache = Engine(model, Scheduler(8, 8, 4)).cache
    assert can_step(model, cache) == INTERPRETED
    assert not can_step(nn.Linear(2, 2), cache)
    assert not can_step(model.double(), cache)  # the cache is float32
    model.float().get_submodule("layers.0.feed_forward").w2 = nn.Linear(40, 32)
    assert not can_step(model, cache)  # a bias


def served(engine, requests, cancelled=None):
    """The tokens of each request, all submitted before the first step; ``cancelled`` after its second token."""
    for request in requests:
        engine.submit(request)
    found: dict[Any, list[int]] = {request: [] for request in requests}
    while engine.is_busy:
        for request, token in engine.step():
            found[request].append(token)
            if request is cancelled and len(found[request]) == 2:
                assert engine.cancel(request)
    engine.release()
    assert not engine.sequences
    return list(found.values())


def mixed_requests():
    """Prompts with a common beginning; greedy and random; one ends at a token that it draws."""
    common = [3, 1, 4, 1]
    settings = [(0.0, None), (1.0, None), (0.0, 7), (0.8, None)]
    return [Request([*common, 5 + i, 9][: 6 - i], 4, t, i, eos_id=end) for i, (t, end) in enumerate(settings)]


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: can_step(engine.model, engine.cache))


@pytest.fixture(params=PLACES)
def model(request):
    torch.manual_seed(0)
    return Llama(SMALL).eval().to(request.param)


def plainly(model, requests, scheduler):
    engine = Engine(model, scheduler)
    engine.steps = None
    return served(engine, requests)


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("make", "most"), [(Engine, GRAPH_ROWS), (PrefixEngine, 4)])
def test_the_fast_way_gives_the_same_tokens(fast, model, make, most, monkeypatch):
    """In a pool of five blocks, so that requests wait and are preempted. Steps have up to 7 tokens.

    Those of more than ``most`` are padded to 8, and attend in tiles.
    """
    monkeypatch.setattr(serving, "GRAPH_ROWS", most)
    monkeypatch.setattr(decode, "GRAPH_ROWS", most)
    monkeypatch.setattr(decode, "TILED_ROWS", (8,))
    expected = plainly(model, mixed_requests(), Scheduler(7, 5, 4))
    engine, sizes = make(model, Scheduler(7, 5, 4)), []
    in_tiles = engine._in_tiles
    monkeypatch.setattr(engine, "_in_tiles", lambda chunks: sizes.append(len(chunks)) or in_tiles(chunks))
    assert engine.steps is not None
    assert served(engine, mixed_requests()) == expected
    assert bool(sizes) == (most == 4)
    assert most > 4 or max(sizes) > 1


@pytest.mark.time_limit(120)
def test_a_step_that_goes_on_has_the_rows_that_it_would_get_one_by_one(fast, model, monkeypatch):
    """Meanwhile requests come, fork, are preempted, are cancelled and end, and blocks of two positions fill."""

    def session(goes_on):
        went_on, rows, found = [], [], []
        engine = PrefixEngine(model, Scheduler(16, 26, 2))
        monkeypatch.setattr(engine, "_goes_on", lambda chunks: goes_on(engine, chunks) and not went_on.append(1))
        take = engine.steps.decode

        def decode(n):
            blocks = -(-engine.steps.fields[3, :n] // 2)
            tables = [table[:k].tolist() for table, k in zip(engine.steps.tables, blocks, strict=False)]
            rows.append((engine.steps.fields[:, :n].tolist(), tables))
            return take(n)

        monkeypatch.setattr(engine.steps, "decode", decode)
        first = Wanted([3, 1, 4, 1, 5], 14)
        asked = [first, Wanted(first.tokens, 14, 1.0, 2, first=first), *(Wanted([7, i], 12) for i in range(4))]
        for step in range(40):
            if step < 8 and asked:
                engine.submit(asked.pop(0))
            if step == 12:
                engine.cancel(first)
            found += [token for _, token in engine.step()]
        assert not engine.is_busy
        return len(went_on), rows, found

    n_one_by_one, *expected = session(lambda engine, chunks: False)
    n_went_on, *found = session(lambda engine, chunks: serving.Runner._goes_on(engine, chunks))
    assert found == expected
    assert n_one_by_one == 0 < 4 < n_went_on < len(found[0]) - 4


@pytest.mark.time_limit(120)
def test_a_block_that_was_copied_reaches_every_row_that_knew_the_one_before(fast, model):
    """A sequence moves to another row, there writes into a block that it shares, and comes back."""
    engine = Engine(model, Scheduler(16, 8, 4))
    first, other = (Progress(Request(prompt, 9)) for prompt in ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7]))

    def take(*chunks):
        found = list(engine.run([*chunks]))
        for progress, n in chunks:
            progress.n_cached += n
        return found[-1]

    take(Chunk(first, 5))
    take(Chunk(other, 1), Chunk(first, 1))  # the second row knows the table of the first request
    fork = engine.cache.fork(engine.sequences[first])
    take(Chunk(first, 1))
    found = take(Chunk(other, 1), Chunk(first, 1))
    assert engine.cache.tables[fork][1] != engine.cache.tables[engine.sequences[first]][1]
    plain = Engine(model, Scheduler(16, 8, 4))
    plain.steps = None
    (expected,) = plain.run([Chunk(Progress(first.request), len(first.tokens))])
    close(found, expected, atol=1e-4)


@pytest.mark.time_limit(120)
def test_a_step_reads_what_chapter_21_fills(fast, model):
    """Row by row the same numbers, padding too; and kernels and the stand-in for a graph compute the same of them."""
    engine = Engine(model, Scheduler(32, 16, 4))
    for request in mixed_requests():  # one ends at once
        engine.submit(request)
    engine.step()
    chunks, cache = engine.scheduler.schedule(), copy.deepcopy(engine.cache)
    assert len(chunks) == 3
    inputs = StaticInputs.allocate(4, engine.steps.tables.shape[1], engine.steps.device)
    step, ids = CapturedStep(model, cache, inputs), [engine.sequences[chunk.progress] for chunk in chunks]
    fill_static_inputs(inputs, cache, ids, [chunk.tokens[0] for chunk in chunks])
    close(torch.stack(list(engine.run(chunks))), step.replay()[: len(chunks)], atol=1e-4)
    rows = [inputs.tokens, inputs.positions, inputs.slots, inputs.lengths]
    assert engine.steps.fields[:, :4].tolist() == [row.tolist() for row in rows]
    for ours, theirs, i in zip(engine.steps.tables, inputs.tables, ids, strict=False):  # as far as blocks are in use
        assert ours.tolist()[: len(cache.tables[i])] == theirs.tolist()[: len(cache.tables[i])] == cache.tables[i]
    close(cache.keys, engine.cache.keys)


@pytest.mark.time_limit(120)
def test_a_token_that_ends_a_request_and_one_that_is_cancelled(fast, model):
    """The step in flight computes one more token for both; nobody sees it, and all blocks return."""
    prompt, other = [3, 1, 4], [2, 7]
    (tokens,) = plainly(model, [Request(prompt, 6)], Scheduler(16, 8, 4))
    end = tokens[2]
    expected = tokens[: tokens.index(end) + 1]
    engine = PrefixEngine(model, Scheduler(16, 8, 4))
    leaves = Request(other, 9)
    found = served(engine, [Request(prompt, 6, eos_id=end), leaves], cancelled=leaves)
    assert found[0] == expected
    assert len(found[1]) == 2
    assert engine.scheduler.n_free == 8


@pytest.mark.time_limit(120)
def test_scores_that_are_not_finite_end_only_their_request(fast, model):
    with torch.no_grad():
        model.tok_embeddings.weight[5] = math.nan
    engine = PrefixEngine(model, Scheduler(16, 16, 4))
    (bad,), good = served(engine, [Request([1, 5], 4), Request([1, 2], 3)])
    assert isinstance(bad, ArithmeticError)
    assert good == plainly(model, [Request([1, 2], 3)], Scheduler(16, 16, 4))[0]


@pytest.mark.time_limit(120)
def test_the_fast_way_gives_the_same_scores(fast, model):
    """Of two requests that want different numbers of likeliest tokens, beside one that wants none."""

    def make():
        return [Wanted([3, 1, 4], 3, 0.9, 2, n_top=2), Wanted([5], 3, n_top=0), Request([3, 1], 3)]

    plain = PrefixEngine(model, Scheduler(16, 16, 4))
    plain.steps = None
    expected = served(plain, make())
    found = served(PrefixEngine(model, Scheduler(16, 16, 4)), make())
    assert found[2] == expected[2]
    for ours, theirs in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert (ours.token, [token for token, _ in ours.top]) == (theirs.token, [token for token, _ in theirs.top])
        scores = [ours.logprob, *(value for _, value in ours.top)]
        assert scores == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], abs=1e-4)


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("n_blocks", [16, 5])
def test_forks_on_the_fast_way(fast, model, n_blocks):
    def make():
        first = Wanted([3, 1, 4, 1, 5], 4, 0.9, 2)
        return [first, *(Wanted(first.tokens, 4, 0.9, 2 + i, first=first) for i in (1, 2))]

    expected = plainly(model, make(), Scheduler(16, 16, 4))
    forked: list[Any] = []
    found = served(PrefixEngine(model, Scheduler(16, n_blocks, 4), on_forked=forked.append), make())
    assert found == expected
    assert forked == [5] * (2 if n_blocks == 16 else 1)


class Counting:
    """A form of numbers that go up by one, until the last one."""

    n_accepted, error = 0, ""

    def __init__(self, first, last):
        self.next, self.last = first, last

    @property
    def is_over(self):
        return self.next > self.last

    def add(self, token):
        assert self.is_over or token == self.next
        self.n_accepted, self.next = self.n_accepted + 1, self.next + 1

    accept = Form.accept

    def bits(self):
        return torch.tensor([1 << self.next], dtype=torch.int32)


@pytest.mark.time_limit(120)
def test_forms_on_the_fast_way(fast, model):
    """Each token is known before the next one is drawn, although the step for it has begun."""
    requests = [Wanted([3, 1, 4], 4, 0.9, 2, form=Counting(5, 8), n_top=1), Request([2, 7], 5, 0.8, 1)]
    counted, free = served(PrefixEngine(model, Scheduler(16, 16, 4)), requests)
    assert [drawn.token for drawn in counted] == [5, 6, 7, 8]
    assert [drawn.top[0][0] for drawn in counted] != [5, 6, 7, 8]
    assert [free] == plainly(model, [Request([2, 7], 5, 0.8, 1)], Scheduler(16, 16, 4))


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("n_blocks", [16, 9])
def test_drafts_on_the_fast_way(fast, model, monkeypatch, n_blocks):
    """Drafted tokens are rows of the same graph; a block that they gave back may come to another sequence.

    Half of the guesses are wrong.
    """
    prompts = [[3, 1, 4, 3, 1], [2, 7, 2, 7, 2], [9]]
    expected = plainly(model, [Request(prompt, 9) for prompt in prompts], Scheduler(16, 16, 4))
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    counts = []

    def guess(lookup, tokens, n):
        right = next(text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens)
        return [(token + len(tokens) // 4 % 2) % 23 for token in right[:n]]

    monkeypatch.setattr(Lookup, "guess", guess)
    engine = DraftEngine(model, Scheduler(16, n_blocks, 4), n_drafted=3, on_drafted=lambda *n: counts.append(n))
    assert served(engine, [Request(prompt, 9) for prompt in prompts]) == expected
    assert sum(n for n, _ in counts) > sum(kept for _, kept in counts) > 0


def test_a_model_drafts_on_the_fast_way(fast, model):
    """Its steps take the fast way, too; what the target did not keep leaves its cache."""
    prompts, counts, scheduler = [[3, 1, 4, 3, 1], [2, 7]], [], Scheduler(16, 16, 4)
    expected = plainly(model, [Request(prompt, 6) for prompt in prompts], Scheduler(16, 16, 4))
    small = copy.deepcopy(model)
    with torch.no_grad():
        small.output.weight += 0.3 * normal(23, 32, device=small.output.weight.device)
    drafter = ModelDrafter(small, scheduler, 23)
    assert drafter.steps is not None
    engine = DraftEngine(model, scheduler, 2, lambda *n: counts.append(n), drafter)
    assert served(engine, [Request(prompt, 6) for prompt in prompts]) == expected
    assert sum(n for n, _ in counts) > sum(kept for _, kept in counts) > 0
    assert drafter.cache.allocator.n_free == 16


@pytest.mark.time_limit(120)
def test_a_cache_in_8_bits_on_the_fast_way(fast, model):
    """A prompt, its second part, and a token that decodes: the logits of the plain way, and the same numbers stored."""
    check_8_bits(model, "int8")
    if model.output.weight.is_cuda:  # the interpreter rounds some numbers to half of the float8 next to them
        check_8_bits(model, "float8")


def check_8_bits(model, kind):
    engines, found = [PrefixEngine(model, Scheduler(16, 8, 4), cache_format=kind) for _ in range(2)], []
    assert engines[0].steps is not None
    engines[1].steps = None
    for engine in engines:
        progress = Progress(Request([3, 1, 4, 1, 5, 9, 2, 6], 4))
        engine.scheduler.running[progress] = 3
        for n in (5, 2, 1):
            found.append(engine._logits([Chunk(progress, n)])[0])
            progress.n_cached += n
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        close(ours, theirs, atol=1e-3)
    ours, theirs = (engine.cache for engine in engines)
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        change = (a.numbers.float() - b.numbers.float()).abs()
        assert change.max() <= (1 if kind == "int8" else 32)  # half-way between two: either
        close(a.scales, b.scales)


def test_weights_side_by_side_are_the_model_s_own(fast, model):
    before = {name: w.clone() for name, w in model.state_dict().items()}
    engine = PrefixEngine(model, Scheduler(16, 8, 4))
    block, layer = model.layers[0], engine.steps.layers[0]
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert block.attention.wq.weight.data_ptr() == layer.wqkv.data_ptr()
    assert block.feed_forward.w3.weight.data_ptr() == layer.w13[40:].data_ptr()


@pytest.mark.gpu
def test_a_graph_for_every_size(fast):
    model = Llama(SMALL).eval().cuda()
    engine = PrefixEngine(model, Scheduler(512, 400, 4))
    engine.steps.warm_up()
    assert sorted(engine.steps.graphs) == [1, 2, 4, *range(8, GRAPH_ROWS + 1, 8)]
    assert sorted(engine.steps.tiled_graphs) == [384, 512]
    requests = [Request([1 + i % 20, 2], 3) for i in range(300)]  # more than a graph takes
    assert served(engine, requests) == plainly(model, [Request(r.tokens, 3) for r in requests], Scheduler(512, 400, 4))
