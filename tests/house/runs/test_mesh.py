"""Every way to multiply the kinds of parallelism on 4 and 8 ranks: it is refused with a reason,
or it trains as one process does.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch

from lib.given.models.scaling import Bandwidths, FFNConfig, Layout
from lib.ranks import Pool, pool
from lib.runs.engine.arguments import make_parser
from lib.runs.engine.log import read_log
from lib.runs.engine.mesh import arrange
from lib.runs.engine.options import KINDS
from lib.runs.engine.request import parse
from solutions import moe
from solutions.moe import grouped_matmul
from solutions.scaling import plan
from tests.house.runs import mesh_programs as programs

RUN = {
    "vit": "vit --batch 16 --data synthetic --items 40 --clip 0.5 --optimizer sgd --lr 0.1",
    "gpt2": "gpt2 --batch 16 --data synthetic --items 20 --clip 0.5 --optimizer sgd --lr 0.1",
    "mixture": "gpt2 --n-experts 4 --top-k 2 --bias-rate 0.1 --batch 16 --data synthetic --items 20 --clip 0.5 "
    "--optimizer sgd --lr 0.1",
}
"""With SGD: AdamW would divide rounding errors by tiny roots."""
LONG_S = 900.0
RTOL = 2e-6  # of float32 sums in another order


def products(n_ranks: int) -> list[dict[str, int]]:
    """Every way to write a number of ranks as a product of six degrees."""
    divisors = [d for d in range(1, n_ranks + 1) if n_ranks % d == 0]
    found = [dict(zip(KINDS, degrees, strict=True)) for degrees in itertools.product(divisors, repeat=len(KINDS))]
    return [degrees for degrees in found if math.prod(degrees.values()) == n_ranks]


def reason(program: str, engine: str, degrees: dict[str, int]) -> str:
    """Why a model with four heads, four layers, sixteen positions and perhaps four experts cannot be divided like
    this; empty if it can.
    """
    if degrees["expert"] > 1 and program != "mixture":
        return "has no experts"
    if degrees["expert"] > 4:
        return "n_experts = 4"
    if degrees["tensor"] > 1 and program == "mixture":
        return "--tensor divides an MLP"
    if program == "vit" and degrees["context"] > 1:
        return "a picture is a short sequence"
    if degrees["tensor"] > 4:
        return "n_heads = 4"
    if degrees["pipeline"] > 4:
        return "n_layers = 4"
    if degrees["expert"] > 1 and engine == "torch":
        return "no module that spreads experts"
    return ""


def command(program: str, engine: str, degrees: dict[str, int]) -> str:
    """With twice as many micro-batches as nothing would need, or as many as there are stages."""
    flags = " ".join(f"--{kind} {n}" for kind, n in degrees.items() if n > 1)
    return f"{RUN[program]} --engine {engine} {flags} --accumulate {max(2, min(4, degrees['pipeline']))}"


def alone(program: str, options: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Gradient of the last step, and losses and norms, in one process."""
    with programs.small_models():
        found = programs.observe(f"{RUN[program]} {options} --log {folder / program}")
    assert (found["status"], found["said"]) == (0, "")
    return found["gradient"], curve(folder / program)


def curve(log: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_log(log)]


def largest_error(folder: Path, i: int, n_ranks: int, wanted: dict[str, torch.Tensor]) -> float:
    """Of any gradient on any rank, relative to the largest value; every parameter must be on some rank."""
    largest, seen, error = max(float(g.abs().max()) for g in wanted.values()), set(), 0.0
    for rank in range(n_ranks):
        found = torch.load(folder / f"{i}.{rank}")
        seen |= found.keys()
        error = max([error, *(float((g - wanted[name]).abs().max()) / largest for name, g in found.items())])
    assert seen == wanted.keys()
    return error


@pytest.fixture
def ranks():
    return pool("gloo")


@pytest.fixture(scope="module")
def eight():
    with_eight = Pool("gloo", 8)
    yield with_eight
    with_eight.close()


