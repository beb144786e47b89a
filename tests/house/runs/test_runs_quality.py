"""What a run says about its model and leaves behind: evaluations, samples, the best checkpoint, exports,
and chapter 4's Llama in training.
"""

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lib.given.models import gpt2 as gpt2_models
from lib.given.models import llama as llama_models
from lib.given.models.vit import PRESETS, TINY, ViTConfig, hf_names
from lib.runs.engine import export, sources, state
from lib.runs.engine.arguments import make_parser
from lib.runs.engine.log import read_log
from lib.runs.engine.loop import Run
from lib.runs.engine.request import parse
from lib.runs.engine.sources import Pictures, Tokens, open_tokens
from solutions import gpt2, llama, scaling_laws, vit
from tests.house.runs import runs_programs as programs
from tests.house.runs.test_runs import curve, on_ranks, refused, train

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT = "to be or not to be, that is the question\n" * 40
LOOK = "--steps 4 --warmup 1 --eval-every 2"
VIT = f"vit --batch 12 --data synthetic --items 60 {LOOK}"
WRITES = f"--batch 4 --length 16 {LOOK} --sample-every 3 --prompt to --sample-tokens 12"
SIMPLE = [f"--strategy {strategy} --engine {engine}" for strategy in ("ddp", "fsdp") for engine in ("ours", "torch")]
DIVIDED = [f"--strategy tp --engine {engine}" for engine in ("ours", "torch")]
DIVIDED += [f"--strategy pp --accumulate 2 --engine {engine}" for engine in ("ours", "torch")]
LONG = [f"--strategy cp --engine {engine}" for engine in ("ours", "torch")]
PRODUCTS = ["--replicate 2 --shard 2", "--tensor 2 --context 2", "--pipeline 2 --shard 2 --accumulate 2"]
PRODUCTS += ["--pipeline 2 --shard 2 --accumulate 2 --engine torch"]
SGD = "--optimizer sgd --lr 0.1"  # AdamW would divide rounding errors by tiny roots
WAYS = {"vit": [SIMPLE[2], DIVIDED[1], DIVIDED[2]], "gpt2": SIMPLE + DIVIDED + LONG, "llama": SIMPLE[1:3]}


@pytest.fixture
def words(tmp_path) -> Path:
    (tmp_path / "words.txt").write_text(TEXT)
    return tmp_path / "words.txt"


def evaluations(log: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in read_log(log, "held_out_loss")}


def samples(log: Path) -> dict[int, str]:
    return {line["step"]: line["sample"] for line in read_log(log, "sample")}


# ---- evaluations and samples ----


@pytest.mark.time_limit(200)
def test_every_strategy_finds_the_scores_and_writes_the_text_of_one_process(tmp_path, words):
    base = {"vit": VIT, "gpt2": f"gpt2 --data {words} {WRITES}", "llama": f"llama --data {words} {WRITES}"}
    base = {name: f"{command} {SGD}" for name, command in base.items()}
    train(*(f"{command} --log {tmp_path / name} --export {tmp_path}/{name}.x" for name, command in base.items()))
    runs = {f"{name}.{i}": f"{base[name]} {way}" for name, ways in WAYS.items() for i, way in enumerate(ways)}
    on_ranks(programs.run_all, [f"{c} --log {tmp_path / log} --export {tmp_path / log}.x" for log, c in runs.items()])
    on_four = {f"gpt2.{90 + i}": f"{base['gpt2']} {way}" for i, way in enumerate(PRODUCTS)}
    commands = [f"{c} --log {tmp_path / log} --export {tmp_path / log}.x" for log, c in on_four.items()]
    on_ranks(programs.run_all, commands, n_ranks=4)
    for log, command in (runs | on_four).items():
        name = log.partition(".")[0]
        alone, found = evaluations(tmp_path / name), evaluations(tmp_path / log)
        assert list(found) == list(alone) == [1, 3]
        for step, scores in found.items():
            assert scores == pytest.approx(alone[step], rel=2e-4), (command, step)
        assert samples(tmp_path / log) == samples(tmp_path / name), command
        whole = load_file(tmp_path / f"{name}.x" / "model.safetensors")
        exported = load_file(tmp_path / f"{log}.x" / "model.safetensors")
        assert exported.keys() == whole.keys(), command
        for key, tensor in exported.items():
            torch.testing.assert_close(tensor, whole[key], rtol=2e-3, atol=2e-4, msg=f"{key} of {command}")
    assert set(samples(tmp_path / "gpt2")) == set(samples(tmp_path / "llama")) == {2, 3}
    assert all(text.startswith("to") and len(text) > 2 for text in samples(tmp_path / "gpt2").values())
    assert set(evaluations(tmp_path / "vit")[1]) == {"held_out_loss", "held_out_top1"}
    scores = evaluations(tmp_path / "gpt2")[3]
    assert scores["held_out_perplexity"] == pytest.approx(torch.tensor(scores["held_out_loss"]).exp().item())


