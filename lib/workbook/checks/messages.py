"""What a failed check says: what is wrong, on which case, what it looks like, where to read, how to run it again."""

import contextlib
import linecache
import os
import re
import traceback
from pathlib import Path

from lib.workbook import grading
from lib.workbook.book import resolve
from lib.workbook.checks.alarm import TimeLimit, alarm
from lib.workbook.book.catalog import ROOT, BookError, Exercise, chapters
from lib.workbook.book.stubs import marker_lines

LABEL_WIDTH, MESSAGE_WIDTH = 12, 300
DIAGNOSIS_S, RANKS_DIAGNOSIS_S = 3.0, 20.0  # for all known mistakes together
BOOKS_FAULT = "the book is at fault here, not you"
DETAILS = ("raised", "expected", "first wrong", "value", "shape", "dtype", "at")  # what a one-line report keeps


def facts(exercise: Exercise) -> dict:
    """What every report carries: the exercise, and the file and line that were graded."""
    return {
        "chapter": exercise.chapter,
        "module": exercise.module,
        "number": exercise.number,
        "name": exercise.name,
        "graded": graded_place(exercise),
        "state": "passed",
    }


def graded_place(exercise: Exercise) -> str:
    """``lib/rope.py:34``, or why there is no such place."""
    wrong = grading.active_mistake()
    try:
        found = wrong.implementation if wrong else resolve.answer(exercise.module, exercise.name)
        place = resolve.provenance(found)
    except resolve.AnswerError:
        return f"lib/{exercise.module}.py"
    return f"lib/{exercise.module}.py" if place is None else shown(*place)


def shown(path, line: int) -> str:
    """A place, relative to the project where it lies in it."""
    path = Path(path)
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def code_line(file: str, line: int) -> str:
    return f"{shown(file, line)}   {linecache.getline(str(file), line).strip()}"


def case_of(item) -> str:
    """The case that the test named, else its parameters, else its own name."""
    callspec = getattr(item, "callspec", None)
    return grading.current_case() or (callspec.id if callspec else item.name)


def layout(exercise: Exercise, problem: str, rows, read: str | None = None) -> str:
    """The report as a learner reads it."""
    ending = [
        ("graded", graded_place(exercise)),
        ("read", f"chapter {exercise.chapter}, {read or f'exercise {exercise.number}'}"),
        ("again", f"pytest tests/chapter_{exercise.chapter:02d} -k {exercise.keyword}"),
    ]
    lines = [f"{exercise.name}: {problem}"]
    for label, text in [*rows, *ending]:
        first, *more = str(text).splitlines() or [""]
        lines.append(f"  {label:<{LABEL_WIDTH}} {first}")
        lines += [f"  {'':<{LABEL_WIDTH}} {line}" for line in more]
    return "\n".join(lines)


def in_one_line(report) -> str:
    """The later failures of one exercise: what, and on which case."""
    facts = report.workbook
    if facts["state"] == "not started":
        return str(report.longrepr)
    case = f" ({facts['case']})" if facts["case"] else ""
    detail = f": {facts['detail']}" if facts.get("detail") else ""
    return f"{facts['name']}: {facts['problem']}{case}{detail}"


def explain(item, excinfo, report) -> None:
    """Turn the exception of a check into the report's text and state."""
    exercise, error = item.workbook_exercise, excinfo.value
    inner = getattr(error, "error", None)  # a rank's own exception, inside the failure of its run
    wrong = next((e for e in (error, inner) if isinstance(e, grading.Wrong)), None)
    refused = next((e for e in (error, inner) if isinstance(e, resolve.AnswerError)), None)
    stub = grading.is_stub_error(error)
    if stub is not None:
        _not_started(exercise, stub, report)
        return
    if wrong is not None:
        rows = [("case", wrong.case or case_of(item)), *wrong.rows]
        if looks := diagnose(item, wrong):
            rows.append(("looks like", looks))
        problem, read = wrong.problem, wrong.read
    elif isinstance(error, BookError):
        problem, rows, read = BOOKS_FAULT, [("because", str(error))], None
    elif refused is not None:
        problem, rows, read = f"cannot be graded: {refused}", [("case", "")], None
    elif hasattr(error, "per_rank"):
        first, *more = str(error).splitlines() or [type(error).__name__]
        rows = [("case", case_of(item)), ("ranks", "\n".join(more)), ("looks like", diagnose(item, error))]
        problem, read = first, None
    else:
        problem, rows, read = _raised(item, error)
    rows = [(label, text) for label, text in rows if text]
    report.longrepr = layout(exercise, problem, rows, read)
    found = dict(rows)
    detail = "; ".join(f"{k} {_line(k, found[k])}" for k in DETAILS if found.get(k))
    report.workbook |= {"state": "wrong", "problem": problem, "case": found.get("case", ""), "detail": detail}


def _line(label: str, text: str) -> str:
    """A row in one line: of a traceback the last, of a message all of it."""
    return text.splitlines()[-1] if label == "at" else " ".join(text.split())[:MESSAGE_WIDTH]


