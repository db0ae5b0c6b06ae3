"""uv runs a project's scripts and tests, and reads its group ``dev``."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, require
from new_project import run

from boltcutter.project import Project, tomllib
from boltcutter.scaffold import new

TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"


def test_the_group_is_that_of_the_extra() -> None:
    text = (TEMPLATE / "pyproject.toml").read_text()
    dev = next(line for line in text.splitlines() if line.startswith("dev = "))
    assert text.count(dev) == 2
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"] == ["boltcutter[dev]"]
    for folder in (ROOT, TEMPLATE):  # which would have the addresses of an index
        assert "/uv.lock" in (folder / ".gitignore").read_text().splitlines()


def test_constraints_of_uv_are_those_of_pip() -> None:
    settings = re.sub(r"{{.*?}}", "", (TEMPLATE / "pyproject.toml").read_text())  # of a template, not filled in
    pinned = (TEMPLATE / "constraints.txt").read_text().splitlines()
    assert {*tomllib.loads(settings)["tool"]["uv"]["constraint-dependencies"]} <= {*pinned}


@pytest.mark.slow
def test_uv_runs_scripts_and_tests_of_a_project(tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".uv" / "bin"))
    if uv is None:
        require("uv", install="pip install uv")
    project = new.new_command(Project.at(ROOT), ["my-project", f"folder={tmp_path}"])
    command, given = [str(uv), "run", "--no-sync", "--offline"], {"UV_PROJECT_ENVIRONMENT": sys.prefix}
    for folder in (project, ROOT):
        assert run(*command, "scripts/train.py", "--help", cwd=folder, **given).startswith("Train a model")
        assert "pytest 9" in run(*command, "pytest", "--version", cwd=folder, **given)