@pytest.mark.time_limit(200)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_low_precision_and_compiled_models_are_evaluated_too(tmp_path, words):
    base = {"vit": VIT, "gpt2": f"gpt2 --data {words} --batch 4 --length 16 {LOOK}"}
    train(*(f"{command} --log {tmp_path / name}" for name, command in base.items()))
    low = ["--precision bf16", "--precision float16 --path plain", "--precision bf16 --path plain --engine torch"]
    train(*(f"{c} {way} --log {tmp_path / name}.{i}" for name, c in base.items() for i, way in enumerate(low)))
    for name, command in base.items():
        assert programs.run_compiled(0, 1, f"{command} --compile --log {tmp_path / name}.3") == [(0, "")]
    sharded = [f"--strategy fsdp --precision bf16 --engine {engine}" for engine in ("ours", "torch")]
    runs = {f"{name}.{4 + i}": f"{c} {way}" for name, c in base.items() for i, way in enumerate(sharded)}
    on_ranks(programs.run_all, [f"{command} --log {tmp_path / log}" for log, command in runs.items()])
    for log in [f"{name}.{i}" for name in base for i in range(6)]:
        alone, found = evaluations(tmp_path / log.partition(".")[0]), evaluations(tmp_path / log)
        assert list(found) == [1, 3]
        for step, scores in found.items():
            assert scores["held_out_loss"] == pytest.approx(alone[step]["held_out_loss"], rel=0.05), (log, step)


@pytest.mark.parametrize(
    "command", [VIT, f"gpt2 --batch 4 --length 16 --data synthetic --items 30 {LOOK} --held-out 0.3"]
)
def test_what_is_held_out_is_never_trained_on_and_evaluated_once_each_time(monkeypatch, command):
    trained, evaluated, passes = list[Any](), list[Any](), list[Any]()
    fetch = Run.fetch

    def watched(self, numbers):
        is_training = self.strategy.loss.training
        (trained if is_training else evaluated).extend(numbers.tolist())
        if is_training and evaluated:
            passes.append(sorted(evaluated))
            evaluated.clear()
        return fetch(self, numbers)

    monkeypatch.setattr(Run, "fetch", watched)
    train(command.replace("--steps 4", "--steps 20"))
    n_held_out, n = {"vit": (12, 60), "gpt2": (8, 30)}[command.split()[0]]
    assert set(trained) == set(range(n - n_held_out))
    assert len(passes) == 9
    assert all(once == list(range(n - n_held_out, n)) for once in [*passes, sorted(evaluated)])


