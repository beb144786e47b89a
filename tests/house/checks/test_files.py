"""A learner's files as they come: other encodings and line ends, a folder or a pipe in a module's place,
a terminal without signs.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from lib.workbook.book.catalog import ROOT
from tests.house.checks.test_checks import DOUBLE, solve


def read(book, code: str):
    """What the one reader of learners' files says; a hang is an error."""
    head = (
        "from lib.workbook.book import sources, stubs\nfrom lib.workbook.book.catalog import chapters\ntoy = "
        "chapters()['toy']\n"
    )
    return book.python(
        f"{head}\ntry:\n    {code}\nexcept sources.SourceError as error:\n    print('refused:', error)"
    ).out.strip()


def test_a_byte_order_mark_and_windows_line_ends_are_read(book):
    solve(book)
    toy = book.mine("toy")
    toy.write_bytes(b"\xef\xbb\xbf" + toy.read_bytes().replace(b"\n", b"\r\n"))
    assert (
        read(book, "text = sources.read_mine(toy); print(text.splitlines()[2], '\\r' in text)") == "LIMIT = 100 False"
    )
    before = toy.read_bytes()
    assert book.workbook("stubs", "--check").returncode == 1
    assert toy.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = 1\nb = 2\n# caf\xe9\n", "lib/toy.py:3: not UTF-8 (byte 0xe9): save the file with the encoding UTF-8"),
        (b"a = 1\r\r\nb = '\xff'\n", "lib/toy.py:3: not UTF-8 (byte 0xff)"),
        ("a = 1\n".encode("utf-16"), "lib/toy.py:1: not UTF-8 (byte 0xff)"),
        ("a = 1\nb\n".encode("utf-16-le"), "lib/toy.py:1: a zero byte, which Python source cannot contain"),
    ],
    ids=["latin-1", "mixed", "utf-16", "utf-16 without a mark"],
)
def test_a_file_that_is_not_utf8_is_named_with_its_line(book, data, said):
    book.mine("toy").write_bytes(data)
    assert read(book, "sources.read_mine(toy)").startswith(f"refused: {said}")
    assert said in book.workbook("progress").out
    assert said in book.workbook("reset", "double").stderr
    assert said in book.workbook("solution", "double", "--diff").stderr
    done = book.workbook("stubs")
    assert f"{said}" in done.out
    assert "left as it is" in done.out
    assert book.mine("toy").read_bytes() == data
    assert book.workbook("reset", "toy", "--yes").returncode == 0
    assert [copy.read_bytes() for copy in (book.root / ".workbook/backups").iterdir()] == [data]
    assert book.workbook("stubs", "--check").returncode == 0


def put(path, what: str) -> str:
    """Something else in a file's place; what a message calls it."""
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link to a pipe":
        os.mkfifo(path.with_suffix(".fifo"))
        path.symlink_to(path.with_suffix(".fifo"))
    else:
        path.symlink_to("/dev/zero")
    return {"folder": "a folder", "device": "a device"}.get(what, "a named pipe")


@pytest.mark.parametrize("what", ["folder", "pipe", "link to a pipe", "device"])
def test_a_folder_or_a_pipe_in_a_modules_place_is_an_error_and_hangs_nothing(book, what):
    said = f"lib/toy.py is {put(book.mine('toy'), what)}, not a file: move it away, then `workbook reset toy`"
    assert read(book, "sources.read_mine(toy)").startswith(f"refused: {said}")
    for command in (
        ["progress"],
        ["reset", "toy", "--yes"],
        ["reset", "double"],
        ["stubs"],
        ["solution", "1", "--diff"],
    ):
        done = book.workbook(*command)
        assert said in done.out, command
        assert "Traceback" not in done.out
    code = (
        "from lib.workbook.tools.lab import documents\nfrom lib.workbook.book.catalog import BookError\ntry:\n "
        "   documents('toy')\nexcept BookError as error:\n    print(error)"
    )
    assert said in book.python(code).stdout
    assert not book.mine("toy").is_file()


def test_a_module_that_may_not_be_read_and_one_that_is_missing(book):
    book.mine("toy").unlink()
    assert (
        read(book, "sources.read_mine(toy)")
        == "refused: lib/toy.py is missing; `workbook reset toy` writes its stubs anew"
    )
    book.mine("toy").symlink_to("toy.py")
    assert read(book, "sources.read_mine(toy)").startswith("refused: lib/toy.py cannot be read: ")


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_resets_keep_line_ends_and_every_other_byte(book, ending):
    solve(book)
    toy = book.mine("toy")
    text = toy.read_text().replace("LIMIT = 100", "LIMIT = 100  # \f\x1c a page's end is no line's")
    before = text.replace("\n", ending).encode()
    toy.write_bytes(before)
    start, end = before.index(b"def double"), before.index(b"class Tally")
    assert book.workbook("reset", "double").returncode == 0
    after = toy.read_bytes()
    assert after.startswith(before[:start])
    assert after.endswith(before[end:])
    assert b"write double" in after
    assert b"\n" not in after.replace(ending.encode(), b"")
    copy = next((book.root / ".workbook/backups").iterdir())
    assert copy.read_bytes() == before
    assert book.workbook("reset", "toy", "--yes").returncode == 0
    assert b"\n" not in toy.read_bytes().replace(ending.encode(), b"")
    assert book.workbook("stubs", "--check").returncode == 0


