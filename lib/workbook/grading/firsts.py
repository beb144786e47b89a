"""The record of how each known mistake first fails, ``tests/chapter_NN/mistakes.json``: a diagnosis tries few of them.

An answer that fails a check first, after it passed those before, can only make a mistake whose first failure is that
check. The record says which these are, and sketches their failures, so that most of them are set aside unseen.
Where several mistakes fail alike, the record also says how each ends a second check, on which they differ: one run of
the answer then decides. The mistakes that are left are run, and compared exactly; so the record may be coarse, and old
or missing entries cost time only.
On ranks, where a run takes long, a mistake is named without one if its sketch alone is the same in every digit.
``pytest --mistakes`` says which lines are old.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lib.workbook.book.catalog import chapters
from lib.workbook.grading.answers import is_array
from lib.workbook.grading.expect import Wrong
from lib.workbook.grading.likeness import Outcome, raised
from lib.workbook.grading.mistakes import Mistake, mistakes_of

TOLERANCE = 0.01  # of a failure's numbers, relative to all of them together; other processors round differently
EXACT = 2e-4  # the same for failures that are taken for the same without a run
CHANGING = re.compile(
    r"0x[0-9a-f]+|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|:\d+\)|/\S+/|, for \d+ s|\(the limit is [^)]*\)"
)
NOT_COMPARED = "-"
"""In place of a sketch: no diagnosis compares the failure, such as a time limit."""
VARIES = "?"
"""In place of a sketch: the failure is not the same each time, so it may look like any other of its check."""
PASSED = "passed"
SECOND = "+ "  # before the name of a second check
EITHER = " | "
EXACTLY = ":"  # between the digest of a failure's text without what may change, and the digest of all of it
TURNS = (0.7, 1.9)  # radians by which the weight of a number turns from one to the next, in each of the two sums


class Check(Protocol):
    name: str


C = TypeVar("C", bound=Check)


def sketch(outcome: Outcome) -> str:
    """A failure in a few words: two digests of its text, and three numbers if it shows the answer's own.

    Failures that `Outcome.is_like` takes for the same have like sketches; see `are_like`.
    """
    error = outcome.error
    assert error is not None
    if not isinstance(error, Wrong):
        kind = "ranks" if hasattr(error, "per_rank") else type(error).__name__
        return _digests([outcome.case, kind], [outcome.case, said] if (said := raised(error)) else [])
    answer = error.answer
    if isinstance(answer, str) and "error" in error.problem:
        answer = answer.partition(":")[0]  # an exception's message may change with the version of a library
    leaves = list(_leaves(answer))
    text = [error.case, error.problem, *(leaf for leaf in leaves if isinstance(leaf, str))]
    text += [repr(error.rows)] if answer is None else []
    numbers = _sums([leaf for leaf in leaves if not isinstance(leaf, str)])
    near = "" if error.gap is None else f"{error.gap:.3g}"  # tells apart answers that are nearly right
    if numbers and not near:
        near = repr(error.rows)  # show the first wrong number with as many digits as it takes
    return " ".join([_digests(text, [*text, near]), *(f"{x:.5g}" for x in numbers)])


def ending(outcome: Outcome) -> str:
    """How a check ended: `PASSED`, or the failure's sketch."""
    return PASSED if outcome.passed else sketch(outcome)


def are_like(known: str, seen: str) -> bool:
    """Whether a sketch can be that of a failure, or of one of several: see `either`."""
    return known == VARIES or any(_are_like(one, seen) for one in known.split(EITHER))


def either(sketches: Iterable[str], most: int) -> str:
    """The sketch of a mistake that fails in one of several ways, for example on another rank first, but at ``most``."""
    found: list[str] = []
    for drawn in sketches:
        like = next((i for i, one in enumerate(found) if _are_like(one, drawn)), None)
        if like is None:
            found.append(drawn)
        elif not _are_the_same(found[like], drawn):
            text, *numbers = found[like].split()
            found[like] = " ".join([text.partition(EXACTLY)[0], *numbers])
    return VARIES if NOT_COMPARED in found or len(found) > most else EITHER.join(sorted(found))


