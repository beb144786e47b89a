"""A mistake as an edit of the reference: how it is written, found, applied, and refused where it does not fit."""

import inspect
import itertools
import traceback
import types

import pytest

from lib.workbook.book.catalog import BookError, chapters
from lib.workbook.grading import mistakes_of
from lib.workbook.grading.changes import Change, build, parse, sections

SOURCE = '''
_TWO = 2


def _times(x, n):
    return x * n


class Tally:
    """x + y"""

    def __init__(self, start=0):
        self.n = start

    def add(self, x):
        """Adds x + y, which is no code."""
        # BEGIN
        self.n = (
            self.n  # so far
            + double(
                x,
            )
        )
        return self.n

    def clear(self):
        self.n = 0
        return self.n


def double(x):
    """Twice x."""
    if x > 100:
        raise ValueError(x)
    return _times(x, _TWO)


def is_tally(x):
    return isinstance(x, Tally)


def alone(x):
    return x
'''


def applied(name: str, *changes: tuple[str, str, str], **known) -> types.SimpleNamespace:
    """What `build` makes of an edit of SOURCE, with everything that it leaves alone."""
    reference = types.ModuleType("solutions.toy")
    exec(SOURCE, vars(reference))
    found = build(SOURCE, reference, name, [Change(*change) for change in changes], known, "toy.py#edited")
    return types.SimpleNamespace(reference=reference, found=found, **found)


def test_a_text_is_sentences_and_changes():
    text = """
        squared, and
        not doubled
        - x * 2 => x * x
        the sign is lost
        - -x =>
        two changes
        - a
        - b
        +
        @@ add
        - c
        + if d:
        +     e

        another body
        + return 0
    """
    assert parse(text) == [
        ("squared, and not doubled", (Change("", "x * 2", "x * x"),)),
        ("the sign is lost", (Change("", "-x", ""),)),
        ("two changes", (Change("", "a\nb", ""), Change("add", "c", "if d:\n    e"))),
        ("another body", (Change("", "", "return 0"),)),
    ]


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        (["+ x", "  a"], [("a", "x\na")]),
        (["  a", "  if b:", "+     x"], [("a\nif b:", "a\nif b:\n    x")]),
        (["  a", "+ x", "  b", "+ y"], [("a", "a\nx"), ("b", "b\ny")]),
        (["- a => x", "+ y", "  b"], [("a", "x"), ("b", "y\nb")]),
    ],
    ids=["above", "below", "twice", "after a line"],
)
def test_indented_code_stays(lines, changes):
    [(_, found)] = parse("\n".join(["a sentence", *lines]))
    assert [(change.old, change.new) for change in found] == changes


def test_a_heading_names_one_exercise_or_several():
    text = """
        # double
        squared
        - x * 2 => x * x

        # halves, quarters
        nothing
        + return x
    """
    found = [(names, [sentence for sentence, _ in parse(part)]) for names, part in sections(text)]
    assert found == [(["double"], ["squared"]), (["halves", "quarters"], ["nothing"])]


def test_what_stands_alone_is_refused():
    with pytest.raises(BookError, match="'squared' has no line with - or \\+"):
        parse("squared")
    with pytest.raises(BookError, match=r"'x \* x'.*has no sentence above it"):
        parse("- x * 2\n+ x * x")
    with pytest.raises(BookError, match="'squared' is above the first heading"):
        list(sections("squared\n+ return x * x"))


def test_one_expression_is_replaced_and_the_rest_is_the_references():
    made = applied("double", ("", "x > 100", "x > 1000"))
    assert made.double(101) == 202
    assert made.reference.double(4) == 8


def test_text_is_found_whatever_the_line_breaks_comments_and_trailing_commas():
    tally = applied("Tally", ("", "self.n = (self.n + double(x))", "self.n = double(x)")).Tally(5)
    assert tally.add(2) == 4


