import pytest

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

toy = graded("toy")


def test_double_by_hand():
    case("x=3")
    expect_equal(toy.double(3), 6, read="eq-toy-1")


@pytest.mark.parametrize("x", [0, 5, 50])
def test_double_is_even(x):
    case(f"x={x}")
    answer = toy.double(x)
    expect_true(answer % 2 == 0, f"{answer} is odd", answer=answer)


def test_double_refuses_too_much():
    case("x=101")
    with expect_raises(ValueError, "101"):
        toy.double(101)


def test_Tally_counts():
    case("add 1, then 2")
    tally = toy.Tally()
    tally.add(1)
    expect_equal(tally.add(2), 6)


def test_Tally_clears(tmp_path):
    tally = toy.Tally(4)
    tally.clear()
    expect_equal(tally.n, 0, name="n")


@pytest.mark.memory_limit(64)
@pytest.mark.time_limit(2)
def test_halves():
    case("x=3")
    expect_close(toy.halves(3), [1.5, 1.5])


@oracle
def test_halves_like_the_maintainers():
    expect_close(sum(toy.halves(7)), 7.0)
