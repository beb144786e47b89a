"""Whose code runs: every row of the design's table, and every way in which a learner's file can be broken."""

import sys

import pytest

WHO = """
import sys
from lib.toy import double
from lib.later import quadruple
from lib.workbook.book.sources import provenance
print(*(f"{p[0].parent.name}/{p[0].name}" for p in map(provenance, (double, quadruple))), quadruple(3))
"""


def test_nothing_written_runs_on_the_reference(book):
    assert book.python(WHO).stdout.split() == ["solutions/toy.py", "solutions/later.py", "12"]


def test_the_reference_calls_what_the_learner_wrote(book):
    book.answer("double", "return 10 * x")
    assert book.python(WHO).stdout.split() == ["lib/toy.py", "solutions/later.py", "300"]


def test_siblings_of_one_module_meet(book):
    book.answer("double", "return 10 * x")
    assert book.python("from lib.toy import Tally; print(Tally().add(3))").stdout.split() == ["30"]


def test_helpers_of_the_learner_and_of_the_reference_never_meet(book):
    book.answer("double", "return _times(x)")
    with book.mine("toy").open("a") as file:
        file.write("\n\ndef _times(x):\n    return 7 * x\n\n\n_TWO = 'mine'\n")
    assert (
        book.python(
            "from lib.toy import double, halves, Tally; print(double(1), halves(3), Tally().add(1))"
        ).stdout.strip()
        == "7 [1.5, 1.5] 7"
    )


def test_the_reference_everywhere(book):
    book.answer("double", "return 10 * x")
    out = book.python(
        WHO + "import lib.toy, solutions.toy; print(lib.toy is solutions.toy)", WORKBOOK_WORLD="reference"
    ).stdout
    assert out.split() == ["solutions/toy.py", "solutions/later.py", "12", "True"]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        ("only:later", "solutions/toy.py lib/later.py"),
        ("only:toy", "lib/toy.py solutions/later.py"),
        ("mine", "lib/toy.py lib/later.py"),
    ],
)
def test_worlds_of_checks(book, world, expected):
    code = WHO.replace(", quadruple(3))", ")")
    assert book.python(code, WORKBOOK_WORLD=world).stdout.strip() == expected


def test_one_process_changes_worlds_and_keeps_each(book):
    book.answer("double", "return 10 * x")
    book.answer("quadruple", "return double(x) + 1", module="later")
    code = """
from lib.workbook.book import resolve
for world in ("only:toy", "only:later", "mine", "reference", "fallback", "only:toy"):
    resolve.enter(world)
    from lib.toy import double
    from lib.later import quadruple
    import lib, lib.toy, sys
    assert lib.toy is sys.modules["lib.toy"] and lib.toy.double is double
    try:
        print(world, double(1), quadruple(1))
    except NotImplementedError:
        print(world, "stub")
"""
    lines = book.python(code).stdout.splitlines()
    assert lines == [
        "only:toy 10 4",
        "only:later 2 3",
        "mine 10 11",
        "reference 2 4",
        "fallback 10 11",
        "only:toy 10 4",
    ]


def test_an_unknown_world_is_named(book):
    done = book.python("import lib", WORKBOOK_WORLD="sometimes")
    assert "'sometimes'" in done.stderr
    assert "only:<module>" in done.stderr


def test_worlds_hold_in_spawned_processes(book):
    book.answer("double", "return 10 * x")
    book.answer("quadruple", "return double(x) + 1", module="later")
    (book.root / "spawned.py").write_text(
        "import multiprocessing\n"
        "def work(x):\n"
        "    from lib.later import quadruple\n"
        "    return quadruple(x)\n"
        "if __name__ == '__main__':\n"
        "    from lib.workbook.book import resolve\n"
        "    for world in ('only:later', 'mine', 'reference'):\n"
        "        resolve.enter(world)\n"
        "        with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "            print(pool.apply(work, (1,)))\n"
    )
    assert book.run(sys.executable, "spawned.py").stdout.split() == ["3", "11", "4"]


def test_worlds_hold_under_mpiexec(book):
    from pathlib import Path

    mpiexec = Path(sys.executable).with_name("mpiexec")
    book.answer("double", "return 10 * x")
    code = (
        "import sys; from mpi4py import MPI; from lib.later import "
        "quadruple\nsys.stdout.write(f'{MPI.COMM_WORLD.rank} {quadruple(1)}\\n')"
    )
    done = book.run(str(mpiexec), "-n", "2", sys.executable, "-c", code)
    assert sorted(done.stdout.splitlines()) == ["0 100", "1 100"]
    done = book.run(str(mpiexec), "-n", "2", sys.executable, "-c", code, WORKBOOK_WORLD="reference")
    assert sorted(done.stdout.splitlines()) == ["0 4", "1 4"]