def _are_like(one: str, other: str, tolerance: float = TOLERANCE) -> bool:
    (text, *numbers), (same, *others) = one.split(), other.split()
    text, same = text.partition(EXACTLY)[0], same.partition(EXACTLY)[0]
    if text != same or NOT_COMPARED in (text, same) or len(numbers) != len(others):
        return False
    a, b = [float(x) for x in numbers], [float(x) for x in others]
    size = max([*map(abs, a), *map(abs, b)], default=0.0)
    return all(abs(x - y) <= tolerance * size + tolerance / 1000 or x == y for x, y in zip(a, b, strict=True))


def _are_the_same(one: str, other: str) -> bool:
    """Whether two sketches agree in every digit, save for the last ones of their numbers."""
    text, same = one.split()[0], other.split()[0]
    return EXACTLY in text and text == same and _are_like(one, other, EXACT)


def may_be(drawn: str, seen: str) -> bool:
    """Whether a record leaves it open that this is the failure: it agrees in every digit, or it may fail otherwise."""
    return _is_recorded(drawn, seen) or (are_like(drawn, seen) and (EITHER in drawn or EXACTLY not in drawn))


def _is_recorded(drawn: str, seen: str) -> bool:
    """Whether one of the recorded ways to end a check is this one, in every digit."""
    return any(way == seen == PASSED or _are_the_same(way, seen) for way in drawn.split(EITHER))


def _digests(text: list[str], exact: list[str]) -> str:
    """Eight digits of a text without decimal numbers, addresses, places and seconds, and six of an exact one."""
    digits = hashlib.sha1(CHANGING.sub("#", "\n".join(text)).encode(errors="replace")).hexdigest()[:8]
    if not exact:
        return digits
    return digits + EXACTLY + hashlib.sha1("\n".join(exact).encode(errors="replace")).hexdigest()[:6]


def _leaves(value: Any) -> Iterator[Any]:
    """What an answer consists of, in order: numbers, as float64 tensors, and everything else as text."""
    import torch

    if is_array(value):
        flat = torch.as_tensor(value).detach().cpu().flatten()
        yield f"{tuple(value.shape)} {flat.dtype}"
        yield (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).double()
    elif isinstance(value, float):
        yield torch.tensor([value], dtype=torch.float64)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _leaves(value[key])
    elif isinstance(value, tuple | list):
        yield f"{len(value)}"
        for part in value:
            yield from _leaves(part)
    else:
        yield f"{type(value).__name__} {value!r}" if isinstance(value, int | str | bytes) else type(value).__name__


def _sums(parts: list[Any]) -> list[float]:
    """The length of a vector, and two sums of its numbers with weights that differ from place to place."""
    import torch

    if not parts:
        return []
    finite = torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)
    places = torch.arange(len(finite), dtype=torch.float64)
    return [float(finite.norm()), *(float(finite @ torch.cos(turn * places)) for turn in TURNS)]


@functools.cache
def recorded(module: str) -> dict[str, dict[str, dict[str, str]]]:
    """The record of a chapter: by exercise and check, how each mistake ends it, by `short`.

    It is the mistake's first failing check, or, with `SECOND` before its name, another one.
    """
    path = record_path(module)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record_path(module: str) -> Path:
    return chapters()[module].tests / "mistakes.json"


def short(mistake: Mistake) -> str:
    """The few digits of a mistake's label, unique in its exercise."""
    return mistake.label.rpartition("-")[2]


def first_failures(mistakes: Iterable[Mistake]) -> dict[str, tuple[str, str]]:
    """By the key of each mistake that is recorded: its first failing check, and the sketch of that failure."""
    found = {}
    for wrong in mistakes:
        for check, sketches in recorded(wrong.module).get(wrong.name, {}).items():
            if short(wrong) in sketches and not check.startswith(SECOND):
                found[wrong.key] = check, sketches[short(wrong)]
    return found


