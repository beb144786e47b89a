"""``workbook update`` on a toy book of two versions: what is the learner's stays, what is the book's moves,
whatever happens between.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.conftest import TOYS, Book

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git: apt install git"),
]
DOUBLE = 'if x > LIMIT:\n        raise ValueError(f"at most {LIMIT}, got {x}")\n    return 2 * x  # ü'
PAGE = (TOYS / "toy/chapters/01_toy.md").read_text()
TRIPLE = '''

def triple(x: int) -> float:
    """Thrice a number. (Exercise)

    Size: 5 minutes, difficulty 1, core.
    """
    ### BEGIN SOLUTION
    return float(math.fsum([x] * OFTEN))
    ### END SOLUTION
'''


class Versions:
    """An author's checkout, the bare repository that it is pushed to, and a learner's clone of that."""

    def __init__(self, folder: Path):
        self.author, self.upstream, self.book = Book(folder / "author"), folder / "upstream.git", Book(folder / "mine")

    @classmethod
    def make(cls, folder: Path, template: Path) -> "Versions":
        """The author has two versions and has published the first."""
        made = cls(folder)
        shutil.copytree(template, made.author.root)
        (made.author.root / ".gitignore").write_text(".workbook/\nnotebooks/\n__pycache__/\n")
        pages = made.author.root / "chapters"
        (pages / "02_later.md").write_text("# Later\n")
        subprocess.run(["git", "init", "-q", "--bare", "-b", "main", made.upstream], check=True)
        made.git(made.author, "init", "-q", "-b", "main")
        made.git(made.author, "remote", "add", "origin", str(made.upstream))
        made.publish("one")
        subprocess.run(["git", "clone", "-q", made.upstream, made.book.root], check=True)
        (made.book.root / "notebooks").mkdir()
        (made.book.root / "notebooks/01_toy.ipynb").write_text("{mine}")
        (made.book.root / "notes.md").write_text("mine")
        made.write_second()
        made.commit("two")
        return made

    @classmethod
    def copy(cls, folder: Path, template: "Versions") -> "Versions":
        shutil.copytree(template.author.root.parent, folder, symlinks=True, dirs_exist_ok=True)
        made = cls(folder)
        for book in (made.author, made.book):
            made.git(book, "remote", "set-url", "origin", str(made.upstream))
        return made

    def git(self, book: Book, *arguments: str) -> str:
        person = {f"GIT_{role}_{what}": "a@b.example" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = book.run("git", *arguments, **person, GIT_CONFIG_GLOBAL="/dev/null")
        assert done.returncode == 0, done.out
        return done.stdout.strip()

    def commit(self, message: str) -> None:
        done = self.author.workbook("stubs")
        assert done.returncode == 0, done.out
        self.git(self.author, "add", "-A")
        self.git(self.author, "commit", "-q", "-m", message)

    def publish(self, message: str) -> None:
        self.commit(message)
        self.git(self.author, "push", "-q", "-u", "origin", "main")

    def publish_second(self) -> None:
        self.git(self.author, "push", "-q", "origin", "main")

    def write_second(self) -> None:
        """A contract changed, an exercise new, one gone, a given constant new; a page changed, one gone, one new."""
        toy = self.author.root / "solutions/toy.py"
        text = toy.read_text().replace("x: Any number.", "x: A whole number, at most ``LIMIT``.")
        text = text.replace('"""Toys."""\n', '"""Toys."""\n\nimport math\n').replace(
            "LIMIT = 100", "LIMIT = 100\nOFTEN = 3"
        )
        text = text[: text.index("\n\ndef halves")] + TRIPLE
        toy.write_text(text)
        tests = self.author.root / "tests/chapter_01/test_toy.py"
        tests.write_text(tests.read_text()[: tests.read_text().index("@pytest.mark.memory_limit")]
                         + "def test_triple():\n    expect_equal(toy.triple(3), 9.0)\n")  # fmt: skip
        pages = self.author.root / "chapters"
        (pages / "01_toy.md").write_text(f"{PAGE}\nAgain.\n")
        (pages / "02_later.md").unlink()
        (pages / "new").mkdir()
        (pages / "new" / "a page.md").write_text("# Nouveauté\n")
        later = self.author.root / "solutions/later.py"
        later.write_text(later.read_text().replace("(Exercise)", "(Exercise)\n\n    Say it with ``double``.\n    "))

    def is_second(self) -> None:
        """The book's files are the new ones, and git finds nothing else than the learner's changes."""
        for path in (
            "chapters/01_toy.md",
            "chapters/new/a page.md",
            "solutions/toy.py",
            "lib/workbook/book/stubs.json",
        ):
            assert (self.book.root / path).read_bytes() == (self.author.root / path).read_bytes()
        assert not (self.book.root / "chapters/02_later.md").exists()
        assert (self.book.root / "notebooks/01_toy.ipynb").read_text() == "{mine}"
        assert (self.book.root / "notes.md").read_text() == "mine"
        assert not (self.book.root / ".workbook/update.json").exists()

    def changed(self) -> list[str]:
        return sorted(row.strip() for row in self.git(self.book, "status", "--porcelain").splitlines())


@pytest.fixture(scope="module")
def versions_template(toy_template, tmp_path_factory):
    return Versions.make(tmp_path_factory.mktemp("versions") / "all", toy_template)


@pytest.fixture
def versions(versions_template, tmp_path):
    return Versions.copy(tmp_path, versions_template)


def update(versions, *arguments, status=0, **env):
    done = versions.book.workbook("update", *arguments, GIT_CONFIG_GLOBAL="/dev/null", **env)
    assert done.returncode == status, done.out
    assert "Traceback" not in done.out
    return done.out


def test_a_book_that_nobody_began_becomes_the_new_one(versions):
    assert "the book is up to date" in update(versions)
    versions.publish_second()
    out = update(versions)
    assert "origin/main: 1 new commit, " in out
    assert "lib/toy.py: updated to the new stubs" in out
    versions.is_second()
    assert versions.changed() == ["?? notes.md"]
    assert versions.git(versions.book, "rev-parse", "HEAD") == versions.git(versions.author, "rev-parse", "HEAD")
    assert "the book is up to date" in update(versions)


def test_what_was_begun_stays_and_what_changed_is_said(versions):
    versions.book.answer("double", DOUBLE)
    versions.book.answer("halves", "return [half, half]")
    before = versions.book.mine("toy").read_bytes()
    versions.publish_second()
    out = update(versions)
    versions.is_second()
    now = versions.book.mine("toy").read_bytes()
    assert now.startswith(before)
    copies = list((versions.book.root / ".workbook/backups").iterdir())
    assert [copy.read_bytes() for copy in copies] == [before]
    assert copies[0].name in out
    assert re.search(
        r"lib/toy.py: double: its contract has changed since you wrote it.*\n"
        r"    -         x: Any number\.\n    \+         x: A whole number, at most ``LIMIT``\.", out
    )  # fmt: skip
    assert "lib/toy.py: halves is no longer an exercise; your code stays" in out
    assert "lib/toy.py: triple is a new exercise; its stub is at the end of the file" in out
    assert "lib/later.py: updated to the new stubs" in out
    assert versions.changed() == ["?? notes.md", "M lib/toy.py"]
    marks = versions.book.marks("tests/chapter_01")
    assert (marks["double"]["state"], marks["triple"]["state"]) == ("passed", "not started")
    versions.book.answer("triple", "return math.fsum([x] * 3)")
    assert versions.book.marks("tests/chapter_01")["triple"]["state"] == "passed"


def test_an_exercise_that_was_not_written_says_how_to_get_the_new_stub(versions):
    versions.book.answer("halves", "return [half, half]")
    versions.publish_second()
    out = update(versions)
    assert "lib/toy.py: double: still the old stub; run `workbook reset double` for the new one" in out
    assert versions.book.workbook("reset", "double").returncode == 0
    assert "A whole number" in versions.book.mine("toy").read_text()


def test_windows_line_ends_and_a_byte_order_mark_stay(versions):
    versions.book.answer("double", DOUBLE)
    toy, later = versions.book.mine("toy"), versions.book.mine("later")
    begun = b"\xef\xbb\xbf" + toy.read_bytes().replace(b"\n", b"\r\n")
    toy.write_bytes(begun)
    later.write_bytes(later.read_bytes().replace(b"\n", b"\r\n"))
    versions.publish_second()
    out = update(versions)
    assert toy.read_bytes().startswith(begun)
    assert b"\n" not in toy.read_bytes().replace(b"\r\n", b"")
    assert "lib/later.py: updated to the new stubs" in out
    new = (versions.author.root / "lib/later.py").read_bytes()
    assert later.read_bytes() == new.replace(b"\n", b"\r\n")


def test_a_module_that_is_no_python_or_no_utf8_stays_and_is_named(versions):
    versions.book.answer("double", "return (x")
    versions.publish_second()
    toy = versions.book.mine("toy").read_bytes()
    out = update(versions)
    assert versions.book.mine("toy").read_bytes() == toy
    assert "lib/toy.py:20: '(' was never closed; your file stays as it is" in out
    assert "triple is new; fix that line, then run `workbook reset triple` to add its stub" in out
    versions.is_second()


def test_committed_answers_are_joined_with_the_new_version(versions):
    versions.book.answer("double", DOUBLE)
    versions.git(versions.book, "add", "-A")
    versions.git(versions.book, "commit", "-q", "-m", "chapter 1")
    mine = versions.git(versions.book, "rev-parse", "HEAD")
    versions.book.write("toy", "return 2 * x", "return x + x")
    before = versions.book.mine("toy").read_bytes()
    versions.publish_second()
    update(versions)
    versions.is_second()
    assert versions.book.mine("toy").read_bytes().startswith(before)
    parents = versions.git(versions.book, "rev-parse", "HEAD^1", "HEAD^2").split()
    assert parents == [mine, versions.git(versions.author, "rev-parse", "HEAD")]
    assert versions.git(versions.book, "log", "-1", "--format=%an") == "a@b.example"
    assert "return 2 * x" in versions.git(versions.book, "show", "HEAD:lib/toy.py")
    assert "Again." in versions.git(versions.book, "show", "HEAD:chapters/01_toy.md")
    assert versions.changed() == ["M lib/toy.py"]
    assert "the book is up to date" in update(versions)


def test_what_was_staged_stays_staged(versions):
    versions.book.answer("double", DOUBLE)
    (versions.book.root / "mine.txt").write_text("mine")
    versions.git(versions.book, "add", "lib/toy.py", "mine.txt")
    versions.book.write("toy", "return 2 * x", "return x + x")
    versions.publish_second()
    update(versions)
    assert "return 2 * x" in versions.git(versions.book, "show", ":lib/toy.py")
    assert "A  mine.txt" in versions.changed()
    copies = [copy.read_text() for copy in (versions.book.root / ".workbook/backups").glob("toy-staged-*")]
    assert ["return 2 * x" in copy for copy in copies] == [True]


def snapshot(book: Book) -> dict[str, bytes]:
    kept = [path for path in sorted(book.root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {
        str(p.relative_to(book.root)): p.read_bytes()
        for p in kept
        if ".git" not in p.parts and ".workbook" not in p.parts
    }


@pytest.mark.parametrize("how", ["edited", "staged", "committed", "untracked", "ignored"])
def test_what_both_changed_is_refused_and_nothing_is_touched(versions, how):
    path = "chapters/new/a page.md" if how in ("untracked", "ignored") else "chapters/01_toy.md"
    place = versions.book.root / path
    place.parent.mkdir(exist_ok=True)
    if how == "ignored":
        (versions.book.root / ".git/info/exclude").write_text("*.md\n")
    place.write_text("mine\n")
    if how in ("staged", "committed"):
        versions.git(versions.book, "add", path)
    if how == "staged":
        place.write_text(PAGE)
    if how == "committed":
        versions.git(versions.book, "commit", "-q", "-m", "mine")
    versions.book.answer("double", DOUBLE)
    versions.publish_second()
    before, commit = snapshot(versions.book), versions.git(versions.book, "rev-parse", "HEAD")
    out = update(versions, status=2)
    assert path in out
    assert "No file has changed" in out
    assert {"edited": "git stash push -- chapters/01_toy.md", "committed": "git merge origin/main"}.get(how, "") in out
    assert snapshot(versions.book) == before
    assert versions.git(versions.book, "rev-parse", "HEAD") == commit


def test_the_advice_of_the_refusal_works(versions):
    (versions.book.root / "chapters/01_toy.md").write_text(f"{PAGE}\nmine\n")
    versions.book.answer("double", DOUBLE)
    versions.publish_second()
    update(versions, status=2)
    versions.git(versions.book, "stash", "push", "-q", "--", "chapters/01_toy.md")
    update(versions)
    versions.is_second()
    assert "return 2 * x" in versions.book.mine("toy").read_text()
    assert "mine" in versions.git(versions.book, "stash", "show", "-p")


def test_an_edit_that_the_new_version_does_not_touch_stays(versions):
    page = versions.book.root / "tests/chapter_02/mistakes.py"
    page.write_text(page.read_text() + "# mine\n")
    versions.publish_second()
    update(versions)
    versions.is_second()
    assert page.read_text().endswith("# mine\n")


KILLED = """
import os, shutil, sys
from lib.workbook.tools import git as gits, update

