"""Fine-tuning from the command line: the right loss over the right tokens, what is trained, and what comes out."""

import json
import math
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lib.bench.finetuning import read
from lib.finetuning import accumulate_masked, finetuning_memory_bytes, render_chat
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.gpt2 import GPT2
from lib.llama import Llama
from lib.ranks import pool
from lib.runs import finetune
from lib.runs.engine import export
from lib.runs.engine.log import read_log
from lib.runs.engine.loop import Run, rate
from lib.runs.engine.request import parse
from lib.runs.engine.signals import STATUS
from lib.runs.engine.start import prepare
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.text import FileTokenizer
from lib.runs.tuning import base, conversations, templates
from lib.runs.tuning.task import TuneOptions, TuneRun, TuneTask
from lib.training import AdamW, clip_gradient_norm_
from tests.house.given.test_hidden import Shapes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = pytest.mark.time_limit(120)
LLAMA = LlamaConfig(vocab_size=256, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=64, context_len=64)
GPT = GPT2Config(vocab_size=256, context_len=64, dim=32, n_layers=2, n_heads=2)
BYTES = export.tokenizer_for_transformers(())
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHORT = "{% for m in messages %}{{ m['role'][0] + m['content'] + ';' }}{% endfor %}{{ 'a' if add_generation_prompt }}"


