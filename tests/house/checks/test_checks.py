"""What a check says and how it ends: not started, wrong, passed, endless, greedy, dead; and pytest's own options."""

import json
import sys
import xml.etree.ElementTree as ET

import pytest

DOUBLE = 'if x > LIMIT:\n        raise ValueError(f"at most {LIMIT}, got {x}")\n    return 2 * x'


def solve(book):
    book.answer("double", DOUBLE)
    book.answer("Tally.add", "self.n += double(x)\n        return self.n")
    book.answer("Tally.clear", "self.n = 0")
    book.answer("halves", "return [half, half]")


def test_a_stub_is_not_started_in_one_line(book):
    done = book.pytest("tests/chapter_01")
    assert done.returncode == 1
    assert "Traceback" not in done.out
    assert "NotImplementedError" not in done.out
    assert "1.1   double  not started  write double: lib/toy.py:20" in done.out
    assert done.out.count("halves") == 2  # its name, and the next step
    assert "0 of 3 passed" in done.out


def test_a_definition_that_is_still_the_stub_is_run_once(book):
    path = book.root / "tests" / "chapter_01" / "test_toy.py"
    last = "def test_double_at_last():\n    open('ran', 'w').close()\n    toy.double(1)\n"
    path.write_text(f"{path.read_text()}\n\n{last}")
    row = book.marks("tests/chapter_01", "-k", "double")["double"]
    assert (row["state"], row["not_started"], row["next"]) == ("not started", 6, "write double: lib/toy.py:20")
    assert not (book.root / "ran").exists()
    stub = 'raise NotImplementedError("Exercise 1.1: write double")'
    book.write("toy", stub, f"twice = 2 * x\n    {stub}")
    row = book.marks("tests/chapter_01", "-k", "double")["double"]
    assert (row["state"], row["not_started"]) == ("not started", 6)
    assert (book.root / "ran").exists()


def test_all_right_is_exit_status_0_and_names_what_was_graded(book):
    solve(book)
    done = book.cold_pytest("tests/chapter_01")
    assert done.returncode == 0, done.out
    assert "3 of 3 passed" in done.out
    assert "lib/toy.py:6" in done.out


def test_an_answer_that_draws_fails_the_same_way_each_time(book):
    book.answer("double", "import random\n    return x + random.random()")
    first, again = (book.marks("tests/chapter_01", "-k", "double")["double"]["report"] for _ in range(2))
    assert first == again
    assert "out is a float" in first


def test_a_known_mistake_is_named(book):
    book.answer("double", "return x * x")
    report = book.marks("tests/chapter_01")["double"]["report"]
    assert report.splitlines() == [
        "double: wrong result",
        "  case         x=3",
        "  first wrong  out = 9, expected 6",
        "  looks like   squared instead of doubled",
        "  graded       lib/toy.py:6",
        "  read         chapter 1, equation (1.1)",
        "  again        pytest tests/chapter_01 -k double",
    ]


def test_an_unknown_mistake_is_not_guessed(book):
    book.answer("double", "return 17")
    assert "looks like" not in book.marks("tests/chapter_01")["double"]["report"]


def test_a_method_that_is_left_is_the_next_step(book):
    book.answer("double", DOUBLE)
    book.answer("Tally.add", "self.n += double(x)\n        return self.n")
    row = book.marks("tests/chapter_01")["Tally"]
    assert (row["state"], row["passed"]) == ("not started", 1)
    assert row["next"].startswith("write Tally.clear: lib/toy.py:")


def test_an_answer_that_waits_for_another_says_so(book):
    book.answer("Tally.add", "self.n += double(x)\n        return self.n")
    book.answer("Tally.clear", "self.n = 0")
    assert book.marks("tests/chapter_01")["Tally"]["next"] == "first exercise 1.1: write double"


def test_an_exception_shows_the_learners_line(book):
    book.answer("halves", "return [half, hafl]")
    report = book.marks("tests/chapter_01")["halves"]["report"]
    assert "halves: raised NameError: name 'hafl' is not defined" in report
    assert "at           lib/toy.py:46   return [half, hafl]" in report
    assert "case         x=3" in report


def test_another_error_than_the_contracts_shows_the_learners_line_too(book):
    book.answer("double", "return 2 * x if x <= 100 else [][x]")
    report = book.marks("tests/chapter_01")["double"]["report"]
    assert "raised       IndexError: list index out of range" in report
    assert "at           lib/toy.py:20   return 2 * x if x <= 100 else [][x]" in report


