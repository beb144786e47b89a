from lib.workbook.grading import mistake


@mistake("quadruple", "doubled once only")
def once(x):
    return 2 * x
