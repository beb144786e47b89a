"""``workbook update``: bring the book up to date without losing a byte of the learner's work.

The learner owns every ``lib/<module>.py`` that they have begun, and every file that the new version does not change.
All other files move to the new version one by one, each in a single step.
Before the first file moves, the update looks for conflicts and refuses to start if there are any,
copies the modules that were begun, and writes a journal.
If the update is killed, the next run reads the journal and continues.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.workbook.book import sources, stubs
from lib.workbook.book.catalog import ROOT, BookError
from lib.workbook.book.sources import SourceError
from lib.workbook.tools.git import GitError, at_work, git, line, staged, text, tree
from lib.workbook.tools.renewal import mine_of, renew_begun

FOLDER = ROOT / ".workbook"
JOURNAL = FOLDER / "update.json"
STAGING = FOLDER / "update"
UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The commits that an update goes from and to.

    Attributes:
        head: The checkout's commit when the update began.
        base: The newest commit that the book and the learner share; this is ``head`` if the learner committed nothing.
        target: The book's newest commit.
        new: The checkout's commit after the update: ``target``, or a merge of ``head`` and ``target``.
    """

    head: str
    base: str
    target: str
    new: str


def update(source: str | None = None, say: Say = print) -> None:
    """Bring the book up to date.

    Args:
        source: ``REMOTE/BRANCH``; by default the branch that the current one follows.
        say: Called with each line of the report.

    Raises:
        BookError: git or the network is missing, or there is a conflict; no file has changed then, and the message
            says what to do.
    """
    _check_checkout()
    with _alone():
        plan = _journal()
        if plan is not None and line("rev-parse", "HEAD") in (plan.head, plan.new):
            say(f"finishing the update to {plan.target[:9]}, which was interrupted")
        else:
            plan = _planned(source, say)
        if plan is None:
            say("the book is up to date")
            return
        try:
            _carry_out(plan, say)
        except OSError as error:
            raise BookError(
                f"the update stopped: {error}. None of your work is lost; fix this, "
                "then run `workbook update` again to finish"
            ) from None


def _check_checkout() -> None:
    try:
        top = Path(line("rev-parse", "--show-toplevel")).resolve()
        line("rev-parse", "--verify", "HEAD")
    except GitError as error:
        raise BookError(f"this copy of the book cannot be updated by git: {error}") from None
    if top != ROOT.resolve():
        raise BookError(f"this copy of the book was not cloned with git: {ROOT} is a folder of {top}")
    folder = Path(ROOT, line("rev-parse", "--git-dir"))
    if found := [name for name in UNFINISHED if (folder / name).exists()]:
        raise BookError(f"a merge or a rebase is unfinished ({found[0]}): finish or abort it with git first")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock, so that two updates cannot run at once."""
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / "update.lock", "w") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BookError("another update of this copy is running") from None
        yield


def _journal() -> Plan | None:
    """The plan of an update that was killed; None if there is none."""
    try:
        return Plan(**json.loads(JOURNAL.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(source: str | None, say: Say) -> Plan | None:
    """Fetch the new version and look for conflicts; None if the book is up to date."""
    name, remote, branch = _upstream(source)
    try:
        git("fetch", "--quiet", remote, f"refs/heads/{branch}")
    except GitError as error:
        raise BookError(
            f"could not fetch {name}: {error}. No file has changed; try again when `git fetch {remote}` works"
        ) from None
    head, target = line("rev-parse", "HEAD"), line("rev-parse", "FETCH_HEAD")
    base = line("merge-base", head, target, default="")
    if not base:
        raise BookError(f"{name} and this copy have no commit in common: is it another book?")
    if base == target:
        return None
    _refuse_what_is_in_the_way(head, base, target, name)
    n = line("rev-list", "--count", f"{head}..{target}")
    say(f"{name}: {n} new commit{'s' if n != '1' else ''}, {head[:9]} to {target[:9]}")
    new = target if base == head else _joined(head, base, target)
    return Plan(head=head, base=base, target=target, new=new)


def _upstream(source: str | None) -> tuple[str, str, str]:
    """Name, remote and branch to update from."""
    remotes = line("remote").split()
    if source is None:
        branch = line("symbolic-ref", "--short", "HEAD", default="")
        remote = line("config", f"branch.{branch}.remote", default="") if branch else ""
        merge = line("config", f"branch.{branch}.merge", default="") if branch else ""
        if remote not in remotes or not merge:
            example = f"{remotes[0] if remotes else 'origin'}/main"
            raise BookError(f"this branch follows no other; name one with --from, for example --from {example}")
        merge = merge.removeprefix("refs/heads/")
        return f"{remote}/{merge}", remote, merge
    found = [remote for remote in remotes if source.startswith(f"{remote}/") and source != f"{remote}/"]
    if not found:
        known = f"this copy knows {', '.join(remotes)}" if remotes else "git remote add origin URL makes one"
        raise BookError(f"--from {source}: expected REMOTE/BRANCH; {known}")
    remote = max(found, key=len)
    return source, remote, source.removeprefix(f"{remote}/")


def modules(*commits: str) -> list[str]:
    """The names of the modules that learners write, in any of these versions."""
    found = {Path(path).stem for c in commits for path in tree(c) if re.fullmatch(r"solutions/[a-z]\w*\.py", path)}
    return sorted(name for name in found if any(f"lib/{name}.py" in tree(c) for c in commits))


def _own(*commits: str) -> set[str]:
    return {f"lib/{name}.py" for name in modules(*commits)}


def _changed(old: str, new: str) -> list[str]:
    """The paths that differ between two commits."""
    before, after = tree(old), tree(new)
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _refuse_what_is_in_the_way(head: str, base: str, target: str, name: str) -> None:
    """Raise if the new version changes files that the learner changed too; the learner's modules do not count."""
    moving = [path for path in _changed(base, target) if path not in _own(base, target)]
    blob = {commit: {path: entry[1] for path, entry in tree(commit).items()} for commit in (head, base, target)}
    committed = [path for path in moving if blob[head].get(path) not in (blob[base].get(path), blob[target].get(path))]
    if committed:
        raise BookError(
            f"your commits and the new version both change {_listed(committed)}. No file has changed. Merge by hand: "
            f"git stash, git merge {name}, git stash pop"
        )
    # An update that was killed before the learner committed something may have left its files there.
    left = _journal()
    after = tree(left.new) if left else {}
    expected = {
        path: ("", blob[head].get(path, ""), blob[target].get(path, ""), after.get(path, ("", ""))[1])
        for path in moving
    }
    found, in_index = at_work(moving), staged()
    edited = [path for path in moving if found[path] not in expected[path]]
    edited += [path for path, (_, kept) in in_index.items() if path in expected and kept not in expected[path]]
    if edited := sorted({*edited}):
        known = [path for path in edited if path in blob[head] or path in in_index]
        strange = [path for path in edited if path not in known]
        advice = [f"To set your edits aside and apply them to the new version: git stash push -- {shlex.join(known)}; "
                  f"workbook update; git stash pop"] if known else []  # fmt: skip
        advice += [f"Move these files of yours away: {_listed(strange)}"] if strange else []
        raise BookError(
            f"you and the new version both changed {_listed(edited)}. No file has changed yet. {'. '.join(advice)}"
        )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:10]) + (f" and {len(paths) - 10} more" if len(paths) > 10 else "")


