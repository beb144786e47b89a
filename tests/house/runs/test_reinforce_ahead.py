"""Rollouts on an engine that is kept: chapter 29's batch, also after the weights have changed in place."""

import pytest
import torch

import lib.fast.serving as serving
from lib.fast.decode import can_step
from lib.given.kernels.mode import HAS_TRITON, NO_TRITON
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request
from lib.llama import Llama
from lib.rewards import sample_groups
from lib.runs.reinforcing.ahead import Ahead
from lib.runs.reinforcing.sampling import sample_ahead
from lib.serving import Scheduler, generate_many
from tests.house.fast.comparing import PLACES

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
MODEL = LlamaConfig(vocab_size=23, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=40, context_len=32)
PROMPTS = [[5, 9, 2], [4, 4, 4, 7, 1]]


def scheduler():
    return Scheduler(32, 6, 4)  # too few blocks for all at once: some are preempted


@pytest.mark.parametrize("device", PLACES)
def test_batches_are_chapter_29s(monkeypatch, device):
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: can_step(engine.model, engine.cache))
    torch.manual_seed(0)
    model = Llama(MODEL).to(device)
    engine = Ahead(model, scheduler(), 0.7)
    for seed in (0, 100):
        mine = sample_ahead(engine, PROMPTS, 2, 4, seed, eos_id=3, version=seed)
        with monkeypatch.context() as plain:
            plain.setattr(serving.Runner, "is_fast", lambda engine: False)
            theirs = sample_groups(model, PROMPTS, 2, scheduler(), 4, 0.7, seed, eos_id=3, version=seed)
        assert mine.pop("version") == theirs.pop("version") == seed
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        asked = [Request(prompt, 3) for prompt in PROMPTS]  # greedily, as the held-out questions are
        answers = [[token for token, _ in answer] for answer in engine.answer(asked).values()]
        with monkeypatch.context() as plain:
            plain.setattr(serving.Runner, "is_fast", lambda engine: False)
            found = [list(generate_many(model, [request], scheduler())) for request in asked]
        assert answers == [[token for _, token in new] for new in found]
        Ahead(model, scheduler(), 0.7)  # another engine of the same weights, which lie as the first one's need them
        with torch.no_grad():
            for weight in model.parameters():  # an update, as an optimizer makes it
                weight.add_(torch.randn_like(weight), alpha=0.05)
    assert not engine.sequences
    assert not engine.is_busy


@pytest.mark.parametrize("device", PLACES)
def test_scores_that_are_not_finite_end_a_rollout(monkeypatch, device):
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: can_step(engine.model, engine.cache))
    model = Llama(MODEL).to(device)
    torch.nn.init.constant_(model.get_parameter("output.weight"), float("inf"))
    engine = Ahead(model, scheduler(), 1.0)
    with pytest.raises(ArithmeticError, match="not finite"):
        sample_ahead(engine, PROMPTS, 2, 4, 0, None, 0)
    assert not engine.is_busy
