from lib.workbook.grading import edits

edits("""
# quadruple
doubled once only
- double(double(x)) => double(x)
""")
