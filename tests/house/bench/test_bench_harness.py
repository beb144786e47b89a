"""Our scores of the harness's tasks are those that EleutherAI's harness found, digit for digit.

The harness is no dependency: its thirty packages would be in every test run. `lib.bench.harness` records what it finds,
and here our half is computed again, of the same model on the same questions.
"""

import pytest
import torch

from lib.bench import harness
from lib.given.data.record import load
from lib.runs.data.questions import kind_of
from lib.workbook.book.catalog import ROOT

pytestmark = pytest.mark.time_limit(120)


@pytest.fixture(scope="module")
def record():
    return load("harness", ROOT / "chapters" / "measurements")["results"]


@pytest.fixture(scope="module")
def served():
    torch.set_num_threads(1)
    return harness.make_served()


@pytest.fixture(scope="module")
def tasks(served):
    return harness.make_tasks(served)


def test_the_record_is_of_these_tasks(record, tasks):
    assert record["questions"] == {name: len(rows) for name, rows in tasks.items()}
    assert {kind_of(rows[0]) for rows in tasks.values()} == {"choices", "answers", "texts"}
    assert record["harness"].keys() == record["ours"].keys() == tasks.keys()


def test_our_scores_are_the_harnesss(record, served, tasks):
    for name, found in harness.ours(served, tasks).items():
        for metric, value in found.items():
            theirs = record["harness"][name][metric]
            assert value == pytest.approx(theirs, rel=1e-6 if metric == "bits_per_byte" else 1e-12), (name, metric)
            assert f"{record['ours'][name][metric]:.6f}" == f"{theirs:.6f}"


def test_the_tasks_tell_models_and_normalizations_apart(record):
    """Scores that are all 0, or the same by either normalization, would be equal by chance."""
    scores = record["harness"]
    assert len({scores[name]["acc"] for name in scores if "acc" in scores[name]}) > 4
    assert any(scores[name]["acc"] != scores[name]["acc_norm"] for name in scores if "acc" in scores[name])
    assert 0 < scores["written"]["exact_match"] < 1
