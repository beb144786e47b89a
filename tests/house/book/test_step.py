"""The Makefile's steps: each says what it does, and how long that took last time."""

import json
import re
import subprocess
import sys

import pytest

from lib.workbook.book.catalog import ROOT
from lib.workbook.tools import step

FILE = ROOT / "lib" / "workbook" / "tools" / "step.py"


@pytest.fixture
def make(tmp_path):
    """Runs a step in an empty folder, as the Makefile does."""

    def run(label: str, code: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", str(FILE), label, sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return run


def test_a_step_says_what_it_does_and_how_long_it_took_last_time(make, tmp_path):
    assert re.fullmatch(r"Installing it\n  done in \d+ s\n", make("Installing it", "print('Collecting torch')").stdout)
    times = tmp_path / ".workbook" / "steps.json"
    assert list(json.loads(times.read_text())) == ["Installing it"]
    times.write_text('{"Installing it": 63.4, "other": 1.0}')
    assert make("Installing it", "pass").stdout.startswith("Installing it (63 s last time)\n")
    assert json.loads(times.read_text())["other"] == 1.0


def test_a_step_that_fails_shows_what_was_printed_and_keeps_no_time(make, tmp_path):
    done = make("Installing it", "print('no such package'); raise SystemExit(3)")
    assert done.returncode == 3
    assert "no such package" in done.stdout
    assert "failed after" in done.stdout
    assert not (tmp_path / ".workbook").exists()


def test_a_damaged_record_of_times_is_as_none(make, tmp_path):
    (tmp_path / ".workbook").mkdir()
    (tmp_path / ".workbook" / "steps.json").write_text("{")
    assert make("Installing it", "pass").stdout.startswith("Installing it\n")


def test_the_line_names_the_package_that_pip_is_at():
    said = ["Collecting torch<2.14\n", "  Downloading torch-2.11.0.whl (780.1 MB)\n", "     ━━━━ 12%\n"]
    assert step.doing(said) == "torch-2.11.0.whl (780.1 MB)"
    assert step.doing(["nothing of the kind\n"]) == ""


def test_every_installation_of_the_makefile_is_a_step():
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nclean:")[0]
    installs = [
        line for line in recipes.splitlines() if line.startswith("\t") and ("venv .venv" in line or "PIP" in line)
    ]
    assert len(installs) == 4
    assert all(line.startswith('\t@$(STEP) "') for line in installs)
