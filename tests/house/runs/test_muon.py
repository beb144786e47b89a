"""``--optimizer muon``: every mesh trains as one process does, and a checkpoint of one can be read by another."""

import pytest

from tests.house.runs import runs_programs as programs
from tests.house.runs.test_runs import GPT2, VIT, curve, on_ranks, same, train

LLAMA = "llama --batch 4 --steps 4 --data synthetic --items 20 --length 16 --warmup 1"
MODELS = {"vit": VIT, "gpt2": GPT2, "llama": LLAMA}
MUON = "--optimizer muon --lr 0.01 --muon-lr 0.02 --weight-decay 0.3"
WAYS = [
    f"{way} --engine {engine}"
    for way in ("--strategy ddp", "--strategy fsdp", "--strategy tp")
    for engine in ("ours", "torch")
]


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_trains_as_one_process_does(tmp_path, name):
    train(f"{MODELS[name]} {MUON} --log {tmp_path}/alone", f"{MODELS[name]} --lr 0.01 --log {tmp_path}/adamw")
    alone = curve(tmp_path / "alone")
    assert alone[3][0] != pytest.approx(curve(tmp_path / "adamw")[3][0], rel=1e-4)
    ways = {"gpt2": WAYS, "vit": WAYS[::2], "llama": WAYS[1:4:2]}[name]
    commands = [f"{MODELS[name]} {MUON} {way} --log {tmp_path}/{i}" for i, way in enumerate(ways)]
    on_ranks(programs.run_all_fused, commands)
    for i in range(len(ways)):
        same(tmp_path / str(i), alone, 1e-3)


MESHES = [
    "--replicate 2 --shard 2",
    "--shard 2 --tensor 2 --engine torch",
    "--pipeline 2 --replicate 2 --accumulate 2",
    "--context 2 --shard 2",
]


@pytest.mark.time_limit(300)
def test_meshes_of_four_ranks_train_as_one_process_does(tmp_path):
    train(f"{GPT2} {MUON} --path plain --log {tmp_path}/alone")
    on_ranks(programs.run_all, [f"{GPT2} {MUON} {way} --log {tmp_path}/{i}" for i, way in enumerate(MESHES)], n_ranks=4)
    for i in range(len(MESHES)):
        same(tmp_path / str(i), curve(tmp_path / "alone"), 1e-3)


@pytest.mark.time_limit(300)
def test_a_killed_run_goes_on_bit_for_bit_and_on_another_mesh(tmp_path):
    begun, (ddp, _, fsdp, sharded, _, tp) = f"{GPT2} {MUON} --save-every 2", WAYS
    ways = [ddp, sharded, fsdp, tp]
    whole = [f"{begun} {way} --log {tmp_path}/whole{i}" for i, way in enumerate(ways)]
    here = [f"{begun} {way} --log {tmp_path}/here{i} --checkpoint {tmp_path}/ck{i}" for i, way in enumerate(ways)]
    there = [f"{begun} {way} --log {tmp_path}/there{i} --checkpoint {tmp_path}/other{i}" for i, way in enumerate(ways)]
    on_ranks(programs.whole_and_killed, whole, here, there, 3)
    for i, way in enumerate(ways):
        assert curve(tmp_path / f"here{i}") == curve(tmp_path / f"whole{i}"), way
    # a checkpoint of one file and one of a folder go on in one process, the others on another way
    train(*(there[i].replace(ways[i], "--strategy single") for i in (0, 2)))
    on_ranks(programs.run_all, [there[1].replace(sharded, tp), there[3].replace(tp, sharded)])
    for i in range(len(ways)):
        same(tmp_path / f"there{i}", curve(tmp_path / "whole0"), 1e-3)


@pytest.mark.time_limit(100)
def test_both_learning_rates_may_change_when_a_run_goes_on(tmp_path):
    """They belong to a start, not to the run: the same rates go on as before, and new ones count from the next step."""
    for name, rates in (("same", MUON), ("matrices", f"{MUON} --muon-lr 0.05"), ("others", f"{MUON} --lr 0.03")):
        begun = f"{GPT2} {MUON} --warmup 0 --schedule wsd --checkpoint {tmp_path}/{name}"
        train(f"{begun} --steps 2", f"{begun} --steps 6 {rates} --log {tmp_path}/{name}.log")
    curves = {name: curve(tmp_path / f"{name}.log") for name in ("same", "matrices", "others")}
    for name in ("matrices", "others"):
        assert curves[name][2] == curves["same"][2]  # the loss of the weights that were read
        assert curves[name][4][0] != curves["same"][4][0]


@pytest.mark.time_limit(100)
def test_what_does_not_fit_is_one_line(capsys, tmp_path):
    for command, words in (
        (f"{GPT2} --muon-lr 0.02", ("--muon-lr 0.02", "--optimizer ours", "--optimizer muon")),
        (f"{GPT2} --optimizer muon --muon-lr 0.02 --lr 0", ("--muon-lr 0.02", "--lr 0")),
        (f"{GPT2} --optimizer muon --graph --device cpu", ("--graph", "CUDA")),
        (f"{GPT2} --optimizer lion", ("'lion'", "muon")),
    ):
        ((status, said),) = programs.run_all(0, 1, [command])
        assert status == 2, command
        assert all(word in said for word in words), said
        assert said.count("\n") == 1
    train(f"{GPT2} --optimizer muon --checkpoint {tmp_path}")
    ((status, said),) = programs.run_all(0, 1, [f"{GPT2} --checkpoint {tmp_path} --steps 6"])
    assert status == 2
    assert "optimizer = 'muon'" in said


@pytest.mark.gpu
@pytest.mark.time_limit(120)
def test_a_graph_takes_the_same_steps_and_goes_on_where_a_run_without_one_ended(tmp_path):
    # a cosine's rates would depend on where the first part ends
    begun = f"{GPT2} {MUON} --device cuda --schedule wsd --steps 6"
    train(f"{begun} --engine torch --log {tmp_path}/eager", f"{begun} --graph --log {tmp_path}/graph")
    same(tmp_path / "graph", curve(tmp_path / "eager"), 1e-3)
    kept = f"--log {tmp_path}/goes --checkpoint {tmp_path}/checkpoint"
    train(f"{begun} {kept} --save-every 3 --steps 3", f"{begun} {kept} --graph")
    same(tmp_path / "goes", curve(tmp_path / "eager"), 1e-3)
