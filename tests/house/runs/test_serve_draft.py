"""Drafts from the text: the same greedy text, the same distribution, fewer steps, and no block lost."""

import copy
import json
import random
from collections import Counter
from typing import Any

import pytest
import torch

from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Progress, Request
from lib.llama import Llama, sample_next
from lib.runs import serve
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.serving.draft import DraftEngine
from lib.runs.serving.drafters import Lookup, ModelDrafter, probabilities
from lib.runs.serving.engine import build
from lib.runs.serving.pairs import tokens_of
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.wanted import Wanted
from lib.serving import Scheduler, generate_many
from tests.house.runs.test_serve import users_of

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(120)]
SMALL = LlamaConfig(vocab_size=12, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, context_len=96)


@pytest.fixture(scope="module")
def model():
    """Its greedy texts soon repeat themselves."""
    torch.manual_seed(0)
    made = Llama(SMALL).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 3 if parameter.dim() > 1 else 1
    return made


def test_a_guess_is_what_followed_before():
    lookup = Lookup()
    assert lookup.guess([1, 2, 3], 4) == []
    assert lookup.guess([1, 2, 3, 9, 1, 2], 4) == [3, 9, 1, 2]
    assert lookup.guess([1, 2, 3, 9, 1, 2, 4, 1, 2], 2) == [4, 1]  # the last time, of two
    assert lookup.guess([1, 2, 3, 9, 1, 2, 4, 1, 2, 3], 2) == [9, 1]  # three tokens are known better than two
    assert Lookup().guess([5, 6, 5, 6, 5], 5) == [6, 5, 6, 5, 6]


@pytest.mark.parametrize(("t", "k", "p"), [(0.0, None, None), (0.7, None, None), (1.0, 3, None), (1.2, 5, 0.7)])
def test_probabilities_are_those_that_tokens_are_drawn_from(t, k, p):
    torch.manual_seed(1)
    logits = torch.randn(1, 8) * 2
    request = Request([1], 1, t, 0, top_k=k, top_p=p)
    drawn = sample_next(logits.expand(20_000, -1), **Progress(request).sampling(logits.device))
    shares = torch.bincount(drawn, minlength=8) / 20_000
    torch.testing.assert_close(probabilities(logits, request)[0], shares, atol=0.02, rtol=0)