def endings(mistakes: Iterable[Mistake]) -> dict[str, dict[str, str]]:
    """By the key of each mistake: how it ends the second checks that are recorded for it, by their names."""
    found: dict[str, dict[str, str]] = {wrong.key: {} for wrong in mistakes}
    for wrong in mistakes:
        for check, sketches in recorded(wrong.module).get(wrong.name, {}).items():
            if check.startswith(SECOND) and short(wrong) in sketches:
                found[wrong.key][check.removeprefix(SECOND)] = sketches[short(wrong)]
    return found


def candidates(mistakes: list[Mistake], failing: str, outcome: Outcome, ruled_out: set[str]) -> list[Mistake]:
    """The mistakes that can have failed as an answer did, as far as the record knows them.

    Args:
        failing: Name of the check that the answer failed first.
        ruled_out: Names of the checks that the answer passed before it, or has still before it.
    """
    firsts = first_failures(mistakes)
    may = [m for m in mistakes if m.key not in firsts or firsts[m.key][0] not in ruled_out]
    drawn = {m.key: firsts[m.key][1] for m in may if m.key in firsts and firsts[m.key][0] == failing}
    seen = sketch(outcome) if drawn else ""
    return [m for m in may if m.key not in drawn or are_like(drawn[m.key], seen)]


def settle(
    rivals: list[Mistake], failing: str, outcome: Outcome, others: Iterable[C], run: Callable[[C], Outcome]
) -> tuple[list[Mistake], str]:
    """The rivals that the record leaves, and their sentence if it is the only one and a failure agrees in every digit.

    Where several mistakes fail alike, the record says how each ends another check, and the answer is run on that one.
    If the record says too little, or nothing in it is the same in every digit, all rivals are left, and no sentence.

    Args:
        rivals: The `candidates`.
        failing: Name of the check that the answer failed first.
        others: The other checks, each with a ``name``, those without ranks first.
        run: Runs a check on the answer.
    """
    known = first_failures(rivals)
    if not rivals or any(known.get(m.key, ("", ""))[0] != failing for m in rivals):
        return rivals, ""
    seen = sketch(outcome)
    same = {m.key for m in rivals if _is_recorded(known[m.key][1], seen)}
    left = [m for m in rivals if may_be(known[m.key][1], seen)]
    ends = endings(rivals)
    for check in others:
        lines = {m.key: ends[m.key].get(check.name, VARIES) for m in left}
        if len({m.sentence for m in left}) > 1 and len({*lines.values()}) > 1:
            ended = ending(run(check))
            left = [m for m in left if may_be(lines[m.key], ended)]
    if not any(m.key in same for m in left):
        return rivals, ""
    sentences = {m.sentence for m in left}
    return left, sentences.pop() if len(sentences) == 1 else ""


def write(found: list[tuple[str, str, str, str, str]]) -> list[Path]:
    """Put how mistakes end checks (module, exercise, mistake, check, sketch) into the records of their chapters.

    Mistakes that are gone are removed from these exercises, and old lines of those that have a new first failure.
    """
    from lib.workbook.book.stubs import write_atomically

    records: dict[str, dict[str, Any]] = {}
    for module, exercise in dict.fromkeys((module, exercise) for module, exercise, *_ in found):
        new = [(check, wrong, drawn) for m, e, wrong, check, drawn in found if (m, e) == (module, exercise)]
        renewed = {wrong for check, wrong, _ in new if not check.startswith(SECOND)}
        kept = {short(wrong) for wrong in mistakes_of(module, exercise)} - renewed
        old = recorded(module).get(exercise, {}).items()
        by_check: dict[str, dict[str, str]] = {}
        for check, wrong, drawn in [(c, w, drawn) for c, lines in old for w, drawn in lines.items() if w in kept] + new:
            by_check.setdefault(check, {})[wrong] = drawn
        records.setdefault(module, dict(recorded(module)))[exercise] = by_check
    for module, record in records.items():
        text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False)
        write_atomically(record_path(module), text + "\n")
    return [record_path(module) for module in records]
