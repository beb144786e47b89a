"""How sure a score is, graded: intervals that cover as often as they claim, answers in one form, and calibration."""

import math
import random
from statistics import NormalDist

import numpy as np
import pytest
import torch

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

ev = graded("evaluation")

WILSON, PAIRED, CLUSTERED, CENTERED, _, CALIBRATION = (f"eq-evaluation-{n}" for n in range(4, 10))
ARGS, RETURNS, RAISES = (f"the contract, under {head}" for head in ("Args", "Returns", "Raises"))
Z95 = NormalDist().inv_cdf(0.975)


# ---- wilson_interval -------------------------------------------------------------------------------------------------


def test_wilson_interval_by_hand():
    case("27 of 100: around 0.2785, which is nearer to a half than 0.27")
    middle = (0.27 + Z95**2 / 200) / (1 + Z95**2 / 100)
    half = Z95 * math.sqrt(0.27 * 0.73 / 100 + Z95**2 / 40_000) / (1 + Z95**2 / 100)
    expect_close(ev.wilson_interval(27, 100), (middle - half, middle + half), rtol=1e-12, atol=0, read=WILSON)
    case("1 of 3, level 0.5")
    z = NormalDist().inv_cdf(0.75)
    middle = (1 / 3 + z * z / 6) / (1 + z * z / 3)
    half = z / (1 + z * z / 3) * math.sqrt(2 / 27 + z * z / 36)
    expect_close(ev.wilson_interval(1, 3, 0.5), (middle - half, middle + half), rtol=1e-12, atol=0, read=ARGS)


@pytest.mark.parametrize("n", [1, 7, 500, 1319])
def test_wilson_interval_at_its_ends(n):
    case(f"0 and {n} of {n}: exactly 0.0 and 1.0, and mirror images")
    low, high = ev.wilson_interval(0, n)
    expect_equal(low, 0.0, name="low", read=RETURNS)
    mirrored = ev.wilson_interval(n, n)
    expect_equal(mirrored[1], 1.0, name="high", read=RETURNS)
    expect_close(1 - mirrored[0], high, rtol=1e-9, name="1 - low", read=WILSON)
    expect_close(high, Z95**2 / (n + Z95**2), rtol=1e-9, name="high of 0", read=WILSON)


def test_wilson_interval_refuses():
    for n_correct, n in ((-1, 5), (6, 5), (0, 0)):
        case(f"{n_correct} of {n}")
        with expect_raises(ValueError, f"{n_correct}", f"{n}", read=RAISES):
            ev.wilson_interval(n_correct, n)


@oracle
def test_wilson_interval_is_scipys():
    from scipy.stats import binomtest

    for n_correct, n, level in ((0, 9, 0.9), (3, 9, 0.95), (9, 9, 0.99), (412, 1319, 0.95), (1, 1, 0.5)):
        case(f"{n_correct} of {n}, level {level}, against scipy.stats.binomtest")
        theirs = binomtest(n_correct, n).proportion_ci(level, method="wilson")
        expect_close(
            ev.wilson_interval(n_correct, n, level), (float(theirs.low), float(theirs.high)), rtol=1e-9, read=WILSON
        )


# ---- paired_difference -----------------------------------------------------------------------------------------------


