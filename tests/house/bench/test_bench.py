"""Programs that measure: what they keep of earlier records."""

import argparse
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from lib.bench import all_reduce, attention_variants, gpu_tests, low_precision, moe, scaling_laws, what_is_missing
from lib.bench.kit import record
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.data import corpus
from lib.runs.data.store import Document, Store
from lib.workbook.book.catalog import ROOT


@pytest.mark.time_limit(60)
def test_a_trial_leaves_the_books_records_alone_and_reads_its_own(tmp_path):
    book, trials = (MEASUREMENTS / "all_reduce.json").read_bytes(), tmp_path / "workbook_trials"
    other = {"gloo 9": {"1": {"median": 0.5}}}
    record("all_reduce", {"tiny": True, "all_reduce_s": other, "on": {"gloo 9": "another host"}}, trials)
    asked = [sys.executable, "-m", "lib.bench.all_reduce", "--backend", "gloo", "--ranks", "1", "--tiny"]
    done = subprocess.run(asked, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(trials / "all_reduce.json") in done.stdout
    assert set(load("all_reduce", trials)["results"]["all_reduce_s"]) == {"gloo 9", "gloo 1"}
    assert (MEASUREMENTS / "all_reduce.json").read_bytes() == book


def measure(folder, monkeypatch, *words):
    monkeypatch.setattr(
        sys, "argv", ["all_reduce", "--backend", "gloo", "--ranks", "1", "--folder", str(folder), *words]
    )
    all_reduce.main()
    return load("all_reduce", folder)["results"]


@pytest.mark.time_limit(60)
def test_an_all_reduce_keeps_other_series_and_says_where_each_was_measured(tmp_path, monkeypatch):
    other = {"gloo 9": {"1": {"median": 0.5}}}
    earlier = {"tiny": True, "all_reduce_s": other | {"gloo 1": {"7": {}}}, "on": {"gloo 9": "another host"}}
    record("all_reduce", earlier, tmp_path)
    found = measure(tmp_path, monkeypatch, "--tiny")
    assert found["all_reduce_s"]["gloo 9"] == other["gloo 9"]
    assert list(found["all_reduce_s"]["gloo 1"]) == ["0.01", "0.1", "1"]
    assert found["on"]["gloo 9"] == "another host"
    assert found["on"]["gloo 1"].startswith("measured on ")


def test_an_all_reduce_of_other_sizes_loses_nothing(tmp_path, monkeypatch, capsys):
    record("all_reduce", {"tiny": False, "all_reduce_s": {"nccl 4": {}}, "on": {}}, tmp_path)
    with pytest.raises(SystemExit):
        measure(tmp_path, monkeypatch, "--tiny")
    assert "--fresh" in capsys.readouterr().err
    assert load("all_reduce", tmp_path)["results"]["all_reduce_s"] == {"nccl 4": {}}


@pytest.mark.time_limit(60)
def test_caches_of_variants_are_as_large_as_predicted(tmp_path, monkeypatch):
    asked = ["attention_variants", "--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", asked)
    attention_variants.main()
    found = load("attention_variants", tmp_path)["results"]
    assert {"full", "window", "latent, expanded"} <= set(found["prefill"])
    assert len(found["decode"]) == 4
    for ways in found["decode"].values():
        assert all(way["cache_bytes"] == way["predicted_cache_bytes"] for way in ways.values())
        assert all(way["seconds"]["median"] > 0 for way in ways.values())


@pytest.mark.time_limit(60)
def test_grouped_products_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moe", "grouped", "--device", "cpu", "--tiny", "--folder", str(tmp_path)])
    moe.main()
    cases = load("moe", tmp_path)["results"]["cases"]
    assert [(case["model"], case["balanced"]) for case in cases] == [
        (name, balanced) for name in moe.CONFIGS for balanced in (True, False)
    ]
    for case in cases:
        assert case["rows"] == 64 * moe.CONFIGS[case["model"]].k
        assert max(case["differs_by"].values()) < 0.05
        assert set(case["seconds"]["forward and backward"]) == set(moe.PRODUCTS)


@pytest.mark.time_limit(60)
def test_experts_on_ranks_are_measured(tmp_path, monkeypatch):
    words = ["parallel", "--device", "cpu", "--tiny", "--ranks", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["moe", *words])
    moe.main()
    results = load("moe_parallel", tmp_path)["results"]
    assert [case["model"] for case in results["cases"]] == list(moe.CONFIGS)
    for case in results["cases"]:
        assert set(case["seconds"]) == set(moe.PARALLEL)
        assert all(times["n"] == moe.N_ROUNDS and times["median"] > 0 for times in case["seconds"].values())
        assert case["rows_at_busiest_rank"] >= case["rows_sent_per_rank"], "no rank can have less than the mean"


@pytest.mark.time_limit(120)
def test_low_precision_measures_each_part_and_keeps_the_others(tmp_path):
    record("low_precision", {"tiny": True, "steps": {"GPT-2 XL": "kept"}}, tmp_path)
    low_precision.main(["--tiny", "--device", "cpu", "products", "tokens"], tmp_path)
    found = load("low_precision", tmp_path)["results"]
    assert found["steps"] == {"GPT-2 XL": "kept"}
    assert found["products"]["tiny"]["seconds"]["block: scaled_matmul"]["median"] > 0
    assert found["tokens"]["Int4Linear"]["tokens_per_s"] > 0


@pytest.mark.time_limit(120)
def test_low_precision_makes_steps_of_both_models_in_every_recipe(tmp_path):
    low_precision.main(["--tiny", "--device", "cpu", "steps"], tmp_path)
    steps = load("low_precision", tmp_path)["results"]["steps"]
    for found in steps.values():
        assert all(found[way]["median"] > 0 for way in ("bfloat16", "blockwise", "delayed, not compiled"))
        assert found["failed"] == {}


def test_low_precision_refuses_an_unknown_part(tmp_path, capsys):
    with pytest.raises(SystemExit):
        low_precision.main(["speed"], tmp_path)
    assert "products, steps, losses, tokens" in capsys.readouterr().err


@pytest.mark.time_limit(200)
def test_scaling_laws_are_swept_and_fitted(tmp_path):
    texts = (" ".join(f"to be {i} or not to be {i + j}, that is the question\n" for j in range(9)) for i in range(90))
    documents = [Document(f"{i}", text) for i, text in enumerate(texts)]
    store = Store(tmp_path / "corpus" / "work" / "gathered")
    store.add(documents)
    corpus.write(tmp_path / "corpus", store, [], corpus.Form(held_out=0.2, sample=10**6, vocab=300))
    asked = ["--tiny", "--steps=12", f"--data={tmp_path}/corpus", f"--folder={tmp_path}"]
    scaling_laws.main(["sweep", "positions", "predict", *asked])
    found = load("scaling_laws", tmp_path)["results"]
    points = found["sweep"]["points"]
    assert [(p["dim"], p["n_layers"], p["steps"]) for p in points] == [
        (*size, steps) for size in scaling_laws.TINY_SIZES for steps in scaling_laws.TINY_STEPS
    ]
    for point in points:
        assert point["tokens"] == point["steps"] * 4 * 64
        assert 0 < point["held_out_loss"] < math.log(512), "it has learned something"
    law = found["predict"]
    assert law["n_weights"] == 12 * 12 * 768**2
    low, high = law["intervals_90"]["held_out_loss"]
    assert low <= high
    a, alpha, floor = law["law"].values()
    longest = [p for p in points if p["steps"] == 12]
    errors = [(floor + a / p["n_weights"] ** alpha) / p["held_out_loss"] - 1 for p in longest]
    assert law["diverged"] == []
    assert law["largest_relative_error_of_fit"] == pytest.approx(max(map(abs, errors)), abs=1e-9)
    assert law["tokens"] == law["steps"] * 32 * 1024
    assert law["held_out_loss"] == pytest.approx(floor + a / law["n_weights"] ** alpha)
    for point in found["positions"]["points"]:
        by_position = point["loss_by_position"]
        assert len(by_position) == 16
        assert sum(by_position) / 16 == pytest.approx(point["held_out_loss"], rel=0.01), (
            "its mean, in bfloat16, is the loss"
        )
    assert found["corpus"] == corpus.read_facts(tmp_path / "corpus")


def test_a_run_of_the_sweep_that_diverged_is_left_out():
    def point(dim, steps, loss):
        return {"dim": dim, "n_weights": 12 * 4 * dim**2, "steps": steps, "held_out_loss": loss}

    good = [point(dim, steps, 1 + 50 / dim + 100 / steps) for dim in (64, 128, 256, 512) for steps in (400, 800)]
    plan = argparse.Namespace(steps=800, tiny=True)
    expected = scaling_laws.predict(plan, {"sweep": {"points": good}})
    bad = [point(96, 400, 1.8), point(96, 800, 4.5)]
    found = scaling_laws.predict(plan, {"sweep": {"points": [*good, *bad]}})
    assert found["diverged"] == [96]
    assert (
        found["held_out_loss"]
        == pytest.approx(expected["held_out_loss"])
        == pytest.approx(1.125 + 50 / (768 * math.sqrt(3)), rel=0.01)
    )


def test_a_log_is_summarized():
    steps = [{"step": i, "loss": float(i), "seconds": 2.0, "tokens_per_s": 100.0 - i, "mfu": 0.5} for i in range(30)]
    looks: list[dict[str, Any]] = [
        {"step": 29, "held_out_loss": 1.5, "held_out_perplexity": 4.5},
        {"step": 29, "sample": "to be"},
    ]
    found = scaling_laws.summarize([*steps, *looks], argparse.Namespace())
    assert (found["steps"], found["training_s"], found["mfu"]) == (30, 60.0, 0.5)
    assert found["tokens_per_s"] == 86.0, "the rate of the median step"
    assert found["losses_every_20"] == [9.5, 24.5]
    assert found["held_out"] == looks[:1]
    assert found["samples"] == [{"step": 29, "text": "to be"}]


def test_a_run_on_a_gpu_is_recorded_with_what_failed_and_why_tests_were_skipped(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.chapter_07.test_training" name="test_fused" />
        <testcase classname="tests.chapter_07.test_training" name="test_foreach">
<failure message="wrong">…</failure></testcase>
        <testcase classname="tests.house.bench.test_copies" name="test_two">
<skipped message="needs two GPUs" /></testcase>
        <testcase classname="tests.house.bench.test_copies" name="test_start"><error message="no device" /></testcase>
        </testsuite></testsuites>""",
        encoding="utf-8",
    )
    assert gpu_tests.outcomes(report) == {
        "files": {
            "tests/chapter_07/test_training.py": {"passed": 1, "failed": 1},
            "tests/house/bench/test_copies.py": {"skipped": 1, "error": 1},
        },
        "skipped": {"needs two GPUs": 1},
        "failed": ["tests/chapter_07/test_training.py::test_foreach", "tests/house/bench/test_copies.py::test_start"],
    }


def test_what_a_machine_lacks_is_said_in_one_line(tmp_path):
    (tmp_path / "sentencepiece.py").write_text("raise ModuleNotFoundError('as if it were missing', name=__name__)")
    run = subprocess.run(
        [sys.executable, "-m", "lib.bench.tokenizers"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, cwd=ROOT,
    )  # fmt: skip
    assert run.stderr == (
        "error: the package that Python imports as sentencepiece is not installed; pip install -e '.[test]'\n"
    )
    assert run.returncode == 1
    needed = None if torch.cuda.is_available() else "this measurement needs a GPU"
    assert what_is_missing(AssertionError("Torch not compiled with CUDA enabled")) == needed
    assert what_is_missing(ModuleNotFoundError("of the book", name="lib.no_such")) is None
    assert what_is_missing(ValueError("a real error")) is None
