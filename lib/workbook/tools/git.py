"""What ``workbook update`` asks of git: plumbing only, which runs no hook, opens no editor and merges nothing."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lib.workbook.book.catalog import ROOT, BookError

ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_NAMESPACE")
"""Variables by which a program that called us may have pointed git at another repository."""


class GitError(BookError):
    """git refused; the message is its own first line."""


def environment() -> dict[str, str]:
    """git on this checkout, in English, and without a question that nobody could answer."""
    kept = {key: value for key, value in os.environ.items() if key not in ELSEWHERE}
    if not sys.stdin or not sys.stdin.isatty():
        kept |= {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": kept.get("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")}
    return {**kept, "LC_ALL": "C"}


def git(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """What git prints.

    Args:
        arguments: Of git.
        stdin: What it reads.
        env: More of its environment.

    Raises:
        GitError: it is not installed, or ends with an error.
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
    """The one line that git prints; ``default``, if one is given, where it fails."""
    try:
        return os.fsdecode(git(*arguments)).strip()
    except GitError:
        if default is None:
            raise
        return default


def names(*arguments: str) -> list[str]:
    """The paths, or other words, that git prints with a zero byte after each."""
    return [os.fsdecode(name) for name in git(*arguments).split(b"\0") if name]


@functools.cache
def tree(commit: str) -> dict[str, tuple[str, str]]:
    """Mode and blob of every file of a commit."""
    rows = (row.partition("\t") for row in names("ls-tree", "-r", "-z", commit))
    return {path: (facts.split()[0], facts.split()[2]) for facts, _, path in rows}


@functools.cache
def text(commit: str, path: str) -> str | None:
    """A file of a commit as text with newlines at its line ends; None where the commit has none."""
    entry = tree(commit).get(path)
    if entry is None:
        return None
    found = git("cat-file", "blob", entry[1]).decode("utf-8", "replace")
    return found.removeprefix("\ufeff").replace("\r\n", "\n")


def at_work(paths: Iterable[str]) -> dict[str, str]:
    """The blob that git would make of each file as it lies in the checkout.

    Returns:
        By path: a blob; ``""`` where nothing is, ``"other"`` where a folder or a pipe is, or a file in a folder's place.
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
    """Mode and blob of what is staged and differs from the last commit; the blob is ``""`` where a file was removed."""
    words = names("diff-index", "--cached", "-z", "--no-renames", "HEAD")
    rows = zip(words[::2], words[1::2], strict=True)
    found = {path: facts.split() for facts, path in rows}
    return {path: (facts[1], "" if set(facts[3]) == {"0"} else facts[3]) for path, facts in found.items()}
