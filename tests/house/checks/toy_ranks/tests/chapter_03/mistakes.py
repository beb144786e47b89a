from lib.workbook.grading import mistake


@mistake("total", "every rank keeps its own value")
def own(value):
    return value
