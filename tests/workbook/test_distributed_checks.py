"""An exercise on ranks, graded: not started, wrong on a rank, a deadlock, right."""

import shutil

import pytest

from tests.workbook.conftest import HERE, Book

SUM = "buffer = torch.tensor(value); dist.all_reduce(buffer); return buffer.item()"
MIXED = SUM.replace(
    "dist.all_reduce(buffer)",
    "(dist.all_reduce if dist.get_rank() else dist.broadcast)(buffer, *[0][dist.get_rank():])",
)
TWICE = "buffer = torch.tensor(value) / 2; dist.all_reduce(buffer); buffer /= 2; dist.all_reduce(buffer); return 2 * buffer.item()"


@pytest.fixture
def ranked(toy_template, tmp_path) -> Book:
    """The toy book with a third chapter, whose exercise runs on two ranks."""
    root = tmp_path / "rankedbook"
    shutil.copytree(toy_template, root)
    shutil.copytree(HERE / "toy_ranks", root, dirs_exist_ok=True)
    book = Book(root)
    assert book.workbook("stubs").returncode == 0
    return book


def grade(book):
    return book.marks("tests/chapter_03")["total"]


def test_a_stub_on_ranks_is_not_started(ranked):
    row = grade(ranked)
    assert row["state"] == "not started"
    assert row["next"].startswith("write total: lib/ranked.py:")


def test_a_wrong_number_on_a_rank_is_a_known_mistake(ranked):
    ranked.answer("total", "return value", module="ranked")
    report = grade(ranked)["report"]
    assert report.startswith("total: wrong result\n  case         2 ranks, each with its number plus one")
    assert "first wrong  total on rank 0 = 1" in report
    assert "looks like   every rank keeps its own value" in report


def test_the_ledger_is_graded(ranked):
    ranked.answer("total", TWICE, module="ranked")
    row = grade(ranked)
    assert row["state"] == "wrong"
    assert "all_reduces of each rank[0] = 2, expected 1" in row["report"]


def test_ranks_that_call_different_collectives_are_explained(ranked):
    ranked.answer("total", MIXED, module="ranked")
    report = grade(ranked)["report"]
    assert "rank 0" in report.splitlines()[0]
    assert "broadcast" in report
    assert "all_reduce" in report
    assert "lib/ranked.py:" in report


def test_a_right_answer_passes_and_its_mistake_is_caught(ranked):
    ranked.answer("total", SUM, module="ranked")
    row = grade(ranked)
    assert row["state"] == "passed"
    assert row["graded"].startswith("lib/ranked.py:")
    assert ranked.pytest("--mistakes", "tests/chapter_03", "-q").returncode == 0
