"""The expectations that tests are written with: what passes, and what each failure says."""

import itertools
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lib.workbook.book.catalog import BookError
from lib.workbook.checks import diagnosis
from lib.workbook.checks.alarm import TimeLimit, alarm
from lib.workbook.checks.diagnosis import Trials, diagnose
from lib.workbook.grading import Wrong, expect_close, expect_equal, expect_raises, expect_true, firsts, graded
from lib.workbook.grading.answers import further_apart, same_answer
from lib.workbook.grading.firsts import NOT_COMPARED, PASSED, VARIES, are_like, either, sketch
from lib.workbook.grading.likeness import FEW, Outcome, looks_like
from lib.workbook.grading.mistakes import Mistake


def said(call, *arguments, **options) -> tuple[str, dict]:
    with pytest.raises(Wrong) as caught:
        call(*arguments, **options)
    return caught.value.problem, dict(caught.value.rows)


def test_close_looks_at_type_then_shape_then_dtype_then_values():
    expected = torch.ones(2, 2)
    assert said(expect_close, None, expected)[1]["type"].startswith("out is None (is a `return` missing, or")
    assert said(expect_close, [1.0], expected)[0] == "wrong type"
    assert said(expect_close, torch.ones(4), expected)[1] == {"shape": "out.shape = (4,), expected (2, 2)"}
    assert said(expect_close, expected.double(), expected)[0] == "wrong dtype (shape is right)"
    problem, rows = said(expect_close, torch.tensor([[1.0, 1.0], [3.0, 1.0]]), expected)
    assert problem == "wrong values (shape and dtype are right)"
    assert rows == {"first wrong": "out[1, 0] = 3, expected 1   (1 of 4 wrong)"}


@pytest.mark.parametrize("value", [torch.tensor([float("nan"), 1.0]), np.array([1.0, 2.0]), 3.5, {"a": [1.0, (2.0,)]}])
def test_close_takes_what_is_equal(value):
    expect_close(value, value)


def test_close_names_the_place_inside_a_structure():
    assert said(expect_close, {"a": [1.0, 2.5]}, {"a": [1.0, 2.0]})[1] == {"value": "out['a'][1] = 2.5, expected 2"}
    assert said(expect_close, [1.0], [1.0, 2.0])[1] == {"length": "out has 1, expected 2"}
    assert said(expect_close, {"b": 1.0}, {"a": 1.0})[0] == "wrong keys"


def test_close_shows_as_many_digits_as_it_takes():
    a, b = torch.tensor([0.1], dtype=torch.float64), torch.tensor([0.1 + 1e-6], dtype=torch.float64)
    text = said(expect_close, a, b)[1]["first wrong"]
    assert text.startswith("out[0] = 0.1, expected 0.100001")


def test_numbers_that_look_alike_are_shown_with_all_their_digits():
    text = said(expect_close, 175.00096, 175.001135)[1]["value"]
    assert text == "out = 175.00096, expected 175.001135"
    text = said(expect_equal, {"a": 175.00096}, {"a": 175.001135})[1]["first wrong"]
    assert text == "out['a'] = 175.00096, expected 175.001135"


def test_an_article_suits_its_word():
    class OutOfBlocks(RuntimeError):
        """An error whose name begins with a vowel."""

    def raised(wanted, *mentions) -> str:
        with pytest.raises(Wrong) as caught, expect_raises(wanted, *mentions):
            pass
        return dict(caught.value.rows)["expected"]

    assert raised(OutOfBlocks, "2") == "an OutOfBlocks that mentions '2'"
    wanted = {ValueError: "a ValueError", IndexError: "an IndexError", UserWarning: "a UserWarning"}
    wanted |= {UnboundLocalError: "an UnboundLocalError", UnicodeError: "a UnicodeError"}
    assert {error: raised(error) for error in wanted} == wanted
    assert said(expect_equal, 1, [1])[1]["type"] == "out is an int: 1, expected a list: [1]"
    assert said(expect_equal, [1], 1)[1]["type"] == "out is a list: [1], expected an int: 1"


def test_keys_are_names_where_there_is_no_name():
    found, wanted = {"free blocks": 3, "lengths": [4, 4]}, {"free blocks": 3, "lengths": [4, 5]}
    assert said(expect_equal, found, wanted, name="")[1]["first wrong"].startswith("lengths[1] = 4, expected 5")
    assert said(expect_close, {"x's gradient": 1.0}, {"x's gradient": 2.0}, name="")[1]["value"] == (
        "x's gradient = 1, expected 2"
    )


