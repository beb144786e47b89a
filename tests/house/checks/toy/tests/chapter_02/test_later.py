from lib.workbook.grading import case, expect_equal, graded

later = graded("later")


def test_quadruple():
    case("x=3")
    expect_equal(later.quadruple(3), 12)
