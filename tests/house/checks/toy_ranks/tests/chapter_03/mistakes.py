from lib.workbook.grading import edits

edits("""
# total
every rank keeps its own value
- dist.all_reduce(buffer) => pass
""")
