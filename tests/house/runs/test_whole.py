"""The whole way in miniature: from an empty folder to a model that answers, killed everywhere, with one's own parts."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lib.ranks.processes import end_with_parent
from lib.runs import reinforce, whole
from lib.runs.evaluate import make_parser
from lib.runs.serving.models import load
from lib.runs.stations import ledger, plan
from lib.runs.stations.estimate import of_small
from lib.runs.stations.report import judged, measured
from tests.house.runs.whole_program import MINI, MOMENTS, here

pytestmark = pytest.mark.time_limit(300)


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """The folder of a whole way."""
    folder = tmp_path_factory.mktemp("way")
    assert whole.main(["--size", "mini", "--out", str(folder), "--threads", "1", "--price", "3.6"], here) == 0
    return folder


def run(folder, *more):
    return whole.main(["--size", "mini", "--out", str(folder), "--threads", "1", *more], here)


# ---------------------------------------------------------------------------------------------------- the report


def test_the_report_has_every_station_and_no_invented_number(way):
    report = json.loads((way / "report.json").read_text())
    assert list(report["stations"]) == list(plan.STATIONS)
    for name, found in report["stations"].items():
        assert found["seconds"] > 0
        assert found["dollars"] == pytest.approx(found["seconds"] * 1e-3)
        assert found["kwh"] is None or found["kwh"] >= 0
        for command in found["commands"]:
            assert command[:2] == ["python", "-m"]
        if name in plan.MODELS:
            sums = found["tasks"]["sums"]
            assert sums["low"] <= sums["accuracy"] <= sums["high"]
            assert sums["questions"] == MINI.n_questions
            assert found["tasks"]["text"]["bits_per_byte"] > 0
    tokens = {name: found["tokens"] for name, found in report["stations"].items()}
    assert tokens["pretrain"] == 6 * 4 * 64
    assert tokens["tune"] == 4 * 2 * 64
    assert 0 < tokens["reward"] <= 4 * 2 * 2 * 6
    page = (way / "report.md").read_text()
    for station in plan.STATIONS:
        assert f"| {station} |" in page
    assert "lib.runs.serve --model" in page


def test_wrong_predictions_stay(way):
    report = json.loads((way / "report.json").read_text())
    assert [p["held"] for p in report["predictions"]] == [False, True, True]
    assert "**missed**" in (way / "report.md").read_text()
    assert json.loads((way / "predictions.json").read_text()) == list(MINI.predictions)


def test_a_prediction_of_what_nobody_measured_is_not_judged():
    stations = {"tune": {"tasks": {"sums": {"accuracy": 0.25}}}, "reward": {"tasks": {"sums": {"accuracy": 0.75}}}}
    gain = plan.expected("reward", "gain", 0.4, 0.6, "x")
    assert measured(gain, stations, "sums") == 0.5
    lost = plan.expected("reward", "bits_per_byte_lost", 0.4, 0.6, "x")
    assert [p["held"] for p in judged([gain, lost], stations, "sums")] == [True, None]


def test_the_questions_are_not_among_the_conversations(way):
    asked = {json.loads(line)["query"] for line in (way / "questions/sums.jsonl").read_text().splitlines()}
    talks = [json.loads(line)["messages"] for line in (way / "talks.jsonl").read_text().splitlines()]
    assert len(asked) == MINI.n_questions
    assert not asked & {talk[0]["content"] for talk in talks}
    assert all(talk[1]["content"].startswith("<think>") for talk in talks)


def test_the_exported_model_is_the_one_with_rewards_and_can_chat(way):
    ours, theirs = (load_file(way / name / "model.safetensors") for name in ("export", "reward"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    tuned = load_file(way / "tune/model.safetensors")
    assert any(not torch.equal(ours[name], tuned[name]) for name in tuned)  # by --warm: no answer of it is right
    served = load(str(way / "export"), None, None, torch.float32, torch.device("cpu"))
    text = served.template.render([{"role": "user", "content": "1+2="}])
    assert text == "<|bos|><|user_start|>1+2=<|user_end|><|assistant_start|>"
    tokenizer: Any = served.tokenizer
    ids = tokenizer.encode_rendered(text)
    assert tokenizer.theirs.decode(ids, skip_special_tokens=False) == text
    (end,) = tokenizer.end_ids
    assert tokenizer.added[end] == "<|assistant_end|>"
    assert not any(path.name == "checkpoint.pt" for path in (way / "export").iterdir())


# ------------------------------------------------------------------------------------------------------ going on


def test_a_way_that_is_killed_everywhere_ends_as_one_that_is_not(way, tmp_path):
    """Six processes are killed between stations and inside of them; the seventh ends with the same weights."""
    command = [sys.executable, "-m", "tests.house.runs.whole_program", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [entry["status"] for entry in said] == [-9] * len(MOMENTS) + [0], done.stderr
    assert [sum(entry["done"].values()) for entry in said] == [1, 1, 2, 3, 5, 7, 8]
    ours, theirs = (load_file(folder / "export/model.safetensors") for folder in (tmp_path, way))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for station in plan.MODELS:
        lines = [json.loads(line) for line in (tmp_path / station / "log.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "seconds" in line]
        assert steps == list(range(len(steps)))


def test_the_same_command_does_nothing_twice(way, capsys):
    before = {path: path.stat().st_mtime_ns for path in way.rglob("model.safetensors")}
    assert run(way) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert capsys.readouterr().err.count("done before") == len(plan.STATIONS)


def test_a_program_that_fails_is_named(tmp_path, capsys):
    assert whole.main(["--size", "mini", "--out", str(tmp_path), "--threads", "1"], lambda command: 2) == 2
    assert "station corpus: its command ended with status 2" in capsys.readouterr().err
    assert whole.main(["--size", "mini", "--out", str(tmp_path), "--threads", "1"], lambda command: 75) == 75


def test_a_child_is_asked_to_leave_with_its_parent(tmp_path):
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert ledger.run_child([sys.executable, "-c", program]) == -15
    assert ledger.run_child([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_where_the_folder_is_decides_nothing(way, tmp_path):
    assert whole.main(["--size", "mini", "--out", str(tmp_path), "--threads", "1"], lambda command: 1) == 1
    assert here(plan.executable(plan.Way(MINI, tmp_path, {}).commands("corpus")[0])) == 0
    for name in ("shard_00000.bin", "merges.json", "corpus.json"):
        assert (tmp_path / "corpus" / name).read_bytes() == (way / "corpus" / name).read_bytes()


# ------------------------------------------------------------------------------------------------- one's own parts


def test_ones_own_model_takes_the_place_of_a_station(way, tmp_path):
    assert run(tmp_path, "--use", f"tune={way / 'tune'}") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["stations"]) == ["tune", "reward", "export"]
    assert report["stations"]["tune"]["own"] == str(way / "tune")
    assert report["stations"]["tune"]["tokens"] is None
    first = report["stations"]["tune"]["tasks"]
    assert list(first) == ["sums"]  # without a corpus there is no held-out text
    ours, theirs = (load_file(folder / "export/model.safetensors") for folder in (tmp_path, way))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_ones_own_predictions_are_kept(way, tmp_path):
    own = [plan.expected("tune", "accuracy", 0.9, 1.0, "I say so")]
    (tmp_path / "predictions.json").write_text(json.dumps(own))
    assert run(tmp_path, "--use", f"reward={way / 'reward'}") == 0
    (judged,) = json.loads((tmp_path / "report.json").read_text())["predictions"]
    assert judged["why"] == "I say so"
    assert judged["held"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--use corpus=nowhere", "--use corpus=nowhere: expected a folder that lib.runs.corpus has written"),
        ("--use tune=nowhere", "--use tune=nowhere: expected a folder in Transformers' format"),
        ("--use export=x", "'export=x': expected STATION=FOLDER, the station corpus, pretrain, tune, reward"),
        ("--use tune", "'tune': expected STATION=FOLDER"),
        ("--gpus 5", "--gpus: '5': expected a whole number of at most 4"),
        ("--price 0", "--price: '0': expected a number above 0"),
        ("--size large", "invalid choice: 'large'"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, words, said, capsys):
    assert run(tmp_path / "new", *words.split()) == 2
    error = capsys.readouterr().err
    assert re.search(re.escape(said), error), error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_another_request_or_a_wrong_prediction_is_refused(way, tmp_path, capsys):
    assert run(way, "--use", f"tune={way / 'tune'}") == 2
    assert "was begun with --use = {}" in capsys.readouterr().err
    (tmp_path / "predictions.json").write_text('[{"station": "tune"}]')
    assert run(tmp_path) == 2
    assert "predictions.json: KeyError: 'what'" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_each_command_of_a_size_is_one_that_its_program_takes(size, tmp_path):
    from lib.runs import corpus, finetune, train_gpt2

    makers = {"corpus": corpus.make_parser, "train_gpt2": train_gpt2.make_gpt2_parser, "evaluate": make_parser,
              "finetune": finetune.make_parser, "reinforce": reinforce.make_parser}  # fmt: skip
    for n_gpus in (0, 4):
        found = plan.Way(plan.SIZES[size], tmp_path, {}, n_gpus)
        for command in (c for station in found.stations for c in found.commands(station)):
            words = plan.executable(command)
            at = next(i for i, word in enumerate(words) if word.startswith("lib.runs."))
            makers[words[at].removeprefix("lib.runs.")]().parse_args(words[at + 1 :])


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys):
    assert whole.main(["--size", "small", "--out", str(tmp_path / "x"), "--dry-run", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "torchrun --standalone --nproc-per-node 4 -m lib.runs.train_gpt2 --strategy ddp" in shown
    assert "recorded on " in shown
    assert not (tmp_path / "x").exists()
    lines = of_small(plan.Way(plan.SMALL, tmp_path, {}, 1))
    assert len(lines) == 5
    assert "dollars at $3.95 an hour" in "\n".join(lines)


def test_a_report_becomes_a_record(way, tmp_path, capsys):
    from lib.bench import whole as bench

    bench.main([str(way), "--folder", str(tmp_path)])
    (tmp_path / "whole.json").write_text((tmp_path / "whole.json").read_text().replace('"mini"', '"other"'))
    bench.main([str(way), "--folder", str(tmp_path)])
    results = json.loads((tmp_path / "whole.json").read_text())["results"]
    assert list(results) == ["other", "mini"]
    assert results["mini"]["machine"]["cpu"]
    with pytest.raises(SystemExit, match="has come to its end"):
        bench.main([str(tmp_path)])
