"""``train_llama --family``: every family learns, resumes and divides as chapter 4's Llama does, and its export is a
model of Transformers'."""

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib.given.models.llama import LLAMA_2_7B, TINY
from lib.given.models.serving import Request
from lib.given.models.variants import DEFAULTS, FULL, LINEAR, SLIDING, variant_of
from lib.ranks import pool
from lib.runs import evaluate, serve
from lib.runs.engine import variants
from lib.runs.flags import UsageError
from lib.runs.memory import state_bytes
from lib.runs.serving import models
from lib.runs.serving.admission import StateScheduler, count_states
from lib.runs.serving.engine import make_engine
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.wanted import Wanted
from lib.runs.train_llama import main
from lib.serving import Scheduler, generate_many
from tests.house.runs import runs_programs as programs
from tests.house.runs.test_runs import curve, on_ranks, same, train

CASES = {
    "qwen3": "--window 5 --interval 2",
    "olmo3": "",
    "gemma3": "--window 3",
    "gemma2": "--window 3",
    "gpt_oss": "--window 3",
    "qwen3_next": "",
}
WAYS = [f"--strategy {strategy} --engine {engine}" for strategy in ("ddp", "fsdp") for engine in ("ours", "torch")]
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(120)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.exhaustive] if family in ("qwen3", "olmo3", "gemma2", "gemma3") else [])
        for family in CASES
    ],
)
def test_a_family_trains_in_copies_and_shards_and_goes_on_bit_for_bit(family, tmp_path):
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question\n" * 40)
    command = f"llama --data {tmp_path}/words.txt --family {family} {CASES[family]} --batch 4 --length 12 --lr 1e-2"
    command += " --clip 0.5 --save-every 1"
    train(f"{command} --steps 4 --log {tmp_path}/alone --export {tmp_path}/exported --checkpoint {tmp_path}/alone_ck")
    alone = curve(tmp_path / "alone")
    assert alone[3][0] < 0.9 * alone[0][0]
    whole = [f"{command} --steps 4 {way} --log {tmp_path}/whole{i}" for i, way in enumerate(WAYS)]
    mine = list(CASES).index(family) % len(WAYS)  # each family goes on in another way
    here = [f"{command} --steps 4 {WAYS[mine]} --log {tmp_path}/here --checkpoint {tmp_path}/ck"]
    on_ranks(programs.whole_and_killed, whole, here, [], 2)
    assert curve(tmp_path / "here") == curve(tmp_path / f"whole{mine}")
    for i in range(len(WAYS)):
        for step, pair in curve(tmp_path / f"whole{i}").items():
            assert pair == pytest.approx(alone[step], rel=2e-3), (WAYS[i], step)
    check_export(family, tmp_path)