def test_the_scores_are_those_of_the_held_out_items(tmp_path, words):
    command = f"gpt2 --data {words} --batch 4 --length 16 --steps 1 --lr 0 --eval-every 1 --held-out 0.2"
    train(f"{command} --log {tmp_path / 'log'} --checkpoint {tmp_path / 'ck'}")
    config = replace(gpt2_models.TINY, context_len=16, padded_vocab_size=gpt2.pad_vocab(gpt2_models.TINY.vocab_size))
    model = gpt2.GPT2(config)
    model.load_state_dict(state.read_model(tmp_path / "ck"))
    ids = torch.tensor(list(TEXT.encode()))
    n = (len(ids) - 1) // 16
    n_held_out = int(0.2 * n) // 4 * 4
    rows = [ids[i * 16 : i * 16 + 17] for i in range(n - n_held_out, n)]
    with torch.no_grad():
        loss = model(torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows]))[1]
    assert evaluations(tmp_path / "log")[0]["held_out_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_pictures_are_held_out_at_random_and_keep_their_labels():
    pictures = torch.arange(40.0)[:, None, None, None].expand(40, 1, 2, 2)
    source = Pictures(pictures=pictures, labels=torch.arange(40) // 10, shape=(1, 2, 2), n_classes=4, n=40)
    source.hold_out(12)
    assert (source.n, source.n_held_out) == (28, 12)
    assert set(source.labels[28:].tolist()) == {0, 1, 2, 3}
    assert torch.equal(source.pictures[:, 0, 0, 0].long() // 10, source.labels)
    assert sorted(source.pictures[:, 0, 0, 0].tolist()) == list(range(40))


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path):
    (tmp_path / "two.txt").write_text("abab " * 400 + "xyxy " * 100)
    flags = ["--data", str(tmp_path / "two.txt"), "--eval-every", "1", "--held-out", "0.2"]
    options = replace(parse(make_parser("x", ["tiny"], "sequences", ""), flags), tokenizer="bpe")
    tokens = open_tokens(options, 300, 8)
    assert isinstance(tokens, Tokens)
    assert len(tokens.codec.encode("abab")) == 1
    assert len(tokens.codec.encode("xyxy")) == 4
    assert tokens.codec.decode(tokens.codec.encode("xy ab")) == "xy ab"


def test_runs_without_an_evaluation_read_the_same_items_as_before(tmp_path):
    options = parse(make_parser("x", ["tiny"], "images", ""), [])
    assert sources.open_pictures(options, 1, 10, 8).n_held_out == 0


# ---- the best checkpoint ----


@pytest.mark.time_limit(200)
def test_the_best_checkpoint_outlives_worse_steps_and_a_killed_run(tmp_path):
    command = f"{VIT} --optimizer sgd --lr 0.5 --warmup 0 --save-every 2".replace("--steps 4", "--steps 6")
    ways = ["", "--strategy ddp", "--strategy fsdp --engine torch"]
    whole = [f"{command} {way} --log {tmp_path}/whole{i} --checkpoint {tmp_path}/a{i}" for i, way in enumerate(ways)]
    here = [f"{command} {way} --log {tmp_path}/here{i} --checkpoint {tmp_path}/b{i}" for i, way in enumerate(ways)]
    for result in programs.whole_and_killed(0, 1, whole[:1], here[:1], [], 5):
        assert result == (0, "")
    on_ranks(programs.whole_and_killed, whole[1:], here[1:], [], 5)
    for i in range(len(ways)):
        found = evaluations(tmp_path / f"here{i}")
        assert found == evaluations(tmp_path / f"whole{i}")
        assert list(found) == [1, 3, 5]
        assert curve(tmp_path / f"here{i}") == curve(tmp_path / f"whole{i}")
        step = min(found, key=lambda step: found[step]["held_out_loss"])
        assert step < 5, "the test wants a run that becomes worse"
        for folder in (tmp_path / f"a{i}", tmp_path / f"b{i}"):
            last, best = described(folder), described(folder / "best")
            assert (last["step"], best["step"]) == (6, step + 1)
            assert last["best"] == best["best"] == {"step": step + 1, **found[step]}


def described(folder: Path) -> dict:
    path = state.newest(folder)
    if path.name == state.FILE:
        return torch.load(path, weights_only=True)["state"]
    return json.loads((path / state.STATE).read_text())


def test_a_run_with_another_held_out_part_is_refused(capsys, tmp_path):
    train(f"{VIT} --checkpoint {tmp_path}")
    refused(capsys, f"{VIT} --held-out 0.4 --checkpoint {tmp_path} --quiet", "items = 48", "36")
    refused(capsys, f"{VIT} --checkpoint {tmp_path} --quiet".replace("--eval-every 2", ""), "items = 48", "60")


def test_a_model_that_diverged_is_never_the_best_and_writes_nothing(tmp_path, words):
    train(f"gpt2 --data {words} {WRITES} --optimizer sgd --lr 1e30 --log {tmp_path / 'text'}")
    assert samples(tmp_path / "text") == {2: "to", 3: "to"}
    train(f"{VIT} --optimizer sgd --lr 1e30 --warmup 0 --log {tmp_path / 'log'} --checkpoint {tmp_path / 'ck'}")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["not_finite"]["held_out_loss"] for line in lines if "held_out_loss" in line] == ["nan", "nan"]
    assert not (tmp_path / "ck" / "best").exists()
    assert described(tmp_path / "ck")["best"] is None


# ---- exports ----


@pytest.mark.time_limit(100)
def test_transformers_loads_what_was_trained_with_the_same_logits(tmp_path, words):
    from transformers import AutoModelForCausalLM

    command = f"--data {words} --batch 4 --length 16 --steps 3 --lr 1e-2 --eval-every 1"
    padded = replace(gpt2_models.TINY, context_len=16, padded_vocab_size=gpt2.pad_vocab(gpt2_models.TINY.vocab_size))
    models = {"gpt2": gpt2.GPT2(padded), "llama": llama.Llama(replace(llama_models.TINY, context_len=16))}
    tokens = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(0))
    model: Any
    for name, model in models.items():
        train(f"{name} {command} --checkpoint {tmp_path / name} --export {tmp_path / name}.x")
        for part in ("", "best"):
            model.load_state_dict(state.read_model(tmp_path / name / part))
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}.x" / part).eval()
            with torch.no_grad():
                ours = model(tokens)[0] if name == "gpt2" else model(tokens)
                torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-5)
        assert theirs.config.vocab_size == model.config.vocab_size
    again = gpt2.load_pretrained(tmp_path / "gpt2.x" / "best")
    torch.testing.assert_close(again(tokens)[0], models["gpt2"](tokens)[0])


