"""JupyterLab: the workspace that it opens, and a learner's round in Chromium: run, see, write wrong, check,
write right.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.workbook.book.catalog import ROOT as PROJECT
from lib.workbook.book.catalog import BookError, chapters, pages
from lib.workbook.book.stubs import make_stub
from lib.workbook.tools import lab
from tests.house.browsing import chromium, is_foreign

SCREENSHOTS = PROJECT / "_build" / "screenshots"
STUB = 'raise NotImplementedError("Exercise {number}: write apply_rope")'
WRONG = """pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.complex(rope.imag, rope.real)[:, None, :]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)"""
RIGHT = re.compile(r"def apply_rope\(.*?### BEGIN SOLUTION\n\s*(.*?)\n\s*### END SOLUTION", re.DOTALL)


# ---- without a browser -----------------------------------------------------------------------------------------------


def layout(workspace: dict) -> list[tuple[list[str], int]]:
    dock = workspace["data"]["layout-restorer:data"]["main"]["dock"]
    return [(area["widgets"], area["currentIndex"]) for area in lab._tab_areas(dock)]


def test_a_new_workspace_holds_the_chapter_beside_the_learners_file():
    made = lab.with_documents(None, ["chapters/02_rope.md", "lib/rope.py"])
    assert layout(made) == [(["notebook:chapters/02_rope.md"], 0), (["editor:lib/rope.py"], 0)]
    assert made["data"]["notebook:chapters/02_rope.md"]["data"]["factory"] == "Notebook"
    assert made["metadata"]["id"] == lab.WORKSPACE


def test_a_saved_workspace_keeps_what_is_open_in_it():
    saved = lab.with_documents(None, ["chapters/01_tokenization.md", "lib/tokenization.py"])
    saved["data"]["terminal:1"] = {"data": {"name": "1"}}
    again = lab.with_documents(saved, ["chapters/02_rope.md", "lib/rope.py"])
    assert layout(again) == [
        (["notebook:chapters/01_tokenization.md", "notebook:chapters/02_rope.md"], 1),
        (["editor:lib/tokenization.py", "editor:lib/rope.py"], 1),
    ]
    assert "terminal:1" in again["data"]
    back = lab.with_documents(again, ["chapters/01_tokenization.md", "lib/tokenization.py"])
    assert [current for _, current in layout(back)] == [0, 0]


def test_a_page_without_exercises_stands_alone():
    assert lab.documents("0") == ["chapters/00_start.md"]
    assert layout(lab.with_documents(None, lab.documents("0"))) == [(["notebook:chapters/00_start.md"], 0)]


def test_a_chapter_that_is_not_there_is_named():
    with pytest.raises(BookError, match="99"):
        lab.documents("99")


def test_only_this_machine_and_the_token_gets_in():
    assert "--ip=127.0.0.1" in lab.command(8888)
    assert not any("secret" in word for word in lab.command(8888))
    assert lab.environment("secret")["JUPYTER_TOKEN"] == "secret"


def test_the_settings_ask_nothing_at_the_first_start():
    settings = json.loads((PROJECT / ".jupyter" / "labconfig" / "default_setting_overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    assert settings["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"]["markdown"] == "Jupytext Notebook"


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project whose learner has written nothing."""
    root = tmp_path / "book"
    kept = shutil.ignore_patterns(".git", ".venv", "_build", "notebooks", ".workbook", "__pycache__", "workspaces")
    shutil.copytree(PROJECT, root, ignore=kept, symlinks=True)
    for chapter in chapters().values():
        (root / "lib" / f"{chapter.module}.py").write_text(make_stub(chapter), encoding="utf-8")
    return root