@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(1000)", "sum(iter(int, 1))"])
def test_an_endless_loop_is_ended_and_its_line_shown(book, loop):
    solve(book)
    book.write("toy", "return [half, half]", loop)
    marks = book.marks("tests/chapter_01")
    assert marks["halves"]["state"] == "wrong"
    assert "not finished after 2 s" in marks["halves"]["report"]
    assert "case         x=3" in marks["halves"]["report"]
    assert loop.split(";")[-1].strip()[:9] in marks["halves"]["report"]
    assert marks["double"]["state"] == "passed"
    assert marks["Tally"]["state"] == "passed"


def test_too_much_memory_is_named(book):
    solve(book)
    book.write("toy", "return [half, half]", "waste = bytearray(200 * 2**20); return [half, half]")
    assert "the limit of this check" in book.marks("tests/chapter_01")["halves"]["report"]


def test_a_crash_of_python_is_one_failed_check(book):
    solve(book)
    book.write("toy", "return [half, half]", "import os; os.abort()")
    marks = book.marks("tests/chapter_01")
    assert "ended Python (SIGABRT)" in marks["halves"]["report"]
    assert marks["double"]["state"] == "passed"


def test_sys_exit_in_an_answer_is_a_wrong_answer(book):
    solve(book)
    book.write("toy", "return [half, half]", "raise SystemExit(0)")
    row = book.marks("tests/chapter_01")["halves"]
    assert row["state"] == "wrong"


def test_select_by_name(book):
    done = book.pytest("tests/chapter_01", "-k", "double", "-v")
    assert done.out.count("NOT STARTED") == 5
    assert "Tally" not in done.out


def test_stop_at_the_first(book):
    done = book.pytest("tests/chapter_01", "-x", "-v")
    assert done.out.count("NOT STARTED") == 1
    assert done.returncode == 1


def test_two_workers(book):
    solve(book)
    book.write("toy", "return [half, half]", "return [half, 0]")
    done = book.cold_pytest("tests", "-n", "2")
    assert done.returncode == 1
    assert "2 of 3 passed" in done.out
    assert "value        out[1] = 0, expected 1.5" in done.out
    assert "2.1   quadruple  not started" in done.out


def test_last_failed(book):
    solve(book)
    book.write("toy", "return [half, half]", "return [half, 0]")
    run = ("tests/chapter_01", "-q", "-p", "cacheprovider")
    first = book.run(sys.executable, "-m", "pytest", *run[:2])
    assert "1 failed" in first.out
    again = book.run(sys.executable, "-m", "pytest", *run[:2], "--lf")
    assert "1 failed" in again.out
    assert "1 failed, " not in again.out.splitlines()[-1]


def test_junit_and_json_carry_the_exercise_and_the_place(book):
    solve(book)
    book.write("toy", "return [half, half]", "return [half, 0]")
    book.pytest("tests", "--junitxml", "junit.xml", "--marks", "marks.json")
    cases = {case.get("name"): case for case in ET.parse(book.root / "junit.xml").getroot().iter("testcase")}
    properties = {p.get("name"): p.get("value") for p in cases["test_double_by_hand"].iter("property")}
    assert properties == {"exercise": "1.1 double", "graded": "lib/toy.py:6"}
    assert "value        out[1] = 0, expected 1.5" in cases["test_halves"].find("failure").text
    marks = json.loads((book.root / "marks.json").read_text())
    assert (marks["passed"], marks["of"]) == (2, 4)
    assert [(r["number"], r["state"]) for r in marks["exercises"]] == [
        ("1.1", "passed"),
        ("1.2", "passed"),
        ("1.3", "wrong"),
        ("2.1", "not started"),
    ]


def test_the_reference_passes_with_its_oracles(book):
    done = book.pytest("--reference", "tests", "-q")
    assert done.returncode == 0, done.out
    assert "10 passed" in done.out


def test_every_mistake_is_caught(book):
    done = book.pytest("--mistakes", "tests", "-q")
    assert done.returncode == 0, done.out
    assert "5 passed" in done.out


def test_a_mistake_that_no_test_catches_is_named(book):
    path = book.root / "tests/chapter_01/mistakes.py"
    path.write_text(path.read_text() + '\n\n@mistake("halves", "is right")\ndef right(x):\n    return [x / 2, x / 2]\n')
    done = book.pytest("--mistakes", "tests", "-q")
    assert done.returncode == 1
    assert "no test catches the mistake of halves: is right" in done.out


