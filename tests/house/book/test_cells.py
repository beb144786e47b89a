"""No cell takes, under a name of an earlier cell, what a cell in between has put there."""

import ast
import re
import symtable
from dataclasses import dataclass, field

import pytest

from lib.workbook.book.catalog import ROOT

PAGES = sorted((ROOT / "chapters").glob("*.md"))
PART = re.compile(r"^## (?P<heading>[^\n]+)$|^```\{code-cell\}[^\n]*\n(?P<cell>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Cell:
    """What one cell does with module-level names.

    Attributes:
        section: The heading above it, of level two.
        where: The magic that sends it to other processes, which have names of their own; "" in the notebook.
        binds: Source of every statement that binds a name, by name.
        reads: Names that are read while the cell runs, before the cell has bound them itself.
        inside: For each function or class that the cell defines, the module-level names in its body.
    """

    section: str
    where: str
    binds: dict[str, set[str]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    inside: dict[str, set[str]] = field(default_factory=dict)


def cells_of(page: str) -> list[Cell]:
    """The cells of a page in its order; lines for IPython, such as ``%check``, are left out."""
    found, section = [], ""
    for part in PART.finditer(page):
        if part["heading"]:
            section = part["heading"]
            continue
        code = re.sub(r"\A(:[^\n]*\n|---\n.*?\n---\n)+", "", part["cell"], flags=re.DOTALL)
        magic = re.match(r"%%\w+", code.lstrip())
        code = re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)
        cell = Cell(section, magic[0] if magic else "")
        Reader(cell).visit(ast.parse(code))
        found.append(cell)
    return found


class Reader(ast.NodeVisitor):
    """Fills in a cell, in the order in which its statements run."""

    def __init__(self, cell: Cell):
        self.cell, self.statement = cell, ""
        self.local: list[set[str]] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            self.statement = ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.statement = f"import from {getattr(node, 'module', None)}"
        elif isinstance(node, ast.For):
            self.statement = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        elif isinstance(node, ast.With):
            self.statement = f"with {', '.join(map(ast.unparse, node.items))}"
        super().visit(node)

    def bind(self, name: str) -> None:
        self.cell.binds.setdefault(name, set()).add(self.statement)

    def visit_Name(self, node: ast.Name) -> None:
        if any(node.id in names for names in self.local):
            return
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id)
        elif node.id not in self.cell.binds:
            self.cell.reads.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            parts = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # a, b = 1, 2 is a = 1 and b = 2
                parts = list(zip(target.elts, node.value.elts, strict=False))
            for place, value in parts:
                self.statement = ast.unparse(value if isinstance(place, ast.Name) else node)
                self.visit(place)
            if isinstance(node.value, ast.Lambda) and isinstance(target, ast.Name):
                self.cell.inside[target.id] = global_names(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)  # the name keeps its meaning, with something added

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_alias(self, node: ast.alias) -> None:
        self.bind((node.asname or node.name).split(".")[0])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.cell.reads |= global_names(node) - set(self.cell.binds)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for part in node.decorator_list:
            self.visit(part)
        self.cell.inside[node.name] = global_names(node) - {node.name}
        self.statement = ast.unparse(node)
        self.bind(node.name)

    visit_ClassDef = visit_FunctionDef  # noqa: N815

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        targets = {name.id for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name)}
        self.visit(node.generators[0].iter)
        self.local.append(targets)
        self.generic_visit(node)
        self.local.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension  # noqa: N815


def global_names(node: ast.AST) -> set[str]:
    """Names of the module that a function, class or lambda looks up when it runs."""
    found: set[str] = set()

    def collect(table: symtable.SymbolTable) -> None:
        for child in table.get_children():
            found.update(s.get_name() for s in child.get_symbols() if s.is_global() and s.is_referenced())
            collect(child)

    collect(symtable.symtable(ast.unparse(node), "cell", "exec"))
    return found


def taken_over(cells: list[Cell]) -> list[str]:
    """A line for each name that may mean something else than its reader expects.

    1.
       A cell reads a name whose last binding is in another section, and an earlier binding, to something else,
       in a third: "What you have now" is far from both, and nothing tells which of the two was meant.
    2. A cell uses a function of an earlier cell after a name in the function's body was bound anew, to something else.
    """
    found = []
    for where in {cell.where for cell in cells}:
        here = [cell for cell in cells if cell.where == where]
        for at, cell in enumerate(here):
            found += [two_meanings(here[:at], cell, name) for name in sorted(cell.reads)]
            found += [bound_anew(here, at, function, name) for function, names in cell.inside.items() for name in names]
    return sorted(filter(None, found))


def two_meanings(before: list[Cell], cell: Cell, name: str) -> str:
    bound = [other for other in before if name in other.binds]
    if bound and bound[-1].section != cell.section:
        for first in bound:
            if first.section != bound[-1].section and first.binds[name] != bound[-1].binds[name]:
                return f"{cell.section!r} reads {name}: bound in {first.section!r}, and anew in {bound[-1].section!r}"
    return ""


def bound_anew(cells: list[Cell], at: int, function: str, name: str) -> str:
    meaning = next((cell.binds[name] for cell in reversed(cells[: at + 1]) if name in cell.binds), None)
    changed = None
    for cell in cells[at + 1 :]:
        if function in cell.binds:
            return ""
        if name in cell.binds and cell.binds[name] != (meaning or cell.binds[name]):
            changed = cell
        if changed and function in cell.reads:
            return f"{cell.section!r} uses {function}, in which {name} was bound anew in {changed.section!r}"
        meaning = meaning or cell.binds.get(name)
    return ""


TOY = """
## One
```{code-cell} ipython3
:tags: [hide-input]

products = 5
factor = 2
def scaled(x):
    return factor * x
```
## Two
```{code-cell} ipython3
%check something
for products, rest in ((1, 2), (3, 4)):
    print(products, [factor for factor in (1, 2)])
```
## Three
```{code-cell} ipython3
print(products)
```
```{code-cell} ipython3
factor = 3
print(scaled(1))
```
"""


def test_a_name_that_was_bound_anew_is_found():
    found = taken_over(cells_of(TOY))
    assert found == [
        "'Three' reads products: bound in 'One', and anew in 'Two'",
        "'Three' uses scaled, in which factor was bound anew in 'Three'",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for products, rest in", "for each, rest in"),  # another name
        ("print(products)", "products = 7\nprint(products)"),  # bound again where it is read
        ("for products, rest in ((1, 2), (3, 4))", "with open('x') as f"),  # not bound anew at all
    ],
)
def test_a_name_with_one_meaning_is_not(old, new):
    found = taken_over(cells_of(TOY.replace("factor = 3\n", "").replace(old, new)))
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_name_keeps_its_meaning(page):
    """Choose another name for one of the two, or bind the name again in the section that reads it."""
    assert taken_over(cells_of(page.read_text(encoding="utf-8"))) == []
