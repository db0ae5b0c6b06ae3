import re
import sys
from pathlib import Path

import pytest
import yaml
from new_project import check_style, run, run_tests

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.scaffold import add, new

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.find(new.new_command(Project.at(tmp_path), ["my-project", f"folder={tmp_path}"]))


@pytest.mark.slow
def test_new_components_pass_their_tests(project: Project) -> None:
    for kind in add.KINDS:
        add.add_command(project, [kind, "very_tiny"])
    options = yaml.safe_load((project.root / "configs/model/very_tiny.yaml").read_text())
    assert options["_target_"] == "my_project.model.very_tiny.VeryTiny"
    check_style(project.root)
    names = [f"{kind}/test_very_tiny.py" for kind in add.KINDS]
    output = run_tests(project.root, *(f"tests/{name}" for name in names), "-rA")
    assert set(re.findall(r"PASSED tests/(\w+/test_very_tiny\.py)", output)) == set(names)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("regression", "sequence", "text")]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["image", *SLOW])
def test_examples_pass_their_tests_and_fit_together(example: str, project: Project) -> None:
    for kind in add.EXAMPLES:
        add.add_command(project, [kind, "--kind", example, "mine"])
    check_style(project.root)
    assert "passed" in run_tests(project.root, *(f"tests/{kind}" for kind in add.EXAMPLES))
    overrides = ["experiment=null", "data=mine", "model=mine", "task=mine"]
    run(sys.executable, "-m", "boltcutter", "check", "--batch", *overrides, cwd=project.root)


@pytest.mark.slow
def test_data_of_different_lengths_pass_their_tests(project: Project) -> None:
    add.add_command(project, ["data", "--kind", "ragged", "mine"])
    check_style(project.root)
    assert "passed" in run_tests(project.root, "tests/data")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clone_of_the_library_can_be_extended_in_place(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(ROOT), str(clone), cwd=tmp_path)
    for kind in add.KINDS:
        add.add_command(Project.find(clone), [kind, "very_tiny"])
    assert (clone / "src/boltcutter/model/very_tiny.py").is_file()
    assert (clone / "src/boltcutter/launch/very_tiny.py").is_file()
    tests = [f"tests/{'launch' if kind == 'launch' else kind}/test_very_tiny.py" for kind in add.KINDS]
    assert "passed" in run_tests(clone, *tests, "tests/test_layout.py", PYTHONPATH=str(clone / "src"))


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["model"], ["modell", "tiny"], ["model", "Tiny"], ["model", "class"], ["model", "small_mlp"]),
        *(["model", "tiny", "--kind", "sequense"], ["callback", "tiny", "--kind", "text"], ["model", "tiny", "--kind"]),
    ],
)
def test_mistakes_change_nothing(arguments: list[str], project: Project) -> None:
    before = sorted(project.root.rglob("*"))
    with pytest.raises(ConfigError):
        add.add_command(project, arguments)
    assert sorted(project.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "tiny", "--kin", "text"], r"^--kin=text: no such flag; did you mean --kind=text\?"),
        (["model", "tiny", "--kind=foo"], r"^--kind=foo: add model has no such example \(there are: "),
        (["experiment", "wide", "kind=text"], r"^--kind=text: add experiment has no such example; leave it out$"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], message: str, project: Project) -> None:
    with pytest.raises(ConfigError, match=message):
        add.add_command(project, arguments)


def test_a_valid_name_is_proposed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"try my_net$"):
        add.add_command(Project.at(tmp_path), ["model", "My-Net"])


def test_folder_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="boltcutter new"):
        add.add_command(Project.at(tmp_path), ["model", "tiny"])