def test_classes_of_a_world_can_be_pickled(book):
    book.answer("Tally.add", "self.n += x; return self.n")
    book.answer("Tally.clear", "self.n = 0")
    code = "import pickle; from lib.toy import Tally; print(type(pickle.loads(pickle.dumps(Tally(3)))) is Tally)"
    for world in ("fallback", "only:toy", "reference"):
        assert book.python(code, WORKBOOK_WORLD=world).stdout.strip() == "True"


# ---- what can be wrong with a learner's file -------------------------------------------------------------------------


def test_a_syntax_error_fails_its_own_chapter_with_the_line(book):
    book.answer("double", "return (x")
    book.answer("quadruple", "return double(double(x))", module="later")
    marks = book.marks("tests")
    assert marks["quadruple"]["state"] == "passed"
    assert marks["double"]["state"] == "wrong"
    assert "lib/toy.py:20: SyntaxError" in marks["double"]["report"]
    done = book.python(WHO)
    assert done.stdout.split() == ["solutions/toy.py", "lib/later.py", "12"]
    assert "lib/toy.py:20: SyntaxError" in done.stderr
    assert "the reference replaces all of lib.toy" in done.stderr


def test_an_error_at_import_is_named_with_its_line(book):
    book.write("toy", "LIMIT = 100", "LIMIT = 100 / 0")
    assert "lib/toy.py:3: ZeroDivisionError: division by zero" in book.marks("tests/chapter_01")["double"]["report"]
    assert book.python(WHO).stdout.split()[-1] == "12"


def test_a_missing_module_is_named(book):
    book.mine("toy").unlink()
    assert "lib/toy.py is missing; `workbook reset toy`" in book.marks("tests/chapter_01")["double"]["report"]
    assert book.python(WHO).stdout.split() == ["solutions/toy.py", "solutions/later.py", "12"]


def test_a_missing_name_is_named(book):
    book.write("toy", "def double(", "def dubble(")
    report = book.marks("tests/chapter_01")["double"]["report"]
    assert "lib/toy.py has no double; `workbook reset double`" in report
    assert book.python(WHO).stdout.split()[-1] == "12"


def test_a_name_that_is_not_callable_is_named(book):
    with book.mine("toy").open("a") as file:
        file.write("\n\ndouble = 3\n")
    assert "double is 3, not a function or a class" in book.marks("tests/chapter_01")["double"]["report"]
    assert book.python(WHO).stdout.split()[-1] == "12"


@pytest.mark.parametrize(
    "answer",
    [
        "from solutions.toy import double as d; return d(x)",
        "import solutions.toy; return solutions.toy.double(x)",
        "import importlib; return importlib.import_module('solutions.toy').double(x)",
    ],
)
def test_a_check_never_grades_the_answer_key(book, answer):
    book.answer("double", answer)
    row = book.marks("tests/chapter_01")["double"]
    assert row["state"] == "wrong"
    assert "lib/toy.py:20: opens solutions/toy.py, the answer key of this chapter" in row["report"]


@pytest.mark.parametrize(
    "way",
    [
        "space = {}; exec(open('solutions/toy.py').read(), space); return space['double'](x)",
        "import importlib; return importlib.import_module('solu' + 'tions.to' + 'y').double(x)",
        "import os; os.symlink('solutions', 'elsewhere'); exec(open('elsewhere/toy.py').read()); return double(x)",
        "import os; os.symlink('solutions/toy.py', 'mine.py'); exec(open('mine.py').read()); return double(x)",
        "import pathlib; exec(pathlib.Path('solutions', 'toy.py').read_text(), globals()); return double(x)",
        "import os; os.environ['WORKBOOK_WORLD'] = 'reference'; import solutions.toy; return solutions.toy.double(x)",
        "import subprocess; exec(subprocess.check_output(['cat', 'solutions/toy.py']), globals()); return double(x)",
        "import subprocess; exec(subprocess.check_output('git show HEAD:solutions/toy.py', shell=True)); "
        "return double(x)",
        "import os; os.link('solutions/toy.py', 'mine.py'); exec(open('mine.py').read()); return double(x)",
        "import os; os.chdir('solutions'); exec(open('toy.py').read()); return double(x)",
        "from importlib.machinery import SourceFileLoader as S; return S('t', "
        "'solutions/toy.py').load_module().double(x)",
    ],
)
def test_the_answer_key_is_out_of_reach_by_any_road(book, way):
    book.answer("double", way)
    row = book.marks("tests/chapter_01")["double"]
    assert (row["state"], row["passed"]) == ("wrong", 0)
    assert "lib/toy.py:20: opens solutions/toy.py, the answer key of this chapter" in row["report"]


