"""Rewards from the command line: the update is chapter 29's, a killed run goes on bit for bit, a lag is a lag."""

import argparse
import json
import os
import random
import re
import signal

import pytest
import torch

from lib.given.data.tasks import Question, form
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.rewards import TINY
from lib.gpt2 import GPT2
from lib.llama import Llama
from lib.ranks import pool
from lib.rewards import grpo_step
from lib.runs import reinforce
from lib.runs.engine.signals import Signals
from lib.runs.reinforcing import loop, sampling, tasks
from lib.runs.reinforcing.update import ALGORITHMS, update
from lib.training import AdamW

pytestmark = pytest.mark.time_limit(120)
SMALL = "--model tiny --task sums --device cpu --quiet --warm 2 --prompts 2 --group 2 --new-tokens 6 --eval-questions 2"


def run(out, *more):
    return reinforce.main([*SMALL.split(), "--out", str(out), *more])


def weights(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def steps_of(out, name="reward"):
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if name in line]


# ---------------------------------------------------------------------------------------------------- the update


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_update_is_chapter_29s_grpo_step(algorithm, kind):
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=TINY.vocab_size, context_len=32, dim=16, n_layers=1, n_heads=2)
    first, second = (Llama(TINY) if kind == "llama" else GPT2(gpt2) for _ in range(2))
    second.load_state_dict(first.state_dict())
    mask = torch.rand(6, 9) < 0.6
    batch = {
        "tokens": torch.randint(TINY.vocab_size, (6, 10)), "response_mask": mask,
        "groups": torch.tensor([0, 0, 1, 1, 1, 0]),
        "rewards": torch.tensor([0.0, 1, 0.1, 0, 1, 0]), "log_probs": -torch.rand(6, 9) * 4,
        "old_log_probs": -torch.rand(6, 9) * 4, "ref_log_probs": -torch.rand(6, 9) * 4,
    }  # fmt: skip
    shared = {**ALGORITHMS[algorithm], "correction": "truncate", "cap": 1.5, "floor": 0.0, "kl_coef": 0.05,
              "temperature": 0.7, "loss_scale_factor": 9.0}  # fmt: skip
    o = argparse.Namespace(**shared, micro_batch=4, precision="float32", clip=0.5, clip_low=0.2, clip_high=0.3)
    mine, log_probs, entropy = update(first, AdamW(first.parameters(), lr=0.1), batch, o)
    theirs = grpo_step(second, AdamW(second.parameters(), lr=0.1), batch, 3, clip_ratio_low=0.2, clip_ratio_high=0.3,
                       max_norm=0.5, **shared)  # fmt: skip
    assert mine == pytest.approx({name: theirs[name] for name in mine}, rel=1e-4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    assert log_probs.shape == entropy.shape == mask.shape
    assert (entropy[mask] > 0).all()


# ------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("more", [["--lag", "1"], ["--kl-coef", "0.1", "--updates", "2"]], ids=["lag", "reference"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, monkeypatch, more):
    settings = ["--steps", "4", "--lr", "1e-2", *more]
    assert run(tmp_path / "whole", *settings) == 0
    step = loop.Run.step

    def asked(self, number, log):
        if number == 1:
            signals[0].ask()
        return step(self, number, log)

    class Heard(Signals):
        def __init__(self):
            super().__init__()
            signals[:] = [self]

    signals = []
    with monkeypatch.context() as patched:
        patched.setattr(loop.Run, "step", asked)
        patched.setattr(loop, "Signals", Heard)
        assert run(tmp_path / "cut", *settings) == 75
    assert len(steps_of(tmp_path / "cut")) == 2
    assert run(tmp_path / "cut", *settings) == 0
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    timed = {"seconds", "cpu_seconds", "memory_peak_bytes", "rollout_idle", "train_idle", "rollout_tokens_per_s",
             "train_tokens_per_s"}  # fmt: skip
    logs = [[{k: v for k, v in line.items() if k not in timed} for line in steps_of(tmp_path / out)]
            for out in ("cut", "whole")]  # fmt: skip
    assert logs[0] == logs[1]
    assert not (tmp_path / "cut" / ".lock").exists()


def coin(_, seed):
    """Questions whose worked answers are 0 or 1 at random; only 1 is right."""
    draw = random.Random(seed)
    while True:
        yield Question(f"{draw.randrange(100)}:<think>", "1".__eq__, form("", str(draw.randrange(2))))


@pytest.mark.parametrize("sign", [1, -1], ids=["rewards", "rewards with the wrong sign"])
def test_the_reward_rises_from_chance_and_falls_if_its_sign_is_wrong(tmp_path, monkeypatch, sign):
    monkeypatch.setitem(tasks.KINDS, "coin", tasks.Kind(coin))
    score = tasks.score

    def signed(*asked):
        found = score(*asked)
        return found | {"reward": [sign * reward for reward in found["reward"]]}

    monkeypatch.setattr(sampling, "score", signed)
    more = "--task coin --warm 50 --prompts 4 --group 8 --format-weight 0 --lr 1e-3 --steps 14 --eval-every 99"
    assert run(tmp_path, *more.split(), "--save-every", "99") == 0
    right = [line["right"] for line in steps_of(tmp_path)]
    assert 0.3 < right[0] < 0.7  # the first answers are sampled before the first update
    last = sum(right[-5:]) / 5
    assert last > 0.8 if sign > 0 else last < 0.1


def test_with_a_lag_the_sampler_has_the_weights_before_the_last_step(tmp_path):
    for lag in ("0", "1"):
        assert run(tmp_path / lag, "--steps", "3", "--lr", "1e-2", "--format-weight", "0", "--kl-coef", "0.5",
                   "--lr-warmup", "4", "--lag", lag) == 0  # fmt: skip
    in_step, late = steps_of(tmp_path / "0"), steps_of(tmp_path / "1")
    assert [line["lag"] for line in in_step] == [0, 0, 0]
    assert [line["lr"] for line in in_step] == pytest.approx([1e-2 / 4, 1e-2 / 2, 1e-2 * 3 / 4])
    assert [line["lag"] for line in late] == [0, 1, 1]
    assert max(line["drift"] for line in in_step) < 1e-5
    for line in in_step + late:
        assert line["rollout_idle"] + line["train_idle"] == pytest.approx(1)
    (first, *_) = steps_of(tmp_path / "0", "held_out_right")
    assert first["held_out_low"] <= first["held_out_right"] <= first["held_out_high"]


def on_ranks(rank, world_size, argv, leaves_at):
    step = loop.Run.step

    def asked(self, number, log):
        if number == leaves_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, log)

    loop.Run.step = asked
    try:
        return reinforce.main(argv)
    finally:
        loop.Run.step = step