def test_equal_shows_the_first_difference():
    assert said(expect_equal, [1, 2, 4], [1, 2, 3])[1]["first wrong"].startswith("out[2] = 4, expected 3")
    assert said(expect_equal, {"a": 1}, {"a": 1, "b": 2})[1]["first wrong"] == "out['b'] = missing, expected 2"
    assert said(expect_equal, "x" * 60 + "y", "x" * 60 + "z")[1]["first wrong"].startswith("out[60:]")
    nested = said(expect_equal, [[1, 2]], [(1, 2)])[1]["first wrong"]
    assert nested.startswith("out[0] = a list: [1, 2], expected a tuple: (1, 2)")
    assert said(expect_equal, 1, True)[0] == "wrong type"
    for answer, wanted, text in (
        (3.0, 3, "out is a float: 3.0, expected an int: 3"),
        (3.0, 4, "out is a float: 3.0, expected an int: 4"),
        (True, 1, "out is a bool: True, expected an int: 1"),
        (True, 1.0, "out is a bool: True, expected a float: 1.0"),
        ([1, (2.0,)], [1, (2,)], "out[1][0] is a float: 2.0, expected an int: 2"),
        ({"a": [0]}, {"a": [False]}, "out['a'][0] is an int: 0, expected a bool: False"),
        (torch.tensor(3.0), 3, "out is a Tensor: tensor(3.), expected an int: 3"),
        ([np.float64(2)], [2], "out[0] is a float64: 2.0, expected an int: 2"),
    ):
        assert said(expect_equal, answer, wanted) == ("wrong type", {"type": text})
    for number, same in ((3, 3.0), (np.int64(3), 3), (torch.tensor(3), 3), ([1, {"a": 2}], [1.0, {"a": 2.0}])):
        expect_equal(number, same)
    assert said(expect_equal, 4, 3.0)[1]["first wrong"] == "out = 4, expected 3"  # no fault of its type
    assert said(expect_equal, np.int64(4), 3)[1]["first wrong"] == "out = np.int64(4), expected 3"


def test_two_long_values_are_cut_where_they_differ():
    """Of a long list, of one that is too long, of a key and of an item with a long repr, both sides show the place."""
    found = [[("send", i, j) for j in range(3)] for i in range(6)]
    wanted = [*found[:3], [("send", 3, 0)] * 3, *found[4:]]
    for actual, expected in ((found, wanted), ([*range(70)], [*range(71)]), ([[8] * 50, *found], [[8] * 50, *wanted])):
        text = said(expect_equal, actual, expected)[1]["first wrong"]
        left, right = re.search(r"(?:whole: |len\(out\) = \d+: )(.*), expected (?:\d+: )?(.*?)\)?$", text).groups()
        assert left != right, text
        assert max(len(left), len(right)) <= 100
    keys = {f"layers.{i}.weight": 0 for i in range(20)}
    text = said(expect_close, keys, keys | {"layers.19.bias": 0})[1]["keys"]
    assert "layers.19.bias" in text.partition(", expected ")[2]


def test_raises_wants_the_type_and_the_mentions():
    with expect_raises(ValueError, "7", ("seven", "7")):
        raise ValueError("7 is odd")
    with pytest.raises(Wrong, match="does not say enough"), expect_raises(ValueError, "7"):
        raise ValueError("odd")
    with pytest.raises(Wrong, match="wrong error"), expect_raises(ValueError):
        raise KeyError("7")
    with pytest.raises(Wrong, match="no error"), expect_raises(ValueError):
        pass
    with pytest.raises(NotImplementedError), expect_raises(RuntimeError):
        raise NotImplementedError("Exercise 1.1: write it")


def test_true_says_its_sentence():
    expect_true(True, "never said")
    assert said(expect_true, False, "3 is odd")[0] == "3 is odd"


def test_answers_are_compared_as_numbers():
    assert same_answer(torch.tensor([1.0, float("nan")]), torch.tensor([1.0 + 1e-7, float("nan")]))
    assert not same_answer(torch.ones(2), torch.ones(3))
    assert same_answer({"a": (1, "x")}, {"a": (1, "x")})
    assert not same_answer(1, 1.0)
    assert not same_answer(None, None)