def test_an_exported_gpt2_has_no_rows_of_padding():
    config = gpt2_models.GPT2Config(vocab_size=40, context_len=8, dim=16, n_layers=1, n_heads=2, padded_vocab_size=128)
    tensors, settings = export.gpt2_for_transformers(gpt2.GPT2(config).state_dict(), config)
    assert tensors["transformer.wte.weight"].shape == (40, 16)
    assert settings["vocab_size"] == 40
    assert tensors["transformer.h.0.mlp.c_fc.weight"].shape == (16, 64)


def timm_layout(c: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of timm's ``VisionTransformer``, from its source (timm/models/vision_transformer.py)."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, c.dim), "pos_embed": (1, 1 + c.n_patches, c.dim)}
    shapes |= {
        "patch_embed.proj.weight": (c.dim, c.channels, c.patch_size, c.patch_size),
        "patch_embed.proj.bias": (c.dim,),
    }
    for i in range(c.n_layers):
        linear = {"attn.qkv": (3 * c.dim, c.dim), "attn.proj": (c.dim, c.dim)}
        linear |= {"mlp.fc1": (c.hidden_dim, c.dim), "mlp.fc2": (c.dim, c.hidden_dim)}
        for name, shape in linear.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{i}.{norm}.{part}": (c.dim,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    shapes |= {"norm.weight": (c.dim,), "norm.bias": (c.dim,)}
    return shapes | {"head.weight": (c.n_classes, c.dim), "head.bias": (c.n_classes,)}


@pytest.mark.time_limit(100)
def test_a_vit_is_exported_in_timms_layout_with_the_same_logits(tmp_path):
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    train(f"{VIT} --lr 1e-2 --checkpoint {tmp_path / 'ck'} --export {tmp_path / 'x'}")
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == timm_layout(TINY)
    model = vit.VisionTransformer(TINY)
    model.load_state_dict(state.read_model(tmp_path / "ck"))
    ours = vit.convert_timm_state_dict(tensors, TINY)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in ours.items())
    sizes: dict[str, Any] = {
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": 64,
        "num_hidden_layers": 4,
    }
    sizes |= {"num_attention_heads": 4, "intermediate_size": 128, "num_labels": 10, "layer_norm_eps": 1e-6}
    theirs = ViTForImageClassification(TheirConfig(**sizes)).eval()
    theirs.load_state_dict({hf_names(TINY)[name]: tensor for name, tensor in ours.items()})
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(images).logits, model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.time_limit(100)
def test_timm_loads_the_folder_where_it_is_installed(tmp_path):
    timm = pytest.importorskip("timm", reason="timm needs torchvision, which pulls another torch")
    train(f"{VIT} --lr 1e-2 --checkpoint {tmp_path / 'ck'} --export {tmp_path / 'x'}")
    model = vit.VisionTransformer(TINY)
    model.load_state_dict(state.read_model(tmp_path / "ck"))
    images = torch.randn(3, 1, 8, 8)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), model(images), rtol=1e-4, atol=1e-5)


