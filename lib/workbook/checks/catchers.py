"""Which test catches each known mistake: ``catchers.json`` beside mistakes.py, so that ``--mistakes`` tries that test first.

``pytest --mistakes --record`` writes it. What is not in it, or no longer true, costs time and nothing else: all tests of the
exercise are tried, in turn, until one catches the mistake.
"""

import json
from collections import defaultdict
from pathlib import Path

from lib.workbook.book.stubs import write_atomically

FILE, PROPERTY = "catchers.json", "caught by"


def read(folder: Path) -> dict[str, str]:
    """The name of the test that has caught each mistake of a chapter, by the mistake's name."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def likely_first(tests: list, catcher: str | None) -> list:
    """The same tests: the catcher first, those that need ranks or much time last."""

    def place(test):
        takes_long = test.get_closest_marker("memory_limit") or test.get_closest_marker("time_limit")
        return test.name != catcher, "ranks" in test.fixturenames, takes_long is not None

    return sorted(tests, key=place)


class Record:
    """What a run has found out."""

    def __init__(self):
        self.found: dict[Path, dict[str, str]] = defaultdict(dict)

    def add(self, root: Path, report) -> None:
        """Note what caught the mistake that a report is about."""
        file, _, mistake = report.nodeid.partition("::")
        for name, test in report.user_properties:
            if name == PROPERTY:
                self.found[(root / file).parent][mistake] = test

    def write(self) -> None:
        for folder, found in self.found.items():
            write_atomically(folder / FILE, json.dumps(read(folder) | found, indent=1, sort_keys=True) + "\n")