@pytest.fixture(scope="module")
def small(model):
    """A model that drafts: often right, because its weights are nearly the large one's."""
    made = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.03 * parameter.std() * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize(
    ("drafts", "n_blocks", "max_tokens"), [("prompt", 120, 64), ("prompt", 24, 7), ("model", 60, 64), ("model", 24, 7)]
)
def test_a_greedy_text_is_the_same_in_fewer_steps(model, small, drafts, n_blocks, max_tokens):
    """Requests that come, leave and are preempted; the scheduler and the pool agree at every step."""
    rng, scheduler = random.Random(n_blocks), Scheduler(max_tokens, n_blocks, 4)
    counts: list[tuple[int, int]] = []
    drafter = ModelDrafter(small, scheduler, 12) if drafts == "model" else None
    engine = DraftEngine(model, scheduler, 5, lambda n, kept: counts.append((n, kept)), drafter)
    requests = [Request([rng.randrange(12) for _ in range(rng.randint(1, 20))], rng.randint(1, 60)) for _ in range(12)]
    found: dict[Request, list[int]] = {request: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.is_busy:
        if waiting and rng.random() < 0.5:
            engine.submit(waiting.pop())
        for request, token in engine.step():
            found[request].append(token)
        assert engine.cache.allocator.n_users == users_of(engine)
        for progress, n in engine.scheduler.running.items():
            assert len(engine.cache.tables[engine.sequences[progress]]) == n
    for request in requests:
        assert found[request] == [token for _, token in generate_many(model, [request], Scheduler(64, 60, 4))]
    assert engine.sequences == engine.acquired == engine.cache.tables == {}
    if drafter:
        assert drafter.sequences == drafter.followed == drafter.cache.tables == {}
        assert drafter.cache.allocator.n_free == n_blocks
    n_drafted, n_kept = (sum(column) for column in zip(*counts, strict=True))
    assert n_drafted > n_kept > 0


def test_a_model_that_drafts_for_itself_is_always_right(model):
    """So each step gives all drafted tokens and one more; a pair that was kept is read in one pass."""
    texts: list[list[int]] = []
    for _ in range(2):  # with a seed, and nobody else in the step, a text repeats
        counts: list[tuple[int, ...]] = []
        n_steps, scheduler = 0, Scheduler(64, 60, 4)
        drafter = ModelDrafter(model, scheduler, 12)
        engine = DraftEngine(model, scheduler, 3, lambda *n, to=counts: to.append(n), drafter)
        engine.submit(Request([5, 1, 2], 21))
        engine.submit(Request([7, 2], 21, 1.0, 3))
        texts.append([])
        while engine.is_busy:
            texts[-1] += [token for _, token in engine.step()]
            n_steps += 1
        assert set(counts) == {(3, 3)}
        assert n_steps == 1 + 20 // 4
    assert texts[0] == texts[1]


def test_a_step_gives_each_token_that_is_kept_and_one_more(model):
    counts, n_steps = [], 0
    engine = DraftEngine(model, Scheduler(64, 60, 4), on_drafted=lambda n, kept: counts.append(kept))
    engine.submit(Request([1, 2] * 8, 60))
    while engine.is_busy:
        engine.step()
        n_steps += 1
    assert sum(counts) > 5
    assert n_steps == 60 - sum(counts)


def test_a_drawn_text_has_the_model_s_distribution(model):
    """The third new token of a prompt whose drafts are often wrong, over many seeds, with drafts and without."""
    shares, other = [], Llama(SMALL).double()

    def with_a_model(model, scheduler):
        return DraftEngine(model, scheduler, 2, drafter=ModelDrafter(other, scheduler, 12))

    for make in (with_a_model, DraftEngine, PrefixEngine):
        engine = make(model, Scheduler(4096, 4000, 4))
        requests = [Request([1, 2, 3, 4, 1, 2, 3], 3, 1.5, seed, top_k=4) for seed in range(400)]
        ends: dict[Request, list[int]] = {}
        for at in range(0, 400, 8):  # few at a time, so that all of them are drafted for
            for request in requests[at : at + 8]:
                engine.submit(request)
            while engine.is_busy:
                for request, token in engine.step():
                    ends.setdefault(request, []).append(token)
        last = torch.tensor([tokens[-1] for tokens in ends.values()])
        shares.append(torch.bincount(last, minlength=12) / 400)
    for share in shares[:2]:
        torch.testing.assert_close(share, shares[2], atol=0.12, rtol=0)  # three standard deviations of a difference


def test_scores_an_end_and_forks_with_drafts(model, small):
    first = Wanted([1, 2, 3, 1, 2], 20, n_top=2)
    others = [Wanted(first.tokens, 20, n_top=2, first=first), Request([1, 2, 3, 1, 2], 20)]
    results = []

    def with_a_model(model, scheduler):
        return DraftEngine(model, scheduler, 4, drafter=ModelDrafter(small, scheduler, 12))

    for make in (DraftEngine, PrefixEngine, with_a_model):
        engine = make(model, Scheduler(64, 60, 4))
        found: dict[Request, list[Any]] = {request: [] for request in (first, *others)}  # with scores, or without
        for request in found:
            engine.submit(request)
        while engine.is_busy:
            for request, token in engine.step():
                found[request].append(token)
        results.append(list(found.values()))
    for drafted in (results[0], results[2]):
        for ours, theirs in zip(drafted[0] + drafted[1], results[1][0] + results[1][1], strict=True):
            assert (ours.token, [t for t, _ in ours.top]) == (theirs.token, [t for t, _ in theirs.top])
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
    plain = results[0][2]
    assert plain == results[1][2] == results[2][2]
    end = plain[8]
    engine = DraftEngine(model, Scheduler(64, 60, 4))
    engine.submit(Request([1, 2, 3, 1, 2], 20, eos_id=end))
    tokens = []
    while engine.is_busy:
        tokens += [token for _, token in engine.step()]
    assert tokens == plain[: plain.index(end) + 1]


def test_the_server_drafts_and_counts_what_it_kept():
    flags = ["--model", "tiny", "--draft", "prompt", "--drafted", "3", "--device", "cpu"]
    counts: Counter[str] = Counter()
    engine, _ = build(serve.make_parser().parse_args(flags), counts)
    assert engine.n_drafted == 3
    request = Request(list(b"the rain, the rain, the "), 24)
    engine.submit(request)
    found = []
    while engine.is_busy:
        found += [token for _, token in engine.step()]
    assert found == [token for _, token in generate_many(engine.model, [request], Scheduler(64, 60, 4))]
    assert counts["drafted_tokens"] >= counts["kept_tokens"] > 0


def test_the_server_drafts_with_a_model_of_the_same_tokens():
    """The same greedy text, and every draft of the same model is kept."""
    counts: Counter[str] = Counter()
    flags = ["--model", "tiny", "--draft", "tiny", "--drafted", "4", "--device", "cpu"]
    engine, ready = build(serve.make_parser().parse_args(flags), counts)
    request = Request(list(b"the rain, "), 12)
    engine.submit(request)
    found = []
    while engine.is_busy:
        found += [token for _, token in engine.step()]
    assert found == [token for _, token in generate_many(engine.model, [request], Scheduler(64, 60, 4))]
    assert counts["drafted_tokens"] == counts["kept_tokens"] > 0
    assert "drafts up to 4 tokens" in "".join(ready.notes)


def test_a_draft_of_other_tokens_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("weights were read"))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    for name, said in ((folder, "its tokenizer is not that of --model tiny"), (tmp_path / "none", "no such folder")):
        with pytest.raises(UsageError, match=said):
            build(serve.make_parser().parse_args(["--model", "tiny", "--draft", str(name)]), Counter())
    assert tokens_of(str(folder), None) == {"a": 0, "b": 1, "<end>": 2}
