"""Separates what libraries print about themselves when they end a process from what a person should read."""

import re

_INTERNAL = re.compile(
    r"""^\s*(?:
    \S+\(\S*\+0x[0-9a-f]+\)\s*\[0x          # a frame of a C stack
    | frame\ \#\d+: | C\+\+\ CapturedTraceback | Exception\ raised\ from
    | \[rank\ ?\d+\]:\s?\[?[EWIVF]\d{3,4}   # torch's loggers, in Python and in C++
    | \[?[EWIVF]\d{3,4}\s\d\d:\d\d
    | (?:internal_|P?MPI[A-Z]*_|MPI[DRC])\w*\(\d+\)\.*:
    | Abort\(\d+\)\ on\ node | Assertion\ failed\ in\ file
    | terminate\ called | what\(\): | \[Gloo\] | \[libprotobuf
    | (?:USDT|STAGE):\d{4}-\d\d-\d\d\s         # PyTorch's profiler
    )""",
    re.VERBOSE,
)
_CAUSES = (  # why a library ended the process: (what it printed, what we tell the reader)
    (r"typerep\S*_(?:un)?pack\.c", "the message is not a whole number of the receive buffer's elements"),
    (r"(?:[Mm]essage truncated|tag \S+ truncated)", "the message is larger than the receive buffer"),
    (r"Abort\(\d+\) on node \d+[^:]*: (?:Fatal error in \w+: )?(.+?)(?:, error stack:)?$", None),
    (r"enforce fail at [^\]]*\]\s*(.+)$", None),
    (r"what\(\):\s*(.+)$", None),
    (r"Assertion failed in file \S+ at line \d+: (.+)$", None),
)
_STACK = re.compile(r",?\s*error stack:\n.*", re.DOTALL)


def meaningful(text: str) -> list[str]:
    """The lines that are not a library's own: no C stacks, no loggers' warnings, no greetings."""
    return [line for line in text.splitlines() if not _INTERNAL.match(line)]


def cause(output: str) -> str:
    """Why a library ended the process, in a few words, from what it printed; empty if that says nothing useful."""
    for pattern, told in _CAUSES:
        found = re.search(pattern, output, re.MULTILINE)
        if found:
            return told or " ".join(found[1].split())[:200]
    return ""


def brief(text: str) -> str:
    """An exception's text without the stack that MPI or C++ puts into it."""
    return "\n".join(meaningful(_STACK.sub("", text))) or text


def shown_lines(text: str, limit: int) -> list[str]:
    """At most ``limit`` of the meaningful lines, and how many more there are."""
    lines = meaningful(text)
    more = len(lines) - limit
    return [*lines[:limit], f"… {more} lines more (pytest -s shows them all)"] if more > 1 else lines
