import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from new_project import run

from boltcutter.config.errors import ConfigError
from boltcutter.project import SOURCE, Project
from boltcutter_scaffold import new, vendor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.find(new.main(Project.at(tmp_path), ["my-project", f"folder={tmp_path}"]))


@pytest.mark.slow
def test_component_is_used_from_its_copy(project: Project) -> None:
    vendor.main(project, ["callback.guard"])
    assert (project.root / "src/my_project/callback/guard.py").is_file()
    options = yaml.safe_load((project.root / "configs/callback/default.yaml").read_text())
    assert options["guard"]["_target_"] == "my_project.callback.guard.Guard"
    assert options["best"]["_target_"].startswith("boltcutter.")
    run(sys.executable, "scripts/train.py", "--check", cwd=project.root)
    with pytest.raises(ConfigError, match="exists already"):
        vendor.main(project, ["callback.guard"])


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
    with pytest.raises(ConfigError, match="exists already; edit it there, or delete it"):
        vendor.main(project, [])
    for package in copy.parent.glob("boltcutter*"):
        shutil.rmtree(package)
    assert library_of_a_run(project, tmp_path / "without") == SOURCE / "boltcutter"


def test_clone_of_the_library_is_refused() -> None:
    for arguments in ([], ["callback.guard"]):
        with pytest.raises(ConfigError, match="repository of the library"):
            vendor.main(Project.find(ROOT), arguments)


@pytest.mark.parametrize("arguments", [["callback.gaurd"], ["../x"], ["cli.main"], ["--undo"], ["a", "b"]])
def test_mistakes(arguments: list[str], project: Project) -> None:
    with pytest.raises(ConfigError):
        vendor.main(project, arguments)
    assert not (project.root / "src/boltcutter").exists()


def test_project_is_created_with_a_copy(tmp_path: Path) -> None:
    root = new.main(Project.at(tmp_path), ["my-project", f"folder={tmp_path}", "vendor=true"])
    assert (root / "src/boltcutter/configs/train.yaml").is_file()
    code = "import boltcutter, pathlib; print(pathlib.Path(boltcutter.__file__).parent)"
    (root / "scripts" / "train.py").write_text(
        f"from boltcutter.project import Project\nProject.find(__file__).use_vendored_library()\n{code}\n"
    )
    assert run(sys.executable, "scripts/train.py", cwd=tmp_path / "my-project").strip() == str(root / "src/boltcutter")


def test_a_part_and_a_component_of_a_part_are_copied(project: Project) -> None:
    vendor.main(project, ["launch"])
    assert (project.root / "src/boltcutter_launch/slurm.py").is_file()
    assert not (project.root / "src/boltcutter").exists()
    code = "import boltcutter_launch.slurm as found, boltcutter; print(found.__file__, boltcutter.__file__)"
    script = project.root / "scripts" / "train.py"
    script.write_text(
        f"from boltcutter.project import Project\nProject.find(__file__).use_vendored_library()\n{code}\n"
    )
    part, core = run(sys.executable, "scripts/train.py", cwd=project.root).split()
    assert Path(part) == project.root / "src/boltcutter_launch/slurm.py"
    assert Path(core) == SOURCE / "boltcutter/__init__.py"
    vendor.main(project, ["parallel.horovod"])
    assert (project.root / "src/my_project/parallel/build_horovod.sh").is_file()
    option = yaml.safe_load((project.root / "configs/trainer/horovod.yaml").read_text())
    assert option["strategy"]["_target_"] == "my_project.parallel.horovod.HorovodStrategy"
    with pytest.raises(ConfigError, match=r"horovod\.py exists already; edit it there, or delete it"):
        vendor.main(project, ["parallel.horovod"])


def test_with_a_copy_of_the_core_the_installed_parts_stay(project: Project) -> None:
    vendor.main(project, ["core"])
    code = "import boltcutter_launch as part, boltcutter as core; print(part.__file__, core.__file__)"
    script = project.root / "scripts" / "train.py"
    script.write_text(
        "from boltcutter.project import Project\nProject.find(__file__).use_vendored_library()\n"
        f"from boltcutter import extend\n{code}\nprint(*extend.added('commands'))\n"
    )
    part, core, *commands = run(sys.executable, "scripts/train.py", cwd=project.root).split()
    assert Path(part) == SOURCE / "boltcutter_launch/__init__.py"
    assert Path(core) == project.root / "src/boltcutter/__init__.py"
    assert {"launch", "search", "export", "new"} <= {*commands}