def test_a_mistake_that_differs_by_as_much_as_the_answer_is_not_the_same():
    assert further_apart(torch.tensor([1.0]), torch.tensor([1.0 + 1e-5]), gap=2e-5)
    assert not further_apart(torch.tensor([2.0], requires_grad=True), torch.tensor([2.0]), gap=1.0)
    assert not further_apart(torch.tensor([2.0]), torch.tensor([2.0 + 1e-6]), gap=1.0)
    special = torch.tensor([2.0, -torch.inf, torch.nan])
    assert not further_apart(special, special.clone(), gap=1.0)
    assert further_apart(special, torch.tensor([2.0, torch.inf, torch.nan]), gap=1.0)


def failed(answer, problem="wrong values", case="n=3") -> Outcome:
    error = Wrong(problem, [("first wrong", "out[0] = 1.25")], answer)
    error.case = case
    return Outcome(error, case)


def test_failures_that_are_alike_have_like_sketches():
    answer: dict[str, Any] = {
        "x": torch.linspace(-1, 1, 50),
        "n": (3, [0.5, None]),
        "z": torch.tensor([1 + 2j, float("nan")]),
    }
    noisy = {**answer, "x": answer["x"] * (1 + 1e-5)}
    assert failed(noisy).is_like(failed(answer))
    assert are_like(sketch(failed(answer)), sketch(failed(noisy)))
    for other in (
        {**answer, "x": answer["x"].flip(0)},
        {**answer, "x": answer["x"].double()},
        {**answer, "n": (4, [0.5])},
    ):
        assert not are_like(sketch(failed(answer)), sketch(failed(other)))
    nothing = failed(None), failed(None, case="n=4"), failed(None, "wrong shape"), Outcome(ValueError("0x7f"), "n=3")
    for a, b in itertools.combinations([*nothing, Outcome(TypeError("0x7f"), "n=3")], 2):
        assert not are_like(sketch(a), sketch(b))
    assert are_like(sketch(Outcome(ValueError("at 0x7f"))), sketch(Outcome(ValueError("at 0x80"))))
    assert not are_like("-", "-")


def test_ways_to_fail_that_chance_decides_are_recorded_side_by_side():
    on_ranks = either(["ab 1.0", "cd 2.0", "ab 1.001"], most=4)
    assert on_ranks == "ab 1.0 | cd 2.0"
    assert are_like(on_ranks, "cd 2.0")
    assert not are_like(on_ranks, "cd 1.0")
    assert either(["ab 1.0", "cd 2.0"], most=1) == either(["ab 1.0", "-"], most=4) == VARIES
    assert are_like(VARIES, "cd 2.0")
    assert either(["ab:1 1.0", "ab:1 1.00001"], most=4) == "ab:1 1.0"
    assert either(["ab:1 1.0", "ab:2 1.0"], most=4) == either(["ab:1 1.0", "ab:1 1.001"], most=4) == "ab 1.0"


def test_a_record_rules_out_what_the_answer_has_passed_or_not_reached(monkeypatch):
    known = [Mistake("rope", "f", text, f"tests.chapter_02.mistakes:f:{text}", dict) for text in "abcdefg"]
    like, other = sketch(failed(torch.ones(3))), sketch(failed(torch.zeros(3)))
    second = {"b": like, "c": other, "f": VARIES, "g": NOT_COMPARED}
    record = {"f": {"test_1": {"a": like}, "test_2": second, "test_3": {"d": VARIES}}}
    monkeypatch.setattr(firsts, "recorded", lambda module: record)
    left = lambda *ruled_out: [
        m.sentence for m in firsts.candidates(known, "test_2", failed(torch.ones(3)), {*ruled_out})
    ]
    assert left("test_1", "test_3") == ["b", "e", "f"]  # the record says nothing of e
    assert left("test_3") == ["a", "b", "e", "f"]  # test_1 was not run: the answer may fail it


