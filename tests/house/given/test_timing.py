"""Timings in chapters: measured again on a busy machine, and no nonsense printed."""

from lib.given.show.timing import measured_when


def counting(values):
    """A measurement that gives one value after the other, and a list of those it gave."""
    left, given = list(values), []

    def measure():
        given.append(left.pop(0))
        return given[-1]

    return measure, given


def test_the_first_good_measurement_is_returned(capsys):
    measure, given = counting([9, 3, 1])
    assert measured_when(lambda x: x < 5, measure, "x is below 5", pause_s=0) == 3
    assert given == [9, 3]
    assert capsys.readouterr().out == ""


def test_a_busy_machine_is_named_with_the_condition(capsys):
    measure, given = counting([9, 8, 7, 1])
    assert measured_when(lambda x: x < 5, measure, "x is below 5", pause_s=0) is None
    assert given == [9, 8, 7]
    out = capsys.readouterr().out
    assert "This machine was busy" in out
    assert "x is below 5" in out


def test_something_else_may_stand_in(capsys):
    measure, given = counting([9, 8])
    assert measured_when(lambda x: x < 5, measure, "x is below 5", tries=2, otherwise=4, pause_s=0) == 4
    assert len(given) == 2
    out = capsys.readouterr().out
    assert "failed 2 times" in out
    assert "recorded" in out


def test_what_fails_in_a_measurement_is_not_hidden():
    def broken():
        raise ZeroDivisionError

    try:
        measured_when(lambda x: True, broken, "it runs", pause_s=0)
    except ZeroDivisionError:
        return
    raise AssertionError("the exception was swallowed")