@pytest.fixture
def open_lab(project):
    """Start JupyterLab on a chapter of the copy as a learner does; return the address that it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WORKBOOK_", "PYTEST_", "JUPYTER"))}
    environment |= {"WORKBOOK_ROOT": str(project), "PYTHONPATH": str(project)}
    started = []

    def start(chapter: str) -> str:
        command = [sys.executable, "-m", "lib.workbook.tools.cli", "lab", chapter, "--no-browser"]
        command[1:3] = ["-c", "from lib.workbook.tools.cli import main; main()"]
        with open(project / "lab.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        started.append(process)
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, (line, (project / "lab.log").read_text())
        return line.split()[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser, request):
    context = browser.new_context(viewport={"width": 1500, "height": 950})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.foreign = []
    page.on("request", lambda r: page.foreign.append(r.url) if is_foreign(r.url) else None)
    yield page
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"lab-{request.node.name}.png")
    context.close()


def wait_for_notebook(page, name: str) -> None:
    """The notebook stands in front, its kernel is idle, and nothing is asked of the learner."""
    page.wait_for_selector(f".lm-TabBar-tab.lm-mod-current:has-text('{name}')")
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    page.wait_for_selector(
        "#jp-main-statusbar :text('| Idle')"
    )  # the notebook's own light is idle before it has a kernel
    page.wait_for_timeout(500)
    assert page.locator(".jp-Dialog, .Toastify__toast").all_inner_texts() == []


def notebook(page):
    return page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")


def wait_until(condition, what: str, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {within_s} s"
        time.sleep(0.3)


def run_in_new_cell(page, code: str):
    """Insert a cell above the one in front, run it, and return it."""
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(code)
    cell = notebook(page).locator(".jp-Cell.jp-mod-active")
    index = int(cell.get_attribute("data-windowed-list-index"))
    page.keyboard.press("Control+Enter")
    return notebook(page).locator(f".jp-Cell[data-windowed-list-index='{index}']")


def first_chapter() -> dict:
    return next(entry for entry in pages() if entry["file"].startswith("chapters/01_"))


@pytest.mark.slow
@pytest.mark.browser
def test_a_learner_who_has_written_nothing_runs_every_cell(page, project, open_lab):
    source = first_chapter()["file"]
    text = (project / source).read_bytes()
    page.goto(open_lab(Path(source).stem[:2]))
    wait_for_notebook(page, Path(source).name)
    if "00_" not in source:
        page.wait_for_selector(".lm-TabBar-tab.lm-mod-current:has-text('.py')")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()

    paired = project / "notebooks" / f"{Path(source).stem}.ipynb"

    def all_ran() -> bool:
        if notebook(page).locator(".jp-Notebook-ExecutionIndicator").get_attribute("data-status") != "idle":
            return False
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        try:
            cells = [c for c in json.loads(paired.read_text())["cells"] if c["cell_type"] == "code"]
        except (OSError, json.JSONDecodeError):  # not saved yet, or being saved
            return False
        failed = [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
        return bool(failed) or all(c["execution_count"] for c in cells if "".join(c["source"]).strip())

    wait_until(all_ran, "every cell has run", 300)
    outputs = [o for c in json.loads(paired.read_text())["cells"] for o in c.get("outputs", [])]
    errors = [(o["ename"], o["evalue"]) for o in outputs if o["output_type"] == "error"]
    assert errors == []
    figures = [o for o in outputs if "workbook-figure" in "".join(o.get("data", {}).get("text/html", ""))]
    assert len(figures) >= 1
    picture = notebook(page).locator("img.workbook-figure").first
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("i => i.complete && i.naturalWidth > 0 && i.alt.length > 0")
    assert (project / source).read_bytes() == text, "running and saving changed the chapter's text"
    assert page.foreign == []


@pytest.mark.slow
@pytest.mark.browser
def test_a_wrong_answer_is_explained_and_the_right_one_passes(page, project, open_lab):
    rope = chapters()["rope"]
    mine = project / "lib" / "rope.py"
    stub = STUB.format(number=rope.exercise("apply_rope").number)
    blank = mine.read_text(encoding="utf-8")
    assert blank.count(stub) == 1
    page.goto(open_lab("2"))
    wait_for_notebook(page, "02_rope.md")
    notebook(page).locator(".jp-Cell").first.click()
    cell = run_in_new_cell(page, "%check apply_rope")  # before any cell that imports lib
    cell.locator(".workbook-check:has-text('not started')").wait_for()
    loaded = run_in_new_cell(page, "from lib.rope import apply_rope\nprint('ready')")
    loaded.locator(".jp-OutputArea-output:has-text('ready')").wait_for()
    cell = run_in_new_cell(page, "%check apply_rope")
    cell.locator(".workbook-check:has-text('not started')").wait_for()

    mine.write_text(blank.replace(stub, WRONG), encoding="utf-8")
    page.keyboard.press("Control+Enter")
    report = cell.locator(".workbook-check:has-text('first wrong')")
    report.wait_for()
    said = report.inner_text()
    assert "looks like" in said
    assert "sine and cosine exchanged" in said
    assert "pytest tests/chapter_02 -k apply_rope" in said
    page.screenshot(path=SCREENSHOTS / "lab-wrong.png")

    answer = RIGHT.search(rope.reference.read_text(encoding="utf-8"))[1]
    mine.write_text(blank.replace(stub, answer), encoding="utf-8")
    page.keyboard.press("Control+Enter")
    cell.locator(".workbook-check:has-text('passed')").wait_for()
    assert "first wrong" not in cell.inner_text()
    used = run_in_new_cell(page, "import inspect; print(inspect.getsourcefile(apply_rope))")
    used.locator(".jp-OutputArea-output:has-text('lib/rope.py')").wait_for()
    assert page.foreign == []
