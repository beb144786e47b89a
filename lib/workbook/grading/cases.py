"""The case that a test is working on, kept on a board that the judge can read even after the child has died."""

import mmap

_WIDTH = 1024
_PROMPT, _IMPORTING, _TEXT = 0, 1, 2  # two flags of one byte, then the text of the case


class Board:
    """Memory that a check shares with the judge, which may have to end it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _WIDTH)

    def _flag(self, place: int, value: bool | None) -> bool:
        if value is not None:
            self.memory[place] = int(value)
        return bool(self.memory[place])

    def at_a_prompt(self, value: bool | None = None) -> bool:
        """Whether a debugger is waiting for a person, whose time does not count as the answer's."""
        return self._flag(_PROMPT, value)

    def importing(self, value: bool | None = None) -> bool:
        """Whether the learner's module is being imported, on which every exercise of its chapter depends."""
        return self._flag(_IMPORTING, value)

    @property
    def case(self) -> str:
        return self.memory[_TEXT:].rstrip(b"\0").decode(errors="ignore")

    @case.setter
    def case(self, description: str) -> None:
        room = _WIDTH - _TEXT
        self.memory[_TEXT:] = description.encode(errors="replace")[:room].ljust(room, b"\0")


BOARD = Board()


def case(description: str) -> None:
    """Name the case that the next lines of a test are about; if they fail, the report shows it."""
    BOARD.case = description


def current_case() -> str:
    """The case that was named last."""
    return BOARD.case
