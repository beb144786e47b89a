"""Steps of sharded runs in a CUDA graph."""

import pytest
import torch

from lib.bench.kit import spawn
from lib.ranks import pool
from lib.runs.engine.request import parse
from lib.runs.flags import UsageError
from lib.runs.train_gpt2 import make_gpt2_parser
from tests.house.runs import graph_programs
from tests.house.runs import runs_programs as programs
from tests.house.runs.test_runs import VIT, curve, on_ranks, same

SHARDED = "--model tiny --data synthetic --strategy fsdp"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (SHARDED, ()),
        ("--model tiny --data synthetic --replicate 2 --shard 2", ()),
        (f"{SHARDED} --engine torch", ("--strategy fsdp --engine torch", "ddp or fsdp with --engine ours")),
        (f"{SHARDED} --optimizer muon", ("--strategy fsdp --optimizer muon", "expected adamw or sgd")),
        ("--model tiny --data synthetic --shard 2 --context 2", ("--shard 2", "--context 2", "expected single")),
    ],
)
def test_which_sharded_steps_can_be_recorded(flags, words):
    asked = [*flags.split(), "--graph"]
    if not words:
        assert parse(make_gpt2_parser(), asked).optimizer == "adamw", "chapter 7's counts its steps on the host"
        return
    with pytest.raises(UsageError) as refused:
        parse(make_gpt2_parser(), asked)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.time_limit(60)
def test_no_step_of_shards_waits_for_the_host():
    flags = f"{SHARDED} --precision bf16 --path fast --accumulate 2 --clip 0.5 --weight-decay 0.1"
    (loss, asked, norm, kept), other = pool("gloo").run(graph_programs.step_without_the_host, flags, n_ranks=2).values
    assert (loss, asked, norm, kept) == tuple(other)
    assert kept == 0, "a node of an earlier graph would bring its stream into a recording"
    assert loss > 5
    assert (asked, norm > 0.5) == (0, True)


@pytest.mark.time_limit(100)
def test_adamw_clips_the_shards_that_it_reads(tmp_path):
    """On the plain path chapter 12's function clips them before."""
    begun = f"{VIT} --strategy fsdp --optimizer adamw --clip 0.1 --accumulate 2"
    on_ranks(programs.run_all_fused, [f"{begun} --path {path} --log {tmp_path / path}" for path in ("fast", "plain")])
    same(tmp_path / "fast", curve(tmp_path / "plain"))


@pytest.mark.gpu
@pytest.mark.time_limit(120)
def test_a_recorded_step_has_the_same_bits_and_goes_on_where_another_ended(tmp_path):
    ways = [
        f"{SHARDED} --precision float32 --accumulate 2 --clip 0.5",
        f"{SHARDED} --precision float32 --accumulate 2 --clip 0.5 --averaging collectives",
        f"{SHARDED} --precision bf16 --clip 0.1",
        f"{SHARDED} --precision bf16 --optimizer sgd --averaging collectives",
    ]
    begun = f"{VIT} --device cuda --strategy fsdp --graph --schedule wsd --steps 6"
    part = f"{begun} --checkpoint {tmp_path}/kept"
    commands = [
        f"{begun} --log {tmp_path}/whole --eval-every 2 --held-out 0.2",
        f"{part} --steps 3 --save-every 3 --held-out 0.2 --eval-every 2",
        f"{part} --log {tmp_path}/rest --held-out 0.2 --eval-every 2",
    ]
    n_ranks = torch.cuda.device_count()
    spawn(graph_programs.launched_and_recorded, "nccl", n_ranks, ways, commands, str(tmp_path), limit_s=110)
    for rank in range(n_ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found[0][1][1], found[1][1][1], rtol=0, atol=2e-4)  # shards; the rate is 1e-3
        for way, (launched, recorded) in zip([*ways, "copies"], found, strict=True):
            for before, after in zip(launched, recorded, strict=True):
                for a, b in zip(before, after, strict=True):
                    torch.testing.assert_close(b, a, rtol=0, atol=0, msg=lambda text, way=way: f"{way}: {text}")
    whole, rest = curve(tmp_path / "whole"), curve(tmp_path / "rest")
    assert list(rest) == [3, 4, 5]
    assert rest == {step: whole[step] for step in rest}
