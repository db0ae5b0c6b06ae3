import json
import sys
from pathlib import Path

import pytest
import yaml
from new_project import run

from boltcutter.config.errors import ConfigError
from boltcutter.project import SOURCE, Project
from boltcutter.scaffold import new, vendor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.find(new.new_command(Project.at(tmp_path), ["my-project", f"folder={tmp_path}"]))


@pytest.mark.slow
def test_component_is_used_from_its_copy(project: Project) -> None:
    vendor.vendor_command(project, ["callback.guard"])
    assert (project.root / "src/my_project/callback/guard.py").is_file()
    options = yaml.safe_load((project.root / "configs/callback/default.yaml").read_text())
    assert options["guard"]["_target_"] == "my_project.callback.guard.Guard"
    assert options["best"]["_target_"].startswith("boltcutter.")
    run(sys.executable, "scripts/train.py", "--check", cwd=project.root)
    with pytest.raises(ConfigError, match="exists already"):
        vendor.vendor_command(project, ["callback.guard"])


def test_one_copy_is_undone(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for component in ("callback.guard", "callback.reseed", "model.resnet"):
        vendor.vendor_command(project, [component])
    own = project.root / "configs/callback/default.yaml"
    vendor.vendor_command(project, ["callback.guard", "--undo"])
    assert not (project.root / "src/my_project/callback/guard.py").exists()
    options = yaml.safe_load(own.read_text())
    assert options["guard"]["_target_"] == "boltcutter.callback.guard.Guard"
    assert options["reseed"]["_target_"] == "my_project.callback.reseed.Reseed"
    vendor.vendor_command(project, ["--undo", "callback.reseed"])
    assert not own.exists()  # equal to the library's again
    assert (project.root / "configs/model/resnet.yaml").is_file()
    moved = Path(capsys.readouterr().out.split()[-1].rstrip("."))
    assert (moved / "src/my_project/callback/reseed.py").is_file()
    with pytest.raises(ConfigError, match="nothing to undo"):
        vendor.vendor_command(project, ["callback.reseed", "--undo"])
    with pytest.raises(ConfigError, match="nothing to undo"):
        vendor.vendor_command(project, ["model.small_mlp", "--undo"])  # the project's own
    vendor.vendor_command(project, ["callback.guard"])
    assert (project.root / "src/my_project/callback/guard.py").is_file()


def library_of_a_run(project: Project, folder: Path) -> Path:
    """Train one epoch; returns the package of the library that was used."""
    overrides = ["trainer.max_epochs=1", "logger=null", "report=false", f"folder={folder}"]
    run(sys.executable, "scripts/train.py", *overrides, cwd=project.root)
    return Path(json.loads((folder / "record.json").read_text())["library"]["path"])


@pytest.mark.slow
def test_library_is_used_from_its_copy_until_it_is_removed(project: Project, tmp_path: Path) -> None:
    console = (sys.executable, "-m", "boltcutter")
    run(*console, "vendor", cwd=project.root)
    copy = project.root / "src" / "boltcutter"
    main = copy / "cli" / "main.py"
    main.write_text(main.read_text().replace("FLAGS = {", 'FLAGS = {"--copied": "by the copy", '))
    assert "--copied" in run(*console, "train", "--help", cwd=project.root / "tests")
    assert library_of_a_run(project, tmp_path / "with the copy") == copy
    run(*console, "vendor", "--undo", cwd=project.root)
    assert not copy.exists()
    assert library_of_a_run(project, tmp_path / "without") == SOURCE / "boltcutter"


def test_removed_copy_is_kept_elsewhere(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    vendor.vendor_command(project, [])
    (project.root / "src/boltcutter/cli/main.py").write_text("changed")
    vendor.vendor_command(project, ["--undo"])
    moved = Path(capsys.readouterr().out.split()[-1].rstrip("."))
    assert (moved / "boltcutter" / "cli" / "main.py").read_text() == "changed"


def test_clone_of_the_library_is_refused() -> None:
    for arguments in ([], ["callback.guard"], ["--undo"]):
        with pytest.raises(ConfigError, match="repository of the library"):
            vendor.vendor_command(Project.find(ROOT), arguments)


@pytest.mark.parametrize("arguments", [["callback.gaurd"], ["../x"], ["cli.main"], ["--undo"], ["a", "b"]])
def test_mistakes(arguments: list[str], project: Project) -> None:
    with pytest.raises(ConfigError):
        vendor.vendor_command(project, arguments)
    assert not (project.root / "src/boltcutter").exists()
    with pytest.raises(ConfigError, match=r"^--und: no such flag; did you mean --undo\?"):
        vendor.vendor_command(project, ["--und"])


def test_project_is_created_with_a_copy(tmp_path: Path) -> None:
    root = new.new_command(Project.at(tmp_path), ["my-project", f"folder={tmp_path}", "vendor=true"])
    assert (root / "src/boltcutter/configs/train.yaml").is_file()
    code = "import boltcutter, pathlib; print(pathlib.Path(boltcutter.__file__).parent)"
    (root / "scripts" / "train.py").write_text(
        f"from boltcutter.project import Project\nProject.find(__file__).use_vendored_library()\n{code}\n"
    )
    assert run(sys.executable, "scripts/train.py", cwd=tmp_path / "my-project").strip() == str(root / "src/boltcutter")


def test_a_component_is_copied_with_its_script(project: Project) -> None:
    vendor.vendor_command(project, ["strategy.horovod"])
    assert (project.root / "src/my_project/strategy/build_horovod.sh").is_file()
    option = yaml.safe_load((project.root / "configs/trainer/horovod.yaml").read_text())
    assert option["strategy"]["_target_"] == "my_project.strategy.horovod.HorovodStrategy"
    vendor.vendor_command(project, ["strategy.horovod", "--undo"])
    assert not (project.root / "configs/trainer/horovod.yaml").exists()