def test_a_link_that_was_there_before_leads_nowhere(book):
    (book.root / "mine.py").hardlink_to(book.root / "solutions/toy.py")
    book.answer("double", "space = {}; exec(open('mine.py').read(), space); return space['double'](x)")
    assert "the answer key of this chapter" in book.marks("tests/chapter_01")["double"]["report"]


def test_the_answer_key_is_not_found_imported(book):
    book.answer("double", "import sys; return sys.modules['solutions.toy'].double(x)")
    report = book.marks("tests/chapter_01", "tests/chapter_02")["double"]["report"]
    assert "raised KeyError: 'solutions.toy'" in report


def test_the_answer_key_is_out_of_reach_of_a_lambda(book):
    with book.mine("toy").open("a") as file:
        file.write("\n\ndouble = lambda x: __import__('solutions.toy').toy.double(x)\n")
    assert "the answer key of this chapter" in book.marks("tests/chapter_01")["double"]["report"]


def test_a_switched_world_changes_nothing(book):
    code = (
        "import os; os.environ['WORKBOOK_WORLD'] = 'reference'; from lib.workbook.book import resolve; resolve.sync()"
    )
    book.answer("double", f"{code}; from lib.toy import double as d; return d(x) if d.__module__ != 'lib.toy' else 17")
    assert book.marks("tests/chapter_01")["double"]["state"] == "wrong"


def test_a_string_that_names_the_answer_key_is_no_crime(book):
    book.answer(
        "double",
        "name = 'solutions.toy'\n    if x > LIMIT:\n        raise ValueError(f'at most {LIMIT}, "
        "got {x}')\n    return 2 * x",
    )
    assert book.marks("tests/chapter_01")["double"]["state"] == "passed"


def test_a_renamed_argument_is_named(book):
    text = book.mine("toy").read_text().replace("def double(x", "def double(number").replace("halves(x", "halves(y")
    book.mine("toy").write_text(text)
    marks = book.marks("tests/chapter_01")
    assert (
        "lib/toy.py: double(number) should be double(x): other chapters call it by these names"
        in marks["double"]["report"]
    )


def test_other_chapters_are_the_references_unless_mine(book):
    book.answer("double", "return 7 * x")
    book.answer("quadruple", "return double(double(x))", module="later")
    assert book.marks("tests/chapter_02")["quadruple"]["state"] == "passed"
    row = book.marks("tests/chapter_02", "--mine")["quadruple"]
    assert row["state"] == "wrong"
    assert "147" in row["report"]


# ---- a running kernel ------------------------------------------------------------------------------------------------

KERNEL = """
import os, time
from lib.later import quadruple
import lib.toy, lib.later
from lib.toy import double
from lib.workbook.book import resolve

space = {"quadruple": quadruple, "double": double, "other": 1}
path = "lib/toy.py"

def edit(old, new):
    text = open(path).read()
    assert old in text
    open(path, "w").write(text.replace(old, new))
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    print(resolve.refresh(space), space["double"](1), space["quadruple"](1), lib.later.quadruple(1))

stub = 'raise NotImplementedError("Exercise 1.1: write double")'
print(resolve.refresh(space), space["double"](1))
edit(stub, "return 10 * x")
edit("return 10 * x", "return (x")
edit("return (x", "return helper(x)\\n\\ndef helper(x):\\n    return 5 * x")
edit("return helper(x)", stub)
"""


def test_a_running_kernel_sees_edits_in_every_chapter(book):
    done = book.python(KERNEL)
    assert done.stdout.splitlines() == [
        "[] 2",
        "['toy'] 10 100 100",
        "['toy'] 2 4 4",
        "['toy'] 5 25 25",
        "['toy'] 2 4 4",
    ], done.stderr


def test_ipython_picks_up_edits_also_with_autoreload(book):
    (book.root / "session.ipy").write_text("")
    code = """
from IPython.testing.globalipapp import start_ipython
import os, time
shell = start_ipython()
shell.run_cell("%load_ext autoreload\\n%autoreload 2")
shell.run_cell("from lib.toy import double\\nfrom lib.later import quadruple")
shell.run_cell("print(double(1), quadruple(1))")
text = open("lib/toy.py").read()
stub = 'raise NotImplementedError("Exercise 1.1: write double")'
open("lib/toy.py", "w").write(text.replace(stub, "import math; return math.floor(10 * x)"))
os.utime("lib/toy.py", ns=(time.time_ns(), time.time_ns()))
shell.run_cell("print(double(1), quadruple(1))")
import solutions.toy
print(solutions.toy.double(1))
"""
    done = book.python(code)
    assert done.stdout.split() == ["2", "4", "10", "100", "2"], done.out
