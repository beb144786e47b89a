"""The boundary under attack: whatever an answer does, to itself or to the machine,
one exercise is wrong and nothing else happens.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

DOUBLE = 'if x > LIMIT:\n        raise ValueError(f"at most {LIMIT}, got {x}")\n    return 2 * x'


def solve(book):
    book.answer("double", DOUBLE)
    book.answer("Tally.add", "self.n += double(x)\n        return self.n")
    book.answer("Tally.clear", "self.n = 0")
    book.answer("halves", "return [half, half]")


def at_module_level(book, code: str) -> None:
    path = book.mine("toy")
    path.write_text(path.read_text() + f"\n\n{code}\n")


def hurry(book) -> None:
    """Give the checks that have no limit of their own two seconds instead of ten."""
    path = book.root / "tests" / "chapter_01" / "test_toy.py"
    limit = "pytestmark = pytest.mark.time_limit(2)\n"
    path.write_text(path.read_text().replace('toy = graded("toy")\n', f'toy = graded("toy")\n{limit}'))


def states(marks: dict) -> dict[str, str]:
    return {name: row["state"] for name, row in marks.items()}


# ---- while the module is imported ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_module_that_never_finishes_importing_costs_one_limit(book, code):
    solve(book)
    hurry(book)
    at_module_level(book, code)
    marks = book.marks("tests")
    assert states(marks) == {"double": "wrong", "Tally": "not run", "halves": "not run", "quadruple": "not started"}
    assert "when it was imported" in marks["double"]["report"]
    assert code.split(";")[-1].strip() in marks["double"]["report"]
    assert marks["double"]["failed"] == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(3)", "exit status 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
def test_a_module_that_ends_python_is_one_wrong_exercise(book, code, said):
    solve(book)
    at_module_level(book, code)
    marks = book.marks("tests")
    assert states(marks) == {"double": "wrong", "Tally": "not run", "halves": "not run", "quadruple": "not started"}
    assert said in marks["double"]["report"]


def test_pytests_own_process_never_imports_an_answer(book):
    solve(book)
    at_module_level(book, "import os; open('who', 'a').write(f'{os.getpid()} ')")
    (book.root / "conftest.py").write_text("import os\nopen('judge', 'w').write(str(os.getpid()))\n")
    assert book.pytest("tests").returncode == 1
    judge = (book.root / "judge").read_text()
    assert judge not in (book.root / "who").read_text().split()


def test_a_module_that_closes_stdout_is_named(book):
    solve(book)
    at_module_level(book, "import sys; sys.stdout.close()")
    marks = book.marks("tests/chapter_01")
    assert "sys.stdout was closed" in marks["double"]["report"]


# ---- time ------------------------------------------------------------------------------------------------------------


def test_after_a_time_out_the_rest_of_the_exercise_is_not_run(book):
    solve(book)
    hurry(book)
    book.write("toy", "return 2 * x", "while True: pass")
    marks = book.marks("tests/chapter_01")
    assert (marks["double"]["failed"], marks["double"]["not_run"] > 0) == (1, True)
    assert marks["Tally"]["state"] == "wrong"
    assert marks["halves"]["state"] == "passed"
    assert (
        f"1 of {marks['double']['not_run'] + 1} checks fail, {marks['double']['not_run']} not run: was not finished"
        in (book.pytest("tests/chapter_01", "-k", "double").out)
    )


def test_time_that_a_check_does_not_get_is_not_counted(book):
    solve(book)
    wait = "import time; began = time.process_time(); time.sleep(2.5); assert time.process_time() - began < 1"
    book.write("toy", "return [half, half]", f"{wait}\n    return [half, half]")
    assert book.marks("tests/chapter_01")["halves"]["state"] == "passed"  # its limit is 2 s, of computing


# ---- what an answer leaves behind ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import torch; torch.set_default_dtype(torch.float64)", "torch.get_default_dtype()"),
        ("import torch; torch.set_default_device('meta')", "torch.get_default_device()"),
        (
            "import torch; torch.set_grad_enabled(False)",
            "torch.is_grad_enabled() was True before the check and False after it",
        ),
        ("import sys; sys.setrecursionlimit(77)", "sys.getrecursionlimit()"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))", "RLIMIT_NOFILE"),
        ("import os; os.chdir('/')", "the working directory"),
    ],
)
def test_what_one_answer_changes_for_all_is_named_and_fails_no_other(book, code, said):
    solve(book)
    path = book.mine("toy")
    path.write_text("import torch\n" + path.read_text())
    book.write("toy", "return [half, half]", f"{code}\n    return [half, half]")
    marks = book.marks("tests/chapter_01")
    assert (marks["double"]["state"], marks["Tally"]["state"]) == ("passed", "passed")
    assert marks["halves"]["problem"] == "leaves a setting changed that the whole program shares"
    assert said in marks["halves"]["report"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_pytest_ends_its_child_and_all_that_it_started_end_too(book, number):
    solve(book)
    start = "import subprocess, os; p = subprocess.Popen(['sleep', '997'], start_new_session=True)"
    book.write(
        "toy",
        "return [half, half]",
        f"{start}; open('pids', 'w').write(f'{{os.getpid()}} {{p.pid}}')\n    while True: pass",
    )
    command = [sys.executable, "-m", "pytest", "tests/chapter_01", "-k", "halves", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        command, cwd=book.root, env=book.env, stdout=subprocess.DEVNULL, start_new_session=True
    ) as run:
        deadline = time.monotonic() + 60
        while not ((book.root / "pids").exists() and (book.root / "pids").read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        run.send_signal(number)
        run.wait(timeout=60)
    pids = list(map(int, (book.root / "pids").read_text().split()))
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    "end", ["pytest.skip('no')", "pytest.exit('no')", "raise KeyboardInterrupt", "pytest.xfail('no')"]
)
def test_what_ends_or_skips_a_test_is_wrong_in_an_answer(book, end):
    solve(book)
    book.write("toy", "return [half, half]", f"import pytest; {end}" if "pytest" in end else end)
    marks = book.marks("tests/chapter_01")
    assert marks["halves"]["state"] == "wrong"
    assert "lib/toy.py" in marks["halves"]["report"]
    assert marks["double"]["state"] == "passed"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "class Odd(Exception):\n        __str__ = lambda self: 1 / 0\n    raise Odd",
            "its __str__ raises ZeroDivisionError",
        ),
        ("raise RuntimeError('x' * 10**8)", "raised RuntimeError: xxx"),
    ],
)
def test_an_exception_that_cannot_be_shown_or_is_endless(book, code, said):
    book.answer("double", code)
    report = book.marks("tests/chapter_01")["double"]["report"]
    assert said in report
    assert len(report) < 10_000


def test_endless_prints_are_cut(book):
    book.answer("double", "print('y' * 10**8)\n    return 17")
    assert 0 < len(book.marks("tests/chapter_01")["double"]["printed"]) < 30_000


# ---- the ordinary tools ----------------------------------------------------------------------------------------------


def typed(book, keys: str, *arguments: str, **env) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=book.root, env={**book.env, **env}, input=keys, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def test_breakpoint_stops_the_clock_and_q_leaves_quietly(book):
    solve(book)
    book.write("toy", "return [half, half]", "breakpoint()\n    return [half, half]")
    said = typed(book, "p x + 1000\nc\n", "tests/chapter_01", "-k", "halves")
    assert "(Pdb) 1003" in said
    said = typed(book, "q\n", "tests/chapter_01", "-k", "halves")
    assert "Quitting debugger" in said
    assert "Traceback" not in said


def test_pdb_opens_where_an_answer_raised(book):
    solve(book)
    book.write("toy", "return [half, half]", "inside = 4711\n    return [half, hafl]")
    said = typed(book, "p inside\nq\n", "tests/chapter_01", "-k", "halves", "--pdb", "-x")
    assert "hafl" in said
    assert "4711" in said


def test_breakpoint_where_there_is_no_terminal_is_passed_over(book):
    solve(book)
    book.write("toy", "return [half, half]", "breakpoint()\n    return [half, half + 1]")
    said = book.workbook("check", "halves", WORKBOOK_COLD="1").out
    assert "breakpoint() needs a terminal" in said


def test_what_an_answer_prints_is_shown_with_its_report(book):
    solve(book)
    book.write("toy", "return [half, half]", "print('half is', half)\n    return [half, half + 1]")
    said = book.workbook("check", "halves", WORKBOOK_COLD="1").out
    assert "half is 1.5" in said
    assert said.index("expected 1.5") < said.index("half is 1.5")


def test_failures_that_are_not_shown_say_how_to_see_them(book):
    book.answer("double", "return 17")
    path = book.root / "tests/chapter_01/test_toy.py"
    more = (
        "\n\n@pytest.mark.parametrize('x', range(30, 36))\ndef test_double_more(x):\n    "
        "expect_equal(toy.double(x), 2 * x)\n"
    )
    path.write_text("import pytest\n" + path.read_text() + more)
    assert "not shown (pytest -v shows all)" in book.pytest("tests/chapter_01", "-k", "double").out
    assert "not shown" not in book.pytest("tests/chapter_01", "-k", "double", "-v").out


def test_a_module_runs_as_a_program(book):
    at_module_level(book, "if __name__ == '__main__':\n    print('I am', __name__)")
    assert book.run(sys.executable, "-m", "lib.toy").stdout == "I am __main__\n"


def test_a_half_written_class_runs_what_is_written_and_says_what_is_borrowed(book):
    book.answer("Tally.add", "self.n += 1000 * x\n        return self.n")
    done = book.python("from lib.toy import Tally; t = Tally(); print(t.add(3)); t.clear(); print(t.n)")
    assert done.stdout.split() == ["3000", "0"]
    assert done.stderr.count("Tally.clear is not written yet, so the reference's code runs there") == 1


# ---- the warm process ------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime():
    """The environment with a runtime directory of its own, whose path is short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="wb-", dir="/tmp")
    yield {"XDG_RUNTIME_DIR": folder}
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the warm process forks, on Linux only")
def test_two_checks_that_start_together_share_a_warm_process(book, runtime):
    solve(book)
    command = [sys.executable, "-c", "from lib.workbook.tools.cli import main; main()", "check", "1"]
    runs = [
        subprocess.Popen(
            command, cwd=book.root, env=book.env | runtime, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(3)
    ]
    for run in runs:
        said = run.communicate(timeout=120)[0]
        assert run.returncode == 0, said
        assert said.count("✓") == 3
    server = str(book.root / "lib/ranks/forkserver.py")
    servers = [p for p in psutil.process_iter(["cmdline"]) if server in (p.info["cmdline"] or [])]
    assert len([p for p in servers if p.ppid() not in {s.pid for s in servers}]) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the warm process forks, on Linux only")
def test_a_folder_that_is_not_ours_is_not_used(book, runtime, tmp_path):
    solve(book)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(elsewhere, f"{runtime['XDG_RUNTIME_DIR']}/workbook")
    said = book.workbook("check", "1", **runtime)
    assert said.returncode == 0, said.out
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the warm process forks, on Linux only")
def test_the_warm_process_ends_when_it_is_idle(tmp_path):
    code = "import sys; from lib.ranks import forkserver; forkserver.serve(sys.argv[1], [], idle_s=0.1)"
    where = str(tmp_path / "socket")
    started = subprocess.run([sys.executable, "-c", code, where], timeout=60, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert not os.path.exists(where)


# ---- whose fault it is -----------------------------------------------------------------------------------------------


def test_a_fault_of_the_machines_is_not_the_answers(book):
    solve(book)
    path = book.root / "tests/chapter_01/test_toy.py"
    text = path.read_text()
    missing = "from lib.ranks import RankFailure\n        raise RankFailure('mpiexec is missing')"
    path.write_text(text + f"\n\ndef test_halves_on_ranks():\n    if True:\n        {missing}\n")
    row = book.marks("tests/chapter_01")["halves"]
    assert row["state"] == "not checked"
    assert "the book is at fault here, not you" in row["report"]
    assert "mpiexec is missing" in row["report"]
    assert json.dumps(row)