def test_timms_architecture_and_sizes_are_those_of_the_preset():
    names = {}
    for name, config in PRESETS.items():
        names[name], args = export._architecture(config), export._model_args(config)
        assert int(config.dim * args["mlp_ratio"]) == config.hidden_dim
    assert names["g/14"] == "vit_giant_patch14_224"
    assert names["G/14"] == "vit_gigantic_patch14_224"
    assert names["tiny"] == "vit_base_patch16_224"
    odd = replace(TINY, dim=52, n_heads=4, hidden_dim=151)
    assert int(52 * export._model_args(odd)["mlp_ratio"]) == 151
    with pytest.raises(ValueError, match="pooling = 'mean'"):
        export.vit_for_timm({}, replace(TINY, pooling="mean"))


def test_a_finished_run_is_exported_later(tmp_path):
    train(f"{VIT} --checkpoint {tmp_path / 'ck'}", f"{VIT} --checkpoint {tmp_path / 'ck'} --export {tmp_path / 'x'}")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["best", "config.json", "model.safetensors"]


# ---- Llama ----


@pytest.mark.time_limit(200)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_llama_learns_and_goes_on_where_it_was_killed(tmp_path, words):
    command = f"llama --data {words} --batch 4 --length 16 --steps 6 --save-every 2 --lr 1e-2 --clip 0.5"
    train(f"{command} --log {tmp_path / 'alone'}", f"{command} --precision bf16 --log {tmp_path / 'low'}")
    alone = curve(tmp_path / "alone")
    assert alone[5][0] < 0.8 * alone[0][0]
    assert curve(tmp_path / "low")[5][0] == pytest.approx(alone[5][0], rel=0.1)
    assert programs.run_compiled(0, 1, f"{command} --compile --log {tmp_path / 'compiled'}") == [(0, "")]
    ways = list(enumerate(SIMPLE[::3]))  # each strategy, each engine
    whole = [f"{command} {way} --log {tmp_path}/whole{i}" for i, way in ways]
    here = [f"{command} {way} --log {tmp_path}/here{i} --checkpoint {tmp_path}/ck{i}" for i, way in ways]
    on_ranks(programs.whole_and_killed, whole, here, [], 5)
    for log in ["compiled", *(f"{run}{i}" for run in ("whole", "here") for i, _ in ways)]:
        for step, pair in curve(tmp_path / log).items():
            assert pair == pytest.approx(alone[step], rel=2e-3), (log, step)
    for i, _ in ways:
        assert curve(tmp_path / f"here{i}") == curve(tmp_path / f"whole{i}")


# ---- Weights & Biases ----


def test_weights_and_biases_gets_every_line_where_it_is_asked_to(monkeypatch, tmp_path):
    made = []

    class Fake:
        def __init__(self, **settings):
            self.settings, self.lines, self.is_finished, self.id = settings, [], False, settings.get("id", "abc")
            made.append(self)

        def log(self, line, step):
            self.lines.append({"step": step, **line})

        def finish(self):
            self.is_finished = True

    fake: Any = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = Fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(VIT)
    assert made == []
    begun = f"{VIT} --wandb workbook --checkpoint {tmp_path}"
    train(begun.replace("--steps 4", "--steps 2"), begun)
    first, second = made
    assert (first.settings["project"], first.settings["config"]["batch"]) == ("workbook", 12)
    assert "id" not in first.settings
    assert (second.settings["id"], second.settings["resume"]) == ("abc", "allow")
    assert [line["step"] for line in first.lines] == [0, 1, 1]
    assert "held_out_top1" in first.lines[-1]
    assert [line["step"] for line in second.lines] == [2, 3, 3]
    assert first.is_finished
    assert second.is_finished


def test_weights_and_biases_that_is_not_there_is_one_line(capsys, monkeypatch):
    found = importlib.util.find_spec

    def without(name, *more):
        return None if name == "wandb" else found(name, *more)

    monkeypatch.setattr("lib.runs.engine.request.importlib.util.find_spec", without)
    refused(capsys, "vit --wandb workbook", "--wandb", "pip install wandb")