def check_every_product(ranks: Pool, folder: Path, program: str, engine: str, n_ranks: int, n_steps: int) -> int:
    """Returns how many of them were trained; all others were refused."""
    options = f"--steps {n_steps}"
    gradient, expected = alone(program, options, folder)
    cases = products(n_ranks)
    commands = [f"{command(program, engine, case)} {options} --log {folder}/log{i}" for i, case in enumerate(cases)]
    results = ranks.run(programs.observe_all, commands, str(folder), n_ranks=n_ranks, time_limit_s=LONG_S).values
    n_trained = 0
    for i, degrees in enumerate(cases):
        said = {result[i] for result in results}
        if why := reason(program, engine, degrees):
            assert all(status == 2 and why in line and line.count("\n") == 1 for status, line in said), said
            continue
        assert said == {(0, "")}, (commands[i], said)
        assert largest_error(folder, i, n_ranks, gradient) < RTOL, commands[i]
        for found, wanted in zip(curve(folder / f"log{i}"), expected, strict=True):
            assert found == pytest.approx(wanted, rel=RTOL), commands[i]
        n_trained += 1
    return n_trained


@pytest.mark.time_limit(400)
@pytest.mark.parametrize("engine", ["ours", pytest.param("torch", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("program", "n_trained"), [("vit", 10), ("gpt2", 15)])
def test_every_product_of_four_trains_as_one_process_does_or_is_refused(ranks, tmp_path, program, engine, n_trained):
    assert check_every_product(ranks, tmp_path, program, engine, 4, n_steps=2) == n_trained


@pytest.mark.time_limit(400)
@pytest.mark.parametrize(
    ("engine", "n_ranks", "n_trained"),
    [("ours", 2, 5), ("ours", 4, 15), pytest.param("torch", 4, 10, marks=pytest.mark.exhaustive)],
)
def test_every_product_trains_a_mixture_as_one_process_does_or_is_refused(ranks, tmp_path, engine, n_ranks, n_trained):
    assert check_every_product(ranks, tmp_path, "mixture", engine, n_ranks, n_steps=2) == n_trained


OF_EIGHT = [
    *((program, engine, n) for program, n in (("vit", 18), ("gpt2", 33)) for engine in ("ours", "torch")),
    ("mixture", "ours", 33),
    ("mixture", "torch", 19),
]


@pytest.mark.exhaustive
@pytest.mark.time_limit(1000)
@pytest.mark.parametrize(("program", "engine", "n_trained"), OF_EIGHT)
def test_every_product_of_eight_trains_as_one_process_does_or_is_refused(eight, tmp_path, program, engine, n_trained):
    assert check_every_product(eight, tmp_path, program, engine, 8, n_steps=1) == n_trained


MESHES = [
    ("ours", {"replicate": 2, "shard": 2}),
    ("torch", {"shard": 2, "tensor": 2}),
    ("ours", {"pipeline": 2, "shard": 2}),
    ("ours", {"context": 2, "tensor": 2}),
    ("torch", {"pipeline": 2, "replicate": 2}),
    ("ours", {"shard": 4}),
    ("torch", {"context": 4}),
    ("ours", {"pipeline": 2, "tensor": 2}),
]


MIXED = [
    ("ours", {"expert": 4}),
    ("torch", {"replicate": 4}),
    ("ours", {"expert": 2, "shard": 2}),
    ("torch", {"shard": 4}),
    ("ours", {"expert": 2, "pipeline": 2}),
    ("ours", {"shard": 2, "context": 2}),
    ("ours", {"expert": 2, "replicate": 2}),
]


@pytest.mark.time_limit(400)
@pytest.mark.parametrize(("program", "meshes"), [("gpt2", MESHES), ("mixture", MIXED)])
def test_a_checkpoint_goes_on_on_any_other_mesh(ranks, tmp_path, program, meshes):
    """One step in one process, one on each mesh in turn, and one in one process again:
    the checkpoints of all are read by another.
    """
    n_steps = len(meshes) + 2
    flags = (
        "--optimizer adamw --lr 1e-2 --min-lr 1e-2"  # so that the rate of a step does not depend on the number of steps
    )
    there = f"{flags} --checkpoint {tmp_path}/ck --log {tmp_path}/log"
    commands = [
        f"{command(program, engine, dict.fromkeys(KINDS, 1) | degrees)} {there} --steps {n_done}"
        for n_done, (engine, degrees) in enumerate(meshes, start=2)
    ]
    with programs.small_models():
        assert programs.observe(f"{RUN[program]} {flags} --log {tmp_path}/whole --steps {n_steps}")["status"] == 0
        assert programs.observe(f"{RUN[program]} {there} --steps 1")["status"] == 0
    results = ranks.run(programs.observe_all, commands, str(tmp_path), n_ranks=4, time_limit_s=LONG_S).values
    assert results == [[(0, "")] * len(meshes)] * 4
    assert not (tmp_path / "ck/checkpoint.pt").exists()
    with programs.small_models():
        assert programs.observe(f"{RUN[program]} {there} --steps {n_steps}")["said"] == ""
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["checkpoint.pt"]
    assert len(curve(tmp_path / "log")) == n_steps
    for found, wanted in zip(curve(tmp_path / "log"), curve(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)  # AdamW's first steps divide rounding errors by tiny roots


@pytest.mark.time_limit(100)
def test_in_16_bits_a_spread_mixture_trains_as_one_process_does(ranks, tmp_path):
    """The products of the experts are in bfloat16 too, and their gradients in float32."""
    flags = "--steps 3 --precision bf16"
    _, expected = alone("mixture", flags, tmp_path)
    meshes = [{"expert": 2, "replicate": 2}, {"expert": 2, "shard": 2}]
    commands = [
        f"{command('mixture', 'ours', dict.fromkeys(KINDS, 1) | degrees)} {flags} --log {tmp_path}/log{i}"
        for i, degrees in enumerate(meshes)
    ]
    results = ranks.run(programs.observe_all, commands, str(tmp_path), n_ranks=4, time_limit_s=LONG_S).values
    assert results == [[(0, "")] * len(meshes)] * 4
    for i in range(len(meshes)):
        for found, wanted in zip(curve(tmp_path / f"log{i}"), expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-2)
    assert {g.dtype for g in torch.load(tmp_path / "0.0").values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_experts_compute_in_the_precision_of_the_run(monkeypatch, precision):
    seen = []

    def watched(x, weights, counts):
        seen.append((x.dtype, weights.dtype))
        return grouped_matmul(x, weights, counts)

    monkeypatch.setattr(moe, "grouped_matmul", watched)
    with programs.small_models():
        assert programs.observe(f"{RUN['mixture']} --steps 1 --precision {precision}")["status"] == 0
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    assert set(seen) == {(dtype, dtype)}


def test_the_bias_moves_towards_experts_that_got_too_little(tmp_path):
    with programs.small_models():
        assert programs.observe(f"{RUN['mixture']} --steps 1 --checkpoint {tmp_path}")["status"] == 0
        state = torch.load(tmp_path / "checkpoint.pt")["state"]
        other = programs.observe(f"{RUN['gpt2']} --steps 2 --checkpoint {tmp_path}")
    bias = torch.tensor(state["router_bias"])
    assert bias.shape == (4, 4)
    assert bias.abs().unique().tolist() in ([pytest.approx(0.1)], [0.0, pytest.approx(0.1)])
    assert all(row.min() < 0 < row.max() for row in bias)
    assert other["status"] == 2
    assert "mixture = {'n_experts': 4, 'top_k': 2}, this one has None" in other["said"]


@pytest.mark.time_limit(100)
def test_the_planners_choice_is_a_command_that_runs(ranks, tmp_path):
    text = programs.TEXT
    chosen = plan(
        FFNConfig(text.dim, 6 * text.dim, text.n_layers), 4, 1.2e5, Bandwidths(1e9, 1e9), tokens_per_device=64
    )
    printed = chosen.layout.command(
        "--batch 16", f"--data synthetic --items 20 --steps 2 --log {tmp_path}/log", program="gpt2"
    )
    launcher, _, words = printed.partition(" -m ")
    assert launcher == "torchrun --nproc-per-node 4"
    assert math.prod(vars(chosen.layout).values()) == 4
    assert chosen.layout.n_devices > chosen.layout.data, "the test wants a choice that divides the model"
    results = ranks.run(programs.observe_all, [words], str(tmp_path), n_ranks=4, time_limit_s=LONG_S).values
    assert results == [[(0, "")]] * 4
    assert len(curve(tmp_path / "log")) == 2


def test_on_several_hosts_the_planners_command_says_so():
    layout = Layout(data=2, sharded=4, tensor=2, pipeline=2)
    assert layout.command("--model xl") == (
        "torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint $FIRST_HOST:29500 --nproc-per-node 8 -m "
        "lib.runs.train_gpt2 "
        "--model xl --replicate 2 --shard 4 --tensor 2 --pipeline 2 --accumulate 8"
    )
    assert Layout().command() == "torchrun --nproc-per-node 1 -m lib.runs.train_gpt2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replicate 2 --shard 2", ("--replicate 2 x --shard 2 is 4 ranks", "8 were started", "product is 8")),
        ("--tensor 3", ("--tensor 3 is 3 ranks", "8 were started")),
        ("--tensor 3 --shard -1", ("--shard -1 x --tensor 3", "multiple of 3", "8 were started", "8 = 2 x 3 + 2")),
        ("--shard -1 --replicate -1", ("more than one degree is -1",)),
        ("--shard 0", ("--shard", "'0'", "at least 1")),
        ("--strategy ddp --shard 8", ("--strategy ddp with --shard 8", "either")),
        ("--tensor 8", ("n_heads = 2", "--tensor 8", "2 = 0 x 8 + 2")),
        ("--pipeline 4 --replicate 2", ("n_layers = 2", "at most 2 stages")),
        ("--pipeline 2 --shard 4 --engine torch", ("--accumulate 1", "--accumulate 2 or more")),
        ("--context 8 --length 24", ("length = 24", "two chunks", "24 = 1 x 16 + 8")),
        ("--shard 4 --tensor 2 --path fast", ("--path fast", "--shard 4 --tensor 2", "--path plain")),
        ("--shard 4 --replicate 2 --batch 12", ("--batch 12", "8 ranks x 1 micro-batches", "12 = 1 x 8 + 4")),
        ("--pipeline 2 --shard 4 --precision float16", ("--precision float16", "--pipeline 2", "bf16")),
        ("--expert 8", ("--expert 8: the model has no experts without --n-experts", "--expert 1")),
        ("--n-experts 12 --expert 8", ("n_experts = 12", "--expert 8", "12 = 1 x 8 + 4")),
        ("--n-experts 8 --expert 4 --tensor 2", ("--tensor 2", "divided by --expert", "--tensor 1")),
        ("--n-experts 8 --expert 8 --engine torch", ("--expert 8 --engine torch", "--engine ours")),
        ("--n-experts 8 --expert 8 --batch 12", ("--batch 12", "8 ranks x 1 micro-batches")),
        ("--n-experts 2 --top-k 3 --shard 8", ("--top-k 3", "--n-experts 2", "at most 2")),
        ("--n-experts 2 --shard 8 --export out", ("--export with --n-experts 2", "no --export")),
        ("--bias-rate 0.1 --shard 8", ("--bias-rate 0.1 without --n-experts",)),
        ("--n-experts 2 --shard 8 --path fast", ("--path fast with --n-experts 2", "--path plain")),
        ("--n-experts 2 --shard 8 --compile", ("--compile blocks with --n-experts 2", "no --compile")),
    ],
)
def test_a_wrong_arrangement_is_one_line_and_status_2(monkeypatch, flags, words):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    found = programs.observe(f"gpt2 {flags}")
    assert found["status"] == 2
    assert found["said"].count("\n") == 1
    for word in words:
        assert word in found["said"], (word, found["said"])


def test_minus_one_is_what_the_other_degrees_leave():
    options = parse(make_parser("lib.runs.train_x", ["tiny"], "items", ""), ["--shard", "-1", "--tensor", "2"])
    assert (arrange(options, 8).shard, arrange(options, 2).shard) == (4, 1)


@pytest.mark.parametrize("strategy", ["cp", "pp"])
def test_one_rank_is_no_ring_and_no_pipeline(tmp_path, strategy):
    plain, expected = alone("gpt2", "--steps 2", tmp_path)
    with programs.small_models():
        found = programs.observe(f"{RUN['gpt2']} --steps 2 --strategy {strategy} --log {tmp_path}/log")
    assert (found["status"], found["said"]) == (0, "")
    assert curve(tmp_path / "log") == [pytest.approx(pair, rel=RTOL) for pair in expected]
    assert found["gradient"].keys() == plain.keys()