def test_paired_difference_by_hand():
    case("d = 1, 0, 1, -1: mean 1/4, squares sum to 11/4, SE^2 = 11/48")
    a, b = [1, 1, 1, 0], [0, 1, 0, 1]
    error = math.sqrt(11 / 48)
    expected = (0.25, error, 0.25 - Z95 * error, 0.25 + Z95 * error)
    found = ev.paired_difference(a, b)
    expect_close(found, expected, rtol=1e-12, read=PAIRED)
    kinds = [type(x).__name__ for x in found]
    expect_equal(kinds, ["float"] * 4, name="types", answer=found, read=RETURNS)
    case("the same in clusters {0, 2} and {1, 3}: products 2 (3/4)(3/4) and 2 (-1/4)(-5/4), over 16")
    error = math.sqrt(11 / 48 + (2 * 9 / 16 + 2 * 5 / 16) / 16)
    expected = (0.25, error, 0.25 - Z95 * error, 0.25 + Z95 * error)
    expect_close(ev.paired_difference(a, b, ["x", "y", "x", "y"]), expected, rtol=1e-12, read=CLUSTERED)
    case("two questions are enough: d = 1, 0")
    expected = (0.5, 0.5, 0.5 - Z95 / 2, 0.5 + Z95 / 2)
    expect_close(ev.paired_difference([1, 0], [0, 0]), expected, rtol=1e-12, read=PAIRED)
    case("level 0.5")
    z = NormalDist().inv_cdf(0.75)
    found = ev.paired_difference(a, b, level=0.5)
    expect_close(found[2:], (0.25 - z * math.sqrt(11 / 48), 0.25 + z * math.sqrt(11 / 48)), rtol=1e-12, read=ARGS)


def test_paired_difference_of_clusters():
    rng = np.random.default_rng(0)
    a, b = rng.random(31), rng.random(31)
    d = a - b
    d = d - d.mean()
    labels = [(i * 7) % 5 for i in range(31)]
    together = sum(d[i] * d[j] for i in range(31) for j in range(31) if i != j and labels[i] == labels[j])
    error = math.sqrt((d**2).sum() / (31 * 30) + together / 31**2)
    for name, given in (("numbers", labels), ("mixed", ["a", None, (1, 2), 3.5, frozenset()])):
        case(f"31 questions in 5 clusters in no order, labels: {name}")
        given = given if name == "numbers" else [given[i] for i in labels]
        found = ev.paired_difference(a.tolist(), b.tolist(), given)
        expect_close(found[:2], (float((a - b).mean()), error), rtol=1e-10, read=CLUSTERED)
    case("clusters of one question each change nothing")
    alone = ev.paired_difference(a.tolist(), b.tolist())
    expect_close(ev.paired_difference(a.tolist(), b.tolist(), list(range(31))), alone, rtol=1e-12, read=RETURNS)
    case("clusters {0, 1} and {2, 3} whose two differences cancel: the variance cannot be negative")
    found = ev.paired_difference([1, -1, 1, -1], [0, 0, 0, 0], [0, 0, 1, 1])
    expect_close(found[:2], (0.0, math.sqrt(4 / 12 - 4 / 16)), rtol=1e-9, read=CLUSTERED)


def test_paired_difference_refuses():
    case("3 and 2 scores")
    with expect_raises(ValueError, "3", "2", read=RAISES):
        ev.paired_difference([1, 0, 1], [0, 0])
    case("3 scores and 2 labels")
    with expect_raises(ValueError, "3", "2", read=RAISES):
        ev.paired_difference([1, 0, 1], [0, 0, 0], ["a", "a"])
    for n in (0, 1):
        case(f"{n} questions")
        with expect_raises(ValueError, f"{n}", read=RAISES):
            ev.paired_difference([1.0] * n, [0.0] * n)