# ---- what is wrong is one line ----


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vit --eval-every 0", ("--eval-every", "'0'", "at least 1")),
        ("vit --eval-every 5 --held-out 1", ("--held-out", "'1'", "between 0 and 1")),
        ("vit --held-out 0.2", ("--held-out 0.2", "--eval-every")),
        ("vit --eval-every 5 --batch 1000", ("--held-out 0.1", "1437 images", "--batch 1000", "leaves 437")),
        ("vit --sample-every 5", ("--sample-every", "--help")),
        ("gpt2 --sample-every 5", ("--sample-every 5", "--prompt")),
        ("gpt2 --prompt a", ("--prompt", "--sample-every")),
        ("gpt2 --sample-every 5 --prompt a --data synthetic", ("--sample-every", "synthetic")),
        ("gpt2 --sample-tokens 0", ("--sample-tokens", "'0'")),
        ("vit --export {file}", ("--export {file}", "cannot create")),
        ("llama --strategy tp", ("--strategy tp", "Llama", "fsdp")),
        ("llama --strategy pp", ("--strategy pp", "Llama", "fsdp")),
        ("llama --strategy cp", ("--strategy cp", "Llama")),
        ("llama --path fast", ("--path fast", "--path plain")),
        ("llama --dim 64", ("--dim", "--help")),
        ("gpt2 --dim 100", ("--dim 100", "multiple of 64")),
        ("gpt2 --dim 32", ("--dim", "'32'", "at least 64")),
        ("gpt2 --n-layers 0", ("--n-layers", "'0'")),
        ("gpt2 --schedule wsd --min-lr 1e-4", ("--schedule wsd", "--min-lr 0.0001", "no --min-lr")),
        ("gpt2 --schedule wsd --steps 50 --warmup 41", ("--schedule wsd", "--warmup 41", "last fifth of 50 steps")),
        ("gpt2 --schedule linear", ("--schedule", "'linear'", "wsd")),
        ("llama --model 8B", ("'8B'", "70B")),
        ("llama --tokenizer gpt2", ("--tokenizer gpt2", "50257", "1024")),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(capsys, tmp_path, command, words):
    (tmp_path / "file").touch()
    names = {"file": tmp_path / "file"}
    refused(capsys, command.format(**names), *(word.format(**names) for word in words))


def test_width_and_blocks_change_the_model_and_a_checkpoint_of_another_size_is_refused(capsys, tmp_path):
    command = f"gpt2 --batch 4 --length 16 --steps 1 --data synthetic --items 8 --checkpoint {tmp_path}"
    train(f"{command} --dim 192 --n-layers 1 --export {tmp_path / 'exported'}")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["n_embd"], config["n_layer"], config["n_head"]) == (192, 1, 3), "heads stay 64 wide"
    refused(capsys, f"{command} --dim 128 --n-layers 1 --quiet", "dim = 192", "128")
    refused(capsys, f"{command} --dim 192 --n-layers 2 --quiet", "n_layers = 1", "2")


def test_the_wsd_schedule_is_chapter_22s_at_each_step(tmp_path):
    command = (
        f"gpt2 --batch 4 --length 16 --data synthetic --items 8 --steps 10 --warmup 3 --lr 0.3 --log {tmp_path / 'log'}"
    )
    train(f"{command} --schedule wsd")
    found = [line["lr"] for line in read_log(tmp_path / "log")]
    assert found == pytest.approx([scaling_laws.wsd_schedule(step, 0.3, 3, 8, 10) for step in range(10)])
    assert found[3:] == pytest.approx([0.3] * 6 + [0.15])


def test_the_help_lists_what_this_page_tests(capsys):
    for program in ("vit", "gpt2", "llama"):
        with pytest.raises(SystemExit):
            programs.PROGRAMS[program](["--help"])
        said = capsys.readouterr().out
        flags = {"--eval-every", "--held-out", "--export", "--wandb"}
        flags |= set() if program == "vit" else {"--sample-every", "--prompt", "--sample-tokens"}
        assert flags <= set(re.findall(r"--[a-z-]+", said))
