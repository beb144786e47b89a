"""Expectations: a test states what an answer should be, and a failure carries all that the report needs."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lib.workbook.book.boundary import AnswerError
from lib.workbook.grading.answers import is_array
from lib.workbook.grading.cases import current_case


class Wrong(AssertionError):
    """A wrong answer, with everything that its report shows.

    Attributes:
        problem: What is wrong, in a few words.
        rows: The (label, text) pairs that follow it.
        answer: What the learner's code returned, for comparison with what the mistakes return.
        case: The case that was being tested.
        gap: The largest difference between the answer and what was expected, where both are arrays.
    """

    def __init__(self, problem: str, rows: Sequence[tuple[str, str]] = (), answer: Any = None, read: str | None = None):
        super().__init__(problem)
        self.problem, self.rows, self.answer, self.read, self.case = problem, list(rows), answer, read, current_case()
        self.gap: float | None = None


def is_stub_error(error: BaseException | None) -> str | None:
    """The text of a stub's NotImplementedError, if there is one anywhere in the chain of causes."""
    seen = 0
    while error is not None and seen < 10:
        text = str(error.args[0]) if isinstance(error, NotImplementedError) and error.args else ""
        if re.match(r"Exercise \d+\.\d+", text):
            return text
        error, seen = error.__cause__ or getattr(error, "error", None) or error.__context__, seen + 1
    return None


# ---- expectations ----------------------------------------------------------------------------------------------------


def _tolerances(dtype: object, atol: float | None, rtol: float | None) -> tuple[float, float]:
    """The tolerances that a test names, or PyTorch's defaults for the dtype."""
    defaults = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
    defaults |= {"complex64": (1.3e-6, 1e-5), "complex128": (1e-7, 1e-7)}
    default_rtol, default_atol = defaults.get(str(dtype).removeprefix("torch."), (0.0, 0.0))
    return default_atol if atol is None else atol, default_rtol if rtol is None else rtol


def _a(words: str) -> str:
    """Words with their indefinite article: "an int", "a ValueError", "an OutOfBlocks", "a UserWarning"."""
    sounds_open = re.match(r"[aeio]|un|up|^u$", words, re.IGNORECASE) and not re.match(
        r"uni|one\b", words, re.IGNORECASE
    )
    return f"{'an' if sounds_open else 'a'} {words}"


def _item(name: str, key: object) -> str:
    """The place of a dict's entry; without a name, the keys are names themselves."""
    return f"{name}[{key!r}]" if name else str(key)


def _show(value: object) -> str:
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}i"
    if isinstance(value, float):
        return f"{value:.4g}" if not 1e-3 < abs(value) < 1e6 else f"{value:.6g}"
    return _cut(repr(value), 0)


def _cut(text: str, at: int) -> str:
    """A text of at most about a hundred characters that shows what stands at index ``at``."""
    if len(text) <= 100:
        return text
    if at < 45:
        return text[:60] + " … " + text[-30:]
    tail = text[at - 15 :]
    return text[:25] + " … " + (tail if len(tail) <= 65 else tail[:60] + " …")


def _show_both(actual: object, expected: object) -> tuple[str, str]:
    """Two values as text. Long texts are cut where their first difference still shows."""
    texts = repr(actual), repr(expected)
    if max(map(len, texts)) <= 100:
        return _show(actual), _show(expected)
    same = [a == b for a, b in zip(*texts, strict=False)]
    at = same.index(False) if False in same else len(same)
    return _cut(texts[0], at), _cut(texts[1], at)


def expect_close(
    actual: Any,
    expected: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    name: str = "out",
    answer: Any = None,
    read: str | None = None,
) -> None:
    """Expect numbers that are equal within a tolerance: tensors, arrays and floats, alone or in tuples,
    lists and dicts.

    Args:
        atol: Absolute tolerance; by default the dtype's.
        rtol: Relative tolerance; by default the dtype's.
        name: The value's name in the report; empty for a dict whose keys are the names of several values.
        answer: The learner's own output, if ``actual`` is only a property of it.
        read: Where the chapter explains it: a label such as "eq-rope-4", or "the contract, under Raises".

    Raises:
        Wrong: the type, then the shape, the dtype or a value differs.
    """
    answer = actual if answer is None else answer
    if isinstance(expected, Mapping):
        _same_type(actual, Mapping, "a dict", name, answer, read)
        if set(actual) != set(expected):
            keys = _show_both(sorted(actual), sorted(expected))
            raise Wrong("wrong keys", [("keys", f"{keys[0]}, expected {keys[1]}")], answer, read)
        for key in expected:
            place = _item(name, key)
            expect_close(actual[key], expected[key], atol=atol, rtol=rtol, name=place, answer=answer, read=read)
    elif isinstance(expected, tuple | list):
        _same_type(actual, tuple | list, _a(type(expected).__name__), name, answer, read)
        if len(actual) != len(expected):
            raise Wrong(
                "wrong length", [("length", f"{name} has {len(actual)}, expected {len(expected)}")], answer, read
            )
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            expect_close(a, e, atol=atol, rtol=rtol, name=f"{name}[{i}]", answer=answer, read=read)
    elif is_array(expected):
        _close_arrays(actual, expected, atol, rtol, name, answer, read)
    else:
        _close_numbers(actual, expected, atol, rtol, name, answer, read)