def _not_started(exercise: Exercise, stub: str, report) -> None:
    number, _, what = stub.removeprefix("Exercise ").partition(":")
    chapter = chapters()[exercise.module]
    try:
        line = marker_lines(chapter.mine.read_text(encoding="utf-8")).get(exercise.name, exercise.line)
    except (OSError, SyntaxError):
        line = exercise.line
    if number == exercise.number:
        step = f"{what.strip()}: lib/{exercise.module}.py:{line}"
    else:
        step = f"first {stub[0].lower()}{stub[1:]}"
    report.longrepr = f"{exercise.name}: not started ({step})"
    report.workbook |= {"state": "not started", "problem": "not started", "next": step}


def _raised(item, error: BaseException):
    """An exception that no expectation made: the learner's own lines of the traceback."""
    trace = traceback.extract_tb(error.__traceback__)
    lib = str(ROOT / "lib")
    mine = [f for f in trace if f.filename.startswith(lib) and not f.filename.startswith(lib + "/workbook")]
    mine = _own_frames(error, item.workbook_exercise.module) or mine
    rows = [("case", case_of(item))]
    if mine:
        rows.append(("at", "\n".join(code_line(f.filename, f.lineno or 1) for f in mine[-4:])))
    elif trace:
        own = [f for f in trace if f.filename.startswith(str(ROOT / "tests"))]
        rows += [("in the test", code_line(f.filename, f.lineno or 1)) for f in own[-1:]]
    if isinstance(error, TimeLimit):
        return f"was {error}, the limit of this check", rows, None
    message = re.sub(r"\s*\(Triggered internally at [^)]*\)", "", str(error).strip())
    head, *more = message.splitlines() or [""]
    if more:
        rows.append(("message", "\n".join(more[:12])))
    if len(head) > MESSAGE_WIDTH:
        head = head[:MESSAGE_WIDTH] + " …"
    return f"raised {type(error).__name__}{': ' + head if head else ''}", rows, None


def _own_frames(error: BaseException | None, module: str) -> list[traceback.FrameSummary]:
    """The lines of lib/<module>.py that an exception passed through, or else its cause, or what was being handled."""
    file, found, seen = str(ROOT / "lib" / f"{module}.py"), [], set()
    while error is not None and id(error) not in seen and not found:
        seen.add(id(error))
        found = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        error = error.__cause__ or error.__context__
    return found


def diagnose(item, error: BaseException) -> str:
    """The sentence of the mistake that fails in the same way on the same case, if one does.

    Only the first failure of an exercise is diagnosed: the later ones are told in a line.
    """
    exercise = item.workbook_exercise
    if grading.active_mistake() is not None or resolve.flavor(exercise.module) == "reference":
        return ""
    if not isinstance(error, grading.Wrong) and getattr(error, "kind", "") != "deadlock":
        return ""
    if item.get_closest_marker("memory_limit") or getattr(item, "workbook_failed_before", 0):
        return ""  # what a mistake takes would be laid to the answer
    names = getattr(getattr(item, "_fixtureinfo", None), "argnames", ())
    arguments = {name: item.funcargs[name] for name in names}
    case = grading.current_case()
    diagnosing = arguments["ranks"].diagnosing() if "ranks" in arguments else contextlib.nullcontext()
    sentences: list[str] = []
    try:
        with _silence(), diagnosing, alarm(RANKS_DIAGNOSIS_S if "ranks" in arguments else DIAGNOSIS_S):
            for known in grading.mistakes_of(exercise.module, exercise.name):
                with grading.standing_in(known):
                    other = _outcome(item, arguments)
                if _alike(other, error, grading.current_case() == case) and known.sentence not in sentences:
                    sentences.append(known.sentence)
                if len(sentences) == 2 and "ranks" in arguments:
                    break
    except TimeLimit:
        pass
    grading.case(case)
    return ", or: ".join(sentences) if len(sentences) <= 2 else ""


def _outcome(item, arguments) -> Exception | None:
    """How the test fails now: with a wrong answer, or as ranks that cannot go on."""
    grading.case("")
    try:
        item.obj(**arguments)
    except grading.Wrong as other:
        return other
    except Exception as error:
        inner = getattr(error, "error", None)
        return inner if isinstance(inner, grading.Wrong) else error if hasattr(error, "per_rank") else None
    return None


def _alike(other: BaseException | None, error: BaseException, same_case: bool) -> bool:
    """Whether a mistake failed as the answer did: with the same numbers, or its ranks in the same calls."""
    if isinstance(other, grading.Wrong) and isinstance(error, grading.Wrong):
        return (
            (other.case, other.problem) == (error.case, error.problem)
            and grading.same_answer(other.answer, error.answer)
            and not grading.further_apart(other.answer, error.answer, error.gap)
        )
    kinds = getattr(other, "kind", None), getattr(error, "kind", "")
    return kinds == ("deadlock", "deadlock") and same_case and _without_places(other) == _without_places(error)


def _without_places(error: BaseException | None) -> str:
    """The first line of a deadlock's report, without lines of code and without seconds."""
    return re.sub(r" \([^()]*:\d+\)|, since \d+ s| \(the limit is [^)]*\)", "", str(error).partition("\n")[0])


@contextlib.contextmanager
def _silence():
    """Nothing that is printed in this block, by Python or by C, reaches the terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        kept = []
        for number in (1, 2):
            with contextlib.suppress(OSError):
                kept.append((os.dup(number), number))
                os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for old, number in kept:
                os.dup2(old, number)
                os.close(old)