def test_paired_difference_covers_as_often_as_it_claims():
    case("400 simulated pairs of models on 60 questions in 20 clusters: 80 % intervals")
    rng, covered = np.random.default_rng(1), 0
    labels = [i // 3 for i in range(60)]
    for _ in range(400):
        shared = np.repeat(rng.normal(size=20), 3)
        d = 0.3 + shared + rng.normal(size=60)
        _, _, low, high = ev.paired_difference(d.tolist(), [0.0] * 60, labels, 0.8)
        covered += low <= 0.3 <= high
    # 20 clusters make the estimate of the error a little too small; 0.74 to 0.86 is three standard errors wide
    expect_true(0.74 <= covered / 400 <= 0.86, f"{covered / 400:.3f} of the intervals hold the truth", read=CLUSTERED)


# ---- core_score ------------------------------------------------------------------------------------------------------


def test_core_score_by_hand():
    case("0.4 over 0.25, 0.5 over 0, 0.1 over 0.2")
    expected = {"arc": 0.2, "copy": 0.5, "bbq": -0.125}
    found = ev.core_score({"arc": 0.4, "copy": 0.5, "bbq": 0.1}, {"bbq": 0.2, "arc": 0.25, "copy": 0.0})
    expect_close(found[1], expected, rtol=1e-12, name="", answer=found, read=CENTERED)
    expect_close(found[0], 0.575 / 3, rtol=1e-12, answer=found, read=CENTERED)


def test_core_score_refuses():
    case("one task in each of the two only")
    with expect_raises(ValueError, "lambada", "boolq", read=RAISES):
        ev.core_score({"arc": 0.5, "lambada": 0.1}, {"arc": 0.25, "boolq": 0.6})
    for baseline in (1.0, -0.1, math.nan):
        case(f"baseline {baseline}")
        with expect_raises(ValueError, "squad", read=RAISES):
            ev.core_score({"squad": 0.5, "arc": 0.5}, {"arc": 0.25, "squad": baseline})


# ---- extract_answer --------------------------------------------------------------------------------------------------

NUMBERS = {
    "so 3 + 4 = 7": "7",
    "it costs $1,234.50.": "1234.5",
    "1,234,567 people": "1234567",
    "items 1,2,3": "3",
    "a bill of 1,2345": "2345",
    "12345,678": "678",
    "the answer is -5": "-5",
    "between 3-5": "5",
    "x-3": "3",
    "x_-3": "3",
    "f(2)-3": "3",
    "a[2]-3": "3",
    "about .-3": "3",
    "= -0.50": "-0.5",
    "(-3)": "-3",
    "-1,000": "-1000",
    "- 4": "4",
    "007": "7",
    "0.0": "0",
    "-0": "0",
    "-0.00": "0",
    "10": "10",
    "10.0": "10",
    "100.10": "100.1",
    "0.05": "0.05",
    "0.00001": "0.00001",
    "12345678901234567890": "12345678901234567890",
    "It is 12.": "12",
    "7 of 9, then 8 and nothing": "8",
    "12 and ٣": "12",
    "room b12": "12",
}
LETTERS = {
    "B": "B",
    "D": "D",
    " B\n": "B",
    "(B": "B",
    "(B)": "B",
    "B.": "B",
    "B:": "B",
    "B) because 2 > 1": "B",
    "A. Paris\nnot B": "A",
    "B)Paris": None,
    "A cat sat there": None,
    "b": None,
    "F": None,
    "E": None,
    "The answer is C.": "C",
    "Answer: D": "D",
    "ANSWER (A)": "A",
    "answer [B], I think": "B",
    "The answer is A. No, the answer is B": "B",
    "answer: B, as any answer must be": "B",
    "the answer is Dublin": None,
    "answerA": None,
    "the answer is: C": None,
    "the answer is c": None,
    "I choose C": None,
    "": None,
}


def test_extract_answer_of_numbers():
    for text, expected in NUMBERS.items():
        case(f"{text!r}")
        expect_equal(ev.extract_answer(text), expected, read=RETURNS)
    for text in ("", "no number", "٣", "-", "."):
        case(f"{text!r} has no number")
        expect_true(ev.extract_answer(text) is None, "expected None", answer=ev.extract_answer(text), read=RETURNS)


def test_extract_answer_of_letters():
    for text, expected in LETTERS.items():
        case(f"{text!r}")
        found = ev.extract_answer(text, "letter")
        expect_true(found == expected, f"got {found!r}, expected {expected!r}", answer=found, read=RETURNS)
    for n, expected in ((2, None), (5, "E")):
        case(f"'(E) x' and 'answer: E' with n_choices = {n}")
        for text in ("(E) x", "answer: E"):
            found = ev.extract_answer(text, "letter", n)
            expect_true(found == expected, f"got {found!r}, expected {expected!r}", answer=found, read=ARGS)


def test_extract_answer_refuses_other_kinds():
    case("kind = 'word'")
    with expect_raises(ValueError, "word", read=RAISES):
        ev.extract_answer("7", "word")


@pytest.mark.time_limit(5)
def test_extract_answer_of_a_long_text():
    case("200,000 characters that are nearly a number, and nearly an answer")
    expect_equal(ev.extract_answer("1," * 100_000), "1", read=RETURNS)
    expect_equal(ev.extract_answer("answer " * 30_000 + "B", "letter"), "B", read=RETURNS)


# ---- expected_calibration_error --------------------------------------------------------------------------------------


def test_expected_calibration_error_by_hand():
    case("3 bins: 0.2 in the first, 0.9, 0.8 and 0.7 in the third")
    found = ev.expected_calibration_error([0.2, 0.9, 0.8, 0.7], [0, 1, 1, 0], 3)
    expect_close(found, (abs(0 - 0.2) + abs(2 - 2.4)) / 4, rtol=1e-12, read=CALIBRATION)
    case("2 bins: 0.2 and 0.5 in the first, 0.9, 0.6 and 0.7 in the second")
    found = ev.expected_calibration_error([0.2, 0.9, 0.5, 0.6, 0.7], [0, 1, 1, 1, 0], 2)
    expect_close(found, (abs(1 - 0.7) + abs(2 - 2.2)) / 5, rtol=1e-12, read=CALIBRATION)
    case("the edges 0.1, 0.2, ... belong to the bin below them, and 0 to the first")
    sure = [0.0, 0.1, 0.2, 0.3, 0.6, 0.7, 1.0]
    right = [True, False, True, False, True, False, True]
    place = [0, 0, 1, 2, 5, 6, 9]
    sums = [abs(sum(r - s for s, r, p in zip(sure, right, place, strict=True) if p == b)) for b in range(10)]
    expect_close(ev.expected_calibration_error(sure, right, 10), sum(sums) / 7, rtol=1e-12, read=ARGS)


def test_expected_calibration_error_at_its_ends():
    case("sure and always right; sure and always wrong; half sure, half right")
    expect_close(ev.expected_calibration_error([1.0] * 4, [1] * 4), 0.0, read=CALIBRATION)
    expect_close(ev.expected_calibration_error([1.0] * 4, [0] * 4), 1.0, read=CALIBRATION)
    expect_close(ev.expected_calibration_error([0.5] * 4, [0, 1, 0, 1]), 0.0, read=CALIBRATION)
    case("15 bins by default, and one bin is the difference of the means")
    sure, right = [random.Random(i).random() for i in range(50)], [i % 3 == 0 for i in range(50)]
    expect_close(ev.expected_calibration_error(sure, right, 1), abs(sum(right) - sum(sure)) / 50, read=CALIBRATION)
    expect_close(ev.expected_calibration_error(sure, right), ev.expected_calibration_error(sure, right, 15), read=ARGS)


def test_expected_calibration_error_in_float64():
    case("1/3 as a float32 is above the edge 1/3 of 3 bins in float64; tensors are fine")
    sure = torch.tensor([1 / 3, 0.5])
    third = sure.double()[0].item()
    found = ev.expected_calibration_error(sure, torch.tensor([True, False]), 3)
    expect_close(found, abs(1 - third - 0.5) / 2, rtol=1e-12, read=ARGS)
    case("7/25 and 0.25 share a bin of 25, although 7/25 * 25 is 7.000000000000001 in float64")
    found = ev.expected_calibration_error([7 / 25, 0.25], [1, 0], 25)
    expect_close(found, abs(1 - 7 / 25 - 0.25) / 2, rtol=1e-12, read=ARGS)


def test_expected_calibration_error_refuses():
    for bad in (-0.1, 1.1, math.nan):
        case(f"a confidence of {bad}")
        with expect_raises(ValueError, f"{bad}", read=RAISES):
            ev.expected_calibration_error([0.5, bad], [1, 0])
    case("3 and 2 values")
    with expect_raises(ValueError, "3", "2", read=RAISES):
        ev.expected_calibration_error([0.5] * 3, [1, 0])
    case("nothing at all")
    with expect_raises(ValueError, read=RAISES):
        ev.expected_calibration_error([], [])