def test_how_each_mistake_fails_first_is_recorded_and_used(book):
    file = book.root / "tests/chapter_01/mistakes.json"
    assert book.pytest("--mistakes", "--record", "tests").returncode == 0
    record = json.loads(file.read_text())
    assert [len(sketches) for sketches in record["double"].values()] == [2]
    assert set(record["Tally"]) == {"test_Tally_counts"}
    live = book.pytest("--mistakes", "--live", "0", "tests").out
    assert "5 mistakes: 4 named, 0 named as another, 1 not named" in live  # a check of memory is not diagnosed
    sketches = record["double"].pop("test_double_by_hand")
    file.write_text(json.dumps(record | {"double": {"test_double_refuses_too_much": sketches}}))
    done = book.pytest("--mistakes", "tests/chapter_01")
    assert done.returncode == 0, done.out
    assert "tests/chapter_01/mistakes.json: old lines: 2 (" in done.out
    assert "renew them with: pytest --mistakes --record tests/chapter_01" in done.out
    book.answer("double", "return x * x")
    assert "looks like" not in book.pytest("tests/chapter_01").out  # an old record says nothing rather than the wrong


def test_a_test_named_after_no_exercise_is_an_error(book):
    path = book.root / "tests/chapter_01/test_toy.py"
    path.write_text(path.read_text() + "\n\ndef test_triple():\n    pass\n")
    done = book.pytest("tests/chapter_01")
    assert done.returncode == 4
    assert "test_triple is named after no exercise; the exercises are double, Tally, halves" in done.out


def test_contradicting_options_are_refused(book):
    assert "choose one" in book.pytest("--mine", "--reference").out


# ---- the command line ------------------------------------------------------------------------------------------------


def test_check_shows_the_table_and_the_first_report(book):
    book.answer("double", "return x * x")
    done = book.workbook("check", "1")
    assert done.returncode == 1
    assert "✗   1.1 double   wrong" in done.out
    assert "looks like   squared instead of doubled" in done.out
    assert "·   1.2 Tally" in done.out


def test_check_one_exercise_by_name_and_number(book):
    book.answer("double", DOUBLE)
    for what in ("double", "1.1", "toy.double"):
        done = book.workbook("check", what)
        assert done.returncode == 0, done.out
        assert "Tally" not in done.out


def test_check_of_nothing_names_what_is_near(book):
    done = book.workbook("check", "dubble")
    assert done.returncode == 2
    assert done.stderr.strip() == "workbook: no chapter or exercise is called 'dubble'; did you mean double?"


def test_check_without_a_warm_process_is_the_same(book):
    book.answer("double", "return x * x")
    assert book.workbook("check", "1", WORKBOOK_COLD="1").stdout == book.workbook("check", "1").stdout


def test_progress_names_the_next_exercise(book):
    done = book.workbook("progress")
    assert "next: 1.1 double" in done.out
    book.answer("double", DOUBLE)
    done = book.workbook("progress")
    assert "✓ · ·  1 of 3" in done.out
    assert "next: 1.2 Tally" in done.out
    solve_rest = {"Tally.add": "self.n += double(x)\n        return self.n", "Tally.clear": "self.n = 0"}
    for name, code in solve_rest.items():
        book.answer(name, code)
    assert "next: 2.1 quadruple" in book.workbook("progress").out


def test_solution_and_difference(book):
    assert "return _times(x, _TWO)" in book.workbook("solution", "double").out
    assert "BEGIN SOLUTION" not in book.workbook("solution", "toy").out
    book.answer("halves", "return [half, 0]")
    done = book.workbook("solution", "halves", "--diff")
    assert "-    return [half, 0]" in done.out
    assert "+    return [half, half]" in done.out