def check_export(family, folder):
    """Transformers, the server's loader and the checkpoint have the same model; the evaluation takes it."""
    theirs = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    assert type(theirs).__name__.lower() == f"{family.replace('_', '')}forcausallm"
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    for place in ("exported", "alone_ck", "ck"):
        served = models.load(str(folder / place), None, "bytes", torch.float32, torch.device("cpu"))
        if place != "ck":
            torch.testing.assert_close(served.model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    (folder / "one.jsonl").write_text(json.dumps({"query": "7", "choices": ["1", "2"], "gold": 0}))
    flags = ["--model", str(folder / "ck"), "--tasks", str(folder / "one.jsonl"), "--shots", "0", "--device", "cpu"]
    assert evaluate.main([*flags, "--tokenizer", "bytes"]) == 0


@pytest.mark.parametrize(("n_ranks", "length", "dtype"), [(2, 14, torch.float64), (3, 9, torch.float32)])
def test_a_linear_layer_hands_one_state_to_the_next_rank(n_ranks, length, dtype):
    result = pool("gloo").run(programs.divided_states, length, dtype, n_ranks=n_ranks, time_limit_s=100)
    state, rows = 2 * 4 * 6 * 5 * dtype.itemsize, 2 * 2 * (2 * 2 * 6 + 4 * 5) * dtype.itemsize
    for rank, ledger in enumerate(result.ledgers):
        forward = ledger.before("backward")
        backward = [record for record in ledger.before("end") if record not in forward]
        for records, sends in ((forward, rank < n_ranks - 1), (backward, rank > 0)):
            sent = sorted(record.n_bytes for record in records if record.to is not None)
            assert sent == sorted([state, rows] if sends else [])  # the convolution's last inputs, and one state


def test_divided_sequences_train_as_one_process_does(tmp_path):
    command = (
        "llama --data synthetic --items 16 --batch 4 --length 16 --steps 3 --lr 1e-2 --eval-every 2 --optimizer sgd"
    )
    cases = {"qwen3": ["--strategy cp"], "qwen3_next": ["--strategy cp", "--strategy cp --engine torch"]}
    ways = [(family, way) for family, found in cases.items() for way in found]
    train(*(f"{command} --family {family} --log {tmp_path}/{family}" for family in cases))
    on_ranks(
        programs.run_all, [f"{command} --family {f} {way} --log {tmp_path}/{i}" for i, (f, way) in enumerate(ways)]
    )
    for i, (family, _) in enumerate(ways):
        same(tmp_path / str(i), curve(tmp_path / family), 1e-3)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
def test_a_family_trains_in_mixed_precision(family, tmp_path):
    command = f"llama --family {family} --data synthetic --items 8 --batch 4 --length 12 --steps 2 --lr 1e-2"
    train(f"{command} --log {tmp_path}/whole")
    for engine in ("ours", "torch"):
        train(f"{command} --precision bf16 --engine {engine} --log {tmp_path}/{engine}")
        for step, (loss, _) in curve(tmp_path / engine).items():
            assert loss == pytest.approx(curve(tmp_path / "whole")[step][0], rel=0.02)


def test_a_preset_of_a_family_has_the_layers_that_were_asked_for():
    made = {family: variant_of(LLAMA_2_7B, family) for family in DEFAULTS}
    assert made["qwen3"].layer_types == [FULL] * 32
    assert made["olmo3"].layer_types[:4] == [SLIDING, SLIDING, SLIDING, FULL]
    assert made["gemma2"].layer_types[:2] == [SLIDING, FULL]
    assert (made["gemma2"].softcap, made["gemma2"].logits_softcap) == (50.0, 30.0)
    assert made["gemma3"].layer_types.index(FULL) == 5
    assert made["gemma3"].sliding_window == 1024
    assert made["qwen3_next"].layer_types[:4] == [LINEAR, LINEAR, LINEAR, FULL]
    assert variant_of(TINY, "qwen3_next").layer_types == [LINEAR, LINEAR, FULL]
    assert variant_of(TINY, "qwen3", 7, 2).layer_types == [SLIDING, FULL, SLIDING]


def test_the_flops_of_a_token_count_what_its_layers_see():
    plain, length = variants.flops_per_token(TINY), TINY.context_len
    full, near = variant_of(TINY, "qwen3"), variant_of(TINY, "qwen3", 16, 3)
    assert variants.flops_per_token(full) == plain
    assert plain - variants.flops_per_token(near) == 6 * 2 * 2 * TINY.dim * (length - 16)
    assert variants.weights_per_token(variant_of(TINY, "gemma3")) == variants.weights_per_token(
        full
    )  # its head is tied
    hybrid = variant_of(TINY, "qwen3_next")
    grown = [variants.flops_per_token(variant_of(TINY.__class__(**vars(TINY) | {"context_len": n}), "qwen3_next"))
             for n in (256, 512)]  # fmt: skip
    assert grown[1] - grown[0] == 6 * 2 * TINY.dim * 256  # of the one layer that sees everything
    assert hybrid.linear_num_value_heads * hybrid.linear_value_head_dim == 2 * TINY.dim


@pytest.mark.parametrize(("flags", "words"), [
    ("--window 8", ("--window 8", "--family llama", "gemma3")),
    ("--family qwen3_next --window 8", ("--window 8", "qwen3_next")),
    ("--interval 2", ("--interval 2", "--family llama")),
    ("--family qwen3 --interval 2", ("--interval 2", "--window")),
    ("--family gemma3 --interval 4", ("--interval 4", "3 layers")),
    ("--family gemma1", ("'gemma1'", "gemma2")),
    ("--family gemma3 --window 0", ("--window", "0")),
    ("--family qwen3_next --strategy tp", ("--strategy tp", "--family qwen3_next", "fsdp")),
    ("--family gemma2 --interval 1 --strategy cp", ("--strategy cp", "--family gemma2", "fsdp")),
    ("--family gpt_oss --interval 1 --strategy cp", ("--strategy cp", "--family gpt_oss", "fsdp")),
    ("--family gemma3 --strategy cp", ("--strategy cp", "--family gemma3", "fsdp")),
    ("--family gemma3 --strategy pp", ("--strategy pp", "--family gemma3", "fsdp")),
    ("--family gemma3 --path fast", ("--path fast", "--path plain")),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(flags, words, capsys):
    assert main([*flags.split(), "--quiet"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in said for word in words), said


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    command = f"llama --data synthetic --items 8 --batch 4 --length 8 --steps 1 --checkpoint {tmp_path}"
    train(command)
    ((status, said),) = programs.run_all(0, 1, [f"{command} --steps 2 --family qwen3"])
    assert status == 2
    assert "family = 'llama', this one has 'qwen3'" in said


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A checkpoint of a hybrid."""
    folder = tmp_path_factory.mktemp("hybrid")
    assert main(f"--family qwen3_next --data synthetic --items 8 --batch 4 --length 8 --steps 1 --quiet "
                f"--checkpoint {folder} --device cpu".split()) == 0  # fmt: skip
    return folder


def test_a_program_that_trains_plain_models_refuses_a_family(hybrid):
    with pytest.raises(UsageError, match=r"family qwen3_next.*expected a plain Llama or a GPT-2"):
        models.load_plain(str(hybrid), "bytes")


def test_drafts_are_refused_where_a_state_cannot_take_them_back(hybrid):
    model = models.load(str(hybrid), None, "bytes", torch.float32, torch.device("cpu")).model
    options = serve.make_parser().parse_args(["--model", str(hybrid), "--draft", "prompt"])
    with pytest.raises(UsageError, match=r"--draft prompt.*linear layers.*expected no --draft"):
        make_engine(model, Scheduler(8, 8, 4), Counter(), options)


def test_answers_to_one_prompt_go_on_from_copies_of_its_state(hybrid):
    """As if each was asked alone; and no beginning is taken from the tree, whose blocks hold no state."""
    model = models.load(str(hybrid), None, "bytes", torch.float32, torch.device("cpu")).model
    prompt, found = [3, 1, 4, 1, 5], list[int]()
    engine = PrefixEngine(model, Scheduler(16, 32, 2), found.append)
    first = Request(prompt, 3, temperature=1.0, seed=1)
    others = [Wanted(prompt, 3, temperature=1.0, seed=seed, first=first) for seed in (2, 3)]
    tokens: dict[Request, list[int]] = {request: [] for request in (first, *others)}
    for request in tokens:
        engine.submit(request)
    assert engine.n_held == 2
    while engine.is_busy:
        for request, token in engine.step():
            tokens[request].append(token)
    for request, drawn in tokens.items():
        alone = Request(prompt, 3, temperature=1.0, seed=request.seed)
        assert [token for _, token in generate_many(model, [alone], Scheduler(16, 32, 2))] == drawn
    assert set(found) == {0}
    assert engine.states.held == {}
    assert state_bytes(model.config, torch.float32) == 2 * 4 * (3 * 512 + 8 * 32 * 32)


def test_no_more_sequences_run_than_there_are_states(hybrid):
    """Forks too; those that wait keep their order, and every answer is what it is with room for all."""
    model = models.load(str(hybrid), None, "bytes", torch.float32, torch.device("cpu")).model
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5], [8]]
    answers, most = {}, {}
    for name, scheduler in (("two", StateScheduler(16, 64, 2, 2)), ("all", Scheduler(16, 64, 2))):
        engine = PrefixEngine(model, scheduler)
        first = Request(prompts[0], 3)
        requests = [first, *(Wanted(prompts[0], 3, first=first) for _ in range(3)), *(Request(p, 2) for p in prompts)]
        found: dict[Request, list[int]] = {request: [] for request in requests}
        for request in requests:
            engine.submit(request)
        began, most[name] = [], 0
        while engine.is_busy:
            for request, token in engine.step():
                found[request].append(token)
                began += [request] if request not in began else []
            most[name] = max(most[name], len(engine.states.held), len(scheduler.running))
        answers[name] = list(found.values())
        assert name == "all" or [r for r in began if r in requests[4:]] == requests[4:]
    assert most["two"] == 2 < most["all"]
    assert answers["two"] == answers["all"]
    assert count_states(model.config, torch.float32, torch.device("cpu"), 10**9) > 64
    assert count_states(model.config, torch.float32, torch.device("cpu"), 8) == 64
    assert count_states(LLAMA_2_7B, torch.float32, torch.device("cpu"), 8) == 0
