"""Git for ``workbook update``: only plumbing commands, which run no hooks, open no editor and merge nothing."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lib.workbook.book.catalog import ROOT, BookError

ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_NAMESPACE")
"""Variables that may point git at another repository, set by a program that called us."""


class GitError(BookError):
    """A git command failed; the message is the first line that git printed."""


def environment() -> dict[str, str]:
    """Git's environment: this checkout, messages in English, and no prompts when nobody is there to answer them."""
    kept = {key: value for key, value in os.environ.items() if key not in ELSEWHERE}
    if not sys.stdin or not sys.stdin.isatty():
        kept |= {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": kept.get("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")}
    return {**kept, "LC_ALL": "C"}


def git(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """Run git, and return what it prints.

    Args:
        arguments: The command line after ``git``.
        stdin: Its standard input.
        env: More environment variables.

    Raises:
        GitError: git is not installed, or the command failed.
    """
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            env=environment() | dict(env or {}),
            input=stdin,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    if done.returncode:
        said = [
            row for row in done.stderr.decode(errors="replace").splitlines() if row and not row.startswith("warning:")
        ]
        first = said[0] if said else f"exit status {done.returncode}"
        raise GitError(first.removeprefix("fatal: ").removeprefix("error: "))
    return done.stdout


def line(*arguments: str, default: str | None = None) -> str:
    """The one line that a git command prints, or ``default``, if given, when the command fails."""
    try:
        return os.fsdecode(git(*arguments)).strip()
    except GitError:
        if default is None:
            raise
        return default


def names(*arguments: str) -> list[str]:
    """The paths (or other words) that a git command prints, separated by zero bytes."""
    return [os.fsdecode(name) for name in git(*arguments).split(b"\0") if name]


@functools.cache
def tree(commit: str) -> dict[str, tuple[str, str]]:
    """Mode and blob of every file of a commit."""
    rows = (row.partition("\t") for row in names("ls-tree", "-r", "-z", commit))
    return {path: (facts.split()[0], facts.split()[2]) for facts, _, path in rows}


@functools.cache
def text(commit: str, path: str) -> str | None:
    """A file of a commit as text, with ``\\n`` as line ends; None if the commit has no such file."""
    entry = tree(commit).get(path)
    if entry is None:
        return None
    found = git("cat-file", "blob", entry[1]).decode("utf-8", "replace")
    return found.removeprefix("\ufeff").replace("\r\n", "\n")


def at_work(paths: Iterable[str]) -> dict[str, str]:
    """The blob id of each file in the checkout, as git would store it now.

    Returns:
        By path: a blob id; ``""`` if nothing is there; ``"other"`` if a folder or a pipe is there,
        or a file where a folder should be.
    """
    paths, found, plain = list(paths), {}, []
    for path in paths:
        place = ROOT / path
        above = [ROOT / parent for parent in Path(path).parents[:-1] if parent.as_posix() not in paths]
        if any(folder.is_symlink() or (folder.exists() and not folder.is_dir()) for folder in above):
            found[path] = "other"
        elif place.is_symlink():
            found[path] = git("hash-object", "--stdin", stdin=os.fsencode(os.readlink(place))).decode().strip()
        elif not place.exists():
            found[path] = ""
        elif place.is_file():
            plain.append(path)
        else:
            found[path] = "other"
    listed = "".join(f"{path}\n" for path in plain)
    blobs = git("hash-object", "--stdin-paths", stdin=os.fsencode(listed)).decode().split() if plain else []
    return found | dict(zip(plain, blobs, strict=True))


def staged() -> dict[str, tuple[str, str]]:
    """Mode and blob of every staged file that differs from the last commit; the blob is ``""`` for a removed file."""
    words = names("diff-index", "--cached", "-z", "--no-renames", "HEAD")
    rows = zip(words[::2], words[1::2], strict=True)
    found = {path: facts.split() for facts, path in rows}
    return {path: (facts[1], "" if set(facts[3]) == {"0"} else facts[3]) for path, facts in found.items()}