n_left = [0]
def counted(call):
    def counting(*arguments, **options):
        n_left[0] -= 1
        if n_left[0] == 0:
            os._exit(9)
        return call(*arguments, **options)
    return counting
os.replace = counted(os.replace)
update.git = gits.git = counted(gits.git)

def run(n):
    pid = os.fork()
    if pid == 0:
        n_left[0] = n
        update.update(say=lambda line: None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root, spare, first = sys.argv[1:]
for n in range(int(first), 300, 4):
    if run(n) == 0:
        print("points", n)
        break
    assert open("lib/toy.py").read().startswith(open(f"{spare}/lib/toy.py").read())
    assert run(0) == 0, n
    shutil.copytree(root, f"{spare}-{n}", symlinks=True)
    shutil.rmtree(root)
    shutil.copytree(spare, root, symlinks=True)
    os.chdir(root)
"""


@pytest.mark.parametrize("commits", [False, True])
def test_an_update_that_is_killed_anywhere_can_be_run_again(versions, tmp_path, commits):
    versions.book.answer("double", DOUBLE)
    if commits:
        versions.git(versions.book, "commit", "-q", "-a", "-m", "mine")
    versions.publish_second()
    spare = tmp_path / "spare"
    shutil.copytree(versions.book.root, spare)
    argv = [str(versions.book.root), str(spare), str(1 + commits)]
    done = versions.book.python(f"import sys; sys.argv[1:] = {argv!r}\n{KILLED}", GIT_CONFIG_GLOBAL="/dev/null")
    assert done.returncode == 0, done.out
    assert int(re.search(r"points (\d+)", done.out)[1]) > 20
    whole = snapshot(versions.book)
    versions.is_second()
    folders = list(tmp_path.glob("spare-*"))
    assert len(folders) > 5
    for folder in folders:
        again = Book(folder)
        assert snapshot(again) == whole, folder
        versions.book = again
        assert [row for row in versions.changed() if "notes.md" not in row] == ["M lib/toy.py"], folder
        versions.is_second()


def test_what_is_edited_after_an_interruption_is_kept(versions):
    versions.publish_second()
    code = "import os, lib.workbook.tools.update as u\nu._finish = lambda *_: os._exit(9)\nu.update()"
    assert versions.book.python(code, GIT_CONFIG_GLOBAL="/dev/null").returncode == 9
    (versions.book.root / "chapters/01_toy.md").write_text("mine")
    versions.book.answer("double", DOUBLE)
    out = update(versions)
    assert "was interrupted" in out
    versions.is_second()
    kept = [path.read_text() for path in (versions.book.root / ".workbook/backups").glob("01_toy-*.md")]
    assert kept == ["mine"]
    assert "return 2 * x" in versions.book.mine("toy").read_text()


def test_a_commit_after_an_interruption_starts_anew(versions):
    versions.publish_second()
    code = "import os, lib.workbook.tools.update as u\nu._finish = lambda *_: os._exit(9)\nu.update()"
    assert versions.book.python(code, GIT_CONFIG_GLOBAL="/dev/null").returncode == 9
    versions.git(versions.book, "add", "notes.md")
    versions.git(versions.book, "commit", "-q", "-m", "notes")
    (versions.author.root / "chapters/01_toy.md").write_text(f"{PAGE}\nA third time.\n")
    versions.publish("three")
    update(versions)
    versions.is_second()
    assert versions.changed() == []


def test_faults_are_one_line(versions, tmp_path):
    versions.publish_second()
    versions.git(versions.book, "remote", "set-url", "origin", str(tmp_path / "nowhere.git"))
    out = update(versions, status=2)
    assert out.startswith("workbook: could not fetch origin/main: '")
    assert "No file has changed; try again when `git fetch origin` works" in out
    assert "expected REMOTE/BRANCH; this copy knows origin" in update(versions, "--from", "elsewhere/main", status=2)
    versions.git(versions.book, "remote", "add", "school", str(versions.upstream))
    assert "1 new commit" in update(versions, "--from", "school/main")
    versions.git(versions.book, "checkout", "-q", "-b", "mine")
    assert "this branch follows no other; name one with --from" in update(versions, status=2)
    (versions.book.root / ".git/MERGE_HEAD").write_text(versions.git(versions.book, "rev-parse", "HEAD"))
    assert "a merge or a rebase is unfinished" in update(versions, status=2)
    shutil.rmtree(versions.book.root / ".git")
    assert "this copy of the book cannot be updated by git: " in update(versions, status=2)
    assert "git is not installed" in update(versions, status=2, PATH="/nowhere")


def test_two_updates_at_once(versions):
    import fcntl

    (versions.book.root / ".workbook").mkdir()
    with open(versions.book.root / ".workbook/update.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another update of this copy is running" in update(versions, status=2)


def test_a_folder_or_a_pipe_in_a_modules_place_stays(versions):
    versions.book.mine("toy").unlink()
    os.mkfifo(versions.book.mine("toy"))
    versions.publish_second()
    assert "lib/toy.py is not a file: move it away, then run `workbook reset toy`" in update(versions)
    versions.is_second()


def test_a_new_chapter_and_one_that_is_gone(versions):
    versions.book.answer("quadruple", "return 4 * x", module="later")
    (versions.author.root / "solutions/later.py").rename(versions.author.root / "solutions/last.py")
    book = versions.author.root / "book.yml"
    book.write_text(book.read_text().replace("02_later", "02_last"))
    versions.author.mine("later").unlink()
    versions.publish("two")
    out = update(versions)
    assert "lib/last.py is new" in out
    assert "lib/later.py: the book no longer has this module; yours stays" in out
    assert "return 4 * x" in versions.book.mine("later").read_text()
    assert sys.platform == "win32" or "quadruple" in versions.book.mine("last").read_text()
