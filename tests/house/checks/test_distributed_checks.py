"""An exercise on ranks, graded: not started, wrong on a rank, a deadlock, right."""

import re
import shutil
import sys
import tempfile

import psutil
import pytest

from tests.house.conftest import TOYS, Book

SUM = "buffer = torch.tensor(value); dist.all_reduce(buffer); return buffer.item()"
MIXED = SUM.replace(
    "dist.all_reduce(buffer)",
    "(dist.all_reduce if dist.get_rank() else dist.broadcast)(buffer, *[0][dist.get_rank():])",
)
TWICE = (
    "buffer = torch.tensor(value) / 2; dist.all_reduce(buffer); buffer /= 2; dist.all_reduce(buffer); "
    "return 2 * buffer.item()"
)


@pytest.fixture
def ranked(toy_template, tmp_path) -> Book:
    """The toy book with a third chapter, whose exercise runs on two ranks."""
    root = tmp_path / "rankedbook"
    shutil.copytree(toy_template, root)
    shutil.copytree(TOYS / "toy_ranks", root, dirs_exist_ok=True)
    book = Book(root)
    assert book.workbook("stubs").returncode == 0
    return book


def grade(book):
    return book.marks("tests/chapter_03")["total"]


def test_a_stub_on_ranks_is_not_started(ranked):
    row = grade(ranked)
    assert row["state"] == "not started"
    assert row["next"].startswith("write total: lib/ranked.py:")


def test_checks_in_other_files_after_one_on_ranks_are_set_up(ranked):
    """The check on ranks runs in pytest's own process; what it set up is taken down before the next file's child."""
    more = "\n\ndef test_total_by_hand{}():\n    expect_equal(ranked.total(1.0), 1.0)\n"
    first = ranked.root / "tests/chapter_03/test_ranked.py"
    first.write_text(first.read_text() + more.format(""))
    head = 'import pytest\nfrom lib.workbook.grading import expect_equal, graded\n\nranked = graded("ranked")\n'
    again = (
        "\n\n@pytest.mark.memory_limit(500)\ndef test_total_in_little_memory():\n    "
        "expect_equal(ranked.total(1.0), 1.0)\n"
    )
    (first.parent / "test_ranked_more.py").write_text(head + more.format("_again") + again)
    row = grade(ranked)
    assert row["state"] == "not started", row["report"]


def test_a_wrong_number_on_a_rank_is_a_known_mistake(ranked):
    ranked.answer("total", "return value", module="ranked")
    report = grade(ranked)["report"]
    assert report.startswith("total: wrong result\n  case         2 ranks, each with its number plus one")
    assert "first wrong  total on rank 0 = 1" in report
    assert "looks like   every rank keeps its own value" in report


def test_an_exception_on_a_rank_has_the_case_that_the_rank_named(ranked):
    ranked.answer("total", "return 1 / 0", module="ranked")
    report = grade(ranked)["report"]
    assert report.startswith("total: rank 0 raised ZeroDivisionError")
    assert "case         2 ranks, each with its number plus one" in report


def test_ranks_that_are_late_say_where_they_are_and_no_other_check_is_run(ranked):
    path = ranked.root / "tests/chapter_03/test_ranked.py"
    late = path.read_text().replace("time_limit(20)", "time_limit(2)")
    path.write_text(late + "\n\ndef test_total_by_hand():\n    expect_equal(ranked.total(1.0), 1.0)\n")
    ranked.answer("total", "import time; time.sleep(1000)", module="ranked")
    row = grade(ranked)
    assert "rank 1  lib/ranked.py:" in row["report"]
    assert (row["failed"], row["not_run"]) == (1, 1)


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


@pytest.mark.skipif(sys.platform != "linux", reason="the warm process forks, on Linux only")
def test_a_warm_check_forks_its_keeper_from_the_warm_process(ranked):
    kept = "import os; open('keeper', 'w').write(open(f'/proc/{os.getppid()}/cmdline').read()); "
    ranked.answer("total", kept + SUM, module="ranked")
    folder = tempfile.mkdtemp(prefix="wb-", dir="/tmp")  # short enough for a socket
    try:
        done = ranked.workbook("check", "total", XDG_RUNTIME_DIR=folder)
        assert done.returncode == 0, done.out
        assert "forkserver.py" in (ranked.root / "keeper").read_text()
    finally:
        ranked.end_warm_processes()
        shutil.rmtree(folder)


