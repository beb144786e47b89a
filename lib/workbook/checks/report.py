"""What a report says about a check: a dataclass that travels with pytest's report, and the text that a person reads."""

import contextlib
import linecache
import re
import traceback
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lib.workbook.book import labels, resolve
from lib.workbook.book.boundary import AnswerError
from lib.workbook.book.catalog import ROOT, BookError, Exercise, chapters
from lib.workbook.book.resolve import safe_text
from lib.workbook.book.sources import SourceError, provenance, read_mine
from lib.workbook.book.stubs import marker_lines
from lib.workbook.checks.alarm import TimeLimit
from lib.workbook.grading.cases import current_case
from lib.workbook.grading.expect import Wrong, is_stub_error
from lib.workbook.grading.mistakes import active_mistake

if TYPE_CHECKING:
    from _pytest.nodes import Item
    from _pytest.reports import TestReport

Rows = list[tuple[str, str]]  # of a report, each a label and its text
LABEL_WIDTH, MESSAGE_WIDTH, MESSAGE_LINES = 12, 300, 40
BOOKS_FAULT = "the book is at fault here, not you"
DETAILS = ("raised", "expected", "first wrong", "value", "shape", "dtype", "at")  # rows that a one-line report keeps
STATES = ("passed", "wrong", "not started", "not run", "not checked", "skipped")


class RaisedInAnswer(Exception):
    """An answer called ``pytest.skip()``, ``sys.exit()`` or the like, which would end or skip the test:
    in an answer, an error.
    """


@dataclass(kw_only=True)
class CheckReport:
    """What the report says about one check.

    ``state`` is one of `STATES`: "wrong" is the learner's fault, "not checked" is the book's or the machine's,
    and "not run" means that the check was not tried because an earlier one did not end.
    ``rows`` are the (label, text) pairs of the report.
    ``repeated`` counts the failed checks of the same exercise before this one.
    ``is_late`` means that its ranks were not finished in time, after which the exercise's other checks are not run.
    """

    chapter: int
    module: str
    number: str
    name: str
    graded: str
    again: str
    state: str = "passed"
    problem: str = ""
    case: str = ""
    detail: str = ""
    next: str = ""
    read: str = ""
    rows: Rows = field(default_factory=list)
    repeated: int = 0
    is_late: bool = False

    @classmethod
    def of(cls, report: "TestReport") -> "CheckReport | None":
        """The record that a report of pytest carries; None for a test that grades nothing."""
        data = getattr(report, "workbook", None)
        return cls(**data) if data else None

    def put_on(self, report: "TestReport") -> None:
        """Attach this record to ``report``, and make its text what pytest shows."""
        report.workbook = asdict(self)  # type: ignore[attr-defined]
        if self.state in ("wrong", "not started", "not checked"):
            report.longrepr = self.text() if not self.repeated else self.line()

    def text(self) -> str:
        """The report as a learner reads it."""
        if self.state == "not started":
            return f"{self.name}: not started ({self.next})"
        read = labels.where_to_read(chapters()[self.module].exercise(self.name), self.read or None)
        ending = [("graded", self.graded), ("read", read), ("again", self.again)]
        lines = [_cut(f"{self.name}: {self.problem}")]
        for label, text in [*self.rows, *ending]:
            first, *more = str(text).splitlines() or [""]
            lines.append(_cut(f"  {label:<{LABEL_WIDTH}} {first}"))
            lines += [_cut(f"  {'':<{LABEL_WIDTH}} {line}") for line in more[:MESSAGE_LINES]]
        return "\n".join(lines)

    def line(self) -> str:
        """One line for a later failure of the same exercise: the problem and its case."""
        if self.state == "not started":
            return self.text()
        case = f" ({self.case})" if self.case else ""
        detail = f": {self.detail}" if self.detail else ""
        return _cut(f"{self.name}: {self.problem}{case}{detail}", 3 * MESSAGE_WIDTH)

    def fill(self, problem: str, rows: Rows, read: str | None = None, state: str = "wrong") -> None:
        """Set the state and what the report says about it."""
        self.state, self.problem, self.read = state, problem, read or ""
        self.rows = [(label, text) for label, text in rows if text]
        found = dict(self.rows)
        self.case = found.get("case", "")
        self.detail = "; ".join(f"{k} {_in_one_line(k, found[k])}" for k in DETAILS if found.get(k))


def _cut(text: str, width: int = 2 * MESSAGE_WIDTH) -> str:
    return text if len(text) <= width else f"{text[:width]} …"


def _in_one_line(label: str, text: str) -> str:
    """A row's text in one line: the last line of a traceback, or a whole message."""
    return text.splitlines()[-1] if label == "at" else " ".join(text.split())[:MESSAGE_WIDTH]


def begin(exercise: Exercise, world: str) -> CheckReport:
    """A fresh record for a check of an exercise that is graded in ``world``."""
    return CheckReport(
        chapter=exercise.chapter,
        module=exercise.module,
        number=exercise.number,
        name=exercise.name,
        graded=graded_place(exercise, world),
        again=exercise.command,
    )