def _same_type(actual: Any, wanted: Any, described: str, name: str, answer: Any, read: str | None) -> None:
    if not isinstance(actual, wanted):
        none = "None (is a `return` missing, or was it never computed?)"
        given = none if actual is None else _typed(actual)
        raise Wrong("wrong type", [("type", f"{name} is {given}, expected {described}")], answer, read)


def _close_numbers(
    actual: Any, expected: Any, atol: float | None, rtol: float | None, name: str, answer: Any, read: str | None
) -> None:
    if is_array(actual) and getattr(actual, "ndim", 1) == 0:
        actual = actual.item()
    _same_type(actual, int | float | complex, "a number", name, answer, read)
    atol, rtol = _tolerances("float64", atol, rtol)
    both_nan = actual != actual and expected != expected
    infinite = math.isinf(abs(expected)) or math.isinf(abs(actual))
    near = actual == expected if infinite else abs(actual - expected) <= atol + rtol * abs(expected)
    if not (near or both_nan):
        shown = _apart(actual, expected)
        raise Wrong("wrong value", [("value", f"{name} = {shown[0]}, expected {shown[1]}")], answer, read)


def _close_arrays(
    actual: Any, expected: Any, atol: float | None, rtol: float | None, name: str, answer: Any, read: str | None
) -> None:
    import torch

    is_tensor = isinstance(expected, torch.Tensor)
    kind = f"{'a tensor' if is_tensor else 'an array'} of shape {tuple(expected.shape)}"
    _same_type(actual, type(expected) if not is_tensor else torch.Tensor, kind, name, answer, read)
    if tuple(actual.shape) != tuple(expected.shape):
        shapes = f"{name}.shape = {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        raise Wrong("wrong shape", [("shape", shapes)], answer, read)
    if actual.dtype != expected.dtype:
        dtypes = f"{name}.dtype = {actual.dtype}, expected {expected.dtype}"
        raise Wrong("wrong dtype (shape is right)", [("dtype", dtypes)], answer, read)
    if is_tensor and actual.device != expected.device:
        raise Wrong(
            "wrong device", [("device", f"{name} is on {actual.device}, expected {expected.device}")], answer, read
        )
    a, e = (torch.as_tensor(v).detach().cpu() for v in (actual, expected))
    atol, rtol = _tolerances(a.dtype, atol, rtol)
    wide = torch.complex128 if a.is_complex() else torch.float64 if a.is_floating_point() else a.dtype
    bad = ~torch.isclose(a.to(wide), e.to(wide), atol=atol, rtol=rtol, equal_nan=True)
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        at = f"{name}[{', '.join(map(str, place))}]" if place else name
        shown = _apart(a[place].item(), e[place].item())
        values = f"{at} = {shown[0]}, expected {shown[1]}   ({int(bad.sum())} of {bad.numel()} wrong)"
        wrong = Wrong("wrong values (shape and dtype are right)", [("first wrong", values)], answer, read)
        if answer is actual and a.is_floating_point():
            wrong.gap = float((a.to(wide) - e.to(wide))[bad].abs().max())
        raise wrong


def _apart(a: object, b: object) -> tuple[str, str]:
    """Two numbers as text, with enough digits to show that they differ."""
    short = _show(a), _show(b)
    return short if short[0] != short[1] else (repr(a), repr(b))


def expect_equal(actual: Any, expected: Any, *, name: str = "out", answer: Any = None, read: str | None = None) -> None:
    """Expect exactly equal Python values; the report shows the first difference.

    A float is no int, and a bool is no number, however deep in lists and dicts; an int may stand for a float.
    For the other arguments see ``expect_close``.

    Raises:
        Wrong: the type or a value differs.
    """
    answer = actual if answer is None else answer
    is_same_type = type(actual) is type(expected) or not isinstance(expected, bool | str | bytes)
    if actual == expected and is_same_type:
        for place, a, e in _other_kinds(actual, expected, name):
            raise Wrong("wrong type", [("type", f"{place} is {_typed(a)}, expected {_typed(e)}")], answer, read)
        return
    if not _stands_for(actual, expected):
        _same_type(actual, type(expected), _typed(expected), name, answer, read)
    place, a, e = _first_difference(actual, expected, name)
    raise Wrong("wrong result", [("first wrong", f"{place} = {a}, expected {e}")], answer, read)