def test_ranks_that_were_begun_and_not_needed_are_gone(ranked):
    """A whole chapter's ranks begin to start while its tests are imported; here no test that is left uses them."""
    path = ranked.root / "tests/chapter_03/test_ranked.py"
    began = 'import atexit\nfrom lib.ranks import pool\natexit.register(lambda: print("begun", pool("gloo")._handle))\n'
    path.write_text(began + path.read_text() + "\n\ndef test_total_by_hand():\n    pass\n")
    skipped = [
        f"--deselect=tests/chapter_03/test_ranked.py::{name}"
        for name in re.findall(r"def (test_\w+)\(ranks", path.read_text())
    ]
    done = ranked.cold_pytest("tests/chapter_03", *skipped)
    assert done.returncode == 0, done.out
    assert "begun Handle(" in done.out
    keeper = str(ranked.root / "lib/ranks/keeper.py")
    assert not [p for p in psutil.process_iter(["cmdline"]) if keeper in (p.info["cmdline"] or [])]


DEADLOCK = "buffer = torch.tensor(value); dist.recv(buffer, 1 - dist.get_rank()); return buffer.item()"
LOUD = """
    import os
    for i in range(40):
        print(f"mine {i}")
    os.write(2, b"/venv/lib/libmpi.so.12(+0x4627a1) [0x7ff275e627a1]" + bytes([10]))
    return value"""
MISTAKES = """
from lib.workbook.grading import mistake


@mistake("total", "each waits for the other to send first")
def both_receive(value):
    import os
    import torch
    import torch.distributed as dist
    os.write(1, b"said by a mistake")
    os.write(2, b"said by a mistake")
    print("said by a mistake")
    buffer = torch.tensor(value)
    dist.recv(buffer, src=1 - dist.get_rank())
    return buffer.item()


@mistake("total", "a rank that dies")
def dies(value):
    import os
    print("said by a mistake", flush=True)
    os.abort()
"""


def add(book, file: str, text: str) -> None:
    path = book.root / "tests/chapter_03" / file
    path.write_text(path.read_text() + text)


def test_a_deadlock_is_a_known_mistake_and_the_diagnosis_is_silent(ranked):
    add(ranked, "mistakes.py", MISTAKES)
    ranked.answer("total", DEADLOCK, module="ranked")
    done = ranked.pytest("tests/chapter_03")
    assert "  looks like   each waits for the other to send first\n" in done.out
    assert "said by a mistake" not in done.out


def test_only_the_first_failure_on_ranks_is_told_at_length_and_diagnosed(ranked):
    add(ranked, "mistakes.py", MISTAKES)
    add(ranked, "test_ranked.py", "\n\ndef test_total_again(ranks):\n    ranks(total_of_ranks, n_ranks=3)\n")
    ranked.answer("total", "return value", module="ranked")
    out = ranked.pytest("tests/chapter_03").out
    assert out.count("looks like   every rank keeps its own value") == 1
    assert "total: wrong result (3 ranks, each with its number plus one): first wrong total on rank" in out


def test_what_ranks_print_is_shown_in_a_few_lines(ranked):
    ranked.answer("total", LOUD, module="ranked")
    out = ranked.pytest("tests/chapter_03").out
    assert "[rank 0] mine 7\n[rank 0] … 32 lines more (pytest -s shows them all)\n" in out
    assert "mine 8" not in out
    assert "libmpi" not in out
    assert "[rank 1] mine 39" in ranked.pytest("tests/chapter_03", "-s").out


def test_the_start_of_the_ranks_is_no_time_of_the_check(ranked):
    path = ranked.root / "lib/ranks/keeper.py"
    path.write_text(
        path.read_text().replace(
            "        self.serve = ", "        import time\n        time.sleep(5)\n        self.serve = "
        )
    )
    path = ranked.root / "tests/chapter_03/test_ranked.py"
    path.write_text(path.read_text().replace("time_limit(20)", "time_limit(2)"))
    ranked.answer("total", SUM, module="ranked")
    assert grade(ranked)["state"] == "passed"


def test_a_file_that_does_not_parse_is_told_as_anywhere_else(ranked):
    ranked.answer("total", "return (value", module="ranked")
    report = grade(ranked)["report"]
    assert report.startswith("total: cannot be graded: lib/ranked.py:12: SyntaxError: ")
    assert "resolve.py" not in report