def test_a_record_names_a_failure_alone_only_if_it_leaves_nothing_open(monkeypatch):
    known = [Mistake("rope", "f", text, f"tests.chapter_02.mistakes:f:{text}", dict) for text in "abc"]
    ones, nearly = torch.ones(3), torch.ones(3) + torch.tensor([0.0, 0.0, 0.01])
    far, near = failed(ones), failed(nearly)
    assert are_like(sketch(far), sketch(near))
    candidates = lambda outcome: firsts.candidates(known, "test_1", outcome, set())

    def named(outcome: Outcome, **recorded: str) -> str:
        monkeypatch.setattr(firsts, "recorded", lambda module: {"f": {"test_1": recorded}})
        return firsts.settle(candidates(outcome), "test_1", outcome, [], lambda check: outcome)[1]

    others = {"b": sketch(near), "c": sketch(failed(ones, "wrong dtype"))}
    assert named(far, a=sketch(far), **others) == "a"
    assert named(failed(ones * (1 + 1e-5)), a=sketch(far), **others) == "a"
    assert not named(failed(ones * 1.001), a=sketch(far), **others)
    assert not named(far, **others)  # how a fails is not known
    assert not named(far, a=sketch(far), **{**others, "b": sketch(far)})
    for open_ in (re.sub(r":\w+", "", sketch(near)), f"{sketch(near)} | {others['c']}", VARIES):
        assert not named(far, a=sketch(far), **{**others, "b": open_})
    assert named(far, a=f"{sketch(far)} | {sketch(near)}", b="ab:1", c="cd:1") == "a"
    right, wrong = Outcome(ValueError("one"), "n=3"), Outcome(ValueError("two"), "n=3")
    assert named(right, a=sketch(right), b=sketch(wrong), c="cd:1") == "a"
    assert not named(Outcome(ValueError("three"), "n=3"), a=sketch(right), b=sketch(wrong), c="cd:1")
    closer, other = failed(ones), failed(ones)
    closer.error.gap, other.error.gap = 1e-5, 2e-5  # type: ignore[union-attr]
    assert not named(closer, a=sketch(other), b="ab:1", c="cd:1")
    other.error.gap, other.error.rows = None, [("value", "out = 1.00002, expected 1")]  # type: ignore[union-attr]
    assert not named(other, a=sketch(far), b="ab:1", c="cd:1")


def test_of_mistakes_that_fail_alike_one_run_of_the_answer_names_one(monkeypatch):
    known = [Mistake("rope", "f", text, f"tests.chapter_02.mistakes:f:{text}", dict) for text in "abcd"]
    seen, other, third = failed(torch.ones(3)), failed(torch.zeros(3)), failed(torch.full((3,), 2.0))
    like, first, second = sketch(seen), SimpleNamespace(name="test_2"), SimpleNamespace(name="test_3")
    record = {
        "test_1": {"a": like, "b": like, "c": like, "d": VARIES},
        "+ test_2": {"a": sketch(other), "b": PASSED, "c": PASSED, "d": PASSED},
        "+ test_3": {"b": PASSED, "c": sketch(other), "d": sketch(third)},
    }
    monkeypatch.setattr(firsts, "recorded", lambda module: {"f": record})
    runs: list[str] = []

    def settled(**ends: Outcome) -> tuple[str, str]:
        run = lambda check: runs.append(check.name) or ends[check.name]
        left, said = firsts.settle(known, "test_1", seen, [first, second], run)
        return "".join(m.sentence for m in left), said

    passed = Outcome(None)
    assert settled(test_2=other) == ("a", "a")
    assert runs == ["test_2"]
    assert settled(test_2=passed, test_3=passed) == ("b", "b")
    assert settled(test_2=passed, test_3=other) == ("c", "c")
    assert settled(test_2=passed, test_3=third) == ("abcd", "")  # d alone is left, and nothing says that it fails so
    assert settled(test_2=third) == ("abcd", "")  # none ends it so
    del record["+ test_3"]
    assert settled(test_2=passed) == ("bcd", "")
    assert firsts.first_failures(known)[known[0].key] == ("test_1", like)


def test_on_ranks_a_mistake_is_named_without_a_run(monkeypatch):
    known, seen = [Mistake("rope", "f", "a", "tests.chapter_02.mistakes:f:a", dict)], failed(torch.ones(3))
    monkeypatch.setattr(firsts, "recorded", lambda module: {"f": {"test_1": {"a": sketch(seen)}}})

    def run(check: pytest.Function) -> Outcome:
        raise RuntimeError("a run")

    def said(*fixtures: str) -> str:
        found = SimpleNamespace(name="test_1", nodeid="x", fixturenames=fixtures, get_closest_marker=lambda name: None)
        check = cast(pytest.Function, found)
        return diagnose(check, seen, [check], set(), known, run)[0]

    assert said("ranks") == "a"
    with pytest.raises(RuntimeError, match="a run"):
        said()