def _typed(value: object) -> str:
    """A value with its type, which the text shows too: 3.0, not 3, for a float."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e6
    return f"{_a(type(value).__name__)}: {value if whole else _show(value)}"


def _stands_for(actual: Any, expected: Any) -> bool:
    """Whether a value counts as a number of the kind expected: NumPy's and PyTorch's do, and an int as a float."""
    kinds = []
    for value in (actual, expected):
        value = value.item() if is_array(value) and getattr(value, "ndim", 1) == 0 else value
        kinds.append(next((kind for kind in (bool, int, float) if isinstance(value, kind)), None))
    return kinds[1] is not None and (kinds[0] is kinds[1] or kinds == [int, float])


def _other_kinds(actual: Any, expected: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The places of equal values at which a number is of another kind than expected, with both numbers."""
    if isinstance(expected, Mapping):
        for key in expected:
            yield from _other_kinds(actual[key], expected[key], _item(name, key))
    elif isinstance(expected, tuple | list):
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            yield from _other_kinds(a, e, f"{name}[{i}]")
    elif isinstance(expected, int | float) and not _stands_for(actual, expected):
        yield name, actual, expected


def _first_difference(actual: Any, expected: Any, name: str) -> tuple[str, str, str]:
    if isinstance(expected, Mapping):
        for key in expected:
            if key not in actual:
                other = next((f" (it has the key {_show(k)})" for k in actual if k not in expected), "")
                return _item(name, key), f"missing{other}", _show(expected[key])
            if actual[key] != expected[key]:
                return _first_difference(actual[key], expected[key], _item(name, key))
        extra = next(key for key in actual if key not in expected)
        return _item(name, extra), _show(actual[extra]), "no such key"
    if (
        isinstance(expected, str | bytes)
        and isinstance(actual, type(expected))
        and max(len(actual), len(expected)) > 40
    ):
        at = next(
            (i for i, (a, e) in enumerate(zip(actual, expected, strict=False)) if a != e),
            min(len(actual), len(expected)),
        )
        start = max(0, at - 10)
        return f"{name}[{at}:]", f"…{actual[start : at + 20]!r}", f"…{expected[start : at + 20]!r}"
    if isinstance(expected, tuple | list) and isinstance(actual, tuple | list):
        for i, (a, e) in enumerate(zip(actual, expected, strict=False)):
            if a != e:
                place, a_shown, e_shown = _first_difference(a, e, f"{name}[{i}]")
                both = _show_both(actual, expected)
                whole = f"   (whole: {both[0]}, expected {both[1]})" if len(expected) <= 12 else ""
                return place, a_shown, e_shown + ("" if "(whole" in e_shown else whole)
        if len(actual) == len(expected):
            return name, _typed(actual), _typed(expected)
        both = _show_both(actual, expected)
        return f"len({name})", f"{len(actual)}: {both[0]}", f"{len(expected)}: {both[1]}"
    numbers = isinstance(actual, int | float) and isinstance(expected, int | float)
    return name, *(_apart(actual, expected) if numbers else _show_both(actual, expected))


def expect_true(condition: object, problem: str, *, answer: Any = None, read: str | None = None) -> None:
    """Expect that a condition holds; if it does not, ``problem`` is the report's first line.

    Raises:
        Wrong: ``condition`` is false.
    """
    if not condition:
        raise Wrong(problem, (), answer, read)


@contextmanager
def expect_raises(
    error: type[BaseException], *mentions: str | tuple[str, ...], read: str | None = None
) -> Iterator[None]:
    """Expect the block to raise ``error`` with a message that contains every one of ``mentions``; a tuple stands for
    any one of its strings.

    Raises:
        Wrong: the block raises nothing, another error, or a message that does not say enough.
    """
    every = [(mention,) if isinstance(mention, str) else mention for mention in mentions]
    words = " and ".join(" or ".join(map(repr, any_of)) for any_of in every)
    wanted = error.__name__ + (f" that mentions {words}" if mentions else "")
    try:
        yield
    except NotImplementedError as caught:
        if is_stub_error(caught) or not issubclass(error, NotImplementedError):
            raise
        _check_message(caught, every, wanted, read)
    except AnswerError:
        raise
    except error as caught:
        _check_message(caught, every, wanted, read)
    except Exception as caught:
        got = f"{type(caught).__name__}: {caught}"
        raise Wrong("wrong error", [("raised", got), ("expected", _a(wanted))], got, read) from caught
    else:
        raise Wrong("no error", [("raised", "nothing"), ("expected", _a(wanted))], "no error", read)


def _check_message(caught: BaseException, every: list[tuple[str, ...]], wanted: str, read: str | None) -> None:
    if not all(any(mention in str(caught) for mention in any_of) for any_of in every):
        got = f"{type(caught).__name__}: {caught}"
        raise Wrong("the error does not say enough", [("raised", got), ("expected", _a(wanted))], got, read) from caught
