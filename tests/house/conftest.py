"""A toy book of two chapters for testing the machinery: the real lib/workbook with tiny exercises and without torch."""

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from lib.ranks import forkserver
from lib.ranks.processes import end_with_parent
from lib.workbook.book.catalog import ROOT
from lib.workbook.checks.warm import EARLY, PRELOADED

TOYS = Path(__file__).parent / "checks"
collect_ignore = ["checks/toy", "checks/toy_ranks"]


class Done(subprocess.CompletedProcess[str]):
    """A command that has ended."""

    @property
    def out(self) -> str:
        return self.stdout + self.stderr


class Book:
    """A copy of the book in a folder of its own, with the commands that a learner runs in it."""

    def __init__(self, root: Path):
        self.root = root
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("WORKBOOK_", "PYTEST_", "COV_"))},
            "PYTHONPATH": str(root),
            "COLUMNS": "160",
            "NO_COLOR": "1",
        }

    def end_warm_processes(self) -> None:
        for process in psutil.process_iter(["cmdline"]):
            if str(self.root / "lib" / "ranks" / "forkserver.py") in (process.info["cmdline"] or []):
                process.kill()

    def run(self, *command, **env) -> "Done":
        environment = {**self.env, **env}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=120)
        return Done(done.args, done.returncode, done.stdout, done.stderr)

    def python(self, code: str, **env):
        return self.run(sys.executable, "-c", code, **env)

    def pytest(self, *arguments, **env):
        """``python -m pytest``, in a fork of a process that has imported it, which starts at once."""
        if sys.platform != "linux":
            return self.cold_pytest(*arguments, **env)
        # the toy books use none of the plugins, and they cost time
        environment = {**self.env, **env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", forkserver.VARIABLE: _server()}
        request = forkserver.Request(
            program="pytest", arguments=[*arguments, *EARLY], folder=str(self.root), environment=environment
        )
        with tempfile.TemporaryFile() as output:
            status = forkserver.ask(_server(), request, output.fileno()).wait(timeout=120)
            output.seek(0)
            out = output.read().decode(errors="replace")
        return Done(arguments, status, out, "")

    def cold_pytest(self, *arguments, **env):
        """``pytest`` in a new process, as a learner starts it."""
        return self.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, **env)

    def workbook(self, *arguments, **env):
        return self.run(sys.executable, "-c", "from lib.workbook.tools.cli import main; main()", *arguments, **env)

    def marks(self, *arguments) -> dict[str, dict]:
        file = self.root / "marks.json"
        self.pytest("--marks", str(file), *arguments)
        return {row["name"]: row for row in json.loads(file.read_text())["exercises"]}

    def mine(self, module: str) -> Path:
        return self.root / "lib" / f"{module}.py"

    def write(self, module: str, old: str, new: str) -> None:
        """Edit the learner's file, in which ``old`` must occur exactly once."""
        path = self.mine(module)
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}, expected once"
        path.write_text(text.replace(old, new))

    def answer(self, name: str, code: str, module: str = "toy") -> None:
        """Replace a stub's raise with ``code``."""
        text = self.mine(module).read_text()
        text, n = re.subn(rf'raise NotImplementedError\("Exercise [\d.]+: write {re.escape(name)}"\)', code, text)
        assert n == 1, f"no stub of {name} in lib/{module}.py"
        self.mine(module).write_text(text)


@functools.cache
def _server() -> str:
    """The address of the process that runs the toy books' pytest; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="books-")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WORKBOOK_", "PYTEST_", "COV_"))}
    modules = ("torch", "torch.distributed.fsdp", "torch._dynamo", *PRELOADED)
    server = forkserver.start(f"{folder}/socket", modules, env=environment, preexec_fn=end_with_parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    assert server.poll() is None
    return f"{folder}/socket"


@pytest.fixture(scope="session")
def toy_template(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("template") / "toybook"
    shutil.copytree(TOYS / "toy", root)
    ignore = shutil.ignore_patterns("__pycache__", "stubs.json")
    shutil.copytree(ROOT / "lib" / "workbook", root / "lib" / "workbook", ignore=ignore)
    for room in ("given", "ranks"):
        shutil.copytree(ROOT / "lib" / room, root / "lib" / room, ignore=ignore)
    shutil.copy(ROOT / "lib" / "__init__.py", root / "lib")
    shutil.copy(ROOT / "pyproject.toml", root)
    done = Book(root).workbook("stubs")
    assert done.returncode == 0, done.out
    return root


@pytest.fixture
def book(toy_template, tmp_path):
    """A fresh toy book whose learner has written nothing."""
    root = tmp_path / "toybook"
    shutil.copytree(toy_template, root)
    made = Book(root)
    yield made
    made.end_warm_processes()
