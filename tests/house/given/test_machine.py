"""The two lines that say what a machine can and cannot do."""

from typing import Any

import pytest

from lib.given.show.machine import facts, machine

PARTS = {"GPU": "gpus", "MPI": "has_mpi", "Triton": "has_triton"}


@pytest.mark.parametrize("missing", PARTS)
def test_what_is_there_can_be_done_and_what_is_missing_is_named(missing):
    whole: dict[str, Any] = {"gpus": ["NVIDIA H200"], "has_mpi": True, "has_triton": True}
    can, cannot = facts(**whole)
    assert cannot == []
    assert all(part in " ".join(can) for part in PARTS)
    can, cannot = facts(**{**whole, PARTS[missing]: type(whole[PARTS[missing]])()})
    assert len(cannot) == 1
    assert missing in cannot[0]


def test_without_a_gpu_kernels_are_interpreted():
    assert "interpreter" in facts([], True, True)[0][-1]
    assert "compiled" in facts(["NVIDIA H200", "NVIDIA H200"], True, True)[0][-1]


def test_two_lines_are_printed(capsys):
    machine()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Here runs: PyTorch")
    assert second.startswith("Not here: ")