def graded_place(exercise: Exercise, world: str) -> str:
    """``lib/rope.py:34``; without a line number if the source has no such name."""
    wrong = active_mistake()
    if wrong is not None:
        place = provenance(wrong.implementation)
        return shown(*place) if place else f"a mistake of {exercise.name}"
    path, line = resolve.place(exercise, world)
    return shown(path, line) if line else shown(path, 1).removesuffix(":1")


def shown(path: str | Path, line: int) -> str:
    """A place in a file, relative to the project if the file is inside it."""
    path = Path(path)
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def code_line(file: str, line: int) -> str:
    return f"{shown(file, line)}   {linecache.getline(str(file), line).strip()}"


def case_of(item: "Item", error: BaseException | None = None) -> str:
    """The case that the rank named whose error this is, or that the test named; else the test's parameters or name."""
    callspec = getattr(item, "callspec", None)
    return getattr(error, "about", "") or current_case() or (callspec.id if callspec else item.name)


def explain(told: CheckReport, item: "Item", error: BaseException) -> None:
    """Write into ``told`` what the exception of a check means."""
    inner = getattr(error, "error", None)  # a rank's own exception, inside the failure of its run
    wrong = next((e for e in (error, inner) if isinstance(e, Wrong)), None)
    refused = next((e for e in (error, inner) if isinstance(e, AnswerError)), None)
    case = ("case", case_of(item, inner))
    if (stub := is_stub_error(error)) is not None:
        told.state, told.problem, told.next = "not started", "not started", _next_step(told, stub)
    elif wrong is not None:
        rows = [("case", wrong.case or case_of(item, inner)), *wrong.rows]
        if wrong.__cause__ and "at" not in dict(rows):
            rows += _at(wrong.__cause__)
        told.fill(wrong.problem, rows, wrong.read)
    elif isinstance(error, BookError) or getattr(error, "kind", "") == "missing":
        told.fill(BOOKS_FAULT, [case, ("because", safe_text(error))], state="not checked")
    elif refused is not None:
        told.fill(f"cannot be graded: {refused}", [])
    elif hasattr(error, "per_rank"):
        first, *more = safe_text(error).splitlines() or [type(error).__name__]
        told.fill(first, [case, ("ranks", "\n".join(more))])
        told.is_late = getattr(error, "kind", "") == "time"
    else:
        told.fill(*_raised(case, error))


def _next_step(told: CheckReport, stub: str) -> str:
    number, _, what = stub.removeprefix("Exercise ").partition(":")
    if number != told.number:
        return f"first {stub[0].lower()}{stub[1:]}"
    chapter = chapters()[told.module]
    line = chapter.exercise(told.name).line
    with contextlib.suppress(SourceError, SyntaxError, ValueError):
        line = marker_lines(read_mine(chapter)).get(told.name, line)
    return f"{what.strip()}: lib/{told.module}.py:{line}"


def frames_of_stack(exercise: Exercise, stack: str) -> str:
    """The learner's innermost line in a stack that faulthandler wrote; empty if no line of theirs was running."""
    mine = str(chapters()[exercise.module].mine)
    found = re.findall(r'File "([^"]+)", line (\d+) in', stack)
    return next((code_line(file, int(line)) for file, line in found if file == mine), "")


def learners_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The learner's own lines in the traceback of an exception, or of its cause, outermost first."""
    places = {str(chapter.mine) for chapter in chapters().values()}
    seen = 0
    while error is not None and seen < 10:
        found = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in places]
        deeper = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if deeper is not None and (below := learners_frames(deeper)):
            return below
        return found
    return []


def _at(error: BaseException) -> Rows:
    """A row with the learner's own lines of a traceback; none if it has no such line."""
    lines = [code_line(f.filename, f.lineno or 1) for f in learners_frames(error)]
    once = [line for line, _ in groupby(lines)]  # a generator expression is a frame of its own on the same line
    return [("at", "\n".join(once[-4:]))] if once else []


def _raised(case: tuple[str, str], error: BaseException) -> tuple[str, Rows]:
    """Problem and rows for an exception that the code itself raised, with the learner's own lines of the traceback."""
    if isinstance(error, RaisedInAnswer) and error.__cause__ is not None:
        error = error.__cause__
    rows = [case, *_at(error)]
    if len(rows) == 1:
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(ROOT / "tests"))]
        rows += [("in the test", code_line(f.filename, f.lineno or 1)) for f in own[-1:]]
    if isinstance(error, TimeLimit):
        return f"was {error}, the limit of this check", rows
    message = re.sub(r"\s*\(Triggered internally at [^)]*\)", "", safe_text(error)[:100_000].strip())
    head, *more = message.splitlines() or [""]
    if more:
        rows.append(("message", "\n".join(more[:12])))
    if len(head) > MESSAGE_WIDTH:
        head = head[:MESSAGE_WIDTH] + " …"
    return f"raised {type(error).__name__}{': ' + head if head else ''}", rows