def test_several_changes_of_one_mistake():
    made = applied("Tally", ("", "self.n = start", "self.n = start + 1"), ("clear", "0", "7"))
    assert made.Tally(1).n == 2
    assert made.Tally().clear() == 7


def test_a_private_helper_and_a_private_constant_can_be_changed():
    assert applied("double", ("", "x * n", "x + n")).double(10) == 12
    assert applied("double", ("", "_TWO = 2", "_TWO = 3")).double(10) == 30
    assert applied("double", ("_times", "", "return 0")).double(10) == 0


def test_what_uses_the_wrong_definition_is_made_again():
    made = applied("Tally", ("", "self.n = start", "self.n = start + 1"))
    assert made.is_tally(made.Tally())
    assert not made.reference.is_tally(made.Tally())
    assert applied("double", ("", "_TWO", "3")).Tally().add(1) == 3
    assert "alone" not in made.found


def test_the_private_helpers_of_a_wrong_definition_share_its_globals():
    made = applied("double", ("", "x > 100", "x > 1000"))
    made.double.__globals__["_TWO"] = 5
    assert made.double(2) == 10
    assert made._times.__globals__ is made.double.__globals__


def test_a_whole_body_is_replaced_and_keeps_its_docstring():
    made = applied("Tally", ("add", "", "if x:\n    return reference.Tally.add(self, x)\nreturn -1"))
    assert made.Tally().add(0) == -1
    assert made.Tally().add(2) == 4
    assert made.Tally.add.__doc__ == "Adds x + y, which is no code."


def test_several_lines_take_the_indentation_of_the_first():
    made = applied("double", ("", "raise ValueError(x)", "while x > 100:\n    x -= 100"))
    assert made.double(301) == 2


def test_names_of_the_bank_are_known_where_the_reference_has_none():
    made = applied("alone", ("", "return x", "return accumulate(_TWO, x)"), accumulate=max, _TWO=7)
    assert made.alone(1) == 2


def test_the_edited_source_is_shown_by_inspect_and_in_tracebacks():
    made = applied("alone", ("", "return x", "return x / 0"))
    assert inspect.getsource(made.alone) == "def alone(x):\n    return x / 0\n"
    with pytest.raises(ZeroDivisionError) as caught:
        made.alone(1)
    assert "return x / 0" in "".join(traceback.format_tb(caught.tb))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("double", ("", "x + 1", "x"), "'x \\+ 1' is not found in _TWO and _times and double, expected once"),
        ("Tally", ("__init__", "self.n = start", ""), "what it leaves is no Python: expected an indented block"),
        ("Tally", ("", "return self.n", "return 0"), "'return self.n' is found 2 times in Tally, expected once"),
        ("Tally", ("", "x + y", "x"), "'x \\+ y' is not found"),
        ("Tally", ("remove", "x", "y"), "@@ remove names 0 definitions, expected one"),
        ("Tally", ("", "", "return 0"), "Tally is no function: name a method with @@"),
        ("double", ("alone", "return x", "return 0"), "double does not use what is changed"),
        ("double", ("", "x > 100", "x >"), "what it leaves is no Python: invalid syntax: if x >:"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(name, change, message):
    with pytest.raises(BookError, match=message):
        applied(name, change)


def test_changes_that_overlap_are_refused():
    with pytest.raises(BookError, match="two of its changes overlap"):
        applied("double", ("", "x > 100", "x"), ("", "100", "1"))


@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda c: c.module)
def test_every_edit_fits_the_reference(chapter):
    for wrong in mistakes_of(chapter.module):
        assert callable(wrong.implementation), wrong.sentence


def test_keys_are_unique_and_independent_of_the_place_in_the_bank():
    known = list(itertools.chain.from_iterable(mistakes_of(module) for module in chapters()))
    assert len({wrong.key for wrong in known}) == len(known)
    assert all(wrong.name in wrong.key and wrong.key.isascii() for wrong in known)