def _joined(head: str, base: str, target: str) -> str:
    """Make a merge commit: files that the learner committed stay as they are,
    and all others come from the new version.
    """
    before, ours, theirs = tree(base), tree(head), tree(target)
    mine = [
        path
        for path in _changed(base, head)
        if path in ours and (path in _own(base, target) or before.get(path) == theirs.get(path))
    ]
    gone = [path for path in _changed(base, head) if path not in ours and path not in _own(base, target)]
    rows = [f"{ours[path][0]} {ours[path][1]}\t{path}" for path in mine]
    rows += [f"0 {'0' * 40}\t{path}" for path in gone if path in theirs]
    index = {"GIT_INDEX_FILE": str(FOLDER / "update.index")}
    git("read-tree", target, env=index)
    git("update-index", "-z", "--index-info", stdin=b"".join(os.fsencode(row) + b"\0" for row in rows), env=index)
    made = git("write-tree", env=index).decode().strip()
    Path(index["GIT_INDEX_FILE"]).unlink(missing_ok=True)
    who, mail = line("log", "-1", "--format=%an%n%ae", head).split("\n")
    person = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in
              (("NAME", who), ("EMAIL", mail))}  # fmt: skip
    message = f"Update the book to {target[:9]}\n".encode()
    return git("commit-tree", made, "-p", head, "-p", target, stdin=message, env=person).decode().strip()


# ---- carrying it out: every step can be repeated ---------------------------------------------------------------------


def _carry_out(plan: Plan, say: Say) -> None:
    ours = modules(plan.base, plan.target)
    begun = [name for name in ours if _state(name, plan) == "begun"]
    kept_index = staged() if line("rev-parse", "HEAD") == plan.head else {}
    copies = _copy(begun, kept_index, plan)
    if begun:
        say(f"your files stay as they are, with copies in {sources.shown(stubs.BACKUPS)}/: "
            + ", ".join(f"lib/{name}.py ({copy.name})" for name, copy in zip(begun, copies, strict=True)))  # fmt: skip
    sources.write_bytes(JOURNAL, json.dumps(asdict(plan)).encode())
    moved = _move(plan, say)
    report = [message for name in ours for message in _renew(name, plan)]
    _finish(plan, kept_index)
    for message in report:
        say(message)
    if "pyproject.toml" in moved:
        say("the book needs other packages now: run `make lab`, or `pip install -e .`")
    say(f"the book is now at {plan.target[:9]}")
    JOURNAL.unlink(missing_ok=True)