def test_watch_checks_again_after_a_save(book):
    import subprocess
    import threading

    code = "from lib.workbook.tools.cli import main; main()"
    command = [sys.executable, "-u", "-c", code, "check", "double", "--watch"]
    program = subprocess.Popen(
        command, cwd=book.root, env=book.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    patience = threading.Timer(120, program.kill)
    patience.start()
    try:
        lines = iter(program.stdout.readline, "")
        assert any("not started" in line for line in lines)
        assert any("watching" in line for line in lines)
        book.answer("double", DOUBLE)
        assert any("passed" in line for line in lines)
    finally:
        patience.cancel()
        program.terminate()
        program.wait()


def test_reset_keeps_a_dated_copy(book):
    book.answer("double", "return x + 9")
    book.answer("halves", "return [half, half]")
    done = book.workbook("reset", "double")
    assert done.returncode == 0, done.out
    copy = next((book.root / ".workbook/backups").glob("toy-*.py"))
    assert "return x + 9" in copy.read_text()
    assert copy.name in done.out.replace("\n", "")
    assert "return [half, half]" in book.mine("toy").read_text()
    assert book.marks("tests/chapter_01")["double"]["state"] == "not started"
    book.workbook("reset", "toy", "--yes")
    assert book.workbook("stubs", "--check").returncode == 0
    assert len(list((book.root / ".workbook/backups").glob("toy-*.py"))) == 2


def test_reset_of_a_name_in_a_file_that_does_not_parse(book):
    book.answer("double", "return (x")
    done = book.workbook("reset", "double")
    assert done.returncode == 2
    assert "workbook reset toy" in done.stderr
    assert book.workbook("reset", "toy", "--yes").returncode == 0
    assert book.workbook("stubs", "--check").returncode == 0


# ---- stubs -----------------------------------------------------------------------------------------------------------


def test_stubs_hide_every_answer_and_keep_what_is_given(book):
    text = book.mine("toy").read_text()
    assert "_times" not in text
    assert "SOLUTION" not in text
    assert "half = x / 2" in text
    assert 'raise NotImplementedError("Exercise 1.2: write Tally.add")' in text
    assert "from lib.toy import double" in book.mine("later").read_text()


def test_stubs_never_overwrite_what_was_begun(book):
    book.answer("double", "return x + 9")
    before = book.mine("toy").read_text()
    reference = book.root / "solutions/toy.py"
    reference.write_text(reference.read_text().replace("Any number.", "A number."))
    done = book.workbook("stubs")
    assert "lib/toy.py is begun, so it stays as it is" in done.out
    assert book.mine("toy").read_text() == before
    book.workbook("reset", "toy", "--yes")
    assert "A number." in book.mine("toy").read_text()


def test_stubs_follow_the_reference_while_nobody_began(book):
    reference = book.root / "solutions/toy.py"
    reference.write_text(reference.read_text().replace("Any number.", "A number."))
    assert book.workbook("stubs", "--check").returncode == 1
    assert "lib/toy.py written" in book.workbook("stubs").out
    assert book.workbook("stubs", "--check").returncode == 0


def test_a_mark_without_its_partner_is_named(book):
    reference = book.root / "solutions/toy.py"
    reference.write_text(reference.read_text().replace("    ### END SOLUTION\n\n\nclass", "\n\nclass"))
    done = book.workbook("stubs")
    assert done.returncode == 2
    assert "without ### END SOLUTION" in done.stderr or "inside the one of line" in done.stderr


def test_a_helper_method_hidden_in_a_class_goes_without_a_trace(book):
    reference = book.root / "solutions/toy.py"
    helper = "    ### BEGIN SOLUTION\n    def _more(self, x):\n        self.n += x\n\n    ### END SOLUTION\n"
    reference.write_text(reference.read_text().replace("    def clear(self)", helper + "    def clear(self)"))
    assert book.workbook("stubs").returncode == 0
    text = book.mine("toy").read_text()
    assert "_more" not in text
    assert text.count("raise NotImplementedError") == 4
    assert book.python("import lib.toy", WORKBOOK_WORLD="mine").returncode == 0


def test_a_stub_that_asks_nothing_or_is_no_python_is_refused(book):
    reference = book.root / "solutions/toy.py"
    source = reference.read_text()
    hidden = source.replace("    def clear(self)", "    ### BEGIN SOLUTION\n    def clear(self)")
    hidden = hidden.replace(
        "        ### BEGIN SOLUTION\n        self.n = 0\n        ### END SOLUTION",
        "        self.n = 0\n    ### END SOLUTION",
    )
    hidden = hidden.replace("        ### BEGIN SOLUTION\n        self.n += double(x)", "        self.n += double(x)")
    hidden = hidden.replace("        return self.n\n        ### END SOLUTION", "        return self.n")
    reference.write_text(hidden)
    done = book.workbook("stubs", "--check")
    assert done.returncode == 2
    assert "leaves nothing to write in Tally" in done.stderr
    decorated = (
        "    @property\n    ### BEGIN SOLUTION\n    def more(self):\n        return 1\n\n    ### END "
        "SOLUTION\n\n\ndef halves"
    )
    reference.write_text(source.replace("\n\ndef halves", decorated))
    done = book.workbook("stubs", "--check")
    assert done.returncode == 2
    assert "its stub is not valid Python" in done.stderr


def test_the_command_as_a_module(book):
    assert "every stub matches the reference" in book.run(sys.executable, "-m", "lib.workbook.tools.cli", "stubs").out
