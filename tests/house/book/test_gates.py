"""What a change must pass is itself as it should be: pinned tools, a lock file that fits, workflows by digest."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

from lib.runs import serve
from lib.workbook.book.catalog import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [
    needed
    for needed in map(Requirement, sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"]))
    if needed.name != PROJECT["name"]  # an extra may take in another one
]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github" / "actions").glob("*/action.yml"))
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
PARTS = re.search(r'^PARTS="(.*)"$', CI, re.MULTILINE)[1].split()
MACHINES = [
    {**default_environment(), "sys_platform": system, "python_version": python, "python_full_version": f"{python}.9"}
    for system in ("linux", "darwin")
    for python in ("3.11", "3.12", "3.13")
]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(environment: dict) -> dict[str, str]:
    """Name and version of everything that is locked on a machine."""
    there = [r for r in LOCK if r.marker is None or r.marker.evaluate(environment)]
    versions = [(canonical(r.name), str(r.specifier).removeprefix("==")) for r in there]
    assert len(dict(versions)) == len(versions), "two versions of one package"
    return dict(versions)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m['sys_platform']}-{m['python_version']}")
def test_the_lock_has_what_the_book_needs_and_torch_is_free(machine):
    versions = locked(machine)
    for needed in NEEDED:
        if needed.name in ("torch", "triton") or (needed.marker and not needed.marker.evaluate(machine)):
            continue
        assert canonical(needed.name) in versions, f"{needed.name} is not in requirements.lock: make lock UPGRADE="
        assert versions[canonical(needed.name)] in needed.specifier, f"{needed} with {versions[canonical(needed.name)]}"
    assert [name for name in versions if re.match(r"(torch|triton|setuptools)$|(nvidia|cuda)-", name)] == []


def test_what_the_book_needs_has_a_ceiling_and_its_tools_are_exact():
    free = {"regex", "triton"}  # versions that are dates; torch says which
    assert [str(r) for r in NEEDED if r.name not in free and not re.search(r"<|==", str(r.specifier))] == []
    tools = {r.name: str(r.specifier) for r in NEEDED if r.name in ("ruff", "mypy", "pre-commit")}
    assert len(tools) == 3
    assert all(spec.startswith("==") for spec in tools.values())


def test_the_site_alone_has_what_the_server_needs_that_its_pages_start():
    extras = PROJECT["optional-dependencies"]
    assert f"{PROJECT['name']}[serve]" in extras["site"]
    needed = {canonical(Requirement(r).name) for r in extras["serve"]}
    without = {"llguidance", "httptools", "uvloop"}  # forms are refused, or each request costs more
    assert needed - without == {canonical(name) for name in serve.NEEDED}


@pytest.mark.parametrize("path", WORKFLOWS + ACTIONS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_actions_are_taken_by_digest(path):
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert used
    assert [use for use in used if not re.fullmatch(r"\./\S+|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_every_job_has_a_limit(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    assert all("timeout-minutes" in job for job in jobs if "uses" not in job)


def test_one_digest_an_action():
    digests: dict[str, set[str]] = {}
    for path in WORKFLOWS + ACTIONS:
        for action, digest in re.findall(r"uses: ([\w./-]+)@(.*)", path.read_text(encoding="utf-8")):
            digests.setdefault(action, set()).add(digest)
    assert [action for action, found in digests.items() if len(found) > 1] == []


def test_lint_comes_first_and_the_workflow_runs_every_part():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert PARTS[0] == "lint"
    assert [name for name, job in jobs.items() if job.get("needs") != "lint"] == ["lint"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    run = {part for command in commands if command.startswith("bash .ci/run ") for part in command.split()[2:]}
    assert run == set(PARTS)


def test_a_part_that_does_not_exist_is_refused_before_anything_runs():
    said = subprocess.run(["bash", ".ci/run", "lint", "tests,site"], cwd=ROOT, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (2, "")
    assert "no part 'tests,site': expected any of lint stubs" in said.stderr


def test_pages_publishes_what_ci_built_and_nothing_else():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "pages.yml").read_text(encoding="utf-8"))
    # YAML reads the key "on" as True
    assert workflow[True]["workflow_run"] == {"workflows": ["CI"], "types": ["completed"], "branches": ["main"]}
    assert all("conclusion == 'success'" in job["if"] for job in workflow["jobs"].values())
    assert not any("run" in step for step in workflow["jobs"]["publish"]["steps"])
    uses = [step.get("uses", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert not any(use.startswith("actions/checkout") for use in uses)


def test_hooks_find_their_tools_in_any_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".ci/with ") for hook in hooks)


def test_tools_come_from_the_active_environment_where_there_is_no_venv(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "with", tmp_path / ".ci" / "with")
    for where in ("active", ".venv/bin"):
        tool = tmp_path / where / "ruff"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho {where} $1\n")
        tool.chmod(0o755)
    command = [str(tmp_path / ".ci" / "with"), "ruff", "check"]
    environment = {"PATH": f"{tmp_path}/active:/usr/bin:/bin"}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == ".venv/bin check\n"
    shutil.rmtree(tmp_path / ".venv")
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "active check\n"