@pytest.mark.parametrize("is_telling", [True, False])
def test_a_mistake_that_the_record_knows_is_named_when_its_run_takes_too_long(monkeypatch, is_telling):
    """But not by an exception, which says less than the answer's own numbers."""
    known = [Mistake("rope", "f", "a", "tests.chapter_02.mistakes:f:a", lambda: {})]
    seen = failed(torch.ones(3)) if is_telling else Outcome(ValueError("one"), "n=3")
    monkeypatch.setattr(firsts, "recorded", lambda module: {"f": {"test_1": {"a": sketch(seen)}}})
    monkeypatch.setattr(diagnosis, "DIAGNOSIS_S", 0.1)
    monkeypatch.setattr(diagnosis, "CONFIRMED_S", 0.02)

    def run(check: pytest.Function) -> Outcome:
        time.sleep(0.2)
        return Outcome(TimeLimit("over"))

    found = SimpleNamespace(name="test_1", nodeid="x", fixturenames=(), get_closest_marker=lambda name: None)
    check = cast(pytest.Function, found)
    assert diagnose(check, seen, [check], set(), known, run)[0] == ("a" if is_telling else "")


@pytest.mark.parametrize("is_telling", [True, False])
def test_fewer_runs_confirm_what_the_record_says_too(monkeypatch, is_telling):
    known = [Mistake("rope", "f", "a", "tests.chapter_02.mistakes:f:a", lambda: {})]
    seen = failed(torch.ones(3)) if is_telling else Outcome(ValueError("one"), "n=3")
    monkeypatch.setattr(firsts, "recorded", lambda module: {"f": {"1": {"a": sketch(seen)}}})
    runs: list[str] = []

    def run(check: pytest.Function) -> Outcome:
        runs.append(check.name)
        return seen if check.name == "1" else Outcome(None)

    make = lambda name: SimpleNamespace(name=name, nodeid=name, fixturenames=(), get_closest_marker=lambda name: None)
    checks = [cast(pytest.Function, make(str(n))) for n in range(20)]
    assert diagnose(checks[1], seen, checks, {"0"}, known, run)[0] == "a"
    last = 1 + (FEW if is_telling else 11)
    assert runs == ["1", *(str(n) for n in range(2, last + 1) for _ in range(2))]


def test_a_sentence_is_certain_once_one_mistake_alone_agrees():
    a, b = (SimpleNamespace(key=key, sentence=key) for key in "ab")
    outcomes = {"a": [1, 2, 3], "b": [1, 5, 3]}
    told: list[str] = []
    run = lambda key, check: failed(torch.tensor([float(outcomes[key][check])]))
    said = looks_like(
        0,
        run("a", 0),
        [1, 2],
        [a, b],
        lambda check: run("a", check),
        lambda m, check: run(m.key, check),
        5,
        told.append,
    )
    assert (said, told) == ("a", ["", "a"])


def test_no_run_is_begun_that_would_end_too_late():
    trials, check = Trials(lambda check: Outcome(None), limit_s=9.0), cast(pytest.Function, SimpleNamespace(nodeid="a"))
    trials.longest_s = 5.0
    assert trials.of_answer(check).passed
    trials.hurry("this one")  # 0.6 s are left
    with pytest.raises(TimeLimit):
        trials.of_answer(cast(pytest.Function, SimpleNamespace(nodeid="b")))


def test_time_that_is_over_is_no_outcome():
    def late(check: Any) -> Outcome:
        time.sleep(0.05)
        return Outcome(TimeLimit("over"))

    trials, check = Trials(late, limit_s=0.02), cast(pytest.Function, SimpleNamespace(nodeid="check"))
    with pytest.raises(TimeLimit):
        trials.of_answer(check)
    trials.hurry("this one")
    assert (trials.seen, trials.certain) == ({}, "this one")


def test_an_unknown_chapter_is_named():
    with pytest.raises(BookError, match="'roop'"):
        graded("roop")


def test_a_clock_that_a_check_winds_does_not_end_the_time_of_an_outer_limit(monkeypatch):
    with alarm(60):
        with monkeypatch.context() as patch, alarm(60):
            patch.setattr(time, "monotonic", itertools.count(1_000_000).__next__)
        time.sleep(0.1)  # the outer limit used to ring after 0.01 s, as a fixture put the clock right