def test_a_lost_exercise_comes_back_with_what_it_needs(book):
    toy = book.mine("toy")
    reference = book.root / "solutions/toy.py"
    reference.write_text(
        reference.read_text()
        .replace("def halves(x: int)", "Number = int | Fraction\n\n\ndef halves(x: Number)")
        .replace('"""Toys."""', '"""Toys."""\n\nfrom fractions import Fraction')
    )
    assert book.workbook("stubs").returncode == 0
    text = toy.read_text()
    kept = text[: text.index("Number =")].replace("from fractions import Fraction\n", "") + "mine = 1"
    toy.write_text(kept)
    assert book.workbook("reset", "halves").returncode == 0
    assert toy.read_text().startswith(
        f"{kept}\n\n\nfrom fractions import Fraction\nNumber = int | Fraction\n\n\ndef halves"
    )
    assert book.python("import lib.toy; print(lib.toy.mine)", WORKBOOK_WORLD="mine").stdout == "1\n"


# ---- reset, progress, solution ---------------------------------------------------------------------------------------


def test_reset_of_a_chapter_asks_and_says_how_to_restore(book):
    solve(book)
    before = book.mine("toy").read_bytes()
    done = book.workbook("reset", "1")
    assert done.returncode == 2
    assert "this resets all of lib/toy.py; if you want that, add --yes" in done.stderr
    assert book.mine("toy").read_bytes() == before
    done = book.workbook("reset", "1", "--yes")
    command = done.stdout.splitlines()[-1].partition("to get it back: ")[2]
    assert command.startswith("cp .workbook/backups/toy-")
    assert book.run("sh", "-c", command).returncode == 0
    assert book.mine("toy").read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("y", 0)])
def test_reset_of_a_chapter_at_a_terminal(book, answer, status):
    import pty

    solve(book)
    ours, theirs = pty.openpty()
    code = "from lib.workbook.tools.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, "reset", "1"], cwd=book.root, env=book.env, stdin=theirs,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:  # fmt: skip
        os.write(ours, f"{answer}\n".encode())
        said = program.communicate(timeout=60)[0]
    os.close(ours)
    os.close(theirs)
    assert program.returncode == status, said
    assert "Reset all of lib/toy.py?" in said
    assert ("is a stub again" in said) == (status == 0)


def test_reset_of_an_untouched_chapter_does_not_ask(book):
    assert book.workbook("reset", "1").returncode == 0


def test_progress_names_a_syntax_error_and_goes_on(book):
    book.answer("double", "return (x")
    book.answer("quadruple", "return double(double(x))", module="later")
    done = book.workbook("progress", COLUMNS="40")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split(maxsplit=2) == ["1", "Toys", "lib/toy.py:20: SyntaxError: '(' was never closed"]
    assert lines[1].split() == ["2", "Later", "✓", "1", "of", "1"]
    assert "next: fix the file of chapter 1: lib/toy.py:20: SyntaxError: '(' was never closed" in lines


def test_progress_survives_a_damaged_cache(book):
    book.answer("double", DOUBLE)
    (book.root / ".workbook").mkdir()
    (book.root / ".workbook/progress.json").write_text('{"toy": ')
    assert "1 of 3" in book.workbook("progress").stdout


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_solution_is_never_cut(book, columns):
    long = f"return [half, half]  # {'long ' * 60}end"
    book.answer("halves", long)
    for what in ("halves", "1"):
        done = book.workbook("solution", what, "--diff", COLUMNS=columns)
        assert f"-    {long}" in done.stdout.splitlines()
    reference = book.root / "solutions/toy.py"
    reference.write_text(reference.read_text().replace("return [half, half]", long))
    assert f"    {long}" in book.workbook("solution", "halves", COLUMNS=columns).stdout.splitlines()


def test_a_terminal_without_signs(book):
    solve(book)
    book.write("toy", "return [half, half]", "raise ValueError('ü – ✓ → ∞')")
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in (["check", "1"], ["progress"], ["solution", "halves", "--diff"]):
        done = book.workbook(*command, **plain)
        assert "Traceback" not in done.out, command
        assert done.out.isascii()
    assert "+ + x  2 of 3" in book.workbook("progress", **plain).stdout
    assert re.search(r"x +\| 1\.3 halves +\| wrong", book.workbook("check", "1", **plain).stdout)
    assert "? - + -> ?" in book.workbook("solution", "halves", "--diff", **plain).stdout


