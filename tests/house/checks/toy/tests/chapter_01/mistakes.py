from lib.workbook.grading import edits, mistake
from solutions import toy as reference


@mistake("double", "added two instead of multiplying")
def adds(x):
    return x + 2


@mistake("double", "squared instead of doubled")
def squares(x):
    return x * x


@mistake("Tally", "forgets what was added before")
class Forgets(reference.Tally):
    def add(self, x):
        self.n = 2 * x
        return self.n


edits("""
# halves
whole division
- x / 2 => x // 2
""")
