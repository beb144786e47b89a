"""Run the tests that need a GPU, and record how they ended: ``python -m lib.bench.gpu_tests``,
a few minutes on one GPU.

The tests are those of ``pytest -m gpu``; this program runs them in eight processes,
because most of their time is compiling, and writes ``chapters/measurements/gpu_tests.json``.
The page "Tests on a GPU" shows it.
Tests that need two GPUs are skipped on one, and counted.
``--tiny`` runs chapter 7's alone, to try the program.
"""

import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (the record names the accelerators if torch is there)

from lib.bench.kit import record
from lib.given.data.record import MEASUREMENTS
from lib.runs.flags import ProgramParser, whole

ROOT = Path(__file__).parents[2]
# of a test, or of those that run on each place of `tests.house.fast.comparing`
MARKS = re.compile(r"mark\.gpu|tests\.house\.fast\.comparing import")
STATES = ("failed", "error", "skipped", "passed")


def files_with_gpu_tests() -> list[str]:
    """The test files that mark a test with ``gpu``; others may need packages that a machine
    with a GPU does not have.
    """
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if MARKS.search(path.read_text("utf-8"))]


def outcomes(report: Path) -> dict[str, Any]:
    """What a JUnit report says: the states of each file's tests, each reason to skip,
    and the names of those that failed.

    Args:
        report: The XML file that ``pytest --junitxml`` wrote.
    """
    files: dict[str, Counter] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag.replace("failure", "failed"): child for child in case}
        state = next(one for one in STATES if one in children or one == "passed")
        file = case.get("classname", "").replace(".", "/") + ".py"
        files[file][state] += 1
        if state == "skipped":
            reasons[children["skipped"].get("message", "")] += 1
        elif state != "passed":
            failed.append(f"{file}::{case.get('name')}")
    return {"files": {name: dict(files[name]) for name in sorted(files)}, "skipped": dict(reasons), "failed": failed}


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--processes", type=whole(1), default=8)
    parser.add_argument("--tiny", action="store_true", help="chapter 7's tests alone, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = ["tests/chapter_07"] if options.tiny else files_with_gpu_tests()
        asked = ["-m", "pytest", "--reference", "-m", "gpu", "-q", "-n", str(options.processes), "--dist", "worksteal"]
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *asked, "--junitxml", str(report), *chosen], cwd=ROOT)
        if not report.exists():
            sys.exit(f"pytest ended with status {done.returncode} and wrote no report, so nothing is recorded")
        found = outcomes(report)
    record("gpu_tests", {"seconds": time.perf_counter() - start, "status": done.returncode, **found}, options.folder)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