# ---- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--marks", "--gradescope"])
def test_marks_that_cannot_be_written_are_refused_at_the_start(book, option):
    (book.root / "a file").write_text("")
    os.mkfifo(book.root / "pipe")
    for place, said in (("chapters_of_ada", "is a folder: expected a file, such as chapters_of_ada/marks.json"),
                        ("a file/marks.json", "cannot write into"), ("pipe", "is not a file")):  # fmt: skip
        if place == "chapters_of_ada":
            (book.root / place).mkdir()
        done = book.pytest("tests/chapter_01", option, place)
        assert done.returncode == 4
        assert f"{option} {place}" in done.out
        assert said in done.out
        assert "passed" not in done.out
    assert book.pytest("tests/chapter_01", option, "new/folder/marks.json").returncode == 1
    assert json.loads((book.root / "new/folder/marks.json").read_text())


def test_gradescope_gets_what_its_specification_names(book):
    solve(book)
    book.write("toy", "return [half, half]", "return [half, 0]")
    test = book.root / "tests/chapter_02/test_later.py"
    test.write_text(test.read_text().replace("def test", "@pytest.mark.skip(reason='no device: buy one')\ndef test"))
    test.write_text("import pytest\n" + test.read_text())
    book.pytest("tests", "--gradescope", "results.json")
    made = json.loads((book.root / "results.json").read_text())
    whole = {"score": float, "execution_time": float, "output": str, "output_format": str, "test_output_format": str,
             "test_name_format": str, "visibility": str, "stdout_visibility": str, "extra_data": dict, "tests": list,
             "leaderboard": list}  # fmt: skip
    one = {"score": float, "max_score": float, "status": str, "name": str, "name_format": str, "number": str,
        "output": str,
           "output_format": str, "tags": list, "visibility": str, "extra_data": dict}  # fmt: skip
    formats = {"text", "html", "simple_format", "md", "ansi"}
    assert all(isinstance(value, whole[key]) for key, value in made.items())
    for row in made["tests"]:
        assert all(isinstance(value, one[key]) for key, value in row.items())
        assert row.keys() >= {"score", "max_score", "name", "output"}
        assert {row["output_format"], row["name_format"]} <= formats
        assert row["visibility"] in ("visible", "hidden", "after_due_date", "after_published")
        assert row.get("status", "passed") in ("passed", "failed")
    assert [(r["name"], r["score"], r["max_score"], r.get("status")) for r in made["tests"]] == [
        ("1.1 double", 1, 1, "passed"),
        ("1.2 Tally", 1, 1, "passed"),
        ("1.3 halves", 0, 1, "failed"),
        ("2.1 quadruple", 0, 0, None),
    ]
    assert "value        out[1] = 0, expected 1.5" in made["tests"][2]["output"]
    assert made["tests"][0]["output"] == "passed: 5 checks, lib/toy.py:6"
    assert made["tests"][3]["output"].endswith("1 skipped (no device)")
    book.pytest("tests", "--gradescope", "results.json", "-k", "nothing_is_called_so")
    assert json.loads((book.root / "results.json").read_text())["score"] == 0


# ---- what the pages promise ------------------------------------------------------------------------------------------


def test_the_image_holds_the_pytorch_that_the_book_asks_for():
    import tomllib

    image = (ROOT / ".devcontainer/Dockerfile").read_text()
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["build"]
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch = next(one for one in asked if re.match(r"torch\b", one))
    assert f'"{torch}" --index-url https://download.pytorch.org/whl/cpu' in image
    assert (ROOT / ".devcontainer" / settings["dockerfile"]).is_file()
    assert (ROOT / ".devcontainer" / settings["context"]).resolve() == ROOT
    assert {".git", ".venv", "notebooks", ".workbook"} <= {*(ROOT / ".dockerignore").read_text().split()}


def test_the_command_of_the_page_for_teachers_takes_everything_away():
    page = (ROOT / "chapters/teachers.md").read_text()
    words = shlex.split(next(line for line in page.splitlines() if line.startswith("$ docker run")).removeprefix("$ "))
    image, inside = words.index("workbook"), words[words.index("workbook") + 1 :]
    outside = " ".join(words[:image])
    for part in ("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--pids-limit",
        "--memory ",
                 "--memory-swap", "--user", ":/opt/workbook/lib/rope.py:ro"):  # fmt: skip
        assert part in outside, part
    assert "WORKDIR /opt/workbook" in (ROOT / ".devcontainer/Dockerfile").read_text()
    options = [word for word in inside if word.startswith("--")]
    assert options == ["--marks", "--junitxml", "--gradescope"]
    assert inside[:3] == ["timeout", "1800", "pytest"]


def test_make_clean_keeps_what_learners_write():
    recipe = (ROOT / "Makefile").read_text().partition("\nclean:\n")[2].splitlines()[0].split()
    assert recipe == ["rm", "-rf", ".venv", "_build"]
