"""The memory of a call, as checks measure it."""

import tracemalloc

import pytest

from lib.workbook.grading import with_peak


def test_memory_is_traced_while_a_call_runs_and_no_longer():
    found, peak = with_peak(lambda: len([bytes(10**6) for _ in range(3)]))
    assert found == 3
    assert 3e6 < peak < 3.1e6
    with pytest.raises(ZeroDivisionError):
        with_peak(lambda: 1 / 0)
    assert not tracemalloc.is_tracing()
