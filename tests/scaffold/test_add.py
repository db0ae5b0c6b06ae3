import ast
import runpy
from pathlib import Path

import pytest
import yaml
from new_project import run_tests

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.scaffold import add, new


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.find(new.create(["my-project", f"folder={tmp_path}"]))


@pytest.mark.parametrize("kind", [kind for kind in add.KINDS if kind != "experiment"])
def test_files_name_the_new_class(kind: str, project: Project) -> None:
    add.main(project, [kind, "very_tiny"])
    source = runpy.run_path(str(project.root / f"src/my_project/{kind}/very_tiny.py"))
    assert source["VeryTiny"].__doc__
    options = yaml.safe_load((project.root / f"configs/{kind}/very_tiny.yaml").read_text())
    assert options.get("very_tiny", options)["_target_"] == f"my_project.{kind}.very_tiny.VeryTiny"
    ast.parse((project.root / f"tests/test_{kind}_very_tiny.py").read_text())


def test_new_experiment_passes_its_test(project: Project) -> None:
    add.main(project, ["experiment", "wide"])
    assert "1 passed" in run_tests(project.root, "tests/test_experiment_wide.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in add.KINDS if kind != "experiment"])
def test_new_component_passes_its_tests(kind: str, project: Project) -> None:
    add.main(project, [kind, "tiny"])
    assert "passed" in run_tests(project.root, f"tests/test_{kind}_tiny.py")


@pytest.mark.parametrize("arguments", [[], ["model"], ["modell", "tiny"], ["model", "Tiny"], ["model", "small_mlp"]])
def test_mistakes_change_nothing(arguments: list[str], project: Project) -> None:
    before = sorted(project.root.rglob("*"))
    with pytest.raises(ConfigError):
        add.main(project, arguments)
    assert sorted(project.root.rglob("*")) == before


def test_folder_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="boltcutter new"):
        add.main(Project.at(tmp_path), ["model", "tiny"])
