"""The race of recipes to one loss, at a size for a CPU."""

import itertools
import json

import numpy as np
import pytest

from lib.bench import speedrun
from lib.bench.optimizers import reached
from lib.given.data.record import load


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (np.arange(4000) % 97).astype(np.uint16).tofile(folder / "tokens.bin")
    (folder / "corpus.json").write_text(json.dumps({"tokens": 4000, "held_out_tokens": 500, "vocab_size": 100}))
    return folder


@pytest.mark.time_limit(120)
def test_recipes_race_to_the_goal_and_a_later_one_joins(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "RECIPES", dict(speedrun.RECIPES))
    words = [str(corpus), "--device", "cpu", "--tiny", "--seeds", "2", "--goal", "4.7", "--folder", str(tmp_path)]
    speedrun.main([*words, "--only", "plain", "growing batch"])
    before = load("speedrun", tmp_path)["results"]["cards"]["CPU"]["rows"]
    assert list(before) == ["plain", "growing batch"]
    speedrun.main([*words, "--only", "Muon", "--units", str(tmp_path / "units")])
    rows = load("speedrun", tmp_path)["results"]["cards"]["CPU"]["rows"]
    assert list(rows) == ["plain", "Muon", "growing batch"], "in the order of the recipes"
    assert rows["plain"] == before["plain"]
    for name, row in rows.items():
        assert [curve[-1]["step"] for curve in row["curves"]] == 2 * [4 if name == "growing batch" else 2]
        assert row["losses"][0] != row["losses"][1], "seeds differ"
        assert row["reached"] == [reached(curve, 4.7) for curve in row["curves"]]
    (tmp_path / "units" / "Muon-1.json").unlink()
    speedrun.main([*words, "--only", "Muon", "--units", str(tmp_path / "units")])
    again = load("speedrun", tmp_path)["results"]["cards"]["CPU"]["rows"]["Muon"]
    assert again["losses"] == rows["Muon"]["losses"], "a model and an optimizer that begin again forget all"


def test_each_recipe_adds_one_idea():
    recipes = speedrun.make_recipes()
    for before, recipe in itertools.pairwise(recipes):
        changed = {name for name in vars(recipe) if vars(recipe)[name] != vars(before)[name]}
        assert changed - {"name", "why", "tried", "seeds"} in (
            {"matmul"}, {"path"}, {"compiled"}, {"graph"}, {"optimizer", "lr", "batches"}, {"batches"}
        ), recipe.name  # fmt: skip


def test_each_rate_was_among_those_tried():
    assert all(recipe.lr in recipe.tried for recipe in speedrun.RECIPES.values())


def test_rates_rise_and_fall_over_sequences():
    recipe = speedrun.Recipe(name="", why="", lr=1.0, batches=((2, 100), (8, 100)))
    assert recipe.n_sequences == 1000
    assert recipe.rate(0) == 0
    assert recipe.rate(50) == 1
    assert recipe.rate(525) == pytest.approx(0.5)
    assert recipe.rate(1000) == pytest.approx(0)