def _state(name: str, plan: Plan) -> str:
    """``missing``, ``stub`` (of the old or the new version), ``begun``, or ``no file`` (a folder or a pipe)."""
    path = ROOT / "lib" / f"{name}.py"
    if not path.exists():
        return "missing"
    if not path.is_file():
        return "no file"
    try:
        now = re.sub(r"\r\n?", "\n", mine_of(name) or "")
    except SourceError:
        return "begun"
    return "stub" if now in (text(plan.base, f"lib/{name}.py"), text(plan.target, f"lib/{name}.py")) else "begun"


def _copy(begun: list[str], kept_index: dict[str, tuple[str, str]], plan: Plan) -> list[Path]:
    """Make dated copies of every module that was begun, and of staged content that is nowhere else."""
    for path, (_, blob) in kept_index.items():
        books = [tree(commit).get(path, ("", ""))[1] for commit in (plan.head, plan.new)]
        if blob and blob not in (*books, at_work([path])[path]):
            copy = stubs.dated(Path(path).with_stem(f"{Path(path).stem}-staged"))
            sources.write_bytes(copy, git("cat-file", "blob", blob))
    return [stubs.keep_copy(ROOT / "lib" / f"{name}.py") for name in begun]


def _move(plan: Plan, say: Say) -> list[str]:
    """Move all files but the modules to the new version; each file is replaced in one step."""
    moving = [path for path in _changed(plan.head, plan.new) if path not in _own(plan.base, plan.target)]
    before, after = tree(plan.head), tree(plan.new)
    found = at_work(moving)
    stale = [path for path in moving if found[path] != after.get(path, ("", ""))[1]]
    if other := [path for path in stale if found[path] == "other"]:
        raise BookError(
            f"{_listed(other)}: a folder or a link is in the way; move it away, then run `workbook update` again"
        )
    for path in stale:
        if found[path] not in ("", before.get(path, ("", ""))[1]):  # edited since an update was interrupted
            say(f"{path}: your version is kept in {sources.shown(stubs.keep_copy(ROOT / path))}")
    for path in [path for path in stale if path not in after]:
        (ROOT / path).unlink(missing_ok=True)
        for folder in Path(path).parents[:-1]:
            with contextlib.suppress(OSError):
                (ROOT / folder).rmdir()
    _put(plan, [path for path in stale if path in after])
    return moving


def _put(plan: Plan, fresh: list[str]) -> None:
    """Check files of the new version out into a folder of their own, and move each to its place."""
    shutil.rmtree(STAGING, ignore_errors=True)
    index = {"GIT_INDEX_FILE": str(FOLDER / "update.index")}
    git("read-tree", plan.new, env=index)
    listed = b"".join(os.fsencode(path) + b"\0" for path in fresh)
    git("checkout-index", "-f", "-z", "--stdin", f"--prefix={sources.shown(STAGING)}/", stdin=listed, env=index)
    for path in fresh:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(STAGING / path, ROOT / path)
    shutil.rmtree(STAGING, ignore_errors=True)
    Path(index["GIT_INDEX_FILE"]).unlink(missing_ok=True)


def _finish(plan: Plan, kept_index: dict[str, tuple[str, str]]) -> None:
    """Set git's index and branch, keep what was staged, and remove the temporary files of a killed run."""
    for path in (ROOT / "lib").glob(".*.py.*"):
        if re.fullmatch(r"\.\w+\.py\.\d+", path.name):
            path.unlink(missing_ok=True)
    git("read-tree", plan.new)
    rows = [f"{mode} {blob}\t{path}" if blob else f"0 {'0' * 40}\t{path}" for path, (mode, blob) in kept_index.items()
            if path in _own(plan.base, plan.target) or path not in tree(plan.target)]  # fmt: skip
    git("update-index", "-z", "--index-info", stdin=b"".join(os.fsencode(row) + b"\0" for row in rows))
    with contextlib.suppress(GitError):  # it only says that something differs
        git("update-index", "-q", "--refresh")
    if line("rev-parse", "HEAD") != plan.new:
        git("update-ref", "-m", "workbook update", "HEAD", plan.new, plan.head)


# ---- the learner's modules -------------------------------------------------------------------------------------------


def _renew(name: str, plan: Plan) -> list[str]:
    """Bring one module up to date, and return what the learner should know about it."""
    where = f"lib/{name}.py"
    path, state = ROOT / where, _state(name, plan)
    old, new = text(plan.base, where), text(plan.target, where)
    if state == "no file":
        return [f"{where} is not a file: move it away, then run `workbook reset {name}`"]
    if state == "begun":
        if new is None:
            return [f"{where}: the book no longer has this module; yours stays"]
        return renew_begun(name, old or "", new)
    if new is None:
        path.unlink(missing_ok=True)
        return [f"{where} is gone: the book no longer has it"] if state == "stub" else []
    if state == "stub" and re.sub(r"\r\n?", "\n", mine_of(name) or "") == new:
        return []
    sources.write_stub(path, new)
    return [f"{where}: updated to the new stubs" if old is not None else f"{where} is new"]