def test_responses_from_other_ranks_train_the_same_model(tmp_path):
    settings = ["--warm", "30", "--prompts", "3", "--steps", "4", "--lr", "1e-2", "--bucket-mb", "0.1"]

    def far(out, lag, n_ranks, leaves_at=None):
        argv = [*SMALL.split(), *settings, "--lag", lag, "--out", str(tmp_path / out)]
        return pool("gloo").run(on_ranks, argv, leaves_at, n_ranks=n_ranks, time_limit_s=100)

    for lag in "01":
        assert run(tmp_path / f"alone{lag}", *settings, "--lag", lag) == 0
    assert far("two", "0", 2).values == [0, 0]
    assert far("three", "0", 3).values == [0, 0, 0]
    assert far("late", "1", 2, leaves_at=1).values == [75, 0]
    assert len(steps_of(tmp_path / "late")) == 2
    assert run(tmp_path / "late", *settings, "--lag", "1") == 0  # one process continues what two have begun
    for out, alone in (("two", "alone0"), ("three", "alone0"), ("late", "alone1")):
        ours, theirs = weights(tmp_path / out), weights(tmp_path / alone)
        for name in theirs:
            if out == "three":  # a sampler with other neighbours in its products may round differently
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(ours[name], theirs[name])
    lines = steps_of(tmp_path / "two")
    assert [line["weight_bytes"] for line in lines] == [4 * sum(p.numel() for p in Llama(TINY).parameters())] * 4
    assert [line["ranks"] for line in lines + steps_of(tmp_path / "late")] == [2] * 4 + [2, 2, 1, 1]
    assert all(0 <= line[name] <= 1 for line in lines for name in ("rollout_idle", "train_idle"))
    assert [line["lag"] for line in steps_of(tmp_path / "late")] == [0, 1, 1, 1]


def test_no_question_is_trained_on_and_held_out():
    for name, kind in tasks.KINDS.items():
        trained, held_out = (tasks.draw(name, kind.usual, 30, seed, held_out=seed == 0) for seed in (1, 0))
        assert not {q.prompt for q in trained} & {q.prompt for q in held_out}
        texts = [q.solution for q in trained]
        assert tasks.score(texts, trained, 0.1)["answer_reward"] == [1.0] * len(texts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--difficulty 12", "--difficulty 12: of --task sums .* expected 1 to 9"),
        ("--task dates --difficulty 1", "--task dates, which has only one"),
        ("--task copying", "--task copying: the model's tokenizer cannot write"),
        ("--prompts 200 --difficulty 1", "--prompts 200: .* expected at most"),
        ("--new-tokens 100", "--new-tokens 100: .* context of 64"),
        ("--floor 3", "--floor 3 is above --cap 2"),
        ("--clip-low 2", "--clip-low 2: expected a number from 0 to 1"),
        ("--lag 2", "--lag"),
        ("--group 1", "--group: '1': expected a whole number of at least 2"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, words, said, capsys):
    assert run(tmp_path, *words.split()) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