def talk(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Two models, one of them with a chat template of its own, conversations and preferences."""
    here = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    exported = {
        "llama": export.llama_for_transformers(Llama(LLAMA).state_dict(), LLAMA),
        "gpt2": export.gpt2_for_transformers(GPT2(GPT).state_dict(), GPT),
    }
    for name, made in exported.items():
        export.write(here / name, made, beside={"tokenizer.json": export.as_text(BYTES)})
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": SHORT}
    texts = {"tokenizer.json": export.as_text(BYTES), "tokenizer_config.json": export.as_text(kind)}
    export.write(here / "chatty", exported["llama"], beside=texts)
    draw = random.Random(0)
    with (here / "talks.jsonl").open("w") as talks, (here / "pairs.jsonl").open("w") as pairs:
        for _ in range(60):
            a, b = draw.randrange(10), draw.randrange(10)
            talks.write(json.dumps({"messages": talk(f"{a}+{b}", str(a + b) * draw.randrange(1, 4))}) + "\n")
            pairs.write(json.dumps({"prompt": f"{a}+{b}", "chosen": str(a + b), "rejected": "no"}) + "\n")
    return here


def flags(place: Path, out: str, words: str = "") -> list[str]:
    data = "pairs" if "--method dpo" in words else "talks"
    found = f"--data {place}/{data}.jsonl --out {place / out} --length 48 --steps 4 --batch 4 --lr 1e-2 --warmup 1"
    found += " --eval-every 4 --quiet --device cpu"
    return [*found.split(), *words.replace("MODEL", str(place)).split()]


def tune(place: Path, out: str, words: str) -> Path:
    assert finetune.main(flags(place, out, words)) == 0
    return place / out


def prepared(place: Path, out: str, words: str) -> TuneRun:
    with ExitStack() as held:
        run = prepare(parse(finetune.make_parser(), flags(place, out, words), TuneOptions), TuneTask, held, TuneRun)
    assert isinstance(run, TuneRun)
    return run


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / "log.jsonl")]


# ---- the file, and the tokens ----


BAD = [
    ('{"messages": [', ("no JSON",)),
    ("[1]", ("[1]", "an object")),
    ('{"text": "hi"}', ("'messages'", "['text']")),
    ('{"messages": []}', ("messages is []", "a list of messages")),
    ('{"messages": ["hi"]}', ("messages[0] is 'hi'", "role and content")),
    ('{"messages": [{"role": "bot", "content": "hi"}]}', ("messages[0].role is 'bot'", "assistant")),
    ('{"messages": [{"role": "user", "content": 7}]}', ("messages[0].content is 7", "text")),
    ('{"messages": [{"role": "user", "content": "hi"}]}', ("no message of the assistant",)),
    (json.dumps({"messages": [*talk("a", "b"), *talk("c", "d")[1:]]}), ("message 2", "'assistant'", "alternate")),
]


@pytest.mark.parametrize(("line", "words"), BAD)
def test_a_wrong_line_is_named_with_its_number_and_value(place, tmp_path, capsys, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": talk("a", "b")}) + "\n\n" + line + "\n")
    argv = flags(place, "never", f"--method full --model MODEL/gpt2 --data {path}")
    assert finetune.main(argv) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    for word in ("lib.runs.finetune", f"{path}, line 3: ", *words):
        assert word in said[0], said
    assert not (place / "never").exists()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, ("'rejected'", "['chosen', 'prompt']")),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("both 'b'",)),
        ({"prompt": 7, "chosen": "b", "rejected": "c"}, ("prompt is 7",)),
        ({"chosen": talk("a", "b"), "rejected": talk("c", "d")}, ("neither prompt nor messages",)),
        ({"prompt": talk("a", "b"), "chosen": "c", "rejected": "d"}, ("ends with", "'assistant'")),
        ({"prompt": "a", "chosen": talk("b"), "rejected": "c"}, ("chosen holds", "the assistant")),
    ],
)
def test_a_wrong_preference_is_named_too(tmp_path, entry, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError) as caught:
        conversations.read_lines(path, is_preference=True)
    for word in (f"{path}, line 1: ", *words):
        assert word in str(caught.value)


def test_the_forms_of_a_preference_are_one(tmp_path):
    answers = {"chosen": "b", "rejected": "c"}
    forms = [{"prompt": "a", **answers}, {"messages": talk("a"), **answers}, {"prompt": talk("a"), **answers}]
    forms.append({"chosen": talk("a", "b"), "rejected": talk("a", "c")})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, forms)))
    found = conversations.read_lines(tmp_path / "pairs.jsonl", is_preference=True)
    assert [(line.prompt, line.talks) for line in found] == [(talk("a"), [talk("a", "b"), talk("a", "c")])] * 4


def test_text_that_is_not_unicode_and_a_missing_file(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(UsageError, match="line 1: byte 15 is not UTF-8"):
        conversations.read_lines(tmp_path / "bad.jsonl", False)
    (tmp_path / "half.jsonl").write_text(json.dumps({"messages": talk("a", "\ud83d")}))
    with pytest.raises(UsageError, match=r"line 1: '\\ud83d' is half of a character"):
        conversations.read_lines(tmp_path / "half.jsonl", False)
    (tmp_path / "whole.jsonl").write_text(json.dumps({"messages": talk("a", "\U0001f642")}))
    assert conversations.read_lines(tmp_path / "whole.jsonl", False)[0].talks[0][1]["content"] == "\U0001f642"
    with pytest.raises(UsageError, match=r"nothing\.jsonl: No such file"):
        conversations.read_lines(tmp_path / "nothing.jsonl", False)


def book_template() -> tuple[templates.BookTemplate, dict[str, Any]]:
    contents = json.loads(json.dumps(BYTES))
    special = templates.add_markers(contents)
    return templates.BookTemplate(templates.ordinary(contents), special), contents


@pytest.mark.parametrize("messages", [talk("a", "b"), talk("a", "b", "c", "d"), talk("é\n", "b", "c", system="be x")])
def test_what_is_served_is_what_was_trained(messages, tmp_path):
    """The template that is exported writes, up to an answer, the tokens that the model was trained on."""
    template, contents = book_template()
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    served = FileTokenizer(str(tmp_path / "tokenizer.json"))
    while messages[-1]["role"] != "user":
        messages = messages[:-1]
    text = ChatTemplate(templates.JINJA, {}).render(messages)
    assert served.encode_rendered(text) == template.prompt(messages)
    bytes_and_markers = render_chat(messages, lambda t: list(t.encode()), template.special, add_generation_prompt=True)
    assert template.prompt(messages) == bytes_and_markers[0]


def test_a_marker_that_somebody_typed_stays_text():
    template, _ = book_template()
    ids, _ = template.render(talk("<|assistant_end|>", "x"))
    assert ids.count(template.special["assistant_end"]) == 1


def chatml(source: str = CHATML) -> templates.FolderTemplate:
    return templates.FolderTemplate(ChatTemplate(source, {}), lambda text: list(text.encode()))


def test_a_template_of_the_models_own_learns_what_it_adds_for_an_answer():
    messages = talk("hi", "ho", "so", "la", system="be x")
    ids, mask = chatml().render(messages)
    assert bytes(ids).decode() == chatml()._text(messages, False)
    learned = bytes(i for i, own in zip(ids, mask, strict=True) if own).decode()
    assert learned == "ho<|im_end|>\nla<|im_end|>\n"
    prompt = chatml().prompt(messages[:-1])
    assert ids[: len(prompt)] == prompt
    assert bytes(prompt).decode().endswith("so<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_rewrites_earlier_messages_is_refused():
    forgets = "{% for m in messages %}{{ m['content'] if m['role'] == 'user' or loop.last }};{% endfor %}"
    with pytest.raises(ValueError, match="before message 3 in another way"):
        chatml(forgets).render(talk("a", "b", "c", "d"))


def test_of_a_preference_only_the_answers_are_learned(place):
    line = conversations.Line(1, talk("a", "b", "c"), [talk("a", "b", "c", "yes"), talk("a", "b", "c", "no")])
    template, _ = book_template()
    rows = conversations.make_rows(place, [line], template, 40, 0, pairs=True)
    learned = [rows.targets[0][rows.inputs[0, 1] == i].tolist() for i in (0, 1)]
    end = template.special["assistant_end"]
    assert [[i for i in ids if i >= 0] for ids in learned] == [[*b"yes", end], [*b"no", end]]


def test_lines_too_long_for_a_row_are_counted(place):
    template, _ = book_template()
    talks = [conversations.Line(i, [], [talk("a", "b" * n)]) for i, n in enumerate((3, 30, 7))]
    assert conversations.make_rows(place, talks, template, 20, 0, pairs=False).n_short == 1
    pairs = [conversations.Line(1, talk("a"), [talk("a", "b" * n), talk("a", "c")]) for n in (2, 12)]
    rows = conversations.make_rows(place, pairs, template, 20, 0, pairs=True)
    assert (rows.n, rows.n_short) == (1, 1)


# ---- training ----


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_full_is_a_loop_by_hand_however_a_step_is_cut(place, model):
    """Chapter 28's `accumulate_masked` over whole logits of each conversation alone gives the same weights."""
    words = f"--method full --model MODEL/{model} --weight-decay 0.1"
    folder = tune(place, f"full_{model}", words)
    cut = tune(place, f"cut_{model}", f"{words} --accumulate 4")
    run = prepared(place, f"hand_{model}", words)
    model_, source = run.task.base.model, run.task.source
    decaying = [p for p in model_.parameters() if p.ndim > 1]
    groups = [{"params": decaying, "weight_decay": 0.1}]
    groups.append({"params": [p for p in model_.parameters() if p.ndim < 2], "weight_decay": 0.0})
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    found = []
    for step in range(4):
        inputs, targets = run.batch()
        alone = []
        for row, wanted in zip(inputs, targets, strict=True):
            for document in range(int(row[1].max()) + 1):
                here = row[1] == document
                alone.append((row[0][here][None], wanted[here][None]))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, run.options)
        optimizer.zero_grad()
        found.append(accumulate_masked(model_, alone).item())
        clip_gradient_norm_(model_.parameters(), 1.0)
        optimizer.step()
    assert len({int((t != -100).sum()) for t in source.targets}) > 1, "rows are alike: no denominator is tested"
    assert losses(folder) == pytest.approx(found, rel=1e-5)
    assert losses(cut) == pytest.approx(found, rel=1e-5)
    hand = base.merged(model_, torch.float32)
    for out in (folder, cut):
        served = models.load(str(out), None, None, torch.float32, torch.device("cpu")).model
        for name, tensor in served.state_dict().items():
            torch.testing.assert_close(tensor, hand[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_held_out_loss_is_a_mean_over_all_its_targets(place):
    run = prepared(place, "held", "--method full --model MODEL/llama --held-out 0.5 --batch 2 --accumulate 2")
    found = {}
    run.look(SimpleNamespace(flush=int, restart_clock=int, note=lambda step, values: found.update(values)), 4)  # type: ignore[arg-type]
    source = run.task.source
    assert source.n_held_out >= 6
    inputs, targets = source.fetch(torch.arange(source.n, source.n + source.n_held_out))
    with torch.no_grad():
        mean = -run.loss.log_probs(inputs, targets).mean().item()
    assert found["held_out_loss"] == pytest.approx(mean, rel=1e-5)


def two_ranks(rank: int, world_size: int, argvs: list[list[str]]) -> list[int]:
    return [finetune.main(argv) for argv in argvs]


@pytest.mark.parametrize("method", ["full", "dpo"])
def test_copies_on_two_ranks_are_one_process(place, method):
    words = f"--method {method} --model MODEL/llama"
    alone = tune(place, f"one_{method}", words)
    names = {engine: f"two_{method}_{engine}" for engine in ("ours", "torch")}
    argvs = [flags(place, out, f"{words} --strategy ddp --engine {engine}") for engine, out in names.items()]
    assert pool("gloo").run(two_ranks, argvs, n_ranks=2, time_limit_s=100).values == [[0, 0]] * 2
    for out in names.values():
        assert losses(place / out) == pytest.approx(losses(alone), rel=1e-4)
        scores = [read_log(folder / "log.jsonl", "held_out_loss")[-1] for folder in (place / out, alone)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def ended_early(rank: int, world_size: int, argv: list[str]) -> int:
    set_lr = Run.set_lr

    def ask(self, step: int) -> float:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_lr(self, step)

    Run.set_lr = ask  # type: ignore[method-assign]
    try:
        return finetune.main(argv)
    finally:
        Run.set_lr = set_lr  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "words", ["--method full --model MODEL/gpt2", "--method dpo --dpo-trains full --model MODEL/llama"]
)
def test_shards_on_two_ranks_that_were_ended_once_are_one_process(place, words):
    name = words.split("/")[-1]
    alone, out = tune(place, f"alone_{name}", words), place / f"shards_{name}"
    argv = flags(place, out.name, f"{words} --strategy fsdp")
    assert pool("gloo").run(ended_early, argv, n_ranks=2, time_limit_s=100).values == [STATUS] * 2
    assert pool("gloo").run(two_ranks, [argv], n_ranks=2, time_limit_s=100).values == [[0]] * 2
    assert losses(out) == pytest.approx(losses(alone), rel=1e-4)
    scores = [read_log(folder / "log.jsonl", "held_out_loss")[-1]["held_out_loss"] for folder in (out, alone)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    recorded, whole = read(out), read(alone)
    assert (recorded["ranks"], whole["ranks"]) == (2, 1)
    assert 2 * recorded["told_bytes"] == pytest.approx(whole["told_bytes"], abs=2)
    for file in ("model.safetensors", "best/model.safetensors"):
        ours, theirs = load_file(out / file), load_file(alone / file)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("model", ["chatty", "gpt2"])
def test_qlora_trains_adapters_only(place, model):
    run = prepared(place, f"q_{model}", f"--method qlora --model MODEL/{model} --rank 2")
    net = run.task.base.model
    before = {name: value.clone() for name, value in (*net.named_parameters(), *net.named_buffers())}
    for step in (1, 2):  # in the first one A has no gradient yet, because B is 0
        run.set_lr(step)
        run.step(*run.batch())
    graded = {name for name, p in net.named_parameters() if p.grad is not None}
    tables = {"wte.weight"} if model == "gpt2" else set()  # its markers are new, so their rows must be learned
    assert {name for name in graded if "lora_" not in name} == tables
    assert len(graded) - len(tables) == 2 * 2 * (7 if model == "chatty" else 4)
    for name, value in (*net.named_parameters(), *net.named_buffers()):
        assert torch.equal(value, before[name]) == (name not in graded), name
    assert set(net.state_dict()) == graded
    assert not any(
        p.dtype.itemsize == 4 and p.ndim == 2 and "layers" in n for n, p in before.items() if "lora" not in n
    )


def test_qlora_learns_and_its_folder_holds_the_adapter(place):
    folder = tune(place, "qlora", "--method qlora --model MODEL/chatty --steps 12 --rank 4 --targets wq,wv")
    assert losses(folder)[-1] < losses(folder)[0] - 0.1
    adapter = load_file(folder / "adapter.safetensors")
    assert {name.rpartition(".")[2] for name in adapter} == {"lora_A", "lora_B"}
    saved = torch.load(folder / "checkpoint" / "checkpoint.pt", weights_only=True)["model"]
    assert saved.keys() == adapter.keys()
    assert all(torch.equal(saved[name], adapter[name]) for name in saved)


def test_dpo_starts_at_log_2_and_falls(place):
    folder = tune(place, "dpo", "--method dpo --model MODEL/llama --steps 20 --rank 4")
    found = losses(folder)
    assert found[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[-1] < 0.3
    last = read_log(folder / "log.jsonl", "held_out_loss")[-1]
    assert last["held_out_right"] == 1.0
    assert last["held_out_margin"] > 1


def test_dpo_reads_each_answer_as_if_it_were_alone(place):
    run = prepared(place, "dpo_alone", "--method dpo --model MODEL/gpt2 --dpo-trains full")
    inputs, targets = run.batch()
    found = run.loss.answers(inputs, targets)
    for row, wanted, pair in zip(inputs, targets, found, strict=True):
        for i in (0, 1):
            here = (row[1] >= 0) & (row[1] % 2 == i)
            logits, ids = run.task.base.model(row[0][here][None])[0][0].log_softmax(-1), wanted[here]
            expected = sum(logits[t, int(token)] for t, token in enumerate(ids) if token >= 0)
            torch.testing.assert_close(pair[i], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(run.loss.reference[inputs[:, 1, 0] // 2], found)


def test_no_step_holds_the_logits_of_all_positions(place):
    run = prepared(place, "lean", "--method full --model MODEL/llama")
    inputs, targets = run.batch()
    with Shapes() as made:
        run.step(inputs, targets)
    vocab = run.task.config.vocab_size
    rows = [math.prod(shape[:-1]) for shape in made.seen if shape[-1:] == (vocab,) and shape[0] != LLAMA.dim]
    assert 0 < max(rows) < inputs[:, 0].numel()


# ---- leaving, resuming, refusing ----


@pytest.mark.parametrize("method", ["full", "lora", "dpo"])
def test_a_run_that_was_ended_goes_on_bit_for_bit(place, monkeypatch, capsys, method):
    words = f"--method {method} --model MODEL/llama --steps 6 --eval-every 2"
    words += "" if method == "full" else " --dropout 0.2 --rank 2"
    whole = tune(place, f"whole_{method}", words)
    set_lr = Run.set_lr

    def ask(self, step: int) -> float:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_lr(self, step)

    monkeypatch.setattr(Run, "set_lr", ask)
    argv = flags(place, f"parts_{method}", words)
    assert finetune.main(argv) == STATUS
    assert not (place / f"parts_{method}" / "config.json").exists()
    monkeypatch.setattr(Run, "set_lr", set_lr)
    assert finetune.main(argv) == 0
    parts = place / f"parts_{method}"
    assert losses(parts) == losses(whole)
    for name in ("model.safetensors", "best/model.safetensors"):
        ours, theirs = load_file(parts / name), load_file(whole / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    assert finetune.main([*argv, "--batch", "3"]) == 2
    assert "batch = 4, this one has 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--method lora --strategy fsdp", ("--strategy fsdp", "--method full")),
        ("--method full --strategy tp", ("--strategy tp", "ddp or fsdp")),
        ("--method full --out MODEL/llama", ("--out", "overwritten")),
        ("--method full --length 65", ("--length 65", "64")),
        ("--method full --model MODEL/none", ("none", "no such folder")),
        ("--method lora --targets wq,c_attn", ("--targets wq,c_attn", "c_attn")),
        ("--method full --rank 4", ("--rank 4", "without adapters")),
        ("--method dpo --label-smoothing 0.5", ("--label-smoothing 0.5", "less than 0.5")),
        ("--method half", ("'half'", "qlora")),
        ("--method dpo --length 8", ("no pair", "8 tokens", "--length")),
        ("--method full --batch 40", ("--batch 40", "packed rows")),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(place, capsys, words, said):
    before = sorted(place.rglob("*"))
    assert finetune.main(flags(place, "refused", f"--model MODEL/llama {words}")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    for word in ("lib.runs.finetune: error: ", *said):
        assert word in lines[0]
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_memory_told_beforehand_is_chapter_28s(method):
    config = LlamaConfig(vocab_size=256, dim=64, n_layers=2, n_heads=2, hidden_dim=128, context_len=32)
    opened = base.Base(Llama(config), None, None, {})  # type: ignore[arg-type]
    base.adapt(opened, method == "qlora", 4, 8.0, base.TARGETS[True], 0.0, torch.bfloat16)
    assert base.held_bytes(opened.model, 2) == finetuning_memory_bytes(config, method, 4)


def test_too_little_memory_is_told_before_anything_is_written(place, monkeypatch, capsys):
    monkeypatch.setattr("lib.runs.memory.free_bytes", lambda device: 300_000)
    assert finetune.main(flags(place, "short", "--method qlora --model MODEL/llama")) == 2
    said = capsys.readouterr().err
    assert "--method qlora holds weights" in said
    assert "optimizer" in said
    assert not (place / "short").exists()


# ---- what comes out ----


@pytest.mark.parametrize(
    ("model", "method"),
    [("llama", "full"), ("llama", "lora"), ("chatty", "qlora"), ("gpt2", "lora"), ("gpt2", "qlora")],
)
def test_transformers_and_the_server_load_what_comes_out(place, model, method):
    transformers = pytest.importorskip("transformers")
    words = f"--method {method} --model MODEL/{model} --steps 8{'' if method == 'full' else ' --rank 4'}"
    folder = tune(place, f"out_{model}_{method}", words)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    served = models.load(str(folder), None, None, torch.float32, torch.device("cpu"))
    messages = talk("3+4")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert served.template is not None
    prompt = served.tokenizer.encode_rendered(served.template.render(messages))
    assert ids["input_ids"][0].tolist() == prompt
    ours, tokens = served.model, torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(8):
            logits = ours(tokens) if model != "gpt2" else ours(tokens)[0]
            torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-3, atol=1e-4)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        generated = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False,
                                    eos_token_id=None)  # fmt: skip
    assert generated.tolist() == tokens.tolist()
    if model != "chatty":
        template, _ = book_template()
        assert served.tokenizer.end_ids == {template.special["assistant_end"]}


def test_a_tied_llama_stays_tied(place, tmp_path):
    torch.manual_seed(0)
    model: Any = Llama(LLAMA)
    model.output.weight = model.tok_embeddings.weight
    tensors, settings = export.llama_for_transformers(model.state_dict(), LLAMA)
    del tensors["lm_head.weight"]
    settings["tie_word_embeddings"] = True
    export.write(tmp_path / "tied", (tensors, settings), beside={"tokenizer.json": export.as_text(BYTES)})
    folder = tune(place, "tied", f"--method full --model {tmp_path / 'tied'}")
    found = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in found
    served: Any = models.load(str(folder), None, None, torch.float32, torch.device("cpu")).model
    assert torch.equal(served.output.weight, served.tok_embeddings.weight)
    assert not torch.allclose(served.output.weight[:256], model.output.weight)


def test_new_tokens_change_no_logit_of_the_old_ones(place):
    opened = base.open_base(str(place / "gpt2"), 0)
    before = models.load(str(place / "gpt2"), None, None, torch.float32, torch.device("cpu")).model
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        found = opened.model(tokens)[0]
        assert found.shape[-1] == 256 + len(templates.MARKERS)
        torch.testing.assert_close(found[..., :256], before(tokens)[0])
    assert opened.is_new
